// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"bufio"
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
)

// This test binary is several programs, so that libraries are loaded, processes
// hold memory and children fork as they do for real.
func TestMain(m *testing.M) {
	switch os.Getenv("ABI_TEST_ROLE") {
	case "list": // print the PIDs that the driver lists on GPU 0
		os.Exit(roleList())
	case "container": // say what GPUs there are beside one device node
		os.Exit(roleContainer())
	case "cuda": // become a program, as nobody, beside one device node
		os.Exit(roleCUDA())
	case "hold": // hold memory until stdin ends
		os.Exit(roleHold())
	}
	var err error
	if root, err = os.MkdirTemp("", "driver-root-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(root)
	os.Exit(code)
}

// root is the driver root of all tests: what go-nvml has loaded once stays
// bound for the life of a program.
var root string

// built is where the driver's libraries are. lib.Cached asks go and gcc for what they depend
// on, which is not asked again for each of hundreds of nodes and programs.
var built = sync.OnceValues(func() (string, error) { return lib.Cached(context.Background()) })

// layRoot puts the library into the root, where it is not there yet.
func layRoot() error {
	libraries, err := built()
	if err != nil {
		return err
	}
	dir := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	err = os.Symlink(filepath.Join(libraries, lib.NVML), filepath.Join(dir, "libnvidia-ml.so.1"))
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}

// node is a world behind a socket, at the place that the library looks for it.
type node struct {
	world   *emulator.World
	library string
	socket  string
	stop    func() // ends the daemon
}

func start(t testing.TB, spec emulator.Spec) *node {
	t.Helper()
	if err := layRoot(); err != nil {
		t.Fatal(err)
	}
	n := &node{
		library: filepath.Join(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"),
		socket:  filepath.Join(root, "run/nvidia-persistenced/socket"),
	}
	var err error
	if n.world, err = emulator.New(spec); err != nil {
		t.Fatal(err)
	}
	n.serve(t)
	return n
}

// serve runs the daemon until the test ends or stop is called.
func (n *node) serve(t testing.TB) {
	t.Helper()
	l, err := daemon.Listen(n.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- (&daemon.Server{World: n.world}).Serve(ctx, l) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("daemon: %v", err)
		}
	})
	t.Cleanup(n.stop)
}

// open loads the library and initialises it for the rest of the test.
func (n *node) open(t testing.TB) nvml.Interface {
	t.Helper()
	api := nvml.New(nvml.WithLibraryPath(n.library))
	if r := api.Init(); r != nvml.SUCCESS {
		t.Fatalf("Init: %v", r)
	}
	t.Cleanup(func() {
		if r := api.Shutdown(); r != nvml.SUCCESS {
			t.Errorf("Shutdown: %v", r)
		}
	})
	return api
}

func ok(t *testing.T, r nvml.Return, what string) {
	t.Helper()
	if r != nvml.SUCCESS {
		t.Fatalf("%s: %v", what, r)
	}
}

