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

// The API's names of a GPUNode. Its group is the agent's domain (--domain).
const (
	Version = "v1alpha1"
	Kind    = "GPUNode"
	Plural  = "gpunodes"
)

// Site is the label, without the domain, with the location of a node. Operators set it on Nodes.
// The export makes flavors of sites, and the placer counts GPUs by site.
const Site = "gpu.site"

// Status is the status of a GPUNode.
type Status struct {
	// Summary is for people who list nodes.
	Summary Summary `json:"summary"`
	// Conditions has the condition Ready, and Applied while that is False.
	Conditions []Condition `json:"conditions,omitempty" max:"16"`
	// MemoryUnitMiB is the size of one device of gpu-mem, in MiB.
	MemoryUnitMiB int `json:"memoryUnitMiB,omitempty" max:"16777216"`
	// HoldersIn is the place where the holders of devices are named.
	HoldersIn HoldersIn `json:"holdersIn,omitempty" max:"16"`
	// Resources are the resources that the node offers through the device plugin, sorted by name.
	Resources []Resource `json:"resources,omitempty" max:"256"`
	// Cards are the kinds of MIG GPUs that the node has, sorted by name.
	Cards []Card `json:"cards,omitempty" max:"16"`
	// GPUs are the node's GPUs, sorted by index.
	GPUs []GPU `json:"gpus,omitempty" max:"128"`
}

// Summary describes a node in one line.
type Summary struct {
	// GPUs is the number of GPUs, Unhealthy the number of those with a fault.
	GPUs      int `json:"gpus" max:"128"`
	Unhealthy int `json:"unhealthy" max:"128"`
	// Modes counts GPUs by mode: "2 whole, 6 mig".
	Modes string `json:"modes,omitempty" max:"256"`
	// Free is how much of each is free, of all that is offered, by the names that pods ask by: "gpu 2/4,
	// gpu-mem 40/158, mig 5/16 memory slices". Memory that claims ask for has the name of its
	// DeviceClass: "gpu-memory 40Gi/158Gi".
	Free string `json:"free,omitempty" max:"256"`
	// Largest is the largest request for each that fits: "gpu 2, gpu-mem 33, mig 3g.40gb".
	Largest string `json:"largest,omitempty" max:"256"`
	// SaturationPercent is the part of the GPUs' memory that is held or not available, rounded
	// down. GPUs with mode off do not count. A node without other GPUs has 100.
	SaturationPercent int `json:"saturationPercent" max:"100"`
}

// HoldersIn is the place where the holders of devices are named.
type HoldersIn string

// Places of the holders.
const (
	// InPods: the status of each pod names its devices
	// (containerStatuses[].allocatedResourcesStatus, Kubernetes 1.36 and later).
	InPods HoldersIn = "Pods"
	// InObject: GPU.Holders names them, and the agent writes the object at every change.
	InObject HoldersIn = "GPUNode"
)

// Resource is a resource that a node offers through the kubelet.
type Resource struct {
	// Name is the full name, for example "example.com/gpu-mem".
	Name string `json:"name" max:"316"`
	// Total is the number of devices that are on offer or held. Free is the number that may be
	// given out now. MIG devices on demand exclude each other, so not all free ones can be given
	// out together.
	Total int `json:"total" max:"60000"`
	Free  int `json:"free" max:"60000"`
	// Largest is the most devices that one container can get now.
	Largest int `json:"largest" max:"60000"`
}

