// SPDX-License-Identifier: Apache-2.0

package park

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

func random() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// A set leaves the card whole, and comes back whole.
func TestParkAndRestore(t *testing.T) {
	n, r := newWorld(t), random()
	a, b := n.begin(300*mib, r), n.begin(200*mib, r)
	if err := n.k.Park(t.Context(), n.set("x", a, b)); err != nil {
		t.Fatal(err)
	}
	if n.used() != 0 || n.phase("x") != Parked || n.k.Sets()[0].Parked.IsZero() {
		t.Errorf("%d bytes used, %+v", n.used(), n.k.Sets())
	}
	if err := n.k.Park(t.Context(), n.set("x", a, b)); err != nil {
		t.Errorf("parked twice: %v", err)
	}
	if err := n.k.Restore(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	n.runs(a)
	n.runs(b)
	if err := n.k.Restore(t.Context(), "x"); err != nil || len(n.k.Sets()) != 0 {
		t.Errorf("restored twice: %v, %+v", err, n.k.Sets())
	}
	if s := n.k.Stats(); s.Parks != 1 || s.Restores != 1 || s.Bytes != 500*mib || s.ParkedTime <= 0 {
		t.Errorf("%+v", s)
	}
	if files, _ := os.ReadDir(filepath.Join(n.dir, "park")); len(files) != 0 {
		t.Errorf("left on the disk: %v", files)
	}
}

// Without memory on the host nothing is touched, and each limit counts: the cgroup's, its parent's, the
// node's, and that of all parks together.
func TestParkWithoutHostMemory(t *testing.T) {
	for name, c := range map[string]struct {
		file, text string
		most       uint64
	}{
		"cgroup":      {file: "memory.max", text: "314572799"},
		"throttled":   {file: "memory.high", text: "314572799"},
		"pod":         {file: "../memory.max", text: "314572799"},
		"no limits":   {file: "memory.max", text: "nonsense"},
		"node":        {file: "meminfo", text: "MemAvailable: 307199 kB"},
		"unknown":     {file: "meminfo", text: "MemFree: 3071990 kB"},
		"all parks":   {most: 300*mib - 1},
		"not enabled": {most: 1},
	} {
		t.Run(name, func(t *testing.T) {
			n := newWorld(t)
			if c.most > 0 {
				n.most = c.most - 1*btoi(name == "not enabled")
				n.open()
			}
			switch c.file {
			case "":
			case "meminfo":
				n.write(filepath.Join(n.proc, c.file), c.text)
			default:
				n.write(filepath.Join(n.cgroup, c.file), c.text)
			}
			p := n.begin(300*mib, random())
			err := n.k.Park(t.Context(), n.set("x", p))
			if err == nil || (!errors.Is(err, ErrNoRoom) && name != "no limits" && name != "unknown") || errors.Is(err, ErrBroken) {
				t.Errorf("%v", err)
			}
			n.runs(p)
			if len(n.k.Sets()) != 0 {
				t.Errorf("%+v", n.k.Sets())
			}
		})
	}
	n := newWorld(t)
	n.write(filepath.Join(n.cgroup, "memory.max"), "314572800")
	n.write(filepath.Join(n.cgroup, "memory.current"), "104857600")
	p := n.begin(300*mib, random())
	if err := n.k.Park(t.Context(), n.set("x", p)); !errors.Is(err, ErrNoRoom) {
		t.Errorf("what the container has counts: %v", err)
	}
	n.write(filepath.Join(n.cgroup, "memory.stat"), "anon 5\ninactive_file 104857600\n")
	if err := n.k.Park(t.Context(), n.set("x", p)); err != nil {
		t.Errorf("page cache makes room: %v", err)
	}
	other := n.begin(300*mib, random())
	s := n.set("y", other)
	s.Cgroup = ""
	if err := n.k.Park(t.Context(), s); err == nil {
		t.Error("a container without a cgroup is parked")
	}
}

// A node that has version 1 of cgroups has limits of other names, and a number for none.
func TestRoomOfVersion1(t *testing.T) {
	const none = "9223372036854771712"
	n := newWorld(t)
	pod, root := filepath.Dir(n.cgroup), filepath.Dir(filepath.Dir(n.cgroup))
	for _, dir := range []string{n.cgroup, pod, root} {
		for file, text := range map[string]string{"limit_in_bytes": none, "usage_in_bytes": "800", "stat": "inactive_file 900\ntotal_inactive_file 100\n"} {
			n.write(filepath.Join(dir, "memory."+file), text)
		}
	}
	room := func(what string, want uint64) {
		t.Helper()
		if got, err := cgroupRoom(n.cgroup, root); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", what, got, err, want)
		}
	}
	room("without limits", math.MaxUint64)
	n.write(filepath.Join(pod, "memory.limit_in_bytes"), "5000\n")
	room("the pod's limit", 4300)
	n.write(filepath.Join(n.cgroup, "memory.limit_in_bytes"), "1000\n")
	room("its own limit", 300)
	n.write(filepath.Join(n.cgroup, "memory.usage_in_bytes"), "2000\n")
	room("a limit that was lowered", 0)
	n.write(filepath.Join(n.cgroup, "memory.limit_in_bytes"), "much\n")
	if got, err := cgroupRoom(n.cgroup, root); err == nil {
		t.Errorf("a limit that is no number: %d", got)
	}
}

