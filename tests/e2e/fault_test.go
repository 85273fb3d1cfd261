// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// watch looks at what the kubelet would hand out, without rest, and remembers
// which GPUs lost devices and got them back, and when.
type watch struct {
	base map[string]int // devices of each GPU, by UUID

	mu     sync.Mutex // guards what follows
	turned map[string]time.Time
	back   map[string]time.Time
	last   map[string]int // devices of each GPU, as seen last
	err    error
}

// byGPU counts the devices of each GPU in an offer.
func byGPU(offer map[string][]string) map[string]int {
	out := map[string]int{}
	for name, ids := range offer {
		if !strings.HasPrefix(name, lab.Domain+"/") {
			continue
		}
		for _, id := range ids {
			u, _, _ := strings.Cut(id, "::")
			out[u]++
		}
	}
	return out
}

// watch begins with what is on offer now, and ends with the test.
func (b *bench) watch() *watch {
	b.Helper()
	offer, err := node.Offer(b.ctx)
	b.must(err)
	w := &watch{base: byGPU(offer)}
	w.forget()
	ctx, cancel := context.WithCancel(b.ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(lab.PodResourcesPace)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			offer, err := node.Offer(ctx)
			w.saw(offer, err)
		}
	}()
	b.Cleanup(func() {
		cancel()
		<-ended
	})
	return w
}

func (w *watch) saw(offer map[string][]string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err = err; err != nil {
		return
	}
	now, has := time.Now(), byGPU(offer)
	w.last = has
	for u, n := range w.base {
		switch _, turned := w.turned[u]; {
		case has[u] < n && !turned:
			w.turned[u] = now
		case has[u] < n:
			delete(w.back, u)
		case turned && w.back[u].IsZero():
			w.back[u] = now
		}
	}
}

// forget begins a new account.
func (w *watch) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.turned, w.back = map[string]time.Time{}, map[string]time.Time{}
}

// has counts the devices of each GPU that are on offer.
func (w *watch) has() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.last)
}

// account is which GPUs have turned since forget, and of these which are back.
func (w *watch) account() (turned, back map[string]time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.turned), maps.Clone(w.back), w.err
}

// fault is what happens to GPUs.
type fault struct {
	// hits are the GPUs that it takes off the offer; the others must not move.
	hits []int
	// says is a part of the reason.
	says string
}

// faults has a GPU of each mode with a pod, and others without.
const faultPartitions = `version: v1
partitions:
  default:
    - devices: [0, 1, 2]
      mode: shared
    - devices: [3, 4, 5]
      mode: shared
      replicas: 2
    - devices: [6, 7]
      mode: whole
`

func faultOffers(without ...int) map[string]int {
	out := map[string]int{}
	for i := range gpus {
		if slices.Contains(without, i) {
			continue
		}
		switch {
		case i < 3:
			out[lab.Memory] += units
		case i < 6:
			out[lab.Replicas] += 2
		default:
			out[lab.GPU]++
		}
	}
	return out
}

// condition is the node's word on its GPUs.
const condition = lab.Domain + "/GPUHealthy"

