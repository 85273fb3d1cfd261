// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/shown"
)

// What the demo's GPUs are: an H100-80GB reports 81,559 MiB, of which some are
// the driver's own, so 79 whole units of 1 GiB can be given away.
const (
	gpuModel    = "H100-80GB"
	gpuCount    = 8
	unitsPerGPU = 79
	// multiprocessors are those of each GPU.
	multiprocessors = 132

	largeProfile, smallProfile = "3g.40gb", "1g.10gb"
)

const allShared = `version: v1
partitions:
  default:
    - devices: all
      mode: shared
`

// demo is what the steps pass on to each other.
type demo struct {
	*screen
	kit    *lab.Kit
	node   *lab.Node
	driver *lab.Driver
	agent  *lab.Agent
	shared lab.GPUInfo // the GPU that the first two pods share
	sliced int         // the index of the GPU in MIG mode
	config string      // the file by which kubectl on this machine reaches the node's API server
}

func up(ctx context.Context) (err error) {
	s := &screen{out: os.Stdout, began: time.Now()}
	kit, err := lab.NewKit(s)
	if err != nil {
		return err
	}
	d := &demo{screen: s, kit: kit}
	fmt.Println("A real Kubernetes node on this machine, with GPUs that are emulated at the driver's interface.")
	fmt.Printf("Everything is kept in %s.\n", kit.Cache)
	for _, b := range append(kit.Steps(), lab.Step{Name: "kubectl gpu, the plugin for kubectl", Run: kit.BuildPlugin}) {
		if err := d.step("Build what is missing: "+b.Name, func() error { return b.Run(ctx) }); err != nil {
			return err
		}
	}
	defer func() {
		if err != nil && d.node != nil {
			fmt.Printf("\nThe node still runs, to be looked at:\n  %s get pods -A\nmake demo-down ends it.\n", d.node.KubectlCommand())
		}
	}()
	for _, part := range []struct {
		title string
		do    func(context.Context) error
	}{
		{"Start a Kubernetes node in namespaces of its own", d.startNode},
		{fmt.Sprintf("Lay down an emulated NVIDIA driver with %d GPUs of type %s", gpuCount, gpuModel), d.layDriver},
		{"Deploy the agent as its DaemonSet: deployments/base with components/dra and mps", d.deploy},
		{"Two pods ask for 24 GiB of GPU memory each: both land on one GPU", d.twoPods},
		{"A third pod asks for 100 GiB, more than any GPU has: it is refused", d.refusal},
		{"A spot pod has what is free, is parked for a guaranteed pod, and goes on", d.park},
		{"Edit the partition ConfigMap: idle GPUs turn whole, one to MIG on demand", d.recut},
		{"A pod asks for one whole GPU", d.wholePod},
		{"Two pods ask for MIG instances, which are made when they start", d.instances},
		{"gpu-agent status", d.status},
		{"Dynamic resource allocation: a GPU is whole, then cut, then shared, as pods ask", d.dynamic},
		{"Two pods have a quarter and a half of a GPU: of its memory, and of its multiprocessors", d.share},
		{"The pod that README shows, and kubectl gpu", d.readme},
	} {
		if err := d.step(part.title, func() error { return part.do(ctx) }); err != nil {
			return err
		}
	}
	d.farewell()
	return nil
}

func (d *demo) startNode(ctx context.Context) (err error) {
	if err := d.kit.Down(ctx, nodeName); err != nil { // an earlier demo's
		return err
	}
	if d.node, err = d.kit.Up(ctx, lab.NodeOptions{Name: nodeName}); err != nil {
		return err
	}
	if err := d.node.Load(ctx, d.kit.AgentArchive()); err != nil {
		return err
	}
	return d.node.Namespace(ctx, lab.PodNamespace)
}

