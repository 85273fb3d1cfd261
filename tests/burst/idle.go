// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Stage is how far a Job is at a moment, by what the API server and the agents say.
type Stage int

// The stages.
const (
	// Away: the Job has not come, or it is over and holds nothing.
	Away Stage = iota
	// Queued: it has no quota, and may have some on-prem.
	Queued
	// Delayed: it has no quota, and Kueue tries it again only from a later time on.
	Delayed
	// Kept: it has no quota, and the placer keeps it from on-prem.
	Kept
	// Called: it has no quota, and the placer holds room on-prem for it and has asked Kueue to try it.
	Called
	// Asking: it has quota, and an admission check has not let it through yet.
	Asking
	// Starting: it is admitted, and its pod does not run yet.
	Starting
	// Running: its pod runs.
	Running
	// Leaving: its pod has ended, and it holds something yet.
	Leaving
	// Evicted: Kueue takes its quota away, and ends its pod if there is one.
	Evicted
)

// Standing is how a Job stands at a moment.
type Standing struct {
	Stage
	// Site is where it has quota, from Asking on.
	Site Site
	// At is where its piece begins on a GPU on-prem, in the last of Kind's dimensions; -1 while that is unknown.
	At int
}

// holds reports whether the Job has quota on-prem, or something there yet.
func (s Standing) holds() bool { return s.Stage >= Asking && s.Site == OnPrem }

// Cause is what keeps GPU memory on-prem idle at a moment.
type Cause int

// The causes, in the order in which they are looked for. Each is described in causes.
const (
	idleBegins Cause = iota
	idleEnds
	idleAwaited
	idleReturns
	idleAsked
	idleQuota
	idleLater
	idleBarred
	idleUntried
	idleGoing
	idleMovable
	idleSettled
	idleApart
	idleSmall
	idleUnwanted
)

// causes are the names of causes, and their meanings for a reader of tables.
var causes = [...]struct{ name, means string }{
	idleBegins:   {"begins", "a Job is admitted to it, and the pod does not run yet"},
	idleEnds:     {"ends", "a Job has it whose pod has ended or is being ended"},
	idleAwaited:  {"awaited", "it is held for a Job that waits, until Kueue gives the Job quota"},
	idleReturns:  {"returns", "it is held for a Job that comes back, until it has left the cloud"},
	idleAsked:    {"asked", "a Job fits and has quota, and its check is not answered yet"},
	idleQuota:    {"quota", "a Job that waits fits, and others that do not run have the quota"},
	idleLater:    {"later", "a Job that waits fits, and Kueue tries it again only after a time"},
	idleBarred:   {"barred", "a Job that waits fits, and the placer keeps it from on-prem"},
	idleUntried:  {"untried", "a Job that waits fits and may have quota, and Kueue has not tried it since"},
	idleGoing:    {"going", "a Job fits that has quota in the cloud, and whose pod does not run there yet"},
	idleMovable:  {"movable", "a Job fits that runs in the cloud, and checkpoints"},
	idleSettled:  {"settled", "a Job fits that runs in the cloud, and does not checkpoint"},
	idleApart:    {"apart", "a Job would fit if the pieces of others lay otherwise"},
	idleSmall:    {"small", "it is too little for every Job that waits or is in the cloud"},
	idleUnwanted: {"unwanted", "no Job that waits or is in the cloud asks for it"},
}

func (c Cause) String() string { return causes[c].name }

// Idle is GPU memory on-prem that nobody's pod has, by cause: in GiB, or over time in GiB × seconds.
type Idle [len(causes)]float64

// Sum is all of it.
func (i Idle) Sum() (sum float64) {
	for _, n := range i {
		sum += n
	}
	return sum
}

