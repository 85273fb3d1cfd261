// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/kubectlgpu"
)

// newRoot makes the commands.
func newRoot() *cobra.Command {
	var to connection
	var output *command.Choice
	root := &cobra.Command{
		Use:         "kubectl-gpu",
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpu"},
		Short:       "show the GPUs of a cluster, and why a pod has none",
		Long: `Shows the nodes with GPUs: how they are laid out, what is free and in which pieces, and what is
wrong. Reading GPUNodes takes the ClusterRole gpu-agent-view. What else is seen, such as cordons,
depends on what you may read.`,
		Example: "kubectl gpu",
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := to.open()
			if err != nil {
				return err
			}
			fleet, err := kubectlgpu.ReadFleet(c.Context(), client)
			if err != nil {
				return err
			}
			return show(c.OutOrStdout(), output, fleet, fleet.Write)
		},
	}
	to.register(root.Flags())
	output = outputFlag(root.Flags())
	root.AddCommand(newWhy(), newStatus(), newTop(), newPlan(), newCheck(), newUsage(), newLogs(),
		newBundle(), newVerify(), command.NewVersion("kubectl gpu", build()))
	return root
}

// The linker sets these to what the program was built from.
var release, commit, date string

func build() command.Build { return command.Build{Release: release, Commit: commit, Date: date} }

// prefix begins the environment variables of flags.
const prefix = "KUBECTL_GPU_"

func main() { os.Exit(command.Main(newRoot(), prefix)) }

// show prints an answer in the format that was asked for; write prints it for people.
func show(out io.Writer, format *command.Choice, answer any, write func(io.Writer) error) error {
	if format.Value == "json" {
		return command.PrintJSON(out, answer)
	}
	return write(out)
}