func btoi(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// What the driver refuses leaves all as it was.
func TestParkRefused(t *testing.T) {
	n, r := newWorld(t), random()
	a, b := n.begin(100*mib, r), n.begin(100*mib, r)
	if err := n.w.SetBusy(b.pid, true); err != nil {
		t.Fatal(err)
	}
	err := n.k.Park(t.Context(), n.set("x", a, b))
	if err == nil || errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "did not end in time") {
		t.Errorf("a lock that times out: %v", err)
	}
	n.runs(a)
	n.runs(b)
	if len(n.k.Sets()) != 0 || n.k.Stats().Refused != 1 {
		t.Errorf("%+v %+v", n.k.Sets(), n.k.Stats())
	}
	over, stop := context.WithCancel(t.Context())
	stop()
	if err := n.k.Park(over, n.set("x", a)); !errors.Is(err, context.Canceled) {
		t.Errorf("after the caller has given up: %v", err)
	}
	n.runs(a)
	for _, s := range []Set{{Key: "../x"}, {Key: ""}, {Key: "x", Processes: []Process{{PID: 1, Start: 1}}}, {Key: "x", Processes: []Process{{PID: 7}}}} {
		if err := n.k.Park(t.Context(), s); err == nil {
			t.Errorf("%+v is parked", s)
		}
	}
}

// A checkpoint or a restore that fails: the set is broken, nothing is unlocked, and it is forgotten when its
// processes have ended.
func TestBroken(t *testing.T) {
	for _, call := range []string{"cuCheckpointProcessCheckpoint", "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"} {
		for _, c := range []emulator.Return{emulator.Unknown, emulator.NotSupported} {
			n, r := newWorld(t), random()
			a, b := n.begin(100*mib, r), n.begin(100*mib, r)
			if err := n.w.Inject(emulator.Fault{Call: call, Code: c, Skip: 1, Count: 1}); err != nil {
				t.Fatal(err)
			}
			err := n.k.Park(t.Context(), n.set("x", a, b))
			if call != "cuCheckpointProcessCheckpoint" {
				if err != nil {
					t.Fatal(err)
				}
				err = n.k.Restore(t.Context(), "x")
			}
			if !errors.Is(err, ErrBroken) || n.phase("x") != Broken || n.stateOf(b) == Running {
				t.Errorf("%s answers %v: %v, %s, state %d", call, c, err, n.phase("x"), n.stateOf(b))
			}
			n.open()
			if err := n.k.Settle(t.Context()); err != nil || n.phase("x") != Broken || n.stateOf(b) == Running {
				t.Errorf("after a restart: %v, %s", err, n.phase("x"))
			}
			if err := n.k.Restore(t.Context(), "x"); !errors.Is(err, ErrBroken) {
				t.Errorf("restore what is broken: %v", err)
			}
			n.end(a)
			n.end(b)
			if err := n.k.Settle(t.Context()); err != nil || len(n.k.Sets()) != 0 {
				t.Errorf("after its end: %v, %+v", err, n.k.Sets())
			}
		}
	}
}

