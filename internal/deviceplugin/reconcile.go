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

// Observation is what the kubelet and the runtime report about holders at one moment. It covers
// only the agent's own resources.
type Observation struct {
	// Asked is the time just before the first of them was asked.
	Asked time.Time
	// Entries are those of the kubelet's checkpoint. Checkpoint is true if it could be read.
	Entries    []node.Entry
	Checkpoint bool
	// Uses are the runtime's containers with allocations that were created and have not ended.
	// Runtime is true if the runtime answered.
	Uses    []Use
	Runtime bool
	// Listed is what the kubelet's PodResources service lists. List is true if the service was
	// asked, as in every full look, and answered. Trusted is true if the answer knows the node's
	// pods: after a restart, the kubelet at first answers with none or some of them.
	Listed        []node.Holding
	List, Trusted bool
	// Pods maps the UIDs of pods to their names, as far as known.
	Pods map[string]workload.Pod
	// Began maps the UID of each pod to when the oldest of its present containers was created.
	Began map[string]time.Time
}

// Use is a container of the runtime that has an allocation.
type Use struct {
	// ID is the container's ID in the runtime, which never reuses it.
	ID string
	// Key is the allocation's ID.
	Key string
	// Record is the annotation that Allocate gave to the container. Empty if the container has only
	// the allocation's CDI device.
	Record string
	ledger.Holder
	// Created is the time of creation, by the node's clock at that time.
	Created time.Time
}

