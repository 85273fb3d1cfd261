// SPDX-License-Identifier: Apache-2.0

package config

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// TestFeasible holds every geometry of an A30, every one of an A100's plain
// profiles, and many of all cards against a search that places one instance after the other in all ways. It
// knows the rules of the field and nothing of the planner: no overlap, no more
// of a profile than the driver says, one with media extensions, and one with
// all media engines beside such without any.
func TestFeasible(t *testing.T) {
	for _, name := range []string{"a100-40", "a100-80", "a30", "h100-80", "h200", "b200", "rtx-pro-6000"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := cards(t, name).GPUs[0]
			fits, not := 0, 0
			hold := func(counts []mig.Count) {
				t.Helper()
				want := placeable(&d.MIG, counts)
				_, reason := prove(&Want{Mode: MIG, Geometry: counts}, &d)
				if (reason == "") != want {
					t.Fatalf("%s: brute force says %v, and the reason is %q", mig.DescribeCounts(counts), want, reason)
				}
				if want {
					fits++
				} else {
					not++
				}
			}
			switch name {
			case "a30":
				every(t, d.MIG.Profiles, nil, hold)
			case "a100-80":
				plain := slices.DeleteFunc(slices.Clone(d.MIG.Profiles), func(p gpu.Profile) bool { return p.Name == "1g.10gb+me" || p.Name == "1g.20gb" })
				every(t, plain, nil, hold)
			}
			rng := rand.New(rand.NewPCG(7, uint64(len(name))))
			for range 1000 {
				hold(someGeometry(t, rng, d.MIG.Profiles))
			}
			if fits < 100 || not < 100 {
				t.Errorf("%d geometries fit and %d do not: the test shows little", fits, not)
			}
		})
	}
}

// every calls hold with all counts of all profiles, up to one more than the
// driver lets stand.
func every(t *testing.T, profiles []gpu.Profile, counts []mig.Count, hold func([]mig.Count)) {
	if len(profiles) == 0 {
		hold(slices.SortedFunc(slices.Values(counts), func(a, b mig.Count) int { return mig.Compare(a.Profile, b.Profile) }))
		return
	}
	for n := range profiles[0].Max + 2 {
		next := counts
		if n > 0 {
			next = append(slices.Clip(counts), mig.Count{Profile: profile(t, profiles[0].Name), N: n})
		}
		every(t, profiles[1:], next, hold)
	}
}

// someGeometry draws a few instances, some of them parts, and often about as
// many as there is room for.
func someGeometry(t *testing.T, rng *rand.Rand, profiles []gpu.Profile) []mig.Count {
	counts := map[mig.Name]int{}
	for memory := 1 + rng.IntN(14); memory > 0; {
		p := profiles[rng.IntN(len(profiles))]
		n := profile(t, p.Name)
		if splits := parts[n.Slices]; len(splits) > 0 && rng.IntN(3) == 0 {
			n.Compute = 1 + rng.IntN(len(splits))
		}
		counts[n]++
		memory -= max(1, p.Placements[0].Size*max(n.Compute, 1)/n.Slices)
	}
	var out []mig.Count
	for n, c := range counts {
		out = append(out, mig.Count{Profile: n, N: c})
	}
	slices.SortFunc(out, func(a, b mig.Count) int { return mig.Compare(a.Profile, b.Profile) })
	return out
}

// parts is where compute instances of 1, 2, … slices may begin in a GPU
// instance of as many slices as the key says.
var parts = map[int][][]int{
	2: {{0, 1}},
	3: {{0, 1, 2}, {0}},
	4: {{0, 1, 2, 3}, {0, 2}},
	7: {{0, 1, 2, 3, 4, 5, 6}, {0, 2, 4}, {0, 4}, {0}},
}

