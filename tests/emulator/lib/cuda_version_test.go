// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/lib"
)

// TestCUDAVersions: a driver of an older version lacks the names that came later,
// by cuGetProcAddress and by dlsym, and has all others.
func TestCUDAVersions(t *testing.T) {
	start(t, emulator.Spec{Count: 1})
	source, err := os.ReadFile("c/cuda_names.h")
	if err != nil {
		t.Fatal(err)
	}
	since := map[string]int{} // by symbol
	names := map[string]map[int]string{}
	for _, m := range regexp.MustCompile(`(?m)^[VT]\((\w+), (\d+), (\w+)(?:, (\w+))?\)$`).FindAllStringSubmatch(string(source), -1) {
		version, _ := strconv.Atoi(m[2])
		for _, symbol := range m[3:] {
			if old, is := since[symbol]; symbol != "" && (!is || version < old) {
				since[symbol] = version
			}
		}
		if names[m[1]] == nil {
			names[m[1]] = map[int]string{}
		}
		names[m[1]][version] = m[3]
	}
	for symbol, want := range map[string]int{
		"cuCtxCreate_v4": 12050, "cuCtxSynchronize_v2": 13000, "cuGetProcAddress_v2": 12000, "cuMemGetMemPool": 13000,
		"cuMemAllocAsync_ptsz": 11020, "cuMemAlloc_v2": 3020,
	} {
		if since[symbol] != want {
			t.Fatalf("%s came with %d in the list, want %d", symbol, since[symbol], want)
		}
	}
	for _, version := range []int{11080, 12040, 12080, 13000, 13040} {
		t.Run(strconv.Itoa(version), func(t *testing.T) {
			p := startProbe(t, probeWith{env: []string{fmt.Sprintf("GPU_EMULATOR_CUDA=version=%d", version)}})
			p.must("cuDriverGetVersion &before; cuInit 0; cuDriverGetVersion &after")
			want(t, "version", [2]uint64{p.vars["before"], p.vars["after"]}, [2]uint64{uint64(version), uint64(version)})
			address := func(symbol string) string {
				fmt.Fprintf(p.in, "address %s\n", symbol)
				return p.line()
			}
			for symbol, first := range since {
				if has := address(symbol) != "0"; has != (first <= version) {
					t.Errorf("dlsym finds %s of %d: %v", symbol, first, has)
				}
			}
			for name, forms := range names {
				newest := 0
				for v := range forms {
					if v <= version {
						newest = max(newest, v)
					}
				}
				r := p.do(`cuGetProcAddress "%s" &at 99000 0`, name)
				if newest == 0 {
					want(t, "cuGetProcAddress "+name, r, cudaNotFound)
					continue
				}
				want(t, "cuGetProcAddress "+name, r, 0)
				want(t, "the address of "+name, strconv.FormatUint(p.vars["at"], 10), address(forms[newest]))
			}
			p.must("cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 4096; cuMemFree_v2 a")
		})
	}
	all := startProbe(t, probeWith{})
	for symbol := range since {
		fmt.Fprintf(all.in, "address %s\n", symbol)
		if all.line() == "0" {
			t.Errorf("without the switch there is no %s", symbol)
		}
	}
}

