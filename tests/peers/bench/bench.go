// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/tests/lab"
)

// counts say how much is measured.
type counts struct {
	starts int // of each program
	// window is how long programs are watched at rest; there are two in a row,
	// for the agent reads the driver once a minute.
	window    time.Duration
	allocates int           // before memory is looked at again
	calls     int           // of each kind, at each number of devices
	counted   int           // calls during which driver calls are counted
	restarts  int           // of each kubelet
	broken    int           // GPUs, of each kind of fault
	rounds    int           // of that, two at least
	hold      time.Duration // see machine
	timings   int           // rounds, of each call in a container
	repeats   int           // of a call in a round
	live      int           // allocations where there are many
	watched   int           // containers under the watchdog
	pairs     int           // starts of an agent that keeps an account beside one that does not
	changes   int           // of MIG geometries
	operation time.Duration // of the hardware, on a MIG instance
	started   int           // containers on MIG instances that are made for them
	plans     int           // of MIG geometries, on paper
	failures  int           // of driver calls, during changes
	sizes     []int         // of sets of GPUs; nil for all
	// peerCalls and peerTime bound how often the peer is asked for a set of GPUs, and
	// peerPatience each of its answers.
	peerCalls              int
	peerTime, peerPatience time.Duration
}

var (
	fullCounts = counts{starts: 20, window: 30 * time.Second, allocates: 1000, calls: 1000, counted: 100, restarts: 20,
		broken: 5, rounds: 3, hold: time.Second, timings: 60, repeats: 8000, live: 100_000, watched: 100, pairs: 3,
		changes: 200, operation: 100 * time.Millisecond, started: 100, plans: 20_000, failures: 60,
		peerCalls: 20, peerTime: 5 * time.Second, peerPatience: time.Minute}
	smokeCounts = counts{starts: 1, window: time.Second, allocates: 20, calls: 10, counted: 5, restarts: 2,
		broken: 2, rounds: 2, hold: 200 * time.Millisecond, timings: 2, repeats: 500, live: 1000, watched: 8, pairs: 2,
		changes: 5, operation: 5 * time.Millisecond, started: 10, plans: 2000, failures: 3,
		sizes: []int{1, 2, 8, 16}, peerCalls: 1, peerPatience: 2 * time.Second}
)

// manyDevices are devices on each GPU: 80, 640 and 2,560 on all.
var manyDevices = []int{10, 80, 320}

// usual is what a node has with units of 1 GiB, or nearly.
const usual = 80

// Targets, see the issue that asks for them.
const (
	mostResident  = 40.0 // MB, with the API watch
	mostIdleCPU   = 10.0 // ms in 30 s
	mostPreferred = 1.5  // times the empty handler's
	mostAllocate  = 1.1  // times the peer's
	mostReturn    = 10.0 // ms from a kubelet's socket to the first list
	mostTurn      = 10.0 // ms from an Xid to the kubelet's list
)

// bench is a run.
type bench struct {
	*report
	machine
	counts
	agent, file, peer *subject
	// watch looks after containers, and unwatched does not; they are alike
	// otherwise.
	watch, unwatched *subject
	migKubelet       *kubelet
	// random decides the sizes of requests, the same in every run.
	random *rand.Rand
}

