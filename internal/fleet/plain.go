// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	resourcehelper "k8s.io/component-helpers/resource"

	"example.com/gpu-agent/internal/placer"
)

// others are the bound pods that ask for none of the agent's resources. They have some of what pods with GPUs ask
// for, too: processor time, memory and the like. A Fleet's lock guards it.
type others struct {
	// pods has each of them by UID.
	pods map[string]other
	// use is what those on a node ask for in all, by the node's name.
	use map[string]map[string]int64
}

// other is a pod's node, and what the pod asks for.
type other struct {
	node string
	asks placer.Amounts
}

func newOthers() others {
	return others{pods: map[string]other{}, use: map[string]map[string]int64{}}
}

// set notes a pod, and forget takes it away. Both return the node whose pods ask for something else than before, empty
// if there is none.
func (o *others) set(p *corev1.Pod, asks placer.Amounts) (node string) {
	uid := string(p.UID)
	if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return o.forget(uid)
	}
	if was, there := o.pods[uid]; there && was.node == p.Spec.NodeName && slices.Equal(was.asks, asks) {
		return ""
	}
	o.forget(uid)
	is := other{p.Spec.NodeName, asks}
	o.pods[uid] = is
	o.add(is, 1)
	return is.node
}

func (o *others) forget(uid string) (node string) {
	was, there := o.pods[uid]
	if !there {
		return ""
	}
	delete(o.pods, uid)
	o.add(was, -1)
	return was.node
}

// add adds what a pod asks for to its node's sum, or takes it away.
func (o *others) add(p other, sign int64) {
	sum := o.use[p.node]
	if sum == nil {
		sum = map[string]int64{}
		o.use[p.node] = sum
	}
	for _, a := range p.asks {
		if sum[a.Name] += sign * a.N; sum[a.Name] == 0 {
			delete(sum, a.Name)
		}
	}
	if len(sum) == 0 {
		delete(o.use, p.node)
	}
}

// plainOf returns what a pod asks for beside the agent's devices, as the scheduler counts it: of its containers, its
// init containers and its overhead, and one of "pods". The names of the agent's resources begin with prefix.
func plainOf(p *corev1.Pod, prefix string) placer.Amounts {
	out := map[string]int64{string(corev1.ResourcePods): 1}
	as := resourcehelper.PodResourcesOptions{UseStatusResources: true} // after a resize the status counts, too
	for name, amount := range resourcehelper.PodRequests(p, as) {
		if !strings.HasPrefix(string(name), prefix) {
			out[string(name)] = plainAmount(name, amount)
		}
	}
	return placer.NewAmounts(out)
}

// plainAmount returns an amount in the unit of placer.Amount.
func plainAmount(name corev1.ResourceName, q resource.Quantity) int64 {
	n := q.Value()
	if name == corev1.ResourceCPU && n < placer.MostOfAmount {
		n = q.MilliValue()
	}
	return min(max(n, 0), placer.MostOfAmount)
}

// enterPlain writes into the books what plain room a node has for pods with GPUs: what it has in all, less what the
// other pods there ask for. It leaves out nodes without a GPUNode, since no question concerns them.
func (ns *nodes) enterPlain(books *placer.Books, name string, others map[string]int64) {
	if ns.says[name] == nil {
		books.SetPlain(name, nil)
		return
	}
	has := maps.Clone(ns.about[name].plain) // nil where there is no such Node
	for of, n := range others {
		if _, stated := has[of]; stated {
			has[of] -= n
		}
	}
	books.SetPlain(name, has)
}
