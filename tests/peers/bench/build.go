// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

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
	if err := errors.Join(peers.DevicePlugin.Build(ctx, k), peers.MIGParted.Build(ctx, k), peers.DRADriver.Build(ctx, k)); err != nil {
		return err
	}
	for _, program := range []string{agentName, peerName, peers.DRADriver.Name} {
		if err := unpack(k.Bin(program)); err != nil {
			return fmt.Errorf("unpack %s: %w", program, err)
		}
	}
	return nil
}

// layerWrite is how many bytes of a layer containerd writes at once.
const layerWrite = 32 << 10

// unpack writes a program anew, as containerd unpacks it from a layer of an image. The page cache
// keeps what was written at once in one piece, and the kernel maps a piece whole as soon as a byte of
// it is wanted. Of a linker's large writes these are pieces of 2 MiB. Then all of a program is
// resident, also what it never reads, and no node has it so.
func unpack(path string) (err error) {
	from, err := os.Open(path)
	if err != nil {
		return err
	}
	defer from.Close()
	fresh := path + ".new"
	to, err := os.OpenFile(fresh, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	// Neither file by itself: they would have the kernel copy all at once.
	_, err = io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, make([]byte, layerWrite))
	if err := errors.Join(err, to.Close()); err != nil {
		return err
	}
	return os.Rename(fresh, path)
}
