// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/kubectlgpu"
	"example.com/gpu-agent/internal/status"
)

// newStatus makes `kubectl gpu status`.
func newStatus() *cobra.Command {
	var to connection
	var output *command.Choice
	c := &cobra.Command{
		Use:   "status NODE",
		Short: "print what the agent of a node offers, and who holds it",
		Long: `Prints what "gpu-agent status" prints on the node. It names pods of all namespaces, and takes
the role gpu-agent-operator.`,
		Example: "kubectl gpu status node-1",
		Args:    oneNode,
		RunE: func(c *cobra.Command, args []string) error {
			pages, err := to.pages(c.Context(), args[0])
			if err != nil {
				return err
			}
			defer pages.Close()
			s, err := pages.Status(c.Context())
			if err != nil {
				return err
			}
			return show(c.OutOrStdout(), output, s, func(out io.Writer) error {
				return status.WriteText(out, s, textOptions(out))
			})
		},
	}
	to.register(c.Flags())
	output = outputFlag(c.Flags())
	c.ValidArgsFunction = completeNodes(&to, 1)
	return c
}

// pages opens the pages of a node's agent.
func (t *connection) pages(ctx context.Context, node string) (*kubectlgpu.Pages, error) {
	client, err := t.open()
	if err != nil {
		return nil, err
	}
	return kubectlgpu.OpenPages(ctx, client, node)
}

// textOptions returns options that suit the terminal, or another output.
func textOptions(out io.Writer) status.TextOptions {
	t := command.TerminalOf(out)
	return status.TextOptions{Width: t.Width, Color: t.Color, ASCII: t.ASCII, Now: time.Now()}
}

// newTop makes `kubectl gpu top`.
func newTop() *cobra.Command {
	var to connection
	var output *command.Choice
	c := &cobra.Command{
		Use:   "top [NODE]...",
		Short: "print what containers use of their GPU memory now, and their caps",
		Long: `Prints the memory of each container on each GPU, as the agents' watchdogs last saw it, with its cap
and what holds it to that: of these nodes, or of all, and with -n of one namespace. It takes the role
gpu-agent-operator.`,
		Example: "kubectl gpu top node-1",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			client, err := to.open()
			if err != nil {
				return err
			}
			top, failed := kubectlgpu.ReadTop(c.Context(), client, args, to.options.Namespace)
			return showSome(c.OutOrStdout(), output, top, failed)
		},
	}
	to.register(c.Flags())
	output = outputFlag(c.Flags())
	c.ValidArgsFunction = completeNodes(&to, -1)
	return c
}

// showSome prints an answer of some nodes, unless it is nil, and returns the error about the others.
func showSome[T any, P interface {
	*T
	Write(io.Writer) error
}](out io.Writer, format *command.Choice, answer P, failed error) error {
	if answer == nil {
		return failed
	}
	if err := show(out, format, answer, answer.Write); err != nil {
		return err
	}
	return failed
}

// newUsage makes `kubectl gpu usage`.
func newUsage() *cobra.Command {
	var to connection
	var q kubectlgpu.AccountQuery
	var output *command.Choice
	c := &cobra.Command{
		Use:   "usage [NODE]...",
		Short: "print how much of the GPUs each namespace was granted and used, or who held them at a time",
		Long: `Prints who was granted how much of the GPUs of these nodes, or of all, and used it: summed over the
nodes. With --at it prints who held them then. It reads the journals that the agents keep, and takes the
role gpu-agent-operator. Times are durations before now (24h), or in UTC: 2026-03-01,
2026-03-01T12:00, 2026-03-01T12:00:00Z, or 12:00 of today.`,
		Example: "kubectl gpu usage --since 24h --by pod",
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if q.GPU != "" && q.At == "" {
				return command.Usagef("--gpu goes with --at: write --at TIME --gpu %s", q.GPU)
			}
			client, err := to.open()
			if err != nil {
				return err
			}
			account, failed := kubectlgpu.ReadAccount(c.Context(), client, args, q)
			if account != nil {
				for _, note := range account.Notes {
					fmt.Fprintln(c.ErrOrStderr(), note)
				}
			}
			return showSome(c.OutOrStdout(), output, account, failed)
		},
	}
	fs := c.Flags()
	to.register(fs)
	fs.StringVar(&q.By, "by", "namespace",
		"what makes a `line`: namespace, pod, or label=KEY, a key that the agent's --usage-labels has")
	sinceFlag(fs, &q.Since)
	fs.StringVar(&q.Until, "until", "", "`time` to end at (default: the end)")
	fs.StringVar(&q.At, "at", "", "print who held something at this `time`")
	fs.StringVar(&q.GPU, "gpu", "", "with --at: only of the GPU with this `index` or UUID")
	output = outputFlag(fs)
	c.ValidArgsFunction = completeNodes(&to, -1)
	_ = c.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]cobra.Completion{"namespace", "pod", "label="},
		cobra.ShellCompDirectiveNoFileComp|cobra.ShellCompDirectiveNoSpace))
	return c
}