func want[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func text(chars []int8) string {
	var b []byte
	for _, c := range chars {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}

func device(t *testing.T, api nvml.Interface, index int) nvml.Device {
	t.Helper()
	d, r := api.DeviceGetHandleByIndex(index)
	ok(t, r, fmt.Sprintf("device %d", index))
	return d
}

func TestEveryNameOfTheHeaderIsExported(t *testing.T) {
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	header, err := lib.Header(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(header)
	if err != nil {
		t.Fatal(err)
	}
	exported := exports(t, filepath.Join(dir, lib.NVML))
	names := lib.Names(data)
	if len(names) < 400 || bytes.Count(data, []byte(" DECLDIR nvml")) > len(names) {
		t.Errorf("read %d names from nvml.h, which declares %d", len(names), bytes.Count(data, []byte(" DECLDIR nvml")))
	}
	for name := range names {
		if !exported[name] {
			t.Errorf("%s is not exported", name)
		}
	}
	for name := range exported {
		if _, ok := names[name]; !ok && !strings.HasPrefix(name, "gpuEmulator") {
			t.Errorf("%s is exported and not in nvml.h", name)
		}
	}
}

func TestCUDALibraryHasItsName(t *testing.T) {
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(filepath.Join(dir, lib.CUDA))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	soname, err := f.DynString(elf.DT_SONAME)
	if err != nil || !slices.Equal(soname, []string{"libcuda.so.1"}) {
		t.Errorf("SONAME %q, %v", soname, err)
	}
	if !exports(t, filepath.Join(dir, lib.CUDA))["cuInit"] {
		t.Error("cuInit is not exported")
	}
}

func exports(t *testing.T, file string) map[string]bool {
	t.Helper()
	f, err := elf.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF {
			names[s.Name] = true
		}
	}
	return names
}

func TestInventory(t *testing.T) {
	for _, model := range emulator.Models() {
		t.Run(model, func(t *testing.T) {
			spec := emulator.Spec{Model: model, Count: 16}
			n := start(t, spec)
			api := n.open(t)
			m, err := emulator.LoadModel(model)
			if err != nil {
				t.Fatal(err)
			}
			driver, r := api.SystemGetDriverVersion()
			ok(t, r, "driver version")
			want(t, "driver version", driver, n.world.DriverVersion())
			cuda, r := api.SystemGetCudaDriverVersion_v2()
			ok(t, r, "CUDA version")
			want(t, "CUDA version", cuda, 13000)
			count, r := api.DeviceGetCount()
			ok(t, r, "count")
			want(t, "count", count, 16)
			for i, g := range n.world.State().GPUs {
				d := device(t, api, i)
				name, r := d.GetName()
				ok(t, r, "name")
				want(t, "name", name, m.Name)
				uuid, r := d.GetUUID()
				ok(t, r, "UUID")
				want(t, "UUID", uuid, g.UUID)
				minor, r := d.GetMinorNumber()
				ok(t, r, "minor")
				want(t, "minor", minor, 15-i)
				index, r := d.GetIndex()
				ok(t, r, "index")
				want(t, "index", index, i)
				pci, r := d.GetPciInfo()
				ok(t, r, "PCI")
				want(t, "PCI bus id", text(pci.BusId[:]), g.PCI)
				want(t, "PCI legacy bus id", text(pci.BusIdLegacy[:]), g.PCI[4:])
				want(t, "PCI device", pci.PciDeviceId, m.PCIDevice)
				want(t, "PCI subsystem", pci.PciSubSystemId, m.PCISubsystem)
				major, minorCC, r := d.GetCudaComputeCapability()
				ok(t, r, "compute capability")
				want(t, "compute capability", fmt.Sprintf("%d.%d", major, minorCC), m.ComputeCapability)
				arch, r := d.GetArchitecture()
				ok(t, r, "architecture")
				want(t, "architecture", uint32(arch), m.Architecture)
				numa, r := d.GetNumaNodeId()
				ok(t, r, "NUMA")
				want(t, "NUMA", numa, i/8)
				for what, find := range map[string]func() (nvml.Device, nvml.Return){
					"UUID": func() (nvml.Device, nvml.Return) { return api.DeviceGetHandleByUUID(uuid) },
					"PCI":  func() (nvml.Device, nvml.Return) { return api.DeviceGetHandleByPciBusId(g.PCI) },
					"lower-case short PCI": func() (nvml.Device, nvml.Return) {
						return api.DeviceGetHandleByPciBusId(strings.ToLower(g.PCI[4:]))
					},
				} {
					found, r := find()
					ok(t, r, "find by "+what)
					want(t, "find by "+what, found, d)
				}
			}
			if _, r := api.DeviceGetHandleByIndex(16); r != nvml.ERROR_INVALID_ARGUMENT {
				t.Errorf("index 16: %v", r)
			}
			if _, r := api.DeviceGetHandleByUUID("GPU-0"); r != nvml.ERROR_NOT_FOUND {
				t.Errorf("unknown UUID: %v", r)
			}
		})
	}
}

func TestMemory(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2})
	api := n.open(t)
	d := device(t, api, 0)
	if err := n.world.AddProcess(emulator.Process{PID: os.Getpid(), GPU: 0, Kind: emulator.Compute, MiB: 1000}); err != nil {
		t.Fatal(err)
	}
	v2, r := d.GetMemoryInfo_v2()
	ok(t, r, "memory v2")
	want(t, "total", v2.Total>>20, 81559)
	want(t, "units of 1 GiB", (v2.Total-v2.Reserved)>>30, 79)
	want(t, "used", v2.Used>>20, 1000)
	want(t, "sum", v2.Used+v2.Free+v2.Reserved, v2.Total)
	v1, r := d.GetMemoryInfo()
	ok(t, r, "memory v1")
	want(t, "v1 total", v1.Total, v2.Total)
	want(t, "v1 free", v1.Free, v2.Free)
	want(t, "v1 used", v1.Used, v2.Used+v2.Reserved)
}

