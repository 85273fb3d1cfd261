// SPDX-License-Identifier: Apache-2.0

// Package shown reads the commands that documents show, for tests that run them.
//
// A command is in a code block that is indented, or between single back-quotes. Blocks between fences are
// files. A command that goes on behind a backslash is one, and a comment behind it is left out:
//
//	page, err := shown.Read("README.md")
//	for _, c := range page.Commands { fmt.Println(c) } // README.md:43: kubectl create namespace gpu-agent
//
// A text between back-quotes is a command if it begins with the name of one and has an argument at least.
// A test takes the commands that it runs by [Page.Take], and asks for the others by [Page.Left], so that a
// new one in a document is found.
package shown
