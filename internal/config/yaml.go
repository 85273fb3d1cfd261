// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// Limits. A ConfigMap holds 1 MiB, and sensible files use an alias a few times.
const (
	maxFile    = 1 << 20
	maxAliased = 10_000
)

// document reads the one YAML document of a file, and replaces aliases and merge keys by their
// values. If there is none, it adds a mistake and returns nil.
func document(m *mistakes, data []byte) *yaml.Node {
	if len(data) > maxFile {
		m.add(1, "the file has %d bytes: at most %d are read, which is what a ConfigMap holds", len(data), maxFile)
		return nil
	}
	if line, bad := badText(data); bad != "" {
		m.add(line, "%s", bad)
		return nil
	}
	lines := bytes.Split(bytes.TrimSuffix(data, []byte("\n")), []byte("\n"))
	m.lines = len(lines)
	if line, bad := measure(data); bad != "" {
		m.add(line, "%s", bad)
		return nil
	}
	docs, err := decode(data, 2)
	if err != nil {
		line, reason := explain(err)
		line = min(line, len(lines))
		if bytes.HasPrefix(bytes.TrimLeft(lines[line-1], " "), []byte("\t")) {
			m.add(line, "a tab cannot indent YAML: use spaces")
		} else {
			m.add(line, "the file is not YAML: %s", reason)
		}
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

// decode reads up to limit documents. The YAML library panics at its own bugs, and that must
// not end a node's agent.
func decode(data []byte, limit int) (docs []*yaml.Node, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("cannot be read: %v", p)
		}
	}()
	loader, err := yaml.NewLoader(bytes.NewReader(data), yaml.WithPlugin(yamlLimits{}))
	for err == nil && len(docs) < limit {
		n := new(yaml.Node)
		if err = loader.Load(n); err == nil {
			docs = append(docs, n)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return docs, err
}

// badText finds bytes that no YAML file has. The library's message for these has no line.
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

// explain returns the reason for a failure of the YAML library and the line to change. If
// something was opened and does not end, that is the line where it begins. Otherwise it is the
// line where the text can no longer be read.
func explain(err error) (line int, reason string) {
	line, reason = 1, err.Error()
	if e, ok := errors.AsType[*yaml.LoadError](err); ok {
		line, reason = e.Mark.Line, e.Message
		switch e.ContextMsg {
		case "while parsing a flow sequence", "while parsing a flow mapping",
			"while scanning a quoted scalar", "while scanning a simple key":
			line = e.ContextMark.Line
		}
	}
	reason = strings.Join(strings.Fields(reason), " ")
	if r := []rune(reason); len(r) > 120 { // it quotes the file
		reason = string(r[:120]) + "…"
	}
	return max(line, 1), reason
}

// expander replaces aliases and merge keys in place, so that the rest of the parser never sees
// them. The values behind an alias count each time it is used: with aliases to aliases, a few
// lines can amount to more than any machine can read.
type expander struct {
	*mistakes
	active map[*yaml.Node]bool
	count  int
}

func (x *expander) expand(n *yaml.Node, aliased bool) bool {
	if aliased {
		if x.count++; x.count > maxAliased {
			x.at(n, "the aliases of this file add up to more than %d values: write them out", maxAliased)
			return false
		}
	}
	if len(n.Value) > mostText {
		x.at(n, "a text of %d bytes: at most %d are read, and no name, pattern or number is longer",
			len(n.Value), mostText)
		return false
	}
	if x.active[n] {
		x.at(n, "the anchor %s contains itself", quote(n.Anchor))
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

// merge replaces `<<: mapping` by the pairs of that mapping that n does not have itself.
func (x *expander) merge(n *yaml.Node) bool {
	var own, merges []*yaml.Node
	has := make(map[string]bool)
	for i := 0; i < len(n.Content); i += 2 {
		if pair := n.Content[i : i+2]; pair[0].ShortTag() == "!!merge" {
			merges = append(merges, pair...)
		} else {
			own, has[pair[0].Value] = append(own, pair...), true
		}
	}
	for i := 0; i < len(merges); i += 2 {
		sources := merges[i+1 : i+2]
		if sources[0].Kind == yaml.SequenceNode {
			sources = sources[0].Content
		}
		for _, s := range sources {
			if s.Kind != yaml.MappingNode {
				x.at(merges[i], "the merge key << takes a mapping or a list of mappings")
				return false
			}
			for j := 0; j < len(s.Content); j += 2 {
				if pair := s.Content[j : j+2]; !has[pair[0].Value] {
					own, has[pair[0].Value] = append(own, pair...), true
				}
			}
		}
	}
	n.Content = own
	return true
}

// kind describes a node in words.
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

// pairs returns a mapping's pairs in order. It leaves out, and adds a mistake for, a key that
// is not text or is repeated.
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

// fields returns the values of a mapping with known keys. Each other key is a mistake.
func (m *mistakes) fields(n *yaml.Node, what string, known ...string) (map[string]*yaml.Node, bool) {
	if n.Kind == yaml.MappingNode &&
		m.tooMany(n, what, len(n.Content)/2, mostKeys, "it has "+list(known, "and")+": leave out the others") {
		return nil, false
	}
	ps, ok := m.pairs(n, what)
	if !ok {
		return nil, false
	}
	out := make(map[string]*yaml.Node, len(ps))
	for _, p := range ps {
		if slices.Contains(known, p.key.Value) {
			out[p.key.Value] = p.value
		} else if near := nearest(p.key.Value, known); near != "" {
			m.at(p.key, "unknown key %s: did you mean %q?", quote(p.key.Value), near)
		} else {
			m.at(p.key, "unknown key %s: %s has %s", quote(p.key.Value), what, list(known, "and"))
		}
	}
	return out, true
}

// itemsUpTo returns the elements of a list, as items does. It refuses a list with more than most
// elements; why is the reason for that bound.
func (m *mistakes) itemsUpTo(n *yaml.Node, what string, most int, why string) ([]*yaml.Node, bool) {
	if n.Kind == yaml.SequenceNode && m.tooMany(n, what, len(n.Content), most, why) {
		return nil, false
	}
	return m.items(n, what)
}

// items returns the elements of a list with at least one.
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

// choice reads one of the known words.
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

// number reads a whole number from low to high in decimal digits. YAML would read 010 as eight.
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

// decimal reads a number from low to high in decimal digits, with or without a point. YAML knows other
// forms, such as 0x1p-2 and .inf.
func (m *mistakes) decimal(n *yaml.Node, what string, low, high float64) (float64, bool) {
	tag := n.ShortTag()
	if n.Kind != yaml.ScalarNode || tag != "!!int" && tag != "!!float" {
		m.at(n, "%s is a number, not %s", what, kind(n))
		return 0, false
	}
	v, err := strconv.ParseFloat(n.Value, 64)
	octal := len(n.Value) > 1 && n.Value[0] == '0' && n.Value[1] != '.'
	switch {
	case octal || strings.Trim(n.Value, "0123456789.") != "" || err != nil && !errors.Is(err, strconv.ErrRange):
		m.at(n, "%s is a number in decimal digits, not %s", what, quote(n.Value))
	case v < low:
		m.at(n, "%s is at least %v, not %s", what, low, quote(n.Value))
	case v > high:
		m.at(n, "%s is at most %v, not %s", what, high, quote(n.Value))
	default:
		return v, true
	}
	return 0, false
}
