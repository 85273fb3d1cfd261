// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"cmp"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/probe"
)

// scenario is a program of a few lines that a cap once failed: it went over, was
// refused what would have fitted, or was kept waiting. The probe has a routine of
// the same name (probe/c/scenario.h).
type scenario struct {
	// name is the defect's.
	name string
	// room is what the cap leaves beside contexts; default 1 GiB.
	room uint64
	// contexts is how many contexts the program has; default 1. They are inside
	// the cap.
	contexts int
	// cuda is a list of behaviours of the emulated driver, each as
	// GPU_EMULATOR_CUDA has it; the program is run under each. Default modesOfCUDA.
	cuda []string
	// open: the allocation is under the open policy.
	open bool
	// unread: nobody reads the driver meanwhile, so that the count alone has to hold.
	unread bool
	// undo is by how many bytes the peak may be over the cap: for the moment of an
	// undo, that is one request, and only where the driver leaves nothing better.
	undo uint64
	// pieces is the same in pieces, by which the driver's pools grow.
	pieces uint64
	// generous says why a bare card of the cap's size refuses less than the cap
	// does. Empty: it must not; a refusal is justified where the card refuses too.
	generous string
	// check looks at the rest and returns what is wrong. It may be nil.
	check func(o outcome) []string
	// todo says why the row fails as yet. It then has to fail under one of its
	// behaviours at least, so that whoever mends it removes the mark.
	todo string
}

// outcome is how one run of a scenario went.
type outcome struct {
	piece  uint64 // by what pools grow
	fields        // what the routine printed; see scenario in probe/c/scenarios.c
	bare   fields // what it printed on a bare card of the cap's size; nil where the row is generous
	limit  uint64 // the cap, contexts in it
	room   uint64 // the cap without them
	peak   uint64 // what the driver says the GPU had at most
	used   uint64 // what the driver says it still has when the program has done its work
	asks   uint64 // how often the program waited for a reading, by its usage page
	// settled is how many bytes gave no room before the next reading, since they were gone before
	// the library took them off, by the usage page.
	settled uint64
}

// suggested is the driver that NVIDIA's documentation suggests, where an H200's differs.
const suggested = "trim=passed,ipc-pools=kept,pool-max=exact,heap=set,green-mib=2"

// modesOfCUDA are the behaviours of drivers under which everything has to hold.
var modesOfCUDA = []string{"", "strict", suggested}

// graphsOfCUDA are those of graphs' memory.
var graphsOfCUDA = []string{"", "strict", "graphs=ordered", "used=pending"}

