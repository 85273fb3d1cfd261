// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Ask is what one container asks for of one resource.
type Ask struct {
	Kind piece.Kind
	// Count is the number of GPUs, replicas or MIG instances; 1 for memory units, which are
	// a single piece of one GPU.
	Count int
	// Memory is what each of them has: of memory units that of all together, and 0 of a whole
	// GPU, which is what the node's are.
	Memory gpu.MiB
	// Profile is a MIG instance's.
	Profile mig.Name
}

// String is the ask in words, by which two of them are the same.
func (a Ask) String() string {
	switch {
	case a.Kind.InMIG():
		return times(a.Count, a.Profile.Resource())
	case a.Kind.Alone():
		return times(a.Count, a.Kind.Short())
	}
	return times(a.Count, a.Kind.Short()+" of "+size(a.Memory))
}

func times(n int, what string) string {
	if n == 1 {
		return what
	}
	return fmt.Sprintf("%d %s", n, what)
}

func size(m gpu.MiB) string {
	if m%1024 == 0 {
		return fmt.Sprintf("%d GiB", m/1024)
	}
	return fmt.Sprintf("%d MiB", m)
}

// Request is a pod: it gets all that it asks for, or nothing.
type Request struct {
	// Name is the pod's, or what the journal has in place of one.
	Name string
	// At is when it was asked for, after the demand's beginning.
	At time.Duration
	// Hold is for how long it holds what it gets; [ToTheEnd] where nobody saw its end.
	Hold time.Duration
	Asks []Ask
}

// ToTheEnd is the hold of a request that does not end before the demand does.
const ToTheEnd time.Duration = -1

// shape is what is asked for, in words.
func (r *Request) shape() string {
	words := make([]string, len(r.Asks))
	for i, a := range r.Asks {
		words[i] = a.String()
	}
	slices.Sort(words)
	return strings.Join(words, " and ")
}

// Demand is what was asked for in a stretch of time.
type Demand struct {
	Begin, End time.Time
	// Requests are in the order of their times.
	Requests []Request
	// Granted and Refused are how many requests the node has served and refused, as far as
	// that is recorded, and Pending those that have never come to it.
	Granted, Refused, Pending int
	// Notes are what is not in it, and what was made up, for people.
	Notes []string
}

// Span is how long the demand lasts.
func (d *Demand) Span() time.Duration { return d.End.Sub(d.Begin) }

// order sorts the requests.
func (d *Demand) order() {
	slices.SortStableFunc(d.Requests, func(a, b Request) int {
		return cmp.Or(cmp.Compare(a.At, b.At), strings.Compare(a.Name, b.Name), strings.Compare(a.shape(), b.shape()))
	})
}

// holds are the times for which requests held what they got. Requests whose end was not seen are
// given their median.
type holds struct {
	byShape map[string][]time.Duration
	all     []time.Duration
}

func (h *holds) add(r *Request) {
	if h.byShape == nil {
		h.byShape = map[string][]time.Duration{}
	}
	h.byShape[r.shape()] = append(h.byShape[r.shape()], r.Hold)
	h.all = append(h.all, r.Hold)
}

// of is the median of requests that ask for the same, else of all, else half of span.
func (h *holds) of(r *Request, span time.Duration) time.Duration {
	for _, known := range [][]time.Duration{h.byShape[r.shape()], h.all} {
		if len(known) > 0 {
			known = slices.Sorted(slices.Values(known))
			return known[len(known)/2]
		}
	}
	return span / 2
}
