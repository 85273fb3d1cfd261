// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/dra"
)

// A claim that a user has named keeps its UID when its pods have ended: it is given back, and
// allocated anew for the next pods, with another device, another share or another amount. So
// what the ledger has by a UID is compared with what the API server says, whenever that is
// asked, and what differs is given to no container any more.
//
// The ledger's word stands without the API server's for pods of which the two have agreed
// once: a claim keeps its allocation for as long as it is reserved for a pod that has not
// ended, and an ended pod does not come back.

// errAnew says that a claim was allocated anew while its Prepare was under way.
var errAnew = errors.New("the claim was allocated anew meanwhile")

// held is what a claim has here.
type held struct {
	// ids are its allocations.
	ids []string
	// pods are those, by UID, for which the API server has given it this.
	pods map[string]bool
	// served counts how often it was taken, or found to be there, for a pod.
	served uint64
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
func (f *FrontEnd) heldLocked(uid string) *held {
	if f.claims[uid] == nil {
		f.claims[uid] = &held{pods: map[string]bool{}}
	}
	return f.claims[uid]
}

// agree compares what a claim has here with what the API server says that it has. at is the
// ledger's epoch from before the API server was asked: what was taken since, or superseded, is newer
// than its word. pods are those for which the kubelet had the claim before that. What differs is
// superseded, and ends when no container has it: see retire.
func (f *FrontEnd) agree(c *agentkube.Claim, at uint64, pods []string) {
	now := map[string]share{}
	for _, w := range wants(c, f.Driver, f.Node) {
		now[w.id()] = w.share
	}
	if len(now) == 0 {
		return // nothing else is to be given by its name: it ends as others do
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.claims[c.UID]
	if h == nil {
		return
	}
	same := true
	for _, id := range h.ids {
		a, ok := f.Ledger.Get(id)
		if !ok || a.Epoch > at {
			same = false
			continue
		}
		had, err := readShare(id, a.Ref, a.Grants)
		if is, named := now[id]; err == nil && named && had.is(&is) {
			if a.Superseded { // it has been given the same again
				f.Ledger.Reinstate(id, a.Epoch)
				f.Wake()
			}
			continue
		}
		same = false
		_, known := f.anew[c.UID]
		f.anew[c.UID] = dra.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
		if !a.Superseded {
			f.supersedeLocked(&a, &had)
			f.Log.Warn("a claim was allocated anew: what it had before is given to no container any more, and ends with those that have it",
				"claim", c.Namespace+"/"+c.Name, "uid", c.UID, "had", had.String(), "holders", a.Who())
			f.Wake()
		}
		if !a.Superseded || !known {
			f.sweeper.poke()
		}
	}
	if same {
		h.agreed(c, pods)
	}
}

// supersedeLocked has an allocation wait for the end of its containers. The channel is closed
// when no CDI file stands for it; nil where it is another one by now.
func (f *FrontEnd) supersedeLocked(a *ledger.Allocation, had *share) <-chan struct{} {
	who := a.Who()
	if all := f.uses[a.ID]; len(all) > 0 {
		var pods []string
		for _, h := range all {
			if name := h.Pod.String(); !slices.Contains(pods, name) {
				pods = append(pods, name)
			}
		}
		who = strings.Join(pods, ", ")
	}
	who += fmt.Sprintf(" (with %s, which claim %s/%s had before it was allocated anew)", had, had.Namespace, had.Name)
	return f.Ledger.Supersede(a.ID, a.Epoch, who, who) // all of its pods are of one namespace
}

// retire ends what is superseded, of one claim or, without a UID, of all, where no container has
// it. Before it asks for those it waits until no CDI file stands for it, so that none is
// created meanwhile. It reports whether something has ended.
func (f *FrontEnd) retire(ctx context.Context, uid string) (ended bool, err error) {
	type old struct {
		id, uid string
		epoch   uint64
		gone    <-chan struct{}
	}
	var all []old
	f.mu.Lock()
	for of, h := range f.claims {
		for _, id := range h.ids {
			if a, ok := f.Ledger.Get(id); ok && a.Superseded && (uid == "" || uid == of) {
				had, _ := readShare(id, a.Ref, a.Grants) // what cannot be read has no name
				if gone := f.supersedeLocked(&a, &had); gone != nil {
					all = append(all, old{id, of, a.Epoch, gone})
				}
			}
		}
	}
	f.mu.Unlock()
	if len(all) == 0 {
		return false, nil
	}
	for _, o := range all {
		select {
		case <-o.gone:
		case <-ctx.Done():
			return false, fmt.Errorf("no container is to be created any more with what a claim had before, and its file stands yet: %w", ctx.Err())
		}
	}
	used, sure, err := inContainers(ctx, f.Runtime, f.Domain)
	if err != nil {
		return false, err
	}
	f.mu.Lock()
	for _, o := range all {
		a, ok := f.Ledger.Get(o.id)
		if !ok || a.Epoch != o.epoch || !a.Superseded || !sure || len(used[o.id]) > 0 {
			continue
		}
		f.Log.Info("allocation ended: its claim was allocated anew, and no container has it", "allocation", o.id, "claim", o.uid)
		f.endLocked(o.id, o.uid)
		ended = true
	}
	f.mu.Unlock()
	if ended {
		f.Wake()
	}
	return ended, nil
}

// stands returns what a claim has in the ledger where that is known to be what the API server has given
// it for these pods: those for which the kubelet has it. A pod whose container has it counts,
// too, which an agent that has started cannot know from elsewhere.
func (f *FrontEnd) stands(uid string, pods []string) ([]share, bool) {
	shares, ok := f.taken(uid)
	if !ok || len(pods) == 0 {
		return nil, false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.claims[uid]
	if h == nil || slices.ContainsFunc(pods, func(p string) bool { return !h.pods[p] && !f.runsLocked(h, p) }) {
		return nil, false
	}
	h.served++
	return shares, true
}

// runsLocked reports whether a container of a pod has something of a claim.
func (f *FrontEnd) runsLocked(h *held, pod string) bool {
	return slices.ContainsFunc(h.ids, func(id string) bool {
		return slices.ContainsFunc(f.uses[id], func(u ledger.Holder) bool { return u.UID == pod })
	})
}

// accountOf is what the kubelet has of a claim, nil where it does not know it.
func accountOf(state *node.DRAState, uid string) *node.PreparedClaim {
	if i := slices.IndexFunc(state.Claims, func(c node.PreparedClaim) bool { return c.UID == uid }); i >= 0 {
		return &state.Claims[i]
	}
	return nil
}

// podsOf are the pods for which the kubelet has a claim, by UID: it writes them down before it
// asks a driver for it.
func podsOf(state *node.DRAState, uid string) []string {
	if c := accountOf(state, uid); c != nil {
		return c.PodUIDs
	}
	return nil
}

// kubeletHas are the pods for which the kubelet has a claim now; none where its account cannot
// be read.
func (f *FrontEnd) kubeletHas(uid string) []string {
	state, err := f.Kubelet.DRAState()
	if err != nil {
		return nil
	}
	return podsOf(&state, uid)
}

// renew takes what a claim has that was allocated anew, where there is room. The kubelet may
// not ask for it: it takes a claim that it has prepared once for prepared, and gives the names
// of its CDI devices to the claim's next pods (1.36.3).
func (f *sweeper) renew(ctx context.Context, c *agentkube.Claim, state *node.DRAState) {
	wants, err := f.refusals.wanted(c)
	if err == nil {
		var ready bool
		if ready, _, err = f.findNow(wants); !ready {
			return
		}
	}
	if err == nil {
		_, err = f.take(c, wants, podsOf(state, c.UID))
	}
	if _, lasts := lasting(err); err != nil && !lasts {
		return // the holder before has not ended yet: it is tried again
	}
	f.refusals.note(c, err)
	f.renewed(c.UID)
	if err == nil && answered(state, f.Driver, c.UID) {
		go f.finish(ctx, c, sharesOf(wants))
	}
}

// renewed says that what a claim was given anew is its own, or can never be.
func (f *FrontEnd) renewed(uid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.anew, uid)
}

// finish has what a claim has opened, as Prepare does, and says so in the claim if that does not
// say it.
func (f *FrontEnd) finish(ctx context.Context, c *agentkube.Claim, shares []share) {
	ctx, cancel := context.WithTimeout(ctx, dra.Patience)
	defer cancel()
	if _, err := f.open(ctx, shares); err == nil && !c.Told {
		f.tell(c, shares)
	}
}

// theirs reports whether a container has what a claim has been given: the kubelet's account
// says that it was prepared with these devices, or a pod for which it is reserved has a container
// with it.
func (f *FrontEnd) theirs(c *agentkube.Claim, wants []want, state *node.DRAState, used map[string][]workload.Pod) bool {
	for i := range wants {
		w := &wants[i]
		for _, p := range used[w.id()] {
			if len(c.Others) > 0 || slices.ContainsFunc(c.Pods, func(o workload.Pod) bool { return o.UID == p.UID }) {
				return true
			}
		}
	}
	had := accountOf(state, c.UID)
	return had != nil && !slices.ContainsFunc(wants, func(w want) bool {
		return !slices.ContainsFunc(had.Devices[f.Driver], func(d node.PreparedDevice) bool {
			return d.Pool == w.Pool && d.Device == w.Device && d.Share == w.Share
		})
	})
}
