// SPDX-License-Identifier: Apache-2.0

// Package emulator is a node's NVIDIA driver without the hardware: one world
// of GPUs that answers as the driver does, and refuses what the driver
// refuses.
//
// # The model
//
// A World holds GPUs of a model and count, read from a small YAML file (Spec),
// the processes that have memory on them, the faults that calls meet and the
// counters of all calls. Its own methods are the hand of whoever runs the
// hardware: Xid raises a critical error and does to the GPU what such a fault
// does (an ECC error is counted, a row waits to be remapped), Lose drops a GPU
// off the bus, Unplug takes it out of the machine, AddProcess gives a process
// memory, Reset and Unload are refused while any has, Reboot begins anew, Inject
// makes calls fail, slow down or hang (all, one in so many, or the k-th alone;
// before they do their work or after), Calls counts them.
//
// Programs meet the world through a Session, one for each process, whose
// methods are the driver's calls: each answers a value and a Return with
// NVML's numbers. Every call is counted under its exported name, then meets
// the faults, then has its handle checked (a lost GPU answers GPUIsLost), then
// reads the world. A Session sees PIDs in its own PID namespace, and of the GPUs
// those whose device nodes its process has, numbered anew: in a container, GPU 0
// is the container's. Nodes that a real driver has put into the machine's /dev do not
// count. Which GPUs there are it finds at its first Init, as the
// driver's library does: one that went, however shortly, stays lost to it until
// it has shut down and initialised again, and one that came is not there before.
//
//	w, err := emulator.New(emulator.Spec{Model: "H100-80GB", Count: 8})
//	s := w.Open(emulator.Opening{PID: os.Getpid()})
//	defer s.Close()
//	s.Init()
//	gpu, r := s.DeviceByIndex(0)
//	mem, r := s.Memory(gpu) // 81559 MiB in bytes, 551 MiB of them reserved
//	w.Lose(0)
//	mem, r = s.Memory(gpu) // r is GPUIsLost
//
// Unit tests use the world like this, in their own process. For everything
// that loads the driver's library, package daemon serves the same world on a
// unix socket, package lib builds the libnvidia-ml.so.1 and the libcuda.so.1 that
// speak to it (their requests end in Session.Serve), and package install lays
// both down like a driver, with files that follow the world: an unplugged GPU's
// device node goes, and a driver that is loaded as another version has its
// libraries replaced.
// cmd/gpu-emulator is all of that as one program.
//
// # Memory
//
// The world knows what every process has on every GPU, in bytes, and the most that
// a GPU ever had to give (PeakUsed). AddProcess gives memory to a process from
// outside; a program takes its own through libcuda.so.1, whose calls all come to
// Session.Charge: so many bytes more, or less, in the units that the hardware
// has, and OutOfMemory where the card is full. The library keeps the addresses
// and handles, the world keeps the sums: NVML lists the process, cuMemGetInfo
// sees what others have, and all is free the moment that the process is dead or
// becomes another program, whether or not anyone has noticed yet.
//
// Units are those of the hardware. From 2 MiB on an allocation takes whole blocks
// of 2 MiB; smaller ones share blocks, in which what does not fit any more is
// lost to the card. A pool reserves 32 MiB at a time and keeps them. Memory that
// is shared between processes (Share) is charged to the one that made it, for as
// long as anything holds it: handles, mappings, file descriptors. Managed memory
// and host memory count nowhere.
//
// From driver 615 on a cgroup can be limited (SetMemoryLimits): its processes, and
// those of cgroups below it, get no more of the GPU together, by what the kernel
// says at that moment of who is in it. A cgroup of any hierarchy will do, v1 too,
// as long as the kernel has no dmem controller; with it (Spec.Dmem) the cgroup has to
// have its files, NotFound else, and a soft limit leaves its mark on all cgroups above
// (State.DmemMin) for good. What AddProcess gives counts and is not refused. NVML's
// memory info and cuMemGetInfo in the cgroup show the card as it is: what the real ones
// show there nobody here has seen.
//
// How busy processes keep a GPU (nvmlDeviceGetProcessUtilization) is what KeepBusy was told of
// them, as a mean of the time that is asked for.
//
// With GPU_EMULATOR_ACCOUNTING=process in its environment, a program counts for
// itself after cuInit and asks nobody, for measurements of what stands between
// a program and its driver.
//
// # MPS
//
// A process can be the MPS server of a GPU (ServeMPS), and others its clients
// (Session.JoinMPS): package mps has the programs that make it so. A client's
// context has the server's percentage of the multiprocessors at that moment, or its
// own variable's if that is less. A fatal fault of one client (Fail), and its death
// while it keeps the GPU busy, end the contexts of all; the server then takes no
// client until all that it had are gone. DetachMPS is terminate_client: what
// becomes of the process after that is no neighbour's concern. NVML lists clients
// as compute and as MPS processes, the server as a compute process. In exclusive-process
// mode a server's clients alone get contexts beside it.
//
// # Checkpoints
//
// From CUDA 12.8 on a program of root can lock another (Session.Lock), take its memory off the cards
// (Checkpoint), put it back (Restore) and unlock it (Unlock). Calls of a locked process wait. Refused are MIG
// devices, MPS's clients and servers, and memory that is shared; a restore where the card has no room. SetBusy
// makes a lock time out; a fault that answers Unknown for Checkpoint or Restore breaks the process. The
// contents of the card survive, as far as there are any: words that a program copies one at a time. All of
// this is by NVIDIA's documentation; nobody here has seen it on a card. What the real one takes of the
// process's host memory is a number here (State.Parked), and managed memory is not looked at.
//
// # MIG
//
// A GPU in MIG mode holds GPU instances, each at a place in memory slices, and in
// them compute instances, each at a place in compute slices. A compute instance
// is a MIG device, with a handle and a UUID, and processes are on those alone. An
// instance of the table (MIGProfile) can be made where no other overlaps it,
// where its profile's count is not reached and where there are media engines left
// for it: of all instances together no more than the card has, which is why one
// media extension is all that the larger cards carry, and why +me.all stands
// beside -me alone on the smallest. All else is InsufficientResources; a place
// that is none of the profile's is InvalidArgument. Without a place the driver
// chooses the last one of the card that is free, whatever that leaves, so some
// geometries fail in one order and not in another. What has compute instances or
// live processes is InUse. A process that is allocated a device but has not
// started holds nothing.
//
//	w.SetMIG(0, true) // the operator's hand
//	gi, r := s.CreateGPUInstance(0, 9, &emulator.Placement{Start: 4, Size: 4}) // 3g.40gb
//	ci, r := s.CreateComputeInstance(gi, 2, nil) // the whole of it
//	dev, r := s.MIGDevice(0, 0)
//
// Ids come from a binary tree that is mirrored anew whenever the card was empty:
// 7 to 14 for an eighth of the card, 3 to 6 for a quarter, 1 and 2 for a half. The
// UUID is of the place, and the same when an instance is made there again; only
// the serial numbers of State tell two of them apart. Handles are made of ids, so
// a kept one may come to mean another instance, which NVML allows.
//
// The mode changes at once on Hopper and later cards, if no process is on the GPU,
// and goes with the driver (Unload, Reboot). On Ampere it is pending until Reset,
// and stays for good. Instances survive none of these. MIGSpec gives the seconds
// that the hardware takes for an operation: one at a time on a GPU, while all else
// goes on. A program that dies under one is, as in the kernel, not gone before it
// is done; that is at once then.
//
// Who may not open the node mig/config (Opening.Capability) changes nothing, has
// access to the MIG devices whose two nodes it can open, and is told nothing of
// what else is on the GPU.
//
// # The machine
//
// The GPUs stand in a machine: NUMA nodes with CPUs and memory, host bridges and
// switches of the PCI bus, NVLinks between GPUs or to NVSwitches, RDMA network cards,
// a name that its firmware gives, and where there is one the NVLink fabric that spans
// several. Spec.Topology names one of those under topologies/, which are worlds
// themselves: they stand underneath, and what a world says besides wins.
//
//	topology: dgx-h100
//	numa: [{cpus: "0-7"}, {cpus: "8-15"}]  # with fewer CPUs
//
// Everything is read off one tree and one list of wires: a pair's level on the PCI bus
// from the two paths in sysfs, CPU sets from the node of the GPU's slot, P2P from the
// links that work. A link has two ends, each with a number on its card; it is down at
// both when it fails (SetLink), and where the other end's GPU is lost or unplugged. An
// end of its own opinion is only had by saying so (LinkSpec.Back). Nothing else changes
// with a link: who wants the Xid that often comes with it raises it.
//
// A world that says nothing of its machine has one that is made up, the same for ever:
// GPUs in twos behind a switch, in two NUMA nodes of 64 CPUs.
//
// # Where its truth comes from
//
// Legality and figures come from the tables under models/, recorded from
// drivers, and never from the product under test: were both to share a table,
// they would share its errors. For the same reason nothing here imports a
// package of the product. Where a figure is an estimate its table says so.
//
// Nothing is made easy for a program that mixes things up: a GPU's minor is
// not its index, its PCI address says nothing about either, and profile
// numbers are not profile enums.
//
// # What it refuses to know
//
// An Xid's coupling with counters is one error each, in DRAM; storms, SRAM and
// errors that the driver only corrects are set by hand (SetHealth). The operator's
// reset does not ask whether a session has the GPU open; a program's does
// (Session.Reset), as the real one.
//
// Of MIG it does not know what instances share: bandwidth, caches, P2P. A profile
// with a revision of its own for compute instances is not in any table. That a
// program without mig/config is told nothing of the whole GPU, and that calls
// which take no MIG device call it an invalid argument, is nvml.h's word; nobody
// here has seen it. Nor has anyone the ids of the newest cards.
//
// A link is up or down: it does not train, retry, slow down or sleep. The lanes of a GPU
// with NVSwitches reach all others at once, whatever fails in between. Memory of GPUs
// that the kernel sees as NUMA nodes is in sysfs alone.
//
// There is no clock, temperature or power reading: those calls answer
// NotSupported, as they do on cards without the sensor.
//
// Nothing computes: a kernel that is launched has run, a copy moves nothing but single words, and
// addresses of the card cannot be looked at. What it takes of the card is real,
// see the next part. Of overhead there is one figure for a context
// (Spec.ContextMiB), what limits of a context have beyond their defaults, and what a
// module's image says of itself; what libraries allocate for themselves is not there.
// CUDA_DEVICE_ORDER is not looked at: GPUs come in the driver's order.
package emulator
