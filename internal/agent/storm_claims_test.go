// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/cdi"
	kubelet "example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	faked "example.com/gpu-agent/tests/fakes/claims"
	resourcev1 "k8s.io/api/resource/v1"
)

// errAway is why the API server of a storm does not answer.
var errAway = errors.New("no route to host")

// stormClaims are a storm's pods with claims: what the scheduler gives them of the slices,
// and what the kubelet does with them.
type stormClaims struct {
	s *storm
	*faked.Cluster
	made int
	// turn is 1 while most of what happens is claims, 0 while it is the device plugin. It
	// changes at each calm.
	turn int

	// Guarded by the storm's mu:
	front *dra.FrontEnd // of the agent that serves the kubelet; nil while none does
	gone  time.Time     // when front went
	of    map[string]*claimant
	away  bool
	// there is when something of a GPU was last somebody's, and mishap when something last
	// went wrong beside the agent.
	there  map[gpu.UUID]time.Time
	mishap time.Time
	// breaks are when the driver refused to make or to destroy an instance of a GPU.
	breaks map[gpu.UUID][]time.Time
	// stale are slices that are of an agent of which the present one knows nothing, and
	// doubt is why.
	stale []resourcev1.ResourceSlice
	doubt string
}

// claimant is a pod with a claim.
type claimant struct {
	kubelet.Claim
	pod     *stormPod
	results []resourcev1.DeviceRequestAllocationResult
	keys    []string // of its allocations, by result
	// asked says that a call of the kubelet's is under way, or that its answer has not been
	// looked at.
	asked  bool
	answer *answer
	// devices is what the kubelet was answered, nil before and after an Unprepare; first
	// is its very first answer, and grants what the ledger had then.
	devices, first []kubelet.Device
	grants         [][]ledger.Grant
	// doubt is why nobody needs to be able to prepare it, if not empty.
	doubt string
}

// answer is what a Prepare comes to.
type answer struct {
	devices []kubelet.Device
	err     error
	began   time.Time
	cut     bool // the agent ended meanwhile
}

func newStormClaims(s *storm) *stormClaims {
	return &stormClaims{s: s, Cluster: &faked.Cluster{Driver: draDriver, Called: s.called}, turn: 1, of: map[string]*claimant{}, breaks: map[gpu.UUID][]time.Time{}, there: map[gpu.UUID]time.Time{}}
}

// worlds are those of the agent that is about to start.
func (c *stormClaims) worlds() *DRA {
	return &DRA{API: c.Cluster, Kubelet: c.Cluster, Serve: func(f *dra.FrontEnd) (DRADriver, error) { return &stormDriver{c, f}, nil }}
}

// stormDriver is the kubelet's registration of one agent's driver.
type stormDriver struct {
	c *stormClaims
	f *dra.FrontEnd
}

func (d *stormDriver) Run(ctx context.Context) error {
	d.c.s.locked(func() {
		if ctx.Err() == nil {
			d.c.front = d.f
		}
	})
	d.f.Publisher().Registered(true)
	<-ctx.Done()
	return ctx.Err()
}

func (d *stormDriver) Status() kubelet.Status { return kubelet.Status{Registered: true} }

// left is when an agent has ended.
func (c *stormClaims) left() {
	c.s.locked(func() { c.front, c.gone, c.mishap = nil, time.Now(), time.Now() })
}

// restarted is a kubelet that starts: it deletes the slices, sooner or later, and has the
// driver registered anew. In some cases its account of claims is lost.
func (c *stormClaims) restarted() {
	s := c.s
	if s.rng.IntN(4) == 0 {
		c.Know()
		s.locked(func() {
			for _, p := range c.of {
				if !p.asked && !s.livesLocked(p.pod) {
					p.devices = nil // it asks again, if the pod is to run
				}
			}
			s.done["accounts lost"]++
		})
	}
	var front *dra.FrontEnd
	s.locked(func() { front = c.front })
	early := s.rng.IntN(2) == 0
	if front != nil {
		front.Publisher().Registered(false)
		if early {
			c.Wipe()
		}
		front.Publisher().Registered(true)
	}
	if !early {
		c.Wipe()
	}
}

