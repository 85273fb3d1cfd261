// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/mps/mpstest"
)

// beat returns what a container reads.
func (w *world) beat() time.Duration {
	w.t.Helper()
	at, err := ReadBeat(w.files(gpuA).beat())
	if err != nil {
		w.t.Fatal(err)
	}
	return at
}

// TestHeartbeat: containers have a file that says when the daemon has last answered. It stays the
// same file, becomes old while the daemon is silent, and says at once when the daemon has ended.
func TestHeartbeat(t *testing.T) {
	t.Parallel()
	w := newWorld(t, emulated(t, "555.58.02"))
	w.run(w.hasty())
	d := daemonOf(w.sync(Want{GPU: gpuA, Percent: 26}), gpuA)
	path := w.files(gpuA).beat()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o644 || info.Size() != beatSize {
		t.Errorf("the file is %v with %d bytes", info.Mode(), info.Size())
	}
	if at := w.beat(); at < d.Answered || at > sinceBoot() {
		t.Errorf("the daemon has answered at %v, and the file says %v", d.Answered, at)
	}
	behave := func(b mpstest.Behaviour) { mpstest.Set(t, w.driver.Programs[0], b) }
	client := NewClient(w.state)

	behave(mpstest.Behaviour{Mute: true})
	w.is(client, gpuA, Silent)
	if at := w.beat(); at == 0 || sinceBoot()-at < deadline {
		t.Errorf("the daemon is silent, and the file says %v before now", sinceBoot()-at)
	}
	behave(mpstest.Behaviour{})
	d = w.is(client, gpuA, "")

	behave(mpstest.Behaviour{DieAtStart: true})
	if err := unix.Kill(d.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	w.is(client, gpuA, NotStarted)
	if at := w.beat(); at != 0 {
		t.Errorf("the daemon has ended, and the file says %v", at)
	}
	behave(mpstest.Behaviour{})
	w.is(client, gpuA, "")
	if at := w.beat(); sinceBoot()-at > 10*time.Second {
		t.Errorf("another daemon answers, and the file says %v", at)
	}
	if now, err := os.Lstat(path); err != nil || !os.SameFile(info, now) {
		t.Errorf("it is another file: %v", err)
	}
}

// TestRestartKeepsTheDoorOpen: a new supervisor that finds the daemon as it shall be keeps no
// client out, not for a moment.
func TestRestartKeepsTheDoorOpen(t *testing.T) {
	t.Parallel()
	w, _, stop := fresh(t)
	w.sync(Want{GPU: gpuA, Percent: 26})
	stop()
	changed := func() time.Time {
		info, err := os.Lstat(PipeDir(w.state, gpuA))
		if err != nil {
			t.Fatal(err)
		}
		return info.ModTime()
	}
	before, beat := changed(), w.beat()
	w.run(w.options())
	w.is(NewClient(w.state), gpuA, "")
	if after := changed(); !after.Equal(before) {
		t.Error("the links for containers were taken away")
	}
	if w.beat() < beat {
		t.Error("the heartbeat was stopped")
	}
}

// TestStop: the end of the pod ends the daemons, and leaves what containers have mounted. Another
// pod goes on by itself.
func TestStop(t *testing.T) {
	t.Parallel()
	w, _, stop := fresh(t)
	w.sync(Want{GPU: gpuA, Percent: 26})
	before, err := os.Lstat(w.files(gpuA).beat())
	if err != nil {
		t.Fatal(err)
	}
	stop()
	if err := Stop(t.Context(), w.options()); err != nil {
		t.Fatal(err)
	}
	if left := w.processes(gpuA); len(left) != 0 {
		t.Errorf("processes are left: %+v", left)
	}
	if at := w.beat(); at != 0 {
		t.Errorf("the daemon has ended, and the file says %v", at)
	}
	if names := list(t, PipeDir(w.state, gpuA)); len(names) != 1 {
		t.Errorf("containers have %v", names)
	}
	w.run(w.options())
	if d := w.is(NewClient(w.state), gpuA, ""); d.Percent != 26 {
		t.Errorf("%+v", d)
	}
	if after, err := os.Lstat(w.files(gpuA).beat()); err != nil || !os.SameFile(before, after) || w.beat() == 0 {
		t.Errorf("the file of before does not say that the daemon answers: %v", err)
	}
}

// TestReadBeat: what is no beat file is an error, and never a daemon that answers. The keeper takes
// a file that is spoilt and makes it whole.
func TestReadBeat(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), BeatFile)
	if _, err := ReadBeat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	for _, content := range []string{"", "GPUMPS01", "GPUMPS02\x01\x01\x01\x01\x01\x01\x01\x01"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if at, err := ReadBeat(path); err == nil {
			t.Errorf("%q: %v", content, at)
		}
		var h heartbeat
		if err := h.open(path); err != nil {
			t.Fatal(err)
		}
		if at, err := ReadBeat(path); err != nil || at != 0 {
			t.Errorf("%q, made whole: %v, %v", content, at, err)
		}
		h.stamp(7)
		if at, err := ReadBeat(path); err != nil || at != 7 {
			t.Errorf("%q, stamped: %v, %v", content, at, err)
		}
		h.close()
	}
	if err := errors.Join(os.Remove(path), os.Symlink("/dev/null", path)); err != nil {
		t.Fatal(err)
	}
	if err := new(heartbeat).open(path); err == nil {
		t.Error(fmt.Errorf("a link was followed"))
	}
}
