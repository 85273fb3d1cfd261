// SPDX-License-Identifier: Apache-2.0

package mpstest

import (
	"os"
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
	Replace(t, dir, version)
	if err := mps.Until(dir, os.Getpid()); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Replace puts another driver's programs into the directory of Install. Daemons that run are not
// changed.
func Replace(t testing.TB, dir, version string) {
	t.Helper()
	if err := mps.Lay(dir, version); err != nil {
		t.Fatal(err)
	}
}

// Set sets how the daemons of a directory of Install behave.
func Set(t testing.TB, dir string, b Behaviour) {
	t.Helper()
	if err := mps.Behave(dir, b); err != nil {
		t.Fatal(err)
	}
}
