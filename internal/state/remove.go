// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// hooksDir is where pkg/gpu/nvml installs hook programs: hooks/<16 digits>/nvidia-cdi-hook.
// During installation there is .nvidia-cdi-hook.<random>.tmp beside it. A note of the
// installation is in hooks/ itself.
const hooksDir = "hooks"

// capDir is where pkg/memcap/lib installs libraries, in directories named by their content, and
// keeps the limit pages of allocations.
const capDir = "cap"

// mpsDir is where internal/mps keeps the directories of MPS daemons, and mpsSocket its socket.
const (
	mpsDir    = "mps"
	mpsSocket = "mps.sock"
)

// usageDir is where internal/usage/segments keeps the usage journal.
const usageDir = "usage"

// parkDir is where internal/park keeps the records of parked containers.
const parkDir = "park"

var (
	hookDir  = regexp.MustCompile(`^[0-9a-f]{16}$`)
	hookFile = regexp.MustCompile(`^(nvidia-cdi-hook|\.nvidia-cdi-hook\.[A-Z2-7]+\.tmp)$`)
	hookNote = regexp.MustCompile(`^(installed|\.installed\.tmp)$`)
)

// Remove removes what agents of any version have made in dir: its files, its hook programs,
// their directories, and dir itself if it is empty then. Everything else stays. A missing dir
// is a success. The error wraps gpu.ErrInUse while an agent works with dir.
//
// A container needs the hook programs when it is created again. So call Remove only when no
// container holds a device.
func Remove(dir string) error {
	if !filepath.IsAbs(dir) {
		return fmt.Errorf("remove the state in %q: the path must be absolute: %w", dir, gpu.ErrInvalid)
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	root, held, err := lock(dir)
	if root != nil {
		defer root.Close()
	}
	if held != nil {
		defer held.Close()
	}
	if err != nil {
		return err
	}
	r := remover{root: root, dir: dir}
	for _, name := range files {
		r.plain(name)
	}
	for _, d := range r.list(hooksDir) {
		path := filepath.Join(hooksDir, d.Name())
		if hookNote.MatchString(d.Name()) {
			r.plain(path)
		}
		if !d.IsDir() || !hookDir.MatchString(d.Name()) {
			continue
		}
		for _, f := range r.list(path) {
			if hookFile.MatchString(f.Name()) {
				r.plain(filepath.Join(path, f.Name()))
			}
		}
		r.empty(path)
	}
	r.empty(hooksDir)
	r.socket(Socket)
	r.socket(temporary(Socket))
	r.socket(mpsSocket)
	r.socket(temporary(mpsSocket))
	r.tree(mpsDir)
	r.tree(capDir)
	r.tree(usageDir)
	r.tree(parkDir)
	// In a container, dir is a mount point in a read-only directory.
	if err := os.Remove(dir); err != nil && !stays(err) && !errors.Is(err, unix.EROFS) {
		r.failed(err)
	}
	return errors.Join(r.errs...)
}

type remover struct {
	root *os.Root
	dir  string
	errs []error
}

func (r *remover) failed(err error) {
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.errs = append(r.errs, fmt.Errorf("remove the state in %s: %w; remove it by hand", r.dir, err))
	}
}

// isDir reports whether name is a directory; it follows no link.
func (r *remover) isDir(name string) bool {
	info, err := r.root.Lstat(name)
	return err == nil && info.IsDir()
}

// socket removes a socket. No agent listens there, since the directory is locked.
func (r *remover) socket(name string) {
	info, err := r.root.Lstat(name)
	if err == nil && info.Mode().Type() == fs.ModeSocket {
		err = r.root.Remove(name)
	}
	r.failed(err)
}

// plain removes a regular file. Anything else of that name is not the agent's.
func (r *remover) plain(name string) {
	info, err := r.root.Lstat(name)
	if err == nil && info.Mode().IsRegular() {
		err = r.root.Remove(name)
	}
	r.failed(err)
}

// tree removes a directory that is all the agent's: its regular files, and the directories that
// are empty then.
func (r *remover) tree(name string) {
	for _, d := range r.list(name) {
		path := filepath.Join(name, d.Name())
		if d.IsDir() {
			r.tree(path)
		} else {
			r.plain(path)
		}
	}
	r.empty(name)
}

// empty removes a directory if it is empty.
func (r *remover) empty(name string) {
	if !r.isDir(name) {
		return
	}
	if err := r.root.Remove(name); err != nil && !stays(err) {
		r.failed(err)
	}
}

func (r *remover) list(name string) []fs.DirEntry {
	if !r.isDir(name) {
		return nil
	}
	f, err := r.root.Open(name)
	if err != nil {
		r.failed(err)
		return nil
	}
	defer f.Close()
	entries, err := f.ReadDir(-1)
	r.failed(err)
	return entries
}

// stays reports whether an error means that a directory may remain: it is not empty, or it is a
// mount point.
func stays(err error) bool {
	return errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY)
}
