// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/cdi/dir"
	"example.com/gpu-agent/pkg/gpu"
)

// A restart of the agent on a GPU with a replica in use, whose partition arrives
// after the first round, changes nothing.
func TestReplicasSurviveARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(1), t.TempDir()
		file := allShared + "      replicas: 4\n"
		b := start(t, o, cdiDir, file)
		b.hold("p", sharedResource, string(uuid(0))+"::1")
		before := listed(b.front.Offer(), sharedResource)
		b.end()

		b = start(t, o, cdiDir, "") // the ConfigMap is a moment away
		defer b.end()
		if got := listed(b.front.Offer(), sharedResource); got != before {
			t.Errorf("without the partition: replicas %s, want %s as before", got, before)
		}
		b.SetFile("p.yaml", []byte(file))
		synctest.Wait()
		if got := listed(b.front.Offer(), sharedResource); got != before || b.state() != "applied" {
			t.Errorf("state %s (%s), replicas %s, want %s", b.state(), b.message(), got, before)
		}
	})
}

// The same with memory units: the idle ones of a held GPU stay on offer while the
// partition is not there yet.
func TestRestartKeepsOffering(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(1), t.TempDir()
		b := start(t, o, cdiDir, allShared)
		b.hold("p", memResource, string(uuid(0))+"::1")
		b.end()
		b = start(t, o, cdiDir, "")
		defer b.end()
		if got := listed(b.front.Offer(), memResource); got != "0.0 0.1 0.2 0.3" {
			t.Errorf("without the partition: %s", got)
		}
	})
}

// A GPU's failure takes the CDI files of its allocations away. What the containers on it
// have is known all the same, also to the next process, and where nobody else can say
// it: their pods were deleted by force, and they hang.
func TestHangingContainerOnAFaultyGPUIsNotForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(2), t.TempDir()
		b := start(t, o, cdiDir, allShared)
		ids := []string{string(uuid(0)) + "::1", string(uuid(0)) + "::2"}
		key := cdi.Key(memResource, ids)
		b.hold("p", memResource, ids...)
		time.Sleep(2 * holdersEvery)
		b.with(func() {
			b.old = []node.Container{{ID: "pc", PodUID: "uid-p", Namespace: "ns", Pod: "p", Name: "c", Running: true, Created: b.made[key],
				Annotations: map[string]string{cdi.AnnotationName("example.com", key): memResource}}}
			b.holdings = nil
			b.outside.inv = machine(2)
			b.outside.inv.GPUs[0].Fault, b.outside.inv.GPUs[0].Lost = "GPU is lost", true
		})
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 79, GI: -1, CI: -1}
		time.Sleep(2 * deviceplugin.Grace)
		if n := len(b.files()); n != 0 || len(b.Allocations()) != 1 {
			t.Fatalf("%d files and %d allocations, want the allocation alone", n, len(b.Allocations()))
		}
		b.end()

		o.with(func() { o.inv = machine(2) })
		b = start(t, o, cdiDir, allWhole)
		defer b.end()
		time.Sleep(2 * plan.Linger)
		b.want("blocked", "0.0x 0.1~ 0.2~ 0.3x", "1")
		b.with(func() { b.old = nil })
		time.Sleep(2 * plan.Linger)
		b.want("applied", "", "0 1")
	})
}

// An ID that a pod has does not leave the list, also where its GPU is gone, the agent
// starts anew and its state file is lost: the kubelet would not survive it.
func TestHeldIDsOfAnUnknownGPUStayListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		b := start(t, o, t.TempDir(), allShared)
		b.hold("p", memResource, string(uuid(1))+"::1", string(uuid(1))+"::2")
		b.end()
		o.with(func() { o.inv = machine(1) })
		b = start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("applied", "0.0 0.1 0.2 0.3 1.1x 1.2x", "")
		time.Sleep(2 * plan.Linger)
		b.want("applied", "0.0 0.1 0.2 0.3 1.1x 1.2x", "")
		o.with(func() { o.holdings = nil })
		time.Sleep(2 * plan.Linger)
		b.want("applied", "0.0 0.1 0.2 0.3", "")
	})
}

