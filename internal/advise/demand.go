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
	// Count is the number of GPUs, replicas or MIG instances. It is 1 for memory units, which are a
	// single piece of one GPU.
	Count int
	// Memory is the size of each device; of memory units, the size of all together. It is 0 for
	// whole GPUs, whose size is that of the node's GPUs.
	Memory gpu.MiB
	// Profile is the profile of MIG instances; zero for other kinds.
	Profile mig.Name
}

// String describes the ask. Equal asks have equal texts.
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

// Request is a pod. It gets all that it asks for, or nothing.
type Request struct {
	// Name is the pod's name, or the number of its grant or refusal if the journal does not know
	// the pod.
	Name string
	// At is when it was asked for, as time since the demand's beginning.
	At time.Duration
	// Hold is how long it holds its devices; [ToTheEnd] if it did not end within the demand.
	Hold time.Duration
	Asks []Ask
}

// ToTheEnd is the Hold of a request that does not end before the demand does.
const ToTheEnd time.Duration = -1

// shape describes what is asked for. Requests that ask for the same have the same shape.
func (r *Request) shape() string {
	words := make([]string, len(r.Asks))
	for i, a := range r.Asks {
		words[i] = a.String()
	}
	slices.Sort(words)
	return strings.Join(words, " and ")
}

// Demand is what was asked for within a time.
type Demand struct {
	Begin, End time.Time
	// Requests are sorted by their times.
	Requests []Request
	// Granted is how many requests the node has served, Refused how many it has refused, and
	// Pending how many never came to it, as far as that is recorded.
	Granted, Refused, Pending int
	// Notes tell people what is missing and what was estimated.
	Notes []string
}

// Span returns how long the demand lasts.
func (d *Demand) Span() time.Duration { return d.End.Sub(d.Begin) }

// order sorts the requests.
func (d *Demand) order() {
	slices.SortStableFunc(d.Requests, func(a, b Request) int {
		return cmp.Or(cmp.Compare(a.At, b.At), strings.Compare(a.Name, b.Name), strings.Compare(a.shape(), b.shape()))
	})
}

// holds are the known hold times. Requests with an unknown end get a median of these.
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

// of returns the median of requests with the same shape, or else of all, or else half of span.
func (h *holds) of(r *Request, span time.Duration) time.Duration {
	for _, known := range [][]time.Duration{h.byShape[r.shape()], h.all} {
		if len(known) > 0 {
			known = slices.Sorted(slices.Values(known))
			return known[len(known)/2]
		}
	}
	return span / 2
}
