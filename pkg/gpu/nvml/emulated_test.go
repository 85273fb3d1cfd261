// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
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

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/pkg/topology"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
)

// patience ends a test that waits for what never comes. It is no expectation
// of how long anything takes.
const patience = 2 * time.Minute

// driverDir is where the emulated driver is installed. One for the process:
// it can be bound to one library only.
var driverDir string

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(beKilled) != "" { // there would be nobody to clean up
		os.Exit(m.Run())
	}
	os.Exit(func() int {
		dir, err := install.Scratch()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
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
	hand *daemon.Client // for changes that files follow
	opts nvml.Options
	stop func() // takes the driver away; the test's end does too
}

var built = sync.OnceValues(func() (string, error) {
	if _, err := exec.LookPath("gcc"); err != nil {
		return "", err
	}
	return lib.Cached(context.Background())
})

// emulate serves a world until the test's end.
func emulate(t testing.TB, spec emulator.Spec) *node {
	t.Helper()
	libraries, err := built()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skipf("skipped: the emulated driver's libraries need gcc: %v", err)
	}
	try(t, err)
	w, err := emulator.New(spec)
	try(t, err)
	for _, dir := range []string{"dev", "sys", "proc"} {
		try(t, os.RemoveAll(filepath.Join(driverDir, dir)))
	}
	try(t, install.Driver(driverDir, libraries, w))
	err = install.Nodes(filepath.Join(driverDir, "dev"), w)
	if errors.Is(err, fs.ErrPermission) {
		t.Skipf("skipped: making device nodes needs CAP_MKNOD: %v", err)
	}
	try(t, err)
	try(t, install.Kernel(driverDir, "Character devices:\n", w))
	try(t, install.Machine{Driver: driverDir, Dev: filepath.Join(driverDir, "dev"), Kernel: driverDir}.Save())
	n := &node{World: w, opts: nvml.Options{
		DriverRoot: driverDir,
		SysRoot:    filepath.Join(driverDir, "sys"),
		ProcRoot:   filepath.Join(driverDir, "proc"),
		Rearm:      20 * time.Millisecond,
		Look:       20 * time.Millisecond,
		EventWait:  100 * time.Millisecond,
		Logger:     slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}}
	socket := filepath.Join(driverDir, install.Socket)
	l, err := daemon.Listen(socket)
	try(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func(l *net.UnixListener) {
		ended <- (&daemon.Server{World: w, Driver: driverDir}).Serve(ctx, l)
	}(l)
	n.stop = sync.OnceFunc(func() {
		n.Clear()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		_ = l.Close() // the server does too, not always before it ends
	})
	t.Cleanup(n.stop)
	n.hand, err = daemon.Dial(socket)
	try(t, err)
	t.Cleanup(func() { n.hand.Close() })
	return n
}

func try(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wait(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func await(t testing.TB, what string, condition func() bool) {
	t.Helper()
	ctx := wait(t)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("in vain awaited that %s", what)
		case <-tick.C:
		}
	}
}

func open(t testing.TB, n *node) *nvml.Driver {
	t.Helper()
	d, err := nvml.Open(wait(t), n.opts)
	try(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func inventory(t testing.TB, d *nvml.Driver) gpu.Inventory {
	t.Helper()
	inv, err := d.Inventory(wait(t))
	try(t, err)
	return inv
}

// listener runs Events beside a test.
type listener struct {
	events chan gpu.Event
	at     chan time.Time // when each of them came
}

// listen returns once all GPUs that are there are watched.
func listen(t testing.TB, n *node, d *nvml.Driver) listener {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := listener{make(chan gpu.Event, 1000), make(chan time.Time, 1000)}
	ended := make(chan error, 1)
	before := n.calls("nvmlEventSetWait_v2")
	go func() {
		ended <- d.Events(ctx, func(e gpu.Event) {
			l.at <- time.Now()
			l.events <- e
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	await(t, "events are waited for", func() bool { return n.calls("nvmlEventSetWait_v2") > before })
	return l
}

// until returns the next event that is wanted, and all before it.
func (l listener) until(t testing.TB, what string, wanted func(gpu.Event) bool) (at time.Time, before []gpu.Event) {
	t.Helper()
	ctx := wait(t)
	for {
		select {
		case at := <-l.at:
			e := <-l.events
			if wanted(e) {
				return at, before
			}
			before = append(before, e)
		case <-ctx.Done():
			t.Fatalf("in vain awaited %s; there came %+v", what, before)
		}
	}
}

func lost(u gpu.UUID) func(gpu.Event) bool {
	return func(e gpu.Event) bool { return e == gpu.Event{Kind: gpu.EventLost, GPU: u, GI: -1, CI: -1} }
}

func changed(e gpu.Event) bool { return e == gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1} }

// calls counts this process's calls of one name.
func (n *node) calls(name string) int {
	for _, c := range n.Calls(os.Getpid()) {
		if c.Call == name {
			return int(c.Count)
		}
	}
	return 0
}

// hears raises errors of a GPU until one is heard.
func (l listener) hears(t testing.TB, n *node, index int, u gpu.UUID) {
	t.Helper()
	await(t, fmt.Sprintf("errors of GPU %d are heard", index), func() bool {
		try(t, n.XidBare(index, 31))
		for len(l.at) > 0 {
			<-l.at
			if e := <-l.events; e.GPU == u && e.Xid == 31 {
				return true
			}
		}
		return false
	})
}

func TestHealth(t *testing.T) {
	off := false
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 4, GPUs: []emulator.GPUSpec{
		{Index: 1, Model: "V100-SXM2-32GB"}, {Index: 2, ECC: &off},
	}})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	count := func(n uint64) *uint64 { return &n }
	for _, c := range []struct {
		name  string
		index int
		is    emulator.Health
		want  gpu.Health
	}{
		{"sound", 0, emulator.Health{}, gpu.Health{Uncorrected: count(0), Remap: &gpu.Remap{}, Recovery: gpu.RecoveryNone}},
		{"corrected errors only", 0, emulator.Health{Corrected: emulator.Errors{Volatile: 9, Aggregate: 9}}, gpu.Health{Uncorrected: count(0), Remap: &gpu.Remap{}, Recovery: gpu.RecoveryNone}},
		{"errors before the last reset", 0, emulator.Health{Uncorrected: emulator.Errors{Aggregate: 9}}, gpu.Health{Uncorrected: count(0), Remap: &gpu.Remap{}, Recovery: gpu.RecoveryNone}},
		{"uncorrected errors", 0, emulator.Health{Uncorrected: emulator.Errors{Volatile: 3, Aggregate: 9}}, gpu.Health{Uncorrected: count(3), Remap: &gpu.Remap{}, Recovery: gpu.RecoveryNone}},
		{"a row to be remapped", 0, emulator.Health{RemapPending: true}, gpu.Health{Uncorrected: count(0), Remap: &gpu.Remap{Pending: true}, Recovery: gpu.RecoveryNone}},
		{"no row left", 0, emulator.Health{RemapFailed: true}, gpu.Health{Uncorrected: count(0), Remap: &gpu.Remap{Failed: true}, Recovery: gpu.RecoveryNone}},
		{"rows remapped", 0, emulator.Health{RemappedUncorrectable: 3}, gpu.Health{Uncorrected: count(0), Remap: &gpu.Remap{}, Recovery: gpu.RecoveryNone}},
		{"needs a reset", 0, emulator.Health{Recovery: emulator.RecoveryReset}, gpu.Health{Uncorrected: count(0), Recovery: gpu.RecoveryReset, Remap: &gpu.Remap{}}},
		{"needs a reboot", 0, emulator.Health{Recovery: emulator.RecoveryReboot}, gpu.Health{Uncorrected: count(0), Recovery: gpu.RecoveryReboot, Remap: &gpu.Remap{}}},
		{"needs to be drained", 0, emulator.Health{Recovery: emulator.RecoveryDrain}, gpu.Health{Uncorrected: count(0), Recovery: gpu.RecoveryDrain, Remap: &gpu.Remap{}}},
		{"needs to be drained and reset", 0, emulator.Health{Recovery: emulator.RecoveryDrainReset}, gpu.Health{Uncorrected: count(0), Recovery: gpu.RecoveryDrainReset, Remap: &gpu.Remap{}}},
		{"a card of before Ampere", 1, emulator.Health{}, gpu.Health{Uncorrected: count(0), Recovery: gpu.RecoveryNone}},
		{"a page to be retired", 1, emulator.Health{RetirePending: true}, gpu.Health{Uncorrected: count(0), RetirePending: true, Recovery: gpu.RecoveryNone}},
		{"ECC is off", 2, emulator.Health{RemapPending: true}, gpu.Health{Remap: &gpu.Remap{Pending: true}, Recovery: gpu.RecoveryNone}},
	} {
		t.Run(c.name, func(t *testing.T) {
			try(t, n.SetHealth(c.index, c.is))
			got, err := d.Health(wait(t), gpus[c.index].UUID)
			if err != nil || !same(got, c.want) {
				t.Errorf("health %s, %v; want %s", show(got), err, show(c.want))
			}
		})
	}

	zero := 0
	for _, c := range []struct {
		code emulator.Return
		want error
	}{
		{emulator.NotSupported, nil},
		{emulator.Unknown, gpu.ErrDriver},
		{emulator.InvalidArgument, gpu.ErrInvalid},
		{emulator.GPUIsLost, gpu.ErrLost},
	} {
		try(t, n.SetHealth(0, emulator.Health{}))
		for _, call := range []string{"nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetFieldValues"} {
			try(t, n.Inject(emulator.Fault{Call: call, GPU: &zero, Code: c.code}))
			_, err := d.Health(wait(t), gpus[0].UUID)
			if !errors.Is(err, c.want) || c.want != nil && !strings.Contains(err.Error(), string(gpus[0].UUID)) {
				t.Errorf("%s says %v: %v, want %v and the GPU's name", call, c.code, err, c.want)
			}
			n.Clear()
		}
	}

	try(t, n.Lose(3))
	if _, err := d.Health(wait(t), gpus[3].UUID); !errors.Is(err, gpu.ErrLost) {
		t.Errorf("health of a lost GPU: %v, want ErrLost", err)
	}
	for i, dev := range inventory(t, d).GPUs {
		if lost := i == 3; dev.Lost != lost || (dev.Fault != "") != lost {
			t.Errorf("GPU %d: lost %v with fault %q, and GPU 3 alone is", i, dev.Lost, dev.Fault)
		}
	}
	if _, err := d.Health(wait(t), "GPU-00000000-0000-0000-0000-000000000000"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("health of a GPU that is not there: %v, want ErrNotFound", err)
	}
}

func same(a, b gpu.Health) bool { return show(a) == show(b) }

func show(h gpu.Health) string {
	count := "unknown"
	if h.Uncorrected != nil {
		count = fmt.Sprint(*h.Uncorrected)
	}
	rows := "unknown rows"
	if h.Remap != nil {
		rows = fmt.Sprintf("%+v", *h.Remap)
	}
	h.Uncorrected, h.Remap = nil, nil
	return fmt.Sprintf("%+v with %s, and %s uncorrected errors", h, rows, count)
}

// Events of lost GPUs name them, and nothing is said of the others. The time
// from the driver's word to the report is in the log.
func TestLossIsNamed(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 8})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	var took []time.Duration
	for i := range 20 {
		index := i % 8
		l.hears(t, n, index, gpus[index].UUID)
		began := time.Now()
		try(t, n.Lose(index))
		at, before := l.until(t, "the loss", lost(gpus[index].UUID))
		took = append(took, at.Sub(began))
		for _, e := range before {
			if e.Kind != gpu.EventXid && e.Kind != gpu.EventChanged {
				t.Errorf("event %+v, where only GPU %d is lost", e, index)
			}
		}
		try(t, n.Restore(index))
		l.until(t, "its return", changed)
	}
	slices.Sort(took)
	t.Logf("from the loss of one GPU of 8 to its report: median %s, most %s of %d", took[len(took)/2], took[len(took)-1], len(took))
}

func TestTwoLosses(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 8})
	n.opts.Rearm = time.Hour
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	try(t, n.Lose(1))
	try(t, n.Lose(5))
	named := map[gpu.UUID]int{}
	for range 2 {
		l.until(t, "a loss", func(e gpu.Event) bool {
			if e.Kind == gpu.EventLost {
				named[e.GPU]++
			}
			return e.Kind == gpu.EventLost
		})
	}
	if named[gpus[1].UUID] != 1 || named[gpus[5].UUID] != 1 {
		t.Errorf("lost are %v, want %s and %s", named, gpus[1].UUID, gpus[5].UUID)
	}
	// The others are watched on, without a new initialisation.
	l.hears(t, n, 6, gpus[6].UUID)
	if got := n.calls("nvmlInit_v2"); got != 1 {
		t.Errorf("the driver was initialised %d times, want once", got)
	}
}

