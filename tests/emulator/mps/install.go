// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Names of the programs.
const (
	controlName = "nvidia-cuda-mps-control"
	serverName  = "nvidia-cuda-mps-server"
)

// Main runs an emulated program and ends the process, if this program was started as one.
func Main() {
	switch filepath.Base(os.Args[0]) {
	case controlName:
		exit(control(os.Args[1:]))
	case serverName:
		exit(server(os.Args[1:]))
	}
}

// exit ends the process at once. os.Exit would wait for a second below the race detector.
func exit(code int) { _, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(code), 0, 0) }

// endWith ends this process when the one has ended that Until names, or the world.
func endWith(w *world) {
	data, err := os.ReadFile(filepath.Join(here(), untilFile))
	if pid, bad := strconv.Atoi(string(data)); err == nil && bad == nil {
		fd, err := unix.PidfdOpen(pid, 0) // its number may be another's later
		if err != nil {
			exit(1)
		}
		go func() {
			for {
				n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
				if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
					exit(1)
				}
			}
		}()
	}
	if w != nil {
		go func() {
			w.wait()
			exit(1)
		}()
	}
}

// Lay puts the programs of a driver into a directory, in place of those of another. Daemons that run
// are not changed. The caller's own program must call Main.
func Lay(dir, version string) error { return LayProgram(dir, version, "/proc/self/exe") }

// LayProgram is Lay with another program that calls Main, by its path.
func LayProgram(dir, version, from string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	fresh := filepath.Join(dir, ".nvidia-cuda-mps")
	if err := errors.Join(removed(fresh), program(fresh, version, from)); err != nil {
		return err
	}
	for _, name := range []string{controlName, serverName} {
		link := fresh + name
		if err := errors.Join(removed(link), os.Link(fresh, link), os.Rename(link, filepath.Join(dir, name))); err != nil {
			return err
		}
	}
	return os.Remove(fresh)
}

// Until has the programs of a directory end when a process has ended, also by a panic.
func Until(dir string, pid int) error {
	return os.WriteFile(filepath.Join(dir, untilFile), []byte(strconv.Itoa(pid)), 0o644)
}

func removed(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// program copies a program, with a version as NVIDIA's have it among their strings.
func program(path, version, from string) (err error) {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := io.Copy(f, source); err != nil {
		return err
	}
	_, err = f.WriteString("\x00" + version + "\x00")
	return err
}

// Behaviour is how daemons behave. Its zero value is as NVIDIA's do.
type Behaviour struct {
	// Say has answers that a daemon gives in place of the true ones, by the command's first word.
	Say map[string]string `json:"say,omitempty"`
	// Deaf has commands that change nothing, by their first word.
	Deaf []string `json:"deaf,omitempty"`
	// DieAt has the daemon die of this command, by its first word.
	DieAt string `json:"dieAt,omitempty"`
	// DieAtStart has daemons end before they listen.
	DieAtStart bool `json:"dieAtStart,omitempty"`
	// BetweenSockets is how long a new daemon takes from its first socket to its second.
	BetweenSockets time.Duration `json:"betweenSockets,omitempty"`
	// Mute has daemons answer no command.
	Mute bool `json:"mute,omitempty"`
	// Outlive has servers live on when their daemon is killed.
	Outlive bool `json:"outlive,omitempty"`
	// Sticky has clients stay listed when they are terminated.
	Sticky bool `json:"sticky,omitempty"`
	// NoCard has servers end at once, as without a card, or on one that another process has.
	NoCard bool `json:"noCard,omitempty"`
	// StartsSlowly has servers not become ready, and Stuck has them take no client although they are
	// ACTIVE.
	StartsSlowly bool `json:"startsSlowly,omitempty"`
	Stuck        bool `json:"stuck,omitempty"`
	// Status is what servers are, ACTIVE if empty.
	Status string `json:"status,omitempty"`
}

const (
	behaviourFile = "mps-behaviour.json"
	untilFile     = "mps-until"
)

// Behave sets how the daemons of the programs in a directory behave.
func Behave(dir string, b Behaviour) error {
	data, err := json.Marshal(b)
	if err != nil {
		return err
	}
	fresh := filepath.Join(dir, "."+behaviourFile)
	return errors.Join(os.WriteFile(fresh, data, 0o644), os.Rename(fresh, filepath.Join(dir, behaviourFile)))
}

// here is the directory of the programs that run.
func here() string { return filepath.Dir(os.Args[0]) }

func behaviour() (b Behaviour) {
	data, err := os.ReadFile(filepath.Join(here(), behaviourFile))
	if errors.Is(err, fs.ErrNotExist) {
		return b
	}
	if err == nil {
		err = json.Unmarshal(data, &b)
	}
	if err != nil {
		panic(err)
	}
	return b
}

// version is what Lay has put behind this program.
var version = sync.OnceValue(func() string {
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		panic(err)
	}
	defer f.Close()
	end := make([]byte, 32)
	if _, err := f.Seek(-int64(len(end)), io.SeekEnd); err != nil {
		panic(err)
	}
	if _, err := io.ReadFull(f, end); err != nil {
		panic(err)
	}
	end = bytes.TrimSuffix(end, []byte{0})
	return string(end[bytes.LastIndexByte(end, 0)+1:])
})
