// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"example.com/gpu-agent/pkg/gpu"
)

// What the agent can ask of the processes of an allocation, as bits for [Pages.SetControl].
const (
	// ControlYield asks programs to write a checkpoint, since their container will lose the GPU soon.
	ControlYield uint64 = 1 << iota
	// ControlHold holds newcomers: a process waits in cuInit, and before it makes a context, until the
	// bit is cleared. A process that has a context goes on.
	ControlHold
)

// SetControl tells the processes of an allocation what the agent asks of them: of the bits that of has, those in bits
// are set and the others cleared. The rest stays as it was, so that each part of the agent sets its own. It wakes
// the processes that wait. A process that the wake does not reach looks again within 200 ms.
//
// The bits are in the limit pages, so they outlive the agent. A Write keeps them in the pages that it
// keeps; a page that it makes anew has none, so the caller repeats SetControl after that.
//
// The error wraps gpu.ErrNotFound if the allocation has no pages, and gpu.ErrInvalid if the key or a
// bit is not valid. If one page is broken, the others have the bits all the same.
func (p *Pages) SetControl(key string, bits, of uint64) error {
	if (bits|of)&^(ControlYield|ControlHold) != 0 {
		return fmt.Errorf("control allocation %q: bits %#x of %#x: %w", key, bits, of, gpu.ErrInvalid)
	}
	return p.each(key, func(page mappedPage) {
		was := page.load(atControl)
		if now := was&^of | bits&of; now != was {
			page.store(atControl, now)
			page.wake(atControl)
		}
	})
}

// Newcomers returns how many processes wait because of ControlHold, at most 64 for each GPU. The
// kernel counts them, so it also holds for a GPU without a usage page. It does not count the
// processes of a container with a kernel of its own; those are in Counters.Waits. Its errors are
// those of SetControl.
func (p *Pages) Newcomers(key string) (n int, err error) {
	// A process that is woken finds the bit as it was, and waits again.
	err = p.each(key, func(page mappedPage) { n += page.wake(atControl) })
	return n, err
}

// each calls use with each limit page of an allocation.
func (p *Pages) each(key string, use func(mappedPage)) error {
	if !plainName(key) {
		return fmt.Errorf("control allocation %q: %w", key, gpu.ErrInvalid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	dir := filepath.Join(p.dir, key)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return fmt.Errorf("control allocation %s: it has no limit pages: %w", key, gpu.ErrNotFound)
	} else if err != nil {
		return fmt.Errorf("control allocation %s: %w", key, err)
	}
	var errs []error
	for _, e := range entries {
		page, err := mapPage(filepath.Join(dir, e.Name()))
		if err != nil {
			errs = append(errs, fmt.Errorf("control allocation %s: %w", key, err))
			continue
		}
		use(page)
		errs = append(errs, page.unmap())
	}
	return errors.Join(errs...)
}
