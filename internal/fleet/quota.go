// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/placer"
)

// Lent is the kind of the room that other clusters were granted. Lender.Listed notes that it is listed.
const Lent Kind = "what other clusters were granted"

// Lender keeps room for other clusters. Its methods may be called from several goroutines.
type Lender struct {
	f *Fleet
	// kept is where each quota's room was at the last look, by the quota's ID. The Fleet's lock guards it.
	kept map[string][]placer.Part
}

// Lend returns a Lender for a fleet. Call it before the fleet is told of anything. The fleet answers no question until
// the caller has repeated each Keep of the process before, and called Listed. of returns the ID of the quota that a pod
// uses, empty for none.
func Lend(f *Fleet, of func(*corev1.Pod) string) *Lender {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holdOf = append(f.holdOf, of)
	f.missing = append(f.missing, Lent)
	return &Lender{f: f, kept: map[string][]placer.Part{}}
}

// Listed notes that the caller has called Keep for all that other clusters were granted before.
func (l *Lender) Listed() { l.f.Listed(Lent) }

// Ready returns nil if other clusters may be granted more than they have. Otherwise it returns the reason.
func (l *Lender) Ready() error { return settled(l.f) }

// Keep keeps room for a quota on nodes that take new pods, as [placer.Books.Keep] does. It also works
// while questions are not answered.
func (l *Lender) Keep(id string, want map[string]int) (short map[string]int) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	short = l.f.books.Keep(id, want, func(node string) bool { return l.f.about[node].open })
	l.moved(id)
	return short
}

// Drop gives up the room that is kept for a quota.
func (l *Lender) Drop(id string) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	l.f.books.Drop(id)
	l.moved(id)
}

// moved has waiting pods looked at on the nodes where room was kept for a quota and no longer is.
func (l *Lender) moved(id string) {
	parts, _ := l.f.books.Kept(id)
	for _, p := range l.kept[id] {
		if !slices.Contains(parts, p) {
			l.f.touch(p.Node)
		}
	}
	if l.kept[id] = parts; parts == nil {
		delete(l.kept, id)
	}
}

// Kept returns three things about a quota: the parts that are kept beside what its pods have, the amounts that have
// found no room, and the names of the nodes with such parts or pods, sorted.
func (l *Lender) Kept(id string) (parts []placer.Part, short map[string]int, nodes []string) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	parts, short = l.f.books.Kept(id)
	nodes = l.f.books.MembersOn(id)
	for _, p := range parts {
		nodes = append(nodes, p.Node)
	}
	slices.Sort(nodes)
	return parts, short, slices.Compact(nodes)
}

// Labels returns the labels that all of some nodes have with the same value.
func (l *Lender) Labels(nodes []string) map[string]string {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	var out map[string]string
	for i, name := range nodes {
		labels := l.f.about[name].labels
		if i == 0 {
			out = maps.Clone(labels)
		}
		maps.DeleteFunc(out, func(key, value string) bool { was, there := labels[key]; return !there || was != value })
	}
	return out
}

// lentNames are the resources that a Lender lends together with GPUs. Every Node has them.
var lentNames = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourcePods,
}

// Lendable returns what there is to lend, taken or not: how many devices of each resource all GPUNodes have, and how
// much of lentNames is allocatable on the nodes that are ready and take new pods.
func (l *Lender) Lendable() (devices map[string]int, plain corev1.ResourceList) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	devices, plain = map[string]int{}, corev1.ResourceList{}
	for name, says := range l.f.says {
		for _, r := range says.Resources {
			devices[r.Name] += r.Total
		}
		a := l.f.about[name]
		if !a.ready || !a.open || !gpunode.Is(says.Conditions, gpunode.Ready) {
			continue
		}
		for _, name := range lentNames {
			if n, there := a.plain[string(name)]; there {
				amount := resource.NewQuantity(n, resource.DecimalSI)
				if name == corev1.ResourceCPU {
					amount = resource.NewMilliQuantity(n, resource.DecimalSI)
				}
				amount.Add(plain[name])
				plain[name] = *amount
			}
		}
	}
	return devices, plain
}
