// SPDX-License-Identifier: Apache-2.0

package health

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	a = gpu.UUID("GPU-a")
	b = gpu.UUID("GPU-b")
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// at is a moment that many seconds after the tests' zero.
func at(seconds int) time.Time { return t0.Add(time.Duration(seconds) * time.Second) }

func ptr(n uint64) *uint64 { return &n }

// good is a GPU with nothing to complain of and two MIG instances.
func good(u gpu.UUID) GPUReading {
	return GPUReading{
		Device: gpu.Device{UUID: u, MIG: gpu.MIG{Enabled: true, Instances: []gpu.Instance{{GI: 1, CI: 0}, {GI: 2, CI: 0}}}},
		Health: &gpu.Health{Uncorrected: ptr(0)},
	}
}

func with(gr GPUReading, change func(*GPUReading)) GPUReading {
	change(&gr)
	return gr
}

func sick(u gpu.UUID, h gpu.Health) GPUReading {
	return with(good(u), func(g *GPUReading) { g.Health = &h })
}

func reading(gs ...GPUReading) Reading { return Reading{GPUs: gs} }

var clean = reading(good(a), good(b))

func xid(u gpu.UUID, n uint64) gpu.Event {
	return gpu.Event{Kind: gpu.EventXid, GPU: u, Xid: n, GI: -1, CI: -1}
}

// fresh is a monitor that has seen both GPUs well.
func fresh(t *testing.T) *Monitor {
	t.Helper()
	m := New(Options{})
	if m.Reading(clean, at(-10)) {
		t.Fatal("a clean first reading changed a verdict")
	}
	return m
}

// brief says who is unfit and how, without the sentences.
func brief(m *Monitor) string {
	var all []string
	for _, v := range m.Verdicts() {
		s := fmt.Sprintf("%s %s", v.GPU, v.Class)
		if v.GI >= 0 {
			s = fmt.Sprintf("%s/%d/%d %s", v.GPU, v.GI, v.CI, v.Class)
		}
		all = append(all, s)
	}
	return strings.Join(all, ", ")
}

func want(t *testing.T, m *Monitor, verdicts string) {
	t.Helper()
	if got := brief(m); got != verdicts {
		t.Fatalf("verdicts %q, want %q", got, verdicts)
	}
}

func TestIgnoredXidsChangeNothing(t *testing.T) {
	for _, n := range DefaultIgnored {
		m := fresh(t)
		if m.Event(xid(a, n), t0) || m.Event(xid("", n), t0) {
			t.Errorf("Xid %d changed a verdict", n)
		}
		want(t, m, "")
		m = New(Options{Ignored: []uint64{}})
		m.Reading(clean, at(-10))
		if !m.Event(xid(a, n), t0) {
			t.Errorf("Xid %d changed nothing though it is not ignored", n)
		}
		want(t, m, "GPU-a engine")
	}
}

