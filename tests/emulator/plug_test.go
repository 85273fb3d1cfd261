// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
)

func do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// uuids are those that a session finds by index.
func uuids(t testing.TB, s *emulator.Session) string {
	t.Helper()
	var out []string
	for i := range must[int](t, "count")(s.DeviceCount()) {
		h, r := s.DeviceByIndex(i)
		if r != emulator.Success {
			out = append(out, r.Error())
			continue
		}
		out = append(out, must[string](t, "UUID")(s.UUID(h)))
	}
	return fmt.Sprint(out)
}

func again(t testing.TB, s *emulator.Session) {
	t.Helper()
	want(t, "shutdown", s.Shutdown(), emulator.Success)
	want(t, "init", s.Init(), emulator.Success)
}

func TestGPUsComeAndGo(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 4, GPUs: []emulator.GPUSpec{{Index: 3, Unplugged: true}}})
	var u []string
	for _, g := range w.State().GPUs {
		u = append(u, g.UUID)
	}
	s := open(t, w, emulator.Opening{})
	want(t, "at first", uuids(t, s), fmt.Sprint(u[:3]))
	set := must[uint32](t, "set")(s.EventSetCreate())
	want(t, "register", s.RegisterEvents(1, emulator.EventXid, set), emulator.Success)

	do(t, w.Unplug(1))
	want(t, "to a session that had it", uuids(t, s), fmt.Sprint([]string{u[0], emulator.GPUIsLost.Error(), u[2]}))
	want(t, "its handle", ret(s.Name(1)), emulator.GPUIsLost)
	want(t, "a wait for its events", ret(s.EventSetWait(set, time.Hour)), emulator.GPUIsLost)
	if !w.State().GPUs[1].Unplugged {
		t.Error("GPU 1 is not unplugged")
	}
	for what, err := range map[string]error{
		"unplug": w.Unplug(1), "loss": w.Lose(1), "reset": w.Reset(1), "Xid": w.Xid(1, 48), "health": w.SetHealth(1, emulator.Health{}),
		"process": w.AddProcess(emulator.Process{PID: 1, GPU: 1, Kind: emulator.Compute, MiB: 1}),
	} {
		if !errors.Is(err, emulator.NotFound) {
			t.Errorf("%s of an unplugged GPU: %v", what, err)
		}
	}
	want(t, "an init beside another", s.Init(), emulator.Success)
	want(t, "finds nothing new", ret(s.Name(1)), emulator.GPUIsLost)
	want(t, "shutdown", s.Shutdown(), emulator.Success)
	again(t, s)
	want(t, "after an init", uuids(t, s), fmt.Sprint([]string{u[0], u[2]}))
	want(t, "its handle, after an init", ret(s.Name(1)), emulator.InvalidArgument)

	do(t, w.Plug(1))
	do(t, w.Plug(3))
	if err := w.Plug(3); err == nil || !strings.Contains(err.Error(), "plugged in") {
		t.Errorf("plug it again: %v", err)
	}
	want(t, "before an init", uuids(t, s), fmt.Sprint([]string{u[0], u[2]}))
	again(t, s)
	want(t, "after an init", uuids(t, s), fmt.Sprint(u))
}

// A session that saw a GPU go does not see it come back.
func TestALossLastsForASession(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 1})
	s := open(t, w, emulator.Opening{})
	for what, happen := range map[string][2]func(int) error{"loss": {w.Lose, w.Restore}, "unplugging": {w.Unplug, w.Plug}} {
		do(t, happen[0](0))
		do(t, happen[1](0))
		want(t, what+": the handle", ret(s.Name(0)), emulator.GPUIsLost)
		want(t, what+": by index", ret(s.DeviceByIndex(0)), emulator.GPUIsLost)
		want(t, what+": in a new session", ret(open(t, w, emulator.Opening{}).Name(0)), emulator.Success)
		again(t, s)
		want(t, what+": after an init", ret(s.Name(0)), emulator.Success)
	}
}

