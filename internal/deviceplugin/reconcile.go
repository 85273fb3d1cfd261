// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
)

// Observation is what the kubelet and the runtime say of who has what. Its parts
// concern our own resources alone.
type Observation struct {
	// Asked is the moment before the first of them was asked.
	Asked time.Time
	// Entries are those of the kubelet's checkpoint, and Checkpoint says that it
	// could be read.
	Entries    []node.Entry
	Checkpoint bool
	// Uses are the containers of the runtime that have been created and have not
	// ended, and Runtime says that it answered.
	Uses    []Use
	Runtime bool
	// Listed is what the kubelet's PodResources service lists. List says that it was
	// asked, as in every full look, and that it answered; Trusted says that it knows
	// the node's pods: after the kubelet's restart it answers at first with nothing
	// or a part.
	Listed        []node.Holding
	List, Trusted bool
	// Pods has the names of pods by UID, where they are known.
	Pods map[string]workload.Pod
	// Began is when the oldest of the containers that each pod has now was created, by UID.
	Began map[string]time.Time
}

// Use is a container of the runtime that has an allocation.
type Use struct {
	// ID is the runtime's name for the container, which no other has or will have.
	ID string
	// Key is the allocation's ID.
	Key string
	// Record is the annotation that Allocate gave to the container, empty where it has
	// the allocation's CDI device alone.
	Record string
	ledger.Holder
	// Created is by the clock as it was then.
	Created time.Time
}

// Reconcile moves the allocations along by what was observed: who has them, whether
// somebody else is still on their devices, and which have ended. What the kubelet
// names and no allocation covers is taken over.
//
// An allocation ends when kubelet and runtime agree, both asked after its last
// Allocate: the kubelet has no entry of exactly its devices, in its checkpoint or its
// list, and the runtime no container with its key, created or running. So a look in
// which the kubelet was not asked for its list ends nothing. An allocation that has had
// no container yet is kept for Grace: what the checkpoint says of its devices may be
// of the pod before. (An entry of only some of its devices is another container's: the
// checkpoint has one for each container, also for init containers.) Where the
// checkpoint cannot be read, PodResources stands in if it is trusted: then any of
// the allocation's devices keeps it, since that service leaves plain init containers
// out, and one that it has never named is kept for UnnamedTTL. Where the runtime
// does not answer, nothing ends.
//
// It returns the allocations that ended, in the order of their IDs.
func (f *FrontEnd) Reconcile(o Observation) (ended []ledger.Allocation) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.sortLocked(&o)
	if o.Runtime {
		f.meetLocked(&o)
	}
	for key, e := range f.seen {
		a, _ := f.ledger.Get(key)
		if !o.Asked.After(a.Given) && !a.Adopted {
			continue // what was said is of before
		}
		if o.Checkpoint {
			e.podUIDs, e.read = nil, true
			for _, entry := range s.entries[key] {
				if !slices.Contains(e.podUIDs, entry.PodUID) {
					e.podUIDs = append(e.podUIDs, entry.PodUID)
				}
			}
			if twice := len(e.podUIDs) > 1; twice != a.Twice {
				f.ledger.SetTwice(key, twice)
			}
		}
		f.nameLocked(&a, e, s, &o)
		if o.List && o.Runtime {
			e.over = o.Checkpoint && o.Trusted && f.overLocked(&a, e, s, &o)
		}
		overlaps := slices.ContainsFunc(e.ids, func(id string) bool { return s.held[e.resource][id] })
		e.listed = e.listed || overlaps
		age := o.Asked.Sub(a.Given)
		// The kubelet's writers of its checkpoint can overtake each other: what it
		// lists counts too.
		_, named := s.listed[key]
		old := age >= Grace || a.Adopted && !e.written.IsZero() && o.Asked.Sub(e.written) >= Grace
		over := len(s.entries[key]) == 0 && !named && (o.List && e.started || o.Trusted && old)
		if !o.Checkpoint {
			over = o.Trusted && !overlaps && (e.listed || age >= UnnamedTTL)
		}
		if over && o.Runtime && len(s.uses[key]) == 0 {
			ended = append(ended, f.endLocked(key))
		}
	}
	f.lists.showMoved()
	if o.Runtime {
		f.checkLocked(&o)
	}
	slices.SortFunc(ended, func(a, b ledger.Allocation) int { return strings.Compare(a.ID, b.ID) })
	return ended
}

