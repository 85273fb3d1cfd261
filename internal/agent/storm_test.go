// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/plugin"
	"example.com/gpu-agent/pkg/timeslice"
)

var (
	stormSteps = flag.Int("storm.steps", 2000, "random steps of TestStorm")
	stormSeed  = flag.Uint64("storm.seed", 1, "seed of TestStorm")
)

// storm is a node in memory: a kubelet that gives devices out as kubelet 1.36.3
// does, a runtime, a driver, and the agent's own directories. Whatever is done to
// it, in any order, the rules hold; see check.
type storm struct {
	t      *testing.T
	rng    *rand.Rand
	gpus   int
	log    bytes.Buffer // of logger
	logger *slog.Logger
	agent  *Agent
	quit   context.CancelFunc
	served chan map[string]plugin.Source
	beside bool // a round is under way
	// untilBeside counts the calls of a round to its worlds down to the one at which
	// atCall comes.
	untilBeside atomic.Int64
	atCall      func()
	skip        bool // for pods that are there, PreStartContainer is not called

	mu sync.Mutex // guards what follows
	// sources is what the agent has the plugins serve.
	sources map[string]plugin.Source
	// The kubelet: the devices it was last told of, who has what in memory and in
	// the checkpoint, and the pods that are active.
	devices map[string]map[string]bool
	entries []node.Entry
	file    []node.Entry
	writes  int64
	pods    map[string]*stormPod // by UID
	// hw is the GPUs' MIG side; a storm with MIG lays GPUs out with it.
	hw      *outside
	mig     bool
	tiers   bool            // partitions offer room to spot pods, too
	ctx     context.Context // of the agent
	nextPod int
	deaf    bool
	// The runtime: its containers, whether it can be heard, whom it tells of what
	// has happened to containers, and what it has not told yet.
	containers []*stormContainer
	down       bool
	unheard    bool // it did not answer when it was last asked
	unreadable bool
	tell       func(node.ContainerEvent)
	news       []node.ContainerEvent
	// The directories.
	pages   pages
	specs   map[string]*specs.Spec
	written map[string]time.Time
	journal []state.Allocation
	// granted are the annotations that Allocate gave to containers.
	granted map[string]string
	doc     state.Document
	// The driver: what it says of each GPU, which GPUs are in trouble ("gone" for one
	// that it does not list), why it says nothing, and whether it hangs.
	figures map[gpu.UUID]gpu.Health
	trouble map[gpu.UUID]string
	mute    error
	hangs   bool
	// foreign are the GPUs that another device plugin offers.
	foreign map[gpu.UUID]bool
	// claims are the pods of the second front-end.
	claims *stormClaims
	// boot is which boot of the machine this is.
	boot string
	// partition is the file that the last edit left, and late is a partition that a new agent has not been told of yet.
	partition, late string
	// attack is what has given way once; see storm_attack_test.go.
	attack attack
	// done counts what has happened.
	done map[string]int
}

type stormPod struct {
	uid, name string
	active    bool
	// unasked says that the kubelet has restarted since its admission and does not
	// call PreStartContainer for it.
	unasked bool
	// parts are its containers: init containers and sidecars first.
	parts []stormPart
	// at is the first of them that has not run, or for a sidecar not begun; app containers run
	// beside each other when no other is left.
	at int
	// claim is what it has by the second front-end, nil for a pod of the first.
	claim *claimant
}

// stormPart is a container of a pod, by the name that says what it is: "init", "sidecar" (an init
// container that stays beside the others), "app" or "app-2".
type stormPart struct {
	name  string
	wants map[string]int // by resource
}

func (c *stormPart) isApp() bool { return strings.HasPrefix(c.name, "app") }

// due are the containers that the kubelet would start, of which none of these names runs.
func (p *stormPod) due(runs map[string]bool) (out []int) {
	begun := p.at == len(p.parts) || p.parts[p.at].isApp()
	for i := range p.parts {
		c := &p.parts[i]
		if !runs[c.name] && (i == p.at || i < p.at && c.name == "sidecar" || begun && c.isApp()) {
			out = append(out, i)
		}
	}
	return out
}

// The driver's MIG side.

func (s *storm) MIG(ctx context.Context, u gpu.UUID) (gpu.MIG, error) { return s.hw.MIG(ctx, u) }
func (s *storm) CreateInstance(ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int) (gpu.Instance, error) {
	in, err := s.hw.CreateInstance(ctx, u, profile, at, ci)
	s.note("create %s@%d on %s: %d, %v", profile, at.Start, u, in.GI, err)
	s.claims.broke(u, err)
	return in, err
}
func (s *storm) DestroyInstance(ctx context.Context, u gpu.UUID, in gpu.Instance) error {
	err := s.hw.DestroyInstance(ctx, u, in)
	s.note("destroy %s@%d (%d) on %s: %v", in.Profile, in.Start, in.GI, u, err)
	s.claims.broke(u, err)
	return err
}
func (s *storm) SetMIGMode(ctx context.Context, u gpu.UUID, on bool) error {
	return s.hw.SetMIGMode(ctx, u, on)
}
func (s *storm) Reset(ctx context.Context, u gpu.UUID) error { return s.hw.Reset(ctx, u) }
func (s *storm) Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error) {
	return s.hw.Capabilities(minor, gi, ci)
}
func (s *storm) MIGStep(string, string, time.Duration, error) {}
func (s *storm) Wish(string, time.Duration)                   {}

type stormContainer struct {
	node.Container
	pod  *stormPod
	part int                 // of the pod's
	ids  map[string][]string // by resource
	// caps are the capability nodes that it got, limits what the pages of its allocations
	// said when it started, by key and GPU.
	caps   []string
	limits map[string]uint64
	// hangs says that it does not die, whatever is done to it.
	hangs bool
	// lost says that the kubelet has lost count of what it has, and may give that to others: it
	// allocates anew before the container starts again, so the file is not needed for that.
	lost bool
	// early says that it has started on the file of the holder before, without a PreStartContainer and
	// before the agent has looked: the agent takes it for that holder's, and makes no file until it ends.
	early bool
}

// note puts a line of the node's into the agents' log.
func (s *storm) note(format string, args ...any) { s.logger.Info(fmt.Sprintf(format, args...)) }

func (s *storm) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// The agent's worlds.

