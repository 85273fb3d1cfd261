// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// twoNodes are the CPUs of the machines of these tests, whatever GPUs they have:
// two NUMA nodes with 16 CPUs each, two threads a core. nodeOfCPU says of which a
// CPU is.
const twoNodes = `numa: [{cpus: "0-7,16-23"}, {cpus: "8-15,24-31"}]` + "\n"

func nodeOfCPU(cpu int) int { return cpu % 16 / 8 }

// machine is the emulated hardware of a name.
func machine(topology string) lab.DriverOptions {
	return lab.DriverOptions{World: "topology: " + topology + "\n" + twoNodes}
}

const allWhole = `version: v1
partitions:
  default:
    - devices: all
      mode: whole
`

// put puts a test upon other hardware, of as many GPUs, all of them whole.
func (b *bench) put(topology string, count int) {
	b.Helper()
	began := time.Now()
	b.must(node.DeletePods(b.ctx))
	b.must(agent.Stop(b.ctx))
	b.must(driver.Swap(b.ctx, machine(topology)))
	if len(driver.GPUs) != count {
		b.Fatalf("%s has %d GPUs, want %d", topology, len(driver.GPUs), count)
	}
	b.must(agent.Reset(b.ctx, allWhole))
	b.offersAll(map[string]int{lab.GPU: count})
	b.state("applied")
	b.Logf("upon a %s: %.1f s", topology, time.Since(began).Seconds())
}

// linked says whether NVLink connects two GPUs, directly or through a switch.
func linked(x, y lab.GPUInfo) bool {
	switched := func(g lab.GPUInfo) bool {
		return slices.ContainsFunc(g.Links, func(l lab.Link) bool { return l.Switch && l.Up })
	}
	return switched(x) && switched(y) ||
		slices.ContainsFunc(x.Links, func(l lab.Link) bool { return l.To == y.Index && l.Up })
}

// joined says that NVLink connects every two of some GPUs.
func joined(gpus []lab.GPUInfo) error {
	for i, x := range gpus {
		for _, y := range gpus[i+1:] {
			if !linked(x, y) {
				return fmt.Errorf("no NVLink connects the GPUs %d and %d", x.Index, y.Index)
			}
		}
	}
	return nil
}

// neighbours says that two GPUs hang on one bridge.
func neighbours(x, y lab.GPUInfo) bool {
	above := func(g lab.GPUInfo) string { return path.Dir(path.Dir(g.Path)) }
	return above(x) == above(y)
}

// aligned makes a pod of some GPUs and CPUs of its own, and checks that all of
// them are of one NUMA node, by the hardware's word and by the kubelet's, and that
// NVLink joins the GPUs, which it returns too.
func (b *bench) aligned(name string, count, cpus int) (*lab.RunningPod, []lab.GPUInfo) {
	b.Helper()
	pod, gpus := b.pinned(name, count, cpus)
	given, err := pod.Given(b.ctx, "")
	b.must(err)
	var ids []string
	home := gpus[0].NUMA
	for _, g := range gpus {
		ids = append(ids, g.UUID)
		if g.NUMA != home {
			b.Errorf("%s has GPU %d of NUMA node %d beside one of %d", pod, g.Index, g.NUMA, home)
		}
	}
	slices.Sort(ids)
	if !slices.Equal(ids, given.Devices[lab.GPU]) {
		b.Errorf("%s sees %v, and the kubelet has given it %v", pod, ids, given.Devices[lab.GPU])
	}
	if !slices.Equal(given.NUMA[lab.GPU], []int{home}) {
		b.Errorf("the kubelet takes the GPUs of %s for such of the NUMA nodes %v, want %d", pod, given.NUMA[lab.GPU], home)
	}
	if len(given.CPUs) != cpus {
		b.Errorf("%s has the CPUs %v of its own, want %d", pod, given.CPUs, cpus)
	}
	for _, cpu := range given.CPUs {
		if nodeOfCPU(cpu) != home {
			b.Errorf("%s has CPU %d of NUMA node %d, and GPUs of %d", pod, cpu, nodeOfCPU(cpu), home)
		}
	}
	if err := joined(gpus); err != nil {
		b.Errorf("%s has GPUs %v: %v", pod, indexes(gpus), err)
	}
	b.Logf("%d GPUs and %d CPUs: GPUs %v and CPUs %v of NUMA node %d", count, cpus, indexes(gpus), given.CPUs, home)
	return pod, gpus
}

// pairsLeft checks that nobody who has one GPU of a pair has left its partner
// alone.
func (b *bench) pairsLeft(taken ...[]lab.GPUInfo) {
	b.Helper()
	all := slices.Concat(taken...)
	for _, g := range all {
		partner := slices.IndexFunc(driver.GPUs, func(o lab.GPUInfo) bool { return linked(g, o) })
		if partner < 0 {
			b.Fatalf("GPU %d has no partner", g.Index)
		}
		if !slices.Contains(indexes(all), partner) {
			b.Errorf("of the GPUs %v that are taken, %d has left its partner %d alone", indexes(all), g.Index, partner)
		}
	}
}

