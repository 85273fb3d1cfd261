// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// checkout is what the files of a checkout use of each other. All paths are relative to its
// top, with slashes.
type checkout struct {
	root string
	// files are all of it, sorted, without those that git ignores by their names.
	files []string
	// packages are the directories with Go files.
	packages map[string]*goDir
	// modules maps the path of each module to its directory.
	modules map[string]string
}

// goDir is a directory with Go files.
type goDir struct {
	module string // the directory of its module
	// files are the package's own: those to which no package is nearer. They include what it
	// embeds and C sources in directories below it.
	files []string
	// uses are the directories of the packages of the checkout that it imports, and its tests
	// import.
	uses, testsUse []string
	// names are the files, directories and packages of the checkout that strings in its code
	// name: what it reads, builds or runs.
	names, testsName []string
}

// readCheckout reads the sources below root. It takes each Go file, whatever its build
// constraints, and knows imports within the checkout alone: go.mod and go.sum stand for the
// others.
func readCheckout(root string) (*checkout, error) {
	c := &checkout{root: root, packages: map[string]*goDir{}, modules: map[string]string{}}
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		switch {
		case rel == ".":
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") || rel == "bin" || rel == "dist"):
			return fs.SkipDir
		case d.Type().IsRegular() && !strings.HasPrefix(d.Name(), "."):
			c.files = append(c.files, rel)
			if strings.HasSuffix(rel, ".go") {
				c.packages[path.Dir(rel)] = &goDir{}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the checkout's files: %w", err)
	}
	slices.Sort(c.files)
	for _, f := range c.files {
		if path.Base(f) != "go.mod" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, f))
		if err != nil {
			return nil, fmt.Errorf("read the checkout's modules: %w", err)
		}
		for line := range strings.Lines(string(text)) {
			if name, ok := strings.CutPrefix(line, "module "); ok {
				c.modules[strings.TrimSpace(name)] = path.Dir(f)
			}
		}
	}
	for _, f := range c.files {
		if p := c.packages[c.nearest(f)]; p != nil {
			p.files = append(p.files, f)
		}
	}
	for _, f := range c.files {
		if strings.HasSuffix(f, ".go") {
			if err := c.readSource(f); err != nil {
				return nil, err
			}
		}
	}
	return c, nil
}

// nearest is the directory of the package that a file belongs to: its own, or the next one
// above that has Go files. A module's own go.mod and go.sum belong to no package.
func (c *checkout) nearest(file string) string {
	if base := path.Base(file); base == "go.mod" || base == "go.sum" {
		return ""
	}
	for dir := path.Dir(file); ; dir = path.Dir(dir) {
		if c.packages[dir] != nil {
			return dir
		}
		if dir == "." {
			return ""
		}
	}
}

// readSource notes what a Go file imports and names.
func (c *checkout) readSource(file string) error {
	dir := path.Dir(file)
	p := c.packages[dir]
	if p.module == "" {
		p.module = c.moduleOf(dir)
	}
	src, err := parser.ParseFile(token.NewFileSet(), filepath.Join(c.root, file), nil, parser.SkipObjectResolution)
	if err != nil {
		return fmt.Errorf("read what %s uses: %w", file, err)
	}
	isTest := strings.HasSuffix(file, "_test.go")
	uses, names := &p.uses, &p.names
	if isTest {
		uses, names = &p.testsUse, &p.testsName
	}
	for _, i := range src.Imports {
		if name, err := strconv.Unquote(i.Path.Value); err == nil {
			if dir, ok := c.dirOf(name); ok {
				*uses = append(*uses, dir)
			}
		}
	}
	// Texts of the product tell people where to read on; they open nothing.
	if !isTest && !strings.HasPrefix(dir, "tests") && !strings.HasPrefix(dir, "deployments") {
		return nil
	}
	ast.Inspect(src, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BasicLit:
			*names = append(*names, c.named(dir, literal(n))...)
		case *ast.CallExpr:
			var parts []string
			for _, a := range n.Args {
				if text := literal(a); text != "" {
					parts = append(parts, text)
				}
			}
			if f, ok := n.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "Join" && len(parts) > 1 {
				*names = append(*names, c.named(dir, path.Join(parts...))...)
			}
		}
		return true
	})
	return nil
}

// literal is the value of a string in Go source, and "" for anything else.
func literal(e ast.Expr) string {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return ""
	}
	text, err := strconv.Unquote(lit.Value)
	if err != nil {
		return ""
	}
	return text
}

