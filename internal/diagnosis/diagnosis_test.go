// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/timeslice"
)

const (
	memory = "example.com/gpu-mem"
	first  = "GPU-5a2f0000-0000-0000-0000-000000000000"
	second = "GPU-5a2f0000-0000-0000-0000-000000000001"
)

func conditions(available, healthy gpunode.Condition) []gpunode.Condition {
	available.Type, healthy.Type = gpunode.Available, gpunode.Healthy
	for _, c := range []*gpunode.Condition{&available, &healthy} {
		if c.Status == "" {
			c.Status, c.Reason = gpunode.True, status.Offered
		}
	}
	return []gpunode.Condition{available, healthy}
}

func because(r status.Reason, message string) gpunode.Condition {
	return gpunode.Condition{Status: gpunode.False, Reason: r, Message: message}
}

var fine gpunode.Condition

// units is a GPU that is shared by memory, of which so many units are held.
func units(uuid string, index, total, held int) gpunode.GPU {
	g := gpunode.GPU{UUID: uuid, Index: index, Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81920, Mode: "shared",
		API: "device-plugin", Resource: memory, Kind: piece.Kinds()[1], Total: total, Free: total - held, Largest: total - held,
		Conditions: conditions(fine, fine)}
	for i := range held {
		g.Used = append(g.Used, piece.SetOf([]int{i})...)
	}
	return g
}

// inSpot offers a GPU's room to spot pods, too: most of the units, of which they have held.
func inSpot(g gpunode.GPU, most, held int) gpunode.GPU {
	g.Spot = &gpunode.Spot{Resource: g.Resource + ".spot", Total: most, Free: most - held, Largest: most - held}
	return g
}

// instances is a GPU in MIG mode with a geometry.
func instances(uuid string, index int) gpunode.GPU {
	return gpunode.GPU{UUID: uuid, Index: index, Mode: "mig", API: "device-plugin", Kind: piece.Kinds()[3],
		MemoryMiB: 81920, Conditions: conditions(fine, fine), MIG: &gpunode.MIG{Card: "A100", Offers: []gpunode.Offer{
			{Profile: "3g.40gb", Resource: "example.com/mig-3g.40gb", Placements: []string{"0"}, Free: []string{"0"}}}}}
}

var card = gpunode.Card{Name: "A100", MemorySlices: 8, Profiles: []gpunode.Profile{
	{Name: "1g.10gb", ComputeSlices: 1, MemorySlices: 1, Starts: []int{0, 1, 2, 3, 4, 5, 6}, Max: 7},
	{Name: "3g.40gb", ComputeSlices: 3, MemorySlices: 4, Starts: []int{0, 4}, Max: 2}}}

// on is the GPUNode of a node with these GPUs.
func on(name string, gpus ...gpunode.GPU) GPUNode {
	s := &gpunode.Status{Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True, Reason: status.Offered}},
		GPUs: gpus, Cards: []gpunode.Card{card}}
	s.Sum()
	return GPUNode{Name: name, Status: s}
}

// with returns the GPUNode with another condition of the node.
func (n GPUNode) with(kind string, c gpunode.Condition) GPUNode {
	c.Type = kind
	kept := []gpunode.Condition{c}
	for _, o := range n.Status.Conditions {
		if o.Type != kind {
			kept = append(kept, o)
		}
	}
	n.Status.Conditions = kept
	return n
}

func asking(resource string, n int64) *Pod {
	return &Pod{Namespace: "train", Name: "job-1", Phase: "Pending",
		Unscheduled: "0/1 nodes are available: 1 Insufficient " + resource + ". preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.",
		Containers:  []Container{{Name: "main", Requests: map[string]int64{resource: n, "cpu": 1}}}}
}

// refused is a pod as the kubelet refuses it, for an error of the device plugin. The words around
// that are the kubelet's (1.36), cm/admission and cm/devicemanager.
func refused(resource string, n int64, call string, err error) *Pod {
	p := asking(resource, n)
	p.Phase, p.Reason, p.Node, p.Unscheduled = "Failed", "UnexpectedAdmissionError", "node-1", ""
	p.Message = "Pod was rejected: Allocate failed due to device plugin " + call + " rpc failed with err: rpc error: " +
		"code = FailedPrecondition desc = " + resource + ": " + err.Error() + ", which is unexpected"
	return p
}

