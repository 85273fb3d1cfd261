// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"bufio"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/lib"
)

// probeProgram is testdata/probe.c, compiled once.
var probeProgram = sync.OnceValues(func() (string, error) {
	out := filepath.Join(root, "probe")
	b, err := exec.Command("gcc", "-std=gnu17", "-O1", "-Wall", "-Wextra", "-Werror", "-I", "c", "-o", out, "testdata/probe.c", "-pthread", "-ldl").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("compile the probe: %w\n%s", err, b)
	}
	return out, nil
})

// cudaLibrary lays libcuda.so.1 beside the NVML of the root.
func cudaLibrary(t testing.TB) string {
	t.Helper()
	libraries, err := built()
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(root, "usr/lib/x86_64-linux-gnu/libcuda.so.1")
	if _, err := os.Lstat(at); err != nil {
		if err := os.Symlink(filepath.Join(libraries, lib.CUDA), at); err != nil {
			t.Fatal(err)
		}
	}
	return at
}

// probe is a running program that makes CUDA calls.
type probe struct {
	t    testing.TB
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Scanner
	pid  int
	vars map[string]uint64

	errors bytes.Buffer // with quiet, once it has ended
}

type probeWith struct {
	library string // default: that of the root
	mode    string
	env     []string
	quiet   bool                 // its standard error is kept
	jail    *syscall.SysProcAttr // begins as the role cuda of this test binary
}

