// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
)

// A claim that a user has made keeps its UID when its pods have ended. The scheduler takes its
// allocation away then, and allocates the claim anew for its next pods: with another device, share
// or amount. So whenever the agent has read a claim at the API server, it compares the claim with
// what the ledger has under that UID. What differs is given to no further container.
//
// For pods whose claim was compared once, the ledger alone is enough. A claim keeps its allocation
// while it is reserved for a pod that has not ended, and a pod that has ended does not come back.

// book records the allocations of each claim. It makes no calls and never waits. Its lock comes
// before the shelf's and the ledger's. Use newBook.
type book struct {
	o     *Options
	shelf shown
	// look wakes the sweeper, when a claim needs its attention.
	look  token
	began time.Time

	// mu guards everything below.
	mu sync.Mutex
	// claims has what each claim has here, by UID.
	claims map[string]*held
	// reallocated has the claims that were allocated anew while they had something here, by UID,
	// until they have their new allocations.
	reallocated map[string]dra.Claim
	// unprepared has the claims that the kubelet has given back, by UID. The API server shows them
	// as allocated for a while yet.
	unprepared map[string]unprepared
	// uses has the containers of each allocation, without allocations that have ended since. It is
	// nil until containers are known. usesAt is the time at which the runtime was asked; zero
	// before the first Observe.
	uses   map[string][]ledger.Holder
	usesAt time.Time
}

// shown is the part of the shelf that Prepare needs.
type shown interface {
	now() view
	while(func(view))
}

// held is what a claim has here.
type held struct {
	// ids are its allocations.
	ids []string
	// pods are the UIDs of the pods that the API server has given it these allocations for.
	pods map[string]bool
	// served counts how often a Prepare took the claim, or found it here.
	served uint64
}

// unprepared is a claim that was given back: its shares, the UIDs of its pods, and the time.
type unprepared struct {
	shares []share
	pods   map[string]bool
	at     time.Time
}

func newBook(o *Options, s shown, look token) *book {
	return &book{o: o, shelf: s, look: look, began: o.Now(),
		claims: map[string]*held{}, reallocated: map[string]dra.Claim{}, unprepared: map[string]unprepared{}}
}

// confirm notes that what a claim has here is what the API server shows for these pods and for those
// that the claim names.
func (h *held) confirm(c *agentkube.Claim, pods []string) {
	for _, p := range c.Pods {
		h.pods[p.UID] = true
	}
	for _, uid := range pods {
		h.pods[uid] = true
	}
}

// heldLocked returns what a claim has, and adds an empty entry if there is none.
func (b *book) heldLocked(uid string) *held {
	if b.claims[uid] == nil {
		b.claims[uid] = &held{pods: map[string]bool{}}
	}
	return b.claims[uid]
}

