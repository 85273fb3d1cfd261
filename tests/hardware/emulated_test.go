// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
)

var update = flag.Bool("update", false, "write the golden files anew")

const beHolder = "GPU_TESTS_HOLDER"

// hookPath is where the host would have the hook program.
const hookPath = "/var/lib/gpu-agent/hooks/0123456789abcdef/nvidia-cdi-hook"

// driverDir is where the emulated driver is installed. One for the process:
// it can be bound to one library only.
var driverDir string

func TestMain(m *testing.M) {
	capsule.Main()
	if os.Getenv(beHolder) != "" {
		fmt.Println("ready")
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	flag.Parse()
	os.Exit(func() int {
		place := install.Scratch
		if *onHardware { // then it is small, and goes with who ends us in the middle
			place = func() (string, error) { return os.MkdirTemp("", "hardware-") }
		}
		dir, err := place()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		// Found files are named by their real path.
		if driverDir, err = filepath.EvalSymlinks(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

// node is an emulated driver in operation.
type node struct {
	*emulator.World
	opts nvml.Options
	stop func() // unloads the driver; the test's end does too
}

var built = sync.OnceValues(func() (string, error) {
	if _, err := exec.LookPath("gcc"); err != nil {
		return "", err
	}
	return lib.Cached(context.Background())
})

// emulate serves a world until the test's end.
func emulate(t *testing.T, spec emulator.Spec) *node {
	t.Helper()
	if *onHardware {
		t.Skip("skipped: with -hardware the process is bound to the real driver")
	}
	libraries, err := built()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skipf("skipped: the emulated driver's libraries need gcc: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	w, err := emulator.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := install.Driver(driverDir, libraries, w); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"dev", "sys", "proc"} {
		if err := os.RemoveAll(filepath.Join(driverDir, dir)); err != nil {
			t.Fatal(err)
		}
	}
	err = install.Nodes(filepath.Join(driverDir, "dev"), w)
	if errors.Is(err, fs.ErrPermission) {
		t.Skipf("skipped: making device nodes needs CAP_MKNOD: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := install.Kernel(driverDir, "Character devices:\n", w); err != nil {
		t.Fatal(err)
	}
	n := &node{World: w, opts: nvml.Options{
		DriverRoot: driverDir,
		SysRoot:    filepath.Join(driverDir, "sys"),
		ProcRoot:   filepath.Join(driverDir, "proc"),
		Hook:       hookPath,
		Rearm:      10 * time.Millisecond,
		EventWait:  500 * time.Millisecond,
		Logger:     slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}}
	n.serve(t)
	return n
}

// serve answers programs until n.stop.
func (n *node) serve(t *testing.T) {
	t.Helper()
	l, err := daemon.Listen(filepath.Join(driverDir, install.Socket))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func(l *net.UnixListener) {
		ended <- (&daemon.Server{World: n.World}).Serve(ctx, l)
	}(l)
	n.stop = sync.OnceFunc(func() {
		n.Clear()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(n.stop)
}

// hold gives a child process memory on an emulated GPU.
func (n *node) hold(ctx context.Context, u gpu.UUID, amount gpu.MiB) (int, func(), error) {
	self, err := os.Executable()
	if err != nil {
		return 0, nil, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), beHolder+"=1")
	pid, end, err := startHolder(cmd)
	if err != nil {
		return 0, nil, err
	}
	p := emulator.Process{PID: pid, Kind: emulator.Compute, MiB: uint64(amount)}
	for _, g := range n.State().GPUs {
		if g.UUID == string(u) {
			p.GPU = g.Index
		}
		if g.MIG == nil {
			continue
		}
		for _, gi := range g.MIG.Instances {
			for _, ci := range gi.Compute {
				if ci.UUID == string(u) {
					p.GPU, p.GI, p.CI = g.Index, gi.ID, ci.ID
				}
			}
		}
	}
	if err := n.AddProcess(p); err != nil {
		end()
		return 0, nil, err
	}
	return pid, sync.OnceFunc(func() {
		end()
		n.EndProcess(pid)
	}), nil
}

// keepBusy gives a child process memory, and has it keep all multiprocessors busy.
func (n *node) keepBusy(ctx context.Context, u gpu.UUID) (int, func(), error) {
	pid, end, err := n.hold(ctx, u, 64)
	if err != nil {
		return 0, nil, err
	}
	for _, g := range n.State().GPUs {
		if g.UUID == string(u) {
			err = n.KeepBusy(pid, g.Index, 100)
		}
	}
	if err != nil {
		end()
		return 0, nil, err
	}
	return pid, end, nil
}

func TestEmulated(t *testing.T) {
	type instance struct {
		profile string
		start   int
	}
	for _, c := range []struct {
		emulator.Spec
		standing []instance // on the last GPU, before anything else; they must be left alone
		short    bool       // it is one of those that make test has
	}{
		{Spec: emulator.Spec{Model: "H100-80GB", Count: 8}},
		{Spec: emulator.Spec{Model: "A100-SXM4-80GB", Count: 4, NVLink: "mesh", Minors: "same"}, short: true},
		{Spec: emulator.Spec{Model: "RTX-PRO-6000", Count: 1}},
		{Spec: emulator.Spec{Model: "A30", Count: 2, NVLink: "none"}},
		{Spec: emulator.Spec{Model: "B200", Count: 16}},
		{Spec: emulator.Spec{Topology: "dgx-h100"}, short: true},
		{Spec: emulator.Spec{Topology: "dgx-1"}},
		{Spec: emulator.Spec{Topology: "nvl72"}},
		{
			emulator.Spec{Model: "A100-SXM4-40GB", Count: 2, GPUs: []emulator.GPUSpec{{Index: 0, MIG: true}, {Index: 1, MIG: true}}},
			[]instance{{"2g.10gb", 0}, {"1c.3g.20gb", 4}},
			true,
		},
		{Spec: emulator.Spec{Model: "RTX-PRO-6000", Count: 3, GPUs: []emulator.GPUSpec{{Index: 0, MIG: true}, {Index: 2, Model: "A30", MIG: true}}}, short: true},
	} {
		name := cmp.Or(c.Topology, fmt.Sprintf("%dx%s", c.Count, c.Model))
		if len(c.GPUs) > 0 {
			name += ",MIG"
		}
		t.Run(name, func(t *testing.T) {
			if testing.Short() && !c.short {
				t.Skip("make test-all runs it")
			}
			n := emulate(t, c.Spec)
			for _, in := range c.standing {
				if err := n.CreateInstance(len(c.GPUs)-1, in.profile, in.start, false); err != nil {
					t.Fatal(err)
				}
			}
			Conformance(t, n.opts, Caps{Hold: n.hold, Busy: n.keepBusy, TimeSlice: true, Instances: true})
		})
	}
}

// inventory reads and requires success.
func (n *node) inventory(t *testing.T, d *nvml.Driver) gpu.Inventory {
	t.Helper()
	inv, err := d.Inventory(wait(t))
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

func TestInventoryIsTheWorld(t *testing.T) {
	for _, model := range emulator.Models() {
		t.Run(model, func(t *testing.T) {
			n := emulate(t, emulator.Spec{Model: model, Count: 4, Driver: "580.159.03", CUDA: "13.0"})
			table, err := emulator.LoadModel(model)
			if err != nil {
				t.Fatal(err)
			}
			inv := n.inventory(t, Open(t, n.opts))
			if inv.Driver != "580.159.03" || inv.CUDA != "13.0" || len(inv.GPUs) != 4 {
				t.Errorf("driver %s, CUDA %s, %d GPUs", inv.Driver, inv.CUDA, len(inv.GPUs))
			}
			unified := slices.Contains(table.NotSupported, "nvmlDeviceGetMemoryInfo*")
			for i, want := range n.State().GPUs {
				got := inv.GPUs[i]
				if unified {
					want.MemoryMiB, want.ReservedMiB = 0, 0 // NVML does not tell it
				}
				if got.Index != want.Index || got.Minor != want.Minor || string(got.UUID) != want.UUID || got.Model != want.Model ||
					got.PCI != strings.ToLower(want.PCI) || got.PCIDevice != fmt.Sprintf("0x%08X", want.PCIDevice) ||
					got.PCISubsystem != fmt.Sprintf("0x%08X", want.Subsystem) ||
					uint64(got.Memory) != want.MemoryMiB || uint64(got.Reserved) != want.ReservedMiB ||
					got.ComputeCapability != table.ComputeCapability || got.NUMA == nil || *got.NUMA != want.NUMA {
					t.Errorf("GPU %d is read as\n%+v, and is\n%+v", i, got, want)
				}
				if got.MIG.Capable != (table.MIG != nil) {
					t.Errorf("GPU %d: MIG %+v", i, got.MIG)
				}
				if table.MIG == nil {
					continue
				}
				if len(got.MIG.Profiles) != len(table.MIG.Profiles) {
					t.Errorf("GPU %d has %d profiles, of %d", i, len(got.MIG.Profiles), len(table.MIG.Profiles))
				}
				for _, want := range table.MIG.Profiles {
					at := slices.IndexFunc(got.MIG.Profiles, func(p gpu.Profile) bool { return p.Name == want.Name })
					if at < 0 {
						t.Errorf("GPU %d lacks profile %s", i, want.Name)
						continue
					}
					p := got.MIG.Profiles[at]
					var starts []uint32
					for _, place := range p.Placements {
						starts = append(starts, uint32(place.Start))
						if uint32(place.Size) != want.Size {
							t.Errorf("%s at %d has size %d, not %d", p.Name, place.Start, place.Size, want.Size)
						}
					}
					if uint32(p.ID) != want.ID || uint32(p.Max) != want.Max || uint32(p.Slices) != want.Slices ||
						uint64(p.Memory) != want.MemoryMiB || !slices.Equal(starts, want.Starts) {
						t.Errorf("profile %+v, want %+v", p, want)
					}
				}
			}
		})
	}
}

func TestLinksOfTheWorld(t *testing.T) {
	for _, c := range []struct {
		nvlink string
		want   func(index int) []gpu.Link
	}{
		{"none", func(int) []gpu.Link { return nil }},
		{"switch", func(int) []gpu.Link { return []gpu.Link{{Switch: true, NVLink: 18, Version: 4, LaneMBps: 26562}} }},
		{"mesh", func(index int) (links []gpu.Link) {
			for to := range 4 {
				if to != index {
					links = append(links, gpu.Link{To: to, NVLink: 6, Version: 4, LaneMBps: 26562})
				}
			}
			return links
		}},
	} {
		t.Run(c.nvlink, func(t *testing.T) {
			n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 4, NVLink: c.nvlink})
			for i, dev := range n.inventory(t, Open(t, n.opts)).GPUs {
				if want := c.want(i); !slices.Equal(dev.Links, want) {
					t.Errorf("GPU %d has links %+v, want %+v", i, dev.Links, want)
				}
			}
		})
	}
}

// A GPU's node comes from sysfs; where that is silent, from the driver; where
// sysfs says that there is none, there is none.
func TestNUMA(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	for _, c := range []struct{ name, file, want string }{
		{"sysfs knows", "3\n", "3 3"},
		{"sysfs knows of no nodes", "-1\n", "none none"},
		{"only the driver knows", "", "0 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			opts := n.opts
			opts.SysRoot = t.TempDir()
			for _, g := range n.State().GPUs {
				dir := filepath.Join(opts.SysRoot, "bus/pci/devices", strings.ToLower(g.PCI[4:]))
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				if c.file == "" {
					continue
				}
				if err := os.WriteFile(filepath.Join(dir, "numa_node"), []byte(c.file), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			var got []string
			for _, dev := range n.inventory(t, Open(t, opts)).GPUs {
				if dev.NUMA == nil {
					got = append(got, "none")
				} else {
					got = append(got, fmt.Sprint(*dev.NUMA))
				}
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("nodes %v, want %s", got, c.want)
			}
		})
	}
}

func TestProcessKinds(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	d := Open(t, n.opts)
	inv := n.inventory(t, d)
	pid, end, err := n.hold(t.Context(), inv.GPUs[1].UUID, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	for _, p := range []emulator.Process{
		{PID: pid, GPU: 1, Kind: emulator.Graphics, MiB: 7},
		{PID: pid, GPU: 1, Kind: emulator.MPS, MiB: 9, Unknown: true},
	} {
		if err := n.AddProcess(p); err != nil {
			t.Fatal(err)
		}
	}
	got, err := d.Processes(wait(t), inv.GPUs[1].UUID)
	if err != nil {
		t.Fatal(err)
	}
	want := []gpu.Process{
		{PID: pid, Kind: gpu.Compute, Bytes: 100 << 20, Known: true, GI: -1, CI: -1},
		{PID: pid, Kind: gpu.Graphics, Bytes: 7 << 20, Known: true, GI: -1, CI: -1},
		{PID: pid, Kind: gpu.MPS, GI: -1, CI: -1},
	}
	if !slices.Equal(got, want) {
		t.Errorf("processes\n%+v, want\n%+v", got, want)
	}
	if got, err := d.Processes(wait(t), inv.GPUs[0].UUID); err != nil || len(got) != 0 {
		t.Errorf("processes on another GPU: %+v, %v", got, err)
	}
	if m, err := memoryOf(t, d, inv.GPUs[1].UUID); err != nil || m.Used != 116 {
		t.Errorf("memory %+v, %v, want 116 MiB used", m, err)
	}
}

// listener runs Events beside a test.
type listener struct {
	events chan gpu.Event
	stop   func()
}

func listen(t *testing.T, n *node, d *nvml.Driver) listener {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := listener{events: make(chan gpu.Event, 100)}
	ended := make(chan error, 1)
	before := n.calls("nvmlDeviceRegisterEvents")
	go func() { ended <- d.Events(ctx, func(e gpu.Event) { l.events <- e }) }()
	l.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(l.stop)
	healthy := 0
	for _, g := range n.State().GPUs {
		if !g.Lost {
			healthy++
		}
	}
	Await(t, "all GPUs are watched", func() bool { return n.calls("nvmlDeviceRegisterEvents") >= before+healthy })
	return l
}

func (l listener) next(t *testing.T) gpu.Event {
	t.Helper()
	select {
	case e := <-l.events:
		return e
	case <-wait(t).Done():
		t.Fatal("in vain awaited an event")
		panic("unreachable")
	}
}

// calls counts this process's calls of one name.
func (n *node) calls(name string) int {
	for _, c := range n.Calls(os.Getpid()) {
		if c.Call == name {
			return int(c.Count)
		}
	}
	return 0
}

func TestXid(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 8})
	d := Open(t, n.opts)
	inv := n.inventory(t, d)
	l := listen(t, n, d)
	for i, xid := range []uint64{48, 13, 94, 31, 119, 63, 74, 43} {
		if err := n.Xid(i, xid); err != nil {
			t.Fatal(err)
		}
		want := gpu.Event{Kind: gpu.EventXid, GPU: inv.GPUs[i].UUID, Xid: xid, GI: -1, CI: -1}
		if got := l.next(t); got != want {
			t.Errorf("event %+v, want %+v", got, want)
		}
	}
	l.stop()
	if len(l.events) != 0 {
		t.Errorf("more events than were raised: %+v", <-l.events)
	}
}

func TestGPUWithoutEventsIsLeftOut(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	d := Open(t, n.opts)
	inv := n.inventory(t, d)
	none := 0
	if err := n.Inject(emulator.Fault{Call: "nvmlDeviceRegisterEvents", GPU: &none, Code: emulator.NotSupported}); err != nil {
		t.Fatal(err)
	}
	l := listen(t, n, d)
	if err := n.Xid(1, 48); err != nil {
		t.Fatal(err)
	}
	if got := l.next(t); got.GPU != inv.GPUs[1].UUID || got.Xid != 48 {
		t.Errorf("event %+v, want Xid 48 of %s", got, inv.GPUs[1].UUID)
	}
}

func TestLostGPU(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 8})
	d := Open(t, n.opts)
	before := n.inventory(t, d)
	l := listen(t, n, d)
	if err := n.Lose(3); err != nil {
		t.Fatal(err)
	}
	if got := l.next(t); got.GPU != before.GPUs[3].UUID || got.Xid != emulator.XidGPULost {
		t.Errorf("event %+v, want Xid %d of %s", got, emulator.XidGPULost, before.GPUs[3].UUID)
	}
	lost := n.inventory(t, d)
	if len(lost.GPUs) != 8 {
		t.Fatalf("the inventory has %d GPUs", len(lost.GPUs))
	}
	for i, dev := range lost.GPUs {
		if i == 3 {
			if dev.Fault == "" || !dev.Lost {
				t.Errorf("the lost GPU has no fault, or is not said to be lost: %+v", dev)
			}
			dev.Fault = ""
		}
		if fmt.Sprintf("%+v", dev.UUID)+dev.Model != fmt.Sprintf("%+v", before.GPUs[i].UUID)+before.GPUs[i].Model ||
			dev.Index != i || dev.Minor != before.GPUs[i].Minor || dev.Memory != before.GPUs[i].Memory || dev.Fault != "" {
			t.Errorf("GPU %d is now %+v", i, dev)
		}
	}
	if _, err := d.Memory(wait(t), before.GPUs[3].UUID); !errors.Is(err, gpu.ErrLost) {
		t.Errorf("memory of the lost GPU: %v, want ErrLost", err)
	}
	parts, err := d.Parts(wait(t))
	if err != nil || len(parts.Devices) != 7 {
		t.Errorf("parts for %d GPUs, %v; want those of the seven others", len(parts.Devices), err)
	}

	if err := n.Restore(3); err != nil {
		t.Fatal(err)
	}
	Await(t, "the GPU is back", func() bool { return n.inventory(t, d).GPUs[3].Fault == "" })
	if _, err := d.Memory(wait(t), before.GPUs[3].UUID); err != nil {
		t.Errorf("memory of the restored GPU: %v", err)
	}
	// It is watched again: raise errors until one is heard.
	Await(t, "errors of the restored GPU are heard", func() bool {
		if err := n.Xid(3, 31); err != nil {
			t.Fatal(err)
		}
		for len(l.events) > 0 {
			if e := <-l.events; e.GPU == before.GPUs[3].UUID && e.Xid == 31 {
				return true
			}
		}
		return false
	})
}

func TestGPULostBeforeTheStart(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 3, GPUs: []emulator.GPUSpec{{Index: 1, Lost: true}}})
	d := Open(t, n.opts)
	inv := n.inventory(t, d)
	if len(inv.GPUs) != 3 || inv.GPUs[0].Fault != "" || inv.GPUs[2].Fault != "" {
		t.Errorf("inventory %+v", inv)
	}
	if dev := inv.GPUs[1]; dev.Fault == "" || dev.Index != 1 {
		t.Errorf("the lost GPU is %+v", dev)
	}
	if err := n.Restore(1); err != nil {
		t.Fatal(err)
	}
	listen(t, n, d)
	Await(t, "the GPU is read", func() bool {
		dev := n.inventory(t, d).GPUs[1]
		return dev.Fault == "" && dev.UUID != "" && dev.Memory > 0
	})
}

func TestFailingCalls(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 4})
	d := Open(t, n.opts)
	want := n.inventory(t, d)
	two := 2
	for _, c := range []struct {
		call string
		code emulator.Return
	}{
		{"nvmlDeviceGetMemoryInfo_v2", emulator.Unknown},
		{"nvmlDeviceGetMemoryInfo_v2", emulator.GPUIsLost},
		{"nvmlDeviceGetMigMode", emulator.Unknown},
		{"nvmlDeviceGetMinorNumber", emulator.NoPermission},
		{"nvmlDeviceGetUUID", emulator.Unknown},
	} {
		t.Run(fmt.Sprintf("%s=%d", c.call, c.code), func(t *testing.T) {
			if err := n.Inject(emulator.Fault{Call: c.call, GPU: &two, Code: c.code}); err != nil {
				t.Fatal(err)
			}
			defer n.Clear()
			got := n.inventory(t, d)
			for i, dev := range got.GPUs {
				if failing := i == two; (dev.Fault != "") != failing || dev.UUID != want.GPUs[i].UUID || dev.Index != i || dev.Memory != want.GPUs[i].Memory {
					t.Errorf("GPU %d is %+v", i, dev)
				}
			}
		})
	}
	for _, call := range []string{"nvmlSystemGetDriverVersion", "nvmlDeviceGetCount_v2"} {
		if err := n.Inject(emulator.Fault{Call: call, Code: emulator.Unknown}); err != nil {
			t.Fatal(err)
		}
		if inv, err := d.Inventory(wait(t)); !errors.Is(err, gpu.ErrDriver) {
			t.Errorf("%s fails: %+v, %v, want ErrDriver", call, inv, err)
		}
		n.Clear()
	}
	if got := n.inventory(t, d); got.GPUs[two].Fault != "" {
		t.Errorf("the fault outlives its cause: %s", got.GPUs[two].Fault)
	}

	// The driver fails while it is asked to wait; Events says so and goes on.
	l := listen(t, n, d)
	if err := n.Inject(emulator.Fault{Call: "nvmlEventSetWait_v2", Code: emulator.GPUIsLost, Count: 1}); err != nil {
		t.Fatal(err)
	}
	if e := l.next(t); e.Kind != gpu.EventLost || e.GPU != "" {
		t.Errorf("event %+v, want one that says that something is lost", e)
	}
}

