// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/tests/cost"
)

// FuzzPrepare prepares a claim as somebody else has written it. One that is refused has taken
// nothing, one that ends leaves nothing, a neighbour's claim is prepared after it, and all of it
// costs little.
func FuzzPrepare(f *testing.F) {
	for _, text := range []string{
		`{}`,
		`{"results":[{"request":"r","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000000-shared","shareID":"a","consumedCapacity":{"memory":"24Gi"}}]}`,
		`{"results":[{"request":"r/a","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000000-shared","adminAccess":true},{"request":"r/a","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000001-shared","consumedCapacity":{"memory":"9223372036854775807"}}]}`,
		`{"results":[{"pool":"node-2/x","device":"gpu-00000000"},{"pool":"node-1/","device":""}],"configs":[{"Parameters":[1],"FromClass":true},{"Requests":["r","r"],"Parameters":{"kind":"GpuConfig"}}]}`,
		`{"results":[{"request":"r","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000001-shared","consumedCapacity":{"memory":"1Gi"}}],"configs":[{"Requests":["r"],"Parameters":{"apiVersion":"gpu.example.com/v1","kind":"ShareConfig"}}],"pods":[{"Name":"p","UID":"u"}]}`,
		`{"results":[{"request":"r","pool":"node-1/a100-sxm4-80gb","device":"gpu-00000001-shared","consumedCapacity":{"memory":"1Gi"}}],"configs":[{"Parameters":` + string(sliced("Long")) + `},{"Requests":["r"],"Parameters":` + string(sliced("Short")) + `,"FromClass":true}]}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var theirs agentkube.Claim
		if json.Unmarshal(text, &theirs) != nil || len(theirs.Results) > 32 || len(theirs.Pods) > 256 {
			return // 32 and 256 are the API's bounds
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
				ours := w.claim("ours", agentkube.Result{Device: shareDevice, Capacity: memoryOf(79)})
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
