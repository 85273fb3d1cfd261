// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
)

// newStatus makes `gpu-agent status`: it asks the agent that runs on this node.
func newStatus() *cobra.Command {
	var http string
	var output *command.Choice
	c := &cobra.Command{
		Use:     "status",
		Short:   "print what the agent on this node offers and who holds it",
		Example: "kubectl exec -n gpu-agent ds/gpu-agent -- gpu-agent status",
		RunE: func(c *cobra.Command, _ []string) error {
			return showStatus(c.Context(), consoleOf(c), http, output.Value)
		},
	}
	httpFlag(c.Flags(), &http)
	output = outputFlag(c.Flags(), "text", "json")
	return c
}

// httpFlag adds --http, the address of metrics, probes and the status.
func httpFlag(fs *pflag.FlagSet, address *string) {
	fs.StringVar(address, "http", ":9500", "`address` of metrics, probes and the agent's status; empty for none")
}

func showStatus(ctx context.Context, c console, address, format string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	s, err := agentobs.Fetch(ctx, address)
	if err != nil {
		return err
	}
	if format == "json" {
		return command.PrintJSON(c.out, s)
	}
	return status.WriteText(c.out, s, textOptions(c))
}

// textOptions returns options that suit the terminal, or another output.
func textOptions(c console) status.TextOptions {
	t := command.TerminalOf(c.out)
	return status.TextOptions{Width: t.Width, Color: t.Color, ASCII: t.ASCII, Now: time.Now()}
}
