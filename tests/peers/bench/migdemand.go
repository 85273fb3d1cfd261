// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/peers"
)

// onDemand is partitions with which instances are made for the containers that
// ask for them.
const onDemand = "version: v1\npartitions:\n  default:\n  - {devices: all, mode: mig}\n"

// migStarts times the starts of containers on instances that are made for them:
// Allocate, and the call before the container starts, which returns when the
// instance stands and the container may have it.
func (b *bench) migStarts(ctx context.Context) (err error) {
	w, err := b.startMIGWorld(b.operation)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	k := b.migKubelet
	a := &agentCutter{bench: b, world: w, kubelet: k}
	if err := a.start(onDemand); err != nil {
		return err
	}
	defer a.end()
	card, err := newMIGCard(migModel)
	if err != nil {
		return err
	}
	if err := await(ctx, "placements of all profiles", func() (bool, error) {
		n := 0
		for _, g := range w.State().GPUs {
			set, _ := k.offered(g.UUID)
			n += len(set)
		}
		return n == 2*len(card.places), fmt.Errorf("%d placements on offer, want %d", n, 2*len(card.places))
	}); err != nil {
		return a.proc.explain(err)
	}

	random := rand.New(rand.NewPCG(7, 0))
	var whole, above sample
	var hardware time.Duration
	for range b.started {
		k.endPods(random, 5)
		var e fakes.Endpoint
		var free []string
		if err := await(ctx, "a free placement", func() (bool, error) {
			all := k.endpoints()
			random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			for _, e = range all {
				if free = k.Available(e.Resource); len(free) > 0 {
					return true, nil
				}
			}
			return false, fmt.Errorf("none of %d resources has a free placement", len(all))
		}); err != nil {
			return a.proc.explain(err)
		}
		r := &running{&subject{name: migAgentName, kubelet: k}, a.proc, e}
		ids, err := r.prefer(ctx, free, 1)
		if err != nil {
			return err
		}
		gpu := slices.IndexFunc(w.State().GPUs, func(g emulator.GPUState) bool { return g.UUID == gpuOf(ids[0]) })
		began := w.now()
		answer, err := r.allocate(ctx, ids)
		if err != nil {
			return err
		}
		p, err := k.admit(e.Resource, ids, answer)
		if err != nil {
			return err
		}
		if err := r.prepare(ctx, ids); err != nil {
			return err
		}
		took, ours := w.since(began, gpu)
		k.create(p)
		_, placement, _ := strings.Cut(ids[0], "::")
		if set, _ := w.stands(card, gpu); !slices.ContainsFunc(set, func(p migPlace) bool { return p.String() == placement }) {
			return a.proc.explain(fmt.Errorf("a container may start on %s, and there are %v", ids[0], set))
		}
		whole, above, hardware = append(whole, took), append(above, ours), hardware+w.workOn(gpu, began.serial).hardware
	}
	b.figure("mig_on_demand_start_p50/"+agentName, whole.quantile(0.5), "ms")
	b.figure("mig_on_demand_hardware_mean/"+agentName, ms(hardware)/float64(len(whole)), "ms")
	b.figure("mig_on_demand_above_hardware_p50/"+agentName, above.quantile(0.5), "ms", target{mostOnDemand, "50 ms"})
	b.figure("mig_on_demand_above_hardware_p95/"+agentName, above.quantile(0.95), "ms")
	return nil
}

// endpoints are the plugins that serve something, by resource.
func (k *kubelet) endpoints() (all []fakes.Endpoint) {
	known, _ := k.Endpoints()
	for _, resource := range slices.Sorted(maps.Keys(known)) {
		if e := known[resource]; e.Serves() {
			all = append(all, e)
		}
	}
	return all
}

// endPods ends pods until at most so many are left.
func (k *kubelet) endPods(random *rand.Rand, most int) {
	pods := k.pods()
	random.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	for len(pods) > most {
		k.end(pods[0])
		pods = pods[1:]
	}
}

// migFailures lets one driver call of a change fail, whichever, and looks at what
// is left when the program says that it is done with it.
func (b *bench) migFailures(ctx context.Context) (err error) {
	card, err := newMIGCard(migModel)
	if err != nil {
		return err
	}
	w, err := b.startMIGWorld(0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	for _, p := range []struct {
		cutter
		name string
		gpu  int
	}{
		{&partedCutter{world: w, file: filepath.Join(b.work, "mig-parted.yaml"),
			parted: peers.Parted{Program: b.kit.Bin(peers.MIGParted.Name), Root: w.root}}, peers.MIGParted.Name, theirGPU},
		{&agentCutter{bench: b, world: w, card: card, kubelet: b.migKubelet, uuid: w.State().GPUs[ourGPU].UUID}, agentName, ourGPU},
	} {
		random := rand.New(rand.NewPCG(8, 0))
		left, met := map[string]int{}, 0
		for range b.failures {
			before, counts := card.maximal[random.IntN(len(card.maximal))], card.maximal[random.IntN(len(card.maximal))].counts()
			if before.counts() == counts {
				continue
			}
			// Once without, to know how many calls there are.
			calls, _, err := b.migFailing(ctx, w, p.cutter, p.gpu, before, counts, 0)
			if err != nil {
				return fmt.Errorf("%s: from %v to %s: %w", p.name, before, counts, err)
			}
			k := 1 + random.IntN(calls)
			_, acted, err := b.migFailing(ctx, w, p.cutter, p.gpu, before, counts, k)
			if err != nil {
				return fmt.Errorf("%s: from %v to %s, call %d fails: %w", p.name, before, counts, k, err)
			}
			if !acted {
				continue // there were fewer calls about this GPU
			}
			met++
			after, whole := w.stands(card, p.gpu)
			switch {
			case whole && after.counts() == counts:
				left["new"]++
			case whole && sameSet(after, before):
				left["old"]++
			default:
				left["neither"]++
			}
		}
		b.figure("mig_call_failed/"+p.name, float64(met), "changes")
		for _, state := range []string{"old", "new", "neither"} {
			b.figure("mig_call_failed_left_"+state+"/"+p.name, float64(left[state]), "changes", only(p.gpu == ourGPU && state == "neither", 0, "0")...)
		}
	}
	return nil
}

// migFailing makes a change of which the k-th driver call about the GPU fails, 0 is
// none of them, and says how many calls there were and whether one failed.
func (b *bench) migFailing(ctx context.Context, w *migWorld, c cutter, gpu int, before migSet, counts string, k int) (calls int, acted bool, err error) {
	w.EndProcess(os.Getpid())
	if err := w.lay(gpu, before); err != nil {
		return 0, false, err
	}
	if err := c.begin(ctx, before, nil); err != nil {
		return 0, false, err
	}
	defer c.end()
	if k > 0 {
		defer w.Clear()
		if err := w.Inject(emulator.Fault{Call: "nvml*", GPU: &gpu, Code: emulator.Unknown, Skip: k - 1, Count: 1}); err != nil {
			return 0, false, err
		}
	}
	refused, err := c.change(ctx, counts, nil)
	if err != nil {
		return 0, false, err
	}
	if k == 0 && refused != "" {
		return 0, false, fmt.Errorf("it fails without a fault: %s", oneLine(refused))
	}
	return max(c.calls(), 1), k > 0 && len(w.State().Faults) == 0, nil
}
