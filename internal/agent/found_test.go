// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// leftBehind is how earlier owners have set the GPUs.
type leftBehind struct {
	mu sync.Mutex
	// Guarded by mu:
	of      map[gpu.UUID]gpu.Setup
	around  gpu.Surroundings
	pods    map[int]string // UIDs, by process
	err     error          // of reading
	refuse  error          // of setting
	keeps   bool           // a mode that was set does not stay
	reads   int
	looks   int // at the surroundings
	changes []string
	modes   []string // that were set by SetComputeMode
	before  func()   // called before each reading
}

func newLeftBehind(n int) *leftBehind {
	l := &leftBehind{of: map[gpu.UUID]gpu.Setup{}, pods: map[int]string{}}
	for i := range n {
		l.of[uuid(i)] = gpu.Setup{Compute: gpu.ComputeDefault, Persistence: new(true)}
	}
	return l
}

func (l *leftBehind) with(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

// set changes the setup of a GPU.
func (l *leftBehind) set(i int, change func(*gpu.Setup)) {
	l.with(func() {
		s := l.of[uuid(i)]
		change(&s)
		l.of[uuid(i)] = s
	})
}

func (l *leftBehind) podOf(pid int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pods[pid]
}

func (l *leftBehind) Setup(_ context.Context, u gpu.UUID) (gpu.Setup, error) {
	if l.before != nil {
		l.before()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reads++
	return l.of[u], l.err
}

func (l *leftBehind) Surroundings(context.Context) (gpu.Surroundings, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looks++
	return l.around, nil
}

func (l *leftBehind) ResetComputeMode(_ context.Context, u gpu.UUID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changes = append(l.changes, string(u))
	if l.refuse == nil && !l.keeps {
		s := l.of[u]
		s.Compute = gpu.ComputeDefault
		l.of[u] = s
	}
	return l.refuse
}

func (l *leftBehind) SetComputeMode(_ context.Context, u gpu.UUID, mode gpu.ComputeMode) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.modes = append(l.modes, string(mode))
	if l.refuse == nil {
		s := l.of[u]
		s.Compute = mode
		l.of[u] = s
	}
	return l.refuse
}

// counts is how often setups and the surroundings were read.
func (l *leftBehind) counts() (reads, looks int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reads, l.looks
}

// changed is how often a compute mode was set.
func (l *leftBehind) changed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.changes)
}

// codes are the codes of what was found, and sent what was said in Events with a code.
func (b *bench) codes() (out []string) {
	for _, c := range b.Status().Found {
		out = append(out, string(c.Reason))
	}
	return out
}

func (b *bench) sent(reason status.Reason) (out []string) {
	b.with(func() {
		for _, e := range b.events {
			if strings.Contains(e, " "+string(reason)+": ") {
				out = append(out, e)
			}
		}
	})
	return out
}

// later lets the next full reading pass.
func later() {
	time.Sleep(2*inventoryEvery + time.Minute)
	synctest.Wait()
}

const exclusive = gpu.ComputeExclusiveProcess

// TestExclusiveModeFailedEverySecondPod: a GPU that a dead owner had left in EXCLUSIVE_PROCESS was offered as shares, every second
// pod failed in CUDA, and the node said that all was well.
func TestExclusiveModeFailedEverySecondPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.left = newLeftBehind(2)
		o.left.set(1, func(s *gpu.Setup) { s.Compute = exclusive })
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		time.Sleep(time.Second)
		b.wantState("applied")
		if got := o.left.of[uuid(1)].Compute; got != gpu.ComputeDefault || o.left.changed() != 1 {
			t.Errorf("the mode is %s, after %v", got, o.left.changes)
		}
		if got := b.codes(); len(got) > 0 {
			t.Errorf("found %v after the mode was put right", got)
		}
		events := b.sent(status.ComputeModeReset)
		if len(events) != 1 || !strings.Contains(events[0], "GPU 1 (") || !strings.Contains(events[0], string(exclusive)) {
			t.Errorf("Events %q, want one on GPU 1 with its mode", events)
		}
		// It comes again while the agent runs.
		o.left.set(0, func(s *gpu.Setup) { s.Compute = gpu.ComputeProhibited })
		later()
		if o.left.of[uuid(0)].Compute != gpu.ComputeDefault {
			t.Error("a mode that came later stays")
		}
	})
}

