// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
)

// inMode is a world of GPUs of a model that begin in MIG mode, and a session.
func inMode(t testing.TB, spec emulator.Spec) (*emulator.World, *emulator.Session) {
	t.Helper()
	if spec.Count == 0 {
		spec.Count = 1
	}
	for i := range spec.Count {
		spec.GPUs = append(spec.GPUs, emulator.GPUSpec{Index: i, MIG: true})
	}
	w := newWorld(t, spec)
	return w, open(t, w, emulator.Opening{PID: 1})
}

func table(t testing.TB, model string) *emulator.MIGTable {
	t.Helper()
	m, err := emulator.LoadModel(model)
	if err != nil {
		t.Fatal(err)
	}
	return m.MIG
}

// slot is a profile at a place.
type slot struct {
	p     emulator.MIGProfile
	start uint32
}

func (s slot) at() *emulator.Placement { return &emulator.Placement{Start: s.start, Size: s.p.Size} }

func (s slot) String() string { return fmt.Sprintf("%s@%d", s.p.Name, s.start) }

func slots(profiles []emulator.MIGProfile) []slot {
	var all []slot
	for _, p := range profiles {
		for _, start := range p.Starts {
			all = append(all, slot{p, start})
		}
	}
	return all
}

// legal is what is known of the field: no two overlap, at most one has the media
// extension, and where engines can be short (short) no more are given out than the
// whole card has.
func legal(set []slot, s slot, short bool) bool {
	media := strings.HasSuffix(s.p.Name, "+me")
	engines := [4]uint32{s.p.Decode, s.p.Encode, s.p.JPEG, s.p.OFA}
	same := uint32(0)
	for _, o := range set {
		if s.start < o.start+o.p.Size && o.start < s.start+s.p.Size || media && strings.HasSuffix(o.p.Name, "+me") {
			return false
		}
		for i, n := range [4]uint32{o.p.Decode, o.p.Encode, o.p.JPEG, o.p.OFA} {
			engines[i] += n
		}
		if o.p.ID == s.p.ID {
			same++
		}
	}
	return same < s.p.Max && (!short || engines[0] <= 4 && engines[1] <= 4 && engines[2] <= 4 && engines[3] <= 1)
}

// Every set of placements that the field's rules allow can be made, no other can,
// and the driver's count of what still fits is right in each.
func TestLegalSetsOfPlacements(t *testing.T) {
	for _, c := range []struct {
		model    string
		profiles []int // of the table; nil is all
		sets     int   // 0 is not known from elsewhere
	}{
		{"A100-SXM4-80GB", []int{0, 3, 4, 5, 6}, 298}, {"A100-SXM4-80GB", nil, 2319}, {"A100-SXM4-40GB", nil, 2319},
		{"H100-80GB", nil, 2319}, {"H200-141GB", nil, 2319}, {"B200", nil, 2319},
		{"A30", nil, 0}, {"RTX-PRO-6000", nil, 0},
	} {
		t.Run(fmt.Sprint(c.model, c.profiles), func(t *testing.T) {
			if testing.Short() && c.sets == 2319 && c.model != "A100-SXM4-80GB" {
				t.Skip("make test-all runs it: the same placements by other names")
			}
			t.Parallel()
			_, s := inMode(t, emulator.Spec{Model: c.model})
			profiles := table(t, c.model).Profiles
			if c.profiles != nil {
				var some []emulator.MIGProfile
				for _, i := range c.profiles {
					some = append(some, profiles[i])
				}
				profiles = some
			}
			all := slots(profiles)
			short := c.model == "RTX-PRO-6000"
			sets := 0
			var standing []slot
			var walk func(from int)
			walk = func(from int) {
				sets++
				room := map[uint32]bool{}
				for i, at := range all {
					h, r := s.CreateGPUInstance(0, at.p.ID, at.at())
					may := legal(standing, at, short)
					if want := map[bool]emulator.Return{true: emulator.Success, false: emulator.InsufficientResources}[may]; r != want {
						t.Fatalf("%v beside %v: %v, want %v", at, standing, r, want)
					}
					if !may {
						continue
					}
					room[at.p.ID] = true
					if i >= from {
						standing = append(standing, at)
						walk(i + 1)
						standing = standing[:len(standing)-1]
					}
					if r := s.DestroyGPUInstance(h); r != emulator.Success {
						t.Fatalf("destroy %v: %v", at, r)
					}
				}
				for _, p := range profiles {
					n := must[int](t, "capacity")(s.GPUInstanceCapacity(0, p.ID))
					if n > 0 != room[p.ID] || n > int(p.Max) {
						t.Fatalf("capacity of %s beside %v: %d", p.Name, standing, n)
					}
				}
			}
			walk(0)
			t.Logf("%d sets", sets)
			if c.sets != 0 && sets != c.sets {
				t.Errorf("%d sets of placements, want %d", sets, c.sets)
			}
		})
	}
}

// An instance with all media engines leaves room for those without any alone.
func TestMediaEnginesOfRTXPro(t *testing.T) {
	profiles := table(t, "RTX-PRO-6000").Profiles
	for _, first := range profiles {
		for _, second := range profiles {
			_, s := inMode(t, emulator.Spec{Model: "RTX-PRO-6000"})
			must[emulator.Handle](t, "first")(s.CreateGPUInstance(0, first.ID, nil))
			_, r := s.CreateGPUInstance(0, second.ID, nil)
			all := func(p emulator.MIGProfile) bool { return strings.HasSuffix(p.Name, "+me.all") }
			none := func(p emulator.MIGProfile) bool { return strings.HasSuffix(p.Name, "-me") }
			if (all(first) && !none(second) || all(second) && !none(first)) && r != emulator.InsufficientResources {
				t.Errorf("%s beside %s: %v", second.Name, first.Name, r)
			}
			if none(first) && none(second) && first.Slices+second.Slices <= 4 && r != emulator.Success {
				t.Errorf("%s beside %s: %v", second.Name, first.Name, r)
			}
		}
	}
}

