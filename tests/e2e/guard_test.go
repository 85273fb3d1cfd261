// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/lab"
)

// oneShared has units on GPU 0 alone.
const oneShared = `version: v1
partitions:
  default:
    - devices: [0]
      mode: shared
    - devices: [1, 2, 3, 4, 5, 6, 7]
      mode: off
`

var oneSharedOffers = map[string]int{lab.Memory: units}

// redeploy deploys the agent with other options, and with the usual ones again
// when the test ends.
func (b *bench) redeploy(o lab.DeployOptions) {
	b.Helper()
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if b.Failed() {
			b.tell(ctx) // the next agent's log has nothing of it
		}
		usual, err := deploy(ctx, lab.DeployOptions{Partitions: o.Partitions})
		if err != nil {
			b.Errorf("deploy the agent as it was: %v", err)
			return
		}
		agent = usual
		for _, name := range o.Components {
			if err := node.RemoveComponent(ctx, name); err != nil {
				b.Error(err)
			}
		}
	})
	var err error
	agent, err = deploy(b.ctx, o)
	b.must(err)
}

// bystander is a container beside an offender, with a process that has memory.
type bystander struct {
	pod       *lab.RunningPod
	container string
	probe     *lab.Probe
	processes map[string]lab.Process
}

// bystander takes some memory and notes who lives in the container.
func (b *bench) bystander(pod *lab.RunningPod, container string) *bystander {
	b.Helper()
	s := &bystander{pod: pod, container: container, probe: b.probe(pod, container, nil), processes: map[string]lab.Process{}}
	b.take(s.probe, chunk, 32)
	all, err := pod.Processes(b.ctx, container, "")
	b.must(err)
	for _, p := range all {
		s.processes[fmt.Sprintf("%s/%s, %s", pod.Name, container, p)] = p
	}
	if len(all) < 2 { // its first and the probe
		b.Fatalf("container %s of %s has the processes %v", container, pod, all)
	}
	return s
}

// unharmed checks that a bystander's processes live and its memory is its own.
func (b *bench) unharmed(s *bystander) {
	b.Helper()
	if err := hurt(s.processes); err != nil {
		b.Error(err)
		return
	}
	b.take(s.probe, chunk, 1)
	if used := b.used(s.pod, s.container, 0); used < 33*chunk {
		b.Errorf("container %s of %s has %d bytes, want its %d and more", s.container, s.pod, used, 33*chunk)
	}
}

// metric waits until a metric has a value.
func (b *bench) metric(name string, want float64) {
	b.Helper()
	b.must(lab.Await(b.ctx, 30*time.Second, name, func(ctx context.Context) error {
		m, err := agent.Metrics(ctx)
		if got, ok := m[name]; err == nil && (!ok || got != want) {
			err = fmt.Errorf("it is %g (there: %v), want %g: %v", got, ok, want, ours(m))
		}
		return err
	}))
}

// direct is how a program reaches the driver's own library, past the cap's.
var direct = struct{ env, args []string }{[]string{"LIBCUDA=" + lib.RealCUDA}, []string{"-door", "path"}}

// breach has a program of a container take twice its cap past the library, and
// returns how long after the container's first process was at its end.
func (b *bench) breach(pod *lab.RunningPod, container string, limit uint64) time.Duration {
	b.Helper()
	first, err := pod.Process(b.ctx, container)
	b.must(err)
	k := b.probe(pod, container, direct.env, direct.args...)
	b.take(k, limit/4, 1)
	over := time.Now()
	// The answer to this may be lost with its container.
	if a, err := k.Ask("take cuMemAlloc_v2 %d 7", limit/4); err == nil && a.Result() != lab.Success {
		b.Fatalf("past the library: %s", a)
	}
	_, ended, err := node.End(b.ctx, 30*time.Second, first)
	b.must(err)
	return ended.Sub(over)
}

