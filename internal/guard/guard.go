// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	// DefaultEvery is how often the guard looks at a GPU with caps. On average it sees a breach
	// after half of this, confirms it after as much again, and ends the container well within a
	// second.
	DefaultEvery = 250 * time.Millisecond
	// idleEvery is how often the guard looks at a GPU without a cap, and restEvery if the node has
	// no allocations. suspectEvery is how often it looks at one with intruders or unlisted
	// containers: the judge drops a doubt that no look confirms.
	idleEvery    = 10 * time.Second
	lendEvery    = 5 * time.Second // on a GPU whose holders lend; see Allocations.Lends
	restEvery    = 30 * time.Second
	suspectEvery = time.Second
	// driverTimeout bounds the driver's answer, runtimeTimeout the runtime's answer, endTimeout
	// the end of a container, and kubeTimeout an eviction.
	driverTimeout  = 2 * time.Second
	runtimeTimeout = 4 * time.Second
	endTimeout     = 10 * time.Second
	kubeTimeout    = 30 * time.Second
	// listEvery is how old the list of containers may be. After an answer the guard does not ask
	// for the next list within listSoon, even if a process is in a container that the list lacks.
	listEvery = 10 * time.Second
	listSoon  = 500 * time.Millisecond
	// pageEvery is how long the guard waits before it tries again to open counters.
	pageEvery = time.Second
	// listWait is how long a look waits for the runtime's answer. An answer that comes later is
	// taken by a later look.
	listWait = 250 * time.Millisecond
	// maxFailures is how often pageEvery is doubled at most for an allocation whose counters make no
	// sense again and again. That comes to some four minutes.
	maxFailures = 8
	// recheckAfter is how long the guard waits before it looks again at a container over its cap. The
	// library undoes an excess of a memory pool in less time.
	recheckAfter = 20 * time.Millisecond
	// checkEvery is how often the guard checks whether it may start.
	checkEvery = 10 * time.Second
)

// Reasons of Events.
const (
	overReason     = string(status.CapExceeded)
	intruderReason = string(status.Intruder)
	evictedReason  = string(status.CapEvicted)
	unlistedReason = string(status.ContainerNotListed)
)

// Options configure a Guard.
type Options struct {
	// Domain is the domain in the CDI names and annotations that name a container's allocations.
	Domain string
	// Every is how often the guard looks at GPUs with caps; zero means DefaultEvery.
	Every time.Duration
	// EndIntruders is true if containers that use a GPU without an allocation on it are ended.
	EndIntruders bool
	// EvictAfter is the number of offences within an hour after which a pod is evicted; zero means
	// never.
	EvictAfter int
	// Own is the agent's own pod, which may use any GPU.
	Own workload.Pod
	// Policy decides what counts as a breach; the zero value is the default.
	Policy memcap.Policy
	Log    *slog.Logger
}

// Worlds are the interfaces through which the guard reaches the driver, the node and the cluster.
type Worlds struct {
	Driver      Driver
	Allocations Allocations
	Proc        Proc
	Runtime     Runtime
	Pages       Pages
	// Cluster is nil if there is no API server.
	Cluster  Cluster
	Observer Observer
	// Limiter is nil if the driver is not to be asked for limits. Outcomes is nil if no hooks ask it.
	Limiter  Limiter
	Outcomes Outcomes
	// Shares is nil if no GPU is under MPS.
	Shares Shares
}

// Driver lists the processes on a GPU, and returns how much memory of GPUs is used.
type Driver interface {
	Processes(context.Context, gpu.UUID) ([]gpu.Process, error)
	// Memory leaves out the GPUs that it cannot read.
	Memory(context.Context, ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error)
}

// Utilizer is a Driver that can return how busy each process has kept a GPU's streaming
// multiprocessors since a time, in percent, by GPU and PID. It leaves out idle processes, and the
// GPUs whose driver does not report this.
type Utilizer interface {
	Utilization(context.Context, time.Time, ...gpu.UUID) (map[gpu.UUID]map[int]float64, error)
}

// Allocations are the GPUs that the node gives out, and their allocations. agent.Agent implements
// it.
type Allocations interface {
	// Offered returns the GPUs that are given out, in index order.
	Offered() []gpu.Device
	// Allocations returns all allocations; their grants have the amounts of memory.
	Allocations() []ledger.Allocation
	// Open reports whether another party than the agent also gives the GPU out. No container is an
	// intruder there.
	Open(gpu.UUID) bool
	// Lends reports whether holders of the GPU lend their room while they are idle, so that Presence must not be
	// older than a few seconds.
	Lends(gpu.UUID) bool
	// Changed has a value if any of this may have changed since the last value was taken.
	Changed() <-chan struct{}
}

