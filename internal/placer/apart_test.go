// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
)

// tenants are machines whose GPUs are shared through MPS, and the pods of several namespaces on them.
type tenants struct {
	t        *testing.T
	r        *rand.Rand
	books    *Books
	machines map[string]*machine
	names    []string
	pods     map[string]Pod
	// placed and refused count the pods that came.
	placed, refused int
}

// newTenants has nodes of n GPUs of a kind. With apart, namespaces are kept apart.
func newTenants(t *testing.T, kind piece.Kind, nodes, n, total int, apart bool) *tenants {
	w := &tenants{t: t, r: rand.New(rand.NewPCG(1, 1)), books: New(), machines: map[string]*machine{}, pods: map[string]Pod{}}
	if apart {
		w.books.KeepApart()
	}
	for i := range nodes {
		m := newMachine(t, w.r, fmt.Sprintf("node-%02d", i), kind, n, total)
		for j, d := range m.gpus {
			d.single, d.mps = kind == piece.KindReplica, true
			m.rank[d.uuid] = j
		}
		w.machines[m.name], w.names = m, append(w.names, m.name)
		w.books.SetNode(m.name, m.says(), true)
	}
	return w
}

// in is a pod in a namespace.
func (p Pod) in(namespace string) Pod {
	p.Namespace = namespace
	return p
}

// come places a pod and has it start. It returns the node, empty if there is none.
func (w *tenants) come(p Pod) string {
	w.t.Helper()
	node, err := w.books.Place(context.Background(), p, w.names, start)
	if err != nil {
		w.refused++
		return ""
	}
	ids, err := w.machines[node].admit(w.r, &p)
	if err != nil {
		w.t.Fatalf("%s refused a pod that was placed there: %v", node, err)
	}
	w.placed++
	p.Node, p.Devices = node, ids
	w.pods[p.UID] = p
	w.books.SetPod(p)
	w.books.SetNode(node, w.machines[node].says(), true)
	return node
}

// end ends a pod, if it is there.
func (w *tenants) end(uid string) {
	if p, there := w.pods[uid]; there {
		w.machines[p.Node].end(w.r, uid)
		delete(w.pods, uid)
		w.books.DeletePod(uid)
		w.books.SetNode(p.Node, w.machines[p.Node].says(), true)
	}
}

// mixed returns how many nodes have pods of several namespaces.
func (w *tenants) mixed() (n int) {
	of := map[string]map[string]bool{}
	for _, p := range w.pods {
		if of[p.Node] == nil {
			of[p.Node] = map[string]bool{}
		}
		of[p.Node][p.Namespace] = true
	}
	for _, namespaces := range of {
		if len(namespaces) > 1 {
			n++
		}
	}
	return n
}

// Of nodes where it costs no place more, a pod gets one without pods of other namespaces on its MPS GPUs. Then come nodes
// where it brings no further namespaces together.
func TestNamespacesAreKeptApart(t *testing.T) {
	type pod struct {
		namespace string
		n         int
	}
	for name, c := range map[string]struct {
		kind          piece.Kind
		total         int
		on            [][]pod // by node; each pod's GPU is the next one
		come          pod
		want, without string
		wait          []int // what pods that wait ask for
	}{
		"beside its own": {piece.KindUnits, 80, [][]pod{{{"x", 20}}, {{"y", 20}}}, pod{"y", 20}, "node-01", "node-00", nil},
		"alone":          {piece.KindReplica, 4, [][]pod{{{"x", 1}}, nil}, pod{"y", 1}, "node-01", "node-00", nil},
		"where its own fill more": {
			piece.KindReplica, 4, [][]pod{{{"x", 1}}, {{"y", 1}}, {{"y", 1}, {"y", 1}}}, pod{"y", 1}, "node-02", "node-02", nil},
		"large blocks stay free": {piece.KindUnits, 80, [][]pod{{{"x", 60}}, nil}, pod{"y", 20}, "node-00", "node-00", []int{80}},
		"no block is larger":     {piece.KindUnits, 80, [][]pod{{{"x", 20}, {"x", 20}}, nil}, pod{"y", 20}, "node-01", "node-00", nil},
		"there is no other room": {piece.KindUnits, 80, [][]pod{{{"x", 20}}, {{"y", 61}}}, pod{"y", 20}, "node-00", "node-00", nil},
		"beside the same again":  {piece.KindUnits, 80, [][]pod{{{"x", 20}}, {{"x", 10}, {"y", 10}}}, pod{"y", 20}, "node-01", "node-00", nil},
		"not where one is alone": {piece.KindUnits, 80, [][]pod{{{"x", 20}}, {{"x", 10}, {"z", 10}}}, pod{"y", 20}, "node-01", "node-00", nil},
	} {
		for _, apart := range []bool{true, false} {
			w := newTenants(t, c.kind, len(c.on), 1, c.total, apart)
			resource := map[piece.Kind]string{piece.KindUnits: memName, piece.KindReplica: repName}[c.kind]
			for i, pods := range c.on {
				for j, has := range pods {
					all := w.names
					w.names = all[i : i+1]
					w.come(asks(fmt.Sprint(i, "-", j), resource, has.n).in(has.namespace))
					w.names = all
				}
			}
			want := c.want
			if !apart {
				want = c.without
			}
			for _, n := range c.wait {
				w.books.SetPod(asks(fmt.Sprint("waits-", n), resource, n))
			}
			if got := w.come(asks("p", resource, c.come.n).in(c.come.namespace)); got != want {
				t.Errorf("%s (apart: %v): the pod is on %q, want %q", name, apart, got, want)
			}
		}
	}
}