// named are the files and directories of the checkout that a string in a package's code may
// name: a path with a slash, from the package's directory or from the top, or the path of a
// package. Patterns name all that match them. The top itself is not named: programs run there.
func (c *checkout) named(dir, text string) []string {
	if !strings.Contains(text, "/") || strings.HasPrefix(text, "/") || len(text) > 200 || strings.ContainsAny(text, " \n") {
		return nil
	}
	if dir, ok := c.dirOf(text); ok && dir != "." {
		return []string{dir}
	}
	var found []string
	for _, from := range []string{dir, "."} {
		at := path.Join(from, text)
		if at == "." || strings.HasPrefix(at, "..") {
			continue
		}
		matches, err := filepath.Glob(filepath.Join(c.root, at))
		if err != nil {
			continue // no pattern, and no name of a file
		}
		for _, m := range matches {
			if rel, err := filepath.Rel(c.root, m); err == nil {
				found = append(found, filepath.ToSlash(rel))
			}
		}
	}
	return found
}

// dirOf is the directory of a package of the checkout.
func (c *checkout) dirOf(importPath string) (string, bool) {
	for module, at := range c.modules {
		if rest, ok := strings.CutPrefix(importPath+"/", module+"/"); ok {
			if dir := path.Join(at, rest); c.packages[dir] != nil {
				return dir, true
			}
		}
	}
	return "", false
}

// moduleOf is the directory of the module that a directory is in.
func (c *checkout) moduleOf(dir string) string {
	dirs := slices.Collect(maps.Values(c.modules))
	for ; ; dir = path.Dir(dir) {
		if dir == "." || slices.Contains(dirs, dir) {
			return dir
		}
	}
}

// gathering collects the files that something is made of.
type gathering struct {
	from *checkout
	into map[string]bool
	seen map[string]bool
}

// add takes a file, or a directory with all that is below it and what packages there use.
func (g *gathering) add(name string) {
	if g.seen[name] {
		return
	}
	g.seen[name] = true
	if g.from.packages[name] != nil {
		g.addPackage(name, false)
	}
	for _, f := range g.from.files {
		// The tests in a directory are run by their own stage alone.
		if f == name || strings.HasPrefix(f, name+"/") && !strings.HasSuffix(f, "_test.go") {
			g.into[f] = true
		}
	}
}

// addPackage takes a package with all that it uses and names and, if asked for, its tests.
func (g *gathering) addPackage(dir string, tests bool) {
	key := fmt.Sprint(dir, " tests ", tests)
	p := g.from.packages[dir]
	if p == nil || g.seen[key] {
		return
	}
	g.seen[key] = true
	for _, f := range p.files {
		if tests || !strings.HasSuffix(f, "_test.go") && !strings.Contains(f, "/testdata/") {
			g.into[f] = true
		}
	}
	for _, f := range []string{"go.mod", "go.sum"} {
		g.into[path.Join(p.module, f)] = true
	}
	uses, names := p.uses, p.names
	if tests {
		uses, names = slices.Concat(uses, p.testsUse), slices.Concat(names, p.testsName)
	}
	for _, dir := range uses {
		g.addPackage(dir, false)
	}
	for _, name := range names {
		g.add(name)
	}
}

// inputs are the files that a stage of a list depends on: those of the packages that its
// commands name, of what it declares to read, and the inputs of the stages that it builds
// upon.
func (c *checkout) inputs(s stage, list []stage) map[string]bool {
	g := &gathering{from: c, into: map[string]bool{}, seen: map[string]bool{}}
	g.addStage(s, list)
	// A module without a go.sum has none.
	maps.DeleteFunc(g.into, func(f string, _ bool) bool { _, found := slices.BinarySearch(c.files, f); return !found })
	return g.into
}

func (g *gathering) addStage(s stage, list []stage) {
	for _, name := range s.reads {
		g.add(name)
	}
	for _, cmd := range s.commands {
		tests := slices.Contains(cmd.args, "test")
		for _, arg := range cmd.args {
			at, all := strings.CutSuffix(arg, "/...")
			if at != "." && !strings.HasPrefix(at, "./") {
				if dir, ok := g.from.dirOf(at); ok { // named by its import path
					g.addPackage(dir, tests)
				}
				continue
			}
			dir := path.Join(filepath.ToSlash(cmd.in), at)
			g.addPackage(dir, tests)
			if !all {
				continue
			}
			for below, p := range g.from.packages {
				if p.module == g.from.moduleOf(dir) && (dir == "." || strings.HasPrefix(below, dir+"/")) {
					g.addPackage(below, tests)
				}
			}
		}
	}
	for _, one := range list {
		if slices.Contains(s.after, one.name) {
			g.addStage(one, list)
		}
	}
}
