// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"sync"
	"time"
)

const (
	// tick is the length of the sleeps by which a late machine is noticed.
	tick = 10 * time.Millisecond
	// mostStretch is the most by which a limit is stretched.
	mostStretch = 5.0
)

// A pace says how late this process is when it sleeps: on a machine that other work keeps
// busy, or that its own host stops now and then, a sleep of 10 ms takes longer.
type pace struct {
	mu sync.Mutex
	// asked is how long all ended sleeps should have taken, slept how long they took. Both
	// are guarded by mu.
	asked, slept time.Duration
	// began is when the sleep under way began. Guarded by mu.
	began time.Time
}

// ownPace is this process's. Its sleeps begin with its first use and never end.
var ownPace = sync.OnceValue(func() *pace {
	p := &pace{began: time.Now()}
	go func() {
		for {
			time.Sleep(tick)
			p.add(time.Now())
		}
	}()
	return p
})

// add notes that the sleep under way has ended, and that the next one begins.
func (p *pace) add(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked += tick
	p.slept += now.Sub(p.began)
	p.began = now
}

// since returns a function that says by how many times sleeps have taken longer than they
// should since the call of since: 1 to mostStretch.
func (p *pace) since() func() float64 {
	asked, slept := p.read(time.Now())
	return func() float64 { return factor(p, asked, slept, time.Now()) }
}

// factor is by how many times sleeps have taken longer since the sums were asked and slept.
func factor(p *pace, asked, slept time.Duration, now time.Time) float64 {
	nowAsked, nowSlept := p.read(now)
	if nowAsked <= asked {
		return 1
	}
	return min(max(float64(nowSlept-slept)/float64(nowAsked-asked), 1), mostStretch)
}

// read returns the sums. A sleep that should have ended counts already.
func (p *pace) read(now time.Time) (asked, slept time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	under := now.Sub(p.began)
	if under < tick {
		return p.asked, p.slept
	}
	return p.asked + tick, p.slept + under
}
