// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/atomicfile"
	"example.com/gpu-agent/pkg/gpu"
)

// hookProgram is the name that the hook program runs under. It is part of the
// hooks' arguments, so it does not change with its content.
const hookProgram = "nvidia-cdi-hook"

// FindHook returns the hook program, which the image has beside this one.
func FindHook() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the CDI hook program: %w", err)
	}
	path := filepath.Join(filepath.Dir(self), hookProgram)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("the CDI hook program is missing: %s stands beside gpu-agent in the image; "+
			"without it a container would not find libcuda.so.1", path)
	}
	return path, nil
}

// InstallHook copies the hook program src to
//
//	<stateDir>/hooks/<16 digits of its content's SHA-256>/nvidia-cdi-hook
//
// and returns that path, the one to give as Options.Hook if the host sees the
// state directory under the same name. The directory is named by content, so
// that a new version of the agent never changes the program under containers
// that are being started by CDI files of an older one; older programs are left
// in place, because the CDI file of an allocation may name them.
//
// Installing again changes nothing if the program is intact, and replaces it otherwise.
// It removes the unfinished copy of an agent that was killed meanwhile. It reads the two
// programs only if one of them has changed since the last time, according to a file beside
// the directories. The host must be able to execute src, so src is linked statically or
// against what any host has.
func InstallHook(src, stateDir string) (path string, err error) {
	if !filepath.IsAbs(stateDir) {
		return "", fmt.Errorf("install %s: state directory %q: want an absolute path: %w",
			src, stateDir, gpu.ErrInvalid)
	}
	marks, err := fileMarks(src)
	if err != nil {
		return "", fmt.Errorf("install the hook program: %w", err)
	}
	if err := removeHalves(stateDir); err != nil {
		return "", fmt.Errorf("remove half a copy of the hook program: %w; remove it by hand", err)
	}
	hooks := filepath.Join(stateDir, "hooks")
	if path := installedBefore(hooks, marks); path != "" {
		return path, nil
	}
	sum, err := contentSum(src)
	if err != nil {
		return "", fmt.Errorf("install the hook program: %w", err)
	}
	version := hex.EncodeToString(sum[:8])
	dir := filepath.Join(hooks, version)
	path = filepath.Join(dir, hookProgram)
	if !isProgram(path, sum) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", fmt.Errorf("install the hook program: %w; the state directory must be writable", err)
		}
		if err := copyProgram(src, dir, sum); err != nil {
			return "", fmt.Errorf("install the hook program %s: %w; check free space and permissions of %s",
				path, err, stateDir)
		}
	}
	remember(hooks, version, marks)
	return path, nil
}

// isProgram reports whether a program with that sum stands whole.
func isProgram(path string, sum []byte) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != 0o755 {
		return false
	}
	there, err := contentSum(path)
	return err == nil && bytes.Equal(there, sum)
}

// installedFile says which file was installed last, as which version, and what
// stands there since: the marks of both files.
const installedFile = "installed"

// fileMarks differ between two files, and between a file before and after a change: only
// the kernel sets the time of an inode's last change.
func fileMarks(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return fmt.Sprintf("%x:%x:%o:%d:%d.%d:%d.%d", st.Dev, st.Ino, st.Mode, st.Size,
		st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec), nil
}

// installedBefore returns where the program with these marks stands since it was
// installed, and nothing where anything has changed.
func installedBefore(hooks, marks string) (path string) {
	said, err := os.ReadFile(filepath.Join(hooks, installedFile))
	if err != nil {
		return ""
	}
	var version, from, to string
	if n, _ := fmt.Sscanf(string(said), "v1 %s %s %s\n", &version, &from, &to); n != 3 || from != marks {
		return ""
	}
	path = filepath.Join(hooks, filepath.Base(version), hookProgram)
	if there, err := fileMarks(path); err != nil || there != to {
		return ""
	}
	return path
}

// remember is for installedBefore of the next process, which does without if it
// fails.
func remember(hooks, version, marks string) {
	there, err := fileMarks(filepath.Join(hooks, version, hookProgram))
	if err != nil {
		return
	}
	root, err := os.OpenRoot(hooks)
	if err != nil {
		return
	}
	defer root.Close()
	const half = "." + installedFile + ".tmp"
	_ = atomicfile.Write(root, installedFile, half, 0o600, atomicfile.Unflushed, func(f *os.File) error {
		_, err := fmt.Fprintf(f, "v1 %s %s %s\n", version, marks, there)
		return err
	})
}

// removeHalves removes the unfinished copies of an agent that was killed in
// InstallHook. Each is as large as the program, and nothing else removes them.
func removeHalves(stateDir string) error {
	hooks, err := fs.Glob(os.DirFS(stateDir), "hooks/*/."+hookProgram+".*.tmp")
	for _, name := range hooks {
		if e := os.Remove(filepath.Join(stateDir, name)); !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	return err
}

func contentSum(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}

// copyProgram puts the program src in its place in dir, if sum is still its sum.
func copyProgram(src, dir string, sum []byte) error {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	temp := "." + hookProgram + "." + rand.Text() + ".tmp"
	return atomicfile.Write(root, hookProgram, temp, 0o755, atomicfile.Flushed, func(f *os.File) error {
		if _, err := io.Copy(f, in); err != nil {
			return err
		}
		if copied, err := contentSum(filepath.Join(dir, temp)); err != nil || !bytes.Equal(copied, sum) {
			return fmt.Errorf("the copy differs from %s, which changed meanwhile; try again (%v)", src, err)
		}
		return nil
	})
}
