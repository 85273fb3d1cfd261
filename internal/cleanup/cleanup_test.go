// SPDX-License-Identifier: Apache-2.0

package cleanup

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"example.com/gpu-agent/internal/node"
)

// Where nobody can say who holds devices, everything stays, and it is said once
// however often it is tried.
func TestUnknownHoldersKeepEverything(t *testing.T) {
	root := t.TempDir()
	n := Node{KubeletDir: filepath.Join(root, "kubelet"), CDIDir: filepath.Join(root, "cdi"), StateDir: filepath.Join(root, "state"),
		NFDDir: filepath.Join(root, "nfd"), Domain: "example.com", ResourceDomain: "example.com",
		Object: func(context.Context) error { t.Error("the Node object is touched"); return nil }}
	files := []string{filepath.Join(n.CDIDir, "example.com-gpu-0123456789abcdef.json"), filepath.Join(n.StateDir, "state.json")}
	for _, f := range files {
		if err := errors.Join(os.MkdirAll(filepath.Dir(f), 0o700), os.WriteFile(f, []byte("{}"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*retry/2)
		defer cancel()
		n.Runtime = node.NewRuntime(node.RuntimeOptions{Root: root, Logger: slog.New(slog.DiscardHandler)})
		defer n.Runtime.Close()
		said := 0
		if err := n.Wait(ctx, func(error) { said++ }); err == nil || said != 1 {
			t.Errorf("%v, said %d times", err, said)
		}
	})
	for _, f := range files {
		if _, err := os.Stat(f); err != nil {
			t.Error(err)
		}
	}
}
