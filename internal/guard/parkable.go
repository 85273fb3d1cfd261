// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/park"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// Parkables finds out what has to be parked with a container.
type Parkables struct {
	Driver Driver
	Proc   Proc
	// Cgroups returns the directory of a container's own cgroup with the memory controller, and that of its hierarchy;
	// node.Runtime implements it.
	Cgroups interface {
		MemoryCgroup(node.Owner) (dir, root string, err error)
	}
	// Counters opens the usage page of an allocation on a GPU; lib.Pages implements it.
	Counters interface {
		OpenUsage(key string, u gpu.UUID) (*lib.Usage, error)
	}
}

// Find returns the processes of a container that have memory on an allocation's GPUs, with what they have there. The
// error says why the container cannot be parked: it has managed or exported memory, as far as its programs count
// that, or its processes or their cgroup cannot be told.
func (p Parkables) Find(ctx context.Context, key string, c *node.Container, gpus []gpu.UUID) (park.Set, error) {
	set := park.Set{Key: key}
	var owner node.Owner
	starts := map[int]uint64{}
	for _, u := range gpus {
		if err := p.counts(key, u); err != nil {
			return park.Set{}, err
		}
		on, err := p.Driver.Processes(ctx, u)
		if err != nil {
			return park.Set{}, fmt.Errorf("list the processes on %s: %w", u, err)
		}
		counted := map[int]bool{}
		for _, process := range on {
			o, err := p.Proc.Container(process.PID)
			if err != nil || o.ID != c.ID || counted[process.PID] {
				continue // it has ended or is another's, or the driver lists it once more, as graphics
			}
			if !process.Known {
				return park.Set{}, fmt.Errorf("the driver does not tell what process %d has on %s: %w", process.PID, u, gpu.ErrNotSupported)
			}
			counted[process.PID], starts[process.PID], owner = true, o.Start, o
			set.Bytes += process.Bytes
		}
	}
	for pid, start := range starts {
		set.Processes = append(set.Processes, park.Process{PID: pid, Start: start})
	}
	if len(set.Processes) == 0 {
		return park.Set{}, fmt.Errorf("container %s has no process on its GPUs: %w", c.ID, gpu.ErrNotFound)
	}
	slices.SortFunc(set.Processes, func(a, b park.Process) int { return cmp.Compare(a.PID, b.PID) })
	var err error
	if set.Cgroup, set.CgroupRoot, err = p.Cgroups.MemoryCgroup(owner); err != nil {
		return park.Set{}, err
	}
	return set, nil
}

// counts returns an error if a container's programs have memory that the driver may not checkpoint.
func (p Parkables) counts(key string, u gpu.UUID) (err error) {
	usage, err := p.Counters.OpenUsage(key, u)
	if errors.Is(err, gpu.ErrNotFound) {
		return nil // nothing is counted on a GPU without a cap
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, usage.Close()) }()
	c, err := usage.Read()
	switch {
	case err != nil:
		return err
	case c.Managed > 0:
		return fmt.Errorf("it has %d bytes of managed memory on %s: %w", c.Managed, u, gpu.ErrNotSupported)
	case c.Exported > 0:
		return fmt.Errorf("it has exported %d bytes on %s: %w", c.Exported, u, gpu.ErrNotSupported)
	}
	return nil
}
