// SPDX-License-Identifier: Apache-2.0

package desk

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/pkg/topology"
)

const (
	// Grace is how long after its last Allocate a claim that no witness has
	// named is kept: the kubelet writes its checkpoint after our answer, and
	// admits the rest of the pod before a container is made.
	Grace = 30 * time.Second
	// UnnamedTTL is Grace where the kubelet's checkpoint cannot be read: the
	// service that stands in for it does not list plain init containers.
	UnnamedTTL = 10 * time.Minute
)

// ErrNotReady says that a claim's container may not be created yet; the kubelet
// asks again.
var ErrNotReady = errors.New("the claim is not ready")

// View is what is on offer at one moment. It is immutable once published.
type View struct {
	// Gen grows by one with every published view.
	Gen uint64
	// Resources is sorted by name. A resource that was ever published stays in
	// every later view of the process, with no devices if need be, because
	// pods that held its devices can only restart while its socket is served.
	Resources []Resource
	// Rank orders GPUs where nothing better decides (their index).
	Rank map[gpu.UUID]int
	// Topology is how the GPUs are joined: which of them go together, and which
	// are best broken up. Nil joins none.
	Topology *topology.Graph
	// Shares is how GPUs are divided that several containers have at once.
	Shares map[gpu.UUID]Share
	// MIG has every GPU that Resources have slots of. A slot is listed Healthy
	// where it would be if its GPU were empty: what has no room beside the claims
	// and what else may not go is the desk's to find out.
	MIG map[gpu.UUID]MIGView
}

// Share is how a GPU is divided that several containers have at once.
type Share struct {
	// Unit is the size of a memory unit; 0 where the GPU has none, or that is not known.
	Unit gpu.MiB
	// Replicas is how many there are, and Replica what one may have, in bytes.
	Replicas int
	Replica  uint64
}

// Resource is one extended resource and its devices.
type Resource struct {
	// Name is the full resource name, for example "example.com/gpu-mem".
	Name string
	// Kind is what one device stands for, and so which sets of them make sense
	// together: units lie on one GPU, replicas on different ones, and placements can
	// stand beside each other, on one GPU or several.
	Kind ledger.Kind
	// Devices is in the order in which the kubelet is told of them.
	Devices []Device

	index map[string]int
}

// Device is one entry of a resource's list.
type Device struct {
	ID  string
	GPU gpu.UUID
	// Slot is what a device of kind Placement stands for.
	Slot mig.Slot
	// NUMA is what the kubelet's topology manager is told of the device.
	NUMA NUMA
	// Healthy is what the kubelet is told.
	Healthy bool
	// Leaving marks a held device that the wanted partition does not keep: it
	// is listed healthy for its holder's sake and refused to anyone new.
	Leaving bool
	// Reason is why the device is unhealthy or leaving, for people.
	Reason string
}

// NUMA is the NUMA node that a device is aligned to; the zero NUMA is none.
type NUMA struct {
	Node  int
	Known bool
}

// Claim is a set of devices that the kubelet has given to a container.
type Claim struct {
	// Key names the claim everywhere: cdi.Key of Resource and IDs.
	Key      string
	Resource string
	// IDs is sorted.
	IDs []string
	// Grants is what the devices stand for. Units of one GPU are one grant; else there
	// is one for each ID, in their order.
	Grants []ledger.Grant
	// Allocated is the time of the last Allocate with these IDs, or of the
	// adoption where Adopted says so.
	Allocated time.Time
	// Inherited says that this process has not seen the Allocate, Adopted that it
	// does not know when that was either.
	Inherited, Adopted bool
	// Filed says that the process before this one has written the claim's file
	// since its last Allocate: nobody else was on its devices then.
	Filed bool
	// Holder is who has it, as far as anybody has said; PodUIDs is who has it by
	// the kubelet's checkpoint: one pod, or none.
	Holder  Holder
	PodUIDs []string
	// Started says that the runtime has made a container of it since its last
	// Allocate, Listed that PodResources has named one of its devices since.
	Started, Listed bool
	// Ready says that its container may be created: its CDI file stands and
	// nobody else is on its devices.
	Ready bool
	// Checked is when the witnesses were asked whether somebody else is, zero
	// if they were not since the last Allocate; Waits names who, empty if nobody,
	// for operators: a pod is told by way of Holder.Told.
	Checked time.Time
	Waits   string
	// Wished is when the kubelet first asked for the container to be prepared,
	// zero if it has not since the last Allocate, or since the claim was last
	// ready. Trouble is why that could not be done so far, by SetTrouble: the
	// claim's pod reads it.
	Wished  time.Time
	Trouble string
}

// Kind is what the claim's devices stand for.
func (c *Claim) Kind() ledger.Kind { return c.Grants[0].Kind }

