// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"example.com/gpu-agent/internal/ledger"
)

const (
	page = "docs/architecture.md"
	// What is drawn stands between these two lines of the page.
	phasesBegin = "<!-- phases: drawn from internal/ledger by go run ./tests/architecture -->\n"
	phasesEnd   = "<!-- end of phases -->\n"
)

// withPhases returns the page below root with the transitions of internal/ledger drawn
// and listed.
func withPhases(root string) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, page))
	if err != nil {
		return nil, err
	}
	before, rest, begun := bytes.Cut(text, []byte(phasesBegin))
	_, after, ended := bytes.Cut(rest, []byte(phasesEnd))
	if !begun || !ended {
		return nil, fmt.Errorf("%s lacks the line %q, or %q after it", page, phasesBegin, phasesEnd)
	}
	var b bytes.Buffer
	b.Write(before)
	b.WriteString(phasesBegin + "\n```mermaid\nstateDiagram-v2\n")
	fmt.Fprintf(&b, "    [*] --> %s\n", ledger.Reserved)
	for _, t := range ledger.Transitions {
		to := string(t.To)
		if t.To == ledger.Released {
			to = "[*]"
		}
		fmt.Fprintf(&b, "    %s --> %s\n", t.From, to)
	}
	b.WriteString("```\n\n| from | to | when |\n|---|---|---|\n")
	for _, t := range ledger.Transitions {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", t.From, t.To, t.By)
	}
	b.WriteString("\n" + phasesEnd)
	b.Write(after)
	return b.Bytes(), nil
}
