// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"

	"example.com/gpu-agent/tests/emulator/lib"
)

// Keep builds programs into the project's cache, unless they are there, and
// returns their folder. Each of sources has its files in a folder c; all of them
// lie in src when build is called, which makes the programs in dir.
func Keep(ctx context.Context, name string, build func(ctx context.Context, src, dir string) error, sources ...fs.FS) (string, error) {
	cache, err := lib.Cache()
	if err != nil {
		return "", err
	}
	version, err := command(ctx, "", "gcc", "--version")
	if err != nil {
		return "", err
	}
	src, err := os.MkdirTemp("", name+"-")
	if err != nil {
		return "", fmt.Errorf("build %s: %w", name, err)
	}
	defer os.RemoveAll(src)
	h := sha256.New()
	fmt.Fprintf(h, "%s%q%q", version, Flags, objects)
	for _, from := range sources {
		names, err := fs.Glob(from, "c/*")
		if err != nil {
			return "", err
		}
		for _, file := range names {
			data, err := fs.ReadFile(from, file)
			if err == nil {
				err = os.WriteFile(filepath.Join(src, path.Base(file)), data, 0o644)
			}
			if err != nil {
				return "", fmt.Errorf("build %s: %w", name, err)
			}
			fmt.Fprintf(h, "%s %d\n%s", file, len(data), data)
		}
	}
	parent := filepath.Join(cache, "memcap")
	dir := filepath.Join(parent, name+"-"+hex.EncodeToString(h.Sum(nil))[:16])
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("make the folder of %s: %w", name, err)
	}
	tmp, err := os.MkdirTemp(parent, "build-")
	if err != nil {
		return "", fmt.Errorf("make the folder of %s: %w", name, err)
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", fmt.Errorf("make the folder of %s: %w", name, err)
	}
	if err := build(ctx, src, tmp); err != nil {
		return "", err
	}
	// Whoever else builds it makes the same.
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("keep %s: %w", name, err)
	}
	return dir, nil
}

// GCC compiles with Flags, in a folder.
func GCC(ctx context.Context, dir string, args ...string) error {
	_, err := command(ctx, dir, "gcc", append(append([]string{}, Flags...), args...)...)
	return err
}

func command(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", name, err, errs.Bytes())
	}
	return string(out), nil
}
