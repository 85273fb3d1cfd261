// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
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
	// Labels says which labels of what its GPUs are the node gets: in the features file where
	// Worlds has one, else on the Node.
	Labels Labels
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

// Labels says which labels of what its GPUs are a node gets.
type Labels struct {
	// Own has the agent's own written (--node-labels other than none), and Guest those of GPU
	// Feature Discovery beside them, where nobody else has written them.
	Own, Guest bool
}

// Agent is what others have to do with: they tell it what is new, and ask it what there is. What
// it does is the loop's. Use [New].
type Agent struct {
	loop    *loop
	bell    *bell
	mail    *mailbox
	ledger  *ledger.Ledger
	front   *deviceplugin.FrontEnd
	claims  *claims
	others  neighbours
	display shows
}

// shows is how the agent looks from outside: the methods of Agent of the same names. display has
// them.
type shows interface {
	status() status.Status
	gpuNode(in gpunode.HoldersIn) *gpunode.Status
	foresee(q status.Question) (status.Answer, error)
	ready() error
	healthy() error
	offered() []gpu.Device
	open(u gpu.UUID) bool
}

// New returns an agent that has not looked at anything yet. Where there is a
// cluster, no partition is chosen before SetNode has been called. It makes the rooms and
// connects them.
func New(o Options, w Worlds) *Agent {
	ring := newBell()
	l := &loop{bell: ring, observer: w.Observer, ration: brief.NewRation(o.Log, time.Now, time.AfterFunc),
		mail:       &mailbox{domain: o.Domain, wake: ring.wake, input: input{labelKnown: w.Cluster == nil}},
		partitions: newPartitions(&o, &w), layouts: newLayouts(o.Log, w.Account.laidOut), slices: newTimeSlices(&o, &w),
		ledger: ledger.New(ring.wake, time.Now)}
	l.journal = &journal{store: w.Store, boot: o.Boot, log: o.Log, ration: l.ration}
	granted := func(c *ledger.Allocation) {
		// The kubelet waits for its answer, and has the allocation in its own checkpoint a
		// moment later. The round that comes writes it down.
		l.journal.note(c)
		ring.wakeSoon(l.ledger.Unopened)
	}
	l.offering = newOffering(&o, &w, l.ledger, granted, ring.wake)
	front, claims := l.offering.front, l.offering.claims
	l.witnesses = deviceplugin.NewWitnesses(deviceplugin.WitnessOptions{Domain: o.Domain, Pod: o.Pod, Log: o.Log},
		front, l.offering.names, w.Kubelet, w.Runtime, ring.wake)
	l.others = newCoexistence(&o, &w, l.witnesses, ring.wake)
	monitor := health.New(o.Health)
	l.reader = newReader(&o, &w, monitor, ring.wake)
	faults := newFaults(&o, &w, monitor, l.ration, l.offering.setFaults, ring.wake, l.reader.again)
	l.reader.told = faults
	l.executor = newExecutor(&o, &w, l.ledger, w.Account.cut, l.reader.wasReset, ring.wake)
	l.gates = newGatekeeper(&o, &w, l.ledger, front.Started, l.journal.append, ring.wake)

	// Those who tell others what rounds leave.
	news := make(chan struct{}, 1)
	reporter := newReporter(l.ledger, w.Plugins, claims, o.Log, func() { poke(news) })
	herald := newHerald(&o, &w, reporter.last, front.Offer, l.ledger.Allocations, ring.wake, news)
	l.mail.told, l.reporter = herald.setNode, reporter
	shown := &display{names: l.offering.names, domain: o.Domain, unit: o.MemoryUnit, drain: !o.KeepOffering,
		caps: claims.caps, front: front, ledger: l.ledger, plugins: w.Plugins,
		latest: reporter.last, choice: l.mail.choice, claimed: claims.inUse}
	object := newGPUNodeWriter(w.GPUNodes, func() *gpunode.Status {
		in := l.mail.latest()
		return shown.gpuNode(in.holdersIn(o.HoldersIn))
	}, shown.ready, o.Log)
	w.Account.begin(l.ledger, &w, reporter.last, ring.wake, o.Log)

	b := &beside{remarks: []func() []status.Condition{object.conditions, herald.conditions, w.Account.conditions},
		turns: []func(bool){object.turn, w.Account.round}}
	b.add(true, func(ctx context.Context) error { return abandon(ctx, faults.follow) },
		l.reader.links.follow, l.witnesses.Follow, l.witnesses.AwaitReleases, claims.run)
	b.add(w.Cluster != nil || w.Features != nil, herald.run)
	b.add(w.GPUNodes != nil, object.run)
	b.leaves = append(b.leaves, object.leave)
	if lower := w.Lowering; lower != nil {
		b.add(true, lower.Run)
		b.leaves = append(b.leaves, func(ctx context.Context) { lower.Leave(ctx, w.Plugins.Withhold) })
	}
	b.leaves = append(b.leaves, claims.leave)
	b.add(w.Account != nil, w.Account.run)
	l.beside = b
	return &Agent{loop: l, bell: ring, mail: l.mail, ledger: l.ledger, front: front, claims: claims, others: l.others,
		display: shown}
}

// SetFile hands in the partition file as it now is. A file that does not parse
// changes nothing but the outcome: the last good one stays in force.
func (a *Agent) SetFile(name string, data []byte) { a.mail.setFile(name, data) }

// SetFileMissing says that there is no partition file, and why. What was in
// force stays.
func (a *Agent) SetFileMissing(err error) { a.mail.setFileMissing(err) }

// SetNode says what the Node object says.
func (a *Agent) SetNode(n agentkube.Node) { a.mail.setNode(&n) }

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
	a.loop.remember()
	return a.loop.beside.run(asked, a.loop.run)
}

// Changed has a value when allocations, or the GPUs that are given out, may have changed
// since the last one was taken. It is for one taker.
func (a *Agent) Changed() <-chan struct{} { return a.bell.stirred }

// Claims reports whether GPUs are, or have been, offered through DRA.
func (a *Agent) Claims() bool { return a.claims.inUse() }

// Listed is how many devices the kubelet's lists name now.
func (a *Agent) Listed() (n int) {
	for _, r := range a.front.Offer().Resources {
		n += len(r.Devices)
	}
	return n
}

// LookAtCheckpoint is called when something in the kubelet's directory has changed.
func (a *Agent) LookAtCheckpoint() { a.others.lookAtCheckpoint() }
