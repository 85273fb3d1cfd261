// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// sliced is NVIDIA's configuration of a time slice.
func sliced(interval string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":%q}}}`, interval))
}

// configured is a claim's configuration for the driver, for these requests or all.
func configured(parameters json.RawMessage, requests ...string) resourcev1.DeviceAllocationConfiguration {
	return resourcev1.DeviceAllocationConfiguration{Source: resourcev1.AllocationConfigSourceClaim, Requests: requests,
		DeviceConfiguration: resourcev1.DeviceConfiguration{Opaque: &resourcev1.OpaqueDeviceConfiguration{
			Driver: driver, Parameters: runtime.RawExtension{Raw: parameters}}}}
}

// ofClass is the same configuration of a DeviceClass.
func ofClass(c resourcev1.DeviceAllocationConfiguration) resourcev1.DeviceAllocationConfiguration {
	c.Source = resourcev1.AllocationConfigSourceClass
	return c
}

// Configuration is NVIDIA's, of time slices, to the letter: what is passed over would be a
// promise that is not kept.
func TestConfiguration(t *testing.T) {
	const head = `"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"`
	for text, want := range map[string]gpu.TimeSlice{
		string(sliced("Default")): gpu.TimeSliceDefault, string(sliced("Short")): gpu.TimeSliceShort,
		string(sliced("Medium")): gpu.TimeSliceMedium, string(sliced("Long")): gpu.TimeSliceLong,
		`{` + head + `,"sharing":{"strategy":"TimeSlicing"}}`:         gpu.TimeSliceDefault,
		` { "sharing" : {"strategy":"TimeSlicing"} , ` + head + ` } `: gpu.TimeSliceDefault,

		string(sliced("long")): "", string(sliced("")): "", string(sliced("2ms")): "",
		`{` + head + `}`:                                                                                    "",
		`{` + head + `,"sharing":null}`:                                                                     "",
		`{` + head + `,"sharing":"TimeSlicing"}`:                                                            "",
		`{` + head + `,"sharing":{"strategy":"MPS"}}`:                                                       "",
		`{` + head + `,"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}}`:                                "",
		`{` + head + `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}}`:                        "",
		`{` + head + `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":3}}}`:            "",
		`{` + head + `,"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long","n":1}}}`: "",
		`{` + head + `,"sharing":{"strategy":"TimeSlicing"},"color":"red"}`:                                 "",
		`{` + head + `,"Sharing":{"strategy":"TimeSlicing"}}`:                                               "",
		`{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`:   "",
		strings.Replace(string(sliced("Long")), "GpuConfig", "MigDeviceConfig", 1):                          "",
		`[` + string(sliced("Long")) + `]`:                                                                  "", string(sliced("Long")) + `x`: "", `{"kind":`: "", ``: "", `null`: "",
	} {
		got, err := readConfig(new(configured(json.RawMessage(text))))
		if got != want || (err == nil) != (want != "") || err != nil && !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%s is %q, %v; want %q", text, got, err, want)
		}
	}
}

// A result has the time slice of the last configuration that is for its request.
func TestTimeSliceOfAResult(t *testing.T) {
	of := func(interval string, requests ...string) resourcev1.DeviceAllocationConfiguration {
		return configured(sliced(interval), requests...)
	}
	for name, c := range map[string]struct {
		configs []resourcev1.DeviceAllocationConfiguration
		slice   gpu.TimeSlice
		named   bool
	}{
		"none":                            {nil, "", false},
		"of all requests":                 {[]resourcev1.DeviceAllocationConfiguration{of("Long")}, gpu.TimeSliceLong, false},
		"of the request":                  {[]resourcev1.DeviceAllocationConfiguration{of("Long", "other", "gpu/a")}, gpu.TimeSliceLong, true},
		"of its alternatives":             {[]resourcev1.DeviceAllocationConfiguration{of("Long", "gpu")}, gpu.TimeSliceLong, false},
		"of another request":              {[]resourcev1.DeviceAllocationConfiguration{of("Long", "gpu/b", "g", "gpu/a/a")}, "", false},
		"of all, then of the request":     {[]resourcev1.DeviceAllocationConfiguration{of("Long"), of("Short", "gpu/a")}, gpu.TimeSliceShort, true},
		"of the request, then of another": {[]resourcev1.DeviceAllocationConfiguration{of("Long", "gpu/a"), of("Short", "x")}, gpu.TimeSliceLong, true},
	} {
		slice, named := sliceOf(&agentkube.Claim{Configs: c.configs}, &result{Request: "gpu/a"})
		if slice != c.slice || named != c.named {
			t.Errorf("%s: %q, %v; want %q, %v", name, slice, named, c.slice, c.named)
		}
	}
}

