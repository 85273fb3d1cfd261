// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	// sweepEvery is how often claims are looked for that have ended without an Unprepare,
	// while there are any, and grace how long one is kept that nobody knows.
	sweepEvery = 30 * time.Second
	grace      = 30 * time.Second
	// impatience is how often a Prepare that waits for the holder before it has that done
	// sooner.
	impatience = 3 * time.Second
	// lingers is for how long it is remembered that a claim was given back. The API server
	// has it allocated until its pod is known to have ended.
	lingers = time.Minute
	// apiPatience bounds one question to the API server, and listPatience the list of all
	// claims of the cluster, which is many.
	apiPatience  = 10 * time.Second
	listPatience = 40 * time.Second
	// gonePatience is how long a sweep waits for the loop to take CDI files away.
	gonePatience = 5 * time.Second
)

// Observe says which containers have allocations, the first one in front, by the runtime,
// which was asked at a moment.
func (f *FrontEnd) Observe(holders map[string][]ledger.Holder, asked time.Time) {
	f.mu.Lock()
	f.uses, f.usesAt = maps.Clone(holders), asked
	var ours []string
	over := false // something that waits for its containers has none
	for _, held := range f.claims {
		ours = append(ours, held.ids...)
		for _, id := range held.ids {
			a, _ := f.Ledger.Get(id)
			over = over || a.Superseded && len(holders[id]) == 0
		}
	}
	f.mu.Unlock()
	for _, id := range ours {
		if all := holders[id]; len(all) > 0 {
			f.Ledger.SetHolder(id, all[0], otherPods(all)...)
		}
	}
	if over {
		f.sweeper.poke()
	}
}

// otherPods are the pods of containers, each once, without that of the first.
func otherPods(all []ledger.Holder) (out []workload.Pod) {
	for _, h := range all[1:] {
		if h.Pod != all[0].Pod && !slices.Contains(out, h.Pod) {
			out = append(out, h.Pod)
		}
	}
	return out
}

// Run publishes, and ends what the kubelet has forgotten, until ctx ends.
func (f *FrontEnd) Run(ctx context.Context) error {
	all, ctx := errgroup.WithContext(ctx)
	all.Go(func() error { return f.publisher.Run(ctx) })
	all.Go(func() error { return f.sweeper.follow(ctx) })
	all.Go(func() error { return f.refusals.run(ctx) })
	all.Go(func() error { return f.Kubelet.FollowDRAState(ctx, func() { poke(f.sweeper.account) }) })
	all.Go(func() error { return f.sweeper.followAccount(ctx) })
	return all.Wait()
}

// sweeper lists a front-end's claims, where something depends on them.
type sweeper struct {
	*FrontEnd
	// again holds a token when that should be done anew, and account one when the kubelet may
	// have written its account.
	again, account chan struct{}
}

// follow lists the claims at the start, and then looks after them where something depends on
// that.
func (f *sweeper) follow(ctx context.Context) error {
	pause := newPause()
	for {
		var again <-chan time.Time
		_, ended := f.Ledger.Ended()
		switch err := f.look(ctx); {
		case err == nil:
			pause = newPause()
			again = time.After(sweepEvery)
		default:
			if ctx.Err() == nil {
				f.Log.Warn("cannot tell which claims there are; trying again", "driver", f.Driver, "err", err)
			}
			again = time.After(pause.Step())
		}
		f.mu.Lock()
		if len(f.anew) == 0 {
			ended = nil // nobody waits for it here
		}
		f.mu.Unlock()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.again:
		case <-again:
		case <-ended:
		}
	}
}

// followAccount asks the API server about the claims that the kubelet has for other pods than before. It
// gives these what it was answered for the first one, without a word to the driver. It does
// so beside the list of all claims, which may take long.
func (f *sweeper) followAccount(ctx context.Context) error {
	pause := newPause()
	for {
		again := time.After(sweepEvery)
		state, err := f.Kubelet.DRAState()
		if err == nil {
			_, err = f.ask(ctx, &state, f.forOthers(&state))
		}
		if err == nil || errors.Is(err, gpu.ErrNotFound) {
			pause = newPause()
		} else {
			again = time.After(pause.Step())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.account:
		case <-again:
		}
	}
}

