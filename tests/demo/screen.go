// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// screen tells of steps: a title each, details below it, and the seconds. A
// step without details is one line.
type screen struct {
	out     io.Writer
	began   time.Time
	title   string
	details bool
	line    bytes.Buffer // the end of what a program has said so far
}

const (
	column = 72 // where the seconds stand
	indent = "     "
)

// step does one thing and shows how long it took.
func (s *screen) step(title string, do func() error) error {
	s.title, s.details = title, false
	fmt.Fprintf(s.out, "\n==>  %s", title)
	began := time.Now()
	err := do()
	if s.line.Len() > 0 {
		s.say("%s", s.line.String())
		s.line.Reset()
	}
	seconds := fmt.Sprintf("%6.1f s", time.Since(began).Seconds())
	if err != nil {
		fmt.Fprintf(s.out, "\n%sfailed after%s\n", indent, seconds)
		return err
	}
	used := len(indent) + utf8.RuneCountInString(title)
	if s.details {
		used = 0
	}
	fmt.Fprintf(s.out, "%s%s\n", strings.Repeat(" ", max(column-used, 1)), seconds)
	return nil
}

// say shows details of the step under way, a line for each of the text.
func (s *screen) say(format string, args ...any) {
	if !s.details {
		fmt.Fprintln(s.out)
		s.details = true
	}
	for line := range strings.Lines(fmt.Sprintf(format, args...)) {
		line = strings.TrimRight(line, "\n")
		fmt.Fprintln(s.out, strings.TrimRight(indent+line, " "))
	}
}

// Write shows what a program says as it says it, as details.
func (s *screen) Write(p []byte) (int, error) {
	s.line.Write(p)
	for {
		line, rest, whole := bytes.Cut(s.line.Bytes(), []byte("\n"))
		if !whole {
			return len(p), nil
		}
		s.say("%s", line)
		left := bytes.Clone(rest)
		s.line.Reset()
		s.line.Write(left)
	}
}

// wrap breaks a text at spaces into lines that fit.
func wrap(text string) string {
	const width = 100
	var out strings.Builder
	used := 0
	for _, word := range strings.Fields(text) {
		n := utf8.RuneCountInString(word)
		switch {
		case used == 0:
		case used+1+n > width:
			out.WriteByte('\n')
			used = 0
		default:
			out.WriteByte(' ')
			used++
		}
		out.WriteString(word)
		used += n
	}
	return out.String()
}
