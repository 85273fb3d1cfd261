// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/peers"
)

var peerName, peerVersion = peers.DevicePlugin.Name, peers.DevicePlugin.Version

// build makes everything that is run, into the cache. The agent is made as it
// is shipped.
func build(ctx context.Context, k *lab.Kit) error {
	if err := k.Run(ctx, "make", "--no-print-directory", "-s", "build", "CACHE="+k.Cache); err != nil {
		return fmt.Errorf("build the agent: %w", err)
	}
	if err := k.Run(ctx, "env", "CGO_ENABLED=0", "go", "build", "-buildvcs=false", "-o", k.Bin("gpu-emulator"), "./tests/emulator/cmd/gpu-emulator"); err != nil {
		return fmt.Errorf("build the emulated driver: %w", err)
	}
	if _, err := emulib.Cached(ctx); err != nil {
		return fmt.Errorf("build the emulated driver's libraries: %w", err)
	}
	if err := k.Run(ctx, "gcc", "-std=gnu17", "-O2", "-Wall", "-Wextra", "-Werror", "-o", k.Bin(timingName), "tests/peers/bench/c/timing.c", "-ldl"); err != nil {
		return fmt.Errorf("build the program that times calls: %w", err)
	}
	// The real API server, for claims.
	if err := k.Run(ctx, "go", "-C", "tests/cluster", "build", "-buildvcs=false", "-o", k.Bin("cluster"), "."); err != nil {
		return fmt.Errorf("build the program that builds Kubernetes: %w", err)
	}
	if err := k.Run(ctx, k.Bin("cluster"), "build"); err != nil {
		return fmt.Errorf("build Kubernetes: %w", err)
	}
	return errors.Join(peers.DevicePlugin.Build(ctx, k), peers.MIGParted.Build(ctx, k), peers.DRADriver.Build(ctx, k))
}
