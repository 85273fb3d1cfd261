// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

// A day of a node with two GPUs of 80 GiB. A service has all of one. A notebook has half of the other and uses it from
// nine to ten and from twelve on; what it does not use counts after a quarter of an hour. A spot pod takes nothing away
// from what a tier could have had.
func TestWhatATierWouldHaveHad(t *testing.T) {
	day := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	at := func(hour float64) time.Time { return day.Add(time.Duration(hour * float64(time.Hour))) }
	inv := &gpu.Inventory{GPUs: []gpu.Device{{Index: 0, UUID: "GPU-0", Memory: 80 << 10}, {Index: 1, UUID: "GPU-1", Memory: 80 << 10}, {Index: 2, UUID: "GPU-2", Memory: 80 << 10}}}
	took := func(n uint64, hour float64, tier ledger.Tier, on, first, last int) *usage.Record {
		return &usage.Record{Time: at(hour), Event: usage.Allocated, Grant: n, Allocation: fmt.Sprint("a", n), Tier: tier, Resource: "example.com/gpu-mem", Count: last - first + 1,
			Pieces: []usage.Piece{{GPU: gpu.UUID(fmt.Sprint("GPU-", on)), Index: on, Of: piece.Units{Set: piece.Set{{First: first, Last: last}}},
				Share: float64(last-first+1) / 80, MemoryMiB: uint64(last-first+1) << 10}}}
	}
	records := []*usage.Record{took(1, 0, "", 0, 0, 79), took(2, 9, "", 1, 0, 39), took(3, 12, ledger.Spot, 1, 40, 79)}
	busy := map[uint64]uint64{}
	for minute := 1; minute <= 24*60; minute++ {
		r := &usage.Record{Time: at(float64(minute) / 60), Event: usage.Used}
		for grant, uses := range map[uint64]bool{1: true, 2: minute > 9*60 && minute <= 10*60 || minute > 12*60} {
			if grant == 2 && minute <= 9*60 {
				continue
			}
			if uses {
				busy[grant] += 60_000
			}
			r.Used = append(r.Used, usage.Use{Grant: grant, GPU: int(grant) - 1, BusyMs: busy[grant], MiBMs: busy[grant]})
		}
		records = append(records, r)
	}
	// In the order of time.
	var ordered []*usage.Record
	for _, r := range records[3:] {
		for _, a := range records[:3] {
			if a.Time.Before(r.Time) && !a.Time.Before(r.Time.Add(-time.Minute)) {
				ordered = append(ordered, a)
			}
		}
		ordered = append(ordered, r)
	}
	j := &Journal{}
	recovery := NewRecovery(day, at(24))
	book := usage.NewBook(recovery)
	j.Apply(&usage.Record{Time: day, Event: usage.Cut, Op: "layout", GPU: "GPU-2", Placement: "off"})
	for _, r := range ordered {
		j.Apply(r)
		book.Apply(r)
	}
	got := recovery.Recovered(book, inv, j.Off)
	// Without a process: 10:00 to 12:00, of which a quarter of an hour does not count.
	want := Recovered{All: 160 * 24, Free: 80*24 - 40*15, Unused: 40 * 1.75, Spot: 40 * 12}
	want.GPUs = (want.Free + want.Unused) / want.All * 2
	for name, of := range map[string][2]float64{"all": {got.All, want.All}, "free": {got.Free, want.Free}, "unused": {got.Unused, want.Unused}, "spot": {got.Spot, want.Spot}, "GPUs": {got.GPUs, want.GPUs}} {
		if math.Abs(of[0]-of[1]) > 1e-6 {
			t.Errorf("%s: %v, want %v", name, of[0], of[1])
		}
	}
	if text := got.Sentence(); text != "In 24h a spot tier could have had 1390 GiB-hours, 36% of what the GPUs have: 1320 that no pod was granted, and 70 that pods held for more than 15 minutes without a process. That is as much as 0.7 more GPUs would have given. Spot pods had 480 of it." {
		t.Error(text)
	}

	// Spot pods are no demand: the advice is for those who keep what they get.
	d, err := j.Demand(nil, Options{Domain: "example.com", Unit: 1024})
	if err != nil || len(d.Requests) != 2 || !strings.Contains(strings.Join(d.Notes, " "), "Spot pods are not replayed") {
		t.Errorf("%d requests, notes %q: %v", len(d.Requests), d.Notes, err)
	}
	j.Apply(&usage.Record{Time: at(13), Event: usage.Refused, FrontEnd: ledger.DevicePlugin, Resource: "example.com/gpu-mem.spot", Count: 8})
	if d, err = j.Demand(nil, Options{Domain: "example.com", Unit: 1024}); err != nil || len(d.Requests) != 2 || d.Refused != 0 {
		t.Errorf("a refused spot pod counts: %+v, %v", d, err)
	}
}