// A GPU that is lost while nothing is heard of it: before the GPUs are watched,
// and while they are registered again because another was lost.
func TestLossBetweenWatches(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 4})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	try(t, n.Lose(0))
	l := listen(t, n, d)
	l.until(t, "the loss of before", lost(""))
	try(t, n.Restore(0))
	l.until(t, "its return", changed)
	l.hears(t, n, 0, gpus[0].UUID)

	three := 3
	const call = "nvmlDeviceGetSupportedEventTypes"
	try(t, n.Inject(emulator.Fault{Call: call, GPU: &three, Hang: true}))
	before := n.calls(call)
	try(t, n.Lose(1))
	l.until(t, "the first loss", lost(gpus[1].UUID))
	await(t, "the others are being registered", func() bool { return n.calls(call) >= before+3 })
	try(t, n.Lose(3))
	n.Clear()
	l.until(t, "the second loss", lost(gpus[3].UUID))
	// Once, however often they are tried again.
	inits := n.calls("nvmlInit_v2")
	await(t, "they are tried again", func() bool { return n.calls("nvmlInit_v2") >= inits+3 })
	try(t, n.Restore(1))
	_, said := l.until(t, "the return of the first", changed)
	for _, e := range said {
		if e.Kind == gpu.EventLost {
			t.Errorf("event %+v, of a loss that was told", e)
		}
	}
	l.hears(t, n, 1, gpus[1].UUID)
}