// A program that goes round the library and takes twice its cap is ended, it
// alone, and its pod and the agent say so; for the second time its pod is
// evicted, where that is deployed. Who has no allocation at all is reported, and ended
// where the operator wants it; who is of no pod is counted.
func TestWatchdog(t *testing.T) {
	const limit = 4 * giB
	b := begin(t, oneShared, oneSharedOffers)
	began := time.Now()
	gpu := driver.GPUs[0]
	unallocated := func(kind string) string {
		return fmt.Sprintf(`gpu_agent_unallocated_processes{gpu=%q,kind=%q}`, gpu.UUID, kind)
	}
	options := lab.DeployOptions{Partitions: oneShared, Components: []string{"evict"}, Env: map[string]string{"GPU_AGENT_EVICT_AFTER": "2"}}
	if !testing.Short() {
		b.redeploy(options)
	}

	neighbour := b.bystander(b.tenant("neighbour", 8), "main")
	offender := b.create(lab.Pod{Name: "offender", Containers: []lab.Container{
		b.container("main", map[string]int{lab.Memory: limit / giB}), b.container("beside", map[string]int{lab.Memory: 2})}})
	b.must(offender.Running(b.ctx))
	beside := b.bystander(offender, "beside")

	b.sub("round the library, within the cap", func(b *bench) {
		k := b.probe(offender, "main", direct.env, direct.args...)
		b.take(k, limit/4, 3)
		b.memory(offender, "main", 0, "that the watchdog alone holds it", func(c lab.ContainerStatus) error {
			if c.CapMiB == nil || c.UsedMiB == nil || c.Guarantee != "watchdog" || *c.UsedMiB <= limit/miB*3/4 || *c.UsedMiB > limit/miB {
				return errors.New("want what it has, by the watchdog's eyes")
			}
			return nil
		})
		b.memory(offender, "beside", 0, "that the library holds it", func(c lab.ContainerStatus) error {
			if c.Guarantee != "api" {
				return errors.New("want the api")
			}
			return nil
		})
		b.must(k.Close())
	})
	if b.Failed() {
		return
	}

	b.sub("over the cap", func(b *bench) {
		took := b.breach(offender, "main", limit)
		b.Logf("from the allocations' begin to the end of the container's first process: %d ms", took.Milliseconds())
		b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, offender.Name, "names pod, container, use, GPU and cap", func(e lab.Event) bool {
			use := regexp.MustCompile(`container main of pod work/offender uses \d+\.\d\d GiB of GPU 0 \(` + regexp.QuoteMeta(gpu.UUID) + `\), more than its cap of 4\.00 GiB`)
			return e.Type == "Warning" && e.Reason == "CapExceeded" && use.MatchString(e.Message)
		}))
		b.must(offender.InState(b.ctx, time.Minute, "to run again", func(s lab.PodState) error {
			if c := s.Containers["main"]; c.Restarts != 1 || !c.Ready || c.LastExit != 137 {
				return fmt.Errorf("its container was started again %d times, ready %v, after exit code %d", c.Restarts, c.Ready, c.LastExit)
			}
			if c := s.Containers["beside"]; c.Restarts != 0 || !c.Ready {
				return fmt.Errorf("the container beside it was started again %d times: %w", c.Restarts, lab.ErrNever)
			}
			return nil
		}))
		b.unharmed(neighbour)
		b.unharmed(beside)
		b.metric(`gpu_agent_cap_kills_total{reason="over"}`, 1)
		b.metric(`gpu_agent_cap_breach_to_end_seconds_count`, 1)
		m, err := agent.Metrics(b.ctx)
		b.must(err)
		b.Logf("by the agent's own word it took %.0f ms from the breach to the end", 1000*m["gpu_agent_cap_breach_to_end_seconds_sum"])
		s, err := agent.Status(b.ctx)
		if err != nil || s.Watchdog.State != "running" || s.Watchdog.Kills != 1 {
			b.Errorf("the status has the watchdog as %+v (%v), want it to run and one kill", s.Watchdog, err)
		}
	})
	if b.Failed() || testing.Short() { // who else is ended, and who is not, is for internal/guard
		return
	}

	b.sub("for the second time", func(b *bench) {
		took := b.breach(offender, "main", limit)
		b.Logf("from the allocations' begin to the end of the container's first process: %d ms", took.Milliseconds())
		b.must(offender.Gone(b.ctx))
		b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, offender.Name, "says that it was evicted", func(e lab.Event) bool {
			return e.Reason == "CapEvicted" && strings.Contains(e.Message, "2 offences")
		}))
		b.metric(`gpu_agent_cap_kills_total{reason="over"}`, 2)
		b.metric(`gpu_agent_cap_evictions_total`, 1)
		b.unharmed(neighbour)
		b.audited(began, "the eviction", func(l line) bool {
			return l.Event == "evicted" && l.Namespace == lab.PodNamespace && l.Pod == offender.Name && l.UID != "" && l.Reason == "CapEvicted" && strings.Contains(l.Message, "2 offences")
		})
		all, err := journal()
		b.must(err)
		kills := slices.DeleteFunc(all, func(l line) bool { return l.Event != "killed" || l.Time.Before(began) })
		if len(kills) != 2 {
			b.Errorf("the journal has %d kills, want 2: %+v", len(kills), kills)
		}
		for _, l := range kills {
			if l.Pod != offender.Name || l.Container != "main" || l.GPU != gpu.UUID || l.Index == nil || *l.Index != 0 || l.Reason != "CapExceeded" {
				b.Errorf("a kill was written down as %+v", l)
			}
		}
	})

	// Both have the library from the node, one all devices, as it is privileged,
	// and the other those that it was told to mount.
	ways := []string{"mounts", "privileged"}
	intrude := lab.Pod{Name: "intruder"}
	for _, name := range ways {
		c := b.container(name, nil)
		c.Privileged = name == "privileged"
		c.Mounts = append(c.Mounts,
			lab.Mount{Host: "/usr/lib/x86_64-linux-gnu/libcuda.so." + driver.Version, Path: "/usr/lib/x86_64-linux-gnu/libcuda.so.1"},
			lab.Mount{Host: "/run/nvidia-persistenced", Path: "/run/nvidia-persistenced"})
		if !c.Privileged {
			for _, device := range append(slices.Clone(lab.ControlDevices), gpu.Device()) {
				c.Mounts = append(c.Mounts, lab.Mount{Host: device, Path: device})
			}
		}
		intrude.Containers = append(intrude.Containers, c)
	}
	intruder := b.create(intrude)
	b.must(intruder.Running(b.ctx))
	first := map[string]lab.Process{}
	for _, name := range ways {
		p, err := intruder.Process(b.ctx, name)
		b.must(err)
		first[name] = p
		b.take(b.probe(intruder, name, []string{"CUDA_VISIBLE_DEVICES=" + gpu.UUID}), giB, 2)
	}
	b.sub("intruders are reported", func(b *bench) {
		for _, name := range ways {
			b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, intruder.Name, "says that "+name+" is an intruder", func(e lab.Event) bool {
				return e.Type == "Warning" && e.Reason == "Intruder" && strings.Contains(e.Message, "container "+name+" of pod work/intruder") &&
					strings.Contains(e.Message, gpu.UUID) && !strings.Contains(e.Message, "ended")
			}))
		}
		b.metric(unallocated("intruder"), 2)
		b.must(lab.Holds(b.ctx, 2*time.Second, "while intruders are reported", func(ctx context.Context) error {
			if err := hurt(first); err != nil {
				return err
			}
			s, err := agent.Status(ctx)
			if err == nil && (s.GPUs[0].Intruders != 2 || s.Watchdog.Intruders != 2) {
				err = fmt.Errorf("the status has %d intruders on the GPU now, %d in all, want two", s.GPUs[0].Intruders, s.Watchdog.Intruders)
			}
			return err
		}))
		b.unharmed(neighbour)
	})
	if b.Failed() {
		return
	}

	options.Env["GPU_AGENT_INTRUDERS"] = "end"
	options.Env["GPU_AGENT_EVICT_AFTER"] = "0" // two intruders in a pod are its two offences
	var err error
	agent, err = deploy(b.ctx, options)
	b.must(err)
	b.sub("intruders are ended", func(b *bench) {
		for _, name := range ways {
			_, _, err := node.End(b.ctx, 30*time.Second, first[name])
			b.must(err)
		}
		b.must(intruder.InState(b.ctx, time.Minute, "to run again", func(s lab.PodState) error {
			for _, name := range ways {
				if c := s.Containers[name]; c.Restarts != 1 || c.LastExit != 137 {
					return fmt.Errorf("its container %s was started again %d times after exit code %d", name, c.Restarts, c.LastExit)
				}
			}
			return nil
		}))
		b.metric(`gpu_agent_cap_kills_total{reason="intruder"}`, 2)
		b.metric(`gpu_agent_cap_kills_total{reason="over"}`, 0)
		b.unharmed(neighbour)
	})

	b.sub("a process of no pod", func(b *bench) {
		stranger, err := driver.Occupy(b.ctx, 0, 1024)
		b.must(err)
		ended := false
		b.Cleanup(func() {
			if !ended {
				if err := driver.Vacate(context.Background(), stranger); err != nil {
					b.Error(err)
				}
			}
		})
		b.metric(unallocated("no-pod"), 1)
		b.must(lab.Holds(b.ctx, 2*time.Second, "with a process of no pod", func(ctx context.Context) error {
			if !node.Lives(stranger) {
				return errors.New("it was ended")
			}
			s, err := agent.Status(ctx)
			if err == nil && (s.GPUs[0].NoPod != 1 || s.GPUs[0].Intruders != 0) {
				err = fmt.Errorf("the status has %d processes of no pod and %d of intruders, want one and none", s.GPUs[0].NoPod, s.GPUs[0].Intruders)
			}
			return err
		}))
		ended = true
		b.must(driver.Vacate(b.ctx, stranger))
		b.metric(unallocated("no-pod"), 0)
		b.unharmed(neighbour)
	})

	b.sub("a container that the runtime does not list", func(b *bench) {
		notListed(b, unallocated("unlisted"))
		b.unharmed(neighbour)
	})
}