func TestProcessLists(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2})
	api := n.open(t)
	d := device(t, api, 0)
	var pids []int
	for range 40 { // more than go-nvml's first tries have room for
		cmd := sleeper(t)
		pids = append(pids, cmd.Process.Pid)
	}
	slices.Sort(pids)
	for i, pid := range pids {
		p := emulator.Process{PID: pid, GPU: 0, Kind: emulator.Compute, MiB: uint64(i), Unknown: i == 7}
		if err := n.world.AddProcess(p); err != nil {
			t.Fatal(err)
		}
	}
	list, r := d.GetComputeRunningProcesses()
	ok(t, r, "compute processes")
	if len(list) != len(pids) {
		t.Fatalf("%d processes, want %d", len(list), len(pids))
	}
	for i, p := range list {
		used := uint64(i) << 20
		if i == 7 {
			used = ^uint64(0)
		}
		want(t, "process", p, nvml.ProcessInfo{Pid: uint32(pids[i]), UsedGpuMemory: used, GpuInstanceId: emulator.NotMIG, ComputeInstanceId: emulator.NotMIG})
	}
	for what, get := range map[string]func() ([]nvml.ProcessInfo, nvml.Return){
		"graphics": d.GetGraphicsRunningProcesses,
		"MPS":      d.GetMPSComputeRunningProcesses,
		"GPU 1's":  device(t, api, 1).GetComputeRunningProcesses,
	} {
		if list, r := get(); r != nvml.SUCCESS || len(list) != 0 {
			t.Errorf("%s processes: %v, %v", what, list, r)
		}
	}
}

// sleeper is a process that does nothing until the test ends.
func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	return cmd
}

func self(t testing.TB, role string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, args...)
	cmd.Env = append(os.Environ(), "ABI_TEST_ROLE="+role)
	cmd.Stderr = os.Stderr
	return cmd
}

func roleList() int {
	if len(os.Args) > 2 { // hold memory as well, to be seen
		c, err := daemon.Dial(os.Args[2])
		if err == nil {
			err = c.Hold(emulator.Process{GPU: 0, Kind: emulator.Compute, MiB: 10})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	api := nvml.New(nvml.WithLibraryPath(os.Args[1]))
	if r := api.Init(); r != nvml.SUCCESS {
		fmt.Fprintln(os.Stderr, "init:", r)
		return 1
	}
	d, r := api.DeviceGetHandleByIndex(0)
	if r != nvml.SUCCESS {
		fmt.Fprintln(os.Stderr, "device:", r)
		return 1
	}
	list, r := d.GetComputeRunningProcesses()
	if r != nvml.SUCCESS {
		fmt.Fprintln(os.Stderr, "processes:", r)
		return 1
	}
	pids := []int{}
	for _, p := range list {
		pids = append(pids, int(p.Pid))
	}
	json.NewEncoder(os.Stdout).Encode(pids)
	return 0
}

func roleHold() int {
	c, err := daemon.Dial(os.Args[1])
	if err == nil {
		gpu, _ := strconv.Atoi(os.Args[2])
		mib, _ := strconv.Atoi(os.Args[3])
		err = c.Hold(emulator.Process{GPU: gpu, Kind: emulator.Compute, MiB: uint64(mib)})
	}
	fmt.Println("held", err)
	io.Copy(io.Discard, os.Stdin)
	return 0
}

func TestProcessListsAreInTheCallersPIDNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making a PID namespace needs root")
	}
	n := start(t, emulator.Spec{Count: 1})
	outside := sleeper(t)
	if err := n.world.AddProcess(emulator.Process{PID: outside.Process.Pid, GPU: 0, Kind: emulator.Compute, MiB: 1}); err != nil {
		t.Fatal(err)
	}
	cmd := self(t, "list", n.library, n.socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("child in a PID namespace: %v", err)
	}
	// The child is PID 1 there; the process outside cannot be seen.
	want(t, "PIDs in the child's namespace", strings.TrimSpace(string(out)), "[1]")

	out, err = self(t, "list", n.library).Output()
	if err != nil {
		t.Fatal(err)
	}
	want(t, "PIDs outside, after the child's death", strings.TrimSpace(string(out)), fmt.Sprintf("[%d]", outside.Process.Pid))
}

