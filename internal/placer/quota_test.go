// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/timeslice"
)

// wantKept wants exactly these parts, and nothing missing but what is said.
func (f *fleet) wantKept(id, parts, short string) {
	f.t.Helper()
	is, lacks := f.books.Kept(id)
	text := ""
	for _, p := range is {
		text += fmt.Sprintf("%s:%d ", p.Node, p.N)
	}
	if text != parts || fmt.Sprint(lacks) != short {
		f.t.Fatalf("%s has %sand lacks %v, want %sand %s", id, text, lacks, parts, short)
	}
}

// member is a pod of a quota.
func member(of, uid, resource string, n int) Pod {
	p := asks(uid, resource, n)
	p.Hold = of
	return p
}

func none() string { return fmt.Sprint(map[string]int(nil)) }

// TestMemoryIsKeptOnAsFewGPUsAsThereIsRoom has two nodes with two GPUs of 79 units.
func TestMemoryIsKeptOnAsFewGPUsAsThereIsRoom(t *testing.T) {
	f := of(piece.KindUnits, 2, 79, "a", "b")(t)
	keep := func(id string, n int) map[string]int { return f.books.Keep(id, map[string]int{memName: n}, nil) }
	keep("one", 100)
	f.wantKept("one", "a:79 a:21 ", none())
	keep("two", 58)
	f.wantKept("two", "a:58 ", none())
	keep("three", 80)
	f.wantKept("three", "b:79 b:1 ", none())
	if short := keep("four", 80); short[memName] != 2 {
		t.Errorf("four lacks %v of 80, and 78 are left", short)
	}
	f.wantKept("four", "b:78 ", fmt.Sprint(map[string]int{memName: 2}))
	f.books.Drop("three")
	f.wantKept("four", "b:78 b:2 ", none())
	keep("four", 10)
	f.wantKept("four", "b:10 ", none())
}

// TestOthersDoNotGetWhatIsKept places pods beside a quota and as its members.
func TestOthersDoNotGetWhatIsKept(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.books.Keep("q", map[string]int{memName: 40}, nil)
	f.wantRefused(units("large", 40), "the largest free block of "+memName+" is 39, on a; the rest is held for others")
	if err := f.books.Fits(units("large", 40), "a", nil, f.now); err == nil {
		t.Error("Fits gives away what is kept")
	}
	if f.books.HasRoom(units("large", 40), "a") {
		t.Error("HasRoom gives away what is kept")
	}
	f.wantPlaced(units("small", 39), "a")
	f.wantPlaced(member("q", "m1", memName, 10), "a")
	f.wantKept("q", "a:30 ", none())
	f.wantPlaced(member("q", "m2", memName, 30), "a")
	f.wantKept("q", "", none())
	f.wantRefused(member("q", "m3", memName, 1), "is free")
	f.wantRefused(member("other", "m4", memName, 1), "is free")
	f.books.DeletePod("m2")
	f.now = f.now.Add(ReservedFor)
	f.books.Lapsed(f.now) // m1's and small's reservations end
	f.wantKept("q", "a:40 ", none())
}

// TestAMemberIsCountedOnce goes through a member's life.
func TestAMemberIsCountedOnce(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.books.Keep("q", map[string]int{memName: 79}, nil)
	p := member("q", "m", memName, 20)
	f.wantPlaced(p, "a")
	p.Node = "a"
	f.books.SetPod(p)
	f.wantKept("q", "a:59 ", none())
	m := f.machines["a"]
	for n := range 20 {
		id := timeslice.ID(m.gpus[0].uuid, n)
		p.Devices = append(p.Devices, id)
		m.gpus[0].by[id] = p.UID
	}
	f.books.SetPod(p)
	f.wantKept("q", "a:59 ", none())
	f.books.SetNode("a", m.says(), true)
	f.wantKept("q", "a:59 ", none())
	// The pod has ended; the GPUNode says so later.
	f.books.DeletePod("m")
	f.wantKept("q", "a:59 ", fmt.Sprint(map[string]int{memName: 20}))
	m.end(rand.New(rand.NewPCG(1, 1)), "m")
	f.books.SetNode("a", m.says(), true)
	f.wantKept("q", "a:79 ", none())
}

