// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// oneUnderMPS has units of GPU 0 alone, with shares of its multiprocessors.
const oneUnderMPS = `version: v1
partitions:
  default:
    - devices: [0]
      mode: shared
      compute: mps
    - devices: [1, 2, 3, 4, 5, 6, 7]
      mode: off
`

// Compute modes, as the emulated driver names them.
const (
	computeDefault   = "default"
	computeExclusive = "exclusive-process"
)

// TestMPS: two pods have a quarter and a half of a GPU's multiprocessors and memory, and their programs,
// with -long twelve, are held to them. An upgrade of the agent, and restarts of the agent and of the
// supervisor under them, by kill -9 and by SIGTERM, end none, and neither the daemon nor its server. Then the
// GPU leaves MPS and comes back, and the agent is taken away.
func TestMPS(t *testing.T) {
	b := begin(t, oneShared, oneSharedOffers)
	b.redeploy(lab.DeployOptions{Partitions: oneUnderMPS, Components: []string{"mps"}})
	b.underMPS(oneSharedOffers)

	pods := map[string]*lab.RunningPod{"quarter": b.tenant("quarter", 20), "half": b.tenant("half", 40)}
	ceilings := map[string]int{"quarter": 26, "half": 51}
	programs := count(1, 6) // of each pod
	probes := map[string]*lab.Probe{}
	for name, pod := range pods {
		for i := range programs {
			k := b.probe(pod, "main", nil)
			b.take(k, chunk, 1)
			probes[fmt.Sprintf("program %d of %s", i, name)] = k
		}
	}
	held := func(what string) {
		b.Helper()
		b.must(agent.AwaitStatus(b.ctx, 30*time.Second, what, func(s lab.Status) error {
			var errs []error
			seen := 0
			for _, c := range s.Containers {
				for name, pod := range pods {
					if c.Pod != pod.Name {
						continue
					}
					seen++
					if c.Compute.Guarantee != "ceiling" || c.Compute.Ceiling != ceilings[name] {
						errs = append(errs, fmt.Errorf("%s is held by %+v, want a ceiling of %d", name, c.Compute, ceilings[name]))
					}
				}
			}
			if m := s.GPUs[0].MPS; m == nil || m.Clients != len(probes) || m.Trouble != "" {
				errs = append(errs, fmt.Errorf("GPU 0 has %+v, want %d clients", m, len(probes)))
			}
			if seen != 2 || s.Watchdog.Intruders != 0 {
				errs = append(errs, fmt.Errorf("%d containers, %d intruders", seen, s.Watchdog.Intruders))
			}
			return errors.Join(errs...)
		}))
	}
	held("both are held to their shares")

	// Each probe still has its context, which a client of a server that has ended has not.
	computes := func(after string) {
		b.Helper()
		for name, k := range probes {
			if a := b.ask(k, "take cuMemAlloc_v2 %d 1", chunk); a.Result() != lab.Success {
				b.Errorf("after %s: %s says %s", after, name, a)
			}
		}
	}
	before := b.processes(pods["quarter"], pods["half"])
	standing := func() []int {
		return append(mpsProcesses("nvidia-cuda-mps-control"), mpsProcesses("nvidia-cuda-mps-server")...)
	}
	stood := standing()
	if len(stood) != 2 {
		b.Fatalf("the daemon and its server are the processes %v", stood)
	}
	for i := range count(4, 10) {
		p, err := agent.Supervisor()
		b.must(err)
		b.must(node.Signal(b.ctx, p, []string{"KILL", "TERM"}[i%2]))
		b.must(lab.Await(b.ctx, 30*time.Second, "another supervisor", func(context.Context) error {
			now, err := agent.Supervisor()
			if err == nil && now == p {
				err = errors.New("it is the same process")
			}
			return err
		}))
	}
	computes("restarts of the supervisor")
	for i := range count(2, 10) {
		b.must([]func(context.Context) error{agent.Crash, agent.Replace}[i%2](b.ctx))
		b.must(agent.Ready(b.ctx))
	}
	computes("restarts of the agent")
	var err error
	agent, err = deploy(b.ctx, lab.DeployOptions{Partitions: oneUnderMPS, Components: []string{"mps"}, Env: map[string]string{"GPU_AGENT_LOG_LEVEL": "debug"}})
	b.must(err)
	computes("an upgrade of the agent")
	b.must(hurt(before))
	if stand := standing(); !slices.Equal(stand, stood) {
		b.Errorf("the daemon and its server are the processes %v, and were %v", stand, stood)
	}
	held("both are held to their shares after all that")

	for _, k := range probes {
		_ = k.Close()
	}
	for _, pod := range pods {
		b.must(pod.Delete(b.ctx))
	}
	b.leavesMPS()
	b.partitions(oneUnderMPS)
	b.underMPS(oneSharedOffers)
	b.cleanedOfMPS()
}