func TestHungCall(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	d := Open(t, n.opts)
	want := n.inventory(t, d)
	u := want.GPUs[0].UUID
	if err := n.Inject(emulator.Fault{Call: "nvmlDeviceGetMemoryInfo_v2", Hang: true}); err != nil {
		t.Fatal(err)
	}
	before := n.calls("nvmlDeviceGetMemoryInfo_v2")
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := d.Memory(ctx, u)
		left <- err
	}()
	Await(t, "the call is in the driver", func() bool { return n.calls("nvmlDeviceGetMemoryInfo_v2") > before })
	leave()
	if err := <-left; !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
		t.Errorf("the caller that left: %v, want ErrTimeout", err)
	}

	// Everybody else is told at once, also with all the time in the world.
	if _, err := d.Inventory(context.Background()); !errors.Is(err, gpu.ErrTimeout) || !strings.Contains(err.Error(), "the memory of GPUs") {
		t.Errorf("inventory meanwhile: %v, want ErrTimeout that names the call", err)
	}
	if _, err := d.Parts(context.Background()); !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("parts meanwhile: %v, want ErrTimeout", err)
	}
	n.Clear()
	Await(t, "the driver answers again", func() bool {
		inv, err := d.Inventory(wait(t))
		if err != nil && !errors.Is(err, gpu.ErrTimeout) {
			t.Fatal(err)
		}
		return err == nil && len(inv.GPUs) == 2 && inv.GPUs[0].Fault == ""
	})
}

