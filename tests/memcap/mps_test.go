// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/mps/mpstest"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/memcap/capsule"
	"example.com/gpu-agent/tests/memcap/probe"
)

// The layout of the GPU lets one container have half of the SMs. The one that is tested has 26
// percent of the 132.
const (
	mpsDefault, mpsPercent = 50, 26
	mpsMost                = 34
	ownCopy                = "/opt/tenant/libcuda.so.1"
	pipeVariable           = "CUDA_MPS_PIPE_DIRECTORY="
	percentVariable        = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="
)

// given is the environment that the CDI file gives.
var given = []string{pipeVariable + lib.MPSDir, fmt.Sprintf("%s%d", percentVariable, mpsPercent)}

// shareProgram begins CUDA, makes a context, says what came of it, and waits for the end of its
// input.
const shareProgram = `
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void *library;
static int (*query)(const char *, void **, int, unsigned long, int *);
static void *find(const char *name)
{
    void *f = NULL;
    if (!query)
        return dlsym(library, name);
    query(name, &f, 12000, 0, NULL);
    return f;
}
int main(int argc, char **argv)
{
    const char *door = argc > 1 ? argv[1] : "";
    void *context;
    int client = -1, sms = -1;
    if (!strcmp(door, "exec")) {
        char *none[] = {NULL};
        execve(argv[0], (char *[]){argv[0], "soname", NULL}, none);
    }
    library = dlopen(strchr(door, '/') ? door : "libcuda.so.1", RTLD_NOW);
    if (!library)
        return puts(dlerror()), 1;
    if (!strcmp(door, "query")) /* as a static CUDA runtime does */
        *(void **)&query = dlsym(library, "cuGetProcAddress_v2");
    int init = ((int (*)(unsigned))find("cuInit"))(0);
    int made = ((int (*)(void **, int))find("cuDevicePrimaryCtxRetain"))(&context, 0);
    ((int (*)(int *, int, int))find("cuDeviceGetAttribute"))(&client, 133, 0);
    ((int (*)(int *, int, int))find("cuDeviceGetAttribute"))(&sms, 16, 0);
    printf("init=%d context=%d client=%d sms=%d\n", init, made, client, sms);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
`

// shareFolder returns the folder of the program, which it builds for all tests. TestMain removes it.
var shareFolder = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "memcap-share")
	if err != nil {
		return "", err
	}
	shareBuilt = dir
	err = errors.Join(os.Chmod(dir, 0o755), os.WriteFile(filepath.Join(dir, "share.c"), []byte(shareProgram), 0o644))
	if err != nil {
		return "", err
	}
	return dir, probe.GCC(context.Background(), dir, "-O1", "-Wall", "-o", "share", "share.c", "-ldl")
})

// shareBuilt is the folder if it was made.
var shareBuilt string

// shareOutcome is what a program says.
type shareOutcome struct{ init, context, client, sms int }

// hung is the outcome of a program that says nothing: it has no context.
var hung = shareOutcome{-1, -1, 0, 0}

// outside reports whether it has a context with more than the container's share.
func (o shareOutcome) outside() bool { return o.context == 0 && (o.client != 1 || o.sms > mpsMost) }

