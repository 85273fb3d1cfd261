// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
	"example.com/gpu-agent/tests/memcap/programs"
)

// honest is what a program of package programs needs to be run, and what is known
// of it.
type honest struct {
	gpus int // default 1
	// undo is by how many bytes the peak may be over the cap for the moment of an
	// undo: the largest request to a pool, by whole pieces. The usage page has to
	// tell of it.
	undo uint64
	// todo says why it fails as yet; it then has to fail under one of the driver's
	// behaviours at least, so that whoever mends it removes the mark.
	todo string
}

var honestPrograms = map[string]honest{
	"pytorch-async": {undo: 512 * MiB},
	"rmm-async":     {undo: 160 * MiB},
	"vllm":          {gpus: 2},
}

// programCap is the cap of each program, on each GPU, contexts in it.
const programCap = 4 * GiB

// programModes are the behaviours of the emulated driver that programs are run
// under. Beside those of the scenarios, each of its switches is turned once
// (package emulator/lib), except for how long a kernel takes: the programs' own
// take 20 µs.
var programModes = []string{
	"", "strict",
	"reuse=eager,opportunistic=lazy,query=observes,shrink=never",
	"holes=remap,piece-mib=2,large=blocks",
	"version=12040,follow=direct,used=pending," + suggested,
}

// mapMicros is how long the emulated driver takes to map 1 MiB, by published figures (see
// its cuda_core.c): a cap is not to be had by having pools give back and map again.
const mapMicros = 30

// An honest program is never ended, never hangs, and has the memory that it would
// have on a card as large as its cap, at least nine tenths as fast. Ten seconds
// for each in the short form, shared among the driver's behaviours, and ten
// minutes in the long form, where the median of pairs of runs judges the speed: one
// with the cap, then one of as many operations on the bare card. In the short form
// speed is a figure, and the card is asked only by default and about failures.
func TestPrograms(t *testing.T) {
	if lack := capsule.Missing(); lack != "" {
		t.Skip(lack)
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to build the programs with")
	}
	dir, err := programs.Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	random := dice(t)
	total := cmp.Or(*each, time.Duration(pick(10, 600))*time.Second)
	lanes := make(chan struct{}, 2) // so many at once
	var mu sync.Mutex
	fails := map[string]bool{} // by program that was run; guarded by mu
	t.Run("all", func(t *testing.T) {
		for _, name := range programs.Names {
			for _, mode := range programModes {
				first := random.Uint64() >> 1
				t.Run(name+"/"+cmp.Or(mode, "default"), func(t *testing.T) {
					t.Parallel()
					lanes <- struct{}{}
					defer func() { <-lanes }()
					h := honestPrograms[name]
					h.gpus = cmp.Or(h.gpus, 1)
					p := pair{dir: dir, name: name, mode: mode, honest: h}
					p.run(t, first, total/time.Duration(len(programModes)))
					mu.Lock()
					fails[name] = fails[name] || len(p.wrong) > 0
					mu.Unlock()
					if len(p.wrong) == 0 {
						return
					}
					if text := strings.Join(p.wrong, "\n"); h.todo != "" {
						t.Logf("to do: %s\n%s", h.todo, text)
					} else {
						t.Error(text)
					}
				})
			}
		}
	})
	for name, failed := range fails {
		if todo := honestPrograms[name].todo; todo != "" && !failed {
			t.Errorf("%s holds, and is still marked: %s", name, todo)
		}
	}
}

// pair is a program with the cap and on a bare card of the cap's size, by turns.
type pair struct {
	dir, name, mode string
	honest
	// What it runs in; see lay.
	capped *rig
	with   *box
	bare   *capsule.Container
	post   *post
	wrong  []string
}

// piece is how long one run is in the long form: long enough that starting and
// ending do not count, and short enough for a median.
const chunk = 15 * time.Second

func (p *pair) say(format string, args ...any) {
	p.wrong = append(p.wrong, fmt.Sprintf(format, args...))
}

// lay makes a machine with the cap and the watchdog, and one whose cards are as
// large as the cap.
func (p *pair) lay(t *testing.T) {
	t.Helper()
	const reserved = 48
	var shares []share
	var cards []emulator.GPUSpec
	var gpus []int
	for i := range p.gpus {
		shares = append(shares, share{gpu: i, bytes: programCap})
		cards = append(cards, emulator.GPUSpec{Index: i, MemoryMiB: programCap/MiB + reserved, ReservedMiB: reserved})
		gpus = append(gpus, i)
	}
	p.capped = newRig(t, emulator.Spec{Model: "H200-141GB", Count: p.gpus})
	p.with = p.capped.unread(t, watched(), shares, false, func(edits *specs.ContainerEdits, _ *capsule.Image) { capsule.Bind(edits, p.dir, "/programs") })
	p.post = p.capped.watch(t, p.with, shares)
	card := bareRig(t, emulator.Spec{Model: "H200-141GB", Count: p.gpus, GPUs: cards})
	edits, image := card.m.Plain(gpus...)
	capsule.Bind(&edits, p.dir, "/programs")
	var err error
	if p.bare, err = card.m.Open(t.Context(), edits, image); err != nil {
		t.Fatal(err)
	}
}

