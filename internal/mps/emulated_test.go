// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/mps/mpstest"
)

// What needs a card is emulated here: servers, clients, and percentages of contexts.

// client is a process that is an emulated client.
type client struct {
	pid     int
	percent string
	said    *bufio.Reader
	in      io.Closer
	cmd     *exec.Cmd
}

// client starts one, which has ended when the test has.
func (w *world) client() (*client, error) {
	cmd := part{Role: "client", State: w.state}.command(w.t)
	cmd.Stdout = nil
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &client{pid: cmd.Process.Pid, said: bufio.NewReader(out), in: in, cmd: cmd}
	w.t.Cleanup(c.end)
	line, err := c.said.ReadString('\n')
	c.percent = strings.TrimSpace(line)
	return c, err
}

func (c *client) end() {
	_ = c.in.Close()
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// lost waits until the client says that its context is gone.
func (c *client) lost() bool {
	line, _ := c.said.ReadString('\n')
	return line == "lost\n"
}

func (w *world) clients(n int) []*client {
	w.t.Helper()
	all := make([]*client, n)
	for i := range all {
		var err error
		if all[i], err = w.client(); err != nil {
			w.t.Fatal(err)
		}
	}
	return all
}

func fresh(t *testing.T) (*world, *Supervisor, func()) {
	w := newWorld(t, emulated(t, "555.58.02"))
	s, stop := w.run(w.options())
	return w, s, stop
}

// TestClients: a server is made with the percentage that is wanted, and its clients are told. A new
// percentage is the server's at once, and the next context's. Contexts that exist keep theirs.
func TestClients(t *testing.T) {
	t.Parallel()
	w, _, _ := fresh(t)
	w.sync(Want{GPU: gpuA, Percent: 26})
	first := w.clients(2)
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	want := []int{first[0].pid, first[1].pid}
	slices.Sort(want)
	if d.Err() != nil || len(d.Servers) != 1 || d.Servers[0].Percent != 26 || d.Servers[0].Status != Active || !slices.Equal(d.Servers[0].Clients, want) {
		t.Fatalf("%+v, want the clients %v", d, want)
	}
	if first[0].percent != "26" {
		t.Errorf("the first context has %s %%", first[0].percent)
	}
	server := d.Servers[0].PID
	d = daemonOf(w.sync(Want{GPU: gpuA, Percent: 50}), gpuA)
	if d.Err() != nil || d.Percent != 50 || d.Servers[0].PID != server || d.Servers[0].Percent != 50 {
		t.Errorf("50 %%: %+v", d)
	}
	if next := w.clients(1)[0]; next.percent != "50" {
		t.Errorf("the next context has %s %%", next.percent)
	}
	// Root in a container can set the server's percentage. The next round sets it back.
	w.tell(gpuA, fmt.Sprintf("set_active_thread_percentage %d 100", server))
	eventually(t, "it is set back", func() error {
		if said := w.tell(gpuA, fmt.Sprintf("get_active_thread_percentage %d", server)); said != "50.0\n" {
			return errors.New(said)
		}
		return nil
	})
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Status: "FAULT"})
	if d = daemonOf(w.sync(Want{GPU: gpuA, Percent: 50}), gpuA); d.Servers[0].Status != Fault {
		t.Errorf("a fault: %+v", d)
	}
}

// TestNoServerBeforeThePercentage: containers do not reach a daemon before its percentage is read
// back, nor one the percentage of which cannot be set.
func TestNoServerBeforeThePercentage(t *testing.T) {
	t.Parallel()
	w, _, _ := fresh(t)
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Deaf: []string{"set_default_active_thread_percentage"}})
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	if !errors.Is(d.Err(), NotTaken) || d.Open || d.Percent != 100 {
		t.Errorf("%+v, problem %v", d, d.Err())
	}
	if _, err := w.client(); err == nil {
		t.Error("a program has become a client")
	}
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{})
	if d := w.is(NewClient(w.state), gpuA, ""); !d.Open || d.Starts != 1 {
		t.Errorf("%+v", d)
	}
	// The server's, too.
	w.clients(1)
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Deaf: []string{"set_active_thread_percentage"}})
	if d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 50}), gpuA); !errors.Is(d.Err(), NotTaken) || d.Percent != 50 || d.Servers[0].Percent != 26 {
		t.Errorf("the server takes nothing: %+v, problem %v", d, d.Err())
	}
}

