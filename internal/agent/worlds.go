// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"time"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	kubelet "example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/pkg/plugin"
)

// Worlds is what the loop speaks to.
type Worlds struct {
	Driver  Driver
	Files   Files
	Caps    Caps
	Kubelet Kubelet
	Runtime deviceplugin.Runtime
	Plugins Plugins
	Store   Store
	// Cluster is nil where there is no API server to speak to.
	Cluster Cluster
	// DRA is nil where there is no API server.
	DRA *DRA
	// GPUNodes is nil where no GPUNode is to be written.
	GPUNodes GPUNodes
	// Lowering is nil where the scheduler hears from the kubelet alone.
	Lowering *Lowering
	// Features is nil where labels do not go by way of Node Feature Discovery.
	Features Features
	Observer Observer
	// Account is nil where no account of what is granted and used is kept.
	Account *Account
}

// Driver is what the loop needs of the hardware. pkg/gpu/nvml has it.
type Driver interface {
	Inventory(context.Context) (gpu.Inventory, error)
	Health(context.Context, gpu.UUID) (gpu.Health, error)
	// LinksChanged says that NVLinks are not as the last Inventory has them.
	LinksChanged(context.Context) (bool, error)
	Parts(context.Context) (cdi.Parts, error)
	// Events blocks and calls back for every event until ctx ends.
	Events(context.Context, func(gpu.Event)) error
	// SetTimeSlice wraps gpu.ErrNotSupported where the card or the driver's
	// tool cannot.
	SetTimeSlice(context.Context, gpu.UUID, gpu.TimeSlice) error
	// MIG is one GPU's MIG side as it is now.
	MIG(context.Context, gpu.UUID) (gpu.MIG, error)
	// CreateInstance makes a compute instance of a profile, which may be a split,
	// and the GPU instance around it where there is none at that place. It wraps
	// gpu.ErrNoRoom where the hardware has none.
	CreateInstance(ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int) (gpu.Instance, error)
	// DestroyInstance takes a compute instance away, and the GPU instance around it
	// where that is empty then. It wraps gpu.ErrInUse and gpu.ErrNotFound.
	DestroyInstance(context.Context, gpu.UUID, gpu.Instance) error
	// SetMIGMode sets the mode; MIG tells whether it is in force.
	SetMIGMode(ctx context.Context, u gpu.UUID, on bool) error
	// Reset resets one GPU, which must be idle: gpu.ErrInUse names who has it open.
	Reset(context.Context, gpu.UUID) error
	// Capabilities are the device nodes, by host path, that open an instance of the
	// GPU with this minor number.
	Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error)
	// LetGo gives up every handle, so that the driver can be unloaded. From then
	// on everything answers an error that wraps gpu.ErrNoDriver.
	LetGo() error
}

// Files is the directory of CDI files. pkg/cdi/dir has it.
type Files interface {
	Write(key string, spec *specs.Spec) error
	Remove(key string) error
	List() ([]string, error)
	Read(key string) (*specs.Spec, error)
	// Written is when a file was last written with other content than before.
	Written(key string) (time.Time, error)
}

// Caps is the limit pages of allocations, and what else the agent lays on the host for
// caps. pkg/memcap/lib stands behind it.
type Caps interface {
	// Write lays an allocation's pages, or changes what they say, and returns where they are
	// on the host.
	Write(key string, limits []lib.Limit) (map[gpu.UUID]lib.Page, error)
	// Sound says whether an allocation's pages are such that processes can go by them.
	Sound(key string) (bool, error)
	// Limit is what an allocation's page says of a GPU.
	Limit(key string, u gpu.UUID) (uint64, error)
	Remove(key string) error
	// List returns the allocations that have pages.
	List() ([]string, error)
	// Fit returns the libraries that hold containers to their memory, by host
	// paths, as they suit the driver whose parts these are. Where they cannot be
	// fitted it returns those that serve any driver, or none, and why.
	Fit(cdi.Parts) (lib.Kit, error)
	// Prune removes the libraries of other versions of the agent, and those fitted
	// to another driver.
	Prune() error
}

// Kubelet is what the loop asks the kubelet. internal/node has it.
type Kubelet interface {
	deviceplugin.Kubelet
	// Allocatable is the devices of all resources that the kubelet would give
	// out.
	Allocatable(context.Context) (map[string][]string, error)
}

// DRA is what GPUs are offered with through DRA.
type DRA struct {
	// API and Kubelet know the claims; internal/kube/agentkube and internal/node have them.
	API     dra.API
	Kubelet dra.Kubelet
	// Evict has a pod end whose claim can never be prepared; nil where the agent evicts
	// nobody.
	Evict func(context.Context, workload.Pod) error
	// Serve returns what has the kubelet call the front-end.
	Serve func(*dra.FrontEnd) (DRADriver, error)
}

// DRADriver has the kubelet call a front-end, until ctx ends. pkg/dra's Server is one.
type DRADriver interface {
	Run(context.Context) error
	// Status says whether the kubelet has it.
	Status() kubelet.Status
}

// Plugins serves resources to the kubelet. plugin.Kubelet is one.
type Plugins interface {
	// Set makes these the resources that are served.
	Set(map[string]plugin.Source) error
	// Suspect says that the kubelet does not seem to know a resource.
	Suspect(resource string)
	// Withhold has the kubelet count all devices as unhealthy, or takes that back.
	Withhold(on bool)
	// Status says how each fares.
	Status() []plugin.Status
}

// Store is the agent's memory on disk. state.Store is one.
type Store interface {
	Document() state.Document
	Save(state.Document) error
	Allocations() []state.Allocation
	Append(state.Allocation) error
	// Keep makes the journal hold these allocations and no others.
	Keep([]state.Allocation) error
}

// Features is where labels are left for Node Feature Discovery, which writes them
// to the Node. internal/nfd stands behind it.
type Features interface {
	Write(nfd.Features) error
}

// Cluster is where the outcome is written for people and schedulers.
// internal/kube/agentkube has it.
type Cluster interface {
	// Mark makes the Node's labels and annotations say this and nothing else of the
	// agent's.
	Mark(context.Context, agentkube.Marks) error
	SetCondition(ctx context.Context, c agentkube.Condition) error
	// RemoveStartupTaint takes away the taint that the node was registered with, if there
	// is to be one, it is there, and the Node shows something of each of these resources.
	RemoveStartupTaint(ctx context.Context, resources []string) error
	// Devices is what these DRA drivers say of their devices in ResourceSlices.
	Devices(ctx context.Context, drivers ...string) ([]agentkube.Device, error)
	Event(regarding workload.Pod, kind agentkube.EventType, reason, message string)
}

// Observer is told of what happens; it must not block. internal/obs/agentobs stands
// behind it.
type Observer interface {
	// GPUEvent is called for every event of the driver.
	GPUEvent(gpu.Event)
	// Round is called after every round.
	Round(err error, took time.Duration)
	// MIGStep is called for each step of work on a GPU's hardware, Wish when the
	// container that waited for an instance may start.
	MIGStep(op, profile string, took time.Duration, err error)
	Wish(profile string, took time.Duration)
}
