// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/cdi/dir"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

// patience ends a test that waits for what never comes. It is no expectation
// of how long anything takes.
const patience = 2 * time.Minute

// Caps is what a test may do on the machine that it runs on.
type Caps struct {
	// Hold starts a process that has at least so much memory on a GPU, and
	// returns its PID once the driver has given it; end ends it. An error says
	// what the machine lacks, and the test is skipped with it.
	Hold func(ctx context.Context, u gpu.UUID, amount gpu.MiB) (pid int, end func(), err error)
	// Busy starts a process that keeps a GPU's multiprocessors busy until end, and otherwise
	// is like Hold.
	Busy func(ctx context.Context, u gpu.UUID) (pid int, end func(), err error)
	// TimeSlice permits changing a GPU's time slice; it is put back to the
	// default.
	TimeSlice bool
	// Instances permits making MIG instances on GPUs that are in MIG mode and idle,
	// where nothing stands; they are destroyed again.
	Instances bool
	// Partial says that this is a container with some of the driver's files
	// only: it need not have all that a node has.
	Partial bool
}

// Conformance holds the driver that opts lead to against what the agent relies
// on.
func Conformance(t *testing.T, opts nvml.Options, caps Caps) {
	t.Run("Inventory", func(t *testing.T) { inventory(t, opts) })
	t.Run("Links", func(t *testing.T) { links(t, opts) })
	t.Run("Places", func(t *testing.T) { places(t, opts) })
	t.Run("Matrix", func(t *testing.T) { topo(t, opts) })
	t.Run("MIG", func(t *testing.T) { mig(t, opts) })
	t.Run("Instances", func(t *testing.T) { instances(t, opts, caps) })
	t.Run("Capabilities", func(t *testing.T) { capabilities(t, opts) })
	t.Run("Memory", func(t *testing.T) { memory(t, opts) })
	t.Run("Health", func(t *testing.T) { health(t, opts) })
	t.Run("Setup", func(t *testing.T) { setup(t, opts) })
	t.Run("Processes", func(t *testing.T) { processes(t, opts, caps) })
	t.Run("Utilization", func(t *testing.T) { utilization(t, opts, caps) })
	t.Run("EventsEnd", func(t *testing.T) { eventsEnd(t, opts) })
	t.Run("UnknownGPU", func(t *testing.T) { unknownGPU(t, opts) })
	t.Run("Parts", func(t *testing.T) { parts(t, opts, caps) })
	t.Run("TimeSlice", func(t *testing.T) { timeSlice(t, opts, caps) })
	t.Run("MemoryLimit", func(t *testing.T) { memoryLimit(t, opts) })
	t.Run("Parallel", func(t *testing.T) { parallel(t, opts) })
	t.Run("Reopen", func(t *testing.T) { reopen(t, opts) })
}

// OptionsOf are those for the driver below a root. Where that has a /proc, as an emulated
// driver's has, GPUs are looked for in its /proc and /sys.
func OptionsOf(root string) nvml.Options {
	opts := nvml.Options{DriverRoot: root}
	if _, err := os.Stat(filepath.Join(root, "proc/devices")); err == nil && root != "/" {
		opts.ProcRoot, opts.SysRoot = filepath.Join(root, "proc"), filepath.Join(root, "sys")
	}
	return opts
}

// Open opens the driver for a test and closes it at the test's end.
func Open(t *testing.T, opts nvml.Options) *nvml.Driver {
	t.Helper()
	d, err := nvml.Open(wait(t), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func wait(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// Await polls until a condition holds.
func Await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx := wait(t)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("in vain awaited that %s", what)
		case <-tick.C:
		}
	}
}

