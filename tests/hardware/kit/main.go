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

// build makes the folder, or makes it anew.
func build(ctx context.Context, dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the folder: %w", err)
	}
	if _, err := command(ctx, "go", "build", "-o", filepath.Join(dir, "run"), here+"/run"); err != nil {
		return err
	}
	root, err := command(ctx, "go", "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return err
	}
	sources, err := filepath.Glob(filepath.Join(strings.TrimSpace(root), "tests/hardware/programs/*.c"))
	if err != nil || len(sources) == 0 {
		return fmt.Errorf("there are no programs in %s/tests/hardware/programs", strings.TrimSpace(root))
	}
	for _, source := range sources {
		name := strings.TrimSuffix(filepath.Base(source), ".c")
		// Calls of the driver are declared without their arguments, since its headers are not ours.
		if _, err := command(ctx, "gcc", "-std=gnu17", "-O2", "-Wall", "-Wextra", "-Wno-strict-prototypes", "-Werror", "-o", filepath.Join(dir, name), source, "-ldl"); err != nil {
			return err
		}
	}
	return nil
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
