// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// outcome is what became of a stage.
type outcome struct {
	stage   stage
	took    time.Duration
	cpu     time.Duration // of processors
	err     error         // why it failed
	skipped string        // why it was not run
	counts  counts
	skips   []reason
	failed  []string
}

func (o *outcome) word() string {
	switch {
	case o.err != nil:
		return "failed"
	case o.skipped != "":
		return "skipped"
	}
	return "passed"
}

func main() {
	soak := flag.Bool("soak", false, "fuzz, too: minutes for each invariant")
	list := flag.Bool("list", false, "print the stages and end")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: stages [--soak] [--list] [STAGE]...")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := do(ctx, *soak, *list, flag.Args())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "stages:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// do runs the named stages, or all, and reports whether nothing failed.
func do(ctx context.Context, soak, list bool, names []string) (bool, error) {
	cache := os.Getenv("GPU_AGENT_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return false, fmt.Errorf("find the cache: %w; set GPU_AGENT_CACHE", err)
		}
		cache = filepath.Join(user, "gpu-agent")
	}
	if mod, err := os.ReadFile("go.mod"); err != nil || !bytes.HasPrefix(mod, []byte("module example.com/gpu-agent\n")) {
		return false, errors.New("run this at the top of the checkout")
	}
	packages, err := unitPackages()
	if err != nil {
		return false, err
	}
	files, err := goFiles()
	if err != nil {
		return false, err
	}
	all, err := stages(cache, packages, files, soak)
	if err != nil {
		return false, err
	}
	if list {
		for _, s := range all {
			fmt.Printf("%-12s %-6s  %s\n", s.name, s.lane, s.what)
		}
		return true, nil
	}
	for _, name := range names {
		if !slices.ContainsFunc(all, func(s stage) bool { return s.name == name }) {
			return false, fmt.Errorf("there is no stage %q; --list prints them", name)
		}
	}
	for _, dir := range []string{"bin", "logs"} {
		if err := os.MkdirAll(filepath.Join(cache, dir), 0o755); err != nil {
			return false, fmt.Errorf("make the cache: %w", err)
		}
	}
	if len(names) > 0 {
		all = slices.DeleteFunc(all, func(s stage) bool { return !slices.Contains(names, s.name) })
	}
	r := runner{screen: &screen{w: os.Stdout}, logs: filepath.Join(cache, "logs"), env: []string{"GPU_AGENT_CACHE=" + cache}}
	began := time.Now()
	done := r.lanes(ctx, all)
	fmt.Println()
	return report(os.Stdout, done, time.Since(began)), nil
}

// runner runs stages.
type runner struct {
	screen *screen
	logs   string   // a directory
	env    []string // for every command, beside the environment
}

// lanes runs the stages of each lane in the order of the list, the lanes at the same time,
// and returns what became of them in that order. A lane that has no more of its own takes
// what another has not begun. A stage waits for those of the list that it builds upon or
// comes behind. They stand before it, so the first stage that has not ended never waits.
func (r *runner) lanes(ctx context.Context, list []stage) []outcome {
	done := make([]outcome, len(list))
	ended := make([]chan struct{}, len(list))
	for i := range ended {
		ended[i] = make(chan struct{})
	}
	var mu sync.Mutex
	taken := make([]bool, len(list)) // guarded by mu
	take := func(of lane) int {
		mu.Lock()
		defer mu.Unlock()
		ready := func(i int) bool {
			return !slices.ContainsFunc(list[i].before(list[:i]), func(j int) bool { return !isClosed(ended[j]) })
		}
		for _, fits := range []func(i int) bool{
			func(i int) bool { return list[i].lane == of },
			ready,
			func(int) bool { return true },
		} {
			for i := range list {
				if !taken[i] && fits(i) {
					taken[i] = true
					return i
				}
			}
		}
		return -1
	}
	var all sync.WaitGroup
	for _, lane := range []lane{first, second, beside} {
		all.Go(func() {
			for i := take(lane); i >= 0; i = take(lane) {
				var upon []outcome
				for _, j := range list[i].before(list[:i]) {
					<-ended[j]
					if slices.Contains(list[i].after, list[j].name) {
						upon = append(upon, done[j])
					}
				}
				done[i] = r.stage(ctx, list[i], upon)
				close(ended[i])
			}
		})
	}
	all.Wait()
	return done
}