// GPUs returns the GPUs that the claim has something of, each once, in the order of
// its IDs.
func (c *Claim) GPUs() []gpu.UUID { return ledger.GPUs(c.Grants) }

// On reports whether the claim has something of a GPU.
func (c *Claim) On(u gpu.UUID) bool {
	return slices.ContainsFunc(c.Grants, func(g ledger.Grant) bool { return g.GPU == u })
}

// Cap is what the claim's holder may have of a GPU's memory.
func (c *Claim) Cap(u gpu.UUID) (cap ledger.Cap) {
	for i := range c.Grants {
		switch g := &c.Grants[i]; {
		case g.GPU != u:
		case !g.Cap.Known:
			return ledger.Cap{}
		default: // of several replicas of one GPU, which the kubelet gives though nobody asked it to, all count
			cap = ledger.CapOf(cap.Bytes + min(g.Cap.Bytes, memcap.None-cap.Bytes))
		}
	}
	return cap
}

// Record is what is written down of the claim.
func (c *Claim) Record() Record { return Record{c.Resource, c.Grants} }

// Holder is a container.
type Holder struct {
	Namespace, Pod, Container string
}

// String is "namespace/pod", or says that nobody has named one.
func (h Holder) String() string {
	if h.Pod == "" {
		return "a pod that the kubelet has not named yet"
	}
	return h.Namespace + "/" + h.Pod
}

// Told is what a pod of a namespace is told of who has the claim with this key. The
// errors of Allocate, Prefer and Prepare end up in the status and the Events of the
// pod that asked, which its tenant reads: a pod of another namespace is none of
// theirs, so that the claim's key has to do. Empty is a namespace that is not known.
// (The Node's annotation and Events, the log and `gpu-agent status` are for
// operators, and name pods.)
func (h Holder) Told(namespace, key string) string {
	if namespace != "" && h.Namespace == namespace && h.Pod != "" {
		return h.String()
	}
	return "claim " + key
}

// Testimony is what the witnesses say of who has what. Its parts concern our own
// resources alone.
type Testimony struct {
	// Asked is the moment before the first witness was asked.
	Asked time.Time
	// Entries are those of the kubelet's checkpoint, and Checkpoint says that it
	// could be read.
	Entries    []Entry
	Checkpoint bool
	// Uses are the containers of the runtime that have been created and have not
	// ended, and Runtime says that it answered.
	Uses    []Use
	Runtime bool
	// Listed is what the kubelet's PodResources service lists. List says that it was
	// asked, as in every full look, and that it answered; Trusted says that it knows
	// the node's pods: after the kubelet's restart it answers at first with nothing
	// or a part.
	Listed        []Holding
	List, Trusted bool
	// Pods has the names of pods by UID, as far as anybody knows.
	Pods map[string]Holder
}

// Entry is a line of the kubelet's checkpoint: what one container, init
// containers included, has of one resource.
type Entry struct {
	PodUID, Container, Resource string
	IDs                         []string
}

// Use is a container of the runtime that has a claim.
type Use struct {
	// ID is the runtime's name for the container, which no other has or will have.
	ID          string
	Key, PodUID string
	// Record is the annotation that Allocate gave to the container.
	Record string
	Holder
	// Created is by the clock as it was then.
	Created time.Time
}

// Holding is what the kubelet's PodResources service says a container has of one
// resource.
type Holding struct {
	Holder
	Resource string
	IDs      []string
}

type claim struct {
	Claim
	// told is Waits in words for the claim's own pod.
	told string
	// ready is closed when Ready becomes true; replaced when it becomes false.
	ready chan struct{}
	// epoch numbers the last Allocate, 0 for one that is inherited.
	epoch uint64
	// opened says that the claim has been ready since, read that the kubelet's
	// checkpoint has been read since.
	opened, read bool
	// former is who had it before by the checkpoint, and unread says that nobody had
	// read it then.
	former []string
	unread bool
	// written is when the file of an adopted claim was written, zero where that is
	// not known: its Allocate was not later than a moment before.
	written time.Time
}

// Desk holds the view and the claims. Use [New].
type Desk struct {
	// wake is called, without the mutex, after something changed that the loop
	// should look at. It must not block.
	wake func()
	// now is the clock, an argument because this floor has none.
	now func() time.Time

	// mu guards everything below.
	mu sync.Mutex
	// base is the view as it was published, view with the faults on top.
	base, view *View
	// faults is what is not fit for work, and why.
	faults faults
	claims map[string]*claim
	// version grows when a claim is added or ends, epoch with every Allocate.
	version, epoch uint64
	// met are the containers with claims that the runtime has, or had when it was
	// last asked, by ID.
	met map[string]met
	// moved are the GPUs of which claims have taken slots, or given them back,
	// that view does not show yet.
	moved []gpu.UUID
	// changed has a channel for every resource, closed when its list changes.
	changed map[string]chan struct{}
}

