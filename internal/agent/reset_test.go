// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// The page says that a GPU needs a reset, and pods are on it: neither an hour of silence nor
// another agent offers it again. What shows a reset does, also where the agent was away while
// it was done, as it has to be.
func TestFaultWaitsForAReset(t *testing.T) {
	const away = "0.0x 0.1x 0.2x 0.3x 1.0 1.1 1.2 1.3"
	asks := func(r gpu.Recovery) func(*bench) {
		return func(b *bench) { b.with(func() { b.figures[uuid(0)] = gpu.Health{Recovery: r} }) }
	}
	word := func(said string) func(*bench) {
		return func(b *bench) {
			b.SetNode(agentkube.Node{Annotations: map[string]string{"example.com/" + WasResetAnnotation: said}})
		}
	}
	nothing := func(*bench) {}
	for name, c := range map[string]struct {
		before, after func(*bench)
		boot          string
		heals         bool
	}{
		"silence":                        {before: nothing, after: nothing},
		"the driver asks no more":        {before: asks(gpu.RecoveryReset), after: asks(gpu.RecoveryNone), heals: true},
		"the driver never asked":         {before: asks(gpu.RecoveryNone), after: asks(gpu.RecoveryNone)},
		"the driver was loaded anew":     {before: nothing, after: func(b *bench) { b.with(func() { b.outside.inv.Load = "2" }) }, heals: true},
		"the node has booted":            {before: nothing, after: nothing, boot: "next", heals: true},
		"no boot has a name":             {before: nothing, after: nothing, boot: "-"},
		"an operator says so":            {before: nothing, after: word("0@2000-01-01T00:10:00Z"), heals: true},
		"an operator says so of all":     {before: nothing, after: word("all@2000-01-01T00:10:00Z"), heals: true},
		"an operator said so before":     {before: nothing, after: word("0@2000-01-01T00:00:00Z")},
		"an operator says so of another": {before: nothing, after: word("1@2000-01-01T00:10:00Z")},
		"an operator says so of later":   {before: nothing, after: word("0@2001-01-01T00:00:00Z")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, dir := newOutside(2), t.TempDir()
				o.inv.Load = "1"
				b := start(t, o, dir, allShared)
				b.hold("train", memResource, string(uuid(0))+"::1")
				time.Sleep(time.Minute)
				c.before(b)
				b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 119, GI: -1, CI: -1}
				b.want("applied", away, "")
				if s := b.Status().GPUs[0]; s.Needs != "reset" || !strings.Contains(s.Reason, "it stays unhealthy until a reset is seen") {
					t.Errorf("it needs %q: %s", s.Needs, s.Reason)
				}
				time.Sleep(20 * time.Minute)
				b.want("applied", away, "")
				b.end()

				if c.boot != "" {
					o.boot = strings.Trim(c.boot, "-")
				}
				b = start(t, o, dir, allShared)
				defer b.end()
				c.after(b)
				time.Sleep(10 * time.Minute)
				want := away
				if c.heals {
					want = fourUnits
				}
				b.want("applied", want, "")
			})
		})
	}
}

// A reset that the agent does itself, for MIG mode on Ampere, ends faults that wait for one.
func TestOwnResetEndsAFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1)
		o.ampere = true
		b := start(t, o, t.TempDir(), migPartition("{mode: whole}"))
		defer b.end()
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 119, GI: -1, CI: -1}
		time.Sleep(time.Hour)
		b.wantHealth(wholeResource, string(uuid(0)), "unhealthy")
		b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
		time.Sleep(time.Hour)
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
		b.wantHealth(large, migID(0, "3g.40gb@0"), "healthy")
	})
}

func TestWhichGPUsWereReset(t *testing.T) {
	inv, now := machine(2), time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for said, want := range map[string]string{
		"":                              " | ",
		"0@2026-03-01T11:00:00Z":        "0@11:00 | ",
		"all@2026-03-01T13:00:00+02:00": "0@11:00 1@11:00 | ",
		" 0@2026-03-01T11:00:00Z , ":    "0@11:00 | ",
		string(uuid(1)) + "@2026-03-01T11:00:00Z,1@2026-03-01T10:00:00Z,1@2026-03-01T11:30:00Z": "1@11:30 | ",
		"0@2026-03-01T12:00:01Z":          " | 0@2026-03-01T12:00:01Z",
		"2@2026-03-01T11:00:00Z":          " | 2@2026-03-01T11:00:00Z",
		"0,0@,@2026-03-01T11:00:00Z,0@11": " | 0 0@ @2026-03-01T11:00:00Z 0@11",
	} {
		r, got := resetsOf(said, inv, now), ""
		for i := range inv.GPUs {
			if at, ok := r.at[uuid(i)]; ok {
				got += fmt.Sprintf("%d@%s ", i, at.UTC().Format("15:04"))
			}
		}
		if got = strings.TrimSpace(got) + " | " + strings.Join(r.odd, " "); got != want {
			t.Errorf("%q says %q, want %q", said, got, want)
		}
		told := r.conditions("example.com")
		if (len(told) > 0) != (len(r.odd) > 0) || len(told) > 0 && (told[0].Reason != status.WasResetUnknown || told[0].Type != status.Noted) {
			t.Errorf("%q: the node says %+v", said, told)
		}
	}
	// What is too long is not read, and that is said.
	long := resetsOf(strings.Repeat("0@2026-03-01T11:00:00Z,", 100_000), inv, now)
	if told := long.conditions("example.com"); len(long.odd) > 0 || len(told) != 1 || len(told[0].Message) > 4096 {
		t.Errorf("of many words the node says %+v", told)
	}
}
