// SPDX-License-Identifier: Apache-2.0

package status

import (
	"time"

	"example.com/gpu-agent/pkg/topology"
)

// Status is the agent's view of its node. Its JSON form, at /statusz, is a contract
// with `gpu-agent status` of other versions: fields are added, never renamed.
type Status struct {
	Node    string `json:"node"`
	Version string `json:"version"`
	// Machine is the machine's name in the firmware; empty if it has none.
	Machine string `json:"machine,omitempty"`
	// Driver and CUDA are versions; empty while no driver answers.
	Driver    string    `json:"driver,omitempty"`
	CUDA      string    `json:"cuda,omitempty"`
	Partition Partition `json:"partition"`
	// Allocations is the number of those that have not ended, including those that the kubelet has not confirmed.
	Allocations int `json:"allocations"`
	// Hardware says which call the driver does not answer, and since when; empty
	// while it answers. Everything that needs no hardware goes on meanwhile.
	Hardware string `json:"hardware,omitempty"`
	// Conditions are the facts that the rest follows from, the gravest first.
	Conditions []Condition `json:"conditions,omitempty"`
	// Resources are those that the node serves to the kubelet, by name.
	Resources []Resource `json:"resources,omitempty"`
	// SaturationPercent is the part of the GPUs' memory that is held or cannot be had,
	// rounded down. GPUs with mode off do not count; a node that has no other has 100. It is
	// nil from an agent that does not tell.
	SaturationPercent *int `json:"saturationPercent,omitempty"`
	// GPUs is sorted by index.
	GPUs []GPU `json:"gpus"`
	// Containers has the memory of each container on each GPU that it holds,
	// sorted by index, namespace, pod and container.
	Containers []Container `json:"containers,omitempty"`
	Watchdog   Watchdog    `json:"watchdog,omitzero"`
	// Policies are the admission policies that keep the agent to its own node;
	// empty until they have been tried, and without an API server.
	Policies []Policy `json:"policies,omitempty"`
	// Topology is how GPUs and network cards are connected; nil until a driver has
	// answered.
	Topology *topology.Matrix `json:"topology,omitempty"`
}

// PartitionStates is every value of Partition.State, in the order of the metrics.
var PartitionStates = []string{"applied", "pending", "blocked", "failed", "invalid"}

// Partition says how the GPUs are to be laid out, and how far that is done.
type Partition struct {
	// Name is the partition that was chosen; empty if there is none.
	Name string `json:"name"`
	// State is one of PartitionStates; empty if there is no partition.
	State string `json:"state"`
	// Reason is the code of the gravest condition that State follows from; empty if
	// State is "applied" and there is no remark.
	Reason Reason `json:"reason,omitempty"`
	// Message says why State is not "applied".
	Message string `json:"message,omitempty"`
	// Source is where the partitions came from: the path of a file, or
	// "configmap NAMESPACE/NAME".
	Source string `json:"source,omitempty"`
	// Generation grows by one with each change that was accepted since the start.
	Generation uint64 `json:"generation"`
}

// Resource is a resource at the kubelet.
type Resource struct {
	// Name is the full resource name.
	Name string `json:"name"`
	// Devices is the length of the last list of devices for the kubelet.
	Devices int `json:"devices"`
	// Registered says that the kubelet receives the lists and knows the devices.
	// Since is the time since which it does not.
	Registered bool       `json:"registered"`
	Since      *time.Time `json:"unregisteredSince,omitempty"`
	// Error is why it does not. It is empty for the first half minute, in which a
	// kubelet may be restarting. After that Partition.Message has it as well.
	Error string `json:"error,omitempty"`
	// Free is how many of them can be had now, and Largest the largest request of one
	// container that fits. MIG devices on demand exclude each other.
	Free    int `json:"free,omitempty"`
	Largest int `json:"largest,omitempty"`
}

// Mode is how a GPU is laid out, in a partition's words.
type Mode string

// Modes of a GPU. Unset is that of one for which no partition is in force.
const (
	Unset   Mode = ""
	Whole   Mode = "whole"
	Shared  Mode = "shared"
	InMIG   Mode = "mig"
	Dynamic Mode = "dynamic"
	Off     Mode = "off"
)