// GPU is one GPU of a node.
type GPU struct {
	UUID string `json:"uuid" max:"96"`
	// Index is the driver's number of the GPU.
	Index int    `json:"index" max:"65535"`
	Model string `json:"model,omitempty" max:"256"`
	// MemoryMiB is the size of its memory. 0 if it has no memory of its own and uses the machine's.
	MemoryMiB int `json:"memoryMiB" max:"16777216"`
	// Mode is the layout's name in the partition: "whole", "shared", "mig", "dynamic" or "off".
	// Empty while no partition is in force.
	Mode string `json:"mode,omitempty" max:"16"`
	// API is the front-end that offers the GPU: "device-plugin" or "dra". Empty if the GPU offers
	// nothing. What goes through DRA is in ResourceSlices too, and the scheduler places it from
	// there.
	API string `json:"api,omitempty" max:"16"`
	// Guarantee is how strongly the limit on memory holds on the GPU: "hardware", "driver", "api"
	// or "watchdog". Empty if the GPU is not shared.
	Guarantee string `json:"guarantee,omitempty" max:"16"`
	// Compute is how the containers of a shared GPU share its multiprocessors: "mps"; empty if they take
	// turns. ComputeGuarantee is how strongly the containers on the GPU are held to their shares:
	// "ceiling" if all of them are, otherwise "none"; empty if no container has a share.
	Compute          string `json:"compute,omitempty" max:"16"`
	ComputeGuarantee string `json:"computeGuarantee,omitempty" max:"16"`
	// Namespaces is how many namespaces the pods with shares of the GPU's multiprocessors belong to, as far as they
	// are known: a fault of one may end them all. 0 if no pod has a share.
	Namespaces int `json:"namespaces,omitempty" max:"1024"`
	// Cordoned is true if an operator keeps new pods off the GPU.
	Cordoned bool `json:"cordoned,omitempty"`
	// Conditions has the conditions Healthy and Available. It has Idle only while that is True.
	Conditions []Condition `json:"conditions,omitempty" max:"16"`
	// Resource is the full name of the resource of the GPU's devices. Empty for mig, dynamic and
	// off, and through DRA.
	Resource string `json:"resource,omitempty" max:"316"`
	// Kind is the kind of a device: the "whole" GPU, one of its memory "units" (a request is for
	// units of one GPU), or a "replica" (a request is for replicas of different GPUs). It is
	// "placement" for mig, and also for dynamic, whose Total counts memory units.
	Kind piece.Kind `json:"kind,omitempty" max:"16"`
	// Total is the number of the GPU's devices: 1, its memory units or its replicas. 0 for mig and
	// off, and if the layout is not known. The devices have the numbers from 0 to Total-1.
	Total int `json:"total" max:"16777216"`
	// Used has the numbers of the held devices.
	Used piece.Set `json:"used,omitempty" max:"30000"`
	// Free is the number of devices that may be given out now. 0 if the GPU is not Available.
	Free int `json:"free" max:"16777216"`
	// Largest is how many of these one container can get: all free memory units, or one replica.
	Largest int `json:"largest" max:"16777216"`
	// MIG is nil for a GPU that neither offers nor has MIG devices.
	MIG *MIG `json:"mig,omitempty"`
	// Spot is what spot pods can have of the GPU; nil if its room is not offered to them. All other fields,
	// those of MIG too, are about guaranteed pods, for which the room of spot pods is free.
	Spot *Spot `json:"spot,omitempty"`
	// Holders are the containers that have a part of the GPU, sorted. Empty unless HoldersIn is
	// InObject.
	Holders []Holder `json:"holders,omitempty" max:"1024"`
}

// UnmarshalJSON reads a GPU. If this version does not know the GPU's kind, the GPU is not
// Available, even if the object has that condition.
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

// MIG describes the MIG devices of a GPU. A placement is written as in a device ID: "3g.40gb@4", or
// "1c.3g.40gb@4.1" for a compute instance that shares its GPU instance. In an [Offer] it is written
// without the profile: "4" or "4.1".
type MIG struct {
	// Card is the name of the GPU's kind in Status.Cards. Empty if it is not known.
	Card string `json:"card,omitempty" max:"256"`
	// OnDemand is true if instances are created for the pods that ask for them. Placements on offer
	// can then overlap.
	OnDemand bool `json:"onDemand,omitempty"`
	// Largest is the profile with the most memory slices that may be given out now. Empty if there
	// is none.
	Largest string `json:"largest,omitempty" max:"63"`
	// Offers are the profiles on offer, sorted by name.
	Offers []Offer `json:"offers,omitempty" max:"64"`
	// Used are the held placements. Blocked are other instances that take up memory slices and
	// stay: those that the agent did not create, and those that are leaving. Warm are idle
	// instances that go if their room is wanted. All are sorted by place.
	Used    []string `json:"used,omitempty" max:"512" each:"64"`
	Blocked []string `json:"blocked,omitempty" max:"512" each:"64"`
	Warm    []string `json:"warm,omitempty" max:"512" each:"64"`
}

// Spot is what spot pods can have of a GPU: the room that no guaranteed pod has.
type Spot struct {
	// Resource is the full name of the resource that they ask for. Empty for MIG devices, whose Offers have it.
	Resource string `json:"resource,omitempty" max:"316"`
	// Total is the most devices that they can have at once, if no guaranteed pod has any. 0 for MIG devices.
	Total int `json:"total" max:"16777216"`
	// Used has the numbers of the devices that they have, and UsedPlacements their MIG devices, sorted by
	// place. What a spot pod is to give back is in neither.
	Used           piece.Set `json:"used,omitempty" max:"30000"`
	UsedPlacements []string  `json:"usedPlacements,omitempty" max:"512" each:"64"`
	// Yielding has the numbers of the devices that spot pods are to give back, or have given back: their containers
	// are parked, or do not start. YieldingPlacements are such MIG devices, sorted by place. Guaranteed pods can be
	// given these without that a spot pod loses more. No other spot pod can: they are the same pods' again once no
	// guaranteed pod wants them.
	Yielding           piece.Set `json:"yielding,omitempty" max:"30000"`
	YieldingPlacements []string  `json:"yieldingPlacements,omitempty" max:"512" each:"64"`
	// Lent has the numbers of devices that guaranteed pods have and lend: spot pods can be given these, too.
	// LentPlacements are such MIG devices, sorted by place; a spot pod can be given these as they are.
	Lent           piece.Set `json:"lent,omitempty" max:"30000"`
	LentPlacements []string  `json:"lentPlacements,omitempty" max:"512" each:"64"`
	// Free is the number of devices that may be given to spot pods now, and Largest how many of these one
	// container can get. Both are 0 for MIG devices.
	Free    int `json:"free" max:"16777216"`
	Largest int `json:"largest" max:"16777216"`
	// Offers are the profiles on offer to them, sorted by name.
	Offers []Offer `json:"offers,omitempty" max:"64"`
}