// A CDI directory that somebody cleaned is filled again.
func TestWipedCDIDirectory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		ids := []string{string(uuid(0)) + "::1"}
		b.hold("p", memResource, ids...)
		for _, f := range b.files() {
			if err := os.Remove(f); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(10 * time.Minute)
		if err := b.source(memResource).Prepare(t.Context(), ids); err != nil {
			t.Error(err)
		}
		if len(b.files()) != 1 {
			t.Errorf("PreStartContainer succeeds and the file is not there")
		}
	})
}

// The files of running containers stand while a new process has not read the
// hardware yet.
func TestSlowDriverAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(1), t.TempDir()
		b := start(t, o, cdiDir, allShared)
		b.hold("p", memResource, string(uuid(0))+"::1")
		time.Sleep(2 * holdersEvery)
		b.end()
		hang := make(chan struct{})
		b.with(func() { b.hang = hang })
		b = start(t, o, cdiDir, allShared)
		defer b.end()
		time.Sleep(3 * time.Second)
		if len(b.files()) != 1 {
			t.Errorf("the driver takes 3 s, and the allocation's file was taken away: the container cannot restart")
		}
		b.with(func() { b.hang = nil })
		close(hang)
		time.Sleep(time.Minute)
	})
}

// Other resource names for new pods leave those of running pods alone.
func TestResourceDomainChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(1), t.TempDir()
		b := start(t, o, cdiDir, allShared)
		b.hold("p", memResource, string(uuid(0))+"::1")
		time.Sleep(2 * holdersEvery)
		b.end()

		files, err := dir.Open(cdiDir, "example.com")
		if err != nil {
			t.Fatal(err)
		}
		store, err := state.Open(filepath.Join(cdiDir, "..", filepath.Base(cdiDir)+"-state"), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		a := New(Options{
			Domain: "example.com", ResourceDomain: "nvidia.com", MemoryUnit: unit, Pod: ownPod, Boot: "this",
			Health: health.Options{Ignored: health.DefaultIgnored, Hold: testHold, Probe: testHold / 4},
			Log:    slog.New(slog.NewTextHandler(&log, nil)),
		}, Worlds{Driver: o, Files: files, Caps: o.caps, Kubelet: o, Runtime: runtime{o}, Plugins: plugins{o}, Store: store, Observer: o})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		a.SetFile("p.yaml", []byte(allWhole))
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if len(b.files()) != 1 {
			t.Errorf("the file of a running container's allocation is gone")
		}
		if len(a.Allocations()) != 1 {
			t.Errorf("%d allocations while a container runs with one", len(a.Allocations()))
		}
		if got := listed(a.front.Offer(), "nvidia.com/gpu"); got != "" {
			t.Errorf("offered as a whole beside a pod with a part of it: %s", got)
		}
		cancel()
		<-done
		store.Close()
	})
}

// A GPU that a pod has by another device plugin is not free when that plugin
// restarts or calls it unhealthy.
func TestOtherPluginRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.allocatable = map[string][]string{"nvidia.com/gpu": {string(uuid(0))}}
		o.holdings = []node.Holding{{Namespace: "ns", Pod: "theirs", Container: "c", Resource: "nvidia.com/gpu", IDs: []string{string(uuid(0))}}}
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("failed", "1.0 1.1 1.2 1.3", "")
		b.with(func() { b.allocatable = nil }) // GetAllocatableResources has healthy devices only
		time.Sleep(othersEvery + holdersEvery)
		synctest.Wait()
		if got := listed(b.front.Offer(), memResource); got != "1.0 1.1 1.2 1.3" {
			t.Errorf("GPU 0 is offered while ns/theirs has it: %s", got)
		}
	})
}

// aging is a refusal as the driver's door words it.
type aging struct{ since time.Time }

func (a aging) Error() string {
	return fmt.Sprintf("read the inventory: the call to read the inventory began %s ago and has not returned", time.Since(a.since).Round(time.Millisecond))
}
func (a aging) Unwrap() error { return gpu.ErrTimeout }

// A driver that hangs is told once.
func TestHangIsToldOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		b.with(func() { b.err = aging{time.Now()} })
		time.Sleep(20 * time.Minute)
		synctest.Wait()
		b.with(func() {
			if n := len(b.events); n > 3 {
				t.Errorf("%d Events in 20 minutes; the last: %s", n, b.events[n-1])
			}
		})
	})
}

