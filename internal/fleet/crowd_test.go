// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/placer"
)

var (
	long  = flag.Bool("long", false, "all crowds, and several seeds of each")
	seeds = flag.Int("seeds", 5, "with -long, so many seeds of each crowd")
)

// ask is what a pod asks for: n devices of a resource.
type ask struct {
	of string
	n  int
}

func units(n int) ask             { return ask{memory, n} }
func instance(profile string) ask { return ask{"example.com/mig-" + profile, 1} }

var (
	profiles = []ask{instance("1g.10gb"), instance("2g.20gb"), instance("3g.40gb")}
	amounts  = []ask{units(10), units(20), units(40)}
)

// gpus are how many a node has with memory units, and with MIG on demand.
type gpus struct{ units, mig int }

var (
	one  = []gpus{{0, 3}}
	mig1 = []gpus{{0, 1}, {0, 1}, {0, 1}}
	mig3 = []gpus{{0, 3}, {0, 3}, {0, 3}}
	mem1 = []gpus{{1, 0}, {1, 0}, {1, 0}}
	mem3 = []gpus{{3, 0}, {3, 0}, {3, 0}}
	four = []gpus{{1, 1}, {0, 1}, {0, 2}, {1, 1}}
	both = []gpus{{4, 4}, {4, 4}, {4, 4}}
	many = slices.Repeat(both[:1], 1000)
)

// scene is a crowd: many pods for few GPUs. Each gets to run, if not at once. Those with short come without -long, too.
type scene struct {
	name  string
	short bool
	nodes []gpus
	come  []func(w *world)
}

var crowds = []scene{
	{"22 MIG, 1 node of 3", false, one, all(burst(profiles...))},
	{"22 MIG, 3 nodes of 1", false, mig1, all(burst(profiles...))},
	{"22 MIG, 3 nodes of 3", false, mig3, all(burst(profiles...))},
	{"22 memory, 3 nodes of 1", true, mem1, all(burst(amounts...))},
	{"22 memory, 3 nodes of 3", false, mem3, all(burst(amounts...))},
	{"22 alike, 3 nodes of 3", false, mem3, all(burst(units(20)))},
	{"200 MIG, 14 at a time, 1 node of 3", false, one, all(stream(anyProfile))},
	{"200, 14 at a time, 4 nodes", false, four, all(stream(anything))},
	{"200, 30 at once, 4 nodes", false, four, all(waves(30, 200, 12*time.Second))},
	{"200, 30 at once, 3 nodes of 4+4", false, both, all(waves(30, 200, 12*time.Second))},
	{"1000 for 1000 nodes", false, many, all(waves(1000, 1000, time.Hour))},
	{"500 for 50 of 1000 nodes", false, many, all(fill(50), waves(500, 500, time.Hour))},

	{"22 Jobs MIG, 1 node of 3", false, one, all(jobs(22, profiles...))},
	{"22 Jobs MIG, 3 nodes of 1", false, mig1, all(jobs(22, profiles...))},
	{"22 Jobs MIG, 3 nodes of 3", true, mig3, all(jobs(22, profiles...))},
	{"22 Jobs memory, 3 nodes of 1", false, mem1, all(jobs(22, amounts...))},
	{"22 Jobs memory, 3 nodes of 3", false, mem3, all(jobs(22, amounts...))},

	{"22 Jobs, 22 MIG, 3 nodes of 1", false, mig1, all(jobs(22, profiles...), burst(profiles...))},
	{"22 Jobs, 22 MIG, 3 nodes of 3", false, mig3, all(jobs(22, profiles...), burst(profiles...))},
	{"22 Jobs, 22 memory, 3 nodes of 1", false, mem1, all(jobs(22, amounts...), burst(amounts...))},
	{"22 memory, quota, 3 nodes of 1", false, mem1, all(quota(2, units(30)), burst(amounts...))},
	{"22 MIG, quota, 3 nodes of 1", false, mig1, all(quota(2, instance("2g.20gb")), burst(profiles...))},
	{"10 Jobs, 22 memory, quota, 3 nodes of 1", true, mem1,
		all(quota(2, units(30)), jobs(10, amounts...), burst(amounts...))},
	{"10 Jobs, 22 MIG, quota, 3 nodes of 1", false, mig1,
		all(quota(2, profiles[1]), jobs(10, profiles...), burst(profiles...))},
	{"22 Jobs, 22 MIG, quota, 3 nodes of 3", false, mig3,
		all(quota(4, profiles[2]), jobs(22, profiles...), burst(profiles...))},
	{"22 Jobs, 200, quota, 4 nodes", false, four,
		all(quota(2, units(30)), jobs(22, units(40), profiles[2], profiles[0]), stream(anything))},
}

func all(come ...func(w *world)) []func(w *world) { return come }

func anything(r *rand.Rand) ask {
	if r.IntN(2) == 0 {
		return units(4 + r.IntN(29))
	}
	return instance([]string{"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb"}[r.IntN(4)])
}

func anyProfile(r *rand.Rand) ask {
	of := []string{"1g.10gb", "1g.10gb", "1g.10gb", "2g.20gb", "2g.20gb", "3g.40gb", "3g.40gb", "7g.80gb"}
	return instance(of[r.IntN(len(of))])
}

// fill leaves little room on all but some nodes.
func fill(except int) func(w *world) {
	return func(w *world) {
		for _, name := range w.names[except:] {
			for range 4 {
				w.hosts[name].Admit("another", memory, 77)
				w.hosts[name].Admit("another", instance("7g.80gb").of, 1)
			}
			w.write(w.hosts[name], w.hosts[name].Write())
		}
	}
}

