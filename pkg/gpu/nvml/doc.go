// SPDX-License-Identifier: Apache-2.0

// Package nvml is the door to the NVIDIA driver. It is the only package that
// speaks to the driver's library, and the only one that knows NVIDIA's
// generator of container parts; what it hands out are the plain values of
// pkg/gpu and pkg/cdi, and errors that wrap the sentinels of pkg/gpu. No
// return code of the driver leaves it.
//
//	d, err := nvml.Open(ctx, nvml.Options{DriverRoot: "/host", HostDriverRoot: "/", Hook: hook})
//	defer d.Close()
//	inv, err := d.Inventory(ctx)     // what GPUs there are
//	parts, err := d.Parts(ctx)       // what a container needs to use one
//	health, err := d.Health(ctx, u)  // what the driver holds against one of them
//	in, err := d.CreateInstance(ctx, u, "3g.40gb", gpu.Placement{Start: 4, Size: 4}, 0)
//	nodes, err := d.Capabilities(minor, in.GI, in.CI)
//	err = d.Events(ctx, func(e gpu.Event) { wake() })
//
// # One door, one caller inside
//
// A driver call can hang, in the kernel, for minutes or forever: a GPU that
// fell off the bus, a reset under way. No thread that hangs there can be
// ended. So all calls go through one door that lets a single caller in at a
// time. The caller waits for the answer no longer than its context; if it
// leaves early, with gpu.ErrTimeout, the call stays inside. Once such a call is
// a second old it is taken for hung, and as long as it stays everybody else is
// told gpu.ErrTimeout at once instead of joining it. When the driver answers
// after all, the door opens again by itself. At most
// one goroutine and one thread are ever lost to a driver that hangs. Only the
// wait for events has a door of its own, since waiting is its business.
//
// A caller that passes a context without an end gets what it asks for: a call
// that may never return.
//
// # Rooms
//
// A [Driver] is made of rooms, which share nothing but the session:
//
//	room      file          owns                                                guarded by
//	session   driver.go     the library as it is open, and its doors            the process's mutex at Open
//	readings  driver.go     nothing                                             -
//	survey    inventory.go  the last good readings, NVLinks                     used inside the door only
//	machine   sysfs.go      what the kernel last said                           its mutex
//	migSide   mig.go        the profiles                                        their mutex
//	modes     modes.go      nothing: MIG mode, reset, time slice                -
//	events    events.go     which GPUs are watched, the hardware as last seen   watching
//	bell      events.go     what modes tell events                              a channel, an atomic
//
// That a GPU is lost, and how often the library was initialised anew, is the session's: survey and
// events both find the one out, and survey counts NVLinks anew by the other. watching is taken
// first, then outside, sets and the doors (gates).
//
// # One library per process
//
// The dynamic linker binds the driver's symbols once for the life of a
// process, and never lets go of the library that it bound them to. So a process
// opens one Driver at a time, and always of the same library. After another
// version of the driver was loaded on a running node the library in memory does
// not fit the kernel module any more: then calls, and Open, say gpu.ErrReloaded,
// and only a new process helps. What counts is the library's content. The same
// version laid down again, as by a driver container that starts anew, still fits.
//
// The kernel module can be unloaded only while no process has the driver
// initialised. Close lets go of it, and Open takes it up again.
//
// # Old drivers
//
// The oldest driver supported is R470. A call to a symbol that the library
// lacks would end the process (symbols are bound at their first call), so Open
// looks up every symbol that R470 has and this package needs, and refuses a
// library without one; a newer symbol is looked up before its use, and what it
// would have told stays unknown without it: the memory that the driver keeps
// for itself (R510), MIG profiles (R510) and with them all instances, in which
// compute slice of its GPU instance a split goes, and the NVLink fabric (about
// R525). The states of all of a GPU's NVLinks in one call, and the speed of each, are
// of about R515: before it there is a call for each link, and one speed for all.
// Limits per cgroup are R615's (SetMemoryLimit): before it there are none.
//
// # What a driver does not support
//
// Cards and drivers answer NOT_SUPPORTED to what they do not have. The table in calls.go has
// a row for each function that is called, and decides what that costs, for all of the package:
//
//   - an optional function is done without. What it would have told stays unknown, which the
//     row says, and the GPU is sound: its value is zero, nil or left out, never a guess.
//   - without a vital one the row's scope cannot be had: anything at all, that GPU, that GPU in
//     MIG mode, or a change. The error, or Device.Fault, names the function.
//
// Memory is optional. A GPU that has none of its own, but the machine's, as GB10 and Thor
// have, answers NOT_SUPPORTED to both forms of the question (seen with driver 580), lists
// what each process has, and computes as any other. Its Device.Memory is 0.
//
// # GPUs that fail
//
// One lost GPU does not hide the others. Inventory keeps it, by the UUID and
// index of the last good reading, with the reason in Device.Fault. Events names
// it as soon as the driver says that one is lost: it asks each GPU that it
// watches, which takes less than a millisecond for eight, and goes on with the
// others. The driver never says by itself that a GPU came back, so while Events
// runs, a library that reports a lost GPU is initialised anew from time to time
// (Options.Rearm); so is one that fails altogether, as after the kernel module
// was loaded again. Until then calls answer gpu.ErrNoDriver or gpu.ErrDriver.
//
// Health reads figures, and judges none of them. What a card or driver cannot
// tell is not an error there.
//
// # GPUs that come and go
//
// The library lists the GPUs that were there when it was initialised. So Events
// watches the machine itself: the device nodes, which the kernel tells about, and
// the driver's own list in /proc, which must be looked at (Options.Look). When
// that has changed and is quiet again it ends its wait, initialises the library
// anew and reports gpu.EventChanged. A GPU that is gone stays in the inventory
// with a fault, until the Driver is closed: its holders have a right to know.
//
// # NVLink
//
// Which links a GPU has is counted once: by number, up to the first that the
// driver calls an invalid argument. Where a link leads is soldered, and told only
// while it is up; it is asked when a link comes up and kept by PCI address, so that
// it holds when indices change. Which links are up is read with every inventory,
// all of a GPU's with one call for field values, as NCCL reads them on Hopper. That
// field (NVML_FI_DEV_NVLINK_GET_STATE) is believed where it said the same as
// nvmlDeviceGetNvLinkState when the links were counted; else, and on a driver that
// lacks it, each link is asked. A link that sleeps is up. So a reading of a GPU with
// NVLinks takes two calls more than of one without: states, and the fabric. What
// cannot be read for once stays as it was: a label must not flicker for a driver
// that is busy.
//
// A link that fails is no fault of the GPU: it works, and is joined less well. That
// is said by the inventory and by nothing else here.
//
// Of this, hardware has confirmed little: the machines that this was developed on
// have one GPU each, or none. What is relied on stands in go-nvml's nvml.h or was
// reported from machines in public:
//
//   - nvmlDeviceGetNvLinkVersion gives an enumeration; A100 says 5, which is NVLink
//     3.1 (open-mpi/hwloc issue 658).
//   - A link that a card has and nothing is plugged into is down, and no error: the
//     12 of an A100 PCIe (NVIDIA/DCGM issue 49). A number past the card's own is an
//     invalid argument on GB200 (NVIDIA/TensorRT-LLM pull request 17060).
//   - Speeds are in MB/s (10^6 bytes), of one link in one direction with its protocol's
//     overhead: 25781 on V100, 25000 on A100, 26562 on H100, 53125 on GB200, as
//     nvidia-smi nvlink -s shows them.
//   - Not confirmed by anybody known: what the state field says while a link is
//     retrained, whether a GPU in MIG mode shows its links (they are counted again when
//     the mode changes), what a link says of its far end once it is down, and the
//     fabric of a GPU that a fabric manager takes into another partition.
//
// On a machine with NVLink, tests/hardware compares all of it with nvidia-smi topo -m.
//
// # The machine
//
// What the kernel knows of NUMA nodes, processors, PCI bridges and RDMA cards is
// read from sysfs (package topology) beside the door, and anew with each inventory.
// It may hang where a network card's firmware does: then an inventory waits a
// second, has of the cards what was known last, and later ones do not wait; the rest
// is read without them. Where sysfs
// has no NUMA node for a GPU the driver may know the memory that is nearest.
//
// # MIG
//
// An instance is created in two steps, the GPU instance with its memory and the compute
// instance in it, and always at a placement that the caller names. Left to itself, the
// driver fills a card in an order that leaves no room for what another order would have
// allowed. A creation that fails destroys what it created. A process that is killed
// between the steps leaves a GPU instance that is listed with CI -1: a creation at that
// placement goes on with it, and DestroyInstance removes it. DestroyInstance checks first
// what exists there: numbers of instances and even their UUIDs are used again, and only
// profile and placement tell instances apart.
//
// Profiles and their placements come from the driver and are read once. The numbers of
// device nodes (Capabilities) come from the kernel module's list, and missing nodes are
// made.
//
// The mode of a card may wait for a reset. The driver's library has no call for
// that, so Reset runs the driver's nvidia-smi, with the library let go of: an
// agent that has the driver open would be the client in the way.
//
// # What containers get
//
// Parts takes NVIDIA's own list of driver files, nodes and hooks (nvcdi), so
// that a container sees what it would see under NVIDIA's toolkit, and leaves
// out what would break this agent's promises: hooks that obey the container's
// environment or its image (apply-cuda-memory-limits, enable-cuda-compat). It
// keeps update-ldcache and create-symlinks, which make libcuda.so.1 resolvable,
// disable-device-node-modification, which keeps nvidia-smi inside a container
// from making nodes of other GPUs (it reads only the host's driver
// parameters), and update-application-profile, which keeps EGL and Vulkan from
// listing GPUs whose nodes the container lacks (it reads only those nodes).
// Device nodes are named by path without numbers: the runtime reads the
// numbers when it makes the container, so a kernel module that was loaded
// again with another major number does no harm.
//
// The package does not know how a GPU is shared, who holds it, what an
// allocation is, or what the kubelet wants.
package nvml
