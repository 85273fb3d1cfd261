// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// hardware is what outside has of MIG: it refuses what a card refuses.
type hardware struct {
	// Guarded by outside.mu:
	ops     []string         // what took effect, in order
	calls   int              // of those that change something
	failAt  map[int]error    // by number of the call, from 1
	failAll error            // of every create
	refuses map[string]error // by what is asked, "create 3g.40gb@4"
	chance  func() error     // of every call, if set
	took    time.Duration    // of each call
	// ampere: a mode comes into force with a reset.
	ampere   bool
	resetErr error
	gi       int
}

var errBroken = fmt.Errorf("it broke: %w", gpu.ErrDriver)

// a100 is what an A100 with 80 GB says of itself.
func a100() gpu.MIG {
	at := func(size int, starts ...int) []gpu.Placement {
		var out []gpu.Placement
		for _, s := range starts {
			out = append(out, gpu.Placement{Start: s, Size: size})
		}
		return out
	}
	return gpu.MIG{Capable: true, Profiles: []gpu.Profile{
		{Name: "1g.10gb", ID: 19, Slices: 1, Max: 7, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "1g.10gb+me", ID: 20, Slices: 1, Max: 1, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "2g.20gb", ID: 14, Slices: 2, Max: 3, Placements: at(2, 0, 2, 4)},
		{Name: "3g.40gb", ID: 9, Slices: 3, Max: 2, Placements: at(4, 0, 4)},
		{Name: "4g.40gb", ID: 5, Slices: 4, Max: 1, Placements: at(4, 0)},
		{Name: "7g.80gb", ID: 0, Slices: 7, Max: 1, Placements: at(8, 0)},
	}}
}

// migMachine has GPUs of which some are in MIG mode.
func migMachine(n int, on ...int) *outside {
	o := newOutside(n)
	for i := range o.inv.GPUs {
		o.inv.GPUs[i].MIG = a100()
		o.inv.GPUs[i].MIG.Enabled = slices.Contains(on, i)
	}
	return o
}

func (o *outside) MIG(_ context.Context, u gpu.UUID) (gpu.MIG, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.inv.ByUUID(u).MIG, nil
}

// change does one thing to a GPU, after the time that it takes.
func (o *outside) change(u gpu.UUID, what string, do func(d *gpu.Device) error) error {
	o.mu.Lock()
	o.calls++
	err, took := o.failAt[o.calls], o.took
	if err == nil && strings.HasPrefix(what, "create") {
		err = cmp.Or(o.failAll, o.refuses[what])
	}
	if err == nil && o.chance != nil {
		err = o.chance()
	}
	o.mu.Unlock()
	time.Sleep(took)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	d := o.inv.ByUUID(u)
	// Readings hand out the slice.
	d.MIG.Instances = slices.Clone(d.MIG.Instances)
	if err := do(d); err != nil {
		return err
	}
	o.ops = append(o.ops, fmt.Sprintf("%d: %s", d.Index, what))
	return nil
}

func (o *outside) CreateInstance(_ context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int) (gpu.Instance, error) {
	made := gpu.Instance{Profile: profile, Placement: at, CIStart: ci}
	err := o.change(u, fmt.Sprintf("create %s@%d", profile, at.Start), func(d *gpu.Device) error {
		card, _ := mig.NewCard(&d.MIG) // what it cannot name cannot be asked for
		var standing []mig.Placement
		for i := range d.MIG.Instances {
			s, err := mig.PlacementOf(&d.MIG.Instances[i])
			if err != nil {
				return err
			}
			standing = append(standing, s)
		}
		s, err := mig.PlacementOf(&made)
		if err != nil {
			return err
		}
		if !d.MIG.Enabled {
			return fmt.Errorf("MIG is off: %w", gpu.ErrNotSupported)
		}
		if !card.Fits(standing, s) {
			return gpu.ErrNoRoom
		}
		// Splits share their GPU instance.
		for i, other := range standing {
			if other.GPUInstance() == s.GPUInstance() {
				made.GI, made.CI = d.MIG.Instances[i].GI, max(made.CI, d.MIG.Instances[i].CI+1)
			}
		}
		if made.GI == 0 {
			o.gi++
			made.GI = o.gi
		}
		made.UUID = gpu.UUID(fmt.Sprintf("MIG-%d-%s-%d-%d", d.Index, profile, at.Start, ci))
		d.MIG.Instances = append(d.MIG.Instances, made)
		return nil
	})
	return made, err
}

