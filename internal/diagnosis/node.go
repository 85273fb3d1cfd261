// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/status"
)

// node returns what is wrong on the subject.
func (f *Facts) node() []Finding {
	views := f.views()
	v := &views[slices.IndexFunc(views, func(v view) bool { return v.name == f.Node })]
	if found := f.Troubles(f.Node); len(found) > 0 {
		return found
	}
	if v.status() == nil {
		return []Finding{find(Unknown, "the GPUNode of %s was not seen", v.name).on(v.name)}
	}
	modes := cmp.Or(v.status().Summary.Modes, "it has no GPUs")
	return []Finding{{Code: Fine, Cause: "nothing is wrong on " + v.name + ": " + modes}}
}

// Troubles returns what is wrong on a node, the gravest first; nil if nothing is known to be wrong.
func (f *Facts) Troubles(name string) []Finding {
	for _, v := range f.views() {
		if v.name != name {
			continue
		}
		var out []Finding
		if gone := f.agentGone(&v); gone != nil {
			out = append(out, *gone)
		}
		if why := odd(&v); why != "" {
			out = append(out, find(NotReady, "the GPUNode of %s cannot be used: %s", v.name, why).on(v.name))
		}
		return append(append(out, f.troubles(&v)...), keepsAway(&v)...)
	}
	return nil
}

// keepsAway returns why a node gets no new pods.
func keepsAway(v *view) (out []Finding) {
	switch {
	case v.node == nil:
	case v.node.NotReady != "":
		out = append(out, find(NodeNotReady, "the kubelet of %s is not ready: %s", v.name, v.node.NotReady).on(v.name))
	case v.node.Cordoned:
		out = append(out, find(NodeCordoned, "%s is cordoned: it gets no new pods", v.name).on(v.name))
	}
	return out
}

// agentGone returns that no agent works on a node; nil if one does, as far as is known.
func (f *Facts) agentGone(v *view) *Finding {
	say := func(format string, args ...any) *Finding {
		out := find(NoAgent, format, args...).on(v.name)
		return &out
	}
	s := v.status()
	switch {
	case v.seen && len(v.agents) == 0 && v.node != nil && !v.node.Chosen:
		out := say("no agent runs on %s: the node lacks the label %s/gpu.node=true", v.name, f.Domain)
		out.Next = fmt.Sprintf("kubectl label node %s %s/gpu.node=true", v.name, f.Domain)
		return out
	case v.seen && len(v.agents) == 0:
		return say("no agent runs on %s: it has no pod of the DaemonSet", v.name)
	case v.seen && !slices.ContainsFunc(v.agents, func(a Agent) bool { return a.NotReady == "" }) && silent(s):
		a := &v.agents[0]
		return say("no agent works on %s: its pod %s/%s is not ready: %s", v.name, a.Namespace, a.Name, a.NotReady)
	case v.gpuNode == nil && v.node != nil && v.node.Chosen && !f.unseen("GPUNodes"):
		return say("no agent works on %s: the node is labelled for one, and there is no GPUNode of it", v.name)
	case v.gpuNode == nil && v.name == f.Node && !f.unseen("GPUNodes"):
		return say("no agent works on %s: there is no GPUNode of it", v.name)
	case s != nil && ended(s):
		return say("no agent runs on %s: the last one has ended", v.name)
	case s != nil && v.node != nil && len(s.Resources) > 0 && forgotten(s, v.node):
		return say("no agent serves the kubelet of %s: of all that its GPUNode offers, allocatable is 0", v.name)
	}
	return nil
}

// ended reports whether the last thing that a node's agent has said is that it ends.
func ended(s *gpunode.Status) bool {
	c := ready(s)
	return c == nil || c.Reason == status.AgentEnds
}

// silent reports whether a node's agent says nothing about why it is not ready: the object is that
// of an earlier one, or there is none.
func silent(s *gpunode.Status) bool {
	return s == nil || ended(s) || ready(s).Status == gpunode.True || ready(s).Reason == status.Starting
}

// ready returns the condition Ready; nil if there is none.
func ready(s *gpunode.Status) *gpunode.Condition {
	for i := range s.Conditions {
		if s.Conditions[i].Type == gpunode.Ready {
			return &s.Conditions[i]
		}
	}
	return nil
}

// forgotten reports whether the kubelet has none of what a node offers.
func forgotten(s *gpunode.Status, n *Node) bool {
	offers := false
	for i := range s.Resources {
		r := &s.Resources[i]
		offers = offers || r.Free > 0
		if n.Allocatable[r.Name] > 0 {
			return false
		}
	}
	return offers
}

// troubles returns what is wrong on a node whose agent works: with its partition, and with its
// GPUs.
func (f *Facts) troubles(v *view) (out []Finding) {
	s := v.status()
	if s != nil {
		if c := ready(s); c != nil && c.Status != gpunode.True && !ended(s) {
			out = append(out, find(codeOf(c.Reason), "the agent of %s is not ready: %s", v.name,
				cmp.Or(c.Message, string(c.Reason))).on(v.name))
		}
	}
	if p := f.partition(v); p != nil {
		out = append(out, *p)
	}
	if s == nil {
		return out
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if !gpunode.Is(g.Conditions, gpunode.Healthy) {
			out = append(out, unhealthy(v.name, g))
		}
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		off := g.Mode == "off" || g.Mode == ""
		if gpunode.Is(g.Conditions, gpunode.Healthy) && !gpunode.Is(g.Conditions, gpunode.Available) {
			if why := withdrawn(v.name, g); !off || why.Code != NotOffered {
				out = append(out, why)
			}
		}
	}
	return out
}

