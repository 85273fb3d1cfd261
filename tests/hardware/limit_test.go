// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// beNewDriver marks the process that TestEmulatedNewDriver starts.
const beNewDriver = "GPU_TESTS_NEW_DRIVER"

// TestEmulatedNewDriver holds a driver that limits cgroups against the same: in a
// process of its own, since one is bound to one driver's library.
func TestEmulatedNewDriver(t *testing.T) {
	if os.Getenv(beNewDriver) != "" {
		n := emulate(t, emulator.Spec{Model: "B200", Count: 4, Driver: "615.11", CUDA: "13.4"})
		Conformance(t, n.opts, Caps{Hold: n.hold, Busy: n.keepBusy, TimeSlice: true, Instances: true})
		return
	}
	if *onHardware {
		t.Skip("skipped: with -hardware the process is bound to the real driver")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(wait(t), self, "-test.run", "^TestEmulatedNewDriver$", "-test.v")
	cmd.Env = append(os.Environ(), beNewDriver+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	switch said := string(out); {
	case strings.Contains(said, "--- SKIP: TestEmulatedNewDriver/MemoryLimit"):
		t.Skipf("skipped: this machine has no cgroups that limits could be set on; all else passed:\n%s", said)
	case !strings.Contains(said, "--- PASS: TestEmulatedNewDriver/MemoryLimit"):
		t.Errorf("the other process has tested nothing:\n%s", said)
	}
}
