// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

var long = flag.Bool("long", false, "write a whole year of a busy node instead of ten days")

var newYear = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func line(t *testing.T, r *usage.Record) []byte {
	t.Helper()
	out, err := r.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func refusal(n int) *usage.Record {
	return &usage.Record{Time: newYear.Add(time.Duration(n) * time.Minute), Event: usage.Refused, Count: n, Message: strings.Repeat("x", 100)}
}

func counts(t *testing.T, dir string, since time.Time) (out []int) {
	t.Helper()
	if err := Read(dir, since, func(r *usage.Record) {
		if r.Event == usage.Refused {
			out = append(out, r.Count)
		}
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func size(t *testing.T, dir string) (sum int64) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		sum += info.Size()
	}
	return sum
}

// The journal is one after a restart, over segments too; the oldest go, and what is left is
// within the bound and without a gap.
func TestSegments(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "usage")
	o := Options{Max: 24 << 10, Segment: 4 << 10}
	s, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	none := filepath.Join(dir, "none")
	if err := Read(none, time.Time{}, nil); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), none) {
		t.Errorf("a directory that is not there is read as %v, want an error that names it", err)
	}
	book := usage.NewBook(nil)
	n := 0
	for most := int64(0); n < 6000; n++ {
		if _, err := s.Append(line(t, refusal(n))); err != nil {
			t.Fatal(err)
		}
		if s.Full() {
			at := refusal(n).Time
			if err := s.Next(line(t, &usage.Record{Time: at, Event: usage.Began, Book: book.State(at)})); err != nil {
				t.Fatal(err)
			}
			if most = max(most, size(t, dir)); most > o.Max {
				t.Fatalf("%d bytes before it was tidied", most)
			}
			if err := s.Tidy(); err != nil {
				t.Fatal(err)
			}
		}
		if n%997 == 0 {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if s, err = Open(dir, o); err != nil {
				t.Fatal(err)
			}
		}
	}
	defer s.Close()
	got := counts(t, dir, time.Time{})
	for i := range got {
		if got[i] != got[0]+i {
			t.Fatalf("after %d comes %d", got[i-1], got[i])
		}
	}
	if got[0] == 0 || got[len(got)-1] != n-1 || len(got) < 1000 {
		t.Errorf("%d to %d of %d are left", got[0], got[len(got)-1], n)
	}
	late := counts(t, dir, refusal(n-5).Time)
	if late[0] > n-5 || len(late) >= len(got) {
		t.Errorf("of the last five %d were read, from %d on", len(late), late[0])
	}
}

// Whatever a kill leaves of the files, the next process goes on: torn lines, a segment
// without its first line, both forms of one, a temporary file.
func TestLeftOvers(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(dir string) error
	}{
		{"nothing", func(string) error { return nil }},
		{"a torn line", func(dir string) error { return appendTo(filepath.Join(dir, name(2, plainSuffix)), `{"time":"2026`) }},
		{"a segment without a line", func(dir string) error { return appendTo(filepath.Join(dir, name(3, plainSuffix)), "") }},
		{"one with half of one", func(dir string) error { return appendTo(filepath.Join(dir, name(3, plainSuffix)), `{"time":`) }},
		{"a temporary file", func(dir string) error { return appendTo(filepath.Join(dir, "."+name(1, tempSuffix)), "x") }},
		{"both forms", func(dir string) error { return appendTo(filepath.Join(dir, name(1, plainSuffix)), "") }},
		{"zeros, as after a loss of power", func(dir string) error {
			return appendTo(filepath.Join(dir, name(2, plainSuffix)), strings.Repeat("\x00", 512))
		}},
		{"a packed one that is cut", func(dir string) error { return os.Truncate(filepath.Join(dir, name(1, packedSuffix)), 60) }},
		{"the last one gone", func(dir string) error { return os.Remove(filepath.Join(dir, name(2, plainSuffix))) }},
		{"what is not ours", func(dir string) error { return appendTo(filepath.Join(dir, "README"), "x") }},
		{"a copy with our number", func(dir string) error { return appendTo(filepath.Join(dir, "1"+plainSuffix), "x") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			s, err := Open(dir, Options{})
			if err != nil {
				t.Fatal(err)
			}
			add := func(n int) {
				t.Helper()
				if _, err := s.Append(line(t, refusal(n))); err != nil {
					t.Fatal(err)
				}
			}
			add(1)
			if err := s.Next(line(t, &usage.Record{Time: refusal(1).Time, Event: usage.Began, Book: usage.NewBook(nil).State(newYear)})); err != nil {
				t.Fatal(err)
			}
			if err := s.Tidy(); err != nil {
				t.Fatal(err)
			}
			add(2)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if err := tt.spoil(dir); err != nil {
				t.Fatal(err)
			}
			before := counts(t, dir, time.Time{})
			if s, err = Open(dir, Options{}); err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			add(3)
			if err := s.Tidy(); err != nil {
				t.Fatal(err)
			}
			add(4)
			if got, want := fmt.Sprint(counts(t, dir, time.Time{})), fmt.Sprint(append(before, 3, 4)); got != want {
				t.Errorf("read %s, want %s", got, want)
			}
			if tt.name != "a packed one that is cut" && tt.name != "the last one gone" && len(before) != 2 {
				t.Errorf("before: %v", before)
			}
			_, err = os.Stat(filepath.Join(dir, "1"+plainSuffix))
			if copied := tt.name == "a copy with our number"; copied != (err == nil) {
				t.Errorf("a file that is not the journal's: %v", err)
			}
			last := 0
			if err := ReadLast(dir, func(r *usage.Record) { last++ }); err != nil || last < 2 {
				t.Errorf("the last segment has %d records, %v", last, err)
			}
		})
	}
}

