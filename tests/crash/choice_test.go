// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

const (
	checkout = "../.."
	// provedFile has the commit of the last run that tried everything and passed.
	provedFile = "proved"
	// parts is how many parts the points have of which -short tries one: that with the number part.
	parts, part = 3, 1
)

// choice says which points are tried, of those that there are without -short.
type choice struct {
	// all says that every one is.
	all bool
	// changed are the kinds of which every one is.
	changed map[kind]bool
	// why is for people.
	why string
}

// chosen is the choice of this run.
var chosen = sync.OnceValue(func() choice {
	if !testing.Short() {
		return choice{all: true, why: "every point is tried"}
	}
	commit, err := proved()
	var files []string
	if err == nil {
		files, err = changedFiles(checkout, commit)
	}
	return choose(commit, files, err)
})

// choose is the choice where these files differ from what they were at a commit, or where it
// is not known which do.
func choose(commit string, files []string, unknown error) choice {
	if unknown != nil {
		return choice{all: true, why: fmt.Sprintf("every point is tried, since it is not known what has changed: %v", unknown)}
	}
	c := choice{changed: map[kind]bool{}, why: fmt.Sprintf("a third of the points is tried: what makes the changes is as it was at %s", commit)}
	var why []string
	for _, k := range kinds {
		for _, f := range files {
			if !c.changed[k.kind] && isProduct(f) && slices.ContainsFunc(k.by, func(name string) bool { return f == name || strings.HasPrefix(f, name+"/") }) {
				c.changed[k.kind] = true
				why = append(why, fmt.Sprintf("%s (%s)", k.kind, f))
			}
		}
	}
	if len(why) > 0 {
		c.why = fmt.Sprintf("a third of the points is tried, and every one of those kinds of which a package differs from %s: %s", commit, strings.Join(why, ", "))
	}
	return c
}

// isProduct reports whether a file is more than tests or documentation.
func isProduct(file string) bool {
	return !strings.HasSuffix(file, "_test.go") && !strings.Contains(file, "/testdata/") && filepath.Base(file) != "doc.go"
}

// tries reports whether the k-th point of an operation is tried, which is of a kind.
func (c choice) tries(operation string, k int, of kind) bool {
	return c.all || c.changed[of] || inPart(operation, k)
}

// inPart reports whether -short tries the k-th point of an operation in any case. It is the
// same in every run, and on every machine.
func inPart(operation string, k int) bool {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\x00%d", operation, k)
	return h.Sum64()%parts == part
}

// of are the points of an operation that are tried, counted from 1, where there is one of each
// of these kinds in turn. There is one of each kind among them.
func (c choice) of(operation string, points []kind) (ks []int) {
	has := map[kind]bool{}
	for i, of := range points {
		if c.tries(operation, i+1, of) {
			ks, has[of] = append(ks, i+1), true
		}
	}
	for i, of := range points {
		if !has[of] {
			ks, has[of] = append(ks, i+1), true
		}
	}
	slices.Sort(ks)
	return ks
}

// tells has a test say which points are tried and why.
func (c choice) tells(t *testing.T) {
	t.Helper()
	t.Log(c.why)
}

var wholeHash = regexp.MustCompile(`^[0-9a-f]{40}$`)

// proved is the commit of the last run that tried everything and passed.
func proved() (string, error) {
	text, err := os.ReadFile(provedFile)
	if err != nil {
		return "", err
	}
	commit := strings.TrimSuffix(string(text), "\n")
	if !wholeHash.MatchString(commit) {
		return "", fmt.Errorf("%s says %q, which is not the whole hash of a commit", provedFile, commit)
	}
	return commit, nil
}

// changedFiles are those that differ between a commit and a checkout, by their paths from its
// top, those that git does not know yet included.
func changedFiles(root, commit string) (all []string, err error) {
	for _, args := range [][]string{
		{"diff", "--name-only", "--no-renames", "-z", commit, "--"},
		{"ls-files", "--others", "--exclude-standard", "-z"},
	} {
		out, err := git(root, args...)
		if err != nil {
			return nil, err
		}
		for name := range bytes.SplitSeq(out, []byte{0}) {
			if len(name) > 0 {
				all = append(all, string(name))
			}
		}
	}
	slices.Sort(all)
	return all, nil
}

func git(root string, args ...string) ([]byte, error) {
	out, err := exec.CommandContext(context.Background(), "git", append([]string{"-C", root}, args...)...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, fmt.Errorf("git %s: %w: %s", args[0], err, bytes.TrimSpace(exit.Stderr))
	}
	return out, err
}

