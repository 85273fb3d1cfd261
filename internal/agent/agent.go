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

// Periods and timeouts of the loop.
const (
	// inventoryEvery is the age at which a reading of the driver is renewed. GPU events and probes
	// of faulty GPUs cause a reading earlier. blindEvery replaces it while the driver sends no
	// events.
	inventoryEvery = 5 * time.Minute
	blindEvery     = 15 * time.Second
	// lookPatience is how long a round waits for a reading. driverPatience bounds a reading, and
	// other calls of the driver: a look-up takes up to five seconds on a B200 with many instances.
	// readPauseMax bounds the pause after a failed reading.
	lookPatience   = time.Second
	driverPatience = 10 * time.Second
	readPauseMax   = 5 * time.Second
	// waitEvery is the longest sleep while a container waits for the previous holder of its devices
	// to end. Events of the runtime, if it sends any, wake the loop earlier.
	waitEvery = time.Second
	// holdersEvery is how often the loop asks the kubelet and the runtime (the witnesses) who holds
	// what. silentFor is how long one of them may be away before the agent reports it.
	holdersEvery = deviceplugin.LookEvery
	silentFor    = deviceplugin.SilentFor
	// othersEvery is how often the loop asks the kubelet what other device plugins offer.
	// othersPresent replaces it while there are others, since no event tells when they have gone.
	// othersLinger is how long a GPU stays withheld after it was last seen to be another owner's.
	// It is also how long a new entry of the kubelet's checkpoint counts without another witness.
	// othersSoon is the delay between a new checkpoint and the question to the kubelet. It gathers
	// changes: the kubelet writes a checkpoint for every list of any plugin, and for every
	// Allocate.
	othersEvery   = 2 * time.Minute
	othersPresent = 15 * time.Second
	othersLinger  = 30 * time.Second
	othersSoon    = 5 * time.Second
	// answerTime is the pause after a grant before a round writes the allocation's file. It leaves
	// the processor to the kubelet. No container waits for that file yet: the runtime makes the
	// sandbox first, and then PreStartContainer wakes the loop at once.
	answerTime = 20 * time.Millisecond
	// leastSleep is the shortest sleep between rounds, unless something wakes the loop.
	leastSleep = 10 * time.Millisecond
	// backOffMin and backOffMax bound the pause after a failed round.
	backOffMin, backOffMax = time.Second, 30 * time.Second
)

// Options configure an Agent.
type Options struct {
	// Domain is the prefix of labels and annotations, and names the CDI vendor.
	Domain string
	// ResourceDomain is the prefix of resource names.
	ResourceDomain string
	// MemoryUnit is the size of one gpu-mem unit.
	MemoryUnit gpu.MiB
	// API is the front-end of GPUs whose partition does not name one (--api). Empty means the
	// device plugin.
	API ledger.FrontEnd
	// KeepOffering is true if a GPU whose change waits for holders keeps its idle devices on offer
	// (--when-busy wait).
	KeepOffering bool
	// IdleTTL is how long an idle instance on demand stays. Zero keeps it until something else
	// needs its room.
	IdleTTL time.Duration
	// ReclaimForeign is true if the agent may destroy idle instances that it did not make.
	ReclaimForeign bool
	// Labels says which labels describe the node's GPUs. The agent writes them to Worlds.Features
	// if that is set, otherwise to the Node.
	Labels Labels
	// HoldersIn says where the holders of devices are published. If it is empty, the kubelet's
	// version decides.
	HoldersIn gpunode.HoldersIn
	// LinksEvery is how often the agent asks for the state of NVLinks, since the driver sends no
	// event when a lane fails or recovers. Zero means inventoryEvery.
	LinksEvery time.Duration
	// HoldScaleDown is true if the agent keeps Cluster Autoscaler from removing the node while pods
	// hold GPU devices (--hold-scale-down).
	HoldScaleDown bool
	// FaultTaint is the effect that a fault's taint has on claims (--fault-taint). Empty means
	// NoSchedule.
	FaultTaint agentkube.TaintEffect
	// Align selects the devices whose NUMA node the agent tells the kubelet (--numa-hints). Empty
	// means deviceplugin.AlignNone.
	Align deviceplugin.Alignment
	// MPS is true if a supervisor keeps MPS daemons for this agent. Without one, a partition with compute
	// mps is refused.
	MPS bool
	// NeverReset is true if the agent must not reset GPUs.
	NeverReset bool
	// OpenCaps is true if containers may run without a memory cap where the in-process cap cannot
	// work (--cap-policy open).
	OpenCaps bool
	// YieldGrace is how long a spot allocation may keep its room after a guaranteed one was given it
	// (--yield-grace). Zero ends its container at once.
	YieldGrace time.Duration
	// StateDir is the agent's state directory, as it is on the host.
	StateDir string
	// Node is the node's name, empty if there is no cluster.
	Node string
	// Pod is the agent's own pod, empty outside a pod. The agent ends no allocation because of a
	// kubelet listing that lacks this pod. If it is empty, any listing that names a pod is trusted.
	Pod workload.Pod
	// Boot identifies this boot of the machine. State that was saved in another boot is ignored. If
	// Boot is empty, all saved state but faults is ignored.
	Boot   string
	Health health.Options
	Log    *slog.Logger
}