// reconcile compares what a claim has here with what the API server shows, and supersedes what
// differs. A superseded allocation ends when no container has it: see retire.
//
// at is the ledger's epoch from before the API server was asked. Allocations with a later epoch are
// newer than its answer, and are left alone. pods are the UIDs of the pods that the kubelet had the
// claim for at that time.
func (b *book) reconcile(c *agentkube.Claim, at uint64, pods []string) {
	now := map[string]share{}
	for _, w := range wants(c, b.o.Driver, b.o.Node) {
		now[w.id()] = w.share
	}
	if len(now) == 0 {
		return // its IDs are needed for nothing else: it ends as other claims do
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.claims[c.UID]
	if h == nil {
		return
	}
	same := true
	for _, id := range h.ids {
		a, ok := b.o.Ledger.Get(id)
		if !ok || a.Epoch > at {
			same = false
			continue
		}
		had, err := readShare(id, a.Ref, a.Grants)
		if is, named := now[id]; err == nil && named && had.is(&is) {
			if a.Superseded { // it was allocated the same again
				b.o.Ledger.Reinstate(id, a.Epoch)
				b.o.Wake()
			}
			continue
		}
		same = false
		_, known := b.reallocated[c.UID]
		b.reallocated[c.UID] = nameOf(c)
		if !a.Superseded {
			b.supersedeLocked(&a, &had)
			b.o.Log.Warn("a claim was allocated anew: its old allocation goes to no further container, "+
				"and ends when the present ones end",
				"claim", c.Namespace+"/"+c.Name, "uid", c.UID, "had", had.String(), "holders", a.Who())
			b.o.Wake()
		}
		if !a.Superseded || !known {
			b.look.poke()
		}
	}
	if same {
		h.confirm(c, pods)
	}
}

// supersedeLocked supersedes an allocation, and names its containers as the ones to wait for. It
// returns a channel that is closed when the allocation has no CDI file; nil if the allocation has
// another epoch by now.
func (b *book) supersedeLocked(a *ledger.Allocation, had *share) <-chan struct{} {
	who := a.Who()
	if all := b.uses[a.ID]; len(all) > 0 {
		var pods []string
		for _, h := range all {
			if name := h.Pod.String(); !slices.Contains(pods, name) {
				pods = append(pods, name)
			}
		}
		who = strings.Join(pods, ", ")
	}
	who += fmt.Sprintf(" (with %s, which claim %s/%s had before it was allocated anew)", had, had.Namespace, had.Name)
	return b.o.Ledger.Supersede(a.ID, a.Epoch, who, who) // all of its pods are of one namespace
}

// outdated is a superseded allocation. gone is closed when it has no CDI file.
type outdated struct {
	id, uid string
	epoch   uint64
	gone    <-chan struct{}
}

// superseded returns the superseded allocations of a claim, or of all claims if uid is empty.
func (b *book) superseded(uid string) (all []outdated) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for of, h := range b.claims {
		for _, id := range h.ids {
			if a, ok := b.o.Ledger.Get(id); ok && a.Superseded && (uid == "" || uid == of) {
				had, _ := readShare(id, a.Ref, a.Grants) // if it cannot be read, the name stays empty
				if gone := b.supersedeLocked(&a, &had); gone != nil {
					all = append(all, outdated{id, of, a.Epoch, gone})
				}
			}
		}
	}
	return all
}

// retire ends those allocations that are still superseded and that no container has. used has the
// allocations that containers have. It reports whether it ended any.
func (b *book) retire(all []outdated, used map[string][]workload.Pod) (ended bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, o := range all {
		a, ok := b.o.Ledger.Get(o.id)
		if !ok || a.Epoch != o.epoch || !a.Superseded || len(used[o.id]) > 0 {
			continue
		}
		b.o.Log.Info("allocation ended: its claim was allocated anew, and no container has it",
			"allocation", o.id, "claim", o.uid)
		b.endLocked(o.id, o.uid)
		ended = true
	}
	return ended
}

// confirmed returns what a claim has in the ledger if it is known to be right for these pods, the
// ones that the kubelet has the claim for. It is right for a pod if it was compared with the API
// server for that pod, or if a container of the pod has it. An agent that has just started knows
// some pods only by their containers.
func (b *book) confirmed(uid string, pods []string) ([]share, bool) {
	shares, ok := b.taken(uid)
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.claims[uid]
	unknown := func(pod string) bool { return !h.pods[pod] && !h.runs(pod, b.uses) }
	if !ok || h == nil || len(pods) == 0 || slices.ContainsFunc(pods, unknown) {
		return nil, false
	}
	h.served++
	return shares, true
}

// runs reports whether a container of the pod has an allocation of the claim. uses has the
// containers of each allocation.
func (h *held) runs(pod string, uses map[string][]ledger.Holder) bool {
	return slices.ContainsFunc(h.ids, func(id string) bool {
		return slices.ContainsFunc(uses[id], func(u ledger.Holder) bool { return u.UID == pod })
	})
}

// taken returns what a claim has in the ledger. ok is false if some of it is missing or superseded.
func (b *book) taken(uid string) (shares []share, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.claims[uid]
	if h == nil {
		return nil, false
	}
	for _, id := range h.ids {
		a, has := b.o.Ledger.Get(id)
		s, err := readShare(id, a.Ref, a.Grants)
		if !has || err != nil || a.Superseded {
			return nil, false
		}
		shares = append(shares, s)
	}
	return shares, len(shares) > 0 && len(shares) == shares[0].Of
}