// IdleAt says what keeps on-prem's memory idle at a sample. It goes through the causes in their order, and
// for each through the Jobs as they came. A Job that fits is counted in, so that the next finds less room.
func (r *Record) IdleAt(s *Sample) (by Idle) {
	b := newBoard()
	counted := make([]bool, len(r.Jobs))
	take := func(i int, cause Cause) {
		counted[i] = true
		by[cause] += float64(b.take(r.Jobs[i].Piece))
	}
	// What is held is held, whether or not its place is known.
	held := func(stages ...Stage) (of []int) {
		for i, is := range s.Jobs {
			if is.holds() && slices.Contains(stages, is.Stage) {
				b.place(r.Jobs[i].Piece, is.At)
				of = append(of, i)
			}
		}
		return of
	}
	for _, i := range held(Running) {
		counted[i] = true
		b.take(r.Jobs[i].Piece)
	}
	for _, i := range held(Starting) {
		take(i, idleBegins)
	}
	for _, i := range held(Leaving, Evicted) {
		take(i, idleEnds)
	}
	for i, is := range s.Jobs {
		if is.holds() {
			b.quota[""] -= r.Jobs[i].GiB
			b.quota[r.Jobs[i].Resource] -= r.Jobs[i].Count
		}
	}
	for _, rule := range rules {
		for i, is := range s.Jobs {
			h := r.Jobs[i]
			if !counted[i] && rule.of(h, is, b) && b.place(h.Piece, -1) {
				take(i, rule.cause)
			}
		}
	}
	for kind, left := range b.left {
		cause := idleUnwanted
		for i, is := range s.Jobs {
			h := r.Jobs[i]
			if counted[i] || h.Kind != kind || is.Stage == Away || is.Stage == Leaving {
				continue
			}
			if b.sums(h.Piece) {
				cause = idleApart
				break
			}
			cause = idleSmall
		}
		by[cause] += float64(left)
	}
	return by
}

// rules say which Jobs a cause looks at that hold nothing on-prem. Such a Job counts if it fits.
var rules = []struct {
	cause Cause
	of    func(*History, Standing, *board) bool
}{
	{idleAwaited, func(_ *History, is Standing, _ *board) bool { return is.Stage == Called }},
	{idleReturns, func(_ *History, is Standing, _ *board) bool { return is.Stage == Evicted && is.Site == Cloud }},
	{idleAsked, func(_ *History, is Standing, _ *board) bool { return is.Stage == Asking && is.Site == OnPrem }},
	{idleQuota, func(h *History, is Standing, b *board) bool {
		return is.Stage > Away && is.Stage < Called && !b.admits(h.Piece)
	}},
	{idleLater, func(_ *History, is Standing, _ *board) bool { return is.Stage == Delayed }},
	{idleBarred, func(_ *History, is Standing, _ *board) bool { return is.Stage == Kept }},
	{idleUntried, func(_ *History, is Standing, _ *board) bool { return is.Stage == Queued }},
	{idleGoing, func(_ *History, is Standing, _ *board) bool {
		return is.Site == Cloud && (is.Stage == Asking || is.Stage == Starting)
	}},
	{idleMovable, func(h *History, is Standing, _ *board) bool {
		return is.Site == Cloud && is.Stage == Running && h.Checkpoints
	}},
	{idleSettled, func(_ *History, is Standing, _ *board) bool { return is.Site == Cloud && is.Stage == Running }},
}

// board is on-prem's GPUs, as they are filled up to see what is left.
type board struct {
	gpus map[*Kind][]*device
	// left is the memory of each kind that nobody has been counted for, in GiB.
	left map[*Kind]int
	// quota is what Kueue could still give: of each resource, and of memory in GiB by the name "".
	quota map[string]int
}

// device is a GPU and the pieces of it that are taken, with their places.
type device struct {
	taken []Piece
	at    []int
}

func newBoard() *board {
	b := &board{gpus: map[*Kind][]*device{}, left: map[*Kind]int{}, quota: map[string]int{}}
	for kind, n := range Own {
		for range n {
			b.gpus[kind] = append(b.gpus[kind], &device{})
		}
		b.left[kind] = n * kind.GiB
		b.quota[""] += b.left[kind]
		for _, p := range pieces[kind] {
			// As the export has it: of each resource as much as there could be without the others.
			if b.quota[p.Resource] = n * kind.Holds[0]; len(p.Starts) > 0 {
				b.quota[p.Resource] = n * len(p.Starts)
			}
		}
	}
	return b
}

// take counts a piece's memory, as far as there is some left, and returns how much.
func (b *board) take(p Piece) int {
	n := min(p.GiB, b.left[p.Kind])
	b.left[p.Kind] -= n
	return n
}

// admits reports whether Kueue has quota for a piece.
func (b *board) admits(p Piece) bool { return p.GiB <= b.quota[""] && p.Count <= b.quota[p.Resource] }

// place puts a piece on the first GPU with room, at a place if it is not -1.
func (b *board) place(p Piece, at int) bool {
	for _, g := range b.gpus[p.Kind] {
		starts := p.Starts
		if at >= 0 {
			starts = []int{at}
		} else if len(starts) == 0 {
			starts = []int{-1}
		}
		for _, start := range starts {
			if g.has(p, start) {
				g.taken, g.at = append(g.taken, p), append(g.at, start)
				return true
			}
		}
	}
	return false
}