// Where the driver chooses the place, a geometry fails or not by its order.
func TestTheDriversChoiceDependsOnTheOrder(t *testing.T) {
	id := map[string]uint32{}
	for _, p := range table(t, "A100-SXM4-80GB").Profiles {
		id[p.Name] = p.ID
	}
	make := func(names ...string) emulator.Return {
		_, s := inMode(t, emulator.Spec{Model: "A100-SXM4-80GB"})
		for _, name := range names {
			if _, r := s.CreateGPUInstance(0, id[name], nil); r != emulator.Success {
				return r
			}
		}
		return emulator.Success
	}
	one := []string{"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"}
	want(t, "3g first", make(append([]string{"3g.40gb"}, one...)...), emulator.Success)
	want(t, "3g last", make(append(one, "3g.40gb")...), emulator.InsufficientResources)
	want(t, "documented: 1g, 2g, 4g", make("1g.10gb", "2g.20gb", "4g.40gb"), emulator.Success)
	want(t, "3g twice", make("3g.40gb", "3g.40gb"), emulator.Success)
	want(t, "3g thrice", make("3g.40gb", "3g.40gb", "3g.40gb"), emulator.InsufficientResources)
}

// What a GPU instance can be split into is as nvidia-smi mig -lcip and -lcipp
// list it.
func TestComputeProfiles(t *testing.T) {
	_, s := inMode(t, emulator.Spec{Model: "A100-SXM4-80GB"})
	for name, list := range map[string]string{
		"1g.10gb": "1g.10gb{0}:1 14 SMs",
		"2g.20gb": "1c.2g.20gb{0 1}:1 14 SMs, 2g.20gb{0}:2 28 SMs",
		"3g.40gb": "1c.3g.40gb{0 1 2}:1 14 SMs, 2c.3g.40gb{0}:2 28 SMs, 3g.40gb{0}:3 42 SMs",
		"4g.40gb": "1c.4g.40gb{0 1 2 3}:1 14 SMs, 2c.4g.40gb{0 2}:2 28 SMs, 4g.40gb{0}:4 56 SMs",
		"7g.80gb": "1c.7g.80gb{0 1 2 3 4 5 6}:1 14 SMs, 2c.7g.80gb{0 2 4}:2 28 SMs, 3c.7g.80gb{0 4}:3 42 SMs, 4c.7g.80gb{0}:4 56 SMs, 7g.80gb{0}:7 98 SMs",
	} {
		var id uint32
		for _, p := range table(t, "A100-SXM4-80GB").Profiles {
			if p.Name == name {
				id = p.ID
			}
		}
		gi := must[emulator.Handle](t, name)(s.CreateGPUInstance(0, id, nil))
		var got []string
		number := uint32(0)
		for ; ; number++ {
			c, r := s.ComputeProfile(gi, number, 0)
			if r == emulator.InvalidArgument {
				break
			}
			if r == emulator.NotSupported {
				want(t, "capacity for what is not there", ret(s.ComputeCapacity(gi, number)), emulator.NotSupported)
				continue
			}
			var starts []uint32
			for _, at := range must[[]emulator.Placement](t, "placements")(s.ComputePlacements(gi, c.ID)) {
				starts = append(starts, at.Start)
				want(t, "size", at.Size, c.Slices)
			}
			want(t, "capacity", must[int](t, "capacity")(s.ComputeCapacity(gi, c.ID)), len(starts))
			got = append(got, strings.NewReplacer("[", "{", "]", "}").Replace(fmt.Sprintf("%s%v:%d %d SMs", c.Name, starts, c.Slices, c.SMs)))
		}
		want(t, "profile numbers", number, 9)
		want(t, name, strings.Join(got, ", "), list)
		want(t, "another engine profile", ret(s.ComputeProfile(gi, 0, 1)), emulator.InvalidArgument)
		want(t, "destroy", s.DestroyGPUInstance(gi), emulator.Success)
	}
}

// Compute instances take the compute slices that nothing else has.
func TestSplits(t *testing.T) {
	w, s := inMode(t, emulator.Spec{Model: "A100-SXM4-80GB"})
	gi := must[emulator.Handle](t, "7g")(s.CreateGPUInstance(0, 0, nil))
	create := func(profile uint32, at *emulator.Placement) (emulator.Handle, emulator.Return) {
		return s.CreateComputeInstance(gi, profile, at)
	}
	at := func(start, size uint32) *emulator.Placement { return &emulator.Placement{Start: start, Size: size} }
	two := must[emulator.Handle](t, "2c@2")(create(1, at(2, 2)))
	one := must[emulator.Handle](t, "1c")(create(0, nil))
	three := must[emulator.Handle](t, "3c")(create(2, nil))
	var got []string
	for _, ci := range []emulator.Handle{two, one, three} {
		i := must[emulator.InstanceInfo](t, "info")(s.ComputeInstanceInfo(ci))
		want(t, "parent", i.Parent, gi)
		want(t, "device", i.Device, 0)
		got = append(got, fmt.Sprintf("id %d profile %d at %d:%d", i.ID, i.Profile, i.Placement.Start, i.Placement.Size))
	}
	want(t, "compute instances", fmt.Sprint(got), "[id 0 profile 1 at 2:2 id 1 profile 0 at 0:1 id 2 profile 2 at 4:3]")
	for what, c := range map[string]struct{ got, want emulator.Return }{
		"where something is":     {ret(create(0, at(3, 1))), emulator.InsufficientResources},
		"no room":                {ret(create(2, nil)), emulator.InsufficientResources},
		"an illegal start":       {ret(create(1, at(1, 2))), emulator.InvalidArgument},
		"an illegal size":        {ret(create(0, at(1, 2))), emulator.InvalidArgument},
		"a profile it lacks":     {ret(create(7, nil)), emulator.NotSupported},
		"no such profile":        {ret(create(9, nil)), emulator.InvalidArgument},
		"the GPU instance of it": {s.DestroyGPUInstance(gi), emulator.InUse},
		"no such id":             {ret(s.ComputeInstanceByID(gi, 3)), emulator.NotFound},
	} {
		want(t, what, c.got, c.want)
	}
	want(t, "by id", must[emulator.Handle](t, "id 1")(s.ComputeInstanceByID(gi, 1)), one)
	want(t, "those of a profile", fmt.Sprint(must[[]emulator.Handle](t, "list")(s.ComputeInstances(gi, 2))), fmt.Sprint([]emulator.Handle{three}))
	want(t, "capacity", must[int](t, "capacity")(s.ComputeCapacity(gi, 0)), 1)

	names := func() string {
		var out []string
		for i := range uint32(7) {
			if h, r := s.MIGDevice(0, i); r == emulator.Success {
				out = append(out, fmt.Sprint(i, must[string](t, "name")(s.Name(h))[len("NVIDIA A100-SXM4-80GB"):]))
			}
		}
		return strings.Join(out, ",")
	}
	want(t, "MIG devices", names(), "0 MIG 2c.7g.80gb,1 MIG 1c.7g.80gb,2 MIG 3c.7g.80gb")
	want(t, "destroy", s.DestroyComputeInstance(one), emulator.Success)
	want(t, "the others keep their numbers", names(), "0 MIG 2c.7g.80gb,2 MIG 3c.7g.80gb")
	want(t, "again", s.DestroyComputeInstance(one), emulator.InvalidArgument)
	must[emulator.Handle](t, "1c@1")(create(0, at(1, 1)))
	want(t, "the gap is filled", names(), "0 MIG 2c.7g.80gb,1 MIG 1c.7g.80gb,2 MIG 3c.7g.80gb")
	st := w.State().GPUs[0].MIG.Instances[0]
	want(t, "in the state", fmt.Sprintf("%d %s@%d", len(st.Compute), st.Compute[1].Profile, st.Compute[1].Start), "3 1c.7g.80gb@1")
}

