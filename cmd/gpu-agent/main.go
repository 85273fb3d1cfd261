// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"example.com/gpu-agent/pkg/gpu"
)

const usage = `usage: gpu-agent COMMAND [FLAGS]

  run         own this node's GPUs: lay out, offer, account (the DaemonSet's program)
  inventory   print what the driver says of this node's GPUs (-o json for tools)
  check FILE  check a partition file against this node, or against --inventory FILE
  plan        print what a partition would make of this node, or of --inventory FILE, and whom it waits for
  topology    print how close GPUs, CPUs and network cards are to each other
  status      print what the agent on this node offers and who holds it
  usage       print who was granted how much of this node's GPUs, who used it, and who had them when
  advise      replay what was asked of this node on other partitions, and print the best
  placer      answer schedulers which node has room for a pod (a Deployment's program)
  certificates  make those by which kube-scheduler and the placer's door know each other
  cleanup     remove what agents have left on this node and its Node object
  export      print what the cluster's GPUs are for Kueue, Karpenter or Cluster Autoscaler
  completion  print what makes a shell complete commands and flags
  version     print the version, the commit and its date

gpu-agent COMMAND -h lists the flags, with an example. Each has a twin in the environment:
--driver-root is GPU_AGENT_DRIVER_ROOT.
`

// commands are those with flags.
var commands = map[string]func(ctx context.Context, c console, args []string) error{
	"run": run, "inventory": inventory, "check": check, "plan": plan, "topology": showTopology, "status": showStatus, "usage": showUsage, "advise": showAdvice, "placer": place, "certificates": makeCertificates, "cleanup": cleanUp, "export": exportTo,
}

// errUsage says that the command line was wrong, which has been reported already.
var errUsage = errors.New("wrong usage")

// console is where a command prints.
type console struct {
	in       io.Reader
	out, err io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := dispatch(ctx, console{os.Stdin, os.Stdout, os.Stderr}, os.Args[1:])
	told := ctx.Err() != nil // to end, which the next program would not know
	stop()
	if errors.Is(err, gpu.ErrReloaded) && !told {
		// The driver's library cannot be unloaded: this process becomes another.
		fmt.Fprintln(os.Stderr, "restarting:", err)
		err = fmt.Errorf("restart: %w", syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
	}
	switch {
	case err == nil:
	case errors.Is(err, errUsage):
		os.Exit(2)
	case errors.Is(err, errBlocked): // and says by whom in its output
		os.Exit(3)
	case errors.Is(err, errNotApplied): // and says why in its output
		os.Exit(4)
	default:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func dispatch(ctx context.Context, c console, args []string) error {
	if len(args) == 0 {
		fmt.Fprint(c.err, usage)
		return errUsage
	}
	switch name := args[0]; name {
	case "version":
		fmt.Fprintln(c.out, versionLine())
		return nil
	case "completion":
		if len(args) != 2 || completions[args[1]] == "" {
			fmt.Fprint(c.err, completionUsage)
			return errUsage
		}
		fmt.Fprint(c.out, completions[args[1]])
		return nil
	case "help", "-h", "--help":
		fmt.Fprint(c.out, usage)
		return nil
	default:
		if command := commands[name]; command != nil {
			return command(ctx, c, args[1:])
		}
		fmt.Fprintf(c.err, "gpu-agent: there is no command %q\n\n%s", name, usage)
		return errUsage
	}
}
