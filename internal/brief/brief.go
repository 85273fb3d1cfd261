// SPDX-License-Identifier: Apache-2.0

package brief

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Text is the most bytes of one message to people: an outcome, an annotation, an
// error that the kubelet shows.
const Text = 4 << 10

// Message and Reason are the most bytes of a message and of a reason in an object that the
// API server keeps, such as an Event or a condition: the limits of its own validation of
// Events. The admission policies in deployments hold a stolen token to them and to Text.
const (
	Message = 1 << 10
	Reason  = 128
)

const more = "…"

// Cut shortens s to at most limit bytes, at the edge of a character; what is not UTF-8
// in it is replaced first. The limit must leave room for the three bytes of "…".
func Cut(s string, limit int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= limit {
		return s
	}
	end := limit - len(more)
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + more
}

// List joins names with commas: the first ones, and how many more there are.
func List(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
