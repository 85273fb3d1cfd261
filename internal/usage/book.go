// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"cmp"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
)

// kept is how long the totals of ended containers are kept. A new container with the same names
// adds to them, for example in a recreated pod of a StatefulSet. A counter must not fall while
// it is shown, or Prometheus counts all of it again.
const kept = time.Hour

// Book holds the open grants and the totals of containers, as records have told them. Use
// [NewBook]; the zero value does not work.
type Book struct {
	next uint64
	open map[uint64]*Grant
	// ids maps the allocation ID of each open grant to the grant's number.
	ids  map[string]uint64
	past map[Key]Past
	// last is the latest time of a record. Apply ignores a whole book that is older.
	last     time.Time
	observer Observer
}

// Observer is told of grants while a book applies records.
type Observer interface {
	// Granted is called when a piece was charged from one time to another, with part (0 to 1)
	// of its share; spot pods had lent (0 to 1) of it meanwhile. Used is called with what was used of it between two times, and Ended when
	// the grant was released.
	Granted(g *Grant, h *Held, from, to time.Time, part, lent float64)
	Used(g *Grant, h *Held, from, to time.Time, more Use)
	Ended(g *Grant)
	// Parked is called when a grant was parked from one time to another, with mib on the host.
	Parked(g *Grant, from, to time.Time, mib uint64)
}

// Grant is an allocation from its taking to its release.
type Grant struct {
	Number     uint64          `json:"grant"`
	Allocation string          `json:"allocation"`
	FrontEnd   ledger.FrontEnd `json:"frontEnd,omitempty"`
	Tier       ledger.Tier     `json:"tier,omitempty"`
	Resource   string          `json:"resource,omitempty"`
	Count      int             `json:"count,omitempty"`
	Adopted    bool            `json:"adopted,omitempty"`
	Holder
	// Yields is true while a spot grant gives its room back, or has given it back.
	Yields bool `json:"yields,omitempty"`
	// Parked is the time since which its memory is on the host, and ParkedMiB how much that is; zero if its
	// processes run.
	Parked    time.Time `json:"parked,omitzero"`
	ParkedMiB uint64    `json:"parkedMiB,omitempty"`
	Since     time.Time `json:"since"`
	// Until is the time of the release; zero before that.
	Until time.Time `json:"until,omitzero"`
	Held  []Held    `json:"pieces"`
	// Seen is the time of the last record of its use; zero if there was none.
	Seen time.Time `json:"seen,omitzero"`
}

// Held is a piece of a grant, and what was charged for it so far.
type Held struct {
	Piece
	Charge
}

// Charge is what was charged for a piece so far, and what was used of it.
type Charge struct {
	// Gone is the part of the piece, 0 to 1, that a later grant has now, and From the time
	// since which it has; a zero From is the grant's own beginning. Seconds is what was charged
	// before From: seconds times the part that was not gone.
	Gone    float64   `json:"gone,omitempty"`
	From    time.Time `json:"from,omitzero"`
	Seconds float64   `json:"seconds,omitempty"`
	// Yielded is the part of a spot grant's piece that later guaranteed grants have. It is not charged meanwhile.
	// Lent is the part of a guaranteed grant's piece that later spot grants have. It is charged all the same, and
	// LentSeconds is like Seconds for it.
	Yielded     float64 `json:"yielded,omitempty"`
	Lent        float64 `json:"lent,omitempty"`
	LentSeconds float64 `json:"lentSeconds,omitempty"`
	// Use is nil while nothing is known.
	Use *Use `json:"use,omitempty"`
}

