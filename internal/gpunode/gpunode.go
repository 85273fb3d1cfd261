// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"encoding/json"
	"slices"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
)

// How the API calls a GPUNode; its group is the agent's domain (--domain).
const (
	Version = "v1alpha1"
	Kind    = "GPUNode"
	Plural  = "gpunodes"
)

// Site is the label, without the domain, that says where a node is. Operators write it on Nodes;
// the export makes flavors of sites, and the placer counts GPUs by site.
const Site = "gpu.site"

// Status is what a GPUNode says.
type Status struct {
	// Summary is for people who list many nodes.
	Summary Summary `json:"summary"`
	// Conditions has the condition Ready.
	Conditions []Condition `json:"conditions,omitempty" max:"16"`
	// MemoryUnitMiB is the size of one device of gpu-mem.
	MemoryUnitMiB int `json:"memoryUnitMiB,omitempty" max:"16777216"`
	// HoldersIn says where the holders of devices are told.
	HoldersIn HoldersIn `json:"holdersIn,omitempty" max:"16"`
	// Resources are those that the node offers through the device plugin, sorted by name.
	Resources []Resource `json:"resources,omitempty" max:"256"`
	// Cards are the kinds of MIG GPUs that the node has, sorted by name.
	Cards []Card `json:"cards,omitempty" max:"16"`
	// GPUs is sorted by index.
	GPUs []GPU `json:"gpus,omitempty" max:"128"`
}

// Summary is a node in a line.
type Summary struct {
	// GPUs is how many there are, Unhealthy how many of them have a fault.
	GPUs      int `json:"gpus" max:"128"`
	Unhealthy int `json:"unhealthy" max:"128"`
	// Modes counts GPUs by mode: "2 whole, 6 mig".
	Modes string `json:"modes,omitempty" max:"256"`
	// Free is what can be had of all that is on offer, through either front-end:
	// "gpu 2/4, gpu-mem 40/158, mig 5/16 memory slices".
	Free string `json:"free,omitempty" max:"256"`
	// Largest is the largest request for each that fits: "gpu 2, gpu-mem 33, mig 3g.40gb".
	Largest string `json:"largest,omitempty" max:"256"`
	// SaturationPercent is the part of the GPUs' memory that is held or cannot be had,
	// rounded down. GPUs with mode off do not count; a node that has no other has 100.
	SaturationPercent int `json:"saturationPercent" max:"100"`
}

// HoldersIn says where the holders of devices are told.
type HoldersIn string

// Where holders are told.
const (
	// InPods: the status of each pod names its devices
	// (containerStatuses[].allocatedResourcesStatus, Kubernetes 1.36 and later).
	InPods HoldersIn = "Pods"
	// InObject: GPU.Holders has them, and the object is written at every change.
	InObject HoldersIn = "GPUNode"
)

// Resource is what a node has of a resource that the kubelet offers.
type Resource struct {
	// Name is the full name, for example "example.com/gpu-mem".
	Name string `json:"name" max:"316"`
	// Total is how many devices are on offer or held, and Free how many can be had now.
	// MIG devices on demand exclude each other, so not all that are free can be had.
	Total int `json:"total" max:"60000"`
	Free  int `json:"free" max:"60000"`
	// Largest is the largest number that one container can have now.
	Largest int `json:"largest" max:"60000"`
}

// GPU is one GPU of a node.
type GPU struct {
	UUID string `json:"uuid" max:"96"`
	// Index is the driver's number of the GPU.
	Index int    `json:"index" max:"65535"`
	Model string `json:"model,omitempty" max:"256"`
	// MemoryMiB is all of its memory; 0 where it has none of its own, but the machine's.
	MemoryMiB int `json:"memoryMiB" max:"16777216"`
	// Mode is the partition's word for the layout: "whole", "shared", "mig", "dynamic" or
	// "off"; empty while no partition is in force.
	Mode string `json:"mode,omitempty" max:"16"`
	// API is the front-end through which the GPU is offered: "device-plugin" or "dra";
	// empty where it offers nothing. What goes through DRA is in ResourceSlices too, from
	// which the scheduler places it.
	API string `json:"api,omitempty" max:"16"`
	// Guarantee is how strongly a cap on memory holds on the GPU: "hardware", "driver",
	// "api" or "watchdog"; empty where nothing is shared.
	Guarantee string `json:"guarantee,omitempty" max:"16"`
	// Cordoned says that an operator keeps new pods off the GPU.
	Cordoned bool `json:"cordoned,omitempty"`
	// Conditions has the conditions Healthy and Available, and Idle while it is True.
	Conditions []Condition `json:"conditions,omitempty" max:"16"`
	// Resource is the full name of the resource that the GPU's devices are of; empty for
	// mig, dynamic and off, and through DRA.
	Resource string `json:"resource,omitempty" max:"316"`
	// Kind says what one device is: the "whole" GPU, one of its memory "units" (a request
	// is for units of one GPU) or a "replica" (a request is for replicas of different
	// GPUs); "placement" for mig, and for dynamic, whose Total counts memory units.
	Kind piece.Kind `json:"kind,omitempty" max:"16"`
	// Total is how many devices the GPU has: 1, its memory units or its replicas; 0 for mig
	// and off, and where nothing is known. A device's number is below Total, and a whole
	// GPU's is 0.
	Total int `json:"total" max:"16777216"`
	// Used has the numbers of the devices that are held.
	Used piece.Set `json:"used,omitempty" max:"30000"`
	// Free is how many devices can be had now: 0 where the GPU is not Available.
	Free int `json:"free" max:"16777216"`
	// Largest is how many of them one container can have: all memory units that are free,
	// and one replica.
	Largest int `json:"largest" max:"16777216"`
	// MIG is nil for a GPU that offers no MIG devices and has none.
	MIG *MIG `json:"mig,omitempty"`
	// Holders are those who have something of the GPU, sorted, where HoldersIn is InObject.
	Holders []Holder `json:"holders,omitempty" max:"1024"`
}

