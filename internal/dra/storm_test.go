// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/fakes/claims"

	resourcev1 "k8s.io/api/resource/v1"
)

var (
	stormSteps = flag.Int("storm.steps", 3000, "random steps of TestStormOfNamedClaims")
	stormSeed  = flag.Uint64("storm.seed", 1, "seed of TestStormOfNamedClaims")
)

// sandboxTime is what a pod's sandbox takes.
const sandboxTime = 300 * time.Millisecond

var errAway = errors.New("no route to host")

// storm is a node whose pods have claims that users have named: they are allocated again and
// again under the same UID. It has the agent's loop as far as gates go, a container runtime, and the
// kubelet 1.36.3 as its source has it: one account of claims by name, which takes what was prepared
// once for prepared, and never looks at the allocation again.
type storm struct {
	*FrontEnd
	t       *testing.T
	rng     *rand.Rand
	in      Input
	cluster *claims.Cluster
	ledger  *ledger.Ledger
	layouts map[gpu.UUID]string
	stop    func()
	due     chan struct{} // a round of the loop
	log     safeLog
	n       int
	done    map[string]int

	mu sync.Mutex // guards what follows
	// apiDown says that nobody reaches the API server, cutOff that the agent does not.
	apiDown, cutOff bool
	// blind is when the agent last could not have seen what the API server says.
	blind time.Time
	// files are the CDI files, and journal what is written down beside them.
	files, journal map[string]ledger.Record
	// made are the MIG instances that stand.
	made      map[mig.Place]bool
	pods      map[string]*stormPod // by UID, until the kubelet has forgotten them
	account   map[string]*entry    // by the claim's name
	life      int                  // of the kubelet
	following map[int]func()
	down      bool          // the runtime does not answer
	answers   []stormAnswer // that the kubelet has not taken in
	followers int           // that there have been
}

// stormPod is a pod with a claim.
type stormPod struct {
	workload.Pod
	claim string
	// given is what the claim had when the pod was given a node: it has that for the pod's life.
	given map[string]share
	// gone says that the API server has it no more, ending that it is to end.
	gone, ending bool
	calling      bool // its Prepare is under way
	asked        time.Time
	// sandbox is when that stands; zero where there is none. referred is when the kubelet has written the pod
	// into its account.
	sandbox, referred time.Time
	// container has what its files said when it was created; nil where none is.
	container map[string]ledger.Record
	born      int
	hangs     bool
	lost      bool // the kubelet has lost what it knew of its claim
	// amiss says that its container has what the claim had before, since the agent could not have
	// seen in time that the kubelet does not ask for it.
	amiss bool
}

// entry is a claim in the kubelet's account.
type entry struct {
	dra.Claim
	pods     map[string]bool
	devices  []node.PreparedDevice
	prepared bool // in memory alone
}

// safeLog is a log that several write.
type safeLog struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (l *safeLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *safeLog) last(n int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := strings.Split(l.text.String(), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

func (s *storm) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *storm) note(format string, args ...any) {
	fmt.Fprintf(&s.log, "%s "+format+"\n", append([]any{time.Now().Format("15:04:05.000")}, args...)...)
}

// The API server, as the agent reaches it.

func (s *storm) away() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.apiDown || s.cutOff {
		return errAway
	}
	return nil
}

type stormAPI struct{ *storm }

