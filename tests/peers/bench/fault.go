// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"example.com/gpu-agent/tests/fakes"
)

// returning measures how soon a kubelet that has begun anew has a list.
func (b *bench) returning(ctx context.Context) error {
	return all(ctx, usual, func(rs []*running) error {
		listed := map[string]sample{}
		for range b.restarts {
			for _, r := range rs {
				// Nobody restarts a kubelet while plugins are at it still.
				if err := b.driver.quiet(ctx, r.proc); err != nil {
					return err
				}
				took, err := r.comeBack(ctx)
				if err != nil {
					return err
				}
				if n := len(r.plugin.Healthy()); n != gpus*usual {
					return fmt.Errorf("%s: a kubelet that restarted is told of %d healthy devices, want %d", r.name, n, gpus*usual)
				}
				listed[r.name] = append(listed[r.name], took)
			}
		}
		for _, r := range rs {
			b.figure("kubelet_restart_to_list_p50/"+r.name, listed[r.name].quantile(0.5), "ms", only(r.subject == b.agent, mostReturn, "10 ms")...)
			b.figure("kubelet_restart_to_list_max/"+r.name, listed[r.name].quantile(1), "ms")
		}
		return nil
	}, b.agent, b.peer)
}

// comeBack restarts the program's kubelet, and says how long after the return of
// the kubelet's socket it had a list.
func (r *running) comeBack(ctx context.Context) (time.Duration, error) {
	bound, err := r.kubelet.restart()
	if err != nil {
		return 0, err
	}
	r.plugin, err = r.kubelet.await(ctx, r.plugin.Resource, "a list after the kubelet's restart", func(fakes.Endpoint) bool { return true })
	if err != nil {
		return 0, r.proc.explain(err)
	}
	return r.plugin.Listed.Sub(bound), nil
}

// fault is something that happens to a GPU, and what mends it.
type fault struct {
	name         string
	happen, mend func(index int) error
}

// faults lets GPUs break and be mended.
func (b *bench) faults(ctx context.Context) error {
	const doubleBitError = 48
	kinds := []fault{
		{"xid_48", func(i int) error { return b.driver.ask.Xid(i, doubleBitError) }, b.driver.ask.Reset},
		{"lost", b.driver.ask.Lose, b.driver.ask.Restore}, // with Xid 79
	}
	b.machine.hold = b.counts.hold
	defer func() { b.machine.hold = 0 }()
	layouts := []int{0, manyDevices[0]}
	if b.timeless {
		layouts = layouts[1:]
	}
	for _, kind := range kinds {
		for _, perGPU := range layouts {
			for _, s := range []*subject{b.agent, b.peer} {
				err := all(ctx, perGPU, func(rs []*running) error { return b.breaking(ctx, kind, perGPU, rs[0]) }, s)
				if err != nil {
					return fmt.Errorf("%s: %w", kind.name, err)
				}
			}
		}
	}
	return nil
}

// breaking lets some GPUs break, one after the other, in each of several rounds:
// in the first to see them mended, in the last to see the kubelet restart
// meanwhile, and in those between for the time that it takes.
func (b *bench) breaking(ctx context.Context, kind fault, perGPU int, r *running) error {
	ours := r.subject == b.agent
	var broken []string
	for i := range b.broken {
		uuid, err := b.driver.uuid(i)
		if err != nil {
			return err
		}
		broken = append(broken, uuid)
	}
	// split counts devices on broken GPUs and on others.
	split := func(ids []string) (on, off int) {
		for _, id := range ids {
			if slices.Contains(broken, gpuOf(id)) {
				on++
			} else {
				off++
			}
		}
		return on, off
	}
	all := max(perGPU, 1)
	var took sample
	var back float64
	turned, others := len(broken)*all, 0
	for round := range b.rounds {
		// One that has just begun to serve may still be at the events.
		if err := errors.Join(b.driver.quiet(ctx, r.proc), b.driver.armed(ctx, r.proc)); err != nil {
			return err
		}
		for i, uuid := range broken {
			since, err := r.breakOne(ctx, kind, i, uuid)
			if err != nil {
				return err
			}
			took = append(took, since...)
		}
		e, err := r.kubelet.settled(ctx, r.plugin.Resource)
		if err != nil {
			return r.proc.explain(err)
		}
		on, off := split(e.Unhealthy())
		turned, others = min(turned, on), max(others, off)
		if want := len(broken) * all; ours && (on != want || off > 0) {
			return r.proc.explain(fmt.Errorf("%d GPUs broke: %d of their %d devices turned unhealthy, and %d of others", len(broken), on, want, off))
		}
		if round == b.rounds-1 {
			break
		}
		since, err := b.mend(ctx, kind, perGPU, r)
		if err != nil {
			return err
		}
		if round == 0 {
			back = since
		}
	}
	kept, err := r.afterRestart(ctx)
	if err != nil {
		return err
	}
	offered, sound := split(kept)
	if want := (gpus - len(broken)) * all; ours && (offered > 0 || sound != want) {
		return r.proc.explain(fmt.Errorf("after the kubelet's restart %d devices of broken GPUs are healthy and %d of others, want %d", offered, sound, want))
	}
	if err := b.mendAll(kind); err != nil {
		return err
	}
	what := "/whole/"
	if perGPU > 0 {
		what = fmt.Sprintf("/devices=%d/", gpus*perGPU)
	}
	name := func(figure string) string { return kind.name + "_" + figure + what + r.name }
	b.figure(name("to_unhealthy_p50"), took.quantile(0.5), "ms", only(ours, mostTurn, "10 ms")...)
	b.figure(name("to_unhealthy_max"), took.quantile(1), "ms")
	b.figure(name("turned_per_gpu"), float64(turned)/float64(len(broken)), "devices")
	b.figure(name("others_turned"), float64(others), "devices", only(ours, 0, "0")...)
	b.figure(name("mended_to_healthy"), back, "ms")
	b.figure(name("broken_offered_after_restart"), float64(offered), "devices", only(ours, 0, "0")...)
	b.figure(name("sound_offered_after_restart"), float64(sound), "devices")
	b.note("%d times %d of %d GPUs with %d devices each broke; the kubelet's restart was in the last of these times", b.rounds, len(broken), gpus, all)
	return nil
}