// TestXids walks each Xid through its recovery. Of a class that asks for a reset, bad is a
// reading after which the GPU stays unhealthy however long it lasts, also when it was reset.
func TestXids(t *testing.T) {
	uncorrected, failed, pending := gpu.Health{Uncorrected: ptr(1)}, gpu.Health{Remap: &gpu.Remap{Failed: true}}, gpu.Health{Remap: &gpu.Remap{Pending: true}}
	action := gpu.Health{Recovery: gpu.RecoveryReset}
	for _, tc := range []struct {
		xid   uint64
		want  Class
		reset bool
		bad   []gpu.Health
		fine  []gpu.Health // readings that must not hold a GPU back
	}{
		{48, ClassMemory, true, []gpu.Health{uncorrected, pending, action, {RetirePending: true}}, []gpu.Health{{}}},
		{61, ClassFirmware, true, []gpu.Health{action}, []gpu.Health{uncorrected}},
		{62, ClassFirmware, true, []gpu.Health{action}, nil},
		{63, ClassContained, false, nil, []gpu.Health{pending}},
		{64, ClassRemapFailed, true, []gpu.Health{failed, uncorrected}, []gpu.Health{{}}},
		{69, ClassEngine, false, nil, nil},
		{74, ClassLink, true, []gpu.Health{action}, nil},
		{79, ClassLost, true, []gpu.Health{action, uncorrected}, []gpu.Health{{}}},
		{92, ClassEngine, false, nil, nil},
		{94, ClassContained, false, nil, []gpu.Health{uncorrected}},
		{95, ClassMemory, true, []gpu.Health{uncorrected, action}, nil},
		{119, ClassFirmware, true, []gpu.Health{action}, nil},
		{120, ClassFirmware, true, []gpu.Health{action}, nil},
		{121, ClassEngine, false, nil, []gpu.Health{uncorrected}},
		{140, ClassMemory, true, []gpu.Health{uncorrected}, nil},
		{143, ClassFirmware, true, []gpu.Health{action}, nil},
		{149, ClassLink, true, []gpu.Health{action}, nil},
		{154, ClassRecovery, true, []gpu.Health{action}, nil},
		{4711, ClassUnknown, false, nil, []gpu.Health{uncorrected}},
	} {
		t.Run(fmt.Sprint(tc.xid), func(t *testing.T) {
			m := fresh(t)
			if !m.Event(xid(a, tc.xid), t0) || m.Event(xid(a, tc.xid), t0) {
				t.Fatal("the first event is to change a verdict and its repetition is not")
			}
			want(t, m, "GPU-a "+string(tc.want))
			v := m.Verdicts()[0]
			if v.Xid != tc.xid || !v.Since.Equal(t0) || !strings.HasPrefix(v.Reason, fmt.Sprintf("Xid %d: ", tc.xid)) || !strings.Contains(v.Reason, "since 2026-03-01T12:00:00Z; ") {
				t.Errorf("verdict %+v", v)
			}
			if (v.Needs == NeedsReset) != tc.reset || strings.HasSuffix(v.Reason, "; it stays unhealthy until a reset is seen") != tc.reset {
				t.Errorf("it needs %q: %s; waits for a reset %v", v.Needs, v.Reason, tc.reset)
			}
			if tc.reset {
				for _, s := range []int{60, 64, 3600, 1_000_000} {
					if m.Reading(clean, at(s)) {
						t.Fatalf("%d s of silence healed it", s)
					}
				}
				m = fresh(t)
				m.Event(xid(a, tc.xid), t0)
				if !m.WasReset(a, at(1)) || m.WasReset(a, at(1)) {
					t.Error("that it was reset is to change a verdict once")
				}
			}
			if m.Reading(clean, at(59)) {
				t.Fatal("recovered before the hold was over")
			}
			if !m.Reading(clean, at(60)) {
				t.Fatal("did not recover when the hold was over")
			}
			want(t, m, "")

			for _, h := range tc.bad {
				m := fresh(t)
				m.Event(xid(a, tc.xid), t0)
				m.WasReset(a, at(1))
				m.Reading(reading(sick(a, h), good(b)), at(5000))
				if got := m.Verdicts(); !slices.ContainsFunc(got, func(v Verdict) bool { return v.GPU == a && v.Class == tc.want }) {
					t.Errorf("%+v recovered it", h)
				}
				m.WasReset(a, at(5001))
				m.Reading(clean, at(5060))
				m.Reading(clean, at(10000))
				want(t, m, "")
			}
			for _, h := range tc.fine {
				m := fresh(t)
				m.Event(xid(a, tc.xid), t0)
				m.WasReset(a, at(1))
				m.Reading(reading(sick(a, h), good(b)), at(60))
				want(t, m, "")
			}
		})
	}
}

