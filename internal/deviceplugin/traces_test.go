// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	traceGPUs, traceUnits = 8, 79
	traceSpan             = 24 * time.Hour
	// traceStep is how far the clock goes at once, and how long a spot pod that is asked for its room keeps it.
	traceStep = 20 * time.Second
	// backlog is how many spot pods wait or run at any time: more than there is room for.
	backlog = 100
)

// tracePod is a guaranteed pod of a trace. It comes at a time, asks for n units, and has them for hold.
type tracePod struct {
	n        int
	at, hold time.Duration
}

// traces are days of a node: what its guaranteed pods ask for.
func traces() map[string][]tracePod {
	rng := rand.New(rand.NewPCG(44, 1))
	between := func(from, to float64) time.Duration {
		return time.Duration((from + rng.Float64()*(to-from)) * float64(time.Hour))
	}
	out := map[string][]tracePod{}
	for range 40 { // from noon to noon; jobs are sent from six in the evening to two at night
		out["a night of batch"] = append(out["a night of batch"], tracePod{[]int{20, 39, 79}[rng.IntN(3)], between(6, 14), between(1, 5)})
	}
	for range 20 { // from midnight to midnight
		begin := between(8, 10.5)
		out["notebooks by day"] = append(out["notebooks by day"], tracePod{[]int{20, 39}[rng.IntN(2)], begin, between(17, 19) - begin})
	}
	// Replicas by the hour: three at four in the morning, fourteen twelve hours later.
	var since [15]time.Duration
	for at := time.Duration(0); at <= traceSpan; at += 5 * time.Minute {
		want := int(math.Round(3 + 11*(0.5-0.5*math.Cos(2*math.Pi*(at.Hours()-4)/24))))
		if at == traceSpan {
			want = 0
		}
		for i := range since {
			switch {
			case i < want && since[i] == 0:
				since[i] = at + 1
			case i >= want && since[i] > 0:
				out["inference with a daily curve"] = append(out["inference with a daily curve"], tracePod{39, since[i] - 1, at - since[i] + 1})
				since[i] = 0
			}
		}
	}
	for _, pods := range out {
		slices.SortStableFunc(pods, func(a, b tracePod) int { return int(a.at - b.at) })
	}
	return out
}

// traced is what became of a trace.
type traced struct {
	// given is when each guaranteed pod was given its units, and started when it could start in them.
	given, started []time.Duration
	// guaranteed and spot are the GiB-hours that pods had, from their start on, until they ended or were asked to
	// give their room back.
	guaranteed, spot float64
	// refused has the guaranteed pods that the node refused once or more, and refusedSpot counts how often it refused
	// spot pods. yields counts the spot pods that gave their room back.
	refused             map[int]bool
	refusedSpot, yields int
}

// onTrace is a pod that has units.
type onTrace struct {
	a     ledger.Allocation
	ids   []string
	n     int
	since time.Duration
	until time.Duration // when its work is done
	out   time.Duration // when a spot pod that is asked for its room has ended; zero if it is not asked
}

// traceNode plays the scheduler and the kubelet before the front-end of a node.
type traceNode struct {
	d     *desk
	inUse map[string]map[string]bool // by resource
}

// take gives n units to a pod. waits is true if the scheduler does not count so many.
func (t *traceNode) take(resource string, n int) (a ledger.Allocation, ids []string, waits bool, err error) {
	var free []string
	devices, _ := t.d.List(resource)
	for i := range devices {
		if devices[i].Healthy && !t.inUse[resource][devices[i].ID] {
			free = append(free, devices[i].ID)
		}
	}
	if len(free) < n {
		return a, nil, true, nil
	}
	if ids, err = t.d.Prefer(resource, free, nil, n); err != nil {
		return a, nil, false, err
	}
	if a, err = t.d.Allocate(resource, ids); err == nil {
		for _, id := range ids {
			t.inUse[resource][id] = true
		}
	}
	return a, ids, false, err
}

func (t *traceNode) put(resource string, p *onTrace) {
	for _, id := range p.ids {
		delete(t.inUse[resource], id)
	}
	t.d.FrontEnd.Release(p.a.ID)
}

