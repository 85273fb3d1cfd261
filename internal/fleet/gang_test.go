// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// member is a pod of a group that asks for more than half a GPU.
func member(group string, i int) *corev1.Pod {
	p := asks(fmt.Sprint(group, "-", i), "50")
	p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &group}
	return p
}

// scheduler asks for pods as kube-scheduler does for those of a group.
type scheduler struct {
	*Fleet
	t     *testing.T
	clock time.Time
}

func newScheduler(t *testing.T, nodes ...string) *scheduler {
	s := &scheduler{Fleet: known(nodes...), t: t, clock: start}
	s.Fleet.now = func() time.Time { return s.clock }
	return s
}

// round asks for the pods of a group, one after the other. It wants one placed for each p in want, and the
// others refused for a reason with a part, and returns how often room was looked for in vain.
func (s *scheduler) round(group, want, part string, among ...string) (searches int) {
	s.t.Helper()
	got, before := "", s.refusals
	for i := range want {
		on, refused, err := place(s.t.Context(), s.Fleet, member(group, i), among)
		if err != nil {
			s.t.Fatal(err)
		}
		if on != "" {
			got += "p"
			continue
		}
		got += "-"
		for name, why := range refused {
			if !strings.Contains(why, part) {
				s.t.Errorf("%s-%d is refused on %s with %q, want %q", group, i, name, why, part)
			}
		}
	}
	if got != want {
		s.t.Errorf("of %s there are placed %q, want %q", group, got, want)
	}
	return s.refusals - before
}

// look does what Run does with news.
func (s *scheduler) look() (woken []string) {
	s.clock = s.clock.Add(again)
	s.lapse()
	for _, node := range s.due() {
		if s.usable(node) != nil {
			woken = append(woken, node)
		}
	}
	return woken
}

func (s *scheduler) reserved(want int) {
	s.t.Helper()
	if _, n := s.State(); n != want {
		s.t.Errorf("%d pods have reservations, want %d", n, want)
	}
}

// A group without room falls together as soon as the scheduler begins anew with it, and is looked at
// again when there is news, and not before.
func TestGroupWithoutRoom(t *testing.T) {
	s := newScheduler(t, "a", "b")
	s.SetPod(bound(asks("long", "79"), "b", second, 79))
	const why = "no room for all of its group: for x/g-3"
	s.round("g", "ppp-", "not known yet", "a", "b")
	s.reserved(3)
	for range 100 {
		if n := s.round("g", "----", why, "a", "b"); n > 0 {
			t.Fatalf("room was looked for %d times, and there was no news", n)
		}
		s.reserved(0)
	}
	if woken := s.look(); woken != nil {
		t.Errorf("the scheduler is woken for %v", woken)
	}
	// Its own end is none for it, and neither is a pod that takes room.
	wantPlaced(t, s.Fleet, asks("other", "50"), "a", "")
	s.SetPod(bound(asks("other", "50"), "a", first, 50))
	s.round("g", "----", why, "a", "b")
	s.DeletePod("other")
	s.look()
	s.round("g", "ppp-", "not known yet", "a", "b")
	s.round("g", "----", why, "a", "b")
	s.DeletePod("long")
	if woken := s.look(); fmt.Sprint(woken) != "[b]" {
		t.Errorf("the scheduler is woken for %v, want b", woken)
	}
	s.round("g", "pppp", "", "a", "b")
	s.reserved(4)
}

// A scheduler may have news of its own: a node that it did not ask about before, and after a while
// anything.
func TestGroupAmongOtherNodes(t *testing.T) {
	s := newScheduler(t, "a", "b")
	s.round("g", "pp-", "not known yet", "a")
	s.round("g", "---", "its group", "a")
	s.round("g", "ppp", "", "a", "b")
	s.round("h", "p-", "not known yet", "b", "a")
	s.round("h", "--", "its group", "a")
	s.clock = s.clock.Add(hopelessFor)
	s.round("h", "p-", "not known yet", "a", "b")
}

// A group may need fewer pods than it has. Those that have places are bound however often it is asked for
// one that has none, and however long that takes.
func TestGroupThatNeedsFewer(t *testing.T) {
	s := newScheduler(t, "a")
	s.round("g", "pp-", "not known yet", "a")
	for range 3 {
		if on, _, err := place(t.Context(), s.Fleet, member("g", 2), []string{"a"}); on != "" || err != nil {
			t.Fatalf("the third is on %q, %v", on, err)
		}
		s.reserved(2)
		s.clock = s.clock.Add(2 * time.Minute)
	}
	wantPlaced(t, s.Fleet, asks("other", "50"), "", "not known yet")
	s.SetPod(bound(member("g", 0), "a", first, 50))
	s.reserved(1)
	// The second could not be bound, and is asked for alone.
	s.round("g", "pp", "", "a")
}

