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
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	// DefaultEvery is how often a GPU with caps on it is looked at: a breach is
	// seen after half of that on average, confirmed after as much again, and
	// ended well within a second.
	DefaultEvery = 250 * time.Millisecond
	// idleEvery is the same for a GPU on which there is no cap, restEvery where nobody
	// on the node has anything, and suspectEvery while somebody is on the GPU who should
	// not be: the judge forgets a doubt that no look confirms.
	idleEvery    = 10 * time.Second
	restEvery    = 30 * time.Second
	suspectEvery = time.Second
	// driverPatience bounds the driver's answer, runtimePatience the runtime's,
	// endPatience the end of a container, kubePatience an eviction.
	driverPatience  = 2 * time.Second
	runtimePatience = 4 * time.Second
	endPatience     = 10 * time.Second
	kubePatience    = 30 * time.Second
	// listEvery is how old the list of containers may be, and listSoon how old
	// while a process is in one that is not on it.
	listEvery = 10 * time.Second
	listSoon  = 500 * time.Millisecond
	// pageEvery is how often counters that could not be opened are tried again.
	pageEvery = time.Second
	// listWait is how long a look stays for the runtime's answer, which else the
	// next one takes.
	listWait = 250 * time.Millisecond
	// maxSpoilt bounds how often pageEvery is doubled for a container whose
	// counters are nonsense again and again: to some four minutes.
	maxSpoilt = 8
	// moment is longer than what a library takes back at once is there.
	moment = 20 * time.Millisecond
	// checkEvery is how often it is tried again whether the guard may start.
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
	// Domain is that of the names by which allocations are recognised.
	Domain string
	// Every is how often GPUs with caps are looked at; zero is DefaultEvery.
	Every time.Duration
	// EndIntruders ends containers that use a GPU without an allocation on it.
	EndIntruders bool
	// EvictAfter is the number of offences within an hour after which a pod is
	// evicted; zero is never.
	EvictAfter int
	// Own is the agent's own pod, which may look at any GPU.
	Own workload.Pod
	// Policy is what counts as a breach; the zero value is the default.
	Policy memcap.Policy
	Log    *slog.Logger
}

// Worlds is what the guard speaks to.
type Worlds struct {
	Driver      Driver
	Allocations Allocations
	Proc        Proc
	Runtime     Runtime
	Pages       Pages
	// Cluster is nil where there is no API server to speak to.
	Cluster  Cluster
	Observer Observer
	// Limiter is nil where the driver is not to be asked for limits.
	Limiter Limiter
}

// Driver lists the processes on a GPU, and says how much memory of GPUs is used.
type Driver interface {
	Processes(context.Context, gpu.UUID) ([]gpu.Process, error)
	// Memory leaves out the GPUs that it cannot read.
	Memory(context.Context, ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error)
}

// Utilizer is a Driver that tells how busy processes have kept the streaming multiprocessors of
// GPUs since a time, in percent and by PID; those that are idle are left out. It leaves out the GPUs of which
// the driver does not tell.
type Utilizer interface {
	Utilization(context.Context, time.Time, ...gpu.UUID) (map[gpu.UUID]map[int]float64, error)
}

// Allocations says what the node gives out, and to whom. agent.Agent is one.
type Allocations interface {
	// Offered is the GPUs that are given out, in index order.
	Offered() []gpu.Device
	// Allocations is who has what; their grants say how much memory.
	Allocations() []ledger.Allocation
	// Open says that somebody else gives a GPU out too: nobody is an intruder there.
	Open(gpu.UUID) bool
	// Changed has a value when any of this may have changed since the last one was
	// taken.
	Changed() <-chan struct{}
}

// Proc finds the container of a process. node.Proc is one.
type Proc interface {
	Container(pid int) (node.Owner, error)
	// Inside is how a process names itself: its PID namespace's number and its PID there.
	Inside(pid int) (namespace, inner uint64, err error)
	// Check says why processes of the node cannot be seen from here.
	Check() error
}

// Runtime lists containers and ends them. node.Runtime is one.
type Runtime interface {
	Containers(context.Context) ([]node.Container, error)
	End(context.Context, node.Owner) (how string, err error)
}

