// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"debug/elf"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// overrides is the list of the functions that stand in front of the driver's, in
// the order of their names. Whoever adds one adds it here.
const overrides = `
cuArray3DCreate cuArray3DCreate_v2 cuArrayCreate cuArrayCreate_v2 cuArrayDestroy
cuCtxCreate cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy cuCtxDestroy_v2 cuCtxSetLimit cuCtxSynchronize cuCtxSynchronize_v2
cuDeviceGraphMemTrim cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2
cuDevicePrimaryCtxRetain cuDeviceTotalMem cuDeviceTotalMem_v2 cuEventSynchronize cuGetProcAddress cuGetProcAddress_v2
cuGraphExecDestroy cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams cuGraphInstantiateWithParams_ptsz
cuInit cuGLCtxCreate cuGLCtxCreate_v2 cuVDPAUCtxCreate cuVDPAUCtxCreate_v2
cuGraphInstantiate_v2 cuGraphLaunch cuGraphLaunch_ptsz cuGraphUpload cuGraphUpload_ptsz cuGreenCtxCreate cuGreenCtxDestroy cuIpcCloseMemHandle cuIpcGetMemHandle
cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload
cuMemAlloc cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz cuMemAllocManaged
cuMemAllocPitch cuMemAllocPitch_v2 cuMemAlloc_v2 cuMemCreate cuMemExportToShareableHandle cuMemFree
cuMemFreeAsync cuMemFreeAsync_ptsz cuMemFree_v2 cuMemGetHandleForAddressRange
cuMemGetInfo cuMemGetInfo_v2 cuMemMap cuMemMapArrayAsync cuMemMapArrayAsync_ptsz cuMemPoolCreate cuMemPoolDestroy cuMemPoolSetAttribute cuMemPoolTrimTo
cuMemRelease cuMemRetainAllocationHandle cuMemUnmap cuMipmappedArrayCreate cuMipmappedArrayDestroy
cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload
cuMulticastBindAddr cuMulticastBindAddr_v2 cuMulticastBindMem cuMulticastBindMem_v2
cuStreamSynchronize cuStreamSynchronize_ptsz
cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuMemGetDefaultMemPool cuMemGetMemPool cuMemPoolImportFromShareableHandle
cuStreamDestroy cuStreamDestroy_v2`

// installed returns a directory with the libraries and programs, compiled from this checkout.
func installed(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	sum, err := Stamp(t.Context(), Root)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := emulib.Once(t.Context(), "memcap", "cap-"+sum, Build)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func open(t *testing.T, name string) *elf.File {
	t.Helper()
	f, err := elf.Open(filepath.Join(installed(t), name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

var libraries = []struct{ name, real, exports string }{
	{cudaName, RealCUDA, overrides},
	{nvmlName, RealNVML, "nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2"},
}

// TestExports: a library shows what it overrides and nothing else, is called as
// the driver's is, and needs the real one by its absolute path, before libc.
func TestExports(t *testing.T) {
	for _, l := range libraries {
		f := open(t, l.name)
		symbols, err := f.DynamicSymbols()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, s := range symbols {
			if s.Section == elf.SHN_UNDEF || elf.ST_TYPE(s.Info) == elf.STT_SECTION {
				continue // Arm's linker lists sections too, which the loader ignores
			}
			got = append(got, s.Name)
			if elf.ST_TYPE(s.Info) != elf.STT_FUNC || elf.ST_BIND(s.Info) != elf.STB_GLOBAL {
				t.Errorf("%s: %s is no global function", l.name, s.Name)
			}
		}
		slices.Sort(got)
		want := strings.Fields(l.exports)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s exports\n%v\nwant\n%v", l.name, got, want)
		}
		if soname, err := f.DynString(elf.DT_SONAME); err != nil || !slices.Equal(soname, []string{l.name}) {
			t.Errorf("%s is called %v, %v", l.name, soname, err)
		}
		if needed, err := f.ImportedLibraries(); err != nil || !slices.Equal(needed, []string{l.real, "libc.so.6"}) {
			t.Errorf("%s needs %v, %v", l.name, needed, err)
		}
	}
}

// TestReopenedLibraryStays: dlclose does not unload a library, nor the real one
// behind it.
func TestReopenedLibraryStays(t *testing.T) {
	for _, l := range libraries {
		flags, err := open(t, l.name).DynValue(elf.DT_FLAGS_1)
		if err != nil || len(flags) != 1 || elf.DynFlag1(flags[0])&elf.DF_1_NODELETE == 0 {
			t.Errorf("%s has the flags %v, %v; want NODELETE among them", l.name, flags, err)
		}
	}
}

// TestNeedsLittle: no function of a C library newer than the oldest in use, none
// that the library is not meant to call, and nothing that runs by itself.
func TestNeedsLittle(t *testing.T) {
	glibc := regexp.MustCompile(`^GLIBC_2\.(\d+)(\.\d+)?$`)
	allowed := []string{"__environ", "dl_iterate_phdr", "memcpy", "memmove", "memset"}
	for _, l := range libraries {
		f := open(t, l.name)
		imported, err := f.ImportedSymbols()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range imported {
			m := glibc.FindStringSubmatch(s.Version)
			if m == nil {
				t.Errorf("%s: %s of version %q", l.name, s.Name, s.Version)
				continue
			}
			if minor, _ := strconv.Atoi(m[1]); minor > 17 {
				t.Errorf("%s: %s needs %s; the oldest system in use has GLIBC_2.17", l.name, s.Name, s.Version)
			}
			if !slices.Contains(allowed, s.Name) {
				t.Errorf("%s calls %s", l.name, s.Name)
			}
		}
		for _, tag := range []elf.DynTag{elf.DT_INIT, elf.DT_FINI, elf.DT_INIT_ARRAY, elf.DT_FINI_ARRAY, elf.DT_PREINIT_ARRAY, elf.DT_TEXTREL} {
			if v, err := f.DynValue(tag); err != nil || len(v) != 0 {
				t.Errorf("%s has %v", l.name, tag)
			}
		}
		for _, p := range f.Progs {
			if p.Type == elf.PT_TLS || p.Type == elf.PT_INTERP || (p.Type == elf.PT_GNU_STACK && p.Flags&elf.PF_X != 0) {
				t.Errorf("%s has a segment %v %v", l.name, p.Type, p.Flags)
			}
		}
	}
}

// TestDoorsAreExports holds the list that cuGetProcAddress answers from against
// the exports: each override has a line, or a program gets round it.
func TestDoorsAreExports(t *testing.T) {
	data, err := sources.ReadFile("c/driver.h")
	if err != nil {
		t.Fatal(err)
	}
	var named []string
	for _, m := range regexp.MustCompile(`(?m)^ {4}X\((\w+), \d+, (\w+),`).FindAllStringSubmatch(string(data), -1) {
		base, name := m[1], m[2]
		named = append(named, name)
		// The library tells a form for the per-thread default stream by how long its name is.
		if twin := strings.HasSuffix(name, "_ptsz"); twin != (len(name) >= len(base)+len("_ptsz")) {
			t.Errorf("%s is taken for a form for the per-thread default stream, or for none", name)
		}
		if !strings.HasPrefix(strings.TrimSuffix(name, "_ptsz"), base) {
			t.Errorf("%s is not a form of %s", name, base)
		}
	}
	slices.Sort(named)
	named = slices.Compact(named)
	want := strings.Fields(overrides)
	slices.Sort(want)
	if !slices.Equal(named, want) {
		t.Errorf("driver.h names\n%v\nwant\n%v", named, want)
	}
}