// TestSlowStart: a daemon that takes a while between its sockets is asked when it has both.
func TestSlowStart(t *testing.T) {
	t.Parallel()
	w, _, _ := fresh(t)
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{BetweenSockets: 300 * time.Millisecond})
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	if d.Err() != nil || !d.Open || d.Percent != 26 || d.Starts != 1 {
		t.Errorf("%+v, problem %v", d, d.Err())
	}
}

// TestSlowStartOfAnother: a supervisor waits for the daemon that a predecessor has started, as long as that one
// would have.
func TestSlowStartOfAnother(t *testing.T) {
	t.Parallel()
	w := newWorld(t, emulated(t, "555.58.02"))
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{BetweenSockets: 2 * time.Second})
	w.killAt("started", func(c *Client) {
		_, _ = c.Sync(t.Context(), []Want{{GPU: gpuA, Percent: 26}})
	}, func(c *Client) {
		first := pids(w.processes(gpuA), aDaemon)
		if d := w.is(c, gpuA, ""); len(first) != 1 || d.PID != first[0] || d.Starts != 0 {
			t.Errorf("%+v, and the predecessor's was %v", d, first)
		}
		w.sync()
	})
}

// TestAnswers: an answer that cannot be read is a failure, and no size of it harms.
func TestAnswers(t *testing.T) {
	t.Parallel()
	w, _, _ := fresh(t)
	w.sync(Want{GPU: gpuA, Percent: 26})
	w.clients(1)
	pid := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA).PID
	const percent, servers = "get_default_active_thread_percentage", "get_server_list"
	for _, c := range []struct{ word, say string }{
		{percent, ""}, {percent, "\n"}, {percent, "26.0"}, {percent, "NaN\n"}, {percent, "0.0\n"}, {percent, "100.1\n"}, {percent, "26.0\n26.0\n"},
		{percent, "Not enough privilege\n"}, {percent, "26.0\x00\n"}, {percent, strings.Repeat("9", 100<<10) + "\n"},
		{servers, "-1\n"}, {servers, "0\n"}, {servers, "99999999999999999999\n"}, {servers, "4194305\n"}, {servers, "7\n7\n"},
		{servers, strings.Repeat("1\n", mostServers+1)}, {servers, "one\n"}, {servers, "\n"},
		{"get_client_list", "x\n"}, {"get_client_list", strings.Repeat("y\n", mostClients+1)}, {"get_server_status", "FINE\n"}, {"get_server_status", ""},
		{"get_active_thread_percentage", "\xff\xfe\n"},
	} {
		mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Say: map[string]string{c.word: c.say}})
		d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
		if !errors.Is(d.Err(), Unreadable) || d.PID != pid || d.Percent != 0 || len(d.Problem.Text) > 4<<10 {
			t.Errorf("%s answers %.20q: %+v, problem %v", c.word, c.say, d, d.Err())
		}
	}
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{})
	if d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA); d.Err() != nil || d.PID != pid || len(d.Servers) != 1 {
		t.Errorf("it answers again: %+v, problem %v", d, d.Err())
	}
	// A server that ends between two questions is no failure.
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Say: map[string]string{servers: "4194303\n"}})
	if d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA); d.Err() != nil || len(d.Servers) != 0 {
		t.Errorf("a server has ended: %+v, problem %v", d, d.Err())
	}
}

