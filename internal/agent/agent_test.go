// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/cdi/dir"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/plugin"
)

// outside is everything that the loop speaks to, in memory but for the CDI
// directory.
type outside struct {
	// unheard says that nothing is heard of the Node when the agent starts.
	unheard bool
	// memory has the CDI files and the agent's own state, where it is set: a disk that others
	// keep busy takes its time to flush each.
	memory *memory
	caps   *pages
	unit   gpu.MiB // --memory-unit
	// neverReset, reclaim and keepOffering are Options.
	neverReset, reclaim, keepOffering bool
	hardware
	mu sync.Mutex // guards what follows
	// The driver.
	inv       *gpu.Inventory
	err       error
	partsErr  error
	partsGate chan struct{} // if set, Parts waits for it
	readings  int
	linksRead []gpu.Device // as the last Inventory had them
	slices    map[gpu.UUID]gpu.TimeSlice
	sliceErr  error
	sliceAsks int
	figures   map[gpu.UUID]gpu.Health
	hang      chan struct{} // if set, Inventory waits for it, or for its deadline
	left      *leftBehind   // nil where nothing is looked for
	able      *able         // nil where the driver is not asked for limits
	openCaps  bool
	mps       *supervised // nil where no supervisor is asked
	programs  *programs   // nil where nothing is lent
	letGo     bool
	letGoErr  error
	rounds    int
	// The kubelet and the runtime. What is held has an entry in the checkpoint and
	// a container that was made at the time in made.
	pods     []workload.Pod
	holdings []node.Holding
	made     map[string]time.Time
	// granted are the annotations that Allocate gave to containers.
	granted       map[string]string
	init          []node.Holding // only in the checkpoint: init containers that have ended
	entries       []node.Entry   // in the checkpoint until a list is sent again
	old           []node.Container
	deaf          bool // PodResources answers with nothing, as after a restart
	checkpointErr error
	runtimeErr    error
	stranger      bool // the runtime does not know the agent's own pod
	allocatable   map[string][]string
	asks          int    // for what is allocatable
	agent         *Agent // what the kubelet knows of ours is what this one offers,
	forgetful     bool   // unless it is forgetful
	fares         []plugin.Status
	suspected     []string
	sandboxes     map[string]workload.Pod // by pod UID
	prepared      []node.Prepared
	dra           *scheduled // nil where there is no DRA
	gpuNodes      *gpuNodes  // nil where there are none
	holdersIn     gpunode.HoldersIn
	// ended are containers that have ended, by ID, and yields how spot allocations give their room back;
	// nil where none does.
	ended  map[string]bool
	yields *yields
	parks  *parks // nil if no container is parked
	// The API server.
	patchErr    error
	labels      map[string]string
	marked      []map[string]string // labels, over time
	annotations map[string]string
	events      []string
	states      map[string]string  // the reason of the last State of each subject
	offered     []agentkube.Device // by DRA drivers
	offeredErr  error
	offeredAsks int

	condition agentkube.Condition // GPUHealthy
	// readies are GPUReady, over time, as "status reason".
	readies []string
	// guests are the Node's annotations below other domains; hold is HoldScaleDown.
	guests map[string]string
	hold   bool
	// untaints are requests to take the startup taint away, for these resources, and
	// untaintErr refuses them.
	untaints   []string
	untaintErr error
	boot       string

	sources   chan map[string]plugin.Source
	event     chan gpu.Event
	container chan node.ContainerEvent
}

// runtime is the container runtime's side of outside.
type runtime struct{ *outside }

func (o *outside) with(f func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f()
}

func (o *outside) Inventory(ctx context.Context) (gpu.Inventory, error) {
	o.mu.Lock()
	if hang := o.hang; hang != nil {
		o.mu.Unlock()
		select {
		case <-hang:
		case <-ctx.Done():
			return gpu.Inventory{}, fmt.Errorf("read it: %w", gpu.ErrTimeout)
		}
		o.mu.Lock()
	}
	defer o.mu.Unlock()
	o.readings++
	if o.err != nil {
		return gpu.Inventory{}, o.err
	}
	o.linksRead = slices.Clone(o.inv.GPUs)
	return gpu.Inventory{Driver: o.inv.Driver, Load: o.inv.Load, GPUs: slices.Clone(o.inv.GPUs)}, nil
}

func (o *outside) LinksChanged(context.Context) (bool, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !slices.EqualFunc(o.inv.GPUs, o.linksRead, func(a, b gpu.Device) bool { return slices.Equal(a.Links, b.Links) }), o.err
}