// read reads the inventory and requires that there is something to test.
func read(t *testing.T, d *nvml.Driver) gpu.Inventory {
	t.Helper()
	inv, err := d.Inventory(wait(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(inv.GPUs) == 0 {
		t.Skip("skipped: the driver lists no GPU")
	}
	return inv
}

var (
	versionForm = regexp.MustCompile(`^\d+\.\d+(\.\d+)?$`)
	cudaForm    = regexp.MustCompile(`^\d+\.\d+$`)
	uuidForm    = regexp.MustCompile(`^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	migUUIDForm = regexp.MustCompile(`^MIG-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	pciForm     = regexp.MustCompile(`^[0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`)
	idForm      = regexp.MustCompile(`^0x[0-9A-F]{8}$`)
	profileForm = regexp.MustCompile(`^\d+g\.\d+gb([+-][a-z.]+)?$`)
)

func inventory(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	inv := read(t, d)
	if !versionForm.MatchString(inv.Driver) || !cudaForm.MatchString(inv.CUDA) {
		t.Errorf("driver %q, CUDA %q", inv.Driver, inv.CUDA)
	}
	uuids, minors, addresses := map[gpu.UUID]bool{}, map[int]bool{}, map[string]bool{}
	for i, dev := range inv.GPUs {
		t.Logf("%d: %s %s, minor %d, %s, %d MiB of which %d reserved", dev.Index, dev.UUID, dev.Model, dev.Minor, dev.PCI, dev.Memory, dev.Reserved)
		if dev.Fault != "" {
			t.Errorf("GPU %d has a fault: %s", i, dev.Fault)
			continue
		}
		if dev.Index != i {
			t.Errorf("GPU %d stands at %d", dev.Index, i)
		}
		if !uuidForm.MatchString(string(dev.UUID)) || !pciForm.MatchString(dev.PCI) ||
			!idForm.MatchString(dev.PCIDevice) || !idForm.MatchString(dev.PCISubsystem) || !cudaForm.MatchString(dev.ComputeCapability) || dev.Model == "" {
			t.Errorf("GPU %d is badly named: %+v", i, dev)
		}
		if dev.Memory == 0 || dev.Usable() == 0 {
			t.Errorf("GPU %d has %d MiB, %d reserved", i, dev.Memory, dev.Reserved)
		}
		if dev.NUMA != nil && *dev.NUMA < 0 {
			t.Errorf("GPU %d on NUMA node %d", i, *dev.NUMA)
		}
		if uuids[dev.UUID] || minors[dev.Minor] || addresses[dev.PCI] {
			t.Errorf("GPU %d shares its UUID, minor number or address with another: %+v", i, dev)
		}
		uuids[dev.UUID], minors[dev.Minor], addresses[dev.PCI] = true, true, true
	}

	again := read(t, d)
	if !reflect.DeepEqual(settled(inv), settled(again)) {
		t.Errorf("two readings differ:\n%+v\n%+v", inv, again)
	}
	// A caller may do with its copy what it likes.
	for i := range again.GPUs {
		dev := &again.GPUs[i]
		for j := range dev.Links {
			dev.Links[j] = gpu.Link{To: -1}
		}
		for j := range dev.MIG.Profiles {
			for k := range dev.MIG.Profiles[j].Placements {
				dev.MIG.Profiles[j].Placements[k] = gpu.Placement{Start: -1}
			}
			dev.MIG.Profiles[j].Name = "changed"
		}
		if dev.NUMA != nil {
			*dev.NUMA = -1
		}
		if dev.Fabric != nil {
			dev.Fabric.Cluster = "changed"
		}
		for j := range dev.Path {
			dev.Path[j] = "changed"
		}
	}
	for i := range again.NUMA {
		again.NUMA[i].ID = -1
	}
	for i := range again.NICs {
		nic := &again.NICs[i]
		if nic.Name = "changed"; nic.NUMA != nil {
			*nic.NUMA = -1
		}
		for j := range nic.Path {
			nic.Path[j] = "changed"
		}
	}
	if third := read(t, d); !reflect.DeepEqual(settled(inv), settled(third)) {
		t.Errorf("a change of one reading shows in the next:\n%+v\n%+v", inv, third)
	}
}

// settled is an inventory without what others' work may change meanwhile.
func settled(inv gpu.Inventory) gpu.Inventory {
	inv.GPUs = slices.Clone(inv.GPUs)
	for i := range inv.GPUs {
		m := &inv.GPUs[i].MIG
		m.Instances = slices.Clone(m.Instances)
		for j := range m.Instances {
			m.Instances[j].Busy = false
		}
	}
	return inv
}

func mig(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	inv := read(t, d)
	capable := false
	for _, dev := range inv.GPUs {
		m := dev.MIG
		if !m.Capable {
			if m.Enabled || len(m.Profiles) > 0 || len(m.Instances) > 0 {
				t.Errorf("GPU %d is not capable of MIG and says %+v", dev.Index, m)
			}
			continue
		}
		capable = true
		if len(m.Profiles) == 0 {
			t.Errorf("GPU %d is capable of MIG and has no profile", dev.Index)
		}
		names, ids := map[string]bool{}, map[int]bool{}
		for _, p := range m.Profiles {
			if !profileForm.MatchString(p.Name) || names[p.Name] || ids[p.ID] {
				t.Errorf("GPU %d: profile %q with ID %d is malformed or there twice", dev.Index, p.Name, p.ID)
			}
			names[p.Name], ids[p.ID] = true, true
			if p.Engines == nil || min(p.Engines.Copy, p.Engines.Decode, p.Engines.Encode, p.Engines.JPEG, p.Engines.OFA) < 0 {
				t.Errorf("GPU %d: profile %s has engines %+v", dev.Index, p.Name, p.Engines)
			}
			if p.Memory == 0 || p.Memory > dev.Memory || p.Slices < 1 || p.SMs < 1 || p.Max < 1 {
				t.Errorf("GPU %d of %d MiB: profile %+v", dev.Index, dev.Memory, p)
			}
			if len(p.Placements) == 0 && m.Enabled {
				t.Errorf("GPU %d: profile %s has no placement, with MIG on", dev.Index, p.Name)
			}
			for i, at := range p.Placements {
				if at.Start < 0 || at.Size < 1 || i > 0 && at.Start <= p.Placements[i-1].Start {
					t.Errorf("GPU %d: profile %s has placements %+v", dev.Index, p.Name, p.Placements)
				}
			}
		}
		for _, in := range m.Instances {
			if in.UUID != "" && !migUUIDForm.MatchString(string(in.UUID)) {
				t.Errorf("GPU %d: instance %+v has a malformed UUID", dev.Index, in)
			}
			name := in.Profile
			if _, whole, ok := strings.Cut(name, "c."); ok {
				name = whole
			}
			if !names[name] {
				t.Errorf("GPU %d: instance %+v is of no profile", dev.Index, in)
			}
			if (in.CI < 0) != (in.UUID == "") || in.GI < 0 || in.Size < 1 || in.CIStart < 0 {
				t.Errorf("GPU %d: instance %+v", dev.Index, in)
			}
		}
		if alone, err := d.MIG(wait(t), dev.UUID); err != nil || !reflect.DeepEqual(alone.Profiles, m.Profiles) || alone.Enabled != m.Enabled || len(alone.Instances) != len(m.Instances) {
			t.Errorf("GPU %d: read alone its MIG side is %+v, %v; with the others %+v", dev.Index, alone, err, m)
		}
	}
	if !capable {
		t.Skip("skipped: no GPU is capable of MIG")
	}
}

// memoryOf is one GPU's memory now.
func memoryOf(t *testing.T, d *nvml.Driver, u gpu.UUID) (gpu.Memory, error) {
	of, err := d.Memory(wait(t), u)
	return of[u], err
}

func memory(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	for _, dev := range read(t, d).GPUs {
		m, err := memoryOf(t, d, dev.UUID)
		if err != nil {
			t.Error(err)
			continue
		}
		// Each amount is rounded to a MiB by itself.
		sum := m.Reserved + m.Used + m.Free
		if m.Total == 0 || m.Total+1 < m.Reserved+m.Used || m.Free > m.Total || sum > m.Total+1 || sum+3 < m.Total {
			t.Errorf("%s: %+v", dev.UUID, m)
		}
		if m.Total != dev.Memory || m.Reserved != dev.Reserved {
			t.Errorf("%s: %+v, but the inventory has %d and %d", dev.UUID, m, dev.Memory, dev.Reserved)
		}
	}
}

// health is what the driver keeps of faults; of a GPU that describes itself it must
// be readable, whatever the card counts.
func health(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	for _, dev := range read(t, d).GPUs {
		h, err := d.Health(wait(t), dev.UUID)
		if err != nil {
			if dev.Fault == "" {
				t.Errorf("%s: %v", dev.UUID, err)
			}
			continue
		}
		count := "not counted"
		if h.Uncorrected != nil {
			count = strconv.FormatUint(*h.Uncorrected, 10)
		}
		t.Logf("%s: uncorrected errors %s, remapping pending %v failed %v, retirement pending %v, recovery %q",
			dev.UUID, count, h.Remap != nil && h.Remap.Pending, h.Remap != nil && h.Remap.Failed, h.RetirePending, h.Recovery)
	}
}

// setup is how earlier owners have set each GPU: readable, of the values that are known, and
// nothing of it changes by being read.
func setup(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	for _, dev := range read(t, d).GPUs {
		if dev.Fault != "" {
			continue
		}
		s, err := d.Setup(wait(t), dev.UUID)
		if err != nil {
			t.Errorf("%s: %v", dev.UUID, err)
		}
		if strings.Contains(string(s.Compute), "mode") || dev.MIG.Enabled && s.Compute != gpu.ComputeUnknown {
			t.Errorf("%s: compute mode %q, with MIG mode %v", dev.UUID, s.Compute, dev.MIG.Enabled)
		}
		if (s.ECC == nil) != (s.ECCPending == nil) {
			t.Errorf("%s: ECC is %v, and will be %v: want both or neither", dev.UUID, s.ECC, s.ECCPending)
		}
		if h, err := d.Health(wait(t), dev.UUID); err != nil || h.Recovery != s.Recovery {
			t.Errorf("%s: recovery %q, of its health %q, %v", dev.UUID, s.Recovery, h.Recovery, err)
		}
		again, err := d.Setup(wait(t), dev.UUID)
		s.Processes, again.Processes = nil, nil // these come and go
		s.ClockHeld, again.ClockHeld = false, false
		if err != nil || !reflect.DeepEqual(s, again) {
			t.Errorf("%s: read again it is\n%+v, %v, before\n%+v", dev.UUID, again, err, s)
		}
		t.Logf("%s: compute mode %q, power %+v, clock %+v, fabric %q", dev.UUID, s.Compute, s.Power, s.Clock, s.Fabric)
	}
}

func processes(t *testing.T, opts nvml.Options, caps Caps) {
	d := Open(t, opts)
	// Sizes differ, so that one GPU's process is not taken for another's.
	amount := gpu.MiB(256)
	for _, dev := range read(t, d).GPUs {
		if dev.MIG.Enabled {
			t.Logf("%s is in MIG mode: its instances, not the GPU, take processes", dev.UUID)
			continue
		}
		before, err := memoryOf(t, d, dev.UUID)
		if err != nil {
			t.Fatal(err)
		}
		pid, end, err := caps.Hold(t.Context(), dev.UUID, amount)
		if err != nil {
			t.Skipf("skipped: no process can hold memory on %s: %v", dev.UUID, err)
		}
		defer end()
		list, err := d.Processes(wait(t), dev.UUID)
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(list, func(p gpu.Process) bool { return p.PID == pid && p.Kind == gpu.Compute })
		if at < 0 {
			t.Fatalf("process %d is not on %s: %+v", pid, dev.UUID, list)
		}
		if p := list[at]; p.Known && p.Bytes < uint64(amount)<<20 || p.GI != -1 || p.CI != -1 {
			t.Errorf("process %d holds %d MiB of a whole GPU and is listed as %+v", pid, amount, p)
		} else if !p.Known {
			t.Logf("the driver does not tell the memory of process %d", pid)
		}
		if now, err := memoryOf(t, d, dev.UUID); err != nil || now.Used < before.Used+amount {
			t.Errorf("%s: used %d MiB before and %d with a process of %d, %v", dev.UUID, before.Used, now.Used, amount, err)
		}
		end()
		Await(t, fmt.Sprintf("process %d leaves %s", pid, dev.UUID), func() bool {
			list, err := d.Processes(wait(t), dev.UUID)
			if err != nil {
				t.Fatal(err)
			}
			return !slices.ContainsFunc(list, func(p gpu.Process) bool { return p.PID == pid })
		})
		amount += 64
	}
}

// utilization holds that the driver tells the busy from the idle, for the time that is asked
// for, and that who has ended is no more among them.
func utilization(t *testing.T, opts nvml.Options, caps Caps) {
	d := Open(t, opts)
	tried := false
	for _, dev := range read(t, d).GPUs {
		if dev.MIG.Enabled || tried {
			continue // one GPU of the machine is enough: it takes seconds
		}
		tried = true
		idle, endIdle, err := caps.Hold(t.Context(), dev.UUID, 64)
		if err != nil {
			t.Skipf("skipped: no process can hold memory on %s: %v", dev.UUID, err)
		}
		defer endIdle()
		since := time.Now()
		pid, end, err := caps.Busy(t.Context(), dev.UUID)
		if err != nil {
			t.Skipf("skipped: no process can keep %s busy: %v", dev.UUID, err)
		}
		defer end()
		look := func() map[int]float64 {
			of, err := d.Utilization(wait(t), since, dev.UUID)
			if err != nil {
				t.Fatal(err)
			}
			list, known := of[dev.UUID]
			if !known {
				t.Skipf("skipped: the driver does not tell how busy processes keep %s", dev.UUID)
			}
			for p, percent := range list {
				if percent <= 0 || percent > 100 {
					t.Fatalf("process %d has kept %s busy for %v %%", p, dev.UUID, percent)
				}
			}
			return list
		}
		// To make a context is a little work, too: an H200 had an idle process at 1 %.
		Await(t, fmt.Sprintf("process %d is seen to be busy, and %d idle", pid, idle), func() bool {
			of := look()
			return of[pid] > 0 && of[idle] <= of[pid]/4
		})
		t.Logf("%s: %v", dev.UUID, look())
		end()
		Await(t, fmt.Sprintf("process %d has ended", pid), func() bool { return look()[pid] == 0 })
	}
	if !tried {
		t.Skip("skipped: all GPUs are in MIG mode, where drivers do not tell")
	}
}

func eventsEnd(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	for range 2 { // it may be run again
		ctx, cancel := context.WithCancel(wait(t))
		ended := make(chan error, 1)
		go func() {
			ended <- d.Events(ctx, func(e gpu.Event) { t.Logf("meanwhile the driver reports %+v", e) })
		}()
		// The driver goes on answering beside the wait for events.
		read(t, d)
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-wait(t).Done():
			t.Fatal("Events did not end with its context")
		}
	}
}

func unknownGPU(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	for _, u := range []gpu.UUID{"GPU-00000000-1111-2222-3333-444444444444", "GPU-", "nonsense", ""} {
		if m, err := d.Memory(wait(t), u); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("memory of %q: %+v, %v, want ErrNotFound", u, m, err)
		}
		if p, err := d.Processes(wait(t), u); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("processes on %q: %+v, %v, want ErrNotFound", u, p, err)
		}
		if m, err := d.MIG(wait(t), u); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("MIG side of %q: %+v, %v, want ErrNotFound", u, m, err)
		}
		if in, err := d.CreateInstance(wait(t), u, "1g.10gb", gpu.Placement{Size: 1}, 0); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("an instance on %q: %+v, %v, want ErrNotFound", u, in, err)
		}
		if h, err := d.Health(wait(t), u); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("health of %q: %+v, %v, want ErrNotFound", u, h, err)
		}
	}
}

