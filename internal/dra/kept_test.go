// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/state"
)

// The references of claims in what earlier versions have recorded (tests/formats) are read whole.
func TestReferencesOfEarlierVersions(t *testing.T) {
	folders, err := filepath.Glob("../../tests/formats/testdata/v*/state")
	if err != nil || len(folders) == 0 {
		t.Fatalf("find what versions have recorded: %v", err)
	}
	for _, folder := range folders {
		copied := filepath.Join(t.TempDir(), "state")
		if err := os.CopyFS(copied, os.DirFS(folder)); err != nil {
			t.Fatal(err)
		}
		store, err := state.Open(copied, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		claims := 0
		for _, a := range store.Allocations() {
			if a.Owner != ledger.DRA {
				continue
			}
			claims++
			s, err := readShare(a.Key, a.Ref, a.Grants)
			if err != nil || s.Namespace != "work" || s.Name != "claim" || s.Request != "gpu" || s.Of != 1 ||
				s.Pool != "node/card" || s.Device != "gpu-0" || s.Share == "" || !s.Admin {
				t.Errorf("%s: the reference %s is read as %+v, %v", folder, a.Ref, s, err)
			}
		}
		if claims == 0 {
			t.Errorf("%s has no claim", folder)
		}
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	}
}