// leavesMPS gives GPU 0 another layout than MPS's. Its MPS server stands without clients, too, and does not
// keep the layout off. Nothing of MPS is left.
func (b *bench) leavesMPS() {
	b.Helper()
	b.partitions(strings.Replace(oneUnderMPS, "mode: shared\n      compute: mps", "mode: mig\n      geometry: {1g.10gb: 7}", 1))
	b.offers(map[string]int{lab.MIG("1g.10gb"): 7})
	b.state("applied")
	b.computeMode(computeDefault)
	b.must(lab.Await(b.ctx, 30*time.Second, "nothing of MPS to be left", func(context.Context) error {
		left, err := filepath.Glob(node.File("/var/lib/gpu-agent/mps/GPU-*"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%q", left)
		}
		shm, unread := os.ReadDir(node.File("/dev/shm"))
		if slices.ContainsFunc(shm, func(e os.DirEntry) bool { return strings.Contains(strings.ToLower(e.Name()), "mps") }) {
			err = errors.Join(err, fmt.Errorf("/dev/shm has %v", shm))
		}
		return errors.Join(err, unread)
	}))
	for _, program := range []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server"} {
		dirs, err := filepath.Glob(node.File("/proc/[0-9]*"))
		b.must(err)
		for _, dir := range dirs {
			if command, _ := os.ReadFile(filepath.Join(dir, "cmdline")); strings.Contains(string(command), program) {
				b.Errorf("%s runs as %s", program, filepath.Base(dir))
			}
		}
	}
}

// computeMode waits until GPU 0 has a compute mode.
func (b *bench) computeMode(want string) {
	b.Helper()
	b.must(lab.Await(b.ctx, time.Minute, "compute mode "+want, func(ctx context.Context) error {
		mode, err := driver.ComputeMode(ctx, 0)
		if err == nil && mode != want {
			err = fmt.Errorf("it is %s", mode)
		}
		return err
	}))
}

// underMPS waits until GPU 0 is under MPS: its server stands, and the node offers what it is to.
func (b *bench) underMPS(offers map[string]int) {
	b.Helper()
	b.computeMode(computeExclusive)
	b.must(agent.AwaitStatus(b.ctx, time.Minute, "GPU 0 to be under MPS", func(s lab.Status) error {
		if m := s.GPUs[0].MPS; m == nil || m.Trouble != "" {
			return fmt.Errorf("it has %+v", m)
		}
		return nil
	}))
	b.offers(offers)
	b.state("applied")
}

// cleanedOfMPS takes the agent away from a GPU under MPS. The agent leaves the compute mode, the daemons and
// their directories, and the cleanup puts all of them back. It refuses while the daemons' pod runs.
func (b *bench) cleanedOfMPS() {
	b.Helper()
	b.must(agent.Uninstall(b.ctx))
	b.must(lab.Await(b.ctx, waitLong, "the cleanup to refuse", func(ctx context.Context) error {
		clean, says, err := agent.Uninstalled(ctx)
		if err == nil && (clean || !strings.Contains(says, "gpu-agent-mps")) {
			err = fmt.Errorf("clean %v: %s", clean, says)
		}
		return err
	}))
	b.computeMode(computeExclusive)
	b.must(node.RemoveComponent(b.ctx, "mps"))
	b.cleanedUp()
	b.computeMode(computeDefault)
	b.must(agent.EndUninstall(b.ctx))
}

