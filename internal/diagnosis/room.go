// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
)

// ask is what a pod asks for of one resource.
type ask struct {
	resource string
	// container is the one that asks for the most, and block how much that is. total is what the
	// scheduler counts for the pod: the sum of its containers, or the largest init container.
	container    string
	block, total int64
}

// asks returns what a pod asks for of GPUs, by resource.
func (f *Facts) asks(p *Pod) []ask {
	most := map[string]*ask{}
	sums, inits := map[string]int64{}, map[string]int64{}
	for i := range p.Containers {
		c := &p.Containers[i]
		for name, n := range c.Requests {
			if n <= 0 || !f.ofGPUs(name) {
				continue
			}
			a := most[name]
			if a == nil {
				a = &ask{resource: name}
				most[name] = a
			}
			if n > a.block {
				a.block, a.container = n, c.Name
			}
			if c.Init {
				inits[name] = max(inits[name], n)
			} else {
				sums[name] = min(sums[name]+n, 1<<40) // a sum that cannot overflow
			}
		}
	}
	var out []ask
	for _, name := range slices.Sorted(maps.Keys(most)) {
		a := most[name]
		a.total = max(sums[name], inits[name])
		out = append(out, *a)
	}
	return out
}

// ofGPUs reports whether a resource is one of GPUs, or looks like an attempt at one.
func (f *Facts) ofGPUs(name string) bool {
	domain, base, ok := strings.Cut(name, "/")
	if !ok {
		return false
	}
	return domain == f.Resources || domain == f.Domain || domain == "nvidia.com" ||
		strings.Contains(base, "gpu") || strings.HasPrefix(base, "mig-")
}

// possible reports whether an agent could offer a resource of this name.
func (f *Facts) possible(name string) bool {
	base, ok := strings.CutPrefix(name, f.Resources+"/")
	if !ok {
		return false
	}
	base, spot := piece.OfSpot(base)
	for _, k := range piece.Kinds() {
		if k.Short() != "" && k.Short() == base {
			return !spot || k.HasSpot()
		}
	}
	_, err := mig.ParseResource(base)
	return err == nil
}

// view is all that is known of one node.
type view struct {
	name    string
	gpuNode *GPUNode
	node    *Node
	// agents are the agent's pods on it. seen is true if such pods were read at all.
	agents []Agent
	seen   bool
}

// views returns the nodes that have, or should have, an agent, and those that a pod could mean,
// sorted by name.
func (f *Facts) views() []view {
	byName := map[string]*view{}
	at := func(name string) *view {
		v := byName[name]
		if v == nil {
			v = &view{name: name, seen: f.Agents != nil}
			byName[name] = v
		}
		return v
	}
	for i := range f.GPUNodes {
		at(f.GPUNodes[i].Name).gpuNode = &f.GPUNodes[i]
	}
	for i := range f.Agents {
		v := at(f.Agents[i].Node)
		v.agents = append(v.agents, f.Agents[i])
	}
	for i := range f.Nodes {
		n := &f.Nodes[i]
		bound := f.Pod != nil && f.Pod.Node == n.Name
		if n.Chosen || n.Name == f.Node || byName[n.Name] != nil || bound {
			at(n.Name).node = n
		}
	}
	if f.Node != "" {
		at(f.Node)
	}
	delete(byName, "") // an agent's pod that has no node yet
	var out []view
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		out = append(out, *byName[name])
	}
	return out
}

// status returns the GPUNode's status; nil if there is none that can be used.
func (v *view) status() *gpunode.Status {
	if v.gpuNode == nil {
		return nil
	}
	return v.gpuNode.Status
}

// resource returns what the node offers of a resource, or nil.
func (v *view) resource(name string) *gpunode.Resource {
	s := v.status()
	if s == nil {
		return nil
	}
	for i := range s.Resources {
		if s.Resources[i].Name == name && s.Resources[i].Total > 0 {
			return &s.Resources[i]
		}
	}
	return nil
}

// most returns how much of a resource one container could have if the node were idle.
func (v *view) most(name string) (most int64) {
	s := v.status()
	for i := range s.GPUs {
		g := &s.GPUs[i]
		total, placements, _ := g.Of(name)
		switch n := int64(total); {
		case placements != nil:
			most += int64(len(placements))
		case g.Kind.Counted().Together():
			most = max(most, n)
		default:
			most += min(n, 1) // each is of another GPU
		}
	}
	return most
}

