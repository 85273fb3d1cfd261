// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// busyTime is a time in which a process kept a GPU's multiprocessors busy.
type busyTime struct {
	pid, gpu    int
	percent     int
	from, until time.Time // until is zero while it goes on
}

// KeepBusy has a process keep so many percent of a GPU's multiprocessors busy from now on,
// until it is told otherwise or ends. The kernels of programs that load the emulated CUDA
// driver do not count: they take time and do no work.
func (w *World) KeepBusy(pid, index, percent int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := w.gpuLocked(index); err != nil {
		return err
	}
	if percent < 0 || percent > 100 {
		return fmt.Errorf("process %d: %w: %d percent", pid, InvalidArgument, percent)
	}
	if !slices.ContainsFunc(w.processesLocked(), func(p Process) bool { return p.PID == pid && p.GPU == index }) {
		return fmt.Errorf("process %d on GPU %d: %w", pid, index, NotFound)
	}
	now := time.Now()
	for i := range w.busy {
		if b := &w.busy[i]; b.pid == pid && b.gpu == index && b.until.IsZero() {
			b.until = now
		}
	}
	if percent > 0 {
		w.busy = append(w.busy, busyTime{pid: pid, gpu: index, percent: percent, from: now})
	}
	return nil
}

// Utilization is how busy a process kept a GPU's multiprocessors, in percent.
type Utilization struct {
	PID    int
	Micros uint64 // when it was found, since 1970
	SM     int
}

// Utilization tells of each process that was busy since a time, in microseconds since 1970,
// and lives, the mean of all that time; NotFound where none was. What processes did that have
// ended is put down to those that live: so an NVIDIA H200 with driver 580.159.04 did.
func (s *Session) Utilization(h Handle, since uint64) ([]Utilization, Return) {
	list, r := device(s, "nvmlDeviceGetProcessUtilization", h, func(g *gpu) ([]Utilization, Return) {
		if g.mig.on {
			return nil, NotSupported
		}
		return s.p.w.utilizationLocked(g, time.UnixMicro(int64(since)), time.Now()), Success
	})
	if r != Success {
		return nil, r
	}
	var seen []Utilization
	for _, u := range list { // outside the lock: seeing a PID reads /proc
		if pid, ok := s.p.see(u.PID); ok && u.SM > 0 {
			u.PID = pid
			seen = append(seen, u)
		}
	}
	if len(seen) == 0 {
		return nil, NotFound
	}
	return seen, Success
}

func (w *World) utilizationLocked(g *gpu, since, now time.Time) []Utilization {
	alive := map[int]bool{}
	for _, p := range w.processesLocked() {
		alive[p.PID] = alive[p.PID] || p.GPU == g.slot
	}
	busy, living, dead := map[int]float64{}, 0.0, 0.0
	for i := range w.busy {
		b := &w.busy[i]
		if b.until.IsZero() && b.gpu == g.slot && !alive[b.pid] {
			b.until = now
		}
		from, until := b.from, cmp.Or(b.until, now)
		if from.Before(since) {
			from = since
		}
		if b.gpu != g.slot || !from.Before(until) {
			continue
		}
		percents := float64(b.percent) * float64(until.Sub(from)) / float64(max(now.Sub(since), 1))
		if alive[b.pid] {
			busy[b.pid] += percents
			living += percents
		} else {
			dead += percents
		}
	}
	var list []Utilization
	for pid, percents := range busy {
		list = append(list, Utilization{pid, uint64(now.UnixMicro()), int(percents * (living + dead) / living)})
	}
	slices.SortFunc(list, func(a, b Utilization) int { return cmp.Compare(a.PID, b.PID) })
	return list
}