func TestUnload(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2, Driver: "570.1.2"})
	closed := w.Open(emulator.Opening{PID: 6}) // has it open, not initialised
	t.Cleanup(closed.Close)
	s := open(t, w, emulator.Opening{PID: 7})
	do(t, w.AddProcess(emulator.Process{PID: 8, GPU: 1, Kind: emulator.Compute, MiB: 1}))
	do(t, w.AddProcess(emulator.Process{PID: 7, GPU: 1, Kind: emulator.Compute, MiB: 1}))
	if err := w.Unload(); !errors.Is(err, emulator.InUse) || !strings.HasSuffix(err.Error(), "[7 8]") {
		t.Errorf("unload of a driver in use: %v", err)
	}
	for what, err := range map[string]error{"load": w.Load(), "upgrade": w.Upgrade("580.1")} {
		if err == nil {
			t.Errorf("%s of a loaded driver is not refused", what)
		}
	}
	do(t, w.Xid(0, 95))
	w.EndProcess(7)
	w.EndProcess(8)
	want(t, "shutdown", s.Shutdown(), emulator.Success)
	do(t, w.Unload())
	want(t, "loaded", w.State().Loaded, false)
	want(t, "init", s.Init(), emulator.DriverNotLoaded)
	want(t, "init of a process that had not", closed.Init(), emulator.DriverNotLoaded)
	want(t, "any call", ret(w.Open(emulator.Opening{}).Name(0)), emulator.DriverNotLoaded)
	if err := w.Unload(); !errors.Is(err, emulator.DriverNotLoaded) {
		t.Errorf("unload it again: %v", err)
	}
	if err := w.AddProcess(emulator.Process{PID: 7, GPU: 1, Kind: emulator.Compute, MiB: 1}); !errors.Is(err, emulator.DriverNotLoaded) {
		t.Errorf("memory without a driver: %v", err)
	}
	if err := w.Upgrade("newest"); err == nil {
		t.Error("a driver that is no version is not refused")
	}
	do(t, w.Upgrade("580.1.2"))
	do(t, w.Load())
	want(t, "a library of before", s.InitFrom("570.1.2"), emulator.LibraryMismatch)
	want(t, "its own library", s.InitFrom("580.1.2"), emulator.Success)
	want(t, "version", must[string](t, "version")(s.DriverVersion()), "580.1.2")
	want(t, "health", w.State().GPUs[0].Health, emulator.Health{Uncorrected: emulator.Errors{Aggregate: 1}})
}

func TestReset(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2, GPUs: []emulator.GPUSpec{{Index: 1, Model: "V100-SXM2-32GB"}}})
	s := open(t, w, emulator.Opening{})
	p := emulator.Process{PID: 7, GPU: 0, Kind: emulator.Compute, MiB: 1}
	do(t, w.AddProcess(p))
	for _, xid := range []uint64{63, 64, 95} {
		do(t, w.Xid(0, xid))
		do(t, w.Xid(1, xid))
	}
	if err := w.AddProcess(emulator.Process{PID: 8, GPU: 0, Kind: emulator.Compute, MiB: 1}); !errors.Is(err, emulator.ResetRequired) {
		t.Errorf("new work: %v", err)
	}
	if err := w.Reset(0); !errors.Is(err, emulator.InUse) || !strings.Contains(err.Error(), "[7]") {
		t.Errorf("reset of a GPU in use: %v", err)
	}
	w.EndProcess(7)
	do(t, w.Reset(0))
	do(t, w.Reset(1))
	want(t, "health", w.State().GPUs[0].Health, emulator.Health{
		Uncorrected: emulator.Errors{Aggregate: 1}, RemappedUncorrectable: 1, RemapFailed: true,
	})
	want(t, "an old card's", w.State().GPUs[1].Health, emulator.Health{Uncorrected: emulator.Errors{Aggregate: 1}, RetiredDouble: 1})
	want(t, "an open session's handle", ret(s.Name(0)), emulator.Success)
	do(t, w.AddProcess(p))

	do(t, w.SetHealth(1, emulator.Health{Recovery: emulator.RecoveryReboot}))
	do(t, w.Reset(1))
	want(t, "what asks for a reboot", w.State().GPUs[1].Health.Recovery, emulator.RecoveryReboot)
	do(t, w.Lose(1))
	if err := w.Reset(1); !errors.Is(err, emulator.GPUIsLost) {
		t.Errorf("reset of a lost GPU: %v", err)
	}
	if err := w.Reset(2); !errors.Is(err, emulator.NotFound) {
		t.Errorf("reset of none: %v", err)
	}
}
