// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// supervised is a supervisor of MPS daemons. Its daemons are as wanted, unless a test changes that.
type supervised struct {
	mu sync.Mutex
	// Guarded by mu:
	away    bool // none listens
	wants   []mps.Want
	said    int // how often it was told
	daemons map[gpu.UUID]*mps.Daemon
	broken  map[gpu.UUID]*mps.Problem // no daemon can be started
	silent  bool                      // daemons do not answer
	// card returns whether a server can start now; always if nil.
	card   func() bool
	left   bool
	ends   int
	detach func(mps.Detach) ([]mps.Detached, error)
	probe  func() (mps.Probed, error)
	pid    int
	began  time.Time
}

func newSupervised() *supervised {
	return &supervised{daemons: map[gpu.UUID]*mps.Daemon{}, broken: map[gpu.UUID]*mps.Problem{}, began: time.Now(), pid: 100}
}

func (s *supervised) with(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *supervised) nowLocked() time.Duration { return time.Hour + time.Since(s.began) }

func (s *supervised) Now() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nowLocked()
}

func (s *supervised) State(context.Context) (mps.State, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stateLocked()
}

func (s *supervised) stateLocked() (mps.State, error) {
	if s.away {
		return mps.State{}, fmt.Errorf("nobody listens: %w", gpu.ErrNotFound)
	}
	st := mps.State{Known: s.said > 0}
	for _, w := range s.wants {
		d := s.daemons[w.GPU]
		if d != nil && d.PID != 0 && d.Identity() == w.Retire {
			d.Open, d.Problem = false, &mps.Problem{Code: mps.Retiring, Text: "its clients have not ended"}
			if d.Clients() == 0 {
				d = nil
			}
		}
		if p := s.broken[w.GPU]; d == nil || d.PID == 0 && p == nil {
			s.pid++
			d = &mps.Daemon{GPU: w.GPU, PID: s.pid, Start: 7, Open: true}
		}
		if p := s.broken[w.GPU]; p != nil {
			d = &mps.Daemon{GPU: w.GPU, Problem: p, Servers: d.Servers}
		}
		d.Percent = float64(w.Percent)
		if now := s.nowLocked(); w.Serve && !d.Serving && d.PID != 0 && now >= d.ServeAt {
			d.Serving, d.ServeAt, d.Problem = s.card == nil || s.card(), 0, nil
			if !d.Serving {
				d.ServeAt, d.Problem = now+serverPause, &mps.Problem{Code: mps.NoServer, Text: "it has ended"}
			}
		}
		if !s.silent {
			d.Answered = s.nowLocked()
		}
		s.daemons[w.GPU] = d
		copied := *d
		copied.Servers = slices.Clone(d.Servers)
		st.Daemons = append(st.Daemons, copied)
	}
	return st, nil
}

func (s *supervised) Sync(_ context.Context, wants []mps.Want) (mps.State, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return s.stateLocked()
	}
	s.wants, s.said, s.left = wants, s.said+1, len(wants) > 0
	for u := range s.daemons {
		if !slices.ContainsFunc(wants, func(w mps.Want) bool { return w.GPU == u }) {
			delete(s.daemons, u)
		}
	}
	return s.stateLocked()
}

func (s *supervised) Detach(_ context.Context, d mps.Detach) ([]mps.Detached, error) {
	return s.detach(d)
}

func (s *supervised) Probe(context.Context, gpu.UUID) (mps.Probed, error) { return s.probe() }

func (s *supervised) Left() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left
}

func (s *supervised) End(context.Context) error {
	s.with(func() { s.ends, s.left = s.ends+1, false })
	return nil
}

// wanted is what shall be, pid the daemon of GPU 0, told how often the supervisor was told, and ended how
// often it was ended by the agent.
func (s *supervised) wanted() (w []mps.Want) {
	s.with(func() { w = slices.Clone(s.wants) })
	return w
}

func (s *supervised) daemon() (pid int) {
	s.with(func() { pid = s.daemons[uuid(0)].PID })
	return pid
}