// Pods count as company from the moment when they may get a share: on their way, with room held for them, of either
// tier, and if the GPUNode alone names their devices. Pods whose GPU takes turns do not count.
func TestCompanyOfPods(t *testing.T) {
	for name, c := range map[string]struct {
		tell func(b *Books, s *gpunode.Status)
		want string
	}{
		"nothing":       {func(*Books, *gpunode.Status) {}, "a"},
		"on its way":    {func(b *Books, _ *gpunode.Status) { b.SetPod(onA(asks("o", memName, 1).in("x"))) }, "b"},
		"in spot":       {func(b *Books, _ *gpunode.Status) { b.SetPod(onA(asks("o", spotMem, 1).in("x"))) }, "b"},
		"its own":       {func(b *Books, _ *gpunode.Status) { b.SetPod(onA(asks("o", memName, 1).in("y"))) }, "a"},
		"of other GPUs": {func(b *Books, _ *gpunode.Status) { b.SetPod(onA(asks("o", gpuName, 1).in("x"))) }, "a"},
		"has reported": {func(b *Books, _ *gpunode.Status) {
			p := onA(asks("o", memName, 1).in("x"))
			p.Devices = []string{"GPU-0::0"}
			b.SetPod(p)
		}, "b"},
		"has reported spot": {func(b *Books, _ *gpunode.Status) {
			p := onA(asks("o", spotMem, 1).in("x"))
			p.Devices = []string{SpotDevice("GPU-0::0")}
			b.SetPod(p)
		}, "b"},
		"in turns": {func(b *Books, _ *gpunode.Status) {
			p := onA(asks("o", memName, 1).in("x"))
			p.Devices = []string{"GPU-1::0"}
			b.SetPod(p)
		}, "a"},
		"has gone": {func(b *Books, _ *gpunode.Status) {
			b.SetPod(onA(asks("o", memName, 1).in("x")))
			p := onA(asks("o", memName, 1).in("x"))
			p.Done = true
			b.SetPod(p)
		}, "a"},
		"named by the GPUNode": {func(b *Books, s *gpunode.Status) {
			s.HoldersIn = gpunode.InObject
			s.GPUs[0].Holders = []gpunode.Holder{{Namespace: "x", Pod: "o", Resource: memName, Devices: piece.SetOf([]int{0})}}
			b.SetPod(onA(asks("o", memName, 1).in("x")))
		}, "b"},
		"room is held": {func(b *Books, s *gpunode.Status) {
			b.SetNode("a", s, true)
			if _, err := b.Hold("h", "x/h", []Group{{Namespace: "x", N: 1, Among: []string{"a"}, Containers: asks("", memName, 1).Containers}}, start); err != nil {
				t.Fatal(err)
			}
		}, "b"},
	} {
		says := func() *gpunode.Status {
			s := plain(piece.KindUnits, memName, 2, 80)
			s.GPUs[0].Compute = gpunode.Through
			s.GPUs[0].Spot = &gpunode.Spot{Resource: spotMem, Total: 80}
			s.GPUs = append(s.GPUs, plain(piece.KindWhole, gpuName, 1, 1).GPUs...)
			s.GPUs[2].UUID = "GPU-2"
			return s
		}
		b := New()
		b.KeepApart()
		s := says()
		c.tell(b, s)
		b.SetNode("a", s, true)
		b.SetNode("b", says(), true)
		// Each node has an empty GPU, and without company a is the better one, by its name if by nothing else.
		if got, err := b.Place(context.Background(), asks("p", memName, 80).in("y"), []string{"a", "b"}, start); err != nil || got != c.want {
			t.Errorf("%s: it is on %q, want %q: %v", name, got, c.want, err)
		}
	}
}

