// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/hardware/ask"
	"example.com/gpu-agent/tests/memcap/capsule"
)

func main() {
	capsule.Main() // where this is a container's first process it ends here
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the folder of this program: %w", err)
	}
	k := &kit{dir: filepath.Dir(self), root: "/"}
	if root := os.Getenv("TEST_GPU_DRIVER_ROOT"); root != "" {
		k.root = root
	}
	if len(args) == 3 && args[0] == "one" {
		return ask.One(ctx, k.questions(), args[1], args[2])
	}
	if len(args) > 1 && args[0] == withoutShm {
		return runWithoutShm(args[1:])
	}
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	out := flags.String("out", "answers", "the folder for the answers, which is made")
	only := flags.String("only", "", "these questions, separated by commas")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: run [-out FOLDER] [-only QUESTIONS] BUDGET, as in `run 9m`; or run list")
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	list := k.questions()
	if flags.NArg() == 1 && flags.Arg(0) == "questions" { // for tests/hardware/learn
		return json.NewEncoder(os.Stdout).Encode(list)
	}
	if flags.NArg() == 1 && flags.Arg(0) == "list" {
		for _, q := range list {
			fmt.Printf("%-28s %s\n", q.Name, q.Asks)
		}
		return nil
	}
	if flags.NArg() != 1 {
		flags.Usage()
		return errors.New("say how much time there is")
	}
	budget, err := time.ParseDuration(flags.Arg(0))
	if err != nil {
		return fmt.Errorf("the budget %q is no time, such as 9m or 90s: %w", flags.Arg(0), err)
	}
	if *only != "" {
		names := strings.Split(*only, ",")
		for _, name := range names {
			if !slices.ContainsFunc(list, func(q ask.Question) bool { return q.Name == name }) {
				return fmt.Errorf("there is no question %q; `run list` has them", name)
			}
		}
		list = slices.DeleteFunc(list, func(q ask.Question) bool { return !slices.Contains(names, q.Name) })
	}
	folder, err := filepath.Abs(*out)
	if err != nil {
		return err
	}
	began := time.Now()
	r := ask.Run{Out: folder, Budget: budget, Questions: list, Self: []string{self, "one"}, Settings: k.settings, Tidy: removeCgroups, Screen: os.Stdout}
	came, err := r.All(ctx)
	fmt.Printf("%d answered, %d have no answer, %d passed over, in %.0f s; the answers are in %s\n",
		len(came.Answered), len(came.Open), len(came.Passed), time.Since(began).Seconds(), folder)
	return err
}

// withoutShm is the command that runs a program which has no /dev/shm.
const withoutShm = "without-shm"

// runWithoutShm becomes a program in a mount namespace of its own, where /dev/shm takes
// nothing.
func runWithoutShm(args []string) error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts from the machine: %w", err)
	}
	if err := unix.Mount("none", "/dev/shm", "tmpfs", unix.MS_RDONLY, "size=4k"); err != nil {
		return fmt.Errorf("hide /dev/shm: %w", err)
	}
	return fmt.Errorf("run %s: %w", args[0], unix.Exec(args[0], args, os.Environ()))
}
