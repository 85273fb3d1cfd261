// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
)

// Prepare takes what a claim has been allocated, and returns it when containers may be
// created with it. Everything that is coming is waited for: the claims that are known
// after a start, a holder that is ending, an instance. It may be called any number of
// times.
//
// The API server is asked unless it is known what it says for the pods that the kubelet has the
// claim for: see stands. The kubelet has asked it a moment before.
func (f *FrontEnd) Prepare(ctx context.Context, c dra.Claim) ([]dra.Device, error) {
	pods := f.kubeletHas(c.UID) // before the API server is asked: what it says is for them
	if shares, ok := f.stands(c.UID, pods); ok {
		devices, err := f.open(ctx, shares)
		if err == nil { // the call before it may have ended without that
			go f.tell(&agentkube.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}, shares)
		}
		if !errors.Is(err, errAnew) && (err == nil || !f.refusals.giveUp(ctx, shares)) {
			return devices, err
		}
	}
	claim, devices, err := f.prepare(ctx, c, pods)
	if claim != nil {
		f.refusals.note(claim, err)
	}
	return devices, err
}

// read reads a claim at the API server. at is the ledger's epoch before that.
func (f *FrontEnd) read(ctx context.Context, c dra.Claim) (claim *agentkube.Claim, at uint64, err error) {
	_, at, _ = f.Ledger.State()
	claim, err = f.API.Claim(ctx, f.Driver, c.Namespace, c.Name)
	switch {
	case err != nil:
		return nil, at, fmt.Errorf("read the claim: %w", err)
	case claim.UID != c.UID:
		return nil, at, fmt.Errorf("the claim of this name is another one now (%s, not %s): make the pod anew: %w", claim.UID, c.UID, gpu.ErrNotFound)
	}
	return claim, at, nil
}

// wanted are the results of a claim that are to be prepared. The error lasts.
func (f *refusals) wanted(claim *agentkube.Claim) ([]want, error) {
	if err := refuseConfig(claim); err != nil {
		return nil, err
	}
	if err := f.foreign(claim); err != nil {
		return nil, err
	}
	out := wants(claim, f.Driver, f.Node)
	if len(out) == 0 {
		return nil, never(status.ClaimRefused, fmt.Errorf("the claim has nothing of driver %s on this node: %w", f.Driver, gpu.ErrInvalid))
	}
	return out, nil
}

// foreign refuses a claim with a device of another node's pool. All that a claim has of this
// driver is on one node, so some ResourceSlice lies: a stolen token of this node's could write
// one where the policy of component dra is not in force. To prepare the rest would start a pod
// without a GPU that it was promised.
func (f *refusals) foreign(claim *agentkube.Claim) error {
	for i := range claim.Results {
		r := &claim.Results[i]
		if r.Driver != f.Driver || strings.HasPrefix(r.Pool, f.Node+"/") {
			continue
		}
		return never(status.ClaimRefused, fmt.Errorf("request %s has device %s of pool %s, and node %s offers only devices of its own pools (%s/…): "+
			"find who wrote a ResourceSlice of that pool for this node (kubectl get resourceslices --field-selector spec.nodeName=%s), delete the slice, and make the claim anew: %w",
			r.Request, r.Device, r.Pool, f.Node, f.Node, f.Node, gpu.ErrInvalid))
	}
	return nil
}

// prepare takes what a claim has been allocated, and waits until containers may be created
// with it. It returns the claim as it was last read, nil where it could not be.
func (f *FrontEnd) prepare(ctx context.Context, c dra.Claim, pods []string) (claim *agentkube.Claim, _ []dra.Device, _ error) {
	for {
		_, ended := f.Ledger.Ended()
		now, at, err := f.read(ctx, c)
		switch {
		case err == nil:
			claim = now
			f.agree(claim, at, pods)
		case claim == nil || errors.Is(err, gpu.ErrNotFound):
			return claim, nil, err
		}
		// Else it is as it was before the wait, as long as its pod is there.
		wants, err := f.refusals.wanted(claim)
		if err != nil {
			return claim, nil, err
		}
		if err := f.find(ctx, wants); err != nil {
			return claim, nil, err
		}
		news, err := f.take(claim, wants, pods)
		if err == nil {
			f.renewed(c.UID)
			shares := sharesOf(wants)
			devices, err := f.open(ctx, shares)
			if errors.Is(err, errAnew) {
				continue
			}
			if err == nil {
				time.AfterFunc(tellAfter, func() { f.tell(claim, shares) })
			}
			if err == nil || !f.refusals.giveUp(ctx, shares) {
				return claim, devices, err
			}
			continue // to be told why
		}
		if !errors.Is(err, ledger.ErrHeld) {
			return claim, nil, err
		}
		// Where that cannot be told now, it is asked again.
		if over, _ := f.retire(ctx, c.UID); over {
			continue
		}
		select {
		case <-ended:
		case <-news: // another layout, or another front-end has gone
		case <-time.After(impatience):
			f.sweeper.poke() // nobody may have it any more
		case <-ctx.Done():
			f.mu.Lock()
			late := f.refusals.lateLocked(wants)
			f.mu.Unlock()
			if late != nil {
				return claim, nil, late
			}
			return claim, nil, fmt.Errorf("the holder before it has not ended yet: %w", err)
		}
	}
}

