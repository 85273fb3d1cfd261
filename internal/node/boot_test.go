// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestBootID(t *testing.T) {
	id, err := BootID("/proc")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := BootID("/proc"); err != nil || again != id || len(id) != 36 {
		t.Errorf("%q, then %q, %v", id, again, err)
	}
	root := t.TempDir()
	if _, err := BootID(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want an error of an absent file", err)
	}
	must(t, os.MkdirAll(filepath.Join(root, "sys/kernel/random"), 0o755))
	path := filepath.Join(root, "sys/kernel/random/boot_id")
	for _, broken := range []string{"", "\n", "not-a-boot-id", "------------------------------------x", string(make([]byte, 1<<20))} {
		write(t, path, broken)
		if _, err := BootID(root); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%.20q: %v, want gpu.ErrInvalid", broken, err)
		}
	}
	write(t, path, "7b1f6d0e-2f0b-4f7e-9a86-0c6f2b9d7c11\n")
	if id, err := BootID(root); err != nil || id != "7b1f6d0e-2f0b-4f7e-9a86-0c6f2b9d7c11" {
		t.Errorf("%q, %v", id, err)
	}
}
