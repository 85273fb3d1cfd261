// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Condition is a fact about the node, for people and programs.
type Condition struct {
	// Type is one of Types.
	Type Type `json:"type"`
	Cause
	// Subject is a GPU's UUID, a device's ID, a resource's or a driver's name, an
	// allocation's key, or a claim as "namespace/name"; empty for the node.
	Subject string `json:"subject,omitempty"`
	// Since is when it was first seen.
	Since time.Time `json:"since,omitzero"`
}

// Cause says why something is as it is. As an error it has Message as its text.
type Cause struct {
	Reason  Reason `json:"reason"`
	Message string `json:"message"`
}

// Why returns a cause with a message for people.
func Why(r Reason, format string, args ...any) Cause { return Cause{r, fmt.Sprintf(format, args...)} }

// Condition is the cause as a fact about a subject.
func (c Cause) Condition(kind Type, subject string) Condition {
	return Condition{Type: kind, Cause: c, Subject: subject}
}

func (c Cause) Error() string { return c.Message }
func (c Cause) code() Reason  { return c.Reason }

// Because gives an error a reason; nil stays nil.
func Because(r Reason, err error) error {
	if err == nil {
		return nil
	}
	return &failure{r, err}
}

type failure struct {
	reason Reason
	error
}

func (f *failure) Unwrap() error { return f.error }
func (f *failure) code() Reason  { return f.reason }

// CauseOf is an error as a cause. other is the reason of one that has none.
func CauseOf(err error, other Reason) Cause {
	var f interface{ code() Reason }
	if errors.As(err, &f) {
		other = f.code()
	}
	return Cause{other, err.Error()}
}

// Type says what kind of fact a condition is.
type Type string

// Types of conditions.
const (
	Invalid   Type = "Invalid"   // what was configured last is not in force
	Failed    Type = "Failed"    // something went wrong, and is tried again
	Refused   Type = "Refused"   // a GPU cannot be what is wanted, whoever holds it
	Blocked   Type = "Blocked"   // a change waits for holders to end
	Pending   Type = "Pending"   // a change is under way, or waits for something else
	Unhealthy Type = "Unhealthy" // a GPU or a MIG instance has a fault
	Waiting   Type = "Waiting"   // a container that was given devices may not start yet, or a claim never
	Leaving   Type = "Leaving"   // a MIG device is withdrawn, or goes when its holder ends
	Noted     Type = "Noted"     // a remark; nothing waits for it
)

// Types is every Type, the gravest first.
var Types = []Type{Invalid, Failed, Refused, Blocked, Pending, Unhealthy, Waiting, Leaving, Noted}

// SortConditions puts the gravest first, and gives those that were there before the
// time at which they were first seen. The others have begun now, unless they say when.
func SortConditions(of, before []Condition, now time.Time) {
	type fact struct {
		Type
		Reason
		subject string
	}
	since := map[fact]time.Time{}
	for _, c := range before {
		since[fact{c.Type, c.Reason, c.Subject}] = c.Since
	}
	for i := range of {
		c := &of[i]
		if at, known := since[fact{c.Type, c.Reason, c.Subject}]; known && c.Since.IsZero() {
			c.Since = at
		} else if c.Since.IsZero() {
			c.Since = now
		}
	}
	slices.SortStableFunc(of, Condition.Compare)
}

// Compare orders conditions: the gravest first, then by subject and reason.
func (c Condition) Compare(o Condition) int {
	return cmp.Or(cmp.Compare(slices.Index(Types, c.Type), slices.Index(Types, o.Type)),
		cmp.Compare(c.Subject, o.Subject), cmp.Compare(c.Reason, o.Reason))
}
