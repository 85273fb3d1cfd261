// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// witnesses is what the loop remembers of them from one asking to the next.
type witnesses struct {
	// at is when they were last asked in full.
	at time.Time
	// heard says that both have answered since the start: from then on files of
	// which nobody knows may go.
	heard bool
	// checkpoint is the last one read: it is parsed once for each writing.
	checkpoint node.Checkpoint
	// names of pods by UID, of those in the last checkpoint; asked is when the
	// runtime was last asked for them.
	names map[string]ledger.Holder
	asked time.Time
	// resent is when each resource's list was last sent again to have the
	// checkpoint written, and stale the keys that it was for.
	resent map[string]time.Time
	stale  map[string]string
	// used are the claims that containers have.
	used map[string]bool
	// silent is since when a witness has not answered, zero while both do. err is
	// who did not when they were last asked.
	silent time.Time
	err    error
}

// ask asks the witnesses. In full means PodResources too, which makes the kubelet
// let go of what ended pods have, and a checkpoint that is written again where
// it looks stale; else the checkpoint and the runtime are asked as they are. The
// error says who did not answer; the testimony is good for the rest.
func (a *Agent) ask(ctx context.Context, full bool) (deviceplugin.Observation, error) {
	t := deviceplugin.Observation{Asked: time.Now()}
	var errs []error
	var listing node.Listing
	if full {
		a.seen.at = t.Asked
		var err error
		cctx, cancel := context.WithTimeout(ctx, kubeletPatience)
		listing, err = a.kubelet.List(cctx)
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("ask the kubelet who holds devices: %w", err))
		} else {
			t.Listed, t.List, t.Trusted = a.ours(&listing), true, a.trusted(&listing)
			a.listed.Store(&t.Listed)
		}
	}
	cctx, cancel := context.WithTimeout(ctx, runtimePatience)
	defer cancel()
	containers, err := a.runtime.Containers(cctx)
	if t.Runtime = err == nil; err != nil {
		errs = append(errs, fmt.Errorf("ask the container runtime what runs: %w", err))
	}
	if t.Runtime && !a.knowsUs(containers) {
		t.Runtime, containers = false, nil
		errs = append(errs, fmt.Errorf("ask the container runtime what runs: %w", a.strangerError()))
	}
	t.Uses = a.uses(containers)
	// After the runtime: then it has an entry for every pod that has a container.
	if err := a.readCheckpoint(&t); err != nil {
		errs = append(errs, err)
	} else if full && t.Trusted && t.Runtime {
		if a.renewCheckpoint(ctx, &t, containers) {
			if err := a.readCheckpoint(&t); err != nil {
				errs = append(errs, err)
			}
		}
	}
	t.Pods = a.podNames(cctx, &t, containers, full)
	if t.Runtime {
		a.seen.used = map[string]bool{}
		for _, u := range t.Uses {
			a.seen.used[u.Key] = true
		}
	}
	a.seen.heard = a.seen.heard || full && t.Runtime && (t.Checkpoint || t.Trusted)
	return t, errors.Join(errs...)
}

// owns reports whether a resource is ours: one that this node offers, or one that a
// claim is of, since the names can have changed (--resource-domain).
func (a *Agent) owns(resource string) bool {
	_, ok := a.names.Kind(resource)
	return ok || slices.ContainsFunc(a.ledger.Allocations(), func(c ledger.Allocation) bool { return c.Resource == resource })
}

// ours keeps the holdings of our own resources.
func (a *Agent) ours(l *node.Listing) []deviceplugin.Holding {
	var out []deviceplugin.Holding
	for _, h := range l.Holdings {
		if a.owns(h.Resource) {
			out = append(out, deviceplugin.Holding{
				Holder:   ledger.Holder{Namespace: h.Namespace, Pod: h.Pod, Container: h.Container},
				Resource: h.Resource, IDs: h.IDs,
			})
		}
	}
	return out
}

// trusted says whether a listing knows the node's pods.
func (a *Agent) trusted(l *node.Listing) bool {
	if a.opts.Pod == (node.PodName{}) {
		return len(l.Pods) > 0
	}
	return l.Has(a.opts.Pod.Namespace, a.opts.Pod.Name)
}

// knowsUs says whether these are the containers of the kubelet's runtime: a node
// may have another one beside it, whose empty list would be taken for good news.
func (a *Agent) knowsUs(containers []node.Container) bool {
	return a.opts.Pod == (node.PodName{}) || slices.ContainsFunc(containers, func(c node.Container) bool {
		return c.Namespace == a.opts.Pod.Namespace && c.Pod == a.opts.Pod.Name
	})
}

// strangerError says that the runtime is not the kubelet's.
func (a *Agent) strangerError() error {
	return fmt.Errorf("it does not know the agent's own pod %s/%s, so it is not the kubelet's; name that one with --runtime-endpoint",
		a.opts.Pod.Namespace, a.opts.Pod.Name)
}

