// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/tests/emulator"
)

// inMIG is so many GPUs of a model that begin in MIG mode.
func inMIG(model string, count int) emulator.Spec {
	spec := emulator.Spec{Model: model, Count: count}
	for i := range count {
		spec.GPUs = append(spec.GPUs, emulator.GPUSpec{Index: i, MIG: true})
	}
	return spec
}

func migOf(t testing.TB, d *nvml.Driver, u gpu.UUID) gpu.MIG {
	t.Helper()
	m, err := d.MIG(wait(t), u)
	try(t, err)
	return m
}

// stand says what stands on a GPU, as the driver under test lists it.
func stand(t testing.TB, d *nvml.Driver, u gpu.UUID) string {
	t.Helper()
	var all []string
	for _, in := range migOf(t, d, u).Instances {
		s := fmt.Sprintf("%s@%d", in.Profile, in.Start)
		if strings.Contains(in.Profile, "c.") {
			s += fmt.Sprintf(".%d", in.CIStart)
		}
		if in.CI < 0 {
			s += " empty"
		}
		if in.Busy {
			s += " busy"
		}
		all = append(all, s)
	}
	return strings.Join(all, ", ")
}

// really says what stands on a GPU in the world's own words.
func (n *node) really(index int) string {
	var all []string
	for _, gi := range n.State().GPUs[index].MIG.Instances {
		s := fmt.Sprintf("%s@%d:", gi.Profile, gi.Start)
		for _, ci := range gi.Compute {
			s += fmt.Sprintf(" %s.%d", ci.Profile, ci.Start)
		}
		all = append(all, s)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// allCalls counts all of this process's calls.
func (n *node) allCalls() (total int) {
	for _, c := range n.Calls(os.Getpid()) {
		total += int(c.Count)
	}
	return total
}

func create(t testing.TB, d *nvml.Driver, u gpu.UUID, profile string, at gpu.Placement, ci int) gpu.Instance {
	t.Helper()
	in, err := d.CreateInstance(wait(t), u, profile, at, ci)
	try(t, err)
	return in
}

func at(start, size int) gpu.Placement { return gpu.Placement{Start: start, Size: size} }

// Each profile of each model, at each place that the driver tells, alone on the
// card: made where it was asked for, listed as it was made, with the nodes that
// the driver says, and gone again.
func TestEachProfileAtEachPlace(t *testing.T) {
	models := []string{"A100-SXM4-80GB", "A30", "RTX-PRO-6000"}
	if !testing.Short() { // make test-all has all
		models = append(models, "A100-SXM4-40GB", "H100-80GB", "H200-141GB", "B200")
	}
	for _, model := range models {
		t.Run(model, func(t *testing.T) {
			n := emulate(t, inMIG(model, 2))
			d := open(t, n)
			dev := inventory(t, d).GPUs[1]
			if len(dev.MIG.Profiles) == 0 || !dev.MIG.Enabled || dev.MIG.Pending != nil {
				t.Fatalf("MIG is %+v", dev.MIG)
			}
			for _, p := range dev.MIG.Profiles {
				if p.Engines == nil {
					t.Errorf("%s has no count of engines", p.Name)
				}
				for _, place := range p.Placements {
					in := create(t, d, dev.UUID, p.Name, place, 0)
					m := migOf(t, d, dev.UUID)
					if len(m.Instances) != 1 {
						t.Fatalf("made %+v, and there is %+v", in, m.Instances)
					}
					in.UUID = m.Instances[0].UUID // is told by MIG alone
					if m.Instances[0] != in || in.Profile != p.Name || in.Placement != place || in.UUID == "" || in.CI < 0 {
						t.Fatalf("made %+v, and there is %+v", in, m.Instances)
					}
					if inv := inventory(t, d); !slices.Equal(inv.GPUs[1].MIG.Instances, m.Instances) || len(inv.GPUs[0].MIG.Instances) > 0 {
						t.Errorf("the inventory has %+v, MIG %+v", inv.GPUs[1].MIG.Instances, m.Instances)
					}
					gi := n.State().GPUs[1].MIG.Instances[0]
					if gi.Start != place.Start || gi.Compute[0].UUID != string(in.UUID) {
						t.Errorf("made %+v, which is really %+v", in, gi)
					}
					nodes, err := d.Capabilities(dev.Minor, in.GI, in.CI)
					try(t, err)
					for i, minor := range []int{gi.Minor, gi.Compute[0].Minor} {
						path := fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor)
						if len(nodes) != 2 || nodes[i].Path != path {
							t.Fatalf("nodes %+v, want %s", nodes, path)
						}
						var node unix.Stat_t
						if err := unix.Stat(filepath.Join(driverDir, path), &node); err != nil || unix.Minor(node.Rdev) != uint32(minor) {
							t.Errorf("%s: minor %d, %v", path, unix.Minor(node.Rdev), err)
						}
					}
					try(t, d.DestroyInstance(wait(t), dev.UUID, in))
					if got := n.really(1); got != "" {
						t.Fatalf("after %s at %+v is gone there is %s", p.Name, place, got)
					}
				}
			}
		})
	}
}

func TestSplits(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	var made []gpu.Instance
	for _, s := range []struct {
		profile   string
		at        gpu.Placement
		ci        int
		minors    int
		standing  string
		standsNow string
	}{
		{"1c.3g.40gb", at(4, 4), 2, 0, "1c.3g.40gb@4.2", "3g.40gb@4: 1c.3g.40gb.2"},
		{"2c.3g.40gb", at(4, 4), 0, 0, "2c.3g.40gb@4.0, 1c.3g.40gb@4.2", "3g.40gb@4: 1c.3g.40gb.2 2c.3g.40gb.0"},
		{"2c.4g.40gb", at(0, 4), 2, 0, "2c.4g.40gb@0.2, 2c.3g.40gb@4.0, 1c.3g.40gb@4.2", "3g.40gb@4: 1c.3g.40gb.2 2c.3g.40gb.0, 4g.40gb@0: 2c.4g.40gb.2"},
	} {
		in := create(t, d, u, s.profile, s.at, s.ci)
		if in.Profile != s.profile || in.CIStart != s.ci {
			t.Errorf("made %+v, want %s from slice %d", in, s.profile, s.ci)
		}
		made = append(made, in)
		if got := stand(t, d, u); got != s.standing || n.really(0) != s.standsNow {
			t.Errorf("stands %s, really %s; want %s", got, n.really(0), s.standing)
		}
	}
	// The GPU instance goes with its last compute instance, in whatever order.
	try(t, d.DestroyInstance(wait(t), u, made[0]))
	if got := stand(t, d, u); got != "2c.4g.40gb@0.2, 2c.3g.40gb@4.0" {
		t.Errorf("stands %s", got)
	}
	try(t, d.DestroyInstance(wait(t), u, made[1]))
	if got := n.really(0); got != "4g.40gb@0: 2c.4g.40gb.2" {
		t.Errorf("stands %s", got)
	}
	// A compute instance that has the number of one that is gone is another one.
	other := create(t, d, u, "1c.4g.40gb", at(0, 4), 0)
	gone := other
	gone.CIStart = 1
	if err := d.DestroyInstance(wait(t), u, gone); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("destroy one in another's place: %v, want ErrNotFound", err)
	}
	for _, in := range []gpu.Instance{other, made[2]} {
		try(t, d.DestroyInstance(wait(t), u, in))
	}
	if got := n.really(0); got != "" {
		t.Errorf("stands %s", got)
	}
}

