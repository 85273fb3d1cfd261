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

// How often the witnesses are asked, and how long they may take.
const (
	// LookEvery is how often both are asked in full while any device is held. The device-plugin API
	// has no call for "freed". LookSoon replaces it while a pod or a change waits for a holder to
	// end.
	LookEvery = 8 * time.Second
	LookSoon  = time.Second
	// KubeletPatience and RuntimePatience are the timeouts of one request.
	KubeletPatience = 2 * time.Second
	RuntimePatience = 4 * time.Second
	// SilentFor is how long one of them may fail to answer before Look returns an error.
	SilentFor = 30 * time.Second
	// releaseWatch is how long after a container's end the kubelet is asked whether it has freed
	// the devices. The kubelet looks at its containers every second. The first pause between two
	// requests is releaseLook, and it grows to releaseLookMost.
	releaseWatch    = 5 * time.Second
	releaseLook     = 50 * time.Millisecond
	releaseLookMost = 250 * time.Millisecond
	// resendEvery is how often the same stale entries may make the kubelet write its checkpoint
	// again. renewPatience is how long Look waits for that, and renewLook how often it looks.
	resendEvery   = 30 * time.Second
	renewPatience = 100 * time.Millisecond
	renewLook     = 2 * time.Millisecond
	// namesEvery is how often the runtime is asked for the names of pods that are unknown.
	namesEvery = 10 * time.Second
	// endingsKept is how long the end of a container is remembered.
	endingsKept = 10 * time.Minute
)

// Kubelet is the first witness. internal/node implements it.
type Kubelet interface {
	// List returns the holders of devices, from the PodResources service. It makes the kubelet free
	// the devices of pods that have ended.
	List(context.Context) (node.Listing, error)
	// Checkpoint reads the kubelet's checkpoint file. Stamp changes with each writing of it.
	Checkpoint() (node.Checkpoint, error)
	Stamp() node.Stamp
}

// Runtime is the second witness. internal/node implements it.
type Runtime interface {
	// Containers returns the containers that were created and have not ended.
	Containers(context.Context) ([]node.Container, error)
	// Pods returns the names of the pods that have a sandbox, by UID. Such a pod may have no
	// container yet.
	Pods(context.Context) (map[string]workload.Pod, error)
	// Events blocks and calls back until ctx ends, even if the runtime has no events.
	Events(context.Context, func(node.ContainerEvent)) error
}

// accounts is the part of [FrontEnd] that Witnesses uses.
type accounts interface {
	Reconcile(Observation) (ended []ledger.Allocation)
	Seen(u Use, now time.Time)
	Booking() bool
	Resend(resource string)
}

// Witnesses asks the kubelet and the container runtime what has become of a front-end's
// allocations. One goroutine may call Look and the other methods; Follow and AwaitReleases run in
// one more goroutine each.
type Witnesses struct {
	opts     WitnessOptions
	accounts accounts
	ledger   *ledger.Ledger
	kubelet  Kubelet
	runtime  Runtime
	names    *Names
	// wake makes the loop call Look.
	wake func()

	// askSoon is true if the next look has to ask in full. nameSoon is true if a container with an
	// allocation has started since the last look.
	askSoon, nameSoon atomic.Bool
	// ended wakes AwaitReleases. It holds at most one token.
	ended chan struct{}
	// listed is the last answer of PodResources.
	listed atomic.Pointer[[]node.Holding]
	ends   endings

	// Only the goroutine of Look uses the rest.

	// at is when both were last asked in full. postponed is true if the last look should have done
	// so, and did not.
	at        time.Time
	postponed bool
	// heard is true if both have answered since the start.
	heard bool
	// checkpoint is the last one read. It is parsed once for each writing.
	checkpoint node.Checkpoint
	pods       podNames
	renewals   renewals
	users      users
	silence    silence
}

// WitnessOptions are the options of Witnesses.
type WitnessOptions struct {
	// Domain is used in the names of the containers' annotations.
	Domain string
	// Pod is the agent's own pod. A listing without it ends no allocation. If Pod is empty, the
	// agent runs outside of a pod; then a listing counts if it names any pod.
	Pod workload.Pod
	Log *slog.Logger
}

// NewWitnesses returns the witnesses of a front-end's allocations. They have not been asked yet.
func NewWitnesses(o WitnessOptions, f *FrontEnd, names *Names, k Kubelet, r Runtime, wake func()) *Witnesses {
	return &Witnesses{
		opts: o, accounts: f, ledger: f.ledger, names: names, kubelet: k, runtime: r, wake: wake,
		ended:    make(chan struct{}, 1),
		renewals: renewals{resent: map[string]time.Time{}, stale: map[string]string{}},
	}
}

