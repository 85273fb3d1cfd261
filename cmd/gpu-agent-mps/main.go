// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
)

const name = "gpu-agent-mps"

// newRoot makes the commands.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   name,
		Short: "keep the MPS daemons of a node's GPUs",
		Long: `Keeps an MPS control daemon for each GPU of this node whose partition has compute: mps, as the
agent asks.`,
	}
	root.AddCommand(newRun(), newSupervise(), newProbe(), command.NewVersion(name, build()))
	return root
}

// The linker sets these to what the program was built from.
var release, commit, date string

func build() command.Build { return command.Build{Release: release, Commit: commit, Date: date} }

// prefix begins the environment variables of flags. It is the agent's: the flags mean the same.
const prefix = "GPU_AGENT_"

func main() { os.Exit(command.Main(newRoot(), prefix)) }