// met is when a container was first heard of, as the epoch of that moment, and last.
type met struct {
	epoch uint64
	last  time.Time
}

// New returns a desk with no view. wake is called after every change of the
// claims but Allocate's and must not block; now is the clock.
func New(wake func(), now func() time.Time) *Desk {
	return &Desk{
		wake:    wake,
		now:     now,
		base:    &View{},
		view:    &View{},
		claims:  map[string]*claim{},
		met:     map[string]met{},
		changed: map[string]chan struct{}{},
	}
}

// Publish makes a view the one in force and tells the streams of those resources
// of which the kubelet hears anything else. The view must not be changed afterwards. Resources of the
// view before that it does not have are carried over without devices.
//
// build makes the view from the claims. It runs without the mutex, since it may
// take a millisecond, and again if the claims have changed meanwhile: a device
// that has just been given away must not be published as if nobody had it. While
// claims come faster than views can be built, the last build stands; what it
// missed is in the next one.
func (d *Desk) Publish(build func([]Claim) *View) *View {
	for range publishTries {
		claims, version := d.look()
		if d.publish(build(claims), version) {
			return d.View()
		}
	}
	claims, _ := d.look()
	d.publish(build(claims), anyVersion)
	return d.View()
}

const (
	publishTries = 3
	anyVersion   = ^uint64(0)
)

// publish does so unless the claims have changed since a version of them.
func (d *Desk) publish(v *View, version uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if version != anyVersion && version != d.version {
		return false
	}
	byName := func(a, b Resource) int { return strings.Compare(a.Name, b.Name) }
	slices.SortFunc(v.Resources, byName)
	var carried []Resource
	for _, old := range d.base.Resources {
		if v.resource(old.Name) == nil {
			carried = append(carried, Resource{Name: old.Name, Kind: old.Kind})
		}
	}
	v.Resources = append(v.Resources, carried...)
	slices.SortFunc(v.Resources, byName)
	for i := range v.Resources {
		r := &v.Resources[i]
		if old := d.base.resource(r.Name); old != nil && slices.EqualFunc(old.Devices, r.Devices, sameID) {
			r.index = old.index
			continue
		}
		r.index = make(map[string]int, len(r.Devices))
		for j := range r.Devices {
			r.index[r.Devices[j].ID] = j
		}
	}
	d.base = v
	d.sizeLocked()
	d.showLocked()
	return true
}

func sameID(a, b Device) bool { return a.ID == b.ID }

// SetFaults says which GPUs are not fit for work, and why, and which MIG slots on
// the others: from now on all devices of those GPUs and those of the slots are
// Unhealthy in every view, and no others for this reason. It does not wait for the
// loop, so that a fault reaches the kubelet while a round is under way.
func (d *Desk) SetFaults(gpus map[gpu.UUID]string, slots map[mig.Place]string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if maps.Equal(d.faults.gpus, gpus) && maps.Equal(d.faults.slots, slots) {
		return
	}
	d.faults = faults{maps.Clone(gpus), maps.Clone(slots)}
	d.showLocked()
}

// faults is why GPUs are not fit for work, and why MIG slots are not whose GPUs are.
type faults struct {
	gpus  map[gpu.UUID]string
	slots map[mig.Place]string
}

// of is why a device is not fit for work.
func (f *faults) of(dev *Device) (why string, bad bool) {
	if why, bad = f.gpus[dev.GPU]; !bad && len(f.slots) > 0 {
		why, bad = f.slots[mig.Place{GPU: dev.GPU, Slot: dev.Slot}]
	}
	return why, bad
}

// showLocked makes the view in force from the published one, what claims have
// taken and the faults, and tells the streams of those resources of which the
// kubelet hears anything else. A list that is as it was stays the same slice.
func (d *Desk) showLocked() {
	v := d.base.copyAs(d.view.Gen + 1)
	rooms := d.roomsLocked(v.slotGPUs())
	d.moved = d.moved[:0]
	for i := range v.Resources {
		r := &v.Resources[i]
		if r.Kind == ledger.Placement {
			r.Devices = lay(r.Devices, r.Devices, r.Name, rooms, &d.faults)
		} else {
			r.Devices = faulted(r.Devices, d.faults.gpus)
		}
		switch old := d.view.resource(r.Name); {
		case old != nil && slices.Equal(old.Devices, r.Devices):
			r.Devices = old.Devices
		case old == nil || !slices.EqualFunc(old.Devices, r.Devices, sameWord):
			d.tellLocked(r.Name)
		}
	}
	d.view = v
}