// cleanHead is the commit that a checkout is of, with no change besides.
func cleanHead(root string) (string, error) {
	changed, err := git(root, "status", "--porcelain")
	if err != nil {
		return "", err
	}
	if len(changed) > 0 {
		return "", fmt.Errorf("there are %d changes beside the commit", bytes.Count(changed, []byte("\n")))
	}
	commit, err := git(root, "rev-parse", "HEAD")
	return strings.TrimSpace(string(commit)), err
}

// tried are the tests that have tried their points, by name.
var tried struct {
	sync.Mutex
	tests []string
}

// triesPoints is told by each test that has points once nothing is in their way.
func triesPoints(t *testing.T) {
	t.Helper()
	chosen().tells(t)
	tried.Lock()
	defer tried.Unlock()
	tried.tests = append(tried.tests, t.Name())
}

// withPoints are the tests that have points.
var withPoints = []string{"TestClaimsKilledAtEachChange", "TestHardwareChangeCutAtEachCall", "TestKilledAtEachChange", "TestLifeOfANode", "TestStateCutAtEachByte"}

// runAndRenew runs all tests, and has the commit proved if they pass. It returns the exit
// status.
func runAndRenew(run func() int, partial error) (status int) {
	commit, err := cleanHead(checkout)
	if err = errors.Join(partial, err); err == nil {
		status = run()
		if status != 0 {
			return status
		}
		err = renewed(commit)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s stays as it is: %v\n", provedFile, err)
		return 1
	}
	return status
}

func renewed(commit string) error {
	now, err := cleanHead(checkout)
	if err != nil {
		return err
	}
	if now != commit {
		return fmt.Errorf("the commit was %s, and is %s", commit, now)
	}
	tried.Lock()
	defer tried.Unlock()
	for _, name := range withPoints {
		if !slices.Contains(tried.tests, name) {
			return fmt.Errorf("%s has tried nothing", name)
		}
	}
	return os.WriteFile(provedFile, []byte(commit+"\n"), 0o644)
}

// The part is the same in every run: another one would leave out what this one has always
// tried.
func TestTheThirdIsFixed(t *testing.T) {
	points := slices.Repeat([]kind{journalKind}, 30)
	for _, test := range []struct {
		operation string
		want      []int
	}{
		{"allocate and start a pod", []int{7, 11, 16, 18, 21, 22, 24, 28}},
		{"start with holders", []int{1, 2, 7, 13, 15, 16, 19, 20, 23, 25}},
	} {
		if got := (choice{}).of(test.operation, points); !slices.Equal(got, test.want) {
			t.Errorf("of 30 points of %q are tried %v, want %v", test.operation, got, test.want)
		}
	}
	sum := 0
	for _, make := range operations() {
		sum += len((choice{}).of(make().name, points))
	}
	if all := len(operations()) * len(points); sum < all/4 || sum > all*5/12 {
		t.Errorf("%d of %d points are tried, which is not a third", sum, all)
	}
}

// Each kind is tried, however few points of it there are.
func TestEachKindIsInTheThird(t *testing.T) {
	// So many points of each: one, two, three, and then some.
	points := func(of ...kind) (out []kind) {
		for i, k := range of {
			out = append(out, slices.Repeat([]kind{k}, min(i+1, 12))...)
		}
		return out
	}
	has := map[string]map[kind]int{}
	count := func(test string, of kind) {
		if has[test] == nil {
			has[test] = map[kind]int{}
		}
		has[test][of]++
	}
	files := []kind{hookKind, librariesKind, documentKind, usageKind, journalKind, pagesKind, cdiKind}
	want := map[string][]kind{
		"claims": append([]kind{slicesKind, claimsKind}, files...), "a Node's life": {nodesKind, gpuNodesKind},
		"hardware": {hardwareKind, readingKind}, "cuts": files[:len(files)-1],
	}
	for _, make := range operations() {
		op := make()
		want[op.name] = files
		of := points(files...)
		for _, k := range (choice{}).of(op.name, of) {
			count(op.name, of[k-1])
		}
	}
	for _, make := range slices.Concat(claimOperations(), claimStarts()) {
		op := make()
		of := points(want["claims"]...)
		for _, name := range []string{op.name, killedKubelet + op.name} {
			for _, k := range (choice{}).sample(1, name, of) {
				count("claims", of[k-1])
			}
		}
	}
	for _, make := range lifeSteps() {
		of := points(want["a Node's life"]...)
		for op := make(); ; op = op.back() {
			for _, k := range (choice{}).sample(1, op.name, of) {
				count("a Node's life", of[k-1])
			}
			if op.back == nil {
				break
			}
		}
	}
	for i := range migChanges {
		calls := map[string]int{changingCalls[0]: 4, anyCall: 9}
		for _, points := range migChanges[i].points(choice{}, [2]map[string]int{calls, calls}, [2][]change{}, rand.New(rand.NewPCG(1, 1))) {
			for _, p := range points {
				count("hardware", map[bool]kind{false: hardwareKind, true: readingKind}[p.call == anyCall])
			}
		}
	}
	for _, c := range (choice{}).cuts(map[string]int{"hooks/1/nvidia-cdi-hook": 8 << 20, "cap/1/libcuda.so.1": 3 << 20, "state.json": 2000, "usage/0000000001.jsonl": 900,
		"allocations.journal": 300, "cap/limits/1f/GPU-1": 4096}) {
		count("cuts", kindOf(change{"cut", "/state/" + c.name}))
	}
	for test, kinds := range want {
		for _, k := range kinds {
			if has[test][k] == 0 {
				t.Errorf("%s: nothing is tried of the kind %q", test, k)
			}
		}
	}
}

