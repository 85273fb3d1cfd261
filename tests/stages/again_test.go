// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// stumbles says what `go test -json` would say of tests that fail beside others, some of
// which pass when they are run alone.
const stumbles = `
say() { echo "{\"Action\":\"$1\",\"Package\":\"sample\",\"Test\":\"$2\"}"; }
failed() { echo "{\"Action\":\"output\",\"Package\":\"sample\",\"Test\":\"$1\",\"Output\":\"it stumbles\\n\"}"; say fail "$1"; }
end() { echo "{\"Action\":\"$1\",\"Package\":\"sample\"}"; [ "$1" = pass ]; exit; }
case "$*" in
*-skip=*-run=*) exit 2 ;;
*-run=^TestBad*) failed TestBad; end fail ;;
*-run=^*) name="${*#*-run=^}"; say pass "${name%%$*}"; end pass ;;
esac
say pass TestFine
case "$1" in
one) failed TestOne/sub; failed TestOne ;;
two) failed TestOne; failed TestTwo ;;
bad) failed TestOne; failed TestBad ;;
exit) end fail ;;
esac
end fail
`

// A test of a real node that fails and then passes alone is flaky: the run passes, says so,
// and keeps both outputs. Two such tests are a failure, as is a test that fails again, and
// what fails in a stage of our own making.
func TestAgain(t *testing.T) {
	for _, c := range []struct {
		name, stumble string
		again         bool
		passes        bool
		word, last    string
		says          string
	}{
		{"one that passes alone", "one", true, true, "flaky", "3 passed, 0 failed, 0 skipped", "\n1 flaky: "},
		{"two that pass alone", "two", true, false, "flaky", "1 passed, 2 failed, 0 skipped", "\n2 flaky: "},
		{"one that fails again", "bad", true, false, "failed", "2 passed, 1 failed, 0 skipped", "sample TestBad"},
		{"where rare is the bug", "one", false, false, "failed", "1 passed, 2 failed, 0 skipped", "sample TestOne"},
		{"what is no test", "exit", true, false, "failed", "1 passed, 1 failed, 0 skipped", "node: sample"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			logs := t.TempDir()
			r := runner{screen: &screen{w: &out}, logs: logs}
			done := r.lanes(t.Context(), []stage{{name: "node", again: c.again, commands: []command{
				{test: true, args: []string{"sh", "-c", stumbles, "go test", c.stumble, "-skip=TestNone", "./sample"}},
			}}})
			r.again(t.Context(), done)
			passed := report(&out, done, time.Second, machine{})
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			last := lines[len(lines)-1]
			if passed != c.passes || done[0].word() != c.word || last != c.last || !strings.Contains(out.String(), c.says) {
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