// TestWhatProvesAReset has what a GPU is seen to be after Xid 119 or another fault that asks
// for a reset, and whether that proves one. What has been proved, or seen, is not forgotten by
// an agent that restarts in between.
func TestWhatProvesAReset(t *testing.T) {
	loaded := func(load string, gs ...GPUReading) Reading { return Reading{Load: load, GPUs: gs} }
	asks := func(r gpu.Recovery) Reading {
		return loaded("1", sick(a, gpu.Health{Uncorrected: ptr(0), Recovery: r}), good(b))
	}
	errs := func(n uint64) Reading { return loaded("1", sick(a, gpu.Health{Uncorrected: ptr(n)}), good(b)) }
	rows := func(r *gpu.Remap) Reading { return loaded("1", sick(a, gpu.Health{Remap: r}), good(b)) }
	gone := loaded("1", with(good(a), func(g *GPUReading) { g.Device.Fault, g.Device.Lost = "lost", true }), good(b))
	mute := loaded("1", with(good(a), func(g *GPUReading) { g.Health = nil }), good(b))
	ok := loaded("1", good(a), good(b))
	for _, tc := range []struct {
		name   string
		xid    uint64
		seen   []Reading
		proves bool
	}{
		{"nothing", 119, []Reading{ok}, false},
		{"a recovery that was asked for", 119, []Reading{asks(gpu.RecoveryReset), asks(gpu.RecoveryNone)}, true},
		{"a reboot that was asked for", 95, []Reading{asks(gpu.RecoveryReboot), asks(gpu.RecoveryNone)}, true},
		{"a recovery that was never asked for", 119, []Reading{asks(gpu.RecoveryNone), asks(gpu.RecoveryNone)}, false},
		{"a recovery that is asked for again", 119, []Reading{asks(gpu.RecoveryReset), asks(gpu.RecoveryNone), asks(gpu.RecoveryReset)}, false},
		{"a driver that tells no recovery any more", 119, []Reading{asks(gpu.RecoveryReset), asks(gpu.RecoveryUnknown), mute}, false},
		{"to be drained, and done", 119, []Reading{asks(gpu.RecoveryDrain), asks(gpu.RecoveryNone)}, false},
		{"what the driver asks for, to nothing", 154, []Reading{asks(gpu.RecoveryNone)}, true},
		{"what the driver asks for, untold", 154, []Reading{asks(gpu.RecoveryUnknown)}, false},
		{"another loading of the driver", 119, []Reading{ok, loaded("2", good(a), good(b))}, true},
		{"the same loading", 119, []Reading{ok, ok}, false},
		{"a loading that is not told any more", 119, []Reading{ok, loaded("", good(a), good(b)), ok}, false},
		{"no driver, and the same again", 119, []Reading{{Err: gpu.ErrNoDriver}, ok}, false},
		{"no driver, and another loading", 119, []Reading{{Err: gpu.ErrNoDriver}, loaded("2", good(a), good(b))}, true},
		{"errors that are gone", 48, []Reading{errs(2), errs(0)}, true},
		{"errors that were never there", 48, []Reading{errs(0)}, false},
		{"errors that are gone, of another fault", 119, []Reading{errs(2), errs(0)}, false},
		{"no spare row, and there is one", 64, []Reading{rows(&gpu.Remap{Failed: true}), rows(&gpu.Remap{})}, true},
		{"no spare row, and nobody knows", 64, []Reading{rows(&gpu.Remap{Failed: true}), rows(nil)}, false},
		{"it was lost, and is there", 79, []Reading{gone, ok}, true},
		{"it was not listed, and is", 79, []Reading{loaded("1", good(b)), ok}, true},
		{"it was never away", 79, []Reading{ok}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, restart := range []bool{false, true} {
				m := New(Options{})
				m.Reading(ok, at(-10))
				m.Event(xid(a, tc.xid), t0)
				now := 1
				for _, r := range tc.seen {
					m.Reading(r, at(now))
					now++
					if restart {
						next := New(Options{})
						next.Restore(m.Records(), true)
						next.Know(a, b)
						m = next
					}
				}
				// The last that was seen, for as long as it takes.
				last := tc.seen[len(tc.seen)-1]
				for _, s := range []int{100, 10_000, 100_000} {
					m.Reading(last, at(s))
				}
				if got := brief(m); (got == "") != tc.proves {
					t.Errorf("with restarts %v: %q, proves %v", restart, got, tc.proves)
				}
			}
		})
	}
}

// An Xid that names no GPU may be of any: each is unhealthy, and those of which the driver asks
// for nothing are not for ever. One that is named later is meant.
func TestNamelessXid(t *testing.T) {
	none := func(u gpu.UUID) GPUReading { return sick(u, gpu.Health{Recovery: gpu.RecoveryNone}) }
	m := New(Options{})
	m.Reading(reading(none(a), none(b)), at(-10))
	m.Event(xid("", 119), t0)
	want(t, m, "GPU-a firmware, GPU-b firmware")
	m.Reading(reading(none(a), good(b)), at(59))
	again := New(Options{})
	again.Restore(m.Records(), true)
	again.Reading(reading(none(a), good(b)), at(100))
	want(t, again, "GPU-b firmware") // of which the driver does not tell
	again.Reading(reading(none(a), none(b)), at(200))
	want(t, again, "")

	m.Event(xid(b, 119), at(60))
	m.Reading(reading(none(a), none(b)), at(10_000))
	want(t, m, "GPU-b firmware")
}

// A person's word that a GPU was reset is for what was complained of before, and for no other
// GPU; what comes back after it waits again.
func TestWasReset(t *testing.T) {
	m := fresh(t)
	m.Event(xid(a, 119), at(10))
	m.Event(xid(b, 119), at(10))
	if m.WasReset(a, at(9)) || m.WasReset(a, at(10)) || m.WasReset("GPU-c", at(20)) {
		t.Error("a reset before the fault, or of no GPU, changed a verdict")
	}
	m.WasReset(a, at(20))
	if v := m.Verdicts()[0]; !strings.HasSuffix(v.Reason, "; a reset has been seen, and the GPU is watched") {
		t.Errorf("after it: %s", v.Reason)
	}
	again := New(Options{})
	again.Restore(m.Records(), true)
	again.Reading(clean, at(100))
	want(t, again, "GPU-b firmware")

	if !m.Event(xid(a, 119), at(30)) {
		t.Error("that the reset has not helped changed no verdict")
	}
	m.WasReset(a, at(20))
	m.Reading(clean, at(10_000))
	want(t, m, "GPU-a firmware, GPU-b firmware")
}

