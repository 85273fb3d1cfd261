// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/plugin"
)

// How often the loop looks when nobody wakes it, and how long it waits for
// others.
const (
	// inventoryEvery is how long a reading of the driver is believed. Events,
	// probes of faulty GPUs and changes of the partition come before.
	// blindEvery is the same where the driver tells of no events.
	inventoryEvery = 5 * time.Minute
	blindEvery     = 15 * time.Second
	// lookPatience is how long a round waits for a reading, and driverPatience
	// how long a reading may take: look-ups take up to five seconds on a B200
	// with many instances. readPauseMax bounds the pause after one that failed.
	lookPatience   = time.Second
	driverPatience = 10 * time.Second
	readPauseMax   = 5 * time.Second
	// waitEvery is how often the runtime is asked while a container waits for the
	// one before it on its devices.
	// The runtime's events come first where it has some.
	waitEvery = time.Second
	// holdersEvery and silentFor are as the witnesses have them.
	holdersEvery = deviceplugin.LookEvery
	silentFor    = deviceplugin.SilentFor
	// othersEvery is how often the kubelet is asked what other device plugins
	// offer, and othersLinger how long after it was last seen theirs a GPU is not
	// offered, and how long a new checkpoint is believed without another witness.
	// othersSoon is the same as othersEvery after a new checkpoint: one
	// is written with every list of any plugin, and with every Allocate.
	// While there are others it is asked every othersPresent: nothing tells when
	// they have gone.
	othersEvery   = 2 * time.Minute
	othersPresent = 15 * time.Second
	othersLinger  = 30 * time.Second
	othersSoon    = 5 * time.Second
	// answerTime is what the kubelet gets of the processor after a grant, before
	// the allocation's file is written. Nobody waits for it: the sandbox is made
	// first, and then PreStartContainer wakes the loop at once.
	answerTime = 20 * time.Millisecond
	// leastSleep is a floor under the loop's sleep while nobody wakes it.
	leastSleep = 10 * time.Millisecond
	// backOffMin and backOffMax bound the pause after a failed round.
	backOffMin, backOffMax = time.Second, 30 * time.Second
)

// Options configure an Agent.
type Options struct {
	// Domain names labels, annotations and the CDI vendor.
	Domain string
	// ResourceDomain names the resources.
	ResourceDomain string
	// MemoryUnit is the size of one gpu-mem unit.
	MemoryUnit gpu.MiB
	// API is the front-end of GPUs whose partition does not name one (--api); empty is
	// the device plugin.
	API ledger.FrontEnd
	// KeepOffering leaves idle devices of a GPU whose change waits for holders
	// on offer (--when-busy wait).
	KeepOffering bool
	// IdleTTL is how long an instance on demand stays when nobody has it; zero is
	// until its room is wanted.
	IdleTTL time.Duration
	// ReclaimForeign lets idle instances go that the agent did not make.
	ReclaimForeign bool
	// Label has the node's labels of what its GPUs are written (--node-labels other
	// than none): to the features file where Worlds has one, else to the Node.
	// Guest has those of GPU Feature Discovery among them, where nobody else has
	// written them.
	Label, Guest bool
	// HoldersIn says where the holders of devices are told; empty has the kubelet's version
	// decide.
	HoldersIn gpunode.HoldersIn
	// LinksEvery is how often NVLinks are looked at: a lane that fails, or works again,
	// is no event. Zero is as often as all else.
	LinksEvery time.Duration
	// HoldScaleDown keeps Cluster Autoscaler from taking the node away while pods have
	// something of its GPUs (--hold-scale-down).
	HoldScaleDown bool
	// FaultTaint is what a fault's taint does to claims (--fault-taint), empty for
	// NoSchedule.
	FaultTaint agentkube.TaintEffect
	// Align says of which devices the kubelet is told the NUMA node (--numa-hints);
	// empty is deviceplugin.AlignNone.
	Align deviceplugin.Alignment
	// NeverReset leaves resets of GPUs to somebody else.
	NeverReset bool
	// OpenCaps lets allocations pass uncounted where the cap in the process
	// cannot do its work (--cap-policy open).
	OpenCaps bool
	// Node is the node's name, empty where there is no cluster.
	Node string
	// Pod is the agent's own. A listing that lacks it is not believed when it
	// comes to ending allocations. Empty outside a pod: then any listing that names
	// some pod is believed.
	Pod workload.Pod
	// Boot names this run of the machine; what is remembered of another run is
	// not believed. Where it is empty, nothing is but faults.
	Boot   string
	Health health.Options
	Log    *slog.Logger
}

