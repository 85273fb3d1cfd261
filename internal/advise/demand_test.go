// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	"github.com/google/go-cmp/cmp"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func at(minute int) time.Time { return noon.Add(time.Duration(minute) * time.Minute) }

// units is a piece of memory units of GPU 0.
func units(first, last int) []usage.Piece {
	return []usage.Piece{{GPU: "GPU-0", Of: piece.Units{Set: piece.Set{{First: first, Last: last}}}, Share: .25, MemoryMiB: uint64(last-first+1) * unit}}
}

func instances(places ...int) (out []usage.Piece) {
	for _, start := range places {
		out = append(out, usage.Piece{GPU: "GPU-0", Of: piece.Instance(mig.Placement{Profile: profile("1g.6gb"), Start: start, Size: 1}), Share: .25, MemoryMiB: 5950})
	}
	return out
}

// told is a demand in short: of each request its name, when it came, for how many minutes it
// holds what it gets, and what that is.
func told(d *Demand) (out []string) {
	for i := range d.Requests {
		r := &d.Requests[i]
		hold := "to the end"
		if r.Hold != ToTheEnd {
			hold = fmt.Sprint(r.Hold.Minutes())
		}
		out = append(out, fmt.Sprintf("%s %.4v %s: %s", r.Name, r.At.Minutes(), hold, r.shape()))
	}
	return out
}

// TestJournal reads a journal with all that can be in one.
func TestJournal(t *testing.T) {
	var j Journal
	who := func(uid string) usage.Holder {
		return usage.Holder{Namespace: "n", Pod: "pod-" + uid, UID: uid, Container: "main"}
	}
	for _, r := range []usage.Record{
		{Time: at(0), Event: usage.Began, Book: &usage.State{Next: 3, Open: []*usage.Grant{
			{Number: 1, Allocation: "old", Resource: "x/gpu", Since: at(-30), Held: []usage.Held{{Piece: usage.Piece{GPU: "GPU-1", Of: piece.Whole{}, Share: 1, MemoryMiB: 24576}}}, Holder: who("a")},
			{Number: 2, Allocation: "lost", Resource: "x/gpu-mem", Since: at(-20), Held: []usage.Held{{Piece: units(0, 0)[0]}}}}}},
		{Time: at(1), Event: usage.Cut, Op: "layout", GPU: "GPU-0", Placement: "shared"},
		{Time: at(2), Event: usage.Cut, Op: "create", GPU: "GPU-0", Placement: "1g.6gb@0"},
		// An init container, and then the app container on the same devices and a sidecar.
		{Time: at(3), Event: usage.Allocated, Grant: 3, Allocation: "b0", Pieces: units(0, 1)},
		{Time: at(3), Event: usage.Named, Grant: 3, Holder: who("b")},
		{Time: at(5), Event: usage.Released, Grant: 3},
		{Time: at(5), Event: usage.Allocated, Grant: 4, Allocation: "b0", Pieces: units(0, 1)},
		{Time: at(5), Event: usage.Named, Grant: 4, Holder: who("b")},
		{Time: at(6), Event: usage.Allocated, Grant: 5, Allocation: "b1", Pieces: instances(0, 2), Holder: who("b")},
		{Time: at(7), Event: usage.Released, Grant: 5},
		{Time: at(13), Event: usage.Released, Grant: 4},
		// One that looks after the GPU takes no room.
		{Time: at(8), Event: usage.Allocated, Grant: 6, Allocation: "admin", Pieces: []usage.Piece{{GPU: "GPU-0", Of: piece.Whole{}}}},
		{Time: at(9), Event: usage.Allocated, Grant: 7, Allocation: "nobody", Pieces: units(2, 3)},
		{Time: at(10), Event: usage.Refused, FrontEnd: ledger.DevicePlugin, Resource: "x/gpu-mem", Count: 2, Reason: "NotOneGPU"},
		{Time: at(10), Event: usage.Refused, FrontEnd: ledger.DevicePlugin, Resource: "x/mig-2g.12gb", Count: 1},
		{Time: at(10), Event: usage.Refused, FrontEnd: ledger.DRA, Reason: "ClaimRefused"},
		{Time: at(11), Event: usage.Lost, Count: 4},
		{Time: at(11), Event: usage.Left, Count: 4, Before: at(-9)},
		{Time: at(15), Event: usage.Began, Book: &usage.State{Next: 8, Open: []*usage.Grant{{Number: 1}, {Number: 7}}}}, // the end of 2 was lost
		{Time: at(20), Event: usage.Used},
	} {
		j.Apply(&r)
		j.Apply(&r) // twice is once
	}
	j.lost, j.claims = j.lost/2, j.claims/2 // of these each counts
	j.refused = slices.Compact(j.refused)
	d, err := j.Demand(nil, Options{Unit: unit})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"grant 2 0 15: gpu-mem of 6000 MiB",
		"n/pod-a 0 to the end: gpu",
		"n/pod-b 3 10: 2 mig-1g.6gb and gpu-mem of 12000 MiB",
		"grant 7 9 to the end: gpu-mem of 12000 MiB",
		"refusal 1 10 15: gpu-mem of 12000 MiB", // the median of all, since nobody saw one end
		"refusal 2 10 15: mig-2g.12gb",
	}
	if diff := cmp.Diff(want, told(d)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if d.Granted != 4 || d.Refused != 2 || d.Pending != 0 || len(d.Notes) != 4 {
		t.Errorf("%+v", d)
	}
	if d, err = j.Demand(nil, Options{Unit: unit, Back: true}); err != nil || len(d.Requests) != 4 || d.Refused != 2 {
		t.Errorf("of those that come back: %v %v %v", d, told(d), err)
	}
	if d, err = j.Demand(nil, Options{Unit: unit, Since: at(6), Until: at(12)}); err != nil {
		t.Fatal(err)
	}
	want = []string{"grant 2 0 to the end: gpu-mem of 6000 MiB", "n/pod-a 0 to the end: gpu", "n/pod-b 0 to the end: 2 mig-1g.6gb and gpu-mem of 12000 MiB",
		"grant 7 3 to the end: gpu-mem of 12000 MiB", "refusal 1 4 3: gpu-mem of 12000 MiB", "refusal 2 4 3: mig-2g.12gb"}
	if diff := cmp.Diff(want, told(d)); diff != "" {
		t.Errorf("of a part, -want +got:\n%s", diff)
	}
	for _, bad := range []Options{{Since: at(5), Until: at(4)}, {Since: at(40)}} {
		if d, err := j.Demand(nil, bad); err == nil {
			t.Errorf("%+v: %v, want an error", bad, d)
		}
	}
}