// GPU is one GPU.
type GPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model,omitempty"`
	// PCI is the bus address and NUMA the NUMA node; empty and nil if unknown.
	PCI  string `json:"pci,omitempty"`
	NUMA *int   `json:"numa,omitempty"`
	// MemoryMiB is the size of the whole GPU's memory; 0 where it has none of its own, but
	// the machine's.
	MemoryMiB uint64 `json:"memoryMiB"`
	// Mode is the partition's word for the layout.
	Mode Mode `json:"mode,omitempty"`
	// API is "dra" where the GPU is offered through dynamic resource allocation, and
	// empty where through the device plugin.
	API string `json:"api,omitempty"`
	// Resource is the full name of the resource that the GPU offers; empty for mig
	// and off, and through DRA.
	Resource string `json:"resource,omitempty"`
	// UnitMiB is the size of one device; 0 if a device is not an amount of memory.
	UnitMiB uint64 `json:"unitMiB,omitempty"`
	// Total = Used + Free + Unhealthy counts devices: Used are held, Free can be
	// had now, and Unhealthy are neither.
	Total     int `json:"total"`
	Used      int `json:"used"`
	Free      int `json:"free"`
	Unhealthy int `json:"unhealthy"`
	// Health is "healthy" or "unhealthy"; Reason says why it is the latter.
	Health string `json:"health"`
	Reason string `json:"reason,omitempty"`
	// Class is the kind of fault in one word, Since the time when it was first seen,
	// and Needs what an operator must do ("reset", "reboot"). They are empty without
	// a fault, Needs also if the fault passes by itself.
	Class string     `json:"class,omitempty"`
	Since *time.Time `json:"unhealthySince,omitempty"`
	Needs string     `json:"needs,omitempty"`
	// Blocked names the holders that a wanted change waits for; empty if no change
	// waits.
	Blocked string `json:"blocked,omitempty"`
	// Holders is sorted by namespace, pod, container and resource.
	Holders []Holder `json:"holders,omitempty"`
	// Processes that use the GPU without an allocation on it, as the watchdog last saw it:
	// Intruders belong to containers, NoPod to no pod at all, and Unlisted to
	// containers that the container runtime does not list, so that nobody can say
	// what they may use. A GPU with mode off has no intruders.
	Intruders int `json:"intruders,omitempty"`
	NoPod     int `json:"noPod,omitempty"`
	Unlisted  int `json:"unlisted,omitempty"`
	// MIG is nil if the GPU cannot do MIG, or if its MIG mode is off and stays off.
	MIG *MIG `json:"mig,omitempty"`
}

// MIG is a GPU in MIG mode. Its devices are in Placements and belong to several resources:
// GPU.Resource is empty for it, and the counts are 0.
type MIG struct {
	// Enabled is the mode in force, and Pending the mode after the next reset; nil if
	// that is the same.
	Enabled bool  `json:"enabled"`
	Pending *bool `json:"pending,omitempty"`
	// OnDemand says that instances are created for the pods that ask for them.
	// Otherwise the partition names them.
	OnDemand bool `json:"onDemand,omitempty"`
	// Size is the number of the GPU's memory slices: 8 on an A100, 4 on an A30; 0
	// while it is unknown.
	Size int `json:"size,omitempty"`
	// Work says what is being done to the GPU's instances now; empty while nothing
	// is.
	Work string `json:"work,omitempty"`
	// Placements are the devices that exist, are on offer or are wanted, sorted by start,
	// size, profile and compute slice.
	Placements []Placement `json:"slots,omitempty"`
}

// Placement is a MIG device that exists or could be created.
type Placement struct {
	// Device is its ID at the kubelet ("GPU-…::3g.40gb@4"). Resource is the full name
	// of its resource; empty if it is not on offer.
	Device   string `json:"device"`
	Resource string `json:"resource,omitempty"`
	Profile  string `json:"profile"`
	// Start and Size are its GPU instance's placement, in memory slices. CI is its
	// first compute slice there; 0 unless the profile is a part of a GPU instance
	// (1c.3g.40gb).
	Start int `json:"start"`
	Size  int `json:"size"`
	CI    int `json:"ci,omitempty"`
	// State is one of PlacementStates.
	State string `json:"state"`
	// UUID is the instance's; empty if there is no instance. GI and CIID are the
	// driver's IDs of the GPU instance and the compute instance, valid only with a
	// UUID.
	UUID string `json:"uuid,omitempty"`
	GI   int    `json:"gi"`
	CIID int    `json:"ciID"`
	// Namespace, Pod and Container name the holder. They are empty if there is none,
	// or if the kubelet has not named it yet.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	// Reason says why it cannot be had, or what fails; empty otherwise.
	Reason string `json:"reason,omitempty"`
}

// Values of Placement.State.
const (
	PlacementHeld    = "held"    // an allocation has it, and its instance exists
	PlacementWarm    = "warm"    // its instance exists, and it can be had
	PlacementMaking  = "making"  // an allocation has it, and its instance does not exist yet
	PlacementFree    = "free"    // there is no instance, and one could be created now
	PlacementCovered = "covered" // others have its memory slices
	PlacementLeaving = "leaving" // it is being withdrawn
	PlacementForeign = "foreign" // the agent did not create the instance, and does not offer it
	PlacementFailed  = "failed"  // its instance could not be created several times, and it is withdrawn
)