func TestOpenTimesOut(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	if err := n.Inject(emulator.Fault{Call: "nvmlInit_v2", Hang: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if d, err := nvml.Open(ctx, n.opts); !errors.Is(err, gpu.ErrTimeout) {
		t.Fatalf("opened %v, %v, want ErrTimeout", d, err)
	}
	if d, err := nvml.Open(context.Background(), n.opts); !errors.Is(err, gpu.ErrTimeout) {
		t.Fatalf("opened %v, %v while the first attempt hangs, want ErrTimeout", d, err)
	}
	n.Clear()
	Await(t, "the driver can be opened", func() bool {
		d, err := nvml.Open(wait(t), n.opts)
		if err != nil {
			return false
		}
		return d.Close() == nil
	})
}

func TestNoDaemon(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	opts := n.opts
	// The library is there, the driver is not loaded.
	func() {
		stopped := emulateNone(t)
		defer stopped()
		if d, err := nvml.Open(wait(t), opts); !errors.Is(err, gpu.ErrNoDriver) {
			t.Errorf("opened %v, %v, want ErrNoDriver", d, err)
		}
	}()
	n.inventory(t, Open(t, opts))
}

// emulateNone takes the daemon's socket away until the returned function puts
// it back.
func emulateNone(t *testing.T) func() {
	t.Helper()
	socket := filepath.Join(driverDir, install.Socket)
	if err := os.Rename(socket, socket+".away"); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Rename(socket+".away", socket); err != nil {
			t.Fatal(err)
		}
	}
}

// The kernel module is unloaded and loaded again, with other GPUs behind it,
// while the agent runs.
func TestDriverIsLoadedAgain(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	d := Open(t, n.opts)
	n.inventory(t, d)
	l := listen(t, n, d)
	n.stop()
	if e := l.next(t); e.Kind != gpu.EventLost {
		t.Errorf("event %+v, want one that says that the driver is lost", e)
	}
	if inv, err := d.Inventory(wait(t)); err == nil {
		t.Errorf("without a driver the inventory is %+v", inv)
	}
	again := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	Await(t, "the driver answers again", func() bool {
		inv, err := d.Inventory(wait(t))
		return err == nil && len(inv.GPUs) == 2 && inv.GPUs[0].Fault == "" && inv.GPUs[1].Fault == ""
	})
	Await(t, "errors are heard again", func() bool {
		if err := again.Xid(1, 48); err != nil {
			t.Fatal(err)
		}
		for len(l.events) > 0 {
			if e := <-l.events; e.Xid == 48 {
				return true
			}
		}
		return false
	})
}

func TestTimeSliceOfTheWorld(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 4})
	d := Open(t, n.opts)
	inv := n.inventory(t, d)
	for i, slice := range []gpu.TimeSlice{gpu.TimeSliceLong, gpu.TimeSliceShort, gpu.TimeSliceMedium, gpu.TimeSliceDefault} {
		if err := d.SetTimeSlice(wait(t), inv.GPUs[i].UUID, slice); err != nil {
			t.Error(err)
		}
	}
	for i, want := range []string{"long", "short", "medium", "default"} {
		if got := n.State().GPUs[i].TimeSlice; got != want {
			t.Errorf("GPU %d has time slice %s, want %s", i, got, want)
		}
	}
	if err := os.Remove(filepath.Join(driverDir, "usr/bin/nvidia-smi")); err != nil {
		t.Fatal(err)
	}
	if err := d.SetTimeSlice(wait(t), inv.GPUs[0].UUID, gpu.TimeSliceShort); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("without nvidia-smi: %v, want ErrNotSupported", err)
	}
}