// sameWord reports whether the kubelet hears the same of two devices.
func sameWord(a, b Device) bool {
	return a.ID == b.ID && a.Healthy == b.Healthy && a.NUMA == b.NUMA
}

// faulted returns the devices with those of faulty GPUs unhealthy; the slice
// itself where there is none.
func faulted(devices []Device, faults map[gpu.UUID]string) []Device {
	if len(faults) == 0 {
		return devices
	}
	out, copied := devices, false
	for i := range devices {
		why, bad := faults[devices[i].GPU]
		if !bad {
			continue
		}
		if !copied {
			out, copied = slices.Clone(devices), true
		}
		out[i].Healthy, out[i].Leaving, out[i].Reason = false, false, why
	}
	return out
}

// Resend sends a resource's list to the kubelet again although nothing in it has
// changed: that makes the kubelet write its checkpoint anew.
func (d *Desk) Resend(resource string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tellLocked(resource)
}

func (d *Desk) tellLocked(resource string) {
	if ch := d.changed[resource]; ch != nil {
		close(ch)
		delete(d.changed, resource)
	}
}

// View returns the view in force.
func (d *Desk) View() *View {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.view
}

// List returns the devices of a resource in the view in force, and a channel
// that is closed when the kubelet is to be told anew: other devices are listed, one
// has turned Healthy or Unhealthy, or Resend was called. An unchanged list is the same slice.
func (d *Desk) List(resource string) ([]Device, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ch := d.changed[resource]
	if ch == nil {
		ch = make(chan struct{})
		d.changed[resource] = ch
	}
	if r := d.view.resource(resource); r != nil {
		return r.Devices, ch
	}
	return nil, ch
}

// Allocate writes down that the kubelet has given these devices to a container,
// and returns the claim. It refuses, finally for that pod, what could
// never work; it does not refuse an ID because another claim has it. It does not
// wake the loop, which would run beside the caller's answer to the kubelet and
// hold it up: Prepare does when the container is to start, and a caller that
// cannot be sure of a Prepare wakes the loop when its answer is out.
func (d *Desk) Allocate(resource string, ids []string) (Claim, error) {
	now := d.now()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.allocateLocked(resource, ids, now)
}

func (d *Desk) allocateLocked(resource string, ids []string, now time.Time) (Claim, error) {
	var none Claim
	if len(ids) == 0 {
		return none, errors.New("no device was named")
	}
	r := d.view.resource(resource)
	if r == nil {
		return none, fmt.Errorf("%s is not offered by this node any more", resource)
	}
	key := cdi.Key(resource, ids)
	known := d.claims[key]
	for _, id := range ids {
		i, ok := r.index[id]
		if !ok {
			return none, fmt.Errorf("device %s is not on offer; the node's partition has changed", id)
		}
		dev := &r.Devices[i]
		switch {
		case !dev.Healthy:
			return none, errors.New(dev.refusal() + d.takersLocked(dev))
		case dev.Leaving && !d.freshLocked(resource, id, now):
			return none, errors.New(dev.refusal())
		}
	}
	if err := r.together(ids); err != nil {
		return none, r.withCapacity(err)
	}
	if r.Kind == ledger.Placement && len(ids) > 1 {
		if err := d.togetherLocked(r, ids); err != nil {
			return none, err
		}
	}
	d.epoch++
	if known != nil {
		// The same devices again: a new pod, whose predecessor may still be
		// ending, or the app container after the init container. Who holds it is
		// to be told anew.
		again := &claim{Claim: Claim{Key: key, Resource: resource, IDs: known.IDs, Grants: known.Grants,
			Allocated: now, Ready: known.Ready}, ready: known.ready, epoch: d.epoch, former: known.PodUIDs, unread: !known.read}
		if grants, err := d.grantLocked(r, known.IDs); err == nil && grants[0].Cap.Known {
			again.Grants = grants
		}
		again.shut()
		d.claims[key] = again
		d.version++
		return again.Claim, nil
	}
	c := Claim{Key: key, Resource: resource, IDs: slices.Sorted(slices.Values(ids)), Allocated: now}
	var err error
	if c.Grants, err = d.grantLocked(r, c.IDs); err != nil {
		return none, err
	}
	d.addLocked(c)
	d.claims[key].epoch = d.epoch
	d.movedLocked()
	return c, nil
}

// grantLocked makes the grants that devices of a resource stand for now.
func (d *Desk) grantLocked(r *Resource, ids []string) ([]ledger.Grant, error) {
	grants, err := parse(r.Kind, ids)
	if err != nil {
		return nil, err
	}
	for i := range grants {
		g := &grants[i]
		share := d.base.Shares[g.GPU]
		switch g.Kind {
		case ledger.Units:
			if g.Unit = share.Unit; g.Unit == 0 {
				g.Unit = d.unitLocked(g.GPU)
			}
			if g.Unit != 0 {
				g.Cap = ledger.CapOf(memcap.Units(g.Units.Len(), g.Unit))
			}
		case ledger.Replica:
			if share.Replicas != 0 {
				g.Of, g.Cap = share.Replicas, ledger.CapOf(share.Replica)
			}
		case ledger.Placement:
			g.Slot = r.Devices[r.index[ids[i]]].Slot
		}
	}
	return grants, nil
}

