// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
)

func newWorld(t testing.TB, spec emulator.Spec) *emulator.World {
	t.Helper()
	w, err := emulator.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// open is an initialised session.
func open(t testing.TB, w *emulator.World, o emulator.Opening) *emulator.Session {
	t.Helper()
	s := w.Open(o)
	t.Cleanup(s.Close)
	if r := s.Init(); r != emulator.Success {
		t.Fatalf("init: %v", r)
	}
	return s
}

func want[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func must[T any](t testing.TB, what string) func(v T, r emulator.Return) T {
	t.Helper()
	return func(v T, r emulator.Return) T {
		t.Helper()
		if r != emulator.Success {
			t.Fatalf("%s: %v", what, r)
		}
		return v
	}
}

func ret[T any](_ T, r emulator.Return) emulator.Return { return r }

func TestUnitsOfMemory(t *testing.T) {
	units := map[string]uint64{
		"A100-SXM4-40GB": 39, "A100-SXM4-80GB": 79, "A30": 23, "H100-80GB": 79,
		"H200-141GB": 139, "B200": 178, "RTX-PRO-6000": 94, "V100-SXM2-32GB": 31, "V100-SXM3-32GB": 31,
	}
	unified := []string{"GB10", "Thor"} // which tell no memory
	for _, model := range emulator.Models() {
		s := open(t, newWorld(t, emulator.Spec{Model: model, Count: 1}), emulator.Opening{})
		if slices.Contains(unified, model) {
			want(t, model+": memory", ret(s.Memory(0)), emulator.NotSupported)
			continue
		}
		m := must[emulator.Memory](t, "memory")(s.Memory(0))
		want(t, model+": units of 1 GiB", (m.Total-m.Reserved)>>30, units[model])
		want(t, model+": sum", m.Reserved+m.Used+m.Free, m.Total)
	}
	want(t, "models", len(emulator.Models()), len(units)+len(unified))
}

// A call that a driver has no answer to is counted all the same, by names and patterns of
// the world, of a model or of one GPU.
func TestNotSupported(t *testing.T) {
	spec, err := emulator.ParseSpec([]byte(`
model: H100-80GB
count: 2
notSupported: [nvmlEventSet*, nvmlSystemGetCudaDriverVersion_v2]
gpus:
  - {index: 1, notSupported: [nvmlDeviceGetName]}
`))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, spec)
	s := open(t, w, emulator.Opening{})
	want(t, "event sets", ret(s.EventSetCreate()), emulator.NotSupported)
	want(t, "the CUDA version", ret(s.CUDAVersion()), emulator.NotSupported)
	want(t, "the name of GPU 0", ret(s.Name(0)), emulator.Success)
	want(t, "the name of GPU 1", ret(s.Name(1)), emulator.NotSupported)
	want(t, "the name of no GPU", ret(s.Name(5)), emulator.InvalidArgument)
	if n := len(w.Calls(0)); n != 4 {
		t.Errorf("%d calls were counted, want 4", n)
	}
	if err := w.Lose(1); err != nil {
		t.Fatal(err)
	}
	want(t, "the name of a lost GPU", ret(s.Name(1)), emulator.GPUIsLost)
}

// The tables must be sound in themselves: placements lie inside the GPU and
// the driver's instance count is what placements allow.
func TestMIGTables(t *testing.T) {
	for _, name := range emulator.Models() {
		m, err := emulator.LoadModel(name)
		if err != nil {
			t.Fatal(err)
		}
		if m.MIG == nil {
			continue
		}
		enums, ids := map[uint32]bool{}, map[uint32]bool{}
		for _, p := range m.MIG.Profiles {
			if enums[p.Enum] || ids[p.ID] {
				t.Errorf("%s: %s repeats an enum or an id", name, p.Name)
			}
			enums[p.Enum], ids[p.ID] = true, true
			end := uint32(0)
			room := uint32(0)
			for _, start := range p.Starts {
				if start+p.Size > uint32(m.MIG.Slots) {
					t.Errorf("%s: %s at %d ends beyond slot %d", name, p.Name, start, m.MIG.Slots)
				}
				if start >= end {
					room++
					end = start + p.Size
				}
			}
			// One media extension, whatever the room.
			if p.Max > room || p.Max < room && !strings.Contains(p.Name, "+me") {
				t.Errorf("%s: %s has room %d times, the driver says %d", name, p.Name, room, p.Max)
			}
			if p.MemoryMiB >= m.MemoryMiB || p.MemoryMiB*uint64(p.Max) > m.MemoryMiB {
				t.Errorf("%s: %d times %s is more than the GPU's memory", name, p.Max, p.Name)
			}
		}
	}
}

func TestSpecIsRefused(t *testing.T) {
	for text, reason := range map[string]string{
		"count: 17":                      "1 to 16",
		"count: -1":                      "1 to 16",
		"model: H900":                    "no such GPU model",
		"driver: newest":                 "version",
		"cuda: 13":                       "13.0",
		"minors: odd":                    "reversed",
		"nvlink: ring":                   "mesh",
		"colour: green":                  "colour",
		"gpus: [{index: 8}]":             "0 to 7",
		"gpus: [{index: 1}, {index: 1}]": "twice",
		"gpus: [{index: 1, uuid: X}, {index: 2, uuid: X}]": "one UUID",
		"gpus: [{index: 1, minor: 7}]":                     "one minor",
		"gpus: [{index: 1, pci: \"07:00.0\"}]":             "one PCI address",
		"gpus: [{index: 1, pci: there}]":                   "address",
		"gpus: [{index: 1, reservedMiB: 90000}]":           "leave nothing",
		"notSupported: [nvmlDeviceGetMemory]":              "nvmlDeviceGetMemory",
		"notSupported: [cuInit]":                           "cuInit",
		"gpus: [{index: 1, notSupported: [\"[\"]}]":        "GPU 1",
	} {
		spec, err := emulator.ParseSpec([]byte(text))
		if err == nil {
			_, err = emulator.New(spec)
		}
		if err == nil || !strings.Contains(err.Error(), reason) {
			t.Errorf("%s: %v, want a word on %q", text, err, reason)
		}
	}
}

func TestSpecOverrides(t *testing.T) {
	spec, err := emulator.ParseSpec([]byte(`
model: H100-80GB
count: 2
driver: 570.1.2
gpus:
  - {index: 1, model: A30, uuid: GPU-x, minor: 9, pci: "0001:0a:1f.0", numa: -1, memoryMiB: 5000, reservedMiB: 100, lost: true}
`))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, spec)
	got := w.State().GPUs[1]
	got.MIG = nil // of its model
	want(t, "GPU 1", got, emulator.GPUState{
		Index: 1, Minor: 9, UUID: "GPU-x", PCI: "00000001:0A:1F.0", PCIDevice: 0x20B710DE, Subsystem: 0x153210DE,
		Model: "NVIDIA A30", MemoryMiB: 5000, ReservedMiB: 100, NUMA: -1, TimeSlice: "default", Lost: true, ECC: true,
		Setup: emulator.Setup{Persistence: true, ECCPending: true, PowerMilliwatts: emulator.PowerDefault, ClockMHz: emulator.ClockDefault},
	})
	want(t, "driver", w.State().Driver, "570.1.2")
}

