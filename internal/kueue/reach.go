// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"encoding/json"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"example.com/gpu-agent/internal/placer"
)

// wanted is what a workload's sets of pods ask for, and the nodes that they may be on. shape is the same
// for workloads that want the same. asks is true if a set asks for something.
type wanted struct {
	groups []placer.Group
	shape  string
	asks   bool
}

// where is a condition on nodes' labels. Conditions with the same key are the same. none is true if no node counts,
// since the pods are not judged.
type where struct {
	key   string
	holds func(labels map[string]string) bool
	none  bool
}

// labelled is the condition that a node has some labels.
func labelled(want map[string]string) where {
	return where{key: fmt.Sprint(want), holds: func(labels map[string]string) bool { return has(labels, want) }}
}

// reaches remember the nodes that sets of pods may be on, while nodes and flavors stay as they are. A
// cluster has thousands of workloads, and few kinds of them.
type reaches struct {
	nodes   []*corev1.Node
	flavors map[string]*Flavor
	known   map[string]*reach
}

// reach is the nodes that take new pods of a set, and the others that its pods may be on; sum is a digest.
type reach struct {
	open, closed []string
	sum          uint64
}

// maxReaches bounds what is remembered: tenants write any number of selectors.
const maxReaches = 10_000

var seed = maphash.MakeSeed()

// of begins anew if there are other nodes or flavors than before.
func (r *reaches) of(nodes []*corev1.Node, flavors map[string]*Flavor) {
	if r.known == nil || !slices.Equal(nodes, r.nodes) || !maps.Equal(flavors, r.flavors) {
		*r = reaches{nodes, flavors, map[string]*reach{}}
	}
}

// find returns the nodes that pods of a set may be on, and where a condition holds.
func (r *reaches) find(s *Set, v *View, of where) *reach {
	names := []string{}
	for i := range s.Pod.Containers {
		names = slices.AppendSeq(names, maps.Keys(resourcesOf(&s.Pod.Containers[i])))
	}
	slices.Sort(names)
	key, err := json.Marshal([]any{of.key, s.Pod.NodeSelector, s.Pod.Affinity, s.Pod.Tolerations, names})
	if err != nil {
		return r.look(s, v, of)
	}
	out := r.known[string(key)]
	if out == nil {
		if len(r.known) >= maxReaches {
			clear(r.known)
		}
		out = r.look(s, v, of)
		r.known[string(key)] = out
	}
	return out
}

func (r *reaches) look(s *Set, v *View, of where) *reach {
	out := &reach{}
	required := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: s.Pod})
	var sum maphash.Hash
	sum.SetSeed(seed)
	for _, n := range r.nodes {
		if ok, err := required.Match(n); !ok || err != nil || !of.holds(n.Labels) {
			continue
		}
		sum.WriteString(n.Name)
		if v.takes(n, s) {
			out.open = append(out.open, n.Name)
			sum.WriteByte(1)
		} else {
			out.closed = append(out.closed, n.Name)
			sum.WriteByte(0)
		}
	}
	out.sum = sum.Sum64()
	return out
}

// want is what a workload's sets ask for, on the nodes that they may be on by their own word and where a
// condition holds.
func (c *Checks) want(w *Workload, v *View, of func(*Set) where) wanted {
	var out wanted
	for i := range w.Sets {
		s := &w.Sets[i]
		g := placer.Group{Namespace: w.Namespace, N: s.N}
		g.Containers, g.Plain = s.asks(c.books)
		if len(g.Containers) == 0 {
			g.N = 0
		} else {
			out.asks = true
		}
		at := of(s)
		if at.none {
			g.N, at.holds = 0, func(map[string]string) bool { return false }
		}
		to := c.reaches.find(s, v, at)
		g.Among, g.Closed = to.open, to.closed
		out.groups = append(out.groups, g)
		out.shape += fmt.Sprint(g.Containers, g.Plain, g.N, to.sum)
	}
	return out
}

// asks is what a pod of the set asks for.
func (s *Set) asks(books Books) ([]placer.Container, placer.Amounts) {
	if s.request == nil {
		s.request = &request{}
		s.request.containers, s.request.plain = books.Asks(&s.Pod)
	}
	return s.request.containers, s.request.plain
}