// all are the claimants, in order.
func (c *stormClaims) all() (out []*claimant) {
	c.s.locked(func() {
		for _, uid := range slices.Sorted(maps.Keys(c.of)) {
			out = append(out, c.of[uid])
		}
	})
	return out
}

// step does one thing that a user, the scheduler, the kubelet or the API server may do.
func (c *stormClaims) step() {
	s := c.s
	var orphaned bool
	s.locked(func() { orphaned = c.front == nil && time.Since(c.gone) > 30*time.Second })
	if orphaned {
		c.Wipe() // as the kubelet does, whose driver has gone
	}
	all := c.all()
	n := s.rng.IntN(20)
	if c.away && s.rng.IntN(8) == 0 {
		c.setAway(nil)
	}
	if len(all) == 0 || n < 6 {
		c.schedule()
		return
	}
	p := all[s.rng.IntN(len(all))]
	switch {
	case n < 12:
		c.prepare(p)
	case n < 15:
		c.run(p)
	case n < 16: // its container ends, and may start again
		s.locked(func() { s.endLocked(func(o *stormContainer) bool { return o.pod == p.pod && !o.hangs }) })
	case n < 18:
		c.leave(p)
	case n < 19: // deleted by force: the claim is free at once, the container is not dead
		s.locked(func() {
			p.pod.active = false
			s.done["claims forced"]++
			for _, o := range s.containers {
				o.hangs = o.hangs || o.pod == p.pod && attacks("hang") && s.rng.IntN(4) == 0
			}
		})
		c.Remove(p.Namespace, p.Name)
	default:
		c.setAway(errAway)
	}
}

// setAway has the API server go, or come back.
func (c *stormClaims) setAway(err error) {
	c.s.locked(func() { c.away, c.mishap = err != nil, time.Now() })
	c.Away(err)
}

// throughBoth is a partition in which some GPUs are offered through DRA. In some the same
// name is offered through both, which is refused.
func (s *storm) throughBoth() string {
	api := func() string {
		if s.rng.IntN(8) < 2+5*s.claims.turn {
			return ", api: dra"
		}
		return ""
	}
	whole, replicas, instances := api(), api(), api()
	if s.mig && s.rng.IntN(4) == 0 {
		whole, instances = ", api: dra", ", api: dra"
	}
	var b strings.Builder
	b.WriteString("version: v1\npartitions:\n  default:\n")
	for i := range s.gpus {
		if s.rng.IntN(12) == 0 {
			whole = api()
		}
		layouts := []string{"{mode: shared" + api() + "}", "{mode: shared" + api() + "}", "{mode: whole" + whole + "}", "{mode: shared, replicas: 3" + replicas + "}"}
		if s.rng.IntN(8) == 0 {
			layouts = append(layouts, "{mode: off}")
		}
		if s.mig {
			for _, l := range []string{demand, demand, demand, sevenSmall, twoLarge, "{mode: mig, geometry: {1g.10gb: 3, 3g.40gb: 1}}"} {
				layouts = append(layouts, strings.TrimSuffix(l, "}")+instances+"}")
			}
			if whole != "" && instances != "" {
				layouts = append(layouts, "{mode: dynamic, api: dra}", "{mode: dynamic, api: dra}", "{mode: dynamic, api: dra}")
			}
		}
		fmt.Fprintf(&b, "    - {devices: [%d], %s\n", i, layouts[s.rng.IntN(len(layouts))][1:])
	}
	return b.String()
}