// Of two time slices of one GPU the first holder's counts, and the second waits until that has
// ended. Who asks for none goes along. A MIG instance has none of its own.
func TestTwoTimeSlicesOfOneGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		defer w.run(shared)()
		ask := func(name, interval string, patience time.Duration) error {
			claim := w.claim(name, result{Device: shareDevice, ConsumedCapacity: memoryOf(1)})
			w.cluster.Edit("ns", name, func(c *agentkube.Claim) {
				if interval != "" {
					c.Configs = []resourcev1.DeviceAllocationConfiguration{configured(sliced(interval))}
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := w.Prepare(ctx, claim)
			return err
		}
		for _, c := range [][2]string{{"none", ""}, {"first", "Long"}, {"same", "Long"}, {"after", ""}} {
			if err := ask(c[0], c[1], time.Second); err != nil {
				t.Error(c, err)
			}
		}
		if err := ask("second", "Short", 30*time.Second); !errors.Is(err, ledger.ErrHeld) || !strings.Contains(err.Error(), "its GPU has the time slice long for another claim") || len(w.Refused()) > 0 {
			t.Errorf("%v; %+v", err, w.Refused())
		}
		slices := map[gpu.TimeSlice]int{}
		for _, a := range w.ledger.Allocations() {
			slices[a.Grants[0].TimeSlice]++
			if r := w.journal[a.ID]; r.Grants[0].TimeSlice != a.Grants[0].TimeSlice {
				t.Errorf("the record is %+v, of %+v", r, a)
			}
		}
		if slices[""] != 2 || slices[gpu.TimeSliceLong] != 2 || len(slices) != 2 {
			t.Errorf("held: %v", slices)
		}
		done := make(chan error, 1)
		go func() { done <- ask("third", "Short", time.Hour) }()
		time.Sleep(10 * time.Second)
		for _, name := range []string{"first", "same"} {
			if err := w.Unprepare(t.Context(), dra.Claim{Namespace: "ns", Name: name, UID: "uid-" + name}); err != nil {
				t.Error(err)
			}
		}
		began := time.Now()
		if err := <-done; err != nil || time.Since(began) > 0 {
			t.Errorf("%v after %v", err, time.Since(began))
		}

		two := w.claim("two", result{Device: shareDevice, ConsumedCapacity: memoryOf(1)}, result{Device: shareDevice, ConsumedCapacity: memoryOf(1)})
		w.cluster.Edit("ns", "two", func(c *agentkube.Claim) {
			c.Configs = []resourcev1.DeviceAllocationConfiguration{configured(sliced("Short")), configured(sliced("Long"), "r1")}
		})
		if _, err := w.Prepare(t.Context(), two); err == nil || !strings.Contains(err.Error(), "two time slices of one GPU, short and long") {
			t.Errorf("of one claim: %v", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, onDemand)
		defer w.run(onDemand)()
		claim := w.claim("a", result{Device: migDevice})
		w.cluster.Edit("ns", "a", func(c *agentkube.Claim) {
			c.Configs = []resourcev1.DeviceAllocationConfiguration{configured(sliced("Long"))}
		})
		if _, err := w.Prepare(t.Context(), claim); err != nil || w.ledger.Allocations()[0].Grants[0].TimeSlice != "" {
			t.Errorf("%v: %+v", err, w.ledger.Allocations())
		}
	})
}