// Pages opens the counters of allocations. lib.Pages stands behind it.
type Pages interface {
	// Meter opens those of an allocation on a GPU; gpu.ErrNotFound where nothing is counted.
	Meter(key string, u gpu.UUID) (Meter, error)
}

// Meter compares a container's own count with the driver's figure.
type Meter interface {
	// Begin is called before the driver is asked and End with its answer.
	Begin() error
	End(driver uint64, known bool, each map[lib.Process]uint64) (lib.Reading, error)
	// Asked says whether a process waits for a reading.
	Asked() bool
	// Moved says whether there is anything new since the last reading.
	Moved(since lib.Reading) (bool, error)
	// Cost is the CPU time that the last reading took, as far as it has come: its
	// price is the container's to choose.
	Cost() time.Duration
	// Counted fills in what processes count for themselves, in bytes.
	Counted(map[lib.Process]uint64) error
	Close() error
}

// Cluster is where offences are told, and offenders evicted. agentkube.Client is one.
type Cluster interface {
	Event(regarding workload.Pod, kind agentkube.EventType, reason, message string)
	Evict(context.Context, workload.Pod) error
}

// Observer is told of what happens; it must not block.
type Observer interface {
	// Ended is called when a container has been ended, Evicted when a pod has been.
	Ended(End)
	Evicted(pod workload.Pod, offences int)
}

// End is that of a container which the watchdog has ended.
type End struct {
	Kind      memcap.Kind
	Pod       workload.Pod
	Container string
	GPU       gpu.UUID
	// Used is what it was found with there, and Cap what it could have, in bytes.
	Used, Cap uint64
	// After is the time since the breach began.
	After time.Duration
}

// Guard is the watchdog. Use [New].
type Guard struct {
	every       time.Duration
	driver      Driver
	allocations Allocations
	proc        Proc
	voice       *voice
	eye         lookout
	state       atomic.Pointer[State]

	// The rest belongs to Run's goroutine.

	// answerFrom is when those who ask for a reading are next listened to.
	answerFrom time.Time
	looked     map[gpu.UUID]time.Time
	// found is what the last look at each GPU found.
	found map[gpu.UUID]*finding
}

// lookout looks at GPUs and has done what must be done. [eye] does.
type lookout interface {
	// look takes one look at a GPU, whose memory was asked for before. The finding is nil if
	// the driver has not answered. again says that it is worth to look at once again.
	look(ctx context.Context, d *gpu.Device, held allocations, memory map[gpu.UUID]gpu.Memory) (f *finding, again bool)
	// unmoved reports whether all counters on a GPU are as they were at its last look.
	unmoved(u gpu.UUID) bool
	// listen has a value when it is time to see who has asked for a reading, and asked has the
	// GPUs for which a process waits for one. Both are nil where there is none.
	listen(now time.Time) <-chan time.Time
	asked(now time.Time) map[gpu.UUID]bool
	// describe adds what is known of the containers of an allocation on a GPU, which may have so
	// many bytes.
	describe(c *status.Container, u gpu.UUID, bytes uint64)
	// forget drops what is known of containers and allocations that are no more, or on GPUs
	// that are not given out.
	forget(offered func(gpu.UUID) bool)
	// counts is how many intruders were found and how many containers ended.
	counts() (found, kills uint64)
}

// finding is what a look at a GPU has found.
type finding struct {
	Uninvited
	users map[int]string // see State.users
	calm  *calm          // nil where not all was in order
}

// voice is the guard's log, to which a container must not be able to write without end.
type voice struct {
	log    *slog.Logger
	ration *brief.Ration   // for what a container can cause at every look
	said   map[string]bool // what once has logged
}

