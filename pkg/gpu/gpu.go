// SPDX-License-Identifier: Apache-2.0

package gpu

import "fmt"

// UUID is the driver's name for a GPU ("GPU-…") or a MIG instance ("MIG-…"). A GPU keeps it after
// a reboot or in another slot, unlike its index.
type UUID string

// MiB is an amount of memory in units of 2^20 bytes.
type MiB uint64

// Inventory is what the driver and the kernel report of a node's GPUs at one moment.
type Inventory struct {
	// Driver is the kernel driver's version, for example "580.159.03".
	Driver string `json:"driver,omitempty"`
	// CUDA is the newest CUDA version that the driver supports, "major.minor".
	CUDA string `json:"cuda,omitempty"`
	// Load differs for each time that the driver's kernel module was loaded since the machine's
	// boot. It is empty if not known, and not part of the document.
	Load string `json:"-"`
	// Machine is the firmware's name for the machine (DMI's product name), for example "DGXH100".
	Machine string `json:"machine,omitempty"`
	// NUMA is the machine's NUMA nodes by number; empty if it has none.
	NUMA []NUMANode `json:"numaNodes,omitempty"`
	// NICs is the machine's RDMA network cards by name.
	NICs []NIC `json:"nics,omitempty"`
	// GPUs is in index order.
	GPUs []Device `json:"gpus"`
}

// NUMANode is a part of the machine whose CPUs and memory are near each other.
type NUMANode struct {
	ID int `json:"id"`
	// CPUs is the kernel's list of its processors, "0-55,112-167"; empty for memory without
	// processors.
	CPUs string `json:"cpus,omitempty"`
	// Distances is the distance from this node to each node's memory, in the order of
	// Inventory.NUMA and in the firmware's measure: 10 for the node itself, at most 255. Nil if
	// not known.
	Distances []int `json:"distances,omitempty"`
}

// RDMA is the kind of network that an RDMA network card uses.
type RDMA string

// Kinds of RDMA networks.
const (
	InfiniBand RDMA = "infiniband"
	RoCE       RDMA = "roce" // RDMA over Converged Ethernet
	EFA        RDMA = "efa"  // AWS Elastic Fabric Adapter
)

// NIC is an RDMA network card, or one function of it.
type NIC struct {
	// Name is the kernel's name, for example "mlx5_0".
	Name string `json:"name"`
	Kind RDMA   `json:"kind"`
	// PCI, NUMA and Path are as in Device.
	PCI  string   `json:"pci,omitempty"`
	NUMA *int     `json:"numa,omitempty"`
	Path []string `json:"path,omitempty"`
	// Active is true if at least one of its ports is up.
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
	// Index is the position in the driver's list (PCI bus order). It may change with the
	// hardware. People and partition files use it.
	Index int `json:"index"`
	// Minor is N of /dev/nvidiaN. It is not the index.
	Minor int  `json:"minor"`
	UUID  UUID `json:"uuid"`
	// PCI is the bus address, "dddddddd:bb:dd.f" in lower case.
	PCI string `json:"pci,omitempty"`
	// PCIDevice and PCISubsystem are device and vendor ID as one number, "0x20B210DE". NVIDIA's
	// MIG manager filters devices by this form.
	PCIDevice    string `json:"pciDevice,omitempty"`
	PCISubsystem string `json:"pciSubsystem,omitempty"`
	// PCIClass is the kind of PCI device: "0x030200" for a GPU without display outputs,
	// "0x030000" for one with them. Empty if not known.
	PCIClass string `json:"pciClass,omitempty"`
	// VGPU is set if this is a virtual GPU: a part of a GPU that a hypervisor has given to the
	// virtual machine of the agent.
	VGPU *VGPU `json:"vgpu,omitempty"`
	// Model is the driver's product name, for example "NVIDIA H100 80GB HBM3".
	Model             string `json:"model,omitempty"`
	ComputeCapability string `json:"computeCapability,omitempty"`
	// SMs is the number of streaming multiprocessors of the whole GPU; 0 if the driver does not tell.
	SMs int `json:"sms,omitempty"`
	// Memory is all of the card's memory in MiB, including what the driver keeps for itself. It
	// is 0 if the driver has no figure: the GPU uses the machine's memory (GB10, Thor).
	Memory MiB `json:"memoryMiB"`
	// Reserved is what driver and firmware keep for themselves, in MiB.
	Reserved MiB `json:"reservedMiB,omitempty"`
	// NUMA is the NUMA node of the GPU's PCI slot; nil if the machine has none or it is not
	// known.
	NUMA *int `json:"numa,omitempty"`
	// CPUs is the kernel's list of the processors near the GPU, "0-55,112-167".
	CPUs string `json:"cpus,omitempty"`
	// Path is the way from the processor to the GPU on the PCI bus: the host bridge
	// ("pci0000:16"), then each bridge's address ("0000:16:01.0"), the one next to the GPU last.
	// Empty if not known.
	Path []string `json:"path,omitempty"`
	// Links are the NVLinks that are up.
	Links []Link `json:"links,omitempty"`
	// Lanes is the number of NVLink lanes that the card has, up or down, connected or not: 12 for
	// an A100 PCIe without a bridge.
	Lanes int `json:"lanes,omitempty"`
	// Fabric is the NVLink fabric beyond the node that the GPU belongs to; nil if there is none.
	Fabric *Fabric `json:"fabric,omitempty"`
	MIG    MIG     `json:"mig"`
	// Fault is why the driver could not describe this GPU; empty if it could. A GPU with a fault
	// stays in the inventory, so that its devices become unhealthy and do not vanish.
	Fault string `json:"fault,omitempty"`
	// Gone is true if the driver no longer lists the GPU. Lost is true if the driver calls it
	// lost (ErrLost). Fault is set in both cases.
	Gone bool `json:"gone,omitempty"`
	Lost bool `json:"lost,omitempty"`
}

