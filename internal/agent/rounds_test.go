// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// mostRounds is how many rounds a minute may have while nothing happens: one a
// second where somebody waits or a witness is silent, and some to spare.
const mostRounds = 70

// phase is one thing that may be so on a node. before is done while no agent runs,
// after once the agent under test has started.
type phase struct {
	name          string
	before, after func(*bench)
}

var releaseLabels = map[string]string{"example.com/gpu.driver-release": "true"}

func noDriver(b *bench) { b.with(func() { b.err = fmt.Errorf("open: %w", gpu.ErrNoDriver) }) }
func hanging(b *bench)  { b.with(func() { b.hang = make(chan struct{}) }) }
func letGo(b *bench)    { b.node(releaseLabels, true) }
func stuck(b *bench)    { b.with(func() { b.letGoErr = fmt.Errorf("close: %w", gpu.ErrTimeout) }) }

var driverPhases = []phase{
	{name: "answers"},
	{name: "was never opened", before: noDriver},
	{name: "fails", after: noDriver},
	{name: "hangs", after: hanging},
	{name: "hung from the start", before: hanging},
	{name: "let go", after: letGo},
	{name: "let go before the first reading", before: noDriver, after: letGo},
	{name: "cannot be let go", before: stuck, after: letGo},
	{name: "cannot be let go before the first reading", before: func(b *bench) { noDriver(b); stuck(b) }, after: letGo},
}

var allocationPhases = []phase{
	{name: "none", before: func(b *bench) { b.with(func() { b.holdings = nil }) }},
	{name: "held"},
	{name: "held, of a boot before", before: func(b *bench) { b.with(func() { b.outside.boot = "next" }) }},
	{name: "its pod was deleted by force", after: func(b *bench) {
		// The kubelet has let go, and the container is still there.
		containers := runtime{b.outside}.containers()
		b.with(func() { b.old, b.holdings = containers[1:], nil })
		b.loop.witnesses.Ask()
		synctest.Wait()
		select { // nothing is served where no GPU is known
		case want := <-b.sources:
			b.sources <- want
			_, _ = want[memResource].Allocate([]string{string(uuid(0)) + "::1"}) // refused where its GPU is ill
		default:
		}
	}},
}

var witnessPhases = []phase{
	{name: "answer"},
	{name: "the runtime is silent", before: func(b *bench) { b.with(func() { b.runtimeErr = errors.New("away") }) }},
	{name: "the kubelet has restarted", before: func(b *bench) { b.with(func() { b.deaf, b.checkpointErr = true, errors.New("torn") }) }},
	{name: "went silent", after: func(b *bench) {
		b.with(func() { b.deaf, b.checkpointErr, b.runtimeErr = true, errors.New("torn"), errors.New("away") })
	}},
}

var filePhases = []phase{
	{name: "none"},
	{name: "as before", after: func(b *bench) { b.SetFile("p.yaml", []byte(allShared)) }},
	{name: "another", after: func(b *bench) { b.SetFile("p.yaml", []byte(allWhole)) }},
	{name: "invalid", after: func(b *bench) { b.SetFile("p.yaml", []byte("version: v1\n")) }},
}

// TestNoStateKeepsTheLoopBusy walks through what a driver, allocations, witnesses and
// partitions can be like, and counts rounds. Where the driver was let go before the
// first reading and an allocation was in the journal there were 100 a second: the loop
// slept until the allocations' holders were due to be looked at, which no round did.
func TestNoStateKeepsTheLoopBusy(t *testing.T) {
	walk := func(t *testing.T, phases []phase) {
		synctest.Test(t, func(t *testing.T) {
			o, dir := newOutside(2), t.TempDir()
			b := start(t, o, dir, allShared)
			b.hold("train-3", memResource, string(uuid(0))+"::1")
			time.Sleep(holdersEvery)
			b.end()
			for _, p := range phases {
				if p.before != nil {
					p.before(b)
				}
			}
			b = start(t, o, dir, "")
			defer b.end()
			for _, p := range phases {
				if p.after != nil {
					p.after(b)
				}
				synctest.Wait()
			}
			time.Sleep(2 * time.Minute)
			rounds := func() (n int) {
				b.with(func() { n = b.rounds })
				return n
			}
			before := rounds()
			time.Sleep(time.Minute)
			if n := rounds() - before; n > mostRounds {
				t.Errorf("%d rounds in a minute in which nothing happened", n)
			}
		})
	}
	n := 0
	for i, d := range driverPhases {
		for j, c := range allocationPhases {
			n++ // or each of the witnesses' phases would meet one file alone
			for k, w := range witnessPhases {
				f := filePhases[n%len(filePhases)]
				n++
				if testing.Short() && (i+j+k/2)%2 > 0 {
					continue // make test-all walks through all
				}
				phases := []phase{d, c, w, f}
				t.Run(strings.Join([]string{d.name, c.name, w.name, f.name}, "/"), func(t *testing.T) { walk(t, phases) })
			}
		}
	}
}
