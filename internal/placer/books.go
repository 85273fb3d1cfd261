// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

const (
	// ReservedFor is how long a reservation lasts if the books hear nothing of the pod. kube-scheduler
	// may take that long to bind a pod, for example while a volume is made, and then gives up.
	ReservedFor = 10 * time.Minute
	// DoubtedFor is how long a reservation still lasts, at most, after [Books.Doubt].
	DoubtedFor = 30 * time.Second
)

// Pod is a pod that asks for GPUs.
type Pod struct {
	UID, Namespace, Name string
	// Node is where the pod is bound, and Nominated where the API expects it; empty if nowhere.
	Node, Nominated string
	// Containers are the init containers and then the others, in the order of the spec.
	Containers []Container
	// Devices are the IDs of the devices that the pod's status names; of those that it has in the spot tier as
	// SpotDevice returns them.
	Devices []string
	// Done is true when all of its containers have ended, and none will start again.
	Done bool
	// Ending is true for a pod that is being deleted. It has its devices until it is gone.
	Ending bool
	// Plain is what the pod asks for beside the agents' devices, as the scheduler counts it.
	Plain Amounts
	// Hold is the ID of the room that is held for the pod and others ([Books.Hold],
	// [Books.Keep]); empty for none.
	Hold string
}

// Container is what a container asks for.
type Container struct {
	// Init is true for an init container that ends before the next one starts. Sidecar is true for an
	// init container that goes on; its Init is false.
	Init, Sidecar bool
	// Requests are numbers of devices by full resource name, of the agent's resources alone.
	Requests map[string]int
}

// Books are what is known of a fleet: its nodes, the pods on them, and what is reserved.
type Books struct {
	nodes map[string]*node
	pods  map[string]*entry
	cards cards
	// taken is how many steps trials have taken so far, and news how much that may have opened room.
	taken int
	news  uint64
	// due is when the first reservation ends at the earliest, zero while there is none.
	due time.Time
	// asked is nil before KeepApart. now is the latest time that the books have heard of.
	asked asked
	now   time.Time
	// lapsed are nodes where reservations have ended by themselves.
	lapsed []string
	// holds are what is held for pods that are to come: Hold, Keep, Open and all about them.
	holds
}

// node is what is known of a node.
type node struct {
	known, ready bool
	status       gpunode.Status
	// passed is why the node is passed over, empty if it is not.
	passed string
	// cards are its kinds of GPUs by name, held the devices of pods by its GPUNode, and has how
	// many devices of each resource it can give at most.
	cards map[string]*cardOf
	held  map[podName][]string
	has   map[string]int
	// here are the pods that have or will have devices of the node, by UID.
	here map[string]*entry
	// leaving are the devices of pods that have gone and that the GPUNode still counts, by ID, with
	// the time when Open first waited for them.
	leaving map[string]time.Time
	// seats are those that are open there, as they came. The slice does not change.
	seats []*seat
	// plain is what SetPlain has told, and rest what follows from it; nil where it must be found anew.
	plain map[string]int64
	rest  *rest
	// room is what follows from that; nil where it must be found anew. Empty, at and kinds are what
	// follows from the GPUNode alone, kinds nil where that must be.
	room  *room
	empty []space
	at    map[string]int
	kinds map[string]piece.Kind
}

// podName is how a GPUNode names a pod.
type podName struct{ namespace, name string }

// ask is what a pod asks for, or a seat. It does not change.
type ask struct {
	Pod
	// needs is how many devices its containers get at least, by resource, and names are these
	// resources in order. pinned is true if that does not tell all: see Pod.pinned.
	needs  map[string]int
	names  []string
	pinned bool
	// largest is the largest MIG device that it asks for, by slicesOf, and sum how many devices.
	largest, sum int
	// shape is the same for pods that ask for the same.
	shape string
}

// shapeOf is the same for containers that ask for the same.
func shapeOf(containers []Container) string { return fmt.Sprint(containers) }

func newAsk(p Pod) *ask {
	a := &ask{Pod: p, needs: p.needs(), pinned: p.pinned(), shape: shapeOf(p.Containers)}
	a.names = sorted(a.needs)
	for name, n := range a.needs {
		a.largest, a.sum = max(a.largest, slicesOf(name)), a.sum+n
	}
	return a
}

// entry is what is known of a pod.
type entry struct {
	*ask
	// reserved is a node, until a time.
	reserved string
	until    time.Time
	// asking is true while Place looks for a node for it; told after SetPod.
	asking, told bool
	// at is the node that counts it among its pods.
	at string
	// in is the ID of the hold that it is a member of, and sits the seat that it uses. left is true
	// after Leave.
	in   string
	sits *seat
	left bool
	// counted is what Books.asked counts of it, nil if nothing.
	counted *ask
}

// cardOf is a kind of GPU with its rules.
type cardOf struct {
	told gpunode.Card
	// nodes is how many have it: with the last one it goes.
	nodes int
	card  *mig.Card
	// profiles are its placements by profile, and texts those that have been read.
	profiles map[string][]mig.Placement
	texts    map[string]mig.Placement
	// losses remember what a placement spoils beside others.
	losses map[loss]int
}

