// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/emulator"
)

// untouched is the setup of an emulated H100 that nobody has changed.
func untouched() gpu.Setup {
	return gpu.Setup{
		Compute: gpu.ComputeDefault, Persistence: new(true), Accounting: new(false), ECC: new(true), ECCPending: new(true), ECCDefault: new(true),
		Power:    gpu.Setting{Now: emulator.PowerDefault, Default: emulator.PowerDefault},
		Clock:    gpu.Setting{Now: emulator.ClockDefault, Default: emulator.ClockDefault},
		Fabric:   gpu.FabricCompleted,
		Recovery: gpu.RecoveryNone,
	}
}

// Each setting is read as somebody has set it, and as it is once that is undone.
func TestSetupThereAndGone(t *testing.T) {
	n := emulate(t, emulator.Spec{Count: 2, Model: "H100-80GB", Fabric: modern.Fabric})
	d := open(t, n)
	of := uuids(inventory(t, d))
	read := func() gpu.Setup {
		t.Helper()
		s, err := d.Setup(wait(t), of[0])
		try(t, err)
		return s
	}
	fresh := n.State().GPUs[0].Setup
	for name, c := range map[string]struct {
		set  func(*emulator.Setup)
		want func(*gpu.Setup)
	}{
		"exclusive":   {func(s *emulator.Setup) { s.Compute = emulator.ComputeExclusiveProcess }, func(s *gpu.Setup) { s.Compute = gpu.ComputeExclusiveProcess }},
		"prohibited":  {func(s *emulator.Setup) { s.Compute = emulator.ComputeProhibited }, func(s *gpu.Setup) { s.Compute = gpu.ComputeProhibited }},
		"persistence": {func(s *emulator.Setup) { s.Persistence = false }, func(s *gpu.Setup) { s.Persistence = new(false) }},
		"accounting":  {func(s *emulator.Setup) { s.Accounting = true }, func(s *gpu.Setup) { s.Accounting = new(true) }},
		"ECC pending": {func(s *emulator.Setup) { s.ECCPending = false }, func(s *gpu.Setup) { s.ECCPending = new(false) }},
		"power":       {func(s *emulator.Setup) { s.PowerMilliwatts = 300_000 }, func(s *gpu.Setup) { s.Power.Now = 300_000 }},
		"clock":       {func(s *emulator.Setup) { s.ClockMHz = 900 }, func(s *gpu.Setup) { s.Clock.Now = 900 }},
		"locked":      {func(s *emulator.Setup) { s.ClockHeld = true }, func(s *gpu.Setup) { s.ClockHeld = true }},
		"in progress": {func(s *emulator.Setup) { s.Fabric = "in-progress" }, func(s *gpu.Setup) { s.Fabric = gpu.FabricInProgress }},
		"not started": {func(s *emulator.Setup) { s.Fabric = "not-started" }, func(s *gpu.Setup) { s.Fabric = gpu.FabricNotStarted }},
	} {
		set, want := fresh, untouched()
		c.set(&set)
		c.want(&want)
		try(t, n.SetSetup(0, set))
		if got := read(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: it is\n%+v, want\n%+v", name, got, want)
		}
		if other, err := d.Setup(wait(t), of[1]); err != nil || !reflect.DeepEqual(other, untouched()) {
			t.Errorf("%s of GPU 0: GPU 1 has %+v, %v", name, other, err)
		}
		try(t, n.SetSetup(0, fresh))
		if got := read(); !reflect.DeepEqual(got, untouched()) {
			t.Errorf("%s is over: it is\n%+v", name, got)
		}
	}
	if _, err := d.Setup(wait(t), "GPU-none"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("a GPU that there is not: %v", err)
	}
}

