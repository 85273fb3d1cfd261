// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/brief"

	"go.yaml.in/yaml/v4"
)

// Error is one mistake in a partition file.
type Error struct {
	// File is the name that Parse was given.
	File string
	// Line counts from 1 and is within the file. A mistake of the whole file is on line 1.
	Line int
	// Msg is what is wrong and what would be right, on one line.
	Msg string
}

func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Msg) }

// Limits of a file's messages. A file of a megabyte has room for some 300,000 mistakes, and its
// author mends the first ones first.
const (
	maxMistakes = 20
	// maxText leaves room below brief.Text for what callers add to the reason.
	maxText = brief.Text - 256
	maxMsg  = 1 << 10
	// maxNames is how many names a sentence lists.
	maxNames = 20
)

// Errors are the mistakes in a file or a partition, in line order, each once. There are at most
// 20, and if there are more, one last element with the number of the others. It prints one
// mistake on a line, in less than 4 KiB.
type Errors []*Error

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return brief.Cut(strings.Join(lines, "\n"), maxText)
}

// mistakes collects the mistakes of one file: the first ones in line order, and the number of
// the others.
type mistakes struct {
	file string
	// lines is the number of the file's lines, 0 if it is not known. If the last line lacks a
	// value, YAML reports the line after it.
	lines int
	errs  Errors // in line order
	// more is how many mistakes are not in errs. The first of them is on line next.
	more, next int
	// seen has the hashes of all mistakes so far: the texts would take a hundred megabytes.
	seen map[uint64]bool
}

var seed = maphash.MakeSeed()

// add adds a mistake, once. A mistake behind a YAML anchor is found once for each alias.
func (m *mistakes) add(line int, format string, args ...any) {
	if m.lines > 0 {
		line = min(line, m.lines)
	}
	e := Error{File: m.file, Line: max(line, 1), Msg: brief.Cut(fmt.Sprintf(format, args...), maxMsg)}
	if hash := maphash.Comparable(seed, e); m.seen[hash] {
		return
	} else if m.seen == nil {
		m.seen = map[uint64]bool{hash: true}
	} else {
		m.seen[hash] = true
	}
	at := len(m.errs)
	for at > 0 && m.errs[at-1].Line > e.Line {
		at--
	}
	m.errs = slices.Insert(m.errs, at, &e)
	if len(m.errs) > maxMistakes {
		m.dropLast()
	}
}

func (m *mistakes) dropLast() {
	last := len(m.errs) - 1
	if line := m.errs[last].Line; m.more == 0 || line < m.next {
		m.next = line
	}
	m.more++
	m.errs = m.errs[:last]
}

// at adds a mistake on the line of a node.
func (m *mistakes) at(n *yaml.Node, format string, args ...any) {
	m.add(n.Line, format, args...)
}

// err returns the mistakes as Errors, or nil if there are none.
func (m *mistakes) err() error {
	if len(m.errs) == 0 {
		return nil
	}
	for size := func() (n int) {
		for _, e := range m.errs {
			n += len(e.Error()) + 1
		}
		return n
	}; len(m.errs) > 1 && size() > maxText-maxMsg/4; {
		m.dropLast()
	}
	out := slices.Clip(m.errs)
	if m.more > 0 {
		out = append(out, &Error{File: m.file, Line: m.next, Msg: fmt.Sprintf("from here on there are %d more mistakes",
			m.more)})
	}
	return out
}

// quote quotes text from the file for a message: printable, on one line, and cut off after 60
// characters.
func quote(s string) string {
	n := 0
	for i := range s { // do not look at all of a long text
		if n++; n > 60 {
			s = s[:i] + "…"
			break
		}
	}
	return strconv.Quote(s)
}

// list joins names for a sentence: "a, b or c". If there are many, it only counts the rest.
func list(names []string, conj string) string {
	switch n := len(names); {
	case n == 0:
		return ""
	case n == 1:
		return names[0]
	case n > maxNames:
		return brief.List(names, maxNames)
	default:
		return strings.Join(names[:n-1], ", ") + " " + conj + " " + names[n-1]
	}
}

// nearest returns the known word that was most likely meant by s, or "".
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

// distance returns the number of letters to insert, delete or replace between two words, after
// Levenshtein.
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