func TestMIGRefusals(t *testing.T) {
	w := newWorld(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 4, GPUs: []emulator.GPUSpec{
		{Index: 1, MIG: true}, {Index: 2, MIG: true, Lost: true}, {Index: 3, Model: "V100-SXM2-32GB"},
	}})
	s := open(t, w, emulator.Opening{})
	user := open(t, w, emulator.Opening{Unprivileged: true})
	fresh := w.Open(emulator.Opening{})
	t.Cleanup(fresh.Close)
	at := func(start, size uint32) *emulator.Placement { return &emulator.Placement{Start: start, Size: size} }
	gi := must[emulator.Handle](t, "3g@4")(s.CreateGPUInstance(1, 9, at(4, 4)))
	ci := must[emulator.Handle](t, "its compute instance")(s.CreateComputeInstance(gi, 2, nil))
	dev := must[emulator.Handle](t, "its device")(s.MIGDevice(1, 0))
	giID := must[emulator.InstanceInfo](t, "info")(s.GPUInstanceInfo(gi)).ID
	for what, c := range map[string]struct{ got, want emulator.Return }{
		"create with MIG off":               {ret(s.CreateGPUInstance(0, 9, at(0, 4))), emulator.NotSupported},
		"create on a card without MIG":      {ret(s.CreateGPUInstance(3, 9, at(0, 4))), emulator.NotSupported},
		"create on a lost GPU":              {ret(s.CreateGPUInstance(2, 9, at(0, 4))), emulator.GPUIsLost},
		"create before init":                {ret(fresh.CreateGPUInstance(1, 9, at(0, 4))), emulator.Uninitialized},
		"create as nobody":                  {ret(user.CreateGPUInstance(1, 9, at(0, 4))), emulator.NoPermission},
		"create of no such profile":         {ret(s.CreateGPUInstance(1, 1, at(0, 4))), emulator.InvalidArgument},
		"create by the enum":                {ret(s.CreateGPUInstance(1, 2, nil)), emulator.InvalidArgument},
		"create at an illegal start":        {ret(s.CreateGPUInstance(1, 9, at(2, 4))), emulator.InvalidArgument},
		"create of another size":            {ret(s.CreateGPUInstance(1, 9, at(0, 3))), emulator.InvalidArgument},
		"create where one stands":           {ret(s.CreateGPUInstance(1, 9, at(4, 4))), emulator.InsufficientResources},
		"create where another overlaps":     {ret(s.CreateGPUInstance(1, 19, at(6, 1))), emulator.InsufficientResources},
		"create on the instance's handle":   {ret(s.CreateGPUInstance(gi, 19, nil)), emulator.InvalidArgument},
		"create on the device's handle":     {ret(s.CreateGPUInstance(dev, 19, nil)), emulator.InvalidArgument},
		"destroy with a compute instance":   {s.DestroyGPUInstance(gi), emulator.InUse},
		"destroy as nobody":                 {user.DestroyComputeInstance(ci), emulator.NoPermission},
		"destroy by a GPU's handle":         {s.DestroyGPUInstance(1), emulator.InvalidArgument},
		"destroy by a device's handle":      {s.DestroyComputeInstance(dev), emulator.InvalidArgument},
		"destroy of one that never was":     {s.DestroyGPUInstance(gi + 16), emulator.InvalidArgument},
		"mode of a card without MIG":        {second(s.SetMIGMode(3, 1)), emulator.NotSupported},
		"mode as nobody":                    {second(user.SetMIGMode(0, 1)), emulator.NoPermission},
		"a mode that is none":               {second(s.SetMIGMode(0, 2)), emulator.InvalidArgument},
		"mode off over instances":           {second(s.SetMIGMode(1, 0)), emulator.InUse},
		"mode of an instance":               {second(s.SetMIGMode(dev, 1)), emulator.InvalidArgument},
		"instances with MIG off":            {ret(s.GPUInstances(0, 9)), emulator.NotSupported},
		"instances as nobody":               {ret(user.GPUInstances(1, 9)), emulator.NoPermission},
		"instance by id with MIG off":       {ret(s.GPUInstanceByID(0, 0)), emulator.NotSupported},
		"instance by an id that is not":     {ret(s.GPUInstanceByID(1, giID+2)), emulator.NotFound},
		"capacity with MIG off":             {ret(s.GPUInstanceCapacity(0, 9)), emulator.NotSupported},
		"capacity of no profile":            {ret(s.GPUInstanceCapacity(1, 2)), emulator.InvalidArgument},
		"placements with MIG off":           {ret(s.GPUInstancePlacements(0, 9)), emulator.Success},
		"placements as nobody":              {ret(user.GPUInstancePlacements(0, 9)), emulator.NoPermission},
		"placements of no profile":          {ret(s.GPUInstancePlacements(0, 2)), emulator.InvalidArgument},
		"a device with MIG off":             {ret(s.MIGDevice(0, 0)), emulator.NotFound},
		"a device of a card without MIG":    {ret(s.MIGDevice(3, 0)), emulator.NotSupported},
		"a device beyond the last":          {ret(s.MIGDevice(1, 7)), emulator.InvalidArgument},
		"an empty seat":                     {ret(s.MIGDevice(1, 1)), emulator.NotFound},
		"a device of a device":              {ret(s.MIGDevice(dev, 0)), emulator.InvalidArgument},
		"the GPU of a GPU":                  {ret(s.GPUOfMIGDevice(1)), emulator.InvalidArgument},
		"instance id of a GPU":              {ret(s.GPUInstanceID(1)), emulator.InvalidArgument},
		"attributes of a GPU":               {ret(s.Attributes(1)), emulator.NotSupported},
		"minor of a device":                 {ret(s.Minor(dev)), emulator.InvalidArgument},
		"PCI address of a device":           {ret(s.PCI(dev)), emulator.InvalidArgument},
		"events of a device":                {s.RegisterEvents(dev, emulator.EventXid, 1), emulator.InvalidArgument},
		"the GPU's memory, as nobody":       {ret(user.Memory(1)), emulator.NoPermission},
		"the GPU's processes, as nobody":    {ret(user.Processes(1, emulator.Compute)), emulator.NoPermission},
		"memory of the whole, charged":      {s.Charge("cuMemAlloc_v2", 1, 1<<20), emulator.NotSupported},
		"a compute profile of a lost GPU's": {ret(s.ComputeProfile(gi+1, 0, 0)), emulator.GPUIsLost},
		"an unknown UUID":                   {ret(s.DeviceByUUID("MIG-0")), emulator.NotFound},
	} {
		if c.got != c.want {
			t.Errorf("%s: %v, want %v", what, c.got, c.want)
		}
	}
	want(t, "devices with MIG off", must[int](t, "count")(s.MaxMIGDevices(0)), 0)
	want(t, "devices", must[int](t, "count")(s.MaxMIGDevices(1)), 7)
	for what, err := range map[string]error{
		"spec: MIG on a card without it": ret2(emulator.New(emulator.Spec{Model: "V100-SXM2-32GB", Count: 1, GPUs: []emulator.GPUSpec{{MIG: true}}})),
		"spec: a negative time":          ret2(emulator.New(emulator.Spec{MIG: emulator.MIGSpec{CreateSeconds: -1}})),
		"mode over instances":            w.SetMIG(1, false),
		"mode without MIG":               w.SetMIG(3, true),
		"instance with MIG off":          w.CreateInstance(0, "1g.10gb", 0, false),
		"instance of no profile":         w.CreateInstance(1, "9g.999gb", 0, false),
		"instance at an illegal start":   w.CreateInstance(1, "2g.20gb", 1, false),
		"instance where one stands":      w.CreateInstance(1, "1g.10gb", 5, false),
		"split of a full one":            w.CreateInstance(1, "1c.3g.40gb", 4, false),
		"end of none":                    w.DestroyInstance(1, 0),
		"mode of a lost GPU":             w.SetMIG(2, false),
		"instance on a lost GPU":         w.CreateInstance(2, "1g.10gb", 0, false),
		"end on a lost GPU":              w.DestroyInstance(2, 0),
		"instance on no GPU":             w.CreateInstance(4, "1g.10gb", 0, false),
	} {
		if err == nil {
			t.Errorf("not refused: %s", what)
		}
	}
}

