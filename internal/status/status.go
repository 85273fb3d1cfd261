// SPDX-License-Identifier: Apache-2.0

package status

import (
	"time"

	"example.com/gpu-agent/pkg/topology"
)

// Status is the agent's view of its node, as /statusz shows it. Its JSON form
// is a contract with `gpu-agent status` of other versions: fields are added,
// never renamed.
type Status struct {
	Node    string `json:"node"`
	Version string `json:"version"`
	// Machine is the firmware's name of the machine; empty where it says none.
	Machine string `json:"machine,omitempty"`
	// Driver and CUDA are empty while no driver answers.
	Driver    string    `json:"driver,omitempty"`
	CUDA      string    `json:"cuda,omitempty"`
	Partition Partition `json:"partition"`
	// Claims is how many sets of devices are handed out and not yet ended,
	// those that the kubelet has not confirmed included.
	Claims int `json:"claims"`
	// Hardware says what the driver does not answer, and since when; empty while
	// it answers. Everything that needs no hardware goes on meanwhile.
	Hardware string `json:"hardware,omitempty"`
	// Resources is how those that the node serves fare with the kubelet, by name.
	Resources []Resource `json:"resources,omitempty"`
	// GPUs is in index order.
	GPUs []GPU `json:"gpus"`
	// Containers is what each container may use and uses of each GPU that it
	// holds, sorted by index, namespace, pod and container.
	Containers []Container `json:"containers,omitempty"`
	Watchdog   Watchdog    `json:"watchdog,omitzero"`
	// Policies are the admission policies that hold the agent to its own node;
	// empty until they were tried, and where the API server is not spoken to.
	Policies []Policy `json:"policies,omitempty"`
	// Topology is how GPUs and network cards are connected; nil while no driver
	// has answered.
	Topology *topology.Matrix `json:"topology,omitempty"`
}

// PartitionStates is every value of Partition.State, in the order in which
// metrics list them.
var PartitionStates = []string{"applied", "pending", "blocked", "failed", "invalid"}

// Partition is what the node is to look like, and how far that is true.
type Partition struct {
	// Name is the partition chosen; empty where there is none.
	Name string `json:"name"`
	// State is one of PartitionStates; empty where there is no partition.
	State string `json:"state"`
	// Message says why, where State is not "applied".
	Message string `json:"message,omitempty"`
	// Source is where the partitions were read: a file's path or
	// "configmap NAMESPACE/NAME".
	Source string `json:"source,omitempty"`
	// Generation grows by one with each accepted change since the start.
	Generation uint64 `json:"generation"`
}

// Resource is a resource at the kubelet.
type Resource struct {
	// Name is the full resource name.
	Name string `json:"name"`
	// Devices is how many the list has that was last made for the kubelet.
	Devices int `json:"devices"`
	// Registered says that the kubelet receives the lists and knows the devices;
	// Since is since when it does not.
	Registered bool       `json:"registered"`
	Since      *time.Time `json:"unregisteredSince,omitempty"`
	// Error is why it does not. It is empty for the first half minute, which a
	// kubelet takes to start again; from then on it is in Partition.Message too,
	// where people read it.
	Error string `json:"error,omitempty"`
}

