// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"

	"golang.org/x/time/rate"
)

// A claim that can never be prepared as it is keeps its pod in ContainerCreating, and its
// devices from others. So it is told, looked at again after a while, and its pods are
// ended: their controllers make them anew, with a new claim. Where the new one would ask for
// the same that there is not (configuration, above all), that would only go round in
// circles: such pods are told, and left. An admission policy keeps most of them from being
// made.
const (
	// endAfter is how long the pods of a refused claim are left after that, and after
	// what was done in vain.
	endAfter = 30 * time.Second
	// taintLook is how often a claim is looked at whose pods a taint is to end.
	taintLook = 2 * time.Second
	// mostRefused is how many refused claims are remembered, and mostLeft how many of them
	// may be ones whose pods are left. What is beyond that is told by the kubelet alone,
	// until there is room.
	mostRefused = 100
	mostLeft    = 50
)

// refusals are the claims of a front-end that can never be prepared as they are.
type refusals struct {
	*FrontEnd
	// refused has them by UID. The front-end's mu guards it.
	refused map[string]*refusal
	// wake holds a token when one was refused.
	wake chan struct{}
	// ends bounds how often pods are ended, since what makes them anew may make the same
	// again.
	ends   *rate.Limiter
	ration *brief.Ration
}

func newRefusals(f *FrontEnd) *refusals {
	return &refusals{f, map[string]*refusal{}, make(chan struct{}, 1), rate.NewLimiter(rate.Every(10*time.Second), 10), brief.NewRation(f.Log, f.Now, time.AfterFunc)}
}

// refusal is a claim that can never be prepared as it is.
type refusal struct {
	claim dra.Claim
	cause status.Cause
	// results are what it was given: of another allocation nothing was refused yet.
	results []agentkube.Result
	pods    string // whose it is, for people
	// next is when it is looked at again.
	next time.Time
	// tainted is when a taint was to end its pods, zero before that, and on is what has
	// it; vain says that they are still there.
	tainted time.Time
	on      Device
	vain    bool
}

// never marks an error as one that lasts: the claim has to be made anew.
func never(why status.Reason, err error) error { return status.Because(why, err) }

// lasting is the cause of an error that lasts.
func lasting(err error) (status.Cause, bool) {
	if err == nil {
		return status.Cause{}, false
	}
	c := status.CauseOf(err, "")
	return c, c.Reason == status.ClaimOutdated || c.Reason == status.ClaimRefused || c.Reason == status.ClaimUnsupported
}

// curable reports whether a claim that was refused for that reason may be prepared when it is
// made anew, so that its pods are ended. One that is unsupported would have the same words.
func curable(why status.Cause) bool { return why.Reason != status.ClaimUnsupported }

// roomLocked reports whether another claim may be remembered that was refused for that reason.
func (f *refusals) roomLocked(why status.Cause) bool {
	left := 0
	for _, r := range f.refused {
		if !curable(r.cause) {
			left++
		}
	}
	return len(f.refused) < mostRefused && (curable(why) || left < mostLeft)
}

// note remembers what the Prepare of a claim came to.
func (f *refusals) note(claim *agentkube.Claim, err error) {
	cause, lasts := lasting(err)
	f.mu.Lock()
	defer f.mu.Unlock()
	if known := f.refused[claim.UID]; known != nil && (err == nil || !reflect.DeepEqual(known.results, claim.Results)) {
		f.forgiveLocked(claim.UID) // what was refused is what it had before
	}
	if lasts && f.refused[claim.UID] == nil && f.roomLocked(cause) {
		f.refused[claim.UID] = &refusal{claim: dra.Claim{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}, cause: cause, results: claim.Results,
			pods: consumers(claim), next: f.Now().Add(endAfter)}
		select {
		case f.wake <- struct{}{}:
		default:
		}
		f.Wake() // for the condition
		if f.RefusedClaim != nil {
			f.RefusedClaim(claim, cause)
		}
		// Beside this call, since the kubelet waits for that, and is asked for its pods.
		go f.tellRefused(claim, cause)
	}
}

// tellRefused tells the pods of a claim that it can never be prepared. Where it is not
// known whose it is, the kubelet tells them all the same.
func (f *refusals) tellRefused(claim *agentkube.Claim, cause status.Cause) {
	here, err := f.waitingHere(context.Background(), claim)
	if err != nil {
		f.ration.Log(slog.LevelInfo, "cannot tell a pod that its claim can never be prepared", nil, "claim", claim.Namespace+"/"+claim.Name, "err", err)
	}
	for _, p := range here {
		f.Tell(p, agentkube.Warning, string(cause.Reason), fmt.Sprintf("its claim %s can never be prepared: %s", claim.Name, cause.Message))
	}
}