// containerDev is a container's /dev: the control node, that of minor 1 alone, and
// those of the capabilities in $ABI_TEST_CAPABILITIES.
func containerDev() error {
	err := unix.Mount("dev", "/dev", "tmpfs", 0, "")
	for name, minor := range map[string]uint32{"nvidiactl": 255, "nvidia1": 1} {
		err = errors.Join(err, unix.Mknod("/dev/"+name, unix.S_IFCHR|0o666, int(unix.Mkdev(195, minor))))
	}
	err = errors.Join(err, os.Mkdir("/dev/nvidia-caps", 0o755))
	for _, text := range strings.Fields(os.Getenv("ABI_TEST_CAPABILITIES")) {
		minor, bad := strconv.Atoi(text)
		node := filepath.Join("/dev", install.CapabilityNode(minor))
		err = errors.Join(err, bad, unix.Mknod(node, unix.S_IFCHR|0o444, int(unix.Mkdev(install.MajorCapabilities, uint32(minor)))))
	}
	return err
}

func roleCUDA() int {
	err := containerDev()
	if err == nil {
		err = syscall.Setgid(65534)
	}
	if err == nil {
		err = syscall.Setuid(65534)
	}
	if err == nil {
		err = unix.Exec(os.Args[1], os.Args[1:], os.Environ())
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func roleContainer() int {
	if err := containerDev(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	api := nvml.New(nvml.WithLibraryPath(os.Args[1]))
	if r := api.Init(); r != nvml.SUCCESS {
		fmt.Fprintln(os.Stderr, "init:", r)
		return 1
	}
	count, _ := api.DeviceGetCount()
	d, r := api.DeviceGetHandleByIndex(0)
	if r != nvml.SUCCESS {
		fmt.Fprintln(os.Stderr, "device:", r)
		return 1
	}
	index, _ := d.GetIndex()
	minor, _ := d.GetMinorNumber()
	_, other := api.DeviceGetHandleByUUID(os.Args[2])
	fmt.Printf("%d GPUs, index %d, minor %d, another's UUID: %v", count, index, minor, other)
	return 0
}

func TestAContainerSeesTheGPUsOfItsDeviceNodes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("making device nodes in a mount namespace needs root")
	}
	n := start(t, emulator.Spec{Count: 4})
	cmd := self(t, "container", n.library, n.world.State().GPUs[0].UUID)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	want(t, "the container", string(out), "1 GPUs, index 0, minor 1, another's UUID: Not Found")
}

func TestMemoryIsFreedWhenItsProcessDies(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	cmd := self(t, "hold", n.socket, "0", "5000")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "held <nil>\n" {
		t.Fatalf("holder said %q, %v", line, err)
	}
	st := n.world.State()
	want(t, "used", st.GPUs[0].UsedMiB, 5000)
	want(t, "holder", st.Processes[0].PID, cmd.Process.Pid)
	cmd.Process.Kill()
	cmd.Wait()
	in.Close()
	eventually(t, "memory free again", func() bool { return n.world.State().GPUs[0].UsedMiB == 0 })
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestEvents(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2})
	api := n.open(t)
	set, r := api.EventSetCreate()
	ok(t, r, "create set")
	for i := range 2 {
		d := device(t, api, i)
		types, r := d.GetSupportedEventTypes()
		ok(t, r, "supported events")
		ok(t, d.RegisterEvents(types&nvml.EventTypeXidCriticalError, set), "register")
	}
	if r := device(t, api, 0).RegisterEvents(1<<60, set); r != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("register an unknown event: %v", r)
	}
	if _, r := set.Wait(1); r != nvml.ERROR_TIMEOUT {
		t.Errorf("wait for nothing: %v", r)
	}
	type answer struct {
		e nvml.EventData
		r nvml.Return
	}
	got := make(chan answer)
	wait := func() {
		e, r := set.Wait(60_000)
		got <- answer{e, r}
	}
	go wait()
	if err := n.world.Xid(1, 48); err != nil {
		t.Fatal(err)
	}
	a := <-got
	ok(t, a.r, "wait")
	want(t, "Xid", a.e.EventData, 48)
	want(t, "type", a.e.EventType, nvml.EventTypeXidCriticalError)
	want(t, "GPU instance", a.e.GpuInstanceId, emulator.NotMIG)
	uuid, r := a.e.Device.GetUUID()
	ok(t, r, "event's UUID")
	want(t, "event's UUID", uuid, n.world.State().GPUs[1].UUID)

	// A GPU that is lost raises its Xid first; then the set is of no use.
	go wait()
	if err := n.world.Lose(0); err != nil {
		t.Fatal(err)
	}
	a = <-got
	ok(t, a.r, "wait for the loss")
	want(t, "Xid of the loss", a.e.EventData, emulator.XidGPULost)
	if _, r := set.Wait(60_000); r != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("wait on a set with a lost GPU: %v", r)
	}
	ok(t, set.Free(), "free")
	if _, r := set.Wait(1); r != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("wait on a freed set: %v", r)
	}
}

