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

	"example.com/gpu-agent/pkg/gpu"
)

// hookProgram is the name that the hook program runs under. It is part of the
// hooks' arguments, so it does not change with its content.
const hookProgram = "nvidia-cdi-hook"

// InstallHook copies the hook program src to
//
//	<stateDir>/hooks/<16 digits of its content's SHA-256>/nvidia-cdi-hook
//
// and returns that path, the one to give as Options.Hook if the host sees the
// state directory under the same name. The directory is named by content, so
// that a new version of the agent never changes the program under containers
// that are being started by CDI files of an older one; older programs are left
// in place, because a claim's file may name them as long as it stands.
//
// Installing again what stands whole changes nothing, and what stands broken
// is replaced; half a copy of an agent that was killed meanwhile is removed. src must be executable by the host, so statically linked or
// linked against what any host has.
func InstallHook(src, stateDir string) (path string, err error) {
	if !filepath.IsAbs(stateDir) {
		return "", fmt.Errorf("install %s: state directory %q: want an absolute path: %w", src, stateDir, gpu.ErrInvalid)
	}
	sum, err := contentSum(src)
	if err != nil {
		return "", fmt.Errorf("install the hook program: %w", err)
	}
	if err := removeHalves(stateDir); err != nil {
		return "", fmt.Errorf("remove half a copy of the hook program: %w; remove it by hand", err)
	}
	dir := filepath.Join(stateDir, "hooks", hex.EncodeToString(sum[:8]))
	path = filepath.Join(dir, hookProgram)
	if info, err := os.Lstat(path); err == nil && info.Mode() == 0o755 {
		if there, err := contentSum(path); err == nil && bytes.Equal(there, sum) {
			return path, nil
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("install the hook program: %w; the state directory must be writable", err)
	}
	temp := filepath.Join(dir, "."+hookProgram+"."+rand.Text()+".tmp")
	defer func() {
		if err != nil {
			_ = os.Remove(temp)
		}
	}()
	if err := copyProgram(src, temp); err != nil {
		return "", fmt.Errorf("install the hook program %s: %w; check free space and permissions of %s", path, err, stateDir)
	}
	if copied, err := contentSum(temp); err != nil || !bytes.Equal(copied, sum) {
		return "", fmt.Errorf("install the hook program %s: the copy differs from %s, which changed meanwhile; try again (%v)", path, src, err)
	}
	if err := os.Rename(temp, path); err != nil {
		return "", fmt.Errorf("install the hook program: %w", err)
	}
	return path, flush(dir)
}

// removeHalves removes what an agent left that was killed in InstallHook. Each
// is as large as the program, and nobody else would ever look at it.
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

// copyProgram writes a flushed, executable copy.
func copyProgram(src, dst string) error {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o700)
	if err != nil {
		return err
	}
	defer out.Close()
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	if err := out.Chmod(0o755); err != nil {
		return err
	}
	if err := out.Sync(); err != nil {
		return err
	}
	return out.Close()
}

func flush(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("flush %s: %w", dir, err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("flush %s: %w", dir, err)
	}
	return nil
}
