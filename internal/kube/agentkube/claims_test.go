// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"

	"github.com/google/go-cmp/cmp"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// claim makes a ResourceClaim with a status.
func (s *server) claim(namespace, name, uid, status string) {
	s.T.Helper()
	var object map[string]any
	if err := json.Unmarshal(fmt.Appendf(nil, `{"metadata": {"namespace": %q, "uid": %q}, "status": %s}`, namespace, uid, status), &object); err != nil {
		s.T.Fatal(err)
	}
	s.Put("resourceclaims", namespace, name, object)
}

// claimStatus is of a claim with two devices of one driver, and one of another.
const claimStatus = `{
	"allocation": {
		"nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}]},
		"devices": {
			"results": [
				{"request": "net", "driver": "nic.example.org", "pool": "node-1", "device": "eth0"},
				{"request": "mem", "driver": "gpus.example.com", "pool": "node-1/a100", "device": "gpu-1-shared", "shareID": "s-1", "consumedCapacity": {"memory": "24Gi"}},
				{"request": "any/mig", "driver": "gpus.example.com", "pool": "node-1/a100", "device": "gpu-2-mig-1g10gb-0", "adminAccess": true}],
			"config": [
				{"source": "FromClass", "requests": [], "opaque": {"driver": "gpus.example.com", "parameters": {"apiVersion": "v1", "kind": "A"}}},
				{"source": "FromClaim", "opaque": {"driver": "nic.example.org", "parameters": {"apiVersion": "v1", "kind": "B"}}},
				{"source": "FromClaim", "requests": ["mem"], "opaque": {"driver": "gpus.example.com", "parameters": {"apiVersion": "v1", "kind": "C"}}}]}},
	"reservedFor": [
		{"resource": "pods", "name": "job-1", "uid": "p-1"},
		{"apiGroup": "scheduling.example.org", "resource": "pods", "name": "group", "uid": "g-1"},
		{"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "gang", "uid": "g-2"}]}`

// configured is the driver's configuration.
func configured(parameters string) resourcev1.DeviceConfiguration {
	return resourcev1.DeviceConfiguration{Opaque: &resourcev1.OpaqueDeviceConfiguration{
		Driver: "gpus.example.com", Parameters: runtime.RawExtension{Raw: []byte(parameters)}}}
}

