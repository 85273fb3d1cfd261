// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// Report sums what records tell of a period. Pass it to [NewBook] as the observer, apply the
// records, and call Sum.
type Report struct {
	from, to time.Time
	by       func(*Grant) string
	sums     map[line]*Sum
}

// line names a line of a report.
type line struct {
	name string
	tier ledger.Tier
}

// Answer is a node's page /usage: sums, or who held what at a moment.
type Answer struct {
	Sums []Sum `json:"sums,omitempty"`
	Had  []Had `json:"had,omitempty"`
	// Notes are on what the journal lacks.
	Notes []string `json:"notes,omitempty"`
}

// Values of Sum.Tier and Had.Tier.
const (
	Guaranteed = "guaranteed"
	Spot       = string(ledger.Spot)
)

// Sum is one line of a report. Its times are in hours.
type Sum struct {
	// Name is the namespace, the pod as "namespace/pod", or the value of a label. It is empty
	// for grants without one.
	Name string `json:"name"`
	// Tier is "guaranteed" or "spot". A name has a line for each tier that it has grants of.
	Tier string `json:"tier"`
	// Grants is the number of grants.
	Grants int `json:"grants"`
	// GrantedGPUHours are parts of physical GPUs times hours. UsedGPUHours are the same,
	// counted only while a process was on the GPU. SMHours are hours of all streaming
	// multiprocessors of a GPU. A nil value is not known.
	GrantedGPUHours float64  `json:"grantedGPUHours"`
	UsedGPUHours    *float64 `json:"usedGPUHours"`
	GrantedGiBHours float64  `json:"grantedGiBHours"`
	UsedGiBHours    *float64 `json:"usedGiBHours"`
	// LentGPUHours and LentGiBHours are the part of what was granted that spot pods had meanwhile.
	LentGPUHours float64  `json:"lentGPUHours"`
	LentGiBHours float64  `json:"lentGiBHours"`
	SMHours      *float64 `json:"smHours"`
	// Parks is how often containers were parked, ParkedHours how many hours they were, and ParkedGiBHours what
	// they had on the host, times hours.
	Parks          int     `json:"parks,omitempty"`
	ParkedHours    float64 `json:"parkedHours,omitempty"`
	ParkedGiBHours float64 `json:"parkedGiBHours,omitempty"`
	// Cost is GrantedGPUHours at a price; nil if there is none. Price fills it in.
	Cost *float64 `json:"cost,omitempty"`

	amounts Amounts
}

// NewReport returns a report of the period between two times. It has one line for each name
// that by returns, and each tier.
func NewReport(from, to time.Time, by func(*Grant) string) *Report {
	return &Report{from: from, to: to, by: by, sums: map[line]*Sum{}}
}

// sum returns the line of a grant, and adds it if need be.
func (r *Report) sum(g *Grant) *Sum {
	of := line{r.by(g), g.Tier}
	if r.sums[of] == nil {
		r.sums[of] = &Sum{Name: of.name, Tier: of.tier.Word()}
	}
	return r.sums[of]
}

// within returns how much of a stretch is in the report's period, and how long the stretch is.
func (r *Report) within(from, to time.Time) (of, all time.Duration) {
	all = to.Sub(from)
	if from.Before(r.from) {
		from = r.from
	}
	if to.After(r.to) {
		to = r.to
	}
	return max(0, to.Sub(from)), all
}

// Granted implements [Observer].
func (r *Report) Granted(g *Grant, h *Held, from, to time.Time, part, lent float64) {
	if of, _ := r.within(from, to); of > 0 {
		s, l := of.Seconds()*part, of.Seconds()*lent
		r.sum(g).amounts.Add(Amounts{GrantedGPU: s * h.Share, GrantedMiB: s * float64(h.MemoryMiB),
			LentGPU: l * h.Share, LentMiB: l * float64(h.MemoryMiB)})
	}
}

// Used implements [Observer]. If a stretch is partly outside the report's period, its use is
// divided evenly over its time.
func (r *Report) Used(g *Grant, h *Held, from, to time.Time, more Use) {
	of, all := r.within(from, to)
	if of <= 0 || all <= 0 {
		return
	}
	part := of.Seconds() / all.Seconds() / 1000
	a := Amounts{Known: true, UsedMiB: float64(more.MiBMs) * part, UsedGPU: g.shareOf(h) * float64(more.BusyMs) * part}
	if more.SMMs != nil {
		a.SMKnown, a.SM = true, float64(*more.SMMs)*part
	}
	r.sum(g).amounts.Add(a)
}

// Parked implements [Observer].
func (r *Report) Parked(g *Grant, from, to time.Time, mib uint64) {
	if of, _ := r.within(from, to); of > 0 {
		s := r.sum(g)
		s.ParkedHours += of.Hours()
		s.ParkedGiBHours += of.Hours() * float64(mib) / 1024
		if !from.Before(r.from) {
			s.Parks++
		}
	}
}

