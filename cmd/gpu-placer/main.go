// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
)

// newRoot makes the commands.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "gpu-placer",
		Short: "tell schedulers which node has room for a pod",
		Long: `Tells schedulers which node of a cluster has room for a pod that asks for pieces of GPUs,
from what the agents on the nodes report.`,
	}
	root.AddCommand(newRun(), newCertificates(), command.NewVersion("gpu-placer", build()))
	return root
}

// The linker sets these to what the program was built from.
var release, commit, date string

func build() command.Build { return command.Build{Release: release, Commit: commit, Date: date} }

// prefix begins the environment variables of flags.
const prefix = "GPU_PLACER_"

func main() { os.Exit(command.Main(newRoot(), prefix)) }
