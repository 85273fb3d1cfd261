// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// Controlled returns the bits that Control, also of an earlier process, has set in an allocation's limit pages:
// those of all its GPUs together. Its errors are those of Control.
func (p *Pages) Controlled(key string) (bits uint64, err error) {
	err = p.each(key, func(page mappedPage) { bits |= page.load(atControl) })
	return bits, err
}

// Waits returns how often processes of an allocation have begun to wait as newcomers, on all its GPUs together. The
// processes write that themselves, so it may be any number. It reads less of the pages than Usage.Read does.
//
// The error wraps gpu.ErrNotFound if the allocation has no usage page, and gpu.ErrInvalid if a file is not one.
func (p *Pages) Waits(key string) (n uint64, err error) {
	if !plainName(key) {
		return 0, fmt.Errorf("count the waits of allocation %q: %w", key, gpu.ErrInvalid)
	}
	dir := filepath.Join(p.usage, key)
	pages, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(pages) == 0 {
		return 0, fmt.Errorf("count the waits of allocation %s: it has no usage pages: %w", key, gpu.ErrNotFound)
	} else if err != nil {
		return 0, fmt.Errorf("count the waits of allocation %s: %w", key, err)
	}
	for _, e := range pages {
		its, err := waitsOf(filepath.Join(dir, e.Name()))
		if err != nil {
			return 0, fmt.Errorf("count the waits of allocation %s on %s: %w", key, e.Name(), err)
		}
		n += its
	}
	return n, nil
}

func waitsOf(path string) (uint64, error) {
	fd, err := openUsage(path)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	u := Usage{fd: fd}
	word := u.head[:8]
	if err := u.readAt(word, useWaits); err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(word), nil
}
