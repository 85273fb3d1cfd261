// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/gpunode"
)

// lent is the quota that is kept for another cluster.
const lent = "another cluster"

// world is a cluster in virtual time: the Fleet with its Run, agents' own packing, and a scheduler.
type world struct {
	t     *testing.T
	r     *rand.Rand
	begun time.Time
	// steps are what happens, in order, and woken gets the times at which Run wakes the scheduler.
	steps  []step
	woken  chan time.Time
	f      *Fleet
	holder *Holder
	lender *Lender
	queue
	hosts map[string]*host
	names []string // in order
	// pods is how many there were, left how many have not run yet, and seats those that room is or was held for.
	pods, left int
	seats      []*crowdPod
	n          outcome
}

type step struct {
	at time.Time
	do func()
}

// outcome is what is measured: when the last pod ran and how long one waits, in seconds; how often the placer was
// asked for a place and had none, and had no room to hold; how often a seat was found lost; how often seats were
// tried on a node, and the scheduler woken.
type outcome [8]float64

const (
	last = iota
	wait
	asked
	refused
	unheld
	lost
	tried
	wakes
)

var columns = [len(outcome{})]string{"  last", " wait", " asked", "refused", "unheld", "lost", "tried", "wakes"}

// crowdPod is a pod and its life.
type crowdPod struct {
	*corev1.Pod
	ask
	r    *rand.Rand
	runs time.Duration
	// then is called when it has gone.
	then func()
	came time.Time
	// attempts, failed, due and asked are the scheduler's.
	attempts    int
	failed, due time.Time
	asked       bool
	// seat is the node on which room is held or reserved for it.
	seat string
}

func (w *world) pod(a ask, runs time.Duration) *crowdPod {
	w.pods, w.left = w.pods+1, w.left+1
	p := &crowdPod{Pod: asks(fmt.Sprintf("p%05d", w.pods), "0"), ask: a, runs: runs}
	p.r = rand.New(rand.NewPCG(w.r.Uint64(), 0))
	p.Spec.Containers = []corev1.Container{container(a.of, fmt.Sprint(a.n))}
	return p
}

func (w *world) after(d time.Duration, do func()) {
	at := time.Now().Add(d)
	i := len(w.steps)
	for i > 0 && w.steps[i-1].at.After(at) {
		i--
	}
	w.steps = slices.Insert(w.steps, i, step{at, do})
}

// run goes on until all pods have run. What the Fleet's Run does at a moment comes before steps of that moment.
func (w *world) run() {
	const look = 10 * time.Millisecond
	for w.left > 0 && time.Since(w.begun) < time.Hour {
		time.Sleep(min(time.Until(w.steps[0].at), look))
		synctest.Wait()
		for len(w.woken) > 0 {
			w.n[wakes]++
			w.after(time.Until((<-w.woken).Add(look)), func() { w.happens(news) })
		}
		if s := w.steps[0]; !s.at.After(time.Now()) {
			w.steps = w.steps[1:]
			s.do()
		}
	}
}

func (w *world) tell(p *crowdPod) { w.f.SetPod(p.DeepCopy()) }

func (w *world) comes(p *crowdPod) func() {
	return func() {
		p.came = time.Now()
		w.tell(p)
		w.after(5*time.Millisecond, func() { w.enqueue(p) })
	}
}

// bind puts a pod on its node. The kubelet takes it in a moment, and its status shows its devices after a second
// or two.
func (w *world) bind(p *crowdPod, h *host) {
	p.Spec.NodeName = h.Name
	w.after(5*time.Millisecond, func() { w.tell(p); w.happens(news) })
	admit := 20*time.Millisecond + time.Duration(p.r.Int64N(int64(280*time.Millisecond)))
	report := time.Second + time.Duration(p.r.Int64N(int64(time.Second)))
	w.after(admit, func() {
		ids, err := h.Admit(p.Name, p.of, p.n)
		if err != nil {
			w.t.Errorf("%s refuses %s, which asks for %v: %v", h.Name, p.Name, p.ask, err)
			ids = nil
		}
		w.changed(h)
		w.after(report-admit, func() { w.reports(p, h, ids) })
		w.after(report-admit+p.runs, func() { w.ends(p, h) })
	})
}