func (s *supervised) told() (n int) {
	s.with(func() { n = s.said })
	return n
}

func (s *supervised) ended() (n int) {
	s.with(func() { n = s.ends })
	return n
}

// clients gives a GPU's server clients.
func (s *supervised) clients(u gpu.UUID, pids ...int) {
	s.with(func() {
		s.daemons[u].Servers = []mps.Server{{PID: 9, Percent: s.daemons[u].Percent, Status: mps.Active, Clients: pids}}
	})
}

// serverPause is the supervisor's pause after a server that has not started.
const serverPause = 10 * time.Second

const (
	allMPS    = allShared + "      compute: mps\n"
	twoUnits  = "0.0 0.1 0.2 0.3"
	twoUnitsX = "0.0x 0.1x 0.2x 0.3x"
)

// mpsNode is a node with one GPU under MPS.
func mpsNode(t *testing.T) *outside {
	o := newOutside(1)
	o.left, o.mps = newLeftBehind(1), newSupervised()
	return o
}

func (b *bench) mode() (mode gpu.ComputeMode) {
	b.left.with(func() { mode = b.left.of[uuid(0)].Compute })
	return mode
}

func (b *bench) set() (n int) {
	b.left.with(func() { n = len(b.left.modes) })
	return n
}

func (b *bench) percent(key string) int {
	b.caps.mu.Lock()
	defer b.caps.mu.Unlock()
	return b.caps.percent[key]
}

func (b *bench) reasons() (out []status.Reason) {
	for _, c := range b.Status().Conditions {
		out = append(out, c.Reason)
	}
	return out
}

// The walk of a GPU under MPS: no container starts and no process may compute there before its daemon
// is right. It is closed when the daemon ends, and as any other when the partition changes.
func TestMPSWalk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := mpsNode(t)
		o.mps.away = true
		b := start(t, o, t.TempDir(), allMPS)
		defer b.end()
		pause(2 * mpsPatience)
		b.want("failed", twoUnitsX, "")
		if b.mode() != gpu.ComputeProhibited || !slices.Contains(b.reasons(), status.MPSNoSupervisor) {
			t.Errorf("without a supervisor: mode %s, %v", b.mode(), b.reasons())
		}

		o.mps.with(func() { o.mps.away = false })
		pause(time.Minute)
		b.want("applied", twoUnits, "")
		if b.mode() != gpu.ComputeExclusiveProcess {
			t.Errorf("the daemon serves, and the mode is %s", b.mode())
		}
		if want := []mps.Want{{GPU: uuid(0), Percent: 100, Serve: true}}; !slices.Equal(o.mps.wanted(), want) {
			t.Errorf("wanted is %+v, want %+v", o.mps.wanted(), want)
		}

		b.hold("train", memResource, string(uuid(0))+"::1")
		key := b.Allocations()[0].ID
		spec, err := b.loop.gates.files.Read(key)
		if err != nil {
			t.Fatal(err)
		}
		edits := fmt.Sprintf("%q", spec.ContainerEdits.Env)
		for _, d := range spec.Devices {
			edits += fmt.Sprintf("%q", d.ContainerEdits.Env)
			for _, m := range append(spec.ContainerEdits.Mounts, d.ContainerEdits.Mounts...) {
				edits += fmt.Sprintf(" %s:%s:%s", m.HostPath, m.ContainerPath, strings.Join(m.Options, ","))
			}
		}
		for _, want := range []string{"/state/mps/" + string(uuid(0)) + "/pipe:/usr/lib/gpu-agent/mps:ro", `"CUDA_MPS_PIPE_DIRECTORY=/usr/lib/gpu-agent/mps"`,
			`"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"`} {
			if !strings.Contains(edits, want) {
				t.Errorf("a container gets %s, which lacks %s", edits, want)
			}
		}
		if strings.Contains(edits, "/dev/shm") || b.percent(key) != 25 {
			t.Errorf("percent %d in the limit page, %s", b.percent(key), edits)
		}

		o.mps.with(func() { o.mps.broken[uuid(0)] = &mps.Problem{Code: mps.NotStarted, Text: "it has ended"} })
		pause(2 * mpsEvery)
		b.want("failed", "0.0x 0.1 0.2x 0.3x", "")
		if n := len(b.files()); n != 0 || b.mode() != gpu.ComputeProhibited || !slices.Contains(b.reasons(), status.MPSNotReady) {
			t.Errorf("the daemon has ended: %d files, mode %s, %v", n, b.mode(), b.reasons())
		}
		if s := b.Status().GPUs[0].MPS; s == nil || s.Namespaces != 1 || !strings.Contains(s.Trouble, "NotStarted: it has ended") {
			t.Errorf("the status has %+v", s)
		}
		o.mps.with(func() { clear(o.mps.broken) })
		pause(time.Minute)
		b.want("applied", twoUnits, "")
		if n := len(b.files()); n != 1 || b.mode() != gpu.ComputeExclusiveProcess {
			t.Errorf("another daemon serves: %d files, mode %s", n, b.mode())
		}

		b.SetFile("p.yaml", []byte(allShared))
		pause(time.Minute)
		if b.mode() != gpu.ComputeExclusiveProcess || b.state() != "blocked" {
			t.Errorf("while a pod has a share: mode %s, state %s", b.mode(), b.state())
		}
		b.with(func() { b.holdings = nil })
		pause(time.Minute)
		if b.mode() != gpu.ComputeDefault || len(o.mps.wanted()) != 0 || b.Status().GPUs[0].MPS != nil {
			t.Errorf("containers take turns again: mode %s, wanted %+v", b.mode(), o.mps.wanted())
		}
		said := o.mps.told()
		if pause(time.Hour); o.mps.told() != said || b.set() > 6 {
			t.Errorf("a GPU without MPS costs %d calls of its supervisor, and its mode was set %d times", o.mps.told()-said, b.set())
		}
	})
}

