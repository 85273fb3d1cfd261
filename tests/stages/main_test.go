// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// runAll runs stages as main does.
func runAll(ctx context.Context, t *testing.T, list []stage) (done []outcome, screenText string) {
	t.Helper()
	var out strings.Builder
	r := runner{screen: &screen{w: &out}, logs: t.TempDir()}
	done = r.lanes(ctx, list)
	return done, out.String()
}

func TestReport(t *testing.T) {
	done, _ := runAll(t.Context(), t, []stage{
		{name: "good", commands: []command{run("true")}},
		{name: "bad", commands: []command{run("true"), run("false")}},
		{name: "bad beside", lane: beside, commands: []command{run("false")}},
		{name: "quiet", lane: beside, commands: []command{{args: []string{"echo", "a.go"}, quiet: true}}},
		{name: "later", after: []string{"good", "bad"}, lane: beside, commands: []command{run("true")}},
		{name: "later too", after: []string{"bad beside"}, commands: []command{run("true")}},
		{name: "nowhere", lacks: func() string { return "no such machine" }},
	})
	for i := range done {
		done[i].cpu = 0 // of `true` it may be a tenth of a second
	}
	var out strings.Builder
	if report(&out, done, 90*time.Second, machine{busy: 150 * time.Second, spent: 180 * time.Second}) {
		t.Error("all is well, says the report")
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if got := lines[len(lines)-1]; got != "0 passed, 3 failed, 3 skipped" {
		t.Errorf("last line %q", got)
	}
	for _, want := range []string{
		"all                90.0        0.0        0.0\n",
		"busy for 150 s of 180",
		"stage later: it builds upon the stage \"bad\": failed",
		"stage later too: it builds upon the stage \"bad beside\": failed",
		"stage nowhere: no such machine",
		"bad: false: exit status 1",
		"quiet: echo a.go lists:",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, out.String())
		}
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	done, _ := runAll(ctx, t, []stage{{name: "any", commands: []command{run("false")}}, {name: "other", lane: beside, commands: []command{run("false")}}})
	for _, o := range done {
		if o.skipped != "interrupted" || o.err != nil {
			t.Errorf("after an interruption a stage ran: %+v", o)
		}
	}
}

// Stages of two lanes run at the same time, and what each prints stands together.
func TestLanes(t *testing.T) {
	inside, told := make(chan struct{}), make(chan struct{})
	says := func(w io.Writer, text string) { fmt.Fprintln(w, text) }
	done, screenText := runAll(t.Context(), t, []stage{
		{name: "node", commands: []command{{call: func(w io.Writer) error {
			says(w, "node up")
			close(inside)
			<-told
			says(w, "node down")
			return nil
		}}}},
		{name: "first", lane: beside, commands: []command{{call: func(w io.Writer) error {
			<-inside
			says(w, "first says")
			return nil
		}}}},
		{name: "second", lane: beside, commands: []command{{call: func(w io.Writer) error {
			says(w, "second says")
			close(told)
			return os.ErrInvalid
		}}}},
		{name: "last", after: []string{"node"}, lane: beside, commands: []command{{call: func(w io.Writer) error {
			says(w, "last says")
			return nil
		}}}},
	})
	var words []string
	for _, o := range done {
		words = append(words, o.stage.name+" "+o.word())
	}
	if want := []string{"node passed", "first passed", "second failed", "last passed"}; !slices.Equal(words, want) {
		t.Errorf("got %q, want %q", words, want)
	}
	for _, block := range []string{"node up\nnode down", "first says", "second says\nFAILED: invalid argument", "last says"} {
		name, _, _ := strings.Cut(block, " ")
		want := fmt.Sprintf("\n=== %s: \n%s\n--- %s ", name, block, name)
		if !strings.Contains(notice.ReplaceAllString(screenText, ""), want) {
			t.Errorf("what %s printed does not stand together:\n%s", name, screenText)
		}
	}
}

// The second lane waits for what it comes behind, and runs also where that failed.
func TestBehind(t *testing.T) {
	over := false
	done, _ := runAll(t.Context(), t, []stage{
		{name: "looks at all", commands: []command{{call: func(io.Writer) error {
			over = true
			return os.ErrInvalid
		}}}},
		{name: "second node", behind: []string{"looks at all"}, lane: second, commands: []command{{call: func(io.Writer) error {
			if !over {
				return os.ErrExist
			}
			return nil
		}}}},
	})
	if done[0].word() != "failed" || done[1].word() != "passed" {
		t.Errorf("%s, %s", done[0].word(), done[1].word())
	}
}

