// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// lowerable is a Node whose writes take a while.
type lowerable struct {
	mu      sync.Mutex // guards what follows
	amounts map[string]int64
	takes   time.Duration
	err     error
	writes  []string
}

func (n *lowerable) LowerAllocatable(_ context.Context, want map[string]int64) (lowered []string, err error) {
	n.mu.Lock()
	takes := n.takes
	n.mu.Unlock()
	time.Sleep(takes)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.err != nil {
		return nil, n.err
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if n.amounts[name] > want[name] {
			n.amounts[name] = want[name]
			lowered = append(lowered, fmt.Sprint(name, "=", want[name]))
		}
	}
	if lowered != nil {
		n.writes = append(n.writes, strings.Join(lowered, " "))
	}
	for i := range lowered {
		lowered[i], _, _ = strings.Cut(lowered[i], "=")
	}
	return lowered, nil
}

// set changes the Node, and the Lowering hears of it.
func (n *lowerable) set(l *Lowering, change func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change()
	l.See(n.amounts)
}

// settle lets time pass. What is done after it comes after all that happened by then.
func settle(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// lower runs a Lowering of a Node that has 79 of mem and 7 of mig.
func lower(t *testing.T, do func(n *lowerable, l *Lowering, causes func() string)) {
	synctest.Test(t, func(t *testing.T) {
		n := &lowerable{amounts: map[string]int64{"mem": 79, "mig": 7}, takes: 5 * time.Millisecond}
		var causes []string
		l := NewLowering(n, func(cause string) {
			n.mu.Lock()
			defer n.mu.Unlock()
			causes = append(causes, cause)
		}, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); l.Run(ctx) }()
		l.Sent("mem", 79)
		l.Sent("mig", 7)
		l.See(n.amounts)
		settle(time.Second)
		do(n, l, func() string {
			settle(time.Second)
			out := fmt.Sprint(n.writes, causes)
			n.writes, causes = nil, nil
			return out
		})
		cancel()
		<-ended
	})
}

// Lists that come together are one write; a count that rises, or stays, is none.
func TestLoweringFollowsTheLists(t *testing.T) {
	lower(t, func(n *lowerable, l *Lowering, told func() string) {
		is := func(when, want string) {
			t.Helper()
			if got := told(); got != want {
				t.Errorf("%s: %s, want %s", when, got, want)
			}
		}
		is("at the start", "[] []")
		l.Sent("mem", 60)
		l.Sent("mig", 3)
		time.Sleep(10 * time.Millisecond)
		l.Sent("mem", 59)
		is("three lists", "[mem=59 mig=3] [list list]")
		l.See(n.amounts)
		l.Sent("mem", 59)
		l.Sent("mig", 5)
		is("the same and more", "[] []")
		n.set(l, func() { n.amounts["mig"] = 5 })
		is("the kubelet raises it to what the list says", "[] []")
		l.Sent("mig", 0)
		settle(22 * time.Millisecond) // the write is under way
		l.Sent("mig", 1)
		is("a list that rises while a write goes on", "[mig=0] [list]")
		l.See(map[string]int64{"mem": 59, "cpu": 4})
		l.Sent("mig", 0)
		is("the Node has none any more", "[] []")
	})
}

