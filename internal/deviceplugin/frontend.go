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
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

const (
	// Grace is how long an allocation that no witness has named is kept after its last Allocate.
	// The kubelet writes its checkpoint only after the front-end's answer, and it admits the rest
	// of the pod before a container is created.
	Grace = 30 * time.Second
	// UnnamedTTL replaces Grace if the kubelet's checkpoint cannot be read. PodResources then
	// replaces the checkpoint, and it does not list plain init containers.
	UnnamedTTL = 10 * time.Minute
	// bookTime is how long the kubelet gets to record for a pod the devices that it was given.
	bookTime = 50 * time.Millisecond
)

// FrontEnd is the device-plugin side of the ledger. It holds the offer in force and the evidence
// about the allocations that it has made. Use [New].
type FrontEnd struct {
	ledger *ledger.Ledger
	// now is the clock, which tests replace.
	now func() time.Time

	// asked is when the kubelet last called Prefer or Allocate.
	asked moment

	// mu guards everything below. Lock it before the ledger's mutex, never after.
	mu    sync.Mutex
	lists lists
	// seen maps the ID of each allocation of this front-end to its evidence.
	seen map[string]*evidence
	// containers maps the ID of each container with an allocation to when it was seen. It has the
	// containers that the runtime listed last, and those seen since.
	containers map[string]sighting
}

// evidence is what the witnesses have reported of an allocation, mostly since its last Allocate. It
// decides who the holder is, and when the allocation has ended.
type evidence struct {
	resource string
	// ids are the allocation's devices, sorted.
	ids []string
	// podUIDs are the pods that have the allocation according to the checkpoint. There is one or
	// none, or two if the kubelet has given it out twice. read is true if a checkpoint has been
	// read since the last Allocate.
	podUIDs []string
	read    bool
	// former is podUIDs from before the last Allocate. unread is true if no checkpoint had been
	// read by then.
	former []string
	unread bool
	// started is true if the runtime has created a container with it. listed is true if
	// PodResources has named one of its devices.
	started, listed bool
	// created is when its youngest container was created, of those that the runtime has shown.
	created time.Time
	// initEnded is true if the allocation belongs to an init container that has ended.
	initEnded bool
	// written is when the CDI file of an adopted allocation was written. Its last Allocate was at
	// most a moment later. Zero if the time is not known.
	written time.Time
}

// sighting is when a container was seen. epoch is the ledger's epoch when it was seen first, and
// last is the time when it was seen last.
type sighting struct {
	epoch uint64
	last  time.Time
}

// New returns a front-end with an empty offer. now is its clock.
func New(l *ledger.Ledger, now func() time.Time) *FrontEnd {
	return &FrontEnd{
		ledger:     l,
		now:        now,
		lists:      lists{ledger: l, base: &Offer{}, offer: &Offer{}, changed: map[string]chan struct{}{}},
		seen:       map[string]*evidence{},
		containers: map[string]sighting{},
	}
}

// Allocate records that the kubelet has given these devices to a container, and returns the
// allocation. It fails if the request could never work; the kubelet then fails the pod. It does not
// fail because another allocation has an ID.
//
// Allocate does not wake the loop, since the loop would compete with the answer to the kubelet.
// Prepare wakes it when the container is about to start. A caller that may get no Prepare wakes the
// loop after its answer has been sent.
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
	q := ledger.Request{
		ID: cdi.Key(resource, ids), Owner: ledger.DevicePlugin, Tier: r.Tier, Resource: resource, Overlap: true,
	}
	if old := f.seen[q.ID]; old != nil {
		// The same devices again. This is a new pod whose predecessor may still be ending, or the
		// app container after the init container. So the holder has to be found out anew.
		known, _ := f.ledger.Get(q.ID)
		if q.Grants, err = f.grantLocked(r, old.ids); err != nil || !q.Grants[0].Cap.Known {
			q.Grants = known.Grants
		}
		a, err := f.ledger.Renew(q)
		if err != nil {
			return none, spotHeld(r, err)
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
		return none, spotHeld(r, err)
	}
	f.addLocked(&a, e)
	f.lists.showMoved()
	return a, nil
}

// Booking reports whether the kubelet may be giving devices out that it has not recorded for a pod
// yet: it has called Prefer or Allocate within the last bookTime. A call of PodResources in this
// time may make the kubelet give the same devices out twice; see checkLocked.
func (f *FrontEnd) Booking() bool { return f.now().Sub(f.asked.at()) < bookTime }

// moment is a time that several goroutines set. The last one wins.
type moment struct{ ns atomic.Int64 }

func (m *moment) note(t time.Time) { m.ns.Store(t.UnixNano()) }
func (m *moment) at() time.Time    { return time.Unix(0, m.ns.Load()) }

