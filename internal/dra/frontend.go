// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	resourcev1 "k8s.io/api/resource/v1"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// API is what the front-end needs of the API server; *agentkube.Client implements it.
type API interface {
	Slices
	// Claim reads a claim, with what it has of a driver. The error wraps gpu.ErrNotFound if there
	// is no such claim.
	Claim(ctx context.Context, driver, namespace, name string) (*agentkube.Claim, error)
	// Claims lists the claims that have something of a driver on this node.
	Claims(ctx context.Context, driver string) ([]agentkube.Claim, error)
	// SetClaimDevices writes into a claim's status what its devices are.
	SetClaimDevices(ctx context.Context, driver string, c *agentkube.Claim, devices []agentkube.ClaimDevice) error
}

// Kubelet is what the front-end reads of the kubelet; KubeletDir implements it.
type Kubelet interface {
	// DRAState returns what the kubelet has prepared. The error wraps gpu.ErrNotFound if the
	// kubelet has never prepared a claim.
	DRAState() (node.DRAState, error)
	// FollowDRAState calls changed whenever the kubelet may have written that anew. It runs until
	// ctx ends, and returns its error.
	FollowDRAState(ctx context.Context, changed func()) error
}

// KubeletDir is the directory of a kubelet.
type KubeletDir string

// DRAState returns what the kubelet has prepared.
func (d KubeletDir) DRAState() (node.DRAState, error) { return node.ReadDRAState(string(d)) }

// FollowDRAState calls changed whenever the kubelet may have written its file anew.
func (d KubeletDir) FollowDRAState(ctx context.Context, changed func()) error {
	return node.FollowDRAState(ctx, string(d), changed)
}

// Runtime is what the front-end asks the container runtime; *node.Runtime implements it.
type Runtime interface {
	// Containers returns the containers that have been created and have not ended.
	Containers(context.Context) ([]node.Container, error)
	// Pods returns the pods that have a sandbox, by UID.
	Pods(context.Context) (map[string]workload.Pod, error)
}

// Options are what a FrontEnd is made of. All are required but Fault, RefusedClaim and Evict.
type Options struct {
	// Domain is in the names of CDI devices and taints. Driver and Node are those of the slices.
	Domain, Driver, Node string
	Ledger               *ledger.Ledger
	API                  API
	Kubelet              Kubelet
	Runtime              Runtime
	// Fault is the effect of an unhealthy device's taint; empty means NoSchedule. NoExecute ends
	// the pods that have the device.
	Fault resourcev1.DeviceTaintEffect
	// Granted is called for each new allocation, before the loop makes what it needs.
	Granted func(*ledger.Allocation)
	// RefusedClaim, if set, is called once for each claim that can never be prepared.
	RefusedClaim func(*agentkube.Claim, status.Cause)
	// Listing asks the kubelet for its pods.
	Listing func(context.Context) (node.Listing, error)
	// Tell sends an Event about a pod. Evict evicts a pod; nil if none may be evicted.
	Tell  func(p workload.Pod, kind agentkube.EventType, reason, message string)
	Evict func(context.Context, workload.Pod) error
	// Held returns how strongly the share of a GPU's SMs that an allocation has is held now. If it is nil,
	// nothing is known to hold any.
	Held func(allocation string, u gpu.UUID) compute.Held
	// Wake makes the agent's loop run, and publish.
	Wake func()
	Now  func() time.Time
	Log  *slog.Logger
}

// FrontEnd is the ledger's side for the scheduler and for the kubelet's DRA calls. It connects the
// parts of this package and has no state besides. Use [New].
type FrontEnd struct {
	SlicesOut
	ClaimsIn
	Book
	Reservations
	Ends
	// Driver is the driver's name. Wake makes the agent's loop run.
	Driver string
	Wake   func()

	publisher *Publisher
	runs      []func(context.Context) error
}

// SlicesOut is what the loop tells the front-end about the node's GPUs, and what the slices have.
type SlicesOut interface {
	// Publish puts an offer in force: later calls of Prepare take from it. It does not wait until
	// the slices are written.
	Publish(Offer)
	// SetFaults sets which GPUs are unhealthy, and which MIG placements on the other GPUs, each
	// with the reason. Their devices are tainted from then on.
	SetFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string)
	// Offers reports whether the slices may have a device of the GPU, tainted or not. It is true
	// before the first Publish, since the previous process's slices may have any GPU.
	Offers(gpu.UUID) bool
	// Health returns the health of all devices, and a channel that is closed when it may have
	// changed.
	Health() ([]dra.Health, <-chan struct{})
}

