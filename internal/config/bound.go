// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"

	"go.yaml.in/yaml/v4"
)

// Bounds of a file, far above what any sensible file has. They are checked before anything else
// is done with it. A mistake in a file as large as a ConfigMap must not cost a node seconds, or
// more memory than its agent may have.
const (
	// mostMarks is how many structural characters and lines a file may have. mostInBrackets is
	// the same for one list or mapping in brackets: the YAML library keeps all of it in memory,
	// a quarter of a kilobyte for each value, before it reports anything.
	mostMarks, mostInBrackets = 220_000, 20_000
	// mostDeep is how deeply values may be nested. Ours have six levels.
	mostDeep = 64
	// mostText is the longest text, in bytes.
	mostText = 4 << 10
	// mostKeys is how many keys a mapping with known keys may have, mistyped ones included.
	mostKeys = 64
	// mostGPUs is how many GPUs an entry may list; machines have up to 16. mostProfiles is the
	// same for MIG profiles, since a GPU has some 20, and mostFilters for PCI ids.
	mostGPUs, mostProfiles, mostFilters = 256, 4096, 1024
)

// measure returns what a file has too much of, and on which line; the reason is empty if the
// file is within bounds. It looks at each byte once. Within some texts it cannot tell whether a
// bracket or a quote belongs to the structure. It then takes it as such, so it may count too
// much.
func measure(data []byte) (line int, reason string) {
	line = 1
	marks, inBrackets, depth, began := 0, 0, 0, 1
	quote, start := byte(0), true // start is true where a value may begin
	for i := 0; i < len(data); i++ {
		c := data[i]
		wasStart := start
		start = false
		switch c {
		case '\n':
			if marks++; depth == 0 && quote == 0 {
				inBrackets, began = 0, line+1
			}
			line, start = line+1, true
		case ' ', '\t', '\r':
			start = true
		case ',', ':', '?', '!', '&', '*':
			marks, inBrackets, start = marks+1, inBrackets+1, true
		case '-':
			if start = wasStart; wasStart && i+1 < len(data) && isBlank(data[i+1]) {
				marks, inBrackets = marks+1, inBrackets+1
			}
		case '[', '{':
			marks, inBrackets, start = marks+1, inBrackets+1, true
			if quote == 0 && (depth > 0 || wasStart) {
				depth++
			}
		case ']', '}':
			marks, inBrackets, start = marks+1, inBrackets+1, true
			if quote == 0 {
				depth = max(0, depth-1)
			}
		case '\\':
			if quote == '"' {
				i++ // not counted as a mark: a newline here takes two bytes
				if i < len(data) && data[i] == '\n' {
					line++
				}
			}
		case '"', '\'':
			switch {
			case quote == c:
				quote, start = 0, true // another quote may follow at once
				marks, inBrackets = marks+1, inBrackets+1
			case quote == 0 && wasStart:
				quote = c
			case quote == 0:
				marks, inBrackets = marks+1, inBrackets+1
			}
		case '#':
			if wasStart && quote == 0 && depth == 0 { // a comment; within brackets it may be text
				for ; i+1 < len(data) && data[i+1] != '\n'; i++ {
					if bytes.IndexByte([]byte(",:?!&*[]{}'\""), data[i+1]) >= 0 {
						marks++ // this may be text, too
					}
				}
			}
		}
		switch {
		case inBrackets > mostInBrackets && (depth > 0 || quote != 0):
			return began, fmt.Sprintf("the list or mapping in brackets that is on this line, or begins here, "+
				"has more than %d values: a node has fewer than %d GPUs, and a GPU some 20 MIG profiles",
				mostInBrackets/2, mostGPUs)
		case marks > mostMarks:
			return line, fmt.Sprintf("up to here the file has more than %d keys, values and lines: "+
				"divide it among nodes, or leave out what no node chooses", mostMarks/2)
		}
	}
	return 0, ""
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

// yamlLimits sets our limits in the YAML library.
type yamlLimits struct{}

// CheckAlias implements yaml.LoaderLimitsPlugin. The library does not replace aliases for us;
// expander does.
func (yamlLimits) CheckAlias(aliases, _ int) error {
	if aliases > maxAliased {
		return fmt.Errorf("more than %d aliases", maxAliased)
	}
	return nil
}

// CheckDepth implements yaml.LoaderLimitsPlugin.
func (yamlLimits) CheckDepth(depth int, _ *yaml.DepthContext) error {
	if depth > mostDeep {
		return fmt.Errorf("values are nested more than %d levels deep, and a partition file needs six", mostDeep)
	}
	return nil
}

// tooMany reports whether a list or a mapping has too many elements, and adds that as a
// mistake. The caller then looks at none of them.
func (m *mistakes) tooMany(n *yaml.Node, what string, have, most int, why string) bool {
	if have > most {
		m.at(n, "%s has %d elements: at most %d are read, since %s", what, have, most, why)
	}
	return have > most
}
