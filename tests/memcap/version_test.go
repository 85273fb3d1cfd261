// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"os"
	"path/filepath"
	"testing"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// TestNamesThatTheDriverLacks: on a driver of an older CUDA version a program in a
// container with a cap finds by dlsym what it finds without one. The driver is the
// emulated one as it is installed for its world's version.
func TestNamesThatTheDriverLacks(t *testing.T) {
	for cuda, want := range map[string]map[string]string{
		"12.4": {"cuCtxSynchronize_v2": "0", "cuCtxCreate_v4": "0", "cuMemGetDefaultMemPool": "0", "cuMemSetMemPool": "0"},
		"13.0": {"cuCtxSynchronize_v2": "1"},
	} {
		t.Run(cuda, func(t *testing.T) {
			r := newRig(t, emulator.Spec{Count: 1, CUDA: cuda})
			// What the agent does with its own copy (lib.Fit).
			ours, err := os.ReadFile(r.kit.CUDA)
			if err != nil {
				t.Fatal(err)
			}
			fitted, err := lib.Hide(ours, filepath.Join(r.m.Driver, capsule.Libraries, "libcuda.so."+r.m.World.DriverVersion()))
			if err != nil {
				t.Fatal(err)
			}
			r.kit.CUDA = filepath.Join(t.TempDir(), "libcuda.so.1")
			if err := os.WriteFile(r.kit.CUDA, fitted, 0o755); err != nil {
				t.Fatal(err)
			}
			k := r.allocate(t, "old", []share{{gpu: 0, bytes: GiB}}, false, nil).tool(t, "probe", nil)
			for name, found := range want {
				if f := k.ask("lookup", "lookup %s", name); f["found"] != found {
					t.Errorf("%s: %q, want found=%s", name, k.said, found)
				}
			}
			k.quit()
		})
	}
}