// ClaimsIn answers the kubelet. With Health it is the kubelet's driver ([dra.Driver]).
type ClaimsIn interface {
	// Prepare takes allocations for what a claim has been allocated, and returns the devices when
	// containers may be created with them. It waits for what is still to come: the list of claims
	// after a start, the end of a previous holder, a MIG instance. It may be called any number of
	// times for a claim.
	Prepare(context.Context, dra.Claim) ([]dra.Device, error)
	// Unprepare gives a claim back. It fails while the runtime has a container of the claim, or a
	// pod that may use it; the kubelet then calls again.
	Unprepare(context.Context, dra.Claim) error
}

// Book is told what claims have here.
type Book interface {
	// Found takes over an allocation of an earlier process from its record. given is the time at
	// which it was given; zero if that is not known. The error wraps gpu.ErrInvalid if the record
	// does not fit the ID.
	Found(id string, r ledger.Record, given time.Time) error
	// Observe sets which containers have which allocations, the oldest first. The runtime was asked
	// for them at the given time.
	Observe(holders map[string][]ledger.Holder, asked time.Time)
}

// Reservations accounts for claims that are allocated and not prepared yet, before the agent
// withdraws something or ends.
type Reservations interface {
	// Settle takes into the ledger the claims that the scheduler allocated before it saw what is
	// withdrawn now. It waits until the API server has the slices as they were published, and then
	// lists the claims. If it fails, nothing that this front-end offers may be taken away. It
	// returns the GPUs that a claim was allocated on while the previous holder still has the room;
	// these must stay as they are, too.
	Settle(context.Context) (held []gpu.UUID, err error)
	// Leave prepares for the end of the process, while everything still runs. It taints all
	// devices, so that the scheduler sends no further pods. Then it waits until the claims of the
	// pods that the scheduler has sent before are prepared, by the kubelet's account. The next
	// process removes the taints.
	Leave(context.Context) error
}

// Ends reports the claims that can never be prepared.
type Ends interface {
	// Refused returns the claims that can never be prepared as they are, by namespace and name,
	// each with the reason.
	Refused() []status.Condition
}

// New returns a front-end that publishes nothing yet.
func New(o Options) *FrontEnd {
	o.Fault = cmp.Or(o.Fault, resourcev1.DeviceTaintEffectNoSchedule)
	look, account := make(token, 1), make(token, 1)
	p := NewPublisher(o.Driver, o.API, o.Log)
	s := newShelf(&o, p, look)
	p.written, p.changed = s.written, o.Wake
	b := newBook(&o, s, look)
	r := newRefusals(&o, s, b)
	if o.Held == nil {
		o.Held = func(string, gpu.UUID) compute.Held { return compute.NoneFor("the agent does not look") }
	}
	in := &intake{&o, b, s, r, look, nil}
	in.again = &reteller{in: in, told: map[string]string{}}
	w := &sweeper{&o, b, in, s, look, account}
	follow := func(ctx context.Context) error { return o.Kubelet.FollowDRAState(ctx, account.poke) }
	return &FrontEnd{SlicesOut: s, ClaimsIn: in, Book: b, Ends: r,
		Reservations: &reservations{o: &o, book: b, shelf: s, publisher: p},
		Driver:       o.Driver, Wake: o.Wake, publisher: p,
		runs: []func(context.Context) error{p.Run, w.follow, r.run, follow, w.followAccount, in.again.run}}
}

// Publisher returns the publisher of the node's slices.
func (f *FrontEnd) Publisher() *Publisher { return f.publisher }

// Run writes the slices, follows the claims, and ends what the kubelet has forgotten, until ctx
// ends.
func (f *FrontEnd) Run(ctx context.Context) error {
	all, ctx := errgroup.WithContext(ctx)
	for _, run := range f.runs {
		all.Go(func() error { return run(ctx) })
	}
	return all.Wait()
}

// token wakes one goroutine. Its buffer has room for one wake-up, and further ones are dropped.
type token chan struct{}

func (t token) poke() {
	select {
	case t <- struct{}{}:
	default:
	}
}