// The server is started when the compute mode is set, and no container starts before it stands: in
// EXCLUSIVE_PROCESS the first process has the card. While none can be started the mode is PROHIBITED,
// but for the tries.
func TestMPSServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := mpsNode(t)
		held := true // the card, by another process
		var modes []gpu.ComputeMode
		o.mps.card = func() bool {
			o.left.with(func() { modes = append(modes, o.left.of[uuid(0)].Compute) })
			return !held
		}
		b := start(t, o, t.TempDir(), allMPS)
		defer b.end()
		open := 0 // how long the GPU was in EXCLUSIVE_PROCESS
		for range 4 * int(serverPause/mpsEvery) {
			pause(mpsEvery)
			if b.mode() == gpu.ComputeExclusiveProcess {
				open++
			}
		}
		b.want("failed", twoUnitsX, "")
		if why, _ := b.loop.mps.gate(uuid(0)); !strings.Contains(why.Message, "NoServer: it has ended") {
			t.Errorf("a container may start, %+v", why)
		}
		var tries int
		o.mps.with(func() { tries = len(modes) })
		if open > 2*tries || tries < 3 || tries > 5 || b.mode() != gpu.ComputeProhibited {
			t.Errorf("open for %d of %d questions at %d tries, mode %s", open, 4*serverPause/mpsEvery, tries, b.mode())
		}
		o.mps.with(func() { held = false })
		pause(serverPause + 4*mpsEvery)
		b.want("applied", twoUnits, "")
		o.mps.with(func() {
			if i := slices.IndexFunc(modes, func(m gpu.ComputeMode) bool { return m != gpu.ComputeExclusiveProcess }); i >= 0 {
				t.Errorf("the modes were %v when a server was started", modes)
			}
		})
		if b.mode() != gpu.ComputeExclusiveProcess {
			t.Errorf("a server stands, and the mode is %s", b.mode())
		}
		// The server ends, and another cannot start.
		o.mps.with(func() { d := o.mps.daemons[uuid(0)]; held, d.Serving, d.Servers = true, false, nil })
		pause(4 * mpsEvery)
		b.want("failed", twoUnitsX, "")
		if b.mode() != gpu.ComputeProhibited {
			t.Errorf("the server has ended, and the mode is %s", b.mode())
		}
	})
}

