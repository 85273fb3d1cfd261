// SPDX-License-Identifier: Apache-2.0

package park

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

var (
	long = flag.Bool("long", false, "thousands of parks")
	seed = flag.Uint64("seed", 0, "of the random history; 0 is a fixed one")
)

// history is a random history of a node: containers that are parked and restored, a guaranteed program that
// takes what is free, faults of the driver, and a kill -9 of the agent, its child or a program at any step.
type history struct {
	*world
	random     *rand.Rand
	containers map[string][]*program
	guaranteed *program
	key        int
	seen       map[string]int
	faulty     map[string]bool // containers on which the driver has failed
}

func (h *history) pick(key string) []*program {
	return slices.DeleteFunc(slices.Clone(h.containers[key]), func(p *program) bool { return h.programs[p.pid] == nil })
}

func (h *history) free() uint64 { return cardMiB*mib - h.used() }

// deadly makes something die at one of the next steps, mostly.
func (h *history) deadly() {
	left, what := h.random.IntN(16), h.random.IntN(4)
	h.dies = func(point string) {
		if left--; left != 0 {
			return
		}
		h.dies = nil
		in, inChild := strings.CutPrefix(point, "in ")
		switch what {
		case 0:
			if inChild {
				h.seen["the child in "+in]++
				panic(childKilled{})
			}
		case 1, 2:
			h.seen["the agent "+point]++
			panic(killed{point})
		case 3:
			if all := h.living(); len(all) > 0 {
				h.seen["a program "+point]++
				h.end(all[h.random.IntN(len(all))])
			}
		}
	}
}

// living lists the containers' programs by PID.
func (h *history) living() (all []*program) {
	for _, key := range h.keys() {
		all = append(all, h.pick(key)...)
	}
	return all
}

func (h *history) keys() []string {
	var keys []string
	for key := range h.containers {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// survives does something that a kill may end.
func (h *history) survives(do func() error) (err error, alive bool) {
	alive = true
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(killed); !ok {
				panic(r)
			}
			alive = false
		}
	}()
	return do(), true
}

// settle starts agents until one has settled all.
func (h *history) settle() {
	h.t.Helper()
	if h.random.IntN(3) > 0 {
		h.dies = nil
	} else {
		h.deadly() // the successor may die, too
	}
	for range 100 {
		h.open()
		err, alive := h.survives(func() error { return h.k.Settle(h.t.Context()) })
		if alive && err == nil {
			h.dies = nil
			return
		}
		h.dies = nil
	}
	h.t.Fatal("nothing settles")
}

// check looks at all programs, and has what is unfinished finished as the loop would.
func (h *history) check() {
	h.t.Helper()
	h.dies = nil
	used := uint64(0)
	for _, key := range h.keys() {
		if phase := h.phase(key); phase == Restoring {
			var need uint64
			for _, p := range h.pick(key) {
				if h.stateOf(p) == Checkpointed {
					need += p.bytes
				}
			}
			h.seen["restoring after a kill"]++
			if need <= h.free() {
				if err := h.k.Restore(h.t.Context(), key); err != nil && !errors.Is(err, ErrBroken) {
					h.t.Fatalf("restore %s again: %v", key, err)
				}
			} else if err := h.k.Park(h.t.Context(), h.set(key, h.pick(key)...)); err != nil && !errors.Is(err, ErrBroken) {
				h.t.Fatalf("park %s again: %v", key, err)
			}
		}
		programs := h.pick(key)
		switch phase := h.phase(key); phase {
		case "":
			for _, p := range programs {
				h.runs(p)
				used += p.bytes
			}
		case Parked:
			for _, p := range programs {
				if state := h.stateOf(p); state != Checkpointed {
					h.t.Fatalf("process %d of a parked set is in state %d", p.pid, state)
				}
			}
		case Broken:
			h.seen["broken"]++
			if !h.faulty[key] {
				h.t.Fatalf("%s is broken, and the driver has not failed: %+v", key, h.k.Sets())
			}
			for _, p := range programs {
				if state := h.stateOf(p); state == Running {
					h.seen["running beside a broken one"]++
				}
				h.end(p) // the agent ends the container
			}
			if err := h.k.Settle(h.t.Context()); err != nil || h.phase(key) != "" {
				h.t.Fatalf("a broken set that was ended: %v, %s", err, h.phase(key))
			}
		default:
			h.t.Fatalf("%s is still %s", key, phase)
		}
		if len(h.pick(key)) == 0 {
			delete(h.containers, key)
		}
	}
	if h.guaranteed != nil {
		used += h.guaranteed.bytes
		h.runs(h.guaranteed)
	}
	if h.used() != used || used > cardMiB*mib {
		h.t.Fatalf("%d bytes are used, programs that run have %d", h.used(), used)
	}
}

