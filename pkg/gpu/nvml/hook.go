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

	"example.com/gpu-agent/internal/atomicfile"
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
	if err := copyProgram(src, dir, sum); err != nil {
		return "", fmt.Errorf("install the hook program %s: %w; check free space and permissions of %s", path, err, stateDir)
	}
	return path, nil
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