// take takes allocations for these results of a claim, or none. It skips results that have theirs.
// The error wraps ledger.ErrHeld if a later try may succeed. news is then closed when the layout
// changes. pods are the UIDs of the pods that the kubelet has the claim for.
func (b *book) take(c *agentkube.Claim, wants []want, pods []string) (news <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shelf.while(func(v view) { // the offer must not change while allocations are taken from it
		news, err = v.news, b.takeLocked(v.offer, c, wants, pods)
	})
	return news, err
}

func (b *book) takeLocked(o *Offer, c *agentkube.Claim, wants []want, pods []string) error {
	var asked []ledger.Request
	for i := range wants {
		w := &wants[i]
		if a, ok := b.o.Ledger.Get(w.id()); ok {
			if s, err := readShare(a.ID, a.Ref, a.Grants); err != nil || a.Superseded || !s.is(&w.share) {
				return fmt.Errorf("request %s was allocated %s, and still has %s from before: "+
					"it waits for %s: %w",
					w.Request, &w.share, &s, a.After, ledger.ErrHeld)
			}
			continue
		}
		if all := b.uses[w.id()]; len(all) > 0 {
			return fmt.Errorf("request %s was allocated %s, and a container of pod %s still has the earlier one: %w",
				w.Request, &w.share, all[0].Pod, ledger.ErrHeld)
		}
		if err := checkAlone(o, wants); err != nil {
			return err
		}
		if err := refusedByDriver(o, w); err != nil {
			return err
		}
		g, err := grant(b.o.Ledger, o, w, asked)
		if err != nil {
			return err
		}
		asked = append(asked, ledger.Request{ID: w.id(), Owner: ledger.DRA, Resource: b.o.Driver, Ref: w.ref(),
			Grants: []ledger.Grant{g}})
	}
	made, err := b.o.Ledger.TakeAll(asked)
	if err != nil {
		return err
	}
	delete(b.unprepared, c.UID)
	h := b.heldLocked(c.UID)
	h.confirm(c, pods)
	h.served++
	for i := range made {
		h.ids = append(h.ids, made[i].ID)
		// Its pieces are free: the previous holder's allocation was released only after its end was
		// checked.
		b.o.Ledger.Looked(made[i].ID, made[i].Epoch, "", "")
		nameHolder(b.o.Ledger, made[i].ID, c)
		b.o.Granted(&made[i])
	}
	return nil
}

// nameHolder sets as the holder what the claim is reserved for, until containers are known.
func nameHolder(l *ledger.Ledger, id string, c *agentkube.Claim) {
	if len(c.Pods) > 0 {
		l.SetHolder(id, ledger.Holder{Pod: c.Pods[0]}, c.Pods[1:]...)
	} else if c.HasConsumers() {
		l.SetFor(id, consumers(c))
	}
}

// allocations returns the allocations of a claim.
func (b *book) allocations(uid string) (all []ledger.Allocation) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if h := b.claims[uid]; h != nil {
		for _, id := range h.ids {
			if a, ok := b.o.Ledger.Get(id); ok {
				all = append(all, a)
			}
		}
	}
	return all
}

// unprepare ends these allocations of a claim that the kubelet gives back, unless they have another
// epoch by now.
func (b *book) unprepare(uid string, all []ledger.Allocation, r unprepared) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range all {
		if a, ok := b.o.Ledger.Get(all[i].ID); ok && a.Epoch == all[i].Epoch {
			b.endLocked(a.ID, uid)
		}
	}
	delete(b.reallocated, uid)
	maps.DeleteFunc(b.unprepared, func(_ string, r unprepared) bool { return b.o.Now().Sub(r.at) > lingers })
	b.unprepared[uid] = r
}

