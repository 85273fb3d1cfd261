// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// How often kubelet and runtime are asked, and how long they may take.
const (
	// LookEvery is how often they are asked who holds what, while anybody does; the
	// device-plugin API has no word for "freed". LookSoon is the same while something
	// waits for a holder to end.
	LookEvery = 8 * time.Second
	LookSoon  = time.Second
	// KubeletPatience and RuntimePatience bound one question.
	KubeletPatience = 2 * time.Second
	RuntimePatience = 4 * time.Second
	// SilentFor is how long one of them may be away before the node says so.
	SilentFor = 30 * time.Second
	// releaseWatch is how long after a container's end the kubelet is asked, every
	// releaseLook, whether it has let go: it looks at its containers every second.
	// The pause grows to releaseLookMost.
	releaseWatch    = 5 * time.Second
	releaseLook     = 50 * time.Millisecond
	releaseLookMost = 250 * time.Millisecond
	// resendEvery is how often the same entries have the kubelet write its
	// checkpoint again; renewPatience is how long that may take.
	resendEvery   = 30 * time.Second
	renewPatience = 100 * time.Millisecond
	renewLook     = 2 * time.Millisecond
	// namesEvery is how often the runtime is asked for names of pods that have
	// none.
	namesEvery = 10 * time.Second
	// endingsKept is how long the end of a container is remembered.
	endingsKept = 10 * time.Minute
)

// Kubelet is the first witness. internal/node has it.
type Kubelet interface {
	// List is who holds what, by the PodResources service. It makes the kubelet
	// let go of the devices of pods that have ended.
	List(context.Context) (node.Listing, error)
	// Checkpoint is the kubelet's own file, and Stamp tells one writing of it
	// from the next.
	Checkpoint() (node.Checkpoint, error)
	Stamp() node.Stamp
}

// Runtime is the second witness. internal/node has it.
type Runtime interface {
	// Containers are those that have been created and have not ended.
	Containers(context.Context) ([]node.Container, error)
	// Pods has the names of pods that have a sandbox, by UID: also of those without
	// a container yet.
	Pods(context.Context) (map[string]workload.Pod, error)
	// Events blocks and calls back until ctx ends, also where the runtime has no
	// events.
	Events(context.Context, func(node.ContainerEvent)) error
}

// accounts are the allocations that the witnesses move along, and what they ask of the
// kubelet's side. [FrontEnd] has them.
type accounts interface {
	Reconcile(Observation) (ended []ledger.Allocation)
	Seen(u Use, now time.Time)
	Booking() bool
	Resend(resource string)
}

// Witnesses are the kubelet and the container runtime, who know together what a
// front-end's allocations have become. Look, and what follows from it, is for one
// goroutine; Follow and AwaitReleases have one each.
type Witnesses struct {
	opts     WitnessOptions
	accounts accounts
	ledger   *ledger.Ledger
	kubelet  Kubelet
	runtime  Runtime
	names    *Names
	// wake has a look come.
	wake func()

	// askSoon says that they are to be asked in full, nameSoon that a container of ours
	// has started.
	askSoon, nameSoon atomic.Bool
	// ended wakes AwaitReleases; it holds at most one token.
	ended chan struct{}
	// listed is what PodResources said last.
	listed atomic.Pointer[[]node.Holding]
	ends   endings

	// The rest belongs to the goroutine of Look.

	// at is when they were last asked in full, and postponed says that the last look should
	// have done so.
	at        time.Time
	postponed bool
	// heard says that both have answered since the start.
	heard bool
	// checkpoint is the last one read: it is parsed once for each writing.
	checkpoint node.Checkpoint
	pods       podNames
	renewals   renewals
	users      users
	silence    silence
}

// WitnessOptions are those of Witnesses.
type WitnessOptions struct {
	// Domain names the annotations of containers.
	Domain string
	// Pod is the agent's own. A listing that lacks it is not believed when it
	// comes to ending allocations. Empty outside a pod: then any listing that names
	// some pod is believed.
	Pod workload.Pod
	Log *slog.Logger
}

// NewWitnesses returns the witnesses of a front-end's allocations, not asked yet.
func NewWitnesses(o WitnessOptions, f *FrontEnd, names *Names, k Kubelet, r Runtime, wake func()) *Witnesses {
	return &Witnesses{
		opts: o, accounts: f, ledger: f.ledger, names: names, kubelet: k, runtime: r, wake: wake,
		ended:    make(chan struct{}, 1),
		renewals: renewals{resent: map[string]time.Time{}, stale: map[string]string{}},
	}
}

