// SPDX-License-Identifier: Apache-2.0

package status

// Reason is a stable code for programs: of a condition, an Event, or a refusal. The table in
// docs/conditions.md explains each one; a test compares the two.
type Reason string

// Reasons for the state of the node's partition.
const (
	PartitionsMissing Reason = "PartitionsMissing"
	PartitionsInvalid Reason = "PartitionsInvalid"
	PartitionUnfit    Reason = "PartitionUnfit"
	PartitionUnset    Reason = "PartitionUnset"
	NodeUnknown       Reason = "NodeUnknown"
	Starting          Reason = "Starting"
	APIForbidden      Reason = "APIForbidden"
	NotRegistered     Reason = "NotRegistered"
	RoundFailed       Reason = "RoundFailed"
	FilesFailed       Reason = "FilesFailed"
	HoldersUnknown    Reason = "HoldersUnknown"
	ListsFull         Reason = "ListsFull"
	NotInPartition    Reason = "NotInPartition"
	APIServerUnfit    Reason = "APIServerUnfit"
	SlicesFailed      Reason = "SlicesFailed"
	SlicesChanged     Reason = "SlicesChanged"
	NameInUse         Reason = "NameInUse"
	AgentEnds         Reason = "AgentEnds"
	GPUNodeFailed     Reason = "GPUNodeFailed"
	StartupTaintKept  Reason = "StartupTaintKept"
	UsageUnwritten    Reason = "UsageUnwritten"
)

// Reasons about GPUs and their driver.
const (
	DriverFailed         Reason = "DriverFailed"
	DriverLetGo          Reason = "DriverLetGo"
	DriverUnread         Reason = "DriverUnread"
	DriverFilesUnknown   Reason = "DriverFilesUnknown"
	GPUMissing           Reason = "GPUMissing"
	OtherOwner           Reason = "OtherOwner"
	UnknownKind          Reason = "UnknownKind"
	GPUCordoned          Reason = "GPUCordoned"
	CordonUnknown        Reason = "CordonUnknown"
	WasResetUnknown      Reason = "WasResetUnknown"
	MIGUnsupported       Reason = "MIGUnsupported"
	MIGOff               Reason = "MIGOff"
	InstanceUnknown      Reason = "InstanceUnknown"
	ProfileUnknown       Reason = "ProfileUnknown"
	ForeignInstance      Reason = "ForeignInstance"
	TimeSliceUnsupported Reason = "TimeSliceUnsupported"
	ResetDue             Reason = "ResetDue"
)

// Reasons about what earlier owners have left on the node's GPUs. Package found has a row for each.
const (
	ComputeModeSet     Reason = "ComputeModeSet"
	ComputeModeReset   Reason = "ComputeModeReset" // Event
	FoundGone          Reason = "FoundGone"        // Event
	RecoveryDue        Reason = "RecoveryDue"
	FabricNotReady     Reason = "FabricNotReady"
	DriverTooOld       Reason = "DriverTooOld"
	ResetBlocked       Reason = "ResetBlocked"
	MPSElsewhere       Reason = "MPSElsewhere"
	MPSDaemonElsewhere Reason = "MPSDaemonElsewhere"
	ECCPending         Reason = "ECCPending"
	ECCOff             Reason = "ECCOff"
	PersistenceOff     Reason = "PersistenceOff"
	PowerCapped        Reason = "PowerCapped"
	ClocksLowered      Reason = "ClocksLowered"
	AccountingOn       Reason = "AccountingOn"
	ModesetOn          Reason = "ModesetOn"
	LimitElsewhere     Reason = "LimitElsewhere"
)

// Reasons about MPS daemons, and the GPUs that have one.
const (
	MPSNoSupervisor   Reason = "MPSNoSupervisor"
	MPSNoMultiUser    Reason = "MPSNoMultiUser"
	MPSNotReady       Reason = "MPSNotReady"
	MPSCrowded        Reason = "MPSCrowded"
	MPSFault          Reason = "MPSFault" // an Event, too
	ComputeModeFailed Reason = "ComputeModeFailed"
)

// Reasons about holders.
const (
	HeldByPods  Reason = "HeldByPods"
	BusyProcess Reason = "BusyProcess"
	GrantIdle   Reason = "GrantIdle"
	NoRoom      Reason = "NoRoom"
)

// Reasons of refusals of the kubelet's requests.
const (
	BadRequest Reason = "BadRequest"
	NotOffered Reason = "NotOffered"
	NotOneGPU  Reason = "NotOneGPU"
	TooFewGPUs Reason = "TooFewGPUs"
	MPSOneGPU  Reason = "MPSOneGPU"
	NotReady   Reason = "NotReady"
	// SpotRefused is also an Event.
	SpotRefused Reason = "SpotRefused"
	// For claims that can never be prepared as they are.
	ClaimOutdated Reason = "ClaimOutdated"
	ClaimRefused  Reason = "ClaimRefused"
	// For a claim that would fail in the same way if it were made again.
	ClaimUnsupported Reason = "ClaimUnsupported"
	ClaimEnded       Reason = "ClaimEnded"
)

// Reasons of Events, and of the node's condition. Some of them are reasons of conditions, too.
const (
	GPUPartitionApplied Reason = "GPUPartitionApplied"
	GPUPartitionPending Reason = "GPUPartitionPending"
	GPUPartitionBlocked Reason = "GPUPartitionBlocked"
	GPUPartitionFailed  Reason = "GPUPartitionFailed"
	GPUPartitionInvalid Reason = "GPUPartitionInvalid"
	GPUChange           Reason = "GPUChange"
	GPUChangeFailed     Reason = "GPUChangeFailed"
	GPUInstanceFailed   Reason = "GPUInstanceFailed"
	GPUUnhealthy        Reason = "GPUUnhealthy"
	GPURecovered        Reason = "GPURecovered"
	GPUsHealthy         Reason = "GPUsHealthy"
	Offered             Reason = "Offered"
	OutOfBounds         Reason = "OutOfBounds"
	GPUDriverHangs      Reason = "GPUDriverHangs"
	CapExceeded         Reason = "CapExceeded"
	CapEvicted          Reason = "CapEvicted"
	Intruder            Reason = "Intruder"
	ContainerNotListed  Reason = "ContainerNotListed"
	Yielded             Reason = "Yielded"
)
