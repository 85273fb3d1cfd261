// SPDX-License-Identifier: Apache-2.0

package ask

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// questions are those of the tests: this program asks them itself.
var questions = []Question{
	{Name: "yes", Asks: "Does it answer?", Limit: time.Minute, Ask: func(_ context.Context, r *Room) Answer {
		r.Note("first", 0, []string{"GPU-11111111-2222-3333-4444-555555555555"})
		r.Note("second", 3, "of GPU-11111111-2222-3333-4444-555555555555 and MIG-11111111-2222-3333-4444-555555555556")
		return Tell(true, "it is so")
	}},
	{Name: "dies", Asks: "Does it live?", Limit: time.Minute, Ask: func(_ context.Context, r *Room) Answer {
		r.Note("before", 0, nil)
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		return Answer{}
	}},
	{Name: "hangs", Asks: "Does it end?", Limit: 300 * time.Millisecond, Ask: func(context.Context, *Room) Answer {
		time.Sleep(time.Hour)
		return Answer{}
	}},
	{Name: "daemon", Asks: "Does all of it end?", Limit: time.Hour, Ask: func(_ context.Context, r *Room) Answer {
		// What it has started makes itself a daemon.
		cmd := exec.Command("/proc/self/exe", "daemon")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			return CouldNotTell("%v", err)
		}
		r.Note("daemon", cmd.Process.Pid, nil)
		time.Sleep(time.Hour)
		return Answer{}
	}},
	{Name: "mounts", Asks: "Does it unmount?", Limit: time.Hour, Ask: func(_ context.Context, r *Room) Answer {
		if err := unix.Mount("none", r.Dir, "tmpfs", 0, ""); err != nil {
			return CouldNotTell("%v", err)
		}
		r.Note("mounted at", 0, r.Dir)
		time.Sleep(time.Hour)
		return Answer{}
	}},
	{Name: "many", Asks: "How many lines are there?", Limit: time.Minute, Ask: func(ctx context.Context, r *Room) Answer {
		n := 0
		for began := time.Now(); time.Since(began) < 200*time.Millisecond; n++ {
			r.Note("line", n, strings.Repeat("x", n%300))
		}
		return Count(float64(n), "lines", "counted")
	}},
}

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 2 && os.Args[1] == "daemon":
		time.Sleep(time.Hour)
	case len(os.Args) == 4 && os.Args[1] == "one":
		if err := One(context.Background(), questions, os.Args[2], os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	default:
		os.Exit(m.Run())
	}
}

func run(t *testing.T, of ...string) *Run {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := &Run{Out: filepath.Join(t.TempDir(), "out"), Budget: 5 * time.Minute, Self: []string{self, "one"}, Screen: t.Output()}
	for _, name := range of {
		r.Questions = append(r.Questions, questions[slices.IndexFunc(questions, func(q Question) bool { return q.Name == name })])
	}
	return r
}

// Whatever a question does, the next one is asked, and nothing is left running.
func TestRun(t *testing.T) {
	r := run(t, "dies", "hangs", "yes", "many")
	out, err := r.All(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(out); got != "{[yes many] [dies hangs] []}" {
		t.Errorf("it came to %s", got)
	}
	for name, want := range map[string]string{"dies": "signal: killed", "hangs": "no answer in 300ms"} {
		lines, err := Read(r.Out, name)
		if err != nil || len(lines) == 0 || !strings.Contains(lines[len(lines)-1].Ended, want) {
			t.Errorf("%s: %+v, %v, want %q", name, lines, err, want)
		}
	}
	if left := childrenOf(os.Getpid()); len(left) > 0 {
		t.Errorf("left running: %v", left)
	}
	data, err := os.ReadFile(filepath.Join(r.Out, "yes.jsonl"))
	if err != nil || strings.Contains(string(data), "1111") || strings.Count(string(data), "GPU-1") != 2 || !strings.Contains(string(data), "MIG-1") {
		t.Errorf("%s, %v", data, err)
	}
	if _, err := r.All(t.Context()); err == nil || !strings.Contains(err.Error(), "another folder") {
		t.Errorf("a folder with answers is written again: %v", err)
	}
}

// until asks a question and ends the run when it has written its first line, which it returns.
func until(t *testing.T, name string) Line {
	t.Helper()
	r := run(t, name)
	r.Budget = time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			if lines, err := Read(r.Out, name); err == nil && len(lines) > 0 {
				cancel()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	if _, err := r.All(ctx); err != nil {
		t.Fatal(err)
	}
	lines, err := Read(r.Out, name)
	if err != nil || len(lines) != 2 || lines[1].Ended != "the run was ended" {
		t.Fatalf("%+v, %v", lines, err)
	}
	return lines[0]
}

// What a question has started ends with it, also where it has made itself a daemon.
func TestDaemonsEnd(t *testing.T) {
	if pid := until(t, "daemon").Return; pid <= 0 || unix.Kill(pid, 0) == nil {
		t.Errorf("the daemon %d runs on", pid)
	}
}

// What a question mounts goes with it, and so do its files.
func TestNothingStaysMounted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounting needs root")
	}
	dir := fmt.Sprint(until(t, "mounts").Value)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is there: %v", dir, err)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), dir) {
		t.Errorf("%s, %v", mounts, err)
	}
}

