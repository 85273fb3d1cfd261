// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// The sources of one program in three languages: it takes 2 GiB on the first GPU, and prints the
// driver's answer. Most of what it calls is not the cap's.
var sources = map[string][]byte{
	"/src/main.c": []byte(`#include <stdio.h>
typedef unsigned long long ptr;
int cuInit(unsigned), cuDeviceGet(int *, int), cuDeviceGetCount(int *), cuDriverGetVersion(int *), cuCtxCreate_v2(void **, unsigned, int), cuMemAlloc_v2(ptr *, unsigned long);
int main(void)
{
    int count, device, version;
    void *context;
    ptr at;
    if (cuInit(0) || cuDriverGetVersion(&version) || cuDeviceGetCount(&count) || count != 1 || cuDeviceGet(&device, 0) || cuCtxCreate_v2(&context, 0, device))
        return 1;
    printf("%d\n", cuMemAlloc_v2(&at, 2ul << 30));
    return 0;
}
`),
	"/src/open.c": []byte(`#include <dlfcn.h>
#include <stdio.h>
int main(void)
{
    void *l = dlopen("libcuda.so", RTLD_NOW);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(l, "cuInit"), (*create)(void **, unsigned, int) = (int (*)(void **, unsigned, int))dlsym(l, "cuCtxCreate_v2"),
        (*alloc)(unsigned long long *, unsigned long) = (int (*)(unsigned long long *, unsigned long))dlsym(l, "cuMemAlloc_v2");
    unsigned long long at;
    void *context;
    if (init(0) || create(&context, 0, 0))
        return 1;
    printf("%d\n", alloc(&at, 2ul << 30));
    return 0;
}
`),
	"/src/go/go.mod": []byte("module program\n\ngo 1.21\n"),
	"/src/go/main.go": []byte(`package main

/*
#cgo LDFLAGS: -lcuda
typedef unsigned long long ptr;
int cuInit(unsigned), cuDeviceGet(int *, int), cuDeviceGetCount(int *), cuDriverGetVersion(int *), cuCtxCreate_v2(void **, unsigned, int), cuMemAlloc_v2(ptr *, unsigned long);
*/
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"
)

func main() {
	runtime.LockOSThread()
	var count, device, version C.int
	var context unsafe.Pointer
	var at C.ptr
	if C.cuInit(0) != 0 || C.cuDriverGetVersion(&version) != 0 || C.cuDeviceGetCount(&count) != 0 || count != 1 || C.cuDeviceGet(&device, 0) != 0 || C.cuCtxCreate_v2(&context, 0, device) != 0 {
		os.Exit(1)
	}
	fmt.Println(C.cuMemAlloc_v2(&at, 2<<30))
}
`),
	"/src/main.rs": []byte(`use std::os::raw::{c_int, c_uint, c_ulong, c_ulonglong, c_void};
#[link(name = "cuda")]
extern "C" {
    fn cuInit(flags: c_uint) -> c_int;
    fn cuDeviceGet(device: *mut c_int, at: c_int) -> c_int;
    fn cuDeviceGetCount(count: *mut c_int) -> c_int;
    fn cuDriverGetVersion(version: *mut c_int) -> c_int;
    fn cuCtxCreate_v2(context: *mut *mut c_void, flags: c_uint, device: c_int) -> c_int;
    fn cuMemAlloc_v2(at: *mut c_ulonglong, bytes: c_ulong) -> c_int;
}
fn main() {
    let (mut count, mut device, mut version) = (0, 0, 0);
    let mut context = std::ptr::null_mut();
    let mut at = 0;
    unsafe {
        if cuInit(0) != 0 || cuDriverGetVersion(&mut version) != 0 || cuDeviceGetCount(&mut count) != 0 || count != 1 || cuDeviceGet(&mut device, 0) != 0 || cuCtxCreate_v2(&mut context, 0, device) != 0 {
            std::process::exit(1);
        }
        println!("{}", cuMemAlloc_v2(&mut at, 2 << 30));
    }
}
`),
	"/src/CMakeLists.txt": []byte(`cmake_minimum_required(VERSION 3.18)
project(program C)
find_library(CUDA_DRIVER NAMES cuda REQUIRED)
add_executable(program main.c)
target_link_libraries(program ${CUDA_DRIVER})
`),
}

// A compiler is how a program is built in a container.
type compiler struct {
	name, script string
	tool         string // its program
	debian       bool   // fetched from Debian, by the same name, where /usr/bin lacks it
	slow         bool   // for the long form
}