// offering reports whether a GPU offers a resource.
func offering(g *gpunode.GPU, name string) bool {
	_, _, ok := g.Of(name)
	return ok
}

// reply is what a node answers to a request.
type reply struct {
	node string
	// nearness is the highest for a node that nearly has room.
	nearness int
	// free and most are what the node has free, and the most that one container could get now.
	free, most int64
	// shape is how large a piece it has at all, for TooMuch.
	shape int64
	Finding
}

// Values of reply.nearness, the lowest first.
const (
	farOther = iota // not offered there, and nothing is wrong
	farTooMuch
	farTrouble
	farFull
	farWithdrawn
	farPieces
	farCordoned
	farAgent
	farNone // it fits
)

// judge returns what a node answers to a request.
func (f *Facts) judge(v *view, a ask) reply {
	r := reply{node: v.name}
	say := func(nearness int, found Finding) reply {
		r.nearness, r.Finding = nearness, found.on(v.name)
		return r
	}
	if gone := f.agentGone(v); gone != nil {
		near := farAgent
		if v.resource(a.resource) == nil && v.status() != nil {
			near = farTrouble
		}
		return say(near, *gone)
	}
	s := v.status()
	if s == nil {
		return say(farOther, find(NotReady, "the GPUNode of %s cannot be used: %s", v.name,
			cmp.Or(odd(v), "it was not seen")))
	}
	has := v.resource(a.resource)
	if has == nil {
		if wrong := f.troubles(v); len(wrong) > 0 && f.possible(a.resource) {
			return say(farTrouble, wrong[0])
		}
		return say(farOther, find(NotOffered, "%s does not offer %s; it offers %s", v.name, a.resource, offered(s)))
	}
	r.free, r.most, r.shape = int64(has.Free), int64(has.Largest), v.most(a.resource)
	switch {
	case a.block > r.shape:
		return say(farTooMuch, find(TooMuch, "%s could never give a container more than %d of %s", v.name, r.shape,
			a.resource))
	case a.block <= r.most && a.total <= r.free:
		if v.node != nil && v.node.Cordoned {
			return say(farCordoned, find(NodeCordoned, "%s has room for it and is cordoned", v.name))
		}
		if v.node != nil && v.node.NotReady != "" {
			return say(farCordoned, find(NodeNotReady, "%s has room for it, and its kubelet is not ready: %s", v.name,
				v.node.NotReady))
		}
		return say(farNone, find(Unplaced, "%s has room for it", v.name))
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if offering(g, a.resource) && !gpunode.Is(g.Conditions, gpunode.Available) {
			return say(farWithdrawn, withdrawn(v.name, g))
		}
	}
	if r.free >= a.total && r.free >= a.block {
		return say(farPieces, find(Fragmented, "%s has %d of %s free, and at most %d in one piece", v.name, r.free,
			a.resource, r.most))
	}
	return say(farFull, find(Full, "%s has %d of %d of %s free", v.name, r.free, has.Total, a.resource))
}

func odd(v *view) string {
	if v.gpuNode == nil {
		return ""
	}
	return v.gpuNode.Odd
}

// offered lists the resources that a node offers.
func offered(s *gpunode.Status) string {
	var names []string
	for i := range s.Resources {
		if s.Resources[i].Total > 0 {
			names = append(names, s.Resources[i].Name)
		}
	}
	if names == nil {
		return "nothing"
	}
	return brief.List(names, 2*mostNames)
}

// withdrawn returns why new pods get nothing of a GPU.
func withdrawn(node string, g *gpunode.GPU) Finding {
	i := slices.IndexFunc(g.Conditions, func(c gpunode.Condition) bool { return c.Type == gpunode.Available })
	if i < 0 {
		return find(NotReady, "GPU %d of %s does not say whether it can be given out", g.Index, node).on(node)
	}
	c := &g.Conditions[i]
	code := codeOf(c.Reason)
	what := "gives nothing out"
	if code == UnhealthyGPU {
		what = "is unhealthy"
	}
	return find(code, "GPU %d (%s) of %s %s: %s", g.Index, g.UUID, node, what,
		cmp.Or(without(g, c.Message), string(c.Reason))).on(node)
}

