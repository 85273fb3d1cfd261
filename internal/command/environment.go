// SPDX-License-Identifier: Apache-2.0

package command

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// variable returns the environment variable of a flag; "" if it has none.
func (p *Program) variable(f *pflag.Flag) string {
	if f.Name == "help" {
		return ""
	}
	return p.prefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
}

// ofCobra are cobra's own variables, without the prefix. They set how it completes.
var ofCobra = []string{"ACTIVE_HELP", "COMPLETION_DESCRIPTIONS"}

// environment sets the flags that are not on the command line from their variables. It leaves
// pflag.Flag.Changed false. It refuses a variable if no command of the program has a flag for
// it.
func (p *Program) environment(c *cobra.Command) error {
	if c.Name() == "completion" || c.Name() == "help" || c.Name() == cobra.ShellCompRequestCmd {
		return nil // they must work even if a variable is wrong
	}
	set := map[string]string{}
	for _, entry := range p.environ {
		name, value, _ := strings.Cut(entry, "=")
		if _, again := set[name]; !again && strings.HasPrefix(name, p.prefix) {
			set[name] = value
		}
	}
	if len(set) == 0 {
		return nil
	}
	own := map[string]*pflag.Flag{}
	c.Flags().VisitAll(func(f *pflag.Flag) { own[p.variable(f)] = f })
	known := slices.Clone(ofCobra) // and those of all commands, since all that run in a pod share its environment
	for _, c := range p.commands() {
		c.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, strings.TrimPrefix(p.variable(f), p.prefix)) })
	}
	for _, name := range slices.Sorted(maps.Keys(set)) {
		switch f, rest := own[name], name[len(p.prefix):]; {
		case f != nil && f.Changed:
		case f != nil:
			if err := f.Value.Set(set[name]); err != nil {
				return Usagef("environment variable %s=%q: %w", name, set[name], err)
			}
		case slices.Contains(known, rest), ofService(name, set):
		default:
			if near := nearest(rest, known); near != "" {
				return Usagef("no flag has the environment variable %s: write %s", name, p.prefix+near)
			}
			return Usagef("no flag has the environment variable %s: unset it", name)
		}
	}
	return nil
}

// serviceForms matches the variables that the kubelet sets in a pod for each Service of its
// namespace, without the Service's name.
var serviceForms = regexp.MustCompile(`^_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|` +
	`PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// ofService reports whether the kubelet has set a variable for a Service. The kubelet then has
// also set NAME_SERVICE_HOST, the Service's address.
func ofService(name string, all map[string]string) bool {
	for other := range all {
		service, ok := strings.CutSuffix(other, "_SERVICE_HOST")
		if rest, of := strings.CutPrefix(name, service); ok && of && serviceForms.MatchString(rest) {
			return true
		}
	}
	return false
}