// Heard reports whether both have answered since the start. Until then, a device may be held
// although neither has named a holder.
func (w *Witnesses) Heard() bool { return w.heard }

// Err returns which witness did not answer in the last look, and why. Nil if both answered.
func (w *Witnesses) Err() error { return w.silence.err }

// Used reports whether a container has an allocation. It is also true if the runtime has not
// reported the CDI devices of some container, which may then have any allocation.
func (w *Witnesses) Used(id string) bool {
	_, used := w.users.of[id]
	return used || w.users.unsure
}

// Holders maps each allocation's ID, of any front-end, to the containers that have it, the oldest
// first. asked is when the runtime was asked. sure is true if there are no other containers.
func (w *Witnesses) Holders() (holders map[string][]ledger.Holder, asked time.Time, sure bool) {
	return w.users.of, w.users.asked, !w.users.unsure
}

// Due reports whether both have to be asked in full at the time at. They have to be at once if now
// is true or a container with an allocation has ended. Otherwise they are asked after a while,
// which is shorter if waits is true: a pod or a change waits for a holder to end.
func (w *Witnesses) Due(now, waits bool, at time.Time) bool {
	if w.askSoon.Swap(false) || now || w.at.IsZero() {
		return true
	}
	every, ever := w.every(waits)
	return ever && at.Sub(w.at) >= every
}

// every returns how often both have to be asked in full. ok is false if nothing is held.
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

// Next returns how long after at both have to be asked in full again. It is false if nothing has to
// be asked.
func (w *Witnesses) Next(waits bool, at time.Time) (time.Duration, bool) {
	every, ever := w.every(waits)
	return every - at.Sub(w.at), ever && !w.at.IsZero()
}

// Ask makes the next look a full one, and wakes it.
func (w *Witnesses) Ask() {
	w.askSoon.Store(true)
	w.wake()
}

// Started reports whether a container with an allocation has started since its last call. The loop
// can then name its holder.
func (w *Witnesses) Started() bool { return w.nameSoon.Swap(false) }

// ask asks the witnesses. If full is false, it reads the checkpoint and asks the runtime. If full
// is true, it also asks PodResources, which makes the kubelet free the devices of ended pods. It
// then also has a stale checkpoint written again. The error has the witnesses that did not answer.
// The observation is valid for the rest.
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
	t.Uses, t.Began = w.Uses(containers), oldest(containers)
	// Read the checkpoint after asking the runtime: then it has an entry for every pod with a
	// container.
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

// Owns reports whether a resource is the agent's: one that this node offers, or one that an
// allocation has. The resource domain (--resource-domain) may have changed since.
func (w *Witnesses) Owns(resource string) bool {
	_, ok := w.names.Kind(resource)
	return ok || slices.ContainsFunc(w.ledger.Allocations(), func(a ledger.Allocation) bool {
		return a.Resource == resource
	})
}

// ours returns the holdings of the agent's resources.
func (w *Witnesses) ours(of []node.Holding) []node.Holding {
	return slices.DeleteFunc(slices.Clone(of), func(h node.Holding) bool { return !w.Owns(h.Resource) })
}

// Trusted reports whether a listing is complete enough to end allocations. It has to name the
// agent's own pod.
func (w *Witnesses) Trusted(l *node.Listing) bool {
	if w.opts.Pod == (workload.Pod{}) {
		return len(l.Pods) > 0
	}
	return l.Has(w.opts.Pod.Namespace, w.opts.Pod.Name)
}

// Knows reports whether these are the containers of the kubelet's runtime. A node may have another
// runtime beside it, whose empty list would end allocations. Any goroutine may call it.
func (w *Witnesses) Knows(containers []node.Container) bool {
	return w.opts.Pod == (workload.Pod{}) || slices.ContainsFunc(containers, func(c node.Container) bool {
		return c.Namespace == w.opts.Pod.Namespace && c.Pod == w.opts.Pod.Name
	})
}

// Stranger returns the error for a runtime that is not the kubelet's.
func (w *Witnesses) Stranger() error {
	return fmt.Errorf("it does not know the agent's own pod %s/%s, so it is not the kubelet's runtime; "+
		"name the kubelet's with --runtime-endpoint",
		w.opts.Pod.Namespace, w.opts.Pod.Name)
}

