// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
)

// fleet is a few machines, the pods on them, and an API that tells the books of both late.
type fleet struct {
	t        *testing.T
	r        *rand.Rand
	books    *Books
	machines map[string]*machine
	names    []string
	now      time.Time
	// pods are all that are not deleted, as the API has them; admitted and ended tell what
	// has really happened.
	pods            map[string]*Pod
	placed          map[string]string
	admitted, ended map[string]bool
	devices         map[string][]string
	// news has what the books have not heard, by object, in order.
	news  map[string][]func(*Books)
	seq   int
	count map[string]int
	// quiet says that nothing is under way: all that is true is known.
	quiet bool
	// left tells on which machines pods have ended since all was known.
	left map[string]bool
	// holds are what is held, and members to which hold and group pods belong.
	holds   map[string][]Group
	members map[string]string
	// kept are the amounts that are kept, by ID.
	kept map[string]bool
}

func newFleet(t *testing.T, seed uint64, machines ...func(*rand.Rand) *machine) *fleet {
	f := &fleet{t: t, r: rand.New(rand.NewPCG(seed, 17)), books: New(), machines: map[string]*machine{},
		now: time.Unix(1e9, 0), pods: map[string]*Pod{}, placed: map[string]string{},
		admitted: map[string]bool{}, ended: map[string]bool{}, devices: map[string][]string{},
		news: map[string][]func(*Books){}, count: map[string]int{}, left: map[string]bool{},
		holds: map[string][]Group{}, members: map[string]string{}, kept: map[string]bool{}}
	for _, make := range machines {
		m := make(f.r)
		f.machines[m.name] = m
		f.names = append(f.names, m.name)
		f.books.SetNode(m.name, m.says(), true)
	}
	return f
}

// tell puts a pod's state of now among the news.
func (f *fleet) tell(p *Pod) {
	q := *p
	q.Devices = slices.Clone(p.Devices)
	f.news[p.UID] = append(f.news[p.UID], func(b *Books) { b.SetPod(q) })
}

// write puts a GPUNode among the news.
func (f *fleet) write(m *machine) {
	says := m.says()
	f.news[m.name] = append(f.news[m.name], func(b *Books) { b.SetNode(m.name, says, true) })
}

// deliver tells the books the oldest news of some object.
func (f *fleet) deliver() bool {
	if len(f.news) == 0 {
		return false
	}
	keys := slices.Sorted(maps.Keys(f.news))
	f.hear(keys[f.r.IntN(len(keys))])
	return true
}

func (f *fleet) hear(key string) {
	for range 1 + f.r.IntN(5)/4 { // what is told twice is told in vain
		f.news[key][0](f.books)
	}
	if f.news[key] = f.news[key][1:]; len(f.news[key]) == 0 {
		delete(f.news, key)
	}
}

// new makes a pod and asks for a place.
func (f *fleet) new(containers ...Container) (node string, err error) {
	f.seq++
	p := &Pod{UID: fmt.Sprintf("p%d", f.seq), Namespace: "x", Containers: containers}
	p.Name = p.UID
	node, err = f.books.Place(context.Background(), *p, f.names, f.now)
	f.judge(p, err)
	f.quiet = false
	if err == nil {
		f.pods[p.UID], f.placed[p.UID] = p, node
	}
	return node, err
}

