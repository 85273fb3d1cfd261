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
	"text/tabwriter"
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

// fault is a row of the table.
type fault struct {
	name string
	// hits are the GPUs that it takes off the offer; the others must not move.
	hits []int
	do   func(context.Context) error
	// says is a part of the reason.
	says string
	// xid is the number of one that hits nothing, on is the GPU that has it.
	xid, on int
	// mend is what somebody does about it; nil where it passes by itself.
	mend func(context.Context) error
	// keeps says that it must outlive a restart of the agent and the kubelet.
	keeps bool
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

// Every fault by itself on the node: which devices it takes off the offer, that
// no other moves, what node and pods are told, and how it passes. The table with
// the times is the log's end.
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

	xid := func(index, number int) func(context.Context) error {
		return func(ctx context.Context) error { return driver.Xid(ctx, index, number) }
	}
	reset := func(index int) func(context.Context) error {
		return func(ctx context.Context) error { return driver.Reset(ctx, index) }
	}
	restore := func(index int) func(context.Context) error {
		return func(ctx context.Context) error { return driver.Restore(ctx, index) }
	}
	var every []int
	for i := range gpus {
		every = append(every, i)
	}
	rows := []fault{
		{name: "Xid 13, an application's", xid: 13, on: 2},
		{name: "Xid 31, an application's", xid: 31, on: 3},
		{name: "Xid 43, an application's", xid: 43, on: 6},
		{name: "Xid 45, an application's", xid: 45, on: 2},
		{name: "Xid 48, a double bit error", hits: []int{2}, do: xid(2, 48), says: "48", mend: reset(2), keeps: true},
		{name: "Xid 63, a row to remap", hits: []int{3}, do: xid(3, 63), says: "63"},
		{name: "Xid 64, a remap that failed", hits: []int{6}, do: xid(6, 64), says: "64",
			mend: func(ctx context.Context) error { return driver.SetHealth(ctx, 6, `{"remapFailed": false}`) }},
		{name: "Xid 74, an NVLink error", hits: []int{0}, do: xid(0, 74), says: "74"},
		{name: "Xid 79, off the bus", hits: []int{1}, do: xid(1, 79), says: "79", mend: restore(1)},
		{name: "Xid 94, contained", hits: []int{4}, do: xid(4, 94), says: "94"},
		{name: "Xid 95, not contained", hits: []int{7}, do: xid(7, 95), says: "95", mend: reset(7)},
		{name: "lost in service", hits: []int{3}, do: func(ctx context.Context) error { return driver.Lose(ctx, 3) }, says: "79", mend: restore(3)},
		{name: "unplugged", hits: []int{5}, do: func(ctx context.Context) error { return driver.Unplug(ctx, 5) },
			mend: func(ctx context.Context) error { return driver.Plug(ctx, 5) }},
		{name: "NVML gone", hits: every, do: func(ctx context.Context) error { return driver.Fail(ctx, "nvml*", 9) }, says: "no NVIDIA driver", mend: driver.ClearFaults},
	}
	if testing.Short() { // which faults hurt whom is for internal/health
		rows = slices.DeleteFunc(rows, func(f fault) bool { return f.name != "lost in service" })
	}
	// repair leaves nothing of a row that failed to the next one.
	repair := func(b *bench) {
		if !b.Failed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		b.tell(ctx)
		err := driver.ClearFaults(ctx)
		for i := range gpus {
			// Most of these are refused: there is nothing to repair.
			_ = driver.Plug(ctx, i)
			_ = driver.Restore(ctx, i)
			_ = driver.Reset(ctx, i)
			_ = driver.SetHealth(ctx, i, `{"remapFailed": false}`)
		}
		_ = driver.LoadDriver(ctx, "")
		if err := errors.Join(err, agent.Kill(ctx)); err != nil {
			b.Error(err)
		}
	}

	table := &strings.Builder{}
	lines := tabwriter.NewWriter(table, 0, 8, 2, ' ', 0)
	fmt.Fprintln(lines, "FAULT\tGPUS\tKUBELET ms\tSTATUS ms\tBACK ms\tTHE AGENT SAYS")
	row := func(name, hits, kubelet, status, back, says string) {
		fmt.Fprintf(lines, "%s\t%s\t%s\t%s\t%s\t%.90s\n", name, hits, kubelet, status, back, says)
	}
	ms := func(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }

	for _, f := range rows {
		b.sub(f.name, func(b *bench) {
			defer repair(b)
			w := b.watch()
			began := time.Now()
			if f.xid != 0 {
				b.must(driver.Xid(b.ctx, f.on, f.xid))
				b.heard(f.on, f.xid)
				b.nothing(w)
				row(f.name, "none", "", "", "", "")
				return
			}
			b.must(f.do(b.ctx))
			var reason string
			status, err := lab.Moment(b.ctx, 30*time.Second, pace, "the agent to say which GPUs are unfit", func(ctx context.Context) (err error) {
				reason, err = unfit(ctx, f)
				return err
			})
			b.must(err)
			turned := b.turned(w, f.hits)
			b.offers(faultOffers(f.hits...))
			b.told(f, pods)
			if f.keeps {
				b.must(agent.Kill(b.ctx))
				b.must(node.CrashKubelet(b.ctx))
				b.offers(faultOffers(f.hits...))
				if _, err := unfit(b.ctx, f); err != nil {
					b.Errorf("a restart has healed it: %v", err)
				}
				w.forget() // what the restarts took off the offer
			}
			mended := turned
			if f.mend != nil {
				// Without it, it stays: for longer than the hold.
				b.must(lab.Holds(b.ctx, 3*time.Second, "before anybody does something about it", func(ctx context.Context) error {
					_, err := unfit(ctx, f)
					return err
				}))
				mended = time.Now()
				b.must(f.mend(b.ctx))
			}
			back := b.recovered(w, f.hits)
			row(f.name, fmt.Sprint(f.hits), ms(turned.Sub(began)), ms(status.Sub(began)), ms(back.Sub(mended)), reason)
			b.Logf("off the offer after %s ms, back after %s", ms(turned.Sub(began)), ms(back.Sub(mended)))
			if err := hurt(before); err != nil {
				b.Error(err)
			}
		})
	}

	b.rest("a call that hangs", func(b *bench) {
		defer repair(b)
		// While a GPU is unfit the agent looks often, so it soon meets the call.
		f := fault{name: b.short(), hits: []int{5}, says: "94"}
		w := b.watch()
		b.must(driver.Xid(b.ctx, 5, 94))
		began := time.Now()
		b.must(driver.Hang(b.ctx, "nvmlDevice*", -1))
		turned := b.turned(w, f.hits)
		var says string
		seen, err := lab.Moment(b.ctx, time.Minute, pace, "the agent to say that hardware work waits", func(ctx context.Context) error {
			s, err := agent.Status(ctx)
			if err == nil && s.Hardware == "" {
				err = fmt.Errorf("it says: %s", s)
			}
			says = s.Hardware
			return err
		})
		b.must(err)
		b.must(lab.Await(b.ctx, 30*time.Second, "the node's condition", func(ctx context.Context) error {
			s, err := node.State(ctx)
			if err == nil && !strings.Contains(s.Conditions[condition].Message, "waits") {
				err = fmt.Errorf("it is %s", s.Conditions[condition])
			}
			return err
		}))
		// What is not answered neither heals nor condemns, for longer than the
		// hold, and pods are served from what was seen last.
		pod, _ := b.running("meanwhile", lab.Memory, 2)
		b.must(pod.Delete(b.ctx))
		b.must(lab.Holds(b.ctx, 3*time.Second, "while the driver hangs", func(ctx context.Context) error {
			_, err := unfit(ctx, f)
			return err
		}))
		cleared := time.Now()
		b.must(driver.ClearFaults(b.ctx))
		back := b.recovered(w, f.hits)
		b.must(agent.AwaitStatus(b.ctx, time.Minute, "a driver that answers", func(s lab.Status) error {
			if s.Hardware != "" {
				return errors.New(s.Hardware)
			}
			return nil
		}))
		row(f.name+", after Xid 94", "[5]", ms(turned.Sub(began)), ms(seen.Sub(began)), ms(back.Sub(cleared)), says)
	})

	b.rest("lost before the agent's start", func(b *bench) {
		defer repair(b)
		f := fault{name: b.short(), hits: []int{0}}
		b.must(agent.Stop(b.ctx))
		b.must(driver.Lose(b.ctx, 0))
		b.must(agent.Start(b.ctx))
		b.offers(faultOffers(0))
		var reason string
		// The kubelet has its lists a moment before the agent shows what is in them.
		b.must(lab.Await(b.ctx, time.Minute, "the agent to show it", func(ctx context.Context) (err error) {
			reason, err = unfit(ctx, f)
			return err
		}))
		b.told(f, pods)
		offer, err := node.Offer(b.ctx)
		b.must(err)
		w := b.watch()
		w.base = byGPU(offer)
		w.base[driver.GPUs[0].UUID] = units
		b.turned(w, f.hits)
		mended := time.Now()
		b.must(driver.Restore(b.ctx, 0))
		back := b.recovered(w, f.hits)
		row(f.name, fmt.Sprint(f.hits), "", "", ms(back.Sub(mended)), reason)
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
			row("driver reload by "+way.name, fmt.Sprint(every), ms(turned.Sub(began)), ms(free.Sub(began)), ms(back.Sub(loaded)), "STATUS is the moment of its unloading")
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
	b.must(lines.Flush())
	b.Logf("KUBELET is the time until the kubelet has understood it, STATUS until the agent shows it, both from before the emulator's command began; BACK is from the remedy, or from the fault where it passes by itself.\n%s", table)
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

// heard waits until the agent has counted an Xid of a GPU's.
func (b *bench) heard(index, xid int) {
	b.Helper()
	name := fmt.Sprintf(`gpu_agent_gpu_events_total{gpu=%q,kind="xid",xid="%d"}`, driver.GPUs[index].UUID, xid)
	b.must(lab.Await(b.ctx, 30*time.Second, "the agent to hear of the Xid", func(ctx context.Context) error {
		m, err := agent.Metrics(ctx)
		if err == nil && m[name] < 1 {
			err = fmt.Errorf("it has no %s", name)
		}
		return err
	}))
}

// nothing checks that nothing turned, nor turns within a second.
func (b *bench) nothing(w *watch) {
	b.Helper()
	b.must(lab.Holds(b.ctx, time.Second, "what hurts no GPU", func(ctx context.Context) error {
		turned, _, err := w.account()
		if err != nil {
			return err
		}
		if len(turned) > 0 {
			return fmt.Errorf("devices of the GPUs %v went off the offer", indexesOf(turned))
		}
		s, err := agent.Status(ctx)
		if err != nil {
			return err
		}
		for _, g := range s.GPUs {
			if g.Health != "healthy" {
				return fmt.Errorf("GPU %d is %s: %s", g.Index, g.Health, g.Reason)
			}
		}
		return nil
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
// its reason, and all others fit, and returns the reason.
func unfit(ctx context.Context, f fault) (reason string, err error) {
	s, err := agent.Status(ctx)
	if err != nil {
		return "", err
	}
	seen := map[int]bool{}
	for _, g := range s.GPUs {
		seen[g.Index] = true
		switch hit := slices.Contains(f.hits, g.Index); {
		case hit && (g.Health != "unhealthy" || g.Reason == "" || !strings.Contains(g.Reason, f.says)):
			return "", fmt.Errorf("GPU %d is %s (%q), want it to be unhealthy, and the reason to speak of %q", g.Index, g.Health, g.Reason, f.says)
		case hit:
			reason = g.Reason
		case g.Health != "healthy":
			return "", fmt.Errorf("GPU %d is %s (%s), want it to be healthy", g.Index, g.Health, g.Reason)
		}
	}
	if len(seen) != gpus {
		return "", fmt.Errorf("the agent shows %d GPUs, want %d", len(seen), gpus)
	}
	return reason, nil
}

// told checks what node and pods say of a fault: the node's condition and an
// Event; the devices of the pods that it hits, and of those that it does not.
func (b *bench) told(f fault, pods map[int]*lab.RunningPod) {
	b.Helper()
	said := func(message string) bool {
		for _, i := range f.hits {
			// Of all at once not each has to be named.
			if len(f.hits) < gpus && !strings.Contains(message, driver.GPUs[i].UUID) || !strings.Contains(message, f.says) {
				return false
			}
		}
		return true
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
			// Of all at once not each has an Event: they are sent sparingly.
			named := len(f.hits) == gpus || strings.Contains(e.Message, driver.GPUs[i].UUID)
			return e.Type == "Warning" && named && strings.Contains(e.Message, f.says)
		}
		b.must(node.AwaitEvent(b.ctx, "Node", "", nodeName, fmt.Sprintf("warns of GPU %d", i), warns))
		if pod := pods[i]; pod != nil && len(f.hits) < gpus {
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
