// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
)

// spoil is a way in which a tenant can spoil its own usage page.
type spoil struct {
	name string
	// closed ones make a page that nothing can be counted on: what starts after
	// that is refused.
	closed bool
	do     func(random *rand.Rand, file string) error
}

// scribble writes noise at a place.
func scribble(random *rand.Rand, file string, from, to int) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	at := from + random.IntN(to-from)
	noise := make([]byte, 1+random.IntN(min(256, to-at)))
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	_, err = f.WriteAt(noise, int64(at))
	return err
}

var spoils = []spoil{
	{"noise in the counter", false, func(r *rand.Rand, f string) error { return scribble(r, f, 64, 128) }},
	{"noise in the statistics", false, func(r *rand.Rand, f string) error { return scribble(r, f, 128, 4096) }},
	{"noise in the slots", false, func(r *rand.Rand, f string) error { return scribble(r, f, 4096, 4096+64*64) }},
	{"noise anywhere", false, func(r *rand.Rand, f string) error { return scribble(r, f, 0, 4096+16384*64) }},
	{"ones everywhere", false, func(_ *rand.Rand, f string) error {
		ones := make([]byte, 4096+16384*64)
		for i := range ones {
			ones[i] = 0xff
		}
		return overwrite(f, ones)
	}},
	{"zeros everywhere", true, func(_ *rand.Rand, f string) error { return overwrite(f, make([]byte, 4096+16384*64)) }},
	{"noise in the magic", true, func(r *rand.Rand, f string) error { return scribble(r, f, 0, 8) }},
	{"cut short", true, func(r *rand.Rand, f string) error { return os.Truncate(f, int64(r.IntN(4096+16384*64))) }},
	{"grown", true, func(r *rand.Rand, f string) error { return os.Truncate(f, 4096+16384*64+1+r.Int64N(1<<30)) }},
	{"filled", true, func(_ *rand.Rand, f string) error {
		file, err := os.OpenFile(f, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		defer file.Close()
		for block := make([]byte, 64<<10); err == nil; {
			_, err = file.Write(block)
		}
		if !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("a page that is filled ends with %w", err)
		}
		return nil
	}},
	{"nobody may read it", false, func(_ *rand.Rand, f string) error { return os.Chmod(f, 0) }},
}

func overwrite(file string, data []byte) error {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt(data, 0)
	return err
}

// A tenant spoils its usage page in every way that it can. Its own processes may
// be refused, or end; nobody hangs, the reader goes on, and the neighbour on the
// same GPU has all that is its own.
func TestCorruptPage(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	random := dice(t)
	const limit = 2 * GiB
	const theirs = 4 * GiB
	good := r.allocate(t, "good", []share{{gpu: 0, bytes: theirs}}, false, nil)
	steady := good.tool(t, "probe", nil)
	if f := steady.ask("took", "take cuMemAlloc_v2 %d", 1*GiB); f["result"] != "0" {
		t.Fatalf("%q", steady.said)
	}
	neighbour := func(when string) {
		t.Helper()
		f := steady.ask("took", "take cuMemAlloc_v2 %d 1000", 128*MiB)
		if got, left := f.n("count")*128*MiB, uint64(theirs-1*GiB-context300); f["result"] != "2" || got > left || left-got >= 128*MiB {
			t.Errorf("%s: the neighbour was granted %d MiB of %d: %q", when, got/MiB, left/MiB, steady.said)
		}
		for i := range f.n("count") {
			steady.ask("gave", "give %d", f.n("id")+i)
		}
	}
	rounds := pick(2*len(spoils), 1000)
	for i := range rounds {
		s := spoils[i%len(spoils)]
		name := fmt.Sprintf("round %d, %s", i, s.name)
		bad := r.allocate(t, "bad", []share{{gpu: 0, bytes: limit}}, false, nil)
		page := bad.Path(lib.UsagePath(r.uuid(0), "bad"))
		k := bad.tool(t, "probe", nil)
		if f := k.ask("took", "take cuMemAlloc_v2 %d 4", 64*MiB); f["result"] != "0" {
			t.Fatalf("%s: before: %q", name, k.said)
		}
		if err := s.do(random, page); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		// The process that has it mapped: an answer, or its own end.
		if _, err := k.tryAsk("took", "take cuMemAlloc_v2 %d 64", 64*MiB); err == nil {
			k.tryAsk("gave", "give 0")
		}
		// One that starts now: it works, or it is refused.
		second := bad.tool(t, "probe", nil)
		if f, err := second.tryAsk("took", "take cuMemAlloc_v2 %d", 16*MiB); err != nil {
			t.Errorf("%s: a new process: %v", name, err)
		} else if f["result"] != "0" && f["result"] != "2" || s.closed && f["result"] != "2" {
			t.Errorf("%s: a new process: %q (closed %t)", name, second.said, s.closed)
		}
		for _, x := range []*tool{k, second} {
			x.shut()
			if _, _, err := x.wait(); err != nil {
				t.Errorf("%s: a process hangs: %v", name, err)
			}
		}
		// The agent looks at it, and the container's next start has a page again.
		sound, err := r.pages.Sound("bad")
		if err != nil || sound && s.closed {
			t.Errorf("%s: the page is sound: %v, %v", name, sound, err)
		}
		if bad.close(t); !sound { // fails if its reader has
			next := r.allocate(t, "bad", []share{{gpu: 0, bytes: limit}}, false, nil)
			third := next.tool(t, "probe", nil)
			if f := third.ask("took", "take cuMemAlloc_v2 %d", 1*GiB); f["result"] != "0" {
				t.Errorf("%s: the next container: %q", name, third.said)
			}
			third.quit()
			next.close(t)
		}
		if i%len(spoils) == len(spoils)-1 {
			neighbour(name)
		}
	}
	neighbour("at the end")
	if err := good.readers[0].Err(); err != nil {
		t.Errorf("the neighbour's reader: %v", err)
	}
	steady.quit()
}