// judge holds an answer against what the agents themselves would do.
func (f *fleet) judge(p *Pod, err error) {
	f.t.Helper()
	if err == nil {
		f.count["placed"]++
		return
	}
	var no *Refusal
	if !errors.As(err, &no) || len(no.Nodes) != len(f.names) {
		f.t.Fatalf("%+v: %v", p, err)
	}
	f.count["refused"]++
	if !f.quiet {
		return
	}
	f.count["refused in quiet"]++
	if no.Waits {
		f.t.Fatalf("%+v waits for pods, and all have reported: %v", p, no.Nodes)
	}
	for _, name := range f.names {
		m := f.machines[name]
		if len(p.Containers) == 1 && len(p.Containers[0].Requests) == 1 {
			for resource, n := range p.Containers[0].Requests {
				if m.canPlace(resource, n) {
					f.t.Fatalf("%+v was refused, and %s has room: %v", p, name, no.Nodes)
				}
			}
			continue
		}
		refused := false
		for range 20 { // the kubelet goes by no order
			_, err := m.clone().admit(f.r, p)
			refused = refused || err != nil
		}
		if !refused {
			f.t.Fatalf("%+v was refused, and %s would have taken it: %v", p, name, no.Nodes)
		}
	}
}

// some is a random pod of which a condition holds.
func (f *fleet) some(which func(*Pod) bool) *Pod {
	uids := slices.DeleteFunc(slices.Sorted(maps.Keys(f.pods)), func(uid string) bool { return !which(f.pods[uid]) })
	if len(uids) == 0 {
		return nil
	}
	f.count["events"]++
	return f.pods[uids[f.r.IntN(len(uids))]]
}

// The events of a pod's life, each of a random pod.

func (f *fleet) nominate() {
	if p := f.some(func(p *Pod) bool { return p.Node == "" && p.Nominated == "" }); p != nil {
		p.Nominated = f.placed[p.UID]
		f.tell(p)
	}
}

func (f *fleet) bind() {
	if p := f.some(func(p *Pod) bool { return p.Node == "" }); p != nil {
		p.Node = f.placed[p.UID]
		f.tell(p)
	}
}

func (f *fleet) admit() {
	p := f.some(func(p *Pod) bool { return p.Node != "" && !f.admitted[p.UID] })
	if p == nil {
		return
	}
	ids, err := f.machines[p.Node].admit(f.r, p)
	if err != nil && f.left[p.Node] && p.several() {
		// The package says that this can be: an end of which the books had not heard gave
		// the packing another choice between two requests of one pod.
		f.machines[p.Node].end(f.r, p.UID)
		f.count["misled"]++
		f.admitted[p.UID], f.ended[p.UID] = true, true
		return
	}
	if err != nil {
		f.t.Fatalf("%s refused %+v, which was placed there: %v\nit says %+v", p.Node, p, err,
			f.machines[p.Node].says().Summary)
	}
	f.admitted[p.UID], f.devices[p.UID] = true, ids
}

func (f *fleet) report() {
	if p := f.some(func(p *Pod) bool {
		return f.devices[p.UID] != nil && p.Devices == nil && f.machines[p.Node].holders == gpunode.InPods
	}); p != nil {
		p.Devices = f.devices[p.UID]
		f.tell(p)
	}
}

func (f *fleet) end() {
	if p := f.some(func(p *Pod) bool { return f.admitted[p.UID] && !f.ended[p.UID] }); p != nil {
		f.machines[p.Node].end(f.r, p.UID)
		f.ended[p.UID], f.left[p.Node] = true, true
	}
}

// several reports whether a pod has more than one request.
func (p *Pod) several() bool {
	return len(p.Containers) > 1 || len(p.Containers[0].Requests) > 1
}

func (f *fleet) done() {
	if p := f.some(func(p *Pod) bool { return f.ended[p.UID] }); p != nil {
		if p.Done = true; f.r.IntN(2) == 0 {
			f.tell(p)
		}
		uid := p.UID
		f.news[uid] = append(f.news[uid], func(b *Books) { b.DeletePod(uid) })
		delete(f.pods, uid)
	}
}

// settle lets everything happen that is under way.
func (f *fleet) settle() {
	before := f.count["events"]
	for _, event := range []func(){f.bind, f.admit, f.report, f.done} {
		for again := true; again; before = f.count["events"] {
			event()
			again = f.count["events"] > before
		}
	}
	for _, name := range f.names {
		f.write(f.machines[name])
	}
	for f.deliver() {
	}
	clear(f.left)
	f.quiet = f.some(func(p *Pod) bool { return !f.admitted[p.UID] }) == nil
}

