// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/placer"
)

const (
	// gather is how long Run collects news before it looks for pods that could use the room.
	gather = 200 * time.Millisecond
	// again is how long Run leaves a node alone after it has had the scheduler woken for it.
	again = time.Second
	// most is how many nodes Run has the scheduler woken for at a time. Run looks at the other nodes with
	// news at the next tick.
	most = 20
	// stale is how long the Fleet remembers a pod's refusal or answer without a further question for it. A
	// scheduler tries pods again after five minutes.
	stale = 15 * time.Minute
	// tries is how many shapes are tried on a node at a time. Namespaces take turns, so that one with thousands
	// of shapes does not make the others wait.
	tries = 200
)

// waiting is what is known of the pods that were refused and have no reservation. A Fleet's lock guards it.
type waiting struct {
	// refusedPods has the shape of each of these pods, by UID.
	refusedPods map[string]*shape
	shapes      map[shapeKey]*shape
	// gangs are the groups that were asked for, by name.
	gangs map[string]*gang
	// numbers are the nodes' numbers in sets, by name. spare are numbers of nodes that are gone.
	numbers map[string]int
	spare   []int
	// changed are the nodes with news that Run has not looked at yet.
	changed map[string]bool
	// woken is when Run last had the scheduler woken for a node, by the node's name.
	woken map[string]time.Time
	// news has room for one value. It has one while there is news.
	news chan struct{}
	// refusals counts the searches that found no room.
	refusals int
	// last names the pod of the last such search, by its group if it has one and otherwise by its UID.
	last string
	// others is what refusals was when the present row of refusals of last began.
	others int
}

// shapeKey is what the pods of a shape have in common.
type shapeKey struct{ namespace, containers, hold string }

// shape is the pods of a namespace and a hold that were refused and ask for the same.
type shape struct {
	key shapeKey
	// pod asks for the same, but is not one of them. It has no UID.
	pod placer.Pod
	// since is when each pod was refused last, by UID.
	since map[string]time.Time
	// nodes are those that had no room for one of the pods. Once the scheduler is woken for a node,
	// that node leaves the set.
	nodes nodeSet
}

// nodeSet is a set of nodes. It has a bit for each node's number, since there may be as many sets as waiting pods.
type nodeSet []uint64

func (s *nodeSet) add(n int) {
	for len(*s) <= n/64 {
		*s = append(*s, 0)
	}
	(*s)[n/64] |= 1 << (n % 64)
}

func (s nodeSet) has(n int) bool { return n/64 < len(s) && s[n/64]&(1<<(n%64)) != 0 }

func (s nodeSet) drop(n int) {
	if n/64 < len(s) {
		s[n/64] &^= 1 << (n % 64)
	}
}

func newWaiting() waiting {
	return waiting{
		refusedPods: map[string]*shape{}, shapes: map[shapeKey]*shape{}, gangs: map[string]*gang{},
		numbers: map[string]int{}, changed: map[string]bool{}, woken: map[string]time.Time{},
		news: make(chan struct{}, 1),
	}
}

// touch notes that there is news of a node. It does nothing while no pod waits.
func (w *waiting) touch(node string) {
	if node == "" || len(w.refusedPods) == 0 {
		return
	}
	w.changed[node] = true
	select {
	case w.news <- struct{}{}:
	default:
	}
}

// number returns the number of a node, and gives it one if it has none.
func (w *waiting) number(node string) int {
	n, there := w.numbers[node]
	if !there {
		if n = len(w.numbers) + len(w.spare); len(w.spare) > 0 {
			n, w.spare = w.spare[0], w.spare[1:]
		}
		w.numbers[node] = n
	}
	return n
}

// unnumber forgets the number of a node that is gone.
func (w *waiting) unnumber(node string) {
	n, there := w.numbers[node]
	if !there {
		return
	}
	for _, s := range w.shapes {
		s.nodes.drop(n)
	}
	delete(w.numbers, node)
	w.spare = append(w.spare, n)
}

// refused notes that nodes had no room for a pod.
func (w *waiting) refused(p placer.Pod, by []string, now time.Time) {
	key := shapeKey{p.Namespace, fmt.Sprint(p.Containers), p.Hold}
	s := w.shapes[key]
	if s == nil || w.refusedPods[p.UID] != s {
		w.satisfied(p.UID)
	}
	if s == nil {
		pod := placer.Pod{Containers: p.Containers, Plain: p.Plain, Hold: p.Hold}
		s = &shape{key: key, pod: pod, since: map[string]time.Time{}}
		w.shapes[key] = s
	}
	s.since[p.UID] = now
	w.refusedPods[p.UID] = s
	for _, name := range by {
		s.nodes.add(w.number(name))
	}
}