func parts(t *testing.T, opts nvml.Options, caps Caps) {
	if opts.Hook == "" {
		opts.Hook = "/var/lib/gpu-agent/hooks/0123456789abcdef/nvidia-cdi-hook"
	}
	d := Open(t, opts)
	inv := read(t, d)
	p, err := d.Parts(wait(t))
	if err != nil {
		if caps.Partial && errors.Is(err, gpu.ErrNoDriver) {
			t.Skipf("skipped: part of the driver is missing here: %v", err)
		}
		t.Fatal(err)
	}
	var gpus []gpu.UUID
	for _, dev := range inv.GPUs {
		gpus = append(gpus, dev.UUID)
		own, ok := p.Devices[dev.UUID]
		if !ok {
			t.Errorf("%s has no parts", dev.UUID)
			continue
		}
		node := fmt.Sprintf("/dev/nvidia%d", dev.Minor)
		if !slices.ContainsFunc(own.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == node }) {
			t.Errorf("%s, minor %d, has no %s among its nodes", dev.UUID, dev.Minor, node)
		}
		for _, other := range inv.GPUs {
			foreign := fmt.Sprintf("/dev/nvidia%d", other.Minor)
			if other.Minor != dev.Minor && slices.ContainsFunc(own.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == foreign }) {
				t.Errorf("%s would get %s of %s", dev.UUID, foreign, other.UUID)
			}
		}
		checkEdits(t, opts, own)
	}
	if len(p.Devices) != len(gpus) {
		t.Errorf("parts for %d GPUs, of %d", len(p.Devices), len(gpus))
	}
	checkEdits(t, opts, p.Common)
	if !slices.ContainsFunc(p.Common.Mounts, func(m *specs.Mount) bool {
		return filepath.Base(m.ContainerPath) == "libcuda.so."+inv.Driver
	}) {
		t.Errorf("no libcuda.so.%s among the mounts", inv.Driver)
	}
	for _, node := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm"} {
		if !slices.ContainsFunc(p.Common.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == node }) {
			t.Errorf("no %s among the nodes", node)
		}
	}
	if !slices.ContainsFunc(p.Common.Hooks, func(h *specs.Hook) bool { return slices.Contains(h.Args, "update-ldcache") }) {
		t.Error("no hook makes libcuda.so.1 resolvable")
	}

	// What comes of it is a spec that runtimes accept.
	out, err := dir.Open(t.TempDir(), "example.com")
	if err != nil {
		t.Fatal(err)
	}
	for _, chosen := range [][]gpu.UUID{gpus[:1], gpus} {
		key := cdi.Key("example.com/gpu", []string{fmt.Sprint(chosen)})
		spec, err := cdi.Spec("example.com", key, p, chosen, cdi.Overlay{})
		if err != nil {
			t.Fatal(err)
		}
		if err := out.Write(key, spec); err != nil {
			t.Error(err)
		}
	}
}

