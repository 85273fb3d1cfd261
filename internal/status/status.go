// SPDX-License-Identifier: Apache-2.0

package status

import (
	"time"

	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/topology"
)

// Status is the agent's view of its node. Its JSON form, at /statusz, is a contract with
// `gpu-agent status` of other versions: new versions add fields and never rename one.
type Status struct {
	Node    string `json:"node"`
	Version string `json:"version"`
	// Machine is the machine's name in the firmware; empty if it has none.
	Machine string `json:"machine,omitempty"`
	// Driver and CUDA are versions; empty while no driver answers.
	Driver    string    `json:"driver,omitempty"`
	CUDA      string    `json:"cuda,omitempty"`
	Partition Partition `json:"partition"`
	// Allocations is the number of allocations that have not ended, also of those that the
	// kubelet has not confirmed.
	Allocations int `json:"allocations"`
	// Hardware names the call that the driver does not answer, and since when; empty while the
	// driver answers. Work that needs no hardware goes on meanwhile.
	Hardware string `json:"hardware,omitempty"`
	// Conditions are the facts that the rest follows from, the gravest first.
	Conditions []Condition `json:"conditions,omitempty"`
	// Found is what earlier owners have left on the GPUs, the gravest first. Conditions has the
	// same facts.
	Found []Condition `json:"found,omitempty"`
	// Resources are the resources that the node serves to the kubelet, by name.
	Resources []Resource `json:"resources,omitempty"`
	// SaturationPercent is the part of the GPUs' memory that is not free: held, or out of
	// order. It is rounded down. GPUs with mode off do not count; a node with no others has
	// 100. It is nil if the agent is too old to report it.
	SaturationPercent *int `json:"saturationPercent,omitempty"`
	// GPUs is sorted by index.
	GPUs []GPU `json:"gpus"`
	// Containers has the memory of each container on each GPU that it holds,
	// sorted by index, namespace, pod and container.
	Containers []Container `json:"containers,omitempty"`
	Watchdog   Watchdog    `json:"watchdog,omitzero"`
	// Policies are the admission policies that restrict the agent to its own node; empty until
	// the agent has tried them, and without an API server.
	Policies []Policy `json:"policies,omitempty"`
	// Topology is how GPUs and network cards are connected; nil until a driver has
	// answered.
	Topology *topology.Matrix `json:"topology,omitempty"`
}

// PartitionStates lists every value of Partition.State, in the order of the metrics.
var PartitionStates = []string{"applied", "pending", "blocked", "failed", "invalid"}

// Partition is the layout that the node's GPUs are to get, and how far that has come.
type Partition struct {
	// Name is the chosen partition; empty if there is none.
	Name string `json:"name"`
	// State is one of PartitionStates; empty if there is no partition.
	State string `json:"state"`
	// Reason is the code of the gravest condition that State follows from; empty if
	// State is "applied" and there is no remark.
	Reason Reason `json:"reason,omitempty"`
	// Message explains a State that is not "applied".
	Message string `json:"message,omitempty"`
	// Source is where the partitions came from: the path of a file, or
	// "configmap NAMESPACE/NAME".
	Source string `json:"source,omitempty"`
	// Generation grows by one with each change that was accepted since the start.
	Generation uint64 `json:"generation"`
}

// Resource is a resource as the kubelet knows it.
type Resource struct {
	// Name is the full resource name.
	Name string `json:"name"`
	// Devices is the length of the last list that the kubelet got.
	Devices int `json:"devices"`
	// Registered is true if the kubelet receives the lists and knows the devices. Since is the
	// time at which that ended; nil while it is true.
	Registered bool       `json:"registered"`
	Since      *time.Time `json:"unregisteredSince,omitempty"`
	// Error is why the kubelet does not. It is empty for the first half minute, since the
	// kubelet may be restarting. After that, Partition.Message has it as well.
	Error string `json:"error,omitempty"`
	// Free is the number of free devices. Largest is the largest request of one container that
	// fits. MIG devices on demand exclude each other.
	Free    int `json:"free,omitempty"`
	Largest int `json:"largest,omitempty"`
}

