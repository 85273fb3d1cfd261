// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const pieces = module + "internal/piece"

// tables are the two files that know the kinds of pieces besides internal/piece.
var tables = []string{"internal/deviceplugin/kinds.go", "internal/dra/kinds.go"}

// stillDecide are the packages that decide on kinds in other places yet, and in how many. The
// placer is built anew.
var stillDecide = map[string]int{"internal/placer": 28}

// kindUses are the uses of a kind, or of the type of its pieces, outside of internal/piece and
// the two tables: "internal/plan/plan.go:12: KindWhole". planted is as for [uses].
func kindUses(root string, planted map[string]string) (found []string, err error) {
	all, err := uses(root, []string{"internal/piece"}, planted, ofKind)
	for _, u := range all {
		if !slices.Contains(tables, u.file) {
			found = append(found, fmt.Sprintf("%s:%d: %s", u.file, u.line, u.object.Name()))
		}
	}
	return found, err
}

// ofKind reports whether an object is a kind of pieces, or the type of the pieces of one. OfDynamic
// is neither: it says which kind is meant, and not what follows from that.
func ofKind(o types.Object) bool {
	if o.Pkg() == nil || o.Pkg().Path() != pieces || o.Name() == "OfDynamic" {
		return false
	}
	scope := o.Pkg().Scope()
	switch o := o.(type) {
	case *types.Const:
		return types.Identical(o.Type(), scope.Lookup("Kind").Type())
	case *types.TypeName:
		of := scope.Lookup("Piece").Type().Underlying().(*types.Interface)
		return !types.IsInterface(o.Type()) && types.Implements(o.Type(), of)
	}
	return false
}

// What depends on the kind of a piece stands in internal/piece and in the two tables.
func TestKindsAreDecidedInOnePlace(t *testing.T) {
	const root = "../.."
	uses, err := kindUses(root, nil)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, u := range uses {
		at, _, _ := strings.Cut(u, ":")
		count[filepath.Dir(at)]++
		if stillDecide[filepath.Dir(at)] == 0 {
			t.Errorf("%s: ask the piece or its kind, or put it into a table (%s)", u, strings.Join(tables, ", "))
		}
	}
	for at, n := range stillDecide {
		if count[at] != n {
			t.Errorf("%s decides on kinds in %d places, and %d are allowed: ask the piece, or write down here that there are fewer", at, count[at], n)
		}
	}
	planted := map[string]string{"internal/usage": `package usage

import "example.com/gpu-agent/internal/piece"

func planted(p piece.Piece) bool {
	_, units := p.(piece.Units)
	return units || p.Kind() == piece.KindWhole
}
`}
	more, err := kindUses(root, planted)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"internal/usage/planted.go:6: Units", "internal/usage/planted.go:7: KindWhole"}; !slices.Equal(slices.DeleteFunc(more, func(u string) bool { return slices.Contains(uses, u) }), want) {
		t.Errorf("two uses were planted, and %v was found, want %v", more, want)
	}
}

// The lint stage finds a switch over a closed set that leaves one of them out.
func TestClosedSets(t *testing.T) {
	dir := t.TempDir()
	tool, planted, overlay := filepath.Join(dir, "closed"), filepath.Join(dir, "planted.go"), filepath.Join(dir, "overlay.json")
	build := exec.Command("go", "build", "-o", tool, "./closed")
	build.Dir = "../tools"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(root, "internal/ledger/planted.go"): planted}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ cases, want string }{
		{"Waiting, Taken, Making, Open, Parked, Released", "missing cases in switch of type ledger.Phase: ledger.Reserved"},
		{"Reserved, Waiting, Taken, Making, Open, Parked, Released", ""},
	} {
		text := "package ledger\n\nfunc planted(p Phase) bool {\n\tswitch p {\n\tcase " + c.cases + ":\n\t\treturn true\n\t}\n\treturn false\n}\n"
		for file, body := range map[string]string{planted: text, overlay: string(replace)} {
			if err := os.WriteFile(file, []byte(body), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		vet := exec.Command("go", "vet", "-vettool="+tool, "-overlay="+overlay, "./internal/ledger")
		vet.Dir = root
		if out, err := vet.CombinedOutput(); (err == nil) != (c.want == "") || !strings.Contains(string(out), c.want) {
			t.Errorf("a switch over the phases %s: %v: %s; want %q", c.cases, err, out, c.want)
		}
	}
}
