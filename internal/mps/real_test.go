// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/mps/mpstest"
	"example.com/gpu-agent/tests/drivers/archive"
)

var (
	real   = flag.Bool("real", false, "run NVIDIA's own programs, which Debian's archive has")
	update = flag.Bool("update", false, "with -real: record transcripts of NVIDIA's own programs anew")
)

// reals are the drivers that Debian's archive has MPS of, oldest first. A server needs a card, so
// their daemons have none here.
var reals = []struct {
	version   string
	multiUser bool
}{{"535.261.03", false}, {"550.163.01", false}, {"555.58.02", true}}

// each runs a test with each of NVIDIA's own.
func each(t *testing.T, test func(t *testing.T, j judge)) {
	t.Helper()
	if !*real {
		t.Skip("NVIDIA's own programs run with -real; make test-all runs it")
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("the drivers that serve as judges are for amd64")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, as a daemon in multi-user mode does")
	}
	for _, r := range reals {
		t.Run(r.version, func(t *testing.T) {
			tree, err := archive.MPS[r.version].Tree(t.Context())
			switch {
			case errors.Is(err, archive.ErrHash):
				t.Fatal(err)
			case err != nil:
				t.Skipf("no judge: %v", err)
			}
			usr := filepath.Join(tree, "usr")
			test(t, judge{r.version, Driver{Programs: []string{filepath.Join(usr, "bin"), filepath.Join(usr, "sbin")}}, !r.multiUser, false})
		})
	}
}

// TestReal: NVIDIA's own daemons, as far as they go without a card. Those of 535 and 550 lack
// multi-user mode and run without it here, as the product would not.
func TestReal(t *testing.T) {
	each(t, runSuite)
}

// withServer returns a driver whose server is a script, and all else as it was.
func withServer(t testing.TB, d Driver, script string) Driver {
	t.Helper()
	dir := t.TempDir()
	err := os.WriteFile(filepath.Join(dir, "nvidia-cuda-mps-server"), []byte("#!/bin/sh\n"+script+"\n"), 0o755)
	control, unread := os.ReadFile(filepath.Join(d.Programs[0], controlProgram))
	err = errors.Join(err, unread, os.WriteFile(filepath.Join(dir, controlProgram), control, 0o755))
	if err != nil {
		t.Fatal(err)
	}
	return Driver{Programs: []string{dir, "/usr/bin", "/bin"}, Libraries: d.Libraries}
}

// TestNoMultiUser: a driver that lacks multi-user mode is refused, and its program is not started
// again and again. Another driver in its place is tried.
func TestNoMultiUser(t *testing.T) {
	for _, version := range []string{"535.261.03", "550.163.01"} {
		t.Run(version, func(t *testing.T) { refusesSingleUser(t, emulated(t, version)) })
	}
}

func TestRealNoMultiUser(t *testing.T) {
	each(t, func(t *testing.T, j judge) {
		if j.singleUser {
			refusesSingleUser(t, j)
		}
	})
}

func refusesSingleUser(t *testing.T, j judge) {
	j.singleUser = false
	w := newWorld(t, j)
	w.run(w.options())
	w.sync(Want{GPU: gpuA, Percent: 26})
	c := NewClient(w.state)
	d := w.is(c, gpuA, NoMultiUser)
	for range 3 {
		w.sync(Want{GPU: gpuA, Percent: 26})
	}
	d = w.is(c, gpuA, NoMultiUser)
	if d.Starts != 1 || d.Open || d.PID != 0 || !strings.Contains(d.Err().Error(), w.version) {
		t.Errorf("%+v, problem %v", d, d.Err())
	}
	if left := w.processes(gpuA); len(left) != 0 {
		t.Errorf("processes are left: %+v", left)
	}
	if j.emulated {
		mpstest.Replace(t, w.driver.Programs[0], "555.58.02")
		if d = w.is(c, gpuA, ""); d.Version != "555.58.02" {
			t.Errorf("with another driver: %+v", d)
		}
	}
}

// conversation is what a transcript has: one run of the control program for each line, and what it
// has printed. $UI is for the privileged socket, $TENANT for the one that containers get.
var conversation = []string{
	"$UI get_server_list",
	"$UI get_default_active_thread_percentage",
	"$UI set_default_active_thread_percentage 25",
	"$UI get_default_active_thread_percentage",
	"$UI set_default_active_thread_percentage 0",
	"$UI set_default_active_thread_percentage 101",
	"$UI set_default_active_thread_percentage abc",
	"$UI set_default_active_thread_percentage",
	"$UI set_default_active_thread_percentage 33.35",
	"$UI set_default_active_thread_percentage 100",
	"$UI get_active_thread_percentage 4",
	"$UI set_active_thread_percentage 4 50",
	"$UI get_client_list 4",
	"$UI get_server_status 4",
	"$UI get_server_status",
	"$UI terminate_client 4 5",
	"$UI shutdown_server 4",
	"$UI start_server",
	"$UI start_server -uid",
	"$UI start_server -uid abc",
	"$UI start_server -uid 0",
	"$UI nonsense of three",
	"$TENANT get_default_active_thread_percentage",
	"$TENANT set_default_active_thread_percentage 90",
	"$TENANT set_active_thread_percentage 4 50",
	"$TENANT terminate_client 4 5",
	"$TENANT quit",
	"$UI get_default_active_thread_percentage",
	"$SECOND",
	"$UI quit",
	"$FILES",
	"$UI get_server_list",
	"$OPTION",
}

