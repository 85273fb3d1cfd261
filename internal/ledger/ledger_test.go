// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

func unitsOf(u gpu.UUID, numbers ...int) []Grant {
	return []Grant{{GPU: u, Piece: piece.Units{Set: piece.SetOf(numbers), Unit: 1024}, Cap: piece.CapOf(uint64(len(numbers)) << 30)}}
}

// shareOf is the same grants with a share of the SMs, in percent.
func shareOf(grants []Grant, percent int) []Grant {
	grants[0].Compute.Ceiling = percent
	return grants
}

func newLedger() *Ledger {
	at := time.Unix(1e9, 0)
	return New(func() {}, func() time.Time { at = at.Add(time.Millisecond); return at })
}

// A request overlaps with another where it permits that, and on one front-end's GPUs
// alone.
func TestTake(t *testing.T) {
	for _, c := range []struct {
		name    string
		owner   FrontEnd
		overlap bool
		grants  []Grant
		taken   bool
	}{
		{"other units", DevicePlugin, false, unitsOf("GPU-a", 2, 3), false},
		{"the same units", DevicePlugin, false, unitsOf("GPU-a", 1, 2), true},
		{"the same units, of one that ends", DevicePlugin, true, unitsOf("GPU-a", 1, 2), false},
		{"units of another size", DevicePlugin, false, []Grant{{GPU: "GPU-a", Piece: piece.Units{Set: piece.SetOf([]int{5}), Unit: 512}}}, true},
		{"other units, through MPS", DevicePlugin, false, shareOf(unitsOf("GPU-a", 2, 3), 25), true},
		{"other units, through MPS, beside one that ends", DevicePlugin, true, shareOf(unitsOf("GPU-a", 2, 3), 25), false},
		{"units of another GPU, through MPS", DevicePlugin, false, shareOf(unitsOf("GPU-b", 2, 3), 25), false},
		{"a replica of the GPU", DevicePlugin, false, []Grant{{GPU: "GPU-a", Piece: piece.Replica{Of: 4}}}, true},
		{"the GPU, and nothing of it", DevicePlugin, false, []Grant{{GPU: "GPU-a", Piece: piece.Whole{}, Cap: piece.NoCap, NoRoom: true}}, false},
		{"the GPU through another front-end, and nothing of it", DRA, false, []Grant{{GPU: "GPU-a", Piece: piece.Whole{}, Cap: piece.NoCap, NoRoom: true}}, false},
		{"another GPU", "other", false, unitsOf("GPU-b", 0), false},
		{"through another front-end", "other", false, unitsOf("GPU-a", 2, 3), true},
		{"through another front-end, of one that ends", "other", true, unitsOf("GPU-a", 2, 3), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLedger()
			if _, err := l.Take(Request{ID: "first", Owner: DevicePlugin, Grants: unitsOf("GPU-a", 0, 1)}); err != nil {
				t.Fatal(err)
			}
			a, err := l.Take(Request{ID: "second", Owner: c.owner, Grants: c.grants, Overlap: c.overlap})
			if c.taken != errors.Is(err, ErrHeld) || !c.taken && (err != nil || a.Phase != Reserved || a.Epoch != 2) {
				t.Errorf("%+v, %v", a, err)
			}
			if held := l.Allocations(); c.taken && len(held) != 1 {
				t.Errorf("what was refused is held: %+v", held)
			}
		})
	}
}

// Containers that take turns do not meet clients of MPS. Of a grant whose record is lost, the share is not known
// either, and it keeps nothing away.
func TestTurnsBesideShares(t *testing.T) {
	l := newLedger()
	take := func(id string, grants []Grant, held bool) {
		t.Helper()
		if _, err := l.Take(Request{ID: id, Owner: DevicePlugin, Grants: grants}); held != errors.Is(err, ErrHeld) {
			t.Errorf("%s: %v, want held: %v", id, err, held)
		}
	}
	lost := unitsOf("GPU-b", 0)
	lost[0].Cap = piece.Cap{}
	take("share", shareOf(unitsOf("GPU-a", 0), 25), false)
	take("turn", unitsOf("GPU-a", 1), true)
	take("another share", shareOf(unitsOf("GPU-a", 1), 60), false)
	take("lost", lost, false)
	take("share beside it", shareOf(unitsOf("GPU-b", 1), 25), false)
}

