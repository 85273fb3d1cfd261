// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/placer"
)

// Held is the kind of rooms that are held for pods to come. Holder.Listed ends its list.
const Held Kind = "what is held for workloads"

// Holder holds room for groups of pods. Its methods may be called from several goroutines.
type Holder struct{ f *Fleet }

// HoldFor has room of a fleet held, and no question answered until the Holder has been told what
// was held before. Of returns the ID of a pod's hold, empty for none. It is called before the
// fleet is told of anything.
func HoldFor(f *Fleet, of func(*corev1.Pod) string) *Holder {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holdOf = append(f.holdOf, of)
	f.missing = append(f.missing, Held)
	f.books.Pause(func() { // a scheduler's question need not wait for the search
		f.mu.Unlock()
		f.mu.Lock()
	})
	return &Holder{f}
}

// Listed notes that all is held that was before.
func (h *Holder) Listed() { h.f.Listed(Held) }

// Ready is nil while room may be given to workloads that had none before.
func (h *Holder) Ready() error { return settled(h.f) }

// Hold finds room for groups ([placer.Books.Hold]) on nodes that take new pods, and returns the
// nodes of each group's pods. No is why there is none; nothing is held then that was not before.
func (h *Holder) Hold(id, name string, groups []placer.Group) (at [][]string, no *placer.Refusal) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	at, err := h.f.books.Hold(id, name, groups, h.f.now())
	errors.As(err, &no)
	h.touch(at)
	return at, no
}

// Open holds room as Hold does, also where guests have it yet ([placer.Books.Open]): ends are those
// that the caller has to end.
func (h *Holder) Open(id, name string, groups []placer.Group, guests []placer.Guest) (ends []string, at [][]string, no *placer.Refusal) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	ends, at, err := h.f.books.Open(id, name, groups, guests, h.f.now())
	errors.As(err, &no)
	h.touch(at)
	return ends, at, no
}

// SetHold notes a hold as it was written down ([placer.Books.SetHold]).
func (h *Holder) SetHold(id, name string, groups []placer.Group, at [][]string) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.f.books.SetHold(id, name, groups, at)
}

// News is a number that is another one whenever there may be room that was not there before.
func (h *Holder) News() uint64 {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	return h.f.books.News() + h.f.changes
}

// Drop gives a hold up. Pods that have got some of it keep that.
func (h *Holder) Drop(id string) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.f.books.Drop(id)
	for name := range h.f.says {
		h.f.touch(name) // who waits may have room now
	}
}

// Leave has the pods that there are use no seat of a hold from now on ([placer.Books.Leave]).
func (h *Holder) Leave(id string) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.f.books.Leave(id)
}

// Lost are the nodes where a hold has lost the room of pods to come ([placer.Books.Lost]).
func (h *Holder) Lost(id string) []string {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	return h.f.books.Lost(id)
}

func (h *Holder) touch(at [][]string) {
	for _, of := range at {
		for _, name := range of {
			h.f.touch(name)
		}
	}
}

// Stuck are the hosts that pods of a hold name in their node selectors, one for each pod that the scheduler
// calls unschedulable.
func (h *Holder) Stuck(id string) (hosts []string) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	for _, a := range h.f.asks {
		if a.stuck && a.host != "" && a.Hold == id && !a.Ending {
			hosts = append(hosts, a.host)
		}
	}
	slices.Sort(hosts)
	return hosts
}

// Nodes have the names, labels and taints of the Nodes, in order. A cordoned one has the taint that says so.
// The caller may not change them. They are the same until a Node changes.
func (h *Holder) Nodes() []*corev1.Node {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	if h.f.nodes == nil {
		h.f.nodes = []*corev1.Node{}
		for _, name := range slices.Sorted(maps.Keys(h.f.about)) {
			a := h.f.about[name]
			n := &corev1.Node{Spec: corev1.NodeSpec{Taints: a.taints}}
			n.Name, n.Labels = name, a.labels
			h.f.nodes = append(h.f.nodes, n)
		}
	}
	return h.f.nodes
}

// Asks is what a pod would ask for of the agents' resources, nil for nothing.
func (h *Holder) Asks(p *corev1.PodSpec) []placer.Container {
	return h.f.read(&corev1.Pod{Spec: *p}).Containers
}
