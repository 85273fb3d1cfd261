// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"context"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// Contexts and modules are within the cap, though their size is the driver's to
// know: once it was read, what is left for allocations is less by just that, also
// where the first estimate of a context was far off, and it comes back when they
// go.
func TestOverhead(t *testing.T) {
	const limit = 4 * GiB
	for name, estimate := range map[string]uint64{"estimate right": context300, "estimate high": lib.DefaultContext, "estimate low": 64 * MiB} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
			b := r.allocate(t, "overhead", []share{{gpu: 0, bytes: limit, context: estimate}}, false, nil)
			k := b.tool(t, "probe", nil)
			take := func(call string, bytes uint64, count int) fields {
				t.Helper()
				return k.ask("took", "take %s %d %d", call, bytes, count)
			}
			if f := take("cuCtxCreate_v2", 0, 3); f["result"] != "0" { // four, with the first one
				t.Fatalf("%q", k.said)
			}
			if f := take("cuModuleLoadData", 200*MiB, 3); f["result"] != "0" {
				t.Fatalf("%q", k.said)
			}
			// What a module took counts from the next reading on.
			b.read(t, 0)
			overhead := r.used(0)
			if least := uint64(4*context300 + 600*MiB); overhead < least {
				t.Fatalf("contexts and modules take %d MiB, want at least %d: the emulated driver does not count them", overhead/MiB, least/MiB)
			}
			fill := func(left uint64) fields {
				t.Helper()
				f := take("cuMemAlloc_v2", 8*MiB, 1000)
				if got := f.n("count") * 8 * MiB; f["result"] != "2" || got > left || left-got >= 8*MiB {
					t.Errorf("%q: %d MiB granted, %d were left", k.said, got/MiB, left/MiB)
				}
				if used := r.used(0); used > limit {
					t.Errorf("%d MiB over the cap", (used-limit)/MiB)
				}
				return f
			}
			f := fill(limit - overhead)
			for i := range f.n("count") {
				k.ask("gave", "give %d", f.n("id")+i)
			}
			for id := range 6 { // three contexts, three modules
				if g := k.ask("gave", "give %d", id); g["result"] != "0" {
					t.Errorf("%q", k.said)
				}
			}
			b.read(t, 0)
			if used := r.used(0); used >= overhead {
				t.Fatalf("after contexts and modules have gone %d MiB are used, %d before", used/MiB, overhead/MiB)
			}
			fill(limit - r.used(0))
			if peak := r.peak(0); peak > limit {
				t.Errorf("a peak of %d MiB, %d over the cap", peak/MiB, (peak-limit)/MiB)
			}
			k.quit()
		})
	}
}

// A program that fills its cap faster than the driver is read stays within it, though its
// processes have more than was counted: contexts that take more than was expected of them, or
// code that was loaded since. On an H200 a context has 518 MiB, PyTorch's first kernel loads
// another 92 MiB, and 8 GiB are allocated within 10 ms.
func TestFilledBeforeAReading(t *testing.T) {
	const limit, code = 4 * GiB, 300 * MiB
	for _, c := range []struct {
		name, call string
		code       bool // loaded after a reading
	}{{"plain", "cuMemAlloc_v2", false}, {"pool", "cuMemAllocAsync", false}, {"plain and code", "cuMemAlloc_v2", true}, {"pool and code", "cuMemAllocAsync", true}} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, emulator.Spec{Model: "H200-141GB", Count: 1})
			b := r.unread(t, "filled", []share{{gpu: 0, bytes: limit, context: 64 * MiB}}, false, nil)
			ctx, stop := context.WithCancel(t.Context())
			b.readers[0] = &capsule.Reader{Driver: r.m, Container: b.Container, Pages: r.pages, Key: b.key, GPU: r.uuid(0), Every: promised}
			done := make(chan error, 1)
			go func() { done <- b.readers[0].Run(ctx) }()
			b.stop, b.done = stop, []chan error{done}
			other, k := b.tool(t, "probe", nil), b.tool(t, "probe", nil)
			if f := other.ask("took", "take cuMemAlloc_v2 %d 1", 2*MiB); f["result"] != "0" {
				t.Fatalf("%q", other.said)
			}
			left := uint64(limit - 2*context300 - 2*MiB)
			if c.code {
				if f := k.ask("took", "take %s %d 1", c.call, 2*MiB); f["result"] != "0" {
					t.Fatalf("%q", k.said)
				}
				b.read(t, 0)
				if err := r.m.World.AddProcess(emulator.Process{PID: b.HostPID(k.p.PID), Kind: emulator.Compute, MiB: code / MiB}); err != nil {
					t.Fatal(err)
				}
				left -= code + 32*MiB
			}
			f := k.ask("took", "take %s %d 1000", c.call, 32*MiB)
			if got := f.n("count") * 32 * MiB; f["result"] != "2" || got > left+32*MiB || left-min(got, left) >= 64*MiB {
				t.Errorf("%q: %d MiB granted, %d were left", k.said, got/MiB, left/MiB)
			}
			if peak := r.peak(0); peak > limit {
				t.Errorf("a peak of %d MiB, %d over the cap", peak/MiB, (peak-limit)/MiB)
			}
			k.quit()
			other.quit()
		})
	}
}