// Labels says which labels describe a node's GPUs.
type Labels struct {
	// Own is true if the agent writes its own labels (--node-labels other than none). Guest is true
	// if it also writes those of GPU Feature Discovery, unless another program has written them.
	Own, Guest bool
}

// Agent is the interface to the loop: its methods pass news to the loop, and return what rounds
// found. Use [New].
type Agent struct {
	loop    *loop
	waker   *waker
	mail    *mailbox
	ledger  *ledger.Ledger
	front   *deviceplugin.FrontEnd
	claims  *claims
	mps     *mpsDaemons
	others  neighbours
	display shows
}

// shows has the state of the agent for callers from outside, behind the methods of Agent of the
// same names. display implements it.
type shows interface {
	status() status.Status
	gpuNode(in gpunode.HoldersIn) *gpunode.Status
	foresee(q status.Question) (status.Answer, error)
	ready() error
	healthy() error
	offered() []gpu.Device
	open(u gpu.UUID) bool
}

// New makes and connects the components of an agent that has not read anything yet. If there is a
// cluster, the agent chooses no partition before the first SetNode.
func New(o Options, w Worlds) *Agent {
	waker := newWaker()
	l := &loop{waker: waker, observer: w.Observer, ration: brief.NewRation(o.Log, time.Now, time.AfterFunc),
		mail:       &mailbox{domain: o.Domain, wake: waker.wake, input: input{labelKnown: w.Cluster == nil}},
		partitions: newPartitions(&o, &w), layouts: newLayouts(o.Log, w.Account.laidOut), slices: newTimeSlices(&o, &w),
		finder: newFinder(&o, &w), mps: newMPSDaemons(&o, &w, waker.wake),
		ledger: ledger.New(waker.wake, time.Now)}
	l.journal = &journal{store: w.Store, boot: o.Boot, log: o.Log, ration: l.ration}
	granted := func(c *ledger.Allocation) {
		// The kubelet waits for its answer, and saves the allocation in its own checkpoint a moment
		// later. The next round writes it to the journal.
		l.journal.note(c)
		waker.wakeSoon(l.ledger.Unopened)
	}
	l.offering = newOffering(&o, &w, l.ledger, granted, waker.wake)
	front, claims := l.offering.front, l.offering.claims
	l.witnesses = deviceplugin.NewWitnesses(deviceplugin.WitnessOptions{Domain: o.Domain, Pod: o.Pod, Log: o.Log},
		front, l.offering.names, w.Kubelet, w.Runtime, waker.wake)
	if w.Lending != nil {
		l.lender = NewLender(*w.Lending, o.Domain, l.ledger, front, waker.wake, o.Log)
	}
	l.others = newCoexistence(&o, &w, l.witnesses, waker.wake)
	monitor := health.New(o.Health)
	l.reader = newReader(&o, &w, monitor, waker.wake)
	faults := newFaults(&o, &w, monitor, l.ration, l.offering.setFaults, waker.wake, l.reader.again)
	l.reader.faults, faults.ofMPS = faults, l.mps.fault
	l.executor = newExecutor(&o, &w, l.ledger, w.Account.recordStep, l.reader.wasReset, waker.wake)
	l.gates = newGatekeeper(&o, &w, l.ledger, front.Started, l.journal.append, waker.wake)

	// These report what rounds leave.
	news := make(chan struct{}, 1)
	reporter := newReporter(l.ledger, w.Plugins, claims, o.Log, func() { poke(news) })
	announcer := newAnnouncer(&o, &w, reporter.last, front.Offer, l.ledger.Allocations, waker.wake, news)
	l.mail.told, l.reporter = announcer.setNode, reporter
	shown := &display{names: l.offering.names, domain: o.Domain, unit: o.MemoryUnit, drain: !o.KeepOffering, grace: o.YieldGrace,
		caps: claims.caps, front: front, ledger: l.ledger, plugins: w.Plugins,
		latest: reporter.last, choice: l.mail.choice, claimed: claims.inUse, daemons: l.mps.latest,
		containers: w.containers, lends: l.lender.words}
	object := newGPUNodeWriter(w.GPUNodes, func() *gpunode.Status {
		in := l.mail.latest()
		return shown.gpuNode(in.holdersIn(o.HoldersIn))
	}, shown.ready, o.Log)
	w.Account.begin(l.ledger, &w, reporter.last, waker.wake, o.Log)

	l.yields = newYielder(&o, &w, l.ledger, front, l.witnesses, l.ration)
	parks := newParker(&w, l.ledger, l.witnesses.Ask, o.Log, l.ration)
	l.yields.parker = parks
	bg := &background{
		remarks:    []func() []status.Condition{object.conditions, announcer.conditions, w.Account.conditions},
		afterRound: []func(bool){object.turn, w.Account.round, l.yields.turn, l.lender.Heard, parks.turn},
	}
	bg.add(true, func(ctx context.Context) error { return abandon(ctx, faults.follow) },
		l.reader.links.follow, l.witnesses.Follow, l.witnesses.AwaitReleases, claims.run)
	bg.add(true, l.yields.run)
	bg.add(parks != nil, parks.run)
	bg.add(w.Evict != nil, l.yields.evictAll)
	bg.add(w.MPS != nil, l.mps.follow)
	bg.add(w.Cluster != nil || w.Features != nil, announcer.run)
	bg.add(w.GPUNodes != nil, object.run)
	bg.atEnd = append(bg.atEnd, object.leave)
	if lower := w.Lowering; lower != nil {
		bg.add(true, lower.Run)
		bg.atEnd = append(bg.atEnd, func(ctx context.Context) { lower.Leave(ctx, w.Plugins.Withhold) })
	}
	bg.atEnd = append(bg.atEnd, claims.leave)
	bg.add(w.Account != nil, w.Account.run)
	bg.add(w.Lending != nil, l.lender.Run)
	l.background = bg
	return &Agent{loop: l, mps: l.mps, waker: waker, mail: l.mail, ledger: l.ledger, front: front, claims: claims, others: l.others,
		display: shown}
}

