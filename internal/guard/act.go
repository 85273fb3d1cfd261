// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
)

// offenceHandler acts on offences: it reports them, ends containers and evicts pods. It works in
// goroutines of its own, so that looks go on meanwhile.
type offenceHandler struct {
	*reaper
	endings      *endings
	driver       Driver
	cluster      Cluster // nil if there is no API server
	observer     Observer
	endIntruders bool
	evictAfter   int

	// found counts the intruders that were found, kills the containers that were ended.
	found, kills atomic.Uint64

	mu sync.Mutex
	// Guarded by mu:
	ending   map[string]bool // IDs of the containers that are being ended
	ended    map[string]bool // IDs of those that were ended and are still listed
	offences memcap.Offences
}

// forget drops the notes on containers that are no longer listed.
func (h *offenceHandler) forget(listed map[string]*node.Container) {
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.ended, func(id string, _ bool) bool { return listed[id] == nil })
	h.endings.forget(listed)
}

// lasts reports whether a container that is over its cap still is at two more looks. By one
// request, a memory pool may be over for some milliseconds before the library undoes it. A program
// at the edge of its cap does so again and again, and two looks may both fall into such a moment.
// The container's own counters do not matter here, since the container writes them. If the driver
// does not answer, lasts returns false.
func (h *offenceHandler) lasts(ctx context.Context, u gpu.UUID, v memcap.Verdict) bool {
	for range 2 {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(recheckAfter):
		}
		dctx, cancel := context.WithTimeout(ctx, driverTimeout)
		listed, err := h.driver.Processes(dctx, u)
		cancel()
		if err != nil || !v.Lasts(memcap.Merge(listed)) {
			return false
		}
	}
	return true
}

// act reports a confirmed offence, and ends the offender in the background, since a runtime may
// take its time.
func (h *offenceHandler) act(
	ctx context.Context, d *gpu.Device, c *node.Container, v memcap.Verdict, owners map[int]node.Owner,
) {
	who := who(c)
	where := fmt.Sprintf("GPU %d (%s)", d.Index, d.UUID)
	reason, message := overReason, fmt.Sprintf("%s uses %s of %s, more than its cap of %s",
		who, amount(v.Used), where, amount(v.Cap))
	if v.Own < v.Used && v.Kind == memcap.Over {
		message = fmt.Sprintf("%s uses %s of %s, and together with the others that share its allocation %s, "+
			"more than their cap of %s", who, amount(v.Own), where, amount(v.Used), amount(v.Cap))
	}
	end := true
	if v.Kind == memcap.Intruder {
		reason, message = intruderReason, fmt.Sprintf("%s uses %s of %s without an allocation on it",
			who, amount(v.Used), where)
		if v.What != "" {
			message = fmt.Sprintf("%s: process %v on %s %s", who, pids(v.Processes), where, v.What)
		}
		end = h.endIntruders
		if v.Told == 0 {
			h.found.Add(1)
		}
	}
	if end {
		message += "; it is ended"
	}
	if v.Told == 0 {
		h.log.Warn("a container offends", "what", message, "reason", reason, "container", v.Container,
			"processes", pids(v.Processes), "since", time.Since(v.First).Round(time.Millisecond).String())
		h.tell(c, agentkube.Warning, reason, message)
	}
	if !end {
		return
	}
	h.mu.Lock()
	busy := h.ending[v.Container]
	h.ending[v.Container] = true
	h.mu.Unlock()
	if busy {
		return
	}
	go func() {
		defer func() {
			h.mu.Lock()
			delete(h.ending, v.Container)
			h.mu.Unlock()
		}()
		h.end(ctx, c, v, owners)
	}()
}

// who names a container to people.
func who(c *node.Container) string {
	if c.Name == "" {
		return fmt.Sprintf("a container of pod %s/%s that the container runtime does not list", c.Namespace, c.Pod)
	}
	return fmt.Sprintf("container %s of pod %s/%s", c.Name, c.Namespace, c.Pod)
}

