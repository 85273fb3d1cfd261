// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// API is what the front-end needs of the API server: *agentkube.Client.
type API interface {
	Slices
	// Claim is one claim, with what it has of a driver. The error wraps gpu.ErrNotFound.
	Claim(ctx context.Context, driver, namespace, name string) (*agentkube.Claim, error)
	// Claims are all that have something of a driver on this node.
	Claims(ctx context.Context, driver string) ([]agentkube.Claim, error)
	// SetClaimDevices says in a claim what its devices are.
	SetClaimDevices(ctx context.Context, driver string, c *agentkube.Claim, devices []agentkube.ClaimDevice) error
}

// Kubelet is what the front-end asks the kubelet: a KubeletDir.
type Kubelet interface {
	// DRAState is what the kubelet has prepared. The error wraps gpu.ErrNotFound where it
	// never has.
	DRAState() (node.DRAState, error)
	// FollowDRAState calls back whenever the kubelet may have written that anew, until ctx
	// ends, whose error it returns.
	FollowDRAState(ctx context.Context, changed func()) error
}

// KubeletDir is the directory of a kubelet.
type KubeletDir string

// DRAState reads what that kubelet has prepared.
func (d KubeletDir) DRAState() (node.DRAState, error) { return node.ReadDRAState(string(d)) }

// FollowDRAState follows that kubelet's file.
func (d KubeletDir) FollowDRAState(ctx context.Context, changed func()) error {
	return node.FollowDRAState(ctx, string(d), changed)
}

// Runtime is what the front-end asks the container runtime: *node.Runtime.
type Runtime interface {
	// Containers are those that have been created and have not ended.
	Containers(context.Context) ([]node.Container, error)
	// Pods are those whose sandbox stands, by UID.
	Pods(context.Context) (map[string]workload.Pod, error)
}

// Options are what a FrontEnd is made of. All are required but Fault and Evict.
type Options struct {
	// Domain names CDI devices and taints, Driver and Node the slices.
	Domain, Driver, Node string
	Ledger               *ledger.Ledger
	API                  API
	Kubelet              Kubelet
	Runtime              Runtime
	// Fault is what the taint of a fault does, empty for NoSchedule; NoExecute ends the
	// pods that have the device.
	Fault agentkube.TaintEffect
	// Granted is called for each new allocation, before what it needs is made.
	Granted func(*ledger.Allocation)
	// RefusedClaim is called once for each claim that can never be prepared; nil where nobody
	// wants to know.
	RefusedClaim func(*agentkube.Claim, status.Cause)
	// Listing is the kubelet's account of its pods.
	Listing func(context.Context) (node.Listing, error)
	// Tell sends an Event about a pod. Evict has a pod end; nil where none is to be
	// evicted.
	Tell  func(p workload.Pod, kind agentkube.EventType, reason, message string)
	Evict func(context.Context, workload.Pod) error
	// Wake has the agent's loop look, and publish.
	Wake func()
	Now  func() time.Time
	Log  *slog.Logger
}

