// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
)

// Programs that have nothing to do with GPUs start, speak and end as they did,
// with the cap's mounts and a driver, and with the mounts and none.
func TestOrdinaryPrograms(t *testing.T) {
	r := newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1})
	files := map[string][]byte{}
	add := func(name, file string) {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = data
	}
	type program struct {
		name string
		args []string
		skip string // why it cannot be tried
	}
	programs := []program{
		{name: "true", args: []string{"/bin/true"}},
		{name: "false", args: []string{"/bin/false"}},
		{name: "a shell's status", args: []string{"/bin/sh", "-c", "echo out; echo err >&2; exit 7"}},
		{name: "a signal", args: []string{"/bin/sh", "-c", "kill -TERM $$"}},
		{name: "the loader's own list", args: []string{"/bin/sh", "-c", "ldd /bin/true | sed 's/ (0x.*//'"}},
	}
	python := program{name: "Python", args: []string{"", "-c", "import sys, ctypes, threading; print(sys.version); sys.exit(3)"}}
	if at, err := exec.LookPath("python3"); err != nil {
		python.skip = "no Python here"
	} else if out, err := exec.Command(at, "-c", "import sys; print(sys.executable)").Output(); err != nil {
		python.skip = fmt.Sprintf("Python does not run here: %v", err)
	} else {
		python.args[0] = strings.TrimSpace(string(out))
	}
	programs = append(programs, python)

	dir := t.TempDir()
	write := func(name, text string) string {
		at := filepath.Join(dir, name)
		if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return at
	}
	cSource := write("hello.c", "#include <stdio.h>\nint main(int n, char **v) { printf(\"%s %d\\n\", v[0], n); return 5; }\n")
	static := program{name: "static C", args: []string{"/opt/static", "x"}}
	if out, err := exec.CommandContext(t.Context(), "gcc", "-static", "-o", filepath.Join(dir, "static"), cSource).CombinedOutput(); err != nil {
		static.skip = fmt.Sprintf("no static libc to link with: %s", out)
	} else {
		add("/opt/static", filepath.Join(dir, "static"))
	}
	programs = append(programs, static)

	goSource := write("hello.go", "package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\nfunc main() { fmt.Println(os.Args); os.Exit(6) }\n")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "go"), goSource)
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	add("/opt/go", filepath.Join(dir, "go"))
	programs = append(programs, program{name: "Go", args: []string{"/opt/go", "x"}})

	m := program{name: "musl", args: []string{"/opt/musl", "x"}}
	if loader, out, err := muslProgram(t.Context(), cSource, dir); err != nil {
		m.skip = err.Error()
	} else {
		add("/lib/ld-musl-x86_64.so.1", loader)
		add("/opt/musl", out)
	}
	programs = append(programs, m)

	put := func(image *capsule.Image) {
		image.Files = files
	}
	edits, image := r.m.Plain(0)
	put(&image)
	plain, err := r.m.Open(t.Context(), edits, image)
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	capped := r.allocate(t, "capped", []share{{gpu: 0, bytes: GiB}}, false, func(_ *specs.ContainerEdits, image *capsule.Image) { put(image) })
	bare := r.allocate(t, "bare", []share{{gpu: 0, bytes: GiB}}, false, func(edits *specs.ContainerEdits, image *capsule.Image) {
		put(image)
		edits.Mounts = slices.DeleteFunc(edits.Mounts, func(m *specs.Mount) bool {
			return m.ContainerPath == lib.RealCUDA || m.ContainerPath == lib.RealNVML
		})
	})
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			if p.skip != "" {
				t.Skip(p.skip)
			}
			type end struct {
				said   string
				status syscall.WaitStatus
			}
			var want end
			for i, c := range []*capsule.Container{plain, capped.Container, bare.Container} {
				said, status, err := c.Run(t.Context(), capsule.Program{Args: p.args, Env: []string{"PATH=/usr/bin:/bin", "HOME=/"}})
				if err != nil {
					t.Fatal(err)
				}
				got := end{said, status}
				if i == 0 {
					want = got
					t.Logf("status %#x, %q", uint32(status), said)
				} else if got != want {
					t.Errorf("%s: %+v, want %+v", []string{"", "with the cap", "with the cap and no driver"}[i], got, want)
				}
			}
		})
	}
	t.Run("a GPU program without a driver", func(t *testing.T) {
		// It fails as it does where there is none: with a loader's error, not a crash.
		said, status, err := bare.Run(t.Context(), capsule.Program{Args: []string{"/usr/bin/nvidia-smi"}})
		if err != nil || !status.Exited() || status == 0 {
			t.Errorf("nvidia-smi: %v, status %#x: %s", err, uint32(status), said)
		}
		k := bare.tool(t, "probe", nil)
		if f := k.ask("took", "take cuMemAlloc_v2 %d", MiB); f["result"] == "0" {
			t.Errorf("%q", k.said)
		}
	})
}

// muslProgram builds a program against musl, from Debian's packages, which are
// kept in the cache and not installed.
func muslProgram(ctx context.Context, source, dir string) (loader, program string, err error) {
	cache, err := emulib.Cache()
	if err != nil {
		return "", "", err
	}
	root := filepath.Join(cache, "musl")
	loader = filepath.Join(root, "lib/x86_64-linux-musl/libc.so")
	libs := filepath.Join(root, "usr/lib/x86_64-linux-musl")
	if _, err := os.Stat(filepath.Join(libs, "crt1.o")); err != nil {
		for _, tool := range []string{"apt-get", "dpkg"} {
			if _, err := exec.LookPath(tool); err != nil {
				return "", "", fmt.Errorf("no %s to fetch musl with", tool)
			}
		}
		if err := fetch(ctx, root, "musl", "musl-dev"); err != nil {
			return "", "", fmt.Errorf("musl cannot be fetched: %w", err)
		}
	}
	program = filepath.Join(dir, "musl")
	out, err := exec.CommandContext(ctx, "gcc", "-nostdinc", "-isystem", filepath.Join(root, "usr/include/x86_64-linux-musl"), "-no-pie", "-fno-pie",
		"-fno-stack-protector", "-nostdlib", "-Wl,-dynamic-linker,/lib/ld-musl-x86_64.so.1", "-o", program,
		filepath.Join(libs, "crt1.o"), filepath.Join(libs, "crti.o"), source, loader, filepath.Join(libs, "crtn.o")).CombinedOutput()
	if err != nil {
		return "", "", fmt.Errorf("link against musl: %w\n%s", err, out)
	}
	return loader, program, nil
}

// fetch unpacks some of Debian's packages below root.
func fetch(ctx context.Context, root string, packages ...string) error {
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(root), "musl-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	get := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "APT::Sandbox::User=root", "download"}, packages...)...)
	get.Dir = tmp
	if out, err := get.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return err
	}
	tree := filepath.Join(tmp, "tree")
	for _, deb := range debs {
		if out, err := exec.CommandContext(ctx, "dpkg", "-x", deb, tree).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	if err := os.Rename(tree, root); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}
