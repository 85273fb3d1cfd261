// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/mps/mpstest"
)

// suite is what needs no card. NVIDIA's own daemons and the emulated ones do the same in it.
var suite = []struct {
	name string
	test func(w *world)
	// waits says that it waits for deadlines; make test leaves it out.
	waits bool
}{
	{"Keep", keepsADaemon, false},
	{"Percent", changesThePercentage, false},
	{"Killed", killedDaemonIsReplaced, false},
	{"Quit", quitDaemonIsReplaced, true},
	{"Stopped", stoppedDaemonIsSilent, true},
	{"DirectoryGone", directoryGone, true},
	{"SocketsInTurn", socketsInTurn, false},
	{"StaleSocket", staleSocket, true},
	{"Adopt", successorAdopts, false},
	{"Foreign", foreignDaemonIsLeftAlone, false},
	{"SetBehindOurBack", setBehindOurBack, false},
	{"Busy", anotherProgramSpeaks, true},
	{"Root", rootInAContainer, false},
	{"StoppedEnds", stoppedDaemonEnds, true},
	{"Two", twoGPUs, false},
	{"Serve", keepsAServer, false},
	{"Initializing", serverTakesLong, true},
	{"KilledAtEachStep", killedAtEachStep, false},
	{"Init", initKeepsTheSupervisor, false},
}

func runSuite(t *testing.T, j judge) {
	for _, c := range suite {
		t.Run(c.name, func(t *testing.T) {
			if c.waits && testing.Short() {
				t.Skip("it waits for deadlines; make test-all runs it")
			}
			t.Parallel()
			j := j
			if j.emulated {
				j = emulated(t, j.version) // how its daemons behave is this test's alone
			}
			c.test(newWorld(t, j))
		})
	}
}

// TestEmulated: the emulated daemons do what NVIDIA's own do.
func TestEmulated(t *testing.T) {
	runSuite(t, judge{version: "555.58.02", emulated: true})
}

func keepsADaemon(w *world) {
	t := w.t
	w.run(w.options())
	if st := w.sync(); len(st.Daemons) != 0 || !st.Known {
		t.Errorf("nothing is wanted: %+v", st)
	}
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	if d.Err() != nil || d.PID == 0 || d.Percent != 26 || d.Version != w.version || !d.Open || d.Starts != 1 || d.Servers != nil {
		t.Fatalf("the daemon is %+v, problem %v", d, d.Err())
	}
	if age := sinceBoot() - d.Answered; age < 0 || age > 10*time.Second {
		t.Errorf("it answered %v ago", age)
	}
	w.oneDaemon(gpuA, d.PID, "26.0")
	f := w.files(gpuA)
	for path, mode := range map[string]os.FileMode{f.control(): os.ModeDir | 0o700, f.pipe(): os.ModeDir | 0o755, filepath.Join(f.pipe(), controlSocket): os.ModeSocket | 0o666} {
		if info, err := os.Lstat(path); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, mode)
		}
	}
	if !NewClient(w.state).Left() {
		t.Error("nothing is said to be left of a daemon that runs")
	}
	if names := list(t, PipeDir(w.state, gpuA)); !slices.Equal(names, []string{BeatFile, "control", "log"}) {
		t.Errorf("containers get %v", names)
	}
	if pid, err := listener(filepath.Join(f.pipe(), controlSocket)); pid != d.PID {
		t.Errorf("process %d listens at the link, %v; want %d", pid, err, d.PID)
	}
	again := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	if again.PID != d.PID || again.Start != d.Start || again.Starts != 1 || again.Answered <= d.Answered {
		t.Errorf("said twice: %+v, was %+v", again, d)
	}
	if st := w.sync(); len(st.Daemons) != 0 {
		t.Errorf("nothing is wanted any more: %+v", st)
	}
	if left := w.processes(gpuA); len(left) != 0 {
		t.Errorf("processes are left: %+v", left)
	}
	if NewClient(w.state).Left() {
		t.Error("something is said to be left")
	}
	if names := list(t, filepath.Join(w.state, rootDir)); !slices.Equal(names, []string{"lock", wantFile}) {
		t.Errorf("files are left: %v", names)
	}
}