// unitLocked is the size of the units that claims have of a GPU, 0 where none tells.
func (d *Desk) unitLocked(u gpu.UUID) gpu.MiB {
	for _, c := range d.claims {
		for i := range c.Grants {
			if g := &c.Grants[i]; g.GPU == u && g.Unit != 0 {
				return g.Unit
			}
		}
	}
	return 0
}

func (d *Desk) endLocked(key string) {
	if c := d.claims[key]; c.Kind() == ledger.Placement {
		d.moved = append(d.moved, c.GPUs()...)
	}
	delete(d.claims, key)
	d.version++
}

func (d *Desk) addLocked(c Claim) {
	d.version++
	d.claims[c.Key] = &claim{Claim: c, ready: make(chan struct{})}
	if c.Kind() == ledger.Placement {
		d.moved = append(d.moved, c.GPUs()...)
	}
}

// together checks that the devices make sense together.
func (r *Resource) together(ids []string) (err error) {
	switch r.Kind {
	case ledger.Units:
		_, err = timeslice.OneGPU(ids)
	case ledger.Replica:
		_, err = timeslice.DistinctGPUs(ids)
	}
	return err
}

// withCapacity tells a refusal what the resource could give at best, so that
// nobody is told to wait for room that cannot come.
func (r *Resource) withCapacity(err error) error {
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

// freshLocked reports whether a claim of the last Grace covers the device of
// which no container has been made yet: then the kubelet is giving an init
// container's device to the app container of the pod that it is admitting.
func (d *Desk) freshLocked(resource, id string, now time.Time) bool {
	for _, c := range d.claims {
		if c.Resource == resource && !c.Adopted && !c.Started && now.Sub(c.Allocated) < Grace {
			if _, ok := slices.BinarySearch(c.IDs, id); ok {
				return true
			}
		}
	}
	return false
}

// Prepare waits until the container that holds these devices may be created.
// It may be called any number of times, in any order of ids, and for a claim
// that this process has never seen: after the agent's restart the kubelet still
// holds it, so it is taken over. The error wraps ErrNotReady when ctx ends
// first; the work goes on.
func (d *Desk) Prepare(ctx context.Context, resource string, ids []string) error {
	d.mu.Lock()
	key := cdi.Key(resource, ids)
	c := d.claims[key]
	if c == nil {
		if err := d.coverLocked(resource, ids, d.now()); err != nil {
			d.mu.Unlock()
			return fmt.Errorf("%w: %w", ErrNotReady, err)
		}
		d.movedLocked()
		c = d.claims[key]
	}
	ready := c.ready
	done := c.Ready
	if !done && c.Wished.IsZero() {
		c.Wished = d.now()
	}
	d.mu.Unlock()
	if done {
		return nil
	}
	d.wake()
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// By key: the claim may have ended and come again.
	c = d.claims[key]
	switch {
	case c != nil && c.Ready:
		return nil
	case c != nil && c.Waits != "":
		return fmt.Errorf("%w: previous holder still ending: %s", ErrNotReady, c.told)
	case c != nil && c.Trouble != "":
		return fmt.Errorf("%w: %s", ErrNotReady, c.Trouble)
	}
	return fmt.Errorf("%w: the CDI file of claim %s is not written yet; see the agent's log and `gpu-agent status`", ErrNotReady, key)
}

// Adopt takes over a claim that was made before this process started. It is
// unconfirmed until a witness names it.
func (d *Desk) Adopt(r Record) error {
	return d.adopt(r, func(*claim) {})
}

// adopt is Adopt with a note on the claim, before anybody else can end it.
func (d *Desk) adopt(r Record, note func(*claim)) error {
	d.mu.Lock()
	key, err := d.adoptLocked(r, d.now())
	if err == nil {
		note(d.claims[key])
	}
	d.movedLocked()
	d.mu.Unlock()
	if err == nil {
		d.wake()
	}
	return err
}

// AdoptWritten is Adopt for a claim whose file was written at a time that is known:
// where kubelet and runtime agree that nobody has it, it ends Grace after that, and
// not Grace after this process has started. An agent that starts again and again
// would else keep everything for ever. Of a claim that was restored it tells whether
// the file is of its last Allocate.
func (d *Desk) AdoptWritten(r Record, written time.Time) error {
	return d.adopt(r, func(c *claim) {
		if c.Adopted {
			c.written = written
		} else {
			c.Filed = !written.Before(c.Allocated)
		}
	})
}

// Restore takes over a claim that was allocated before this process started, at
// a time that is known: it is judged as if this process had seen it.
func (d *Desk) Restore(r Record, allocated time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	key, err := d.adoptLocked(r, allocated)
	if err != nil {
		return err
	}
	d.movedLocked()
	// As old as it is now, also when the clock is put back.
	c, now := d.claims[key], d.now()
	c.Allocated, c.Adopted = now.Add(-now.Sub(allocated)), false
	return nil
}

// adoptLocked makes a claim from its record alone: the view may not have its
// devices, since the partition can have changed while the agent was away. Of a claim
// that is there already the record adds what was not known.
func (d *Desk) adoptLocked(r Record, now time.Time) (key string, err error) {
	ids := r.IDs()
	if len(ids) == 0 {
		return "", fmt.Errorf("no device was named: %w", gpu.ErrInvalid)
	}
	key = cdi.Key(r.Resource, ids)
	if c := d.claims[key]; c != nil {
		c.learn(r.Grants)
		return key, nil
	}
	for i := range r.Grants {
		if r.Grants[i].Kind != r.Grants[0].Kind {
			return "", fmt.Errorf("MIG slots and other devices in one claim of %s: %w", r.Resource, gpu.ErrInvalid)
		}
	}
	d.addLocked(Claim{Key: key, Resource: r.Resource, IDs: ids, Grants: sized(r.Grants, d.base.MIG), Allocated: now, Inherited: true, Adopted: true})
	return key, nil
}

// learn takes over what a record of the same devices knows of caps.
func (c *claim) learn(grants []ledger.Grant) {
	if len(grants) != len(c.Grants) {
		return
	}
	for i := range grants {
		if g := &grants[i]; g.GPU == c.Grants[i].GPU && g.Kind == c.Grants[i].Kind && g.Cap.Known && !c.Grants[i].Cap.Known {
			c.Grants = slices.Clone(c.Grants) // others may read it
			c.Grants[i].Unit, c.Grants[i].Of, c.Grants[i].Cap = g.Unit, g.Of, g.Cap
		}
	}
}

// Learn says what the holder of a claim was given, where that was not known.
func (d *Desk) Learn(key string, grants []ledger.Grant) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.claims[key]; c != nil {
		c.learn(grants) // no view depends on it
	}
}

