// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
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