// disjoint checks that no device is in the books of two pods.
func (f *fleet) disjoint() {
	who := map[string]string{}
	for _, n := range f.books.nodes {
		for uid, e := range n.here {
			for _, id := range n.devices(&e.Pod) {
				if other := who[id]; other != "" && other != uid && !f.ended[uid] && !f.ended[other] {
					f.t.Fatalf("%s is of %s and of %s", id, uid, other)
				}
				who[id] = uid
			}
		}
	}
}

// restart makes the books anew from the API, and compares.
func (f *fleet) restart() {
	for len(f.news) > 0 {
		f.deliver()
	}
	f.giveUp()
	for uid, p := range f.pods { // what the API does not know is lost
		if p.Node == "" && p.Nominated == "" {
			f.books.DeletePod(uid)
			delete(f.pods, uid)
		}
	}
	fresh := New()
	for id, groups := range f.holds {
		fresh.SetHold(id, id, groups, f.books.holds.by[id].at(len(groups)))
	}
	keys := slices.Sorted(maps.Keys(f.pods))
	f.r.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	for i, uid := range keys {
		if i == len(keys)/2 {
			f.copyNodes(fresh)
		}
		fresh.SetPod(*f.pods[uid])
	}
	f.copyNodes(fresh)
	if was, is := f.books.Reserved(f.now), fresh.Reserved(f.now); !maps.Equal(was, is) {
		f.t.Fatalf("reserved were %v, after a restart %v", was, is)
	}
	for _, name := range f.names {
		if was, is := sketch(f.books.room(name)), sketch(fresh.room(name)); was != is {
			f.t.Fatalf("%s had\n%s\nand after a restart\n%s", name, was, is)
		}
	}
	f.books = fresh
}

func (f *fleet) copyNodes(to *Books) {
	for name, n := range f.books.nodes {
		if n.known {
			to.SetNode(name, &n.status, n.ready)
		}
	}
}

// sketch is a room as text.
func sketch(r *room) (out string) {
	for i := range r.gpus {
		s := &r.gpus[i]
		out += fmt.Sprintf("%s %v %v %v %v\n", s.uuid, s.held, s.standing, s.warm, s.places)
	}
	var pending []string
	for _, e := range r.pending {
		pending = append(pending, e.who()+e.shape)
	}
	for _, s := range r.seats {
		pending = append(pending, s.owner.id+s.shape)
	}
	slices.Sort(pending)
	return out + strings.Join(pending, "\n")
}

// preempt compares what would fit without some pods with what the machine does without them.
func (f *fleet) preempt(p Pod) {
	name := f.names[f.r.IntN(len(f.names))]
	m := f.machines[name].clone()
	var victims []string
	for _, uid := range slices.Sorted(maps.Keys(f.pods)) {
		if f.pods[uid].Node == name && f.r.IntN(2) == 0 {
			victims = append(victims, uid)
			m.end(f.r, uid)
		}
	}
	err := f.books.Fits(p, name, victims, f.now)
	refused := false
	for range 20 {
		_, no := m.clone().admit(f.r, &p)
		refused = refused || no != nil
	}
	if (err != nil) != refused {
		f.t.Fatalf("without %v on %s there is room for %+v: %v; refused there: %v", victims, name, p, err, refused)
	}
	f.count["victims"]++
}