// Name returns the GPU's name for people: "GPU 3 (GPU-…)".
func (d *Device) Name() string { return fmt.Sprintf("GPU %d (%s)", d.Index, d.UUID) }

// Usable returns the memory that processes can use, in MiB.
func (d *Device) Usable() MiB {
	if d.Reserved >= d.Memory {
		return 0
	}
	return d.Memory - d.Reserved
}

// VGPU is what a virtual GPU knows of the driver on its host: version ("570.133.10") and branch
// ("r570_00").
type VGPU struct {
	HostDriver string `json:"hostDriver,omitempty"`
	HostBranch string `json:"hostBranch,omitempty"`
}

// Link is the connection of a GPU with another one, or with an NVSwitch.
type Link struct {
	// To is the other GPU's index; it means nothing if Switch is true.
	To int `json:"to,omitempty"`
	// NVLink is the number of lanes.
	NVLink int `json:"nvlink,omitempty"`
	// Switch is true if the lanes end in an NVSwitch, which connects the GPU with all others on
	// it.
	Switch bool `json:"switch,omitempty"`
	// Version is the NVLink generation. LaneMBps is the speed of one lane in each direction, in
	// MB/s (10^6 bytes). Each is 0 if the driver does not report it.
	Version  int `json:"version,omitempty"`
	LaneMBps int `json:"laneMBps,omitempty"`
}

// Fabric is a multi-node NVLink domain, and the part of it whose GPUs reach each other.
type Fabric struct {
	// Cluster is the domain's UUID, and Clique the number of the part in it.
	Cluster string `json:"cluster"`
	Clique  uint32 `json:"clique"`
}

// MIG is a GPU's Multi-Instance mode, profiles and instances.
type MIG struct {
	Capable bool `json:"capable,omitempty"`
	// Enabled is true if MIG mode is in force.
	Enabled bool `json:"enabled,omitempty"`
	// Pending is the mode after the next reset; nil if it is the same as Enabled.
	Pending   *bool      `json:"pending,omitempty"`
	Profiles  []Profile  `json:"profiles,omitempty"`
	Instances []Instance `json:"instances,omitempty"`
}

// MemorySlices returns how many memory slices a GPU has, or 0 if its driver reports no
// placements.
func (m *MIG) MemorySlices() (n int) {
	for i := range m.Profiles {
		for _, at := range m.Profiles[i].Placements {
			n = max(n, at.Start+at.Size)
		}
	}
	return n
}