// A run whose time is over at any moment leaves whole files of what it had, and nothing that
// runs.
func TestCutAtAnyMoment(t *testing.T) {
	for i := range 8 {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			r := run(t, "yes", "many")
			r.Budget = time.Duration(i) * 50 * time.Millisecond
			out, err := r.All(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if n := len(out.Answered) + len(out.Open) + len(out.Passed); n != 2 {
				t.Errorf("of two questions there are %+v", out)
			}
			for _, name := range slices.Concat(out.Answered, out.Open) {
				whole(t, r.Out, name)
			}
			if left := childrenOf(os.Getpid()); len(left) > 0 {
				t.Errorf("left running: %v", left)
			}
		})
	}
}

// whole fails the test unless a file has nothing but whole lines, and an end.
func whole(t *testing.T, folder, name string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(folder, name+ending))
	if err != nil {
		t.Fatal(err)
	}
	for text := range strings.Lines(string(data)) {
		if !json.Valid([]byte(text)) || !strings.HasSuffix(text, "\n") {
			t.Errorf("%s has the line %q", name, text)
		}
	}
	lines, err := Read(folder, name)
	if err != nil || len(lines) == 0 {
		t.Fatalf("%s: %+v, %v", name, lines, err)
	}
	if last := lines[len(lines)-1]; last.Answer == nil && last.Ended == "" {
		t.Errorf("%s ends with %+v", name, last)
	}
}

// A question that changes what the card's owner has set is the last.
func TestSettingsAreHisOwn(t *testing.T) {
	r := run(t, "yes", "many")
	times := 0
	r.Settings = func(context.Context) (string, error) {
		times++
		return fmt.Sprintf("compute mode %d", min(times-1, 1)), nil
	}
	out, err := r.All(t.Context())
	if err == nil || !strings.Contains(err.Error(), "yes changed a setting") || len(out.Answered) != 1 {
		t.Errorf("%+v, %v", out, err)
	}
	r = run(t, "yes")
	unread := errors.New("no driver")
	r.Settings = func(context.Context) (string, error) { return "", unread }
	if _, err := r.All(t.Context()); !errors.Is(err, unread) {
		t.Errorf("settings that cannot be read: %v", err)
	}
}

func TestSame(t *testing.T) {
	for _, c := range []struct {
		within float64
		a, b   Answer
		want   bool
	}{
		{0, Tell(true, "a"), Tell(true, "b"), true},
		{0, Tell(true, "a"), Tell(false, "a"), false},
		{0, CouldNotTell("a"), CouldNotTell("a"), false},
		{0, Call("lazy", "a"), Call("lazy", "b"), true},
		{0, Call("lazy", ""), Call("eager", ""), false},
		{0, Count(1, "MiB", ""), Count(1, "MiB", ""), true},
		{0, Count(1, "MiB", ""), Count(1, "GiB", ""), false},
		{0.1, Count(100, "MiB", ""), Count(91, "MiB", ""), true},
		{0.1, Count(100, "MiB", ""), Count(89, "MiB", ""), false},
		{-1, Count(1, "MiB", ""), Count(1, "MiB", ""), false},
	} {
		if got := (&Question{Within: c.within}).Same(c.a, c.b); got != c.want {
			t.Errorf("within %v: %v and %v are the same: %v", c.within, c.a, c.b, got)
		}
	}
}