// uses finds the claims in the annotations that Allocate gave to containers. No
// tenant can write those: a pod's own are on its sandbox.
func (a *Agent) uses(containers []node.Container) []deviceplugin.Use {
	prefix := cdi.AnnotationName(a.opts.Domain, "")
	var out []deviceplugin.Use
	for i := range containers {
		c := &containers[i]
		for _, name := range sortedKeys(c.Annotations) {
			key, ok := strings.CutPrefix(name, prefix)
			if !ok || !cdi.ValidKey(key) {
				continue
			}
			out = append(out, deviceplugin.Use{ID: c.ID, Key: key, Created: c.Created, Record: c.Annotations[name],
				Holder: ledger.Holder{Namespace: c.Namespace, Pod: c.Pod, Container: c.Name, PodUID: c.PodUID}})
		}
	}
	return out
}

// checkpoint returns the kubelet's, parsed once for each writing, and with an error the
// last that could be read. It is empty, and ok false, where no kubelet has written one.
func (a *Agent) checkpoint() (cp *node.Checkpoint, ok bool, err error) {
	if stamp := a.kubelet.Stamp(); stamp == (node.Stamp{}) || stamp != a.seen.checkpoint.Stamp {
		cp, err := a.kubelet.Checkpoint()
		if errors.Is(err, gpu.ErrNotFound) {
			a.seen.checkpoint = node.Checkpoint{}
			return &a.seen.checkpoint, false, nil // a kubelet that never gave anything out
		}
		if err != nil {
			return &a.seen.checkpoint, true, fmt.Errorf("read the kubelet's checkpoint: %w", err)
		}
		a.seen.checkpoint = cp
	}
	return &a.seen.checkpoint, true, nil
}

// readCheckpoint puts the kubelet's checkpoint into a testimony.
func (a *Agent) readCheckpoint(t *deviceplugin.Observation) error {
	t.Checkpoint, t.Entries = false, nil
	cp, ok, err := a.checkpoint()
	if err != nil || !ok {
		return err
	}
	t.Checkpoint = true
	for _, e := range cp.Entries {
		if a.owns(e.Resource) {
			t.Entries = append(t.Entries, deviceplugin.Entry(e))
		}
	}
	return nil
}

// renewCheckpoint has the kubelet write its checkpoint again where it names
// holders that neither PodResources nor the runtime knows: it is written when a
// container is given devices and when a list arrives, not when a pod ends. It
// reports whether there is a newer one.
func (a *Agent) renewCheckpoint(ctx context.Context, t *deviceplugin.Observation, containers []node.Container) bool {
	known := map[string]bool{}
	for i := range t.Uses {
		known[t.Uses[i].Key] = true
	}
	for i := range t.Listed {
		known[cdi.Key(t.Listed[i].Resource, t.Listed[i].IDs)] = true
	}
	alive := map[string]bool{} // by UID: a new pod may have the name of the one before
	for i := range containers {
		alive[containers[i].PodUID] = true
	}
	stale := map[string][]string{}
	for i := range t.Entries {
		e := &t.Entries[i]
		// An init container that has ended is in no list, and its pod is alive.
		if key := cdi.Key(e.Resource, e.IDs); !known[key] && !alive[e.PodUID] {
			stale[e.Resource] = append(stale[e.Resource], key)
		}
	}
	// What was stale and is not any more may become so again, in the same words.
	maps.DeleteFunc(a.seen.stale, func(resource, _ string) bool { return stale[resource] == nil })
	before := a.kubelet.Stamp()
	asked := false
	for _, resource := range sortedKeys(stale) {
		keys := strings.Join(stale[resource], " ")
		if a.seen.stale[resource] == keys && t.Asked.Sub(a.seen.resent[resource]) < resendEvery {
			continue // it was asked for, and this is what came
		}
		a.seen.stale[resource], a.seen.resent[resource] = keys, t.Asked
		a.front.Resend(resource)
		asked = true
	}
	for waited := time.Duration(0); asked && waited < renewPatience && ctx.Err() == nil; waited += renewLook {
		time.Sleep(renewLook)
		if a.kubelet.Stamp() != before {
			return true
		}
	}
	return false
}

// podNames finds the names of the pods that the checkpoint knows by UID.
func (a *Agent) podNames(ctx context.Context, t *deviceplugin.Observation, containers []node.Container, full bool) map[string]ledger.Holder {
	names := map[string]ledger.Holder{}
	for i := range containers {
		names[containers[i].PodUID] = ledger.Holder{Namespace: containers[i].Namespace, Pod: containers[i].Pod}
	}
	missing := false
	for i := range t.Entries {
		uid := t.Entries[i].PodUID
		if _, ok := names[uid]; ok {
			continue
		}
		if old, ok := a.seen.names[uid]; ok {
			names[uid] = old
		} else {
			missing = true
		}
	}
	if missing && full && t.Asked.Sub(a.seen.asked) >= namesEvery {
		a.seen.asked = t.Asked
		if pods, err := a.runtime.Pods(ctx); err == nil {
			for uid, p := range pods {
				if _, ok := names[uid]; !ok {
					names[uid] = ledger.Holder{Namespace: p.Namespace, Pod: p.Name}
				}
			}
		}
	}
	maps.DeleteFunc(names, func(uid string, _ ledger.Holder) bool {
		return !slices.ContainsFunc(t.Entries, func(e deviceplugin.Entry) bool { return e.PodUID == uid })
	})
	a.seen.names = names
	return names
}

