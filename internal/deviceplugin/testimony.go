// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
)

// renewals records which lists were sent again so that the kubelet writes its checkpoint anew.
type renewals struct {
	// resent is when each resource's list was last sent again. stale has the keys that were the
	// reason, joined by spaces.
	resent map[string]time.Time
	stale  map[string]string
}

// due returns the resources whose lists have to be sent again for these keys, and records that.
func (r *renewals) due(stale map[string][]string, now time.Time) (due []string) {
	// Forget resources that are not stale now: they may become stale again with the same keys.
	maps.DeleteFunc(r.stale, func(resource, _ string) bool { return stale[resource] == nil })
	for _, resource := range slices.Sorted(maps.Keys(stale)) {
		keys := strings.Join(stale[resource], " ")
		if r.stale[resource] == keys && now.Sub(r.resent[resource]) < resendEvery {
			continue // sent already, without effect
		}
		r.stale[resource], r.resent[resource] = keys, now
		due = append(due, resource)
	}
	return due
}

// podNames has the names of the pods in the last checkpoint.
type podNames struct {
	of    map[string]workload.Pod // by UID
	asked time.Time               // when the runtime was last asked for them
}

// find returns the names of the pods whose UIDs are in the checkpoint. It calls more if some are
// missing.
func (p *podNames) find(
	t *Observation, containers []node.Container, more func() (map[string]workload.Pod, bool),
) map[string]workload.Pod {
	names := map[string]workload.Pod{}
	for i := range containers {
		names[containers[i].PodUID] = containers[i].InPod()
	}
	missing := false
	for i := range t.Entries {
		uid := t.Entries[i].PodUID
		if _, ok := names[uid]; ok {
			continue
		}
		if old, ok := p.of[uid]; ok {
			names[uid] = old
		} else {
			missing = true
		}
	}
	if missing {
		if pods, ok := more(); ok {
			for uid, pod := range pods {
				if _, ok := names[uid]; !ok {
					names[uid] = pod
				}
			}
		}
	}
	maps.DeleteFunc(names, func(uid string, _ workload.Pod) bool {
		return !slices.ContainsFunc(t.Entries, func(e node.Entry) bool { return e.PodUID == uid })
	})
	p.of = names
	return names
}

// ask asks the runtime for the names of pods, unless it did so within the last namesEvery.
func (p *podNames) ask(ctx context.Context, r Runtime, now time.Time) (map[string]workload.Pod, bool) {
	if now.Sub(p.asked) < namesEvery {
		return nil, false
	}
	p.asked = now
	pods, err := r.Pods(ctx)
	return pods, err == nil
}

// users has the containers that have allocations.
type users struct {
	// of maps an allocation's ID to its containers, the oldest first. asked is when the runtime was
	// asked. unsure is true if there may be more containers than these.
	of     map[string][]ledger.Holder
	asked  time.Time
	unsure bool
}

// usersOf returns the users of an observation. containers is the runtime's answer in it.
func usersOf(t *Observation, containers []node.Container) users {
	out := users{
		of: make(map[string][]ledger.Holder, len(t.Uses)), asked: t.Asked,
		unsure: slices.ContainsFunc(containers, func(c node.Container) bool { return c.CDIUnknown }),
	}
	for _, u := range t.Uses {
		u.Since = u.Created
		out.of[u.Key] = append(out.of[u.Key], u.Holder)
	}
	for _, all := range out.of {
		slices.SortStableFunc(all, func(a, b ledger.Holder) int { return a.Since.Compare(b.Since) })
	}
	return out
}

// silence tracks witnesses that do not answer.
type silence struct {
	since time.Time // zero while both answer
	err   error     // the failures of the last call; nil if both answered
}

// note records which witness has not answered, and returns an error after SilentFor. held is true
// if any device is held.
func (s *silence) note(asked time.Time, full, held bool, log *slog.Logger) error {
	switch {
	case s.err == nil && !full && !s.since.IsZero():
		// Only some were asked. The silent one may still be silent.
	case s.err == nil || !held: // nothing is held, or both answer
		if !s.since.IsZero() {
			log.Info("the kubelet and the container runtime answer again",
				"after", asked.Sub(s.since).Round(time.Millisecond).String())
		}
		s.since = time.Time{}
		return nil
	case s.since.IsZero():
		s.since = asked
		log.Warn("the kubelet or the container runtime does not answer; allocations stay as they are", "err", s.err)
	}
	if s.err == nil || asked.Sub(s.since) < SilentFor {
		return nil
	}
	return status.Because(status.HoldersUnknown, fmt.Errorf("%w (allocations stay as they are)", s.err))
}

// endings records when containers with allocations ended, by allocation ID, and when the kubelet
// last freed a device. The log has how long each step took.
type endings struct {
	mu sync.Mutex
	// Guarded by mu:
	ended map[string]time.Time
	freed time.Time
}

func (e *endings) add(key string, at time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended == nil {
		e.ended = map[string]time.Time{}
	}
	maps.DeleteFunc(e.ended, func(_ string, was time.Time) bool { return at.Sub(was) > endingsKept })
	e.ended[key] = at
}

func (e *endings) release(at time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.freed = at
}

// anyOf reports whether an allocation whose container has just ended is still listed.
func (e *endings) anyOf(listed []node.Holding, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.ContainsFunc(listed, func(h node.Holding) bool {
		at, ok := e.ended[cdi.Key(h.Resource, h.IDs)]
		return ok && now.Sub(at) < releaseWatch
	})
}

// since returns how long ago an allocation's container ended, and how long ago the kubelet freed a
// device. Each is "unseen" if no report of it came.
func (e *endings) since(key string, now time.Time) (container, release string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	container, release = "unseen", "unseen"
	if at, ok := e.ended[key]; ok {
		container = now.Sub(at).Round(time.Millisecond).String()
		if e.freed.After(at) {
			release = now.Sub(e.freed).Round(time.Millisecond).String()
		}
	}
	return container, release
}
