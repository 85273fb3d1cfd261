// SPDX-License-Identifier: Apache-2.0

package gpu

import "fmt"

// UUID is the driver's name for a GPU ("GPU-…") or a MIG instance ("MIG-…").
// It is the only name that survives a reboot and a change of slot; an index
// does not.
type UUID string

// MiB is an amount of memory in units of 2^20 bytes.
type MiB uint64

// Inventory is everything the driver says of a node's GPUs at one moment.
type Inventory struct {
	// Driver is the kernel driver's version, for example "580.159.03".
	Driver string `json:"driver,omitempty"`
	// CUDA is the newest CUDA version the driver serves, "major.minor".
	CUDA string `json:"cuda,omitempty"`
	// Load tells one loading of the driver's kernel module from another on the same boot of
	// the machine; empty where that is not known. It is no part of the document.
	Load string `json:"-"`
	// Machine is the firmware's name of the machine (DMI's product name), for
	// example "DGXH100".
	Machine string `json:"machine,omitempty"`
	// NUMA is the machine's NUMA nodes in the order of their numbers; empty where
	// it has no such notion.
	NUMA []NUMANode `json:"numaNodes,omitempty"`
	// NICs is the machine's RDMA network cards, in the order of their names.
	NICs []NIC `json:"nics,omitempty"`
	// GPUs is in index order.
	GPUs []Device `json:"gpus"`
}

// NUMANode is a part of the machine whose CPUs and memory are near to each other.
type NUMANode struct {
	ID int `json:"id"`
	// CPUs is the kernel's list of its processors, "0-55,112-167"; empty for
	// memory without any.
	CPUs string `json:"cpus,omitempty"`
	// Distances is how far each node's memory is from here, in the order of
	// Inventory.NUMA and by the firmware's measure: 10 is the node's own, 255 the
	// most. Nil where that is not known.
	Distances []int `json:"distances,omitempty"`
}

// RDMA is the kind of network that an RDMA network card speaks.
type RDMA string

// Kinds of RDMA networks.
const (
	InfiniBand RDMA = "infiniband"
	RoCE       RDMA = "roce" // RDMA over Converged Ethernet
	EFA        RDMA = "efa"  // AWS Elastic Fabric Adapter
)

// NIC is an RDMA network card, or one function of it.
type NIC struct {
	// Name is the kernel's, for example "mlx5_0".
	Name string `json:"name"`
	Kind RDMA   `json:"kind"`
	// PCI, NUMA and Path are as in Device.
	PCI  string   `json:"pci,omitempty"`
	NUMA *int     `json:"numa,omitempty"`
	Path []string `json:"path,omitempty"`
	// Active says that at least one of its ports is up.
	Active bool `json:"active,omitempty"`
}

// ByUUID returns the device with that UUID, or nil.
func (inv *Inventory) ByUUID(u UUID) *Device {
	for i := range inv.GPUs {
		if inv.GPUs[i].UUID == u {
			return &inv.GPUs[i]
		}
	}
	return nil
}

// Device is one physical GPU.
type Device struct {
	// Index is the driver's enumeration order (PCI bus order). It may change
	// with the hardware; it is for people and for partition files.
	Index int `json:"index"`
	// Minor is N of /dev/nvidiaN. It is not the index.
	Minor int  `json:"minor"`
	UUID  UUID `json:"uuid"`
	// PCI is the bus address, "dddddddd:bb:dd.f" in lower case.
	PCI string `json:"pci,omitempty"`
	// PCIDevice and PCISubsystem are device and vendor ids as one number,
	// "0x20B210DE": the form that NVIDIA's MIG manager filters devices by.
	PCIDevice    string `json:"pciDevice,omitempty"`
	PCISubsystem string `json:"pciSubsystem,omitempty"`
	// PCIClass is the kind of PCI device, "0x030200" for a GPU without and
	// "0x030000" for one with display outputs; empty where it is not known.
	PCIClass string `json:"pciClass,omitempty"`
	// VGPU is set for a part of a GPU that a hypervisor has given to a virtual
	// machine, which the agent runs in.
	VGPU *VGPU `json:"vgpu,omitempty"`
	// Model is the driver's product name, for example "NVIDIA H100 80GB HBM3".
	Model             string `json:"model,omitempty"`
	ComputeCapability string `json:"computeCapability,omitempty"`
	// Memory is all of the card's memory, what the driver keeps for itself
	// included. It is 0 where the driver has no figure of it: the GPU has no memory of its
	// own, but the machine's (GB10, Thor).
	Memory MiB `json:"memoryMiB"`
	// Reserved is what the driver and firmware keep; no process can have it.
	Reserved MiB `json:"reservedMiB,omitempty"`
	// NUMA is the node that the GPU's PCI slot belongs to; nil where the
	// machine has no such notion or the driver does not say.
	NUMA *int `json:"numa,omitempty"`
	// CPUs is the kernel's list of the processors near the GPU, "0-55,112-167".
	CPUs string `json:"cpus,omitempty"`
	// Path is what lies between the processor and the GPU on the PCI bus: the host
	// bridge ("pci0000:16"), then each bridge by its address ("0000:16:01.0"), the
	// one next to the GPU last. Empty where it is not known.
	Path []string `json:"path,omitempty"`
	// Links are the NVLinks that work now.
	Links []Link `json:"links,omitempty"`
	// Lanes is how many NVLink lanes the card has, up or down, wired to anything or
	// not: an A100 PCIe without a bridge has 12.
	Lanes int `json:"lanes,omitempty"`
	// Fabric is the NVLink fabric beyond the node that the GPU belongs to; nil
	// where there is none.
	Fabric *Fabric `json:"fabric,omitempty"`
	MIG    MIG     `json:"mig"`
	// Fault is why the driver could not describe this GPU, empty when it could.
	// A GPU with a fault is kept in the inventory, so that its devices can be
	// shown as unhealthy instead of vanishing.
	Fault string `json:"fault,omitempty"`
	// Gone says that the driver does not list the GPU any more, and Lost that it said
	// that the GPU is lost (ErrLost); Fault is set too.
	Gone bool `json:"gone,omitempty"`
	Lost bool `json:"lost,omitempty"`
}