func (a stormAPI) Claim(ctx context.Context, driver, namespace, name string) (*agentkube.Claim, error) {
	if err := a.away(); err != nil {
		return nil, err
	}
	time.Sleep(time.Millisecond)
	return a.cluster.Claim(ctx, driver, namespace, name)
}
func (a stormAPI) Claims(ctx context.Context, driver string) ([]agentkube.Claim, error) {
	if err := a.away(); err != nil {
		return nil, err
	}
	list, err := a.cluster.Claims(ctx, driver)
	time.Sleep(30 * time.Millisecond)
	return list, err
}
func (a stormAPI) SetClaimDevices(ctx context.Context, driver string, c *agentkube.Claim, devices []agentkube.ClaimDevice) error {
	if err := a.away(); err != nil {
		return err
	}
	now, err := a.cluster.Claim(ctx, driver, c.Namespace, c.Name)
	if err != nil {
		return err
	}
	for _, d := range devices { // as the API server's validation
		if !slices.ContainsFunc(now.Results, func(r result) bool {
			return r.Pool == d.Pool && r.Device == d.Device && claims.ShareOf(&r) == d.Share
		}) {
			return errors.New("must be an allocated device in the claim")
		}
	}
	return a.cluster.SetClaimDevices(ctx, driver, c, devices)
}
func (a stormAPI) PublishSlices(ctx context.Context, driver string, want []resourcev1.ResourceSlice) ([]string, error) {
	if err := a.away(); err != nil {
		return nil, err
	}
	return a.cluster.PublishSlices(ctx, driver, want)
}
func (a stormAPI) WatchSlices(ctx context.Context, driver string, changed func()) error {
	return a.cluster.WatchSlices(ctx, driver, changed)
}

// The container runtime.

func (s *storm) Containers(context.Context) (out []node.Container, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down {
		return nil, errors.New("the runtime is away")
	}
	for _, p := range s.pods {
		if p.container != nil {
			c := containerOf(p.Pod, slices.Sorted(maps.Keys(p.container))...)
			out = append(out, c)
		}
	}
	return out, nil
}

func (s *storm) Pods(context.Context) (map[string]workload.Pod, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]workload.Pod{}
	for uid, p := range s.pods {
		if !p.sandbox.IsZero() {
			out[uid] = p.Pod
		}
	}
	return out, nil
}

// The kubelet's account.

func (s *storm) DRAState() (state node.DRAState, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(s.account)) {
		e := s.account[name]
		state.Claims = append(state.Claims, node.PreparedClaim{Namespace: e.Namespace, Name: e.Name, UID: e.UID, PodUIDs: slices.Sorted(maps.Keys(e.pods)),
			Devices: map[string][]node.PreparedDevice{driver: slices.Clone(e.devices)}})
	}
	return state, nil
}

func (s *storm) FollowDRAState(ctx context.Context, changed func()) error {
	key := 0
	s.locked(func() { s.followers++; key = s.followers; s.following[key] = changed })
	<-ctx.Done()
	s.locked(func() { delete(s.following, key) })
	return ctx.Err()
}

// wrote is what inotify tells.
func (s *storm) wrote() {
	var all []func()
	s.locked(func() { all = slices.Collect(maps.Values(s.following)) })
	for _, f := range all {
		f()
	}
}

// The agent: its front-end, and the loop as far as gates go.

func (s *storm) wake() {
	select {
	case s.due <- struct{}{}:
	default:
	}
}

func (s *storm) start() {
	s.ledger = ledger.New(s.wake, time.Now)
	s.FrontEnd = New(Options{Domain: "example.com", Driver: driver, Node: s.in.Node, Ledger: s.ledger, API: stormAPI{s}, Kubelet: s, Runtime: s,
		Listing: func(context.Context) (node.Listing, error) { return node.Listing{}, nil }, Tell: func(workload.Pod, agentkube.EventType, string, string) {},
		Granted: func(*ledger.Allocation) { s.wake() }, Wake: s.wake, Now: time.Now, Log: slog.New(slog.NewTextHandler(&s.log, nil))})
	s.locked(func() {
		s.blind = time.Now()
		for _, from := range []map[string]ledger.Record{s.journal, s.files} {
			for _, id := range slices.Sorted(maps.Keys(from)) {
				if err := s.Found(id, from[id], time.Time{}); err != nil {
					s.t.Error(err)
				}
			}
		}
	})
	ctx, cancel := context.WithCancel(s.t.Context())
	var all sync.WaitGroup
	all.Go(func() { _ = s.Run(ctx) })
	all.Go(func() { s.loop(ctx) })
	s.lay(nil)
	s.Publisher().Registered(true)
	s.stop = func() { cancel(); all.Wait() }
}

