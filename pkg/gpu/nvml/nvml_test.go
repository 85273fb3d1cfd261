// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/emulator/lib"
)

func TestEveryReturnHasAMeaning(t *testing.T) {
	sentinels := map[nvml.Return]error{
		nvml.ERROR_UNINITIALIZED:             gpu.ErrNoDriver,
		nvml.ERROR_DRIVER_NOT_LOADED:         gpu.ErrNoDriver,
		nvml.ERROR_LIBRARY_NOT_FOUND:         gpu.ErrNoDriver,
		nvml.ERROR_LIB_RM_VERSION_MISMATCH:   gpu.ErrNoDriver,
		nvml.ERROR_NOT_FOUND:                 gpu.ErrNotFound,
		nvml.ERROR_NOT_SUPPORTED:             gpu.ErrNotSupported,
		nvml.ERROR_FUNCTION_NOT_FOUND:        gpu.ErrNotSupported,
		nvml.ERROR_ARGUMENT_VERSION_MISMATCH: gpu.ErrNotSupported,
		nvml.ERROR_DEPRECATED:                gpu.ErrNotSupported,
		nvml.ERROR_NO_PERMISSION:             gpu.ErrNoPermission,
		nvml.ERROR_IN_USE:                    gpu.ErrInUse,
		nvml.ERROR_INSUFFICIENT_RESOURCES:    gpu.ErrNoRoom,
		nvml.ERROR_INVALID_ARGUMENT:          gpu.ErrInvalid,
		nvml.ERROR_GPU_IS_LOST:               gpu.ErrLost,
		nvml.ERROR_GPU_NOT_FOUND:             gpu.ErrLost,
		nvml.ERROR_RESET_REQUIRED:            gpu.ErrLost,
		nvml.ERROR_TIMEOUT:                   gpu.ErrTimeout,
		nvml.ERROR_UNKNOWN:                   gpu.ErrDriver,
		nvml.ERROR_MEMORY:                    gpu.ErrDriver,
		nvml.Return(12345):                   gpu.ErrDriver,
	}
	for ret, want := range sentinels {
		err := nvmlDeviceGetName.failed("read it", ret)
		if !errors.Is(err, want) {
			t.Errorf("%d: %v, want %v", ret, err, want)
		}
		if _, ok := errors.AsType[nvml.Return](err); ok {
			t.Errorf("%d: the driver's code left the package in %#v", ret, err)
		}
		if !strings.HasPrefix(err.Error(), "read it: ") || !strings.Contains(err.Error(), "nvmlDeviceGetName") {
			t.Errorf("%d: %q does not say what failed", ret, err)
		}
	}
	if err := nvmlDeviceGetName.failed("read it", nvml.SUCCESS); err != nil {
		t.Errorf("success: %v", err)
	}
}

func TestRebase(t *testing.T) {
	for _, c := range []struct{ path, from, to, want string }{
		{"/usr/lib/libcuda.so.1", "/", "/", "/usr/lib/libcuda.so.1"},
		{"/host/usr/lib/x", "/host", "/", "/usr/lib/x"},
		{"/host/usr/lib/x", "/host", "/run/nvidia/driver", "/run/nvidia/driver/usr/lib/x"},
		{"/hostile/usr/lib/x", "/host", "/", "/hostile/usr/lib/x"},
		{"/dev/nvidia0", "/", "/run/nvidia/driver", "/run/nvidia/driver/dev/nvidia0"},
		{"/host", "/host", "/", "/"},
		{"../card0", "/host", "/", "../card0"},
		{"", "/host", "/", ""},
	} {
		if got := rebase(c.path, c.from, c.to); got != c.want {
			t.Errorf("rebase(%q, %q, %q) = %q, want %q", c.path, c.from, c.to, got, c.want)
		}
	}
}

