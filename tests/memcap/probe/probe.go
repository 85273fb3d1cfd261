// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"example.com/gpu-agent/tests/emulator/lib"
)

// The files that a build makes.
const (
	Program = "probe"
	Linked  = "probe-linked" // the same, linked against libcuda.so.1
	Plugin  = "plugin.so"    // which -door plugin opens; beside the programs
)

//go:embed c/*.c c/*.h
var sources embed.FS

var (
	flags   = []string{"-std=gnu17", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"}
	objects = []string{"main.c", "doors.c", "calls.c", "team.c", "views.c", "scenarios.c", "scenario_pools.c", "scenario_refusals.c"}
)

// Cached builds the programs into the project's cache, unless they are there,
// and returns their folder.
func Cached(ctx context.Context) (string, error) {
	cache, err := lib.Cache()
	if err != nil {
		return "", err
	}
	version, err := command(ctx, "", "gcc", "--version")
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintf(h, "%s%q%q", version, flags, objects)
	names, err := fs.Glob(sources, "c/*")
	if err != nil {
		return "", err
	}
	for _, name := range names {
		data, err := sources.ReadFile(name)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d\n%s", name, len(data), data)
	}
	parent := filepath.Join(cache, "memcap")
	dir := filepath.Join(parent, "probe-"+hex.EncodeToString(h.Sum(nil))[:16])
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("make the probe's folder: %w", err)
	}
	tmp, err := os.MkdirTemp(parent, "build-")
	if err != nil {
		return "", fmt.Errorf("make the probe's folder: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", fmt.Errorf("make the probe's folder: %w", err)
	}
	if err := Build(ctx, tmp); err != nil {
		return "", err
	}
	// Whoever else builds it makes the same.
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("keep the probe: %w", err)
	}
	return dir, nil
}

// Build makes the programs in dir, which exists.
func Build(ctx context.Context, dir string) error {
	src, err := os.MkdirTemp("", "probe-")
	if err != nil {
		return fmt.Errorf("build the probe: %w", err)
	}
	defer os.RemoveAll(src)
	names, err := fs.Glob(sources, "c/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		data, err := sources.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(src, filepath.Base(name)), data, 0o644)
		}
		if err != nil {
			return fmt.Errorf("build the probe: %w", err)
		}
	}
	gcc := func(args ...string) error {
		_, err := command(ctx, src, "gcc", append(append([]string{}, flags...), args...)...)
		return err
	}
	to := func(name string) string { return filepath.Join(dir, name) }
	const stub = "libcuda.so.1"
	return errors.Join(
		gcc("-shared", "-Wl,-soname,"+stub, "-o", stub, "stub.c"),
		gcc(append([]string{"-o", to(Program)}, append(objects[:len(objects):len(objects)], "-ldl")...)...),
		// By default some linkers leave out a library of which all names are weak.
		gcc(append([]string{"-Wl,--no-as-needed", "-o", to(Linked), "linked.c", stub}, append(objects[:len(objects):len(objects)], "-ldl")...)...),
		gcc("-shared", "-Wl,--no-as-needed", "-o", to(Plugin), "linked.c", stub),
	)
}

func command(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", name, err, errs.Bytes())
	}
	return string(out), nil
}

// Calls are the calls that the probe can make, in its own order. A name after a
// slash says how the call is used; see c/calls.c.
var Calls = []string{
	"cuMemAlloc_v2", "cuMemAlloc_v2/small", "cuMemAlloc", "cuMemAllocPitch_v2", "cuMemAllocPitch", "cuMemAllocManaged",
	"cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync/kept",
	"cuMemCreate", "cuMemCreate/mapped", "cuMemCreate/retained",
	"cuArrayCreate_v2", "cuArrayCreate", "cuArray3DCreate_v2", "cuArray3DCreate", "cuMipmappedArrayCreate",
	"cuGraphAddMemAllocNode", "cuMemAllocAsync/captured",
	"cuCtxCreate_v2", "cuModuleLoadData", "cuMemHostAlloc",
}

// Doors are the ways to the library that the probe knows; see c/doors.c.
// "linked" is Linked's alone.
var Doors = []string{
	"soname", "name", "path", "dlmopen", "deepbind", "plugin", "linked",
	"query", "query-thread", "query2", "query2-thread", "ptsz",
}
