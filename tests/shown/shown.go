// SPDX-License-Identifier: Apache-2.0

package shown

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Command is a command line that a document shows.
type Command struct {
	// File is the document's path in the checkout, and Line its line, counted from 1.
	File string
	Line int
	// Text is the command on one line. Names for the reader to replace, such as NODE, are as they are shown.
	Text  string
	taken bool
}

func (c Command) String() string { return fmt.Sprintf("%s:%d: %s", c.File, c.Line, c.Text) }

// Page is a document.
type Page struct {
	// File is its path in the checkout, and Text all of it.
	File, Text string
	// Commands are in the order of the document. The same text is there once.
	Commands []Command
}

// programs are those whose names begin a command. An assignment does, too.
var programs = []string{"kubectl", "helm", "make", "docker", "ctr", "find", "gpu-agent", "gpu-placer", "git", "curl", "go"}

// Read reads a document of the checkout, which is at or above the working directory.
func Read(file string) (*Page, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
		if dir == filepath.Dir(dir) {
			return nil, fmt.Errorf("read %s: no go.mod at or above the working directory", file)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return nil, err
	}
	return parse(file, string(text)), nil
}

var (
	quoted  = regexp.MustCompile("`([^`]+)`")
	assigns = regexp.MustCompile(`^[A-Z_]+=\S`)
)

func parse(file, text string) *Page {
	p := &Page{File: file, Text: text}
	fenced, whole := false, ""
	for i, line := range strings.Split(text, "\n") {
		switch {
		case strings.HasPrefix(strings.TrimSpace(line), "```"):
			fenced = !fenced
		case fenced:
		case strings.HasPrefix(line, "    "):
			part, more := strings.CutSuffix(strings.TrimSpace(line), `\`)
			if whole += part; !more {
				p.add(i+1, whole, 1)
				whole = ""
			}
		default:
			for _, m := range quoted.FindAllStringSubmatch(line, -1) {
				p.add(i+1, m[1], 2)
			}
		}
	}
	return p
}

// add adds a text as a command if it is one, of so many words at least.
func (p *Page) add(line int, text string, least int) {
	text, _, _ = strings.Cut(text, "  #")
	text = strings.TrimPrefix(strings.Join(strings.Fields(text), " "), "$ ")
	words := strings.Fields(text)
	if len(words) < max(least, 1) || !slices.Contains(programs, words[0]) && !assigns.MatchString(text) {
		return
	}
	if !slices.ContainsFunc(p.Commands, func(c Command) bool { return c.Text == text }) {
		p.Commands = append(p.Commands, Command{File: p.File, Line: line, Text: text})
	}
}

// Take returns the first command that begins with a text, and notes that it was taken. It fails if there is
// none.
func (p *Page) Take(begin string) (Command, error) {
	for i := range p.Commands {
		if c := &p.Commands[i]; strings.HasPrefix(c.Text, begin) {
			c.taken = true
			return *c, nil
		}
	}
	return Command{}, fmt.Errorf("%s does not show a command that begins with %q", p.File, begin)
}

// Left returns the commands that were not taken.
func (p *Page) Left() []Command {
	return slices.DeleteFunc(slices.Clone(p.Commands), func(c Command) bool { return c.taken })
}

// Manifests returns the texts of YAML that the document shows, between fences or indented in a list, which
// contain a text.
func (p *Page) Manifests(with string) []string {
	var out []string
	for _, m := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(p.Text, -1) {
		out = append(out, m[1])
	}
	for _, m := range regexp.MustCompile(`(?m)(?:^ {7,}\S.*\n)+`).FindAllString(p.Text, -1) {
		out = append(out, strings.ReplaceAll("\n"+m, "\n       ", "\n")[1:])
	}
	return slices.DeleteFunc(out, func(text string) bool { return !strings.Contains(text, with) })
}
