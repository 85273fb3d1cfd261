// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// initMain is the node's PID 1. It makes the namespaces it was born into a
// machine, then starts processes as it is asked to, reaps them and whatever is
// left to it, and leads the API server's clients in. It does not return while
// the node lives: the kernel ends the node with it.
func initMain(args []string) error {
	if len(args) != 1 || os.Getpid() != 1 {
		return fmt.Errorf("%s: is started by a node's keeper only", initCommand)
	}
	n := Node{name: filepath.Base(args[0]), dir: args[0]}
	spec, err := n.spec()
	if err != nil {
		return fmt.Errorf("read what to start: %w", err)
	}
	door := os.NewFile(3, "door")
	if err := joinCgroups(spec.cgroup()); err != nil {
		return err
	}
	if err := makeRoot(n, spec); err != nil {
		return fmt.Errorf("make the node's root: %w", err)
	}
	if spec.Join != nil {
		err = joinNetwork(spec, door)
	} else {
		err = makeNetwork(spec)
	}
	if err != nil {
		return fmt.Errorf("make the node's network: %w", err)
	}
	if err := syscall.Sethostname([]byte(spec.Name)); err != nil {
		return fmt.Errorf("name the node: %w", err)
	}
	env := nodeEnv(Layout{cache: spec.Cache}, []string{"HOME=/root", "LANG=C.UTF-8", "USER=root"})
	for _, e := range env {
		key, value, _ := strings.Cut(e, "=")
		os.Setenv(key, value)
	}
	s := &supervisor{node: n, env: env, processes: map[string]*process{}}
	go s.reap()
	if spec.Join == nil {
		api, err := net.FileListener(door)
		if err != nil {
			return fmt.Errorf("take over the listener: %w", err)
		}
		go forward(api, "127.0.0.1:443")
	}
	// The processes of the node get no file of the host's.
	if err := door.Close(); err != nil {
		return fmt.Errorf("close what the keeper has opened: %w", err)
	}
	return s.serve()
}

// forward joins each connection to listener with a new one to address.
func forward(listener net.Listener, address string) {
	for {
		client, err := listener.Accept()
		if err != nil {
			fmt.Fprintf(os.Stderr, "accept a client of the API server: %v\n", err)
			return
		}
		go func() {
			defer client.Close()
			server, err := net.Dial("tcp", address)
			if err != nil {
				return // not up: the client sees a closed connection
			}
			defer server.Close()
			done := make(chan struct{}, 2)
			pipe := func(to, from net.Conn) {
				_, _ = io.Copy(to, from) // either end may vanish at any time
				_ = to.(*net.TCPConn).CloseWrite()
				done <- struct{}{}
			}
			go pipe(server, client)
			go pipe(client, server)
			<-done
			<-done
		}()
	}
}

// stopPatience is how long a process has between SIGTERM and SIGKILL.
const stopPatience = 20 * time.Second

// supervisor starts processes and remembers how they stand.
type supervisor struct {
	node Node
	env  []string

	mu        sync.Mutex // guards processes, order and all that is in them
	processes map[string]*process
	order     []string // names by first start
}

type process struct {
	Process
	pid     int
	starts  int
	wanted  bool // it should run; false once someone asked for its end
	status  string
	bad     bool          // it ended though wanted
	ended   chan struct{} // closed when the present run has ended
	backoff time.Duration
}

func (s *supervisor) serve() error {
	path := s.node.path("control")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove an older control socket: %w", err)
	}
	var listener net.Listener
	err := viaDirectory(path, func(address string) (err error) {
		listener, err = net.Listen("unix", address)
		return err
	})
	if err != nil {
		return fmt.Errorf("listen for orders: %w", err)
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			return fmt.Errorf("take an order: %w", err)
		}
		go func() {
			defer conn.Close()
			var req request
			if json.NewDecoder(conn).Decode(&req) != nil {
				return // the client is gone
			}
			var rep reply
			if err := s.do(req); err != nil {
				rep.Error = err.Error()
			}
			rep.States = s.states()
			_ = json.NewEncoder(conn).Encode(rep) // the client may be gone
		}()
	}
}

func (s *supervisor) do(req request) error {
	name := req.Process.Name
	switch req.Op {
	case "ps":
		return nil
	case "start":
		return s.start(req.Process)
	case "stop":
		return s.stop(name, syscall.SIGTERM)
	case "kill":
		return s.stop(name, syscall.SIGKILL)
	case "supervise":
		s.supervise()
		return nil
	case "restart":
		if err := s.stop(name, syscall.SIGTERM); err != nil {
			return err
		}
		return s.start(Process{Name: name})
	}
	return fmt.Errorf("no operation %q", req.Op)
}