// TestCompilers: in a container with a compiler, a program of each language is linked with
// -lcuda and runs: with a share, which it cannot exceed, with a whole GPU, and with an instance.
func TestCompilers(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 2, GPUs: []emulator.GPUSpec{{Index: 1, MIG: true}}})
	if err := r.m.World.CreateInstance(1, "1g.10gb", 0, false); err != nil {
		t.Fatal(err)
	}
	goroot, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT", "GOCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	env := strings.Fields(string(goroot))
	r.fit(t)
	put := func(_ *specs.ContainerEdits, image *capsule.Image) { image.Files = sources }
	gi := r.m.World.State().GPUs[1].MIG.Instances[0]
	withInstance := func(edits *specs.ContainerEdits, image *capsule.Image) {
		image.Files = sources
		for _, minor := range []int{gi.Minor, gi.Compute[0].Minor} {
			edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: "/dev/" + install.CapabilityNode(minor), Type: "c", Major: install.MajorCapabilities, Minor: int64(minor)})
		}
	}
	containers := []struct {
		name, want, devices string
		*box
	}{
		{"a share", "2\n", "0", r.allocate(t, "share", []share{{gpu: 0, bytes: GiB}}, false, put)},
		{"a whole GPU", "0\n", "0", r.allocate(t, "whole", []share{{gpu: 0, bytes: lib.None}}, false, put)},
		{"an instance", "0\n", gi.Compute[0].UUID, r.allocate(t, "instance", []share{{gpu: 1, bytes: lib.None, instance: gpu.UUID(gi.Compute[0].UUID)}}, false, withInstance)},
	}
	for _, c := range []compiler{
		{name: "C", tool: "gcc", script: "gcc -o /tmp/c /src/main.c -lcuda && /tmp/c"},
		{name: "C that opens libcuda.so", tool: "gcc", script: "gcc -o /tmp/open /src/open.c -ldl && /tmp/open"},
		{name: "Go", tool: "go", slow: true, script: "cd /src/go && go build -o /tmp/go . && /tmp/go"},
		{name: "Rust", tool: "rustc", slow: true, debian: true, script: "rustc -o /tmp/rust /src/main.rs && /tmp/rust"},
		{name: "CMake", tool: "cmake", slow: true, debian: true, script: "cmake -S /src -B /tmp/build >/tmp/log && cmake --build /tmp/build >>/tmp/log || { cat /tmp/log; exit 1; }; /tmp/build/program"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.slow && testing.Short() {
				t.Skip("make test-all has it")
			}
			dir, libs, err := c.find(t.Context())
			if err != nil {
				t.Skip(err)
			}
			for _, in := range containers {
				said, status, err := in.Run(t.Context(), capsule.Program{Args: []string{"/bin/sh", "-c", c.script}, Env: []string{
					"PATH=" + dir + ":/usr/bin:/bin", "LD_LIBRARY_PATH=" + libs, "HOME=/tmp", "CGO_ENABLED=1", "GOTOOLCHAIN=local", "GOFLAGS=-buildvcs=false",
					"GOROOT=" + env[0], "GOCACHE=" + env[1], "CUDA_VISIBLE_DEVICES=" + in.devices}})
				if err != nil || status != 0 || said != in.want {
					t.Errorf("with %s: %v, status %#x, %q, want %q", in.name, err, uint32(status), said, in.want)
				}
			}
		})
	}
}

// fit has containers get the library as the agent installs it, fitted to the driver's.
func (r *rig) fit(t *testing.T) {
	t.Helper()
	edits, _ := r.m.Plain(0)
	i := slices.IndexFunc(edits.Mounts, func(m *specs.Mount) bool { return strings.Contains(m.ContainerPath, "libcuda.so.") })
	data, err := os.ReadFile(r.kit.CUDA)
	if err == nil {
		data, err = lib.FitOne(data, edits.Mounts[i].HostPath)
	}
	if err != nil {
		t.Fatal(err)
	}
	r.kit.CUDA = filepath.Join(t.TempDir(), "libcuda.so.1")
	if err := os.WriteFile(r.kit.CUDA, data, 0o755); err != nil {
		t.Fatal(err)
	}
}

// find returns the folder of the compiler's program, and where its libraries are; it fetches
// what this machine lacks.
func (c compiler) find(ctx context.Context) (dir, libs string, err error) {
	if _, err := os.Stat(filepath.Join("/usr/bin", c.tool)); err == nil {
		return "/usr/bin", "", nil
	}
	if !c.debian {
		at, err := exec.LookPath(c.tool)
		return filepath.Dir(at), "", err
	}
	cache, err := emulib.Cache()
	if err != nil {
		return "", "", err
	}
	root := filepath.Join(cache, "compilers", c.tool)
	if _, err := os.Stat(filepath.Join(root, "usr/bin", c.tool)); err != nil {
		// What the package needs and this machine lacks, by apt's own answer.
		out, err := exec.CommandContext(ctx, "apt-get", "-y", "--no-install-recommends", "--print-uris", "install", c.tool).Output()
		if err != nil {
			return "", "", fmt.Errorf("find what %s needs: %w", c.tool, err)
		}
		var names []string
		for line := range bytes.Lines(out) {
			if f := bytes.Fields(line); len(f) > 1 && line[0] == '\'' {
				name, _, _ := strings.Cut(string(f[1]), "_")
				names = append(names, name)
			}
		}
		if err := fetch(ctx, root, names...); err != nil {
			return "", "", fmt.Errorf("%s cannot be fetched: %w", c.tool, err)
		}
	}
	found, err := filepath.Glob(filepath.Join(root, "usr/lib/*-linux-gnu"))
	return filepath.Join(root, "usr/bin"), strings.Join(found, ":"), err
}
