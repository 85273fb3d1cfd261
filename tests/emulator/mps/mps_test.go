// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
)

func TestMain(m *testing.M) {
	Main()
	code := m.Run()
	if path, err := probe(); err == nil {
		_ = os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// node is an emulated driver with MPS's programs.
type node struct {
	t       *testing.T
	w       *emulator.World
	root    string
	pipe    string
	control *exec.Cmd // the daemon
}

var probe = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "mps-probe")
	if err != nil {
		return "", err
	}
	out := filepath.Join(dir, "probe")
	said, err := exec.Command("gcc", "-std=gnu17", "-O1", "-I", "../lib/c", "-o", out, "../lib/testdata/probe.c", "-pthread", "-ldl").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("compile the probe: %w\n%s", err, said)
	}
	return out, nil
})

func newNode(t *testing.T) *node {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the driver's folder is amd64's here")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to build the libraries with")
	}
	root, err := os.MkdirTemp("", "mps") // a socket's path is short
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(root)) })
	n := &node{t: t, root: root, pipe: filepath.Join(root, "pipe")}
	n.w, err = emulator.New(emulator.Spec{Model: "H100-80GB", Count: 2})
	must(t, err)
	built, err := lib.Cached(t.Context())
	must(t, err)
	must(t, install.Driver(root, built, n.w))
	must(t, Lay(filepath.Join(root, install.Programs), "555.58.02"))
	must(t, os.Mkdir(n.pipe, 0o755))
	l, err := daemon.Listen(filepath.Join(root, install.Socket))
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- (&daemon.Server{World: n.w}).Serve(ctx, l) }()
	t.Cleanup(func() { cancel(); must(t, <-done) })
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not yet: %s", what)
		}
	}
}

// start starts a daemon for the first GPU.
func (n *node) start() {
	n.t.Helper()
	n.control = exec.Command(filepath.Join(n.root, install.Programs, controlName), "-f", "-multiuser-server")
	n.control.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + n.pipe, "CUDA_VISIBLE_DEVICES=" + n.w.State().GPUs[0].UUID}
	n.control.Stdout = n.t.Output()
	must(n.t, n.control.Start())
	c := n.control
	n.t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	eventually(n.t, "the daemon answers", func() bool { return n.tell("get_server_list") != "none" })
}

func (n *node) mode(m emulator.ComputeMode) {
	n.t.Helper()
	s := n.w.State().GPUs[0].Setup
	s.Compute = m
	must(n.t, n.w.SetSetup(0, s))
}

// tell gives the daemon a command; the answer is "none" if there is none.
func (n *node) tell(command string) string {
	cmd := exec.Command(filepath.Join(n.root, install.Programs, controlName))
	cmd.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=" + n.pipe}
	cmd.Stdin = strings.NewReader(command + "\n")
	out, err := cmd.Output()
	if err != nil {
		return "none"
	}
	return strings.TrimSpace(string(out))
}

// application is a program that has loaded libcuda.
type application struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (n *node) program(env ...string) *application {
	n.t.Helper()
	path, err := probe()
	must(n.t, err)
	libcuda := filepath.Join(n.root, "usr/lib/x86_64-linux-gnu/libcuda.so.1")
	p := &application{t: n.t, cmd: exec.Command(path, libcuda)}
	p.cmd.Env = append([]string{"CUDA_MPS_PIPE_DIRECTORY=" + n.pipe, "LD_LIBRARY_PATH=" + filepath.Dir(libcuda)}, env...)
	p.cmd.Stderr = n.t.Output()
	p.in, err = p.cmd.StdinPipe()
	must(n.t, err)
	out, err := p.cmd.StdoutPipe()
	must(n.t, err)
	p.out = bufio.NewReader(out)
	must(n.t, p.cmd.Start())
	n.t.Cleanup(func() { _ = p.cmd.Process.Kill(); _ = p.cmd.Wait() })
	if _, err := p.out.ReadString('\n'); err != nil { // its PID
		n.t.Fatal(err)
	}
	return p
}

