// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"errors"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/tests/emulator"
)

// vanishes is what a GPU and its health lack where the driver does not support an optional
// function. All else must be as it is on a driver that supports it; nil is nothing.
var vanishes = map[string]func(*gpu.Device, *gpu.Health){
	"nvmlSystemGetCudaDriverVersion":          nil, // of the node
	"nvmlDeviceGetCudaComputeCapability":      func(d *gpu.Device, _ *gpu.Health) { d.ComputeCapability, d.SMs = "", 0 },
	"nvmlDeviceGetNumGpuCores":                func(d *gpu.Device, _ *gpu.Health) { d.SMs = 0 },
	"nvmlDeviceGetMemoryAffinity":             nil, // the kernel knows
	"nvmlDeviceGetMemoryInfo":                 nil, // _v2 says it
	"nvmlDeviceGetMemoryInfo_v2":              func(d *gpu.Device, _ *gpu.Health) { d.Reserved = 0 },
	"nvmlDeviceGetGraphicsRunningProcesses":   nil,
	"nvmlDeviceGetMPSComputeRunningProcesses": nil,
	"nvmlDeviceGetProcessUtilization":         nil,
	"nvmlDeviceGetTotalEccErrors":             func(_ *gpu.Device, h *gpu.Health) { h.Uncorrected = nil },
	"nvmlDeviceGetRemappedRows":               func(_ *gpu.Device, h *gpu.Health) { h.Remap = nil },
	"nvmlDeviceGetRetiredPagesPendingStatus":  nil,
	"nvmlDeviceGetFieldValues": func(d *gpu.Device, h *gpu.Health) {
		h.Recovery = gpu.RecoveryUnknown
		for i := range d.Links {
			d.Links[i].LaneMBps = 0
		}
	},
	// Of the setup; see TestSetupWithoutAFunction.
	"nvmlDeviceGetComputeMode":                  nil,
	"nvmlDeviceGetPersistenceMode":              nil,
	"nvmlDeviceGetAccountingMode":               nil,
	"nvmlDeviceGetEccMode":                      nil,
	"nvmlDeviceGetPowerManagementLimit":         nil,
	"nvmlDeviceGetPowerManagementDefaultLimit":  nil,
	"nvmlDeviceGetApplicationsClock":            nil,
	"nvmlDeviceGetDefaultApplicationsClock":     nil,
	"nvmlDeviceGetCurrentClocksThrottleReasons": nil,
	"nvmlDeviceGetDefaultEccMode":               nil,
	"nvmlDeviceGetClockInfo":                    nil,

	"nvmlEventSetCreate":                  nil,
	"nvmlEventSetWait_v2":                 nil,
	"nvmlEventSetFree":                    nil,
	"nvmlDeviceGetSupportedEventTypes":    nil,
	"nvmlDeviceRegisterEvents":            nil,
	"nvmlDeviceGetNvLinkState":            func(d *gpu.Device, _ *gpu.Health) { d.Links, d.Lanes, d.Fabric = nil, 0, nil },
	"nvmlDeviceGetNvLinkRemotePciInfo_v2": nil, // all lead to switches
	"nvmlDeviceGetNvLinkRemoteDeviceType": func(d *gpu.Device, _ *gpu.Health) { d.Links = nil },
	"nvmlDeviceGetNvLinkVersion": func(d *gpu.Device, _ *gpu.Health) {
		for i := range d.Links {
			d.Links[i].Version = 0
		}
	},
	"nvmlDeviceGetGpuFabricInfoV":          func(d *gpu.Device, _ *gpu.Health) { d.Fabric = nil },
	"nvmlDeviceGetGpuFabricInfo":           nil, // V says it
	"nvmlDeviceGetMigMode":                 func(d *gpu.Device, _ *gpu.Health) { d.MIG = gpu.MIG{} },
	"nvmlDeviceGetGpuInstanceProfileInfoV": func(d *gpu.Device, _ *gpu.Health) { d.MIG.Profiles = nil },
	"nvmlDeviceGetGpuInstancePossiblePlacements": func(d *gpu.Device, _ *gpu.Health) {
		for i := range d.MIG.Profiles {
			d.MIG.Profiles[i].Placements = nil
		}
	},
}