func TestSeedDecidesUUIDs(t *testing.T) {
	uuids := func(seed string) []string {
		var out []string
		for _, g := range newWorld(t, emulator.Spec{Seed: seed, Count: 16}).State().GPUs {
			out = append(out, g.UUID)
		}
		return out
	}
	a, again, b := uuids("a"), uuids("a"), uuids("b")
	if !slices.Equal(a, again) {
		t.Error("one seed gave two nodes")
	}
	all := slices.Concat(a, b)
	slices.Sort(all)
	want(t, "different UUIDs", len(slices.Compact(all)), 32)
}

// TestRefusals is what the driver says no to.
func TestRefusals(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 4, GPUs: []emulator.GPUSpec{{Index: 3, Lost: true}}})
	s := open(t, w, emulator.Opening{})
	set := must[uint32](t, "event set")(s.EventSetCreate())
	fresh := w.Open(emulator.Opening{})
	t.Cleanup(fresh.Close)
	user := open(t, w, emulator.Opening{Unprivileged: true})
	lost := w.State().GPUs[3]
	for what, c := range map[string]struct{ got, want emulator.Return }{
		"name before init":              {ret(fresh.Name(0)), emulator.Uninitialized},
		"count before init":             {ret(fresh.DeviceCount()), emulator.Uninitialized},
		"shutdown before init":          {fresh.Shutdown(), emulator.Uninitialized},
		"index beyond the last":         {ret(s.DeviceByIndex(4)), emulator.InvalidArgument},
		"negative index":                {ret(s.DeviceByIndex(-1)), emulator.InvalidArgument},
		"index of a lost GPU":           {ret(s.DeviceByIndex(3)), emulator.GPUIsLost},
		"UUID of a lost GPU":            {ret(s.DeviceByUUID(lost.UUID)), emulator.GPUIsLost},
		"name of a lost GPU":            {ret(s.Name(3)), emulator.GPUIsLost},
		"unknown UUID":                  {ret(s.DeviceByUUID("GPU-")), emulator.NotFound},
		"unknown PCI address":           {ret(s.DeviceByPCI("00:00.0")), emulator.NotFound},
		"PCI address of another kind":   {ret(s.DeviceByPCI("07")), emulator.NotFound},
		"PCI function 1":                {ret(s.DeviceByPCI("07:00.1")), emulator.NotFound},
		"handle never given":            {ret(s.Name(99)), emulator.InvalidArgument},
		"no handle":                     {ret(s.Name(emulator.NoHandle)), emulator.InvalidArgument},
		"distance to nothing":           {ret(s.CommonAncestor(0, 99)), emulator.InvalidArgument},
		"distance to a lost GPU":        {ret(s.CommonAncestor(0, 3)), emulator.GPUIsLost},
		"NVLink beyond NVML":            {ret(s.NVLink(0, 36)), emulator.InvalidArgument},
		"NVLink beyond the GPU":         {ret(s.NVLink(0, 18)), emulator.NotSupported},
		"MIG profile beyond NVML":       {ret(s.MIGProfile(0, 18)), emulator.InvalidArgument},
		"MIG profile that it lacks":     {ret(s.MIGProfile(0, 5)), emulator.NotSupported},
		"MIG profile number":            {ret(s.MIGProfileByID(0, 1)), emulator.InvalidArgument},
		"events for an unknown set":     {s.RegisterEvents(0, emulator.EventXid, 99), emulator.InvalidArgument},
		"no events":                     {s.RegisterEvents(0, 0, set), emulator.InvalidArgument},
		"events that no GPU raises":     {s.RegisterEvents(0, 1<<40, set), emulator.NotSupported},
		"events of a lost GPU":          {s.RegisterEvents(3, emulator.EventXid, set), emulator.GPUIsLost},
		"another session's set":         {user.RegisterEvents(0, emulator.EventXid, set), emulator.InvalidArgument},
		"wait on another session's set": {ret(user.EventSetWait(set, time.Hour)), emulator.InvalidArgument},
		"free of an unknown set":        {s.EventSetFree(99), emulator.InvalidArgument},
		"time slice set by a user":      {user.SetTimeSlice(0, emulator.TimeSliceLong), emulator.NoPermission},
		"time slice beyond long":        {s.SetTimeSlice(0, 4), emulator.InvalidArgument},
	} {
		if c.got != c.want {
			t.Errorf("%s: %v, want %v", what, c.got, c.want)
		}
	}
}

