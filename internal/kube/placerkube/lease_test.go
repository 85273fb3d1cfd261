// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"context"
	"errors"
	"math"
	"net/http"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube/kubetest"
)

// candidate is a process that would like to lead, with a clock of its own.
type candidate struct {
	*Lease
	t   *testing.T
	now time.Time
	// before is what it was told when it got the lease, by times.
	before []time.Time
	own    bool
}

func newCandidate(t *testing.T, s *kubetest.Server, name string, now time.Time) *candidate {
	cluster, _ := connect(t, s)
	c := &candidate{t: t, now: now}
	cluster.server.Now = func() time.Time { return c.now }
	c.Lease = cluster.NewLease("gpu", "placer", name, func(before time.Time, own bool) {
		c.own = own
		if c.Leads() == nil {
			t.Errorf("%s leads before it was told so", name)
		}
		c.before = append(c.before, before)
	})
	return c
}

// after lets time pass for one candidate, has it try, and wants it to lead or not.
func (c *candidate) after(d time.Duration, leads bool) {
	c.t.Helper()
	c.now = c.now.Add(d)
	if err := c.try(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	c.want(leads)
}

func (c *candidate) want(leads bool) {
	c.t.Helper()
	if err := c.Leads(); (err == nil) != leads {
		c.t.Fatalf("%s: %v, want that it leads to be %v", c.identity, err, leads)
	}
}

var aDay = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// The lease is another one's when it has not changed for as long as it says, by the clock of
// who looks, however wrong that is. Who could not renew has known that before.
func TestLeaseOfOneThatIsSilent(t *testing.T) {
	s := newServer(t)
	a, b := newCandidate(t, s, "a", aDay), newCandidate(t, s, "b", aDay.Add(-time.Hour))
	a.after(0, true)
	b.after(0, false)
	a.after(2*time.Second, true)
	b.after(14*time.Second, false) // that it was renewed is seen now
	for range 7 {
		b.after(2*time.Second, false)
	}
	a.now = a.now.Add(renewWithin - time.Millisecond)
	a.want(true)
	a.now = a.now.Add(time.Millisecond)
	a.want(false)
	b.after(time.Second, true)
	a.after(time.Hour, false)
	b.after(2*time.Second, true)
	if len(a.before) != 1 || !a.before[0].IsZero() || len(b.before) != 1 || !b.before[0].Equal(aDay.Add(2*time.Second)) {
		t.Errorf("a was told %v, b %v; want nothing, and when a renewed last", a.before, b.before)
	}
	if n := *b.record.LeaseTransitions; n != 1 {
		t.Errorf("%d transitions", n)
	}
}

// Of two that see that a lease has run out, one gets it.
func TestLeaseHasOneTaker(t *testing.T) {
	s := newServer(t)
	a, b, c := newCandidate(t, s, "a", aDay), newCandidate(t, s, "b", aDay), newCandidate(t, s, "c", aDay)
	a.after(0, true)
	b.after(0, false)
	c.after(0, false)
	late := make(chan error)
	s.Set(func() {
		s.Fault = func(verb, _ string, _ http.ResponseWriter) bool {
			if verb == "update" { // c's, which has looked: b is faster
				s.Set(func() { s.Fault = nil })
				go func() { late <- b.try(context.Background()) }()
				if err := <-late; err != nil {
					t.Error(err)
				}
			}
			return false
		}
	})
	b.now, c.now = b.now.Add(leaseFor), c.now.Add(leaseFor)
	if err := c.try(t.Context()); !errors.Is(err, errTaken) {
		t.Errorf("the slower one: %v", err)
	}
	b.want(true)
	c.want(false)
	c.after(leaseFor-time.Second, false)
}

// Who leads and has lost the answer to a renewal, renews at its next try.
func TestLeaseSurvivesALostAnswer(t *testing.T) {
	s := newServer(t)
	a := newCandidate(t, s, "a", aDay)
	a.after(0, true)
	stale := a.object.DeepCopy()
	a.after(2*time.Second, true)
	a.object = stale
	if err := a.try(t.Context()); !errors.Is(err, errTaken) {
		t.Fatalf("an update of an old version: %v", err)
	}
	a.want(true)
	a.after(2*time.Second, true)
	a.now = a.now.Add(renewWithin - time.Second)
	a.want(true)
	if len(a.before) != 1 {
		t.Errorf("told %d times that it leads", len(a.before))
	}
}

// A server whose answers take longer than a leader may be silent has no leader, although it has done what was asked.
// A leader of before knows that it leads no more, and leads again soon after the server is quick.
func TestLeaseAtASlowServer(t *testing.T) {
	s := newServer(t)
	cluster, _ := connect(t, s)
	led := make(chan bool, 16)
	l := cluster.NewLease("gpu", "placer", "a", func(_ time.Time, own bool) { led <- own })
	l.timing = leaseTiming{lasts: 300 * time.Millisecond, renew: 200 * time.Millisecond, retry: 20 * time.Millisecond}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	next := func(what string) (own bool) {
		t.Helper()
		select {
		case own = <-led:
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: nobody leads", what)
		}
		return own
	}
	if next("at first") {
		t.Error("it is told that it led before")
	}
	slow := make(chan struct{})
	s.Mu.Lock()
	s.Fault = func(string, string, http.ResponseWriter) bool {
		select {
		case <-slow:
		case <-time.After(250 * time.Millisecond):
		}
		return false // it does what it is asked
	}
	s.Mu.Unlock()
	time.Sleep(300 * time.Millisecond) // the last quick renewal's turn
	for range 50 {
		if l.Leads() == nil {
			t.Fatal("it leads at a server that answers too late for that")
		}
		time.Sleep(20 * time.Millisecond)
	}
	close(slow)
	if !next("when the server is quick") {
		t.Error("it is not told that the lease was its own all along")
	}
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Who hangs and finds that nobody has taken the lease knows that it was its own all along.
func TestLeaseIsStillOnesOwn(t *testing.T) {
	s := newServer(t)
	a, b := newCandidate(t, s, "a", aDay), newCandidate(t, s, "b", aDay)
	a.after(0, true)
	b.after(0, false)
	a.now = a.now.Add(12 * time.Second)
	a.want(false)
	a.after(0, true)
	if len(a.before) != 2 || !a.before[1].Equal(aDay) || !a.own {
		t.Errorf("told %v, own %v; want its own last word", a.before, a.own)
	}
	b.after(leaseFor-time.Millisecond, false)
	b.after(leaseFor, true)
	if b.own || len(b.before) != 1 {
		t.Errorf("told %v, own %v; want another one's last word", b.before, b.own)
	}
}

// Who leads and finds that somebody has taken the lease, does not lead.
func TestLeaseIsTakenAway(t *testing.T) {
	s := newServer(t)
	a := newCandidate(t, s, "a", aDay)
	a.after(0, true)
	s.Put("leases", "gpu", "placer", map[string]any{"spec": map[string]any{"holderIdentity": "kubectl", "leaseDurationSeconds": 60}})
	if err := a.try(t.Context()); !errors.Is(err, errTaken) {
		t.Fatal(err)
	}
	a.after(0, false)
	a.after(59*time.Second, false)
	a.after(time.Second, true)
}

// A lease that somebody has spoilt, so that it cannot be read, is one that another process holds and
// does not renew: it ends the leader's turn, and is taken over.
func TestLeaseThatCannotBeRead(t *testing.T) {
	for name, spec := range map[string]any{
		"no object":      "text",
		"a holder":       map[string]any{"holderIdentity": 7, "leaseDurationSeconds": 15},
		"a duration":     map[string]any{"holderIdentity": "a", "leaseDurationSeconds": "soon"},
		"a renewal":      map[string]any{"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "yesterday"},
		"the transition": map[string]any{"holderIdentity": "a", "leaseDurationSeconds": 15, "leaseTransitions": map[string]any{}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			a, b := newCandidate(t, s, "a", aDay), newCandidate(t, s, "b", aDay.Add(time.Hour))
			a.after(0, true)
			s.Put("leases", "gpu", "placer", map[string]any{"spec": spec})
			if err := a.try(t.Context()); !errors.Is(err, errTaken) {
				t.Fatal(err)
			}
			a.after(0, false)
			seen := b.now
			b.after(0, false)
			b.after(leaseFor-time.Second, false)
			b.after(time.Second, true)
			if len(b.before) != 1 || !b.before[0].Equal(seen) || b.own {
				t.Errorf("told %v, own %v; want when it was seen, and another one's", b.before, b.own)
			}
			a.after(time.Second, false)
			if a.holder() != "b" {
				t.Errorf("the holder is %s", a.holder())
			}
			// One that still changes is in use.
			s.Put("leases", "gpu", "placer", map[string]any{"spec": "text"})
			a.after(0, false)
			a.after(leaseFor-time.Second, false)
			s.Put("leases", "gpu", "placer", map[string]any{"spec": "other text"})
			a.after(time.Second, false)
			a.after(leaseFor-time.Second, false)
			a.after(time.Second, true)
		})
	}
}

// A lease may name any duration. One of many years does not keep the placers from answering.
func TestLeaseForYears(t *testing.T) {
	s := newServer(t)
	a := newCandidate(t, s, "a", aDay)
	s.Put("leases", "gpu", "placer", map[string]any{"spec": map[string]any{"holderIdentity": "kubectl", "leaseDurationSeconds": math.MaxInt32}})
	a.after(0, false)
	a.after(longestLease-time.Second, false)
	a.after(time.Second, true)
}

// At its end a leader gives the lease up, and the next one takes it at once.
func TestLeaseIsGivenUp(t *testing.T) {
	s := newServer(t)
	a := newCandidate(t, s, "a", aDay)
	a.timing.retry = time.Millisecond
	led := make(chan struct{})
	a.onLead = func(time.Time, bool) { close(led) }
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	kubetest.Receive(t, led)
	cancel()
	if err := kubetest.Receive(t, done); err != context.Canceled {
		t.Errorf("ended with %v", err)
	}
	a.want(false)
	b := newCandidate(t, s, "b", aDay)
	b.after(0, true)
	if len(b.before) != 1 || !b.before[0].Equal(aDay) {
		t.Errorf("told %v, want when the lease was given up", b.before)
	}
}
