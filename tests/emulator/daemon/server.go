// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
)

// protocol is the version that the libraries and this daemon must agree on.
const protocol = 2

// maxMessage bounds one request; replies are as long as their lists.
const maxMessage = 64 << 10

// Server serves a world on a socket.
type Server struct {
	World *emulator.World
	// Proc is where the daemon's own PID namespace can be read. Default /proc.
	Proc string
	// Driver is the driver root; what package install recorded there follows
	// the world. Empty, or nothing recorded: the world has no files.
	Driver string
	// Log gets one line for each thing done to the world. Nil is silent.
	Log *slog.Logger

	laying sync.Mutex    // one change of the files at a time
	laid   atomic.Uint64 // the World.Layout that the files of MIG instances show
	atLaid atomic.Int64  // nanoseconds that callers have waited for those files

	mu      sync.Mutex
	clients map[program]*client // guarded by mu
	holders map[int]bool        // PIDs whose death is watched; guarded by mu
}

// program is a process from its exec to the next, or to its end: what it has of
// the driver does not survive an exec, its PID does.
type program struct {
	pid   int
	image uint64 // differs between the programs of one process
}

// client is a program that has the driver open.
type client struct {
	session *emulator.Session
	pidfd   *os.File
	page    *os.File
	words   []byte
	conns   int // guarded by Server.mu

	mu   sync.Mutex
	open []int // descriptors of its connections; guarded by mu, which is taken last
}

// lives says whether the program runs: its process does, and has not closed all
// connections as an exec does. Those who read them may not have noticed yet.
func (c *client) lives() bool {
	if dead(c.pidfd.Fd()) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, fd := range c.open {
		polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(polled, 0); err != nil || n == 0 || polled[0].Revents&unix.POLLHUP == 0 {
			return true
		}
	}
	return false
}

// Listen opens the socket, for everybody, in place of one that a dead daemon
// left behind. A path too long for a socket's address is reached through its
// directory.
func Listen(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make socket's directory: %w", err)
	}
	short, done, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer done()
	if c, err := net.Dial("unixpacket", short); err == nil {
		c.Close()
		return nil, fmt.Errorf("listen on %s: another daemon answers there", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove stale socket: %w", err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: short, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false) // short may not lead there any more
	if err := os.Chmod(path, 0o666); err != nil {
		l.Close()
		return nil, fmt.Errorf("open socket to all: %w", err)
	}
	return l, nil
}

// shortPath names a socket by way of a descriptor of its directory where its
// own path does not fit into a socket's address.
func shortPath(path string) (short string, done func(), err error) {
	if len(path) < len(unix.RawSockaddrUnix{}.Path) {
		return path, func() {}, nil
	}
	fd, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, fmt.Errorf("open socket's directory: %w", err)
	}
	short = filepath.Join("/proc/self/fd", strconv.Itoa(fd), filepath.Base(path))
	return short, func() { unix.Close(fd) }, nil
}

// Serve answers until ctx ends; then the listener and all connections are
// closed.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	if s.Proc == "" {
		s.Proc = "/proc"
	}
	if s.Log == nil {
		s.Log = slog.New(slog.DiscardHandler)
	}
	s.mu.Lock()
	s.clients, s.holders = map[program]*client{}, map[int]bool{}
	s.mu.Unlock()

	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	// Waited for: the next daemon asks whether somebody answers on this socket.
	running.Go(func() {
		<-ctx.Done()
		l.Close()
	})
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			if err == nil {
				c.Close() // the program would wait for an answer for ever
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		running.Go(func() {
			if err := s.converse(ctx, &running, c); err != nil && ctx.Err() == nil {
				s.Log.Debug("connection ended", "err", err)
			}
		})
	}
}