// consumers names those that a claim is reserved for.
func consumers(c *agentkube.Claim) string {
	var out []string
	for _, p := range c.Pods {
		out = append(out, "pod "+p.String())
	}
	for _, o := range c.Others {
		out = append(out, o.String())
	}
	return brief.List(out, 3)
}

// forgiveLocked forgets a refusal, if there is one, and takes its taint away.
func (f *refusals) forgiveLocked(uid string) {
	r := f.refused[uid]
	if r == nil {
		return
	}
	delete(f.refused, uid)
	if !r.tainted.IsZero() && f.offer != nil {
		f.showLocked()
	}
}

// waitingHere are the pods of a claim that the kubelet of this node has and that have not
// begun to run: no container of theirs is there. The error says that it is not known, or
// that one of the claim's pods runs.
func (f *refusals) waitingHere(ctx context.Context, claim *agentkube.Claim) (out []workload.Pod, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	listing, err := f.Listing(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the kubelet for its pods: %w", err)
	}
	containers, err := f.Runtime.Containers(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the container runtime what runs: %w", err)
	}
	for _, p := range claim.Pods {
		for i := range containers {
			if c := &containers[i]; c.PodUID == p.UID || c.Namespace == p.Namespace && c.Pod == p.Name {
				return nil, fmt.Errorf("pod %s has a container: %w", p, gpu.ErrInUse)
			}
		}
		if listing.Has(p.Namespace, p.Name) {
			out = append(out, p)
		}
	}
	return out, nil
}

// run ends the pods of refused claims, until ctx ends.
func (f *refusals) run(ctx context.Context) error {
	for {
		var again <-chan time.Time
		f.mu.Lock()
		var first time.Time
		for _, r := range f.refused {
			if first.IsZero() || r.next.Before(first) {
				first = r.next
			}
		}
		f.mu.Unlock()
		if !first.IsZero() {
			again = time.After(first.Sub(f.Now()))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.wake:
		case <-again:
		}
		for _, uid := range f.dueRefusals() {
			f.deal(ctx, uid)
		}
	}
}

