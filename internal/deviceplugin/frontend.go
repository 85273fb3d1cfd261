// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

const (
	// Grace is how long after its last Allocate an allocation that no witness has
	// named is kept: the kubelet writes its checkpoint after our answer, and
	// admits the rest of the pod before a container is made.
	Grace = 30 * time.Second
	// UnnamedTTL is Grace where the kubelet's checkpoint cannot be read: the
	// service that stands in for it does not list plain init containers.
	UnnamedTTL = 10 * time.Minute
	// bookTime is what the kubelet gets to write down what it was answered.
	bookTime = 50 * time.Millisecond
)

// FrontEnd is the kubelet's side of the ledger: what it is told is on offer, and what
// was seen of the allocations that it has made. Use [New].
type FrontEnd struct {
	ledger *ledger.Ledger
	// now is the clock, an argument so that tests have their own.
	now func() time.Time

	// asked is when the kubelet last chose or allocated devices.
	asked moment

	// mu guards everything below. The ledger's is locked after it.
	mu    sync.Mutex
	lists lists
	// seen is what was seen of the allocations of this front-end, by ID.
	seen map[string]*evidence
	// met are the containers with allocations that the runtime has, or had when it was
	// last asked, by ID.
	met map[string]met
}

// evidence is what was seen of an allocation, since its last Allocate where nothing
// else is said. It decides who its holder is, and when it has ended.
type evidence struct {
	resource string
	// ids are the allocation's devices, sorted.
	ids []string
	// podUIDs is who has it by the kubelet's checkpoint: one pod or none, or two where the
	// kubelet has given it out twice; read says that this has been read.
	podUIDs []string
	read    bool
	// former is who had it before the last Allocate by the checkpoint, and unread says
	// that nobody had read it then.
	former []string
	unread bool
	// started says that the runtime has made a container of it, listed that
	// PodResources has named one of its devices.
	started, listed bool
	// over says that it is of an init container that has ended.
	over bool
	// written is when the file of an adopted one was written, zero where that is not
	// known: its Allocate was not later than a moment before.
	written time.Time
}

// met is when a container was first heard of, as the ledger's epoch of that moment, and
// last.
type met struct {
	epoch uint64
	last  time.Time
}

// New returns a front-end with an empty offer. now is the clock.
func New(l *ledger.Ledger, now func() time.Time) *FrontEnd {
	return &FrontEnd{
		ledger: l,
		now:    now,
		lists:  lists{ledger: l, base: &Offer{}, offer: &Offer{}, changed: map[string]chan struct{}{}},
		seen:   map[string]*evidence{},
		met:    map[string]met{},
	}
}

// Allocate writes down that the kubelet has given these devices to a container,
// and returns the allocation. It refuses what could never work, and the pod fails; it
// does not refuse an ID because another allocation has it. It does not wake the loop,
// which would compete with the caller's answer to the kubelet: Prepare does when the
// container is to start, and a caller that cannot be sure of a Prepare wakes the loop
// when its answer is out.
func (f *FrontEnd) Allocate(resource string, ids []string) (ledger.Allocation, error) {
	now := f.now()
	f.asked.note(now)
	defer func() { f.asked.note(f.now()) }()
	f.mu.Lock()
	defer f.mu.Unlock()
	var none ledger.Allocation
	r, err := f.offeredLocked(resource, ids, now)
	if err != nil {
		return none, err
	}
	q := ledger.Request{ID: cdi.Key(resource, ids), Owner: ledger.DevicePlugin, Resource: resource, Overlap: true}
	if old := f.seen[q.ID]; old != nil {
		// The same devices again: a new pod, whose predecessor may still be
		// ending, or the app container after the init container. Who holds it is
		// to be told anew.
		known, _ := f.ledger.Get(q.ID)
		if q.Grants, err = f.grantLocked(r, old.ids); err != nil || !q.Grants[0].Cap.Known {
			q.Grants = known.Grants
		}
		a, err := f.ledger.Renew(q)
		if err != nil {
			return none, err
		}
		f.seen[q.ID] = &evidence{resource: resource, ids: old.ids, former: old.podUIDs, unread: !old.read}
		return a, nil
	}
	e := &evidence{resource: resource, ids: slices.Sorted(slices.Values(ids))}
	if q.Grants, err = f.grantLocked(r, e.ids); err != nil {
		return none, err
	}
	a, err := f.ledger.Take(q)
	if err != nil {
		return none, err
	}
	f.addLocked(&a, e)
	f.lists.showMoved()
	return a, nil
}

