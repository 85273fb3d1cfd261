// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/kubetest"
)

// FuzzGPUNode reads a GPUNode: the agent its own, the export and the placer anybody's. What Check
// lets through is what was written, and says the same when it is written again.
func FuzzGPUNode(f *testing.F) {
	kubetest.FuzzObjects(f, []string{
		`{}`,
		`{"status":{"memoryUnitMiB":1024,"conditions":[{"type":"Ready","status":"True"}],"gpus":[{"uuid":"GPU-1","api":"device-plugin","kind":"units","total":79,"used":"0-3,7","holders":[{"namespace":"a","pod":"b","devices":"0-3"}]}]}}`,
		`{"status":{"gpus":[{"uuid":"GPU-1","total":2147483647,"used":"0-16777216"},{"uuid":"GPU-1"}],"cards":[{"name":"c","profiles":[{"name":"1g.10gb","starts":[0,1,2,99999999]}]}]}}`,
	}, func(t *testing.T, object *unstructured.Unstructured) {
		status, err := ReadGPUNode(object)
		if err != nil || status.Check() != nil {
			return
		}
		written, err := json.Marshal(status)
		if err != nil {
			t.Fatal(err)
		}
		again := new(gpunode.Status)
		if err := json.Unmarshal(written, again); err != nil {
			t.Fatal(err)
		}
		if err := again.Check(); err != nil {
			t.Errorf("%s is refused when it is read again: %v", written, err)
		}
	})
}