// measure does everything, as the first process of its namespaces.
func measure(ctx context.Context, k *lab.Kit, smoke bool, only string) (err error) {
	work := workDir(k)
	if err := settle(work); err != nil {
		return err
	}
	n := fullCounts
	if smoke {
		n = smokeCounts
	}
	m := machine{kit: k, work: work}
	if m.driver, err = startDriver(ctx, k, work); err != nil {
		return err
	}
	defer m.driver.stop()
	m.api = startAPIServer(sharedGPUs)
	defer m.api.stop()
	// Each has a kubelet of its own: two agents would serve one resource at one
	// socket, and nobody's pods should be in another's lists.
	kubelets := map[string]*kubelet{}
	for name, dir := range map[string]string{
		peerName: kubeletDir, agentName: filepath.Join(work, "kubelet"), agentFileName: filepath.Join(work, "kubelet-2"),
		watchName: filepath.Join(work, "kubelet-3"), unwatchedName: filepath.Join(work, "kubelet-4"), migAgentName: filepath.Join(work, "kubelet-5"),
	} {
		if kubelets[name], err = startKubelet(dir); err != nil {
			return err
		}
		defer kubelets[name].stop()
	}

	b := &bench{report: &report{out: os.Stdout, timeless: smoke}, machine: m, counts: n,
		random: rand.New(rand.NewPCG(2, 0))}
	b.agent, b.file, b.peer = b.newAgent(kubelets[agentName]), b.newFileAgent(agentFileName, ":9501", kubelets[agentFileName]), b.newPeer(kubelets[peerName])
	b.watch = b.newFileAgent(watchName, watchHTTP, kubelets[watchName])
	b.migKubelet = kubelets[migAgentName]
	b.unwatched = b.newFileAgent(unwatchedName, ":9503", kubelets[unwatchedName], "--watch-every", "0")
	began := time.Now()
	b.note("gpu-agent beside %s %s; %d emulated %s, %d processors, %s; smoke: %v", peerName, peerVersion, gpus, gpuModel, runtime.NumCPU(), runtime.Version(), smoke)
	for _, phase := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"behaviour of the agent", b.behaviour},
		{"start to registered", b.starting},
		{"rest and work", b.resting},
		{"calls", b.calling},
		{"whole GPUs", b.wholes},
		{"kubelet restarts", b.returning},
		{"faults", b.faults},
		{"caps in the process", b.capping},
		{"caps: the watchdog", b.watching},
		{"metering", b.metering},
		// Last: what they lay over /proc and /sys is of other cards.
		{"topology: choices", b.choices},
		{"topology: labels and page", b.telling},
		{"mig: plans", b.migPlans},
		{"mig: changes", b.migChanges},
		{"mig: calls that fail", b.migFailures},
		{"mig: on demand", b.migStarts},
		{"claims", b.claims},
	} {
		if !strings.Contains(phase.what, only) {
			continue
		}
		since := time.Now()
		if err := phase.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", phase.what, err)
		}
		b.note("%s took %.1f s", phase.what, time.Since(since).Seconds())
	}
	b.summary()
	b.note("all of it took %.0f s", time.Since(began).Seconds())
	return nil
}

// all runs subjects side by side and ends them when f is done.
func all(ctx context.Context, perGPU int, f func([]*running) error, subjects ...*subject) error {
	var rs []*running
	defer func() {
		for _, r := range rs {
			r.proc.kill()
		}
	}()
	for _, s := range subjects {
		r, err := s.run(ctx, perGPU)
		if err != nil {
			return err
		}
		rs = append(rs, r)
	}
	return f(rs)
}

// behaviour checks that what is measured is the thing that it should be.
func (b *bench) behaviour(ctx context.Context) error {
	return all(ctx, usual, func(rs []*running) error {
		r := rs[0]
		o, err := r.plugin.Client.GetDevicePluginOptions(ctx, &api.Empty{})
		if err != nil {
			return fmt.Errorf("ask for options: %w", err)
		}
		if !o.PreStartRequired || !o.GetPreferredAllocationAvailable {
			return fmt.Errorf("options %v: want both", o)
		}
		free := r.kubelet.Available(r.plugin.Resource)
		ids, err := r.prefer(ctx, free, 24)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if gpuOf(id) != gpuOf(ids[0]) {
				return fmt.Errorf("24 units preferred on more than one GPU: %v", ids)
			}
		}
		if err := r.give(ctx, ids); err != nil {
			return err
		}
		files, err := filepath.Glob(filepath.Join(b.work, r.name, "cdi", "*.json"))
		if err != nil || len(files) != 1 {
			return fmt.Errorf("one allocation is prepared and there are %d CDI files", len(files))
		}
		if _, err := r.plugin.Client.GetPreferredAllocation(ctx, preferredRequest(free, usual+1)); err == nil || !strings.Contains(err.Error(), "80") {
			return fmt.Errorf("more units than a GPU has were asked for; want a refusal with the largest block, 80; got %v", err)
		}
		if _, err := r.plugin.Client.Allocate(ctx, allocateRequest(free[:usual+1])); err == nil {
			return errors.New("units of several GPUs were granted")
		}
		if err := await(ctx, "the outcome on the node", func() (bool, error) {
			state := b.api.nodeLabel(lab.StateLabel)
			return state == "applied" && b.api.watched(), fmt.Errorf("state %q", state)
		}); err != nil {
			return err
		}
		if r.proc.stop(); r.proc.err != nil {
			return r.proc.explain(errors.New("it does not end well when asked to"))
		}
		left, err := filepath.Glob(filepath.Join(r.kubelet.dir, "device-plugins", "example.com*"))
		if err != nil || len(left) > 0 {
			return fmt.Errorf("it leaves %q behind", left)
		}
		return nil
	}, b.agent)
}