func (h *history) step() {
	h.t.Helper()
	keys := h.keys()
	switch n := h.random.IntN(10); {
	case len(keys) < 3 && h.free() > 100*mib:
		h.key++
		key := fmt.Sprintf("c%d", h.key)
		for range 1 + h.random.IntN(3) {
			if size := (10 + h.random.Uint64N(150)) * mib; size <= h.free() {
				h.containers[key] = append(h.containers[key], h.begin(size, h.random))
			}
		}
		return
	case n == 0 && h.guaranteed != nil:
		h.end(h.guaranteed)
		h.guaranteed = nil
		return
	case n <= 2 && h.guaranteed == nil && h.free() > mib:
		h.guaranteed = h.begin(h.free(), h.random) // fails if the room is not there
		return
	case len(keys) == 0:
		return
	}
	key := keys[h.random.IntN(len(keys))]
	programs := h.pick(key)
	switch h.random.IntN(12) {
	case 0:
		call := []string{"cuCheckpointProcessCheckpoint", "cuCheckpointProcessRestore"}[h.random.IntN(2)]
		if err := h.w.Inject(emulator.Fault{Call: call, Code: emulator.Unknown, Skip: h.random.IntN(2), Count: 1}); err != nil {
			h.t.Fatal(err)
		}
		h.faulty[key] = true
	case 1:
		if err := h.w.SetBusy(programs[0].pid, true); err != nil {
			h.t.Fatal(err)
		}
	}
	if h.random.IntN(3) > 0 {
		h.deadly()
	}
	var err error
	var alive bool
	switch h.phase(key) {
	case "":
		err, alive = h.survives(func() error { return h.k.Park(h.t.Context(), h.set(key, programs...)) })
		if alive && err == nil {
			h.seen["parked"]++
		}
	case Parked:
		err, alive = h.survives(func() error { return h.k.Restore(h.t.Context(), key) })
		if alive && err == nil {
			h.seen["restored"]++
		}
	}
	if errors.Is(err, ErrNoRoom) {
		h.seen["no room"]++
	}
	h.w.Clear()
	for _, p := range programs {
		if h.programs[p.pid] != nil {
			_ = h.w.SetBusy(p.pid, false)
		}
	}
	h.dies = nil
	if !alive {
		h.settle()
	} else if err := h.k.Settle(h.t.Context()); err != nil {
		h.t.Fatal(err)
	}
}

// TestKills: whatever dies at any step of hundreds of parks, every program that lives has what it had, none
// stays locked, and no more is on the card than fits.
func TestKills(t *testing.T) {
	parks := 300
	if *long {
		parks = 5000
	}
	h := &history{world: newWorld(t), random: rand.New(rand.NewPCG(*seed, 7)), containers: map[string][]*program{}, seen: map[string]int{},
		faulty: map[string]bool{}}
	for h.seen["parked"] < parks {
		h.step()
		h.check()
	}
	for _, what := range []string{
		"restored", "no room", "broken", "restoring after a kill", "the agent before lock", "the agent after lock", "the agent in lock",
		"the agent before checkpoint", "the agent after checkpoint", "the agent in checkpoint", "the agent before restore",
		"the agent after restore", "the agent in restore", "the agent before unlock", "the agent after unlock", "the agent in unlock",
		"the child in lock", "the child in checkpoint", "the child in restore", "the child in unlock", "a program in lock",
		"a program in checkpoint", "a program in restore", "a program in unlock",
	} {
		if h.seen[what] == 0 {
			t.Errorf("%s was never seen: %v", what, h.seen)
		}
	}
	t.Log(h.seen)
}
