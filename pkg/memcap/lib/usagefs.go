// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// The usage pages of an allocation are on a file system of their own, a tmpfs that is as
// large as they are: a process that may write to a file can also make it longer, but not
// longer than that. It is mounted where containers' runtimes see it, and
// stays when the agent ends. The directory above it is root's alone, since every
// user of a container writes to the pages; a container has the files and not their
// directory, so everything there was made by the agent.
//
// A usage page belongs to the allocation as long as the limit page beside it names its
// nonce. The agent stores that last, so what a killed agent left half done is done again.

// usageLocked sees to it that an allocation has a usage page for each limited GPU, and
// returns the nonces of those that it made.
func (p *Pages) usageLocked(key string, limits []Limit) (made map[gpu.UUID]uint64, err error) {
	room := filepath.Join(p.usage, key)
	var limited []gpu.UUID
	sound := true
	for _, l := range limits {
		if l.Bytes != None {
			limited = append(limited, l.GPU)
			sound = sound && p.soundLocked(key, l.GPU, l.since())
		}
	}
	switch {
	case len(limited) == 0:
		return nil, removeRoom(room)
	case sound:
		return nil, nil
	}
	// All of them, on another file system: containers may have the old one's files
	// yet, and with them its room.
	if err := removeRoom(room); err != nil {
		return nil, err
	}
	whole, err := makeRoom(room, len(limited))
	if err != nil {
		return nil, err
	}
	made = map[gpu.UUID]uint64{}
	for _, u := range limited {
		if made[u], err = makeUsage(filepath.Join(room, string(u)), whole); err != nil {
			return nil, fmt.Errorf("usage page of %s: %w", u, err)
		}
	}
	return made, nil
}

// soundLocked reports whether processes that start now can rely on a usage page: it
// exists, has the right size, is the one that the limit page names, and is not that of an
// earlier holder. What it says beyond that is between the processes that write to it.
func (p *Pages) soundLocked(key string, u gpu.UUID, since uint64) bool {
	limit, err := mapPage(filepath.Join(p.dir, key, string(u)))
	if err != nil {
		return false
	}
	defer limit.unmap()
	fd, err := openUsage(filepath.Join(p.usage, key, string(u)))
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&0o777 != usageMode {
		return false
	}
	head := make([]byte, useNonce+8)
	if n, err := unix.Pread(fd, head, 0); err != nil || n != len(head) {
		return false
	}
	nonce := binary.LittleEndian.Uint64(head[useNonce:])
	return string(head[:useNonce]) == usageMagic && nonce != 0 &&
		nonce == limit.load(atUsage) && limit.load(atSince) >= since
}

// Sound reports whether processes that start now can count on all of an allocation's
// pages. Write makes new ones of those that they cannot.
func (p *Pages) Sound(key string) (bool, error) {
	if !plainName(key) {
		return false, fmt.Errorf("look at the pages of allocation %q: %w", key, gpu.ErrInvalid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	entries, err := os.ReadDir(filepath.Join(p.dir, key))
	if err != nil {
		return false, fmt.Errorf("look at the pages of allocation %s: %w", key, notFound(err))
	}
	for _, e := range entries {
		limit, err := mapPage(filepath.Join(p.dir, key, e.Name()))
		if err != nil {
			return false, nil
		}
		bytes := limit.load(atLimit)
		if err := limit.unmap(); err != nil {
			return false, err
		}
		if bytes != None && !p.soundLocked(key, gpu.UUID(e.Name()), 0) {
			return false, nil
		}
	}
	return true, nil
}

// usageMode lets whatever user a container has write to the page, also where the
// container's users are not the host's.
const usageMode = 0o666

// makeUsage makes a usage page with a new nonce. With whole it takes all of the page's
// room at once, since others could take it.
func makeUsage(path string, whole bool) (nonce uint64, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	var head [useNonce + 8]byte
	copy(head[:], usageMagic)
	for nonce == 0 || nonce == writing {
		if _, err := rand.Read(head[useNonce:]); err != nil {
			return 0, err
		}
		nonce = binary.LittleEndian.Uint64(head[useNonce:])
	}
	if whole {
		err = unix.Fallocate(int(f.Fd()), 0, 0, usageSize)
	} else {
		err = f.Truncate(usageSize)
	}
	if err != nil {
		return 0, fmt.Errorf("make room of %d bytes: %w", usageSize, err)
	}
	if _, err := f.WriteAt(head[:], 0); err != nil {
		return 0, err
	}
	return nonce, f.Chmod(usageMode)
}

// makeRoom mounts a file system for so many usage pages, no larger than they are.
// An agent that may not mount uses a directory where somebody has mounted a limited tmpfs
// for all allocations of the node. Whoever fills that keeps new allocations out, so all
// room of a page must then be taken when it is made.
func makeRoom(dir string, pages int) (whole bool, err error) {
	parent := filepath.Dir(dir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	// The root and the pages are all the inodes there ever are; what a page's
	// writer keeps in its attributes is bounded by that too.
	options := fmt.Sprintf("mode=0700,size=%d,nr_inodes=%d", pages*usageSize, pages+1)
	if label := labelOf(parent); label != "" {
		options += `,context="` + label + `"`
	}
	err = unix.Mount("gpu-agent", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		var st unix.Statfs_t
		if serr := unix.Statfs(parent, &st); serr == nil && st.Type == unix.TMPFS_MAGIC && st.Blocks > 0 {
			return true, nil
		}
		return false, fmt.Errorf("mount a tmpfs on %s: %w: %w; let the agent mount (CAP_SYS_ADMIN), "+
			"or mount a limited tmpfs on %s before it starts",
			dir, gpu.ErrNoPermission, err, parent)
	}
	if err != nil {
		return false, fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
	}
	return false, nil
}

// removeRoom removes what makeRoom made. Containers that have its files mounted keep them.
func removeRoom(dir string) error {
	for {
		err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch {
		case err == nil:
			continue // what was mounted over is next
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EPERM):
			// Nothing is mounted there, or nothing by us.
		default:
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
		break
	}
	return os.RemoveAll(dir)
}

// Unmount takes away the file systems that Write has mounted below the agent's
// state directory. Call it before that directory is removed.
func Unmount(dir string) error {
	top := filepath.Join(dir, "cap", usageName)
	entries, err := os.ReadDir(top)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, removeRoom(filepath.Join(top, e.Name())))
	}
	if err != nil {
		return fmt.Errorf("unmount usage pages: %w", err)
	}
	return nil
}