// site is a machine whose GPU is laid out for MPS, with the product's supervisor.
type site struct {
	*rig
	state string
	share string // the folder of the program
	agent *mps.Client
	stop  func() // ends the supervisor, not the daemon
	n     int
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{rig: newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	s.state, err = os.MkdirTemp("", "mps") // a socket's path is short
	must(err)
	t.Cleanup(func() { must(os.RemoveAll(s.state)) })
	programs := filepath.Join(s.m.Driver, install.Programs)
	mpstest.InstallAt(t, programs, s.rig.state.Driver)
	s.share, err = shareFolder()
	must(err)
	s.agent = mps.NewClient(s.state)
	s.supervise(t)
	t.Cleanup(func() {
		s.stop()
		opts := s.options(t)
		if err := mps.End(context.Background(), opts); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *site) options(t *testing.T) mps.Options {
	return mps.Options{StateDir: s.state, Driver: mps.Driver{Programs: []string{filepath.Join(s.m.Driver, install.Programs)}},
		Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))}
}

// supervise runs a supervisor, and waits until the daemon is open and a server stands.
func (s *site) supervise(t *testing.T) {
	t.Helper()
	sup, err := mps.New(s.options(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- sup.Run(ctx) }()
	ended := false
	s.stop = func() {
		if !ended {
			ended = true
			cancel()
			if err := errors.Join(<-done, sup.Close()); err != nil {
				t.Error(err)
			}
		}
	}
	await(t, "a server stands", func() bool {
		st, err := s.agent.Sync(t.Context(), []mps.Want{{GPU: s.uuid(0), Percent: mpsDefault, Serve: true}})
		return err == nil && len(st.Daemons) == 1 && st.Daemons[0].Err() == nil && st.Daemons[0].Open && st.Daemons[0].Serving
	}, func() any { st, err := s.agent.State(t.Context()); return fmt.Sprint(st, err) })
}

func (s *site) daemon(t *testing.T) mps.Daemon {
	t.Helper()
	st, err := s.agent.State(t.Context())
	if err != nil || len(st.Daemons) != 1 {
		t.Fatalf("%+v, %v", st, err)
	}
	return st.Daemons[0]
}

func (s *site) mode(t *testing.T, m emulator.ComputeMode) {
	t.Helper()
	setup := s.m.World.State().GPUs[0].Setup
	setup.Compute = m
	if err := s.m.World.SetSetup(0, setup); err != nil {
		t.Fatal(err)
	}
}

// box makes a container with the share, with or without the library of the cap.
func (s *site) box(t *testing.T, library bool, change func(*specs.ContainerEdits, *capsule.Image)) (c *capsule.Container, key string) {
	t.Helper()
	s.n++
	key = fmt.Sprintf("share%d", s.n)
	lay := func(edits *specs.ContainerEdits, image *capsule.Image) {
		capsule.Bind(edits, s.share, "/share")
		if change != nil {
			change(edits, image)
		}
		if !hasMount(edits, lib.MPSDir) {
			capsule.Bind(edits, mps.PipeDir(s.state, s.uuid(0)), lib.MPSDir)
		}
	}
	edits, image := s.m.Plain(0)
	if library {
		limit := lib.Limit{GPU: s.uuid(0), Bytes: 8 * GiB, Context: context300, Percent: mpsPercent}
		pages, err := s.pages.Write(key, 0, []lib.Limit{limit})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := s.pages.Remove(key); err != nil {
				t.Error(err)
			}
		})
		edits = capsule.Allocation{Kit: s.kit, Key: key, Pages: pages}.Apply(edits)
	}
	lay(&edits, &image)
	c, err := s.m.Open(t.Context(), edits, image)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c, key
}

func hasMount(edits *specs.ContainerEdits, at string) bool {
	for _, m := range edits.Mounts {
		if m.ContainerPath == at {
			return true
		}
	}
	return false
}

// sharer is a running program.
type sharer struct {
	shareOutcome
	pid  int // the host's
	page lib.Process
	end  func()
}

// begin starts the program in a container, and waits for what it says.
func (s *site) begin(t *testing.T, c *capsule.Container, door string, env []string) *sharer {
	t.Helper()
	theirIn, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Start(capsule.Program{Args: []string{"/share/share", door}, Env: append([]string{socket}, env...), Stdin: theirIn, Stdout: theirOut})
	if err := errors.Join(err, theirIn.Close(), theirOut.Close()); err != nil {
		t.Fatal(err)
	}
	k := &sharer{shareOutcome: hung, pid: c.HostPID(p.PID)}
	var ns unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", k.pid), &ns); err != nil {
		t.Fatal(err)
	}
	k.page = lib.Process{Namespace: ns.Ino, PID: uint64(p.PID)}
	k.end = func() {
		_ = unix.Kill(k.pid, unix.SIGKILL)
		_, _, _ = p.Wait(context.Background())
		_ = errors.Join(in.Close(), out.Close())
	}
	t.Cleanup(k.end)
	if err := out.SetReadDeadline(time.Now().Add(4 * time.Second)); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return k
	}
	if _, err := fmt.Sscanf(line, "init=%d context=%d client=%d sms=%d", &k.init, &k.context, &k.client, &k.sms); err != nil {
		t.Fatalf("the program says %q: %v", line, err)
	}
	return k
}