func (d *demo) layDriver(ctx context.Context) (err error) {
	d.driver, err = d.node.LayDriver(ctx, lab.DriverOptions{Root: "/", Model: gpuModel, Count: gpuCount})
	if err != nil {
		return err
	}
	d.say("driver %s, %d × %s", d.driver.Version, len(d.driver.GPUs), d.driver.GPUs[0].Model)
	return nil
}

func (d *demo) deploy(ctx context.Context) (err error) {
	d.agent, err = d.node.Deploy(ctx, lab.DeployOptions{Components: []string{"dra", "mps"}, Partitions: allShared,
		Env: map[string]string{"GPU_AGENT_PARK_MEMORY": fmt.Sprintf("%dGiB", parkMemory)}})
	if err != nil {
		return err
	}
	if err := d.node.AwaitAllocatable(ctx, map[string]int{lab.Memory: gpuCount * unitsPerGPU, lab.GPU: 0}); err != nil {
		return err
	}
	d.say("the node offers %s: %d (%d GPUs × %d units of 1 GiB)", lab.Memory, gpuCount*unitsPerGPU, gpuCount, unitsPerGPU)
	return nil
}

// startPod makes a pod with one container, waits until it runs, and shows what
// its container sees. It returns the one GPU that it has.
func (d *demo) startPod(ctx context.Context, name, resource string, count int) (lab.GPUInfo, error) {
	began := time.Now()
	probe, err := lab.ProbeMount(ctx)
	if err != nil {
		return lab.GPUInfo{}, err
	}
	pod, err := d.node.CreatePod(ctx, lab.Pod{Name: name, Containers: []lab.Container{{
		Resources: map[string]int{resource: count}, Mounts: []lab.Mount{probe},
	}}})
	if err != nil {
		return lab.GPUInfo{}, err
	}
	if err := pod.Running(ctx); err != nil {
		return lab.GPUInfo{}, err
	}
	d.say("pod %s (%s: %d) runs after %.1f s; inside its container:", name, resource, count, time.Since(began).Seconds())
	commands := []string{"ls /dev/nvidia*", "dlopen-check libcuda.so.1", "nvidia-smi"}
	onInstance := resource != lab.Memory && resource != lab.GPU
	if onInstance {
		commands = []string{"ls /dev/nvidia-caps", "nvidia-smi -L"}
	}
	for _, command := range commands {
		out, err := pod.Exec(ctx, "", "sh", "-c", command)
		if err != nil {
			return lab.GPUInfo{}, err
		}
		d.say("  $ %s", command)
		d.say("    %s", strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "\n    "))
	}
	if resource == lab.Memory {
		if err := d.fill(ctx, pod, count); err != nil {
			return lab.GPUInfo{}, err
		}
	}
	seen, err := pod.Inside(ctx, "")
	if err != nil {
		return lab.GPUInfo{}, err
	}
	minors := seen.GPUMinors()
	if len(minors) != 1 {
		return lab.GPUInfo{}, fmt.Errorf("pod %s sees the GPU nodes %v, and should see one", name, seen.Devices)
	}
	g, err := d.driver.ByMinor(minors[0])
	if err != nil {
		return lab.GPUInfo{}, err
	}
	want := append(slices.Clone(lab.ControlDevices), g.Device())
	if onInstance {
		// One node opens the GPU instance, one the compute instance in it.
		capability := func(path string) bool { return strings.HasPrefix(path, "/dev/nvidia-caps/") }
		all := len(seen.Devices)
		seen.Devices = slices.DeleteFunc(seen.Devices, capability)
		if n := all - len(seen.Devices); n != 2 {
			return lab.GPUInfo{}, fmt.Errorf("pod %s has %d capability nodes, and should have 2", name, n)
		}
	}
	if !sameSet(seen.Devices, want) {
		return lab.GPUInfo{}, fmt.Errorf("pod %s sees the nodes %v, and should see %v", name, seen.Devices, want)
	}
	if want := "libcuda.so." + d.driver.Version; filepath.Base(seen.CUDA) != want {
		return lab.GPUInfo{}, fmt.Errorf("pod %s finds %q for libcuda.so.1 (%s), and should find %s", name, seen.CUDA, seen.CUDAError, want)
	}
	return g, nil
}