// A driver that says that a GPU is lost, and then of none that it is.
func TestLossOfNobody(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	d := open(t, n)
	l := listen(t, n, d)
	try(t, n.Inject(emulator.Fault{Call: "nvmlEventSetWait_v2", Code: emulator.GPUIsLost, Count: 1}))
	l.until(t, "a loss without a name", lost(""))
}

// A call that hangs inside the lock delays no report.
func TestEventsPassAHungCall(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 4})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	try(t, n.Inject(emulator.Fault{Call: "nvmlDeviceGetMigMode", Hang: true}))
	before := n.calls("nvmlDeviceGetMigMode")
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := d.Inventory(ctx)
		left <- err
	}()
	await(t, "the call is in the driver", func() bool { return n.calls("nvmlDeviceGetMigMode") > before })
	l.hears(t, n, 0, gpus[0].UUID)
	try(t, n.Lose(1))
	l.until(t, "the loss", lost(gpus[1].UUID))
	l.hears(t, n, 2, gpus[2].UUID)
	select {
	case err := <-left:
		t.Errorf("the call that was to hang has ended: %v", err)
	default:
	}
	leave()
	if err := <-left; !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("the call that hung: %v, want ErrTimeout", err)
	}
	n.Clear()
	await(t, "the driver answers again", func() bool {
		_, err := d.Inventory(wait(t))
		return err == nil
	})
}

