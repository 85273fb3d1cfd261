// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// Build is what a program was built from, as the linker was told (-ldflags "-X main.release=…").
// Each may be empty.
type Build struct {
	// Release is the version, commit what it was built from, and date that of the commit: the
	// same whenever it is built.
	Release, Commit, Date string
}

// Version is the release, or what Go knows of the commit that was built.
func (b Build) Version() string {
	if b.Release != "" {
		return b.Release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// String is what people want to know of a program that they have found.
func (b Build) String() string {
	return fmt.Sprintf("%s (commit %s of %s, %s %s/%s)",
		b.Version(), cmp.Or(b.Commit, "unknown"), cmp.Or(b.Date, "unknown date"),
		runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// NewVersion makes `PROGRAM version`.
func NewVersion(program string, b Build) *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "print the version, the commit and its date",
		Example: program + " version",
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(c.OutOrStdout(), b)
			return err
		},
	}
}

// NewMoved makes a command that another program has now: it is told of nowhere, takes whatever
// the old one took, and is wrong usage that says what to write instead.
func NewMoved(name, instead string) *cobra.Command {
	moved := func(*cobra.Command, []string) error { return Usagef("%s", instead) }
	return &cobra.Command{
		Use: name, Hidden: true, DisableFlagParsing: true, Args: cobra.ArbitraryArgs,
		// Before variables that belonged to the old command are looked at.
		PersistentPreRunE: moved, RunE: moved,
	}
}
