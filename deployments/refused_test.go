// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
)

// The taint by which the agent ends the pods of a claim that can never be prepared has the
// real controllers delete them, and nobody beside them.
func TestTaintEndsPodsOfRefusedClaims(t *testing.T) {
	s := startAPIServer(t)
	for _, o := range documents(t, classesFile, read(t, classesFile)) {
		s.apply(t, o, false)
	}
	s.node(t, "node-1", fields{"cpu": "64", "memory": "64Gi", "pods": "110"})
	s.offers(t, "node-1")
	s.Scheduler(t, 0)
	s.Controllers(t, "resourceclaim-controller,device-taint-eviction-controller")
	s.namespace(t, "train")

	const claims, pods = "/apis/resource.k8s.io/v1/namespaces/train/resourceclaims", "/api/v1/namespaces/train/pods"
	names := []string{"refused", "beside"}
	for _, name := range names {
		s.create(t, claims, fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": fields{"name": name},
			"spec": fields{"devices": fields{"requests": []fields{{"name": "gpu", "exactly": fields{"deviceClassName": "gpu.example.com"}}}}}})
		s.create(t, pods, fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name}, "spec": fields{"automountServiceAccountToken": false,
			"tolerations":    []fields{{"operator": "Exists"}},
			"resourceClaims": []fields{{"name": "gpu", "resourceClaimName": name}},
			"containers":     []fields{{"name": "main", "image": "none", "resources": fields{"claims": []fields{{"name": "gpu"}}}}}}})
	}
	type claim struct {
		Status struct {
			Allocation struct {
				Devices struct {
					Results []struct{ Pool, Device string }
				}
			}
			ReservedFor []struct{ Name string }
		}
	}
	devices := map[string]string{}
	s.await(t, "both claims have a GPU", func() error {
		for _, name := range names {
			var c claim
			if err := s.do(t, nil, http.MethodGet, claims+"/"+name, "", nil, &c); err != nil {
				return err
			}
			if len(c.Status.Allocation.Devices.Results) != 1 || len(c.Status.ReservedFor) != 1 {
				return fmt.Errorf("claim %s has %+v", name, c.Status)
			}
			devices[name] = c.Status.Allocation.Devices.Results[0].Device
		}
		return nil
	})

	var list struct{ Items []fields }
	if err := s.do(t, nil, http.MethodGet, slicesPath, "", nil, &list); err != nil {
		t.Fatal(err)
	}
	tainted := 0
	for _, slice := range list.Items {
		of, _ := slice["spec"].(fields)["devices"].([]any)
		for _, d := range of {
			if d := d.(fields); d["name"] == devices["refused"] {
				d["taints"] = []fields{{"key": "example.com/claim-refused", "value": "ClaimRefused", "effect": "NoExecute"}}
				slice["apiVersion"], slice["kind"] = "resource.k8s.io/v1", "ResourceSlice"
				name := slice["metadata"].(fields)["name"].(string)
				if err := s.do(t, nil, http.MethodPut, slicesPath+"/"+name, asJSON, slice, nil); err != nil {
					t.Fatal(err)
				}
				tainted++
			}
		}
	}
	if tainted != 1 || devices["refused"] == devices["beside"] {
		t.Fatalf("%d devices are tainted, of %v", tainted, devices)
	}
	ends := func(name string) (bool, error) {
		var p struct {
			Metadata struct{ DeletionTimestamp string }
		}
		err := s.do(t, nil, http.MethodGet, pods+"/"+name, "", nil, &p)
		return p.Metadata.DeletionTimestamp != "", err
	}
	s.await(t, "the pod of the refused claim ends", func() error {
		if gone, err := ends("refused"); err != nil || gone {
			return err
		}
		return errors.New("it does not")
	})
	if gone, err := ends("beside"); err != nil || gone {
		t.Errorf("the pod beside it ends, too: %v, %v", gone, err)
	}
}
