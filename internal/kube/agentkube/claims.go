// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/pager"
	"k8s.io/utils/ptr"

	"example.com/gpu-agent/internal/amount"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// claimPage is the number of claims in one page of a list.
const claimPage = 200

// claimSpread limits the pause of Claims: it is at most the time left until ctx ends, divided by
// claimSpread.
const claimSpread = 4

// Claim is the part of a ResourceClaim that concerns one driver.
type Claim struct {
	Namespace, Name, UID string
	// Results are the devices of the driver that the scheduler gave the claim. It is empty before,
	// and after the scheduler took them back.
	Results []resourcev1.DeviceRequestAllocationResult
	// Configs are the configurations of the devices from the class and the claim, all with opaque
	// parameters, which are unchecked. Those of the class come first. A later one has precedence.
	Configs []resourcev1.DeviceAllocationConfiguration
	// Pods may use the claim: status.reservedFor lists them. The claim keeps its allocation until
	// they all have ended or are gone.
	Pods []workload.Pod
	// Others are the other entries of status.reservedFor, such as a PodGroup, whose pods may use
	// the claim. They also keep the allocation. Which pods they have is not known.
	Others []resourcev1.ResourceClaimConsumerReference
	// Told is true if the claim's status describes each of the driver's devices: see
	// SetClaimDevices.
	Told bool
}

// HasConsumers reports whether the claim is reserved for a pod or another object.
func (c *Claim) HasConsumers() bool { return len(c.Pods)+len(c.Others) > 0 }

// ClaimDevice is what a driver writes about a device in a claim's status.
type ClaimDevice struct {
	// Pool, Device and Share are those of a result.
	Pool, Device, Share string
	// Data is for people and programs that read the claim. It has at most 10 KiB as JSON.
	Data map[string]string
}

// Claim reads one ResourceClaim. The error wraps gpu.ErrNotFound if there is none of that name. The
// caller compares the UID to learn whether it is the same claim as before.
func (c *Client) Claim(ctx context.Context, driver, namespace, name string) (*Claim, error) {
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	object, err := c.server.API.Resource(resourceClaims).Namespace(namespace).Get(bounded, name, metav1.GetOptions{})
	var claim *Claim
	if err == nil {
		claim, err = readClaim(object, driver)
	}
	if apierrors.IsNotFound(err) {
		err = fmt.Errorf("%w: %s", gpu.ErrNotFound, errorText(err))
		c.server.Note(ctx, "get", resourceClaims.Resource, "", nil)
	} else {
		// One name for all claims: a missing right fails for all alike.
		c.server.Note(ctx, "get", resourceClaims.Resource, "", err)
	}
	if err != nil {
		return nil, fmt.Errorf("read ResourceClaim %s/%s: %w", namespace, name, err)
	}
	return claim, nil
}

// Claims returns the claims that have a device of a driver of this node, sorted by namespace and
// name. Such a device is in a pool whose name begins with the node's name and a slash. The server
// cannot select these claims, so each call reads all claims of the cluster in pages.
//
// All nodes may ask at once: when all agents start anew, or after a change of configuration for
// all. So if there is more than one page, Claims makes a random pause after the first. The pause is
// in proportion to the number of claims left, and at most a quarter of the time left until ctx
// ends. With up to 200 claims in the cluster there is no pause; with 20,000 it is up to 5 s.
func (c *Client) Claims(ctx context.Context, driver string) ([]Claim, error) {
	var claims []Claim
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
		defer cancel()
		list, err := c.server.API.Resource(resourceClaims).List(bounded, o)
		if err == nil && o.Continue == "" && list.GetContinue() != "" {
			err = c.spread(ctx, list.GetRemainingItemCount())
		}
		return list, err
	})
	pages.PageSize, pages.PageBufferSize = claimPage, 1
	err := pages.EachListItem(ctx, metav1.ListOptions{}, func(item runtime.Object) error {
		claim, err := readClaim(item.(*unstructured.Unstructured), driver)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(claim.Results, func(r resourcev1.DeviceRequestAllocationResult) bool {
			return strings.HasPrefix(r.Pool, c.options.NodeName+"/")
		}) {
			claims = append(claims, *claim)
		}
		return nil
	})
	c.server.Note(ctx, "list", resourceClaims.Resource, "", err)
	if err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	slices.SortFunc(claims, func(a, b Claim) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return claims, nil
}

