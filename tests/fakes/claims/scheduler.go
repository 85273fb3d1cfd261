// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// ErrNoRoom says that the scheduler finds no device for a claim: its pod stays Pending.
var ErrNoRoom = errors.New("no device that fits")

// Request is one of a claim's: a device.
type Request struct {
	Name string
	// Fits chooses among devices.
	Fits func(*resourcev1.Device) bool
	// Memory is how much is asked for of a device that has a policy for it; 0 is the
	// policy's default. It is in bytes.
	Memory int64
}

// Named chooses devices by the end of their names.
func Named(suffix string) func(*resourcev1.Device) bool {
	return func(d *resourcev1.Device) bool { return strings.HasSuffix(d.Name, suffix) }
}

// Schedule makes a claim and gives it the first devices that fit, or makes none. It is for
// a pod of the claim's name.
func (c *Cluster) Schedule(namespace, name string, requests ...Request) (dra.Claim, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	claim := agentkube.Claim{Namespace: namespace, Name: name, UID: fmt.Sprintf("uid-%s-%d", name, c.made+1)}
	claim.Pods = []workload.Pod{{Namespace: namespace, Name: name, UID: "pod-" + claim.UID}}
	var err error
	if claim.Results, err = c.chooseLocked(requests); err != nil {
		return dra.Claim{}, fmt.Errorf("claim %s/%s: %w", namespace, name, err)
	}
	return c.putLocked(claim), nil
}

// Allocate gives a claim that a user has made, and that has nothing now, the first devices that
// fit, for a pod. Where there are none it has nothing still.
func (c *Cluster) Allocate(namespace, name string, pod workload.Pod, requests ...Request) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.claims {
		o := &c.claims[i]
		if o.Namespace != namespace || o.Name != name || len(o.Results) > 0 {
			continue
		}
		results, err := c.chooseLocked(requests)
		if err != nil {
			return fmt.Errorf("claim %s/%s: %w", namespace, name, err)
		}
		o.Results, o.Pods = results, []workload.Pod{pod}
		delete(c.told, o.UID) // the API server keeps nothing of what is not allocated
		return nil
	}
	return fmt.Errorf("claim %s/%s is not there, or is allocated: %w", namespace, name, gpu.ErrNotFound)
}

// chooseLocked chooses devices.
func (c *Cluster) chooseLocked(requests []Request) (results []resourcev1.DeviceRequestAllocationResult, _ error) {
	b := c.booksLocked()
	c.made++
	for i := range requests {
		r, err := b.first(&requests[i])
		if err != nil {
			return nil, fmt.Errorf("request %s: %w", requests[i].Name, err)
		}
		r.Driver = c.Driver
		if r.ShareID != nil {
			r.ShareID = Share(fmt.Sprintf("share-%d-%d", c.made, i))
		}
		results = append(results, r)
		b.add(&r)
	}
	return results, nil
}

// books are what the scheduler knows: the devices, and what is left of counters and
// capacities beside the claims.
type books struct {
	slices   []resourcev1.ResourceSlice
	devices  map[[2]string]*resourcev1.Device // by pool and name
	counters map[[3]string]int64              // by pool, set and name: what is left
	taken    map[[2]string]bool
	used     map[[3]string]int64 // by pool, device and capacity
}

func (c *Cluster) booksLocked() *books {
	b := &books{slices: c.slices, devices: map[[2]string]*resourcev1.Device{}, counters: map[[3]string]int64{},
		taken: map[[2]string]bool{}, used: map[[3]string]int64{}}
	for i := range c.slices {
		s := &c.slices[i].Spec
		for _, set := range s.SharedCounters {
			for name, n := range set.Counters {
				b.counters[[3]string{s.Pool.Name, set.Name, name}] = n.Value.Value()
			}
		}
		for j := range s.Devices {
			b.devices[[2]string{s.Pool.Name, s.Devices[j].Name}] = &s.Devices[j]
		}
	}
	for i := range c.claims {
		for j := range c.claims[i].Results {
			if r := &c.claims[i].Results[j]; r.Driver == c.Driver && !ptr.Deref(r.AdminAccess, false) {
				b.add(r)
			}
		}
	}
	return b
}

