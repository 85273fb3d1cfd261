// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// taint is the reason for which a device is withdrawn, by the end of its name; empty where
// it is on offer.
func (s *scheduled) taint(t *testing.T, suffix string) string {
	t.Helper()
	_, d := s.Device(suffix)
	if d == nil {
		t.Fatalf("no slice has a device %s", suffix)
	}
	for _, taint := range d.Taints {
		if strings.HasSuffix(taint.Key, "/withdrawn") {
			return taint.Value
		}
	}
	return ""
}

// operations are what was done to the hardware since they were asked for last.
func (o *outside) operations() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	text := strings.Join(o.ops, ", ")
	o.ops = nil
	return text
}

// A dynamic GPU is what is asked of it first, and changes its MIG mode when nobody has it as
// something else. What is published does not change with it.
func TestDynamic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1)
		o.ampere, o.took, o.dra = true, time.Second, newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: dynamic"))
		defer b.end()
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, name := range []string{"gpu-00000000", "-shared", "-mig-1g10gb-0", "-mig-3g40gb-4", "-mig-7g80gb-0"} {
			if why := o.dra.taint(t, name); why != "" {
				t.Errorf("%s is tainted: %s", name, why)
			}
		}
		writes := o.dra.Writes()
		use := func(name, device string, gib int64, used int, want string) (end func()) {
			t.Helper()
			claim := o.dra.allocate(t, name, device, gib)
			if devices, err := o.dra.prepare(t.Context(), claim); err != nil || len(devices) != 1 || b.specOf(key(claim)) == nil {
				t.Fatalf("%s of %s: %+v, %v", name, device, devices, err)
			}
			if did := o.operations(); did != want {
				t.Errorf("for %s of %s: %q, want %q", name, device, did, want)
			}
			synctest.Wait()
			if g := b.Status().GPUs[0]; g.Mode != "dynamic" || g.API != "dra" || len(g.Holders) == 0 || g.Total != 4 || g.Used != used || g.Free != 4-used ||
				g.DeviceClass != "gpu-memory.example.com" || g.Resource != "" || g.Holders[0].Kind == "" {
				t.Errorf("status says %+v", g)
			}
			return func() {
				o.dra.Remove("ns", name)
				o.dra.unprepare(t, claim)
			}
		}
		use("a", "gpu-00000000", 0, 4, "")()
		one := use("b", "-mig-3g40gb-4", 0, 2, "0: mode true, 0: reset, 0: create 3g.40gb@4")
		two := use("c", "-mig-1g10gb-0", 0, 3, "0: create 1g.10gb@0")
		one()

		// A share comes while the last instance is ending: it waits, and does not fail.
		o.dra.Remove("ns", "c") // deleted by force
		claim := o.dra.allocate(t, "d", "-shared", 3)
		ready := make(chan error)
		go func() {
			_, err := o.dra.prepare(t.Context(), claim)
			ready <- err
		}()
		time.Sleep(10 * time.Second)
		if did := o.operations(); did != "" {
			t.Errorf("done under a holder: %s", did)
		}
		two()
		if err := <-ready; err != nil {
			t.Fatal(err)
		}
		if did := o.operations(); did != "0: destroy 1g.10gb@0, 0: destroy 3g.40gb@4, 0: mode false, 0: reset" {
			t.Errorf("for a share: %s", did)
		}
		use("e", "-shared", 1, 4, "")()
		o.dra.unprepare(t, claim)

		// Nobody has it: it stays as it is, for an hour and for a successor.
		time.Sleep(time.Hour)
		if did := o.operations(); did != "" || b.ledger.Held() {
			t.Errorf("done to an idle GPU: %s; held %v", did, b.ledger.Allocations())
		}
		if synctest.Wait(); o.dra.Writes() != writes {
			t.Errorf("%d writes of slices for claims", o.dra.Writes()-writes)
		}
	})
}

// A container of a whole GPU, or of shares, never finds it in MIG mode: its CDI file comes
// after the mode.
func TestDynamicGateIsShutWhileTheModeChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.took, o.dra = 20*time.Second, newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: dynamic"))
		defer b.end()
		time.Sleep(time.Minute)
		claim := o.dra.allocate(t, "a", "gpu-00000000", 0)
		ready := make(chan error)
		go func() {
			_, err := o.dra.prepare(t.Context(), claim)
			ready <- err
		}()
		time.Sleep(10 * time.Second)
		if synctest.Wait(); b.specOf(key(claim)) != nil {
			t.Error("the gate is open while the GPU leaves MIG mode")
		}
		if a, _ := b.ledger.Get(key(claim)); !strings.Contains(a.Cause.Message, "disable MIG mode") {
			t.Errorf("it is not said what it waits for: %+v", a.Cause)
		}
		if err := <-ready; err != nil || b.specOf(key(claim)) == nil {
			t.Error(err)
		}
	})
}

