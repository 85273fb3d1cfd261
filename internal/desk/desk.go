// SPDX-License-Identifier: Apache-2.0

package desk

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

const (
	// Grace is how long after its last Allocate a claim is not judged:
	// PodResources lags Allocate by the kubelet's own admission work.
	Grace = 30 * time.Second
	// UnnamedTTL is how long a claim that no witness ever named is kept. It
	// covers plain init containers, which PodResources does not list, and pods
	// whose admission failed after our Allocate.
	UnnamedTTL = 10 * time.Minute
)

// ErrNotReady says that a claim's container may not be created yet; the kubelet
// asks again.
var ErrNotReady = errors.New("the claim is not ready")

// Kind is what one device of a resource stands for, and so which sets of them
// make sense together.
type Kind int

// Kinds of devices.
const (
	// Whole: a GPU for one container alone.
	Whole Kind = iota
	// Units: a unit of GPU memory; a request's units lie on one GPU.
	Units
	// Replicas: one of n equal shares of a GPU; a request's replicas lie on
	// different GPUs.
	Replicas
)

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
}

// Resource is one extended resource and its devices.
type Resource struct {
	// Name is the full resource name, for example "example.com/gpu-mem".
	Name string
	Kind Kind
	// Devices is in the order in which the kubelet is told of them.
	Devices []Device

	index map[string]int
}

// Device is one entry of a resource's list.
type Device struct {
	ID  string
	GPU gpu.UUID
	// Healthy is what the kubelet is told.
	Healthy bool
	// Leaving marks a held device that the wanted partition does not keep: it
	// is listed healthy for its holder's sake and refused to anyone new.
	Leaving bool
	// Reason is why the device is unhealthy or leaving, for people.
	Reason string
}

// Claim is a set of devices that the kubelet has given to a container.
type Claim struct {
	// Key names the claim everywhere: cdi.Key of Resource and IDs.
	Key      string
	Resource string
	// IDs is sorted.
	IDs []string
	// GPUs has each GPU once, in the order of IDs.
	GPUs []gpu.UUID
	// Allocated is the time of the last Allocate with these IDs.
	Allocated time.Time
	// Holder is who the kubelet says has it; empty while nobody has said.
	Holder Holder
	// Named says that the kubelet has listed one of the IDs at some time.
	Named bool
	// Ready says that the claim's CDI file stands.
	Ready bool
}

// Holder is a container, by the kubelet's word.
type Holder struct {
	Namespace, Pod, Container string
}

// String is "namespace/pod", or "an unknown pod".
func (h Holder) String() string {
	if h.Pod == "" {
		return "a pod that the kubelet has not named yet"
	}
	return h.Namespace + "/" + h.Pod
}

// Holding is what the kubelet says a container has of one resource.
type Holding struct {
	Holder
	Resource string
	IDs      []string
}

type claim struct {
	Claim
	// ready is closed when the CDI file stands; replaced when it is withdrawn.
	ready chan struct{}
}

// Desk holds the view and the claims. Use [New].
type Desk struct {
	// wake is called, without the mutex, after something changed that the loop
	// should look at. It must not block.
	wake func()
	// now is the clock, an argument because this floor has none.
	now func() time.Time

	// mu guards everything below.
	mu     sync.Mutex
	view   *View
	claims map[string]*claim
	// version grows when a claim is added or ends.
	version uint64
	// changed has a channel for every resource, closed when its list changes.
	changed map[string]chan struct{}
}

// New returns a desk with no view. wake is called after every change of the
// claims but Allocate's and must not block; now is the clock.
func New(wake func(), now func() time.Time) *Desk {
	return &Desk{
		wake:    wake,
		now:     now,
		view:    &View{},
		claims:  map[string]*claim{},
		changed: map[string]chan struct{}{},
	}
}

// Publish makes a view the one in force and tells the streams of those resources
// whose lists differ. The view must not be changed afterwards. Resources of the
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
		if v := build(claims); d.publish(v, version) {
			return v
		}
	}
	claims, _ := d.look()
	v := build(claims)
	d.publish(v, anyVersion)
	return v
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
	v.Gen = d.view.Gen + 1
	byName := func(a, b Resource) int { return strings.Compare(a.Name, b.Name) }
	slices.SortFunc(v.Resources, byName)
	var carried []Resource
	for _, old := range d.view.Resources {
		if v.resource(old.Name) == nil {
			carried = append(carried, Resource{Name: old.Name, Kind: old.Kind})
		}
	}
	v.Resources = append(v.Resources, carried...)
	slices.SortFunc(v.Resources, byName)
	for i := range v.Resources {
		r := &v.Resources[i]
		old := d.view.resource(r.Name)
		if old != nil && slices.Equal(old.Devices, r.Devices) {
			r.index = old.index
			continue
		}
		r.index = make(map[string]int, len(r.Devices))
		for j := range r.Devices {
			r.index[r.Devices[j].ID] = j
		}
		if ch := d.changed[r.Name]; ch != nil {
			close(ch)
			delete(d.changed, r.Name)
		}
	}
	d.view = v
	return true
}

