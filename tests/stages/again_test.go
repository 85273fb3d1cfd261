// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// stumbles fails in its first run, with as many tests as it is told, and passes in its second.
// It takes the flags of go test too, as far as they stand before the package.
const stumbles = `package sample

import (
	"os"
	"strings"
	"testing"
)

func first(t *testing.T) {
	if _, err := os.Stat(t.Name()); err == nil {
		return
	}
	if err := os.WriteFile(t.Name(), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Run("sub", func(t *testing.T) { t.Error("it stumbles") })
}

func TestOne(t *testing.T) { first(t) }
func TestTwo(t *testing.T) { if os.Getenv("STUMBLE") == "2" { first(t) } }
func TestFine(t *testing.T) {}
func TestBad(t *testing.T) { if os.Getenv("STUMBLE") == "bad" { t.Error("always") } }
func TestMain(m *testing.M) {
	for i, arg := range os.Args {
		if strings.HasPrefix(arg, "-run=") || strings.HasPrefix(arg, "-skip=") {
			os.Args[i] = "-test." + arg[1:]
		}
	}
	m.Run()
	if os.Getenv("STUMBLE") == "exit" {
		os.Exit(3)
	}
}
`

// A test of a real node that fails and then passes alone is flaky: the run passes, says so,
// and keeps both outputs. Two such tests are a failure, as is a test that fails again, and
// what fails in a stage of our own making.
func TestAgain(t *testing.T) {
	env := []string{"GOFLAGS=", "GOWORK=off"}
	// The first runs by go test. The others run the same tests, linked once.
	linked := filepath.Join(t.TempDir(), "sample.test")
	build := exec.Command("go", "test", "-vet=off", "-c", "-o", linked, ".")
	build.Dir, build.Env = module(t, map[string]string{"a_test.go": stumbles}), append(os.Environ(), env...)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	tool, err := exec.Command("go", "tool", "-n", "test2json").Output()
	if err != nil {
		t.Fatal(err)
	}
	events := strings.TrimSpace(string(tool))
	for i, c := range []struct {
		name, stumble string
		again         bool
		passes        bool
		word, last    string
		says          string
	}{
		{"one that passes alone", "", true, true, "flaky", "5 passed, 0 failed, 0 skipped", "\n1 flaky: "},
		{"two that pass alone", "2", true, false, "flaky", "", "\n2 flaky: "},
		{"one that fails again", "bad", true, false, "failed", "", "sample TestBad"},
		{"where rare is the bug", "", false, false, "failed", "", "sample TestOne"},
		{"what is no test", "exit", true, false, "failed", "", "sample TestOne"},
	} {
		t.Run(c.name, func(t *testing.T) {
			which := []string{"-skip=TestNone", ".", "-count=1"}
			sample := test(build.Dir, which...)
			if i > 0 {
				sample = command{in: t.TempDir(), test: true, args: append([]string{events, "-t", "-p", "example.com/gpu-agent/sample", linked, "-test.v=test2json"}, which...)}
			}
			var out strings.Builder
			logs := t.TempDir()
			r := runner{screen: &screen{w: &out}, logs: logs, env: append(slices.Clip(env), "STUMBLE="+c.stumble)}
			done := r.lanes(t.Context(), []stage{{name: "node", again: c.again, commands: []command{sample}}})
			r.again(t.Context(), done)
			passed := report(&out, done, time.Second, machine{})
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			last := lines[len(lines)-1]
			if passed != c.passes || done[0].word() != c.word || c.last != "" && last != c.last || !strings.Contains(out.String(), c.says) {
				t.Errorf("passed %v, the stage %s, last line %q; want %v, %s, %q, and the words %q:\n%s", passed, done[0].word(), last, c.passes, c.word, c.last, c.says, out.String())
			}
			if c.word != "flaky" {
				return
			}
			for log, want := range map[string]string{"node.log": "it stumbles", "node-again-1.log": "TestOne"} {
				if text, err := os.ReadFile(filepath.Join(logs, log)); err != nil || !strings.Contains(string(text), want) {
					t.Errorf("%s, which is to have %q: %v\n%s", log, want, err, text)
				}
			}
		})
	}
}

// More failures than may be flaky are not run again.
func TestManyFailuresAreNoFlakes(t *testing.T) {
	done := []outcome{{stage: stage{name: "node", again: true}, err: os.ErrInvalid, failed: []failure{{test: "TestA"}, {test: "TestB/x"}, {test: "TestB"}, {test: "TestC"}}}}
	r := runner{screen: &screen{w: new(strings.Builder)}, logs: t.TempDir()}
	r.again(t.Context(), done)
	if done[0].err == nil || len(done[0].flakes) > 0 {
		t.Errorf("three failures: %+v", done[0])
	}
}

func TestOnlyTest(t *testing.T) {
	c := onlyTest(test(".", "-count=1", "./tests/e2e", "-built", "-run=^TestA$", "-skip=TestB", "-node=pieces"), "TestC")
	if got, want := strings.Join(c.args, " "), "go test -json -vet=off -count=1 -run=^TestC$ ./tests/e2e -built -node=pieces"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