// Agent is the loop, and joins what it remembers from one round to the next. Use [New].
type Agent struct {
	opts       Options
	names      *deviceplugin.Names
	observer   Observer
	ledger     *ledger.Ledger
	mail       *mailbox
	partitions *partitions
	front      *deviceplugin.FrontEnd
	claims     *claims
	witnesses  *deviceplugin.Witnesses
	reader     *reader
	faults     *faults
	others     *coexistence
	slices     *timeSlices
	object     *gpuNodeWriter
	served     *served
	layouts    *layouts
	executor   *executor
	journal    *journal
	gates      *gatekeeper
	reporter   *reporter
	herald     *herald
	display    *display
	account    *Account // nil where none is kept
	log        *slog.Logger
	// ration is the log for what a program on a GPU, or a server that is away, can
	// repeat as often as it likes.
	ration *brief.Ration

	// trigger holds at most one token: somebody wants a round.
	trigger chan struct{}
	// stirred has one too: the watchdog has something new to look at.
	stirred chan struct{}
	// soon says that wakeSoon has a round coming.
	soon atomic.Bool
}

// New returns an agent that has not looked at anything yet. Where there is a
// cluster, no partition is chosen before SetNode has been called.
func New(o Options, w Worlds) *Agent {
	a := &Agent{
		opts:     o,
		names:    deviceplugin.ResourceNames(o.ResourceDomain),
		observer: w.Observer,
		account:  w.Account,
		log:      o.Log,
		trigger:  make(chan struct{}, 1),
		stirred:  make(chan struct{}, 1),
		layouts:  &layouts{now: map[gpu.UUID]plan.Layout{}, past: map[gpu.UUID][]plan.Past{}, log: o.Log, told: w.Account.laidOut},
	}
	a.ration = brief.NewRation(a.log, time.Now, time.AfterFunc)
	a.mail = &mailbox{domain: o.Domain, wake: a.wake, input: input{labelKnown: w.Cluster == nil}}
	a.partitions = &partitions{on: config.Node{Unit: o.MemoryUnit, API: o.API}}
	if w.DRA == nil {
		a.partitions.on.NoDRA = "the agent runs without an API server (--node-name)"
	}
	a.ledger = ledger.New(a.wake, time.Now)
	a.front = deviceplugin.New(a.ledger, time.Now)
	a.witnesses = deviceplugin.NewWitnesses(deviceplugin.WitnessOptions{Domain: o.Domain, Pod: o.Pod, Log: o.Log}, a.front, a.names, w.Kubelet, w.Runtime, a.wake)
	a.claims = newClaims(&o, &w, a.ledger, a)
	monitor := health.New(o.Health)
	a.reader = newReader(&o, &w, monitor, a.wake)
	a.faults = newFaults(&o, &w, monitor, a.ration, func(gpus map[gpu.UUID]string, placements map[mig.Place]string) {
		a.front.SetFaults(gpus, placements)
		a.claims.setFaults(gpus, placements)
	}, a.wake, a.reader.again)
	a.reader.told = a.faults
	a.others = newCoexistence(&o, &w, a.witnesses, a.wake)
	a.slices = newTimeSlices(&o, &w)
	a.served = &served{plugins: w.Plugins, lowering: w.Lowering, of: map[string]plugin.Source{}, source: func(resource string) plugin.Source {
		return &deviceplugin.Source{Front: a.front, Domain: o.Domain, Resource: resource, Granted: a.granted, Refused: a.account.refused}
	}}
	a.executor = newExecutor(&o, &w, a.ledger, a.account.cut, a.reader.wasReset, a.wake)
	a.journal = &journal{store: w.Store, ration: a.ration}
	a.gates = newGatekeeper(&o, &w, a.ledger, a.front.Started, a.journal.append, a.wake)
	a.reporter = newReporter(a.ledger, w.Plugins, a.claims, o.Log, func() { poke(a.herald.news) })
	a.herald = newHerald(&o, &w, a.reporter.last, a.front.Offer, a.ledger.Allocations, a.wake)
	a.display = &display{names: a.names, domain: o.Domain, unit: o.MemoryUnit, drain: !o.KeepOffering,
		caps: a.claims.caps, front: a.front, ledger: a.ledger, plugins: w.Plugins,
		latest: a.reporter.last, choice: a.mail.choice, claimed: a.claims.inUse}
	a.object = newGPUNodeWriter(w.GPUNodes, func() *gpunode.Status {
		in := a.mail.latest()
		return a.display.gpuNode(in.holdersIn(o.HoldersIn))
	}, a.display.ready, o.Log)
	a.account.begin(a, &w)
	return a
}