// sorted is an observation by the IDs of allocations.
type sorted struct {
	entries map[string][]node.Entry
	listed  map[string]node.Holding
	uses    map[string][]Use
	// held are the devices that are listed, by resource.
	held map[string]map[string]bool
}

// sortLocked sorts an observation, and takes over what it names and nobody has heard
// of.
func (f *FrontEnd) sortLocked(o *Observation) *sorted {
	s := &sorted{
		entries: map[string][]node.Entry{}, listed: map[string]node.Holding{}, uses: map[string][]Use{},
		held: map[string]map[string]bool{},
	}
	for _, e := range o.Entries {
		if f.coverLocked(e.Resource, e.IDs) == nil {
			key := cdi.Key(e.Resource, e.IDs)
			s.entries[key] = append(s.entries[key], e)
		}
	}
	for _, h := range o.Listed {
		if f.coverLocked(h.Resource, h.IDs) != nil {
			continue
		}
		s.listed[cdi.Key(h.Resource, h.IDs)] = h
		if s.held[h.Resource] == nil {
			s.held[h.Resource] = map[string]bool{}
		}
		for _, id := range h.IDs {
			s.held[h.Resource][id] = true
		}
	}
	for _, u := range o.Uses {
		s.uses[u.Key] = append(s.uses[u.Key], u)
		if a, ok := f.ledger.Get(u.Key); ok && f.seen[u.Key] != nil && !a.CapsKnown() {
			if r, err := ledger.ReadRecord(u.Record); err == nil && cdi.Key(r.Resource, IDs(r.Grants)) == u.Key {
				f.ledger.Learn(u.Key, r.Grants)
			}
		}
	}
	return s
}

// Seen says that the runtime has had a container with an allocation, which may have
// ended since: one that lives for a moment is in no observation. The news may be late,
// so where nothing else tells whose the container is, its age must agree.
func (f *FrontEnd) Seen(u Use, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.seen[u.Key]; e != nil {
		a, _ := f.ledger.Get(u.Key)
		if f.mineLocked(&a, e, &u, false) && (len(e.podUIDs) > 0 || u.Created.After(a.Given)) {
			e.started = true
			u.Since = u.Created
			f.ledger.SetHolder(u.Key, u.Holder)
		}
	}
	f.metLocked(u.ID, now)
}

// meetLocked takes note of the containers that the runtime lists, and forgets those
// that it has no more.
func (f *FrontEnd) meetLocked(o *Observation) {
	listed := make(map[string]bool, len(o.Uses))
	for i := range o.Uses {
		listed[o.Uses[i].ID] = true
		f.metLocked(o.Uses[i].ID, o.Asked)
	}
	maps.DeleteFunc(f.met, func(id string, m met) bool { return !listed[id] && m.last.Before(o.Asked) })
}

func (f *FrontEnd) metLocked(id string, at time.Time) {
	if id == "" {
		return
	}
	m, known := f.met[id]
	if !known {
		_, m.epoch, _ = f.ledger.State()
	}
	if at.After(m.last) {
		m.last = at
	}
	f.met[id] = m
}

// overLocked reports whether the kubelet has an allocation for an init container that has ended. A
// kubelet that has lost its checkpoint allocates anew for all containers of a pod that do not run. It
// does so before it creates any container of a new pod: so this pod is older. PodResources leaves
// plain init containers out.
func (f *FrontEnd) overLocked(a *ledger.Allocation, e *evidence, s *sorted, o *Observation) bool {
	_, listed := s.listed[a.ID]
	if a.Adopted || e.started || listed || len(s.uses[a.ID]) > 0 || len(e.podUIDs) != 1 {
		return false
	}
	began := o.Began[e.podUIDs[0]]
	return !began.IsZero() && began.Before(a.Given)
}

// Over reports whether an allocation is of an init container that has ended: no container comes for
// it, and the kubelet gives it back when its pod ends.
func (f *FrontEnd) Over(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.seen[id]
	return e != nil && e.over
}