// The devices of a GPU that is new to MPS are offered once its server stands. A pod that is bound before would be refused
// by the kubelet if they were withdrawn again.
func TestMPSIsNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := mpsNode(t)
		o.mps.away = true // its pod starts beside the agent's
		tries := 0
		o.mps.card = func() bool { tries++; return tries > 1 } // its first server does not start
		b := start(t, o, t.TempDir(), allMPS)
		defer b.end()
		offered := false
		for i := range 2 * int(serverPause/mpsEvery) {
			if i == 4 {
				o.mps.with(func() { o.mps.away = false })
			}
			pause(mpsEvery)
			switch now := listed(b.front.Offer(), memResource); {
			case now == twoUnits:
				offered = true
			case offered:
				t.Fatalf("the devices were offered, and are %s after that", now)
			}
		}
		b.want("applied", twoUnits, "")
	})
}

// A busy node is late: for a while nothing is withdrawn, but no container starts.
func TestMPSDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, away := range []bool{true, false} {
			o := mpsNode(t)
			b := start(t, o, t.TempDir(), allMPS)
			pause(time.Minute)
			b.want("applied", twoUnits, "")
			o.mps.with(func() { o.mps.away, o.mps.silent = away, !away })
			pause(mpsFresh + 2*mpsEvery)
			b.want("applied", twoUnits, "")
			if why, known := b.loop.mps.gate(uuid(0)); why.Reason == "" || !known {
				t.Errorf("away %v: a container may start, %v", away, known)
			}
			if b.mode() != gpu.ComputeExclusiveProcess {
				t.Errorf("away %v: mode %s", away, b.mode())
			}
			pause(mpsPatience)
			b.want("failed", twoUnitsX, "")
			if b.mode() != gpu.ComputeProhibited {
				t.Errorf("away %v, for long: mode %s", away, b.mode())
			}
			b.end()
		}
	})
}

// An agent that starts anew under a container changes nothing, not for a moment; also if the
// supervisor is slow to answer it.
func TestMPSRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := mpsNode(t), t.TempDir()
		b := start(t, o, dir, allMPS)
		pause(time.Minute)
		b.hold("train", memResource, string(uuid(0))+"::1")
		pause(time.Minute)
		before, _ := b.loop.gates.files.Written(b.Allocations()[0].ID)
		var modes []string
		o.left.with(func() { modes = slices.Clone(o.left.modes) })
		b.end()

		o.mps.with(func() { o.mps.away = true })
		b = start(t, o, dir, allMPS)
		defer b.end()
		pause(mpsPatience / 2)
		if n := len(b.files()); n != 1 {
			t.Fatalf("before the supervisor has answered there are %d files", n)
		}
		o.mps.with(func() { o.mps.away = false })
		pause(time.Minute)
		b.want("applied", twoUnits, "")
		after, err := b.loop.gates.files.Written(b.Allocations()[0].ID)
		if err != nil || !after.Equal(before) {
			t.Errorf("the file is of %v, and was of %v; %v", after, before, err)
		}
		var now []string
		o.left.with(func() { now = slices.Clone(o.left.modes) })
		for _, m := range now[len(modes):] {
			if m != string(gpu.ComputeExclusiveProcess) {
				t.Errorf("the mode was set to %s", m)
			}
		}
	})
}

// What an agent that was killed has left is put back by its successor, whether the partition has
// changed meanwhile or no supervisor is there any more.
func TestMPSSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := mpsNode(t), t.TempDir()
		b := start(t, o, dir, allMPS)
		pause(time.Minute)
		b.end()
		o.mps.with(func() { o.mps.away = true })
		o.left.with(func() { o.left.around.MPS = []gpu.Client{{PID: 1, Name: "nvidia-cuda-mps"}} }) // finder leaves the mode alone
		b = start(t, o, dir, allShared)
		defer b.end()
		pause(time.Minute)
		if b.mode() != gpu.ComputeDefault || b.state() != "applied" {
			t.Errorf("mode %s, state %s: %s", b.mode(), b.state(), b.message())
		}
		if o.mps.ended() != 1 || o.mps.Left() {
			t.Errorf("what is left of the daemons was ended %d times", o.mps.ended())
		}
		if pause(time.Hour); o.mps.ended() != 1 {
			t.Errorf("it was ended %d times", o.mps.ended())
		}
	})
}

