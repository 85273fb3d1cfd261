// SPDX-License-Identifier: Apache-2.0

package brief

import (
	"bytes"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"
)

func TestCut(t *testing.T) {
	for _, c := range []struct {
		in    string
		limit int
		want  string
	}{
		{"", 3, ""},
		{"abc", 3, "abc"},
		{"abcd", 3, "…"},
		{"abcdef", 5, "ab…"},
		{"äöü", 6, "äöü"},
		{"äöüß", 6, "ä…"}, // ö would end in byte 4 of the 3 that are left
		{"a\xffb", 5, "a\uFFFDb"},
		{"\xff\xff\xff", 6, "\uFFFD"}, // neighbours are one
	} {
		if got := Cut(c.in, c.limit); got != c.want || len(got) > c.limit {
			t.Errorf("Cut(%q, %d) = %q, want %q", c.in, c.limit, got, c.want)
		}
	}
	long := strings.Repeat("日本語", 5000)
	for limit := 3; limit < 200; limit++ {
		if got := Cut(long, limit); len(got) > limit || len(got) < limit-2 || !utf8.ValidString(got) {
			t.Fatalf("Cut to %d bytes gives %d: %q", limit, len(got), got)
		}
	}
}

func TestList(t *testing.T) {
	var names []string
	for i := range 200 {
		names = append(names, "ns/pod-"+strconv.Itoa(i))
	}
	if got, want := List(names[:2], 10), "ns/pod-0, ns/pod-1"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := List(names[:10], 10); strings.Contains(got, "more") {
		t.Errorf("all are named, and yet: %q", got)
	}
	if got := List(names, 10); !strings.HasSuffix(got, "ns/pod-9 and 190 more") {
		t.Errorf("got %q", got)
	}
}

// journal is a log that a test reads while others write.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) lines() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Split(strings.TrimSpace(j.text.String()), "\n")
}

func ration(level slog.Level) (*Ration, *journal) {
	j := &journal{}
	log := slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: level}))
	return NewRation(log, time.Now, time.AfterFunc), j
}

// TestFloodOfLines: 10,000 lines come to ten and one that tells of the others, also
// where nothing comes after them.
func TestFloodOfLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, j := ration(slog.LevelInfo)
		for n := range 10_000 {
			r.Log(slog.LevelWarn, "GPU event", []any{"gpu", "GPU-0"}, "xid", n)
		}
		r.Log(slog.LevelWarn, "GPU event", []any{"gpu", "GPU-1"}, "xid", 94) // another kind
		if got := j.lines(); len(got) != Lines+1 || !strings.Contains(got[0], `msg="GPU event" gpu=GPU-0 xid=0`) ||
			!strings.Contains(got[Lines], "gpu=GPU-1") {
			t.Fatalf("%d lines: %q", len(got), got)
		}
		time.Sleep(Window)
		synctest.Wait()
		got := j.lines()
		if want := `level=WARN msg="GPU event: more of these were left out" gpu=GPU-0 lines=9990 within=1m0s`; len(got) != Lines+2 || !strings.HasSuffix(got[Lines+1], want) {
			t.Fatalf("%d lines, the last is %q, want %q", len(got), got[len(got)-1], want)
		}
		// A new window has room again.
		r.Log(slog.LevelWarn, "GPU event", []any{"gpu", "GPU-0"}, "xid", 1)
		if got := j.lines(); len(got) != Lines+3 {
			t.Errorf("%d lines, want one more: %q", len(got), got)
		}
		time.Sleep(Window)
		r.Log(slog.LevelWarn, "other", nil)
		if len(r.quotas) != 1 {
			t.Errorf("%d kinds are remembered, want the last one", len(r.quotas))
		}
	})
}

// TestLateTimer: the count is told, once, where the next line comes before the timer does.
func TestLateTimer(t *testing.T) {
	j := &journal{}
	now := time.Unix(0, 0)
	var timers []func()
	r := NewRation(slog.New(slog.NewTextHandler(j, nil)), func() time.Time { return now },
		func(_ time.Duration, f func()) *time.Timer { timers = append(timers, f); return nil })
	for range Lines + 5 {
		r.Log(slog.LevelInfo, "m", nil)
	}
	now = now.Add(Window)
	r.Log(slog.LevelInfo, "m", nil)
	for _, f := range timers {
		f()
	}
	got := j.lines()
	if len(got) != Lines+2 || !strings.Contains(got[Lines], "lines=5") || strings.Contains(got[Lines+1], "left out") {
		t.Errorf("lines %q", got)
	}
}

func TestBelowTheLevelNothingIsCounted(t *testing.T) {
	r, j := ration(slog.LevelInfo)
	for range 100 {
		r.Log(slog.LevelDebug, "m", nil)
	}
	if got := j.lines(); len(got) != 1 || got[0] != "" || len(r.quotas) != 0 {
		t.Errorf("lines %q, %d kinds", got, len(r.quotas))
	}
}