func list(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Error(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func changesThePercentage(w *world) {
	w.run(w.options())
	pid := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA).PID
	for _, percent := range []int{100, 1, 50} {
		d := daemonOf(w.sync(Want{GPU: gpuA, Percent: percent}), gpuA)
		if d.Err() != nil || d.PID != pid || d.Percent != float64(percent) {
			w.t.Errorf("%d %%: %+v, problem %v", percent, d, d.Err())
		}
		w.oneDaemon(gpuA, pid, fmt.Sprintf("%d.0", percent))
	}
}

func killedDaemonIsReplaced(w *world) {
	w.run(w.options())
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	old := process{d.PID, d.Start}
	if err := old.signal(unix.SIGKILL); err != nil {
		w.t.Fatal(err)
	}
	c := NewClient(w.state)
	eventually(w.t, "another daemon", func() error {
		st, err := c.State(w.t.Context())
		if d := daemonOf(st, gpuA); err != nil || d.PID == 0 || d.PID == old.pid || d.Err() != nil {
			return fmt.Errorf("%+v, %v", d, err)
		}
		return nil
	})
	d = w.is(c, gpuA, "")
	if d.Starts != 2 || d.Percent != 26 || !d.Open {
		w.t.Errorf("the new daemon is %+v", d)
	}
	w.oneDaemon(gpuA, d.PID, "26.0")
}

func quitDaemonIsReplaced(w *world) {
	w.run(w.options())
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	old := process{d.PID, d.Start}
	eventually(w.t, "quit", func() error { // another program may speak to it
		cmd := exec.Command(filepath.Join(w.driver.Programs[0], controlProgram))
		cmd.Env, cmd.Stdin = []string{pipeVariable + "=" + w.files(gpuA).control()}, lines("quit\n")
		_ = cmd.Run()
		if !old.ended(200 * time.Millisecond) {
			return errors.New("the daemon lives")
		}
		return nil
	})
	c := NewClient(w.state)
	eventually(w.t, "another daemon", func() error {
		if d := daemonOf(must(c.State(w.t.Context())), gpuA); d.PID == old.pid || d.PID == 0 || d.Err() != nil {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	w.oneDaemon(gpuA, w.is(c, gpuA, "").PID, "26.0")
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func stoppedDaemonIsSilent(w *world) {
	_, stop := w.run(w.hasty())
	w.sync(Want{GPU: gpuA, Percent: 26}, Want{GPU: gpuB, Percent: 50})
	d := w.is(NewClient(w.state), gpuA, "")
	old := process{d.PID, d.Start}
	if err := old.signal(unix.SIGSTOP); err != nil {
		w.t.Fatal(err)
	}
	c := NewClient(w.state)
	d = w.is(c, gpuA, Silent)
	if d.PID != old.pid || d.Percent != 0 {
		w.t.Errorf("the stopped daemon is %+v", d)
	}
	other := w.is(c, gpuB, "")
	time.Sleep(deadline)
	if now := w.is(c, gpuA, Silent); now.Answered != d.Answered {
		w.t.Errorf("a stopped daemon has answered: %v, then %v", d.Answered, now.Answered)
	}
	if now := w.is(c, gpuB, ""); now.Answered <= other.Answered {
		w.t.Error("the other GPU's daemon was not asked meanwhile")
	}
	// Its successor finds the same daemon.
	stop()
	w.run(w.hasty())
	w.is(c, gpuA, Silent)
	if got := pids(w.processes(gpuA), aDaemon); !slices.Equal(got, []int{old.pid}) {
		w.t.Errorf("the daemons are %v, want %d", got, old.pid)
	}
	if err := old.signal(unix.SIGCONT); err != nil {
		w.t.Fatal(err)
	}
	if now := w.is(c, gpuA, ""); now.PID != old.pid || now.Percent != 26 {
		w.t.Errorf("it runs again: %+v", now)
	}
	w.oneDaemon(gpuA, old.pid, "26.0")
}

// stoppedDaemonEnds: a daemon that hangs is ended by force when it is not wanted.
func stoppedDaemonEnds(w *world) {
	w.run(w.hasty())
	w.sync(Want{GPU: gpuA, Percent: 26})
	d := w.is(NewClient(w.state), gpuA, "")
	if err := (process{d.PID, d.Start}).signal(unix.SIGSTOP); err != nil {
		w.t.Fatal(err)
	}
	w.sync()
	eventually(w.t, "all has ended", func() error {
		if st := must(NewClient(w.state).State(w.t.Context())); len(st.Daemons) > 0 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	if left := w.processes(gpuA); len(left) != 0 {
		w.t.Errorf("processes are left: %+v", left)
	}
}

func directoryGone(w *world) {
	w.run(w.options())
	c := NewClient(w.state)
	for _, gone := range []string{w.files(gpuA).control(), w.files(gpuA).pipe(), w.files(gpuA).base} {
		old := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
		w.vanish(gone)
		var d Daemon
		eventually(w.t, "the door is open again", func() error {
			st := must(c.State(w.t.Context()))
			d = daemonOf(st, gpuA)
			pid, err := listener(w.files(gpuA).socket())
			if err != nil || d.Err() != nil || pid != d.PID || !w.files(gpuA).isOpen() {
				return fmt.Errorf("%+v, problem %v, process %d listens, %v", d, d.Err(), pid, err)
			}
			return nil
		})
		if gone == w.files(gpuA).pipe() && d.PID != old.PID {
			w.t.Error("the daemon was replaced, and its own directory was there")
		}
		w.oneDaemon(gpuA, d.PID, "26.0")
	}
}

// vanish takes a directory away at once. A keeper makes it again at any moment, and RemoveAll would fail at
// what the keeper puts into it meanwhile.
func (w *world) vanish(dir string) {
	w.t.Helper()
	to := filepath.Join(w.state, "gone")
	if err := errors.Join(os.Rename(dir, to), os.RemoveAll(to)); err != nil {
		w.t.Fatal(err)
	}
}

// socketsInTurn: a daemon has the socket for control programs before the one for clients. So a keeper that
// finds the second can ask.
func socketsInTurn(w *world) {
	f := w.files(gpuA)
	if err := f.prepare(); err != nil {
		w.t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(f.socket(), "in the way"), 0o755); err != nil {
		w.t.Fatal(err)
	}
	for range 5 { // an order by chance is not right each time
		cmd := v2{program{path: filepath.Join(w.driver.Programs[0], controlProgram)}, w.driver, !w.singleUser, deadline}.daemon(f, gpuA)
		if err := cmd.Start(); err != nil {
			w.t.Fatal(err)
		}
		late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		late.Stop()
		path := filepath.Join(f.control(), privileged)
		if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeSocket {
			w.t.Fatalf("a daemon that cannot make the socket for clients has left the other as %v, %v", info, err)
		}
		if err := os.Remove(path); err != nil {
			w.t.Fatal(err)
		}
	}
}

func staleSocket(w *world) {
	_, stop := w.run(w.options())
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	stop()
	old := process{d.PID, d.Start}
	if err := old.signal(unix.SIGKILL); err != nil || !old.ended(5*time.Second) {
		w.t.Fatalf("the daemon lives: %v", err)
	}
	before := must(os.Lstat(w.files(gpuA).socket())) // the daemon has left it
	w.run(w.options())
	d = w.is(NewClient(w.state), gpuA, "")
	if after := must(os.Lstat(w.files(gpuA).socket())); !after.ModTime().After(before.ModTime()) || d.PID == old.pid {
		w.t.Error("the stale socket is still there")
	}
	w.oneDaemon(gpuA, d.PID, "26.0")
	// Behind a daemon that ends, too.
	w.sync()
	if _, err := os.Lstat(w.files(gpuA).socket()); !errors.Is(err, os.ErrNotExist) {
		w.t.Errorf("a socket is left: %v", err)
	}
}

// successorAdopts: a successor goes on with the same daemons before an agent says anything, and
// reads back and sets what was changed meanwhile.
func successorAdopts(w *world) {
	_, stop := w.run(w.options())
	first := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	for range 10 {
		stop()
		w.tell(gpuA, "set_default_active_thread_percentage 90")
		_, stop = w.run(w.options())
		d := w.is(NewClient(w.state), gpuA, "")
		if d.PID != first.PID || d.Start != first.Start || d.Starts != 0 || d.Percent != 26 || d.Version != w.version {
			w.t.Fatalf("adopted %+v, was %+v", d, first)
		}
	}
	w.oneDaemon(gpuA, first.PID, "26.0")
	if _, err := New(w.options()); err == nil {
		w.t.Error("two supervisors have one state directory")
	}
}

// foreignDaemonIsLeftAlone: a daemon that shows another GPU, or has limits of its own, is not
// adopted and not ended, and containers do not reach it.
func foreignDaemonIsLeftAlone(w *world) {
	f := w.files(gpuA)
	for _, other := range []string{devicesVariable + "=" + string(gpuB), "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G"} {
		if err := f.prepare(); err != nil {
			w.t.Fatal(err)
		}
		cmd := v2{program{path: filepath.Join(w.driver.Programs[0], controlProgram)}, w.driver, !w.singleUser, deadline}.daemon(f, gpuA)
		cmd.Env = append(slices.DeleteFunc(cmd.Env, func(s string) bool {
			return s == devicesVariable+"="+string(gpuA) && other[:len(devicesVariable)] == devicesVariable
		}), other)
		if err := cmd.Start(); err != nil {
			w.t.Fatal(err)
		}
		reaped := make(chan error)
		go func() { reaped <- cmd.Wait() }()
		eventually(w.t, "it listens", func() error { _, err := listener(f.socket()); return err })
		_, stop := w.run(w.options())
		w.sync(Want{GPU: gpuA, Percent: 26})
		d := w.is(NewClient(w.state), gpuA, Foreign)
		if d.Open || d.PID != 0 || d.Starts != 0 {
			w.t.Errorf("%s: %+v", other, d)
		}
		w.oneDaemon(gpuA, cmd.Process.Pid, "100.0")
		w.sync() // it has the GPU's directory
		<-reaped
		stop()
		if err := os.Remove(filepath.Join(w.state, rootDir, wantFile)); err != nil { // or the next one ends what it finds
			w.t.Fatal(err)
		}
	}
}

func setBehindOurBack(w *world) {
	w.run(w.options())
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	w.tell(gpuA, "set_default_active_thread_percentage 100")
	eventually(w.t, "it is set back", func() error {
		if said := w.tell(gpuA, "get_default_active_thread_percentage"); said != "26.0\n" {
			return fmt.Errorf("%q", said)
		}
		return nil
	})
	w.oneDaemon(gpuA, d.PID, "26.0")
}

// anotherProgramSpeaks: a daemon serves one control program at a time. While that is another one,
// its daemon is silent, and nothing is ended or started.
func anotherProgramSpeaks(w *world) {
	w.run(w.hasty())
	w.sync(Want{GPU: gpuA, Percent: 26})
	d := w.is(NewClient(w.state), gpuA, "")
	c := NewClient(w.state)
	eventually(w.t, "another program has the place", func() error {
		cmd := exec.Command(filepath.Join(w.driver.Programs[0], controlProgram))
		cmd.Env = []string{pipeVariable + "=" + w.files(gpuA).control()}
		typed, err := cmd.StdinPipe() // nothing is typed
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		defer func() { _ = typed.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		for end := time.Now().Add(2 * deadline); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if d := daemonOf(must(c.State(w.t.Context())), gpuA); errors.Is(d.Err(), Silent) {
				return nil
			}
		}
		return errors.New("the daemon still answers")
	})
	now := w.is(c, gpuA, "")
	if now.PID != d.PID || now.Starts != 1 {
		w.t.Errorf("%+v, was %+v", now, d)
	}
}

// rootInAContainer: with the link that containers get, not even root sets the default percentage,
// or ends the daemon.
func rootInAContainer(w *world) {
	w.run(w.options())
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	if err := os.Link(filepath.Join(PipeDir(w.state, gpuA), controlSocket), filepath.Join(w.state, privileged)); err != nil {
		w.t.Fatal(err)
	}
	for _, command := range []string{"set_default_active_thread_percentage 100\n", "quit\n"} {
		if w.version < "550" && strings.HasPrefix(command, "set") {
			continue // 535 lets root set it, and is refused anyway
		}
		eventually(w.t, command, func() error {
			cmd := exec.Command(filepath.Join(w.driver.Programs[0], controlProgram))
			cmd.Env, cmd.Stdin = []string{pipeVariable + "=" + w.state}, lines(command)
			out, _ := cmd.CombinedOutput()
			if len(out) == 0 || string(out) == "Cannot send command to MPS control daemon process\n" {
				return errors.New("it was not heard")
			}
			w.t.Logf("%q: %q", command, out)
			return nil
		})
	}
	w.oneDaemon(gpuA, d.PID, "26.0")
}

func twoGPUs(w *world) {
	w.run(w.options())
	st := w.sync(Want{GPU: gpuB, Percent: 50}, Want{GPU: gpuA, Percent: 26})
	if len(st.Daemons) != 2 || st.Daemons[0].GPU != gpuA || st.Daemons[0].PID == st.Daemons[1].PID {
		w.t.Fatalf("%+v", st)
	}
	w.oneDaemon(gpuA, st.Daemons[0].PID, "26.0")
	w.oneDaemon(gpuB, st.Daemons[1].PID, "50.0")
	if st = w.sync(Want{GPU: gpuB, Percent: 50}); len(st.Daemons) != 1 || st.Daemons[0].Starts != 1 {
		w.t.Errorf("the other's daemon: %+v", st)
	}
	w.oneDaemon(gpuB, st.Daemons[0].PID, "50.0")
}

// steps are those of a start, and those of an end.
var steps = map[string][]string{
	"start": {"saved", "prepared", "started", "listens", "set", "read back", "opened", "server started"},
	"end":   {"saved", "shut", "quit", "cleared"},
}

// keepsAServer: the server is started with the daemon when the GPU takes one. Without a card it ends
// at once and is started again after growing pauses, and the daemon stays as it is.
func keepsAServer(w *world) {
	if w.emulated {
		mpstest.Set(w.t, w.driver.Programs[0], mpstest.Behaviour{NoCard: true})
	}
	opts := w.options()
	if !w.emulated {
		// Asked about a server that ends meanwhile, 555's daemon may print what it has never read, and nothing more
		// until the asker is gone.
		opts = w.hasty()
	}
	w.run(opts)
	c := NewClient(w.state)
	if d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA); d.Err() != nil || d.Serving || d.ServeAt != 0 {
		w.t.Errorf("none is wanted yet: %+v, problem %v", d, d.Err())
	}
	want := Want{GPU: gpuA, Percent: 26, Serve: true}
	w.sync(want)
	d := w.is(c, gpuA, NoServer)
	first := d
	var starts []time.Duration
	for began := time.Now(); len(starts) < 3 && time.Since(began) < 20*time.Second; time.Sleep(5 * time.Millisecond) {
		if d = w.is(c, gpuA, NoServer); len(starts) == 0 || d.ServeAt != starts[len(starts)-1] {
			starts = append(starts, d.ServeAt)
		}
		if d.PID != first.PID || d.Starts != 1 || !d.Open || d.Percent != 26 || d.Serving || d.ServeAt == 0 {
			w.t.Fatalf("without a card: %+v, was %+v", d, first)
		}
	}
	if len(starts) < 3 || starts[1]-starts[0] < 2*firstPause || starts[2]-starts[1] < 4*firstPause {
		w.t.Errorf("a server is to be started at %v", starts)
	}
	most := 4
	if !w.emulated {
		most = 2 * len(starts) // the supervisor tells the daemon once more where it has lost the answer
	}
	if data, err := os.ReadFile(w.files(gpuA).output()); err != nil || strings.Count(string(data), "Starting new server") > most {
		w.t.Errorf("the daemon prints %s, %v", data, err)
	}
	if !w.emulated {
		return
	}
	mpstest.Set(w.t, w.driver.Programs[0], mpstest.Behaviour{})
	for range 2 {
		d = w.is(c, gpuA, "")
		if !d.Serving || d.ServeAt != 0 || len(d.Servers) != 1 || d.Servers[0].Percent != 26 || d.Clients() != 0 || d.PID != first.PID {
			w.t.Fatalf("with a card: %+v", d)
		}
		old := d.Servers[0].PID
		if err := unix.Kill(old, unix.SIGKILL); err != nil {
			w.t.Fatal(err)
		}
		eventually(w.t, "another server", func() error {
			// During a round the servers are newer than the rest.
			if d := daemonOf(must(c.State(w.t.Context())), gpuA); d.Err() != nil || !d.Serving || len(d.Servers) != 1 || d.Servers[0].PID == old {
				return fmt.Errorf("%+v, problem %v", d, d.Err())
			}
			return nil
		})
	}
	if d = daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA); !d.Serving {
		w.t.Errorf("the server is ended, though nothing asks for that: %+v", d)
	}
}

// serverTakesLong: while a server starts, the daemon tells nothing of it but that. No client's door is
// closed for that, and nothing else is started.
func serverTakesLong(w *world) {
	if w.emulated {
		mpstest.Set(w.t, w.driver.Programs[0], mpstest.Behaviour{StartsSlowly: true})
	} else {
		w.driver = withServer(w.t, w.driver, "exec sleep 1000")
	}
	w.run(w.options())
	w.sync(Want{GPU: gpuA, Percent: 26, Serve: true})
	c := NewClient(w.state)
	first := w.is(c, gpuA, NoServer)
	for range 3 {
		w.sync(Want{GPU: gpuA, Percent: 26, Serve: true})
		d := w.is(c, gpuA, NoServer)
		if len(d.Servers) != 1 || d.Servers[0].PID != first.Servers[0].PID || d.Servers[0].Status != Initializing ||
			d.Serving || d.ServeAt != 0 || !d.Open || d.Percent != 26 {
			w.t.Fatalf("%+v, was %+v", d, first)
		}
	}
	if w.emulated {
		mpstest.Set(w.t, w.driver.Programs[0], mpstest.Behaviour{})
		if d := w.is(c, gpuA, ""); !d.Serving || d.Servers[0].PID != first.Servers[0].PID {
			w.t.Errorf("%+v, was %+v", d, first)
		}
	}
}

// killedAtEachStep: the supervisor is killed at each step. Its successor finishes the work: one
// daemon, started once, with the percentage; or none, and no file.
func killedAtEachStep(w *world) {
	steps := steps
	if testing.Short() {
		steps = map[string][]string{"start": {"started", "set"}, "end": {"shut"}}
	}
	for _, step := range steps["start"] {
		w.killAt(step, func(c *Client) {
			_, _ = c.Sync(w.t.Context(), []Want{{GPU: gpuA, Percent: 26, Serve: step == "server started"}})
		}, func(c *Client) {
			if step == "server started" && w.emulated {
				d := w.is(c, gpuA, "")
				if now := w.processes(gpuA); !d.Serving || len(pids(now, aServer)) != 1 {
					w.t.Errorf("killed at %q: %+v, servers %v", step, d, now)
				}
			}
			w.sync(Want{GPU: gpuA, Percent: 26})
			d := w.is(c, gpuA, "")
			w.oneDaemon(gpuA, d.PID, "26.0")
			if step != "saved" && step != "prepared" && d.Starts != 0 {
				w.t.Errorf("killed at %q: the successor has started %d daemons", step, d.Starts)
			}
			w.sync()
		})
	}
	for _, step := range steps["end"] {
		w.killAt(step, func(c *Client) {
			if step == "saved" {
				_, _ = c.Sync(w.t.Context(), nil)
				return
			}
			_, _ = c.Sync(w.t.Context(), []Want{{GPU: gpuA, Percent: 26}})
			_, _ = c.Sync(w.t.Context(), nil)
		}, func(c *Client) {
			eventually(w.t, "all has ended", func() error {
				if st := w.sync(); len(st.Daemons) > 0 {
					return fmt.Errorf("%+v", st)
				}
				return nil
			})
			if left := w.processes(gpuA); len(left) != 0 {
				w.t.Errorf("killed at %q: processes are left: %+v", step, left)
			}
			if _, err := os.Lstat(w.files(gpuA).base); !errors.Is(err, os.ErrNotExist) {
				w.t.Errorf("killed at %q: files are left: %v", step, err)
			}
		})
	}
}

// killAt has the supervisor below an init kill itself at a step that do leads to, and then looks at
// what its successor makes of it.
func (w *world) killAt(step string, do, then func(c *Client)) {
	w.t.Helper()
	once := filepath.Join(w.t.TempDir(), "killed")
	// The end of the step before kept what was said then.
	if err := os.Remove(filepath.Join(w.state, rootDir, wantFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Fatal(err)
	}
	stop := w.startInit(part{KillAt: step, KillOnce: once})
	defer stop()
	c := NewClient(w.state)
	do(c)
	eventually(w.t, "the supervisor is killed at "+step, func() error { _, err := os.Stat(once); return err })
	eventually(w.t, "a successor", func() error { _, err := c.State(w.t.Context()); return err })
	then(c)
}

// startInit starts an init with a supervisor. stop ends both as the end of the pod does.
func (w *world) startInit(p part) (stop func()) {
	w.t.Helper()
	p.Role, p.State, p.Driver, p.SingleUser = "init", w.state, w.driver, w.singleUser
	cmd := p.command(w.t)
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	done := false
	stop = func() {
		if done {
			return
		}
		done = true
		_ = cmd.Process.Signal(unix.SIGTERM)
		select {
		case err := <-ended:
			if err != nil {
				w.t.Errorf("init: %v", err)
			}
		case <-time.After(30 * time.Second):
			w.t.Error("init does not end")
			_ = cmd.Process.Kill()
			<-ended
		}
		if left := w.processes(gpuA); len(left) != 0 {
			w.t.Errorf("processes are left behind the pod: %+v", left)
		}
	}
	w.t.Cleanup(stop)
	c := NewClient(w.state)
	eventually(w.t, "a supervisor", func() error {
		_, err := c.State(context.Background())
		var gone *net.OpError
		if errors.As(err, &gone) {
			return err
		}
		return err
	})
	return stop
}

// initKeepsTheSupervisor: supervisors end and are started again, daemons stay, and both are
// children of init.
func initKeepsTheSupervisor(w *world) {
	stop := w.startInit(part{})
	c := NewClient(w.state)
	w.sync(Want{GPU: gpuA, Percent: 26})
	first := w.is(c, gpuA, "")
	parent := func(pid int) string { return stat(w.t, pid)[1] }
	init := parent(first.PID)
	for range 5 {
		var supervisor process
		eventually(w.t, "the supervisor", func() (err error) {
			supervisor, err = processOf(must(serverOf(c.path)))
			return err
		})
		if parent(supervisor.pid) != init {
			w.t.Fatalf("the supervisor is a child of %s, and the daemon of %s", parent(supervisor.pid), init)
		}
		if err := supervisor.signal(unix.SIGKILL); err != nil {
			w.t.Fatal(err)
		}
		if !supervisor.ended(5 * time.Second) {
			w.t.Fatal("the supervisor lives")
		}
		eventually(w.t, "its successor", func() error { _, err := c.State(w.t.Context()); return err })
		d := w.is(c, gpuA, "")
		if d.PID != first.PID || d.Start != first.Start || d.Starts != 0 || parent(d.PID) != init {
			w.t.Fatalf("%+v below %s, was %+v below %s", d, parent(d.PID), first, init)
		}
	}
	w.oneDaemon(gpuA, first.PID, "26.0")
	// A daemon that dies is reaped by init, and a successor's daemon is init's child, too.
	if err := (process{first.PID, first.Start}).signal(unix.SIGKILL); err != nil {
		w.t.Fatal(err)
	}
	eventually(w.t, "the dead daemon is reaped", func() error {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", first.PID)); err == nil {
			return errors.New("it is not")
		}
		return nil
	})
	eventually(w.t, "another daemon", func() error {
		if d := daemonOf(must(c.State(w.t.Context())), gpuA); d.PID == first.PID || d.PID == 0 || d.Err() != nil {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	if d := w.is(c, gpuA, ""); parent(d.PID) != init {
		w.t.Errorf("the second daemon is a child of %s, want %s", parent(d.PID), init)
	}
	stop()
}
