// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
)

// The desk's clock in these tests is one that nobody can put back, as a process has
// one. Containers are dated by another.

// A clock put back between two Allocates makes the container of the pod before look
// younger than the second, and then that of the next pod older. Neither is taken for
// the other's: the next pod waits for the one before, and not for itself.
func TestClockPutBackBetweenAllocates(t *testing.T) {
	held := ids(gpuA, 0, 1)
	for _, devices := range [][]string{held, ids(gpuA, 1, 2)} {
		for _, known := range []string{"by a look", "by an event", "not at all"} {
			for _, checkpoint := range []string{"of now", "of before", "without either", "that cannot be read"} {
				t.Run(fmt.Sprintf("%d in common, known %s, a checkpoint %s", 4-len(slices.Compact(slices.Sorted(slices.Values(slices.Concat(held, devices))))), known, checkpoint), func(t *testing.T) {
					d, clock := newDesk()
					d.set(units(nil))
					look := func(says *world) allocation {
						clock.pass(time.Second)
						d.Reconcile(says.say(clock.now()))
						i := slices.IndexFunc(d.Allocations(), func(c allocation) bool { return c.ID == cdi.Key(memName, devices) })
						if i < 0 {
							return allocation{}
						}
						return d.Allocations()[i]
					}
					allocate := func(ids []string) {
						t.Helper()
						if _, err := d.Allocate(memName, ids); err != nil {
							t.Fatal(err)
						}
					}
					allocate(held)
					if known == "not at all" {
						look(new(world).entry("old", "c", held))
					} else {
						look(new(world)) // the kubelet had not written it yet
					}
					ready(d, cdi.Key(memName, held))
					ahead := clock.now().Add(time.Hour)
					old := new(world).run("old", held, ahead)
					switch known {
					case "by a look":
						seen := new(world).run("old", held, ahead)
						seen.noCheckpoint = true
						look(seen)
					case "by an event":
						d.Seen(old.uses[0], clock.now())
					}
					clock.pass(time.Second)
					allocate(devices) // the pod before was deleted by force, and hangs
					switch checkpoint {
					case "of now":
						old.entry("next", "c", devices)
					case "of before":
						old.entry("old", "c", held)
					case "that cannot be read":
						old.noCheckpoint = true
					}
					for range 2 {
						if c := look(old); c.After != "ns/old" || c.Holder.Name == "old" && checkpoint != "of before" {
							t.Fatalf("the next pod's allocation waits for %q and is held by %s, want that it waits for ns/old", c.After, c.Holder)
						}
					}
					// Its container has ended.
					now := new(world).entry("next", "c", devices)
					now.noCheckpoint = old.noCheckpoint
					if c := look(now); c.After != "" || c.Phase == ledger.Reserved {
						t.Fatalf("the next pod waits for %q, which has ended", c.After)
					}
					ready(d, cdi.Key(memName, devices))
					now.run("next", devices, clock.now().Add(-time.Hour))
					if c := look(now); !c.Started || c.Holder.Name != "next" {
						t.Errorf("with the next pod's container: %+v", c)
					}
					d.Shut(cdi.Key(memName, devices)) // its GPU was ill for a moment
					if c := look(now); c.After != "" {
						t.Errorf("the next pod waits for %s, which is itself", c.After)
					}
				})
			}
		}
	}
}

// jumper drives a desk as a kubelet, a runtime and a loop do, with pods that are
// deleted by force and with a clock that jumps.
type jumper struct {
	t     *testing.T
	rng   *rand.Rand
	d     *desk
	clock *clock
	// skew is what the clock by which containers are dated is off.
	skew time.Duration
	// pods are those that the kubelet has, and hang what is left of others.
	pods       []*jumped
	hang       []Use
	file       []node.Entry // the checkpoint
	unreadable bool
	deaf       bool // the kubelet has restarted: its list is short
	next       int
	done       map[string]int
}

type jumped struct {
	uid string
	// allocations are its init container's devices, if it has one, and its own; at is whose turn it is.
	allocations [][]string
	at          int
	since       time.Time
	runs        *Use
}

func (j *jumper) entries() (out []node.Entry) {
	for _, p := range j.pods {
		for i, ids := range p.allocations {
			out = append(out, node.Entry{PodUID: p.uid, Container: fmt.Sprint("c", i), Resource: memName, IDs: ids})
		}
	}
	return out
}

