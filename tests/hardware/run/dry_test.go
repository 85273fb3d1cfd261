// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/mps"
	"example.com/gpu-agent/tests/hardware/ask"
	"example.com/gpu-agent/tests/hardware/dry"
)

// programsDir is theirs, once they are built; it goes with this process.
var programsDir string

// programs builds the kit's programs, once.
var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "kit-")
	if err != nil {
		return "", err
	}
	programsDir = dir
	if out, err := exec.Command("go", "run", "../kit", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("make the kit: %w\n%s", err, out)
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	mps.Main()
	code := m.Run()
	os.RemoveAll(programsDir)
	os.Exit(code)
}

// emulate has the kit's programs, and an emulated driver for them.
func emulate(t *testing.T) (dir string, d *dry.Driver) {
	t.Helper()
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skipf("skipped: the kit's programs need gcc: %v", err)
	}
	dir, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	d, err = dry.Start(t.Context(), emulator.Spec{Model: "H200-141GB", Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.End(); err != nil {
			t.Error(err)
		}
	})
	return dir, d
}

// TestDryRun asks the emulated driver everything: a question that it can answer has an answer.
func TestDryRun(t *testing.T) {
	dir, d := emulate(t)
	if err := d.LayMPS(); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(t.TempDir(), "answers")
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "run"), "-out", folder, "10m")
	cmd.Env = append(os.Environ(), d.Env)
	out, err := cmd.CombinedOutput()
	if t.Logf("%s", out); err != nil {
		t.Fatal(err)
	}
	for _, q := range (&kit{}).questions() {
		lines, err := ask.Read(folder, q.Name)
		if err != nil {
			t.Error(err)
			continue
		}
		answer, err := ask.AnswerIn(lines)
		switch {
		case err != nil:
			t.Errorf("%s: %v", q.Name, err)
		case answer.Says == ask.Unknown && q.NotEmulated == "":
			t.Errorf("%s %v", q.Asks, answer)
		case len(lines) < 2 && q.NotEmulated == "":
			t.Errorf("%s has no raw answer", q.Name)
		}
	}
	if err := asItWas(d); err != nil {
		t.Error(err)
	}
}

// TestDryRunIsCutOff ends a run at random moments, by its budget and by signals.
func TestDryRunIsCutOff(t *testing.T) {
	dir, d := emulate(t)
	for i := range 6 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			folder := filepath.Join(t.TempDir(), "answers")
			moment := time.Duration(rand.IntN(12000)) * time.Millisecond
			t.Logf("after %v", moment)
			budget := moment
			if i%2 > 0 {
				budget = time.Minute
			}
			cmd := exec.Command(filepath.Join(dir, "run"), "-out", folder, budget.String())
			cmd.Env = append(os.Environ(), d.Env)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if i%2 > 0 {
				time.Sleep(moment)
				_ = cmd.Process.Signal([]os.Signal{os.Interrupt, os.Kill}[i/2%2])
			}
			var exit *exec.ExitError
			if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			names, err := filepath.Glob(filepath.Join(folder, "*.jsonl"))
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range names {
				if _, err := ask.Read(folder, strings.TrimSuffix(filepath.Base(path), ".jsonl")); err != nil {
					t.Error(err)
				}
			}
			if err := asItWas(d); err != nil {
				t.Error(err)
			}
		})
	}
}

// asItWas waits until no program of the kit runs any more.
func asItWas(d *dry.Driver) error {
	var left []string
	for range 500 {
		left = nil
		list, err := filepath.Glob("/proc/[0-9]*/environ")
		if err != nil {
			return err
		}
		for _, path := range list {
			env, err := os.ReadFile(path)
			if err == nil && slices.Contains(strings.Split(string(env), "\x00"), d.Env) {
				left = append(left, filepath.Dir(path))
			}
		}
		if len(left) == 0 {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("left running: %v", left)
}

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "how much time"},
		{[]string{"soon"}, "is no time"},
		{[]string{"-only", "none", "9m"}, "no question"},
	} {
		if err := run(t.Context(), c.args); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.args, err, c.want)
		}
	}
}