func startProbe(t testing.TB, with probeWith) *probe {
	t.Helper()
	program, err := probeProgram()
	if err != nil {
		t.Fatal(err)
	}
	if with.library == "" {
		with.library = cudaLibrary(t)
	}
	p := &probe{t: t, cmd: exec.Command(program, with.library, with.mode), vars: map[string]uint64{}}
	p.cmd.Env = append(os.Environ(), with.env...)
	if with.jail != nil {
		p.cmd = self(t, "cuda", program, with.library, with.mode)
		p.cmd.Env = append(p.cmd.Env, with.env...)
		p.cmd.SysProcAttr = with.jail
	}
	p.cmd.Stderr = os.Stderr
	if with.quiet {
		p.cmd.Stderr = &p.errors
	}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewScanner(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	if p.pid, err = strconv.Atoi(p.line()); err != nil {
		t.Fatalf("probe with %s: %v", with.library, err)
	}
	return p
}

func (p *probe) kill() {
	p.in.Close()
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

func (p *probe) line() string {
	p.t.Helper()
	if !p.out.Scan() {
		p.t.Fatalf("the probe ended: %v", p.out.Err())
	}
	return p.out.Text()
}

// do makes one call and returns its result.
func (p *probe) do(format string, args ...any) int {
	p.t.Helper()
	fmt.Fprintf(p.in, format+"\n", args...)
	answer := strings.Fields(p.line())
	code, err := strconv.Atoi(answer[0])
	if err != nil {
		p.t.Fatalf("%s: %q", fmt.Sprintf(format, args...), answer)
	}
	for _, v := range answer[1:] {
		name, text, _ := strings.Cut(v, "=")
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			p.t.Fatalf("%s: %q", fmt.Sprintf(format, args...), answer)
		}
		p.vars[name] = uint64(n)
	}
	return code
}

// must makes calls, one a line, that succeed, or with until, do so some time.
func (p *probe) must(lines string) {
	p.t.Helper()
	for _, line := range strings.Split(lines, ";") {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if call, ok := strings.CutPrefix(line, "until "); ok {
			eventually(p.t, call, func() bool { return p.do("%s", call) == 0 })
			continue
		}
		if r := p.do("%s", line); r != 0 {
			p.t.Fatalf("%s: %d", line, r)
		}
	}
}

const (
	cudaInvalid        = 1
	cudaOutOfMemory    = 2
	cudaNotInitialized = 3
	cudaUnavailable    = 46
	cudaNoDevice       = 100
	cudaInvalidContext = 201
	cudaInvalidHandle  = 400
	cudaNotFound       = 500
	cudaDestroyed      = 709
	cudaNotSupported   = 801
	cudaInCapture      = 900
	cudaInvalidated    = 901
	cudaUnknown        = 999

	mib = 1 << 20
)

// A step is calls that succeed, or one that fails in a certain way, and what
// the world then has on GPU 0, in MiB.
type step struct {
	calls string
	fails int
	mib   uint64
}

// play makes the calls of steps, and compares what the world has after each.
func play(t *testing.T, n *node, p *probe, steps []step) {
	t.Helper()
	for _, s := range steps {
		switch {
		case s.fails > 0:
			want(t, s.calls, p.do("%s", s.calls), s.fails)
		case s.fails < 0: // the last prints an address
			i := strings.LastIndex(s.calls, ";")
			p.must(s.calls[:i])
			p.do("poke ptr 0 8 %d", p.do("%s", s.calls[i+1:]))
		default:
			p.must(s.calls)
		}
		want(t, "MiB after "+s.calls, n.world.State().GPUs[0].UsedMiB, s.mib)
	}
}

func TestCUDAMemory(t *testing.T) {
	const begin = "cuInit 0; cuCtxCreate_v2 &c 0 0"
	for name, steps := range map[string][]step{
		"contexts": {
			{"cuInit 0", 0, 0},
			{"cuCtxCreate_v2 &a 0 0", 0, 300},
			{"cuCtxCreate_v3 &b 0 0 0 0", 0, 600},
			{"cuCtxCreate_v4 &d 0 0 0", 0, 900},
			{"cuMemAlloc_v2 &p 4194304", 0, 904},
			{"cuCtxDestroy_v2 d", 0, 600},
			{"cuMemFree_v2 p", cudaInvalid, 600},
			{"cuCtxDestroy_v2 a; cuCtxDestroy_v2 b", 0, 0},
			{"cuCtxDestroy_v2 b", cudaDestroyed, 0},
			{"cuCtxGetDevice &n", cudaDestroyed, 0}, // of a, which was current below b
			{"cuCtxPopCurrent_v2 &n", 0, 0},
			{"cuCtxGetDevice &n", cudaInvalidContext, 0},
			{"cuCtxSetCurrent 12345", cudaInvalidContext, 0},
		},
		"the primary context": {
			{"cuInit 0; cuDevicePrimaryCtxRetain &a 0", 0, 300},
			{"cuDevicePrimaryCtxRetain &b 0; cuCtxSetCurrent b", 0, 300},
			{"cuMemAlloc_v2 &p 2097152", 0, 302},
			{"cuDevicePrimaryCtxRelease_v2 0", 0, 302},
			{"cuDevicePrimaryCtxRelease_v2 0", 0, 0},
			{"cuDevicePrimaryCtxRelease_v2 0", cudaInvalidContext, 0},
			{"cuMemAlloc_v2 &p 1", cudaDestroyed, 0},
			{"cuDevicePrimaryCtxRetain &a 0; cuMemAlloc_v2 &p 1; cuMemAllocAsync &q 1 0", 0, 334},
			{"cuDevicePrimaryCtxReset_v2 0", 0, 0},
		},
		"allocations": {
			{begin, 0, 300},
			{"cuMemAlloc_v2 &a 0", cudaInvalid, 300},
			{"cuMemAlloc_v2 &a 1; cuMemAlloc_v2 &b 1048576; cuMemAlloc_v2 &c 1048064", 0, 302},
			{"cuMemAlloc_v2 &d 1", 0, 304}, // the block was full
			{"cuMemFree_v2 b; cuMemAlloc_v2 &b 700000", 0, 304},
			{"cuMemFree_v2 a; cuMemFree_v2 b; cuMemFree_v2 c; cuMemFree_v2 d", 0, 300},
			{"cuMemFree_v2 d", cudaInvalid, 300},
			{"cuMemAlloc_v2 &a 2097152", 0, 302},
			{"cuMemAlloc_v2 &b 2097153", 0, 306},
			{"cuMemFree_v2 a; cuMemFree_v2 b", 0, 300},
			{"cuMemAlloc &a 5000000; cuMemFree a", 0, 300},
			{"cuMemAllocPitch_v2 &p &w 1000 4096 4", 0, 304},
			{"cuMemFree_v2 p; cuMemAllocManaged &p 1073741824 1; cuMemAllocHost_v2 &h 1073741824; cuMemHostAlloc &g 4096 0", 0, 300},
			{"cuMemsetD8_v2 p 0 1073741824; cuMemFree_v2 p; cuMemFreeHost h; cuMemFreeHost g", 0, 300},
			{"cuMemFreeHost h", cudaInvalid, 300},
			{"cuMemAlloc_v2 &p 4194304; cuMemGetAddressRange_v2 &b &n p; cuMemsetD32_v2 p 7 1048576; cuMemcpyHtoD_v2 p &h 256", 0, 304},
			{"cuMemsetD32_v2 p 7 1048577", cudaInvalid, 304},
		},
		"pools": {
			{begin, 0, 300},
			{"cuMemAllocAsync &a 1000 0", 0, 332},
			{"cuMemAllocAsync_ptsz &b 4194304 0; cuDeviceGetDefaultMemPool &d 0", 0, 332},
			{"cuMemPoolGetAttribute d 5 &reserved; cuMemPoolGetAttribute d 7 &used", 0, 332},
			{"cuMemFreeAsync a 0; cuMemFreeAsync b 0", 0, 332},
			{"cuMemAllocAsync &a 41943040 0", 0, 396}, // the free piece is no part of one of 64 MiB
			{"cuMemFreeAsync a 0", 0, 396},
			{"cuStreamSynchronize 0", 0, 300},
			{"poke threshold 0 8 33554432; cuMemPoolSetAttribute d 4 &threshold; cuMemAllocAsync &a 41943040 0; cuMemFreeAsync a 0; cuCtxSynchronize", 0, 332},
			{"cuMemPoolTrimTo d 0", 0, 300},
			{"poke props 0 4 1; poke props 8 4 1; cuMemPoolCreate &p &props; cuMemAllocFromPoolAsync &a 1 p 0", 0, 332},
			{"cuDeviceSetMemPool 0 p; cuMemAllocAsync &b 1 0", 0, 332},
			{"cuMemPoolDestroy p", 0, 332}, // lives as long as its allocations
			{"cuMemFree_v2 a; cuMemFree_v2 b", 0, 300},
			{"cuMemPoolDestroy d", cudaInvalid, 300},
			{"cuMemFreeAsync a 0", cudaInvalid, 300},
		},
		"memory by hand": {
			{begin, 0, 300},
			{"poke prop 0 4 1; poke prop 4 4 1; poke prop 8 4 1; cuMemGetAllocationGranularity &n &prop 0", 0, 300},
			{"cuMemCreate &h 3000000 &prop 0", cudaInvalid, 300},
			{"cuMemCreate &h 8388608 &prop 0; cuMemAddressReserve &p 16777216 0 0 0", 0, 308},
			{"cuMemMap p 8388608 0 h 0", 0, 308},
			{"cuMemMap p 8388608 0 h 0", cudaInvalid, 308}, // it is mapped there already
			{"poke access 0 4 1; poke access 8 4 3; cuMemSetAccess p 8388608 &access 1", 0, 308},
			{"cuMemRelease h", 0, 308}, // the mapping has it
			{"cuMemRetainAllocationHandle &g p; cuMemUnmap p 8388608", 0, 308},
			{"cuMemAddressFree p 8388608", cudaInvalid, 308},
			{"cuMemRelease g", 0, 300},
			{"cuMemRelease g", cudaInvalid, 300},
			{"cuMemAddressFree p 16777216", 0, 300},
			{"poke prop 8 4 2; poke prop 4 4 0; cuMemCreate &h 8388608 &prop 0; cuMemRelease h", 0, 300}, // on the host
		},
		"arrays": {
			{begin, 0, 300},
			// 1024 by 1024 floats are 4 MiB; a depth of 2 doubles them.
			{"poke d 0 8 1024; poke d 8 8 1024; poke d 16 4 32; poke d 20 4 1; cuArrayCreate_v2 &a &d", 0, 304},
			{"poke e 0 8 1024; poke e 8 8 1024; poke e 16 8 2; poke e 24 4 32; poke e 28 4 1; cuArray3DCreate_v2 &b &e", 0, 312},
			{"cuArrayGetDescriptor_v2 &g a; cuArray3DGetDescriptor_v2 &g b", 0, 312},
			{"cuArrayDestroy a; cuArrayDestroy b", 0, 300},
			{"cuArrayDestroy a", cudaInvalidHandle, 300},
			{"poke e 16 8 0; cuMipmappedArrayCreate &m &e 20; cuMipmappedArrayGetLevel &l m 3", 0, 306},
			{"cuMipmappedArrayGetLevel &l m 11", cudaInvalid, 306},
			{"cuArrayDestroy l", cudaInvalidHandle, 306},
			{"cuMipmappedArrayDestroy m", 0, 300},
			{"poke e 32 4 0x40; cuArray3DCreate_v2 &b &e", 0, 300}, // sparse
			{"poke v 0 4 64; poke v 4 4 64; poke v 8 4 1; poke v 12 4 4; cuArrayCreate &a &v", 0, 302},
			{"cuArrayDestroy a", 0, 300},
		},
		"graphs": {
			{begin + "; cuGraphCreate &g 0", 0, 300},
			{"poke n 0 4 1; poke n 8 4 1; poke n 104 8 8388608; cuGraphAddMemAllocNode &a g 0 0 &n; peek n 112 8", -1, 300},
			{"cuGraphInstantiateWithFlags &e g 0", 0, 300},
			{"cuGraphUpload e 0", 0, 308},
			{"cuGraphLaunch e 0", 0, 308},
			{"cuGraphLaunch e 0", cudaInvalid, 308}, // what it allocated was not freed
			{"cuDeviceGraphMemTrim 0; cuDeviceGetGraphMemAttribute 0 0 &used; cuDeviceGetGraphMemAttribute 0 2 &reserved", 0, 308},
			{"cuGraphMemAllocNodeGetParams a &m; cuGraphNodeGetType a &type; cuGraphGetNodes g 0 &count", 0, 308},
			{"cuMemFreeAsync ptr 0", 0, 308},
			{"cuGraphLaunch_ptsz e 0; cuMemFree_v2 ptr; cuGraphExecDestroy e; cuGraphDestroy g", 0, 308},
			{"cuDeviceGraphMemTrim 0", 0, 300},
			// An allocation that the graph frees is there only while it runs.
			{"cuGraphCreate &g 0; cuGraphAddMemAllocNode &a g 0 0 &n", 0, 300},
			{"cuGraphAddEmptyNode &b g &a 1", 0, 300},
			{"cuGraphInstantiateWithFlags &e g 1; cuGraphLaunch e 0; cuGraphLaunch e 0", 0, 308}, // freed at each launch
			// A graph that allocates is moved into another, not copied.
			{"cuGraphCreate &o 0", 0, 308},
			{"cuGraphAddChildGraphNode &k o 0 0 g", cudaNotSupported, 308},
			{"poke x 0 4 4; cuGraphCreate &i 0; cuGraphAddChildGraphNode &k o 0 0 i; cuGraphChildGraphNodeGetGraph k &i", 0, 308},
		},
		"stream capture": {
			{begin + "; cuStreamCreate &s 1; cuStreamBeginCapture_v2 s 0", 0, 300},
			{"cuMemAllocAsync &p 8388608 s; cuStreamIsCapturing s &status; cuMemsetD8Async p 0 100 s; cuMemFreeAsync p s", 0, 300},
			{"cuStreamGetCaptureInfo_v2 s &status &id &graph &deps &n", 0, 300},
			{"cuStreamEndCapture s &g; cuGraphGetNodes g 0 &count", 0, 300},
			{"cuGraphInstantiateWithParams &e g &params; cuGraphLaunch e s", 0, 308},
			{"cuGraphLaunch e s", 0, 308},
			{"cuDeviceGraphMemTrim 0", 0, 300},
			{"cuStreamBeginCapture_v2 s 0; cuEventCreate &v 0; cuEventRecord v s; cuStreamCreate &u 1; cuStreamWaitEvent u v 0; cuMemAllocAsync &p 4096 u", 0, 300},
			{"cuMemAlloc_v2 &q 4096", cudaInCapture, 300},
			{"cuStreamEndCapture s &g", cudaInvalidated, 300},
			{"cuMemAlloc_v2 &q 4096; cuMemFree_v2 q", 0, 300},
			{"cuStreamBeginCapture_v2 0 0", cudaInCapture, 300},
			{"cuStreamBeginCapture_v2_ptsz 0 2; cuMemAlloc_v2 &q 4096; cuStreamEndCapture_ptsz 0 &g", 0, 302},
		},
		"modules": {
			{begin, 0, 300},
			{`cuModuleLoadData &m "nonsense"`, 200, 300},
			{`cuModuleLoadData &m "// gpu-emulator: blocks 12 global table 4096"`, 0, 326},
			{`cuModuleGetGlobal_v2 &p &n m "table"; cuModuleGetFunction &f m "kernel"; cuLaunchKernel f 1 1 1 32 1 1 0 0 0 0; cuFuncGetAttribute &n 0 f`, 0, 326},
			{`cuModuleGetGlobal_v2 &p &n m "chair"`, cudaNotFound, 326},
			{"cuMemFree_v2 p", cudaInvalid, 326},
			{"cuModuleUnload m", 0, 300},
			{`cuModuleLoadDataEx &m ".version 8.0" 0 0 0`, 0, 302},
			{"cuModuleUnload m", 0, 300},
			{`cuLibraryLoadData &l "// gpu-emulator: blocks 3" 0 0 0 0 0 0`, 0, 300}, // no context has it yet
			{`cuLibraryGetKernel &k l "kernel"; cuKernelGetFunction &f k; cuLaunchKernel_ptsz f 1 1 1 32 1 1 0 0 0 0`, 0, 306},
			{"cuLibraryUnload l", 0, 300},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := start(t, emulator.Spec{Count: 1})
			play(t, n, startProbe(t, probeWith{}), steps)
		})
	}
}

