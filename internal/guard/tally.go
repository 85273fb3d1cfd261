// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// page is an allocation on a GPU: what has a limit page and counters of its own.
type page struct {
	allocation string
	gpu        gpu.UUID
}

// tally is what is known of an allocation on a GPU. The counters are the allocation's: its
// containers share them, one after another or at the same time. So they have one
// reader, whichever of them is there.
type tally struct {
	meter   Meter
	sound   bool      // they have made sense since they were opened
	spoilt  int       // how often they turned out to be nonsense
	sought  time.Time // when they were last looked for
	lively  time.Time // when a process last asked for a reading
	missing bool      // nobody counts though there is memory
	reading lib.Reading
	read    time.Time     // when they were read for the first time, or last if they are expensive
	cost    time.Duration // of the last reading
	used    uint64
	known   bool
	peak    uint64
}

// tallies are those of all allocations.
type tallies struct {
	pages Pages
	voice *voice
	by    map[page]*tally
}

// close lets go of the counters.
func (t *tally) close() {
	if t.meter != nil {
		_ = t.meter.Close()
	}
	t.meter, t.sound = nil, false
}

// take notes what the driver says of the containers of an allocation.
func (t *tally) take(s *sum) {
	t.used, t.known = s.bytes, s.known
	t.peak = max(t.peak, t.used)
}

// open opens an allocation's counters, if they are not open, and reports whether it has.
func (ts *tallies) open(at page, now time.Time) bool {
	t := ts.by[at]
	if t == nil {
		t = &tally{}
		ts.by[at] = t
	}
	if t.meter != nil || now.Sub(t.sought) < pageEvery<<t.spoilt {
		return false
	}
	t.sought = now
	m, err := ts.pages.Meter(at.allocation, at.gpu)
	if err == nil {
		t.meter = m
		return true
	}
	t.missing = true
	if !errors.Is(err, gpu.ErrNotFound) { // else nothing is counted on this GPU
		ts.voice.once("open "+at.allocation, "cannot open an allocation's counters; "+
			"the watchdog alone limits its containers", "allocation", at.allocation, "gpu", at.gpu, "err", err)
	}
	return false
}

// finish ends the reading of an allocation's counters with what the driver has said.
//
// While a process of its pod is in a container that is not listed, nobody knows what
// the allocation's containers have: that one may be the next of them. Then the reading is
// left open, as if the driver had not answered. A figure that lacks what it has would
// give the others that much room once more. An allocation of a claim may be another pod's
// too: there any container may be the next that is not listed yet, or whose CDI devices the
// runtime has not told yet, for as long as it is new.
func (ts *tallies) finish(at page, t *tally, sc *scene, r *roster, n *names, claim bool) {
	if len(r.of[at.allocation]) == 0 {
		t.close() // they have ended: the page is the next one's
		return
	}
	for id, s := range sc.sums {
		if claim && r.isNew(place{id, at.gpu}, sc.sample.At) {
			return
		}
		if r.containers[id] != nil {
			continue
		}
		for _, c := range r.of[at.allocation] {
			if c.PodUID == s.podUID {
				return
			}
		}
	}
	all := sc.of(at.allocation)
	reading, err := t.meter.End(all.bytes, all.known, n.figures(sc, at.allocation))
	t.cost = t.meter.Cost()
	if err != nil {
		ts.spoilt(at, t, err)
		return
	}
	if reading.Uncounted > t.reading.Uncounted {
		ts.voice.once("uncounted "+at.allocation, "allocations of a kind that the cap's library does not know pass "+
			"it, by its own counters; the watchdog alone limits what they take",
			"allocation", at.allocation, "gpu", at.gpu)
	}
	// There is memory and nobody counts: a process goes around the library. A process that
	// ended between the driver's answer and this one had counted in the last reading.
	t.missing = all.bytes > 0 && reading.Processes == 0 && t.reading.Processes == 0
	if reading.Asks != t.reading.Asks {
		t.lively = time.Now()
	}
	t.reading, t.sound = reading, true
	if all.known {
		t.used = reading.Used
		t.peak = max(t.peak, t.used, reading.PeakUsed)
	}
}

// spoilt lets go of counters that make no sense. Others may have come in their place:
// the allocation may have been given to somebody else. Where these make no sense either,
// the next ones are waited for longer each time: to find out what they are costs all
// others some milliseconds.
func (ts *tallies) spoilt(at page, t *tally, err error) {
	sound := t.sound
	if t.close(); sound {
		t.missing = true
		return
	}
	if time.Since(t.sought) > pageEvery<<(maxSpoilt+1) {
		t.spoilt = 0
	}
	t.sought, t.missing, t.spoilt = time.Now(), true, min(t.spoilt+1, maxSpoilt)
	ts.voice.once("meter "+at.allocation, "cannot read an allocation's counters; "+
		"the watchdog alone limits its containers", "allocation", at.allocation, "gpu", at.gpu, "err", err)
}
