// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// The files that a build makes.
const (
	NVML  = "libnvidia-ml.so"
	CUDA  = "libcuda.so"
	Other = "libnvidia-other.so" // stands for libraries that need only be there
	SMI   = "nvidia-smi"
)

//go:embed c/*.c c/*.h
var sources embed.FS

const (
	exports     = "{ global: nvml*; gpuEmulator*; local: *; };\n"
	cudaExports = "{ global: cu*; local: *; };\n"
)

// Header finds NVIDIA's nvml.h in the go-nvml module that the Go module at or
// above the working directory asks for.
func Header(ctx context.Context) (string, error) {
	out, err := Run(ctx, "", "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml")
	if err != nil {
		return "", fmt.Errorf("find go-nvml for its nvml.h: %w", err)
	}
	dir := strings.TrimSpace(out)
	if dir == "" {
		return "", errors.New("find go-nvml for its nvml.h: the module is not downloaded; run go mod download")
	}
	return filepath.Join(dir, "pkg/nvml/nvml.h"), nil
}

// Cached builds into the project's cache, unless the same was built there before, and
// returns the folder.
func Cached(ctx context.Context) (string, error) {
	header, err := Header(ctx)
	if err != nil {
		return "", err
	}
	return CachedWith(ctx, header)
}

// CachedWith is Cached with another nvml.h than that of Header.
func CachedWith(ctx context.Context, header string) (string, error) {
	sum, err := stamp(ctx, header)
	if err != nil {
		return "", err
	}
	return Once(ctx, "emulator", "lib-"+sum[:16], func(ctx context.Context, dir string) error { return Build(ctx, dir, header) })
}

// Build makes the libraries and the program in dir, which is made if it is not there.
// header is the path of nvml.h; see Header.
func Build(ctx context.Context, dir, header string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make output folder: %w", err)
	}
	tmp, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return fmt.Errorf("make build folder: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := compile(ctx, tmp, header); err != nil {
		return fmt.Errorf("build driver libraries: %w", err)
	}
	for _, f := range []string{NVML, CUDA, Other, SMI} {
		if err := Pad(filepath.Join(tmp, f)); err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(tmp, f), filepath.Join(dir, f)); err != nil {
			return fmt.Errorf("keep %s: %w", f, err)
		}
	}
	return nil
}

// largest is the size of the largest pages of a processor, in bytes.
const largest = 64 << 10

// Pad makes a program or library end with its last page, however large
// pages are. A kernel needs no such thing. But qemu, which plays large pages on a machine with
// small ones, maps the last page only as far as the file goes, and variables beside it are lost.
func Pad(file string) error {
	info, err := os.Stat(file)
	if err == nil {
		err = os.Truncate(file, (info.Size()+largest-1)/largest*largest)
	}
	if err != nil {
		return fmt.Errorf("pad %s: %w", file, err)
	}
	return nil
}

// stamp is the hash of all that a build depends on.
func stamp(ctx context.Context, header string) (string, error) {
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
	data, err := os.ReadFile(header)
	if err != nil {
		return "", fmt.Errorf("read nvml.h: %w", err)
	}
	h.Write(data)
	gcc, err := GCC(ctx, "", "--version")
	if err != nil {
		return "", fmt.Errorf("ask gcc for its version: %w", err)
	}
	fmt.Fprintf(h, "%s%s%s%q%d", gcc, exports, cudaExports, flags, largest)
	return hex.EncodeToString(h.Sum(nil)), nil
}

var flags = []string{"-std=gnu17", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", "-DNVML_NO_UNVERSIONED_FUNC_DEFS=1"}

func compile(ctx context.Context, dir, header string) error {
	names, err := fs.Glob(sources, "c/*")
	if err != nil {
		return err
	}
	for _, name := range names {
		data, err := sources.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(name)), data, 0o644); err != nil {
			return err
		}
	}
	gcc := func(args ...string) error {
		_, err := GCC(ctx, dir, append(append([]string{"-I", filepath.Dir(header)}, flags...), args...)...)
		return err
	}
	if err := gcc("-c", "nvml.c", "nvml_mig.c", "transport.c"); err != nil {
		return err
	}
	text, err := os.ReadFile(header)
	if err != nil {
		return err
	}
	defined := map[string]bool{}
	for _, object := range []string{"nvml.o", "nvml_mig.o"} {
		names, err := definedNames(filepath.Join(dir, object))
		if err != nil {
			return err
		}
		maps.Copy(defined, names)
	}
	if err := os.WriteFile(filepath.Join(dir, "stub.c"), stubs(text, defined), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "exports"), []byte(exports), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "cuda-exports"), []byte(cudaExports), 0o644); err != nil {
		return err
	}
	cuda, err := filepath.Glob(filepath.Join(dir, "cuda_*.c"))
	if err != nil {
		return err
	}
	return errors.Join(
		gcc("-shared", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,--version-script=exports", "-Wl,-z,defs",
			"-o", NVML, "nvml.o", "nvml_mig.o", "transport.o", "stub.c"),
		// As with the real one, its calls of each other are its own, whatever else
		// of those names is loaded.
		gcc(append([]string{"-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-Wl,--version-script=cuda-exports", "-Wl,-z,defs",
			"-fvisibility=hidden", "-DCUDA_VERSION=13000", "-o", CUDA, "transport.c"}, cuda...)...),
		gcc("-shared", "-o", Other, "other.c"),
		gcc("-o", SMI, "smi.c", "smi_mig.c"),
	)
}

// declaration matches a function of nvml.h, up to the end of its first
// parameter.
var declaration = regexp.MustCompile(`\bDECLDIR\s+(?:char\s*\*\s*)?(nvml\w+)\s*\(\s*([^,)]*)`)

// Names lists the functions that nvml.h declares, each with its first
// parameter as the header writes it.
func Names(header []byte) map[string]string {
	names := map[string]string{}
	for _, m := range declaration.FindAllSubmatch(header, -1) {
		names[string(m[1])] = string(bytes.TrimSpace(m[2]))
	}
	return names
}

// stubs writes a C file with a function for each name of the header that is
// not defined already.
func stubs(header []byte, defined map[string]bool) []byte {
	names := Names(header)
	var order []string
	for name := range names {
		if !defined[name] {
			order = append(order, name)
		}
	}
	slices.Sort(order)
	var b bytes.Buffer
	b.WriteString("/* Generated from nvml.h: calls that the world has no answer for. */\n")
	b.WriteString("int unsupported(const char *name, int about_device, const void *device);\n")
	for _, name := range order {
		// The other arguments stay in their registers, unread.
		if strings.HasPrefix(names[name], "nvmlDevice_t ") {
			fmt.Fprintf(&b, "int %s(const void *device) { return unsupported(__func__, 1, device); }\n", name)
		} else {
			fmt.Fprintf(&b, "int %s(void) { return unsupported(__func__, 0, 0); }\n", name)
		}
	}
	return b.Bytes()
}

func definedNames(object string) (map[string]bool, error) {
	f, err := elf.Open(object)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", object, err)
	}
	defined := map[string]bool{}
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_BIND(s.Info) == elf.STB_GLOBAL {
			defined[s.Name] = true
		}
	}
	return defined, nil
}
