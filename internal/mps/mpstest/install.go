// SPDX-License-Identifier: Apache-2.0

package mpstest

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// Names of the programs.
const (
	controlName = "nvidia-cuda-mps-control"
	serverName  = "nvidia-cuda-mps-server"
)

// Main runs an emulated program and ends the process, if the test binary was started as one.
func Main() {
	switch filepath.Base(os.Args[0]) {
	case controlName:
		os.Exit(control(os.Args[1:]))
	case serverName:
		os.Exit(server())
	}
}

// Install makes a directory with the emulated programs of a driver.
func Install(t testing.TB, version string) string {
	t.Helper()
	dir := t.TempDir()
	Replace(t, dir, version)
	return dir
}

// Replace puts another driver's programs into the directory of Install. Daemons that run are not
// changed.
func Replace(t testing.TB, dir, version string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	data = append(data, "\x00"+version+"\x00"...) // as NVIDIA's have it among their strings
	for _, name := range []string{controlName, serverName} {
		fresh := filepath.Join(dir, "."+name)
		if err := errors.Join(os.WriteFile(fresh, data, 0o755), os.Rename(fresh, filepath.Join(dir, name))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "version"), []byte(version), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Behaviour is how daemons behave. Its zero value is as NVIDIA's do.
type Behaviour struct {
	// Say has answers that a daemon gives in place of the true ones, by the command's first word.
	Say map[string]string `json:"say,omitempty"`
	// Deaf has commands that change nothing, by their first word.
	Deaf []string `json:"deaf,omitempty"`
	// DieAt has the daemon die of this command, by its first word.
	DieAt string `json:"dieAt,omitempty"`
	// DieAtStart has daemons end before they listen.
	DieAtStart bool `json:"dieAtStart,omitempty"`
	// Mute has daemons answer no command.
	Mute bool `json:"mute,omitempty"`
	// Outlive has servers live on when their daemon is killed.
	Outlive bool `json:"outlive,omitempty"`
	// Sticky has clients stay listed when they are terminated.
	Sticky bool `json:"sticky,omitempty"`
	// Status is what servers are, ACTIVE if empty.
	Status string `json:"status,omitempty"`
}

const behaviourFile = "behaviour.json"

// Set sets how the daemons of a directory of Install behave.
func Set(t testing.TB, dir string, b Behaviour) {
	t.Helper()
	data, err := json.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	fresh := filepath.Join(dir, "."+behaviourFile)
	if err := errors.Join(os.WriteFile(fresh, data, 0o644), os.Rename(fresh, filepath.Join(dir, behaviourFile))); err != nil {
		t.Fatal(err)
	}
}

// here is the directory of the programs that run.
func here() string { return filepath.Dir(os.Args[0]) }

func behaviour() (b Behaviour) {
	data, err := os.ReadFile(filepath.Join(here(), behaviourFile))
	if errors.Is(err, fs.ErrNotExist) {
		return b
	}
	if err == nil {
		err = json.Unmarshal(data, &b)
	}
	if err != nil {
		panic(err)
	}
	return b
}

func version() string {
	data, err := os.ReadFile(filepath.Join(here(), "version"))
	if err != nil {
		panic(err)
	}
	return string(data)
}
