// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// edit changes a GPU's MIG side as somebody else's hand would.
func (b *bench) edit(i int, change func(m *gpu.MIG)) {
	b.with(func() {
		m := &b.outside.inv.GPUs[i].MIG
		m.Instances = slices.Clone(m.Instances)
		change(m)
	})
}

// An empty GPU instance of somebody else's is in the way of its own place too: no
// container could use it.
func TestForeignEmptyInstanceIsNotOnOffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.inv.GPUs[0].MIG.Instances = []gpu.Instance{{Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, GI: 2, CI: -1}}
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		b.wantHealth(large, migID(0, "3g.40gb@0"), "healthy")
		b.wantHealth(large, migID(0, "3g.40gb@4"), "unhealthy")
	})
}

// A container waits for a process that no allocation covers, and gets its instance soon
// after that has ended.
func TestWishBehindAProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		b.hold("a", small, migID(0, "1g.10gb@1"))
		b.drop("a")
		b.edit(0, func(m *gpu.MIG) { m.Instances[0].Busy = true }) // after the last reading
		src, id := b.source(large), migID(0, "3g.40gb@0")
		if _, err := src.Allocate([]string{id}); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- src.Prepare(t.Context(), []string{id}) }()
		time.Sleep(10 * time.Second)
		b.wantStanding(0, "1g.10gb@1")
		b.edit(0, func(m *gpu.MIG) { m.Instances[0].Busy = false })
		time.Sleep(10 * time.Second)
		b.wantStanding(0, "3g.40gb@0")
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Error("the container waits still")
		}
	})
}

// Somebody asks for MIG mode of a GPU that is whole: until a reset that is nothing
// to those who have it, nor to those who could.
func TestPendingModeOfAWholeGPU(t *testing.T) {
	for _, held := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			o := migMachine(1)
			o.ampere = true
			b := start(t, o, t.TempDir(), migPartition("{mode: whole}"))
			defer b.end()
			id := string(uuid(0))
			if held {
				b.hold("a", wholeResource, id)
			}
			o.with(func() { o.took = 5 * time.Second })
			on := true
			b.edit(0, func(m *gpu.MIG) { m.Pending = &on })
			for range 320 {
				time.Sleep(time.Second)
				if got := b.health(wholeResource, id); got != "healthy" {
					t.Errorf("held %v: the GPU is %q, state %s: %s", held, got, b.state(), b.message())
					break
				}
			}
		})
	}
}

// A process that starts while the driver is slow knows nothing of MIG yet: that is
// no fault of the file.
func TestSlowFirstReadingWithMIG(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := migMachine(1, 0), t.TempDir()
		b := start(t, o, dir, migPartition(sevenSmall))
		time.Sleep(time.Second)
		b.wantState("applied")
		b.end()
		o.with(func() { o.hang, o.events = make(chan struct{}), nil })
		b = start(t, o, dir, migPartition(sevenSmall))
		defer b.end()
		time.Sleep(3 * time.Second)
		if got := b.state(); got == "invalid" {
			t.Errorf("state %q: %s", got, b.message())
		}
		close(o.hang)
		b.with(func() { o.hang = nil })
		time.Sleep(time.Second)
		b.wantState("applied")
		if e := strings.Join(b.told(), "\n"); strings.Contains(e, "Invalid") {
			t.Errorf("events:\n%s", e)
		}
		if len(b.done()) != 7 {
			t.Errorf("done: %v", b.done())
		}
	})
}

// A holder of an instance on a GPU that has lost the mode, and is to be whole now:
// the state says that it is in the way.
func TestHolderOfAnInstanceOnAWholeGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1)
		id := migID(0, "1g.10gb@2")
		o.entries = []node.Entry{{PodUID: "uid-a", Container: "c", Resource: small, IDs: []string{id}}}
		b := start(t, o, t.TempDir(), migPartition("{mode: whole}"))
		defer b.end()
		time.Sleep(time.Second)
		b.wantState("blocked")
		o.with(func() { o.entries = nil })
		time.Sleep(deviceplugin.Grace + 2*holdersEvery)
		b.wantState("applied")
		b.wantHealth(wholeResource, string(uuid(0)), "healthy")
	})
}

