// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

var testKit = lib.Kit{CUDA: "/kit/libcuda.so.1", NVML: "/kit/libnvidia-ml.so.1", Hide: "/kit/hide", Mark: "/kit/open", Hold: "/cap/kit/hold", Driver: "/lib/libnvidia-ml.so.615.1"}

// driverParts is what the emulated drivers of these tests say that containers
// need.
func driverParts(inv *gpu.Inventory) cdi.Parts {
	p := cdi.Parts{Devices: map[gpu.UUID]specs.ContainerEdits{}}
	for _, lib := range []string{"libcuda.so.580.1", "libnvidia-ml.so.580.1"} {
		p.Common.Mounts = append(p.Common.Mounts, &specs.Mount{HostPath: "/lib/" + lib, ContainerPath: "/lib/" + lib})
	}
	for _, d := range inv.GPUs {
		p.Devices[d.UUID] = specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: fmt.Sprintf("/dev/nvidia%d", d.Minor)}}}
	}
	return p
}

// pages is limit pages in memory. It outlives agents.
type pages struct {
	mu sync.Mutex
	// Guarded by mu:
	limits  map[string]map[gpu.UUID]uint64
	percent map[string]int       // what was written last of an allocation
	since   map[string]time.Time // what was written last of an allocation
	spoilt  map[string]bool
	kit     *lib.Kit // that fits the driver; nil is testKit
	// slow, if set, keeps Remove until it is closed, and removeErr has it fail.
	slow      chan struct{}
	removeErr error
	fitErr    error // Fit has no libraries at all
	notices   map[string]time.Time
	control   map[string]uint64
	waits     map[string]bool // what was written last of an allocation
}

func (p *pages) Notice(key string) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.notices == nil {
		p.notices = map[string]time.Time{}
	}
	p.notices[key] = time.Time{}
	return "/notices/" + key, nil
}

func (p *pages) SetControl(key string, bits, of uint64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.control == nil {
		p.control = map[string]uint64{}
	}
	p.control[key] = p.control[key]&^of | bits&of
	return nil
}

func (p *pages) SetNotice(key string, by time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.notices[key]; !ok {
		return gpu.ErrNotFound
	}
	p.notices[key] = by
	return nil
}

func (p *pages) Sound(key string) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.spoilt[key], nil
}

func (p *pages) Write(key string, limits []lib.Limit) (map[gpu.UUID]lib.Page, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.limits == nil {
		p.percent, p.waits = map[string]int{}, map[string]bool{}
		p.limits, p.since, p.spoilt = map[string]map[gpu.UUID]uint64{}, map[string]time.Time{}, map[string]bool{}
	}
	delete(p.spoilt, key)
	paths := map[gpu.UUID]lib.Page{}
	if p.limits[key] == nil {
		p.limits[key] = map[gpu.UUID]uint64{}
	}
	for _, l := range limits {
		p.limits[key][l.GPU], p.since[key] = l.Bytes, l.Since
		p.waits[key] = l.Waits
		p.percent[key] = max(p.percent[key], l.Percent)
		page := lib.Page{Limit: "/limits/" + key + "/" + string(l.GPU)}
		if l.Bytes != lib.None {
			page.Usage = "/usage/" + key + "/" + string(l.GPU)
		}
		paths[l.GPU] = page
	}
	return paths, nil
}

func (p *pages) Limit(key string, u gpu.UUID) (uint64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if bytes, ok := p.limits[key][u]; ok {
		return bytes, nil
	}
	return 0, gpu.ErrNotFound
}

func (p *pages) Percent(key string, u gpu.UUID) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.limits[key][u]; ok {
		return p.percent[key], nil
	}
	return 0, gpu.ErrNotFound
}