func (j *jumper) uses() []Use {
	out := slices.Clone(j.hang)
	for _, p := range j.pods {
		if p.runs != nil {
			out = append(out, *p.runs)
		}
	}
	return out
}

// admit gives a pod some of the devices that the kubelet thinks are free.
func (j *jumper) admit() {
	const most = 4
	free := map[int]bool{}
	for n := range most {
		free[n] = true
	}
	for _, p := range j.pods {
		for _, ids := range p.allocations {
			for n := range most {
				if slices.Contains(ids, timesliceID(n)) {
					delete(free, n)
				}
			}
		}
	}
	if len(free) == 0 {
		return
	}
	var pick []string
	for n := range most {
		if free[n] && (len(pick) == 0 || j.rng.IntN(2) == 0) {
			pick = append(pick, timesliceID(n))
		}
	}
	j.next++
	p := &jumped{uid: fmt.Sprint("uid-", j.next), allocations: [][]string{pick}}
	if j.rng.IntN(3) == 0 {
		// The app container gets the init container's, all or some of them.
		p.allocations = append(p.allocations, slices.Clone(pick[:1+j.rng.IntN(len(pick))]))
	}
	for _, ids := range p.allocations {
		if _, err := j.d.Allocate(memName, ids); err != nil {
			j.t.Fatal(err)
		}
		j.clock.pass(time.Millisecond)
	}
	p.since = j.clock.now()
	j.pods = append(j.pods, p)
	j.done["admitted"]++
}

// start has the kubelet start the container whose turn it is, if its gate is open.
func (j *jumper) start(p *jumped) {
	if p.runs != nil {
		return
	}
	ids := p.allocations[p.at]
	key := cdi.Key(memName, ids)
	if i := slices.IndexFunc(j.d.Allocations(), func(c allocation) bool { return c.ID == key && c.IsOpen() }); i < 0 {
		j.done["waited"]++
		return
	}
	j.next++
	u := Use{ID: fmt.Sprint("id-", j.next), Key: key, Holder: holder("ns", p.uid, "c", p.uid), Created: j.clock.now().Add(j.skew)}
	for _, o := range j.hang {
		if j.onto(o.Key, ids) {
			j.t.Fatalf("%s of %s starts on %v beside %s of %s, which hangs", u.ID, u.UID, ids, o.ID, o.UID)
		}
	}
	p.runs = &u
	j.done["started"]++
}

// onto reports whether an allocation has some of these devices.
func (j *jumper) onto(key string, ids []string) bool {
	return slices.ContainsFunc(j.d.Allocations(), func(c allocation) bool {
		return c.ID == key && slices.ContainsFunc(c.IDs, func(id string) bool { return slices.Contains(ids, id) })
	})
}

// look asks the witnesses and opens the gates that may be.
func (j *jumper) look() {
	j.clock.pass(time.Millisecond)
	fresh := slices.EqualFunc(j.file, j.entries(), func(a, b node.Entry) bool { return a.PodUID == b.PodUID && slices.Equal(a.IDs, b.IDs) })
	says := Observation{Asked: j.clock.now(), Entries: j.file, Checkpoint: !j.unreadable, Uses: j.uses(), Runtime: true}
	if j.unreadable {
		says.Entries = nil
	}
	if says.List = j.rng.IntN(2) == 0; says.List && !j.deaf {
		says.Trusted = true
		for _, p := range j.pods {
			says.Listed = append(says.Listed, node.Holding{Namespace: "ns", Pod: p.uid, Container: "c", Resource: memName, IDs: p.allocations[len(p.allocations)-1]})
		}
	}
	j.d.Reconcile(says)
	for _, c := range j.d.Allocations() {
		if !c.IsOpen() && c.Phase != ledger.Reserved && c.After == "" {
			j.d.SetReady(&c)
		}
	}
	// Who is alone on its devices has its gate open.
	for _, p := range j.pods {
		ids := p.allocations[p.at]
		alone := !slices.ContainsFunc(j.hang, func(o Use) bool { return j.onto(o.Key, ids) })
		key := cdi.Key(memName, ids)
		open := slices.ContainsFunc(j.d.Allocations(), func(c allocation) bool { return c.ID == key && c.IsOpen() })
		if alone && !open && fresh && !j.unreadable {
			j.t.Fatalf("%s is alone on %v, and its gate is shut: %+v", p.uid, ids, j.d.Allocations())
		}
	}
	j.done["looks"]++
}

