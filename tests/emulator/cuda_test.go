// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"errors"
	"math"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

func TestCharge(t *testing.T) {
	const MiB = 1 << 20
	w := newWorld(t, emulator.Spec{Count: 2, GPUs: []emulator.GPUSpec{{MemoryMiB: 1048, ReservedMiB: 48}}})
	alive := true
	a := open(t, w, emulator.Opening{PID: 10, Alive: func() bool { return alive }})
	b := open(t, w, emulator.Opening{PID: 11})
	used := func() uint64 { return w.State().GPUs[0].UsedMiB }
	peak := func() uint64 {
		n, err := w.PeakUsed(0)
		if err != nil {
			t.Error(err)
		}
		return n / MiB
	}
	for _, c := range []struct {
		what  string
		s     *emulator.Session
		bytes int64
		want  emulator.Return
		mib   uint64
	}{
		{"all but one byte", a, 1000*MiB - 1, emulator.Success, 999},
		{"what is not there", b, 2, emulator.OutOfMemory, 999},
		{"the last byte", b, 1, emulator.Success, 1000},
		{"another's memory", b, -5 * MiB, emulator.Success, 999}, // no more than its own
		{"what nobody has", a, math.MinInt64, emulator.InvalidArgument, 999},
		{"all of it", a, -1000 * MiB, emulator.Success, 0},
		{"again", a, 600 * MiB, emulator.Success, 600},
	} {
		want(t, c.what, c.s.Charge("cuMemAlloc_v2", 0, c.bytes), c.want)
		want(t, "used after "+c.what, used(), c.mib)
	}
	want(t, "peak", peak(), 1000)

	// Given memory and memory of its own are one entry.
	if err := w.AddProcess(emulator.Process{PID: 10, GPU: 0, Kind: emulator.Compute, MiB: 100}); err != nil {
		t.Fatal(err)
	}
	if list := w.State().Processes; len(list) != 1 || list[0].Bytes != 700*MiB || list[0].MiB != 700 {
		t.Errorf("processes: %+v", list)
	}
	if err := w.Reset(0); !errors.Is(err, emulator.InUse) {
		t.Errorf("reset: %v", err)
	}
	want(t, "end of what was given", w.EndProcess(10), true)

	// The dead leave at once, and what they shared when its last holder does.
	id, r := a.Share("cuIpcGetMemHandle", 0, 200*MiB)
	want(t, "share", r, emulator.Success)
	_, r = b.OpenShared("cuIpcOpenMemHandle", id+1)
	want(t, "what is not shared", r, emulator.InvalidArgument)
	at, r := b.OpenShared("cuIpcOpenMemHandle", id)
	want(t, "open", r, emulator.Success)
	want(t, "shared", at, emulator.Shared{GPU: 0, Bytes: 200 * MiB})
	alive = false
	want(t, "used by what outlives its owner", used(), 200)
	want(t, "processes", len(w.State().Processes), 0)
	a.Close()
	want(t, "a call that comes too late", a.Charge("cuMemAlloc_v2", 0, MiB), emulator.Uninitialized)
	want(t, "close", b.CloseShared("cuIpcCloseMemHandle", id), emulator.Success)
	want(t, "close again", b.CloseShared("cuIpcCloseMemHandle", id), emulator.InvalidArgument)
	want(t, "used", used(), 0)
	if err := w.ResetPeak(0); err != nil || peak() != 0 {
		t.Errorf("peak after reset: %d MiB, %v", peak(), err)
	}
	if _, err := w.PeakUsed(2); !errors.Is(err, emulator.NotFound) {
		t.Errorf("peak of no GPU: %v", err)
	}

	want(t, "on the other GPU", b.Charge("cuMemAlloc_v2", 1, MiB), emulator.Success)
	if err := w.Lose(1); err != nil {
		t.Fatal(err)
	}
	want(t, "on a lost GPU", b.Charge("cuMemAlloc_v2", 1, MiB), emulator.GPUIsLost)
	want(t, "processes of a lost GPU", len(w.State().Processes), 0)
}
