// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

// control is nvidia-cuda-mps-control.
func control(args []string) int {
	foreground := slices.Contains(args, "-f")
	known := []string{"-f"}
	multi := version() >= "555" // the first that has it
	if multi {
		known = append(known, "-multiuser-server")
	}
	for _, a := range args {
		if slices.Contains(known, a) {
			continue
		}
		if multi {
			fmt.Print("CUDA MPS Control for Linux/Unix.\n\n  This program allows multiple CUDA processes to share a single GPU context.\n\n")
			return 1
		}
		foreground = false // an older one takes itself for a program that speaks to a daemon
	}
	if foreground {
		return daemonMain()
	}
	return speak()
}

// speak gives the daemon the lines of standard input.
func speak() int {
	c, err := net.Dial("unixpacket", filepath.Join(os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "control_privileged"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "Cannot find MPS control daemon process")
		return 1
	}
	defer c.Close()
	if _, err := c.Write([]byte("ui")); err != nil {
		return 1
	}
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		return 1
	}
	packet := make([]byte, 128<<10)
	for line := range strings.Lines(string(input)) {
		if _, err := c.Write([]byte("cmd " + strings.TrimSuffix(line, "\n"))); err != nil {
			fmt.Fprintln(os.Stderr, "Cannot send command to MPS control daemon process")
			return 1
		}
		n, err := c.Read(packet)
		if err != nil || n == 0 {
			if strings.HasPrefix(line, "quit") {
				return 0
			}
			return 1
		}
		os.Stdout.Write(packet[1:n]) // behind a byte that lets an empty answer be one
	}
	return 0
}

// controlDaemon is an emulated control daemon.
type controlDaemon struct {
	dir   string
	world *world // nil if there is none

	mu      sync.Mutex // guards what follows
	percent float64
	servers map[int]*mpsServer
	ui      bool // a control program is connected
	failed  int  // 1 if a server has ended by itself with another status than 0, else 0
}

type mpsServer struct {
	cmd     *exec.Cmd
	hold    io.Closer // what the server's life hangs on
	known   int       // its PID as the world knows it
	percent float64
	clients map[int]net.Conn
	// begun is closed when the server is ready, or has ended before that; stands tells which, from then on.
	begun  chan struct{}
	stands bool
}

func daemonMain() int {
	dir := os.Getenv("CUDA_MPS_PIPE_DIRECTORY")
	lock, err := os.OpenFile(filepath.Join(dir, "control_lock"), os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		fmt.Printf("Cannot access CUDA_MPS_PIPE_DIRECTORY=%s\n", dir)
		return 1
	}
	if err := unix.FcntlFlock(lock.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		fmt.Println("An instance of this daemon is already running")
		return 1
	}
	if behaviour().DieAtStart {
		fmt.Println("Internal error")
		return 1
	}
	signal.Ignore(syscall.SIGPIPE)
	w, err := theWorld()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	endWith(w)
	d := &controlDaemon{dir: dir, world: w, percent: 100, servers: map[int]*mpsServer{}}
	_ = syscall.Unlink(filepath.Join(dir, "log"))
	if err := syscall.Mkfifo(filepath.Join(dir, "log"), 0o777); err != nil {
		return 1
	}
	_ = os.Chmod(filepath.Join(dir, "log"), 0o777)
	d.logf("Starting control daemon using socket %s/control", dir)
	errs := make(chan error)
	// The socket for clients comes last, as NVIDIA's 535, 550 and 555 have it: a daemon that listens there
	// listens for control programs, too.
	for i, socket := range []struct {
		name string
		mode os.FileMode
	}{{"control_privileged", 0o755}, {"control", 0o666}} {
		if i > 0 {
			time.Sleep(behaviour().BetweenSockets)
		}
		path := filepath.Join(dir, socket.name)
		_ = os.Remove(path)
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			return 1
		}
		l.SetUnlinkOnClose(false)
		if err := os.Chmod(path, socket.mode); err != nil {
			return 1
		}
		go func() { errs <- d.accept(l, socket.name == "control_privileged") }()
	}
	if version() >= "550" {
		_ = os.WriteFile(filepath.Join(dir, "nvidia-cuda-mps-control.pid"), []byte(strconv.Itoa(os.Getpid())), 0o666)
	}
	<-errs
	_ = lock.Close() // until here, lest it be collected
	return 1
}

func (d *controlDaemon) logf(format string, args ...any) {
	fmt.Printf("[%s Control %5d] %s\n", time.Now().Format("2006-01-02 15:04:05.000"), os.Getpid(), fmt.Sprintf(format, args...))
}

func (d *controlDaemon) accept(l *net.UnixListener, privileged bool) error {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		d.logf("Accepting connection...")
		go d.serve(c, privileged)
	}
}

