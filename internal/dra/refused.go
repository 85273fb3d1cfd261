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

// A claim that can never be prepared as it is keeps its pod in ContainerCreating, and its devices
// from others. So its pods get an Event. If the claim is still refused after a while, its pods are
// ended: their controllers make them anew, with a new claim. If the new claim would ask for the
// same impossible thing, above all for configuration, that would go on for ever. Such pods get the
// Event and are left. An admission policy prevents most of them.
const (
	// endAfter is the pause after a claim was refused, and after each attempt to end its pods.
	endAfter = 30 * time.Second
	// taintLook is how often a claim is read while a taint is to end its pods.
	taintLook = 2 * time.Second
	// mostRefused is how many refused claims are remembered, and mostLeft how many of them may be
	// of pods that are left. The pods of further claims learn the reason from the kubelet alone,
	// until there is room.
	mostRefused = 100
	mostLeft    = 50
)

// refusals has the claims that can never be prepared as they are, and ends their pods. Its lock
// comes before the shelf's and the ledger's, and is never held with the book's. Use newRefusals.
type refusals struct {
	o      *Options
	shelf  ending
	claims taker

	// mu guards refused, which has the claims by UID.
	mu      sync.Mutex
	refused map[string]*refusal
	// wake gets a token when a claim is refused.
	wake token
	// ends limits how often pods are ended, since their controllers may make the same again.
	ends   *rate.Limiter
	ration *brief.Ration
}

// ending is the part of the shelf that refusals need.
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
	// results are what it was allocated. Another allocation of the claim has not been refused.
	results []resourcev1.DeviceRequestAllocationResult
	pods    string // its consumers, for people
	// next is the time at which it is looked at again.
	next time.Time
	// tainted is the time at which a taint was set to end its pods; zero before that. on is the
	// device with that taint. vain is true if the pods are still there afterwards.
	tainted time.Time
	on      Device
	vain    bool
}

// permanent marks an error that no retry mends: the claim has to be made anew.
func permanent(why status.Reason, err error) error { return status.Because(why, err) }

// lasting returns the cause of an error, and whether it is permanent.
func lasting(err error) (status.Cause, bool) {
	if err == nil {
		return status.Cause{}, false
	}
	c := status.CauseOf(err, "")
	return c, c.Reason == status.ClaimOutdated || c.Reason == status.ClaimRefused || c.Reason == status.ClaimUnsupported
}

// curable reports whether a new claim of the same pod may be prepared after the old one was refused
// for this reason, so that it helps to end the pod. An unsupported claim would come back the same.
func curable(why status.Cause) bool { return why.Reason != status.ClaimUnsupported }

// roomLocked reports whether one more claim that was refused for this reason may be remembered.
func (rs *refusals) roomLocked(why status.Cause) bool {
	left := 0
	for _, r := range rs.refused {
		if !curable(r.cause) {
			left++
		}
	}
	return len(rs.refused) < mostRefused && (curable(why) || left < mostLeft)
}

// note remembers a claim if its Prepare has failed for good, and forgets it if it succeeded or the
// claim was allocated anew.
func (rs *refusals) note(claim *agentkube.Claim, err error) {
	cause, lasts := lasting(err)
	rs.mu.Lock()
	defer rs.mu.Unlock()
	known := rs.refused[claim.UID]
	if known != nil && (err == nil || !reflect.DeepEqual(known.results, claim.Results)) {
		rs.forgiveLocked(claim.UID) // it has another allocation than the refused one
	}
	if lasts && rs.refused[claim.UID] == nil && rs.roomLocked(cause) {
		rs.refused[claim.UID] = &refusal{claim: nameOf(claim), cause: cause, results: claim.Results,
			pods: consumers(claim), next: rs.o.Now().Add(endAfter)}
		rs.wake.poke()
		rs.o.Wake() // the loop publishes the condition
		if rs.o.RefusedClaim != nil {
			rs.o.RefusedClaim(claim, cause)
		}
		// In a goroutine, since tellRefused asks the kubelet, which waits for this call.
		go rs.tellRefused(claim, cause)
	}
}

