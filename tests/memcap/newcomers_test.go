// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"fmt"
	"testing"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
)

// While an allocation's pages hold newcomers, a program that starts has nothing of the GPU. It goes on when
// the agent clears the bit, or when the allocation ends. A program that has a context goes on all the time.
func TestNewcomersAreHeld(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	for _, c := range []struct {
		name  string
		bytes uint64
		end   func(key string) error
	}{
		{"share", 4 * GiB, func(key string) error { return r.pages.SetControl(key, 0, lib.ControlHold|lib.ControlYield) }},
		{"whole", lib.None, func(key string) error {
			return r.pages.SetControl(key, lib.ControlYield, lib.ControlHold|lib.ControlYield)
		}},
		{"ended", 4 * GiB, r.pages.Remove},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := r.unread(t, c.name, []share{{gpu: 0, bytes: c.bytes, lends: true}}, false, nil)
			there := b.tool(t, "probe", nil)
			if f := there.ask("took", "take cuMemAlloc_v2 %d", 256*MiB); f["result"] != "0" {
				t.Fatalf("%q", there.said)
			}
			had := r.used(0)
			if err := r.pages.SetControl(c.name, lib.ControlHold, lib.ControlHold|lib.ControlYield); err != nil {
				t.Fatal(err)
			}
			k := b.tool(t, "probe", nil)
			if _, err := fmt.Fprintf(k.in, "take cuMemAlloc_v2 %d\n", 64*MiB); err != nil {
				t.Fatal(err)
			}
			held := func() int {
				n, err := r.pages.Newcomers(c.name)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			await(t, "a newcomer", func() bool { return held() == 1 }, func() any { return held() })
			if waits, err := r.pages.Waits(c.name); err != nil || waits != 1 {
				t.Errorf("the processes say that %d wait, %v", waits, err)
			}
			if f := there.ask("took", "take cuMemAlloc_v2 %d", 32*MiB); f["result"] != "0" {
				t.Errorf("the program at work: %q", there.said)
			}
			if got := r.used(0); got != had+32*MiB {
				t.Errorf("%d bytes in use, want %d: the newcomer has some", got, had+32*MiB)
			}
			if err := c.end(c.name); err != nil {
				t.Fatal(err)
			}
			if f := k.ask("took", ""); f["result"] != "0" && c.name != "ended" {
				t.Errorf("after the hold: %q", k.said)
			}
			k.quit()
			there.quit()
		})
	}
}