// replayTrace lets a trace happen on a node, with or without the spot tier.
func replayTrace(t *testing.T, pods []tracePod, withSpot bool) traced {
	t.Helper()
	d, clock := newDesk()
	inv := machine(traceGPUs)
	var wanted []config.Want
	for i := range inv.GPUs {
		inv.GPUs[i].Memory, inv.GPUs[i].Reserved = traceUnits*1024, 0
		wanted = append(wanted, config.Want{GPU: inv.GPUs[i].UUID, Mode: config.Shared, API: ledger.DevicePlugin, Spot: ledger.Offering{On: withSpot}})
	}
	d.Publish(func(held []ledger.Allocation) *Offer {
		changes := plan.Make(plan.Input{Inventory: inv, Wanted: wanted, Layouts: map[gpu.UUID]plan.Layout{}, Unit: 1024, Allocations: held})
		return Build(Input{Inventory: inv, Changes: &changes, Held: held, Names: names})
	})
	node := &traceNode{d, map[string]map[string]bool{memName: {}, spotName: {}}}
	out := traced{given: make([]time.Duration, len(pods)), started: make([]time.Duration, len(pods)), refused: map[int]bool{}}
	count := func(sum *float64, n int, from, to time.Duration) {
		*sum += float64(n) * max(0, (min(to, traceSpan)-from).Hours())
	}
	type work struct {
		n    int
		left time.Duration
	}
	rng := rand.New(rand.NewPCG(44, 2))
	more := func() work {
		return work{[]int{8, 16, 24}[rng.IntN(3)], time.Duration(30+rng.IntN(90)) * time.Minute}
	}
	var queue []work
	for range backlog {
		queue = append(queue, more())
	}
	var guaranteed, spot []*onTrace
	var waiting []int // of pods
	next, moved := 0, true
	for now := time.Duration(0); now <= traceSpan; now += traceStep {
		guaranteed = slices.DeleteFunc(guaranteed, func(p *onTrace) bool {
			over := p.until <= now || now == traceSpan
			if over {
				count(&out.guaranteed, p.n, p.since, min(p.until, now))
				node.put(memName, p)
				moved = true
			}
			return over
		})
		spot = slices.DeleteFunc(spot, func(p *onTrace) bool {
			a, _ := d.Get(p.a.ID)
			switch {
			case p.out > 0 && !a.Yielding(): // the guaranteed pod has gone
				p.until, p.since, p.out = p.until+now-(p.out-traceStep), now, 0
				return false
			case p.out > 0 && p.out <= now:
				out.yields++
				queue = append(queue, work{p.n, p.until - (p.out - traceStep)})
			case p.out == 0 && (p.until <= now || now == traceSpan):
				count(&out.spot, p.n, p.since, min(p.until, now))
				queue = append(queue, more())
			default:
				return false
			}
			node.put(spotName, p)
			moved = true
			return true
		})
		for ; next < len(pods) && pods[next].at <= now; next++ {
			waiting, moved = append(waiting, next), true
		}
		if moved {
			waiting = slices.DeleteFunc(waiting, func(i int) bool {
				p := &pods[i]
				a, ids, waits, err := node.take(memName, p.n)
				if err != nil {
					out.refused[i] = true
				}
				if err != nil || waits {
					return false
				}
				out.given[i], out.started[i] = now, now
				for _, s := range d.Ledger.Allocations() {
					if s.Yielding() && slices.Contains(s.Yield.To, a.ID) {
						out.started[i] = now + traceStep
					}
				}
				guaranteed = append(guaranteed, &onTrace{a: a, ids: ids, n: p.n, since: out.started[i], until: now + p.hold})
				return true
			})
		}
		for _, p := range spot {
			if a, _ := d.Get(p.a.ID); p.out == 0 && a.Yielding() {
				p.out = now + traceStep
				count(&out.spot, p.n, p.since, now)
			}
		}
		if moved && withSpot {
			full := map[int]bool{} // sizes that there is no room for
			queue = slices.DeleteFunc(queue, func(w work) bool {
				if full[w.n] {
					return false
				}
				a, ids, waits, err := node.take(spotName, w.n)
				if err != nil {
					out.refusedSpot++
				}
				if full[w.n] = err != nil || waits; full[w.n] {
					return false
				}
				spot = append(spot, &onTrace{a: a, ids: ids, n: w.n, since: now, until: now + w.left})
				return true
			})
		}
		moved = false
		clock.pass(traceStep)
	}
	if len(waiting) > 0 {
		t.Errorf("%d guaranteed pods still wait", len(waiting))
	}
	return out
}

// Days of a node with the spot tier and without. Each guaranteed pod is given its room at the same moment, and starts at
// most the grace later. Work that can wait gets most of the room that guaranteed pods leave.
func TestTracesWithASpotTier(t *testing.T) {
	const bound = traceGPUs * traceUnits * 24.0
	for name, pods := range traces() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			without, with := replayTrace(t, pods, false), replayTrace(t, pods, true)
			waited := 0
			for i := range pods {
				if with.given[i] != without.given[i] {
					t.Errorf("pod %d, of %d units, that came after %v, is given them after %v, and without spot pods after %v", i, pods[i].n, pods[i].at, with.given[i], without.given[i])
				}
				if late := with.started[i] - without.started[i]; late > traceStep {
					t.Errorf("pod %d starts %v later for the sake of spot pods", i, late)
				} else if late > 0 {
					waited++
				}
			}
			if !maps.Equal(with.refused, without.refused) {
				t.Errorf("guaranteed pods %v are refused, and without spot pods %v", slices.Sorted(maps.Keys(with.refused)), slices.Sorted(maps.Keys(without.refused)))
			}
			all := with.guaranteed + with.spot
			if left := bound - without.guaranteed; all-without.guaranteed < 0.9*left || all > bound || without.spot > 0 || with.yields == 0 {
				t.Errorf("spot pods have got %.0f GiB-hours of %.0f, and given room back %d times", with.spot, left, with.yields)
			}
			t.Logf("%d guaranteed pods: of %.0f GiB-hours, %.0f were had without spot pods (%.0f %%), and %.0f with them (%.0f %%)", len(pods), bound,
				without.guaranteed, 100*without.guaranteed/bound, all, 100*all/bound)
			t.Logf("%d guaranteed pods waited for spot pods, which gave room back %d times; %d guaranteed pods were refused, and spot pods %d times",
				waited, with.yields, len(with.refused), with.refusedSpot)
		})
	}
}