// Without room on the card a set stays parked, also where a part of it had room.
func TestRestoreWithoutRoom(t *testing.T) {
	n, r := newWorld(t), random()
	a, b := n.begin(300*mib, r), n.begin(300*mib, r)
	if err := n.k.Park(t.Context(), n.set("x", a, b)); err != nil {
		t.Fatal(err)
	}
	other := n.begin(500*mib, r)
	if err := n.k.Restore(t.Context(), "x"); !errors.Is(err, ErrNoRoom) || errors.Is(err, ErrBroken) {
		t.Fatal(err)
	}
	if n.phase("x") != Parked || n.used() != 500*mib {
		t.Errorf("%s, %d bytes used", n.phase("x"), n.used())
	}
	n.end(other)
	if err := n.k.Restore(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	n.runs(a)
	n.runs(b)
}

// Another process with a PID of the set is not touched, and records of an earlier boot are nobody's.
func TestOtherProcesses(t *testing.T) {
	n, r := newWorld(t), random()
	a, b := n.begin(100*mib, r), n.begin(100*mib, r)
	s := n.set("x", a, b)
	s.Processes[1].Start++
	if err := n.k.Park(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	n.runs(b)
	if n.stateOf(a) != Checkpointed {
		t.Errorf("process %d is in state %d", a.pid, n.stateOf(a))
	}
	n.write(filepath.Join(n.proc, "sys/kernel/random/boot_id"), "the next boot\n")
	n.open()
	if err := n.k.Settle(t.Context()); err != nil || len(n.k.Sets()) != 0 {
		t.Errorf("after a boot: %v, %+v", err, n.k.Sets())
	}
}

// A record that cannot be read is no reason not to start.
func TestSpoiltRecords(t *testing.T) {
	n, r := newWorld(t), random()
	a := n.begin(100*mib, r)
	if err := n.k.Park(t.Context(), n.set("x", a)); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"y.json": "", "z.json": `{"version":1,"key":"x","phase":"parked"}`, "v.json": `{"version":2,"key":"v","phase":"parked"}`,
		"p.json": `{"version":1,"key":"p","phase":"unheard of"}`, "q.json": `{"version":1,"key":"q","phase":"parked","processes":[{"pid":1,"start":5}]}`,
		".new-x": "half",
	} {
		n.write(filepath.Join(n.dir, "park", name), text)
	}
	n.open()
	if err := n.k.Settle(t.Context()); err != nil || len(n.k.Sets()) != 1 || n.phase("x") != Parked {
		t.Fatalf("%v, %+v", err, n.k.Sets())
	}
	if err := n.k.Restore(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	n.runs(a)
}

// A long copy of one container does not keep others from being settled.
func TestSettleDoesNotWait(t *testing.T) {
	n, r := newWorld(t), random()
	a, b := n.begin(100*mib, r), n.begin(100*mib, r)
	for key, p := range map[string]*program{"a": a, "b": b} {
		if err := n.k.Park(t.Context(), n.set(key, p)); err != nil {
			t.Fatal(err)
		}
	}
	s := n.k.enterNow("a") // as a step does
	n.end(b)
	if err := n.k.Settle(t.Context()); err != nil || n.phase("b") != "" || n.phase("a") != Parked {
		t.Errorf("%v, %+v", err, n.k.Sets())
	}
	s.leave()
}