// Ended implements [Observer].
func (r *Report) Ended(g *Grant) { r.count(g, g.Until) }

func (r *Report) count(g *Grant, until time.Time) {
	if g.Since.Before(r.to) && until.After(r.from) {
		r.sum(g).Grants++
	}
}

// Sum returns the lines, most GPU hours first. b is the book that the records were applied to.
func (r *Report) Sum(b *Book) []Sum {
	for _, g := range b.Open() {
		for i := range g.Held {
			if h := &g.Held[i]; r.to.After(h.from(g)) {
				r.Granted(g, h, h.from(g), r.to, h.Part(), h.Lent)
			}
		}
		if !g.Parked.IsZero() && r.to.After(g.Parked) {
			r.Parked(g, g.Parked, r.to, g.ParkedMiB)
		}
		r.count(g, r.to)
	}
	out := make([]Sum, 0, len(r.sums))
	for _, s := range r.sums {
		a := s.amounts
		s.GrantedGPUHours, s.GrantedGiBHours = a.GrantedGPU/3600, a.GrantedMiB/3600/1024
		s.LentGPUHours, s.LentGiBHours = a.LentGPU/3600, a.LentMiB/3600/1024
		if a.Known {
			s.UsedGPUHours, s.UsedGiBHours = new(a.UsedGPU/3600), new(a.UsedMiB/3600/1024)
		}
		if a.SMKnown {
			s.SMHours = new(a.SM / 3600)
		}
		out = append(out, *s)
	}
	slices.SortFunc(out, func(x, y Sum) int {
		return cmp.Or(cmp.Compare(y.GrantedGPUHours, x.GrantedGPUHours), cmp.Compare(x.Name, y.Name),
			cmp.Compare(x.Tier, y.Tier))
	})
	return out
}

// Price fills in what lines cost, at a price of a GPU hour in each tier.
func Price(sums []Sum, guaranteed, spot float64) {
	for i := range sums {
		price := guaranteed
		if sums[i].Tier == Spot {
			price = spot
		}
		sums[i].Cost = new(sums[i].GrantedGPUHours * price)
	}
}

// Presence finds who had a part of a GPU at a moment. Pass it to [NewBook] as the observer, apply
// the records, also those after the moment, and call Who.
type Presence struct {
	at  time.Time
	gpu string
	had map[uint64]*Grant
}

// NewPresence returns a search for a GPU's index or its UUID; an empty string matches all GPUs.
func NewPresence(at time.Time, which string) *Presence {
	return &Presence{at: at, gpu: which, had: map[uint64]*Grant{}}
}

// Granted implements [Observer].
func (*Presence) Granted(*Grant, *Held, time.Time, time.Time, float64, float64) {}

// Used implements [Observer].
func (*Presence) Used(*Grant, *Held, time.Time, time.Time, Use) {}

// Parked implements [Observer].
func (*Presence) Parked(*Grant, time.Time, time.Time, uint64) {}

// Ended implements [Observer].
func (p *Presence) Ended(g *Grant) {
	if !g.Since.After(p.at) && g.Until.After(p.at) &&
		slices.ContainsFunc(g.Held, func(h Held) bool { return p.on(&h) }) {
		p.had[g.Number] = g
	}
}

func (p *Presence) on(h *Held) bool {
	return p.gpu == "" || p.gpu == strconv.Itoa(h.Index) || h.GPU == gpu.UUID(p.gpu)
}

// Had is a piece of a GPU, and the container that had it.
type Had struct {
	Index      int       `json:"index"`
	GPU        gpu.UUID  `json:"gpu"`
	Piece      string    `json:"piece"`
	Share      float64   `json:"share"`
	Tier       string    `json:"tier"`
	Resource   string    `json:"resource"`
	Allocation string    `json:"allocation"`
	Since      time.Time `json:"since"`
	Until      time.Time `json:"until,omitzero"`
	Holder
}

// Who returns the pieces that were held, ordered by GPU and time. b is the book that the
// records were applied to.
func (p *Presence) Who(b *Book) []Had {
	for _, g := range b.Open() {
		if !g.Since.After(p.at) {
			p.had[g.Number] = g
		}
	}
	var out []Had
	for _, n := range slices.Sorted(maps.Keys(p.had)) {
		g := p.had[n]
		for i := range g.Held {
			if h := &g.Held[i]; p.on(h) {
				out = append(out, Had{
					Index: h.Index, GPU: h.GPU, Piece: h.String(), Share: h.Share, Tier: g.Tier.Word(),
					Resource:   g.Resource,
					Allocation: g.Allocation, Since: g.Since, Until: g.Until, Holder: g.Holder,
				})
			}
		}
	}
	slices.SortStableFunc(out, func(x, y Had) int {
		return cmp.Or(cmp.Compare(x.Index, y.Index), x.Since.Compare(y.Since))
	})
	return out
}