// wake asks for a round.
func (a *Agent) wake() {
	poke(a.trigger)
	poke(a.stirred)
}

// poke leaves a token in a channel that has room for one.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// wakeSoon asks for a round after answerTime, for all who ask meanwhile, unless
// PreStartContainer has had one by then.
func (a *Agent) wakeSoon() {
	if a.soon.CompareAndSwap(false, true) {
		time.AfterFunc(answerTime, func() {
			a.soon.Store(false)
			if a.ledger.Unopened() {
				a.wake()
			}
		})
	}
}

// SetFile hands in the partition file as it now is. A file that does not parse
// changes nothing but the outcome: the last good one stays in force.
func (a *Agent) SetFile(name string, data []byte) { a.mail.setFile(name, data) }

// SetFileMissing says that there is no partition file, and why. What was in
// force stays.
func (a *Agent) SetFileMissing(err error) { a.mail.setFileMissing(err) }

// SetNode says what the Node object says.
func (a *Agent) SetNode(n agentkube.Node) {
	a.mail.setNode(&n)
	a.herald.setNode(&n)
}

// SetRefused says that the API server refuses a request without which partitions or
// the node cannot be followed, or with nil that it permits it again. What was in force
// stays.
func (a *Agent) SetRefused(request string, err error) { a.mail.setRefused(request, err) }

// Status is what people and metrics are shown.
func (a *Agent) Status() status.Status { return a.display.status() }

// GPUNode is what the GPUNode object is to say, but for when its conditions changed.
func (a *Agent) GPUNode(in gpunode.HoldersIn) *gpunode.Status { return a.display.gpuNode(in) }

// Foresee answers what partitions would make of the node, by the plans that the loop would
// make. It touches no hardware and asks nobody: what the loop knew after its last round
// counts, and who has what now. The error says why it cannot tell yet.
func (a *Agent) Foresee(q status.Question) (status.Answer, error) { return a.display.foresee(q) }

// Ready returns nil once this process has read the driver, with the files of it
// that containers need, and has heard of the partitions; else it says what is
// missing. What a predecessor knew does not count, or a rolling update would walk
// past nodes on which the new version does not work. A first partition that is
// invalid is not enough where nothing is on offer.
//
// Once ready, the agent stays so: a driver that is lost later, and a bad edit, are
// in the outcome and in the health of the GPUs, and no reason to hold up or to take
// back the update of an agent that works.
func (a *Agent) Ready() error { return a.display.ready() }

// Healthy returns nil while rounds come to an end.
func (a *Agent) Healthy() error { return a.display.healthy() }

// Offered returns the GPUs that the agent gives out, in index order: who uses one
// of them without an allocation is an intruder.
func (a *Agent) Offered() []gpu.Device { return a.display.offered() }

// Open reports whether somebody else, too, gives a GPU out: who uses it without a
// allocation of ours may have one of theirs.
func (a *Agent) Open(u gpu.UUID) bool { return a.display.open(u) }

// Allocations returns the allocations as they are now, in key order.
func (a *Agent) Allocations() []ledger.Allocation { return a.ledger.Allocations() }