// converse serves one connection.
func (s *Server) converse(ctx context.Context, running *sync.WaitGroup, conn *net.UnixConn) error {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	peer, err := credentials(conn)
	if err != nil {
		return err
	}
	defer peer.pidfd.Close()

	request := make([]byte, maxMessage)
	n, err := conn.Read(request)
	if err != nil {
		return err
	}
	hello, err := readHello(request[:n])
	if err != nil {
		if refusal := emulator.VersionMismatch; errors.Is(err, refusal) {
			conn.Write(binary.LittleEndian.AppendUint32(nil, uint32(refusal)))
		}
		return err
	}
	at := program{peer.pid, hello.image}
	c, err := s.attach(ctx, running, peer, at, hello.refs)
	if err != nil {
		return err
	}
	defer s.detach(at, c, peer.conn)
	// Return 0 and a head without meaning, then the name of the world.
	reply := binary.LittleEndian.AppendUint64(make([]byte, 16), s.World.Boot())
	if _, _, err := conn.WriteMsgUnix(reply, unix.UnixRights(int(c.page.Fd())), nil); err != nil {
		return err
	}
	for {
		n, err := conn.Read(request)
		if err != nil {
			return err
		}
		if args, ok := isControl(request[:n]); ok {
			reply, err = json.Marshal(s.control(ctx, running, peer, args))
			if err != nil {
				return err
			}
		} else if id, ok := isExport(request[:n]); ok {
			if err := s.export(ctx, running, conn, c.session, id); err != nil {
				return err
			}
			continue
		} else {
			reply = c.session.Serve(request[:n], reply[:0])
			if err := s.settle(); err != nil {
				s.Log.Error("the driver's files do not follow the world", "err", err)
			}
		}
		if _, err := conn.Write(reply); err != nil {
			return err
		}
	}
}

// settle lays the files of MIG instances where some came or went: a program that
// made one finds them when its call has returned.
func (s *Server) settle() error {
	if s.World.Layout() == s.laid.Load() {
		return nil
	}
	began := time.Now()
	defer func() { s.atLaid.Add(int64(time.Since(began))) }()
	s.laying.Lock()
	defer s.laying.Unlock()
	now := s.World.Layout()
	if now == s.laid.Load() {
		return nil
	}
	s.laid.Store(now)
	return install.FollowInstances(s.Driver, s.World)
}

// LayingTime is how long calls have waited for the files of MIG instances, all
// together: a time that no hardware takes.
func (s *Server) LayingTime() time.Duration { return time.Duration(s.atLaid.Load()) }

// hello is what a program says of itself when it connects.
type hello struct {
	refs  int    // how often the process has initialised the driver already
	image uint64 // of its program
}

// readHello reads a connection's first message: a handle and the name hello,
// then the protocol's version, refs and image.
func readHello(m []byte) (hello, error) {
	const head = 4 + 1 + len("hello")
	if len(m) < head+4 || string(m[5:head]) != "hello" {
		return hello{}, errors.New("connection does not begin with hello")
	}
	if v := binary.LittleEndian.Uint32(m[head:]); v != protocol {
		return hello{}, fmt.Errorf("protocol %d, want %d: %w", v, protocol, emulator.VersionMismatch)
	}
	if len(m) != head+16 {
		return hello{}, errors.New("hello is cut short")
	}
	return hello{int(binary.LittleEndian.Uint32(m[head+4:])), binary.LittleEndian.Uint64(m[head+8:])}, nil
}

// peer is the process at the other end of a connection.
type peer struct {
	pid, uid int
	pidfd    *os.File
	conn     int // the connection's descriptor
}

func credentials(conn *net.UnixConn) (peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return peer{}, err
	}
	var p peer
	var inner error
	err = raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); inner != nil {
			return
		}
		p.pid, p.uid, p.conn = int(cred.Pid), int(cred.Uid), int(fd)
		if p.pid == 0 {
			inner = errors.New("the process lives outside the daemon's PID namespace")
			return
		}
		var pfd int
		if pfd, inner = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); inner != nil {
			// Before Linux 6.5; the PID is fresh, so this is the same process.
			pfd, inner = unix.PidfdOpen(p.pid, 0)
		}
		if inner == nil {
			unix.SetNonblock(pfd, true)
			p.pidfd = os.NewFile(uintptr(pfd), "pidfd")
		}
	})
	if err = errors.Join(err, inner); err != nil {
		return peer{}, fmt.Errorf("read peer's credentials: %w", err)
	}
	return p, nil
}

