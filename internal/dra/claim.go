// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"

	"k8s.io/utils/ptr"
)

// share is one result of a claim's allocation. The ledger keeps it, in JSON, as the Ref of the
// result's allocation.
type share struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// Request is the name of the request, and N the number of the result within it, from 0. Of is
	// the number of results that the claim has on this node.
	Request string `json:"request"`
	N       int    `json:"n"`
	Of      int    `json:"of"`
	Pool    string `json:"pool"`
	Device  string `json:"device"`
	Share   string `json:"share,omitempty"`
	// Amount is the GPU memory that it has, in bytes; zero if it has no memory units. Admin is true
	// for admin access, which takes no room. The ledger keeps both in the grants.
	Amount int64 `json:"-"`
	Admin  bool  `json:"-"`
}

// id returns the allocation's ID. It follows from the claim's UID and the request alone. The
// kubelet keeps the names of CDI devices for the claim's next pods and over its own restart, and
// then adds new answers to those that it has. So an ID may come to mean another device after the
// claim was allocated anew, but only when no container has the old one: see book.reconcile.
func (s *share) id() string {
	return cdi.Key("claim/"+s.UID, []string{s.Request + "#" + strconv.Itoa(s.N)})
}

func (s *share) ref() string {
	data, err := json.Marshal(s)
	if err != nil {
		panic(err) // cannot happen: a share has only strings and numbers
	}
	return string(data)
}

// readShare parses an allocation's Ref, and adds Amount and Admin from its grants. The error wraps
// gpu.ErrInvalid.
func readShare(id, ref string, grants []ledger.Grant) (share, error) {
	var s share
	err := json.Unmarshal([]byte(ref), &s)
	if err == nil && (s.UID == "" || s.id() != id) {
		err = fmt.Errorf("it belongs to allocation %s", s.id())
	}
	if err != nil {
		return share{}, fmt.Errorf("read the claim in the record of allocation %s: %w: %w", id, err, gpu.ErrInvalid)
	}
	for i := range grants {
		g := &grants[i]
		if g.Kind().Together() { // claims name an amount only for memory units
			s.Amount += int64(piece.Count(g.Piece)) * int64(g.Size()) << 20
		}
		s.Admin = s.Admin || g.NoRoom
	}
	return s, nil
}

// nameOf returns a claim's name in the form that the kubelet uses.
func nameOf(c *agentkube.Claim) dra.Claim {
	return dra.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}

// want is a result of a claim that is to be prepared.
type want struct {
	share
	device Device
	// slice is the time slice that the result asks for; empty if it asks for none. named is true if
	// the configuration names the result's own request.
	slice gpu.TimeSlice
	named bool
	// percent is the share of the GPU's SMs that the result names; 0 if it follows from the memory.
	percent int64
}

// wants returns the results of a claim's allocation that are of this driver and node.
func wants(c *agentkube.Claim, driver, node string) (out []want) {
	n := map[string]int{}
	for i := range c.Results {
		r := &c.Results[i]
		if r.Driver != driver || !strings.HasPrefix(r.Pool, node+"/") {
			continue
		}
		slice, named := sliceOf(c, r)
		amount, percent := r.ConsumedCapacity[memory], r.ConsumedCapacity[computeShare]
		s := share{Namespace: c.Namespace, Name: c.Name, UID: c.UID, Request: r.Request, N: n[r.Request],
			Pool: r.Pool, Device: r.Device, Share: string(ptr.Deref(r.ShareID, "")),
			Amount: amount.Value(), Admin: ptr.Deref(r.AdminAccess, false)}
		out = append(out, want{share: s, slice: slice, named: named, percent: percent.Value()})
		n[r.Request]++
	}
	for i := range out {
		out[i].Of = len(out)
	}
	return out
}