// TestDetach: the outcome for each client, and the counts.
func TestDetach(t *testing.T) {
	t.Parallel()
	w := newWorld(t, emulated(t, "555.58.02"))
	s, _ := w.run(w.hasty())
	w.sync(Want{GPU: gpuA, Percent: 26})
	w.is(NewClient(w.state), gpuA, "")
	all := w.clients(3)
	c := NewClient(w.state)
	detach := func(pids ...int) []Outcome {
		t.Helper()
		got, err := c.Detach(t.Context(), Detach{gpuA, pids})
		if err != nil {
			t.Fatal(err)
		}
		var out []Outcome
		for i, d := range got {
			if d.Client != pids[i] {
				t.Errorf("client %d is answered for %d", d.Client, pids[i])
			}
			out = append(out, d.Outcome)
		}
		return out
	}
	// On a machine that stands still now and then the daemon may not answer in time. Then nothing is
	// known, and the next try finds the client gone or there.
	late := 0
	detachInTime := func(pids ...int) []Outcome {
		t.Helper()
		for range 50 {
			got := detach(pids...)
			if !slices.Contains(got, Unanswered) {
				return got
			}
			for _, o := range got {
				if o == Unanswered {
					late++
				}
			}
		}
		t.Fatal("the daemon never answers in time")
		return nil
	}
	got := detachInTime(all[0].pid, os.Getpid())
	slow := false
	for i := 0; got[0] == Listed && i < 50; i++ { // on such a machine the client may be slow to go
		slow = true
		got = detachInTime(all[0].pid, os.Getpid())
	}
	if want := []Outcome{Gone, NoClient}; !slices.Equal(got, want) && (late == 0 && !slow || got[1] != NoClient) {
		t.Fatalf("%v, want %v", got, want)
	}
	detached := 0
	if got[0] == Gone {
		detached = 1
	}
	if !all[0].lost() {
		t.Error("the detached client has its context")
	}
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Sticky: true})
	if got := detachInTime(all[1].pid); got[0] != Listed {
		t.Errorf("a client that stays is %q", got[0])
	}
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Mute: true})
	began := time.Now()
	got = detach(all[2].pid, all[1].pid, 11, 12, 13, 14, 15, 16)
	if slices.ContainsFunc(got, func(o Outcome) bool { return o != Unanswered }) {
		t.Errorf("by a daemon that hangs: %q", got)
	}
	if took := time.Since(began); took > 4*deadline && late == 0 { // two at most
		t.Errorf("that took %v", took)
	}
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{DieAt: "terminate_client"})
	w.is(c, gpuA, "")
	if got := detach(all[2].pid); got[0] != Unanswered {
		t.Errorf("by a daemon that dies: %q", got[0])
	}
	if d := daemonOf(s.State(), gpuA); d.Detached != detached || d.TimedOut != 9+late {
		t.Errorf("counted: %d detached, %d without an answer", d.Detached, d.TimedOut)
	}
	for _, bad := range []Detach{{}, {gpuA, nil}, {gpuA, []int{0}}, {gpuA, []int{mostPID + 1}}, {gpuB, []int{1}}} {
		if _, err := c.Detach(t.Context(), bad); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

// TestClientsThatEndTogether: an agent has each container's clients detached by a call of its own, and a Deployment that
// becomes smaller has many that end at one moment.
func TestClientsThatEndTogether(t *testing.T) {
	t.Parallel()
	const many = 24
	w := newWorld(t, emulated(t, "555.58.02"))
	w.run(w.options())
	w.sync(Want{GPU: gpuA, Percent: 4})
	w.is(NewClient(w.state), gpuA, "")
	all := w.clients(many)
	c, errs := NewClient(w.state), make([]error, many)
	// As in TestDetach, the daemon may not answer in time, or the client be slow to go; no call is refused.
	detached := func(pid int) error {
		for try := range 50 {
			got, err := c.Detach(t.Context(), Detach{gpuA, []int{pid, os.Getpid()}})
			if err != nil {
				return err
			}
			if len(got) != 2 || got[0].Client != pid || got[1].Client != os.Getpid() || got[1].Outcome == Gone || got[1].Outcome == Listed {
				return fmt.Errorf("client %d: %+v", pid, got)
			}
			if is := got[0].Outcome; is == Gone || is == NoClient && try > 0 {
				return nil
			}
		}
		return fmt.Errorf("client %d stays", pid)
	}
	var ending sync.WaitGroup
	for i, one := range all {
		ending.Go(func() { errs[i] = detached(one.pid) })
	}
	ending.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for _, one := range all {
		if !one.lost() {
			t.Errorf("client %d has its context", one.pid)
		}
	}
	// One that may not be asked for is refused alone.
	if _, err := c.Detach(t.Context(), Detach{gpuA, []int{mostPID + 1}}); err == nil {
		t.Error("a PID that no process can have is asked for")
	}
}

// TestProbe: a program of the supervisor's own finds out that a server hangs which says it is active, and
// leaves nothing behind.
func TestProbe(t *testing.T) {
	t.Parallel()
	w := newWorld(t, emulated(t, "555.58.02"))
	opts := w.options()
	c := NewClient(w.state)
	text, err := json.Marshal(part{Role: "probe"})
	if err != nil {
		t.Fatal(err)
	}
	opts.Probe = []string{"/usr/bin/env", roleVariable + "=" + string(text), must(os.Executable())}
	w.run(opts)
	if got, err := c.Probe(t.Context(), gpuA); err == nil {
		t.Errorf("without a daemon: %q", got)
	}
	w.sync(Want{GPU: gpuA, Percent: 26, Serve: true})
	if got, err := c.Probe(t.Context(), gpuA); got != Answered || err != nil {
		t.Errorf("a server that serves: %q, %v", got, err)
	}
	if testing.Short() {
		return // the rest waits for a deadline
	}
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Stuck: true})
	began := time.Now()
	second := make(chan error, 1)
	go func() { time.Sleep(time.Second); _, err := c.Probe(t.Context(), gpuA); second <- err }()
	if got, err := c.Probe(t.Context(), gpuA); got != Hangs || err != nil || time.Since(began) < probeWait {
		t.Errorf("a server that hangs: %q, %v, after %v", got, err, time.Since(began))
	}
	if err := <-second; err == nil {
		t.Error("two probes of one GPU run")
	}
	if d := w.is(c, gpuA, ""); d.Servers[0].Status != Active || d.Clients() != 0 {
		t.Errorf("it leaves %+v", d)
	}
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{})
	if got, err := c.Probe(t.Context(), gpuA); got != Answered || err != nil {
		t.Errorf("a server that serves again: %q, %v", got, err)
	}
}

