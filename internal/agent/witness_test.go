// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/cdi"
)

// release ends a pod's container, and everything the kubelet knows of it but what
// lies in its checkpoint until that is written again.
func (b *bench) release(pod string) {
	b.with(func() {
		b.holdings = slices.DeleteFunc(b.holdings, func(h node.Holding) bool {
			if h.Pod != pod {
				return false
			}
			b.entries = append(b.entries, node.Entry{PodUID: "uid-" + pod, Container: h.Container, Resource: h.Resource, IDs: h.IDs})
			return true
		})
	})
}

// writesOnResend makes the kubelet write its checkpoint at each list of a
// resource, until the test's end.
func (b *bench) writesOnResend(ctx context.Context, resource string) {
	source := b.source(resource)
	go func() {
		for {
			_, changed := source.List()
			b.with(func() { b.entries = nil })
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	synctest.Wait()
}

// A completed pod is in the checkpoint until a list makes the kubelet write it.
func TestCheckpointIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		b.hold("job", memResource, string(uuid(0))+"::1")
		b.writesOnResend(ctx, memResource)
		// The next one has the same devices, and ends soon after.
		for round := range 3 {
			if round > 0 {
				b.hold("job", memResource, string(uuid(0))+"::1")
			}
			time.Sleep(holdersEvery)
			b.release("job")
			time.Sleep(holdersEvery)
			synctest.Wait()
			if c := b.Allocations(); len(c) != 0 {
				t.Errorf("round %d: allocations %+v", round, c)
			}
			if f := b.files(); len(f) != 0 {
				t.Errorf("round %d: files %v", round, f)
			}
		}
	})
}

// The end of a container is heard of, and the kubelet's release of its devices a
// moment after it.
func TestReleaseIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ids := []string{string(uuid(0)) + "::1"}
		b.hold("job", memResource, ids...)
		b.writesOnResend(ctx, memResource)
		time.Sleep(2*holdersEvery + time.Second)
		key := cdi.Key(memResource, ids)
		b.container <- node.ContainerEvent{Kind: node.EventStopped, Container: node.Container{Name: "c",
			Annotations: map[string]string{cdi.AnnotationName("example.com", key): memResource}}}
		time.Sleep(1200 * time.Millisecond) // the kubelet takes its time
		if len(b.Allocations()) != 1 {
			t.Error("the allocation ended before the kubelet let go")
		}
		b.release("job")
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		if c := b.Allocations(); len(c) != 0 {
			t.Errorf("100 ms after the release: %+v", c)
		}
		if !strings.Contains(b.log.String(), "after_release=") || strings.Contains(b.log.String(), "after_release=unseen") {
			t.Errorf("the log does not say how long it took:\n%s", b.log)
		}
	})
}

// A container that starts gives its allocation a name at once: what befalls its GPU is
// told to its pod.
func TestStartedContainerIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		ids := []string{string(uuid(0)) + "::1"}
		b.hold("p", memResource, ids...)
		if c := b.Allocations(); len(c) != 1 || c[0].Holder.Name != "" {
			t.Fatalf("allocations %+v", c)
		}
		b.container <- node.ContainerEvent{Kind: node.EventStarted, Container: node.Container{Name: "c",
			Annotations: map[string]string{cdi.AnnotationName("example.com", cdi.Key(memResource, ids)): memResource}}}
		synctest.Wait()
		if c := b.Allocations(); len(c) != 1 || c[0].Holder.Name != "p" || !b.front.Started(c[0].ID) {
			t.Errorf("allocations %+v", c)
		}
	})
}

// An init container that has ended is in no list. Its allocation lives with its pod.
func TestInitContainerKeepsItsAllocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		ids := []string{string(uuid(0)) + "::1", string(uuid(0)) + "::2"}
		if _, err := b.source(memResource).Allocate(ids); err != nil {
			t.Fatal(err)
		}
		b.with(func() {
			b.init = []node.Holding{{Namespace: "ns", Pod: "p", Container: "init", Resource: memResource, IDs: ids}}
		})
		time.Sleep(time.Hour)
		synctest.Wait()
		if c := b.Allocations(); len(c) != 1 || len(b.files()) != 1 {
			t.Fatalf("allocations %+v, files %v", c, b.files())
		}
		b.with(func() { b.init = nil })
		time.Sleep(time.Minute)
		synctest.Wait()
		if c := b.Allocations(); len(c) != 0 || len(b.files()) != 0 {
			t.Errorf("allocations %+v, files %v", c, b.files())
		}
	})
}