// MarshalJSON writes the fields of the piece and of the charge as one object.
func (h Held) MarshalJSON() ([]byte, error) {
	p, err := json.Marshal(h.Piece)
	c, errCharge := json.Marshal(h.Charge)
	if err := errors.Join(err, errCharge); err != nil {
		return nil, err
	}
	return piece.Join(p, c), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (h *Held) UnmarshalJSON(data []byte) error {
	return errors.Join(h.read(data, "gone", "from", "seconds", "yielded", "lent", "lentSeconds", "use"), json.Unmarshal(data, &h.Charge))
}

// Part is the part of the piece, 0 to 1, that is charged now.
func (c *Charge) Part() float64 { return max(0, 1-c.Gone-c.Yielded) }

// Key names a container on a GPU, and the tier of what it has there, as series of metrics do.
type Key struct {
	Namespace string      `json:"namespace"`
	Pod       string      `json:"pod"`
	Container string      `json:"container"`
	GPU       gpu.UUID    `json:"gpu"`
	Tier      ledger.Tier `json:"tier,omitempty"`
}

// Amounts are a container's totals on one GPU. Those of GPUs are parts of a physical GPU times
// seconds, those of MiB are MiB times seconds, and SM is seconds of all multiprocessors.
type Amounts struct {
	GrantedGPU float64 `json:"grantedGPU"`
	GrantedMiB float64 `json:"grantedMiB"`
	UsedGPU    float64 `json:"usedGPU,omitempty"`
	UsedMiB    float64 `json:"usedMiB,omitempty"`
	// LentGPU and LentMiB are the part of GrantedGPU and GrantedMiB that spot pods had.
	LentGPU float64 `json:"lentGPU,omitempty"`
	LentMiB float64 `json:"lentMiB,omitempty"`
	SM      float64 `json:"sm,omitempty"`
	// Known is true if the use is known for at least a part of the time. SMKnown is the same
	// for SM.
	Known   bool `json:"known,omitempty"`
	SMKnown bool `json:"smKnown,omitempty"`
}

// Add adds o to a.
func (a *Amounts) Add(o Amounts) {
	a.GrantedGPU += o.GrantedGPU
	a.GrantedMiB += o.GrantedMiB
	a.UsedGPU += o.UsedGPU
	a.UsedMiB += o.UsedMiB
	a.LentGPU += o.LentGPU
	a.LentMiB += o.LentMiB
	a.SM += o.SM
	a.Known, a.SMKnown = a.Known || o.Known, a.SMKnown || o.SMKnown
}

// Past is a container's totals from its ended grants. Ended is the time of the last end.
type Past struct {
	Key
	Amounts
	Ended time.Time `json:"ended"`
}

// Series is a container's totals on a GPU, and its share of that GPU now. Index is the driver's
// number of the GPU; -1 if it is not known.
type Series struct {
	Key
	Amounts
	Index int
	Share float64
}

// NewBook returns a book without grants. It calls the observer as records are applied; nil is none.
func NewBook(observer Observer) *Book {
	return &Book{next: 1, open: map[uint64]*Grant{}, ids: map[string]uint64{}, past: map[Key]Past{}, observer: observer}
}

// Next returns the number of the next grant.
func (b *Book) Next() uint64 { return b.next }

// Of returns the open grant of an allocation, or nil. The grant belongs to the book: do not
// change it.
func (b *Book) Of(allocation string) *Grant { return b.open[b.ids[allocation]] }

// Open returns the open grants, ordered by number. They belong to the book.
func (b *Book) Open() []*Grant {
	return slices.SortedFunc(maps.Values(b.open), func(x, y *Grant) int { return cmp.Compare(x.Number, y.Number) })
}

// Apply adds a record to the book. A record that the book already has changes nothing.
func (b *Book) Apply(r *Record) {
	defer func() {
		if r.Time.After(b.last) {
			b.last = r.Time
		}
	}()
	switch r.Event {
	case Began:
		b.adopt(r)
	case Allocated:
		if r.Grant >= b.next {
			b.next = r.Grant + 1
			b.begin(r)
		}
	case Named:
		if g := b.open[r.Grant]; g != nil {
			g.Holder = r.Holder
			b.forget(g, r.Time)
		}
	case Yielded, Restored:
		if g := b.open[r.Grant]; g != nil && g.Tier == ledger.Spot {
			g.Yields = r.Event == Yielded
			b.share(g, r.Time)
		}
	case Parked, Unparked:
		if g := b.open[r.Grant]; g != nil && g.Tier == ledger.Spot {
			b.unpark(g, r.Time)
			if r.Event == Parked {
				g.Parked, g.ParkedMiB = r.Time, r.MiB
			}
		}
	case Used:
		b.use(r)
	case Released:
		if g := b.open[r.Grant]; g != nil {
			b.use(r)
			b.end(g, r.Time)
		}
	}
}

func (b *Book) begin(r *Record) {
	g := &Grant{
		Number: r.Grant, Allocation: r.Allocation, FrontEnd: r.FrontEnd, Tier: r.Tier, Resource: r.Resource,
		Count: r.Count, Adopted: r.Adopted, Holder: r.Holder, Since: r.Time,
	}
	for _, p := range r.Pieces {
		g.Held = append(g.Held, Held{Piece: p})
	}
	for _, o := range b.Open() {
		if o.Tier != g.Tier {
			continue
		}
		for i := range o.Held {
			h := &o.Held[i]
			gone := h.Gone
			for j := range r.Pieces {
				gone = min(1, gone+h.taken(&r.Pieces[j]))
			}
			if gone != h.Gone {
				b.settle(o, h, r.Time)
				h.Gone = gone
			}
		}
	}
	if old := b.Of(g.Allocation); old != nil { // its release was lost
		b.end(old, r.Time)
	}
	b.open[g.Number], b.ids[g.Allocation] = g, g.Number
	b.share(g, r.Time)
	if g.Pod != "" {
		b.forget(g, r.Time)
	}
}

// share works out which parts of pieces have changed hands between the tiers, after a grant has begun, ended or
// yielded. A guaranteed grant takes room of spot grants that are older, and a spot grant is lent room of guaranteed
// grants that are older. Either gives it back when it ends, and a spot grant when it yields.
func (b *Book) share(changed *Grant, at time.Time) {
	for _, o := range b.Open() {
		if o != changed && (o.Tier == changed.Tier || o.Number >= changed.Number) {
			continue
		}
		for i := range o.Held {
			h, part := &o.Held[i], 0.0
			for _, later := range b.Open() {
				if later.Tier == o.Tier || later.Number < o.Number || later.Yields {
					continue
				}
				for j := range later.Held {
					part = min(1, part+h.taken(&later.Held[j].Piece))
				}
			}
			of := &h.Lent
			if o.Tier == ledger.Spot {
				of = &h.Yielded
			}
			if o.Yields {
				part = 1
			}
			if *of != part {
				b.settle(o, h, at)
				*of = part
			}
		}
	}
}

// unpark ends the park of a grant, if it is parked.
func (b *Book) unpark(g *Grant, at time.Time) {
	if !g.Parked.IsZero() && b.observer != nil {
		b.observer.Parked(g, g.Parked, at, g.ParkedMiB)
	}
	g.Parked, g.ParkedMiB = time.Time{}, 0
}

// settle adds what was charged since h.From to the piece's total. h.From becomes at.
func (b *Book) settle(g *Grant, h *Held, at time.Time) {
	from := h.from(g)
	if b.observer != nil && at.After(from) {
		b.observer.Granted(g, h, from, at, h.Part(), h.Lent)
	}
	h.LentSeconds = h.lentSeconds(g, at)
	if h.Seconds = h.seconds(g, at); at.After(from) {
		h.From = at
	}
}

func (h *Held) from(g *Grant) time.Time {
	if h.From.IsZero() {
		return g.Since
	}
	return h.From
}

// seconds returns for how long the piece was charged until at, in seconds. While half of
// the piece is gone, each second counts as half a second.
func (h *Held) seconds(g *Grant, at time.Time) float64 {
	return h.Seconds + max(0, at.Sub(h.from(g)).Seconds())*h.Part()
}

// lentSeconds returns for how long spot pods had the piece until at, in seconds, counted like seconds.
func (h *Held) lentSeconds(g *Grant, at time.Time) float64 {
	return h.LentSeconds + max(0, at.Sub(h.from(g)).Seconds())*h.Lent
}

// use adds a record of use. Totals never fall.
func (b *Book) use(r *Record) {
	for i := range r.Used {
		u := r.Used[i]
		g := b.open[u.Grant]
		if g == nil {
			continue
		}
		for j := range g.Held {
			h := &g.Held[j]
			if h.Index != u.GPU {
				continue
			}
			more := u
			if h.Use != nil {
				more.MiBMs, more.BusyMs = u.MiBMs-min(u.MiBMs, h.Use.MiBMs), u.BusyMs-min(u.BusyMs, h.Use.BusyMs)
				if u.SMMs != nil && h.Use.SMMs != nil {
					more.SMMs = new(*u.SMMs - min(*u.SMMs, *h.Use.SMMs))
				}
			}
			if b.observer != nil {
				b.observer.Used(g, h, firstSet(g.Seen, g.Since), r.Time, more)
			}
			h.Use = &u
			break // the first piece of a GPU holds the use of all
		}
	}
	for i := range r.Used {
		if g := b.open[r.Used[i].Grant]; g != nil && r.Time.After(g.Seen) {
			g.Seen = r.Time
		}
	}
}

func firstSet(t, other time.Time) time.Time {
	if t.IsZero() {
		return other
	}
	return t
}

// end ends a grant.
func (b *Book) end(g *Grant, at time.Time) {
	b.unpark(g, at)
	for i := range g.Held {
		b.settle(g, &g.Held[i], at)
	}
	if g.Pod != "" {
		for i := range g.Held {
			k := g.key(i)
			p := b.past[k]
			p.Key, p.Ended = k, at
			p.Add(g.Held[i].amounts(g, at))
			b.past[k] = p
		}
	}
	g.Until = at
	delete(b.open, g.Number)
	if b.ids[g.Allocation] == g.Number {
		delete(b.ids, g.Allocation)
	}
	b.share(g, at)
	if b.observer != nil {
		b.observer.Ended(g)
	}
}

func (g *Grant) key(i int) Key {
	return Key{g.Namespace, g.Pod, g.Container, g.Held[i].GPU, g.Tier}
}

// amounts returns the piece's totals until at.
func (h *Held) amounts(g *Grant, at time.Time) Amounts {
	s := h.seconds(g, at)
	lent := h.lentSeconds(g, at)
	a := Amounts{GrantedGPU: s * h.Share, GrantedMiB: s * float64(h.MemoryMiB),
		LentGPU: lent * h.Share, LentMiB: lent * float64(h.MemoryMiB)}
	if u := h.Use; u != nil {
		a.Known, a.UsedMiB, a.UsedGPU = true, float64(u.MiBMs)/1000, g.shareOf(h)*float64(u.BusyMs)/1000
		if u.SMMs != nil {
			a.SMKnown, a.SM = true, float64(*u.SMMs)/1000
		}
	}
	return a
}

// forget drops the totals of ended containers with the same names as g, if they ended longer
// than kept ago.
func (b *Book) forget(g *Grant, at time.Time) {
	for i := range g.Held {
		k := g.key(i)
		if p, ok := b.past[k]; ok && at.Sub(p.Ended) > kept && !b.inUse(k, g) {
			delete(b.past, k)
		}
	}
}

// inUse reports whether an open grant other than but has that key.
func (b *Book) inUse(k Key, but *Grant) bool {
	for _, g := range b.open {
		for i := range g.Held {
			if g != but && g.key(i) == k {
				return true
			}
		}
	}
	return false
}

// adopt completes the book from the one that a segment begins with: some of the records before
// it may be lost. It takes grants, holders and use from there, and ends grants that are not in
// it.
func (b *Book) adopt(r *Record) {
	if r.Book == nil || r.Time.Before(b.last) {
		return
	}
	known := map[uint64]bool{}
	for _, g := range r.Book.Open {
		known[g.Number] = true
		old := b.open[g.Number]
		if old == nil {
			b.open[g.Number], b.ids[g.Allocation] = g, g.Number
			continue
		}
		old.Holder = g.Holder
		if !old.Parked.Equal(g.Parked) {
			b.unpark(old, r.Time)
			old.Parked, old.ParkedMiB = g.Parked, g.ParkedMiB
		}
		var used []Use
		for i := range g.Held {
			if u := g.Held[i].Use; u != nil {
				used = append(used, *u)
			}
		}
		b.use(&Record{Time: r.Time, Used: used})
	}
	for _, g := range b.Open() {
		if !known[g.Number] {
			b.end(g, r.Time) // its release was lost
		}
	}
	b.next = max(b.next, r.Book.Next)
	if len(b.past) == 0 {
		for _, p := range r.Book.Series {
			b.past[p.Key] = p
		}
	}
}

// State returns the book for the beginning of a segment. It drops totals that are too old, also
// in the book itself.
func (b *Book) State(at time.Time) *State {
	s := &State{Version: Version, Next: b.next, Open: b.Open()}
	maps.DeleteFunc(b.past, func(k Key, p Past) bool { return at.Sub(p.Ended) > kept && !b.inUse(k, nil) })
	s.Series = slices.SortedFunc(maps.Values(b.past), func(x, y Past) int { return x.Compare(y.Key) })
	return s
}

// Compare orders keys by namespace, pod, container and GPU.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Namespace, o.Namespace), cmp.Compare(k.Pod, o.Pod),
		cmp.Compare(k.Container, o.Container), cmp.Compare(k.GPU, o.GPU), cmp.Compare(k.Tier, o.Tier))
}

