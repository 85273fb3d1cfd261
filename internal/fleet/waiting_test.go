// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/placer"
)

// clock is one that tests set.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

// waker is a known fleet that runs, and the nodes for which it has the scheduler woken.
type waker struct {
	*Fleet
	*clock
	t     *testing.T
	woken chan string
}

func runFleet(t *testing.T, nodes ...string) *waker {
	w := &waker{Fleet: known(nodes...), clock: &clock{at: start}, t: t, woken: make(chan string, 100)}
	w.Fleet.now = w.clock.now
	w.run(func(node string) error { w.woken <- node; return nil })
	return w
}

// run has the fleet run until the test ends.
func (w *waker) run(wake func(node string) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx, func(_ context.Context, node string) error { return wake(node) }) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != context.Canceled {
			w.t.Errorf("ended with %v", err)
		}
	})
}

// wants waits for the next node.
func (w *waker) wants(node string) {
	w.t.Helper()
	select {
	case got := <-w.woken:
		if got != node {
			w.t.Fatalf("woken for %s, want %s", got, node)
		}
	case <-time.After(20 * time.Second):
		w.t.Fatalf("never woken for %s", node)
	}
}

// refuse asks for a pod and wants it refused.
func (w *waker) refuse(p *corev1.Pod, among ...string) {
	w.t.Helper()
	if on, _, err := place(context.Background(), w.Fleet, p, among); on != "" || err != nil {
		w.t.Fatalf("%s was placed on %q: %v", p.Name, on, err)
	}
}

// place asks for a pod, wants it on a node, and tells that it has devices there.
func (w *waker) place(p *corev1.Pod, on, uuid string, n int) {
	w.t.Helper()
	if got, refused, err := place(context.Background(), w.Fleet, p, []string{on}); got != on || err != nil {
		w.t.Fatalf("%s was placed on %q: %v, %v", p.Name, got, refused, err)
	}
	w.SetPod(bound(p, on, uuid, n))
}

// quiet wants that nobody is woken by news of some other kind, which comes last: by then
// everything before it has been looked at.
func (w *waker) quiet(last func(), node string) {
	w.t.Helper()
	last()
	w.wants(node)
}

// The scheduler is woken for a node when a pod that was refused there would fit: one ends,
// another reports its devices, a reservation lapses, the GPUNode has more.
func TestWokenWhereRoomAppears(t *testing.T) {
	w := runFleet(t, "a", "b")
	one, two := asks("1", "79"), asks("2", "79")
	w.place(one, "a", first, 79)
	w.place(two, "a", second, 79)
	w.refuse(asks("3", "10"), "a")
	w.SetGPUNode("b", says(first)) // it was not asked for this pod
	w.DeletePod("2")
	w.wants("a")

	// The pod is asked for again, and has a reservation beside one that lapses.
	w.pass(time.Minute)
	for _, name := range []string{"3", "4"} {
		if on, _, err := place(context.Background(), w.Fleet, asks(name, "39"), []string{"a"}); on != "a" ||
			err != nil {
			t.Fatalf("%s is on %q: %v", name, on, err)
		}
	}
	w.refuse(asks("5", "50"), "a")
	w.pass(placer.ReservedFor)
	w.wants("a")

	// What is starting has reported.
	w.pass(time.Minute)
	w.pass(time.Minute)
	w.DeletePod("1")
	starting := []*corev1.Pod{asks("6", "40"), asks("7", "40")}
	for _, p := range starting {
		p = p.DeepCopy()
		p.Spec.NodeName = "a"
		w.SetPod(p)
	}
	w.refuse(asks("8", "50"), "a")
	for _, p := range starting {
		w.SetPod(bound(p, "a", first, 40))
	}
	w.wants("a")
	if len(w.woken) > 0 {
		t.Errorf("woken for %s besides", <-w.woken)
	}
}

// For a node where a pod still does not fit nobody is woken, and neither is anybody when no
// pod waits; a pod of which the scheduler has not asked again is woken for once.
func TestNotWokenInVain(t *testing.T) {
	w := runFleet(t, "a", "b", "c")
	w.place(asks("1", "79"), "a", first, 79)
	w.place(asks("2", "79"), "a", second, 79)
	w.DeletePod("2") // nobody waits
	w.place(asks("2", "60"), "a", second, 60)
	w.place(asks("9", "79"), "b", first, 79)
	w.place(asks("10", "79"), "b", second, 79)
	w.refuse(asks("3", "40"), "a", "b")
	w.place(asks("4", "9"), "a", second, 9)
	w.DeletePod("4")                          // 19 units are free: not enough
	w.quiet(func() { w.DeletePod("9") }, "b") // and here are all
	w.pass(time.Minute)
	w.DeletePod("10") // it knows of b
	w.quiet(func() { w.DeletePod("1") }, "a")
	w.pass(time.Minute)
	w.SetPod(bound(asks("3", "40"), "b", first, 40))
	if waits, _ := w.State(); waits != 0 {
		t.Errorf("%d pods wait, and the only one is bound", waits)
	}
	w.place(asks("11", "79"), "a", first, 79)
	w.refuse(asks("12", "79"), "a")
	w.DeletePod("12")
	w.DeletePod("11") // and again nobody waits
	w.place(asks("11", "79"), "a", first, 79)
	w.refuse(asks("13", "79"), "a")
	w.quiet(func() { w.DeletePod("11") }, "a")
	if len(w.woken) > 0 {
		t.Errorf("woken for %s besides", <-w.woken)
	}
}

