// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Targets, see the issue that asks for them.
const (
	mostPlan     = 20.0 // µs, for one GPU
	mostRequests = 2.0  // ms, for requests on a node
)

const (
	planGPUs = 8
	requests = 16
)

// migPlans times the planner, on what the agent reads from the driver.
func (b *bench) migPlans(ctx context.Context) (err error) {
	sets, err := newMIGCard(migModel)
	if err != nil {
		return err
	}
	w, err := b.startMIGWorld(0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	said, err := exec.CommandContext(ctx, b.kit.Bin("gpu-agent"), "inventory", "-o", "json", "--driver-root", w.root).Output()
	if err != nil {
		return fmt.Errorf("read the inventory: %w", err)
	}
	var inv gpu.Inventory
	if err := json.Unmarshal(said, &inv); err != nil {
		return fmt.Errorf("read the inventory: %w", err)
	}
	card, err := mig.NewCard(&inv.GPUs[ourGPU].MIG)
	if err != nil {
		return fmt.Errorf("read the card: %w", err)
	}
	random := rand.New(rand.NewPCG(6, 0))
	placement := func(p migPlace) (mig.Placement, error) {
		name, err := mig.Parse(p.profile.Name)
		if err != nil {
			return mig.Placement{}, err
		}
		s, ok := card.Placement(name, int(p.start), 0)
		if !ok {
			return s, fmt.Errorf("the driver does not tell of %v", p)
		}
		return s, nil
	}
	draw := func() (standing []mig.Standing, err error) {
		for _, p := range sets.maximal[random.IntN(len(sets.maximal))] {
			s, err := placement(p)
			if err != nil {
				return nil, err
			}
			standing = append(standing, mig.Standing{Placement: s, Pinned: random.Float64() < shareBusy})
		}
		return standing, nil
	}

	// Of the processor too: what else a machine does shows in the other.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var one, busy sample
	for range b.plans {
		standing, err := draw()
		if err != nil {
			return err
		}
		target, err := draw()
		if err != nil {
			return err
		}
		n := map[mig.Name]int{}
		for _, s := range target {
			n[s.Profile]++
		}
		var want []mig.Count
		for name, count := range n {
			want = append(want, mig.Count{Profile: name, N: count})
		}
		began, at := time.Now(), threadTime()
		_, err = card.Plan(standing, want)
		one, busy = append(one, time.Since(began)), append(busy, threadTime()-at)
		if err != nil {
			return fmt.Errorf("plan from %v to %v: %w", standing, want, err)
		}
	}
	b.figure("mig_plan_p50/gpus=1", 1000*one.quantile(0.5), "us", target{mostPlan, "20 us"})
	b.figure("mig_plan_p99/gpus=1", 1000*one.quantile(0.99), "us")
	b.figure("mig_plan_cpu_p99/gpus=1", 1000*busy.quantile(0.99), "us")
	b.figure("mig_plan_cpu_max/gpus=1", 1000*busy.quantile(1), "us")

	many, busy, granted, err := b.migRequests(card, draw, random)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("/gpus=%d/requests=%d", planGPUs, requests)
	b.figure("mig_requests_p50"+what, many.quantile(0.5), "ms", target{mostRequests, "2 ms"})
	b.figure("mig_requests_p99"+what, many.quantile(0.99), "ms")
	b.figure("mig_requests_cpu_p99"+what, busy.quantile(0.99), "ms")
	b.figure("mig_requests_cpu_max"+what, busy.quantile(1), "ms")
	b.figure("mig_requests_granted"+what, granted, "of all")
	return nil
}

// migRequests times requests for instances on demand, one after the other on a
// node of several cards: which place is preferred of all that are free, and what
// has to be done for it. What is idle stands, and may go.
func (b *bench) migRequests(card *mig.Card, draw func() ([]mig.Standing, error), random *rand.Rand) (took, busy sample, granted float64, err error) {
	profiles := map[mig.Name][]mig.Placement{}
	var names []mig.Name
	for _, s := range card.Placements() {
		if profiles[s.Profile] == nil {
			names = append(names, s.Profile)
		}
		profiles[s.Profile] = append(profiles[s.Profile], s)
	}
	rounds := max(b.plans/20, 10)
	for range rounds {
		standing := make([][]mig.Standing, planGPUs)
		offers := make([]mig.Offer, planGPUs)
		for i := range offers {
			if standing[i], err = draw(); err != nil {
				return nil, nil, 0, err
			}
			offers[i] = mig.Offer{GPU: gpu.UUID(fmt.Sprintf("GPU-%d", i)), Card: card, Rank: i}
			for _, s := range standing[i] {
				if s.Pinned {
					offers[i].Pinned = append(offers[i].Pinned, s.Placement)
				} else {
					offers[i].Warm = append(offers[i].Warm, s.Placement)
				}
			}
		}
		var spent, cpu time.Duration
		for range requests {
			// The kubelet names what is on offer.
			wanted := profiles[names[random.IntN(len(names))]]
			var available []mig.Place
			for i := range offers {
				for _, s := range wanted {
					if card.Fits(offers[i].Pinned, s) {
						available = append(available, mig.Place{GPU: offers[i].GPU, Placement: s})
					}
				}
			}
			if len(available) == 0 {
				continue
			}
			began, since := time.Now(), threadTime()
			chosen, err := mig.Prefer(offers, available, nil, 1)
			if err != nil {
				return nil, nil, 0, fmt.Errorf("prefer: %w", err)
			}
			at := slices.IndexFunc(offers, func(o mig.Offer) bool { return o.GPU == chosen[0].GPU })
			plan, err := card.Make(standing[at], chosen[0].Placement)
			spent, cpu = spent+time.Since(began), cpu+threadTime()-since
			if err != nil || len(plan.Blocked) > 0 {
				return nil, nil, 0, fmt.Errorf("make %v beside %v: %w (blocked by %v)", chosen[0].Placement, standing[at], err, plan.Blocked)
			}
			granted++
			o := &offers[at]
			o.Pinned = append(o.Pinned, chosen[0].Placement)
			o.Warm = nil
			var after []mig.Standing
			for _, s := range plan.Result {
				pinned := slices.Contains(o.Pinned, s)
				after = append(after, mig.Standing{Placement: s, Pinned: pinned})
				if !pinned {
					o.Warm = append(o.Warm, s)
				}
			}
			standing[at] = after
		}
		took, busy = append(took, spent), append(busy, cpu)
	}
	return took, busy, granted / float64(rounds*requests), nil
}

// threadTime is the processor time of the calling thread.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0 // which no kernel answers for this clock
	}
	return time.Duration(t.Nano())
}
