// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

const gib = 1 << 30

func TestUnits(t *testing.T) {
	for _, tc := range []struct {
		n    int
		unit gpu.MiB
		want uint64
	}{
		{24, 1024, 24 * gib},
		{1, 1, mib},
		{7, 512, 7 * 512 * mib},
		{0, 1024, 0},
		{-1, 1024, 0},
		{1, math.MaxUint64, most},
		{math.MaxInt, math.MaxUint64, most},
		{1 << 43, 2, most}, // 2^64 to the byte
		{1 << 43, 1, 1 << 63},
	} {
		if got := Units(tc.n, tc.unit); got != tc.want {
			t.Errorf("%d units of %d MiB: %d bytes, want %d", tc.n, tc.unit, got, tc.want)
		}
	}
	if most == None || most%mib != 0 || None-most >= mib {
		t.Errorf("the largest cap is %#x", uint64(most))
	}
}

func TestReplica(t *testing.T) {
	for _, tc := range []struct {
		memory, reserved gpu.MiB
		replicas         int
		want             uint64
	}{
		{81920, 590, 4, 20332 * mib}, // 81330 / 4 = 20332.5
		{81920, 590, 1, 81330 * mib},
		{100, 100, 2, 0},
		{100, 200, 2, 0},
		{3, 0, 4, 0},
		{16384, 0, 0, 0},
		{16384, 0, -2, 0},
		{math.MaxUint64, 0, 1, most},
	} {
		d := &gpu.Device{Memory: tc.memory, Reserved: tc.reserved}
		if got := Replica(d.Usable(), tc.replicas); got != tc.want {
			t.Errorf("%d MiB less %d in %d: %d bytes, want %d", tc.memory, tc.reserved, tc.replicas, got, tc.want)
		}
	}
}

func TestWeakest(t *testing.T) {
	for _, tc := range []struct {
		in   []Level
		want Level
	}{
		{[]Level{Watchdog}, Watchdog},
		{[]Level{Watchdog, API}, Watchdog},
		{[]Level{Hardware, Driver, API, Watchdog}, Watchdog},
		{[]Level{API, Driver, API}, API},
		{[]Level{Hardware, Driver}, Driver},
	} {
		if got := Weakest(tc.in...); got != tc.want {
			t.Errorf("%q: %q, want %q", tc.in, got, tc.want)
		}
	}
}

func TestLimit(t *testing.T) {
	for _, tc := range []struct {
		policy    Policy
		cap, want uint64
	}{
		{Policy{}, 4 * gib, 4*gib + 256*mib},
		{Policy{}, 10 * gib, 10*gib + 10*gib/100*5},
		{Policy{}, 80 * gib, 81 * gib},
		{Policy{}, 0, 256 * mib},
		{Policy{}, None, None},
		{Policy{}, most, None},
		{Policy{Percent: 200, Most: 3 * gib}, gib, gib + gib/100*200},
		{Policy{Percent: math.MaxInt, Most: None}, 3 * gib, None},
		{Policy{Percent: 1, Least: 2 * gib}, gib, 3 * gib}, // Most is never below Least
		{Policy{Least: 1, Most: 1}, gib, gib + 1},
	} {
		if got := tc.policy.Limit(tc.cap); got != tc.want {
			t.Errorf("%+v under %d: %d, want %d", tc.policy, tc.cap, got, tc.want)
		}
	}
}