// TestCUDAFileOfAVersion: so has a file that was made for an older version, for
// whoever reads or loads it.
func TestCUDAFileOfAVersion(t *testing.T) {
	start(t, emulator.Spec{Count: 1, CUDA: "12.4"})
	built, err := os.ReadFile(cudaLibrary(t))
	if err != nil {
		t.Fatal(err)
	}
	old, err := lib.OfVersion(built, 12040)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "usr/lib/x86_64-linux-gnu/libcuda-old.so")
	if err := os.WriteFile(file, old, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(file) })
	has := exports(t, file)
	p := startProbe(t, probeWith{library: file})
	for symbol, want := range map[string]bool{"cuCtxCreate_v3": true, "cuCtxCreate_v4": false, "cuCtxSynchronize_v2": false, "cuFuncLoad": true, "cuMemGetMemPool": false} {
		if has[symbol] != want {
			t.Errorf("the file exports %s: %v", symbol, has[symbol])
		}
		fmt.Fprintf(p.in, "address %s\n", symbol)
		if got := p.line(); (got != "0") != want {
			t.Errorf("dlsym finds %s at %s", symbol, got)
		}
	}
	want(t, "cuGetProcAddress", p.do(`cuGetProcAddress "cuMemGetMemPool" &at 13000 0`), cudaNotFound)
	p.must(`cuGetProcAddress "cuCtxCreate" &at 13000 0`)
	fmt.Fprintln(p.in, "address cuCtxCreate_v3")
	want(t, "the newest cuCtxCreate", p.line(), strconv.FormatUint(p.vars["at"], 10))
	p.must("cuInit 0; cuDriverGetVersion &version; cuCtxCreate_v2 &c 0 0; cuMemAlloc_v2 &a 4096")
	want(t, "version", p.vars["version"], 12040)
}

// TestCUDASwitchesOfProperties: where the documentation is silent.
func TestCUDASwitchesOfProperties(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	used := func() uint64 { return n.world.State().GPUs[0].UsedMiB }
	begin := func(switches string) *probe {
		p := startProbe(t, probeWith{env: []string{"GPU_EMULATOR_CUDA=" + switches}})
		p.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
		return p
	}
	p := begin("managed-create=made")
	p.must("poke prop 0 4 2; poke prop 8 4 1; cuMemCreate &h 1073741824 &prop 0")
	want(t, "MiB of managed memory by cuMemCreate", used(), 300)
	p.kill()

	p = begin("heap=use")
	p.must(`cuModuleLoadData &m "// gpu-emulator: blocks 0"; cuModuleGetFunction &f m "f"; cuModuleGetFunction &uses m "malloc_1"; cuCtxSetLimit 2 1073741824`)
	p.must("cuLaunchKernel f 1 1 1 1 1 1 0 0 0 0")
	want(t, "a heap that no kernel uses", used(), 300)
	p.must("cuLaunchKernel uses 1 1 1 1 1 1 0 0 0 0")
	want(t, "and that one does", used(), 300+1016)
	p.kill()

	p = begin("heap=launch")
	p.must(`cuModuleLoadData &m "// gpu-emulator: blocks 0"; cuModuleGetFunction &f m "f"; cuCtxSetLimit 2 1073741824; cuCtxGetLimit &heap 2`)
	want(t, "a heap before a kernel runs", [2]uint64{used(), p.vars["heap"]}, [2]uint64{300, 1 << 30})
	p.must("cuLaunchKernel f 1 1 1 1 1 1 0 0 0 0")
	want(t, "and after", used(), 300+1016)
	p.must("cuCtxSetLimit 2 107374182400")
	want(t, "a kernel whose heap does not fit", p.do("cuLaunchKernel f 1 1 1 1 1 1 0 0 0 0"), cudaOutOfMemory)
	p.must("cuCtxSetLimit 2 8388608; cuLaunchKernel f 1 1 1 1 1 1 0 0 0 0")
	want(t, "a heap that was lowered", used(), 300)
	p.kill()

	p = begin("loading=lazy")
	p.must(`cuModuleLoadData &m "// gpu-emulator: blocks 5"; cuModuleGetFunction &f m "f"`)
	want(t, "a lazy module", used(), 300)
	p.must("cuFuncLoad f")
	want(t, "and loaded", used(), 310)
	p.kill()

	p = begin("version=13040,domains=1")
	p.must("cuDeviceGetAttribute &domains 147 0; poke props 0 4 1; poke props 8 4 6; cuMemPoolCreate &p &props; cuMemPoolGetAttribute p 12 &type")
	want(t, "one domain, whose pool is the device's kind", [2]uint64{p.vars["domains"], p.vars["type"]}, [2]uint64{1, onDevice})
	p.must("poke props 12 4 256")
	want(t, "a second domain", p.do("cuMemPoolCreate &p &props"), cudaInvalid)
}
