// SPDX-License-Identifier: Apache-2.0

package emulator_test

import (
	"errors"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// opened is a session that has the driver initialised, as root or not.
func openedBy(t *testing.T, w *emulator.World, pid int, root bool) *emulator.Session {
	t.Helper()
	s := w.Open(emulator.Opening{PID: pid, Unprivileged: !root})
	t.Cleanup(s.Close)
	want(t, "init", s.Init(), emulator.Success)
	return s
}

// Each compute mode lets as many processes compute as the driver's does, and those that compute go on.
func TestComputeModeIsKept(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2})
	a, b := openedBy(t, w, 100, true), openedBy(t, w, 200, false)
	const call, some = "cuMemAlloc_v2", 1 << 21
	try := func(what string, s *emulator.Session, expected emulator.Return) {
		t.Helper()
		want(t, what, s.Charge(call, 0, some), expected)
	}
	want(t, "mode by nobody", b.SetComputeMode(0, emulator.ComputeExclusiveProcess), emulator.NoPermission)
	want(t, "a mode of old drivers", a.SetComputeMode(0, emulator.ComputeExclusiveThread), emulator.InvalidArgument)
	want(t, "no mode", a.SetComputeMode(0, 4), emulator.InvalidArgument)
	want(t, "mode", a.SetComputeMode(0, emulator.ComputeExclusiveProcess), emulator.Success)
	try("the first process", a, emulator.Success)
	try("the second process", b, emulator.InUse)
	want(t, "the second process on another GPU", b.Charge(call, 1, some), emulator.Success)
	try("the first process again", a, emulator.Success)
	want(t, "the first process gives all back", a.Charge(call, 0, -2*some), emulator.Success)
	try("the second process, now the first", b, emulator.Success)
	want(t, "mode", a.SetComputeMode(0, emulator.ComputeProhibited), emulator.Success)
	try("prohibited", a, emulator.InUse)
	try("prohibited, to one that computes", b, emulator.Success)
	want(t, "mode", a.SetComputeMode(0, emulator.ComputeDefault), emulator.Success)
	try("the default", a, emulator.Success)
}

// What is set goes with a reset, what is pending comes into force, and nothing can be set that the card cannot have.
func TestSetup(t *testing.T) {
	w := newWorld(t, emulator.Spec{Count: 2, Model: "H100-80GB"})
	fresh := w.State().GPUs[0].Setup
	set := fresh
	set.Compute, set.ECCPending, set.PowerMilliwatts, set.ClockMHz = emulator.ComputeExclusiveProcess, false, 300_000, 900
	set.Accounting, set.ClockHeld, set.Persistence = true, true, false
	if err := w.SetSetup(0, set); err != nil {
		t.Fatal(err)
	}
	want(t, "setup", w.State().GPUs[0].Setup, set)
	want(t, "of the other GPU", w.State().GPUs[1].Setup, fresh)
	if err := w.Reset(0); err != nil {
		t.Fatal(err)
	}
	fresh.ECCPending, fresh.Persistence = false, false
	want(t, "setup after a reset", w.State().GPUs[0].Setup, fresh)
	want(t, "ECC after a reset", w.State().GPUs[0].ECC, false)
	for name, c := range map[string]struct {
		change func(*emulator.Setup)
		want   error
	}{
		"power beyond the card's": {func(s *emulator.Setup) { s.PowerMilliwatts = emulator.PowerDefault + 1 }, emulator.InvalidArgument},
		"power below the least":   {func(s *emulator.Setup) { s.PowerMilliwatts = emulator.PowerLeast - 1 }, emulator.InvalidArgument},
		"clock beyond the card's": {func(s *emulator.Setup) { s.ClockMHz = emulator.ClockDefault + 1 }, emulator.InvalidArgument},
		"no such mode":            {func(s *emulator.Setup) { s.Compute = 4 }, emulator.InvalidArgument},
		"a fabric without one":    {func(s *emulator.Setup) { s.Fabric = "in-progress" }, emulator.NotSupported},
	} {
		s := fresh
		c.change(&s)
		if err := w.SetSetup(0, s); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if err := w.SetMIG(0, true); err != nil {
		t.Fatal(err)
	}
	s := openedBy(t, w, 100, true)
	_, r := s.ComputeMode(0)
	want(t, "mode in MIG mode", r, emulator.NotSupported)
	want(t, "set in MIG mode", s.SetComputeMode(0, emulator.ComputeDefault), emulator.NotSupported)
}