func TestTableIsWhole(t *testing.T) {
	for n, mean := range xids {
		if waits := rules[rank(mean.class)].reset; waits != (mean.needs == NeedsReset) || waits != strings.Contains(mean.do, "reset") && n != 63 && n != 121 && n != 154 {
			t.Errorf("Xid %d needs %q and says %q; its class waits for a reset: %v", n, mean.needs, mean.do, waits)
		}
		if rank(mean.class) < 0 || mean.what == "" || mean.do == "" || strings.HasSuffix(mean.what, ".") {
			t.Errorf("Xid %d: %+v", n, mean)
		}
	}
	for _, n := range DefaultIgnored {
		if _, ok := xids[n]; !ok {
			t.Errorf("Xid %d is ignored and has no meaning for those who do not ignore it", n)
		}
	}
}

// TestReadings has faults that only readings tell of; each lasts as long as the
// reading does and for the hold after it, unless quick.
func TestReadings(t *testing.T) {
	fault := func(s string) GPUReading { return with(good(a), func(g *GPUReading) { g.Device.Fault = s }) }
	failing := func(err error) GPUReading {
		return with(good(a), func(g *GPUReading) { g.Health, g.Err = nil, fmt.Errorf("read it: %w", err) })
	}
	// A driver that tells what it asks for and of its rows, which is none.
	told := reading(sick(a, gpu.Health{Uncorrected: ptr(0), Remap: &gpu.Remap{}, Recovery: gpu.RecoveryNone}), good(b))
	for _, tc := range []struct {
		name  string
		r     Reading
		want  string
		quick bool
	}{
		{"the driver calls it lost", reading(with(fault("get name: ?"), func(g *GPUReading) { g.Device.Lost = true }), good(b)), "GPU-a lost", false},
		{"the driver lists it no more", reading(with(fault("not listed"), func(g *GPUReading) { g.Device.Gone = true }), good(b)), "GPU-a lost", false},
		{"another fault", reading(fault("get name: what?"), good(b)), "GPU-a unreadable", false},
		{"another fault, in words that were taken for lost", reading(fault("get name: \"the "+gpu.ErrLost.Error()+"\" is not a name"), good(b)), "GPU-a unreadable", false},
		{"lost when its health is asked", reading(failing(gpu.ErrLost), good(b)), "GPU-a lost", false},
		{"gone when its health is asked", reading(failing(gpu.ErrNotFound), good(b)), "GPU-a lost", false},
		{"an error", reading(failing(gpu.ErrDriver), good(b)), "GPU-a unreadable", false},
		{"not supported", reading(failing(gpu.ErrNotSupported), good(b)), "", true},
		{"not listed", reading(good(b)), "GPU-a lost", false},
		{"no spare row", reading(sick(a, gpu.Health{Remap: &gpu.Remap{Failed: true}}), good(b)), "GPU-a remap-failed", false},
		{"a recovery action", reading(sick(a, gpu.Health{Recovery: gpu.RecoveryDrainReset}), good(b)), "GPU-a recovery", false},
		{"counters alone", reading(sick(a, gpu.Health{Uncorrected: ptr(7), Remap: &gpu.Remap{Pending: true}, RetirePending: true}), good(b)), "", true},
		{"no driver", Reading{Err: gpu.ErrNoDriver}, "GPU-a driver, GPU-b driver", true},
		{"another driver", Reading{Err: gpu.ErrReloaded}, "GPU-a driver, GPU-b driver", true},
		{"no driver for one", reading(failing(gpu.ErrNoDriver), good(b)), "GPU-a driver", true},
		{"a nameless GPU", reading(GPUReading{Device: gpu.Device{Fault: "?"}}, good(a), good(b)), "", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := fresh(t)
			if got := m.Reading(tc.r, t0); got != (tc.want != "") {
				t.Errorf("changed %v", got)
			}
			want(t, m, tc.want)
			if m.Reading(tc.r, at(1000)) {
				t.Error("the same reading changed something")
			}
			want(t, m, tc.want)
			if tc.quick {
				m.Reading(told, at(1001))
				want(t, m, "")
				return
			}
			m.Reading(told, at(1059))
			want(t, m, tc.want)
			m.Reading(told, at(1060))
			want(t, m, "")
		})
	}
}

