// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The picture in the documents is the program's.
func TestPictureIsTheProgram(t *testing.T) {
	const root = "../.."
	want, err := render(root)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(root, picture))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what the imports and the table in %s say: go run ./tests/architecture", picture, tableFile)
	}
	again, err := render(root)
	if err != nil || !bytes.Equal(again, want) {
		t.Errorf("it is drawn in two ways from the same source (%v)", err)
	}
}

// The phases in the page are internal/ledger's, and its lists of files those that name a member
// of a closed set.
func TestPageIsDrawn(t *testing.T) {
	const root = "../.."
	want, err := drawnPage(root)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(root, page)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s has other phases than internal/ledger, or other files that name members of closed sets (%v): go run ./tests/architecture", page, err)
	}
}

// What is left out follows from what is drawn, and nothing else is left out.
func TestReduce(t *testing.T) {
	imports := func(paths ...string) *pack {
		p := &pack{imports: map[string]bool{}}
		for _, path := range paths {
			p.imports[path] = true
		}
		return p
	}
	packs := map[string]*pack{"a": imports("b", "c", "d"), "b": imports("d"), "c": imports(), "d": imports()}
	reduce(packs)
	if a, b := packs["a"].imports, packs["b"].imports; len(a) != 2 || !a["b"] || !a["c"] || !b["d"] {
		t.Errorf("a imports %v, b %v", a, b)
	}
}

// Files, types and functions that the page names are there, and a method is its type's.
func TestPageNamesWhatIsThere(t *testing.T) {
	const root = "../.."
	text, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		t.Fatal(err)
	}
	files, names, err := declared(root)
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, m := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(string(text), -1) {
		word := m[1]
		switch name := regexp.MustCompile(`^(?:([A-Za-z]+)\.)?([A-Za-z]{4,})$`).FindStringSubmatch(word); {
		case regexp.MustCompile(`^(cmd|internal|pkg|tests|docs|deployments)/[\w./-]+$`).MatchString(word):
			if _, err := os.Stat(filepath.Join(root, word)); err != nil {
				t.Errorf("%s: %v", word, err)
			}
		case strings.HasSuffix(word, ".go"):
			if !files[filepath.Base(word)] && word != "deps_test.go" {
				t.Errorf("there is no file %s", word)
			}
		case name != nil && name[1] != "":
			if !names[word] {
				t.Errorf("there is no %s, as a type's method or field or in a package of that name", word)
			}
		case name != nil && strings.ToLower(word) != word && !strings.HasPrefix(word, "Get") && !strings.HasPrefix(word, "Pre"):
			if !names[word] {
				t.Errorf("nothing is called %s", word)
			}
		default:
			continue
		}
		checked++
	}
	if checked < 80 {
		t.Errorf("%d names were checked: this test looks at nothing", checked)
	}
}

// declared are the files of the program, by their base names, and what is declared in them: by its name, of
// packages, types and interfaces as "package.Name", "Type.method" and "Type.field", too.
func declared(root string) (files, names map[string]bool, err error) {
	files, names = map[string]bool{}, map[string]bool{}
	for _, top := range []string{"cmd", "internal", "pkg", "deployments"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(p) != ".go" {
				return err
			}
			files[filepath.Base(p)] = true
			f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			for _, d := range f.Decls {
				declare(f.Name.Name, d, func(of, name string) { names[name], names[of+"."+name] = true, true })
			}
			return nil
		})
		if err != nil {
			return nil, nil, err
		}
	}
	return files, names, nil
}

// declare tells what a declaration of a package declares.
func declare(pkg string, d ast.Decl, tell func(of, name string)) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		tell(pkg, d.Name.Name)
		if d.Recv == nil {
			return
		}
		of := d.Recv.List[0].Type
		if pointer, ok := of.(*ast.StarExpr); ok {
			of = pointer.X
		}
		if generic, ok := of.(*ast.IndexExpr); ok {
			of = generic.X
		}
		if id, ok := of.(*ast.Ident); ok {
			tell(id.Name, d.Name.Name)
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.ValueSpec:
				for _, id := range s.Names {
					tell(pkg, id.Name)
				}
			case *ast.TypeSpec:
				tell(pkg, s.Name.Name)
				var fields *ast.FieldList
				switch of := s.Type.(type) {
				case *ast.StructType:
					fields = of.Fields
				case *ast.InterfaceType:
					fields = of.Methods
				default:
					continue
				}
				for _, field := range fields.List {
					for _, id := range field.Names {
						tell(s.Name.Name, id.Name)
					}
				}
			}
		}
	}
}
