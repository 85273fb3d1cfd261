// SPDX-License-Identifier: Apache-2.0

package state

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 123456789, time.UTC)

func allocation(n int) Allocation {
	units := piece.SetOf([]int{n, n + 1, n + 7})
	return Allocation{Key: fmt.Sprint("key-", n), Allocated: noon.Add(time.Duration(n) * time.Second),
		Record: ledger.Record{Owner: ledger.DevicePlugin, Resource: "example.com/gpu-mem",
			Grants: []ledger.Grant{{GPU: "GPU-a", Piece: piece.Units{Set: units, Unit: 1024}, Cap: piece.CapOf(3 << 30), Compute: compute.Share{Ceiling: 26}}}}}
}

var full = Document{
	Boot:       "b1",
	GPUs:       []gpu.Device{{Index: 1, UUID: "GPU-a", Memory: 81920, MIG: gpu.MIG{Capable: true, Profiles: []gpu.Profile{{Name: "1g.10gb"}}, Instances: []gpu.Instance{{Profile: "1g.10gb", GI: 3}}}}},
	Faults:     []health.Record{{GPU: "GPU-a", Xid: 79, Class: health.ClassLost, Since: noon}},
	Layouts:    []Layout{{GPU: "GPU-a", Past: plan.Past{Layout: plan.Layout{Division: piece.Division{Kind: piece.KindUnits, N: 79}, Compute: compute.Sharing{MPS: true, Factor: 2.5, Max: 80}}, Until: noon}}},
	TimeSlices: map[gpu.UUID]gpu.TimeSlice{"GPU-b": gpu.TimeSliceLong, "GPU-a": gpu.TimeSliceShort},
}

// open opens dir and collects what is logged.
func open(t testing.TB, dir string) (*Store, *bytes.Buffer) {
	t.Helper()
	log := &bytes.Buffer{}
	s, err := Open(dir, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, log
}

func do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func appendAll(t testing.TB, s *Store, allocations ...Allocation) {
	t.Helper()
	for _, c := range allocations {
		do(t, s.Append(c))
	}
}

func keep(allocations ...Allocation) []Allocation { return allocations }

func wantAllocations(t testing.TB, got []Allocation, want ...Allocation) {
	t.Helper()
	if !reflect.DeepEqual(got, append([]Allocation(nil), want...)) {
		t.Errorf("allocations are %v, want %v", got, want)
	}
}

// names is the directory's entries.
func names(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	do(t, err)
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func TestRemembers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "state")
	s, log := open(t, dir)
	if !reflect.DeepEqual(s.Document(), Document{}) || s.Allocations() != nil {
		t.Errorf("a new directory says %v, %v", s.Document(), s.Allocations())
	}
	do(t, s.Save(full))
	later := allocation(1)
	later.Allocated = later.Allocated.Add(time.Hour).In(time.FixedZone("x", 3600))
	appendAll(t, s, allocation(1), allocation(2), later)
	if full.GPUs[0].MIG.Profiles == nil {
		t.Error("Save changed its argument")
	}
	do(t, s.Close())

	s, log2 := open(t, dir)
	want := full
	want.GPUs = slices.Clone(full.GPUs)
	want.GPUs[0].MIG.Profiles = nil
	got := s.Document()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("document is\n%+v, want\n%+v", got, want)
	}
	later.Allocated = later.Allocated.UTC()
	wantAllocations(t, s.Allocations(), allocation(2), later)
	if log.Len()+log2.Len() > 0 {
		t.Errorf("logged: %s%s", log, log2)
	}
	if got, want := names(t, dir), []string{journalFile, documentFile}; !slices.Equal(got, want) {
		t.Errorf("in the directory: %q, want %q", got, want)
	}
	for name, want := range map[string]fs.FileMode{".": fs.ModeDir | dirMode, journalFile: fileMode, documentFile: fileMode} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v %v, want %v", name, info.Mode(), err, want)
		}
	}
}

func TestKeep(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, dir)
	appendAll(t, s, allocation(1), allocation(2), allocation(3))
	do(t, s.Keep(keep(allocation(3), allocation(1))))
	appendAll(t, s, allocation(4), allocation(5))
	reopen := func(want ...Allocation) {
		t.Helper()
		do(t, s.Close())
		s, _ = open(t, dir)
		wantAllocations(t, s.Allocations(), want...)
	}
	reopen(allocation(1), allocation(3), allocation(4), allocation(5))

	// What stands is left alone; a journal that somebody took away is not.
	path := filepath.Join(dir, journalFile)
	before, err := os.Stat(path)
	do(t, err)
	do(t, s.Keep(keep(allocation(5), allocation(4), allocation(3), allocation(1))))
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("the journal was written again: %v", err)
	}
	do(t, os.Remove(path))
	do(t, s.Keep(keep(allocation(5), allocation(4), allocation(3), allocation(1))))
	reopen(allocation(1), allocation(3), allocation(4), allocation(5))
	do(t, s.Keep(keep()))
	reopen()
}

