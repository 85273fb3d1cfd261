// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/pkg/gpu"
)

// The supervisor answers agents at the state directory until it is told to end, and is alone there.
func TestSupervisor(t *testing.T) {
	dir, err := os.MkdirTemp("", "mps") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	line := []string{"mps", "--supervise", "--state-dir", dir, "--driver-root", t.TempDir()}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- within(ctx, console{strings.NewReader(""), &bytes.Buffer{}, &bytes.Buffer{}}, line) }()
	client := mps.NewClient(dir)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if _, err := client.State(t.Context()); err == nil {
			break
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	state, err := client.Sync(t.Context(), []mps.Want{{GPU: "GPU-11111111-2222-3333-4444-555555555555", Percent: 26}})
	if err != nil || len(state.Daemons) != 1 || !errors.Is(state.Daemons[0].Err(), mps.NoProgram) {
		t.Errorf("a driver without MPS: %+v, %v", state, err)
	}
	if _, _, err := execute(t, line...); !errors.Is(err, gpu.ErrInUse) {
		t.Errorf("a second supervisor: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("the supervisor was told to end: %v", err)
	}
}

// The probe says what cuInit answers, and waits for it.
func TestProbe(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to build a library with")
	}
	if os.Getenv("PROBE") != "" {
		out := &bytes.Buffer{}
		if err := within(t.Context(), console{strings.NewReader(""), out, &bytes.Buffer{}}, []string{"mps", "--probe"}); err != nil {
			t.Fatal(err)
		}
		fmt.Print(out)
		return
	}
	dir := t.TempDir()
	source := filepath.Join(dir, "cuda.c")
	if err := os.WriteFile(source, []byte("int cuInit(unsigned flags) { return 805 + (int)flags; }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	probe := func() (string, error) {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestProbe$")
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir, "PROBE=1")
		out, err := cmd.Output()
		return string(out), err
	}
	if said, err := probe(); err == nil {
		t.Errorf("without a library: %q", said)
	}
	if out, err := exec.Command("gcc", "-shared", "-fPIC", "-o", filepath.Join(dir, "libcuda.so.1"), source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if said, err := probe(); err != nil || !strings.HasPrefix(said, "805\n") {
		t.Errorf("%q, %v", said, err)
	}
}

// The supervisor that the first process starts has its flags, and looks for the driver on the host and in the
// driver's container.
func TestSupervisorsFlags(t *testing.T) {
	c := newMPS()
	if err := c.ParseFlags([]string{"--state-dir=/s", "--driver-root", "/host", "--log-level=debug"}); err != nil {
		t.Fatal(err)
	}
	var f mpsFlags
	f.driverRoot, f.stateDir, f.flags = "/host", "/s", c.Flags()
	if got, want := f.again(), []string{"/proc/self/exe", "mps", "--supervise", "--driver-root=/host", "--log-level=debug", "--state-dir=/s"}; !slices.Equal(got, want) {
		t.Errorf("it is started as %q, want %q", got, want)
	}
	o := f.options(nil)
	for _, dir := range []string{"/host", "/host/run/nvidia/driver"} {
		if !slices.Contains(o.Driver.Programs, filepath.Join(dir, "usr/bin")) || !slices.Contains(o.Driver.Libraries, filepath.Join(dir, "usr/lib64")) {
			t.Errorf("it does not look below %s: %+v", dir, o.Driver)
		}
	}
	f.driverRoot = "/"
	if o := f.options(nil); o.Driver.Libraries != nil || o.Siblings {
		t.Errorf("on the host itself: %+v", o)
	}
	if f.supervise = true; !f.options(nil).Siblings {
		t.Error("the daemons of a supervisor are not children of the first process")
	}
}