// A GPU that cannot be reset has what needs the other mode withdrawn, with the reason, and
// goes on being given out in the mode that it is in. What was begun is taken back.
func TestDynamicModeIsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1)
		o.ampere, o.resetErr, o.dra = true, errors.New("clients are on it"), newScheduled()
		b := start(t, o, t.TempDir(), throughDRA("mode: dynamic"))
		defer b.end()
		time.Sleep(time.Minute)
		claim := o.dra.allocate(t, "a", "-mig-3g40gb-4", 0)
		if _, err := o.dra.prepare(t.Context(), claim); err == nil || !strings.Contains(err.Error(), "clients are on it") {
			t.Fatalf("%v", err)
		}
		if synctest.Wait(); o.dra.taint(t, "-mig-1g10gb-0") != "ResetDue" || o.dra.taint(t, "gpu-00000000") != "" || o.dra.taint(t, "-shared") != "" {
			t.Errorf("taints: instances %q, whole %q", o.dra.taint(t, "-mig-1g10gb-0"), o.dra.taint(t, "gpu-00000000"))
		}
		o.dra.Remove("ns", "a")
		o.dra.unprepare(t, claim)
		time.Sleep(time.Minute)
		o.with(func() {
			if p := o.inv.GPUs[0].MIG.Pending; p != nil && *p {
				t.Error("MIG mode would come with the next reset, and nobody wants it")
			}
		})
		share := o.dra.allocate(t, "b", "-shared", 2)
		if _, err := o.dra.prepare(t.Context(), share); err != nil {
			t.Error(err)
		}
		o.dra.Remove("ns", "b")
		o.dra.unprepare(t, share)

		// The clients go, and in time it is tried again.
		o.with(func() { o.resetErr = nil })
		time.Sleep(failingFor)
		if synctest.Wait(); o.dra.taint(t, "-mig-1g10gb-0") != "" {
			t.Errorf("still withdrawn: %s", o.dra.taint(t, "-mig-1g10gb-0"))
		}
		again := o.dra.allocate(t, "c", "-mig-3g40gb-4", 0)
		if _, err := o.dra.prepare(t.Context(), again); err != nil {
			t.Error(err)
		}
	})
}

// Somebody unknown on an instance keeps a dynamic GPU in MIG mode, and its room from claims.
func TestDynamicBesideAProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		o.dra = newScheduled()
		o.inv.GPUs[0].MIG.Instances = []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: 0, Size: 1}, UUID: "MIG-x", GI: 7, Busy: true}}
		b := start(t, o, t.TempDir(), throughDRA("mode: dynamic"))
		defer b.end()
		time.Sleep(time.Minute)
		synctest.Wait()
		got := map[string]string{}
		for _, name := range []string{"gpu-00000000", "-shared", "-mig-1g10gb-0", "-mig-3g40gb-0", "-mig-1g10gb-1", "-mig-3g40gb-4"} {
			if why := o.dra.taint(t, name); why != "" {
				got[name] = why
			}
		}
		for name, want := range map[string]string{"gpu-00000000": "BusyProcess", "-shared": "BusyProcess", "-mig-1g10gb-0": "NoRoom", "-mig-3g40gb-0": "NoRoom"} {
			if got[name] != want {
				t.Errorf("%s: %q, want %q", name, got[name], want)
			}
			delete(got, name)
		}
		if len(got) > 0 {
			t.Errorf("tainted besides: %v", got)
		}
		o.with(func() { // readings hand out the slice
			idle := slices.Clone(o.inv.GPUs[0].MIG.Instances)
			idle[0].Busy = false
			o.inv.GPUs[0].MIG.Instances = idle
		})
		time.Sleep(time.Minute)
		if synctest.Wait(); o.dra.taint(t, "gpu-00000000") != "ForeignInstance" {
			t.Errorf("an idle instance of somebody else: %q", o.dra.taint(t, "gpu-00000000"))
		}
	})
}

// A successor finds a dynamic GPU as it is, whoever has it.
func TestDynamicOutlivesTheAgent(t *testing.T) {
	for name, device := range map[string]string{"whole": "gpu-00000000", "shared": "-shared", "an instance": "-mig-3g40gb-4"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, dir := migMachine(1), t.TempDir()
				o.dra = newScheduled()
				b := start(t, o, dir, throughDRA("mode: dynamic"))
				time.Sleep(time.Minute)
				gib := int64(0)
				if device == "-shared" {
					gib = 2
				}
				claim := o.dra.allocate(t, "a", device, gib)
				if _, err := o.dra.prepare(t.Context(), claim); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				names := o.dra.names()
				b.end()
				o.operations()
				b = start(t, o, dir, throughDRA("mode: dynamic"))
				defer b.end()
				time.Sleep(time.Minute)
				if synctest.Wait(); !b.ledger.Held() || o.operations() != "" || b.specOf(key(claim)) == nil || b.Status().GPUs[0].Mode != "dynamic" {
					t.Errorf("held %v, %+v", b.ledger.Allocations(), b.Status().GPUs[0])
				}
				if now := o.dra.names(); !slices.Equal(now, names) {
					t.Errorf("the slices have %v, and had %v", now, names)
				}
			})
		})
	}
}

// names are the devices of the slices, those that are withdrawn with an exclamation mark.
func (s *scheduled) names() (out []string) {
	for _, slice := range s.Slices() {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) > 0 {
				d.Name += "!"
			}
			out = append(out, d.Name)
		}
	}
	return out
}