// sharesOf are what results of a claim stand for.
func sharesOf(wants []want) []share {
	shares := make([]share, len(wants))
	for i := range wants {
		shares[i] = wants[i].share
	}
	return shares
}

// nameHolder says who has an allocation until containers tell: what its claim is reserved for.
func (f *FrontEnd) nameHolder(id string, c *agentkube.Claim) {
	if len(c.Pods) > 0 {
		f.Ledger.SetHolder(id, ledger.Holder{Pod: c.Pods[0]}, c.Pods[1:]...)
	} else if c.HasConsumers() {
		f.Ledger.SetFor(id, consumers(c))
	}
}

// taken returns what a claim has in the ledger; ok is false where that is not all of it, or
// something of it is not the claim's any more.
func (f *FrontEnd) taken(uid string) (shares []share, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.claims[uid]
	if h == nil {
		return nil, false
	}
	for _, id := range h.ids {
		a, has := f.Ledger.Get(id)
		s, err := readShare(id, a.Ref, a.Grants)
		if !has || err != nil || a.Superseded {
			return nil, false
		}
		shares = append(shares, s)
	}
	return shares, len(shares) > 0 && len(shares) == shares[0].Of
}

// find says which devices a claim's results are. Before everything is known after a start
// it waits.
func (f *FrontEnd) find(ctx context.Context, wants []want) error {
	for {
		ready, news, err := f.findNow(wants)
		if ready {
			return err
		}
		select {
		case <-news:
		case <-ctx.Done():
			return errors.New("the agent has started and does not know yet what this node has, or which claims there are; see its log")
		}
	}
}

// findNow does so with what is known; ready is false where that is not enough.
func (f *FrontEnd) findNow(wants []want) (ready bool, news <-chan struct{}, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.listed || f.published == nil {
		return false, f.news, nil
	}
	for i := range wants {
		w := &wants[i]
		var ok bool
		if w.device, ok = f.published.Devices[DeviceName{w.Pool, w.Device}]; !ok {
			return true, nil, never(status.ClaimOutdated, fmt.Errorf("this node has no device %s in pool %s now; its layout may have changed since: make the claim anew: %w", w.Device, w.Pool, gpu.ErrNotFound))
		}
	}
	return true, nil, nil
}

// take takes these results of a claim, or none. The error wraps ledger.ErrHeld where that
// may become possible; news tells of another layout then. pods are those for which the kubelet
// has the claim.
func (f *FrontEnd) take(c *agentkube.Claim, wants []want, pods []string) (news <-chan struct{}, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var asked []ledger.Request
	for i := range wants {
		w := &wants[i]
		if a, ok := f.Ledger.Get(w.id()); ok {
			if s, err := readShare(a.ID, a.Ref, a.Grants); err != nil || a.Superseded || !s.is(&w.share) {
				return f.news, fmt.Errorf("request %s has %s now, and had %s before, which has not ended yet: it waits for %s: %w", w.Request, &w.share, &s, a.After, ledger.ErrHeld)
			}
			continue
		}
		if all := f.uses[w.id()]; len(all) > 0 {
			return f.news, fmt.Errorf("request %s has %s now, and pod %s has a container with what the claim had before: %w", w.Request, &w.share, all[0].Pod, ledger.ErrHeld)
		}
		if err := f.refusals.unmadeLocked(w); err != nil {
			return nil, err
		}
		g, err := f.grantLocked(w, asked)
		if err != nil {
			return f.news, err
		}
		asked = append(asked, ledger.Request{ID: w.id(), Owner: ledger.DRA, Resource: f.Driver, Ref: w.ref(), Grants: []ledger.Grant{g}})
	}
	made, err := f.Ledger.TakeAll(asked)
	if err != nil {
		return f.news, err
	}
	delete(f.returned, c.UID)
	h := f.heldLocked(c.UID)
	h.agreed(c, pods)
	h.served++
	for i := range made {
		h.ids = append(h.ids, made[i].ID)
		// Whoever had the pieces before has released them, which is looked at before
		// that: nobody is on them.
		f.Ledger.Looked(made[i].ID, made[i].Epoch, "", "")
		f.nameHolder(made[i].ID, c)
		f.Granted(&made[i])
	}
	return f.news, nil
}

