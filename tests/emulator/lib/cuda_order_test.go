// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

const (
	cudaNotReady = 600

	// Streams s, t and u that do not mind the default one, b that does; a kernel
	// that takes a minute, and one that takes a microsecond; the default pool.
	ordered = `cuInit 0; cuCtxCreate_v2 &c 0 0; cuStreamCreate &s 1; cuStreamCreate &t 1; cuStreamCreate &u 1; cuStreamCreate &b 0;
		cuModuleLoadData &m "// gpu-emulator: blocks 0"; cuModuleGetFunction &long m "busy_60000000us"; cuModuleGetFunction &short m "busy_1us";
		cuEventCreate &e 0; cuEventCreate &f 0; cuDeviceGetDefaultMemPool &d 0`
	// 64 MiB that stream s was working on when it freed them.
	freed = "cuMemAllocAsync &a 67108864 s; cuLaunchKernel long 1 1 1 32 1 1 0 s 0 0; cuMemFreeAsync a s"
	// The same, of work that is over, which nobody was told.
	passed = "cuMemAllocAsync &a 67108864 s; cuLaunchKernel short 1 1 1 32 1 1 0 s 0 0; cuMemFreeAsync a s; until cuStreamQuery s"
)

func off(attribute string) string {
	return "poke off 0 4 0; cuMemPoolSetAttribute d " + attribute + " &off"
}