// A card or a driver that lacks a function lacks one figure, and says nothing of it; an error of the same function is an
// error, and leaves the other figures.
func TestSetupWithoutAFunction(t *testing.T) {
	lacks := map[string]func(*gpu.Setup){
		"nvmlDeviceGetComputeMode":                  func(s *gpu.Setup) { s.Compute = gpu.ComputeUnknown },
		"nvmlDeviceGetPersistenceMode":              func(s *gpu.Setup) { s.Persistence = nil },
		"nvmlDeviceGetAccountingMode":               func(s *gpu.Setup) { s.Accounting = nil },
		"nvmlDeviceGetEccMode":                      func(s *gpu.Setup) { s.ECC, s.ECCPending = nil, nil },
		"nvmlDeviceGetPowerManagementLimit":         func(s *gpu.Setup) { s.Power.Now = 0 },
		"nvmlDeviceGetPowerManagementDefaultLimit":  func(s *gpu.Setup) { s.Power.Default = 0 },
		"nvmlDeviceGetApplicationsClock":            func(s *gpu.Setup) { s.Clock.Now = 0 },
		"nvmlDeviceGetDefaultApplicationsClock":     func(s *gpu.Setup) { s.Clock.Default, s.ClockHeld = 0, false },
		"nvmlDeviceGetCurrentClocksThrottleReasons": func(s *gpu.Setup) { s.ClockHeld = false },
		"nvmlDeviceGetClockInfo":                    func(s *gpu.Setup) { s.ClockHeld = false },
		"nvmlDeviceGetDefaultEccMode":               func(s *gpu.Setup) { s.ECCDefault = nil },
		"nvmlDeviceGetGpuFabricInfoV":               func(s *gpu.Setup) { s.Fabric = gpu.FabricNone },
		"nvmlDeviceGetFieldValues":                  func(s *gpu.Setup) { s.Recovery = gpu.RecoveryUnknown },
	}
	spec := emulator.Spec{Model: "H100-80GB", Fabric: modern.Fabric}
	var symbols []string
	for symbol := range lacks {
		symbols = append(symbols, symbol)
	}
	n := emulate(t, lacking(spec, false, symbols))
	d := open(t, n)
	of := uuids(inventory(t, d))
	for i := range of {
		held := n.State().GPUs[i].Setup
		held.ClockHeld = true // or the clock is not read
		try(t, n.SetSetup(i, held))
	}
	for i, symbol := range symbols {
		want := untouched()
		want.ClockHeld = true
		lacks[symbol](&want)
		if got, err := d.Setup(wait(t), of[i+1]); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("without %s it is\n%+v, %v, want\n%+v", symbol, got, err, want)
		}
		gpu0 := 0
		try(t, n.Inject(emulator.Fault{Call: symbol, GPU: &gpu0, Code: emulator.Unknown}))
		got, err := d.Setup(wait(t), of[0])
		if !errors.Is(err, gpu.ErrDriver) || !strings.Contains(err.Error(), symbol) || !reflect.DeepEqual(got, want) {
			t.Errorf("%s fails: it is\n%+v, %v, want\n%+v", symbol, got, err, want)
		}
		n.Clear()
	}
}

func TestResetComputeMode(t *testing.T) {
	n := emulate(t, emulator.Spec{Count: 2, Model: "H100-80GB", GPUs: []emulator.GPUSpec{{Index: 1, MIG: true}}})
	d := open(t, n)
	of := uuids(inventory(t, d))
	set := n.State().GPUs[0].Setup
	set.Compute = emulator.ComputeExclusiveProcess
	try(t, n.SetSetup(0, set))
	try(t, n.AddProcess(emulator.Process{PID: os.Getpid(), GPU: 0, Kind: emulator.Compute, MiB: 10}))
	s, err := d.Setup(wait(t), of[0])
	try(t, err)
	if s.Compute != gpu.ComputeExclusiveProcess || len(s.Processes) != 1 || s.Processes[0].PID != os.Getpid() {
		t.Errorf("it is %+v, want the mode and this process", s)
	}
	try(t, d.ResetComputeMode(wait(t), of[0]))
	if got := n.State().GPUs[0].Setup.Compute; got != emulator.ComputeDefault {
		t.Errorf("the mode is %s", got)
	}
	if s, err := d.Setup(wait(t), of[1]); err != nil || s.Compute != gpu.ComputeUnknown {
		t.Errorf("a GPU in MIG mode has compute mode %q, %v", s.Compute, err)
	}
	if err := d.ResetComputeMode(wait(t), of[1]); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("a GPU in MIG mode: %v", err)
	}
}