// add takes a result of a claim into account.
func (b *books) add(r *resourcev1.DeviceRequestAllocationResult) {
	key := [2]string{r.Pool, r.Device}
	for name, n := range r.ConsumedCapacity {
		b.used[[3]string{r.Pool, r.Device, string(name)}] += n.Value()
	}
	d := b.devices[key]
	if d == nil || b.taken[key] { // a shared device consumes its counters once
		return
	}
	b.taken[key] = true
	for _, take := range d.ConsumesCounters {
		for name, n := range take.Counters {
			b.counters[[3]string{r.Pool, take.CounterSet, name}] -= n.Value.Value()
		}
	}
}

// first is the first device that fits. It has a share where it is shared.
func (b *books) first(want *Request) (resourcev1.DeviceRequestAllocationResult, error) {
	order := slices.Clone(b.slices)
	slices.SortFunc(order, func(x, y resourcev1.ResourceSlice) int { return strings.Compare(x.Name, y.Name) })
	for i := range order {
		for j := range order[i].Spec.Devices {
			d, pool := &order[i].Spec.Devices[j], order[i].Spec.Pool.Name
			if len(d.Taints) > 0 || want.Fits != nil && !want.Fits(d) {
				continue
			}
			if r, ok := b.fits(pool, d, want); ok {
				return r, nil
			}
		}
	}
	return resourcev1.DeviceRequestAllocationResult{}, ErrNoRoom
}

func (b *books) fits(
	pool string, d *resourcev1.Device, want *Request,
) (resourcev1.DeviceRequestAllocationResult, bool) {
	r := resourcev1.DeviceRequestAllocationResult{Request: want.Name, Pool: pool, Device: d.Name}
	shared := ptr.Deref(d.AllowMultipleAllocations, false)
	if shared {
		r.ShareID, r.ConsumedCapacity = Share("shared"), map[resourcev1.QualifiedName]resource.Quantity{}
		for name, capacity := range d.Capacity {
			amount := capacity.Value.Value()
			if p := capacity.RequestPolicy; p != nil {
				amount = p.Default.Value()
				if name == "memory" && want.Memory > 0 {
					amount = want.Memory
				}
				if p.ValidRange != nil { // rounded up to its next step
					least, step := p.ValidRange.Min.Value(), p.ValidRange.Step.Value()
					amount = least + (max(amount-least, 0)+step-1)/step*step
				}
			}
			r.ConsumedCapacity[name] = *resource.NewQuantity(amount, resource.BinarySI)
			if b.used[[3]string{pool, d.Name, string(name)}]+amount > capacity.Value.Value() {
				return r, false
			}
		}
	}
	if b.taken[[2]string{pool, d.Name}] {
		return r, shared
	}
	for _, take := range d.ConsumesCounters {
		for name, n := range take.Counters {
			if b.counters[[3]string{pool, take.CounterSet, name}] < n.Value.Value() {
				return r, false
			}
		}
	}
	return r, true
}

// Share is a share's ID as a result of a claim has it; empty is none.
func Share(id string) *types.UID {
	if id == "" {
		return nil
	}
	return new(types.UID(id))
}

// ShareOf is the ID of a result's share, empty for none.
func ShareOf(r *resourcev1.DeviceRequestAllocationResult) string {
	return string(ptr.Deref(r.ShareID, ""))
}

// Allocated are the claims that have something, by UID.
func (c *Cluster) Allocated() map[string]agentkube.Claim {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]agentkube.Claim{}
	for i := range c.claims {
		if o := c.ofLocked(&c.claims[i], c.Driver); len(o.Results) > 0 {
			out[o.UID] = o
		}
	}
	return out
}