func TestKeptRoomFollowsTheInventory(t *testing.T) {
	f := of(piece.KindWhole, 2, 1, "a", "b")(t)
	f.books.Keep("old", map[string]int{gpuName: 2}, nil)
	f.books.Keep("young", map[string]int{gpuName: 2}, nil)
	f.wantKept("old", "a:2 ", none())
	f.wantKept("young", "b:2 ", none())
	f.books.DeleteNode("b")
	f.wantKept("young", "", fmt.Sprint(map[string]int{gpuName: 2}))
	// A pod that nobody asked about takes one of those that are kept.
	stray := asks("stray", gpuName, 1)
	stray.Node = "a"
	f.books.SetPod(stray)
	f.wantKept("old", "a:1 ", fmt.Sprint(map[string]int{gpuName: 1}))
	f.books.SetNode("b", f.machines["b"].says(), true)
	f.wantKept("old", "a:1 b:1 ", none())
	f.wantKept("young", "b:1 ", fmt.Sprint(map[string]int{gpuName: 1}))
	f.books.Keep("old", map[string]int{gpuName: 2}, func(node string) bool { return node == "b" })
	f.wantKept("old", "b:1 ", fmt.Sprint(map[string]int{gpuName: 1}))
	f.books.Drop("young")
	f.wantKept("old", "b:2 ", none())
	f.books.DeletePod("stray")
	f.books.Drop("old")
	f.wantPlaced(asks("p", gpuName, 2), "a")
}

// TestWhoWantsMoreComesAfterWhatIsKept: a process that begins is told of quotas before it knows of
// nodes. When it does, one that wants more then gets nothing of what the other one had.
func TestWhoWantsMoreComesAfterWhatIsKept(t *testing.T) {
	f := of(piece.KindUnits, 2, 79, "a")(t)
	f.books.DeleteNode("a")
	f.books.Keep("old", map[string]int{memName: 40}, nil)
	f.books.Keep("young", map[string]int{memName: 118}, nil)
	f.books.SetNode("a", f.machines["a"].says(), true)
	if short := f.books.Keep("old", map[string]int{memName: 118}, nil); short[memName] != 78 {
		t.Errorf("of 78 more that there is no room for it lacks %v", short)
	}
	if _, short := f.books.Kept("young"); short != nil {
		t.Errorf("the other one lacks %v of what it had", short)
	}
}

// TestMIGOnDemandExcludes keeps profiles of one card, of which each is free as long as none
// of the others is wanted.
func TestMIGOnDemandExcludes(t *testing.T) {
	const small, half, all = "example.com/mig-1g.10gb", "example.com/mig-3g.40gb", "example.com/mig-7g.80gb"
	for _, c := range []struct {
		name  string
		want  map[string]int
		short map[string]int
	}{
		{"one of the whole card", map[string]int{all: 1}, nil},
		{"one half and four small", map[string]int{half: 1, small: 4}, nil},
		{"two halves leave none", map[string]int{half: 2, small: 1}, map[string]int{small: 1}},
		{"seven small leave none", map[string]int{small: 8}, map[string]int{small: 1}},
		{"the whole card and a small one", map[string]int{all: 1, small: 1}, map[string]int{small: 1}},
		{"a profile that there is not", map[string]int{"example.com/mig-5g.50gb": 1},
			map[string]int{"example.com/mig-5g.50gb": 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := of(piece.KindPlacement, 1, 0, "a")(t)
			if short := f.books.Keep("q", c.want, nil); !maps.Equal(short, c.short) {
				t.Errorf("%v lacks %v, want %v", c.want, short, c.short)
			}
		})
	}
}

// TestRandomQuotas lets quotas, their members and other pods come and go on machines of all
// kinds. Whenever all has been told, the agents give what is kept to pods of just that size,
// nothing that is missing can be had, and a member gets what is kept for it.
func TestRandomQuotas(t *testing.T) {
	total := map[string]int{}
	for seed := range uint64(rounds(4, 40)) {
		mixed := func(name string) func(*rand.Rand) *machine {
			return func(r *rand.Rand) *machine {
				m := newMachine(t, r, name, piece.KindUnits, 1+r.IntN(3), 8)
				for _, kind := range []piece.Kind{piece.KindReplica, piece.KindWhole, piece.KindPlacement} {
					more := newMachine(t, r, name+string(kind), kind, 1+r.IntN(3),
						map[piece.Kind]int{piece.KindReplica: 2, piece.KindWhole: 1}[kind])
					m.gpus = append(m.gpus, more.gpus...)
					maps.Copy(m.rank, more.rank)
				}
				for i, d := range m.gpus {
					d.index = i
					m.rank[d.uuid] = i // with an order that nobody knows it can come out otherwise
				}
				m.holders = gpunode.InPods
				return m
			}
		}
		f := newFleet(t, seed, mixed("a"), mixed("b"))
		w := &quotaWalk{fleet: f, want: map[string]map[string]int{}}
		for range 120 {
			w.step()
		}
		for k, n := range f.count {
			total[k] += n
		}
	}
	t.Log(total)
	if n := total["members that cost more"]; n > total["members"]/20 {
		t.Errorf("of %d members %d cost their quotas more than they asked for", total["members"], n)
	}
	if n := total["MIG devices not found"]; n > total["kept in part"]/50 {
		t.Errorf("%d times a MIG device could be had that a quota lacks, in %d looks", n, total["kept in part"])
	}
	for _, k := range []string{"kept in full", "kept in part", "members", "placed", "refused"} {
		if total[k] < 10 {
			t.Errorf("the walks have %d of %q: they look at nothing", total[k], k)
		}
	}
}

