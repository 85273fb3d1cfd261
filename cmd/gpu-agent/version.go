// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// newVersion makes `gpu-agent version`.
func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "print the version, the commit and its date",
		Example: "gpu-agent version",
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(c.OutOrStdout(), versionLine())
			return err
		},
	}
}

// Set by the build (-ldflags "-X main.release=…"): the release, the commit, and its date, which is
// the same whenever it is built.
var release, commit, date string

// version is the release, or the commit that was built.
func version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// versionLine is what people want to know of a program that they have found.
func versionLine() string {
	return fmt.Sprintf("%s (commit %s of %s, %s %s/%s)", version(), cmp.Or(commit, "unknown"), cmp.Or(date, "unknown date"), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
