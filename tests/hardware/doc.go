// SPDX-License-Identifier: Apache-2.0

// Package hardware holds what the agent relies on of an NVIDIA driver, as a
// suite that runs on anything that claims to be one.
//
// [Conformance] runs always, on the emulated driver; and, on a machine with an
// NVIDIA GPU, on the real one, with
//
//	go test ./tests/hardware -hardware -v
//
// (make test-gpu). What changes a card is done only where a flag permits it, and
// put back: -time-slices, and -instances, which makes MIG instances where none
// stand on GPUs that are in MIG mode and idle. With -caps programs are held to a memory cap
// before the real driver, in containers of tests/memcap/capsule: one that calls the driver
// itself, PyTorch with each of its allocators, JAX and CuPy, as far as the Python that -python
// names has them. NVML is the judge, asked every few milliseconds, and the same program
// without a cap is timed beside it. So an emulator that drifts from the real driver, or a new
// driver that differs from what the agent expects, fails the same test by the
// same name. What a card or machine lacks is skipped by name: a skip says what
// is missing, never only that something is.
//
// What the agent makes of NVLinks, PCI paths, NUMA nodes and network cards is held
// against the driver's own nvidia-smi topo -m, cell by cell: on a machine with
// several GPUs that is the first proof that has not been had yet (see pkg/gpu/nvml).
//
// The emulated CUDA driver has switches where NVIDIA's documentation leaves a
// behaviour open (tests/emulator/lib). TestSwitchesOfHardware says which of them is the
// real driver's; it is known to tell them apart, for on the emulator it has to find
// what each switch says.
//
// Beside it stand tests of what no sane hardware does on demand: losing a GPU,
// failing and hanging calls, errors reported by the driver. Those run on the
// emulator only.
//
// A process can use one driver library for its whole life, so the emulated and
// the real driver are never tested by one process: with -hardware the tests of
// the emulator are skipped.
package hardware