// TestCUDAOrder holds the pools to NVIDIA's documentation, rule by rule: the
// Stream-Ordered Memory Allocator of the programming guide, and the driver API's
// reference. Where it is silent, to both values of a switch.
func TestCUDAOrder(t *testing.T) {
	for name, c := range map[string]struct {
		switches string
		mib      uint64 // of the card; 0 is the model's
		steps    []step
	}{
		// "memory freed in a stream can be reused immediately in a subsequent allocation request on the same stream"
		"the same stream": {steps: []step{{freed, 0, 364}, {"cuMemAllocAsync &x 67108864 s", 0, 364}}},
		// cudaMemPoolReuseAllowInternalDependencies: only "failing to allocate and map more physical memory"
		"growth before waiting for another stream": {steps: []step{{freed, 0, 364}, {"cuMemAllocAsync &x 67108864 t", 0, 428}}},
		"and the switch for drivers that wait first": {switches: "reuse=eager", steps: []step{
			{freed, 0, 364}, {"cuMemAllocAsync &x 67108864 t", 0, 364}, {"cuStreamQuery t", cudaNotReady, 364}}},
		"waiting for another stream on a full card": {mib: 400, steps: []step{
			{freed, 0, 364}, {"cuStreamQuery t; cuMemAllocAsync &x 67108864 t", 0, 364},
			{"cuStreamQuery t", cudaNotReady, 364}, // "the driver will insert the required dependency into the allocating stream"
		}},
		"not waiting for another stream, switched off": {mib: 400, steps: []step{
			{off("3") + ";" + freed, 0, 364}, {"cuMemAllocAsync &x 67108864 t", cudaOutOfMemory, 364}, {"cuMemAllocAsync &x 67108864 s", 0, 364}}},
		// cudaMemPoolReuseFollowEventDependencies: "examines dependency information established by CUDA events"
		"an event after the free": {steps: []step{
			{freed, 0, 364}, {"cuEventRecord e s; cuStreamWaitEvent t e 0; cuMemAllocAsync &x 67108864 t", 0, 364}}},
		"an event before the free": {steps: []step{
			{"cuMemAllocAsync &a 67108864 s; cuLaunchKernel long 1 1 1 32 1 1 0 s 0 0; cuEventRecord e s; cuMemFreeAsync a s", 0, 364},
			{"cuStreamWaitEvent t e 0; cuMemAllocAsync &x 67108864 t", 0, 428}}},
		"an event after the free, switched off": {steps: []step{
			{off("1") + ";" + freed, 0, 364}, {"cuEventRecord e s; cuStreamWaitEvent t e 0; cuMemAllocAsync &x 67108864 t", 0, 428}}},
		"events by way of a third stream": {steps: []step{
			{freed + "; cuEventRecord e s; cuStreamWaitEvent u e 0; cuEventRecord f u; cuStreamWaitEvent t f 0; cuMemAllocAsync &x 67108864 t", 0, 364}}},
		"and the switch for drivers that look no further than one": {switches: "follow=direct", steps: []step{
			{freed + "; cuEventRecord e s; cuStreamWaitEvent u e 0; cuEventRecord f u; cuStreamWaitEvent t f 0; cuMemAllocAsync &x 67108864 t", 0, 428}}},
		// "Cuda events and null stream interactions can create the required stream ordered dependencies"
		"the default stream waits for a blocking one": {steps: []step{
			{strings.ReplaceAll(freed, " s", " b"), 0, 364}, {"cuMemAllocAsync &x 67108864 0", 0, 364}}},
		"the default stream does not wait for others": {steps: []step{{freed, 0, 364}, {"cuMemAllocAsync &x 67108864 0", 0, 428}}},
		"a blocking stream waits for the default one": {steps: []step{
			{strings.ReplaceAll(freed, " s", " 0"), 0, 364}, {"cuMemAllocAsync &x 67108864 b", 0, 364}}},
		"others do not wait for the default stream": {steps: []step{
			{strings.ReplaceAll(freed, " s", " 0"), 0, 364}, {"cuMemAllocAsync &x 67108864 t", 0, 428}}},
		// cudaMemPoolReuseAllowOpportunistic: "the stream has passed the point of execution indicated by the free"
		"what has passed": {steps: []step{{passed, 0, 364}, {"cuMemAllocAsync &x 67108864 t", 0, 364}}},
		"what has passed, switched off": {steps: []step{
			{off("2") + ";" + passed, 0, 364}, {"cuMemAllocAsync &x 67108864 t", 0, 428}}},
		"and the switch for drivers that do not look": {switches: "opportunistic=lazy", steps: []step{
			{passed, 0, 364}, {"cuMemAllocAsync &x 67108864 t", 0, 428}}},
		// "the allocator will still reuse memory made available when a stream is synchronized with the CPU"
		"what was synchronised with": {steps: []step{
			{"poke keep 0 8 1073741824; cuMemPoolSetAttribute d 4 &keep;" + off("1") + ";" + off("2") + ";" + off("3"), 0, 300},
			{passed + "; cuStreamSynchronize s; cuMemAllocAsync &x 67108864 t", 0, 364}}},
		"what an event was synchronised with": {steps: []step{
			{"poke keep 0 8 1073741824; cuMemPoolSetAttribute d 4 &keep;" + off("2"), 0, 300},
			{passed + "; cuEventRecord e s; cuEventSynchronize e; cuMemAllocAsync &x 67108864 t", 0, 364}}},
		"synchronising with another stream": {steps: []step{{freed, 0, 364}, {"cuStreamSynchronize t", 0, 364}}},
		// "the allocator will try to release memory back to the OS on the next call to stream, event or device synchronize"
		"beyond the threshold": {steps: []step{{passed, 0, 364}, {"cuCtxSynchronize", 0, 300}}},
		"the threshold": {steps: []step{
			{"poke keep 0 8 33554432; cuMemPoolSetAttribute d 4 &keep", 0, 300}, {passed + "; cuStreamSynchronize s", 0, 332}}},
		"and the switch for drivers that only try": {switches: "shrink=never", steps: []step{
			{passed + "; cuStreamSynchronize s", 0, 364}, {"cuMemPoolTrimTo d 0", 0, 300}}},
		"a query does nothing": {switches: "opportunistic=lazy", steps: []step{{passed, 0, 364}, {"cuMemAllocAsync &x 67108864 t", 0, 428}}},
		"and the switch for drivers where it observes": {switches: "opportunistic=lazy,query=observes", steps: []step{
			{"poke keep 0 8 1073741824; cuMemPoolSetAttribute d 4 &keep", 0, 300}, {passed, 0, 364}, {"cuMemAllocAsync &x 67108864 t", 0, 364}}},
		// cuMemPoolTrimTo: "asynchronously freed but whose completion has not been observed on the host […] can count as outstanding"
		"trimming what has passed": {switches: "shrink=never", steps: []step{
			{passed, 0, 364}, {"cuMemPoolTrimTo d 0", 0, 364}, {"cuStreamSynchronize s; cuMemPoolTrimTo d 0", 0, 300}}},
		"trimming what has not":                               {steps: []step{{freed, 0, 364}, {"cuMemPoolTrimTo d 0", 0, 364}}},
		"and the switch for drivers that release what passed": {switches: "trim=passed", steps: []step{{passed, 0, 364}, {"cuMemPoolTrimTo d 0", 0, 300}}},
		// "the driver assumes that all accesses to the allocation are complete and performs no further synchronization"
		"freed by cuMemFree": {steps: []step{
			{"cuMemAllocAsync &a 67108864 s; cuLaunchKernel long 1 1 1 32 1 1 0 s 0 0; cuMemFree_v2 a; cuMemAllocAsync &x 67108864 t", 0, 364}}},
		// cuMemPoolDestroy: "If […] the pool has free operations that haven't completed […] the resources […] will be released automatically"
		"a destroyed pool with a free under way": {steps: []step{
			{"poke props 0 4 1; poke props 8 4 1; cuMemPoolCreate &p &props; cuMemAllocFromPoolAsync &a 67108864 p s", 0, 364},
			{"cuLaunchKernel long 1 1 1 32 1 1 0 s 0 0; cuMemFreeAsync a s; cuMemPoolDestroy p", 0, 364},
			{"cuMemAllocFromPoolAsync &x 1 p s", cudaInvalid, 364},
			{"cuMemAllocAsync &x 67108864 s", 0, 428}}},
		// CUmemPoolProps::maxSize: "Applications can control the maximum size of the pool"
		"the largest size of a pool": {steps: []step{
			{"poke props 0 4 1; poke props 8 4 1; poke props 24 8 67108864; cuMemPoolCreate &p &props; cuMemAllocFromPoolAsync &a 33554432 p s", 0, 332},
			{"cuMemAllocFromPoolAsync &x 67108864 p s", cudaOutOfMemory, 332}, {"cuMemAllocFromPoolAsync &x 33554432 p s", 0, 364}}},
		// "stream-ordered allocations are not context associated"
		"the end of a context": {steps: []step{
			{"cuCtxCreate_v2 &x 0 0; cuMemAllocAsync &a 33554432 0", 0, 632}, {"cuCtxDestroy_v2 x", 0, 332}, {"cuMemFree_v2 a; cuCtxSetCurrent c; cuCtxSynchronize", 0, 300}}},
		"and the switch for drivers where it ends with the context": {switches: "pool-memory=context", steps: []step{
			{"cuCtxCreate_v2 &x 0 0; cuMemAllocAsync &a 33554432 0", 0, 632}, {"cuCtxDestroy_v2 x", 0, 332}, {"cuCtxSetCurrent c; cuCtxSynchronize", 0, 300}}},
		"holes": {steps: []step{
			{"cuMemAllocAsync &a 8388608 s; cuMemAllocAsync &x 8388608 s; cuMemAllocAsync &y 8388608 s; cuMemAllocAsync &z 8388608 s", 0, 332},
			{"cuMemFreeAsync a s; cuMemFreeAsync y s; cuStreamSynchronize s", 0, 332}, // no whole piece is free
			{"cuMemAllocAsync &a 16777216 s", 0, 364}, {"cuMemAllocAsync &y 8388608 t", 0, 364}}},
		"and the switch for drivers that put them together": {switches: "holes=remap", steps: []step{
			{"cuMemAllocAsync &a 8388608 s; cuMemAllocAsync &x 8388608 s; cuMemAllocAsync &y 8388608 s; cuMemAllocAsync &z 8388608 s", 0, 332},
			{"cuMemFreeAsync a s; cuMemFreeAsync y s; cuMemAllocAsync &a 16777216 s", 0, 332},
			{"cuMemFreeAsync x s; cuMemFreeAsync a s; cuCtxSynchronize", 0, 308}}}, // blocks go back one by one
		"large requests": {steps: []step{{"cuMemAllocAsync &a 41943040 s", 0, 364}, {"cuMemAllocAsync &x 25165824 s", 0, 364}}},
		"and the switch for drivers that take no more than is asked for": {switches: "large=blocks", steps: []step{{"cuMemAllocAsync &a 41943040 s", 0, 340}}},
		"pieces of another size": {switches: "piece-mib=2", steps: []step{{"cuMemAllocAsync &a 1 s; cuMemAllocAsync &x 2097152 s", 0, 304}}},
	} {
		t.Run(name, func(t *testing.T) {
			spec := emulator.Spec{Count: 1}
			if c.mib != 0 {
				spec.GPUs = []emulator.GPUSpec{{MemoryMiB: c.mib, ReservedMiB: 1}}
			}
			n := start(t, spec)
			p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_CUDA=" + c.switches}})
			p.must(ordered)
			for _, s := range c.steps {
				if s.fails > 0 {
					want(t, s.calls, p.do("%s", s.calls), s.fails)
				} else {
					p.must(s.calls)
				}
				want(t, "MiB after "+s.calls, n.world.State().GPUs[0].UsedMiB, s.mib)
			}
		})
	}
}

