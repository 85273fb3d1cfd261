// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

func TestRecord(t *testing.T) {
	const resource = "example.com/gpu-mem"
	ids := []string{"GPU-1::10", "GPU-1::9"}
	parts := Parts{Devices: map[gpu.UUID]specs.ContainerEdits{"GPU-1": {DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia3"}}}}}
	spec, err := Spec("example.com", Key(resource, ids), parts, []gpu.UUID{"GPU-1"}, Overlay{})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := ReadRecord(spec, "example.com"); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a spec without a record: %v, want gpu.ErrInvalid", err)
	}
	if err := Record(spec, "example.com", "what was granted"); err != nil {
		t.Fatal(err)
	}
	if spec.Version != "0.6.0" {
		t.Errorf("version %s, want 0.6.0, the first with annotations", spec.Version)
	}
	key, got, err := ReadRecord(spec, "example.com")
	if err != nil || key != Key(resource, ids) || got != "what was granted" {
		t.Errorf("read back %q %q, %v", key, got, err)
	}
	spec.Devices[0].Name = Key(resource, ids[:1])
	if _, _, err := ReadRecord(spec, "example.com"); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a record of other devices: %v, want gpu.ErrInvalid", err)
	}
}
