// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// TestCUDALimitsTakeMemory: what a context's limits have beyond their defaults is
// memory of the card, given back when they are lowered and with the context, and a
// limit that does not fit is out of memory and changes nothing.
func TestCUDALimitsTakeMemory(t *testing.T) {
	const (
		stack, fifo, heap, depth, launches, cache = 0, 1, 2, 3, 4, 6

		unsupported = 215
		threads     = 132 * 2048 // of an H100
	)
	n := start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_CUDA=heap=set"}})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuCtxGetLimit &stack 0; cuCtxGetLimit &fifo 1; cuCtxGetLimit &heap 2")
	want(t, "default stack", p.vars["stack"], 1024)
	want(t, "default FIFO", p.vars["fifo"], 1*mib)
	want(t, "default heap", p.vars["heap"], 8*mib)
	set := func(limit, value int, result int, MiB uint64) {
		t.Helper()
		what := fmt.Sprintf("cuCtxSetLimit %d %d", limit, value)
		want(t, what, p.do("%s", what), result)
		want(t, "MiB after "+what, n.world.State().GPUs[0].UsedMiB, 300+MiB)
	}
	set(heap, 1024*mib, 0, 1016)
	set(heap, 1*mib, 0, 0) // what a context takes holds the default
	set(heap, 100*mib+1, 0, 94)
	set(heap, 81920*mib, cudaOutOfMemory, 94)
	set(heap, 1<<62, cudaOutOfMemory, 94)
	p.must("cuCtxGetLimit &heap 2")
	want(t, "the heap that stays", p.vars["heap"], 100*mib+1)
	set(stack, 4096, 0, 94+3072*threads/mib)
	set(stack, 1025, 0, 94+(16*threads+2*mib-1)/(2*mib)*2)
	p.must("cuCtxGetLimit &stack 0")
	want(t, "a stack that is rounded", p.vars["stack"], 1040)
	set(stack, 1<<20, cudaInvalid, 94+6)
	set(stack, 512, 0, 94)
	set(fifo, 5*mib, 0, 98)
	set(cache, 1<<30, 0, 98)
	set(depth, 3, unsupported, 98) // from compute capability 9.0 on
	set(launches, 2048+1024*1024, 0, 98+1024)
	set(10, 1, cudaInvalid, 98+1024)
	p.must(`cuModuleLoadData &m "// gpu-emulator: blocks 0"; cuModuleGetFunction &big m "stack_2048"; cuModuleGetFunction &own m "malloc_1"`)
	p.must("cuLaunchKernel big 1 1 1 1 1 1 0 0 0 0; cuCtxGetLimit &stack 0")
	want(t, "the stack that a kernel needed", p.vars["stack"], 2048)
	set(stack, 2048, 0, 98+1024+1024*threads/mib)
	p.must("cuLaunchKernel own 1 1 1 1 1 1 0 0 0 0")
	set(heap, 8*mib, cudaInvalid, 98+1024+1024*threads/mib) // once a kernel has used it
	p.must("cuCtxCreate_v2 &d 0 0")
	set(heap, 12*mib, 0, 98+1024+1024*threads/mib+304)
	p.must("cuCtxDestroy_v2 d; cuCtxDestroy_v2 c")
	want(t, "MiB at the end", n.world.State().GPUs[0].UsedMiB, 0)
}

// TestCUDAModuleLoading: CUDA_MODULE_LOADING says when code takes its memory.
func TestCUDAModuleLoading(t *testing.T) {
	const begin = `cuInit 0; cuCtxCreate_v2 &a 0 0; cuCtxCreate_v2 &b 0 0`
	file := filepath.Join(t.TempDir(), "module.ptx")
	if err := os.WriteFile(file, []byte("// gpu-emulator: blocks 5\n.version 8.0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for how, steps := range map[string][]step{
		"EAGER": {
			{begin, 0, 600},
			{"cuModuleGetLoadingMode &mode", 0, 600},
			{`cuModuleLoadData &m "// gpu-emulator: blocks 10"; cuModuleGetFunction &f m "f"; cuFuncIsLoaded &loaded f`, 0, 620},
			{`cuLibraryLoadData &l "// gpu-emulator: blocks 3 global table 4096" 0 0 0 0 0 0`, 0, 634}, // both contexts, whose tables share a block
			{"cuCtxCreate_v2 &d 0 0", 0, 940},
			{"cuCtxDestroy_v2 d", 0, 634},
			{"cuLibraryUnload l; cuModuleUnload m", 0, 600},
			{`cuModuleLoadData &m "// gpu-emulator: blocks 41000"`, cudaOutOfMemory, 600},
			{`cuLibraryLoadData &l "// gpu-emulator: blocks 30000 global table 4096" 0 0 0 0 0 0`, cudaOutOfMemory, 600},
			{`cuModuleLoad &m "` + file + `"`, 0, 610},
			{`cuModuleLoad &m "` + file + `.not"`, 301, 610},
			{"cuLaunchKernel f 1 1 1 32 1 1 0 0 0 0", cudaInvalidHandle, 610}, // of a module that is gone
		},
		"LAZY": {
			{begin, 0, 600},
			{"cuModuleGetLoadingMode &mode", 0, 600},
			{`cuModuleLoadData &m "// gpu-emulator: blocks 10 global table 4096"; cuModuleGetFunction &f m "f"; cuModuleGetFunction &g m "g"`, 0, 602},
			{"cuFuncIsLoaded &loaded f", 0, 602},
			{"cuLaunchKernel f 1 1 1 32 1 1 0 0 0 0; cuLaunchKernel g 1 1 1 32 1 1 0 0 0 0", 0, 622},
			{"cuFuncIsLoaded &loaded g; cuFuncLoad g; cuModuleUnload m", 0, 600},
			{`cuLibraryLoadData &l "// gpu-emulator: blocks 3" 0 0 0 0 0 0; cuLibraryGetKernel &k l "kernel"; cuKernelGetFunction &f k`, 0, 600},
			{"cuFuncLoad f", 0, 606},
			{"cuLaunchKernel f 1 1 1 32 1 1 0 0 0 0; cuCtxPopCurrent_v2 &x; cuLaunchKernel f 1 1 1 32 1 1 0 0 0 0", 0, 612}, // once in each context
			{"cuLibraryUnload l", 0, 600},
			{`cuModuleLoadData &m "// gpu-emulator: blocks 41000"; cuModuleGetFunction &f m "f"`, 0, 600},
			{"cuLaunchKernel f 1 1 1 32 1 1 0 0 0 0", cudaOutOfMemory, 600},
			{`cuLibraryLoadFromFile &l "` + file + `" 0 0 0 0 0 0`, 0, 600},
		},
	} {
		t.Run(how, func(t *testing.T) {
			n := start(t, emulator.Spec{Count: 1})
			p := startProbe(t, probeWith{env: []string{"CUDA_MODULE_LOADING=" + how}})
			play(t, n, p, steps)
			want(t, "cuModuleGetLoadingMode", p.vars["mode"], map[string]uint64{"EAGER": 1, "LAZY": 2}[how])
			want(t, "the last cuFuncIsLoaded", p.vars["loaded"], 1)
		})
	}
}