// Name is the GPU's name for people: "GPU 3 (GPU-…)".
func (d *Device) Name() string { return fmt.Sprintf("GPU %d (%s)", d.Index, d.UUID) }

// Usable is the memory that processes can have, in MiB.
func (d *Device) Usable() MiB {
	if d.Reserved >= d.Memory {
		return 0
	}
	return d.Memory - d.Reserved
}

// VGPU is what a virtual GPU says of the driver on its host: version
// ("570.133.10") and branch ("r570_00").
type VGPU struct {
	HostDriver string `json:"hostDriver,omitempty"`
	HostBranch string `json:"hostBranch,omitempty"`
}

// Link is a connection from a GPU to another one, or to an NVSwitch.
type Link struct {
	// To is the peer's index; meaningless where Switch is set.
	To int `json:"to,omitempty"`
	// NVLink is how many NVLink lanes join the two.
	NVLink int `json:"nvlink,omitempty"`
	// Switch says that the lanes end in an NVSwitch, which joins the GPU to all
	// others on it.
	Switch bool `json:"switch,omitempty"`
	// Version is the NVLink generation, 0 where the driver does not say; LaneMBps
	// is what one lane carries in each direction, in MB/s (10^6 bytes), 0 likewise.
	Version  int `json:"version,omitempty"`
	LaneMBps int `json:"laneMBps,omitempty"`
}

// Fabric names a multi-node NVLink domain and the part of it whose GPUs reach
// each other.
type Fabric struct {
	// Cluster is the domain's UUID, Clique the part's number in it.
	Cluster string `json:"cluster"`
	Clique  uint32 `json:"clique"`
}

// MIG is a GPU's Multi-Instance state and abilities.
type MIG struct {
	Capable bool `json:"capable,omitempty"`
	// Enabled is the mode in force.
	Enabled bool `json:"enabled,omitempty"`
	// Pending is the mode after the next reset. Nil means equal to Enabled.
	Pending   *bool      `json:"pending,omitempty"`
	Profiles  []Profile  `json:"profiles,omitempty"`
	Instances []Instance `json:"instances,omitempty"`
}

// MemorySlices is how many memory slices a GPU has; 0 where its driver tells no placements.
func (m *MIG) MemorySlices() (n int) {
	for i := range m.Profiles {
		for _, at := range m.Profiles[i].Placements {
			n = max(n, at.Start+at.Size)
		}
	}
	return n
}

// Profile is a kind of GPU instance that a GPU could hold.
type Profile struct {
	// Name is the driver's, for example "1g.10gb+me".
	Name string `json:"name"`
	// ID is what the driver's create call takes.
	ID     int `json:"id,omitempty"`
	Memory MiB `json:"memoryMiB,omitempty"`
	// Slices is the number of compute slices.
	Slices int `json:"slices,omitempty"`
	// SMs is the number of streaming multiprocessors of an instance.
	SMs int `json:"sms,omitempty"`
	// Max is how many can exist on one GPU at a time.
	Max        int         `json:"max,omitempty"`
	Placements []Placement `json:"placements,omitempty"`
	// Engines are the media engines that come with an instance; nil where the
	// driver has not told.
	Engines *Engines `json:"engines,omitempty"`
}

// Engines counts copy engines and media engines: decoders, encoders, JPEG units
// and optical-flow accelerators.
type Engines struct {
	Copy   int `json:"copy,omitempty"`
	Decode int `json:"decode"`
	Encode int `json:"encode"`
	JPEG   int `json:"jpeg"`
	OFA    int `json:"ofa"`
}

