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

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/pkg/gpu"
)

// console is where a command reads and prints.
type console struct {
	in       io.Reader
	out, err io.Writer
}

// consoleOf returns the console of a command.
func consoleOf(c *cobra.Command) console {
	return console{c.InOrStdin(), c.OutOrStdout(), c.ErrOrStderr()}
}

// newRoot makes the commands.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "gpu-agent",
		Short: "own the NVIDIA GPUs of a Kubernetes node",
		Long: `Owns the NVIDIA GPUs of a Kubernetes node: lays them out as a partition file says, offers
the pieces to the kubelet, and reports what is left.`,
	}
	root.AddCommand(newRun(), newInventory(), newCheck(), newPlan(), newTopology(),
		newStatus(), newUsage(), newAdvise(), newParkProcess(), newCleanup(), newExport(), command.NewVersion("gpu-agent", build()),
		command.NewMoved("placer", "the placer is a program of its own, with an image of its own: "+
			"write gpu-placer run, and GPU_PLACER_… for its variables"),
		command.NewMoved("certificates", "the placer's program makes them: write gpu-placer certificates"))
	return root
}

// The linker sets these to what the program was built from.
var release, commit, date string

func build() command.Build { return command.Build{Release: release, Commit: commit, Date: date} }

// version returns the release, or the commit that was built.
func version() string { return build().Version() }

// prefix begins the environment variables of flags.
const prefix = "GPU_AGENT_"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command.New(newRoot(), prefix).Execute(ctx, os.Args[1:], os.Environ())
	told := ctx.Err() != nil // told to end; the next program would not know that
	stop()
	if errors.Is(err, gpu.ErrReloaded) && !told {
		// The driver's library cannot be unloaded, so the process executes the program again.
		fmt.Fprintln(os.Stderr, "restarting:", err)
		err = fmt.Errorf("restart: %w", syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
	}
	if err != nil && err.Error() != "" { // if the text is empty, the output has the reason already
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(int(command.ExitOf(err)))
}
