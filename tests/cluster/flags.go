// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
)

// flagSet is a flag.FlagSet whose errors are returned once, in one sentence.
type flagSet struct {
	*flag.FlagSet
	arguments string // how the usage line names what follows the flags
	about     string // further help
}

func newFlagSet(command, arguments string) *flagSet {
	fs := &flagSet{FlagSet: flag.NewFlagSet(command, flag.ContinueOnError), arguments: arguments}
	fs.SetOutput(discard{})
	fs.Usage = func() {}
	return fs
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// parse returns the arguments after the flags, of which there must be at least
// low and, unless high is negative, at most high.
func (fs *flagSet) parse(args []string, low, high int) ([]string, error) {
	err := fs.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fs.SetOutput(os.Stdout)
		fmt.Printf("usage: cluster %s [FLAGS] %s\n%s", fs.Name(), fs.arguments, fs.about)
		fs.PrintDefaults()
		return nil, exitStatus(0)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", fs.Name(), err)
	}
	if n := fs.NArg(); n < low || high >= 0 && n > high {
		return nil, fmt.Errorf("%s: wrong number of arguments %q; usage: cluster %s [FLAGS] %s", fs.Name(), fs.Args(), fs.Name(), fs.arguments)
	}
	return fs.Args(), nil
}

// list is a repeatable flag.
type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

// withEnv returns env with the pairs K=V replaced or added. A later pair of the
// same name wins.
func withEnv(env []string, pairs ...string) []string {
	set := map[string]bool{}
	for _, p := range pairs {
		name, _, _ := strings.Cut(p, "=")
		set[name] = true
	}
	var out []string
	for _, e := range env {
		if name, _, _ := strings.Cut(e, "="); !set[name] {
			out = append(out, e)
		}
	}
	return append(out, pairs...)
}