// Uses returns the containers that have allocations. It reads two things that no tenant can write:
// the annotations that Allocate gave to a container, and the CDI devices that the kubelet asked
// for. A pod's own annotations are on its sandbox. Only the annotations have a record. Any goroutine
// may call it.
func (w *Witnesses) Uses(containers []node.Container) []Use {
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

// oldest maps the UID of each pod to when the oldest of its containers was created.
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

// Checkpoint returns the kubelet's checkpoint, parsed once for each writing. With an error, it
// returns the last one that could be read. If no kubelet has written one, it is empty and ok is
// false.
func (w *Witnesses) Checkpoint() (cp *node.Checkpoint, ok bool, err error) {
	if stamp := w.kubelet.Stamp(); stamp == (node.Stamp{}) || stamp != w.checkpoint.Stamp {
		cp, err := w.kubelet.Checkpoint()
		if errors.Is(err, gpu.ErrNotFound) {
			w.checkpoint = node.Checkpoint{}
			return &w.checkpoint, false, nil // a kubelet that never gave out a device
		}
		if err != nil {
			return &w.checkpoint, true, fmt.Errorf("read the kubelet's checkpoint: %w", err)
		}
		w.checkpoint = cp
	}
	return &w.checkpoint, true, nil
}

// readCheckpoint adds the kubelet's checkpoint to an observation.
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

// renewCheckpoint makes the kubelet write its checkpoint again if the file names holders that
// neither PodResources nor the runtime knows. The kubelet writes it when it gives devices to a
// container and when a list arrives, but not when a pod ends. renewCheckpoint reports whether there
// is a new file.
func (w *Witnesses) renewCheckpoint(ctx context.Context, t *Observation, containers []node.Container) bool {
	before := w.kubelet.Stamp()
	due := w.renewals.due(staleKeys(t, containers), t.Asked)
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

// staleKeys returns the keys that only the checkpoint has, by resource.
func staleKeys(t *Observation, containers []node.Container) map[string][]string {
	known := map[string]bool{}
	for i := range t.Uses {
		known[t.Uses[i].Key] = true
	}
	for i := range t.Listed {
		known[cdi.Key(t.Listed[i].Resource, t.Listed[i].IDs)] = true
	}
	alive := map[string]bool{} // by UID, since a new pod may reuse a name
	for i := range containers {
		alive[containers[i].PodUID] = true
	}
	stale := map[string][]string{}
	for i := range t.Entries {
		e := &t.Entries[i]
		// No list has an init container that has ended, but its pod still lives.
		if key := cdi.Key(e.Resource, e.IDs); !known[key] && !alive[e.PodUID] {
			stale[e.Resource] = append(stale[e.Resource], key)
		}
	}
	return stale
}

// Look asks the witnesses, in full or not, and applies what they report to the allocations. It
// returns those that have ended. If the kubelet is just giving devices out, Look puts a full
// request off to the next look, a moment later. The error has the witness that has not answered for
// SilentFor. A restart of the kubelet or the runtime takes less, and is no error.
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

// Follow follows the runtime's events until ctx ends. At the end of a container with an allocation,
// it makes AwaitReleases watch for the kubelet to free the devices. If the runtime has no events,
// only the regular looks see the end of containers.
func (w *Witnesses) Follow(ctx context.Context) error {
	var missed time.Time
	err := w.runtime.Events(ctx, func(e node.ContainerEvent) {
		ours := false
		if e.Kind == node.EventMissed && time.Since(missed) >= LookSoon {
			missed = time.Now()
			ours = true // events were lost, maybe of our containers; may come often
		}
		for _, u := range w.Uses([]node.Container{e.Container}) {
			switch e.Kind {
			case node.EventStarted: // now its holder can be named
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
		w.opts.Log.Warn("container events cannot be followed; ended containers are found at the next look",
			"err", err, "every", LookEvery.String())
		<-ctx.Done()
	}
	return ctx.Err()
}

// listAfter asks PodResources once the kubelet does not give devices out, but after half of
// KubeletPatience at the latest.
func (w *Witnesses) listAfter(ctx context.Context) (node.Listing, error) {
	// A timeout is no error: ask the kubelet all the same.
	quiet := func(context.Context) (bool, error) { return !w.accounts.Booking(), nil }
	_ = wait.PollUntilContextTimeout(ctx, bookTime/4, KubeletPatience/2, true, quiet)
	return w.kubelet.List(ctx)
}

// AwaitReleases runs until ctx ends. For a while after the end of a container with an allocation,
// it often asks the kubelet for its list, and wakes the loop when the list has changed.
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
				until = time.Time{} // no ended container is listed
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