// nameLocked works out who the holder is, the surest word first.
func (f *FrontEnd) nameLocked(a *ledger.Allocation, e *evidence, s *sorted, o *Observation) {
	h, since := a.Holder, a.Holder.Since
	for i := range s.uses[a.ID] {
		if u := &s.uses[a.ID][i]; f.mineLocked(a, e, u, o.Checkpoint) {
			h, e.started = u.Holder, true
			if since.IsZero() || u.Created.Before(since) {
				since = u.Created
			}
		}
	}
	if l, ok := s.listed[a.ID]; ok {
		h = ledger.Holder{Pod: workload.Pod{Namespace: l.Namespace, Name: l.Pod}, Container: l.Container}
	} else {
		for _, entry := range s.entries[a.ID] {
			if p, ok := o.Pods[entry.PodUID]; ok {
				h = ledger.Holder{Pod: p, Container: entry.Container}
			}
		}
	}
	if h.Name != "" && len(e.podUIDs) > 0 {
		h.UID = e.podUIDs[0]
	}
	h.Since = since
	if h != a.Holder {
		a.Holder = h
		f.ledger.SetHolder(a.ID, h)
	}
}

// mineLocked reports whether a container with the key or the devices of an allocation
// belongs to the pod that has the allocation now, not to one before it. read says that
// the checkpoint was read after the container was listed. In doubt it does not: an
// allocation that waits in vain loses a moment, and two pods on one device lose their
// work.
//
// A pod's devices are allocated before any of its containers is made. So a container
// that was known before the Allocate is another pod's. Of any other the checkpoint
// tells, which names every pod that has a container, but may still be of before the
// Allocate where it names a pod that it named then. Else the gate tells, which the
// Allocate has shut: a pod has no container with an allocation that has not been open
// since, and nobody else comes onto the devices of one that has. None of this depends
// on a clock. The time of creation decides last, where there is no other word on an
// allocation that was made before this process started.
func (f *FrontEnd) mineLocked(a *ledger.Allocation, e *evidence, u *Use, read bool) bool {
	same, inherited := u.Key == a.ID, a.Epoch == 0
	if m, known := f.met[u.ID]; known && !inherited && m.epoch < a.Epoch {
		return false
	}
	if a.Adopted && len(e.podUIDs) == 0 {
		return same
	}
	if read || len(e.podUIDs) > 0 {
		if !slices.Contains(e.podUIDs, u.UID) {
			return false
		}
		if !e.unread && !slices.Contains(e.former, u.UID) {
			return true
		}
	}
	return a.Opened || same && inherited && u.Created.After(a.Given)
}

// checkLocked finds out, for each allocation that is not open, whose containers are
// still on its devices: a force-deleted pod frees them at the kubelet before its
// containers are dead.
//
// The kubelet can give the same devices to two pods that live. It books them before it calls
// Allocate, and the pod after that; when it is asked for PodResources in between, and has a
// pod to forget, it forgets what is booked. The calls for the two look alike. So one
// container is let through at a time: while one lives, or may be about to be created,
// nobody else is.
func (f *FrontEnd) checkLocked(o *Observation) {
	held := f.ledger.Allocations()
	byID := make(map[string]*ledger.Allocation, len(held))
	for i := range held {
		byID[held[i].ID] = &held[i]
	}
	for i := range held {
		a, e := &held[i], f.seen[held[i].ID]
		if e == nil || a.IsOpen() && !a.Twice || !o.Asked.After(a.Given) && !a.Adopted {
			continue
		}
		var others, told []string
		if a.Twice && o.Asked.Sub(a.Entered) < Grace {
			const somebody = "a container that is about to be created"
			others, told = []string{somebody}, []string{somebody}
		}
		for j := range o.Uses {
			u := &o.Uses[j]
			other := byID[u.Key]
			if other == nil || !(a.Twice && u.Key == a.ID) && f.mineLocked(a, e, u, o.Checkpoint) {
				continue
			}
			if f.ledger.Overlap(a.Grants, other.Grants) {
				namespace := a.Holder.Namespace
				if slices.Contains(e.podUIDs, u.UID) {
					namespace = "" // the checkpoint is of before: so may be the name
				}
				others, told = append(others, u.Holder.String()), append(told, u.Told(namespace, u.Key))
			}
		}
		if a.IsOpen() && len(others) > 0 {
			f.ledger.Shut(a.ID)
		}
		f.ledger.Looked(a.ID, a.Epoch, list(others), list(told))
	}
}

// list is words in order, each once.
func list(words []string) string {
	slices.Sort(words)
	return strings.Join(slices.Compact(words), ", ")
}