// onA is a pod on node a that has not reported.
func onA(p Pod) Pod {
	p.Node = "a"
	return p
}

// Room is held apart, too, and pods with room that is held for them stay there.
func TestRoomIsHeldApart(t *testing.T) {
	w := newTenants(t, piece.KindReplica, 2, 1, 4, true)
	w.come(asks("x", repName, 1).in("x"))
	group := Group{Namespace: "y", N: 2, Among: w.names, Containers: asks("", repName, 1).Containers}
	at, err := w.books.Hold("h", "y/h", []Group{group}, start)
	if want := "[[node-01 node-01]]"; err != nil || fmt.Sprint(at) != want {
		t.Errorf("room is held on %v, want %s: %v", at, want, err)
	}
	w.come(asks("z", repName, 4).in("x")) // in vain: a container has one
	if got := w.come(asks("x2", repName, 1).in("x")); got != "node-00" {
		t.Errorf("a pod beside room that is held is on %q", got)
	}
	if got := w.come(asks("y", repName, 1).in("y").of("h")); got != "node-01" {
		t.Errorf("a pod with room that is held is on %q", got)
	}
}

// event is a pod that comes, or one that ends.
type event struct {
	pod  Pod
	ends string // its UID
}

// history is a random history of pods of three namespaces. Each asks for at most most of a resource. With a stay of 0 none
// ends, and otherwise there are about so many.
func history(r *rand.Rand, resource string, steps int, of []int, stay int) (out []event) {
	var there []string
	for i := range steps {
		if stay > 0 && len(there) > stay || stay > 0 && len(there) > 0 && r.IntN(4) == 0 {
			j := r.IntN(len(there))
			out = append(out, event{ends: there[j]})
			there = slices.Delete(there, j, j+1)
			continue
		}
		p := asks(fmt.Sprint("p", i), resource, of[r.IntN(len(of))]).in([]string{"x", "y", "z"}[r.IntN(3)])
		out, there = append(out, event{pod: p}), append(there, p.UID)
	}
	return out
}

// step lets an event happen, and reports whether its pod has a place; true if it ends one.
func (w *tenants) step(e event) bool {
	if e.ends != "" {
		w.end(e.ends)
		return true
	}
	return w.come(e.pod) != ""
}

