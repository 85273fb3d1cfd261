// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

const (
	// outsideLimit is how long a process may be on the GPU without its share and without being named: two
	// looks of the watchdog, and two of this test's.
	outsideLimit = 2 * time.Second
	// honestLimit is how long an honest program may be refused after a fault: an agent whose pod is made
	// anew takes the longest.
	honestLimit = 90 * time.Second
)

var (
	soakFaults = flag.Int("mps-faults", 500, "with -long: how many faults TestMPSSoak has")
	soakTime   = flag.Duration("mps-time", 2*time.Hour, "with -long: how long TestMPSSoak has faults at most")
	soakSeed   = flag.Int64("mps-seed", 1, "with -long: the seed of TestMPSSoak")
)

// shareFault is something that can go wrong with the shares of GPU 0.
type shareFault struct {
	name string
	// weight is how often it comes: those that take long come seldom.
	weight int
	// happen is what happens to the node; nil if the fault is the program's own.
	happen func(*shareSoak) error
	// env and door are those of a program that comes then; nil if an honest one does.
	env  []string
	door string
}

// shareFaults are the faults of TestMPSSoak.
func shareFaults() []shareFault {
	const pipe, percent = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	kill := func(program string) func(*shareSoak) error {
		return func(s *shareSoak) error { return s.signal(program, "KILL") }
	}
	const control, server = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
	return []shareFault{
		{name: "daemon killed", weight: 6, happen: kill(control)},
		{name: "server killed", weight: 6, happen: kill(server)},
		{name: "daemon killed, variables unset", weight: 4, happen: kill(control), env: []string{"-u", pipe, "-u", percent}},
		{name: "server killed, variables unset", weight: 4, happen: kill(server), env: []string{"-u", pipe, "-u", percent}},
		{name: "daemon hangs", weight: 2, happen: func(s *shareSoak) error {
			err := s.signal(control, "STOP")
			time.Sleep(time.Duration(s.random.IntN(4000)) * time.Millisecond)
			return errors.Join(err, s.signal(control, "CONT"))
		}},
		{name: "socket stale", weight: 3, happen: func(s *shareSoak) error {
			return errors.Join(s.kill(agent.Supervisor), s.signal(control, "KILL"))
		}},
		{name: "socket removed", weight: 3, happen: func(*shareSoak) error {
			found, err := filepath.Glob(node.File("/var/lib/gpu-agent/mps/GPU-*/control/control"))
			for _, path := range found {
				err = errors.Join(err, os.Remove(path))
			}
			return err
		}},
		{name: "supervisor killed", weight: 5, happen: func(s *shareSoak) error { return s.kill(agent.Supervisor) }},
		{name: "agent killed", weight: 1, happen: func(s *shareSoak) error { return agent.Crash(s.ctx) }},
		{name: "client killed", weight: 6, happen: (*shareSoak).killClient},
		{name: "compute mode changed", weight: 2, happen: func(s *shareSoak) error { return driver.Setup(s.ctx, 0, `{"compute": "default"}`) }},
		{name: "variables unset", weight: 6, env: []string{"-u", pipe, "-u", percent}},
		{name: "environment empty", weight: 4, env: []string{"-i"}},
		{name: "directory misspelt", weight: 4, env: []string{pipe + "=/usr/lib/gpu-agent/msp"}},
		{name: "directory empty", weight: 4, env: []string{pipe + "=/tmp"}},
		{name: "percentage raised", weight: 4, env: []string{percent + "=100"}},
		{name: "static CUDA runtime", weight: 4, env: []string{"-u", pipe}, door: "query"},
		{name: "another namespace of libraries", weight: 3, env: []string{"-u", pipe}, door: "dlmopen"},
	}
}

// shareSoak is a node with a GPU under MPS, and pods with shares of it.
type shareSoak struct {
	*bench
	random *rand.Rand
	pods   []*lab.RunningPod

	mu sync.Mutex // guards what follows
	// since is when each process outside its share was first seen; unnamed are those that were not named in
	// time.
	since   map[int]time.Time
	unnamed []string
	outside int
	looks   int
}