// serve serves a control program or a client, as the first packet says.
func (d *controlDaemon) serve(c *net.UnixConn, privileged bool) {
	defer c.Close()
	packet := make([]byte, 128<<10)
	n, err := c.Read(packet)
	if err != nil {
		d.logf("User did not send valid credentials")
		return
	}
	if string(packet[:n]) == "client" {
		d.client(c, packet)
		return
	}
	d.mu.Lock()
	busy := d.ui
	d.ui = true
	d.mu.Unlock()
	if busy {
		return // it serves one at a time
	}
	d.logf("NEW UI")
	defer func() {
		d.mu.Lock()
		d.ui = false
		d.mu.Unlock()
		d.logf("UI closed")
	}()
	for {
		n, err := c.Read(packet)
		if err != nil || n == 0 {
			return
		}
		command, ok := strings.CutPrefix(string(packet[:n]), "cmd ")
		if !ok {
			return
		}
		d.logf("Cmd:%s", command)
		b := behaviour()
		for b.Mute {
			time.Sleep(10 * time.Millisecond)
			b = behaviour()
		}
		word, _, _ := strings.Cut(command, " ")
		if b.DieAt != "" && b.DieAt == word {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		answer, instead := b.Say[word]
		if !instead {
			answer = d.command(command, privileged, b)
		}
		if _, err := c.Write([]byte(" " + answer)); err != nil {
			return
		}
	}
}

// peer returns the PID of a connection's other end.
func peer(c *net.UnixConn) int {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	return pid
}

// client serves a client until it leaves or is terminated. Its percentage is its server's at this
// moment, until the world says otherwise.
func (d *controlDaemon) client(c *net.UnixConn, packet []byte) {
	pid := peer(c)
	s, err := d.serverFor()
	if err != nil {
		d.logf("%v", err)
		_, _ = fmt.Fprintf(c, "error %d", emulator.ErrMPSConnection)
		return
	}
	d.logf("NEW CLIENT %d from user 0: Server already exists", pid)
	for { // a server with a fault takes no client until all that it has are gone
		fault, err := d.world.inFault(s.known)
		if (err != nil || !fault) && !behaviour().Stuck {
			break
		}
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := c.Read(packet); !errors.Is(err, os.ErrDeadlineExceeded) {
			return // it waits no more
		}
	}
	_ = c.SetReadDeadline(time.Time{})
	d.mu.Lock()
	if len(s.clients) >= emulator.MostMPSClients {
		d.mu.Unlock()
		_, _ = fmt.Fprintf(c, "error %d", emulator.ErrMPSClients)
		return
	}
	s.clients[pid] = c
	percent := s.percent
	d.mu.Unlock()
	_, _ = fmt.Fprintf(c, "server %d percent %.1f", s.known, percent)
	_, _ = c.Read(packet)
	d.mu.Lock()
	if s.clients[pid] == c {
		delete(s.clients, pid)
	}
	d.mu.Unlock()
}

// serverFor returns the server, which it starts if there is none. It waits until the server is ready.
func (d *controlDaemon) serverFor() (*mpsServer, error) {
	d.mu.Lock()
	s, err := d.serverLocked()
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	<-s.begun
	if !s.stands {
		return nil, fmt.Errorf("server %d has not started", s.cmd.Process.Pid)
	}
	return s, nil
}

// serverLocked returns the server, or one that is about to start.
func (d *controlDaemon) serverLocked() (*mpsServer, error) {
	for _, s := range d.servers {
		return s, nil
	}
	cmd := exec.Command(filepath.Join(here(), serverName), fmt.Sprint(d.percent))
	hold, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	pid := cmd.Process.Pid
	s := &mpsServer{cmd: cmd, hold: hold, percent: d.percent, clients: map[int]net.Conn{}, begun: make(chan struct{})}
	d.servers[pid] = s
	d.logf("Starting new server %d for user 0", pid)
	go d.follow(s, out)
	return s, nil
}

// follow follows a server from its start to its end.
func (d *controlDaemon) follow(s *mpsServer, out io.Reader) {
	pid := s.cmd.Process.Pid
	line, _ := bufio.NewReader(out).ReadString('\n')
	d.mu.Lock()
	s.stands = ready(line, &s.known)
	if s.stands {
		d.logf("NEW SERVER %d: Ready", pid)
	} else {
		d.logf("server %d: %s", pid, strings.TrimSpace(line))
	}
	d.mu.Unlock()
	close(s.begun)
	if !s.stands {
		_ = s.hold.Close()
	}
	_ = s.cmd.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range s.clients {
		_ = c.Close()
	}
	delete(d.servers, pid)
	if s.cmd.ProcessState.ExitCode() > 0 {
		d.failed = 1
	}
	d.logf("Server %d exited with status %d", pid, s.cmd.ProcessState.ExitCode())
}

func ready(line string, pid *int) bool {
	_, err := fmt.Sscanf(line, "ready %d", pid)
	return err == nil
}

// server is nvidia-cuda-mps-server. It lives as long as its daemon, or longer.
func server(args []string) int {
	w, err := theWorld()
	percent := 100.0
	if err == nil && len(args) == 1 {
		percent, err = strconv.ParseFloat(args[0], 64)
	}
	endWith(w)
	if behaviour().NoCard {
		fmt.Println("no card")
		return 1
	}
	for behaviour().StartsSlowly {
		time.Sleep(10 * time.Millisecond)
	}
	pid := 0
	if err == nil {
		pid, err = w.serve(percent)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Printf("ready %d\n", pid)
	_, _ = io.Copy(io.Discard, os.Stdin)
	for behaviour().Outlive {
		time.Sleep(10 * time.Millisecond)
	}
	return 0
}