// A pod that ended is let go although a new pod has its name.
func TestSameNameAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		b.hold("web-0", memResource, string(uuid(0))+"::1")
		b.writesOnResend(ctx, memResource)
		time.Sleep(2 * holdersEvery)
		b.release("web-0")
		b.with(func() { b.pods = append(b.pods, workload.Pod{Namespace: "ns", Name: "web-0"}) }) // with no GPU now
		time.Sleep(time.Hour)
		synctest.Wait()
		if c := b.Allocations(); len(c) != 0 {
			t.Errorf("an hour after its end: %+v", c)
		}
	})
}

// An allocation of which only the journal knows, and nobody when it was allocated, stays in
// the journal while there is no driver for its file to be written from.
func TestAllocationWithoutAFileStaysInTheJournal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(2), t.TempDir()
		b := start(t, o, cdiDir, allShared)
		b.hold("q", memResource, string(uuid(1))+"::0")
		time.Sleep(2 * holdersEvery)
		b.end()

		store, err := state.Open(filepath.Join(cdiDir, "..", filepath.Base(cdiDir)+"-state"), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ids := []string{string(uuid(0)) + "::1"}
		key := cdi.Key(memResource, ids)
		if err := store.Append(state.Allocation{Key: key, Record: recordFor(memResource, ids...)}); err != nil {
			t.Fatal(err)
		}
		store.Close()
		o.with(func() {
			o.err = fmt.Errorf("open: %w", gpu.ErrNoDriver)
			// Its pod was deleted by force: the kubelet says nothing of it.
			o.old = []node.Container{{ID: "pc", PodUID: "uid-p", Namespace: "ns", Pod: "p", Name: "c", Running: true,
				Annotations: map[string]string{cdi.AnnotationName("example.com", key): memResource}}}
		})
		b = start(t, o, cdiDir, allShared)
		time.Sleep(2 * holdersEvery)
		b.with(func() { b.holdings = nil }) // the journal is replaced when an allocation ends
		time.Sleep(2 * deviceplugin.Grace)
		if c := b.Allocations(); len(c) != 1 || c[0].ID != key || len(b.files()) != 0 {
			t.Fatalf("%d allocations and the files %v, want the allocation of the container that hangs", len(c), b.files())
		}
		b.end()

		b = start(t, o, cdiDir, allShared)
		defer b.end()
		if c := b.Allocations(); len(c) != 1 || c[0].ID != key {
			t.Errorf("the next process knows of %d allocations, want that of the container that hangs", len(c))
		}
	})
}

// A newer version gave out memory through a front-end that this one does not know. Its GPU is given
// to nobody, and the node says why.
func TestAllocationOfAnUnknownFrontEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cdiDir := t.TempDir()
		store, err := state.Open(filepath.Join(cdiDir, "..", filepath.Base(cdiDir)+"-state"), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		r, err := ledger.ReadRecord(fmt.Sprintf(
			`{"frontEnd":"pager","resource":"example.com/gpu-mem","grants":[{"gpu":%q,"kind":"units","units":"1-2"}]}`, uuid(0)))
		if err == nil {
			err = store.Append(state.Allocation{Key: "k", Record: r, Allocated: time.Now().Add(-time.Minute)})
		}
		if err != nil {
			t.Fatal(err)
		}
		store.Close()
		b := start(t, newOutside(2), cdiDir, allShared)
		time.Sleep(2*deviceplugin.Grace + 2*holdersEvery)
		if a := b.Allocations(); len(a) != 1 || a[0].ID != "k" || a[0].Owner != "pager" {
			t.Errorf("allocations %+v", a)
		}
		if got := listed(b.front.Offer(), memResource); got != "1.0 1.1 1.2 1.3" {
			t.Errorf("on offer: %s, want the other GPU's units alone", got)
		}
		if log := b.log.String(); strings.Count(log, "front_end=pager") != 1 {
			t.Errorf("the log has\n%s", log)
		}
		if b.state() != "blocked" || !strings.Contains(b.message(), "api: pager") {
			t.Errorf("the node is %s: %s", b.state(), b.message())
		}
		b.end()
	})
}

