// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/pkg/timeslice"
)

// stormAttacks narrows a storm that has found something.
var stormAttacks = flag.String("storm.attacks", "others,clock,hang,many,state,checkpoint", "what a storm attacks with")

func attacks(with string) bool { return slices.Contains(strings.Split(*stormAttacks, ","), with) }

// attack is what a storm does that an attack has found to give way: GPUs of other
// device plugins, whose entries stay in the kubelet's checkpoint indefinitely; a clock
// that jumps; containers that hang after their pod was deleted by force; partitions
// with more devices than fit; a state file that is lost while the size of a memory
// unit changes.
type attack struct {
	// guests are pods that another device plugin has given a GPU. Those that have
	// ended are remembered by the checkpoint alone.
	guests    []*guest
	nextGuest int
	// blind is when the kubelet last named nobody, in whatever way.
	blind time.Time
	// round is when the last round began.
	round time.Time
	// clocks says that the clock may jump until the next calm. The checkpoint can be
	// read then: where nobody says whose a container is, there is only the clock.
	clocks bool
	// skew is what the runtime's clock shows beyond the agent's.
	skew time.Duration
	// unit is the size of a memory unit in the agent's flags.
	unit gpu.MiB
	// went are the allocations whose files are not there because a GPU had failed.
	went map[string]bool
	// crowded says that a state file with more devices than fit was left once: it
	// takes long to list them all.
	crowded bool
}

// guest is a pod of another device plugin.
type guest struct {
	uid, name, resource, id string
	gpu                     gpu.UUID
	since                   time.Time
	ended                   bool
	// pulling says that it has no container yet.
	pulling bool
}

// strike does one of the things that gave way.
func (s *storm) strike(n int) {
	a := &s.attack
	switch n {
	case 0, 1:
		if attacks("others") && (s.claims.turn == 0 || s.rng.IntN(8) == 0) {
			s.locked(s.guestLocked)
		}
	case 2:
		s.locked(func() {
			if s.rng.IntN(3) == 0 { // it is to be there for longer than the agent needs to see it
				a.endGuests()
			}
		})
	case 3:
		if a.clocks && attacks("clock") {
			s.locked(func() { s.jumpLocked(s.jump()) })
		}
	case 4:
		if attacks("many") {
			s.offerTooMany()
		}
	case 5: // a container that hung is dead after all
		s.locked(func() {
			s.endLocked(func(c *stormContainer) bool { return c.hangs && s.rng.IntN(4) == 0 })
		})
	}
}

// guestLocked has another plugin give a GPU to a pod, under one of the names that
// such plugins have for it.
func (s *storm) guestLocked() {
	a := &s.attack
	if slices.ContainsFunc(a.guests, func(g *guest) bool { return !g.ended }) {
		return
	}
	u := uuid(s.rng.IntN(s.gpus))
	a.nextGuest++
	g := &guest{uid: fmt.Sprint("guest-uid-", a.nextGuest), name: fmt.Sprint("guest-", a.nextGuest), gpu: u, since: time.Now(), pulling: s.rng.IntN(4) == 0}
	switch s.rng.IntN(4) {
	case 0: // NVIDIA's
		g.resource, g.id = "nvidia.com/gpu", string(u)
	case 1: // NVIDIA's, with replicas
		g.resource, g.id = "nvidia.com/gpu.shared", string(u)+"::2"
	case 2: // HAMi's
		g.resource, g.id = "nvidia.com/gpu", string(u)+"-3"
	default: // Volcano's
		g.resource, g.id = "volcano.sh/vgpu-number", string(u)+"-0"
	}
	a.guests = append(a.guests, g)
	if len(a.guests) > 6 {
		a.guests = a.guests[1:]
	}
	s.writes++
	s.done["guests"]++
	s.note("%s gives %s to pod %s", g.resource, g.id, g.uid)
}

func (a *attack) endGuests() {
	for _, g := range a.guests {
		g.ended = true
	}
}

// list adds the guests that live to what the kubelet says.
func (a *attack) list(l *node.Listing) {
	for _, g := range a.guests {
		if !g.ended {
			l.Pods = append(l.Pods, workload.Pod{Namespace: "theirs", Name: g.name})
			l.Holdings = append(l.Holdings, node.Holding{Namespace: "theirs", Pod: g.name, Container: "app", Resource: g.resource, IDs: []string{g.id}})
		}
	}
}