// fill has a program in a pod's container take GPU memory, a GiB at a time, until
// it is refused; then it ends.
func (d *demo) fill(ctx context.Context, pod *lab.RunningPod, limit int) error {
	k, err := pod.Probe(ctx, "", nil)
	if err != nil {
		return err
	}
	answer, err := k.Ask("take cuMemAlloc_v2 %d 1000", 1<<30)
	if err := errors.Join(err, k.Close()); err != nil {
		return err
	}
	if got := answer.Bytes("count"); answer.Result() != lab.OutOfMemory || got != uint64(limit)-1 {
		return fmt.Errorf("a pod with %d GiB was given %d: %s", limit, got, answer)
	}
	d.say("  a program there calls cuMemAlloc for 1 GiB again and again: %d times with success, and then it", answer.Bytes("count"))
	d.say("  is told CUDA_ERROR_OUT_OF_MEMORY; its context, too, is within the %d GiB", limit)
	return nil
}

func sameSet(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

func (d *demo) twoPods(ctx context.Context) error {
	one, err := d.startPod(ctx, "one", lab.Memory, 24)
	if err != nil {
		return err
	}
	two, err := d.startPod(ctx, "two", lab.Memory, 24)
	if err != nil {
		return err
	}
	if one.UUID != two.UUID {
		return fmt.Errorf("the pods are on two GPUs, %s and %s, and should share one", one.UUID, two.UUID)
	}
	d.shared = one
	d.say("both have GPU %d, %s, whose device node is %s", one.Index, one.UUID, one.Device())
	return nil
}

func (d *demo) refusal(ctx context.Context) error {
	pod, err := d.node.CreatePod(ctx, lab.Pod{Name: "three", Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 100}}}})
	if err != nil {
		return err
	}
	state, err := pod.Refused(ctx)
	if err != nil {
		return err
	}
	d.say("kubectl get pod three says:")
	d.say("  status.reason:  %s", state.Reason)
	d.say("  status.message: %s", strings.ReplaceAll(wrap(state.Message), "\n", "\n                  "))
	if want := fmt.Sprintf("largest free block is %d units", unitsPerGPU); !strings.Contains(state.Message, want) {
		return fmt.Errorf("the message does not say that the %s", want)
	}
	return pod.Delete(ctx)
}

// parkMemory is the host memory for parked pods, parkedTakes what the parked program has on the GPU, in GiB.
const parkMemory, parkedTakes = 8, 4

// park lets a guaranteed pod take the room of a spot pod, and give it back.
func (d *demo) park(ctx context.Context) error {
	file := fmt.Sprintf(`version: v1
partitions:
  default:
    - devices: [%d]
      mode: shared
      spot: true
    - devices: %s
      mode: off
`, d.shared.Index, list(d.without(d.shared.Index)))
	d.say("%s", file)
	if err := d.agent.SetPartitions(ctx, file); err != nil {
		return err
	}
	const spot, free = lab.Memory + ".spot", unitsPerGPU - 2*24
	if err := d.node.AwaitAllocatable(ctx, map[string]int{lab.Memory: unitsPerGPU, spot: free}); err != nil {
		return err
	}
	d.say("the node offers %s: %d, what pods one and two leave of their GPU; --park-memory is %d GiB",
		spot, free, parkMemory)
	night, err := d.runs(ctx, "night", spot, free)
	if err != nil {
		return err
	}
	k, err := night.Probe(ctx, "", nil)
	if err != nil {
		return err
	}
	answers := func(format string, args ...any) (lab.Answer, error) {
		a, err := k.Ask(format, args...)
		if err == nil && a.Result() != lab.Success {
			err = fmt.Errorf("a program in pod night: %s", a)
		}
		return a, err
	}
	_, err = answers("take cuMemAlloc_v2 %d %d", 1<<30, parkedTakes)
	if err == nil {
		_, err = answers("mark 1")
	}
	if err != nil {
		return errors.Join(err, k.Close())
	}
	d.say("pod night (%s: %d) runs; a program there has %d GiB on the GPU, with contents", spot, free, parkedTakes)
	if err := errors.Join(d.takesAndGives(ctx, func() (*lab.RunningPod, error) { return d.runs(ctx, "urgent", lab.Memory, free) },
		func() (lab.Answer, error) { return answers("check 1") }), k.Close()); err != nil {
		return err
	}
	return night.Delete(ctx)
}