func second[T any](_ T, r emulator.Return) emulator.Return { return r }

func ret2[T any](_ T, err error) error { return err }

// Until a driver that wants it has MIG on, it tells no placements.
func TestPlacementsMayNeedTheMode(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 1, MIG: emulator.MIGSpec{PlacementsNeedMode: true}})
	s := open(t, w, emulator.Opening{})
	want(t, "off", ret(s.GPUInstancePlacements(0, 9)), emulator.NotSupported)
	want(t, "profiles all the same", ret(s.MIGProfile(0, 0)), emulator.Success)
	do(t, w.SetMIG(0, true))
	want(t, "on", fmt.Sprint(must[[]emulator.Placement](t, "on")(s.GPUInstancePlacements(0, 9))), "[{0 4} {4 4}]")
}

func TestMIGModes(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2, GPUs: []emulator.GPUSpec{{Index: 0, Model: "A100-SXM4-80GB"}, {Index: 1, Model: "H100-80GB"}}})
	s := open(t, w, emulator.Opening{PID: 7})
	modes := func(what string, a100, h100 string) {
		t.Helper()
		for i, expect := range []string{a100, h100} {
			current, pending, r := s.MIGMode(emulator.Handle(i))
			if r != emulator.Success {
				t.Fatalf("%s: mode: %v", what, r)
			}
			want(t, fmt.Sprintf("%s: GPU %d, current and pending", what, i), fmt.Sprint(current, pending), expect)
		}
	}
	set := func(what string, h emulator.Handle, mode uint32, activation, r emulator.Return) {
		t.Helper()
		a, got := s.SetMIGMode(h, mode)
		want(t, what, got, r)
		want(t, what+": activation", a, activation)
	}
	const none = emulator.Success
	busy := func(gpu int) { do(t, w.AddProcess(emulator.Process{PID: 9, GPU: gpu, Kind: emulator.Compute, MiB: 1})) }

	busy(0)
	busy(1)
	set("Ampere, busy", 0, 1, emulator.InUse, emulator.Success)
	set("Hopper, busy", 1, 1, none, emulator.InUse)
	modes("busy", "false true", "false false")
	w.EndProcess(9)
	set("Ampere, back", 0, 0, none, emulator.Success)
	modes("back", "false false", "false false")
	set("Ampere", 0, 1, emulator.ResetRequired, emulator.Success)
	set("Hopper", 1, 1, none, emulator.Success)
	modes("asked for", "false true", "true true")
	want(t, "an instance before the reset", ret(s.CreateGPUInstance(0, 0, nil)), emulator.NotSupported)
	want(t, "a reset beside another's session", s.Reset(0), emulator.Success)
	modes("reset", "true true", "true true")

	for i := range 2 {
		do(t, w.CreateInstance(i, "1g.10gb", 6, false))
	}
	set("Ampere, over an instance", 0, 0, none, emulator.InUse)
	set("Hopper, over an instance", 1, 0, none, emulator.InUse)
	do(t, w.Reset(0))
	do(t, w.Reset(1))
	modes("reset again", "true true", "true true")
	for i := range 2 {
		want(t, "instances after a reset", len(w.State().GPUs[i].MIG.Instances), 0)
		do(t, w.CreateInstance(i, "1g.10gb", 6, true))
	}

	// The driver taken out and put back: Ampere keeps the mode.
	want(t, "shutdown", s.Shutdown(), emulator.Success)
	do(t, w.Unload())
	do(t, w.Load())
	want(t, "init", s.Init(), emulator.Success)
	modes("loaded anew", "true true", "false false")
	want(t, "instances of a new driver", len(w.State().GPUs[0].MIG.Instances), 0)

	do(t, w.SetMIG(1, true))
	do(t, w.CreateInstance(1, "3g.40gb", 0, false))
	set("Ampere, off", 0, 0, emulator.ResetRequired, emulator.Success)
	do(t, w.AddProcess(emulator.Process{PID: 9, GPU: 1, GI: w.State().GPUs[1].MIG.Instances[0].ID, Kind: emulator.Compute, MiB: 1}))
	if err := w.Reboot(false); !errors.Is(err, emulator.InUse) || !strings.Contains(err.Error(), "[7 9]") {
		t.Errorf("reboot under processes: %v", err)
	}
	do(t, w.Reboot(true))
	want(t, "a session after a reboot", ret(s.DeviceCount()), emulator.Uninitialized)
	want(t, "init", s.Init(), emulator.Success)
	modes("booted", "false false", "false false")
	want(t, "processes", len(w.State().Processes), 0)
	want(t, "instances", len(w.State().GPUs[1].MIG.Instances), 0)

	// Lost and brought back.
	set("Hopper", 1, 1, none, emulator.Success)
	do(t, w.CreateInstance(1, "3g.40gb", 0, false))
	dev := must[emulator.Handle](t, "device")(s.MIGDevice(1, 0))
	do(t, w.Lose(1))
	want(t, "a device of a lost GPU", ret(s.UUID(dev)), emulator.GPUIsLost)
	do(t, w.Restore(1))
	want(t, "it stays lost", ret(s.UUID(dev)), emulator.GPUIsLost)
	again(t, s)
	modes("brought back", "false false", "false false")
	want(t, "its instance", ret(s.UUID(dev)), emulator.InvalidArgument)
}

