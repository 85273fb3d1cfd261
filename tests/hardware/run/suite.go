// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/tests/hardware"
	"example.com/gpu-agent/tests/hardware/ask"
)

// suiteDir is the folder of the kit that has the suite of tests/hardware, as a program, with what
// it needs beside.
const suiteDir = "suite"

// notEmulatedTests need programs that keep a card busy, and on the emulator none does.
const notEmulatedTests = "^TestHardware$/^Utilization$"

// conformance is what the agent relies on of NVML, by the suite.
func (k *kit) conformance() ask.Question {
	return ask.Question{
		Name: "nvml", Asks: "Does NVML answer as the agent relies on?", Limit: 2 * time.Minute, Least: 10 * time.Second,
		Code: []string{"pkg/gpu/nvml", "tests/emulator"},
		Ask: func(ctx context.Context, room *ask.Room) ask.Answer {
			return k.suite(ctx, room, "^TestHardware$")
		},
	}
}

// caps are programs that are held to a cap before this driver, by the suite.
func (k *kit) caps() (list []ask.Question) {
	const noPython = "its machine has no such Python"
	for _, c := range []struct{ name, who, run, notEmulated string }{
		{"cap", "that calls the driver itself", "Driver", ""},
		{"cap-pytorch", "of PyTorch, with each of its allocators", "PyTorch", noPython},
		{"cap-two-pytorch", "that is two of PyTorch", "TwoPyTorch", noPython},
		{"cap-jax", "of JAX", "JAX", noPython},
		{"cap-cupy", "of CuPy", "CuPy", noPython},
	} {
		list = append(list, ask.Question{
			Name: c.name, Asks: "Is a container held to its cap " + c.who + "?", Limit: 2 * time.Minute, Least: 15 * time.Second,
			Code: []string{"pkg/memcap/lib/c"}, NotEmulated: c.notEmulated,
			Ask: func(ctx context.Context, room *ask.Room) ask.Answer {
				return k.suite(ctx, room, "^TestCapsOfHardware$/^"+c.run, "-caps")
			},
		})
	}
	return list
}

// A test begins with a line of the one kind, and ends with one of the other.
var (
	ends   = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(([0-9.]+)s\)$`)
	begins = regexp.MustCompile(`^=== (?:RUN|NAME|CONT) +(\S+)$`)
)

// suite runs some of the suite's tests on the driver. It is yes where some pass and none fails.
func (k *kit) suite(ctx context.Context, room *ask.Room, run string, flags ...string) ask.Answer {
	dir := filepath.Join(k.dir, suiteDir)
	if hardware.OptionsOf(k.root).ProcRoot != "" { // an emulated driver's
		flags = append(flags, "-test.skip", notEmulatedTests)
	}
	args := append([]string{"-test.v", "-test.run", run, "-hardware", "-driver-root", k.root, "-programs", dir}, flags...)
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "hardware.test"), args...)
	cmd.Dir = room.Dir
	cmd.Env = append(os.Environ(), withoutMPS(room))
	out, err := cmd.StdoutPipe()
	if err != nil {
		return ask.CouldNotTell("%v", err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return ask.CouldNotTell("%v", err)
	}
	var list []verdict
	said := map[string][]string{}
	now := ""
	for lines := bufio.NewScanner(out); lines.Scan(); {
		line := lines.Text()
		if m := begins.FindStringSubmatch(line); m != nil {
			now = m[1]
			continue
		}
		m := ends.FindStringSubmatch(line)
		if m == nil {
			said[now] = append(said[now], strings.TrimSpace(line))
			continue
		}
		v := verdict{how: m[1], name: m[2], said: said[m[2]]}
		list = append(list, v)
		code := 0
		if v.how == "FAIL" {
			code = 1
		}
		room.Note(v.how+" "+v.name, code, map[string]any{"s": m[3], "said": v.said})
	}
	err = cmd.Wait()
	answer := judge(list)
	if err != nil && answer.Says != ask.No {
		room.Note("hardware.test", -1, said)
		return ask.CouldNotTell("the suite ends with %v: %s", err, strings.Join(slices.Concat(slices.Collect(maps.Values(said))...), " "))
	}
	return answer
}

// verdict is how a test went.
type verdict struct {
	how  string // PASS, FAIL or SKIP
	name string
	said []string
}

// judge makes an answer of the tests that have no parts of their own. A test that fails though
// none of its parts does counts too.
func judge(list []verdict) ask.Answer {
	passed := 0
	var failed, skipped []string
	for i := range list {
		v := &list[i]
		ofIt := func(o verdict) bool { return strings.HasPrefix(o.name, v.name+"/") }
		_, short, _ := strings.Cut(v.name, "/")
		switch {
		case v.how == "FAIL" && !slices.ContainsFunc(list, func(o verdict) bool { return ofIt(o) && o.how == "FAIL" }):
			failed = append(failed, strings.Join(append([]string{short}, v.said...), " "))
		case v.how == "SKIP":
			skipped = append(skipped, short+": "+reason(v.said))
		case v.how == "PASS" && !slices.ContainsFunc(list, ofIt):
			passed++
		}
	}
	switch {
	case len(failed) > 0:
		return ask.Tell(false, "%d pass; these do not: %s", passed, strings.Join(failed, "; "))
	case passed == 0:
		return ask.CouldNotTell("%s", strings.Join(skipped, "; "))
	}
	return ask.Tell(true, "%d tests pass, %d are skipped", passed, len(skipped))
}

// reason is why a test was skipped, of what it said.
func reason(said []string) string {
	for _, line := range said {
		if _, why, found := strings.Cut(line, "skipped: "); found {
			return why
		}
	}
	return strings.Join(said, " ")
}

// switches are about what NVIDIA's documentation leaves open of CUDA, each a behaviour that the
// emulated driver has a switch for.
func (k *kit) switches() (list []ask.Question) {
	for _, name := range slices.Sorted(maps.Keys(hardware.Switches)) {
		notEmulated := ""
		if name == "domains" {
			notEmulated = "its driver is older than locality domains, 13.4"
		}
		list = append(list, ask.Question{
			Name: "switch-" + name, Asks: "Which value of the emulator's switch " + name + " is the driver's?", Limit: 20 * time.Second,
			Code: []string{"tests/emulator/lib/c/cuda_switch.c", "tests/emulator/lib/doc.go"}, NotEmulated: notEmulated,
			Ask: k.on(func(ctx context.Context, room *ask.Room, c *card) (ask.Answer, error) {
				cmd := exec.CommandContext(ctx, filepath.Join(k.dir, suiteDir, "switches"), k.library("libcuda.so.1"), name)
				cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+c.uuid, withoutMPS(room))
				said := &strings.Builder{}
				cmd.Stderr = said
				out, err := cmd.Output()
				value := strings.TrimSpace(string(out))
				if err != nil {
					room.Note("switches "+name, 1, said.String())
					return ask.Answer{}, fmt.Errorf("%w: %s", err, strings.TrimSpace(said.String()))
				}
				room.Note("switches "+name, 0, value)
				if why, unknown := strings.CutPrefix(value, "unknown"); unknown {
					return ask.Answer{}, errors.New(strings.Trim(why, ": "))
				}
				return ask.Call(value, "by testdata/switches.c"), nil
			}),
		})
	}
	return list
}
