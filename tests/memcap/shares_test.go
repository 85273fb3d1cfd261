// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// several are containers with shares of GPU 0, of which a container may have more than one
// and a share more than one container.
type several struct {
	r     *rig
	boxes map[string]*box
}

// together makes containers that have shares, by the containers' names and the shares'
// keys, and a reader for each share.
func (r *rig) together(t *testing.T, shares map[string]uint64, containers map[string][]string) *several {
	t.Helper()
	s := &several{r: r, boxes: map[string]*box{}}
	for key, bytes := range shares {
		if _, err := r.pages.Write(key, promised, []lib.Limit{{GPU: r.uuid(0), Bytes: bytes, Context: context300}}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := r.pages.Remove(key); err != nil {
				t.Error(err)
			}
		})
	}
	at := map[string][]*capsule.Container{} // by the share on whose page they count
	for name, keys := range containers {
		keys = slices.SortedFunc(slices.Values(keys), func(a, b string) int { return cmp.Or(cmp.Compare(shares[b], shares[a]), cmp.Compare(a, b)) })
		edits, image := r.m.Plain(0)
		for i, key := range keys {
			pages, err := r.pages.Write(key, promised, []lib.Limit{{GPU: r.uuid(0), Bytes: shares[key], Context: context300}})
			if err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				edits = capsule.Allocation{Kit: r.kit, Key: key, Pages: pages}.Apply(edits)
				continue
			}
			for _, m := range lib.Mounts(key, pages) {
				edits.Mounts = append(edits.Mounts, &m)
			}
		}
		capsule.Bind(&edits, r.probe, "/probe")
		c, err := r.m.Open(t.Context(), edits, image)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
		s.boxes[name] = &box{Container: c, r: r, key: keys[0]}
		at[keys[0]] = append(at[keys[0]], c)
	}
	for key := range shares {
		reader := &capsule.Reader{Driver: r.m, Also: at[key], Pages: r.pages, Key: key, GPU: r.uuid(0), Every: every}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- reader.Run(ctx) }()
		t.Cleanup(func() {
			stop()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	return s
}

// tool starts a probe in one of the containers.
func (s *several) tool(t *testing.T, container string, args ...string) *tool {
	t.Helper()
	return s.boxes[container].tool(t, "probe", nil, args...)
}

// used is what some of the containers have by the driver's account.
func (s *several) used(containers ...string) uint64 {
	var some []*capsule.Container
	for _, name := range containers {
		some = append(some, s.boxes[name].Container)
	}
	used, _ := s.r.m.Used(s.r.uuid(0), some...)
	return used
}

// bit is by how much these tests take memory.
const bit = 16 * MiB

// all takes what there is, in bits, and returns how much that was.
func all(t *testing.T, k *tool) uint64 {
	t.Helper()
	f := k.ask("took", "take cuMemAlloc_v2 %d 10000", bit)
	if f["result"] != "2" {
		t.Fatalf("%q", k.said)
	}
	return f.n("count") * bit
}

// in says how much of so many bytes can be had in bits.
func in(bytes uint64) uint64 { return bytes / bit * bit }

// shot is a probe that is killed.
func shot(t *testing.T, k *tool) {
	t.Helper()
	if err := k.p.Kill(); err != nil {
		t.Fatal(err)
	}
	if said, status, err := k.wait(); err != nil || status.Signal() != unix.SIGKILL {
		t.Fatalf("the probe ended by itself: %#x %q %v; it said %q", uint32(status), said, err, rest(k))
	}
	k.shut()
}

// A container with two shares of a GPU was held to the larger one. It may have their sum.
// Another one that has one of the shares may have that, or what is left of it; and what the
// first one gives back, or has when it is killed, is room for those whose share it was.
func TestSharesOfOneGPUAddUp(t *testing.T) {
	const large, small = 3 * GiB, 2 * GiB
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	for i, keys := range [][2]string{{"first", "second"}, {"fourth", "third"}} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			s := r.together(t, map[string]uint64{keys[0]: large, keys[1]: small},
				map[string][]string{"both": keys[:], "large": keys[:1], "small": keys[1:]})
			if err := r.m.World.ResetPeak(0); err != nil {
				t.Fatal(err)
			}
			expect := func(who string, got, want uint64) {
				t.Helper()
				if got != want {
					t.Errorf("%s got %d MiB, want %d", who, got/MiB, want/MiB)
				}
			}
			both := s.tool(t, "both")
			expect("alone, both", all(t, both), in(large+small-context300))
			// What is shown as free is right from the first reading on in which nothing is under way.
			await(t, "the figures that it is told", func() bool {
				f := both.ask("info", "info")
				return f.n("total") == large+small && f.n("device-total") == large+small && f.n("free") < bit
			}, func() any { return both.said })
			list := both.list("nvml")
			if len(list) != 2 || list[1].n("total") != large+small || list[1].n("free") >= bit {
				t.Errorf("NVML says %q", list)
			}
			shot(t, both)
			one, other := s.tool(t, "small"), s.tool(t, "large")
			expect("after it was killed, the small share", all(t, one), in(small-context300))
			expect("after it was killed, the large share", all(t, other), in(large-context300))
			one.quit()
			other.quit()

			// It borrows less where others have something, and repays what it gives back.
			other, both = s.tool(t, "large"), s.tool(t, "both")
			if f := other.ask("took", "take cuMemAlloc_v2 %d", GiB); f["result"] != "0" {
				t.Fatalf("%q", other.said)
			}
			f := both.ask("took", "take cuMemAlloc_v2 %d", 2*GiB)
			if f["result"] != "0" {
				t.Fatalf("%q", both.said)
			}
			expect("both beside one with a GiB", all(t, both), in(large+small-3*GiB-2*context300))
			one = s.tool(t, "small")
			if f := one.ask("took", "take cuMemAlloc_v2 %d", MiB); f["result"] != "2" {
				t.Errorf("%q: it has all of both shares' sum", one.said)
			}
			if f := both.ask("gave", "give %d", f.n("id")); f["result"] != "0" {
				t.Fatalf("%q", both.said)
			}
			got := all(t, one)
			if got < in(small-2*context300)-bit {
				t.Errorf("the small share got %d MiB after 2 GiB of it were given back", got/MiB)
			}
			expect("both after that", all(t, both), 0)
			if used := s.used("small"); used > small {
				t.Errorf("the container with the small share has %d MiB", used/MiB)
			}
			one.quit()
			both.quit()
			expect("alone at last, the large share", all(t, other), in(large-GiB-context300))
			other.quit()
			if peak := r.peak(0); peak > large+small {
				t.Errorf("%d MiB over the cap", (peak-large-small)/MiB)
			}
		})
	}
}