// place returns why a pod that asks for something has no node: the answer of the nodes that come
// nearest to having room.
func (f *Facts) place(p *Pod, a ask) []Finding {
	var replies []reply
	anyone := false
	for _, v := range f.views() {
		if !f.selects(p, &v) {
			continue
		}
		if v.resource(a.resource) != nil {
			anyone = true
		}
		replies = append(replies, f.judge(&v, a))
	}
	if !anyone {
		if wrong := f.wrongName(a); wrong != nil {
			return []Finding{*wrong}
		}
	}
	if len(replies) == 0 {
		return f.unknownRoom(p, a)
	}
	slices.SortStableFunc(replies, func(x, y reply) int { return cmp.Compare(y.nearness, x.nearness) })
	best := replies[0]
	var peers []reply
	for i := range replies {
		if replies[i].nearness == best.nearness && replies[i].Code == best.Code {
			peers = append(peers, replies[i])
		}
	}
	var out []Finding
	switch best.nearness {
	case farNone:
		out = append(out, f.elsewhere(p, a, peers))
	case farPieces:
		most := slices.MaxFunc(peers, func(x, y reply) int { return cmp.Compare(x.most, y.most) })
		next := fmt.Sprintf("ask for at most %d, or wait until more is free on one GPU", most.most)
		if a.block <= most.most { // each container would fit, and not all of them
			next = "wait until more is free: the pod's containers need " + fmt.Sprint(a.total) + " in all"
		}
		out = append(out, Finding{Fragmented, fmt.Sprintf("no GPU has %d of %s in one piece: %s", a.block, a.resource,
			most.Cause), next})
	case farTooMuch:
		most := slices.MaxFunc(peers, func(x, y reply) int { return cmp.Compare(x.shape, y.shape) })
		out = append(out, Finding{TooMuch, fmt.Sprintf(
			"container %s asks for %d of %s, and no GPU has more than %d for one container (%s)",
			a.container, a.block, a.resource, most.shape, most.node), fmt.Sprintf("ask for at most %d", most.shape)})
	case farOther:
		out = append(out, find(NotOffered, "no node's partition offers %s: %s", a.resource, causes(peers)))
	case farFull:
		out = append(out, find(Full, "no node has %d of %s free: %s", a.total, a.resource, causes(peers)))
	default:
		first := best.Finding
		if len(peers) > 1 {
			first.Cause = causes(peers)
		}
		out = append(out, first)
	}
	for i := range replies {
		if replies[i].Code != best.Code && replies[i].nearness > farOther {
			out = append(out, replies[i].Finding)
		}
	}
	// What is wrong on nodes that offer it may be why they have no room.
	for _, v := range f.views() {
		if v.resource(a.resource) != nil && f.selects(p, &v) {
			out = append(out, f.troubles(&v)...)
		}
	}
	return out
}

// causes joins what some nodes answer.
func causes(of []reply) string {
	var words []string
	for i := range of {
		words = append(words, of[i].Cause)
	}
	if len(words) > mostNames {
		return fmt.Sprintf("%s; and so on %d more nodes", strings.Join(words[:mostNames], "; "), len(words)-mostNames)
	}
	return strings.Join(words, "; ")
}

// selects reports whether a pod's node selector allows a node, as far as the node's labels are
// known.
func (f *Facts) selects(p *Pod, v *view) bool {
	for key, value := range p.Selector {
		switch {
		case v.node != nil:
			if v.node.Labels[key] != value {
				return false
			}
		case key == "kubernetes.io/hostname" && value != v.name: // almost always the node's name
			return false
		}
	}
	return true
}

