// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The first draw has 60 defects and the second 20, and of each class that matters most at
// least eight are in the first.
func TestDraws(t *testing.T) {
	list, err := readDefects("defects")
	if err != nil {
		t.Fatal(err)
	}
	draws, ofClass := map[string]int{}, map[string]int{}
	taken := map[string]string{}
	for _, d := range list {
		draws[d.draw]++
		if d.draw == "first" {
			ofClass[d.class]++
		}
		// One commit may have mended two defects; a class takes it once.
		key := d.class + " " + d.commit
		if taken[key] != "" {
			t.Errorf("%s and %s are of the same commit", d.name, taken[key])
		}
		taken[key] = d.name
		files, err := d.files()
		if err != nil {
			t.Error(err)
		}
		for _, f := range files {
			if !productFile.MatchString(f) || noProduct.MatchString(f) {
				t.Errorf("%s changes %s, which is not the product's", d.name, f)
			}
		}
	}
	if draws["first"] != 60 || draws["second"] != 20 || len(list) != 80 {
		t.Errorf("%d defects: %v; want 60 of the first draw and 20 of the second", len(list), draws)
	}
	for _, c := range classes[:6] {
		if ofClass[c.name] < 8 {
			t.Errorf("%d defects of the class %s, want at least 8", ofClass[c.name], c.name)
		}
	}
}

func TestHeads(t *testing.T) {
	const good = "Draw: first\nClass: caps\nPlace: 7\nCommit: 4f82791\nKind: reverse\nGrave: no\nDefect: It is wrong.\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n"
	file := filepath.Join(t.TempDir(), "1-caps-01.patch")
	for name, c := range map[string]struct{ from, to, err string }{
		"good":        {"", "", ""},
		"a class":     {"caps", "cups", `no class "cups"`},
		"a kind":      {"reverse", "odd", `"odd" is none of`},
		"a line":      {"Place: 7", "Palce: 7", "Palce"},
		"what lacks":  {"Commit: 4f82791\n", "", "lacks Commit"},
		"no patch":    {"diff --git", "dif", "git diff"},
		"another set": {"Grave: no", "Grave: no\nFound by: make test-all", ""},
	} {
		if err := os.WriteFile(file, []byte(strings.Replace(good, c.from, c.to, 1)), 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := readDefect(file)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, want %q", name, err, c.err)
		}
		if err == nil && (d.name != "1-caps-01" || d.commit != "4f82791") {
			t.Errorf("%s: %+v", name, d)
		}
	}
}

// The same seed gives the same order, another seed another one; large commits and those that
// say of themselves that they mend nothing are no candidates.
func TestCandidates(t *testing.T) {
	const log = "@aaaa\tpkg/mig: one\n\n10\t2\tpkg/mig/plan.go\n1\t1\tpkg/mig/plan_test.go\n" +
		"@bbbb\tinternal/agent: two\n\n300\t200\tinternal/agent/loop.go\n" +
		"@cccc\tdocs: three\n\n1\t1\tpkg/mig/plan.go\n" +
		"@dddd\tpkg/cdi: four\n\n5\t0\tpkg/cdi/spec.go\n" +
		"@eeee\ttests/lab: five\n\n5\t0\tpkg/cdi/spec.go\n" +
		"@ffff\tpkg/cdi: six\n\n5\t0\tpkg/cdi/doc.go\n" +
		"@9999\tdeployments: seven\n\n5\t0\tdeployments/base/rbac.yaml\n"
	order := func(seed string) (names []string) {
		list, err := candidates([]byte(log), seed)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range list {
			names = append(names, c.commit)
		}
		return names
	}
	one := order("first")
	if again := order("first"); !slices.Equal(one, again) {
		t.Errorf("%q, then %q", one, again)
	}
	differs := false
	for _, seed := range []string{"second", "third", "fourth", "fifth"} {
		differs = differs || !slices.Equal(one, order(seed))
	}
	slices.Sort(one)
	if want := []string{"9999", "aaaa", "dddd"}; !slices.Equal(one, want) || !differs {
		t.Errorf("candidates %q, want %q; other seeds give other orders: %v", one, want, differs)
	}
	if _, err := candidates([]byte("@aaaa\tx\n-\t-\tpkg/mig/a.go\n"), "first"); err == nil {
		t.Error("a binary file passes")
	}
}

func TestFailedTests(t *testing.T) {
	const out = "--- FAIL: TestA (0.1s)\n    --- FAIL: TestA/sub (0.0s)\nFAILED pkg/mig TestB/x\nFAILED pkg/mig   1.0 s  2 passed\nFAILED: 1 failures\n"
	var got []string
	for _, m := range failedTest.FindAllStringSubmatch(out, -1) {
		got = append(got, m[1]+m[2])
	}
	if want := []string{"TestA", "TestA/sub", "pkg/mig TestB/x"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