// call makes a call, and returns what it answers and what the variables are.
func (p *application) call(line string) string {
	p.t.Helper()
	p.say(line)
	answer, err := p.out.ReadString('\n')
	if err != nil {
		p.t.Fatalf("%s: %v", line, err)
	}
	return strings.TrimSpace(answer)
}

func (p *application) say(line string) {
	p.t.Helper()
	_, err := fmt.Fprintln(p.in, line)
	must(p.t, err)
}

// begin makes a context, and returns whether it is a client's and how many SMs it has.
func (p *application) begin() (client bool, sms int) {
	p.t.Helper()
	for _, line := range []string{"cuInit 0", "cuDevicePrimaryCtxRetain &c 0", "cuCtxSetCurrent c"} {
		if got := p.call(line); got != "0" && !strings.HasPrefix(got, "0 ") {
			p.t.Fatalf("%s answers %s", line, got)
		}
	}
	return p.attribute(133) == 1, p.attribute(16)
}

func (p *application) attribute(n int) int {
	p.t.Helper()
	answer := p.call(fmt.Sprintf("cuDeviceGetAttribute &v %d 0", n))
	value, ok := strings.CutPrefix(answer, "0 v=")
	v, err := strconv.Atoi(value)
	if !ok || err != nil {
		p.t.Fatalf("attribute %d: %s", n, answer)
	}
	return v
}

func (p *application) kill() {
	p.t.Helper()
	must(p.t, p.cmd.Process.Kill())
	_ = p.cmd.Wait()
}

func (n *node) clients() []int {
	all := n.w.MPSServers()
	if len(all) == 0 {
		return nil
	}
	return all[0].Clients
}

// allSMs is what an H100 has.
const allSMs = 132

// TestPercentages: a context has its server's percentage when it is made, or its own variable's if
// that is less, and keeps it.
func TestPercentages(t *testing.T) {
	n := newNode(t)
	n.start()
	n.tell("set_default_active_thread_percentage 25")
	a := n.program()
	if client, sms := a.begin(); !client || sms != 32 { // 33 are 16 pairs
		t.Errorf("client %v with %d SMs", client, sms)
	}
	server := n.w.MPSServers()[0]
	if server.Percent != 25 || !slices.Equal(server.Clients, []int{a.cmd.Process.Pid}) || n.tell("get_server_list") != strconv.Itoa(server.PID) {
		t.Errorf("%+v", server)
	}
	lowered, raised := n.program("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=10"), n.program("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90")
	if _, sms := lowered.begin(); sms != 12 {
		t.Errorf("10 percent are %d SMs", sms)
	}
	if _, sms := raised.begin(); sms != 32 {
		t.Errorf("the variable has raised it to %d SMs", sms)
	}
	n.tell(fmt.Sprintf("set_active_thread_percentage %d 50", server.PID))
	if sms := a.attribute(16); sms != 32 {
		t.Errorf("a context that exists has %d SMs now", sms)
	}
	if _, sms := n.program().begin(); sms != 66 {
		t.Errorf("the next context has %d SMs", sms)
	}
	if got := a.call("cuDeviceGetCount &v"); got != "0 v=1" {
		t.Errorf("a client sees other GPUs than its server's: %s", got)
	}
}

// TestFailsOpen: what is known of NVIDIA's own, in silence.
func TestFailsOpen(t *testing.T) {
	n := newNode(t)
	outside := func(what string, env ...string) {
		t.Helper()
		p := n.program(env...)
		if client, sms := p.begin(); client || sms != allSMs {
			t.Errorf("%s: client %v with %d SMs", what, client, sms)
		}
		p.kill()
	}
	outside("an empty directory")
	n.start()
	outside("a directory that is not there", "CUDA_MPS_PIPE_DIRECTORY="+n.root+"/elsewhere")
	must(t, n.control.Process.Kill())
	_ = n.control.Wait()
	if _, err := os.Lstat(filepath.Join(n.pipe, "control")); err != nil {
		t.Error(err)
	}
	outside("a dead daemon's socket")
	n.start()
	n.tell("quit")
	_ = n.control.Wait()
	outside("what quit has left")
}