// wasUnprepared reports whether the kubelet has given a claim back, the claim has been allocated
// nothing else since, and all its consumers are the pods that it was for. If a consumer is not a
// pod, wasUnprepared is false: the next pod of such a consumer may come at any moment.
func (b *book) wasUnprepared(c *agentkube.Claim, wants []want) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	r, ok := b.unprepared[c.UID]
	return ok && len(c.Others) == 0 &&
		!slices.ContainsFunc(c.Pods, func(p workload.Pod) bool { return !r.pods[p.UID] }) &&
		!slices.ContainsFunc(wants, func(w want) bool {
			return !slices.ContainsFunc(r.shares, func(s share) bool { return s.id() == w.id() && s.is(&w.share) })
		})
}

// giveUp ends allocations whose instances can never be made.
func (b *book) giveUp(shares []share) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range shares {
		b.endLocked(shares[i].id(), shares[i].UID)
	}
}

// end ends the allocations of a claim that is gone, or that has nothing on this node any longer.
// Allocations with a later epoch than at stay. It does nothing if the claim was served since, or if
// a container has one of the allocations: used has the allocations that containers have.
func (b *book) end(uid string, at, served uint64, used map[string][]workload.Pod) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.claims[uid]
	if h == nil || h.served != served || slices.ContainsFunc(h.ids, func(id string) bool { return len(used[id]) > 0 }) {
		return
	}
	for _, id := range slices.Clone(h.ids) {
		if a, ok := b.o.Ledger.Get(id); ok && a.Epoch <= at {
			b.o.Log.Info("allocation ended: the API server, the kubelet and the container runtime know nothing of it",
				"allocation", id, "claim", uid)
			b.endLocked(id, uid)
		}
	}
}

// endLocked ends an allocation of a claim. The loop then removes its files.
func (b *book) endLocked(id, uid string) {
	b.o.Ledger.Release(ledger.DRA, id)
	b.o.Wake()
	delete(b.uses, id)
	if h := b.claims[uid]; h != nil {
		if h.ids = slices.DeleteFunc(h.ids, func(o string) bool { return o == id }); len(h.ids) == 0 {
			delete(b.claims, uid)
		}
	}
}

func (b *book) Found(id string, r ledger.Record, given time.Time) error {
	s, err := readShare(id, r.Ref, r.Grants)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.foundLocked(id, r, &s, given)
}

func (b *book) foundLocked(id string, r ledger.Record, s *share, given time.Time) error {
	added, err := b.o.Ledger.Found(id, r, given)
	if added {
		h := b.heldLocked(s.UID)
		h.ids = append(h.ids, id)
		// A process before this one looked: its pieces are its own.
		a, _ := b.o.Ledger.Get(id)
		b.o.Ledger.Looked(id, a.Epoch, "", "")
	}
	return err
}

