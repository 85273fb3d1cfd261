// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// long runs the full counts.
var long = flag.Bool("long", false, "kill after every instruction, and thousands of times at random")

func tell(short, full int) string {
	if *long {
		return strconv.Itoa(full)
	}
	return strconv.Itoa(short)
}

// hammer builds the counter and its tester, which needs no CUDA.
func hammer(t *testing.T) string {
	t.Helper()
	return counter(t, "hammer")
}

// counter builds the counter with a program of testdata.
func counter(t *testing.T, name string) string {
	t.Helper()
	return compiled(t, name, "c/count.c", "c/loan.c")
}

// compiled builds a program of testdata with some of the library's sources.
func compiled(t *testing.T, name string, sources ...string) string {
	t.Helper()
	args := append([]string{"-std=gnu17", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-Ic", "testdata/" + name + ".c"}, sources...)
	dir := once(t, name, args, func(ctx context.Context, dir string) error {
		_, err := gcc(ctx, "", append(args, "-o", filepath.Join(dir, name))...)
		return err
	})
	return filepath.Join(dir, name)
}

var compiler = sync.OnceValues(func() (string, error) { return gcc(context.Background(), "", "--version") })

// once has something built of the sources, unless the same stands in the project's cache.
// arguments are what it depends on beside them.
func once(t *testing.T, name string, arguments any, build func(ctx context.Context, dir string) error) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	version, err := compiler()
	if err != nil {
		t.Fatal(err)
	}
	h := sha256.New()
	fmt.Fprintf(h, "%q %q", version, arguments)
	for _, dir := range []string{"c", "testdata"} {
		files, err := filepath.Glob(dir + "/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(h, "%s %d\n%s", file, len(data), data)
		}
	}
	dir, err := emulib.Once(t.Context(), "memcap", fmt.Sprintf("test-%s-%x", name, h.Sum(nil)[:8]), build)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// limitPage writes the pages of nobody's GPU.
func limitPage(t *testing.T, bytes uint64) (limit, usage string) {
	t.Helper()
	pages, err := somePages(t).Write(aKey, 0, []Limit{{GPU: aGPU, Bytes: bytes}})
	if err != nil {
		t.Fatal(err)
	}
	return pages[aGPU].Limit, pages[aGPU].Usage
}

// TestStorm has processes with threads take and give as fast as they can, and
// kills them at random.
func TestStorm(t *testing.T) {
	program := hammer(t)
	processes, kills := "8", tell(60, 2000)
	if testing.Short() {
		processes, kills = "4", "40" // make test-all has more of both
	}
	for name, bytes := range map[string]uint64{"at the cap": 64 << 20, "with room": 3 << 29} {
		t.Run(name, func(t *testing.T) {
			limit, usage := limitPage(t, bytes)
			out, err := exec.CommandContext(t.Context(), program, "storm", limit, usage, processes, "3", kills, "1").CombinedOutput()
			if err != nil || !strings.HasPrefix(string(out), "looked ") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestPairsLeaveTheSharedWordAlone: processes that allocate and free small amounts do
// so each in a slot of its own, and the word that all share does not go from processor
// to processor for each. What they keep for that is room for whoever needs it.
func TestPairsLeaveTheSharedWordAlone(t *testing.T) {
	limit, usage := limitPage(t, 512<<20)
	out, err := exec.CommandContext(t.Context(), counter(t, "idle"), limit, usage).CombinedOutput()
	if want := "all is well\n"; err != nil || string(out) != want {
		t.Errorf("%v: %s", err, out)
	}
}

// TestTableOfAllThreads: no change that a thread makes to the table of what is held is lost.
func TestTableOfAllThreads(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), compiled(t, "table", "c/table.c"), tell(500, 20000)).CombinedOutput()
	if want := "all is well\n"; err != nil || string(out) != want {
		t.Errorf("%v: %s", err, out)
	}
}

// TestStep kills a process after each change that it makes in its life, and in its
// reaping another. With -long it is killed after each instruction, which shows nothing more
// unless something else than memory is left of the dead.
func TestStep(t *testing.T) {
	program := hammer(t)
	for _, what := range []string{"life", "idle", "reclaim", "reap", "mixed", "export"} {
		t.Run(what, func(t *testing.T) {
			room := uint64(16 << 20)
			if what == "idle" {
				room <<= 2
			}
			limit, usage := limitPage(t, room)
			out, err := exec.CommandContext(t.Context(), program, "step", limit, usage, what, tell(0, 1)).CombinedOutput()
			killed(t, out, err)
		})
	}
}

// TestWhatSeveralCallsMayFree: what several calls at a pool may free is taken off what is
// committed once, not once for each of them.
func TestWhatSeveralCallsMayFree(t *testing.T) {
	limit, usage := limitPage(t, 512<<20)
	// The rest of pool.c calls the driver.
	program := compiled(t, "loose", "c/count.c", "c/loan.c", "c/pool.c", "-ffunction-sections", "-Wl,--gc-sections", "-Wl,--unresolved-symbols=ignore-all")
	if out, err := exec.CommandContext(t.Context(), program, limit, usage).CombinedOutput(); err != nil || string(out) != "ok\n" {
		t.Errorf("%v: %s", err, out)
	}
}

// TestAgentAway: nobody reads any more, and a container whose processes come and
// go has its memory all the same, and no more of it.
func TestAgentAway(t *testing.T) {
	limit, usage := limitPage(t, 8<<30)
	out, err := exec.CommandContext(t.Context(), counter(t, "away"), limit, usage).CombinedOutput()
	if want := "5 of 5, then 8 GiB\n"; err != nil || string(out) != want {
		t.Errorf("%v: %s, want %s", err, out, want)
	}
}

// TestHeldUpNearTheCap: a machine that stops for a moment, or a container at its CPU
// limit, is no reason to refuse what would have been there.
func TestHeldUpNearTheCap(t *testing.T) {
	for _, what := range []string{"reading", "other"} {
		limit, usage := limitPage(t, 8<<30)
		out, err := exec.CommandContext(t.Context(), counter(t, "held"), limit, usage, what).CombinedOutput()
		if want := "had them\n"; err != nil || string(out) != want {
			t.Errorf("%s: %v: %s, want %s", what, err, out, want)
		}
	}
}

// TestWaitingForAReadingIsCheap: a process that waits for half a second wakes up a
// few dozen times, not each millisecond.
func TestWaitingForAReadingIsCheap(t *testing.T) {
	limit, usage := limitPage(t, 8<<30)
	out, err := exec.CommandContext(t.Context(), counter(t, "naps"), limit, usage).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if woke, err := strconv.Atoi(strings.TrimSpace(string(out))); err != nil || woke > 100 {
		t.Errorf("woke up %s times (%v), want some 40", strings.TrimSpace(string(out)), err)
	}
}

// TestWaitedInVain: what was lost is room again while the agent does not answer, also right after
// a reading that told nothing: a refusal by what was known then is not repeated.
func TestWaitedInVain(t *testing.T) {
	limit, usage := limitPage(t, 8<<30)
	if out, err := exec.CommandContext(t.Context(), counter(t, "vain"), limit, usage).CombinedOutput(); err != nil || string(out) != "1 1\n" {
		t.Errorf("granted: %q, %v; want both", out, err)
	}
}

// TestReadingThatCannotTell: while a process asks for room at the cap, another has
// lost memory and more is under way there. The first reading cannot tell whether the
// last one that was exact had what was lost, and errs to refuse: that is no answer, and
// the process asks for another, which is exact. It waits for that one as long as for the
// first: the agent of a busy node is late for both.
func TestReadingThatCannotTell(t *testing.T) {
	for name, test := range map[string]struct{ every, late time.Duration }{
		"in time": {every: 10 * time.Second},
		"late":    {every: 2 * time.Second, late: 2500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			readingThatCannotTell(t, test.every, test.late)
		})
	}
}

// readingThatCannotTell has the agent read at once when it is asked, or so much later.
func readingThatCannotTell(t *testing.T, every, late time.Duration) {
	program := counter(t, "doubt")
	pages := somePages(t)
	made, err := pages.Write(aKey, every, []Limit{{GPU: aGPU, Bytes: 8 * aGiB}})
	if err != nil {
		t.Fatal(err)
	}
	usage, err := pages.OpenUsage(aKey, aGPU)
	if err != nil {
		t.Fatal(err)
	}
	defer usage.Close()
	m, err := pages.Meter(aKey, aGPU, usage)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	cmd := exec.CommandContext(t.Context(), program, made[aGPU].Limit, made[aGPU].Usage)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := make(chan string, 8)
	go func() {
		defer close(said)
		for lines := bufio.NewScanner(pipe); lines.Scan(); {
			said <- lines.Text()
		}
	}()
	next := func(want string) {
		t.Helper()
		if got := <-said; got != want {
			t.Fatalf("it says %q, want %q", got, want)
		}
	}
	tell := func(line string) {
		t.Helper()
		if _, err := io.WriteString(in, line+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	// asked waits until the process at the cap wants a reading, or has its answer.
	asked := func(times uint64) string {
		t.Helper()
		for {
			select {
			case answer := <-said:
				return answer
			case <-time.After(time.Millisecond):
			}
			if c, err := usage.Read(); err != nil {
				t.Fatal(err)
			} else if c.Asks == times {
				time.Sleep(late)
				return ""
			}
		}
	}
	next("has 5 GiB")
	readOnce(t, m, 5*aGiB, true)
	tell("lose one, and have one under way")
	next("asks for 2.5 GiB")
	if answer := asked(1); answer != "" {
		t.Fatalf("it %s before anything was read", answer)
	}
	if r := readOnce(t, m, 4*aGiB, true); r.Quiet || r.Correction != int64(aGiB) {
		t.Fatalf("%+v: want a reading that cannot tell", r)
	}
	if answer := asked(2); answer != "" {
		t.Fatalf("it %s by a reading that could not tell", answer)
	}
	tell("have it")
	next("has 5 GiB")
	if r := readOnce(t, m, 5*aGiB, true); !r.Quiet || r.Correction != 0 {
		t.Errorf("%+v: want an exact reading", r)
	}
	next("had them")
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestNewsAtAnyMoment: a process at the cap is not refused by what an older reading left
// where another, which leaves enough, comes between its last try and its answer.
func TestNewsAtAnyMoment(t *testing.T) {
	program := counter(t, "news")
	for when, times := range map[string]string{"first": tell(5000, 200000), "later": tell(5, 200)} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			limit, usage := limitPage(t, 8<<30)
			out, err := exec.CommandContext(t.Context(), program, limit, usage, times, when).CombinedOutput()
			if want := "refused 0 times\n"; err != nil || string(out) != want {
				t.Errorf("%v: %s, want %s", err, out, want)
			}
		})
	}
}

// TestHalfWritten: the agent is kept from going on, or ended, in the middle of
// writing what it has read. Nobody goes by the limit where the ceiling, old or new,
// is lower, nor above the limit.
func TestHalfWritten(t *testing.T) {
	for ceiling, want := range map[string]string{"5": "4 GiB\n", "8": "7 GiB\n", "20": "8 GiB\n"} {
		limit, usage := limitPage(t, 8<<30)
		out, err := exec.CommandContext(t.Context(), counter(t, "half"), limit, usage, ceiling).CombinedOutput()
		if err != nil || string(out) != want {
			t.Errorf("ceiling of %s GiB, 1 GiB lost: %v: %s, want %s", ceiling, err, out, want)
		}
	}
	limit, _ := limitPage(t, 8<<30)
	page, err := mapPage(limit)
	if err != nil {
		t.Fatal(err)
	}
	defer page.unmap()
	page.publish(reading{nonce: 9, settled: 512, correction: 1 << 30})
	page.store(atNonce, writing)
	if r := page.reading(); r != (reading{}) {
		t.Errorf("half a reading says %+v", r)
	}
}

// TestLayout holds the two descriptions of the pages together.
func TestLayout(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), hammer(t), "layout").Output()
	if err != nil {
		t.Fatal(err)
	}
	var want bytes.Buffer
	for _, f := range []struct {
		name string
		at   int
	}{
		{"limit_page.limit", atLimit}, {"limit_page.context", atContext}, {"limit_page.every_ms", atEvery}, {"limit_page.uuid", atUUID},
		{"limit_page.usage", atUsage}, {"limit_page.since", atSince}, {"limit_page.code", atCode}, {"limit_page.sure", atSure},
		{"limit_page.nonce", atNonce}, {"limit_page.ceiling", atCeiling}, {"limit_page.stamp", atStamp}, {"limit_page.begun", atBegun},
		{"limit_page.done", atDone}, {"limit_page.settled", atSettled}, {"limit_page.shown", atShown}, {"limit_page.shown_settled", atShownAt},
		{"limit_page.shown_dead", atDead}, {"limit_page.roof", atRoof}, {"limit_page.roof_stamp", atRoofOf}, {"limit_page.held", atHeld}, {"limit_page.surely", atSurely}, {"limit_page.bare", atBare}, {"limit_page.percent", atPercent}, {"limit_page.control", atControl},
		{"usage_page.nonce", useNonce}, {"usage_page.bound", useBound}, {"usage_page.asks", useAsks}, {"usage_page.refusals", useRefusals},
		{"usage_page.peak", usePeak}, {"usage_page.high", useHigh}, {"usage_page.settled", useSettled}, {"usage_page.undone", useUndone},
		{"usage_page.uncounted", useUncounted}, {"usage_page.guesses", useGuesses}, {"usage_page.attempt", useAttempt}, {"usage_page.borrows", useBorrows},
		{"usage_page.unmeasured", useUnmeasured}, {"usage_page.unread", useUnread}, {"usage_page.waits", useWaits}, {"usage_page.slots", pageSize},
		{"slot.reserved", slotReserved}, {"slot.committed", slotCommitted}, {"slot.managed", slotManaged}, {"slot.expected", slotExpected},
		{"slot.contexts", slotContexts}, {"slot.pid", slotPID}, {"slot.pids", slotPIDs}, {"slot.others_reserved", slotOthersReserved}, {"slot.others_committed", slotOthersCommitted},
		{"slot.promised", slotPromised}, {"slot.exported", slotExported}, {"slot.idle", slotIdle}, {"slot.borrowed", slotBorrowed}, {"slot.lends", slotLends}, {"slot.sms", slotSMs}, {"slot.starting", slotStarting},
		{"size.limit_page", pageSize}, {"size.usage_page", usageSize}, {"size.slot", slotSize},
		{"slots", slots}, {"unit", unit}, {"amount_bits", amountBits}, {"most", most}, {"yield", int(ControlYield)}, {"hold", int(ControlHold)},
	} {
		fmt.Fprintf(&want, "%s %d\n", f.name, f.at)
	}
	fmt.Fprintf(&want, "magic %s %s\n", limitMagic, usageMagic)
	if string(out) != want.String() {
		t.Errorf("c/page.h says\n%s\npage.go says\n%s", out, &want)
	}
}

// TestSourcesAreBuilt: a source file that neither a library nor the program is made of is not there.
func TestSourcesAreBuilt(t *testing.T) {
	entries, err := os.ReadDir("c")
	if err != nil {
		t.Fatal(err)
	}
	built := strings.Join(slices.Concat(cudaSources, nvmlSources, holdSources), " ")
	for _, e := range entries {
		if name := e.Name(); filepath.Ext(name) == ".c" && !strings.Contains(built, name) {
			t.Errorf("nothing is built of c/%s", name)
		}
	}
	if len(machineFlags("aarch64-linux-gnu")) == 0 {
		t.Error("outlined atomics need libgcc")
	}
}

// TestStepOfALoan kills a process after each change, with -long each instruction, in which it
// borrows room of another page, and repays it.
func TestStepOfALoan(t *testing.T) {
	program := counter(t, "loans")
	both, pages := somePages(t), make([]string, 0, 4)
	for i, key := range []string{"0123456789abcdef", "fedcba9876543210"} {
		page, err := both.Write(key, 0, []Limit{{GPU: aGPU, Bytes: 16 << 20 >> i}})
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, page[aGPU].Limit, page[aGPU].Usage)
	}
	out, err := exec.CommandContext(t.Context(), program, append(pages, tell(0, 1))...).CombinedOutput()
	killed(t, out, err)
}

// killed checks what a program says that has killed another at each point of its work.
func killed(t *testing.T, said []byte, err error) {
	t.Helper()
	if strings.Contains(string(said), "does not stop") {
		t.Skip("a process cannot be traced here")
	}
	points := 0
	if _, no := fmt.Sscanf(string(said), "points %d\n", &points); no != nil || err != nil || points < 8 {
		t.Errorf("%v: %s, want 8 points or more", err, said)
	}
}
