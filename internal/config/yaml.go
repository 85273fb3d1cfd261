// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Limits. A ConfigMap holds 1 MiB; honest files use aliases a few times.
const (
	maxFile    = 1 << 20
	maxAliased = 10_000
)

// document reads the one YAML document of a file, with aliases and merge keys
// replaced by what they stand for. It returns nil after having said why.
func document(m *mistakes, data []byte) *yaml.Node {
	if len(data) > maxFile {
		m.add(1, "the file has %d bytes: at most %d are read, which is what a ConfigMap holds", len(data), maxFile)
		return nil
	}
	if line, bad := badText(data); bad != "" {
		m.add(line, "%s", bad)
		return nil
	}
	m.lines = len(splitLines(data))
	docs, err := decode(bytes.NewReader(data), 2)
	if err != nil {
		line, reason := explain(data, err)
		m.add(line, "%s", reason)
		return nil
	}
	if len(docs) == 0 || docs[0].Content[0].ShortTag() == "!!null" {
		m.add(1, "the file is empty: it needs `version: v1` and `partitions:`")
		return nil
	}
	if len(docs) > 1 {
		m.at(docs[1], "a second YAML document begins here: a partition file is one document")
		return nil
	}
	root := docs[0].Content[0]
	x := expander{mistakes: m, active: make(map[*yaml.Node]bool)}
	if !x.expand(root, false) {
		return nil
	}
	return root
}

// decode reads up to limit documents. The YAML library reports its own bugs by
// panicking, which must not end a node's agent.
func decode(r io.Reader, limit int) (docs []*yaml.Node, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("yaml: cannot be read: %v", p)
		}
	}()
	dec := yaml.NewDecoder(r)
	for len(docs) < limit {
		var n yaml.Node
		switch err := dec.Decode(&n); {
		case errors.Is(err, io.EOF):
			return docs, nil
		case err != nil:
			return docs, err
		}
		docs = append(docs, &n)
	}
	return docs, nil
}

// badText finds bytes that no YAML file has. The library's own message for
// these has no line.
func badText(data []byte) (line int, reason string) {
	line = 1
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			return line, "the text is not UTF-8"
		case r == '\n':
			line++
		case r < 0x20 && r != '\t' && r != '\r', r == 0x7f:
			return line, fmt.Sprintf("the text holds the control character %U", r)
		case r >= 0x80 && r < 0xa0, r == '\u2028', r == '\u2029':
			// Some of these are line breaks to YAML and to no editor.
			return line, fmt.Sprintf("the text holds the control character %U", r)
		case r == '\r' && (i+1 == len(data) || data[i+1] != '\n'):
			return line, "the text holds a carriage return without a line feed"
		}
		i += size
	}
	return 0, ""
}

var yamlLine = regexp.MustCompile(`^line \d+: `)

// explain turns a failure of the YAML library into a line and a reason. The
// library names the line where the surrounding construct begins, or the one
// before. A person wants the line that has to be changed: the first one with
// which the text can no longer be read, and it fails for the same reason when
// the file is cut after it.
func explain(data []byte, err error) (line int, reason string) {
	reason = withoutLine(err)
	lines := splitLines(data)
	fails := func(n int) bool {
		_, err := decode(&lineReader{lines: lines[:n]}, 2)
		if err == nil {
			return false
		}
		return withoutLine(err) == reason
	}
	// The parser asks for a line when it needs it, so the mistake is in what it
	// was given, mostly near its end. Where it is not (a quote left open far
	// up) halving finds it, unless a text of several lines happens to be cut.
	r := &lineReader{lines: lines}
	_, _ = decode(r, 2)
	line = r.next
	near := min(100, 1+(4<<20)/len(data)) // each step reads the file again
	for low := line - near; line > 1 && line > low && fails(line-1); line-- {
	}
	if line > 1 && fails(line-1) {
		line = 1 + sort.Search(line-1, func(n int) bool { return fails(n + 1) })
	}
	line = min(max(line, 1), len(lines))
	if strings.HasPrefix(strings.TrimLeft(string(lines[line-1]), " "), "\t") {
		return line, "a tab cannot indent YAML: use spaces"
	}
	return line, "the file is not YAML: " + reason
}

// splitLines counts as an editor does: a newline at the end begins no further
// line, and an empty file has one.
func splitLines(data []byte) [][]byte {
	lines := bytes.SplitAfter(data, []byte("\n"))
	if last := len(lines) - 1; last > 0 && len(lines[last]) == 0 {
		lines = lines[:last]
	}
	return lines
}

// withoutLine takes the library's idea of the line off its message.
func withoutLine(err error) string {
	s := strings.TrimPrefix(err.Error(), "yaml: ")
	s = strings.Join(strings.Fields(yamlLine.ReplaceAllString(s, "")), " ")
	if r := []rune(s); len(r) > 120 { // it quotes the file
		s = string(r[:120]) + "…"
	}
	return s
}

// lineReader hands out one line a call and knows how many were asked for.
type lineReader struct {
	lines [][]byte
	next  int
	rest  []byte
}

