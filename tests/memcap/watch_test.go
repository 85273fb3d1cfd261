// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
)

// post is the agent's own watchdog, at its own pace, on a rig with one container.
// It stands in for the node: what the guard asks of a driver, a kubelet, a
// container runtime and /proc, it answers from the emulated driver's books and the
// capsule.
type post struct {
	r          *rig
	b          *box
	allocation ledger.Allocation

	mu    sync.Mutex
	ended []string // how containers were ended; guarded by mu
	looks int      // guarded by mu
	log   bytes.Buffer
}

const watchDomain = "example.com"

// watched is the key of an allocation that the watchdog recognises as one.
func watched() string { return cdi.Key(watchDomain+"/gpu-mem", []string{"watched"}) }

// watch runs the watchdog over a container whose key is watched, until the test ends. Whom it would
// have ended goes on, and is told of at the end.
func (r *rig) watch(t *testing.T, b *box, shares []share) *post {
	t.Helper()
	p := &post{r: r, b: b, allocation: ledger.Allocation{ID: b.key, Resource: watchDomain + "/gpu-mem",
		Holder: ledger.Holder{Pod: workload.Pod{Namespace: "work", Name: b.key}, Container: "main"}}}
	for _, s := range shares {
		p.allocation.Grants = append(p.allocation.Grants, ledger.Grant{GPU: r.uuid(s.gpu), Piece: piece.Units{}, Cap: piece.CapOf(s.bytes)})
	}
	g := guard.New(guard.Options{Domain: watchDomain, Log: slog.New(slog.NewTextHandler(&p.log, nil))},
		guard.Worlds{Driver: p, Allocations: p, Proc: p, Runtime: p, Pages: p, Observer: p})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	b.stop = func() {
		stop()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("the watchdog ended with %v", err)
		}
		if t.Failed() {
			t.Logf("the watchdog said:\n%s", p.log.String())
		}
	}
	return p
}

// kills is how often the watchdog has ended the container.
func (p *post) kills() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.ended)
}

func (p *post) Processes(_ context.Context, u gpu.UUID) ([]gpu.Process, error) {
	p.mu.Lock()
	p.looks++
	p.mu.Unlock()
	st := p.r.m.World.State()
	var out []gpu.Process
	for _, e := range st.Processes {
		if st.GPUs[e.GPU].UUID == string(u) {
			out = append(out, gpu.Process{PID: e.PID, Kind: gpu.Compute, Bytes: e.Bytes, Known: true, GI: -1, CI: -1})
		}
	}
	return out, nil
}

func (p *post) Memory(_ context.Context, gpus ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error) {
	of := map[gpu.UUID]gpu.Memory{}
	for i, g := range p.r.state.GPUs {
		if slices.Contains(gpus, gpu.UUID(g.UUID)) {
			used := gpu.MiB((p.r.used(i) + MiB - 1) / MiB)
			of[gpu.UUID(g.UUID)] = gpu.Memory{Total: gpu.MiB(g.MemoryMiB), Reserved: gpu.MiB(g.ReservedMiB), Used: used,
				Free: gpu.MiB(g.MemoryMiB-g.ReservedMiB) - used}
		}
	}
	return of, nil
}

func (p *post) Offered() []gpu.Device {
	var out []gpu.Device
	for i, u := range p.allocation.GPUs() {
		out = append(out, gpu.Device{UUID: u, Index: i})
	}
	return out
}

func (p *post) Allocations() []ledger.Allocation { return []ledger.Allocation{p.allocation} }
func (p *post) Lends(gpu.UUID) bool              { return false }
func (p *post) Open(gpu.UUID) bool               { return false }
func (p *post) Changed() <-chan struct{}         { return nil }
func (p *post) Check() error                     { return nil }
func (p *post) owner(start uint64) node.Owner {
	return node.Owner{ID: p.allocation.ID, PodUID: "uid-" + p.allocation.ID, Start: start}
}
func (p *post) Evicted(workload.Pod, int) {}

func (p *post) Container(pid int) (node.Owner, error) {
	start, err := startTime(pid)
	if err != nil {
		return node.Owner{}, fmt.Errorf("process %d: %w", pid, gpu.ErrNotFound)
	}
	if !p.b.Has(pid) {
		return node.Owner{Start: start}, fmt.Errorf("process %d: %w", pid, gpu.ErrNotFound)
	}
	return p.owner(start), nil
}

func (p *post) Inside(pid int) (namespace, inner uint64, err error) {
	proc := node.NewProc("")
	defer proc.Close()
	return proc.Inside(pid)
}