// Where the driver's figure is not known, and where nobody reads, what the
// library has counted by itself decides, at once.
func TestBlind(t *testing.T) {
	const limit = 2 * GiB
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	for _, c := range []struct {
		name  string
		blind func(b *box)
	}{
		{"figure unknown", func(b *box) { b.readers[0].Blind(true) }},
		{"nobody reads", func(b *box) { b.stop() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := r.allocate(t, "blind", []share{{gpu: 0, bytes: limit}}, false, nil)
			defer b.close(t)
			c.blind(b)
			k := b.tool(t, "probe", nil)
			f := k.ask("took", "take cuMemAlloc_v2 %d 1000", 32*MiB)
			if got, left := f.n("count")*32*MiB, uint64(limit-context300); f["result"] != "2" || got > left || left-got >= 32*MiB {
				t.Errorf("%q: %d MiB granted, %d were left", k.said, got/MiB, left/MiB)
			}
			k.quit()
		})
	}
}

// A short program that fills its cap, right after another one like it, waits for the agent once:
// what that one had may not be the driver's again yet. The agent answers at once, and not with its
// next look.
func TestShortPrograms(t *testing.T) {
	const programs = 20
	r := newRig(t, emulator.Spec{Model: "H200-141GB", Count: 1})
	shares := []share{{gpu: 0, bytes: 4 * GiB, context: lib.DefaultContext, code: lib.DefaultCode}}
	b := r.unread(t, watched(), shares, false, nil)
	r.watch(t, b, shares)
	bare := bareRig(t, emulator.Spec{Model: "H200-141GB", Count: 1})
	edits, image := bare.m.Plain(0)
	capsule.Bind(&edits, bare.probe, "/probe")
	plain, err := bare.m.Open(t.Context(), edits, image)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	run := func(c *capsule.Container) (took []time.Duration) {
		for range programs {
			began := time.Now()
			k, err := startTool(t, c, "probe", nil)
			if err != nil {
				t.Fatal(err)
			}
			if f := k.ask("took", "take cuMemAlloc_v2 %d 3", GiB); f["result"] != "0" {
				t.Fatalf("%q", k.said)
			}
			k.quit()
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		return took
	}
	with, without := run(b.Container), run(plain)
	t.Logf("a program takes %v with the cap, at most %v; without %v, at most %v", with[programs/2], with[programs-1], without[programs/2], without[programs-1])
	u, err := r.pages.OpenUsage(b.key, r.uuid(0))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if c, err := u.Read(); err != nil || c.Asks > programs+1 || c.Refusals > 0 {
		t.Errorf("%d programs have asked for %d readings, and were refused %d times: %v", programs, c.Asks, c.Refusals, err)
	}
}