// notJudged names what the scheduler looks at, for the pods of a workload's sets, and the placer does not: it
// depends on where other pods are.
func notJudged(w *Workload) string {
	var affinity, spread bool
	for i := range w.Sets {
		p := &w.Sets[i].Pod
		if a := p.Affinity; a != nil {
			to, from := a.PodAffinity, a.PodAntiAffinity
			affinity = affinity || to != nil && len(to.RequiredDuringSchedulingIgnoredDuringExecution) > 0 ||
				from != nil && len(from.RequiredDuringSchedulingIgnoredDuringExecution) > 0
		}
		for _, c := range p.TopologySpreadConstraints {
			spread = spread || c.WhenUnsatisfiable == corev1.DoNotSchedule
		}
	}
	switch {
	case affinity && spread:
		return "; not judged: its pods' affinity to pods, and their topology spread"
	case affinity:
		return "; not judged: its pods' affinity to pods"
	case spread:
		return "; not judged: its pods' topology spread"
	}
	return ""
}

// byFlavors is the condition of the flavors that Kueue chose for a workload's sets, and of the nodes that its pods were
// told. Sets of a workload that are in a cloud while others are on-prem are not judged: the cloud's check lets them go,
// whether or not the cloud has nodes yet.
func (c *Checks) byFlavors(w *Workload, v *View) func(*Set) where {
	split := c.split(w, v)
	return func(s *Set) where {
		if split && v.far(s) {
			return where{key: "none", none: true}
		}
		want := v.labels(s)
		for i := range w.Checks {
			maps.Copy(want, w.Checks[i].told(s.Name))
		}
		return labelled(want)
	}
}

// far reports whether a set has a flavor of a cloud.
func (v *View) far(s *Set) bool {
	cloud := func(name string) bool { return v.Flavors[name] != nil && v.Flavors[name].Cloud }
	return slices.ContainsFunc(s.Flavors, cloud)
}

// told is the node selector that a set's pods get of a check.
func (s *CheckState) told(set string) map[string]string {
	for i := range s.PodSetUpdates {
		if s.PodSetUpdates[i].Name == set {
			return s.PodSetUpdates[i].NodeSelector
		}
	}
	return nil
}

// labels are those of the nodes of a set's flavors.
func (v *View) labels(s *Set) map[string]string {
	out := map[string]string{}
	for _, name := range s.Flavors {
		if f := v.Flavors[name]; f != nil {
			maps.Copy(out, f.Labels)
		}
	}
	return out
}

// cloud reports whether nodes with these labels are of a flavor that costs money.
func (v *View) cloud(labels map[string]string) bool {
	for _, f := range v.Flavors {
		if f.Cloud && has(labels, f.Labels) {
			return true
		}
	}
	return false
}

func has(labels, want map[string]string) bool {
	for key, value := range want {
		if is, there := labels[key]; !there || is != value {
			return false
		}
	}
	return true
}

// takes reports whether pods of a set tolerate a node's taints; a cordon is a taint, too. They have the
// tolerations of their template, and those that Kueue gives them for the node's flavors. An admission plugin
// of the API server has pods tolerate the taints that are named for what they ask for.
func (v *View) takes(n *corev1.Node, s *Set) bool {
	if len(n.Spec.Taints) == 0 {
		return true
	}
	tolerations := slices.Clone(s.Pod.Tolerations)
	for _, f := range v.Flavors {
		if has(n.Labels, f.Labels) {
			tolerations = append(tolerations, f.Tolerations...)
		}
	}
	counts := func(t *corev1.Taint) bool {
		asks := func(c corev1.Container) bool { return resourcesOf(&c)[t.Key] }
		return t.Effect != corev1.TaintEffectPreferNoSchedule && !slices.ContainsFunc(s.Pod.Containers, asks)
	}
	_, repels := corev1helpers.FindMatchingUntoleratedTaint(klog.Background(), n.Spec.Taints, tolerations, counts, true)
	return !repels
}

// resourcesOf are the resources that a container names.
func resourcesOf(c *corev1.Container) map[string]bool {
	out := map[string]bool{}
	for _, list := range []corev1.ResourceList{c.Resources.Requests, c.Resources.Limits} {
		for name := range list {
			out[string(name)] = true
		}
	}
	return out
}