// GPU is one GPU.
type GPU struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model,omitempty"`
	// PCI is the bus address, and NUMA the node that it belongs to; empty and nil
	// where they are not known.
	PCI  string `json:"pci,omitempty"`
	NUMA *int   `json:"numa,omitempty"`
	// MemoryMiB is the whole card's.
	MemoryMiB uint64 `json:"memoryMiB"`
	// Mode is the partition's word: whole, shared, mig or off; empty where no
	// partition is in force.
	Mode string `json:"mode,omitempty"`
	// Resource is the full name of what the GPU offers; empty for mode off.
	Resource string `json:"resource,omitempty"`
	// UnitMiB is the memory that one device stands for; zero where a device is
	// not an amount of memory.
	UnitMiB uint64 `json:"unitMiB,omitempty"`
	// Total = Used + Free + Unhealthy counts devices. Used is what somebody
	// holds, Free what can be had now, and Unhealthy what nobody holds and
	// nobody can have.
	Total     int `json:"total"`
	Used      int `json:"used"`
	Free      int `json:"free"`
	Unhealthy int `json:"unhealthy"`
	// Health is "healthy" or "unhealthy"; Reason says why it is the latter.
	Health string `json:"health"`
	Reason string `json:"reason,omitempty"`
	// Class is the kind of fault in one word, Since when it was first seen, and
	// Needs what an operator must do ("reset", "reboot"); empty where there is no
	// fault, or it passes by itself.
	Class string     `json:"class,omitempty"`
	Since *time.Time `json:"unhealthySince,omitempty"`
	Needs string     `json:"needs,omitempty"`
	// Blocked names the holders that a wanted change waits for; empty where
	// none does.
	Blocked string `json:"blocked,omitempty"`
	// Holders is sorted by namespace, pod, container and resource.
	Holders []Holder `json:"holders,omitempty"`
	// Intruders is how many processes of containers that hold no claim on the
	// GPU use it now, and NoPod how many of no pod at all do, as the watchdog
	// saw it last. A GPU that is off has nobody to intrude on. Unlisted is how many
	// processes are of containers that the container runtime does not list, of which
	// nobody can say what they may have.
	Intruders int `json:"intruders,omitempty"`
	NoPod     int `json:"noPod,omitempty"`
	Unlisted  int `json:"unlisted,omitempty"`
	// MIG is nil where the GPU cannot do MIG, or has nothing to do with it now:
	// the mode is off and stays off.
	MIG *MIG `json:"mig,omitempty"`
}

// MIG is a GPU cut by MIG. What it offers is in Slots, of several
// resources: GPU.Resource is empty for it, and so are the counts.
type MIG struct {
	// Enabled is the mode in force, Pending the mode after the next reset; nil
	// where that is the same.
	Enabled bool  `json:"enabled"`
	Pending *bool `json:"pending,omitempty"`
	// OnDemand says that instances are made for the pods that ask; else the
	// partition names them.
	OnDemand bool `json:"onDemand,omitempty"`
	// Size is the number of the GPU's memory slots: 8 on an A100, 4 on an A30;
	// zero while nobody has told.
	Size int `json:"size,omitempty"`
	// Work is what is being done to the GPU's instances now, in words; empty
	// while nothing is.
	Work string `json:"work,omitempty"`
	// Slots is what stands, is offered or is wanted, in the order of place, then
	// size, then profile, then compute slice.
	Slots []Slot `json:"slots,omitempty"`
}

// Slot is a MIG device that stands, or could.
type Slot struct {
	// Device is its ID with the kubelet ("GPU-…::3g.40gb@4"). Resource is the
	// full name of what it is offered as; empty where it is not on offer.
	Device   string `json:"device"`
	Resource string `json:"resource,omitempty"`
	Profile  string `json:"profile"`
	// Start and Size are its GPU instance's memory slots. CI is its first compute
	// slice in there; 0 unless the profile is a split (1c.3g.40gb).
	Start int `json:"start"`
	Size  int `json:"size"`
	CI    int `json:"ci,omitempty"`
	// State is one of SlotStates.
	State string `json:"state"`
	// UUID is the instance's, empty where none stands. GI and CIID are the
	// driver's numbers of the GPU instance and the compute instance, valid only
	// where UUID is set.
	UUID string `json:"uuid,omitempty"`
	GI   int    `json:"gi"`
	CIID int    `json:"ciID"`
	// Namespace, Pod and Container are who holds it; empty where nobody does, and
	// for a claim that the kubelet has not named yet.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	// Reason says why it cannot be had, or what fails; empty where there is
	// nothing to say.
	Reason string `json:"reason,omitempty"`
}

// Values of Slot.State.
const (
	SlotHeld    = "held"    // a claim has it, and its instance stands
	SlotWarm    = "warm"    // the instance stands, nobody holds it, it can be had
	SlotMaking  = "making"  // a claim has it, and its instance does not stand yet
	SlotFree    = "free"    // no instance stands, one could be made now
	SlotCovered = "covered" // its room is taken by others
	SlotLeaving = "leaving" // goes, and nobody gets it any more
	SlotForeign = "foreign" // somebody else made the instance, and it is not offered
	SlotFailed  = "failed"  // it could not be made, time and again, and is withdrawn
)