func (s *storm) Inventory(ctx context.Context) (gpu.Inventory, error) {
	s.called()
	defer s.called()
	s.mu.Lock()
	hangs, mute := s.hangs, s.mute
	inv := *machine(s.gpus)
	s.hw.with(func() {
		for i := range inv.GPUs {
			inv.GPUs[i].MIG = s.hw.inv.GPUs[i].MIG
		}
	})
	for i := range inv.GPUs {
		if why := s.trouble[inv.GPUs[i].UUID]; why != "gone" {
			inv.GPUs[i].Fault = why
		}
	}
	inv.GPUs = slices.DeleteFunc(inv.GPUs, func(d gpu.Device) bool { return s.trouble[d.UUID] == "gone" })
	s.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return gpu.Inventory{}, fmt.Errorf("read it: %w", gpu.ErrTimeout)
	}
	return inv, mute
}
func (s *storm) Health(_ context.Context, u gpu.UUID) (gpu.Health, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.figures[u], nil
}
func (s *storm) Parts(context.Context) (cdi.Parts, error) {
	return driverParts(machine(s.gpus)), nil
}
func (s *storm) Events(ctx context.Context, _ func(gpu.Event)) error {
	<-ctx.Done()
	return ctx.Err()
}
func (s *storm) LinksChanged(context.Context) (bool, error) { return false, nil }

func (s *storm) SetTimeSlice(context.Context, gpu.UUID, gpu.TimeSlice) error { return nil }
func (s *storm) LetGo() error                                                { return nil }

func (s *storm) Write(key string, spec *specs.Spec) error {
	s.called()
	defer s.called()
	s.locked(func() {
		if s.specs[key] == nil {
			s.written[key] = time.Now()
		}
		s.specs[key] = spec
	})
	return nil
}
func (s *storm) Remove(key string) error {
	s.called()
	defer s.called()
	s.locked(func() { delete(s.specs, key) })
	return nil
}
func (s *storm) Read(key string) (*specs.Spec, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.specs[key], nil
}

type stormFiles struct{ *storm }

func (s stormFiles) Written(key string) (time.Time, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.written[key], nil
}

func (s stormFiles) List() ([]string, error) {
	s.called()
	defer s.called()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.specs)), nil
}