func TestInstances(t *testing.T) {
	on := func(n uint64, gi, ci int) gpu.Event {
		return gpu.Event{Kind: gpu.EventXid, GPU: a, Xid: n, GI: gi, CI: ci}
	}
	for _, tc := range []struct {
		e    gpu.Event
		want string
	}{
		{on(94, 1, 0), "GPU-a/1/0 contained"},
		{on(63, 1, -1), "GPU-a/1/-1 contained"},
		{on(94, -1, -1), "GPU-a contained"},
		{on(95, 1, 0), "GPU-a memory"},
		{on(48, 1, 0), "GPU-a memory"},
		{on(13, 1, 0), ""},
		{on(4711, 1, 0), "GPU-a unknown-xid"},
		{gpu.Event{Kind: gpu.EventXid, Xid: 94, GI: 1, CI: 0}, "GPU-a contained, GPU-b contained"},
	} {
		m := fresh(t)
		m.Event(tc.e, t0)
		want(t, m, tc.want)
	}

	m := fresh(t)
	m.Event(on(94, 1, 0), t0)
	m.Event(on(94, 2, 0), t0)
	m.Reading(reading(with(good(a), func(g *GPUReading) { g.Device.MIG.Instances = g.Device.MIG.Instances[1:] }), good(b)), at(1))
	want(t, m, "GPU-a/2/0 contained")
	// A GPU that could not be described lists no instances, which says nothing.
	m.Reading(reading(GPUReading{Device: gpu.Device{UUID: a, Fault: "?"}}, good(b)), at(2))
	want(t, m, "GPU-a unreadable, GPU-a/2/0 contained")
}

func TestAll(t *testing.T) {
	m := fresh(t)
	m.Event(gpu.Event{Kind: gpu.EventXid, GPU: "GPU-stranger", Xid: 79, GI: -1, CI: -1}, t0)
	m.Event(xid("", 79), t0)
	want(t, m, "GPU-a lost, GPU-b lost, GPU-stranger lost")
	m.Reading(clean, at(1))
	want(t, m, "GPU-a lost, GPU-b lost")

	m = fresh(t)
	for _, e := range []gpu.Event{{Kind: gpu.EventLost}, {Kind: gpu.EventChanged}, {Kind: "other", GPU: a}} {
		if m.Event(e, t0) {
			t.Errorf("%+v changed a verdict", e)
		}
	}
	m.Event(gpu.Event{Kind: gpu.EventLost, GPU: b}, t0)
	want(t, m, "GPU-b lost")
}

func TestHangingIsNoFault(t *testing.T) {
	m := fresh(t)
	m.Event(xid(a, 94), t0)
	before := m.Verdicts()
	hung := Reading{Err: fmt.Errorf("list: %w", gpu.ErrTimeout)}
	if !m.Reading(hung, at(100)) || m.Reading(hung, at(200)) {
		t.Error("that it hangs is news once")
	}
	if what, since := m.Waiting(); what == "" || !since.Equal(at(100)) {
		t.Errorf("waiting %q since %v", what, since)
	}
	if got := m.Verdicts(); !reflect.DeepEqual(got, before) {
		t.Errorf("verdicts %+v, before it hung %+v", got, before)
	}
	one := with(good(b), func(g *GPUReading) { g.Health, g.Err = nil, gpu.ErrTimeout })
	m.Reading(reading(good(a), one), at(300))
	want(t, m, "")
	if what, since := m.Waiting(); !strings.Contains(what, string(b)) || !since.Equal(at(100)) {
		t.Errorf("waiting %q since %v", what, since)
	}
	if m.Due(at(300)).IsZero() {
		t.Error("no reading is wanted while one hangs")
	}
	m.Reading(clean, at(310))
	if what, since := m.Waiting(); what != "" || !since.IsZero() {
		t.Errorf("waiting %q since %v after a clean reading", what, since)
	}
}

func TestFlapping(t *testing.T) {
	m := fresh(t)
	now := 0
	for i, hold := range []int{60, 120, 240, 480, 960, 960} {
		m.Event(xid(a, 69), at(now))
		m.Event(xid(a, 69), at(now)) // a repetition does not double
		m.Reading(clean, at(now+hold-1))
		want(t, m, "GPU-a engine")
		m.Reading(clean, at(now+hold))
		if got := brief(m); got != "" {
			t.Fatalf("complaint %d: %s after %d s", i, got, hold)
		}
		now += hold + 1
	}
	m.Event(xid(a, 69), at(now))
	m.Reading(clean, at(now+960))
	m.Reading(clean, at(now+960+3601))
	if n := len(m.Records()); n != 0 {
		t.Errorf("%d records an hour after the last complaint", n)
	}
	m.Event(xid(a, 69), at(now+5000))
	m.Reading(clean, at(now+5060))
	want(t, m, "")
}

func TestDue(t *testing.T) {
	m := fresh(t)
	if d := m.Due(t0); !d.IsZero() {
		t.Errorf("due %v while all is well", d)
	}
	m.Event(xid(a, 69), t0)
	for _, tc := range []struct{ read, due int }{{0, 10}, {10, 20}, {55, 60}} {
		m.Reading(clean, at(tc.read))
		if d := m.Due(at(tc.read)); !d.Equal(at(tc.due)) {
			t.Errorf("after the reading at %d: due %v, want %v", tc.read, d, at(tc.due))
		}
	}
	// The clock is put back by a day.
	if d := m.Due(at(-86400)); d.After(at(-86400 + 10)) {
		t.Errorf("due %v, more than a probe from now", d)
	}
	m.Reading(clean, at(-86400))
	m.Reading(clean, at(-86400+60))
	want(t, m, "")
}