// verify is what an observer outside says of a program, by the driver's lists, the daemon's clients
// and the container's page.
func (s *site) verify(t *testing.T, k *sharer, key string) compute.Held {
	t.Helper()
	var of []compute.Process
	for _, p := range s.m.World.State().Processes {
		if p.PID != k.pid || p.Kind != emulator.Compute {
			continue
		}
		said := map[lib.Process]lib.Compute{k.page: {}}
		if u, err := s.pages.OpenUsage(key, s.uuid(0)); err == nil {
			if _, err := u.Compute(said); err != nil {
				t.Error(err)
			}
			u.Close()
		} else if !errors.Is(err, gpu.ErrNotFound) {
			t.Error(err)
		}
		of = append(of, compute.Process{PID: p.PID, Client: s.lists(p.PID), SMs: said[k.page].SMs})
	}
	return compute.Verify(compute.Share{Ceiling: mpsPercent}, 132, "", of)
}

// lists reports whether the MPS server has a client.
func (s *site) lists(pid int) bool {
	for _, server := range s.m.World.MPSServers() {
		for _, c := range server.Clients {
			if c == pid {
				return true
			}
		}
	}
	return false
}

// A fault, and which ring alone catches it.
type mpsFault struct {
	name string
	env  []string
	door string
	// happen is what happens before the program starts. down is true if there is no daemon then that
	// answers.
	happen func(*testing.T, *site)
	down   bool
	// first is true if no client has come before.
	first  bool
	change func(*testing.T, *site, *specs.ContainerEdits, *capsule.Image)
	// passes has the rings that the program passes when they are alone: a, b, c.
	passes string
}

func killDaemon(t *testing.T, s *site) {
	pid := s.daemon(t).PID
	s.stop()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await(t, "it is gone", func() bool { return len(s.m.World.MPSServers()) == 0 }, nil)
}

// onControl gives the daemon a command with root's own socket.
func (s *site) onControl(command string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.m.Driver, install.Programs, "nvidia-cuda-mps-control"), args...)
	cmd.Env = []string{pipeVariable + filepath.Join(filepath.Dir(mps.PipeDir(s.state, s.uuid(0))), "control")}
	cmd.Stdin = strings.NewReader(command)
	return cmd
}

func withOwnCopy(_ *testing.T, s *site, _ *specs.ContainerEdits, image *capsule.Image) {
	if image.Files == nil {
		image.Files = map[string][]byte{}
	}
	image.Files[ownCopy] = s.driver()
}

func mpsFaults() []mpsFault {
	mounted := func(files ...string) func(*testing.T, *site, *specs.ContainerEdits, *capsule.Image) {
		return func(t *testing.T, s *site, edits *specs.ContainerEdits, _ *capsule.Image) {
			dir := t.TempDir()
			for _, name := range files {
				if err := os.Link(filepath.Join(mps.PipeDir(s.state, s.uuid(0)), name), filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
			capsule.Bind(edits, dir, lib.MPSDir)
		}
	}
	return []mpsFault{
		{name: "daemon dead, heartbeat fresh", env: given, down: true, happen: killDaemon},
		{name: "daemon dead, heartbeat old", env: given, down: true, happen: func(t *testing.T, s *site) {
			killDaemon(t, s)
			time.Sleep(2100 * time.Millisecond)
		}},
		{name: "daemon hung", env: given, down: true, happen: func(t *testing.T, s *site) {
			pid := s.daemon(t).PID
			if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGCONT) })
			time.Sleep(2500 * time.Millisecond)
		}},
		{name: "daemon replaced", env: given, down: true, happen: func(t *testing.T, s *site) {
			killDaemon(t, s)
			other := s.onControl("", "-f", "-multiuser-server")
			if err := other.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = other.Process.Kill(); _ = other.Wait() })
			await(t, "it answers", func() bool {
				said, _ := s.onControl("get_server_list\nend\n").Output()
				return len(said) > 0
			}, nil)
		}},
		{name: "quit", env: given, down: true, happen: func(t *testing.T, s *site) {
			s.stop()
			await(t, "it is gone", func() bool {
				// The daemon does not hear it while the supervisor's last control program is there.
				_ = s.onControl("quit -t\n").Run()
				return len(s.m.World.MPSServers()) == 0
			}, nil)
		}},
		{name: "directory empty", env: given, change: mounted()},
		{name: "directory mounted over, with the heartbeat", env: given, change: mounted("beat")},
		{name: "variables unset"},
		// In exclusive-process mode the first process has the card: that is the server.
		{name: "variables unset, no client yet", first: true},
		{name: "directory misspelt", env: []string{pipeVariable + "/usr/lib/gpu-agent/msp", given[1]}},
		{name: "variable misspelt", env: []string{"CUDA_MPS_PIPE_DIRECTROY=" + lib.MPSDir, given[1]}},
		{name: "percentage raised", env: []string{given[0], percentVariable + "100"}, passes: "b"},
		{name: "percentage unset", env: given[:1], passes: "b"},
		{name: "env -i", env: given, door: "exec"},
		{name: "static CUDA runtime", door: "query"},
		{name: "own copy of libcuda", door: ownCopy, change: withOwnCopy, passes: "a"},
		{name: "own copy of libcuda that speaks MPS", env: given[:1], door: ownCopy, change: withOwnCopy, passes: "ab"},
	}
}

