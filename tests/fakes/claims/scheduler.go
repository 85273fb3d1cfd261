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
)

// ErrNoRoom says that the scheduler finds no device for a claim: its pod stays Pending.
var ErrNoRoom = errors.New("no device that fits")

// Request is one of a claim's: a device.
type Request struct {
	Name string
	// Fits chooses among devices.
	Fits func(*agentkube.PoolDevice) bool
	// Memory is how much is asked for of a device that has a policy for it; 0 is the
	// policy's default.
	Memory agentkube.Quantity
}

// Named chooses devices by the end of their names.
func Named(suffix string) func(*agentkube.PoolDevice) bool {
	return func(d *agentkube.PoolDevice) bool { return strings.HasSuffix(d.Name, suffix) }
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
func (c *Cluster) chooseLocked(requests []Request) (results []agentkube.Result, _ error) {
	b := c.booksLocked()
	c.made++
	for i := range requests {
		r, err := b.first(&requests[i])
		if err != nil {
			return nil, fmt.Errorf("request %s: %w", requests[i].Name, err)
		}
		r.Driver = c.Driver
		if r.Share != "" {
			r.Share = fmt.Sprintf("share-%d-%d", c.made, i)
		}
		results = append(results, r)
		b.add(&r)
	}
	return results, nil
}

// books are what the scheduler knows: the devices, and what is left of counters and
// capacities beside the claims.
type books struct {
	slices   []agentkube.ResourceSlice
	devices  map[[2]string]*agentkube.PoolDevice // by pool and name
	counters map[[3]string]agentkube.Quantity    // by pool, set and name: what is left
	taken    map[[2]string]bool
	used     map[[3]string]agentkube.Quantity // by pool, device and capacity
}

func (c *Cluster) booksLocked() *books {
	b := &books{slices: c.slices, devices: map[[2]string]*agentkube.PoolDevice{}, counters: map[[3]string]agentkube.Quantity{}, taken: map[[2]string]bool{}, used: map[[3]string]agentkube.Quantity{}}
	for i := range c.slices {
		s := &c.slices[i]
		for _, set := range s.Counters {
			for name, n := range set.Counters {
				b.counters[[3]string{s.Pool.Name, set.Name, name}] = n.Value
			}
		}
		for j := range s.Devices {
			b.devices[[2]string{s.Pool.Name, s.Devices[j].Name}] = &s.Devices[j]
		}
	}
	for i := range c.claims {
		for j := range c.claims[i].Results {
			if r := &c.claims[i].Results[j]; r.Driver == c.Driver && !r.Admin {
				b.add(r)
			}
		}
	}
	return b
}

// add takes a result of a claim into account.
func (b *books) add(r *agentkube.Result) {
	key := [2]string{r.Pool, r.Device}
	for name, n := range r.Capacity {
		b.used[[3]string{r.Pool, r.Device, name}] += n
	}
	d := b.devices[key]
	if d == nil || b.taken[key] { // a shared device consumes its counters once
		return
	}
	b.taken[key] = true
	for _, take := range d.Consumes {
		for name, n := range take.Counters {
			b.counters[[3]string{r.Pool, take.Set, name}] -= n.Value
		}
	}
}

// first is the first device that fits. Its Share is set where it is shared.
func (b *books) first(want *Request) (agentkube.Result, error) {
	order := slices.Clone(b.slices)
	slices.SortFunc(order, func(x, y agentkube.ResourceSlice) int { return strings.Compare(x.Name, y.Name) })
	for i := range order {
		for j := range order[i].Devices {
			d, pool := &order[i].Devices[j], order[i].Pool.Name
			if len(d.Taints) > 0 || want.Fits != nil && !want.Fits(d) {
				continue
			}
			if r, ok := b.fits(pool, d, want); ok {
				return r, nil
			}
		}
	}
	return agentkube.Result{}, ErrNoRoom
}

func (b *books) fits(pool string, d *agentkube.PoolDevice, want *Request) (agentkube.Result, bool) {
	r := agentkube.Result{Request: want.Name, Pool: pool, Device: d.Name}
	if d.Shared {
		r.Share, r.Capacity = "shared", map[string]agentkube.Quantity{}
		for name, capacity := range d.Capacity {
			amount := capacity.Value
			if p := capacity.Policy; p != nil {
				amount = p.Default
				if name == "memory" && want.Memory > 0 {
					amount = want.Memory
				}
				if p.Range != nil { // rounded up to its next step
					amount = p.Range.Min + (max(amount-p.Range.Min, 0)+p.Range.Step-1)/p.Range.Step*p.Range.Step
				}
			}
			r.Capacity[name] = amount
			if b.used[[3]string{pool, d.Name, name}]+amount > capacity.Value {
				return r, false
			}
		}
	}
	if b.taken[[2]string{pool, d.Name}] {
		return r, d.Shared
	}
	for _, take := range d.Consumes {
		for name, n := range take.Counters {
			if b.counters[[3]string{pool, take.Set, name}] < n.Value {
				return r, false
			}
		}
	}
	return r, true
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
