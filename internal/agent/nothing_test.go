// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// ready is what GPUReady is now, with its message.
func (b *bench) ready() string {
	c, _ := readyCondition("example.com", b.loop.reporter.last(), time.Now().Add(2*silentFor))
	return string(c.Status) + " " + c.Reason + ": " + c.Message
}

// A GPU that offers nothing although it is to offer something is told of, with the reason,
// wherever the node tells how its GPUs are. The machine's GPUs have 4 GiB.
func TestNothingToOfferIsTold(t *testing.T) {
	untold := func(o *outside) {
		for i := range o.inv.GPUs {
			m := &o.inv.GPUs[i].MIG
			m.Profiles = slices.Clone(m.Profiles)
			for j := range m.Profiles {
				m.Profiles[j].Placements = nil
			}
		}
	}
	two := func() *outside { return newOutside(2) }
	for _, c := range []struct {
		name   string
		o      func() *outside
		change func(*outside)
		file   string
		state  string
		ready  string // how GPUReady begins
		why    string // in the message of both, and of the GPUNode
	}{
		{"a unit that is larger than the GPUs", two, func(o *outside) { o.unit = 16 * 1024 }, allShared, "invalid", "False PartitionUnfit: ", "it would offer no unit of memory"},
		{"no placement in MIG mode", func() *outside { return migMachine(2) }, untold, "version: v1\npartitions:\n  default:\n    - {devices: all, mode: mig}\n", "invalid", "False PartitionUnfit: ", "would offer nothing"},
		{"all switched off", two, nil, strings.ReplaceAll(allShared, "shared", "off"), "applied",
			"True NotOffered: offered: 0 of 2 GPUs; GPU 0: the node's partition does not offer it", ""},
		{"MIG without an instance", func() *outside { return migMachine(2, 0, 1) }, nil, "version: v1\npartitions:\n  default:\n    - {devices: all, mode: mig, geometry: {}}\n", "applied",
			"True NotOffered: offered: 0 of 2 GPUs; GPU 0: the node's partition does not offer it", ""},
		{"no partition for this node", two, nil, strings.ReplaceAll(allShared, "default", "other"), "pending", "False PartitionUnset: none of 2 GPUs", ""},
		{"all somebody else's", two, func(o *outside) {
			o.allocatable = map[string][]string{"nvidia.com/gpu": {string(uuid(0)), string(uuid(1))}}
		}, allWhole, "failed",
			"True OtherOwner: offered: 0 of 2 GPUs; GPU 0 (", "another device plugin"},
		{"one is off, and the other is too small", two, func(o *outside) { o.inv.GPUs[1].Memory, o.unit = 900, 1024 }, "version: v1\npartitions:\n  default:\n    - {devices: [0], mode: off}\n    - {devices: [1], mode: shared}\n", "invalid",
			"False PartitionUnfit: ", "it would offer no unit of memory"},
		{"one is switched off", two, nil, "version: v1\npartitions:\n  default:\n    - {devices: [0], mode: off}\n    - {devices: [1], mode: whole}\n", "applied",
			"True Offered: offered: 1 of 2 GPUs; GPU 0: the node's partition does not offer it", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := c.o()
				if c.change != nil {
					c.change(o)
				}
				b := start(t, o, t.TempDir(), c.file)
				defer b.end()
				time.Sleep(2 * silentFor)
				b.wantState(c.state)
				if m := b.message(); !strings.Contains(m, c.why) {
					t.Errorf("message %q, want one with %q", m, c.why)
				}
				ready := b.ready()
				if !strings.HasPrefix(ready, c.ready) || !strings.Contains(ready, c.why) {
					t.Errorf("GPUReady is %s, want %s… with %q", ready, c.ready, c.why)
				}
				b.with(func() {
					if last := b.readies[len(b.readies)-1]; !strings.HasPrefix(ready, last) {
						t.Errorf("the Node has GPUReady %s, want %s", last, ready)
					}
				})
				if g := b.GPUNode(gpunode.InPods).GPUs[0]; gpunode.Is(g.Conditions, gpunode.Available) || g.Total > 0 {
					t.Errorf("the GPUNode says of GPU 0: %+v", g)
				}
			})
		})
	}
}

