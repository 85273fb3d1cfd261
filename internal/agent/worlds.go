// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	kubelet "example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/pkg/plugin"
)

// Worlds has the interfaces to everything outside the loop.
type Worlds struct {
	Driver  Driver
	Files   Files
	Caps    Caps
	Kubelet Kubelet
	Runtime deviceplugin.Runtime
	Plugins Plugins
	Store   Store
	// Cluster is nil if there is no API server.
	Cluster Cluster
	// DRA is nil if there is no API server.
	DRA *DRA
	// GPUNodes is nil if the agent writes no GPUNode.
	GPUNodes GPUNodes
	// Setups is nil if the agent does not look for what earlier owners have left.
	Setups Setups
	// Containers returns what the watchdog last saw of containers. It is nil if there is no watchdog.
	Containers func() []status.Container
	// MPS is nil if the agent asks no supervisor of MPS daemons.
	MPS MPS
	// PodOf returns the UID of the pod that a process belongs to; empty if it belongs to none, or
	// that cannot be told. If it is nil, no process belongs to a pod.
	PodOf func(pid int) string
	// Limits is nil if the driver is not to be asked for memory limits.
	Limits Limits
	// Lowering is nil if the scheduler learns of devices from the kubelet alone.
	Lowering *Lowering
	// End ends a container, after its clients of MPS have been detached, and returns what it used. The error
	// wraps gpu.ErrNotFound if the container has ended already. If End is nil, none is ended.
	End func(context.Context, *node.Container) (how string, err error)
	// Detach has a container's clients of MPS detached before its grace is over; nil if it has none.
	Detach func(context.Context, *node.Container)
	// Evict evicts a pod with a grace period in place of its own; nil if the agent evicts no pods. The error
	// wraps agentkube.ErrBudget if a disruption budget forbids it.
	Evict func(ctx context.Context, p workload.Pod, grace time.Duration) error
	// Parking is nil if no container is parked.
	Parking *Parking
	// Yields is nil if it is not counted what becomes of spot allocations.
	Yields YieldObserver
	// Features is nil if labels are written to the Node and not through Node Feature Discovery.
	Features Features
	Observer Observer
	// Account is nil if the agent keeps no usage journal.
	Account *Account
	// Lending is nil if the agent lends no room of idle holders.
	Lending *Lending
}

// containers returns what the watchdog last saw of containers; nothing if there is no watchdog.
func (w *Worlds) containers() []status.Container {
	if w.Containers == nil {
		return nil
	}
	return w.Containers()
}

// Driver is the part of the GPU driver that the loop uses. pkg/gpu/nvml implements it.
type Driver interface {
	Inventory(context.Context) (gpu.Inventory, error)
	Health(context.Context, gpu.UUID) (gpu.Health, error)
	// LinksChanged reports whether NVLinks have changed since the last Inventory.
	LinksChanged(context.Context) (bool, error)
	Parts(context.Context) (cdi.Parts, error)
	// Events blocks and calls back for every event until ctx ends.
	Events(context.Context, func(gpu.Event)) error
	// SetTimeSlice returns an error that wraps gpu.ErrNotSupported if the card or the driver's tool
	// cannot set time slices.
	SetTimeSlice(context.Context, gpu.UUID, gpu.TimeSlice) error
	// MIG returns the present MIG state of one GPU.
	MIG(context.Context, gpu.UUID) (gpu.MIG, error)
	// CreateInstance makes a compute instance of a profile, which may be a split, and its GPU
	// instance if there is none at that placement. The error wraps gpu.ErrNoRoom if the hardware
	// has no room.
	CreateInstance(ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int) (gpu.Instance, error)
	// DestroyInstance destroys a compute instance, and its GPU instance if that is then empty. The
	// error may wrap gpu.ErrInUse or gpu.ErrNotFound.
	DestroyInstance(context.Context, gpu.UUID, gpu.Instance) error
	// SetMIGMode sets the mode. Only MIG shows whether the mode is in force.
	SetMIGMode(ctx context.Context, u gpu.UUID, on bool) error
	// Reset resets one GPU, which must be idle. If it is not, the error wraps gpu.ErrInUse and
	// names the processes that have it open.
	Reset(context.Context, gpu.UUID) error
	// Capabilities returns the device nodes, by host path, that give access to an instance of the
	// GPU with this minor number.
	Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error)
	// LetGo closes every handle, so that the driver can be unloaded. All later calls return an
	// error that wraps gpu.ErrNoDriver.
	LetGo() error
}

// Setups is how earlier owners have set the GPUs. pkg/gpu/nvml implements it.
type Setups interface {
	// Setup returns what can be read, also beside an error.
	Setup(context.Context, gpu.UUID) (gpu.Setup, error)
	Surroundings(context.Context) (gpu.Surroundings, error)
	// ResetComputeMode sets a GPU's compute mode to DEFAULT.
	ResetComputeMode(context.Context, gpu.UUID) error
	// SetComputeMode sets it to another mode, and reads that back.
	SetComputeMode(context.Context, gpu.UUID, gpu.ComputeMode) error
}

// MPS asks the supervisor of the node's MPS daemons. mps.Client implements all but End.
type MPS interface {
	// State returns what is. Sync sets what shall be, and returns what is after that. The error wraps
	// gpu.ErrNotFound if no supervisor listens.
	State(context.Context) (mps.State, error)
	Sync(context.Context, []mps.Want) (mps.State, error)
	// Detach detaches clients from a GPU's server, so that their end harms no other.
	Detach(context.Context, mps.Detach) ([]mps.Detached, error)
	// Probe has a short-lived program begin CUDA as a client of a GPU's server.
	Probe(context.Context, gpu.UUID) (mps.Probed, error)
	// Now returns the time on the clock of the daemons' answers.
	Now() time.Duration
	// Left reports whether there is something of a daemon on the node.
	Left() bool
	// End ends all daemons if no supervisor runs.
	End(context.Context) error
}