// A mode that is set is read back, and one that the driver does not have is no success.
func TestSetComputeMode(t *testing.T) {
	n := emulate(t, emulator.Spec{Count: 2, Model: "H100-80GB", GPUs: []emulator.GPUSpec{{Index: 1, MIG: true}}})
	d := open(t, n)
	of := uuids(inventory(t, d))
	for mode, want := range map[gpu.ComputeMode]emulator.ComputeMode{
		gpu.ComputeExclusiveProcess: emulator.ComputeExclusiveProcess, gpu.ComputeProhibited: emulator.ComputeProhibited,
		gpu.ComputeDefault: emulator.ComputeDefault,
	} {
		try(t, d.SetComputeMode(wait(t), of[0], mode))
		if got := n.State().GPUs[0].Setup.Compute; got != want {
			t.Errorf("%s was set, and the mode is %s", mode, got)
		}
	}
	for _, mode := range []gpu.ComputeMode{gpu.ComputeUnknown, gpu.ComputeExclusiveThread, "other"} {
		if err := d.SetComputeMode(wait(t), of[0], mode); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%q: %v", mode, err)
		}
	}
	if err := d.SetComputeMode(wait(t), of[1], gpu.ComputeProhibited); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("a GPU in MIG mode: %v", err)
	}
	gpu0 := 0
	try(t, n.Inject(emulator.Fault{Call: "nvmlDeviceGetComputeMode", GPU: &gpu0, Code: emulator.Unknown}))
	if err := d.SetComputeMode(wait(t), of[0], gpu.ComputeProhibited); !errors.Is(err, gpu.ErrDriver) {
		t.Errorf("what was set cannot be read: %v", err)
	}
}

// What the kernel shows: processes by the names that they have, and the display driver's setting.
func TestSurroundings(t *testing.T) {
	n := emulate(t, emulator.Spec{Count: 1})
	d := open(t, n)
	if got := d.Surroundings(); got.Modeset || got.MPS != nil {
		t.Errorf("a node with nothing shows %+v", got)
	}
	write := func(path, text string) {
		t.Helper()
		try(t, os.MkdirAll(filepath.Dir(path), 0o755))
		try(t, os.WriteFile(path, []byte(text), 0o644))
	}
	drm := filepath.Join(n.opts.SysRoot, "module/nvidia_drm")
	write(filepath.Join(drm, "parameters/modeset"), "Y\n")
	t.Cleanup(func() { os.RemoveAll(drm) })
	for pid, p := range map[string]struct{ name, command string }{
		"9100":   {"nvidia-cuda-mps", "/usr/bin/nvidia-cuda-mps-control\x00-d\x00"},
		"910":    {"nvidia-cuda-mps", "nvidia-cuda-mps-server\x00"},
		"911":    {"nvidia-cuda-mps", "/usr/bin/nvidia-cuda-mps-control\x00"}, // asks a daemon
		"912":    {"nvidia-cuda-mps", ""},                                     // has ended
		"77":     {"python3", "python3\x00-c\x00nvidia-cuda-mps-control\x00"},
		"nvidia": {"nvidia-cuda-mps", "nvidia-cuda-mps-server\x00"},
	} {
		dir := filepath.Join(n.opts.ProcRoot, pid)
		write(filepath.Join(dir, "comm"), p.name+"\n")
		write(filepath.Join(dir, "cmdline"), p.command)
		t.Cleanup(func() { os.RemoveAll(dir) })
	}
	want := gpu.Surroundings{Modeset: true, MPS: []gpu.Client{{PID: 910, Name: "nvidia-cuda-mps"}, {PID: 9100, Name: "nvidia-cuda-mps"}}}
	if got := d.Surroundings(); !reflect.DeepEqual(got, want) {
		t.Errorf("the node shows %+v, want %+v", got, want)
	}
	sockets := filepath.Join(n.opts.ProcRoot, "1/net/unix")
	write(sockets, `Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0005 01 4711 /tmp/nvidia-mps/control_privileged
0000000000000000: 00000002 00000000 00010000 0005 01 4712 /tmp/nvidia-mps/control
0000000000000000: 00000002 00000000 00010000 0005 01 4713 /run/another one/control
0000000000000000: 00000002 00000000 00010000 0001 01 4714 @/tmp/abstract/control
0000000000000000: 00000003 00000000 00000000 0001 03 4715
`)
	t.Cleanup(func() { os.RemoveAll(filepath.Join(n.opts.ProcRoot, "1")) })
	if got := d.Surroundings().MPSDirs; !reflect.DeepEqual(got, []string{"/tmp/nvidia-mps"}) {
		t.Errorf("the sockets of MPS are in %q", got)
	}
	write(filepath.Join(drm, "parameters/modeset"), "N\n")
	if got := d.Surroundings(); got.Modeset {
		t.Error("modeset is on, and the kernel says N")
	}
}
