// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files and the recorded inventories anew")

// recordings are the nodes whose inventories stand under tests/testdata.
var recordings = []struct {
	file string
	spec emulator.Spec
}{
	{"a100-40.json", emulator.Spec{Seed: "a100-40", Model: "A100-SXM4-40GB", Count: 8}},
	{"a100-80.json", emulator.Spec{Seed: "a100-80", Model: "A100-SXM4-80GB", Count: 8}},
	{"a30.json", emulator.Spec{Seed: "a30", Model: "A30", Count: 4}},
	{"h100-80.json", emulator.Spec{Seed: "h100-80", Model: "H100-80GB", Count: 8}},
	{"h200.json", emulator.Spec{Seed: "h200", Model: "H200-141GB", Count: 8}},
	{"b200.json", emulator.Spec{Seed: "b200", Model: "B200", Count: 8}},
	{"rtx-pro-6000.json", emulator.Spec{Seed: "rtx-pro-6000", Model: "RTX-PRO-6000", Count: 8}},
}

const testdata = "../../tests/testdata"

// TestRecordedInventories holds the recorded inventories against what
// `gpu-agent inventory -o json` prints of the same nodes today, so that they
// stay in step with the schema:
//
//	go test -run TestRecordedInventories ./cmd/gpu-agent -update
//
// writes them anew. They are read off the emulated driver through the driver
// edge: what the real one says of these cards stands in the emulator's tables.
func TestRecordedInventories(t *testing.T) {
	dir := t.TempDir()
	for _, r := range recordings {
		t.Run(r.file, func(t *testing.T) {
			var got bytes.Buffer
			if err := printJSON(&got, record(t, dir, r.spec)); err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join(testdata, r.file), got.Bytes())
			if _, err := config.ReadInventory(got.Bytes()); err != nil {
				t.Error(err)
			}
		})
	}
}

// golden compares with a file, or writes it.
func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil { //nolint:gosec // it is part of the source
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s, -want +got (go test -update writes it anew):\n%s", path, diff)
	}
}

// record installs an emulated driver of these GPUs in dir and reads it. The
// process can be bound to one library only, so dir is the same for all.
func record(t *testing.T, dir string, spec emulator.Spec) *gpu.Inventory {
	t.Helper()
	try := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skipf("skipped: the emulated driver's libraries need gcc: %v", err)
	}
	libraries, err := lib.Cached(t.Context())
	try(err)
	dir, err = filepath.EvalSymlinks(dir)
	try(err)
	w, err := emulator.New(spec)
	try(err)
	dev := filepath.Join(dir, "dev")
	for _, d := range []string{"dev", "sys", "proc"} {
		try(os.RemoveAll(filepath.Join(dir, d)))
	}
	try(install.Driver(dir, libraries, w))
	err = install.Nodes(dev, w)
	if errors.Is(err, os.ErrPermission) {
		t.Skipf("skipped: making device nodes needs CAP_MKNOD: %v", err)
	}
	try(err)
	try(install.Kernel(dir, "Character devices:\n", w))
	try(install.Machine{Driver: dir, Dev: dev, Kernel: dir}.Save())
	l, err := daemon.Listen(filepath.Join(dir, install.Socket))
	try(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func(l *net.UnixListener) {
		ended <- (&daemon.Server{World: w, Driver: dir}).Serve(ctx, l)
	}(l)
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		_ = l.Close() // the server does too, not always before it ends
	})
	d, err := nvml.Open(t.Context(), nvml.Options{
		DriverRoot: dir, SysRoot: filepath.Join(dir, "sys"), ProcRoot: filepath.Join(dir, "proc"),
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	try(err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	inv, err := d.Inventory(t.Context())
	try(err)
	return &inv
}
