// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/tests/cost"
)

// FuzzFleet tells a fleet of a Node, a GPUNode and pods as somebody else has written them, and asks for
// each pod's place. An honest pod gets its own on the node beside, and all of it costs little.
func FuzzFleet(f *testing.F) {
	for _, text := range []string{
		`{}`,
		`{"node":{"status":{"conditions":[{"type":"Ready","status":"True"}],
		    "allocatable":{"example.com/gpu-mem":"79"}}},
		  "says":{"conditions":[{"type":"Ready","status":"True"}],
		    "gpus":[{"uuid":"GPU-1","api":"device-plugin","kind":"units","resource":"example.com/gpu-mem","total":79,
		      "conditions":[{"type":"Available","status":"True"}]}]},
		  "pods":[
		    {"spec":{"nodeName":"hostile",
		      "containers":[{"resources":{"limits":{"example.com/gpu-mem":"4000000000"}}}]}},
		    {"spec":{"initContainers":[{"restartPolicy":"Always",
		        "resources":{"requests":{"example.com/gpu-mem":"9E"}}}],
		      "containers":[{"resources":{"requests":{"example.com/gpu-mem":"2"}}}]}}]}`,
		`{"says":{"gpus":[{"uuid":"GPU-1","total":2147483647}]},
		  "pods":[{"status":{"containerStatuses":[{"allocatedResourcesStatus":[{"name":"example.com/gpu-mem",
		      "resources":[{"resourceID":"GPU-1::00007"},{"resourceID":"GPU-1::99999999999999999999"},
		        {"resourceID":"::"}]}]}]},"spec":{"nodeName":"hostile"}}]}`,
		`{"pods":[{"spec":{"schedulingGroup":{"podGroupName":"g"},
		    "containers":[{"resources":{"limits":{"example.com/gpu-mem":"40"}}}]}},
		  {"spec":{"schedulingGroup":{},"containers":[{"resources":{"limits":{"example.com/gpu-mem":"99"}}}]}}]}`,
		`{"pods":[{"status":{"phase":"Failed","nominatedNodeName":"honest"},"spec":{"schedulingGates":[{"name":"g"}],
		    "containers":[{"resources":{"limits":{"example.com/mig-1g.10gb":"1k"}}}]}}]}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var in struct {
			Node corev1.Node
			Says *gpunode.Status
			Pods []corev1.Pod
		}
		if json.Unmarshal(text, &in) != nil || len(in.Pods) > 50 {
			return
		}
		took := cost.Allocated(func() {
			f := known("honest")
			in.Node.Name = "hostile"
			f.SetNode(&in.Node)
			_ = f.SetGPUNode("hostile", in.Says) // an invalid one is passed over
			for i := range in.Pods {
				p := &in.Pods[i]
				if p.UID = types.UID(fmt.Sprint("theirs-", i)); p.Spec.NodeName != "" {
					p.Spec.NodeName = "hostile"
				}
				f.SetPod(p)
				_, _, _ = f.Place(t.Context(), string(p.UID), []string{"hostile", "honest"})
				_, _ = f.Fits(t.Context(), string(p.UID), "hostile", []string{"theirs-0"})
			}
			f.lapse()
			f.usable("hostile")
			f.usable("honest")
			for i := range in.Pods {
				f.DeletePod(string(in.Pods[i].UID))
			}
			if on, refused, err := place(t.Context(), f, asks("ours", "79"), []string{"honest"}); on != "honest" {
				t.Errorf("an honest pod is placed on %q: %v, %v", on, refused, err)
			}
		})
		if took > 256<<20 {
			t.Errorf("%d bytes cost %d MiB", len(text), took>>20)
		}
	})
}