// lay publishes the layouts, with a GPU that is about to change.
func (s *storm) lay(changing []gpu.UUID) {
	changes := &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{}, MIG: map[gpu.UUID]ledger.MIG{}}
	for i := range s.in.Inventory.GPUs {
		d := &s.in.Inventory.GPUs[i]
		card := s.in.Cards[d.UUID]
		l := map[string]func(*gpu.Device, *mig.Card) plan.Layout{"whole": whole, "shared": shared, "mig": onDemand}[s.layouts[d.UUID]](d, card)
		l.API = ledger.DRA
		changes.Layouts[d.UUID], changes.MIG[d.UUID] = l, ledger.MIG{Card: card}
	}
	s.ledger.SetMIG(changes.MIG)
	s.Publish(Offer{Inventory: s.in.Inventory, Changes: changes, Changing: changing, Cards: s.in.Cards, Guarantee: "api", Drain: true})
}

// loop is the agent's: a round when it is woken, and every second.
func (s *storm) loop(ctx context.Context) {
	for {
		s.look()
		s.round()
		select {
		case <-ctx.Done():
			return
		case <-s.due:
			time.Sleep(3 * time.Millisecond)
		case <-time.After(time.Second):
		}
	}
}

// look asks the runtime, as the loop does.
func (s *storm) look() {
	asked := time.Now()
	containers, err := s.Containers(s.t.Context())
	if err != nil {
		return
	}
	holders := map[string][]ledger.Holder{}
	for i := range containers {
		for _, id := range cdi.Keys("example.com", nil, containers[i].CDI) {
			holders[id] = append(holders[id], ledger.Holder{Pod: containers[i].InPod(), Container: "main"})
		}
	}
	s.Observe(holders, asked)
}

// round writes down and opens what may be opened, and removes what has ended.
func (s *storm) round() {
	held := s.ledger.Allocations()
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.journal)
	live := map[string]bool{}
	for i := range held {
		s.journal[held[i].ID], live[held[i].ID] = held[i].Record(), true
	}
	for id := range s.files {
		used := false
		for _, p := range s.pods {
			_, has := p.container[id]
			used = used || has
		}
		if !live[id] && !used {
			delete(s.files, id)
		}
	}
	for i := range held {
		switch a := &held[i]; {
		case a.Superseded:
			delete(s.files, a.ID)
			s.ledger.Gone(a.ID)
		case a.Phase == ledger.Taken || a.Phase == ledger.Making:
			if a.Kind() == piece.KindPlacement {
				place := mig.Place{GPU: a.Grants[0].GPU, Placement: piece.At(a.Grants[0].Piece)}
				if !s.made[place] && a.Asked.IsZero() {
					continue // its instance is made when its container is to start
				}
				maps.DeleteFunc(s.made, func(o mig.Place, _ bool) bool {
					return o.GPU == place.GPU && o != place && !s.in.Cards[o.GPU].Fits([]mig.Placement{o.Placement}, place.Placement)
				})
				s.made[place] = true
			}
			s.files[a.ID] = a.Record()
			s.ledger.SetOpen(a.ID, a.Epoch)
		}
	}
}

// The scheduler, the users and Kubernetes' controllers.

