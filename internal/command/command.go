// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Program is the command line of a program. Execute it once.
type Program struct {
	root    *cobra.Command
	prefix  string
	args    []string
	environ []string
}

// helpWidth is the largest width of help, in columns.
const helpWidth = 110

// Main runs the command of the process's arguments, until it ends or SIGINT or SIGTERM tells the process to end. root
// and prefix are those of New. It prints the error to the standard error, if that has a text: otherwise the output has
// the reason already. It returns the exit code.
func Main(root *cobra.Command, prefix string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := New(root, prefix).Execute(ctx, os.Args[1:], os.Environ())
	stop()
	if err != nil && err.Error() != "" {
		fmt.Fprintln(os.Stderr, err)
	}
	return int(ExitOf(err))
}

// New makes a program. root is its root command, with all others except help and completion;
// prefix begins its environment variables. A command whose Args is nil takes no arguments. A command
// that has others below it is run without arguments if it has a RunE.
func New(root *cobra.Command, prefix string) *Program {
	p := &Program{root: root, prefix: prefix}
	root.SilenceErrors, root.SilenceUsage = true, true
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(p.completion())
	root.SetHelpCommand(p.help())
	root.SetHelpFunc(p.printHelp)
	root.SetFlagErrorFunc(p.flagError)
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error { return p.environment(c) }
	for _, c := range p.commands() {
		c.Flags().BoolP("help", "h", false, "print this help")
		switch {
		case c.HasSubCommands():
			c.Args, c.RunE = cobra.ArbitraryArgs, alone(c.RunE)
		case c.Args == nil:
			c.Args, c.ValidArgsFunction = noArguments, cobra.NoFileCompletions
		}
	}
	return p
}

// Execute runs the command that args name. environ is the environment, as os.Environ returns
// it.
func (p *Program) Execute(ctx context.Context, args, environ []string) error {
	p.args, p.environ = append([]string{}, args...), environ
	p.root.SetArgs(p.args)
	if len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) {
		p.completeValues()
		// Completion that asks a server asks the one that the environment names. Cobra runs no hook of a
		// command that it only completes, and a shell shows no errors.
		if c, _, err := p.root.Find(args[1:]); err == nil {
			_ = p.environment(c)
		}
	} else if c, err := p.singleDash(); err != nil {
		return usage(c, err)
	}
	c, err := p.root.ExecuteContextC(ctx)
	return usage(c, err)
}

// usage puts the command's name before an error of wrong usage, on one line.
func usage(c *cobra.Command, err error) error {
	if ExitOf(err) != Usage {
		return err
	}
	line := strings.Join(strings.Fields(err.Error()), " ")
	return &Error{Usage, errors.New(c.CommandPath() + ": " + line)}
}

// commands returns the root and all commands below it, without help and moved ones. A command
// comes before those below it.
func (p *Program) commands() []*cobra.Command {
	out := []*cobra.Command{p.root}
	for i := 0; i < len(out); i++ {
		own := slices.Clone(out[i].Commands())
		out = slices.Insert(out, i+1, slices.DeleteFunc(own, func(c *cobra.Command) bool { return c.Hidden })...)
	}
	return out
}

// alone returns how a command runs that has others below it: by run if there are no arguments and
// run is not nil, and otherwise by noCommand.
func alone(run func(*cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		if run == nil || len(args) > 0 {
			return noCommand(c, args)
		}
		return run(c, args)
	}
}

// noCommand runs a command that has others below it: it returns an error of wrong usage.
func noCommand(c *cobra.Command, args []string) error {
	var names []string
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	switch {
	case len(args) == 0:
		return Usagef("a command is missing, one of %s", strings.Join(names, ", "))
	case nearest(args[0], names) != "":
		return Usagef("there is no command %q: write %s", args[0], nearest(args[0], names))
	}
	return Usagef("there is no command %q: the commands are %s", args[0], strings.Join(names, ", "))
}

func noArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return Usagef("unexpected argument %q: the command takes only flags", args[0])
	}
	return nil
}

// singleDash finds a long flag with a single dash. pflag would read it as several short ones:
// -node-name, or -host-root, which begins with the -h of help.
func (p *Program) singleDash() (*cobra.Command, error) {
	c, args, err := p.root.Find(p.args)
	if err != nil {
		return c, err
	}
	flags := c.Flags()
	for i := 0; i < len(args) && args[i] != "--"; i++ {
		name, _, hasValue := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		var f *pflag.Flag
		switch dashes := len(args[i]) - len(strings.TrimLeft(args[i], "-")); {
		case dashes == 1 && len(name) > 1 && flags.Lookup(name) != nil:
			return c, Usagef("-%s: write --%s", name, name)
		case dashes == 1 && len(name) == 1:
			f = flags.ShorthandLookup(name)
		case dashes == 2:
			f = flags.Lookup(name)
		}
		if f != nil && f.NoOptDefVal == "" && !hasValue {
			i++ // its value
		}
	}
	return c, nil
}