// The host has the driver where the agent does not.
func TestPartsOfADriverElsewhere(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	for _, c := range []struct{ host, lib, node string }{
		{"/", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03", ""},
		{"/run/nvidia/driver", "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03", "/run/nvidia/driver/dev/nvidiactl"},
	} {
		t.Run(c.host, func(t *testing.T) {
			opts := n.opts
			opts.HostDriverRoot = c.host
			p, err := Open(t, opts).Parts(wait(t))
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range p.Common.Mounts {
				if strings.HasPrefix(m.HostPath, driverDir) || strings.HasPrefix(m.ContainerPath, driverDir) {
					t.Errorf("mount %+v is where only the agent sees it", *m)
				}
				if strings.Contains(m.ContainerPath, "libcuda.so.") && (m.HostPath != c.lib || m.ContainerPath != "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03") {
					t.Errorf("libcuda is mounted from %s to %s, want it from %s", m.HostPath, m.ContainerPath, c.lib)
				}
			}
			i := slices.IndexFunc(p.Common.DeviceNodes, func(d *specs.DeviceNode) bool { return d.Path == "/dev/nvidiactl" })
			if i < 0 || p.Common.DeviceNodes[i].HostPath != c.node {
				t.Errorf("nodes %+v, want /dev/nvidiactl from %q", p.Common.DeviceNodes, c.node)
			}
		})
	}
}

// The whole of a claim's file, as a node with its driver at / would have it.
func TestClaimGolden(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2, Driver: "580.159.03"})
	opts := n.opts
	opts.HostDriverRoot = "/"
	d := Open(t, opts)
	var gpus []gpu.UUID
	for _, g := range n.State().GPUs {
		drm := filepath.Join("/sys/bus/pci/devices", strings.ToLower(g.PCI[4:]), "drm")
		if _, err := os.Stat(drm); err == nil {
			t.Skipf("skipped: this machine has %s, which NVIDIA's generator reads at that fixed path", drm)
		}
		gpus = append(gpus, gpu.UUID(g.UUID))
	}
	parts, err := d.Parts(wait(t))
	if err != nil {
		t.Fatal(err)
	}
	spec, err := cdi.Spec("example.com", "abcdef0123456789", parts, gpus, cdi.Overlay{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	const file = "testdata/claim.json"
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (-update writes it anew); got:\n%s", file, got)
	}
}

