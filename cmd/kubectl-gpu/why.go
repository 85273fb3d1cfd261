// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/kube/pluginkube"
)

// kinds are the kinds of subjects by the names that people write.
var kinds = map[string]string{"pod": "pod", "pods": "pod", "po": "pod", "job": "job", "jobs": "job", "job.batch": "job",
	"node": "node", "nodes": "node", "no": "node"}

// newWhy makes `kubectl gpu why`.
func newWhy() *cobra.Command {
	var to connection
	var output *command.Choice
	c := &cobra.Command{
		Use:   "why [pod/|job/|node/]NAME",
		Short: "say why a pod, a Job or a node has no GPU: the cause first, then the next step",
		Long: `Says why a pod has no GPU, a Job does not run, or a node offers less than it should: the cause in
the first line, then the next step, then what that follows from. It reads the pod, its Events, its
Workload of Kueue, GPUNodes, Nodes and the agent's pods, as far as you may, and says what it could
not see. Without a kind it takes the first of a pod, a Job and a node that has the name.`,
		Example: "kubectl gpu why pod/job-1 -n train",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			s, err := subject(args)
			if err != nil {
				return err
			}
			client, err := to.open()
			if err != nil {
				return err
			}
			s.Namespace = client.Namespace()
			facts, err := client.Look(c.Context(), s)
			if err != nil {
				return err
			}
			d := facts.Explain()
			return show(c.OutOrStdout(), output, &d, d.Write)
		},
	}
	to.register(c.Flags())
	output = outputFlag(c.Flags())
	c.ValidArgsFunction = completeSubjects(&to)
	return c
}

// subject reads the arguments: KIND/NAME, KIND NAME or NAME.
func subject(args []string) (s pluginkube.Subject, err error) {
	if len(args) == 1 {
		if kind, name, ok := strings.Cut(args[0], "/"); ok {
			args = []string{kind, name}
		}
	}
	switch len(args) {
	case 1:
		s.Name = args[0]
	case 2:
		s.Kind, s.Name = kinds[strings.ToLower(args[0])], args[1]
		if s.Kind == "" {
			return s, command.Usagef("%q is none of pod, job and node: write pod/NAME, job/NAME or node/NAME", args[0])
		}
	case 0:
		return s, command.Usagef("the pod, Job or node is missing: write pod/NAME, job/NAME or node/NAME")
	default:
		return s, command.Usagef("unexpected argument %q: write one pod, Job or node", args[2])
	}
	if s.Name == "" || strings.Contains(s.Name, "/") {
		return s, command.Usagef("%q is not a name: write pod/NAME, job/NAME or node/NAME, and the namespace with -n",
			strings.Join(args, "/"))
	}
	return s, nil
}

// completeSubjects completes kinds, and the names of a kind.
func completeSubjects(to *connection) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		const none = cobra.ShellCompDirectiveNoFileComp
		kind, _, slash := strings.Cut(typed, "/")
		if len(args) > 0 {
			kind = args[0]
		}
		switch {
		case len(args) > 1 || len(args) == 1 && kinds[kind] == "":
			return nil, none
		case len(args) == 0 && !slash:
			return []cobra.Completion{"pod/", "job/", "node/"}, none | cobra.ShellCompDirectiveNoSpace
		}
		client, err := to.open()
		if err != nil {
			return nil, none
		}
		names, _ := client.Names(c.Context(), kinds[kind], client.Namespace())
		var out []cobra.Completion
		for _, name := range slices.Sorted(slices.Values(names)) {
			if slash {
				name = kind + "/" + name
			}
			if strings.HasPrefix(name, typed) {
				out = append(out, name)
			}
		}
		return out, none
	}
}
