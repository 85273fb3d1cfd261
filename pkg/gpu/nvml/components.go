// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// Driver is an open NVIDIA driver. Its methods may be called from several goroutines at once.
// Calls of the library run one at a time (see the package's comment), and each method waits no
// longer than its context.
//
// The embedded interfaces are its components. All share the session, and Modes shares the
// requests with events. No component holds another one.
type Driver struct {
	Readings
	Survey
	Instances
	Modes
	Limits
	Contents

	session *session
	events  interface {
		Events(ctx context.Context, report func(gpu.Event)) error
		// rest runs f while Events does not run, and keeps Events from starting meanwhile.
		rest(f func() error) error
	}
	// gone is true once Close has shut the driver down. It is used inside rest alone.
	gone bool
}

// newDriver makes the components of a Driver. seen is the hardware as it was when the driver was
// initialised.
func newDriver(s *session, seen string) *Driver {
	now := &readings{s}
	side := newMIGSide(s, now.processes)
	there := &presence{s}
	rings := &requests{again: make(chan struct{}, 1)}
	return &Driver{
		Readings: now, Survey: newSurvey(s, there, now.memory, side), Instances: side,
		Modes: &modes{s, rings}, Limits: &memoryLimits{s}, Contents: contents{&partsReader{s}, &capabilities{s}},
		session: s, events: newEvents(s, there, rings, seen),
	}
}

// contents is the two components for containers as one.
type contents struct {
	*partsReader
	*capabilities
}

// Library is the file that the driver's library was loaded from. It is a name without a slash if
// the dynamic linker found the library at a place that is not known.
func (d *Driver) Library() string { return d.session.library }

// Events calls report for each critical error (Xid) that the driver reports of any GPU, one call
// at a time. It returns nil when ctx ends or the Driver is closed. A GPU that cannot report
// events is logged once and left out. Errors are missed for some milliseconds each time that the
// GPUs are registered again.
//
// If the driver reports a lost GPU, Events asks each GPU at once, and reports a
// gpu.EventLost for each that confirms it. It also reports each GPU that is found lost at
// registration. If no GPU confirms a loss, the driver fails as a whole, or the UUID of a lost GPU
// cannot be read any longer, the event names no GPU; the inventory then shows which one it is.
// Events goes on with the other GPUs, and tries the lost ones again later.
//
// If GPUs come or go, or the driver answers again, Events initialises the driver anew and then
// reports a gpu.EventChanged: the next inventory shows the change. That takes at most the wait
// for events that is under way (Options.EventWait) and one second more.
//
// Calls of other methods delay only a new initialisation, even if they hang. They delay no
// report.
//
// The error wraps gpu.ErrTimeout if a wait inside the driver hangs beyond its time. It wraps
// gpu.ErrNotSupported if the driver has no events: then the caller must read the inventory to
// find faults and GPUs that come and go. Only one Events runs at a time; a second call waits for
// the end of the first.
func (d *Driver) Events(ctx context.Context, report func(gpu.Event)) error {
	return d.events.Events(ctx, report)
}

// Close ends Events and shuts the driver down. Afterwards this process has nothing of the driver
// open, and the kernel module can be unloaded. Close waits for the wait for events that is under
// way (Options.EventWait), and for work on MIG. If these, or a call that hangs inside the driver,
// last too long, Close gives up after some seconds with an error that wraps gpu.ErrTimeout. The
// Driver cannot be used then either, but Close may be repeated until it succeeds.
func (d *Driver) Close() error {
	d.session.stop()
	return d.events.rest(d.letGo) // Events has freed its event set by then
}

// letGo shuts the driver down, unless another Driver has been opened since. Events does not run.
func (d *Driver) letGo() error {
	s := d.session
	process.Lock()
	mine := process.driver == d
	process.Unlock()
	if d.gone || !mine {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeWait)
	defer cancel()
	err := s.locks.handles.Lock(ctx)
	if err != nil { // handles are in use that a shutdown would make invalid
		err = fmt.Errorf("shut the driver down: %w: %s", err, s.locks.inFlight())
	} else {
		const what = "shut the driver down"
		err = s.exclusive(ctx, what, s.locks.handles.Unlock, func() error { return s.shutdown(what) })
	}
	process.Lock()
	process.open = false
	process.Unlock()
	if err != nil {
		return fmt.Errorf("close NVIDIA driver: %w", err)
	}
	d.gone = true
	return nil
}