// scenarios is the table. Rows stand by theme, in the order of the probe's.
var scenarios = slices.Concat(poolScenarios, []scenario{
	// scenario_graphs.c
	{name: "graph-that-has-its-own-again", cuda: graphsOfCUDA},
	{name: "graphs-on-two-streams", cuda: graphsOfCUDA},
	// What a launch takes is found out by having the driver take it.
	{name: "graph-refused-again-and-again", cuda: graphsOfCUDA, undo: 128 * MiB, check: answered},
	// scenario_refusals.c
	{name: "refused-again-and-again", generous: "it counts tries", check: answered},
	{name: "refused-after-a-context", contexts: 2, check: answered},
	{name: "refused-beside-one-that-fits", check: answered},
	// scenario_exports.c
	{name: "created-exported-and-released"},
	{name: "registered-and-released"},
	// One refusal in each of 16 rounds is right, and there were two. That a descriptor is
	// closed the emulator hears a moment later.
	{name: "room-when-the-importer-lets-go", generous: "it hears of a closed descriptor too late", check: refusedOnce},
	{name: "room-when-the-importer-closes", generous: "it hears of a closed descriptor too late", check: refusedOnce},
	{name: "room-when-the-importer-frees", generous: "it hears of a closed descriptor too late", check: refusedOnce},
	{name: "pool-exported-and-destroyed", unread: true},
	{name: "made-in-a-locality-domain", cuda: []string{"version=13040", "strict,version=13040"}},
	{name: "made-of-an-unknown-type", generous: "what a driver says to it is its own", check: func(o outcome) (wrong []string) {
		for _, what := range []string{"type", "location"} {
			if o.n(what) != 2 {
				wrong = append(wrong, fmt.Sprintf("%s: answered %s, want out of memory", what, o.fields[what]))
			}
		}
		return wrong
	}},
	// scenario_limits.c
	{name: "heap-beyond-the-cap", generous: "a card that takes a heap's memory later takes the limit on trust"},
	{name: "stacks-beyond-the-cap"},
	{name: "heap-rises-and-falls", cuda: []string{"heap=set"}},
	// A module's size is not known before it is there.
	{name: "heap-taken-at-the-first-kernel", cuda: []string{"", "heap=launch"},
		generous: "a card lets others have a heap's memory until a kernel wants it, and then fails the kernel"},
	{name: "heap-taken-by-another-process", contexts: 2, cuda: []string{"", "heap=launch", "strict", "heap=set"}, check: func(o outcome) []string {
		if got, card := o.n("taken"), o.bare.n("taken"); got < card {
			return []string{fmt.Sprintf("the other process was granted %d MiB; a bare card of that size grants %d", got/MiB, card/MiB)}
		}
		return nil
	}},
	{name: "heap-raised-while-exports-go", cuda: []string{"heap=set", "strict,heap=set"}, generous: "it hears of a closed descriptor too late"},
	{name: "modules-beyond-the-cap", undo: 64 * MiB, check: func(o outcome) []string {
		if o.used > o.limit {
			return []string{fmt.Sprintf("%d MiB over the cap in the end", (o.used-o.limit)/MiB)}
		}
		return nil
	}},
	{name: "modules-beside-another-process", contexts: 2, unread: true},
	{name: "small-one-without-its-hole", contexts: 2, undo: block},
	{name: "green-context-without-room", unread: true},
	// What a context takes is asked once for each of the hundred.
	{name: "primary-context-again", check: func(o outcome) []string {
		var wrong []string
		if o.asks > 120 {
			wrong = append(wrong, fmt.Sprintf("waited for %d readings", o.asks))
		}
		if o.settled > o.limit-o.room { // what contexts were charged too much, at most
			wrong = append(wrong, fmt.Sprintf("%d MiB gave no room before the next reading", o.settled/MiB))
		}
		return wrong
	}},
	{name: "asked-for-one-figure", check: func(o outcome) []string {
		if total, free := o.n("total"), o.n("free"); total != o.limit || free > o.room {
			return []string{fmt.Sprintf("told of %d MiB, %d of them free, under a cap of %d", total/MiB, free/MiB, o.limit/MiB)}
		}
		return nil
	}},
})

// refusedOnce says what is wrong where far more was refused than one request in each of
// 16 rounds.
func refusedOnce(o outcome) []string {
	if o.n("refused") > 20 {
		return []string{fmt.Sprintf("%d requests refused in 16 rounds", o.n("refused"))}
	}
	return nil
}

// answered says what is wrong where a program that is refused over and over waited
// for more than a few readings: one tells all there is to tell.
func answered(o outcome) []string {
	if o.asks > 16 {
		return []string{fmt.Sprintf("waited for %d readings; median %s µs, 99th percentile %s µs", o.asks, o.fields["median-us"], o.fields["p99-us"])}
	}
	return nil
}

// TestScenarios is the table of what has once gone wrong. The emulated driver's
// books are the judge of whether the cap held, and a bare card of the cap's size
// of whether a refusal was justified.
func TestScenarios(t *testing.T) {
	const gpus = 4 // so many programs at once
	r := newRig(t, emulator.Spec{Model: "H200-141GB", Count: gpus})
	free := make(chan int, gpus)
	for i := range gpus {
		free <- i
	}
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			index := <-free
			defer func() { free <- index }()
			s.room, s.contexts = cmp.Or(s.room, GiB), cmp.Or(s.contexts, 1)
			if s.cuda == nil {
				s.cuda = modesOfCUDA
			}
			var wrong []string
			for i, cuda := range s.cuda {
				o := r.scene(t, s, fmt.Sprintf("%s-%d", s.name, i), cuda, index)
				for _, w := range s.judge(o) {
					wrong = append(wrong, fmt.Sprintf("%s: %s", cmp.Or(cuda, "default"), w))
				}
				t.Logf("%s: %s granted, %s refused, peak %d MiB of %d, longest call %s µs", cmp.Or(cuda, "default"),
					o.fields["granted"], o.fields["refused"], o.peak/MiB, o.limit/MiB, o.fields["slowest-us"])
			}
			switch {
			case s.todo != "" && len(wrong) == 0:
				t.Errorf("holds, and is still marked: %s", s.todo)
			case s.todo != "":
				t.Logf("to do: %s\n%s", s.todo, strings.Join(wrong, "\n"))
			case len(wrong) > 0:
				t.Error(strings.Join(wrong, "\n"))
			}
		})
	}
}