// A mode with a living owner is left, is named wherever the node says how it is, and goes when the owner does.
func TestModeWithALivingOwnerIsLeftAndNamed(t *testing.T) {
	for name, c := range map[string]struct {
		owns func(*leftBehind)
		ends func(*leftBehind)
		says string
	}{
		"a process of no pod": {
			func(l *leftBehind) {
				l.set(0, func(s *gpu.Setup) { s.Processes = []gpu.Client{{PID: 42, Name: "trainer"}} })
			},
			func(l *leftBehind) { l.set(0, func(s *gpu.Setup) { s.Processes = nil }) }, "42 (trainer)"},
		"a daemon of MPS without clients": {
			func(l *leftBehind) { l.with(func() { l.around.MPS = []gpu.Client{{PID: 7, Name: "nvidia-cuda-mps"}} }) },
			func(l *leftBehind) { l.with(func() { l.around.MPS = nil }) }, "7 (nvidia-cuda-mps)"},
		"a pod that another plugin gave the GPU": {
			func(l *leftBehind) {
				l.set(0, func(s *gpu.Setup) { s.Processes = []gpu.Client{{PID: 9, Name: "python3"}} })
				l.with(func() { l.pods[9] = "uid-of-another" })
			},
			func(l *leftBehind) { l.set(0, func(s *gpu.Setup) { s.Processes = nil }) }, "9 (python3)"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(1)
				o.left = newLeftBehind(1)
				o.left.set(0, func(s *gpu.Setup) { s.Compute = exclusive })
				c.owns(o.left)
				b := start(t, o, t.TempDir(), allShared)
				defer b.end()
				later()
				b.wantState("failed")
				if o.left.changed() > 0 {
					t.Error("the agent has changed the mode")
				}
				p := b.Status().Partition
				if p.Reason != status.ComputeModeSet || !strings.Contains(p.Message, c.says) || !strings.Contains(p.Message, "-c DEFAULT") {
					t.Errorf("%s: %q, want the code with %q", p.Reason, p.Message, c.says)
				}
				var onNode string
				b.with(func() { onNode = b.annotations["example.com/gpu.partition.reason"] })
				if onNode != string(status.ComputeModeSet) || len(b.sent(status.ComputeModeSet)) != 1 {
					t.Errorf("the node says %q, Events %q", onNode, b.sent(status.ComputeModeSet))
				}
				c.ends(o.left)
				later()
				b.wantState("applied")
				if o.left.changed() != 1 || len(b.codes()) > 0 {
					t.Errorf("after the owner's end the mode was set %d times, found %v", o.left.changed(), b.codes())
				}
				if len(b.sent(status.FoundGone)) == 0 {
					t.Error("no Event says that it is over")
				}
			})
		})
	}
}

// The first of the agent's own pods on such a GPU is not the owner of the mode, or the second would never start.
func TestPodOfTheAgentOwnsNoMode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.left = newLeftBehind(1)
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		b.hold("first", memResource, string(uuid(0))+"::0")
		time.Sleep(time.Minute)
		uid := ""
		for _, c := range b.Allocations() {
			uid = c.Holder.UID
		}
		if uid == "" {
			t.Fatal("the allocation's pod has no UID")
		}
		o.left.with(func() { o.left.pods[9] = uid })
		o.left.set(0, func(s *gpu.Setup) {
			s.Compute, s.Processes = exclusive, []gpu.Client{{PID: 9, Name: "python3"}}
		})
		later()
		if o.left.changed() != 1 {
			t.Errorf("the mode was set %d times; %v", o.left.changed(), b.Status().Found)
		}
	})
}

// Without a layout that needs the mode it is nobody's business: off, another owner's GPU, and before there is a partition.
func TestModeThatNoLayoutNeedsIsLeft(t *testing.T) {
	for name, c := range map[string]struct {
		file   string
		change func(*outside)
	}{
		"off":          {strings.ReplaceAll(allShared, "shared", "off"), nil},
		"no partition": {"", nil},
		"another owner's": {allWhole, func(o *outside) {
			o.allocatable = map[string][]string{"nvidia.com/gpu": {string(uuid(0))}}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(1)
				o.left = newLeftBehind(1)
				o.left.set(0, func(s *gpu.Setup) { s.Compute = exclusive })
				if c.change != nil {
					c.change(o)
				}
				b := start(t, o, t.TempDir(), c.file)
				defer b.end()
				later()
				if o.left.changed() > 0 {
					t.Error("the agent has changed the mode")
				}
				f := b.Status().Found
				if len(f) != 1 || f[0].Reason != status.ComputeModeSet || f[0].Type != status.Noted {
					t.Errorf("found %+v, want a remark", f)
				}
			})
		})
	}
}