// spread waits at random, so that nodes that began to list at the same moment do not stay in step.
// left is the number of claims left, or nil if the server does not tell.
func (c *Client) spread(ctx context.Context, left *int64) error {
	pages := time.Duration(1)
	if left != nil {
		pages = time.Duration(min(max(*left, 0), math.MaxInt32)/claimPage + 1)
	}
	most := pages * c.timing.claimPage
	if until, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(until)/claimSpread)
	}
	if most <= 0 {
		return nil
	}
	if !kube.Sleep(ctx, rand.N(most)) {
		return ctx.Err()
	}
	return nil
}

// readClaim reads the part of a ResourceClaim that concerns a driver.
func readClaim(o *unstructured.Unstructured, driver string) (*Claim, error) {
	var status resourcev1.ResourceClaimStatus
	err := checkAmounts(o)
	if err == nil {
		err = kube.Decode(o, "status", &status)
	}
	if err != nil {
		return nil, fmt.Errorf("read ResourceClaim %s/%s: %w", o.GetNamespace(), o.GetName(), err)
	}
	claim := &Claim{Namespace: o.GetNamespace(), Name: o.GetName(), UID: string(o.GetUID())}
	if status.Allocation != nil {
		of := &status.Allocation.Devices
		claim.Results = slices.DeleteFunc(of.Results, func(r resourcev1.DeviceRequestAllocationResult) bool {
			return r.Driver != driver
		})
		claim.Configs = slices.DeleteFunc(of.Config, func(c resourcev1.DeviceAllocationConfiguration) bool {
			return c.Opaque == nil || c.Opaque.Driver != driver
		})
	}
	// A status of a device that the claim had before tells nothing about its devices now.
	claim.Told = slices.ContainsFunc(status.Devices, func(d resourcev1.AllocatedDeviceStatus) bool {
		return d.Driver == driver
	}) && !slices.ContainsFunc(claim.Results, func(r resourcev1.DeviceRequestAllocationResult) bool {
		return !slices.ContainsFunc(status.Devices, func(d resourcev1.AllocatedDeviceStatus) bool {
			return d.Driver == r.Driver && d.Pool == r.Pool && d.Device == r.Device &&
				ptr.Deref(d.ShareID, "") == string(ptr.Deref(r.ShareID, ""))
		})
	})
	for _, user := range status.ReservedFor {
		if user.APIGroup == "" && user.Resource == kube.Pods.Resource {
			pod := workload.Pod{Namespace: claim.Namespace, Name: user.Name, UID: string(user.UID)}
			claim.Pods = append(claim.Pods, pod)
		} else {
			claim.Others = append(claim.Others, user)
		}
	}
	return claim, nil
}

// checkAmounts refuses amounts of a claim that would take long to parse. It does not check other
// fields: a tenant chooses the names in a claim, and these may look like such amounts.
func checkAmounts(o *unstructured.Unstructured) error {
	results, _, _ := unstructured.NestedFieldNoCopy(o.Object, "status", "allocation", "devices", "results")
	list, _ := results.([]any)
	for _, r := range list {
		of, _ := r.(map[string]any)
		if err := amount.Check(of["consumedCapacity"]); err != nil {
			return err
		}
	}
	return nil
}

// SetClaimDevices writes a driver's data about a claim's devices to the claim's status. It removes
// what this driver wrote before and does not write now; what other drivers wrote stays. If several
// of devices name the same device and share, the first one counts. The error wraps gpu.ErrNotFound
// if the claim is gone, or if another claim has its name now.
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
	body, err := json.Marshal(map[string]any{
		"apiVersion": resourceClaims.GroupVersion().String(), "kind": "ResourceClaim",
		"metadata": map[string]any{"namespace": claim.Namespace, "name": claim.Name, "uid": claim.UID},
		"status":   map[string]any{"devices": entries}})
	if err != nil {
		return fmt.Errorf("write the devices of ResourceClaim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	// The server removes elements that this manager applied before and does not name now. It leaves
	// those of others, even if they changed after the claim was read.
	_, err = c.server.API.Resource(resourceClaims).Namespace(claim.Namespace).Patch(bounded, claim.Name,
		types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: manager, Force: new(true)}, "status")
	failed := err
	if apierrors.IsNotFound(err) || otherObject(err) {
		err, failed = fmt.Errorf("%w: %s", gpu.ErrNotFound, errorText(err)), nil
	}
	c.server.Note(ctx, "patch", resourceClaims.Resource+"/status", "", failed)
	if err != nil {
		return fmt.Errorf("write the devices of ResourceClaim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

// otherObject reports whether err is a refusal because the object of that name has another UID.
func otherObject(err error) bool {
	var answer apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &answer) || answer.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(answer.Status().Details.Causes, func(c metav1.StatusCause) bool {
		return c.Field == "metadata.uid"
	})
}