// What was destroyed by somebody else's hand and made anew by it is theirs.
func TestMadeByAnotherHandInTheSamePlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		b.hold("a", small, migID(0, "1g.10gb@1"))
		b.drop("a")
		b.edit(0, func(m *gpu.MIG) { m.Instances = nil })
		time.Sleep(inventoryEvery + time.Minute)
		b.edit(0, func(m *gpu.MIG) {
			m.Instances = []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: 1, Size: 1}, GI: 77, UUID: "MIG-theirs"}}
		})
		time.Sleep(inventoryEvery + time.Minute)
		b.wantHealth(large, migID(0, "3g.40gb@0"), "unhealthy")
		b.wantHealth(small, migID(0, "1g.10gb@1"), "healthy")
	})
}

// An instance comes and goes; a GPU that cannot be read does not lose its own.
func TestUnreadableGPUKeepsItsInstances(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2, 0, 1)
		b := start(t, o, t.TempDir(), migPartition(sevenSmall, demand))
		defer b.end()
		time.Sleep(time.Second)
		b.hold("a", small, migID(0, "1g.10gb@3"))
		b.hold("b", small, migID(1, "1g.10gb@3"))
		b.drop("b")
		before := len(b.done())
		var was [2]gpu.MIG
		b.with(func() {
			for i := range o.inv.GPUs {
				was[i] = o.inv.GPUs[i].MIG
				o.inv.GPUs[i].MIG, o.inv.GPUs[i].Fault, o.inv.GPUs[i].Lost = gpu.MIG{}, "GPU is lost", true
			}
		})
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 79, GI: -1, CI: -1}
		time.Sleep(time.Minute)
		if got := b.state(); got == "invalid" {
			t.Errorf("state %q: %s", got, b.message())
		}
		b.wantHealth(small, migID(0, "1g.10gb@3"), "unhealthy")
		b.wantHealth(small, migID(0, "1g.10gb@2"), "unhealthy")
		if files := b.files(); len(files) != 0 {
			t.Errorf("a container could start on a faulty GPU: %v", files)
		}
		b.with(func() {
			for i := range o.inv.GPUs {
				o.inv.GPUs[i].MIG, o.inv.GPUs[i].Fault, o.inv.GPUs[i].Lost = was[i], "", false
			}
		})
		time.Sleep(inventoryEvery + 2*testHold)
		b.wantState("applied")
		b.wantHealth(small, migID(0, "1g.10gb@3"), "healthy")
		b.wantHealth(small, migID(0, "1g.10gb@2"), "healthy")
		b.wantHealth(large, migID(1, "3g.40gb@0"), "healthy") // what stands there is still the agent's
		if len(b.done()) != before {
			t.Errorf("done: %v", b.done()[before:])
		}
		if files := b.files(); len(files) != 1 {
			t.Errorf("files %v, want the allocation's again", files)
		}
	})
}

// meddler does something in the moment when the loop writes down what it is about
// to do.
type meddler struct {
	Store
	do func()
}

func (m *meddler) Save(doc state.Document) error {
	if do := m.do; do != nil {
		m.do = nil
		do()
	}
	return m.Store.Save(doc)
}

// A placement that does not stand is withdrawn like any other before its GPU is changed:
// a container that got it meanwhile would never start.
func TestFreePlacementsAreWithdrawnBeforeTheWork(t *testing.T) {
	for _, to := range []string{"{mode: whole}", "{mode: mig, geometry: {7g.80gb: 1}}"} {
		synctest.Test(t, func(t *testing.T) {
			o := migMachine(1, 0)
			b := start(t, o, t.TempDir(), migPartition(demand))
			defer b.end()
			src, late := b.source(small), false
			m := &meddler{Store: b.Agent.loop.journal.store}
			b.Agent.loop.journal.store = m
			m.do = func() {
				_, err := src.Allocate([]string{migID(0, "1g.10gb@3")})
				late = err == nil
			}
			b.SetFile("p.yaml", []byte(migPartition(to)))
			time.Sleep(time.Second)
			synctest.Wait()
			if late {
				t.Errorf("to %s: a placement was granted while its GPU was being changed; done: %v", to, b.done())
			}
			b.wantState("applied")
		})
	}
}