// supervise has all processes that there are started again whenever they end by
// themselves, as systemd and static pods do on users' nodes.
func (s *supervisor) supervise() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.processes {
		p.Restart = true
	}
}

func (s *supervisor) states() []ProcessState {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []ProcessState
	for _, name := range s.order {
		p := s.processes[name]
		out = append(out, ProcessState{Name: name, PID: p.pid, Starts: p.starts, State: p.status, Unexpected: p.bad})
	}
	return out
}

func (s *supervisor) start(want Process) error {
	if !nodeName.MatchString(want.Name) {
		return fmt.Errorf("start %q: a name has lower-case letters, digits and hyphens", want.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.processes[want.Name]
	switch {
	case p != nil && p.pid != 0:
		return fmt.Errorf("start %s: it runs already, as PID %d", want.Name, p.pid)
	case p == nil && len(want.Command) == 0:
		return fmt.Errorf("start %s: it was never started, so give its command after --", want.Name)
	case p == nil:
		p = &process{}
		s.processes[want.Name] = p
		s.order = append(s.order, want.Name)
	}
	if len(want.Command) > 0 {
		p.Process = want
	}
	p.wanted, p.backoff = true, 100*time.Millisecond
	return s.startLocked(p)
}

func (s *supervisor) startLocked(p *process) error {
	fail := func(err error) error {
		p.status, p.bad = "failed: "+err.Error(), true
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	log, err := os.OpenFile(s.node.log(p.Name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fail(err)
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fail(err)
	}
	defer null.Close()
	path, err := lookPath(p.Command[0])
	if err != nil {
		return fail(err)
	}
	// Not os/exec: its Wait and reap would each take the other's children.
	pid, err := syscall.ForkExec(path, p.Command, &syscall.ProcAttr{
		Dir: "/", Env: withEnv(s.env, p.Env...),
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fail(fmt.Errorf("%s: %w", path, err))
	}
	p.pid, p.status, p.bad = pid, "running", false
	p.starts++
	p.ended = make(chan struct{})
	return nil
}

func lookPath(program string) (string, error) {
	if strings.Contains(program, "/") {
		return program, nil
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		path := filepath.Join(dir, program)
		if st, err := os.Stat(path); err == nil && !st.IsDir() && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not in %s", program, os.Getenv("PATH"))
}

// stop ends a process and returns when it has ended. One that does not run
// stays down.
func (s *supervisor) stop(name string, sig syscall.Signal) error {
	s.mu.Lock()
	p := s.processes[name]
	if p == nil {
		s.mu.Unlock()
		return fmt.Errorf("no process %q was ever started", name)
	}
	p.wanted = false
	pid, ended := p.pid, p.ended
	if pid != 0 {
		_ = syscall.Kill(pid, sig) // it is not reaped yet, so the PID is its own
	} else {
		p.status, p.bad = "stopped", false
	}
	s.mu.Unlock()
	if pid == 0 {
		return nil
	}
	select {
	case <-ended:
		return nil
	case <-time.After(stopPatience):
	}
	s.mu.Lock()
	if p.pid == pid {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	s.mu.Unlock()
	<-ended
	return nil
}

// reap waits for children of all kinds: those that were started, and orphans
// that the kernel hands to PID 1.
func (s *supervisor) reap() {
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	for range died {
		for s.reapOne() {
		}
	}
}

func (s *supervisor) reapOne() bool {
	// Held across wait4, so that no PID is reaped between the fork and the
	// moment that its number is known, nor signalled after.
	s.mu.Lock()
	defer s.mu.Unlock()
	var ws syscall.WaitStatus
	pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
	if err == syscall.EINTR {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	for _, name := range s.order {
		if p := s.processes[name]; p.pid == pid {
			s.endedLocked(p, ws)
		}
	}
	return true
}

func (s *supervisor) endedLocked(p *process, ws syscall.WaitStatus) {
	how := fmt.Sprintf("exit status %d", ws.ExitStatus())
	if ws.Signaled() {
		how = ws.Signal().String()
	}
	p.pid = 0
	p.bad = p.wanted
	if p.wanted {
		p.status = "ended by itself: " + how
	} else {
		p.status = "stopped: " + how
	}
	close(p.ended)
	if p.wanted && p.Restart {
		run := p.starts
		time.AfterFunc(p.backoff, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if p.wanted && p.pid == 0 && p.starts == run && s.startLocked(p) == nil { // if not, its state says why
				p.status = "running; the one before ended by itself: " + how
			}
		})
		p.backoff = min(2*p.backoff, 10*time.Second)
	}
}