// What cannot be done is refused in terms that a caller can tell apart, says
// what, where and what to do, and changes nothing.
func TestInstanceRefusals(t *testing.T) {
	spec := inMIG("A100-SXM4-80GB", 2)
	spec.GPUs[1].MIG = false
	n := emulate(t, spec)
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	u := gpus[0].UUID
	one := create(t, d, u, "1g.10gb", at(6, 1), 0)
	me := create(t, d, u, "1g.10gb+me", at(0, 1), 0)
	part := create(t, d, u, "1c.2g.20gb", at(2, 2), 1)
	try(t, n.AddProcess(emulator.Process{PID: os.Getpid(), GPU: 0, Kind: emulator.Compute, GI: one.GI, CI: one.CI, MiB: 100}))
	before := n.really(0)
	const standing = "1g.10gb+me@0, 1c.2g.20gb@2.1, 1g.10gb@6 busy"
	if got := stand(t, d, u); got != standing {
		t.Fatalf("stands %s, want %s", got, standing)
	}
	moved, renumbered := one, one
	moved.Start, renumbered.GI = 5, me.GI
	for _, c := range []struct {
		name string
		do   func() error
		want error
		said []string
	}{
		{"a place that is taken", creation(t, d, u, "3g.40gb", at(4, 4), 0), gpu.ErrNoRoom, []string{"create 3g.40gb@4 on " + string(u), "destroy the instances there"}},
		{"one more than the card has", creation(t, d, u, "1g.10gb+me", at(5, 1), 0), gpu.ErrNoRoom, []string{"create 1g.10gb+me@5 on " + string(u)}},
		{"a compute slice that is taken", creation(t, d, u, "2c.2g.20gb", at(2, 2), 0), gpu.ErrNoRoom, []string{"@2", "compute instances"}},
		{"all of a GPU instance of which a part is taken", creation(t, d, u, "2g.20gb", at(2, 2), 0), gpu.ErrNoRoom, []string{"create 2g.20gb@2", "compute instances"}},
		{"no place of the profile", creation(t, d, u, "3g.40gb", at(1, 4), 0), gpu.ErrInvalid, []string{"create 3g.40gb@1", "{0 4} {4 4}"}},
		{"no slice of the split", creation(t, d, u, "1c.2g.20gb", at(4, 2), 2), gpu.ErrInvalid, []string{"create 1c.2g.20gb@4.2"}},
		{"no such split", creation(t, d, u, "3c.2g.20gb", at(4, 2), 0), gpu.ErrInvalid, []string{"compute instance of 3 compute slices"}},
		{"no such profile", creation(t, d, u, "1g.5gb", at(4, 1), 0), gpu.ErrInvalid, []string{"1g.5gb", "3g.40gb"}},
		{"MIG is off", creation(t, d, gpus[1].UUID, "1g.10gb", at(4, 1), 0), gpu.ErrNotSupported, []string{"create 1g.10gb@4 on " + string(gpus[1].UUID), "MIG mode"}},
		{"no such GPU", creation(t, d, "GPU-x", "1g.10gb", at(4, 1), 0), gpu.ErrNotFound, []string{"create 1g.10gb@4 on GPU-x"}},
		{"destroy one in use", func() error { return d.DestroyInstance(wait(t), u, one) }, gpu.ErrInUse, []string{"destroy 1g.10gb@6 on " + string(u), "end what runs on it"}},
		{"destroy one that moved", func() error { return d.DestroyInstance(wait(t), u, moved) }, gpu.ErrNotFound, []string{"destroy 1g.10gb@5"}},
		{"destroy one with another's number", func() error { return d.DestroyInstance(wait(t), u, renumbered) }, gpu.ErrNotFound, []string{"another one now"}},
		{"destroy none", func() error {
			return d.DestroyInstance(wait(t), u, gpu.Instance{Profile: "1g.10gb", Placement: at(5, 1), GI: 14})
		}, gpu.ErrNotFound, []string{"GPU instance 14"}},
		{"destroy as empty what is not", func() error {
			return d.DestroyInstance(wait(t), u, gpu.Instance{Profile: "2g.20gb", Placement: at(2, 2), GI: part.GI, CI: -1})
		}, gpu.ErrInUse, []string{"destroy 2g.20gb@2"}},
		{"destroy on no GPU", func() error { return d.DestroyInstance(wait(t), "GPU-x", one) }, gpu.ErrNotFound, nil},
		{"read no GPU", func() error { _, err := d.MIG(wait(t), "GPU-x"); return err }, gpu.ErrNotFound, nil},
		{"switch MIG off over instances", func() error { return d.SetMIGMode(wait(t), u, false) }, gpu.ErrInUse, []string{"switch MIG off on " + string(u), "destroy its instances"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.do()
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			for _, said := range c.said {
				if err == nil || !strings.Contains(err.Error(), said) {
					t.Errorf("%v does not say %q", err, said)
				}
			}
			if now := n.really(0); now != before {
				t.Errorf("there is %s, and was %s", now, before)
			}
			if got := stand(t, d, u); got != standing {
				t.Errorf("stands %s, want %s", got, standing)
			}
		})
	}
	// What stands as it is asked for is there, whoever made it.
	for _, in := range []gpu.Instance{one, me, part} {
		again := create(t, d, u, in.Profile, in.Placement, in.CIStart)
		in.Busy, in.UUID = in.GI == one.GI, again.UUID
		if again != in || again.UUID == "" {
			t.Errorf("asked for again: %+v, want %+v", again, in)
		}
	}
	if now := n.really(0); now != before {
		t.Errorf("there is %s, and was %s", now, before)
	}
}

