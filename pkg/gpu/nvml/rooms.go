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

// Driver is an open NVIDIA driver. Its methods may be called from several
// goroutines at once; they go through one door (see the package's essay), and
// each waits no longer than its context.
//
// These are its rooms. They share the session, and the bell between Modes and Events;
// no room holds another one.
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
		// rest runs f while Events does not run.
		rest(f func() error) error
	}
	// gone says that Close has let go of the driver. It is used inside rest alone.
	gone bool
}

// newDriver makes the rooms of a Driver. seen is the hardware as it was when the driver was
// initialised.
func newDriver(s *session, seen string) *Driver {
	now := &readings{s}
	side := newMIGSide(s, now.processes)
	there := &presence{s}
	rings := &bell{again: make(chan struct{}, 1)}
	return &Driver{
		Readings: now, Survey: newSurvey(s, there, now.memory, side), Instances: side,
		Modes: &modes{s, rings}, Limits: &memoryLimits{s}, Contents: contents{&partsReader{s}, &capabilities{s}},
		session: s, events: newEvents(s, there, rings, seen),
	}
}

// contents are both rooms for containers.
type contents struct {
	*partsReader
	*capabilities
}

// Library is the file that the driver's library was loaded from. A name without a slash
// means that the dynamic linker found it at a place that is not known.
func (d *Driver) Library() string { return d.session.library }

// Events calls report for each critical error (Xid) that the driver reports of
// any GPU, one after the other, until ctx ends or the Driver is closed; then it
// returns nil. A GPU that cannot report events is logged once and left out. What
// happens while GPUs are registered again, some milliseconds, goes unheard.
//
// Where the driver itself says that it lost a GPU, report is called at once with
// a gpu.EventLost for each GPU of which it says so when asked; so it is for each
// that is found lost when the GPUs are registered. Where the driver says so of
// none, or fails altogether, or cannot tell the name of a lost GPU any more, the
// event names no GPU: the inventory tells more. Events goes on with what is left,
// and tries again later.
//
// Where GPUs have come or gone, or the driver answers again, the driver is
// initialised anew and report is called with a gpu.EventChanged: an inventory
// read from then on has them. That takes as long as the wait that is under way
// (Options.EventWait) and less than a second more.
//
// Calls of the Driver's other methods delay none of this, not even if they hang,
// but for a new initialisation.
//
// It returns an error that wraps gpu.ErrTimeout if a wait inside the driver
// hangs when it should end, and one that wraps gpu.ErrNotSupported if the driver has no
// events: faults, and GPUs that come and go, are then found by reading. Only one Events
// runs at a time; another waits for the first one's end.
func (d *Driver) Events(ctx context.Context, report func(gpu.Event)) error {
	return d.events.Events(ctx, report)
}

// Close ends Events and lets go of the driver: this process then has nothing of
// it open, and its kernel module can be unloaded. That takes as long as the wait
// for events that is under way (Options.EventWait), and as work on MIG. Where
// that, or a call that hangs inside the driver, lasts, it gives up after some
// seconds with an error that wraps gpu.ErrTimeout. The Driver cannot be used
// either way, but Close may be repeated until it succeeds.
func (d *Driver) Close() error {
	d.session.stop()
	return d.events.rest(d.letGo) // Events has freed what it held
}

// letGo lets go of the driver, if this Driver has it. Nobody waits for events.
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
	err := s.gates.outside.Seize(ctx)
	if err != nil { // there are handles that would end
		err = fmt.Errorf("shut the driver down: %w: %s", err, s.gates.inFlight())
	} else {
		const what = "shut the driver down"
		err = s.alone(ctx, what, s.gates.outside.Yield, func() error { return s.shutdown(what) })
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
	// Memory reads the memory of GPUs now, in one visit: each visit wakes a thread, which
	// costs more than the question. Amounts are rounded down to whole MiB, but
	// the reserved one up, so that total less reserved never promises too much.
	// On a driver before R510 reserved is 0 and counts as used. A GPU of which the driver has no
	// figures, as one whose memory is the machine's, is left out.
	//
	// With an error, the GPUs that could be read are in the answer nevertheless.
	// Errors: gpu.ErrNotFound for a UUID that the driver does not know.
	Memory(ctx context.Context, gpus ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error)
	// Processes lists what the driver sees on a GPU, by PID, then kind. PIDs are
	// those of the agent's own PID namespace, and a process outside it is left
	// out: without the host's PID namespace the list says nothing. A process with
	// contexts of two kinds is there twice. On a GPU in MIG mode the processes of
	// all its instances are listed.
	//
	// Errors: gpu.ErrNotFound for a UUID that the driver does not know; gpu.ErrNotSupported where
	// it does not list processes that compute, which are not none then.
	Processes(ctx context.Context, u gpu.UUID) ([]gpu.Process, error)
	// Utilization is how busy processes have kept the streaming multiprocessors of GPUs since a
	// time, in percent and by PID: the mean of all that time, whether they lived or not. Processes
	// that were idle are left out, and so are GPUs of which the driver does not tell: in MIG mode,
	// and others that do not support it. PIDs are as Processes has them.
	//
	// Who adds figures up should ask for the time since the figures before, no more and no less.
	// A longer time has a process's past again. And what a process did is forgotten when it ends:
	// the figures of the others are then too large for the time before (seen with driver 580.159.04:
	// of a process that was busy for a quarter of the time, 76 % for the last ten seconds, and 28 %
	// for the last two). That driver keeps some 16 seconds: for a longer time it tells those.
	Utilization(ctx context.Context, since time.Time, gpus ...gpu.UUID) (map[gpu.UUID]map[int]float64, error)
	// Health reads what the driver keeps of a GPU's faults. What the card or the
	// driver does not have stays at its zero value (see gpu.Health): ECC counts
	// where ECC is off or absent, remapped rows before Ampere, retired pages from
	// Ampere on, the recovery action before R550.
	//
	// Errors: gpu.ErrLost for a GPU that fell off the bus or takes no call before
	// it is reset, gpu.ErrNotFound for a UUID that the driver does not know.
	Health(ctx context.Context, u gpu.UUID) (gpu.Health, error)
}