// SetReady says that the container of a claim may be created, as of a view of
// the claim: a claim that was allocated again meanwhile is not ready, and stays
// so. It reports whether the claim is ready now.
func (d *Desk) SetReady(of *Claim) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.claims[of.Key]
	if c == nil || !c.Allocated.Equal(of.Allocated) {
		return false
	}
	if !c.Ready {
		c.Ready, c.opened, c.Trouble = true, true, ""
		close(c.ready)
	}
	return true
}

// SetTrouble says why what a claim needs could not be made so far, empty where
// there is nothing to say any more: it is in the error of a Prepare that waited in
// vain, which the kubelet writes into an Event of the pod. So it names no pod but by
// Holder.Told.
func (d *Desk) SetTrouble(key, why string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.claims[key]; c != nil {
		c.Trouble = why
	}
}

// Shut says that the container of a claim may not be created any more.
func (d *Desk) Shut(key string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.claims[key]; c != nil {
		c.shut()
	}
}

func (c *claim) shut() {
	if c.Ready {
		c.Ready, c.Wished = false, time.Time{}
		c.ready = make(chan struct{})
	}
}

// Waiting reports whether some claim is not ready.
func (d *Desk) Waiting() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.claims {
		if !c.Ready {
			return true
		}
	}
	return false
}

// Held reports whether there is any claim.
func (d *Desk) Held() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.claims) > 0
}

// Claims returns the claims in key order.
func (d *Desk) Claims() []Claim {
	claims, _ := d.look()
	return claims
}

// look returns the claims and their version.
func (d *Desk) look() ([]Claim, uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]Claim, 0, len(d.claims))
	for _, c := range d.claims {
		out = append(out, c.Claim)
	}
	slices.SortFunc(out, func(a, b Claim) int { return strings.Compare(a.Key, b.Key) })
	return out, d.version
}

