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

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
)

// Prepare takes what a claim has been allocated, and returns it when containers may be
// created with it. Everything that is coming is waited for: the claims that are known
// after a start, a holder that is ending, an instance. It may be called any number of
// times.
func (f *FrontEnd) Prepare(ctx context.Context, c dra.Claim) ([]dra.Device, error) {
	if shares, ok := f.taken(c.UID); ok { // also while the API server is away
		devices, err := f.open(ctx, shares)
		if err == nil { // the call before it may have ended without that
			go f.tell(&kube.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}, shares)
		}
		if err == nil || !f.refusals.giveUp(ctx, shares) {
			return devices, err
		}
	}
	claim, err := f.API.Claim(ctx, f.Driver, c.Namespace, c.Name)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the claim: %w", err)
	case claim.UID != c.UID:
		return nil, fmt.Errorf("the claim of this name is another one now (%s, not %s): make the pod anew: %w", claim.UID, c.UID, gpu.ErrNotFound)
	}
	devices, err := f.prepare(ctx, claim)
	f.refusals.note(claim, err)
	return devices, err
}

// wanted are the results of a claim that are to be prepared. The error lasts.
func (f *refusals) wanted(claim *kube.Claim) ([]want, error) {
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
func (f *refusals) foreign(claim *kube.Claim) error {
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
// with it.
func (f *FrontEnd) prepare(ctx context.Context, claim *kube.Claim) ([]dra.Device, error) {
	wants, err := f.refusals.wanted(claim)
	if err != nil {
		return nil, err
	}
	if err := f.find(ctx, wants); err != nil {
		return nil, err
	}
	for {
		_, ended := f.Ledger.Ended()
		news, err := f.take(wants)
		switch {
		case err == nil:
			shares := make([]share, len(wants))
			for i := range wants {
				shares[i] = wants[i].share
			}
			devices, err := f.open(ctx, shares)
			if err == nil {
				time.AfterFunc(tellAfter, func() { f.tell(claim, shares) })
			}
			if err == nil || !f.refusals.giveUp(ctx, shares) {
				return devices, err
			}
			continue // to be told why
		case !errors.Is(err, ledger.ErrTaken):
			return nil, err
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
				return nil, late
			}
			return nil, fmt.Errorf("the holder before it has not ended yet: %w", err)
		}
	}
}

// nameHolder says who has an allocation until containers tell: the pods that may use its
// claim.
func (f *FrontEnd) nameHolder(id string, pods []workload.Pod) {
	if len(pods) > 0 {
		f.Ledger.SetHolder(id, ledger.Holder{Pod: pods[0]}, pods[1:]...)
	}
}

// taken returns what a claim has in the ledger; ok is false where that is not all of it.
func (f *FrontEnd) taken(uid string) (shares []share, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range f.claims[uid] {
		a, has := f.Ledger.Get(id)
		s, err := readShare(id, a.Ref)
		if !has || err != nil {
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

// take takes all of a claim's results, or none. The error wraps ledger.ErrTaken where that
// may become possible; news tells of another layout then.
func (f *FrontEnd) take(wants []want) (news <-chan struct{}, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var asked []ledger.Request
	for i := range wants {
		w := &wants[i]
		if a, ok := f.Ledger.Get(w.id()); ok {
			if s, err := readShare(a.ID, a.Ref); err != nil || !s.same(&w.share) {
				return nil, fmt.Errorf("request %s had device %s before, and has %s now: make the pod anew: %w", w.Request, s.Device, w.Device, gpu.ErrInvalid)
			}
			continue
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
	delete(f.returned, wants[0].UID)
	for i := range made {
		f.claims[wants[0].UID] = append(f.claims[wants[0].UID], made[i].ID)
		// Whoever had the pieces before has released them, which is looked at before
		// that: nobody is on them.
		f.Ledger.Looked(made[i].ID, made[i].Epoch, "", "")
		f.nameHolder(made[i].ID, wants[0].pods)
		f.Granted(&made[i])
	}
	return f.news, nil
}

// open waits until containers may be created with a claim's allocations.
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
	return out, nil
}

// tellAfter is what the kubelet gets of the processor after an answer, before the claim is
// written to: nobody waits for that.
const tellAfter = 20 * time.Millisecond

// tell says in a claim, for whoever reads it, what its devices are and how strong their
// caps are.
func (f *FrontEnd) tell(c *kube.Claim, shares []share) {
	f.mu.Lock()
	offer := f.offer
	f.mu.Unlock()
	if offer == nil {
		return // it is told when the claims are known
	}
	var devices []kube.ClaimDevice
	for i := range shares {
		s := &shares[i]
		a, ok := f.Ledger.Get(s.id())
		if !ok {
			return // given back already
		}
		g := &a.Grants[0]
		data := map[string]string{"gpu": string(g.GPU), "guarantee": "hardware"}
		switch {
		case g.NoRoom:
			delete(data, "guarantee") // no cap at all
		case g.Kind == ledger.Placement:
			data["instance"] = g.Placement.String()
		case g.Cap != ledger.NoCap:
			data["guarantee"] = offer.Guarantee
			data["capBytes"] = strconv.FormatUint(g.Cap.Bytes, 10)
		}
		devices = append(devices, kube.ClaimDevice{Pool: s.Pool, Device: s.Device, Share: s.Share, Data: data})
	}
	ctx, cancel := context.WithTimeout(context.Background(), apiPatience)
	defer cancel()
	if err := f.API.SetClaimDevices(ctx, f.Driver, c, devices); err != nil {
		f.Log.Warn("cannot say in a claim what its devices are", "claim", c.Namespace+"/"+c.Name, "err", err)
	}
}

// Unprepare gives a claim back. No container of it is to be running: where the runtime has
// one, the error says so, and the kubelet asks again.
func (f *FrontEnd) Unprepare(ctx context.Context, c dra.Claim) error {
	f.mu.Lock()
	held := slices.Clone(f.claims[c.UID])
	f.refusals.forgiveLocked(c.UID) // its pod is gone
	f.mu.Unlock()
	if len(held) == 0 {
		return nil
	}
	containers, err := f.Runtime.Containers(ctx)
	if err != nil {
		return fmt.Errorf("ask the container runtime whether a container has the claim yet: %w", err)
	}
	for i := range containers {
		if containers[i].CDIUnknown {
			return fmt.Errorf("the container runtime does not say whether container %s of pod %s has the claim yet", containers[i].Name, containers[i].InPod())
		}
		for _, key := range cdi.Keys(f.Domain, nil, containers[i].CDI) {
			if slices.Contains(held, key) {
				return fmt.Errorf("container %s of pod %s runs yet, and has it", containers[i].Name, containers[i].InPod())
			}
		}
	}
	f.mu.Lock()
	var pods []workload.Pod
	for _, id := range held {
		if a, ok := f.Ledger.Get(id); ok {
			pods = append(pods, a.Pods()...)
		}
		f.endLocked(id, c.UID)
	}
	maps.DeleteFunc(f.returned, func(_ string, r returned) bool { return f.Now().Sub(r.at) > lingers })
	f.returned[c.UID] = returned{pods, f.Now()}
	f.mu.Unlock()
	f.Wake()
	return nil
}

// endLocked ends one allocation of a claim.
func (f *FrontEnd) endLocked(id, uid string) {
	f.Ledger.Release(ledger.DRA, id)
	if f.claims[uid] = slices.DeleteFunc(f.claims[uid], func(o string) bool { return o == id }); len(f.claims[uid]) == 0 {
		delete(f.claims, uid)
	}
}

// Found takes over an allocation that was made before this process started, from its
// record. The error wraps gpu.ErrInvalid where the record is not of this ID.
func (f *FrontEnd) Found(id string, r ledger.Record, taken time.Time) error {
	s, err := readShare(id, r.Ref)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.foundLocked(id, r, &s, taken)
}

func (f *FrontEnd) foundLocked(id string, r ledger.Record, s *share, taken time.Time) error {
	added, err := f.Ledger.Found(id, r, taken)
	if added {
		f.claims[s.UID] = append(f.claims[s.UID], id)
		// It had its pieces already.
		a, _ := f.Ledger.Get(id)
		f.Ledger.Looked(id, a.Epoch, "", "")
	}
	return err
}

// takeOver takes over what a claim has, where no record of it is left: the kubelet or a
// container says that it is prepared.
func (f *FrontEnd) takeOver(c *kube.Claim) error {
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
				f.nameHolder(w.id(), w.pods)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("take over request %s of claim %s/%s: %w", w.Request, c.Namespace, c.Name, err))
		}
	}
	return errors.Join(errs...)
}
