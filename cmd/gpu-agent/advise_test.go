// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/advise"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	account "example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/usage/segments"
	"example.com/gpu-agent/pkg/gpu"
)

// crowdedDay writes the journal of two hours in which the node's GPUs were shared by memory:
// every six minutes a pod came for 60 units and stayed for an hour, as long as there was room,
// and was refused when there was not; and it writes the pods that the API server had, three of
// which never came to the node.
func crowdedDay(t *testing.T, inv *gpu.Inventory) (stateDir, trace string) {
	t.Helper()
	stateDir = t.TempDir()
	s, err := segments.Open(filepath.Join(stateDir, usageDir), segments.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	at := func(minute int) time.Time { return time.Date(2026, 3, 1, 9, minute, 0, 0, time.UTC) }
	records := []*account.Record{{Time: at(0), Event: account.Began, Book: account.NewBook(nil).State(at(0))}}
	for i := range inv.GPUs {
		records = append(records, &account.Record{Time: at(0), Event: account.Cut, Op: "layout", GPU: inv.GPUs[i].UUID, Placement: "shared"})
	}
	var pods []string
	pod := func(n, minute, units int, status string) {
		pods = append(pods, fmt.Sprintf(`{"kind": "Pod", "metadata": {"namespace": "team", "name": "p-%d", "uid": "u%d", "creationTimestamp": %q},
			"spec": {"containers": [{"resources": {"limits": {"example.com/gpu-mem": "%d", "cpu": "2"}}}]}, "status": %s}`, n, n, at(minute).Format(time.RFC3339), units, status))
	}
	for n := range 16 {
		minute := 6 * n
		if n%4 == 3 {
			records = append(records, &account.Record{Time: at(minute), Event: account.Refused, FrontEnd: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Count: 60, Reason: "NotOneGPU"})
			pod(n, minute, 60, fmt.Sprintf(`{"phase": "Failed", "reason": "UnexpectedAdmissionError", "startTime": %q}`, at(minute).Format(time.RFC3339)))
			continue
		}
		d, id := &inv.GPUs[n%2], uint64(n+1)
		records = append(records,
			&account.Record{Time: at(minute), Event: account.Allocated, Grant: id, Allocation: fmt.Sprint("a", id), Resource: "example.com/gpu-mem", Count: 30,
				Pieces: []account.Piece{{GPU: d.UUID, Index: d.Index, Of: piece.Units{Set: piece.Set{{First: 0, Last: 29}}}, Share: .38, MemoryMiB: 30 << 10}}},
			&account.Record{Time: at(minute), Event: account.Named, Grant: id, Holder: account.Holder{Namespace: "team", Pod: fmt.Sprint("p-", n), UID: fmt.Sprint("u", n)}},
			&account.Record{Time: at(minute + 60), Event: account.Released, Grant: id})
		pod(n, minute, 30, `{"phase": "Running"}`)
	}
	for n := 20; n < 23; n++ {
		pod(n, 30, 60, `{"phase": "Pending"}`)
	}
	var text []byte
	for _, r := range records {
		if text, err = r.Append(text); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Append(text); err != nil {
		t.Fatal(err)
	}
	trace = filepath.Join(t.TempDir(), "pods.json")
	if err := os.WriteFile(trace, []byte(`{"kind": "List", "items": [`+strings.Join(pods, ",\n")+`,
		{"kind": "Event", "reason": "FailedScheduling", "involvedObject": {"kind": "Pod", "uid": "long-gone"}, "lastTimestamp": "2026-03-01T10:00:00Z"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	return stateDir, trace
}

// twoGPUs are the first two of a recorded machine.
func twoGPUs(t *testing.T) (inv *gpu.Inventory, file string) {
	t.Helper()
	inv, err := config.ReadInventory(read(t, plain))
	if err != nil {
		t.Fatal(err)
	}
	inv.GPUs = inv.GPUs[:2]
	data, err := json.Marshal(inv)
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "inventory.json")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return inv, file
}

func TestAdvise(t *testing.T) {
	inv, inventory := twoGPUs(t)
	stateDir, trace := crowdedDay(t, inv)
	advise := func(args ...string) string {
		t.Helper()
		out, said, err := execute(t, append([]string{"advise", "--state-dir", stateDir, "--inventory", inventory}, args...)...)
		if err != nil || said != "" {
			t.Fatalf("%q: %v %s", args, err, said)
		}
		return out
	}
	golden(t, "testdata/advise.txt", []byte(advise("--trace", trace, "--top", "3")))
	// The documents show this output; one says in sentences what it means.
	table, _, _ := strings.Cut(advise("--trace", trace, "--top", "1"), "\n\n#")
	shown := strings.ReplaceAll(strings.ReplaceAll("\n"+table, "\n", "\n    "), "\n    \n", "\n\n")
	for _, page := range []string{"advise", "plan"} {
		if !strings.Contains(string(read(t, "../../docs/"+page+".md")), shown) {
			t.Errorf("docs/%s.md does not show\n%s", page, shown)
		}
	}
	golden(t, "testdata/advise-journal.txt", []byte(advise("--top", "0", "--placer", "--refused", "back")))
	golden(t, "testdata/advise.json", []byte(advise("--trace", trace, "--top", "1", "-o", "json")))

	// The partition is one that the agent takes, and that is the present one of the next advice.
	file := filepath.Join(t.TempDir(), "better.yaml")
	best := advise("--trace", trace, "-o", "partition")
	if err := os.WriteFile(file, []byte(best), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, said, err := execute(t, "check", "--config", file, "--inventory", inventory); err != nil || !strings.Contains(out, "partition default fits") {
		t.Errorf("check: %s%s%v", out, said, err)
	}
	if again := advise("--trace", trace, "--config", file); !strings.Contains(again, "\npresent ") || advise("--trace", trace, "-o", "partition") != best {
		t.Errorf("the second advice is:\n%s", again)
	}
	if out := advise("--trace", trace, "--dynamic", "-o", "json"); !strings.Contains(out, `"name": "dynamic"`) || !strings.Contains(out, "a claim of gpu-memory with 30 GiB") {
		t.Errorf("with dynamic GPUs:\n%s", out)
	}
	for _, bad := range []struct {
		args []string
		want string
	}{
		{[]string{"--since", "yesterday"}, "is not a time"},
		{[]string{"--since", "2026-03-02", "--until", "2026-03-01"}, "there is no demand"},
		{[]string{"--trace", inventory}, "document 1: it has no kind"},
		{[]string{"--state-dir", "/nonexistent"}, "there is no usage journal in /nonexistent/usage: "},
		{[]string{"--state-dir", "/nonexistent"}, "unless it runs with --usage-size 0"},
		{[]string{"--since", "2026-03-01T11:59", "--until", "2026-03-01T12:00"}, "nothing was asked for"},
		{[]string{"--config", plans, "--partition", "none"}, "no partition is named"},
		{[]string{"--tries", "0"}, "--tries is at least 1"},
	} {
		if _, _, err := execute(t, append([]string{"advise", "--state-dir", stateDir, "--inventory", inventory}, bad.args...)...); err == nil || !strings.Contains(err.Error(), bad.want) {
			t.Errorf("%q: %v, want %q", bad.args, err, bad.want)
		}
	}
}

// Without a journal the pods of the trace count alone, and the advice tells so.
func TestAdviseByTheTraceAlone(t *testing.T) {
	inv, inventory := twoGPUs(t)
	_, trace := crowdedDay(t, inv)
	out, _, err := execute(t, "advise", "--state-dir", "/nonexistent", "--inventory", inventory, "--trace", trace, "--node-name", "n")
	if err != nil || !strings.Contains(strings.Join(strings.Fields(strings.ReplaceAll(out, "#", "")), " "), "Only the trace counts: there is no usage journal in /nonexistent/usage") {
		t.Errorf("%v\n%s", err, out)
	}
}

// Partitions of one result are one line: they are no choices.
func TestAdviseShowsATieOnce(t *testing.T) {
	alternative := func(name string, served int, change func(*advise.Alternative)) advise.Alternative {
		a := advise.Alternative{Name: name}
		a.Served = served
		if change != nil {
			change(&a)
		}
		return a
	}
	plain := func(a *advise.Alternative) { a.Plain = true }
	present := func(a *advise.Alternative) { a.Present = true }
	for _, c := range []struct {
		name  string
		tried []advise.Alternative
		want  string
		told  bool
	}{
		{"ties", []advise.Alternative{alternative("a", 9, nil), alternative("b", 9, nil), alternative("c", 9, nil), alternative("d", 8, nil), alternative("e", 7, nil)},
			"a+2 d", false},
		{"the present one and plain ones", []advise.Alternative{alternative("a", 9, nil), alternative("whole", 9, plain), alternative("c", 9, nil), alternative("now", 5, present), alternative("x", 5, nil)},
			"a+1 whole now+1", false},
		{"all the same", []advise.Alternative{alternative("whole", 9, plain), alternative("b", 9, nil), alternative("now", 9, present), alternative("d", 9, nil)},
			"whole+2 now", true},
		{"the same for the first two of three", []advise.Alternative{alternative("a", 9, nil), alternative("b", 9, nil), alternative("c", 8, nil)},
			"a+1 c", false},
	} {
		var out adviceJSON
		out.show(&advise.Advice{Tried: c.tried}, 2)
		var got []string
		for _, a := range out.Alternatives {
			name := a.Name
			if a.Ties > 0 {
				name += fmt.Sprint("+", a.Ties)
			}
			got = append(got, name)
		}
		if text := strings.Join(got, " "); text != c.want || (len(out.Notes) > 0) != c.told {
			t.Errorf("%s: %q, notes %q; want %q, and a note: %v", c.name, text, out.Notes, c.want, c.told)
		}
	}
}