// Series returns the totals at a moment of all containers that hold something, ordered by name.
func (b *Book) Series(at time.Time) []Series {
	by := map[Key]*Series{}
	for _, g := range b.Open() {
		if g.Pod == "" {
			continue // its holder is not known yet
		}
		for i := range g.Held {
			h, k := &g.Held[i], g.key(i)
			if by[k] == nil {
				by[k] = &Series{Key: k, Amounts: b.past[k].Amounts, Index: h.Index}
			}
			by[k].Add(h.amounts(g, at))
			by[k].Share += h.Share * h.Part()
		}
	}
	return sorted(by)
}

// Ended returns the totals of a container that holds nothing now. It returns false if no grant
// of it has ended yet, or if its totals were dropped.
func (b *Book) Ended(k Key) (s Series, known bool) {
	p, known := b.past[k]
	return Series{Key: k, Amounts: p.Amounts, Index: -1}, known
}

// First returns the index of the grant's first piece on the same GPU as the given piece. That
// first piece holds the use of the whole GPU.
func (g *Grant) First(piece int) int {
	return slices.IndexFunc(g.Held, func(h Held) bool { return h.GPU == g.Held[piece].GPU })
}

// shareOf returns the grant's share of the piece's GPU: the sum over its pieces there.
func (g *Grant) shareOf(h *Held) (share float64) {
	for i := range g.Held {
		if g.Held[i].GPU == h.GPU {
			share += g.Held[i].Share
		}
	}
	return share
}