var versioned = regexp.MustCompile(`_v\d$`)

// forms are the names by which programs reach a row's function.
func forms(symbol string) []string {
	base := versioned.ReplaceAllString(symbol, "")
	if slices.ContainsFunc(nvml.Functions(), func(f nvml.Function) bool {
		return f.Symbol != symbol && versioned.ReplaceAllString(f.Symbol, "") == base
	}) {
		return []string{symbol} // each of its forms has a row
	}
	var out []string
	for _, name := range []string{base, base + "_v[0-9]"} {
		if _, err := emulator.New(emulator.Spec{Count: 1, NotSupported: []string{name}}); err == nil {
			out = append(out, name)
		}
	}
	return out
}

// rowsOf are the rows that are vital for something, "" the optional ones.
func rowsOf(t *testing.T, vital string) (out []string) {
	t.Helper()
	for _, f := range nvml.Functions() {
		if f.Vital == vital {
			out = append(out, f.Symbol)
		}
	}
	if len(out) == 0 {
		t.Fatalf("no function is vital for %q", vital)
	}
	return out
}

// lacking is a world in which each GPU lacks another function; GPU 0 lacks none. A word may
// name several, with spaces between.
func lacking(spec emulator.Spec, inMIG bool, symbols []string) emulator.Spec {
	spec.Count, spec.GPUs = 1+len(symbols), nil
	for i := range spec.Count {
		// Cards with as much memory are taken for one kind, whose profiles are read once.
		g := emulator.GPUSpec{Index: i, MIG: inMIG, MemoryMiB: 81559 + uint64(i)}
		if i > 0 {
			for _, symbol := range strings.Fields(symbols[i-1]) {
				g.NotSupported = append(g.NotSupported, forms(symbol)...)
			}
		}
		spec.GPUs = append(spec.GPUs, g)
	}
	return spec
}

// ofGPU says whether a call names its GPU by a handle.
func ofGPU(symbol string) bool {
	return !strings.HasPrefix(symbol, "nvmlInit") && !strings.HasPrefix(symbol, "nvmlShutdown") && !strings.HasPrefix(symbol, "nvmlSystem") &&
		!strings.HasPrefix(symbol, "nvmlEventSet") && !strings.Contains(symbol, "GetHandleBy") && !strings.Contains(symbol, "GetCount")
}

// chunks runs a test on worlds in which each GPU lacks another of the functions.
func chunks(t *testing.T, symbols []string, test func(t *testing.T, chunk []string)) {
	for chunk := range slices.Chunk(symbols, emulator.MaxGPUs-1) {
		t.Run(chunk[0], func(t *testing.T) { test(t, chunk) })
	}
}

var modern = emulator.Spec{
	Model:  "H100-80GB",
	Fabric: &emulator.FabricSpec{Cluster: "01234567-89ab-cdef-0123-456789abcdef", Clique: 7},
}