// TestMemoryBesideALostGPU: one visit asks several GPUs, and one that is lost hides
// nothing of the others.
func TestMemoryBesideALostGPU(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 3})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	try(t, n.Lose(1))
	of, err := d.Memory(wait(t), gpus[0].UUID, gpus[1].UUID, gpus[2].UUID)
	if !errors.Is(err, gpu.ErrLost) || !strings.Contains(err.Error(), string(gpus[1].UUID)) {
		t.Errorf("the error is %v, want one of the lost GPU", err)
	}
	if len(of) != 2 || of[gpus[0].UUID].Total == 0 || of[gpus[2].UUID].Total == 0 {
		t.Errorf("the memory is %v, want that of the two others", of)
	}
}

// A GPU that does not answer keeps neither the loss of another from being told
// nor the rest from being watched.
func TestLossBesideAHungGPU(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 4})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	zero := 0
	try(t, n.Inject(emulator.Fault{Call: "nvmlDeviceGetMemoryInfo", GPU: &zero, Hang: true}))
	try(t, n.Lose(1))
	l.until(t, "the loss", lost(""))
	l.hears(t, n, 2, gpus[2].UUID)
	try(t, n.Lose(3))
	// Where the GPUs are just being registered again, it is known which one it is.
	l.until(t, "another loss", func(e gpu.Event) bool { return lost("")(e) || lost(gpus[3].UUID)(e) })
	l.hears(t, n, 2, gpus[2].UUID)
	n.Clear()
	try(t, n.Restore(1))
	try(t, n.Restore(3))
	l.hears(t, n, 1, gpus[1].UUID)
	l.hears(t, n, 3, gpus[3].UUID)
}

