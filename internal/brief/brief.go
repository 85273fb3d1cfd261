// SPDX-License-Identifier: Apache-2.0

package brief

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Text bounds one message to people, in bytes: an outcome, an annotation, an error that the kubelet
// shows.
const Text = 4 << 10

// Message and Reason bound the message and the reason of an object that the API server keeps, such
// as an Event or a condition, in bytes. They are the limits of its own validation of Events. The
// admission policies in deployments enforce them and Text, even on a stolen token.
const (
	Message = 1 << 10
	Reason  = 128
)

const more = "…"

// Cut shortens s to at most limit bytes, between two characters. It first replaces what is not
// UTF-8. The limit must be at least the three bytes of "…".
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

// List joins the first names with commas, and counts those after the number most.
func List(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