// A GPU has one time slice: whoever asks for another one has no room beside the first, and
// who asks for none goes along with it.
func TestTimeSlicesOfOneGPU(t *testing.T) {
	of := func(u gpu.UUID, unit int, slice gpu.TimeSlice) []Grant {
		g := unitsOf(u, unit)
		g[0].TimeSlice = slice
		return g
	}
	l := newLedger()
	for i, c := range []struct {
		grants []Grant
		taken  bool
	}{
		{of("GPU-a", 0, ""), false},
		{of("GPU-a", 1, gpu.TimeSliceLong), false},
		{of("GPU-a", 2, gpu.TimeSliceShort), true},
		{of("GPU-a", 2, gpu.TimeSliceDefault), true},
		{of("GPU-a", 2, gpu.TimeSliceLong), false},
		{of("GPU-a", 3, ""), false},
		{of("GPU-b", 2, gpu.TimeSliceShort), false},
	} {
		if _, err := l.Take(Request{ID: fmt.Sprint(i), Owner: DRA, Grants: c.grants}); c.taken != errors.Is(err, ErrHeld) {
			t.Errorf("%+v: %v", c.grants, err)
		}
	}
	l.Release(DRA, "1")
	l.Release(DRA, "4")
	if _, err := l.Take(Request{ID: "short", Owner: DRA, Grants: of("GPU-a", 2, gpu.TimeSliceShort)}); err != nil {
		t.Error(err)
	}
}

// What takes nothing keeps nobody off, also not through another front-end.
func TestNoRoom(t *testing.T) {
	l := newLedger()
	r := Request{ID: "admin", Owner: DRA, Ref: "of whom", Grants: []Grant{{GPU: "GPU-a", Piece: piece.Whole{}, Cap: piece.NoCap, NoRoom: true}}}
	if a, err := l.Take(r); err != nil || a.Record().Ref != "of whom" {
		t.Fatal(a, err)
	}
	_, ended := l.Ended()
	if _, err := l.Take(Request{ID: "units", Owner: DevicePlugin, Grants: unitsOf("GPU-a", 0)}); err != nil {
		t.Error(err)
	}
	select {
	case <-ended:
		t.Error("an end, and nothing was released")
	default:
	}
	l.Release(DRA, "admin")
	<-ended
}

// An allocation is its front-end's: nobody else renews, releases or takes it over, and
// an ID is given once.
func TestOwner(t *testing.T) {
	l := newLedger()
	r := Request{ID: "a", Owner: DevicePlugin, Grants: unitsOf("GPU-a", 0)}
	if _, err := l.Take(r); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Take(r); !errors.Is(err, ErrHeld) {
		t.Errorf("taken twice: %v", err)
	}
	other := r
	other.Owner = "other"
	if _, err := l.Renew(other); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("renewed by another front-end: %v", err)
	}
	if _, ok := l.Release("other", "a"); ok {
		t.Error("released by another front-end")
	}
	if _, err := l.Found("a", Record{Owner: "other", Grants: r.Grants}, time.Time{}); !errors.Is(err, ErrHeld) {
		t.Errorf("taken over by another front-end: %v", err)
	}
	if _, ok := l.Release(DevicePlugin, "a"); !ok || l.Held() {
		t.Errorf("after its release: %+v", l.Allocations())
	}
}

// Of several records of one allocation the last tells when it was taken. A clock that was
// put back does not make it younger than it is.
func TestFound(t *testing.T) {
	now := time.Unix(1e9, 0)
	l := New(func() {}, func() time.Time { return now })
	r := Record{Owner: DevicePlugin, Grants: unitsOf("GPU-a", 0)}
	for _, taken := range []time.Time{now.Add(-time.Hour), now.Add(-time.Minute), {}} {
		if _, err := l.Found("a", r, taken); err != nil {
			t.Fatal(err)
		}
	}
	if a, _ := l.Get("a"); !a.Given.Equal(now.Add(-time.Minute)) || a.Adopted || !a.Fresh || a.Epoch != 0 {
		t.Errorf("%+v, want it as of a minute ago", a)
	}
	if l.Filed("a", now.Add(-2*time.Minute)); !fresh(l, "a") {
		t.Error("a file that is older than the allocation is taken for its own")
	}
	if l.Filed("a", now); fresh(l, "a") {
		t.Error("its own file is taken for one of the holder before")
	}
	if _, err := l.Found("b", Record{Owner: DevicePlugin}, now); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a record of nothing: %v", err)
	}
}

func fresh(l *Ledger, id string) bool {
	a, _ := l.Get(id)
	return a.Fresh
}