// Placement is a run of memory slices on a GPU.
type Placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// Instance is a MIG instance that exists.
type Instance struct {
	Profile string `json:"profile"`
	Placement
	GI int `json:"gi,omitempty"`
	// CI is the compute instance's number in its GPU instance, -1 where there is
	// none. CIStart is the first of its compute slices there, 0 unless the GPU
	// instance is split.
	CI      int    `json:"ci,omitempty"`
	CIStart int    `json:"ciStart,omitempty"`
	UUID    UUID   `json:"uuid,omitempty"`
	Busy    bool   `json:"busy,omitempty"`
	Holder  string `json:"holder,omitempty"`
}

// Memory is a GPU's memory at one moment, in MiB.
type Memory struct {
	Total, Reserved, Used, Free MiB
}

// MemoryLimit is what the driver lets a cgroup's processes have of a GPU together,
// what they have, and what is guaranteed to them, in bytes.
type MemoryLimit struct {
	Bytes, Used, Guaranteed uint64
}

// ProcessKind says which of the driver's lists a process was found in.
type ProcessKind string

// The driver keeps a list for each kind; a process can be in several.
const (
	Compute  ProcessKind = "compute"
	Graphics ProcessKind = "graphics"
	MPS      ProcessKind = "mps"
)

// Process is a process that the driver sees on a GPU.
type Process struct {
	// PID is in the agent's own PID namespace, as the driver gives it.
	PID  int
	Kind ProcessKind
	// Bytes of GPU memory are valid only if Known: the driver may answer "not
	// available", which is neither zero nor a number. Managed memory is not in
	// them.
	Bytes uint64
	Known bool
	// GI and CI name the MIG instance, -1 where there is none.
	GI, CI int
}

// EventKind classifies what the driver reports by itself.
type EventKind string

// Kinds of events.
const (
	// EventXid is a driver error report; Event.Xid has its number.
	EventXid EventKind = "xid"
	// EventLost is the driver saying that a GPU is gone, or failing itself. It
	// names the GPU where that could be found out at once; else a new inventory
	// tells which.
	EventLost EventKind = "lost"
	// EventChanged says that GPUs have come or gone, or that the driver was
	// loaded or unloaded: everything is to be read anew. It names no GPU.
	EventChanged EventKind = "changed"
)

// Event is something that the driver reported of a GPU.
type Event struct {
	Kind EventKind
	// GPU is empty where the driver could not say which one it was: such an
	// event concerns all of them.
	GPU UUID
	Xid uint64
	// GI and CI name the MIG instance, -1 where there is none.
	GI, CI int
}

// TimeSlice is how long a process may keep a shared GPU before the next one's
// turn, in the words of partitions.
type TimeSlice string

// The steps that the driver knows; what they are in milliseconds is its own
// affair and differs between cards.
const (
	TimeSliceDefault TimeSlice = "default"
	TimeSliceShort   TimeSlice = "short"
	TimeSliceMedium  TimeSlice = "medium"
	TimeSliceLong    TimeSlice = "long"
)

// Health is what the driver keeps of a GPU's faults. Each figure that a card or
// driver does not have reads as the zero value, which complains of nothing.
type Health struct {
	// Uncorrected is the number of uncorrected ECC errors since the driver was
	// loaded or the GPU reset (the volatile count); nil where it is not known.
	Uncorrected *uint64
	// Remap is nil where it is not known: before Ampere, and while MIG instances stand.
	Remap *Remap
	// RetirePending says that a page is to be retired at the next load of the
	// driver (before Ampere).
	RetirePending bool
	// Recovery is what the driver says the GPU needs (R550 and later).
	Recovery Recovery
}

// Remap is what is known of broken rows of a GPU's memory.
type Remap struct {
	// Pending says that a row is to be replaced at the next reset, Failed that there once
	// was no spare row left for one.
	Pending, Failed bool
}

// Recovery is what must be done to a GPU before it works again, in the driver's
// judgement. One that this version does not know is in the driver's words.
type Recovery string

// Recoveries; the zero value is a driver that does not say.
const (
	RecoveryUnknown    Recovery = ""
	RecoveryNone       Recovery = "none"
	RecoveryReset      Recovery = "reset"
	RecoveryReboot     Recovery = "reboot"
	RecoveryDrain      Recovery = "drain"
	RecoveryDrainReset Recovery = "drain and reset"
)

// Needed says that the driver asks for something.
func (r Recovery) Needed() bool { return r != RecoveryUnknown && r != RecoveryNone }

// Resets says that what the driver asks for makes the GPU begin anew.
func (r Recovery) Resets() bool {
	return r == RecoveryReset || r == RecoveryReboot || r == RecoveryDrainReset
}