// elsewhere returns why a pod is not placed although nodes have room: by what the scheduler says.
func (f *Facts) elsewhere(p *Pod, a ask, with []reply) Finding {
	var names []string
	for i := range with {
		names = append(names, with[i].node)
	}
	rooms := brief.List(names, mostNames)
	switch {
	case strings.Contains(p.Unscheduled, "node(s) were unschedulable"): // the scheduler's words for a cordon
		return find(NodeCordoned, "%s has room for it and is cordoned, the scheduler says: %s", rooms, p.Unscheduled).
			on(names[0])
	case strings.Contains(p.Unscheduled, "Insufficient "+a.resource):
		return find(NoAgent, "%s has room for %d of %s by its GPUNode, and the scheduler finds none there: "+
			"no agent serves its kubelet, or one has only just begun: %s", rooms, a.block, a.resource, p.Unscheduled).
			on(names[0])
	case p.Unscheduled != "":
		return find(Unplaced, "%s has room for %d of %s, and the scheduler places it nowhere: %s", rooms, a.block,
			a.resource, p.Unscheduled)
	}
	return find(Unplaced, "%s has room for %d of %s, and the scheduler has not tried the pod yet", rooms, a.block,
		a.resource)
}

// unknownRoom returns what is known of a request without any GPUNode.
func (f *Facts) unknownRoom(p *Pod, a ask) []Finding {
	switch {
	case f.unseen("GPUNodes"):
		if p.Unscheduled != "" {
			return []Finding{find(Unplaced, "no node has %d of %s for it, the scheduler says: %s", a.total, a.resource,
				p.Unscheduled)}
		}
		return nil
	case len(p.Selector) > 0 && len(f.GPUNodes) > 0:
		return []Finding{find(Unplaced, "none of the nodes with an agent has the labels of the pod's node selector")}
	}
	return []Finding{find(NoAgent, "no node of the cluster has an agent: there is no GPUNode")}
}

func (f *Facts) unseen(what string) bool {
	return slices.ContainsFunc(f.Unseen, func(u Unseen) bool { return u.What == what })
}

// wrongName returns a finding if no agent could offer the name of a resource; nil if one could, or
// if that is not known since no GPUNode was seen.
func (f *Facts) wrongName(a ask) *Finding {
	names := map[string]bool{}
	profiles := map[string]bool{}
	for i := range f.GPUNodes {
		s := f.GPUNodes[i].Status
		if s == nil {
			continue
		}
		for j := range s.Resources {
			if s.Resources[j].Total > 0 {
				names[s.Resources[j].Name] = true
			}
		}
		for j := range s.Cards {
			for k := range s.Cards[j].Profiles {
				profiles[s.Cards[j].Profiles[k].Name] = true
			}
		}
	}
	there := slices.Sorted(maps.Keys(names))
	if f.possible(a.resource) {
		// A MIG profile has to be one that a card has.
		base, _ := piece.OfSpot(strings.TrimPrefix(a.resource, f.Resources+"/"))
		profile, err := mig.ParseResource(base)
		if err != nil || len(profiles) == 0 || profiles[profile.GPUInstance().String()] {
			return nil
		}
		w := find(WrongResource, "container %s asks for %s, and no GPU of the cluster has the MIG profile %s",
			a.container, a.resource, profile)
		w.Next = "ask for a profile that the cards have: " + brief.List(slices.Sorted(maps.Keys(profiles)), 4*mostNames)
		return &w
	}
	w := find(WrongResource, "container %s asks for %s, which is not the name of a resource that agents offer",
		a.container, a.resource)
	switch near := nearest(a.resource, there); {
	case near != "":
		w.Cause += "; did you mean " + near + "?"
		w.Next = "write " + near + " in the container's limits"
	case len(there) > 0:
		w.Next = "write one of those that are offered: " + brief.List(there, 2*mostNames)
	default:
		w.Next = "write " + f.Resources + "/gpu-mem, or another name that the reference lists"
	}
	return &w
}

// nearest returns the name that is most like another one, by the pairs of letters that they have in
// common; empty if none is like it.
func nearest(name string, of []string) string {
	base := func(s string) string { return s[strings.Index(s, "/")+1:] }
	pairs := func(s string) map[string]bool {
		out := map[string]bool{}
		for i := 0; i+2 <= len(s); i++ {
			out[s[i:i+2]] = true
		}
		return out
	}
	mine := pairs(base(name))
	best, most := "", 0.5
	for _, other := range of {
		theirs, common := pairs(base(other)), 0
		for p := range mine {
			if theirs[p] {
				common++
			}
		}
		if like := 2 * float64(common) / float64(max(1, len(mine)+len(theirs))); like > most {
			best, most = other, like
		}
	}
	return best
}
