// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
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
)

// waiting are the pods that were refused and have no place. A Fleet's lock guards it.
type waiting struct {
	// refusedPods are they by UID, and shapes by what they ask for.
	refusedPods map[string]*shape
	shapes      map[string]*shape
	// changed are nodes of which there is news since it was last looked at who could use it.
	changed map[string]bool
	// woken is when the scheduler was last woken for a node.
	woken map[string]time.Time
	// news is sent to when there is.
	news chan struct{}
}

// shape are pods that ask for the same.
type shape struct {
	// pod asks for that and is none of them, and since is when each was refused last.
	pod   placer.Pod
	since map[string]time.Time
	// nodes are those that had no room for one of them, and for which the scheduler has not
	// been woken since.
	nodes map[string]bool
}

func newWaiting() waiting {
	return waiting{refusedPods: map[string]*shape{}, shapes: map[string]*shape{}, changed: map[string]bool{}, woken: map[string]time.Time{}, news: make(chan struct{}, 1)}
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

// refused notes that nodes had no room for a pod.
func (w *waiting) refused(p placer.Pod, by []string, now time.Time) {
	key := fmt.Sprint(p.Containers)
	s := w.shapes[key]
	if s == nil || w.refusedPods[p.UID] != s {
		w.satisfied(p.UID)
	}
	if s == nil {
		s = &shape{pod: placer.Pod{Containers: p.Containers}, since: map[string]time.Time{}, nodes: map[string]bool{}}
		w.shapes[key] = s
	}
	s.since[p.UID] = now
	w.refusedPods[p.UID] = s
	for _, name := range by {
		s.nodes[name] = true
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
		delete(w.shapes, fmt.Sprint(s.pod.Containers))
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
	for node, at := range f.woken {
		if now.Sub(at) >= again {
			delete(f.woken, node)
		}
	}
	for uid, a := range f.answers {
		if now.Sub(a.at) > stale {
			delete(f.answers, uid)
		}
	}
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
		s.nodes[node] = true
	}
	if len(f.refusedPods) > 0 {
		f.changed[node] = true // without news: it is for the next tick
	}
}

// usable looks whether a node had no room for a pod and has some now. Then it returns all
// shapes that had none there, since the scheduler will ask for each again, and comes back
// to a shape only when it has been refused there once more. Questions that come meanwhile are
// answered in between.
func (f *Fleet) usable(node string) []*shape {
	f.mu.Lock()
	defer f.mu.Unlock()
	var asked []*shape
	for _, s := range f.shapes {
		if s.nodes[node] {
			asked = append(asked, s)
		}
	}
	for _, s := range asked {
		rest, _ := f.withoutDRA(s.pod, node)
		if len(rest.Containers) == 0 || f.books.HasRoom(rest, node) {
			for _, s := range asked {
				delete(s.nodes, node)
			}
			f.woken[node] = f.now()
			return asked
		}
		f.mu.Unlock()
		f.mu.Lock()
	}
	return nil
}