// PlacementStates is every value of Placement.State, in the order of the metrics.
var PlacementStates = []string{
	PlacementHeld, PlacementWarm, PlacementMaking, PlacementFree, PlacementCovered, PlacementLeaving,
	PlacementForeign, PlacementFailed,
}

// Healthy is the value of GPU.Health without a fault.
const Healthy = "healthy"

// Holder is a container that holds devices of a GPU.
type Holder struct {
	// Namespace, Pod and Container are empty if the kubelet has not named the holder
	// yet.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	Resource  string `json:"resource"`
	// Instances says that the devices are MIG devices, which the GPU's placements tell of.
	Instances bool `json:"instances,omitempty"`
	// Units is the number of devices.
	Units int `json:"units"`
	// Since is when the devices were handed out, or where no record of that is left when
	// the container was created; nil if neither is known.
	Since *time.Time `json:"since,omitempty"`
	// Waits names the pods that still use the devices, for whose end the container's start
	// waits; empty if nobody does.
	Waits string `json:"waits,omitempty"`
	// Beside are the other pods that share the devices, "namespace/pod": those of a claim.
	Beside []string `json:"beside,omitempty"`
	// Over says that Container is an init container that has ended: nothing uses the devices, and the
	// kubelet gives them back when the pod ends.
	Over bool `json:"over,omitempty"`
}

// Container is a container's memory on one GPU. A container that holds two GPUs is
// listed twice.
type Container struct {
	// Namespace, Pod and Container are empty if the kubelet has not named the holder
	// yet.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	// Allocation is the ID of its allocation.
	Allocation string `json:"allocation"`
	// GPU and Index are the GPU's UUID and index.
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// CapMiB is nil if the container has no cap: it holds the whole GPU, or MIG
	// devices, whose memory the hardware limits.
	CapMiB *uint64 `json:"capMiB"`
	// UsedMiB is what counts against the cap, as the watchdog last saw it: what the
	// driver reports for the container's processes, and managed memory, for which
	// there is only the container's own word; nil if unknown. PeakMiB is the most of
	// that so far; with a cap also between two looks, by the container's own count.
	UsedMiB *uint64 `json:"usedMiB"`
	PeakMiB uint64  `json:"peakMiB"`
	// Guarantee is how strong the cap is: "hardware", "driver", "api" or
	// "watchdog".
	Guarantee string `json:"guarantee,omitempty"`
	// Refusals is how many of the container's allocations were refused as out of
	// memory. It is the container's own word: it can write anything into its counters,
	// and nothing is decided by this one.
	Refusals uint64 `json:"refusals"`
	// Processes is the number of the container's processes that use the GPU.
	Processes int `json:"processes"`
	// Uncounted is how many allocations of a kind that the cap's library does not know
	// have passed it (--cap-policy open), and UndoneMiB the most that a memory pool has
	// taken beyond the cap for a moment; both by the container's own word.
	Uncounted uint64 `json:"uncounted,omitempty"`
	UndoneMiB uint64 `json:"undoneMiB,omitempty"`
	// SMPercent is how much of the GPU's streaming multiprocessors its processes keep busy,
	// as the driver last said; nil where it does not tell that per process (MIG).
	SMPercent *float64 `json:"smPercent,omitempty"`
}

// HasPeak reports whether the container's memory was ever seen.
func (c Container) HasPeak() bool { return c.UsedMiB != nil || c.PeakMiB > 0 }

// Values of Policy.State.
const (
	PolicyHeld    = "held"    // what the policy must refuse is refused
	PolicyMissing = "missing" // it would be accepted
	PolicyUnknown = "unknown" // the API server did not say
)

// Policy is one admission policy from the agent's manifests.
type Policy struct {
	Name  string `json:"name"`
	State string `json:"state"`
	// Reason says what to do, or why the state is unknown; empty for PolicyHeld.
	Reason string `json:"reason,omitempty"`
}

// Values of Watchdog.State.
const (
	WatchdogRunning = "running"
	WatchdogOff     = "off"
)

// Watchdog looks for containers that use more memory than their caps allow.
type Watchdog struct {
	// State is WatchdogRunning or WatchdogOff; empty from an agent that has no
	// watchdog.
	State string `json:"state,omitempty"`
	// Reason says why it is off.
	Reason string `json:"reason,omitempty"`
	// Kills is the number of containers that it has ended since the agent started, and
	// Intruders the number of those that it has found on a GPU without an allocation on it.
	Kills     uint64 `json:"kills"`
	Intruders uint64 `json:"intruders"`
}