// startTime is field 22 of /proc/<pid>/stat, see proc(5).
func startTime(pid int) (uint64, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 20 {
		return 0, io.ErrUnexpectedEOF
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

func (p *post) Containers(context.Context) ([]node.Container, error) {
	return []node.Container{{ID: p.allocation.ID, PodUID: "uid-" + p.allocation.ID, Namespace: "work", Pod: p.allocation.ID, Name: "main", Running: true,
		Annotations: map[string]string{cdi.AnnotationName(watchDomain, p.allocation.ID): p.allocation.Resource}}}, nil
}

func (p *post) End(context.Context, node.Owner) (string, error) { return "told the test", nil }

func (p *post) Ended(e guard.End) {
	kind := e.Kind
	p.mu.Lock()
	defer p.mu.Unlock()
	st := p.r.m.World.State()
	p.ended = append(p.ended, fmt.Sprintf("%s: %+v", kind, st.Processes))
}

func (p *post) Meter(key string, u gpu.UUID) (guard.Meter, error) {
	return guard.Counters{Pages: p.r.pages}.Meter(key, u)
}

// The watchdog of these tests is at work: it ends a program that goes round the cap,
// and tells of it.
func TestWatch(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	shares := []share{{gpu: 0, bytes: GiB}}
	b := r.unread(t, watched(), shares, false, nil)
	p := r.watch(t, b, shares)
	k := b.tool(t, "probe", []string{"LIBCUDA=" + lib.RealCUDA, socket}, "-door", "path")
	if f := k.ask("took", "take cuMemAlloc_v2 %d", 2*GiB); f["result"] != "0" {
		t.Fatalf("%q", k.said)
	}
	await(t, "the watchdog", func() bool { return len(p.kills()) > 0 }, func() any { return p.log.String() })
	k.quit()
}

// The watchdog finds what a process counts by how that names itself: of those who share an
// allocation, the one that goes round the count is ended.
func TestWhoCountsWhat(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	b := r.unread(t, watched(), []share{{gpu: 0, bytes: 4 * GiB}}, false, nil)
	k := b.tool(t, "probe", []string{socket})
	if f := k.ask("took", "take cuMemAlloc_v2 %d", GiB); f["result"] != "0" {
		t.Fatalf("%q", k.said)
	}
	usage, err := r.pages.OpenUsage(b.key, r.uuid(0))
	if err != nil {
		t.Fatal(err)
	}
	defer usage.Close()
	proc := node.NewProc("")
	defer proc.Close()
	listed := r.m.World.State().Processes
	if len(listed) != 1 {
		t.Fatalf("on the GPU: %+v", listed)
	}
	namespace, inner, err := proc.Inside(listed[0].PID)
	if err != nil {
		t.Fatal(err)
	}
	who := lib.Process{Namespace: namespace, PID: inner}
	counted := map[lib.Process]uint64{who: 0}
	if err := usage.Counted(counted); err != nil || counted[who] < GiB || counted[who] > 2*GiB {
		t.Errorf("%+v counts %d bytes, %v, want a GiB and a context", who, counted[who], err)
	}
	k.quit()
}

// Processes that have filled their cap as they may, and load code later, stay within it, and
// nobody ends them. On an H200 a context has 518 MiB and PyTorch's first kernel takes 92 MiB; one
// that has loaded much more takes nothing from what is kept for the others.
func TestLateCode(t *testing.T) {
	const bare, code = 518 * MiB, 92 * MiB
	for _, c := range []struct {
		name  string
		limit uint64
		n     int
		much  uint64 // what the first of them has loaded before
	}{
		{"three", 4 * GiB, 3, 0},
		{"five", 8 * GiB, 5, 0},
		{"five, one of which has loaded much", 8 * GiB, 5, 700 * MiB},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, emulator.Spec{Model: "H200-141GB", Count: 1, ContextMiB: bare / MiB})
			shares := []share{{gpu: 0, bytes: c.limit, context: lib.DefaultContext, code: lib.DefaultCode}}
			b := r.unread(t, watched(), shares, false, nil)
			p := r.watch(t, b, shares)
			looked := func(n int) {
				t.Helper()
				p.mu.Lock()
				from := p.looks
				p.mu.Unlock()
				await(t, "the watchdog's looks", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.looks >= from+n }, func() any { return p.log.String() })
			}
			load := func(k *tool, bytes uint64) {
				t.Helper()
				if err := r.m.World.AddProcess(emulator.Process{PID: b.HostPID(k.p.PID), Kind: emulator.Compute, MiB: bytes / MiB}); err != nil {
					t.Fatal(err)
				}
			}
			var tools []*tool
			for range c.n {
				k := b.tool(t, "probe", nil)
				if f := k.ask("took", "take cuMemAlloc_v2 %d 1", 2*MiB); f["result"] != "0" {
					t.Fatalf("%q", k.said)
				}
				tools = append(tools, k)
			}
			looked(1)
			if c.much > 0 {
				load(tools[0], c.much)
				looked(1)
			}
			for _, k := range tools {
				if f := k.ask("took", "take cuMemAlloc_v2 %d 1000", 32*MiB); f["result"] != "2" {
					t.Fatalf("%q", k.said)
				}
			}
			late := tools
			if c.much > 0 {
				late = tools[1:]
			}
			if left := c.limit - r.used(0); left < uint64(len(late))*code || left > uint64(len(late))*code+64*MiB {
				t.Errorf("%d MiB are left for %d processes' code", left/MiB, len(late))
			}
			for _, k := range late {
				load(k, code)
			}
			looked(2)
			if peak := r.peak(0); peak > c.limit {
				t.Errorf("a peak of %d MiB, %d over the cap", peak/MiB, (peak-c.limit)/MiB)
			}
			for _, k := range p.kills() {
				t.Errorf("the watchdog would have ended it: %s", k)
			}
			for _, k := range tools {
				k.quit()
			}
		})
	}
}
