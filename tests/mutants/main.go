// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

const defects = "tests/mutants/defects"

const notByOwn = "not found by its own packages"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := do(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func do(ctx context.Context, args []string) error {
	usage := errors.New("usage: mutants draw SEED COMMIT, or mutants list, or mutants run [flags] [NAMES]")
	if len(args) == 0 {
		return usage
	}
	switch args[0] {
	case "draw":
		if len(args) != 3 {
			return usage
		}
		return draw(ctx, os.Stdout, args[1], args[2])
	case "list":
		list, err := readDefects(defects)
		for _, d := range list {
			fmt.Printf("%-14s %s %-8s %-26s %-13s %s\n", d.name, d.commit, d.kind, d.grave, d.by, d.text)
		}
		return err
	case "run":
		return runAll(ctx, args[1:])
	}
	return usage
}

func runAll(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("run", flag.ExitOnError)
	which := flags.String("draw", "", "only the defects of this draw: first or second")
	all := flags.Bool("all", false, "by the stages of make test-all")
	own := flags.Bool("own", false, "by the tests of the packages that the patch changes, and no stage: a minute each")
	goOn := flags.Bool("continue", false, "leave out what an earlier run has tried, by the file of results in the cache")
	if err := flags.Parse(args); err != nil {
		return err
	}
	list, err := readDefects(defects)
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(d defect) bool {
		return *which != "" && d.draw != *which || flags.NArg() > 0 && !slices.Contains(flags.Args(), d.name)
	})
	if len(list) == 0 {
		return errors.New("no defect has such a name and draw; `mutants list` prints them")
	}
	cache := os.Getenv("GPU_TESTS_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return fmt.Errorf("find the cache: %w; set GPU_TESTS_CACHE", err)
		}
		cache = filepath.Join(user, "gpu-agent")
	}
	dir := filepath.Join(cache, "mutants")
	t := trial{tree: filepath.Join(dir, "tree"), logs: filepath.Join(dir, "logs")}
	if *all {
		t.set = "--all"
	}
	t.own = *own
	if err := os.MkdirAll(t.logs, 0o755); err != nil {
		return fmt.Errorf("make a place for the output: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return fmt.Errorf("have the worktree alone: %w", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("another run puts defects back in %s: %w; wait for its end, or set GPU_TESTS_CACHE to another directory", t.tree, err)
	}
	_, _ = exec.CommandContext(ctx, "git", "worktree", "remove", "--force", t.tree).Output() // of a run that was killed
	if out, err := exec.CommandContext(ctx, "git", "worktree", "add", "--detach", "--force", t.tree, "HEAD").CombinedOutput(); err != nil {
		return fmt.Errorf("make a worktree: %w: %s", err, out)
	}
	defer func() {
		_, _ = exec.CommandContext(context.WithoutCancel(ctx), "git", "worktree", "remove", "--force", t.tree).Output()
	}()
	results := filepath.Join(dir, "results.tsv")
	tried, err := triedAlready(results, *goOn)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(results, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("keep the results: %w", err)
	}
	defer file.Close()
	var failed []string
	found := 0
	for i, d := range list {
		if tried[d.name] {
			continue
		}
		v := t.try(ctx, d)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		by := v.by
		switch {
		case v.err != nil:
			by = "not tried: " + v.err.Error()
		case by == "" && *own:
			by = notByOwn
		case by == "":
			by = "not found"
		default:
			found++
		}
		tests := strings.Join(v.tests[:min(len(v.tests), 3)], " ")
		if v.err != nil || v.by == "" && !*own && (d.by == sets[0] || *all && d.by == sets[1]) {
			failed = append(failed, d.name)
		}
		fmt.Printf("%3d of %d  %-14s %-26s %5.0f s  %s: %s\n", i+1, len(list), d.name, d.grave, v.took.Seconds(), by, tests)
		if _, err := fmt.Fprintf(file, "%s\t%s\t%.0f\t%s\t%s\n", d.name, d.grave, v.took.Seconds(), strings.ReplaceAll(by, "\n", " "), tests); err != nil {
			return fmt.Errorf("keep the results: %w", err)
		}
	}
	fmt.Printf("%d of %d found\n", found, len(list))
	if len(failed) > 0 {
		return fmt.Errorf("not as it was: %s", strings.Join(failed, ", "))
	}
	return nil
}

// triedAlready names the defects in a file of results; without goOn it empties the file.
func triedAlready(name string, goOn bool) (map[string]bool, error) {
	if !goOn {
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("begin a file of results: %w", err)
		}
		return nil, nil
	}
	file, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the results so far: %w", err)
	}
	defer file.Close()
	tried := map[string]bool{}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		d, rest, _ := strings.Cut(lines.Text(), "\t")
		if !strings.Contains(rest, "not tried") && !strings.Contains(rest, notByOwn) {
			tried[d] = true
		}
	}
	return tried, nil
}