func TestLostGPU(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2})
	api := n.open(t)
	d := device(t, api, 1)
	_, r := d.GetName() // an answer that the library may keep
	ok(t, r, "name")
	if err := n.world.Lose(1); err != nil {
		t.Fatal(err)
	}
	count, r := api.DeviceGetCount()
	ok(t, r, "count")
	want(t, "count", count, 2)
	for what, r := range map[string]nvml.Return{
		"name":   second(d.GetName()),
		"memory": second(d.GetMemoryInfo_v2()),
		"handle": second(api.DeviceGetHandleByIndex(1)),
		"fans":   second(d.GetNumFans()), // a stub
	} {
		if r != nvml.ERROR_GPU_IS_LOST {
			t.Errorf("%s of a lost GPU: %v", what, r)
		}
	}
	if _, r := device(t, api, 0).GetName(); r != nvml.SUCCESS {
		t.Errorf("name of the other GPU: %v", r)
	}
	if err := n.world.Restore(1); err != nil {
		t.Fatal(err)
	}
	// As on hardware: a driver does not say by itself that a GPU came back.
	want(t, "name after the return", second(d.GetName()), nvml.ERROR_GPU_IS_LOST)
	ok(t, api.Shutdown(), "Shutdown")
	ok(t, api.Init(), "Init")
	ok(t, second(device(t, api, 1).GetName()), "name after an Init")

}

func TestGPUsComeAndGo(t *testing.T) {
	n := start(t, emulator.Spec{Count: 3})
	api := n.open(t)
	uuids := func() (out []string) {
		t.Helper()
		count, r := api.DeviceGetCount()
		ok(t, r, "count")
		for i := range count {
			uuid, r := device(t, api, i).GetUUID()
			ok(t, r, "UUID")
			out = append(out, uuid)
		}
		return out
	}
	all := uuids()
	old := device(t, api, 1)
	if err := n.world.Unplug(1); err != nil {
		t.Fatal(err)
	}
	want(t, "its handle", second(old.GetUUID()), nvml.ERROR_GPU_IS_LOST)
	want(t, "by index", second(api.DeviceGetHandleByIndex(1)), nvml.ERROR_GPU_IS_LOST)
	anew := func() {
		t.Helper()
		ok(t, api.Shutdown(), "Shutdown")
		ok(t, api.Init(), "Init")
	}
	anew()
	want(t, "without it", fmt.Sprint(uuids()), fmt.Sprint([]string{all[0], all[2]}))
	want(t, "by UUID", second(api.DeviceGetHandleByUUID(all[1])), nvml.ERROR_NOT_FOUND)
	if err := n.world.Plug(1); err != nil {
		t.Fatal(err)
	}
	want(t, "before an Init", len(uuids()), 2)
	anew()
	want(t, "with it", fmt.Sprint(uuids()), fmt.Sprint(all))
}

func TestUnload(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	api := nvml.New(nvml.WithLibraryPath(n.library))
	ok(t, api.Init(), "Init")
	ok(t, second(device(t, api, 0).GetName()), "name")
	if err := n.world.Unload(); !errors.Is(err, emulator.InUse) || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) {
		t.Errorf("unload of a driver in use: %v", err)
	}
	ok(t, api.Shutdown(), "Shutdown")
	if err := n.world.Unload(); err != nil {
		t.Fatal(err)
	}
	want(t, "Init without a driver", api.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	runC(t, n, `
	unsigned int n;
	CHECK(nvmlInit_v2(), NVML_ERROR_DRIVER_NOT_LOADED);
	CHECK(nvmlInitWithFlags(0), NVML_ERROR_DRIVER_NOT_LOADED);
	CHECK(nvmlDeviceGetCount_v2(&n), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlShutdown(), NVML_ERROR_UNINITIALIZED);
`)
	if err := errors.Join(n.world.Upgrade("590.1.2"), n.world.Load()); err != nil {
		t.Fatal(err)
	}
	ok(t, api.Init(), "Init")
	version, r := api.SystemGetDriverVersion()
	ok(t, r, "version")
	want(t, "version", version, "590.1.2")
	ok(t, second(device(t, api, 0).GetName()), "name")
	ok(t, api.Shutdown(), "Shutdown")
}

