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

// A claim that a user has named keeps its UID when its pods have ended: it is given back, and
// allocated anew for the next pods, with another device, another share or another amount. So
// what the ledger has by a UID is compared with what the API server says, whenever that is
// asked, and what differs is given to no container any more.
//
// The ledger's word stands without the API server's for pods of which the two have agreed
// once: a claim keeps its allocation for as long as it is reserved for a pod that has not
// ended, and an ended pod does not come back.

// book is which allocations of the ledger are of which claim. It asks nobody outside, and waits
// for nobody. Its lock is held before the shelf's and the ledger's. Use newBook.
type book struct {
	o     *Options
	shelf shown
	// look has the claims looked at: something is due of one.
	look  token
	began time.Time

	// mu guards everything below.
	mu sync.Mutex
	// claims are what claims have here, by UID.
	claims map[string]*held
	// anew are the claims that were allocated anew while they had something here, by UID,
	// until they have what they were given then.
	anew map[string]dra.Claim
	// returned are the claims that the kubelet has given back, by UID. The API server has
	// them allocated for a while yet.
	returned map[string]returned
	// uses are the allocations that containers have, with the containers of each, but for
	// those that have ended since, and usesAt is when the runtime was asked for them.
	uses   map[string][]ledger.Holder
	usesAt time.Time
}

// shown is what a claim's preparation asks of the shelf.
type shown interface {
	now() view
	while(func(view))
}

// held is what a claim has here.
type held struct {
	// ids are its allocations.
	ids []string
	// pods are those, by UID, for which the API server has given it this.
	pods map[string]bool
	// served counts how often it was taken, or found to be there, for a pod.
	served uint64
}

// returned is a claim that was given back: what it had, the pods that it was for by UID, and
// when.
type returned struct {
	shares []share
	pods   map[string]bool
	at     time.Time
}

func newBook(o *Options, s shown, look token) *book {
	return &book{o: o, shelf: s, look: look, began: o.Now(),
		claims: map[string]*held{}, anew: map[string]dra.Claim{}, returned: map[string]returned{}}
}

// agreed says that what a claim has is what the API server has given it for these pods, and for
// those that it names.
func (h *held) agreed(c *agentkube.Claim, pods []string) {
	for _, p := range c.Pods {
		h.pods[p.UID] = true
	}
	for _, uid := range pods {
		h.pods[uid] = true
	}
}

// heldLocked is what a claim has, which may be nothing yet.
func (b *book) heldLocked(uid string) *held {
	if b.claims[uid] == nil {
		b.claims[uid] = &held{pods: map[string]bool{}}
	}
	return b.claims[uid]
}

// agree compares what a claim has here with what the API server says that it has. at is the
// ledger's epoch from before the API server was asked: what was taken since, or superseded, is newer
// than its word. pods are those for which the kubelet had the claim before that. What differs is
// superseded, and ends when no container has it: see retire.
func (b *book) agree(c *agentkube.Claim, at uint64, pods []string) {
	now := map[string]share{}
	for _, w := range wants(c, b.o.Driver, b.o.Node) {
		now[w.id()] = w.share
	}
	if len(now) == 0 {
		return // nothing else is to be given by its name: it ends as others do
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
			if a.Superseded { // it has been given the same again
				b.o.Ledger.Reinstate(id, a.Epoch)
				b.o.Wake()
			}
			continue
		}
		same = false
		_, known := b.anew[c.UID]
		b.anew[c.UID] = nameOf(c)
		if !a.Superseded {
			b.supersedeLocked(&a, &had)
			b.o.Log.Warn("a claim was allocated anew: what it had before is given to no container any more, "+
				"and ends with those that have it",
				"claim", c.Namespace+"/"+c.Name, "uid", c.UID, "had", had.String(), "holders", a.Who())
			b.o.Wake()
		}
		if !a.Superseded || !known {
			b.look.poke()
		}
	}
	if same {
		h.agreed(c, pods)
	}
}

// supersedeLocked has an allocation wait for the end of its containers. The channel is closed
// when no CDI file stands for it; nil where it is another one by now.
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