func (o *outside) DestroyInstance(_ context.Context, u gpu.UUID, in gpu.Instance) error {
	return o.change(u, fmt.Sprintf("destroy %s@%d", in.Profile, in.Start), func(d *gpu.Device) error {
		i := slices.IndexFunc(d.MIG.Instances, func(x gpu.Instance) bool { return x.GI == in.GI && x.CI == in.CI })
		if i < 0 {
			return gpu.ErrNotFound
		}
		if d.MIG.Instances[i].Busy {
			return gpu.ErrInUse
		}
		d.MIG.Instances = slices.Delete(d.MIG.Instances, i, i+1)
		return nil
	})
}

func (o *outside) SetMIGMode(_ context.Context, u gpu.UUID, on bool) error {
	return o.change(u, fmt.Sprintf("mode %v", on), func(d *gpu.Device) error {
		if len(d.MIG.Instances) > 0 {
			return gpu.ErrInUse
		}
		if o.ampere {
			d.MIG.Pending = nil
			if on != d.MIG.Enabled {
				d.MIG.Pending = &on
			}
			return nil
		}
		d.MIG.Enabled = on
		return nil
	})
}

func (o *outside) Reset(_ context.Context, u gpu.UUID) error {
	if o.resetErr != nil {
		return o.resetErr
	}
	return o.change(u, "reset", func(d *gpu.Device) error {
		if d.MIG.Pending != nil {
			d.MIG.Enabled, d.MIG.Pending = *d.MIG.Pending, nil
		}
		return nil
	})
}

func (o *outside) Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error) {
	return []*specs.DeviceNode{{Path: fmt.Sprintf("/dev/nvidia-caps/gpu%d-gi%d", minor, gi)}, {Path: fmt.Sprintf("/dev/nvidia-caps/gpu%d-gi%d-ci%d", minor, gi, ci)}}, nil
}

func (o *outside) MIGStep(string, string, time.Duration, error) {}
func (o *outside) Wish(string, time.Duration)                   {}

func migFile(gpus ...string) string {
	var b strings.Builder
	b.WriteString("version: v1\npartitions:\n  default:\n")
	for i, g := range gpus {
		fmt.Fprintf(&b, "    - devices: [%d]\n      %s\n", i, g)
	}
	return b.String()
}

const (
	sevenSmall = "{mode: mig, geometry: {1g.10gb: 7}}"
	twoLarge   = "{mode: mig, geometry: {3g.40gb: 2}}"
	demand     = "{mode: mig}"
)

func entry(s string) string {
	s = strings.TrimSuffix(strings.TrimPrefix(s, "{"), "}")
	mode, rest, more := strings.Cut(s, ", ")
	if !more {
		return mode
	}
	return mode + "\n      " + rest
}

func migPartition(gpus ...string) string {
	for i := range gpus {
		gpus[i] = entry(gpus[i])
	}
	return migFile(gpus...)
}

// done is what has been done to the hardware, and told which Events were sent.
func (b *bench) done() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.ops)
}

func (b *bench) told() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.events)
}

// standing is what stands on a GPU.
func (b *bench) standing(i int) string {
	b.t.Helper()
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	var placements []mig.Placement
	for j := range b.outside.inv.GPUs[i].MIG.Instances {
		s, err := mig.PlacementOf(&b.outside.inv.GPUs[i].MIG.Instances[j])
		if err != nil {
			b.t.Fatal(err)
		}
		placements = append(placements, s)
	}
	slices.SortFunc(placements, mig.ComparePlacements)
	words := make([]string, len(placements))
	for j, s := range placements {
		words[j] = s.String()
	}
	return strings.Join(words, " ")
}

