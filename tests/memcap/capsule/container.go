// SPDX-License-Identifier: Apache-2.0

package capsule

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Missing says what this machine lacks to have containers, empty if nothing.
func Missing() string {
	if os.Geteuid() != 0 {
		return "containers need root"
	}
	data, err := os.ReadFile("/proc/filesystems")
	if err != nil || !bytes.Contains(data, []byte("\toverlay\n")) {
		return "the kernel has no overlay file system"
	}
	return ""
}

// Image is what a container has beside the machine's own files and its edits.
type Image struct {
	Files map[string][]byte // by path
	Links map[string]string // target by path
}

// Container is one that runs.
type Container struct {
	// PID is its first process's, in this process's PID namespace.
	PID int

	cmd     *exec.Cmd
	control *os.File
	errs    bytes.Buffer
	said    chan struct{} // closed when nothing more comes from the first process

	starting sync.Mutex // one start at a time

	mu       sync.Mutex
	started  chan start // the answer to a start; read under starting
	programs map[int]*Process
	over     error // set when the container has ended; guarded by mu
}

// start is how a start went.
type start struct {
	report
	p *Process
}

// Program is what a container is told to start.
type Program struct {
	Args []string // the first is a path
	Env  []string // the whole environment
	// Where they are nil, there is no input, and output is kept for Wait.
	Stdin, Stdout, Stderr *os.File
}

// Process is a program that was started.
type Process struct {
	// PID in the container's own PID namespace.
	PID int

	c      *Container
	ended  chan struct{}
	status syscall.WaitStatus // set before ended is closed
	err    error              // set before ended is closed
	output *os.File           // a file in memory, nil where none is kept
}

// Open makes a container and returns when its first process has laid it. Whoever opens it
// closes it.
func Open(ctx context.Context, edits specs.ContainerEdits, image Image) (_ *Container, err error) {
	if lack := Missing(); lack != "" {
		return nil, errors.New(lack)
	}
	work, err := os.MkdirTemp("", "capsule-")
	if err != nil {
		return nil, fmt.Errorf("make container: %w", err)
	}
	c := &Container{started: make(chan start, 1), programs: map[int]*Process{}, said: make(chan struct{})}
	defer func() {
		if err != nil {
			os.Remove(work)
		}
	}()
	data, err := json.Marshal(layout{Work: work, Edits: edits, Files: image.Files, Links: image.Links})
	if err != nil {
		return nil, fmt.Errorf("make container: %w", err)
	}
	plan, err := memory("layout", data)
	if err != nil {
		return nil, fmt.Errorf("make container: %w", err)
	}
	defer plan.Close()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make container: %w", err)
	}
	c.control = os.NewFile(uintptr(ends[0]), "container")
	theirs := os.NewFile(uintptr(ends[1]), "container")
	defer theirs.Close()

	c.cmd = exec.Command("/proc/self/exe")
	c.cmd.Env = append(os.Environ(), roleEnv+"=1")
	c.cmd.ExtraFiles = []*os.File{theirs, plan}
	c.cmd.Stderr = &c.errs
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC}
	if err := c.cmd.Start(); err != nil {
		c.control.Close()
		return nil, fmt.Errorf("make container: %w", err)
	}
	c.PID = c.cmd.Process.Pid
	theirs.Close()
	go c.listen()

	stop := context.AfterFunc(ctx, func() { c.cmd.Process.Kill() })
	defer stop()
	r, ok := <-c.started
	if !ok || r.Error != "" {
		c.Close()
		return nil, fmt.Errorf("make container: %s%s", r.Error, c.errs.String())
	}
	// Nothing of the container stands on it any more.
	if err := os.Remove(work); err != nil {
		c.Close()
		return nil, fmt.Errorf("make container: %w", err)
	}
	return c, nil
}