// Reconcile moves the claims along by the witnesses' words: who has them, whether
// somebody else is still on their devices, and which have ended. What the kubelet
// names and no claim covers is taken over.
//
// A claim ends when two witnesses agree, both asked after its last Allocate: the
// kubelet has no entry of exactly its devices, in its checkpoint or its list, and
// the runtime no container with its key, created or running. So a look in which the
// kubelet was not asked for its list ends nothing. A claim that has had no
// container yet is kept for Grace: what the checkpoint says of its devices may be
// of the pod before. (An entry of only some of its devices is another container's: the
// checkpoint has one for each container, init containers too.) Where the
// checkpoint cannot be read, PodResources stands in if it is trusted: then any of
// the claim's devices keeps it, since that service leaves plain init containers
// out, and one that it has never named is kept for UnnamedTTL. Where the runtime
// does not answer, nothing ends.
//
// It returns the claims that ended, in key order.
func (d *Desk) Reconcile(t Testimony) (ended []Claim) {
	d.mu.Lock()
	defer d.mu.Unlock()
	entries := map[string][]Entry{}
	for _, e := range t.Entries {
		if d.coverLocked(e.Resource, e.IDs, t.Asked) == nil {
			key := cdi.Key(e.Resource, e.IDs)
			entries[key] = append(entries[key], e)
		}
	}
	listed := map[string]Holding{}
	held := map[string]map[string]bool{}
	for _, h := range t.Listed {
		if d.coverLocked(h.Resource, h.IDs, t.Asked) != nil {
			continue
		}
		listed[cdi.Key(h.Resource, h.IDs)] = h
		if held[h.Resource] == nil {
			held[h.Resource] = map[string]bool{}
		}
		for _, id := range h.IDs {
			held[h.Resource][id] = true
		}
	}
	uses := map[string][]Use{}
	for _, u := range t.Uses {
		uses[u.Key] = append(uses[u.Key], u)
		if c := d.claims[u.Key]; c != nil && slices.ContainsFunc(c.Grants, func(g ledger.Grant) bool { return !g.Cap.Known }) {
			if r, err := ReadRecord(u.Key, u.Record); err == nil {
				c.learn(r.Grants)
			}
		}
	}
	if t.Runtime {
		d.meetLocked(&t)
	}
	for key, c := range d.claims {
		if !t.Asked.After(c.Allocated) && !c.Adopted {
			continue // what was said is of before
		}
		if t.Checkpoint {
			c.PodUIDs, c.read = nil, true
			for _, e := range entries[key] {
				if !slices.Contains(c.PodUIDs, e.PodUID) {
					c.PodUIDs = append(c.PodUIDs, e.PodUID)
				}
			}
		}
		d.nameLocked(c, entries[key], uses[key], listed, &t)
		overlaps := slices.ContainsFunc(c.IDs, func(id string) bool { return held[c.Resource][id] })
		c.Listed = c.Listed || overlaps
		age := t.Asked.Sub(c.Allocated)
		// The kubelet's writers of its checkpoint can overtake each other: what it
		// lists counts too.
		_, named := listed[key]
		old := age >= Grace || c.Adopted && !c.written.IsZero() && t.Asked.Sub(c.written) >= Grace
		over := len(entries[key]) == 0 && !named && (t.List && c.Started || t.Trusted && old)
		if !t.Checkpoint {
			over = t.Trusted && !overlaps && (c.Listed || age >= UnnamedTTL)
		}
		if over && t.Runtime && len(uses[key]) == 0 {
			ended = append(ended, c.Claim)
			d.endLocked(key)
		}
	}
	d.movedLocked()
	if t.Runtime {
		d.checkLocked(t)
	}
	slices.SortFunc(ended, func(a, b Claim) int { return strings.Compare(a.Key, b.Key) })
	return ended
}

// Seen says that the runtime has had a container with a claim, which may have
// ended since: one that lives for a moment is in no testimony. The news may be late,
// so where nothing else tells whose the container is, its age must agree.
func (d *Desk) Seen(u Use, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.claims[u.Key]
	if c != nil && d.mineLocked(c, &u, false) && (len(c.PodUIDs) > 0 || u.Created.After(c.Allocated)) {
		c.Started, c.Holder = true, u.Holder
	}
	d.metLocked(u.ID, now)
}

// meetLocked takes note of the containers that the runtime lists, and forgets those
// that it has no more.
func (d *Desk) meetLocked(t *Testimony) {
	listed := make(map[string]bool, len(t.Uses))
	for i := range t.Uses {
		listed[t.Uses[i].ID] = true
		d.metLocked(t.Uses[i].ID, t.Asked)
	}
	maps.DeleteFunc(d.met, func(id string, m met) bool { return !listed[id] && m.last.Before(t.Asked) })
}

func (d *Desk) metLocked(id string, at time.Time) {
	if id == "" {
		return
	}
	m, known := d.met[id]
	if !known {
		m.epoch = d.epoch
	}
	if at.After(m.last) {
		m.last = at
	}
	d.met[id] = m
}