// wantStanding holds what stands, and what has been done to get there.
func (b *bench) wantStanding(i int, want string) {
	b.t.Helper()
	if got := b.standing(i); got != want {
		b.t.Errorf("on GPU %d stand %q, want %q; state %s %q; done: %v", i, got, want, b.state(), b.message(), b.done())
	}
}

func migID(i int, placement string) string { return string(uuid(i)) + "::" + placement }

const small, large = "example.com/mig-1g.10gb", "example.com/mig-3g.40gb"

// health of a device in the offer: "" where it is not listed.
func (b *bench) health(resource, id string) string {
	b.t.Helper()
	synctest.Wait()
	devs, _ := b.front.List(resource)
	for _, d := range devs {
		if d.ID == id {
			switch {
			case !d.Healthy:
				return "unhealthy"
			case d.Leaving:
				return "leaving"
			}
			return "healthy"
		}
	}
	return ""
}

func (b *bench) wantHealth(resource, id, want string) {
	b.t.Helper()
	if got := b.health(resource, id); got != want {
		b.t.Errorf("%s is %q, want %q", id, got, want)
	}
}

// drop ends a pod that everybody has seen.
func (b *bench) drop(pod string) {
	time.Sleep(holdersEvery)
	b.with(func() {
		b.holdings = slices.DeleteFunc(b.holdings, func(h node.Holding) bool { return h.Pod == pod })
	})
	time.Sleep(holdersEvery)
	synctest.Wait()
}

func (b *bench) wantState(want string) {
	b.t.Helper()
	synctest.Wait()
	if got := b.state(); got != want {
		b.t.Errorf("state %q, want %q (%q)", got, want, b.message())
	}
}

const allSmall = "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6"

// The walk of DESIGN.md: an edit while a pod has an instance on one of two GPUs.
func TestGeometryEdit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(3)
		o.ampere = true
		b := start(t, o, t.TempDir(), migPartition(sevenSmall, sevenSmall, "{mode: whole}"))
		defer b.end()
		time.Sleep(time.Second)
		b.wantState("applied")
		b.wantStanding(0, allSmall)
		b.wantStanding(1, allSmall)
		if want := "Normal GPUChange: GPUs 0, 1: enable MIG mode, create 1g.10gb@0, "; !strings.Contains(strings.Join(b.told(), "\n"), want) {
			t.Errorf("no Event says %q: %q", want, b.told())
		}
		b.hold("train-3", small, migID(1, "1g.10gb@5"))
		if files := b.files(); len(files) != 1 {
			t.Errorf("files: %v", files)
		} else if file, err := os.ReadFile(files[0]); err != nil || strings.Count(string(file), "/dev/nvidia-caps/gpu") != 2 {
			t.Errorf("the allocation's file has not its two capabilities: %v, %s", err, file)
		}
		time.Sleep(holdersEvery)

		b.SetFile("p.yaml", []byte(migPartition(twoLarge, twoLarge, "{mode: whole}")))
		time.Sleep(time.Second)
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
		b.wantStanding(1, allSmall)
		b.wantState("blocked")
		if m := b.message(); !strings.Contains(m, "GPU 1") || !strings.Contains(m, "ns/train-3 (1g.10gb@5)") || strings.Contains(m, "GPU 0") {
			t.Errorf("message %q does not say who is in the way of what", m)
		}
		b.wantHealth(large, migID(0, "3g.40gb@4"), "healthy")
		b.wantHealth(small, migID(0, "1g.10gb@0"), "unhealthy")
		b.wantHealth(small, migID(1, "1g.10gb@0"), "unhealthy")
		b.wantHealth(small, migID(1, "1g.10gb@5"), "leaving")
		b.wantHealth(wholeResource, string(uuid(2)), "healthy")
		if _, err := b.source(small).Allocate([]string{migID(1, "1g.10gb@0")}); err == nil {
			t.Error("a withdrawn instance was granted")
		}

		b.drop("train-3")
		b.wantState("applied")
		b.wantStanding(1, "3g.40gb@0 3g.40gb@4")
		b.wantHealth(large, migID(1, "3g.40gb@0"), "healthy")
		// The same again is nothing to do.
		before := len(b.done())
		b.SetFile("p.yaml", []byte(migPartition(twoLarge, twoLarge, "{mode: whole}")))
		time.Sleep(time.Minute + time.Second)
		if len(b.done()) != before {
			t.Errorf("done for nothing: %v", b.done()[before:])
		}
		b.wantHealth(small, migID(1, "1g.10gb@0"), "") // gone after its minute

		// And back to a whole GPU.
		b.SetFile("p.yaml", []byte(migPartition(twoLarge, "{mode: whole}", "{mode: whole}")))
		time.Sleep(time.Second)
		b.wantState("applied")
		b.wantStanding(1, "")
		b.wantHealth(wholeResource, string(uuid(1)), "healthy")
	})
}

