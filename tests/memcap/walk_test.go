// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// TestWalk is calls at random, 100,000 of each seed with -long, near the edge of
// the cap: memory of every kind by every call that gives some, of the card, of its
// locality domains and managed, pools with their settings, exports, streams, events
// and kernels that take time, contexts and their limits, by threads of two processes
// that take turns and sometimes go at once, and have each other's exports open. The
// emulated driver's books judge: it never had more than the cap, but for what was
// undone at once and is reported so; and it says of each request that is refused
// whether a card of that size would have granted it.
//
// The peak holds. Of the refusals a few are of what would have fitted, and the log has
// them; see earlyOf. On a bare card none may be.
//
// The walk on a bare card is the judge's own trial: what is refused there is
// refused by the driver.
func TestWalk(t *testing.T) {
	random := dice(t)
	// Always heap=set. Otherwise the meter knows that a heap was taken by a rise of the
	// driver's figure. A walk also lets go of exports all the time, of which nobody knows when
	// they are gone; where both happen at once they cannot be told apart, and the heap is
	// counted twice as long as it is there: of one walk in five, up to half of the refusals.
	// And with heap=use it counts and is never there, since no kernel of a walk uses it.
	modes := []string{"heap=set", "strict,heap=set", anyCUDA(random), anyCUDA(random)}
	if *again != "" {
		r := newRig(t, emulator.Spec{Model: "H200-141GB", Count: 1})
		number, cuda, _ := strings.Cut(*again, " ")
		r.walk(t, 0, atoi(number), cuda)
		return
	}
	r := newRig(t, emulator.Spec{Model: "H200-141GB", Count: len(modes)})
	for i, cuda := range modes {
		seed := random.Uint64N(1 << 32)
		t.Run(fmt.Sprintf("cap/%d", i), func(t *testing.T) {
			t.Parallel()
			r.walk(t, i, seed, cuda)
		})
	}
	t.Run("bare", func(t *testing.T) {
		t.Parallel()
		walkBare(t, random.Uint64N(1<<32), modes[2])
	})
}

// again is a walk that failed, to be walked alone: its seed, and after a space how the
// emulated driver was.
var again = flag.String("walk", "", "only the walk of this seed, a space, and the driver's behaviour, as a failed TestWalk prints them")

// anyCUDA is a way for the emulated driver to be.
func anyCUDA(random *rand.Rand) string {
	var list []string
	for _, s := range []string{
		"kernel-us=0|20|500", "piece-mib=2|32|64", "holes=fit|remap", "large=pieces|blocks", "reuse=documented|eager",
		"opportunistic=documented|lazy", "follow=all|direct", "trim=passed|observed", "shrink=synchronize|never",
		"query=nothing|observes", "used=live|pending", "ipc-pools=kept|shrink", "pool-max=exact|piece|refuses|ignored", "pool-memory=device|context",
		"graphs=distinct|ordered", "version=13000|13040", "loading=environment|lazy|eager", "managed-create=refused|made", "heap=set",
	} {
		name, values, _ := strings.Cut(s, "=")
		all := strings.Split(values, "|")
		list = append(list, name+"="+all[random.IntN(len(all))])
	}
	return strings.Join(list, ",")
}

// earlyOf is how many of so many refusals may be of what a card of the cap's size grants:
// one in twenty. Walks of 100,000 steps have about one in a hundred, and of 60 short ones
// two had one in thirty. What is known to be left:
//
//   - Exported memory is gone when the last of its descriptors is closed, which no call
//     tells. Until a reading has seen it, what was refused before is refused again.
//   - What a pool has free is not in one piece, or it would have to grow by a piece of its
//     own that is larger than what the cap has left.
//   - A pool that other processes can open, which gives nothing back before its end, is not
//     asked for more than was freed there at one place. Such are most of them.
//   - A reading that has fallen among others' calls leaves it open how much there is.
func earlyOf(refused uint64) uint64 { return 2 + refused/20 }

