// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// Package is a package of Debian's archive: where it lies in it, and the SHA-256 that a release of
// Debian vouches for.
type Package struct {
	Pool, Sum string
}

// ErrHash is a file of the archive that is not what it was.
var ErrHash = errors.New("not the file that was pinned")

// Library returns the path of a library of a package: the one file whose name
// begins with prefix. The package is downloaded where the cache lacks it.
func (d Package) Library(ctx context.Context, prefix string) (string, error) {
	tree, err := d.Tree(ctx)
	if err != nil {
		return "", err
	}
	var found []string
	err = filepath.WalkDir(tree, func(file string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && strings.HasPrefix(e.Name(), prefix) {
			found = append(found, file)
		}
		return err
	})
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("want one file %s* in %s, have %q", prefix, d.Name(), found)
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// Name is the name of the package's file.
func (d Package) Name() string { return path.Base(d.Pool) }

// Tree returns the folder that a package is unpacked in, below the cache.
func (d Package) Tree(ctx context.Context) (string, error) {
	cache, err := emulib.Cache()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "drivers")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	tree := filepath.Join(dir, d.Sum[:16])
	lock, err := os.OpenFile(tree+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if _, err := os.Stat(tree); err == nil {
		return tree, nil
	}
	work, err := os.MkdirTemp(dir, "new-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	file := filepath.Join(work, d.Name())
	if err := d.download(ctx, file); err != nil {
		return "", fmt.Errorf("download %s from Debian's archive: %w", d.Name(), err)
	}
	fresh := filepath.Join(work, "tree")
	if out, err := exec.CommandContext(ctx, "dpkg", "-x", file, fresh).CombinedOutput(); err != nil {
		return "", fmt.Errorf("dpkg -x %s: %w\n%s", d.Name(), err, out)
	}
	return tree, os.Rename(fresh, tree)
}

// download has apt fetch the package from where this machine has its own packages
// from. Nothing of the machine's apt is changed, and its lists are not needed.
func (d Package) download(ctx context.Context, file string) error {
	const helper = "/usr/lib/apt/apt-helper"
	if _, err := os.Stat(helper); err != nil {
		return fmt.Errorf("this machine has no apt: %w", err)
	}
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").Output()
	if err != nil {
		return fmt.Errorf("ask apt for its sources: %w", err)
	}
	sources := strings.Fields(string(out))
	slices.Sort(sources)
	var errs []error
	for _, source := range slices.Compact(sources) {
		cmd := exec.CommandContext(ctx, helper, "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20",
			"download-file", strings.TrimSuffix(source, "/")+"/"+d.Pool, file, "SHA256:"+d.Sum)
		cmd.Env = append(os.Environ(), "LC_ALL=C")
		said, failed := cmd.CombinedOutput()
		if failed == nil {
			return nil
		}
		if bytes.Contains(said, []byte("Hash Sum mismatch")) {
			return ErrHash
		}
		errs = append(errs, fmt.Errorf("%w: %s", failed, why(string(said))))
	}
	if len(errs) == 0 {
		return errors.New("apt has no source of packages")
	}
	return errors.Join(errs...)
}

// why is apt's own word for a failure, without the address that it tried.
func why(said string) string {
	for line := range strings.Lines(said) {
		if reason, ok := strings.CutPrefix(line, "E: "); ok {
			if _, after, ok := strings.Cut(reason, "  "); ok {
				reason = after
			}
			return strings.TrimSpace(reason)
		}
	}
	return "apt says nothing of it"
}