// What NVML says of a process is what it has, and its death frees all of it.
func TestCUDAProcessInNVML(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2, ContextMiB: 412})
	api := n.open(t)
	d := device(t, api, 1)
	p := startProbe(t, probeWith{})
	if list, r := d.GetComputeRunningProcesses(); r != nvml.SUCCESS || len(list) != 0 {
		t.Errorf("before: %v, %v", list, r)
	}
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 1; cuMemAlloc_v2 &a 1073741824; cuMemAllocManaged &m 1073741824 1; cuMemGetInfo_v2 &free &total; cuDeviceTotalMem_v2 &all 1")
	list, r := d.GetComputeRunningProcesses()
	if r != nvml.SUCCESS || len(list) != 1 || list[0].Pid != uint32(p.pid) || list[0].UsedGpuMemory != (412+1024)*mib {
		t.Errorf("processes: %+v, %v; want %d with 1436 MiB", list, r, p.pid)
	}
	m, r := d.GetMemoryInfo_v2()
	ok(t, r, "memory")
	want(t, "used", m.Used, (412+1024)*mib)
	want(t, "cuMemGetInfo's free", p.vars["free"], m.Free)
	want(t, "cuMemGetInfo's total", p.vars["total"], m.Total-m.Reserved)
	want(t, "cuDeviceTotalMem", p.vars["all"], m.Total-m.Reserved)
	if err := n.world.Unload(); err == nil {
		t.Error("the driver was unloaded under a program")
	}
	if peak, err := n.world.PeakUsed(1); err != nil || peak != 1436*mib {
		t.Errorf("peak %d, %v", peak, err)
	}

	// No waiting: memory of the dead is free as soon as they are.
	p.kill()
	want(t, "used when it is dead", n.world.State().GPUs[1].UsedMiB, 0)
	if peak, err := n.world.PeakUsed(1); err != nil || peak != 1436*mib {
		t.Errorf("peak stays: %d, %v", peak, err)
	}
	if err := n.world.ResetPeak(1); err != nil {
		t.Error(err)
	}
	if peak, err := n.world.PeakUsed(1); err != nil || peak != 0 {
		t.Errorf("peak after reset: %d, %v", peak, err)
	}
}