func TestMerge(t *testing.T) {
	got := Merge([]gpu.Process{
		{PID: 9, Kind: gpu.Compute, Bytes: 5, Known: true, GI: -1, CI: -1},
		{PID: 7, Kind: gpu.Graphics, Bytes: math.MaxUint64, GI: -1, CI: -1}, // not a figure
		{PID: 7, Kind: gpu.Compute, Bytes: 0, Known: true, GI: -1, CI: -1},
		{PID: 9, Kind: gpu.Graphics, Bytes: 8, Known: true, GI: -1, CI: -1},
		{PID: 9, Kind: gpu.MPS, GI: -1, CI: -1},
		{PID: 3, Kind: gpu.Compute, Bytes: 1, Known: true, GI: 2, CI: 1},
		{PID: 3, Kind: gpu.Compute, Bytes: 2, Known: true, GI: 2, CI: 0},
		{PID: 3, Kind: gpu.Compute, Bytes: 3, Known: true, GI: 1, CI: 0},
		{PID: 2, Kind: gpu.MPS, Bytes: 77, GI: -1, CI: -1},
	})
	want := []Process{
		{PID: 2, GI: -1, CI: -1},
		{PID: 3, GI: 1, CI: 0, Bytes: 3, Known: true},
		{PID: 3, GI: 2, CI: 0, Bytes: 2, Known: true},
		{PID: 3, GI: 2, CI: 1, Bytes: 1, Known: true},
		{PID: 7, GI: -1, CI: -1, Bytes: 0, Known: true},
		{PID: 9, GI: -1, CI: -1, Bytes: 8, Known: true},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := Merge(nil); got != nil {
		t.Errorf("nothing becomes %+v", got)
	}
}

var epoch = time.Unix(1_700_000_000, 0)

func at(ms int) time.Time { return epoch.Add(time.Duration(ms) * time.Millisecond) }

// has is a process of a container, whose PID is its start time too.
func has(pid int, container string, bytes uint64) Process {
	return Process{PID: pid, GI: -1, CI: -1, Start: uint64(pid), Container: container, Bytes: bytes, Known: true}
}

func unknown(pid int, container string) Process {
	p := has(pid, container, 0)
	p.Known = false
	return p
}

func everyone(string) bool { return true }

func TestJudge(t *testing.T) {
	const g = gpu.UUID("GPU-1")
	type step struct {
		ms        int
		processes []Process
		want      []string // kind container
	}
	four := []Allowance{{"a", g, 4 * gib, ""}, {"a", "GPU-2", 1, ""}, {"b", g, 4 * gib, ""}}
	over := []Process{has(1, "a", 5*gib)}
	under := []Process{has(1, "a", 4*gib)}
	is := func(words ...string) []string { return words }
	for _, tc := range []struct {
		name       string
		allowances []Allowance
		known      func(string) bool
		open       bool
		steps      []step
	}{
		{"over, and again as long as it lasts", four, everyone, false, []step{
			{0, over, nil}, {250, over, is("over a")}, {500, over, is("over a")}, {750, under, nil}, {1000, over, nil}, {1250, over, is("over a")}}},
		{"within the tolerance", four, everyone, false, []step{
			{0, []Process{has(1, "a", 4*gib+256*mib)}, nil}, {250, []Process{has(1, "a", 4*gib+256*mib)}, nil},
			{500, []Process{has(1, "a", 4*gib+256*mib+1)}, nil}, {750, []Process{has(1, "a", 4*gib+256*mib+1)}, is("over a")}}},
		{"the sum of a container, and no other's", four, everyone, false, []step{
			{0, []Process{has(1, "a", 3*gib), has(2, "b", 3*gib), has(3, "", 30*gib), has(4, "a", 3*gib)}, nil},
			{250, []Process{has(1, "a", 3*gib), has(2, "b", 3*gib), has(3, "", 30*gib), has(4, "a", 3*gib)}, is("over a")}}},
		{"too soon to confirm", four, everyone, false, []step{
			{0, over, nil}, {100, over, nil}, {149, over, nil}, {150, over, is("over a")}}},
		{"ended in between", four, everyone, false, []step{
			{0, over, nil}, {100, under, nil}, {250, over, nil}, {350, nil, nil}, {500, over, nil}}},
		{"no figure neither adds nor ends", four, everyone, false, []step{
			{0, over, nil}, {250, []Process{unknown(1, "a")}, nil}, {500, []Process{unknown(1, "a")}, nil}, {750, over, is("over a")}}},
		{"no figure is no verdict, for ever", four, everyone, false, []step{
			{0, []Process{unknown(1, "a"), has(2, "a", 4*gib)}, nil}, {250, []Process{unknown(1, "a"), has(2, "a", 4*gib)}, nil}, {500, []Process{unknown(1, "a"), has(2, "a", 4*gib)}, nil}}},
		{"what is known is enough", four, everyone, false, []step{
			{0, []Process{unknown(1, "a"), has(2, "a", 5*gib)}, nil}, {250, []Process{unknown(1, "a"), has(2, "a", 5*gib)}, is("over a")}}},
		{"a doubt does not wait for ever", four, everyone, false, []step{
			{0, over, nil}, {4000, []Process{unknown(1, "a")}, nil}, {8000, over, nil}, {8250, over, is("over a")}}},
		{"samples that are missing", four, everyone, false, []step{
			{0, over, nil}, {4000, over, is("over a")}, {9001, over, nil}, {9251, over, is("over a")}}},
		{"two allocations add up", []Allowance{{"a", g, 2 * gib, ""}, {"a", g, 3 * gib, ""}}, everyone, false, []step{
			{0, over, nil}, {250, over, nil}}},
		{"all of the GPU beside a share", []Allowance{{"a", g, 2 * gib, ""}, {"a", g, None, ""}}, everyone, false, []step{
			{0, over, nil}, {250, over, nil}}},
		{"a container that is not known well", four, func(c string) bool { return c != "a" }, false, []step{
			{0, over, nil}, {250, over, nil}, {9000, over, nil}}},
		{"an intruder has its grace", four, everyone, false, []step{
			{0, []Process{unknown(1, "x")}, nil}, {2500, []Process{unknown(1, "x")}, nil}, {4999, []Process{unknown(1, "x")}, nil}, {5000, []Process{unknown(1, "x")}, is("intruder x")}}},
		{"an intruder that was away", four, everyone, false, []step{
			{0, []Process{has(1, "x", 0)}, nil}, {2500, nil, nil}, {2750, []Process{has(1, "x", 0)}, nil}, {5000, []Process{has(1, "x", 0)}, nil}, {7750, []Process{has(1, "x", 0)}, is("intruder x")}}},
		{"no intruders on an open GPU", four, everyone, true, []step{
			{0, []Process{has(1, "x", gib)}, nil}, {2500, []Process{has(1, "x", gib)}, nil}, {5000, []Process{has(1, "x", gib)}, nil}, {7500, []Process{has(1, "x", gib)}, nil}}},
		{"of no pod", four, everyone, false, []step{
			{0, []Process{has(1, "", 50*gib)}, nil}, {2500, []Process{has(1, "", 50*gib)}, nil}, {5000, []Process{has(1, "", 50*gib)}, nil}}},
		{"sorted", append(slices.Clone(four), Allowance{"c", g, gib, ""}), everyone, false, []step{
			{0, []Process{has(1, "c", 9*gib), has(2, "b", 9*gib), has(3, "a", 9*gib)}, nil},
			{250, []Process{has(3, "a", 9*gib), has(2, "b", 9*gib), has(1, "c", 9*gib)}, is("over a", "over b", "over c")}}},
		{"no process behind the PID", four, everyone, false, []step{
			{0, []Process{{PID: 1, Container: "a", Bytes: 9 * gib, Known: true}}, nil}, {250, []Process{{PID: 1, Container: "a", Bytes: 9 * gib, Known: true}}, nil}}},
		{"a clock that went back", four, everyone, false, []step{
			{1000, over, nil}, {500, over, nil}, {749, over, is("over a")}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			j := NewJudge(Policy{})
			for _, s := range tc.steps {
				verdicts := j.Judge(Sample{At: at(s.ms), Tick: 100, GPU: g, Open: tc.open, Processes: s.processes}, tc.allowances, tc.known)
				var got []string
				for _, v := range verdicts {
					got = append(got, string(v.Kind)+" "+v.Container)
				}
				if !slices.Equal(got, s.want) {
					t.Errorf("at %d ms: %q, want %q", s.ms, got, s.want)
				}
			}
		})
	}
}

// TestContainersOfOneAllocationTogether: an allocation's cap is for all of its containers
// together. The one with the largest excess over its own count is ended, where nobody
// counts the one with the most, and what the others have then is judged
// anew.
func TestContainersOfOneAllocationTogether(t *testing.T) {
	const g = gpu.UUID("GPU-1")
	type step struct {
		ms        int
		processes []Process
		want      string // container used own told
	}
	shared := []Allowance{{"a", g, 4 * gib, "k"}, {"b", g, 4 * gib, "k"}, {"c", g, 4 * gib, "k"}, {"z", g, 4 * gib, "other"}}
	both := []Process{has(1, "a", 2*gib), has(2, "b", 3*gib), has(3, "z", 4*gib)}
	counting := func(b, a uint64) []Process {
		list := []Process{has(1, "a", 2*gib), has(2, "b", 3*gib)}
		list[0].Counted, list[1].Counted = a, b
		return list
	}
	for name, tc := range map[string]struct {
		known func(string) bool
		steps []step
	}{
		"each within the cap, and not together": {everyone, []step{{0, both, ""}, {250, both, "b 5 3 0"}, {500, both, "b 5 3 1"}}},
		"the one that is named stays named": {everyone, []step{{0, both, ""}, {250, both, "b 5 3 0"},
			{500, []Process{has(1, "a", 3*gib), has(2, "b", 2*gib)}, "b 5 2 1"}}},
		"the others are judged anew": {everyone, []step{
			{0, append(slices.Clone(both), has(4, "c", 2*gib)), ""}, {250, append(slices.Clone(both), has(4, "c", 2*gib)), "b 7 3 0"},
			{500, []Process{has(1, "a", 3*gib), has(4, "c", 2*gib)}, ""}, {750, []Process{has(1, "a", 3*gib), has(4, "c", 2*gib)}, "a 5 3 0"}}},
		"as much as another: the youngest": {everyone, []step{
			{0, []Process{has(7, "a", 3*gib), has(2, "b", 3*gib)}, ""}, {250, []Process{has(7, "a", 3*gib), has(2, "b", 3*gib)}, "a 6 3 0"}}},
		"the one that goes around its count, though another has more": {everyone, []step{
			{0, counting(3*gib, 0), ""}, {250, counting(3*gib, 0), "a 5 2 0"}}},
		"all count, and one has more than it counts": {everyone, []step{
			{0, counting(3*gib-1, 1*gib), ""}, {250, counting(3*gib-1, 1*gib), "a 5 2 0"}}},
		"one that counts another's share away": {everyone, []step{ // the counts are more than there can be
			{0, counting(3*gib, 2*gib), ""}, {250, counting(3*gib, 2*gib), "b 5 3 0"}}},
		"one that is not known well counts for nobody": {func(c string) bool { return c != "b" }, []step{{0, both, ""}, {250, both, ""}, {500, both, ""}}},
		"one that has no figure": {everyone, []step{
			{0, []Process{has(1, "a", 5*gib), unknown(2, "b")}, ""}, {250, []Process{has(1, "a", 5*gib), unknown(2, "b")}, "a 5 5 0"}}},
		"one after the other": {everyone, []step{{0, []Process{has(1, "a", 4*gib)}, ""}, {250, []Process{has(2, "b", 4*gib)}, ""}, {500, []Process{has(2, "b", 4*gib)}, ""}}},
	} {
		t.Run(name, func(t *testing.T) {
			j := NewJudge(Policy{})
			for _, s := range tc.steps {
				got := ""
				for _, v := range j.Judge(Sample{At: at(s.ms), Tick: 100, GPU: g, Processes: s.processes}, shared, tc.known) {
					got += fmt.Sprint(v.Container, " ", v.Used/gib, " ", v.Own/gib, " ", v.Told)
				}
				if got != s.want {
					t.Errorf("at %d ms: %q, want %q", s.ms, got, s.want)
				}
			}
		})
	}
}

// TestVerdict looks at what a verdict says.
func TestVerdict(t *testing.T) {
	const g = gpu.UUID("GPU-1")
	j := NewJudge(Policy{Grace: time.Second})
	allowances := []Allowance{{"a", g, 4 * gib, ""}}
	sample := Sample{Tick: 100, GPU: g, Processes: []Process{has(4, "a", 3*gib), has(2, "a", 2*gib), unknown(3, "a"), has(9, "x", gib), has(5, "", gib)}}
	var got []Verdict
	for ms := 0; ms <= 1250; ms += 250 {
		sample.At = at(ms)
		got = j.Judge(sample, allowances, everyone)
	}
	want := []Verdict{
		{Kind: Over, Container: "a", GPU: g, Cap: 4 * gib, Limit: 4*gib + 256*mib, Used: 5 * gib, Own: 5 * gib, First: at(0), Told: 4,
			Processes: []Process{has(2, "a", 2*gib), unknown(3, "a"), has(4, "a", 3*gib)}},
		{Kind: Intruder, Container: "x", GPU: g, Used: gib, Own: gib, First: at(0), Told: 1, Processes: []Process{has(9, "x", gib)}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if sample.Processes[0].PID != 4 {
		t.Error("the sample was sorted in its owner's hands")
	}

	gone := func(pids ...int) func(Process) bool {
		return func(p Process) bool { return !slices.Contains(pids, p.PID) }
	}
	for _, tc := range []struct {
		v    Verdict
		gone []int
		want bool
	}{
		{want[0], nil, true}, {want[0], []int{3}, true}, {want[0], []int{2}, false}, {want[0], []int{2, 3, 4}, false},
		{want[1], nil, true}, {want[1], []int{9}, false},
	} {
		if got := tc.v.Stands(gone(tc.gone...)); got != tc.want {
			t.Errorf("%s without %d: %t", tc.v.Kind, tc.gone, got)
		}
	}
}

// TestAllocationsComeAndGo changes what a container holds while it offends.
func TestAllocationsComeAndGo(t *testing.T) {
	const g = gpu.UUID("GPU-1")
	j := NewJudge(Policy{})
	over := []Process{has(1, "a", 5*gib)}
	for _, s := range []struct {
		ms         int
		allowances []Allowance
		want       int
	}{
		{0, nil, 0}, {2500, nil, 0}, // its allocation is late
		{4900, []Allowance{{"a", g, 8 * gib, ""}}, 0}, {5100, nil, 0}, {9000, nil, 0}, {10099, nil, 0},
		{10200, []Allowance{{"a", g, 4 * gib, ""}}, 0}, {10400, []Allowance{{"a", g, 3 * gib, ""}}, 0}, // another cap, another doubt
		{10600, []Allowance{{"a", g, 3 * gib, ""}}, 1},
	} {
		got := j.Judge(Sample{At: at(s.ms), Tick: 100, GPU: g, Processes: over}, s.allowances, everyone)
		if len(got) != s.want {
			t.Errorf("at %d ms: %+v, want %d", s.ms, got, s.want)
		}
	}
}

// TestReusedPID has a PID that the driver goes on listing for a process whose
// number the kernel has given to another.
func TestReusedPID(t *testing.T) {
	const g = gpu.UUID("GPU-1")
	allowances := []Allowance{{"big", g, 40 * gib, ""}, {"small", g, 4 * gib, ""}}
	j := NewJudge(Policy{})
	for i, s := range []struct {
		tick, start uint64
		container   string
		listed      bool
		want        int
	}{
		{1000, 900, "big", true, 0},
		{1025, 0, "", true, 0},          // dead, and still listed
		{1050, 1040, "small", true, 0},  // its number is another's
		{1075, 1040, "small", true, 0},  //
		{1100, 1040, "small", false, 0}, // the driver lets go
		{1125, 1040, "small", true, 0},  // now it is small's own
		{1150, 1040, "small", true, 1},  //
		{1175, 1175, "small", true, 0},  // reused between the answer and the look-up
		{1200, 1201, "small", true, 0},  //
		{1225, 1201, "small", false, 0}, //
		{1250, 1251, "small", true, 0},  // the very first sample of a row
		{1275, 1251, "small", true, 0},  //
		{1300, 1251, "small", false, 0}, //
		{1325, 1325, "small", true, 0},  // the same tick: a process may begin and take memory within it
		{1350, 1325, "small", true, 1},  //
		{1375, 1325, "small", true, 1},  //
		{1400, 1325, "", true, 0},       // left its container, which is not done
		{1425, 1325, "small", true, 0},  //
		{1450, 1325, "small", true, 1},  //
	} {
		sample := Sample{At: at(i * 250), Tick: s.tick, GPU: g}
		if s.listed {
			sample.Processes = []Process{{PID: 100, GI: -1, CI: -1, Start: s.start, Container: s.container, Bytes: 20 * gib, Known: true}}
		}
		if got := j.Judge(sample, allowances, everyone); len(got) != s.want {
			t.Errorf("%d: %+v: %+v", i, s, got)
		}
	}
}

func TestOffences(t *testing.T) {
	var o Offences
	for _, s := range []struct {
		pod     string
		minutes int
		want    int
	}{
		{"a", 0, 1}, {"b", 1, 1}, {"a", 30, 2}, {"a", 59, 3}, {"a", 60, 3}, {"b", 70, 1}, {"a", 500, 1},
	} {
		if got := o.Add(s.pod, epoch.Add(time.Duration(s.minutes)*time.Minute)); got != s.want {
			t.Errorf("%s after %d minutes: %d, want %d", s.pod, s.minutes, got, s.want)
		}
	}
	if len(o.by) != 1 {
		t.Errorf("%d pods are remembered, want 1", len(o.by))
	}
	for range 1000 {
		if got := o.Add("a", epoch.Add(501*time.Minute)); got > maxOffences {
			t.Fatalf("%d offences", got)
		}
	}
}

// FuzzJudge feeds any samples and holds each verdict against the plain sums of
// the two samples that it rests on.
func FuzzJudge(f *testing.F) {
	f.Add([]byte{0, 1, 1, 1, 200, 0, 100, 1, 1, 200, 0, 100, 1, 1, 200})
	f.Add([]byte("a sample, another sample, and the third sample of the three"))
	policy := Policy{Grace: time.Second}
	allowances := []Allowance{{"a", "g", 10 * gib, ""}, {"b", "g", 100 * gib, ""}, {"b", "g", gib, ""}, {"c", "g", None, ""}, {"d", "h", gib, ""}}
	names := []string{"", "a", "b", "c", "d", "e"}
	unsure := func(c string) bool { return c != "e" }
	f.Fuzz(func(t *testing.T, data []byte) {
		j := NewJudge(policy)
		sums := map[time.Time]map[string]uint64{}
		now := at(0)
		for len(data) >= 2 {
			now = now.Add(time.Duration(data[0]) * 4 * time.Millisecond)
			s := Sample{At: now, Tick: uint64(now.Sub(epoch)/(10*time.Millisecond)) + 1, GPU: "g"}
			n := int(data[1] % 6)
			data = data[2:]
			sum := map[string]uint64{}
			for range n {
				if len(data) < 3 {
					break
				}
				bits := binary.LittleEndian.Uint16(data)
				p := Process{PID: int(bits % 5), GI: -1, CI: -1, Start: uint64(bits >> 3 % 64), Container: names[bits>>9%6], Bytes: uint64(data[2]) * gib, Known: bits>>14 != 0}
				data = data[3:]
				s.Processes = append(s.Processes, p)
				if p.Known && p.Start > 0 {
					sum[p.Container] += p.Bytes
				} else {
					sum[p.Container] += 0
				}
			}
			sums[now] = sum
			verdicts := j.Judge(s, allowances, unsure)
			if !slices.IsSortedFunc(verdicts, func(a, b Verdict) int { return slices.Compare([]string{a.Container}, []string{b.Container}) }) {
				t.Fatalf("unsorted: %+v", verdicts)
			}
			for _, v := range verdicts {
				limit := map[string]uint64{"a": policy.Limit(10 * gib), "b": policy.Limit(101 * gib)}[v.Container]
				_, then := sums[v.First][v.Container]
				switch {
				case !then, v.First.After(now.Add(-150 * time.Millisecond)), v.GPU != "g":
					t.Fatalf("%+v rests on nothing", v)
				case v.Kind == Over && (limit == 0 || v.Limit != limit || v.Used <= limit || v.Used > sum[v.Container] || sums[v.First][v.Container] <= limit):
					t.Fatalf("%+v, known %d then and %d now", v, sums[v.First][v.Container], sum[v.Container])
				case v.Kind == Intruder && (v.Container != "d" || v.First.After(now.Add(-time.Second))):
					t.Fatalf("%+v is no intruder", v)
				case !v.Stands(func(Process) bool { return true }), v.Stands(func(Process) bool { return false }):
					t.Fatalf("%+v does not stand by itself", v)
				}
			}
		}
	})
}

// BenchmarkJudge judges a GPU with 100 processes of 25 containers.
func BenchmarkJudge(b *testing.B) {
	j := NewJudge(Policy{})
	var allowances []Allowance
	s := Sample{Tick: 1000, GPU: "g"}
	for i := range 100 {
		name := string(rune('a' + i%25))
		s.Processes = append(s.Processes, has(i+1, name, gib))
		if i < 25 {
			allowances = append(allowances, Allowance{name, "g", 8 * gib, ""})
		}
	}
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		s.At = at(n * 250)
		if v := j.Judge(s, allowances, everyone); v != nil {
			b.Fatal(v)
		}
	}
}