// Each optional function: a GPU whose driver does not support it is sound, containers can
// have it, and nothing is told of it that is not so on a driver that supports it.
func TestOptionalFunctions(t *testing.T) {
	symbols := rowsOf(t, "")
	for _, symbol := range symbols {
		if _, ok := vanishes[symbol]; !ok {
			t.Errorf("%s is optional: what vanishes without it?", symbol)
		}
	}
	const noMemory = "nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2"
	symbols = append(slices.DeleteFunc(symbols, func(s string) bool { return !ofGPU(s) }), noMemory)
	chunks(t, symbols, func(t *testing.T, chunk []string) {
		type known struct {
			gpu    gpu.Device
			health gpu.Health
			parts  bool
			memory gpu.Memory
		}
		read := func(t *testing.T, spec emulator.Spec) (all []known) {
			n := emulate(t, spec)
			n.opts.Hook = "/opt/nvidia-cdi-hook"
			d := open(t, n)
			inv := inventory(t, d)
			parts, err := d.Parts(wait(t))
			try(t, err)
			if _, err := d.Utilization(wait(t), time.Now().Add(-time.Minute), uuids(inv)...); err != nil {
				t.Error(err)
			}
			memory, err := d.Memory(wait(t), uuids(inv)...)
			try(t, err)
			for i, dev := range inv.GPUs {
				h, err := d.Health(wait(t), dev.UUID)
				if err != nil {
					t.Errorf("GPU %d: %v", i, err)
				}
				if _, err := d.Processes(wait(t), dev.UUID); err != nil {
					t.Errorf("GPU %d: %v", i, err)
				}
				_, given := parts.Devices[dev.UUID]
				all = append(all, known{dev, h, given, memory[dev.UUID]})
			}
			l := listen(t, n, d)
			l.hears(t, n, 0, inv.GPUs[0].UUID)
			return all
		}
		var got, want []known
		t.Run("", func(t *testing.T) { got = read(t, lacking(modern, false, chunk)) })
		t.Run("", func(t *testing.T) { want = read(t, lacking(modern, false, make([]string, len(chunk)))) })
		for i, symbol := range slices.Concat([]string{""}, chunk) {
			w := want[i]
			switch change := vanishes[symbol]; {
			case symbol == noMemory:
				w.gpu.Memory, w.gpu.Reserved, w.memory = 0, 0, gpu.Memory{}
			case symbol == "nvmlDeviceGetMemoryInfo_v2":
				w.memory.Reserved, w.gpu.Reserved = 0, 0
				w.memory.Used = got[i].memory.Used // what is reserved counts as used
			case change != nil:
				change(&w.gpu, &w.health)
			}
			if !reflect.DeepEqual(got[i], w) {
				t.Errorf("without %q it is\n%+v, want\n%+v", symbol, got[i], w)
			}
		}
	})
}

func uuids(inv gpu.Inventory) (all []gpu.UUID) {
	for _, d := range inv.GPUs {
		all = append(all, d.UUID)
	}
	return all
}

// names reports whether an error or a fault names a row's function.
func names(said, symbol string) bool {
	return strings.Contains(said, versioned.ReplaceAllString(symbol, ""))
}

// What is vital for a GPU: without it that GPU alone has a fault, which names the function.
func TestVitalFunctions(t *testing.T) {
	symbols := slices.DeleteFunc(rowsOf(t, "its GPU"), func(s string) bool { return !ofGPU(s) })
	chunks(t, symbols, func(t *testing.T, chunk []string) {
		inv := inventory(t, open(t, emulate(t, lacking(modern, false, chunk))))
		for i, symbol := range slices.Concat([]string{""}, chunk) {
			fault := inv.GPUs[i].Fault
			if (fault == "") != (symbol == "") || !names(fault, symbol) {
				t.Errorf("without %q the fault of GPU %d is %q", symbol, i, fault)
			}
		}
	})

	// In MIG mode, with a GPU instance that is split.
	chunks(t, rowsOf(t, "its GPU in MIG mode"), func(t *testing.T, chunk []string) {
		n := emulate(t, lacking(modern, true, chunk))
		hand := n.Open(emulator.Opening{PID: 1})
		defer hand.Close()
		hand.Init()
		for i := range 1 + len(chunk) {
			gi, r := hand.CreateGPUInstance(emulator.Handle(i), 9, &emulator.Placement{Start: 4, Size: 4})
			if r == emulator.Success {
				_, r = hand.CreateComputeInstance(gi, 0, nil)
			}
			if r != emulator.Success {
				t.Fatalf("GPU %d: make an instance: %v", i, r)
			}
		}
		inv := inventory(t, open(t, n))
		for i, symbol := range slices.Concat([]string{""}, chunk) {
			fault := inv.GPUs[i].Fault
			if (fault == "") != (symbol == "") || !names(fault, symbol) {
				t.Errorf("without %q the fault of GPU %d in MIG mode is %q", symbol, i, fault)
			}
		}
		if got := inv.GPUs[0].MIG.Instances; len(got) != 1 || got[0].Profile != "1c.3g.40gb" {
			t.Errorf("on GPU 0 stand %+v", got)
		}
	})

	// What is changed: the error names the function.
	chunks(t, rowsOf(t, "the change"), func(t *testing.T, chunk []string) {
		n := emulate(t, lacking(modern, true, chunk))
		d := open(t, n)
		inv := inventory(t, d)
		cgroup := t.TempDir()
		for i, symbol := range slices.Concat([]string{""}, chunk) {
			u, said := inv.GPUs[i].UUID, ""
			note := func(err error) {
				if err != nil {
					said += err.Error() + "\n"
				}
			}
			whole, err := d.CreateInstance(wait(t), u, "3g.40gb", gpu.Placement{Start: 4, Size: 4}, 0)
			note(err)
			var made []gpu.Instance
			for _, ci := range []int{0, 1} {
				in, err := d.CreateInstance(wait(t), u, "1c.3g.40gb", gpu.Placement{Size: 4}, ci)
				note(err)
				made = append(made, in)
			}
			for _, in := range append(made, whole) {
				note(d.DestroyInstance(wait(t), u, in))
			}
			note(d.SetMIGMode(wait(t), u, false))
			if strings.Contains(symbol, "MemoryLimits") {
				note(d.SetMemoryLimit(wait(t), u, cgroup, 1<<30))
				_, err := d.MemoryLimit(wait(t), u, cgroup)
				note(err)
			}
			if symbol == "nvmlDeviceSetComputeMode" {
				note(d.ResetComputeMode(wait(t), u))
			}
			if (said == "") != (symbol == "") || !names(said, symbol) {
				t.Errorf("without %q the errors on GPU %d are %q", symbol, i, said)
			}
		}
	})
}

