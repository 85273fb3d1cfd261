// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// Periods of lending.
const (
	// lendEvery is how often the lender looks while something is lent, lendSoon while a GPU may lend, and
	// lendRest otherwise.
	lendEvery = 250 * time.Millisecond
	lendSoon  = time.Second
	lendRest  = 5 * time.Second
	// lendSettle is how long newcomers are held before the room is lent: a process that came to the GPU just
	// before has a context by then, and the driver lists it. lendPatience is how long the lender waits for the
	// answer that it needs.
	lendSettle   = 3 * time.Second
	lendPatience = 30 * time.Second
	// presenceOld is the age from which the driver's list of processes does not count.
	presenceOld = 20 * time.Second
	// wishesEvery is how often the runtime is asked again for the annotations of pods that it did not tell, and
	// wishesPatience how long it may take.
	wishesEvery    = 10 * time.Second
	wishesPatience = 4 * time.Second
)

// The annotation of a pod that lends nothing, below the domain, and its value.
const (
	lendAnnotation = "gpu.lend"
	lendsNothing   = "never"
)

// What people are told of a holder.
const (
	lendingWords    = "its idle room is lent"
	returningWords  = "its room was lent and is coming back"
	pagelessWords   = "it lends nothing: its container was created before its GPU's partition said lend"
	unreadableWords = "it lends nothing: the container runtime does not tell the annotations of its pod"
)

// Lending has the interfaces for lending the room of idle holders.
type Lending struct {
	// Pages hold the newcomers of an allocation. lib.Files implements it.
	Pages Holds
	// Presence returns which allocations have processes on a GPU; see guard.Guard.Presence.
	Presence func(gpu.UUID) (guard.Presence, bool)
	// Annotations returns the annotations of the node's pods, by UID. It leaves out the pods of which
	// they are not known.
	Annotations func(context.Context) (map[string]map[string]string, error)
}

// Holds is how the processes of an allocation are kept off the GPU. lib.Pages implements it.
type Holds interface {
	// SetControl sets bits in the allocation's limit pages and clears the others that of has. Controlled returns all.
	SetControl(key string, bits, of uint64) error
	Controlled(key string) (bits uint64, err error)
	// Newcomers returns how many processes wait. Waits counts how often one has begun to, in the words of
	// the processes.
	Newcomers(key string) (int, error)
	Waits(key string) (uint64, error)
}

// Lender lends the room of guaranteed holders that have had no process on the GPU for a while, where the
// partition says so (lend), and gets it back when a process comes.
//
// For each holder, the order is this:
//
//  1. No process has been on its piece for so long, by the driver's own list. A list that is old, or of which a
//     process is not known, does not count.
//  2. The lender sets HOLD in the limit pages. From then on the library holds each process that comes to the GPU.
//  3. It waits until the driver has been asked again. If a process came meanwhile, it takes HOLD back.
//  4. It has the ledger lend the room: spot pods may have it.
//  5. A process waits, or is on the GPU all the same. The lender ends lending, so the spot allocations yield.
//  6. When the last of them is out, the lender takes HOLD back, and the process goes on.
//
// So HOLD stands in the pages from before the room is lent until it is back. The bit outlives the agent. The next
// one finds it at its start (adopt), and lends as the last one did, so no spot allocation yields only because the
// agent was restarted. It takes HOLD back once the kubelet and the runtime have said who holds what, and no spot
// allocation may have the room. So a newcomer is held at each moment between.
//
// A container can write its own usage page. If it says there that a process waits, it gets its own room back, and
// takes no other's.
//
// Use [NewLender]. A nil Lender lends nothing.
type Lender struct {
	lending Lending
	key     string // the annotation's
	ledger  *ledger.Ledger
	front   *deviceplugin.FrontEnd
	log     *slog.Logger
	wake    func()
	// heard is true once the kubelet and the runtime have both answered who holds what, and a round has published
	// its offer after that. sure is what it was before a look read the offer; it belongs to the goroutine of Run.
	heard atomic.Bool
	sure  bool
	// told has what people are told of allocations, by ID. The map is replaced, never changed.
	told atomic.Pointer[map[string]string]

	// The rest belongs to the goroutine of Run, and before that to the one that calls adopt.

	holders map[string]*lendHolder // by allocation ID
	asked   time.Time              // when the runtime was last asked for annotations
}

