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

// Usage pages: how they are made and protected.
//
// The usage pages of an allocation are on a tmpfs of their own, just as large as they are: a
// process that may write to a file can also make it longer, but not longer than its file system has
// room. A process that cuts the file short ends its own processes by SIGBUS, as with any mapped
// file. The agent reads the page by pread and never maps it.
//
// The agent mounts the tmpfs where container runtimes see it. That takes CAP_SYS_ADMIN and a mount
// namespace that propagates to the host. The mount stays when the agent ends. Only root can enter
// the directory above it, since any user of a container may write to the pages, also in a user
// namespace. A container gets the files and not their directory, so no process can put a link or a
// pipe in their place. All mounts are nosuid, nodev and noexec.
//
// Without these rights, an administrator must have mounted a limited tmpfs on dir/cap/usage, for
// all allocations of the node. Then the agent takes all room of a page when it makes the page. A
// process that fills the rest can keep new allocations out, and harms no other.
//
// A usage page belongs to its allocation as long as the limit page beside it has the usage page's
// nonce. The library refuses any other page, even a sound one that a program has mounted over it.
//
// A page is removed with its allocation. It is made anew in two cases. The allocation has another
// holder, who must not see what the last one wrote. Or processes cannot rely on the page: it was
// spoilt, lost in a reboot, or left unfinished by a killed agent. Then all usage pages of the
// allocation are made together, on another tmpfs, since a container may still use the room of the
// old one. The agent stores the nonce last, and writes the CDI file after the pages. So what a
// killed agent leaves is either complete or made anew, and no container starts without its pages.

// usesLocked reports whether a GPU of an allocation has a usage page: with a limit, or if newcomers are to say that
// they wait. Without a limit, a holder that was given a page keeps it, and one that was given none gets none: its
// container has what it was created with. The caller holds p.mu.
func (p *Pages) usesLocked(key string, l *Limit) bool {
	if l.Bytes != None {
		return true
	}
	page, err := mapPage(filepath.Join(p.dir, key, string(l.GPU)))
	if err != nil {
		return l.Waits
	}
	defer page.unmap()
	if page.load(atLimit) == None && page.load(atSince) >= l.since() {
		return page.load(atUsage) != 0
	}
	return l.Waits
}

// usageLocked makes sure that an allocation has a sound usage page for each GPU that is to have one. It returns
// which these are, and the nonces of the pages that it made. The caller holds p.mu.
func (p *Pages) usageLocked(key string, limits []Limit) (used map[gpu.UUID]bool, made map[gpu.UUID]uint64, err error) {
	room := filepath.Join(p.usage, key)
	used = map[gpu.UUID]bool{}
	var gpus []gpu.UUID
	sound := true
	for i := range limits {
		if l := &limits[i]; p.usesLocked(key, l) {
			gpus, used[l.GPU] = append(gpus, l.GPU), true
			sound = sound && p.soundLocked(key, l.GPU, l.since())
		}
	}
	switch {
	case len(gpus) == 0:
		return nil, nil, removeRoom(room)
	case sound:
		return used, nil, nil
	}
	// Make all of them anew, on another file system: containers may still use the old one's files
	// and room.
	if err := removeRoom(room); err != nil {
		return nil, nil, err
	}
	whole, err := makeRoom(room, len(gpus))
	if err != nil {
		return nil, nil, err
	}
	made = map[gpu.UUID]uint64{}
	for _, u := range gpus {
		if made[u], err = makeUsage(filepath.Join(room, string(u)), whole); err != nil {
			return nil, nil, fmt.Errorf("usage page of %s: %w", u, err)
		}
	}
	return used, made, nil
}

// soundLocked reports whether processes that start now can rely on a usage page: it exists, has the
// right size, is the one that the limit page names, and is not that of an earlier holder. It does
// not check the counters, which are up to the processes. The caller holds p.mu.
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

// Sound reports whether processes that start now can rely on all of an allocation's pages. Write
// makes the others anew.
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

// usageMode lets any user of a container write to the page, also if the container's users are not
// the host's.
const usageMode = 0o666

// makeUsage makes a usage page with a new nonce, and returns the nonce. If whole is true it takes
// all of the page's room at once, since others could take it.
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

// makeRoom mounts a file system for so many usage pages on dir, just as large as they are. If this
// process may not mount, makeRoom makes dir a plain folder on the limited tmpfs above it, or returns
// gpu.ErrNoPermission if there is none. Another process may fill that tmpfs and so keep new
// allocations out. So whole is then true: the caller must take all room of a page when it makes it.
func makeRoom(dir string, pages int) (whole bool, err error) {
	parent := filepath.Dir(dir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	// The file system has no inodes but the root and the pages. That also bounds what a process can
	// keep in a page's attributes.
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
			continue // go on with what it was mounted over
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EPERM):
			// Nothing is mounted there, or this process may not unmount it.
		default:
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
		break
	}
	return os.RemoveAll(dir)
}

// Unmount unmounts the file systems that Write has mounted below the agent's state directory. Call
// it before that directory is removed.
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
