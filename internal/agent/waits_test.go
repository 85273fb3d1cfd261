// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// fullDisk is a store where nothing can be written while there is an error; only the
// journal cannot where journal says so.
type fullDisk struct {
	Store
	journal bool
	err     atomic.Pointer[error]
}

func (d *fullDisk) set(err error) { d.err.Store(&err) }

func (d *fullDisk) fault() error {
	if err := d.err.Load(); err != nil {
		return *err
	}
	return nil
}

func (d *fullDisk) Save(doc state.Document) error {
	if err := d.fault(); err != nil && !d.journal {
		return err
	}
	return d.Store.Save(doc)
}

func (d *fullDisk) Append(c state.Allocation) error {
	if err := d.fault(); err != nil {
		return err
	}
	return d.Store.Append(c)
}

func (d *fullDisk) Keep(allocations []state.Allocation) error {
	if err := d.fault(); err != nil {
		return err
	}
	return d.Store.Keep(allocations)
}

// fullCDI is the CDI directory of a full disk.
type fullCDI struct {
	Files
	disk *fullDisk
}

func (d fullCDI) Write(key string, spec *specs.Spec) error {
	if err := d.disk.fault(); err != nil {
		return err
	}
	return d.Files.Write(key, spec)
}

// allocate has the kubelet give devices to a pod, without a container yet.
func (b *bench) allocate(pod, resource string, ids ...string) {
	b.t.Helper()
	if _, err := b.source(resource).Allocate(ids); err != nil {
		b.t.Fatal(err)
	}
	b.with(func() { // the kubelet has it, whatever comes
		b.holdings = append(b.holdings, node.Holding{Namespace: "ns", Pod: pod, Container: "c", Resource: resource, IDs: ids})
		b.made[cdi.Key(resource, ids)] = time.Now().Add(time.Nanosecond)
	})
}

// prepare is what the kubelet hears when it has waited for a container.
func (b *bench) prepare(resource string, ids ...string) error {
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	return b.front.Prepare(ctx, resource, ids)
}

