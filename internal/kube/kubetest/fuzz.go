// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"encoding/json"
	"testing"

	"example.com/gpu-agent/tests/cost"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Little fails the test if do, which handles a text from the API, allocates more than 8 MiB and 500
// bytes for each byte of the text.
func Little(t *testing.T, text []byte, do func()) {
	t.Helper()
	if took := cost.Allocated(do); took > 8<<20+uint64(500*len(text)) {
		t.Errorf("%d bytes cost %d MiB", len(text), took>>20)
	}
}

// FuzzObjects fuzzes do with objects as the API server sends them, and limits what do may allocate.
func FuzzObjects(f *testing.F, seeds []string, do func(*testing.T, *unstructured.Unstructured)) {
	for _, text := range seeds {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var object map[string]any
		if json.Unmarshal(text, &object) != nil || object == nil {
			return
		}
		Little(t, text, func() { do(t, &unstructured.Unstructured{Object: object}) })
	})
}