// A program that is told that it could not let go of the driver has it open, also
// where it is told so in the words of a connection that ended.
func TestShutdownThatFailsLeavesTheDriverOpen(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	api := nvml.New(nvml.WithLibraryPath(n.library))
	ok(t, api.Init(), "Init")
	for _, code := range []emulator.Return{emulator.Unknown, emulator.OperatingSystem} {
		if err := n.world.Inject(emulator.Fault{Call: "nvmlShutdown", Code: code, Count: 1}); err != nil {
			t.Fatal(err)
		}
		want(t, "Shutdown", api.Shutdown(), nvml.Return(code))
		ok(t, second(device(t, api, 0).GetName()), "name")
	}
	ok(t, api.Shutdown(), "Shutdown")
	want(t, "Shutdown of what is closed", api.Shutdown(), nvml.ERROR_UNINITIALIZED)
	if err := n.world.Unload(); err != nil {
		t.Errorf("the driver counts it as open: %v", err)
	}
}

func second[T any](_ T, r nvml.Return) nvml.Return { return r }

func TestFaults(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2})
	api := n.open(t)
	d0, d1 := device(t, api, 0), device(t, api, 1)
	_, r := d1.GetName()
	ok(t, r, "name")
	one := 1
	inject := func(f emulator.Fault) {
		t.Helper()
		if err := n.world.Inject(f); err != nil {
			t.Fatal(err)
		}
	}
	inject(emulator.Fault{Call: "nvmlDeviceGetName", GPU: &one, Code: 999, Count: 2})
	for range 2 {
		want(t, "failing call", second(d1.GetName()), nvml.ERROR_UNKNOWN)
		want(t, "call about another GPU", second(d0.GetName()), nvml.SUCCESS)
	}
	want(t, "call after the count", second(d1.GetName()), nvml.SUCCESS)

	inject(emulator.Fault{Call: "nvmlDeviceGetNumFans", Code: 4})
	want(t, "a stub's fault", second(d0.GetNumFans()), nvml.ERROR_NO_PERMISSION)
	n.world.Clear()
	want(t, "a stub", second(d0.GetNumFans()), nvml.ERROR_NOT_SUPPORTED)

	// A call that hangs holds up nobody else, and goes on when it may.
	inject(emulator.Fault{Call: "nvmlDeviceGetMemoryInfo*", Hang: true})
	hung := make(chan nvml.Return)
	go func() { hung <- second(d0.GetMemoryInfo_v2()) }()
	eventually(t, "the call has arrived", func() bool {
		return slices.ContainsFunc(n.world.Calls(0), func(c emulator.CallCount) bool { return c.Call == "nvmlDeviceGetMemoryInfo_v2" })
	})
	want(t, "another call meanwhile", second(d0.GetUUID()), nvml.SUCCESS)
	select {
	case r := <-hung:
		t.Fatalf("the call came back: %v", r)
	default:
	}
	n.world.Clear()
	want(t, "the call that hung", <-hung, nvml.SUCCESS)
}

func TestCallsAreCountedAlsoWhereTheAnswerIsKept(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	api := n.open(t)
	d := device(t, api, 0)
	n.world.ResetCalls()
	for range 100 {
		_, r := d.GetUUID()
		ok(t, r, "UUID")
	}
	_, r := d.GetNumFans()
	want(t, "a stub", r, nvml.ERROR_NOT_SUPPORTED)
	want(t, "calls", fmt.Sprint(n.world.Calls(0)), "[{nvmlDeviceGetNumFans 1} {nvmlDeviceGetUUID 100}]")
	var own uint64
	for _, c := range n.world.Calls(os.Getpid()) {
		if c.Call == "nvmlDeviceGetUUID" {
			own = c.Count
		}
	}
	want(t, "calls of this process", own, 100)
}

