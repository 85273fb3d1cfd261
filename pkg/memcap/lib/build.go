// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

//go:embed c/*.c c/*.h
var sources embed.FS

// The file names of the two libraries, which are also their SONAMEs, and of the program.
const (
	cudaName = "libcuda.so.1"
	nvmlName = "libnvidia-ml.so.1"
	holdName = "hold"
)

// The source files of each library, and of the program.
var (
	cudaSources = []string{
		"address.c", "array.c", "attempt.c", "bound.c", "charge.c", "context.c", "count.c", "export.c", "graph.c",
		"limit.c", "loan.c",
		"memory.c", "module.c", "mps.c", "newcomer.c", "pool.c", "pools.c", "process.c", "real.c", "reuse.c", "table.c", "view.c", "vmm.c",
	}
	nvmlSources = []string{"nvml.c", "real.c"}
	holdSources = []string{"hold.c", "hold_cgroup.c", "hold_record.c", "hold_state.c"}
)

// These flags make libraries that run nothing when they are loaded, need nothing of a newer C
// library, and export nothing but the overrides. A reference to a symbol of our own is bound within
// the library, even if another object defines that symbol. An allocation goes through four of the
// files; link-time optimisation makes it a sixth faster. A library that was loaded stays loaded
// (nodelete). Otherwise a program that unloads it and loads it again would lose what is charged,
// and take another slot each time.
var (
	compileFlags = []string{
		"-std=gnu17", "-D_GNU_SOURCE", "-O2", "-flto", "-flto-partition=one", "-g0", "-fPIC", "-fvisibility=hidden",
		"-fno-stack-protector",
		"-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror",
	}
	linkFlags = []string{
		"-shared", "-nostartfiles", "-s", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,relro",
		"-Wl,-z,noexecstack", "-Wl,-z,nodelete", "-Wl,--hash-style=gnu", "-Wl,--build-id=none", "-Wl,--no-as-needed",
	}
)

// These flags make a program that any C library since 2.17 can start. It needs libdl.so.2 by name: before
// glibc 2.34 that library has dlopen, and later versions have an empty one.
var (
	holdCompileFlags = []string{
		"-std=gnu17", "-D_GNU_SOURCE", "-U_FORTIFY_SOURCE", "-O2", "-g0", "-fPIE", "-fvisibility=hidden",
		"-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror",
	}
	holdLinkFlags = []string{
		"-pie", "-nostartfiles", "-s", "-Wl,-z,defs", "-Wl,-z,now", "-Wl,-z,relro", "-Wl,-z,noexecstack",
		"-Wl,--hash-style=gnu", "-Wl,--build-id=none", "-Wl,--no-as-needed",
	}
)

// dlName is the library that has dlopen on older systems.
const dlName = "libdl.so.2"

// Build compiles the two libraries, libcuda.so.1 and libnvidia-ml.so.1, and the program hold into the
// folder out, which it creates if need be. It needs gcc, or a gcc that $CC names, but neither a CUDA toolkit nor a
// driver.
func Build(ctx context.Context, out string) error { return build(ctx, out, Root) }

// BuildBelow is Build for tests. Its libraries look for all files, also the driver's libraries,
// below root and not below [Root].
func BuildBelow(ctx context.Context, out, root string) error { return build(ctx, out, root) }

// Stamp returns a hash of all that the output of BuildBelow depends on.
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
	fmt.Fprintf(h, "%q %q %q", holdSources, holdCompileFlags, holdLinkFlags)
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