// lendHolder is what the lender knows of a guaranteed allocation.
type lendHolder struct {
	epoch uint64
	// idle is the time since which no process was on its piece; zero if one was, or that is not known. seen is
	// when the driver was last asked, and told that none was.
	idle, seen time.Time
	// held is true if HOLD is, or may be, in its pages. since is when it was set to lend the room; zero
	// while lending is not about to begin.
	held  bool
	since time.Time
	// waits is Holds.Waits from before HOLD was set; 0 if an earlier process set it.
	waits uint64
	// lent is true from when it begins to lend until its newcomers go on. adopted is true while it lends because the
	// process before this one did.
	lent, adopted bool
	// pod is the UID of the pod whose annotations were read. refused is why it lends nothing, in words for
	// people; empty if it may.
	pod, refused string
	// failed is the last error, so that it is logged once.
	failed string
}

// NewLender returns a lender of the allocations in a ledger. domain is the prefix of annotations. wake is called
// when lending has begun or ended; it must not block.
func NewLender(of Lending, domain string, l *ledger.Ledger, front *deviceplugin.FrontEnd, wake func(), log *slog.Logger) *Lender {
	return &Lender{lending: of, key: domain + "/" + lendAnnotation, ledger: l, front: front, log: log, wake: wake,
		holders: map[string]*lendHolder{}}
}

// adopt has those allocations lend of which the last process held newcomers. It is called before anything is
// offered, and after the allocations of the last process were taken over.
func (l *Lender) adopt() {
	if l == nil {
		return
	}
	for _, a := range l.ledger.Allocations() {
		if h := l.holder(&a); h != nil && l.holds(a.ID) == nil {
			h.adopted = l.front.SetLending(a.ID, a.Epoch, true)
			h.lent = h.adopted
		}
	}
}

// Heard is called at the end of each round. heard is Witnesses.Heard.
func (l *Lender) Heard(heard bool) {
	if l != nil {
		l.heard.Store(heard)
	}
}

