// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Journal collects the demand that a node's usage journal records. The zero value is empty.
type Journal struct {
	grants map[uint64]*granted
	// refused are requests of the kubelet that were refused. layouts is the last layout of each
	// GPU, in the journal's words.
	refused []refusal
	layouts map[gpu.UUID]string
	// first and last are the times of the first and last record. lost is the number of records that
	// could not be written, left the number of those that the journal had no room for, and claims
	// the number of refused claims, whose sizes are not recorded.
	first, last        time.Time
	lost, left, claims int
}

type granted struct {
	allocation, resource string
	tier                 ledger.Tier
	since, until         time.Time
	pieces               []usage.Piece
	usage.Holder
}

type refusal struct {
	at       time.Time
	resource string
	count    int
}

// Apply takes in a record.
func (j *Journal) Apply(r *usage.Record) {
	if j.first.IsZero() || r.Time.Before(j.first) {
		j.first = r.Time
	}
	if r.Time.After(j.last) {
		j.last = r.Time
	}
	if j.grants == nil {
		j.grants, j.layouts = map[uint64]*granted{}, map[gpu.UUID]string{}
	}
	switch r.Event {
	case usage.Began:
		j.adopt(r)
	case usage.Allocated:
		if j.grants[r.Grant] == nil {
			j.grants[r.Grant] = &granted{
				allocation: r.Allocation, resource: r.Resource, tier: r.Tier, since: r.Time, pieces: r.Pieces,
				Holder: r.Holder,
			}
		}
	case usage.Named:
		if g := j.grants[r.Grant]; g != nil {
			g.Holder = r.Holder
		}
	case usage.Released:
		if g := j.grants[r.Grant]; g != nil {
			g.until = r.Time
		}
	case usage.Refused:
		if r.FrontEnd == ledger.DevicePlugin && r.Count > 0 {
			j.refused = append(j.refused, refusal{r.Time, r.Resource, r.Count})
		} else {
			j.claims++
		}
	case usage.Cut:
		if r.Op == "layout" {
			j.layouts[r.GPU] = r.Placement
		}
	case usage.Lost:
		j.lost += r.Count
	case usage.Left:
		j.left += r.Count
	}
}

// adopt takes in the summary at the beginning of a journal segment: grants whose allocation is in
// no record that is left, and ends that were lost.
func (j *Journal) adopt(r *usage.Record) {
	if r.Book == nil {
		return
	}
	open := map[uint64]bool{}
	for _, g := range r.Book.Open {
		open[g.Number] = true
		if j.grants[g.Number] == nil {
			of := &granted{allocation: g.Allocation, resource: g.Resource, tier: g.Tier, since: g.Since,
				Holder: g.Holder}
			for i := range g.Held {
				of.pieces = append(of.pieces, g.Held[i].Piece)
			}
			j.grants[g.Number] = of
		}
	}
	for n, g := range j.grants {
		if g.until.IsZero() && !open[n] && n < r.Book.Next {
			g.until = r.Time
		}
	}
}

// Options select what of a journal and a trace counts.
type Options struct {
	// Since and Until bound the demand; zero means no bound.
	Since, Until time.Time
	// Back is true if refused pods came back, and do so in the replay. Then a refusal is no demand
	// of its own. Otherwise each refusal was demand that ended there.
	Back bool
	// Domain is the prefix of the node's resources, and Unit the size of a memory unit.
	Domain string
	Unit   gpu.MiB
	// Node is the node's name in the trace. Empty means the node of the pods that the journal has.
	Node string
}

// Demand returns the demand that the journal records, and that of the trace, which may be nil. It
// fails if the time of the demand is empty.
func (j *Journal) Demand(t *Trace, o Options) (*Demand, error) {
	d := &Demand{Begin: j.first, End: j.last}
	if t != nil {
		first, last := t.span()
		if d.Begin.IsZero() || !first.IsZero() && first.Before(d.Begin) {
			d.Begin = first
		}
		if last.After(d.End) {
			d.End = last
		}
	}
	if !o.Since.IsZero() {
		d.Begin = o.Since
	}
	if !o.Until.IsZero() {
		d.End = o.Until
	}
	if !d.End.After(d.Begin) {
		if d.Begin.IsZero() && d.End.IsZero() {
			return nil, errors.New("there is no demand: the journal and the trace have no record")
		}
		return nil, fmt.Errorf("there is no demand from %s to %s: "+
			"the journal and the trace have no record of that time",
			d.Begin.Format(time.RFC3339), d.End.Format(time.RFC3339))
	}
	g := &gathering{Demand: d, Options: o, trace: t, known: map[string]*pod{}}
	if t != nil {
		g.known = t.pods
	}
	g.granted(j)
	g.others(j)
	g.refused(j)
	g.finish()
	if g.spot > 0 {
		d.Notes = append(d.Notes, fmt.Sprintf("Spot pods are not replayed, since they take only what others leave free: "+
			"%d grants.", g.spot))
	}
	if j.left > 0 {
		d.Notes = append(d.Notes, fmt.Sprintf("Records are missing since the journal had no room: %d.",
			j.left))
	}
	if j.lost > 0 {
		d.Notes = append(d.Notes, fmt.Sprintf("Records that could not be written are missing: %d.", j.lost))
	}
	if j.claims > 0 {
		d.Notes = append(d.Notes, fmt.Sprintf("Refused claims are not counted, "+
			"since the journal does not have what they asked for: %d.", j.claims))
	}
	return d, nil
}