// flagError returns an error about a flag, in this package's wording.
func (p *Program) flagError(c *cobra.Command, err error) error {
	if c.HasSubCommands() {
		// The command is misspelt, and its flags are unknown only for that reason.
		if _, args, err := p.root.Find(p.args); err == nil {
			for _, arg := range args {
				if !strings.HasPrefix(arg, "-") {
					return noCommand(c, []string{arg})
				}
			}
		}
	}
	var missing *pflag.NotExistError
	var empty *pflag.ValueRequiredError
	var bad *pflag.InvalidValueError
	switch {
	case errors.As(err, &missing):
		dashes, name := "--", missing.GetSpecifiedName()
		if group := missing.GetSpecifiedShortnames(); group != "" {
			dashes, name = "-", group
		}
		name, _, _ = strings.Cut(name, "=")
		var names []string
		c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := nearest(name, names); near != "" {
			return Usagef("there is no flag %s%s: write --%s", dashes, name, near)
		}
		return Usagef("there is no flag %s%s: %s --help lists the flags", dashes, name, c.CommandPath())
	case errors.As(err, &empty):
		value, _ := pflag.UnquoteUsage(empty.GetFlag())
		return Usagef("--%s has no value: write --%[1]s %s", empty.GetFlag().Name, strings.ToUpper(value))
	case errors.As(err, &bad):
		return Usagef("--%s %q: %w", bad.GetFlag().Name, bad.GetValue(), errors.Unwrap(bad))
	}
	return Usagef("%w", err)
}

// nearest returns the name that a misspelt one was most likely meant to be, or "" if none is
// near.
func nearest(word string, names []string) string {
	best, least := "", max(1, len(word)/3)
	for _, name := range names {
		if d := distance(strings.ToLower(word), strings.ToLower(name)); d <= least {
			best, least = name, d-1
		}
	}
	if best != "" {
		return best
	}
	// If a word begins exactly one name, that name is near, too.
	for _, name := range names {
		if len(word) > 2 && strings.HasPrefix(name, word) {
			if best != "" {
				return ""
			}
			best = name
		}
	}
	return best
}

// distance returns how many letters to insert, delete, replace or swap with the next to turn a
// into b.
func distance(a, b string) int {
	to := make([][]int, len(a)+1) // to[i][j] is the distance of a[:i] and b[:j]
	for i := range to {
		to[i] = make([]int, len(b)+1)
		for j := range to[i] {
			switch {
			case i == 0 || j == 0:
				to[i][j] = i + j
			case a[i-1] == b[j-1]:
				to[i][j] = to[i-1][j-1]
			default:
				to[i][j] = 1 + min(to[i-1][j-1], to[i-1][j], to[i][j-1])
			}
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				to[i][j] = min(to[i][j], 1+to[i-2][j-2])
			}
		}
	}
	return to[len(a)][len(b)]
}

// help makes `help [COMMAND]`.
func (p *Program) help() *cobra.Command {
	c := &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "print the help of a command",
		Example: p.root.Name() + " help " + p.root.Commands()[0].Name(),
		Args:    cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			of, rest, err := c.Root().Find(args)
			switch {
			case err != nil:
				return err
			case len(rest) > 0 && of.HasSubCommands():
				return noCommand(of, rest)
			}
			p.printHelp(of, nil)
			return nil
		},
		ValidArgsFunction: completeCommands,
	}
	c.Flags().BoolP("help", "h", false, "print this help")
	return c
}

// completeCommands returns the commands below the one that is typed already.
func completeCommands(c *cobra.Command, args []string, _ string) (out []cobra.Completion, _ cobra.ShellCompDirective) {
	if of, rest, err := c.Root().Find(args); err == nil && len(rest) == 0 {
		for _, sub := range of.Commands() {
			if sub.IsAvailableCommand() {
				out = append(out, cobra.CompletionWithDesc(sub.Name(), sub.Short))
			}
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

// printHelp prints a command's help to standard output.
func (p *Program) printHelp(c *cobra.Command, _ []string) {
	out := c.OutOrStdout()
	text := c.Long
	if text == "" {
		text = strings.ToUpper(c.Short[:1]) + c.Short[1:] + "."
	}
	c.DisableFlagsInUseLine = true
	line := c.UseLine()
	if c.HasSubCommands() {
		line = c.CommandPath() + " COMMAND"
	}
	fmt.Fprintf(out, "%s\n\nUsage:\n  %s [FLAGS]\n", strings.TrimSpace(text), line)
	if c.Example != "" {
		fmt.Fprintf(out, "\nExample:\n  %s\n", c.Example)
	}
	if c.HasSubCommands() {
		fmt.Fprint(out, "\nCommands:\n")
		w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() {
				fmt.Fprintf(w, "  %s\t%s\n", sub.Name(), sub.Short)
			}
		}
		_ = w.Flush() // as with Fprintf above
	}
	fmt.Fprintf(out, "\nFlags:\n%s", c.Flags().FlagUsagesWrapped(helpWidth))
	if c.HasSubCommands() {
		fmt.Fprintf(out, "\n%s COMMAND --help explains a command, with an example.\n", c.CommandPath())
	}
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if name := p.variable(f); name != "" && text != "" {
			fmt.Fprintf(out, "\nEach flag has an environment variable: --%s is %s. The command line wins.\n",
				f.Name, name)
			text = ""
		}
	})
}