// open waits until containers may be created with a claim's allocations. The error wraps
// errAnew where they are another's by then.
func (f *FrontEnd) open(ctx context.Context, shares []share) ([]dra.Device, error) {
	slices.SortFunc(shares, func(a, b share) int { return cmp.Or(cmp.Compare(a.Request, b.Request), cmp.Compare(a.N, b.N)) })
	ctx, cancel := f.refusals.whileMakeable(ctx, shares) // it reads them from now on
	defer cancel()
	all, ctx := errgroup.WithContext(ctx)
	out := make([]dra.Device, len(shares))
	for i := range shares {
		s := &shares[i]
		out[i] = dra.Device{Requests: []string{s.Request}, Pool: s.Pool, Name: s.Device, Share: s.Share, CDI: []string{cdi.DeviceName(f.Domain, s.id())}}
		all.Go(func() error { return f.Ledger.Prepare(ctx, s.id()) })
	}
	if err := all.Wait(); err != nil {
		return nil, err
	}
	for i := range shares {
		if _, ok := f.stillHas(&shares[i]); !ok {
			return nil, errAnew
		}
	}
	return out, nil
}

// stillHas returns the allocation of a share, if that has it still.
func (f *FrontEnd) stillHas(s *share) (ledger.Allocation, bool) {
	a, ok := f.Ledger.Get(s.id())
	if !ok || a.Superseded {
		return a, false
	}
	is, err := readShare(a.ID, a.Ref, a.Grants)
	return a, err == nil && is.is(s)
}

// tellAfter is what the kubelet gets of the processor after an answer, before the claim is
// written to: nobody waits for that.
const tellAfter = 20 * time.Millisecond

// tell says in a claim, for whoever reads it, what its devices are and how strong their
// caps are.
func (f *FrontEnd) tell(c *agentkube.Claim, shares []share) {
	f.mu.Lock()
	offer := f.offer
	f.mu.Unlock()
	if offer == nil {
		return // it is told when the claims are known
	}
	var devices []agentkube.ClaimDevice
	for i := range shares {
		s := &shares[i]
		a, ok := f.stillHas(s)
		if !ok {
			return // given back already, or allocated anew: the API server refuses what is not allocated
		}
		g := &a.Grants[0]
		data := map[string]string{"gpu": string(g.GPU), "guarantee": "hardware"}
		switch {
		case g.NoRoom:
			delete(data, "guarantee") // no cap at all
		case g.Kind().InMIG():
			data["instance"] = g.Piece.String()
		case g.Cap != piece.NoCap:
			data["guarantee"] = offer.Guarantee
			data["capBytes"] = strconv.FormatUint(g.Cap.Bytes, 10)
		}
		devices = append(devices, agentkube.ClaimDevice{Pool: s.Pool, Device: s.Device, Share: s.Share, Data: data})
	}
	ctx, cancel := context.WithTimeout(context.Background(), apiPatience)
	defer cancel()
	if err := f.API.SetClaimDevices(ctx, f.Driver, c, devices); err != nil {
		f.Log.Warn("cannot say in a claim what its devices are", "claim", c.Namespace+"/"+c.Name, "err", err)
	}
}

// Unprepare gives a claim back. No container of it is to be running, and no pod that may use
// it: where the runtime has one, the error says so, and the kubelet asks again. Kubelets up to
// 1.36.3 ask for it when a pod ends for which they never had the claim prepared, while another
// pod has it (kubernetes#140212): they would forget it, and that pod's next container could not
// be made.
func (f *FrontEnd) Unprepare(ctx context.Context, c dra.Claim) error {
	pods := f.kubeletHas(c.UID)
	r := returned{at: f.Now(), pods: map[string]bool{}}
	var all []ledger.Allocation
	f.mu.Lock()
	if h := f.claims[c.UID]; h != nil {
		for _, id := range h.ids {
			if a, ok := f.Ledger.Get(id); ok {
				all = append(all, a)
			}
		}
	}
	f.refusals.forgiveLocked(c.UID) // its pod is gone
	f.mu.Unlock()
	if len(all) == 0 {
		f.renewed(c.UID) // the next pod asks for it
		return nil
	}
	for _, uid := range pods {
		r.pods[uid] = true
	}
	users := maps.Clone(r.pods)
	for i := range all {
		for _, p := range all[i].Pods() {
			users[p.UID] = true
		}
		if s, err := readShare(all[i].ID, all[i].Ref, all[i].Grants); err == nil {
			r.shares = append(r.shares, s)
		}
	}
	if len(pods) == 0 { // its account cannot be read
		maps.Copy(r.pods, users)
	}
	if err := f.unused(ctx, all, users); err != nil {
		return err
	}
	f.mu.Lock()
	for i := range all {
		if a, ok := f.Ledger.Get(all[i].ID); ok && a.Epoch == all[i].Epoch {
			f.endLocked(a.ID, c.UID)
		}
	}
	delete(f.anew, c.UID)
	maps.DeleteFunc(f.returned, func(_ string, r returned) bool { return f.Now().Sub(r.at) > lingers })
	f.returned[c.UID] = r
	f.mu.Unlock()
	f.Wake()
	return nil
}