// To keep namespaces apart costs no place. If all pods ask for as much, or for replicas, the same pods have a place in the
// same histories. If they ask for multiples of each other and none ends, the first pod that has a place in one history alone
// is one of those that were kept apart. With other sizes, the packing decides, and company only between nodes that it finds
// alike: the same pods have a place in most histories. Otherwise namespaces share fewer nodes.
func TestApartCostsNoPlace(t *testing.T) {
	halves, every := []int{5, 10, 20, 40}, []int{1, 2, 3, 4, 5, 6, 7, 8}
	for name, c := range map[string]struct {
		kind         piece.Kind
		resource     string
		total, steps int
		of           []int
		stay         int // how many pods there are, about; 0 if none ends
		same, fewer  bool
	}{
		"equal requests":          {piece.KindUnits, memName, 16, 80, []int{3}, 0, true, true},
		"equal ones come and go":  {piece.KindUnits, memName, 79, 150, []int{26}, 60, true, true},
		"replicas come and go":    {piece.KindReplica, repName, 4, 150, []int{1}, 80, true, true},
		"halves":                  {piece.KindUnits, memName, 79, 80, halves, 0, false, true},
		"two sizes":               {piece.KindUnits, memName, 79, 80, []int{10, 30}, 0, false, true},
		"halves come and go":      {piece.KindUnits, memName, 79, 150, halves, 60, false, true},
		"any requests":            {piece.KindUnits, memName, 16, 80, every, 0, true, false},
		"any of them come and go": {piece.KindUnits, memName, 16, 150, every, 60, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mixed, mixedApart, refused, gained := 0, 0, 0, 0
			for seed := range uint64(rounds(5, 200)) {
				without, apart := newTenants(t, c.kind, 6, 2, c.total, false), newTenants(t, c.kind, 6, 2, c.total, true)
				for i, n := range c.of { // pods that wait tell the books which sizes there are
					p := asks(fmt.Sprint("waits-", i), c.resource, n)
					without.books.SetPod(p)
					apart.books.SetPod(p)
				}
				alike := true
				for i, e := range history(rand.New(rand.NewPCG(seed, 3)), c.resource, c.steps, c.of, c.stay) {
					one, other := without.step(e), apart.step(e)
					mixed, mixedApart = mixed+without.mixed(), mixedApart+apart.mixed()
					if one == other || !alike {
						continue
					}
					if alike = false; c.same || one && c.stay == 0 {
						t.Fatalf("seed %d, step %d: %+v has a place: %v; with namespaces kept apart: %v", seed, i, e.pod, one, other)
					}
					gained++
				}
				refused += without.refused
			}
			t.Logf("nodes that namespaces share, over all steps: %d; kept apart: %d; %d pods refused, in %d histories others", mixed, mixedApart, refused, gained)
			if c.fewer && mixedApart >= mixed || refused < 5 {
				t.Error("they are no more apart, or nothing was ever full")
			}
			if !c.fewer && gained > rounds(5, 200)/10 { // 17 of 200, and of "halves" 185
				t.Error("with these sizes, company decides more than it may")
			}
		})
	}
}

// In each state of random histories, a pod has a place if it has one without KeepApart, and leaves as many places of each
// size in the fleet.
func TestApartLeavesAsManyPlaces(t *testing.T) {
	sizes := []int{1, 2, 4, 8}
	places := func(w *tenants, node string, p Pod) (out [4]int) {
		for name, m := range w.machines {
			if m = m.clone(); name == node {
				if _, err := m.admit(w.r, &p); err != nil {
					t.Fatal(err)
				}
			}
			for _, d := range m.gpus {
				for i, n := range sizes {
					out[i] += (d.total - len(d.by)) / n
				}
			}
		}
		return out
	}
	refused, other := 0, 0
	for seed := range uint64(rounds(6, 200)) {
		r := rand.New(rand.NewPCG(seed, 4))
		w := newTenants(t, piece.KindUnits, 5, 2, 15, true)
		for i, n := range sizes {
			w.books.SetPod(asks(fmt.Sprint("waits-", i), memName, n))
		}
		for i, e := range history(r, memName, 150, sizes, 40) {
			if e.ends != "" {
				w.end(e.ends)
				continue
			}
			twin := New()
			for _, name := range w.names {
				twin.SetNode(name, w.machines[name].says(), true)
			}
			for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
				twin.SetPod(w.pods[uid])
			}
			want, err := twin.Place(context.Background(), e.pod, w.names, start)
			got, no := w.books.Place(context.Background(), e.pod, w.names, start)
			if (err == nil) != (no == nil) {
				t.Fatalf("seed %d, step %d: without KeepApart %q, %v; with it %q, %v", seed, i, want, err, got, no)
			}
			if err != nil {
				refused++
				continue
			}
			one, two := places(w, want, e.pod), places(w, got, e.pod)
			for j := range one {
				if two[j] < one[j] {
					t.Fatalf("seed %d, step %d: %v places on %s, and %v on %s", seed, i, one, want, two, got)
				}
			}
			if w.come(e.pod); got != want {
				other++
			}
		}
	}
	if t.Logf("%d pods refused, %d elsewhere", refused, other); refused < 10 || other < 20 {
		t.Error("the test looks at nothing")
	}
}