// A node is woken for at most once a second, and again where that failed.
func TestWokenAtMostOnceASecond(t *testing.T) {
	w := &waker{Fleet: known("a"), clock: &clock{at: start}, t: t, woken: make(chan string, 100)}
	w.Fleet.now = w.clock.now
	tries := 0
	w.run(func(node string) error {
		if tries++; tries == 1 {
			w.pass(again)
			return errors.New("refused")
		}
		w.woken <- node
		return nil
	})
	w.place(asks("1", "79"), "a", first, 79)
	w.place(asks("2", "79"), "a", second, 79)
	w.refuse(asks("3", "79"), "a")
	w.DeletePod("1")
	w.wants("a")
	if tries != 2 {
		t.Errorf("tried %d times", tries)
	}
	w.place(asks("1", "79"), "a", first, 79)
	w.refuse(asks("3", "79"), "a")
	w.DeletePod("1")
	select {
	case <-w.woken:
		t.Fatal("woken twice within a second of the fleet's clock")
	case <-time.After(3 * gather):
	}
	w.pass(again)
	w.wants("a")
}

// However many wait, those that ask for the same are one question for a node.
func TestManyThatWaitAreFewQuestions(t *testing.T) {
	const pods = 5000
	f := known("a")
	f.SetPod(bound(asks("big-1", "79"), "a", first, 79))
	f.SetPod(bound(asks("big-2", "70"), "a", second, 70))
	for i := range pods {
		on, _, err := place(context.Background(), f, asks(fmt.Sprint(i), fmt.Sprint(40+i%2)), []string{"a"})
		if on != "" || err != nil {
			t.Fatal(on, err)
		}
	}
	if waits, _ := f.State(); waits != pods || len(f.shapes) != 2 {
		t.Fatalf("%d pods wait in %d shapes", waits, len(f.shapes))
	}
	f.DeletePod("big-1")
	if due := f.due(); !slices.Equal(due, []string{"a"}) {
		t.Fatalf("due is %v", due)
	}
	if shapes := f.usable("a"); len(shapes) != 2 {
		t.Errorf("%d shapes could use it", len(shapes))
	}
	if shapes := f.usable("a"); shapes != nil {
		t.Error("the scheduler would be woken twice for the same")
	}
	for i := range pods {
		f.DeletePod(fmt.Sprint(i))
	}
	f.due()
	if len(f.shapes)+len(f.refusedPods)+len(f.changed) != 0 {
		t.Error("something is left of pods that are gone")
	}
}

// scheduled is a pod on a node that the scheduler has put there.
func scheduled(p *corev1.Pod, on string, at time.Time) *corev1.Pod {
	p = p.DeepCopy()
	p.Spec.NodeName = on
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue,
		LastTransitionTime: metav1.NewTime(at)}}
	return p
}

// told collects the unguarded pods.
func told(f *Fleet) func() []string {
	var names []string
	f.TellUnguarded(func(u Unguarded) { names = append(names, u.Namespace+"/"+u.Name+" on "+u.Node) })
	return func() []string {
		f.mu.Lock()
		defer f.mu.Unlock()
		slices.Sort(names)
		return names
	}
}

// A pod that was not placed, or is not where it was, is told of once. What was bound when the
// process began is not.
func TestUnguardedPods(t *testing.T) {
	f := New("example.com", func() time.Time { return start })
	names := told(f)
	f.SetNode(node("a", corev1.ConditionTrue))
	f.SetGPUNode("a", says(first, second))
	f.SetPod(scheduled(asks("old", "1"), "a", start))
	for _, k := range []Kind{Nodes, Pods, GPUNodes} {
		f.Listed(k)
	}
	for _, name := range []string{"good", "strayed"} {
		wantPlaced(t, f, asks(name, "1"), "a", "")
	}
	f.SetPod(scheduled(asks("good", "1"), "a", start))
	f.SetPod(scheduled(asks("strayed", "1"), "b", start))
	f.SetPod(scheduled(asks("wild", "1"), "a", start))
	f.SetPod(asks("pending", "1"))
	none := asks("none", "1")
	none.Spec.Containers = nil
	f.SetPod(scheduled(none, "a", start))
	for range 2 { // the pods are listed again
		for _, name := range []string{"old", "good", "wild"} {
			f.SetPod(scheduled(asks(name, "1"), "a", start))
		}
		f.SetPod(scheduled(asks("strayed", "1"), "b", start))
	}
	if got := names(); !slices.Equal(got, []string{"x/strayed on b", "x/wild on a"}) {
		t.Errorf("told of %q", got)
	}
}