// Survey reads what GPUs there are, and how they are connected.
type Survey interface {
	// Inventory reads all GPUs. One that the driver cannot describe is in it
	// nevertheless, as it was when it last could, with the reason in Fault; if it
	// never could, the index is all that is known of it. A GPU that the driver no
	// longer lists stays in the inventory as long as the Driver is open. An error
	// means that nothing at all could be read.
	//
	// What cannot change while a process has the driver open (model, where NVLinks
	// lead) is read once per GPU, MIG profiles once per kind of GPU; which NVLinks work, the fabric, and
	// what the kernel says of the machine are read anew each time.
	Inventory(ctx context.Context) (gpu.Inventory, error)
	// LinksChanged reports whether NVLinks have failed or come back, or a GPU's fabric is
	// another, since the last Inventory, which tells which. It costs three calls for each GPU
	// with NVLinks and none for others. A GPU that cannot be read counts as it was.
	LinksChanged(ctx context.Context) (changed bool, err error)
}

// Instances read and change the MIG side of a GPU whose mode stays.
type Instances interface {
	// MIG reads one GPU's MIG side as it is now; without capability it is the zero
	// value. It waits for work on that GPU's instances that is under way, and for no
	// other call.
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
	// The hardware takes 0.1 to 1 s, and may take much longer. Work on one GPU is done one
	// at a time; it neither waits for readings nor delays them. A caller that leaves
	// (gpu.ErrTimeout) does not end the work: the next work on that GPU, and MIG, wait for
	// it.
	//
	// Errors: gpu.ErrNoRoom where something else stands there, or the card cannot
	// have another one; gpu.ErrInvalid for a profile or a place that the GPU does not
	// have; gpu.ErrNotSupported while MIG is off, and for a compute slice to be chosen
	// on a driver that cannot; gpu.ErrNoPermission without root; gpu.ErrNotFound for a
	// UUID that the driver does not know. Whatever the error, what it made is gone
	// again, unless the error says otherwise.
	CreateInstance(ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int) (gpu.Instance, error)
	// DestroyInstance destroys an instance as MIG or the inventory lists it: the compute
	// instance, then the GPU instance unless that has other compute instances. With CI -1 it
	// destroys a GPU instance without compute instances. If the second step fails, the
	// compute instance is created again, so that the instance exists as a whole or not at
	// all, unless the error says otherwise. A half-destroyed instance may be destroyed as it
	// was before, or as it is listed now. Time, and callers that leave, are as with
	// CreateInstance.
	//
	// Errors: gpu.ErrInUse if a process uses it, or if (CI -1) it has compute instances;
	// gpu.ErrNotFound if nothing of it exists, or if another instance has its numbers now,
	// which is left alone.
	DestroyInstance(ctx context.Context, u gpu.UUID, in gpu.Instance) error
}

