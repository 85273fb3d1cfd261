// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
)

// board is a machine whose GPUs are asked for by size.
type board struct {
	name string
	spec emulator.Spec
	// alone: the peer is not asked.
	alone bool
}

// boards are machines that there are, and one that there is not: no two of its 16
// GPUs are alike, which is the most that the agent can have to think about.
var boards = []board{
	{name: "dgx-h100", spec: emulator.Spec{Topology: "dgx-h100"}},
	{name: "dgx-1", spec: emulator.Spec{Topology: "dgx-1"}},
	{name: "dgx-2", spec: emulator.Spec{Topology: "dgx-2"}},
	{name: "irregular", spec: irregular(), alone: true},
}

// irregular joins GPUs at random, the same in every run, as long as both have links
// left.
func irregular() emulator.Spec {
	const each = 12
	s := emulator.Spec{Model: migModel, Count: emulator.MaxGPUs}
	random := rand.New(rand.NewPCG(6, 0))
	var used [emulator.MaxGPUs]int
	for g := range s.Count {
		for to := range g {
			lanes := min(random.IntN(4), each-used[g], each-used[to])
			if lanes > 0 {
				s.Links = append(s.Links, emulator.LinkSpec{GPU: g, To: to, Lanes: lanes})
				used[g], used[to] = used[g]+lanes, used[to]+lanes
			}
		}
	}
	return s
}

// mostChoice is how many ms a call may take, at every size.
const mostChoice = 1.0

// choices asks both programs, on each board, for which GPUs they prefer.
func (b *bench) choices(ctx context.Context) error {
	for _, on := range boards {
		if err := b.choicesOn(ctx, on); err != nil {
			return fmt.Errorf("%s: %w", on.name, err)
		}
	}
	return nil
}

// onBoard serves a board and lends the machine that has it.
func (b *bench) onBoard(on board, f func(m *machine, w *world) error) (err error) {
	w, err := b.startWorld("board-"+on.name, on.spec)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	m := b.machine
	m.driver = &driver{root: w.root, gpus: len(w.State().GPUs)}
	if m.driver.ask, err = daemon.Dial(filepath.Join(w.root, install.Socket)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.driver.ask.Close()) }()
	return f(&m, w)
}

func (b *bench) choicesOn(ctx context.Context, on board) error {
	return b.onBoard(on, func(m *machine, w *world) error {
		c := chooser{bench: b, machine: m, world: w, board: on.name}
		subjects := []*subject{m.newAgent(b.agent.kubelet)}
		if !on.alone {
			subjects = append(subjects, m.newPeer(b.peer.kubelet))
		}
		return all(ctx, 0, func(rs []*running) error {
			for _, r := range rs {
				c.worst = append(c.worst, 0)
				if err := m.driver.quiet(ctx, r.proc); err != nil {
					return err
				}
			}
			sizes := b.sizes
			if sizes == nil {
				for n := range m.driver.gpus {
					sizes = append(sizes, n+1)
				}
			}
			for _, n := range sizes {
				for i := range rs {
					if n > m.driver.gpus {
						continue
					}
					if err := c.ask(ctx, rs, i, n); err != nil {
						return err
					}
				}
			}
			for i, r := range rs {
				b.figure(fmt.Sprintf("choice_worst_p50/%s/gpus=%d/%s", on.name, m.driver.gpus, r.name), c.worst[i], "ms",
					only(r.name == agentName, mostChoice, "1 ms")...)
			}
			return nil
		}, subjects...)
	})
}

// chooser asks which GPUs of a board programs prefer.
type chooser struct {
	*bench
	machine *machine
	world   *world
	board   string
	worst   []float64 // p50 of the programs, in ms
}

