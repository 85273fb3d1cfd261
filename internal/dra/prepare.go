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
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
)

// intake answers the kubelet's calls. It has no lock: the book keeps what claims have. It waits for
// the API server, the runtime and the loop with no lock held.
type intake struct {
	o        *Options
	book     *book
	shelf    shown
	refusals refuser
	// look wakes the sweeper, while a Prepare waits for a previous holder.
	look token
	// again tells claims again what has changed of them.
	again *reteller
}

// refuser is told the result of a claim's Prepare (note), and that a claim's pod is gone (forgive).
type refuser interface {
	note(*agentkube.Claim, error)
	forgive(uid string)
}

// Prepare does not ask the API server if the ledger is known to be right for the pods that the
// kubelet has the claim for: see book.confirmed. The kubelet has read the claim a moment before.
func (in *intake) Prepare(ctx context.Context, c dra.Claim) ([]dra.Device, error) {
	pods := in.kubeletHas(c.UID) // read before the API server is asked: its answer is for these pods
	if shares, ok := in.book.confirmed(c.UID, pods); ok {
		devices, err := in.open(ctx, shares)
		if err == nil { // an earlier call may have timed out before it did this
			go in.tell(&agentkube.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}, shares)
		}
		if !errors.Is(err, errReallocated) && (err == nil || !in.giveUp(ctx, shares)) {
			return devices, err
		}
	}
	claim, devices, err := in.prepare(ctx, c, pods)
	if claim != nil {
		in.refusals.note(claim, err)
	}
	return devices, err
}

// read reads a claim at the API server. at is the ledger's epoch from before that.
func (in *intake) read(ctx context.Context, c dra.Claim) (claim *agentkube.Claim, at uint64, err error) {
	_, at, _ = in.o.Ledger.State()
	claim, err = in.o.API.Claim(ctx, in.o.Driver, c.Namespace, c.Name)
	switch {
	case err != nil:
		return nil, at, fmt.Errorf("read the claim: %w", err)
	case claim.UID != c.UID:
		return nil, at, fmt.Errorf("the claim of this name is another one now (UID %s, not %s): make the pod anew: %w",
			claim.UID, c.UID, gpu.ErrNotFound)
	}
	return claim, at, nil
}

// prepare takes allocations for a claim, and waits until containers may be created with them. It
// returns the claim as it was last read; nil if it was never read.
func (in *intake) prepare(ctx context.Context, c dra.Claim, pods []string) (
	claim *agentkube.Claim, _ []dra.Device, _ error,
) {
	for {
		_, ended := in.o.Ledger.Ended()
		now, at, err := in.read(ctx, c)
		switch {
		case err == nil:
			claim = now
			in.book.reconcile(claim, at, pods)
		case claim == nil || errors.Is(err, gpu.ErrNotFound):
			return claim, nil, err
		}
		// If the API server failed during a wait, the claim as last read counts, while its pod
		// exists.
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
			if errors.Is(err, errReallocated) {
				continue
			}
			if err == nil {
				time.AfterFunc(tellAfter, func() { in.tell(claim, shares) })
			}
			if err == nil || !in.giveUp(ctx, shares) {
				return claim, devices, err
			}
			continue // the next take returns the reason
		}
		if !errors.Is(err, ledger.ErrHeld) {
			return claim, nil, err
		}
		// If the runtime cannot be asked now, the next turn asks it again.
		if over, _ := in.retire(ctx, c.UID); over {
			continue
		}
		select {
		case <-ended:
		case <-news: // the layout has changed, or the other front-end has left the GPU
		case <-time.After(impatience):
			in.look.poke() // the previous holder may have ended unnoticed
		case <-ctx.Done():
			if late := in.shelf.now().late(wants); late != nil {
				return claim, nil, late
			}
			return claim, nil, fmt.Errorf("the previous holder has not ended yet: %w", err)
		}
	}
}

// sharesOf returns the shares of these results.
func sharesOf(wants []want) []share {
	shares := make([]share, len(wants))
	for i := range wants {
		shares[i] = wants[i].share
	}
	return shares
}

