// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"slices"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// allocations maps the key of each allocation to it. Its grants have what its containers may use.
type allocations map[string]*ledger.Allocation

// on returns how many bytes of a GPU the containers of an allocation may use. ok is false if it has
// no grant there, or if no record has the amount.
func (a allocations) on(key string, u gpu.UUID) (bytes uint64, ok bool) {
	c := a[key]
	if c == nil {
		return 0, false
	}
	limit := c.Cap(u)
	return limit.Bytes, limit.Known
}

// share returns the share of a GPU's SMs that the containers of an allocation have; zero if they have none of
// their own.
func (a allocations) share(key string, u gpu.UUID) (most compute.Share) {
	if c := a[key]; c != nil {
		for i := range c.Grants {
			if g := &c.Grants[i]; g.GPU == u {
				most.Ceiling = max(most.Ceiling, g.Compute.Ceiling)
			}
		}
	}
	return most
}

// roster is the runtime's list of containers, with those that use a GPU and are missing in it.
type roster struct {
	runtime    Runtime
	own        workload.Pod                 // the agent's own pod
	domain     string                       // in the names of allocations
	containers map[string]*node.Container   // by ID
	of         map[string][]*node.Container // by the key of an allocation that they were given
	// listed is the time at which the present list was asked for. relist is the time before which
	// the next is not asked for. listing receives the answer; it is nil if none is awaited.
	listed, relist time.Time
	listing        chan listing
	missing        map[place]*unlistedContainer
}

// listing is the runtime's answer, and the time at which the guard asked for it.
type listing struct {
	asked time.Time
	list  []node.Container
	err   error
}

// unlistedContainer is a container that uses a GPU and that the runtime does not list. A sandboxed
// runtime has the processes of all of a pod's containers in one such container.
type unlistedContainer struct {
	// first is when it was first seen, and seen when it was last seen.
	first, seen time.Time
	reported    bool
	procs       int
	podUID      string
}

// refresh asks the runtime for its list if the present one is too old, which is sooner if it lacks
// a container that has processes. It reports whether there is a new list.
func (r *roster) refresh(ctx context.Context, now time.Time, sums map[string]*sum) bool {
	wait := time.Duration(0)
	if r.listing == nil {
		every := listEvery
		for id := range sums {
			if r.containers[id] == nil {
				every = min(every, r.relistFor(id))
			}
		}
		if now.Before(r.relist) || now.Sub(r.listed) < every {
			return false
		}
		wait = listWait
		r.listing = make(chan listing, 1)
		go func(to chan<- listing) {
			ctx, cancel := context.WithTimeout(ctx, runtimeTimeout)
			defer cancel()
			list, err := r.runtime.Containers(ctx)
			to <- listing{now, list, err}
		}(r.listing)
	}
	var got listing
	select {
	case got = <-r.listing:
	default:
		select {
		case got = <-r.listing:
		case <-time.After(wait):
			return false
		}
	}
	r.listing, r.relist = nil, now.Add(listSoon)
	if got.err != nil {
		return false
	}
	r.listed = got.asked
	r.containers, r.of = make(map[string]*node.Container, len(got.list)), map[string][]*node.Container{}
	for i := range got.list {
		c := &got.list[i]
		r.containers[c.ID] = c
		for _, key := range r.keys(c) {
			r.of[key] = append(r.of[key], c)
		}
	}
	return true
}

// knows reports whether all that a container holds is known: it is listed with its CDI devices, and
// all of its allocations are known with all their caps. It is false for the agent's own containers.
func (r *roster) knows(id string, held allocations) bool {
	c := r.containers[id]
	if c == nil || c.CDIUnknown || r.isOwn(c) {
		return false
	}
	for _, key := range r.keys(c) {
		if c := held[key]; c == nil || !c.CapsKnown() {
			return false
		}
	}
	return true
}

func (r *roster) isOwn(c *node.Container) bool {
	return r.own != (workload.Pod{}) && c.Namespace == r.own.Namespace && c.Pod == r.own.Name
}