func (w *world) reports(p *crowdPod, h *host, ids []string) {
	w.left--
	w.n[last] = time.Since(w.begun).Seconds()
	w.n[wait] += time.Since(p.came).Seconds()
	has := corev1.ResourceStatus{Name: corev1.ResourceName(p.of)}
	for _, id := range ids {
		has.Resources = append(has.Resources, corev1.ResourceHealth{ResourceID: corev1.ResourceID(id)})
	}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{AllocatedResourcesStatus: []corev1.ResourceStatus{has}}}
	w.tell(p)
	h.starting--
	w.look(h)
}

func (w *world) ends(p *crowdPod, h *host) {
	h.End(p.Name)
	w.changed(h)
	h.requested[p.of] -= p.n
	p.Status.Phase = corev1.PodSucceeded
	if w.tell(p); p.then != nil {
		p.then()
	}
	w.look(h)
	w.happens(moreRoom)
}

// look tries what is held on a node for pods to come, while none is on its way: by the agent's packing there is room
// for it, or it is counted lost.
func (w *world) look(h *host) {
	if h.starting > 0 {
		return
	}
	var seats []ask
	for _, p := range w.seats {
		if p.Spec.NodeName == "" && p.seat == h.Name && w.holder.Lost(p.Labels["hold"]) == nil {
			seats = append(seats, p.ask)
		}
	}
	parts, _, _ := w.lender.Kept(lent)
	for _, p := range parts {
		if p.Node == h.Name {
			seats = append(seats, ask{p.Resource, p.N})
		}
	}
	if len(seats) > 0 {
		w.n[tried]++
	}
	if !h.fits(seats) {
		w.t.Errorf("after %v %s has no room for %v, of which none is counted lost", time.Since(w.begun), h.Name, seats)
	}
}

// changed is what follows when a node's devices are taken or free.
func (w *world) changed(h *host) {
	w.after(66*time.Millisecond, func() {
		for of, n := range h.Listed() {
			h.alloc[of] = min(h.alloc[of], n) // of more the kubelet tells later
		}
	})
	soon := func() time.Duration { return time.Second + time.Duration(w.r.Int64N(int64(time.Second))) }
	h.Changed(soon, w.after, func(now *gpunode.Status) { w.write(h, now) })
}

// write writes the GPUNode.
func (w *world) write(h *host, now *gpunode.Status) {
	h.shown = h.Clone()
	if err := w.f.SetGPUNode(h.Name, now); err != nil {
		w.t.Error(err)
	}
}

// kubelet tells every ten seconds how many devices there are.
func (w *world) kubelet(h *host) {
	was := h.alloc
	h.alloc = h.Listed()
	for of, n := range h.alloc {
		if n > was[of] {
			w.happens(moreRoom)
			break
		}
	}
	w.after(10*time.Second, func() { w.kubelet(h) })
}

// run is what becomes of a crowd.
func (c *scene) run(t *testing.T, seed uint64, pops bool) (n outcome) {
	synctest.Test(t, func(t *testing.T) {
		of := func(label string) func(*corev1.Pod) string {
			return func(p *corev1.Pod) string { return p.Labels[label] }
		}
		f := New("example.com", time.Now)
		w := &world{t: t, r: rand.New(rand.NewPCG(seed, 0)), begun: time.Now(), woken: make(chan time.Time, 1000), f: f,
			holder: HoldFor(f, of("hold")), lender: Lend(f, of("quota")), hosts: map[string]*host{}}
		w.pops, w.cycle = pops, 3*time.Millisecond+time.Duration(len(c.nodes))*2*time.Microsecond
		for i, has := range c.nodes {
			h := newHost(t, fmt.Sprintf("node-%04d", i), has, w.r)
			w.names, w.hosts[h.Name] = append(w.names, h.Name), h
			h.alloc = h.Listed()
			f.SetNode(node(h.Name, corev1.ConditionTrue))
			w.write(h, h.Write())
			w.after(time.Duration(w.r.Int64N(int64(10*time.Second))), func() { w.kubelet(h) })
		}
		for _, k := range []Kind{Nodes, Pods, GPUNodes, Held, Lent} {
			f.Listed(k)
		}
		for _, come := range c.come {
			come(w)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var runs sync.WaitGroup
		runs.Go(func() {
			_ = f.Run(ctx, func(context.Context, string) error { w.woken <- time.Now(); return nil })
		})
		w.run()
		cancel()
		runs.Wait()
		if w.left > 0 {
			t.Errorf("%d pods do not get to run", w.left)
		}
		w.n[wait] /= float64(w.pods)
		n = w.n
	})
	return n
}