// TestOrphans: no daemon is started beside servers of a dead one, whose clients go on. When the GPU
// is taken out of MPS they are ended.
func TestOrphans(t *testing.T) {
	t.Parallel()
	w, _, stop := fresh(t)
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Outlive: true})
	w.sync(Want{GPU: gpuA, Percent: 26})
	w.clients(1)
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	server := d.Servers[0].PID
	if err := (process{d.PID, d.Start}).signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c := NewClient(w.state)
	d = w.is(c, gpuA, Orphans)
	stop() // a successor sees them, too
	w.run(w.options())
	d = w.is(c, gpuA, Orphans)
	if d.PID != 0 || d.Open || len(d.Servers) != 1 || d.Servers[0].PID != server || d.Starts != 0 {
		t.Errorf("%+v", d)
	}
	if got := pids(w.processes(gpuA), aServer); !slices.Equal(got, []int{server}) {
		t.Errorf("the servers are %v, want %d", got, server)
	}
	for _, dir := range []string{w.files(gpuA).control(), w.files(gpuA).pipe()} {
		if _, err := os.Lstat(filepath.Join(dir, controlSocket)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the dead daemon's socket is left in %s: %v", dir, err)
		}
	}
	if st := w.sync(); len(st.Daemons) != 0 {
		t.Errorf("not wanted any more: %+v", st)
	}
	if left := w.processes(gpuA); len(left) != 0 {
		t.Errorf("processes are left: %+v", left)
	}
}

// TestContainersAreNotBelieved: a process of a container that looks like a server of the GPU does
// not keep its daemon from being started, and is not ended.
func TestContainersAreNotBelieved(t *testing.T) {
	t.Parallel()
	w, _, _ := fresh(t)
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Outlive: true})
	tenant := exec.Command(filepath.Join(w.driver.Programs[0], "nvidia-cuda-mps-server"))
	tenant.Env = []string{pipeVariable + "=" + w.files(gpuA).control()}
	tenant.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	if err := tenant.Start(); errors.Is(err, unix.EPERM) {
		t.Skip("needs root, for a mount namespace")
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tenant.Process.Kill(); _ = tenant.Wait() })
	if d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA); d.Err() != nil || d.PID == 0 {
		t.Errorf("%+v, problem %v", d, d.Err())
	}
	w.sync()
	if self, err := processOf(tenant.Process.Pid); err != nil {
		t.Errorf("the tenant's process %+v was ended: %v", self, err)
	}
}