// TestPresent reads layouts off a journal.
func TestPresent(t *testing.T) {
	inv := smalls(1).Inventory
	for text, want := range map[string]string{
		"":                   "",
		"whole":              "{GPU-0 whole device-plugin 0  time slices {false 0 0s} false [] [] false 0}",
		"off":                "{GPU-0 off  0  time slices {false 0 0s} false [] [] false 0}",
		"unset":              "",
		"1g.6gb@0 2g.12gb@2": "{GPU-0 mig device-plugin 0  time slices {false 0 0s} false [{1g.6gb 1} {2g.12gb 1}] [] false 0}",
		"1g.6gb@0 1g.6gb@1 1g.6gb@2 1g.6gb@3 2g.12gb@0 2g.12gb@2": "{GPU-0 mig device-plugin 0  time slices {false 0 0s} true [] [1g.6gb 2g.12gb] false 0}",
		"9g.90gb@0": "",
		"dynamic":   "{GPU-0 dynamic dra 0  time slices {false 0 0s} true [] [] false 0}",
		"shared":    "", // without a grant in the journal: replicas or memory, it does not say
	} {
		j := Journal{layouts: map[gpu.UUID]string{"GPU-0": text}}
		wants, ok := j.Present(inv)
		if got := fmt.Sprint(wants); ok != (want != "") || ok && got != "["+want+"]" {
			t.Errorf("%q: %v %s, want %s", text, ok, got, want)
		}
	}
	var j Journal
	j.Apply(&usage.Record{Time: at(0), Event: usage.Cut, Op: "layout", GPU: "GPU-0", Placement: "shared"})
	j.Apply(&usage.Record{Time: at(1), Event: usage.Allocated, Grant: 1, Pieces: []usage.Piece{{GPU: "GPU-0", Of: piece.Replica{Of: 3}, Share: .3, MemoryMiB: 8000}}})
	if wants, ok := j.Present(inv); !ok || wants[0].Mode != config.Shared || wants[0].Replicas != 3 {
		t.Errorf("replicas: %+v", wants)
	}
	if _, ok := j.Present(smalls(2).Inventory); ok {
		t.Error("of two GPUs one is known, and both are said to be")
	}
}