// GPUReady counts the GPUs that pods can get something of. A healthy GPU that is cordoned, or withdrawn
// while its change waits for a pod, is none; one that is full is.
func TestReadyCountsWhatIsOffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		want := func(when, want string) {
			t.Helper()
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if got := b.ready(); !strings.HasPrefix(got, want) {
				t.Errorf("%s: GPUReady is %s, want %s", when, got, want)
			}
			word := strings.Join(strings.Fields(strings.ReplaceAll(want, ":", " "))[:2], " ")
			b.with(func() {
				if last := b.readies[len(b.readies)-1]; last != word {
					t.Errorf("%s: the Node has GPUReady %s, want %s", when, last, word)
				}
			})
		}
		cordon := func(which string) {
			b.SetNode(agentkube.Node{Annotations: map[string]string{"example.com/gpu.cordon": which}})
		}
		b.want("applied", fourUnits, "")
		want("all is well", "True Offered: offered: 2 of 2 GPUs")
		for i := range 4 {
			b.hold(fmt.Sprint("train-", i), memResource, fmt.Sprint(uuid(0), "::", i))
		}
		time.Sleep(holdersEvery)
		want("one is full", "True Offered: offered: 2 of 2 GPUs")
		cordon("1")
		want("one is cordoned", "True Offered: offered: 1 of 2 GPUs; GPU 1: an operator")
		cordon("all")
		want("both are", "True GPUCordoned: offered: 0 of 2 GPUs; GPU 0: an operator")
		cordon("")
		want("none is", "True Offered: offered: 2 of 2 GPUs")
		b.SetFile("p.yaml", []byte(allWhole))
		want("one waits for pods", "True Offered: offered: 1 of 2 GPUs; GPU 0 (")
		if got := b.ready(); !strings.Contains(got, "train-0") {
			t.Errorf("GPUReady is %s, want one that names a pod that GPU 0 waits for", got)
		}
		b.with(func() { b.outside.inv.GPUs[1].Fault, b.outside.inv.GPUs[1].Lost = "GPU is lost", true })
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(1), Xid: 79, GI: -1, CI: -1}
		want("the other is lost", "True HeldByPods: offered: 0 of 2 GPUs; GPU 0 (")
		if got := b.ready(); !strings.Contains(got, ", GPU 1: Xid 79") {
			t.Errorf("GPUReady is %s, want one that tells why GPU 1 is not offered", got)
		}
	})
}

// While GPUs are laid out anew the node stays ready: what they are to offer comes by itself.
func TestNodeStaysReadyWhileItsGPUsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1)
		o.took = 10 * time.Second
		b := start(t, o, t.TempDir(), allWhole)
		defer b.end()
		b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
		time.Sleep(15 * time.Second)
		if b.state() != "pending" {
			t.Fatalf("state %s while the GPU is changed", b.state())
		}
		time.Sleep(time.Minute)
		b.wantState("applied")
		b.wantReadies("the GPU was changed", "True Offered", "True GPUChange", "True Offered")
	})
}

// Work that is planned and cannot begin, since the driver does not answer, is not applied.
func TestWorkThatHasNotBegunIsPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, migMachine(1, 0), t.TempDir(), migPartition(sevenSmall))
		defer b.end()
		time.Sleep(time.Second)
		b.wantState("applied")
		hang := make(chan struct{})
		b.with(func() { b.hang = hang })
		time.Sleep(inventoryEvery + 2*driverPatience)
		b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
		b.wantState("pending")
		if m := b.message(); !strings.Contains(m, "create 3g.40gb@0") || !strings.Contains(m, "has not begun") {
			t.Errorf("message %q does not say what waits", m)
		}
		b.with(func() { b.hang = nil })
		close(hang)
		time.Sleep(10 * time.Minute)
		b.wantState("applied")
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
	})
}

// A GPU is shown in the units that it has, and without those of the layout before, which
// linger in the kubelet's list.
func TestUnitsAreShownAsTheyAre(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(2), t.TempDir()
		b := start(t, o, dir, allShared)
		b.hold("train-3", memResource, string(uuid(1))+"::3")
		b.end()
		shown := func(when, want string) {
			t.Helper()
			synctest.Wait()
			var text bytes.Buffer
			if err := status.WriteText(&text, b.Status(), status.TextOptions{Width: 120, ASCII: true}); err != nil {
				t.Fatal(err)
			}
			var got []string
			for line := range strings.Lines(text.String()) {
				if i := strings.Index(line, "  "); strings.Contains(line, " GiB") && strings.ContainsAny(line, "#.") && strings.Contains(line, "/") {
					got = append(got, strings.TrimSpace(strings.TrimLeft(line[i:], " #.x")))
				}
			}
			if text := strings.Join(got, "; "); text != want {
				t.Errorf("%s: %q, want %q", when, text, want)
			}
		}
		o.unit = 2 * 1024 // the next agent's --memory-unit
		b = start(t, o, dir, allShared)
		shown("a unit of 2 GiB, and a pod that holds one of 1 GiB", "0/4 GiB; 1/4 GiB, 0 free, 3 withdrawn")
		b.end()
		o.unit = 100 * 1024
		b = start(t, o, dir, allShared)
		defer b.end()
		b.wantState("invalid")
		shown("a unit that is larger than the GPUs", "0/4 GiB; 1/4 GiB")
		if g := b.Status().GPUs[0]; g.Total != 2 || gpu.MiB(g.UnitMiB) != 2*1024 {
			t.Errorf("GPU 0 has %d units of %d MiB", g.Total, g.UnitMiB)
		}
	})
}
