// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// use is a flag with the commands that have it.
type use struct {
	*pflag.Flag
	commands []string // without the program's name
}

// flags returns the flags of all commands, by name. A flag is there once, or once for each
// different default or text.
func (p *Program) flags() []use {
	var out []use
	for _, c := range p.commands() {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if p.variable(f) == "" {
				return
			}
			i := slices.IndexFunc(out, func(u use) bool {
				return u.Name == f.Name && u.DefValue == f.DefValue && u.Usage == f.Usage && u.Shorthand == f.Shorthand
			})
			if i < 0 {
				i = len(out)
				out = append(out, use{Flag: f})
			}
			out[i].commands = append(out[i].commands, p.short(c))
		})
	}
	for _, c := range p.commands() {
		if c.HasParent() && c.HasSubCommands() {
			p.gather(c, out)
		}
	}
	slices.SortStableFunc(out, func(a, b use) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// gather replaces the commands below c by c itself, for each flag that all of them have.
func (p *Program) gather(c *cobra.Command, flags []use) {
	var all []string
	for _, sub := range c.Commands() {
		all = append(all, p.short(sub))
	}
	for i := range flags {
		f := &flags[i]
		if !slices.ContainsFunc(all, func(name string) bool { return !slices.Contains(f.commands, name) }) {
			at := slices.Index(f.commands, all[0])
			f.commands = slices.DeleteFunc(f.commands, func(name string) bool { return slices.Contains(all, name) })
			f.commands = slices.Insert(f.commands, at, p.short(c))
		}
	}
}

// short returns a command's name without the program's.
func (p *Program) short(c *cobra.Command) string {
	return strings.TrimPrefix(c.CommandPath(), p.root.CommandPath()+" ")
}

// Flaws returns what is wrong with the program's commands and flags: one without a description
// or an example, or one name with two meanings. It returns nil if all is well.
func (p *Program) Flaws() (out []string) {
	for _, c := range p.commands() {
		path := c.CommandPath()
		if c.Short == "" || strings.HasSuffix(c.Short, ".") || strings.ToLower(c.Short[:1]) != c.Short[:1] {
			out = append(out, fmt.Sprintf("%s: Short is %q: it is to be a phrase without a full stop", path, c.Short))
		}
		if !c.HasSubCommands() && !strings.Contains(c.Example, path) {
			out = append(out, fmt.Sprintf("%s: its example is %q", path, c.Example))
		}
		_, words, _ := strings.Cut(c.Example, path)
		for word := range strings.FieldsSeq(words) {
			name, long := strings.CutPrefix(word, "--")
			if name, _, _ = strings.Cut(name, "="); long && c.Flags().Lookup(name) == nil {
				out = append(out,
					fmt.Sprintf("%s: its example has the flag --%s, and the command has none", path, name))
			}
		}
	}
	all := p.flags()
	for i, f := range all {
		if f.Usage == "" {
			out = append(out, fmt.Sprintf("--%s of %s has no text", f.Name, f.commands[0]))
		}
		if i > 0 && all[i-1].Name == f.Name {
			out = append(out, fmt.Sprintf("--%s means one thing to %s and another to %s",
				f.Name, all[i-1].commands[0], f.commands[0]))
		}
		name := p.variable(f.Flag)
		for at := range name {
			if serviceForms.MatchString(name[at:]) {
				out = append(out, fmt.Sprintf("--%s: Kubernetes sets %s for a Service", f.Name, name))
			}
		}
	}
	return out
}

// Reference returns the commands and flags as Markdown, under headings of the third level.
func (p *Program) Reference() string {
	var b strings.Builder
	fmt.Fprintf(&b, "### Commands\n\n`%s COMMAND --help` explains a command, with an example.\n\n"+
		"| command | does |\n|---|---|\n", p.root.CommandPath())
	for _, c := range p.commands() {
		if !c.HasSubCommands() {
			c.DisableFlagsInUseLine = true
			fmt.Fprintf(&b, "| `%s` | %s |\n", cell(c.UseLine()), cell(c.Short))
		}
	}
	fmt.Fprint(&b, "\n### Flags\n\n"+
		"A flag has one meaning in all commands that have it. "+
		"If it is not on the command line, its environment variable\n"+
		"counts. Any other variable that begins with `"+p.prefix+"` is an error, "+
		"so that a misspelt one is seen. Those that Kubernetes\n"+
		"sets for Services ("+"`"+p.prefix+"SERVICE_HOST` and the like) are ignored.\n\n"+
		"| flag | variable | default | of | meaning |\n|---|---|---|---|---|\n")
	for _, f := range p.flags() {
		value, text := pflag.UnquoteUsage(f.Flag)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if f.Name == "output" {
			value = "format"
		}
		standard := ""
		if f.DefValue != "" {
			standard = "`" + f.DefValue + "`"
		}
		name = strings.TrimSpace(name + " " + value)
		commands := strings.Join(f.commands, ", ")
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s | %s |\n",
			cell(name), p.variable(f.Flag), cell(standard), commands, cell(text))
	}
	return b.String()
}

// ExitCodes returns the exit codes of all programs as a Markdown table.
func ExitCodes() string {
	var b strings.Builder
	fmt.Fprint(&b, "| code | means |\n|---|---|\n")
	for code, meaning := range meanings {
		fmt.Fprintf(&b, "| %d | %s |\n", code, cell(meaning))
	}
	return b.String()
}

// cell escapes a text for one cell of a table.
func cell(text string) string { return strings.NewReplacer("|", `\|`, "\n", " ").Replace(text) }

// Splice returns a document with text between the lines <!-- NAME: begin … --> and <!-- NAME:
// end -->, in place of what was there. It fails if there are no such lines.
func Splice(document, name, text string) (string, error) {
	begin := strings.Index(document, "<!-- "+name+": begin")
	end := strings.Index(document, "<!-- "+name+": end -->")
	if begin < 0 || end < begin {
		return "", fmt.Errorf("the document has no lines <!-- %s: begin --> and <!-- %[1]s: end -->", name)
	}
	line := begin + strings.Index(document[begin:], "\n") + 1
	return document[:line] + "\n" + text + "\n" + document[end:], nil
}
