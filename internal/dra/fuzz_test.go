// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/amount"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/tests/cost"

	resourcev1 "k8s.io/api/resource/v1"
)

// FuzzPrepare prepares a claim as somebody else has written it. One that is refused has taken
// nothing, one that ends leaves nothing, a neighbour's claim is prepared after it, and all of it
// costs little.
func FuzzPrepare(f *testing.F) {
	for _, text := range []string{
		`{}`,
		`{"results":[{"request":"r","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000000-shared","shareID":"a","consumedCapacity":{"memory":"24Gi"}}]}`,
		`{"results":[{"request":"r/a","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000000-shared","adminAccess":true},{"request":"r/a","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000001-shared","consumedCapacity":{"memory":"9223372036854775807"}}]}`,
		`{"results":[{"pool":"node-2/x","device":"gpu-00000000"},{"pool":"node-1/","device":""}],"configs":[{"source":"FromClass","opaque":{"parameters":[1]}},{"requests":["r","r"],"opaque":{"parameters":{"kind":"GpuConfig"}}}]}`,
		`{"results":[{"request":"r","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000001-shared","consumedCapacity":{"memory":"1Gi"}}],"configs":[{"requests":["r"],"opaque":{"parameters":{"apiVersion":"gpu.example.com/v1","kind":"ShareConfig"}}}],"pods":[{"Name":"p","UID":"u"}]}`,
		`{"results":[{"request":"r","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000001-shared","consumedCapacity":{"memory":"1Gi"}}],"configs":[{"opaque":{"parameters":` + string(sliced("Long")) + `}},{"source":"FromClass","requests":["r"],"opaque":{"parameters":` + string(sliced("Short")) + `}}]}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var object any
		var theirs agentkube.Claim
		if json.Unmarshal(text, &object) != nil || amount.Check(object) != nil || json.Unmarshal(text, &theirs) != nil ||
			len(theirs.Results) > 32 || len(theirs.Pods) > 256 {
			return // 32 and 256 are the API's bounds
		}
		if slices.ContainsFunc(theirs.Configs, func(c resourcev1.DeviceAllocationConfiguration) bool { return c.Opaque == nil }) {
			return // not for this driver
		}
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, 2, shared)
			defer w.run(shared)()
			took := cost.Allocated(func() {
				theirs.Namespace, theirs.Name = "ns", "theirs"
				for i := range theirs.Results {
					theirs.Results[i].Driver = driver
				}
				claim := w.cluster.Put(theirs)
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
				defer cancel()
				if _, err := w.Prepare(ctx, claim); err != nil && w.ledger.Held() {
					t.Errorf("refused with %v, and has %+v", err, w.ledger.Allocations())
				}
				w.remove("theirs")
				if err := w.Unprepare(t.Context(), claim); err != nil || w.ledger.Held() {
					t.Errorf("ended with %v, and has %+v", err, w.ledger.Allocations())
				}
				ours := w.claim("ours", result{Device: shareDevice, ConsumedCapacity: memoryOf(79)})
				if _, err := w.Prepare(ctx, ours); err != nil {
					t.Errorf("a neighbour's claim: %v", err)
				}
				time.Sleep(tellAfter)
			})
			if took > 16<<20+uint64(1000*len(text)) {
				t.Errorf("%d bytes cost %d MiB", len(text), took>>20)
			}
		})
	})
}