// containers are what a random pod asks for.
func (f *fleet) containers() (out []Container) {
	profiles := []string{"1g.10gb", "1g.10gb.me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"}
	one := func(most int) map[string]int {
		switch f.r.IntN(4) {
		case 0:
			return map[string]int{repName: 1 + f.r.IntN(min(most, 2))}
		case 1:
			return map[string]int{gpuName: 1 + f.r.IntN(min(most, 2))}
		case 2:
			out := map[string]int{"example.com/mig-" + profiles[f.r.IntN(len(profiles))]: 1 + f.r.IntN(min(most, 2))}
			if f.r.IntN(8) == 0 {
				out["example.com/mig-1g.10gb"] = 1
			}
			return out
		}
		return map[string]int{memName: 1 + f.r.IntN(most)}
	}
	switch f.r.IntN(8) {
	case 0:
		return []Container{{Requests: one(5)}, {Requests: one(5)}}
	case 1:
		requests := one(4)
		more := maps.Clone(requests)
		for _, name := range sorted(more) {
			more[name] = 1 + f.r.IntN(4)
		}
		return []Container{{Init: f.r.IntN(3) > 0, Requests: requests}, {Requests: more}}
	}
	return []Container{{Requests: one(8)}}
}

var long = flag.Bool("long", false, "more random walks")

// rounds are few, or many with -long.
func rounds(few, many int) int {
	if *long {
		return many
	}
	return few
}

// giveUp drops all amounts that are kept.
func (f *fleet) giveUp() {
	for id := range f.kept {
		f.books.Drop(id)
	}
	clear(f.kept)
}

// lose has a node go, or its agent be away, until the GPUNode is written again.
func (f *fleet) lose() {
	m := f.machines[f.names[f.r.IntN(len(f.names))]]
	if says := m.says(); f.r.IntN(2) == 0 {
		f.news[m.name] = append(f.news[m.name], func(b *Books) { b.SetNode(m.name, says, false) })
	} else {
		f.news[m.name] = append(f.news[m.name], func(b *Books) { b.DeleteNode(m.name) })
	}
	f.quiet = false
}

// lie has a node say what is not so, or cannot be, and asks for room there.
func (f *fleet) lie() {
	says := f.machines[f.names[f.r.IntN(len(f.names))]].says()
	for i := range says.GPUs {
		g := &says.GPUs[i]
		switch f.r.IntN(20) {
		case 0:
			g.Total = f.r.IntN(1 << f.r.IntN(31))
		case 1:
			g.Used = piece.SetOf([]int{f.r.IntN(1 << f.r.IntN(20))})
		case 2:
			g.UUID = says.GPUs[f.r.IntN(len(says.GPUs))].UUID
		case 3:
			kinds := []piece.Kind{piece.KindUnits, piece.KindReplica, piece.KindWhole, piece.KindPlacement, "none"}
			g.Kind = kinds[f.r.IntN(len(kinds))]
		}
	}
	if f.r.IntN(2) == 0 {
		says.Sum()
	}
	if f.count["lies"]++; says.Check() == nil {
		f.books.SetNode("liar", says, true)
		f.count["lies believed"]++
	} else {
		f.books.PassOver("liar", "a lie")
	}
	p := Pod{UID: "dupe", Containers: f.containers()}
	if _, err := f.books.Place(context.Background(), p, []string{"liar"}, f.now); err == nil {
		f.books.DeletePod(p.UID)
	}
}

// keep has an amount kept, more or less of it, or none, and lets a pod come that takes some.
func (f *fleet) keep() {
	id := fmt.Sprintf("q%d", f.r.IntN(2))
	f.quiet = false
	switch f.r.IntN(4) {
	case 0:
		f.books.Drop(id)
		delete(f.kept, id)
		return
	case 1:
		want := map[string]int{}
		for _, c := range f.containers() {
			maps.Copy(want, c.Requests)
		}
		f.books.Keep(id, want, nil)
		f.kept[id] = true
	}
	if parts, _ := f.books.Kept(id); len(parts) > 0 {
		part := parts[f.r.IntN(len(parts))]
		f.seq++
		p := asks(fmt.Sprintf("p%d", f.seq), part.Resource, 1+f.r.IntN(part.N)).of(id)
		if node, err := f.books.Place(context.Background(), p, f.names, f.now); err == nil {
			f.pods[p.UID], f.placed[p.UID] = &p, node
			f.count["taken of amounts"]++
		}
	}
}