// takeOver takes over what a claim has and no record names. The caller knows from the kubelet or
// from a container that the claim is prepared. pods are the UIDs of the pods that the kubelet has
// the claim for.
func (b *book) takeOver(c *agentkube.Claim, pods []string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.shelf.now().offer
	every := everyDevice(b.o.Node, o.Inventory, o.Cards)
	var errs []error
	for _, w := range wants(c, b.o.Driver, b.o.Node) {
		if _, ok := b.o.Ledger.Get(w.id()); ok {
			continue
		}
		err := fmt.Errorf("this node has no device %s: %w", w.Device, gpu.ErrNotFound)
		if d, ok := every[DeviceName{w.Pool, w.Device}]; ok {
			var g ledger.Grant
			w.device = d
			if g, err = grant(b.o.Ledger, o, &w, nil); err == nil {
				r := ledger.Record{Owner: ledger.DRA, Resource: b.o.Driver, Ref: w.ref(), Grants: []ledger.Grant{g}}
				err = b.foundLocked(w.id(), r, &w.share, time.Time{})
			}
		}
		if err == nil {
			nameHolder(b.o.Ledger, w.id(), c)
			b.heldLocked(c.UID).confirm(c, pods)
		} else {
			errs = append(errs, fmt.Errorf("take over request %s of claim %s/%s: %w",
				w.Request, c.Namespace, c.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (b *book) Observe(holders map[string][]ledger.Holder, asked time.Time) {
	b.mu.Lock()
	b.uses, b.usesAt = maps.Clone(holders), asked
	var ours []string
	for _, held := range b.claims {
		ours = append(ours, held.ids...)
	}
	b.mu.Unlock()
	over := false // a superseded allocation has no container any longer
	for _, id := range ours {
		if all := holders[id]; len(all) > 0 {
			b.o.Ledger.SetHolder(id, all[0], otherPods(all)...)
		} else if a, _ := b.o.Ledger.Get(id); a.Superseded {
			over = true
		}
	}
	if over {
		b.look.poke()
	}
}

// otherPods returns the pods of these containers, each once, without the pod of the first.
func otherPods(all []ledger.Holder) (out []workload.Pod) {
	for _, h := range all[1:] {
		if h.Pod != all[0].Pod && !slices.Contains(out, h.Pod) {
			out = append(out, h.Pod)
		}
	}
	return out
}

// guess sets which pods have which allocations, from their containers, until the first Observe.
func (b *book) guess(used map[string][]workload.Pod) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.uses != nil {
		return
	}
	b.uses = map[string][]ledger.Holder{}
	for id, pods := range used {
		for _, p := range pods {
			b.uses[id] = append(b.uses[id], ledger.Holder{Pod: p})
		}
	}
}

// forOthers returns the claims that the kubelet has for a pod that they were not compared for.
func (b *book) forOthers(state *node.DRAState) map[string]dra.Claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := map[string]dra.Claim{}
	for uid, h := range b.claims {
		if slices.ContainsFunc(podsOf(state, uid), func(p string) bool { return !h.pods[p] }) {
			out[uid] = b.nameLocked(uid)
		}
	}
	return out
}

// nameLocked returns the name of a claim that has something here.
func (b *book) nameLocked(uid string) dra.Claim {
	for _, id := range b.claims[uid].ids {
		a, _ := b.o.Ledger.Get(id)
		if s, err := readShare(id, a.Ref, a.Grants); err == nil {
			return dra.Claim{Namespace: s.Namespace, Name: s.Name, UID: uid}
		}
	}
	return dra.Claim{UID: uid} // cannot happen: its record was read before
}

// due returns the claims that the sweeper has to look at: those that were allocated anew, and the
// suspects. A suspect has no entry at the kubelet and no container, and its allocations are not
// recent. suspects has how often each was served until now.
//
// At the start used has the allocations that containers have, and sure is false if there may be
// others. Later used is nil, and what was observed counts. An allocation of an earlier process is
// not recent: that process may have been killed between the kubelet's Unprepare and the removal of
// the record.
func (b *book) due(state *node.DRAState, used map[string][]workload.Pod, sure bool) (
	due map[string]dra.Claim, suspects map[string]uint64,
) {
	b.mu.Lock()
	defer b.mu.Unlock()
	due, suspects = maps.Clone(b.reallocated), map[string]uint64{}
	recent := func(id string) bool {
		a, ok := b.o.Ledger.Get(id)
		switch {
		case !ok || !sure || len(used[id]) > 0 || len(b.uses[id]) > 0:
			return true
		case a.Given.Before(b.began):
			return used == nil && b.usesAt.IsZero()
		}
		return !b.usesAt.After(a.Given) || b.o.Now().Sub(a.Given) < grace
	}
	for uid, h := range b.claims {
		if accountOf(state, uid) == nil && !slices.ContainsFunc(h.ids, recent) {
			due[uid], suspects[uid] = b.nameLocked(uid), h.served
		}
	}
	return due, suspects
}

// setReallocated notes that a claim was allocated anew.
func (b *book) setReallocated(c *agentkube.Claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reallocated[c.UID] = nameOf(c)
}

// renewing returns the claims that were allocated anew and do not have their new allocations yet.
func (b *book) renewing() map[string]dra.Claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.reallocated)
}

// renewed notes that a claim has its new allocations, or can never have them.
func (b *book) renewed(uid string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.reallocated, uid)
}