// What was said of an allocation before it was renewed is not heard.
func TestLateAnswer(t *testing.T) {
	l := newLedger()
	r := Request{ID: "a", Owner: DevicePlugin, Grants: unitsOf("GPU-a", 0), Overlap: true}
	old, err := l.Take(r)
	if err != nil {
		t.Fatal(err)
	}
	l.Looked("a", old.Epoch, "", "")
	again, err := l.Renew(r)
	if err != nil || again.Epoch <= old.Epoch || again.Phase != Reserved {
		t.Fatalf("renewed: %+v, %v", again, err)
	}
	l.Looked("a", old.Epoch, "", "")
	if l.SetOpen("a", old.Epoch) || l.SetOpen("a", again.Epoch) {
		t.Error("an allocation of which nobody has looked is open")
	}
	l.Looked("a", again.Epoch, "", "")
	if !l.SetOpen("a", again.Epoch) || l.Unopened() {
		t.Errorf("not open: %+v", l.Allocations())
	}
}

// Whoever waits is told why it waited in vain.
func TestPrepareTells(t *testing.T) {
	l := newLedger()
	a, err := l.Take(Request{ID: "a", Owner: DevicePlugin, Grants: unitsOf("GPU-a", 0)})
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for _, c := range []struct {
		bring func()
		want  string
	}{
		{func() {}, "is not written yet"},
		{func() { l.Looked("a", a.Epoch, "train/job-1", "allocation b") }, "previous holder still ending: allocation b"},
		{func() { l.Looked("a", a.Epoch, "", ""); l.SetCause("a", status.Why(status.NoRoom, "no room on GPU 0")) }, "no room on GPU 0"},
		{func() { l.Release(DevicePlugin, "a") }, "there is no allocation a"},
	} {
		c.bring()
		if err := l.Prepare(ended, "a"); !errors.Is(err, ErrNotOpen) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want one that says %q", err, c.want)
		}
	}
}

// A Prepare waits for one holder. If the allocation ends or gets the next holder first, the Prepare
// fails at once. It does not return nil when the allocation opens for the next holder.
func TestPrepareEndsWithItsAllocation(t *testing.T) {
	request := Request{ID: "a", Owner: DRA, Grants: unitsOf("GPU-a", 0)}
	open := func(t *testing.T, l *Ledger, a Allocation, err error) {
		t.Helper()
		if l.Looked("a", a.Epoch, "", ""); err != nil || !l.SetOpen("a", a.Epoch) {
			t.Errorf("the next holder's allocation does not open: %+v, %v", a, err)
		}
	}
	for name, ends := range map[string]func(*testing.T, *Ledger, Allocation){
		"released": func(_ *testing.T, l *Ledger, _ Allocation) { l.Release(DRA, "a") },
		"released, taken again, and open": func(t *testing.T, l *Ledger, _ Allocation) {
			l.Release(DRA, "a")
			a, err := l.Take(request)
			open(t, l, a, err)
		},
		"renewed": func(t *testing.T, l *Ledger, _ Allocation) {
			if _, err := l.Renew(request); err != nil {
				t.Error(err)
			}
		},
		"renewed, and open": func(t *testing.T, l *Ledger, _ Allocation) {
			a, err := l.Renew(request)
			open(t, l, a, err)
		},
		"superseded": func(_ *testing.T, l *Ledger, a Allocation) { l.Supersede("a", a.Epoch, "ns/p", "ns/p") },
		"superseded, and reinstated": func(_ *testing.T, l *Ledger, a Allocation) {
			l.Supersede("a", a.Epoch, "ns/p", "ns/p")
			synctest.Wait()
			now, _ := l.Get("a")
			l.Reinstate("a", now.Epoch)
		},
	} {
		for _, phase := range []Phase{Reserved, Waiting, Making} {
			t.Run(fmt.Sprintf("%s/%s", name, phase), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					l := newLedger()
					a, err := l.Take(request)
					if err != nil {
						t.Fatal(err)
					}
					got := make(chan error, 1)
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					go func() { got <- l.Prepare(ctx, "a") }()
					synctest.Wait()
					switch phase {
					case Waiting:
						l.Looked("a", a.Epoch, "ns/p", "ns/p")
					case Making:
						l.Looked("a", a.Epoch, "", "")
					}
					if now, _ := l.Get("a"); now.Phase != phase {
						t.Fatalf("%s, want %s", now.Phase, phase)
					}
					ends(t, l, a)
					synctest.Wait()
					select {
					case err := <-got:
						if !errors.Is(err, ErrNotOpen) {
							t.Errorf("%v, want an error: its holder has the allocation no longer", err)
						}
					default:
						t.Error("it still waits")
					}
				})
			})
		}
	}
}