// build builds in a folder beside out, and moves all files to out once they are complete.
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
	machine, err := gcc(ctx, "", "-dumpmachine")
	if err != nil {
		return fmt.Errorf("build the cap's libraries: %w", err)
	}
	for _, l := range []struct {
		name    string
		sources []string
	}{{cudaName, cudaSources}, {nvmlName, nvmlSources}} {
		// An empty library whose SONAME is the real one's path. For a library that is linked
		// against it, the loader loads that path.
		stub := "stub-" + l.name
		soname := "-Wl,-soname," + root + "/driver/" + l.name
		if _, err := gcc(ctx, tmp, "-shared", "-nostdlib", soname, "-o", stub, "stub.c"); err != nil {
			return fmt.Errorf("build the cap's %s: %w", l.name, err)
		}
		args := slices.Concat(compileFlags, []string{fmt.Sprintf("-DCAP_ROOT=%q", root)}, machineFlags(machine),
			linkFlags,
			[]string{"-Wl,-soname," + l.name, "-o", filepath.Join(done, l.name)}, l.sources, []string{stub})
		if _, err := gcc(ctx, tmp, args...); err != nil {
			return fmt.Errorf("build the cap's %s: %w", l.name, err)
		}
	}
	stub := "stub-" + dlName
	_, err = gcc(ctx, tmp, "-shared", "-nostdlib", "-Wl,-soname,"+dlName, "-o", stub, "stub.c")
	if err == nil {
		args := slices.Concat(holdCompileFlags, holdLinkFlags, []string{"-o", filepath.Join(done, holdName)}, holdSources, []string{stub})
		_, err = gcc(ctx, tmp, args...)
	}
	if err != nil {
		return fmt.Errorf("build the program %s: %w", holdName, err)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return fmt.Errorf("make output folder: %w", err)
	}
	for _, name := range []string{cudaName, nvmlName, holdName} {
		if err := os.Rename(filepath.Join(done, name), filepath.Join(out, name)); err != nil {
			return fmt.Errorf("keep %s: %w", name, err)
		}
	}
	return nil
}

// BuildHide compiles the program hide for the machine that gcc compiles for, and puts it into the
// folder out, packed. It runs the go command, so the current folder must be in this module. The
// program is static, since the container runtime runs it on the host.
func BuildHide(ctx context.Context, out string) error {
	machine, err := gcc(ctx, "", "-dumpmachine")
	if err != nil {
		return fmt.Errorf("build the program %s: %w", hideName, err)
	}
	arch := map[string]string{"x86_64": "amd64", "aarch64": "arm64"}[strings.Split(machine, "-")[0]]
	if arch == "" {
		return fmt.Errorf("build the program %s: gcc compiles for %s, want x86_64 or aarch64: %w",
			hideName, machine, gpu.ErrNotSupported)
	}
	// The go command writes a file that BuildHide removes. In out, a compilation of this package that runs meanwhile
	// would list that file to embed it, and then fail to open it.
	tmp, err := os.MkdirTemp(filepath.Dir(out), ".memcap-build-")
	if err != nil {
		return fmt.Errorf("make build folder: %w", err)
	}
	defer os.RemoveAll(tmp)
	program := filepath.Join(tmp, hideName)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=",
		"-o", program, "example.com/gpu-agent/pkg/memcap/lib/hide")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0")
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the program %s: %w\n%s", hideName, err, said)
	}
	packed := program + packedSuffix
	data, err := os.ReadFile(program)
	if err == nil {
		err = os.WriteFile(packed, pack(data), 0o644)
	}
	if err == nil {
		err = os.Rename(packed, filepath.Join(out, filepath.Base(packed)))
	}
	if err != nil {
		return fmt.Errorf("pack the program %s: %w", hideName, err)
	}
	return nil
}

// pack compresses the content of a packed file.
func pack(data []byte) []byte {
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, gzip.BestCompression) // fails only for a level that does not exist
	_, _ = w.Write(data)                                    // a buffer accepts all
	_ = w.Close()
	return out.Bytes()
}

// machineFlags returns the compiler flags for the machine that gcc compiles for, by gcc's name of
// it.
func machineFlags(machine string) []string {
	if strings.HasPrefix(machine, "aarch64-") {
		return []string{"-mno-outline-atomics"} // outline atomics would need libgcc
	}
	return nil
}

// gcc runs gcc, or the command in $CC. As for cgo, that is a list of words without quotes.
func gcc(ctx context.Context, dir string, args ...string) (string, error) {
	cc := strings.Fields(os.Getenv("CC"))
	if len(cc) == 0 {
		cc = []string{"gcc"}
	}
	cmd := exec.CommandContext(ctx, cc[0], append(cc[1:], args...)...)
	cmd.Dir = dir
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", cc[0], err, errs.Bytes())
	}
	return string(out), nil
}
