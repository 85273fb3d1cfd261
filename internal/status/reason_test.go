// SPDX-License-Identifier: Apache-2.0

package status

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestReasonsAreInTheTable: a code is for programs, whose authors have the table in
// docs/conditions.md and nothing else. Each is there once, with a meaning, none is there
// that does not exist, and none exists that nothing says.
func TestReasonsAreInTheTable(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "reason.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var codes []string
	ast.Inspect(f, func(n ast.Node) bool {
		if c, ok := n.(*ast.ValueSpec); ok {
			code, err := strconv.Unquote(c.Values[0].(*ast.BasicLit).Value)
			if err != nil || c.Names[0].Name != code {
				t.Errorf("%s has the value %q; want the same word", c.Names[0].Name, code)
			}
			codes = append(codes, code)
		}
		return true
	})
	doc, err := os.ReadFile("../../docs/conditions.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(doc), "## Reason codes\n")
	table, _, _ = strings.Cut(table, "\n#")
	var rows []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| ..+ \\|$").FindAllStringSubmatch(table, -1) {
		rows = append(rows, m[1])
	}
	slices.Sort(codes)
	slices.Sort(rows)
	if !slices.Equal(codes, rows) || len(codes) < 40 {
		t.Errorf("the code has the reasons\n%q, docs/conditions.md has\n%q", codes, rows)
	}
	said := map[string]bool{}
	err = fs.WalkDir(os.DirFS("../.."), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path == "tests":
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		text, err := os.ReadFile("../../" + path)
		for _, m := range regexp.MustCompile(`\bstatus\.(\w+)`).FindAllSubmatch(text, -1) {
			said[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, code := range codes {
		if !said[code] {
			t.Errorf("nothing says %s", code)
		}
	}
}