func (o *outside) Parts(context.Context) (cdi.Parts, error) {
	o.mu.Lock()
	gate := o.partsGate
	o.mu.Unlock()
	if gate != nil {
		<-gate
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return driverParts(o.inv), o.partsErr
}

func (o *outside) Events(ctx context.Context, fn func(gpu.Event)) error {
	for {
		select {
		case e := <-o.event:
			fn(e)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (o *outside) SetTimeSlice(_ context.Context, u gpu.UUID, s gpu.TimeSlice) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sliceAsks++
	if o.sliceErr == nil {
		o.slices[u] = s
	}
	return o.sliceErr
}

func (o *outside) Health(_ context.Context, u gpu.UUID) (gpu.Health, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.figures[u], nil
}

func (o *outside) LetGo() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.letGo = o.letGoErr == nil
	return o.letGoErr
}

func (o *outside) List(context.Context) (node.Listing, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.deaf {
		return node.Listing{}, nil
	}
	pods := slices.Clone(o.pods)
	for _, h := range o.holdings {
		pods = append(pods, workload.Pod{Namespace: h.Namespace, Name: h.Pod})
	}
	slices.SortFunc(pods, func(a, b workload.Pod) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	return node.Listing{Pods: slices.Compact(pods), Holdings: slices.Clone(o.holdings), Prepared: slices.Clone(o.prepared)}, nil
}

func (o *outside) Allocatable(context.Context) (map[string][]string, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.asks++
	return o.allocatableLocked(), nil
}

func (o *outside) allocatableLocked() map[string][]string {
	out := map[string][]string{}
	maps.Copy(out, o.allocatable)
	if o.agent == nil || o.forgetful {
		return out
	}
	for _, r := range o.agent.front.Offer().Resources {
		for _, d := range r.Devices {
			if d.Healthy {
				out[r.Name] = append(out[r.Name], d.ID)
			}
		}
	}
	return out
}

// plugins is the device plugins' side of outside.
type plugins struct{ *outside }

func (o plugins) Status() []plugin.Status {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.fares)
}

func (o *outside) Checkpoint() (node.Checkpoint, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	cp := node.Checkpoint{Entries: slices.Clone(o.entries), Registered: registered(o.allocatableLocked()), Stamp: o.stampLocked()}
	for _, h := range slices.Concat(o.init, o.holdings) {
		cp.Entries = append(cp.Entries, node.Entry{PodUID: "uid-" + h.Pod, Container: h.Container, Resource: h.Resource, IDs: h.IDs})
	}
	return cp, o.checkpointErr
}

// registered is what the kubelet writes of the devices that it would give out.
func registered(allocatable map[string][]string) map[string]node.Registered {
	out := map[string]node.Registered{}
	for resource, ids := range allocatable {
		sum := fnv.New64()
		fmt.Fprint(sum, ids)
		out[resource] = node.Registered{N: len(ids), Sum: sum.Sum64()}
	}
	return out
}

func (o *outside) Stamp() node.Stamp {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.stampLocked()
}

// stampLocked tells one checkpoint from another by what is in it.
func (o *outside) stampLocked() node.Stamp {
	sum := fnv.New64()
	fmt.Fprint(sum, o.init, o.holdings, o.entries, o.allocatableLocked())
	return node.Stamp{Inode: sum.Sum64(), MTime: 1}
}

func (o runtime) Containers(context.Context) (all []node.Container, err error) {
	o.with(func() { err = o.runtimeErr })
	if err == nil {
		all = o.containers()
	}
	return all, err
}

func (o runtime) containers() []node.Container {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := slices.Clone(o.old)
	if !o.stranger {
		out = append(out, node.Container{Namespace: ownPod.Namespace, Pod: ownPod.Name, Running: true})
	}
	for _, h := range o.holdings {
		if o.ended[h.Pod+h.Container] {
			continue
		}
		key := cdi.Key(h.Resource, h.IDs)
		name := cdi.AnnotationName("example.com", key)
		out = append(out, node.Container{ID: h.Pod + h.Container, PodUID: "uid-" + h.Pod, Namespace: h.Namespace, Pod: h.Pod, Name: h.Container,
			Running: true, Created: o.made[key], Annotations: map[string]string{name: o.granted[name]}})
	}
	return out
}

func (o runtime) Pods(context.Context) (map[string]workload.Pod, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.sandboxes), o.runtimeErr
}

func (o runtime) Events(ctx context.Context, fn func(node.ContainerEvent)) error {
	for {
		select {
		case e := <-o.container:
			fn(e)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (o *outside) Suspect(resource string) {
	o.with(func() { o.suspected = append(o.suspected, resource) })
}

func (o *outside) Withhold(bool) {}

// unwritten finds a name below the domain that is not in the list, as the
// admission policy does.
func unwritten(names iter.Seq[string], list []string) error {
	for name := range names {
		if !slices.ContainsFunc(list, func(n string) bool { return name == "example.com/"+n }) {
			return fmt.Errorf("%s is none of what Written says that the agent writes", name)
		}
	}
	return nil
}

func (o *outside) SetCondition(_ context.Context, c agentkube.Condition) error {
	if err := unwritten(slices.Values([]string{c.Type}), Written.Conditions); err != nil {
		panic(err)
	}
	o.with(func() {
		if word := string(c.Status) + " " + c.Reason; c.Type == "example.com/"+HealthCondition {
			o.condition = c
		} else if len(o.readies) == 0 || o.readies[len(o.readies)-1] != word {
			o.readies = append(o.readies, word)
		}
	})
	return nil
}

func (o *outside) RemoveStartupTaint(_ context.Context, resources []string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.untaints = append(o.untaints, strings.Join(resources, " "))
	return o.untaintErr
}

func (o *outside) Devices(_ context.Context, drivers ...string) ([]agentkube.Device, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.offeredAsks++
	return slices.DeleteFunc(slices.Clone(o.offered), func(d agentkube.Device) bool { return !slices.Contains(drivers, d.Driver) }), o.offeredErr
}

// Mark is a Node that nobody else writes to.
func (o *outside) Mark(_ context.Context, m agentkube.Marks) error {
	if err := errors.Join(unwritten(maps.Keys(m.Labels), Written.Labels), unwritten(maps.Keys(m.Annotations), Written.Annotations)); err != nil {
		panic(err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.patchErr != nil {
		return o.patchErr
	}
	labels := map[string]string{}
	if m.KeepLabels {
		maps.Copy(labels, o.labels)
	}
	maps.Copy(labels, m.Guests)
	maps.Copy(labels, m.Labels)
	o.labels, o.annotations, o.guests = labels, maps.Clone(m.Annotations), maps.Clone(m.GuestAnnotations)
	o.marked = append(o.marked, maps.Clone(labels))
	return nil
}

func (o *outside) Event(r workload.Pod, kind agentkube.EventType, reason, message string) {
	o.with(func() {
		o.events = append(o.events, strings.TrimSpace(r.Name+" "+string(kind)+" "+reason+": "+message))
	})
}

func (o *outside) State(subject string, kind agentkube.EventType, reason, message string) {
	o.with(func() {
		if o.states == nil {
			o.states = map[string]string{}
		}
		o.states[subject] = reason
	})
	o.Event(workload.Pod{}, kind, reason, message)
}

func (o *outside) Set(want map[string]plugin.Source) error {
	for {
		select {
		case o.sources <- want:
			return nil
		case <-o.sources:
		}
	}
}

func (o *outside) GPUEvent(gpu.Event)         {}
func (o *outside) Round(error, time.Duration) { o.with(func() { o.rounds++ }) }

// bench is an agent in the middle of it.
type bench struct {
	*outside
	*Agent
	t   *testing.T
	dir string
	log *logBuffer
	end func()
	// ended waits for the end of Run with that error.
	ended func(want error)
}

// logBuffer is a log that may be read while it is written.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

var ownPod = workload.Pod{Namespace: "gpu-agent", Name: "gpu-agent-x"}

func newOutside(gpus int) *outside {
	return &outside{ended: map[string]bool{},
		inv: machine(gpus), caps: &pages{}, unit: unit, slices: map[gpu.UUID]gpu.TimeSlice{}, pods: []workload.Pod{ownPod},
		labels: map[string]string{}, annotations: map[string]string{},
		boot: "this", made: map[string]time.Time{}, granted: map[string]string{}, figures: map[gpu.UUID]gpu.Health{},
		sources: make(chan map[string]plugin.Source, 1), event: make(chan gpu.Event), container: make(chan node.ContainerEvent),
	}
}

// start runs an agent on o and a CDI directory, and waits until it has nothing
// to do.
func start(t *testing.T, o *outside, cdiDir, file string) *bench {
	t.Helper()
	return startWith(t, o, cdiDir, file, nil)
}

func startWith(t *testing.T, o *outside, cdiDir, file string, f Features) *bench {
	t.Helper()
	var files Files = o.memory
	var store Store = o.memory
	leave := func() error { return nil }
	if o.memory == nil {
		onDisk, err := dir.Open(cdiDir, "example.com")
		if err != nil {
			t.Fatal(err)
		}
		kept, err := state.Open(filepath.Join(cdiDir, "..", filepath.Base(cdiDir)+"-state"), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		files, store, leave = onDisk, kept, kept.Close
	}
	b := &bench{outside: o, t: t, dir: cdiDir, log: &logBuffer{}}
	worlds := Worlds{GPUNodes: o.gpuNodes.world(), Driver: o, Files: files, Caps: o.caps, Kubelet: o, Runtime: runtime{o}, Plugins: plugins{o}, Store: store, Cluster: o, DRA: o.dra.worlds(), Features: f, Observer: o}
	if o.able != nil {
		worlds.Limits = o.able
	}
	if o.left != nil {
		worlds.Setups, worlds.PodOf = o.left, o.left.podOf
	}
	if o.mps != nil {
		worlds.MPS = o.mps
	}
	var grace time.Duration
	if k := o.parks; k != nil {
		worlds.Parking = &Parking{Keeper: k, Find: k.Find, Seen: k}
	}
	if y := o.yields; y != nil {
		worlds.End, worlds.Detach, worlds.Yields, grace = y.End, y.Detach, y, y.grace
		if y.evicts {
			worlds.Evict = y.Evict
		}
	}
	if o.programs != nil {
		worlds.Lending = &Lending{Pages: o.programs, Presence: o.programs.presence, Annotations: o.programs.annotationsOf}
	}
	b.Agent = New(Options{StateDir: "/state", MPS: o.mps != nil, YieldGrace: grace,
		Domain: "example.com", ResourceDomain: "example.com", MemoryUnit: o.unit, Node: "node-1", Pod: ownPod, Boot: o.boot,
		Labels: Labels{Own: true, Guest: true}, Align: deviceplugin.AlignFixed, LinksEvery: testLinks,
		Health:   health.Options{Ignored: health.DefaultIgnored, Hold: testHold, Probe: testHold / 4},
		OpenCaps: o.openCaps, HoldersIn: o.holdersIn, HoldScaleDown: o.hold, NeverReset: o.neverReset, ReclaimForeign: o.reclaim, KeepOffering: o.keepOffering,
		Log: slog.New(slog.NewTextHandler(b.log, nil)),
	}, worlds)
	o.with(func() { o.agent = b.Agent })
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.Agent.Run(ctx) }()
	b.end = func() {
		cancel()
		b.ended(context.Canceled)
	}
	b.ended = func(want error) {
		cancel()
		if err := <-done; !errors.Is(err, want) {
			t.Errorf("Run ended with %v, want %v", err, want)
		}
		if err := leave(); err != nil {
			t.Error(err)
		}
	}
	if !o.unheard {
		b.node(nil, false)
	}
	if file != "" {
		b.SetFile("p.yaml", []byte(file))
	}
	synctest.Wait()
	return b
}

// memory is a directory of CDI files and the agent's state, in memory. The state's methods
// are called by one goroutine.
type memory struct {
	mu          sync.Mutex // guards files and written
	files       map[string]*specs.Spec
	written     map[string]time.Time
	document    state.Document
	allocations []state.Allocation
}

func newMemory() *memory {
	return &memory{files: map[string]*specs.Spec{}, written: map[string]time.Time{}}
}

func (m *memory) Write(key string, spec *specs.Spec) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.files[key], m.written[key] = spec, time.Now()
	return nil
}

func (m *memory) Remove(key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.files, key)
	return nil
}

func (m *memory) List() ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return sortedKeys(m.files), nil
}

func (m *memory) Read(key string) (*specs.Spec, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.files[key] == nil {
		return nil, gpu.ErrNotFound
	}
	return m.files[key], nil
}

func (m *memory) Written(key string) (time.Time, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.written[key], nil
}

func (m *memory) Document() state.Document        { return m.document }
func (m *memory) Save(d state.Document) error     { m.document = d; return nil }
func (m *memory) Allocations() []state.Allocation { return slices.Clone(m.allocations) }
func (m *memory) Append(a state.Allocation) error {
	m.allocations = append(m.allocations, a)
	return nil
}
func (m *memory) Keep(all []state.Allocation) error {
	m.allocations = all
	return nil
}

// testHold is how long a GPU must be well before it is believed.
const testHold = 20 * time.Second

// node is what the Node object says.
func (b *bench) node(labels map[string]string, cordoned bool) {
	b.SetNode(agentkube.Node{Labels: labels, Unschedulable: cordoned})
}

func (b *bench) source(resource string) plugin.Source {
	b.t.Helper()
	want := <-b.sources
	b.sources <- want
	if want[resource] == nil {
		b.t.Fatalf("%s is not served", resource)
	}
	return want[resource]
}

func (b *bench) state() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.labels["example.com/gpu.partition.state"]
}

// message is the annotation that says why the state is what it is.
func (b *bench) message() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.annotations["example.com/gpu.partition.message"]
}

func (b *bench) want(state, units, whole string) {
	b.t.Helper()
	synctest.Wait()
	if got := b.state(); got != state {
		b.t.Errorf("state %q, want %q (%q)", got, state, b.message())
	}
	if got := listed(b.front.Offer(), memResource); got != units {
		b.t.Errorf("units %s, want %s", got, units)
	}
	if got := listed(b.front.Offer(), wholeResource); got != whole {
		b.t.Errorf("whole %s, want %s", got, whole)
	}
}

// hold allocates and lets the kubelet list it.
func (b *bench) hold(pod, resource string, ids ...string) {
	b.t.Helper()
	src := b.source(resource)
	grant, err := src.Allocate(ids)
	if err != nil {
		b.t.Fatal(err)
	}
	key := cdi.Key(resource, ids)
	if want := "example.com/gpu=" + key; len(grant.CDI) != 1 || grant.CDI[0] != want || !strings.Contains(grant.Annotations["example.com/gpu-allocation."+key], resource) {
		b.t.Errorf("grant %+v, want %s and its annotation", grant, want)
	}
	if err := src.Prepare(b.t.Context(), ids); err != nil {
		b.t.Fatal(err)
	}
	b.with(func() {
		maps.Copy(b.outside.granted, grant.Annotations)
		b.made[key] = time.Now().Add(time.Nanosecond)
		b.holdings = append(b.holdings, node.Holding{Namespace: "ns", Pod: pod, Container: "c", Resource: resource, IDs: ids})
	})
	synctest.Wait()
}

func (b *bench) files() []string {
	b.t.Helper()
	names, err := filepath.Glob(filepath.Join(b.dir, "*"))
	if err != nil {
		b.t.Fatal(err)
	}
	return names
}

const (
	allShared   = "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n"
	allWhole    = "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: whole\n"
	fourUnits   = "0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3"
	fourUnitsX  = "0.0x 0.1x 0.2x 0.3x 1.0x 1.1x 1.2x 1.3x"
	firstIsHeld = "0.0x 0.1~ 0.2~ 0.3x 1.0x 1.1x 1.2x 1.3x"
)

// The walk of DESIGN.md: an edit while a pod holds part of a GPU.
func TestEditWithAHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		b.want("applied", fourUnits, "")
		ids := []string{string(uuid(0)) + "::1", string(uuid(0)) + "::2"}
		b.hold("train-3", memResource, ids...)
		if n := len(b.files()); n != 1 {
			t.Fatalf("%d files, want the allocation's: %v", n, b.files())
		}
		time.Sleep(time.Minute) // the kubelet is asked, and names the holder

		b.SetFile("p.yaml", []byte(allWhole))
		b.want("blocked", firstIsHeld, "1")
		if m := b.message(); !strings.Contains(m, "GPU 0") || !strings.Contains(m, "ns/train-3") {
			t.Errorf("message %q does not name GPU and holder", m)
		}
		// The other GPU went ahead; nobody new gets onto the waiting one.
		if _, err := b.source(memResource).Allocate(ids[:1]); err == nil || !strings.Contains(err.Error(), "leaving") {
			t.Errorf("a leaving device was granted to somebody else: %v", err)
		}

		b.with(func() { b.holdings = nil })
		time.Sleep(deviceplugin.LookSoon)
		b.want("applied", fourUnitsX, "0 1")
		if n := len(b.files()); n != 0 {
			t.Errorf("the ended allocation left %v", b.files())
		}
		// GPU 0's units leave the list a minute after they were withdrawn.
		time.Sleep(plan.Linger)
		b.want("applied", "", "0 1")
		if events := strings.Join(b.events, "\n"); strings.Count(events, "GPUPartitionBlocked") != 1 || strings.Count(events, "GPUPartitionApplied") != 2 {
			t.Errorf("events:\n%s", events)
		}
	})
}

func TestBadFileChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), "")
		defer b.end()
		b.want("", "", "") // nothing is said before anything is known
		b.SetFile("p.yaml", []byte(allShared))
		b.want("applied", fourUnits, "")
		for _, bad := range []string{
			"version: v1\npartitions:\n  default:\n    - devices: all\n      mode: quarter\n",
			"version: v1\npartitions:\n  default:\n    - devices: [7]\n      mode: whole\n",
			"version: v1\npartitions:\n  default:\n    - devices: all\n      mode: mig\n",
		} {
			b.SetFile("p.yaml", []byte(bad))
			b.want("invalid", fourUnits, "")
			m := b.message()
			if !strings.Contains(m, "p.yaml:") || !strings.Contains(m, "last good") {
				t.Errorf("message %q names no line, or not what stays", m)
			}
			if e := b.events[len(b.events)-1]; !strings.Contains(e, "Warning GPUPartitionInvalid: ") || !strings.Contains(e, "p.yaml:") {
				t.Errorf("the last Event is %q", e)
			}
		}
		b.SetFileMissing(errors.New("there is no ConfigMap"))
		b.want("invalid", fourUnits, "")
		b.SetFile("p.yaml", []byte(allShared))
		b.want("applied", fourUnits, "")
		if got := b.states["partition"]; got != "GPUPartitionApplied" || len(b.states) != 1 {
			t.Errorf("the states that Events tell are %v", b.states)
		}
	})
}

