// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// report prints figures as they come.
type report struct {
	out io.Writer
	// timeless leaves out targets of time and memory, which tiny counts cannot
	// judge.
	timeless       bool
	reached, total int
	missed         []string
}

// target is what a figure has to reach.
type target struct {
	most float64
	why  string
}

// figure prints a line: name, value, unit, and how it stands to its target.
func (r *report) figure(name string, value float64, unit string, want ...target) {
	number := fmt.Sprintf("%.3f", value)
	switch unit {
	case "calls", "bytes", "devices", "changes", "instances", "lanes", "nodes", "requests":
		number = fmt.Sprintf("%.0f", value)
	case "MB":
		number = fmt.Sprintf("%.1f", value)
	}
	line := fmt.Sprintf("%-58s %10s %-7s", name, number, unit)
	for _, t := range want {
		if r.timeless && !slices.Contains([]string{"calls", "changes", "instances", "requests"}, unit) {
			continue
		}
		r.total++
		word := "reached"
		if value > t.most {
			word = "NOT reached"
			r.missed = append(r.missed, name)
		} else {
			r.reached++
		}
		line += fmt.Sprintf(" target: at most %s: %s", t.why, word)
	}
	fmt.Fprintln(r.out, strings.TrimRight(line, " "))
}

// note prints a line for people.
func (r *report) note(format string, args ...any) {
	fmt.Fprintf(r.out, "# "+format+"\n", args...)
}

// summary ends the report.
func (r *report) summary() {
	r.note("%d of %d targets reached", r.reached, r.total)
	for _, name := range r.missed {
		r.note("NOT reached: %s", name)
	}
}

// sample is durations of one kind.
type sample []time.Duration

// quantile is the smallest value that a fraction q of all does not exceed, in
// milliseconds.
func (s sample) quantile(q float64) float64 {
	sorted := slices.Sorted(slices.Values(s))
	at := min(int(q*float64(len(sorted))), len(sorted)-1)
	return ms(sorted[at])
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func mb(bytes int) float64 { return float64(bytes) / 1e6 }