func TestReasons(t *testing.T) {
	m := fresh(t)
	m.Event(xid(a, 79), t0)
	got := m.Verdicts()[0].Reason
	if w := "Xid 79: the GPU has fallen off the bus, since 2026-03-01T12:00:00Z; drain the node and reset the GPU or reboot; it stays unhealthy until a reset is seen"; got != w {
		t.Errorf("reason %q, want %q", got, w)
	}
	m.Event(gpu.Event{Kind: gpu.EventLost, GPU: a}, t0)
	if got := m.Verdicts()[0].Reason; !strings.HasSuffix(got, "; it stays unhealthy until the driver has it again") {
		t.Errorf("of a GPU that is away: %q", got)
	}
	m.Event(xid(b, 154), t0)
	m.Reading(reading(good(a), sick(b, gpu.Health{Recovery: gpu.RecoveryDrainReset})), at(1))
	m.Reading(reading(good(a), sick(b, gpu.Health{Recovery: gpu.RecoveryReboot})), at(2))
	v := m.Verdicts()[1]
	if v.Needs != NeedsReboot || !strings.Contains(v.Reason, "reboot") {
		t.Errorf("after the driver asked for a reboot: %+v", v)
	}
}

func TestMemory(t *testing.T) {
	m := fresh(t)
	m.Event(xid(a, 64), t0)
	m.Event(xid(b, 79), t0)
	m.Event(gpu.Event{Kind: gpu.EventXid, GPU: b, Xid: 94, GI: 2, CI: 0}, t0)
	again := New(Options{})
	again.Restore(m.Records(), true)
	want(t, again, "GPU-a remap-failed, GPU-b lost, GPU-b/2/0 contained")
	again.Reading(reading(good(b)), at(100))
	want(t, again, "GPU-a lost, GPU-a remap-failed, GPU-b lost")

	// A reboot resets every card, and gives none a spare row.
	rebooted := New(Options{})
	rebooted.Restore(m.Records(), false)
	want(t, rebooted, "GPU-a remap-failed")
	failed := reading(sick(a, gpu.Health{Remap: &gpu.Remap{Failed: true}}), good(b))
	rebooted.Reading(failed, at(100))
	rebooted.Reading(clean, at(1000)) // nobody knows, as of a GPU with MIG instances
	want(t, rebooted, "GPU-a remap-failed")
	rebooted = New(Options{})
	rebooted.Restore(m.Records(), false)
	rebooted.Reading(clean, at(100))
	want(t, rebooted, "")

	known := New(Options{})
	known.Know(a, b, "")
	known.Reading(reading(good(a)), t0)
	want(t, known, "GPU-b lost")

	odd := New(Options{})
	odd.Restore([]Record{{GPU: "", Class: ClassLost}, {GPU: a, Class: "of a newer version", GI: 3, Strikes: 1 << 30}, {GPU: b, Class: ClassMemory, GI: 7}}, true)
	want(t, odd, "GPU-a unknown-xid, GPU-b memory")
	odd.Reading(clean, t0)
	want(t, odd, "GPU-b memory")
	odd.WasReset(b, t0)
	odd.Reading(clean, t0)
	want(t, odd, "")

	// What a newer version says that needs a reset waits for one here, too.
	newer := New(Options{})
	newer.Restore([]Record{{GPU: a, Class: "of a newer version", Needs: NeedsReset}, {GPU: b, Class: "another", Needs: "drain and reset"}}, true)
	newer.Reading(clean, at(100_000))
	want(t, newer, "GPU-a unknown-xid, GPU-b unknown-xid")
}

func TestBounds(t *testing.T) {
	m := fresh(t)
	for i := range 5000 {
		m.Event(xid(gpu.UUID(fmt.Sprint("GPU-", i)), 79), t0)
		m.Event(gpu.Event{Kind: gpu.EventXid, GPU: a, Xid: 94, GI: i, CI: i}, t0)
		m.Event(xid(b, 1000+uint64(i)), t0)
	}
	if n := len(m.Verdicts()); n > maxStrangers+maxFaults+2 {
		t.Errorf("%d verdicts", n)
	}
	if got := brief(m); !strings.Contains(got, "GPU-a contained") {
		t.Error("more instances than a GPU can have did not condemn it")
	}
	m.Reading(clean, at(1))
	want(t, m, "GPU-a contained, GPU-b unknown-xid")
	var many []Record
	for i := range 5000 {
		many = append(many, Record{GPU: gpu.UUID(fmt.Sprint("GPU-", i)), Class: ClassLost})
	}
	m = New(Options{})
	m.Restore(many, true)
	if n := len(m.Records()); n != maxKnown {
		t.Errorf("%d records, want %d", n, maxKnown)
	}
}