// walkLimit is the cap of a walk, of two processes.
const walkLimit = 2*context300 + 1*GiB

func (r *rig) walk(t *testing.T, index int, seed uint64, cuda string) {
	b := r.allocate(t, fmt.Sprintf("walk-%d", index), []share{{gpu: index, bytes: walkLimit}}, false, nil)
	defer b.close(t)
	if err := r.m.World.ResetPeak(index); err != nil {
		t.Fatal(err)
	}
	k := b.tool(t, "probe", []string{"GPU_EMULATOR_CUDA=" + cuda})
	f := k.walked(seed, lib.RealCUDA)
	t.Logf("seed %d, %q: %q", seed, cuda, f)
	usage, err := r.pages.OpenUsage(b.key, r.uuid(index))
	if err != nil {
		t.Fatal(err)
	}
	defer usage.Close()
	counters, err := usage.Read()
	if err != nil {
		t.Fatal(err)
	}
	// One undo at a time, of both processes together. Beside it a pool may have grown by one
	// piece more than was reserved, where one thread has had of what another one's request
	// had just added; that is undone by itself.
	if peak := r.peak(index); peak > walkLimit+counters.Undone+poolPiece {
		t.Errorf("seed %d, %q: the driver had %d KiB more than the cap, of which at most %d KiB were undone at once",
			seed, cuda, (peak-walkLimit)>>10, counters.Undone>>10)
	}
	if most := uint64(128 * MiB); counters.Undone > most {
		t.Errorf("seed %d, %q: %d MiB undone at once, which is more than one request", seed, cuda, counters.Undone/MiB)
	}
	f.judge(t, seed, cuda, earlyOf(f.n("refused")))
	k.quit()
	if used := r.used(index); used != 0 {
		t.Errorf("seed %d: %d bytes are left", seed, used)
	}
}

func walkBare(t *testing.T, seed uint64, cuda string) {
	const reserved = 48
	r := bareRig(t, emulator.Spec{Model: "H200-141GB", Count: 1,
		GPUs: []emulator.GPUSpec{{MemoryMiB: walkLimit/MiB + reserved, ReservedMiB: reserved}}})
	c := r.plain(t, 0)
	defer c.Close()
	k, err := startTool(t, c, "probe", []string{"GPU_EMULATOR_CUDA=" + cuda})
	if err != nil {
		t.Fatal(err)
	}
	f := k.walked(seed, capsule.Libraries+"/libcuda.so.1")
	t.Logf("seed %d, %q: %q", seed, cuda, f)
	f.judge(t, seed, cuda, 0)
	k.quit()
}

// walked walks, and waits as long as there is a sign of life.
func (k *tool) walked(seed uint64, judge string) fields {
	k.t.Helper()
	f := k.ask("walking", "walk %d %d %d %s", seed, pick(6_000, 100_000), uint64(walkLimit), judge)
	for f[""] == "walking" {
		if f["early"] != "" {
			k.t.Log(f["early"])
		}
		k.said = nil
		var err error
		if f, err = k.line(); err != nil {
			k.t.Fatal(err)
		}
	}
	return f
}

// judge reports what was refused without need, if that was more than is allowed.
func (f fields) judge(t *testing.T, seed uint64, cuda string, allowed uint64) {
	t.Helper()
	if f["failure"] != "" {
		t.Errorf("seed %d, %q: %s", seed, cuda, f["failure"])
	}
	if f.n("early") > allowed {
		t.Errorf("seed %d, %q: of %s refused requests a card of the cap's size grants %s, %s of them twice; the first: %s",
			seed, cuda, f["refused"], f["early"], f["twice"], f["first"])
	}
	if f.n("granted") == 0 || f.n("refused") == 0 || f.n("passed") == 0 {
		t.Errorf("seed %d, %q: a walk far from the edge: %q", seed, cuda, f)
	}
}
