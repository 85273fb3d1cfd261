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

// lending is what a door for other clusters needs to know of nodes. A Fleet's lock guards it.
type lending struct {
	// holdOf return the ID of a pod's hold, empty for none.
	holdOf []func(*corev1.Pod) string
	// about are Nodes, as far as it matters, nodes the same for the Holder, nil after a change, and changes
	// how many there have been.
	about   map[string]about
	nodes   []*corev1.Node
	changes uint64
}

// about is what is known of a Node beside its GPUs.
type about struct {
	// open is false of a node that is cordoned; taints then has one for that.
	open   bool
	taints []corev1.Taint
	labels map[string]string
	// plain is what it can give out that is not of the agent's.
	plain corev1.ResourceList
}

// plainNames are the resources of every Node that are lent with GPUs.
var plainNames = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourcePods}

func newLending() lending {
	return lending{about: map[string]about{}}
}

func aboutNode(n *corev1.Node) about {
	a := about{open: !n.Spec.Unschedulable, labels: n.Labels, plain: corev1.ResourceList{}}
	for _, t := range n.Spec.Taints {
		a.taints = append(a.taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: t.Effect})
	}
	if !a.open {
		// As the scheduler has it: the taint itself comes later.
		cordon := corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}
		a.taints = append(a.taints, cordon)
	}
	for _, name := range plainNames {
		if amount, there := n.Status.Allocatable[name]; there {
			a.plain[name] = amount
		}
	}
	return a
}

func (a about) equal(o about) bool {
	return a.open == o.open && slices.Equal(a.taints, o.taints) && maps.Equal(a.labels, o.labels) &&
		maps.EqualFunc(a.plain, o.plain, func(x, y resource.Quantity) bool { return x.Equal(y) })
}

// Lent is the kind of what is lent to other clusters, of which Lender.Listed tells.
const Lent Kind = "what other clusters were granted"

// Lender keeps room for other clusters. Its methods may be called from several goroutines.
type Lender struct {
	f *Fleet
	// kept has where each quota's room was when it was last looked at; f's lock guards it.
	kept map[string][]placer.Part
}

// Lend has room of a fleet kept for other clusters, and no question answered until the
// Lender has been told what there was before. Of says which quota a pod is a member of, empty
// for none. It is called before the fleet is told of anything.
func Lend(f *Fleet, of func(*corev1.Pod) string) *Lender {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holdOf = append(f.holdOf, of)
	f.missing = append(f.missing, Lent)
	return &Lender{f: f, kept: map[string][]placer.Part{}}
}

// Listed notes that all is kept that was before.
func (l *Lender) Listed() { l.f.Listed(Lent) }

// Ready is nil while other clusters may be granted what they had not before.
func (l *Lender) Ready() error { return settled(l.f) }

// Keep keeps room for a quota ([placer.Books.Keep]) on nodes that take new pods. It does so
// also while questions are not answered.
func (l *Lender) Keep(id string, want map[string]int) (short map[string]int) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	short = l.f.books.Keep(id, want, func(node string) bool { return l.f.about[node].open })
	l.moved(id)
	return short
}

// Drop gives it up.
func (l *Lender) Drop(id string) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	l.f.books.Drop(id)
	l.moved(id)
}

// moved has those who wait looked at where room was kept and is not any more.
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

// Kept is what is kept for a quota beside what its pods have, what there is no room for, and
// the nodes that it is on or has pods on, sorted.
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

// Labels are those that all of some nodes have, with the same values.
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

// Lendable is how many devices of each resource the nodes have by their agents' last word,
// whoever has them, and what else can be given out by those that are ready and take new pods.
func (l *Lender) Lendable() (devices map[string]int, plain corev1.ResourceList) {
	l.f.mu.Lock()
	defer l.f.mu.Unlock()
	devices, plain = map[string]int{}, corev1.ResourceList{}
	for name, says := range l.f.says {
		for _, r := range says.Resources {
			devices[r.Name] += r.Total
		}
		a := l.f.about[name]
		if !l.f.ready[name] || !a.open || !gpunode.Is(says.Conditions, gpunode.Ready) {
			continue
		}
		for name, amount := range a.plain {
			sum := plain[name]
			sum.Add(amount)
			plain[name] = sum
		}
	}
	return devices, plain
}
