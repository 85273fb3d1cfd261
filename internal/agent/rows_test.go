// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/timeslice"
)

// lists watches what the kubelet is told.
type lists struct {
	*bench
	healthy map[string]time.Time // by resource and ID: when it was Healthy last
}

// look checks that no list outgrows a message, that the lists together have no more
// than there may be, and that nothing leaves a list before it was Unhealthy for a
// minute. It returns how many devices are Healthy, by resource.
func (l *lists) look() map[string]int {
	l.t.Helper()
	now, sum, count, listed := time.Now(), 0, map[string]int{}, map[string]bool{}
	for _, r := range l.front.Offer().Resources {
		sum += len(r.Devices)
		for i := range r.Devices {
			key := r.Name + " " + r.Devices[i].ID
			if listed[key] = true; r.Devices[i].Healthy {
				l.healthy[key] = now
				count[r.Name]++
			}
		}
	}
	if sum > timeslice.MaxListed+16 { // and whole GPUs
		l.t.Fatalf("the lists have %d devices", sum)
	}
	for key, last := range l.healthy {
		if !listed[key] {
			if now.Sub(last) < plan.Linger {
				l.t.Fatalf("%s left the list %s after it was Healthy", key, now.Sub(last))
			}
			delete(l.healthy, key)
		}
	}
	return count
}

// mostReplicas is what fits beside seven whole GPUs.
const mostReplicas = timeslice.MaxDevices - 7

// replicasOn is a partition with replicas on one GPU; the others are whole.
func replicasOn(gpu, of, n int) string {
	var rest []string
	for i := range of {
		if i != gpu {
			rest = append(rest, fmt.Sprint(i))
		}
	}
	return fmt.Sprintf("version: v1\npartitions:\n  default:\n    - {devices: [%d], mode: shared, replicas: %d}\n    - {devices: [%s], mode: whole}\n", gpu, n, strings.Join(rest, ", "))
}

// TestTooManyReplicasAreNotApplied: the kubelet was never told of 80,000 replicas, and
// the node said applied.
func TestTooManyReplicasAreNotApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(8), t.TempDir(), "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared, replicas: 4}\n")
		defer b.end()
		l := lists{b, map[string]time.Time{}}
		if got := l.look()[sharedResource]; got != 32 {
			t.Fatalf("%d replicas", got)
		}
		b.SetFile("p.yaml", []byte("version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared, replicas: 10000}\n"))
		synctest.Wait()
		if m := b.message(); b.state() != "invalid" || !strings.Contains(m, "p.yaml:4: ") || !strings.Contains(m, "gives this node 80000 devices") || !strings.Contains(m, "last good") {
			t.Errorf("%s: %s", b.state(), m)
		}
		if got := l.look()[sharedResource]; got != 32 {
			t.Errorf("%d replicas, want the 32 of the last good partition", got)
		}
	})
}

// TestEditsInARowFitTheLists: each edit moves as many replicas as there may be to
// another GPU, while those of the one before are still listed.
func TestEditsInARowFitTheLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gpus := 8
		if testing.Short() {
			gpus = 4 // make test-all has all
		}
		b := start(t, newOutside(gpus), t.TempDir(), replicasOn(0, gpus, mostReplicas))
		defer b.end()
		l := lists{b, map[string]time.Time{}}
		if l.look()[sharedResource] != mostReplicas {
			t.Fatalf("the first partition is not offered: %s: %s", b.state(), b.message())
		}
		b.SetFile("p.yaml", []byte(replicasOn(1, gpus, mostReplicas)))
		synctest.Wait()
		if got := l.look(); b.state() != "applied" || got[sharedResource] != mostReplicas || got[wholeResource] != gpus-1 {
			t.Fatalf("one edit is to be had at once, and is %s: %s (%v)", b.state(), b.message(), got)
		}
		for i := 2; i < gpus; i++ {
			time.Sleep(5 * time.Second)
			b.SetFile("p.yaml", []byte(replicasOn(i, gpus, mostReplicas)))
			synctest.Wait()
			l.look()
			if m := b.message(); b.state() != "pending" || !strings.Contains(m, fmt.Sprintf("GPU %d (%s) is withdrawn and waits", i, uuid(i))) {
				t.Fatalf("%s: %s", b.state(), m)
			}
		}
		for range 15 {
			time.Sleep(5 * time.Second)
			synctest.Wait()
			l.look()
		}
		if got := l.look(); b.state() != "applied" || got[sharedResource] != mostReplicas || got[wholeResource] != gpus-1 {
			t.Errorf("%s: %s (%v)", b.state(), b.message(), got)
		}
	})
}