func TestCUDAOutOfMemory(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1, GPUs: []emulator.GPUSpec{{MemoryMiB: 2048, ReservedMiB: 48}}})
	p, q := startProbe(t, probeWith{}), startProbe(t, probeWith{})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 1048576000")
	q.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
	want(t, "400 MiB left", q.do("cuMemAlloc_v2 &a %d", 400*mib+1), cudaOutOfMemory)
	q.must("cuMemAlloc_v2 &a 419430400")
	for _, call := range []string{
		"cuMemAlloc_v2 &x 1", "cuCtxCreate_v2 &x 0 0", "cuMemAllocAsync &x 1 0", "cuMemAllocPitch_v2 &x &w 1 1 4", "cuMemAlloc &x 1",
		`cuModuleLoadData &x ".version"`,
	} {
		want(t, call, q.do("%s", call), cudaOutOfMemory)
	}
	// Nothing of what was refused stays.
	want(t, "used", n.world.State().GPUs[0].UsedMiB, 2000)
	p.must("cuMemFree_v2 a")
	q.must("cuMemAllocAsync &x 1 0; cuMemAlloc_v2 &x 1")
	want(t, "used", n.world.State().GPUs[0].UsedMiB, 1034)
	if err := n.world.AddProcess(emulator.Process{PID: 1, GPU: 0, Kind: emulator.Graphics, MiB: 966}); err != nil {
		t.Error(err)
	}
	want(t, "no room beside another kind", p.do("cuMemAlloc_v2 &a 1"), cudaOutOfMemory)
}

