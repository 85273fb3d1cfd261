// SPDX-License-Identifier: Apache-2.0

// Package commandtest holds docs/reference.md to what the programs say of their own commands and flags. Each
// program's test has a section of the document, or several, and gives the text that it must have:
//
//	commandtest.Reference(t, *update, map[string]string{"gpu-placer": command.New(newRoot(), prefix).Reference()})
//
// With the flag -update of these tests the sections are written anew. Only tests import the package.
package commandtest