// New returns empty books.
func New() *Books {
	b := &Books{nodes: map[string]*node{}, pods: map[string]*entry{}}
	b.holds = holds{b: b, by: map[string]*hold{}, pause: func() {}}
	return b
}

// SetNode notes a GPUNode's status that has passed [gpunode.Status.Check]. The caller may not change it
// afterwards. ready is the Node's own condition; SetNode looks at the GPUNode's besides.
func (b *Books) SetNode(name string, says *gpunode.Status, ready bool) {
	n := b.node(name)
	if n.known && ready == n.ready && n.passed == "" && reflect.DeepEqual(says, &n.status) {
		b.holds.moved = true // where they may be may be told of a Node alone
		return
	}
	b.tell(n, says)
	n.known, n.ready, n.passed = true, ready, ""
	if len(n.leaving) > 0 {
		used := n.used()
		maps.DeleteFunc(n.leaving, func(id string, _ time.Time) bool { return !used[id] })
	}
}

// DeleteNode forgets a GPUNode. The node's pods are kept: it may come back.
func (b *Books) DeleteNode(name string) {
	n := b.node(name)
	b.tell(n, &gpunode.Status{})
	n.known, n.ready, n.passed = false, false, ""
	b.prune(name)
}

// PassOver forgets what a node's GPUNode says, and has pods refused there for a reason.
func (b *Books) PassOver(name, why string) {
	n := b.node(name)
	b.tell(n, &gpunode.Status{})
	n.known, n.ready, n.passed = true, false, why
}

// tell writes down what a GPUNode says, and what follows from that.
func (b *Books) tell(n *node, says *gpunode.Status) {
	b.holds.moved = true
	b.news++
	was := n.cards
	n.status, n.room, n.kinds, n.cards = *says, nil, nil, map[string]*cardOf{}
	for i := range n.status.Cards {
		c := b.cards.of(&n.status.Cards[i])
		c.nodes++
		n.cards[n.status.Cards[i].Name] = c
	}
	for _, c := range was {
		if c.nodes--; c.nodes == 0 {
			b.cards = slices.DeleteFunc(b.cards, func(o *cardOf) bool { return o == c })
		}
	}
	n.held, n.has = map[podName][]string{}, map[string]int{}
	for i := range n.status.GPUs {
		g := &n.status.GPUs[i]
		n.hold(g)
		for name, most := range n.most(g) {
			n.has[name] += most
		}
	}
	for of := range n.held {
		slices.Sort(n.held[of])
		n.held[of] = slices.Compact(n.held[of])
	}
}

// hold notes which pods have something of a GPU by the GPUNode.
func (n *node) hold(g *gpunode.GPU) {
	if n.status.HoldersIn != gpunode.InObject || g.API == string(workload.DRA) {
		return
	}
	s := space{uuid: gpu.UUID(g.UUID), kind: g.Kind}
	for j := range g.Holders {
		h := &g.Holders[j]
		of := podName{h.Namespace, h.Pod}
		for number := range h.Devices.All() {
			n.held[of] = append(n.held[of], deviceOf(h.Resource, s.id(number)))
		}
		for _, place := range h.Placements {
			n.held[of] = append(n.held[of], deviceOf(h.Resource, g.UUID+"::"+place))
		}
	}
}

// mostInstances is more MIG devices of a profile than a GPU can have.
const mostInstances = 64

// most is how many devices of each resource a GPU can give at most.
func (n *node) most(g *gpunode.GPU) map[string]int {
	out := map[string]int{}
	switch {
	case g.API != string(workload.DevicePlugin):
	case g.Kind != piece.KindPlacement:
		out[g.Resource] = g.Total
		if g.Spot != nil && g.Spot.Resource != "" {
			out[g.Spot.Resource] = min(g.Spot.Total, g.Total)
		}
	case g.MIG != nil:
		c := n.cards[g.MIG.Card]
		offers := g.MIG.Offers
		if g.Spot != nil {
			offers = slices.Concat(offers, g.Spot.Offers)
		}
		for _, o := range offers {
			if o.Resource != "" && c != nil {
				out[o.Resource] = min(max(len(o.Placements), len(c.profiles[o.Profile])), mostInstances)
			}
		}
	}
	return out
}

// beyond is the first resource, in order, that a pod wants more of than a node can ever give, which has
// is; empty if there is none.
func (a *ask) beyond(has map[string]int) string {
	for _, name := range a.names {
		if most, ours := has[name]; ours && a.needs[name] > most {
			return name
		}
	}
	return ""
}

// SetPod notes a pod as the API has it. A pod that is bound or done has no reservation.
func (b *Books) SetPod(p Pod) {
	e := b.pods[p.UID]
	if e == nil {
		e = &entry{}
		b.pods[p.UID] = e
	}
	e.told = true
	if e.ask = newAsk(p); p.Node != "" || p.Done {
		e.reserved = ""
	}
	b.settle(e)
}

