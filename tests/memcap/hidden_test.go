// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// Small arrays have no address, and lie in blocks with all that is small: a
// block stays the driver's as long as one array is in it, and a hole may be
// taken by one. What is bound is never less than the driver gave.
func TestHidden(t *testing.T) {
	const limit = context300 + 64*MiB
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	b := r.allocate(t, "hidden", []share{{gpu: 0, bytes: limit}}, false, nil)
	k := b.tool(t, "probe", nil)
	take := func(call string, bytes int) uint64 {
		t.Helper()
		f := k.ask("took", "take %s %d 1", call, bytes)
		if f["result"] != "0" {
			t.Fatalf("%s of %d bytes: %q", call, bytes, k.said)
		}
		return f.n("id")
	}
	give := func(id uint64) {
		t.Helper()
		if f := k.ask("gave", "give %d", id); f["result"] != "0" {
			t.Fatalf("%q", k.said)
		}
	}
	take("cuMemAlloc_v2", 2*MiB) // and with it the context
	u, err := r.pages.OpenUsage(b.key, r.uuid(0))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	enough := func(when string) {
		t.Helper()
		n, err := u.Read()
		if err != nil {
			t.Fatal(err)
		}
		if used := r.used(0); n.Bound < used {
			t.Errorf("%s: %d KiB bound, the driver has given %d KiB more", when, n.Bound/1024, (used-n.Bound)/1024)
		}
	}

	// Three blocks with an array each, of which all else is freed.
	var small, arrays []uint64
	for range 3 {
		small = append(small, take("cuMemAlloc_v2", 1792*1024))
		arrays = append(arrays, take("cuArrayCreate_v2", 256*1024))
	}
	enough("with all")
	if got, want := r.used(0), uint64(context300+8*MiB); got != want {
		t.Fatalf("the driver has given %d KiB: want %d, an array in each block", got/1024, want/1024)
	}
	b.read(t, 0) // the ceiling is higher now: more is bound than there is
	for _, id := range small {
		give(id)
		enough("with the arrays alone")
	}

	// Now up to the cap, with blocks and then with what holes there are.
	fill := func() {
		t.Helper()
		for _, bytes := range []int{2 * MiB, 1 * MiB, 256 * 1024, 512} {
			for f := (fields{}); f["result"] != "2"; {
				f = k.ask("took", "take cuMemAlloc_v2 %d 1000", bytes)
				if f["result"] != "0" && f["result"] != "2" {
					t.Fatalf("%q", k.said)
				}
			}
			if peak := r.peak(0); peak > limit {
				t.Fatalf("%d KiB over the cap with requests of %d bytes", (peak-limit)/1024, bytes)
			}
		}
		if used := r.used(0); used < limit-2*MiB {
			t.Errorf("%d KiB of %d were to be had", used/1024, limit/1024)
		}
	}
	fill()
	b.read(t, 0)
	for _, id := range arrays {
		give(id)
		fill()
	}

	// What the oldest call gives lies apart: no hole beside it serves others, and
	// the holes of others do not serve it.
	k.quit()
	k = b.tool(t, "probe", nil)
	take("cuMemAlloc", 256*1024)
	take("cuMemAlloc_v2", 256*1024)
	f := k.ask("took", "take cuMemAlloc_v2 %d 1000", 2*MiB)
	if f["result"] != "2" {
		t.Fatalf("%q", k.said)
	}
	k.ask("took", "take cuMemAlloc %d 1", 256*1024)
	fill()
	k.quit()
}
