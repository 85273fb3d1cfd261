// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// verdict is what became of one defect.
type verdict struct {
	defect
	by    string // the stage that found it, "" if none did
	tests []string
	took  time.Duration
	err   error // the defect could not be tried
}

// trial puts defects back in a worktree of its own and runs stages there.
type trial struct {
	tree string // the worktree
	logs string
	set  string // a flag of tests/stages: "" is make test
	own  bool   // no stage is run
}

// cheapFirst are the stages in the order in which they are tried, since the first that fails
// ends the trial. Stages that are not named come last.
var cheapFirst = []string{"unit", "deployments", "caps", "crash", "crowd", "pieces", "e2e"}

// ownStages are the stages that say most about a directory, dear as they are.
var ownStages = map[string]string{"pkg/memcap/": "caps", "deployments/": "deployments"}

// try puts one defect back and runs the stages that reach it, until one fails.
func (t *trial) try(ctx context.Context, d defect) (v verdict) {
	v.defect = d
	began := time.Now()
	defer func() { v.took = time.Since(began) }()
	for _, args := range [][]string{{"reset", "-q", "--hard"}, {"clean", "-q", "-fd"}, {"apply", "--3way", d.file}} {
		if out, err := exec.CommandContext(ctx, "git", append([]string{"-C", t.tree}, args...)...).CombinedOutput(); err != nil {
			v.err = fmt.Errorf("git %s: %w: %s; write the patch anew against today's code", args[0], err, bytes.TrimSpace(out))
			return v
		}
	}
	// Its own packages first, as their tests take seconds and the whole stage takes minutes.
	if packages, err := d.packages(); err != nil {
		v.err = err
		return v
	} else if len(packages) > 0 {
		failed, err := t.run(ctx, d.name+"-own", append([]string{"go", "test", "-short", "-vet=off", "-timeout=10m"}, packages...))
		if err != nil {
			v.err = err
			return v
		}
		if len(failed) > 0 {
			v.by, v.tests = "unit", failed
			return v
		}
	}
	if t.own {
		return v
	}
	stages, err := t.reached(ctx, d)
	if err != nil {
		v.err = err
		return v
	}
	for _, s := range stages {
		args := append(t.stages(), s.builds...)
		failed, err := t.run(ctx, d.name+"-"+strings.ReplaceAll(s.name, " ", "-"), append(args, s.name))
		if err != nil {
			v.err = err
			return v
		}
		if len(failed) > 0 {
			v.by, v.tests = s.name, failed
			return v
		}
	}
	return v
}

// packages are those of the Go and C files that the patch changes, as arguments of go test.
func (d *defect) packages() ([]string, error) {
	files, err := d.files()
	if err != nil {
		return nil, err
	}
	var list []string
	for _, f := range files {
		dir := filepath.Dir(f)
		switch filepath.Ext(f) {
		case ".c", ".h":
			dir = filepath.Dir(dir)
		case ".go":
		default:
			continue
		}
		if !slices.Contains(list, "./"+dir) {
			list = append(list, "./"+dir)
		}
	}
	return list, nil
}

func (t *trial) stages() []string {
	args := []string{"go", "run", "./tests/stages"}
	if t.set != "" {
		args = append(args, t.set)
	}
	return args
}

// room is a stage, and those that it builds upon.
type room struct {
	name   string
	builds []string
}

// reached are the stages that what was put back can change.
func (t *trial) reached(ctx context.Context, d defect) ([]room, error) {
	files, err := d.files()
	if err != nil {
		return nil, err
	}
	args := append(t.stages(), "--reached", "HEAD", "--list")
	out, err := t.command(ctx, args).Output()
	if err != nil {
		return nil, fmt.Errorf("ask which stages the change reaches: %w", err)
	}
	var list []room
	for line := range strings.Lines(string(out)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), "\t")
		builds, _, _ := strings.Cut(rest, "\t")
		list = append(list, room{name, strings.FieldsFunc(builds, func(r rune) bool { return r == ',' })})
	}
	place := func(r room) int {
		for dir, stage := range ownStages {
			if r.name == stage && slices.ContainsFunc(files, func(f string) bool { return strings.HasPrefix(f, dir) }) {
				return -1
			}
		}
		if i := slices.Index(cheapFirst, r.name); i >= 0 {
			return i
		}
		return len(cheapFirst)
	}
	slices.SortStableFunc(list, func(a, b room) int { return place(a) - place(b) })
	return list, nil
}

func (t *trial) command(ctx context.Context, args []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = t.tree
	// Paths in the programs would have each worktree compile everything anew.
	cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false -trimpath", "CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 2 * time.Minute
	return cmd
}

// failedTest finds tests in the output of go test and of tests/stages, and packages whose
// tests ran and ended without a name, as one does that took all memory.
var failedTest = regexp.MustCompile(`(?m)^\s*(?:--- FAIL: (\S+)|FAILED (\S+ Test\S+)|FAIL\t(\S+)\t[\d.]+s$)`)

// run runs tests, keeps what they print, and returns the tests that failed, or what else did.
func (t *trial) run(ctx context.Context, name string, args []string) (failed []string, err error) {
	log := filepath.Join(t.logs, name+".log")
	file, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	cmd := t.command(ctx, args)
	cmd.Stdout, cmd.Stderr = file, file
	err = cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err == nil {
		return nil, nil
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return nil, err
	}
	text, err := os.ReadFile(log)
	if err != nil {
		return nil, err
	}
	for _, m := range failedTest.FindAllStringSubmatch(string(text), -1) {
		if test := m[1] + m[2] + m[3]; !slices.Contains(failed, test) {
			failed = append(failed, test)
		}
	}
	if len(failed) == 0 {
		return nil, fmt.Errorf("no test failed, and yet: %w; see %s", exit, log)
	}
	return failed, nil
}