// end ends a container for an offence, if the processes that are the evidence are still in it.
func (h *offenceHandler) end(ctx context.Context, c *node.Container, v memcap.Verdict, owners map[int]node.Owner) {
	var owner node.Owner
	stands := v.Stands(func(p memcap.Process) bool {
		now, err := h.proc.Container(p.PID)
		same := err == nil && now.ID == p.Container && now.Start == p.Start && now == owners[p.PID]
		if same && now.ID == v.Container {
			owner = now
		}
		return same
	})
	if !stands || owner.ID == "" {
		h.log.ration.Log(slog.LevelInfo, "an offender has changed its processes meanwhile; it is judged anew",
			[]any{"container", v.Container, "pod", c.Namespace + "/" + c.Pod})
		return
	}
	how, err := h.reaper.end(ctx, owner, who(c))
	if errors.Is(err, gpu.ErrNotFound) && c.Name != "" { // the same error for an unlisted one
		h.log.Info("an offender has ended by itself", "container", v.Container, "pod", c.Namespace+"/"+c.Pod)
		return
	}
	if err != nil {
		h.log.ration.Log(slog.LevelError, "cannot end a container",
			[]any{"container", v.Container, "pod", c.Namespace + "/" + c.Pod}, "err", err)
		return
	}
	// A process with much memory takes seconds to end, so the guard tells the runtime again at
	// every look. It counts the container once: an ended container does not come back.
	h.mu.Lock()
	again := h.ended[v.Container]
	h.ended[v.Container] = true
	h.mu.Unlock()
	if again {
		return
	}
	after := time.Since(v.First)
	h.observer.Ended(End{
		Kind: v.Kind, Pod: c.InPod(), Container: c.Name, GPU: v.GPU, Used: v.Used, Cap: v.Cap, After: after,
	})
	h.log.Warn("ended a container", "container", v.Container, "pod", c.Namespace+"/"+c.Pod, "name", c.Name,
		"for", string(v.Kind), "how", how, "after", after.Round(time.Millisecond).String())
	h.kills.Add(1)
	h.mu.Lock()
	offences := h.offences.Add(c.PodUID, time.Now())
	h.mu.Unlock()
	if h.evictAfter > 0 && offences >= h.evictAfter && h.cluster != nil {
		h.evict(ctx, c, offences)
	}
}

// evict asks the API server to evict a pod that offends again and again. The pod's clients of MPS have
// its grace period to end by themselves, and are detached shortly before the kubelet kills them.
func (h *offenceHandler) evict(ctx context.Context, c *node.Container, offences int) {
	kctx, cancel := context.WithTimeout(ctx, kubeTimeout)
	defer cancel()
	pod := c.InPod()
	if c.Grace <= detachBefore {
		h.detach(kctx, pod.String(), h.inPod(c.PodUID))
	}
	if err := h.cluster.Evict(kctx, pod); err != nil {
		h.log.Error("cannot evict a pod that offends again and again",
			"pod", pod.String(), "offences", offences, "err", err)
		return
	}
	if c.Grace > detachBefore {
		h.endings.note(ctx, pod, time.Now().Add(c.Grace), false)
	}
	h.observer.Evicted(pod, offences)
	message := fmt.Sprintf("evicted after %d offences within an hour: "+
		"use beyond its GPU memory cap, or of a GPU without an allocation", offences)
	h.log.Warn("evicted a pod", "pod", pod.String(), "offences", offences)
	h.tell(c, agentkube.Warning, evictedReason, message)
}

// tell sends an Event about a container's pod.
func (h *offenceHandler) tell(c *node.Container, kind agentkube.EventType, reason, message string) {
	if h.cluster != nil {
		h.cluster.Event(c.InPod(), kind, reason, message)
	}
}

// tellNode sends an Event about the node, for use if the pod is not known.
func (h *offenceHandler) tellNode(kind agentkube.EventType, reason, message string) {
	if h.cluster != nil {
		h.cluster.Event(workload.Pod{}, kind, reason, message)
	}
}

func (h *offenceHandler) counts() (found, kills uint64) { return h.found.Load(), h.kills.Load() }

// pids returns the PIDs of the first 20 processes: a container may have thousands.
func pids(list []memcap.Process) []int {
	out := make([]int, min(len(list), 20))
	for i := range out {
		out[i] = list[i].PID
	}
	return out
}

// amount returns bytes as text, in GiB.
func amount(n uint64) string { return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30)) }