func (p *pages) Remove(key string) error {
	p.mu.Lock()
	slow := p.slow
	p.mu.Unlock()
	if slow != nil {
		<-slow
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.removeErr == nil {
		delete(p.limits, key)
		delete(p.notices, key)
	}
	return p.removeErr
}

// TestLibrariesThatCannotBeInstalled: they are installed after the driver has been read, so
// the agent runs already: nothing is given out without them, and the node says why.
func TestLibrariesThatCannotBeInstalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.caps.fitErr = errors.New("install the cap's library: no space left on device")
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		unit := string(uuid(0)) + "::0"
		if _, err := b.source(memResource).Allocate([]string{unit}); err == nil || !strings.Contains(err.Error(), "no space left") {
			t.Errorf("devices are given out without the library: %v", err)
		}
		if b.wantState("failed"); !strings.Contains(b.message(), "no space left") {
			t.Errorf("the node says %q", b.message())
		}
		b.caps.mu.Lock()
		b.caps.fitErr = nil
		b.caps.mu.Unlock()
		pause(backOffMax)
		b.wantState("applied")
		b.hold("a", memResource, unit)
	})
}

// TestNobodyWaitsForPagesOfTheEnded: the loop itself unmounted the pages of allocations that
// had ended, for which the kernel takes its time, and containers that started waited.
func TestNobodyWaitsForPagesOfTheEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		unit := func(n int) string { return fmt.Sprintf("%s::%d", uuid(0), n) }
		set := func(change func(*pages)) {
			b.caps.mu.Lock()
			defer b.caps.mu.Unlock()
			change(b.caps)
		}
		// wanted are the units that have pages.
		wanted := func(what string, units ...string) {
			t.Helper()
			var want []string
			for _, u := range units {
				want = append(want, cdi.Key(memResource, []string{u}))
			}
			if keys, _ := b.caps.List(); !slices.Equal(keys, slices.Sorted(slices.Values(want))) {
				t.Errorf("%s: pages of %v, want %v", what, keys, want)
			}
		}
		ends := func(pod string) {
			b.release(pod)
			b.with(func() { b.entries = nil })
			pause(time.Minute)
		}
		slow := make(chan struct{})
		set(func(p *pages) { p.slow = slow })
		b.hold("a", memResource, unit(0))
		ends("a")
		b.allocate("b", memResource, unit(1))
		if err := b.prepare(memResource, unit(1)); err != nil {
			close(slow)
			t.Fatalf("beside pages that are being removed: %v", err)
		}
		b.release("b")
		b.hold("b", memResource, unit(1))
		b.allocate("a", memResource, unit(0))
		prepared := make(chan error, 1)
		go func() { prepared <- b.prepare(memResource, unit(0)) }()
		pause(time.Second)
		if len(prepared) > 0 {
			t.Error("an allocation got the pages of the one before it that were being removed")
		}
		set(func(p *pages) { p.slow = nil })
		close(slow)
		if err := <-prepared; err != nil {
			t.Error(err)
		}
		wanted("after that", unit(0), unit(1))

		set(func(p *pages) { p.removeErr = errors.New("busy") })
		ends("b")
		wanted("they cannot be removed", unit(0), unit(1))
		if b.wantState("failed"); !strings.Contains(b.message(), "busy") {
			t.Errorf("the node says %q", b.message())
		}
		if n := b.rounds; n > 100 {
			t.Errorf("%d rounds", n)
		}
		set(func(p *pages) { p.removeErr = nil })
		pause(backOffMax)
		b.wantState("applied")
		wanted("they can", unit(0))
	})
}

func (p *pages) List() ([]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.limits)), nil
}

func (p *pages) Fit(cdi.Parts) (lib.Kit, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fitErr != nil {
		return lib.Kit{}, p.fitErr
	}
	if p.kit != nil {
		return *p.kit, nil
	}
	return testKit, nil
}

func (p *pages) Prune() error { return nil }

// mountAt is the host path that an allocation's container has at a path.
func mountAt(t *testing.T, b *bench, key, path string) string {
	t.Helper()
	spec, err := b.Agent.loop.gates.files.Read(key)
	if err != nil {
		t.Fatal(err)
	}
	at := ""
	for _, m := range spec.Devices[0].ContainerEdits.Mounts {
		if m.ContainerPath == path {
			at = m.HostPath
		}
	}
	return at
}