// seats compares what is held with what the machines would do, while nothing is under way: each seat
// has its room, or is counted lost.
func (f *fleet) seats() {
	for _, name := range f.names {
		m := f.machines[name].clone()
		for _, s := range f.books.nodes[name].seats {
			if f.books.holds.lost(s) {
				f.count["seats without room"]++
				continue
			}
			f.count["seats with room"]++
			if _, err := m.admit(f.r, &s.Pod); err != nil && !s.several() {
				f.t.Fatalf("%s has no room for a seat of %s, %v: %v", name, s.owner.id, s.Containers, err)
			}
		}
	}
}

// TestRandomWalks lets pods come and go while the API tells of them late, twice and in any order, and
// of nodes that come and go, and lie. No pod may be refused where it was placed; what is refused while
// nothing is under way, the machines must refuse too; what is held has its room or is counted lost.
func TestRandomWalks(t *testing.T) {
	total := map[string]int{}
	steps := rounds(1500, 20_000)
	for seed := range uint64(5) {
		mixed := func(name string, in gpunode.HoldersIn) func(*rand.Rand) *machine {
			return func(r *rand.Rand) *machine {
				m := newMachine(t, r, name, piece.KindUnits, 1+r.IntN(3), 8)
				m.holders = in
				for _, kind := range []piece.Kind{piece.KindReplica, piece.KindWhole, piece.KindPlacement} {
					more := newMachine(t, r, name+string(kind), kind, 1+r.IntN(3),
						map[piece.Kind]int{piece.KindReplica: 2, piece.KindWhole: 1}[kind])
					m.gpus = append(m.gpus, more.gpus...)
					maps.Copy(m.rank, more.rank)
				}
				for i, d := range m.gpus {
					d.index = i
				}
				return m
			}
		}
		f := newFleet(t, seed, mixed("a", gpunode.InPods), mixed("b", gpunode.InPods), mixed("c", gpunode.InObject))
		for range steps {
			f.now = f.now.Add(time.Millisecond)
			switch f.r.IntN(20) {
			case 0, 1:
				_, _ = f.new(f.containers()...)
			case 2, 3:
				f.bind()
			case 4, 5:
				f.admit()
			case 6:
				f.report()
			case 7:
				f.end()
			case 8:
				f.done()
			case 9:
				f.write(f.machines[f.names[f.r.IntN(len(f.names))]])
			case 10:
				f.nominate()
			case 11:
				f.hold()
			case 12:
				f.member()
			case 13:
				f.drop()
			case 14:
				if f.r.IntN(6) == 0 {
					f.come()
					if !f.quiet {
						t.Fatalf("seed %d: news are left", seed)
					}
					f.preempt(Pod{UID: "preemptor", Containers: f.containers()})
					_, _ = f.new(f.containers()...)
					f.come()
					f.hold()
				} else if f.r.IntN(8) == 0 {
					f.restart()
				}
			case 15:
				f.keep()
			case 16:
				if f.r.IntN(4) == 0 {
					f.lose()
				}
			case 17:
				if f.r.IntN(4) == 0 {
					f.lie()
				}
			default:
				f.deliver()
			}
			f.disjoint()
		}
		for k, n := range f.count {
			total[k] += n
		}
	}
	t.Log(total)
	if total["misled"] > total["placed"]/200 {
		t.Errorf("%d of %d pods with several requests were refused where they were placed", total["misled"],
			total["placed"])
	}
	for _, k := range []string{"placed", "refused", "refused in quiet", "victims", "held", "not held",
		"not held in quiet", "members", "seats filled",
		"seats with room", "taken of amounts", "lies", "lies believed"} {
		if total[k] < 10 {
			t.Errorf("the walks have %d of %q: they look at nothing", total[k], k)
		}
	}
}
