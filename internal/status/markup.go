// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"strings"
)

// markup is a page that is being written. Tags come only from constants, and every value is
// escaped, so a value never becomes a tag.
type markup struct{ b strings.Builder }

// constant is markup that is written in this program. The compiler converts a literal to it,
// but not a variable of type string. So a text from outside cannot become a constant by
// mistake.
type constant string

// hole is the place of a value in a constant. It is in text, or within the double quotes of an
// attribute. Both need the same characters escaped.
const hole = "{}"

// escaper escapes the characters that would end a text or an attribute. It also escapes the
// plus sign: markup in UTF-7 begins with it, an encoding that old browsers guess.
var escaper = strings.NewReplacer(
	"&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&#34;", "'", "&#39;", "+", "&#43;")

// put writes a constant with a value in each of its holes. A hole within a value is plain text.
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

// given writes a constant with one hole, unless the value is empty.
func (m *markup) given(s constant, value string) {
	if value != "" {
		m.put(s, value)
	}
}

// broken writes a text that the browser may break into lines after each sep.
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
