// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

const claimsPath = "/apis/resource.k8s.io/v1/namespaces/" + PodNamespace + "/resourceclaims"

// Claim is a ResourceClaim of one device.
type Claim struct {
	Name string
	// Class is a DeviceClass, such as "gpu.example.com".
	Class string
	// GiB is how much of the device's memory it has; 0 asks for no amount.
	GiB int
}

// CreateClaim makes a claim, which pods can name in the Claims of a Container.
func (n *Node) CreateClaim(ctx context.Context, c Claim) error {
	request := object{"deviceClassName": c.Class}
	if c.GiB > 0 {
		request["capacity"] = object{"requests": object{"memory": fmt.Sprintf("%dGi", c.GiB)}}
	}
	o := object{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": object{"name": c.Name},
		"spec": object{"devices": object{"requests": []object{{"name": "gpu", "exactly": request}}}}}
	if err := n.api.create(ctx, claimsPath, o); err != nil {
		return fmt.Errorf("make claim %s: %w", c.Name, err)
	}
	return nil
}

// Allocated are the devices that the API server says a claim has, by name; there are none where it is
// not allocated.
func (n *Node) Allocated(ctx context.Context, claim string) (devices []string, err error) {
	var o struct {
		Status struct {
			Allocation *struct {
				Devices struct{ Results []struct{ Device string } }
			}
		}
	}
	if err := n.api.get(ctx, claimsPath+"/"+claim, &o); err != nil {
		return nil, fmt.Errorf("read claim %s: %w", claim, err)
	}
	if o.Status.Allocation != nil {
		for _, r := range o.Status.Allocation.Devices.Results {
			devices = append(devices, r.Device)
		}
	}
	return devices, nil
}

// DeleteClaims deletes the claims, of which no pod may be left.
func (n *Node) DeleteClaims(ctx context.Context) error {
	if err := n.api.do(ctx, http.MethodDelete, claimsPath, "", nil, nil); err != nil {
		return fmt.Errorf("delete all claims: %w", err)
	}
	return nil
}

// Slice is a ResourceSlice of the node with devices.
type Slice struct {
	Name, UID string
	Devices   []SliceDevice
}

// SliceDevice is a device as the scheduler is told of it.
type SliceDevice struct {
	Name string
	// GPU is the index of the GPU that it is of.
	GPU int
	// Taints are "key=value:effect".
	Taints []string
}

const slicesPath = "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver%3D"

// Slices are what a driver publishes of devices, in the order of their names.
func (n *Node) Slices(ctx context.Context, driver string) ([]Slice, error) {
	var list struct {
		Items []struct {
			Metadata struct{ Name, UID string }
			Spec     struct {
				Devices []struct {
					Name       string
					Attributes map[string]struct{ Int int }
					Taints     []struct{ Key, Value, Effect string }
				}
			}
		}
	}
	if err := n.api.get(ctx, slicesPath+driver, &list); err != nil {
		return nil, fmt.Errorf("list the slices of %s: %w", driver, err)
	}
	var out []Slice
	for _, o := range list.Items {
		if len(o.Spec.Devices) == 0 {
			continue
		}
		s := Slice{Name: o.Metadata.Name, UID: o.Metadata.UID}
		for _, d := range o.Spec.Devices {
			device := SliceDevice{Name: d.Name, GPU: d.Attributes["index"].Int}
			for _, t := range d.Taints {
				device.Taints = append(device.Taints, t.Key+"="+t.Value+":"+t.Effect)
			}
			s.Devices = append(s.Devices, device)
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b Slice) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// DeleteSlices deletes all slices of a driver, as a kubelet does when it starts.
func (n *Node) DeleteSlices(ctx context.Context, driver string) error {
	if err := n.api.do(ctx, http.MethodDelete, slicesPath+driver, "", nil, nil); err != nil {
		return fmt.Errorf("delete the slices of %s: %w", driver, err)
	}
	return nil
}