// Readings read what changes all the time.
type Readings interface {
	// Memory reads the memory of GPUs in one call, since each call wakes a thread, which costs
	// more than the reading itself. Amounts are rounded down to whole MiB, but the reserved one
	// is rounded up, so that total less reserved is never too much. Before R510, reserved is 0
	// and counts as used. A GPU without memory of its own is left out, since the driver has
	// no figures.
	//
	// If it fails, the result still has the GPUs that could be read. The error wraps
	// gpu.ErrNotFound for a UUID that the driver does not know.
	Memory(ctx context.Context, gpus ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error)
	// Processes lists the processes that the driver sees on a GPU, by PID, then kind. PIDs are
	// those of the agent's own PID namespace, and processes outside it are left out. So the agent
	// needs the host's PID namespace, or the list tells nothing. A process with contexts of two
	// kinds is listed twice. On a GPU in MIG mode the processes of all its instances are listed.
	//
	// Errors: gpu.ErrNotFound for a UUID that the driver does not know; gpu.ErrNotSupported if
	// the driver does not list compute processes, since then there may be some.
	Processes(ctx context.Context, u gpu.UUID) ([]gpu.Process, error)
	// Utilization returns how busy each process has kept the streaming multiprocessors of GPUs
	// since a time: by GPU and PID, in percent, the mean of the whole time, even if the process
	// did not live as long. Idle processes are left out. GPUs that the driver has no figures for
	// are left out too: those in MIG mode and those that do not support it. PIDs are as in
	// Processes.
	//
	// A caller that adds figures up should ask for exactly the time since the last figures. If it
	// asks for a longer time, it counts a process's past twice. Also, the driver forgets a
	// process when it ends, and then its figures for the other processes are too large for the
	// time before. With driver 580.159.04, a process that was busy a quarter of the time had 76 %
	// for the last ten seconds, and 28 % for the last two. That driver keeps some 16 seconds; if
	// asked for more it answers for those.
	Utilization(ctx context.Context, since time.Time, gpus ...gpu.UUID) (map[gpu.UUID]map[int]float64, error)
	// Health reads, and does not judge, what the driver records of a GPU's faults. What the card
	// or the driver does not have stays zero (see gpu.Health): ECC counts if ECC is off or
	// absent, remapped rows before Ampere, retired pages from Ampere on, the recovery action
	// before R550.
	//
	// Errors: gpu.ErrLost for a GPU that fell off the bus or needs a reset, gpu.ErrNotFound for a
	// UUID that the driver does not know.
	Health(ctx context.Context, u gpu.UUID) (gpu.Health, error)
	// Setup reads how earlier owners have set a GPU, and which processes the driver lists on it.
	// It makes some 15 calls. What the card or the driver does not have stays zero. If some
	// figures cannot be read, the result has the others beside the error, which is as Health's.
	Setup(ctx context.Context, u gpu.UUID) (gpu.Setup, error)
	// Surroundings reads /proc and /sys, and makes no call of the library: a file for each process
	// of the node.
	Surroundings() gpu.Surroundings
	// Clients returns the processes, other than this one, that have the device node of a GPU with
	// this minor number open, by PID: monitors too, which the driver does not list. It reads the
	// descriptors of all processes of the node. Processes outside the agent's PID namespace are
	// left out.
	Clients(minor int) []gpu.Client
}

// Survey reads which GPUs there are, and how they are connected.
type Survey interface {
	// Inventory reads all GPUs. A GPU that the driver cannot describe is in it too: as it was
	// when it could last be read, with the reason in Fault. If it never could, only its index is
	// known. A GPU that the driver no longer lists stays in the inventory as long as the Driver
	// is open. It fails only if nothing at all could be read.
	//
	// Facts that cannot change while a process has the driver open are read once: model and far
	// ends of NVLinks for each GPU, MIG profiles for each kind of GPU. Each inventory reads anew
	// which NVLinks work, the fabric, and what the kernel knows of the machine.
	Inventory(ctx context.Context) (gpu.Inventory, error)
	// LinksChanged reports whether an NVLink has failed or come back, or a GPU's fabric has
	// changed, since the last Inventory; a new Inventory shows which. It makes three calls for
	// each GPU with NVLinks and none for others. A GPU that cannot be read counts as unchanged.
	LinksChanged(ctx context.Context) (changed bool, err error)
}