// An allocation has its file without PreStartContainer, which a kubelet that has restarted does
// not call before the plugin has registered again. It keeps it, also when the agent starts anew
// and no witness can say that the devices are its own.
func TestFileStaysWhereNoWitnessAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		b := start(t, o, dir, allShared)
		if _, err := b.source(memResource).Allocate([]string{string(uuid(0)) + "::1"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(answerTime)
		synctest.Wait()
		if n := len(b.files()); n != 1 {
			t.Fatalf("%d files, want the allocation's: %v", n, b.files())
		}
		b.end()
		o.with(func() { o.checkpointErr, o.runtimeErr = errors.New("away"), errors.New("away") })
		b = start(t, o, dir, allShared)
		defer b.end()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(b.files()); n != 1 || len(b.Allocations()) != 1 {
			t.Errorf("%d allocations and the files %v, want one of each", len(b.Allocations()), b.files())
		}
	})
}

// A new process takes allocations over from the CDI files, before the kubelet lists
// anything, and does not lay out what is held.
func TestRestartTakesAllocationsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(2), t.TempDir()
		b := start(t, o, cdiDir, allShared)
		ids := []string{string(uuid(0)) + "::1", string(uuid(0)) + "::2"}
		b.hold("train-3", memResource, ids...)
		before, err := os.ReadFile(b.files()[0])
		if err != nil {
			t.Fatal(err)
		}
		b.end()

		// Partitions may not be had, the API server being away: a container of
		// before starts again all the same.
		b = start(t, o, cdiDir, "")
		if err := b.front.Prepare(t.Context(), memResource, ids); err != nil {
			t.Errorf("without partitions the container cannot start again: %v", err)
		}
		b.end()

		o.with(func() { o.deaf = true }) // the kubelet has restarted too
		b = start(t, o, cdiDir, allWhole)
		defer b.end()
		// What the one before offered is listed a while longer.
		b.want("blocked", "0.0x 0.1~ 0.2~ 0.3x 1.0x 1.1x 1.2x 1.3x", "1")
		time.Sleep(2 * deviceplugin.UnnamedTTL) // nothing is judged by a list that lacks the agent's own pod
		b.want("blocked", "0.0x 0.1~ 0.2~ 0.3x", "1")
		after, err := os.ReadFile(b.files()[0])
		if err != nil || !bytes.Equal(before, after) {
			t.Errorf("the allocation's file changed: %v", err)
		}
		if err := b.source(memResource).Prepare(t.Context(), ids); err != nil {
			t.Errorf("the container cannot start again: %v", err)
		}
		o.with(func() { o.deaf = false })
		time.Sleep(deviceplugin.LookSoon)
		synctest.Wait()
		if c := b.Allocations(); len(c) != 1 || c[0].Holder.Name != "train-3" {
			t.Errorf("allocations %+v", c)
		}
	})
}

func TestLostGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		const secondIsSick = "0.0 0.1 0.2 0.3 1.0x 1.1x 1.2x 1.3x"
		b.hold("train-3", memResource, string(uuid(1))+"::1")
		time.Sleep(holdersEvery)
		b.with(func() { b.outside.inv.GPUs[1].Fault = "GPU is lost" })
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(1), Xid: 79, GI: -1, CI: -1}
		b.want("applied", secondIsSick, "")
		if c := b.condition; c.Type != "example.com/GPUHealthy" || c.Status != agentkube.False || !strings.Contains(c.Message, "GPU 1") {
			t.Errorf("condition %+v", c)
		}
		events := strings.Join(b.events, "\n")
		if !strings.Contains(events, "\nWarning GPUUnhealthy: GPU 1") || !strings.Contains(events, "\ntrain-3 Warning GPUUnhealthy: GPU 1") {
			t.Errorf("events:\n%s", events)
		}
		b.with(func() { b.outside.inv.GPUs = b.outside.inv.GPUs[:1] }) // and off the bus
		time.Sleep(inventoryEvery)
		b.want("applied", secondIsSick, "")
		b.with(func() { b.outside.inv = machine(2) })
		time.Sleep(inventoryEvery + testHold)
		b.want("applied", fourUnits, "")
		if c := b.condition; c.Status != agentkube.True {
			t.Errorf("condition %+v", c)
		}
		if events := strings.Join(b.events, "\n"); !strings.Contains(events, "Normal GPURecovered: GPU 1") {
			t.Errorf("events:\n%s", events)
		}
		for subject, reason := range b.states { // each fault's last Event tells that it is over
			if reason != "GPURecovered" && reason != "GPUPartitionApplied" {
				t.Errorf("the last Event about %s is %s", subject, reason)
			}
		}

		b.with(func() { b.err = fmt.Errorf("init: %w", gpu.ErrNoDriver) })
		time.Sleep(inventoryEvery)
		b.want("failed", fourUnitsX, "")
		b.with(func() { b.err = nil })
		time.Sleep(backOffMax)
		b.want("applied", fourUnits, "")
	})
}