// schedule has a pod come that names a claim, which has something for other pods already or is
// allocated for this one.
func (s *storm) schedule() {
	name := fmt.Sprint("c", s.rng.IntN(5))
	s.n++
	p := &stormPod{Pod: workload.Pod{Namespace: "ns", Name: fmt.Sprint(name, "-pod"), UID: fmt.Sprint(name, "-", s.n)}, claim: name}
	if s.apiDown {
		return
	}
	now, err := s.cluster.Claim(s.t.Context(), driver, "ns", name)
	if err != nil {
		s.cluster.Put(agentkube.Claim{Namespace: "ns", Name: name})
		return
	}
	if len(now.Results) > 0 {
		if s.rng.IntN(2) == 0 {
			return
		}
		s.cluster.Edit("ns", name, func(c *agentkube.Claim) { c.Pods = append(slices.Clone(c.Pods), p.Pod) })
	} else {
		var requests []claims.Request
		for i := range 1 + int(name[1]-'0')/4 { // a claim's requests are never changed
			skip := s.rng.IntN(6)
			requests = append(requests, claims.Request{Name: fmt.Sprint("r", i), Memory: int64(1+s.rng.IntN(40)) << 30,
				Fits: func(*resourcev1.Device) bool { skip--; return skip < 0 }})
		}
		if s.cluster.Allocate("ns", name, p.Pod, requests...) != nil {
			s.done["pending"]++
			return
		}
	}
	now, _ = s.cluster.Claim(s.t.Context(), driver, "ns", name)
	p.given = map[string]share{}
	for _, w := range wants(now, driver, s.in.Node) {
		p.given[w.id()] = w.share
	}
	s.note("pod %s comes, claim %s has %+v", p.UID, name, now.Results)
	s.locked(func() { s.pods[p.UID] = p; s.done["pods"]++ })
}

// leaves is the API server without a pod: the claim is not reserved for it, and has nothing when it is for nobody.
func (s *storm) leaves(p *stormPod) {
	if p.gone {
		return
	}
	p.gone = true
	s.cluster.Edit("ns", p.claim, func(c *agentkube.Claim) {
		c.Pods = slices.DeleteFunc(slices.Clone(c.Pods), func(o workload.Pod) bool { return o.UID == p.UID })
		if len(c.Pods) == 0 {
			c.Results = nil
		}
	})
}

// edit lays a GPU out anew, as the loop does: it withdraws, hears who was promised something, and leaves
// it where somebody was or has.
func (s *storm) edit() {
	u := s.in.Inventory.GPUs[s.rng.IntN(len(s.in.Inventory.GPUs))].UUID
	to := []string{"whole", "shared", "mig"}[s.rng.IntN(3)]
	s.lay([]gpu.UUID{u})
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*time.Second)
	defer cancel()
	promised, err := s.Settle(ctx)
	held := slices.ContainsFunc(s.ledger.Allocations(), func(a ledger.Allocation) bool { return a.On(u) })
	if err == nil && !slices.Contains(promised, u) && !held {
		s.note("%s is %s now", u, to)
		s.layouts[u] = to
		s.locked(func() { maps.DeleteFunc(s.made, func(o mig.Place, _ bool) bool { return o.GPU == u && to != "mig" }) })
		s.done["laid out"]++
	}
	s.lay(nil)
}

// The kubelet.

// sync does what is next for a pod.
func (s *storm) sync(p *stormPod) {
	s.hear()
	switch {
	case p.ending:
		s.terminate(p)
	case p.sandbox.IsZero():
		s.prepare(p)
	case p.container == nil:
		s.run(p)
	}
}

// prepare is the kubelet's prepareResources, before a sandbox.
func (s *storm) prepare(p *stormPod) {
	if p.calling || time.Since(p.asked) < time.Minute && !p.asked.IsZero() {
		return
	}
	p.asked = time.Now()
	if s.apiDown {
		return
	}
	now, err := s.cluster.Claim(s.t.Context(), driver, "ns", p.claim)
	if err != nil || !slices.ContainsFunc(now.Pods, func(o workload.Pod) bool { return o.UID == p.UID }) || len(now.Results) == 0 {
		return
	}
	var e *entry
	life, prepared := 0, false
	s.locked(func() {
		if e = s.account[p.claim]; e == nil {
			e = &entry{Claim: dra.Claim{Namespace: "ns", Name: p.claim, UID: now.UID}, pods: map[string]bool{}}
			s.account[p.claim] = e
		}
		e.pods[p.UID] = true
		p.referred = time.Now()
		life, prepared = s.life, e.prepared
	})
	s.wrote()
	if prepared {
		s.done["taken for prepared"]++
		s.note("pod %s: the kubelet takes claim %s for prepared", p.UID, p.claim)
		s.locked(func() { p.sandbox = time.Now().Add(sandboxTime) })
		return
	}
	p.calling = true
	front := s.FrontEnd
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), dra.Patience)
		defer cancel()
		devices, err := front.Prepare(ctx, e.Claim)
		s.locked(func() { s.answers = append(s.answers, stormAnswer{p, e, life, front, devices, err}) })
	}()
}

