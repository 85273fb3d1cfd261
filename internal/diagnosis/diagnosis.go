// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/brief"
)

// Diagnosis is an answer. Its JSON form is printed by `kubectl gpu why -o json`.
type Diagnosis struct {
	// Subject is the object that the question was about: "pod train/job-1".
	Subject string `json:"subject"`
	// Finding is the cause, and what to do about it.
	Finding
	// Also are further findings, the nearest to the cause first.
	Also []Finding `json:"also,omitempty"`
	// Walk is what the answer follows from, in the order of the looks.
	Walk []Step `json:"walk,omitempty"`
	// Unseen is what could not be read.
	Unseen []Unseen `json:"unseen,omitempty"`
}

// Finding is something that holds a pod up, or that is wrong on a node.
type Finding struct {
	Code Code `json:"code"`
	// Cause is one sentence without a line break.
	Cause string `json:"cause"`
	// Next is the next step; empty if nothing is to be done.
	Next string `json:"next,omitempty"`
}

// Step is one place that was looked at.
type Step struct {
	// What is the place: "requests", or the name of a node.
	What string `json:"what"`
	// Says are lines.
	Says []string `json:"says"`
}

// find returns a finding with the usual next step of its code.
func find(code Code, format string, args ...any) Finding {
	return Finding{Code: code, Cause: fmt.Sprintf(format, args...), Next: next[code]}
}

// on returns the finding with a node's name in place of NODE in the next step.
func (f Finding) on(node string) Finding {
	if node != "" {
		f.Next = strings.ReplaceAll(f.Next, "NODE", node)
	}
	return f
}

// Explain returns the diagnosis.
func (f Facts) Explain() Diagnosis {
	var d Diagnosis
	var found []Finding
	switch {
	case f.Node != "":
		d.Subject = "node " + f.Node
		found = f.node()
		d.Walk = f.walkNode()
	case f.Job != nil:
		d.Subject = "job " + f.Job.Namespace + "/" + f.Job.Name
		found = f.job()
		d.Walk = f.walk()
	case f.Pod != nil:
		d.Subject = "pod " + f.Pod.Namespace + "/" + f.Pod.Name
		found = f.pod()
		d.Walk = f.walk()
	}
	if len(found) == 0 {
		found = []Finding{find(Unknown, "nothing was found that holds %s up", d.Subject)}
	}
	for i := range found {
		found[i].Cause, found[i].Next = clean(found[i].Cause), clean(found[i].Next)
	}
	d.Finding, d.Also = found[0], different(found)
	for i := range d.Walk {
		for j := range d.Walk[i].Says {
			d.Walk[i].Says[j] = clean(d.Walk[i].Says[j])
		}
	}
	for _, u := range f.Unseen {
		d.Unseen = append(d.Unseen, Unseen{clean(u.What), clean(u.Why)})
	}
	return d
}

// different returns the findings after the first, each cause once.
func different(found []Finding) []Finding {
	var out []Finding
	for i := 1; i < len(found); i++ {
		same := func(o Finding) bool { return o.Cause == found[i].Cause }
		if !slices.ContainsFunc(found[:i], same) {
			out = append(out, found[i])
		}
	}
	return out
}

// clean makes one line of a text that tenants or nodes may have written, at most as long as a message:
// other characters than printable ones could move a terminal's cursor.
func clean(s string) string {
	s = strings.Join(strings.Fields(brief.Cut(s, brief.Text)), " ")
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// Write writes the diagnosis for people: the cause in the first line, then the next step.
func (d *Diagnosis) Write(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintln(&b, d.Cause)
	if d.Next != "" {
		fmt.Fprintf(&b, "next: %s\n", d.Next)
	}
	for _, a := range d.Also {
		fmt.Fprintf(&b, "also: %s\n", a.Cause)
	}
	fmt.Fprintf(&b, "\n%s (%s)\n", d.Subject, d.Code)
	for _, s := range d.Walk {
		fmt.Fprintf(&b, "  %s\n", s.What)
		for _, line := range s.Says {
			fmt.Fprintf(&b, "    %s\n", line)
		}
	}
	if len(d.Unseen) > 0 {
		fmt.Fprintln(&b, "  not seen")
		for _, u := range d.Unseen {
			fmt.Fprintf(&b, "    %s: %s\n", u.What, u.Why)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// newest returns the newest Event with a reason, or nil.
func (f *Facts) newest(reason string) *Event {
	var out *Event
	for i := range f.Events {
		if e := &f.Events[i]; e.Reason == reason && (out == nil || e.Last.After(out.Last)) {
			out = e
		}
	}
	return out
}

// events returns the Events for people, the newest first.
func (f *Facts) events() []string {
	all := slices.Clone(f.Events)
	slices.SortStableFunc(all, func(a, b Event) int { return b.Last.Compare(a.Last) })
	var out []string
	for i := range all {
		e := &all[i]
		line := fmt.Sprintf("%s (%s): %s", e.Reason, cmp.Or(e.From, "unknown"), e.Message)
		if e.Count > 1 {
			line += fmt.Sprintf(" (%d times)", e.Count)
		}
		if out = append(out, line); len(out) == mostEvents {
			break
		}
	}
	return out
}

// mostEvents is how many Events the answer has, and mostNames how many nodes a sentence names.
const (
	mostEvents = 12
	mostNames  = 3
)