// Heard reports whether both have answered since the start. Until then, what nobody has
// named may still be held.
func (w *Witnesses) Heard() bool { return w.heard }

// Err is who did not answer when they were last asked, and why.
func (w *Witnesses) Err() error { return w.silence.err }

// Used reports whether a container has an allocation, or may have any: the runtime has not
// said what it was created with.
func (w *Witnesses) Used(id string) bool {
	_, used := w.users.of[id]
	return used || w.users.unsure
}

// Holders are the containers that have allocations, the first one in front, by the
// allocation's ID, whatever front-end's it is, and when the runtime was asked; sure says
// that there are no others.
func (w *Witnesses) Holders() (holders map[string][]ledger.Holder, asked time.Time, sure bool) {
	return w.users.of, w.users.asked, !w.users.unsure
}

// Due says whether they are to be asked in full: at once where something is to be taken
// away or one of our containers has ended, and else after a while, which is shorter
// where somebody waits for a holder to end.
func (w *Witnesses) Due(now, waits bool, at time.Time) bool {
	if w.askSoon.Swap(false) || now || w.at.IsZero() {
		return true
	}
	every, ever := w.every(waits)
	return ever && at.Sub(w.at) >= every
}

// every is how often they are to be asked in full; it is false where nothing is held.
func (w *Witnesses) every(waits bool) (time.Duration, bool) {
	switch {
	case !w.silence.since.IsZero():
		return LookSoon, true
	case !w.heard:
		return LookEvery, true
	case waits:
		return LookSoon, true
	default:
		return LookEvery, w.ledger.Held()
	}
}

// Next is how long from at they need not be asked in full, if anything is to be asked.
func (w *Witnesses) Next(waits bool, at time.Time) (time.Duration, bool) {
	every, ever := w.every(waits)
	return every - at.Sub(w.at), ever && !w.at.IsZero()
}

// Ask has them asked in full at the next look, which it wakes.
func (w *Witnesses) Ask() {
	w.askSoon.Store(true)
	w.wake()
}

// Started reports, once, that a container of ours has started since the last look, so
// that its holder can be named.
func (w *Witnesses) Started() bool { return w.nameSoon.Swap(false) }

// ask asks the witnesses. In full means PodResources too, which makes the kubelet
// let go of what ended pods have, and a checkpoint that is written again where
// it looks stale; else the checkpoint and the runtime are asked as they are. The
// error says who did not answer; the testimony is good for the rest.
func (w *Witnesses) ask(ctx context.Context, full bool) (Observation, error) {
	t := Observation{Asked: time.Now()}
	var errs []error
	var listing node.Listing
	if full {
		w.at = t.Asked
		var err error
		cctx, cancel := context.WithTimeout(ctx, KubeletPatience)
		listing, err = w.kubelet.List(cctx)
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("ask the kubelet who holds devices: %w", err))
		} else {
			t.Listed, t.List, t.Trusted = w.ours(listing.Holdings), true, w.Trusted(&listing)
			w.listed.Store(&t.Listed)
		}
	}
	cctx, cancel := context.WithTimeout(ctx, RuntimePatience)
	defer cancel()
	containers, err := w.runtime.Containers(cctx)
	if t.Runtime = err == nil; err != nil {
		errs = append(errs, fmt.Errorf("ask the container runtime what runs: %w", err))
	}
	if t.Runtime && !w.Knows(containers) {
		t.Runtime, containers = false, nil
		errs = append(errs, fmt.Errorf("ask the container runtime what runs: %w", w.Stranger()))
	}
	t.Uses, t.Began = w.uses(containers), oldest(containers)
	// After the runtime: then it has an entry for every pod that has a container.
	if err := w.readCheckpoint(&t); err != nil {
		errs = append(errs, err)
	} else if full && t.Trusted && t.Runtime {
		if w.renewCheckpoint(ctx, &t, containers) {
			if err := w.readCheckpoint(&t); err != nil {
				errs = append(errs, err)
			}
		}
	}
	t.Pods = w.pods.find(&t, containers, func() (map[string]workload.Pod, bool) {
		if !full {
			return nil, false
		}
		return w.pods.ask(cctx, w.runtime, t.Asked)
	})
	if t.Runtime {
		w.users = usersOf(&t, containers)
	}
	w.heard = w.heard || full && t.Runtime && (t.Checkpoint || t.Trusted)
	return t, errors.Join(errs...)
}

// Owns reports whether a resource is ours: one that this node offers, or one that a
// allocation is of, since the names can have changed (--resource-domain).
func (w *Witnesses) Owns(resource string) bool {
	_, ok := w.names.Kind(resource)
	return ok || slices.ContainsFunc(w.ledger.Allocations(), func(a ledger.Allocation) bool {
		return a.Resource == resource
	})
}