func TestSaveWritesOnlyWhatIsNew(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, dir)
	do(t, s.Save(full))
	path := filepath.Join(dir, documentFile)
	first, err := os.Stat(path)
	do(t, err)
	do(t, s.Save(full))
	if again, err := os.Stat(path); err != nil || !os.SameFile(first, again) {
		t.Errorf("the same document was written again: %v", err)
	}
	do(t, os.Remove(path))
	do(t, s.Save(full))
	other := full
	other.Boot = "b2"
	do(t, s.Save(other))
	do(t, s.Close())
	if s, _ = open(t, dir); s.Document().Boot != "b2" {
		t.Errorf("boot is %q", s.Document().Boot)
	}
}

// TestJournalCutAtEveryByte: what is read is the allocations whose lines are whole,
// and what is appended after that is there the next time.
func TestJournalCutAtEveryByte(t *testing.T) {
	allocations := []Allocation{allocation(1), allocation(3), allocation(5)}
	var data []byte
	var ends []int // of each line, without its newline
	for _, c := range allocations {
		line, err := encodeLine(c)
		do(t, err)
		data = append(data, line...)
		ends = append(ends, len(data)-1)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, journalFile)
	for cut := range len(data) + 1 {
		do(t, os.WriteFile(path, data[:cut], fileMode))
		whole := 0
		for whole < len(ends) && ends[whole] <= cut {
			whole++
		}
		torn := cut > 0 && !slices.Contains(ends, cut) && data[cut-1] != '\n'
		s, log := open(t, dir)
		wantAllocations(t, s.Allocations(), allocations[:whole]...)
		if warned := strings.Count(log.String(), "level=WARN"); (warned == 1) != torn || warned > 1 {
			t.Errorf("cut at %d: %d warnings, torn %v", cut, warned, torn)
		}
		appendAll(t, s, allocation(7), allocation(9))
		do(t, s.Close())
		s, _ = open(t, dir)
		wantAllocations(t, s.Allocations(), append(slices.Clone(allocations[:whole]), allocation(7), allocation(9))...)
		do(t, s.Keep(keep(allocation(9))))
		do(t, s.Close())
		s, log = open(t, dir)
		wantAllocations(t, s.Allocations(), allocation(9))
		if log.Len() > 0 {
			t.Errorf("cut at %d: after Keep: %s", cut, log)
		}
		do(t, s.Close())
		if t.Failed() {
			t.Fatalf("cut at %d of %d", cut, len(data))
		}
	}
}

func TestDocumentCutAtEveryByte(t *testing.T) {
	data, err := encodeDocument(full)
	do(t, err)
	dir := t.TempDir()
	path := filepath.Join(dir, documentFile)
	for cut := range len(data) {
		do(t, os.WriteFile(path, data[:cut], fileMode))
		s, log := open(t, dir)
		if !reflect.DeepEqual(s.Document(), Document{}) {
			t.Fatalf("cut at %d: %v", cut, s.Document())
		}
		if n := strings.Count(log.String(), "level=WARN"); n != 1 {
			t.Fatalf("cut at %d: %d warnings: %s", cut, n, log)
		}
		if bad, err := os.ReadFile(filepath.Join(dir, badFile)); err != nil || !bytes.Equal(bad, data[:cut]) {
			t.Fatalf("cut at %d: put aside: %q, %v", cut, bad, err)
		}
		do(t, s.Save(full))
		do(t, s.Close())
		s, log = open(t, dir)
		if s.Document().Boot != "b1" || log.Len() > 0 {
			t.Fatalf("cut at %d: rebuilt: %v %s", cut, s.Document(), log)
		}
		do(t, s.Close())
	}
}