// FrontEnd is the scheduler's and the kubelet's side of the ledger: what they are told
// there is, and the claims that have something of it. It is the kubelet's driver
// ([dra.Driver]). Use [New].
type FrontEnd struct {
	Options
	publisher *Publisher
	began     time.Time

	// mu guards everything below. The ledger's is locked after it.
	mu sync.Mutex
	// offer is what the loop said last, nil before that; published follows from it.
	offer     *Offer
	published *Published
	basis     basis // what published was built from
	// withdrew is the number of the last writing that keeps claims off something that they
	// could have before, and withdraws says that the next one does.
	withdrew  uint64
	withdraws bool
	// news is closed when published, listed or what GPUs' drivers refuse become others.
	news   chan struct{}
	faults faults
	// listed says that the API server has been asked once for the claims that there are:
	// before that nothing is published, since a device that one of them names must not
	// be missing.
	listed bool
	// leaves says that the process is about to end: nothing is for anybody new.
	leaves bool
	// leaving are the devices that no layout has and that a claim may still name, with the
	// number of the writing that taints them.
	leaving map[Device]uint64
	// claims are what claims have here, by UID.
	claims map[string]*held
	// anew are the claims that were allocated anew while they had something here, by UID,
	// until they have what they were given then.
	anew map[string]dra.Claim
	// census is the last list of claims that Settle has begun, nil where that was used.
	census *census
	// returned are the claims that the kubelet has given back, by UID. The API server has
	// them allocated for a while yet.
	returned map[string]returned
	// uses are the allocations that containers have, with the containers of each, but for
	// those that have ended since, and usesAt is when the runtime was asked for them.
	uses   map[string][]ledger.Holder
	usesAt time.Time
	// sweeper lists the claims where that is due.
	sweeper *sweeper
	// refusals are what can never be prepared.
	refusals *refusals
}

// faults is why GPUs are unhealthy, and why instances are on healthy GPUs.
type faults struct {
	gpus       map[gpu.UUID]string
	placements map[mig.Place]string
}

func (f *faults) of(d Device) string {
	if why := f.gpus[d.GPU]; why != "" || !d.Kind.InMIG() {
		return why
	}
	return f.placements[placeOf(d)]
}

// returned is a claim that was given back: what it had, the pods that it was for by UID, and
// when.
type returned struct {
	shares []share
	pods   map[string]bool
	at     time.Time
}

// New returns a front-end that publishes nothing yet.
func New(o Options) *FrontEnd {
	o.Fault = cmp.Or(o.Fault, agentkube.NoSchedule)
	f := &FrontEnd{Options: o, began: o.Now(), publisher: NewPublisher(o.Driver, o.API, o.Log), news: make(chan struct{}),
		leaving: map[Device]uint64{}, claims: map[string]*held{}, anew: map[string]dra.Claim{}, returned: map[string]returned{}}
	f.refusals, f.sweeper = newRefusals(f), &sweeper{f, make(chan struct{}, 1), make(chan struct{}, 1)}
	f.publisher.written, f.publisher.told = f.sweeper.lookAgain, o.Wake
	return f
}

// Publisher has the node's slices at the API server.
func (f *FrontEnd) Publisher() *Publisher { return f.publisher }

// Offer is what the agent's loop says of the node's GPUs.
type Offer struct {
	Inventory *gpu.Inventory
	Changes   *plan.Changes
	// Changing are the GPUs that are about to change.
	Changing []gpu.UUID
	Cards    map[gpu.UUID]*mig.Card
	// Failing are placements that cannot be made, with the reason.
	Failing map[mig.Place]status.Cause
	// Refused are those of Failing that the GPU's driver has refused so often that their
	// claims are to be made anew, elsewhere.
	Refused map[mig.Place]status.Cause
	// Fixed are the GPUs whose MIG instances stand as the partition says, whoever has them.
	Fixed map[gpu.UUID]bool
	// Drain says that a GPU whose change waits for holders takes nobody new meanwhile.
	Drain bool
	// Others are the GPUs that somebody else gives out too.
	Others map[gpu.UUID]string
	// Cordoned are the GPUs that an operator keeps new pods off.
	Cordoned map[gpu.UUID]bool
	// Kept, if set, says of which devices the device plugin has the resource's name yet:
	// while it has, pods that ask by name go there, or are refused by the kubelet.
	Kept func(Device) bool
	// Closed is why nothing may be given out at present, empty where it may.
	Closed string
	// Guarantee is how strong the cap on a share is: "driver", "api" or "watchdog".
	Guarantee string
}

// Publish makes an offer the one in force. A Prepare that comes later goes by it; the
// slices are written beside the caller.
func (f *FrontEnd) Publish(o Offer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.offer == nil {
		f.sweeper.poke() // the claims can be understood now
	} else if !maps.Equal(f.offer.Refused, o.Refused) {
		f.tellLocked()
	}
	f.offer = &o
	f.showLocked()
}

