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
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
)

// intake is claims in: what the kubelet asks for. It has no lock: what claims have is in the
// book. It waits for the API server, the runtime and the loop, with no lock held.
type intake struct {
	o        *Options
	book     *book
	shelf    shown
	refusals refuser
	// look has the claims looked at, while a Prepare waits for the holder before it.
	look token
}

// refuser is who is told what the Prepare of a claim came to, and that its pod is gone.
type refuser interface {
	note(*agentkube.Claim, error)
	forgive(uid string)
}

// Prepare asks the API server unless it is known what that says for the pods that the kubelet has
// the claim for: see stands. The kubelet has asked it a moment before.
func (in *intake) Prepare(ctx context.Context, c dra.Claim) ([]dra.Device, error) {
	pods := in.kubeletHas(c.UID) // before the API server is asked: what it says is for them
	if shares, ok := in.book.stands(c.UID, pods); ok {
		devices, err := in.open(ctx, shares)
		if err == nil { // the call before it may have ended without that
			go in.tell(&agentkube.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}, shares)
		}
		if !errors.Is(err, errAnew) && (err == nil || !in.giveUp(ctx, shares)) {
			return devices, err
		}
	}
	claim, devices, err := in.prepare(ctx, c, pods)
	if claim != nil {
		in.refusals.note(claim, err)
	}
	return devices, err
}

// read reads a claim at the API server. at is the ledger's epoch before that.
func (in *intake) read(ctx context.Context, c dra.Claim) (claim *agentkube.Claim, at uint64, err error) {
	_, at, _ = in.o.Ledger.State()
	claim, err = in.o.API.Claim(ctx, in.o.Driver, c.Namespace, c.Name)
	switch {
	case err != nil:
		return nil, at, fmt.Errorf("read the claim: %w", err)
	case claim.UID != c.UID:
		return nil, at, fmt.Errorf("the claim of this name is another one now (%s, not %s): make the pod anew: %w",
			claim.UID, c.UID, gpu.ErrNotFound)
	}
	return claim, at, nil
}