// scene runs a scenario once in a container with the cap, and once on a bare card
// of its size.
func (r *rig) scene(t *testing.T, s scenario, key, cuda string, index int) outcome {
	t.Helper()
	limit := uint64(s.contexts)*context300 + s.room
	o := outcome{limit: limit, room: s.room, piece: poolPiece}
	if _, mib, ok := strings.Cut(cuda, "piece-mib="); ok {
		n, err := strconv.ParseUint(mib, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		o.piece = max(poolPiece, n*MiB) // a request can be larger than a small piece
	}
	env := []string{"GPU_EMULATOR_CUDA=" + cuda}
	if s.generous == "" {
		o.bare = r.bare(t, s, limit, env)
	}
	begin := r.allocate
	if s.unread {
		begin = r.unread
	}
	b := begin(t, key, []share{{gpu: index, bytes: limit}}, s.open, nil)
	defer b.close(t)
	if err := r.m.World.ResetPeak(index); err != nil {
		t.Fatal(err)
	}
	k := b.tool(t, "probe", env)
	o.fields = k.ask("ran", "scenario %s %d", s.name, s.room)
	o.peak, o.used = r.peak(index), r.used(index)
	if !s.unread {
		b.read(t, index)
		last, _ := b.readers[index].Last()
		o.asks, o.settled = last.Asks, last.Settled
	}
	k.quit()
	return o
}

// bare runs a scenario on a machine whose only GPU is as large as the cap.
func (r *rig) bare(t *testing.T, s scenario, limit uint64, env []string) fields {
	t.Helper()
	const reserved = 48
	one := bareRig(t, emulator.Spec{Model: "H200-141GB", Count: 1,
		GPUs: []emulator.GPUSpec{{MemoryMiB: limit/MiB + reserved, ReservedMiB: reserved}}})
	c := one.plain(t, 0)
	defer c.Close()
	k, err := startTool(t, c, "probe", env)
	if err != nil {
		t.Fatal(err)
	}
	f := k.ask("ran", "scenario %s %d", s.name, s.room)
	k.quit()
	return f
}

// judge says what is wrong.
func (s scenario) judge(o outcome) (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	if o.fields["failure"] != "" {
		say("failed: %s", o.fields["failure"])
	}
	if o.peak > o.limit+s.undo+s.pieces*o.piece {
		say("%d KiB over the cap: a peak of %d MiB", (o.peak-o.limit)>>10, o.peak/MiB)
	}
	if o.bare != nil {
		if o.bare["failure"] != "" {
			say("failed on a bare card: %s", o.bare["failure"])
		}
		if got, card := o.n("refused"), o.bare.n("refused"); got > card {
			say("%d requests refused; a bare card of that size refuses %d", got, card)
		}
	}
	if s.check != nil {
		wrong = append(wrong, s.check(o)...)
	}
	return wrong
}

// The table and the probe have the same names, in the same order.
func TestScenarioNames(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to build the probe with")
	}
	dir, err := probe.Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	list := exec.Command(filepath.Join(dir, probe.Program))
	list.Stdin = strings.NewReader("scenarios\n")
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	var ours []string
	for _, s := range scenarios {
		ours = append(ours, s.name)
	}
	if theirs := strings.Fields(string(out)); !slices.Equal(ours, theirs) {
		t.Errorf("the table has the rows\n%q, the probe the routines\n%q", ours, theirs)
	}
}