// old is an allocation that is superseded. gone is closed when no CDI file stands for it.
type old struct {
	id, uid string
	epoch   uint64
	gone    <-chan struct{}
}

// superseded are the allocations that are, of one claim or, without a UID, of all.
func (b *book) superseded(uid string) (all []old) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for of, h := range b.claims {
		for _, id := range h.ids {
			if a, ok := b.o.Ledger.Get(id); ok && a.Superseded && (uid == "" || uid == of) {
				had, _ := readShare(id, a.Ref, a.Grants) // what cannot be read has no name
				if gone := b.supersedeLocked(&a, &had); gone != nil {
					all = append(all, old{id, of, a.Epoch, gone})
				}
			}
		}
	}
	return all
}

// retire ends those that are superseded yet and that no container has: used says which
// allocations containers have. It reports whether one has ended.
func (b *book) retire(all []old, used map[string][]workload.Pod) (ended bool) {
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

// stands returns what a claim has in the ledger where that is known to be what the API server has given
// it for these pods: those for which the kubelet has it. A pod whose container has it counts,
// too, which an agent that has started cannot know from elsewhere.
func (b *book) stands(uid string, pods []string) ([]share, bool) {
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

// runs reports whether a container of a pod has something of a claim; uses are the allocations that
// containers have.
func (h *held) runs(pod string, uses map[string][]ledger.Holder) bool {
	return slices.ContainsFunc(h.ids, func(id string) bool {
		return slices.ContainsFunc(uses[id], func(u ledger.Holder) bool { return u.UID == pod })
	})
}

// taken returns what a claim has in the ledger; ok is false where that is not all of it, or
// something of it is not the claim's any more.
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

// take takes these results of a claim, or none. The error wraps ledger.ErrHeld where that
// may become possible; news tells of another layout then. pods are those for which the kubelet
// has the claim.
func (b *book) take(c *agentkube.Claim, wants []want, pods []string) (news <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shelf.while(func(v view) { // so that nothing is taken by an older offer than the one in force
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
				return fmt.Errorf("request %s has %s now, and had %s before, which has not ended yet: "+
					"it waits for %s: %w",
					w.Request, &w.share, &s, a.After, ledger.ErrHeld)
			}
			continue
		}
		if all := b.uses[w.id()]; len(all) > 0 {
			return fmt.Errorf("request %s has %s now, and pod %s has a container with what the claim had before: %w",
				w.Request, &w.share, all[0].Pod, ledger.ErrHeld)
		}
		if err := unmade(o, w); err != nil {
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
	delete(b.returned, c.UID)
	h := b.heldLocked(c.UID)
	h.agreed(c, pods)
	h.served++
	for i := range made {
		h.ids = append(h.ids, made[i].ID)
		// Whoever had the pieces before has released them, which is looked at before
		// that: nobody is on them.
		b.o.Ledger.Looked(made[i].ID, made[i].Epoch, "", "")
		nameHolder(b.o.Ledger, made[i].ID, c)
		b.o.Granted(&made[i])
	}
	return nil
}

// nameHolder says who has an allocation until containers tell: what its claim is reserved for.
func nameHolder(l *ledger.Ledger, id string, c *agentkube.Claim) {
	if len(c.Pods) > 0 {
		l.SetHolder(id, ledger.Holder{Pod: c.Pods[0]}, c.Pods[1:]...)
	} else if c.HasConsumers() {
		l.SetFor(id, consumers(c))
	}
}

// allocations are those of a claim.
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

// giveBack ends those allocations of a claim that the kubelet gives back.
func (b *book) giveBack(uid string, all []ledger.Allocation, r returned) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range all {
		if a, ok := b.o.Ledger.Get(all[i].ID); ok && a.Epoch == all[i].Epoch {
			b.endLocked(a.ID, uid)
		}
	}
	delete(b.anew, uid)
	maps.DeleteFunc(b.returned, func(_ string, r returned) bool { return b.o.Now().Sub(r.at) > lingers })
	b.returned[uid] = r
}

// gaveBack reports whether the kubelet has given a claim back, and it is reserved for nobody
// but the pods that it was for. What it has been given since is another thing. Of something
// that is no pod nobody says that it has ended: its next pod may come at any moment.
func (b *book) gaveBack(c *agentkube.Claim, wants []want) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	r, ok := b.returned[c.UID]
	return ok && len(c.Others) == 0 &&
		!slices.ContainsFunc(c.Pods, func(p workload.Pod) bool { return !r.pods[p.UID] }) &&
		!slices.ContainsFunc(wants, func(w want) bool {
			return !slices.ContainsFunc(r.shares, func(s share) bool { return s.id() == w.id() && s.is(&w.share) })
		})
}

// giveUp ends what a claim has that can never be made.
func (b *book) giveUp(shares []share) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range shares {
		b.endLocked(shares[i].id(), shares[i].UID)
	}
}

