// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
)

// proc start runs its own program again: here, this test binary.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "proc" {
		main()
		return
	}
	os.Exit(m.Run())
}

// node is an installed driver with its daemon.
type node struct {
	t      *testing.T
	dir    string // driver root
	socket string
	file   string // of the world
	stop   func()
}

func start(t *testing.T, world string) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("installing device nodes needs root")
	}
	built, err := lib.Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	root, err := install.Scratch()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	file := filepath.Join(root, "world.yaml")
	if err := os.WriteFile(file, []byte(world), 0o644); err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, dir: filepath.Join(root, "run/nvidia/driver"), file: file}
	n.socket = filepath.Join(n.dir, install.Socket)
	n.ok("install", "--root", root, "--prefix", "/run/nvidia/driver", "--libraries", built, "--world", file)
	n.serve()
	t.Cleanup(func() { n.stop() })
	return n
}

// serve runs the daemon until stop is called.
func (n *node) serve() {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		done <- run(ctx, []string{"serve", "--world", n.file, "--socket", n.socket}, signalWriter(ready))
	}()
	n.stop = func() {
		cancel()
		if err := <-done; err != nil {
			n.t.Error(err)
		}
	}
	select {
	case <-ready:
	case err := <-done:
		done <- err
		n.t.Fatalf("serve: %v", err)
	}
}

func (n *node) restart() {
	n.t.Helper()
	n.stop()
	n.serve()
}

// signalWriter says when something has been written.
type signalWriter chan struct{}