// entries are those of the kubelet's checkpoint for guests. Nothing takes one away.
func (a *attack) entries() (out []node.Entry) {
	for _, g := range a.guests {
		out = append(out, node.Entry{PodUID: g.uid, Container: "app", Resource: g.resource, IDs: []string{g.id}})
	}
	return out
}

// containers and sandboxes are the runtime's word of guests.
func (a *attack) containers() (out []node.Container) {
	for _, g := range a.guests {
		if !g.ended && !g.pulling {
			out = append(out, node.Container{ID: g.uid + "-app", PodUID: g.uid, Namespace: "theirs", Pod: g.name, Name: "app", Running: true, Created: g.since})
		}
	}
	return out
}

func (a *attack) sandboxes(out map[string]workload.Pod) {
	for _, g := range a.guests {
		if !g.ended {
			out[g.uid] = workload.Pod{Namespace: "theirs", Name: g.name}
		}
	}
}

// calmLocked ends what keeps GPUs away. The checkpoint goes on naming guests.
func (a *attack) calmLocked() {
	a.endGuests()
	a.skew = 0
}

// jump is by how much the clock is put, forward or back.
func (s *storm) jump() time.Duration {
	by := []time.Duration{time.Minute, 7 * time.Minute, time.Hour}[s.rng.IntN(3)]
	if s.rng.IntN(2) == 0 {
		return -by
	}
	return by
}

// jumpLocked puts the clock back, or forward if by is negative. The clock of a test
// cannot be put, so whatever carries a time moves instead: what was made before is as
// much younger than what comes now as it would be. In some cases what comes now is
// off too.
func (s *storm) jumpLocked(by time.Duration) {
	for _, c := range s.containers {
		c.Created = c.Created.Add(by)
	}
	s.attack.skew = 0
	if s.rng.IntN(3) == 0 {
		s.attack.skew = by
	}
	s.done["jumps"]++
	s.note("the clock is put back by %s; the runtime's is ahead by %s", by, s.attack.skew)
}

// putLocked puts the clock while no agent runs: what stands in its files moves, too.
func (s *storm) putLocked(by time.Duration) {
	s.jumpLocked(by)
	for i := range s.journal {
		s.journal[i].Allocated = s.journal[i].Allocated.Add(by)
	}
	for key := range s.written {
		s.written[key] = s.written[key].Add(by)
	}
	s.doc.Layouts = slices.Clone(s.doc.Layouts)
	for i := range s.doc.Layouts {
		if c := &s.doc.Layouts[i]; !c.Until.IsZero() {
			c.Until = c.Until.Add(by)
		}
	}
}

// damage is what happens to an agent's files while none runs: a clock that is put
// meanwhile, a state file that is lost, one that an agent has left which knew no
// bound. The next one may have another unit.
func (s *storm) damage() {
	a := &s.attack
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.clocks && attacks("clock") && s.rng.IntN(2) == 0 {
		s.putLocked(s.jump())
	}
	if attacks("state") && s.rng.IntN(4) == 0 {
		a.unit = []gpu.MiB{unit, unit / 2, 2 * unit}[s.rng.IntN(3)]
		s.claims.doubtLocked("units have another size")
		s.done["units changed"]++
	}
	// Whose the instances on a GPU are stands there too: what is nobody's is not
	// cut away, and a storm could not end.
	if attacks("state") && !s.mig && s.rng.IntN(4) == 0 {
		s.doc = state.Document{}
		s.claims.doubtLocked("what the GPUs were laid out as is lost")
		s.done["state lost"]++
	}
	if attacks("many") && !s.mig && !a.crowded && s.claims.turn == 0 && s.doc.Boot != "" && s.rng.IntN(4) == 0 {
		s.crowdLocked()
	}
}