func TestCUDAVisibleDevices(t *testing.T) {
	n := start(t, emulator.Spec{Count: 4})
	uuid := func(i int) string { return n.world.State().GPUs[i].UUID }
	for list, c := range map[string]struct {
		result int
		gpus   []int
	}{
		"3,1":                                 {0, []int{3, 1}},
		" 2 , 0":                              {0, []int{2, 0}},
		uuid(2) + "," + uuid(0)[:10]:          {0, []int{2, 0}},
		"GPU-":                                {cudaNoDevice, nil}, // begins all of them
		"1,9,2":                               {0, []int{1}},
		"-1,2":                                {cudaNoDevice, nil},
		"":                                    {cudaNoDevice, nil},
		"1,1":                                 {cudaNoDevice, nil},
		"0,GPU-00000000-no-such,1":            {0, []int{0}},
		"MIG-" + strings.ToUpper(uuid(0)[4:]): {cudaNoDevice, nil}, // it is not in MIG mode
		"MIG-" + uuid(0) + "/0/0":             {cudaNoDevice, nil},
	} {
		t.Run(list, func(t *testing.T) {
			p := startProbe(t, probeWith{env: []string{"CUDA_VISIBLE_DEVICES=" + list}})
			want(t, "cuInit", p.do("cuInit 0"), c.result)
			if c.result != 0 {
				return
			}
			p.must("cuDeviceGetCount &n")
			want(t, "count", p.vars["n"], uint64(len(c.gpus)))
			for i, g := range c.gpus {
				p.must(fmt.Sprintf("cuCtxCreate_v2 &c 0 %d; cuDeviceGetUuid_v2 &u %d; cuDeviceGetPCIBusId &id 20 %d; cuDeviceGetByPCIBusId &back &id", i, i, i))
				want(t, "memory of GPU "+strconv.Itoa(g), n.world.State().GPUs[g].UsedMiB, 300)
				want(t, "found by its address", int(uint32(p.vars["back"])), i)
				hex := strings.ReplaceAll(uuid(g)[4:], "-", "")
				first, _ := strconv.ParseUint(hex[:2], 16, 8)
				want(t, "the first byte of its UUID", p.vars["u"]&0xff, first)
			}
			p.kill()
			eventually(t, "all free again", func() bool { return n.world.State().Processes == nil })
		})
	}
}

func TestCUDAFork(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{})
	want(t, "a child before cuInit", p.do("fork cuInit 0"), 0)
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 1073741824")
	for _, call := range []string{"cuInit 0", "cuMemAlloc_v2 &b 1", "cuCtxCreate_v2 &d 0 0", "cuMemFree_v2 a", "cuDeviceGetCount &n"} {
		want(t, "in a child: "+call, p.do("fork %s", call), cudaNotInitialized)
	}
	want(t, "memory after children", n.world.State().GPUs[0].UsedMiB, 1324)
	p.must("cuMemFree_v2 a")

	// Another program in the same process begins with nothing.
	program, _ := probeProgram()
	p.must("cuMemAlloc_v2 &a 1073741824")
	fmt.Fprintf(p.in, "exec %s %s\n", program, cudaLibrary(t))
	want(t, "the same process", p.line(), strconv.Itoa(p.pid))
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
	want(t, "memory, without that of the program before", n.world.State().GPUs[0].UsedMiB, 300)
	want(t, "processes", len(n.world.State().Processes), 1)
}