// placeable is the brute force.
func placeable(m *gpu.MIG, counts []mig.Count) bool {
	var instances []gpu.Profile // to be placed
	split := map[string][]int{} // compute slices of parts, by GPU instance
	for _, c := range counts {
		name := c.Profile.GPUInstance().String()
		i := slices.IndexFunc(m.Profiles, func(p gpu.Profile) bool { return p.Name == name })
		if i < 0 {
			return false
		}
		if c.Profile.Compute > 0 {
			split[name] = append(split[name], slices.Repeat([]int{c.Profile.Compute}, c.N)...)
		} else {
			instances = append(instances, slices.Repeat([]gpu.Profile{m.Profiles[i]}, c.N)...)
		}
	}
	for name, sizes := range split {
		i := slices.IndexFunc(m.Profiles, func(p gpu.Profile) bool { return p.Name == name })
		slices.SortFunc(sizes, func(a, b int) int { return b - a })
		k := 1
		for ; !fill(make([]int, k), m.Profiles[i].Slices, sizes); k++ {
			if k > len(sizes) {
				return false
			}
		}
		instances = append(instances, slices.Repeat([]gpu.Profile{m.Profiles[i]}, k)...)
	}
	count, media, everything, nothing, memory := map[string]int{}, 0, 0, 0, 0
	for _, p := range instances {
		memory += p.Placements[0].Size
		if count[p.Name]++; count[p.Name] > p.Max {
			return false
		}
		switch _, attribute, _ := strings.Cut(p.Name, "gb"); attribute {
		case "+me":
			media++
		case "+me.all":
			media++
			everything++
		case "-me":
			nothing++
		}
	}
	if media > 1 || everything > 0 && everything+nothing < len(instances) || memory > 12 {
		return false
	}
	slices.SortFunc(instances, func(a, b gpu.Profile) int { return b.Placements[0].Size - a.Placements[0].Size })
	return place(0, instances)
}

// fill puts parts into GPU instances, of which taken is a set of slices each.
func fill(taken []int, slices int, sizes []int) bool {
	if len(sizes) == 0 {
		return true
	}
	starts := parts[slices]
	if sizes[0] > len(starts) {
		return false
	}
	part := 1<<sizes[0] - 1
	for i := range taken {
		for _, s := range starts[sizes[0]-1] {
			if taken[i]&(part<<s) == 0 {
				taken[i] |= part << s
				ok := fill(taken, slices, sizes[1:])
				taken[i] &^= part << s
				if ok {
					return true
				}
			}
		}
		if taken[i] == 0 {
			break // the next one is as empty
		}
	}
	return false
}

// place puts GPU instances side by side; taken is a set of memory slices.
func place(taken int, instances []gpu.Profile) bool {
	if len(instances) == 0 {
		return true
	}
	for _, at := range instances[0].Placements {
		placements := (1<<at.Size - 1) << at.Start
		if taken&placements == 0 && place(taken|placements, instances[1:]) {
			return true
		}
	}
	return false
}

