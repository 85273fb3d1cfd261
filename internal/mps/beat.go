// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The file that tells the processes of containers when the daemon has last answered. The library in
// a container reads it before it lets a program start CUDA, so its layout is fixed:
//
//	byte 0   the magic
//	byte 8   CLOCK_BOOTTIME of the last answer in ns, in the machine's byte order; 0: the daemon is
//	         known to be gone, or has never answered
//
// The rest is zero.
const (
	// BeatFile is its name in PipeDir.
	BeatFile  = "beat"
	beatMagic = "GPUMPS01"
	beatSize  = 4096
	beatAt    = 8
)

// heartbeat writes one GPU's beat file. Containers have the file's directory mounted, so the file
// stays the same as long as the directory stays. The zero heartbeat has no file.
type heartbeat struct {
	page []byte // the file, mapped; nil before it is opened
	file identity
}

// open makes the beat file at path, or opens the one that stands there. A file of a predecessor
// keeps its time until the next stamp.
func (h *heartbeat) open(path string) error {
	if info, err := os.Lstat(path); err == nil && h.page != nil && h.isFile(info) {
		return nil
	}
	h.close()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is %v: remove it", path, info.Mode().Type())
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if info.Size() != beatSize {
		if err := f.Truncate(beatSize); err != nil {
			return err
		}
	}
	page, err := unix.Mmap(int(f.Fd()), 0, beatSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %s: %w", path, err)
	}
	h.page, h.file = page, identify(info)
	if string(page[:beatAt]) != beatMagic {
		h.stamp(0)
		copy(page, beatMagic)
	}
	return nil
}

// isFile reports whether info is of the file that is mapped.
func (h *heartbeat) isFile(info fs.FileInfo) bool {
	id := identify(info)
	return id.dev == h.file.dev && id.ino == h.file.ino && info.Size() == beatSize
}

// stamp tells all readers at once that the daemon has answered at this time since boot; 0 tells
// them that it is gone. It does nothing without a file.
func (h *heartbeat) stamp(at time.Duration) {
	if h.page != nil {
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&h.page[beatAt])), uint64(at))
	}
}

// close forgets the file, which stays.
func (h *heartbeat) close() {
	if h.page != nil {
		_ = unix.Munmap(h.page) // it can fail only for a slice that is no mapping
		h.page = nil
	}
}

// stop tells readers of the beat file at path that the daemon is gone. Without a file it does
// nothing.
func (h *heartbeat) stop(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		h.close()
		return nil
	}
	if err := h.open(path); err != nil {
		return err
	}
	h.stamp(0)
	return nil
}

// ReadBeat returns when a GPU's daemon has last answered, as a container reads it: time since boot,
// and 0 if the file says that the daemon is gone. It fails for a file that is no beat file.
func ReadBeat(path string) (time.Duration, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var page [beatAt + 8]byte
	if _, err := f.ReadAt(page[:], 0); err != nil {
		return 0, fmt.Errorf("read %s: %w", path, err)
	}
	if string(page[:beatAt]) != beatMagic {
		return 0, fmt.Errorf("read %s: it begins with %q, want %q", path, page[:beatAt], beatMagic)
	}
	return time.Duration(binary.NativeEndian.Uint64(page[beatAt:])), nil
}