// run runs the program under its cap for so long in all; p.wrong is then what is
// wrong.
func (p *pair) run(t *testing.T, seed uint64, total time.Duration) {
	p.lay(t)
	defer p.bare.Close()
	defer p.with.close(t)
	var ratios []float64
	runs := max(1, int(total/chunk))
	for n := range runs {
		s := seed + uint64(n)
		with, err := p.once(t, p.with.Container, s, total/time.Duration(runs), math.MaxUint64)
		if err != nil {
			p.say("seed %d: %v", s, err)
			break
		}
		t.Logf("seed %d: %s", s, with.figures())
		if !*long && p.mode != "" && with.n("failed") == 0 {
			continue
		}
		// As much as it has done with the cap, however long that takes.
		without, err := p.once(t, p.bare, s, patience, with.n("operations"))
		if err != nil {
			p.say("seed %d, on a bare card: %v", s, err)
			break
		}
		t.Logf("on a bare card: %s", without.figures())
		cpu, clock := with.speed("cpu-us")/without.speed("cpu-us"), with.speed("wall-us")/without.speed("wall-us")
		t.Logf("ratio %.2f by processor time, %.2f by the clock", cpu, clock)
		ratios = append(ratios, cpu)
		// A bare card fails the program too, where what is free is in pieces that
		// are too small. Threads and the driver's own time make both vary. And the emulated
		// card takes 200 µs to say that it is full, in which others free something; a pool
		// that has come to its greatest size is refused at once. On a busy machine these are
		// 40 µs and 1 ms, and a program of several threads is told so 639 times, not 270, in
		// 177,540 grants. So one in a hundred is no difference.
		if got, card := with.n("failed"), without.n("failed"); got > 2*card+2 && 100*got > with.n("granted") {
			p.say("seed %d: the program was told %d times that there is no memory, and %d times on a bare card", s, got, card)
		}
	}
	p.judge(t)
	slices.Sort(ratios)
	if *long && len(ratios) > 0 && ratios[len(ratios)/2] < 0.9 {
		p.say("it does %.2f of what it does on a bare card for each second of processor time (all: %.2f)", ratios[len(ratios)/2], ratios)
	}
}

// judge looks at the driver's books and at what the watchdog has done.
func (p *pair) judge(t *testing.T) {
	for _, k := range p.post.kills() {
		p.say("the watchdog would have ended it: %s", k)
	}
	for i := range p.gpus {
		peak := p.capped.peak(i)
		t.Logf("GPU %d: a peak of %d MiB under %d", i, peak/MiB, programCap/MiB)
		if peak > programCap {
			over, undone := peak-programCap, p.undone(t, i)
			t.Logf("GPU %d: %d MiB over the cap, where %d MiB have been undone at most", i, over/MiB, undone/MiB)
			if over > min(p.undo, undone) {
				p.say("GPU %d: %d MiB over the cap; %d MiB were undone, and %d can be", i, over/MiB, undone/MiB, p.undo/MiB)
			}
		}
		if peak < programCap/100*80 {
			p.say("GPU %d: a peak of %d MiB is not at the edge of the cap", i, peak/MiB)
		}
		if left := p.capped.used(i); left != 0 {
			p.say("GPU %d: %d MiB are left of a program that has ended", i, left/MiB)
		}
	}
}

// undone is the most that a pool has had beyond what was reserved and has given
// back at once, by the container's usage page.
func (p *pair) undone(t *testing.T, index int) uint64 {
	t.Helper()
	u, err := p.capped.pages.OpenUsage(p.with.key, p.capped.uuid(index))
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	c, err := u.Read()
	if err != nil {
		t.Fatal(err)
	}
	return c.Undone
}

// result is what a run of a program has printed.
type result struct{ fields }

func (r result) speed(clock string) float64 { return float64(r.n("operations")) / float64(r.n(clock)) }

// figures are those of a run.
func (r result) figures() string {
	refusals := "no refusals"
	if n := r.n("refused"); n > 0 {
		refusals = fmt.Sprintf("%d refusals of %d µs, at most %d", n, r.n("refusing-us")/n, r.n("slowest-us"))
	}
	return fmt.Sprintf("%d operations, %.0f a millisecond of processor time, %.0f by the clock, after a start of %d ms; %d grants, the slowest %d µs; %s; failed %d",
		r.n("operations"), r.speed("cpu-us")*1000, r.speed("wall-us")*1000, r.n("start-us")/1000, r.n("granted"), r.n("stalled-us"), refusals, r.n("failed"))
}

// once runs the program for a while, or until it has done so much.
func (p *pair) once(t *testing.T, c *capsule.Container, seed uint64, d time.Duration, operations uint64) (result, error) {
	t.Helper()
	proc, err := c.Start(capsule.Program{
		Args: []string{"/programs/" + programs.Program, p.name, strconv.FormatUint(seed, 10), strconv.FormatInt(d.Milliseconds(), 10), strconv.FormatUint(operations, 10)},
		Env:  []string{fmt.Sprintf("GPU_EMULATOR_CUDA=map-us=%d,%s", mapMicros, p.mode)},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), d+patience)
	defer cancel()
	said, status, err := proc.Wait(ctx)
	if err != nil {
		return result{}, fmt.Errorf("%s hangs: %w", p.name, err)
	}
	r := result{fields{}}
	for _, w := range strings.Fields(said) {
		if key, value, ok := strings.Cut(w, "="); ok {
			r.fields[key] = value
		}
	}
	if status != 0 || r.fields["name"] != p.name || r.fields["failure"] != "" || r.n("operations") == 0 {
		return r, fmt.Errorf("%s ended with status %#x: %s", p.name, uint32(status), said)
	}
	return r, nil
}