func (j *jumper) step() {
	var p *jumped
	if len(j.pods) > 0 {
		p = j.pods[j.rng.IntN(len(j.pods))]
	}
	drop := func() { j.pods = slices.DeleteFunc(j.pods, func(o *jumped) bool { return o == p }) }
	switch n := j.rng.IntN(100); {
	case n < 15:
		j.admit()
		if j.rng.IntN(4) > 0 {
			j.file = j.entries() // or somewhat later
		}
	case n < 40 && p != nil:
		j.start(p)
	case n < 50 && p != nil && p.runs != nil: // it ends: the next one's turn, or once more
		p.runs, p.at = nil, min(p.at+1, len(p.allocations)-1)
	case n < 58 && p != nil: // by force
		if p.runs != nil {
			j.hang = append(j.hang, *p.runs)
		}
		drop()
		j.done["forced"]++
	case n < 61 && p != nil:
		drop()
	case n < 66 && len(j.hang) > 0:
		i := j.rng.IntN(len(j.hang))
		j.hang = slices.Delete(j.hang, i, i+1)
	case n < 74:
		j.file = j.entries()
	case n < 77 && p != nil && p.runs != nil:
		j.d.Seen(*p.runs, j.clock.now())
	case n < 80:
		j.skew = time.Duration(j.rng.IntN(7200)-3600) * time.Second
	case n < 82:
		j.unreadable = !j.unreadable
	case n < 83:
		j.deaf = !j.deaf
	case n < 85 && p != nil:
		j.d.Shut(cdi.Key(memName, p.allocations[p.at])) // its GPU was ill for a moment
	default:
		j.clock.pass(time.Duration(j.rng.IntN(6000)) * time.Millisecond)
	}
}

func timesliceID(n int) string { return ids(gpuA, n)[0] }

// Whatever the clock does, two pods are never both open on one device, and who is
// alone on its devices is not kept waiting.
func TestClockWalk(t *testing.T) {
	j := &jumper{t: t, rng: rand.New(rand.NewPCG(5, 9)), done: map[string]int{}}
	j.d, j.clock = newDesk()
	j.d.set(units(nil))
	steps := 60_000
	if testing.Short() {
		steps = 12_000 // make test-all has all
	}
	for range steps {
		j.step()
		if j.rng.IntN(3) > 0 {
			j.look()
		}
	}
	t.Logf("%v", j.done)
	if least := steps / 60; j.done["started"] < least || j.done["forced"] < least || j.done["waited"] < least {
		t.Error("the walk tries too little")
	}
}

// A process that starts after that knows no container and goes by the checkpoint.
func TestClockPutBackBeforeARestart(t *testing.T) {
	d, clock := newDesk()
	d.set(units(nil))
	held := ids(gpuA, 0, 1)
	if err := d.restore(recordOf(t, memName, held), clock.now().Add(-time.Second), time.Time{}); err != nil {
		t.Fatal(err)
	}
	clock.pass(time.Second)
	says := new(world).entry("next", "c", held).run("old", held, clock.now().Add(time.Hour))
	d.Reconcile(says.say(clock.now()))
	if c := d.Allocations()[0]; c.After != "ns/old" || c.Started {
		t.Errorf("the next pod's allocation waits for %q, started %v; want that it waits for ns/old", c.After, c.Started)
	}
}

// What was written down has the age that it has when it is read, also when the clock
// is put back after that: otherwise nobody would look at it for as long.
func TestRestoredAllocationHasAnAgeThatNoClockChanges(t *testing.T) {
	d := deskOf(time.Now)
	written := time.Now().Add(-time.Minute).Round(0) // as it is read from a file
	if err := d.restore(recordOf(t, memName, ids(gpuA, 0)), written, time.Time{}); err != nil {
		t.Fatal(err)
	}
	at := d.Allocations()[0].Given
	if !at.Round(0).Equal(written) {
		t.Errorf("allocated at %s, want %s", at, written)
	}
	if !strings.Contains(at.String(), " m=") {
		t.Errorf("allocated at %s, which a clock that is put back makes a time to come", at)
	}
}
