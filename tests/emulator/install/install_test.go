// SPDX-License-Identifier: Apache-2.0

package install_test

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
)

// In the role of a test node this binary mounts the driver's kernel files over
// its own, in a mount namespace that goes with it.
func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if role := os.Getenv("INSTALL_TEST_ROLE"); role == "root" {
			err = layRootAndLook()
		} else if role != "" {
			if role == "mount-shared" { // as on nodes
				err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
			}
			if err == nil {
				err = mountAndLook()
			}
		} else if bound, err = os.MkdirTemp("", "driver-root-"); err == nil {
			defer os.RemoveAll(bound)
			return m.Run()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}())
}

// bound is the root of the driver that go-nvml loads: it stays bound to the
// first library for the life of the program, however often a test runs.
var bound string

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("device nodes and mounts need root")
	}
}

func world(t *testing.T, spec emulator.Spec) *emulator.World {
	t.Helper()
	w, err := emulator.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// driver lays a driver at a driver root.
func driver(t *testing.T, w *emulator.World, dir string) {
	t.Helper()
	built, err := lib.Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := install.Driver(dir, built, w); err != nil {
		t.Fatal(err)
	}
	// Again: an install may be repeated.
	if err := install.Driver(dir, built, w); err != nil {
		t.Fatal(err)
	}
}

func TestLibrariesAreVersionedAndLinked(t *testing.T) {
	dir := t.TempDir()
	driver(t, world(t, emulator.Spec{Driver: "570.1.2"}), dir)
	libs := filepath.Join(dir, "usr/lib/x86_64-linux-gnu")
	for link, want := range map[string]string{
		"libcuda.so":        "libcuda.so.570.1.2",
		"libcuda.so.1":      "libcuda.so.570.1.2",
		"libnvidia-ml.so.1": "libnvidia-ml.so.570.1.2",
	} {
		got, err := filepath.EvalSymlinks(filepath.Join(libs, link))
		if err != nil || filepath.Base(got) != want {
			t.Errorf("%s leads to %s (%v), want %s", link, got, err, want)
		}
	}
}

// TestLibraryIsOfTheWorldsVersion: a driver of CUDA 12.4 lacks what came later.
func TestLibraryIsOfTheWorldsVersion(t *testing.T) {
	for cuda, want := range map[string]bool{"12.4": false, "13.0": true} {
		dir := t.TempDir()
		driver(t, world(t, emulator.Spec{CUDA: cuda}), dir)
		f, err := elf.Open(filepath.Join(dir, "usr/lib/x86_64-linux-gnu/libcuda.so.1"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		symbols, err := f.DynamicSymbols()
		if err != nil {
			t.Fatal(err)
		}
		has := slices.ContainsFunc(symbols, func(s elf.Symbol) bool {
			return s.Name == "cuCtxSynchronize_v2" && s.Section != elf.SHN_UNDEF
		})
		if has != want {
			t.Errorf("libcuda of CUDA %s has cuCtxSynchronize_v2: %v", cuda, has)
		}
	}
}

func TestDeviceNodes(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	if err := install.Nodes(dir, world(t, emulator.Spec{Count: 2})); err != nil {
		t.Fatal(err)
	}
	for name, number := range map[string]uint64{
		"nvidia0":   unix.Mkdev(195, 0),
		"nvidia1":   unix.Mkdev(195, 1),
		"nvidiactl": unix.Mkdev(195, 255),
	} {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, name), &st); err != nil {
			t.Error(err)
		} else if st.Rdev != number || st.Mode != unix.S_IFCHR|0o666 {
			t.Errorf("%s: device %x mode %o", name, st.Rdev, st.Mode)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "nvidia2")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a node of a GPU that is not there: %v", err)
	}
}

func TestKernelFiles(t *testing.T) {
	dir := t.TempDir()
	w := world(t, emulator.Spec{Count: 2})
	if err := install.Kernel(dir, "Character devices:\n  1 mem\n\nBlock devices:\n", w); err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	g := w.State().GPUs[1]
	if info := read("proc/driver/nvidia/gpus/0000:87:00.0/information"); !strings.Contains(info, g.UUID) || !strings.Contains(info, "Device Minor: \t 0\n") {
		t.Errorf("information of GPU 1:\n%s", info)
	}
	for name, want := range map[string]string{
		"sys/bus/pci/devices/0000:87:00.0/vendor":    "0x10de\n",
		"sys/bus/pci/devices/0000:87:00.0/device":    "0x2330\n",
		"sys/bus/pci/devices/0000:87:00.0/numa_node": "1\n",
		"sys/bus/pci/devices/0000:07:00.0/numa_node": "0\n",
	} {
		if got := read(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	// The numbers that the field knows by heart.
	minors := strings.Split(read("proc/driver/nvidia-caps/mig-minors"), "\n")
	for _, line := range []string{"config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi7/access 66", "gpu1/gi0/ci0/access 139"} {
		if !slices.Contains(minors, line) {
			t.Errorf("mig-minors lacks %q", line)
		}
	}
	if devices := read("proc/devices"); !strings.Contains(devices, "\n195 nvidia\n") || !strings.Contains(devices, "\n  1 mem\n") {
		t.Errorf("devices:\n%s", devices)
	}
}

// The tree leads from a device to what it hangs on, and from buses and classes to it.
func TestSysfsIsATree(t *testing.T) {
	dir, err := install.Scratch()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := world(t, emulator.Spec{Topology: "dgx-h100"})
	if err := install.Kernel(dir, "Character devices:\n", w); err != nil {
		t.Fatal(err)
	}
	sys := os.DirFS(filepath.Join(dir, "sys"))
	read := func(name string) string {
		t.Helper()
		data, err := fs.ReadFile(sys, name)
		if err != nil {
			t.Error(err)
		}
		return strings.TrimSuffix(string(data), "\n")
	}
	for name, want := range map[string]string{
		"bus/pci/devices/0000:1b:00.0/class":                "0x030200",
		"bus/pci/devices/0000:1b:00.0/numa_node":            "0",
		"bus/pci/devices/0000:1b:00.0/local_cpulist":        "0-55,112-167",
		"bus/pci/devices/0000:9d:00.0/local_cpulist":        "56-111,168-223",
		"bus/pci/devices/0000:9d:00.0/local_cpus":           "ffffffff,ffffff00,00000000,0000ffff,ffffffff,ff000000,00000000",
		"bus/pci/devices/0000:1a:00.0/class":                "0x060400",
		"bus/pci/devices/0000:07:00.0/class":                "0x068000",
		"class/infiniband/mlx5_0/ports/1/link_layer":        "InfiniBand",
		"class/infiniband/mlx5_0/ports/1/state":             "4: ACTIVE",
		"class/infiniband/mlx5_0/device/numa_node":          "0",
		"class/infiniband/mlx5_1/ports/1/link_layer":        "Ethernet",
		"class/infiniband/mlx5_2/ports/1/state":             "1: DOWN",
		"class/infiniband/mlx5_2/device/vendor":             "0x15b3",
		"class/dmi/id/product_name":                         "DGXH100",
		"devices/system/node/node1/cpulist":                 "56-111,168-223",
		"devices/system/node/node0/distance":                "10 21",
		"devices/system/cpu/cpu112/topology/core_id":        "0",
		"devices/system/node/node1/cpu223/topology/core_id": "55",
	} {
		if got := read(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for name, want := range map[string]string{
		"bus/pci/devices/0000:1b:00.0":        "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:19:00.0/0000:1a:00.0/0000:1b:00.0",
		"bus/pci/devices/0000:1b:00.0/driver": "bus/pci/drivers/nvidia",
		"class/infiniband/mlx5_0/device":      "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
	} {
		got, err := filepath.EvalSymlinks(filepath.Join(dir, "sys", name))
		if err != nil || got != filepath.Join(dir, "sys", want) {
			t.Errorf("%s leads to %s, want %s (%v)", name, got, want, err)
		}
	}
	all, err := fs.Glob(sys, "bus/pci/devices/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range all {
		if _, err := fs.Stat(sys, at+"/config"); err != nil {
			t.Error(err)
		}
	}

	// What is unplugged goes, with its own folder and nothing else's.
	m := install.Machine{Dev: filepath.Join(dir, "dev"), Kernel: dir}
	if err := errors.Join(w.Unplug(0), m.Sync(w)); err != nil {
		t.Fatal(err)
	}
	if _, err := fs.Stat(sys, "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:19:00.0/0000:1a:00.0/0000:1b:00.0"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an unplugged GPU: %v", err)
	}
	read("class/infiniband/mlx5_0/device/class")

	// Another machine's files take the place of all of these.
	if err := install.Kernel(dir, "Character devices:\n", world(t, emulator.Spec{Count: 2})); err != nil {
		t.Fatal(err)
	}
	for _, gone := range []string{"class/infiniband", "devices/system/cpu", "devices/pci0000:15", "bus/pci/devices/0000:9d:00.0"} {
		if _, err := fs.Stat(sys, gone); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s of the machine before: %v", gone, err)
		}
	}
	if got := read("bus/pci/devices/0000:07:00.0/class"); got != "0x030200" {
		t.Errorf("the next machine's GPU has class %s", got)
	}
}

func TestMountIsRefusedOnTheMachineItself(t *testing.T) {
	if self, err := os.Readlink("/proc/self/ns/mnt"); err != nil || self != "mnt:[4026531832]" {
		first, err := os.Readlink("/proc/1/ns/mnt")
		if err != nil || first != self {
			t.Skipf("the tests run in mount namespace %s, not in the machine's own", self)
		}
	}
	if err := install.Mount(world(t, emulator.Spec{})); !errors.Is(err, install.ErrHost) {
		t.Fatalf("mount: %v", err)
	}
}

func TestMount(t *testing.T) {
	needRoot(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, role := range []string{"mount", "mount-shared"} {
		cmd := exec.CommandContext(t.Context(), exe)
		cmd.Env = append(os.Environ(), "INSTALL_TEST_ROLE="+role)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s, in a mount namespace: %v\n%s", role, err, out)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), "gpu-emulator") {
		t.Error("the mounts are seen outside their namespace")
	}
}

func mountAndLook() error {
	w, err := emulator.New(emulator.Spec{Count: 2})
	if err != nil {
		return err
	}
	if err := install.Mount(w); err != nil {
		return err
	}
	dev, err := os.MkdirTemp("", "dev-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dev)
	here := install.Machine{Dev: dev, Kernel: "/"}
	if err := w.Unplug(0); err != nil {
		return err
	}
	if err := here.Sync(w); err != nil {
		return err
	}
	for _, gone := range []string{
		"/proc/driver/nvidia/gpus/0000:07:00.0", "/sys/bus/pci/devices/0000:07:00.0", filepath.Join(dev, "nvidia1"),
	} {
		if _, err := os.Lstat(gone); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s of an unplugged GPU: %v", gone, err)
		}
	}
	if err := errors.Join(w.Unload(), here.Sync(w)); err != nil {
		return err
	}
	for _, gone := range []string{"/proc/driver/nvidia", filepath.Join(dev, "nvidiactl")} {
		if _, err := os.Lstat(gone); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s without a driver: %v", gone, err)
		}
	}
	if err := errors.Join(w.Plug(0), w.Load()); err != nil {
		return err
	}
	if err := here.Sync(w); err != nil {
		return err
	}
	if err := mountOther(); err != nil {
		return err
	}
	if err := install.Mount(w); err != nil {
		return err
	}
	for name, want := range map[string]string{
		"/proc/driver/nvidia/version":                       w.DriverVersion(),
		"/proc/devices":                                     "195 nvidia\n",
		"/sys/bus/pci/devices/0000:07:00.0/device":          "0x2330",
		"/proc/driver/nvidia-caps/mig-minors":               "gpu0/gi0/access 3\n",
		"/proc/driver/nvidia/gpus/0000:07:00.0/information": w.State().GPUs[0].UUID,
	} {
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if !strings.Contains(string(data), want) {
			return fmt.Errorf("%s does not say %q:\n%s", name, want, data)
		}
	}
	return nil
}

// mountOther shows a machine that describes its processors, in the place of one that
// does not, and then looks whether all else is as it was.
func mountOther() error {
	own, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		return err
	}
	classes, err := os.ReadDir("/sys/class")
	if err != nil {
		return err
	}
	for _, want := range []struct {
		spec                   emulator.Spec
		cpus, address, machine string
	}{
		{emulator.Spec{Topology: "dgx-2"}, "0-95\n", "0000:34:00.0", "NVIDIA DGX-2\n"},
		{emulator.Spec{Count: 1}, string(own), "0000:07:00.0", "GPU server\n"},
	} {
		w, err := emulator.New(want.spec)
		if err != nil {
			return err
		}
		if err := install.Mount(w); err != nil {
			return err
		}
		for name, text := range map[string]string{
			"/sys/devices/system/cpu/online": want.cpus, "/sys/class/dmi/id/product_name": want.machine,
			"/sys/bus/pci/devices/" + want.address + "/vendor": "0x10de\n",
		} {
			if data, err := os.ReadFile(name); err != nil || string(data) != text {
				return fmt.Errorf("%s: %q, want %q (%v)", name, data, text, err)
			}
		}
		for _, c := range classes {
			if _, err := os.ReadDir("/sys/class/" + c.Name()); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		if lo, err := os.ReadFile("/sys/class/net/lo/ifindex"); err != nil || string(lo) != "1\n" {
			return fmt.Errorf("loopback in sysfs: %q, %v", lo, err)
		}
	}
	return nil
}

// TestContainerToolkitFindsTheDriver generates the CDI specification that the
// field generates, on a driver at a root of its own.
func TestContainerToolkitFindsTheDriver(t *testing.T) {
	needRoot(t)
	w := world(t, emulator.Spec{Count: 4})
	dir := filepath.Join(bound, "run/nvidia/driver")
	driver(t, w, dir)
	if err := install.Nodes(filepath.Join(dir, "dev"), w); err != nil {
		t.Fatal(err)
	}
	l, err := daemon.Listen(filepath.Join(dir, install.Socket))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- (&daemon.Server{World: w}).Serve(ctx, l) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()

	api, err := nvcdi.New(
		nvcdi.WithDriverRoot(dir),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNVIDIACDIHookPath("/opt/nvidia-cdi-hook"),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	)
	if err != nil {
		t.Fatal(err)
	}
	common, err := api.GetCommonEdits()
	if err != nil {
		t.Fatal(err)
	}
	var mounts []string
	for _, m := range common.Mounts {
		if want := filepath.Join(dir, m.ContainerPath); m.HostPath != want {
			t.Errorf("mount of %s at %s", m.HostPath, m.ContainerPath)
		}
		mounts = append(mounts, m.ContainerPath)
	}
	v := w.DriverVersion()
	for _, want := range []string{
		"/usr/lib/x86_64-linux-gnu/libcuda.so." + v,
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so." + v,
		"/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so." + v,
		"/usr/bin/nvidia-smi",
		"/lib/firmware/nvidia/" + v + "/gsp_ga10x.bin",
		"/run/nvidia-persistenced/socket",
	} {
		if !slices.Contains(mounts, want) {
			t.Errorf("no mount at %s, have %q", want, mounts)
		}
	}
	if got := nodes(common.ContainerEdits); !slices.Contains(got, "/dev/nvidiactl") || !slices.Contains(got, "/dev/nvidia-uvm") {
		t.Errorf("nodes for every container: %q", got)
	}
	if !slices.ContainsFunc(common.Hooks, func(h *specs.Hook) bool { return slices.Contains(h.Args, "update-ldcache") }) {
		t.Errorf("no update-ldcache hook")
	}
	for _, g := range w.State().GPUs {
		devices, err := api.GetDeviceSpecsByID(g.UUID)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("[/dev/nvidia%d]", g.Minor)
		for _, d := range devices {
			if got := fmt.Sprint(nodes(&d.ContainerEdits)); got != want {
				t.Errorf("GPU %d as %s: nodes %s, want %s", g.Index, d.Name, got, want)
			}
		}
		if len(devices) == 0 {
			t.Errorf("GPU %d: no CDI device", g.Index)
		}
	}
}

func nodes(e *specs.ContainerEdits) []string {
	var out []string
	for _, n := range e.DeviceNodes {
		out = append(out, n.Path)
	}
	return out
}