func TestSeveralGoroutines(t *testing.T) {
	m := New(Options{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for s := range 200 {
				m.Event(xid(a, uint64(40+s%60)), at(s))
				m.Reading(clean, at(s))
				m.Verdicts()
				m.Due(at(s))
				m.Waiting()
				m.Restore(m.Records(), i%2 == 0)
			}
		})
	}
	wg.Wait()
	settle(t, m, at(200))
}

// settle resets all GPUs, gives clean readings for longer than the longest hold and wants no
// verdict after it.
func settle(t *testing.T, m *Monitor, now time.Time) {
	t.Helper()
	var all []GPUReading
	for _, r := range m.Records() {
		if !slices.ContainsFunc(all, func(g GPUReading) bool { return g.Device.UUID == r.GPU }) {
			all = append(all, good(r.GPU))
		}
	}
	all = append(all, good(a), good(b))
	for i := range 4 {
		at := now.Add(time.Duration(i) * 16 * DefaultHold)
		m.Reading(Reading{GPUs: all}, at)
		for _, g := range all {
			m.WasReset(g.Device.UUID, at.Add(1))
		}
	}
	want(t, m, "")
}

func of(m *Monitor, u gpu.UUID) (own []Verdict) {
	for _, v := range m.Verdicts() {
		if v.GPU == u {
			own = append(own, v)
		}
	}
	return own
}

// TestRandomWalk: what is told of one GPU never changes a verdict on the other, a
// restart in between changes none at all, and clean readings end them all.
func TestRandomWalk(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		numbers := []uint64{13, 31, 48, 63, 64, 69, 74, 79, 94, 95, 119, 154, 999}
		healths := []gpu.Health{{}, {Uncorrected: ptr(0)}, {Uncorrected: ptr(3)}, {Remap: &gpu.Remap{Failed: true}}, {Remap: &gpu.Remap{Pending: true}}, {Recovery: gpu.RecoveryDrain}}
		m, now := fresh(t), t0
		state := map[gpu.UUID]GPUReading{a: good(a), b: good(b)}
		for step := range 300 {
			now = now.Add(time.Duration(rnd.IntN(40)) * time.Second)
			u, other := a, b
			if rnd.IntN(2) == 0 {
				u, other = b, a
			}
			before, all := of(m, other), m.Verdicts()
			changed := false
			switch rnd.IntN(4) {
			case 0:
				changed = m.Event(gpu.Event{Kind: gpu.EventXid, GPU: u, Xid: numbers[rnd.IntN(len(numbers))], GI: rnd.IntN(4) - 1, CI: rnd.IntN(2) - 1}, now)
			case 1:
				changed = m.Event(gpu.Event{Kind: gpu.EventLost, GPU: u, GI: -1, CI: -1}, now)
			case 2:
				// The other GPU hangs, so that this reading says nothing of it.
				state[u] = sick(u, healths[rnd.IntN(len(healths))])
				mute := GPUReading{Device: gpu.Device{UUID: other}, Err: gpu.ErrTimeout}
				m.Reading(reading(state[u], mute), now)
				changed = !reflect.DeepEqual(all, m.Verdicts())
			case 3:
				next := New(Options{})
				raw, err := json.Marshal(m.Records())
				if err != nil {
					t.Fatal(err)
				}
				var back []Record
				if err := json.Unmarshal(raw, &back); err != nil {
					t.Fatal(err)
				}
				next.Restore(back, true)
				next.Know(a, b)
				if x, y := m.Records(), next.Records(); !reflect.DeepEqual(x, y) {
					t.Fatalf("seed %d step %d: records %+v came back as %+v", seed, step, x, y)
				}
				if x, y := all, next.Verdicts(); !reflect.DeepEqual(x, y) {
					t.Fatalf("seed %d step %d: verdicts %+v came back as %+v", seed, step, x, y)
				}
				m = next
			}
			if got := of(m, other); !reflect.DeepEqual(got, before) {
				t.Fatalf("seed %d step %d: what was told of %s changed %s from %+v to %+v", seed, step, u, other, before, got)
			}
			if differs := !reflect.DeepEqual(all, m.Verdicts()); differs != changed {
				t.Fatalf("seed %d step %d: changed is %v, the verdicts differ: %v", seed, step, changed, differs)
			}
		}
		settle(t, m, now)
	}
}

