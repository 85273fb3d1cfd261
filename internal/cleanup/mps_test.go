// SPDX-License-Identifier: Apache-2.0

package cleanup

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
)

// The GPUs that the last agent had laid out for MPS are freed, and no others. What ends the daemons may
// refuse: then everything stays.
func TestMPSIsEnded(t *testing.T) {
	root := t.TempDir()
	n := Node{KubeletDir: filepath.Join(root, "kubelet"), CDIDir: filepath.Join(root, "cdi"), StateDir: filepath.Join(root, "state"),
		NFDDir: filepath.Join(root, "nfd"), Domain: "example.com", ResourceDomain: "example.com"}
	n.beside(t, root)
	store, err := state.Open(n.StateDir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	layout := func(u gpu.UUID, mps bool) state.Layout {
		l := plan.Divided(piece.Division{Kind: piece.KindUnits, N: 4, Unit: 1024})
		l.Compute = compute.Sharing{MPS: mps}
		return state.Layout{GPU: u, Past: plan.Past{Layout: l}}
	}
	if err := errors.Join(store.Save(state.Document{Layouts: []state.Layout{layout("GPU-1", true), layout("GPU-2", false)}}), store.Close()); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(n.StateDir, "mps")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "lock"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	busy := errors.New("a supervisor runs")
	n.MPS = func(context.Context, []gpu.UUID) error { return busy }
	if err := n.Run(t.Context()); !errors.Is(err, busy) {
		t.Errorf("while a supervisor runs: %v", err)
	}
	if _, err := os.Stat(filepath.Join(n.StateDir, "state.json")); err != nil {
		t.Errorf("the state is gone: %v", err)
	}
	var freed []gpu.UUID
	n.MPS = func(_ context.Context, gpus []gpu.UUID) error { freed = gpus; return nil }
	if err := n.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if want := []gpu.UUID{"GPU-1"}; !slices.Equal(freed, want) {
		t.Errorf("freed are %v, want %v", freed, want)
	}
	if _, err := os.Stat(n.StateDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the state directory is left: %v", err)
	}
}