// Profile is a kind of GPU instance that a GPU can have.
type Profile struct {
	// Name is the driver's name, for example "1g.10gb+me".
	Name string `json:"name"`
	// ID is the number for the driver's create call.
	ID     int `json:"id,omitempty"`
	Memory MiB `json:"memoryMiB,omitempty"`
	// Slices is the number of compute slices.
	Slices int `json:"slices,omitempty"`
	// SMs is the number of streaming multiprocessors of an instance.
	SMs int `json:"sms,omitempty"`
	// Max is how many instances can exist on one GPU at a time.
	Max        int         `json:"max,omitempty"`
	Placements []Placement `json:"placements,omitempty"`
	// Engines are an instance's copy and media engines; nil if the driver does not report them.
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
	// CI is the compute instance's number in its GPU instance, -1 if there is none. CIStart is
	// its first compute slice there, 0 unless the GPU instance is split.
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

// MemoryLimit is the memory of a GPU for all processes of a cgroup together, in bytes: the limit,
// what they use, and what is guaranteed to them.
type MemoryLimit struct {
	Bytes, Used, Guaranteed uint64
}

// ProcessKind is the driver's list that has a process.
type ProcessKind string

// The driver has a list for each kind. A process can be in several.
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
	// Bytes is its GPU memory, without managed memory. It is valid only if Known is true: the
	// driver may answer "not available".
	Bytes uint64
	Known bool
	// GI and CI name the MIG instance, -1 where there is none.
	GI, CI int
}

// EventKind is the kind of an event.
type EventKind string

// Kinds of events.
const (
	// EventXid is a driver error report; Event.Xid has its number.
	EventXid EventKind = "xid"
	// EventLost: the driver reports that a GPU is lost, or fails itself. The event names the GPU
	// if that could be found out at once; otherwise a new inventory shows which one it is.
	EventLost EventKind = "lost"
	// EventChanged: GPUs have come or gone, or the driver was loaded or unloaded. The receiver
	// must read all anew. The event names no GPU.
	EventChanged EventKind = "changed"
)

// Event is a report of the driver.
type Event struct {
	Kind EventKind
	// GPU is empty if the driver could not name it. Then the event concerns all GPUs.
	GPU UUID
	Xid uint64
	// GI and CI name the MIG instance, -1 where there is none.
	GI, CI int
}

// TimeSlice is how long a process may use a shared GPU before it is the next one's turn.
// Partitions use these words.
type TimeSlice string

// The time slices of the driver. Their length in milliseconds differs between cards.
const (
	TimeSliceDefault TimeSlice = "default"
	TimeSliceShort   TimeSlice = "short"
	TimeSliceMedium  TimeSlice = "medium"
	TimeSliceLong    TimeSlice = "long"
)

// Health is what the driver records of a GPU's faults. A figure that the card or the driver does
// not have is zero, which is never a fault.
type Health struct {
	// Uncorrected is the number of uncorrected ECC errors since the driver was loaded or the GPU
	// reset (the volatile count); nil if not known.
	Uncorrected *uint64
	// Remap is nil if not known: before Ampere, and while MIG instances exist.
	Remap *Remap
	// RetirePending is true if a page will be retired when the driver is loaded next (before
	// Ampere).
	RetirePending bool
	// Recovery is what the GPU needs, as the driver reports it (R550 and later).
	Recovery Recovery
}

// Remap is the state of broken rows of a GPU's memory.
type Remap struct {
	// Pending is true if the next reset will replace a row. Failed is true if no spare row was
	// left for one, now or earlier.
	Pending, Failed bool
}

// Recovery is what the GPU needs before it works again, as the driver judges. A value that this
// version does not know is the driver's own text.
type Recovery string

// RecoveryUnknown, the zero value, is for a driver that does not report it.
const (
	RecoveryUnknown    Recovery = ""
	RecoveryNone       Recovery = "none"
	RecoveryReset      Recovery = "reset"
	RecoveryReboot     Recovery = "reboot"
	RecoveryDrain      Recovery = "drain"
	RecoveryDrainReset Recovery = "drain and reset"
)

// Needed reports whether the driver asks for any recovery.
func (r Recovery) Needed() bool { return r != RecoveryUnknown && r != RecoveryNone }

// Resets reports whether the recovery makes the GPU start anew.
func (r Recovery) Resets() bool {
	return r == RecoveryReset || r == RecoveryReboot || r == RecoveryDrainReset
}