// once logs something the first time. It is for Run's goroutine.
func (v *voice) once(key, message string, args ...any) {
	if !v.said[key] {
		if len(v.said) > 1000 {
			clear(v.said) // of containers long gone
		}
		v.said[key] = true
		v.log.Warn(message, args...)
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
	v := &voice{log: o.Log, ration: brief.NewRation(o.Log, time.Now, time.AfterFunc), said: map[string]bool{}}
	justice := &hand{
		driver: w.Driver, proc: w.Proc, runtime: w.Runtime, cluster: w.Cluster, observer: w.Observer, voice: v,
		endIntruders: o.EndIntruders, evictAfter: o.EvictAfter,
		ending: map[string]bool{}, ended: map[string]bool{},
	}
	g := &Guard{
		every: o.Every, driver: w.Driver, allocations: w.Allocations, proc: w.Proc, voice: v,
		eye: &eye{
			driver: w.Driver, allocations: w.Allocations, proc: w.Proc,
			judge: memcap.NewJudge(o.Policy), voice: v, hand: justice,
			limits:  &limits{limiter: w.Limiter, voice: v, of: map[place]*limit{}, unable: map[gpu.UUID]time.Time{}},
			roster:  roster{runtime: w.Runtime, own: o.Own, domain: o.Domain, strays: map[place]*stray{}},
			tallies: tallies{pages: w.Pages, voice: v, by: map[page]*tally{}},
			names:   names{proc: w.Proc},
			seen:    map[place]int{},
		},
		looked: map[gpu.UUID]time.Time{}, found: map[gpu.UUID]*finding{},
	}
	g.state.Store(&State{Off: "it was not started (--watch-every 0)"})
	return g
}

// State returns what was last seen. Where the guard does not run, that is who may
// have how much, and not what they have.
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

// Run looks until ctx ends, and returns its error.
func (g *Guard) Run(ctx context.Context) error {
	defer g.forget(func(gpu.UUID) bool { return false })
	if err := g.start(ctx); err != nil {
		return err
	}
	ticker := time.NewTicker(g.every)
	defer ticker.Stop()
	for {
		if idle := g.round(ctx, time.Now()); idle > g.every {
			// Nobody has a cap: a node that gives out whole GPUs sleeps.
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
			case <-g.eye.listen(time.Now()):
				g.answer(ctx)
			}
		}
	}
}

// start waits until the guard can see the node's processes.
func (g *Guard) start(ctx context.Context) error {
	for {
		err := g.proc.Check()
		if err == nil {
			g.voice.log.Info("watchdog runs", "every", g.every.String())
			return nil
		}
		if off := err.Error(); g.state.Load().Off != off {
			g.voice.log.Error("the watchdog does not start; caps rest on the library in the container alone",
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

// held are the allocations of this moment.
func (g *Guard) held() allocations {
	list := g.allocations.Allocations()
	out := make(allocations, len(list))
	for i := range list {
		out[list[i].ID] = &list[i]
	}
	return out
}

// round looks at every GPU that is due, and returns for how long none will be if
// nothing stirs; 0 where somebody has a cap.
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
	memory := g.memory(ctx, due)
	for i := range gpus {
		d := &gpus[i]
		if !slices.Contains(due, d.UUID) || g.still(d.UUID, capped[d.UUID], held, memory, now) {
			continue
		}
		worked = true
		// Counters that are found in one look are read in the next: at once.
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

// memory asks how much of GPUs is used. It is asked before their processes: what comes
// after it is seen by the list, or by the next look.
func (g *Guard) memory(ctx context.Context, gpus []gpu.UUID) map[gpu.UUID]gpu.Memory {
	if len(gpus) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	of, _ := g.driver.Memory(ctx, gpus...) // of a GPU that is not in it, the processes are listed
	return of
}

// pause is how long a GPU is left alone on which there is no cap; without a name, any
// where all is in order.
func (g *Guard) pause(u gpu.UUID, held allocations) time.Duration {
	f := g.found[u]
	switch {
	case f != nil && (f.Intruders > 0 || f.Unlisted > 0):
		return suspectEvery
	case len(held) > 0:
		return idleEvery
	}
	return restEvery
}

// look takes one look at a GPU, and keeps what it found.
func (g *Guard) look(
	ctx context.Context, d *gpu.Device, held allocations, memory map[gpu.UUID]gpu.Memory,
) (again bool) {
	f, again := g.eye.look(ctx, d, held, memory)
	if f != nil {
		g.found[d.UUID] = f
	}
	return again
}

// forget drops what is known of containers and allocations that are no more, or on GPUs
// that are not given out.
func (g *Guard) forget(offered func(gpu.UUID) bool) {
	g.eye.forget(offered)
	for u, f := range g.found {
		if !offered(u) {
			f.users = nil
		}
	}
}