// TestUnreachable: a daemon without a socket that has servers is not ended.
func TestUnreachable(t *testing.T) {
	t.Parallel()
	w, _, stop := fresh(t)
	w.sync(Want{GPU: gpuA, Percent: 26})
	one := w.clients(1)[0]
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	if err := os.RemoveAll(w.files(gpuA).control()); err != nil {
		t.Fatal(err)
	}
	now := w.is(NewClient(w.state), gpuA, Unreachable)
	if now.PID != d.PID || now.Open || len(now.Servers) != 1 || now.Servers[0].PID != d.Servers[0].PID {
		t.Errorf("%+v, was %+v", now, d)
	}
	stop() // a successor sees the servers, too: otherwise the agent could not know them from a program
	w.run(w.options())
	now = w.is(NewClient(w.state), gpuA, Unreachable)
	if len(now.Servers) != 1 || now.Servers[0].PID != d.Servers[0].PID {
		t.Errorf("a successor has %+v, want server %d", now, d.Servers[0].PID)
	}
	// When the agent has seen that no client is left, another daemon takes its place.
	w.sync(Want{GPU: gpuA, Percent: 26, Serve: true, EndOrphans: true})
	if !one.lost() {
		t.Error("the client has its context, and the server was ended")
	}
	if next := w.is(NewClient(w.state), gpuA, ""); next.PID == d.PID || !next.Serving || next.Servers[0].PID == d.Servers[0].PID {
		t.Errorf("%+v, was %+v", next, d)
	}
	w.sync()
	if left := w.processes(gpuA); len(left) != 0 {
		t.Errorf("processes are left: %+v", left)
	}
}

// TestOutdated: a daemon outlives an update of the driver's files, and says so.
func TestOutdated(t *testing.T) {
	t.Parallel()
	w, _, stop := fresh(t)
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	mpstest.Replace(t, w.driver.Programs[0], "580.65.06")
	c := NewClient(w.state)
	for range 2 {
		now := w.is(c, gpuA, Outdated)
		if now.PID != d.PID || now.Version != "555.58.02" || now.Percent != 26 {
			t.Errorf("%+v", now)
		}
		stop()
		_, stop = w.run(w.options())
	}
	w.sync()
	if d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA); d.Err() != nil || d.Version != "580.65.06" {
		t.Errorf("in and out again: %+v, problem %v", d, d.Err())
	}
	// The driver's program is gone: what runs goes on, and is not asked any more.
	if err := os.Remove(filepath.Join(w.driver.Programs[0], controlProgram)); err != nil {
		t.Fatal(err)
	}
	if now := w.is(c, gpuA, NoProgram); now.PID == 0 {
		t.Errorf("without the program: %+v", now)
	}
}

// TestDoesNotStart: a daemon that does not come up is started again with growing pauses.
func TestDoesNotStart(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits for pauses; make test-all runs it")
	}
	w, _, _ := fresh(t)
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{DieAtStart: true})
	began := time.Now()
	w.sync(Want{GPU: gpuA, Percent: 26})
	c := NewClient(w.state)
	d := w.is(c, gpuA, NotStarted)
	for time.Since(began) < 1200*time.Millisecond {
		time.Sleep(20 * time.Millisecond)
		d = w.is(c, gpuA, NotStarted)
	}
	most := 1
	for at, pause := firstPause, firstPause; at <= time.Since(began); at, pause = at+2*pause, 2*pause {
		most++ // each pause is twice the one before
	}
	if d.Starts < 1 || d.Starts > most || d.Open {
		t.Errorf("after %v: %+v, want at most %d starts", time.Since(began), d, most)
	}
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{})
	w.is(c, gpuA, "")
}

// TestOutputIsBounded: what a daemon prints does not fill the disk.
func TestOutputIsBounded(t *testing.T) {
	t.Parallel()
	w, _, _ := fresh(t)
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	f := w.files(gpuA)
	for _, path := range []string{f.output(), filepath.Join(f.logs(), "server.log")} {
		out, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := out.WriteString(strings.Repeat("x", mostOutput+1)); err != nil {
			t.Fatal(err)
		}
		_ = out.Close()
	}
	w.sync(Want{GPU: gpuA, Percent: 26})
	w.sync(Want{GPU: gpuA, Percent: 26})
	for _, path := range []string{f.output(), filepath.Join(f.logs(), "server.log")} {
		if info, err := os.Stat(path); err != nil || info.Size() > mostOutput/2 {
			t.Errorf("%s has %d bytes, %v", path, info.Size(), err)
		}
	}
	data, err := os.ReadFile(f.output())
	if err != nil || !strings.Contains(string(data), fmt.Sprintf("Control %5d]", d.PID)) || strings.Contains(string(data), "\x00") {
		t.Errorf("the daemon does not print behind it: %.100q, %v", data, err)
	}
}
