// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"testing"
	"time"
)

// TestHostilePages: forty containers whose counters cost 50 ms at each look, or are
// nonsense that costs as much. What all of them cost is bounded, and a neighbour's
// counters are read at every look.
func TestHostilePages(t *testing.T) {
	const hostile, each = 40, 50 * time.Millisecond
	for name, broken := range map[string]bool{"slow": false, "nonsense": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			var bad []*meter
			for i := range hostile {
				id := fmt.Sprintf("bad-%d", i)
				w.container(id, []int{100 + i}, gib, gpu0)
				m := &meter{w: w, cost: each, broken: broken}
				w.pages[id+string(gpu0)] = m
				bad = append(bad, m)
				w.uses(100+i, gpu0, gib)
			}
			w.container("honest", []int{10}, gib, gpu0)
			good := &meter{w: w}
			w.pages["honest"+string(gpu0)] = good
			w.uses(10, gpu0, gib)
			watch(t, w, Options{}, func(_ *Guard, pass func(time.Duration)) {
				read := func() (looks int) {
					for _, m := range bad {
						looks += m.begun + m.ended
					}
					return looks
				}
				pass(time.Minute)
				// Two looks at a page a quarter of a second: one reading, at worst.
				if n := read(); n > 2*4*60+2*hostile {
					t.Errorf("in a minute the hostile pages were looked at %d times, of %v each", n, each)
				}
				before, goodBefore := read(), good.ended
				pass(time.Minute)
				if n := read() - before; n > 2*4*60 {
					t.Errorf("in the second minute they were looked at %d times", n)
				}
				if n := good.ended - goodBefore; n < 4*60-2 {
					t.Errorf("the neighbour's were read %d times in a minute, want at each look", n)
				}
				if w.costly > 1 {
					t.Errorf("in one look %d of them were begun, want one", w.costly)
				}
				for i, m := range bad {
					if m.begun == 0 {
						t.Errorf("those of container %d were never read", i)
					}
				}
			})
		})
	}
}

// TestOwnMountOverUsage: a process that mounts a file system of its own over the
// counters' folder has others there, and by them the whole cap once more. The
// counters that the watchdog reads are exact and within the cap; it goes by the
// driver's figure.
func TestOwnMountOverUsage(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10, 11}, 4*gib, gpu0)
	w.container("b", []int{20}, 4*gib, gpu0)
	for _, id := range []string{"a", "b"} {
		w.pages[id+string(gpu0)] = &meter{w: w, quiet: true}
	}
	w.uses(10, gpu0, 4*gib)
	w.uses(20, gpu0, 4*gib)
	watch(t, w, Options{}, func(_ *Guard, pass func(time.Duration)) {
		pass(10 * time.Second)
		if len(w.ended) != 0 {
			t.Fatalf("ended %v", w.ended)
		}
		w.uses(11, gpu0, 4*gib) // counted where nobody looks
		pass(time.Second)
		if len(w.ended) != 1 || w.ended[0] != "a" {
			t.Errorf("ended %v, want the one with its cap twice", w.ended)
		}
	})
}