// ours keeps the holdings of our own resources.
func (w *Witnesses) ours(of []node.Holding) []node.Holding {
	return slices.DeleteFunc(slices.Clone(of), func(h node.Holding) bool { return !w.Owns(h.Resource) })
}

// Trusted says whether a listing knows the node's pods.
func (w *Witnesses) Trusted(l *node.Listing) bool {
	if w.opts.Pod == (workload.Pod{}) {
		return len(l.Pods) > 0
	}
	return l.Has(w.opts.Pod.Namespace, w.opts.Pod.Name)
}

// Knows says whether these are the containers of the kubelet's runtime: a node
// may have another one beside it, whose empty list would be taken for good news.
func (w *Witnesses) Knows(containers []node.Container) bool {
	return w.opts.Pod == (workload.Pod{}) || slices.ContainsFunc(containers, func(c node.Container) bool {
		return c.Namespace == w.opts.Pod.Namespace && c.Pod == w.opts.Pod.Name
	})
}

// Stranger says that the runtime is not the kubelet's.
func (w *Witnesses) Stranger() error {
	return fmt.Errorf("it does not know the agent's own pod %s/%s, so it is not the kubelet's; "+
		"name that one with --runtime-endpoint",
		w.opts.Pod.Namespace, w.opts.Pod.Name)
}

// uses finds the allocations that containers have. No tenant can write what tells: the
// annotations that Allocate gave to a container, while a pod's own are on its sandbox,
// and the CDI devices that the kubelet asked for. Only the former have a record.
func (w *Witnesses) uses(containers []node.Container) []Use {
	var out []Use
	for i := range containers {
		c := &containers[i]
		for _, key := range cdi.Keys(w.opts.Domain, c.Annotations, c.CDI) {
			out = append(out, Use{
				ID: c.ID, Key: key, Created: c.Created,
				Record: c.Annotations[cdi.AnnotationName(w.opts.Domain, key)],
				Holder: ledger.Holder{Pod: c.InPod(), Container: c.Name},
			})
		}
	}
	return out
}

// oldest is when the first of the containers that each pod has was created, by the pod's UID.
func oldest(containers []node.Container) map[string]time.Time {
	out := map[string]time.Time{}
	for i := range containers {
		c := &containers[i]
		if at, known := out[c.PodUID]; !known || c.Created.Before(at) {
			out[c.PodUID] = c.Created
		}
	}
	return out
}

// Checkpoint returns the kubelet's, parsed once for each writing, and with an error the
// last that could be read. It is empty, and ok false, where no kubelet has written one.
func (w *Witnesses) Checkpoint() (cp *node.Checkpoint, ok bool, err error) {
	if stamp := w.kubelet.Stamp(); stamp == (node.Stamp{}) || stamp != w.checkpoint.Stamp {
		cp, err := w.kubelet.Checkpoint()
		if errors.Is(err, gpu.ErrNotFound) {
			w.checkpoint = node.Checkpoint{}
			return &w.checkpoint, false, nil // a kubelet that never gave anything out
		}
		if err != nil {
			return &w.checkpoint, true, fmt.Errorf("read the kubelet's checkpoint: %w", err)
		}
		w.checkpoint = cp
	}
	return &w.checkpoint, true, nil
}

// readCheckpoint puts the kubelet's checkpoint into a testimony.
func (w *Witnesses) readCheckpoint(t *Observation) error {
	t.Checkpoint, t.Entries = false, nil
	cp, ok, err := w.Checkpoint()
	if err != nil || !ok {
		return err
	}
	t.Checkpoint = true
	for _, e := range cp.Entries {
		if w.Owns(e.Resource) {
			t.Entries = append(t.Entries, e)
		}
	}
	return nil
}

// renewCheckpoint has the kubelet write its checkpoint again where it names
// holders that neither PodResources nor the runtime knows: it is written when a
// container is given devices and when a list arrives, not when a pod ends. It
// reports whether there is a newer one.
func (w *Witnesses) renewCheckpoint(ctx context.Context, t *Observation, containers []node.Container) bool {
	before := w.kubelet.Stamp()
	due := w.renewals.due(unwitnessed(t, containers), t.Asked)
	for _, resource := range due {
		w.accounts.Resend(resource)
	}
	for waited := time.Duration(0); len(due) > 0 && waited < renewPatience && ctx.Err() == nil; waited += renewLook {
		time.Sleep(renewLook)
		if w.kubelet.Stamp() != before {
			return true
		}
	}
	return false
}