// A fault of a program is the fault of all clients, and none of the GPU's: new pods are kept off until
// the last client has ended and the server is another one.
func TestMPSFault(t *testing.T) {
	for name, fail := range map[string]func(b *bench){
		"Xid 31": func(b *bench) { b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 31, GI: -1, CI: -1} },
		"Xid 13": func(b *bench) { b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 13, GI: -1, CI: -1} },
		"the status": func(b *bench) {
			b.outside.mps.with(func() { b.outside.mps.daemons[uuid(0)].Servers[0].Status = mps.Fault })
		},
		"the watchdog": func(b *bench) {
			b.outside.mps.with(func() { b.outside.mps.probe = func() (mps.Probed, error) { return mps.Hangs, nil } })
			Shares{b.Agent}.Suspect(uuid(0), "its server serves nobody")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := mpsNode(t)
				b := start(t, o, t.TempDir(), allMPS)
				defer b.end()
				pause(time.Minute)
				o.mps.clients(uuid(0), 41, 42)
				first := o.mps.daemon()
				b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 45, GI: -1, CI: -1} // a program was killed
				pause(2 * mpsEvery)
				b.want("applied", twoUnits, "")

				fail(b)
				pause(3 * mpsEvery)
				b.want("pending", twoUnitsX, "")
				if got := o.mps.wanted()[0].Retire.PID; got != first {
					t.Errorf("the daemon %d is to be replaced, want %d", got, first)
				}
				if e := b.sent(status.MPSFault); len(e) != 1 || !strings.Contains(e[0], "all its 2 clients") {
					t.Errorf("the Events are %q", e)
				}
				if h := b.Status().GPUs[0].Health; h != status.Healthy {
					t.Errorf("the GPU is %s", h)
				}
				fail(b) // faults come in numbers
				pause(time.Minute)
				if e := b.sent(status.MPSFault); len(e) != 1 {
					t.Errorf("%d Events", len(e))
				}
				o.mps.clients(uuid(0))
				pause(5 * time.Second)
				b.want("applied", twoUnits, "")
				if got := o.mps.daemon(); got == first {
					t.Error("it is the same daemon")
				}
				pause(time.Minute)
				if r := o.mps.wanted()[0].Retire; r != (mps.Identity{}) {
					t.Errorf("the daemon %+v is still to be replaced", r)
				}
			})
		})
	}
}

// A server that a program waits for is replaced if a program of the node's own hangs in it, too. If that
// cannot be found out, the server's own word counts.
func TestMPSSuspect(t *testing.T) {
	for _, c := range []struct {
		outcome  mps.Probed
		err      error
		status   mps.Status
		replaced bool
	}{
		{mps.Hangs, nil, mps.Active, true}, {mps.Hangs, nil, mps.Initializing, true},
		{mps.Answered, nil, mps.Active, false}, {mps.Answered, nil, mps.Initializing, false},
		{"", gpu.ErrNotSupported, mps.Active, false}, {"", gpu.ErrNotSupported, mps.Initializing, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			o := mpsNode(t)
			b := start(t, o, t.TempDir(), allMPS)
			defer b.end()
			pause(time.Minute)
			o.mps.clients(uuid(0), 41)
			o.mps.with(func() {
				o.mps.daemons[uuid(0)].Servers[0].Status = c.status
				o.mps.probe = func() (mps.Probed, error) { time.Sleep(5 * time.Second); return c.outcome, c.err }
			})
			pause(4 * mpsEvery)
			Shares{b.Agent}.Suspect(uuid(0), "a program has waited for 5s")
			pause(10 * time.Second)
			if got := o.mps.wanted()[0].Retire != (mps.Identity{}); got != c.replaced {
				t.Errorf("%q, %v, the server says %s: replaced %v", c.outcome, c.err, c.status, got)
			}
		})
	}
}