// transcribe has the conversation with a daemon.
func transcribe(t *testing.T, j judge) string {
	w := newWorld(t, j)
	if j.emulated { // the real ones have no card here
		mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{NoCard: true})
	}
	f := w.files(gpuA)
	if err := f.prepare(); err != nil {
		t.Fatal(err)
	}
	b := v2{program{path: filepath.Join(w.driver.Programs[0], controlProgram)}, w.driver, !w.singleUser, deadline}
	cmd := b.daemon(f, gpuA)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	eventually(t, "it listens", func() error { _, err := listener(f.socket()); return err })
	tenant := filepath.Join(w.state, "tenant")
	if err := errors.Join(os.Mkdir(tenant, 0o755), os.Link(f.socket(), filepath.Join(tenant, privileged))); err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	say := func(dir, input string, args ...string) {
		var code int
		eventually(t, input, func() error { // until the daemon has noticed that the program before has gone
			one := exec.Command(b.program.path, args...)
			one.Env, one.Stdin = []string{pipeVariable + "=" + dir}, strings.NewReader(input)
			out, _ := one.CombinedOutput()
			code = one.ProcessState.ExitCode()
			said := strings.ReplaceAll(string(out), w.state, "STATE")
			if strings.Contains(said, "Cannot send command") || len(out) == 0 && input != "" && !strings.HasPrefix(input, "quit") {
				return errors.New("it was not heard")
			}
			fmt.Fprintf(&text, "%s", said)
			return nil
		})
		if code != 0 && input != "quit\n" { // quit's program may end before it has the daemon's status
			fmt.Fprintf(&text, "(exit %d)\n", code)
		}
	}
	for _, line := range conversation {
		fmt.Fprintf(&text, "> %s\n", line)
		to, command, _ := strings.Cut(line, " ")
		input := command + "\nend\n"
		if command == "quit" {
			input = "quit\n"
		}
		switch to {
		case "$UI":
			say(f.control(), input)
			if command == "quit" {
				if !(process{cmd.Process.Pid, 0}.gone()) {
					fmt.Fprintln(&text, "(the daemon lives)")
				}
				fmt.Fprintf(&text, "(the daemon ends with %v)\n", <-ended)
			}
		case "$TENANT":
			say(tenant, input)
		case "$SECOND": // a second daemon for the same directory
			say(f.control(), "", foreground)
		case "$FILES":
			for _, name := range list(t, f.control()) {
				fmt.Fprintln(&text, name)
			}
		case "$OPTION": // one that no driver has
			out, _ := func() ([]byte, error) {
				one := exec.Command(b.program.path, foreground, "-no-such-option")
				one.Env = []string{pipeVariable + "=" + filepath.Join(w.state, "nowhere")}
				return one.CombinedOutput()
			}()
			first, _, _ := strings.Cut(string(out), "\n")
			fmt.Fprintln(&text, first)
		}
	}
	return text.String()
}

// gone waits until no process has the PID.
func (p process) gone() bool {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err := unix.Kill(p.pid, 0); errors.Is(err, unix.ESRCH) {
			return true
		}
	}
	return false
}

// TestTranscripts: the emulated daemons say what NVIDIA's own have said.
func TestTranscripts(t *testing.T) {
	for _, r := range reals {
		t.Run(r.version, func(t *testing.T) {
			holdTo(t, r.version, transcribe(t, emulated(t, r.version)))
		})
	}
}

// TestRealTranscripts: NVIDIA's own still say what is recorded.
func TestRealTranscripts(t *testing.T) {
	each(t, func(t *testing.T, j judge) {
		got := transcribe(t, j)
		if *update {
			if err := os.WriteFile(transcript(j.version), []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		holdTo(t, j.version, got)
	})
}

func transcript(version string) string { return filepath.Join("testdata", version+".txt") }

func holdTo(t *testing.T, version, got string) {
	t.Helper()
	data, err := os.ReadFile(transcript(version))
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Split(string(data), "\n")
	command := ""
	for i, line := range strings.Split(got, "\n") {
		if strings.HasPrefix(line, "> ") {
			command = line
		}
		if i >= len(want) || line != want[i] {
			t.Fatalf("%s, line %d of %s: %q; recorded is %q", command, i+1, transcript(version), line, want[min(i, len(want)-1)])
		}
	}
	if n := len(strings.Split(got, "\n")); n < len(want) {
		t.Errorf("%d lines, and %d are recorded", n, len(want))
	}
}