// wanted returns the results of a claim that are to be prepared. Its errors are permanent: see
// permanent.
func wanted(claim *agentkube.Claim, driver, node string) ([]want, error) {
	if err := refuseConfig(claim); err != nil {
		return nil, err
	}
	if err := foreign(claim, driver, node); err != nil {
		return nil, err
	}
	out := wants(claim, driver, node)
	if len(out) == 0 {
		return nil, permanent(status.ClaimRefused,
			fmt.Errorf("the claim has nothing of driver %s on this node: %w", driver, gpu.ErrInvalid))
	}
	return out, nil
}

// foreign refuses a claim with a device of another node's pool. All results of this driver are on
// one node, so some ResourceSlice is false. A stolen token of this node could write one where the
// policy of component dra is not in force. To prepare only the rest would start a pod without a GPU
// that it was allocated.
func foreign(claim *agentkube.Claim, driver, node string) error {
	for i := range claim.Results {
		r := &claim.Results[i]
		if r.Driver != driver || strings.HasPrefix(r.Pool, node+"/") {
			continue
		}
		return permanent(status.ClaimRefused, fmt.Errorf("request %s has device %s of pool %s, "+
			"and node %s offers only devices of its own pools (%s/…): "+
			"find who wrote a ResourceSlice of that pool for this node "+
			"(kubectl get resourceslices --field-selector spec.nodeName=%s), "+
			"delete the slice, and make the claim anew: %w",
			r.Request, r.Device, r.Pool, node, node, node, gpu.ErrInvalid))
	}
	return nil
}

// freeNumbers returns the n lowest free numbers among the first `of` units or replicas of a GPU.
// beside are the requests that are to be taken with it. The error wraps ledger.ErrHeld if too few
// are free now. It is permanent if the claim asks for more than there are.
func freeNumbers(l *ledger.Ledger, d Device, of, n int, beside []ledger.Request) (free []int, err error) {
	var grants []ledger.Grant
	for _, a := range l.Allocations() {
		grants = append(grants, a.Grants...)
	}
	own := n
	for i := range beside {
		grants = append(grants, beside[i].Grants...)
		for _, o := range beside[i].Grants {
			if o.GPU == d.GPU && !o.NoRoom {
				own += piece.Count(o.Piece)
			}
		}
	}
	if own > of {
		return nil, permanent(status.ClaimRefused,
			fmt.Errorf("the claim asks for %d of its %d %s: %w", own, of, d.Kind.Several(), gpu.ErrInvalid))
	}
	taken := map[int]bool{}
	for i := range grants {
		switch o := &grants[i]; {
		case o.GPU != d.GPU || o.NoRoom:
		case o.Kind() != d.Kind:
			return nil, fmt.Errorf("the GPU is held as another kind of device: %w", ledger.ErrHeld)
		default:
			for k := range o.Numbers().All() {
				taken[k] = true
			}
		}
	}
	for k := 0; k < of && len(free) < n; k++ {
		if !taken[k] {
			free = append(free, k)
		}
	}
	if len(free) < n {
		return nil, fmt.Errorf("%d of its %d %s are free, and %d are wanted: %w",
			len(free), of, d.Kind.Several(), n, ledger.ErrHeld)
	}
	return free, nil
}

// deviceOf returns the device that a grant is a part of.
func deviceOf(g *ledger.Grant) Device {
	return Device{GPU: g.GPU, Kind: g.Kind(), Placement: piece.At(g.Piece)}
}

// is reports whether what the ledger has equals the given result of a claim. If not, the claim was
// allocated anew. The amounts are compared only for memory units: other devices have a fixed one.
func (s *share) is(given *share) bool {
	return s.Of == given.Of && s.Pool == given.Pool && s.Device == given.Device && s.Share == given.Share &&
		s.Admin == given.Admin && (s.Amount == 0 || s.Amount == given.Amount)
}

// String describes the share for people.
func (s *share) String() string {
	if n := s.Amount; n > 0 {
		return fmt.Sprintf("%d MiB of device %s", n>>20, s.Device)
	}
	return "device " + s.Device
}
