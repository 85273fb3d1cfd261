// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// Build is what a program was built from. The linker sets it (-ldflags "-X main.release=…"),
// and each field may be empty.
type Build struct {
	// Release is the version, Commit the commit that was built, and Date that commit's date. So
	// the date does not depend on when it was built.
	Release, Commit, Date string
}

// Version returns the release, or Go's version of the commit that was built.
func (b Build) Version() string {
	if b.Release != "" {
		return b.Release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// String returns all that people ask about a program: version, commit, date, Go and platform.
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

// NewMoved makes a command that has moved to another program. It is hidden, accepts any
// arguments, and fails as wrong usage with the text instead.
func NewMoved(name, instead string) *cobra.Command {
	moved := func(*cobra.Command, []string) error { return Usagef("%s", instead) }
	return &cobra.Command{
		Use: name, Hidden: true, DisableFlagParsing: true, Args: cobra.ArbitraryArgs,
		// This runs before the old command's variables are checked.
		PersistentPreRunE: moved, RunE: moved,
	}
}