// memory is a file with some content that has no name.
func memory(name string, data []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.WriteAt(data, 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// listen reads what the first process reports, until it is gone.
func (c *Container) listen() {
	defer close(c.said)
	buf := make([]byte, maxOrder)
	first := true
	for {
		n, err := unix.Read(int(c.control.Fd()), buf)
		if err == unix.EINTR {
			continue
		}
		var r report
		if err != nil || n == 0 || json.Unmarshal(buf[:n], &r) != nil {
			break
		}
		c.mu.Lock()
		p := c.programs[r.PID]
		switch {
		case first:
			first = false
			c.started <- start{report: r}
		case !r.Ended:
			if r.Error == "" {
				p = &Process{PID: r.PID, c: c, ended: make(chan struct{})}
				c.programs[r.PID] = p
			}
			c.started <- start{r, p}
		case p != nil: // not an orphan
			delete(c.programs, r.PID)
			p.status = syscall.WaitStatus(r.Status)
			close(p.ended)
		}
		c.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = errors.New("the container has ended")
	for _, p := range c.programs {
		p.err = c.over
		close(p.ended)
	}
	clear(c.programs)
	close(c.started)
}

// Close ends the container and all that runs in it.
func (c *Container) Close() error {
	c.cmd.Process.Kill()
	err := c.cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = nil // killed, as it should
	}
	<-c.said
	return errors.Join(err, c.control.Close())
}

// Path is how this process sees a file of the container.
func (c *Container) Path(name string) string {
	return filepath.Join("/proc", strconv.Itoa(c.PID), "root", name)
}

// Start starts a program.
func (c *Container) Start(p Program) (*Process, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	output, err := memory("output", nil)
	if err != nil {
		return nil, fmt.Errorf("keep output: %w", err)
	}
	files := []*os.File{p.Stdin, p.Stdout, p.Stderr}
	if files[0] == nil {
		files[0] = null
	}
	for i := 1; i <= 2; i++ {
		if files[i] == nil {
			files[i] = output
		}
	}
	data, err := json.Marshal(order{Args: p.Args, Env: p.Env})
	if err == nil && len(data) > maxOrder {
		err = errors.New("too long")
	}
	if err != nil {
		output.Close()
		return nil, fmt.Errorf("start %s: %w", p.Args[0], err)
	}
	c.starting.Lock()
	defer c.starting.Unlock()
	rights := unix.UnixRights(int(files[0].Fd()), int(files[1].Fd()), int(files[2].Fd()))
	if err := unix.Sendmsg(int(c.control.Fd()), data, rights, nil, unix.MSG_NOSIGNAL); err != nil {
		output.Close()
		return nil, fmt.Errorf("start %s: %w", p.Args[0], err)
	}
	r, ok := <-c.started
	if !ok {
		output.Close()
		return nil, fmt.Errorf("start %s: the container has ended: %s", p.Args[0], c.errs.String())
	}
	if r.Error != "" {
		output.Close()
		return nil, errors.New(r.Error)
	}
	r.p.output = output
	return r.p, nil
}

// Kill sends SIGKILL.
func (p *Process) Kill() error {
	data, err := json.Marshal(order{PID: p.PID, Signal: int(unix.SIGKILL)})
	if err != nil {
		return err
	}
	return unix.Send(int(p.c.control.Fd()), data, unix.MSG_NOSIGNAL)
}

// Wait waits for the end of a program, and returns its output, as far as it was
// kept, and how it ended. Who waits again has how it ended alone.
func (p *Process) Wait(ctx context.Context) (string, syscall.WaitStatus, error) {
	select {
	case <-p.ended:
	case <-ctx.Done():
		return "", 0, fmt.Errorf("wait for process %d: %w", p.PID, context.Cause(ctx))
	}
	if p.output == nil {
		return "", p.status, p.err
	}
	data, err := os.ReadFile("/proc/self/fd/" + strconv.Itoa(int(p.output.Fd())))
	p.output.Close()
	p.output = nil
	return string(data), p.status, errors.Join(p.err, err)
}

// Run starts a program and waits for its end.
func (c *Container) Run(ctx context.Context, p Program) (string, syscall.WaitStatus, error) {
	proc, err := c.Start(p)
	if err != nil {
		return "", 0, err
	}
	return proc.Wait(ctx)
}

// Has says whether a process, by its PID here, runs in the container.
func (c *Container) Has(pid int) bool {
	ours, err := os.Readlink("/proc/" + strconv.Itoa(c.PID) + "/ns/pid")
	theirs, err2 := os.Readlink("/proc/" + strconv.Itoa(pid) + "/ns/pid")
	return err == nil && err2 == nil && ours == theirs
}

// HostPID is the PID here of one of the container's, 0 where there is none.
func (c *Container) HostPID(inside int) int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !c.Has(pid) {
			continue
		}
		data, err := os.ReadFile(filepath.Join("/proc", e.Name(), "status"))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			fields := strings.Fields(line)
			if len(fields) > 1 && fields[0] == "NSpid:" && fields[len(fields)-1] == strconv.Itoa(inside) {
				return pid
			}
		}
	}
	return 0
}