// A segment that cannot be begun leaves the one before it as it was, and no descriptor more than
// before. The error says why.
func TestNextThatFails(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir()) // as /proc names it
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	add := func(n int) {
		t.Helper()
		if _, err := s.Append(line(t, refusal(n))); err != nil {
			t.Fatal(err)
		}
	}
	first := line(t, &usage.Record{Time: newYear, Event: usage.Began, Book: usage.NewBook(nil).State(newYear)})
	add(1)
	inTheWay := filepath.Join(dir, name(2, plainSuffix))
	if err := os.Mkdir(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	if n := descriptors(t, dir); n != 1 {
		t.Fatalf("%d files of the journal are open, want 1", n)
	}
	if err := s.Next(first); !errors.Is(err, syscall.EISDIR) {
		t.Errorf("%v, want one that wraps %v", err, syscall.EISDIR)
	}
	if n := descriptors(t, dir); n != 1 {
		t.Errorf("then %d files of the journal are open, want 1", n)
	}
	add(2)
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	if err := s.Next(first); err != nil {
		t.Error(err)
	}
	add(3)
	if got := fmt.Sprint(counts(t, dir, time.Time{})); got != "[1 2 3]" {
		t.Errorf("read %s", got)
	}
}

// descriptors counts the open files of this process in a directory.
func descriptors(t *testing.T, dir string) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && filepath.Dir(to) == dir {
			n++
		}
	}
	return n
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(text)
	return err
}

func TestNewerVersion(t *testing.T) {
	dir := t.TempDir()
	if err := appendTo(filepath.Join(dir, name(1, plainSuffix)), `{"time":"2026-03-01T12:00:00Z","event":"began","book":{"version":2,"next":5}}`+"\n"); err != nil {
		t.Fatal(err)
	}
	if err := ReadLast(dir, func(*usage.Record) {}); err == nil || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("%v", err)
	}
}

// A year of a busy node fits the bound: 1,000 allocations a day on 8 GPUs, each with its
// holder and its end, 16 more that stay for months, and a sample of use every minute.
// The short form writes three days and reckons.
func TestYearFits(t *testing.T) {
	days := 1
	if *long {
		days = 365
	}
	dir := t.TempDir()
	s, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	w := &writer{t: t, s: s, r: rand.New(rand.NewPCG(1, 2)), book: usage.NewBook(nil), at: newYear}
	for i := range 8 {
		w.gpus = append(w.gpus, gpu.UUID(fmt.Sprintf("GPU-%s", w.uuid())))
		w.take(i, 400*24*time.Hour)
		w.take(i, 400*24*time.Hour)
	}
	for range days {
		for range 1000 {
			w.pass(86400 * time.Second / 1000)
			// Of an hour in the mean: some forty at a time.
			w.take(w.r.IntN(8), time.Duration(w.r.ExpFloat64()*float64(time.Hour)))
		}
	}
	info, err := os.Stat(filepath.Join(dir, name(s.n, plainSuffix)))
	if err != nil {
		t.Fatal(err)
	}
	packed := size(t, dir) - info.Size()
	year := packed*365/int64(days) + 2*s.o.Segment
	t.Logf("%d days with %d allocations: %d KiB, %.0f bytes each; a year is %.1f MiB", days, w.n, packed>>10, float64(packed)/float64(w.n), float64(year)/(1<<20))
	if year > DefaultMax {
		t.Errorf("a year takes %d bytes, more than %d", year, DefaultMax)
	}
	first := time.Time{}
	if err := Read(dir, time.Time{}, func(r *usage.Record) {
		if first.IsZero() {
			first = r.Time
		}
	}); err != nil || first.Sub(newYear) > time.Hour {
		t.Errorf("the journal begins at %s, %v", first, err)
	}
}