// stormAnswer is what a Prepare came to.
type stormAnswer struct {
	pod     *stormPod
	entry   *entry
	life    int
	front   *FrontEnd
	devices []dra.Device
	err     error
}

// hear takes in what the kubelet was answered.
func (s *storm) hear() {
	s.mu.Lock()
	answers := s.answers
	s.answers = nil
	for i := range answers {
		a := &answers[i]
		p := a.pod
		p.calling = false
		if a.life != s.life || s.account[p.claim] != a.entry || a.front != s.FrontEnd {
			a.err = errors.New("the kubelet has started anew, or the agent has")
		}
		s.note("pod %s: prepared %+v, %v", p.UID, a.devices, a.err)
		if a.err != nil {
			s.done["not prepared"]++
			continue
		}
		for _, d := range a.devices {
			a.entry.devices = append(a.entry.devices, node.PreparedDevice{Requests: d.Requests, Pool: d.Pool, Device: d.Name, Share: d.Share, CDI: d.CDI})
		}
		a.entry.prepared = true
		if s.done["prepared"]++; !p.ending {
			p.sandbox = time.Now().Add(sandboxTime)
		}
	}
	s.mu.Unlock()
	if len(answers) > 0 {
		s.wrote()
	}
}

// run creates a pod's container with the CDI devices that the account has.
func (s *storm) run(p *stormPod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.account[p.claim]
	switch {
	case time.Now().Before(p.sandbox) || s.down:
		return
	case e == nil || !e.pods[p.UID]:
		p.lost = true
		return
	}
	has := map[string]ledger.Record{}
	for _, d := range e.devices {
		id := strings.TrimPrefix(d.CDI[0], "example.com/gpu=")
		r, ok := s.files[id]
		if !ok {
			s.done["shut"]++
			return
		}
		has[id] = r
	}
	p.container = has
	p.born++
	s.done["run"]++
	s.note("pod %s runs with %+v", p.UID, has)
	wrong := func(format string, args ...any) {
		// The kubelet had the claim for the pod before this, and the agent has heard of it since,
		// unless it could not.
		if p.amiss = !s.blind.Before(p.referred); p.amiss {
			s.done["run amiss"]++
		} else {
			s.t.Errorf(format, args...)
		}
	}
	got := map[string]share{}
	for id, r := range has {
		x, err := readShare(id, r.Ref, r.Grants)
		if err != nil {
			s.t.Error(err)
		}
		got[id] = x
		if want, ok := p.given[id]; !ok || !x.is(&want) || !fits(&x, &r.Grants[0]) {
			wrong("pod %s runs with %+v, and its claim was given %+v for it", p.UID, r, want)
		}
	}
	if len(got) != len(p.given) {
		wrong("pod %s runs with %+v, and its claim was given %+v for it", p.UID, got, p.given)
	}
}

// fits reports whether a grant is of the device and the amount of a result.
func fits(x *share, g *ledger.Grant) bool {
	return strings.HasPrefix(x.Device, "gpu-"+string(g.GPU[4:12])) && (g.Kind() != piece.KindUnits || int64(piece.Count(g.Piece))<<30 == x.Amount)
}

