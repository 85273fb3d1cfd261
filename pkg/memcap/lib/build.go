// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
)

//go:embed c/*.c c/*.h
var sources embed.FS

// The names of the two libraries, which are their SONAMEs too.
const (
	cudaName = "libcuda.so.1"
	nvmlName = "libnvidia-ml.so.1"
)

// Of what the libraries are made, and which real library each needs.
var (
	cudaSources = []string{"address.c", "array.c", "attempt.c", "bound.c", "charge.c", "context.c", "count.c", "export.c", "graph.c", "limit.c",
		"memory.c", "module.c", "pool.c", "pools.c", "process.c", "real.c", "reuse.c", "table.c", "view.c", "vmm.c"}
	nvmlSources = []string{"nvml.c", "real.c"}
)

// compileFlags leave nothing in the libraries that runs by itself, is older
// than the oldest driver's C library lacks, or is seen from outside. A symbol
// of our own is bound within the library, whoever else defines it. An allocation
// goes through four of the files: optimised as one they take a sixth less time.
// A library that was loaded stays (nodelete): one that is unloaded and loaded
// again has forgotten what is charged, and takes another slot each time.
var (
	compileFlags = []string{"-std=gnu17", "-D_GNU_SOURCE", "-O2", "-flto", "-flto-partition=one", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-stack-protector",
		"-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror"}
	linkFlags = []string{"-shared", "-nostartfiles", "-s", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,relro",
		"-Wl,-z,noexecstack", "-Wl,-z,nodelete", "-Wl,--hash-style=gnu", "-Wl,--build-id=none", "-Wl,--no-as-needed"}
)

// Build compiles the two libraries into the folder out, which is made if it is
// not there: libcuda.so.1 and libnvidia-ml.so.1. It needs gcc and nothing else;
// neither a CUDA toolkit nor a driver.
func Build(ctx context.Context, out string) error { return build(ctx, out, Root) }

// BuildBelow is Build of libraries that look for all they need, the driver's among it,
// below root in place of [Root]. It is for tests, as is Stamp.
func BuildBelow(ctx context.Context, out, root string) error { return build(ctx, out, root) }

// Stamp names all that a build depends on.
func Stamp(ctx context.Context, root string) (string, error) {
	h := sha256.New()
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
	version, err := gcc(ctx, "", "--version")
	if err != nil {
		return "", err
	}
	fmt.Fprintf(h, "%q %q %q %q %q %q", version, root, cudaSources, nvmlSources, compileFlags, linkFlags)
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

// build makes a folder beside out and puts it, whole, in out's place; the
// libraries look for all they need below root.
func build(ctx context.Context, out, root string) error {
	out, err := filepath.Abs(out)
	if err != nil {
		return fmt.Errorf("find output folder: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return fmt.Errorf("make output folder: %w", err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(out), ".memcap-build-")
	if err != nil {
		return fmt.Errorf("make build folder: %w", err)
	}
	defer os.RemoveAll(tmp)
	done := filepath.Join(tmp, "done")
	if err := os.Mkdir(done, 0o755); err != nil {
		return fmt.Errorf("make build folder: %w", err)
	}
	names, err := fs.Glob(sources, "c/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		data, err := sources.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(tmp, filepath.Base(name)), data, 0o644); err != nil {
			return fmt.Errorf("lay out sources: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(tmp, "stub.c"), nil, 0o644); err != nil {
		return fmt.Errorf("lay out sources: %w", err)
	}
	for _, l := range []struct {
		name    string
		sources []string
	}{{cudaName, cudaSources}, {nvmlName, nvmlSources}} {
		// An empty library that is called by the real one's path: what is linked
		// against it asks the loader for just that path.
		stub := "stub-" + l.name
		if _, err := gcc(ctx, tmp, "-shared", "-nostdlib", "-Wl,-soname,"+root+"/driver/"+l.name, "-o", stub, "stub.c"); err != nil {
			return fmt.Errorf("build the cap's %s: %w", l.name, err)
		}
		args := slices.Concat(compileFlags, []string{fmt.Sprintf("-DCAP_ROOT=%q", root)}, machineFlags(), linkFlags,
			[]string{"-Wl,-soname," + l.name, "-o", filepath.Join(done, l.name)}, l.sources, []string{stub})
		if _, err := gcc(ctx, tmp, args...); err != nil {
			return fmt.Errorf("build the cap's %s: %w", l.name, err)
		}
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return fmt.Errorf("make output folder: %w", err)
	}
	for _, name := range []string{cudaName, nvmlName} {
		if err := os.Rename(filepath.Join(done, name), filepath.Join(out, name)); err != nil {
			return fmt.Errorf("keep %s: %w", name, err)
		}
	}
	return nil
}

func machineFlags() []string {
	if runtime.GOARCH == "arm64" {
		return []string{"-mno-outline-atomics"} // they would need libgcc
	}
	return nil
}

func gcc(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "gcc", args...)
	cmd.Dir = dir
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("gcc: %w\n%s", err, errs.Bytes())
	}
	return string(out), nil
}
