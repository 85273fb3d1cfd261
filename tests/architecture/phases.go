// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"example.com/gpu-agent/internal/ledger"
)

const (
	page = "docs/architecture.md"
	// What is drawn stands between these two lines of the page.
	phasesBegin = "<!-- phases: drawn from internal/ledger by go run ./tests/architecture -->\n"
	phasesEnd   = "<!-- end of phases -->\n"
	setsBegin   = "<!-- closed sets: listed by go run ./tests/architecture -->\n"
	setsEnd     = "<!-- end of closed sets -->\n"
)

// drawnPage returns the page below root with the transitions of internal/ledger drawn
// and listed, and the files that name members of closed sets.
func drawnPage(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		return nil, err
	}
	var phases, sets bytes.Buffer
	listPhases(&phases)
	if err := listSets(&sets, root); err != nil {
		return nil, err
	}
	if text, err = part(text, phasesBegin, phasesEnd, phases.Bytes()); err != nil {
		return nil, err
	}
	return part(text, setsBegin, setsEnd, sets.Bytes())
}

// part returns the page with new text between two lines.
func part(text []byte, begin, end string, body []byte) ([]byte, error) {
	before, rest, begun := bytes.Cut(text, []byte(begin))
	_, after, ended := bytes.Cut(rest, []byte(end))
	if !begun || !ended {
		return nil, fmt.Errorf("%s lacks the line %q, or %q after it", page, begin, end)
	}
	return slices.Concat(before, []byte(begin), body, []byte(end), after), nil
}

// listPhases draws the transitions, and lists them.
func listPhases(b *bytes.Buffer) {
	b.WriteString("\n```mermaid\nstateDiagram-v2\n")
	fmt.Fprintf(b, "    [*] --> %s\n", ledger.Reserved)
	for _, t := range ledger.Transitions {
		to := string(t.To)
		if t.To == ledger.Released {
			to = "[*]"
		}
		fmt.Fprintf(b, "    %s --> %s\n", t.From, to)
	}
	b.WriteString("```\n\n| from | to | when |\n|---|---|---|\n")
	for _, t := range ledger.Transitions {
		fmt.Fprintf(b, "| %s | %s | %s |\n", t.From, t.To, t.By)
	}
	b.WriteString("\n")
}