// UnmarshalJSON reads a GPU. One whose kind this version does not know is not Available,
// whatever a newer version says of it.
func (g *GPU) UnmarshalJSON(data []byte) error {
	type plain GPU
	if err := json.Unmarshal(data, (*plain)(g)); err != nil {
		return err
	}
	if err := g.Kind.Check(); err != nil {
		g.Conditions = slices.DeleteFunc(g.Conditions, func(c Condition) bool { return c.Type == Available })
		g.Conditions = append(g.Conditions, Condition{
			Type: Available, Status: False, Reason: status.UnknownKind, Message: err.Error(),
		})
	}
	return nil
}

// MIG is what a GPU has of MIG devices. A placement is written as in a device ID,
// "3g.40gb@4", or within an [Offer] without the profile, "4"; of a compute instance that
// shares its GPU instance "1c.3g.40gb@4.1" and "4.1".
type MIG struct {
	// Card is the name of the GPU's kind in Status.Cards; empty while it is unknown.
	Card string `json:"card,omitempty" max:"256"`
	// OnDemand says that instances are made for the pods that ask for them, so that
	// placements on offer can overlap.
	OnDemand bool `json:"onDemand,omitempty"`
	// Largest is the profile with the most memory slices that can be had now; empty where
	// none can.
	Largest string `json:"largest,omitempty" max:"63"`
	// Offers are the profiles on offer, sorted by name.
	Offers []Offer `json:"offers,omitempty" max:"64"`
	// Used are the placements that are held, and Blocked other instances that take up
	// memory slices and stay: those that somebody else made, and those that are leaving.
	// Warm exist, are idle, and go if their room is wanted. All are sorted by place.
	Used    []string `json:"used,omitempty" max:"512" each:"64"`
	Blocked []string `json:"blocked,omitempty" max:"512" each:"64"`
	Warm    []string `json:"warm,omitempty" max:"512" each:"64"`
}

// Offer is what a GPU offers of a MIG profile.
type Offer struct {
	Profile string `json:"profile" max:"63"`
	// Resource is the full name of its resource; empty through DRA.
	Resource string `json:"resource,omitempty" max:"316"`
	// Placements are all that the GPU offers, and Free those that can be had now; of those
	// that overlap only one can. They are sorted by place.
	Placements []string `json:"placements" max:"512" each:"64"`
	Free       []string `json:"free,omitempty" max:"512" each:"64"`
	// Largest is how many can be had together.
	Largest int `json:"largest" max:"512"`
}

// Holder is a container that has something of a GPU.
type Holder struct {
	// Namespace, Pod and Container are empty where the kubelet has not named the holder yet.
	Namespace string `json:"namespace,omitempty" max:"63"`
	Pod       string `json:"pod,omitempty" max:"253"`
	Container string `json:"container,omitempty" max:"63"`
	// Resource is what it was asked for as.
	Resource string `json:"resource,omitempty" max:"316"`
	// Devices are the numbers of its devices, as in GPU.Used, and Placements its MIG
	// devices.
	Devices    piece.Set `json:"devices,omitempty" max:"30000"`
	Placements []string  `json:"placements,omitempty" max:"512" each:"64"`
}

// Cut shortens the messages of all conditions to brief.Text: some are words of a driver or an
// operator, and the API server takes no more. The admission policies have the same number.
func (s *Status) Cut() {
	cut := func(of []Condition) {
		for i := range of {
			of[i].Message = brief.Cut(of[i].Message, brief.Text)
		}
	}
	cut(s.Conditions)
	for i := range s.GPUs {
		cut(s.GPUs[i].Conditions)
	}
}

// Condition has the JSON form of a condition of the API's (metav1.Condition).
type Condition struct {
	Type    string          `json:"type" max:"316"`
	Status  ConditionStatus `json:"status" max:"7"`
	Reason  status.Reason   `json:"reason" max:"1024"`
	Message string          `json:"message" max:"32768"`
	// LastTransitionTime is when Status last changed.
	LastTransitionTime time.Time `json:"lastTransitionTime"`
}

// ConditionStatus is what a condition says of its type.
type ConditionStatus string

// The API's words.
const (
	True  ConditionStatus = "True"
	False ConditionStatus = "False"
)

// Types of conditions.
const (
	// Ready is the node's: the agent runs, and what the object says is its offer.
	Ready = "Ready"
	// Healthy is a GPU's: it has no fault.
	Healthy = "Healthy"
	// Available is a GPU's: what is free of it can be had. It is False where the GPU is off,
	// unhealthy, cordoned or about to change. A GPU that is full is Available.
	Available = "Available"
	// Idle is a GPU's, and there while it is True: somebody holds something of it and has had
	// no process on it for --idle-after.
	Idle = "Idle"
)

// Is reports whether a condition is there and True.
func Is(conditions []Condition, kind string) bool {
	return slices.ContainsFunc(conditions, func(c Condition) bool { return c.Type == kind && c.Status == True })
}