func TestCUDASharedMemory(t *testing.T) {
	const importIt = "cuMemImportFromShareableHandle &h fd 1"
	n := start(t, emulator.Spec{Count: 1})
	of := func(p *probe) uint64 {
		for _, q := range n.world.State().Processes {
			if q.PID == p.pid {
				return q.MiB
			}
		}
		return 0
	}
	used := func() uint64 { return n.world.State().GPUs[0].UsedMiB }
	begin := func() *probe {
		p := startProbe(t, probeWith{})
		p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; poke prop 0 4 1; poke prop 4 4 1; poke prop 8 4 1")
		return p
	}
	a, b := begin(), begin()
	a.must("cuMemCreate &h 67108864 &prop 0; cuMemExportToShareableHandle &out h 1 0")
	b.must(fmt.Sprintf("take %d %d; %s", a.pid, int32(a.vars["out"]), importIt))
	want(t, "exporter", of(a), 364)
	want(t, "importer", of(b), 300)
	a.must("cuMemRelease h; close out")
	want(t, "exporter, with what the importer holds", of(a), 364)
	b.must("cuMemRelease h")
	want(t, "exporter, with the importer's descriptor", of(a), 364)
	b.must("close fd")
	eventually(t, "nobody has it", func() bool { return of(a) == 300 })

	// A handle that is gone, and one that was none.
	a.must("cuMemCreate &h 67108864 &prop 0; cuMemExportToShareableHandle &out h 1 0; cuMemRelease h")
	want(t, "kept by a descriptor alone", of(a), 364)
	a.must("close out")
	eventually(t, "its descriptor is closed", func() bool { return of(a) == 300 })
	want(t, "no such descriptor", b.do("cuMemImportFromShareableHandle &h 0 1"), cudaInvalid)

	// What outlives its exporter is on the card, and no process has it.
	a.must("cuMemCreate &h 67108864 &prop 0; cuMemExportToShareableHandle &out h 1 0")
	b.must(fmt.Sprintf("take %d %d; %s; close fd", a.pid, int32(a.vars["out"]), importIt))
	a.kill()
	want(t, "with the exporter dead", used(), 364)
	want(t, "importer", of(b), 300)
	b.kill()
	eventually(t, "both dead", func() bool { return used() == 0 })

	// CUDA IPC.
	a, b = begin(), begin()
	a.must("cuMemAlloc_v2 &p 67108864; cuIpcGetMemHandle &ipc p")
	copyBytes(t, a, b, "ipc", 64)
	b.must("cuIpcOpenMemHandle_v2 &q 1 @ipc")
	want(t, "importer", of(b), 300)
	a.must("cuMemFree_v2 p")
	want(t, "exporter, while another has it open", of(a), 364)
	b.must("cuIpcCloseMemHandle q")
	want(t, "exporter", of(a), 300)
	want(t, "a handle of what is gone", b.do("cuIpcOpenMemHandle_v2 &q 1 @ipc"), cudaInvalid)
}

// copyBytes gives a variable of one probe to another.
func copyBytes(t *testing.T, from, to *probe, name string, n int) {
	t.Helper()
	for at := 0; at < n; at += 4 {
		fmt.Fprintf(from.in, "peek %s %d 4\n", name, at)
		if v := from.line(); to.do("poke %s %d 4 %s", name, at, v) != 0 {
			t.Fatal("poke")
		}
	}
}

// Many threads of many processes at once: what the world has in the end is what
// the contexts take, and it never had more than the card.
func TestCUDAManyClients(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	var probes []*probe
	for range 8 {
		p := startProbe(t, probeWith{})
		p.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
		probes = append(probes, p)
	}
	for _, p := range probes {
		fmt.Fprintln(p.in, "threads 4 200 6000000")
	}
	for _, p := range probes {
		want(t, "calls that failed", p.line(), "0")
	}
	want(t, "used", n.world.State().GPUs[0].UsedMiB, 8*300)
	if peak, err := n.world.PeakUsed(0); err != nil || peak <= 8*300*mib || peak > 81008*mib {
		t.Errorf("peak %d, %v", peak, err)
	}
}

// A pool grows for one thread while others take what they find free in it and let it
// give that back: on a card with room nobody is refused for it.
func TestPieceTakenByAnotherThread(t *testing.T) {
	start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
	fmt.Fprintln(p.in, "pooled 8 2000 33554432")
	want(t, "threads that were refused", p.line(), "0")
}

