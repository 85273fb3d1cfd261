// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"go/types"
	"maps"
	"path"
	"slices"
	"strings"
)

// closed are the sets of which the page lists the files that name a member, beside the kinds of
// pieces: these stand in two tables alone, which TestKindsAreDecidedInOnePlace holds.
var closed = []struct{ pkg, name, what string }{
	{"internal/config", "Mode", "a mode of a partition's entry"},
	{"internal/ledger", "FrontEnd", "a front-end"},
	{"internal/ledger", "Phase", "a phase of an allocation"},
}

// listSets writes a row for each closed set: the files of other packages that name a member.
func listSets(b *bytes.Buffer, root string) error {
	var of []string
	for _, set := range closed {
		of = append(of, set.pkg)
	}
	named, err := uses(root, of, nil, func(o types.Object) bool { return setOf(o) >= 0 })
	if err != nil {
		return err
	}
	files := make([]map[string][]string, len(closed)) // of each set, by package
	for _, u := range named {
		i := setOf(u.object)
		if files[i] == nil {
			files[i] = map[string][]string{}
		}
		if dir := path.Dir(u.file); !slices.Contains(files[i][dir], path.Base(u.file)) {
			files[i][dir] = append(files[i][dir], path.Base(u.file))
		}
	}
	fmt.Fprint(b, "\n| a new member of | is named in |\n|---|---|\n")
	for i, set := range closed {
		var dirs []string
		for _, dir := range slices.Sorted(maps.Keys(files[i])) {
			dirs = append(dirs, fmt.Sprintf("`%s`: %s", dir, strings.Join(files[i][dir], ", ")))
		}
		fmt.Fprintf(b, "| `%s.%s`, %s | %s |\n", path.Base(set.pkg), set.name, set.what, strings.Join(dirs, "; "))
	}
	fmt.Fprintln(b)
	return nil
}

// setOf is the place of the closed set that an object is a member of, -1 if it is of none.
func setOf(o types.Object) int {
	c, ok := o.(*types.Const)
	if !ok {
		return -1
	}
	t, ok := c.Type().(*types.Named)
	if !ok {
		return -1
	}
	for i, set := range closed {
		if t.Obj().Name() == set.name && t.Obj().Pkg() != nil && t.Obj().Pkg().Path() == module+set.pkg {
			return i
		}
	}
	return -1
}