// TestMPSRings has every fault, and each ring with the other two off. No program has a context outside
// its share and is caught by none of the rings; which one catches it alone stands in the table. Every
// figure is the emulated driver's.
//
//	a: the library in the process    off: the driver's own library stands at its place
//	b: the compute mode of the card  off: default
//	c: who looks from outside        off: what it says is not looked at
func TestMPSRings(t *testing.T) {
	for _, f := range mpsFaults() {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			if !f.first {
				honest, _ := s.box(t, true, nil)
				if k := s.begin(t, honest, "soname", given); k.outside() || k.context != 0 {
					t.Fatalf("an honest program: %+v", k.shareOutcome)
				}
			}
			if f.happen != nil {
				f.happen(t, s)
			}
			change := func(edits *specs.ContainerEdits, image *capsule.Image) {
				if f.change != nil {
					f.change(t, s, edits, image)
				}
			}
			door := f.door
			if door == "" {
				door = "soname"
			}
			judge := func(ring string, passed bool, k *sharer) {
				t.Helper()
				if want := strings.Contains(f.passes, ring); passed != want {
					t.Errorf("ring %s alone: passed %v, want %v: %+v", ring, passed, want, k.shareOutcome)
				}
			}
			capped, key := s.box(t, true, change)
			k := s.begin(t, capped, door, f.env)
			judge("a", k.outside(), k)
			if k.init > 0 && k.init != 805 {
				t.Errorf("ring a answers %d", k.init)
			}
			if !f.down && f.change == nil && (k.init != 0 || k.context != 0) {
				t.Errorf("ring a refuses what it could set right: %+v", k.shareOutcome)
			}
			// With a look from outside beside it, it is named unless it is held.
			holds := k.context == 0 && !k.outside()
			if held := s.verify(t, k, key); (held.Guarantee == compute.Ceiling) != holds {
				t.Errorf("%+v is %v", k.shareOutcome, held)
			}
			k.end()

			bare, none := s.box(t, false, change)
			k = s.begin(t, bare, door, f.env)
			held := s.verify(t, k, none)
			judge("c", k.outside() && held.Guarantee == compute.Ceiling, k)
			if f.name != "daemon hung" && !k.outside() { // which keeps a program in cuInit
				t.Errorf("without rings, and nothing happens: %+v", k.shareOutcome)
			}
			k.end()

			s.mode(t, emulator.ComputeExclusiveProcess)
			if f.down {
				s.mode(t, emulator.ComputeProhibited)
			}
			k = s.begin(t, bare, door, f.env)
			judge("b", k.outside(), k)
			k.end()
		})
	}
}

