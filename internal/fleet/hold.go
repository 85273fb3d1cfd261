// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/placer"
)

// Held is the kind of the room that is held for workloads. Holder.Listed notes that it is listed.
const Held Kind = "what is held for workloads"

// Holder holds room for groups of pods that do not exist yet. Its methods may be called from several goroutines.
type Holder struct{ f *Fleet }

// HoldFor returns a Holder for a fleet. Call it before the fleet is told of anything. The fleet answers no question
// until the caller has repeated the holds of the process before (SetHold), and called Listed. of returns the ID of
// the hold that a pod uses, empty for none.
func HoldFor(f *Fleet, of func(*corev1.Pod) string) *Holder {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holdOf = append(f.holdOf, of)
	f.missing = append(f.missing, Held)
	f.books.Pause(func() { // lets the Fleet answer a scheduler during a search
		f.mu.Unlock()
		f.mu.Lock()
	})
	return &Holder{f}
}

// Listed notes that the caller has told of all holds that were written down before.
func (h *Holder) Listed() { h.f.Listed(Held) }

// Ready returns nil if room may be held for more workloads. Otherwise it returns the reason.
func (h *Holder) Ready() error { return settled(h.f) }

// Hold holds room for groups of pods, and returns the nodes of each group's pods ([placer.Books.Hold]). If there is no
// room, it returns the reason, and the hold stays as it was.
func (h *Holder) Hold(id, name string, groups []placer.Group) (at [][]string, no *placer.Refusal) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	at, err := h.f.books.Hold(id, name, groups, h.f.now())
	errors.As(err, &no)
	h.touch(at)
	return at, no
}

// Open holds room as Hold does, but also where guests still have it. The caller must end the guests that it returns
// in ends ([placer.Books.Open]).
func (h *Holder) Open(
	id, name string, groups []placer.Group, guests []placer.Guest,
) (ends []string, at [][]string, no *placer.Refusal) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	ends, at, err := h.f.books.Open(id, name, groups, guests, h.f.now())
	errors.As(err, &no)
	h.touch(at)
	return ends, at, no
}

// SetHold notes a hold that was written down, with the nodes of each group's pods ([placer.Books.SetHold]).
func (h *Holder) SetHold(id, name string, groups []placer.Group, at [][]string) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.f.books.SetHold(id, name, groups, at)
}

// News returns a number that changes whenever there may be room that was not there before.
func (h *Holder) News() uint64 {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	return h.f.books.News() + h.f.changes
}

// Drop gives a hold up. Its pods that are on nodes keep their room.
func (h *Holder) Drop(id string) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.f.books.Drop(id)
	for name := range h.f.says {
		h.f.touch(name) // pods that wait may have room now
	}
}

// Leave notes that the present pods of a hold use none of its seats from now on ([placer.Books.Leave]).
func (h *Holder) Leave(id string) {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	h.f.books.Leave(id)
}

// Lost returns the nodes on which a hold has lost room ([placer.Books.Lost]).
func (h *Holder) Lost(id string) []string {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	return h.f.books.Lost(id)
}

// touch has waiting pods looked at on the nodes of a hold.
func (h *Holder) touch(at [][]string) {
	for _, of := range at {
		for _, name := range of {
			h.f.touch(name)
		}
	}
}

// Stuck returns the hostname in the node selector of each pod of a hold that the scheduler has found no node for,
// sorted. It leaves out pods without a hostname and pods that are being deleted.
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

// Running reports whether pods of a hold are on nodes, and are not ending ([placer.Books.Running]).
func (h *Holder) Running(id string) bool {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	return h.f.books.Running(id)
}

// Might reports whether groups would have room if only some holds stayed ([placer.Books.Might]).
func (h *Holder) Might(groups []placer.Group, stay func(hold string) bool) bool {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	return h.f.books.Might(groups, stay, h.f.now())
}

// Nodes returns all Nodes with their names, labels and taints, sorted by name. A cordoned node has the taint
// node.kubernetes.io/unschedulable. The caller may not change the result. It is the same slice until a Node changes.
func (h *Holder) Nodes() []*corev1.Node {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	if h.f.list == nil {
		h.f.list = []*corev1.Node{}
		for _, name := range slices.Sorted(maps.Keys(h.f.about)) {
			a := h.f.about[name]
			n := &corev1.Node{Spec: corev1.NodeSpec{Taints: a.taints}}
			n.Name, n.Labels = name, a.labels
			h.f.list = append(h.f.list, n)
		}
	}
	return h.f.list
}

// Asks returns the containers of a pod that ask for the agents' resources, nil if none does, and what the pod asks for
// beside these resources.
func (h *Holder) Asks(p *corev1.PodSpec) ([]placer.Container, placer.Amounts) {
	spec := *p
	spec.InitContainers, spec.Containers = defaulted(p.InitContainers), defaulted(p.Containers)
	of := h.f.read(&corev1.Pod{Spec: spec})
	return of.Containers, of.Plain
}

// defaulted returns containers of a pod template as those of its pods are: where one has a limit and no request, the
// API server makes the limit the request.
func defaulted(containers []corev1.Container) []corev1.Container {
	out := slices.Clone(containers)
	for i := range out {
		requests := maps.Clone(out[i].Resources.Limits)
		if requests == nil {
			continue
		}
		maps.Copy(requests, out[i].Resources.Requests)
		out[i].Resources.Requests = requests
	}
	return out
}