// Mode is the layout of a GPU, by its name in a partition.
type Mode string

// Modes of a GPU. A GPU has mode Unset while no partition is in force for it.
const (
	Unset   Mode = ""
	Whole   Mode = "whole"
	Shared  Mode = "shared"
	InMIG   Mode = "mig"
	Dynamic Mode = "dynamic"
	Off     Mode = "off"
)

// MPS is the MPS daemon of a GPU.
type MPS struct {
	// Percent is the largest share of the GPU's SMs that a container can have.
	Percent int `json:"percent"`
	// Clients is how many processes compute through the daemon's servers. All of them end with the pod
	// of the daemon.
	Clients int `json:"clients"`
	// Namespaces is how many namespaces the pods with shares of the GPU belong to, as far as they are known.
	Namespaces int `json:"namespaces,omitempty"`
	// Trouble is why the daemon cannot be relied on now; empty if it can. Then devices are withdrawn.
	Trouble string `json:"trouble,omitempty"`
}

// GPU is one GPU.
type GPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model,omitempty"`
	// PCI is the bus address and NUMA the NUMA node; empty and nil if unknown.
	PCI  string `json:"pci,omitempty"`
	NUMA *int   `json:"numa,omitempty"`
	// MemoryMiB is the size of the whole GPU's memory; 0 if the GPU uses the machine's memory.
	MemoryMiB uint64 `json:"memoryMiB"`
	// Mode is the GPU's layout.
	Mode Mode `json:"mode,omitempty"`
	// API is "dra" if the GPU is offered through dynamic resource allocation, and empty if
	// through the device plugin.
	API string `json:"api,omitempty"`
	// Resource is the full name of the resource that the GPU offers; empty for mig and off, and
	// with DRA.
	Resource string `json:"resource,omitempty"`
	// DeviceClass is the full name of the DeviceClass whose claims ask for the GPU's devices; empty for
	// mig and off, and with the device plugin.
	DeviceClass string `json:"deviceClass,omitempty"`
	// Compute is how the containers of a shared GPU share its SMs, in words: "mps", "mps, factor 2, max
	// 80 %"; empty if they take turns.
	Compute string `json:"compute,omitempty"`
	// UnitMiB is the size of one device; 0 if a device is not an amount of memory.
	UnitMiB uint64 `json:"unitMiB,omitempty"`
	// Total = Used + Free + Unhealthy counts devices. Used are held, Free are free, and
	// Unhealthy are neither.
	Total     int `json:"total"`
	Used      int `json:"used"`
	Free      int `json:"free"`
	Unhealthy int `json:"unhealthy"`
	// Health is "healthy" or "unhealthy". Reason explains "unhealthy".
	Health string `json:"health"`
	Reason string `json:"reason,omitempty"`
	// Class is the kind of fault in one word, Since the time when it was first seen, and Needs
	// what an operator must do ("reset", "reboot"). They are empty without a fault. Needs is
	// also empty if the fault passes by itself.
	Class string     `json:"class,omitempty"`
	Since *time.Time `json:"unhealthySince,omitempty"`
	Needs string     `json:"needs,omitempty"`
	// MPS is the GPU's MPS daemon; nil if its containers take turns.
	MPS *MPS `json:"mps,omitempty"`
	// Blocked names the holders that a wanted change waits for; empty if no change
	// waits.
	Blocked string `json:"blocked,omitempty"`
	// Holders is sorted by namespace, pod, container and resource.
	Holders []Holder `json:"holders,omitempty"`
	// Processes that use the GPU without an allocation on it, as the watchdog last saw them.
	// Intruders belong to containers, and NoPod to no pod at all. Unlisted belong to containers
	// that the container runtime does not list, so it is unknown what they may use. A GPU with
	// mode off has no intruders.
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
	// OnDemand is true if instances are created for the pods that ask for them. Otherwise the
	// partition names the instances.
	OnDemand bool `json:"onDemand,omitempty"`
	// Size is the number of the GPU's memory slices: 8 on an A100, 4 on an A30; 0
	// while it is unknown.
	Size int `json:"size,omitempty"`
	// Work describes the change of the GPU's instances that is under way; empty if there is
	// none.
	Work string `json:"work,omitempty"`
	// Placements are the devices that exist, are on offer or are wanted, sorted by start,
	// size, profile and compute slice.
	Placements []Placement `json:"slots,omitempty"`
}

