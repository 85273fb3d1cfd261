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
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"

	"golang.org/x/time/rate"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
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

// refusals are the claims that can never be prepared as they are, and the ends of their pods. Their
// lock is held before the shelf's and the ledger's, and never with the book's. Use newRefusals.
type refusals struct {
	o      *Options
	shelf  ending
	claims taker

	// mu guards refused: the claims, by UID.
	mu      sync.Mutex
	refused map[string]*refusal
	// wake has a token when one was refused.
	wake token
	// ends bounds how often pods are ended, since what makes them anew may make the same
	// again.
	ends   *rate.Limiter
	ration *brief.Ration
}

// ending is what refusals ask of the shelf.
type ending interface {
	now() view
	setEnding(map[Device]status.Reason)
}

// taker knows what a claim has in the ledger: a book.
type taker interface {
	taken(uid string) ([]share, bool)
}

func newRefusals(o *Options, s ending, claims taker) *refusals {
	return &refusals{o: o, shelf: s, claims: claims, refused: map[string]*refusal{}, wake: make(token, 1),
		ends: rate.NewLimiter(rate.Every(10*time.Second), 10), ration: brief.NewRation(o.Log, o.Now, time.AfterFunc)}
}

// refusal is a claim that can never be prepared as it is.
type refusal struct {
	claim dra.Claim
	cause status.Cause
	// results are what it was given: of another allocation nothing was refused yet.
	results []resourcev1.DeviceRequestAllocationResult
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
func (rs *refusals) roomLocked(why status.Cause) bool {
	left := 0
	for _, r := range rs.refused {
		if !curable(r.cause) {
			left++
		}
	}
	return len(rs.refused) < mostRefused && (curable(why) || left < mostLeft)
}

// note remembers what the Prepare of a claim came to.
func (rs *refusals) note(claim *agentkube.Claim, err error) {
	cause, lasts := lasting(err)
	rs.mu.Lock()
	defer rs.mu.Unlock()
	known := rs.refused[claim.UID]
	if known != nil && (err == nil || !reflect.DeepEqual(known.results, claim.Results)) {
		rs.forgiveLocked(claim.UID) // what was refused is what it had before
	}
	if lasts && rs.refused[claim.UID] == nil && rs.roomLocked(cause) {
		rs.refused[claim.UID] = &refusal{claim: nameOf(claim), cause: cause, results: claim.Results,
			pods: consumers(claim), next: rs.o.Now().Add(endAfter)}
		rs.wake.poke()
		rs.o.Wake() // for the condition
		if rs.o.RefusedClaim != nil {
			rs.o.RefusedClaim(claim, cause)
		}
		// Beside this call, since the kubelet waits for that, and is asked for its pods.
		go rs.tellRefused(claim, cause)
	}
}

// tellRefused tells the pods of a claim that it can never be prepared. Where it is not
// known whose it is, the kubelet tells them all the same.
func (rs *refusals) tellRefused(claim *agentkube.Claim, cause status.Cause) {
	here, err := rs.waitingHere(context.Background(), claim)
	if err != nil {
		rs.ration.Log(slog.LevelInfo, "cannot tell a pod that its claim can never be prepared", nil,
			"claim", claim.Namespace+"/"+claim.Name, "err", err)
	}
	for _, p := range here {
		rs.o.Tell(p, agentkube.Warning, string(cause.Reason),
			fmt.Sprintf("its claim %s can never be prepared: %s", claim.Name, cause.Message))
	}
}

// consumers names those that a claim is reserved for.
func consumers(c *agentkube.Claim) string {
	var out []string
	for _, p := range c.Pods {
		out = append(out, "pod "+p.String())
	}
	for _, o := range c.Others {
		out = append(out, schema.GroupResource{Group: o.APIGroup, Resource: o.Resource}.String()+
			" "+c.Namespace+"/"+o.Name)
	}
	return brief.List(out, 3)
}

// forgive forgets a refusal, if there is one, and takes its taint away.
func (rs *refusals) forgive(uid string) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.forgiveLocked(uid)
}