// A kubelet that writes an old count back is contradicted three times in a minute for each
// resource, and then has the last word.
func TestKubeletThatRaises(t *testing.T) {
	lower(t, func(n *lowerable, l *Lowering, told func() string) {
		l.Sent("mem", 40)
		if got := told(); got != "[mem=40] [list]" {
			t.Fatalf("a list: %s", got)
		}
		raise := func(to int64) string {
			n.set(l, func() { n.amounts["mem"] = to })
			return told()
		}
		for i := range 3 {
			if got := raise(79); got != "[mem=40] [kubelet]" {
				t.Errorf("raised for the %d. time: %s", i+1, got)
			}
		}
		if got := raise(79); got != "[] []" {
			t.Errorf("the fourth time in a minute: %s", got)
		}
		// Another resource, and a new list, are not held up by that.
		n.set(l, func() { n.amounts["mig"] = 7 })
		l.Sent("mig", 2)
		l.Sent("mem", 30)
		if got := told(); got != "[mem=30 mig=2] [list list]" {
			t.Errorf("new lists: %s", got)
		}
		time.Sleep(time.Minute)
		if got := raise(79); got != "[mem=30] [kubelet]" {
			t.Errorf("a minute later: %s", got)
		}
		// An old word of the watch, of a Node that is low enough, does not count.
		for range 9 {
			l.See(map[string]int64{"mem": 79})
			if got := told(); got != "[] []" {
				t.Fatalf("an old word: %s", got)
			}
		}
		if got := raise(79); got != "[mem=30] [kubelet]" {
			t.Errorf("after old words: %s", got)
		}
	})
}

// Nobody waits for the API server: Sent and See return at once, and what it did not take
// is written when it answers again, as it is then.
func TestLoweringWithoutTheServer(t *testing.T) {
	lower(t, func(n *lowerable, l *Lowering, told func() string) {
		n.set(l, func() { n.err, n.takes = errors.New("away"), time.Hour })
		began := time.Now()
		l.Sent("mem", 50)
		settle(100 * time.Millisecond)
		l.Sent("mem", 20)
		l.Sent("mig", 1)
		l.See(n.amounts)
		if took := time.Since(began); took != 100*time.Millisecond {
			t.Errorf("they took %v", took)
		}
		settle(30 * time.Minute)
		n.set(l, func() { n.takes = time.Millisecond })
		settle(time.Hour)
		l.Sent("mig", 7)
		n.set(l, func() { n.err = nil })
		time.Sleep(2 * backOffMax)
		if got := told(); got != "[mem=20] [list]" {
			t.Errorf("it answers again: %s, want the newest list of mem and nothing of mig, of which all is there", got)
		}
	})
}

// However many lists there are, writes stay within their ration.
func TestLoweringIsRationed(t *testing.T) {
	lower(t, func(n *lowerable, l *Lowering, told func() string) {
		told()
		for range 600 {
			for i := range 2 {
				n.set(l, func() { n.amounts["mem"] = 79 })
				l.Sent("mem", 40-i)
				settle(50 * time.Millisecond)
			}
		}
		if writes := len(n.writes); writes > lowerBurst+61 {
			t.Errorf("%d writes in a minute", writes)
		}
	})
}