// checkEdits holds container edits against the file system. It can look only
// where this process sees what the host does.
func checkEdits(t *testing.T, opts nvml.Options, e specs.ContainerEdits) {
	t.Helper()
	seen := opts.HostDriverRoot == "" || opts.HostDriverRoot == opts.DriverRoot
	for _, n := range e.DeviceNodes {
		path := n.HostPath
		if path == "" {
			path = n.Path
		}
		if n.Major != 0 || n.Minor != 0 {
			t.Errorf("device node %s is named by number %d:%d", n.Path, n.Major, n.Minor)
		}
		if info, err := os.Stat(path); seen && (err != nil || info.Mode()&fs.ModeCharDevice == 0) {
			t.Errorf("device node %s: %v, %v", path, info, err)
		}
	}
	for _, m := range e.Mounts {
		if _, err := os.Stat(m.HostPath); seen && err != nil {
			t.Errorf("mount %s: %v", m.HostPath, err)
		}
		if strings.Contains(m.ContainerPath, "..") || !filepath.IsAbs(m.ContainerPath) {
			t.Errorf("mount at %s", m.ContainerPath)
		}
	}
	for _, h := range e.Hooks {
		if h.Path != opts.Hook {
			t.Errorf("hook program %s, want %s", h.Path, opts.Hook)
		}
		for _, left := range []string{"apply-cuda-memory-limits", "enable-cuda-compat"} {
			if slices.Contains(h.Args, left) {
				t.Errorf("hook %s would let the container decide", left)
			}
		}
	}
}