// What a geometry keeps stays on offer while the change waits.
func TestBlockedKeepsWhatBothHave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		b := start(t, o, t.TempDir(), migPartition("{mode: mig, geometry: {3g.40gb: 1, 1g.10gb: 3}}"))
		defer b.end()
		time.Sleep(time.Second)
		b.wantState("applied")
		var big string
		for s := range strings.FieldsSeq(b.standing(0)) {
			if strings.HasPrefix(s, "3g") {
				big = s
			}
		}
		var smalls []string
		for s := range strings.FieldsSeq(b.standing(0)) {
			if strings.HasPrefix(s, "1g") {
				smalls = append(smalls, s)
			}
		}
		b.hold("p", small, migID(0, smalls[1]))
		b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
		time.Sleep(time.Second)
		b.wantState("blocked")
		b.wantHealth(large, migID(0, big), "healthy")
		b.wantHealth(small, migID(0, smalls[0]), "unhealthy")
		b.drop("p")
		b.wantState("applied")
		if n := slices.IndexFunc(b.done(), func(s string) bool { return strings.Contains(s, "destroy "+big) }); n >= 0 {
			t.Errorf("what both have was destroyed: %v", b.done())
		}
	})
}

func TestOnDemand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.took = 200 * time.Millisecond
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		b.wantState("applied")
		b.wantStanding(0, "")
		b.wantHealth(large, migID(0, "3g.40gb@0"), "healthy")
		src := b.source(small)
		if _, err := src.Allocate([]string{migID(0, "1g.10gb@1")}); err != nil {
			t.Fatal(err)
		}
		// Before the loop can have run: the room is taken.
		b.wantHealth(large, migID(0, "3g.40gb@0"), "unhealthy")
		b.wantHealth(large, migID(0, "3g.40gb@4"), "healthy")
		b.wantHealth(small, migID(0, "1g.10gb@1"), "healthy")
		time.Sleep(10 * time.Second)
		b.wantStanding(0, "") // nobody has wished for it yet
		b.hold("a", small, migID(0, "1g.10gb@1"))
		b.wantStanding(0, "1g.10gb@1")
		b.hold("b", large, migID(0, "3g.40gb@4"))
		b.wantStanding(0, "1g.10gb@1 3g.40gb@4")
		b.drop("a")
		b.wantHealth(large, migID(0, "3g.40gb@0"), "healthy")
		b.wantStanding(0, "1g.10gb@1 3g.40gb@4") // warm
		b.hold("c", small, migID(0, "1g.10gb@1"))
		if n := len(b.done()); n != 2 {
			t.Errorf("a warm instance was made anew: %v", b.done())
		}
		b.drop("c")
		b.hold("d", large, migID(0, "3g.40gb@0"))
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
		if !slices.Equal(b.done()[2:], []string{"0: destroy 1g.10gb@1", "0: create 3g.40gb@0"}) {
			t.Errorf("done: %v", b.done())
		}
		// A container that starts again finds its instance.
		if err := b.source(large).Prepare(t.Context(), []string{migID(0, "3g.40gb@0")}); err != nil {
			t.Error(err)
		}
		b.wantState("applied")
	})
}

func TestOnDemandSlowCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2, 0, 1)
		o.took = 40 * time.Second
		b := start(t, o, t.TempDir(), migPartition(demand, demand))
		defer b.end()
		src, id := b.source(large), migID(0, "3g.40gb@0")
		if _, err := src.Allocate([]string{id}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if err := src.Prepare(ctx, []string{id}); !errors.Is(err, ledger.ErrNotOpen) {
			t.Errorf("the bell that was cut short: %v", err)
		}
		b.hold("a", large, id)
		b.wantStanding(0, "3g.40gb@0")
		if n := len(b.done()); n != 1 {
			t.Errorf("done: %v", b.done())
		}
	})
}

func TestIdleInstanceTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		b.Agent.loop.executor.idleTTL = time.Minute
		b.hold("a", small, migID(0, "1g.10gb@0"))
		time.Sleep(5 * time.Minute)
		b.wantStanding(0, "1g.10gb@0")
		b.drop("a")
		b.wantStanding(0, "1g.10gb@0")
		time.Sleep(time.Minute + time.Second)
		b.wantStanding(0, "")
	})
}

func TestForeignInstances(t *testing.T) {
	for _, reclaim := range []bool{false, true} {
		t.Run(fmt.Sprintf("reclaim=%v", reclaim), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := migMachine(2, 0, 1)
				three := gpu.Instance{Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, GI: 2, UUID: "MIG-x"}
				one := gpu.Instance{Profile: "1g.10gb", Placement: gpu.Placement{Start: 0, Size: 1}, GI: 9, UUID: "MIG-y"}
				for i := range o.inv.GPUs {
					o.inv.GPUs[i].MIG.Instances = []gpu.Instance{one, three}
				}
				b := start(t, o, t.TempDir(), "")
				defer b.end()
				b.Agent.loop.executor.reclaim = reclaim
				b.SetFile("p.yaml", []byte(migPartition(twoLarge, demand)))
				time.Sleep(time.Minute)
				if reclaim {
					b.wantState("applied")
					b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
					if slices.Contains(b.done(), "0: destroy 3g.40gb@4") {
						t.Errorf("what fits was destroyed: %v", b.done())
					}
					b.hold("a", large, migID(1, "3g.40gb@0"))
					b.wantStanding(1, "3g.40gb@0 3g.40gb@4")
					return
				}
				b.wantState("blocked")
				if m := b.message(); !strings.Contains(m, "--foreign-instances reclaim") || !strings.Contains(m, "1g.10gb@0") {
					t.Errorf("message %q does not say what to do", m)
				}
				b.wantStanding(0, "1g.10gb@0 3g.40gb@4")
				b.wantHealth(large, migID(0, "3g.40gb@4"), "healthy") // what fits is taken over
				b.wantHealth(small, migID(0, "1g.10gb@0"), "unhealthy")
				// On demand: what stands may be had, its room may not.
				b.wantHealth(large, migID(1, "3g.40gb@4"), "healthy")
				b.wantHealth(large, migID(1, "3g.40gb@0"), "unhealthy")
				b.wantHealth(small, migID(1, "1g.10gb@0"), "healthy")
				b.wantHealth(small, migID(1, "1g.10gb@1"), "healthy")
				b.hold("a", small, migID(1, "1g.10gb@0"))
				if len(b.done()) != 0 {
					t.Errorf("done: %v", b.done())
				}
			})
		})
	}
}

