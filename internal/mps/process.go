// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// mostPID is the kernel's PID_MAX_LIMIT.
const mostPID = 4 << 20

// process is one process of the host. The kernel may give its PID to another one, with another
// start time.
type process struct {
	pid   int
	start uint64 // in clock ticks since boot
}

// mostProc bounds what is read of a file of /proc.
const mostProc = 256 << 10

func readProc(pid int, name string) ([]byte, error) {
	f, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, mostProc))
}

// processOf returns the process that has a PID now. It fails for one that has ended and is not
// reaped.
func processOf(pid int) (process, error) {
	stat, err := readProc(pid, "stat")
	if err != nil {
		return process{}, err
	}
	// The name is in parentheses, and may have some itself.
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const state, start = 0, 19 // man 5 proc counts from 1, and name and PID come before
	if len(f) <= start {
		return process{}, fmt.Errorf("read /proc/%d/stat: %.100q", pid, stat)
	}
	if f[state] == "Z" || f[state] == "X" {
		return process{}, fmt.Errorf("process %d has ended: %w", pid, os.ErrProcessDone)
	}
	ticks, err := strconv.ParseUint(f[start], 10, 64)
	if err != nil {
		return process{}, fmt.Errorf("read /proc/%d/stat: %w", pid, err)
	}
	return process{pid, ticks}, nil
}

// alive reports whether the process lives.
func (p process) alive() bool {
	now, err := processOf(p.pid)
	return err == nil && now == p
}

// clockTick is the kernel's unit of times in /proc: USER_HZ is 100 on all of this program's architectures.
const clockTick = 10 * time.Millisecond

// age returns for how long the process lives.
func (p process) age() time.Duration { return sinceBoot() - time.Duration(p.start)*clockTick }

// signal sends a signal to the process, and never to another that has its PID since.
func (p process) signal(sig unix.Signal) error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if !p.alive() { // the descriptor is of the process that has the PID now
		return os.ErrProcessDone
	}
	return unix.PidfdSendSignal(fd, sig, nil, 0)
}

// kill kills the process. One that has ended is no error.
func (p process) kill() error {
	if err := p.signal(unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// ended waits for the end of the process.
func (p process) ended(within time.Duration) bool {
	for end := time.Now().Add(within); p.alive(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// words are a process's arguments or variables.
func words(pid int, name string) ([]string, error) {
	data, err := readProc(pid, name)
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00"), nil
}

// role is what one of MPS's processes does.
type role int

const (
	aDaemon role = iota
	aServer
	aProgram // a control program that speaks to a daemon
)

// relative is a process of MPS that uses a daemon's directory.
type relative struct {
	process
	role role
}

// comm is the kernel's name for MPS's processes. It keeps the first 15 bytes of a program's name.
const comm = "nvidia-cuda-mps"

// relatives returns all processes of MPS with this directory, in this process's mount namespace. A
// process writes its own name, arguments and environment, so those of containers are never
// believed. It takes some 20 µs for each process of the host, which is too much for every round.
func relatives(control string) ([]relative, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	here, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil, err
	}
	var found []relative
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if name, err := readProc(pid, "comm"); err != nil || strings.TrimSpace(string(name)) != comm {
			continue
		}
		p, err := processOf(pid)
		if err != nil {
			continue // it has ended
		}
		if there, err := os.Readlink(filepath.Join("/proc", e.Name(), "ns/mnt")); err != nil || there != here {
			continue
		}
		env, err := words(pid, "environ")
		if err != nil || !slices.Contains(env, pipeVariable+"="+control) {
			continue
		}
		args, err := words(pid, "cmdline")
		if err != nil || !p.alive() {
			continue
		}
		r := relative{process: p, role: aProgram}
		switch {
		case strings.HasSuffix(args[0], "-server"):
			r.role = aServer
		case slices.Contains(args, foreground):
			r.role = aDaemon
		}
		found = append(found, r)
	}
	return found, nil
}

// errNotListening: no process listens at a socket, or there is none.
var errNotListening = errors.New("no process listens")

// listener returns the PID of the process that listens at a daemon's socket. It connects, and the
// kernel takes the connection for a process that is stopped, too.
func listener(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	switch err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		return 0, fmt.Errorf("%w at %s", errNotListening, path)
	case err != nil:
		return 0, fmt.Errorf("connect to %s: %w", path, err)
	}
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, fmt.Errorf("ask who listens at %s: %w", path, err)
	}
	if cred.Pid <= 0 {
		return 0, fmt.Errorf("a process of another PID namespace listens at %s", path)
	}
	return int(cred.Pid), nil
}

// Left reports whether there is a directory of a GPU that has a daemon, or has had one.
func (c *Client) Left() bool {
	entries, err := os.ReadDir(filepath.Join(filepath.Dir(c.path), rootDir))
	if err != nil {
		return false
	}
	return slices.ContainsFunc(entries, func(e os.DirEntry) bool { return uuid.MatchString(e.Name()) })
}

// Now returns the time of Daemon.Answered's clock.
func (c *Client) Now() time.Duration { return sinceBoot() }

// sinceBoot returns CLOCK_BOOTTIME.
func sinceBoot() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}
