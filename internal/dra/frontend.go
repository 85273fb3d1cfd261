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
	Fault resourcev1.DeviceTaintEffect
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
// there is, and the claims that have something of it. It ties the rooms of this package, and
// has nothing besides. Use [New].
type FrontEnd struct {
	SlicesOut
	ClaimsIn
	Book
	Promises
	Ends
	// Driver is the driver's name, and Wake has the agent's loop look.
	Driver string
	Wake   func()

	publisher *Publisher
	runs      []func(context.Context) error
}

// SlicesOut is what the loop says of the node's GPUs, and what the slices say of them then.
type SlicesOut interface {
	// Publish makes an offer the one in force. A Prepare that comes later goes by it; the
	// slices are written beside the caller.
	Publish(Offer)
	// SetFaults says which GPUs are unhealthy, and which MIG placements on the others, each
	// with the reason. Their devices are tainted from now on.
	SetFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string)
	// Offers reports whether something of a GPU may be in the slices, tainted or not. Before
	// the first Publish the slices are those of the process before this one, and of any GPU.
	Offers(gpu.UUID) bool
	// Health returns how the devices are, and a channel that is closed when that may be no
	// longer so.
	Health() ([]dra.Health, <-chan struct{})
}

// ClaimsIn is what is asked for claims. With Health it is the kubelet's driver ([dra.Driver]).
type ClaimsIn interface {
	// Prepare takes what a claim has been allocated, and returns it when containers may be
	// created with it. Everything that is coming is waited for: the claims that are known
	// after a start, a holder that is ending, an instance. It may be called any number of
	// times.
	Prepare(context.Context, dra.Claim) ([]dra.Device, error)
	// Unprepare gives a claim back. No container of it is to be running, and no pod that may
	// use it: where the runtime has one, the error says so, and the kubelet asks again.
	Unprepare(context.Context, dra.Claim) error
}

// Book is told of what claims have here.
type Book interface {
	// Found takes over an allocation that was made before this process started, from its
	// record. The error wraps gpu.ErrInvalid where the record is not of this ID.
	Found(id string, r ledger.Record, given time.Time) error
	// Observe says which containers have allocations, the first one in front, by the runtime,
	// which was asked at a moment.
	Observe(holders map[string][]ledger.Holder, asked time.Time)
}

// Promises is asked before something ends for claims that were allocated and that nobody has
// prepared yet.
type Promises interface {
	// Settle makes sure that whoever was promised what is withdrawn now is in the ledger: it
	// waits until the server has the slices as they were published, and takes what claims have
	// been allocated since. Where it fails, nothing that this front-end offers may be taken
	// away. Of the GPUs that it returns, somebody was promised something whose room the holder
	// before has still: they stay as they are, too.
	Settle(context.Context) (promised []gpu.UUID, err error)
	// Leave is for the end of the process, and is called while everything still runs. It has
	// all devices tainted, so that the scheduler sends nobody here while nobody prepares
	// claims, and waits for the pods that it has sent before that: until the kubelet's account
	// has what their claims were allocated. The next process takes the taints away.
	Leave(context.Context) error
}

// Ends is what becomes of claims that can never be prepared.
type Ends interface {
	// Refused are the claims that can never be prepared as they are, by namespace and name,
	// each with the reason.
	Refused() []status.Condition
}

// New returns a front-end that publishes nothing yet.
func New(o Options) *FrontEnd {
	o.Fault = cmp.Or(o.Fault, resourcev1.DeviceTaintEffectNoSchedule)
	look, account := make(token, 1), make(token, 1)
	p := NewPublisher(o.Driver, o.API, o.Log)
	s := newShelf(&o, p, look)
	p.written, p.told = s.written, o.Wake
	b := newBook(&o, s, look)
	r := newRefusals(&o, s, b)
	in := &intake{&o, b, s, r, look}
	w := &sweeper{&o, b, in, s, look, account}
	follow := func(ctx context.Context) error { return o.Kubelet.FollowDRAState(ctx, account.poke) }
	return &FrontEnd{SlicesOut: s, ClaimsIn: in, Book: b, Ends: r,
		Promises: &promises{o: &o, book: b, shelf: s, publisher: p},
		Driver:   o.Driver, Wake: o.Wake, publisher: p,
		runs: []func(context.Context) error{p.Run, w.follow, r.run, follow, w.followAccount}}
}

// Publisher has the node's slices at the API server.
func (f *FrontEnd) Publisher() *Publisher { return f.publisher }

// Run publishes, and ends what the kubelet has forgotten, until ctx ends.
func (f *FrontEnd) Run(ctx context.Context) error {
	all, ctx := errgroup.WithContext(ctx)
	for _, run := range f.runs {
		all.Go(func() error { return run(ctx) })
	}
	return all.Wait()
}

// token wakes one goroutine. It has room for one.
type token chan struct{}

func (t token) poke() {
	select {
	case t <- struct{}{}:
	default:
	}
}