// What names no GPU by a handle, in a world for each.
func TestFunctionsOfTheDriver(t *testing.T) {
	for _, f := range nvml.Functions() {
		if ofGPU(f.Symbol) {
			continue
		}
		t.Run(f.Symbol, func(t *testing.T) {
			spec := modern
			spec.Count = 2
			if f.Symbol != "nvmlShutdown" {
				spec.NotSupported = forms(f.Symbol)
			}
			n := emulate(t, spec)
			d, err := nvml.Open(wait(t), n.opts)
			var inv gpu.Inventory
			if err == nil {
				defer func() { try(t, d.Close()) }()
				inv, err = d.Inventory(wait(t))
			}
			switch f.Vital {
			case "everything":
				if err == nil { // until the fault is cleared: this process needs another library after it
					try(t, n.Inject(emulator.Fault{Call: f.Symbol, Code: emulator.NotSupported}))
					err = d.Close()
					n.Clear()
				}
				if !errors.Is(err, gpu.ErrNotSupported) || !names(err.Error(), f.Symbol) {
					t.Errorf("error %v, want one that names the function", err)
				}
				return
			case "its GPU":
				try(t, err)
				for _, dev := range inv.GPUs {
					if !names(dev.Fault, f.Symbol) {
						t.Errorf("GPU %d has the fault %q", dev.Index, dev.Fault)
					}
				}
				return
			case "":
				try(t, err)
			default:
				t.Fatalf("vital for %q", f.Vital)
			}
			for _, dev := range inv.GPUs {
				if dev.Fault != "" {
					t.Errorf("GPU %d has the fault %q", dev.Index, dev.Fault)
				}
			}
			if strings.HasPrefix(f.Symbol, "nvmlSystem") {
				if inv.CUDA != "" {
					t.Errorf("CUDA %q", inv.CUDA)
				}
				return
			}
			if f.Symbol == "nvmlEventSetFree" {
				listen(t, n, d).hears(t, n, 0, inv.GPUs[0].UUID)
				return
			}
			err = d.Events(wait(t), func(e gpu.Event) { t.Errorf("event %+v", e) })
			if !errors.Is(err, gpu.ErrNotSupported) || !names(err.Error(), f.Symbol) {
				t.Errorf("events: %v, want ErrNotSupported and the function's name", err)
			}
		})
	}
}
