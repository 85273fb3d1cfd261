// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
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
	cpu     time.Duration // of processors, without that of test nodes
	nodes   time.Duration // of processors, by test nodes that have ended
	err     error         // why it failed
	skipped string        // why it was not run
	counts  counts
	skips   []reason
	failed  []failure
	flakes  []flake
}

func (o *outcome) word() string {
	switch {
	case o.err != nil:
		return "failed"
	case o.skipped != "":
		return "skipped"
	case len(o.flakes) > 0:
		return "flaky"
	}
	return "passed"
}

// options are what the command line asks for.
type options struct {
	of       set
	changed  string // a commit: the stages beyond `make test` that have changed since
	reached  string // a commit: print the stages that have changed since, and what they build upon
	list     bool   // print what would run
	commands bool   // print the commands of all stages
	names    []string
}

func main() {
	var o options
	all := flag.Bool("all", false, "all that is known, once: `make test-all`")
	soak := flag.Bool("soak", false, "the long counts, and minutes of fuzzing for each invariant: `make soak`")
	flag.StringVar(&o.changed, "changed", "", "run what --all has beyond `make test`, if an input or a command has changed since `COMMIT`")
	flag.StringVar(&o.reached, "reached", "", "print the stages of which an input has changed since `COMMIT`, and after a tab what they build upon")
	flag.BoolVar(&o.list, "list", false, "print the stages and end; with --changed, also why")
	flag.BoolVar(&o.commands, "commands", false, "print the commands of all stages as JSON and end")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: stages [--all | --soak | --changed COMMIT] [--list] [STAGE]...")
		flag.PrintDefaults()
	}
	flag.Parse()
	o.names = flag.Args()
	switch {
	case *soak:
		o.of = long
	case *all || o.changed != "" || o.commands:
		o.of = whole
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := do(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "stages:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// do runs what the options ask for, and reports whether nothing failed.
func do(ctx context.Context, o options) (bool, error) {
	cache := os.Getenv("GPU_TESTS_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return false, fmt.Errorf("find the cache: %w; set GPU_TESTS_CACHE", err)
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
	all, err := stages(cache, packages, files, o.of)
	if err != nil {
		return false, err
	}
	if o.commands {
		return true, json.NewEncoder(os.Stdout).Encode(commandsOf(all))
	}
	for _, name := range o.names {
		if !slices.ContainsFunc(all, func(s stage) bool { return s.name == name }) {
			return false, fmt.Errorf("there is no stage %q; --list prints them, with --all and --soak more", name)
		}
	}
	switch {
	case o.reached != "":
		return true, printReached(ctx, o.reached, all)
	case len(o.names) > 0:
		all = slices.DeleteFunc(all, func(s stage) bool { return !slices.Contains(o.names, s.name) })
	case o.changed != "":
		changes, err := beyond(ctx, o.changed, all)
		if err != nil {
			return false, err
		}
		for _, c := range changes {
			fmt.Printf("%-12s %s\n", c.stage, c.why)
		}
		if len(changes) == 0 {
			fmt.Printf("nothing that `make test` leaves out has changed since %s\n", o.changed)
			return true, nil
		}
		if o.list {
			return true, nil
		}
		all = withBuilds(all, changes)
	}
	if o.list {
		for _, s := range all {
			fmt.Printf("%-12s %-6s  %s\n", s.name, s.lane, s.what)
		}
		return true, nil
	}
	for _, dir := range []string{"bin", "logs"} {
		if err := os.MkdirAll(filepath.Join(cache, dir), 0o755); err != nil {
			return false, fmt.Errorf("make the cache: %w", err)
		}
	}
	unlock, err := lockCache(cache, os.Stdout)
	if err != nil {
		return false, err
	}
	defer unlock()
	r := runner{screen: &screen{w: os.Stdout}, logs: filepath.Join(cache, "logs"), env: []string{"GPU_TESTS_CACHE=" + cache, heldVariable + "=" + cache}}
	began, machine := time.Now(), readMachine()
	done := r.lanes(ctx, all)
	r.again(ctx, done)
	fmt.Println()
	return report(os.Stdout, done, time.Since(began), machine.until(readMachine())), nil
}

// heldVariable names the cache that a run has locked, for the runs that its own stages start.
const heldVariable = "GPU_TESTS_STAGES"

// lockCache waits until no other run of stages uses a cache, and returns what lets others in:
// a node of the same name as another run's would end that one.
func lockCache(cache string, w io.Writer) (unlock func(), err error) {
	if os.Getenv(heldVariable) == cache {
		return func() {}, nil
	}
	file, err := os.OpenFile(filepath.Join(cache, ".stages.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the cache: %w", err)
	}
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		fmt.Fprintf(w, "another run uses %s, and this one waits for its end\n", cache)
		err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock the cache: %w", err), file.Close())
	}
	return func() { _ = file.Close() }, nil
}

// beyond are the stages with more than `make test` asks of them that have changed since a
// commit.
func beyond(ctx context.Context, commit string, all []stage) ([]change, error) {
	c, err := readCheckout(".")
	if err != nil {
		return nil, err
	}
	then, err := commandsAt(ctx, ".", commit, os.Stderr)
	if err != nil {
		return nil, err
	}
	changes, err := c.changedSince(ctx, commit, all, then)
	return slices.DeleteFunc(changes, func(ch change) bool {
		i := slices.IndexFunc(all, func(s stage) bool { return s.name == ch.stage })
		return all[i].set == quick && !all[i].fuller || isBuild(all[i].name, all)
	}), err
}

// printReached prints the stages that look at what has changed since a commit.
func printReached(ctx context.Context, commit string, all []stage) error {
	c, err := readCheckout(".")
	if err != nil {
		return err
	}
	changes, err := c.changedSince(ctx, commit, all, commandsOf(all))
	if err != nil {
		return err
	}
	for _, ch := range changes {
		if isBuild(ch.stage, all) {
			continue
		}
		var builds []string
		for _, s := range withBuilds(all, []change{ch}) {
			if s.name != ch.stage {
				builds = append(builds, s.name)
			}
		}
		fmt.Printf("%s\t%s\n", ch.stage, strings.Join(builds, ","))
	}
	return nil
}

// isBuild says whether other stages use what a stage makes.
func isBuild(name string, all []stage) bool {
	return slices.ContainsFunc(all, func(s stage) bool { return slices.Contains(s.after, name) })
}

// withBuilds are the changed stages and those that they build upon.
func withBuilds(all []stage, changes []change) []stage {
	wanted := map[string]bool{}
	for _, c := range changes {
		wanted[c.stage] = true
	}
	for i := len(all) - 1; i >= 0; i-- { // what a stage builds upon stands before it
		if wanted[all[i].name] {
			for _, name := range all[i].after {
				wanted[name] = true
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(s stage) bool { return !wanted[s.name] })
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
	log, err := os.Create(r.log(s.name))
	if err != nil {
		o.err = fmt.Errorf("keep the output: %w", err)
		return o
	}
	defer log.Close()
	usage := strings.TrimSuffix(log.Name(), ".log") + ".usage"
	_ = os.Remove(usage)
	for i, c := range s.commands {
		c.env = append(slices.Clip(c.env), usageFile+"="+usage)
		if o.err = r.command(ctx, i, c, out, log, &o); o.err != nil {
			fmt.Fprintf(out, "FAILED: %v\n", o.err)
			break
		}
	}
	o.took = time.Since(began)
	if o.nodes, err = readUsage(usage); err != nil {
		fmt.Fprintf(out, "what the test nodes used is not known: %v\n", err)
	}
	fmt.Fprintf(out, "--- %s %s, %.1f s\n", s.name, o.word(), o.took.Seconds())
	if o.err != nil {
		fmt.Fprintf(out, "    all of its output: %s\n", log.Name())
		out.failed(s.name, log.Name())
	}
	return o
}

// log is the file that keeps what a stage prints.
func (r *runner) log(name string) string {
	return filepath.Join(r.logs, strings.ReplaceAll(name, " ", "-")+".log")
}

// command runs a stage's i-th command.
func (r *runner) command(ctx context.Context, i int, c command, screen, log io.Writer, o *outcome) error {
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
	if os.Geteuid() == 0 {
		// And mounts of its own: those of a test that is killed, or that its timeout
		// ends, go with its last process.
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	}
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
	for _, f := range g.failed {
		f.command = i
		o.failed = append(o.failed, f)
	}
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

// usageFile is the variable that names the file in which the keepers of test nodes write
// down what their nodes used: see tests/cluster.
const usageFile = "GPU_TESTS_USAGE"

// readUsage sums up the lines "NODE SECONDS" of a file, which need not be there.
func readUsage(name string) (time.Duration, error) {
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var sum float64
	for line := range strings.Lines(string(text)) {
		var node string
		var seconds float64
		if _, err := fmt.Sscan(line, &node, &seconds); err != nil {
			return 0, fmt.Errorf("line %q of %s: %w", line, name, err)
		}
		sum += seconds
	}
	return time.Duration(sum * float64(time.Second)), nil
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

// report prints what became of everything in the time it took, and reports whether nothing
// failed and no more than one test was flaky.
func report(w io.Writer, done []outcome, took time.Duration, all machine) bool {
	var total counts
	var cpu, nodes time.Duration
	fmt.Fprintf(w, "%-12s %10s %10s %10s  %-8s %s\n", "STAGE", "SECONDS", "CPU", "NODES", "RESULT", "TESTS")
	for i := range done {
		o := &done[i]
		tests := ""
		if o.counts != (counts{}) {
			tests = o.counts.String()
		}
		line := fmt.Sprintf("%-12s %10.1f %10.1f %10.1f  %-8s %s", o.stage.name, o.took.Seconds(), o.cpu.Seconds(), o.nodes.Seconds(), o.word(), tests)
		cpu += o.cpu
		nodes += o.nodes
		fmt.Fprintln(w, strings.TrimRight(line, " "))
		total.add(o.counts)
		switch {
		case o.err != nil && o.counts.failed == 0:
			total.failed++
		case o.skipped != "":
			total.skipped++
		}
	}
	fmt.Fprintf(w, "%-12s %10.1f %10.1f %10.1f\n", "all", took.Seconds(), cpu.Seconds(), nodes.Seconds())
	if all.spent > 0 {
		fmt.Fprintf(w, "the machine's processors were busy for %.0f s of %.0f, and %.0f s were not theirs\n", all.busy.Seconds(), all.spent.Seconds(), all.stolen.Seconds())
	}

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
	var flakes []flake
	for i := range done {
		flakes = append(flakes, done[i].flakes...)
	}
	if len(flakes) > 0 {
		fmt.Fprintf(w, "\n%d flaky: failed beside others and passed alone; find the cause before the next change\n", len(flakes))
		for _, f := range flakes {
			fmt.Fprintf(w, "  %s: %s, then %s\n", f, f.logs[0], f.logs[1])
		}
	}
	if len(flakes) > 1 {
		fmt.Fprintln(w, "more than one flaky test is a failure")
		total.failed += len(flakes)
		total.passed -= len(flakes)
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
