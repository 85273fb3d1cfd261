// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// listed is what go list says of a package.
type listed struct {
	ImportPath, Dir, Export    string
	GoFiles, CgoFiles, Imports []string
	Standard                   bool
}

// use is a place of the product that names an object of another package.
type use struct {
	file   string // by its path below the root
	line   int
	object types.Object
}

// uses are the places of the product that name an object of which wanted says so, in the order
// of files and lines, tests left out. Objects are those of the packages of, by their paths below
// the root. A file of planted, by its package's path, is read besides.
func uses(root string, of []string, planted map[string]string, wanted func(types.Object) bool) ([]use, error) {
	list := exec.Command("go", "list", "-e", "-export", "-deps", "-json=ImportPath,Dir,Export,GoFiles,CgoFiles,Imports,Standard", "./cmd/...", "./internal/...", "./pkg/...")
	list.Dir = root
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("list the packages: %w", err)
	}
	var all []listed
	exports := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		all, exports[p.ImportPath] = append(all, p), p.Export
	}
	fset := token.NewFileSet()
	config := types.Config{Importer: importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })}
	var found []use
	for _, p := range all {
		at := strings.TrimPrefix(p.ImportPath, module)
		imports := slices.ContainsFunc(of, func(o string) bool { return slices.Contains(p.Imports, module+o) })
		if p.Standard || !imports && planted[at] == "" {
			continue
		}
		files, err := parsed(fset, p, planted[at])
		if err != nil {
			return nil, err
		}
		info := types.Info{Uses: map[*ast.Ident]types.Object{}}
		if _, err := config.Check(p.ImportPath, fset, files, &info); err != nil {
			return nil, fmt.Errorf("check %s: %w", p.ImportPath, err)
		}
		for id, o := range info.Uses {
			if o.Pkg() != nil && o.Pkg().Path() != p.ImportPath && wanted(o) {
				pos := fset.Position(id.Pos())
				found = append(found, use{at + "/" + filepath.Base(pos.Filename), pos.Line, o})
			}
		}
	}
	slices.SortFunc(found, func(a, b use) int {
		return strings.Compare(fmt.Sprintf("%s %6d %s", a.file, a.line, a.object.Name()), fmt.Sprintf("%s %6d %s", b.file, b.line, b.object.Name()))
	})
	return found, nil
}

// parsed are the files of a package, and one that is planted.
func parsed(fset *token.FileSet, p listed, planted string) (files []*ast.File, err error) {
	for _, name := range append(p.GoFiles, p.CgoFiles...) {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	if planted != "" {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, "planted.go"), planted, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}