func (w signalWriter) Write(p []byte) (int, error) {
	select {
	case w <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (n *node) run(args ...string) (string, error) {
	var out bytes.Buffer
	err := run(n.t.Context(), args, &out)
	return out.String(), err
}

// ok runs a command that must succeed; those that act on a world are told
// where it is.
func (n *node) ok(args ...string) string {
	n.t.Helper()
	out, err := n.run(args...)
	if err != nil {
		n.t.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	return out
}

func (n *node) state() emulator.State {
	n.t.Helper()
	var st emulator.State
	if err := json.Unmarshal([]byte(n.ok("show", "--socket", n.socket)), &st); err != nil {
		n.t.Fatal(err)
	}
	return st
}

// smi runs the installed nvidia-smi, on the libraries that stand beside it.
func (n *node) smi(args ...string) (string, int) {
	n.t.Helper()
	cmd := exec.CommandContext(n.t.Context(), filepath.Join(n.dir, "usr/bin/nvidia-smi"), args...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Join(n.dir, "usr/lib/x86_64-linux-gnu"))
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		n.t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

func TestProcesses(t *testing.T) {
	n := start(t, "count: 2")
	uuid := n.state().GPUs[1].UUID
	for _, args := range [][]string{
		{"--gpu", "1", "--memory", "500"},
		{"--gpu", uuid, "--memory", "300", "--mps", "--", "sleep", "1000"},
	} {
		pid := strings.TrimSpace(n.ok(append([]string{"proc", "start", "--socket", n.socket}, args...)...))
		t.Cleanup(func() { n.run("proc", "stop", "--socket", n.socket, pid) })
		st := n.state()
		last := st.Processes[len(st.Processes)-1]
		if strconv.Itoa(last.PID) != pid && strconv.Itoa(st.Processes[0].PID) != pid {
			t.Errorf("%v: PID %s is not among %+v", args, pid, st.Processes)
		}
		defer func() {
			before := n.state().GPUs[1].UsedMiB
			n.ok("proc", "stop", pid, "--socket", n.socket)
			if after := n.state().GPUs[1].UsedMiB; after >= before {
				t.Errorf("%d MiB used before the stop of %s, %d after", before, pid, after)
			}
		}()
	}
	if used := n.state().GPUs[1].UsedMiB; used != 800 {
		t.Errorf("%d MiB used, want 800", used)
	}
	for _, args := range [][]string{{"1"}, {"--reset", uuid}} { // nothing has ended yet
		if out := n.ok(append([]string{"peak", "--socket", n.socket}, args...)...); strings.TrimSpace(out) != strconv.Itoa(800<<20) {
			t.Errorf("peak %v: %q", args, out)
		}
	}
	table, code := n.smi()
	if code != 0 || !strings.Contains(table, "800MiB / 81559MiB") || !strings.Contains(table, "M+C   sleep") {
		t.Errorf("nvidia-smi ends with %d:\n%s", code, table)
	}
	for what, args := range map[string][]string{
		"more than there is":   {"start", "--gpu", "0", "--memory", "90000"},
		"no such GPU":          {"start", "--gpu", "9", "--memory", "1"},
		"no GPU":               {"start", "--memory", "1"},
		"no such flag":         {"start", "--gpu", "0", "--memmory", "1"},
		"no such command":      {"start", "--gpu", "0", "--memory", "1", "--", "no-such-command"},
		"stop of a bystander":  {"stop", strconv.Itoa(os.Getpid())},
		"stop of what is none": {"stop", "x"},
	} {
		if out, err := n.run(append([]string{"proc", args[0], "--socket", n.socket}, args[1:]...)...); err == nil {
			t.Errorf("not refused: %s (%s)", what, out)
		}
	}
}

func TestTimeSliceByTheDriversTool(t *testing.T) {
	n := start(t, "count: 2")
	uuid := n.state().GPUs[1].UUID
	for _, c := range []struct {
		args []string
		code int
		want string // of GPU 1 afterwards
	}{
		{[]string{"compute-policy", "-i", uuid, "--set-timeslice", "3"}, 0, "long"},
		{[]string{"compute-policy", "-i", "1", "--set-timeslice=1"}, 0, "short"},
		{[]string{"compute-policy", "-i", "1", "--set-timeslice", "4"}, 2, "short"},
		{[]string{"compute-policy", "-i", "1", "--set-timeslice", "long"}, 2, "short"},
		{[]string{"compute-policy", "-i", "7", "--set-timeslice", "2"}, 6, "short"},
		{[]string{"compute-policy", "--set-timeslice"}, 2, "short"},
		{[]string{"compute-policy"}, 2, "short"},
	} {
		out, code := n.smi(c.args...)
		if code != c.code {
			t.Errorf("%v ends with %d, want %d: %s", c.args, code, c.code, out)
		}
		if st := n.state(); st.GPUs[1].TimeSlice != c.want || st.GPUs[0].TimeSlice != "default" {
			t.Errorf("%v: time slices %s, %s", c.args, st.GPUs[0].TimeSlice, st.GPUs[1].TimeSlice)
		}
	}
	if out, code := n.smi("compute-policy", "--list"); code != 0 || !strings.Contains(out, "GPU 1: Short") {
		t.Errorf("list ends with %d: %s", code, out)
	}
}

func TestFaultsAndCalls(t *testing.T) {
	n := start(t, "count: 2")
	n.ok("fail", "--call", "nvmlInit_v2", "--code", "18", "--count", "1", "--socket", n.socket)
	if out, code := n.smi("-L"); code != 18 || !strings.Contains(out, "version mismatch") {
		t.Errorf("nvidia-smi ends with %d: %s", code, out)
	}
	n.ok("lose", "--gpu", "1", "--socket", n.socket)
	if out, code := n.smi("-L"); code != 15 || !strings.Contains(out, "GPU is lost") {
		t.Errorf("nvidia-smi ends with %d: %s", code, out)
	}
	n.ok("restore", "--gpu", "1", "--socket", n.socket)
	n.ok("slow", "--call", "nvmlDevice*", "--for", "1ns", "--gpu", "0", "--socket", n.socket)
	if f := n.state().Faults; len(f) != 1 || *f[0].GPU != 0 || f[0].Delay != 1 {
		t.Errorf("faults %+v", f)
	}
	n.ok("clear", "--socket", n.socket)
	n.ok("calls", "--reset", "--socket", n.socket)
	if out, code := n.smi("-L"); code != 0 || strings.Count(out, "\n") != 2 {
		t.Errorf("nvidia-smi ends with %d: %s", code, out)
	}
	if got := n.ok("calls", "--json", "--socket", n.socket); !strings.Contains(got, `{"call":"nvmlDeviceGetUUID","count":2}`) {
		t.Errorf("calls: %s", got)
	}
	if got := n.ok("calls", "--total", "--socket", n.socket); got != "13\n" {
		t.Errorf("total %s", got)
	}
	for what, args := range map[string][]string{
		"an Xid without a GPU":  {"xid", "48"},
		"an Xid without number": {"xid", "--gpu", "1"},
		"a loss of GPU 2":       {"lose", "--gpu", "2"},
		"slow without a time":   {"slow", "--call", "nvmlInit_v2"},
		"a flag of another":     {"clear", "--gpu", "1"},
		"an unknown command":    {"melt"},
	} {
		if out, err := n.run(append(args, "--socket", n.socket)...); err == nil {
			t.Errorf("not refused: %s (%s)", what, out)
		}
	}
}

func TestHealth(t *testing.T) {
	n := start(t, "count: 2")
	n.ok("xid", "--gpu", "1", "--bare", "95", "--socket", n.socket)
	want := emulator.Health{}
	if got := n.state().GPUs[1].Health; got != want {
		t.Errorf("after a bare Xid: %+v", got)
	}
	n.ok("xid", "--gpu", "1", "95", "--socket", n.socket)
	n.ok("health", "--gpu", "1", `{"remapFailed": true, "uncorrected": {"volatile": 2}}`, "--socket", n.socket)
	want = emulator.Health{Uncorrected: emulator.Errors{Volatile: 2, Aggregate: 1}, RemapFailed: true, Recovery: emulator.RecoveryReset}
	if got := n.state().GPUs[1].Health; got != want {
		t.Errorf("health %+v, want %+v", got, want)
	}
	for what, args := range map[string][]string{
		"no such figure":  {"health", "--gpu", "1", `{"temper": 1}`},
		"no such GPU":     {"health", "--gpu", "2", `{}`},
		"not a figure":    {"health", "--gpu", "1", "remapFailed"},
		"an old card's":   {"health", "--gpu", "1", `{"retirePending": true}`},
		"work on a wreck": {"proc", "start", "--gpu", "1", "--memory", "1"},
	} {
		if out, err := n.run(append(args, "--socket", n.socket)...); err == nil {
			t.Errorf("not refused: %s (%s)", what, out)
		}
	}
}

func TestLinksFailByCommand(t *testing.T) {
	n := start(t, "topology: pairs")
	up := func() (n2 int) {
		t.Helper()
		for _, l := range n.state().Board.Links[1] {
			if l.Up && l.To == 0 {
				n2++
			}
		}
		return n2
	}
	for _, step := range []struct {
		args []string
		want int
	}{
		{nil, 4},
		{[]string{"--gpu", "0", "--link", "2", "down"}, 3},
		{[]string{"--gpu", n.state().GPUs[1].UUID, "down"}, 0},
		{[]string{"--gpu", "0", "--link", "3", "up"}, 1},
		{[]string{"--gpu", "0", "up"}, 4},
	} {
		if step.args != nil {
			n.ok(append([]string{"link", "--socket", n.socket}, step.args...)...)
		}
		if got := up(); got != step.want {
			t.Errorf("after link %v there are %d, want %d", step.args, got, step.want)
		}
	}
	for _, args := range [][]string{{"--gpu", "0"}, {"down"}, {"--gpu", "0", "sideways"}, {"--gpu", "0", "--link", "4", "down"}} {
		if out, err := n.run(append([]string{"link", "--socket", n.socket}, args...)...); err == nil {
			t.Errorf("link %v: %s", args, out)
		}
	}
}

func TestTopologyMatrix(t *testing.T) {
	n := start(t, "topology: dgx-1")
	matrix := func() []string {
		t.Helper()
		out, code := n.smi("topo", "-m")
		if code != 0 {
			t.Fatalf("nvidia-smi topo -m ends with %d: %s", code, out)
		}
		return strings.Split(out, "\n")
	}
	for i, want := range []string{
		"\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tNIC0\tNIC1\tNIC2\tNIC3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID",
		"GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\tPHB\tSYS\tSYS\t0-19,40-59\t0\t\tN/A",
	} {
		if got := matrix()[i]; got != want {
			t.Errorf("line %d is\n%s, want\n%s", i, got, want)
		}
	}
	n.ok("link", "--gpu", "0", "--link", "2", "down", "--socket", n.socket)
	if got, want := matrix()[4], "GPU3\tNV1\tNV1\tNV2\t X "; !strings.HasPrefix(got, want) {
		t.Errorf("with a link less: %s, want %s", got, want)
	}
	n.ok("lose", "--gpu", "0", "--socket", n.socket)
	if out, code := n.smi("topo", "-m"); code == 0 {
		t.Errorf("with a lost GPU: %s", out)
	}
	if out, code := n.smi("topo"); code == 0 {
		t.Errorf("without a word on what: %s", out)
	}
}

func TestGPUsTakeTheirFilesAlong(t *testing.T) {
	n := start(t, "count: 2")
	root := strings.TrimSuffix(n.dir, "/run/nvidia/driver")
	address := strings.ToLower(n.state().GPUs[1].PCI[4:])
	files := []string{
		filepath.Join(n.dir, "dev/nvidia0"), // the minor of GPU 1
		filepath.Join(root, "proc/driver/nvidia/gpus", address),
		filepath.Join(root, "sys/bus/pci/devices", address),
	}
	look := func(there bool) {
		t.Helper()
		for _, f := range files {
			if _, err := os.Lstat(f); (err == nil) != there {
				t.Errorf("%s: %v, should be there: %v", f, err, there)
			}
		}
		if _, err := os.Lstat(filepath.Join(n.dir, "dev/nvidia1")); err != nil {
			t.Errorf("the other GPU's node: %v", err)
		}
	}
	list := func(count int) {
		t.Helper()
		if out, code := n.smi("-L"); code != 0 || strings.Count(out, "\n") != count {
			t.Errorf("nvidia-smi ends with %d, of %d GPUs: %s", code, count, out)
		}
	}
	look(true)
	n.ok("unplug", "--gpu", "1", "--socket", n.socket)
	look(false)
	list(1)
	if out, err := n.run("reset", "--gpu", "1", "--socket", n.socket); err == nil {
		t.Errorf("reset of an unplugged GPU: %s", out)
	}
	n.ok("plug", "--gpu", n.state().GPUs[1].UUID, "--socket", n.socket)
	look(true)
	list(2)

	n.ok("xid", "--gpu", "0", "95", "--socket", n.socket)
	n.ok("reset", "--gpu", "0", "--socket", n.socket)
	if h := n.state().GPUs[0].Health; h.Recovery != emulator.RecoveryNone {
		t.Errorf("after a reset: %+v", h)
	}
}

func TestDriverIsLoadedAsAnotherVersion(t *testing.T) {
	n := start(t, "{count: 2, driver: 570.1.2}")
	root := strings.TrimSuffix(n.dir, "/run/nvidia/driver")
	libs := filepath.Join(n.dir, "usr/lib/x86_64-linux-gnu")
	files := func(pattern string) string {
		t.Helper()
		list, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for i, f := range list {
			list[i] = filepath.Base(f)
		}
		return strings.Join(list, " ")
	}
	old := t.TempDir() // a program's own copy, as a container has
	data, err := os.ReadFile(filepath.Join(libs, "libnvidia-ml.so.1"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(old, "libnvidia-ml.so.570.1.2"), data, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("libnvidia-ml.so.570.1.2", filepath.Join(old, "libnvidia-ml.so.1")); err != nil {
		t.Fatal(err)
	}

	pid := strings.TrimSpace(n.ok("proc", "start", "--gpu", "0", "--memory", "1", "--socket", n.socket))
	t.Cleanup(func() { n.run("proc", "stop", "--socket", n.socket, pid) })
	if out, err := n.run("unload", "--socket", n.socket); err == nil || !strings.Contains(err.Error(), pid) {
		t.Errorf("unload of a driver in use: %s, %v", out, err)
	}
	n.ok("proc", "stop", pid, "--socket", n.socket)
	n.ok("unload", "--socket", n.socket)
	if out, code := n.smi("-L"); code != 9 {
		t.Errorf("nvidia-smi ends with %d: %s", code, out)
	}
	for _, gone := range []string{
		filepath.Join(n.dir, "dev/nvidia[0-9c]*"), filepath.Join(n.dir, "dev/nvidia-[mu]*"), filepath.Join(n.dir, "dev/nvidia-caps/*"), filepath.Join(root, "proc/driver/nvidia*"),
		filepath.Join(root, "sys/bus/pci/devices/*/driver"), filepath.Join(root, "sys/module/nvidia"),
	} {
		if got := files(gone); got != "" {
			t.Errorf("without a driver there is still %s", got)
		}
	}
	for _, g := range n.state().GPUs {
		if _, err := os.Stat(filepath.Join(root, "sys/bus/pci/devices", strings.ToLower(g.PCI[4:]), "class")); err != nil {
			t.Errorf("without a driver: %v", err)
		}
	}
	if devices, err := os.ReadFile(filepath.Join(root, "proc/devices")); err != nil || strings.Contains(string(devices), "nvidia") {
		t.Errorf("device numbers without a driver: %s, %v", devices, err)
	}

	n.ok("load", "--driver", "580.3.4", "--socket", n.socket)
	if got, want := files(filepath.Join(libs, "libnvidia-ml.so*")), "libnvidia-ml.so.1 libnvidia-ml.so.580.3.4"; got != want {
		t.Errorf("libraries %s, want %s", got, want)
	}
	for _, name := range []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server"} {
		program, err := os.ReadFile(filepath.Join(n.dir, "usr/bin", name))
		own, is := bytes.CutSuffix(program, []byte("\x00580.3.4\x00"))
		if err != nil || !is || bytes.HasSuffix(own, []byte("570.1.2")) {
			t.Errorf("%s is not the new driver's: %v", name, err)
		}
	}
	if now, err := os.ReadFile(filepath.Join(libs, "libnvidia-ml.so.1")); err != nil || bytes.Equal(now, data) {
		t.Errorf("two versions have the same library (%v)", err)
	}
	if got := files(filepath.Join(libs, "*570.1.2")) + files(filepath.Join(n.dir, "lib/firmware/nvidia/570.1.2")); got != "" {
		t.Errorf("left over: %s", got)
	}
	if got := files(filepath.Join(n.dir, "dev/nvidia[0-9]")); got != "nvidia0 nvidia1" {
		t.Errorf("device nodes %s", got)
	}
	if devices, err := os.ReadFile(filepath.Join(root, "proc/devices")); err != nil || strings.Count(string(devices), "195 nvidia\n") != 1 {
		t.Errorf("device numbers: %s, %v", devices, err)
	}
	if version, err := os.ReadFile(filepath.Join(root, "proc/driver/nvidia/version")); err != nil || !strings.Contains(string(version), "580.3.4") {
		t.Errorf("version: %s, %v", version, err)
	}
	if out, code := n.smi(); code != 0 || !strings.Contains(out, "580.3.4") {
		t.Errorf("nvidia-smi ends with %d: %s", code, out)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(n.dir, "usr/bin/nvidia-smi"), "-L")
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+old, "GPU_EMULATOR_SOCKET="+n.socket)
	if out, err := cmd.CombinedOutput(); cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 18 {
		t.Errorf("a library of the old version: %s, %v", out, err)
	}
	// A daemon that starts anew has its world's driver, and lays it.
	n.restart()
	if got, want := files(filepath.Join(libs, "libnvidia-ml.so*")), "libnvidia-ml.so.1 libnvidia-ml.so.570.1.2"; got != want {
		t.Errorf("libraries %s, want %s", got, want)
	}
	if out, code := n.smi(); code != 0 || !strings.Contains(out, "570.1.2") {
		t.Errorf("nvidia-smi ends with %d: %s", code, out)
	}
	if out, err := n.run("load", "--socket", n.socket); err == nil {
		t.Errorf("a driver is loaded twice: %s", out)
	}
}

func TestInstallRefusesTheMachineItself(t *testing.T) {
	if err := install.Guard(); err == nil {
		t.Skip("the tests run in a mount namespace of their own, where an install at / is allowed")
	}
	if err := run(t.Context(), []string{"install", "--root", "/", "--libraries", t.TempDir()}, os.Stdout); err == nil {
		t.Error("not refused")
	}
}
