// SPDX-License-Identifier: Apache-2.0

package peers

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

// Peer is a program of the field, built from a module of its own below this
// folder, which has the program's name.
type Peer struct {
	Name, Version, Package string
}

// The peers.
var (
	DevicePlugin = Peer{"nvidia-device-plugin", "v0.19.3", "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin"}
	MIGParted    = Peer{"nvidia-mig-parted", "v0.13.1", "github.com/NVIDIA/mig-parted/cmd/nvidia-mig-parted"}

	DRADriver = Peer{"nvidia-dra-driver", "v0.4.1", "sigs.k8s.io/dra-driver-nvidia-gpu/cmd/gpu-kubelet-plugin"}

	GPUFeatureDiscovery  = Peer{"gpu-feature-discovery", "v0.19.3", "github.com/NVIDIA/k8s-device-plugin/cmd/gpu-feature-discovery"}
	NodeFeatureDiscovery = Peer{"node-feature-discovery", "v0.18.3", "."}
)

func (p Peer) module() string { return filepath.Join("tests/peers", p.Name) }

// Build makes the program in the kit's cache, if it is not there as its module
// says it.
func (p Peer) Build(ctx context.Context, k *lab.Kit) error {
	flags := []string{"-buildvcs=false", "-trimpath", "-ldflags=-s -w"}
	h := sha256.New()
	fmt.Fprintf(h, "%s %s %q\n", runtime.Version(), runtime.GOARCH, flags)
	for _, name := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(filepath.Join(k.Root, p.module(), name))
		if err != nil {
			return fmt.Errorf("build %s: %w", p.Name, err)
		}
		fmt.Fprintf(h, "%s %x\n", name, sha256.Sum256(data))
	}
	stamp := fmt.Sprintf("%x\n", h.Sum(nil))
	stampFile := filepath.Join(k.Cache, "bin", ".stamps", p.Name)
	if have, err := os.ReadFile(stampFile); err == nil && string(have) == stamp {
		if _, err := os.Stat(k.Bin(p.Name)); err == nil {
			return nil
		}
	}
	if err := os.Remove(stampFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("build %s: %w", p.Name, err)
	}
	args := append([]string{"CGO_ENABLED=1", "go", "-C", p.module(), "build", "-o", k.Bin(p.Name)}, flags...)
	if err := k.Run(ctx, "env", append(args, p.Package)...); err != nil {
		return fmt.Errorf("build %s %s: %w", p.Name, p.Version, err)
	}
	if err := os.MkdirAll(filepath.Dir(stampFile), 0o755); err != nil {
		return fmt.Errorf("build %s: %w", p.Name, err)
	}
	return os.WriteFile(stampFile, []byte(stamp), 0o644)
}