// Another program that has the GPU open holds up a reset; one that cannot reach it
// does not.
func TestResetAsksWhoHasTheGPU(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2})
	s := open(t, w, emulator.Opening{PID: 1})
	other := open(t, w, emulator.Opening{PID: 2, Node: func(minor int) bool { return minor == 0 }}) // GPU 1's
	want(t, "GPU 0", s.Reset(0), emulator.Success)
	want(t, "GPU 1", s.Reset(1), emulator.InUse)
	want(t, "shutdown", other.Shutdown(), emulator.Success)
	want(t, "GPU 1, let go of", s.Reset(1), emulator.Success)
	want(t, "as nobody", open(t, w, emulator.Opening{Unprivileged: true}).Reset(0), emulator.NoPermission)
}

// Ids are unique, of the size's level of the tree, and tell nobody the place; the
// UUID of a place is the same every time.
func TestInstanceIDsAndUUIDs(t *testing.T) {
	w, s := inMode(t, emulator.Spec{Model: "A100-SXM4-80GB"})
	level := map[uint32][2]int{1: {7, 14}, 2: {3, 6}, 4: {1, 2}, 8: {0, 0}}
	rng := rand.New(rand.NewPCG(1, 2))
	all := slots(table(t, "A100-SXM4-80GB").Profiles)
	ids, uuids := map[string]map[int]bool{}, map[string]string{}
	serials := map[uint64]bool{}
	rounds := 200
	if testing.Short() {
		rounds = 60 // make test-all has all
	}
	for range rounds {
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for _, at := range all {
			err := w.CreateInstance(0, at.p.Name, int(at.start), false)
			if err != nil && !errors.Is(err, emulator.InsufficientResources) {
				t.Fatal(err)
			}
		}
		seen := map[int]bool{}
		for _, gi := range w.State().GPUs[0].MIG.Instances {
			l := level[uint32(gi.Size)]
			if gi.ID < l[0] || gi.ID > l[1] || seen[gi.ID] || serials[gi.Serial] {
				t.Fatalf("%+v", gi)
			}
			seen[gi.ID], serials[gi.Serial] = true, true
			for up := gi.ID; up > 0; {
				if up = (up - 1) / 2; seen[up] {
					t.Fatalf("%d stands inside %d: %+v", gi.ID, up, w.State().GPUs[0].MIG.Instances)
				}
			}
			place := fmt.Sprintf("%d:%d", gi.Start, gi.Size)
			if ids[place] == nil {
				ids[place] = map[int]bool{}
			}
			ids[place][gi.ID] = true
			uuid := gi.Compute[0].UUID
			if old, ok := uuids[place]; ok && gi.Compute[0].Size == gi.Size && old != uuid {
				t.Errorf("%s at %s: %s, before %s", gi.Profile, place, uuid, old)
			} else if gi.Compute[0].Size == gi.Size {
				uuids[place] = uuid
			}
			want(t, "found by its UUID", must[string](t, "UUID")(s.UUID(must[emulator.Handle](t, "find")(s.DeviceByUUID(uuid)))), uuid)
		}
		for _, gi := range w.State().GPUs[0].MIG.Instances {
			do(t, w.DestroyInstance(0, gi.Start))
		}
	}
	for place, of := range ids {
		if n := len(of); n < 2 && place != "0:8" {
			t.Errorf("place %s always has id %v", place, of)
		}
	}
	var created, destroyed int
	for _, op := range w.State().MIGOps {
		switch op.Op {
		case "create":
			created++
		case "destroy":
			destroyed++
			if op.Of == 0 || op.Of >= op.Serial {
				t.Fatalf("%+v", op)
			}
		}
	}
	want(t, "what was made is gone", created, destroyed)
}