// takesAndGives has a guaranteed pod take the room of pod night, and end. check asks the program of pod night for its
// contents; while it is parked, it does not answer.
func (d *demo) takesAndGives(ctx context.Context, start func() (*lab.RunningPod, error),
	check func() (lab.Answer, error)) error {
	began := time.Now()
	urgent, err := start()
	if err != nil {
		return err
	}
	took := time.Since(began).Seconds()
	metrics, err := d.agent.Metrics(ctx)
	if err != nil {
		return err
	}
	if n := metrics["gpu_agent_spot_parked_containers"]; n != 1 {
		return fmt.Errorf("%g containers are parked, and one should be", n)
	}
	d.say("pod urgent (guaranteed, %s) runs after %.1f s in the same room: night is parked, its %d GiB are on the host",
		lab.Memory, took, parkedTakes)
	if err := d.sayPods(ctx, "night", "urgent"); err != nil {
		return err
	}
	if err := urgent.Delete(ctx); err != nil {
		return err
	}
	began = time.Now()
	a, err := check()
	if err != nil {
		return err
	}
	if a.Bytes("words") == 0 || a.Bytes("wrong") != 0 {
		return fmt.Errorf("the contents of pod night's memory after its park: %s", a)
	}
	d.say("pod urgent ends; %.1f s later night's program goes on, and finds each word that it has written", time.Since(began).Seconds())
	return d.sayPods(ctx, "night")
}

// sayPods shows pods as kubectl does, and checks that they run and never started again.
func (d *demo) sayPods(ctx context.Context, names ...string) error {
	out, err := d.node.Kubectl(ctx, nil, append([]string{"get", "pods", "-n", lab.PodNamespace}, names...)...)
	if err != nil {
		return err
	}
	d.say("  $ kubectl get pods %s", strings.Join(names, " "))
	d.say("    %s", strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "\n    "))
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); f[0] != "NAME" && (f[2] != "Running" || f[3] != "0") {
			return fmt.Errorf("pod %s is %s with %s restarts, and should run with none", f[0], f[2], f[3])
		}
	}
	return nil
}

func (d *demo) recut(ctx context.Context) error {
	var idle, stay []int
	for _, g := range d.driver.GPUs {
		if g.UUID != d.shared.UUID {
			idle = append(idle, g.Index)
		}
	}
	d.sliced = idle[len(idle)-1]
	whole := idle[len(idle)/2 : len(idle)-1]
	for _, g := range d.driver.GPUs {
		if g.Index != d.sliced && !slices.Contains(whole, g.Index) {
			stay = append(stay, g.Index)
		}
	}
	file := fmt.Sprintf(`version: v1
partitions:
  default:
    - devices: %s
      mode: shared
    - devices: %s
      mode: whole
    - devices: [%d]
      mode: mig
`, list(stay), list(whole), d.sliced)
	d.say("%s", file)
	if err := d.agent.SetPartitions(ctx, file); err != nil {
		return err
	}
	large, small := lab.MIG(largeProfile), lab.MIG(smallProfile)
	want := map[string]int{lab.Memory: len(stay) * unitsPerGPU, lab.GPU: len(whole), large: 2, small: 7}
	if err := d.node.AwaitAllocatable(ctx, want); err != nil {
		return err
	}
	if _, err := d.agent.AwaitState(ctx, "applied"); err != nil {
		return err
	}
	d.say("the node offers %s: %d and %s: %d; its label %s says applied", lab.Memory, want[lab.Memory], lab.GPU, want[lab.GPU], lab.StateLabel)
	d.say("GPU %d has no MIG instance yet; it offers every place that one could have: %s: %d, %s: %d and more",
		d.sliced, large, want[large], small, want[small])
	return nil
}