// A call that hangs keeps a new initialisation out for as long as it likes. The GPUs are
// watched meanwhile as they were known, and the new one is seen when the call has ended.
func TestPlugBesideACallThatHangs(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 3, GPUs: []emulator.GPUSpec{{Index: 2, Unplugged: true}}})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	const call = "nvmlDeviceGetMemoryInfo_v2"
	before := n.calls(call)
	try(t, n.Inject(emulator.Fault{Call: call, Hang: true}))
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() {
		defer close(left)
		_, _ = d.Inventory(ctx)
	}()
	await(t, "the reading hangs", func() bool { return n.calls(call) > before })
	sets := n.calls("nvmlEventSetCreate")
	try(t, n.hand.Plug(2))
	await(t, "the GPUs are registered again", func() bool { return n.calls("nvmlEventSetCreate") > sets })
	l.hears(t, n, 1, gpus[1].UUID)
	leave()
	<-left
	n.Clear()
	l.until(t, "the change", changed)
	if inv := inventory(t, d); len(inv.GPUs) != 3 {
		t.Errorf("the inventory has %d GPUs", len(inv.GPUs))
	}
}

func TestUnplugAndPlug(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(n *node)
	}{
		{"nodes and the kernel's list", func(*node) {}},
		{"no kernel's list", func(n *node) { n.opts.ProcRoot = t.TempDir() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 4})
			c.change(n)
			d := open(t, n)
			before := inventory(t, d).GPUs
			l := listen(t, n, d)

			try(t, n.hand.Unplug(1))
			l.until(t, "the loss", lost(before[1].UUID))
			l.until(t, "the change", changed)
			inv := inventory(t, d)
			if len(inv.GPUs) != 4 {
				t.Fatalf("the inventory has %d GPUs", len(inv.GPUs))
			}
			for _, was := range before {
				dev := inv.ByUUID(was.UUID)
				if dev == nil || (dev.Fault != "") != (was.Index == 1) || dev.Model != was.Model {
					t.Errorf("%s, at %d before, is now %+v", was.UUID, was.Index, dev)
				}
			}
			if dev := inv.ByUUID(before[1].UUID); !strings.Contains(dev.Fault, "no longer lists it") {
				t.Errorf("the GPU that is gone has fault %q", dev.Fault)
			}
			l.hears(t, n, 3, before[3].UUID)

			inits := n.calls("nvmlInit_v2")
			try(t, n.hand.Plug(1))
			l.until(t, "the change", changed)
			inv = inventory(t, d)
			for i, was := range before {
				if dev := inv.GPUs[i]; dev.UUID != was.UUID || dev.Fault != "" || dev.Index != i || dev.PCI != was.PCI {
					t.Errorf("GPU %d is now %+v", i, dev)
				}
			}
			if n.calls("nvmlInit_v2") == inits {
				t.Error("the GPU that came was seen without a new initialisation: the test shows nothing")
			}
			l.hears(t, n, 1, before[1].UUID)
		})
	}
}

