// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// page names an allocation's limit page and counters on one GPU.
type page struct {
	allocation string
	gpu        gpu.UUID
}

// tally is what is known of an allocation on a GPU. The counters are the allocation's: its
// containers share them, one after another or at the same time. So the guard has one reader for all
// of them.
type tally struct {
	meter    Meter
	valid    bool      // they have made sense since they were opened
	failures int       // how often they made no sense; at most maxFailures
	tried    time.Time // when the guard last tried to open them
	lastAsk  time.Time // when a process last asked for a reading
	missing  bool      // no process counts although there is memory
	reading  lib.Reading
	read     time.Time     // first reading, or the last one if they are expensive
	cost     time.Duration // CPU time of the last reading
	used     uint64
	known    bool
	peak     uint64
}

// tallies has the tally of each allocation and GPU.
type tallies struct {
	pages Pages
	log   *guardLog
	by    map[page]*tally
}

// close closes the counters.
func (t *tally) close() {
	if t.meter != nil {
		_ = t.meter.Close()
	}
	t.meter, t.valid = nil, false
}

// take notes the driver's figure for the containers of an allocation.
func (t *tally) take(s *sum) {
	t.used, t.known = s.bytes, s.known
	t.peak = max(t.peak, t.used)
}

// open opens an allocation's counters if they are not open, and reports whether it has.
func (ts *tallies) open(at page, now time.Time) bool {
	t := ts.by[at]
	if t == nil {
		t = &tally{}
		ts.by[at] = t
	}
	if t.meter != nil || now.Sub(t.tried) < pageEvery<<t.failures {
		return false
	}
	t.tried = now
	m, err := ts.pages.Meter(at.allocation, at.gpu)
	if err == nil {
		t.meter = m
		return true
	}
	t.missing = true
	if !errors.Is(err, gpu.ErrNotFound) { // otherwise nothing is counted on this GPU
		ts.log.once("open "+at.allocation, "cannot open an allocation's counters; "+
			"the watchdog alone limits its containers", "allocation", at.allocation, "gpu", at.gpu, "err", err)
	}
	return false
}

// finish ends the reading of an allocation's counters with the driver's answer.
//
// In two cases it leaves the reading open, as if the driver had not answered. The driver's figure
// would lack a container's memory, and so the others could use that much once more:
//
//   - A process of the allocation's pod is in a container that is not listed. That may be the
//     allocation's next container.
//   - The allocation is of a claim, which other pods may share, and some container is so new that
//     the runtime does not list it yet, or has not reported its CDI devices.
func (ts *tallies) finish(at page, t *tally, sc *scene, r *roster, n *names, claim bool) {
	if len(r.of[at.allocation]) == 0 {
		t.close() // its containers have ended: the page is free for the next ones
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
		ts.discard(at, t, err)
		return
	}
	if reading.Uncounted > t.reading.Uncounted {
		ts.log.once("uncounted "+at.allocation, "programs allocate memory of a kind that the cap's library "+
			"does not know, by its own counters; the watchdog alone limits that memory",
			"allocation", at.allocation, "gpu", at.gpu)
	}
	// There is memory, and no process counts: one goes around the library. A process that ended
	// between the driver's answer and this reading had counted in the last one.
	t.missing = all.bytes > 0 && reading.Processes == 0 && t.reading.Processes == 0
	if reading.Asks != t.reading.Asks {
		t.lastAsk = time.Now()
	}
	t.reading, t.valid = reading, true
	if all.known {
		t.used = reading.Used
		t.peak = max(t.peak, t.used, reading.PeakUsed)
	}
}

// discard closes counters that make no sense. The allocation may have new ones by now, so the guard
// opens them again. If those make no sense either, it waits longer each time, since finding that
// out takes some milliseconds from all other containers.
func (ts *tallies) discard(at page, t *tally, err error) {
	valid := t.valid
	if t.close(); valid {
		t.missing = true
		return
	}
	if time.Since(t.tried) > pageEvery<<(maxFailures+1) {
		t.failures = 0
	}
	t.tried, t.missing, t.failures = time.Now(), true, min(t.failures+1, maxFailures)
	ts.log.once("meter "+at.allocation, "cannot read an allocation's counters; "+
		"the watchdog alone limits its containers", "allocation", at.allocation, "gpu", at.gpu, "err", err)
}
