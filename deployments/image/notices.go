// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
)

// module is a Go module of which a program has code.
type module struct {
	path, version string
	programs      []string
	texts         []text
}

func (m module) String() string { return m.path + " " + m.version }

// text is a licence, or what else is to go with the code.
type text struct {
	of   string // whose it is
	file string // in the module
	data []byte
}

// licenceFile knows them by their names, as modules have them.
var licenceFile = regexp.MustCompile(`(?i)^(un)?(licen[cs]e|copying|copyright|notice|patents)([._-].*)?$`)

// linked are the modules that are in programs of the folder bin, Go's own library among them.
func linked(ctx context.Context, checkout, bin string, programs []string) ([]module, error) {
	var all []module
	for _, name := range programs {
		info, err := buildinfo.ReadFile(filepath.Join(bin, name))
		if err != nil {
			return nil, fmt.Errorf("ask %s for its modules: %w", name, err)
		}
		folders, err := packageFolders(ctx, checkout, info)
		if err != nil {
			return nil, fmt.Errorf("look for the packages of %s: %w", name, err)
		}
		wanted := []*debug.Module{{Path: standardLibrary, Version: strings.TrimPrefix(info.GoVersion, "go")}}
		for _, m := range append(info.Deps, &info.Main) {
			if m.Replace != nil {
				return nil, fmt.Errorf("%s has %s replaced by %s; a released program has modules as they are",
					name, m.Path, m.Replace.Path)
			}
			if m.Path != ownModule {
				wanted = append(wanted, m)
			}
		}
		for _, m := range wanted {
			i := slices.IndexFunc(all, func(o module) bool { return o.path == m.Path && o.version == m.Version })
			if i < 0 {
				i = len(all)
				all = append(all, module{path: m.Path, version: m.Version})
			}
			all[i].programs = append(all[i].programs, name)
			if err := all[i].addTexts(folders[m.Path]); err != nil {
				return nil, err
			}
		}
	}
	slices.SortFunc(all, func(a, b module) int {
		return cmp.Or(cmp.Compare(a.path, b.path), cmp.Compare(a.version, b.version))
	})
	return all, nil
}

const (
	ownModule = "example.com/gpu-agent"
	// As vulnerability scanners call it.
	standardLibrary = "stdlib"
)

// folders are a module's: its own, and those of its packages that are in a program.
type folders struct {
	root     string
	packages []string
}

// packageFolders asks Go which packages a program is made from, by what the program says of
// its build.
func packageFolders(ctx context.Context, checkout string, info *debug.BuildInfo) (map[string]folders, error) {
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	root, err := run(ctx, checkout, "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	all := map[string]folders{standardLibrary: {root: strings.TrimSpace(string(root))}}
	out, err := run(ctx, checkout, "env", "GOOS="+settings["GOOS"], "GOARCH="+settings["GOARCH"], "CGO_ENABLED="+settings["CGO_ENABLED"],
		"go", "list", "-deps", "-json=Dir,Module", "-tags="+settings["-tags"], info.Path)
	if err != nil {
		return nil, err
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			Dir    string
			Module *struct{ Path, Dir string }
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("read what go list says: %w", err)
		}
		if p.Module != nil {
			f := all[p.Module.Path]
			f.root = p.Module.Dir
			f.packages = append(f.packages, p.Dir)
			all[p.Module.Path] = f
		}
	}
}

// addTexts adds the licence files of a module: at its top, and beside its packages or above
// them, where code of others has its own.
func (m *module) addTexts(f folders) error {
	if f.root == "" {
		return fmt.Errorf("%s is in a program, but go list does not know it: build the programs anew", m)
	}
	seen := map[string]bool{}
	for _, dir := range append(f.packages, f.root) {
		for ; !seen[dir]; dir = filepath.Dir(dir) {
			seen[dir] = true
			if err := m.addFolder(f.root, dir); err != nil {
				return err
			}
			if dir == f.root {
				break
			}
		}
	}
	if len(m.texts) == 0 {
		return fmt.Errorf("%s has no licence file: nobody may hand it on without one; "+
			"take another module, or ask its authors", m)
	}
	slices.SortFunc(m.texts, func(a, b text) int { return cmp.Compare(a.file, b.file) })
	return nil
}

func (m *module) addFolder(root, dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("look for the licence of %s: %w", m, err)
	}
	for _, d := range list {
		if !d.Type().IsRegular() || !licenceFile.MatchString(d.Name()) || filepath.Ext(d.Name()) == ".go" {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, d.Name()))
		if err != nil {
			return fmt.Errorf("read a licence of %s: %w", m, err)
		}
		name, err := filepath.Rel(root, filepath.Join(dir, d.Name()))
		if err != nil {
			return fmt.Errorf("read a licence of %s: %w", m, err)
		}
		if !slices.ContainsFunc(m.texts, func(t text) bool { return t.file == name }) {
			m.texts = append(m.texts, text{of: m.String(), file: name, data: data})
		}
	}
	return nil
}

// notices are the licences of all that is in an image, or in a program, beside our own code. A text
// that several have is there once. what is "image" or "program".
func notices(what string, modules []module, others []text) []byte {
	var all []text
	for _, m := range modules {
		all = append(all, m.texts...)
	}
	all = append(all, others...)
	var order []string
	users := map[string][]string{}
	for _, t := range all {
		body := strings.TrimSpace(string(t.data))
		if users[body] == nil {
			order = append(order, body)
		}
		users[body] = append(users[body], t.of+": "+t.file)
	}
	const line = "--------------------------------------------------------------------------------"
	var out bytes.Buffer
	fmt.Fprintf(&out, "This %s has code of others. Before each text are those whose licence or notice it is.\n", what)
	for _, body := range order {
		fmt.Fprintf(&out, "\n%s\n%s\n%s\n\n%s\n", line, strings.Join(users[body], "\n"), line, body)
	}
	return out.Bytes()
}
