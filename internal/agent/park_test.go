// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/park"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// parks is a keeper in memory. Its records outlive an agent.
type parks struct {
	mu      sync.Mutex
	sets    map[string]*park.Record
	took    time.Duration // for a park or a restore
	fails   map[string]error
	done    []string
	counted []string
}

func (k *parks) note(format string, args ...any) {
	k.done = append(k.done, fmt.Sprintf(format, args...))
}

// step does what a step does: it takes a while, and fails if it is to.
func (k *parks) step(ctx context.Context, what, key string, phase park.Phase) error {
	select {
	case <-time.After(k.took):
	case <-ctx.Done():
		return ctx.Err()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	err := k.fails[what]
	k.note("%s", what)
	switch {
	case errors.Is(err, park.ErrBroken):
		k.sets[key] = &park.Record{Key: key, Phase: park.Broken}
	case err != nil:
	case phase == "":
		delete(k.sets, key)
	default:
		k.sets[key] = &park.Record{Key: key, Phase: phase, Bytes: 5, Parked: time.Now()}
	}
	return err
}

func (k *parks) Park(ctx context.Context, s park.Set) error {
	return k.step(ctx, "park", s.Key, park.Parked)
}
func (k *parks) Restore(ctx context.Context, key string) error {
	return k.step(ctx, "restore", key, "")
}
func (k *parks) Settle(context.Context) error { return nil }

func (k *parks) Sets() (out []park.Record) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.sets {
		out = append(out, *r)
	}
	return out
}

func (k *parks) Find(_ context.Context, key string, c *node.Container, gpus []gpu.UUID) (park.Set, error) {
	if c.ID != "batchc" || !slices.Equal(gpus, []gpu.UUID{uuid(0)}) {
		return park.Set{}, fmt.Errorf("%s on %v", c.ID, gpus)
	}
	return park.Set{Key: key, Bytes: 5, Processes: []park.Process{{PID: 7, Start: 7}}}, k.fails["find"]
}

func (k *parks) Parked(outcome string, _ uint64, _ time.Duration) { k.count("park " + outcome) }
func (k *parks) Restored(outcome string, _, _ time.Duration)      { k.count("restore " + outcome) }
func (k *parks) ParkedNow(int, uint64)                            {}
func (k *parks) count(what string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.counted = append(k.counted, what)
}

func (k *parks) list() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.done)
}

// parking starts an agent that parks.
func parking(t *testing.T) (*bench, *yields, *parks) {
	k := &parks{sets: map[string]*park.Record{}, fails: map[string]error{}, took: 500 * time.Millisecond}
	b, y := tiers(t, testGrace, true, k)
	return b, y, k
}

var batch = cdi.Key(spotResource, unitsOn(0, 2, 3))

func (b *bench) held() bool {
	b.caps.mu.Lock()
	defer b.caps.mu.Unlock()
	return b.caps.control[batch]&lib.ControlHold != 0
}

// holder is what the status says of a pod.
func (b *bench) holder(pod string) status.Holder {
	for _, g := range b.Status().GPUs {
		for _, h := range g.Holders {
			if h.Pod == pod {
				return h
			}
		}
	}
	return status.Holder{}
}

func (b *bench) phaseOf(id string) ledger.Phase {
	a, _ := b.ledger.Get(id)
	return a.Phase
}

// A container that can be parked makes room within a moment, and nothing of it ends. It is back when the room was free
// for a while, and not before.
func TestSpotIsParked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, y, k := parking(t)
		defer b.end()
		started := b.guaranteed("api", unitsOn(0, 1, 2)...)
		time.Sleep(3 * time.Second)
		if at := started(); at < 0 || at > 2500*time.Millisecond {
			t.Errorf("the guaranteed container starts after %v, and the copy takes %v", at, k.took)
		}
		equal(t, "ended or evicted", y.list(), nil)
		equal(t, "counted", y.counts(), []string{"parked 1s"})
		if b.phaseOf(batch) != ledger.Parked || !b.held() {
			t.Errorf("%s, newcomers held: %v", b.phaseOf(batch), b.held())
		}
		if e := b.eventsOf(" Yielded: "); len(e) != 1 || !strings.Contains(e[0], "is parked") {
			t.Errorf("told %q", e)
		}
		time.Sleep(time.Minute)
		if h := b.holder("batch"); h.Parks == nil || h.Parks.Times != 1 || h.Parks.Since == nil || h.Parks.Seconds < 60 || h.Yield == nil || !h.Yield.Out {
			t.Errorf("the status says %+v, yield %+v", h.Parks, h.Yield)
		}
		b.remove("api")
		time.Sleep(restoreAfter - 2*time.Second)
		equal(t, "before the room was free for a while", k.list(), []string{"park"})
		b.guaranteed("next", unitsOn(0, 3)...)
		time.Sleep(time.Minute)
		equal(t, "while the next one has it", k.list(), []string{"park"})
		b.remove("next")
		time.Sleep(restoreAfter + 4*time.Second)
		equal(t, "in the end", k.list(), []string{"park", "restore"})
		equal(t, "counted", k.counted, []string{"park parked", "restore restored"})
		if b.phaseOf(batch) != ledger.Open || b.held() {
			t.Errorf("%s, newcomers held: %v", b.phaseOf(batch), b.held())
		}
		equal(t, "ended or evicted in the end", y.list(), nil)
		if h := b.holder("batch"); h.Parks == nil || h.Parks.Times != 1 || h.Parks.Since != nil || h.Parks.Seconds < 120 || h.Yield != nil {
			t.Errorf("the status says %+v, yield %+v", h.Parks, h.Yield)
		}
	})
}

