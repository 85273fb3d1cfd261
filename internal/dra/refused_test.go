// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/pkg/gpu"

	resourcev1 "k8s.io/api/resource/v1"
)

// What can never be prepared is refused at once, with the reason, and takes nothing.
func TestClaimsThatAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		result result
		change func(*agentkube.Claim)
		want   string
	}{
		"another node's pool":    {result{Pool: "node-2/a100-sxm4-80gb", Device: shareDevice}, nil, "device gpu-00000000-shared of pool node-2/a100-sxm4-80gb, and node node-1 offers only devices of its own pools"},
		"no such pool":           {result{Pool: "node-1/h100", Device: shareDevice}, nil, "no device gpu-00000000-shared in pool node-1/h100"},
		"an older layout":        {result{Device: wholeDevice}, nil, "no device gpu-00000000 in pool"},
		"without an amount":      {result{Device: shareDevice}, nil, "0 bytes of device"},
		"half a unit":            {result{Device: shareDevice, ConsumedCapacity: bytesOf(1 << 29)}, nil, "an amount is 1 to 79 times 1024 MiB"},
		"a unit and a half":      {result{Device: shareDevice, ConsumedCapacity: bytesOf(3 << 29)}, nil, "an amount is"},
		"less than nothing":      {result{Device: shareDevice, ConsumedCapacity: memoryOf(-1)}, nil, "an amount is"},
		"more than there is":     {result{Device: shareDevice, ConsumedCapacity: memoryOf(80)}, nil, "an amount is"},
		"replaced":               {result{Device: shareDevice, ConsumedCapacity: memoryOf(1)}, func(c *agentkube.Claim) { c.UID = "another" }, "is another one now"},
		"not allocated any more": {result{Device: shareDevice, ConsumedCapacity: memoryOf(1)}, func(c *agentkube.Claim) { c.Results = nil }, "nothing of driver"},
		"configuration of the peer": {result{Device: shareDevice, ConsumedCapacity: memoryOf(1)}, func(c *agentkube.Claim) {
			c.Configs = []resourcev1.DeviceAllocationConfiguration{configured(json.RawMessage(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`))}
		}, `kind "GpuConfig"`},
		"configuration that is none": {result{Device: shareDevice, ConsumedCapacity: memoryOf(1)}, func(c *agentkube.Claim) {
			c.Configs = []resourcev1.DeviceAllocationConfiguration{configured(json.RawMessage(`[1,`))}
		}, `kind ""`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, shared)
				defer w.run(shared)()
				claim := w.claim("a", c.result)
				if c.change != nil {
					w.cluster.Edit("ns", "a", c.change)
				}
				began := time.Now()
				_, err := w.Prepare(t.Context(), claim)
				if err == nil || !strings.Contains(err.Error(), c.want) || time.Since(began) > 0 || w.ledger.Held() {
					t.Errorf("%v after %v; want %q", err, time.Since(began), c.want)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		defer w.run(shared)()
		w.lay(onDemand)
		if _, err := w.Prepare(t.Context(), w.claim("admin", result{Device: migDevice, AdminAccess: new(true)})); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("admin access to an instance that does not stand: %v", err)
		}
		w.lay(shared)
		claim := w.claim("a", result{Device: shareDevice, ConsumedCapacity: memoryOf(1)})
		w.remove("a")
		if _, err := w.Prepare(t.Context(), claim); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("deleted meanwhile: %v", err)
		}
	})
}

// An agent prepares what its own slices offer. A claim with a device of another node's pool has
// nothing, and its pod does not start without that device: not by Prepare, and not by what the
// loop takes before it withdraws something.
func TestAgentPreparesOnlyWhatItsOwnSlicesOffer(t *testing.T) {
	for name, results := range map[string][]result{
		"another node's alone":     {{Pool: "node-2/a100-sxm4-80gb", Device: wholeDevice}},
		"its own and another's":    {{Device: wholeDevice}, {Pool: "node-2/a100-sxm4-80gb", Device: wholeDevice}},
		"another's and its own":    {{Pool: "node-2/a100-sxm4-80gb", Device: wholeDevice}, {Device: wholeDevice}},
		"a pool that begins alike": {{Device: wholeDevice}, {Pool: "node-10/a100-sxm4-80gb", Device: wholeDevice}},
		"a pool of the bare name":  {{Device: wholeDevice}, {Pool: "node-1", Device: wholeDevice}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, whole)
				defer w.run(whole)()
				claim := w.claim("a", results...)
				for _, when := range []string{"at first", "after the loop has settled"} {
					devices, err := w.Prepare(t.Context(), claim)
					if err == nil || w.ledger.Held() {
						t.Fatalf("%s %d devices are prepared of %d: %v", when, len(devices), len(results), err)
					}
					for _, says := range []string{"device gpu-00000000 of pool node-", "node node-1 offers only", "delete the slice"} {
						if !strings.Contains(err.Error(), says) {
							t.Errorf("%s: %v, want %q", when, err, says)
						}
					}
					if _, err := w.Settle(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if refused := w.Refused(); len(refused) != 1 {
					t.Errorf("the status says %v", refused)
				}
			})
		})
	}
}

// A claim of which one result cannot be had has nothing.
func TestAllOfAClaimOrNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		defer w.run(whole)()
		if _, err := w.Prepare(t.Context(), w.claim("one", result{Device: "gpu-00000001"})); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.Prepare(ctx, w.claim("both", result{Device: wholeDevice}, result{Device: "gpu-00000001"})); err == nil || len(w.ledger.Allocations()) != 1 {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
	})
}

// A claim of as many devices as the API allows is prepared as a whole and given back as one.
func TestClaimOf32Devices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		defer w.run(shared)()
		var results []result
		for range 32 {
			results = append(results, result{Request: "gpu", Device: shareDevice, ConsumedCapacity: memoryOf(2)})
		}
		claim := w.claim("a", results...)
		devices, err := w.Prepare(t.Context(), claim)
		cdi := map[string]bool{}
		for _, d := range devices {
			cdi[d.CDI[0]] = true
		}
		if err != nil || len(devices) != 32 || len(cdi) != 32 || len(w.ledger.Allocations()) != 32 {
			t.Errorf("%d devices, %d of them with a name of their own: %v", len(devices), len(cdi), err)
		}
		if err := w.Unprepare(t.Context(), claim); err != nil || w.ledger.Held() {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
		more := w.claim("more", append(results, results[:8]...)...)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.Prepare(ctx, more); !errors.Is(err, gpu.ErrInvalid) || w.ledger.Held() {
			t.Errorf("80 GiB of 79: %v, %+v", err, w.ledger.Allocations())
		}
	})
}