// A GPU that is lost: that no other goes off the offer, what node and pods are told, and how it
// passes. Then the driver is loaded anew. Which faults hurt whom is for internal/health.
func TestFaults(t *testing.T) {
	b := begin(t, faultPartitions, faultOffers())
	// GPUs 0 and 1 are two sides of one PCI switch and stay together as long as there
	// is another.
	pods := map[int]*lab.RunningPod{
		2: b.pod("memory", lab.Memory, 24),
		3: b.pod("replica", lab.Replicas, 1),
		6: b.pod("whole", lab.GPU, 1),
	}
	var all []*lab.RunningPod
	for index, pod := range pods {
		b.must(pod.Running(b.ctx))
		if g := b.one(b.inside(pod, "")); g.Index != index {
			b.Fatalf("%s is on GPU %d, want %d", pod, g.Index, index)
		}
		all = append(all, pod)
	}
	before := b.processes(all...)
	b.healthy()

	var every []int
	for i := range gpus {
		every = append(every, i)
	}
	// repair leaves nothing of a part that failed to the next one.
	repair := func(b *bench) {
		if !b.Failed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		b.tell(ctx)
		_ = driver.Restore(ctx, 3) // refused where there is nothing to repair
		_ = driver.LoadDriver(ctx, "")
		if err := agent.Kill(ctx); err != nil {
			b.Error(err)
		}
	}
	ms := func(d time.Duration) int64 { return d.Milliseconds() }

	b.sub("lost in service", func(b *bench) {
		defer repair(b)
		f := fault{hits: []int{3}, says: "79"}
		w := b.watch()
		began := time.Now()
		b.must(driver.Lose(b.ctx, 3))
		status, err := lab.Moment(b.ctx, 30*time.Second, pace, "the agent to say which GPUs are unfit", func(ctx context.Context) error { return unfit(ctx, f) })
		b.must(err)
		turned := b.turned(w, f.hits)
		b.offers(faultOffers(f.hits...))
		b.told(f, pods)
		// It stays: for longer than the hold.
		b.must(lab.Holds(b.ctx, 3*time.Second, "before anybody does something about it", func(ctx context.Context) error { return unfit(ctx, f) }))
		mended := time.Now()
		b.must(driver.Restore(b.ctx, 3))
		back := b.recovered(w, f.hits)
		b.Logf("the agent shows it after %d ms, it is off the offer after %d ms, and back after %d ms", ms(status.Sub(began)), ms(turned.Sub(began)), ms(back.Sub(mended)))
		if err := hurt(before); err != nil {
			b.Error(err)
		}
	})

	b.rest("the driver is loaded anew", func(b *bench) {
		defer repair(b)
		const upgrade = "nvidia.com/gpu-driver-upgrade-state"
		for _, way := range []struct {
			name    string
			set     func(context.Context, bool) error
			version string
		}{
			{"NVIDIA's upgrade label", func(ctx context.Context, on bool) error {
				return node.Label(ctx, map[string]string{upgrade: map[bool]string{true: "pod-restart-required", false: "upgrade-done"}[on]})
			}, "580.199.07"},
			{"cordon and our label", func(ctx context.Context, on bool) error {
				label := map[string]string{lab.Domain + "/gpu.driver-release": map[bool]string{true: "true"}[on]}
				return errors.Join(node.Label(ctx, label), node.Cordon(ctx, on))
			}, driver.Version},
		} {
			w := b.watch()
			if err := driver.Unload(b.ctx); err == nil {
				b.Fatal("the driver could be unloaded while the agent uses it: nothing is tried here")
			}
			began := time.Now()
			b.must(way.set(b.ctx, true))
			b.Cleanup(func() { _ = way.set(context.Background(), false) })
			var free time.Time
			free, err := lab.Moment(b.ctx, time.Minute, pace, "the driver to be unloaded", driver.Unload)
			b.must(err)
			turned := b.turned(w, every)
			b.must(driver.LoadDriver(b.ctx, way.version))
			loaded := time.Now()
			b.must(way.set(b.ctx, false))
			back := b.recovered(w, every)
			b.Logf("by %s the driver is unloaded after %d ms, all is off the offer after %d ms, and back %d ms after it was loaded", way.name, ms(free.Sub(began)), ms(turned.Sub(began)), ms(back.Sub(loaded)))
			b.must(agent.AwaitStatus(b.ctx, time.Minute, "the new driver's version", func(s lab.Status) error {
				if s.Driver != way.version {
					return fmt.Errorf("it is %s, want %s", s.Driver, way.version)
				}
				return nil
			}))
			if err := hurt(before); err != nil {
				b.Error(err)
			}
		}
		b.must(node.Label(b.ctx, map[string]string{upgrade: ""}))
	})

	b.offers(faultOffers())
	for index, pod := range pods {
		b.must(pod.RestartContainer(b.ctx, ""))
		if g := b.one(b.inside(pod, "")); g.Index != index {
			b.Errorf("%s is on GPU %d, want %d", pod, g.Index, index)
		}
	}
}

// short is a subtest's own name.
func (b *bench) short() string { return b.Name()[strings.LastIndexByte(b.Name(), '/')+1:] }

// healthy waits until nobody complains of any GPU.
func (b *bench) healthy() {
	b.Helper()
	b.must(lab.Await(b.ctx, time.Minute, "all GPUs to be healthy", func(ctx context.Context) error {
		s, err := agent.Status(ctx)
		if err != nil {
			return err
		}
		for _, g := range s.GPUs {
			if g.Health != "healthy" {
				return fmt.Errorf("GPU %d is not: %s", g.Index, g.Reason)
			}
		}
		n, err := node.State(ctx)
		if err == nil && n.Conditions[condition].Status != "True" {
			err = fmt.Errorf("the node's condition %s is %s", condition, n.Conditions[condition])
		}
		return err
	}))
}

func indexesOf(gpus map[string]time.Time) []int {
	var out []int
	for _, g := range driver.GPUs {
		if _, ok := gpus[g.UUID]; ok {
			out = append(out, g.Index)
		}
	}
	return out
}