// crowdLocked leaves a state file in which every GPU that nobody has anything of is
// divided into as many replicas as the kubelet may be told of.
func (s *storm) crowdLocked() {
	held := map[gpu.UUID]bool{}
	note := func(grants []ledger.Grant) {
		for _, u := range (&ledger.Allocation{Grants: grants}).GPUs() {
			held[u] = true
		}
	}
	for _, e := range slices.Concat(s.entries, s.file) {
		if r, err := deviceplugin.RecordOf(e.Resource, e.IDs); err == nil {
			note(r.Grants)
		}
	}
	for _, c := range s.journal {
		note(c.Grants)
	}
	for _, spec := range s.specs {
		if _, text, err := cdi.ReadRecord(spec, "example.com"); err == nil {
			r, err := ledger.ReadRecord(text)
			if err != nil {
				continue
			}
			note(r.Grants)
		}
	}
	layouts := slices.DeleteFunc(slices.Clone(s.doc.Layouts), func(c state.Layout) bool { return !held[c.GPU] })
	free := 0
	for i := range s.gpus {
		if u := uuid(i); !held[u] {
			layouts = append(layouts, state.Layout{GPU: u, Past: plan.Past{Layout: plan.Layout{Division: piece.Division{Kind: piece.KindReplica, N: timeslice.MaxListed}}}})
			free++
		}
	}
	if free < 2 {
		return // they would fit
	}
	s.doc.Layouts, s.attack.crowded = layouts, true
	s.claims.doubtLocked("the GPUs are said to be laid out as they never were")
	s.done["crowds"]++
	s.note("the state file has %d GPUs of %d replicas", free, timeslice.MaxListed)
}

// tooMany is a partition of which a node with more than two GPUs cannot list all
// devices.
const tooMany = allShared + "      replicas: 30000\n"

// offerTooMany edits the partition to one that does not fit: it is refused, and what
// is on offer stays.
func (s *storm) offerTooMany() {
	if s.beside {
		return // what a round at the same time changes is not the edit's doing
	}
	s.round(nil)
	synctest.Wait()
	if !s.agent.loop.reader.answered || s.mute != nil || s.hangs || len(s.agent.loop.executor.jobs) > 0 || s.agent.loop.reporter.last().Outcome.State != Applied {
		return
	}
	before, wanted := s.healthy(), s.agent.loop.reporter.last().asked.Generation
	s.agent.SetFile("p.yaml", []byte(tooMany))
	s.round(nil)
	synctest.Wait()
	after := s.healthy()
	snap := s.agent.loop.reporter.last()
	if snap.Outcome.State != Invalid || snap.asked.Generation != wanted {
		s.t.Errorf("30000 replicas on each of %d GPUs are %s (%q), and the wishes went from %d to %d; want them refused", s.gpus,
			snap.Outcome.State, snap.Outcome.Message, wanted, snap.asked.Generation)
	}
	for _, id := range before {
		if _, still := slices.BinarySearch(after, id); !still {
			s.t.Errorf("an edit that does not fit has taken %s off", id)
		}
	}
	s.done["too many"]++
}

// healthy is what is on offer, as "resource id", sorted.
func (s *storm) healthy() (out []string) {
	for _, r := range s.agent.front.Offer().Resources {
		for i := range r.Devices {
			if r.Devices[i].Healthy {
				out = append(out, r.Name+" "+r.Devices[i].ID)
			}
		}
	}
	slices.Sort(out)
	return out
}

// offer is what the agent knows when it is asked which devices it prefers.
type offer struct {
	offer       *deviceplugin.Offer
	allocations []ledger.Allocation
}

func (s *storm) offer() offer { return offer{s.agent.front.Offer(), s.agent.Allocations()} }

// checkChoice holds what the agent prefers against what it knew: a device that is
// leaving, or that an allocation covers, is no good to a new pod where others would do. What
// changed beside the choice is no fault of it.
func (s *storm) checkChoice(knew offer, resource string, free, must, chosen []string) {
	now := s.offer()
	if now.offer != knew.offer || !slices.EqualFunc(now.allocations, knew.allocations, func(a, b ledger.Allocation) bool { return a.ID == b.ID }) {
		return
	}
	at := slices.IndexFunc(knew.offer.Resources, func(r deviceplugin.Resource) bool { return r.Name == resource })
	if at < 0 {
		return
	}
	why := map[string]string{}
	for _, d := range knew.offer.Resources[at].Devices {
		if d.Leaving || !d.Healthy {
			why[d.ID] = "leaving: " + d.Reason
		}
	}
	for _, c := range knew.allocations {
		for _, d := range knew.offer.Resources[at].Devices {
			if c.Owner != ledger.DevicePlugin && c.On(d.GPU) {
				why[d.ID] = "on a GPU of another front-end's"
			}
		}
		for _, id := range deviceplugin.IDs(c.Grants) {
			if c.Resource == resource {
				why[id] = "covered by allocation " + c.ID
			}
		}
	}
	poor, taken := "", map[string]bool{} // by GPU
	for _, id := range must {
		taken[onGPU(id)] = true
	}
	for _, id := range chosen {
		if !slices.Contains(must, id) && why[id] != "" {
			poor = id
		}
	}
	if poor == "" {
		return
	}
	// What would have done, by GPU.
	good := map[string]int{}
	for _, id := range free {
		if why[id] == "" && !slices.Contains(must, id) {
			good[onGPU(id)]++
		}
	}
	need, enough := len(chosen)-len(must), false
	switch knew.offer.Resources[at].Kind {
	case piece.KindUnits:
		for u, n := range good {
			enough = enough || n >= need && (len(must) == 0 || taken[u])
		}
	default: // one of each GPU would always do
		maps.DeleteFunc(good, func(u string, _ int) bool { return taken[u] })
		enough = len(good) >= need
	}
	s.locked(func() { s.done["nothing but poor choices"]++ })
	if enough && attacks("hang") {
		s.t.Errorf("of %s the agent prefers %v, must %v: %s is %s, and these would do: %v", resource, chosen, must, poor, why[poor], good)
	}
}