// A pool never has more than its greatest size, also while it gives memory back for one
// thread, which takes a while here, and grows again for another.
func TestPoolOfItsGreatestSizeGivesBack(t *testing.T) {
	const threads, most, piece = 8, 2, 32 * mib
	n := start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{})
	p.must(fmt.Sprintf("cuInit 0; cuCtxCreate_v2 &c 0 0; poke props 0 4 1; poke props 8 4 1; poke props 24 8 %d; cuMemPoolCreate &p &props; cuDeviceSetMemPool 0 p", most*piece))
	if err := n.world.Inject(emulator.Fault{Call: "cuStreamSynchronize", Delay: 5 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(p.in, "pooled %d 20 %d\n", threads, piece)
	t.Logf("%s of %d threads found no room between what others had", p.line(), threads)
	if peak, err := n.world.PeakUsed(0); err != nil || peak > 300*mib+most*piece {
		t.Errorf("a peak of %d MiB, %v; want the context's 300 MiB and the pool's %d at most", peak/mib, err, most*piece/mib)
	}
}

// Processes that are killed in the middle of calls leave nothing.
func TestCUDAKilled(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	rounds := 5
	if testing.Short() {
		rounds = 2 // make test-all runs all
	}
	for range rounds {
		var probes []*probe
		for range 8 {
			p := startProbe(t, probeWith{})
			p.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
			fmt.Fprintln(p.in, "threads 2 100000000 6000000")
			probes = append(probes, p)
		}
		eventually(t, "all at work", func() bool {
			held := n.world.State().Processes
			return len(held) == len(probes) && !slices.ContainsFunc(held, func(p emulator.Process) bool { return p.MiB < 310 })
		})
		for _, p := range probes {
			p.kill()
		}
		want(t, "used", n.world.State().GPUs[0].UsedMiB, 0)
	}
}

func TestCUDALostGPUs(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2})
	p, q := startProbe(t, probeWith{}), startProbe(t, probeWith{})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 4194304")
	if err := n.world.Lose(0); err != nil {
		t.Fatal(err)
	}
	want(t, "allocate on a lost GPU", p.do("cuMemAlloc_v2 &b 4194304"), cudaUnknown)
	want(t, "free on a lost GPU", p.do("cuMemFree_v2 a"), cudaUnknown)
	q.must("cuInit 0; cuDeviceGetCount &n")
	want(t, "GPUs of a program that starts", q.vars["n"], 1)
	if err := n.world.SetHealth(1, emulator.Health{Recovery: emulator.RecoveryReset}); err != nil {
		t.Fatal(err)
	}
	want(t, "a context on a GPU that must be reset", q.do("cuCtxCreate_v2 &c 0 0"), cudaUnavailable)
	q.kill()
	p.kill()
	eventually(t, "unload", func() bool { return n.world.Unload() == nil })
	want(t, "cuInit without a driver", startProbe(t, probeWith{}).do("cuInit 0"), cudaNoDevice)
}

func TestCUDAFaults(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
	if err := n.world.Inject(emulator.Fault{Call: "cuMemAlloc_v2", Code: 214, Count: 1}); err != nil {
		t.Fatal(err)
	}
	want(t, "injected", p.do("cuMemAlloc_v2 &a 4194304"), 214)
	p.must("cuMemAlloc_v2 &a 4194304")
	var count uint64
	for _, c := range n.world.Calls(p.pid) {
		if c.Call == "cuMemAlloc_v2" {
			count = c.Count
		}
	}
	want(t, "calls counted", count, 2)
}

// With accounting in the process, nothing but cuInit asks the world.
func TestCUDAAccountingInProcess(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1, GPUs: []emulator.GPUSpec{{MemoryMiB: 2048, ReservedMiB: 48}}})
	p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_ACCOUNTING=process"}})
	p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 1000; cuMemGetInfo_v2 &free &total")
	want(t, "free", p.vars["free"], (2000-302)*mib)
	want(t, "total", p.vars["total"], 2000*mib)
	want(t, "too much", p.do("cuMemAlloc_v2 &b %d", 1698*mib+1), cudaOutOfMemory)
	want(t, "to the brim", p.do("burn 10000 4194304"), 424)
	n.world.ResetCalls()
	p.must("cuMemFree_v2 a; cuMemAlloc_v2 &a 1000; cuMemGetInfo_v2 &free &total")
	want(t, "calls of the world", len(n.world.Calls(0)), 0)
	want(t, "the world's figure", n.world.State().GPUs[0].UsedMiB, 0)
}

// Libraries find their world wherever they stand below its root, under any name
// and in a namespace of the loader's own.
func TestCUDALibraryElsewhere(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	dir := filepath.Join(root, "usr/lib/gpu-agent/driver")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(cudaLibrary(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"libcuda.so.1", "some.so"} {
		at := filepath.Join(dir, name)
		if err := os.WriteFile(at, data, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, mode := range []string{"", "apart"} {
			p := startProbe(t, probeWith{library: at, mode: mode})
			p.must("cuInit 0; cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 1")
			want(t, at+" "+mode, n.world.State().GPUs[0].UsedMiB, 302)
			p.kill()
			want(t, "free again", n.world.State().GPUs[0].UsedMiB, 0)
		}
	}
}

// openLibrary is a copy of the library for programs that run as nobody, who cannot
// look into the cache.
func openLibrary(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile(cudaLibrary(t))
	if err != nil {
		t.Fatal(err)
	}
	library := filepath.Join(root, "lib/libcuda.so.1")
	if err := errors.Join(os.Chmod(root, 0o755), os.MkdirAll(filepath.Dir(library), 0o755), os.WriteFile(library, data, 0o755)); err != nil {
		t.Fatal(err)
	}
	return library
}

// A program in a container, without privileges, has the GPU of its device node,
// and the world knows it by the PID outside.
func TestCUDAContainer(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("making device nodes in a mount namespace needs root")
	}
	n := start(t, emulator.Spec{Count: 4})
	p := startProbe(t, probeWith{library: openLibrary(t), jail: &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Cloneflags: syscall.CLONE_NEWPID}})
	p.must("cuInit 0; cuDeviceGetCount &n; cuCtxCreate_v2 &c 0 0")
	want(t, "GPUs", p.vars["n"], 1)
	want(t, "its own PID", p.pid, 1)
	held := n.world.State().Processes
	if len(held) != 1 || held[0].PID != p.cmd.Process.Pid || n.world.State().GPUs[held[0].GPU].Minor != 1 {
		t.Errorf("processes: %+v, want %d on the GPU of minor 1", held, p.cmd.Process.Pid)
	}
}

