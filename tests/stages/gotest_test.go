// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// module writes a Go module of one package and returns its directory.
func module(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module example.com/gpu-agent/sample\n\ngo 1.26\n"
	for name, text := range files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// runTests runs the module's tests as a stage of their own.
func runTests(t *testing.T, dir string) (outcome, string) {
	t.Helper()
	var out strings.Builder
	r := runner{screen: &screen{w: &out}, logs: t.TempDir(), env: []string{"GOFLAGS=", "GOWORK=off"}}
	o := r.stage(t.Context(), stage{name: "sample", commands: []command{test(dir, "./...")}}, nil)
	return o, out.String()
}

const mixed = `package sample

import "testing"

func TestGood(t *testing.T) { t.Run("sub", func(t *testing.T) {}) }
func TestBad(t *testing.T)  { t.Log("before"); t.Error("this is wrong") }
func TestNot(t *testing.T)  { t.Log("noise"); t.Skip("there is no GPU:", "buy one") }
func TestNorThis(t *testing.T) { t.Skip("there is no GPU: buy one") }
`

func TestResults(t *testing.T) {
	dir := module(t, map[string]string{
		"a_test.go":          mixed,
		"good/b_test.go":     "package good\n\nimport \"testing\"\n\nfunc TestFine(t *testing.T) {}\n",
		"panics/p_test.go":   "package panics\n\nimport \"testing\"\n\nfunc TestOops(t *testing.T) { panic(\"oh dear\") }\n",
		"broken/c_test.go":   "package broken\n\nfunc f() int { return \"no number\" }\n",
		"exits/e_test.go":    "package exits\n\nimport (\n\"os\"\n\"testing\"\n)\n\nfunc TestMain(m *testing.M) { m.Run(); os.Exit(3) }\n\nfunc TestFine(t *testing.T) {}\n",
		"without/plain.go":   "package without\n",
		"subskips/s_test.go": "package subskips\n\nimport \"testing\"\n\nfunc TestS(t *testing.T) { t.Run(\"x\", func(t *testing.T) { t.Skip(\"no x\") }) }\n",
	})
	o, screen := runTests(t, dir)
	// Passed: Good, Good/sub, two of the name Fine, S. Failed: Bad, Oops, and
	// the packages broken and exits, which have no failing test.
	if want := (counts{passed: 5, failed: 4, skipped: 3}); o.counts != want {
		t.Errorf("counted %v, want %v", o.counts, want)
	}
	if o.word() != "failed" || o.err == nil {
		t.Errorf("the stage %s, error %v; it should have failed", o.word(), o.err)
	}
	var failed []string
	for _, f := range o.failed {
		failed = append(failed, f.String())
	}
	slices.Sort(failed)
	if want := []string{"sample TestBad", "sample/broken", "sample/exits", "sample/panics TestOops"}; !slices.Equal(failed, want) {
		t.Errorf("failed: %q, want %q", failed, want)
	}
	if len(o.skips) != 2 || o.skips[0].text != "there is no GPU: buy one" || len(o.skips[0].tests) != 2 {
		t.Errorf("skips: %+v; want two tests without a GPU and one without x", o.skips)
	}
	for _, want := range []string{"this is wrong", "oh dear", "no number", "before"} {
		if !strings.Contains(screen, want) {
			t.Errorf("the screen lacks %q:\n%s", want, screen)
		}
	}
	if strings.Contains(screen, "noise") || strings.Contains(screen, "=== RUN") {
		t.Errorf("the screen has what nobody needs:\n%s", screen)
	}
}
