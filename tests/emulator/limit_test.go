// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"errors"
	"maps"
	"math"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// group is a cgroup in memory; every descriptor of a process is of one.
type group struct {
	name string
	pids map[int]bool
	gone bool
	open int

	files bool     // of the dmem controller
	above []string // names
}

func (g *group) Name() string                  { return g.name }
func (g *group) Members() (map[int]bool, bool) { return g.pids, !g.gone }
func (g *group) Close() error                  { g.open--; return nil }
func (g *group) Dmem() bool                    { return g.files }
func (g *group) Above() []string               { return g.above }

func TestMemoryLimits(t *testing.T) {
	const MiB = 1 << 20
	none := uint64(emulator.NoLimit)
	w := newWorld(t, emulator.Spec{Driver: "615.11", Count: 2, GPUs: []emulator.GPUSpec{{MemoryMiB: 1048, ReservedMiB: 48}}})
	groups := []*group{
		{name: "pod", pids: map[int]bool{10: true, 11: true}},
		{name: "container", pids: map[int]bool{11: true}},
	}
	find := func(fd int) (emulator.Cgroup, error) {
		if fd < 0 || fd >= len(groups) {
			return nil, errors.New("not there")
		}
		groups[fd].open++
		return groups[fd], nil
	}
	root := open(t, w, emulator.Opening{PID: 1, Cgroup: find})
	nobody := open(t, w, emulator.Opening{PID: 2, Unprivileged: true, Cgroup: find})
	first, second := open(t, w, emulator.Opening{PID: 10}), open(t, w, emulator.Opening{PID: 11})
	outside := open(t, w, emulator.Opening{PID: 12})

	for _, c := range []struct {
		what       string
		s          *emulator.Session
		h          emulator.Handle
		fd         int
		soft, hard uint64
		want       emulator.Return
	}{
		{"by nobody", nobody, 0, 0, 0, 100 * MiB, emulator.NoPermission},
		{"soft over hard", root, 0, 0, 101 * MiB, 100 * MiB, emulator.InvalidArgument},
		{"more than there is", root, 0, 0, 0, 1049 * MiB, emulator.InvalidArgument},
		{"soft, more than there is", root, 0, 0, 1049 * MiB, none, emulator.InvalidArgument},
		{"a GPU that is not there", root, 7, 0, 0, 100 * MiB, emulator.InvalidArgument},
		{"a cgroup that is not there", root, 0, -1, 0, 100 * MiB, emulator.OperatingSystem},
		{"a machine without cgroups", outside, 0, 0, 0, 100 * MiB, emulator.OperatingSystem},
		{"what is set", root, 0, 0, 100 * MiB, 200 * MiB, emulator.Success},
		{"the same anew", root, 0, 0, 100 * MiB, 100 * MiB, emulator.Success},
	} {
		want(t, c.what, c.s.SetMemoryLimits(c.h, c.fd, c.soft, c.hard), c.want)
	}
	want(t, "cgroups that are open", groups[0].open, 1)

	read := func(what string, h emulator.Handle, fd int, m emulator.MemoryLimits, r emulator.Return) {
		t.Helper()
		got, code := nobody.MemoryLimits(h, fd)
		want(t, what+": answer", code, r)
		want(t, what, got, m)
	}
	take := func(what string, s *emulator.Session, h emulator.Handle, bytes int64, r emulator.Return) {
		t.Helper()
		want(t, what, s.Charge("cuMemAlloc_v2", h, bytes), r)
	}
	take("some", first, 0, 60*MiB, emulator.Success)
	take("more than is left, by another", second, 0, 40*MiB+1, emulator.OutOfMemory)
	take("what is left, by another", second, 0, 40*MiB, emulator.Success)
	take("one byte more", first, 0, 1, emulator.OutOfMemory)
	take("a number beyond all", first, 0, math.MaxInt64, emulator.OutOfMemory)
	take("a neighbour", outside, 0, 500*MiB, emulator.Success)
	take("the other GPU", first, 1, 500*MiB, emulator.Success)
	read("at the limit", 0, 0, emulator.MemoryLimits{Soft: 100 * MiB, Hard: 100 * MiB, Used: 100 * MiB}, emulator.Success)
	read("on another GPU", 1, 0, emulator.MemoryLimits{}, emulator.NotFound)
	read("of another cgroup", 0, 1, emulator.MemoryLimits{}, emulator.NotFound)
	read("of none", 0, -1, emulator.MemoryLimits{}, emulator.OperatingSystem)

	// Below what it has: nothing is taken away, nothing more is given.
	want(t, "a lower limit", root.SetMemoryLimits(0, 0, 0, 10*MiB), emulator.Success)
	take("over it", second, 0, 1, emulator.OutOfMemory)
	take("back", first, 0, -60*MiB, emulator.Success)
	take("still over it", second, 0, 1, emulator.OutOfMemory)

	// A group within the group: the stricter one counts.
	want(t, "the outer one", root.SetMemoryLimits(0, 0, 0, 300*MiB), emulator.Success)
	want(t, "the inner one", root.SetMemoryLimits(0, 1, 50*MiB, 50*MiB), emulator.Success)
	take("over the inner one", second, 0, 11*MiB, emulator.OutOfMemory)
	take("within the outer one", first, 0, 100*MiB, emulator.Success)
	groups[1].gone = true
	take("without the inner one", second, 0, 11*MiB, emulator.Success)
	want(t, "the removed one is open", groups[1].open, 0)

	want(t, "no limit", root.SetMemoryLimits(0, 0, 0, none), emulator.Success)
	read("without one", 0, 0, emulator.MemoryLimits{}, emulator.NotFound)
	take("without one", first, 0, 300*MiB, emulator.Success)
	want(t, "cgroups that are open", groups[0].open, 0)

	old := open(t, newWorld(t, emulator.Spec{Count: 1, Driver: "610.43.02"}), emulator.Opening{PID: 1, Cgroup: find})
	want(t, "an older driver", old.SetMemoryLimits(0, 0, 0, 100*MiB), emulator.NotSupported)
	_, r := old.MemoryLimits(0, 0)
	want(t, "an older driver", r, emulator.NotSupported)
	want(t, "cgroups that are open", groups[0].open, 0)
}

