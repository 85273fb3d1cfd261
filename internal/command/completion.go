// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// completion makes `completion SHELL`.
func (p *Program) completion() *cobra.Command {
	name := p.root.CommandPath()
	shells := []struct {
		name string
		gen  func(io.Writer) error
	}{
		{"bash", func(w io.Writer) error { return p.root.GenBashCompletionV2(w, true) }},
		{"zsh", p.root.GenZshCompletion},
		{"fish", func(w io.Writer) error { return p.root.GenFishCompletion(w, true) }},
		{"powershell", p.root.GenPowerShellCompletionWithDesc},
	}
	c := &cobra.Command{
		Use:   "completion SHELL",
		Short: "print a script that lets a shell complete commands, flags and values",
		Long: fmt.Sprintf(`Prints a script that lets a shell complete commands, flags and values: bash, zsh,
fish or powershell.

  source <(%[1]s completion bash)            # or zsh, behind autoload -U compinit; compinit
  %[1]s completion fish | source
  %[1]s completion powershell | Out-String | Invoke-Expression`, name),
		Example: fmt.Sprintf("source <(%s completion bash)", name),
		RunE: func(c *cobra.Command, args []string) error {
			for _, shell := range shells {
				if len(args) == 1 && args[0] == shell.name {
					return shell.gen(c.OutOrStdout())
				}
			}
			return Usagef("write one shell: bash, zsh, fish or powershell")
		},
		Args: cobra.ArbitraryArgs,
	}
	for _, shell := range shells {
		c.ValidArgs = append(c.ValidArgs, shell.name)
	}
	return c
}

// completeValues registers with cobra how the values of all flags are completed. Only a shell's
// request needs it, so a running program does not keep it in memory.
func (p *Program) completeValues() {
	for _, c := range p.commands() {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if _, has := c.GetFlagCompletionFunc(f.Name); !has && f.Value.Type() != "bool" {
				_ = c.RegisterFlagCompletionFunc(f.Name, completeFlag(f)) // the flag is there
			}
		})
	}
}

func completeFlag(f *pflag.Flag) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if few, ok := f.Value.(interface{ complete(string) []string }); ok {
			var out []cobra.Completion
			for _, value := range few.complete(typed) {
				if strings.HasPrefix(value, typed) {
					out = append(out, value)
				}
			}
			return out, cobra.ShellCompDirectiveNoFileComp
		}
		switch value, _ := pflag.UnquoteUsage(f); value {
		case "file", "socket":
			return nil, cobra.ShellCompDirectiveDefault
		case "directory":
			return nil, cobra.ShellCompDirectiveFilterDirs
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
}