// forOthers are the claims that the kubelet has for pods of which the API server has not said that what they
// have here is theirs.
func (f *sweeper) forOthers(state *node.DRAState) map[string]dra.Claim {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]dra.Claim{}
	for uid, h := range f.claims {
		if slices.ContainsFunc(podsOf(state, uid), func(p string) bool { return !h.pods[p] }) {
			out[uid] = f.nameLocked(uid)
		}
	}
	return out
}

// nameLocked is the name of a claim that has something here.
func (f *FrontEnd) nameLocked(uid string) dra.Claim {
	for _, id := range f.claims[uid].ids {
		a, _ := f.Ledger.Get(id)
		if s, err := readShare(id, a.Ref, a.Grants); err == nil {
			return dra.Claim{Namespace: s.Namespace, Name: s.Name, UID: uid}
		}
	}
	return dra.Claim{UID: uid} // its record was read when it was found
}

// lookAgain has the claims listed: something that waits for it was published.
func (f *sweeper) lookAgain() {
	f.mu.Lock()
	waits := len(f.leaving) > 0
	f.mu.Unlock()
	if waits {
		f.poke()
	}
}

func (f *sweeper) poke() { poke(f.again) }

// poke puts a token into a channel that has room for one.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// look lists the claims at the start, and while a device is leaving. Otherwise it asks for
// single claims, and only for those of which something is due: that were allocated anew, and
// that may have ended unheard.
func (f *sweeper) look(ctx context.Context) error {
	state, err := f.Kubelet.DRAState()
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return fmt.Errorf("read what the kubelet has prepared: %w", err)
	}
	f.mu.Lock()
	first, known := !f.listed, f.offer != nil
	f.mu.Unlock()
	switch {
	case !known:
		return nil
	case first:
		return f.first(ctx, &state)
	}
	// What cannot be told now is asked again at the next look, and holds up nobody else.
	gctx, cancel := context.WithTimeout(ctx, gonePatience)
	_, err = f.retire(gctx, "")
	cancel()
	f.mu.Lock()
	suspects, due := f.suspectsLocked(&state, nil, true), maps.Clone(f.anew)
	for uid := range suspects {
		due[uid] = f.nameLocked(uid)
	}
	f.mu.Unlock()
	found, aerr := f.ask(ctx, &state, due)
	err = errors.Join(err, aerr)
	over := map[string]uint64{}
	for _, uid := range slices.Sorted(maps.Keys(found)) {
		c := found[uid]
		if c.claim == nil {
			f.renewed(uid) // it has nothing
			if _, suspect := suspects[uid]; suspect {
				over[uid] = c.at
			}
			continue
		}
		f.mu.Lock()
		_, anew := f.anew[uid]
		f.mu.Unlock()
		if anew {
			f.renew(ctx, c.claim, &state)
		}
	}
	if len(over) > 0 { // what was observed may be of before a container's start
		rctx, cancel := context.WithTimeout(ctx, apiPatience)
		used, sure, rerr := inContainers(rctx, f.Runtime, f.Domain)
		cancel()
		err = errors.Join(err, rerr)
		for uid, at := range over {
			if rerr == nil && sure {
				f.end(uid, at, suspects[uid], used)
			}
		}
	}
	f.mu.Lock()
	at := f.publisher.done()
	parting := slices.ContainsFunc(slices.Collect(maps.Values(f.leaving)), func(n uint64) bool { return n > 0 && n <= at })
	f.mu.Unlock()
	if parting {
		lctx, cancel := context.WithTimeout(ctx, listPatience)
		defer cancel()
		claims, lerr := f.API.Claims(lctx, f.Driver)
		if lerr != nil {
			return errors.Join(err, fmt.Errorf("list the claims: %w", lerr))
		}
		f.part(claims, at)
	}
	return err
}