func TestSeenByHost(t *testing.T) {
	mode := fs.FileMode(0o666)
	seen := func(root string) specs.ContainerEdits {
		return specs.ContainerEdits{
			DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia3", HostPath: root + "/dev/nvidia3", Type: "c", Major: 195, Minor: 3, FileMode: &mode}},
			Mounts:      []*specs.Mount{{HostPath: "/driver/usr/lib64/libcuda.so.580.1.2", ContainerPath: "/usr/lib64/libcuda.so.580.1.2"}},
			Hooks: []*specs.Hook{{HookName: "createContainer", Path: "/state/nvidia-cdi-hook", Args: []string{
				"nvidia-cdi-hook", "create-symlinks", "--link", "../card1::" + root + "/dev/dri/by-path/pci-0000:07:00.0-card",
			}}},
		}
	}
	for _, c := range []struct {
		name, dev string
		opts      Options
		node      *specs.DeviceNode
		mount     string
	}{
		{
			"a driver of the host, seen elsewhere", "/driver",
			Options{DriverRoot: "/driver", HostDriverRoot: "/", DevRoot: "/driver"},
			&specs.DeviceNode{Path: "/dev/nvidia3", FileMode: &mode}, "/usr/lib64/libcuda.so.580.1.2",
		},
		{
			"a driver in a container of its own, with the host's nodes", "",
			Options{DriverRoot: "/driver", HostDriverRoot: "/run/nvidia/driver", DevRoot: "/"},
			&specs.DeviceNode{Path: "/dev/nvidia3", FileMode: &mode}, "/run/nvidia/driver/usr/lib64/libcuda.so.580.1.2",
		},
		{
			"a driver in a container of its own, with its own nodes", "/driver",
			Options{DriverRoot: "/driver", HostDriverRoot: "/run/nvidia/driver", DevRoot: "/driver"},
			&specs.DeviceNode{Path: "/dev/nvidia3", HostPath: "/run/nvidia/driver/dev/nvidia3", FileMode: &mode}, "/run/nvidia/driver/usr/lib64/libcuda.so.580.1.2",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := (&session{opts: c.opts}).seenByHost(seen(c.dev))
			if !reflect.DeepEqual(got.DeviceNodes, []*specs.DeviceNode{c.node}) {
				t.Errorf("node %+v, want %+v", *got.DeviceNodes[0], *c.node)
			}
			if got.Mounts[0].HostPath != c.mount || got.Mounts[0].ContainerPath != "/usr/lib64/libcuda.so.580.1.2" {
				t.Errorf("mount %+v, want it from %s", *got.Mounts[0], c.mount)
			}
			if link := got.Hooks[0].Args[3]; link != "../card1::/dev/dri/by-path/pci-0000:07:00.0-card" {
				t.Errorf("the hook would make %s", link)
			}
		})
	}
}

// standIn is a driver root whose nvidia-smi is a shell script.
func standIn(t *testing.T, script string) *components {
	t.Helper()
	root := t.TempDir()
	if script != "" {
		if err := os.MkdirAll(filepath.Join(root, "usr/bin"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "usr/bin/nvidia-smi"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	stopped, stop := context.WithCancel(context.Background())
	t.Cleanup(stop)
	return newComponents(&session{opts: Options{DriverRoot: root}, library: filepath.Join(root, "usr/lib64/libnvidia-ml.so.1"), stopped: stopped, stop: stop, locks: newLocks()})
}

func TestSetTimeSliceRunsTheDriversTool(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	d := standIn(t, `echo "$LD_LIBRARY_PATH $*" >> `+log)
	var want strings.Builder
	for step, slice := range []gpu.TimeSlice{gpu.TimeSliceDefault, gpu.TimeSliceShort, gpu.TimeSliceMedium, gpu.TimeSliceLong} {
		if err := d.SetTimeSlice(t.Context(), "GPU-a", slice); err != nil {
			t.Errorf("%s: %v", slice, err)
		}
		fmt.Fprintf(&want, "%s compute-policy -i GPU-a --set-timeslice %d\n", filepath.Dir(d.library), step)
	}
	if got, err := os.ReadFile(log); err != nil || string(got) != want.String() {
		t.Errorf("the tool was run as\n%s%v, want\n%s", got, err, want.String())
	}
}

func TestSetTimeSliceRefusals(t *testing.T) {
	for _, c := range []struct {
		script string
		want   error
	}{
		{"", gpu.ErrNotSupported},
		{"echo no such option; exit 2", gpu.ErrNotSupported},
		{"exit 3", gpu.ErrNotSupported},
		{"exit 4", gpu.ErrNoPermission},
		{"exit 6", gpu.ErrNotFound},
		{"exit 9", gpu.ErrNoDriver},
		{"exit 15", gpu.ErrLost},
		{"echo 'time slices are off' >&2; exit 255", gpu.ErrNotSupported},
		{"kill -KILL $$", gpu.ErrNotSupported},
	} {
		err := standIn(t, c.script).SetTimeSlice(t.Context(), "GPU-a", gpu.TimeSliceShort)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), "GPU-a") {
			t.Errorf("%q: %v, want %v and the GPU's name", c.script, err, c.want)
		}
		if strings.Contains(c.script, "are off") && !strings.Contains(err.Error(), "time slices are off") {
			t.Errorf("%v does not carry the tool's words", err)
		}
	}
	if err := standIn(t, "exit 0").SetTimeSlice(t.Context(), "GPU-a", "2ms"); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a word that is no slice: %v", err)
	}

	// The program hangs: it is known to run once it has opened the pipe.
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		f, err := os.Open(pipe)
		if err == nil {
			defer f.Close()
		}
		cancel()
	}()
	err := standIn(t, "exec 3> "+pipe+"; while :; do read x < /dev/zero; done").SetTimeSlice(ctx, "GPU-a", gpu.TimeSliceShort)
	if !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
		t.Errorf("a tool that hangs: %v, want ErrTimeout", err)
	}
}