// Reconcile applies an observation to the allocations: it sets their holders, finds containers of
// other pods on their devices, and ends those that have ended. It adopts what the kubelet names and
// no allocation covers. It returns the allocations that ended, in the order of their IDs.
//
// An allocation ends if the kubelet and the runtime agree, both asked after its last Allocate:
//
//   - The kubelet has no entry with exactly its devices, neither in its checkpoint nor in its list.
//   - The runtime has no container with its key, created or running.
//
// There are four limits to this:
//
//   - If the kubelet was not asked for its list, nothing ends.
//   - If the runtime does not answer, nothing ends.
//   - An allocation that has had no container yet is kept for Grace: the checkpoint may still be
//     that of an earlier pod with the same devices.
//   - If the checkpoint cannot be read, PodResources decides alone, if it is trusted. Any of the
//     allocation's devices then keeps it, since that service leaves plain init containers out. An
//     allocation that the service has never named is kept for UnnamedTTL.
//
// An entry with only some of the devices belongs to another container: the checkpoint has one entry
// for each container, also for init containers.
func (f *FrontEnd) Reconcile(o Observation) (ended []ledger.Allocation) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.sortLocked(&o)
	if o.Runtime {
		f.noteContainersLocked(&o)
	}
	for key, e := range f.seen {
		a, _ := f.ledger.Get(key)
		if !o.Asked.After(a.Given) && !a.Adopted {
			continue // the observation is from before its last Allocate
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
			e.initEnded = o.Checkpoint && o.Trusted && f.initEndedLocked(&a, e, s, &o)
		}
		overlaps := slices.ContainsFunc(e.ids, func(id string) bool { return s.held[e.resource][id] })
		e.listed = e.listed || overlaps
		age := o.Asked.Sub(a.Given)
		// Two writers of the checkpoint in the kubelet can overtake each other, so its list counts
		// too.
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

// sorted is an observation by allocation ID.
type sorted struct {
	entries map[string][]node.Entry
	listed  map[string]node.Holding
	uses    map[string][]Use
	// held has the devices of listed, by resource.
	held map[string]map[string]bool
}

// sortLocked sorts an observation. It adopts allocations that the observation names and the ledger
// does not have.
func (f *FrontEnd) sortLocked(o *Observation) *sorted {
	s := &sorted{
		entries: map[string][]node.Entry{}, listed: map[string]node.Holding{}, uses: map[string][]Use{},
		held: map[string]map[string]bool{},
	}
	for _, e := range o.Entries {
		if f.adoptLocked(e.Resource, e.IDs) == nil {
			key := cdi.Key(e.Resource, e.IDs)
			s.entries[key] = append(s.entries[key], e)
		}
	}
	for _, h := range o.Listed {
		if f.adoptLocked(h.Resource, h.IDs) != nil {
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
		if e := f.seen[u.Key]; e != nil && u.Created.After(e.created) {
			e.created = u.Created
		}
		if a, ok := f.ledger.Get(u.Key); ok && f.seen[u.Key] != nil && !a.CapsKnown() {
			if r, err := ledger.ReadRecord(u.Record); err == nil && cdi.Key(r.Resource, IDs(r.Grants)) == u.Key {
				f.ledger.Learn(u.Key, r.Grants)
			}
		}
	}
	return s
}

// Seen records that the runtime has, or had, a container with an allocation. A container that lives
// for a moment is in no observation. The report may be late. So if no other evidence tells whose
// container it is, it counts only if it was created after the Allocate.
func (f *FrontEnd) Seen(u Use, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.seen[u.Key]; e != nil {
		a, _ := f.ledger.Get(u.Key)
		if f.belongsLocked(&a, e, &u, false) && (len(e.podUIDs) > 0 || u.Created.After(a.Given)) {
			e.started = true
			if u.Created.After(e.created) {
				e.created = u.Created
			}
			u.Since = u.Created
			f.ledger.SetHolder(u.Key, u.Holder)
		}
	}
	f.noteContainerLocked(u.ID, now)
}

// noteContainersLocked records the containers that the runtime lists, and forgets those that it
// does not list any longer.
func (f *FrontEnd) noteContainersLocked(o *Observation) {
	listed := make(map[string]bool, len(o.Uses))
	for i := range o.Uses {
		listed[o.Uses[i].ID] = true
		f.noteContainerLocked(o.Uses[i].ID, o.Asked)
	}
	maps.DeleteFunc(f.containers, func(id string, m sighting) bool { return !listed[id] && m.last.Before(o.Asked) })
}

func (f *FrontEnd) noteContainerLocked(id string, at time.Time) {
	if id == "" {
		return
	}
	m, known := f.containers[id]
	if !known {
		_, m.epoch, _ = f.ledger.State()
	}
	if at.After(m.last) {
		m.last = at
	}
	f.containers[id] = m
}

// initEndedLocked reports whether an allocation belongs to an init container that has ended. A
// kubelet that has lost its checkpoint allocates anew for all containers of a pod that do not run.
// For a new pod, it allocates before it creates any container. So a pod with a container older than
// the allocation is such a case. PodResources leaves plain init containers out.
func (f *FrontEnd) initEndedLocked(a *ledger.Allocation, e *evidence, s *sorted, o *Observation) bool {
	_, listed := s.listed[a.ID]
	if a.Adopted || e.started || listed || len(s.uses[a.ID]) > 0 || len(e.podUIDs) != 1 {
		return false
	}
	began := o.Began[e.podUIDs[0]]
	return !began.IsZero() && began.Before(a.Given)
}

// Over reports whether an allocation belongs to an init container that has ended. No container
// starts with it, and the kubelet frees it when its pod ends.
func (f *FrontEnd) Over(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.seen[id]
	return e != nil && e.initEnded
}

// nameLocked sets the holder of an allocation. PodResources decides before the checkpoint, and the
// checkpoint before the runtime.
func (f *FrontEnd) nameLocked(a *ledger.Allocation, e *evidence, s *sorted, o *Observation) {
	h, since := a.Holder, a.Holder.Since
	for i := range s.uses[a.ID] {
		if u := &s.uses[a.ID][i]; f.belongsLocked(a, e, u, o.Checkpoint) {
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

// Belongs reports whether a container with the key of an allocation belongs to its present holder. In doubt it
// returns false.
func (f *FrontEnd) Belongs(u Use) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.seen[u.Key]
	a, known := f.ledger.Get(u.Key)
	return e != nil && known && f.belongsLocked(&a, e, &u, false)
}

// belongsLocked reports whether a container with the key or the devices of an allocation belongs to
// its present holder's pod, not to an earlier one. read is true if the checkpoint was read after
// the container was listed. In doubt it returns false: an allocation that waits in vain loses a
// moment, but two pods on one device lose their work.
//
// It decides by these rules, in this order:
//
//   - A pod's devices are allocated before any of its containers is created. So a container that
//     was known before the Allocate is another pod's.
//   - The checkpoint names every pod that has a container. It may be older than the Allocate,
//     though, if it names a pod that it also named before the Allocate.
//   - The Allocate shuts the allocation. Until it opens, its pod gets no container with it; once it
//     is open, no other pod gets onto its devices. So the container is the holder's if the
//     allocation has been open since.
//   - The time of creation decides only if nothing else is known of an allocation from before this
//     process started.
//
// Only the last rule depends on a clock.
func (f *FrontEnd) belongsLocked(a *ledger.Allocation, e *evidence, u *Use, read bool) bool {
	same, inherited := u.Key == a.ID, a.Epoch == 0
	if m, known := f.containers[u.ID]; known && !inherited && m.epoch < a.Epoch {
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

// checkLocked finds out, for each allocation that is not open, which other containers are still on
// its devices. The kubelet frees the devices of a force-deleted pod before the pod's containers
// have ended.
//
// The kubelet can also give the same devices to two living pods. It records the devices before it
// calls Allocate, and the pod afterwards. If it is asked for PodResources in between and has to
// forget an ended pod, it forgets the recorded devices too. The calls for the two pods look alike.
// So checkLocked lets one container start at a time. While one runs, or may be about to be created,
// no other starts.
func (f *FrontEnd) checkLocked(o *Observation) {
	held := f.ledger.Allocations()
	byID := make(map[string]*ledger.Allocation, len(held))
	for i := range held {
		byID[held[i].ID] = &held[i]
	}
	for i := range held {
		a, e := &held[i], f.seen[held[i].ID]
		if e != nil && a.Yielding() {
			f.checkYieldLocked(a, o)
			continue
		}
		if e == nil || a.IsOpen() && !a.Twice || !o.Asked.After(a.Given) && !a.Adopted {
			continue
		}
		var others, told []string
		if a.Twice && o.Asked.Sub(a.Entered) < Grace || f.startsInSpotLocked(a, held, o) {
			const somebody = "a container that is about to be created"
			others, told = []string{somebody}, []string{somebody}
		}
		for j := range o.Uses {
			u := &o.Uses[j]
			other := byID[u.Key]
			if other == nil || other.Tier == ledger.Spot && other.Out() ||
				!(a.Twice && u.Key == a.ID) && f.belongsLocked(a, e, u, o.Checkpoint) ||
				a.Free(other.Tier) || other.Free(a.Tier) {
				continue
			}
			if f.ledger.Overlap(a.Grants, other.Grants) {
				namespace := a.Holder.Namespace
				if slices.Contains(e.podUIDs, u.UID) {
					namespace = "" // the checkpoint may be older than the Allocate, and so may the name
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

// checkYieldLocked finds out whether a spot allocation that yields has a container still. Since it was asked to
// yield, none is let in.
func (f *FrontEnd) checkYieldLocked(a *ledger.Allocation, o *Observation) {
	if o.Asked.After(a.Yield.Since) && !f.startsLocked(a, o) &&
		!slices.ContainsFunc(o.Uses, func(u Use) bool { return u.Key == a.ID }) {
		f.ledger.SetOut(a.ID, a.Epoch)
	}
}

// startsInSpotLocked reports whether a container may be about to be created that has room of a guaranteed
// allocation in the spot tier: it was let in before that allocation was made.
func (f *FrontEnd) startsInSpotLocked(a *ledger.Allocation, held []ledger.Allocation, o *Observation) bool {
	if a.Tier != ledger.Guaranteed {
		return false
	}
	return slices.ContainsFunc(held, func(s ledger.Allocation) bool {
		return slices.Contains(s.Yield.To, a.ID) && f.startsLocked(&s, o)
	})
}

// startsLocked reports whether a container of an allocation may be about to be created: Prepare has let it in,
// and the runtime has not shown it yet. If the kubelet asks for it again, its creation has failed: the runtime
// refuses a container whose CDI file is gone.
func (f *FrontEnd) startsLocked(a *ledger.Allocation, o *Observation) bool {
	e := f.seen[a.ID]
	if a.Back.After(a.Entered) && o.Asked.After(a.Back) {
		return false
	}
	return e != nil && !a.Entered.IsZero() && o.Asked.Sub(a.Entered) < Grace && e.created.Before(a.Entered)
}

// list joins words in sorted order, each once.
func list(words []string) string {
	slices.Sort(words)
	return strings.Join(slices.Compact(words), ", ")
}
