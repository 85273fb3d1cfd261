// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
)

// Processes that take and give at random are killed at random. All the while
// the container stays within its cap, but for the moment of a pool's undo; nobody hangs; and when the last one has
// died, one survivor's look brings the counter to what the driver says.
func TestKill(t *testing.T) {
	const crew, limit = 8, 8*context300 + 1*GiB
	// churn is the largest request of the probe's: what the peak may be over the cap. One
	// process at a time undoes one request (pkg/memcap/lib/c/attempt.c), and the turn of one
	// that was killed in that moment is over when the driver has its memory back.
	const churn = 64 * MiB
	kills := pick(50, 1000)
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	random := dice(t)
	b := r.allocate(t, "kill", []share{{gpu: 0, bytes: limit}}, false, nil)
	if err := r.m.World.ResetPeak(0); err != nil {
		t.Fatal(err)
	}
	start := func() *tool {
		t.Helper()
		k := b.tool(t, "probe", nil, "-door", []string{"soname", "dlmopen", "query2", "ptsz"}[random.IntN(4)])
		if _, err := k.in.WriteString("churn " + strconv.FormatUint(random.Uint64()>>1, 10) + "\n"); err != nil {
			t.Fatal(err)
		}
		return k
	}
	var workers []*tool
	for range crew {
		workers = append(workers, start())
	}
	for i := range kills {
		// Sometimes at once, sometimes in the middle of work.
		pause(t, time.Duration(random.IntN(30))*time.Millisecond)
		for range 1 + random.IntN(3) {
			at := random.IntN(crew)
			k := workers[at]
			if err := k.p.Kill(); err != nil {
				t.Fatal(err)
			}
			if said, status, err := k.wait(); err != nil || status.Signal() != unix.SIGKILL {
				t.Fatalf("kill %d: the process ended by itself: %#x %q %v; it said %q", i, uint32(status), said, err, rest(k))
			}
			k.shut()
			workers[at] = start()
		}
		if peak := r.peak(0); peak > limit+churn {
			last, readings := b.readers[0].Last()
			t.Fatalf("after kill %d: %d MiB over the cap; %+v; reading %d: %+v", i, (peak-limit)/MiB, r.m.World.State().Processes, readings, last)
		}
	}
	var taken, refused uint64
	for i, k := range workers {
		if i%2 == 0 {
			// Half of the last ones die with what they have.
			if err := k.p.Kill(); err != nil {
				t.Fatal(err)
			}
		} else {
			k.in.Close()
		}
	}
	for i, k := range workers {
		said, status, err := k.wait()
		if err != nil {
			t.Fatalf("worker %d hangs: %v", i, err)
		}
		if i%2 == 0 {
			continue
		}
		var f fields
		for f[""] != "ended" {
			if f, err = k.line(); err != nil {
				t.Fatalf("worker %d: %v; status %#x, %q", i, err, uint32(status), said)
			}
		}
		if f["result"] != "0" && !(f["result"] == "2" && f["failure"] == "cuDevicePrimaryCtxRetain") || status != 0 {
			t.Errorf("worker %d: %q, status %#x, %q", i, k.said, uint32(status), said)
		}
		taken, refused = taken+f.n("taken"), refused+f.n("refused")
	}
	t.Logf("%d kills; the survivors' last stretch: %d requests granted, %d refused; peak %d MiB of %d", kills, taken, refused, r.peak(0)/MiB, limit/MiB)
	if peak := r.peak(0); peak > limit+churn {
		t.Errorf("%d MiB over the cap", (peak-limit)/MiB)
	}
	if undone := b.undone(0); undone > churn {
		t.Errorf("%d MiB were undone at once", undone/MiB)
	}

	// The survivor takes all that there is: it has to find what the dead have left, once the
	// driver has that back and was read after it. On a busy machine either can take longer
	// than a request waits.
	await(t, "the driver to have the memory of the dead back", func() bool { return r.used(0) == 0 }, func() any { return r.used(0) })
	b.read(t, 0)
	u, err := r.pages.OpenUsage(b.key, r.uuid(0))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	k := b.tool(t, "probe", nil)
	f := k.ask("took", "take cuMemAlloc_v2 %d 1000", 32*MiB)
	if got := f.n("count") * 32 * MiB; f["result"] != "2" || limit-context300-got >= 32*MiB || got > limit-context300 {
		n, err := u.Read()
		t.Errorf("%q: want all of %d MiB; the counters say %+v, %v, the last reading %+v, and the driver has given out %d MiB",
			k.said, (limit-context300)/MiB, n, err, b.last(0), r.used(0)/MiB)
	}
	await(t, "the counter to equal the driver's figure", func() bool {
		n, err := u.Read()
		if err != nil {
			t.Fatal(err)
		}
		// A context is charged by an estimate, which grows by a MiB in some seconds
		// while no reading tells, as among the dying. The reading makes that good.
		used, last := r.used(0), b.last(0)
		return n.Bound-n.Expected == used-context300 && n.Reserved == n.Bound && n.Committed == n.Bound && n.Processes == 1 &&
			int64(n.Bound)+last.Correction == int64(used)
	}, func() any { n, err := u.Read(); return []any{n, err, r.used(0), b.last(0)} })
	k.quit()
}

// A process dies in an attempt, and the next one takes its slot. The turn ends with that, so that
// others make attempts and readings come to rest.
func TestKillInAnAttempt(t *testing.T) {
	const limit, at = 2 * GiB, 192 // where the page says whose turn it is
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	b := r.allocate(t, "turn", []share{{gpu: 0, bytes: limit}}, false, nil)
	first := b.tool(t, "probe", nil)
	first.ask("took", "take cuMemAlloc_v2 %d 1", 32*MiB)
	if err := first.p.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := first.wait(); err != nil {
		t.Fatal(err)
	}
	first.shut()
	second := b.tool(t, "probe", nil) // takes another slot, and clears the first one when it needs room
	second.ask("took", "take cuMemAlloc_v2 %d 1000", 32*MiB)
	second.quit()
	u, err := r.pages.OpenUsage(b.key, r.uuid(0))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	turn := make([]byte, 8)
	binary.LittleEndian.PutUint64(turn, 7<<32|1)
	page, err := os.OpenFile(b.Path(lib.UsagePath(r.uuid(0), "turn")), os.O_WRONLY, 0)
	if err == nil {
		_, err = page.WriteAt(turn, at)
		err = errors.Join(err, page.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	k := b.tool(t, "probe", nil)
	k.ask("took", "take cuMemAlloc_v2 %d 1", 32*MiB)
	n, err := u.Read()
	if err != nil || n.Processes != 1 || n.Attempt != 7<<32 {
		t.Errorf("%d processes, and the turn is %#x, want %#x, of nobody: %v", n.Processes, n.Attempt, uint64(7<<32), err)
	}
	k.quit()
}

// rest is what a probe has still said.
func rest(k *tool) []string {
	k.said = nil
	for {
		if _, err := k.line(); err != nil {
			return k.said
		}
	}
}

// pause lets others work for a while; nothing is awaited.
func pause(t *testing.T, d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// await waits for a condition, and tells how things stand if it does not come; now may be nil.
func await(t *testing.T, what string, is func() bool, now func() any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience/4)
	defer cancel()
	for !is() {
		select {
		case <-ctx.Done():
			var stand any
			if now != nil {
				stand = now()
			}
			t.Errorf("waited in vain for %s: %+v", what, stand)
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}
