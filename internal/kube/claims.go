// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/pager"

	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// claimPage is how many claims are asked for at a time.
const claimPage = 200

// Claim is what a ResourceClaim says to one driver. What it says to others is left out.
type Claim struct {
	Namespace, Name, UID string
	// Deleting says that somebody has deleted it. It stays while pods use it.
	Deleting bool
	// Results are the devices that the scheduler gave it; none before, and after it took
	// them back.
	Results []Result
	// Configs are what class and claim say of the devices. The class's come first; a
	// later one has precedence.
	Configs []ClaimConfig
	// Pods are those that may use the claim.
	Pods []workload.Pod
	// Told says that the driver has said in the claim what its devices are: see
	// SetClaimDevices.
	Told bool
}

// Result is a device that the scheduler gave a claim, in the words of resource.k8s.io/v1.
type Result struct {
	// Request is the request's name; of one with alternatives "<request>/<alternative>".
	Request string `json:"request"`
	Driver  string `json:"driver"`
	Pool    string `json:"pool"`
	Device  string `json:"device"`
	// Share tells what several claims have of one device; empty for a device that one
	// claim has alone.
	Share string `json:"shareID"`
	// Capacity is what the claim has of a shared device, by name.
	Capacity map[string]Quantity `json:"consumedCapacity"`
	// Admin says that the claim is to have access to the device whoever else has it.
	Admin bool `json:"adminAccess"`
}

// ClaimConfig is an opaque configuration for a driver.
type ClaimConfig struct {
	// Requests are the names of those that it is for; none means all. The name of a
	// request with alternatives means each of these.
	Requests []string
	// Parameters are an object with apiVersion and kind, unchecked.
	Parameters json.RawMessage
	// FromClass says that the DeviceClass has it, which an administrator wrote, not the claim.
	FromClass bool
}

// ClaimDevice is what a driver says of a device of a claim.
type ClaimDevice struct {
	// Pool, Device and Share are those of a Result.
	Pool, Device, Share string
	// Data is for people and programs that read the claim; at most 10 KiB as JSON.
	Data map[string]string
}

// claimObject is what is read of a ResourceClaim.
type claimObject struct {
	Status struct {
		Allocation struct {
			Devices struct {
				Results []Result
				Config  []struct {
					Source   string
					Requests []string
					Opaque   struct {
						Driver     string
						Parameters json.RawMessage
					}
				}
			}
		}
		ReservedFor []struct{ APIGroup, Resource, Name, UID string }
		Devices     []struct{ Driver string }
	}
}

// Claim reads one ResourceClaim. The error wraps gpu.ErrNotFound where there is none of
// that name; whether it is the same as before says its UID.
func (c *Client) Claim(ctx context.Context, driver, namespace, name string) (*Claim, error) {
	bounded, cancel := context.WithTimeout(ctx, c.timing.request)
	defer cancel()
	object, err := c.api.Resource(resourceClaims).Namespace(namespace).Get(bounded, name, metav1.GetOptions{})
	var claim *Claim
	if err == nil {
		claim, err = readClaim(object, driver)
	}
	if apierrors.IsNotFound(err) {
		err = fmt.Errorf("%w: %s", gpu.ErrNotFound, words(err))
		c.note(ctx, "get", resourceClaims.Resource, "", nil)
	} else {
		// One name for all claims: what fails, a missing right, fails for all alike.
		c.note(ctx, "get", resourceClaims.Resource, "", err)
	}
	if err != nil {
		return nil, fmt.Errorf("read ResourceClaim %s/%s: %w", namespace, name, err)
	}
	return claim, nil
}

// Claims reads the claims that have a device of a driver of this node: of a pool whose
// name begins with the node's and a slash. The server cannot select them, so each call
// reads all claims of the cluster, a page at a time. They are sorted by namespace and name.
func (c *Client) Claims(ctx context.Context, driver string) ([]Claim, error) {
	var claims []Claim
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		bounded, cancel := context.WithTimeout(ctx, c.timing.request)
		defer cancel()
		return c.api.Resource(resourceClaims).List(bounded, o)
	})
	pages.PageSize, pages.PageBufferSize = claimPage, 1
	err := pages.EachListItem(ctx, metav1.ListOptions{}, func(item runtime.Object) error {
		claim, err := readClaim(item.(*unstructured.Unstructured), driver)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(claim.Results, func(r Result) bool { return strings.HasPrefix(r.Pool, c.options.NodeName+"/") }) {
			claims = append(claims, *claim)
		}
		return nil
	})
	c.note(ctx, "list", resourceClaims.Resource, "", err)
	if err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	slices.SortFunc(claims, func(a, b Claim) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return claims, nil
}

