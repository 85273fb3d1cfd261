// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

var (
	all   = flag.Bool("all", false, "run all tests of each package, not a part")
	peers = flag.Bool("peers", false, "run those of tests/peers, too, which takes a build of its own")
)

// packages are those whose tests load the emulated driver, with the part of each
// that shows whether it is the one that they see.
var packages = []struct{ path, part string }{
	{"./tests/emulator/lib", "^(TestInventory|TestLostGPU|TestGPUsComeAndGo|TestCUDAVisibleDevices|TestCUDAChoosesAMIGDevice)$"},
	{"./tests/emulator/install", "."},
	{"./tests/emulator/daemon", "."},
	{"./tests/emulator/cmd/gpu-emulator", "."},
	{"./tests/hardware", "^(TestEmulated|TestInventoryIsTheWorld|TestPartsOfADriverElsewhere|TestClaimGolden)$/^(8xH100-80GB|2xA100-SXM4-40GB,MIG)?$"},
	{"./tests/recorded", "."},
	{"./tests/peers", "^(TestLabelsOfGPUFeatureDiscovery|TestExport|TestBusyInstanceFailsAChangeHalfway)$"},
	{"./pkg/gpu/nvml", "^(TestHealth|TestUnplugAndPlug|TestLossIsNamed)$"},
	{"./internal/guard", "^TestLimiter$"},
}

// inside is set for the process that becomes `go test` on the other machine; it
// names a directory for what is laid.
const inside = "GPU_TESTS_FOREIGN"

func TestMain(m *testing.M) {
	if dir := os.Getenv(inside); dir != "" {
		fmt.Fprintln(os.Stderr, "make the other machine:", become(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// become makes this process's mount namespace the other machine's, and runs its
// arguments there. It returns only with an error.
func become(dir string) error {
	if err := lay(dir); err != nil {
		return err
	}
	program, err := exec.LookPath("go")
	if err != nil {
		return err
	}
	os.Unsetenv(inside)
	return syscall.Exec(program, append([]string{"go"}, os.Args[1:]...), os.Environ())
}

// A control node of a real driver made the emulated library hide its GPUs: 411
// tests failed on machines that have one.
func TestOnAMachineWithARealDriver(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skipf("needs root, for a mount namespace and device nodes; this is user %d", os.Geteuid())
	}
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		t.Skip("this machine has a real driver: run the packages' own tests")
	}
	poisoned := poison(t)
	for _, p := range packages {
		if p.path == "./tests/peers" && !*peers {
			continue
		}
		t.Run(strings.TrimPrefix(p.path, "./"), func(t *testing.T) {
			part := p.part
			if *all {
				part = "."
			}
			// What the loaded libraries print goes to the same place as the results.
			cmd := exec.CommandContext(t.Context(), os.Args[0], "test", "-count=1", "-json", "-run="+part, p.path)
			cmd.Dir = "../.."
			cmd.Env = append(os.Environ(), inside+"="+poisoned)
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
			runtime.LockOSThread() // the parent whose death ends it is a thread
			defer runtime.UnlockOSThread()
			out, err := cmd.CombinedOutput()
			passed := count(t, out)
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if err != nil || passed == 0 {
				t.Errorf("%v, %d tests passed", err, passed)
			}
			t.Logf("%d tests passed", passed)
		})
	}
}

// count says how many tests passed, and shows those that did not, with what they
// printed.
func count(t *testing.T, out []byte) (passed int) {
	t.Helper()
	said := map[string]*strings.Builder{}
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e struct{ Action, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			t.Log(lines.Text()) // of a program, or of a build that failed
			continue
		}
		if said[e.Test] == nil {
			said[e.Test] = new(strings.Builder)
		}
		switch e.Action {
		case "output", "build-output":
			said[e.Test].WriteString(e.Output)
		case "fail":
			t.Errorf("%s failed:\n%.2000s", e.Test, said[e.Test])
		case "pass":
			if e.Test != "" {
				passed++
			}
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return passed
}

// poison is a directory with a library that ends the program which loads it.
func poison(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	source := filepath.Join(dir, "poison.c")
	if err := os.WriteFile(source, []byte(`#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) {
    fprintf(stderr, "a library of the machine's own NVIDIA driver is loaded\n");
    _exit(99);
}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "gcc", "-shared", "-fPIC", "-o", filepath.Join(dir, library), source).CombinedOutput()
	if err != nil {
		t.Fatalf("build a library: %v\n%s", err, out)
	}
	return dir
}
