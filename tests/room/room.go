// SPDX-License-Identifier: Apache-2.0

package room

import (
	"context"
	"fmt"

	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Get reads an object of the API server by its path.
type Get func(path string, into any) error

// World is what the API server had at one moment.
type World struct {
	// Claims are all that there are.
	Claims []resource.ResourceClaim
	// Slices are those of all drivers.
	Slices  []*resource.ResourceSlice
	classes Classes
	taken   structured.AllocatedState
}

// Classes are DeviceClasses by name, as the scheduler's allocator asks for them.
type Classes map[string]*resource.DeviceClass

// List returns all of them.
func (c Classes) List() (out []*resource.DeviceClass, err error) {
	for _, of := range c {
		out = append(out, of)
	}
	return out, nil
}

// Get returns one; it fails where there is none of that name.
func (c Classes) Get(name string) (*resource.DeviceClass, error) {
	if of := c[name]; of != nil {
		return of, nil
	}
	return nil, fmt.Errorf("no class %q", name)
}

// features are those that are on by default in Kubernetes 1.36.
var features = structured.Features{ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true}

var expressions = cel.NewCache(100, cel.Features{EnableConsumableCapacity: true})

// Look reads what there is and who has it.
func Look(get Get) (*World, error) {
	const path = "/apis/resource.k8s.io/v1/"
	var claims resource.ResourceClaimList
	var list resource.ResourceSliceList
	var known resource.DeviceClassList
	// The claims last: one that is allocated meanwhile takes room, and is seen to.
	for _, of := range []struct {
		name string
		into any
	}{{"deviceclasses", &known}, {"resourceslices", &list}, {"resourceclaims", &claims}} {
		if err := get(path+of.name, of.into); err != nil {
			return nil, fmt.Errorf("list %s: %w", of.name, err)
		}
	}
	w := &World{Claims: claims.Items, classes: Classes{}, taken: structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection()}}
	for i := range known.Items {
		w.classes[known.Items[i].Name] = &known.Items[i]
	}
	for i := range list.Items {
		w.Slices = append(w.Slices, &list.Items[i])
	}
	for i := range claims.Items {
		if a := claims.Items[i].Status.Allocation; a != nil {
			for j := range a.Devices.Results {
				w.take(&a.Devices.Results[j])
			}
		}
	}
	return w, nil
}

// Taints counts what keeps claims off devices, by the taints' keys and values.
func (w *World) Taints() map[string]int {
	out := map[string]int{}
	for _, s := range w.Slices {
		for _, d := range s.Spec.Devices {
			for _, t := range d.Taints {
				out[t.Key+"="+t.Value]++
			}
		}
	}
	return out
}

// take counts a device as given out.
func (w *World) take(r *resource.DeviceRequestAllocationResult) {
	id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
	switch {
	case r.AdminAccess != nil && *r.AdminAccess:
	case r.ShareID != nil:
		w.taken.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
		w.taken.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
	default:
		w.taken.AllocatedDevices.Insert(id)
	}
}

// Request asks for so many devices of a class, as the scheduler does for a resource's name.
func Request(class string, count int) resource.DeviceClaim {
	return resource.DeviceClaim{Requests: []resource.DeviceRequest{{Name: "r", Exactly: &resource.ExactDeviceRequest{
		DeviceClassName: class, AllocationMode: resource.DeviceAllocationModeExactCount, Count: int64(count)}}}}
}

// For returns the devices that a pod of these claims would have on a node, none where it
// finds no room there.
func (w *World) For(ctx context.Context, node string, of ...resource.DeviceClaim) (devices []string, err error) {
	a, err := structured.NewAllocator(ctx, features, w.taken, w.classes, w.Slices, expressions)
	if err != nil {
		return nil, err
	}
	var asked []*resource.ResourceClaim
	for i := range of {
		for j := range of[i].Requests {
			// What the API server fills in.
			if r := of[i].Requests[j].Exactly; r != nil && r.AllocationMode == "" {
				r.AllocationMode, r.Count = resource.DeviceAllocationModeExactCount, 1
			}
		}
		name := fmt.Sprintf("c-%d", i)
		asked = append(asked, &resource.ResourceClaim{ObjectMeta: meta.ObjectMeta{Namespace: "room", Name: name, UID: types.UID(name)},
			Spec: resource.ResourceClaimSpec{Devices: of[i]}})
	}
	got, err := a.Allocate(ctx, &core.Node{ObjectMeta: meta.ObjectMeta{Name: node}}, asked)
	for i := range got {
		for _, r := range got[i].Devices.Results {
			devices = append(devices, r.Device)
		}
	}
	return devices, err
}
