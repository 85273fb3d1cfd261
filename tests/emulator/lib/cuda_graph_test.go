// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"fmt"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// captured makes an executable graph that has 64 MiB while a kernel of a minute runs.
func captured(exec string) string {
	return "cuStreamBeginCapture_v2 s 0; cuMemAllocAsync &p 67108864 s; cuLaunchKernel long 1 1 1 32 1 1 0 s 0 0; cuMemFreeAsync p s; " +
		fmt.Sprintf("cuStreamEndCapture s &g; cuGraphInstantiateWithFlags &%s g 0", exec)
}

// left makes one that leaves its 64 MiB, which it returns at the address p.
func left(exec string) string {
	return "cuStreamBeginCapture_v2 s 0; cuMemAllocAsync &p 67108864 s; cuLaunchKernel long 1 1 1 32 1 1 0 s 0 0; " +
		fmt.Sprintf("cuStreamEndCapture s &g; cuGraphInstantiateWithFlags &%s g 0", exec)
}

// TestCUDAGraphMemory holds the memory of graphs to NVIDIA's documentation, rule by
// rule: the programming guide's Graph Memory Nodes. Where it is silent, to both values
// of a switch.
func TestCUDAGraphMemory(t *testing.T) {
	const used, reserved = "cuDeviceGetGraphMemAttribute 0 0 &used", "cuDeviceGetGraphMemAttribute 0 2 &reserved"
	for name, c := range map[string]struct {
		switches string
		mib      uint64 // of the card; 0 is the model's
		steps    []step
	}{
		// "Since the graphs in the same stream never run concurrently, CUDA can and should use the same physical memory"
		"the same stream": {steps: []step{{captured("x") + ";" + captured("y"), 0, 300}, {"cuGraphLaunch x t; cuGraphLaunch y t", 0, 364}}},
		// "physical pages cannot be reused if they are bound to more than one executing graph at the same time"
		"two streams": {steps: []step{{captured("x") + ";" + captured("y"), 0, 300}, {"cuGraphLaunch x t; cuGraphLaunch y u", 0, 428}}},
		"and the switch for drivers that wait first": {switches: "graphs=ordered", steps: []step{
			{captured("x") + ";" + captured("y"), 0, 300}, {"cuGraphLaunch x t; cuGraphLaunch y u", 0, 364}, {"cuStreamQuery u", cudaNotReady, 364}}},
		// "CUDA may also introduce synchronization between future graph launches"
		"two streams on a full card": {mib: 400, steps: []step{
			{captured("x") + ";" + captured("y"), 0, 300}, {"cuGraphLaunch x t; cuGraphLaunch y u", 0, 364}}},
		"an event between them": {steps: []step{
			{captured("x") + ";" + captured("y"), 0, 300}, {"cuGraphLaunch x t; cuEventRecord e t; cuStreamWaitEvent u e 0; cuGraphLaunch y u", 0, 364}}},
		// "Each launch is ordered behind both any previous work in hStream and any previous launches of hGraphExec."
		"one graph in two streams": {steps: []step{
			{captured("x"), 0, 300}, {"cuGraphLaunch x t; cuGraphLaunch x u", 0, 364}, {"cuStreamQuery u", cudaNotReady, 364}}},
		"a graph that is over": {steps: []step{
			{"cuStreamBeginCapture_v2 s 0; cuMemAllocAsync &p 67108864 s; cuMemFreeAsync p s; cuStreamEndCapture s &g", 0, 300},
			{"cuGraphInstantiateWithFlags &x g 0; " + captured("y"), 0, 300}, {"cuGraphLaunch x t; cuGraphLaunch y u", 0, 364}}},
		// "or to a graph allocation which remains unfreed"
		"an allocation that is left": {steps: []step{{left("x") + ";" + captured("y"), 0, 300}, {"cuGraphLaunch x t; cuGraphLaunch y t", 0, 428}}},
		// "GPU execution reaches the freeing cudaFreeAsync() stream call"
		"freed in the stream": {steps: []step{
			{left("x"), 0, 300}, {"cuGraphLaunch x t; cuMemFreeAsync p t", 0, 364}, {"cuDeviceGraphMemTrim 0", 0, 364},
			{captured("y") + "; cuGraphLaunch y t", 0, 364}, {captured("z") + "; cuGraphLaunch z u", 0, 428}}},
		// "immediately upon the freeing call to cudaFree()"
		"freed at once": {steps: []step{
			{left("x"), 0, 300}, {"cuGraphLaunch x t; cuMemFree_v2 p; cuDeviceGraphMemTrim 0", 0, 300}}},
		// "graphs that are scheduled or running are considered to be actively using the physical memory"
		"trimming while it runs": {steps: []step{{captured("x") + "; cuGraphLaunch x t; cuDeviceGraphMemTrim 0", 0, 364}}},
		// "destroying a graph […] will not immediately return physical memory to the OS"
		"the end of a graph": {steps: []step{
			{"cuStreamBeginCapture_v2 s 0; cuMemAllocAsync &p 67108864 s; cuMemFreeAsync p s; cuStreamEndCapture s &g", 0, 300},
			{"cuGraphInstantiateWithFlags &x g 0; cuGraphLaunch x t; cuGraphExecDestroy x; cuGraphDestroy g", 0, 364}, {"cuDeviceGraphMemTrim 0", 0, 300}}},
		// "performing all mappings for that graph immediately"
		"an upload": {steps: []step{{captured("x") + "; cuGraphUpload x t", 0, 364}, {"cuDeviceGraphMemTrim 0", 0, 300}}},
		"no room":   {mib: 350, steps: []step{{captured("x"), 0, 300}, {"cuGraphLaunch x t", cudaOutOfMemory, 300}}},
	} {
		t.Run(name, func(t *testing.T) {
			spec := emulator.Spec{Count: 1}
			if c.mib > 0 {
				spec.GPUs = []emulator.GPUSpec{{MemoryMiB: c.mib, ReservedMiB: 1}}
			}
			n := start(t, spec)
			p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_CUDA=" + c.switches}})
			p.must(ordered)
			play(t, n, p, c.steps)
			p.must(used + ";" + reserved)
			if now := p.vars["reserved"] / mib; now != n.world.State().GPUs[0].UsedMiB-300 || p.vars["used"] > p.vars["reserved"] {
				t.Errorf("%d MiB reserved by its word, %d used; the card has given %d", now, p.vars["used"]/mib, n.world.State().GPUs[0].UsedMiB-300)
			}
		})
	}
}