const pods = `{"kind": "List", "apiVersion": "v1", "items": [
{"kind": "Pod", "metadata": {"namespace": "n", "name": "ran", "uid": "a", "creationTimestamp": "2026-03-01T12:00:00Z"},
 "spec": {"nodeName": "here", "containers": [{"resources": {"limits": {"example.com/gpu-mem": "2"}}}]}, "status": {"phase": "Running", "startTime": "2026-03-01T12:04:00Z"}},
{"kind": "Pod", "metadata": {"namespace": "n", "name": "before", "uid": "b", "creationTimestamp": "2026-03-01T12:01:00Z"},
 "spec": {"nodeName": "here", "containers": [{"resources": {"requests": {"example.com/mig-1g.6gb": 2, "memory": "1Gi"}}}, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}],
  "initContainers": [{"restartPolicy": "Always", "resources": {"limits": {"example.com/gpu": "1"}}}]},
 "status": {"phase": "Succeeded", "startTime": "2026-03-01T12:02:00Z", "containerStatuses": [{"state": {"terminated": {"finishedAt": "2026-03-01T12:09:00Z"}}}, {"state": {"terminated": {"finishedAt": "2026-03-01T12:08:00Z"}}}]}},
{"kind": "Pod", "metadata": {"namespace": "n", "name": "elsewhere", "uid": "c", "creationTimestamp": "2026-03-01T12:01:00Z"},
 "spec": {"nodeName": "there", "containers": [{"resources": {"limits": {"example.com/gpu": "1"}}}]}, "status": {"phase": "Running", "startTime": "2026-03-01T12:02:00Z"}},
{"kind": "Pod", "metadata": {"namespace": "n", "name": "refused", "uid": "d", "creationTimestamp": "2026-03-01T12:05:00Z"},
 "spec": {"nodeName": "here", "containers": [{"resources": {"limits": {"example.com/gpu-mem": "3"}}}]}, "status": {"phase": "Failed", "reason": "UnexpectedAdmissionError", "startTime": "2026-03-01T12:05:01Z"}},
{"kind": "Pod", "metadata": {"namespace": "n", "name": "waits", "uid": "e", "creationTimestamp": "2026-03-01T12:06:00Z"},
 "spec": {"containers": [{"resources": {"limits": {"example.com/gpu-mem": "4"}}}]}, "status": {"phase": "Pending"}},
{"kind": "Pod", "metadata": {"namespace": "n", "name": "none", "uid": "f", "creationTimestamp": "2026-03-01T12:06:00Z"},
 "spec": {"containers": [{"resources": {"limits": {"cpu": "4"}}}]}, "status": {"phase": "Pending"}},
{"kind": "Pod", "metadata": {"namespace": "n", "name": "claims", "uid": "g", "creationTimestamp": "2026-03-01T12:06:00Z"},
 "spec": {"resourceClaims": [{"name": "gpu"}], "containers": [{}]}, "status": {"phase": "Pending"}},
{"kind": "Event", "reason": "FailedScheduling", "involvedObject": {"kind": "Pod", "uid": "e"}, "lastTimestamp": "2026-03-01T12:11:00Z"},
{"kind": "Event", "reason": "FailedScheduling", "involvedObject": {"kind": "Pod", "uid": "gone"}, "eventTime": "2026-03-01T12:12:00Z", "lastTimestamp": null}]}
`

