// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"strings"
)

// markup is a page as far as it is written. Tags come from constants alone, and every value is
// escaped, so that no value ever becomes a tag.
type markup struct{ b strings.Builder }

// constant is markup that stands in this program. The compiler takes a literal for one, and no
// variable of type string: a text from outside cannot become a constant by mistake.
type constant string

// hole is where a constant takes a value. It stands in text or within the double quotes of an
// attribute. In both the same characters are escaped.
const hole = "{}"

// escaper writes what would end a text or an attribute as a reference; and the plus sign, with which
// markup begins in UTF-7, an encoding that old browsers guess.
var escaper = strings.NewReplacer(
	"&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&#34;", "'", "&#39;", "+", "&#43;")

// put writes a constant with a value in each of its holes. No value is searched for holes.
func (m *markup) put(s constant, values ...any) {
	rest := string(s)
	for _, v := range values {
		var before string
		before, rest, _ = strings.Cut(rest, hole)
		m.b.WriteString(before)
		m.b.WriteString(escaper.Replace(fmt.Sprint(v)))
	}
	m.b.WriteString(rest)
}

// given puts a constant with one hole, if there is a value for it.
func (m *markup) given(s constant, value string) {
	if value != "" {
		m.put(s, value)
	}
}

// broken writes a text that may be broken into lines after each sep.
func (m *markup) broken(sep, text string) {
	for i, part := range strings.SplitAfter(text, sep) {
		if i > 0 {
			m.put(`<wbr/>`)
		}
		m.put(`{}`, part)
	}
}

// sanitize replaces control, invalid and bidirectional characters, and those that XML
// forbids. Line breaks stay.
func sanitize(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == 0, r == '\ufffe', r == '\uffff', r >= '\u202a' && r <= '\u202e', r >= '\u2066' && r <= '\u2069':
			return '\ufffd'
		case r < ' ' && r != '\n', r >= 0x7f && r < 0xa0:
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\ufffd"))
}