func (rs *refusals) forgiveLocked(uid string) {
	r := rs.refused[uid]
	delete(rs.refused, uid)
	if r != nil && !r.tainted.IsZero() {
		rs.taintLocked()
	}
}

// taintLocked has the devices tainted by which pods of refused claims are ended, and no others.
func (rs *refusals) taintLocked() {
	out := map[Device]status.Reason{}
	for _, r := range rs.refused {
		if !r.tainted.IsZero() && !r.vain {
			out[r.on] = r.cause.Reason
		}
	}
	rs.shelf.setEnding(out)
}

// waitingHere are the pods of a claim that the kubelet of this node has and that have not
// begun to run: no container of theirs is there. The error says that it is not known, or
// that one of the claim's pods runs.
func (rs *refusals) waitingHere(ctx context.Context, claim *agentkube.Claim) (out []workload.Pod, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	listing, err := rs.o.Listing(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the kubelet for its pods: %w", err)
	}
	containers, err := rs.o.Runtime.Containers(ctx)
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
func (rs *refusals) run(ctx context.Context) error {
	for {
		var again <-chan time.Time
		rs.mu.Lock()
		var first time.Time
		for _, r := range rs.refused {
			if first.IsZero() || r.next.Before(first) {
				first = r.next
			}
		}
		rs.mu.Unlock()
		if !first.IsZero() {
			again = time.After(first.Sub(rs.o.Now()))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-rs.wake:
		case <-again:
		}
		for _, uid := range rs.dueRefusals() {
			rs.deal(ctx, uid)
		}
	}
}

// dueRefusals are the claims that are to be looked at now, by UID.
func (rs *refusals) dueRefusals() (uids []string) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	for uid, r := range rs.refused {
		if !rs.o.Now().Before(r.next) {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

// deal does what is to be done next about a refused claim.
func (rs *refusals) deal(ctx context.Context, uid string) {
	rs.mu.Lock()
	r, ok := rs.refused[uid]
	if !ok {
		rs.mu.Unlock()
		return // prepared meanwhile
	}
	now := rs.o.Now()
	r.next = now.Add(endAfter)
	of := *r
	rs.mu.Unlock()
	claim, over, err := rs.stillRefused(ctx, &of)
	if over {
		rs.forgive(uid)
		rs.o.Wake()
		return
	}
	if err == nil && !reflect.DeepEqual(claim.Results, of.results) { // its pods are told of that first
		rs.note(claim, rs.never(claim))
		return
	}
	var pods []workload.Pod
	if err == nil && curable(of.cause) {
		pods, err = rs.waitingHere(ctx, claim)
	}
	switch {
	case err != nil:
		rs.ration.Log(slog.LevelInfo, "a claim that can never be prepared is left as it is", []any{"claim", of.name()},
			"because", err)
	case len(pods) == 0: // it is gone, comes yet, or is left
	case !of.tainted.IsZero() && !of.vain && now.Sub(of.tainted) < endAfter:
		rs.mu.Lock()
		r.next = now.Add(taintLook)
		rs.mu.Unlock()
	case of.tainted.IsZero() && rs.taint(ctx, uid, claim):
		rs.tellEnded(pods, &of)
	default:
		rs.evict(ctx, &of, pods)
	}
}

func (r *refusal) name() string { return r.claim.Namespace + "/" + r.claim.Name }

// stillRefused reads a refused claim again; over says that it is no more, or has become
// possible.
func (rs *refusals) stillRefused(ctx context.Context, r *refusal) (claim *agentkube.Claim, over bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	claim, err = rs.o.API.Claim(ctx, rs.o.Driver, r.claim.Namespace, r.claim.Name)
	switch {
	case errors.Is(err, gpu.ErrNotFound):
		return nil, true, nil
	case err != nil:
		return nil, false, fmt.Errorf("read the claim: %w", err)
	case claim.UID != r.claim.UID, len(claim.Results) == 0, !claim.HasConsumers():
		return nil, true, nil
	}
	if _, ok := rs.claims.taken(claim.UID); ok {
		return nil, true, nil
	}
	_, lasts := lasting(rs.never(claim))
	return claim, !lasts, nil
}

// never is why a claim can never be prepared as it is; of another kind, or nil, where it
// may be.
func (rs *refusals) never(claim *agentkube.Claim) error {
	wants, err := wanted(claim, rs.o.Driver, rs.o.Node)
	if err != nil {
		return err
	}
	v := rs.shelf.now()
	if ready, err := v.find(wants); !ready || err != nil {
		return err
	}
	var asked []ledger.Request
	for i := range wants {
		if err := unmade(v.offer, &wants[i]); err != nil {
			return err
		}
		g, err := grant(rs.o.Ledger, v.offer, &wants[i], asked)
		if err != nil && !errors.Is(err, ledger.ErrHeld) {
			return err
		}
		if err == nil {
			asked = append(asked, ledger.Request{Grants: []ledger.Grant{g}})
		}
	}
	return v.late(wants)
}

// taint has a taint end the pods of a refused claim, by way of a device that nobody else
// has or can get: one that a claim has alone, or that is withdrawn. It reports false
// where there is none.
func (rs *refusals) taint(ctx context.Context, uid string, claim *agentkube.Claim) bool {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	all, err := rs.o.API.Claims(ctx, rs.o.Driver)
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
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r, v := rs.refused[uid], rs.shelf.now()
	if r == nil || v.devices == nil || !rs.ends.Allow() {
		return false
	}
	for _, result := range claim.Results {
		name := DeviceName{result.Pool, result.Device}
		d, listed := v.devices[name]
		closed := v.leaving[d].tainted(v.written)
		if !listed || result.Driver != rs.o.Driver || others[name] || rs.holds(d) || d.Kind.Shared() && !closed {
			continue
		}
		now := rs.o.Now()
		r.tainted, r.on, r.next = now, d, now.Add(taintLook)
		rs.taintLocked()
		return true
	}
	return false
}

// holds reports whether somebody has something of a device in the ledger.
func (rs *refusals) holds(d Device) bool {
	return slices.ContainsFunc(rs.o.Ledger.Allocations(), func(a ledger.Allocation) bool {
		return slices.ContainsFunc(a.Grants, func(g ledger.Grant) bool { return deviceOf(&g) == d })
	})
}

// evict evicts the pods of a refused claim, where that is on. A taint that was in vain
// goes.
func (rs *refusals) evict(ctx context.Context, r *refusal, pods []workload.Pod) {
	if !r.tainted.IsZero() && !r.vain {
		rs.mu.Lock()
		if now := rs.refused[r.claim.UID]; now != nil {
			now.vain = true
			rs.taintLocked()
		}
		rs.mu.Unlock()
	}
	if rs.o.Evict == nil || !rs.ends.Allow() {
		return
	}
	for _, p := range pods {
		if _, ok := rs.claims.taken(r.claim.UID); ok {
			return // it has become possible, and the pod may start at any moment
		}
		if err := rs.o.Evict(ctx, p); err != nil {
			rs.ration.Log(slog.LevelWarn, "cannot evict a pod whose claim can never be prepared; trying again",
				[]any{"pod", p.String()}, "claim", r.name(), "err", err)
			continue
		}
		rs.tellEnded([]workload.Pod{p}, r)
	}
}

func (rs *refusals) tellEnded(pods []workload.Pod, r *refusal) {
	for _, p := range pods {
		rs.o.Log.Warn("a pod is ended: its claim can never be prepared",
			"pod", p.String(), "claim", r.name(), "because", r.cause.Message)
		rs.o.Tell(p, agentkube.Warning, string(status.ClaimEnded), fmt.Sprintf("it is ended, so that it is made anew: "+
			"its claim %s can never be prepared: %s", r.claim.Name, r.cause.Message))
	}
}

func (rs *refusals) Refused() (out []status.Condition) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(rs.refused)) {
		r := rs.refused[uid]
		text := r.cause.Message
		if r.pods != "" {
			text = "of " + r.pods + ": " + text
		}
		why := status.Why(r.cause.Reason, "claim %s can never be prepared, %s", r.name(), text)
		out = append(out, why.Condition(status.Waiting, r.name()))
	}
	return out
}