// DeletePod forgets a pod.
func (b *Books) DeletePod(uid string) {
	e := b.pods[uid]
	if e == nil {
		return
	}
	delete(b.pods, uid)
	e.asking = true
	b.settle(e)
}

// Doubt notes that a pod may have been given up where it was placed: its reservation ends soon.
func (b *Books) Doubt(uid string, now time.Time) {
	if e := b.pods[uid]; e != nil && e.reserved != "" {
		b.reserve(e, e.reserved, now.Add(DoubtedFor))
	}
}

// Unreserve ends a pod's reservation.
func (b *Books) Unreserve(uid string) {
	if e := b.pods[uid]; e != nil && e.reserved != "" {
		e.reserved = ""
		b.settle(e)
	}
}

// reserve notes where a pod has its room until a time, and has it no longer than it had.
func (b *Books) reserve(e *entry, node string, until time.Time) {
	if e.reserved == "" || until.Before(e.until) {
		e.until = until
	}
	if e.reserved = node; b.due.IsZero() || e.until.Before(b.due) {
		b.due = e.until
	}
}

// Reserved are the nodes where pods have reservations or are nominated, by the pods' UIDs.
func (b *Books) Reserved(now time.Time) map[string]string {
	b.expire(now)
	out := map[string]string{}
	for uid, e := range b.pods {
		if e.Node == "" && e.at != "" {
			out[uid] = e.at
		}
	}
	return out
}

// node is the entry of a node, which is made where there is none.
func (b *Books) node(name string) *node {
	n := b.nodes[name]
	if n == nil {
		n = &node{here: map[string]*entry{}}
		b.nodes[name] = n
	}
	return n
}

// prune forgets a node that the books know nothing about.
func (b *Books) prune(name string) {
	n := b.nodes[name]
	if n != nil && !n.known && n.passed == "" && len(n.here) == 0 && len(n.seats) == 0 && len(n.plain) == 0 {
		delete(b.nodes, name)
	}
}

// settle puts a pod among those of the node where it is or will be.
func (b *Books) settle(e *entry) {
	at := ""
	switch {
	case e.asking, e.Done:
	case e.Node != "":
		at = e.Node
	case e.reserved != "":
		at = e.reserved
	default:
		at = e.Nominated
	}
	if e.at != "" {
		n := b.node(e.at)
		delete(n.here, e.UID)
		n.room, n.rest = nil, nil
		if e.at != at {
			n.leave(e)
			b.prune(e.at)
		}
	}
	if e.at = at; at != "" {
		n := b.node(at)
		n.here[e.UID] = e
		n.room, n.rest = nil, nil
		for _, id := range e.Devices {
			delete(n.leaving, id)
		}
	}
	b.holds.sit(e)
	b.holds.moved = true
	b.news++
	b.asked.set(e, !e.Done && b.pods[e.UID] == e, b.now)
}

// dropPod forgets a pod that is nowhere.
func (b *Books) dropPod(e *entry) {
	delete(b.pods, e.UID)
	b.asked.set(e, false, b.now)
}

// leave notes which devices a pod that goes leaves behind.
func (n *node) leave(e *entry) {
	ids := n.devices(&e.Pod)
	if len(ids) == 0 {
		return // it was only to come
	}
	used := n.used()
	for _, id := range ids {
		if used[id] {
			if n.leaving == nil {
				n.leaving = map[string]time.Time{}
			}
			n.leaving[id] = time.Time{}
		}
	}
}

// expire ends the reservations whose time has come.
func (b *Books) expire(now time.Time) {
	b.now = now
	if b.due.IsZero() || now.Before(b.due) {
		return
	}
	b.due = time.Time{}
	for _, e := range b.pods {
		if e.reserved != "" && now.Before(e.until) {
			if b.due.IsZero() || e.until.Before(b.due) {
				b.due = e.until
			}
		} else if e.reserved != "" {
			b.lapsed = append(b.lapsed, e.reserved)
			e.reserved = ""
			b.settle(e)
			if !e.told {
				b.dropPod(e)
			}
		}
	}
}

// cards are the kinds of GPUs.
type cards []*cardOf

// of reads a GPU's rules, each kind's once.
func (all *cards) of(told *gpunode.Card) *cardOf {
	for _, c := range *all {
		if reflect.DeepEqual(&c.told, told) {
			return c
		}
	}
	c := &cardOf{told: *told, profiles: map[string][]mig.Placement{},
		texts: map[string]mig.Placement{}, losses: map[loss]int{}}
	c.card, _ = told.Read() // a profile that makes no sense is on no offer
	for _, p := range c.card.Placements() {
		name := p.Profile.String()
		c.profiles[name] = append(c.profiles[name], p)
	}
	*all = append(*all, c)
	return c
}

// read reads a placement; false where the card has none such.
func (c *cardOf) read(text string) (mig.Placement, bool) {
	p, known := c.texts[text]
	if !known {
		var err error
		if p, err = gpunode.Placement(c.card, text); err != nil {
			return mig.Placement{}, false
		}
		c.texts[text] = p
	}
	return p, true
}
