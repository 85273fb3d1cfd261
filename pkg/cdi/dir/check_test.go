// SPDX-License-Identifier: Apache-2.0

package dir

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// TestCheckIsWhatRuntimesCheck: a spec that is refused is one that a runtime refuses when it
// reads the file, and no other.
func TestCheckIsWhatRuntimesCheck(t *testing.T) {
	node := func() *specs.DeviceNode { return &specs.DeviceNode{Path: "/dev/nvidia0"} }
	for name, change := range map[string]func(*specs.Spec){
		"as it should be":         func(*specs.Spec) {},
		"a mount":                 func(s *specs.Spec) { s.ContainerEdits.Mounts = []*specs.Mount{{HostPath: "/a", ContainerPath: "/b"}} },
		"an annotation":           func(s *specs.Spec) { s.Annotations = map[string]string{"example.com/x": "y"} },
		"two devices":             func(s *specs.Spec) { s.Devices = append(s.Devices, s.Devices[0]); s.Devices[1].Name = "b" },
		"no version":              func(s *specs.Spec) { s.Version = "" },
		"a version too old":       func(s *specs.Spec) { s.Annotations, s.Version = map[string]string{"example.com/x": "y"}, "0.3.0" },
		"a version of the future": func(s *specs.Spec) { s.Version = "99.0.0" },
		"no kind":                 func(s *specs.Spec) { s.Kind = "" },
		"no class":                func(s *specs.Spec) { s.Kind = "example.com" },
		"a bad vendor":            func(s *specs.Spec) { s.Kind = "-x/gpu" },
		"a bad class":             func(s *specs.Spec) { s.Kind = "example.com/g.u" },
		"no devices":              func(s *specs.Spec) { s.Devices = nil },
		"one device twice":        func(s *specs.Spec) { s.Devices = append(s.Devices, s.Devices[0]) },
		"a device without a name": func(s *specs.Spec) { s.Devices[0].Name = "" },
		"a device's bad name":     func(s *specs.Spec) { s.Devices[0].Name = "a@b" },
		"a device without edits":  func(s *specs.Spec) { s.Devices[0].ContainerEdits = specs.ContainerEdits{Mounts: []*specs.Mount{}} },
		"an environment":          func(s *specs.Spec) { s.ContainerEdits.Env = []string{"A"} },
		"a device's environment":  func(s *specs.Spec) { s.Devices[0].ContainerEdits.Env = []string{"=b"} },
		"a hook": func(s *specs.Spec) {
			s.Devices[0].ContainerEdits.Hooks = []*specs.Hook{{HookName: "whenever", Path: "/h"}}
		},
		"a mount of nothing":      func(s *specs.Spec) { s.ContainerEdits.Mounts = []*specs.Mount{{ContainerPath: "/b"}} },
		"a node without a path":   func(s *specs.Spec) { s.Devices[0].ContainerEdits.DeviceNodes = []*specs.DeviceNode{{}} },
		"a node of no known type": func(s *specs.Spec) { n := node(); n.Type = "z"; s.ContainerEdits.DeviceNodes = []*specs.DeviceNode{n} },
		"a node's bad permissions": func(s *specs.Spec) {
			n := node()
			n.Permissions = "x"
			s.ContainerEdits.DeviceNodes = []*specs.DeviceNode{n}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &specs.Spec{Version: "0.6.0", Kind: "example.com/gpu", Devices: []specs.Device{{Name: "a", ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{node()}}}}}
			change(s)
			data, err := json.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "spec.json")
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			_, theirs := cdilib.ReadSpec(path, 0)
			if ours := check(s); (ours == nil) != (theirs == nil) {
				t.Errorf("check says %v, and a runtime %v", ours, theirs)
			}
		})
	}
}