func TestInstallHook(t *testing.T) {
	src := filepath.Join(t.TempDir(), "built")
	write := func(content string, mode fs.FileMode) {
		t.Helper()
		if err := os.WriteFile(src, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	state := filepath.Join(t.TempDir(), "state")
	install := func() string {
		t.Helper()
		path, err := InstallHook(src, state)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Lstat(path)
		if err != nil || info.Mode() != 0o755 {
			t.Fatalf("%s: %v, %v", path, info, err)
		}
		want, err := os.ReadFile(src)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != string(want) {
			t.Errorf("%s holds %q, %v", path, got, err)
		}
		if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 1 {
			t.Errorf("beside the program lie %v, %v", list, err)
		}
		return path
	}

	write("one", 0o644)
	first := install()
	if filepath.Base(first) != "nvidia-cdi-hook" || !strings.HasPrefix(first, state+"/") {
		t.Errorf("installed as %s", first)
	}
	before, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	if again := install(); again != first {
		t.Errorf("the same content went to %s and %s", first, again)
	}
	if after, err := os.Stat(first); err != nil || !os.SameFile(before, after) {
		t.Error("what stood whole was written again")
	}

	// Damage that leaves the program's size, and notes that say anything.
	if err := os.WriteFile(first, []byte("0ne"), 0o755); err != nil {
		t.Fatal(err)
	}
	install()
	notes := filepath.Join(state, "hooks", "installed")
	said, err := os.ReadFile(notes)
	if err != nil {
		t.Fatal(err)
	}
	for _, now := range []string{"", "v1", "v2 x y z\n", strings.Replace(string(said), filepath.Base(filepath.Dir(first)), "../../x", 1), strings.Replace(string(said), " ", "  ", -1)} {
		if err := os.WriteFile(notes, []byte(now), 0o600); err != nil {
			t.Fatal(err)
		}
		install()
	}
	write("0ne", 0o755) // another program of the same size, in the same file
	if other := install(); other == first {
		t.Error("another program went to the same path")
	}
	write("one", 0o755)
	if again := install(); again != first {
		t.Errorf("the same content went to %s and %s", first, again)
	}

	for _, whole := range []bool{true, false} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(first), ".nvidia-cdi-hook.HALF.tmp"), []byte("o"), 0o700); err != nil {
			t.Fatal(err)
		}
		if !whole {
			if err := os.Truncate(first, 1); err != nil {
				t.Fatal(err)
			}
		}
		install()
	}

	write("two", 0o755)
	second := install()
	if second == first {
		t.Error("another program went to the same path")
	}
	if got, err := os.ReadFile(first); err != nil || string(got) != "one" {
		t.Errorf("the older program now holds %q, %v", got, err)
	}

	if _, err := InstallHook(src+"-absent", state); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "-absent") {
		t.Errorf("no program: %v", err)
	}
	if _, err := InstallHook(src, "relative"); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a relative state directory: %v", err)
	}
}

func TestOptionsRefused(t *testing.T) {
	for _, opts := range []Options{{DriverRoot: "driver"}, {HostDriverRoot: "driver"}, {DevRoot: "dev"}, {SysRoot: "sys"}, {ProcRoot: "proc"}, {Library: "libnvidia-ml.so.1"}} {
		if _, err := Open(t.Context(), opts); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%+v: %v, want ErrInvalid", opts, err)
		}
	}
	for _, opts := range []Options{{Library: filepath.Join(t.TempDir(), "none.so")}, {DriverRoot: t.TempDir()}} {
		if _, err := Open(t.Context(), opts); !errors.Is(err, gpu.ErrNoDriver) {
			t.Errorf("%+v: %v, want ErrNoDriver", opts, err)
		}
	}
	text := filepath.Join(t.TempDir(), "text.so")
	if err := os.WriteFile(text, []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	// Not by Open: this process may be bound to another library.
	if _, err := check(text); !errors.Is(err, gpu.ErrNoDriver) || !strings.Contains(err.Error(), text) {
		t.Errorf("a file that is no library: %v, want ErrNoDriver and its name", err)
	}
}

// A library without a symbol that we call would end the process at that call.
func TestOldDriverIsRefused(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skipf("skipped: a stand-in for an old library needs gcc: %v", err)
	}
	dir := t.TempDir()
	src, old := filepath.Join(dir, "old.c"), filepath.Join(dir, "libnvidia-ml.so.1")
	if err := os.WriteFile(src, []byte("int nvmlInit_v2(void) { return 0; }\nint nvmlShutdown(void) { return 0; }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := lib.GCC(t.Context(), "", "-shared", "-fPIC", "-o", old, src); err != nil {
		t.Fatal(err)
	}
	if found, err := check(old); !errors.Is(err, gpu.ErrNotSupported) || !strings.Contains(err.Error(), "R470") {
		t.Errorf("found %q, %v, want ErrNotSupported that names the oldest driver", found, err)
	}
}