// starting measures from a process's start to the kubelet's having it.
func (b *bench) starting(ctx context.Context) error {
	subjects := []*subject{b.agent, b.file, b.peer}
	registered, listed := map[string]sample{}, map[string]sample{}
	for i := range b.starts + 1 {
		for _, s := range subjects {
			if err := all(ctx, usual, func(rs []*running) error {
				if i == 0 {
					return nil // the first puts files into caches
				}
				registered[s.name] = append(registered[s.name], rs[0].plugin.Registered.Sub(rs[0].proc.began))
				listed[s.name] = append(listed[s.name], rs[0].plugin.Listed.Sub(rs[0].proc.began))
				return nil
			}, s); err != nil {
				return err
			}
		}
	}
	for _, s := range subjects {
		b.figure("start_to_registered_p50/"+s.name, registered[s.name].quantile(0.5), "ms")
		b.figure("start_to_first_list_p50/"+s.name, listed[s.name].quantile(0.5), "ms")
	}
	return nil
}

// resting measures CPU time and memory of programs that have nothing to do, then
// memory after work.
func (b *bench) resting(ctx context.Context) error {
	return all(ctx, usual, func(rs []*running) error {
		for _, r := range rs {
			b.figure("list_bytes/devices=640/"+r.name, float64(r.plugin.Bytes), "bytes")
		}
		// What a start leaves to be done is not rest.
		if err := sleep(ctx, min(b.window, 3*time.Second)); err != nil {
			return err
		}
		var windows []map[string]float64
		for range 2 {
			spent, err := b.spent(ctx, rs)
			if err != nil {
				return err
			}
			windows = append(windows, spent)
		}
		for _, r := range rs {
			one, two := windows[0][r.name], windows[1][r.name]
			// The worse counts: in it the agent reads the driver.
			b.figure("idle_cpu_30s/"+r.name, max(one, two), "ms", only(r.subject == b.agent, mostIdleCPU, "10 ms")...)
			b.figure("idle_cpu_30s_other_window/"+r.name, min(one, two), "ms")
		}
		if err := b.remember(rs, "idle"); err != nil {
			return err
		}
		if err := b.driverCalls(ctx, rs, fmt.Sprintf("devices=%d", gpus*usual), 8); err != nil {
			return err
		}
		for range b.allocates {
			if _, err := b.turn(ctx, rs, nil); err != nil {
				return err
			}
		}
		if err := b.remember(rs, "after_1000_allocates"); err != nil {
			return err
		}
		// Nor is it rest to look for what the last pod leaves free.
		if err := sleep(ctx, min(b.window, 6*time.Second)); err != nil {
			return err
		}
		spent, err := b.spent(ctx, rs)
		if err != nil {
			return err
		}
		for _, r := range rs {
			b.figure("holding_cpu_30s/"+r.name, spent[r.name], "ms")
		}
		return nil
	}, b.agent, b.file, b.peer)
}

