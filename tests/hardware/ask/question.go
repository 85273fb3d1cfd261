// SPDX-License-Identifier: Apache-2.0

package ask

import (
	"context"
	"fmt"
	"math"
	"time"
)

// Question is one that a card answers: yes, no, a number, or which of several things it is.
type Question struct {
	// Name is that of its file, without .jsonl: lower case words with hyphens.
	Name string
	// Asks is the sentence, which ends in a question mark.
	Asks string
	// Limit is the longest that it may take, and Least what it needs to tell anything: with
	// less left it is passed over. The zero value of Least is no time.
	Limit, Least time.Duration
	// Code names the places in the code that rest on the answer, such as
	// pkg/gpu/nvml/mig.go.
	Code []string
	// NotEmulated says why the emulated driver has no answer to it; "" where it has one.
	NotEmulated string
	// Within is by how much of itself a number may differ between two cards, or a card and
	// the emulator, and count as the same: 0.1 is a tenth, and 0 not at all. A negative
	// value says that the number is the card's own, and never the same.
	Within float64
	// Ask finds the answer. Where ctx ends first, what it returns is not looked at.
	Ask func(ctx context.Context, r *Room) Answer `json:"-"`
}

// Word is what kind of answer it is.
type Word string

// The words.
const (
	Yes     Word = "yes"
	No      Word = "no"
	Number  Word = "number"
	Name    Word = "name"
	Unknown Word = "could not tell"
)

// Answer is what came of a question. The zero value is none.
type Answer struct {
	Says Word `json:"says"`
	// Number is in Unit, where Says is Number.
	Number float64 `json:"number,omitempty"`
	Unit   string  `json:"unit,omitempty"`
	// Name is which of several things it is, where Says is Name.
	Name string `json:"name,omitempty"`
	// Why says what the answer rests on, or what kept it from being found.
	Why string `json:"why,omitempty"`
}

// Tell is yes or no, with a reason.
func Tell(yes bool, format string, args ...any) Answer {
	a := Answer{Says: No, Why: fmt.Sprintf(format, args...)}
	if yes {
		a.Says = Yes
	}
	return a
}

// Count is a number in a unit, with a reason.
func Count(n float64, unit, format string, args ...any) Answer {
	return Answer{Says: Number, Number: n, Unit: unit, Why: fmt.Sprintf(format, args...)}
}

// Call says which of several things it is.
func Call(name, format string, args ...any) Answer {
	return Answer{Says: Name, Name: name, Why: fmt.Sprintf(format, args...)}
}

// CouldNotTell says what kept the answer from being found.
func CouldNotTell(format string, args ...any) Answer {
	return Answer{Says: Unknown, Why: fmt.Sprintf(format, args...)}
}

func (a Answer) String() string {
	text := string(a.Says)
	switch a.Says {
	case Number:
		text = fmt.Sprintf("%.6g %s", a.Number, a.Unit)
	case Name:
		text = a.Name
	}
	if a.Why != "" {
		text += ": " + a.Why
	}
	return text
}

// Same reports whether two answers to a question are the same. One that could not be told is
// the same as none.
func (q *Question) Same(a, b Answer) bool {
	switch {
	case a.Says != b.Says || a.Says == Unknown:
		return false
	case a.Says == Name:
		return a.Name == b.Name
	case a.Says != Number:
		return true
	case q.Within < 0 || a.Unit != b.Unit:
		return false
	}
	return math.Abs(a.Number-b.Number) <= q.Within*max(math.Abs(a.Number), math.Abs(b.Number))
}
