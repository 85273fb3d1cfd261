// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/socket"
	"example.com/gpu-agent/pkg/gpu"
)

// rootDir is where everything of this package lies below the state directory.
const rootDir = "mps"

// PipeDir returns the directory of a GPU that containers get as their CUDA_MPS_PIPE_DIRECTORY. It
// has a socket only while the daemon is as wanted.
func PipeDir(stateDir string, u gpu.UUID) string {
	return filepath.Join(stateDir, rootDir, string(u), "pipe")
}

// Owns reports whether a directory is one of a daemon that this package keeps for a state directory.
func Owns(stateDir, dir string) bool {
	return strings.HasPrefix(dir, filepath.Join(stateDir, rootDir)+"/")
}

// files are a GPU's directories and files.
type files struct{ base string }

func (f files) control() string { return filepath.Join(f.base, "control") }
func (f files) pipe() string    { return filepath.Join(f.base, "pipe") }
func (f files) beat() string    { return filepath.Join(f.pipe(), BeatFile) }

// libraries is a directory of links to the driver's libraries.
func (f files) libraries() string { return filepath.Join(f.base, "lib") }
func (f files) logs() string      { return filepath.Join(f.base, "logs") }
func (f files) output() string    { return filepath.Join(f.base, "output") }

// Names that the daemon gives its files.
const (
	controlSocket = "control"
	privileged    = "control_privileged"
	logPipe       = "log"
	pidFile       = "nvidia-cuda-mps-control.pid"
)

func (f files) socket() string { return filepath.Join(f.control(), controlSocket) }

// linked are the daemon's files that containers get.
var linked = []string{logPipe, controlSocket}

// fits reports whether the sockets' paths are short enough for the kernel.
func (f files) fits() error {
	if path := filepath.Join(f.control(), privileged); len(path) > socket.MaxPath {
		return fmt.Errorf("%s has %d bytes, and a socket's path has at most %d: choose a shorter state directory: %w",
			path, len(path), socket.MaxPath, gpu.ErrInvalid)
	}
	return nil
}

// prepare makes the directories and removes what a dead daemon has left in them. It leaves the
// daemon's lock, by which two daemons find each other out.
func (f files) prepare() error {
	if err := f.shut(); err != nil {
		return err
	}
	for dir, mode := range map[string]fs.FileMode{f.base: 0o755, f.control(): 0o700, f.pipe(): 0o755, f.logs(): 0o700} {
		if err := directory(dir, mode); err != nil {
			return err
		}
	}
	return f.clear()
}

// directory makes a directory with exactly this mode.
func directory(dir string, mode fs.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return err
	}
	return os.Chmod(dir, mode)
}

// clear removes the stale sockets of a daemon that has ended.
func (f files) clear() error {
	var errs []error
	for _, name := range []string{controlSocket, privileged, logPipe, pidFile} {
		if err := os.Remove(filepath.Join(f.control(), name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// open links the daemon's files for containers. The socket comes last.
func (f files) open() error {
	if f.isOpen() {
		return nil
	}
	if err := directory(f.pipe(), 0o755); err != nil {
		return err
	}
	for _, name := range linked {
		from, to := filepath.Join(f.control(), name), filepath.Join(f.pipe(), name)
		if same(from, to) {
			continue
		}
		fresh := filepath.Join(f.pipe(), ".new")
		if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.Link(from, fresh); err != nil {
			return err
		}
		if err := os.Rename(fresh, to); err != nil {
			return err
		}
	}
	return nil
}

// isOpen reports whether containers reach the daemon's socket.
func (f files) isOpen() bool { return same(f.socket(), filepath.Join(f.pipe(), controlSocket)) }

// shut removes the links, so that no new client reaches the daemon.
func (f files) shut() error {
	for _, name := range []string{controlSocket, logPipe, ".new"} {
		if err := os.Remove(filepath.Join(f.pipe(), name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// remove removes all of the GPU.
func (f files) remove() error { return os.RemoveAll(f.base) }

func same(a, b string) bool {
	x, err := os.Lstat(a)
	if err != nil {
		return false
	}
	y, err := os.Lstat(b)
	return err == nil && os.SameFile(x, y)
}

// printed returns the beginning of what the daemon has printed, on one line.
func (f files) printed() string {
	file, err := os.Open(f.output())
	if err != nil {
		return ""
	}
	defer file.Close()
	said, _ := io.ReadAll(io.LimitReader(file, 4<<10)) // what could be read is as good as it gets
	return brief.Cut(strings.Join(strings.Fields(string(said)), " "), 300)
}

// mostOutput is the size from which a file that a daemon writes is truncated. A daemon writes some
// 500 bytes for each round.
const mostOutput = 256 << 10

// trim truncates what the daemon has printed. It appends, so that its next line is the first.
func (f files) trim() error {
	paths, err := filepath.Glob(filepath.Join(f.logs(), "*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range append(paths, f.output()) {
		info, err := os.Lstat(path)
		if err == nil && info.Mode().IsRegular() && info.Size() > mostOutput {
			errs = append(errs, os.Truncate(path, 0))
		}
	}
	return errors.Join(errs...)
}
