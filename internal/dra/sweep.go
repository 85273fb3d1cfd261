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

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
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
	// apiPatience bounds one question to the API server.
	apiPatience = 10 * time.Second
)

// Observe says which containers have allocations, the first one in front, by the runtime,
// which was asked at a moment.
func (f *FrontEnd) Observe(holders map[string][]ledger.Holder, asked time.Time) {
	f.mu.Lock()
	f.uses, f.usesAt = holders, asked
	var ours []string
	for _, held := range f.claims {
		ours = append(ours, held...)
	}
	f.mu.Unlock()
	for _, id := range ours {
		if all := holders[id]; len(all) > 0 {
			f.Ledger.SetHolder(id, all[0], otherPods(all)...)
		}
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
	return all.Wait()
}

// sweeper lists a front-end's claims, where something depends on them.
type sweeper struct {
	*FrontEnd
	// again holds a token when that should be done anew.
	again chan struct{}
}

// follow lists the claims at the start, and then where something depends on them.
func (f *sweeper) follow(ctx context.Context) error {
	pause := newPause()
	for {
		var again <-chan time.Time
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
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.again:
		case <-again:
		}
	}
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

func (f *sweeper) poke() {
	select {
	case f.again <- struct{}{}:
	default:
	}
}

// look lists the claims, if anything depends on them: at the start, while a device is
// leaving, and where an allocation may have ended unheard.
func (f *sweeper) look(ctx context.Context) error {
	state, err := f.Kubelet.DRAState()
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return fmt.Errorf("read what the kubelet has prepared: %w", err)
	}
	f.mu.Lock()
	first, known := !f.listed, f.offer != nil
	f.mu.Unlock()
	if !known {
		return nil
	}
	actx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	var used map[string]bool
	sure := !first
	if first {
		if used, sure, err = inContainers(actx, f.Runtime, f.Domain); err != nil {
			return err
		}
	}
	f.mu.Lock()
	at := f.publisher.done()
	suspects := f.suspectsLocked(&state, used, sure)
	parting := slices.ContainsFunc(slices.Collect(maps.Values(f.leaving)), func(n uint64) bool { return n > 0 && n <= at })
	f.mu.Unlock()
	if !first && len(suspects) == 0 && !parting {
		return nil
	}
	asked := f.Now()
	claims, err := f.API.Claims(actx, f.Driver)
	if err != nil {
		return fmt.Errorf("list the claims: %w", err)
	}
	if first {
		f.begin(claims, &state, used)
	}
	f.end(suspects, claims, asked)
	f.part(claims, at)
	return nil
}

// suspectsLocked are the claims that the kubelet does not know, whose containers are gone,
// and that are not new. At the start used says which allocations containers have, if sure
// says so; later, what was observed. What this process has found was promised to nobody
// since: the process before it was killed between the kubelet's Unprepare and the end of
// the record.
func (f *sweeper) suspectsLocked(state *node.DRAState, used map[string]bool, sure bool) (uids []string) {
	for uid, held := range f.claims {
		old := func(id string) bool {
			a, ok := f.Ledger.Get(id)
			switch {
			case !ok || !sure || used[id] || inUse(f.uses, id):
				return false
			case a.Taken.Before(f.began):
				return used != nil || !f.usesAt.IsZero()
			}
			return f.usesAt.After(a.Taken) && f.Now().Sub(a.Taken) >= grace
		}
		if !prepared(state, uid) && !slices.ContainsFunc(held, func(id string) bool { return !old(id) }) {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

func inUse(holders map[string][]ledger.Holder, id string) bool { return len(holders[id]) > 0 }

func prepared(state *node.DRAState, uid string) bool {
	return slices.ContainsFunc(state.Claims, func(c node.PreparedClaim) bool { return c.UID == uid })
}

// inContainers are the allocations that containers have now; sure says that there are no
// others.
func inContainers(ctx context.Context, r Runtime, domain string) (out map[string]bool, sure bool, err error) {
	containers, err := r.Containers(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("ask the container runtime which claims containers have: %w", err)
	}
	out, sure = map[string]bool{}, true
	for i := range containers {
		sure = sure && !containers[i].CDIUnknown
		for _, key := range cdi.Keys(domain, nil, containers[i].CDI) {
			out[key] = true
		}
	}
	return out, sure, nil
}

// answered reports whether the kubelet has been told that a claim is prepared. One that it
// is having prepared is in its account, too, and may wait for the room of the one before.
func answered(state *node.DRAState, driver, uid string) bool {
	return slices.ContainsFunc(state.Claims, func(c node.PreparedClaim) bool { return c.UID == uid && len(c.Devices[driver]) > 0 })
}

// begin takes over the claims that are prepared, or that containers have, and of which no
// record is left, and keeps the devices that claims name in their slices.
func (f *sweeper) begin(claims []kube.Claim, state *node.DRAState, used map[string]bool) {
	for i := range claims {
		c := &claims[i]
		inUse := slices.ContainsFunc(wants(c, f.Driver, f.Node), func(w want) bool { return used[w.id()] })
		if !inUse && !answered(state, f.Driver, c.UID) {
			continue
		}
		if err := f.takeOver(c); err != nil {
			f.Log.Warn("cannot take over what a claim has; its GPU may be given to somebody else", "claim", c.Namespace+"/"+c.Name, "err", err)
		}
	}
	for i := range claims {
		// The process before this one may have ended before it had said it.
		if shares, ok := f.taken(claims[i].UID); ok && !claims[i].Told {
			go f.tell(&claims[i], shares)
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
	claims, err := f.API.Claims(ctx, f.Driver)
	if err != nil {
		return nil, fmt.Errorf("list the claims: %w", err)
	}
	for i := range claims {
		wants, err := f.refusals.wanted(&claims[i])
		if _, ok := f.taken(claims[i].UID); ok || err != nil || f.gaveBack(&claims[i]) {
			continue // what is refused would be prepared from here
		}
		ready, _, err := f.findNow(wants)
		if !ready || err != nil {
			continue
		}
		// What can never be taken cannot be prepared either, and its Prepare says why. Where
		// the room of one result is taken still, it holds the others.
		if _, err := f.take(wants); errors.Is(err, ledger.ErrTaken) {
			for j := range wants {
				if _, err := f.take(wants[j : j+1]); errors.Is(err, ledger.ErrTaken) {
					promised = append(promised, wants[j].device.GPU)
				}
			}
		}
	}
	return promised, nil
}

// gaveBack reports whether the kubelet has given a claim back, and nobody has come since who
// may use it.
func (f *FrontEnd) gaveBack(c *kube.Claim) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, ok := f.returned[c.UID]
	return ok && !slices.ContainsFunc(c.Pods, func(p workload.Pod) bool { return !slices.Contains(r.pods, p) })
}

// end ends the suspects whose claim is no more, or is allocated no more.
func (f *sweeper) end(suspects []string, claims []kube.Claim, asked time.Time) {
	f.mu.Lock()
	ended := false
	for _, uid := range suspects {
		if slices.ContainsFunc(claims, func(c kube.Claim) bool { return c.UID == uid }) {
			continue
		}
		for _, id := range slices.Clone(f.claims[uid]) {
			if a, ok := f.Ledger.Get(id); ok && a.Taken.Before(asked) {
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
func (f *sweeper) part(claims []kube.Claim, at uint64) {
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
			held[deviceOf(&a.Grants[j])] = a.Owner == ledger.DRA
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
