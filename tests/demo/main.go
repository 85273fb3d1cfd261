// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"example.com/gpu-agent/tests/burst"
	"example.com/gpu-agent/tests/lab"
)

const usage = `usage: demo up | down | burst | burst-down

  up           show the agent on a real Kubernetes node with 8 emulated GPUs; the node stays up
  down         end that node; nothing of it is left but files in the cache
  burst        show Jobs on two such nodes, on-prem and a cloud, with Kueue and the placer; they stay up
  burst-down   end those
`

// nodeName is what the node of the demo is called.
const nodeName = "demo"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) != 1 {
		fmt.Fprint(os.Stderr, usage)
		return errors.New("one argument is needed")
	}
	switch args[0] {
	case "up", "burst":
		if missing := lab.Missing(); missing != "" {
			return fmt.Errorf("this machine lacks %s", missing)
		}
		if args[0] == "burst" {
			return showBurst(ctx)
		}
		return up(ctx)
	case "down":
		return down(ctx, nodeName)
	case "burst-down":
		return down(ctx, burst.NodeNames(burstName)[burst.OnPrem])
	}
	fmt.Fprint(os.Stderr, usage)
	return fmt.Errorf("there is no command %q", args[0])
}

// down ends a node, and those that have joined it.
func down(ctx context.Context, name string) error {
	kit, err := lab.NewKit(os.Stdout)
	if err != nil {
		return err
	}
	return kit.Down(ctx, name)
}