// schedule has a pod come that names a claim, if there is room for it.
func (c *stormClaims) schedule() {
	s := c.s
	c.made++
	name := fmt.Sprint("claim-", c.made)
	var requests []faked.Request
	for i := range 1 + s.rng.IntN(4)/3 {
		r := faked.Request{Name: fmt.Sprint("r", i), Memory: int64(1+s.rng.IntN(3)) * int64(s.attack.unit) << 20}
		r.Fits = c.wish(s.rng)
		requests = append(requests, r)
	}
	claim, err := c.Schedule("ns", name, requests...)
	if err != nil {
		s.locked(func() { s.done["claims pending"]++ })
		return
	}
	p := &claimant{Claim: claim, results: c.Allocated()[claim.UID].Results}
	p.pod = &stormPod{uid: "pod-" + claim.UID, name: name, active: true, claim: p}
	for _, r := range p.results {
		p.keys = append(p.keys, cdi.Key("claim/"+claim.UID, []string{r.Request + "#0"}))
	}
	if c.stale != nil && reflect.DeepEqual(c.stale, c.Slices()) {
		p.doubt = c.doubt
	}
	s.note("claim %s has %+v", claim.UID, p.results)
	s.locked(func() { c.of[claim.UID], s.pods[p.pod.uid] = p, p.pod; s.done["claims"]++ })
}

// wish is what a request may ask for: often anything.
func (c *stormClaims) wish(rng *rand.Rand) func(*resourcev1.Device) bool {
	from := rng.IntN(5)
	for i := range from {
		if fits := faked.Named([]string{"-shared", "-mig-1g10gb-6", "-mig-3g40gb-4", "-mig-2g20gb-0"}[i]); rng.IntN(2) == 0 {
			return fits
		}
	}
	skip := rng.IntN(4)
	return func(*resourcev1.Device) bool { skip--; return skip < 0 }
}

// prepare is the kubelet's call, also for a claim that is prepared: another pod has come
// for it, or its sandbox is made anew.
func (c *stormClaims) prepare(p *claimant) {
	s := c.s
	var front *dra.FrontEnd
	s.locked(func() {
		if !p.asked && p.pod.active {
			front, p.asked = c.front, c.front != nil
		}
	})
	if front == nil {
		return
	}
	ctx := s.ctx
	began := time.Now()
	go func() {
		devices, err := c.Prepare(ctx, front, p.Claim)
		s.locked(func() { p.answer = &answer{devices, err, began, ctx.Err() != nil} })
	}()
}

// judgeLocked takes in what the kubelet was answered, while nothing else happens.
func (c *stormClaims) judgeLocked() {
	s := c.s
	for _, uid := range slices.Sorted(maps.Keys(c.of)) {
		p := c.of[uid]
		a := p.answer
		if a == nil {
			continue
		}
		p.asked, p.answer = false, nil
		if a.err != nil {
			s.done["not prepared"]++
			s.note("claim %s cannot be prepared: %v", uid, a.err)
			if !a.cut && !c.justifiedLocked(p, a.err, a.began) {
				s.t.Errorf("a Prepare of %s (%+v) that began %s ago fails, and nothing has come in between: %v", uid, p.results, time.Since(a.began), a.err)
			}
			continue
		}
		s.done["prepared"]++
		s.note("claim %s is prepared: %+v", uid, a.devices)
		if p.first == nil {
			p.first = a.devices
			for _, key := range p.keys {
				has, _ := s.agent.ledger.Get(key)
				p.grants = append(p.grants, has.Grants)
			}
		}
		if !reflect.DeepEqual(a.devices, p.first) {
			s.t.Errorf("claim %s was given %+v, and is given %+v now", uid, p.first, a.devices)
		}
		p.devices = a.devices
	}
}