// hidden reports whether the image's own driver libraries are, before any other hook runs.
func hidden(t *testing.T, b *bench, key string) bool {
	t.Helper()
	spec, err := b.Agent.loop.gates.files.Read(key)
	if err != nil {
		t.Fatal(err)
	}
	hooks := spec.Devices[0].ContainerEdits.Hooks
	return len(hooks) > 0 && reflect.DeepEqual(*hooks[0], testKit.Hook())
}

// capsOf is what an allocation's grants say of its GPUs' memory, as far as that is known.
func capsOf(c *ledger.Allocation) (out []lib.Limit) {
	for _, u := range c.GPUs() {
		if limit := c.Cap(u); limit.Known {
			out = append(out, lib.Limit{GPU: u, Bytes: limit.Bytes, Code: lib.DefaultCode})
		}
	}
	return out
}

// TestLibrariesFitTheDriver: with another driver, allocations get the libraries that were
// fitted to it.
func TestLibrariesFitTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		b := start(t, o, t.TempDir(), "version: v1\npartitions:\n  default:\n    - {devices: all, mode: whole}\n")
		defer b.end()
		ids := []string{string(o.inv.GPUs[0].UUID)}
		b.hold("pod", "example.com/gpu", ids...)
		key := cdi.Key("example.com/gpu", ids)
		if got := mountAt(t, b, key, "/lib/libcuda.so.580.1"); got != testKit.CUDA {
			t.Fatalf("%q stands for the driver's library, want %q", got, testKit.CUDA)
		}
		newer := lib.Kit{CUDA: "/newer/libcuda.so.1", NVML: "/newer/libnvidia-ml.so.1"}
		o.caps.mu.Lock()
		o.caps.kit = &newer
		o.caps.mu.Unlock()
		b.with(func() { b.outside.inv = &gpu.Inventory{Driver: "590.2", GPUs: b.outside.inv.GPUs} })
		b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
		synctest.Wait()
		if got := mountAt(t, b, key, "/lib/libcuda.so.580.1"); got != newer.CUDA {
			t.Errorf("%q stands for the new driver's library, want %q", got, newer.CUDA)
		}
	})
}

// TestCapsOfAllocations: what containers may have, and what they get for it.
func TestCapsOfAllocations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(3)
		b := start(t, o, t.TempDir(), `
version: v1
partitions:
  default:
    - {devices: [0], mode: shared}
    - {devices: [1], mode: shared, replicas: 4}
    - {devices: [2], mode: whole}
`)
		u := func(i int) gpu.UUID { return o.inv.GPUs[i].UUID }
		units := []string{string(u(0)) + "::0", string(u(0)) + "::1", string(u(0)) + "::2"}
		cases := []struct {
			resource string
			ids      []string
			gpu      gpu.UUID
			want     uint64
		}{
			{"example.com/gpu-mem", units, u(0), 3 * uint64(unit) << 20},
			{"example.com/gpu.shared", []string{string(u(1)) + "::2"}, u(1), uint64(o.inv.GPUs[1].Usable()/4) << 20},
			{"example.com/gpu", []string{string(u(2))}, u(2), lib.None},
		}
		for i, c := range cases {
			b.hold(fmt.Sprint("pod-", i), c.resource, c.ids...)
			key := cdi.Key(c.resource, c.ids)
			if got, err := o.caps.Limit(key, c.gpu); err != nil || got != c.want {
				t.Errorf("%s: a page with %d, %v, want %d", c.resource, got, err, c.want)
			}
			usage := "/usage/" + key + "/" + string(c.gpu)
			if c.want == lib.None {
				usage = "" // nothing is counted
			}
			for path, want := range map[string]string{
				"/lib/libcuda.so.580.1":      testKit.CUDA,
				"/lib/libnvidia-ml.so.580.1": testKit.NVML,
				lib.RealCUDA:                 "/lib/libcuda.so.580.1",
				lib.RealNVML:                 "/lib/libnvidia-ml.so.580.1",
				lib.LimitPath(c.gpu, key):    "/limits/" + key + "/" + string(c.gpu),
				lib.UsagePath(c.gpu, key):    usage,
				lib.OpenMark:                 "",
			} {
				if got := mountAt(t, b, key, path); got != want {
					t.Errorf("%s: %q stands at %s, want %q", c.resource, got, path, want)
				}
			}
			// Who has all of a GPU may bring what libraries he likes.
			if got, want := hidden(t, b, key), c.want != lib.None; got != want {
				t.Errorf("%s: the image's libraries are hidden: %v, want %v", c.resource, got, want)
			}
		}
		if got := b.Offered(); len(got) != 3 {
			t.Errorf("%d GPUs are offered, want 3", len(got))
		}
		var caps []string
		for _, c := range b.Allocations() {
			for _, l := range capsOf(&c) {
				caps = append(caps, fmt.Sprint(c.Resource, " ", l.Bytes))
			}
		}
		slices.Sort(caps)
		var want []string
		for _, c := range cases {
			want = append(want, fmt.Sprint(c.resource, " ", c.want))
		}
		slices.Sort(want)
		if !slices.Equal(caps, want) {
			t.Errorf("caps\n%s, want\n%s", strings.Join(caps, "\n"), strings.Join(want, "\n"))
		}
		b.end()
	})
}