func creation(t *testing.T, d *nvml.Driver, u gpu.UUID, profile string, at gpu.Placement, ci int) func() error {
	return func() error {
		in, err := d.CreateInstance(wait(t), u, profile, at, ci)
		if err != nil && in != (gpu.Instance{}) {
			t.Errorf("an instance %+v beside an error", in)
		}
		return err
	}
}

// A GPU instance without compute instance is listed, taken up, and removed.
func TestEmptyGPUInstances(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	try(t, n.CreateInstance(0, "3g.40gb", 4, true))
	try(t, n.CreateInstance(0, "1g.10gb", 0, true))
	if got := stand(t, d, u); got != "1g.10gb@0 empty, 3g.40gb@4 empty" {
		t.Fatalf("stands %s", got)
	}
	orphans := migOf(t, d, u).Instances
	if orphans[1].UUID != "" || orphans[1].GI < 0 || orphans[1].CIStart != 0 {
		t.Errorf("an empty one is %+v", orphans[1])
	}
	serial := n.State().GPUs[0].MIG.Instances[0].Serial
	if n.State().GPUs[0].MIG.Instances[0].Start != 4 {
		serial = n.State().GPUs[0].MIG.Instances[1].Serial
	}
	in := create(t, d, u, "1c.3g.40gb", at(4, 4), 1)
	if got := stand(t, d, u); got != "1g.10gb@0 empty, 1c.3g.40gb@4.1" {
		t.Errorf("stands %s", got)
	}
	if !slices.ContainsFunc(n.State().GPUs[0].MIG.Instances, func(gi emulator.GPUInstanceState) bool { return gi.Serial == serial }) {
		t.Error("the empty one was not taken up, but made anew")
	}
	try(t, d.DestroyInstance(wait(t), u, orphans[0]))
	try(t, d.DestroyInstance(wait(t), u, in))
	if got := n.really(0); got != "" {
		t.Errorf("stands %s", got)
	}
	if err := d.DestroyInstance(wait(t), u, orphans[0]); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("destroyed twice: %v, want ErrNotFound", err)
	}
}

// For every k, the k-th driver call of a step fails: a creation leaves nothing,
// what could not be destroyed stands as before, and the same step then succeeds.
func TestEachCallFails(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	create(t, d, u, "1g.10gb", at(0, 1), 0)
	create(t, d, u, "1c.2g.20gb", at(2, 2), 0)
	base := n.really(0)
	for i, c := range []struct {
		profile string
		at      gpu.Placement
		ci      int
	}{{"3g.40gb", at(4, 4), 0}, {"1c.3g.40gb", at(4, 4), 1}, {"1c.2g.20gb", at(2, 2), 1}} {
		for j, code := range []emulator.Return{emulator.Unknown, emulator.InUse, emulator.InsufficientResources, emulator.InvalidArgument, emulator.NotFound} {
			if testing.Short() && (i+j)%3 > 0 {
				continue // each code once; make test-all has all
			}
			t.Run(fmt.Sprintf("%s/%v", c.profile, code), func(t *testing.T) {
				failedAt := map[string]int{}
				for _, step := range []string{"create", "destroy"} {
					for k := 1; ; k++ {
						var in gpu.Instance
						if step == "destroy" {
							in = create(t, d, u, c.profile, c.at, c.ci)
						}
						want := n.really(0)
						calls := n.allCalls()
						try(t, n.Inject(emulator.Fault{Call: "nvml*", Code: code, Skip: k - 1, Count: 1}))
						var err error
						if step == "create" {
							in, err = d.CreateInstance(wait(t), u, c.profile, c.at, c.ci)
						} else {
							err = d.DestroyInstance(wait(t), u, in)
						}
						calls = n.allCalls() - calls
						n.Clear()
						now := n.really(0)
						switch {
						case err == nil && step == "destroy" && now != base, err != nil && now != want:
							t.Fatalf("call %d of %s fails: %v; there is %s, want %s", k, step, err, now, want)
						case err != nil && (strings.Contains(err.Error(), "left behind") || !strings.Contains(err.Error(), c.profile) || !strings.Contains(err.Error(), string(u))):
							t.Errorf("call %d of %s fails: %v", k, step, err)
						}
						if err != nil {
							failedAt[step]++
						}
						// The same again, as a loop that looks first would do it.
						if step == "create" && err != nil {
							in = create(t, d, u, c.profile, c.at, c.ci)
						}
						if step == "create" || err != nil {
							if again := d.DestroyInstance(wait(t), u, in); again != nil {
								t.Fatalf("call %d of %s failed with %v, and then: %v", k, step, err, again)
							}
						}
						if now := n.really(0); now != base {
							t.Fatalf("call %d of %s failed with %v; in the end there is %s, want %s", k, step, err, now, base)
						}
						if k > calls {
							break
						}
					}
				}
				if failedAt["create"] == 0 || failedAt["destroy"] == 0 {
					t.Errorf("failed %v times: the test shows nothing", failedAt)
				}
			})
		}
	}
}