func only(yes bool, most float64, why string) []target {
	if !yes {
		return nil
	}
	return []target{{most, why}}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// spent is the CPU time of programs in a window, in milliseconds.
func (b *bench) spent(ctx context.Context, rs []*running) (map[string]float64, error) {
	before := map[string]time.Duration{}
	for _, r := range rs {
		var err error
		if before[r.name], err = r.proc.cpu(); err != nil {
			return nil, err
		}
	}
	if err := sleep(ctx, b.window); err != nil {
		return nil, err
	}
	out := map[string]float64{}
	for _, r := range rs {
		after, err := r.proc.cpu()
		if err != nil {
			return nil, err
		}
		out[r.name] = ms(after - before[r.name])
	}
	return out, nil
}

func (b *bench) remember(rs []*running, when string) error {
	for _, r := range rs {
		m, err := r.proc.memory()
		if err != nil {
			return err
		}
		b.figure("resident_"+when+"/"+r.name, mb(m.resident), "MB", only(r.subject == b.agent, mostResident, "40 MB")...)
		b.figure("anonymous_"+when+"/"+r.name, mb(m.anonymous), "MB")
	}
	return nil
}

// pause is between a pod's end and the next pod's start where calls are timed:
// less than any scheduler leaves, and enough for programs to hear of the end,
// which is not to be a part of another's call.
const pause = 25 * time.Millisecond

// turn starts one pod of each program, ends others where half of all devices
// are held, and times each Allocate where into is given. IDs are those that the
// last program was given.
func (b *bench) turn(ctx context.Context, rs []*running, into map[string]sample) (ids []string, err error) {
	n := 6 + b.random.IntN(5)
	for _, r := range rs {
		if ids, err = r.prefer(ctx, r.kubelet.Available(r.plugin.Resource), n); err != nil {
			return nil, err
		}
		began := time.Now()
		answer, err := r.allocate(ctx, ids)
		if err != nil {
			return nil, err
		}
		if into != nil {
			into[r.name] = append(into[r.name], time.Since(began))
		}
		p, err := r.kubelet.admit(r.plugin.Resource, ids, answer)
		if err != nil {
			return nil, err
		}
		if err := r.prepare(ctx, ids); err != nil {
			return nil, err
		}
		r.kubelet.create(p)
	}
	for _, r := range rs {
		r.kubelet.makeRoom(b.random, r.plugin.Resource, len(r.plugin.Devices)/2)
	}
	if into == nil {
		return ids, nil
	}
	return ids, sleep(ctx, pause)
}

// driverCalls counts what a call costs in calls of the driver.
func (b *bench) driverCalls(ctx context.Context, rs []*running, what string, n int) error {
	for _, r := range rs {
		if err := b.driver.quiet(ctx, r.proc); err != nil {
			return err
		}
		perPrefer, err := b.count(b.driver, r, func() error {
			_, err := r.prefer(ctx, r.kubelet.Available(r.plugin.Resource), n)
			return err
		})
		if err != nil {
			return err
		}
		perAllocate, err := b.count(b.driver, r, func() error {
			ids, err := r.prefer(ctx, r.kubelet.Available(r.plugin.Resource), n)
			if err != nil {
				return err
			}
			return r.give(ctx, ids)
		})
		if err != nil {
			return err
		}
		ours := r.subject != b.peer
		b.figure("driver_calls_per_preferred/"+what+"/"+r.name, perPrefer, "calls", only(ours, 0, "0")...)
		b.figure("driver_calls_per_allocate/"+what+"/"+r.name, max(perAllocate-perPrefer, 0), "calls", only(ours, 0, "0")...)
	}
	return nil
}

// count is how many driver calls of d f makes a program make, each time. The agent
// reads the driver once a minute besides, and its watchdog several times a second
// while somebody has a cap, which not all of so many short tries meet.
func (b *bench) count(d *driver, r *running, f func() error) (float64, error) {
	const tries = 20
	least, each := -1, (b.counted+tries-1)/tries
	for range tries {
		before, err := d.calls(r.proc)
		if err != nil {
			return 0, err
		}
		for range each {
			if err := f(); err != nil {
				return 0, err
			}
		}
		after, err := d.calls(r.proc)
		if err != nil {
			return 0, err
		}
		if least < 0 || after-before < least {
			least = after - before
		}
		if least == 0 {
			break
		}
	}
	return float64(least) / float64(each), nil
}

// calling measures calls at growing numbers of devices.
func (b *bench) calling(ctx context.Context) error {
	for _, perGPU := range manyDevices {
		err := all(ctx, perGPU, func(rs []*running) error {
			nothing, err := b.startEmpty(ctx)
			if err != nil {
				return err
			}
			defer nothing.proc.kill()
			return b.callingAt(ctx, rs[0], rs[1], nothing)
		}, b.agent, b.peer)
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) callingAt(ctx context.Context, agent, peer, nothing *running) error {
	const n = 8
	warm := b.calls / 10
	prefer, allocate := map[string]sample{}, map[string]sample{}
	for i := range b.calls + warm {
		for _, r := range []*running{agent, peer, nothing} {
			from := r
			if r == nothing {
				from = agent // its question, to nobody
			}
			req := preferredRequest(from.kubelet.Available(from.plugin.Resource), n)
			began := time.Now()
			resp, err := r.plugin.Client.GetPreferredAllocation(ctx, req)
			took := time.Since(began)
			if err != nil {
				return r.proc.explain(fmt.Errorf("%s: prefer %d devices: %w", r.name, n, err))
			}
			if r != nothing && (len(resp.ContainerResponses) != 1 || len(resp.ContainerResponses[0].DeviceIDs) != n) {
				return fmt.Errorf("%s: asked which %d devices it prefers, it answers %v", r.name, n, resp)
			}
			if i >= warm {
				prefer[r.name] = append(prefer[r.name], took)
			}
		}
	}
	// Fewer of those: there is a pause between them.
	for i := range b.calls/2 + warm {
		if i == warm {
			clear(allocate)
		}
		ids, err := b.turn(ctx, []*running{peer, agent}, allocate)
		if err != nil {
			return err
		}
		req := allocateRequest(ids)
		began := time.Now()
		if _, err := nothing.plugin.Client.Allocate(ctx, req); err != nil {
			return nothing.proc.explain(fmt.Errorf("ask the handler that does nothing: %w", err))
		}
		allocate[emptyName] = append(allocate[emptyName], time.Since(began))
	}
	what := fmt.Sprintf("/devices=%d/", len(agent.plugin.Devices))
	for _, r := range []*running{agent, peer, nothing} {
		var forPrefer, forAllocate []target
		if r == agent {
			e, p := prefer[emptyName].quantile(0.5), allocate[peerName].quantile(0.5)
			forPrefer = []target{{mostPreferred * e, fmt.Sprintf("%.1f x the empty handler's %.3f", mostPreferred, e)}}
			forAllocate = []target{{mostAllocate * p, fmt.Sprintf("%.1f x the peer's %.3f", mostAllocate, p)}}
		}
		b.figure("preferred_p50"+what+r.name, prefer[r.name].quantile(0.5), "ms", forPrefer...)
		b.figure("preferred_p99"+what+r.name, prefer[r.name].quantile(0.99), "ms")
		b.figure("allocate_p50"+what+r.name, allocate[r.name].quantile(0.5), "ms", forAllocate...)
		b.figure("allocate_p99"+what+r.name, allocate[r.name].quantile(0.99), "ms")
		if r != nothing {
			b.figure("list_bytes"+what+r.name, float64(r.plugin.Bytes), "bytes")
		}
	}
	return nil
}

// wholes looks at GPUs that are not shared, where the peer asks the driver how
// they are linked.
func (b *bench) wholes(ctx context.Context) error {
	return all(ctx, 0, func(rs []*running) error {
		return b.driverCalls(ctx, rs, "whole", 4)
	}, b.agent, b.peer)
}