func TestProcesses(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2})
	add := func(p emulator.Process) error { t.Helper(); return w.AddProcess(p) }
	for _, p := range []emulator.Process{
		{PID: 30, GPU: 0, Kind: emulator.Compute, MiB: 80000},
		{PID: 20, GPU: 0, Kind: emulator.Compute, MiB: 8},
		{PID: 20, GPU: 0, Kind: emulator.Graphics, MiB: 1000},
	} {
		if err := add(p); err != nil {
			t.Fatal(err)
		}
	}
	for what, c := range map[string]struct {
		p    emulator.Process
		want emulator.Return
	}{
		"one MiB too many": {emulator.Process{PID: 1, GPU: 0, Kind: emulator.Compute, MiB: 1}, emulator.OutOfMemory},
		"no such GPU":      {emulator.Process{PID: 1, GPU: 2, Kind: emulator.Compute}, emulator.NotFound},
		"no such kind":     {emulator.Process{PID: 1, GPU: 0}, emulator.InvalidArgument},
		"no PID":           {emulator.Process{GPU: 0, Kind: emulator.MPS}, emulator.InvalidArgument},
	} {
		if err := add(c.p); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	s := open(t, w, emulator.Opening{See: func(pid int) (int, bool) { return pid - 19, pid != 30 }})
	list := must[[]emulator.Process](t, "processes")(s.Processes(0, emulator.Compute))
	want(t, "as a PID namespace sees it", fmt.Sprint(list), "[{1 0 compute -1 -1 8 8388608 false}]")
	m := must[emulator.Memory](t, "memory")(s.Memory(0))
	want(t, "free", m.Free, 0)
	want(t, "used, by those out of sight too", m.Used, 81008<<20)

	want(t, "end of 20", w.EndProcess(20), true)
	want(t, "end of 20 again", w.EndProcess(20), false)
	if err := add(emulator.Process{PID: 1, GPU: 0, Kind: emulator.MPS, MiB: 1008}); err != nil {
		t.Error(err)
	}
	if err := w.Lose(0); err != nil {
		t.Fatal(err)
	}
	want(t, "processes of a lost GPU", len(w.State().Processes), 0)
	if err := add(emulator.Process{PID: 1, GPU: 0, Kind: emulator.MPS}); !errors.Is(err, emulator.GPUIsLost) {
		t.Errorf("memory of a lost GPU: %v", err)
	}
}