// gathering is a demand that is being collected.
type gathering struct {
	*Demand
	Options
	trace *Trace
	known map[string]*pod
	// seen has the UIDs of pods that the journal has. matched has the refusals of the journal whose
	// pods the trace has, by index.
	seen    map[string]bool
	matched map[int]bool
	holds   holds
	unseen  []unseen
	// spot counts the grants of spot pods.
	spot int
}

// unseen is a request that was never served, so its hold time is unknown.
type unseen struct {
	Request
	at time.Time
}

// granted adds what the node has served: one request for each pod.
func (g *gathering) granted(j *Journal) {
	type group struct {
		name         string
		since, until time.Time
		open         bool
		asks         []Ask
		had          map[string]bool
	}
	groups := map[string]*group{}
	for _, n := range slices.Sorted(maps.Keys(j.grants)) {
		o := j.grants[n]
		if o.tier == ledger.Spot {
			g.spot++
			continue
		}
		key := cmp.Or(o.UID, fmt.Sprint("grant ", n))
		of := groups[key]
		if of == nil {
			of = &group{name: fmt.Sprint("grant ", n), since: o.since, had: map[string]bool{}}
			groups[key] = of
		}
		if o.Pod != "" {
			of.name = o.Namespace + "/" + o.Pod
		}
		if !of.had[o.allocation] { // an init container's devices are granted again
			of.asks = append(of.asks, asksOf(o.pieces)...)
		}
		of.had[o.allocation] = true
		of.open = of.open || o.until.IsZero()
		if o.until.After(of.until) {
			of.until = o.until
		}
		if o.since.Before(of.since) {
			of.since = o.since
		}
	}
	g.seen = map[string]bool{}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		of := groups[key]
		g.seen[key] = true
		asked := of.since
		if p := g.known[key]; p != nil && p.created.Before(asked) {
			asked = p.created
		}
		if of.open {
			of.until = time.Time{}
		}
		if g.add(of.name, asked, of.since, of.until, of.asks) {
			g.Granted++
		}
	}
}

// add adds a request that was served. until is zero if it has not ended.
func (g *gathering) add(name string, asked, since, until time.Time, asks []Ask) bool {
	if len(asks) == 0 || !asked.Before(g.End) || !until.IsZero() && !until.After(g.Begin) {
		return false
	}
	r := Request{Name: name, At: max(0, asked.Sub(g.Begin)), Hold: ToTheEnd, Asks: asks}
	if !until.IsZero() && until.Before(g.End) {
		if since.Before(g.Begin) {
			since = g.Begin
		}
		r.Hold = max(until.Sub(since), 0)
		g.holds.add(&r)
	}
	g.Requests = append(g.Requests, r)
	return true
}

// refused adds the requests that the journal records as refused, unless refused pods came back.
func (g *gathering) refused(j *Journal) {
	for i, r := range j.refused {
		if g.matched[i] {
			continue
		}
		ask, ok := g.ask(r.resource, r.count)
		if !ok || r.at.Before(g.Begin) || !r.at.Before(g.End) {
			continue
		}
		if g.Refused++; !g.Back {
			g.unseen = append(g.unseen, unseen{Request{Name: fmt.Sprint("refusal ", i+1), Asks: []Ask{ask}}, r.at})
		}
	}
}

// ask returns the ask for n devices of a resource. It is false if the agent offers no such
// kind, and if spot pods ask for it.
func (o *Options) ask(resource string, n int) (Ask, bool) {
	if tier, _ := deviceplugin.TierOf(resource); tier == ledger.Spot {
		return Ask{}, false
	}
	kind, ok := deviceplugin.KindOf(resource)
	a := Ask{Kind: kind, Count: n}
	if kind.Together() {
		a.Count, a.Memory = 1, gpu.MiB(n)*o.Unit
	}
	if kind.InMIG() {
		_, short, _ := strings.Cut(resource, "/")
		a.Profile, _ = mig.ParseResource(short) // the name was parsed before
	}
	return a, ok
}