// While the container of a pod that was deleted by force lives, the next one on
// its devices waits; no file lets the runtime make it.
func TestNextHolderWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		ids := []string{string(uuid(0)) + "::1", string(uuid(0)) + "::2"}
		for name, next := range map[string][]string{"the same devices": ids, "one of them": ids[1:]} {
			b.hold("old", memResource, ids...)
			time.Sleep(time.Minute)
			b.with(func() { // by force
				b.old = []node.Container{{ID: "x", PodUID: "uid-old", Namespace: "ns", Pod: "old", Name: "c", Running: true,
					Created: b.made[cdi.Key(memResource, ids)], Annotations: map[string]string{cdi.AnnotationName("example.com", cdi.Key(memResource, ids)): memResource}}}
				b.holdings = nil
			})
			src := b.source(memResource)
			if _, err := src.Allocate(next); err != nil {
				t.Fatal(err)
			}
			key := cdi.Key(memResource, next)
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			err := src.Prepare(ctx, next)
			cancel()
			if !errors.Is(err, ledger.ErrNotOpen) || !strings.Contains(err.Error(), "previous holder still ending: allocation "+cdi.Key(memResource, ids)) {
				t.Errorf("%s: %v", name, err)
			}
			if slices.ContainsFunc(b.files(), func(f string) bool { return strings.Contains(f, key) }) {
				t.Errorf("%s: the file stands while the old container runs", name)
			}
			done := make(chan error)
			go func() { done <- src.Prepare(t.Context(), next) }()
			time.Sleep(time.Second)
			b.with(func() { b.old = nil })
			began := time.Now()
			if err := <-done; err != nil || time.Since(began) > waitEvery {
				t.Errorf("%s: %v, %s after the old container's end", name, err, time.Since(began))
			}
			time.Sleep(2 * deviceplugin.Grace)
			synctest.Wait()
		}
	})
}

// A runtime that does not know our own pod is another one's: what it does not
// list is no news.
func TestWrongRuntime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, newOutside(1), t.TempDir(), allShared)
		defer b.end()
		b.hold("train-3", memResource, string(uuid(0))+"::1")
		time.Sleep(2 * holdersEvery)
		b.with(func() { b.holdings, b.runtimeErr = nil, errors.New("no such socket") })
		time.Sleep(silentFor) // it may be starting again
		b.want("applied", "0.0 0.1 0.2 0.3", "")
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(b.Allocations()) != 1 || b.state() != "failed" {
			t.Errorf("a runtime that is away: %d allocations, state %s", len(b.Allocations()), b.state())
		}
		b.with(func() { b.runtimeErr, b.stranger = nil, true })
		time.Sleep(time.Hour)
		synctest.Wait()
		if m := b.message(); len(b.Allocations()) != 1 || !strings.Contains(m, "--runtime-endpoint") {
			t.Errorf("another runtime: %d allocations, message %q", len(b.Allocations()), m)
		}
		b.with(func() { b.stranger = false })
		time.Sleep(time.Minute)
		b.want("applied", "0.0 0.1 0.2 0.3", "")
		if len(b.Allocations()) != 0 {
			t.Errorf("%d allocations", len(b.Allocations()))
		}
	})
}

// What another device plugin offers is not offered twice.
func TestOthersGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.allocatable = map[string][]string{"nvidia.com/gpu": {string(uuid(0)) + "::0", string(uuid(0)) + "::1"}, "rdma/hca": {"mlx5_0"}}
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.want("failed", "1.0 1.1 1.2 1.3", "")
		if m := b.message(); !strings.Contains(m, "GPU 0") || !strings.Contains(m, "nvidia.com/gpu of another device plugin") {
			t.Errorf("message %q", m)
		}
		b.with(func() { b.allocatable = nil })
		time.Sleep(othersEvery + holdersEvery)
		b.want("applied", fourUnits, "")
		// It comes back while a pod of ours has GPU 1.
		b.hold("train-3", memResource, string(uuid(1))+"::2")
		b.with(func() { b.allocatable = map[string][]string{"nvidia.com/gpu": {string(uuid(0)), string(uuid(1))}} })
		b.LookAtCheckpoint() // the kubelet writes at every list
		time.Sleep(2 * othersSoon)
		b.want("failed", "0.0x 0.1x 0.2x 0.3x 1.0x 1.1x 1.2~ 1.3x", "")
		// Ours to watch still, since train-3 is on it; its other users may be theirs.
		if got := b.Offered(); len(got) != 1 || !b.Open(got[0].UUID) || got[0].UUID != uuid(1) {
			t.Errorf("offered are %+v, want GPU 1, and open", got)
		}
	})
}

// GPUs that NVIDIA's MIG manager lays out are its own.
func TestMIGManagersGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.inv.GPUs[1].MIG.Capable = true
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.node(map[string]string{"nvidia.com/mig.config": "all-disabled"}, false)
		b.want("applied", fourUnits, "")
		b.node(map[string]string{"nvidia.com/mig.config": "all-1g.10gb"}, false)
		time.Sleep(plan.Linger)
		b.want("failed", "0.0 0.1 0.2 0.3", "")
		if m := b.message(); !strings.Contains(m, "MIG manager") {
			t.Errorf("message %q", m)
		}
	})
}