func TestEventsReachEverySetThatListens(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2})
	a, b := open(t, w, emulator.Opening{}), open(t, w, emulator.Opening{})
	setA := must[uint32](t, "set")(a.EventSetCreate())
	setB := must[uint32](t, "set")(b.EventSetCreate())
	want(t, "register", a.RegisterEvents(0, emulator.EventXid, setA), emulator.Success)
	want(t, "register", a.RegisterEvents(1, emulator.EventXid, setA), emulator.Success)
	want(t, "register", b.RegisterEvents(1, emulator.EventClock, setB), emulator.Success)
	for i, xid := range []uint64{13, 48} {
		if err := w.Xid(i, xid); err != nil {
			t.Fatal(err)
		}
	}
	for i, xid := range []uint64{13, 48} {
		e := must[emulator.Event](t, "wait")(a.EventSetWait(setA, time.Hour))
		want(t, "event", e, emulator.Event{GPU: emulator.Handle(i), Type: emulator.EventXid, Data: xid, GPUInstance: emulator.NotMIG, ComputeInstance: emulator.NotMIG})
	}
	want(t, "no more", ret(a.EventSetWait(setA, 0)), emulator.Timeout)
	want(t, "a set that listens to something else", ret(b.EventSetWait(setB, 0)), emulator.Timeout)

	// A wait ends when its set does, and when its session does.
	ended := make(chan emulator.Return)
	go func() { ended <- ret(a.EventSetWait(setA, time.Hour)) }()
	waiting(t, w, "nvmlEventSetWait_v2", 5)
	want(t, "free", a.EventSetFree(setA), emulator.Success)
	want(t, "wait on a freed set", <-ended, emulator.InvalidArgument)
	go func() { ended <- ret(b.EventSetWait(setB, time.Hour)) }()
	waiting(t, w, "nvmlEventSetWait_v2", 6)
	b.Close()
	if r := <-ended; r == emulator.Success || r == emulator.Timeout {
		t.Errorf("wait of a session that ended: %v", r)
	}
}

// waiting returns once a call has been made so often.
func waiting(t *testing.T, w *emulator.World, call string, times uint64) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		for _, c := range w.Calls(0) {
			if c.Call == call && c.Count >= times {
				return
			}
		}
		if time.Now().After(end) {
			t.Fatalf("%s was not made %d times: %v", call, times, w.Calls(0))
		}
	}
}

