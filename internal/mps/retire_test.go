// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/mps/mpstest"
)

// TestRetire: a daemon that is to be replaced takes no new client, keeps those that it has, and is
// replaced by another when the last has ended. What containers have mounted stays.
func TestRetire(t *testing.T) {
	t.Parallel()
	w, _, stop := fresh(t)
	w.sync(Want{GPU: gpuA, Percent: 26})
	all := w.clients(2)
	beat, err := os.Lstat(w.files(gpuA).beat())
	if err != nil {
		t.Fatal(err)
	}
	first := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	want := Want{GPU: gpuA, Percent: 26, Retire: first.Identity()}
	d := daemonOf(w.sync(want), gpuA)
	if !errors.Is(d.Err(), Retiring) || d.PID != first.PID || d.Open || d.Clients() != 2 || w.beat() != 0 {
		t.Errorf("%+v, problem %v, heartbeat %v", d, d.Err(), w.beat())
	}
	if c, err := w.client(); err == nil {
		t.Errorf("program %d has become a client", c.pid)
	}
	all[0].end()
	stop() // a successor goes on
	w.run(w.options())
	c := NewClient(w.state)
	if d = w.is(c, gpuA, Retiring); d.PID != first.PID {
		t.Errorf("with a client left it is %+v", d)
	}
	all[1].end()
	d = w.is(c, gpuA, "")
	if d.PID == first.PID || !d.Open || d.Percent != 26 || w.beat() == 0 {
		t.Errorf("replaced by %+v, heartbeat %v", d, w.beat())
	}
	if now, err := os.Lstat(w.files(gpuA).beat()); err != nil || !os.SameFile(beat, now) {
		t.Errorf("containers have another file: %v", err)
	}
	if again := daemonOf(w.sync(want), gpuA); again.PID != d.PID || again.Err() != nil {
		t.Errorf("the former daemon is to be replaced: %+v, problem %v", again, again.Err())
	}
	w.clients(1)
}

// TestRetireSilent: a daemon that does not answer is replaced if it has no server; otherwise it is
// not known whether it has clients.
func TestRetireSilent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, emulated(t, "555.58.02"))
	w.run(w.hasty())
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	c := NewClient(w.state)
	mute := func(on bool) { mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Mute: on}) }
	mute(true)
	w.is(c, gpuA, Silent)
	w.sync(Want{GPU: gpuA, Percent: 26, Retire: d.Identity()})
	mute(false)
	next := w.is(c, gpuA, "")
	if next.PID == d.PID {
		t.Error("a silent daemon without a server was not replaced")
	}
	client := w.clients(1)[0]
	mute(true)
	w.is(c, gpuA, Silent)
	d = daemonOf(w.sync(Want{GPU: gpuA, Percent: 26, Retire: next.Identity()}), gpuA)
	if !errors.Is(d.Err(), Retiring) || d.PID != next.PID {
		t.Errorf("%+v, problem %v", d, d.Err())
	}
	client.end()
	w.sync(Want{GPU: gpuA, Percent: 26, Retire: next.Identity(), EndOrphans: true}) // the agent has seen that
	mute(false)
	if last := w.is(c, gpuA, ""); last.PID == next.PID {
		t.Error("a silent daemon whose server has no client was not replaced")
	}
}

// TestEndOrphans: servers of a dead daemon are ended when the agent has seen that they have no
// clients, and another daemon is started.
func TestEndOrphans(t *testing.T) {
	t.Parallel()
	w, _, _ := fresh(t)
	mpstest.Set(t, w.driver.Programs[0], mpstest.Behaviour{Outlive: true})
	w.sync(Want{GPU: gpuA, Percent: 26})
	w.clients(1)
	first := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	if err := (process{first.PID, first.Start}).signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c := NewClient(w.state)
	w.is(c, gpuA, Orphans)
	w.sync(Want{GPU: gpuA, Percent: 26, EndOrphans: true})
	d := w.is(c, gpuA, "")
	if got := pids(w.processes(gpuA), aServer); d.PID == first.PID || slices.Contains(got, first.Servers[0].PID) {
		t.Errorf("%+v, servers %v", d, got)
	}
}