// unwitnessed has, for each resource, the keys that the checkpoint alone knows.
func unwitnessed(t *Observation, containers []node.Container) map[string][]string {
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
	return stale
}

// Look asks them, in full or as they are, and moves the allocations along by what they
// say; it returns those that have ended. While the kubelet gives devices out it is asked in
// full a moment later, at the next look. The error says who has not answered for
// SilentFor: a restart of the kubelet or of the runtime is not worth reporting.
func (w *Witnesses) Look(ctx context.Context, full bool) (ended []ledger.Allocation, _ error) {
	if full {
		if w.postponed = !w.postponed && w.accounts.Booking(); w.postponed {
			full = false
			time.AfterFunc(bookTime, w.Ask)
		}
	}
	o, err := w.ask(ctx, full)
	w.silence.err = err
	ended = w.accounts.Reconcile(o)
	for i := range ended {
		a := &ended[i]
		container, release := w.ends.since(a.ID, time.Now())
		w.opts.Log.Info("allocation ended", "allocation", a.ID, "resource", a.Resource,
			"devices", len(IDs(a.Grants)), "pod", a.Holder.String(),
			"after_container", container, "after_release", release)
	}
	return ended, w.silence.note(o.Asked, full, w.ledger.Held(), w.opts.Log)
}

// Follow hears of containers that start and end, and at their end watches for the kubelet
// to let go of their devices. Where the runtime cannot tell, the tick must do.
func (w *Witnesses) Follow(ctx context.Context) error {
	var missed time.Time
	err := w.runtime.Events(ctx, func(e node.ContainerEvent) {
		ours := false
		if e.Kind == node.EventMissed && time.Since(missed) >= LookSoon {
			missed = time.Now()
			ours = true // something of ours may have ended; a runtime may say so again and again
		}
		for _, u := range w.uses([]node.Container{e.Container}) {
			switch e.Kind {
			case node.EventStarted: // who has the allocation can be said now
				w.accounts.Seen(u, time.Now())
				w.nameSoon.Store(true)
				w.wake()
			case node.EventStopped:
				w.accounts.Seen(u, time.Now())
				w.ends.add(u.Key, time.Now())
				ours = true
			}
		}
		if !ours {
			return
		}
		w.Ask()
		select {
		case w.ended <- struct{}{}:
		default:
		}
	})
	if ctx.Err() == nil {
		w.opts.Log.Warn("container events cannot be followed; the end of containers is seen at the next look",
			"err", err, "every", LookEvery.String())
		<-ctx.Done()
	}
	return ctx.Err()
}

// listAfter asks the kubelet who holds what when it does not give devices out, but after half
// of KubeletPatience at the latest.
func (w *Witnesses) listAfter(ctx context.Context) (node.Listing, error) {
	// In vain is no error: the kubelet is asked all the same.
	quiet := func(context.Context) (bool, error) { return !w.accounts.Booking(), nil }
	_ = wait.PollUntilContextTimeout(ctx, bookTime/4, KubeletPatience/2, true, quiet)
	return w.kubelet.List(ctx)
}

// AwaitReleases asks the kubelet often, for a while after a container of ours has
// ended, and wakes the loop when it lists something else.
func (w *Witnesses) AwaitReleases(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.ended:
		}
		looks := wait.Backoff{Duration: releaseLook, Factor: 1.125, Cap: releaseLookMost, Steps: math.MaxInt}
		pause := looks
		for until := time.Now().Add(releaseWatch); time.Now().Before(until); {
			cctx, cancel := context.WithTimeout(ctx, KubeletPatience)
			l, err := w.listAfter(cctx)
			cancel()
			now := w.ours(l.Holdings)
			if err == nil && !w.ends.anyOf(now, time.Now()) {
				until = time.Time{} // nothing that has ended is listed
			}
			if known := w.listed.Load(); err == nil && (known == nil || !sameHoldings(*known, now)) {
				w.listed.Store(&now)
				w.ends.release(time.Now())
				w.Ask()
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-w.ended:
				until, pause = time.Now().Add(releaseWatch), looks
			case <-time.After(pause.Step()):
			}
			if until.IsZero() {
				break
			}
		}
	}
}

func sameHoldings(a, b []node.Holding) bool {
	return slices.EqualFunc(a, b, func(x, y node.Holding) bool {
		return x.Namespace == y.Namespace && x.Pod == y.Pod && x.Container == y.Container &&
			x.Resource == y.Resource && slices.Equal(x.IDs, y.IDs)
	})
}