// quotaWalk is a fleet in which room is kept.
type quotaWalk struct {
	*fleet
	want map[string]map[string]int
}

// step does something and lets it come to rest.
func (w *quotaWalk) step() {
	id := fmt.Sprintf("q%d", w.r.IntN(3))
	switch w.r.IntN(8) {
	case 0, 1:
		want := map[string]int{}
		for range 1 + w.r.IntN(3) {
			for _, c := range w.containers() {
				for _, name := range sorted(c.Requests) {
					want[name] += c.Requests[name] + w.r.IntN(4)
				}
			}
		}
		w.want[id] = want
		w.books.Keep(id, want, nil)
	case 2:
		delete(w.want, id)
		w.books.Drop(id)
	case 3, 4:
		w.member(id)
	case 5:
		w.quiet = false // quotas are no part of what the other walks know
		_, _ = w.new(w.containers()...)
	default:
		w.fleet.end()
		w.fleet.done()
	}
	w.settle()
	w.verify()
}

// member places a pod that asks for some of what is kept.
func (w *quotaWalk) member(id string) {
	parts, before := w.books.Kept(id)
	if len(parts) == 0 {
		return
	}
	part := parts[w.r.IntN(len(parts))]
	w.seq++
	p := member(id, fmt.Sprintf("m%d", w.seq), part.Resource, 1+w.r.IntN(part.N))
	at, err := w.books.Place(context.Background(), p, w.names, w.now)
	if err != nil {
		w.t.Fatalf("a member of %s was refused %d of %s: %v\nkept are %v", id, p.Containers[0].Requests[part.Resource],
			part.Resource, err, parts)
	}
	// The agent places a MIG instance without a thought of what is kept beside it. A part that a member has
	// made smaller may have others beside it that had no room before.
	_, after := w.books.Kept(id)
	for resource, n := range after {
		switch {
		case n <= before[resource]:
		case strings.Contains(part.Resource, "/mig-"):
			w.count["members that cost more"]++
		default:
			w.t.Fatalf("with a member more %s lacks %v, before %v", id, after, before)
		}
	}
	w.count["members"]++
	w.pods[p.UID], w.placed[p.UID] = &p, at
}

// verify compares what is kept with what the machines would do.
func (w *quotaWalk) verify() {
	machines := map[string]*machine{}
	for name, m := range w.machines {
		machines[name] = m.clone()
	}
	w.books.holds.balance()
	for _, name := range w.names {
		n := w.books.nodes[name]
		for i, s := range n.seats {
			p := asks(fmt.Sprintf("kept%d", i), s.part.Resource, s.part.N)
			if _, err := machines[name].admit(w.r, &p); err != nil {
				w.t.Fatalf("%s has no room for %v: %v", name, s.part, err)
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(w.want)) {
		_, short := w.books.Kept(id)
		if short == nil {
			w.count["kept in full"]++
		} else {
			w.count["kept in part"]++
		}
		for resource := range short {
			for name, m := range machines {
				switch {
				case !m.canPlace(resource, 1):
				case strings.Contains(resource, "/mig-"):
					// It fits after all the others, and not in its turn, the largest first.
					w.count["MIG devices not found"]++
				default:
					w.t.Fatalf("%s lacks %v, and %s has one of %s left", id, short, name, resource)
				}
			}
		}
		has := map[string]int{}
		parts, _ := w.books.Kept(id)
		for _, p := range parts {
			has[p.Resource] += p.N
		}
		for _, p := range w.pods {
			if p.Hold == id {
				for resource, n := range p.needs() {
					has[resource] += n
				}
			}
		}
		for resource, n := range w.want[id] {
			if got := has[resource] + short[resource]; got < n {
				w.t.Fatalf("%s is to have %d of %s, and %d are kept, had or missing", id, n, resource, got)
			}
		}
	}
}