// The second node's tests are those of some files, and no others.
func TestTestsInFiles(t *testing.T) {
	t.Chdir("../..")
	files, err := goFiles()
	if err != nil {
		t.Fatal(err)
	}
	got, err := testsIn(files, "tests/e2e/", "dra", "dynamic")
	if err != nil {
		t.Fatal(err)
	}
	pattern := regexp.MustCompile(got)
	for name, want := range map[string]bool{"TestDynamic": true, "TestResourceClaims": true, "TestCaps": false, "TestDynamicMore": false} {
		if pattern.MatchString(name) != want {
			t.Errorf("%s: %s", got, name)
		}
	}
	if _, err := testsIn(files, "tests/e2e/", "nothing"); err == nil {
		t.Error("a file that is not there passes")
	}
}

var notice = regexp.MustCompile("(?m)^!!! .*\n")

// What the one that began first prints is seen before it has ended.
func TestScreenShowsTheFirst(t *testing.T) {
	var out strings.Builder
	s := &screen{w: &out}
	a, b, c := s.begin(), s.begin(), s.begin()
	fmt.Fprint(a, "a1,")
	fmt.Fprint(b, "b1,")
	fmt.Fprint(c, "c1,")
	if out.String() != "a1," {
		t.Errorf("seen: %q", out.String())
	}
	c.failed("c", "c.log")
	b.failed("b", "b.log")
	if !strings.HasPrefix(out.String(), "a1,\n!!! ") || strings.Count(out.String(), "\n") != 3 {
		t.Errorf("seen: %q", out.String())
	}
	out.Reset()
	c.end()
	a.end()
	fmt.Fprint(b, "b2,")
	if out.String() != "b1,b2," {
		t.Errorf("seen: %q", out.String())
	}
	b.failed("b", "b.log") // its own output says so
	b.end()
	d := s.begin()
	fmt.Fprint(d, "d1")
	d.end()
	if out.String() != "b1,b2,c1,d1" {
		t.Errorf("seen: %q", out.String())
	}
}

// A stage beside the others is nicer than they are, with all that it starts.
func TestNice(t *testing.T) {
	own, err := niceness()
	if err != nil {
		t.Fatal(err)
	}
	if own == 19 {
		t.Skip("needs a process that is not as nice already as one can be")
	}
	for _, s := range []stage{{name: "plain"}, {name: "beside", lane: beside}} {
		want := own
		if s.lane == beside {
			want = min(own+nicer, 19)
		}
		// The shell may begin before it is made nice.
		const script = `while [ "$(sed 's/.*) //' /proc/self/stat | cut -d' ' -f17)" != "$1" ]; do sleep 0.01; done`
		s.commands = []command{run("sh", "-c", script, "sh", fmt.Sprint(want))}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		done, _ := runAll(ctx, t, []stage{s})
		cancel()
		if done[0].err != nil {
			t.Errorf("the stage %q does not come to have the niceness %d: %v", s.name, want, done[0].err)
		}
	}
}

// Every stage is reached: what it builds upon stands before it.
func TestOrder(t *testing.T) {
	t.Chdir("../..")
	files, err := goFiles()
	if err != nil {
		t.Fatal(err)
	}
	list, err := stages("cache", nil, files, long)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, s := range list {
		for _, a := range slices.Concat(s.after, s.behind) {
			if !seen[a] {
				t.Errorf("stage %q comes before %q, which it builds upon", s.name, a)
			}
		}
		if seen[s.name] || s.what == "" {
			t.Errorf("stage %q is there twice or says nothing of itself", s.name)
		}
		seen[s.name] = true
	}
}