// SetFile passes on the partition file as it is now. If it does not parse, the last good one stays
// in force, and the outcome reports the error.
func (a *Agent) SetFile(name string, data []byte) { a.mail.setFile(name, data) }

// SetFileMissing reports that the partition file cannot be read, and why. The partition in force
// stays.
func (a *Agent) SetFileMissing(err error) { a.mail.setFileMissing(err) }

// SetNode passes on the Node object.
func (a *Agent) SetNode(n agentkube.Node) { a.mail.setNode(&n) }

// SetRefused reports that the API server refuses a request which the agent needs to follow
// partitions or the node. A nil err reports that the server permits it again. The partition in
// force stays.
func (a *Agent) SetRefused(request string, err error) { a.mail.setRefused(request, err) }

// Status returns what people and metrics are shown.
func (a *Agent) Status() status.Status { return a.display.status() }

// GPUNode returns the desired status of the GPUNode object, without the times of its conditions.
func (a *Agent) GPUNode(in gpunode.HoldersIn) *gpunode.Status { return a.display.gpuNode(in) }

// Foresee answers what partitions would change on the node. It makes one plan after the other, as
// the loop would, from the state after the last round and the present allocations, until nothing is
// left to do. It runs beside the loop, touches no hardware and sends no request. It fails before
// the driver has been read, and for too many partitions.
func (a *Agent) Foresee(q status.Question) (status.Answer, error) { return a.display.foresee(q) }

// Ready returns nil once three things are true: this process has read the driver, it knows the
// driver files that containers need, and it knows the partitions. Otherwise the error names what is
// missing. What an earlier process knew does not count, or a rolling update would pass over nodes
// on which the new version does not work. If the first partition is invalid, the agent is ready
// only if something is on offer.
//
// Once ready, the agent stays ready. A driver that is lost later, or a bad edit of the partitions,
// shows in the outcome and in the health of the GPUs. It is no reason to stop or revert an update.
func (a *Agent) Ready() error { return a.display.ready() }

// Healthy returns an error if the loop has not finished a round for a long time (see stuckAfter).
func (a *Agent) Healthy() error { return a.display.healthy() }

// Offered returns the GPUs that the agent gives out, in index order. A process that uses one of
// them without an allocation is an intruder.
func (a *Agent) Offered() []gpu.Device { return a.display.offered() }

// Open reports whether another owner gives the GPU out, too. A process that uses it without an
// allocation of this agent may have one from that owner.
func (a *Agent) Open(u gpu.UUID) bool { return a.display.open(u) }

// Lends reports whether idle holders of the GPU lend their room to spot pods.
func (a *Agent) Lends(u gpu.UUID) bool { return lendAfter(a.front.Offer(), u) > 0 }

// Allocations returns the present allocations, in key order.
func (a *Agent) Allocations() []ledger.Allocation { return a.ledger.Allocations() }

// Run runs the loop until ctx ends and returns the error of ctx. It returns an error that wraps
// gpu.ErrReloaded if only a new process can go on.
func (a *Agent) Run(asked context.Context) error {
	a.loop.remember()
	return a.loop.background.run(asked, a.loop.run)
}

// Changed returns a channel that has a value if allocations or the offered GPUs may have changed
// since the last receive. It serves one receiver.
func (a *Agent) Changed() <-chan struct{} { return a.waker.stirred }

// Claims reports whether the agent offers GPUs through DRA, or has done so.
func (a *Agent) Claims() bool { return a.claims.inUse() }

// Listed returns the number of devices that the kubelet's lists name now.
func (a *Agent) Listed() (n int) {
	for _, r := range a.front.Offer().Resources {
		n += len(r.Devices)
	}
	return n
}

// LookAtCheckpoint tells the agent that something in the kubelet's directory has changed.
func (a *Agent) LookAtCheckpoint() { a.others.lookAtCheckpoint() }