// readClaim reads what a ResourceClaim says to a driver.
func readClaim(o *unstructured.Unstructured, driver string) (*Claim, error) {
	data, err := o.MarshalJSON()
	if err != nil {
		return nil, err
	}
	var object claimObject
	if err := json.Unmarshal(data, &object); err != nil {
		return nil, fmt.Errorf("read ResourceClaim %s/%s: %w", o.GetNamespace(), o.GetName(), err)
	}
	claim := &Claim{Namespace: o.GetNamespace(), Name: o.GetName(), UID: string(o.GetUID()), Deleting: o.GetDeletionTimestamp() != nil}
	for _, r := range object.Status.Allocation.Devices.Results {
		if r.Driver == driver {
			claim.Results = append(claim.Results, r)
		}
	}
	for _, config := range object.Status.Allocation.Devices.Config {
		if config.Opaque.Driver == driver {
			claim.Configs = append(claim.Configs, ClaimConfig{Requests: config.Requests, Parameters: config.Opaque.Parameters, FromClass: config.Source == "FromClass"})
		}
	}
	for _, d := range object.Status.Devices {
		claim.Told = claim.Told || d.Driver == driver
	}
	for _, user := range object.Status.ReservedFor {
		if user.APIGroup == "" && user.Resource == pods.Resource {
			claim.Pods = append(claim.Pods, workload.Pod{Namespace: claim.Namespace, Name: user.Name, UID: user.UID})
		}
	}
	return claim, nil
}

// SetClaimDevices writes what a driver says of the devices of a claim, in its status;
// what it said before and does not say now goes, and what other drivers say stays. Of
// several that name the same device and share the first counts. The error wraps
// gpu.ErrNotFound where the claim is gone or another has its name by now.
func (c *Client) SetClaimDevices(ctx context.Context, driver string, claim *Claim, devices []ClaimDevice) error {
	type key struct{ pool, device, share string }
	seen := map[key]bool{}
	entries := []any{}
	for _, d := range devices {
		if k := (key{d.Pool, d.Device, d.Share}); seen[k] {
			continue
		} else {
			seen[k] = true
		}
		entry := map[string]any{"driver": driver, "pool": d.Pool, "device": d.Device}
		if d.Share != "" {
			entry["shareID"] = d.Share
		}
		if d.Data != nil {
			entry["data"] = d.Data
		}
		entries = append(entries, entry)
	}
	body, err := json.Marshal(map[string]any{"apiVersion": resourceClaims.GroupVersion().String(), "kind": "ResourceClaim",
		"metadata": map[string]any{"namespace": claim.Namespace, "name": claim.Name, "uid": claim.UID},
		"status":   map[string]any{"devices": entries}})
	if err != nil {
		return fmt.Errorf("write the devices of ResourceClaim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	bounded, cancel := context.WithTimeout(ctx, c.timing.request)
	defer cancel()
	// Elements that this manager applied before and does not name are removed, and
	// nobody else's, whatever has changed since the claim was read.
	force := true
	_, err = c.api.Resource(resourceClaims).Namespace(claim.Namespace).Patch(bounded, claim.Name, types.ApplyPatchType, body,
		metav1.PatchOptions{FieldManager: manager, Force: &force}, "status")
	failed := err
	if apierrors.IsNotFound(err) || otherObject(err) {
		err, failed = fmt.Errorf("%w: %s", gpu.ErrNotFound, words(err)), nil
	}
	c.note(ctx, "patch", resourceClaims.Resource+"/status", "", failed)
	if err != nil {
		return fmt.Errorf("write the devices of ResourceClaim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

// otherObject says whether err is a refusal since the object of that name has another UID.
func otherObject(err error) bool {
	var answer apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &answer) || answer.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(answer.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}