// A newer version gave out a piece of a kind that this one does not know, before somebody went
// back to this one. The GPU is given to nobody while the piece's container runs, and the node
// says so; a restart changes nothing of that, and the container's end ends it.
func TestAllocationOfAnUnknownKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cdiDir := t.TempDir()
		store, err := state.Open(filepath.Join(cdiDir, "..", filepath.Base(cdiDir)+"-state"), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		var r ledger.Record
		text := fmt.Sprintf(`{"frontEnd":"device-plugin","resource":"example.com/gpu-slot","grants":[{"gpu":%q,"kind":"slot","slot":3,"cap":1073741824}]}`, uuid(0))
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatal(err)
		}
		key := cdi.Key("example.com/gpu-slot", []string{"GPU-slot-3"})
		if err := store.Append(state.Allocation{Key: key, Record: r, Allocated: time.Now().Add(-time.Minute)}); err != nil {
			t.Fatal(err)
		}
		store.Close()
		o := newOutside(2)
		o.old = []node.Container{{ID: "pc", PodUID: "uid-p", Namespace: "ns", Pod: "p", Name: "c", Running: true,
			Annotations: map[string]string{cdi.AnnotationName("example.com", key): "example.com/gpu-slot"}}}
		var b *bench
		for range 2 {
			b = start(t, o, cdiDir, allShared)
			time.Sleep(2*deviceplugin.Grace + 2*holdersEvery)
			if got := listed(b.front.Offer(), memResource); got != "1.0 1.1 1.2 1.3" {
				t.Errorf("on offer: %s, want the other GPU's units alone", got)
			}
			if m := b.message(); b.state() != "failed" || !strings.Contains(m, string(uuid(0))) || !strings.Contains(m, piece.UnknownKind{Word: "slot"}.Error()) {
				t.Errorf("the node is %s: %s", b.state(), m)
			}
			allocations := b.Allocations()
			if len(allocations) != 1 || allocations[0].ID != key {
				t.Fatalf("allocations %+v", allocations)
			}
			if again, err := json.Marshal(allocations[0].Record()); err != nil || string(again) != text {
				t.Errorf("its record is %s, %v; want %s", again, err, text)
			}
			b.end()
		}
		o.with(func() { o.old = nil })
		b = start(t, o, cdiDir, allShared)
		defer b.end()
		time.Sleep(2*deviceplugin.Grace + 2*holdersEvery)
		if got := listed(b.front.Offer(), memResource); got != "0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3" || b.state() != "applied" {
			t.Errorf("after its end: %s, and the node is %s: %s", got, b.state(), b.message())
		}
	})
}

// An allocation ends also where the clock was put back between two processes.
func TestClockPutBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cdiDir := t.TempDir()
		store, err := state.Open(filepath.Join(cdiDir, "..", filepath.Base(cdiDir)+"-state"), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ids := []string{string(uuid(0)) + "::1"}
		if err := store.Append(state.Allocation{Key: cdi.Key(memResource, ids), Record: recordFor(memResource, ids...), Allocated: time.Now().Add(24 * time.Hour)}); err != nil {
			t.Fatal(err)
		}
		store.Close()
		b := start(t, newOutside(1), cdiDir, allShared)
		defer b.end()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := b.source(memResource).Prepare(ctx, ids); err != nil {
			t.Errorf("its container cannot start: %v", err)
		}
		time.Sleep(time.Hour)
		if n := len(b.Allocations()); n != 0 {
			t.Errorf("%d allocations that nobody has", n)
		}
	})
}

// A driver that comes back is seen within seconds, however long it was away.
func TestDriverComesAfterLong(t *testing.T) {
	for after := 5 * time.Minute; after < 5*time.Minute+backOffMax; after += 5 * time.Second {
		synctest.Test(t, func(t *testing.T) {
			o := newOutside(1)
			o.err = fmt.Errorf("open: %w", gpu.ErrNoDriver)
			b := start(t, o, t.TempDir(), allShared)
			defer b.end()
			time.Sleep(after)
			b.with(func() { b.err = nil })
			time.Sleep(2 * readPauseMax)
			b.want("applied", "0.0 0.1 0.2 0.3", "")
		})
	}
}