// For every k, MIG's k-th call fails: then it says so, and the next one is whole.
// It never tells half of what stands.
func TestEachCallOfAReadingFails(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	for i := range 3 {
		create(t, d, u, "1c.3g.40gb", at(4, 4), i)
	}
	create(t, d, u, "1g.10gb", at(1, 1), 0)
	try(t, n.CreateInstance(0, "2g.20gb", 2, true))
	want := stand(t, d, u)
	for _, code := range []emulator.Return{emulator.Unknown, emulator.NotFound} {
		for k, calls := 1, 1; k <= calls; k++ {
			before := n.allCalls()
			try(t, n.Inject(emulator.Fault{Call: "nvml*", Code: code, Skip: k - 1, Count: 1}))
			m, err := d.MIG(wait(t), u)
			calls = max(calls, n.allCalls()-before)
			n.Clear()
			if err == nil && len(m.Instances) != 5 && code == emulator.Unknown {
				t.Errorf("call %d says %v, and there are %d instances: %+v", k, code, len(m.Instances), m.Instances)
			}
			if got := stand(t, d, u); got != want {
				t.Fatalf("stands %s, want %s", got, want)
			}
		}
	}
}

// One question in fifty fails, of the dozens that a reading is: no GPU is unreadable
// for it.
func TestReadingsGoOn(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 2))
	d := open(t, n)
	for _, dev := range inventory(t, d).GPUs {
		fill(t, d, dev.UUID)
	}
	before := n.allCalls()
	want := inventory(t, d)
	if took := n.allCalls() - before; took < 50 {
		t.Fatalf("a reading of two full GPUs is %d calls: too few for the test to say anything", took)
	}
	try(t, n.Inject(emulator.Fault{Call: "nvmlGpuInstance*", Code: emulator.Unknown, Every: 50}))
	for range 50 {
		for i, dev := range inventory(t, d).GPUs {
			if dev.Fault != "" || !reflect.DeepEqual(dev.MIG.Instances, want.GPUs[i].MIG.Instances) {
				t.Fatalf("GPU %d: %+v, want %+v; fault %q", i, dev.MIG.Instances, want.GPUs[i].MIG.Instances, dev.Fault)
			}
		}
	}
}

// A creation that takes very long keeps nobody waiting but those who want the
// same GPU, and ends as it was meant to, whoever has left.
func TestLongCreation(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 2))
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	const call = "nvmlDeviceCreateGpuInstanceWithPlacement"
	zero := 0
	try(t, n.Inject(emulator.Fault{Call: call, GPU: &zero, Hang: true}))
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := d.CreateInstance(ctx, gpus[0].UUID, "3g.40gb", at(4, 4), 0)
		left <- err
	}()
	await(t, "the creation is under way", func() bool { return n.calls(call) == 1 })
	everythingElse := func() {
		t.Helper()
		for range 3 {
			if inv := inventory(t, d); inv.GPUs[0].Fault != "" || inv.GPUs[1].Fault != "" {
				t.Errorf("faults %q, %q", inv.GPUs[0].Fault, inv.GPUs[1].Fault)
			}
			if _, err := d.Health(wait(t), gpus[0].UUID); err != nil {
				t.Error(err)
			}
			in := create(t, d, gpus[1].UUID, "3g.40gb", at(4, 4), 0)
			try(t, d.DestroyInstance(wait(t), gpus[1].UUID, in))
		}
		l.hears(t, n, 0, gpus[0].UUID)
	}
	everythingElse()
	leave()
	if err := <-left; !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
		t.Errorf("one who leaves: %v, want ErrTimeout", err)
	}
	everythingElse()
	impatient, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := d.MIG(impatient, gpus[0].UUID); !errors.Is(err, gpu.ErrTimeout) || !strings.Contains(err.Error(), "create 3g.40gb@4") {
		t.Errorf("the next one on that GPU: %v, want ErrTimeout that names the creation", err)
	}
	if err := d.Reset(impatient, gpus[1].UUID); !errors.Is(err, gpu.ErrTimeout) || !strings.Contains(err.Error(), "create 3g.40gb@4") {
		t.Errorf("a reset of another GPU: %v, want ErrTimeout that names the creation", err)
	}
	everythingElse()
	next := make(chan string, 1)
	go func() {
		m, err := d.MIG(wait(t), gpus[0].UUID)
		next <- fmt.Sprintf("%d %v", len(m.Instances), err)
	}()
	n.Clear()
	if got := <-next; got != "1 <nil>" {
		t.Errorf("the next one on that GPU sees %s, want the instance", got)
	}
	if got := n.really(0); got != "3g.40gb@4: 3g.40gb.0" {
		t.Errorf("there is %s", got)
	}
}

// Work on instances does not ask whether readings get through.
func TestWorkBesideAHungReading(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 2))
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	const call = "nvmlDeviceGetMemoryInfo_v2"
	before := n.calls(call)
	try(t, n.Inject(emulator.Fault{Call: call, Hang: true}))
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := d.Inventory(ctx)
		left <- err
	}()
	await(t, "the reading hangs", func() bool { return n.calls(call) > before })
	leave()
	if err := <-left; !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("the reading: %v, want ErrTimeout", err)
	}
	await(t, "it is taken for hung", func() bool {
		_, err := d.Memory(t.Context(), gpus[0].UUID)
		return errors.Is(err, gpu.ErrTimeout)
	})
	for _, dev := range gpus {
		in := create(t, d, dev.UUID, "3g.40gb", at(4, 4), 0)
		if got := stand(t, d, dev.UUID); got != "3g.40gb@4" {
			t.Errorf("stands %s", got)
		}
		if _, err := d.Capabilities(dev.Minor, in.GI, in.CI); err != nil {
			t.Error(err)
		}
		try(t, d.DestroyInstance(wait(t), dev.UUID, in))
	}
	n.Clear()
	await(t, "readings get through again", func() bool {
		_, err := d.Inventory(wait(t))
		return err == nil
	})
}