// TestHangs: a daemon that hangs keeps a client in cuInit.
func TestHangs(t *testing.T) {
	n := newNode(t)
	n.start()
	must(t, n.control.Process.Signal(syscall.SIGSTOP))
	p := n.program()
	p.say("cuInit 0")
	answered := make(chan string, 1)
	go func() { s, _ := p.out.ReadString('\n'); answered <- strings.TrimSpace(s) }()
	select {
	case s := <-answered:
		t.Errorf("it answers %s", s)
	case <-time.After(300 * time.Millisecond):
	}
	must(t, n.control.Process.Signal(syscall.SIGCONT))
	if s := <-answered; s != "0" {
		t.Errorf("then it answers %s", s)
	}
}

// TestComputeModes: with a server its clients alone compute in exclusive-process mode, without one
// the first process; in prohibited mode there is no server.
func TestComputeModes(t *testing.T) {
	n := newNode(t)
	retain := func(p *application) string {
		t.Helper()
		if got := p.call("cuInit 0"); got != "0" {
			return got
		}
		code, _, _ := strings.Cut(p.call("cuDevicePrimaryCtxRetain &c 0"), " ")
		return code
	}
	outside := "CUDA_MPS_PIPE_DIRECTORY=/nowhere"
	n.mode(emulator.ComputeProhibited)
	n.start()
	if got := retain(n.program()); got != "805" {
		t.Errorf("prohibited: a client gets %s", got)
	}
	if got := retain(n.program(outside)); got != "46" {
		t.Errorf("prohibited: another gets %s", got)
	}
	n.mode(emulator.ComputeExclusiveProcess)
	first := n.program(outside)
	if got := retain(first); got != "0" {
		t.Errorf("exclusive, without a server: %s", got)
	}
	if got := retain(n.program()); got != "805" {
		t.Errorf("exclusive, another process is there: a client gets %s", got)
	}
	first.kill()
	got := retain(n.program())
	for began := time.Now(); got == "805" && time.Since(began) < 10*time.Second; got = retain(n.program()) {
		time.Sleep(10 * time.Millisecond) // the driver may hear later than we that a process has ended
	}
	for range 2 {
		if got != "0" {
			t.Errorf("exclusive: a client gets %s", got)
		}
		got = retain(n.program())
	}
	if got := retain(n.program(outside)); got != "46" {
		t.Errorf("exclusive: a process outside gets %s", got)
	}
	n.mode(emulator.ComputeDefault)
	if got := retain(n.program(outside)); got != "0" {
		t.Errorf("default: a process outside gets %s", got)
	}
}

// TestLists: clients are M+C, the server C, and others C.
func TestLists(t *testing.T) {
	n := newNode(t)
	n.start()
	in, out := n.program(), n.program("CUDA_MPS_PIPE_DIRECTORY=/nowhere")
	in.begin()
	out.begin()
	s := n.w.Open(emulator.Opening{PID: os.Getpid()})
	defer s.Close()
	s.Init()
	h, r := s.DeviceByIndex(0)
	list := func(k emulator.Kind) (pids []int) {
		all, _ := s.Processes(h, k)
		for _, p := range all {
			pids = append(pids, p.PID)
		}
		return pids
	}
	server := n.w.MPSServers()[0].PID
	want := []int{server, in.cmd.Process.Pid, out.cmd.Process.Pid}
	slices.Sort(want)
	if got := list(emulator.Compute); r != emulator.Success || !slices.Equal(got, want) {
		t.Errorf("compute: %v, want %v", got, want)
	}
	if got := list(emulator.MPS); !slices.Equal(got, []int{in.cmd.Process.Pid}) {
		t.Errorf("MPS: %v", got)
	}
}