// The wait for the removal of a superseded allocation's CDI file ends with the allocation, and when
// the allocation is reinstated.
func TestGoneWithTheAllocation(t *testing.T) {
	for name, ends := range map[string]func(*Ledger){
		"released": func(l *Ledger) { l.Release(DRA, "a") },
		"reinstated": func(l *Ledger) {
			a, _ := l.Get("a")
			l.Reinstate("a", a.Epoch)
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLedger()
			a, err := l.Take(Request{ID: "a", Owner: DRA, Grants: unitsOf("GPU-a", 0)})
			if err != nil {
				t.Fatal(err)
			}
			gone := l.Supersede("a", a.Epoch, "ns/p", "ns/p")
			select {
			case <-gone:
				t.Fatal("its file is gone, and nothing has removed it")
			default:
			}
			ends(l)
			select {
			case <-gone:
			default:
				t.Error("it is still waited for")
			}
		})
	}
}

// TestTransitions does whatever may be done to allocations, in any order: only the
// table's transitions come of it, and all of them.
func TestTransitions(t *testing.T) {
	table := map[Transition]bool{}
	for _, step := range Transitions {
		if step.By == "" || table[step.Transition] {
			t.Errorf("%+v is in the table twice, or says nothing", step)
		}
		table[step.Transition] = true
	}
	l, rng := newLedger(), rand.New(rand.NewPCG(1, 7))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for range 40_000 {
		id := fmt.Sprint("a", rng.IntN(3))
		a, known := l.Get(id)
		r := Request{ID: id, Owner: DevicePlugin, Grants: unitsOf("GPU-a", rng.IntN(4)), Overlap: true}
		if rng.IntN(4) == 0 {
			r.Tier = Spot
		}
		switch rng.IntN(12) {
		case 0:
			if _, err := l.Take(r); err == nil && known || err != nil && !known && r.Tier == Guaranteed {
				t.Fatalf("take %+v: %v", a, err)
			}
		case 1:
			if _, err := l.Renew(r); err == nil && !known || err != nil && known && r.Tier == Guaranteed {
				t.Fatalf("renew %+v: %v", a, err)
			}
		case 2:
			l.Looked(id, a.Epoch, []string{"", "ns/p"}[rng.IntN(2)], "")
		case 3:
			if err := l.Prepare(ended, id); (err == nil) != (known && a.IsOpen()) {
				t.Fatalf("prepare %+v: %v", a, err)
			}
		case 4:
			if l.SetOpen(id, a.Epoch) && a.Phase != Taken && a.Phase != Making && a.Phase != Open {
				t.Fatalf("%+v was opened", a)
			}
		case 5:
			l.Shut(id)
		case 6:
			if rng.IntN(3) == 0 {
				l.Release(DevicePlugin, id)
			}
		case 7:
			if l.Supersede(id, a.Epoch, "ns/p", "ns/p"); known && rng.IntN(2) == 0 {
				l.Gone(id)
			}
		case 8:
			l.Reinstate(id, a.Epoch)
		case 9:
			if l.SetParked(id, a.Epoch, 5, time.Unix(1e9, 0)) && (a.Tier != Spot || a.Superseded) {
				t.Fatalf("%+v was parked", a)
			}
		case 10:
			if l.Unpark(id, a.Epoch) && (a.Phase != Parked || a.Yield.Asked()) {
				t.Fatalf("%+v has its room again", a)
			}
		case 11:
			l.EndParked(id, a.Epoch)
		}
		if a, known := l.Get(id); known && a.Superseded && a.Phase != Waiting {
			t.Fatalf("superseded, and %s", a.Phase)
		}
	}
	passed := l.Passed()
	for _, tr := range passed {
		if !table[tr] {
			t.Errorf("%s to %s is not in the table", tr.From, tr.To)
		}
	}
	for tr := range table {
		if !slices.Contains(passed, tr) {
			t.Errorf("%s to %s never happens", tr.From, tr.To)
		}
	}
}