// sinceFlag adds --since.
func sinceFlag(fs *pflag.FlagSet, since *string) {
	fs.StringVar(since, "since", "", "`time` to begin at (default: the beginning)")
}

// newLogs makes `kubectl gpu logs`.
func newLogs() *cobra.Command {
	var to connection
	var o pluginkube.LogOptions
	var since string
	c := &cobra.Command{
		Use:     "logs NODE",
		Short:   "print the log of a node's agent",
		Long:    `Prints the log of a node's agent, whose pod it finds. It takes the role gpu-agent-operator.`,
		Example: "kubectl gpu logs node-1 --follow --tail 50",
		Args:    oneNode,
		RunE: func(c *cobra.Command, args []string) error {
			if o.Tail < 0 {
				return command.Usagef("--tail must not be negative")
			}
			if since != "" {
				var err error
				if o.Since, err = time.ParseDuration(since); err != nil || o.Since <= 0 {
					return command.Usagef("--since %q: write a duration before now, such as 10m", since)
				}
			}
			client, err := to.open()
			if err != nil {
				return err
			}
			return kubectlgpu.WriteLog(c.Context(), client, args[0], o, c.OutOrStdout())
		},
	}
	fs := c.Flags()
	to.register(fs)
	fs.BoolVarP(&o.Follow, "follow", "f", false, "go on with new lines")
	fs.BoolVarP(&o.Previous, "previous", "p", false, "the log of the run before, of an agent that has started again")
	fs.IntVar(&o.Tail, "tail", 0, "`number` of last lines; 0 prints all")
	sinceFlag(fs, &since)
	c.ValidArgsFunction = completeNodes(&to, 1)
	return c
}

// partitionFlags are the flags of commands that judge a partition file.
type partitionFlags struct {
	to        connection
	partition string
	nodes     []string
}

func (p *partitionFlags) register(c *cobra.Command) {
	fs := c.Flags()
	p.to.register(fs)
	fs.StringVar(&p.partition, "partition", "",
		"`name` of a partition in the file (default: the one that each node uses)")
	fs.StringArrayVar(&p.nodes, "node", nil, "`name` of a node; repeatable")
	_ = c.RegisterFlagCompletionFunc("node", completeNodes(&p.to, -1))
	_ = c.RegisterFlagCompletionFunc("partition", completePartition)
}

// completePartition completes --partition with the names in the file.
func completePartition(c *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	const none = cobra.ShellCompDirectiveNoFileComp
	if len(args) != 1 || args[0] == "-" { // the shell must not read the standard input
		return nil, none
	}
	f, err := readFile(c, args[0])
	if err != nil {
		return nil, none
	}
	other := func(name string) bool { return !strings.HasPrefix(name, typed) }
	return slices.DeleteFunc(f.Partitions, other), none
}

// oneFile takes the name of a file as the only argument.
func oneFile(c *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return command.Usagef("the partition file is missing: write %s FILE, or - for the standard input", c.Name())
	case len(args) > 1:
		return command.Usagef("unexpected argument %q: write one file", args[1])
	}
	return nil
}

func readFile(c *cobra.Command, name string) (*kubectlgpu.File, error) {
	from := c.InOrStdin()
	if name == "-" {
		name = "standard input"
	} else {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		from = f
	}
	file, err := kubectlgpu.ReadFile(name, from)
	if _, wrong := errors.AsType[config.Errors](err); wrong {
		return nil, &command.Error{Exit: command.Invalid, Err: err}
	}
	return file, err
}