// Modes change how a GPU as a whole works.
type Modes interface {
	// SetMIGMode switches a GPU's MIG mode. It comes into force at once, or waits for
	// a reset (Reset) or a reboot: then MIG tells it as Pending. No instance may
	// stand, and no process use the GPU. Time, and callers that leave, are as with
	// CreateInstance; where the driver refuses while the GPU's events are waited for,
	// which is as long as Options.EventWait, it is tried once more without.
	//
	// Errors: gpu.ErrInUse where a client of the GPU is in the way,
	// gpu.ErrNotSupported for a card without MIG, gpu.ErrNoPermission without root,
	// gpu.ErrNotFound for a UUID that the driver does not know.
	SetMIGMode(ctx context.Context, u gpu.UUID, on bool) error
	// Reset resets a GPU alone, with the driver's own nvidia-smi (see SetTimeSlice):
	// a MIG mode that is pending comes into force, a row of memory is replaced, and
	// all instances are gone. No process may have the GPU open. This one has, as long
	// as it has the driver initialised, so the driver is let go of meanwhile: Events
	// ends its wait first (Options.EventWait), work on MIG is waited for, and all
	// other calls wait until the driver has been initialised again. Other processes
	// on other GPUs notice nothing. Events goes on by itself; what happens meanwhile
	// goes unheard.
	//
	// A caller that leaves (gpu.ErrTimeout) does not end a reset that has begun.
	//
	// Errors: gpu.ErrInUse, with the program's words and the clients that have the
	// GPU's node open as far as they can be seen; gpu.ErrNotSupported where there is no
	// such program or the GPU cannot be reset alone; gpu.ErrNoPermission without root;
	// gpu.ErrNotFound for a UUID that the driver does not know; gpu.ErrNoDriver where
	// the driver cannot be initialised again: Events goes on trying.
	Reset(ctx context.Context, u gpu.UUID) error
	// SetTimeSlice sets how long a process may keep a shared GPU. The driver's
	// library has no call for it, so this runs the driver's own nvidia-smi, found
	// below DriverRoot, with the library that the agent uses; the program runs in
	// the agent's own root, since it needs nothing of the host's but that library
	// and the device nodes. It does not pass the door: a program that hangs harms
	// only itself, and keeps a Reset waiting.
	//
	// The error wraps gpu.ErrNotSupported, with the program's own words, where
	// there is no such program or it or the card cannot set a time slice;
	// gpu.ErrNotFound for a UUID that it does not know; gpu.ErrInvalid for a value
	// that is not a time slice; gpu.ErrTimeout where ctx ends first.
	SetTimeSlice(ctx context.Context, u gpu.UUID, slice gpu.TimeSlice) error
}

// Limits are the driver's own, by cgroup.
type Limits interface {
	// SetMemoryLimit has the driver keep all processes of a cgroup together within so
	// many bytes of a GPU's memory; NoLimit undoes it, and so does the end of the
	// cgroup. It is the directory's path as this process sees it. Nothing is guaranteed
	// to them (a soft limit of 0): a guarantee would raise dmem.min of every cgroup
	// above this one too, and nothing lowers that again. Managed memory does not count.
	//
	// It takes driver R615 and root. The error wraps gpu.ErrNotSupported where
	// library, card or kernel cannot; gpu.ErrNotFound for a UUID that the driver does
	// not know, for a cgroup that it cannot open, and for one without the files dmem.*
	// on a kernel that has them; gpu.ErrInvalid for a path that is not absolute and for
	// more than the card has.
	SetMemoryLimit(ctx context.Context, u gpu.UUID, cgroup string, bytes uint64) error
	// MemoryLimit reads what SetMemoryLimit has set. The error is as there, and wraps
	// gpu.ErrNotFound where there is no limit.
	MemoryLimit(ctx context.Context, u gpu.UUID, cgroup string) (gpu.MemoryLimit, error)
}

// Contents are what containers need to use GPUs and MIG instances.
type Contents interface {
	// Parts lists what containers need of the driver and of each GPU, by host
	// paths. It reads the file system below DriverRoot and DevRoot; call it again
	// when the driver may have changed.
	//
	// A GPU that the driver cannot describe, or that has no device node, is logged
	// and left out. The error wraps gpu.ErrInvalid where Options.Hook is empty and
	// gpu.ErrNoDriver where CUDA's library or a control node is missing: with such
	// parts a container would start and find no GPU.
	Parts(ctx context.Context) (cdi.Parts, error)
	// Capabilities are the nodes that a container needs, beside the GPU's, to use a
	// compute instance: the GPU instance's access and the compute instance's, on the
	// GPU with a minor number, by host path and without numbers as in Parts. Which
	// they are stands in the driver's list, at ProcRoot/driver/nvidia-caps/mig-minors;
	// they are assigned when the kernel module is loaded and stay. A node that is not
	// there, or has the numbers of a module that is gone, is made, with the major
	// number that ProcRoot/devices has for nvidia-caps.
	//
	// It makes no call of the driver. Errors: gpu.ErrNotFound where the driver has no
	// such instance on its list; gpu.ErrNotSupported where it has no list, or the
	// kernel no nvidia-caps; gpu.ErrNoPermission where a node cannot be made.
	Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error)
}
