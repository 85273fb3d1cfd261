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
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// allocations are the allocations that somebody has, by their keys. Their grants say what
// their containers may have.
type allocations map[string]*ledger.Allocation

// on is what the containers of an allocation may have of a GPU; ok is false where it
// has nothing there, and where no record says how much.
func (a allocations) on(key string, u gpu.UUID) (bytes uint64, ok bool) {
	c := a[key]
	if c == nil {
		return 0, false
	}
	limit := c.Cap(u)
	return limit.Bytes, limit.Known
}

// roster is the runtime's list of containers, and the containers that use a GPU and
// are not on it.
type roster struct {
	runtime    Runtime
	own        workload.Pod                 // the agent's own pod
	domain     string                       // of the names of allocations
	containers map[string]*node.Container   // by ID
	of         map[string][]*node.Container // by the key of an allocation that they were given
	// listed is when those were asked for, relist when they may be again, and
	// listing has the answer if one is waited for.
	listed, relist time.Time
	listing        chan listing
	strays         map[place]*stray
}

// listing is what came of asking for the containers.
type listing struct {
	asked time.Time
	list  []node.Container
	err   error
}

// stray is a container that uses a GPU and that the runtime does not list. A sandboxed
// runtime has the processes of all of a pod's containers in one that it alone knows.
type stray struct {
	// first is when it was first seen, and seen when it was last.
	first, seen time.Time
	told        bool
	procs       int
	podUID      string
}

// refresh asks for the list of containers where it is old, or lacks one that was
// seen. It reports whether there is another list now.
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
			ctx, cancel := context.WithTimeout(ctx, runtimePatience)
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

// knows says whether all that a container holds is known: it is listed with its CDI
// devices, and each of its allocations is, with every cap.
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

// keys are the allocations that a container was given, in order.
func (r *roster) keys(c *node.Container) []string { return cdi.Keys(r.domain, c.Annotations, c.CDI) }

// share is what a container may have of a GPU by one allocation.
type share struct {
	allocation string
	bytes      uint64
}

// holds says what a container may have of a GPU. The first share is its home, on whose page
// its processes count all that they have: see claim_before in pkg/memcap/lib/c/claim.h.
func (r *roster) holds(c *node.Container, u gpu.UUID, held allocations) (shares []share) {
	for _, key := range r.keys(c) {
		if bytes, ok := held.on(key, u); ok {
			shares = append(shares, share{key, bytes})
		}
	}
	slices.SortStableFunc(shares, func(a, b share) int { return cmp.Compare(b.bytes, a.bytes) })
	return shares
}

// podHas says what all containers of a pod may have of a GPU together, in bytes,
// and which pod it is: one of its containers, nil where none is listed. Unless that
// is sure it may be more, or nothing.
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
			sure = false // given out, and what it is is not known
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
			sure = false // nobody has said whose it is: it may be this pod's
		}
	}
	return pod, bytes, sure && has
}

// strayed says whether a pod has a container on a GPU that the runtime does not list.
func (r *roster) strayed(podUID string, u gpu.UUID) bool {
	for p, s := range r.strays {
		if p.gpu == u && s.podUID == podUID && r.listed.After(s.first) {
			return true
		}
	}
	return false
}

// offender is whose a container is that the judge has found guilty: also of one that
// the runtime does not list. It is nil where that is not known.
func (r *roster) offender(p place, held allocations) *node.Container {
	if c := r.containers[p.container]; c != nil {
		return c
	}
	s := r.strays[p]
	if s == nil {
		return nil
	}
	pod, _, _ := r.podHas(s.podUID, p.gpu, held)
	if pod == nil {
		return nil
	}
	return &node.Container{ID: p.container, PodUID: pod.PodUID, Namespace: pod.Namespace, Pod: pod.Pod}
}

// isNew says whether it may only be a matter of time until it is known what a container
// holds.
func (r *roster) isNew(p place, now time.Time) bool {
	if c := r.containers[p.container]; c != nil {
		return c.CDIUnknown && now.Sub(c.Created) < unlistedGrace
	}
	s := r.strays[p]
	return s == nil || r.listed.Sub(s.first) < unlistedGrace
}

// relistFor is how old the list of containers may be that lacks this one.
func (r *roster) relistFor(id string) time.Duration {
	for p, s := range r.strays {
		if p.container == id && r.listed.Sub(s.first) >= unlistedGrace {
			return unlistedEvery
		}
	}
	return 0
}