// An agent that ends says that there is nothing to be had, and serves the kubelet for as long
// as it takes pods that were bound before to be admitted. Then the kubelet counts no device
// any more, and the agent ends when no report of before can be on the way.
func TestLoweringAtTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		takes  time.Duration   // of a write
		raises []time.Duration // when the kubelet writes an old count back, from the end's begin
		offers string
		told   string
		from   time.Duration // how long it lasts at least
	}{
		"nothing happens": {offers: "shut", told: "[mem=0 mig=0] [end end]", from: leaveLinger + leaveSettle},
		"raised while the kubelet is served": {raises: []time.Duration{leaveLinger / 2}, offers: "shut",
			told: "[mem=0 mig=0 mem=0] [end end kubelet]", from: leaveLinger/2 + leaveLinger + leaveSettle},
		"raised at the last moment": {raises: []time.Duration{leaveLinger - time.Millisecond}, offers: "shut",
			told: "[mem=0 mig=0 mem=0] [end end kubelet]", from: 2*leaveLinger + leaveSettle - time.Millisecond},
		// The pod that was bound then finds devices, and as much time as the others had.
		"raised after the streams have ended": {raises: []time.Duration{leaveLinger + leaveSettle/2}, offers: "shut open shut",
			told: "[mem=0 mig=0 mem=0] [end end kubelet]", from: 2*leaveLinger + leaveSettle/2 + leaveSettle},
		"a slow server": {takes: 100 * time.Millisecond, raises: []time.Duration{1900 * time.Millisecond}, offers: "shut open shut",
			told: "[mem=0 mig=0 mem=0] [end end kubelet]", from: 3900 * time.Millisecond},
	} {
		lower(t, func(n *lowerable, l *Lowering, told func() string) {
			n.set(l, func() { n.takes = max(n.takes, c.takes) })
			began := time.Now()
			for _, at := range c.raises {
				time.AfterFunc(at, func() { n.set(l, func() { n.amounts["mem"] = 79 }) })
			}
			var offers []string
			l.Leave(context.Background(), func(on bool) {
				offers = append(offers, map[bool]string{true: "shut", false: "open"}[on])
				l.Sent("mem", map[bool]int{true: 0, false: 79}[on])
			})
			if took := time.Since(began); took < c.from || took > leaveLast {
				t.Errorf("%s: it took %s, want %s or more, and at most %s", name, took, c.from, leaveLast)
			}
			if got := strings.Join(offers, " "); got != c.offers {
				t.Errorf("%s: the kubelet's streams were %s, want %s", name, got, c.offers)
			}
			if got := told(); got != c.told {
				t.Errorf("%s: %s, want %s", name, got, c.told)
			}
		})
	}
	// Afterwards the kubelet writes what it had begun to, and lists still come.
	lower(t, func(n *lowerable, l *Lowering, told func() string) {
		l.Leave(context.Background(), func(bool) {})
		n.set(l, func() { n.amounts["mem"] = 79 })
		l.Sent("mem", 78)
		l.Sent("new", 3)
		if got, want := told(), "[mem=0 mig=0 mem=0] [end end kubelet]"; got != want {
			t.Errorf("%s, want %s", got, want)
		}
	})
	// A kubelet that reports every second, as some are told to, behind a slow server: it counts
	// no device by the end, so its next report brings none back.
	lower(t, func(n *lowerable, l *Lowering, told func() string) {
		const slow = 150 * time.Millisecond // of our write, and of a report
		n.set(l, func() { n.takes = slow })
		ctx, cancel := context.WithCancel(context.Background())
		var counts atomic.Bool
		counts.Store(true)
		go func() {
			for elapse(ctx, time.Second-slow) {
				has := counts.Load()
				if elapse(ctx, slow) && has {
					n.set(l, func() { n.amounts["mem"] = 79 })
				}
			}
		}()
		began := time.Now()
		l.Leave(context.Background(), func(on bool) { counts.Store(!on) })
		if took := time.Since(began); counts.Load() || took >= leaveLast {
			t.Errorf("it ended after %s, and the kubelet counts devices: %t", took, counts.Load())
		}
		settle(2 * time.Second)
		cancel()
		if synctest.Wait(); n.amounts["mem"] != 0 {
			t.Errorf("the scheduler takes the node to have %d", n.amounts["mem"])
		}
	})
	// A kubelet that writes it again and again does not hold the end up.
	lower(t, func(n *lowerable, l *Lowering, told func() string) {
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			for elapse(ctx, 100*time.Millisecond) {
				n.set(l, func() { n.amounts["mem"] = 79 })
			}
		}()
		began := time.Now()
		l.Leave(context.Background(), func(bool) {})
		if took := time.Since(began); took != leaveLast {
			t.Errorf("it took %s, want %s", took, leaveLast)
		}
		cancel()
		synctest.Wait()
	})
	for name, c := range map[string]struct {
		amounts map[string]int64
		err     error
	}{"the scheduler knows already": {amounts: map[string]int64{}}, "without the server": {amounts: map[string]int64{"mem": 79}, err: errors.New("no route")}} {
		lower(t, func(n *lowerable, l *Lowering, told func() string) {
			n.set(l, func() { n.amounts, n.err = c.amounts, c.err })
			began := time.Now()
			l.Leave(context.Background(), func(bool) { t.Errorf("%s: it withholds devices", name) })
			if took := time.Since(began); took >= leaveLinger {
				t.Errorf("%s: it waited for %s, for nobody", name, took)
			}
			if got := told(); got != "[] []" {
				t.Errorf("%s: %s", name, got)
			}
		})
	}
}