func TestBufferSizes(t *testing.T) {
	// go-nvml's own buffers are always large enough; the C side is asked
	// through a program.
	n := start(t, emulator.Spec{Count: 1})
	if err := n.world.AddProcess(emulator.Process{PID: os.Getpid(), GPU: 0, Kind: emulator.Compute, MiB: 1}); err != nil {
		t.Fatal(err)
	}
	runC(t, n, `
	nvmlDevice_t d;
	nvmlDevice_t bogus = {(void *)&d};
	char s[96];
	unsigned int n = 0;
	nvmlProcessInfo_t p[2];
	nvmlProcessInfo_v1_t p1[2];
	nvmlMemory_v2_t m = {.version = 1};
	CHECK(nvmlDeviceGetCount_v2(&n), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlDeviceGetNumFans(bogus, &n), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlShutdown(), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlInit_v2(), NVML_SUCCESS);
	CHECK(nvmlInit_v2(), NVML_SUCCESS);
	CHECK(nvmlShutdown(), NVML_SUCCESS);
	CHECK(nvmlDeviceGetCount_v2(&n), NVML_SUCCESS);
	CHECK(nvmlDeviceGetCount_v2(NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetHandleByIndex_v2(0, &d), NVML_SUCCESS);
	CHECK(nvmlDeviceGetName(bogus, s, sizeof s), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetNumFans(bogus, &n), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetUUID(d, s, 40), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(nvmlDeviceGetUUID(d, s, 41), NVML_SUCCESS);
	CHECK(nvmlDeviceGetUUID(d, s, 40), NVML_ERROR_INSUFFICIENT_SIZE); /* kept answers too */
	CHECK(nvmlDeviceGetMemoryInfo_v2(d, &m), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	m.version = nvmlMemory_v2;
	CHECK(nvmlDeviceGetMemoryInfo_v2(d, &m), NVML_SUCCESS);
	n = 0;
	CHECK(nvmlDeviceGetComputeRunningProcesses_v3(d, &n, NULL), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(n, 1);
	CHECK(nvmlDeviceGetComputeRunningProcesses_v3(d, &n, NULL), NVML_ERROR_INVALID_ARGUMENT);
	n = 2;
	CHECK(nvmlDeviceGetComputeRunningProcesses_v3(d, &n, p), NVML_SUCCESS);
	CHECK(n, 1);
	CHECK(p[0].usedGpuMemory, 1 << 20);
	n = 2;
	CHECK(nvmlDeviceGetComputeRunningProcesses(d, &n, p1), NVML_SUCCESS);
	CHECK(p1[0].usedGpuMemory, 1 << 20);
	n = 100000;
	CHECK(nvmlDeviceGetGraphicsRunningProcesses_v3(d, &n, (void *)p), NVML_SUCCESS);
	CHECK(n, 0);
	nvmlGpuInstanceProfileInfo_v2_t v2 = {.version = nvmlGpuInstanceProfileInfo_v2};
	CHECK(nvmlDeviceGetGpuInstanceProfileInfoV(d, NVML_GPU_INSTANCE_PROFILE_3_SLICE, &v2), NVML_SUCCESS);
	CHECK(strcmp(v2.name, "MIG 3g.40gb"), 0);
	v2.version = 7;
	CHECK(nvmlDeviceGetGpuInstanceProfileInfoV(d, 0, &v2), NVML_ERROR_INVALID_ARGUMENT);
	nvmlGpuInstancePlacement_t at[8];
	n = 1;
	CHECK(nvmlDeviceGetGpuInstancePossiblePlacements_v2(d, 9, at, &n), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(n, 2);
	CHECK(nvmlDeviceGetGpuInstancePossiblePlacements_v2(d, 9, at, &n), NVML_SUCCESS);
	CHECK(at[1].start, 4);
	CHECK(nvmlShutdown(), NVML_SUCCESS);
	CHECK(nvmlDeviceGetCount_v2(&n), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlInit_v2(), NVML_SUCCESS); /* once more */
	CHECK(nvmlDeviceGetUUID(d, s, sizeof s), NVML_SUCCESS);
	CHECK(nvmlShutdown(), NVML_SUCCESS);
`)
}