// tellLocked tells those who wait that there is news.
func (f *FrontEnd) tellLocked() {
	close(f.news)
	f.news = make(chan struct{})
}

// SetFaults says which GPUs are unhealthy, and which MIG placements on the others, each
// with the reason. Their devices are tainted from now on.
func (f *FrontEnd) SetFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = faults{gpus, placements}
	if f.offer != nil {
		f.showLocked()
	}
}

// showLocked publishes what follows from the offer, the faults and who has what.
func (f *FrontEnd) showLocked() {
	o := f.offer
	in := Input{Node: f.Node, Driver: f.Driver, Inventory: o.Inventory, Cards: o.Cards, Guarantee: o.Guarantee, Fixed: o.Fixed, Layouts: map[gpu.UUID]plan.Layout{}}
	for u, l := range o.Changes.Layouts {
		if l.Through(ledger.DRA) {
			in.Layouts[u] = l
		}
	}
	has := func(d Device) bool {
		l := in.Layouts[d.GPU]
		return l.Has(d.Kind) && (!d.Kind.InMIG() || slices.Contains(l.Placements, d.Placement))
	}
	keep := func(d Device) {
		if _, known := f.leaving[d]; !known && !has(d) {
			f.leaving[d] = 0
		}
	}
	if f.published != nil {
		for _, d := range f.published.Devices {
			keep(d)
		}
	}
	held := f.Ledger.Allocations()
	for i := range held {
		for j := range held[i].Grants {
			if g := &held[i].Grants[j]; held[i].Owner == ledger.DRA && !g.NoRoom {
				keep(deviceOf(g))
			}
		}
	}
	maps.DeleteFunc(f.leaving, func(d Device, _ uint64) bool { return has(d) })
	in.Departing = slices.SortedFunc(maps.Keys(f.leaving), compareDevices)
	w := withdrawals{Offer: o, domain: f.Domain, faults: &f.faults, fault: f.Fault, ending: f.refusals.endingLocked(), leaves: f.leaves, held: held, has: has}
	in.Taints = w.taints
	same := true
	if now := in.basis(); f.published == nil || !reflect.DeepEqual(now, f.basis) {
		was := f.published
		f.withdraws = f.withdraws || was == nil || f.basis.withdraws(&now)
		f.published, f.basis = Build(in), now
		same = was != nil && reflect.DeepEqual(was.Slices, f.published.Slices)
	}
	if !same {
		f.tellLocked()
	}
	if !f.listed {
		return
	}
	n := f.publisher.last()
	if !same || n == 0 {
		n = f.publisher.Set(f.published.Slices)
	}
	if f.withdraws {
		f.withdraws, f.withdrew = false, n
	}
	for d, at := range f.leaving {
		if at == 0 {
			f.leaving[d] = n
		}
	}
}

// Offers reports whether something of a GPU may be in the slices, tainted or not. Before the first
// Publish the slices are those of the process before this one, and of any GPU.
func (f *FrontEnd) Offers(u gpu.UUID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.published == nil {
		return true
	}
	for _, d := range f.published.Devices {
		if d.GPU == u {
			return true
		}
	}
	return false
}

// Health returns how the devices are, and a channel that is closed when that may be no
// longer so.
func (f *FrontEnd) Health() ([]dra.Health, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []dra.Health
	if f.published == nil {
		return nil, f.news
	}
	for name, d := range f.published.Devices {
		why := f.faults.of(d)
		out = append(out, dra.Health{Pool: name.Pool, Name: name.Name, Healthy: why == "", Message: why})
	}
	slices.SortFunc(out, func(a, b dra.Health) int { return compareNames(DeviceName{a.Pool, a.Name}, DeviceName{b.Pool, b.Name}) })
	return out, f.news
}