// Pods that were refused while a group had places are woken for when these fall, and groups that wait
// do not wake each other for ever.
func TestGroupsThatWait(t *testing.T) {
	s := newScheduler(t, "a")
	s.round("g", "pp-", "not known yet", "a")
	wantPlaced(t, s.Fleet, asks("single", "79"), "", "not known yet")
	s.round("g", "---", "its group", "a")
	if woken := s.look(); fmt.Sprint(woken) != "[a]" {
		t.Errorf("the scheduler is woken for %v, want a", woken)
	}
	s.DeletePod("single")
	s.look()
	groups := []string{"g", "h", "i"}
	for _, name := range groups {
		s.round(name, "pp-", "not known yet", "a")
		s.round(name, "---", "its group", "a")
	}
	searches := 0
	for range 20 {
		s.look()
		for _, name := range groups {
			searches += s.round(name, "---", "its group", "a")
		}
	}
	if searches > 0 {
		t.Errorf("room was looked for %d times, and there was no news", searches)
	}
}

// crowd is what a scheduler knows of groups in TestGroupsAtRandom. Each pod asks for more than half a GPU.
type crowd struct {
	*scheduler
	rng    *rand.Rand
	groups map[string]*squad
	made   int
}

// squad is a group, of which at least so many pods are bound or none.
type squad struct {
	least int
	pods  []*trooper
	asked int // how often
}

// trooper is a pod. It is being bound on a node until a time, then it is bound there, and has a GPU.
type trooper struct {
	pod     *corev1.Pod
	on, gpu string
	until   time.Time
}

// ask has a scheduler ask for the pods of a group that have no node.
func (c *crowd) ask(s *squad) {
	var placed []*trooper
	has := 0
	for _, p := range s.pods {
		if p.on != "" {
			has++
			continue
		}
		on, _, err := c.Place(c.t.Context(), string(p.pod.UID), []string{"a", "b", "c"})
		if err != nil {
			c.t.Fatal(err)
		}
		if c.rng.IntN(12) == 0 {
			return // the answer is lost, and the scheduler puts all of them back
		}
		if on != "" {
			p.on = on
			placed = append(placed, p)
		}
	}
	for _, p := range placed {
		p.until = c.clock.Add([]time.Duration{0, time.Second, 9 * time.Minute}[c.rng.IntN(3)])
		if has+len(placed) < s.least {
			p.on = ""
			c.say(p, "the group lacks pods")
		}
	}
}

// say has the scheduler write why a pod is not bound.
func (c *crowd) say(p *trooper, why string) {
	p.pod = p.pod.DeepCopy()
	no := corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: why}
	p.pod.Status.Conditions = []corev1.PodCondition{no}
	c.SetPod(p.pod)
}

// bind ends the binding of pods whose time has come: some of them cannot be bound.
func (c *crowd) bind() {
	taken := map[string]int{}
	for _, s := range c.groups {
		for _, p := range s.pods {
			switch {
			case p.on == "" || p.gpu != "" || c.clock.Before(p.until):
			case c.rng.IntN(20) == 0:
				p.on = ""
				c.say(p, "a volume")
			default:
				c.start(p)
			}
			if taken[p.on]++; p.on != "" && taken[p.on] > 2 {
				c.t.Fatalf("three pods have room on %s, where there is room for two", p.on)
			}
		}
	}
}

// start gives a pod a GPU that nobody has.
func (c *crowd) start(p *trooper) {
	used := map[string]bool{}
	for _, s := range c.groups {
		for _, o := range s.pods {
			used[o.on+o.gpu] = true
		}
	}
	for _, gpu := range []string{first, second} {
		if p.gpu == "" && !used[p.on+gpu] {
			p.gpu = gpu
		}
	}
	if p.gpu == "" {
		c.t.Fatalf("%s is bound to %s, where no GPU is free", p.pod.Name, p.on)
	}
	c.SetPod(bound(p.pod, p.on, p.gpu, 50))
}

// TestGroupsAtRandom: whatever a scheduler does with groups, which answers it loses, how slowly it binds
// and what it cannot bind, no room is given twice, and each group gets its own in the end.
func TestGroupsAtRandom(t *testing.T) {
	for seed := range uint64(5) {
		c := &crowd{newScheduler(t, "a", "b", "c"), rand.New(rand.NewPCG(seed, 38)), map[string]*squad{}, 0}
		whole := 0
		for range 2000 {
			if len(c.groups) < 5 {
				name := fmt.Sprint("group-", c.made)
				c.made++
				s := &squad{}
				for i := range 1 + c.rng.IntN(5) {
					s.pods = append(s.pods, &trooper{pod: member(name, i)})
					c.SetPod(s.pods[i].pod)
				}
				s.least = 1 + c.rng.IntN(len(s.pods))
				c.groups[name] = s
			}
			name := slices.Sorted(maps.Keys(c.groups))[c.rng.IntN(len(c.groups))]
			c.ask(c.groups[name])
			c.bind()
			c.clock = c.clock.Add(time.Duration(c.rng.Int64N(int64(20 * time.Second))))
			c.look()
			has := 0
			for _, p := range c.groups[name].pods {
				if p.gpu != "" {
					has++
				}
			}
			// Where a pod cannot be bound two groups may wait for each other: that is the scheduler's, and ends.
			enough := has >= c.groups[name].least
			if c.groups[name].asked++; enough && c.rng.IntN(3) == 0 || c.groups[name].asked > 100 {
				for _, p := range c.groups[name].pods {
					c.DeletePod(string(p.pod.UID))
				}
				if delete(c.groups, name); enough {
					whole++
				}
			}
		}
		if whole < c.made*2/3 {
			t.Errorf("seed %d: %d groups of %d were ever bound", seed, whole, c.made)
		}
	}
}
