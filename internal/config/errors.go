// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Error is one mistake in a partition file.
type Error struct {
	// File is the name that was given to Parse.
	File string
	// Line counts from 1 and lies within the file. A mistake of the whole file
	// is on line 1.
	Line int
	// Msg is one line of text: what is wrong and what would be right.
	Msg string
}

func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Msg) }

// Errors is all that is wrong with a file or a partition, in line order,
// without repetitions. It prints one mistake a line.
type Errors []*Error

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find the single mistakes.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

// mistakes collects errors of one file.
type mistakes struct {
	file string
	// lines is how many the file has, 0 where that is not known. YAML finds
	// the value that a last line lacks on the line after it.
	lines int
	errs  Errors
}

func (m *mistakes) add(line int, format string, args ...any) {
	if m.lines > 0 {
		line = min(line, m.lines)
	}
	m.errs = append(m.errs, &Error{File: m.file, Line: max(line, 1), Msg: fmt.Sprintf(format, args...)})
}

// at is add for the line of a node.
func (m *mistakes) at(n *yaml.Node, format string, args ...any) {
	m.add(n.Line, format, args...)
}

// err returns nil, not an empty Errors, where nothing is wrong. One mistake
// behind a YAML anchor is found once for each alias; it is reported once.
func (m *mistakes) err() error {
	if len(m.errs) == 0 {
		return nil
	}
	slices.SortStableFunc(m.errs, func(a, b *Error) int { return cmp.Compare(a.Line, b.Line) })
	seen := make(map[Error]bool, len(m.errs))
	m.errs = slices.DeleteFunc(m.errs, func(e *Error) bool {
		again := seen[*e]
		seen[*e] = true
		return again
	})
	return m.errs
}

// quote shows text from the file in a message: printable, on one line, and no
// longer than a person reads.
func quote(s string) string {
	if r := []rune(s); len(r) > 60 {
		s = string(r[:60]) + "…"
	}
	return strconv.Quote(s)
}

// list joins names for a sentence: "a, b or c".
func list(names []string, conj string) string {
	switch n := len(names); n {
	case 0:
		return ""
	case 1:
		return names[0]
	default:
		return strings.Join(names[:n-1], ", ") + " " + conj + " " + names[n-1]
	}
}

// nearest returns the known word that a person most likely meant by s, or "".
func nearest(s string, known []string) string {
	best, dist := "", 3
	if len(s) > 40 {
		return ""
	}
	for _, k := range known {
		d := distance(strings.ToLower(s), strings.ToLower(k))
		if d < dist && d < len(k) {
			best, dist = k, d
		}
	}
	return best
}

// distance is the number of letters to insert, delete or replace between two
// words, after Levenshtein.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diag := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diag
			if a[i] != b[j] {
				d = 1 + min(diag, row[j], row[j+1])
			}
			diag, row[j+1] = row[j+1], d
		}
	}
	return row[len(b)]
}
