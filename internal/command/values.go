// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"slices"
	"strings"
)

// Choice is a flag with one of few values. It implements pflag.Value.
type Choice struct {
	// Value is the chosen value, at first the default.
	Value string
	// Of are the values to choose from.
	Of []string
}

func (c *Choice) String() string { return c.Value }

// Type returns the value's name in help.
func (c *Choice) Type() string { return strings.Join(c.Of, "|") }

// Set chooses a value. It fails if it is not one of Of.
func (c *Choice) Set(s string) error {
	if !slices.Contains(c.Of, s) {
		return fmt.Errorf("want one of %s", strings.Join(c.Of, ", "))
	}
	c.Value = s
	return nil
}

func (c *Choice) complete(string) []string { return c.Of }

// List is a flag with several values out of a few, separated by commas. It implements
// pflag.Value.
type List struct {
	// Values are the chosen values, at first the default.
	Values []string
	// Of are the values to choose from.
	Of []string
}

func (l *List) String() string { return strings.Join(l.Values, ",") }

// Type returns the value's name in help.
func (l *List) Type() string { return strings.Join(l.Of, ",") }

// Has reports whether a value is chosen.
func (l *List) Has(word string) bool { return slices.Contains(l.Values, word) }

// Set chooses values, separated by commas, in place of those before.
func (l *List) Set(s string) error {
	var values []string
	for word := range strings.SplitSeq(s, ",") {
		if word = strings.TrimSpace(word); !slices.Contains(l.Of, word) {
			return fmt.Errorf("there is no %q: want some of %s", word, strings.Join(l.Of, ", "))
		}
		values = append(values, word)
	}
	l.Values = values
	return nil
}

// complete returns, after what is typed up to the last comma, each value that is not typed yet.
func (l *List) complete(typed string) (out []string) {
	before := typed[:strings.LastIndex(typed, ",")+1]
	for _, word := range l.Of {
		if !slices.Contains(strings.Split(before, ","), word) {
			out = append(out, before+word)
		}
	}
	return out
}