// ask reads the file and asks the agents.
func (p *partitionFlags) ask(c *cobra.Command, name string, brief bool) (*kubectlgpu.Verdicts, error) {
	file, err := readFile(c, name)
	if err != nil {
		return nil, err
	}
	client, err := p.to.open()
	if err != nil {
		return nil, err
	}
	return kubectlgpu.Ask(c.Context(), client, file, p.nodes, p.partition, brief)
}

// completeFile completes the name of a file as the only argument.
func completeFile(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return []cobra.Completion{"yaml", "yml", "json"}, cobra.ShellCompDirectiveFilterFileExt
}

// newPlan makes `kubectl gpu plan`.
func newPlan() *cobra.Command {
	var p partitionFlags
	var all bool
	var output *command.Choice
	c := &cobra.Command{
		Use:   "plan FILE",
		Short: "print what a partition file would do to nodes, and which holders it waits for",
		Long: `Prints what a partition file would do to the GPUs of a node, or of --all: layouts, each step on the
hardware, which holders it waits for, and what pods can ask for then. It changes nothing. The file is
a bare one or a manifest with its ConfigMap. The agents answer; it takes the role gpu-agent-operator.
The exit code is that of the worst node: 0 if the partition would be applied, 3 if holders are in the
way, 4 if it would be pending or failed for another reason, and 5 if it is wrong.`,
		Example: "kubectl gpu plan partitions.yaml --node node-1",
		Args:    oneFile,
		RunE: func(c *cobra.Command, args []string) error {
			if all == (len(p.nodes) > 0) {
				return command.Usagef("say for which nodes: write --node NODE, or --all")
			}
			v, failed := p.ask(c, args[0], false)
			if v == nil {
				return failed
			}
			err := show(c.OutOrStdout(), output, v, v.WritePlan)
			if err = errors.Join(err, failed); err != nil {
				return err
			}
			return outcomes[v.Worst()]
		},
	}
	p.register(c)
	c.Flags().BoolVar(&all, "all", false, "ask the agents of all nodes")
	output = outputFlag(c.Flags())
	c.ValidArgsFunction = completeFile
	return c
}

// outcomes are exit codes of a plan that was printed: the output has the reason.
var outcomes = map[kubectlgpu.Worst]error{kubectlgpu.Waits: &command.Error{Exit: command.Blocked},
	kubectlgpu.Stays: &command.Error{Exit: command.NotApplied}, kubectlgpu.Wrong: &command.Error{Exit: command.Invalid}}

// newCheck makes `kubectl gpu check`.
func newCheck() *cobra.Command {
	var p partitionFlags
	var output *command.Choice
	c := &cobra.Command{
		Use:   "check FILE",
		Short: "check a partition file, against the GPUs of all nodes",
		Long: `Checks a partition file against the GPUs of each node, or of those of --node: the partition that the
node uses. It names partitions that no node uses and does not judge them. The file is a bare one or a
manifest with its ConfigMap; mistakes are printed as file:line: reason, with the lines of the file that
you have. The exit code is 5 if it is wrong or does not fit. A partition that fits and would wait for
holders is not wrong. The agents answer; it takes the role gpu-agent-operator.`,
		Example: "kubectl gpu check partitions.yaml",
		Args:    oneFile,
		RunE: func(c *cobra.Command, args []string) error {
			v, failed := p.ask(c, args[0], true)
			if v == nil {
				return failed
			}
			err := show(c.OutOrStdout(), output, v, v.WriteCheck)
			n := v.Misfits()
			switch {
			case err != nil:
				return err
			case n > 0:
				wrong := fmt.Errorf("%s does not fit %d of %d nodes", args[0], n, len(v.Nodes))
				if failed != nil {
					wrong = fmt.Errorf("%w; %w", wrong, failed)
				}
				return &command.Error{Exit: command.Invalid, Err: wrong}
			}
			return failed
		},
	}
	p.register(c)
	output = outputFlag(c.Flags())
	c.ValidArgsFunction = completeFile
	return c
}
