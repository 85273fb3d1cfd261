// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

var version = regexp.MustCompile(`_v\d$`)

// Each function of the driver's library that this package calls has its row, and only those
// have one. Calls are told by their names, so a method of another type may pass for one.
func TestEveryCallHasItsRow(t *testing.T) {
	methods := map[string]bool{}
	for _, of := range []reflect.Type{
		reflect.TypeFor[nvml.Interface](), reflect.TypeFor[nvml.Device](), reflect.TypeFor[nvml.GpuInstance](),
		reflect.TypeFor[nvml.ComputeInstance](), reflect.TypeFor[nvml.EventSet](),
	} {
		for i := range of.NumMethod() {
			methods[of.Method(i).Name] = true
		}
	}
	delete(methods, "Extensions") // go-nvml's own

	// A row's method has the symbol's name, without nvml and what the method is of.
	rows := map[string]*function{}
	seen := map[string]bool{}
	for _, f := range functions {
		if seen[f.symbol] || !strings.HasPrefix(f.symbol, "nvml") || (f.vital == "") == (f.unknown == "") {
			t.Errorf("row %+v: want one row for each symbol, vital or with what is unknown without it", *f)
		}
		seen[f.symbol] = true
		name := strings.TrimPrefix(f.symbol, "nvml")
		for _, of := range []string{"", "Device", "GpuInstance", "ComputeInstance", "EventSet"} {
			if method, ok := strings.CutPrefix(name, of); ok {
				for _, method := range []string{method, version.ReplaceAllString(method, "")} {
					if methods[method] {
						rows[method] = f
					}
				}
			}
		}
	}

	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	called := 0
	for _, file := range files {
		if !strings.HasSuffix(file.Name(), ".go") || strings.HasSuffix(file.Name(), "_test.go") {
			continue
		}
		set := token.NewFileSet()
		tree, err := parser.ParseFile(set, file.Name(), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok || !methods[s.Sel.Name] {
				return true
			}
			if called++; rows[s.Sel.Name] == nil {
				t.Errorf("%s: %s has no row in the table of functions", set.Position(s.Pos()), s.Sel.Name)
			}
			return true
		})
	}
	if called < len(functions) {
		t.Errorf("%d calls of the driver were found for %d rows", called, len(functions))
	}
}