// TestNoRoom: a write that fails half way harms neither what was there nor what
// comes after it. The limit on a file's size stands for a full disk.
func TestNoRoom(t *testing.T) {
	// In a process of its own: the limit is for all files of one, those of the
	// testing package among them.
	const inside = "STATE_TEST_NO_ROOM"
	if os.Getenv(inside) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestNoRoom$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestNoRoom") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	dir := t.TempDir()
	s, _ := open(t, dir)
	appendAll(t, s, allocation(1))
	do(t, s.Save(Document{Boot: "b1"}))
	size := func(name string) uint64 {
		info, err := os.Stat(filepath.Join(dir, name))
		do(t, err)
		return uint64(info.Size())
	}
	signal.Ignore(unix.SIGXFSZ)
	defer signal.Reset(unix.SIGXFSZ)
	limited := func(to uint64, f func() error) {
		t.Helper()
		var old unix.Rlimit
		do(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &old))
		do(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: to, Max: old.Max}))
		err := f()
		do(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &old))
		if !errors.Is(err, unix.EFBIG) || !strings.Contains(err.Error(), "check free space") {
			t.Errorf("got %v", err)
		}
	}
	before := size(journalFile)
	for range 2 {
		limited(size(journalFile)+10, func() error { return s.Append(allocation(3)) })
	}
	if got := size(journalFile); got != before+20 {
		t.Errorf("%d bytes, want the torn beginnings of two lines after %d", got, before)
	}
	limited(0, func() error { return s.Append(allocation(3)) })
	appendAll(t, s, allocation(5))
	limited(20, func() error { return s.Keep(keep(allocation(1), allocation(3))) })
	limited(20, func() error { return s.Save(full) })
	if got, want := names(t, dir), []string{journalFile, documentFile}; !slices.Equal(got, want) {
		t.Errorf("left behind: %q, want %q", got, want)
	}
	appendAll(t, s, allocation(7))
	do(t, s.Close())
	s, _ = open(t, dir)
	wantAllocations(t, s.Allocations(), allocation(1), allocation(5), allocation(7))
	if s.Document().Boot != "b1" {
		t.Errorf("boot is %q", s.Document().Boot)
	}
}

// TestDamage: a byte that was changed costs its own line at most.
func TestDamage(t *testing.T) {
	var data []byte
	for n := range 3 {
		line, err := encodeLine(allocation(n))
		do(t, err)
		data = append(data, line...)
	}
	for i := range data {
		for _, with := range []byte{0, '\n', ' ', data[i] ^ 1} {
			damaged := slices.Clone(data)
			damaged[i] = with
			j := decodeJournal(damaged)
			for _, c := range j.allocations {
				if !slices.ContainsFunc([]Allocation{allocation(0), allocation(1), allocation(2)}, func(w Allocation) bool { return reflect.DeepEqual(c, w) }) {
					t.Fatalf("byte %d as %q: an allocation that was not there: %v", i, with, c)
				}
			}
			// A newline that is gone joins two lines.
			if len(j.allocations) < 1 || data[i] != '\n' && len(j.allocations) < 2 {
				t.Fatalf("byte %d as %q: %d allocations left", i, with, len(j.allocations))
			}
		}
	}
}