// TestFaults is the table of what one process's end does to others.
func TestFaults(t *testing.T) {
	n := newNode(t)
	n.start()
	three := func() (all []*application) {
		for range 3 {
			p := n.program()
			p.begin()
			if got := p.call("cuMemAlloc_v2 &m 4194304"); !strings.HasPrefix(got, "0 ") {
				t.Fatal(got)
			}
			all = append(all, p)
		}
		return all
	}
	pid := func(p *application) int { return p.cmd.Process.Pid }
	lives := func(p *application, what string, want string) {
		t.Helper()
		if got := p.call("cuCtxSynchronize"); got != want {
			t.Errorf("%s: a neighbour's context answers %s, want %s", what, got, want)
		}
	}
	busy := func(p *application, what string, end func()) {
		t.Helper()
		must(t, n.w.KeepBusy(pid(p), 0, 50))
		end()
		eventually(t, what, func() bool { return !slices.Contains(n.clients(), pid(p)) })
	}

	all := three()
	all[0].kill()
	eventually(t, "it is gone", func() bool { return len(n.clients()) == 2 })
	lives(all[1], "killed while idle", "0")

	server := n.w.MPSServers()[0].PID
	busy(all[1], "detached", func() { n.tell(fmt.Sprintf("terminate_client %d %d", server, pid(all[1]))) })
	lives(all[1], "detached itself", "810")
	all[1].kill()
	lives(all[2], "detached while busy, then killed", "0")
	if n.tell(fmt.Sprintf("get_server_status %d", server)) != "ACTIVE" {
		t.Error("the server is not active")
	}
	all[2].kill()

	all = three()
	busy(all[0], "killed", all[0].kill)
	lives(all[1], "killed while busy", "719")
	if got := n.tell(fmt.Sprintf("get_server_status %d", server)); got != "FAULT" {
		t.Errorf("the server is %s", got)
	}
	late := n.program()
	late.say("cuInit 0")
	all[1].kill()
	time.Sleep(50 * time.Millisecond)
	if slices.Contains(n.clients(), pid(late)) {
		t.Error("it takes a client before all of the fault's are gone")
	}
	all[2].kill()
	if got, _ := late.out.ReadString('\n'); got != "0\n" {
		t.Errorf("the next client gets %q", got)
	}
	late.kill()

	all = three()
	must(t, n.w.Fail(pid(all[0]), 31))
	lives(all[0], "an illegal address", "719")
	lives(all[1], "an illegal address", "719")
	for _, p := range all {
		p.kill()
	}

	all = three()
	must(t, syscall.Kill(n.w.MPSServers()[0].PID, syscall.SIGKILL))
	eventually(t, "no server", func() bool { return len(n.w.MPSServers()) == 0 })
	lives(all[0], "the server is dead", "806")
	for _, p := range all {
		p.kill()
	}

	n.control.Process.Kill()
	_ = n.control.Wait()
	eventually(t, "nothing on the GPU", func() bool { return len(n.w.State().Processes) == 0 })
	all = three() // outside MPS
	must(t, n.w.Fail(pid(all[0]), 31))
	busy(all[1], "killed", all[1].kill)
	if got := all[2].call("cuMemAlloc_v2 &m 4194304"); !strings.HasPrefix(got, "0 ") {
		t.Errorf("with time slices: %s", got)
	}
	if got, _, _ := strings.Cut(all[0].call("cuMemAlloc_v2 &m 4194304"), " "); got != "700" {
		t.Errorf("its own: %s", got)
	}
}

// TestManyClients: a server takes so many and no more, until one leaves.
func TestManyClients(t *testing.T) {
	n := newNode(t)
	n.start()
	var all []*application
	for range emulator.MostMPSClients {
		p := n.program()
		if got := p.call("cuInit 0"); got != "0" {
			t.Fatalf("client %d gets %s", len(all)+1, got)
		}
		all = append(all, p)
	}
	if got := n.program().call("cuInit 0"); got != "808" {
		t.Errorf("one more gets %s", got)
	}
	all[7].kill()
	eventually(t, "one more", func() bool { return n.program().call("cuInit 0") == "0" })
}

// TestForked: a forked child is no client of its parent's, and does not keep it listed.
func TestForked(t *testing.T) {
	n := newNode(t)
	n.start()
	p := n.program()
	p.begin()
	if got := p.call("fork cuInit 0"); got != "3" {
		t.Errorf("a child's cuInit answers %s", got)
	}
}
