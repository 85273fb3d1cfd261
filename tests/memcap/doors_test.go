// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
	"example.com/gpu-agent/tests/memcap/probe"
)

// Sizes of the table: requests are whole blocks of the driver, and the room is
// not a whole number of them.
const (
	request = 32 * MiB
	room    = 1*GiB + 10*MiB
	// block is what the driver takes memory by; a process can have one that is
	// not full.
	block = 2 * MiB
)

// door is a way to the library: a door of the probe's, in an environment.
type door struct {
	name    string
	probe   string // its door; empty is the same name
	program string // default probe
	env     []string
	change  func(*rig, *specs.ContainerEdits, *capsule.Image)
	brief   bool // alone only
}

// Where a tenant may have a driver library of its own.
const ownLibrary = "/opt/tenant/libcuda.so.1"

// Where images of CUDA have driver libraries.
const compatDir = "/usr/local/cuda/compat"

// socket leads the emulated driver to its daemon from wherever it was loaded.
var socket = "GPU_EMULATOR_SOCKET=/run/nvidia-persistenced/socket"

func doors(t *testing.T) []door {
	all := []door{
		{name: "compat", probe: "soname", env: []string{"LD_LIBRARY_PATH=" + compatDir, socket}, change: withCompat},
		{name: "compat, open", probe: "soname", env: []string{"LD_LIBRARY_PATH=" + compatDir, socket}, brief: true,
			change: func(r *rig, edits *specs.ContainerEdits, image *capsule.Image) {
				withCompat(r, edits, image)
				edits.Hooks = slices.DeleteFunc(edits.Hooks, capsule.Hides)
			}},
		{name: "own copy", probe: "path", env: []string{"LIBCUDA=" + ownLibrary, socket}, brief: true,
			change: func(r *rig, _ *specs.ContainerEdits, image *capsule.Image) { image.Files[ownLibrary] = r.driver() }},
		{name: "beneath", probe: "path", env: []string{"LIBCUDA=" + lib.RealCUDA, socket}, brief: true},
	}
	for _, name := range probe.Doors {
		d := door{name: name, program: probe.Program}
		if name == "linked" {
			d.program = probe.Linked
		}
		all = append(all, d)
	}
	for i := range all {
		if all[i].probe == "" {
			all[i].probe = all[i].name
		}
		if all[i].program == "" {
			all[i].program = probe.Program
		}
	}
	return all
}

// driver is the machine's own driver library.
func (r *rig) driver() []byte {
	data, err := os.ReadFile(filepath.Join(r.m.Driver, capsule.Libraries, emulib.CUDA+"."+r.state.Driver))
	if err != nil {
		r.t.Fatal(err)
	}
	return data
}

// withCompat gives the image a driver library of its own at the usual place.
func withCompat(r *rig, _ *specs.ContainerEdits, image *capsule.Image) {
	if image.Files == nil {
		image.Files = map[string][]byte{}
	}
	image.Files[compatDir+"/libcuda.so.1"] = r.driver()
}

type mode struct {
	name               string
	processes, threads int
	args               []string
	env                []string
	early              uint64 // what is there before the team begins, beside contexts
	request            uint64 // default request
}

var modes = []mode{
	{name: "alone", processes: 1, threads: 1},
	{name: "environment", processes: 1, threads: 1, env: []string{
		"PATH=/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8", "LD_LIBRARY_PATH=/usr/local/lib:" + capsule.Libraries, "NVIDIA_VISIBLE_DEVICES=all"}},
	{name: "threads", processes: 1, threads: 8},
	{name: "exec", processes: 4, threads: 1, args: []string{"-start", "exec", "-early"}, early: 32 * MiB},
	{name: "64", processes: 64, threads: 1, args: []string{"-start", "both"}, request: 8 * MiB},
}

// exception is a set of rows that are not held. Empty is any.
type exception struct {
	door, call, reason string
}

// exceptions are the rows that the library does not hold. Each has its line in
// the table of guarantees in docs/caps-held.md or is no business of a cap.
var exceptions = []exception{
	{door: "own copy", reason: "a tenant's own copy of the driver library knows nothing of the cap: the watchdog's"},
	{door: "beneath", reason: "a program that opens the real library at its other path goes round the cap: the watchdog's"},
	{door: "compat, open", reason: "under the open policy the image's own driver library is not covered: the watchdog's"},
	{call: "cuModuleLoadData", reason: "what a module takes is known when it is there: what is over then is unloaded at once, and was out of memory (modules-beyond-the-cap)"},
	{call: "cuMemHostAlloc", reason: "memory of the host is none of the GPU's"},
}

func excepted(door, call string) string {
	for _, e := range exceptions {
		if (e.door == "" || e.door == door) && (e.call == "" || e.call == call) {
			return e.reason
		}
	}
	return ""
}

// absent are rows that cannot be, as the door has no such name.
func absent(door, call string) bool { return false }

// board collects the table.
type board struct {
	mu   sync.Mutex
	rows int               // guarded by mu
	cell map[string]string // by call, door and mode; guarded by mu
}

func (b *board) put(call, door, mode, word string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rows++
	b.cell[call+"\t"+door+"\t"+mode] = word
}

