// SPDX-License-Identifier: Apache-2.0

package mpstest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"example.com/gpu-agent/tests/emulator/mps"
)

// Behaviour is how daemons behave. Client is this process as an emulated client.
type (
	Behaviour = mps.Behaviour
	Client    = mps.Client
)

// Main runs an emulated program and ends the process, if the test binary was started as one.
func Main() { mps.Main() }

// Connect makes this process a client, by a directory as containers get it.
func Connect(pipe string) (*Client, error) { return mps.Connect(pipe) }

// Install makes a directory with the emulated programs of a driver. They end with the test.
func Install(t testing.TB, version string) string {
	t.Helper()
	dir := t.TempDir()
	InstallAt(t, dir, version)
	return dir
}

// InstallAt is Install with a directory of the caller's.
func InstallAt(t testing.TB, dir, version string) {
	t.Helper()
	Replace(t, dir, version)
	if err := mps.Until(dir, os.Getpid()); err != nil {
		t.Fatal(err)
	}
}

// Replace puts another driver's programs into the directory of Install. Daemons that run are not
// changed.
func Replace(t testing.TB, dir, version string) {
	t.Helper()
	if !plainly() {
		if err := mps.Lay(dir, version); err != nil {
			t.Fatal(err)
		}
		return
	}
	program, err := built()
	if err == nil {
		err = mps.LayProgram(dir, version, fmt.Sprintf("/proc/self/fd/%d", program.Fd()))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// plainly reports whether the programs are built apart from the test binary. What they cost is mostly that
// they are started, and a large test binary takes three times as long for that, one with the race detector
// twenty times. An emulated processor cannot build, so on all others the programs are the test binary.
func plainly() bool { return runtime.GOARCH == "amd64" }

// programs is the package of the program that is all of MPS's programs.
const programs = "example.com/gpu-agent/tests/emulator/mps/programs"

// built builds the programs, without the race detector. Its file has no name any more, so that nothing of it is
// left behind.
var built = sync.OnceValues(func() (*os.File, error) {
	dir, err := os.MkdirTemp("", "mpstest")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "programs")
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", path, programs)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the emulated programs of MPS: %w\n%s", err, out)
	}
	return os.Open(path)
})

// Set sets how the daemons of a directory of Install behave.
func Set(t testing.TB, dir string, b Behaviour) {
	t.Helper()
	if err := mps.Behave(dir, b); err != nil {
		t.Fatal(err)
	}
}
