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
	// gather is how long news is collected before it is looked at who could use it.
	gather = 200 * time.Millisecond
	// again is how long a node is left alone after the scheduler was woken for it.
	again = time.Second
	// most is for how many nodes the scheduler is woken at a time. Whoever then still waits
	// is looked at again.
	most = 20
	// stale is after how long a pod of which nothing more is heard is forgotten. A scheduler
	// tries pods again after five minutes.
	stale = 15 * time.Minute
	// tries is how many shapes are looked at a time that wait for room on a node. Each namespace has
	// its turn, so that one with thousands of them makes no other wait.
	tries = 200
)

// waiting are the pods that were refused and have no place. A Fleet's lock guards it.
type waiting struct {
	// refusedPods are they by UID, and shapes by their namespace and what they ask for.
	refusedPods map[string]*shape
	shapes      map[shapeKey]*shape
	// numbers are those of nodes in sets, and spare those that no node has any more.
	numbers map[string]int
	spare   []int
	// changed are nodes of which there is news since it was last looked at who could use it.
	changed map[string]bool
	// woken is when the scheduler was last woken for a node.
	woken map[string]time.Time
	// news is sent to when there is.
	news chan struct{}
	// refusals counts pods for which room was looked for in vain. Last is whose the last one was, by its
	// group if it has one, and others how many there were when it was another's.
	refusals, others int
	last             string
}

// shapeKey tells shapes apart.
type shapeKey struct{ namespace, containers string }

// shape are pods of a namespace that ask for the same.
type shape struct {
	key shapeKey
	// pod asks for that and is none of them, and since is when each was refused last.
	pod   placer.Pod
	since map[string]time.Time
	// nodes are those that had no room for one of them, and for which the scheduler has not
	// been woken since.
	nodes nodeSet
}

// nodeSet is a set of nodes by number, a bit each: there may be as many sets as pods that wait.
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
	return waiting{refusedPods: map[string]*shape{}, shapes: map[shapeKey]*shape{}, numbers: map[string]int{}, changed: map[string]bool{}, woken: map[string]time.Time{}, news: make(chan struct{}, 1)}
}

// touch notes that there is news of a node; without anybody who waits for some it is none.
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

// number is that of a node.
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

// unnumber forgets a node that is gone.
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
	key := shapeKey{p.Namespace, fmt.Sprint(p.Containers)}
	s := w.shapes[key]
	if s == nil || w.refusedPods[p.UID] != s {
		w.satisfied(p.UID)
	}
	if s == nil {
		s = &shape{key: key, pod: placer.Pod{Containers: p.Containers}, since: map[string]time.Time{}}
		w.shapes[key] = s
	}
	s.since[p.UID] = now
	w.refusedPods[p.UID] = s
	for _, name := range by {
		s.nodes.add(w.number(name))
	}
}

// satisfied notes that a pod does not wait any more.
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

// State is how many pods wait after a refusal, and how many have room reserved.
func (f *Fleet) State() (waiting, reservations int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.refusedPods), len(f.books.Reserved(f.now()))
}

// Run has the scheduler woken for nodes on which there is room for a pod that was refused
// there, until ctx ends, whose error it returns. News is gathered for 200 ms. Wake is called
// for a node at most once a second, and again later where it fails.
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

// lapse ends what has been there for too long, and has the books look at what has changed
// before somebody asks, with questions answered in between.
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

// due takes the nodes with news for which the scheduler has not just been woken; none while
// this process does not lead.
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

// keep has a node looked at again, for shapes for which the scheduler could not be woken.
func (f *Fleet) keep(node string, shapes []*shape) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range shapes {
		s.nodes.add(f.number(node))
	}
	if len(f.refusedPods) > 0 {
		f.changed[node] = true // without news: it is for the next tick
	}
}

// usable looks whether a node had no room for a pod and has some now. Then it returns all
// shapes that had none there, since the scheduler will ask for each again, and comes back
// to a shape only when it has been refused there once more. Questions that come meanwhile are
// answered in between. Where there are more shapes than are looked at a time, the others' turn is
// at the next tick.
func (f *Fleet) usable(node string) []*shape {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, there := f.numbers[node]
	if !there {
		return nil
	}
	var asked []*shape
	of := map[string][]*shape{}
	for _, s := range f.shapes { // in no order: at the next tick others come first
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
					f.hope(s)
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