func TestFuzzing(t *testing.T) {
	t.Chdir(t.TempDir())
	for file, text := range map[string]string{
		"a/x.go":       "package a\n\nfunc FuzzNot(f *testing.F) {}\n",
		"a/x_test.go":  "package a\n\nfunc FuzzOne(f *testing.F) {}\n\nfunc FuzzTwo(f *testing.F) {}\n\n// func FuzzNone(\n",
		".b/x_test.go": "package b\n\nfunc FuzzHidden(f *testing.F) {}\n",
		"c/x_test.go":  "package c\n\nfunc TestFuzz(t *testing.T) {}\n",
	} {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	files, err := goFiles()
	if want := []string{"a/x.go", "a/x_test.go", "c/x_test.go"}; err != nil || !slices.Equal(files, want) {
		t.Fatalf("found %q, %v; want %q", files, err, want)
	}
	commands, err := fuzzing(files)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range commands {
		got = append(got, c.args[3]+" "+c.in)
	}
	if want := []string{"-fuzz=^FuzzOne$ a", "-fuzz=^FuzzTwo$ a"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// All lanes together watch more than Linux gives a user by default.
func TestRoomToWatch(t *testing.T) {
	file := filepath.Join(t.TempDir(), "max_user_instances")
	for _, c := range []struct{ was, becomes, says string }{
		{"128\n", "1024\n", "from 128 to 1024"},
		{"8192\n", "8192\n", "8192, which is enough"},
		{"many\n", "many\n", "cannot raise"},
	} {
		if err := os.WriteFile(file, []byte(c.was), 0o644); err != nil {
			t.Fatal(err)
		}
		said := roomToWatch(file)
		if now, err := os.ReadFile(file); err != nil || string(now) != c.becomes || !strings.Contains(said, c.says) {
			t.Errorf("%q became %q (%v), and it says %q; want %q, and %q", c.was, now, err, said, c.becomes, c.says)
		}
	}
	if said := roomToWatch(filepath.Join(file, "none")); !strings.Contains(said, "too many open files") {
		t.Errorf("without such a file it says %q", said)
	}
}

// A lane that is done with its own stages takes what another has not begun: here two of
// one lane end only together.
func TestLanesHelpEachOther(t *testing.T) {
	one, two := make(chan struct{}), make(chan struct{})
	meets := func(mine, other chan struct{}) []command {
		return []command{{call: func(io.Writer) error {
			close(mine)
			select {
			case <-other:
				return nil
			case <-t.Context().Done():
				return t.Context().Err()
			}
		}}}
	}
	done, _ := runAll(t.Context(), t, []stage{
		{name: "one", lane: beside, commands: meets(one, two)},
		{name: "two", lane: beside, commands: meets(two, one)},
		{name: "last", after: []string{"two"}, lane: beside, commands: []command{run("true")}},
	})
	for _, o := range done {
		if o.word() != "passed" {
			t.Errorf("%s %s: %v", o.stage.name, o.word(), o.err)
		}
	}
}

// The race detector is for packages that start goroutines or have locks.
func TestConcurrentPackages(t *testing.T) {
	t.Chdir("../..")
	list, err := unitPackages()
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{"internal/agent": true, "internal/ledger": true, "pkg/plugin": true, "pkg/gpu/nvml": true, "internal/placer": false, "internal/plan": false} {
		i := slices.IndexFunc(list, func(p goPackage) bool { return p.path == "example.com/gpu-agent/"+path })
		if i < 0 || list[i].concurrent != want {
			t.Errorf("%s: concurrent is not %v in %v", path, want, list)
		}
	}
	if slices.ContainsFunc(list, func(p goPackage) bool { return strings.Contains(p.path, "/tests/e2e") }) {
		t.Error("tests/e2e has a stage of its own")
	}
}

// A sweep that had another name would run nowhere in `make test`, and one in another package
// not there.
func TestSweepsAreThere(t *testing.T) {
	t.Chdir("../..")
	files, err := goFiles()
	if err != nil {
		t.Fatal(err)
	}
	sweep, in := regexp.MustCompile(sweepTests), map[string]string{}
	for _, f := range files {
		if !strings.HasSuffix(f, "_test.go") {
			continue
		}
		src, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range oneTest.FindAllSubmatch(src, -1) {
			if name := string(m[1]); sweep.MatchString(name) {
				in[name] = filepath.Dir(f)
			}
		}
	}
	for _, name := range strings.Split(strings.Trim(sweepTests, "^()$"), "|") {
		if in[name] != "internal/agent" {
			t.Errorf("%s is in %q, not in internal/agent", name, in[name])
		}
	}
}

// Of two runs on one cache the second waits; one that a stage of the first starts does not.
func TestOneRunAtATime(t *testing.T) {
	cache := t.TempDir()
	unlock, err := lockCache(cache, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	waits, in := io.Pipe()
	second := make(chan error)
	go func() {
		unlock, err := lockCache(cache, in)
		if err == nil {
			unlock()
		}
		second <- err
	}()
	if line := make([]byte, 200); true {
		if n, err := waits.Read(line); err != nil || !strings.Contains(string(line[:n]), "another run uses "+cache) {
			t.Errorf("the second says %q, %v", line[:n], err)
		}
	}
	unlock()
	if err := <-second; err != nil {
		t.Error(err)
	}
	unlock, err = lockCache(cache, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	t.Setenv(heldVariable, cache)
	if _, err := lockCache(cache, io.Discard); err != nil {
		t.Errorf("a stage's own run: %v", err)
	}
}