// terminate is the end of a pod: its container, its sandbox, unprepareResources, and then the API server hears of it.
func (s *storm) terminate(p *stormPod) {
	if p.container != nil && p.hangs || p.calling {
		return
	}
	var last *entry
	s.locked(func() {
		p.container, p.sandbox = nil, time.Time{}
		if e := s.account[p.claim]; e != nil && len(e.pods) > 1 {
			delete(e.pods, p.UID)
		} else if e != nil {
			last = e // also where it is of another pod: kubernetes#140212
		}
	})
	if last != nil {
		life := s.life
		if err := s.Unprepare(s.t.Context(), last.Claim); err != nil {
			s.note("pod %s: claim %s is not given back: %v", p.UID, p.claim, err)
			s.done["not given back"]++
			return
		}
		s.locked(func() {
			if s.account[p.claim] == last && life == s.life {
				delete(s.account, p.claim)
			}
		})
		s.note("pod %s: claim %s is given back", p.UID, p.claim)
		s.done["given back"]++
	}
	s.wrote()
	s.leaves(p)
	s.locked(func() { delete(s.pods, p.UID) })
}

// restartKubelet loses what the kubelet has in memory alone; now and then its account, or all containers
// and sandboxes, as when the node starts anew.
func (s *storm) restartKubelet() {
	s.locked(func() {
		s.life++
		s.done["kubelets"]++
		for _, e := range s.account {
			e.prepared = false
		}
		if s.rng.IntN(4) == 0 {
			clear(s.account)
			s.done["accounts lost"]++
		}
		reboot := s.rng.IntN(3) == 0
		for _, p := range s.pods {
			if reboot && !p.hangs {
				p.container, p.sandbox, p.asked, p.lost = nil, time.Time{}, time.Time{}, false
			}
		}
	})
	s.note("the kubelet starts anew, account %+v", slices.Sorted(maps.Keys(s.account)))
	s.wrote()
}

func (s *storm) restartAgent() {
	s.stop()
	s.note("an agent starts")
	s.done["agents"]++
	s.start()
}

// all are the pods, in order.
func (s *storm) all() (out []*stormPod) {
	s.locked(func() {
		for _, uid := range slices.Sorted(maps.Keys(s.pods)) {
			out = append(out, s.pods[uid])
		}
	})
	return out
}

// step does one random thing.
func (s *storm) step() {
	s.hear()
	all := s.all()
	one := func() *stormPod {
		if len(all) == 0 {
			return &stormPod{ending: true, calling: true} // nothing happens to it
		}
		return all[s.rng.IntN(len(all))]
	}
	switch n := s.rng.IntN(200); {
	case n < 30:
		s.schedule()
	case n < 110:
		for _, i := range s.rng.Perm(len(all)) {
			s.sync(all[i])
		}
	case n < 120: // its container ends, and starts again
		if p := one(); !p.hangs {
			s.locked(func() { p.container = nil })
			s.wake() // the runtime tells
		}
	case n < 130:
		p := one()
		p.ending = true
		s.terminate(p)
	case n < 144: // by force, or as the node was away: the claim is free at once
		if p := one(); p.UID != "" && !s.apiDown {
			s.note("pod %s is deleted by force", p.UID)
			s.leaves(p)
			p.ending, p.hangs = true, s.rng.IntN(2) == 0
			s.done["forced"]++
		}
	case n < 150:
		one().hangs = false
	case n < 152:
		s.restartKubelet()
	case n < 154:
		s.restartAgent()
	case n < 156:
		s.locked(func() { s.apiDown = !s.apiDown && s.rng.IntN(2) == 0; s.blind = time.Now() })
	case n < 158:
		s.locked(func() { s.cutOff = !s.cutOff && s.rng.IntN(2) == 0; s.blind = time.Now() })
	case n < 160:
		s.locked(func() { s.down = !s.down && s.rng.IntN(3) == 0 })
	case n < 166:
		s.edit()
	default:
		time.Sleep(time.Duration(s.rng.IntN(8000)) * time.Millisecond)
	}
	if s.apiDown || s.cutOff {
		s.locked(func() { s.blind = time.Now() })
	}
}