// A fault that is over before anybody asks for the status is in the log.
func TestShortFaultIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		b.with(func() { b.outside.inv.GPUs[1].Fault = "Unknown Error" })
		b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1} // read it
		synctest.Wait()
		b.with(func() { b.outside.inv = machine(2) })
		time.Sleep(inventoryEvery + testHold)
		b.want("applied", fourUnits, "")
		for _, line := range []string{
			`msg="GPU is unhealthy" gpu=` + string(uuid(1)) + ` gi=-1 ci=-1 class=unreadable reason="unreadable: Unknown Error`,
			`msg="GPU fault is over" gpu=` + string(uuid(1)) + ` gi=-1 ci=-1 class=unreadable`,
		} {
			if log := b.log.String(); strings.Count(log, line) != 1 {
				t.Errorf("the log has not one %s:\n%s", line, log)
			}
		}
	})
}

// A GPU that leaves is kept for its holder, and then on as what is missing, until
// it is back or the machine boots anew.
func TestGPULeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		b := start(t, o, dir, allShared)
		const secondIsGone = "0.0 0.1 0.2 0.3 1.0x 1.1x 1.2x 1.3x"
		b.hold("train-3", memResource, string(uuid(1))+"::1")
		// The driver's package remembers it, and says so each time.
		b.with(func() { b.outside.inv.GPUs[1].Fault, b.outside.inv.GPUs[1].Gone = "not listed", true })
		b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
		b.want("applied", secondIsGone, "")
		time.Sleep(10 * time.Minute)
		b.with(func() { b.holdings = nil })
		time.Sleep(10 * time.Minute)
		b.want("applied", secondIsGone, "")
		b.with(func() { b.outside.inv = machine(2) })
		b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
		time.Sleep(2 * testHold)
		b.want("applied", fourUnits, "")
		if c := b.condition; c.Status != agentkube.True {
			t.Errorf("condition %+v", c)
		}

		b.with(func() { b.outside.inv = machine(1) })
		b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
		b.want("applied", secondIsGone, "")
		b.end()
		b = start(t, o, dir, allShared) // it is missed after a restart too
		b.want("applied", secondIsGone, "")
		b.end()
		o.boot = "another"
		b = start(t, o, dir, allShared)
		defer b.end()
		b.want("applied", "0.0 0.1 0.2 0.3", "")
	})
}

