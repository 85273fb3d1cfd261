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

// hookProgram is the file name of the hook program. The hooks' arguments contain it, so it does
// not change with the program's content.
const hookProgram = "nvidia-cdi-hook"

// FindHook returns the path of the hook program, which the image has in the same directory as
// this program. It fails if the program is missing.
func FindHook() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find the CDI hook program: %w", err)
	}
	path := filepath.Join(filepath.Dir(self), hookProgram)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("the CDI hook program is missing: the image must have %s beside gpu-agent; "+
			"without it containers do not find libcuda.so.1", path)
	}
	return path, nil
}

// InstallHook copies the hook program src to
//
//	<stateDir>/hooks/<16 digits of its content's SHA-256>/nvidia-cdi-hook
//
// and returns that path. It is the value for Options.Hook if the host sees the state directory
// under the same name. The directory's name is from the content: so a new version of the agent
// never changes the program under containers that start with the CDI files of an older one. Older
// programs stay, because the CDI file of an allocation may name them.
//
// If the program is installed and intact, it changes nothing; otherwise it replaces the program.
// It removes an unfinished copy that a killed agent left. A file beside the directories records
// the state of both programs at the last installation, and it reads them again only if one has
// changed since. The host must be able to execute src, so src is linked statically or against
// what any host has.
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
		return "", fmt.Errorf("remove an unfinished copy of the hook program: %w; remove it by hand", err)
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

// isProgram reports whether path is an executable file with that checksum.
func isProgram(path string, sum []byte) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != 0o755 {
		return false
	}
	there, err := contentSum(path)
	return err == nil && bytes.Equal(there, sum)
}

// installedFile names the file that records the last installation: its version, and the marks of
// source and copy.
const installedFile = "installed"

// fileMarks identifies a file in its present state. It differs for another file, and after any
// change: only the kernel sets the time of an inode's last change (ctime).
func fileMarks(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return fmt.Sprintf("%x:%x:%o:%d:%d.%d:%d.%d", st.Dev, st.Ino, st.Mode, st.Size,
		st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec), nil
}

// installedBefore returns the path of the installed program if neither it nor the source with
// these marks has changed since the installation, and an empty path otherwise.
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

// remember records the installation for installedBefore of the next process. It ignores failures:
// then the next process reads both files.
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

// removeHalves removes the unfinished copies of an agent that was killed in InstallHook. Each is
// as large as the program, and no other code removes them.
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

// copyProgram copies src into dir. It fails if the checksum of the copy is not sum.
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