func TestPartsOfABrokenDriver(t *testing.T) {
	const v = ".580.159.03"
	for _, c := range []struct{ missing, named string }{
		{"usr/lib/x86_64-linux-gnu/libcuda.so" + v, "libcuda"},
		{"dev/nvidia-uvm", "/dev/nvidia-uvm"},
		{"dev/nvidiactl", "/dev/nvidiactl"},
	} {
		t.Run(c.missing, func(t *testing.T) {
			n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
			d := Open(t, n.opts)
			if err := os.Remove(filepath.Join(driverDir, c.missing)); err != nil {
				t.Fatal(err)
			}
			if p, err := d.Parts(wait(t)); !errors.Is(err, gpu.ErrNoDriver) || !strings.Contains(err.Error(), c.named) {
				t.Errorf("parts %+v, %v, want ErrNoDriver that names %s", p, err, c.named)
			}
		})
	}
	t.Run("one GPU without its node", func(t *testing.T) {
		n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
		d := Open(t, n.opts)
		inv := n.inventory(t, d)
		if err := os.Remove(filepath.Join(driverDir, fmt.Sprintf("dev/nvidia%d", inv.GPUs[0].Minor))); err != nil {
			t.Fatal(err)
		}
		p, err := d.Parts(wait(t))
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := p.Devices[inv.GPUs[0].UUID]; ok || len(p.Devices) != 1 {
			t.Errorf("parts for %d GPUs, the one without a node among them: %v", len(p.Devices), ok)
		}
	})
	t.Run("no hook program", func(t *testing.T) {
		n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 1})
		opts := n.opts
		opts.Hook = ""
		if _, err := Open(t, opts).Parts(wait(t)); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("got %v, want ErrInvalid", err)
		}
	})
}