// justifiedLocked says whether the world explains why a Prepare fails.
func (c *stormClaims) justifiedLocked(p *claimant, err error, began time.Time) bool {
	s, text := c.s, err.Error()
	troubled := c.mishap.After(began.Add(-2*time.Minute)) || s.mute != nil || s.hangs || s.unreadable || s.down
	for _, r := range p.results {
		u := c.gpuOf(&r)
		troubled = troubled || s.trouble[u] != "" || s.agent.loop.reader.inv.ByUUID(u) == nil
	}
	switch {
	case p.doubt != "", !p.pod.active: // its claim is no more
		return true
	case errors.Is(err, errAway):
		return c.mishap.After(began) || c.away
	case strings.Contains(text, "the GPU's driver refuses"):
		for _, r := range p.results {
			all := c.breaks[c.gpuOf(&r)]
			if n := len(all) - mostFailures; n >= 0 && time.Since(all[n]) < 2*failingFor {
				return true
			}
		}
		return false
	case strings.Contains(text, "does not know yet"):
		return troubled
	case errors.Is(err, ledger.ErrHeld), strings.Contains(text, "still ending"):
		for _, r := range p.results {
			if c.there[c.gpuOf(&r)].After(began.Add(-2 * time.Minute)) {
				return true
			}
		}
		return false
	case errors.Is(err, ledger.ErrNotOpen):
		return troubled || errors.Is(err, context.DeadlineExceeded) || s.mig // a call of the driver in ten fails there
	case errors.Is(err, gpu.ErrNotFound):
		return troubled && strings.Contains(text, "has no device")
	}
	return false
}

// broke notes what the driver said to work on a GPU.
func (c *stormClaims) broke(u gpu.UUID, err error) {
	if err != nil {
		c.s.locked(func() { c.breaks[u] = append(c.breaks[u], time.Now()) })
	}
}

// gpuOf is the GPU that a result is of.
func (c *stormClaims) gpuOf(r *resourcev1.DeviceRequestAllocationResult) gpu.UUID {
	for i := range c.s.gpus {
		if u := uuid(i); strings.HasPrefix(r.Device, "gpu-"+string(u)[4:12]) {
			return u
		}
	}
	return ""
}

// run starts the container of a claim that is prepared.
func (c *stormClaims) run(p *claimant) {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.devices == nil || p.asked || !p.pod.active || s.livesLocked(p.pod) {
		return
	}
	o := &stormContainer{pod: p.pod, limits: map[string]uint64{}}
	o.Container = node.Container{ID: fmt.Sprintf("%s-%d", p.pod.uid, time.Now().UnixNano()), PodUID: p.pod.uid, Namespace: "ns", Pod: p.Name, Name: "app", Running: true,
		Created: time.Now().Add(s.attack.skew)}
	for i, key := range p.keys {
		if s.specs[key] == nil { // the gate: its GPU has failed since
			s.done["shut"]++
			return
		}
		o.CDI = append(o.CDI, cdi.DeviceName("example.com", key))
		for _, n := range s.specs[key].Devices[0].ContainerEdits.DeviceNodes {
			if strings.Contains(n.Path, "-ci") {
				o.caps = append(o.caps, n.Path)
			}
		}
		u := c.gpuOf(&p.results[i])
		bytes, err := s.pages.Limit(key, u)
		if want := p.grants[i][0].Cap.Bytes; err != nil || bytes != want {
			s.t.Errorf("%s is to start, and its page allows %d bytes of %s, not %d: %v", o.ID, bytes, u, want, err)
		}
		o.limits[key+" "+string(u)] = bytes
	}
	s.containers = append(s.containers, o)
	s.news = append(s.news, node.ContainerEvent{Kind: node.EventStarted, Container: o.Container})
	s.done["claims run"]++
	s.note("started %s with %v", o.ID, o.CDI)
}