// TestTrace adds to a journal what the API server knows.
func TestTrace(t *testing.T) {
	var j Journal
	for _, r := range []usage.Record{
		{Time: at(4), Event: usage.Allocated, Grant: 1, Allocation: "x", Pieces: units(0, 1), Holder: usage.Holder{Namespace: "n", Pod: "ran", UID: "a"}},
		{Time: at(5), Event: usage.Refused, FrontEnd: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Count: 3}, // is pod d
		{Time: at(6), Event: usage.Refused, FrontEnd: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Count: 3}, // is another
		{Time: at(10), Event: usage.Released, Grant: 1},
	} {
		j.Apply(&r)
	}
	trace, err := ReadTrace(strings.NewReader(pods))
	if err != nil {
		t.Fatal(err)
	}
	d, err := j.Demand(trace, Options{Unit: unit, Domain: "example.com"})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"n/ran 0.01667 6: gpu-mem of 12000 MiB", // it waited for four minutes, which it would not have to
		"n/before 1.017 7: 2 mig-1g.6gb and gpu",
		"n/refused 5 7: gpu-mem of 18000 MiB",
		"refusal 2 6 7: gpu-mem of 18000 MiB",
		"n/waits 6.017 7: gpu-mem of 24000 MiB",
	}
	if diff := cmp.Diff(want, told(d)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if d.Granted != 2 || d.Refused != 2 || d.Pending != 1 || !d.End.Equal(at(12)) || len(d.Notes) != 4 {
		t.Errorf("%+v", d)
	}
	if d, err = j.Demand(trace, Options{Unit: unit, Domain: "example.com", Node: "there"}); err != nil || !slices.Contains(told(d), "n/elsewhere 1.017 to the end: gpu") {
		t.Errorf("of another node: %v %v", told(d), err)
	}

	// A watch tells of a pod again and again, and at last that it is gone.
	watch := pods + `{"type": "DELETED", "object": {"kind": "Pod", "metadata": {"namespace": "n", "name": "waits", "uid": "e", "creationTimestamp": "2026-03-01T12:06:00Z", "deletionTimestamp": "2026-03-01T12:07:00Z"},
		"spec": {"containers": [{"resources": {"limits": {"example.com/gpu-mem": "4"}}}]}, "status": {"phase": "Pending"}}}`
	if trace, err = ReadTrace(strings.NewReader(watch)); err != nil || len(trace.pods) != 7 || !trace.pods["e"].ended.Equal(at(7)) {
		t.Errorf("a watch: %+v %v", trace, err)
	}
	for _, bad := range []string{"", "[]", "{", `{"items": []}`, `{"kind": "Pod", "metadata": {"name": "a"}}`, `{"kind": "Pod", "metadata": {"uid": "a"}}`,
		`{"kind": "List", "items": [{"kind": "List", "items": [{"kind": "List", "items": [{"kind": "List", "items": [{"kind": "List"}]}]}]}]}`} {
		if trace, err := ReadTrace(strings.NewReader(bad)); err == nil {
			t.Errorf("%s: %+v, want an error", bad, trace)
		}
	}
}

// TestRules replays what a refused pod comes to: with the placer it waits, and as a Job's it
// comes back after 10, 20, 40 s.
func TestRules(t *testing.T) {
	node := smalls(2)
	ask := func(name string, second, hold, units int) Request {
		return Request{name, time.Duration(second) * time.Second, time.Duration(hold) * time.Second, []Ask{{Kind: piece.KindUnits, Count: 1, Memory: gpu.MiB(units) * unit}}}
	}
	// One unit is left on a GPU and two on the other: to the scheduler that is room for three.
	d := &Demand{Begin: at(0), End: at(2), Requests: []Request{ask("a", 0, 35, 3), ask("b", 0, 35, 2), ask("c", 2, 5, 3)}}
	shared := []config.Want{models()[1].want("GPU-0"), models()[1].want("GPU-1")}
	for _, c := range []struct {
		rules                    Rules
		refused, served, waiting int
		wait                     time.Duration
	}{
		{Rules{}, 1, 2, 0, 0},
		{Rules{Placer: true}, 0, 3, 0, 33 * time.Second},
		{Rules{Back: true}, 3, 3, 0, 70 * time.Second},
	} {
		got, err := Replay(node, shared, d, c.rules)
		if err != nil || got.Refused != c.refused || got.Served != c.served || got.Waiting != c.waiting || got.Wait != c.wait {
			t.Errorf("%+v: %+v %v, want %+v", c.rules, got, err, c)
		}
	}
	// What is given out through DRA the scheduler knows exactly.
	for i := range shared {
		shared[i].API = ledger.DRA
	}
	if got, err := Replay(node, shared, d, Rules{}); err != nil || got.Refused != 0 || got.Served != 3 {
		t.Errorf("through dra: %+v %v", got, err)
	}
	if _, err := Replay(node, []config.Want{{Mode: config.Dynamic}, {}}, d, Rules{}); err == nil {
		t.Error("a dynamic GPU is replayed beside one that is not")
	}
}

// TestSearchLimits looks for the best of more partitions than may be tried, from the best in
// which all GPUs are alike.
func TestSearchLimits(t *testing.T) {
	node := smalls(6)
	d := &Demand{Begin: at(0), End: at(10)}
	for i := range 8 {
		d.Requests = append(d.Requests, Request{fmt.Sprint(i), time.Minute, ToTheEnd, []Ask{{Kind: piece.KindPlacement, Count: 1, Profile: profile([]string{"1g.6gb", "2g.12gb"}[i%2])}}})
	}
	for i := range 3 {
		d.Requests = append(d.Requests, Request{fmt.Sprint("w", i), 2 * time.Minute, ToTheEnd, []Ask{{Kind: piece.KindWhole, Count: 1}}})
	}
	a, err := Search(node, nil, d, Rules{}, Limits{Tries: 150})
	if err != nil {
		t.Fatal(err)
	}
	best := &a.Tried[0]
	if a.All || len(a.Tried) > 150 || a.Possible <= 150 || best.Served != 11 || best.Renamed != 0 {
		t.Errorf("tried %d of %d: %s, %+v", len(a.Tried), a.Possible, best.Name, best.Outcome)
	}
	text, err := File("default", best, []string{strings.Repeat("word ", 60)}, node)
	if err != nil || !strings.Contains(text, "mode: whole") || !strings.HasPrefix(text, "# word") {
		t.Errorf("%s\n%v", text, err)
	}
	for line := range strings.Lines(text) {
		if len(line) > 101 {
			t.Errorf("a long line: %s", line)
		}
	}
	again, err := Search(node, nil, d, Rules{}, Limits{Tries: 150})
	if diff := cmp.Diff(a, again, cmp.AllowUnexported(mig.Name{})); err != nil || diff != "" {
		t.Errorf("the same once more is something else:\n%s", diff)
	}
	if _, err := Search(Node{Inventory: &gpu.Inventory{}}, nil, d, Rules{}, Limits{Tries: 1}); err == nil {
		t.Error("no GPUs, and an advice")
	}
}