func TestFaults(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2})
	s := open(t, w, emulator.Opening{})
	one := 1
	for what, f := range map[string]emulator.Fault{
		"neither code nor delay": {Call: "nvmlInit_v2"},
		"no call":                {Code: emulator.Unknown},
		"half a pattern":         {Call: "[", Code: emulator.Unknown},
		"less than no calls":     {Call: "*", Code: emulator.Unknown, Count: -1},
		"no such GPU":            {Call: "*", Code: emulator.Unknown, GPU: func() *int { n := 2; return &n }()},
	} {
		if err := w.Inject(f); err == nil {
			t.Errorf("not refused: %s", what)
		}
	}
	inject := func(f emulator.Fault) {
		t.Helper()
		if err := w.Inject(f); err != nil {
			t.Fatal(err)
		}
	}
	inject(emulator.Fault{Call: "nvmlDevice*", GPU: &one, Code: emulator.ResetRequired, Count: 2})
	want(t, "a call about no GPU", ret(s.DeviceCount()), emulator.Success)
	want(t, "about another GPU", ret(s.Name(0)), emulator.Success)
	want(t, "first", ret(s.Name(1)), emulator.ResetRequired)
	want(t, "second", ret(s.UUID(1)), emulator.ResetRequired)
	want(t, "third", ret(s.UUID(1)), emulator.Success)
	want(t, "faults left", len(w.State().Faults), 0)

	inject(emulator.Fault{Call: "nvmlDeviceGetName", Hang: true, Code: emulator.Timeout})
	ended := make(chan emulator.Return)
	go func() { ended <- ret(s.Name(0)) }()
	waiting(t, w, "nvmlDeviceGetName", 3)
	want(t, "beside a call that hangs", ret(s.UUID(0)), emulator.Success)
	w.Clear()
	want(t, "the call, once cleared", <-ended, emulator.Timeout)

	inject(emulator.Fault{Call: "nvmlDeviceGetName", Hang: true})
	go func() { ended <- ret(s.Name(0)) }()
	waiting(t, w, "nvmlDeviceGetName", 4)
	s.Close()
	want(t, "the call of a session that ended", <-ended, emulator.Unknown)
}

func TestCalls(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 1})
	a, b := open(t, w, emulator.Opening{PID: 7}), open(t, w, emulator.Opening{PID: 8})
	must[string](t, "name")(a.Name(0))
	must[string](t, "name")(b.As("nvmlDeviceGetNickname").Name(0))
	b.Close()
	want(t, "all", fmt.Sprint(w.Calls(0)), "[{nvmlDeviceGetName 1} {nvmlDeviceGetNickname 1} {nvmlInit_v2 2}]")
	want(t, "of 7", fmt.Sprint(w.Calls(7)), "[{nvmlDeviceGetName 1} {nvmlInit_v2 1}]")
	w.ResetCalls()
	must[string](t, "name")(a.Name(0))
	want(t, "since the reset", fmt.Sprint(w.Calls(0)), "[{nvmlDeviceGetName 1}]")
}

func TestSessionSeesTheGPUsOfItsNodes(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 4})
	s := open(t, w, emulator.Opening{Node: func(minor int) bool { return minor < 2 }})
	want(t, "count", must[int](t, "count")(s.DeviceCount()), 2)
	h := must[emulator.Handle](t, "first")(s.DeviceByIndex(0))
	want(t, "its minor", must[int](t, "minor")(s.Minor(h)), 1)
	want(t, "its index", must[int](t, "index")(s.Index(h)), 0)
	want(t, "its UUID", must[string](t, "UUID")(s.UUID(h)), w.State().GPUs[2].UUID)
	want(t, "a hidden GPU", ret(s.DeviceByUUID(w.State().GPUs[0].UUID)), emulator.NotFound)
	want(t, "a hidden GPU's handle", ret(s.Name(0)), emulator.InvalidArgument)
}