// leave is the end of a pod: its containers first, then the kubelet's Unprepare, then the
// claim. Of one whose container hangs the kubelet asks in vain.
func (c *stormClaims) leave(p *claimant) {
	s := c.s
	var front *dra.FrontEnd
	lives := false
	s.locked(func() {
		if p.asked {
			return
		}
		p.pod.active = false
		s.endLocked(func(o *stormContainer) bool { return o.pod == p.pod && !o.hangs })
		lives = s.livesLocked(p.pod)
		front = c.front
	})
	if front == nil {
		return
	}
	err := c.Unprepare(s.ctx, front, p.Claim)
	switch {
	case err == nil && lives:
		s.t.Errorf("claim %s is given back, and its container runs", p.UID)
	case err != nil && !lives && !s.down && s.ctx.Err() == nil:
		s.t.Errorf("claim %s is not given back: %v", p.UID, err)
	}
	if err != nil {
		return
	}
	s.note("claim %s is given back", p.UID)
	c.Remove(p.Namespace, p.Name)
	s.locked(func() {
		delete(c.of, p.UID)
		delete(s.pods, p.pod.uid)
		s.done["given back"]++
	})
}

// checkLocked is what must be true of claims at any moment.
func (c *stormClaims) checkLocked(when string) {
	s := c.s
	c.judgeLocked()
	state, _ := c.DRAState()
	allocated := c.Allocated()
	now := time.Now()
	for _, e := range slices.Concat(s.entries, s.file) {
		for _, id := range e.IDs {
			c.there[gpu.UUID(onGPU(id))] = now
		}
	}
	for _, o := range s.containers {
		for _, ids := range o.ids {
			for _, id := range ids {
				c.there[gpu.UUID(onGPU(id))] = now
			}
		}
	}
	if s.mute != nil || s.hangs || s.unreadable || s.down || c.away {
		c.mishap = now
	}
	for u, why := range s.trouble {
		if why != "" {
			c.there[u], c.mishap = now, now
		}
	}
	held := map[gpu.UUID][]*claimant{}
	for _, uid := range slices.Sorted(maps.Keys(c.of)) {
		p := c.of[uid]
		known := slices.ContainsFunc(state.Claims, func(k node.PreparedClaim) bool { return k.UID == uid })
		_, promised := allocated[uid]
		for _, r := range p.results {
			if known || promised || s.livesLocked(p.pod) || p.asked {
				c.there[c.gpuOf(&r)] = now
			}
		}
		if p.first == nil || p.devices == nil && !s.livesLocked(p.pod) || !known && !promised && !s.livesLocked(p.pod) {
			continue
		}
		for i, key := range p.keys {
			a, ok := s.agent.ledger.Get(key)
			if !ok || a.Owner != ledger.DRA || !sameGrants(a.Grants, p.grants[i]) {
				s.t.Errorf("%s: claim %s was prepared with %+v, and the ledger has %+v (%v); known %v, allocated %v, runs %v", when, uid, p.grants[i], a, ok, known, promised, s.livesLocked(p.pod))
				continue
			}
			u := a.Grants[0].GPU
			for _, o := range held[u] {
				for j := range o.keys {
					if o != p && c.gpuOf(&o.results[j]) == u && overlap(&o.grants[j][0], &a.Grants[0]) {
						s.t.Errorf("%s: claims %s and %s have the same of %s: %+v, %+v", when, o.UID, uid, u, o.grants[j], a.Grants)
					}
				}
			}
			held[u] = append(held[u], p)
		}
	}
	c.checkSlices(when, allocated)
}

// sameGrants reports whether an allocation is as it was taken.
func sameGrants(a, b []ledger.Grant) bool { return fmt.Sprintf("%+v", a) == fmt.Sprintf("%+v", b) }

// overlap reports whether two grants of a GPU cannot stand together.
func overlap(a, b *ledger.Grant) bool {
	if a.Kind() != b.Kind() {
		return true
	}
	switch x := a.Piece.(type) {
	case piece.Replica:
		return x.Number == b.Piece.(piece.Replica).Number
	case piece.Placement:
		y := b.Piece.(piece.Placement)
		return x.At.Start < y.At.Start+y.At.Size && y.At.Start < x.At.Start+x.At.Size
	case piece.Units:
		other := slices.Collect(b.Piece.(piece.Units).Set.All())
		return slices.ContainsFunc(slices.Collect(x.Set.All()), func(n int) bool { return slices.Contains(other, n) })
	}
	return true
}