// A call that hangs holds up hardware work, and nothing else.
func TestDriverHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		hang := make(chan struct{})
		b.with(func() { b.hang = hang })
		time.Sleep(inventoryEvery + 2*driverPatience)
		b.hold("train-3", memResource, string(uuid(1))+"::1")
		b.want("applied", fourUnits, "")
		if c := b.condition; c.Status != agentkube.Unknown || !strings.Contains(c.Message, "hardware work waits") {
			t.Errorf("condition %+v", c)
		}
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 94, GI: -1, CI: -1}
		b.want("applied", "0.0x 0.1x 0.2x 0.3x 1.0 1.1 1.2 1.3", "")
		b.with(func() { b.hang = nil })
		close(hang)
		time.Sleep(10 * time.Minute)
		b.want("applied", fourUnits, "")
		if c := b.condition; c.Status != agentkube.True {
			t.Errorf("condition %+v", c)
		}
	})
}

// A reading that took longer than a round waits for counts when it comes, and not
// when chance has it.
func TestSlowReadingCountsAtOnce(t *testing.T) {
	for range 10 {
		synctest.Test(t, func(t *testing.T) {
			o := newOutside(2)
			o.hang = make(chan struct{})
			b := start(t, o, t.TempDir(), allShared)
			defer b.end()
			time.Sleep(lookPatience + lookPatience/2)
			close(o.hang)
			b.want("applied", fourUnits, "")
		})
	}
}

// A fault outlives the process that saw it.
func TestFaultIsRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		b := start(t, o, dir, allShared)
		b.with(func() { n := uint64(1); b.figures[uuid(0)] = gpu.Health{Uncorrected: &n} })
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 48, GI: -1, CI: -1}
		b.want("applied", "0.0x 0.1x 0.2x 0.3x 1.0 1.1 1.2 1.3", "")
		b.end()
		b = start(t, o, dir, allShared)
		defer b.end()
		b.want("applied", "0.0x 0.1x 0.2x 0.3x 1.0 1.1 1.2 1.3", "")
		b.with(func() { n := uint64(0); b.figures[uuid(0)] = gpu.Health{Uncorrected: &n} }) // it was reset
		time.Sleep(10 * time.Minute)
		b.want("applied", fourUnits, "")
	})
}

// A process that starts on a machine whose driver is gone, or whose GPU is, knows
// what it offered: the IDs that pods hold stay listed.
func TestStartWithoutHardware(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		b := start(t, o, dir, allShared)
		b.want("applied", fourUnits, "")
		b.end()
		b.with(func() { b.err = fmt.Errorf("init: %w", gpu.ErrNoDriver) })
		b = start(t, o, dir, allShared)
		b.want("failed", fourUnitsX, "")
		b.end()
		b.with(func() { b.err, b.outside.inv.GPUs[1] = nil, gpu.Device{Index: 1, Fault: "GPU is lost", Lost: true} })
		b = start(t, o, dir, allShared)
		defer b.end()
		time.Sleep(2 * testHold)
		b.want("applied", "0.0 0.1 0.2 0.3 1.0x 1.1x 1.2x 1.3x", "")
	})
}

// The node's label has the agent let go of the driver; what it offers is withdrawn,
// what is held stays, and the process that may take it back is another.
func TestDriverIsLetGo(t *testing.T) {
	for name, want := range map[string]struct {
		labels   map[string]string
		cordoned bool
		letGo    bool
	}{
		"NVIDIA's upgrade":            {labels: map[string]string{"nvidia.com/gpu-driver-upgrade-state": "pod-restart-required"}, letGo: true},
		"NVIDIA's upgrade, done":      {labels: map[string]string{"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"}},
		"NVIDIA's driver manager":     {labels: map[string]string{"nvidia.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"}, letGo: true},
		"a value of its own, paused":  {labels: map[string]string{"nvidia.com/gpu.deploy.client": "batch_paused-for-driver-upgrade"}, letGo: true},
		"a value of its own":          {labels: map[string]string{"nvidia.com/gpu.deploy.client": "batch"}},
		"not of the operator's":       {labels: map[string]string{"example.org/client": "paused-for-driver-upgrade"}},
		"our label on a cordoned one": {labels: map[string]string{"example.com/gpu.driver-release": "true"}, cordoned: true, letGo: true},
		"our label alone":             {labels: map[string]string{"example.com/gpu.driver-release": "true"}},
		"a cordon alone":              {cordoned: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(2)
				b := start(t, o, t.TempDir(), allShared)
				b.hold("train-3", memResource, string(uuid(1))+"::1")
				b.node(want.labels, want.cordoned)
				synctest.Wait()
				if o.letGo != want.letGo {
					t.Fatalf("let go: %v, want %v", o.letGo, want.letGo)
				}
				if !want.letGo {
					b.want("applied", fourUnits, "")
					b.end()
					return
				}
				before := o.readings
				time.Sleep(10 * time.Minute)
				b.want("pending", fourUnitsX, "")
				if len(b.Allocations()) != 1 || len(b.files()) != 1 || o.readings != before {
					t.Errorf("%d allocations, files %v, %d readings", len(b.Allocations()), b.files(), o.readings-before)
				}
				b.node(nil, false)
				synctest.Wait()
				b.ended(gpu.ErrReloaded)
			})
		})
	}
}