// TestMPSEnds: a program that computes until the kubelet kills it ends its neighbour's work. With the component
// mps-detach its neighbour goes on, after a forced deletion, too, and when many pods end at one moment.
func TestMPSEnds(t *testing.T) {
	b := begin(t, oneShared, oneSharedOffers)
	b.redeploy(lab.DeployOptions{Partitions: oneUnderMPS, Components: []string{"mps"}})
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := node.RemoveComponent(ctx, "mps-detach"); err != nil {
			b.Error(err)
		}
	})
	for _, c := range []struct {
		name   string
		deploy bool // with the component, from now on
		pods   int
		end    func(*lab.RunningPod) error
		hurt   bool
	}{
		{"without", false, 1, func(p *lab.RunningPod) error { return p.Delete(b.ctx) }, true},
		{"deleted", true, 1, func(p *lab.RunningPod) error { return p.Delete(b.ctx) }, false},
		{"forced", false, 1, func(p *lab.RunningPod) error { return p.ForceDelete(b.ctx) }, false},
		{"together", false, 8, func(p *lab.RunningPod) error { return p.Delete(b.ctx) }, false},
	} {
		if c.deploy {
			var err error
			agent, err = deploy(b.ctx, lab.DeployOptions{Partitions: oneUnderMPS, Components: []string{"mps", "mps-detach"}})
			b.must(err)
		}
		b.underMPS(oneSharedOffers)
		before, err := agent.Metrics(b.ctx)
		b.must(err)
		neighbour := b.tenant(c.name+"-neighbour", 20)
		container := b.container("main", map[string]int{lab.Memory: 40 / c.pods})
		container.Then = lab.Deaf
		var end []*lab.RunningPod
		for i := range c.pods {
			end = append(end, b.create(lab.Pod{Name: fmt.Sprintf("%s-ends-%d", c.name, i), Grace: 6 * time.Second, Containers: []lab.Container{container}}))
		}
		b.must(each(end, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))
		theirs := b.probe(neighbour, "main", nil)
		b.take(theirs, chunk, 1)
		probes, busy := []*lab.Probe{theirs}, []lab.Process{}
		for _, p := range end {
			own := b.probe(p, "main", nil)
			b.take(own, chunk, 1)
			computes, err := p.Processes(b.ctx, "main", lab.ProbeProgram)
			b.must(err)
			if len(computes) != 1 {
				b.Fatalf("pod %s has the programs %v, want one", p, computes)
			}
			b.must(driver.KeepBusy(b.ctx, 0, computes[0], 100/c.pods))
			probes, busy = append(probes, own), append(busy, computes[0])
		}
		b.must(each(end, c.end))
		b.must(each(busy, func(p lab.Process) error {
			_, _, err := node.End(b.ctx, time.Minute, p)
			return err
		}))
		a := b.ask(theirs, "take cuMemAlloc_v2 %d 1", chunk)
		if hurt := a.Result() != lab.Success; hurt != c.hurt {
			b.Errorf("%s: the neighbour says %s after the end; want that it is hurt: %v", c.name, a, c.hurt)
		}
		after, err := agent.Metrics(b.ctx)
		b.must(err)
		want := float64(c.pods)
		if c.hurt {
			want = 0
		}
		const detached = `gpu_agent_mps_detaches_total{outcome="detached"}`
		if n := after[detached] - before[detached]; n != want {
			b.Errorf("%s: %v clients were detached, want %v", c.name, n, want)
		}
		for _, p := range probes {
			_ = p.Close()
		}
		b.must(neighbour.Delete(b.ctx))
		b.must(each(append(end, neighbour), func(p *lab.RunningPod) error { return p.Gone(b.ctx) }))
	}
}