// find sets the device of each result. After a start it waits until the devices and the claims are
// known.
func (in *intake) find(ctx context.Context, wants []want) error {
	for {
		v := in.shelf.now()
		if ready, err := v.find(wants); ready {
			return err
		}
		select {
		case <-v.news:
		case <-ctx.Done():
			return errors.New("the agent has just started, and does not know yet " +
				"which devices and claims this node has; see its log")
		}
	}
}

// open waits until containers may be created with a claim's allocations, and returns their devices.
// The error wraps errReallocated if one of them has ended or was superseded meanwhile, or is not the
// claim's own any longer.
func (in *intake) open(ctx context.Context, shares []share) ([]dra.Device, error) {
	slices.SortFunc(shares, func(a, b share) int {
		return cmp.Or(cmp.Compare(a.Request, b.Request), cmp.Compare(a.N, b.N))
	})
	makeable, cancel := in.whileMakeable(ctx, shares) // it reads shares from now on
	defer cancel()
	all, together := errgroup.WithContext(makeable)
	out := make([]dra.Device, len(shares))
	for i := range shares {
		s := &shares[i]
		out[i] = dra.Device{Requests: []string{s.Request}, Pool: s.Pool, Name: s.Device, Share: s.Share,
			CDI: []string{cdi.DeviceName(in.o.Domain, s.id())}}
		all.Go(func() error { return in.o.Ledger.Prepare(together, s.id()) })
	}
	err := all.Wait()
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return nil, err
	case makeable.Err() == nil: // an allocation has gone: the sweeper may be faster than this
		return nil, errReallocated
	}
	for i := range shares {
		if _, ok := in.stillHas(&shares[i]); !ok {
			return nil, errReallocated
		}
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// stillHas returns the allocation of a share. It returns false if the share does not have it any
// longer.
func (in *intake) stillHas(s *share) (ledger.Allocation, bool) {
	a, ok := in.o.Ledger.Get(s.id())
	if !ok || a.Superseded {
		return a, false
	}
	is, err := readShare(a.ID, a.Ref, a.Grants)
	return a, err == nil && is.is(s)
}

// errReallocated is the error of a claim that was allocated anew during its Prepare.
var errReallocated = errors.New("the claim was allocated anew meanwhile")

// finish waits until what a claim has is open, as Prepare does, and writes the devices into the
// claim if they are not there.
func (in *intake) finish(ctx context.Context, c *agentkube.Claim, shares []share) {
	ctx, cancel := context.WithTimeout(ctx, dra.Patience)
	defer cancel()
	if _, err := in.open(ctx, shares); err == nil && !c.Told {
		in.tell(c, shares)
	}
}

// retire ends the superseded allocations that no container has, of one claim or, if uid is empty,
// of all claims. It waits until they have no CDI file before it asks for containers, so that none
// can be created with them meanwhile. It reports whether it ended any.
func (in *intake) retire(ctx context.Context, uid string) (ended bool, err error) {
	all := in.book.superseded(uid)
	if len(all) == 0 {
		return false, nil
	}
	for _, o := range all {
		select {
		case <-o.gone:
		case <-ctx.Done():
			return false, fmt.Errorf("wait for the loop to remove the CDI files "+
				"of what a claim had before: %w", ctx.Err())
		}
	}
	used, sure, err := inContainers(ctx, in.o.Runtime, in.o.Domain)
	if err != nil {
		return false, err
	}
	return sure && in.book.retire(all, used), nil
}

// kubeletHas returns the UIDs of the pods that the kubelet has a claim for now; none if its account
// cannot be read.
func (in *intake) kubeletHas(uid string) []string {
	state, err := in.o.Kubelet.DRAState()
	if err != nil {
		return nil
	}
	return podsOf(&state, uid)
}

// tellAfter is the pause between an answer to the kubelet and the write to the claim. The processor
// is the kubelet's during that time, since no pod waits for the write.
const tellAfter = 20 * time.Millisecond

// tell writes into a claim's status what its devices are and how strong their caps are. Other
// programs read that.
func (in *intake) tell(c *agentkube.Claim, shares []share) {
	offer := in.shelf.now().offer
	if offer == nil {
		return // the sweeper does it once the claims are known
	}
	var devices []agentkube.ClaimDevice
	var said []string
	for i := range shares {
		s := &shares[i]
		a, ok := in.stillHas(s)
		if !ok {
			return // given back or allocated anew: the API server refuses devices that are not allocated
		}
		g := &a.Grants[0]
		data := map[string]string{"gpu": string(g.GPU), "guarantee": "hardware"}
		switch {
		case g.NoRoom:
			delete(data, "guarantee") // it has no cap
		case g.Kind().InMIG():
			data["instance"] = g.Piece.String()
		case g.Cap != piece.NoCap:
			data["guarantee"] = offer.Guarantee
			data["capBytes"] = strconv.FormatUint(g.Cap.Bytes, 10)
		}
		if g.Compute.Ceiling > 0 {
			held := in.o.Held(a.ID, g.GPU).String()
			data["computePercent"], data["compute"] = strconv.Itoa(g.Compute.Ceiling), held
			said = append(said, held)
		}
		devices = append(devices, agentkube.ClaimDevice{Pool: s.Pool, Device: s.Device, Share: s.Share, Data: data})
	}
	ctx, cancel := context.WithTimeout(context.Background(), apiPatience)
	defer cancel()
	if err := in.o.API.SetClaimDevices(ctx, in.o.Driver, c, devices); err != nil {
		in.o.Log.Warn("cannot write into a claim what its devices are", "claim", c.Namespace+"/"+c.Name, "err", err)
	} else if len(said) > 0 {
		in.again.note(c.UID, strings.Join(said, "; "))
	}
}

// Unprepare fails while the claim is in use. Kubelets up to 1.36.3 also call it while another pod
// has the claim, when a pod ends that they never prepared it for (kubernetes#140212). Without the
// check they would forget the claim, and the other pod's next container could not be created.
func (in *intake) Unprepare(ctx context.Context, c dra.Claim) error {
	pods := in.kubeletHas(c.UID)
	r := unprepared{at: in.o.Now(), pods: map[string]bool{}}
	all := in.book.allocations(c.UID)
	in.refusals.forgive(c.UID) // its pod is gone
	if len(all) == 0 {
		in.book.renewed(c.UID) // its next pod calls Prepare
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
	if len(pods) == 0 { // the kubelet's account cannot be read
		maps.Copy(r.pods, users)
	}
	if err := in.unused(ctx, all, users); err != nil {
		return err
	}
	in.book.unprepare(c.UID, all, r)
	return nil
}

// unused returns an error if a container has one of these allocations, or if one of these pods, by
// UID, still has a sandbox on this node. The kubelet stops the sandbox before it gives up a pod's
// claims.
func (in *intake) unused(ctx context.Context, all []ledger.Allocation, pods map[string]bool) error {
	containers, err := in.o.Runtime.Containers(ctx)
	if err != nil {
		return fmt.Errorf("ask the container runtime whether a container still has the claim: %w", err)
	}
	for i := range containers {
		if containers[i].CDIUnknown {
			return fmt.Errorf("the container runtime does not tell whether container %s of pod %s still has the claim",
				containers[i].Name, containers[i].InPod())
		}
		for _, key := range cdi.Keys(in.o.Domain, nil, containers[i].CDI) {
			if slices.ContainsFunc(all, func(a ledger.Allocation) bool { return a.ID == key }) {
				return fmt.Errorf("container %s of pod %s still runs, and has the claim",
					containers[i].Name, containers[i].InPod())
			}
		}
	}
	there, err := in.o.Runtime.Pods(ctx)
	if err != nil {
		return fmt.Errorf("ask the container runtime whether a pod of the claim is still here: %w", err)
	}
	for _, uid := range slices.Sorted(maps.Keys(there)) {
		if uid != "" && pods[uid] {
			return fmt.Errorf("pod %s is still on this node, and may start a container with the claim", there[uid])
		}
	}
	return nil
}