// Booking reports whether the kubelet may be giving devices out and have them on no pod
// yet: it has asked a moment ago. Who asks it for PodResources then may have it give the
// same devices out again; see Reconcile.
func (f *FrontEnd) Booking() bool { return f.now().Sub(f.asked.at()) < bookTime }

// moment is a time that several goroutines note, the last one's.
type moment struct{ ns atomic.Int64 }

func (m *moment) note(t time.Time) { m.ns.Store(t.UnixNano()) }
func (m *moment) at() time.Time    { return time.Unix(0, m.ns.Load()) }

// offeredLocked returns a resource of which these devices can be had together, as far
// as the kubelet may decide that.
func (f *FrontEnd) offeredLocked(resource string, ids []string, now time.Time) (*Resource, error) {
	if len(ids) == 0 {
		return nil, errors.New("no device was named")
	}
	r := f.lists.offer.resource(resource)
	if r == nil {
		return nil, fmt.Errorf("%s is not offered by this node any more", resource)
	}
	for _, id := range ids {
		i, ok := r.index[id]
		if !ok {
			return nil, fmt.Errorf("device %s is not on offer; the node's partition has changed", id)
		}
		dev := &r.Devices[i]
		switch {
		case !dev.Healthy:
			return nil, errors.New(dev.refusal() + takers(f.ledger, dev))
		case dev.Leaving && !f.freshLocked(resource, id, now):
			return nil, errors.New(dev.refusal())
		}
	}
	row, ok := rows[r.Kind]
	if !ok {
		return nil, piece.UnknownKind{Word: r.Kind}
	}
	if err := row.together(f, r, ids); err != nil {
		return nil, err
	}
	return r, nil
}

// grantLocked makes the grants that devices of a resource stand for now.
func (f *FrontEnd) grantLocked(r *Resource, ids []string) ([]ledger.Grant, error) {
	grants, err := parse(r.Kind, ids)
	if err != nil {
		return nil, err
	}
	for i := range grants {
		g := &grants[i]
		if r.Kind.InMIG() { // the ID does not say how large it is
			g.Piece = piece.Instance(r.Devices[r.index[ids[i]]].Placement)
		}
		share := f.lists.base.Shares[g.GPU]
		if share.Kind != r.Kind {
			share = piece.Share{}
		}
		if share.Unit == 0 && r.Kind.Together() {
			share.Unit = unit(f.ledger, g.GPU)
		}
		g.Piece, g.Cap = g.In(share)
	}
	return grants, nil
}

// unit is the size of the units that allocations have of a GPU, 0 where none tells.
func unit(l *ledger.Ledger, u gpu.UUID) gpu.MiB {
	held := l.Allocations()
	for i := range held {
		for _, g := range held[i].Grants {
			if size := g.Size(); g.GPU == u && size != 0 {
				return size
			}
		}
	}
	return 0
}

func (f *FrontEnd) addLocked(a *ledger.Allocation, e *evidence) {
	f.seen[a.ID] = e
	if a.Kind().InMIG() {
		f.lists.moved = append(f.lists.moved, a.GPUs()...)
	}
}

// Release ends an allocation whose end is certain. On a node [FrontEnd.Reconcile] finds
// out that one has ended; a replay of what a node was asked for knows it, and calls this.
func (f *FrontEnd) Release(id string) ledger.Allocation {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.endLocked(id)
	f.lists.showMoved()
	return a
}

func (f *FrontEnd) endLocked(id string) ledger.Allocation {
	a, _ := f.ledger.Release(ledger.DevicePlugin, id)
	if a.Kind().InMIG() {
		f.lists.moved = append(f.lists.moved, a.GPUs()...)
	}
	delete(f.seen, id)
	return a
}

