// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"testing"
	"time"
)

// The figures are those of an H200: a mean of the whole time asked for, in which the busy time
// of processes that have ended is put down to the others.
func TestUtilization(t *testing.T) {
	w, err := New(Spec{Count: 2})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []Process{{PID: 10, Kind: Compute, MiB: 1}, {PID: 11, Kind: Compute, MiB: 1}, {PID: 12, GPU: 1, Kind: Compute, MiB: 1}} {
		if err := w.AddProcess(p); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Unix(1_000_000, 0)
	ago := func(seconds int) time.Time { return now.Add(-time.Duration(seconds) * time.Second) }
	w.busy = []busyTime{
		{pid: 10, percent: 30, from: ago(100)},
		{pid: 11, percent: 60, from: ago(8), until: ago(3)},
		{pid: 12, gpu: 1, percent: 80, from: ago(5)},
	}
	look := func(gpu, seconds int) map[int]int {
		w.mu.Lock()
		defer w.mu.Unlock()
		out := map[int]int{}
		for _, u := range w.utilizationLocked(w.gpus[gpu], ago(seconds), now) {
			out[u.PID] = u.SM
		}
		return out
	}
	for _, c := range []struct{ gpu, seconds, first, second int }{{0, 2, 30, 0}, {0, 10, 30, 30}, {1, 10, 0, 0}} {
		if got := look(c.gpu, c.seconds); got[10] != c.first || got[11] != c.second {
			t.Errorf("in %d seconds of GPU %d: %v", c.seconds, c.gpu, got)
		}
	}
	if got := look(1, 10); got[12] != 40 {
		t.Errorf("half of the time at 80 %%: %v", got)
	}
	w.EndProcess(11)
	if far, near := look(0, 10), look(0, 2); len(far) != 1 || far[10] != 60 || near[10] != 30 {
		t.Errorf("when the other has ended: %v in ten seconds, %v in two", far, near)
	}
	if err := w.KeepBusy(11, 0, 10); err == nil {
		t.Error("a process that has ended is busy")
	}
	if err := w.KeepBusy(10, 0, 0); err != nil {
		t.Error(err)
	}
	if w.busy[0].until.IsZero() {
		t.Error("the process is idle, and its busy time goes on")
	}
}