// first is the look after a start.
func (f *sweeper) first(ctx context.Context, state *node.DRAState) error {
	rctx, cancel := context.WithTimeout(ctx, apiPatience)
	used, sure, err := inContainers(rctx, f.Runtime, f.Domain)
	cancel()
	if err != nil {
		return err
	}
	f.mu.Lock()
	written := f.publisher.done()
	suspects := f.suspectsLocked(state, used, sure)
	f.mu.Unlock()
	_, at, _ := f.Ledger.State()
	lctx, cancel := context.WithTimeout(ctx, listPatience)
	defer cancel()
	claims, err := f.API.Claims(lctx, f.Driver)
	if err != nil {
		return fmt.Errorf("list the claims: %w", err)
	}
	f.begin(ctx, claims, at, state, used)
	for uid, served := range suspects {
		if !slices.ContainsFunc(claims, func(c agentkube.Claim) bool { return c.UID == uid }) {
			f.end(uid, at, served, used)
		}
	}
	f.part(claims, written)
	return nil
}

// answer is what the API server says of a claim: nil where it is no more, or has nothing here. at
// is the ledger's epoch before it was asked.
type answer struct {
	claim *agentkube.Claim
	at    uint64
}

// ask asks the API server about single claims, and compares what they have here. The error is of those
// that it returns nothing of.
func (f *sweeper) ask(ctx context.Context, state *node.DRAState, due map[string]dra.Claim) (map[string]answer, error) {
	out := map[string]answer{}
	var errs []error
	for _, uid := range slices.Sorted(maps.Keys(due)) {
		actx, cancel := context.WithTimeout(ctx, apiPatience)
		c, at, err := f.read(actx, due[uid])
		cancel()
		switch {
		case errors.Is(err, gpu.ErrNotFound) || err == nil && len(wants(c, f.Driver, f.Node)) == 0:
			out[uid] = answer{nil, at}
		case err != nil:
			errs = append(errs, fmt.Errorf("claim %s/%s: %w", due[uid].Namespace, due[uid].Name, err))
		default:
			f.agree(c, at, podsOf(state, uid))
			out[uid] = answer{c, at}
		}
	}
	return out, errors.Join(errs...)
}

// suspectsLocked are the claims that the kubelet does not know, whose containers are gone,
// and that are not new. At the start used says which allocations containers have, if sure
// says so; later, what was observed. What this process has found was promised to nobody
// since: the process before it was killed between the kubelet's Unprepare and the end of
// the record. Beside each is how often it has been served until now.
func (f *sweeper) suspectsLocked(state *node.DRAState, used map[string][]workload.Pod, sure bool) map[string]uint64 {
	uids := map[string]uint64{}
	for uid, h := range f.claims {
		old := func(id string) bool {
			a, ok := f.Ledger.Get(id)
			switch {
			case !ok || !sure || len(used[id]) > 0 || len(f.uses[id]) > 0:
				return false
			case a.Given.Before(f.began):
				return used != nil || !f.usesAt.IsZero()
			}
			return f.usesAt.After(a.Given) && f.Now().Sub(a.Given) >= grace
		}
		if accountOf(state, uid) == nil && !slices.ContainsFunc(h.ids, func(id string) bool { return !old(id) }) {
			uids[uid] = h.served
		}
	}
	return uids
}

// inContainers are the allocations that containers have now, with the containers' pods; sure says
// that there are no others.
func inContainers(ctx context.Context, r Runtime, domain string) (out map[string][]workload.Pod, sure bool, err error) {
	containers, err := r.Containers(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("ask the container runtime which claims containers have: %w", err)
	}
	out, sure = map[string][]workload.Pod{}, true
	for i := range containers {
		sure = sure && !containers[i].CDIUnknown
		for _, key := range cdi.Keys(domain, nil, containers[i].CDI) {
			out[key] = append(out[key], containers[i].InPod())
		}
	}
	return out, sure, nil
}

// answered reports whether the kubelet has been told that a claim is prepared. One that it
// is having prepared is in its account, too, and may wait for the room of the one before.
func answered(state *node.DRAState, driver, uid string) bool {
	c := accountOf(state, uid)
	return c != nil && len(c.Devices[driver]) > 0
}

