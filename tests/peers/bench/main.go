// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/memcap/capsule"
	"example.com/gpu-agent/tests/peers"
)

func main() {
	capsule.Main()
	peers.BecomePeer()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	var said *insideError
	switch {
	case err == nil:
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case errors.As(err, &said):
		os.Exit(said.code)
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func isInside(args []string) bool { return len(args) > 0 && args[0] == insideArg }

func run(ctx context.Context, args []string) error {
	if len(args) == 2 && args[0] == emptyArg {
		return serveEmpty(ctx, args[1])
	}
	if len(args) == 3 && args[0] == emptyClaimsArg {
		return serveEmptyClaims(ctx, args[1], args[2])
	}
	inside := isInside(args)
	if inside {
		args = args[1:]
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	smoke := flags.Bool("smoke", false, "tiny counts: does all of it work? The times mean nothing then")
	only := flags.String("only", "", "only the phases whose name contains this `word`, such as calls")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("what is %q?", flags.Arg(0))
	}
	k, err := lab.NewKit(nil)
	if err != nil {
		return err
	}
	if inside {
		return measure(ctx, k, *smoke, *only)
	}
	if missing := lab.Missing(); missing != "" {
		return fmt.Errorf("this needs %s", missing)
	}
	began := time.Now()
	if err := build(ctx, k); err != nil {
		return err
	}
	fmt.Printf("# built what was not in the cache, in %.0f s\n", time.Since(began).Seconds())
	return runInside(ctx, k, args)
}
