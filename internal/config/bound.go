// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"

	"go.yaml.in/yaml/v4"
)

// Bounds of what is read, far above what any honest file has, and checked before anything is
// done with it: a mistake in a file of a ConfigMap's size must not cost a node seconds, or
// more memory than its agent may have.
const (
	// mostMarks is how many signs of structure a file may have, and mostInBrackets how many
	// of those one list or mapping in brackets. The YAML library keeps all of such a one in
	// memory, a quarter of a kilobyte for each value, before it says anything.
	mostMarks, mostInBrackets = 220_000, 20_000
	// mostDeep is how deep values may stand in each other. Ours do six deep.
	mostDeep = 64
	// mostText is the longest text, in bytes.
	mostText = 4 << 10
	// mostKeys is how many keys a mapping has whose keys are known, with mistyped ones.
	mostKeys = 64
	// mostGPUs is how many GPUs an entry lists: machines have up to 16. mostProfiles and
	// mostFilters are the same of MIG profiles, of which a GPU has some 20, and of PCI ids.
	mostGPUs, mostProfiles, mostFilters = 256, 4096, 1024
)

// measure finds what a file has too much of, and where. It looks at each byte once. Where it
// cannot know whether a bracket or a quote is one, as in the middle of some texts, it takes it
// for one: what is in brackets is then more than it would be.
func measure(data []byte) (line int, reason string) {
	line = 1
	marks, inBrackets, depth, began := 0, 0, 0, 1
	quote, start := byte(0), true // start says that a value may begin here
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
				i++ // a newline there is counted by nobody, and there is one for two bytes at most
				if i < len(data) && data[i] == '\n' {
					line++
				}
			}
		case '"', '\'':
			switch {
			case quote == c:
				quote, start = 0, true // another one may follow at once
				marks, inBrackets = marks+1, inBrackets+1
			case quote == 0 && wasStart:
				quote = c
			case quote == 0:
				marks, inBrackets = marks+1, inBrackets+1
			}
		case '#':
			if wasStart && quote == 0 && depth == 0 { // a comment; in brackets it may be none
				for ; i+1 < len(data) && data[i+1] != '\n'; i++ {
					if bytes.IndexByte([]byte(",:?!&*[]{}'\""), data[i+1]) >= 0 {
						marks++ // it may be none here, too
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

// shallow is our limits for the YAML library.
type shallow struct{}

// CheckAlias is yaml.LoaderLimitsPlugin's. The library replaces no alias for us: expander does.
func (shallow) CheckAlias(aliases, _ int) error {
	if aliases > maxAliased {
		return fmt.Errorf("more than %d aliases", maxAliased)
	}
	return nil
}

// CheckDepth is yaml.LoaderLimitsPlugin's.
func (shallow) CheckDepth(depth int, _ *yaml.DepthContext) error {
	if depth > mostDeep {
		return fmt.Errorf("values stand in each other more than %d deep, and a partition file needs six", mostDeep)
	}
	return nil
}

// tooMany says that a list or a mapping has more elements than there may be. Then none of
// them is looked at.
func (m *mistakes) tooMany(n *yaml.Node, what string, have, most int, why string) bool {
	if have > most {
		m.at(n, "%s has %d elements: at most %d are read, since %s", what, have, most, why)
	}
	return have > most
}
