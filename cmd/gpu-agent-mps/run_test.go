// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/mps/mpstest"
	"example.com/gpu-agent/pkg/gpu"
)

// TestMain is also the emulated programs of MPS, which are this binary, and the probe.
func TestMain(m *testing.M) {
	mpstest.Main()
	if os.Getenv(probeVariable) != "" {
		if err := within(context.Background(), os.Stdout, []string{probeCommand}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// probeVariable has a process of this binary be the probe.
const probeVariable = "GPU_TESTS_PROBE"

// stateDir makes a state directory: a socket's path is short.
func stateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "mps")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// until waits until something is so, with what is otherwise for the failure.
func until(t *testing.T, so func() (any, bool)) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if is, ok := so(); ok {
			return
		} else if time.Now().After(end) {
			t.Fatal(is)
		}
	}
}

// The supervisor answers agents at the state directory until it is told to end, and is alone there.
func TestSupervise(t *testing.T) {
	dir := stateDir(t)
	line := []string{superviseCommand, "--state-dir", dir, "--driver-root", t.TempDir()}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- within(ctx, io.Discard, line) }()
	client := mps.NewClient(dir)
	until(t, func() (any, bool) {
		_, err := client.State(t.Context())
		return err, err == nil
	})
	state, err := client.Sync(t.Context(), []mps.Want{{GPU: "GPU-11111111-2222-3333-4444-555555555555", Percent: 26}})
	if err != nil || len(state.Daemons) != 1 || !errors.Is(state.Daemons[0].Err(), mps.NoProgram) {
		t.Errorf("a driver without MPS: %+v, %v", state, err)
	}
	if err := within(t.Context(), io.Discard, line); !errors.Is(err, gpu.ErrInUse) {
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
	dir := t.TempDir()
	source := filepath.Join(dir, "cuda.c")
	if err := os.WriteFile(source, []byte("int cuInit(unsigned flags) { return 805 + (int)flags; }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	probe := func() (string, error) {
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+dir, probeVariable+"=1")
		out, err := cmd.Output()
		return string(out), err
	}
	if said, err := probe(); err == nil {
		t.Errorf("without a library: %q", said)
	}
	cc := strings.Fields(cmp.Or(os.Getenv("CC"), "gcc")) // of what this test is built for
	if out, err := exec.Command(cc[0], append(cc[1:], "-shared", "-fPIC", "-o", filepath.Join(dir, "libcuda.so.1"), source)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if said, err := probe(); err != nil || said != "805\n" {
		t.Errorf("%q, %v", said, err)
	}
}

// The supervisor that the first process starts has its flags, and starts the probe of this program.
func TestSupervisorsFlags(t *testing.T) {
	var f daemonFlags
	f.register(pflag.NewFlagSet(name, pflag.ContinueOnError))
	if err := f.flags.Parse([]string{"--state-dir=/s", "--driver-root", "/host", "--log-level=debug"}); err != nil {
		t.Fatal(err)
	}
	if got, want := f.again(), []string{self, superviseCommand, "--driver-root=/host", "--log-level=debug", "--state-dir=/s"}; !slices.Equal(got, want) {
		t.Errorf("it is started as %q, want %q", got, want)
	}
	o := f.options(true, nil)
	if o.StateDir != "/s" || !o.Siblings || !slices.Contains(o.Driver.Programs, "/host/usr/bin") || !slices.Equal(o.Probe, []string{self, probeCommand}) {
		t.Errorf("its options are %+v", o)
	}
	if f.options(false, nil).Siblings {
		t.Error("the daemons that the first process ends are said to be its parent's children")
	}
}

// Limits of what the node pays for the daemons.
const (
	nodesGPUs    = 8
	mostResident = 15_000_000 // bytes of the supervisor's memory, pages of its program's file included
)

// An idle supervisor of a whole node's daemons has little memory. The first process has less.
func TestResident(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the limit is of amd64; an emulated processor's memory is its emulator's, too")
	}
	program := filepath.Join(t.TempDir(), name)
	build := exec.Command("go", "build", "-trimpath", "-tags", "netgo,osusergo", "-ldflags", "-s -w", "-o", program, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	dir, driver := stateDir(t), t.TempDir()
	mpstest.InstallAt(t, filepath.Join(driver, "usr/bin"), "555.58.02")
	// The real programs are linked with the driver's library.
	libraries := filepath.Join(driver, "usr/lib64")
	if err := errors.Join(os.MkdirAll(libraries, 0o755), os.WriteFile(filepath.Join(libraries, "libcuda.so.1"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	first := exec.Command(program, "run", "--state-dir", dir, "--driver-root", driver)
	first.Stdout, first.Stderr = t.Output(), t.Output()
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(first.Process.Signal(os.Interrupt), first.Wait()); err != nil {
			t.Error(err)
		}
	})
	var wants []mps.Want
	for i := range nodesGPUs {
		wants = append(wants, mps.Want{GPU: gpu.UUID(fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i)), Percent: 26, Serve: true})
	}
	client := mps.NewClient(dir)
	until(t, func() (any, bool) {
		state, err := client.Sync(t.Context(), wants)
		serving := 0
		for _, d := range state.Daemons {
			if d.Serving && d.Err() == nil {
				serving++
			}
		}
		return fmt.Sprintf("%+v, %v", state, err), err == nil && serving == nodesGPUs
	})
	for range 5 { // as an agent asks; each answer comes after a round of all keepers
		if _, err := client.Sync(t.Context(), wants); err != nil {
			t.Fatal(err)
		}
	}
	for who, pid := range map[string]int{"supervisor": childOf(t, first.Process.Pid, superviseCommand), "first process": first.Process.Pid} {
		total, own := resident(t, pid)
		t.Logf("%s: %.1f MB resident, %.1f MB of it its own", who, float64(total)/1e6, float64(own)/1e6)
		if total > mostResident {
			t.Errorf("the %s has %.1f MB resident, and it is to have %.1f at most: see what was linked (go list -deps ./cmd/%s), "+
				"and what it holds", who, float64(total)/1e6, float64(mostResident)/1e6, name)
		}
	}
}

// childOf returns the child of a process that runs a command of this program.
func childOf(t *testing.T, parent int, command string) int {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent)) // each thread has its own
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		for word := range strings.FieldsSeq(string(text)) {
			line, err := os.ReadFile(filepath.Join("/proc", word, "cmdline"))
			var pid int
			if args := strings.Split(string(line), "\x00"); err == nil && len(args) > 1 && args[1] == command {
				if _, err := fmt.Sscan(word, &pid); err == nil {
					return pid
				}
			}
		}
	}
	t.Fatalf("process %d has no child that runs %s", parent, command)
	return 0
}

// resident returns the memory of a process in bytes: all that is resident, and what is its own of that.
func resident(t *testing.T, pid int) (total, own int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		for key, to := range map[string]*int{"VmRSS:": &total, "RssAnon:": &own} {
			if rest, ok := strings.CutPrefix(line, key); ok {
				if _, err := fmt.Sscan(rest, to); err != nil {
					t.Fatalf("%s: %v", line, err)
				}
				*to <<= 10
			}
		}
	}
	if total == 0 || own == 0 {
		t.Fatalf("process %d: %s", pid, text)
	}
	return total, own
}