// To learn what containers need of the driver takes a while. Neither a fault
// nor the first offer waits for that; a container does.
func TestNothingButContainersWaitsForParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		gate := make(chan struct{})
		o.partsGate = gate
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		if got := listed(b.front.Offer(), memResource); got != fourUnits {
			t.Errorf("units %s, want %s", got, fourUnits)
		}
		ids := []string{string(uuid(0)) + "::1"}
		if _, err := b.source(memResource).Allocate(ids); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := b.source(memResource).Prepare(ctx, ids); !errors.Is(err, ledger.ErrNotOpen) {
			t.Errorf("a container without parts: %v, want ledger.ErrNotOpen", err)
		}
		close(gate)
		if err := b.source(memResource).Prepare(t.Context(), ids); err != nil {
			t.Error(err)
		}

		gate = make(chan struct{})
		b.with(func() { b.partsGate, b.outside.inv.GPUs[1].Fault = gate, "GPU is lost" })
		b.event <- gpu.Event{Kind: gpu.EventLost}
		synctest.Wait()
		if got, want := listed(b.front.Offer(), memResource), "0.0 0.1 0.2 0.3 1.0x 1.1x 1.2x 1.3x"; got != want {
			t.Errorf("units %s, want %s", got, want)
		}
		close(gate)
		b.want("applied", "0.0 0.1 0.2 0.3 1.0x 1.1x 1.2x 1.3x", "")
	})
}

// A node without a driver says so, and offers its GPUs when there is one.
func TestDriverComesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.err = fmt.Errorf("open: %w", gpu.ErrNoDriver)
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("failed", "", "")
		if b.Ready() == nil {
			t.Error("ready without a GPU")
		}
		b.with(func() { b.err = nil })
		time.Sleep(backOffMax)
		b.want("applied", "0.0 0.1 0.2 0.3", "")
	})
}

// Without the driver files a container cannot be made: nothing is offered, with
// the reason, until they are there.
func TestNothingIsOfferedWithoutParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.partsErr = errors.New("the CDI hook program is missing")
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("failed", "0.0x 0.1x 0.2x 0.3x", "")
		if r := b.front.Offer().Resources[0].Devices[0].Reason; !strings.Contains(r, "hook program is missing") {
			t.Errorf("reason %q", r)
		}
		b.with(func() { b.outside.partsErr = nil })
		time.Sleep(backOffMax)
		b.want("applied", "0.0 0.1 0.2 0.3", "")
	})
}

func TestTimeSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		short := allShared + "      timeSlice: short\n"
		b := start(t, newOutside(1), t.TempDir(), short)
		defer b.end()
		b.want("applied", "0.0 0.1 0.2 0.3", "")
		if got := b.outside.slices[uuid(0)]; got != gpu.TimeSliceShort {
			t.Errorf("slice %q", got)
		}
		b.SetFile("p.yaml", []byte(allShared)) // what was set is put back
		synctest.Wait()
		if got := b.outside.slices[uuid(0)]; got != gpu.TimeSliceDefault || b.sliceAsks != 2 {
			t.Errorf("slice %q after %d calls", got, b.sliceAsks)
		}
		b.with(func() { b.sliceErr = fmt.Errorf("no tool: %w", gpu.ErrNotSupported) })
		b.SetFile("p.yaml", []byte(short))
		b.want("applied", "0.0 0.1 0.2 0.3", "")
		if m := b.message(); !strings.Contains(m, "not supported") {
			t.Errorf("message %q", m)
		}
		time.Sleep(10 * time.Minute)
		if b.sliceAsks != 3 {
			t.Errorf("asked %d times for what is not supported", b.sliceAsks)
		}
	})
}

// Allocate and GetPreferredAllocation never reach the driver, nor does the work
// that an allocation makes for the loop.
func TestAllocationsCostNoDriverCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		before := b.readings
		src := b.source(memResource)
		for n := range 4 {
			ids := []string{fmt.Sprintf("%s::%d", uuid(0), n)}
			if _, err := src.Prefer(ids, nil, 1); err != nil {
				t.Fatal(err)
			}
			b.hold(fmt.Sprint("p", n), memResource, ids...)
		}
		if b.readings != before {
			t.Errorf("%d readings of the driver for four allocations", b.readings-before)
		}
	})
}

// The node's label is written again when the API server was away.
func TestReportIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.patchErr = errors.New("the API server is away")
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		time.Sleep(5 * time.Minute)
		if got := b.state(); got != "" {
			t.Errorf("state %q", got)
		}
		b.with(func() { b.patchErr = nil })
		time.Sleep(backOffMax)
		b.want("applied", "0.0 0.1 0.2 0.3", "")
	})
}

func TestStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		b.hold("a", memResource, string(uuid(1))+"::3", string(uuid(1))+"::0")
		s := b.Status()
		g := s.GPUs[1]
		if g.Mode != "shared" || g.Resource != memResource || g.UnitMiB != 1024 || g.Total != 4 || g.Used != 2 || g.Free != 2 || g.Unhealthy != 0 || len(g.Holders) != 1 || g.Holders[0].Units != 2 {
			t.Errorf("GPU 1: %+v", g)
		}
		if s.Partition.State != "applied" || s.Partition.Source != "p.yaml" || s.Allocations != 1 || s.GPUs[0].Used != 0 {
			t.Errorf("status: %+v", s)
		}
		if err := b.Ready(); err != nil {
			t.Errorf("not ready: %v", err)
		}
	})
}
