// SPDX-License-Identifier: Apache-2.0

package capsule

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// Driver has an account of what processes have on GPUs.
type Driver interface {
	// Used is what the processes of containers have on a GPU, in bytes; known is false
	// where the driver does not say.
	Used(u gpu.UUID, containers ...*Container) (bytes uint64, known bool)
}

// Reader stands in for the agent: it reads what a container's processes have
// on a GPU by the driver's account, and lets the limit page know.
type Reader struct {
	Driver    Driver
	Container *Container
	Pages     *lib.Pages
	Also      []*Container // others that count on the same page
	Key       string       // the allocation's
	GPU       gpu.UUID
	Every     time.Duration

	mu    sync.Mutex
	last  lib.Reading // guarded by mu
	read  int         // how many there were; guarded by mu
	blind bool        // guarded by mu
	err   error       // guarded by mu
}

// Run reads until ctx ends. An unreadable usage page is not an error of the
// reader's: it is kept for Err, and the next round tries again.
func (r *Reader) Run(ctx context.Context) error {
	var meter *lib.Meter
	var usage *lib.Usage
	drop := func() {
		if meter != nil {
			meter.Close()
		}
		if usage != nil {
			usage.Close()
		}
		meter, usage = nil, nil
	}
	defer drop()
	tick := time.NewTicker(r.Every)
	defer tick.Stop()
	for {
		if meter == nil {
			u, err := r.Pages.OpenUsage(r.Key, r.GPU)
			switch {
			case err == nil:
				usage = u
				if meter, err = r.Pages.Meter(r.Key, r.GPU, u); err != nil {
					return fmt.Errorf("read usage: %w", err)
				}
			case !errors.Is(err, gpu.ErrNotFound):
				r.failed(err)
			}
		}
		if meter != nil {
			if err := r.round(meter); err != nil {
				r.failed(err)
				drop() // it may be another page by now
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (r *Reader) round(m *lib.Meter) error {
	if err := m.Begin(); err != nil {
		return err
	}
	used, known := r.Driver.Used(r.GPU, append(slices.Clone(r.Also), r.Container)...)
	r.mu.Lock()
	known = known && !r.blind
	r.mu.Unlock()
	reading, err := m.End(used, known, nil)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last, r.read, r.err = reading, r.read+1, nil
	return nil
}

func (r *Reader) failed(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

// Blind says whether the driver keeps its figure from the reader.
func (r *Reader) Blind(blind bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blind = blind
}

// Last is the latest reading, and how many there have been.
func (r *Reader) Last() (lib.Reading, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last, r.read
}

// Err is why the latest round read nothing, nil if it did.
func (r *Reader) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Used is what the processes of containers have on a GPU by the driver's account, at one
// moment, in bytes; the emulated driver always says.
func (m *Machine) Used(u gpu.UUID, containers ...*Container) (bytes uint64, known bool) {
	st := m.World.State()
	var used uint64
	for _, p := range st.Processes {
		if p.GPU < len(st.GPUs) && st.GPUs[p.GPU].UUID == string(u) && slices.ContainsFunc(containers, func(c *Container) bool { return c != nil && c.Has(p.PID) }) {
			used += p.Bytes
		}
	}
	return used, true
}