// breakOne lets a GPU break, and says how long it took until the kubelet heard
// of a device of it; nothing where all of them were unhealthy already.
func (r *running) breakOne(ctx context.Context, kind fault, index int, uuid string) (sample, error) {
	on := func(ids []string) bool {
		return slices.ContainsFunc(ids, func(id string) bool { return gpuOf(id) == uuid })
	}
	before, err := r.kubelet.await(ctx, r.plugin.Resource, "a list", func(fakes.Endpoint) bool { return true })
	if err != nil {
		return nil, r.proc.explain(err)
	}
	began := time.Now()
	if err := kind.happen(index); err != nil {
		return nil, fmt.Errorf("GPU %d: %w", index, err)
	}
	if !on(before.Healthy()) {
		return nil, nil
	}
	e, err := r.kubelet.await(ctx, r.plugin.Resource, "an unhealthy device of "+uuid, func(e fakes.Endpoint) bool { return on(e.Unhealthy()) })
	if err != nil {
		return nil, r.proc.explain(fmt.Errorf("GPU %d: %w", index, err))
	}
	return sample{e.At.Sub(began)}, nil
}

// afterRestart is what a kubelet that begins anew has on offer: nothing of a
// program that ends on that.
func (r *running) afterRestart(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-r.proc.done:
			cancel(errEnded)
		case <-ctx.Done():
		}
	}()
	_, err := r.comeBack(ctx)
	if err == nil {
		r.plugin, err = r.kubelet.settled(ctx, r.plugin.Resource)
	}
	if context.Cause(ctx) == errEnded {
		return nil, nil
	}
	return r.plugin.Healthy(), r.proc.explain(err)
}

var errEnded = errors.New("the program has ended")

// mend puts the broken GPUs right and says after how many milliseconds all was
// on offer again. The peer is given three times the agent's hold, and then
// started anew, as people do.
func (b *bench) mend(ctx context.Context, kind fault, perGPU int, r *running) (float64, error) {
	began := time.Now()
	if err := b.mendAll(kind); err != nil {
		return 0, err
	}
	limit := patience
	if r.subject == b.peer {
		limit = 3 * b.machine.hold
	}
	waited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	e, err := r.kubelet.await(waited, r.plugin.Resource, "all devices to be healthy", func(e fakes.Endpoint) bool {
		return len(e.Healthy()) == len(r.plugin.Devices)
	})
	if err == nil {
		return ms(e.At.Sub(began)), nil
	}
	if r.subject != b.peer {
		return 0, r.proc.explain(err)
	}
	r.proc.kill()
	fresh, err := r.run(ctx, perGPU)
	if err != nil {
		return 0, err
	}
	*r = *fresh
	return math.Inf(1), nil
}

func (b *bench) mendAll(kind fault) error {
	for i := range b.broken {
		if err := kind.mend(i); err != nil {
			return fmt.Errorf("mend GPU %d: %w", i, err)
		}
	}
	return nil
}