// Run is the loop. It returns the error of ctx when that ends, and one that wraps
// gpu.ErrReloaded where only a new process can go on.
func (a *Agent) Run(asked context.Context) error {
	a.remember()
	ctx, end := context.WithCancel(context.WithoutCancel(asked))
	defer end()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		select {
		case <-asked.Done():
			// While everything still runs.
			a.object.leave(ctx)
			if a.served.lowering != nil {
				a.served.lowering.Leave(ctx, a.served.plugins.Withhold)
			}
			a.claims.leave(ctx)
			end()
			return asked.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	g.Go(func() error { return abandon(ctx, a.faults.follow) })
	g.Go(func() error { return a.reader.links.follow(ctx) })
	g.Go(func() error { return a.witnesses.Follow(ctx) })
	g.Go(func() error { return a.witnesses.AwaitReleases(ctx) })
	g.Go(func() error { return a.claims.run(ctx) })
	if h := a.herald; h.cluster != nil || h.features != nil {
		g.Go(func() error { return h.run(ctx) })
	}
	if a.object.api != nil {
		g.Go(func() error { return a.object.run(ctx) })
	}
	if a.served.lowering != nil {
		g.Go(func() error { return a.served.lowering.Run(ctx) })
	}
	if a.account != nil {
		g.Go(func() error { return a.account.meter.Run(ctx) })
	}
	g.Go(func() error { return a.loop(ctx) })
	return g.Wait()
}

// abandon does something that is not waited for at the end: a wait inside the driver
// cannot be cut short, and the process may end without it.
func abandon(ctx context.Context, do func(context.Context) error) error {
	ended := make(chan error, 1)
	go func() { ended <- do(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// loop has one round after the other, as long as the driver can be used.
func (a *Agent) loop(ctx context.Context) error {
	pause := backOff(backOffMax)
	for {
		began := time.Now()
		err := a.round(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, gpu.ErrReloaded) {
			return err
		}
		a.observer.Round(err, time.Since(began))
		wait := a.nextLook(time.Now())
		if err != nil {
			most := pause.Step()
			a.ration.Log(slog.LevelError, "round failed", nil, "err", err, "again_in", most.String())
			// Not at once: what failed may be what makes wait short.
			wait = min(max(wait, backOffMin), most)
		} else {
			pause = backOff(backOffMax)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.trigger:
		case <-time.After(wait):
		}
	}
}

// nextLook says how long the loop may sleep if nobody wakes it.
func (a *Agent) nextLook(now time.Time) time.Duration {
	wait := inventoryEvery
	if a.reader.reading == nil && a.reader.letGo == "" {
		wait = a.reader.nextReading(now).Sub(now)
	}
	in := a.mail.latest()
	for _, r := range in.refused {
		if left := silentFor - now.Sub(r.since); left > 0 {
			wait = min(wait, left)
		}
	}
	if slices.ContainsFunc(a.served.plugins.Status(), func(s plugin.Status) bool { return !s.Registered && !s.Since.IsZero() }) {
		wait = min(wait, holdersEvery) // it is news when it has been so for a while
	}
	if _, _, yes := a.claims.unregistered(); yes {
		wait = min(wait, holdersEvery)
	}
	if a.reader.inv == nil {
		// A round ends behind the driver then: what is due later on would stay due.
		return max(wait, leastSleep)
	}
	if !a.others.due.IsZero() {
		wait = min(wait, a.others.due.Sub(now))
	}
	if at, ok := a.witnesses.Next(a.reporter.last().blocked, now); ok {
		wait = min(wait, at)
	}
	if a.someoneWaits() {
		wait = min(wait, waitEvery)
	}
	if at, ok := a.executor.nextWork(now); ok {
		wait = min(wait, at)
	}
	for _, past := range a.layouts.past {
		for _, p := range past {
			wait = min(wait, p.Until.Sub(now))
		}
	}
	return max(wait, leastSleep)
}

// someoneWaits reports whether an allocation waits for the holder before it.
func (a *Agent) someoneWaits() bool {
	return slices.ContainsFunc(a.ledger.Allocations(), func(c ledger.Allocation) bool { return c.Phase == ledger.Waiting })
}

// Listed is how many devices the kubelet's lists name now.
func (a *Agent) Listed() (n int) {
	for _, r := range a.front.Offer().Resources {
		n += len(r.Devices)
	}
	return n
}

// LookAtCheckpoint is called when something in the kubelet's directory has changed.
func (a *Agent) LookAtCheckpoint() { a.others.lookAtCheckpoint() }

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