// ask asks one of the programs for n of all GPUs, all of which are free. The agent is
// asked often, the peer until it has had its time. A peer that does not answer is
// started anew: it would go on thinking.
func (c *chooser) ask(ctx context.Context, rs []*running, i, n int) error {
	r, d := rs[i], c.machine.driver
	ours, times := r.name == agentName, c.calls
	if !ours {
		times = min(times, c.peerCalls)
	}
	what := fmt.Sprintf("/%s/gpus=%d/size=%d/%s", c.board, d.gpus, n, r.name)
	var took sample
	var set []string
	before, err := d.calls(r.proc)
	if err != nil {
		return err
	}
	idle, err := r.proc.cpu()
	if err != nil {
		return err
	}
	for began := time.Now(); len(took) == 0 || len(took) < times && (ours || time.Since(began) < c.peerTime); {
		free := r.kubelet.Available(r.plugin.Resource)
		at := time.Now()
		cctx, cancel := context.WithTimeout(ctx, c.peerPatience)
		set, err = r.prefer(cctx, free, n)
		cancel()
		if !ours && status.Code(err) == codes.DeadlineExceeded {
			c.note("%s has no answer after %v where %d of %d GPUs are wanted", r.name, c.peerPatience, n, len(free))
			c.figure("choice_p50"+what, math.Inf(1), "ms")
			c.worst[i] = math.Inf(1)
			r.proc.kill()
			if r, err = r.run(ctx, 0); err == nil {
				rs[i], err = r, d.quiet(ctx, r.proc)
			}
			return err
		}
		if err != nil {
			return err
		}
		took = append(took, time.Since(at))
	}
	spent, err := r.proc.cpu()
	if err != nil {
		return err
	}
	after, err := d.calls(r.proc)
	if err != nil {
		return err
	}
	calls := float64(after-before) / float64(len(took))
	if ours && calls > 0 { // it reads the driver once a minute
		if calls, err = c.count(d, r, func() error { _, err := r.prefer(ctx, r.kubelet.Available(r.plugin.Resource), n); return err }); err != nil {
			return err
		}
	}
	c.worst[i] = max(c.worst[i], took.quantile(0.5))
	c.figure("choice_p50"+what, took.quantile(0.5), "ms", only(ours, mostChoice, "1 ms")...)
	c.figure("choice_p99"+what, took.quantile(0.99), "ms")
	if ours {
		// What a call takes at which nothing is thought of, at the same time.
		var empty sample
		for range took {
			at := time.Now()
			if _, err := r.plugin.Client.GetDevicePluginOptions(ctx, &api.Empty{}); err != nil {
				return r.proc.explain(fmt.Errorf("%s: ask for its options: %w", r.name, err))
			}
			empty = append(empty, time.Since(at))
		}
		c.figure("choice_empty_p99"+what, empty.quantile(0.99), "ms")
	}
	// Of a call, gRPC's part included, on however busy a machine.
	c.figure("choice_cpu"+what, ms(spent-idle)/float64(len(took)), "ms", only(ours, mostChoice, "1 ms")...)
	c.figure("choice_driver_calls"+what, calls, "calls", only(ours, 0, "0")...)
	lanes, nodes := c.judge(set)
	if c.meshed() {
		c.figure("choice_lanes"+what, float64(lanes), "lanes")
	} else {
		c.figure("choice_numa_nodes"+what, float64(nodes), "nodes")
	}
	return nil
}

// meshed says whether NVLinks run from GPU to GPU.
func (c *chooser) meshed() bool {
	return slices.ContainsFunc(c.world.State().Board.Links, func(of []emulator.LinkState) bool {
		return slices.ContainsFunc(of, func(l emulator.LinkState) bool { return l.To >= 0 })
	})
}

// judge counts the NVLinks among GPUs, without those to an NVSwitch, and the NUMA nodes
// that they are on.
func (c *chooser) judge(set []string) (lanes, nodes int) {
	st := c.world.State()
	var in, on []int
	for _, g := range st.GPUs {
		if slices.Contains(set, g.UUID) {
			in = append(in, g.Index)
			on = append(on, g.NUMA)
		}
	}
	for _, g := range in {
		for _, l := range st.Board.Links[g] {
			if l.Up && slices.Contains(in, l.To) {
				lanes++
			}
		}
	}
	slices.Sort(on)
	return lanes / 2, len(slices.Compact(on))
}