// "the total size of all of the memory allocated from the pool and not available
// for reuse": whether memory is, that one stream alone may reuse, is a switch.
func TestCUDAPoolStatistics(t *testing.T) {
	for switches, mibs := range map[string][]uint64{"": {64, 64, 0, 64, 0}, "used=pending": {64, 64, 64, 64, 64}} {
		t.Run(switches, func(t *testing.T) {
			start(t, emulator.Spec{Count: 1})
			p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_CUDA=" + switches}})
			p.must(ordered + ";" + freed + `; cuMemPoolGetAttribute d 5 &reserved; cuMemPoolGetAttribute d 6 &reservedmost;
				cuMemPoolGetAttribute d 7 &used; cuMemPoolGetAttribute d 8 &usedmost`)
			for i, name := range []string{"reserved", "reservedmost", "used", "usedmost"} {
				want(t, name, p.vars[name], mibs[i]*mib)
			}
			// "resetting the watermarks will make them take on the current value"
			p.must("poke zero 0 8 0; cuMemPoolSetAttribute d 8 &zero; cuMemPoolGetAttribute d 8 &usedmost")
			want(t, "the mark that was put down", p.vars["usedmost"], mibs[4]*mib)
		})
	}
}

// Streams and events are done when their work is.
func TestCUDATime(t *testing.T) {
	start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_CUDA=kernel-us=300000"}})
	p.must(ordered + `; cuModuleGetFunction &k m "kernel"; cuStreamQuery s; cuEventQuery e`)
	p.must("cuEventRecord f s; cuLaunchKernel k 1 1 1 32 1 1 0 s 0 0; cuEventRecord e s")
	want(t, "a stream at work", p.do("cuStreamQuery s"), cudaNotReady)
	want(t, "an event after its work", p.do("cuEventQuery e"), cudaNotReady)
	p.must("cuEventQuery f; cuStreamQuery t")
	p.must("cuEventSynchronize e; cuEventQuery e; cuStreamQuery s")
	p.must("cuLaunchKernel k 1 1 1 32 1 1 0 s 0 0; cuStreamSynchronize s; cuStreamQuery s")
	p.must("cuLaunchKernel k 1 1 1 32 1 1 0 t 0 0; cuCtxSynchronize; cuStreamQuery t")
	p.must("cuLaunchKernel k 1 1 1 32 1 1 0 s 0 0; cuEventRecord e s; cuStreamWaitEvent t e 0")
	want(t, "a stream that waits", p.do("cuStreamQuery t"), cudaNotReady)
	// "the legacy stream first waits on all blocking streams […] and then all blocking streams wait on the legacy stream"
	p.must("cuStreamSynchronize t; cuLaunchKernel k 1 1 1 32 1 1 0 0 0 0")
	want(t, "a blocking stream beside the default one", p.do("cuStreamQuery b"), cudaNotReady)
	p.must("cuStreamQuery u; cuMemAlloc_v2 &p 4096; cuMemcpyDtoH_v2 &h p 64; cuStreamQuery b")
	p.must("cuLaunchKernel k 1 1 1 32 1 1 0 b 0 0; cuMemsetD8Async p 0 4096 0")
	want(t, "the default stream after a blocking one", p.do("cuStreamQuery 0"), cudaNotReady)
	p.must("cuStreamSynchronize 0; cuStreamQuery b")
	// A graph takes the time of its kernels.
	p.must("cuGraphCreate &g 0; poke n 0 8 k; cuGraphAddKernelNode_v2 &a g 0 0 &n; cuGraphInstantiateWithFlags &x g 0; cuGraphUpload x u; cuStreamQuery u")
	p.must("cuGraphLaunch x u")
	want(t, "a stream with a graph", p.do("cuStreamQuery u"), cudaNotReady)
	p.must("cuStreamSynchronize u; cuStreamQuery u; cuStreamBeginCapture_v2 s 0; cuLaunchKernel k 1 1 1 32 1 1 0 s 0 0; cuStreamEndCapture s &g; cuGraphInstantiateWithFlags &x g 0")
	p.must("cuStreamQuery s; cuGraphLaunch x s")
	want(t, "a stream with a graph that was captured", p.do("cuStreamQuery s"), cudaNotReady)
}

func TestCUDASwitches(t *testing.T) {
	start(t, emulator.Spec{Count: 1})
	for switches, result := range map[string]int{
		"": 0, "strict": 0, "strict,holes=remap,piece-mib=4": 0, "kernel-us=10,,": 0,
		"nonsense=1": cudaInvalid, "holes": cudaInvalid, "holes=some": cudaInvalid, "kernel-us=-1": cudaInvalid,
		"kernel-us=": cudaInvalid, "piece-mib=3": cudaInvalid, "strict=yes": cudaInvalid,
	} {
		p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_CUDA=" + switches}, quiet: result != 0})
		want(t, "cuInit with "+switches, p.do("cuInit 0"), result)
		p.kill()
		if result != 0 && !strings.Contains(p.errors.String(), "GPU_EMULATOR_CUDA") {
			t.Errorf("%s: said %q", switches, p.errors.String())
		}
	}
}
