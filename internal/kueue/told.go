// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// What pods are told of their room, and how it is read again.

// count counts nodes, in order, as "a:2,b:1".
func count(at []string) string {
	n := map[string]int{}
	for _, name := range at {
		n[name]++
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(n)) {
		out = append(out, name+":"+strconv.Itoa(n[name]))
	}
	return strings.Join(out, ",")
}

// uncount reads what count has written; what it has not is left out.
func uncount(text string) (at []string) {
	for one := range strings.SplitSeq(text, ",") {
		name, n, _ := strings.Cut(one, ":")
		if k, err := strconv.Atoi(n); err == nil && name != "" {
			for range min(k, 1<<16) {
				at = append(at, name)
			}
		}
	}
	return at
}

// places are for people: on which nodes there is room for how many pods.
func places(at [][]string) string {
	return said(strings.ReplaceAll(strings.ReplaceAll(count(slices.Concat(at...)), ",", ", "), ":", " × "))
}

// updates are what pods are told of their room: their hold, its nodes and, if all of a set have their room on one
// node, a node selector. A set of an elastic job gets no selector.
func (c *Checks) updates(w *Workload, at [][]string) (out []Update) {
	for i, of := range at {
		if len(of) == 0 {
			continue
		}
		told := map[string]string{c.domain + "/" + holdName: c.key(w), c.domain + "/" + nodesName: count(of)}
		u := Update{Name: w.Sets[i].Name, Annotations: told}
		n := slices.IndexFunc(c.reaches.nodes, func(n *corev1.Node) bool { return n.Name == of[0] })
		_, grows := w.Annotations[sliceName]
		if n >= 0 && !grows && !slices.ContainsFunc(of, func(name string) bool { return name != of[0] }) {
			if host := c.reaches.nodes[n].Labels[corev1.LabelHostname]; host != "" {
				u.NodeSelector = map[string]string{corev1.LabelHostname: host}
			}
		}
		out = append(out, u)
	}
	return out
}