// tellRefused sends the waiting pods of a claim an Event that it can never be prepared. If these
// pods are not known, it only logs that: the kubelet tells them anyway.
func (rs *refusals) tellRefused(claim *agentkube.Claim, cause status.Cause) {
	here, err := rs.waitingHere(context.Background(), claim)
	if err != nil {
		rs.ration.Log(slog.LevelInfo, "cannot send an Event about a claim that can never be prepared", nil,
			"claim", claim.Namespace+"/"+claim.Name, "err", err)
	}
	for _, p := range here {
		rs.o.Tell(p, agentkube.Warning, string(cause.Reason),
			fmt.Sprintf("its claim %s can never be prepared: %s", claim.Name, cause.Message))
	}
}

// consumers names the objects that a claim is reserved for.
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

// forgive forgets a refusal, if there is one, and removes its taint.
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

// taintLocked taints the devices by which pods of refused claims are ended, and no others.
func (rs *refusals) taintLocked() {
	out := map[Device]status.Reason{}
	for _, r := range rs.refused {
		if !r.tainted.IsZero() && !r.vain {
			out[r.on] = r.cause.Reason
		}
	}
	rs.shelf.setEnding(out)
}

// waitingHere returns the pods of a claim that this node's kubelet has and that have no container.
// It fails if that cannot be found out, or with gpu.ErrInUse if one of the claim's pods has a
// container.
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
			rs.retry(ctx, uid)
		}
	}
}

// dueRefusals returns the UIDs of the claims that are to be looked at now.
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

// retry takes the next step for a refused claim: it reads the claim again, and if that is still
// refused ends its pods, first by a taint and then by eviction.
func (rs *refusals) retry(ctx context.Context, uid string) {
	rs.mu.Lock()
	r, ok := rs.refused[uid]
	if !ok {
		rs.mu.Unlock()
		return // the claim was prepared meanwhile
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
	if err == nil && !reflect.DeepEqual(claim.Results, of.results) { // its pods get an Event about that first
		rs.note(claim, rs.never(claim))
		return
	}
	var pods []workload.Pod
	if err == nil && curable(of.cause) {
		pods, err = rs.waitingHere(ctx, claim)
	}
	switch {
	case err != nil:
		rs.ration.Log(slog.LevelInfo, "the pods of a claim that can never be prepared are not ended",
			[]any{"claim", of.name()}, "because", err)
	case len(pods) == 0: // its pod is gone, has not come yet, or is to be left
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

// stillRefused reads a refused claim again. over is true if the claim is gone, has no allocation or
// consumer any longer, or may be prepared now.
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

// never returns why a claim can never be prepared as it is. It returns nil, or an error that is not
// permanent, if it may be prepared.
func (rs *refusals) never(claim *agentkube.Claim) error {
	wants, err := wanted(claim, rs.o.Driver, rs.o.Node)
	if err != nil {
		return err
	}
	v := rs.shelf.now()
	if ready, err := v.find(wants); !ready || err != nil {
		return err
	}
	if err := checkAlone(v.offer, wants); err != nil {
		return err
	}
	var asked []ledger.Request
	for i := range wants {
		if err := refusedByDriver(v.offer, &wants[i]); err != nil {
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

// taint ends the pods of a refused claim by a taint on one of its devices. It takes a device that
// no other claim names and no holder has, and that no other claim can get: one that is not shared,
// or one that is withdrawn. It returns false if there is none, or if too many pods were ended
// lately.
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

// holds reports whether an allocation of the ledger has something of a device.
func (rs *refusals) holds(d Device) bool {
	return slices.ContainsFunc(rs.o.Ledger.Allocations(), func(a ledger.Allocation) bool {
		return slices.ContainsFunc(a.Grants, func(g ledger.Grant) bool { return deviceOf(&g) == d })
	})
}

// evict evicts the pods of a refused claim, if Options.Evict is set. It first removes a taint that
// did not end them.
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
			return // the claim was prepared after all, and the pod may start at any moment
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
		rs.o.Log.Warn("ending a pod: its claim can never be prepared",
			"pod", p.String(), "claim", r.name(), "because", r.cause.Message)
		rs.o.Tell(p, agentkube.Warning, string(status.ClaimEnded), fmt.Sprintf(
			"the pod is ended, so that its controller makes it anew: "+
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