// The successor of an agent that has a daemon replaced goes on with it.
func TestMPSFaultSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, dir := mpsNode(t), t.TempDir()
		b := start(t, o, dir, allMPS)
		pause(time.Minute)
		o.mps.clients(uuid(0), 41)
		b.loop.mps.fault(uuid(0), "its server serves nobody")
		pause(time.Minute)
		first := o.mps.wanted()[0].Retire
		b.end()
		b = start(t, o, dir, allMPS)
		defer b.end()
		pause(time.Minute)
		if got := o.mps.wanted()[0].Retire; got != first || got.PID == 0 {
			t.Errorf("%+v is to be replaced, want %+v", got, first)
		}
		b.want("pending", twoUnitsX, "")
	})
}

// A hardware fault of a GPU under MPS is the GPU's, as ever.
func TestMPSHardwareFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := start(t, mpsNode(t), t.TempDir(), allMPS)
		defer b.end()
		pause(time.Minute)
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 48, GI: -1, CI: -1}
		pause(2 * mpsEvery)
		if h := b.Status().GPUs[0].Health; h == status.Healthy {
			t.Errorf("the GPU is %s", h)
		}
	})
}

// Clients near the number that a server takes are reported, and those of one GPU are counted.
func TestMPSCrowd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := mpsNode(t)
		b := start(t, o, t.TempDir(), allMPS)
		defer b.end()
		pause(time.Minute)
		pids := func(n int) (out []int) {
			for i := range n {
				out = append(out, 1000+i)
			}
			return out
		}
		for n, want := range map[int]bool{39: false, 40: true, 48: true} {
			o.mps.clients(uuid(0), pids(n)...)
			pause(2 * mpsEvery)
			if got := slices.Contains(b.reasons(), status.MPSCrowded); got != want || b.state() != "applied" {
				t.Errorf("%d clients: reported %v, state %s", n, got, b.state())
			}
			if got := b.Status().GPUs[0].MPS.Clients; got != n {
				t.Errorf("%d clients are counted as %d", n, got)
			}
		}
	})
}

// Servers that no daemon tells of are ended when the driver lists no other process: of a daemon that is dead,
// has lost its socket, or is retired and silent.
func TestMPSOrphans(t *testing.T) {
	for _, code := range []mps.Code{mps.Orphans, mps.Unreachable, mps.Retiring} {
		t.Run(string(code), func(t *testing.T) { endsOrphans(t, code) })
	}
}

func endsOrphans(t *testing.T, code mps.Code) {
	synctest.Test(t, func(t *testing.T) {
		o := mpsNode(t)
		b := start(t, o, t.TempDir(), allMPS)
		defer b.end()
		pause(time.Minute)
		o.left.set(0, func(s *gpu.Setup) { s.Processes = []gpu.Client{{PID: 9}, {PID: 41}} })
		o.mps.clients(uuid(0))
		o.mps.with(func() { o.mps.broken[uuid(0)] = &mps.Problem{Code: code, Text: "servers are left"} })
		pause(time.Minute)
		if o.mps.wanted()[0].EndOrphans {
			t.Error("servers with a client are ended")
		}
		o.left.set(0, func(s *gpu.Setup) { s.Processes = []gpu.Client{{PID: 9}} })
		pause(4 * mpsEvery)
		if !o.mps.wanted()[0].EndOrphans {
			t.Error("servers without clients stay")
		}
		o.mps.with(func() { clear(o.mps.broken) })
		pause(time.Minute)
		b.want("applied", twoUnits, "")
		if o.mps.wanted()[0].EndOrphans {
			t.Error("the next servers may be ended")
		}
	})
}