// A driver that was loaded again has lost its time slices.
func TestTimeSlicesAfterReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(1), t.TempDir()
		short := allShared + "      timeSlice: short\n"
		b := start(t, o, cdiDir, short)
		b.want("applied", "0.0 0.1 0.2 0.3", "")
		b.end()
		clear(o.slices) // loaded again
		b = start(t, o, cdiDir, short)
		defer b.end()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if got := o.slices[uuid(0)]; got != gpu.TimeSliceShort {
			t.Errorf("slice %q and state %s", got, b.state())
		}
	})
}

// Where nothing can be given out, the node says so.
func TestPartsTimeOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.partsErr = fmt.Errorf("list the driver's parts: %w", gpu.ErrTimeout)
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		if got := listed(b.front.Offer(), memResource); strings.Contains(got, "x") && b.state() == "applied" {
			t.Errorf("state applied and nothing on offer: %s", got)
		}
		b.with(func() { b.outside.partsErr = nil })
		time.Sleep(2 * readPauseMax)
		b.want("applied", "0.0 0.1 0.2 0.3", "")
	})
}

// A container that is older than its allocation by the clock, which was put back
// between Allocate and the container's start, is not its own previous holder.
func TestClockPutBackBetween(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(1), t.TempDir()
		b := start(t, o, cdiDir, allShared)
		ids := []string{string(uuid(0)) + "::1"}
		b.hold("p", memResource, ids...)
		b.with(func() { b.made[cdi.Key(memResource, ids)] = time.Now().Add(-time.Hour) })
		time.Sleep(2 * holdersEvery)
		b.end()
		b = start(t, o, cdiDir, allShared)
		defer b.end()
		time.Sleep(time.Minute)
		if c := b.Allocations(); len(c) != 1 || c[0].After != "" || len(b.files()) != 1 {
			t.Errorf("allocations %+v, files %v", c, b.files())
		}
	})
}

// What Status reads belongs to nobody else (run with -race).
func TestStatusBesideChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range 600 {
				b.Status()
				time.Sleep(time.Second)
			}
		}()
		for _, file := range []string{allWhole, allShared} {
			b.with(func() { b.outside.inv.GPUs[1].Fault, b.outside.inv.GPUs[1].Gone = "not listed", true })
			b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
			b.SetFile("p.yaml", []byte(file))
			time.Sleep(2 * time.Minute)
			b.with(func() { b.outside.inv = machine(2) })
			b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
			time.Sleep(2 * time.Minute)
		}
		<-done
	})
}

// A GPU that falls off the bus moves no other: the driver numbers those that are
// left anew, and they stay laid out as they are, over a restart of the agent too.
func TestIndicesMove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const file = "version: v1\npartitions:\n  default:\n    - devices: [0]\n      mode: whole\n    - devices: [1, 2]\n      mode: shared\n"
		o, cdiDir := newOutside(3), t.TempDir()
		b := start(t, o, cdiDir, file)
		const units = "1.0 1.1 1.2 1.3 2.0 2.1 2.2 2.3"
		b.want("applied", units, "0")
		b.with(func() {
			left := slices.Clone(b.outside.inv.GPUs[1:])
			for i := range left {
				left[i].Index = i
			}
			b.outside.inv = &gpu.Inventory{Driver: "580.1", GPUs: left}
		})
		b.event <- gpu.Event{Kind: gpu.EventChanged, GI: -1, CI: -1}
		synctest.Wait()
		if got := listed(b.front.Offer(), memResource); got != units {
			t.Errorf("GPU 0 fell off the bus: units %s, want %s", got, units)
		}
		b.end()
		b = start(t, o, cdiDir, file)
		defer b.end()
		time.Sleep(2 * plan.Linger)
		synctest.Wait()
		if got := listed(b.front.Offer(), memResource); got != units {
			t.Errorf("after a restart: state %s (%s), units %s, want %s", b.state(), b.message(), got, units)
		}
	})
}

// Devices that are given to the next pod shut their gate at once, also where
// nobody can say whether the last one's container is dead: a kubelet that has
// restarted does not call PreStartContainer.
func TestGateOfDevicesGivenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		ids := []string{string(uuid(0)) + "::1"}
		b.hold("old", memResource, ids...)
		time.Sleep(time.Minute)
		key := cdi.Key(memResource, ids)
		b.with(func() { // deleted by force, and its container lives
			b.old = []node.Container{{ID: "x", PodUID: "uid-old", Namespace: "ns", Pod: "old", Name: "c", Running: true,
				Created: b.made[key], Annotations: map[string]string{cdi.AnnotationName("example.com", key): memResource}}}
			b.holdings, b.runtimeErr = nil, errors.New("it does not answer in time")
		})
		if _, err := b.source(memResource).Allocate(ids); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if len(b.files()) != 0 {
			t.Error("10 s after the Allocate the old file stands, with the old container running")
		}
	})
}