// Instances read and change the MIG side of a GPU without switching its MIG mode.
type Instances interface {
	// MIG reads one GPU's MIG side as it is now. For a GPU that is not capable of MIG it is the
	// zero value. It waits for work on that GPU's instances, and for no other call.
	//
	// Errors: gpu.ErrNotFound for a UUID that the driver does not know.
	MIG(ctx context.Context, u gpu.UUID) (gpu.MIG, error)
	// CreateInstance creates a compute instance of a profile, which is the driver's name or
	// that of a split (1c.3g.40gb), at a placement of its GPU instance. For a split, ci is
	// its first compute slice within the GPU instance; otherwise ci is 0. If a GPU instance
	// of the profile exists at the placement, the compute instance is created in it.
	// Otherwise a GPU instance is created first, and destroyed again if the second step
	// fails. If the instance exists already, it is returned as it is, busy or not. The UUID
	// of a new instance is left out: finding it takes the driver as long as MIG does.
	//
	// The hardware takes 0.1 to 1 s, and may take much longer. Work on one GPU runs one piece at
	// a time. It neither waits for readings nor delays them. If the caller leaves
	// (gpu.ErrTimeout), the work goes on; MIG, and the next work on that GPU, wait for it.
	//
	// Errors: gpu.ErrNoRoom if another instance is there, or the card cannot have one more;
	// gpu.ErrInvalid for a profile or a place that the GPU does not have; gpu.ErrNotSupported
	// while MIG is off, and for a chosen compute slice if the driver cannot place it;
	// gpu.ErrNoPermission without root; gpu.ErrNotFound for a UUID that the driver does not know.
	// If it fails, what it created is destroyed again, unless the error says otherwise.
	CreateInstance(ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int) (gpu.Instance, error)
	// DestroyInstance destroys an instance as MIG or the inventory lists it: first the compute
	// instance, then the GPU instance unless that has other compute instances. With CI -1 it
	// destroys a GPU instance without compute instances. If the second step fails, it creates the
	// compute instance again, so that the instance exists as a whole or not at all, unless the
	// error says otherwise. A half-destroyed instance may be passed as it was before, or as it is
	// listed now. Time, and callers that leave, are as with CreateInstance.
	//
	// Errors: gpu.ErrInUse if a process uses it, or if (CI -1) it has compute instances;
	// gpu.ErrNotFound if nothing of it exists, or if its numbers belong to another instance now,
	// which is left alone.
	DestroyInstance(ctx context.Context, u gpu.UUID, in gpu.Instance) error
}

// Modes change how a GPU as a whole works.
type Modes interface {
	// SetMIGMode switches a GPU's MIG mode. The new mode is in force at once, or after a reset
	// (Reset) or a reboot; until then MIG shows it as Pending. The GPU must have no instances and
	// no processes. Time, and callers that leave, are as with CreateInstance. A driver may refuse
	// because this process waits for the GPU's events. Then SetMIGMode stops that wait, which
	// takes up to Options.EventWait, and tries once more.
	//
	// Errors: gpu.ErrInUse if the GPU has instances or clients, gpu.ErrNotSupported for a card
	// without MIG, gpu.ErrNoPermission without root, gpu.ErrNotFound for a UUID that the driver
	// does not know.
	SetMIGMode(ctx context.Context, u gpu.UUID, on bool) error
	// Reset resets one GPU with the driver's own nvidia-smi (see SetTimeSlice). A pending MIG
	// mode comes into force, broken rows of memory are replaced, and all instances are gone.
	//
	// No process may have the GPU open. This process has it open while the driver is initialised,
	// so Reset shuts the driver down and initialises it again afterwards. Before that, Events
	// ends its wait (Options.EventWait) and work on MIG ends; all other calls wait until the
	// driver is initialised again. Processes on other GPUs are not affected. Events continues by
	// itself, but misses what happens meanwhile.
	//
	// If the caller leaves (gpu.ErrTimeout), a reset that has begun goes on.
	//
	// Errors: gpu.ErrInUse, with the program's output and the clients that have the GPU's node
	// open as far as they can be seen; gpu.ErrNotSupported if there is no such program or the GPU
	// cannot be reset alone; gpu.ErrNoPermission without root; gpu.ErrNotFound for a UUID that
	// the driver does not know; gpu.ErrNoDriver if the driver cannot be initialised again: Events
	// goes on trying.
	Reset(ctx context.Context, u gpu.UUID) error
	// SetTimeSlice sets how long a process may keep a shared GPU. The driver's library has no
	// call for it, so this runs the driver's own nvidia-smi, found below DriverRoot. The program
	// uses the same library as the agent. It runs in the agent's own root, since of the host it
	// needs only that library and the device nodes. It needs no lock against other calls: a
	// program that hangs delays only a Reset.
	//
	// Errors: gpu.ErrNotSupported, with the program's output, if there is no such program, or it
	// or the card cannot set a time slice; gpu.ErrNotFound for a UUID that it does not know;
	// gpu.ErrInvalid for a value that is not a time slice; gpu.ErrTimeout if ctx ends first.
	SetTimeSlice(ctx context.Context, u gpu.UUID, slice gpu.TimeSlice) error
	// ResetComputeMode sets a GPU's compute mode to DEFAULT, so that any number of processes can
	// compute on it. Those that compute go on. The errors wrap gpu.ErrNotSupported in MIG mode, and
	// gpu.ErrNoPermission without root.
	ResetComputeMode(ctx context.Context, u gpu.UUID) error
	// SetComputeMode sets a GPU's compute mode to ComputeDefault, ComputeExclusiveProcess or
	// ComputeProhibited, and reads it back. Processes that compute go on. The errors are those of
	// ResetComputeMode; gpu.ErrInvalid for another mode, and gpu.ErrDriver if the driver has
	// another one afterwards.
	SetComputeMode(ctx context.Context, u gpu.UUID, mode gpu.ComputeMode) error
}