// The agent's own daemons are no owners of compute modes, and others' are.
func TestMPSDaemonsAreOurs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := mpsNode(t)
		b := start(t, o, t.TempDir(), allMPS)
		defer b.end()
		pause(time.Minute)
		pid := o.mps.daemon()
		o.left.with(func() { o.left.around.MPS = []gpu.Client{{PID: pid, Name: "nvidia-cuda-mps"}} })
		later()
		if got := b.codes(); len(got) > 0 {
			t.Errorf("of the agent's own daemon is said %v", got)
		}
		o.left.with(func() {
			o.left.around.MPS = append(o.left.around.MPS, gpu.Client{PID: pid + 1, Name: "nvidia-cuda-mps"})
		})
		later()
		if got := b.codes(); !slices.Contains(got, string(status.MPSDaemonElsewhere)) {
			t.Errorf("of another's daemon is said %v", got)
		}
		// Another program has changed the mode: it is set again.
		o.left.set(0, func(s *gpu.Setup) { s.Compute = gpu.ComputeDefault })
		later()
		if b.mode() != gpu.ComputeExclusiveProcess {
			t.Errorf("the mode is %s", b.mode())
		}
	})
}

// A compute mode that cannot be set keeps containers out.
func TestMPSModeRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := mpsNode(t)
		o.left.refuse = errors.New("no permission")
		b := start(t, o, t.TempDir(), allMPS)
		defer b.end()
		pause(time.Minute)
		if !slices.Contains(b.reasons(), status.ComputeModeFailed) || b.state() != "failed" {
			t.Errorf("state %s, %v", b.state(), b.reasons())
		}
		if why, _ := b.loop.mps.gate(uuid(0)); why.Reason != status.ComputeModeFailed {
			t.Errorf("a container may start: %+v", why)
		}
		o.left.with(func() { o.left.refuse = nil })
		pause(time.Minute)
		b.want("applied", twoUnits, "")
		if b.mode() != gpu.ComputeExclusiveProcess {
			t.Errorf("the mode is %s", b.mode())
		}
	})
}

// A container with a share of a GPU under MPS has nothing else: with a second resource it does not start,
// and its pod is told why.
func TestMPSBesideAnotherResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.left, o.mps = newLeftBehind(2), newSupervised()
		file := "version: v1\npartitions:\n  default:\n    - devices: [0]\n      mode: shared\n      compute: mps\n    - devices: [1]\n      mode: whole\n"
		b := start(t, o, t.TempDir(), file)
		defer b.end()
		pause(time.Minute)
		b.hold("two", wholeResource, string(uuid(1)))
		b.hold("two", memResource, string(uuid(0))+"::1")
		pause(time.Minute)
		for _, c := range b.Allocations() {
			if share := c.Resource == memResource; share == c.IsOpen() || share && c.Cause.Reason != status.MPSOneGPU {
				t.Errorf("%s is open: %v, because of %+v", c.Resource, c.IsOpen(), c.Cause)
			}
		}
		b.hold("one", memResource, string(uuid(0))+"::2")
		pause(time.Minute)
		for _, c := range b.Allocations() {
			if c.Holder.Name == "one" && !c.IsOpen() {
				t.Errorf("a container with a share alone does not start: %+v", c.Cause)
			}
		}
	})
}

// TestDetachedClients: of the clients that are to be detached, those that had ended, or that another call has
// detached, count as neither detached nor unanswered.
func TestDetachedClients(t *testing.T) {
	s := newSupervised()
	s.detach = func(d mps.Detach) (out []mps.Detached, err error) {
		for i, is := range []mps.Outcome{mps.Gone, mps.NoClient, mps.Gone, mps.Listed, mps.Unanswered, mps.Gone} {
			out = append(out, mps.Detached{Client: d.Clients[i], Outcome: is})
		}
		return out, nil
	}
	of := Shares{&Agent{mps: &mpsDaemons{supervisor: s}}}
	if done, not, err := of.Detach(t.Context(), "GPU-0", []int{1, 2, 3, 4, 5, 6}); done != 3 || not != 2 || err != nil {
		t.Errorf("%d detached, %d unanswered, %v; want 3 and 2", done, not, err)
	}
}
