// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"fmt"
	"net/http"
	"testing"
)

// trySlices has the agent read the ResourceSlices of its node with the rights that
// it has, by the selectors that the server knows.
func (s *apiServer) trySlices(t *testing.T) {
	slice := func(name, driver, device string, where fields) {
		spec := fields{"driver": driver, "pool": fields{"name": name, "generation": 1, "resourceSliceCount": 1},
			"devices": []fields{{"name": device, "attributes": fields{"uuid": fields{"string": "GPU-" + device}, "index": fields{"int": 3}}}}}
		for field, value := range where {
			spec[field] = value
		}
		body := fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": fields{"name": name}, "spec": spec}
		if err := s.do(t, nil, http.MethodPost, "/apis/resource.k8s.io/v1/resourceslices", asJSON, body, nil); err != nil {
			t.Fatal(err)
		}
	}
	slice("here", "gpu.example.org", "d-here", fields{"nodeName": "node-1"})
	slice("there", "gpu.example.org", "d-there", fields{"nodeName": "node-2"})
	slice("network", "gpu.example.org", "d-network", fields{"allNodes": true})
	slice("other-here", "nic.example.org", "d-nic", fields{"nodeName": "node-1"})
	slice("other-network", "nic.example.org", "d-port", fields{"allNodes": true})

	client := s.agentClient(t)
	devices, err := client.Devices(t.Context(), "gpu.example.org")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range devices {
		got = append(got, d.Driver+"/"+d.Pool+"/"+d.Name+"="+d.Attributes["uuid"])
	}
	if want := "[gpu.example.org/here/d-here=GPU-d-here gpu.example.org/network/d-network=GPU-d-network]"; fmt.Sprint(got) != want {
		t.Errorf("the agent reads %v, want %s", got, want)
	}
}