// attach counts a connection in, opening a session for the first one of a
// process.
func (s *Server) attach(ctx context.Context, running *sync.WaitGroup, p peer, at program, refs int) (*client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, ok := s.clients[at]; ok {
		c.conns++
		c.mu.Lock()
		defer c.mu.Unlock()
		c.open = append(c.open, p.conn)
		return c, nil
	}
	c := &client{conns: 1, open: []int{p.conn}}
	var err error
	if c.pidfd, err = dup(p.pidfd); err != nil {
		return nil, fmt.Errorf("watch process %d: %w", p.pid, err)
	}
	if err := c.makePage(); err != nil {
		c.pidfd.Close()
		return nil, err
	}
	// A process that this namespace cannot see sees nothing of it either.
	see := func(int) (int, bool) { return 0, false }
	if v, err := newView(s.Proc, p.pid); err == nil {
		see = v.see
	}
	nodes := s.nodes(p.pid)
	c.session = s.World.Open(emulator.Opening{
		PID: p.pid, Unprivileged: p.uid != 0, See: see, Node: nodes.gpu, Capability: nodes.capability, Initialised: refs,
		Alive: c.lives, Cgroup: func(fd int) (emulator.Cgroup, error) { return openCgroup(s.Proc, p.pid, fd) },
		Container: containerOf(s.Proc, p.pid),
		Page:      unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(c.words))), emulator.PageWords+1),
	})
	s.clients[at] = c
	// A call that blocks must not outlive its process.
	if fd, err := dup(p.pidfd); err == nil {
		running.Go(func() {
			if died(ctx, fd) {
				c.session.Close()
			}
		})
	}
	return c, nil
}

func (c *client) makePage() error {
	const (
		size = (emulator.PageWords + 1) * 8
		// Programs map whole pages, which have 64 KiB on some processors.
		file = 64 << 10
	)
	fd, err := unix.MemfdCreate("gpu-emulator", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make page: %w", err)
	}
	c.page = os.NewFile(uintptr(fd), "page")
	if err := c.page.Truncate(file); err != nil {
		c.page.Close()
		return fmt.Errorf("make page: %w", err)
	}
	c.words, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		c.page.Close()
		return fmt.Errorf("map page: %w", err)
	}
	return nil
}

func (s *Server) detach(at program, c *client, conn int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.mu.Lock()
	c.open = slices.DeleteFunc(c.open, func(fd int) bool { return fd == conn })
	c.mu.Unlock()
	if c.conns--; c.conns > 0 {
		return
	}
	delete(s.clients, at)
	c.session.Close()
	c.pidfd.Close()
	unix.Munmap(c.words)
	c.page.Close()
}

// hold gives the peer memory until it dies.
func (s *Server) hold(ctx context.Context, running *sync.WaitGroup, p peer, want emulator.Process) error {
	want.PID = p.pid
	if err := s.World.AddProcess(want); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders[p.pid] {
		return nil
	}
	fd, err := dup(p.pidfd)
	if err != nil {
		s.World.EndProcess(p.pid)
		return fmt.Errorf("watch process %d: %w", p.pid, err)
	}
	s.holders[p.pid] = true
	running.Go(func() {
		if !died(ctx, fd) {
			return
		}
		s.mu.Lock()
		delete(s.holders, p.pid)
		s.mu.Unlock()
		s.World.EndProcess(p.pid)
		s.Log.Info("process ended", "pid", p.pid)
	})
	return nil
}

// serveMPS makes the peer an MPS server until it dies.
func (s *Server) serveMPS(ctx context.Context, running *sync.WaitGroup, p peer, uuid string, percent float64) error {
	fd, err := dup(p.pidfd)
	if err != nil {
		return fmt.Errorf("watch process %d: %w", p.pid, err)
	}
	if err := s.World.ServeMPS(p.pid, uuid, percent); err != nil {
		fd.Close()
		return err
	}
	running.Go(func() {
		died(ctx, fd)
		s.World.EndMPS(p.pid)
	})
	return nil
}

func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	unix.SetNonblock(fd, true)
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// died waits for a process to end and closes its descriptor; false means that
// ctx ended first.
func died(ctx context.Context, pidfd *os.File) bool {
	stop := context.AfterFunc(ctx, func() { pidfd.Close() })
	defer stop()
	defer pidfd.Close()
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return false
	}
	return raw.Read(dead) == nil
}

// dead says whether the process of a pidfd has ended: then it is readable.
func dead(pidfd uintptr) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}