// unused fails where a container has one of these allocations, or where one of these pods, by UID,
// is still on this node: its sandbox stands, which the kubelet stops before it gives up a pod's
// claims.
func (f *FrontEnd) unused(ctx context.Context, all []ledger.Allocation, pods map[string]bool) error {
	containers, err := f.Runtime.Containers(ctx)
	if err != nil {
		return fmt.Errorf("ask the container runtime whether a container has the claim yet: %w", err)
	}
	for i := range containers {
		if containers[i].CDIUnknown {
			return fmt.Errorf("the container runtime does not say whether container %s of pod %s has the claim yet", containers[i].Name, containers[i].InPod())
		}
		for _, key := range cdi.Keys(f.Domain, nil, containers[i].CDI) {
			if slices.ContainsFunc(all, func(a ledger.Allocation) bool { return a.ID == key }) {
				return fmt.Errorf("container %s of pod %s runs yet, and has it", containers[i].Name, containers[i].InPod())
			}
		}
	}
	there, err := f.Runtime.Pods(ctx)
	if err != nil {
		return fmt.Errorf("ask the container runtime whether a pod of the claim is here yet: %w", err)
	}
	for _, uid := range slices.Sorted(maps.Keys(there)) {
		if uid != "" && pods[uid] {
			return fmt.Errorf("pod %s is on this node yet, and may start a container with it", there[uid])
		}
	}
	return nil
}

// endLocked ends one allocation of a claim, which it has.
func (f *FrontEnd) endLocked(id, uid string) {
	f.Ledger.Release(ledger.DRA, id)
	delete(f.uses, id)
	h := f.claims[uid]
	if h.ids = slices.DeleteFunc(h.ids, func(o string) bool { return o == id }); len(h.ids) == 0 {
		delete(f.claims, uid)
	}
}

// Found takes over an allocation that was made before this process started, from its
// record. The error wraps gpu.ErrInvalid where the record is not of this ID.
func (f *FrontEnd) Found(id string, r ledger.Record, given time.Time) error {
	s, err := readShare(id, r.Ref, r.Grants)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.foundLocked(id, r, &s, given)
}

func (f *FrontEnd) foundLocked(id string, r ledger.Record, s *share, given time.Time) error {
	added, err := f.Ledger.Found(id, r, given)
	if added {
		h := f.heldLocked(s.UID)
		h.ids = append(h.ids, id)
		// It had its pieces already.
		a, _ := f.Ledger.Get(id)
		f.Ledger.Looked(id, a.Epoch, "", "")
	}
	return err
}

// takeOver takes over what a claim has, where no record of it is left: the kubelet or a
// container says that it is prepared. pods are those for which the kubelet has it.
func (f *FrontEnd) takeOver(c *agentkube.Claim, pods []string) error {
	wants := wants(c, f.Driver, f.Node)
	f.mu.Lock()
	defer f.mu.Unlock()
	every := everyDevice(f.Node, f.offer.Inventory, f.offer.Cards)
	var errs []error
	for i := range wants {
		w := &wants[i]
		if _, ok := f.Ledger.Get(w.id()); ok {
			continue
		}
		err := fmt.Errorf("this node has no device %s: %w", w.Device, gpu.ErrNotFound)
		if d, ok := every[DeviceName{w.Pool, w.Device}]; ok {
			var g ledger.Grant
			w.device = d
			if g, err = f.grantLocked(w, nil); err == nil {
				err = f.foundLocked(w.id(), ledger.Record{Owner: ledger.DRA, Resource: f.Driver, Ref: w.ref(), Grants: []ledger.Grant{g}}, &w.share, time.Time{})
			}
		}
		if err == nil {
			f.nameHolder(w.id(), c)
			f.heldLocked(c.UID).agreed(c, pods)
		} else {
			errs = append(errs, fmt.Errorf("take over request %s of claim %s/%s: %w", w.Request, c.Namespace, c.Name, err))
		}
	}
	return errors.Join(errs...)
}
