// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// A cluster has a node whose GPUs are offered by the device plugin and one that offers
// the same through DRA. Pods that ask by a resource's name fill both, as they are, and
// the stock scheduler makes the claims.
func TestUnchangedPodsFillBothKindsOfNode(t *testing.T) {
	s := startAPIServer(t)
	for _, o := range documents(t, classesFile, read(t, classesFile)) {
		s.apply(t, o, false)
	}
	// What there is on node-1, by DRA, and on node-2, by the device plugin: the recorded
	// node has two GPUs of each kind.
	const gpus, replicas, instances = "example.com/gpu", "example.com/gpu.shared", "example.com/mig-7g.80gb"
	for node, status := range map[string]fields{
		"node-1": {"cpu": "64", "memory": "64Gi", "pods": "110"},
		"node-2": {"cpu": "64", "memory": "64Gi", "pods": "110", gpus: "2", replicas: "3", instances: "1"},
	} {
		s.node(t, node, status)
	}
	s.offers(t, "node-1")
	s.Scheduler(t, 0)
	s.namespace(t, "train")

	// Of each, as many pods as there is room for, and one more.
	const pods = "/api/v1/namespaces/train/pods"
	room := map[string]int{gpus: 2 + 2, replicas: 8 + 3, instances: 2 + 1}
	sent := 0
	for _, name := range slices.Sorted(maps.Keys(room)) {
		for i := range room[name] + 1 {
			sent++
			s.create(t, pods, fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": fmt.Sprintf("%s-%d", name[strings.Index(name, "/")+1:], i)},
				"spec": fields{"automountServiceAccountToken": false, "tolerations": []fields{{"operator": "Exists"}}, "containers": []fields{{"name": "main", "image": "none",
					"resources": fields{"limits": fields{name: "1"}}}}}})
		}
	}
	type podList struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct {
				NodeName   string
				Containers []struct {
					Resources struct{ Limits map[string]string }
				}
			}
			Status struct {
				Conditions []struct{ Type, Status, Reason string }
				Claim      struct{ ResourceClaimName string } `json:"extendedResourceClaimStatus"`
			}
		}
	}
	bound := map[string]int{} // by node and resource
	s.await(t, "both nodes are full", func() error {
		var list podList
		if err := s.do(t, nil, http.MethodGet, pods, "", nil, &list); err != nil {
			return err
		}
		clear(bound)
		decided := 0
		for _, p := range list.Items {
			for name := range p.Spec.Containers[0].Resources.Limits {
				if p.Spec.NodeName == "" {
					for _, c := range p.Status.Conditions {
						if c.Type == "PodScheduled" && c.Reason == "Unschedulable" {
							decided++
						}
					}
					continue
				}
				decided++
				bound[p.Spec.NodeName+" "+name]++
				if hasClaim := p.Status.Claim.ResourceClaimName != ""; hasClaim != (p.Spec.NodeName == "node-1") {
					t.Fatalf("%s is on %s, by a claim %v", p.Metadata.Name, p.Spec.NodeName, hasClaim)
				}
			}
		}
		if decided != sent || len(bound) != 6 {
			return fmt.Errorf("%d of %d pods are decided on: %v", decided, sent, bound)
		}
		return nil
	})
	want := map[string]int{"node-1 " + gpus: 2, "node-2 " + gpus: 2, "node-1 " + replicas: 8, "node-2 " + replicas: 3, "node-1 " + instances: 2, "node-2 " + instances: 1}
	if !maps.Equal(bound, want) {
		t.Errorf("bound %v, want %v", bound, want)
	}
}

// node makes a node that is ready, and has that much.
func (s *apiServer) node(t *testing.T, name string, has fields) {
	t.Helper()
	s.create(t, "/api/v1/nodes", fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": name}})
	if err := s.do(t, nil, http.MethodPatch, "/api/v1/nodes/"+name+"/status", strategic, fields{"status": fields{"capacity": has, "allocatable": has,
		"conditions": []fields{{"type": "Ready", "status": "True"}}}}, nil); err != nil {
		t.Fatal(err)
	}
	// The taint is there until a controller, which does not run here, finds the node ready.
	if err := s.do(t, nil, http.MethodPatch, "/api/v1/nodes/"+name, merge, fields{"spec": fields{"taints": nil}}, nil); err != nil {
		t.Fatal(err)
	}
}

// offers publishes what a node with the recorded H100 has, none of it withdrawn.
func (s *apiServer) offers(t *testing.T, node string) {
	t.Helper()
	for _, slice := range slicesOf(t, "../tests/testdata/inventories/h100-80gb.json") {
		for i := range slice.Spec.Devices {
			slice.Spec.Devices[i].Taints = nil
		}
		slice.APIVersion, slice.Kind = "resource.k8s.io/v1", "ResourceSlice"
		slice.Spec.NodeName, slice.Spec.Pool.Generation = &node, 1
		if err := s.do(t, nil, http.MethodPost, slicesPath, asJSON, &slice, nil); err != nil {
			t.Fatal(err)
		}
	}
}