// burst is 22 pods, 15 ms apart.
func burst(asks ...ask) func(w *world) {
	return func(w *world) {
		for i := range 22 {
			w.after(time.Duration(i)*15*time.Millisecond, w.comes(w.pod(asks[i%len(asks)], time.Second)))
		}
	}
}

// waves are n pods, so many every 15 s, that run for at least 4 s and less than 4 s and so long.
func waves(each, n int, runs time.Duration) func(w *world) {
	return func(w *world) {
		for i := range n {
			p := w.pod(anything(w.r), 4*time.Second+time.Duration(w.r.Int64N(int64(runs))))
			w.after(time.Duration(i/each)*15*time.Second+time.Duration(i%each)*5*time.Millisecond, w.comes(p))
		}
	}
}

// stream is 200 pods, one every 0 to 600 ms, and at most 14 at a time.
func stream(draw func(*rand.Rand) ask) func(w *world) {
	return func(w *world) {
		alive, r := 0, rand.New(rand.NewPCG(w.r.Uint64(), 0))
		var pods []*crowdPod
		for range 200 {
			p := w.pod(draw(r), time.Duration(2+r.IntN(9))*time.Second)
			p.then = func() { alive-- }
			pods = append(pods, p)
		}
		var step func()
		step = func() {
			if alive < 14 {
				w.comes(pods[0])()
				alive, pods = alive+1, pods[1:]
			}
			if len(pods) > 0 {
				w.after(time.Duration(r.IntN(600))*time.Millisecond, step)
			}
		}
		w.after(time.Second, step)
	}
}

// jobs are n workloads of one pod. Each has room held first, as by Kueue's door, and then its pod comes.
func jobs(n int, asks ...ask) func(w *world) {
	return func(w *world) {
		var pods []*crowdPod
		for i := range n {
			p := w.pod(asks[i%len(asks)], time.Second)
			p.Labels = map[string]string{"hold": "kueue/" + p.Name}
			p.then = func() { w.holder.Drop("kueue/" + p.Name) }
			pods = append(pods, p)
		}
		w.after(time.Second, func() { w.hold(pods) })
	}
}

// hold looks for room for pods that have none yet, or any more, and again until they are on their nodes.
func (w *world) hold(pods []*crowdPod) {
	pods = slices.DeleteFunc(pods, func(p *crowdPod) bool { return p.Spec.NodeName != "" })
	for _, p := range pods {
		id := p.Labels["hold"]
		if gone := w.holder.Lost(id) != nil; gone {
			w.n[lost]++
		} else if p.seat != "" {
			continue
		}
		at, no := w.holder.Hold(id, id, []placer.Group{{Containers: w.f.read(p.Pod).Containers, N: 1, Among: w.names}})
		if no != nil {
			w.n[unheld]++
			continue
		}
		if p.seat == "" {
			w.after(500*time.Millisecond+time.Duration(p.r.Int64N(int64(time.Second))), w.comes(p))
		}
		p.seat = at[0][0]
		w.seats = append(slices.DeleteFunc(w.seats, func(o *crowdPod) bool { return o == p }), p)
	}
	if len(pods) > 0 {
		w.after(500*time.Millisecond, func() { w.hold(pods) })
	}
}

// quota keeps room for pods of another cluster, of which 24 come, as many at a time as it is for.
func quota(abreast int, a ask) func(w *world) {
	return func(w *world) {
		w.lender.Keep(lent, map[string]int{a.of: abreast * a.n})
		var pods []*crowdPod
		next := func() {
			if len(pods) > 0 {
				w.comes(pods[0])()
				pods = pods[1:]
			}
		}
		for range 24 {
			p := w.pod(a, time.Second)
			p.Labels, p.then = map[string]string{"quota": lent}, next
			pods = append(pods, p)
		}
		for range abreast {
			w.after(time.Second+time.Duration(w.r.Int64N(int64(time.Second))), next)
		}
	}
}

// TestCrowds has crowds of pods come. Each pod gets to run, no agent refuses one, room that is held is there, and the
// same seed gives the same result. Without -long the scheduler does not pop pods from its back-off queue.
func TestCrowds(t *testing.T) {
	table := fmt.Sprintf("means of each run\n%-40s|pops |%s|last of each seed", "", strings.Join(columns[:], "|"))
	for _, c := range crowds {
		if !c.short && !*long {
			continue
		}
		n, modes := 1, []bool{false}
		if *long {
			n, modes = *seeds, []bool{true, false}
		}
		for _, pops := range modes {
			t.Run(fmt.Sprint(c.name, ", pops ", pops), func(t *testing.T) {
				var sum outcome
				each := ""
				for seed := range uint64(n) {
					o := c.run(t, seed, pops)
					if again := c.run(t, seed, pops); seed == 0 && again != o {
						t.Errorf("%v gives %v, and then %v", columns, o, again)
					}
					for i := range sum {
						sum[i] += o[i]
					}
					each += fmt.Sprintf(" %.1f", o[last])
				}
				table += fmt.Sprintf("\n%-40s|%-5v", c.name, pops)
				for i := range sum {
					table += fmt.Sprintf("|%*.1f", len(columns[i]), sum[i]/float64(n))
				}
				table += "|" + each
			})
		}
	}
	t.Log(table)
}