// A process on an instance has that instance's memory, holds it and its GPU
// instance, and is listed there.
func TestProcessesOnInstances(t *testing.T) {
	w, s := inMode(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2})
	gi := must[emulator.Handle](t, "4g")(s.CreateGPUInstance(0, 5, nil))
	a := must[emulator.Handle](t, "2c")(s.CreateComputeInstance(gi, 1, nil))
	b := must[emulator.Handle](t, "2c")(s.CreateComputeInstance(gi, 1, nil))
	id := int(must[emulator.InstanceInfo](t, "info")(s.GPUInstanceInfo(gi)).ID)
	add := func(pid, ci int, mib uint64) error {
		return w.AddProcess(emulator.Process{PID: pid, GPU: 0, GI: id, CI: ci, Kind: emulator.Compute, MiB: mib})
	}
	do(t, add(30, 0, 30000))
	do(t, add(40, 1, 10000))
	if err := add(50, 1, 193); !errors.Is(err, emulator.OutOfMemory) {
		t.Errorf("more than the GPU instance has: %v", err)
	}
	do(t, add(50, 1, 192))
	if err := add(60, 2, 0); !errors.Is(err, emulator.NotFound) {
		t.Errorf("on no compute instance: %v", err)
	}
	devA, devB := must[emulator.Handle](t, "device")(s.MIGDevice(0, 0)), must[emulator.Handle](t, "device")(s.MIGDevice(0, 1))
	pids := func(h emulator.Handle) string {
		var out []string
		for _, p := range must[[]emulator.Process](t, "processes")(s.Processes(h, emulator.Compute)) {
			out = append(out, fmt.Sprintf("%d@%d.%d", p.PID, p.GI-id, p.CI))
		}
		return fmt.Sprint(out)
	}
	want(t, "of one", pids(devA), "[30@0.0]")
	want(t, "of the other", pids(devB), "[40@0.1 50@0.1]")
	want(t, "of the GPU", pids(0), "[30@0.0 40@0.1 50@0.1]")
	m := must[emulator.Memory](t, "memory")(s.Memory(devA))
	want(t, "memory of the GPU instance", m, emulator.Memory{Total: 40192 << 20, Used: 40192 << 20})
	want(t, "memory of the GPU", must[emulator.Memory](t, "memory")(s.Memory(0)).Used, 40192<<20)
	want(t, "attributes", must[emulator.Attributes](t, "attributes")(s.Attributes(devB)), emulator.Attributes{
		SMs: 28, Copy: 4, Decode: 2, GPUSlices: 4, ComputeSlices: 2, MemoryMiB: 40192,
	})

	want(t, "destroy of a busy one", s.DestroyComputeInstance(b), emulator.InUse)
	w.EndProcess(40)
	w.EndProcess(50)
	want(t, "of one that is not any more", s.DestroyComputeInstance(b), emulator.Success)
	if err := w.DestroyInstance(0, 0); !errors.Is(err, emulator.InUse) {
		t.Errorf("by hand: %v", err)
	}
	w.EndProcess(30)

	// What a program takes itself counts likewise, and goes with it.
	alive := true
	p := open(t, w, emulator.Opening{PID: 70, Alive: func() bool { return alive }})
	want(t, "charge", p.Charge("cuMemAlloc_v2", devA, 40192<<20), emulator.Success)
	want(t, "one byte more", p.Charge("cuMemAlloc_v2", devA, 1), emulator.OutOfMemory)
	want(t, "destroy under it", s.DestroyComputeInstance(a), emulator.InUse)
	want(t, "listed", pids(devA), "[70@0.0]")
	alive = false
	want(t, "destroy after its death", s.DestroyComputeInstance(a), emulator.Success)
	want(t, "and the GPU instance", s.DestroyGPUInstance(gi), emulator.Success)
	want(t, "used", w.State().GPUs[0].UsedMiB, 0)
	if err := w.AddProcess(emulator.Process{PID: 1, GPU: 1, Kind: emulator.Compute, MiB: 1}); !errors.Is(err, emulator.NotFound) {
		t.Errorf("on a GPU in MIG mode without instances: %v", err)
	}
}

// The driver's limits of cgroups are not for GPUs in MIG mode.
func TestNoMemoryLimitsWithMIG(t *testing.T) {
	w, s := inMode(t, emulator.Spec{Count: 1, Driver: "615.1.2"})
	want(t, "on", s.SetMemoryLimits(0, 3, 0, 1<<30), emulator.NotSupported)
	do(t, w.SetMIG(0, false))
	want(t, "off, without a cgroup", s.SetMemoryLimits(0, 3, 0, 1<<30), emulator.OperatingSystem)
}

// A container sees the instances whose nodes it has, numbered anew.
func TestSessionSeesTheInstancesOfItsNodes(t *testing.T) {
	w, _ := inMode(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 1})
	for _, start := range []int{0, 2, 5} {
		do(t, w.CreateInstance(0, "1g.10gb", start, false))
	}
	st := w.State().GPUs[0].MIG.Instances
	mine := st[1]
	s := open(t, w, emulator.Opening{Capability: func(minor, gi, ci int) bool { return minor == 0 && gi == mine.ID && ci <= 0 }})
	dev := must[emulator.Handle](t, "first")(s.MIGDevice(0, 0))
	want(t, "its UUID", must[string](t, "UUID")(s.UUID(dev)), mine.Compute[0].UUID)
	want(t, "its index", must[int](t, "index")(s.Index(dev)), 0)
	want(t, "another", ret(s.MIGDevice(0, 1)), emulator.NotFound)
	want(t, "another's UUID", ret(s.DeviceByUUID(st[0].Compute[0].UUID)), emulator.NotFound)
	want(t, "its GPU instance", ret(s.GPUInstanceByID(0, uint32(mine.ID))), emulator.Success)
	want(t, "another's", ret(s.GPUInstanceByID(0, uint32(st[0].ID))), emulator.NoPermission)
	want(t, "all of a profile", ret(s.GPUInstances(0, 19)), emulator.NoPermission)
	want(t, "a creation, as root", ret(s.CreateGPUInstance(0, 19, nil)), emulator.NoPermission)
	want(t, "memory", ret(s.Memory(dev)), emulator.Success)
	want(t, "the GPU's", ret(s.Memory(0)), emulator.NoPermission)
	half := open(t, w, emulator.Opening{Capability: func(_, gi, ci int) bool { return gi == mine.ID && ci < 0 }})
	want(t, "with the GPU instance's node alone", ret(half.MIGDevice(0, 0)), emulator.NotFound)
}

