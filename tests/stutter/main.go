// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A stop and the time between two are drawn evenly from these.
const (
	leastStop, mostStop = 50 * time.Millisecond, 450 * time.Millisecond
	leastRun, mostRun   = 100 * time.Millisecond, 3 * time.Second
)

// killPatience is how long the kernel may take to end what is left of the program.
const killPatience = 10 * time.Second

func main() {
	seed := flag.Uint64("seed", 1, "of the stops and the times between them")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: stutter [-seed N] PROGRAM [ARGUMENT]...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := stutter(ctx, rand.New(rand.NewPCG(*seed, 0)), flag.Args())
	stop()
	// As it is, not with something of ours beside it.
	if exit, ok := err.(*exec.ExitError); ok && exit.ExitCode() > 0 {
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "stutter:", err)
		os.Exit(1)
	}
}

// stutter runs a program to its end, and stops it and all that it starts for
// moments. A signal to this program ends the stops; the program has to be told by
// whoever sends it.
func stutter(ctx context.Context, rng *rand.Rand, args []string) (err error) {
	g, err := newGroup()
	if err != nil {
		return fmt.Errorf("make a control group: %w", err)
	}
	defer func() {
		if left := g.end(); left != nil {
			err = errors.Join(err, left)
		}
	}()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(g.dir.Fd())}
	if err := cmd.Start(); err != nil {
		return err
	}
	over := make(chan error, 1)
	go func() { over <- cmd.Wait() }()
	began, stops, stopped := time.Now(), 0, time.Duration(0)
	defer func() {
		fmt.Fprintf(os.Stderr, "stutter: stopped %d times, for %.1f of %.1f s\n", stops, stopped.Seconds(), time.Since(began).Seconds())
	}()
	between := func(least, most time.Duration) time.Duration {
		return least + time.Duration(rng.Int64N(int64(most-least)))
	}
	for {
		select {
		case err := <-over:
			return err
		case <-ctx.Done():
			return <-over
		case <-time.After(between(leastRun, mostRun)):
		}
		d := between(leastStop, mostStop)
		if err := g.freeze(); err != nil {
			return errors.Join(err, g.kill(), <-over)
		}
		time.Sleep(d)
		if err := g.thaw(); err != nil {
			return errors.Join(err, g.kill(), <-over)
		}
		stops, stopped = stops+1, stopped+d
	}
}

// group is a control group of version 2, below this process's own.
type group struct{ dir *os.File }

func newGroup() (*group, error) {
	root, err := mountPoint()
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(own)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok {
			continue
		}
		name := filepath.Join(root, path, fmt.Sprintf("stutter-%d", os.Getpid()))
		if err := os.Mkdir(name, 0o755); err != nil {
			return nil, err
		}
		dir, err := os.Open(name)
		if err != nil {
			return nil, errors.Join(err, os.Remove(name))
		}
		return &group{dir}, nil
	}
	return nil, errors.New("this process is in no group of version 2")
}

// mountPoint is where control groups of version 2 are.
func mountPoint() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) > 4 && strings.Contains(s.Text(), " - cgroup2 ") {
			return fields[4], nil
		}
	}
	return "", errors.New("no control groups of version 2 are mounted")
}

func (g *group) write(name, word string) error {
	return os.WriteFile(filepath.Join(g.dir.Name(), name), []byte(word), 0)
}

func (g *group) freeze() error { return g.write("cgroup.freeze", "1") }
func (g *group) thaw() error   { return g.write("cgroup.freeze", "0") }
func (g *group) kill() error   { return g.write("cgroup.kill", "1") }

// end ends what the program has left running.
func (g *group) end() error {
	err := errors.Join(g.thaw(), g.kill())
	for limit := time.Now().Add(killPatience); ; time.Sleep(10 * time.Millisecond) {
		switch gone := os.Remove(g.dir.Name()); {
		case gone == nil:
			return errors.Join(err, g.dir.Close())
		case !errors.Is(gone, unix.EBUSY) || time.Now().After(limit):
			return errors.Join(err, gone, g.dir.Close())
		}
	}
}
