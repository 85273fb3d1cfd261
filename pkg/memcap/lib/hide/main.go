// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"golang.org/x/sys/unix"
)

const (
	// mostState and mostConfig limit how much is read of the container's state and of its
	// configuration, in bytes.
	mostState, mostConfig = 1 << 20, 64 << 20
	// mostNames limits how many names a directory of the image may have.
	mostNames = 10_000
)

func main() {
	if err := run(os.Args[1:], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "gpu-agent: hide driver libraries that the image brings:", err)
		os.Exit(1)
	}
}

func run(patterns []string, state io.Reader) error {
	name, err := rootOf(state)
	if err != nil {
		return err
	}
	root, err := os.OpenFile(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's root: %w", err)
	}
	defer root.Close()
	for _, p := range patterns {
		names, err := match(root, p)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := cover(root, name); err != nil {
				return fmt.Errorf("cover %s: %w", name, err)
			}
		}
	}
	return nil
}

// rootOf returns the container's root, which the configuration in its bundle names.
func rootOf(state io.Reader) (string, error) {
	var is struct{ Bundle string }
	if err := json.NewDecoder(io.LimitReader(state, mostState)).Decode(&is); err != nil {
		return "", fmt.Errorf("read the container's state: %w", err)
	}
	f, err := os.Open(filepath.Join(is.Bundle, "config.json"))
	if err != nil {
		return "", fmt.Errorf("read the container's configuration: %w", err)
	}
	defer f.Close()
	var config struct{ Root struct{ Path string } }
	if err := json.NewDecoder(io.LimitReader(f, mostConfig)).Decode(&config); err != nil {
		return "", fmt.Errorf("read the container's configuration: %w", err)
	}
	switch root := config.Root.Path; {
	case root == "":
		return "", errors.New("the container's configuration names no root")
	case filepath.IsAbs(root):
		return root, nil
	default:
		return filepath.Join(is.Bundle, root), nil
	}
}

// match returns the names in the root that match a pattern. One part of the pattern may be a
// pattern of path.Match; all others are taken literally.
func match(root *os.File, pattern string) ([]string, error) {
	parts := strings.Split(pattern, "/")
	wild := slices.IndexFunc(parts, func(p string) bool { return strings.ContainsAny(p, "*?[") })
	if wild < 0 {
		return []string{pattern}, nil
	}
	parent := strings.Join(parts[:wild], "/")
	handle, err := openDir(root, parent)
	if handle == nil || err != nil {
		return nil, err
	}
	defer handle.Close()
	dir, err := pathrs.Reopen(handle, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", parent, err)
	}
	defer dir.Close()
	all, err := dir.Readdirnames(mostNames + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", parent, err)
	}
	if len(all) > mostNames {
		return nil, fmt.Errorf("read %s: it has more than %d names", parent, mostNames)
	}
	var names []string
	for _, name := range all {
		is, err := path.Match(parts[wild], name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", pattern, err)
		}
		if is {
			names = append(names, strings.Join(slices.Concat(parts[:wild], []string{name}, parts[wild+1:]), "/"))
		}
	}
	return names, nil
}

// cover mounts an empty file system over a directory, if there is one.
func cover(root *os.File, name string) error {
	dir, err := openDir(root, name)
	if dir == nil || err != nil {
		return err
	}
	defer dir.Close()
	var on unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &on); err != nil {
		return err
	}
	if on.Type == unix.TMPFS_MAGIC && on.Flags&unix.ST_RDONLY != 0 && on.Files == 1 {
		return nil // covered already: by another name, or for another of the container's allocations
	}
	// Mount on the descriptor, since the name may mean something else by now.
	return unix.Mount("gpu-agent", fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), "tmpfs",
		unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0555,size=4k,nr_inodes=1")
}

// openDir opens a directory below the root, without access to its contents. It returns nil if
// there is no such directory.
func openDir(root *os.File, name string) (*os.File, error) {
	f, err := pathrs.OpenatInRoot(root, name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		return f, nil
	}
	f.Close()
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", name, err)
	}
	return nil, nil
}