// reconcile asks the witnesses and moves the claims along. The error says who has
// not answered for so long that people should know; a restart of the kubelet or of
// the runtime is no news.
func (a *Agent) reconcile(ctx context.Context, full bool) error {
	t, err := a.ask(ctx, full)
	a.seen.err = err
	for _, c := range a.front.Reconcile(t) {
		if a.names.Ours(c.Resource) {
			a.layouts.linger(&c)
			if c.Kind() == ledger.Placement { // look what is on the instance: it may be wanted for something else
				a.reader.stale.Store(true)
			}
		}
		container, release := a.ends.since(c.ID, time.Now())
		a.log.Info("claim ended", "claim", c.ID, "resource", c.Resource, "devices", len(deviceplugin.IDs(c.Grants)), "pod", c.Holder.String(),
			"after_container", container, "after_release", release)
	}
	switch {
	case err == nil && !full && !a.seen.silent.IsZero():
		// Not everybody has been asked: who was silent may be so still.
	case err == nil || !a.ledger.Held(): // nobody to judge
		if !a.seen.silent.IsZero() {
			a.log.Info("the witnesses answer again", "after", t.Asked.Sub(a.seen.silent).Round(time.Millisecond).String())
		}
		a.seen.silent = time.Time{}
		return nil
	case a.seen.silent.IsZero():
		a.seen.silent = t.Asked
		a.log.Warn("a witness does not answer; claims stay as they are", "err", err)
	}
	if err == nil || t.Asked.Sub(a.seen.silent) < silentFor {
		return nil
	}
	return status.Because(status.HoldersUnknown, fmt.Errorf("%w (claims stay as they are)", err))
}

// LookAtCheckpoint is for whoever has seen something change in the kubelet's
// directory.
func (a *Agent) LookAtCheckpoint() { a.others.lookAtCheckpoint() }

// followRuntime hears of containers that start and end, and at their end watches for the kubelet
// to let go of their devices. Where the runtime cannot tell, the tick must do.
func (a *Agent) followRuntime(ctx context.Context) error {
	var missed time.Time
	err := a.runtime.Events(ctx, func(e node.ContainerEvent) {
		ours := false
		if e.Kind == node.EventMissed && time.Since(missed) >= holdersSoon {
			missed = time.Now()
			ours = true // something of ours may have ended; a runtime may say so again and again
		}
		for _, u := range a.uses([]node.Container{e.Container}) {
			switch e.Kind {
			case node.EventStarted: // who has the claim can be said now
				a.front.Seen(u, time.Now())
				a.nameSoon.Store(true)
				a.wake()
			case node.EventStopped:
				a.front.Seen(u, time.Now())
				a.ends.add(u.Key, time.Now())
				ours = true
			}
		}
		if !ours {
			return
		}
		a.askSoon.Store(true)
		a.wake()
		poke(a.ended)
	})
	if ctx.Err() == nil {
		a.log.Warn("container events cannot be followed; the end of containers is seen at the next look", "err", err, "every", holdersEvery.String())
		<-ctx.Done()
	}
	return ctx.Err()
}

// awaitReleases asks the kubelet often, for a while after a container of ours has
// ended, and wakes the loop when it lists something else.
func (a *Agent) awaitReleases(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.ended:
		}
		looks := wait.Backoff{Duration: releaseLook, Factor: 1.125, Cap: releaseLookMost, Steps: math.MaxInt}
		pause := looks
		for until := time.Now().Add(releaseWatch); time.Now().Before(until); {
			cctx, cancel := context.WithTimeout(ctx, kubeletPatience)
			l, err := a.kubelet.List(cctx)
			cancel()
			now := a.ours(&l)
			if err == nil && !a.ends.anyOf(now, time.Now()) {
				until = time.Time{} // nothing that has ended is listed
			}
			if known := a.listed.Load(); err == nil && (known == nil || !sameHoldings(*known, now)) {
				a.listed.Store(&now)
				a.ends.release(time.Now())
				a.askSoon.Store(true)
				a.wake()
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-a.ended:
				until, pause = time.Now().Add(releaseWatch), looks
			case <-time.After(pause.Step()):
			}
			if until.IsZero() {
				break
			}
		}
	}
}

func sameHoldings(a, b []deviceplugin.Holding) bool {
	return slices.EqualFunc(a, b, func(x, y deviceplugin.Holding) bool {
		return x.Holder == y.Holder && x.Resource == y.Resource && slices.Equal(x.IDs, y.IDs)
	})
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
