// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Cache is the project's cache: $GPU_TESTS_CACHE, else gpu-agent under the
// user's cache directory.
func Cache() (string, error) {
	if cache := os.Getenv("GPU_TESTS_CACHE"); cache != "" {
		return cache, nil
	}
	user, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache: %w; set GPU_TESTS_CACHE", err)
	}
	return filepath.Join(user, "gpu-agent"), nil
}

// Once has something built in a folder of the project's cache, unless it is there, and
// returns that: cache/kind/name. The name says all that the build depends on, such as
// by a hash. build fills a folder that is put in place whole; one process builds at a
// time, and the others wait for it.
func Once(ctx context.Context, kind, name string, build func(ctx context.Context, dir string) error) (string, error) {
	cache, err := Cache()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, kind, name)
	there := func() bool { _, err := os.Stat(dir); return err == nil }
	if there() {
		return dir, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", fmt.Errorf("make folder of %s: %w", name, err)
	}
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", fmt.Errorf("lock the build of %s: %w", name, err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock the build of %s: %w", name, err)
	}
	if there() {
		return dir, nil
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".build-")
	if err != nil {
		return "", fmt.Errorf("make build folder of %s: %w", name, err)
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", fmt.Errorf("make build folder of %s: %w", name, err)
	}
	if err := build(ctx, tmp); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, dir); err != nil {
		return "", fmt.Errorf("keep %s: %w", name, err)
	}
	return dir, nil
}

// Run runs a program in a folder and returns what it prints. The error has what it
// says on stderr.
func Run(ctx context.Context, dir, name string, args ...string) (string, error) {
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

// GCC runs gcc, or the command in $CC, as Go does for cgo: words, without quotes. With a cross
// compiler there, tests for another processor have the driver's libraries for that one.
func GCC(ctx context.Context, dir string, args ...string) (string, error) {
	cc := strings.Fields(os.Getenv("CC"))
	if len(cc) == 0 {
		cc = []string{"gcc"}
	}
	return Run(ctx, dir, cc[0], append(cc[1:], args...)...)
}
