// SPDX-License-Identifier: Apache-2.0

package room

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	resource "k8s.io/api/resource/v1"
)

// server answers with two GPUs, each of which is two halves or memory to share, and claims.
func server(claims ...string) Get {
	var devices []string
	for _, gpu := range []string{"a", "b"} {
		for _, half := range []string{"0", "4"} {
			devices = append(devices, fmt.Sprintf(`{"name": "%s-half-%s", "attributes": {"type": {"string": "mig"}, "parent": {"string": %q}},
				"consumesCounters": [{"counterSet": %[3]q, "counters": {"slice-%[2]s": {"value": "1"}}}]}`, gpu, half, gpu))
		}
		devices = append(devices, fmt.Sprintf(`{"name": "%s-shared", "allowMultipleAllocations": true, "attributes": {"type": {"string": "shared"}, "parent": {"string": %[1]q}},
			"capacity": {"memory": {"value": "80Gi", "requestPolicy": {"default": "80Gi", "validRange": {"min": "1Gi", "max": "80Gi", "step": "1Gi"}}}},
			"consumesCounters": [{"counterSet": %[1]q, "counters": {"slice-0": {"value": "1"}, "slice-4": {"value": "1"}}}]}`, gpu))
	}
	spec := func(n int, rest string) string {
		return fmt.Sprintf(`{"metadata": {"name": "s%d"}, "spec": {"driver": "gpus.example.com", "nodeName": "n", "pool": {"name": "n/x", "generation": 1, "resourceSliceCount": 2}, %s}}`, n, rest)
	}
	sets := `"sharedCounters": [{"name": "a", "counters": {"slice-0": {"value": "1"}, "slice-4": {"value": "1"}}}, {"name": "b", "counters": {"slice-0": {"value": "1"}, "slice-4": {"value": "1"}}}]`
	class := func(name, kind string) string {
		return fmt.Sprintf(`{"metadata": {"name": %q}, "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpus.example.com' && device.attributes['gpus.example.com'].type == '%s'"}}]}}`, name, kind)
	}
	lists := map[string][]string{
		"resourceslices": {spec(0, sets), spec(1, `"devices": [`+strings.Join(devices, ",")+`]`)},
		"deviceclasses":  {class("half", "mig"), class("memory", "shared")},
		"resourceclaims": claims,
	}
	return func(at string, into any) error {
		return json.Unmarshal([]byte(`{"items": [`+strings.Join(lists[path.Base(at)], ",")+`]}`), into)
	}
}

// has is a claim that has a device; rest is what else its result says.
func has(device, rest string) string {
	return fmt.Sprintf(`{"metadata": {"name": "c"}, "status": {"allocation": {"devices": {"results": [{"request": "r", "driver": "gpus.example.com", "pool": "n/x", "device": %q%s}]}}}}`, device, rest)
}

func shared(uid, amount string) string {
	return fmt.Sprintf(`, "shareID": "5f8a0000-0000-4000-8000-00000000000%s", "consumedCapacity": {"memory": %q}`, uid, amount)
}

// A search that never finds anything would call every wait right.
func TestSearchFindsWhatThereIs(t *testing.T) {
	memory := func(amount string) resource.DeviceClaim {
		var c resource.DeviceClaim
		text := `{"requests": [{"name": "r", "exactly": {"deviceClassName": "memory", "capacity": {"requests": {"memory": "` + amount + `"}}}}]}`
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	for name, c := range map[string]struct {
		claims []string
		of     []resource.DeviceClaim
		want   []string
	}{
		"an empty node":          {nil, []resource.DeviceClaim{Request("half", 4)}, []string{"a-half-0", "a-half-4", "b-half-0", "b-half-4"}},
		"more than there is":     {nil, []resource.DeviceClaim{Request("half", 5)}, nil},
		"two claims":             {nil, []resource.DeviceClaim{Request("half", 3), memory("1Gi")}, nil},
		"two claims that fit":    {nil, []resource.DeviceClaim{Request("half", 2), memory("1Gi")}, []string{"a-half-0", "a-half-4", "b-shared"}},
		"beside what is held":    {[]string{has("a-half-0", ""), has("b-shared", shared("1", "1Gi"))}, []resource.DeviceClaim{Request("half", 1)}, []string{"a-half-4"}},
		"no memory of a half":    {[]string{has("a-half-0", ""), has("b-half-4", "")}, []resource.DeviceClaim{memory("1Gi")}, nil},
		"memory that is left":    {[]string{has("a-half-0", ""), has("b-shared", shared("1", "50Gi"))}, []resource.DeviceClaim{memory("30Gi")}, []string{"b-shared"}},
		"memory that is gone":    {[]string{has("a-half-0", ""), has("b-shared", shared("1", "50Gi"))}, []resource.DeviceClaim{memory("31Gi")}, nil},
		"access that takes none": {[]string{has("a-half-0", `, "adminAccess": true`)}, []resource.DeviceClaim{Request("half", 1)}, []string{"a-half-0"}},
	} {
		w, err := Look(server(c.claims...))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := w.For(t.Context(), "n", c.of...); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: it finds %v, %v, want %v", name, got, err, c.want)
		}
		if got, err := w.For(t.Context(), "another", c.of...); err != nil || len(got) > 0 {
			t.Errorf("%s: on another node it finds %v, %v", name, got, err)
		}
	}
}