// writer writes as an agent does.
type writer struct {
	t    *testing.T
	s    *Store
	r    *rand.Rand
	book *usage.Book
	gpus []gpu.UUID
	at   time.Time
	n    uint64
	open []*tenant
}

type tenant struct {
	n         uint64
	gpu       int
	size      uint64
	ends      time.Time
	mib, busy uint64
}

func (w *writer) uuid() string {
	return fmt.Sprintf("%08x-%04x-%04x-%04x-%012x", w.r.Uint32(), w.r.Uint32()&0xffff, w.r.Uint32()&0xffff, w.r.Uint32()&0xffff, w.r.Uint64()&(1<<48-1))
}

func (w *writer) write(r *usage.Record) {
	w.t.Helper()
	if _, err := w.s.Append(line(w.t, r)); err != nil {
		w.t.Fatal(err)
	}
	w.book.Apply(r)
	if w.s.Full() {
		if err := w.s.Next(line(w.t, &usage.Record{Time: r.Time, Event: usage.Began, Book: w.book.State(r.Time)})); err != nil {
			w.t.Fatal(err)
		}
		if err := w.s.Tidy(); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *writer) take(i int, stays time.Duration) {
	w.n++
	size := 1 + w.r.IntN(24)
	first := w.r.IntN(79 - size)
	at := w.at.Add(time.Duration(w.r.Int64N(int64(time.Second))))
	w.write(&usage.Record{Time: at, Event: usage.Allocated, Grant: w.n, Allocation: fmt.Sprintf("%016x", w.r.Uint64()), FrontEnd: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Count: size,
		Pieces: []usage.Piece{{GPU: w.gpus[i], Index: i, Of: piece.Units{Set: piece.Set{{First: first, Last: first + size - 1}}}, Share: float64(size) / 79, MemoryMiB: uint64(size) << 10}}})
	w.write(&usage.Record{Time: at.Add(time.Duration(w.r.Int64N(int64(3 * time.Second)))), Event: usage.Named, Grant: w.n, Holder: usage.Holder{
		Namespace: fmt.Sprintf("team-%d", w.r.IntN(12)), Pod: fmt.Sprintf("train-%x-%05x", w.r.Uint32(), w.r.Uint32()&0xfffff), UID: w.uuid(), Container: "main", Labels: map[string]string{"team": fmt.Sprintf("t%d", w.r.IntN(12))}}})
	w.open = append(w.open, &tenant{n: w.n, gpu: i, size: uint64(size), ends: at.Add(stays)})
}

// pass lets time pass, with samples and ends.
func (w *writer) pass(d time.Duration) {
	for end := w.at.Add(d); w.at.Before(end); w.at = w.at.Add(time.Minute) {
		sample := &usage.Record{Time: w.at, Event: usage.Used}
		kept := w.open[:0]
		for _, o := range w.open {
			ms := uint64(60_000)
			o.mib, o.busy = o.mib+ms*(o.size<<10-uint64(w.r.IntN(1024))), o.busy+ms
			use := usage.Use{Grant: o.n, GPU: o.gpu, MiBMs: o.mib, BusyMs: o.busy, SMMs: new(o.busy/2 + uint64(w.r.IntN(9999)))}
			if o.ends.Before(w.at) {
				w.write(&usage.Record{Time: o.ends, Event: usage.Released, Grant: o.n, Used: []usage.Use{use}})
				continue
			}
			sample.Used = append(sample.Used, use)
			kept = append(kept, o)
		}
		w.open = kept
		w.write(sample)
	}
}