func timeSlice(t *testing.T, opts nvml.Options, caps Caps) {
	if !caps.TimeSlice {
		t.Skip("skipped: changing time slices is not permitted here")
	}
	d := Open(t, opts)
	for _, dev := range read(t, d).GPUs {
		for _, slice := range []gpu.TimeSlice{gpu.TimeSliceShort, gpu.TimeSliceDefault} {
			err := d.SetTimeSlice(wait(t), dev.UUID, slice)
			if errors.Is(err, gpu.ErrNotSupported) || errors.Is(err, gpu.ErrNoPermission) {
				t.Skipf("skipped: the card, its tool or this user cannot set time slices: %v", err)
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	if err := d.SetTimeSlice(wait(t), "GPU-00000000-1111-2222-3333-444444444444", gpu.TimeSliceShort); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("the time slice of no GPU: %v, want ErrNotFound", err)
	}
}

// parallel is for the race detector, and for a driver that takes turns badly.
func parallel(t *testing.T, opts nvml.Options) {
	if opts.Hook == "" {
		opts.Hook = "/nvidia-cdi-hook"
	}
	d := Open(t, opts)
	inv := read(t, d)
	watch, unwatch := context.WithCancel(wait(t))
	var watcher, callers sync.WaitGroup
	watcher.Go(func() {
		if err := d.Events(watch, func(gpu.Event) {}); err != nil {
			t.Error(err)
		}
	})
	ctx := wait(t)
	for i := range 8 {
		callers.Go(func() {
			for j := range 5 {
				got, err := d.Inventory(ctx)
				if err != nil || len(got.GPUs) != len(inv.GPUs) {
					t.Errorf("inventory %+v, %v", got, err)
				}
				u := inv.GPUs[(i+j)%len(inv.GPUs)].UUID
				if _, err := d.Memory(ctx, u); err != nil {
					t.Error(err)
				}
				if _, err := d.Processes(ctx, u); err != nil {
					t.Error(err)
				}
			}
			if _, err := d.Parts(ctx); err != nil && !errors.Is(err, gpu.ErrNoDriver) {
				t.Error(err)
			}
		})
	}
	callers.Wait()
	unwatch()
	watcher.Wait()
}

func reopen(t *testing.T, opts nvml.Options) {
	first, err := nvml.Open(wait(t), opts)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nvml.Open(wait(t), opts); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("opened twice: %v, want ErrInvalid", err)
	}
	want := read(t, first)
	for range 2 {
		if err := first.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := first.Inventory(wait(t)); !errors.Is(err, gpu.ErrNoDriver) {
		t.Errorf("the inventory of a closed driver: %v, want ErrNoDriver", err)
	}
	if err := first.Events(wait(t), func(gpu.Event) {}); err != nil {
		t.Errorf("the events of a closed driver: %v", err)
	}
	second := Open(t, opts)
	if got := read(t, second); !reflect.DeepEqual(settled(got), settled(want)) {
		t.Errorf("opened again it says\n%+v, not\n%+v", got, want)
	}
}
