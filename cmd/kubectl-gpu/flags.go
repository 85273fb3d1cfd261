// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/kube/pluginkube"
)

// connection are the flags of every command that asks the cluster.
type connection struct {
	names   command.Domains
	options pluginkube.Options
}

func (t *connection) register(fs *pflag.FlagSet) {
	o := &t.options
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "",
		"`file` with clusters and credentials (default: $KUBECONFIG, or ~/.kube/config)")
	fs.StringVar(&o.Context, "context", "", "`name` of a context in it (default: its current one)")
	fs.StringVarP(&o.Namespace, "namespace", "n", "",
		"`name` of the namespace of pods and Jobs (default: the context's)")
	fs.StringVar(&o.As, "as", "", "`user` to act as")
	fs.StringArrayVar(&o.AsGroups, "as-group", nil, "`group` to act as a member of, with --as; repeatable")
	fs.DurationVar(&o.Timeout, "request-timeout", 15*time.Second, "`time` limit of one request to the API server")
	fs.StringVar(&o.AgentNamespace, "agent-namespace", "gpu-agent", "`name` of the namespace of the agent's pods")
	t.names.Register(fs)
}

// open reads the kubeconfig.
func (t *connection) open() (*pluginkube.Client, error) {
	if err := t.names.Complete(); err != nil {
		return nil, err
	}
	if t.options.Timeout <= 0 {
		return nil, command.Usagef("--request-timeout must be longer than 0")
	}
	t.options.Domain, t.options.ResourceDomain = t.names.Domain, t.names.ResourceDomain
	return pluginkube.Open(t.options)
}

// outputFlag adds --output.
func outputFlag(fs *pflag.FlagSet) *command.Choice {
	c := &command.Choice{Value: "text", Of: []string{"text", "json"}}
	fs.VarP(c, "output", "o", "what to print: text for people, or json for programs")
	return c
}

// oneNode takes the name of a node as the only argument.
func oneNode(c *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return command.Usagef("the node is missing: write %s NODE", c.Name())
	case len(args) > 1:
		return command.Usagef("unexpected argument %q: write one node", args[1])
	}
	return nil
}

// completeNodes completes the names of nodes that have a GPUNode, as at most so many arguments; less
// than 0 is any number.
func completeNodes(to *connection, most int) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if most >= 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		client, err := to.open()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, _ := client.Names(c.Context(), "node", "") // a shell shows no errors
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