// coverLocked takes over what the kubelet names, if no claim covers it yet. The error
// says that IDs are not of our making; then the resource's name is ours by accident and
// the holding is not.
func (d *Desk) coverLocked(resource string, ids []string, now time.Time) error {
	if d.claims[cdi.Key(resource, ids)] != nil {
		return nil
	}
	r, err := RecordOf(resource, ids)
	if err == nil {
		_, err = d.adoptLocked(r, now)
	}
	return err
}

// nameLocked works out who the holder is, the surest word first.
func (d *Desk) nameLocked(c *claim, entries []Entry, uses []Use, listed map[string]Holding, t *Testimony) {
	for i := range uses {
		if d.mineLocked(c, &uses[i], t.Checkpoint) {
			c.Holder, c.Started = uses[i].Holder, true
		}
	}
	if h, ok := listed[c.Key]; ok {
		c.Holder = h.Holder
		return
	}
	for _, e := range entries {
		if p, ok := t.Pods[e.PodUID]; ok {
			c.Holder = Holder{Namespace: p.Namespace, Pod: p.Pod, Container: e.Container}
		}
	}
}

// mineLocked reports whether a container with the key or the devices of a claim
// belongs to the pod that has the claim now, not to one before it. read says that the
// checkpoint was read after the container was listed. In doubt it does not: a claim
// that waits in vain loses a moment, and two pods on one device lose their work.
//
// A pod's devices are allocated before any of its containers is made. So a container
// that was known before the Allocate is another pod's. Of any other the checkpoint
// tells, which names every pod that has a container, but may still be of before the
// Allocate where it names a pod that it named then. Else the gate tells, which the
// Allocate has shut: a pod has no container with a claim that has not been open since,
// and nobody else comes onto the devices of one that has. None of this depends on a
// clock. The time of creation decides last, where there is no other word on a claim
// that was allocated before this process started.
func (d *Desk) mineLocked(c *claim, u *Use, read bool) bool {
	same := u.Key == c.Key
	if m, known := d.met[u.ID]; known && m.epoch < c.epoch {
		return false
	}
	if c.Adopted && len(c.PodUIDs) == 0 {
		return same
	}
	if read || len(c.PodUIDs) > 0 {
		if !slices.Contains(c.PodUIDs, u.PodUID) {
			return false
		}
		if !c.unread && !slices.Contains(c.former, u.PodUID) {
			return true
		}
	}
	return c.opened || same && c.Inherited && u.Created.After(c.Allocated)
}

// checkLocked finds out, for each claim that is not ready, whose containers are
// still on its devices: a force-deleted pod frees them at the kubelet before its
// containers are dead.
func (d *Desk) checkLocked(t Testimony) {
	for _, c := range d.claims {
		if c.Ready || !t.Asked.After(c.Allocated) && !c.Adopted {
			continue
		}
		var others, told []string
		for i := range t.Uses {
			u := &t.Uses[i]
			if o := d.claims[u.Key]; o != nil && !d.mineLocked(c, u, t.Checkpoint) && d.overlapLocked(&c.Claim, &o.Claim) {
				namespace := c.Holder.Namespace
				if slices.Contains(c.PodUIDs, u.PodUID) {
					namespace = "" // the checkpoint is of before: so may be the name
				}
				others, told = append(others, u.Holder.String()), append(told, u.Told(namespace, u.Key))
			}
		}
		c.Checked, c.Waits, c.told = t.Asked, list(others), list(told)
	}
}

// list is words in order, each once.
func list(words []string) string {
	slices.Sort(words)
	return strings.Join(slices.Compact(words), ", ")
}

// overlapLocked reports whether two claims have something in common: devices of
// one resource, slots of which one has no room beside the other, or a GPU that is
// cut in two ways.
func (d *Desk) overlapLocked(a, b *Claim) bool {
	if a.Kind() == ledger.Placement && b.Kind() == ledger.Placement {
		return slices.ContainsFunc(a.Grants, func(p ledger.Grant) bool {
			return slices.ContainsFunc(b.Grants, func(q ledger.Grant) bool { return d.clashLocked(placeOf(&p), placeOf(&q)) })
		})
	}
	if a.Resource != b.Resource {
		return slices.ContainsFunc(a.Grants, func(g ledger.Grant) bool { return b.On(g.GPU) })
	}
	return slices.ContainsFunc(a.IDs, func(id string) bool {
		_, both := slices.BinarySearch(b.IDs, id)
		return both
	})
}

// copyAs returns a copy of everything in a view, of another generation, whose list
// of resources may be changed.
func (v *View) copyAs(gen uint64) *View {
	out := *v
	out.Gen, out.Resources = gen, slices.Clone(v.Resources)
	return &out
}

func (v *View) resource(name string) *Resource {
	i, ok := slices.BinarySearchFunc(v.Resources, name, func(r Resource, n string) int { return strings.Compare(r.Name, n) })
	if !ok {
		return nil
	}
	return &v.Resources[i]
}
