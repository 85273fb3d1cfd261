// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"example.com/gpu-agent/tests/emulator"
)

// notOfDrivers are switches that say nothing of drivers.
var notOfDrivers = map[string]string{
	"kernel-us": "how long kernels take is up to them",
	"map-us":    "how long they take to map memory is a figure, and no behaviour",
}

// TestEverySwitchIsToldApart: a switch that the emulator gets is asked of hardware.
func TestEverySwitchIsToldApart(t *testing.T) {
	source, err := os.ReadFile("../emulator/lib/c/cuda_switch.c")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^ +(?:NUMBER|WORDS)\("([a-z-]+)"`).FindAllSubmatch(source, -1)
	if len(found) < len(Switches) {
		t.Fatalf("found %d switches in cuda_switch.c, want at least %d", len(found), len(Switches))
	}
	for _, m := range found {
		name := string(m[1])
		if Switches[name] == nil && notOfDrivers[name] == "" {
			t.Errorf("testdata/switches.c does not tell the values of %s apart", name)
		}
	}
}

// The program goes with the process.
var switchesProgram = sync.OnceValues(func() (string, error) { return programOf("switches", driverDir) })

// findOut asks a driver for one behaviour.
func findOut(t *testing.T, library, name string, env ...string) string {
	t.Helper()
	program, err := switchesProgram()
	if err != nil {
		t.Skipf("skipped: needs a C compiler: %v", err)
	}
	cmd := exec.CommandContext(wait(t), program, library, name)
	cmd.Env = append(os.Environ(), env...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, said.String())
	}
	return strings.TrimSpace(string(out))
}

func TestSwitchesOfTheEmulator(t *testing.T) {
	emulate(t, emulator.Spec{Count: 1})
	library := filepath.Join(driverDir, "usr/lib/x86_64-linux-gnu/libcuda.so.1")
	for _, name := range slices.Sorted(maps.Keys(Switches)) {
		for _, value := range Switches[name] {
			t.Run(value, func(t *testing.T) {
				_, want, _ := strings.Cut(value[strings.LastIndex(value, ",")+1:], "=")
				if got := findOut(t, library, name, "GPU_EMULATOR_CUDA="+value); got != want {
					t.Errorf("it finds %q", got)
				}
			})
		}
	}
}

// TestSwitchesOfHardware says what this machine's driver does. It holds nothing
// against it: what is found goes into tests/emulator/lib/doc.go by hand.
func TestSwitchesOfHardware(t *testing.T) {
	if !*onHardware {
		t.Skip("skipped: -hardware is not given (make test-gpu gives it)")
	}
	var env []string
	if *driverRoot != "/" {
		env = append(env, "LD_LIBRARY_PATH="+filepath.Join(*driverRoot, "usr/lib64")+":"+filepath.Join(*driverRoot, "usr/lib/x86_64-linux-gnu"))
	}
	for _, name := range slices.Sorted(maps.Keys(Switches)) {
		t.Run(name, func(t *testing.T) { t.Logf("%s=%s", name, findOut(t, "libcuda.so.1", name, env...)) })
	}
}