// TestWaitingPodsAreToldWhatIs: where the state directory could not be written, a
// pod read that its instance was being made while nothing was begun. So it was in
// every state in which work is planned and not begun; and of what else keeps a gate
// shut a pod read nothing.
func TestWaitingPodsAreToldWhatIs(t *testing.T) {
	noSpace := errors.New("write /var/lib/gpu-agent/state.json: no space left on device; check free space and permissions there")
	unit0 := string(uuid(0)) + "::0"
	disk := func(b *bench, journal bool) func() {
		d := &fullDisk{Store: b.Agent.loop.journal.store, journal: journal}
		b.Agent.loop.journal.store, b.Agent.loop.gates.files = d, fullCDI{b.Agent.loop.gates.files, d}
		d.set(noSpace)
		return func() { d.set(nil) }
	}
	for _, c := range []struct {
		name string
		// mig says that the allocation is of 3g.40gb@0 on demand, behind an idle
		// 1g.10gb@1; else it is of a memory unit.
		mig bool
		// trouble is made after the allocation, or before it where it does not hold the
		// allocation up, and returns how it ends; nil where a new process has to.
		before, trouble func(b *bench) (over func())
		// want is in what the pod reads; outcome is the state of the node meanwhile,
		// "" for one that is as it was.
		want, outcome string
		node          string // in the node's message, where that is another than want
	}{
		{name: "state cannot be saved", mig: true, want: "state.json: no space left on device", outcome: "failed", before: func(b *bench) func() {
			return disk(b, false)
		}},
		{name: "journal cannot be written", mig: true, want: "state.json: no space left on device", outcome: "failed", before: func(b *bench) func() {
			return disk(b, true)
		}},
		{name: "CDI directory cannot be written", want: "no space left on device", outcome: "failed", before: func(b *bench) func() {
			return disk(b, false)
		}},
		{name: "driver hangs", mig: true, want: "the driver has not answered since", before: func(b *bench) func() {
			hang := make(chan struct{})
			b.with(func() { b.hang = hang })
			time.Sleep(inventoryEvery + 2*driverPatience)
			return func() {
				b.with(func() { b.hang = nil })
				close(hang)
			}
		}},
		{name: "driver let go", mig: true, want: "the driver was let go, since the node is cordoned", outcome: "pending", trouble: func(b *bench) func() {
			b.node(releaseLabels, true)
			return nil
		}},
		{name: "driver cannot be let go", mig: true, want: "the driver is to be let go, since the node is cordoned", outcome: "failed", node: "close: ", trouble: func(b *bench) func() {
			stuck(b)
			b.node(releaseLabels, true)
			return func() { b.node(nil, false) }
		}},
		{name: "GPU cannot be read", want: "GPU 0 (" + string(uuid(0)) + "): GPU is lost", trouble: func(b *bench) func() {
			b.with(func() { b.outside.inv.GPUs[0].Fault = "GPU is lost" })
			b.event <- gpu.Event{Kind: gpu.EventLost}
			synctest.Wait()
			return func() { b.with(func() { b.outside.inv.GPUs[0].Fault = "" }) }
		}},
		{name: "runtime silent", want: "whether its devices are free: ask the container runtime what runs: away", outcome: "failed", node: "ask the container runtime what runs: away", before: func(b *bench) func() {
			b.with(func() { b.runtimeErr = errors.New("away") })
			return func() { b.with(func() { b.runtimeErr = nil }) }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, file, resource, id := newOutside(1), allShared, memResource, unit0
				if c.mig {
					o, file, resource, id = migMachine(1, 0), migPartition(demand), large, migID(0, "3g.40gb@0")
				}
				if c.node == "" {
					c.node = c.want
				}
				b := start(t, o, t.TempDir(), file)
				if c.mig {
					b.hold("a", small, migID(0, "1g.10gb@1"))
					b.drop("a")
				}
				b.wantState("applied")
				var over func()
				if c.before != nil {
					over = c.before(b)
				}
				b.allocate("b", resource, id)
				if c.trouble != nil {
					over = c.trouble(b)
				}
				_ = b.prepare(resource, id) // so the kubelet does, and comes again
				time.Sleep(silentFor)
				err := b.prepare(resource, id)
				if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "is being made") {
					t.Errorf("the pod reads %v, want %q", err, c.want)
				}
				if c.outcome == "" {
					c.outcome = "applied"
				}
				b.wantState(c.outcome)
				if c.outcome == "failed" && !strings.Contains(b.message(), c.node) {
					t.Errorf("the node says %q, want %q", b.message(), c.node)
				}
				if over == nil {
					b.end()
					return
				}
				over()
				time.Sleep(2 * time.Minute)
				if err := b.prepare(resource, id); err != nil {
					t.Errorf("when it is over: %v", err)
				}
				b.wantState("applied")
				if m := b.message(); m != "" {
					t.Errorf("when it is over the node says %q", m)
				}
				b.end()
			})
		})
	}
}

// A process that starts tells a container that starts again with it what it waits
// for, and one that needs something destroyed that nobody has been asked yet.
func TestWaitingPodsAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := migMachine(1, 0), t.TempDir()
		b := start(t, o, dir, migPartition(demand))
		b.hold("a", small, migID(0, "1g.10gb@1"))
		b.drop("a")
		b.end()
		b.with(func() { b.runtimeErr = errors.New("it starts") })
		b = start(t, o, dir, migPartition(demand))
		b.allocate("b", large, migID(0, "3g.40gb@0"))
		want := "before the kubelet and the container runtime have said who holds what: ask the container runtime what runs: it starts"
		if err := b.prepare(large, migID(0, "3g.40gb@0")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the pod reads %v, want %q", err, want)
		}
		b.with(func() { b.runtimeErr = nil })
		time.Sleep(2 * holdersEvery)
		if err := b.prepare(large, migID(0, "3g.40gb@0")); err != nil {
			t.Error(err)
		}
		b.end()
		noDriver(b)
		b = start(t, o, dir, migPartition(demand))
		defer b.end()
		want = "has not read the driver yet; read the inventory: open"
		if err := b.prepare(large, migID(0, "3g.40gb@0")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the pod reads %v, want %q", err, want)
		}
	})
}

// Of two that wait for instances on one GPU the second read nothing.
func TestSecondWishIsToldOfTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.took = 40 * time.Second
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		d := &fullDisk{Store: b.Agent.loop.journal.store}
		d.set(errors.New("no space"))
		b.Agent.loop.journal.store = d
		b.allocate("a", small, migID(0, "1g.10gb@1"))
		b.allocate("b", large, migID(0, "3g.40gb@4"))
		_ = b.prepare(small, migID(0, "1g.10gb@1"))
		want := "3g.40gb@4 comes after other work on GPU 0"
		if err := b.prepare(large, migID(0, "3g.40gb@4")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the pod reads %v, want %q", err, want)
		}
	})
}