// mpsProcesses are the node's processes of a program of MPS.
func mpsProcesses(program string) (found []int) {
	dirs, _ := filepath.Glob(node.File("/proc/[0-9]*"))
	for _, dir := range dirs {
		command, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		args := strings.Split(string(command), "\x00")
		daemon := program != "nvidia-cuda-mps-control" || slices.Contains(args, "-f")
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && filepath.Base(args[0]) == program && daemon {
			found = append(found, pid)
		}
	}
	return found
}

// signal sends a signal to a program of MPS. One that does not run just now is no error.
func (s *shareSoak) signal(program, signal string) error {
	for _, pid := range mpsProcesses(program) {
		if out, err := node.Exec(s.ctx, "kill", "-"+signal, strconv.Itoa(pid)); err != nil && !strings.Contains(string(out)+err.Error(), "No such process") {
			return err
		}
	}
	return nil
}

// kill kills a process of the agent's program, if there is one just now.
func (s *shareSoak) kill(which func() (lab.Process, error)) error {
	p, err := which()
	if err != nil {
		return nil
	}
	return node.Signal(s.ctx, p, "KILL")
}

// killClient kills a client that has memory.
func (s *shareSoak) killClient() error {
	k, pod, err := s.honest()
	if err != nil {
		return err
	}
	defer k.Close()
	all, err := pod.Processes(s.ctx, "main", lab.ProbeProgram)
	for _, p := range all {
		err = errors.Join(err, node.Signal(s.ctx, p, "KILL"))
	}
	return err
}

// honest starts an honest program in one of the pods, as often as it takes until CUDA lets it in.
func (s *shareSoak) honest() (*lab.Probe, *lab.RunningPod, error) {
	var last error
	for began := time.Now(); time.Since(began) < honestLimit; time.Sleep(200 * time.Millisecond) {
		pod := s.pods[s.random.IntN(len(s.pods))]
		k, err := pod.Probe(s.ctx, "main", nil)
		if err != nil {
			return nil, nil, err
		}
		a, err := k.Ask("take cuMemAlloc_v2 %d 1", chunk)
		if err == nil && a.Result() == lab.Success {
			return k, pod, nil
		}
		_ = k.Close()
		if last = err; err == nil {
			last = fmt.Errorf("it says %s", a)
		}
	}
	return nil, nil, fmt.Errorf("an honest program is refused after %v: %w", honestLimit, last)
}

// come has a program come with an environment of its own, and returns what CUDA answers it.
func (s *shareSoak) come(f shareFault) string {
	args := []string{}
	if f.door != "" {
		args = []string{"-door", f.door}
	}
	k, err := s.pods[s.random.IntN(len(s.pods))].Probe(s.ctx, "main", f.env, args...)
	s.must(err)
	defer k.Close()
	answered := make(chan string, 1)
	go func() {
		a, err := k.Ask("take cuMemAlloc_v2 %d 1", chunk)
		switch {
		case err != nil:
			answered <- "it has ended"
		case a.Result() == lab.Success:
			answered <- "held"
		default:
			answered <- "refused with " + a.Result()
		}
	}()
	select {
	case said := <-answered:
		time.Sleep(time.Duration(s.random.IntN(1000)) * time.Millisecond)
		return said
	case <-time.After(6 * time.Second):
		return "waits"
	}
}

// watch looks at the GPU all the time, by the hardware and by the agent's status.
func (s *shareSoak) watch(ctx context.Context) {
	for ctx.Err() == nil {
		now := time.Now()
		all, err := driver.OutsideMPS(ctx, 0)
		status, unread := agent.Status(ctx)
		s.mu.Lock()
		switch {
		case err != nil || unread != nil || len(status.GPUs) == 0:
			clear(s.since) // an agent that is just made anew has not looked
		default:
			s.looks++
			maps.DeleteFunc(s.since, func(pid int, _ time.Time) bool { return !slices.Contains(all, pid) })
			for _, pid := range all {
				if s.since[pid].IsZero() {
					s.since[pid] = now
					s.outside++
				}
				if is := time.Since(s.since[pid]); is > outsideLimit && status.GPUs[0].Intruders == 0 {
					s.unnamed = append(s.unnamed, fmt.Sprintf("process %d for %v", pid, is.Round(time.Millisecond)))
				}
			}
		}
		s.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(300 * time.Millisecond):
		}
	}
}