// Advice keeps how the present partition shares the SMs of GPUs that stay, or become, shared by memory.
func TestAdviceKeepsMPS(t *testing.T) {
	node := smalls(2)
	d := &Demand{Begin: at(0), End: at(10)}
	for i := range 6 {
		d.Requests = append(d.Requests, Request{fmt.Sprint(i), time.Minute, ToTheEnd, []Ask{{Kind: piece.KindUnits, Count: 1}}})
	}
	mps := compute.Sharing{MPS: true, Max: 50}
	present := []config.Want{models()[1].want("GPU-0"), {GPU: "GPU-1", Mode: config.Whole, API: ledger.DevicePlugin}}
	present[0].Compute = mps
	a, err := Search(node, present, d, Rules{}, Limits{Tries: 50})
	if err != nil {
		t.Fatal(err)
	}
	shared := 0
	for i := range a.Tried {
		for _, w := range a.Tried[i].Wants {
			if w.Mode == config.Shared {
				shared++
			}
			if (w.Mode == config.Shared) != (w.Compute == mps) {
				t.Errorf("%s: %+v", a.Tried[i].Name, w)
			}
		}
	}
	if shared < 3 {
		t.Errorf("only %d GPUs of what was tried are shared", shared)
	}
}

// TestFile writes every kind of entry, and reads it again.
func TestFile(t *testing.T) {
	node := smalls(6)
	wants := []config.Want{models()[0].want("GPU-0"), models()[1].want("GPU-1"), {GPU: "GPU-2", Mode: config.MIG, API: ledger.DevicePlugin, Geometry: []mig.Count{{Profile: profile("2g.12gb"), N: 2}}}, {GPU: "GPU-3", Mode: config.Off},
		{GPU: "GPU-4", Mode: config.MIG, API: ledger.DRA, OnDemand: true, Profiles: []mig.Name{profile("1g.6gb"), profile("4g.24gb")}}, models()[1].want("GPU-5")}
	wants[5].Compute = compute.Sharing{MPS: true, Factor: 2}
	wants[1].Replicas, wants[1].TimeSlice = 3, gpu.TimeSliceLong
	text, err := File("it", &Alternative{Wants: wants}, nil, node)
	if err != nil {
		t.Fatal(err)
	}
	const want = `version: v1
partitions:
  it:
    - devices: [0]
      mode: whole
    - devices: [1]
      mode: shared
      replicas: 3
      timeSlice: long
    - devices: [2]
      mode: mig
      geometry: {2g.12gb: 2}
    - devices: [3]
      mode: off
    - devices: [4]
      mode: mig
      api: dra
      profiles: [1g.6gb, 4g.24gb]
    - devices: [5]
      mode: shared
      compute: {mps: {factor: 2}}
`
	if diff := cmp.Diff(want, text); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	all := smalls(2)
	dynamic := &Alternative{Wants: []config.Want{model{kind: "dynamic"}.want("GPU-0"), model{kind: "dynamic"}.want("GPU-1")}}
	if text, err := File("it", dynamic, nil, all); err != nil || !strings.HasSuffix(text, "    - devices: all\n      mode: dynamic\n      api: dra\n") {
		t.Errorf("%s\n%v", text, err)
	}
	if told := strings.Join(Assumed(dynamic, &Demand{}, Rules{}), " "); !strings.Contains(told, "dynamic resource allocation") {
		t.Errorf("%s", told)
	}
	if text, err := File("it is none", &Alternative{Wants: wants}, nil, node); err == nil {
		t.Errorf("a name with spaces: %s", text)
	}
}