// A size counts as long as a pod asks for it, and a day longer. With sizes that are no multiples, with many sizes, and with
// pods on their way of which it is not known what they leave, a pod goes where it would go by itself.
func TestSizesOfPlaces(t *testing.T) {
	for name, c := range map[string]struct {
		tell func(w *tenants)
		want string
	}{
		"no other size":  {func(*tenants) {}, "node-01"},
		"a smaller one":  {func(w *tenants) { w.books.SetPod(asks("o", memName, 10)) }, "node-01"},
		"a larger one":   {func(w *tenants) { w.books.SetPod(asks("o", memName, 80)) }, "node-00"},
		"no multiple":    {func(w *tenants) { w.books.SetPod(asks("o", memName, 3)) }, "node-00"},
		"of another one": {func(w *tenants) { w.books.SetPod(asks("o", repName, 80)) }, "node-01"},
		"one that ended": {func(w *tenants) {
			w.books.SetPod(asks("o", memName, 80))
			w.books.DeletePod("o")
		}, "node-00"},
		"one that is done": {func(w *tenants) {
			p := asks("o", memName, 80)
			w.books.SetPod(p)
			p.Done = true
			w.books.SetPod(p)
		}, "node-00"},
		"one of two ended": {func(w *tenants) {
			w.books.SetPod(asks("o", memName, 80))
			w.books.SetPod(asks("o2", memName, 80))
			w.books.DeletePod("o")
			w.books.expire(start.Add(rememberedFor + 1))
		}, "node-00"},
		"one that ended a day ago": {func(w *tenants) {
			w.books.SetPod(asks("o", memName, 80))
			w.books.expire(start)
			w.books.DeletePod("o")
			w.books.expire(start.Add(rememberedFor + 1))
		}, "node-01"},
		"one that was refused": {func(w *tenants) {
			_, _ = w.books.Place(context.Background(), asks("o", memName, 81), w.names, start)
			w.books.expire(start.Add(rememberedFor + 1))
		}, "node-01"},
		"many sizes": {func(w *tenants) {
			for i := range 200 {
				w.books.SetPod(asks(fmt.Sprint("o", i), memName, 20<<i%31))
				w.books.DeletePod(fmt.Sprint("o", i))
				w.books.SetPod(asks(fmt.Sprint("o", i), memName, 20*(1+i)))
			}
		}, "node-00"},
	} {
		w := newTenants(t, piece.KindUnits, 2, 1, 80, true)
		w.come(asks("x", memName, 20).in("x"))
		c.tell(w)
		now := w.books.now
		if got, err := w.books.Place(context.Background(), asks("y", memName, 20).in("y"), w.names, now); err != nil || got != c.want {
			t.Errorf("%s: the pod is on %q, want %q: %v", name, got, c.want, err)
		}
		if s := w.books.asked[memName]; len(s.gone) > mostSizes+1 {
			t.Errorf("%s: %d sizes are remembered", name, len(s.gone))
		}
	}
}

// Replicas whose pods take turns may be several of one container, which needs several GPUs. So for such a node, a pod does not
// leave a fuller one.
func TestReplicasInTurnsAreNoPlaces(t *testing.T) {
	for turns, want := range map[bool]string{true: "node-00", false: "node-01"} {
		w := newTenants(t, piece.KindReplica, 2, 2, 4, true)
		for _, d := range w.machines["node-01"].gpus {
			d.single, d.mps = !turns, !turns
		}
		w.books.SetNode("node-01", w.machines["node-01"].says(), true)
		w.names = []string{"node-00"}
		w.come(asks("x", repName, 1).in("x"))
		w.names = []string{"node-00", "node-01"}
		if got := w.come(asks("y", repName, 1).in("y")); got != want {
			t.Errorf("beside a node whose pods take turns (%v), the pod is on %q, want %q", turns, got, want)
		}
	}
}

// Pods that ask for resources that no node has, and go, leave little behind.
func TestNamesOfPlacesAreBounded(t *testing.T) {
	b := New()
	b.KeepApart()
	for i := range 10 * mostNames {
		b.SetPod(asks("o", fmt.Sprint("example.com/", i), 1))
	}
	if len(b.asked) > mostNames {
		t.Errorf("sizes of %d resources are remembered", len(b.asked))
	}
	b.SetPod(asks("o", memName, 1))
	b.DeletePod("o")
	if s := b.asked[memName]; s == nil || len(s.of) != 0 || len(s.gone) != 1 {
		t.Errorf("of a pod that has gone, %+v is remembered", s)
	}
}