// TestVersions: version 0 is a directory with hook programs and nothing else.
func TestVersions(t *testing.T) {
	newerLine := func() string {
		payload := "whatever it is by then"
		return fmt.Sprintf("v2 %08x %s\n", checksum([]byte("v2"), []byte(payload)), payload)
	}()
	line, err := encodeLine(allocation(1))
	do(t, err)
	for _, tt := range []struct {
		name, document, journal string
		refused                 string // the file
	}{
		{name: "version 0"},
		{name: "a newer document", document: `{"version":2,"boot":7}`, journal: string(line), refused: documentFile},
		{name: "a newer journal", document: `{"version":1}`, journal: string(line) + newerLine, refused: journalFile},
		{name: "a newer journal beside a torn document", document: `{`, journal: newerLine, refused: journalFile},
		{name: "a newer line that is torn", journal: newerLine[:len(newerLine)-2]},
		{name: "no version", document: `{}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			do(t, os.MkdirAll(filepath.Join(dir, "hooks", "0123456789abcdef"), 0o755))
			for name, data := range map[string]string{documentFile: tt.document, journalFile: tt.journal} {
				if data != "" {
					do(t, os.WriteFile(filepath.Join(dir, name), []byte(data), fileMode))
				}
			}
			do(t, os.WriteFile(filepath.Join(dir, temporary(documentFile)), nil, fileMode))
			before := names(t, dir)
			s, err := Open(dir, slog.New(slog.DiscardHandler))
			if tt.refused == "" {
				do(t, err)
				defer s.Close()
				wantAllocations(t, s.Allocations())
				if _, err := os.Stat(filepath.Join(dir, "hooks", "0123456789abcdef")); err != nil {
					t.Error(err)
				}
				return
			}
			want := "read " + filepath.Join(dir, tt.refused) + ": it is of version 2, and this agent reads up to 1: run the agent that wrote it or a newer one, or remove its state with gpu-agent cleanup"
			if err == nil || err.Error() != want {
				t.Errorf("got %v, want %s", err, want)
			}
			if after := names(t, dir); !slices.Equal(before, after) {
				t.Errorf("changed: %q to %q", before, after)
			}
			if got, err := os.ReadFile(filepath.Join(dir, documentFile)); err == nil && string(got) != tt.document {
				t.Errorf("changed: %q", got)
			}
			do(t, Remove(dir))
			if s, _ := open(t, dir); s.Allocations() != nil {
				t.Error("something was left")
			}
		})
	}
}

func TestOneAtATime(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, dir)
	if _, err := Open(dir, slog.Default()); !errors.Is(err, gpu.ErrInUse) {
		t.Errorf("a second Open: %v", err)
	}
	if err := Remove(dir); !errors.Is(err, gpu.ErrInUse) {
		t.Errorf("Remove: %v", err)
	}
	do(t, s.Close())
	do(t, s.Close())
	for what, err := range map[string]error{"Append": s.Append(allocation(1)), "Keep": s.Keep(keep(allocation(1)))} {
		if !errors.Is(err, fs.ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
	open(t, dir)
}

func TestRefused(t *testing.T) {
	if _, err := Open("state", slog.Default()); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a relative path: %v", err)
	}
	for _, name := range files {
		for what, make := range map[string]func(string) error{
			"link":      func(p string) error { return os.Symlink("elsewhere", p) },
			"link out":  func(p string) error { return os.Symlink("/etc/passwd", p) },
			"directory": func(p string) error { return os.Mkdir(p, 0o700) },
		} {
			dir := t.TempDir()
			do(t, make(filepath.Join(dir, name)))
			if _, err := Open(dir, slog.Default()); !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), filepath.Join(dir, name)) {
				t.Errorf("%s as %s: %v", name, what, err)
			}
			do(t, Remove(dir))
			if got := names(t, dir); !slices.Equal(got, []string{name}) {
				t.Errorf("%s as %s: Remove left %q", name, what, got)
			}
		}
	}
	s, _ := open(t, t.TempDir())
	for _, c := range []Allocation{{}, {Key: "k", Record: ledger.Record{Resource: "r"}}, {Key: "\xff", Record: ledger.Record{Resource: "r", Grants: allocation(1).Grants}},
		{Key: "k", Record: ledger.Record{Resource: "\xff", Grants: allocation(1).Grants}}} {
		if err := s.Append(c); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("Append %+v: %v", c, err)
		}
	}
}

// TestRemove: the hook programs are those that nvml installs, what is below cap
// is ours, and what is somebody else's stays.
func TestRemove(t *testing.T) {
	program := filepath.Join(t.TempDir(), "hook")
	do(t, os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755))
	for _, foreign := range []string{"", "notes", "hooks/readme", "hooks/0123456789abcdef/other", "hooks/old/nvidia-cdi-hook", "state.json.mine"} {
		t.Run(foreign, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			installed, err := nvml.InstallHook(program, dir)
			do(t, err)
			do(t, os.WriteFile(filepath.Join(filepath.Dir(installed), ".nvidia-cdi-hook.ABC234.tmp"), nil, 0o600))
			for _, name := range []string{"cap/0123456789abcdef/libcuda.so.1", "cap/limits/0123456789abcdef/GPU-a", "usage/0000000001.jsonl", "park/0123456789abcdef.json", "park/.lock-0123456789abcdef"} {
				do(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
				do(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
			}
			do(t, os.MkdirAll(filepath.Join(dir, "cap/empty"), 0o755))
			s, _ := open(t, dir)
			do(t, s.Save(full))
			appendAll(t, s, allocation(1))
			do(t, s.Close())
			for _, name := range []string{badFile, temporary(journalFile), temporary(documentFile)} {
				do(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
			}
			for _, name := range []string{Socket, temporary(Socket)} { // of an agent that was killed
				l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
				do(t, err)
				l.SetUnlinkOnClose(false)
				do(t, l.Close())
			}
			if foreign != "" {
				do(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, foreign)), 0o755))
				do(t, os.WriteFile(filepath.Join(dir, foreign), nil, 0o600))
			}
			do(t, Remove(dir))
			do(t, Remove(dir))
			var left []string
			do(t, filepath.WalkDir(filepath.Dir(dir), func(p string, d fs.DirEntry, err error) error {
				if err == nil && !d.IsDir() {
					rel, _ := filepath.Rel(dir, p)
					left = append(left, rel)
				}
				return err
			}))
			if want := strings.Fields(foreign); !slices.Equal(left, want) {
				t.Errorf("left: %q, want %q", left, want)
			}
			if _, err := os.Stat(dir); foreign == "" && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the directory stays: %v", err)
			}
		})
	}
	t.Run("a link as hooks", func(t *testing.T) {
		dir, other := t.TempDir(), t.TempDir()
		installed, err := nvml.InstallHook(program, other)
		do(t, err)
		do(t, os.Symlink(filepath.Join(other, "hooks"), filepath.Join(dir, "hooks")))
		do(t, Remove(dir))
		if _, err := os.Stat(installed); err != nil {
			t.Errorf("followed: %v", err)
		}
	})
}

// FuzzLine: a line is one line, and the allocation comes back from it as it was.
func FuzzLine(f *testing.F) {
	f.Add("0123456789abcdef", "b\"\\<\u2028\x00\x7f", 3, int64(0))
	f.Fuzz(func(t *testing.T, key, resource string, number int, at int64) {
		c := Allocation{Key: key, Allocated: time.Unix(at, at&0xffff).UTC(), Record: ledger.Record{Resource: resource, Grants: []ledger.Grant{
			{GPU: "GPU-a", Piece: piece.Replica{Number: max(0, number), Of: max(0, -number)}, Cap: piece.CapOf(uint64(at))}}}}
		line, err := encodeLine(c)
		if err != nil {
			return
		}
		if bytes.IndexByte(line, '\n') != len(line)-1 {
			t.Fatalf("not one line: %q", line)
		}
		if j := decodeJournal(line); len(j.allocations) != 1 || !reflect.DeepEqual(j.allocations[0], c) {
			t.Fatalf("%v came back as %v", c, j.allocations)
		}
	})
}

// FuzzJournal: whatever the file says, each allocation read comes from a line that is
// there and comes back as it is; and an allocation appended to the file is read.
func FuzzJournal(f *testing.F) {
	line, err := encodeLine(allocation(1))
	do(f, err)
	f.Add(line)
	f.Add(append(slices.Clone(line), line[:40]...))
	f.Add([]byte("v1 00000000 {}\nv2 x"))
	more, err := encodeLine(allocation(2))
	do(f, err)
	f.Fuzz(func(t *testing.T, data []byte) {
		j := decodeJournal(data)
		for _, l := range j.lines {
			if !bytes.Contains(data, []byte(strings.TrimSuffix(l, "\n"))) {
				t.Fatalf("line %q is not there", l)
			}
		}
		for _, c := range j.allocations {
			l, err := encodeLine(c)
			if err != nil {
				continue // Not a time or a text that we would have written.
			}
			if again := decodeJournal(l); len(again.allocations) != 1 || !again.allocations[0].Allocated.Equal(c.Allocated) || again.allocations[0].Resource != c.Resource || !reflect.DeepEqual(again.allocations[0].Grants, c.Grants) {
				t.Fatalf("%v came back as %v", c, again.allocations)
			}
		}
		if j.open {
			data = append(slices.Clone(data), '\n')
		}
		if after := decodeJournal(slices.Concat(data, more)); !slices.ContainsFunc(after.allocations, func(c Allocation) bool { return reflect.DeepEqual(c, allocation(2)) }) {
			t.Fatalf("an appended allocation was not read: %v", after)
		}
	})
}

// FuzzDocument: what is read can be written, and is the same when read again.
func FuzzDocument(f *testing.F) {
	data, err := encodeDocument(full)
	do(f, err)
	f.Add(data)
	f.Add([]byte(`{"version":1,"faults":null}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := decodeDocument(data)
		if err != nil {
			return
		}
		first, err := encodeDocument(d)
		do(t, err)
		again, err := decodeDocument(first)
		do(t, err)
		if second, err := encodeDocument(again); err != nil || !bytes.Equal(first, second) {
			t.Fatalf("%v:\n%s\n%s", err, first, second)
		}
	})
}

// BenchmarkAppend is of an allocation of memory units; the agent's loop waits for it.
func BenchmarkAppend(b *testing.B) {
	s, _ := open(b, b.TempDir())
	c := allocation(1)
	b.ReportAllocs()
	var took []time.Duration
	for b.Loop() {
		start := time.Now()
		do(b, s.Append(c))
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-µs")
}