// waiting is a pod whose container waits for the agent, as kubelet 1.36 shows it.
func waiting(why string) *Pod {
	p := asking(memory, 24)
	p.Node, p.Unscheduled = "node-1", ""
	p.Containers[0].Waiting = "CreateContainerConfigError"
	p.Containers[0].WaitingMessage = "device plugin PreStartContainer rpc failed with err: rpc error: code = Unavailable " +
		"desc = example.com/gpu-mem: the allocation is not ready: " + why
	return p
}

// crashed is a pod that has run.
func crashed(e Ended, log string) *Pod {
	p := asking(memory, 24)
	p.Node, p.Unscheduled, p.Phase = "node-1", "", "Running"
	p.Containers[0].Waiting, p.Containers[0].Ended, p.Containers[0].Restarts, p.Containers[0].Log = "CrashLoopBackOff", &e, 3, log
	return p
}

func facts(p *Pod, nodes ...GPUNode) Facts {
	return Facts{Domain: "example.com", Resources: "example.com", Pod: p, GPUNodes: nodes}
}

func (f Facts) see(nodes ...Node) Facts    { f.Nodes = nodes; return f }
func (f Facts) hear(events ...Event) Facts { f.Events = events; return f }
func (f Facts) run(agents ...Agent) Facts {
	if f.Agents = agents; agents == nil {
		f.Agents = []Agent{}
	}
	return f
}
func (f Facts) of(j Job, w *Workload) Facts { f.Job, f.Workload = &j, w; return f }
func (f Facts) at(node string) Facts        { f.Node = node; return f }
func (f Facts) blind(what ...string) Facts {
	for _, w := range what {
		f.Unseen = append(f.Unseen, Unseen{w, "forbidden"})
	}
	return f
}

var healthy = on("node-1", units(first, 0, 79, 0), units(second, 1, 79, 0))