// A driver is told its own results and configurations, and whom the claim is reserved for.
func TestClaim(t *testing.T) {
	s := newServer(t)
	s.claim("train", "c", "u-1", claimStatus)
	c, _ := connect(t, s)
	got, err := c.Claim(t.Context(), "gpus.example.com", "train", "c")
	if err != nil {
		t.Fatal(err)
	}
	want := &Claim{Namespace: "train", Name: "c", UID: "u-1",
		Results: []resourcev1.DeviceRequestAllocationResult{
			{Request: "mem", Driver: "gpus.example.com", Pool: "node-1/a100", Device: "gpu-1-shared",
				ShareID:          new(types.UID("s-1")),
				ConsumedCapacity: map[resourcev1.QualifiedName]resource.Quantity{"memory": resource.MustParse("24Gi")}},
			{Request: "any/mig", Driver: "gpus.example.com", Pool: "node-1/a100", Device: "gpu-2-mig-1g10gb-0",
				AdminAccess: new(true)}},
		Configs: []resourcev1.DeviceAllocationConfiguration{
			{Source: "FromClass", Requests: []string{}, DeviceConfiguration: configured(`{"apiVersion":"v1","kind":"A"}`)},
			{Source: "FromClaim", Requests: []string{"mem"}, DeviceConfiguration: configured(`{"apiVersion":"v1","kind":"C"}`)}},
		Pods: []workload.Pod{{Namespace: "train", Name: "job-1", UID: "p-1"}},
		Others: []resourcev1.ResourceClaimConsumerReference{
			{APIGroup: "scheduling.example.org", Resource: "pods", Name: "group", UID: "g-1"},
			{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "gang", UID: "g-2"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("- want, + got:\n%s", diff)
	}
	for said, told := range map[string]bool{
		`{"driver": "gpus.example.com", "pool": "node-1/a100", "device": "gpu-1", "shareID": "s"}`: true,
		`{"driver": "nics.example.com", "pool": "node-1/a100", "device": "gpu-1", "shareID": "s"}`: false,
		`{"driver": "gpus.example.com", "pool": "node-1/a100", "device": "gpu-0", "shareID": "s"}`: false, // that it had before
		`{"driver": "gpus.example.com", "pool": "node-1/a100", "device": "gpu-1"}`:                 false,
	} {
		s.claim("train", "told", "u-4", `{"allocation": {"devices": {"results": [{"driver": "gpus.example.com", "pool": "node-1/a100", "device": "gpu-1", "shareID": "s"}]}}, "devices": [`+said+`]}`)
		if got, err := c.Claim(t.Context(), "gpus.example.com", "train", "told"); err != nil || got.Told != told {
			t.Errorf("%s: %+v, %v", said, got, err)
		}
	}
	s.claim("train", "new", "u-2", `{}`)
	if got, err := c.Claim(t.Context(), "gpus.example.com", "train", "new"); err != nil || len(got.Results) > 0 {
		t.Errorf("a claim without an allocation: %+v, %v", got, err)
	}
	if _, err := c.Claim(t.Context(), "gpus.example.com", "train", "none"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("a claim that is not there: %v", err)
	}
	s.claim("train", "odd", "u-3", `{"allocation": {"devices": {"results": [{"driver": "gpus.example.com", "consumedCapacity": {"memory": "much"}}]}}}`)
	if _, err := c.Claim(t.Context(), "gpus.example.com", "train", "odd"); err == nil || !strings.Contains(err.Error(), "train/odd") {
		t.Errorf("a claim with an amount that is none: %v", err)
	}
	// A request that reads like an amount which takes seconds to parse is a name all the same.
	s.claim("train", "named", "u-5", `{"allocation": {"devices": {"results": [{"request": "1e123456", "driver": "gpus.example.com"}]}}}`)
	if got, err := c.Claim(t.Context(), "gpus.example.com", "train", "named"); err != nil || got.Results[0].Request != "1e123456" {
		t.Errorf("a claim whose request has an odd name: %+v, %v", got, err)
	}
}

// Claims of other nodes, also of one whose name begins alike, and of other drivers are
// left out, on whatever page they are.
func TestClaims(t *testing.T) {
	s := newServer(t)
	status := func(driver, pool string) string {
		return fmt.Sprintf(`{"allocation": {"devices": {"results": [{"driver": %q, "pool": %q, "device": "d"}]}}}`, driver, pool)
	}
	for i := range 2*claimPage + 1 {
		s.claim("other", fmt.Sprintf("c-%03d", i), "u", status("gpus.example.com", "node-2/a100"))
	}
	s.claim("a", "ours", "u-1", status("gpus.example.com", "node-1/a100"))
	s.claim("z", "ours", "u-2", status("gpus.example.com", "node-1/h100"))
	s.claim("z", "alike", "u-3", status("gpus.example.com", "node-10/a100"))
	s.claim("z", "nic", "u-4", status("nic.example.org", "node-1/a100"))
	s.claim("z", "new", "u-5", `{}`)
	c, _ := connect(t, s)
	list, err := c.Claims(t.Context(), "gpus.example.com")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, claim := range list {
		got = append(got, claim.UID)
	}
	if fmt.Sprint(got) != "[u-1 u-2]" {
		t.Errorf("%v, want u-1 and u-2", got)
	}
	if n := len(s.Asked("list resourceclaims")); n != 3 {
		t.Errorf("%d requests, want one a page", n)
	}
	s.Stop()
	if list, err := c.Claims(t.Context(), "gpus.example.com"); err == nil {
		t.Errorf("without a server there are %d claims", len(list))
	}
}

// Nodes that list at the same moment do not go on doing so: where there is more than a page, each
// pauses at random before the rest.
func TestClaimsOfManyNodes(t *testing.T) {
	s := newServer(t)
	for i := range claimPage + 1 {
		s.claim("other", fmt.Sprintf("c-%03d", i), "u", `{}`)
	}
	c, _ := connect(t, s)
	c.timing.claimPage = 1000 * time.Hour
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { _, err := c.Claims(ctx, "gpus.example.com"); done <- err }()
	for len(s.Asked("list resourceclaims")) == 0 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) || len(s.Asked("list resourceclaims")) != 1 {
		t.Errorf("%v after %d requests", err, len(s.Asked("list resourceclaims")))
	}
}

// The pause is in proportion to what is left, and a quarter of what the caller has at most.
func TestClaimsPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Client{apiServer: &apiServer{timing: timing{claimPage: 50 * time.Millisecond}}}
		for _, of := range []struct {
			left     *int64
			patience time.Duration
			most     time.Duration
		}{
			{new(int64(19_800)), 0, 5 * time.Second},
			{new(int64(300)), 0, 100 * time.Millisecond},
			{nil, 0, 50 * time.Millisecond},
			{new(int64(1 << 62)), 10 * time.Second, 2500 * time.Millisecond},
			{new(int64(-1)), time.Second, 50 * time.Millisecond},
		} {
			var longest time.Duration
			for range 200 {
				ctx, cancel := t.Context(), context.CancelFunc(func() {})
				if of.patience > 0 {
					ctx, cancel = context.WithTimeout(ctx, of.patience)
				}
				began := time.Now()
				if err := c.spread(ctx, of.left); err != nil {
					t.Error(err)
				}
				longest = max(longest, time.Since(began))
				cancel()
			}
			if longest > of.most || longest < of.most*8/10 {
				t.Errorf("%+v: up to %s", of, longest)
			}
		}
		ended, cancel := context.WithTimeout(t.Context(), time.Second)
		time.Sleep(2 * time.Second)
		defer cancel()
		if err := c.spread(ended, nil); err != nil {
			t.Errorf("the next page says so: %v", err)
		}
	})
}