// Processes of containers that share what an allocation has are killed at random, a thousand
// times in the long form. Together they stay within the sum, and those that have one share
// alone within that one, but for the moment of a pool's undo. In the end all of it can be had.
func TestSharesWhileTheirUsersDie(t *testing.T) {
	const churn = 64 * MiB
	for _, row := range []struct {
		name       string
		shares     map[string]uint64
		containers map[string][]string
		most       uint64 // of one request; default churn
	}{
		{"two containers of one allocation", map[string]uint64{"whole": 24 * GiB}, map[string][]string{"a": {"whole"}, "b": {"whole"}}, GiB},
		{"two containers of a small allocation", map[string]uint64{"whole": 2 * GiB}, map[string][]string{"a": {"whole"}, "b": {"whole"}}, 0},
		{"two shares in one container", map[string]uint64{"most": 2 * GiB, "less": GiB}, map[string][]string{"a": {"most", "less"}}, 0},
		{"one request of two", map[string]uint64{"most": 2 * GiB, "less": 3 * GiB / 2},
			map[string][]string{"a": {"most", "less"}, "b": {"most"}, "c": {"less"}}, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			die(t, row.shares, row.containers, cmp.Or(row.most, churn))
		})
	}
}

func die(t *testing.T, shares map[string]uint64, containers map[string][]string, most uint64) {
	const crew = 6
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	random := dice(t)
	s := r.together(t, shares, containers)
	if err := r.m.World.ResetPeak(0); err != nil {
		t.Fatal(err)
	}
	names := slices.Sorted(maps.Keys(containers))
	start := func() *tool {
		t.Helper()
		k := s.tool(t, names[random.IntN(len(names))], "-most", strconv.FormatUint(most, 10), "-door", []string{"soname", "dlmopen", "query2", "ptsz"}[random.IntN(4)])
		if _, err := k.in.WriteString("churn " + strconv.FormatUint(random.Uint64()>>1, 10) + "\n"); err != nil {
			t.Fatal(err)
		}
		return k
	}
	var workers []*tool
	for range crew {
		workers = append(workers, start())
	}
	sum := uint64(0)
	for _, bytes := range shares {
		sum += bytes
	}
	// One attempt at a time on each page; see pkg/memcap/lib/c/attempt.c.
	undo := most * uint64(len(shares))
	for i := range pick(30, 1000) {
		pause(t, time.Duration(random.IntN(30))*time.Millisecond)
		for range 1 + random.IntN(2) {
			at := random.IntN(crew)
			shot(t, workers[at])
			workers[at] = start()
		}
		if peak := r.peak(0); peak > sum+undo {
			t.Fatalf("after round %d: %d MiB over the cap; %+v", i, (peak-sum)/MiB, r.m.World.State().Processes)
		}
		for name, keys := range containers {
			if used := s.used(name); len(keys) == 1 && used > shares[keys[0]]+most {
				t.Fatalf("after round %d: container %s has %d MiB of a share of %d", i, name, used/MiB, shares[keys[0]]/MiB)
			}
		}
	}
	for _, k := range workers {
		shot(t, k)
	}
	for _, name := range names {
		var has uint64
		for _, key := range containers[name] {
			has += shares[key]
		}
		k := s.tool(t, name)
		if got := all(t, k); got != in(has-context300) {
			t.Errorf("at last container %s gets %d MiB of %d", name, got/MiB, (has-context300)/MiB)
		}
		shot(t, k)
	}
	t.Logf("peak %d MiB of %d", r.peak(0)/MiB, sum/MiB)
}