// turned waits until these GPUs, and no others, have gone off the offer with all
// of their devices, and returns when the last did.
func (b *bench) turned(w *watch, hits []int) (last time.Time) {
	b.Helper()
	b.must(lab.Await(b.ctx, time.Minute, fmt.Sprintf("the GPUs %v to go off the offer", hits), func(ctx context.Context) error {
		turned, _, err := w.account()
		if err != nil {
			return err
		}
		got := indexesOf(turned)
		for _, i := range got {
			if !slices.Contains(hits, i) {
				return fmt.Errorf("the GPUs %v did: %w", got, lab.ErrNever)
			}
		}
		has := w.has()
		for _, i := range hits {
			u := driver.GPUs[i].UUID
			if has[u] > 0 || turned[u].IsZero() {
				return fmt.Errorf("%d devices of GPU %d are on offer", has[u], i)
			}
			if turned[u].After(last) {
				last = turned[u]
			}
		}
		return nil
	}))
	return last
}

// recovered waits until these GPUs are on offer again, that no other ever went,
// and that nobody complains, and returns when the last came back.
func (b *bench) recovered(w *watch, hits []int) (last time.Time) {
	b.Helper()
	b.must(lab.Await(b.ctx, time.Minute, fmt.Sprintf("the GPUs %v to come back", hits), func(context.Context) error {
		turned, back, err := w.account()
		if err != nil {
			return err
		}
		for _, i := range indexesOf(turned) {
			if !slices.Contains(hits, i) {
				return fmt.Errorf("GPU %d went off the offer too: %w", i, lab.ErrNever)
			}
		}
		for _, i := range hits {
			at := back[driver.GPUs[i].UUID]
			if at.IsZero() {
				return fmt.Errorf("GPU %d is not back", i)
			}
			if at.After(last) {
				last = at
			}
		}
		return nil
	}))
	b.healthy()
	b.offers(faultOffers())
	return last
}

// unfit checks that the agent calls those GPUs unfit that the fault hits, with
// its reason, and all others fit.
func unfit(ctx context.Context, f fault) error {
	s, err := agent.Status(ctx)
	if err != nil {
		return err
	}
	if len(s.GPUs) != gpus {
		return fmt.Errorf("the agent shows %d GPUs, want %d", len(s.GPUs), gpus)
	}
	for _, g := range s.GPUs {
		switch hit := slices.Contains(f.hits, g.Index); {
		case hit && (g.Health != "unhealthy" || !strings.Contains(g.Reason, f.says)):
			return fmt.Errorf("GPU %d is %s (%q), want it to be unhealthy, and the reason to speak of %q", g.Index, g.Health, g.Reason, f.says)
		case !hit && g.Health != "healthy":
			return fmt.Errorf("GPU %d is %s (%s), want it to be healthy", g.Index, g.Health, g.Reason)
		}
	}
	return nil
}

// told checks what node and pods say of a fault: the node's condition and an
// Event; the devices of the pods that it hits, and of those that it does not.
func (b *bench) told(f fault, pods map[int]*lab.RunningPod) {
	b.Helper()
	said := func(message string) bool {
		return strings.Contains(message, f.says) && !slices.ContainsFunc(f.hits, func(i int) bool { return !strings.Contains(message, driver.GPUs[i].UUID) })
	}
	b.must(lab.Await(b.ctx, 30*time.Second, "the node's condition", func(ctx context.Context) error {
		s, err := node.State(ctx)
		if c := s.Conditions[condition]; err == nil && (c.Status != "False" || !said(c.Message)) {
			err = fmt.Errorf("it is %s, want False and the names of the GPUs %v", c, f.hits)
		}
		return err
	}))
	for _, i := range f.hits {
		warns := func(e lab.Event) bool {
			return e.Type == "Warning" && strings.Contains(e.Message, driver.GPUs[i].UUID) && strings.Contains(e.Message, f.says)
		}
		b.must(node.AwaitEvent(b.ctx, "Node", "", nodeName, fmt.Sprintf("warns of GPU %d", i), warns))
		if pod := pods[i]; pod != nil {
			b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, pod.Name, fmt.Sprintf("warns of GPU %d", i), warns))
		}
	}
	for index, pod := range pods {
		want := "Healthy"
		if slices.Contains(f.hits, index) {
			want = "Unhealthy"
		}
		b.must(pod.InState(b.ctx, time.Minute, "to have "+strings.ToLower(want)+" devices", func(s lab.PodState) error {
			health := s.Containers["main"].Health
			if len(health) == 0 {
				return errors.New("it says nothing of its devices")
			}
			for id, got := range health {
				if got != want {
					return fmt.Errorf("%s is %s", id, got)
				}
			}
			return nil
		}))
	}
}
