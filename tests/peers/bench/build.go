// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"example.com/gpu-agent/tests/lab"
)

const (
	peerName    = "nvidia-device-plugin"
	peerVersion = "v0.19.0"
	peerModule  = "tests/peers/nvidia-device-plugin"
	peerPackage = "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin"
)

// libraries is where the emulated driver's libraries are built.
func libraries(k *lab.Kit) string { return filepath.Join(k.Cache, "emulator", "driver") }

// build makes everything that is run, into the cache. The agent is made as it
// is shipped.
func build(ctx context.Context, k *lab.Kit) error {
	if err := k.Run(ctx, "make", "--no-print-directory", "-s", "build", "CACHE="+k.Cache); err != nil {
		return fmt.Errorf("build the agent: %w", err)
	}
	if err := k.Run(ctx, "env", "CGO_ENABLED=0", "go", "build", "-buildvcs=false", "-o", k.Bin("gpu-emulator"), "./tests/emulator/cmd/gpu-emulator"); err != nil {
		return fmt.Errorf("build the emulated driver: %w", err)
	}
	if err := k.Run(ctx, k.Bin("gpu-emulator"), "build", "--out", libraries(k)); err != nil {
		return fmt.Errorf("build the emulated driver's libraries: %w", err)
	}
	if err := k.Run(ctx, "gcc", "-std=gnu17", "-O2", "-Wall", "-Wextra", "-Werror", "-o", k.Bin(timingName), "tests/peers/bench/c/timing.c", "-ldl"); err != nil {
		return fmt.Errorf("build the program that times calls: %w", err)
	}
	return buildPeer(ctx, k)
}

// buildPeer makes NVIDIA's plugin if it is not there as its module says it.
func buildPeer(ctx context.Context, k *lab.Kit) error {
	flags := []string{"-buildvcs=false", "-trimpath", "-ldflags=-s -w"}
	h := sha256.New()
	fmt.Fprintf(h, "%s %s %q\n", runtime.Version(), runtime.GOARCH, flags)
	for _, name := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(filepath.Join(k.Root, peerModule, name))
		if err != nil {
			return fmt.Errorf("build %s: %w", peerName, err)
		}
		fmt.Fprintf(h, "%s %x\n", name, sha256.Sum256(data))
	}
	stamp := fmt.Sprintf("%x\n", h.Sum(nil))
	stampFile := filepath.Join(k.Cache, "bin", ".stamps", peerName)
	if have, err := os.ReadFile(stampFile); err == nil && string(have) == stamp {
		if _, err := os.Stat(k.Bin(peerName)); err == nil {
			return nil
		}
	}
	if err := os.Remove(stampFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("build %s: %w", peerName, err)
	}
	args := append([]string{"CGO_ENABLED=1", "go", "-C", peerModule, "build", "-o", k.Bin(peerName)}, flags...)
	if err := k.Run(ctx, "env", append(args, peerPackage)...); err != nil {
		return fmt.Errorf("build %s %s: %w", peerName, peerVersion, err)
	}
	if err := os.MkdirAll(filepath.Dir(stampFile), 0o755); err != nil {
		return fmt.Errorf("build %s: %w", peerName, err)
	}
	return os.WriteFile(stampFile, []byte(stamp), 0o644)
}