// begin compares what was found in records with what the API server says, as of at, takes over
// the claims that are prepared, or that containers have, and of which no record is left, and
// keeps the devices that claims name in their slices.
func (f *sweeper) begin(ctx context.Context, claims []agentkube.Claim, at uint64, state *node.DRAState, used map[string][]workload.Pod) {
	f.mu.Lock()
	if f.uses == nil {
		f.uses = map[string][]ledger.Holder{}
		for id, pods := range used {
			for _, p := range pods {
				f.uses[id] = append(f.uses[id], ledger.Holder{Pod: p})
			}
		}
	}
	f.mu.Unlock()
	for i := range claims {
		c := &claims[i]
		f.agree(c, at, podsOf(state, c.UID))
		wants := wants(c, f.Driver, f.Node)
		if !slices.ContainsFunc(wants, func(w want) bool { _, ok := f.Ledger.Get(w.id()); return !ok }) {
			continue
		}
		switch inUse := slices.ContainsFunc(wants, func(w want) bool { return len(used[w.id()]) > 0 }); {
		case f.theirs(c, wants, state, used):
			if err := f.takeOver(c, podsOf(state, c.UID)); err != nil {
				f.Log.Warn("cannot take over what a claim has; its GPU may be given to somebody else", "claim", c.Namespace+"/"+c.Name, "err", err)
			}
		case inUse, answered(state, f.Driver, c.UID): // with what it had before
			if inUse {
				f.Log.Warn("a container has what a claim had before it was allocated anew, and no record says what that is; its GPU may be given to somebody else", "claim", c.Namespace+"/"+c.Name)
			}
			f.mu.Lock()
			f.anew[c.UID] = dra.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
			f.mu.Unlock()
			f.poke()
		}
	}
	for i := range claims {
		c := &claims[i]
		shares, ok := f.taken(c.UID)
		switch {
		case !ok:
		case answered(state, f.Driver, c.UID): // the kubelet may ask for it no more: see renew
			go f.finish(ctx, c, shares)
		case !c.Told: // the process before this one may have ended before it had said it
			go f.tell(c, shares)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	every := everyDevice(f.Node, f.offer.Inventory, f.offer.Cards)
	for i := range claims {
		for _, w := range wants(&claims[i], f.Driver, f.Node) {
			if d, ok := every[DeviceName{w.Pool, w.Device}]; ok {
				f.leaving[d] = 0 // unless a layout has it
			}
		}
	}
	f.listed = true
	f.tellLocked()
	f.showLocked()
	f.Wake() // for what was taken over
}

// Settle makes sure that whoever was promised what is withdrawn now is in the ledger: it
// waits until the server has the slices as they were published, and takes what claims have
// been allocated since. Where it fails, nothing that this front-end offers may be taken
// away. Of the GPUs that it returns, somebody was promised something whose room the holder
// before has still: they stay as they are, too.
func (f *FrontEnd) Settle(ctx context.Context) (promised []gpu.UUID, err error) {
	// Before the claims are known nothing is written: what a predecessor has published
	// stands, without a taint.
	for known := false; !known; {
		f.mu.Lock()
		news := f.news
		known = f.listed
		f.mu.Unlock()
		if known {
			break
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, errors.New("the agent has started and does not know yet which claims there are")
		}
	}
	if err := f.publisher.settled(ctx); err != nil {
		return nil, err
	}
	claims, at, err := f.list(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the claims: %w", err)
	}
	for i := range claims {
		c := &claims[i]
		f.agree(c, at, nil)
		wants, err := f.refusals.wanted(c)
		if _, ok := f.taken(c.UID); ok || err != nil || f.gaveBack(c, wants) {
			continue // what is refused would be prepared from here
		}
		ready, _, err := f.findNow(wants)
		if !ready || err != nil {
			continue
		}
		// What can never be taken cannot be prepared either, and its Prepare says why. Where
		// the room of one result is taken still, it holds the others.
		if _, err := f.take(c, wants, nil); errors.Is(err, ledger.ErrHeld) {
			for j := range wants {
				if _, err := f.take(c, wants[j:j+1], nil); errors.Is(err, ledger.ErrHeld) {
					promised = append(promised, wants[j].device.GPU)
				}
			}
		}
	}
	return promised, nil
}

// census is a list of the claims that somebody waits for.
type census struct {
	// written is the last writing of slices that the server had before it was asked, at is the
	// ledger's epoch then, and began the time.
	written, at uint64
	began       time.Time
	// done is closed when what follows is known.
	done   chan struct{}
	claims []agentkube.Claim
	err    error
}

// list returns the claims as they were listed after the server had all that is withdrawn now,
// and the ledger's epoch from before that. In a large cluster that takes longer than a
// caller waits: the list goes on then, the loop is woken when it is there, and the next caller
// has it.
func (f *FrontEnd) list(ctx context.Context) (claims []agentkube.Claim, at uint64, err error) {
	for {
		f.mu.Lock()
		c, withdrew := f.census, f.withdrew
		if c == nil {
			c = &census{written: f.publisher.done(), began: f.Now(), done: make(chan struct{})}
			_, c.at, _ = f.Ledger.State()
			f.census = c
			go func() {
				lctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), listPatience)
				defer cancel()
				c.claims, c.err = f.API.Claims(lctx, f.Driver)
				late := ctx.Err() != nil
				close(c.done)
				if late {
					f.Wake()
				}
			}()
		}
		f.mu.Unlock()
		select {
		case <-c.done:
		case <-ctx.Done():
			return nil, 0, errors.New("the API server has not said yet which there are")
		}
		f.mu.Lock()
		if f.census == c {
			f.census = nil // the next caller wants to know what has changed
		}
		fit := c.written >= withdrew && f.Now().Sub(c.began) < 2*listPatience
		f.mu.Unlock()
		if fit {
			return c.claims, c.at, c.err
		}
	}
}

