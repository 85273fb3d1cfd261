// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
)

const here = "example.com/gpu-agent/tests/hardware"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: kit FOLDER")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := build(ctx, os.Args[1])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kit:", err)
		os.Exit(1)
	}
}

// suite is what the suite of tests/hardware needs beside itself: programs of its testdata.
var suite = []string{"hold", "caps", "switches"}

// build makes the folder, or makes it anew.
func build(ctx context.Context, dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	of := filepath.Join(dir, "suite")
	if err := os.MkdirAll(of, 0o755); err != nil {
		return fmt.Errorf("make the folder: %w", err)
	}
	const small = "-ldflags=-s -w"
	if _, err := command(ctx, "go", "build", small, "-o", filepath.Join(dir, "run"), here+"/run"); err != nil {
		return err
	}
	if _, err := command(ctx, "go", "test", "-c", small, "-o", filepath.Join(of, "hardware.test"), here); err != nil {
		return err
	}
	root, err := command(ctx, "go", "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return err
	}
	sources := filepath.Join(strings.TrimSpace(root), "tests/hardware")
	programs, err := filepath.Glob(filepath.Join(sources, "programs/*.c"))
	if err != nil || len(programs) == 0 {
		return fmt.Errorf("there are no programs in %s/programs", sources)
	}
	for _, source := range programs {
		if err := compile(ctx, source, filepath.Join(dir, strings.TrimSuffix(filepath.Base(source), ".c"))); err != nil {
			return err
		}
	}
	for _, name := range suite {
		if err := compile(ctx, filepath.Join(sources, "testdata", name+".c"), filepath.Join(of, name)); err != nil {
			return err
		}
	}
	built, err := capsule.Library(ctx, lib.Root)
	if err != nil {
		return fmt.Errorf("build the cap's library: %w", err)
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		data, err := os.ReadFile(filepath.Join(built, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(of, name), data, 0o755)
		}
		if err != nil {
			return fmt.Errorf("copy the cap's library: %w", err)
		}
	}
	return nil
}

// compile makes a program. Calls of the driver are declared without their arguments, since its
// headers are not ours.
func compile(ctx context.Context, source, program string) error {
	_, err := command(ctx, "gcc", "-std=gnu17", "-O2", "-Wall", "-Wextra", "-Wno-strict-prototypes", "-Werror", "-o", program, source, "-ldl")
	return err
}

func command(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, said.String())
	}
	return string(out), nil
}
