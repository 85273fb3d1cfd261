// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

func (r *readings) Setup(ctx context.Context, u gpu.UUID) (gpu.Setup, error) {
	s, err := ask(ctx, r.session, "read how it is set:", u, r.setup)
	for i := range s.Processes { // the kernel, not the driver, knows the names
		s.Processes[i].Name = r.nameOf(s.Processes[i].PID)
	}
	return s, err
}

// setup reads all figures. One that fails leaves the others as they are.
func (r *readings) setup(h nvml.Device) (s gpu.Setup, err error) {
	var errs []error
	// read makes a call if the library has its function. use gets the answer, if there is one.
	read := func(f *function, what string, call func() nvml.Return, use func()) {
		if !r.has(f) {
			return
		}
		told, err := f.told(what, call())
		if told {
			use()
		}
		errs = append(errs, err)
	}
	var ret nvml.Return
	var mode nvml.ComputeMode
	read(nvmlDeviceGetComputeMode, "compute mode", func() nvml.Return {
		// In MIG mode each instance has a mode of its own, and drivers refuse the GPU's handle.
		if mode, ret = h.GetComputeMode(); ret == nvml.ERROR_INVALID_ARGUMENT {
			ret = nvml.ERROR_NOT_SUPPORTED
		}
		return ret
	}, func() { s.Compute = computeMode(mode) })
	var on, pending nvml.EnableState
	read(nvmlDeviceGetPersistenceMode, "persistence mode", func() nvml.Return {
		on, ret = h.GetPersistenceMode()
		return ret
	}, func() { s.Persistence = enabled(on) })
	read(nvmlDeviceGetAccountingMode, "accounting mode", func() nvml.Return {
		on, ret = h.GetAccountingMode()
		return ret
	}, func() { s.Accounting = enabled(on) })
	read(nvmlDeviceGetEccMode, "ECC mode", func() nvml.Return {
		on, pending, ret = h.GetEccMode()
		return ret
	}, func() { s.ECC, s.ECCPending = enabled(on), enabled(pending) })
	var byDefault nvml.EnableState
	read(nvmlDeviceGetDefaultEccMode, "default ECC mode", func() nvml.Return {
		byDefault, ret = h.GetDefaultEccMode()
		return ret
	}, func() { s.ECCDefault = enabled(byDefault) })
	number := func(f *function, what string, into *uint32, call func() (uint32, nvml.Return)) {
		var v uint32
		read(f, what, func() nvml.Return { v, ret = call(); return ret }, func() { *into = v })
	}
	number(nvmlDeviceGetPowerLimit, "power limit", &s.Power.Now, h.GetPowerManagementLimit)
	number(nvmlDeviceGetPowerDefault, "default power limit", &s.Power.Default, h.GetPowerManagementDefaultLimit)
	number(nvmlDeviceGetApplicationsClock, "clock of applications", &s.Clock.Now, func() (uint32, nvml.Return) {
		return h.GetApplicationsClock(nvml.CLOCK_GRAPHICS)
	})
	number(nvmlDeviceGetDefaultClock, "default clock of applications", &s.Clock.Default, func() (uint32, nvml.Return) {
		return h.GetDefaultApplicationsClock(nvml.CLOCK_GRAPHICS)
	})
	var reasons uint64
	read(nvmlDeviceGetClocksReasons, "reasons of the clocks", func() nvml.Return {
		reasons, ret = h.GetCurrentClocksThrottleReasons()
		return ret
	}, func() {})
	// Cards whose default clock is below their highest give this reason under any load. It means
	// something only if the clock is below the default.
	if reasons&nvml.ClocksThrottleReasonApplicationsClocksSetting != 0 {
		var now uint32
		number(nvmlDeviceGetClockInfo, "clock", &now, func() (uint32, nvml.Return) {
			return h.GetClockInfo(nvml.CLOCK_GRAPHICS)
		})
		s.ClockHeld = now > 0 && now < s.Clock.Default
	}
	read(nvmlDeviceGetFieldValues, "recovery action", func() nvml.Return {
		s.Recovery, ret = recovery(h)
		return ret
	}, func() {})
	s.Fabric, err = r.fabricState(h)
	errs = append(errs, err)
	listed, err := r.processes(h)
	errs = append(errs, err)
	for _, p := range listed { // sorted by PID
		if n := len(s.Processes); n == 0 || s.Processes[n-1].PID != p.PID {
			s.Processes = append(s.Processes, gpu.Client{PID: p.PID})
		}
	}
	return s, errors.Join(errs...)
}

// computeMode names a compute mode. One that this package does not know keeps its number, since it
// is not the default.
func computeMode(m nvml.ComputeMode) gpu.ComputeMode {
	switch m {
	case nvml.COMPUTEMODE_DEFAULT:
		return gpu.ComputeDefault
	case nvml.COMPUTEMODE_EXCLUSIVE_THREAD:
		return gpu.ComputeExclusiveThread
	case nvml.COMPUTEMODE_PROHIBITED:
		return gpu.ComputeProhibited
	case nvml.COMPUTEMODE_EXCLUSIVE_PROCESS:
		return gpu.ComputeExclusiveProcess
	}
	return gpu.ComputeMode(fmt.Sprintf("mode %d of the driver", m))
}

func enabled(s nvml.EnableState) *bool { return new(s == nvml.FEATURE_ENABLED) }

