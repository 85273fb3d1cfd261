// SPDX-License-Identifier: Apache-2.0

package mpstest

import (
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

// daemon is an emulated control daemon.
type daemon struct {
	dir string

	mu      sync.Mutex // guards what follows
	percent float64
	servers map[int]*mpsServer
	ui      bool // a control program is connected
}

type mpsServer struct {
	cmd     *exec.Cmd
	hold    io.Closer // what the server's life hangs on
	percent float64
	clients map[int]net.Conn
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
	go endWithTest()
	d := &daemon{dir: dir, percent: 100, servers: map[int]*mpsServer{}}
	_ = syscall.Unlink(filepath.Join(dir, "log"))
	if err := syscall.Mkfifo(filepath.Join(dir, "log"), 0o777); err != nil {
		return 1
	}
	_ = os.Chmod(filepath.Join(dir, "log"), 0o777)
	d.logf("Starting control daemon using socket %s/control", dir)
	errs := make(chan error)
	for name, mode := range map[string]os.FileMode{"control_privileged": 0o755, "control": 0o666} {
		path := filepath.Join(dir, name)
		_ = os.Remove(path)
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			return 1
		}
		l.SetUnlinkOnClose(false)
		if err := os.Chmod(path, mode); err != nil {
			return 1
		}
		go func() { errs <- d.accept(l, name == "control_privileged") }()
	}
	if version() >= "550" {
		_ = os.WriteFile(filepath.Join(dir, "nvidia-cuda-mps-control.pid"), []byte(strconv.Itoa(os.Getpid())), 0o666)
	}
	<-errs
	_ = lock.Close() // until here, lest it be collected
	return 1
}

func (d *daemon) logf(format string, args ...any) {
	fmt.Printf("[%s Control %5d] %s\n", time.Now().Format("2006-01-02 15:04:05.000"), os.Getpid(), fmt.Sprintf(format, args...))
}

func (d *daemon) accept(l *net.UnixListener, privileged bool) error {
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
func (d *daemon) serve(c *net.UnixConn, privileged bool) {
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
// moment.
func (d *daemon) client(c *net.UnixConn, packet []byte) {
	pid := peer(c)
	s, err := d.serverFor()
	if err != nil {
		_, _ = c.Write([]byte("805"))
		return
	}
	d.mu.Lock()
	s.clients[pid] = c
	percent := s.percent
	d.mu.Unlock()
	d.logf("NEW CLIENT %d from user 0: Server already exists", pid)
	_, _ = fmt.Fprintf(c, "%.1f", percent)
	_, _ = c.Read(packet)
	d.mu.Lock()
	if s.clients[pid] == c {
		delete(s.clients, pid)
	}
	d.mu.Unlock()
}

// serverFor returns the server, which it starts if there is none.
func (d *daemon) serverFor() (*mpsServer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.servers {
		return s, nil
	}
	cmd := exec.Command(filepath.Join(here(), serverName))
	hold, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	pid := cmd.Process.Pid
	s := &mpsServer{cmd: cmd, hold: hold, percent: d.percent, clients: map[int]net.Conn{}}
	d.servers[pid] = s
	d.logf("Starting new server %d for user 0", pid)
	go func() {
		_ = cmd.Wait()
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, c := range s.clients {
			_ = c.Close()
		}
		delete(d.servers, pid)
	}()
	return s, nil
}

// server is nvidia-cuda-mps-server. It lives as long as its daemon, or longer.
func server() int {
	_, _ = io.Copy(io.Discard, os.Stdin)
	for behaviour().Outlive {
		time.Sleep(10 * time.Millisecond)
	}
	return 0
}