func TestTopology(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 8})
	s := open(t, w, emulator.Opening{})
	for pair, level := range map[[2]emulator.Handle]emulator.Level{
		{0, 0}: emulator.LevelSame, {0, 1}: emulator.LevelSwitch, {1, 2}: emulator.LevelNode, {3, 4}: emulator.LevelSystem,
	} {
		want(t, fmt.Sprint(pair), must[emulator.Level](t, "level")(s.CommonAncestor(pair[0], pair[1])), level)
		want(t, fmt.Sprint(pair, " back"), must[emulator.Level](t, "level")(s.CommonAncestor(pair[1], pair[0])), level)
	}
	near := must[[]emulator.Handle](t, "nearest")(s.NearestGPUs(5, emulator.LevelNode))
	want(t, "GPUs on the node of 5", fmt.Sprint(near), "[6 7]")
	for link := range 18 {
		l := must[emulator.Link](t, "link")(s.NVLink(0, link))
		if !l.Active || !l.Switch {
			t.Errorf("link %d: %+v", link, l)
		}
	}
	for _, spec := range []emulator.Spec{{Count: 2, NVLink: "none"}, {Count: 1}} {
		s := open(t, newWorld(t, spec), emulator.Opening{})
		if l := must[emulator.Link](t, "link")(s.NVLink(0, 0)); l.Active {
			t.Errorf("%+v: %+v", spec, l)
		}
	}
}

// Both ends of a link in a mesh must know each other.
func TestMeshIsSymmetric(t *testing.T) {
	for _, count := range []int{2, 3, 4, 8, 16} {
		s := open(t, newWorld(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: count, NVLink: "mesh"}), emulator.Opening{})
		at := map[emulator.PCI]int{}
		for i := range count {
			at[must[emulator.PCI](t, "PCI")(s.PCI(emulator.Handle(i)))] = i
		}
		links := map[[2]int]int{}
		for i := range count {
			for n := range 12 {
				l := must[emulator.Link](t, "link")(s.NVLink(emulator.Handle(i), n))
				if !l.Active {
					continue
				}
				other, ok := at[l.Remote]
				if !ok || l.Switch || other == i {
					t.Fatalf("%d GPUs: link %d of %d: %+v", count, n, i, l)
				}
				links[[2]int{i, other}]++
			}
		}
		for pair, n := range links {
			want(t, fmt.Sprintf("%d GPUs: links of %v and back", count, pair), links[[2]int{pair[1], pair[0]}], n)
		}
		if count <= 8 && len(links) != count*(count-1) {
			t.Errorf("%d GPUs: %d pairs linked", count, len(links)/2)
		}
	}
}

func TestTimeSlice(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2})
	s := open(t, w, emulator.Opening{})
	want(t, "set", s.SetTimeSlice(1, emulator.TimeSliceShort), emulator.Success)
	want(t, "GPU 1", w.State().GPUs[1].TimeSlice, "short")
	want(t, "GPU 0", must[emulator.TimeSlice](t, "get")(s.TimeSlice(0)), emulator.TimeSliceDefault)
}

// FuzzServe holds that no request can do more than be refused: every one gets
// a reply of at least a head, and the world goes on.
func FuzzServe(f *testing.F) {
	for _, name := range []string{"nvmlInit_v2", "nvmlDeviceGetName", "nvmlDeviceGetHandleByUUID", "nvmlDeviceRegisterEvents", "nvmlDeviceGetNvLinkState",
		"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance", "nvmlComputeInstanceDestroy", "x"} {
		f.Add(append([]byte{0, 0, 0, 0, byte(len(name))}, name+"\x03\x00GPU\xff\xff\xff\xff"...))
	}
	w, err := emulator.New(emulator.Spec{Count: 2, GPUs: []emulator.GPUSpec{{Index: 1, MIG: true}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, request []byte) {
		s := w.Open(emulator.Opening{Initialised: 1})
		defer s.Close()
		if strings.Contains(string(request), "Wait") { // a wait may last
			return
		}
		if reply := s.Serve(request, nil); len(reply) < 16 {
			t.Errorf("reply of %d bytes", len(reply))
		}
		other := w.Open(emulator.Opening{Initialised: 1})
		defer other.Close()
		if n, r := other.DeviceCount(); n != 2 || r != emulator.Success {
			t.Errorf("count %d, %v", n, r)
		}
	})
}