// FuzzRestore: whatever lies in a state file and whatever the driver reports, the
// memory is bounded and carries itself over, and a well node becomes fit.
func FuzzRestore(f *testing.F) {
	f.Add([]byte(`[{"gpu":"GPU-a","gi":-1,"ci":-1,"class":"lost","xid":79,"since":"2026-03-01T12:00:00Z","last":"2026-03-01T12:00:00Z"}]`), []byte{79, 0, 1, 94, 1, 9})
	f.Add([]byte(`[{"gpu":"GPU-a","gi":5,"class":"contained","strikes":-4,"over":true},{"class":"?"},{"gpu":"x","class":"?"}]`), []byte{48})
	f.Add([]byte(`[{"gpu":"GPU-b","class":"memory","last":"9999-01-01T00:00:00Z"}]`), []byte{})
	f.Add([]byte(`[{"gpu":"GPU-b","class":"memory","since":"9999-12-31T23:59:59-12:00","last":"0000-01-01T00:00:00+12:00"}]`), []byte{48})
	f.Add([]byte(`[{"gpu":"x","class":"?"},{"gpu":"GPU-a","gi":1,"class":"lost","since":"2100-01-01T00:00:00Z"}]`), []byte{100, 100, 100, 100})
	f.Fuzz(func(t *testing.T, file, events []byte) {
		var records []Record
		if json.Unmarshal(file, &records) != nil {
			records = nil
		}
		m, now := New(Options{}), t0
		m.Restore(records, true)
		for i, n := range events {
			now = now.Add(time.Duration(n) * time.Second)
			u := []gpu.UUID{a, b, "", "GPU-c"}[i%4]
			before := of(m, b)
			m.Event(gpu.Event{Kind: gpu.EventXid, GPU: u, Xid: uint64(n), GI: i%5 - 1, CI: i%3 - 1}, now)
			if u != b && u != "" && !reflect.DeepEqual(before, of(m, b)) {
				t.Fatalf("Xid %d on %s changed %s", n, u, b)
			}
		}
		kept := m.Records()
		if len(kept) > (maxKnown+maxStrangers)*maxFaults {
			t.Fatalf("%d records", len(kept))
		}
		raw, err := json.Marshal(kept)
		if err != nil {
			t.Fatal(err)
		}
		var back []Record
		if err := json.Unmarshal(raw, &back); err != nil {
			t.Fatal(err)
		}
		next := New(Options{})
		next.Restore(back, true)
		if again := next.Records(); !reflect.DeepEqual(kept, again) {
			t.Fatalf("records %+v came back as %+v", kept, again)
		}
		if x, y := m.Verdicts(), next.Verdicts(); !reflect.DeepEqual(x, y) {
			t.Fatalf("verdicts %+v came back as %+v", x, y)
		}
		settle(t, next, now)
	})
}

// docs/health.md has the classes, with the Xids of each but the ignored and the unknown ones,
// and whether they wait for a reset; doc.go has the same.
func TestDocsAgree(t *testing.T) {
	own := map[Class][]uint64{}
	for n, mean := range xids {
		if !slices.Contains(DefaultIgnored, n) {
			own[mean.class] = append(own[mean.class], n)
		}
	}
	number := regexp.MustCompile(`\d+`)
	compare := func(where string, classes []string, from string, waits bool) {
		t.Helper()
		var want []uint64
		for _, c := range classes {
			r := rank(Class(c))
			if r < 0 {
				t.Errorf("%s has the class %q", where, c)
				continue
			}
			if rules[r].reset != waits {
				t.Errorf("%s: %s waits for a reset: %v", where, c, waits)
			}
			want = append(want, own[Class(c)]...)
		}
		var got []uint64
		for _, n := range number.FindAllString(from, -1) {
			v, _ := strconv.ParseUint(n, 10, 64)
			got = append(got, v)
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s has for %q the Xids %v, the table %v", where, classes, got, want)
		}
	}

	text, err := os.ReadFile("../../docs/health.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## A GPU that fails\n")
	section, _, _ = strings.Cut(section, "\n### ")
	rows, waits := 0, false
	for _, m := range regexp.MustCompile("(?m)^\\| (`.+`) \\| (.+) \\| (.+) \\|$").FindAllStringSubmatch(section, -1) {
		if m[3] != "the same" {
			waits = strings.HasPrefix(m[3], "[reset]")
		}
		classes := strings.Split(strings.ReplaceAll(m[1], "`", ""), ", ")
		compare("docs/health.md", classes, m[2], waits)
		rows += len(classes)
	}
	if rows != len(rules) {
		t.Errorf("docs/health.md has %d classes of %d", rows, len(rules))
	}

	if text, err = os.ReadFile("doc.go"); err != nil {
		t.Fatal(err)
	}
	rows = 0
	for _, m := range regexp.MustCompile(`(?m)^//\t([a-z-]+) +(\S.*?)  +(\S.*)$`).FindAllStringSubmatch(string(text), -1) {
		if rank(Class(m[1])) < 0 {
			continue
		}
		compare("doc.go", []string{m[1]}, m[2], strings.HasPrefix(m[3], "a reset"))
		rows++
	}
	if rows != len(rules) {
		t.Errorf("doc.go has %d classes of %d", rows, len(rules))
	}
}