// While the hardware is at one GPU's instance, other GPUs and all readings go on,
// the next operation on that GPU waits, and the one under way is done whether or
// not its caller lives.
func TestOperationsTakeTheirTime(t *testing.T) {
	w, s := inMode(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2, MIG: emulator.MIGSpec{CreateSeconds: 1, DestroySeconds: 2, ModeSeconds: 3}})
	began, finish := make(chan time.Duration), make(chan struct{})
	w.SleepWith(func(d time.Duration, _ <-chan struct{}) { began <- d; <-finish })
	created := make(chan emulator.Return)
	create := func(s *emulator.Session, h emulator.Handle, start uint32) {
		go func() {
			created <- ret(s.CreateGPUInstance(h, 9, &emulator.Placement{Start: start, Size: 4}))
		}()
	}
	standing := func(gpu int) int { return len(w.State().GPUs[gpu].MIG.Instances) }
	dying := open(t, w, emulator.Opening{PID: 2})
	create(dying, 0, 0)
	want(t, "the first takes", <-began, time.Second)
	want(t, "standing meanwhile", standing(0), 0)
	want(t, "a reading meanwhile", ret(s.Memory(0)), emulator.Success)
	create(s, 0, 4)
	waiting(t, w, "nvmlDeviceCreateGpuInstanceWithPlacement", 2)
	create(s, 1, 0)
	want(t, "another GPU's takes", <-began, time.Second)
	if err := w.Reset(0); !errors.Is(err, emulator.InUse) {
		t.Errorf("reset meanwhile: %v", err)
	}
	dying.Close()
	finish <- struct{}{}
	finish <- struct{}{}
	// The second on GPU 0 has its turn.
	<-created
	<-created
	want(t, "the second on GPU 0 takes", <-began, time.Second)
	want(t, "standing", fmt.Sprint(standing(0), standing(1)), "1 1")
	finish <- struct{}{}
	want(t, "the second on GPU 0", <-created, emulator.Success)
	want(t, "standing", standing(0), 2)

	// What became illegal during the wait is not done, what is illegal is not begun.
	want(t, "no room", ret(s.CreateGPUInstance(0, 9, nil)), emulator.InsufficientResources)
	list := must[[]emulator.Handle](t, "list")(s.GPUInstances(1, 9))
	go func() { created <- ret(s.CreateComputeInstance(list[0], 2, nil)) }()
	<-began
	finish <- struct{}{}
	want(t, "compute instance", <-created, emulator.Success)
	ci := must[emulator.Handle](t, "it")(s.ComputeInstanceByID(list[0], 0))
	go func() { created <- s.DestroyComputeInstance(ci) }()
	want(t, "its end takes", <-began, 2*time.Second)
	do(t, w.AddProcess(emulator.Process{PID: 5, GPU: 1, GI: w.State().GPUs[1].MIG.Instances[0].ID, Kind: emulator.Compute, MiB: 1}))
	finish <- struct{}{}
	want(t, "a process came meanwhile", <-created, emulator.InUse)
	want(t, "it stands", len(w.State().GPUs[1].MIG.Instances[0].Compute), 1)
}

func TestModeTakesItsTime(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2, MIG: emulator.MIGSpec{ModeSeconds: 3}, GPUs: []emulator.GPUSpec{{Index: 1, Model: "A30"}}})
	s := open(t, w, emulator.Opening{})
	var took []time.Duration
	w.SleepWith(func(d time.Duration, _ <-chan struct{}) { took = append(took, d) })
	for _, step := range []struct {
		what  string
		do    func() emulator.Return
		takes string
	}{
		{"Hopper, on", func() emulator.Return { return second(s.SetMIGMode(0, 1)) }, "[3s]"},
		{"on again", func() emulator.Return { return second(s.SetMIGMode(0, 1)) }, "[]"},
		{"reset", func() emulator.Return { return s.Reset(0) }, "[]"},
		{"off", func() emulator.Return { return second(s.SetMIGMode(0, 0)) }, "[3s]"},
		{"Ampere, on", func() emulator.Return { return second(s.SetMIGMode(1, 1)) }, "[]"},
		{"Ampere, reset", func() emulator.Return { return s.Reset(1) }, "[3s]"},
	} {
		took = nil
		want(t, step.what, step.do(), emulator.Success)
		want(t, step.what+" takes", fmt.Sprint(took), step.takes)
	}
}

// The k-th of the calls that a fault is for fails, or one in so many.
func TestFaultsByNumber(t *testing.T) {
	run := func(f emulator.Fault) string {
		w, s := inMode(t, emulator.Spec{Count: 1})
		do(t, w.Inject(f))
		var out []string
		for range 3 {
			gi, r := s.CreateGPUInstance(0, 9, nil)
			out = append(out, r.Error())
			if r != emulator.Success {
				continue
			}
			ci, r := s.CreateComputeInstance(gi, 2, nil)
			out = append(out, r.Error())
			if r == emulator.Success {
				out = append(out, s.DestroyComputeInstance(ci).Error())
			}
			out = append(out, s.DestroyGPUInstance(gi).Error())
		}
		return strings.NewReplacer("success", "-", "unknown error", "X", " ", "").Replace(fmt.Sprint(out))
	}
	all := "nvml*Instance*"
	for what, c := range map[string]struct {
		f    emulator.Fault
		want string
	}{
		"the first":          {emulator.Fault{Count: 1}, "[X--------]"},
		"the third":          {emulator.Fault{Skip: 2, Count: 1}, "[--Xinuse--------]"},
		"one in four":        {emulator.Fault{Every: 4}, "[---X---Xinsufficientresources]"},
		"the eighth":         {emulator.Fault{Every: 8, Count: 1}, "[-------X----]"},
		"beyond the last":    {emulator.Fault{Skip: 12}, "[------------]"},
		"all from the ninth": {emulator.Fault{Skip: 8}, "[--------X]"},
	} {
		c.f.Call, c.f.Code = all, emulator.Unknown
		want(t, what, run(c.f), c.want)
	}
	w, s := inMode(t, emulator.Spec{Count: 2})
	one := 1
	do(t, w.Inject(emulator.Fault{Call: "nvmlGpuInstanceDestroy", GPU: &one, Code: emulator.Unknown}))
	for i, expect := range []emulator.Return{emulator.Success, emulator.Unknown} {
		gi := must[emulator.Handle](t, "create")(s.CreateGPUInstance(emulator.Handle(i), 9, nil))
		want(t, fmt.Sprint("destroy on GPU ", i), s.DestroyGPUInstance(gi), expect)
	}
	for what, f := range map[string]emulator.Fault{
		"skip":  {Call: "*", Code: emulator.Unknown, Skip: -1},
		"every": {Call: "*", Code: emulator.Unknown, Every: -1},
	} {
		if err := w.Inject(f); err == nil {
			t.Errorf("a negative %s is not refused", what)
		}
	}
}