// finish estimates the unknown hold times.
func (g *gathering) finish() {
	for i := range g.unseen {
		u := &g.unseen[i]
		u.At = max(0, u.at.Sub(g.Begin))
		u.Hold = g.holds.of(&u.Request, g.Span())
		g.Requests = append(g.Requests, u.Request)
	}
	if n := len(g.unseen); n > 0 {
		g.Notes = append(g.Notes, fmt.Sprintf("Requests that were never served (%d) hold what they get for the "+
			"median time of those that ask for the same, or if there are none, of all.", n))
	}
	g.order()
}

// asksOf returns the asks that were granted as these pieces.
func asksOf(pieces []usage.Piece) (out []Ask) {
	for i := range pieces {
		p := &pieces[i]
		if p.Share == 0 && p.MemoryMiB == 0 {
			continue // it takes no room
		}
		a := Ask{Kind: p.Of.Kind(), Count: 1, Profile: piece.At(p.Of).Profile}
		if a.Kind.Shared() {
			a.Memory = gpu.MiB(p.MemoryMiB)
		}
		at := slices.IndexFunc(out, func(o Ask) bool { o.Count = 1; return o == a })
		if at >= 0 && !a.Kind.Together() {
			out[at].Count++
			continue
		}
		out = append(out, a)
	}
	return out
}

// Present returns the last layouts of a node's GPUs. It is false if the journal does not have the
// layout of each GPU.
func (j *Journal) Present(inv *gpu.Inventory) ([]config.Want, bool) {
	out := make([]config.Want, len(inv.GPUs))
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		w, ok := j.layoutOf(d)
		if !ok {
			return nil, false
		}
		w.GPU = d.UUID
		if w.Mode != config.Off && w.API == "" {
			w.API = ledger.DevicePlugin
		}
		out[i] = w
	}
	return out, len(out) > 0
}

// layoutOf returns a GPU's layout from the journal. It is false if the journal does not have it.
func (j *Journal) layoutOf(d *gpu.Device) (w config.Want, ok bool) {
	text, known := j.layouts[d.UUID]
	switch config.Mode(text) {
	case config.Whole, config.Off:
		return config.Want{Mode: config.Mode(text)}, true
	case config.Dynamic:
		return config.Want{Mode: config.Dynamic, API: ledger.DRA, OnDemand: true}, true
	case config.Shared:
		w = config.Want{Mode: config.Shared, TimeSlice: gpu.TimeSliceDefault}
		var last time.Time
		for _, g := range j.grants {
			for i := range g.pieces {
				if p := &g.pieces[i]; p.GPU == d.UUID && g.since.After(last) {
					last, w.Replicas = g.since, piece.Infer([]piece.Piece{p.Of}, d, piece.Division{}, 0).Wish().Replicas
				}
			}
		}
		return w, !last.IsZero() // otherwise it is not known whether these are replicas or memory units
	case config.Keep, config.MIG: // then the text has the placements
	}
	if !known || text == "" {
		return w, false
	}
	card, _ := mig.NewCard(&d.MIG)
	w = config.Want{Mode: config.MIG}
	var placed []mig.Placement
	for word := range strings.FieldsSeq(text) {
		at := slices.IndexFunc(card.Placements(), func(p mig.Placement) bool { return p.String() == word })
		if at < 0 {
			return w, false // a split, or a placement of another driver's table
		}
		p := card.Placements()[at]
		w.OnDemand = w.OnDemand || !card.Fits(placed, p)
		placed = append(placed, p)
		w.Geometry = count(w.Geometry, p.Profile)
	}
	if w.OnDemand { // such a GPU offers all its placements
		for _, c := range w.Geometry {
			w.Profiles = append(w.Profiles, c.Profile)
		}
		w.Geometry = nil
	}
	return w, true
}

// count adds one instance of a profile to a geometry.
func count(g []mig.Count, p mig.Name) []mig.Count {
	i := slices.IndexFunc(g, func(c mig.Count) bool { return c.Profile == p })
	if i >= 0 {
		g[i].N++
		return g
	}
	g = append(g, mig.Count{Profile: p, N: 1})
	slices.SortFunc(g, func(a, b mig.Count) int { return mig.Compare(a.Profile, b.Profile) })
	return g
}