// What is written names the claim by its UID, so that one that has its name by now is
// left alone.
func TestSetClaimDevices(t *testing.T) {
	s := newServer(t)
	s.claim("train", "c", "u-1", claimStatus)
	c, log := connect(t, s)
	claim := &Claim{Namespace: "train", Name: "c", UID: "u-1"}
	data := map[string]string{"cap": "24Gi", "guarantee": "api"}
	err := c.SetClaimDevices(t.Context(), "gpus.example.com", claim, []ClaimDevice{
		{Pool: "p", Device: "gpu-1-shared", Share: "s-1", Data: data}, {Pool: "p", Device: "gpu-2"}, {Pool: "p", Device: "gpu-2", Data: data}})
	if err != nil {
		t.Fatal(err)
	}
	got, _ := json.Marshal(s.All("resourceclaims")[0]["status"].(map[string]any)["devices"])
	if want := `[{"data":{"cap":"24Gi","guarantee":"api"},"device":"gpu-1-shared","driver":"gpus.example.com","pool":"p","shareID":"s-1"},` +
		`{"device":"gpu-2","driver":"gpus.example.com","pool":"p"}]`; string(got) != want {
		t.Errorf("wrote\n%s, want\n%s", got, want)
	}
	for name, gone := range map[string]*Claim{
		"replaced": {Namespace: "train", Name: "c", UID: "u-0"},
		"deleted":  {Namespace: "train", Name: "d", UID: "u-1"},
	} {
		if err := c.SetClaimDevices(t.Context(), "gpus.example.com", gone, nil); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("a claim that was %s: %v", name, err)
		}
	}
	if log.Count("API server request fails") > 0 {
		t.Error("a claim that is gone is taken for a fault of the API server")
	}
}