// fabricState reads how far a GPU has joined its fabric.
func (s *session) fabricState(h nvml.Device) (gpu.FabricState, error) {
	info, told, err := s.fabricInfo(h)
	switch {
	case !told:
		return gpu.FabricNone, err
	case info.state == nvml.GPU_FABRIC_STATE_NOT_SUPPORTED:
		return gpu.FabricNone, nil
	case info.state == nvml.GPU_FABRIC_STATE_NOT_STARTED:
		return gpu.FabricNotStarted, nil
	case info.state == nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return gpu.FabricInProgress, nil
	case info.state != nvml.GPU_FABRIC_STATE_COMPLETED:
		return gpu.FabricState(fmt.Sprintf("state %d of the driver", info.state)), nil
	case info.status != nvml.SUCCESS:
		return gpu.FabricState("failed: " + info.status.Error()), nil
	}
	return gpu.FabricCompleted, nil
}

// computeModes are the compute modes that can be set.
var computeModes = map[gpu.ComputeMode]nvml.ComputeMode{
	gpu.ComputeDefault:          nvml.COMPUTEMODE_DEFAULT,
	gpu.ComputeExclusiveProcess: nvml.COMPUTEMODE_EXCLUSIVE_PROCESS,
	gpu.ComputeProhibited:       nvml.COMPUTEMODE_PROHIBITED,
}

func (m *modes) ResetComputeMode(ctx context.Context, u gpu.UUID) error {
	return m.SetComputeMode(ctx, u, gpu.ComputeDefault)
}

func (m *modes) SetComputeMode(ctx context.Context, u gpu.UUID, mode gpu.ComputeMode) error {
	value, known := computeModes[mode]
	if !known {
		return fmt.Errorf("set the compute mode to %q on %s: %w", mode, u, gpu.ErrInvalid)
	}
	_, err := ask(ctx, m.session, fmt.Sprintf("set the compute mode to %s on", mode), u,
		func(h nvml.Device) (none struct{}, _ error) {
			if err := nvmlDeviceSetComputeMode.refused(h.SetComputeMode(value)); err != nil {
				return none, err
			}
			if !m.has(nvmlDeviceGetComputeMode) {
				return none, nil // a driver that cannot tell the mode is believed
			}
			now, ret := h.GetComputeMode()
			told, err := nvmlDeviceGetComputeMode.told("read the compute mode", ret)
			if err == nil && told && now != value {
				err = fmt.Errorf("it is %s after that: %w", computeMode(now), gpu.ErrDriver)
			}
			return none, err
		})
	return err
}

// Surroundings reads the kernel alone.
func (r *readings) Surroundings() gpu.Surroundings {
	var s gpu.Surroundings
	modeset, _ := os.ReadFile(filepath.Join(r.opts.SysRoot, "module/nvidia_drm/parameters/modeset"))
	s.Modeset = slices.Contains([]string{"Y", "1"}, strings.TrimSpace(string(modeset)))
	for _, name := range names(r.opts.ProcRoot) {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if c := (gpu.Client{PID: pid, Name: r.nameOf(pid)}); strings.HasPrefix(c.Name, mpsName) && r.serves(pid) {
			s.MPS = append(s.MPS, c)
		}
	}
	slices.SortFunc(s.MPS, func(a, b gpu.Client) int { return a.PID - b.PID })
	s.MPSDirs = mpsDirs(filepath.Join(r.opts.ProcRoot, "1/net/unix"))
	return s
}

// mostSockets bounds what is read of the kernel's list of sockets, in bytes.
const mostSockets = 16 << 20

// mpsDirs finds the directories of MPS in the kernel's list of sockets: a daemon listens on the two
// sockets control and control_privileged. A list that cannot be read has none.
func mpsDirs(list string) (dirs []string) {
	f, err := os.Open(list)
	if err != nil {
		return nil
	}
	defer f.Close()
	has := map[string]bool{}
	lines := bufio.NewScanner(io.LimitReader(f, mostSockets))
	for lines.Scan() {
		// Num RefCount Protocol Flags Type St Inode Path; a path may have spaces
		if _, path, ok := strings.Cut(lines.Text(), " /"); ok && strings.HasPrefix(filepath.Base(path), "control") {
			has["/"+path] = true
		}
	}
	for path := range has {
		if dir, name := filepath.Split(path); name == "control" && has[dir+"control_privileged"] {
			dirs = append(dirs, filepath.Clean(dir))
		}
	}
	slices.Sort(dirs)
	return dirs
}

// mpsName is how the control daemon and the servers of MPS begin the 15 bytes that the kernel keeps
// of a process's name.
const mpsName = "nvidia-cuda-mps"

// serves reports whether a process of MPS's name is a daemon or a server. Without an argument the control
// program asks a daemon, as our own does again and again, and a process that has ended has no command line.
func (s *session) serves(pid int) bool {
	f, err := os.Open(filepath.Join(s.opts.ProcRoot, strconv.Itoa(pid), "cmdline"))
	if err != nil {
		return false
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, 4<<10))
	program, _, arguments := strings.Cut(strings.TrimSuffix(string(text), "\x00"), "\x00")
	return program != "" && (arguments || filepath.Base(program) != "nvidia-cuda-mps-control")
}

// nameOf returns a process's own name for itself, or "" if it cannot be read.
func (s *session) nameOf(pid int) string {
	comm, _ := os.ReadFile(filepath.Join(s.opts.ProcRoot, strconv.Itoa(pid), "comm"))
	return string(bytes.TrimSpace(comm))
}

// Clients reads the kernel alone.
func (r *readings) Clients(minor int) []gpu.Client {
	pids, _ := r.holders(minor)
	out := make([]gpu.Client, 0, len(pids))
	for _, pid := range pids {
		out = append(out, gpu.Client{PID: pid, Name: r.nameOf(pid)})
	}
	return out
}