// Limits are the driver's own memory limits, for cgroups.
type Limits interface {
	// SetMemoryLimit limits the memory of a GPU that all processes of a cgroup have together, in
	// bytes. NoLimit removes the limit; so does the end of the cgroup. cgroup is the directory's
	// path as this process sees it. The limit guarantees nothing to them (its soft limit is 0): a
	// guarantee would also raise dmem.min of all cgroups above this one, and nothing lowers that
	// again. Managed memory does not count.
	//
	// It needs driver R615 and root. Errors: gpu.ErrNotSupported if library, card or kernel
	// cannot do it; gpu.ErrNotFound for a UUID that the driver does not know, for a cgroup that
	// it cannot open, and for a cgroup without dmem.* files on a kernel that has them;
	// gpu.ErrInvalid for a path that is not absolute, and for more bytes than the card has.
	SetMemoryLimit(ctx context.Context, u gpu.UUID, cgroup string, bytes uint64) error
	// MemoryLimit reads the limit that SetMemoryLimit has set. It fails as SetMemoryLimit does,
	// and with gpu.ErrNotFound if there is no limit.
	MemoryLimit(ctx context.Context, u gpu.UUID, cgroup string) (gpu.MemoryLimit, error)
}

// Contents list what containers need to use GPUs and MIG instances.
type Contents interface {
	// Parts lists what containers need of the driver and of each GPU, by host paths. It reads the
	// file system below DriverRoot and DevRoot. Call it again when the driver may have changed.
	//
	// A GPU that the driver cannot describe, or that has no device node, is logged and left out.
	// Errors: gpu.ErrInvalid if Options.Hook is empty; gpu.ErrNoDriver if CUDA's library or a
	// control node is missing, since a container with such parts would start and find no GPU.
	Parts(ctx context.Context) (cdi.Parts, error)
	// Capabilities lists the device nodes that a container needs, beside the GPU's own, to use a
	// compute instance: the access nodes of the GPU instance and of the compute instance. minor
	// is the GPU's minor number. As in Parts, nodes have host paths and no numbers.
	//
	// The kernel module lists the minor numbers of these nodes at
	// ProcRoot/driver/nvidia-caps/mig-minors; it assigns them when it is loaded. ProcRoot/devices
	// has the major number of nvidia-caps. Capabilities makes a node that is missing, or that has
	// the numbers of a module that is no longer loaded.
	//
	// It does not call the driver's library. Errors: gpu.ErrNotFound if the list has no such
	// instance; gpu.ErrNotSupported if there is no list, or the kernel has no nvidia-caps;
	// gpu.ErrNoPermission if a node cannot be made.
	Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error)
}