// View returns the view in force.
func (d *Desk) View() *View {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.view
}

// List returns the devices of a resource in the view in force, and a channel
// that is closed when a view with another list has been published.
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

// Prefer chooses n of the available devices of a resource, must among them. It
// is a pure choice on the view: nothing is claimed. An error says that no
// choice can work, with the largest request that could.
func (d *Desk) Prefer(resource string, available, must []string, n int) ([]string, error) {
	v := d.View()
	r := v.resource(resource)
	if r == nil {
		return nil, fmt.Errorf("%s is not offered by this node any more", resource)
	}
	prefer := preferWhole
	switch r.Kind {
	case Units:
		prefer = timeslice.PreferUnits
	case Replicas:
		prefer = timeslice.PreferReplicas
	}
	out, err := prefer(available, must, n, v.Rank)
	if err != nil {
		return nil, r.withCapacity(err)
	}
	return out, nil
}

// preferWhole takes GPUs in rank order, so that equal requests get equal
// answers.
func preferWhole(available, must []string, n int, rank map[gpu.UUID]int) ([]string, error) {
	out := slices.Clone(must)
	rest := make([]string, 0, len(available))
	for _, id := range available {
		if !slices.Contains(must, id) {
			rest = append(rest, id)
		}
	}
	slices.SortFunc(rest, func(a, b string) int {
		if c := rank[gpu.UUID(a)] - rank[gpu.UUID(b)]; c != 0 {
			return c
		}
		return strings.Compare(a, b)
	})
	if need := n - len(out); need > len(rest) {
		return nil, fmt.Errorf("%d whole GPUs asked for and %d are free", n, len(rest)+len(out))
	} else if need > 0 {
		out = append(out, rest[:need]...)
	}
	return out, nil
}

// Allocate writes down that the kubelet has given these devices to a container,
// and returns the claim's key. It refuses, finally for that pod, what could
// never work; it does not refuse an ID because another claim has it. It does not
// wake the loop, which would run beside the caller's answer to the kubelet and
// hold it up: Prepare does when the container is to start, and a caller that
// cannot be sure of a Prepare wakes the loop when its answer is out.
func (d *Desk) Allocate(resource string, ids []string) (key string, err error) {
	now := d.now()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.allocateLocked(resource, ids, now)
}

func (d *Desk) allocateLocked(resource string, ids []string, now time.Time) (string, error) {
	if len(ids) == 0 {
		return "", errors.New("no device was named")
	}
	r := d.view.resource(resource)
	if r == nil {
		return "", fmt.Errorf("%s is not offered by this node any more", resource)
	}
	key := cdi.Key(resource, ids)
	known := d.claims[key]
	for _, id := range ids {
		i, ok := r.index[id]
		if !ok {
			return "", fmt.Errorf("device %s is not on offer; the node's partition has changed", id)
		}
		dev := &r.Devices[i]
		switch {
		case !dev.Healthy:
			return "", fmt.Errorf("device %s was withdrawn: %s", id, dev.Reason)
		case dev.Leaving && !d.freshLocked(resource, id, now):
			return "", fmt.Errorf("device %s is leaving: %s", id, dev.Reason)
		}
	}
	gpus, err := r.gpus(ids)
	if err != nil {
		return "", r.withCapacity(err)
	}
	if known != nil {
		// The same devices again: a new pod, or the app container after the
		// init container. Who holds it is to be told anew.
		known.Allocated, known.Named, known.Holder = now, false, Holder{}
		return key, nil
	}
	sorted := slices.Clone(ids)
	slices.Sort(sorted)
	d.version++
	d.claims[key] = &claim{
		Claim: Claim{Key: key, Resource: resource, IDs: sorted, GPUs: gpus, Allocated: now},
		ready: make(chan struct{}),
	}
	return key, nil
}

