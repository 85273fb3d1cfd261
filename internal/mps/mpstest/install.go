// SPDX-License-Identifier: Apache-2.0

package mpstest

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
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
		exit(control(os.Args[1:]))
	case serverName:
		go endWithTest()
		exit(server())
	}
}

// exit ends the process at once. os.Exit would wait for a second below the race detector.
func exit(code int) { _, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(code), 0, 0) }

// endWithTest ends the process when the test's has ended, also by a panic.
func endWithTest() {
	data, err := os.ReadFile(filepath.Join(here(), "test"))
	if err != nil {
		panic(err)
	}
	test, err := strconv.Atoi(string(data))
	if err != nil {
		panic(err)
	}
	for syscall.Kill(test, 0) == nil {
		time.Sleep(200 * time.Millisecond)
	}
	exit(1)
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
	fresh := filepath.Join(dir, ".fresh")
	if err := program(fresh, version); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{controlName, serverName} {
		link := fresh + name
		if err := errors.Join(os.Link(fresh, link), os.Rename(link, filepath.Join(dir, name))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(fresh); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "version"), []byte(version), 0o644),
		os.WriteFile(filepath.Join(dir, "test"), []byte(strconv.Itoa(os.Getpid())), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// program copies the test binary, with a version as NVIDIA's programs have it among their strings.
func program(path, version string) (err error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := io.Copy(f, self); err != nil {
		return err
	}
	_, err = f.WriteString("\x00" + version + "\x00")
	return err
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
