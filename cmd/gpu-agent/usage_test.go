// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	account "example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/usage/segments"
)

// journal writes what happened on a day: job-1 had units of GPU 3 from 11 to 15, of which it
// used half the memory until noon, and nb has others since 9, of which nothing is known.
func journal(t *testing.T) (stateDir string) {
	t.Helper()
	stateDir = t.TempDir()
	s, err := segments.Open(filepath.Join(stateDir, usageDir), segments.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	at := func(hour int) time.Time { return time.Date(2026, 3, 1, hour, 0, 0, 0, time.UTC) }
	took := func(n uint64, hour, first, last int) *account.Record {
		return &account.Record{Time: at(hour), Event: account.Allocated, Grant: n, Allocation: "id" + string(rune('0'+n)), Resource: "example.com/gpu-mem", Count: last - first + 1,
			Pieces: []account.Piece{{GPU: "GPU-c", Index: 3, Of: piece.Units{Set: piece.Set{{First: first, Last: last}}}, Share: float64(last-first+1) / 80, MemoryMiB: uint64(last-first+1) << 10}}}
	}
	var text []byte
	for _, r := range []*account.Record{
		{Time: at(8), Event: account.Began, Book: account.NewBook(nil).State(at(8))},
		took(1, 9, 40, 59),
		{Time: at(9), Event: account.Named, Grant: 1, Holder: account.Holder{Namespace: "dev", Pod: "nb\x1b[2J", Container: "jupyter"}},
		took(2, 11, 0, 39),
		{Time: at(11), Event: account.Named, Grant: 2, Holder: account.Holder{Namespace: "train", Pod: "job-1", UID: "u", Container: "main", Labels: map[string]string{"team": "x"}}},
		{Time: at(12), Event: account.Used, Used: []account.Use{{Grant: 2, GPU: 3, MiBMs: 20 << 10 * 3600_000, BusyMs: 3600_000}}},
		{Time: at(15), Event: account.Released, Grant: 2, Used: []account.Use{{Grant: 2, GPU: 3, MiBMs: 20 << 10 * 3600_000, BusyMs: 3600_000}}},
	} {
		if text, err = r.Append(text); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Append(text); err != nil {
		t.Fatal(err)
	}
	return stateDir
}

// night adds that a spot pod had half of GPU 3 from 22 to midnight.
func night(t *testing.T, stateDir string) {
	t.Helper()
	s, err := segments.Open(filepath.Join(stateDir, usageDir), segments.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	at := func(hour int) time.Time { return time.Date(2026, 3, 1, hour, 0, 0, 0, time.UTC) }
	var text []byte
	for _, r := range []*account.Record{
		{Time: at(22), Event: account.Allocated, Grant: 3, Allocation: "id3", Resource: "example.com/gpu-mem.spot", Tier: ledger.Spot, Count: 40,
			Pieces: []account.Piece{{GPU: "GPU-c", Index: 3, Of: piece.Units{Set: piece.Set{{First: 0, Last: 39}}}, Share: .5, MemoryMiB: 40 << 10}}},
		{Time: at(22), Event: account.Named, Grant: 3, Holder: account.Holder{Namespace: "train", Pod: "batch", Container: "main"}},
		{Time: at(24), Event: account.Released, Grant: 3},
	} {
		if text, err = r.Append(text); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Append(text); err != nil {
		t.Fatal(err)
	}
}

func TestUsage(t *testing.T) {
	dir := journal(t)
	usage := func(args ...string) string {
		t.Helper()
		out, _, err := execute(t, append([]string{"usage", "--state-dir", dir}, args...)...)
		if err != nil {
			t.Fatalf("%q: %v", args, err)
		}
		return out
	}
	lines := strings.Split(usage("--until", "2026-03-01T19:00"), "\n")
	for i, want := range []string{"NAMESPACE GRANTS GPU-HOURS GRANTED USED GiB-HOURS GRANTED USED SM-HOURS", "dev 1 2.50 - 200.00 - -", "train 1 2.00 0.50 160.00 20.00 -"} {
		if got := strings.Join(strings.Fields(lines[i]), " "); got != want {
			t.Errorf("line %d: %q, want %q", i, got, want)
		}
	}
	if got := usage("--until", "2026-03-01T19:00", "--since", "2026-03-01T11:30", "-o", "csv", "--by", "label=team"); got != "name,grants,granted_gpu_hours,used_gpu_hours,granted_gib_hours,used_gib_hours,sm_hours,tier,lent_gib_hours,cost,parks,parked_hours,parked_gib_hours\n,1,1.875,,150,,,guaranteed,0,,0,0,0\nx,1,1.75,0.25,140,10,,guaranteed,0,,0,0,0\n" {
		t.Errorf("by team: %q", got)
	}
	var sums []account.Sum
	if err := json.Unmarshal([]byte(usage("-o", "json", "--by", "pod", "--since", "2026-03-01T12:00", "--until", "2026-03-01T13:00")), &sums); err != nil || len(sums) != 2 || sums[0].Name != "train/job-1" || sums[0].GrantedGPUHours != .5 || *sums[0].UsedGPUHours != 0 {
		t.Errorf("by pod: %+v, %v", sums, err)
	}

	// With a price, and with a second tier.
	if got := usage("--until", "2026-03-01T19:00", "--price", "2.5"); !strings.Contains(got, "SM-HOURS  COST\n") || !strings.Contains(got, " 6.25\n") || strings.Contains(got, "TIER") {
		t.Errorf("with a price:\n%s", got)
	}
	night(t, dir)
	lines = strings.Split(usage("--until", "2026-03-02T03:00", "--price", "2", "--spot-price", "0.5"), "\n")
	for i, want := range []string{"NAMESPACE GRANTS GPU-HOURS GRANTED USED GiB-HOURS GRANTED USED SM-HOURS TIER GiB-HOURS LENT COST", "dev 1 4.50 - 360.00 - - guaranteed 0.00 9.00", "train 1 2.00 0.50 160.00 20.00 - guaranteed 0.00 4.00", "train 1 1.00 - 80.00 - - spot 0.00 0.50"} {
		if got := strings.Join(strings.Fields(lines[i]), " "); got != want {
			t.Errorf("line %d: %q, want %q", i, got, want)
		}
	}

	// What had no room any more is told of, where it is of the time that is asked for.
	s, err := segments.Open(filepath.Join(dir, usageDir), segments.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	before := time.Date(2026, 3, 1, 7, 0, 0, 0, time.UTC)
	for _, r := range []*account.Record{
		{Time: before.Add(9 * time.Hour), Event: account.Left, Count: 40, Before: before, Holder: account.Holder{Namespace: "train"}},
		{Time: before.Add(10 * time.Hour), Event: account.Left, Count: 2, Before: before.Add(-time.Hour), Holder: account.Holder{Namespace: "train"}},
		{Time: before.Add(10 * time.Hour), Event: account.Left, Of: account.Refused, Count: 5, Before: before, Holder: account.Holder{Namespace: "train"}},
	} {
		line, err := r.Append(nil)
		if err == nil {
			_, err = s.Append(line)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for since, want := range map[string]string{"2026-03-01T06:30": "note: 42 records of namespace train, from before 2026-03-01T07:00:00Z", "2026-03-01T08:00": ""} {
		if _, said, err := execute(t, "usage", "--state-dir", dir, "--since", since); err != nil || !strings.HasPrefix(said, want) || (want == "") != (said == "") || strings.Count(said, "\n") > 1 {
			t.Errorf("since %s it says %q, want %q", since, said, want)
		}
	}

	// Who had GPU 3 at noon?
	got := usage("--at", "2026-03-01T12:00", "--gpu", "3")
	if strings.Count(got, "\n") != 3 || !strings.Contains(got, "units 0-39") || !strings.Contains(got, "job-1") || !strings.Contains(got, "2026-03-01T15:00:00Z") || strings.Contains(got, "\x1b") {
		t.Errorf("at noon:\n%s", got)
	}
	if got := usage("--at", "2026-03-01T12:00", "--gpu", "2", "-o", "csv"); strings.Count(got, "\n") != 1 {
		t.Errorf("on another GPU: %q", got)
	}
	if got := usage("--at", "2026-03-01T16:00", "-o", "csv"); strings.Contains(got, "job-1") || !strings.Contains(got, "jupyter") {
		t.Errorf("at four: %q", got)
	}
	for _, args := range [][]string{{"--by", "pods"}, {"--by", "label="}, {"--since", "yesterday"}, {"--gpu", "3"}, {"--spot-price", "1"}, {"--price", "-1"}, {"--price", "NaN"}, {"--since", "2026-03-02", "--until", "2026-03-01"}} {
		if _, _, err := execute(t, append([]string{"usage", "--state-dir", dir}, args...)...); err == nil {
			t.Errorf("%q is no error", args)
		}
	}
}

// A directory without a journal is no node on which nobody had anything.
func TestUsageOfNoJournal(t *testing.T) {
	for _, args := range [][]string{nil, {"--at", "2026-03-01"}} {
		out, _, err := execute(t, append([]string{"usage", "--state-dir", "/nonexistent"}, args...)...)
		if err == nil || out != "" || !strings.Contains(err.Error(), "no usage journal in /nonexistent/usage") || !strings.Contains(err.Error(), "--usage-size") {
			t.Errorf("%q: %v, and prints %q", args, err, out)
		}
	}
}