// TestProve is what is said of GPUs that cannot be what an entry wants.
func TestProve(t *testing.T) {
	const have = "there are 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb and 7g.80gb"
	on := func(names ...string) *gpu.Inventory {
		inv := new(gpu.Inventory)
		for _, n := range names {
			d := gpu.Device{UUID: gpu.UUID("GPU-" + strconv.Itoa(len(inv.GPUs))), Memory: 81920}
			switch n {
			case "no MIG":
			case "lost":
				d.Fault = "GPU is lost"
			case "old driver":
				d.MIG.Capable = true
			case "odd names":
				d.MIG = gpu.MIG{Capable: true, Profiles: []gpu.Profile{{Name: "small"}, {Name: "1x.10gb"}}}
			case "GB10":
				d.Memory = 0
			case "Thor":
				d.Memory, d.MIG.Capable = 0, true
				for _, p := range []string{"1g.0gb", "2g.0gb+gfx", "3g.0gb"} {
					n := profile(t, p)
					d.MIG.Profiles = append(d.MIG.Profiles, gpu.Profile{Name: p, Slices: n.Slices, Max: 1,
						Placements: []gpu.Placement{{Start: (3 - n.Slices) / 2 * 2, Size: n.Slices}}})
				}
			case "no placements":
				d = cards(t, "a100-80").GPUs[0]
				for i := range d.MIG.Profiles {
					d.MIG.Profiles[i].Placements = nil
				}
			default:
				d = cards(t, n).GPUs[0]
			}
			d.Index = len(inv.GPUs)
			inv.GPUs = append(inv.GPUs, d)
		}
		return inv
	}
	for _, tc := range []struct {
		name, entry string
		inv         *gpu.Inventory
		want        string // "" is proven
	}{
		{"no MIG", "geometry: {}", on("no MIG"), "f:4: GPU 0: this model has no MIG: whole, shared and off work"},
		{"no MIG, on demand", "profiles: [1g.10gb]", on("a100-80", "no MIG"), "f:4: GPU 1: this model has no MIG: whole, shared and off work"},
		{"a driver that tells no profiles", "geometry: {}", on("old driver"), "f:4: GPU 0: the driver reports no MIG profiles, which drivers do from R510 on: whole, shared and off work"},
		{"no MIG, and no memory", "geometry: {}", on("GB10"), "f:4: GPU 0: this model has no MIG: whole and off work"},
		{"no profile that is understood", "profiles: [1g.10gb]", on("odd names"), "f:4: GPU 0: this version knows none of its MIG profiles, so nothing could be offered: whole, shared and off work; " +
			`leave out profile "small": a name is like 1g.10gb, 1g.10gb+me or 1c.3g.40gb; leave out profile "1x.10gb": a name is like 1g.10gb, 1g.10gb+me or 1c.3g.40gb`},
		{"profiles without memory", "geometry: {1g.0gb: 1, 2g.0gb+gfx: 1}", on("Thor"), ""},
		{"profiles without memory, beside each other", "geometry: {2g.0gb+gfx: 1, 3g.0gb: 1}", on("Thor"), "f:4: GPU 0: 1x2g.0gb+gfx 1x3g.0gb: they need 5 memory slices and this GPU has 3"},
		{"no such profile", "geometry: {1g.5gb: 1, 9g.999gb: 3, 1g.10gb: 1}", on("a100-80"), "f:4: GPU 0: there is no profile 1g.5gb or 9g.999gb: " + have},
		{"no such profile, on demand", "profiles: [1g.10gb, 1g.5gb]", on("a100-80"), "f:4: GPU 0: there is no profile 1g.5gb: " + have},
		{"a part of what is not there", "geometry: {1c.3g.20gb: 1}", on("a100-80"), "f:4: GPU 0: there is no profile 1c.3g.20gb: " + have},
		{"too many", "geometry: {1g.10gb: 8}", on("a100-80", "a100-80"), "f:4: GPUs 0 and 1: 8x1g.10gb: at most 7 of 1g.10gb can exist on this GPU"},
		{"too much memory", "geometry: {3g.40gb: 2, 1g.10gb: 1}", on("h100-80"), "f:4: GPU 0: 1x1g.10gb 2x3g.40gb: they need 9 memory slices and this GPU has 8"},
		{"each its own reason, one message", "geometry: {1g.10gb: 5}", on("a100-40", "a100-80", "no MIG", "a100-40"),
			"f:4: GPUs 0 and 3: 5x1g.10gb: at most 4 of 1g.10gb can exist on this GPU; GPU 2: this model has no MIG: whole, shared and off work"},
		{"room, and no place for it", "geometry: {2g.20gb: 3, 1g.20gb: 1, 1g.10gb: 1}", on("a100-80"), "f:4: GPU 0: 1x1g.10gb 1x1g.20gb 3x2g.20gb: they need 9 memory slices and this GPU has 8"},
		{"placements are not told", "geometry: {1g.10gb: 7}", on("no placements"),
			"f:4: GPU 0: the driver reports placements only while MIG is on, so it is not known yet whether this fits: turn MIG on, or take an inventory of such a GPU in MIG mode"},
		{"placements are not told, and it is too many anyway", "geometry: {1g.10gb: 8}", on("no placements"), "f:4: GPU 0: 8x1g.10gb: at most 7 of 1g.10gb can exist on this GPU"},
		{"placements are not told, and nothing is to be placed", "geometry: {}", on("no placements"), ""},
		{"placements are not told, on demand", "profiles: [1g.10gb]", on("no placements"), ""},
		{"a GPU that is lost", "geometry: {1g.10gb: 7}", on("a100-80", "lost"), "f:4: GPU 1: the driver cannot describe it, so it is not known whether this fits: GPU is lost"},
		{"what fits", "geometry: {1g.10gb: 1, 2g.20gb: 1, 3g.40gb: 1}", on("a100-80", "h100-80"), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := mustParse(t, head+"    - {devices: all, mode: mig, "+tc.entry+"}\n")
			d, err := f.Desire("default", tc.inv, Node{Unit: 1024})
			if err == nil {
				err = f.Prove(d, tc.inv)
			}
			got := ""
			if err != nil {
				got = err.Error()
			}
			if got != tc.want {
				t.Errorf("%s\nwant %s", got, tc.want)
			}
		})
	}
}

