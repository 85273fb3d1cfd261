// SPDX-License-Identifier: Apache-2.0

package peers

import "context"

// Parted is mig-parted beside an emulated driver, whose kernel files are at their
// fixed places in this program's mount namespace (install.Mount).
type Parted struct {
	Program string // its path
	Root    string // the driver root, where it finds library and tool
}

// Run runs mig-parted in a mount namespace with a /proc/modules, and returns what
// it said on either stream. Its failure is an error with its exit status.
func (p Parted) Run(ctx context.Context, args ...string) (said string, err error) {
	return MIGParted.beside(ctx, p.Program, p.Root, args...)
}
