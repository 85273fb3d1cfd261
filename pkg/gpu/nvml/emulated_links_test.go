// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"fmt"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/emulator"
)

// links says how many lanes each GPU has to which peer.
func links(inv gpu.Inventory) string {
	var all []string
	for _, dev := range inv.GPUs {
		s := fmt.Sprintf("%d:", dev.Index)
		for _, l := range dev.Links {
			to := fmt.Sprint(l.To)
			if l.Switch {
				to = "switch"
			}
			s += fmt.Sprintf(" %d to %s", l.NVLink, to)
		}
		all = append(all, s)
	}
	return fmt.Sprint(all)
}

// A link fails and returns while the driver is open, on a driver that tells all
// states at once and on one that has no field values: there each link is asked for
// its state, and nothing tells speeds.
func TestLinksOfTheWorldFailAndReturn(t *testing.T) {
	for _, c := range []struct {
		name string
		code emulator.Return
		mbps int
	}{{"all at once", emulator.Success, 25000}, {"one by one", emulator.NotSupported, 0}} {
		t.Run(c.name, func(t *testing.T) {
			n := emulate(t, emulator.Spec{Topology: "hgx-h100-4", Count: 3, NVLink: "mesh", Model: "A100-SXM4-80GB"})
			if c.code != emulator.Success {
				try(t, n.Inject(emulator.Fault{Call: "nvmlDeviceGetFieldValues", Code: c.code}))
			}
			d := open(t, n)
			changedBefore := false // nothing was read before
			expect := func(want string) {
				t.Helper()
				if changed, err := d.LinksChanged(wait(t)); err != nil || changed != changedBefore {
					t.Errorf("changed: %v, %v; want %v before %s", changed, err, changedBefore, want)
				}
				inv := inventory(t, d)
				changedBefore = true
				if changed, err := d.LinksChanged(wait(t)); err != nil || changed {
					t.Errorf("changed: %v, %v, after all was read", changed, err)
				}
				if got := links(inv); got != want {
					t.Errorf("links %s, want %s", got, want)
				}
				for _, dev := range inv.GPUs {
					for _, l := range dev.Links {
						if dev.Fault != "" || l.Version != 3 || l.LaneMBps != c.mbps {
							t.Errorf("GPU %d: %q, %+v", dev.Index, dev.Fault, l)
						}
					}
				}
			}
			const whole = "[0: 6 to 1 6 to 2 1: 6 to 0 6 to 2 2: 6 to 0 6 to 1]"
			expect(whole)
			try(t, n.SetLink(0, 0, false)) // the first of those to GPU 1
			expect("[0: 5 to 1 6 to 2 1: 5 to 0 6 to 2 2: 6 to 0 6 to 1]")
			try(t, n.SetLink(2, -1, false))
			expect("[0: 5 to 1 1: 5 to 0 2:]")
			try(t, n.SetLink(0, 0, true))
			try(t, n.SetLink(2, -1, true))
			expect(whole)
		})
	}
}

// A GPU with NVLinks costs two calls more at each reading than one without, however
// many links there are; the first reading may cost more.
func TestReadingLinksIsCheap(t *testing.T) {
	looks := 0
	calls := func(spec emulator.Spec) int {
		n := emulate(t, spec)
		defer n.stop()
		d := open(t, n)
		inventory(t, d)
		before := n.allCalls()
		inventory(t, d)
		calls := n.allCalls() - before
		if _, err := d.LinksChanged(wait(t)); err != nil {
			t.Error(err)
		}
		looks = n.allCalls() - before - calls
		try(t, d.Close())
		return calls
	}
	without := calls(emulator.Spec{Topology: "dgx-h100", NVLink: "none", Model: "RTX-PRO-6000"})
	with := calls(emulator.Spec{Topology: "dgx-h100"})
	t.Logf("8 GPUs: %d calls without NVLinks, %d with", without, with)
	if looks > 3*8 {
		t.Errorf("a look at the links of 8 GPUs takes %d calls", looks)
	}
	if with > without+2*8 {
		t.Errorf("a reading of 8 GPUs takes %d calls, and %d without NVLinks", with, without)
	}
}