// unhealthy returns that a GPU has a fault.
func unhealthy(node string, g *gpunode.GPU) Finding {
	message := ""
	for _, c := range g.Conditions {
		if c.Type == gpunode.Healthy {
			message = c.Message
		}
	}
	return find(UnhealthyGPU, "GPU %d (%s) of %s is unhealthy: %s", g.Index, g.UUID, node,
		cmp.Or(message, "it does not say why")).on(node)
}

// inObject is the state of a partition that is known from the GPUNode alone.
const inObject = "not in force"

// ofGPUs returns what the GPUs of a node say that give nothing out for the reason of a code: the first
// of them, and how many more there are. It is empty if there are none.
func (v *view) ofGPUs(code Code) string {
	s := v.status()
	if s == nil {
		return ""
	}
	said, more := "", 0
	for i := range s.GPUs {
		g := &s.GPUs[i]
		for _, c := range g.Conditions {
			switch {
			case c.Type != gpunode.Available || c.Status == gpunode.True || c.Message == "" || codeOf(c.Reason) != code:
			case said == "":
				said = fmt.Sprintf("GPU %d (%s): %s", g.Index, g.UUID, without(g, c.Message))
			default:
				more++
			}
		}
	}
	if more > 0 {
		said += fmt.Sprintf(" (and %d more)", more)
	}
	return said
}

// without returns a message about a GPU without the GPU's name at its beginning, for a sentence that has
// named it.
func without(g *gpunode.GPU, message string) string {
	for _, name := range []string{fmt.Sprintf("GPU %d (%s) is not offered: ", g.Index, g.UUID),
		fmt.Sprintf("GPU %d (%s) ", g.Index, g.UUID), fmt.Sprintf("GPU %d: ", g.Index)} {
		if rest, ok := strings.CutPrefix(message, name); ok {
			return rest
		}
	}
	return message
}

// partition returns why a node's partition is not in force; nil if it is, or if that is not known.
func (f *Facts) partition(v *view) *Finding {
	state, reason, message, name := "", "", "", ""
	if n := v.node; n != nil {
		state, reason, message, name = n.State, n.Reason, n.Message, n.Partition
	}
	if s := v.status(); state == "" && s != nil {
		for _, c := range s.Conditions {
			if c.Type == gpunode.Applied && c.Status != gpunode.True {
				state, reason, message = inObject, string(c.Reason), c.Message
			}
		}
	}
	byState := map[string]Code{"blocked": PartitionBlocked, "invalid": PartitionWrong, "failed": PartitionWrong,
		"pending": PartitionPending, inObject: PartitionPending}
	code, not := byState[state]
	if !not {
		return nil
	}
	if of := codeOf(status.Reason(reason)); of != NotReady && reason != "" {
		code = of
	}
	if state == inObject {
		if said := v.ofGPUs(code); said != "" {
			// The object names no pods, so it says of the partition only where to read on.
			what, _, _ := strings.Cut(message, ": ")
			out := find(code, "on %s, %s: %s", v.name, what, said).on(v.name)
			return &out
		}
	}
	which := "the partition of " + v.name
	if name != "" {
		which = "partition " + name + " of " + v.name
	}
	out := find(code, "%s is %s: %s", which, state, cmp.Or(message, reason, "it does not say why")).on(v.name)
	return &out
}

// walkNode returns what was looked at on the subject.
func (f *Facts) walkNode() (out []Step) {
	for _, v := range f.views() {
		if v.name != f.Node {
			continue
		}
		out = append(out, Step{"agent", v.agentLines()})
		if s := v.status(); s != nil {
			var gpus []string
			for i := range s.GPUs {
				g := &s.GPUs[i]
				line := fmt.Sprintf("GPU %d (%s) %s: %s", g.Index, g.UUID, g.Model, cmp.Or(g.Mode, "no mode"))
				for _, c := range g.Conditions {
					if c.Type == gpunode.Idle || c.Status != gpunode.True {
						line += fmt.Sprintf("; %s is %s (%s) %s", c.Type, c.Status, c.Reason, c.Message)
					}
				}
				gpus = append(gpus, line)
			}
			out = append(out, Step{"GPUs", gpus})
			var offers []string
			for _, r := range s.Resources {
				offers = append(offers, fmt.Sprintf("%s: %d of %d free, at most %d for one container", r.Name, r.Free,
					r.Total, r.Largest))
			}
			out = append(out, Step{"offers", offers})
		}
	}
	if e := f.events(); len(e) > 0 {
		out = append(out, Step{"Events", e})
	}
	return slices.DeleteFunc(out, func(s Step) bool { return len(s.Says) == 0 })
}

// agentLines describes the agent of a node, and the Node.
func (v *view) agentLines() (out []string) {
	for _, a := range v.agents {
		out = append(out, strings.TrimSuffix(fmt.Sprintf("pod %s/%s: %s", a.Namespace, a.Name,
			cmp.Or(a.NotReady, "ready")), ": "))
	}
	if s := v.status(); s != nil {
		for _, c := range s.Conditions {
			line := fmt.Sprintf("GPUNode %s is %s (%s) %s", c.Type, c.Status, c.Reason, c.Message)
			out = append(out, strings.TrimSpace(line))
		}
	}
	if n := v.node; n != nil {
		if n.State != "" {
			out = append(out, "partition "+cmp.Or(n.Partition, "default")+": "+n.State)
		}
		if n.Cordoned {
			out = append(out, "the node is cordoned")
		}
		if n.NotReady != "" {
			out = append(out, "the kubelet is not ready: "+n.NotReady)
		}
	}
	return out
}