// Limits tells where the driver can limit the memory of containers. guard.ByCgroup implements it.
type Limits interface {
	// Able returns nil if it can on this GPU. Otherwise the error says what lacks.
	Able(context.Context, gpu.UUID) error
}

// Files is the directory of CDI files. pkg/cdi/dir implements it.
type Files interface {
	Write(key string, spec *specs.Spec) error
	Remove(key string) error
	List() ([]string, error)
	Read(key string) (*specs.Spec, error)
	// Written returns when the content of a file last changed.
	Written(key string) (time.Time, error)
}

// Caps keeps the limit pages of allocations, and the libraries on the host that enforce caps.
// pkg/memcap/lib implements it.
type Caps interface {
	// Write creates or updates an allocation's pages, and returns their places on the host.
	Write(key string, limits []lib.Limit) (map[gpu.UUID]lib.Page, error)
	// Sound reports whether an allocation's pages are intact, so that processes can rely on them.
	Sound(key string) (bool, error)
	// Limit returns the limit of a GPU in an allocation's page, in bytes.
	Limit(key string, u gpu.UUID) (uint64, error)
	// Percent returns the share of a GPU's SMs in an allocation's page, in percent; 0 if it has none.
	Percent(key string, u gpu.UUID) (int, error)
	// Notice makes an allocation's notice, which is empty, and returns its place on the host. SetNotice writes by
	// when the allocation gives its room back; the zero time clears the notice. The error wraps
	// gpu.ErrNotFound if there is no notice.
	Notice(key string) (path string, err error)
	SetNotice(key string, by time.Time) error
	// SetControl tells the processes of an allocation what is asked of them, by bits of package lib: of those that of
	// has, it sets the ones in bits and clears the others. The error wraps gpu.ErrNotFound if there are no pages.
	SetControl(key string, bits, of uint64) error
	Remove(key string) error
	// List returns the keys of allocations that have pages.
	List() ([]string, error)
	// Fit returns the libraries that hold containers to their memory, by host paths, fitted to the
	// driver with these parts. If they cannot be fitted, it returns an error, and libraries that
	// serve any driver, or none.
	Fit(cdi.Parts) (lib.Kit, error)
	// Prune removes libraries of other versions of the agent, and those that were fitted to another
	// driver.
	Prune() error
}

// Kubelet is what the loop asks the kubelet. internal/node implements it.
type Kubelet interface {
	deviceplugin.Kubelet
	// Allocatable returns the device IDs that the kubelet can give out, by resource.
	Allocatable(context.Context) (map[string][]string, error)
}

// DRA has the interfaces for offering GPUs through DRA.
type DRA struct {
	// API and Kubelet give access to claims; internal/kube/agentkube and internal/node implement
	// them.
	API     dra.API
	Kubelet dra.Kubelet
	// Evict evicts a pod whose claim can never be prepared; nil if the agent evicts no pods.
	Evict func(context.Context, workload.Pod) error
	// Serve returns a server through which the kubelet calls the front-end.
	Serve func(*dra.FrontEnd) (DRADriver, error)
}

// DRADriver serves a front-end to the kubelet until ctx ends. pkg/dra's Server implements it.
type DRADriver interface {
	Run(context.Context) error
	// Status returns the driver's registration with the kubelet.
	Status() kubelet.Status
}

// Plugins serves resources to the kubelet. plugin.Kubelet implements it.
type Plugins interface {
	// Set replaces the set of served resources.
	Set(map[string]plugin.Source) error
	// Suspect reports that the kubelet does not seem to know a resource.
	Suspect(resource string)
	// Withhold makes the kubelet count all devices as unhealthy, or reverts that.
	Withhold(on bool)
	// Status returns the state of each resource's plugin.
	Status() []plugin.Status
}

// Store is the agent's saved state on disk. state.Store implements it.
type Store interface {
	Document() state.Document
	Save(state.Document) error
	Allocations() []state.Allocation
	Append(state.Allocation) error
	// Keep replaces the journal's allocations with these.
	Keep([]state.Allocation) error
}

// Features passes labels to Node Feature Discovery, which writes them to the Node. internal/nfd
// implements it.
type Features interface {
	Write(nfd.Features) error
}

// Cluster writes the outcome to the API server, for people and schedulers. internal/kube/agentkube
// implements it.
type Cluster interface {
	// Mark sets the agent's labels and annotations on the Node, and removes all others of the
	// agent's.
	Mark(context.Context, agentkube.Marks) error
	SetCondition(ctx context.Context, c agentkube.Condition) error
	// RemoveStartupTaint removes the taint that the node was registered with. It does nothing if no
	// taint is configured or set, or before the Node shows some of each of these resources.
	RemoveStartupTaint(ctx context.Context, resources []string) error
	// Devices returns the devices of these DRA drivers, from their ResourceSlices.
	Devices(ctx context.Context, drivers ...string) ([]agentkube.Device, error)
	Event(regarding workload.Pod, kind agentkube.EventType, reason, message string)
	// State sends an Event that tells the present state of a subject of the node. The last Event of
	// a subject is always its present state.
	State(subject string, kind agentkube.EventType, reason, message string)
}

// Observer counts what happens; it must not block. internal/obs/agentobs implements it.
type Observer interface {
	// GPUEvent is called for every event of the driver.
	GPUEvent(gpu.Event)
	// Round is called after every round.
	Round(err error, took time.Duration)
	// MIGStep is called for each step of work on a GPU's hardware. Wish is called when the instance
	// that a container waited for is ready.
	MIGStep(op, profile string, took time.Duration, err error)
	Wish(profile string, took time.Duration)
}