// Who takes over tells of pods that were bound after the last word of who led before, and
// not of its own; while somebody else leads it tells of none.
func TestUnguardedPodsOfASuccessor(t *testing.T) {
	follows := errors.New("not yet")
	f := known("a", "b")
	f.LeadBy(func() error { return follows })
	f.led = false
	names := told(f)
	if on, _, err := place(context.Background(), f, asks("1", "1"), []string{"a"}); err != follows {
		t.Fatalf("placed on %q, %v", on, err)
	}
	before := start.Add(10 * time.Second)
	f.SetPod(scheduled(asks("guarded", "1"), "a", before.Add(-time.Second)))
	f.SetPod(scheduled(asks("between", "1"), "a", before.Add(time.Second)))
	if got := names(); got != nil {
		t.Errorf("told of %q and does not lead", got)
	}
	f.Lead(before, false)
	follows = nil
	f.SetPod(scheduled(asks("late", "1"), "a", before.Add(-time.Second))) // the watch was slow
	f.SetPod(scheduled(asks("wild", "1"), "a", before.Add(2*time.Second)))
	wantPlaced(t, f, asks("own", "1"), "a", "")
	if got := names(); !slices.Equal(got, []string{"x/between on a", "x/wild on a"}) {
		t.Errorf("told of %q", got)
	}
	// It hangs, and has its own lease again.
	follows = errors.New("hung")
	f.SetPod(scheduled(asks("own", "1"), "a", before.Add(20*time.Second)))
	f.SetPod(scheduled(asks("hung", "1"), "b", before.Add(5*time.Second)))
	f.Lead(before.Add(5500*time.Millisecond), true)
	follows = nil
	if got := names(); !slices.Equal(got, []string{"x/between on a", "x/hung on b", "x/wild on a"}) {
		t.Errorf("told of %q", got)
	}
}

// Pods that somebody else has refused, as the API says, wait for who leads then.
func TestSuccessorWakesForThoseWhoWait(t *testing.T) {
	follows := errors.New("not yet")
	w := &waker{Fleet: known("a"), clock: &clock{at: start}, t: t, woken: make(chan string, 100)}
	w.Fleet.now = w.clock.now
	w.LeadBy(func() error { return follows })
	stuck := func(name, units string) *corev1.Pod {
		p := asks(name, units)
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
			Reason: corev1.PodReasonUnschedulable}}
		return p
	}
	w.SetPod(stuck("1", "79"))
	w.SetPod(stuck("2", "99"))
	w.SetPod(asks("new", "1")) // nobody has tried it yet
	gone := stuck("3", "79")
	w.SetPod(gone)
	w.SetPod(scheduled(gone, "a", start))
	w.Lead(start, false)
	follows = nil
	if waits, _ := w.State(); waits != 2 {
		t.Errorf("%d wait, want 2", waits)
	}
	w.run(func(node string) error { w.woken <- node; return nil })
	w.wants("a")
}

// TestManyShapesOfOneNamespace: what 20,000 pods ask for that fit nowhere takes no more memory than
// the pods, and a pod of another namespace is woken at once.
func TestManyShapesOfOneNamespace(t *testing.T) {
	names := make([]string, 40)
	for i := range names {
		names[i] = fmt.Sprint("n", i)
	}
	f := known(names...)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	var pods []*corev1.Pod
	for i := range 20_000 {
		p := asks(fmt.Sprint("r", i), fmt.Sprint(80+i))
		p.Namespace = "tenant"
		f.SetPod(p)
		pods = append(pods, p)
	}
	before := heap()
	for _, p := range pods {
		if on, _, err := f.Place(t.Context(), string(p.UID), names); on != "" || err != nil {
			t.Fatalf("%s is placed on %q, %v", p.Name, on, err)
		}
	}
	if grown := int64(heap()) - int64(before); grown > 32<<20 {
		t.Errorf("refusals take %d MiB", grown>>20)
	}
	// A node is full, and then not.
	full := says(first, second)
	for i := range full.GPUs {
		full.GPUs[i].Used = piece.Set{{First: 0, Last: 78}}
	}
	if err := f.SetGPUNode("n7", full); err != nil {
		t.Fatal(err)
	}
	honest := asks("honest", "79")
	if on, _, err := place(t.Context(), f, honest, []string{"n7"}); on != "" || err != nil {
		t.Fatalf("%q, %v", on, err)
	}
	if shapes := f.usable("n7"); shapes != nil {
		t.Errorf("there is room for %d on a full node", len(shapes))
	}
	if err := f.SetGPUNode("n7", says(first, second)); err != nil {
		t.Fatal(err)
	}
	if shapes := f.usable("n7"); len(shapes) != 20_001 {
		t.Errorf("%d shapes are to be asked for again, want all", len(shapes))
	}
	// And a node that is gone is in no set.
	f.SetGPUNode("n7", nil)
	f.DeleteNode("n7")
	f.SetNode(node("new", corev1.ConditionTrue))
	if n := f.number("new"); n != 7 && len(f.numbers) != 40 {
		t.Errorf("a new node has the number %d of %d", n, len(f.numbers))
	}
	runtime.KeepAlive(pods)
}
