// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"example.com/gpu-agent/tests/emulator/lib"
)

// Keep builds programs into the project's cache, unless they are there, and
// returns their folder. Each of sources has its files in a folder c; all of them
// lie in src when build is called, which makes the programs in dir.
func Keep(ctx context.Context, name string, build func(ctx context.Context, src, dir string) error, sources ...fs.FS) (string, error) {
	version, err := lib.GCC(ctx, "", "--version")
	if err != nil {
		return "", err
	}
	src, err := os.MkdirTemp("", name+"-")
	if err != nil {
		return "", fmt.Errorf("build %s: %w", name, err)
	}
	defer os.RemoveAll(src)
	h := sha256.New()
	fmt.Fprintf(h, "%s%q%q", version, Flags, objects)
	for _, from := range sources {
		names, err := fs.Glob(from, "c/*")
		if err != nil {
			return "", err
		}
		for _, file := range names {
			data, err := fs.ReadFile(from, file)
			if err == nil {
				err = os.WriteFile(filepath.Join(src, path.Base(file)), data, 0o644)
			}
			if err != nil {
				return "", fmt.Errorf("build %s: %w", name, err)
			}
			fmt.Fprintf(h, "%s %d\n%s", file, len(data), data)
		}
	}
	return lib.Once(ctx, "memcap", name+"-"+hex.EncodeToString(h.Sum(nil))[:16], func(ctx context.Context, dir string) error { return build(ctx, src, dir) })
}

// GCC compiles with Flags, in a folder.
func GCC(ctx context.Context, dir string, args ...string) error {
	_, err := lib.GCC(ctx, dir, append(append([]string{}, Flags...), args...)...)
	return err
}