// instances starts pods on MIG instances that do not exist before.
func (d *demo) instances(ctx context.Context) error {
	for _, pod := range []struct{ name, profile string }{{"large", largeProfile}, {"small", smallProfile}} {
		g, err := d.startPod(ctx, pod.name, lab.MIG(pod.profile), 1)
		if err != nil {
			return err
		}
		if g.Index != d.sliced {
			return fmt.Errorf("pod %s has GPU %d, and should have an instance of GPU %d", pod.name, g.Index, d.sliced)
		}
	}
	return nil
}

func list(numbers []int) string {
	return strings.ReplaceAll(fmt.Sprint(numbers), " ", ", ")
}

func (d *demo) wholePod(ctx context.Context) error {
	g, err := d.startPod(ctx, "whole", lab.GPU, 1)
	if err != nil {
		return err
	}
	if g.UUID == d.shared.UUID {
		return fmt.Errorf("pod whole has GPU %d, which is shared", g.Index)
	}
	d.say("it has GPU %d, %s, to itself", g.Index, g.UUID)
	return nil
}

func (d *demo) status(ctx context.Context) error {
	// The kubelet tells who holds an allocation when it is asked, every few seconds.
	err := d.agent.AwaitStatus(ctx, time.Minute, "the holders' names", func(s lab.Status) error {
		named := map[string]bool{}
		for _, g := range s.GPUs {
			for _, h := range g.Holders {
				named[h.Pod] = true
			}
		}
		for _, name := range []string{"one", "two", "whole", "large", "small"} {
			if !named[name] {
				return errors.New("no holder is named " + name)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	out, err := d.agent.Command(ctx, "status")
	if err != nil {
		return err
	}
	d.say("%s", out)
	return nil
}

// dynamic has claims of one GPU in mode dynamic, which the scheduler gives out: what does not
// fit beside the holders waits for their end.
func (d *demo) dynamic(ctx context.Context) error {
	if err := d.node.DeletePods(ctx); err != nil {
		return err
	}
	file := fmt.Sprintf(`version: v1
partitions:
  default:
    - devices: [%d]
      mode: dynamic
      api: dra
    - devices: %s
      mode: off
`, d.sliced, list(d.without(d.sliced)))
	d.say("%s", file)
	if err := d.agent.SetPartitions(ctx, file); err != nil {
		return err
	}
	if _, err := d.agent.AwaitState(ctx, "applied"); err != nil {
		return err
	}
	d.say("its devices can be had when the names that it had before have left the kubelet's lists, after a minute")
	const whole, half, memory = "gpu.example.com", "mig-" + largeProfile + ".example.com", "gpu-memory.example.com"
	var holders []*lab.RunningPod
	for _, next := range []struct {
		is     string
		claims []lab.Claim
	}{
		{"whole", []lab.Claim{{Name: "all", Class: whole}}},
		{"cut", []lab.Claim{{Name: "half-1", Class: half}, {Name: "half-2", Class: half}}},
		{"shared", []lab.Claim{{Name: "share-1", Class: memory, GiB: 20}, {Name: "share-2", Class: memory, GiB: 20}, {Name: "share-3", Class: memory, GiB: 20}}},
	} {
		pods, err := d.claim(ctx, next.claims, holders)
		if err != nil {
			return err
		}
		d.say("GPU %d is %s now", d.sliced, next.is)
		holders = pods
	}
	return nil
}

// claim starts a pod for each of several claims. Where others hold the GPU these have to end
// first, and what the scheduler says meanwhile is shown.
func (d *demo) claim(ctx context.Context, claims []lab.Claim, holders []*lab.RunningPod) (pods []*lab.RunningPod, err error) {
	for _, c := range claims {
		if err := d.node.CreateClaim(ctx, c); err != nil {
			return nil, err
		}
		pod, err := d.node.CreatePod(ctx, lab.Pod{Name: c.Name, Containers: []lab.Container{{Claims: []string{c.Name}}}})
		if err != nil {
			return nil, err
		}
		pods = append(pods, pod)
	}
	if len(holders) > 0 {
		message, err := pods[0].Unschedulable(ctx)
		if err != nil {
			return nil, err
		}
		d.say("pod %s, with a claim of class %s, waits; the scheduler says:", pods[0].Name, claims[0].Class)
		d.say("  %s", strings.ReplaceAll(wrap(message), "\n", "\n  "))
	}
	for _, pod := range holders {
		if err := pod.Delete(ctx); err != nil {
			return nil, err
		}
		d.say("pod %s ends", pod.Name)
	}
	began := time.Now()
	for i, pod := range pods {
		if err := pod.InState(ctx, 3*time.Minute, "to run", runs); err != nil {
			return nil, err
		}
		out, err := pod.Exec(ctx, "", "nvidia-smi", "-L")
		if err != nil {
			return nil, err
		}
		d.say("pod %s (%s) runs after %.1f s; inside its container nvidia-smi -L says:", pod.Name, claims[i].Class, time.Since(began).Seconds())
		d.say("  %s", strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "\n  "))
	}
	return pods, nil
}

// runs says what keeps a pod's container from running.
func runs(s lab.PodState) error {
	if s.Phase != "Running" {
		return errors.New("it does not run yet")
	}
	return nil
}

// share lets two pods compute on one GPU at the same time, each with a part of its multiprocessors (SMs).
func (d *demo) share(ctx context.Context) error {
	if err := errors.Join(d.node.DeletePods(ctx), d.node.DeleteClaims(ctx)); err != nil {
		return err
	}
	file := fmt.Sprintf(`version: v1
partitions:
  default:
    - devices: [%d]
      mode: shared
      compute: mps
    - devices: %s
      mode: off
`, d.shared.Index, list(d.without(d.shared.Index)))
	d.say("%s", file)
	if err := d.agent.SetPartitions(ctx, file); err != nil {
		return err
	}
	if err := d.node.AwaitAllocatable(ctx, map[string]int{lab.Memory: unitsPerGPU}); err != nil {
		return err
	}
	d.say("without \"compute: mps\" containers take turns, and each has the whole GPU in its turn; with it they run at the")
	d.say("same time, each below a ceiling that follows from its memory")
	ceilings := map[string]int{}
	for _, pod := range []struct {
		name         string
		gib, ceiling int
	}{{"quarter", 19, 25}, {"half", 39, 50}} {
		ceilings[pod.name] = pod.ceiling
		k, err := d.computes(ctx, pod.name, pod.gib)
		if k != nil {
			defer k.Close()
		}
		if err != nil {
			return err
		}
	}
	err := d.agent.AwaitStatus(ctx, 30*time.Second, "both to be held to their shares", func(s lab.Status) error {
		held := 0
		for _, c := range s.Containers {
			if c.Compute.Guarantee == "ceiling" && c.Compute.Ceiling == ceilings[c.Pod] {
				held++
			}
		}
		if held != len(ceilings) {
			return fmt.Errorf("%d of %d are: %v", held, len(ceilings), s.Containers)
		}
		return nil
	})
	if err != nil {
		return err
	}
	out, err := d.agent.Command(ctx, "status")
	if err != nil {
		return err
	}
	_, table, found := strings.Cut(string(out), "share of the compute")
	if !found {
		return fmt.Errorf("gpu-agent status does not say how the shares are held:\n%s", out)
	}
	table, _, _ = strings.Cut(table, "\n\n")
	d.say("gpu-agent status says how each is held, by what it sees of their processes:")
	d.say("  share of the compute%s", strings.ReplaceAll(strings.TrimRight(table, "\n"), "\n", "\n  "))
	return nil
}

// computes starts a pod with a share of a GPU, and a program in it. It says what the program has.
func (d *demo) computes(ctx context.Context, name string, gib int) (*lab.Probe, error) {
	pod, err := d.runs(ctx, name, lab.Memory, gib)
	if err != nil {
		return nil, err
	}
	k, err := pod.Probe(ctx, "", nil)
	if err != nil {
		return nil, err
	}
	memory, err := k.Ask("info")
	if err != nil {
		return k, err
	}
	sms, err := k.Ask("sms")
	if err == nil && (memory.Bytes("total") != uint64(gib)<<30 || sms.Result() != lab.Success) {
		err = fmt.Errorf("a program in pod %s has %s and %s", name, memory, sms)
	}
	if err != nil {
		return k, err
	}
	d.say("pod %-8s (%s: %d): a program in it has %2d GiB of %d, and CUDA tells it of %2d multiprocessors of %d",
		name, lab.Memory, gib, gib, unitsPerGPU, sms.Bytes("count"), multiprocessors)
	return k, nil
}

// runs starts a pod of one container that has so much of a resource and can run the probe, and waits until it runs.
func (d *demo) runs(ctx context.Context, name, resource string, n int) (*lab.RunningPod, error) {
	probe, err := lab.ProbeMount(ctx)
	if err != nil {
		return nil, err
	}
	pod, err := d.node.CreatePod(ctx, lab.Pod{Name: name, Containers: []lab.Container{{
		Resources: map[string]int{resource: n}, Mounts: []lab.Mount{probe}}}})
	if err == nil {
		err = pod.Running(ctx)
	}
	return pod, err
}

// without returns the indexes of all GPUs but one.
func (d *demo) without(index int) (others []int) {
	for _, g := range d.driver.GPUs {
		if g.Index != index {
			others = append(others, g.Index)
		}
	}
	return others
}

// tooLarge is a pod to ask about.
const tooLarge = "too-large"

// readme leaves the node as a reader of README has it: its GPUs are shared, and its example runs.
func (d *demo) readme(ctx context.Context) error {
	if err := errors.Join(d.node.DeletePods(ctx), d.node.DeleteClaims(ctx)); err != nil {
		return err
	}
	if err := d.agent.SetPartitions(ctx, allShared); err != nil {
		return err
	}
	if err := d.node.AwaitAllocatable(ctx, map[string]int{lab.Memory: gpuCount * unitsPerGPU}); err != nil {
		return err
	}
	page, err := shown.Read("README.md")
	if err != nil {
		return err
	}
	found := page.Manifests("kind: Pod")
	if len(found) != 1 {
		return fmt.Errorf("README shows %d pods, and should show one", len(found))
	}
	// An image that is on the node, and something to do.
	pod := strings.NewReplacer("your-cuda-image", lab.TestImage+"\n      command: [sh, -c, \"trap 'exit 0' TERM; sleep 1000000 & wait\"]",
		"{name: notebook}", "{name: notebook, namespace: "+lab.PodNamespace+"}").Replace(found[0])
	d.say("%s", found[0])
	if _, err := d.node.Kubectl(ctx, strings.NewReader(pod), "apply", "-f", "-"); err != nil {
		return err
	}
	if _, err := d.node.Kubectl(ctx, nil, "wait", "--for=condition=Ready", "pod/notebook", "-n", lab.PodNamespace, "--timeout=2m"); err != nil {
		return err
	}
	out, err := d.node.Kubectl(ctx, nil, "exec", "-n", lab.PodNamespace, "notebook", "--", "nvidia-smi")
	if err != nil {
		return err
	}
	if !strings.Contains(string(out), "/ 24576MiB") {
		return fmt.Errorf("README's pod does not see one GPU of 24576 MiB:\n%s", out)
	}
	d.say("it sees a GPU of 24 GiB:")
	d.say("%s", out)
	large, err := d.node.CreatePod(ctx, lab.Pod{Name: tooLarge, Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 100}}}})
	if err != nil {
		return err
	}
	if _, err := large.Refused(ctx); err != nil {
		return err
	}
	return d.plugin(ctx)
}