// Proc finds the container of a process. node.Proc implements it.
type Proc interface {
	Container(pid int) (node.Owner, error)
	// Inside returns the number of a process's PID namespace, and its PID in there.
	Inside(pid int) (namespace, inner uint64, err error)
	// Check returns nil if the node's processes can be seen from here, and otherwise the reason.
	Check() error
}

// Runtime lists containers and ends them. node.Runtime implements it.
type Runtime interface {
	Containers(context.Context) ([]node.Container, error)
	End(context.Context, node.Owner) (how string, err error)
}

// Pages opens the counters of allocations. lib.Pages does the work.
type Pages interface {
	// Meter opens the counters of an allocation on a GPU. It returns gpu.ErrNotFound if nothing is
	// counted there.
	Meter(key string, u gpu.UUID) (Meter, error)
}

// Meter compares an allocation's own count with the driver's figure.
type Meter interface {
	// Begin is called before the driver is asked, and End with the driver's answer.
	Begin() error
	End(driver uint64, known bool, each map[lib.Process]uint64) (lib.Reading, error)
	// Asked reports whether a process waits for a reading.
	Asked() bool
	// Moved reports whether anything is new since a reading.
	Moved(since lib.Reading) (bool, error)
	// Cost returns the CPU time of the last reading, or of the current one so far. The container
	// decides how much that is.
	Cost() time.Duration
	// Counted fills in how many bytes each process counts for itself.
	Counted(map[lib.Process]uint64) error
	Close() error
}

// Cluster reports offences and evicts offenders. agentkube.Client implements it.
type Cluster interface {
	Event(regarding workload.Pod, kind agentkube.EventType, reason, message string)
	Evict(context.Context, workload.Pod) error
}

// Observer is told what happens. Its methods must not block.
type Observer interface {
	// Ended is called after a container was ended, Evicted after a pod was evicted.
	Ended(End)
	Evicted(pod workload.Pod, offences int)
}

// End describes a container that the watchdog has ended.
type End struct {
	Kind      memcap.Kind
	Pod       workload.Pod
	Container string
	GPU       gpu.UUID
	// Used is how much memory the offender had on the GPU, and Cap how much it could have, both in
	// bytes. If containers share the cap, both are of all of them together.
	Used, Cap uint64
	// After is the time since the breach was first seen.
	After time.Duration
}

// Guard is the watchdog. Use [New].
type Guard struct {
	every       time.Duration
	driver      Driver
	allocations Allocations
	proc        Proc
	log         *guardLog
	reaper      *reaper
	endings     *endings
	examiner    gpuExaminer
	state       atomic.Pointer[State]

	// The fields below belong to Run's goroutine.

	// answerFrom is the time before which no process's ask for a reading is answered.
	answerFrom time.Time
	// looked has the time at which each GPU was last due.
	looked map[gpu.UUID]time.Time
	// found has what the last look at each GPU found.
	found map[gpu.UUID]*finding
}

// gpuExaminer looks at GPUs, and passes on what must be done. [examiner] implements it.
type gpuExaminer interface {
	// look takes one look at a GPU. memory is what the driver answered before it. The finding is
	// nil if the driver does not answer. again is true if another look at once is worthwhile.
	look(ctx context.Context, d *gpu.Device, held allocations, memory map[gpu.UUID]gpu.Memory) (f *finding, again bool)
	// learn takes in the limits that hooks have set, and has them renewed. It reports whether any has
	// changed.
	learn(ctx context.Context, now time.Time) (news bool)
	// unmoved reports whether all counters on a GPU are as they were at its last look.
	unmoved(u gpu.UUID) bool
	// listen returns a channel that has a value when it is time to check for processes that wait
	// for a reading. asked returns the GPUs on which a process waits for one. Both return nil if
	// there is none.
	listen(now time.Time) <-chan time.Time
	asked(now time.Time) map[gpu.UUID]bool
	// describe adds what is known of an allocation's containers on a GPU, where they may have so
	// many bytes.
	describe(c *status.Container, u gpu.UUID, bytes uint64)
	// forget drops what is known of containers and allocations that have ended, and of GPUs that
	// are not given out.
	forget(offered func(gpu.UUID) bool)
	// counts returns how many intruders were found, and how many containers ended.
	counts() (found, kills uint64)
	// detaches returns how many clients of MPS were detached before their end, and how many were not.
	detaches() (done, not uint64)
	// daemon returns the MPS daemon of a GPU, as Daemon.print tells it; empty if the GPU has none.
	daemon(u gpu.UUID) string
}