func (s *storm) List(context.Context) (node.Listing, error) {
	s.called()
	defer s.called()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.deaf {
		return node.Listing{}, nil
	}
	s.freeLocked()
	l := node.Listing{Pods: []workload.Pod{ownPod}}
	for _, e := range s.entries {
		p := s.pods[e.PodUID]
		if e.Container != "init" {
			l.Holdings = append(l.Holdings, node.Holding{Namespace: "ns", Pod: p.name, Container: e.Container, Resource: e.Resource, IDs: e.IDs})
		}
	}
	for _, p := range s.pods {
		if p.active {
			l.Pods = append(l.Pods, workload.Pod{Namespace: "ns", Name: p.name})
		}
	}
	s.attack.list(&l)
	slices.SortFunc(l.Pods, func(a, b workload.Pod) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	return l, nil
}

// freeLocked is the kubelet's UpdateAllocatedDevices.
func (s *storm) freeLocked() {
	s.entries = slices.DeleteFunc(s.entries, func(e node.Entry) bool { return !s.pods[e.PodUID].active })
}

func (s *storm) Allocatable(context.Context) (map[string][]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.allocatableLocked(), nil
}

func (s *storm) allocatableLocked() map[string][]string {
	var theirs []string
	for u, is := range s.foreign {
		if is {
			theirs = append(theirs, string(u))
		}
	}
	slices.Sort(theirs)
	out := map[string][]string{"nvidia.com/gpu": theirs}
	for resource, devices := range s.devices {
		for _, id := range sortedKeys(devices) {
			if devices[id] {
				out[resource] = append(out[resource], id)
			}
		}
	}
	return out
}

func (s *storm) Checkpoint() (node.Checkpoint, error) {
	s.called()
	defer s.called()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unreadable {
		return node.Checkpoint{}, errors.New("the checkpoint cannot be read")
	}
	return node.Checkpoint{Entries: slices.Concat(s.file, s.attack.entries()), Registered: registered(s.allocatableLocked()), Stamp: node.Stamp{MTime: s.writes, Inode: 1}}, nil
}

func (s *storm) Stamp() node.Stamp {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unreadable {
		return node.Stamp{}
	}
	return node.Stamp{MTime: s.writes, Inode: 1}
}

func (s *storm) writeLocked() {
	s.file = slices.Clone(s.entries)
	s.writes++
}

type stormRuntime struct{ *storm }

func (s stormRuntime) Containers(context.Context) ([]node.Container, error) {
	s.called()
	defer s.called()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unheard = s.down; s.down {
		return nil, errors.New("the runtime is away")
	}
	out := []node.Container{{Namespace: ownPod.Namespace, Pod: ownPod.Name}}
	for _, c := range s.containers {
		out = append(out, c.Container)
	}
	return append(out, s.attack.containers()...), nil
}
func (s stormRuntime) Pods(context.Context) (map[string]workload.Pod, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down {
		return nil, errors.New("the runtime is away")
	}
	out := map[string]workload.Pod{}
	for uid, p := range s.pods {
		if p.active || s.livesLocked(p) {
			out[uid] = workload.Pod{Namespace: "ns", Name: p.name}
		}
	}
	s.attack.sandboxes(out)
	return out, nil
}
func (s stormRuntime) Events(ctx context.Context, tell func(node.ContainerEvent)) error {
	s.locked(func() { s.tell = tell })
	<-ctx.Done()
	return ctx.Err()
}

// livesLocked reports whether a pod has a container.
func (s *storm) livesLocked(p *stormPod) bool {
	return slices.ContainsFunc(s.containers, func(c *stormContainer) bool { return c.pod == p })
}

// endLocked ends containers, and has the runtime tell of it where it can be heard.
func (s *storm) endLocked(which func(*stormContainer) bool) {
	s.containers = slices.DeleteFunc(s.containers, func(c *stormContainer) bool {
		if !which(c) {
			return false
		}
		s.news = append(s.news, node.ContainerEvent{Kind: node.EventStopped, Container: c.Container})
		return true
	})
}

// telling is the runtime's word of what has happened to containers.
func (s *storm) telling() {
	s.mu.Lock()
	news, tell, deaf := s.news, s.tell, s.down
	s.news = nil
	s.mu.Unlock()
	for _, e := range news {
		if tell != nil && !deaf {
			tell(e)
		}
	}
}

func (s *storm) Set(want map[string]plugin.Source) error {
	s.called()
	defer s.called()
	s.served <- maps.Clone(want)
	return nil
}
func (s *storm) Suspect(string)          {}
func (s *storm) Withhold(bool)           {}
func (s *storm) Status() []plugin.Status { return nil }

func (s *storm) GPUEvent(gpu.Event)         {}
func (s *storm) Round(error, time.Duration) {}

func (s *storm) Document() (d state.Document) {
	s.locked(func() { d = s.doc })
	return d
}
func (s *storm) Save(d state.Document) error {
	s.called()
	defer s.called()
	s.locked(func() { s.doc = d })
	return nil
}
func (s *storm) Allocations() []state.Allocation { return slices.Clone(s.journal) }
func (s *storm) Append(c state.Allocation) error {
	s.called()
	defer s.called()
	s.locked(func() { s.journal = append(s.journal, c) })
	return nil
}
func (s *storm) Keep(allocations []state.Allocation) error {
	s.locked(func() { s.journal = allocations })
	return nil
}

// start begins an agent on what the last one left, and plugins that hand its
// lists to the kubelet.
func (s *storm) start() {
	ctx, quit := context.WithCancel(context.Background())
	s.quit, s.ctx = quit, ctx
	s.locked(func() { s.sources, s.tell = nil, nil })
	s.agent = New(Options{
		Domain: "example.com", ResourceDomain: "example.com", MemoryUnit: s.attack.unit, Node: "node-1", Pod: ownPod, Boot: s.boot,
		Health: health.Options{Ignored: health.DefaultIgnored, Hold: testHold, Probe: testHold / 4}, Log: s.logger,
		YieldGrace: 10 * time.Millisecond,
	}, Worlds{End: s.endYielding, Driver: s, Files: stormFiles{s}, Caps: &s.pages, Kubelet: s, Runtime: stormRuntime{s}, Plugins: s, Store: s, DRA: s.claims.worlds(), Observer: s})
	s.note("an agent starts; %d allocations in the journal", len(s.journal))
	s.agent.loop.remember()
	agent := s.agent
	go func() { _ = agent.claims.run(ctx) }()
	go func() { _ = agent.loop.yields.run(ctx) }()
	go func() { _ = s.agent.loop.witnesses.Follow(ctx) }()
	go func() {
		running := map[string]bool{}
		for {
			select {
			case <-ctx.Done():
				return
			case want := <-s.served:
				s.locked(func() { s.sources = want })
				for name, source := range want {
					if !running[name] {
						running[name] = true
						go s.follow(ctx, name, source)
					}
				}
			}
		}
	}()
}

// follow is a resource's plugin and the kubelet's end of its stream.
func (s *storm) follow(ctx context.Context, resource string, source plugin.Source) {
	for {
		devices, changed := source.List()
		s.locked(func() {
			if ctx.Err() != nil {
				return
			}
			now := map[string]bool{}
			for _, d := range devices {
				now[d.ID] = d.Healthy
			}
			for _, e := range s.entries {
				for _, id := range e.IDs {
					if _, ok := now[id]; !ok && e.Resource == resource && s.pods[e.PodUID].active {
						s.t.Errorf("%s of %s has left the list, and pod %s has it: the kubelet would end", id, resource, e.PodUID)
					}
				}
			}
			s.devices[resource] = now
			s.writeLocked()
		})
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

func (s *storm) source(resource string) plugin.Source {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sources[resource]
}

// admit is a pod's admission: each container in turn is allocated what it wants, unless it runs.
// A pod that cannot have it all is refused.
func (s *storm) admit(p *stormPod) {
	p.active = true
	s.locked(func() { s.pods[p.uid] = p })
	for i := range p.parts {
		runs := false
		s.locked(func() { runs = s.runsLocked(p)[p.parts[i].name] })
		if !runs && !s.allocate(p, i) {
			s.locked(func() {
				s.endLocked(func(c *stormContainer) bool { return c.pod == p })
				p.active = false
				s.done["refused"]++
			})
			return
		}
	}
}

// runsLocked are the names of the containers of a pod that run.
func (s *storm) runsLocked(p *stormPod) map[string]bool {
	out := map[string]bool{}
	for _, c := range s.containers {
		if c.pod == p {
			out[c.Name] = true
		}
	}
	return out
}

// allocate is the kubelet's allocation for a container, of what it does not have yet: the devices of
// the pod's init container first, where no other of its containers has taken them over, then what the
// agent prefers of what is free.
func (s *storm) allocate(p *stormPod, part int) bool {
	c := &p.parts[part]
	for _, resource := range slices.Sorted(maps.Keys(c.wants)) {
		n := c.wants[resource]
		source := s.source(resource)
		if source == nil {
			return false
		}
		var ids, free []string
		has := false
		s.locked(func() {
			s.freeLocked()
			taken, again := map[string]bool{}, map[string]bool{}
			for _, e := range s.entries {
				if e.Resource != resource {
					continue
				}
				has = has || e.PodUID == p.uid && e.Container == c.name
				for _, id := range e.IDs {
					taken[id] = true
					if e.PodUID == p.uid {
						again[id] = e.Container == "init"
					}
				}
			}
			for _, id := range slices.Sorted(maps.Keys(again)) {
				if again[id] && len(ids) < n {
					ids = append(ids, id)
				}
			}
			for id, healthy := range s.devices[resource] {
				if healthy && !taken[id] {
					free = append(free, id)
				}
			}
			slices.Sort(free)
		})
		if has {
			continue
		}
		if len(ids) < n {
			if len(ids)+len(free) < n {
				return false
			}
			before := s.offer()
			chosen, err := source.Prefer(append(slices.Clone(free), ids...), ids, n)
			if err != nil {
				s.checkRefusal(before, resource, free, ids, n, err)
				return false
			}
			s.checkChoice(before, resource, free, ids, chosen)
			ids = chosen
		}
		ids = slices.Clone(ids)
		slices.Sort(ids)
		grant, err := source.Allocate(ids)
		s.locked(func() { maps.Copy(s.granted, grant.Annotations) })
		if err != nil {
			return false
		}
		if !s.beside && s.rng.IntN(50) == 0 && !s.unreadable {
			// Killed before it had written the allocation down, and in half of the
			// cases before it had answered. Then only the kubelet's checkpoint can
			// tell that a device was given to the next pod while the container of
			// the one before is still dying: where that cannot be read either,
			// nobody knows.
			s.restartAgent()
			if s.rng.IntN(2) == 0 {
				s.locked(func() { s.done["unanswered"]++ })
				return false
			}
		}
		if strings.HasSuffix(resource, "gpu-mem") {
			if _, err := timeslice.OneGPU(ids); err != nil {
				s.t.Errorf("granted over two GPUs: %v", err)
			}
		}
		s.locked(func() {
			s.entries = append(s.entries, node.Entry{PodUID: p.uid, Container: c.name, Resource: resource, IDs: ids})
			s.writeLocked()
			s.done["granted"]++
			s.note("granted %s of pod %s: %v is allocation %s", c.name, p.uid, ids, cdi.Key(resource, ids))
		})
	}
	return true
}

// startContainer is the kubelet's start of a container that is due: an allocation where it has lost
// count of it, PreStartContainer, then the runtime, which wants every CDI file.
func (s *storm) startContainer(p *stormPod) {
	c := &stormContainer{pod: p, limits: map[string]uint64{}}
	var due []int
	s.locked(func() { due = p.due(s.runsLocked(p)) })
	if p.unasked && s.down || !p.active || len(due) == 0 {
		return
	}
	c.part = due[s.rng.IntN(len(due))]
	part := &p.parts[c.part]
	has := func() (ids map[string][]string) {
		ids = map[string][]string{}
		s.locked(func() {
			for _, e := range s.entries {
				if e.PodUID == p.uid && e.Container == part.name {
					ids[e.Resource] = e.IDs
				}
			}
		})
		return ids
	}
	before := has()
	if !s.allocate(p, c.part) {
		return
	}
	c.ids = has()
	c.Container = node.Container{ID: fmt.Sprintf("%s-%s-%d", p.uid, part.name, time.Now().UnixNano()), PodUID: p.uid, Namespace: "ns", Pod: p.name,
		Name: part.name, Running: true, Annotations: map[string]string{}}
	for resource, ids := range c.ids {
		source := s.source(resource)
		if source == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		var err error
		if p.unasked && before[resource] != nil {
			// A kubelet that has restarted may not ask for what is in its checkpoint, as long as
			// the plugin has not registered again: the file is the gate. What it has lost and allocates
			// now it does ask for: it has the options of the plugin that it has just called.
			err = ctx.Err()
		} else {
			err = source.Prepare(ctx, ids)
		}
		cancel()
		if err != nil {
			s.locked(func() { s.done["waited"]++ })
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for resource, ids := range c.ids {
		key := cdi.Key(resource, ids)
		if s.specs[key] == nil && p.unasked && before[resource] != nil {
			s.done["shut"]++
			return
		} else if s.specs[key] == nil {
			s.t.Errorf("allocation %s is ready and its file does not stand", key)
			return
		}
		name := cdi.AnnotationName("example.com", key)
		c.Annotations[name] = s.granted[name]
		for _, n := range s.specs[key].Devices[0].ContainerEdits.DeviceNodes {
			if strings.Contains(n.Path, "-ci") {
				c.caps = append(c.caps, n.Path)
			}
		}
	}
	for resource, ids := range c.ids {
		a, _ := s.agent.ledger.Get(cdi.Key(resource, ids))
		c.early = c.early || p.unasked && !a.Opened
	}
	s.giveLocked(c)
	c.Created = time.Now().Add(s.attack.skew)
	s.containers = append(s.containers, c)
	s.news = append(s.news, node.ContainerEvent{Kind: node.EventStarted, Container: c.Container})
	if s.done["started"]++; part.name == "sidecar" && c.part == p.at {
		p.at++
	}
	if len(s.runsLocked(p)) > 1 {
		s.done["beside each other"]++
	}
	s.note("started %s with %v", c.ID, c.Annotations)
}

// step does one random thing.
func (s *storm) step() {
	var live []*stormPod
	s.locked(func() {
		for _, uid := range slices.Sorted(maps.Keys(s.pods)) {
			if s.pods[uid].active && s.pods[uid].claim == nil {
				live = append(live, s.pods[uid])
			}
		}
	})
	one := func() *stormPod {
		if len(live) == 0 {
			return nil
		}
		return live[s.rng.IntN(len(live))]
	}
	end := func(p *stormPod) { s.endLocked(func(c *stormContainer) bool { return c.pod == p }) }
	defer s.telling()
	s.yields()
	defer s.agent.LookAtCheckpoint() // as what watches the kubelet's directory
	if s.late != "" && s.rng.IntN(4) == 0 {
		s.agent.SetFile("p.yaml", []byte(s.late))
		s.late = ""
	}
	if s.tiers && s.rng.IntN(2) == 0 {
		s.crowd(live)
		return
	}
	if s.rng.IntN(12) < 1+s.claims.turn {
		s.heal()
	}
	if s.rng.IntN(6) < 1+2*s.claims.turn {
		s.claims.step()
	}
	switch n := s.rng.IntN(112); {
	case n >= 106:
		s.strike(n - 106)
	case n >= 100 && n < 103: // GPUs that fail, leave and come back
		u := uuid(s.rng.IntN(s.gpus))
		s.locked(func() { s.trouble[u] = []string{"", "", "GPU is lost", "gone"}[s.rng.IntN(4)]; s.done["troubles"]++ })
		s.agent.loop.reader.faults.(*faults).onEvent(gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1})
	case n == 103:
		s.locked(func() {
			s.mute = []error{nil, fmt.Errorf("init: %w", gpu.ErrNoDriver)}[s.rng.IntN(2)]
			s.hangs = s.mute == nil && !s.hangs
		})
		s.agent.loop.reader.faults.(*faults).onEvent(gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1})
	case n == 104:
		s.locked(func() { u := uuid(s.rng.IntN(s.gpus)); s.foreign[u] = !s.foreign[u] && s.rng.IntN(2) == 0 })
	case n == 105:
		s.locked(func() {
			s.skip = !s.skip
			for _, p := range s.pods {
				p.unasked = s.skip
			}
		})
	case n < 25:
		if s.claims.turn > 0 && s.rng.IntN(6) > 0 {
			return
		}
		s.nextPod++
		p := &stormPod{uid: fmt.Sprint("uid-", s.nextPod), name: fmt.Sprint("pod-", s.nextPod)}
		want := func() map[string]int {
			if offered := s.offered(); len(offered) > 0 && s.rng.IntN(3) > 0 {
				return map[string]int{offered[s.rng.IntN(len(offered))]: 1 + s.rng.IntN(4)*s.rng.IntN(2)}
			}
			if s.mig && s.rng.IntN(5) > 0 {
				w := map[string]int{}
				for range 1 + s.rng.IntN(2) {
					w["example.com/mig-"+[]string{"1g.10gb", "1g.10gb", "1g.10gb.me", "2g.20gb", "3g.40gb", "4g.40gb", "1c.3g.40gb", "2c.3g.40gb"}[s.rng.IntN(8)]] = 1 + s.rng.IntN(5)/4
				}
				return w
			}
			switch s.rng.IntN(6) {
			case 0:
				return map[string]int{wholeResource: 1}
			case 1:
				return map[string]int{sharedResource: 1 + s.rng.IntN(2)}
			case 2:
				return map[string]int{memResource: 1 + s.rng.IntN(3), wholeResource: 1}
			default:
				return map[string]int{memResource: 1 + s.rng.IntN(5)}
			}
		}
		for _, c := range []struct {
			name string
			odds int
		}{{"init", 3}, {"sidecar", 6}, {"app", 1}, {"app-2", 6}} {
			if s.rng.IntN(c.odds) == 0 {
				p.parts = append(p.parts, stormPart{c.name, want()})
			}
		}
		s.admit(p)
	case n < 55:
		if p := one(); p != nil {
			s.startContainer(p)
		}
	case n < 65: // a container ends: an init container's turn is over, another starts again
		if p := one(); p != nil {
			s.locked(func() {
				of := slices.DeleteFunc(slices.Clone(s.containers), func(c *stormContainer) bool { return c.pod != p })
				if len(of) == 0 {
					return
				}
				ended := of[s.rng.IntN(len(of))]
				s.endLocked(func(c *stormContainer) bool { return c == ended })
				if ended.Name == "init" {
					p.at++
				} else if s.rng.IntN(3) == 0 {
					end(p)
					p.active = false // completed; its object stays
				}
			})
		}
	case n < 72:
		if p := one(); p != nil {
			s.locked(func() { end(p); p.active = false; s.done["deleted"]++ })
		}
	case n < 78: // by force: the devices are free at once, the container is not dead
		if p := one(); p != nil {
			s.locked(func() {
				p.active = false
				s.done["forced"]++
				for _, c := range s.containers {
					if c.pod == p && attacks("hang") && s.rng.IntN(3) == 0 {
						c.hangs = true
						s.done["hanging"]++
					}
				}
			})
		}
	case n < 84: // the container of a pod that was deleted by force dies, unless it hangs
		s.locked(func() {
			s.endLocked(func(c *stormContainer) bool { return !c.pod.active && !c.hangs && s.rng.IntN(2) == 0 })
		})
	case n < 87:
		file := []string{allShared, allShared, allWhole, allShared + "      replicas: 3\n",
			strings.ReplaceAll(allShared, "shared", "off"),
			"version: v1\npartitions:\n  default:\n    - devices: [0]\n      mode: shared\n    - devices: [1, 2]\n      mode: whole\n"}[s.rng.IntN(6)]
		if s.mig {
			layouts := []string{demand, demand, demand, sevenSmall, twoLarge, "{mode: mig, geometry: {1g.10gb: 3, 3g.40gb: 1}}", splits, splits, "{mode: mig, geometry: {}}",
				"{mode: mig, profiles: [1g.10gb, 3g.40gb]}", "{mode: whole}", "{mode: shared}", "{mode: off}"}
			var gpus []string
			for range s.gpus {
				gpus = append(gpus, layouts[s.rng.IntN(len(layouts))])
			}
			file = migPartition(gpus...)
		}
		if s.rng.IntN(4) < 1+3*s.claims.turn {
			file = s.throughBoth()
		}
		if s.tiers {
			file = s.spotted(file)
		}
		s.partition = file
		s.note("edit: %q", file)
		s.agent.SetFile("p.yaml", []byte(file))
		s.locked(func() { s.done["edited"]++ })
	case n < 89:
		s.restartKubelet()
	case n < 91:
		if s.beside {
			return // one agent at a time
		}
		if s.unreadable {
			s.round(nil) // what it has not written down yet would be known to nobody
		}
		s.restartAgent()
	case n < 93:
		u := uuid(s.rng.IntN(s.gpus))
		if s.rng.IntN(2) == 0 {
			s.resetGPUs() // of the faults before
		}
		s.agent.loop.reader.faults.(*faults).onEvent(gpu.Event{Kind: gpu.EventXid, GPU: u, Xid: []uint64{13, 48, 94, 79}[s.rng.IntN(4)], GI: -1, CI: -1})
		s.locked(func() { s.done["faults"]++ })
	case n < 95:
		s.locked(func() { s.down = !s.down })
	case n < 96:
		s.locked(func() { s.unreadable = !s.unreadable && !s.attack.clocks })
	case n < 97:
		s.locked(func() { s.deaf = false })
	default:
		time.Sleep(time.Duration(s.rng.IntN(40)) * time.Second)
	}
}

// offered are the resources of which the kubelet has something to give out.
func (s *storm) offered() (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for resource, devices := range s.devices {
		for _, healthy := range devices {
			if healthy {
				out = append(out, resource)
				break
			}
		}
	}
	slices.Sort(out)
	return out
}

// splits is a layout with compute instances that share a GPU instance.
const splits = "{mode: mig, geometry: {1c.3g.40gb: 1, 2c.3g.40gb: 1, 1g.10gb: 3}}"

// heal ends what the driver, the witnesses and other plugins are in, if anything.
func (s *storm) heal() {
	s.locked(func() {
		s.mute, s.hangs, s.down, s.unreadable = nil, false, false, false
		clear(s.trouble)
		clear(s.foreign)
	})
	s.agent.loop.reader.faults.(*faults).onEvent(gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1})
	s.resetGPUs()
}

// resetGPUs has an operator say that all GPUs were reset, without which some faults stay.
func (s *storm) resetGPUs() {
	s.agent.SetNode(agentkube.Node{Annotations: map[string]string{"example.com/" + WasResetAnnotation: "all@" + time.Now().UTC().Format(time.RFC3339Nano)}})
}

// restartAgent ends the agent and starts another, which hears of the partition at
// once or some steps later.
func (s *storm) restartAgent() {
	s.quit()
	s.claims.left()
	if s.mig {
		// What the driver is in the middle of comes to its end before the process does.
		time.Sleep(2 * s.hw.took)
	}
	crowds := s.done["crowds"]
	s.damage()
	crowded := s.done["crowds"] > crowds
	s.start()
	file := s.partition
	if s.claims.turn == 0 {
		file = allShared
		if s.mig {
			file = migPartition(demand, demand, sevenSmall)
		}
	}
	if attacks("many") && s.rng.IntN(8) == 0 {
		file = tooMany
	}
	if s.tiers {
		file = s.spotted(file)
	}
	if s.rng.IntN(2) == 0 || crowded {
		s.agent.SetFile("p.yaml", []byte(file))
	} else {
		s.late = file
	}
	if crowded { // so many devices are slow work: they leave the lists now
		s.heal()
		for range 4 {
			s.round(nil)
			time.Sleep(plan.Linger / 3)
		}
	}
	s.locked(func() { s.done["agents"]++ })
}

// restartKubelet forgets what the kubelet had in memory alone. It knows its pods
// again some time later. Where it has lost its checkpoint too, it leaves containers that run as they
// are, with no devices in its account, and allocates again for all others of their pods.
func (s *storm) restartKubelet() {
	lost := attacks("checkpoint") && !s.beside && !s.unreadable && s.rng.IntN(4) == 0
	var again []*stormPod
	s.locked(func() {
		if lost {
			s.file = nil
			s.attack.guests = nil
			s.writes++
			s.done["checkpoints lost"]++
			s.note("the kubelet has lost its checkpoint")
			for _, c := range s.containers {
				c.lost = true
			}
			for _, uid := range slices.Sorted(maps.Keys(s.pods)) {
				if p := s.pods[uid]; p.active && p.claim == nil {
					again = append(again, p)
				}
			}
		}
		s.entries = slices.Clone(s.file)
		s.deaf = true
		s.done["kubelets"]++
	})
	s.claims.restarted()
	for _, p := range again {
		s.admit(p)
	}
}

// check is what must be true at any moment.
func (s *storm) check(when string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	users := map[string]*stormContainer{} // by resource and ID
	layouts := map[gpu.UUID]map[string]*stormContainer{}
	capabilities := map[string]bool{}
	s.hw.with(func() {
		for i := range s.hw.inv.GPUs {
			for _, in := range s.hw.inv.GPUs[i].MIG.Instances {
				nodes, _ := s.hw.Capabilities(s.hw.inv.GPUs[i].Minor, in.GI, in.CI)
				capabilities[nodes[1].Path] = true
			}
		}
	})
	for _, c := range s.containers {
		for _, node := range c.caps {
			if !capabilities[node] {
				s.t.Errorf("%s: the instance of %s is gone under it: %s", when, c.ID, node)
			}
		}
		if c.pod.claim != nil {
			s.claims.checkRunning(when, c, layouts)
		}
		for resource, ids := range c.ids {
			sick := s.agent.loop.reader.inv == nil || slices.ContainsFunc(ids, func(id string) bool {
				return (&fileInputs{inv: s.agent.loop.reader.inv}).faulty(gpu.UUID(strings.Split(id, "::")[0]))
			}) || s.unheard
			// A file that went with its GPU's failure is made again by who has read the
			// driver.
			key := cdi.Key(resource, ids)
			went := s.attack.went[key] && !s.agent.loop.reader.answered
			s.attack.went[key] = s.specs[key] == nil && (sick || went)
			a, held := s.agent.ledger.Get(key)
			if s.specs[key] == nil && c.pod.active && !sick && !went && !c.lost && !c.early && !a.Yield.Asked() {
				s.t.Errorf("%s: %s runs and the file of its allocation on %v is gone; it is held %v, %s, after %q", when, c.ID, ids, held, a.Phase, a.After)
			}
			s.checkCap(when, c, resource, ids)
			tier, resource := deviceplugin.TierOf(resource)
			if tier == ledger.Spot {
				s.done["spot runs"]++
			}
			for _, id := range ids {
				// Where the kubelet has lost count of a container it may give what that has to another of
				// the same pod: these share the one allocation, and its cap.
				if other := users[resource+" "+id]; other != nil && !(other.pod == c.pod && (other.lost || c.lost)) {
					s.t.Errorf("%s: %s and %s run on %s", when, other.ID, c.ID, id)
				}
				users[resource+" "+id] = c
				u := gpu.UUID(strings.Split(id, "::")[0])
				if layouts[u] == nil {
					layouts[u] = map[string]*stormContainer{}
				}
				if strings.Contains(resource, "/mig-") {
					layouts[u]["mig"] = c
					continue
				}
				layouts[u][resource] = c
			}
		}
	}
	for _, e := range s.entries {
		if key := cdi.Key(e.Resource, e.IDs); s.agent.front.Over(key) {
			s.done["of ended init containers"]++
			if p := s.pods[e.PodUID]; p.active && (e.Container != "init" || p.at == 0) {
				s.t.Errorf("%s: the agent says that %s of pod %s has ended, of allocation %s", when, e.Container, e.PodUID, key)
			}
		}
	}
	s.checkAttack(when)
	s.claims.checkLocked(when)
	for u, by := range layouts {
		if len(by) > 1 {
			s.t.Errorf("%s: %s is in use as %v", when, u, slices.Sorted(maps.Keys(by)))
			for r, c := range by {
				s.t.Errorf("   %s: %+v %v created %s pod %+v", r, c.Container, c.ids, c.Created, c.pod)
			}
		}
	}
}

// called is before and after each call of the agent's to its worlds.
func (s *storm) called() {
	if s.untilBeside.Add(-1) == 0 {
		go s.atCall()
		time.Sleep(time.Nanosecond) // until that has ended or waits for something
	}
}

// round is one of the agent's, with a random thing happening beside it: at any time, or
// at one of its calls, which has what few schedulers would come upon.
func (s *storm) round(beside func()) {
	var wait sync.WaitGroup
	began := time.Now()
	round := func() { _ = s.agent.loop.round(s.ctx) }
	s.untilBeside.Store(0)
	switch s.beside = beside != nil; {
	case beside == nil:
		round()
	case s.rng.IntN(2) == 0:
		wait.Go(round)
		beside()
	default:
		wait.Add(1)
		s.atCall = func() { defer wait.Done(); beside() }
		s.untilBeside.Store(1 + s.rng.Int64N(30))
		round()
		if s.untilBeside.Swap(0) > 0 { // it had fewer
			s.atCall()
		}
	}
	wait.Wait()
	s.beside = false
	s.attack.round = began
}

// calm ends everything and waits: then nothing may be left.
func (s *storm) calm() {
	s.heal()
	s.claims.calm()
	s.locked(func() {
		for _, p := range s.pods {
			p.active = false
		}
		s.endLocked(func(*stormContainer) bool { return true })
		s.deaf, s.late, s.skip = false, "", false
		s.attack.calmLocked()
	})
	s.heal()
	s.telling()
	s.agent.SetFile("p.yaml", []byte(allShared))
	for range 200 { // longer than a clock jumps
		s.resetGPUs()
		s.round(nil)
		time.Sleep(30 * time.Second)
	}
	synctest.Wait()
	if c := s.agent.Allocations(); len(c) != 0 {
		s.t.Errorf("allocations that nobody has: %+v", c)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.checkAttack("calm")
	if left, _ := s.pages.List(); len(s.specs) != 0 || len(s.journal) != 0 || len(left) != 0 {
		s.t.Errorf("left behind: files %v, journal %v, limit pages %v", slices.Sorted(maps.Keys(s.specs)), s.journal, left)
	}
	listed := 0
	for _, r := range s.agent.front.Offer().Resources {
		listed += len(r.Devices)
		for _, d := range r.Devices {
			if !d.Healthy || r.Name != memResource {
				s.t.Errorf("%s of %s is %v: %s", d.ID, r.Name, d.Healthy, d.Reason)
			}
		}
	}
	if want := s.gpus * timeslice.Units(&machine(1).GPUs[0], s.attack.unit); listed != want {
		s.t.Errorf("%d units are on offer, want %d: %s", listed, want, s.agent.loop.reporter.last().Outcome.Message)
	}
	s.pods, s.entries, s.file = map[string]*stormPod{}, nil, nil
	s.attack.clocks = s.rng.IntN(2) == 0
	s.claims.turn = 1 - s.claims.turn
}

// TestStorm is rules 1 to 5 under whatever may happen: pods of every kind, ended
// in every way, restarts of kubelet and agent, edits of the partition, faults,
// witnesses that do not answer, and what storm_attack_test.go has.
// -storm.steps and -storm.seed choose another.
func TestStorm(t *testing.T) { runStorm(t, false, false) }

// TestStormWithMIG is the same on GPUs with MIG, live and on demand,
// with a driver of which one call in ten fails.
func TestStormWithMIG(t *testing.T) { runStorm(t, true, false) }

// TestStormOfTiers is both with room that is offered a second time: no two containers, of whatever tier, run on one
// piece, no guaranteed pod is refused for spot's sake, and no change of a partition waits for spot pods that have
// ended.
func TestStormOfTiers(t *testing.T) {
	t.Run("shares", func(t *testing.T) { runStorm(t, false, true) })
	t.Run("MIG", func(t *testing.T) { runStorm(t, true, true) })
}

// spotted returns a partition with the room of some of its GPUs offered a second time.
func (s *storm) spotted(file string) string {
	const item = "    - "
	head, rest, _ := strings.Cut(file, item)
	entries := strings.Split(rest, item)
	for i, e := range entries {
		mode := strings.Contains(e, "mode: shared") || strings.Contains(e, "mode: whole") || strings.Contains(e, "mode: mig")
		if !mode || strings.Contains(e, "replicas") || strings.Contains(e, "api: dra") || s.rng.IntN(4) == 0 {
			continue
		}
		if inline, ok := strings.CutSuffix(e, "}\n"); ok && strings.HasPrefix(e, "{") {
			entries[i] = inline + ", spot: true}\n"
		} else {
			entries[i] = e + "      spot: true\n"
		}
	}
	return head + item + strings.Join(entries, item)
}

// crowd has a pod of either tier come or start, so that the two meet often.
func (s *storm) crowd(live []*stormPod) {
	if s.rng.IntN(4) == 0 {
		s.heal()
		s.locked(func() { s.deaf = false })
	}
	if s.rng.IntN(10) == 0 && !strings.Contains(s.partition, "spot: true") {
		s.partition = s.spotted(s.partition)
		s.agent.SetFile("p.yaml", []byte(s.partition))
	}
	offered := s.offered()
	if len(live) > 0 && s.rng.IntN(3) > 0 {
		s.startContainer(live[s.rng.IntN(len(live))])
		return
	}
	if len(offered) == 0 {
		s.heal()
		return
	}
	s.nextPod++
	s.admit(&stormPod{uid: fmt.Sprint("uid-", s.nextPod), name: fmt.Sprint("pod-", s.nextPod), parts: []stormPart{
		{"app", map[string]int{offered[s.rng.IntN(len(offered))]: 1 + s.rng.IntN(3)*s.rng.IntN(2)}}}})
}

// endYielding ends a container for the agent, which may end only what has room in the spot tier that is wanted.
func (s *storm) endYielding(_ context.Context, k *node.Container) (string, error) {
	how, err := "", error(gpu.ErrNotFound)
	s.locked(func() {
		s.endLocked(func(c *stormContainer) bool {
			if c.ID != k.ID {
				return false
			}
			how, err = "storm", nil
			yields := false
			for resource, ids := range c.ids {
				a, ok := s.agent.ledger.Get(cdi.Key(resource, ids))
				yields = yields || ok && a.Tier == ledger.Spot && a.Yielding()
			}
			if !yields {
				s.t.Errorf("%s is ended, which has no room that is wanted: %v", c.ID, c.ids)
			}
			s.done["ended by the agent"]++
			return !c.hangs
		})
	})
	s.telling()
	return how, err
}

// yields has some of the spot containers end by themselves whose room is wanted.
func (s *storm) yields() {
	s.locked(func() {
		s.endLocked(func(c *stormContainer) bool {
			for resource, ids := range c.ids {
				if a, ok := s.agent.ledger.Get(cdi.Key(resource, ids)); ok && a.Yielding() && s.rng.IntN(10) == 0 {
					s.done["yielded"]++
					if len(a.Yield.To) > 0 {
						s.done["yielded to a pod"]++
					}
					return true
				}
			}
			return false
		})
	})
}

// checkRefusal holds a refusal of the agent's against what it knew: a guaranteed request for devices that are on
// offer, and that the kubelet may give out, is never refused.
func (s *storm) checkRefusal(knew offer, resource string, free, must []string, n int, err error) {
	now := s.offer()
	if tier, _ := deviceplugin.TierOf(resource); tier == ledger.Spot || now.offer != knew.offer || len(must) > 0 {
		return
	}
	at := slices.IndexFunc(knew.offer.Resources, func(r deviceplugin.Resource) bool { return r.Name == resource })
	if at < 0 {
		return
	}
	have := map[gpu.UUID]int{}
	for _, d := range knew.offer.Resources[at].Devices {
		if d.Healthy && !d.Leaving && slices.Contains(free, d.ID) {
			have[d.GPU]++
		}
	}
	of := 0
	for _, there := range have {
		if resource == memResource {
			of = max(of, there)
		} else {
			of++ // whole GPUs, and replicas of different ones
		}
	}
	if resource != memResource && resource != wholeResource && resource != sharedResource || of < n {
		return
	}
	// The refusal may have been that of an agent that has just ended.
	if _, again := s.agent.front.Prefer(resource, slices.Clone(free), nil, n); again != nil && s.offer().offer == knew.offer {
		s.t.Errorf("%d of %s were refused, and %d could be given: %v\nfree %v\n%+v\n%+v", n, resource, of, errors.Join(err, again), free, knew.offer.Resources[at].Devices, knew.allocations)
	}
}

// newStorm is a storm on a node with three GPUs, whose agent has been told of a
// partition and has not looked yet.
func newStorm(t *testing.T, withMIG, tiers bool) *storm {
	s := &storm{
		hw: newOutside(3), mig: withMIG, tiers: tiers, written: map[string]time.Time{},
		t: t, boot: "this", rng: rand.New(rand.NewPCG(*stormSeed, 2)), gpus: 3, served: make(chan map[string]plugin.Source, 16),
		devices: map[string]map[string]bool{}, pods: map[string]*stormPod{}, granted: map[string]string{}, specs: map[string]*specs.Spec{},
		figures: map[gpu.UUID]gpu.Health{}, trouble: map[gpu.UUID]string{}, foreign: map[gpu.UUID]bool{}, done: map[string]int{},
		attack: attack{unit: unit, went: map[string]bool{}},
	}
	s.claims = newStormClaims(s)
	if withMIG {
		s.hw = migMachine(3)
		s.hw.took, s.hw.ampere = 300*time.Microsecond, true
		odds := rand.New(rand.NewPCG(*stormSeed, 3))
		s.hw.chance = func() error {
			if odds.IntN(10) == 0 {
				return errBroken
			}
			return nil
		}
	}
	s.logger = slog.New(slog.NewTextHandler(&s.log, nil))
	s.start()
	s.partition = allShared
	s.agent.SetFile("p.yaml", []byte(allShared))
	return s
}

// turn is a random step and a round of the agent's, after or beside each other.
func (s *storm) turn(when string) {
	time.Sleep(time.Millisecond)
	if s.rng.IntN(3) == 0 {
		s.round(s.step)
	} else {
		s.step()
		time.Sleep(time.Millisecond) // nothing happens at the very same time
		s.round(nil)
	}
	synctest.Wait()
	s.check(when)
}

func runStorm(t *testing.T, withMIG, tiers bool) {
	synctest.Test(t, func(t *testing.T) {
		s := newStorm(t, withMIG, tiers)
		steps := *stormSteps
		if tiers { // there are two of these
			steps /= 2
		}
		for i := range steps {
			if i%1000 == 0 && s.claims.turn > 0 {
				s.partition = s.throughBoth()
				if s.tiers {
					s.partition = s.spotted(s.partition)
				}
				s.agent.SetFile("p.yaml", []byte(s.partition))
			}
			s.turn(fmt.Sprint("step ", i))
			if i%1000 == 999 && !t.Failed() {
				s.calm()
			}
			if t.Failed() {
				lines := strings.Split(s.log.String(), "\n")
				t.Log(strings.Join(lines[max(0, len(lines)-90):], "\n"))
				break
			}
		}
		for _, tr := range s.agent.ledger.Passed() {
			if !slices.ContainsFunc(ledger.Transitions, func(in ledger.Step) bool { return in.Transition == tr }) {
				t.Errorf("an allocation went from %s to %s, which is not in the table", tr.From, tr.To)
			}
		}
		for _, what := range []string{"spot runs", "yielded", "yielded to a pod", "ended by the agent"} {
			if tiers && steps >= 20_000 && s.done[what] < steps/2000 && !t.Failed() {
				t.Errorf("%q happened %d times", what, s.done[what])
			}
		}
		s.quit()
		time.Sleep(time.Minute) // what the driver is in the middle of comes to its end
		t.Logf("%d steps: %v", steps, s.done)
	})
}

// TestRuntimeAnswersAfterItWasAsked is what a storm came upon once in a million steps,
// and took for a fault of the agent's: the file of a running container is gone with its
// GPU, the agent restarts, and the runtime, whom it asks in vain whose the container
// is, is back a moment later. The file stands again after the next look.
func TestRuntimeAnswersAfterItWasAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStorm(t, false, false)
		defer func() { s.quit() }()
		look := func(when string) {
			time.Sleep(deviceplugin.LookSoon)
			s.round(nil)
			synctest.Wait()
			s.check(when)
		}
		look("start")
		p := &stormPod{uid: "uid", name: "pod", parts: []stormPart{{"app", map[string]int{memResource: 1}}}}
		s.admit(p)
		look("admitted")
		s.startContainer(p)
		look("started")
		if len(s.containers) != 1 {
			t.Fatalf("the container has not started: %s", &s.log)
		}
		u := s.agent.Allocations()[0].GPUs()[0]
		trouble := func(why string) {
			s.locked(func() { s.trouble[u] = why })
			s.agent.loop.reader.faults.(*faults).onEvent(gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1})
		}
		trouble("GPU is lost")
		look("lost")
		if len(s.specs) != 0 {
			t.Fatal("a file stands for a container on a GPU that is lost")
		}
		s.quit()
		s.start()
		s.agent.SetFile("p.yaml", []byte(allShared))
		trouble("")
		s.down = true
		s.round(nil)
		s.down = false
		s.check("asked in vain")
		look("heard")
		if len(s.specs) != 1 {
			t.Errorf("the container's file does not stand after the runtime has answered: %s", &s.log)
		}
	})
}