// A GPU that is there for the first time.
func TestPlugOfAnotherGPU(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2, GPUs: []emulator.GPUSpec{{Index: 0, Unplugged: true}}})
	d := open(t, n)
	if inv := inventory(t, d); len(inv.GPUs) != 1 {
		t.Fatalf("the inventory is %+v", inv)
	}
	l := listen(t, n, d)
	try(t, n.hand.Plug(0))
	l.until(t, "the change", changed)
	inv := inventory(t, d)
	if len(inv.GPUs) != 2 || inv.GPUs[0].Fault != "" || inv.GPUs[1].Fault != "" || inv.GPUs[0].UUID == inv.GPUs[1].UUID {
		t.Errorf("the inventory is %+v", inv)
	}
	// Links name peers by their new index.
	for i, dev := range inv.GPUs {
		for _, link := range dev.Links {
			if !link.Switch && link.To != 1-i {
				t.Errorf("GPU %d has a link to GPU %d", i, link.To)
			}
		}
	}
	l.hears(t, n, 0, inv.GPUs[0].UUID)
}

// A GPU that is added is found also where letting go of the driver failed, then or
// at a reset before: the library then counts one initialisation more, and looks for
// GPUs at the first one only.
func TestPlugAfterAFailedShutdown(t *testing.T) {
	for _, before := range []bool{true, false} {
		t.Run(fmt.Sprintf("before=%v", before), func(t *testing.T) {
			n := emulate(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2, GPUs: []emulator.GPUSpec{{Index: 0, Unplugged: true}}})
			d := open(t, n)
			only := inventory(t, d).GPUs[0].UUID
			l := listen(t, n, d)
			try(t, n.Inject(emulator.Fault{Call: "nvmlShutdown", Code: emulator.OperatingSystem, Count: 1}))
			if before {
				if err := d.Reset(wait(t), only); err == nil || len(n.Faults()) > 0 {
					t.Fatalf("a reset succeeds (%v) where the driver cannot be let go of; faults %+v", err, n.Faults())
				}
			}
			try(t, n.hand.Plug(0))
			l.until(t, "the change", changed)
			if inv := inventory(t, d); len(n.Faults()) > 0 || len(inv.GPUs) != 2 || inv.GPUs[0].Fault != "" || inv.GPUs[1].Fault != "" {
				t.Errorf("the inventory is %+v; faults %+v", inv, n.Faults())
			}
			l.hears(t, n, 0, inventory(t, d).GPUs[0].UUID)
		})
	}
}

// After Close nothing stands in the way of unloading the kernel module, whatever
// went on before.
func TestCloseLetsGo(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	for range 2 {
		d := open(t, n)
		l := listen(t, n, d)
		try(t, n.hand.Unplug(1))
		l.until(t, "the change", changed) // so that it was initialised anew
		if err := n.Unload(); !errors.Is(err, emulator.InUse) {
			t.Fatalf("unloaded while it is in use: %v", err)
		}
		try(t, d.Close())
		if got := n.State().Sessions; len(got) > 0 {
			t.Fatalf("after Close the driver is open in %v", got)
		}
		try(t, n.hand.Unload())
		if d, err := nvml.Open(wait(t), n.opts); !errors.Is(err, gpu.ErrNoDriver) || errors.Is(err, gpu.ErrReloaded) {
			t.Errorf("opened %v, %v without a driver, want ErrNoDriver", d, err)
		}
		try(t, n.hand.Load(""))
		try(t, n.hand.Plug(1))
	}
	d := open(t, n)
	inv := inventory(t, d)
	if len(inv.GPUs) != 2 || inv.GPUs[0].Fault != "" || inv.GPUs[1].Fault != "" {
		t.Errorf("the inventory is %+v", inv)
	}
	try(t, d.Close())

	// With another version only a new process can go on.
	try(t, n.hand.Unload())
	try(t, n.hand.Load("585.1.2"))
	if d, err := nvml.Open(wait(t), n.opts); !errors.Is(err, gpu.ErrReloaded) {
		t.Errorf("opened %v, %v, want ErrReloaded", d, err)
	}
}

