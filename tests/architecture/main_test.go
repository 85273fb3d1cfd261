// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
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

// The phases in the page are internal/ledger's.
func TestPhasesAreTheLedgers(t *testing.T) {
	const root = "../.."
	want, err := withPhases(root)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(root, page)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s has other phases than internal/ledger (%v): go run ./tests/architecture", page, err)
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

// Files, types and functions that the page names are there.
func TestPageNamesWhatIsThere(t *testing.T) {
	const root = "../.."
	page, err := os.ReadFile(filepath.Join(root, "docs/architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	files, names := map[string]bool{}, map[string]bool{}
	declared := regexp.MustCompile(`(?m)\b(?:func|func \(\w+ \*?\w+\)|type|const|var) (\w+)|^\t(\w+)\b`)
	for _, top := range []string{"cmd", "internal", "pkg", "deployments"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(p) != ".go" {
				return err
			}
			files[filepath.Base(p)] = true
			text, err := os.ReadFile(p)
			for _, m := range declared.FindAllSubmatch(text, -1) {
				names[string(m[1])], names[string(m[2])] = true, true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	checked := 0
	for _, m := range regexp.MustCompile("`([^`\n]+)`").FindAllStringSubmatch(string(page), -1) {
		word := m[1]
		switch name := regexp.MustCompile(`^(?:([A-Za-z]+)\.)?([A-Za-z]{4,})$`).FindStringSubmatch(word); {
		case regexp.MustCompile(`^(cmd|internal|pkg|tests|docs|deployments)/[\w./-]+$`).MatchString(word):
			if _, err := os.Stat(filepath.Join(root, word)); err != nil && word != "internal/dra" && word != "pkg/dra" { // to be built
				t.Errorf("%s: %v", word, err)
			}
		case strings.HasSuffix(word, ".go"):
			if !files[filepath.Base(word)] && word != "deps_test.go" {
				t.Errorf("there is no file %s", word)
			}
		case name != nil && name[1] != "" || name != nil && strings.ToLower(word) != word && !strings.HasPrefix(word, "Get") && !strings.HasPrefix(word, "Pre"):
			if !names[name[2]] {
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