// drawn reports whether the GPU is shown as its MIG devices. A dynamic GPU is so only while MIG devices
// exist or are held there; otherwise it is shown by its memory.
func (m *MIG) drawn(mode Mode) bool { return m != nil && (mode != Dynamic || len(m.shown()) > 0) }

// Placement is a MIG device that exists or could be created.
type Placement struct {
	// Device is its ID at the kubelet ("GPU-…::3g.40gb@4"). Resource is the full name
	// of its resource; empty if it is not on offer, or by claims alone. DeviceClass is the full name
	// of the DeviceClass whose claims ask for it; empty with the device plugin.
	Device      string `json:"device"`
	Resource    string `json:"resource,omitempty"`
	DeviceClass string `json:"deviceClass,omitempty"`
	Profile     string `json:"profile"`
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
	// Namespace, Pod and Container name the holder. They are empty if there is none, or while
	// the kubelet has not named it.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	// Reason is why the device cannot be allocated, or what fails; empty otherwise.
	Reason string `json:"reason,omitempty"`
}

// Values of Placement.State.
const (
	PlacementHeld    = "held"    // an allocation has it, and its instance exists
	PlacementWarm    = "warm"    // its instance exists, and it is free
	PlacementMaking  = "making"  // an allocation has it, and its instance does not exist yet
	PlacementFree    = "free"    // there is no instance, and one could be created now
	PlacementCovered = "covered" // other instances have its memory slices
	PlacementLeaving = "leaving" // it is being withdrawn
	PlacementForeign = "foreign" // the agent did not create the instance, and does not offer it
	PlacementFailed  = "failed"  // creating its instance failed several times, and it is withdrawn
)

// PlacementStates lists every value of Placement.State, in the order of the metrics.
var PlacementStates = []string{
	PlacementHeld, PlacementWarm, PlacementMaking, PlacementFree, PlacementCovered, PlacementLeaving,
	PlacementForeign, PlacementFailed,
}

// Healthy is the value of GPU.Health if there is no fault.
const Healthy = "healthy"

// Holder is a container that holds devices of a GPU.
type Holder struct {
	// Namespace, Pod and Container are empty if the kubelet has not named the holder
	// yet.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	Resource  string `json:"resource"`
	// Instances is true if the devices are MIG devices. The GPU's placements describe them.
	Instances bool `json:"instances,omitempty"`
	// Units is the number of devices.
	Units int `json:"units"`
	// Since is the time at which the devices were allocated. If there is no record of that, it
	// is the time at which the container was created; nil if neither is known.
	Since *time.Time `json:"since,omitempty"`
	// Waits names the pods that still use the devices. The container does not start until they
	// end. It is empty if there are none.
	Waits string `json:"waits,omitempty"`
	// Beside are the other pods that share the devices through a claim, as "namespace/pod".
	Beside []string `json:"beside,omitempty"`
	// Over is true if Container is an init container that has ended. Nothing uses its devices,
	// and the kubelet releases them when the pod ends.
	Over bool `json:"over,omitempty"`
	// Tier is "spot" if the holder gives its room back when a guaranteed pod is given it; otherwise it is
	// empty. Yield is why and by when it does so now; nil if its room is not wanted.
	Tier  string `json:"tier,omitempty"`
	Yield *Yield `json:"yield,omitempty"`
	// Parks is how often, and for how long, the holder's container was parked since the agent started; nil if it
	// never was.
	Parks *Parks `json:"parks,omitempty"`
	// Lending is whether the holder's idle room is lent to spot pods, or why it is not, in words for
	// people. It is empty if there is nothing to say.
	Lending string `json:"lending,omitempty"`
	// Kind is what a claim has of the GPU: "whole", "units", "replica" or "placement". It is empty for
	// a holder through the device plugin, whose Resource says it.
	Kind string `json:"kind,omitempty"`
}

