// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/pkg/topology"
)

// newTopology makes `gpu-agent topology`. Its output is like that of `nvidia-smi topo -m`.
func newTopology() *cobra.Command {
	var d driverFlags
	var from string
	var output *command.Choice
	c := &cobra.Command{
		Use:   "topology",
		Short: "print how close GPUs, CPUs and network cards are to each other",
		Long: `Prints how near this node's GPUs, CPUs and RDMA network cards are to each other, as
nvidia-smi topo -m does.`,
		Example: "gpu-agent topology --inventory node-1.json",
		RunE: func(c *cobra.Command, _ []string) error {
			inv, err := inventoryFrom(c.Context(), consoleOf(c), &d, from)
			if err != nil {
				return err
			}
			m := topology.New(inv).Matrix()
			if output.Value == "json" {
				return command.PrintJSON(c.OutOrStdout(), m)
			}
			return m.WriteText(c.OutOrStdout())
		},
	}
	d.register(c.Flags())
	inventoryFlag(c.Flags(), &from)
	output = outputFlag(c.Flags(), "text", "json")
	return c
}