// gpus checks that the devices make sense together and returns their GPUs.
func (r *Resource) gpus(ids []string) ([]gpu.UUID, error) {
	switch r.Kind {
	case Units:
		u, err := timeslice.OneGPU(ids)
		return []gpu.UUID{u}, err
	case Replicas:
		return timeslice.DistinctGPUs(ids)
	default:
		out := make([]gpu.UUID, len(ids))
		for i, id := range ids {
			out[i] = gpu.UUID(id)
		}
		return out, nil
	}
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

// freshLocked reports whether an unconfirmed claim of the last Grace covers the
// device: then the kubelet is giving an init container's device to the app
// container of the same pod.
func (d *Desk) freshLocked(resource, id string, now time.Time) bool {
	for _, c := range d.claims {
		if c.Resource == resource && !c.Named && now.Sub(c.Allocated) < Grace {
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
		if err := d.adoptLocked(resource, ids, d.now()); err != nil {
			d.mu.Unlock()
			return fmt.Errorf("%w: %w", ErrNotReady, err)
		}
		c = d.claims[key]
	}
	ready := c.ready
	done := c.Ready
	d.mu.Unlock()
	if done {
		return nil
	}
	d.wake()
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: the CDI file of claim %s is not written yet; see the agent's log and `gpu-agent status`", ErrNotReady, key)
	}
}

// Adopt takes over a claim that was made before this process started. It is
// unconfirmed until the kubelet names it.
func (d *Desk) Adopt(resource string, ids []string) error {
	d.mu.Lock()
	err := d.adoptLocked(resource, ids, d.now())
	d.mu.Unlock()
	if err == nil {
		d.wake()
	}
	return err
}

// adoptLocked makes a claim from IDs alone: the view may not have them, since
// the partition can have changed while the agent was away.
func (d *Desk) adoptLocked(resource string, ids []string, now time.Time) error {
	if len(ids) == 0 {
		return errors.New("no device was named")
	}
	key := cdi.Key(resource, ids)
	if d.claims[key] != nil {
		return nil
	}
	sorted := slices.Clone(ids)
	slices.Sort(sorted)
	var gpus []gpu.UUID
	for _, id := range sorted {
		u, err := deviceGPU(id)
		if err != nil {
			return err
		}
		if !slices.Contains(gpus, u) {
			gpus = append(gpus, u)
		}
	}
	d.version++
	d.claims[key] = &claim{
		Claim: Claim{Key: key, Resource: resource, IDs: sorted, GPUs: gpus, Allocated: now},
		ready: make(chan struct{}),
	}
	return nil
}

// deviceGPU returns the GPU that a device ID names: the whole ID, or what
// stands before "::".
func deviceGPU(id string) (gpu.UUID, error) {
	u, _, shared := strings.Cut(id, "::")
	if shared {
		u, _, err := timeslice.ParseID(id)
		return u, err
	}
	if !strings.HasPrefix(u, "GPU-") {
		return "", fmt.Errorf("device ID %q does not start with GPU-", id)
	}
	return gpu.UUID(u), nil
}

// SetReady says whether the CDI file of a claim stands.
func (d *Desk) SetReady(key string, ready bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.claims[key]
	if c == nil || c.Ready == ready {
		return
	}
	c.Ready = ready
	if ready {
		close(c.ready)
	} else {
		c.ready = make(chan struct{})
	}
}

// Waiting reports whether the CDI file of some claim is still to be written.
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

// Reconcile moves the claims along by the kubelet's word, as of the time asked:
// the moment before PodResources was called. The holdings are those of our own
// resources, one for each container and resource; what no claim covers is taken
// over. If trusted, claims that the kubelet once named
// and names no more end, and so do those that it never named and that are
// older than UnnamedTTL; nothing is judged within Grace of its last Allocate.
// It returns the claims that ended, in key order, and whether anything changed.
func (d *Desk) Reconcile(holdings []Holding, trusted bool, asked time.Time) (ended []Claim, changed bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	held := map[string]map[string]bool{}
	for _, h := range holdings {
		key := cdi.Key(h.Resource, h.IDs)
		if d.claims[key] == nil {
			// The one way to fail is an ID that is not of our making; then the
			// resource's name is ours by accident and the holding is not.
			if d.adoptLocked(h.Resource, h.IDs, asked) != nil {
				continue
			}
			changed = true
		}
		c := d.claims[key]
		if !c.Named || c.Holder != h.Holder {
			c.Named, c.Holder, changed = true, h.Holder, true
		}
		m := held[h.Resource]
		if m == nil {
			m = map[string]bool{}
			held[h.Resource] = m
		}
		for _, id := range h.IDs {
			m[id] = true
		}
	}
	if !trusted {
		return nil, changed
	}
	for key, c := range d.claims {
		age := asked.Sub(c.Allocated)
		if slices.ContainsFunc(c.IDs, func(id string) bool { return held[c.Resource][id] }) {
			// An init container's claim is a part of its pod's app container's.
			if !c.Named {
				c.Named, changed = true, true
			}
			continue
		}
		if age < Grace || !c.Named && age < UnnamedTTL {
			continue
		}
		ended = append(ended, c.Claim)
		delete(d.claims, key)
		d.version++
		changed = true
	}
	slices.SortFunc(ended, func(a, b Claim) int { return strings.Compare(a.Key, b.Key) })
	return ended, changed
}

func (v *View) resource(name string) *Resource {
	i, ok := slices.BinarySearchFunc(v.Resources, name, func(r Resource, n string) int { return strings.Compare(r.Name, n) })
	if !ok {
		return nil
	}
	return &v.Resources[i]
}
