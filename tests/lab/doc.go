// SPDX-License-Identifier: Apache-2.0

// Package lab is the hand that drives a real node: it is shared by the demo
// and by the end-to-end tests.
//
// # The model
//
// A [Kit] is what stands on this machine: the checkout, the cache, and the
// programs built from the one into the other. [Kit.Steps] are the builds, each
// of which does only what is missing. From a kit comes a [Node]: a
// Kubernetes of one node in namespaces of its own, run by the program `cluster` of
// tests/cluster. Into the node goes a [Driver], the emulated NVIDIA driver of
// tests/emulator, laid at `/` as a distribution's packages would lay it or
// below another root, and an [Agent], the product as its own DaemonSet, from
// the manifests that users apply.
//
//	kit, err := lab.NewKit(os.Stderr)
//	for _, s := range kit.Steps() { err = s.Run(ctx) }
//	node, err := kit.Up(ctx, lab.NodeOptions{Name: "demo"})
//	driver, err := node.LayDriver(ctx, lab.DriverOptions{Root: "/", Model: "H100-80GB", Count: 8})
//	agent, err := node.Deploy(ctx, lab.DeployOptions{})
//	err = agent.SetPartitions(ctx, "version: v1 …")
//	pod, err := node.CreatePod(ctx, lab.Pod{Name: "a", Containers: []lab.Container{{Resources: map[string]int{"example.com/gpu-mem": 24}}}})
//	err = pod.Running(ctx)
//
// A second node joins the cluster of the first, and has a driver and an agent of its own.
// What is about the cluster, such as partitions, pods and the scheduler, goes by either;
// files, processes and what the kubelet says are the node's own:
//
//	cloud, err := kit.Up(ctx, lab.NodeOptions{Name: "demo-2", Join: "demo"})
//	agent, err := cloud.Deploy(ctx, lab.DeployOptions{}) // the same options for both
//
// # Waiting
//
// Nothing here sleeps and hopes. [Await] looks again and again until what it
// looks at is as it should be, and its error says what was seen last: a test
// that fails on a slow machine says what the node was doing, not that time ran
// out.
//
// # Seeing from the inside
//
// A pod's containers run a small script that prints what they see, which device
// nodes and what the dynamic linker finds under the name libcuda.so.1, and then
// wait for their end. [Pod.Inside] reads it from the container's log, which
// works for an init container that is long gone as well as for one that runs.
//
// # Using GPUs
//
// A container that has [ProbeMount] has a program that takes GPU memory when it
// is told to, by any of CUDA's calls and by any way to the driver's library.
// [RunningPod.Probe] runs one there, as one of the container's processes:
//
//	probe, err := pod.Probe(ctx, "main", nil)
//	answer, err := probe.Ask("take cuMemAlloc_v2 %d %d", 16<<20, 1000)
//	fmt.Println(answer.Bytes("count"), answer.Result() == lab.OutOfMemory)
//
// What was really granted is [Driver.Used], which counts as the card would.
//
// # Seeing what the kubelet is told
//
// [Node.Record] listens at the agent's sockets beside the kubelet, and has every
// device that turned, and when. [Node.Offer] is what the kubelet made of it.
//
// [Node.RecordPods] has every write of a pod.
//
// # How often the kubelet looks
//
// A kubelet looks at its node every ten seconds, and the scheduler hears of what has
// changed no sooner. A node with [NodeOptions].PromptStatus has one that looks every
// second, for tests that merely wait for it; [Node.UsersStatus] gives it users'
// settings for what is measured. [Node.SetKubelet] gives it any others.
// [Node.RecordNode] has every version of the Node and who wrote it, and [Node.SchedulerLog]
// when the scheduler took it in, where [Node.SetScheduler] has started it with
// SchedulerVerbose. [Node.StartPlacer] starts what the scheduler's extender is, and
// [Node.StartKueue] the real Kueue.
//
// # Other hardware, and a new boot
//
// [Driver.Swap] puts another machine in the place of what there is: GPUs, links, and
// CPUs and NUMA nodes where its world describes them. A kubelet sees those when it
// starts, and [Node.Align] starts it as one that gives a container CPUs and devices
// of one NUMA node, or refuses it; [RunningPod.Given] is what it gave:
//
//	err = driver.Swap(ctx, lab.DriverOptions{World: "topology: dgx-h100\nnuma: [{cpus: 0-7}, {cpus: 8-15}]\n"})
//	err = node.Align(ctx, lab.SingleNode)
//
// [Node.Reboot] takes the node's power away and starts it again, while the control
// plane, as if it were elsewhere, goes on:
//
//	err = node.Reboot(ctx, driver.Reboot)
//
// The package refuses to know what the product should do with any of this:
// expectations are the callers'.
package lab