// has reports whether a GPU has room for a piece at a place; -1 is anywhere.
func (g *device) has(p Piece, at int) bool {
	long := func(p Piece) int { return p.Takes[len(p.Takes)-1] }
	for i, other := range g.taken {
		if at >= 0 && g.at[i] >= 0 && at < g.at[i]+long(other) && g.at[i] < at+long(p) {
			return false
		}
	}
	for d, holds := range p.Kind.Holds {
		sum := p.Takes[d]
		for _, other := range g.taken {
			sum += other.Takes[d]
		}
		if sum > holds {
			return false
		}
	}
	return true
}

// sums reports whether all GPUs of a kind together have enough left for a piece.
func (b *board) sums(p Piece) bool {
	for d, holds := range p.Kind.Holds {
		sum := p.Takes[d]
		for _, g := range b.gpus[p.Kind] {
			for _, other := range g.taken {
				sum += other.Takes[d]
			}
		}
		if sum > holds*len(b.gpus[p.Kind]) {
			return false
		}
	}
	return true
}

// Idle adds up what kept on-prem's memory idle, in GiB × seconds: while anything was paid for in the cloud,
// and over the whole record.
func (r *Record) Idle() (paid, whole Idle) {
	r.spans(func(s *Sample, lasts time.Duration) {
		for cause, n := range r.IdleAt(s) {
			n *= lasts.Seconds()
			whole[cause] += n
			if s.Sites[Cloud].GPUs > 0 {
				paid[cause] += n
			}
		}
	})
	return paid, whole
}

// spans calls see with each sample but the last, and the time until the next.
func (r *Record) spans(see func(s *Sample, lasts time.Duration)) {
	for i := range max(len(r.Samples)-1, 0) {
		see(&r.Samples[i], r.Samples[i+1].At-r.Samples[i].At)
	}
}

// IdleTable is a table of what kept on-prem idle, the most first, for each of some runs that have names. It leaves
// out causes that were none in any run.
func IdleTable(names []string, records []*Record) string {
	type row struct {
		cause       Cause
		paid, whole []float64
		// sum is what rows are sorted by, and ever is whether the cause was one at any time.
		sum  float64
		ever bool
	}
	var rows []row
	for cause := range causes {
		rows = append(rows, row{cause: Cause(cause)})
	}
	all := row{}
	for _, r := range records {
		paid, whole := r.Idle()
		for i := range rows {
			rows[i].paid, rows[i].whole = append(rows[i].paid, paid[i]), append(rows[i].whole, whole[i])
			rows[i].sum, rows[i].ever = rows[i].sum+paid[i], rows[i].ever || whole[i] > 0
		}
		all.paid, all.whole = append(all.paid, paid.Sum()), append(all.whole, whole.Sum())
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(b.sum, a.sum) })
	var out strings.Builder
	fmt.Fprint(&out, "GiB·s idle on-prem while the cloud is paid / in all\n| cause |")
	for _, name := range names {
		fmt.Fprintf(&out, " %s |", name)
	}
	fmt.Fprintf(&out, " meaning |\n|%s\n", strings.Repeat("---|", len(names)+2))
	line := func(name string, of row, means string) {
		fmt.Fprintf(&out, "| %s |", name)
		for i := range records {
			fmt.Fprintf(&out, " %.0f / %.0f |", of.paid[i], of.whole[i])
		}
		fmt.Fprintf(&out, " %s |\n", means)
	}
	for _, of := range rows {
		if !of.ever {
			continue
		}
		line(of.cause.String(), of, causes[of.cause].means)
	}
	line("all", all, "")
	return out.String()
}

// IdleCSV is what kept on-prem idle at each sample, in GiB, with what is held there and paid for.
func (r *Record) IdleCSV() []byte {
	var out bytes.Buffer
	fmt.Fprint(&out, "seconds,held,paid GPUs,waiting")
	for _, c := range causes {
		fmt.Fprintf(&out, ",%s", c.name)
	}
	for i := range r.Samples {
		s := &r.Samples[i]
		fmt.Fprintf(&out, "\n%.1f,%d,%d,%d", s.At.Seconds(), s.Sites[OnPrem].GiB, s.Sites[Cloud].GPUs, s.Waiting)
		for _, n := range r.IdleAt(s) {
			fmt.Fprintf(&out, ",%.0f", n)
		}
	}
	return append(out.Bytes(), '\n')
}