// A call may fail after it has done its work.
func TestLateFaults(t *testing.T) {
	w, s := inMode(t, emulator.Spec{Count: 1})
	if err := w.Inject(emulator.Fault{Call: "*", Late: true, Delay: 1}); err == nil {
		t.Error("a late fault without a code is not refused")
	}
	late := func(call string) {
		t.Helper()
		do(t, w.Inject(emulator.Fault{Call: call, Code: emulator.Unknown, Late: true, Count: 1}))
	}
	late("nvmlDeviceCreateGpuInstance")
	want(t, "create", ret(s.CreateGPUInstance(0, 9, nil)), emulator.Unknown)
	want(t, "it stands", len(w.State().GPUs[0].MIG.Instances), 1)
	gi := must[[]emulator.Handle](t, "list")(s.GPUInstances(0, 9))[0]
	late("nvmlGpuInstanceDestroy")
	want(t, "destroy", s.DestroyGPUInstance(gi), emulator.Unknown)
	want(t, "it is gone", len(w.State().GPUs[0].MIG.Instances), 0)
	late("nvmlDeviceSetMigMode")
	want(t, "mode", second(s.SetMIGMode(0, 0)), emulator.Unknown)
	want(t, "it is off", w.State().GPUs[0].MIG.Enabled, false)
	late("nvmlInit_v2")
	fresh := w.Open(emulator.Opening{})
	defer fresh.Close()
	want(t, "init", fresh.Init(), emulator.Unknown)
	want(t, "nothing is open", ret(fresh.DeviceCount()), emulator.Uninitialized)
	late("nvmlGpuInstanceDestroy")
	want(t, "a call that fails by itself", s.DestroyGPUInstance(gi), emulator.InvalidArgument)
}

// An Xid may name the instances that it is of.
func TestXidOnAnInstance(t *testing.T) {
	w, s := inMode(t, emulator.Spec{Count: 1})
	do(t, w.CreateInstance(0, "3g.40gb", 4, false))
	id := w.State().GPUs[0].MIG.Instances[0].ID
	set := must[uint32](t, "set")(s.EventSetCreate())
	want(t, "register", s.RegisterEvents(0, emulator.EventXid, set), emulator.Success)
	do(t, w.XidOn(0, id, 0, 94))
	e := must[emulator.Event](t, "wait")(s.EventSetWait(set, time.Hour))
	want(t, "event", e, emulator.Event{GPU: 0, Type: emulator.EventXid, Data: 94, GPUInstance: uint32(id), ComputeInstance: 0})
	for _, none := range [][2]int{{id, 1}, {3 - id, -1}} {
		if err := w.XidOn(0, none[0], none[1], 94); !errors.Is(err, emulator.NotFound) {
			t.Errorf("on %v: %v", none, err)
		}
	}
}

// A program that dies under a call is not gone before the call is done, and one
// that dies waiting for its turn has not called.
func TestDeathUnderAnOperation(t *testing.T) {
	w, _ := inMode(t, emulator.Spec{Count: 1, MIG: emulator.MIGSpec{CreateSeconds: 3600}})
	first, second := open(t, w, emulator.Opening{PID: 2}), open(t, w, emulator.Opening{PID: 3})
	created := make(chan emulator.Return, 1)
	began := make(chan struct{}, 1)
	real := w.Sleep()
	w.SleepWith(func(d time.Duration, dead <-chan struct{}) { began <- struct{}{}; real(d, dead) })
	go func() { created <- ret(first.CreateGPUInstance(0, 9, nil)) }()
	<-began
	queued := make(chan emulator.Return, 1)
	go func() { queued <- ret(second.CreateGPUInstance(0, 9, nil)) }()
	waiting(t, w, "nvmlDeviceCreateGpuInstance", 2)
	second.Close()
	want(t, "the one in the queue", <-queued, emulator.Unknown)
	want(t, "standing", len(w.State().GPUs[0].MIG.Instances), 0)
	first.Close()
	want(t, "the one under way", <-created, emulator.Success)
	want(t, "standing", len(w.State().GPUs[0].MIG.Instances), 1)
}

// Many sessions at once leave no state that a single one could not have made.
func TestConcurrentOperations(t *testing.T) {
	w, _ := inMode(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2, MIG: emulator.MIGSpec{CreateSeconds: 1, DestroySeconds: 1}})
	w.SleepWith(func(time.Duration, <-chan struct{}) { time.Sleep(time.Microsecond) })
	all := slots(table(t, "A100-SXM4-80GB").Profiles)
	var workers sync.WaitGroup
	stop := make(chan struct{})
	for n := range 8 {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(n), 3))
			s := w.Open(emulator.Opening{PID: 100 + n})
			defer s.Close()
			s.Init()
			for range 300 {
				h := emulator.Handle(rng.IntN(2))
				at := all[rng.IntN(len(all))]
				gi, r := s.CreateGPUInstance(h, at.p.ID, at.at())
				if r != emulator.Success {
					if r != emulator.InsufficientResources {
						t.Errorf("create %v: %v", at, r)
					}
					// Somebody else's goes, where there is one.
					list, _ := s.GPUInstances(h, at.p.ID)
					for _, gi := range list {
						ids := fmt.Sprint(s.DestroyGPUInstance(gi))
						if !slices.Contains([]string{"success", "in use", "invalid argument"}, ids) {
							t.Errorf("destroy: %s", ids)
						}
					}
					continue
				}
				ci, r := s.CreateComputeInstance(gi, 0, nil)
				if r == emulator.Success && rng.IntN(3) > 0 {
					s.DestroyComputeInstance(ci)
					s.DestroyGPUInstance(gi)
				}
			}
		})
	}
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for _, g := range w.State().GPUs {
				used := map[int]bool{}
				for _, gi := range g.MIG.Instances {
					for at := gi.Start; at < gi.Start+gi.Size; at++ {
						if used[at] {
							t.Errorf("slot %d is used twice: %+v", at, g.MIG.Instances)
						}
						used[at] = true
					}
				}
			}
		}
	})
	workers.Wait()
	close(stop)
	watcher.Wait()
}