// The driver is let go when what is under way on a GPU has come to its end.
func TestDriverIsLetGoAfterTheWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2, 0, 1)
		o.took = time.Second
		b := start(t, o, t.TempDir(), migPartition(twoLarge, demand))
		defer b.end()
		time.Sleep(time.Second / 2)
		b.node(map[string]string{"nvidia.com/gpu-driver-upgrade-state": "drain-required"}, false)
		// Nothing is begun any more.
		src, id := b.source(small), migID(1, "1g.10gb@0")
		if _, err := src.Allocate([]string{id}); err == nil {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := src.Prepare(ctx, []string{id}); err == nil {
				t.Error("an instance was made while the driver is to be let go")
			}
		}
		letGo := func() (is bool) {
			synctest.Wait()
			b.with(func() { is = o.letGo })
			return is
		}
		if letGo() {
			t.Error("the driver was let go under the work")
		}
		time.Sleep(2 * time.Second)
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
		b.wantStanding(1, "")
		if !letGo() {
			t.Error("the driver was not let go after the work")
		}
	})
}

// What hits one instance is contained in it: the others of its GPU stay on offer.
func TestFaultOfOneInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2, 0, 1)
		b := start(t, o, t.TempDir(), migPartition(sevenSmall, demand))
		defer b.end()
		time.Sleep(time.Second)
		b.hold("a", small, migID(0, "1g.10gb@2"))
		b.hold("b", small, migID(1, "1g.10gb@5"))
		b.drop("b")
		number := func(i int, at int) (gi, ci int) {
			b.edit(i, func(m *gpu.MIG) {
				for _, in := range m.Instances {
					if in.Start == at {
						gi, ci = in.GI, in.CI
					}
				}
			})
			return gi, ci
		}
		for i, at := range []int{2, 5} {
			gi, ci := number(i, at)
			b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(i), Xid: 94, GI: gi, CI: ci}
		}
		b.wantHealth(small, migID(0, "1g.10gb@2"), "unhealthy")
		b.wantHealth(small, migID(0, "1g.10gb@1"), "healthy")
		b.wantHealth(small, migID(1, "1g.10gb@5"), "unhealthy")
		b.wantHealth(small, migID(1, "1g.10gb@0"), "healthy")
		// Whoever needs its room has it destroyed, and the fault with it.
		b.hold("c", large, migID(1, "3g.40gb@4"))
		b.wantStanding(1, "3g.40gb@4")
		b.drop("c")
		b.wantHealth(small, migID(1, "1g.10gb@5"), "healthy")
		time.Sleep(2 * testHold)
		b.wantHealth(small, migID(0, "1g.10gb@2"), "healthy")
	})
}

// A profile whose name nobody has seen yet is left out; the others may be had.
func TestUnknownProfile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		m := &o.inv.GPUs[0].MIG
		m.Profiles = append(m.Profiles, gpu.Profile{Name: "quarter of a card", ID: 99, Slices: 1, Max: 1})
		b := start(t, o, t.TempDir(), migPartition(twoLarge))
		defer b.end()
		time.Sleep(time.Second)
		b.wantState("applied")
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
	})
}