// finding is what a look at a GPU has found.
type finding struct {
	Uninvited
	users    map[int]string // see State.users
	presence Presence
	baseline *baseline // nil if not all was in order
	daemon   string    // the MPS daemon, as Daemon.print tells it; empty if the GPU has none
}

// guardLog is the guard's log. It limits how much a container can make the guard write.
type guardLog struct {
	*slog.Logger
	ration *brief.Ration   // for messages that a container can cause at every look
	said   map[string]bool // keys of the messages that once has logged
}

// once logs a message the first time that it is called with a key. It is for Run's goroutine.
func (l *guardLog) once(key, message string, args ...any) {
	if !l.said[key] {
		if len(l.said) > 1000 {
			clear(l.said) // most of these containers are long gone
		}
		l.said[key] = true
		l.Warn(message, args...)
	}
}

// place is a container on a GPU.
type place struct {
	container string
	gpu       gpu.UUID
}

// New returns a guard that has not looked at anything yet.
func New(o Options, w Worlds) *Guard {
	if o.Every <= 0 {
		o.Every = DefaultEvery
	}
	v := &guardLog{Logger: o.Log, ration: brief.NewRation(o.Log, time.Now, time.AfterFunc), said: map[string]bool{}}
	by := &reaper{proc: w.Proc, runtime: w.Runtime, shares: w.Shares, log: v}
	leaving := &endings{reaper: by, of: map[string]*ending{}}
	offences := &offenceHandler{
		reaper: by, endings: leaving, driver: w.Driver, cluster: w.Cluster, observer: w.Observer,
		endIntruders: o.EndIntruders, evictAfter: o.EvictAfter,
		ending: map[string]bool{}, ended: map[string]bool{},
	}
	g := &Guard{
		every: o.Every, driver: w.Driver, allocations: w.Allocations, proc: w.Proc, log: v, reaper: by, endings: leaving,
		examiner: &examiner{
			driver: w.Driver, allocations: w.Allocations, proc: w.Proc,
			judge: memcap.NewJudge(o.Policy), log: v, handler: offences,
			limits: &limits{limiter: w.Limiter, outcomes: w.Outcomes, log: v, of: map[place]*limit{},
				unable: map[gpu.UUID]time.Time{}, noted: map[place]*note{}},
			roster:  roster{runtime: w.Runtime, own: o.Own, domain: o.Domain, missing: map[place]*unlistedContainer{}},
			tallies: tallies{pages: w.Pages, log: v, by: map[page]*tally{}},
			names:   names{proc: w.Proc},
			shares: shares{shares: w.Shares, held: map[page]compute.Held{}, strangers: map[gpu.UUID]map[life]*stranger{},
				silent: map[gpu.UUID]map[life]*stranger{}, stuck: map[gpu.UUID]time.Time{}},
			seen: map[place]int{},
		},
		looked: map[gpu.UUID]time.Time{}, found: map[gpu.UUID]*finding{},
	}
	g.state.Store(&State{Off: "it was not started (--watch-every 0)"})
	return g
}

// State returns what was last seen. While the guard does not run, the state has what containers may
// use, and not what they use.
func (g *Guard) State() *State {
	st := g.state.Load()
	if st.Off == "" {
		return st
	}
	return &State{
		Off:        st.Off,
		Containers: containers(g.allocations.Offered(), g.held(), func(*status.Container, gpu.UUID, uint64) {}),
	}
}

// Run looks at the GPUs until ctx ends, and returns ctx's error.
func (g *Guard) Run(ctx context.Context) error {
	defer g.forget(func(gpu.UUID) bool { return false })
	if err := g.start(ctx); err != nil {
		return err
	}
	ticker := time.NewTicker(g.every)
	defer ticker.Stop()
	for {
		if idle := g.round(ctx, time.Now()); idle > g.every {
			// No container has a cap, as on a node that gives out whole GPUs: sleep.
			timer := time.NewTimer(idle)
			select {
			case <-ctx.Done():
			case <-timer.C:
			case <-g.allocations.Changed():
			}
			timer.Stop()
		}
		for due := false; !due; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-ticker.C:
				due = true
			case <-g.examiner.listen(time.Now()):
				g.answer(ctx)
			}
		}
	}
}

