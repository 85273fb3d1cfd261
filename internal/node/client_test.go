// SPDX-License-Identifier: Apache-2.0

package node

import (
	"runtime"
	"testing"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// TestAnswersTakeMemoryOfTheirLength: an answer of 40 KiB, which is one string, does not
// take a buffer of a megabyte.
func TestAnswersTakeMemoryOfTheirLength(t *testing.T) {
	long := string(make([]byte, 40<<10))
	for _, c := range []struct {
		name    string
		codec   encoding.CodecV2
		message any
		answer  any
	}{
		{"kubelet", newExact(), &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{{Name: long}}}, &podresources.ListPodResourcesResponse{}},
		{"runtime", newBounded(), &cri.VersionResponse{Version: long}, &cri.VersionResponse{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			sent, err := c.codec.Marshal(c.message)
			if err != nil {
				t.Fatal(err)
			}
			data := mem.BufferSlice{mem.SliceBuffer(sent.Materialize())}
			data = append(data, mem.SliceBuffer(nil)) // an answer comes in pieces
			runtime.GC()
			runtime.GC() // so that no pool has a buffer left
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if err := c.codec.Unmarshal(data, c.answer); err != nil {
				t.Fatal(err)
			}
			runtime.ReadMemStats(&after)
			if n := after.TotalAlloc - before.TotalAlloc; n > 512<<10 {
				t.Errorf("an answer of %d bytes took %d", len(long), n)
			}
		})
	}
}