// notListed has a process of a pod go on in the cgroup of the pod's sandbox, as all do
// under a sandboxed runtime, and then take more than the pod may have.
func notListed(b *bench, metric string) {
	const limit = 4 * giB
	pod := b.tenant("sandboxed", limit/giB)
	k := b.probe(pod, "main", direct.env, direct.args...)
	var all []lab.Process
	b.must(lab.Await(b.ctx, time.Minute, "the probe's process", func(ctx context.Context) (err error) {
		if all, err = pod.Processes(ctx, "main", lab.ProbeProgram); err == nil && len(all) != 1 {
			err = fmt.Errorf("there are %v", all)
		}
		return err
	}))
	// Before it uses the GPU: whose a process is that was seen there is remembered.
	b.must(pod.IntoSandbox(b.ctx, all[0]))
	b.take(k, giB, 1)
	b.metric(metric, 1)
	b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, pod.Name, "says that a container is not listed", func(e lab.Event) bool {
		return e.Type == "Warning" && e.Reason == "ContainerNotListed" && strings.Contains(e.Message, "its limit is 4.00 GiB")
	}))
	if !node.Lives(all[0]) {
		b.Fatal("within the cap, it was ended")
	}
	// The answer to this may be lost with its container.
	if a, err := k.Ask("take cuMemAlloc_v2 %d 7", giB); err == nil && a.Result() != lab.Success {
		b.Fatalf("past the library: %s", a)
	}
	_, _, err := node.End(b.ctx, 30*time.Second, all[0])
	b.must(err)
	b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, pod.Name, "says that it was over the cap", func(e lab.Event) bool {
		return e.Reason == "CapExceeded" && strings.Contains(e.Message, "does not list") && strings.Contains(e.Message, "more than its cap of 4.00 GiB")
	}))
	b.metric(`gpu_agent_cap_kills_total{reason="over"}`, 1)
	b.metric(metric, 0)
}