// Yield is why a holder of the spot tier gives its room back.
type Yield struct {
	// To names the pods that were given the room; empty if the GPU's layout changes.
	To string `json:"to,omitempty"`
	// Since is when the room was wanted, and By when the holder's container is ended.
	Since time.Time `json:"since"`
	By    time.Time `json:"by"`
	// Out is true if it has given its room back. It starts again when its room is not wanted any longer.
	Out bool `json:"out,omitempty"`
}

// Parks is how often a container's GPU memory was moved to the host, and for how long.
type Parks struct {
	// Times counts the parks, with the present one.
	Times int `json:"times"`
	// Since is when the present park began; nil if its processes run.
	Since *time.Time `json:"since,omitempty"`
	// MiB is what was moved to the host by the last park.
	MiB uint64 `json:"mib"`
	// Seconds is for how long it was parked, all times together.
	Seconds float64 `json:"seconds"`
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
	// CapMiB is the container's cap. It is nil if the container holds the whole GPU, or MIG
	// devices, whose memory the hardware limits.
	CapMiB *uint64 `json:"capMiB"`
	// UsedMiB is the use that counts against the cap, as the watchdog last saw it; nil if
	// unknown. It is what the driver reports for the container's processes, plus managed
	// memory, which only the container itself counts. PeakMiB is the most so far. With a cap,
	// it includes peaks between two looks, as the container counts them.
	UsedMiB *uint64 `json:"usedMiB"`
	PeakMiB uint64  `json:"peakMiB"`
	// Guarantee is how strong the cap is: "hardware", "driver", "api" or
	// "watchdog".
	Guarantee string `json:"guarantee,omitempty"`
	// Refusals is how many of the container's allocations were refused as out of memory. The
	// container reports it and can write any number, so no decision depends on it.
	Refusals uint64 `json:"refusals"`
	// Processes is the number of the container's processes that use the GPU.
	Processes int `json:"processes"`
	// Uncounted is how many allocations of a kind unknown to the cap's library have passed it
	// (--cap-policy open). UndoneMiB is the most that a memory pool has briefly taken beyond
	// the cap. The container reports both.
	Uncounted uint64 `json:"uncounted,omitempty"`
	UndoneMiB uint64 `json:"undoneMiB,omitempty"`
	// SMPercent is how much of the GPU's streaming multiprocessors its processes keep busy, as
	// the driver last reported; nil if the driver does not report that per process (MIG).
	SMPercent *float64 `json:"smPercent,omitempty"`
	// ComputePercent is the container's share of the GPU's SMs, in percent. It is 0 if the container has
	// none of its own: it takes turns with others, or holds the whole GPU or MIG devices.
	ComputePercent int `json:"computePercent,omitempty"`
	// Compute is how strongly that share is held, as the watchdog last saw it; nil without a share.
	Compute *compute.Held `json:"compute,omitempty"`
}

// HasPeak reports whether the container's memory was ever seen.
func (c Container) HasPeak() bool { return c.UsedMiB != nil || c.PeakMiB > 0 }

// Values of Policy.State.
const (
	PolicyHeld    = "held"    // the API server refuses what the policy must refuse
	PolicyMissing = "missing" // the API server would accept it
	PolicyUnknown = "unknown" // the API server gave no answer
)

// Policy is one admission policy from the agent's manifests.
type Policy struct {
	Name  string `json:"name"`
	State string `json:"state"`
	// Reason is what to do, or why the state is unknown; empty for PolicyHeld.
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
	// Reason is why the watchdog is off.
	Reason string `json:"reason,omitempty"`
	// Kills is the number of containers that the watchdog has ended since the agent started.
	// Intruders is the number of those that it has found on a GPU without an allocation there.
	Kills     uint64 `json:"kills"`
	Intruders uint64 `json:"intruders"`
	// Detached is how many clients of MPS were detached before it ended their containers, and Undetached for
	// how many the daemon has not answered in time.
	Detached   uint64 `json:"detached,omitempty"`
	Undetached uint64 `json:"undetached,omitempty"`
}