// pinned makes a pod of some GPUs and CPUs of its own and waits until it runs.
func (b *bench) pinned(name string, count, cpus int) (*lab.RunningPod, []lab.GPUInfo) {
	b.Helper()
	pod := b.create(lab.Pod{Name: name, Containers: []lab.Container{{Resources: whole(count, cpus)}}})
	b.must(pod.Running(b.ctx))
	gpus := b.inside(pod, "")
	if len(gpus) != count {
		b.Fatalf("%s sees the GPUs %v, want %d", pod, indexes(gpus), count)
	}
	return pod, gpus
}

// whole is what a pod asks for that is given CPUs of its own: it has to say all.
func whole(gpus, cpus int) map[string]int {
	return map[string]int{lab.GPU: gpus, "cpu": cpus, "memory": 64 << 20}
}

// On a kubelet that gives no container CPUs and devices of two NUMA nodes where one
// has enough, pods get GPUs that are joined and CPUs beside them; odd numbers leave
// pairs whole; and shares of memory are found on whatever node there is room.
func TestTopology(t *testing.T) {
	b := prepare(t)
	began := time.Now()
	b.must(node.DeletePods(b.ctx))
	b.must(agent.Stop(b.ctx))
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		if b.Failed() {
			b.tell(ctx)
		}
		err := errors.Join(node.DeletePods(ctx), agent.Stop(ctx), driver.Swap(ctx, lab.DriverOptions{Model: model, Count: gpus}), node.Unalign(ctx))
		if err != nil {
			b.Errorf("clean up: %v", err)
		}
	})
	b.must(driver.Swap(b.ctx, machine("dgx-h100")))

	b.rest("restricted", func(b *bench) {
		b.must(node.Align(b.ctx, lab.Restricted))
		b.Logf("a kubelet with two NUMA nodes: %.1f s", time.Since(began).Seconds())
		b.put("dgx-h100", 8)
		// Who takes all GPUs, of both nodes, and more CPUs than one has.
		pod, gpus := b.pinned("eight", 8, 20)
		given, err := pod.Given(b.ctx, "")
		b.must(err)
		if err := joined(gpus); err != nil || !slices.Equal(given.NUMA[lab.GPU], []int{0, 1}) || len(given.CPUs) != 20 {
			b.Errorf("%s has GPUs of the NUMA nodes %v and the CPUs %v (%v)", pod, given.NUMA[lab.GPU], given.CPUs, err)
		}
		b.Logf("8 GPUs and 20 CPUs by the policy restricted: GPUs %v and CPUs %v", indexes(gpus), given.CPUs)
	})
	b.must(node.DeletePods(b.ctx))
	b.must(node.Align(b.ctx, lab.SingleNode))
	b.sub("DGX H100", func(b *bench) {
		b.put("dgx-h100", 8)
		// The machine's eight GPUs are of two nodes: this policy has no way to give
		// them to one container, whoever offers them.
		pod := b.create(lab.Pod{Name: "eight", Containers: []lab.Container{{Resources: whole(8, 2)}}})
		s, err := pod.Refused(b.ctx)
		b.must(err)
		if s.Reason != "TopologyAffinityError" {
			b.Errorf("a pod of all GPUs is refused for %s: %s; want TopologyAffinityError", s.Reason, s.Message)
		}
		b.Logf("8 GPUs, of two NUMA nodes: %s: %s", s.Reason, s.Message)
		b.must(pod.Delete(b.ctx))
		b.aligned("four", 4, 8)
		b.aligned("one", 1, 2)
		two, gpus := b.aligned("two", 2, 4)
		if testing.Short() {
			return
		}
		// A kubelet that starts anew judges its pods again, with hints.
		b.must(node.RestartKubelet(b.ctx))
		b.offersAll(map[string]int{lab.GPU: 8})
		b.must(two.RestartContainer(b.ctx, ""))
		if now := b.inside(two, ""); !slices.Equal(indexes(now), indexes(gpus)) {
			b.Errorf("%s had the GPUs %v, and %v when the kubelet and it have started anew", two, indexes(gpus), indexes(now))
		}
	})
	b.rest("memory", func(b *bench) {
		// FIELD.md's case: 20 units are free on each GPU of a node that is full
		// otherwise, and 79 on one of another.
		shared := func(gpus, off string) string {
			return head + "    - devices: " + gpus + "\n      mode: shared\n    - devices: " + off + "\n      mode: off\n"
		}
		b.must(agent.Reset(b.ctx, shared("[0, 1, 2, 3]", "[4, 5, 6, 7]")))
		b.offersAll(map[string]int{lab.Memory: 4 * units})
		b.state("applied")
		for i := range 4 {
			_, gpus := b.running(fmt.Sprintf("big-%d", i), lab.Memory, units-20)
			if g := b.one(gpus); g.NUMA != 0 {
				b.Fatalf("a pod that is to fill NUMA node 0 is on GPU %d of %d", g.Index, g.NUMA)
			}
		}
		b.partitions(shared("[0, 1, 2, 3, 4]", "[5, 6, 7]"))
		b.offersAll(map[string]int{lab.Memory: 5 * units})
		// With hints for units too, a kubelet takes the first node, where 80 are free.
		b.sub("with hints", func(b *bench) {
			b.redeploy(lab.DeployOptions{Partitions: shared("[0, 1, 2, 3, 4]", "[5, 6, 7]"), Env: map[string]string{"GPU_AGENT_NUMA_HINTS": "all"}})
			b.offersAll(map[string]int{lab.Memory: 5 * units})
			b.state("applied")
			s, err := b.pod("seventy-hinted", lab.Memory, 70).Refused(b.ctx)
			b.must(err)
			if s.Reason != "UnexpectedAdmissionError" || !strings.Contains(s.Message, lab.Memory) {
				b.Errorf("with --numa-hints all, 70 units are refused for %s: %s", s.Reason, s.Message)
			}
			b.Logf("70 units with --numa-hints all: %s: %s", s.Reason, s.Message)
		})
		b.offersAll(map[string]int{lab.Memory: 5 * units})
		pod, gpus := b.running("seventy", lab.Memory, 70)
		if g := b.one(gpus); g.Index != 4 || g.NUMA != 1 {
			b.Errorf("70 units are of GPU %d, want the only one that has them, 4", g.Index)
		}
		given, err := pod.Given(b.ctx, "")
		b.must(err)
		if nodes := given.NUMA[lab.Memory]; len(nodes) > 0 {
			b.Errorf("the kubelet was told of the NUMA nodes %v of units of memory", nodes)
		}
		b.Logf("70 units beside 4 times 20 free on NUMA node 0: on GPU %d of node %d", gpus[0].Index, gpus[0].NUMA)
	})
	b.rest("instances", func(b *bench) {
		fixed, demand := lab.MIG("3g.40gb"), lab.MIG("2g.20gb")
		b.must(agent.Reset(b.ctx, head+"    - devices: [0, 4]\n      mode: mig\n      geometry: {3g.40gb: 1}\n"+
			"    - devices: [7]\n      mode: mig\n      profiles: [2g.20gb]\n    - devices: [1, 2, 3, 5, 6]\n      mode: off\n"))
		b.offersAll(map[string]int{fixed: 2, demand: 3})
		b.state("applied")
		for _, test := range []struct {
			name, resource string
			hinted         bool
		}{{"fixed", fixed, true}, {"fixed-too", fixed, true}, {"demand", demand, false}} {
			resources := whole(0, 4)
			delete(resources, lab.GPU)
			resources[test.resource] = 1
			pod := b.create(lab.Pod{Name: test.name, Containers: []lab.Container{{Resources: resources}}})
			b.must(pod.Running(b.ctx))
			given, err := pod.Given(b.ctx, "")
			b.must(err)
			has := b.insideMIG(pod, "")
			if len(has) != 1 || len(given.CPUs) != 4 {
				b.Fatalf("%s has the instances %v and the CPUs %v", pod, has, given.CPUs)
			}
			home := has[0].gpu.NUMA
			if !test.hinted {
				if nodes := given.NUMA[test.resource]; len(nodes) > 0 {
					b.Errorf("the kubelet was told of the NUMA nodes %v of instances on demand", nodes)
				}
				continue
			}
			if !slices.Equal(given.NUMA[test.resource], []int{home}) {
				b.Errorf("the kubelet takes the instance of %s for one of the NUMA nodes %v, want %d", pod, given.NUMA[test.resource], home)
			}
			for _, cpu := range given.CPUs {
				if nodeOfCPU(cpu) != home {
					b.Errorf("%s has CPU %d of NUMA node %d, and %s of %d", pod, cpu, nodeOfCPU(cpu), has[0], home)
				}
			}
			b.Logf("%s and 4 CPUs: %s and CPUs %v of NUMA node %d", test.resource, has[0], given.CPUs, home)
		}
	})
	b.rest("pairs", func(b *bench) {
		b.put("pairs", 8)
		_, one := b.pinned("one", 1, 2)
		_, three := b.pinned("three", 3, 4)
		b.pairsLeft(one, three)
		_, first := b.aligned("two", 2, 4)
		_, second := b.aligned("two-more", 2, 4)
		b.Logf("1, 3, 2 and 2 GPUs of four pairs: %v %v %v %v", indexes(one), indexes(three), indexes(first), indexes(second))
	})
	b.rest("DGX-2", func(b *bench) {
		b.put("dgx-2", 16)
		var got [][]int
		for i, n := range []int{8, 1, 3, 2, 2} {
			_, gpus := b.aligned(fmt.Sprintf("p%d-%d", i, n), n, max(2, n/2))
			got = append(got, indexes(gpus))
			if n == 2 && !neighbours(gpus[0], gpus[1]) {
				b.Errorf("after 1 and 3, 2 GPUs are %v, at %s and %s, want two of one PCI switch", indexes(gpus), gpus[0].Path, gpus[1].Path)
			}
		}
		b.Logf("8, 1, 3, 2 and 2 of 16 GPUs: %v", got)
	})
}