// lose ends an agent and takes away what it has written down.
func (b *bench) lose(names ...string) {
	b.t.Helper()
	b.end()
	for _, name := range names {
		if err := os.RemoveAll(filepath.Join(b.dir, "..", filepath.Base(b.dir)+"-state", name)); err != nil {
			b.t.Fatal(err)
		}
	}
}

// A container keeps the cap that it was given where the agent's state is lost and
// its unit, or the number of replicas, has changed: its limit page decides, for the
// container and for the watchdog. What is left of its GPU is given out in the same
// parts or not at all.
func TestCapOutlivesLostState(t *testing.T) {
	replicas := func(n int) string { return fmt.Sprint(allShared, "      replicas: ", n, "\n") }
	for _, c := range []struct {
		name, before, after string
		unit                gpu.MiB
		lost                []string
		resource            string
		n                   int
		want                gpu.MiB
		listed, later       string
	}{
		{"a unit of half the size", allShared, allShared, unit / 2, []string{"state.json"}, memResource, 2, 2048, "0.0~ 0.1~ 0.2x 0.3x", "0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7"},
		{"a unit of half the size, and all is lost", allShared, allShared, unit / 2, []string{""}, memResource, 2, 2048, "0.0~ 0.1~ 0.2x 0.3x", "0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7"},
		{"a unit of twice the size", allShared, allShared, 2 * unit, []string{"state.json"}, memResource, 2, 2048, "0.0~ 0.1~ 0.2x 0.3x", "0.0 0.1"},
		{"the same unit", allShared, allShared, unit, []string{"state.json"}, memResource, 2, 2048, "0.0 0.1 0.2 0.3", "0.0 0.1 0.2 0.3"},
		{"more replicas", replicas(2), replicas(4), unit, []string{"state.json"}, sharedResource, 1, 2050, "0.0~ 0.1x", "0.0 0.1 0.2 0.3"},
		{"fewer replicas", replicas(4), replicas(2), unit, []string{""}, sharedResource, 1, 1025, "0.0~ 0.1x 0.2x 0.3x", "0.0 0.1"},
		{"as many replicas", replicas(2), replicas(2), unit, []string{"state.json"}, sharedResource, 1, 2050, "0.0 0.1", "0.0 0.1"},
		{"nothing is lost", allShared, allShared, unit / 2, nil, memResource, 2, 2048, "0.0~ 0.1~ 0.2x 0.3x", "0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(1)
				b := start(t, o, t.TempDir(), c.before)
				var ids []string
				for i := range c.n {
					ids = append(ids, fmt.Sprint(uuid(0), "::", i))
				}
				b.hold("p", c.resource, ids...)
				time.Sleep(time.Minute)
				dir := b.dir
				if c.lost == nil {
					b.end()
				} else {
					b.lose(c.lost...)
				}

				o.unit = c.unit
				b = start(t, o, dir, c.after)
				defer func() { b.end() }()
				check := func(when string) {
					t.Helper()
					want := uint64(c.want) << 20
					if got, err := o.caps.Limit(cdi.Key(c.resource, ids), uuid(0)); err != nil || got != want {
						t.Errorf("%s the page says %d MiB, %v; want %d", when, got>>20, err, c.want)
					}
					allocations := b.Allocations()
					if len(allocations) != 1 {
						t.Fatalf("%s there are %d allocations", when, len(allocations))
					}
					if got := capsOf(&allocations[0]); len(got) != 1 || got[0].Bytes != want {
						t.Errorf("%s the watchdog goes by %+v, want %d MiB", when, got, c.want)
					}
					if got := listed(b.front.Offer(), c.resource); got != c.listed {
						t.Errorf("%s %s are listed, want %s", when, got, c.listed)
					}
				}
				check("at once,")
				time.Sleep(10 * time.Minute)
				check("later,")
				// With its holder goes its layout, and its page.
				b.release("p")
				b.with(func() { b.entries = nil })
				time.Sleep(2 * plan.Linger)
				synctest.Wait()
				if got := listed(b.front.Offer(), c.resource); got != c.later {
					t.Errorf("after its end %s are listed, want %s", got, c.later)
				}
				b.hold("q", c.resource, ids[:1]...)
				allocations := b.Allocations()
				want := memcap.Units(1, c.unit)
				if c.resource == sharedResource {
					want = memcap.Replica(o.inv.GPUs[0].Usable(), strings.Count(c.later, " ")+1)
				}
				if got := capsOf(&allocations[0]); len(got) != 1 || got[0].Bytes != want {
					t.Errorf("the next holder may have %+v, want %d", got, want)
				}
			})
		})
	}
}

