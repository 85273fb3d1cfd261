// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
)

// stormWeeks is how often a storm's agent is away for a week.
const stormWeeks = 12

// TestStormOfWeeksAway has the agent away for a week, again and again in the midst of a storm: by itself, while
// the kubelet goes on and pods end, or with the whole node, which boots with a clock that is an hour off. What runs
// keeps what it has, and what ended meanwhile is free again soon.
func TestStormOfWeeksAway(t *testing.T) {
	for name, node := range map[string]bool{"the agent": false, "the node": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStorm(t, false, false)
				s.claims.turn = 0 // mostly pods of the device plugin
				for week := range stormWeeks {
					for i := range min(*stormSteps/10, 1000) {
						if s.turn(fmt.Sprintf("week %d, step %d", week, i)); t.Failed() {
							break
						}
					}
					// A storm may have ended all pods, and then a week changes nothing.
					for i := 0; i < 500 && s.alive() < 3 && !t.Failed(); i++ {
						s.turn(fmt.Sprintf("before week %d, step %d", week, i))
					}
					s.weekAway(node)
					s.backAgain(fmt.Sprint("after week ", week))
					if t.Failed() {
						lines := strings.Split(s.log.String(), "\n")
						t.Log(strings.Join(lines[max(0, len(lines)-90):], "\n"))
						break
					}
				}
				if !t.Failed() {
					s.calm()
				}
				s.quit()
				time.Sleep(time.Minute) // what the driver is in the middle of comes to its end
				t.Logf("%v", s.done)
				tried := []string{"ended in a week", "granted", "started", "allocations after a week"}
				if !node {
					tried = append(tried, "lived for a week")
				}
				for _, what := range tried {
					if s.done[what] == 0 {
						t.Errorf("the count of %q is zero: this is not tried", what)
					}
				}
			})
		})
	}
}

// alive is how many pods of the device plugin have a container that runs.
func (s *storm) alive() (n int) {
	s.locked(func() {
		for _, p := range s.pods {
			if p.active && p.claim == nil && s.livesLocked(p) {
				n++
			}
		}
	})
	return n
}

// weekAway ends the agent and starts the next one a week later. Half of the pods have ended then. If the whole node
// was away, no container runs, the CDI files are gone, the kubelet has what stands in its checkpoint, and the clock
// is an hour off.
func (s *storm) weekAway(whole bool) {
	s.heal()
	s.quit()
	s.claims.left()
	synctest.Wait()
	time.Sleep(7 * 24 * time.Hour)
	s.mu.Lock()
	for _, uid := range slices.Sorted(maps.Keys(s.pods)) {
		p := s.pods[uid]
		switch {
		case !p.active || p.claim != nil:
		case s.rng.IntN(2) == 0:
			p.active = false
			s.endLocked(func(c *stormContainer) bool { return c.pod == p })
			s.done["ended in a week"]++
		case !whole && s.livesLocked(p):
			s.done["lived for a week"]++
		}
	}
	if whole {
		s.endLocked(func(*stormContainer) bool { return true })
		clear(s.specs)
		clear(s.written)
		s.entries, s.deaf = slices.Clone(s.file), true
		s.boot = fmt.Sprint("boot ", s.done["boots"])
		s.done["boots"]++
		by := time.Hour
		if s.rng.IntN(2) == 0 {
			by = -by
		}
		s.putLocked(by)
		// The agent and the runtime read one clock, the node's. Where the agent cannot read the kubelet's checkpoint,
		// which happens in this storm, it tells by that clock whose a container is.
		s.attack.skew = 0
	}
	s.news = []node.ContainerEvent{} // the runtime had no listener
	s.mu.Unlock()
	s.start()
	s.agent.SetFile("p.yaml", []byte(s.partition))
	s.done["weeks"]++
}

// backAgain is the first minutes of an agent that was away: it learns what has ended, and then has what pods have.
func (s *storm) backAgain(when string) {
	for range 8 {
		s.round(nil)
		synctest.Wait()
		s.check(when)
		time.Sleep(10 * time.Second)
		s.locked(func() { s.deaf = false })
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	held := map[string]bool{} // allocations
	for _, e := range s.entries {
		if s.pods[e.PodUID].active {
			held[cdi.Key(e.Resource, e.IDs)] = true
		}
	}
	for _, c := range s.containers {
		for resource, ids := range c.ids {
			held[cdi.Key(resource, ids)] = true
		}
	}
	for _, a := range s.agent.Allocations() {
		if a.Owner == ledger.DevicePlugin && !held[a.ID] {
			s.t.Errorf("%s: allocation %s of %s is kept, and no pod has it: %+v", when, a.ID, a.Resource, a)
		}
		s.done["allocations after a week"]++
	}
}