// What cannot be parked has what is left of its grace.
func TestSpotCannotBeParked(t *testing.T) {
	for _, what := range []string{"find", "park"} {
		synctest.Test(t, func(t *testing.T) {
			b, y, k := parking(t)
			defer b.end()
			k.fails[what] = errors.New("no")
			started := b.guaranteed("api", unitsOn(0, 2)...)
			time.Sleep(10 * time.Second)
			if done := y.list(); len(done) != 1 || !strings.HasPrefix(done[0], "evict") || b.held() {
				t.Errorf("%s fails: %q, newcomers held: %v", what, done, b.held())
			}
			time.Sleep(12 * time.Second)
			if done := y.list(); len(done) != 2 || done[1] != "end batchc 20s" || started() < 0 {
				t.Errorf("%s fails: %q", what, done)
			}
			equal(t, "counted", k.counted, []string{"park refused"})
		})
	}
}

// A container that its checkpoint or its restore may have broken is ended at once, also if its room is free.
func TestBrokenByAPark(t *testing.T) {
	for _, what := range []string{"park", "restore"} {
		synctest.Test(t, func(t *testing.T) {
			b, y, k := parking(t)
			defer b.end()
			k.fails[what] = fmt.Errorf("no: %w", park.ErrBroken)
			b.guaranteed("api", unitsOn(0, 2)...)
			time.Sleep(4 * time.Second)
			if what == "restore" {
				time.Sleep(time.Minute) // so long nothing that was given is thought to have ended
				b.remove("api")
				time.Sleep(restoreAfter + 4*time.Second)
			}
			if done := y.list(); len(done) == 0 || !strings.HasPrefix(done[0], "end batchc") {
				t.Errorf("%s breaks it: %q", what, done)
			}
			if what == "restore" && b.phaseOf(batch) == ledger.Parked {
				t.Error("what has ended is still parked")
			}
		})
	}
}

// An agent that starts anew finds what is parked, and restores it when the room is free; what it finds between two steps
// of a restore it completes, or parks again if the room is wanted.
func TestRestartWhileParked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, y, k := parking(t)
		b.guaranteed("api", unitsOn(0, 2)...)
		time.Sleep(3 * time.Second)
		b.end()
		k.mu.Lock()
		k.sets[batch].Phase = park.Restoring // as if it had been killed there
		k.mu.Unlock()
		b = start(t, b.outside, b.dir, twoTiers)
		defer func() { b.end() }()
		time.Sleep(4 * time.Second)
		equal(t, "with the room wanted", k.list(), []string{"park", "park"})
		if b.phaseOf(batch) != ledger.Parked {
			t.Errorf("%s", b.phaseOf(batch))
		}
		time.Sleep(time.Minute)
		b.remove("api")
		time.Sleep(restoreAfter + 4*time.Second)
		equal(t, "with the room free", k.list(), []string{"park", "park", "restore"})
		equal(t, "ended", y.list(), nil)
		// Of a container that has ended while it was parked nothing is left, and a hold that stands is cleared.
		b.guaranteed("next", unitsOn(0, 3)...)
		time.Sleep(3 * time.Second)
		b.exit("batchc")
		k.mu.Lock()
		clear(k.sets)
		k.mu.Unlock()
		time.Sleep(3 * time.Second)
		if b.phaseOf(batch) == ledger.Parked || b.held() {
			t.Errorf("%s, newcomers held: %v", b.phaseOf(batch), b.held())
		}
	})
}
