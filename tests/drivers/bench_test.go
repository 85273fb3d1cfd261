// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"debug/elf"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/drivers/archive"
	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
)

//go:embed c
var sources embed.FS

const (
	cudaName = "libcuda.so.1"
	nvmlName = "libnvidia-ml.so.1"
)

// bench is where the cap's libraries stand in front of a real driver's: they look
// for those below root. There is one in the cache, since the libraries are built
// for a place, and it has one user at a time.
type bench struct {
	root, caps string
}

var theBench = sync.OnceValues(func() (*bench, error) {
	cache, err := emulib.Cache()
	if err != nil {
		return nil, err
	}
	root := filepath.Join(cache, "drivers", "bench")
	if err := os.MkdirAll(filepath.Join(root, "driver"), 0o755); err != nil {
		return nil, err
	}
	// The lock is held until the program ends.
	lock, err := syscall.Open(root+".lock", syscall.O_CREAT|syscall.O_RDWR|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open %s.lock: %w", root, err)
	}
	if err := syscall.Flock(lock, syscall.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock %s.lock: %w", root, err)
	}
	caps, err := capsule.Library(context.Background(), root)
	return &bench{root, caps}, err
})

// open skips the test where there are no real libraries to be had.
func open(t *testing.T) *bench {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the drivers that serve as judges are for amd64")
	}
	for _, tool := range []string{"gcc", "dpkg", "apt-get"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("no %s on this machine", tool)
		}
	}
	b, err := theBench()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// library is a package's library, or the reason why the test is skipped.
func library(t *testing.T, d deb, prefix string) string {
	t.Helper()
	path, err := d.Library(t.Context(), prefix)
	switch {
	case errors.Is(err, archive.ErrHash):
		t.Fatal(err)
	case err != nil:
		t.Skipf("no judge: %v", err)
	}
	return path
}

// stand is a library of the cap in front of a driver's.
type stand struct {
	name string
	// cap is the cap's, fitted to the driver's as the agent does it; real is where
	// it looks for that, and file is what lies there.
	cap, real, file string
}

// put lays a driver's library where the cap's looks for it.
func (b *bench) put(t *testing.T, name, file string) stand {
	t.Helper()
	s := stand{name, filepath.Join(t.TempDir(), name), filepath.Join(b.root, "driver", name), file}
	if err := os.Remove(s.real); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if err := os.Symlink(file, s.real); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(b.caps, name))
	if err == nil {
		data, err = lib.FitOne(data, file)
	}
	if err == nil {
		err = os.WriteFile(s.cap, data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// install puts a real driver behind the cap's libraries.
func (b *bench) install(t *testing.T, d driver) (cuda, nvml stand) {
	t.Helper()
	return b.put(t, cudaName, library(t, d.cuda, "libcuda.so.")), b.put(t, nvmlName, library(t, d.nvml, "libnvidia-ml.so."))
}

// judge builds the program that compares a cap's library with the real one.
func judge(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "judge")
	build(t, "judge.c", program)
	return program
}

// build compiles one of this package's programs.
func build(t *testing.T, source, out string, args ...string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, sources); err != nil {
		t.Fatal(err)
	}
	compile(t, filepath.Join(dir, "c", source), out, args...)
}

func compile(t *testing.T, file, out string, args ...string) {
	t.Helper()
	args = append([]string{"-std=gnu17", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-o", out, file}, args...)
	if said, err := exec.CommandContext(t.Context(), "gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", filepath.Base(file), err, said)
	}
}

// say runs a program and returns its lines.
func say(t *testing.T, input string, env []string, program string, args ...string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Stdin, cmd.Env = strings.NewReader(input), append([]string{"PATH=/usr/bin:/bin"}, env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%.4000s", filepath.Base(program), args, err, out)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// exports are the names that a library defines, in order.
func exports(t *testing.T, file string) []string {
	t.Helper()
	return defined(t, file, func(elf.Symbol) bool { return true })
}

// functions are those of exports that are no variables, which are there for debuggers.
func functions(t *testing.T, file string) []string {
	t.Helper()
	return defined(t, file, func(s elf.Symbol) bool { return elf.ST_TYPE(s.Info) == elf.STT_FUNC })
}

func defined(t *testing.T, file string, is func(elf.Symbol) bool) []string {
	t.Helper()
	f, err := elf.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range symbols { // what is hidden is undefined
		if s.Section != elf.SHN_UNDEF && is(s) {
			names = append(names, s.Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// overrides are the names that a library of the cap exports before it is fitted.
func (b *bench) overrides(t *testing.T, name string) []string {
	t.Helper()
	return exports(t, filepath.Join(b.caps, name))
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