// TestRecordOutlivesAllFiles: where the agent's state, its CDI files and its pages are
// all lost, the annotation of a container that runs still tells what it was granted.
func TestRecordOutlivesAllFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		b := start(t, o, t.TempDir(), allShared)
		ids := []string{fmt.Sprint(uuid(0), "::0"), fmt.Sprint(uuid(0), "::1")}
		b.hold("p", memResource, ids...)
		time.Sleep(time.Minute)
		b.lose("")
		key := cdi.Key(memResource, ids)
		if err := errors.Join(b.Agent.loop.gates.files.Remove(key), o.caps.Remove(key)); err != nil {
			t.Fatal(err)
		}
		o.unit = unit / 2
		b = start(t, o, b.dir, allShared)
		defer func() { b.end() }()
		time.Sleep(time.Minute)
		allocations := b.Allocations()
		if len(allocations) != 1 {
			t.Fatalf("%d allocations", len(allocations))
		}
		if got, want := allocations[0].Cap(uuid(0)), piece.CapOf(2048<<20); got != want {
			t.Errorf("its container may have %+v, want %+v", got, want)
		}
		if got, err := o.caps.Limit(key, uuid(0)); err != nil || got != 2048<<20 {
			t.Errorf("the page says %d MiB, %v; want 2048", got>>20, err)
		}
		if got, want := listed(b.front.Offer(), memResource), "0.0~ 0.1~ 0.2x 0.3x"; got != want {
			t.Errorf("%s are listed, want %s", got, want)
		}
	})
}