func (r *lineReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		if r.next == len(r.lines) {
			return 0, io.EOF
		}
		r.rest = r.lines[r.next]
		r.next++
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// expander replaces aliases and merge keys in place, so that the schema never
// meets them. What an alias stands for is counted each time it is used: a few
// lines of aliases to aliases can stand for more than any machine can read.
type expander struct {
	*mistakes
	active map[*yaml.Node]bool
	count  int
}

func (x *expander) expand(n *yaml.Node, aliased bool) bool {
	if aliased {
		if x.count++; x.count > maxAliased {
			x.at(n, "the aliases of this file stand for more than %d values: write them out", maxAliased)
			return false
		}
	}
	if x.active[n] {
		x.at(n, "the anchor %s holds itself", quote(n.Anchor))
		return false
	}
	x.active[n] = true
	defer delete(x.active, n)
	for i, c := range n.Content {
		through := aliased
		if c.Kind == yaml.AliasNode {
			c, through = c.Alias, true
			n.Content[i] = c
		}
		if !x.expand(c, through) {
			return false
		}
	}
	if n.Kind == yaml.MappingNode {
		return x.merge(n)
	}
	return true
}

// merge replaces `<<: mapping` by those of its pairs that the mapping itself
// does not have.
func (x *expander) merge(n *yaml.Node) bool {
	var own, merged []*yaml.Node
	has := make(map[string]bool)
	for i := 0; i < len(n.Content); i += 2 {
		if n.Content[i].ShortTag() != "!!merge" {
			own = append(own, n.Content[i], n.Content[i+1])
			has[n.Content[i].Value] = true
		}
	}
	if len(own) == len(n.Content) {
		return true
	}
	for i := 0; i < len(n.Content); i += 2 {
		if n.Content[i].ShortTag() != "!!merge" {
			continue
		}
		sources := []*yaml.Node{n.Content[i+1]}
		if sources[0].Kind == yaml.SequenceNode {
			sources = sources[0].Content
		}
		for _, s := range sources {
			if s.Kind != yaml.MappingNode {
				x.at(n.Content[i], "the merge key << takes a mapping or a list of mappings")
				return false
			}
			for j := 0; j < len(s.Content); j += 2 {
				if k := s.Content[j]; !has[k.Value] {
					merged = append(merged, k, s.Content[j+1])
					has[k.Value] = true
				}
			}
		}
	}
	n.Content = append(own, merged...)
	return true
}

// kind says in words what a node is.
func kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.ShortTag() {
	case "!!null":
		return "nothing"
	case "!!str":
		return "the text " + quote(n.Value)
	case "!!int", "!!float":
		return "the number " + quote(n.Value)
	}
	return "the value " + quote(n.Value)
}

// pair is a key of a mapping with its value.
type pair struct {
	key   *yaml.Node
	value *yaml.Node
}

// pairs returns a mapping's pairs in order, without those whose key is no text
// or was there before.
func (m *mistakes) pairs(n *yaml.Node, what string) ([]pair, bool) {
	if n.Kind != yaml.MappingNode {
		m.at(n, "%s is a mapping, not %s", what, kind(n))
		return nil, false
	}
	var out []pair
	first := make(map[string]int)
	for i := 0; i < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		switch line, again := first[k.Value]; {
		case k.Kind != yaml.ScalarNode:
			m.at(k, "a key of %s is text, not %s", what, kind(k))
		case k.ShortTag() != "!!str":
			m.at(k, "a key of %s is text, not %s: put it in quotes", what, kind(k))
		case again:
			m.at(k, "the key %s is already on line %d", quote(k.Value), line)
		default:
			first[k.Value] = k.Line
			out = append(out, pair{k, v})
		}
	}
	return out, true
}

// fields is pairs for a mapping whose keys are known.
func (m *mistakes) fields(n *yaml.Node, what string, known ...string) (map[string]*yaml.Node, bool) {
	ps, ok := m.pairs(n, what)
	if !ok {
		return nil, false
	}
	out := make(map[string]*yaml.Node, len(ps))
next:
	for _, p := range ps {
		for _, k := range known {
			if p.key.Value == k {
				out[k] = p.value
				continue next
			}
		}
		if near := nearest(p.key.Value, known); near != "" {
			m.at(p.key, "unknown key %s: did you mean %q?", quote(p.key.Value), near)
		} else {
			m.at(p.key, "unknown key %s: %s has %s", quote(p.key.Value), what, list(known, "and"))
		}
	}
	return out, true
}

// items returns the elements of a list that has at least one.
func (m *mistakes) items(n *yaml.Node, what string) ([]*yaml.Node, bool) {
	if n.Kind != yaml.SequenceNode {
		m.at(n, "%s is a list, not %s", what, kind(n))
		return nil, false
	}
	if len(n.Content) == 0 {
		m.at(n, "%s is an empty list", what)
		return nil, false
	}
	return n.Content, true
}

func (m *mistakes) text(n *yaml.Node, what string) (string, bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!str" {
		m.at(n, "%s is text, not %s", what, kind(n))
		return "", false
	}
	return n.Value, true
}

// choice reads one of a few words.
func choice[T ~string](m *mistakes, n *yaml.Node, what string, known ...T) (T, bool) {
	words := make([]string, len(known))
	for i, k := range known {
		if words[i] = string(k); n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" && n.Value == words[i] {
			return k, true
		}
	}
	m.at(n, "%s is %s, not %s", what, list(words, "or"), kind(n))
	return "", false
}

// number reads a whole number of at least low and at most high, written in
// decimal digits: YAML would read 010 as eight.
func (m *mistakes) number(n *yaml.Node, what string, low, high int) (int, bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" {
		m.at(n, "%s is a whole number, not %s", what, kind(n))
		return 0, false
	}
	v, err := strconv.Atoi(n.Value)
	switch {
	case errors.Is(err, strconv.ErrRange):
		m.at(n, "%s is at most %d, not %s", what, high, quote(n.Value))
	case err != nil, strconv.Itoa(v) != n.Value:
		m.at(n, "%s is a whole number in decimal digits, not %s", what, quote(n.Value))
	case v < low:
		m.at(n, "%s is at least %d, not %d", what, low, v)
	case v > high:
		m.at(n, "%s is at most %d, not %d", what, high, v)
	default:
		return v, true
	}
	return 0, false
}