// The driver is taken away by force while it is open, and another version comes.
func TestReplacedDriverIsSaid(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	l := listen(t, n, d)
	n.stop()
	l.until(t, "that the driver is gone", lost(""))
	if _, err := d.Inventory(wait(t)); err == nil || errors.Is(err, gpu.ErrReloaded) {
		t.Errorf("without a driver: %v, want an error that speaks of no other one", err)
	}
	other := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2, Driver: "585.1.2"})
	await(t, "the driver is found to be another one", func() bool {
		_, err := d.Inventory(wait(t))
		return errors.Is(err, gpu.ErrReloaded)
	})
	if _, err := d.Memory(wait(t), u); !errors.Is(err, gpu.ErrReloaded) {
		t.Errorf("memory: %v, want ErrReloaded", err)
	}
	if _, err := d.Health(wait(t), u); !errors.Is(err, gpu.ErrReloaded) {
		t.Errorf("health: %v, want ErrReloaded", err)
	}
	// The same version laid down again is no other one.
	other.stop()
	again := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	await(t, "the driver answers again", func() bool {
		_, err := d.Inventory(wait(t))
		return err == nil
	})
	l.until(t, "that it does", changed)
	l.hears(t, again, 1, inventory(t, d).GPUs[1].UUID)
}

// BenchmarkInventory is of eight GPUs; driver calls are counted too.
func BenchmarkInventory(b *testing.B) {
	for _, c := range []struct {
		name string
		emulator.Spec
	}{
		{"without a topology", emulator.Spec{Model: "H100-80GB", Count: 8}},
		{"no NVLink", emulator.Spec{Topology: "dgx-h100", NVLink: "none"}},
		{"NVSwitch", emulator.Spec{Topology: "dgx-h100"}},
		{"cube mesh", emulator.Spec{Topology: "dgx-1"}},
	} {
		b.Run(c.name, func(b *testing.B) {
			n := emulate(b, c.Spec)
			d := open(b, n)
			inventory(b, d)
			before, rounds := n.allCalls(), 0
			for b.Loop() {
				inventory(b, d)
				rounds++
			}
			b.ReportMetric(float64(n.allCalls()-before)/float64(rounds), "calls/op")
		})
	}
}

func BenchmarkHealth(b *testing.B) {
	n := emulate(b, emulator.Spec{Model: "H100-80GB", Count: 8})
	d := open(b, n)
	u := inventory(b, d).GPUs[0].UUID
	for b.Loop() {
		if _, err := d.Health(b.Context(), u); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPlace is the part of an inventory that is read from sysfs.
func BenchmarkPlace(b *testing.B) {
	n := emulate(b, emulator.Spec{Topology: "dgx-h100"})
	asked := inventory(b, open(b, n))
	for b.Loop() {
		inv := gpu.Inventory{GPUs: slices.Clone(asked.GPUs)}
		topology.Read(os.DirFS(n.opts.SysRoot), &inv)
		if inv.Machine == "" {
			b.Fatal("it says nothing")
		}
	}
}

// A driver that was loaded anew is told from the one before, also where it is the same version,
// and nothing else changes that: a reset, a GPU that is gone and back, another process.
func TestLoadIsTold(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2})
	load := func() string {
		t.Helper()
		d, err := nvml.Open(wait(t), n.opts)
		try(t, err)
		inv := inventory(t, d)
		try(t, d.Close())
		return inv.Load
	}
	first := load()
	if first == "" {
		t.Fatal("no loading is told")
	}
	try(t, n.hand.Reset(0))
	try(t, n.hand.Unplug(1))
	try(t, n.hand.Plug(1))
	if again := load(); again != first {
		t.Errorf("without another loading it is told as %s, and was %s", again, first)
	}
	for range 3 {
		try(t, n.hand.Unload())
		try(t, n.hand.Load(""))
		now := load()
		if now == "" || now == first {
			t.Errorf("another loading is told as %q, and the one before was %s", now, first)
		}
		first = now
	}
	n.opts.SysRoot = t.TempDir()
	if now := load(); now != "" {
		t.Errorf("where the kernel shows no module it is told as %s", now)
	}
}
