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
	// Since is the time at which the condition was first seen.
	Since time.Time `json:"since,omitzero"`
}

// Cause is a reason with its message. As an error its text is Message.
type Cause struct {
	Reason  Reason `json:"reason"`
	Message string `json:"message"`
}

// Why returns a cause with a message for people.
func Why(r Reason, format string, args ...any) Cause { return Cause{r, fmt.Sprintf(format, args...)} }

// Condition returns a condition with this cause.
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

// CauseOf returns an error as a cause. The reason is other if the error has none.
func CauseOf(err error, other Reason) Cause {
	var f interface{ code() Reason }
	if errors.As(err, &f) {
		other = f.code()
	}
	return Cause{other, err.Error()}
}

// Type is the kind of a condition.
type Type string

// Types of conditions.
const (
	Invalid   Type = "Invalid"   // the latest configuration is not in force
	Failed    Type = "Failed"    // something failed, and is tried again
	Refused   Type = "Refused"   // a GPU cannot be laid out as wanted, even without holders
	Blocked   Type = "Blocked"   // a change waits for holders to end
	Pending   Type = "Pending"   // a change is under way, or waits for something else
	Unhealthy Type = "Unhealthy" // a GPU or a MIG instance has a fault
	Waiting   Type = "Waiting"   // an allocated container may not start yet, or a claim can never be prepared
	Leaving   Type = "Leaving"   // a MIG device is withdrawn, or is removed when its holder ends
	Noted     Type = "Noted"     // a remark; nothing waits for it
)

// Types lists every Type, the gravest first.
var Types = []Type{Invalid, Failed, Refused, Blocked, Pending, Unhealthy, Waiting, Leaving, Noted}

// SortConditions sorts conditions, the gravest first. A condition that is also in before keeps
// its first time. Any other without a time begins now.
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