// Parts of a GPU instance are devices like others.
func TestSplits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		b := start(t, o, t.TempDir(), migPartition("{mode: mig, geometry: {1c.3g.40gb: 3, 3g.40gb: 1}}"))
		defer b.end()
		time.Sleep(time.Second)
		b.wantState("applied")
		b.wantStanding(0, "3g.40gb@0 1c.3g.40gb@4.0 1c.3g.40gb@4.1 1c.3g.40gb@4.2")
		const third = "example.com/mig-1c.3g.40gb"
		b.hold("a", third, migID(0, "1c.3g.40gb@4.1"))
		if data, err := os.ReadFile(b.files()[0]); err != nil || !strings.Contains(string(data), "gi2-ci1") {
			t.Errorf("the allocation's file has not its own compute instance: %v, %s", err, data)
		}
		time.Sleep(holdersEvery)
		b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
		time.Sleep(time.Second)
		b.wantState("blocked")
		b.wantHealth(third, migID(0, "1c.3g.40gb@4.0"), "unhealthy")
		b.wantHealth(third, migID(0, "1c.3g.40gb@4.1"), "leaving")
		b.wantHealth(large, migID(0, "3g.40gb@0"), "healthy")
		b.drop("a")
		b.wantState("applied")
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
		if slices.Contains(b.done(), "0: destroy 3g.40gb@0") {
			t.Errorf("what both have was destroyed: %v", b.done())
		}
	})
}

// A GPU on demand that is to go from the offer takes nobody new, where nothing
// stands too.
func TestOnDemandIsSwitchedOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2, 0, 1)
		b := start(t, o, t.TempDir(), migPartition(demand, demand))
		defer b.end()
		b.hold("a", small, migID(0, "1g.10gb@1"))
		b.hold("b", small, migID(1, "1g.10gb@1"))
		time.Sleep(holdersEvery)
		b.with(func() {
			b.allocatable = map[string][]string{"nvidia.com/gpu": {string(uuid(1))}}
		})
		b.SetFile("p.yaml", []byte(migPartition("{mode: off}", demand)))
		time.Sleep(othersEvery + time.Second)
		for i := range 2 {
			b.wantHealth(small, migID(i, "1g.10gb@1"), "leaving")
			b.wantHealth(small, migID(i, "1g.10gb@2"), "unhealthy")
			b.wantHealth(large, migID(i, "3g.40gb@4"), "unhealthy")
		}
	})
}

// What a container waits for is what is so now, and not what was so before.
func TestTroubleOfNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		b.hold("a", small, migID(0, "1g.10gb@1"))
		b.drop("a")
		b.edit(0, func(m *gpu.MIG) { m.Instances[0].Busy = true })
		src, id := b.source(large), migID(0, "3g.40gb@0")
		if _, err := src.Allocate([]string{id}); err != nil {
			t.Fatal(err)
		}
		b.with(func() { // the kubelet has it, whatever comes
			b.holdings = append(b.holdings, node.Holding{Namespace: "ns", Pod: "b", Container: "c", Resource: large, IDs: []string{id}})
			b.made[cdi.Key(large, []string{id})] = time.Now().Add(time.Nanosecond)
		})
		prepare := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			return src.Prepare(ctx, []string{id})
		}
		if err := prepare(); err == nil || !strings.Contains(err.Error(), "a process that no allocation covers (1g.10gb@1)") {
			t.Errorf("behind a process: %v", err)
		}
		b.edit(0, func(m *gpu.MIG) { m.Instances[0].Busy = false })
		b.with(func() { o.took = 40 * time.Second })
		if err := prepare(); err == nil || !strings.Contains(err.Error(), "create 3g.40gb@0") || strings.Contains(err.Error(), "process") {
			t.Errorf("while it is made: %v", err)
		}
		time.Sleep(2 * time.Minute)
		b.wantStanding(0, "3g.40gb@0")
	})
}

// A new agent takes nothing away before kubelet or runtime have said who holds what.
func TestNothingGoesBeforeTheWitnesses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := migMachine(1, 0), t.TempDir()
		b := start(t, o, cdiDir, migPartition(sevenSmall))
		time.Sleep(time.Second)
		b.wantStanding(0, allSmall)
		b.end()
		o.with(func() { o.runtimeErr = errors.New("the runtime starts") })
		b = start(t, o, cdiDir, migPartition(twoLarge))
		defer b.end()
		time.Sleep(20 * time.Second)
		b.wantStanding(0, allSmall)
		o.with(func() { o.runtimeErr = nil })
		time.Sleep(2 * holdersEvery)
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
		b.wantState("applied")
	})
}