// plugin shows the commands of kubectl gpu, as people type them.
func (d *demo) plugin(ctx context.Context) error {
	dir, err := d.node.Dir("home")
	if err != nil {
		return err
	}
	text, err := d.node.Kubectl(ctx, nil, "config", "view", "--raw")
	if err != nil {
		return err
	}
	d.config = filepath.Join(dir, "config")
	if err := os.WriteFile(d.config, text, 0o600); err != nil {
		return err
	}
	for _, c := range []struct{ args, says string }{
		{"gpu", fmt.Sprintf("gpu-mem %d/%d", gpuCount*unitsPerGPU-24, gpuCount*unitsPerGPU)},
		{"gpu why pod/" + tooLarge + " -n " + lab.PodNamespace, "no GPU of this node has more than 79"},
		{"gpu usage --by pod", lab.PodNamespace + "/notebook"},
	} {
		if err := lab.Await(ctx, time.Minute, "kubectl "+c.args+" to say "+c.says, func(ctx context.Context) error {
			cmd := exec.CommandContext(ctx, d.kit.Bin("kubectl"), strings.Fields(c.args)...)
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(d.kit.Bin("kubectl"))+":"+os.Getenv("PATH"), "KUBECONFIG="+d.config)
			out, err := cmd.CombinedOutput()
			if err == nil && !strings.Contains(string(out), c.says) {
				err = errors.New("it does not")
			}
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			d.say("$ kubectl %s", c.args)
			d.say("  %s", strings.ReplaceAll(strings.TrimSpace(string(out)), "\n", "\n  "))
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// hint is a command to try, and what it is for.
type hint struct{ command, shows string }

func (d *demo) farewell() {
	fmt.Printf("\nAll of it is as it should be, after %.0f s. The node stays up, and the pod notebook of README runs on it. To look around:\n\n",
		time.Since(d.began).Seconds())
	fmt.Printf("  export KUBECONFIG=%s PATH=%s:$PATH\n", d.config, filepath.Dir(d.kit.Bin("kubectl")))
	for _, h := range []hint{
		{"kubectl gpu", "the GPUs, in a table"},
		{"kubectl gpu top", "what containers use of their GPU memory"},
		{"kubectl gpu usage --by pod", "who was granted how much, and used it"},
		{"kubectl gpu why pod/" + tooLarge + " -n " + lab.PodNamespace, "why it has no GPU"},
		{"kubectl gpu status " + nodeName, "what the agent knows"},
		{"kubectl port-forward -n " + lab.AgentNamespace + " ds/gpu-agent 9500", "the same as a page: http://localhost:9500/statusz"},
		{"kubectl edit configmap -n " + lab.AgentNamespace + " gpu-partitions", "lay the GPUs out another way, and watch:"},
		{"kubectl get events --watch", ""},
	} {
		fmt.Println(strings.TrimRight(fmt.Sprintf("  %-52s # %s", h.command, h.shows), "# "))
	}
	fmt.Printf(`
A pod to try, which runs nvidia-smi:

  kubectl run try -n %[1]s --image=%[2]s --restart=Never --overrides='{"spec": {"containers": [{"name": "try",
    "image": "%[2]s", "command": ["nvidia-smi"], "resources": {"limits": {"%[3]s": "16"}}}]}}'
  kubectl logs -n %[1]s try

make demo-down ends the node.
`, lab.PodNamespace, lab.TestImage, lab.Memory)
}