// A process that no allocation covers is not driven off its instance.
func TestBusyWithoutAnAllocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		b := start(t, o, t.TempDir(), migPartition(sevenSmall))
		defer b.end()
		time.Sleep(time.Second)
		busy := func(is bool) {
			b.with(func() {
				d := &b.outside.inv.GPUs[0]
				d.MIG.Instances = slices.Clone(d.MIG.Instances)
				d.MIG.Instances[3].Busy = is
			})
		}
		busy(true) // after the last reading
		b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
		time.Sleep(10 * time.Second)
		b.wantStanding(0, allSmall)
		if b.state() == "applied" {
			t.Errorf("state %q while a process is in the way", b.state())
		}
		busy(false)
		time.Sleep(time.Minute)
		b.wantState("applied")
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
	})
}

// For every k, the k-th call of a change fails: the GPU has its old or its new
// geometry, the state says which, and in the end it has the new one.
func TestChangeFailsAtEveryStep(t *testing.T) {
	for k := 1; k <= 11; k++ {
		t.Run(fmt.Sprintf("call %d", k), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := migMachine(1, 0)
				b := start(t, o, t.TempDir(), migPartition(sevenSmall))
				defer b.end()
				time.Sleep(time.Second)
				b.wantState("applied")
				b.with(func() { b.failAt = map[int]error{b.calls + k: errBroken} })
				b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
				synctest.Wait()
				switch got := b.standing(0); {
				case got == allSmall && k <= 9:
					b.wantState("failed")
					if m := b.message(); !strings.Contains(m, "it broke") || k > 1 && !strings.Contains(m, "put back") {
						t.Errorf("message %q does not say what failed and what was put back", m)
					}
				case got == "3g.40gb@0 3g.40gb@4" && k > 9:
					b.wantState("applied")
				default:
					t.Errorf("on the GPU stands %q, in state %s, after %v", got, b.state(), b.done())
				}
				time.Sleep(time.Minute)
				b.wantState("applied")
				b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
			})
		})
	}
}

// For every k, the agent ends in the k-th call: its successor brings the GPU to the
// geometry that is wanted, and takes nothing for somebody else's.
func TestAgentEndsAtEveryStep(t *testing.T) {
	for k := 1; k <= 10; k++ {
		t.Run(fmt.Sprintf("call %d", k), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, cdiDir := migMachine(1, 0), t.TempDir()
				b := start(t, o, cdiDir, migPartition(sevenSmall))
				time.Sleep(time.Second)
				b.with(func() { o.took = time.Second })
				b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
				// Nothing after the k-th call takes effect: the process is dead.
				time.Sleep(time.Duration(k)*time.Second - time.Second/2)
				b.with(func() {
					b.failAt = map[int]error{}
					for i := 1; i < 40; i++ {
						b.failAt[b.calls+i] = errBroken
					}
				})
				b.end()
				time.Sleep(time.Minute)
				b.with(func() { b.failAt, o.took = nil, 0 })
				b = start(t, o, cdiDir, migPartition(twoLarge))
				defer b.end()
				time.Sleep(time.Second)
				b.wantState("applied")
				b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
			})
		})
	}
}

func TestPlacementIsWithdrawnAfterThreeFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.failAll = errBroken
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		src, id := b.source(large), migID(0, "3g.40gb@0")
		if _, err := src.Allocate([]string{id}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if err := src.Prepare(ctx, []string{id}); err == nil || !strings.Contains(err.Error(), "it broke") {
			t.Errorf("Prepare: %v, want the reason", err)
		}
		b.wantHealth(large, id, "leaving")
		if events := strings.Join(b.told(), "\n"); strings.Count(events, "GPUInstanceFailed") != 1 {
			t.Errorf("events:\n%s", events)
		}
		// Nobody took it; the allocation ends, the placement stays withdrawn.
		time.Sleep(time.Minute)
		b.wantHealth(large, id, "unhealthy")
		b.wantHealth(large, migID(0, "3g.40gb@4"), "healthy")
		b.with(func() { b.failAll = nil })
		time.Sleep(failingFor)
		b.wantHealth(large, id, "healthy")
		b.hold("a", large, id)
		b.wantStanding(0, "3g.40gb@0")
	})
}

func TestResetNeverAsksForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(2)
		o.ampere = true
		b := start(t, o, t.TempDir(), "")
		defer b.end()
		b.Agent.loop.executor.neverReset = true
		b.SetFile("p.yaml", []byte(migPartition(twoLarge, "{mode: whole}")))
		time.Sleep(time.Second)
		b.wantState("pending")
		if m := b.message(); !strings.Contains(m, "GPU 0") || !strings.Contains(m, "reset") {
			t.Errorf("message %q", m)
		}
		b.wantHealth(wholeResource, string(uuid(1)), "healthy") // nothing else stops
		b.with(func() {                                         // somebody reboots, or resets it
			d := &b.outside.inv.GPUs[0]
			d.MIG.Enabled, d.MIG.Pending = true, nil
		})
		time.Sleep(inventoryEvery)
		b.wantState("applied")
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
	})
}

func TestResetThatSomebodyIsInTheWayOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1)
		o.ampere, o.resetErr = true, fmt.Errorf("it is open in dcgm (PID 7): %w", gpu.ErrInUse)
		b := start(t, o, t.TempDir(), "")
		defer b.end()
		b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
		time.Sleep(time.Second)
		b.wantState("pending")
		if m := b.message(); !strings.Contains(m, "dcgm (PID 7)") {
			t.Errorf("message %q does not name who has the GPU open", m)
		}
		b.with(func() { b.resetErr = nil })
		time.Sleep(workPauseMax)
		b.wantState("applied")
	})
}

// A pod that was granted a placement before the partition changed gets its instance all
// the same: it could not end otherwise.
func TestGrantOutlivesThePartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		id := migID(0, "1g.10gb@2")
		if _, err := b.source(small).Allocate([]string{id}); err != nil {
			t.Fatal(err)
		}
		b.SetFile("p.yaml", []byte(migPartition(twoLarge)))
		b.wantState("blocked")
		b.hold("a", small, id)
		b.wantStanding(0, "1g.10gb@2")
		b.drop("a")
		time.Sleep(time.Minute)
		b.wantState("applied")
		b.wantStanding(0, "3g.40gb@0 3g.40gb@4")
	})
}

// After a reboot the instances are gone, on Hopper the mode too.
func TestReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, cdiDir := migMachine(2, 0, 1), t.TempDir()
		b := start(t, o, cdiDir, migPartition("{mode: mig, geometry: {1g.10gb: 3}}", demand))
		time.Sleep(time.Second)
		first := strings.Fields(b.standing(0))
		b.hold("a", small, migID(0, first[0]))
		b.hold("b", large, migID(1, "3g.40gb@4"))
		b.end()
		o.with(func() {
			for i := range o.inv.GPUs {
				o.inv.GPUs[i].MIG.Enabled, o.inv.GPUs[i].MIG.Instances = false, nil
			}
			o.boot, o.holdings, o.ops = "next", nil, nil
			o.entries = []node.Entry{{PodUID: "uid-a", Container: "c", Resource: small, IDs: []string{migID(0, first[0])}}}
		})
		for _, f := range b.files() {
			if err := os.Remove(f); err != nil {
				t.Fatal(err)
			}
		}
		b = start(t, o, cdiDir, migPartition("{mode: mig, geometry: {1g.10gb: 3}}", demand))
		defer b.end()
		time.Sleep(time.Second)
		if got := strings.Fields(b.standing(0)); !slices.Equal(got, first) {
			t.Errorf("made again: %v, want %v", got, first)
		}
		b.wantStanding(1, "")
		b.wantState("applied")
		o.with(func() { o.entries = nil })
		time.Sleep(deviceplugin.Grace + 2*holdersEvery)
		synctest.Wait()
		if c := b.Allocations(); len(c) != 0 {
			t.Errorf("allocations are left of the boot before: %+v", c)
		}
		b.wantHealth(small, migID(0, first[0]), "healthy")
		b.hold("a", small, migID(0, first[0]))
	})
}