// Since when somebody has devices that an earlier process gave out, the container's
// age tells, and not when this process found that out. Before the runtime has answered,
// nobody says.
func TestHolderIsAsOldAsItsContainer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := newOutside(1), t.TempDir()
		b := start(t, o, cdiDir, allShared)
		ids := []string{string(uuid(0)) + "::1"}
		given := time.Now()
		b.hold("p", memResource, ids...)
		since := func(want *time.Time) {
			t.Helper()
			h := b.Status().GPUs[0].Holders
			if len(h) != 1 || (h[0].Since == nil) != (want == nil) || want != nil && !h[0].Since.Equal(*want) {
				t.Errorf("holders %+v, want one since %v", h, want)
			}
		}
		time.Sleep(2 * deviceplugin.Grace)
		since(&given)
		b.end()

		time.Sleep(time.Hour)
		o.with(func() { o.runtimeErr = errors.New("it does not answer in time") })
		b = start(t, o, cdiDir, allShared)
		defer b.end()
		time.Sleep(time.Minute)
		since(nil)
		b.with(func() { b.runtimeErr = nil })
		time.Sleep(time.Minute)
		made := b.made[cdi.Key(memResource, ids)]
		since(&made)
	})
}

// A kubelet whose checkpoint is corrupt starts without it. What runs goes on with its devices, which
// the kubelet counts as free; for an init container that has ended long ago it allocates anew, and
// keeps that as long as the pod lives.
func TestKubeletLosesItsCheckpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(2), t.TempDir(), allShared)
		defer b.end()
		unit := func(of, n int) string { return fmt.Sprintf("%s::%d", uuid(of), n) }
		b.hold("train", memResource, unit(0, 0), unit(0, 1))
		time.Sleep(time.Minute)
		running := runtime{b.outside}.containers()
		b.with(func() {
			b.old = slices.DeleteFunc(running, func(c node.Container) bool { return c.Pod != "train" })
			train := workload.Pod{Namespace: "ns", Name: "train"}
			b.pods = append(b.pods, train)
			b.sandboxes = map[string]workload.Pod{"uid-train": train}
			b.holdings = nil
		})
		b.LookAtCheckpoint()
		time.Sleep(time.Minute)
		var all []string
		for i := range 2 {
			for n := range 4 {
				all = append(all, unit(i, n))
			}
		}
		init, err := b.source(memResource).Prefer(all, nil, 2)
		if err != nil || slices.Contains(init, unit(0, 0)) || slices.Contains(init, unit(0, 1)) {
			t.Fatalf("the agent prefers %v (%v), and a container that runs has units 0 and 1 of GPU 0", init, err)
		}
		if _, err := b.source(memResource).Allocate(init); err != nil {
			t.Fatal(err)
		}
		b.with(func() {
			b.init = []node.Holding{{Namespace: "ns", Pod: "train", Container: "init", Resource: memResource, IDs: init}}
		})
		b.LookAtCheckpoint()
		time.Sleep(time.Minute)
		var over []string
		for _, g := range b.Status().GPUs {
			for _, h := range g.Holders {
				if h.Pod != "train" || (h.Container == "init") != h.Over {
					t.Errorf("holder %+v", h)
				}
				over = append(over, h.Container)
			}
		}
		if !slices.Equal(over, []string{"c", "init"}) {
			t.Errorf("the holders are %v", over)
		}
		b.SetFile("p.yaml", []byte(allWhole))
		time.Sleep(time.Minute)
		if b.state() != "blocked" {
			t.Errorf("the node is %s beside a container that runs", b.state())
		}
		b.with(func() { b.old, b.init, b.pods, b.sandboxes = nil, nil, b.pods[:len(b.pods)-1], nil })
		time.Sleep(2 * plan.Linger)
		b.want("applied", "", "0 1")
	})
}