// TestMPSSoak: faults at random on a real node. No process is on the GPU without its share for more than
// two looks without being named, and an honest program is let in after each. What became of the programs
// that came is counted. The driver, and so every figure, is emulated.
func TestMPSSoak(t *testing.T) {
	if !*long {
		t.Skip("make soak runs it, with -long")
	}
	b := begin(t, oneShared, oneSharedOffers)
	b.redeploy(lab.DeployOptions{Partitions: oneUnderMPS, Components: []string{"mps"}})
	b.underMPS(oneSharedOffers)
	s := &shareSoak{bench: b, random: rand.New(rand.NewPCG(42, uint64(*soakSeed))), since: map[int]time.Time{}}
	for i := range 3 {
		s.pods = append(s.pods, b.tenant(fmt.Sprintf("share-%d", i), 20))
	}
	ctx, cancel := context.WithCancel(b.ctx)
	var watching sync.WaitGroup
	watching.Go(func() { s.watch(ctx) })
	defer watching.Wait()
	defer cancel()

	var bag []shareFault
	for _, f := range shareFaults() {
		bag = append(bag, slices.Repeat([]shareFault{f}, f.weight)...)
	}
	said, done, refused, slowest := map[string]int{}, 0, 0, time.Duration(0)
	for began := time.Now(); done < *soakFaults && time.Since(began) < *soakTime; done++ {
		f := bag[s.random.IntN(len(bag))]
		if f.happen != nil {
			if err := f.happen(s); err != nil {
				t.Errorf("fault %d, %s: %v", done, f.name, err)
			}
		}
		if f.env != nil {
			said[f.name+": "+s.come(f)]++
		}
		fell := time.Now()
		k, _, err := s.honest()
		if err != nil {
			refused++
			t.Errorf("fault %d, %s: %v", done, f.name, err)
			continue
		}
		slowest = max(slowest, time.Since(fell))
		_ = k.Close()
	}
	b.must(agent.AwaitStatus(b.ctx, time.Minute, "all to be right again", func(st lab.Status) error {
		if m := st.GPUs[0].MPS; m == nil || m.Trouble != "" {
			return fmt.Errorf("GPU 0 has %+v", m)
		}
		return nil
	}))
	b.computeMode(computeExclusive)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(said)) {
		t.Logf("%3d  %s", said[name], name)
	}
	t.Logf("%d faults (emulated): %d processes outside their share, %d of them unnamed, %d honest programs refused for good, "+
		"the slowest let in after %v; %d looks", done, s.outside, len(s.unnamed), refused, slowest.Round(time.Millisecond), s.looks)
	if len(s.unnamed) > 0 {
		t.Errorf("not named: %q", s.unnamed[:min(len(s.unnamed), 10)])
	}
	if s.looks < done {
		t.Errorf("the test looked %d times at %d faults", s.looks, done)
	}
}

// TestMPSStart: a container with a share through MPS starts as soon as one whose containers take turns, but
// for 50 ms, in the middle of many.
func TestMPSStart(t *testing.T) {
	if !*long {
		t.Skip("make soak runs it, with -long")
	}
	b := begin(t, oneShared, oneSharedOffers)
	file := strings.Replace(oneUnderMPS, "    - devices: [1, 2,", "    - devices: [1]\n      mode: shared\n      replicas: 2\n    - devices: [2,", 1)
	b.redeploy(lab.DeployOptions{Partitions: file, Components: []string{"mps"}})
	b.underMPS(map[string]int{lab.Memory: units, lab.Replicas: 2})
	took := map[string][]time.Duration{}
	for i := range 20 {
		for kind, resource := range map[string]string{"share": lab.Memory, "turns": lab.Replicas} { // in either order
			began := time.Now()
			pod := b.pod(fmt.Sprintf("%s-%d", kind, i), resource, 1)
			b.must(pod.Running(b.ctx))
			took[resource] = append(took[resource], time.Since(began))
			b.must(pod.Delete(b.ctx))
		}
	}
	middle := func(all []time.Duration) time.Duration {
		slices.Sort(all)
		return all[len(all)/2]
	}
	with, without := middle(took[lab.Memory]), middle(took[lab.Replicas])
	t.Logf("with a share %v, taking turns %v (p50 of %d each, emulated)", with.Round(time.Millisecond), without.Round(time.Millisecond), 20)
	if with > without+50*time.Millisecond {
		t.Errorf("a container with a share starts %v later", with-without)
	}
}
