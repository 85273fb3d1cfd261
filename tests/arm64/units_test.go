// SPDX-License-Identifier: Apache-2.0

package arm64

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator/lib"
)

// What qemu-user 7.2 lacks.
const (
	noNamespaces = "qemu-user clones into no namespaces and no cgroups"
	noOpenat2    = "qemu-user has no openat2"
	noProgram    = "outside of a user namespace no kernel runs the arm64 nvidia-smi that it starts"
	noLink       = "qemu-user starts /proc/self/exe by the program's path, which is another user's"
	noWipe       = "qemu before version 8 does nothing at MADV_WIPEONFORK, so a forked child keeps what its parent knew"
)

// left are the tests that cannot run under qemu, by package, and why not. Those that trace
// processes (ptrace) skip themselves there.
var left = map[string]map[string]string{
	"internal/guard": {"TestLimiter": noOpenat2},
	"pkg/gpu/nvml":   {"TestReset": noProgram, "TestLongReset": noProgram, "TestAllAtOnce": noProgram, "TestResetThatLosesTheDriver": noProgram},
	"internal/node":  {"TestCgroupDir": noOpenat2, "TestEndByCgroup": noNamespaces, "TestSeesNode": noNamespaces},
	"pkg/memcap/lib": {"TestUsagePagesWithoutMounting": noLink, "TestAwkwardDriver/smshare": noWipe, "TestAwkwardDriver/newcomers": noWipe},
}

// nodes are packages whose tests make device nodes, which no user namespace may: they run
// outside of one.
var nodes = []string{"pkg/gpu/nvml"}

// short are the packages of the short form, and which of their tests: those that turn on
// pages, on words that C and Go share, and on what the processor is.
var short = map[string]string{
	"internal/atomicfile": ".",
	"internal/state":      ".",
	"pkg/gpu/nvml":        "^Test(Capabilities|EachProfileAtEachPlace|Health|LinksAreCountedAgain|Splits)$",
	"pkg/memcap/lib":      "^Test(Layout|PageBytes|Exports|NeedsLittle|AwkwardDriver|Counted|UsagePage.*|Meter.*|AReadingWakes|Storm|PairsLeaveTheSharedWordAlone|TableOfAllThreads)$",
}

func TestPackages(t *testing.T) {
	k := tools(t)
	k.needsBinfmt(t)
	which := short
	if *long {
		out, err := lib.Run(t.Context(), checkout, "go", "list", "-f", "{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}", "./pkg/...", "./internal/...", "./cmd/...")
		if err != nil {
			t.Fatal(err)
		}
		which = map[string]string{}
		for _, p := range strings.Fields(out) {
			_, below, _ := strings.Cut(p, "/gpu-agent/")
			which[below] = "."
		}
	}
	for p := range left {
		if *long && which[p] == "" {
			t.Errorf("%s is no package with tests, and has some that are left out", p)
		}
	}
	for _, p := range slices.Sorted(maps.Keys(which)) {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			k.test(t, p, which[p])
		})
	}
}

func (k kit) test(t *testing.T, below, which string) {
	program := filepath.Join(t.TempDir(), filepath.Base(below)+".test")
	k.build(t, program, "test", "-c", "./"+below)
	command := k.inside
	if slices.Contains(nodes, below) {
		command = k.plainly
	}
	run := func(t *testing.T, args ...string) (string, error) {
		t.Helper()
		cmd := command(t, large, program, append(args, "-test.v", "-test.timeout=40m")...)
		cmd.Dir = filepath.Join(checkout, below)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	var skip []string
	for name := range left[below] {
		skip = append(skip, just(name))
	}
	out, err := run(t, "-test.run="+which, "-test.skip="+strings.Join(skip, "|"))
	passed := strings.Count("\n"+out, "\n--- PASS: ")
	if err != nil || passed == 0 {
		t.Errorf("%d tests passed, %v\n%s", passed, err, failures(out))
	}
	t.Logf("%d tests passed; skipped: %q", passed, skipped.FindAllString(out, -1))
	for _, name := range slices.Sorted(maps.Keys(left[below])) {
		t.Run(name, func(t *testing.T) {
			if *long {
				if out, err := run(t, "-test.run="+just(name)); err == nil {
					t.Errorf("it is left out, because %s, and passes:\n%s", left[below][name], out)
				}
			}
			t.Skip(left[below][name])
		})
	}
}

// plainly returns the command that runs a test's program by qemu alone. Its name leads to
// qemu, too, so that it can start itself.
func (k kit) plainly(t *testing.T, page, program string, args ...string) *exec.Cmd {
	t.Helper()
	again := program + ".sh"
	if err := os.WriteFile(again, []byte("#!/bin/sh\nexec "+k.qemu+" "+program+` "$@"`+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), k.qemu, append([]string{"-0", again, program}, args...)...)
	cmd.Env = k.env(page)
	return cmd
}

var verdict = regexp.MustCompile(`(?m)^\s*--- (FAIL|PASS|SKIP)|^=== `)

// just matches one test, or a test's part.
func just(name string) string { return "^" + strings.ReplaceAll(name, "/", "$/^") + "$" }

// skipped finds the tests that say themselves that they cannot run.
var skipped = regexp.MustCompile(`--- SKIP: \S+`)

// failures are the parts of a test's output that lead to a failure.
func failures(out string) string {
	var some []string
	lines := strings.Split(out, "\n")
	for i, line := range lines {
		if strings.Contains(line, "--- FAIL") || strings.HasPrefix(line, "panic") || strings.HasPrefix(line, "fatal") {
			from := i
			for from > 0 && from > i-20 && !verdict.MatchString(lines[from-1]) {
				from--
			}
			some = append(some, lines[from:min(i+1, len(lines))]...)
		}
	}
	if len(some) == 0 {
		some = lines[max(0, len(lines)-30):]
	}
	return strings.Join(some, "\n")
}