// keys returns the keys of the allocations that a container was given, in order.
func (r *roster) keys(c *node.Container) []string { return cdi.Keys(r.domain, c.Annotations, c.CDI) }

// share is what a container may use of a GPU by one allocation.
type share struct {
	allocation string
	bytes      uint64
}

// holds returns what a container may use of a GPU, the largest share first. The first is its home:
// on that page its processes count all that they have. See claim_before in
// pkg/memcap/lib/c/claim.h.
func (r *roster) holds(c *node.Container, u gpu.UUID, held allocations) (shares []share) {
	for _, key := range r.keys(c) {
		if bytes, ok := held.on(key, u); ok {
			shares = append(shares, share{key, bytes})
		}
	}
	slices.SortStableFunc(shares, func(a, b share) int { return cmp.Compare(b.bytes, a.bytes) })
	return shares
}

// podHas returns how many bytes of a GPU all containers of a pod may use together. pod is one of
// the pod's listed containers, or nil if there is none. If sure is false, the pod may use more than
// bytes, or nothing.
func (r *roster) podHas(uid string, u gpu.UUID, held allocations) (pod *node.Container, bytes uint64, sure bool) {
	keys, named := map[string]bool{}, map[string]bool{}
	sure = true
	for _, c := range r.containers {
		for _, key := range r.keys(c) {
			named[key] = true
			keys[key] = keys[key] || c.PodUID == uid
		}
		if c.PodUID != uid {
			continue
		}
		sure = sure && !c.CDIUnknown
		if pod == nil || c.ID < pod.ID {
			pod = c
		}
	}
	if uid == "" || pod == nil {
		return nil, 0, false
	}
	has := false
	for key, its := range keys {
		if _, known := held[key]; its && !known {
			sure = false // its amount is not known
		}
	}
	for key, c := range held {
		limit, on := held.on(key, u)
		who := c.Holder
		switch {
		case !c.CapsKnown():
			sure = sure && !keys[key]
		case !on:
		case keys[key] || who.Namespace == pod.Namespace && who.Name == pod.Pod:
			has = true
			bytes += min(limit, lib.None-bytes)
		case who.Name == "" && !named[key]:
			sure = false // its holder is not known and may be this pod
		}
	}
	return pod, bytes, sure && has
}

// hasUnlisted reports whether a pod has a container on a GPU that the runtime does not list.
func (r *roster) hasUnlisted(podUID string, u gpu.UUID) bool {
	for p, s := range r.missing {
		if p.gpu == u && s.podUID == podUID && r.listed.After(s.first) {
			return true
		}
	}
	return false
}

// offender returns the container that the judge has named. For one that the runtime does not list,
// it returns one with only its ID and the pod. It returns nil if the pod is not known.
func (r *roster) offender(p place, held allocations) *node.Container {
	if c := r.containers[p.container]; c != nil {
		return c
	}
	s := r.missing[p]
	if s == nil {
		return nil
	}
	pod, _, _ := r.podHas(s.podUID, p.gpu, held)
	if pod == nil {
		return nil
	}
	return &node.Container{ID: p.container, PodUID: pod.PodUID, Namespace: pod.Namespace, Pod: pod.Pod}
}

// isNew reports whether a container is so new that the runtime may soon report what it holds.
func (r *roster) isNew(p place, now time.Time) bool {
	if c := r.containers[p.container]; c != nil {
		return c.CDIUnknown && now.Sub(c.Created) < unlistedGrace
	}
	s := r.missing[p]
	return s == nil || r.listed.Sub(s.first) < unlistedGrace
}

// relistFor returns how old the list of containers may be if it lacks this one.
func (r *roster) relistFor(id string) time.Duration {
	for p, s := range r.missing {
		if p.container == id && r.listed.Sub(s.first) >= unlistedGrace {
			return unlistedEvery
		}
	}
	return 0
}