// satisfied notes that a pod no longer waits.
func (w *waiting) satisfied(uid string) {
	s := w.refusedPods[uid]
	if s == nil {
		return
	}
	delete(w.refusedPods, uid)
	if delete(s.since, uid); len(s.since) == 0 {
		delete(w.shapes, s.key)
	}
}

// State returns how many pods wait after a refusal, and how many have a reservation or are nominated.
func (f *Fleet) State() (waiting, reservations int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.refusedPods), len(f.books.Reserved(f.now()))
}

// Run has the scheduler woken for each node that has room for a pod that it refused before. It runs until ctx ends,
// and returns the error of ctx. It gathers news for 200 ms. It calls wake for a node at most once a second, and again
// later if wake fails.
func (f *Fleet) Run(ctx context.Context, wake func(ctx context.Context, node string) error) error {
	tick := time.NewTicker(again)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			f.lapse()
		case <-f.news:
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(gather):
			}
		}
		sent := 0
		for _, node := range f.due() {
			if sent == most {
				f.keep(node, nil)
				continue
			}
			if shapes := f.usable(node); shapes == nil {
				continue
			} else if err := wake(ctx, node); err != nil {
				f.keep(node, shapes)
			}
			sent++
		}
	}
}

// lapse ends reservations and forgets refusals and answers whose time has come. It also has the books work out the
// room of changed nodes before a question needs it. Questions are answered in between.
func (f *Fleet) lapse() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.missing) == 0 && f.books.Refresh(2) {
		f.mu.Unlock()
		f.mu.Lock()
	}
	now := f.now()
	for _, node := range f.books.Lapsed(now) {
		f.touch(node)
	}
	for uid, s := range f.refusedPods {
		if now.Sub(s.since[uid]) > stale {
			f.satisfied(uid)
		}
	}
	maps.DeleteFunc(f.woken, func(_ string, at time.Time) bool { return now.Sub(at) >= again })
	maps.DeleteFunc(f.answers, func(_ string, a answer) bool { return now.Sub(a.at) > stale })
	maps.DeleteFunc(f.gangs, func(_ string, g *gang) bool { return now.Sub(g.at) >= hopelessFor })
}

// due takes the nodes with news from changed, but for those that the scheduler was woken for within the last second.
// It takes none while questions are not answered.
func (f *Fleet) due() (out []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listed(context.Background()) != nil {
		return nil
	}
	for node := range f.changed {
		if f.now().Sub(f.woken[node]) >= again {
			out = append(out, node)
			delete(f.changed, node)
		}
	}
	slices.Sort(out)
	return out
}

// keep has a node looked at again. It puts back the shapes that usable took, if the scheduler could not be woken.
func (f *Fleet) keep(node string, shapes []*shape) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shapes {
		s.nodes.add(f.number(node))
	}
	if len(f.refusedPods) > 0 {
		f.changed[node] = true // without a value in news, so Run comes back at the next tick
	}
}

// usable looks for a shape that the node refused before and that has room there now. If there is one, usable takes
// the node out of all shapes that it refused, and returns them: the scheduler will ask for the pods of each again. If
// there is none, it returns nil.
//
// Questions are answered in between. If there are more shapes than tries, the next tick tries others.
func (f *Fleet) usable(node string) []*shape {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, there := f.numbers[node]
	if !there {
		return nil
	}
	var asked []*shape
	of := map[string][]*shape{}
	for _, s := range f.shapes { // in random order, so that others come first at the next tick
		if s.nodes.has(n) {
			asked = append(asked, s)
			of[s.key.namespace] = append(of[s.key.namespace], s)
		}
	}
	tried := 0
	for i := 0; len(of) > 0 && tried < tries; i++ {
		for namespace, shapes := range of {
			if i == len(shapes) {
				delete(of, namespace)
				continue
			}
			rest, _ := f.withoutDRA(shapes[i].pod, node)
			if len(rest.Containers) == 0 || f.books.HasRoom(rest, node) {
				for _, s := range asked {
					s.nodes.drop(n)
					f.hope(s, f.asks)
				}
				f.woken[node] = f.now()
				return asked
			}
			if tried++; tried == tries {
				break
			}
			f.mu.Unlock()
			f.mu.Lock()
		}
	}
	if tried < len(asked) {
		f.changed[node] = true
	}
	return nil
}
