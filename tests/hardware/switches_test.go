// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"fmt"
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

// The emulated CUDA driver has a switch for what NVIDIA's documentation leaves
// open. A program tells a driver's behaviours apart (testdata/switches.c): on the
// emulator it has to find what each switch says, and on hardware it says which is
// the real one, so that one day the switch can go.

// switchValues are the values of each switch that are told apart, with what else
// the emulator needs for them before.
var switchValues = map[string][]string{
	"version":        {"version=11080", "version=13040"},
	"piece-mib":      {"piece-mib=32", "piece-mib=4"},
	"holes":          {"holes=fit", "holes=remap"},
	"large":          {"large=pieces", "large=blocks"},
	"reuse":          {"reuse=documented", "reuse=eager"},
	"opportunistic":  {"opportunistic=documented", "opportunistic=lazy"},
	"follow":         {"follow=all", "follow=direct"},
	"trim":           {"trim=passed", "trim=observed"},
	"shrink":         {"shrink=synchronize", "shrink=never"},
	"query":          {"query=nothing", "query=observes"},
	"used":           {"used=live", "used=pending"},
	"ipc-pools":      {"ipc-pools=kept", "ipc-pools=shrink"},
	"pool-max":       {"pool-max=exact", "pool-max=piece", "pool-max=refuses", "pool-max=ignored"},
	"pool-memory":    {"pool-memory=device", "pool-memory=context"},
	"domains":        {"version=13040,domains=1", "version=13040,domains=3"},
	"loading":        {"loading=lazy", "loading=eager"},
	"heap":           {"heap=set", "heap=launch", "heap=use"},
	"graphs":         {"graphs=distinct", "graphs=ordered"},
	"green-mib":      {"green-mib=2", "green-mib=10"},
	"managed-create": {"managed-create=refused", "managed-create=made"},
}

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
	if len(found) < len(switchValues) {
		t.Fatalf("found %d switches in cuda_switch.c, want at least %d", len(found), len(switchValues))
	}
	for _, m := range found {
		name := string(m[1])
		if switchValues[name] == nil && notOfDrivers[name] == "" {
			t.Errorf("testdata/switches.c does not tell the values of %s apart", name)
		}
	}
}

var switchesProgram = sync.OnceValues(func() (string, error) {
	program := filepath.Join(driverDir, "switches") // which goes with the process
	out, err := exec.Command("cc", "-Wall", "-Wno-strict-prototypes", "-o", program, "testdata/switches.c", "-ldl").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("compile the program that asks for switches: %w\n%s", err, out)
	}
	return program, nil
})

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
	for _, name := range slices.Sorted(maps.Keys(switchValues)) {
		for _, value := range switchValues[name] {
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
	for _, name := range slices.Sorted(maps.Keys(switchValues)) {
		t.Run(name, func(t *testing.T) { t.Logf("%s=%s", name, findOut(t, "libcuda.so.1", name, env...)) })
	}
}