func TestCUDAGetProcAddress(t *testing.T) {
	start(t, emulator.Spec{Count: 1})
	p := startProbe(t, probeWith{})
	address := func(name string, version, flags int) (result int, at, status uint64) {
		result = p.do(`cuGetProcAddress_v2 "%s" &at %d %d &status`, name, version, flags)
		return result, p.vars["at"], p.vars["status"]
	}
	for name, want := range map[string]struct {
		version, flags int
		symbol         string
		status         uint64
	}{
		"cuMemAlloc":           {12000, 0, "cuMemAlloc_v2", 0},
		"cuCtxCreate":          {12000, 0, "cuCtxCreate_v3", 0},
		"cuGetProcAddress":     {12000, 0, "cuGetProcAddress_v2", 0},
		"cuMemAllocAsync":      {12000, 2, "cuMemAllocAsync_ptsz", 0},
		"cuMemcpyHtoD":         {12000, 2, "cuMemcpyHtoD_v2_ptds", 0},
		"cuMemFreeAsync":       {12000, 1, "cuMemFreeAsync", 0},
		"cuMemCreate":          {10010, 0, "", 2},
		"cuNoSuchCall":         {12000, 0, "", 1},
		"cuEmulatorFutureCall": {13000, 0, "cuEmulatorFutureCall", 0},
	} {
		result, at, status := address(name, want.version, want.flags)
		if result != 0 || uint32(status) != uint32(want.status) || (at == 0) != (want.symbol == "") {
			t.Errorf("%s: %d, %#x, status %d; want status %d", name, result, at, uint32(status), want.status)
		}
		if want.symbol != "" {
			// Through the table and through the loader it is one address.
			fmt.Fprintf(p.in, "address %s\n", want.symbol)
			if got := p.line(); got != strconv.FormatUint(at, 10) {
				t.Errorf("%s: %d is not %s, at %s", name, at, want.symbol, got)
			}
		}
	}
	for _, c := range [][2]int{{2000, 0}, {3020, 0}, {11040, 0}, {12050, 0}} {
		if r, at, _ := address("cuCtxCreate", c[0], c[1]); r != 0 || at == 0 {
			t.Errorf("cuCtxCreate of %d: %d", c[0], r)
		}
	}
	want(t, "the first form, of what is not there", p.do(`cuGetProcAddress "cuNoSuchCall" &at 12000 0`), cudaNotFound)
	want(t, "unknown flags", p.do(`cuGetProcAddress_v2 "cuInit" &at 12000 8 &status`), cudaInvalid)
	want(t, "no export tables", p.do("cuGetExportTable &table &id"), cudaNotFound)
	p.must("cuInit 0; cuEmulatorFutureCall 21 &answer")
	want(t, "a call of the future", p.vars["answer"], 42)
}

// The list that cuGetProcAddress answers from is what the library exports, and
// no call goes by the library's own PLT.
func TestCUDAExports(t *testing.T) {
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("c/cuda_names.h")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^[VT]\(\w+, \d+, (\w+)(?:, (\w+))?\)$`).FindAllSubmatch(source, -1) {
		listed[string(m[1])] = true
		if len(m[2]) > 0 {
			listed[string(m[2])] = true
		}
	}
	if want := bytes.Count(source, []byte("\nV(")) + bytes.Count(source, []byte("\nT(")); len(listed) < want-5 {
		t.Errorf("read %d names from a list of %d lines", len(listed), want)
	}
	exported := exports(t, filepath.Join(dir, lib.CUDA))
	for name := range listed {
		if !exported[name] {
			t.Errorf("%s is not exported", name)
		}
	}
	for name := range exported {
		if !listed[name] {
			t.Errorf("%s is not in cuda_names.h", name)
		}
	}
	f, err := elf.Open(filepath.Join(dir, lib.CUDA))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	imported, err := f.ImportedSymbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range imported {
		if strings.HasPrefix(s.Name, "cu") {
			t.Errorf("%s is looked up at run time", s.Name)
		}
	}
	if flags, err := f.DynValue(elf.DT_SYMBOLIC); err != nil || len(flags) == 0 {
		t.Errorf("not linked with -Bsymbolic: %v, %v", flags, err)
	}
}