// before are the places of those that s waits for, among the stages that stand before it.
func (s *stage) before(list []stage) (places []int) {
	for j := range list {
		if slices.Contains(s.after, list[j].name) || slices.Contains(s.behind, list[j].name) {
			places = append(places, j)
		}
	}
	return places
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// stage runs a stage, if what became of those that it builds upon allows it.
func (r *runner) stage(ctx context.Context, s stage, before []outcome) outcome {
	o := outcome{stage: s}
	for i := range before {
		if before[i].word() != "passed" {
			o.skipped = fmt.Sprintf("it builds upon the stage %q: %s", before[i].stage.name, before[i].word())
		}
	}
	switch {
	case o.skipped != "":
	case ctx.Err() != nil:
		o.skipped = "interrupted"
	case s.lacks != nil:
		o.skipped = s.lacks()
	}
	out := r.screen.begin()
	defer out.end()
	fmt.Fprintf(out, "\n=== %s: %s\n", s.name, s.what)
	if o.skipped != "" {
		fmt.Fprintf(out, "skipped: %s\n", o.skipped)
		return o
	}
	began := time.Now()
	log, err := os.Create(filepath.Join(r.logs, strings.ReplaceAll(s.name, " ", "-")+".log"))
	if err != nil {
		o.err = fmt.Errorf("keep the output: %w", err)
		return o
	}
	defer log.Close()
	for _, c := range s.commands {
		if o.err = r.command(ctx, c, out, log, &o); o.err != nil {
			fmt.Fprintf(out, "FAILED: %v\n", o.err)
			break
		}
	}
	o.took = time.Since(began)
	fmt.Fprintf(out, "--- %s %s, %.1f s\n", s.name, o.word(), o.took.Seconds())
	if o.err != nil {
		fmt.Fprintf(out, "    all of its output: %s\n", log.Name())
		out.failed(s.name, log.Name())
	}
	return o
}

func (r *runner) command(ctx context.Context, c command, screen, log io.Writer, o *outcome) error {
	both := io.MultiWriter(screen, log)
	if c.call != nil {
		return c.call(both)
	}
	fmt.Fprintf(log, "\n$ %s\n", strings.Join(c.args, " "))
	cmd := exec.CommandContext(ctx, c.args[0], c.args[1:]...)
	cmd.Dir = c.in
	cmd.Env = append(append(os.Environ(), r.env...), c.env...)
	// A group of its own, so that the test binaries below `go test` are told
	// too: what they have set up they take down.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute

	name := strings.Join(c.args[:min(len(c.args), 3)], " ")
	switch {
	case c.quiet:
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, log), io.MultiWriter(&out, log)
		if err := start(cmd, o.stage.lane == beside); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := o.wait(cmd); err != nil {
			return fmt.Errorf("%s: %w\n%s", name, err, out.Bytes())
		}
		if out.Len() > 0 {
			return fmt.Errorf("%s lists:\n%s", name, out.Bytes())
		}
		return nil
	case !c.test:
		cmd.Stdout, cmd.Stderr = both, both
		if err := start(cmd, o.stage.lane == beside); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := o.wait(cmd); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}

	cmd.Stderr = both
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := start(cmd, o.stage.lane == beside); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	g := newGotest(screen)
	readErr := g.read(io.TeeReader(out, log))
	err = o.wait(cmd)
	o.counts.add(g.counts)
	o.skips = append(o.skips, g.skips...)
	o.failed = append(o.failed, g.failed...)
	switch {
	case readErr != nil:
		return readErr
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case len(g.failed) > 0:
		return fmt.Errorf("%d failures", len(g.failed))
	case err != nil:
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// wait waits for a program's end, and notes what processors' time it took: its own and that
// of those that it has waited for. A test node's processes are nobody's children.
func (o *outcome) wait(cmd *exec.Cmd) error {
	err := cmd.Wait()
	if s := cmd.ProcessState; s != nil {
		o.cpu += s.UserTime() + s.SystemTime()
	}
	return err
}

// nicer is by how much a stage beside the others is nicer than they are: by each
// share of a processor that it gets, they get three. Their node has a kubelet with
// its own idea of what is late; but it may not starve, since it, too, has tests that
// do not wait for ever.
const nicer = 5

// start starts a program.
func start(cmd *exec.Cmd, nicely bool) error {
	if err := cmd.Start(); err != nil || !nicely {
		return err
	}
	own, err := niceness()
	if err == nil {
		err = syscall.Setpriority(syscall.PRIO_PGRP, cmd.Process.Pid, min(own+nicer, 19))
	}
	if err != nil {
		_ = cmd.Cancel()
		return errors.Join(fmt.Errorf("lower the priority: %w", err), cmd.Wait())
	}
	return nil
}

// niceness is this process's own: -20 to 19, the nicest.
func niceness() (int, error) {
	p, err := syscall.Getpriority(syscall.PRIO_PROCESS, 0)
	return 20 - p, err // as the kernel counts
}

// report prints what became of everything in the time it took, and reports whether
// nothing failed.
func report(w io.Writer, done []outcome, took time.Duration) bool {
	var total counts
	var cpu time.Duration
	fmt.Fprintf(w, "%-12s %10s %10s  %-8s %s\n", "STAGE", "SECONDS", "CPU", "RESULT", "TESTS")
	for i := range done {
		o := &done[i]
		tests := ""
		if o.counts != (counts{}) {
			tests = o.counts.String()
		}
		line := fmt.Sprintf("%-12s %10.1f %10.1f  %-8s %s", o.stage.name, o.took.Seconds(), o.cpu.Seconds(), o.word(), tests)
		cpu += o.cpu
		fmt.Fprintln(w, strings.TrimRight(line, " "))
		total.add(o.counts)
		switch {
		case o.err != nil && o.counts.failed == 0:
			total.failed++
		case o.skipped != "":
			total.skipped++
		}
	}
	fmt.Fprintf(w, "%-12s %10.1f %10.1f\n", "all", took.Seconds(), cpu.Seconds())

	if total.skipped > 0 {
		fmt.Fprintln(w, "\nskipped, and why:")
		for i := range done {
			o := &done[i]
			if o.skipped != "" {
				fmt.Fprintf(w, "  stage %s: %s\n", o.stage.name, o.skipped)
			}
			for _, s := range o.skips {
				fmt.Fprintf(w, "  %s: %s\n", some(s.tests), s.text)
			}
		}
	}
	if total.failed > 0 {
		fmt.Fprintln(w, "\nfailed:")
		for i := range done {
			o := &done[i]
			for _, f := range o.failed {
				fmt.Fprintf(w, "  %s: %s\n", o.stage.name, f)
			}
			if o.err != nil && len(o.failed) == 0 {
				first, _, _ := strings.Cut(o.err.Error(), "\n")
				fmt.Fprintf(w, "  %s: %s\n", o.stage.name, first)
			}
		}
	}
	fmt.Fprintf(w, "\n%s\n", total)
	return total.failed == 0
}

// some names the first of several tests.
func some(tests []string) string {
	if len(tests) == 1 {
		return tests[0]
	}
	return fmt.Sprintf("%s and %d more", tests[0], len(tests)-1)
}