// An allocation whose GPU is laid out otherwise now than it says, and of which no
// record is left, has the cap that its page says, for the watchdog too.
func TestCapOfAnAllocationWhoseGPUIsCutOtherwise(t *testing.T) {
	for _, c := range []struct {
		resource string
		layout   plan.Layout
	}{
		{memResource, replicaLayout(2)},
		{memResource, plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 4}}}, // of an unknown size
		{sharedResource, plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 4, Unit: unit}}},
		{sharedResource, plan.Layout{Known: true}},
	} {
		a := New(Options{ResourceDomain: "example.com", MemoryUnit: unit, Log: slog.New(slog.DiscardHandler)}, Worlds{Caps: &pages{}})
		a.loop.reader.inv, a.loop.layouts.now[uuid(0)] = machine(1), c.layout
		lost := allocated(c.resource, "p", "0::0")
		if err := a.loop.takeOver(lost.ID, lost.Record(), time.Time{}, time.Time{}); err != nil {
			t.Fatal(err)
		}
		allocation := a.loop.gates.allocations(a.loop.reader.inv)[0]
		if got := capsOf(&allocation); len(got) != 0 {
			t.Errorf("%s on a GPU that is %s has the cap %+v without a page", c.resource, c.layout.Mode(), got)
		}
		if err := a.loop.gates.settleCaps(a.loop.fileInputs(), &allocation); (err == nil) != (c.resource == memResource) {
			t.Errorf("%s on a GPU that is %s: %v", c.resource, c.layout.Mode(), err)
		}
		b := New(Options{ResourceDomain: "example.com", MemoryUnit: unit, Log: slog.New(slog.DiscardHandler)}, Worlds{Caps: a.loop.gates.caps})
		b.loop.reader.inv, b.loop.layouts.now[uuid(0)] = machine(1), c.layout
		if err := b.loop.takeOver(lost.ID, lost.Record(), time.Time{}, time.Time{}); err != nil {
			t.Fatal(err)
		}
		if _, err := b.loop.gates.caps.Write(lost.ID, []lib.Limit{{GPU: uuid(0), Bytes: 123 << 20}}); err != nil {
			t.Fatal(err)
		}
		allocation = b.loop.gates.allocations(b.loop.reader.inv)[0]
		if got := capsOf(&allocation); len(got) != 1 || got[0].Bytes != 123<<20 {
			t.Errorf("%s on a GPU that is %s: %+v; want what the page says", c.resource, c.layout.Mode(), got)
		}
	}
}

// TestCountersOfAnAllocation: an allocation's counters are its holder's. Whoever gets the same
// devices next does not go on with them, also where what was before could not be
// removed; a new agent lets those who hold something go on; and counters that are
// spoilt are made anew while their container runs, for its next start.
func TestCountersOfAnAllocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		b := start(t, o, t.TempDir(), allShared)
		id := string(uuid(0)) + "::0"
		key := cdi.Key(memResource, []string{id})
		since := func() time.Time {
			o.caps.mu.Lock()
			defer o.caps.mu.Unlock()
			return o.caps.since[key]
		}
		b.hold("first", memResource, id)
		first := since()
		if first.IsZero() {
			t.Error("nobody knows since when an allocation is held that has just been given")
		}
		time.Sleep(time.Minute)
		b.release("first")
		b.with(func() { b.entries = nil })
		b.hold("second", memResource, id)
		if now := since(); !now.After(first) {
			t.Errorf("the next holder has counters since %v, the one before had them since %v", now, first)
		}
		time.Sleep(time.Minute)
		spoilt := func() bool {
			o.caps.mu.Lock()
			defer o.caps.mu.Unlock()
			return o.caps.spoilt[key]
		}
		o.caps.mu.Lock()
		o.caps.spoilt[key] = true
		o.caps.mu.Unlock()
		time.Sleep(time.Minute)
		synctest.Wait()
		if spoilt() {
			t.Error("spoilt counters stay")
		}
		if err := b.prepare(memResource, id); err != nil {
			t.Errorf("the container's next start: %v", err)
		}
		second := since()
		b.end()
		b = start(t, o, b.dir, allShared)
		defer func() { b.end() }()
		time.Sleep(time.Minute)
		if now := since(); now.After(second) {
			t.Errorf("the next agent takes the allocation for one of %v, it was given at %v", now, second)
		}
	})
}