// Offer is what a GPU offers of a MIG profile.
type Offer struct {
	Profile string `json:"profile" max:"63"`
	// Resource is the full name of its resource. Empty through DRA.
	Resource string `json:"resource,omitempty" max:"316"`
	// Placements are all that the GPU offers. Free are those that may be given out now; of
	// overlapping ones only one can be. Both are sorted by place.
	Placements []string `json:"placements" max:"512" each:"64"`
	Free       []string `json:"free,omitempty" max:"512" each:"64"`
	// Largest is how many can be given out together.
	Largest int `json:"largest" max:"512"`
}

// Holder is a container that has a part of a GPU.
type Holder struct {
	// Namespace, Pod and Container are empty if the kubelet has not named the holder yet.
	Namespace string `json:"namespace,omitempty" max:"63"`
	Pod       string `json:"pod,omitempty" max:"253"`
	Container string `json:"container,omitempty" max:"63"`
	// Resource is the name that the container asked for.
	Resource string `json:"resource,omitempty" max:"316"`
	// Devices are the numbers of its devices, as in GPU.Used. Placements are its MIG devices.
	Devices    piece.Set `json:"devices,omitempty" max:"30000"`
	Placements []string  `json:"placements,omitempty" max:"512" each:"64"`
	// ComputePercent is its share of the GPU's multiprocessors, in percent; 0 if it has none of its own.
	ComputePercent int `json:"computePercent,omitempty" max:"100"`
}

// Through is GPU.Compute of a GPU whose containers have shares of its multiprocessors through MPS.
const Through = "mps"

// Of returns what the GPU has of a resource, in either tier, if all of it is free: its devices, or the placements of a
// MIG profile. ok is false if it does not offer the resource.
func (g *GPU) Of(resource string) (total int, placements []string, ok bool) {
	offers := []Offer(nil)
	if g.MIG != nil {
		offers = g.MIG.Offers
	}
	switch {
	case resource == "":
		return 0, nil, false
	case g.Resource == resource:
		return g.Total, nil, true
	case g.Spot != nil && g.Spot.Resource == resource:
		return g.Spot.Total, nil, true
	case g.Spot != nil:
		offers = slices.Concat(offers, g.Spot.Offers)
	}
	for _, o := range offers {
		if o.Resource == resource {
			return 0, o.Placements, true
		}
	}
	return 0, nil, false
}

// Cut shortens the messages of all conditions to brief.Text. Some of them are texts of a driver or
// an operator, and the API server accepts at most that. The admission policies have the same
// number.
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

// Condition has the JSON form of a condition of the API (metav1.Condition).
type Condition struct {
	Type    string          `json:"type" max:"316"`
	Status  ConditionStatus `json:"status" max:"7"`
	Reason  status.Reason   `json:"reason" max:"1024"`
	Message string          `json:"message" max:"32768"`
	// LastTransitionTime is when Status last changed.
	LastTransitionTime time.Time `json:"lastTransitionTime"`
}

// ConditionStatus is the status of a condition.
type ConditionStatus string

// Statuses, as in the API.
const (
	True  ConditionStatus = "True"
	False ConditionStatus = "False"
)

// Types of conditions.
const (
	// Ready is a condition of the node: the agent runs, and the object is what it offers.
	Ready = "Ready"
	// Applied is a condition of the node, which exists only while it is False: the node's partition
	// is not in force. It names no pods: any user of the API may read the object.
	Applied = "Applied"
	// Healthy is a condition of a GPU: it has no fault.
	Healthy = "Healthy"
	// Available is a condition of a GPU: what is free of it may be given out. It is False if the
	// GPU is off, unhealthy, cordoned or about to change. A full GPU is Available.
	Available = "Available"
	// Idle is a condition of a GPU, which exists only while it is True: a container holds a part of
	// it, and has had no process on it for --idle-after.
	Idle = "Idle"
)

// Is reports whether a condition exists and is True.
func Is(conditions []Condition, kind string) bool {
	return slices.ContainsFunc(conditions, func(c Condition) bool { return c.Type == kind && c.Status == True })
}