// TestMemoryLimitsGoWithTheDriver: a card that begins anew has none.
func TestMemoryLimitsGoWithTheDriver(t *testing.T) {
	w := newWorld(t, emulator.Spec{Driver: "615.11", Count: 1})
	g := &group{name: "a", pids: map[int]bool{10: true}}
	s := open(t, w, emulator.Opening{PID: 10, Cgroup: func(int) (emulator.Cgroup, error) { g.open++; return g, nil }})
	want(t, "set", s.SetMemoryLimits(0, 0, 0, 1<<20), emulator.Success)
	if err := w.Reset(0); err != nil {
		t.Fatal(err)
	}
	_, r := s.MemoryLimits(0, 0)
	want(t, "after a reset", r, emulator.NotFound)
	want(t, "cgroups that are open", g.open, 0)
}

// TestMemoryLimitsNeedDmemFiles: a kernel with the dmem controller, on which nobody
// has switched it on for the cgroup. The driver says "not found" of a cgroup that is
// there.
func TestMemoryLimitsNeedDmemFiles(t *testing.T) {
	w := newWorld(t, emulator.Spec{Driver: "615.11", Count: 1, Dmem: true})
	g := &group{name: "container", pids: map[int]bool{10: true}}
	s := open(t, w, emulator.Opening{PID: 10, Cgroup: func(fd int) (emulator.Cgroup, error) {
		if fd < 0 {
			return nil, errors.New("not there")
		}
		g.open++
		return g, nil
	}})
	want(t, "without dmem.max", s.SetMemoryLimits(0, 0, 0, 1<<20), emulator.NotFound)
	_, r := s.MemoryLimits(0, 0)
	want(t, "of it", r, emulator.NotFound)
	want(t, "of a cgroup that is not there", s.SetMemoryLimits(0, -1, 0, 1<<20), emulator.OperatingSystem)
	want(t, "no limit, without dmem.max", s.SetMemoryLimits(0, 0, 0, emulator.NoLimit), emulator.NotFound)
	want(t, "it has what it likes", s.Charge("cuMemAlloc_v2", 0, 2<<20), emulator.Success)

	g.files = true
	want(t, "with dmem.max", s.SetMemoryLimits(0, 0, 0, 2<<20), emulator.Success)
	want(t, "over it", s.Charge("cuMemAlloc_v2", 0, 1), emulator.OutOfMemory)
	want(t, "cgroups that are open", g.open, 1)
}

// TestSoftLimitsStayWithTheCgroupsAbove: what a soft limit has raised there stays,
// and a soft limit of 0 raises nothing.
func TestSoftLimitsStayWithTheCgroupsAbove(t *testing.T) {
	w := newWorld(t, emulator.Spec{Driver: "615.11", Count: 2, Dmem: true})
	groups := []*group{
		{name: "a", files: true, above: []string{"pod", "burstable", "kubepods"}},
		{name: "b", files: true, above: []string{"other", "burstable", "kubepods"}},
	}
	s := open(t, w, emulator.Opening{PID: 1, Cgroup: func(fd int) (emulator.Cgroup, error) { groups[fd].open++; return groups[fd], nil }})
	min := func(what string, want map[string]uint64) {
		t.Helper()
		got := map[string]uint64{}
		for _, m := range w.State().DmemMin {
			if m.GPU != 0 {
				t.Errorf("%s: on another GPU: %v", what, m)
			}
			got[m.Cgroup] = m.Bytes
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: dmem.min %v, want %v", what, got, want)
		}
	}
	want(t, "hard alone", s.SetMemoryLimits(0, 0, 0, 8<<20), emulator.Success)
	min("hard alone", nil)
	want(t, "soft", s.SetMemoryLimits(0, 0, 8<<20, 8<<20), emulator.Success)
	want(t, "soft, of another", s.SetMemoryLimits(0, 1, 4<<20, 8<<20), emulator.Success)
	raised := map[string]uint64{"pod": 8 << 20, "other": 4 << 20, "burstable": 8 << 20, "kubepods": 8 << 20}
	min("soft", raised)
	want(t, "lowered", s.SetMemoryLimits(0, 0, 0, 2<<20), emulator.Success)
	want(t, "cleared", s.SetMemoryLimits(0, 1, 0, emulator.NoLimit), emulator.Success)
	groups[0].gone = true
	want(t, "after the end of a cgroup", s.Charge("cuMemAlloc_v2", 0, 4<<20), emulator.Success)
	min("lowered, cleared and gone", raised)
}