// A mode that cannot be set is told of with the reason, and tried again at the next reading, not in each round.
func TestModeThatCannotBeSet(t *testing.T) {
	for name, fails := range map[string]func(*leftBehind){
		"refused":       func(l *leftBehind) { l.refuse = fmt.Errorf("set it: %w", gpu.ErrNoPermission) },
		"does not stay": func(l *leftBehind) { l.keeps = true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(1)
				o.left = newLeftBehind(1)
				o.left.set(0, func(s *gpu.Setup) { s.Compute = exclusive })
				fails(o.left)
				b := start(t, o, t.TempDir(), allShared)
				defer b.end()
				time.Sleep(time.Second)
				b.wantState("failed")
				if m := b.message(); !strings.Contains(m, "does not let the agent change it") {
					t.Errorf("message %q lacks the reason", m)
				}
				tries := o.left.changed()
				for range 20 {
					b.Agent.waker.wake()
					synctest.Wait()
				}
				if tries != 1 || o.left.changed() != tries {
					t.Errorf("tried %d times, and %d times after 20 rounds", tries, o.left.changed())
				}
				o.left.with(func() { o.left.refuse, o.left.keeps = nil, false })
				later()
				b.wantState("applied")
			})
		})
	}
}

// Remarks are in the status and in Events, one for all GPUs that have them, and leave the partition as it is.
func TestRemarksThereAndGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(3)
		o.left = newLeftBehind(3)
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		later()
		if got := b.codes(); len(got) > 0 {
			t.Errorf("a node that nobody has changed has %v", got)
		}
		for i := range 3 {
			o.left.set(i, func(s *gpu.Setup) { s.Persistence = new(false) })
		}
		o.left.with(func() {
			o.left.around.Modeset = true
			o.left.around.MPSDirs = []string{"/state/mps/GPU-1/control", "/state/mps/GPU-1/pipe"} // the agent's own
		})
		o.left.set(2, func(s *gpu.Setup) { s.Fabric = gpu.FabricInProgress })
		later()
		b.wantState("applied")
		want := []string{"FabricNotReady", "PersistenceOff", "PersistenceOff", "PersistenceOff", "ModesetOn"}
		if got := b.codes(); !slices.Equal(got, want) {
			t.Errorf("found %v, want %v", got, want)
		}
		for reason, words := range map[status.Reason]string{
			status.PersistenceOff: "Normal PersistenceOff: GPU 0 (", status.ModesetOn: "Normal ModesetOn: the node",
			status.FabricNotReady: "Warning FabricNotReady: GPU 2 (",
		} {
			if got := b.sent(reason); len(got) != 1 || !strings.HasPrefix(got[0], words) {
				t.Errorf("Events %q, want one that begins with %q", got, words)
			}
		}
		if got := b.sent(status.PersistenceOff); !strings.HasSuffix(got[0], "also found on GPUs 1, 2") {
			t.Errorf("Event %q does not name the other GPUs", got)
		}
		for _, reason := range want {
			if c := b.Status().Conditions; !slices.ContainsFunc(c, func(c status.Condition) bool { return string(c.Reason) == reason }) {
				t.Errorf("no condition has %s", reason)
			}
		}
		o.left.with(func() { o.left.around.Modeset = false })
		for i := range 3 {
			o.left.set(i, func(s *gpu.Setup) { s.Persistence, s.Fabric = new(true), gpu.FabricNone })
		}
		later()
		if got, gone := b.codes(), b.sent(status.FoundGone); len(got) > 0 || len(gone) != 3 {
			t.Errorf("all is as before, and found are %v, Events %q", got, gone)
		}
	})
}

// Setups change slowly: neither probes of a faulty GPU, nor events, nor rounds read them more often than every setupsEvery.
func TestSetupsAreReadRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		o.left = newLeftBehind(2)
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		synctest.Wait()
		o.figures = maps.Clone(o.figures)
		b.with(func() { o.figures[uuid(0)] = gpu.Health{Recovery: gpu.RecoveryReset} })
		o.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(0), Xid: 79, GI: -1, CI: -1}
		var before int
		b.with(func() { before = o.readings })
		setupsBefore, _ := o.left.counts()
		time.Sleep(setupsEvery - time.Minute)
		synctest.Wait()
		var probes int
		b.with(func() { probes = o.readings - before })
		if reads, looks := o.left.counts(); probes < 4 || reads != setupsBefore || looks != 1 {
			t.Errorf("%d readings of the GPUs, %d more of their setups, %d looks at the node", probes, reads-setupsBefore, looks)
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if reads, looks := o.left.counts(); reads != setupsBefore+2 || looks != 2 {
			t.Errorf("%d more readings of setups after %s, want one for each GPU; %d looks", reads-setupsBefore, setupsEvery, looks)
		}
	})
}

// The kubelet waits for the first list: the first reading of a new process reads no setups, and a second one follows at once.
func TestFirstOfferDoesNotWaitForSetups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.left = newLeftBehind(1)
		var readings int
		o.left.before = func() { o.with(func() { readings = o.readings }) }
		b := start(t, o, t.TempDir(), allShared)
		defer b.end()
		time.Sleep(time.Second)
		reads, _ := o.left.counts()
		o.with(func() {
			if readings != 2 || reads != 1 {
				t.Errorf("%d readings of setups, in reading %d of the GPUs; want one, in the second", reads, readings)
			}
		})
	})
}