// String is one line for each call and door, with a word for each mode.
func (b *board) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	lines := map[string][]string{}
	for _, key := range slices.Sorted(maps.Keys(b.cell)) {
		f := strings.Split(key, "\t")
		name := fmt.Sprintf("%-14s %-30s", f[1], f[0])
		lines[name] = append(lines[name], f[2]+" "+b.cell[key])
	}
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(lines)) {
		fmt.Fprintf(&out, "%s %s\n", name, strings.Join(lines[name], ", "))
	}
	fmt.Fprintf(&out, "%d rows", b.rows)
	return out.String()
}

// TestDoors is every allocating call × every door × every way to run.
func TestDoors(t *testing.T) {
	const gpus = 4 // so many containers at once
	r := newRig(t, emulator.Spec{Model: "H200-141GB", Count: gpus})
	free := make(chan int, gpus)
	for i := range gpus {
		free <- i
	}
	table := &board{cell: map[string]string{}}
	t.Run("table", func(t *testing.T) {
		for _, d := range doors(t) {
			for _, m := range modes {
				if d.brief && m.name != "alone" || d.env != nil && m.env != nil {
					continue
				}
				t.Run(d.name+"/"+m.name, func(t *testing.T) {
					t.Parallel()
					index := <-free
					defer func() { free <- index }()
					r.cells(t, table, d, m, index)
				})
			}
		}
	})
	t.Logf("\n%s", table)
}

// cells runs all calls by one door in one mode, by one team.
func (r *rig) cells(t *testing.T, table *board, d door, m mode, index int) {
	limit := uint64(m.processes)*context300 + m.early + room
	b := r.allocate(t, strings.NewReplacer(" ", "-", ",", "").Replace(d.name+"-"+m.name), []share{{gpu: index, bytes: limit}}, false,
		func(edits *specs.ContainerEdits, image *capsule.Image) {
			if image.Files == nil {
				image.Files = map[string][]byte{}
			}
			if d.change != nil {
				d.change(r, edits, image)
			}
		})
	defer b.close(t)
	args := append([]string{"-door", d.probe, "-processes", fmt.Sprint(m.processes), "-threads", fmt.Sprint(m.threads)}, m.args...)
	team := b.tool(t, d.program, append(slices.Clone(d.env), m.env...), args...)
	ready, err := team.line()
	if err != nil || ready[""] != "ready" {
		t.Fatalf("the team does not start: %q %v", team.said, err)
	}
	base := r.used(index)
	left := limit - base
	for _, call := range probe.Calls {
		bytes, slack := cmp.Or(m.request, request), uint64(0)
		switch call {
		case "cuCtxCreate_v2":
			bytes = context300
		case "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync/kept":
			bytes = request // a pool grows by no less
		case "cuMemAlloc_v2/small":
			slack = block * uint64(m.processes*m.threads) // each that is under way is a block until it is known better
		}
		if err := r.m.World.ResetPeak(index); err != nil {
			t.Fatal(err)
		}
		row, err := team.tryAsk("row", "fill %s %d %d %d", call, bytes, left, slack)
		if err != nil {
			t.Fatal(err)
		}
		if lacks, is := row["absent"]; is != absent(d.name, call) {
			t.Errorf("%s: absent %t (%s)", call, is, lacks)
			continue
		} else if is {
			table.put(call, d.name, m.name, "absent")
			continue
		}
		if row["failure"] != "" {
			t.Errorf("%s: %s", call, row["failure"])
		}
		peak := r.peak(index)
		over := peak > limit || row.n("highest") > left
		reason := excepted(d.name, call)
		switch {
		case reason == "" && over:
			t.Errorf("%s: %d MiB over the cap (a peak of %d MiB, %d MiB granted of %d)", call,
				(int64(max(peak, base+row.n("highest")))-int64(limit))/MiB, peak/MiB, row.n("highest")/MiB, left/MiB)
			table.put(call, d.name, m.name, "OVER")
			continue
		case reason != "" && !over && m.processes*m.threads == 1:
			// Of several that load at a time each may be charged for the others, and all are refused
			// before one is over. That is no news of the list.
			t.Errorf("%s: held, and the list of exceptions says: %s", call, reason)
			continue
		case reason != "":
			table.put(call, d.name, m.name, "not held")
			continue
		}
		unit := row.n("unit")
		// What a pool keeps, and the holes in blocks that are not quite empty,
		// are nobody else's: the second time others may have to do without.
		private := m.processes*m.threads > 1 && strings.HasSuffix(call, "/kept") || m.processes > 1 && strings.HasSuffix(call, "/small")
		short := func(got uint64) bool { return left-got >= unit+slack }
		if got := row.n("first"); short(got) {
			t.Errorf("%s: refused with room left: %d MiB granted of %d, requests of %d KiB", call, got/MiB, left/MiB, unit>>10)
		}
		if got := row.n("second"); short(got) && !(private && got > row.n("kept")) {
			t.Errorf("%s: refused with room left the second time: %d MiB granted of %d, requests of %d KiB", call, got/MiB, left/MiB, unit>>10)
		}
		if row.n("early") != 0 && !private {
			t.Errorf("%s: %s requests refused with room left, at most %d MiB", call, row["early"], row.n("spare")/MiB)
		}
		if row.n("refused") == 0 || row.n("kept") >= row.n("first") || row.n("left") != 0 {
			t.Errorf("%s: it did not do its work: %q", call, team.said)
		}
		if now := r.used(index); now != base {
			t.Errorf("%s: %d bytes used before, %d after", call, base, now)
		}
		table.put(call, d.name, m.name, "held")
	}
	team.quit()
}
