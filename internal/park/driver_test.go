// SPDX-License-Identifier: Apache-2.0

package park

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// The test binary is the child, too.
func TestMain(m *testing.M) {
	if dir := os.Getenv("PARK_TEST_CHILD"); dir != "" {
		if err := Serve(os.Stdin, os.Stdout, "/proc", func() (Library, error) { return OpenCUDA([]string{dir}) }); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// site is an emulated driver as programs load it.
type site struct {
	t       *testing.T
	w       *emulator.World
	library string // the directory of libcuda.so.1
	program string
	n       *world // for the files of cgroups
}

func newSite(t *testing.T, spec emulator.Spec) *site {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	built, err := emulib.Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w, err := emulator.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	// The socket's path is short enough for an address.
	root, err := os.MkdirTemp("", "park-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := install.Driver(root, built, w); err != nil {
		t.Fatal(err)
	}
	libraries, err := install.Libraries(built)
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, w: w, library: filepath.Join(root, libraries), program: filepath.Join(root, "program"), n: newWorld(t)}
	if out, err := exec.Command("gcc", "-std=gnu17", "-O1", "-Wall", "-Wextra", "-Werror", "testdata/program.c", "-ldl", "-o", s.program).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	socket := filepath.Join(root, "run/nvidia-persistenced/socket")
	l, err := daemon.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	server := &daemon.Server{World: w, Driver: root, Log: slog.New(slog.DiscardHandler)}
	go func() { done <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// running is a program of testdata.
type running struct {
	cmd  *exec.Cmd
	in   io.Closer
	out  *bufio.Reader
	self Process
}

func (s *site) start(mib int) *running {
	s.t.Helper()
	r := &running{cmd: exec.Command(s.program, filepath.Join(s.library, cudaLibrary), strconv.Itoa(mib))}
	in, err := r.cmd.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	r.in, r.out = in, bufio.NewReader(out)
	if err := r.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = r.cmd.Process.Kill(); _ = r.cmd.Wait() })
	if line, err := r.out.ReadString('\n'); err != nil || !strings.HasPrefix(line, "ready") {
		s.t.Fatalf("a program says %q, %v", line, err)
	}
	r.self = Process{r.cmd.Process.Pid, StartOf("/proc", r.cmd.Process.Pid)}
	return r
}

// right ends a program, and looks whether all was as it should be.
func (s *site) right(r *running) {
	s.t.Helper()
	_ = r.in.Close()
	line, err := r.out.ReadString('\n')
	var rounds int
	if _, scan := fmt.Sscanf(line, "right %d", &rounds); scan != nil || err != nil || rounds == 0 {
		s.t.Errorf("a program says %q, %v", line, err)
	}
	_ = r.cmd.Wait()
}

func (s *site) keeper(dir string) *Keeper {
	s.t.Helper()
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	k, err := Open(Options{Dir: dir, Most: 1 << 40, LockFor: 5 * time.Second, Command: func(ctx context.Context) *exec.Cmd {
		cmd := exec.CommandContext(ctx, self)
		cmd.Env = append(os.Environ(), "PARK_TEST_CHILD="+s.library)
		return cmd
	}})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = k.Close() })
	return k
}

func (s *site) set(key string, of ...*running) Set {
	set := s.n.set(key)
	for _, r := range of {
		set.Processes = append(set.Processes, r.self)
		set.Bytes += 64 * mib
	}
	return set
}

// TestRealProcesses parks real programs through the driver's library, by children that are killed at random.
// The driver is emulated.
func TestRealProcesses(t *testing.T) {
	cycles := 6
	if *long {
		cycles = 300
	}
	s := newSite(t, emulator.Spec{Count: 1, CUDA: "12.8", ContextMiB: 10, GPUs: []emulator.GPUSpec{{MemoryMiB: 1048, ReservedMiB: 48}}})
	a, b := s.start(64), s.start(64)
	dir, random := t.TempDir(), random()
	k := s.keeper(dir)
	// Calls take a while, so that a kill meets them.
	if err := s.w.Inject(emulator.Fault{Call: "cuCheckpointProcess*", Delay: 2 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	for i := range cycles {
		if i%2 == 1 {
			killOne(k, random)
		}
		err := k.Park(t.Context(), s.set("x", a, b))
		if errors.Is(err, ErrBroken) {
			t.Fatal(err)
		}
		k = s.keeper(dir) // the agent begins anew
		if err := k.Settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		switch phase := k.Sets(); {
		case err == nil && (len(phase) != 1 || phase[0].Phase != Parked || s.used() != 0):
			t.Fatalf("parked: %+v, %d MiB used", phase, s.used())
		case len(phase) == 0 && s.used() != 148:
			t.Fatalf("not parked (%v): %d MiB used", err, s.used())
		}
		if i%2 == 0 {
			killOne(k, random)
		}
		for tries := 0; ; tries++ {
			if err := k.Restore(t.Context(), "x"); err == nil {
				break
			} else if errors.Is(err, ErrBroken) || tries == 10 {
				t.Fatal(err)
			}
		}
		if s.used() != 148 {
			s.right(a)
			s.right(b)
			t.Fatalf("restored: %d MiB used, parked %+v", s.used(), s.w.State().Parked)
		}
	}
	s.w.Clear()
	s.right(a)
	s.right(b)
	if list := s.w.State().Parked; len(list) != 0 {
		t.Errorf("%+v", list)
	}
}

func (s *site) used() uint64 { return s.w.State().GPUs[0].UsedMiB }

// killOne has the next child but some end by kill -9 after a moment.
func killOne(k *Keeper, random *rand.Rand) {
	left, after := random.IntN(2), time.Duration(random.IntN(30))*time.Millisecond
	ask := k.o.Command
	k.o.Command = func(ctx context.Context) *exec.Cmd {
		if left--; left >= 0 {
			return ask(ctx)
		}
		left = 1 << 30
		ctx, cancel := context.WithCancel(ctx)
		time.AfterFunc(after, cancel)
		return ask(ctx)
	}
}

// A driver before R570 has no such calls, and a directory without a driver none at all: nothing changes.
func TestDriversWithoutTheCalls(t *testing.T) {
	s := newSite(t, emulator.Spec{Count: 1, CUDA: "12.4"})
	a := s.start(64)
	k := s.keeper(t.TempDir())
	err := k.Park(t.Context(), s.set("x", a))
	if err == nil || errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "R570") {
		t.Errorf("%v", err)
	}
	if len(k.Sets()) != 0 {
		t.Errorf("%+v", k.Sets())
	}
	s.right(a)
}