// While instances come and go, readings see a sound GPU.
func TestReadingsBesideChanges(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 40 {
			profile, place, ci := "1g.10gb", at(i%7, 1), 0
			if i%2 == 0 {
				profile, place, ci = "1c.3g.40gb", at(4, 4), 1
			}
			in, err := d.CreateInstance(wait(t), u, profile, place, ci)
			if err == nil {
				err = d.DestroyInstance(wait(t), u, in)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for readings := 0; ; readings++ {
		select {
		case <-done:
			t.Logf("%d readings", readings)
			return
		default:
		}
		if inv := inventory(t, d); inv.GPUs[0].Fault != "" {
			t.Fatalf("a fault: %s", inv.GPUs[0].Fault)
		}
		if m := migOf(t, d, u); len(m.Instances) > 0 && m.Instances[0].CI < 0 {
			t.Errorf("MIG saw work that was not done: %+v", m.Instances)
		}
	}
}

// However many of its questions come too late because the agent itself makes and destroys
// instances meanwhile, a reading sees a sound GPU. Here each question takes longer than
// an instance stands.
func TestReadingsThatEveryChangeCrosses(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	try(t, n.Inject(emulator.Fault{Call: "nvmlGpuInstanceGetInfo", Delay: 2 * time.Millisecond}))
	try(t, n.Inject(emulator.Fault{Call: "nvmlDeviceGetGpuInstanceId", Delay: 20 * time.Millisecond}))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			in, err := d.CreateInstance(wait(t), u, "1g.10gb", at(i%7, 1), 0)
			if err == nil {
				err = d.DestroyInstance(wait(t), u, in)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for range 20 {
		if inv := inventory(t, d); inv.GPUs[0].Fault != "" {
			t.Errorf("a fault: %s", inv.GPUs[0].Fault)
			break
		}
	}
	stop()
	<-done
}

// Close does not pull the library away under a creation, and can be repeated.
func TestCloseDuringACreation(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	const call = "nvmlGpuInstanceCreateComputeInstance"
	try(t, n.Inject(emulator.Fault{Call: call, Hang: true}))
	made := make(chan error, 1)
	go func() {
		_, err := d.CreateInstance(wait(t), u, "3g.40gb", at(4, 4), 0)
		made <- err
	}()
	await(t, "the creation is under way", func() bool { return n.calls(call) == 1 })
	if err := d.Close(); !errors.Is(err, gpu.ErrTimeout) || !strings.Contains(err.Error(), "create 3g.40gb@4") {
		t.Fatalf("closed under a creation: %v, want ErrTimeout that names it", err)
	}
	if _, err := d.MIG(wait(t), "GPU-x"); !errors.Is(err, gpu.ErrNoDriver) {
		t.Errorf("a closed driver: %v, want ErrNoDriver", err)
	}
	n.Clear()
	if err := <-made; err != nil {
		t.Errorf("the creation: %v", err)
	}
	try(t, d.Close())
	if got := n.State().Sessions; len(got) > 0 {
		t.Errorf("after Close the driver is open in %v", got)
	}
}

// Two steps of a destruction fail, and what is left is said, listed and removed.
func TestHalfDestroyed(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	for _, as := range []string{"listed", "before"} {
		in := create(t, d, u, "3g.40gb", at(4, 4), 0)
		for _, call := range []string{"nvmlGpuInstanceDestroy", "nvmlGpuInstanceCreateComputeInstance"} {
			try(t, n.Inject(emulator.Fault{Call: call, Code: emulator.Unknown}))
		}
		if err := d.DestroyInstance(wait(t), u, in); !errors.Is(err, gpu.ErrDriver) || !strings.Contains(err.Error(), "is left empty") {
			t.Errorf("%v does not say what is left", err)
		}
		n.Clear()
		if got := stand(t, d, u); got != "3g.40gb@4 empty" {
			t.Errorf("stands %s", got)
		}
		if as == "listed" {
			in = migOf(t, d, u).Instances[0]
		}
		try(t, d.DestroyInstance(wait(t), u, in))
		if got := n.really(0); got != "" {
			t.Errorf("there is %s", got)
		}
	}
}

// beKilled marks the process that TestKilledInBetween starts.
const beKilled = "GPU_TESTS_NVML_KILLED"

// An agent that dies between two steps leaves what the next one sees and can go
// on with.
func TestKilledInBetween(t *testing.T) {
	if root := os.Getenv(beKilled); root != "" {
		d, err := nvml.Open(wait(t), nvml.Options{DriverRoot: root, SysRoot: filepath.Join(root, "sys"), ProcRoot: filepath.Join(root, "proc")})
		try(t, err)
		u := inventory(t, d).GPUs[0].UUID
		if in := migOf(t, d, u).Instances; len(in) > 0 {
			try(t, d.DestroyInstance(wait(t), u, in[0]))
		} else {
			create(t, d, u, "3g.40gb", at(4, 4), 0)
		}
		t.Fatal("it should be dead by now")
	}
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	dies := func(call string) {
		t.Helper()
		try(t, n.Inject(emulator.Fault{Call: call, Hang: true}))
		cmd := exec.CommandContext(wait(t), os.Args[0], "-test.run", "^TestKilledInBetween$")
		cmd.Env = append(os.Environ(), beKilled+"="+driverDir)
		try(t, cmd.Start())
		await(t, "the other process calls "+call, func() bool {
			return slices.ContainsFunc(n.Calls(cmd.Process.Pid), func(c emulator.CallCount) bool { return c.Call == call })
		})
		try(t, cmd.Process.Kill())
		if err := cmd.Wait(); err == nil {
			t.Fatal("the other process was not killed")
		}
		await(t, "the driver has noticed", func() bool { return len(n.State().Sessions) == 0 })
		n.Clear()
	}
	dies("nvmlGpuInstanceCreateComputeInstance")
	if got := n.really(0); got != "3g.40gb@4:" {
		t.Fatalf("there is %q", got)
	}
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	if got := stand(t, d, u); got != "3g.40gb@4 empty" {
		t.Errorf("stands %s", got)
	}
	create(t, d, u, "3g.40gb", at(4, 4), 0)
	try(t, d.Close())
	dies("nvmlGpuInstanceDestroy")
	d = open(t, n)
	left := migOf(t, d, u).Instances
	if len(left) != 1 || left[0].CI != -1 {
		t.Fatalf("stands %+v", left)
	}
	try(t, d.DestroyInstance(wait(t), u, left[0]))
	if got := n.really(0); got != "" {
		t.Errorf("there is %s", got)
	}
}

func mode(t testing.TB, d *nvml.Driver, u gpu.UUID) string {
	t.Helper()
	m := migOf(t, d, u)
	word := map[bool]string{true: "on", false: "off"}
	if m.Pending == nil {
		return word[m.Enabled]
	}
	return word[m.Enabled] + ", then " + word[*m.Pending]
}

func TestModeOfHopper(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 2, GPUs: []emulator.GPUSpec{{Index: 1, Model: "V100-SXM2-32GB"}}})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	u := gpus[0].UUID
	for _, c := range []struct {
		on   bool
		want string
	}{{true, "on"}, {true, "on"}, {false, "off"}} {
		try(t, d.SetMIGMode(wait(t), u, c.on))
		if got := mode(t, d, u); got != c.want {
			t.Errorf("MIG is %s, want %s", got, c.want)
		}
	}
	l.hears(t, n, 0, u)
	try(t, n.AddProcess(emulator.Process{PID: os.Getpid(), GPU: 0, Kind: emulator.Compute, MiB: 100}))
	if err := d.SetMIGMode(wait(t), u, true); !errors.Is(err, gpu.ErrInUse) || !strings.Contains(err.Error(), string(u)) {
		t.Errorf("with a process on it: %v, want ErrInUse", err)
	}
	l.hears(t, n, 0, u)
	if err := d.SetMIGMode(wait(t), gpus[1].UUID, true); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("on a card without MIG: %v, want ErrNotSupported", err)
	}
	if m := migOf(t, d, gpus[1].UUID); m.Capable || m.Enabled || len(m.Profiles) > 0 {
		t.Errorf("a card without MIG has %+v", m)
	}
}

