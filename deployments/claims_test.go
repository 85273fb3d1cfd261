// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/pkg/gpu"
)

// claimsAtTheAPIServer has the agent read claims and write their status with the rights
// that component dra gives it.
func claimsAtTheAPIServer(t *testing.T, s *apiServer) {
	const driver, other = "gpus.example.com", "nic.example.org"
	s.namespace(t, "claims")
	const all = "/apis/resource.k8s.io/v1/namespaces/claims/resourceclaims"
	for _, o := range resources(t, "components/dra") {
		if o.Kind != "DeviceClass" { // which gives no right
			s.apply(t, o, false)
		}
	}
	// What the scheduler writes for a claim of both drivers.
	allocate := func(name, node string) {
		t.Helper()
		request := func(name string) fields { return fields{"name": name, "exactly": fields{"deviceClassName": "any"}} }
		s.create(t, all, fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": fields{"name": name},
			"spec": fields{"devices": fields{"requests": []fields{request("gpu"), request("mem"), request("net")}}}})
		body := fields{"status": fields{
			"reservedFor": []fields{{"resource": "pods", "name": "job-1", "uid": "p-1"}},
			"allocation": fields{
				"nodeSelector": fields{"nodeSelectorTerms": []fields{{"matchFields": []fields{{"key": "metadata.name", "operator": "In", "values": []string{node}}}}}},
				"devices": fields{"results": []fields{
					{"request": "gpu", "driver": driver, "pool": node + "/a100", "device": "gpu-1"},
					{"request": "mem", "driver": driver, "pool": node + "/a100", "device": "gpu-2-shared", "shareID": "5e2f1a52-0000-4000-8000-000000000000",
						"consumedCapacity": fields{"memory": "24Gi"}},
					{"request": "net", "driver": other, "pool": node, "device": "eth0"}}}},
			"devices": []fields{{"driver": other, "pool": node, "device": "eth0", "data": fields{"of": "others"}}}}}
		if err := s.do(t, nil, http.MethodPatch, all+"/"+name+"/status", merge, body, nil); err != nil {
			t.Fatal(err)
		}
	}
	allocate("here", "node-1")
	allocate("there", "node-2")
	client := s.agentClient(t)
	s.await(t, "the agent may list claims", func() error {
		list, err := client.Claims(t.Context(), driver)
		if err == nil && (len(list) != 1 || list[0].Name != "here") {
			t.Fatalf("claims of this node: %+v", list)
		}
		return err
	})
	claim, err := client.Claim(t.Context(), driver, "claims", "here")
	if err != nil {
		t.Fatal(err)
	}
	if r := claim.Results; len(r) != 2 || len(claim.Pods) != 1 || claim.Pods[0].UID != "p-1" {
		t.Fatalf("the claim says %+v", claim)
	}
	has, id := claim.Results[1].ConsumedCapacity["memory"], claim.Results[1].ShareID
	if has.Value() != 24<<30 || id == nil || *id == "" {
		t.Fatalf("the claim says %+v", claim)
	}
	if _, err := client.Claim(t.Context(), driver, "claims", "none"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("a claim that is not there: %v", err)
	}

	whole := agentkube.ClaimDevice{Pool: "node-1/a100", Device: "gpu-1"}
	share := agentkube.ClaimDevice{Pool: "node-1/a100", Device: "gpu-2-shared", Share: string(*id), Data: map[string]string{"cap": "24Gi", "guarantee": "api"}}
	status := func() (out []string) {
		t.Helper()
		var o struct {
			Status struct {
				Devices []struct {
					Device string
					Data   map[string]string
				}
			}
		}
		if err := s.do(t, nil, http.MethodGet, all+"/here", "", nil, &o); err != nil {
			t.Fatal(err)
		}
		for _, d := range o.Status.Devices {
			out = append(out, fmt.Sprint(d.Device, d.Data))
		}
		slices.Sort(out)
		return out
	}
	for _, step := range []struct {
		devices []agentkube.ClaimDevice
		want    string
	}{
		{[]agentkube.ClaimDevice{whole, share}, "[eth0map[of:others] gpu-1map[] gpu-2-sharedmap[cap:24Gi guarantee:api]]"},
		{[]agentkube.ClaimDevice{share}, "[eth0map[of:others] gpu-2-sharedmap[cap:24Gi guarantee:api]]"},
		{[]agentkube.ClaimDevice{{Pool: share.Pool, Device: share.Device, Share: share.Share, Data: map[string]string{"cap": "12Gi"}}}, "[eth0map[of:others] gpu-2-sharedmap[cap:12Gi]]"},
		{nil, "[eth0map[of:others]]"},
	} {
		if err := client.SetClaimDevices(t.Context(), driver, claim, step.devices); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(status()); got != step.want {
			t.Errorf("the claim's devices are\n%s, want\n%s", got, step.want)
		}
	}
	replaced := *claim
	replaced.UID = "0aa7d4f1-0000-4000-8000-000000000000"
	if err := client.SetClaimDevices(t.Context(), driver, &replaced, []agentkube.ClaimDevice{whole}); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("a claim of another UID: %v", err)
	}

	entry := func(driver, pool, device string) fields {
		return fields{"status": fields{"devices": []fields{{"driver": driver, "pool": pool, "device": device, "data": fields{"of": "a thief"}}}}}
	}
	for what, try := range map[string]struct {
		node, claim, kind string
		body              fields
	}{
		"a claim of another node":      {"node-1", "there", "driver", entry(driver, "node-2/a100", "gpu-1")},
		"by the agent of another node": {"node-2", "here", "driver", entry(driver, "node-1/a100", "gpu-1")},
		"what another driver says":     {"node-1", "here", "driver", entry(other, "node-1", "eth0")},
		"the allocation":               {"node-1", "here", "binding", fields{"status": fields{"allocation": nil}}},
		"who may use it":               {"node-1", "here", "binding", fields{"status": fields{"reservedFor": nil}}},
	} {
		err := s.do(t, agentOn(try.node), http.MethodPatch, all+"/"+try.claim+"/status", merge, try.body, nil)
		if err == nil || !strings.Contains(err.Error(), "resourceclaims/"+try.kind) {
			t.Errorf("%s: %v, want a refusal that names resourceclaims/%s", what, err, try.kind)
		}
	}
	if err := s.do(t, nil, http.MethodDelete, all+"/here", "", nil, nil); err != nil {
		t.Fatal(err)
	}
}