// dueRefusals are the claims that are to be looked at now, by UID.
func (f *refusals) dueRefusals() (uids []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for uid, r := range f.refused {
		if !f.Now().Before(r.next) {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

// deal does what is to be done next about a refused claim.
func (f *refusals) deal(ctx context.Context, uid string) {
	f.mu.Lock()
	r, ok := f.refused[uid]
	if !ok {
		f.mu.Unlock()
		return // prepared meanwhile
	}
	now := f.Now()
	r.next = now.Add(endAfter)
	of := *r
	f.mu.Unlock()
	claim, over, err := f.stillRefused(ctx, &of)
	if over {
		f.mu.Lock()
		f.forgiveLocked(uid)
		f.mu.Unlock()
		f.Wake()
		return
	}
	if err == nil && !reflect.DeepEqual(claim.Results, of.results) { // its pods are told of that first
		f.note(claim, f.never(claim))
		return
	}
	var pods []workload.Pod
	if err == nil && curable(of.cause) {
		pods, err = f.waitingHere(ctx, claim)
	}
	switch {
	case err != nil:
		f.ration.Log(slog.LevelInfo, "a claim that can never be prepared is left as it is", []any{"claim", of.name()}, "because", err)
	case len(pods) == 0: // it is gone, comes yet, or is left
	case !of.tainted.IsZero() && !of.vain && now.Sub(of.tainted) < endAfter:
		f.later(uid, now.Add(taintLook))
	case of.tainted.IsZero() && f.taint(ctx, uid, claim):
		f.tellEnded(pods, &of)
	default:
		f.evict(ctx, &of, pods)
	}
}

func (r *refusal) name() string { return r.claim.Namespace + "/" + r.claim.Name }

func (f *refusals) later(uid string, at time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.refused[uid]; r != nil {
		r.next = at
	}
}

// stillRefused reads a refused claim again; over says that it is no more, or has become
// possible.
func (f *refusals) stillRefused(ctx context.Context, r *refusal) (claim *agentkube.Claim, over bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	claim, err = f.API.Claim(ctx, f.Driver, r.claim.Namespace, r.claim.Name)
	switch {
	case errors.Is(err, gpu.ErrNotFound):
		return nil, true, nil
	case err != nil:
		return nil, false, fmt.Errorf("read the claim: %w", err)
	case claim.UID != r.claim.UID, len(claim.Results) == 0, !claim.HasConsumers():
		return nil, true, nil
	}
	if _, ok := f.taken(claim.UID); ok {
		return nil, true, nil
	}
	_, lasts := lasting(f.never(claim))
	return claim, !lasts, nil
}

// never is why a claim can never be prepared as it is; of another kind, or nil, where it
// may be.
func (f *refusals) never(claim *agentkube.Claim) error {
	wants, err := f.wanted(claim)
	if err != nil {
		return err
	}
	if ready, _, err := f.findNow(wants); !ready || err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var asked []ledger.Request
	for i := range wants {
		if err := f.unmadeLocked(&wants[i]); err != nil {
			return err
		}
		g, err := f.grantLocked(&wants[i], asked)
		if err != nil && !errors.Is(err, ledger.ErrHeld) {
			return err
		}
		if err == nil {
			asked = append(asked, ledger.Request{Grants: []ledger.Grant{g}})
		}
	}
	return f.lateLocked(wants)
}

// lateLocked is why results of an older layout have come too late: their devices are in
// no layout any more, and others have the room.
func (f *refusals) lateLocked(wants []want) error {
	for i := range wants {
		if _, gone := f.leaving[wants[i].device]; gone {
			return never(status.ClaimOutdated, fmt.Errorf("device %s is not in its GPU's layout any more, and others have its room: make the claim anew: %w", wants[i].Device, ledger.ErrHeld))
		}
	}
	return nil
}

// taint has a taint end the pods of a refused claim, by way of a device that nobody else
// has or can get: one that a claim has alone, or that is withdrawn. It reports false
// where there is none.
func (f *refusals) taint(ctx context.Context, uid string, claim *agentkube.Claim) bool {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	all, err := f.API.Claims(ctx, f.Driver)
	if err != nil {
		return false
	}
	others := map[DeviceName]bool{}
	for i := range all {
		for _, r := range all[i].Results {
			if all[i].UID != uid {
				others[DeviceName{r.Pool, r.Device}] = true
			}
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.refused[uid]
	if r == nil || f.published == nil || !f.ends.Allow() {
		return false
	}
	for _, result := range claim.Results {
		name := DeviceName{result.Pool, result.Device}
		d, listed := f.published.Devices[name]
		at, withdrawn := f.leaving[d]
		closed := withdrawn && at > 0 && at <= f.publisher.done() // the server has the taint
		if !listed || result.Driver != f.Driver || others[name] || f.heldLocked(d) || d.Kind.Shared() && !closed {
			continue
		}
		now := f.Now()
		r.tainted, r.on, r.next = now, d, now.Add(taintLook)
		f.showLocked()
		return true
	}
	return false
}

// heldLocked reports whether somebody has something of a device in the ledger.
func (f *refusals) heldLocked(d Device) bool {
	return slices.ContainsFunc(f.Ledger.Allocations(), func(a ledger.Allocation) bool {
		return slices.ContainsFunc(a.Grants, func(g ledger.Grant) bool { return deviceOf(&g) == d })
	})
}

// endingLocked are the devices with a taint that ends pods of refused claims, and why.
func (f *refusals) endingLocked() map[Device]status.Reason {
	out := map[Device]status.Reason{}
	for _, r := range f.refused {
		if !r.tainted.IsZero() && !r.vain {
			out[r.on] = r.cause.Reason
		}
	}
	return out
}

// evict evicts the pods of a refused claim, where that is on. A taint that was in vain
// goes.
func (f *refusals) evict(ctx context.Context, r *refusal, pods []workload.Pod) {
	if !r.tainted.IsZero() && !r.vain {
		f.mu.Lock()
		if now := f.refused[r.claim.UID]; now != nil {
			now.vain = true
			f.showLocked()
		}
		f.mu.Unlock()
	}
	if f.Evict == nil || !f.ends.Allow() {
		return
	}
	for _, p := range pods {
		if _, ok := f.taken(r.claim.UID); ok {
			return // it has become possible, and the pod may start at any moment
		}
		if err := f.Evict(ctx, p); err != nil {
			f.ration.Log(slog.LevelWarn, "cannot evict a pod whose claim can never be prepared; trying again", []any{"pod", p.String()}, "claim", r.name(), "err", err)
			continue
		}
		f.tellEnded([]workload.Pod{p}, r)
	}
}

func (f *refusals) tellEnded(pods []workload.Pod, r *refusal) {
	for _, p := range pods {
		f.Log.Warn("a pod is ended: its claim can never be prepared", "pod", p.String(), "claim", r.name(), "because", r.cause.Message)
		f.Tell(p, agentkube.Warning, string(status.ClaimEnded), fmt.Sprintf("it is ended, so that it is made anew: its claim %s can never be prepared: %s", r.claim.Name, r.cause.Message))
	}
}

// conditions are the refused claims, by namespace and name, each with the reason.
func (f *refusals) conditions() (out []status.Condition) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(f.refused)) {
		r := f.refused[uid]
		text := r.cause.Message
		if r.pods != "" {
			text = "of " + r.pods + ": " + text
		}
		out = append(out, status.Why(r.cause.Reason, "claim %s can never be prepared, %s", r.name(), text).Condition(status.Waiting, r.name()))
	}
	return out
}

// Refused are the claims that can never be prepared as they are, by namespace and name,
// each with the reason.
func (f *FrontEnd) Refused() []status.Condition { return f.refusals.conditions() }