// What overlaps and what does not, both ways round.
func TestMeets(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		var sets [2]piece.Set
		var numbers [2][]int
		for i := range sets {
			for n := range 20 {
				if rng.IntN(5) == 0 {
					numbers[i] = append(numbers[i], n)
				}
			}
			sets[i] = piece.SetOf(numbers[i])
		}
		want := slices.ContainsFunc(numbers[0], func(n int) bool { return slices.Contains(numbers[1], n) })
		if sets[0].Meets(sets[1]) != want || sets[1].Meets(sets[0]) != want {
			t.Fatalf("%v and %v: want %v", numbers[0], numbers[1], want)
		}
	}
}

// One whose ID stands for something else opens for nobody, keeps its pieces, and is as it was
// when that is taken back. Whoever ends it hears when no file stands for it any more.
func TestSupersede(t *testing.T) {
	for _, phase := range []Phase{Reserved, Taken, Making, Open} {
		l := newLedger()
		a, err := l.Take(Request{ID: "a", Owner: DRA, Grants: unitsOf("GPU-a", 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		if phase != Reserved {
			l.Looked("a", a.Epoch, "", "")
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if phase == Making || phase == Open {
			_ = l.Prepare(ended, "a") // it is to start
		}
		if phase == Open {
			l.SetOpen("a", a.Epoch)
		}
		if now, _ := l.Get("a"); now.Phase != phase {
			t.Fatalf("%s, want %s", now.Phase, phase)
		}
		if l.Supersede("a", a.Epoch+1, "x", "y") != nil {
			t.Error("an answer of another epoch is heard")
		}
		gone := l.Supersede("a", a.Epoch, "ns/p", "the pod before")
		if now, _ := l.Get("a"); l.Supersede("a", a.Epoch, "x", "y") != nil || l.Supersede("a", now.Epoch, "ns/p", "the pod before") != gone {
			t.Error("said again, it is another epoch")
		}
		is := func(when string, over bool) {
			t.Helper()
			select {
			case <-gone:
				if !over {
					t.Errorf("%s: its file is gone", when)
				}
			default:
				if over {
					t.Errorf("%s: its file stands", when)
				}
			}
		}
		l.Looked("a", a.Epoch, "", "")
		now, _ := l.Get("a")
		l.Looked("a", now.Epoch, "", "")
		if l.SetOpen("a", a.Epoch) || l.SetOpen("a", now.Epoch) {
			t.Errorf("from %s it opens", phase)
		}
		if err := l.Prepare(ended, "a"); !errors.Is(err, ErrNotOpen) || !strings.Contains(err.Error(), "the pod before") {
			t.Errorf("it lets a container through: %v", err)
		}
		if now, _ := l.Get("a"); now.Phase != Waiting || !now.Superseded || now.After != "ns/p" || len(now.Grants) != 1 {
			t.Errorf("from %s: %+v", phase, now)
		}
		is("before the loop has looked", false)
		l.Gone("a")
		is("then", true)
		l.Reinstate("a", a.Epoch)
		if now, _ := l.Get("a"); !now.Superseded {
			t.Error("an answer of another epoch is heard")
		}
		l.Reinstate("a", now.Epoch)
		if now, _ = l.Get("a"); now.Phase != Taken || now.Superseded || now.After != "" {
			t.Errorf("reinstated: %+v", now)
		}
		if !l.SetOpen("a", now.Epoch) {
			t.Error("reinstated, it does not open")
		}
		l.Gone("a") // by a round that has seen it before
		gone = l.Supersede("a", now.Epoch, "ns/p", "the pod before")
		is("superseded again", false)
		for _, tr := range l.Passed() {
			if !slices.ContainsFunc(Transitions, func(in Step) bool { return in.Transition == tr }) {
				t.Errorf("it went from %s to %s, which is not in the table", tr.From, tr.To)
			}
		}
	}
}

// What was given to something that is no pod is told by that, until a pod is known.
func TestWhoHasItWithoutAPod(t *testing.T) {
	l := newLedger()
	if _, err := l.Take(Request{ID: "a", Owner: DRA, Grants: unitsOf("GPU-a", 0)}); err != nil {
		t.Fatal(err)
	}
	l.SetFor("a", "podgroups.scheduling.k8s.io ns/gang")
	a, _ := l.Get("a")
	if a.Who() != "podgroups.scheduling.k8s.io ns/gang" {
		t.Error(a.Who())
	}
	l.SetHolder("a", Holder{Pod: workload.Pod{Namespace: "ns", Name: "gang-0"}})
	if a, _ = l.Get("a"); a.Who() != "ns/gang-0" {
		t.Error(a.Who())
	}
}
