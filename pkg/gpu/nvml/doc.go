// SPDX-License-Identifier: Apache-2.0

// Package nvml talks to the NVIDIA driver. No other package calls the driver's library or
// NVIDIA's generator of container parts. Its results are plain values of pkg/gpu and pkg/cdi, its
// errors wrap those of pkg/gpu, and no return code of the driver leaves it.
//
//	d, err := nvml.Open(ctx, nvml.Options{DriverRoot: "/host", HostDriverRoot: "/", Hook: hook})
//	defer d.Close()
//	inv, err := d.Inventory(ctx)     // which GPUs there are
//	parts, err := d.Parts(ctx)       // what a container needs to use one
//	health, err := d.Health(ctx, u)  // which faults the driver has recorded for one
//	in, err := d.CreateInstance(ctx, u, "3g.40gb", gpu.Placement{Start: 4, Size: 4}, 0)
//	nodes, err := d.Capabilities(minor, in.GI, in.CI)
//	err = d.Events(ctx, func(e gpu.Event) { wake() })
//
// # Calls that hang
//
// A call of the driver can hang in the kernel for minutes or forever: a GPU fell off the bus, or
// a reset is under way. A thread that hangs there cannot be ended. So calls run one at a time,
// behind a lock (package ctxlock), and the caller waits no longer than its context. If it leaves,
// with gpu.ErrTimeout, the call goes on. After a second such a call counts as hung: until it
// returns, all other callers get gpu.ErrTimeout at once. Event sets have a lock of their own, and
// so has each GPU for work on its MIG side. So a hung driver costs at most one goroutine and one
// thread for each lock. Without a deadline in its context, a caller may wait forever.
//
// # Components
//
// A [Driver] consists of components that share the session:
//
//	component  file          reads or changes              owns, guarded by
//	session    driver.go     -                             the library and its locks; process at Open
//	readings   driver.go     memory, processes, health     nothing
//	survey     inventory.go  GPUs and NVLinks              the last good readings; locks.calls
//	machine    sysfs.go      what the kernel knows         the last answer; its mutex
//	migSide    mig.go        profiles and instances        the profiles; their mutex
//	modes      modes.go      MIG mode, reset, time slice   nothing
//	events     events.go     errors, GPUs that come or go  which GPUs are watched; watching
//	requests   events.go     requests of modes to events   a channel and an atomic
//
// The session also knows whether a GPU is lost, and how often the library was initialised anew.
// Locks are taken in this order: watching, then as type locks lists them.
//
// # One library per process
//
// The dynamic linker binds the driver's symbols once in the life of a process. So a process has
// one Driver open at a time, and always the same library. If another version of the driver is
// loaded, the library in memory no longer fits the kernel module: calls and Open return
// gpu.ErrReloaded, and only a new process helps. The same library written again still fits, since
// its bytes count.
//
// The kernel module can be unloaded only while no process has the driver initialised. Close shuts
// it down, and Open initialises it again.
//
// # Old drivers, and what a card lacks
//
// The oldest driver supported is R470. A call to a missing symbol would end the process. So Open
// looks up all symbols that R470 has and this package needs, and fails if one is missing. A newer
// symbol is looked up before each use.
//
// Cards and drivers answer NOT_SUPPORTED to what they do not have. A table in calls.go lists each
// function that is called. Without an optional function, one fact stays unknown: zero, nil or left
// out, never guessed. Without a vital one, the reading or change fails, or the GPU gets a fault;
// the error, or Device.Fault, names the function.
//
// # GPUs that fail, come or go
//
// One lost GPU does not hide the others. Inventory lists it as it was last read, with the reason in
// Device.Fault, until the Driver is closed: its holders must learn of it. Events reports it at once
// and goes on with the others. The driver never reports by itself that a GPU is back. So while
// Events runs, it initialises a library that has lost a GPU, or fails altogether, anew from time to
// time (Options.Rearm). Meanwhile calls to a driver that fails return gpu.ErrNoDriver or
// gpu.ErrDriver.
//
// The library lists only GPUs that existed when it was initialised. So Events also watches the
// device nodes, by inotify, and polls the driver's list in /proc (Options.Look). After a change it
// initialises the library anew and reports gpu.EventChanged.
//
// An NVLink that fails is no fault of its GPU: only the inventory shows it.
//
// # MIG
//
// A GPU instance has the memory, and a compute instance in it does the work. CreateInstance
// creates both, always at a placement that the caller names: the driver's own order would leave
// no room for later instances. A process that is killed between the steps leaves a GPU instance
// with CI -1. CreateInstance at that placement completes it, and DestroyInstance removes it.
// DestroyInstance first compares profile and placement with the caller's: numbers and even UUIDs
// of instances are used again.
//
// A new MIG mode may need a reset, and the library has no call for that. So Reset shuts the library
// down and runs the driver's nvidia-smi: with the driver open, this process would block the reset.
//
// # What containers get
//
// Parts returns NVIDIA's own list of driver files, nodes and hooks, but without the hooks that obey
// a container's environment or image (see parts.go).
//
// The package does not know how a GPU is shared, who holds it, what an allocation is, or what the
// kubelet needs.
package nvml