// end ends what a claim has that is no more, or that is allocated here no more, as of at, unless
// it was served since, or a container has it: used says which allocations containers have.
func (b *book) end(uid string, at, served uint64, used map[string][]workload.Pod) {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.claims[uid]
	if h == nil || h.served != served || slices.ContainsFunc(h.ids, func(id string) bool { return len(used[id]) > 0 }) {
		return
	}
	for _, id := range slices.Clone(h.ids) {
		if a, ok := b.o.Ledger.Get(id); ok && a.Epoch <= at {
			b.o.Log.Info("allocation ended: API server, kubelet and container runtime know nothing of it",
				"allocation", id, "claim", uid)
			b.endLocked(id, uid)
		}
	}
}

// endLocked ends one allocation of a claim, whose files the loop takes away.
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
		// It had its pieces already.
		a, _ := b.o.Ledger.Get(id)
		b.o.Ledger.Looked(id, a.Epoch, "", "")
	}
	return err
}

// takeOver takes over what a claim has, where no record of it is left: the kubelet or a
// container says that it is prepared. pods are those for which the kubelet has it.
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
			b.heldLocked(c.UID).agreed(c, pods)
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
	over := false // something that waits for its containers has none
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

// otherPods are the pods of containers, each once, without that of the first.
func otherPods(all []ledger.Holder) (out []workload.Pod) {
	for _, h := range all[1:] {
		if h.Pod != all[0].Pod && !slices.Contains(out, h.Pod) {
			out = append(out, h.Pod)
		}
	}
	return out
}

// guess says which allocations pods have by their containers, before that was observed.
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

// forOthers are the claims that the kubelet has for pods of which the API server has not said that what they
// have here is theirs.
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

// nameLocked is the name of a claim that has something here.
func (b *book) nameLocked(uid string) dra.Claim {
	for _, id := range b.claims[uid].ids {
		a, _ := b.o.Ledger.Get(id)
		if s, err := readShare(id, a.Ref, a.Grants); err == nil {
			return dra.Claim{Namespace: s.Namespace, Name: s.Name, UID: uid}
		}
	}
	return dra.Claim{UID: uid} // its record was read when it was found
}

// due are the claims of which something is: those that were allocated anew, and the suspects, which
// the kubelet does not know, whose containers are gone, and that are not new. At the start used says
// which allocations containers have, if sure says so; later, what was observed. What this process has
// found was promised to nobody since: the process before it was killed between the kubelet's Unprepare
// and the end of the record. Beside each suspect is how often it has been served until now.
func (b *book) due(state *node.DRAState, used map[string][]workload.Pod, sure bool) (
	due map[string]dra.Claim, suspects map[string]uint64,
) {
	b.mu.Lock()
	defer b.mu.Unlock()
	due, suspects = maps.Clone(b.anew), map[string]uint64{}
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

// setAnew says that a claim was allocated anew.
func (b *book) setAnew(c *agentkube.Claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.anew[c.UID] = nameOf(c)
}

// renewing are the claims that have not yet what they were given anew.
func (b *book) renewing() map[string]dra.Claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	return maps.Clone(b.anew)
}

// renewed says that what a claim was given anew is its own, or can never be.
func (b *book) renewed(uid string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.anew, uid)
}