// checkSlices: a device that a claim names is in its slice, or the scheduler gives its
// counters to somebody else (kubernetes#140802).
func (c *stormClaims) checkSlices(when string, allocated map[string]agentkube.Claim) {
	have := map[string]bool{}
	list := c.Slices()
	for i := range list {
		for _, d := range list[i].Spec.Devices {
			have[d.Name] = true
		}
	}
	if len(have) == 0 || !c.s.agent.loop.partitions.judged {
		return // wiped, or nothing is offered; or this agent has written nothing yet
	}
	for uid, claim := range allocated {
		for _, r := range claim.Results {
			p := c.of[uid]
			if u := c.gpuOf(&r); !have[r.Device] && p != nil && p.doubt == "" && c.s.trouble[u] != "gone" && c.s.agent.loop.reader.inv.ByUUID(u) != nil {
				c.s.t.Errorf("%s: claim %s has %s, which is in no slice: %v", when, uid, r.Device, slices.Sorted(maps.Keys(have)))
			}
		}
	}
}

// checkRunning is what must be true of a container with a claim.
func (c *stormClaims) checkRunning(when string, o *stormContainer, layouts map[gpu.UUID]map[string]*stormContainer) {
	s, p := c.s, o.pod.claim
	for i, key := range p.keys {
		g := &p.grants[i][0]
		sick := s.agent.loop.reader.inv == nil || (&fileInputs{inv: s.agent.loop.reader.inv}).faulty(g.GPU) || s.unheard
		went := s.attack.went[key] && !s.agent.loop.reader.answered
		s.attack.went[key] = s.specs[key] == nil && (sick || went)
		if s.specs[key] == nil && p.pod.active && !sick && !went {
			s.t.Errorf("%s: %s runs and the file of its claim's allocation %s is gone", when, o.ID, key)
		}
		if bytes, err := s.pages.Limit(key, g.GPU); err != nil || bytes != o.limits[key+" "+string(g.GPU)] {
			s.t.Errorf("%s: %s runs with a claim, was given %d bytes of %s and may have %d now, %v", when, o.ID, o.limits[key+" "+string(g.GPU)], g.GPU, bytes, err)
		}
		if layouts[g.GPU] == nil {
			layouts[g.GPU] = map[string]*stormContainer{}
		}
		layouts[g.GPU]["a claim of "+string(g.Kind())] = o
	}
}

// doubtLocked says that claims that are not prepared need not be any more, nor what is
// allocated before the next agent has written its slices.
func (c *stormClaims) doubtLocked(why string) {
	c.stale, c.doubt = c.Slices(), why
	for _, p := range c.of {
		if p.first == nil {
			p.doubt = why
		}
	}
}

// calm: whoever was promised something gets it once nothing is wrong any more, and then all
// end.
func (c *stormClaims) calm() {
	s := c.s
	c.setAway(nil)
	s.locked(func() {
		s.endLocked(func(o *stormContainer) bool { return !o.pod.active })
	})
	synctest.Wait() // calls that are under way
	for range 4 {
		s.round(nil)
		time.Sleep(kubelet.Patience)
		synctest.Wait()
	}
	s.locked(c.judgeLocked)
	for _, p := range c.all() {
		if !p.pod.active {
			c.leave(p)
		}
	}
	for _, p := range c.all() {
		c.leave(p)
	}
	if left := c.all(); len(left) > 0 {
		s.locked(func() { clear(c.of) })
		for _, p := range left {
			c.Remove(p.Namespace, p.Name)
			s.locked(func() { delete(s.pods, p.pod.uid) })
		}
	}
	c.Know()
}
