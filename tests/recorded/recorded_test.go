// SPDX-License-Identifier: Apache-2.0

package recorded

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
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

var update = flag.Bool("update", false, "write the recorded inventories anew")

const testdata = "../testdata"

// TestRecorded holds the recorded inventories against what the driver edge reads
// of the same nodes today. Only the names of holders are added here, since no
// driver knows pods.
func TestRecorded(t *testing.T) {
	dir, err := install.Scratch()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, r := range Machines {
		t.Run(r.File, func(t *testing.T) {
			var got bytes.Buffer
			w, d := emulate(t, dir, r.Spec)
			holders := furnish(t, w, r.Instances)
			for _, i := range r.Pending {
				if err := d.SetMIGMode(t.Context(), reading(t, d).GPUs[i].UUID, true); err != nil {
					t.Fatal(err)
				}
			}
			inv := reading(t, d)
			for i := range inv.GPUs {
				for j := range inv.GPUs[i].MIG.Instances {
					in := &inv.GPUs[i].MIG.Instances[j]
					in.Holder = holders[seat{i, in.GI, in.CI}]
				}
			}
			enc := json.NewEncoder(&got)
			enc.SetIndent("", "  ")
			if err := enc.Encode(inv); err != nil {
				t.Fatal(err)
			}
			if _, err := config.ReadInventory(got.Bytes()); err != nil {
				t.Error(err)
			}
			path := filepath.Join(testdata, r.File)
			if *update {
				if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil { //nolint:gosec // it is part of the source
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got.String()); diff != "" {
				t.Errorf("%s, -want +got (-update writes it anew):\n%s", path, diff)
			}
		})
	}
}

// seat is a compute instance.
type seat struct{ gpu, gi, ci int }

// furnish makes instances as Machines has them, and says who holds which.
func furnish(t *testing.T, w *emulator.World, on map[int]string) map[seat]string {
	t.Helper()
	holders := map[seat]string{}
	for _, i := range slices.Sorted(maps.Keys(on)) {
		for _, word := range strings.Fields(on[i]) {
			word, holder, _ := strings.Cut(word, "!")
			word, empty := strings.CutPrefix(word, "-")
			profile, at, _ := strings.Cut(word, "@")
			start, err := strconv.Atoi(at)
			if err != nil {
				t.Fatal(err)
			}
			if err := w.CreateInstance(i, profile, start, empty); err != nil {
				t.Fatal(err)
			}
			if holder == "" {
				continue
			}
			var s seat
			for _, gi := range w.State().GPUs[i].MIG.Instances {
				if gi.Start == start {
					s = seat{i, gi.ID, gi.Compute[len(gi.Compute)-1].ID} // the newest
				}
			}
			if err := w.AddProcess(emulator.Process{PID: os.Getpid(), GPU: i, GI: s.gi, CI: s.ci, Kind: emulator.Compute, MiB: 1024}); err != nil {
				t.Fatal(err)
			}
			holders[s] = holder
		}
	}
	return holders
}

func reading(t *testing.T, d *nvml.Driver) *gpu.Inventory {
	t.Helper()
	inv, err := d.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return &inv
}

var built = sync.OnceValues(func() (string, error) { return lib.Cached(context.Background()) })

// emulate installs an emulated driver of these GPUs in dir, serves it until the
// test's end and opens it. The process can be bound to one library only, so dir
// is the same for all.
func emulate(t *testing.T, dir string, spec emulator.Spec) (*emulator.World, *nvml.Driver) {
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
	libraries, err := built()
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
	return w, d
}