// gaveBack reports whether the kubelet has given a claim back, and it is reserved for nobody
// but the pods that it was for. What it has been given since is another thing. Of something
// that is no pod nobody says that it has ended: its next pod may come at any moment.
func (f *FrontEnd) gaveBack(c *agentkube.Claim, wants []want) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, ok := f.returned[c.UID]
	return ok && len(c.Others) == 0 && !slices.ContainsFunc(c.Pods, func(p workload.Pod) bool { return !r.pods[p.UID] }) &&
		!slices.ContainsFunc(wants, func(w want) bool {
			return !slices.ContainsFunc(r.shares, func(s share) bool { return s.id() == w.id() && s.is(&w.share) })
		})
}

// end ends what a claim has that is no more, or that is allocated here no more, as of at, unless
// it was served since, or a container has it: used says which allocations containers have.
func (f *sweeper) end(uid string, at, served uint64, used map[string][]workload.Pod) {
	f.mu.Lock()
	ended := false
	if h := f.claims[uid]; h != nil && h.served == served && !slices.ContainsFunc(h.ids, func(id string) bool { return len(used[id]) > 0 }) {
		for _, id := range slices.Clone(h.ids) {
			if a, ok := f.Ledger.Get(id); ok && a.Epoch <= at {
				f.Log.Info("allocation ended: API server, kubelet and container runtime know nothing of it", "allocation", id, "claim", uid)
				f.endLocked(id, uid)
				ended = true
			}
		}
	}
	f.mu.Unlock()
	if ended {
		f.Wake()
	}
}

// part lets those devices go from their slices that were tainted at the server before the
// claims were listed, that no claim names and that nobody has. at is the last writing
// before the list.
func (f *sweeper) part(claims []agentkube.Claim, at uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	named := map[DeviceName]bool{}
	for i := range claims {
		for _, w := range wants(&claims[i], f.Driver, f.Node) {
			named[DeviceName{w.Pool, w.Device}] = true
		}
	}
	held := map[Device]bool{}
	for _, a := range f.Ledger.Allocations() {
		for j := range a.Grants {
			d := deviceOf(&a.Grants[j])
			held[d] = held[d] || a.Owner == ledger.DRA
		}
	}
	before := len(f.leaving)
	for name, d := range f.published.Devices {
		if n := f.leaving[d]; n > 0 && n <= at && !named[name] && !held[d] {
			delete(f.leaving, d)
			delete(f.published.Devices, name)
		}
	}
	if len(f.leaving) < before {
		f.Log.Info("devices leave their ResourceSlices: no claim names them", "devices", before-len(f.leaving))
		f.showLocked()
	}
}