// TestUnprovenIsDesired: what only check refuses is wanted by the others.
func TestUnprovenIsDesired(t *testing.T) {
	f := mustParse(t, head+"    - {devices: all, mode: mig, geometry: {1g.10gb: 7}}\n")
	inv := cards(t, "a100-80")
	inv.GPUs[3].Fault, inv.GPUs[3].MIG = "GPU is lost", gpu.MIG{}
	for i := range inv.GPUs[5].MIG.Profiles {
		inv.GPUs[5].MIG.Profiles[i].Placements = nil
	}
	d, err := f.Desire("default", inv, Node{Unit: 1024})
	if err != nil {
		t.Fatal(err)
	}
	for i, w := range d.GPUs {
		if w.Mode != MIG || w.Unproven != (i == 3 || i == 5) {
			t.Errorf("GPU %d: %+v", i, w)
		}
	}
	if err := f.Prove(d, inv); err == nil || strings.Count(err.Error(), "\n") != 0 || !strings.Contains(err.Error(), "GPU 3: ") || !strings.Contains(err.Error(), "GPU 5: ") {
		t.Errorf("%v, want one line that names GPUs 3 and 5", err)
	}
}

func BenchmarkDesire(b *testing.B) {
	f, err := Parse("f", []byte(head+"    - {devices: all, mode: mig, geometry: {1g.10gb: 2, 2g.20gb: 1, 3g.40gb: 1}}\n"))
	if err != nil {
		b.Fatal(err)
	}
	inv := cards(b, "a100-80")
	for b.Loop() {
		if _, err := f.Desire("default", inv, Node{Unit: 1024}); err != nil {
			b.Fatal(err)
		}
	}
}

// A GPU without memory of its own (GB10, Thor) can be what needs none, and no share of it is
// promised. One that is broken is not judged by a memory that nobody could read.
func TestNoSharesWithoutMemory(t *testing.T) {
	geometry := []mig.Count{{Profile: profile(t, "1g.10gb"), N: 1}}
	for _, c := range []struct {
		want           Want
		mig, fault, ok bool
	}{
		{Want{Mode: Whole}, false, false, true},
		{Want{Mode: Off}, false, false, true},
		{Want{Mode: Keep}, false, false, true},
		{Want{Mode: Shared}, false, false, false},
		{Want{Mode: Shared, Replicas: 4}, false, false, false},
		{Want{Mode: Shared}, true, false, false},
		{Want{Mode: Dynamic, OnDemand: true}, true, false, false},
		{Want{Mode: MIG, OnDemand: true}, true, false, true},
		{Want{Mode: MIG, Geometry: geometry}, true, false, true},
		{Want{Mode: Shared}, false, true, true},
	} {
		d := gpu.Device{}
		if c.mig {
			d.MIG = cards(t, "a100-80").GPUs[0].MIG
		}
		if c.fault {
			d.Fault = "it cannot be read"
		}
		_, reason := prove(&c.want, &d)
		if (reason == "") != c.ok || !c.ok && (!strings.Contains(reason, "memory") || strings.Contains(reason, "mig") != c.mig) {
			t.Errorf("%+v of a GPU with MIG %v and a fault %v: %q", c.want, c.mig, c.fault, reason)
		}
		d.Memory = 81920
		if _, reason := prove(&c.want, &d); reason != "" {
			t.Errorf("%+v of a GPU with memory: %q", c.want, reason)
		}
	}
}