// prepare takes what a claim has been allocated, and waits until containers may be created
// with it. It returns the claim as it was last read, nil where it could not be.
func (in *intake) prepare(ctx context.Context, c dra.Claim, pods []string) (
	claim *agentkube.Claim, _ []dra.Device, _ error,
) {
	for {
		_, ended := in.o.Ledger.Ended()
		now, at, err := in.read(ctx, c)
		switch {
		case err == nil:
			claim = now
			in.book.agree(claim, at, pods)
		case claim == nil || errors.Is(err, gpu.ErrNotFound):
			return claim, nil, err
		}
		// Else it is as it was before the wait, as long as its pod is there.
		wants, err := wanted(claim, in.o.Driver, in.o.Node)
		if err != nil {
			return claim, nil, err
		}
		if err := in.find(ctx, wants); err != nil {
			return claim, nil, err
		}
		news, err := in.book.take(claim, wants, pods)
		if err == nil {
			in.book.renewed(c.UID)
			shares := sharesOf(wants)
			devices, err := in.open(ctx, shares)
			if errors.Is(err, errAnew) {
				continue
			}
			if err == nil {
				time.AfterFunc(tellAfter, func() { in.tell(claim, shares) })
			}
			if err == nil || !in.giveUp(ctx, shares) {
				return claim, devices, err
			}
			continue // to be told why
		}
		if !errors.Is(err, ledger.ErrHeld) {
			return claim, nil, err
		}
		// Where that cannot be told now, it is asked again.
		if over, _ := in.retire(ctx, c.UID); over {
			continue
		}
		select {
		case <-ended:
		case <-news: // another layout, or another front-end has gone
		case <-time.After(impatience):
			in.look.poke() // nobody may have it any more
		case <-ctx.Done():
			if late := in.shelf.now().late(wants); late != nil {
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

// find says which devices a claim's results are. Before everything is known after a start
// it waits.
func (in *intake) find(ctx context.Context, wants []want) error {
	for {
		v := in.shelf.now()
		if ready, err := v.find(wants); ready {
			return err
		}
		select {
		case <-v.news:
		case <-ctx.Done():
			return errors.New("the agent has started and does not know yet what this node has, " +
				"or which claims there are; see its log")
		}
	}
}

// open waits until containers may be created with a claim's allocations. The error wraps
// errAnew where they are another's by then.
func (in *intake) open(ctx context.Context, shares []share) ([]dra.Device, error) {
	slices.SortFunc(shares, func(a, b share) int {
		return cmp.Or(cmp.Compare(a.Request, b.Request), cmp.Compare(a.N, b.N))
	})
	asked := ctx
	ctx, cancel := in.whileMakeable(ctx, shares) // it reads them from now on
	defer cancel()
	all, ctx := errgroup.WithContext(ctx)
	out := make([]dra.Device, len(shares))
	for i := range shares {
		s := &shares[i]
		out[i] = dra.Device{Requests: []string{s.Request}, Pool: s.Pool, Name: s.Device, Share: s.Share,
			CDI: []string{cdi.DeviceName(in.o.Domain, s.id())}}
		all.Go(func() error { return in.o.Ledger.Prepare(ctx, s.id()) })
	}
	err := all.Wait()
	if err != nil && asked.Err() != nil {
		return nil, err
	}
	for i := range shares {
		// One that has ended meanwhile is another's, too: a look at the claims may be faster than this.
		if _, ok := in.stillHas(&shares[i]); !ok {
			return nil, errAnew
		}
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// stillHas returns the allocation of a share, if that has it still.
func (in *intake) stillHas(s *share) (ledger.Allocation, bool) {
	a, ok := in.o.Ledger.Get(s.id())
	if !ok || a.Superseded {
		return a, false
	}
	is, err := readShare(a.ID, a.Ref, a.Grants)
	return a, err == nil && is.is(s)
}

// errAnew says that a claim was allocated anew while its Prepare was under way.
var errAnew = errors.New("the claim was allocated anew meanwhile")

// finish has what a claim has opened, as Prepare does, and says so in the claim if that does not
// say it.
func (in *intake) finish(ctx context.Context, c *agentkube.Claim, shares []share) {
	ctx, cancel := context.WithTimeout(ctx, dra.Patience)
	defer cancel()
	if _, err := in.open(ctx, shares); err == nil && !c.Told {
		in.tell(c, shares)
	}
}

// retire ends what is superseded, of one claim or, without a UID, of all, where no container has
// it. Before it asks for those it waits until no CDI file stands for it, so that none is
// created meanwhile. It reports whether something has ended.
func (in *intake) retire(ctx context.Context, uid string) (ended bool, err error) {
	all := in.book.superseded(uid)
	if len(all) == 0 {
		return false, nil
	}
	for _, o := range all {
		select {
		case <-o.gone:
		case <-ctx.Done():
			return false, fmt.Errorf("no container is to be created any more with what a claim had before, "+
				"and its file stands yet: %w", ctx.Err())
		}
	}
	used, sure, err := inContainers(ctx, in.o.Runtime, in.o.Domain)
	if err != nil {
		return false, err
	}
	return sure && in.book.retire(all, used), nil
}

// kubeletHas are the pods for which the kubelet has a claim now; none where its account cannot
// be read.
func (in *intake) kubeletHas(uid string) []string {
	state, err := in.o.Kubelet.DRAState()
	if err != nil {
		return nil
	}
	return podsOf(&state, uid)
}

// tellAfter is what the kubelet gets of the processor after an answer, before the claim is
// written to: nobody waits for that.
const tellAfter = 20 * time.Millisecond

// tell says in a claim, for whoever reads it, what its devices are and how strong their
// caps are.
func (in *intake) tell(c *agentkube.Claim, shares []share) {
	offer := in.shelf.now().offer
	if offer == nil {
		return // it is told when the claims are known
	}
	var devices []agentkube.ClaimDevice
	for i := range shares {
		s := &shares[i]
		a, ok := in.stillHas(s)
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
	if err := in.o.API.SetClaimDevices(ctx, in.o.Driver, c, devices); err != nil {
		in.o.Log.Warn("cannot say in a claim what its devices are", "claim", c.Namespace+"/"+c.Name, "err", err)
	}
}

// Unprepare is asked by kubelets up to 1.36.3 when a pod ends for which they never had the claim
// prepared, too, while another pod has it (kubernetes#140212): they would forget it, and that pod's
// next container could not be made.
func (in *intake) Unprepare(ctx context.Context, c dra.Claim) error {
	pods := in.kubeletHas(c.UID)
	r := returned{at: in.o.Now(), pods: map[string]bool{}}
	all := in.book.allocations(c.UID)
	in.refusals.forgive(c.UID) // its pod is gone
	if len(all) == 0 {
		in.book.renewed(c.UID) // the next pod asks for it
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
	if err := in.unused(ctx, all, users); err != nil {
		return err
	}
	in.book.giveBack(c.UID, all, r)
	return nil
}

// unused fails where a container has one of these allocations, or where one of these pods, by UID,
// is still on this node: its sandbox stands, which the kubelet stops before it gives up a pod's
// claims.
func (in *intake) unused(ctx context.Context, all []ledger.Allocation, pods map[string]bool) error {
	containers, err := in.o.Runtime.Containers(ctx)
	if err != nil {
		return fmt.Errorf("ask the container runtime whether a container has the claim yet: %w", err)
	}
	for i := range containers {
		if containers[i].CDIUnknown {
			return fmt.Errorf("the container runtime does not say whether container %s of pod %s has the claim yet",
				containers[i].Name, containers[i].InPod())
		}
		for _, key := range cdi.Keys(in.o.Domain, nil, containers[i].CDI) {
			if slices.ContainsFunc(all, func(a ledger.Allocation) bool { return a.ID == key }) {
				return fmt.Errorf("container %s of pod %s runs yet, and has it",
					containers[i].Name, containers[i].InPod())
			}
		}
	}
	there, err := in.o.Runtime.Pods(ctx)
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