func onGPU(id string) string {
	u, _, _ := strings.Cut(id, "::")
	return u
}

// giveLocked remembers what a container may have of each GPU: what the pages of its
// allocations say when it starts.
func (s *storm) giveLocked(c *stormContainer) {
	for resource, ids := range c.ids {
		for _, id := range ids {
			u, key := gpu.UUID(onGPU(id)), cdi.Key(resource, ids)
			bytes, err := s.pages.Limit(key, u)
			fits := err == nil && bytes > 0
			switch _, resource := deviceplugin.TierOf(resource); resource {
			case memResource: // of the size that they had when it was admitted
				fits = fits && slices.ContainsFunc([]gpu.MiB{unit / 2, unit, 2 * unit}, func(size gpu.MiB) bool {
					return bytes == uint64(len(ids))*uint64(size)<<20
				})
			case sharedResource:
				fits = fits && bytes < uint64(machine(1).GPUs[0].Memory)<<20
			default:
				fits = bytes == lib.None
			}
			if !fits {
				s.t.Errorf("%s is to start on %d of %s, and its page allows %d bytes of %s: %v", c.ID, len(ids), resource, bytes, u, err)
			}
			c.limits[key+" "+string(u)] = bytes
		}
	}
}

// checkCap holds the page of an allocation that a container has against what it was given.
func (s *storm) checkCap(when string, c *stormContainer, resource string, ids []string) {
	for _, id := range ids {
		u, key := gpu.UUID(onGPU(id)), cdi.Key(resource, ids)
		if bytes, err := s.pages.Limit(key, u); err != nil || bytes != c.limits[key+" "+string(u)] {
			s.t.Errorf("%s: %s runs with %s of %s, was given %d bytes and may have %d now, %v", when, c.ID, resource, u, c.limits[key+" "+string(u)], bytes, err)
		}
	}
}

// checkAttack is what must be true at any moment in spite of an attack.
func (s *storm) checkAttack(when string) {
	a, listed := &s.attack, 0
	if s.unreadable && s.deaf {
		a.blind = time.Now()
	}
	allocated := map[string]bool{}
	for _, c := range s.agent.Allocations() {
		for _, id := range deviceplugin.IDs(c.Grants) {
			allocated[c.Resource+" "+id] = true
		}
	}
	// The agent has looked once since then.
	known := a.round.Add(-othersEvery)
	for _, g := range a.guests {
		if g.ended || g.since.After(known) || a.blind.After(known) {
			continue
		}
		s.done["looks at guests"]++
		for _, r := range s.agent.front.Offer().Resources {
			for _, d := range r.Devices {
				if d.GPU == g.gpu && d.Healthy && !d.Leaving && !allocated[r.Name+" "+d.ID] {
					s.t.Errorf("%s: %s of %s is on offer, and another plugin's pod %s has had the GPU as %s (%s) for %s", when, d.ID, r.Name, g.uid, g.id, g.resource, time.Since(g.since))
				}
			}
		}
	}
	for _, r := range s.agent.front.Offer().Resources {
		listed += len(r.Devices)
	}
	// What is held, or was until a moment ago, is listed whatever that comes to.
	if listed > timeslice.MaxListed+timeslice.MaxListed/100 {
		s.t.Errorf("%s: %d devices are listed, more than the %d that the kubelet may be told of", when, listed, timeslice.MaxListed)
	}
}