// A changed package brings every point of its kinds, and the part of the others.
func TestAChangedPackageBringsItsKinds(t *testing.T) {
	var points []kind
	for range 20 {
		for _, k := range kinds {
			points = append(points, k.kind)
		}
	}
	const operation = "allocate and start a pod"
	third := (choice{}).of(operation, points)
	for file, want := range map[string][]kind{
		"internal/usage/segments/segments.go":   {usageKind},
		"internal/usage/a_file_that_was_new.go": {usageKind},
		"internal/state/journal.go":             {journalKind, documentKind},
		"pkg/cdi/dir/dir.go":                    {cdiKind},
		"pkg/memcap/lib/c/loan.h":               {pagesKind, librariesKind},
		"internal/dra/slices.go":                {slicesKind, claimsKind},
		"internal/agent/work.go":                {hardwareKind, readingKind},
		"internal/atomicfile/atomicfile.go":     {cdiKind, journalKind, hookKind, pagesKind, documentKind},
		// These write nothing themselves, or are no part of the product.
		"internal/agent/status.go":             nil,
		"internal/agent/work_test.go":          nil,
		"pkg/memcap/lib/testdata/a.go":         nil,
		"pkg/memcap/lib/doc.go":                nil,
		"internal/statement/a.go":              nil,
		"docs/usage.md":                        nil,
		"tests/crash/choice_test.go":           nil,
		"tests/mutants/internal/dra/slices.go": nil,
	} {
		c := choose("some commit", []string{"README.md", file}, nil)
		if got := slices.Sorted(maps.Keys(c.changed)); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Errorf("%s brings %q, want %q", file, got, want)
		}
		var expect []int
		for i, of := range points {
			if slices.Contains(want, of) || slices.Contains(third, i+1) {
				expect = append(expect, i+1)
			}
		}
		if got := c.of(operation, points); !slices.Equal(got, expect) {
			t.Errorf("with %s are tried %v, want %v", file, got, expect)
		}
		if len(want) > 0 && !strings.Contains(c.why, file) {
			t.Errorf("%s is not named: %s", file, c.why)
		}
	}
}

// Where it is not known what has changed, everything counts as changed.
func TestAnUnknownCommitBringsAll(t *testing.T) {
	points := slices.Repeat([]kind{journalKind, cdiKind}, 9)
	for _, commit := range []string{strings.Repeat("0", 40), "no commit"} {
		files, err := changedFiles(checkout, commit)
		c := choose(commit, files, err)
		if err == nil || !c.all || len(c.of("start with holders", points)) != len(points) || !strings.Contains(c.why, err.Error()) {
			t.Errorf("commit %s: %v, %+v", commit, err, c)
		}
	}
	if c := choose("", nil, exec.ErrNotFound); !c.all || len(c.of("start with holders", points)) != len(points) {
		t.Errorf("without git: %+v", c)
	}
	if _, err := proved(); err != nil {
		t.Error(err)
	}
}

// What has changed is what differs from the commit, committed or not, and what is new.
func TestChangedFiles(t *testing.T) {
	root := t.TempDir()
	run := func(args ...string) string {
		t.Helper()
		out, err := git(root, append([]string{"-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	write := func(name string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("skipped: this needs git")
	}
	run("init", "-q")
	write("stays")
	write("goes")
	write("moves")
	run("add", ".")
	run("commit", "-q", "-m", "one")
	commit := run("rev-parse", "HEAD")
	if is, err := cleanHead(root); err != nil || is != commit {
		t.Errorf("the commit is %s, %v, want %s", is, err, commit)
	}
	write("committed")
	run("add", ".")
	run("mv", "moves", "moved")
	run("commit", "-q", "-m", "two")
	if err := os.Remove(filepath.Join(root, "goes")); err != nil {
		t.Fatal(err)
	}
	write("new")
	got, err := changedFiles(root, commit)
	if want := []string{"committed", "goes", "moved", "moves", "new"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("changed are %q, %v, want %q", got, err, want)
	}
	if _, err := cleanHead(root); err == nil {
		t.Error("a checkout with changes is clean")
	}
}