// A card whose mode waits for a reset, beside one that works.
func TestReset(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 3})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	u := gpus[0].UUID
	try(t, n.AddProcess(emulator.Process{PID: os.Getpid(), GPU: 1, Kind: emulator.Compute, MiB: 100}))
	reset := func() { t.Helper(); try(t, d.Reset(wait(t), u)) }

	try(t, d.SetMIGMode(wait(t), u, true))
	if got := mode(t, d, u); got != "off, then on" {
		t.Fatalf("MIG is %s", got)
	}
	reset()
	if got := mode(t, d, u); got != "on" {
		t.Errorf("MIG is %s", got)
	}
	create(t, d, u, "7g.80gb", at(0, 8), 0)
	l.hears(t, n, 2, gpus[2].UUID)
	reset() // takes its instances with it
	if got := stand(t, d, u); got != "" || mode(t, d, u) != "on" {
		t.Errorf("stands %s, MIG is %s", got, mode(t, d, u))
	}
	l.hears(t, n, 0, u)
	if inv := inventory(t, d); inv.GPUs[0].Fault != "" || inv.GPUs[1].Fault != "" || len(n.State().Processes) != 1 {
		t.Errorf("the inventory is %+v, processes %+v", inv, n.State().Processes)
	}

	// Clients are in the way, and everything else goes on after the refusal.
	if err := d.Reset(wait(t), gpus[1].UUID); !errors.Is(err, gpu.ErrInUse) || !strings.Contains(err.Error(), "reset "+string(gpus[1].UUID)) {
		t.Errorf("with a process on it: %v, want ErrInUse", err)
	}
	monitor := n.Open(emulator.Opening{PID: 1})
	monitor.Init()
	if err := d.Reset(wait(t), u); !errors.Is(err, gpu.ErrInUse) {
		t.Errorf("with a monitor on it: %v, want ErrInUse", err)
	}
	monitor.Close()
	if err := d.Reset(wait(t), "GPU-00000000-1111-2222-3333-444444444444"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("no such GPU: %v, want ErrNotFound", err)
	}
	l.hears(t, n, 0, u)
	create(t, d, u, "3g.40gb", at(4, 4), 0)
}

// A reset that lasts: others wait for it, and one who leaves does not end it.
func TestLongReset(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	u := gpus[0].UUID
	try(t, d.SetMIGMode(wait(t), u, true))
	const call = "gpuEmulatorReset"
	try(t, n.Inject(emulator.Fault{Call: call, Hang: true}))
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() { left <- d.Reset(ctx, u) }()
	await(t, "the reset is under way", func() bool {
		return slices.ContainsFunc(n.Calls(0), func(c emulator.CallCount) bool { return c.Call == call })
	})
	impatient, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := d.Inventory(impatient); !errors.Is(err, gpu.ErrTimeout) || !strings.Contains(err.Error(), "reset "+string(u)) {
		t.Errorf("a reading: %v, want ErrTimeout that names the reset", err)
	}
	if _, err := d.MIG(impatient, gpus[1].UUID); !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("work on another GPU: %v, want ErrTimeout", err)
	}
	if err := d.SetTimeSlice(impatient, gpus[1].UUID, gpu.TimeSliceShort); !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("a time slice: %v, want ErrTimeout", err)
	}
	leave()
	if err := <-left; !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
		t.Errorf("one who leaves: %v, want ErrTimeout", err)
	}
	n.Clear()
	await(t, "the driver is back", func() bool {
		_, err := d.Inventory(wait(t))
		return err == nil
	})
	if got := mode(t, d, u); got != "on" {
		t.Errorf("MIG is %s, want it on: the reset was not done", got)
	}
	l.hears(t, n, 1, gpus[1].UUID)
}