// Each trouble that is staged for `kubectl gpu why`, seen by an operator and by an author alone. The
// first line must name the cause.
func TestTroubles(t *testing.T) {
	blocked := plan.Blocked{GPU: first, From: "shared", To: "mig", Reason: status.HeldByPods, Holders: []string{"train/job-7"}}
	fault := "Xid 79 (GPU has fallen off the bus), since 2026-11-29T12:00:00Z: reboot the node"
	sick := units(first, 0, 79, 0)
	sick.Free, sick.Largest = 0, 0
	sick.Conditions = conditions(because(status.GPUUnhealthy, fault), because(status.GPUUnhealthy, fault))
	foreign := gpunode.GPU{UUID: first, MemoryMiB: 81920, Conditions: conditions(because(status.OtherOwner,
		"GPU 0 ("+first+") is not offered: the kubelet lists it as nvidia.com/gpu of another device plugin; end that one, or give the GPU mode off"), fine)}
	noMIG := gpunode.GPU{UUID: first, MemoryMiB: 81920, Conditions: conditions(because(status.ResetDue,
		"the MIG mode of GPU 0 (GPU-5a2f) could not be changed: a reset or a reboot is due"), fine)}
	quota := &Workload{Name: "job-train-1", Queue: "gpus", Conditions: []Condition{{Type: "QuotaReserved", Reason: "Pending",
		Message: "couldn't assign flavors to pod set main: insufficient unused quota for example.com/gpu-mem in flavor onprem, 40 more needed"}}}
	for name, c := range map[string]struct {
		facts Facts
		code  Code
		cause []string
		next  string
	}{
		"a wrong resource name": {facts(asking("example.com/gpu-memory", 24), healthy), WrongResource,
			[]string{"container main asks for example.com/gpu-memory", "did you mean example.com/gpu-mem"}, "write example.com/gpu-mem"},
		"more than spot pods may have": {facts(asking(memory+".spot", 50), on("node-1", inSpot(units(first, 0, 79, 0), 40, 0))), TooMuch,
			[]string{"asks for 50 of example.com/gpu-mem.spot", "no GPU has more than 40"}, "at most 40"},
		"no room for a spot pod": {facts(asking(memory+".spot", 20), on("node-1", inSpot(units(first, 0, 79, 0), 40, 25))), Full,
			[]string{"node-1 has 15 of 40 of example.com/gpu-mem.spot free"}, ""},
		"no spot tier": {facts(asking("example.com/gpu.shared.spot", 1), healthy), WrongResource,
			[]string{"example.com/gpu.shared.spot, which is not the name of a resource that agents offer"}, "example.com/gpu-mem"},
		"a name of NVIDIA's plugin": {facts(asking("nvidia.com/gpu", 1), healthy), WrongResource,
			[]string{"nvidia.com/gpu, which is not the name of a resource that agents offer"}, "example.com/gpu-mem"},
		"a MIG profile that no card has": {facts(asking("example.com/mig-9g.80gb", 1), on("node-1", instances(first, 0))), WrongResource,
			[]string{"no GPU of the cluster has the MIG profile 9g.80gb"}, "1g.10gb, 3g.40gb"},
		"too many units, by the scheduler": {facts(asking(memory, 200), healthy), TooMuch,
			[]string{"asks for 200 of example.com/gpu-mem", "no GPU has more than 79"}, "at most 79"},
		"too many units, by the kubelet": {facts(refused(memory, 100, "GetPreferredAllocation",
			&timeslice.FitError{Asked: 100, Capacity: 79, Largest: 79, GPU: first}), healthy), TooMuch,
			[]string{"100 units asked for", "no GPU of this node has more than 79"}, "ask for at most 79"},
		"too many units, by the kubelet, without GPUNodes": {facts(refused(memory, 100, "GetPreferredAllocation",
			&timeslice.FitError{Asked: 100, Capacity: 79, Largest: 79, GPU: first})).blind("GPUNodes", "Nodes"), TooMuch,
			[]string{"no GPU of this node has more than 79"}, "ask for at most 79"},
		"a fragmented node, by the scheduler": {facts(asking(memory, 50), on("node-1", units(first, 0, 79, 39), units(second, 1, 79, 45))),
			Fragmented, []string{"no GPU has 50 of example.com/gpu-mem in one piece", "node-1 has 74", "at most 40 in one piece"}, "ask for at most 40"},
		"a fragmented node, by the kubelet": {facts(refused(memory, 50, "GetPreferredAllocation",
			&timeslice.FitError{Asked: 50, Capacity: 79, Largest: 40, GPU: first}), healthy), Fragmented,
			[]string{"a request lives on one GPU", "the largest free block is 40 units"}, "ask for at most 40"},
		"a blocked edit": {facts(asking("example.com/mig-3g.40gb", 1), healthy).see(Node{Name: "node-1", Chosen: true, State: "blocked",
			Reason: string(status.HeldByPods), Message: blocked.String(), Partition: "night", Allocatable: map[string]int64{memory: 158}}), PartitionBlocked,
			[]string{"partition night of node-1 is blocked", "until these end: train/job-7"}, "wait for the holders"},
		"a blocked edit, by its author": {facts(asking("example.com/mig-3g.40gb", 1), on("node-1", units(first, 0, 79, 1)).with(gpunode.Applied,
			because(status.HeldByPods, "partition night is blocked: the Node's annotation gpu.partition.message says why"))).blind("Nodes"), PartitionBlocked,
			[]string{"partition night is blocked"}, "wait for the holders"},
		"a blocked edit, of the node": {facts(nil, healthy).see(Node{Name: "node-1", Chosen: true, State: "blocked", Reason: "HeldByPods",
			Message: blocked.String(), Allocatable: map[string]int64{memory: 1}}).at("node-1"), PartitionBlocked, []string{"until these end: train/job-7"}, "wait for"},
		"MIG mode is off": {facts(asking("example.com/mig-3g.40gb", 1), on("node-1", noMIG)), MIGOff,
			[]string{"a reset or a reboot is due"}, "reset"},
		"MIG mode is off, of a container":              {facts(waiting("GPU 0 (GPU-5a2f) is not in MIG mode")), MIGOff, []string{"is not in MIG mode"}, "reset"},
		"a faulty GPU, of a pod that waits for a node": {facts(asking(memory, 24), on("node-1", sick)), UnhealthyGPU, []string{"GPU 0", "is unhealthy", "Xid 79"}, "gpu status node-1"},
		"a faulty GPU, of a pod that has it": {facts(func() *Pod {
			p := asking(memory, 24)
			p.Phase, p.Node, p.Unscheduled, p.Containers[0].Running, p.Containers[0].Devices = "Running", "node-1", "", true, []string{first + "::0"}
			return p
		}(), on("node-1", sick)), UnhealthyGPU, []string{"GPU 0 (" + first + ") of node-1 is unhealthy: Xid 79"}, "status node-1"},
		"a faulty GPU, by its Event alone": {facts(func() *Pod {
			p := asking(memory, 24)
			p.Phase, p.Node, p.Unscheduled, p.Containers[0].Running = "Running", "node-1", "", true
			return p
		}()).hear(Event{Warning: true, Reason: string(status.GPUUnhealthy), Message: "GPU 0 (" + first + ") is unhealthy: " + fault}).blind("GPUNodes"),
			UnhealthyGPU, []string{"is unhealthy: Xid 79", "on node-1"}, "status node-1"},
		"a foreign plugin": {facts(asking(memory, 24), on("node-1", foreign)), OtherOwner, []string{"GPU 0 (" + first + ") of node-1 gives nothing out: the kubelet lists it as nvidia.com/gpu of another device plugin"}, "one owner per GPU"},
		"a foreign plugin, by its author, where the partition has failed for it": {facts(asking(memory, 24), on("node-1", foreign, foreign).with(gpunode.Applied,
			because(status.OtherOwner, "partition default is failed: the Node's annotation gpu.partition.message says why"))).blind("Nodes"), OtherOwner,
			[]string{"on node-1, partition default is failed: GPU 0 (" + first + "): the kubelet lists it as nvidia.com/gpu of another device plugin", "(and 1 more)"}, "one owner per GPU"},
		"an image without CUDA, by the linker": {facts(crashed(Ended{Exit: 127, Reason: "Error"},
			"python3: error while loading shared libraries: libcudart.so.12: cannot open shared object file: No such file or directory"), healthy), NoCUDA,
			[]string{"the image of container main lacks libcudart.so.12"}, "use an image"},
		"an image without CUDA, by the runtime": {facts(crashed(Ended{Exit: 128, Reason: "StartError", Message: `failed to create containerd task: failed to create shim task: ` +
			`OCI runtime create failed: runc create failed: unable to start container process: error during container init: exec: "nvcc": executable file not found in $PATH`}, ""), healthy),
			NoCUDA, []string{"lacks nvcc"}, "use an image"},
		"an image without CUDA, by PyTorch": {facts(crashed(Ended{Exit: 1, Reason: "Error"},
			"Traceback (most recent call last):\nAssertionError: Torch not compiled with CUDA enabled\n"), healthy), NoCUDA, []string{"a PyTorch without CUDA"}, "use an image"},
		"an image without CUDA, by busybox": {facts(crashed(Ended{Exit: 127, Reason: "Error"}, "sh: nvidia-smi: not found\n"), healthy), NoCUDA, []string{"lacks nvidia-smi"}, "use an image"},
		"an image without a linker":         {facts(crashed(Ended{Exit: 255, Reason: "Error"}, "exec /usr/bin/nvidia-smi: no such file or directory\n"), healthy), NoCUDA, []string{"lacks /usr/bin/nvidia-smi"}, "use an image"},
		"an image that is too new": {facts(crashed(Ended{Exit: 1, Reason: "Error"}, "RuntimeError: CUDA driver version is insufficient for CUDA runtime version\n"), healthy), NoCUDA,
			[]string{"newer than the node's driver"}, "use an image"},
		"killed over the cap": {facts(crashed(Ended{Exit: 137, Reason: "Error"}, ""), healthy).hear(Event{Warning: true, Reason: string(status.CapExceeded), Count: 2,
			Message: "container main of pod train/job-1 uses 30.00 GiB of GPU 0 (GPU-5a2f), more than its cap of 24.00 GiB; it is ended"}), OverCap,
			[]string{"more than its cap of 24.00 GiB; it is ended (2 times)"}, "ask for more"},
		"no quota in Kueue": {facts(nil, healthy).of(Job{Namespace: "train", Name: "job-1", Suspended: true, Queue: "gpus"}, quota), Quota,
			[]string{"queue gpus has no quota left", "40 more needed"}, "quota"},
		"no quota in Kueue, of a pod": {facts(func() *Pod {
			p := asking(memory, 24)
			p.Gates = []string{"kueue.x-k8s.io/admission"}
			return p
		}(), healthy).of(Job{}, quota).onlyPod(), Quota, []string{"queue gpus has no quota left"}, "quota"},
		"more than Kueue's quota ever": {facts(nil).of(Job{Suspended: true, Queue: "gpus"}, &Workload{Name: "w", Queue: "gpus", Conditions: []Condition{{Type: "QuotaReserved", Reason: "Pending",
			Message: "couldn't assign flavors to pod set main: insufficient quota for example.com/gpu-mem in flavor onprem, previously considered podsets requests (0) + current podset request (900) > maximum capacity (158)"}}}),
			Quota, []string{"queue gpus can never have as much quota", "maximum capacity (158)"}, "ask for less"},
		"a cordoned node": {facts(asking(memory, 24), healthy).see(Node{Name: "node-1", Chosen: true, Cordoned: true, Allocatable: map[string]int64{memory: 158}}), NodeCordoned,
			[]string{"node-1 has room for it and is cordoned"}, "kubectl uncordon node-1"},
		"a cordoned node, by its author": {facts(func() *Pod {
			p := asking(memory, 24)
			p.Unscheduled = "0/1 nodes are available: 1 node(s) were unschedulable. preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
			return p
		}(), healthy).blind("Nodes"), NodeCordoned, []string{"node-1 has room for it and is cordoned"}, "uncordon node-1"},
		"no agent: it has ended": {facts(asking(memory, 24), on("node-1", units(first, 0, 79, 0)).with(gpunode.Ready, because(status.AgentEnds, "the agent has ended"))), NoAgent,
			[]string{"no agent runs on node-1"}, "get pods -n gpu-agent"},
		"no agent: it was killed": {facts(asking(memory, 24), healthy).see(Node{Name: "node-1", Chosen: true, Allocatable: map[string]int64{memory: 0}}), NoAgent,
			[]string{"no agent serves the kubelet of node-1"}, "get pods -n gpu-agent"},
		"no agent: the label is missing": {facts(nil).at("node-1").see(Node{Name: "node-1"}).run(), NoAgent,
			[]string{"no agent runs on node-1: the node lacks the label example.com/gpu.node=true"}, "kubectl label node node-1 example.com/gpu.node=true"},
		"no agent: it crashes": {facts(asking(memory, 24), healthy).run(Agent{"node-1", "gpu-agent", "gpu-agent-x", "CrashLoopBackOff"}), NoAgent,
			[]string{"no agent works on node-1: its pod gpu-agent/gpu-agent-x is not ready: CrashLoopBackOff"}, "get pods"},
		"no agent: the kubelet refuses": {facts(func() *Pod {
			p := refused(memory, 24, "Allocate", errors.New(""))
			p.Message = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices example.com/gpu-mem, which is unexpected"
			return p
		}(), on("node-1", units(first, 0, 79, 0)).with(gpunode.Ready, because(status.AgentEnds, "the agent has ended"))), NoAgent, []string{"no agent runs on node-1"}, "get pods"},
		"no agent: it was killed, by its author": {facts(asking(memory, 24), healthy).blind("Nodes"), NoAgent, []string{"no agent serves its kubelet"}, "get pods"},
		"no agent: of any node":                  {facts(asking(memory, 24)), NoAgent, []string{"no node of the cluster has an agent"}, "get pods"},

		// Others that come near.
		"the holder before": {facts(waiting("previous holder still ending: train/job-0"), healthy), HolderEnding, []string{"previous holder still ending: train/job-0"}, "wait until"},
		"all is held":       {facts(asking(memory, 24), on("node-1", units(first, 0, 79, 79))), Full, []string{"no node has 24 of example.com/gpu-mem free: node-1 has 0 of 79"}, "wait"},
		"a taint": {facts(func() *Pod {
			p := asking(memory, 24)
			p.Unscheduled = "0/1 nodes are available: 1 node(s) had untolerated taint(s). no new claims to deallocate"
			return p
		}(), healthy), Unplaced, []string{"untolerated taint"}, "taints"},
		"out of memory in the piece": {facts(crashed(Ended{Exit: 1, Reason: "Error"}, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."), healthy),
			OutOfMemory, []string{"Tried to allocate 20.00 GiB"}, "more units"},
		"a crash of its own": {facts(crashed(Ended{Exit: 2, Reason: "Error"}, "ValueError: no such data set\n"), healthy), Crash, []string{"exit code 2", "no such data set"}, "kubectl logs job-1 -n train -c main"},
		"no GPU at all":      {facts(&Pod{Namespace: "train", Name: "job-1", Phase: "Running", Node: "node-1"}, healthy), NoGPU, []string{"asks for no GPU"}, "limits"},
		"a running pod":      {facts(func() *Pod { p := asking(memory, 24); p.Phase, p.Node = "Running", "node-1"; return p }(), healthy), Fine, []string{"runs on node-1"}, ""},
		"a suspended Job":    {facts(nil).of(Job{Suspended: true}, nil), Suspended, []string{"spec.suspend"}, "spec.suspend"},
		"a check of the placer": {facts(nil).of(Job{Suspended: true, Queue: "q"}, &Workload{Name: "w", Queue: "q", Conditions: []Condition{{Type: "QuotaReserved", True: true}},
			Checks: []Check{{"gpu-placer", "Pending", "no room for 50 of example.com/gpu-mem: the largest free block is 29"}}}), Queued, []string{"admission check gpu-placer is Pending: no room for 50"}, "wait"},
		"a node that is well": {facts(nil, healthy).at("node-1").see(Node{Name: "node-1", Chosen: true, State: "applied", Allocatable: map[string]int64{memory: 158}}), Fine, []string{"nothing is wrong on node-1"}, ""},
		"a claim that can never be prepared": {facts(func() *Pod {
			p := &Pod{Namespace: "train", Name: "job-1", Phase: "Pending", Node: "node-1", Claims: []string{"gpu"}}
			p.Containers = []Container{{Name: "main", Waiting: "ContainerCreating"}}
			return p
		}(), healthy).hear(Event{Warning: true, Reason: string(status.ClaimRefused), Message: "claim train/c can never be prepared, there is no such device"}), Refused,
			[]string{"claim train/c can never be prepared"}, "create the pod anew"},
	} {
		t.Run(name, func(t *testing.T) {
			c.facts.lessAndLess(t)
			d := c.facts.Explain()
			var text strings.Builder
			if err := d.Write(&text); err != nil {
				t.Fatal(err)
			}
			line, rest, _ := strings.Cut(text.String(), "\n")
			if d.Code != c.code {
				t.Errorf("the code is %s, want %s:\n%s", d.Code, c.code, text.String())
			}
			for _, part := range c.cause {
				if !strings.Contains(line, part) {
					t.Errorf("the first line lacks %q:\n%s", part, text.String())
				}
			}
			after, _, _ := strings.Cut(rest, "\n")
			if c.next != "" && (!strings.HasPrefix(after, "next: ") || !strings.Contains(after, c.next)) {
				t.Errorf("the second line lacks %q:\n%s", c.next, text.String())
			}
			if strings.Contains(after, "NODE") || strings.Contains(after, "POD") {
				t.Errorf("the next step has a name left open: %s", after)
			}
		})
	}
}

// lessAndLess takes the facts away one by one: there is an answer to any of them.
func (f Facts) lessAndLess(t *testing.T) {
	t.Helper()
	for name, take := range map[string]func(*Facts){
		"GPUNodes": func(f *Facts) { f.GPUNodes = nil }, "Nodes": func(f *Facts) { f.Nodes = nil }, "agents": func(f *Facts) { f.Agents = nil },
		"Events": func(f *Facts) { f.Events = nil }, "the Workload": func(f *Facts) { f.Workload = nil },
		"statuses": func(f *Facts) {
			f.GPUNodes = slices.Clone(f.GPUNodes)
			for i := range f.GPUNodes {
				f.GPUNodes[i].Status, f.GPUNodes[i].Odd = nil, "status.gpus[0].total: 1, and the most is 0"
			}
		},
		"conditions": func(f *Facts) {
			f.GPUNodes = slices.Clone(f.GPUNodes)
			for i := range f.GPUNodes {
				s := *f.GPUNodes[i].Status
				s.Conditions, s.GPUs, s.Cards = nil, slices.Clone(s.GPUs), nil
				for j := range s.GPUs {
					s.GPUs[j].Conditions = nil
				}
				f.GPUNodes[i].Status = &s
			}
		},
	} {
		less := f
		take(&less)
		if d := less.Explain(); d.Cause == "" || d.Code == "" || d.Subject == "" && (f.Pod != nil || f.Job != nil || f.Node != "") {
			t.Errorf("without %s: %+v", name, d)
		}
	}
}

// Of a container that runs with units, the answer has its cap and what holds it to that.
func TestWalkHasCaps(t *testing.T) {
	p := asking(memory, 24)
	p.Phase, p.Node, p.Unscheduled, p.Containers[0].Running = "Running", "node-1", "", true
	n := on("node-1", units(first, 0, 79, 24))
	n.Status.MemoryUnitMiB, n.Status.GPUs[0].Guarantee = 1024, "api"
	var text strings.Builder
	if d := facts(p, n).Explain(); d.Write(&text) != nil || !strings.Contains(text.String(), "main: 24576 MiB (24 units of 1024), held by api") {
		t.Error(text.String())
	}
	// What no GPU has was never given.
	text.Reset()
	p.Containers[0].Requests[memory] = 100
	if d := facts(p, n).Explain(); d.Write(&text) != nil || strings.Contains(text.String(), "held by") {
		t.Error(text.String())
	}
}

// onlyPod makes the pod the subject.
func (f Facts) onlyPod() Facts { f.Job = nil; return f }

// A diagnosis says what it could not see, and follows from the rest.
func TestUnseenIsTold(t *testing.T) {
	d := facts(asking(memory, 24)).blind("GPUNodes", "Nodes").Explain()
	if d.Code != Unplaced || !strings.Contains(d.Cause, "Insufficient example.com/gpu-mem") || len(d.Unseen) != 2 {
		t.Errorf("without GPUNodes it says %+v", d)
	}
	body, err := json.Marshal(d)
	if err != nil || !strings.Contains(string(body), `"unseen":[{"what":"GPUNodes","why":"forbidden"}`) || !strings.Contains(string(body), `"code":"Unplaced"`) {
		t.Errorf("as JSON it is %s: %v", body, err)
	}
}

// Of several nodes, those that come nearest to having room are the cause.
func TestNearestNodeIsTheCause(t *testing.T) {
	sick := units(second, 0, 79, 0)
	sick.Free, sick.Largest, sick.Conditions = 0, 0, conditions(because(status.GPUUnhealthy, "Xid 48"), because(status.GPUUnhealthy, "Xid 48"))
	d := facts(asking(memory, 50), on("full", units(first, 0, 79, 79)), on("pieces", units(first, 0, 79, 40), units(second, 1, 79, 40)), on("sick", sick)).Explain()
	if d.Code != Fragmented || !strings.Contains(d.Cause, "pieces has 78") || len(d.Also) != 2 {
		t.Errorf("%s: %s; also %+v", d.Code, d.Cause, d.Also)
	}
}

// What tenants write reaches no terminal as it is.
func TestTextsOfOthersAreCleaned(t *testing.T) {
	d := facts(crashed(Ended{Exit: 1, Message: "bad\x1b[2J\nnews " + strings.Repeat("x", 10_000)}, ""), healthy).Explain()
	if strings.ContainsAny(d.Cause, "\x1b\n") || len(d.Cause) > 6<<10 {
		t.Errorf("the cause is %q", d.Cause)
	}
}

// Worst prefers what fails to what runs, and of these the newest.
func TestWorst(t *testing.T) {
	at := func(name, phase string, minute int) Pod {
		return Pod{Name: name, Phase: phase, Created: time.Date(2026, 1, 1, 0, minute, 0, 0, time.UTC)}
	}
	if p := Worst(nil); p != nil {
		t.Error(p)
	}
	waits := at("e", "Pending", 0)
	waits.Unscheduled = "0/1 nodes are available"
	pods := []Pod{at("a", "Running", 9), at("b", "Failed", 1), at("c", "Failed", 2), at("d", "Succeeded", 5), at("f", "Pending", 7)}
	if p := Worst(pods); p.Name != "c" {
		t.Error(p.Name)
	}
	if p := Worst(append(pods, waits)); p.Name != "e" {
		t.Error(p.Name)
	}
}

// The rules know texts of other packages, which these must go on writing.
func TestTextsAreThoseOfTheAgent(t *testing.T) {
	for file, texts := range map[string][]string{
		"pkg/timeslice/errors.go":           {"no GPU of this node has more than", "a request lives on one GPU", "each is of a different GPU", "and this node shares", "none is free", "; ask for at most"},
		"internal/ledger/ledger.go":         {"previous holder still ending: ", "has given its devices to another pod too"},
		"internal/ledger/allocation.go":     {"the allocation is not ready"},
		"internal/plan/mig.go":              {"waits for the end of", "is not in MIG mode", "another program gives"},
		"internal/plan/dynamic.go":          {"changes its MIG mode"},
		"internal/agent/work.go":            {"a reset or a reboot is due"},
		"internal/deviceplugin/prefer.go":   {"was withdrawn: ", "is leaving: ", "no longer offered by this node"},
		"internal/deviceplugin/frontend.go": {"the node's partition has changed"},
		"internal/agent/others.go":          {"of another device plugin"},
		"internal/guard/act.go":             {"uses %s of %s, more than its cap of %s"},
		"deployments/base/daemonset.yaml":   {"example.com/gpu.node"},
	} {
		source, err := os.ReadFile("../../" + file)
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range texts {
			if !strings.Contains(string(source), text) {
				t.Errorf("%s no longer writes %q, which a rule looks for", file, text)
			}
		}
	}
}

// Each code says what to do, but those of what is not wrong.
func TestCodesHaveNextSteps(t *testing.T) {
	for _, c := range Codes {
		if quiet := c == Fine || c == Over; (next[c] == "") != quiet && c != WrongResource && c != TooMuch && c != Fragmented {
			t.Errorf("%s: the next step is %q", c, next[c])
		}
	}
	if len(next) > len(Codes) {
		t.Error("a step is of no code")
	}
}

// The documentation explains each code, in the same order.
func TestDocsNameEveryCode(t *testing.T) {
	text, err := os.ReadFile("../../docs/kubectl.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "| code | means |\n|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var have []string
	for row := range strings.SplitSeq(table, "\n") {
		have = append(have, strings.Trim(strings.Split(row, "|")[1], " `"))
	}
	var want []string
	for _, c := range Codes {
		want = append(want, string(c))
	}
	if !slices.Equal(have, want) {
		t.Errorf("the table has %q, the code %q", have, want)
	}
}
