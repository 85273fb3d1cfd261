// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/peers"
)

// Targets, see the issue that asks for them.
const (
	mostShare     = 5.0  // ms, p50
	mostShareP95  = 15.0 // ms
	mostInstance  = 50.0 // ms above the hardware's time
	mostEight     = 1.5  // times one
	mostBothIdle  = 10.0 // ms in 30 s
	mostBothSpace = 46.0 // MB
)

// claimAgent names the agent's files.
const claimAgent = "gpu-agent-claims"

// Which GPU of a program's half is for what. The agent has the first four: of more than
// eight GPUs the peer publishes nothing, since its slice of counters has one set of each.
const (
	wholeGPU = iota
	sharedGPU
	warmGPU
	newGPU
)

// peerPause is between two claims of the peer: its client makes five requests a second,
// and ten at once.
const peerPause = 250 * time.Millisecond

// claiming is what the measurements of claims have in common.
type claiming struct {
	*bench
	world                *migWorld
	server               *claimServer
	kubelet              *kubelet
	agent, peer, nothing *claimant
	uuids                []string // by index
}

// claims measures the agent's DRA front-end beside NVIDIA's driver, on one machine, with
// the real API server.
func (b *bench) claims(ctx context.Context) (err error) {
	seconds := b.operation.Seconds()
	w, err := b.startWorld("claim-driver", emulator.Spec{Model: gpuModel, Count: gpus, Seed: "claims",
		MIG: emulator.MIGSpec{CreateSeconds: seconds, DestroySeconds: seconds, ModeSeconds: seconds}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	k, err := startKubelet(filepath.Join(b.work, "kubelet-6"))
	if err != nil {
		return err
	}
	defer k.stop()
	return stage(ctx, b.work, func(t *scene) error {
		s, err := b.startClaimServer(t)
		if err != nil {
			return err
		}
		c := &claiming{bench: b, world: &migWorld{w}, server: s, kubelet: k}
		for _, g := range w.State().GPUs {
			c.uuids = append(c.uuids, g.UUID)
		}
		c.agent, c.peer = c.newAgent(), c.newPeer()
		t.Cleanup(c.agent.stop)
		t.Cleanup(c.peer.stop)
		if c.nothing, err = b.startEmptyClaims(ctx, s.root); err != nil {
			return err
		}
		t.Cleanup(c.nothing.stop)
		for _, do := range []func(context.Context) error{c.starts, c.eight, c.devices, c.instances, c.both} {
			if err := do(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// newAgent is the agent as its manifests run it, with their rights.
func (c *claiming) newAgent() *claimant {
	return &claimant{name: agentName, driver: "gpus." + lab.Domain, registry: filepath.Join(c.kubelet.dir, "plugins_registry"), gpus: []int{0, 1, 2, 3},
		begin: func() (*process, error) {
			m := c.machine
			m.driver = &driver{root: c.world.root}
			return m.startAgent(claimAgent, ":9505", c.kubelet, 1024, "--configmap", agentPod.Namespace+"/"+agentConfig, "--node-name", nodeName, "--kubeconfig", c.server.agent)
		}}
}

// newPeer is NVIDIA's DRA driver with the settings of its own manifests, and MIG on demand.
func (c *claiming) newPeer() *claimant {
	dir := filepath.Join(c.work, peers.DRADriver.Name)
	registry, plugins := filepath.Join(dir, "registry"), filepath.Join(dir, "plugins")
	return &claimant{name: peers.DRADriver.Name, driver: "gpu.nvidia.com", registry: registry, gpus: []int{4, 5, 6, 7},
		begin: func() (*process, error) {
			if err := errors.Join(os.RemoveAll(plugins), os.MkdirAll(plugins, 0o755)); err != nil {
				return nil, err
			}
			return start(c.work, peers.DRADriver.Name, c.kit.Bin(peers.DRADriver.Name), "--node-name", nodeName, "--kubeconfig", c.server.root,
				"--image-name", "none", "--feature-gates", "DynamicMIG=true", "--cdi-root", filepath.Join(dir, "cdi"), "--nvidia-cdi-hook-path", c.kit.Bin("nvidia-cdi-hook"),
				"--nvidia-driver-root", c.world.root, "--container-driver-root", c.world.root,
				"--kubelet-registrar-directory-path", registry, "--kubelet-plugins-directory-path", plugins)
		}}
}

// allClaims has the agent offer every GPU as anything, as the peer does, and halfClaims the
// first four.
const (
	allClaims  = "version: v1\npartitions:\n  default:\n  - {devices: all, mode: dynamic, api: dra}\n"
	halfClaims = "version: v1\npartitions:\n  default:\n  - {devices: [0, 1, 2, 3], mode: dynamic, api: dra}\n  - {devices: [4, 5, 6, 7], mode: \"off\"}\n"
	bothAPIs   = "version: v1\npartitions:\n  default:\n  - {devices: [0, 1], mode: shared}\n  - {devices: [2, 3], mode: dynamic, api: dra}\n  - {devices: [4, 5, 6, 7], mode: \"off\"}\n"
)

// restart starts the agent anew on GPUs without MIG.
func (c *claiming) restart(ctx context.Context, partitions string) error {
	c.agent.stop()
	if err := errors.Join(c.kubelet.forget(), c.clear(), c.server.setPartitions(partitions), c.server.forgetSlices(c.agent.driver), c.agent.start(ctx)); err != nil {
		return err
	}
	return c.agent.listed(ctx, c.server)
}

// clear takes by hand what warm instances there are.
func (c *claiming) clear() (err error) {
	for i, g := range c.world.State().GPUs {
		for _, gi := range g.MIG.Instances {
			err = errors.Join(err, c.world.DestroyInstance(i, gi.Start))
		}
		err = errors.Join(err, c.world.SetMIG(i, false))
	}
	return err
}

// starts times both programs from their start until their slices are at the server. The
// kubelet has removed those of before, as it does when it starts.
func (c *claiming) starts(ctx context.Context) error {
	if err := c.server.setPartitions(allClaims); err != nil {
		return err
	}
	took := map[string]sample{}
	want := map[string]int{}
	for i := range c.bench.starts/2 + 1 {
		for _, p := range []*claimant{c.peer, c.agent} {
			p.stop()
			if err := c.server.forgetSlices(p.driver); err != nil {
				return err
			}
			if err := p.start(ctx); err != nil {
				return err
			}
			if i == 0 { // it puts files into caches, and tells how many slices there are
				if err := p.listed(ctx, c.server); err != nil {
					return err
				}
				n, err := c.server.slices(p.driver)
				if err != nil {
					return err
				}
				want[p.name] = n
				continue
			}
			if err := await(ctx, "the slices of "+p.name, func() (bool, error) {
				n, err := c.server.slices(p.driver)
				return n == want[p.name], err
			}); err != nil {
				return p.proc.explain(err)
			}
			took[p.name] = append(took[p.name], time.Since(p.proc.began))
		}
	}
	for _, p := range []*claimant{c.agent, c.peer} {
		if len(took[p.name]) > 0 {
			c.figure("claim_start_to_slices_p50/"+p.name, took[p.name].quantile(0.5), "ms")
		}
	}
	return nil
}

// once has a claim of a device prepared and given back. It returns how long the former
// took, and how long without the hardware's own time.
func (c *claiming) once(ctx context.Context, who *claimant, gpu int, kind, profile, memory string) (took, above time.Duration, err error) {
	of := who
	if who == c.nothing {
		of = c.agent // its claim, to nobody
	}
	index := of.gpus[gpu]
	d, err := of.device(c.uuids[index], kind, profile)
	if err != nil {
		return 0, 0, err
	}
	name, uid, err := c.server.allocate(of.driver, d, memory)
	if err != nil {
		return 0, 0, err
	}
	began := c.world.now()
	if took, err = who.prepare(ctx, name, uid); err != nil {
		return 0, 0, err
	}
	_, above = c.world.since(began, index)
	if err := who.unprepare(ctx, name, uid); err != nil {
		return 0, 0, err
	}
	return took, above, c.server.remove(name)
}

// each asks programs in turn for a device so many times, and prints what that took.
func (c *claiming) each(ctx context.Context, n int, what string, gpu int, kind, memory string, who ...*claimant) (map[string]sample, error) {
	took := map[string]sample{}
	for i := range n + 1 {
		for _, p := range who {
			t, _, err := c.once(ctx, p, gpu, kind, "", memory)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", what, err)
			}
			if i > 0 {
				took[p.name] = append(took[p.name], t)
			}
		}
		if err := sleep(ctx, pause+peerPause*time.Duration(min(1, max(0, slices.Index(who, c.peer)+1)))); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// devices times claims of a whole GPU and of a share of its memory.
func (c *claiming) devices(ctx context.Context) error {
	n := c.started
	whole, err := c.each(ctx, n, "a whole GPU", wholeGPU, "gpu", "", c.peer, c.agent, c.nothing)
	if err != nil {
		return err
	}
	for _, p := range []*claimant{c.agent, c.peer, c.nothing} {
		for _, q := range []float64{0.5, 0.95} {
			most := whole[c.peer.name].quantile(q)
			c.figure(fmt.Sprintf("claim_whole_p%.0f/%s", 100*q, p.name), whole[p.name].quantile(q), "ms", only(p == c.agent, most, fmt.Sprintf("the peer's %.1f", most))...)
		}
	}
	share, err := c.each(ctx, n, "a share", sharedGPU, "shared", "4Gi", c.agent, c.nothing)
	if err != nil {
		return err
	}
	for _, p := range []*claimant{c.agent, c.nothing} {
		c.figure("claim_share_p50/"+p.name, share[p.name].quantile(0.5), "ms", only(p == c.agent, mostShare, "5 ms")...)
		c.figure("claim_share_p95/"+p.name, share[p.name].quantile(0.95), "ms", only(p == c.agent, mostShareP95, "15 ms")...)
	}
	return nil
}

// turns are asked for in turn: neither can stand beside the other's instance, so that
// each is made anew.
var turns = []string{"4g.40gb", "3g.40gb"}

// instances times claims of MIG instances: one that stands already, and one that is made.
func (c *claiming) instances(ctx context.Context) error {
	var warm sample
	for i := range c.started + 1 {
		took, _, err := c.once(ctx, c.agent, warmGPU, "mig", turns[0], "")
		if err != nil {
			return fmt.Errorf("a warm instance: %w", err)
		}
		if i > 0 {
			warm = append(warm, took)
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
	}
	c.figure("claim_warm_instance_p50/"+agentName, warm.quantile(0.5), "ms", target{mostInstance, "50 ms"})
	c.figure("claim_warm_instance_p95/"+agentName, warm.quantile(0.95), "ms")
	above := map[string]sample{}
	for i := range c.started/2 + 1 {
		for _, p := range []*claimant{c.agent, c.peer} {
			_, a, err := c.once(ctx, p, newGPU, "mig", turns[i%2], "")
			if err != nil {
				return fmt.Errorf("a new instance: %w", err)
			}
			if i > 0 {
				above[p.name] = append(above[p.name], a)
			}
		}
	}
	for _, p := range []*claimant{c.agent, c.peer} {
		c.figure("claim_new_instance_above_hardware_p50/"+p.name, above[p.name].quantile(0.5), "ms", only(p == c.agent, mostInstance, "50 ms")...)
		c.figure("claim_new_instance_above_hardware_p95/"+p.name, above[p.name].quantile(0.95), "ms")
	}
	return nil
}

// eight times new instances on eight GPUs, asked for at once, beside a new one alone: of the
// agent, then of the peer.
func (c *claiming) eight(ctx context.Context) error {
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	for _, p := range []*claimant{c.agent, c.peer} {
		var one, eight sample
		for i := range c.started/10 + 1 {
			alone, err := c.atOnce(ctx, p, all[newGPU:newGPU+1], "7g.80gb")
			if err != nil {
				return err
			}
			together, err := c.atOnce(ctx, p, all, turns[i%2])
			if err != nil {
				return err
			}
			if i > 0 { // there was a change of mode
				one, eight = append(one, alone), append(eight, together)
			}
		}
		a, b := one.quantile(0.5), eight.quantile(0.5)
		c.figure("claim_new_instance_p50/"+p.name, a, "ms")
		c.figure("claim_eight_instances_p50/"+p.name, b, "ms", only(p == c.agent, mostEight*a, fmt.Sprintf("%.1f x one", mostEight))...)
		if p == c.agent {
			p.stop()
			if err := c.clear(); err != nil {
				return err
			}
		}
	}
	return c.restart(ctx, halfClaims)
}

// atOnce has an instance prepared on each of some GPUs, a call for each, and says when all
// had been.
func (c *claiming) atOnce(ctx context.Context, p *claimant, gpus []int, profile string) (time.Duration, error) {
	type claim struct{ name, uid string }
	claims := make([]claim, len(gpus))
	for i, g := range gpus {
		d, err := p.device(c.uuids[g], "mig", profile)
		if err != nil {
			return 0, err
		}
		if claims[i].name, claims[i].uid, err = c.server.allocate(p.driver, d, ""); err != nil {
			return 0, err
		}
	}
	errs := make([]error, len(gpus))
	var all sync.WaitGroup
	began := time.Now()
	for i := range gpus {
		all.Go(func() { _, errs[i] = p.prepare(ctx, claims[i].name, claims[i].uid) })
	}
	all.Wait()
	took := time.Since(began)
	for i := range gpus {
		errs = append(errs, p.unprepare(ctx, claims[i].name, claims[i].uid), c.server.remove(claims[i].name))
	}
	return took, errors.Join(errs...)
}

// both measures what programs are resident with, and take at rest: the agent with both of
// its front-ends in use.
func (c *claiming) both(ctx context.Context) error {
	c.agent.gpus = []int{2, 3}
	if err := c.restart(ctx, bothAPIs); err != nil {
		return err
	}
	e, err := c.kubelet.await(ctx, lab.Memory, "devices of both front-ends", func(e fakes.Endpoint) bool { return len(e.Healthy()) > 0 })
	if err != nil {
		return c.agent.proc.explain(err)
	}
	agent := &running{&subject{name: agentName, kubelet: c.kubelet}, c.agent.proc, e}
	rs := []*running{agent, {subject: &subject{name: c.peer.name}, proc: c.peer.proc}}
	for range c.allocates {
		if _, err := c.turn(ctx, rs[:1], nil); err != nil {
			return err
		}
	}
	if _, err := c.each(ctx, c.started, "a share", sharedGPU, "shared", "4Gi", c.agent); err != nil {
		return err
	}
	if _, err := c.each(ctx, c.started/2, "a whole GPU", wholeGPU, "gpu", "", c.peer, c.agent); err != nil {
		return err
	}
	for _, r := range rs {
		m, err := r.proc.memory()
		if err != nil {
			return err
		}
		c.figure("claim_resident/"+r.name, mb(m.resident), "MB", only(r == agent, mostBothSpace, "46 MB")...)
		c.figure("claim_anonymous/"+r.name, mb(m.anonymous), "MB")
	}
	c.kubelet.endPods(rand.New(rand.NewPCG(9, 0)), 0)
	// What work leaves to be done is not rest.
	if err := sleep(ctx, min(c.window, 10*time.Second)); err != nil {
		return err
	}
	for i := range 2 {
		spent, err := c.spent(ctx, rs)
		if err != nil {
			return err
		}
		for _, r := range rs {
			c.figure(fmt.Sprintf("claim_idle_cpu_30s/window=%d/%s", i+1, r.name), spent[r.name], "ms", only(r == agent, mostBothIdle, "10 ms")...)
		}
	}
	return nil
}
