// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/mps/mpstest"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	gpuA gpu.UUID = "GPU-11111111-2222-3333-4444-555555555555"
	gpuB gpu.UUID = "GPU-99999999-2222-3333-4444-555555555555"
)

// TestMain is also the processes of which the tests need more than one: see role.
func TestMain(m *testing.M) {
	mpstest.Main()
	if name := os.Getenv(roleVariable); name != "" {
		code := role2exit(name)
		// os.Exit would wait for a second below the race detector.
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(code), 0, 0)
	}
	os.Exit(m.Run())
}

// judge is a driver's programs: NVIDIA's own, or emulated.
type judge struct {
	version    string
	driver     Driver
	singleUser bool // its daemon lacks multi-user mode, and is run without it
	emulated   bool
}

func emulated(t testing.TB, version string) judge {
	return judge{version, Driver{Programs: []string{mpstest.Install(t, version)}}, version < "555", true}
}

// world is a state directory with the processes that a test starts for it. They have ended when the
// test has, whatever becomes of it.
type world struct {
	t testing.TB
	judge
	state string
}

func newWorld(t testing.TB, j judge) *world {
	t.Helper()
	state, err := os.MkdirTemp("", "mps") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t, j, state}
	t.Cleanup(func() {
		for _, u := range []gpu.UUID{gpuA, gpuB} {
			for _, p := range w.processes(u) {
				_ = p.signal(unix.SIGKILL)
				if !p.ended(5 * time.Second) {
					t.Errorf("process %d of MPS lives", p.pid)
				}
			}
		}
		if err := os.RemoveAll(state); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) files(u gpu.UUID) files { return files{filepath.Join(w.state, rootDir, string(u))} }

// processes are all of MPS with a GPU's directory.
func (w *world) processes(u gpu.UUID) []relative {
	all, err := relatives(w.files(u).control())
	if err != nil {
		w.t.Error(err)
	}
	return all
}

func (w *world) options() Options {
	return Options{StateDir: w.state, Driver: w.driver, Beat: 250 * time.Millisecond, patience: 10 * time.Second,
		singleUser: w.singleUser,
		Logger:     slog.New(slog.NewTextHandler(w.t.Output(), nil))}
}

// hasty has questions fail soon, for daemons that do not answer.
func (w *world) hasty() Options {
	opts := w.options()
	opts.patience = deadline
	return opts
}

// run runs a supervisor. It has ended when stop returns, and its daemons live on.
func (w *world) run(opts Options) (s *Supervisor, stop func()) {
	w.t.Helper()
	s, err := New(opts)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := errors.Join(<-ended, s.Close()); err != nil {
				w.t.Errorf("the supervisor: %v", err)
			}
		})
	}
	w.t.Cleanup(stop)
	client := NewClient(w.state)
	eventually(w.t, "the supervisor serves", func() error {
		_, err := client.State(context.Background())
		return err
	})
	return s, stop
}

// eventually waits until f returns nil.
func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// is returns the state of a GPU when it has the code, no problem for the empty one.
func (w *world) is(s interface {
	State(context.Context) (State, error)
}, u gpu.UUID, code Code) (d Daemon) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("%s is %q", u, code), func() error {
		st, err := s.State(w.t.Context())
		if err != nil {
			return err
		}
		d = daemonOf(st, u)
		if err := d.Err(); code == "" && (err != nil || d.PID == 0) || code != "" && !errors.Is(err, code) {
			return fmt.Errorf("state %+v, problem %v", d, err)
		}
		return nil
	})
	return d
}

func daemonOf(st State, u gpu.UUID) Daemon {
	for _, d := range st.Daemons {
		if d.GPU == u {
			return d
		}
	}
	return Daemon{}
}

// sync says what shall be.
func (w *world) sync(wants ...Want) State {
	w.t.Helper()
	st, err := NewClient(w.state).Sync(w.t.Context(), wants)
	if err != nil {
		w.t.Fatal(err)
	}
	return st
}

// oneDaemon fails unless a GPU has exactly this daemon, and its percentage is as a control program
// of the test's own reads it.
func (w *world) oneDaemon(u gpu.UUID, pid int, percent string) {
	w.t.Helper()
	if got := pids(w.processes(u), aDaemon); len(got) != 1 || got[0] != pid {
		w.t.Errorf("the daemons of %s are %v, want %d alone", u, got, pid)
	}
	if got := w.tell(u, "get_default_active_thread_percentage"); got != percent+"\n" {
		w.t.Errorf("%s: the default percentage is %q, want %q", u, got, percent)
	}
}

// tell gives a daemon a command as a person would.
func (w *world) tell(u gpu.UUID, command string) (said string) {
	w.t.Helper()
	eventually(w.t, command, func() error {
		cmd := exec.Command(filepath.Join(w.driver.Programs[0], controlProgram))
		cmd.Env = []string{pipeVariable + "=" + w.files(u).control()}
		cmd.Stdin = strings.NewReader(command + "\nend\n")
		out, _ := cmd.CombinedOutput()
		var whole bool
		if said, whole = strings.CutSuffix(string(out), "Unknown command \"end\"\n"); !whole {
			return fmt.Errorf("it says %q", out) // the supervisor speaks to it just now
		}
		return nil
	})
	return said
}

func lines(s string) *strings.Reader { return strings.NewReader(s) }

// stat are the fields of /proc/PID/stat behind the name: state, parent, …
func stat(t testing.TB, pid int) []string {
	t.Helper()
	data, err := readProc(pid, "stat")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
}

// serverOf returns the process that listens at a supervisor's socket.
func serverOf(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return 0, err
	}
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}
