// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
)

// TestProseIsPlain holds the bars: 2.0 hard constructions per 1,000 words of comments and of
// texts, and 4 in the comments of one package. `go run ./tests/architecture/prose -v` names
// each place.
func TestProseIsPlain(t *testing.T) {
	t.Chdir("../../..")
	comments, texts, err := measure(product...)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		counts []count
		words  int // that there are at least: fewer mean that they were not found
	}{{"comments", comments, 100_000}, {"texts", texts, 10_000}} {
		sum := total(c.counts)
		t.Logf("%s: %.1f per 1,000 words (%d words)", c.name, sum.rate(), sum.words)
		if sum.words < c.words {
			t.Errorf("%s: %d words, want at least %d", c.name, sum.words, c.words)
		}
		if sum.rate() > 2 {
			t.Errorf("%s: %.1f hard constructions per 1,000 words, want at most 2.0", c.name, sum.rate())
		}
	}
	for _, c := range comments {
		if c.rate() > 4 && c.hard > 1 {
			t.Errorf("%s: %.1f hard constructions per 1,000 words of comment, want at most 4", c.dir, c.rate())
			for _, line := range c.lines {
				t.Log(line)
			}
		}
	}
}

// TestMeasure plants a hard construction in each kind of text that there is, and one where
// nobody reads it.
func TestMeasure(t *testing.T) {
	dir := t.TempDir()
	for name, src := range map[string]string{
		"a.go": "// SPDX-License-Identifier: Apache-2.0\n\n// Package a is for whoever reads it.\n//\n//\tnobody counts an example\n" +
			"package a\n\nimport _ \"nobody\"\n\ntype t struct {\n\tf int `a:\"nobody and nobody\"` // has nobody\n}\n\n" +
			"const two = \"for nobody\"\n\nvar e = errors.New(\"it is \" +\n\t\"said by way of a sign\")\n",
		"b.c":           "/* Returns 0 where\n * nobody is. */\nchar *s = \"// there is nobody here\"; // and \"nobody\" there\n",
		"c_test.go":     "// Nobody.\npackage a\n",
		"testdata/d.go": "// Nobody.\npackage a\n",
		"e.txt":         "nobody",
	} {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(src), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	comments, texts, err := measure(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(comments) != 1 || len(texts) != 1 {
		t.Fatalf("%d and %d directories, want one each: %v, %v", len(comments), len(texts), comments, texts)
	}
	if c := comments[0]; c.hard != 4 || c.words != 7+2+5+3 {
		t.Errorf("comments: %d hard constructions in %d words, want 4 in 17: %q", c.hard, c.words, c.lines)
	}
	if c := texts[0]; c.hard != 2 || c.words != 8+5 {
		t.Errorf("texts: %d hard constructions in %d words, want 2 in 13: %q", c.hard, c.words, c.lines)
	}
}