// check is what must be true at any moment.
func (s *storm) check(when string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	type user struct {
		p  *stormPod
		id string
		g  ledger.Grant
	}
	var users []user
	for _, uid := range slices.Sorted(maps.Keys(s.pods)) {
		p := s.pods[uid]
		for id, r := range p.container {
			for _, o := range users {
				if s.ledger.Overlap(r.Grants, []ledger.Grant{o.g}) && (o.id != id || fmt.Sprint(o.g) != fmt.Sprint(r.Grants[0])) {
					s.t.Errorf("%s: pods %s and %s have %+v and %+v", when, o.p.UID, uid, o.g, r.Grants)
				}
			}
			users = append(users, user{p, id, r.Grants[0]})
			a, ok := s.ledger.Get(id)
			if !ok || fmt.Sprint(a.Grants) != fmt.Sprint(r.Grants) {
				s.t.Errorf("%s: pod %s runs with %+v, and the ledger has %+v (%v)", when, uid, r.Grants, a, ok)
			}
		}
	}
	held := s.ledger.Allocations()
	for i := range held {
		for j := range i {
			if s.ledger.Overlap(held[i].Grants, held[j].Grants) {
				s.t.Errorf("%s: %+v and %+v have the same", when, held[i], held[j])
			}
		}
	}
}

// calm: whoever was given something has it once nothing is wrong any more, and then all ends.
func (s *storm) calm() {
	s.locked(func() { s.apiDown, s.cutOff, s.down = false, false, false })
	for _, p := range s.all() {
		p.hangs = false
		p.ending = p.ending || p.lost || p.amiss // its user deletes it
	}
	for range 100 {
		for _, p := range s.all() {
			s.sync(p)
			p.ending = p.ending || p.lost || p.amiss
		}
		time.Sleep(5 * time.Second)
		s.check("calm")
	}
	for _, p := range s.all() {
		// A pod that ends and that the kubelet's account does not name has it ask for the claim of
		// another one, which is refused until that ends, too: kubernetes#140212.
		beside := slices.ContainsFunc(s.all(), func(o *stormPod) bool { return o.claim == p.claim && o.container != nil })
		if p.container == nil && !p.ending || p.ending && !beside {
			s.t.Errorf("pod %s was given %+v, and does not run: %+v", p.UID, p.given, p)
		}
	}
	for range 3 {
		for _, p := range s.all() {
			p.ending = true
			s.terminate(p)
		}
		time.Sleep(5 * sweepEvery)
	}
	synctest.Wait()
	s.locked(func() {
		if s.ledger.Held() || len(s.files) > 0 || len(s.pods) > 0 {
			s.t.Errorf("left are %+v, files of %v, pods %v", s.ledger.Allocations(), slices.Sorted(maps.Keys(s.files)), slices.Sorted(maps.Keys(s.pods)))
		}
		clear(s.account)
	})
}

// TestStormOfNamedClaims: whatever happens to pods whose claims are given back and allocated anew under
// the same UID, to the kubelet, the agent and the API server, no container runs with another device or
// amount than its claim was given for its pod, no two claims have the same piece, and who was given
// something has it in the end.
func TestStormOfNamedClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := input(t, several(t, "a100-80gb.json", 3), whole)
		s := &storm{t: t, rng: rand.New(rand.NewPCG(*stormSeed, 5)), in: in, cluster: &claims.Cluster{Driver: driver}, due: make(chan struct{}, 1), done: map[string]int{},
			made: map[mig.Place]bool{}, files: map[string]ledger.Record{}, journal: map[string]ledger.Record{}, pods: map[string]*stormPod{}, account: map[string]*entry{}, following: map[int]func(){}, layouts: map[gpu.UUID]string{}}
		for i, l := range []string{"shared", "whole", "mig"} {
			s.layouts[in.Inventory.GPUs[i].UUID] = l
		}
		s.start()
		defer func() { s.stop() }()
		for i := range *stormSteps {
			s.step()
			time.Sleep(time.Duration(s.rng.IntN(200)) * time.Millisecond)
			synctest.Wait()
			s.check(fmt.Sprint("step ", i))
			if i%500 == 499 && !t.Failed() {
				s.calm()
			}
			if t.Failed() {
				t.Log(s.log.last(100))
				break
			}
		}
		time.Sleep(dra.Patience) // calls that are under way
		t.Logf("%v", s.done)
	})
}