// TestHeldCutsFitTheLists: GPUs that keep their many replicas for one holder each leave
// no room for as many on the next one.
func TestHeldCutsFitTheLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(3), t.TempDir(), "")
		defer b.end()
		l := lists{b, map[string]time.Time{}}
		for i := range 3 {
			b.SetFile("p.yaml", []byte(replicasOn(i, 3, mostReplicas)))
			synctest.Wait()
			l.look()
			if i < 2 {
				b.hold(fmt.Sprintf("pod-%d", i), sharedResource, timeslice.ID(uuid(i), 17))
			}
		}
		if m := b.message(); b.state() != "blocked" || !strings.Contains(m, "GPU 0") || !strings.Contains(m, "GPU 2 ("+string(uuid(2))+") is withdrawn and waits") {
			t.Errorf("%s: %s", b.state(), m)
		}
	})
}

// TestSuccessorRestoresTooMuch: a process that knew no bound left 480,000 devices; the
// one after it died of them before it had read the corrected file.
func TestSuccessorRestoresTooMuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := newOutside(8), t.TempDir()
		store, err := state.Open(filepath.Join(dir, "..", filepath.Base(dir)+"-state"), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		doc := state.Document{Boot: o.boot, GPUs: machine(8).GPUs}
		for i := range 8 {
			doc.Layouts = append(doc.Layouts, state.Layout{GPU: uuid(i), Past: plan.Past{Layout: plan.Layout{Division: piece.Division{Kind: piece.KindReplica, N: timeslice.MaxListed}}}},
				state.Layout{GPU: uuid(i), Past: plan.Past{Layout: plan.Layout{Division: piece.Division{Kind: piece.KindUnits, N: timeslice.MaxListed}}, Until: time.Now().Add(plan.Linger)}})
			// And a holder of the last device of each GPU.
			id := timeslice.ID(uuid(i), timeslice.MaxListed-1)
			if err := store.Append(state.Allocation{Key: cdi.Key(sharedResource, []string{id}), Record: recordFor(sharedResource, id), Allocated: time.Now()}); err != nil {
				t.Fatal(err)
			}
		}
		if err := store.Save(doc); err != nil {
			t.Fatal(err)
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
		b := start(t, o, dir, "")
		defer b.end()
		l := lists{b, map[string]time.Time{}}
		l.look()
		if n := b.lines("leave out a layout that a GPU had"); n != 15 {
			t.Errorf("%d lines tell what was left out", n)
		}
		for i := range 8 { // what is held stays listed for its holder
			id := timeslice.ID(uuid(i), timeslice.MaxListed-1)
			if dev := b.device(sharedResource, id); dev == nil || !dev.Healthy {
				t.Errorf("%s is listed as %+v", id, dev)
			}
		}
		b.SetFile("p.yaml", []byte("version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared, replicas: 4}\n"))
		for range 10 {
			time.Sleep(10 * time.Second)
			synctest.Wait()
			l.look()
		}
		if got := l.look(); b.state() != "applied" || got[sharedResource] != 32 {
			t.Errorf("%s: %s (%v)", b.state(), b.message(), got)
		}
	})
}

// device is what the kubelet is told of one.
func (b *bench) device(resource, id string) *deviceplugin.Device {
	for _, r := range b.front.Offer().Resources {
		for i := range r.Devices {
			if r.Name == resource && r.Devices[i].ID == id {
				return &r.Devices[i]
			}
		}
	}
	return nil
}

// TestEndedAllocationLingersAlone: what an allocation had beyond its GPU's layout is listed for a
// minute, and nothing else with it.
func TestEndedAllocationLingersAlone(t *testing.T) {
	a := New(Options{ResourceDomain: "example.com", Log: slog.New(slog.DiscardHandler)}, Worlds{})
	a.loop.reader.inv = machine(1)
	a.loop.layouts.now[uuid(0)] = plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 4, Unit: 1024}}
	ids := []string{timeslice.ID(uuid(0), 2), timeslice.ID(uuid(0), 29_999)}
	a.loop.layouts.linger(&ledger.Allocation{Resource: memResource, Grants: grantsOf(memResource, ids...)})
	got := a.loop.layouts.past[uuid(0)]
	if len(got) != 1 || fmt.Sprint(deviceplugin.DivisionIDs(got[0].Division, uuid(0))) != fmt.Sprint(ids[1:]) {
		t.Errorf("%+v lingers", got)
	}
}