// withCapacity tells a refusal what the resource could give at best, so that
// nobody is told to wait for room that cannot come. It counts all devices, so it does nothing where
// there is no refusal.
func (r *Resource) withCapacity(err error) error {
	if err == nil {
		return nil
	}
	most, gpus := 0, map[gpu.UUID]int{}
	for i := range r.Devices {
		u := r.Devices[i].GPU
		gpus[u]++
		most = max(most, gpus[u])
	}
	var fit *timeslice.FitError
	var spread *timeslice.SpreadError
	switch {
	case errors.As(err, &fit):
		fit.Capacity = most
	case errors.As(err, &spread):
		spread.Capacity = len(gpus)
	}
	return err
}

// freshLocked reports whether an allocation of the last Grace covers the device of
// which no container has been made yet: then the kubelet is giving an init
// container's device to the app container of the pod that it is admitting.
func (f *FrontEnd) freshLocked(resource, id string, now time.Time) bool {
	for key, e := range f.seen {
		if e.resource != resource || e.started {
			continue
		}
		if _, ok := slices.BinarySearch(e.ids, id); !ok {
			continue
		}
		if a, _ := f.ledger.Get(key); !a.Adopted && now.Sub(a.Given) < Grace {
			return true
		}
	}
	return false
}

// Prepare waits until the container that holds these devices may be created.
// It may be called any number of times, in any order of ids, and for an allocation
// that this process has never seen: after the agent's restart the kubelet still
// holds it, so it is taken over. The error wraps ledger.ErrNotOpen when ctx ends
// first; the work goes on.
func (f *FrontEnd) Prepare(ctx context.Context, resource string, ids []string) error {
	key := cdi.Key(resource, ids)
	f.mu.Lock()
	err := f.coverLocked(resource, ids)
	f.lists.showMoved()
	f.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%w: %w", ledger.ErrNotOpen, err)
	}
	return f.ledger.Prepare(ctx, key)
}

// Found takes over an allocation that was made before this process started, from its
// record. given is when it was given, if that is known: then it is judged as if this
// process had seen it. Otherwise it is unconfirmed until kubelet or runtime name it.
//
// file is when its CDI file was written, zero where there is none or that is not known.
// Where kubelet and runtime agree that nobody has the allocation, it ends Grace after
// that time. Counted from the start of the process, a crash-looping agent would never
// release it.
//
// The error wraps gpu.ErrInvalid where the record is not one of devices with this ID.
func (f *FrontEnd) Found(id string, r ledger.Record, given, file time.Time) error {
	if key := cdi.Key(r.Resource, IDs(r.Grants)); key != id && known(r.Grants) {
		return fmt.Errorf("the record of allocation %s is of allocation %s: %w", id, key, gpu.ErrInvalid)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.foundLocked(id, r, given); err != nil {
		return err
	}
	if a, _ := f.ledger.Get(id); a.Adopted && !file.IsZero() {
		f.seen[id].written = file
	}
	f.lists.showMoved()
	return nil
}

// foundLocked takes an allocation over from its record alone: the offer may not have
// its devices, since the partition can have changed while the agent was away. To one
// that is there already the record adds what was not known.
func (f *FrontEnd) foundLocked(id string, r ledger.Record, given time.Time) error {
	added, err := f.ledger.Found(id, r, given)
	if added {
		a, _ := f.ledger.Get(id)
		f.addLocked(&a, &evidence{resource: r.Resource, ids: IDs(r.Grants)})
	}
	return err
}

// coverLocked takes over what the kubelet names, if no allocation covers it yet. The
// error says that the IDs are not the agent's: another plugin offers a resource of that
// name.
func (f *FrontEnd) coverLocked(resource string, ids []string) error {
	if f.seen[cdi.Key(resource, ids)] != nil {
		return nil
	}
	r, err := RecordOf(resource, ids)
	if err != nil {
		return err
	}
	return f.foundLocked(cdi.Key(resource, IDs(r.Grants)), r, time.Time{})
}

// Started reports whether the runtime has made a container of an allocation since its
// last Allocate.
func (f *FrontEnd) Started(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.seen[id]
	return e != nil && e.started
}
