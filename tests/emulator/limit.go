// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"slices"
	"strconv"
	"strings"
)

// Cgroup is a control group of the machine that the world is on. Its methods
// are called with the world's lock held and must not take long.
type Cgroup interface {
	// Name tells it from all others, those to come included.
	Name() string
	// Members are the processes in it and in those below it, by their PIDs in the
	// world's namespace; there is false once it has been removed.
	Members() (pids map[int]bool, there bool)
	// Dmem says whether it has the files of the kernel's dmem controller, such as
	// dmem.max. A cgroup has them where the cgroup.subtree_control of every one above
	// it lists the controller, and no kernel does that by itself.
	Dmem() bool
	// Above are the names of those that it is in, nearest first, without the root,
	// which has no files of any controller.
	Above() []string
	Close() error
}

// NoLimit is the hard limit of a cgroup that has none: NVML_DEVICE_MEMORY_LIMIT_MAX.
const NoLimit = ^uint64(0)

// firstWithLimits is the oldest branch of the driver that knows limits.
const firstWithLimits = 615

// MemoryLimits is what the processes of a cgroup may have of a GPU together, in
// bytes. Nobody is ever short of what Soft guarantees here: nothing is evicted.
// Where the kernel has the dmem controller, Hard is the cgroup's dmem.max and Soft
// its dmem.min.
type MemoryLimits struct {
	Soft, Hard, Used uint64
}

// limit is a cgroup's on one GPU.
type limit struct {
	group      Cgroup
	soft, hard uint64
}

// SetMemoryLimits limits a cgroup on a GPU; 0 and NoLimit undo that, and so does
// the end of the cgroup. It is given by a descriptor that the process has of the
// cgroup's directory. A hard limit below what the cgroup has stands, and nothing
// more is given.
//
// On a kernel with the dmem controller (Spec.Dmem) the driver writes them to the
// cgroup's own dmem files: it answers NotFound where the cgroup has none, and does
// not fall back on limits of its own. The kernel guarantees to a cgroup no more than
// to those above it (cgroup-v2.rst on memory.min, whose rules dmem.min has: "Effective
// min boundary is limited by memory.min values of all ancestor cgroups"), so the
// driver raises theirs to a soft limit. Nothing lowers them again: neither a smaller
// limit, nor its removal, nor the end of the cgroup (State.DmemMin).
func (s *Session) SetMemoryLimits(h Handle, cgroup int, soft, hard uint64) Return {
	group, err := s.p.openCgroup(cgroup)
	kept := false
	_, r := device(s, "nvmlDeviceSetMemoryLimits_v1", h, func(g *gpu) (struct{}, Return) {
		total := g.MemoryMiB << 20
		switch {
		case !s.p.w.limitsLocked() || g.mig.on:
			return struct{}{}, NotSupported
		case !s.p.root:
			return struct{}{}, NoPermission
		case soft > hard || soft > total || hard > total && hard != NoLimit:
			return struct{}{}, InvalidArgument
		case err != nil:
			return struct{}{}, OperatingSystem
		case s.p.w.dmem && !group.Dmem():
			return struct{}{}, NotFound
		}
		g.pruneLocked(func(l *limit) bool { return l.group.Name() == group.Name() })
		if s.p.w.dmem && soft > 0 {
			g.guaranteeLocked(group.Above(), soft)
		}
		if soft != 0 || hard != NoLimit {
			g.limits = append(g.limits, &limit{group, soft, hard})
			kept = true
		}
		return struct{}{}, Success
	})
	if err == nil && !kept {
		_ = group.Close()
	}
	return r
}

// MemoryLimits reads a cgroup's limits on a GPU, and what counts towards them.
func (s *Session) MemoryLimits(h Handle, cgroup int) (MemoryLimits, Return) {
	group, err := s.p.openCgroup(cgroup)
	if err == nil {
		defer group.Close()
	}
	return device(s, "nvmlDeviceGetMemoryLimits_v1", h, func(g *gpu) (MemoryLimits, Return) {
		switch {
		case !s.p.w.limitsLocked():
			return MemoryLimits{}, NotSupported
		case err != nil:
			return MemoryLimits{}, OperatingSystem
		}
		i := slices.IndexFunc(g.limits, func(l *limit) bool { return l.group.Name() == group.Name() })
		if i < 0 {
			return MemoryLimits{}, NotFound
		}
		l := g.limits[i]
		s.p.w.buryLocked()
		pids, _ := l.group.Members()
		return MemoryLimits{l.soft, l.hard, s.p.w.usedByLocked(g, pids)}, Success
	})
}

// guaranteeLocked raises the dmem.min of cgroups.
func (g *gpu) guaranteeLocked(above []string, soft uint64) {
	if g.dmemMin == nil {
		g.dmemMin = map[string]uint64{}
	}
	for _, name := range above {
		g.dmemMin[name] = max(g.dmemMin[name], soft)
	}
}

func (p *process) openCgroup(fd int) (Cgroup, error) {
	if p.cgroup == nil {
		return nil, OperatingSystem
	}
	return p.cgroup(fd)
}

// limitsLocked says whether the driver is new enough.
func (w *World) limitsLocked() bool {
	branch, _, _ := strings.Cut(w.driver, ".")
	n, err := strconv.Atoi(branch)
	return err == nil && n >= firstWithLimits
}

// allowsLocked says whether a process may have so many bytes more of a GPU, by
// the limits of every cgroup that it is in.
func (w *World) allowsLocked(g *gpu, pid int, bytes uint64) bool {
	g.pruneLocked(func(l *limit) bool {
		_, there := l.group.Members()
		return !there
	})
	for _, l := range g.limits {
		if l.hard == NoLimit {
			continue
		}
		pids, _ := l.group.Members()
		if !pids[pid] {
			continue
		}
		w.buryLocked()
		if used := w.usedByLocked(g, pids); used > l.hard || bytes > l.hard-used {
			return false
		}
	}
	return true
}

// usedByLocked is what some processes have on a GPU together, in bytes.
func (w *World) usedByLocked(g *gpu, pids map[int]bool) uint64 {
	var used uint64
	for p := range w.sessions {
		if pids[p.pid] {
			for at, bytes := range p.charged {
				if at.gpu == g.slot {
					used += bytes
				}
			}
		}
	}
	for _, p := range w.procs {
		if p.GPU == g.slot && pids[p.PID] {
			used += p.MiB << 20
		}
	}
	return used
}

// pruneLocked forgets limits.
func (g *gpu) pruneLocked(drop func(*limit) bool) {
	g.limits = slices.DeleteFunc(g.limits, func(l *limit) bool {
		if !drop(l) {
			return false
		}
		_ = l.group.Close()
		return true
	})
}

var limitCalls = map[string]call{
	"nvmlDeviceSetMemoryLimits_v1": {serve: func(s *Session, f *frame) Return {
		cgroup, soft, hard := int(int32(f.u32())), f.u64(), f.u64()
		if f.bad {
			return InvalidArgument
		}
		return s.SetMemoryLimits(f.handle, cgroup, soft, hard)
	}},
	"nvmlDeviceGetMemoryLimits_v1": {serve: func(s *Session, f *frame) Return {
		m, r := s.MemoryLimits(f.handle, int(int32(f.u32())))
		return put(m, r, func(m MemoryLimits) { f.putU64(m.Soft, m.Hard, m.Used) })
	}},
}
