// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// defect is a patch that puts a mended defect back, with what its head says of it.
type defect struct {
	name   string // of its file, without the ending
	draw   string // first or second
	class  string
	place  string // among the candidates of its class, in the order of the draw
	commit string // that mended it
	kind   string // reverse: of the commit's decisive lines; by hand: of the same kind, in today's code
	grave  string // what users lose, or no
	text   string // what the product does wrong
	// by is the smallest set whose stages find it: "make test", unless the head says that
	// another is needed.
	by   string
	file string
}

var (
	kinds  = []string{"reverse", "by hand"}
	graves = []string{"loses data", "breaks a cap", "hurts a running container", "lets somebody in", "no"}
	sets   = []string{"make test", "make test-all", "nothing"}
)

// readDefects reads all patches of a directory, in the order of their names.
func readDefects(dir string) ([]defect, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	var list []defect
	var errs []error
	for _, file := range files {
		d, err := readDefect(file)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", file, err))
			continue
		}
		list = append(list, d)
	}
	return list, errors.Join(errs...)
}

func readDefect(file string) (defect, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return defect{}, err
	}
	file, err = filepath.Abs(file)
	if err != nil {
		return defect{}, err
	}
	d := defect{name: strings.TrimSuffix(filepath.Base(file), ".patch"), file: file, by: sets[0]}
	head, patch, _ := strings.Cut(string(text), "\n\n")
	fields := map[string]*string{"Draw": &d.draw, "Class": &d.class, "Place": &d.place, "Commit": &d.commit, "Kind": &d.kind, "Grave": &d.grave, "Defect": &d.text, "Found by": &d.by}
	for line := range strings.Lines(head) {
		key, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		if field := fields[key]; ok && field != nil {
			*field = value
			continue
		}
		return defect{}, fmt.Errorf("the head has the line %q; want one of Draw, Class, Place, Commit, Kind, Grave, Defect, Found by", line)
	}
	for key, field := range fields {
		if *field == "" {
			return defect{}, fmt.Errorf("the head lacks %s", key)
		}
	}
	for key, known := range map[*string][]string{&d.kind: kinds, &d.grave: graves, &d.by: sets} {
		if !slices.Contains(known, *key) {
			return defect{}, fmt.Errorf("%q is none of %q", *key, known)
		}
	}
	if !slices.ContainsFunc(classes, func(c class) bool { return c.name == d.class }) {
		return defect{}, fmt.Errorf("there is no class %q", d.class)
	}
	if !strings.HasPrefix(patch, "diff --git ") {
		return defect{}, errors.New("after the head and an empty line comes what git diff prints")
	}
	return d, nil
}

// files are those that the patch changes.
func (d *defect) files() ([]string, error) {
	text, err := os.ReadFile(d.file)
	if err != nil {
		return nil, err
	}
	var files []string
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "+++ b/"); ok {
			files = append(files, strings.TrimSpace(name))
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s changes no file", d.file)
	}
	return files, nil
}