// Keys returns the keys under which a grant is counted; none while its holder is not known.
func (g *Grant) Keys() []Key {
	if g.Pod == "" {
		return nil
	}
	var out []Key
	for i := range g.Held {
		if k := g.key(i); !slices.Contains(out, k) {
			out = append(out, k)
		}
	}
	return out
}

func sorted(by map[Key]*Series) []Series {
	out := make([]Series, 0, len(by))
	for _, s := range by {
		out = append(out, *s)
	}
	slices.SortFunc(out, func(x, y Series) int { return x.Compare(y.Key) })
	return out
}

// Last returns the latest time of a record.
func (b *Book) Last() time.Time { return b.last }

// Shown is the account as metrics show it.
type Shown struct {
	// Series are the containers' totals, one entry for each GPU. A container that has ended
	// stays until two more readers have got it.
	Series []Series
	// Now are the grants of this moment. Idle are those that have been unused for a while.
	Now  []Part
	Idle []Idle
	// Written is true if the last write to the journal succeeded. Lost counts the records that
	// could not be written.
	Written bool
	Lost    uint64
	// Dropped counts the records that were removed because the journal was full.
	Dropped DroppedRecords
}

// DroppedRecords counts removed records: Refused those of refusals, Use all others.
type DroppedRecords struct{ Use, Refused uint64 }

// Part is a container's share of a GPU now.
type Part struct {
	Key
	Index int
	Share float64
}

// Idle is for how long a container has had no process on a GPU that it holds; zero while it has
// one.
type Idle struct {
	Key
	For time.Duration
}