// offeredLocked returns the resource if its devices ids may be given out together. It fails if one
// of them is not on offer or is withdrawn, or if they do not go together. A device that another
// allocation has is no reason to fail.
func (f *FrontEnd) offeredLocked(resource string, ids []string, now time.Time) (*Resource, error) {
	if len(ids) == 0 {
		return nil, errors.New("no device was named")
	}
	r := f.lists.offer.resource(resource)
	if r == nil {
		return nil, fmt.Errorf("%s is no longer offered by this node", resource)
	}
	for _, id := range ids {
		i, ok := r.index[id]
		if !ok {
			return nil, fmt.Errorf("device %s is not on offer; the node's partition has changed", id)
		}
		dev := &r.Devices[i]
		switch {
		case !dev.Healthy:
			holders := roomHolders(f.ledger, dev)
			err := errors.New(dev.refusal() + holders)
			if r.Tier == ledger.Spot && (dev.Reason == guaranteedHas || holders != "") {
				err = status.Because(status.SpotRefused, err)
			}
			return nil, err
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
	if len(ids) > 1 && !r.Kind.Together() {
		for _, id := range ids {
			if dev := &r.Devices[r.index[id]]; f.lists.offer.Compute[dev.GPU].MPS {
				return nil, oneGPU(dev.ID)
			}
		}
	}
	return r, nil
}

// grantLocked returns the grants for devices of a resource, with the sizes of the present offer.
func (f *FrontEnd) grantLocked(r *Resource, ids []string) ([]ledger.Grant, error) {
	grants, err := parse(r.Kind, ids)
	if err != nil {
		return nil, err
	}
	for i := range grants {
		g := &grants[i]
		if r.Kind.InMIG() { // the ID does not have the size
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
		sharing := f.lists.base.Compute[g.GPU]
		if g.Compute = sharing.Share(share.Part(g.Piece)); sharing.MPS && r.Kind.Shared() && g.Compute.Ceiling == 0 {
			return nil, fmt.Errorf("%s of %s: it is not known which part of the GPU that is, and so which share of its SMs",
				g.Piece, g.GPU)
		}
	}
	return grants, nil
}

// unit returns the size of a GPU's memory units according to the allocations on it, in MiB. It is 0
// if no allocation has it.
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
	f.lists.noteMoved(a)
}

// Release ends an allocation whose end is certain. On a node, [FrontEnd.Reconcile] finds out the
// end. A replay of recorded requests knows the end, and calls Release.
func (f *FrontEnd) Release(id string) ledger.Allocation {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.endLocked(id)
	f.lists.showMoved()
	return a
}

func (f *FrontEnd) endLocked(id string) ledger.Allocation {
	a, ok := f.ledger.Release(ledger.DevicePlugin, id)
	if ok {
		f.lists.noteMoved(&a)
	}
	delete(f.seen, id)
	return a
}

// withCapacity adds to a refusal the most that the resource could ever give. So no pod waits for
// room that cannot come. It returns nil for nil at once, since counting all devices takes time.
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

// freshLocked reports whether an allocation of this resource covers the device, was made within the
// last Grace, and has had no container yet. The kubelet is then admitting a pod, and gives its init
// container's device to its app container.
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

// Prepare waits until the container that holds these devices may be created. It may be called any
// number of times, with the IDs in any order. If this process does not know the allocation, Prepare
// adopts it: the kubelet keeps devices over a restart of the agent. The error wraps
// ledger.ErrNotOpen if ctx ends first; the loop then goes on preparing. It also wraps it if the
// allocation ends or gets its next holder first: see ledger.Ledger.Prepare.
func (f *FrontEnd) Prepare(ctx context.Context, resource string, ids []string) error {
	key := cdi.Key(resource, ids)
	f.mu.Lock()
	err := f.adoptLocked(resource, ids)
	f.lists.showMoved()
	f.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%w: %w", ledger.ErrNotOpen, err)
	}
	return f.ledger.Prepare(ctx, key)
}

// Found adopts an allocation from before this process started, from its record. given is when it
// was given. With it, the allocation is judged as if this process had made it. If given is zero,
// the allocation is Adopted: its age is not known.
//
// file is when its CDI file was written; zero if there is none or the time is not known. If the
// kubelet and the runtime agree that no pod has the allocation, it ends Grace after file. It does
// not end Grace after the start of the process, since an agent in a crash loop would then never
// release it.
//
// The error wraps gpu.ErrInvalid if the devices of the record do not have this ID.
func (f *FrontEnd) Found(id string, r ledger.Record, given, file time.Time) error {
	if key := cdi.Key(r.Resource, IDs(r.Grants)); key != id && known(r.Grants) {
		return fmt.Errorf("the record of allocation %s is of allocation %s: %w", id, key, gpu.ErrInvalid)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.adoptRecordLocked(id, r, given); err != nil {
		return err
	}
	if a, _ := f.ledger.Get(id); a.Adopted && !file.IsZero() {
		f.seen[id].written = file
	}
	f.lists.showMoved()
	return nil
}

// adoptRecordLocked adopts an allocation from its record alone. The offer may not have its devices,
// since the partition can have changed while the agent was away. If the ledger has the allocation,
// the record adds what the ledger did not know.
func (f *FrontEnd) adoptRecordLocked(id string, r ledger.Record, given time.Time) error {
	added, err := f.ledger.Found(id, r, given)
	if added {
		a, _ := f.ledger.Get(id)
		f.addLocked(&a, &evidence{resource: r.Resource, ids: IDs(r.Grants)})
	}
	return err
}

// adoptLocked adopts an allocation that the kubelet names, unless the front-end has it. It fails if
// the IDs are not the agent's: then another plugin offers a resource of that name.
func (f *FrontEnd) adoptLocked(resource string, ids []string) error {
	if f.seen[cdi.Key(resource, ids)] != nil {
		return nil
	}
	r, err := RecordOf(resource, ids)
	if err != nil {
		return err
	}
	return f.adoptRecordLocked(cdi.Key(resource, IDs(r.Grants)), r, time.Time{})
}

// Started reports whether the runtime has created a container with an allocation since its last
// Allocate.
func (f *FrontEnd) Started(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.seen[id]
	return e != nil && e.started
}