// Run lends until ctx ends, and returns the error of ctx.
func (l *Lender) Run(ctx context.Context) error {
	for {
		wait := l.look(ctx)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// lendAfter returns how long a holder of a GPU must have been idle to lend; 0 if none lends.
func lendAfter(offer *deviceplugin.Offer, u gpu.UUID) time.Duration {
	if o := offer.Spot[u]; o.On {
		return o.Lend
	}
	return 0
}

// look looks at each guaranteed allocation once, and returns when to look again.
func (l *Lender) look(ctx context.Context) time.Duration {
	l.sure = l.heard.Load() // first: the offer of a round that ends meanwhile is not read
	all, offer := l.ledger.Allocations(), l.front.Offer()
	wait := lendRest
	lends := func(a *ledger.Allocation) (after time.Duration) {
		for _, u := range a.GPUs() {
			of := lendAfter(offer, u)
			if of == 0 {
				return 0
			}
			after = max(after, of)
		}
		return after
	}
	l.askWishes(ctx, all, lends)
	known, told := map[string]bool{}, map[string]string{}
	for i := range all {
		a := &all[i]
		h := l.holder(a)
		if h == nil {
			continue
		}
		known[a.ID] = true
		after := lends(a)
		l.report(a, h, l.lookAt(a, h, after))
		if words := h.words(a.Lending); words != "" {
			told[a.ID] = words
		}
		switch {
		case h.held:
			wait = min(wait, lendEvery)
		case after > 0:
			wait = min(wait, lendSoon)
		}
	}
	maps.DeleteFunc(l.holders, func(id string, _ *lendHolder) bool { return !known[id] })
	l.told.Store(&told)
	return wait
}

// holder returns what is known of an allocation; nil if it never lends.
func (l *Lender) holder(a *ledger.Allocation) *lendHolder {
	if a.Tier != ledger.Guaranteed || a.Owner != ledger.DevicePlugin || !a.Kind().HasSpot() {
		return nil
	}
	h := l.holders[a.ID]
	if h == nil {
		// Pages that there are not hold nobody. Those that cannot be read may.
		err := l.holds(a.ID)
		h = &lendHolder{epoch: a.Epoch, held: err == nil || !errors.Is(err, gpu.ErrNotFound)}
		l.holders[a.ID] = h
	}
	if h.epoch != a.Epoch { // another holder, whose pages may be those of the last one
		*h = lendHolder{epoch: a.Epoch, held: h.held, lent: h.lent}
	}
	return h
}

// holds returns nil if an allocation's pages hold newcomers. The error wraps gpu.ErrNotFound if they do not.
func (l *Lender) holds(id string) error {
	bits, err := l.lending.Pages.Controlled(id)
	if err == nil && bits&lib.ControlHold == 0 {
		err = gpu.ErrNotFound
	}
	return err
}

// lookAt takes the next step of one allocation, and notes in it whether it lends then. after is how long it must have
// been idle to lend; 0 if its GPU lends nothing.
func (l *Lender) lookAt(a *ledger.Allocation, h *lendHolder, after time.Duration) error {
	now := time.Now()
	there, sure := l.presenceOf(a, now)
	switch {
	case a.Lending:
		return l.keep(a, h, after)
	case h.held && !h.since.IsZero():
		return l.begin(a, h, after, there, now)
	case h.held:
		if !l.sure || l.ledger.Borrowed(a.ID) {
			return nil
		}
		return l.release(a, h)
	}
	if l.isOn(a) || sure && !h.seen.IsZero() && there.Sub(h.seen) > presenceOld { // a gap could hide a process
		h.idle = time.Time{}
	}
	if sure {
		h.seen = there
		if h.idle.IsZero() {
			h.idle = there
		}
	}
	if after == 0 || !sure || there.Sub(h.idle) < after || !l.sure || !a.IsOpen() || a.Twice ||
		h.pod == "" || h.pod != a.Holder.UID || h.refused != "" {
		return nil
	}
	waits, err := l.lending.Pages.Waits(a.ID)
	if errors.Is(err, gpu.ErrNotFound) {
		h.refused = pagelessWords
		return nil
	}
	if err != nil {
		return fmt.Errorf("count its processes that wait: %w", err)
	}
	h.held, h.since, h.waits = true, now, waits
	return l.hold(a)
}

func (l *Lender) hold(a *ledger.Allocation) error {
	if err := l.lending.Pages.SetControl(a.ID, lib.ControlHold, lib.ControlHold); err != nil {
		return fmt.Errorf("hold its newcomers: %w", err)
	}
	return nil
}

// presenceOf returns when the driver told that no process of an allocation was on its GPUs. sure is false if one may
// be there: it is, or the answer is old or incomplete.
func (l *Lender) presenceOf(a *ledger.Allocation, now time.Time) (at time.Time, sure bool) {
	for _, u := range a.GPUs() {
		p, ok := l.lending.Presence(u)
		if !ok || !p.Sure || p.On[a.ID] || now.Sub(p.At) > presenceOld {
			return time.Time{}, false
		}
		if at.IsZero() || p.At.Before(at) {
			at = p.At
		}
	}
	return at, !at.IsZero()
}

// isOn reports whether a process of an allocation was on its GPUs when the driver was last asked.
func (l *Lender) isOn(a *ledger.Allocation) bool {
	return slices.ContainsFunc(a.GPUs(), func(u gpu.UUID) bool {
		p, _ := l.lending.Presence(u)
		return p.On[a.ID]
	})
}

// wantsBack returns why an allocation's room is wanted back; empty if it is not.
func (l *Lender) wantsBack(a *ledger.Allocation, h *lendHolder) string {
	n, errNewcomers := l.lending.Pages.Newcomers(a.ID)
	waits, errWaits := l.lending.Pages.Waits(a.ID)
	switch err := errors.Join(errNewcomers, errWaits); {
	case err != nil:
		return "its pages cannot be read: " + err.Error()
	case n > 0 || waits != h.waits:
		return "a process waits"
	case l.isOn(a):
		return "a process is on the GPU"
	}
	return ""
}

// begin begins lending once the driver has told that no process came before newcomers were held.
func (l *Lender) begin(a *ledger.Allocation, h *lendHolder, after time.Duration, there, now time.Time) error {
	why := l.wantsBack(a, h)
	if why == "" && after > 0 && a.IsOpen() && !a.Twice && now.Sub(h.since) < lendPatience {
		if there.Sub(h.since) < lendSettle {
			return nil
		}
		h.since = time.Time{}
		if l.front.SetLending(a.ID, a.Epoch, true) {
			a.Lending, h.lent = true, true
			l.log.Info("idle room is lent to spot pods", "pod", a.Holder, "allocation", a.ID, "gpu", a.GPUs()[0],
				"idle_since", h.idle)
			l.wake()
		}
		return nil
	}
	h.since = time.Time{}
	return l.release(a, h)
}

// keep ends lending if there is a reason to, and otherwise goes on.
func (l *Lender) keep(a *ledger.Allocation, h *lendHolder, after time.Duration) error {
	why := l.wantsBack(a, h)
	switch {
	case why != "":
	case h.adopted && l.sure && !l.ledger.Borrowed(a.ID):
		why = "the agent was restarted, and the room is free"
	case after == 0 && (!h.adopted || l.sure):
		why = "the partition lends nothing of its GPU now"
	case h.pod != "" && h.refused != "":
		why = h.refused
	default:
		h.held = true
		return l.hold(a) // its pages may have been made anew
	}
	a.Lending, h.adopted = false, false
	if l.front.SetLending(a.ID, a.Epoch, false) {
		l.log.Info("room that was lent is wanted back", "pod", a.Holder, "allocation", a.ID, "gpu", a.GPUs()[0], "why", why)
		l.wake()
	}
	return nil
}

// release lets the newcomers of an allocation go on. No other has its room.
func (l *Lender) release(a *ledger.Allocation, h *lendHolder) error {
	if err := l.lending.Pages.SetControl(a.ID, 0, lib.ControlHold); err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return fmt.Errorf("let its newcomers go on: %w", err)
	}
	h.held, h.lent, h.idle, h.seen = false, false, time.Time{}, time.Time{}
	return nil
}

// askWishes asks the runtime for the annotations of pods that may lend. These do not change for a pod.
func (l *Lender) askWishes(ctx context.Context, all []ledger.Allocation, lends func(*ledger.Allocation) time.Duration) {
	now := time.Now()
	wanted := map[*lendHolder]string{}
	for i := range all {
		a := &all[i]
		h := l.holder(a)
		switch {
		case h == nil:
		case lends(a) == 0:
			h.pod, h.refused = "", ""
		case a.Holder.UID != "" && h.pod != a.Holder.UID:
			wanted[h] = a.Holder.UID
		}
	}
	if len(wanted) == 0 || now.Sub(l.asked) < wishesEvery {
		return
	}
	l.asked = now
	ctx, cancel := context.WithTimeout(ctx, wishesPatience)
	defer cancel()
	of, err := l.lending.Annotations(ctx)
	for h, uid := range wanted {
		if its, told := of[uid]; err == nil && told {
			h.pod, h.refused = uid, l.refusal(its[l.key])
		} else {
			h.pod, h.refused = "", unreadableWords
		}
	}
}

// refusal returns why a pod with this value of the annotation lends nothing; empty if it may.
func (l *Lender) refusal(value string) string {
	switch value {
	case "":
		return ""
	case lendsNothing:
		return fmt.Sprintf("it lends nothing: its pod says %s: %q", l.key, value)
	}
	return fmt.Sprintf("it lends nothing: its pod says %s: %.40q, and only %q is known", l.key, value, lendsNothing)
}

// report logs an error of an allocation once.
func (l *Lender) report(a *ledger.Allocation, h *lendHolder, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != h.failed {
		l.log.Warn("cannot lend, or give back, the room of a holder", "pod", a.Holder, "allocation", a.ID, "err", err)
	}
	h.failed = text
}

// words returns what people are told of an allocation that lends, or does not; empty if there is nothing to tell.
func (h *lendHolder) words(lends bool) string {
	switch {
	case lends:
		return lendingWords
	case h.lent:
		return returningWords
	}
	return h.refused
}

// words returns what people are told of an allocation's lending; empty if there is nothing to tell.
func (l *Lender) words(id string) string {
	if l == nil {
		return ""
	}
	if told := l.told.Load(); told != nil {
		return (*told)[id]
	}
	return ""
}