func TestForkedChildConnectsAnew(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	runC(t, n, `
	nvmlDevice_t d;
	char s[96], kept[96];
	nvmlMemory_t m;
	CHECK(nvmlInit_v2(), NVML_SUCCESS);
	CHECK(nvmlDeviceGetHandleByIndex_v2(0, &d), NVML_SUCCESS);
	CHECK(nvmlDeviceGetUUID(d, kept, sizeof kept), NVML_SUCCESS);
	fflush(NULL);
	pid_t child = fork();
	for (int i = 0; i < 1000; i++) { /* both at once: answers must not cross */
		CHECK(nvmlDeviceGetMemoryInfo(d, &m), NVML_SUCCESS);
		CHECK(nvmlDeviceGetUUID(d, s, sizeof s), NVML_SUCCESS);
		CHECK(strcmp(s, kept), 0);
	}
	if (child == 0) {
		CHECK(nvmlShutdown(), NVML_SUCCESS);
		_exit(0);
	}
	int status = -1;
	waitpid(child, &status, 0);
	CHECK(status, 0);
	CHECK(nvmlDeviceGetMemoryInfo(d, &m), NVML_SUCCESS);
	CHECK(nvmlShutdown(), NVML_SUCCESS);
`)
	for _, c := range n.world.Calls(0) {
		if c.Call == "nvmlDeviceGetUUID" {
			want(t, "UUID look-ups of parent and child", c.Count, 2001)
		}
	}
}

// runC compiles a program around the statements, links it to the library and
// runs it.
func runC(t *testing.T, n *node, statements string) {
	t.Helper()
	header, err := lib.Header(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	source := filepath.Join(dir, "main.c")
	code := `#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "nvml.h"
#define CHECK(expression, want) do { long long got_ = (long long)(expression); \
	if (got_ != (long long)(want)) { fprintf(stderr, "%d: %s is %lld, want %s\n", __LINE__, #expression, got_, #want); return 1; } } while (0)
int main(void) {
#line 1
` + statements + "\treturn 0;\n}\n"
	if err := os.WriteFile(source, []byte(code), 0o644); err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(dir, "main")
	cmd := exec.CommandContext(t.Context(), "gcc", "-DNVML_NO_UNVERSIONED_FUNC_DEFS=1", "-I", filepath.Dir(header), "-o", exe, source, n.library, "-Wl,-rpath,"+filepath.Dir(n.library))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), exe).CombinedOutput(); err != nil {
		t.Fatalf("line %s(%v)", out, err)
	}
}

func TestManyThreads(t *testing.T) {
	n := start(t, emulator.Spec{Count: 8})
	api := n.open(t)
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			for i := range 200 {
				d, r := api.DeviceGetHandleByIndex(i % 8)
				if r != nvml.SUCCESS {
					t.Errorf("device: %v", r)
					return
				}
				if _, r := d.GetMemoryInfo_v2(); r != nvml.SUCCESS {
					t.Errorf("memory: %v", r)
					return
				}
				if minor, r := d.GetMinorNumber(); r != nvml.SUCCESS || minor != 7-i%8 {
					t.Errorf("minor of %d: %d, %v", i%8, minor, r)
					return
				}
			}
		})
	}
	all.Wait()
}

func TestWithoutADriverInitFails(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	n.stop()
	api := nvml.New(nvml.WithLibraryPath(n.library))
	want(t, "Init", api.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
}

func TestHandlesDoNotOutliveTheDriver(t *testing.T) {
	n := start(t, emulator.Spec{Count: 1})
	api := nvml.New(nvml.WithLibraryPath(n.library))
	ok(t, api.Init(), "Init")
	d := device(t, api, 0)
	ok(t, second(d.GetName()), "name")
	ok(t, second(d.GetMemoryInfo()), "memory")
	n.stop()
	want(t, "name without a driver", second(d.GetName()), nvml.ERROR_UNKNOWN)

	var err error
	if n.world, err = emulator.New(emulator.Spec{Count: 1}); err != nil {
		t.Fatal(err)
	}
	n.serve(t)
	want(t, "name after a reload", second(d.GetName()), nvml.ERROR_UNKNOWN)
	want(t, "memory after a reload", second(d.GetMemoryInfo()), nvml.ERROR_UNKNOWN)
	ok(t, api.Shutdown(), "Shutdown")
	ok(t, api.Init(), "Init on the driver as reloaded")
	ok(t, second(device(t, api, 0).GetName()), "name from it")
	ok(t, api.Shutdown(), "Shutdown")
}