// start waits until the guard can see the node's processes. It returns an error only if ctx ends.
func (g *Guard) start(ctx context.Context) error {
	for {
		err := g.proc.Check()
		if err == nil {
			g.log.Info("watchdog runs", "every", g.every.String())
			return nil
		}
		if off := err.Error(); g.state.Load().Off != off {
			g.log.Error("the watchdog does not start; caps rest on the library in the container alone",
				"err", err)
			g.state.Store(&State{Off: off})
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(checkEvery):
		}
	}
}

// held returns the current allocations.
func (g *Guard) held() allocations {
	list := g.allocations.Allocations()
	out := make(allocations, len(list))
	for i := range list {
		out[list[i].ID] = &list[i]
	}
	return out
}

// round looks at every GPU that is due. It returns how long the guard may sleep if nothing changes,
// or 0 if there is a cap.
func (g *Guard) round(ctx context.Context, now time.Time) (idle time.Duration) {
	gpus, held := g.allocations.Offered(), g.held()
	idle = g.pause("", held)
	capped := map[gpu.UUID]bool{}
	for key, c := range held {
		for i := range c.Grants {
			u := c.Grants[i].GPU
			if bytes, ok := held.on(key, u); ok && bytes != lib.None {
				capped[u], idle = true, 0
			}
		}
	}
	worked := false
	var due []gpu.UUID
	for i := range gpus {
		u := gpus[i].UUID
		if wait := g.pause(u, held) - now.Sub(g.looked[u]); !capped[u] && wait > 0 {
			idle = min(idle, wait)
			continue
		}
		g.looked[u] = now
		due = append(due, u)
	}
	worked = g.examiner.learn(ctx, now)
	memory := g.memory(ctx, due)
	for i := range gpus {
		d := &gpus[i]
		if !slices.Contains(due, d.UUID) || g.unchanged(d.UUID, capped[d.UUID], held, memory, now) {
			continue
		}
		worked = true
		// Counters that one look opens are read by the next: look again at once.
		for range 2 {
			if again := g.look(ctx, d, held, memory); !again || ctx.Err() != nil {
				break
			}
		}
		idle = min(idle, g.pause(d.UUID, held))
	}
	if !worked && len(g.state.Load().Containers) == len(held) && g.state.Load().Off == "" {
		return idle
	}
	offered := func(u gpu.UUID) bool {
		return slices.ContainsFunc(gpus, func(d gpu.Device) bool { return d.UUID == u })
	}
	g.forget(offered)
	g.publish(gpus, held)
	return idle
}

// memory returns how much of each GPU is used, as far as the driver says. A look asks for it before
// it lists the processes, so memory that a process takes in between shows in the list or at the
// next look.
func (g *Guard) memory(ctx context.Context, gpus []gpu.UUID) map[gpu.UUID]gpu.Memory {
	if len(gpus) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, driverTimeout)
	defer cancel()
	of, _ := g.driver.Memory(ctx, gpus...) // a GPU that is missing in it is looked at
	return of
}

// pause returns how long a GPU without a cap is left alone. For the empty UUID it returns the pause
// of a GPU on which all is in order.
func (g *Guard) pause(u gpu.UUID, held allocations) time.Duration {
	f := g.found[u]
	switch {
	case f != nil && (f.Intruders > 0 || f.Unlisted > 0):
		return suspectEvery
	case u != "" && len(held) > 0 && g.allocations.Lends(u):
		return lendEvery
	case len(held) > 0:
		return idleEvery
	}
	return restEvery
}

// look takes one look at a GPU, and keeps what it found.
func (g *Guard) look(
	ctx context.Context, d *gpu.Device, held allocations, memory map[gpu.UUID]gpu.Memory,
) (again bool) {
	f, again := g.examiner.look(ctx, d, held, memory)
	if f != nil {
		g.found[d.UUID] = f
	}
	return again
}

// forget drops what is known of containers and allocations that have ended, and of GPUs that are
// not given out.
func (g *Guard) forget(offered func(gpu.UUID) bool) {
	g.examiner.forget(offered)
	for u, f := range g.found {
		if !offered(u) {
			f.users = nil
		}
	}
}