// TestMPSHonest: with all rings on, a program is a client, its page and an observer say so, and what
// was refused while the daemon was away is let in once another answers.
func TestMPSHonest(t *testing.T) {
	s := newSite(t)
	c, key := s.box(t, true, nil)
	k := s.begin(t, c, "soname", given)
	s.mode(t, emulator.ComputeExclusiveProcess)
	if k.outside() || k.context != 0 || k.sms != mpsMost {
		t.Errorf("%+v", k.shareOutcome)
	}
	if held := s.verify(t, k, key); held.String() != fmt.Sprintf("ceiling %d %%", mpsPercent) {
		t.Error(held)
	}
	killDaemon(t, s)
	s.mode(t, emulator.ComputeProhibited)
	k.end()
	if k := s.begin(t, c, "soname", given); k.init != 805 {
		t.Errorf("without a daemon: %+v", k.shareOutcome)
	}
	s.mode(t, emulator.ComputeExclusiveProcess)
	s.supervise(t)
	k = s.begin(t, c, "query", nil)
	if k.outside() || k.context != 0 {
		t.Errorf("with another daemon: %+v", k.shareOutcome)
	}
	if held := s.verify(t, k, key); held.Guarantee != compute.Ceiling {
		t.Error(held)
	}
}

// TestMPSStarting: a page says since when a process has been in cuInit while a daemon keeps it there.
func TestMPSStarting(t *testing.T) {
	s := newSite(t)
	c, key := s.box(t, true, nil)
	pid := s.daemon(t).PID
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGCONT) })
	began := bootTime()
	k := s.begin(t, c, "soname", given)
	if k.shareOutcome != hung {
		t.Fatalf("%+v", k.shareOutcome)
	}
	u, err := s.pages.OpenUsage(key, s.uuid(0))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	at, err := u.Compute(nil)
	if err != nil || at < began || at > bootTime() {
		t.Errorf("in cuInit since %v, %v; it has begun after %v", at, err, began)
	}
	k.end()
	if at, err := u.Compute(nil); at != 0 || err != nil {
		t.Errorf("dead, and in cuInit since %v, %v", at, err)
	}
}

func bootTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}

// TestMPSFaultsAtRandom has one fault after another, with all rings on: no program has a context outside
// its share without being named, and as soon as the daemon answers again an honest one is let in. Which
// ring caught each is counted. Every figure is the emulated driver's.
func TestMPSFaultsAtRandom(t *testing.T) {
	s, random, faults := newSite(t), dice(t), mpsFaults()
	caught := map[string]int{}
	for i := range pick(8, 500) {
		f := faults[random.IntN(len(faults))]
		t.Run(fmt.Sprintf("%d %s", i, f.name), func(t *testing.T) {
			honest, key := s.box(t, true, nil)
			s.mode(t, emulator.ComputeExclusiveProcess)
			k := s.begin(t, honest, []string{"soname", "query", "exec"}[random.IntN(3)], given)
			if held := s.verify(t, k, key); k.context != 0 || held.Guarantee != compute.Ceiling {
				t.Fatalf("an honest program while the daemon answers: %+v, %v", k.shareOutcome, held)
			}
			if f.happen != nil {
				f.happen(t, s)
			}
			if f.down {
				s.mode(t, emulator.ComputeProhibited)
			}
			c, key := s.box(t, random.IntN(4) > 0, func(edits *specs.ContainerEdits, image *capsule.Image) {
				if f.change != nil {
					f.change(t, s, edits, image)
				}
			})
			door := f.door
			if door == "" {
				door = "soname"
			}
			k = s.begin(t, c, door, f.env)
			held := s.verify(t, k, key)
			switch {
			case k.outside() && held.Guarantee == compute.Ceiling:
				t.Errorf("a context outside the share that is not named: %+v", k.shareOutcome)
			case k.outside() && k.client != 1:
				caught["c: outside MPS"]++
			case k.outside():
				caught["c: a client on no page"]++
			case k.shareOutcome == hung:
				caught["waits for the daemon"]++
			case k.init == 805:
				caught["a: refused, or no server"]++
			case k.context == 0:
				caught["a: held"]++
			default:
				caught[fmt.Sprintf("b: error %d", k.context)]++
			}
			k.end()
		})
		s.stop()
		s.mode(t, emulator.ComputeExclusiveProcess)
		s.supervise(t)
	}
	t.Logf("caught (emulated): %v", caught)
}