// Instances come and go, a GPU is reset, one is lost and comes back, all are read
// and listened to, at the same time: nothing waits for ever, and what is told in
// the end is true.
func TestAllAtOnce(t *testing.T) {
	spec := inMIG("A100-SXM4-80GB", 4)
	spec.GPUs[3].MIG = false
	n := emulate(t, spec)
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	work := []func(round int) error{
		func(int) error { return d.Reset(wait(t), gpus[0].UUID) },
		func(round int) error { return d.SetMIGMode(wait(t), gpus[3].UUID, round%2 == 0) },
		func(round int) error {
			if err := n.Lose(2); err != nil {
				return err
			}
			if err := d.SetTimeSlice(wait(t), gpus[1].UUID, gpu.TimeSliceDefault); err != nil {
				return err
			}
			return n.Restore(2)
		},
	}
	for _, start := range []int{0, 1, 2} {
		work = append(work, func(int) error {
			in, err := d.CreateInstance(wait(t), gpus[1].UUID, "1g.10gb", at(start, 1), 0)
			if err != nil {
				return err
			}
			return d.DestroyInstance(wait(t), gpus[1].UUID, in)
		})
	}
	done := make(chan error, len(work))
	for _, do := range work {
		go func() {
			for round := range 5 {
				if err := do(round); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for left := len(work); left > 0; {
		select {
		case err := <-done:
			if left--; err != nil {
				t.Error(err)
			}
		default:
			if _, err := d.Inventory(wait(t)); err != nil && !errors.Is(err, gpu.ErrNoDriver) {
				t.Error(err)
			}
		}
	}
	await(t, "all GPUs are sound", func() bool {
		inv := inventory(t, d)
		return !slices.ContainsFunc(inv.GPUs, func(dev gpu.Device) bool { return dev.Fault != "" })
	})
	for i := range gpus {
		l.hears(t, n, i, gpus[i].UUID)
		if got := n.really(i); got != "" || stand(t, d, gpus[i].UUID) != "" {
			t.Errorf("on GPU %d there is %s", i, got)
		}
	}
	if got := mode(t, d, gpus[3].UUID); got != "off, then on" {
		t.Errorf("MIG is %s", got)
	}
}

// A driver that cannot be taken up at once after a reset, or cannot be let go of
// before it.
func TestResetThatLosesTheDriver(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2})
	d := open(t, n)
	gpus := inventory(t, d).GPUs
	l := listen(t, n, d)
	for _, f := range []emulator.Fault{
		{Call: "nvmlInit_v2", Code: emulator.DriverNotLoaded, Skip: 1, Count: 3}, // the first is the tool's
		{Call: "nvmlShutdown", Code: emulator.OperatingSystem, Count: 1},
		{Call: "nvmlShutdown", Code: emulator.Unknown, Count: 1},
	} {
		try(t, n.Inject(f))
		err := d.Reset(wait(t), gpus[0].UUID)
		if (err != nil) != (f.Call == "nvmlShutdown") || err != nil && !strings.Contains(err.Error(), "reset "+string(gpus[0].UUID)) {
			t.Errorf("%s fails: %v", f.Call, err)
		}
		// Whatever came of it, nobody else is without a driver.
		if inv := inventory(t, d); inv.GPUs[0].Fault != "" || inv.GPUs[1].Fault != "" {
			t.Errorf("after %s failed the inventory is %+v", f.Call, inv)
		}
		n.Clear()
		for i := range gpus {
			l.hears(t, n, i, gpus[i].UUID)
		}
		if err := d.Reset(wait(t), gpus[0].UUID); err != nil {
			t.Errorf("after %s failed: %v; sessions %+v", f.Call, err, n.State().Sessions)
		}
	}
	try(t, d.SetMIGMode(wait(t), gpus[0].UUID, true))
	try(t, d.Reset(wait(t), gpus[0].UUID))
	create(t, d, gpus[0].UUID, "3g.40gb", at(4, 4), 0)
}

// Instances come and go at random while one driver call in ten fails: after each
// step there is what the step says, and all of it can be removed in the end.
func TestWalkWithFaults(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	dev := inventory(t, d).GPUs[0]
	u := dev.UUID
	const seed = 5
	r := rand.New(rand.NewPCG(seed, seed))
	var made, gone, refused, left int
	steps := 300
	if testing.Short() {
		steps = 150 // make test-all has all
	}
	for step := range steps {
		before, standing := n.really(0), migOf(t, d, u).Instances
		try(t, n.Inject(emulator.Fault{Call: "nvml*", Code: emulator.Unknown, Skip: r.IntN(10), Every: 10}))
		var err error
		var what string
		var want gpu.Instance
		creates := true
		if in := r.IntN(4 + len(standing)); in < len(standing) && len(standing) > 1 {
			creates, want = false, standing[in]
			what = fmt.Sprintf("destroy %+v", want)
			err = d.DestroyInstance(wait(t), u, want)
		} else {
			p := dev.MIG.Profiles[r.IntN(len(dev.MIG.Profiles))]
			want = gpu.Instance{Profile: p.Name, Placement: p.Placements[r.IntN(len(p.Placements))]}
			if p.Slices > 1 && p.Slices < 7 && r.IntN(2) == 0 {
				want.Profile, want.CIStart = "1c."+p.Name, r.IntN(p.Slices)
			}
			what = fmt.Sprintf("create %s at %+v, slice %d", want.Profile, want.Placement, want.CIStart)
			_, err = d.CreateInstance(wait(t), u, want.Profile, want.Placement, want.CIStart)
		}
		n.Clear()
		now := n.really(0)
		stands := slices.ContainsFunc(migOf(t, d, u).Instances, func(in gpu.Instance) bool {
			return in.Profile == want.Profile && in.Placement == want.Placement && in.CIStart == want.CIStart && (in.CI < 0) == (want.CI < 0)
		})
		switch {
		case err == nil && stands != creates:
			t.Fatalf("seed %d, step %d: %s succeeds; of %s that made %s", seed, step, what, before, now)
		case err == nil && creates:
			made++
		case err == nil:
			gone++
		case strings.Contains(err.Error(), "left"):
			left++
		default:
			refused++
			if now != before {
				t.Fatalf("seed %d, step %d: %s: %v; there is %s, and was %s", seed, step, what, err, now, before)
			}
		}
	}
	t.Logf("made %d, destroyed %d, refused %d, left something %d times", made, gone, refused, left)
	if made < 20 || gone < 20 {
		t.Errorf("made %d, destroyed %d: the walk shows nothing", made, gone)
	}
	for _, in := range migOf(t, d, u).Instances {
		try(t, d.DestroyInstance(wait(t), u, in))
	}
	if got := n.really(0); got != "" {
		t.Errorf("there is %s", got)
	}
}

// Some drivers tell placements only while MIG is on; what they tell then counts.
func TestPlacementsThatNeedTheMode(t *testing.T) {
	n := emulate(t, emulator.Spec{Model: "H100-80GB", Count: 1, MIG: emulator.MIGSpec{PlacementsNeedMode: true}})
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	if p := migOf(t, d, u).Profiles; len(p) == 0 || len(p[0].Placements) > 0 {
		t.Fatalf("with MIG off: %+v", p)
	}
	try(t, d.SetMIGMode(wait(t), u, true))
	for _, p := range inventory(t, d).GPUs[0].MIG.Profiles {
		if len(p.Placements) == 0 {
			t.Errorf("with MIG on %s has no placements", p.Name)
		}
	}
	create(t, d, u, "3g.40gb", at(4, 4), 0)
}

// fill puts seven instances on a GPU.
func fill(t testing.TB, d *nvml.Driver, u gpu.UUID) {
	t.Helper()
	for i := range 7 {
		create(t, d, u, "1g.10gb", at(i, 1), 0)
	}
}

// What the driver is asked for, at most. Each call is a system call or more, and
// some are slow while the card works.
func TestFewCalls(t *testing.T) {
	n := emulate(t, inMIG("A100-SXM4-80GB", 1))
	d := open(t, n)
	u := inventory(t, d).GPUs[0].UUID
	count := func(what string, most int, do func()) {
		t.Helper()
		before := n.allCalls()
		do()
		took := n.allCalls() - before
		t.Logf("%s: %d calls", what, took)
		if took > most {
			t.Errorf("%s took %d calls, want at most %d", what, took, most)
		}
	}
	fill(t, d, u)
	count("reading seven instances", 45, func() { migOf(t, d, u) })
	last := migOf(t, d, u).Instances[6]
	count("destroying one of seven", 6, func() { try(t, d.DestroyInstance(wait(t), u, last)) })
	count("creating the seventh", 8, func() { create(t, d, u, "1g.10gb", at(6, 1), 0) })
}

func BenchmarkMIG(b *testing.B) {
	n := emulate(b, inMIG("A100-SXM4-80GB", 1))
	d := open(b, n)
	u := inventory(b, d).GPUs[0].UUID
	fill(b, d, u)
	for b.Loop() {
		if _, err := d.MIG(b.Context(), u); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkInstance creates and destroys, on hardware that takes no time.
func BenchmarkInstance(b *testing.B) {
	n := emulate(b, inMIG("A100-SXM4-80GB", 1))
	d := open(b, n)
	u := inventory(b, d).GPUs[0].UUID
	for b.Loop() {
		in, err := d.CreateInstance(b.Context(), u, "3g.40gb", at(4, 4), 0)
		if err == nil {
			err = d.DestroyInstance(b.Context(), u, in)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

// TestProfilesAreReadOncePerKindOfCard: reading them is a third of the calls of a first
// inventory. Cards of another kind have their own.
func TestProfilesAreReadOncePerKindOfCard(t *testing.T) {
	reads := func(spec emulator.Spec) (n uint64, profiles []string) {
		node := emulate(t, spec)
		defer node.stop()
		d, err := nvml.Open(wait(t), node.opts)
		try(t, err)
		defer d.Close()
		for _, dev := range inventory(t, d).GPUs {
			var text string
			for _, p := range dev.MIG.Profiles {
				text += fmt.Sprintln(p.Name, p.ID, p.Memory, p.Max, *p.Engines, p.Placements)
			}
			profiles = append(profiles, text)
		}
		for _, c := range node.Calls(0) {
			if strings.Contains(c.Call, "GpuInstanceProfileInfo") || strings.Contains(c.Call, "PossiblePlacements") {
				n += c.Count
			}
		}
		return n, profiles
	}
	one, _ := reads(emulator.Spec{Model: "H100-80GB", Count: 1})
	eight, of := reads(emulator.Spec{Model: "H100-80GB", Count: 8})
	if one == 0 || eight != one || len(slices.Compact(of)) != 1 {
		t.Errorf("%d reads of profiles for eight cards of a kind, and %d for one; %q", eight, one, slices.Compact(of))
	}
	_, mixed := reads(emulator.Spec{Model: "H100-80GB", Count: 3, GPUs: []emulator.GPUSpec{{Index: 1, Model: "A30"}}})
	if mixed[0] != of[0] || mixed[2] != of[0] || mixed[1] == of[0] {
		t.Errorf("profiles of an A30 between two H100s: %q", mixed)
	}
}

// A Thor has no memory of its own, so its profiles and instances have none, and nothing else
// is different with them.
func TestInstancesWithoutMemory(t *testing.T) {
	n := emulate(t, inMIG("Thor", 1))
	d := open(t, n)
	g := inventory(t, d).GPUs[0]
	if g.Fault != "" || g.Memory != 0 || len(g.MIG.Profiles) != 7 {
		t.Fatalf("it is read as %+v", g)
	}
	create(t, d, g.UUID, "2g.0gb+gfx", gpu.Placement{Size: 2}, 0)
	small := create(t, d, g.UUID, "1g.0gb+me", gpu.Placement{Start: 2, Size: 1}, 0)
	if got, want := stand(t, d, g.UUID), "2g.0gb+gfx@0, 1g.0gb+me@2"; got != want {
		t.Errorf("there stand %s, want %s", got, want)
	}
	if _, err := d.CreateInstance(wait(t), g.UUID, "3g.0gb", gpu.Placement{Size: 3}, 0); !errors.Is(err, gpu.ErrNoRoom) {
		t.Errorf("all of it beside them: %v, want ErrNoRoom", err)
	}
	try(t, d.DestroyInstance(wait(t), g.UUID, small))
	if got, want := n.really(0), "2g.0gb+gfx@0: 2g.0gb+gfx.0"; got != want {
		t.Errorf("there really stand %s, want %s", got, want)
	}
}
