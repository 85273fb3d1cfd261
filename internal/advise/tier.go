// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"fmt"
	"strings"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

// LendAfter is how long a pod's GPU memory must have had no process for a spot tier to lend it.
const LendAfter = 15 * time.Minute

// Recovery finds what a spot tier could have had of a node in a recorded time. Pass it to [usage.NewBook] as the
// observer, apply the journal's records, and call Recovered.
type Recovery struct {
	since, until time.Time
	// granted and spot are what guaranteed and spot pods were granted, in MiB times seconds, and unused what
	// guaranteed pods held without a process for more than LendAfter.
	granted, spot, unused float64
	// idle has for how long no process has been on each piece, by grant and GPU.
	idle map[idleKey]time.Duration
}

type idleKey struct {
	grant uint64
	gpu   gpu.UUID
}

// NewRecovery returns a Recovery of the time between since and until.
func NewRecovery(since, until time.Time) *Recovery {
	return &Recovery{since: since, until: until, idle: map[idleKey]time.Duration{}}
}

// within returns how many seconds of a stretch count.
func (r *Recovery) within(from, to time.Time) float64 {
	if from.Before(r.since) {
		from = r.since
	}
	if to.After(r.until) {
		to = r.until
	}
	return max(0, to.Sub(from).Seconds())
}

// Granted implements [usage.Observer].
func (r *Recovery) Granted(g *usage.Grant, h *usage.Held, from, to time.Time, part, _ float64) {
	amount := r.within(from, to) * part * float64(h.MemoryMiB)
	if g.Tier == ledger.Spot {
		r.spot += amount
	} else {
		r.granted += amount
	}
}

// Used implements [usage.Observer]. A stretch with a process for a part of it counts as used from its beginning to its
// end, since the journal does not tell which part.
func (r *Recovery) Used(g *usage.Grant, h *usage.Held, from, to time.Time, more usage.Use) {
	if g.Tier == ledger.Spot || !to.After(from) {
		return
	}
	k := idleKey{g.Number, h.GPU}
	if more.BusyMs > 0 {
		delete(r.idle, k)
		return
	}
	memory := 0.0 // the first piece of a GPU has the use of all
	for i := range g.Held {
		if g.Held[i].GPU == h.GPU {
			memory += float64(g.Held[i].MemoryMiB) * g.Held[i].Part()
		}
	}
	was := r.idle[k]
	r.idle[k] = was + to.Sub(from)
	if begin := from.Add(max(0, LendAfter-was)); begin.Before(to) {
		r.unused += r.within(begin, to) * memory
	}
}

// Parked implements [usage.Observer]: a parked pod has no room on the GPU.
func (r *Recovery) Parked(*usage.Grant, time.Time, time.Time, uint64) {}

// Ended implements [usage.Observer].
func (r *Recovery) Ended(g *usage.Grant) {
	for i := range g.Held {
		delete(r.idle, idleKey{g.Number, g.Held[i].GPU})
	}
}

// Recovered is what a spot tier could have had, in GiB of GPU memory times hours.
type Recovered struct {
	Begin time.Time `json:"begin"`
	End   time.Time `json:"end"`
	// All is what the GPUs have. Free is what no guaranteed pod was granted, and Unused what guaranteed pods held
	// for more than LendAfter without a process there.
	All    float64 `json:"allGiBHours"`
	Free   float64 `json:"freeGiBHours"`
	Unused float64 `json:"unusedGiBHours"`
	// Spot is what spot pods were granted, if the node has had the tier.
	Spot float64 `json:"spotGiBHours"`
	// GPUs is how many GPUs of the node's mean size would have as much as Free and Unused, all the time.
	GPUs float64 `json:"gpus"`
}

// Recovered returns what the tier could have had of these GPUs. b is the book that the records were applied to. off has
// the GPUs that offer nothing.
func (r *Recovery) Recovered(b *usage.Book, inv *gpu.Inventory, off func(gpu.UUID) bool) Recovered {
	for _, g := range b.Open() {
		for i := range g.Held {
			h := &g.Held[i]
			from := g.Since
			if !h.From.IsZero() {
				from = h.From
			}
			if r.until.After(from) {
				r.Granted(g, h, from, r.until, h.Part(), h.Lent)
			}
		}
	}
	const hour = 3600 * 1024.0
	out := Recovered{Begin: r.since, End: r.until, Unused: r.unused / hour, Spot: r.spot / hour}
	n := 0
	for i := range inv.GPUs {
		if d := &inv.GPUs[i]; !off(d.UUID) {
			out.All += float64(d.Memory) * r.until.Sub(r.since).Seconds() / hour
			n++
		}
	}
	if out.Free = max(0, out.All-r.granted/hour); out.All > 0 {
		out.GPUs = (out.Free + out.Unused) / out.All * float64(n)
	}
	return out
}

// Sentence tells it to the person who pays.
func (r *Recovered) Sentence() string {
	of := strings.TrimSuffix(r.End.Sub(r.Begin).Round(time.Hour).String(), "0m0s")
	if d := r.End.Sub(r.Begin); d >= 48*time.Hour {
		of = fmt.Sprintf("%.0f days", d.Hours()/24)
	}
	text := fmt.Sprintf("In %s a spot tier could have had %.0f GiB-hours, %.0f%% of what the GPUs have: %.0f that no pod "+
		"was granted, and %.0f that pods held for more than %.0f minutes without a process. That is as much as %.1f more "+
		"GPUs would have given.", of, r.Free+r.Unused, 100*(r.Free+r.Unused)/max(r.All, 1), r.Free, r.Unused,
		LendAfter.Minutes(), r.GPUs)
	if r.Spot > 0 {
		text += fmt.Sprintf(" Spot pods had %.0f of it.", r.Spot)
	}
	return text
}

// Lines returns the sentence in lines for a terminal.
func (r *Recovered) Lines() string { return wrap(r.Sentence(), 100) }

// Off reports whether a GPU's last layout offers nothing.
func (j *Journal) Off(u gpu.UUID) bool { return j.layouts[u] == "off" }

// Span returns the times of the journal's first and last record.
func (j *Journal) Span() (first, last time.Time) { return j.first, j.last }