// SlotStates is every value of Slot.State, in the order in which metrics
// list them.
var SlotStates = []string{SlotHeld, SlotWarm, SlotMaking, SlotFree, SlotCovered, SlotLeaving, SlotForeign, SlotFailed}

// Healthy is the value of GPU.Health that is not a complaint.
const Healthy = "healthy"

// Holder is a container that holds devices of a GPU.
type Holder struct {
	// Namespace, Pod and Container are empty for a claim that the kubelet has
	// not named yet.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	Resource  string `json:"resource"`
	// Units is the number of devices.
	Units int `json:"units"`
	// Since is when the devices were handed out, as far as the agent knows.
	Since *time.Time `json:"since,omitempty"`
	// Waits names who is still on the devices while the container may not start;
	// empty where nobody is.
	Waits string `json:"waits,omitempty"`
}

// Container is a container's memory on one GPU: one that holds two GPUs
// is listed twice.
type Container struct {
	// Namespace, Pod and Container are empty for a claim that the kubelet has
	// not named yet.
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	// Claim is the claim's key.
	Claim string `json:"claim"`
	// GPU is the UUID, Index what GPU has for it.
	GPU   string `json:"gpu"`
	Index int    `json:"index"`
	// CapMiB is nil where the container has no cap: it has the whole GPU, or MIG
	// instances of it, which the card holds to their memory.
	CapMiB *uint64 `json:"capMiB"`
	// UsedMiB is what counts against the cap, as the watchdog saw it last: what
	// the driver reports of the container's processes, and managed memory, for
	// which there is only the container's own word; nil while unknown. PeakMiB is
	// the most of that so far.
	UsedMiB *uint64 `json:"usedMiB"`
	PeakMiB uint64  `json:"peakMiB"`
	// Guarantee is how strong the cap is: "hardware", "driver", "api", "watchdog"
	// or "none".
	Guarantee string `json:"guarantee,omitempty"`
	// Refusals is how many allocations were answered with out of memory, by the
	// container's own word: it can write what it likes into its counters, and
	// nothing is decided by this one.
	Refusals uint64 `json:"refusals"`
	// Processes is how many processes of the container use the GPU.
	Processes int `json:"processes"`
	// Uncounted is how many allocations of a kind that the cap's library does not know
	// have passed it (--cap-policy open), and UndoneMiB the most that a memory pool has
	// taken beyond the cap for a moment; both by the container's own word.
	Uncounted uint64 `json:"uncounted,omitempty"`
	UndoneMiB uint64 `json:"undoneMiB,omitempty"`
}

// HasPeak tells whether the container's memory was ever seen.
func (c Container) HasPeak() bool { return c.UsedMiB != nil || c.PeakMiB > 0 }

// Values of Policy.State.
const (
	PolicyHeld    = "held"    // a write that the policy must refuse is refused
	PolicyMissing = "missing" // such a write would be taken
	PolicyUnknown = "unknown" // the API server does not say
)

// Policy is one admission policy of the agent's manifests.
type Policy struct {
	Name  string `json:"name"`
	State string `json:"state"`
	// Reason says what to do, or why nothing is known; empty where it is held.
	Reason string `json:"reason,omitempty"`
}

// Values of Watchdog.State.
const (
	WatchdogRunning = "running"
	WatchdogOff     = "off"
)

// Watchdog is what looks for containers that are over their caps all the same.
type Watchdog struct {
	// State is WatchdogRunning or WatchdogOff; empty where an agent of before
	// there was one answers.
	State string `json:"state,omitempty"`
	// Reason says why it is off.
	Reason string `json:"reason,omitempty"`
	// Kills is how many containers it has ended, for whatever reason, and
	// Intruders how many it has found on a GPU that they hold no claim on, since
	// the agent started.
	Kills     uint64 `json:"kills"`
	Intruders uint64 `json:"intruders"`
}
