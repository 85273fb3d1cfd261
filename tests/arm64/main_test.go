// SPDX-License-Identifier: Apache-2.0

package arm64

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/memcap/capsule"
)

var long = flag.Bool("long", false, "run all packages' tests, and what is left out, too")

const checkout = "../.."

// pages are the sizes of pages that qemu plays, in bytes: what arm64's kernels have.
const (
	small = "4096"
	large = "65536"
)

func TestMain(m *testing.M) {
	capsule.Main()
	os.Exit(m.Run())
}

// kit is what arm64's programs are built and run with.
type kit struct {
	cc   string // the compiler, as $CC takes it
	qemu string
	libs string // the folder of the libraries that they need
}

var made = sync.OnceValues(func() (kit, error) {
	cache, err := lib.Cache()
	if err != nil {
		return kit{}, err
	}
	image := func(args ...string) (string, error) {
		return lib.Run(context.Background(), filepath.Join(checkout, "deployments/image"), "go",
			append([]string{"run", ".", args[0], "--newer", "--arch", "arm64", "--cache", filepath.Join(cache, "images/debian")}, args[1:]...)...)
	}
	cc, err := image("cc")
	if err != nil {
		return kit{}, err
	}
	out, err := image("qemu")
	if err != nil {
		return kit{}, err
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 2 {
		return kit{}, fmt.Errorf("image qemu says %q, want a program and a folder", out)
	}
	libs, err := lib.Once(context.Background(), "arm64", "padded-"+filepath.Base(lines[1]), func(_ context.Context, dir string) error {
		return padded(dir, lines[1])
	})
	return kit{cc: strings.TrimSpace(cc), qemu: lines[0], libs: libs}, err
})

// padded copies the libraries below a folder, see lib.Pad.
func padded(dir, from string) error {
	if err := os.CopyFS(filepath.Join(dir, "lib"), os.DirFS(filepath.Join(from, "lib"))); err != nil {
		return err
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		return lib.Pad(path)
	})
}

func tools(t *testing.T) kit {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skipf("on %s there is nothing to emulate: `make test` runs these tests there", runtime.GOARCH)
	}
	for _, program := range []string{"gcc", "apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("the cross compiler and qemu are Debian's: %v", err)
		}
	}
	k, err := made()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// env is the environment in which Go builds for arm64, and qemu runs what is built.
func (k kit) env(page string) []string {
	return append(os.Environ(), "GOARCH=arm64", "CGO_ENABLED=1", "CC="+k.cc, "CGO_CFLAGS=-O2 -Wno-deprecated-declarations",
		"QEMU_LD_PREFIX="+k.libs, "QEMU_PAGESIZE="+page)
}

// use has what this test builds and starts be for arm64, as far as it is the emulated driver's
// or the library of caps.
func (k kit) use(t *testing.T, page string) {
	t.Helper()
	t.Setenv("CC", k.cc)
	t.Setenv("QEMU_LD_PREFIX", k.libs)
	t.Setenv("QEMU_PAGESIZE", page)
}

// build builds with `go build` or `go test -c`, at the checkout's top.
func (k kit) build(t *testing.T, out string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append(args[:len(args)-1:len(args)-1], "-o", out, args[len(args)-1])...)
	cmd.Dir, cmd.Env = checkout, k.env(small)
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, said)
	}
}

// magic is how an arm64 program begins, and which bits of that count.
const magic = `\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:` +
	`\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff`

// inside returns the command that runs a program in a user namespace in which the kernel runs
// arm64 programs by qemu.
func (k kit) inside(t *testing.T, page, program string, args ...string) *exec.Cmd {
	t.Helper()
	const script = `mount -t binfmt_misc none /proc/sys/fs/binfmt_misc && printf %s "$0" >/proc/sys/fs/binfmt_misc/register && exec "$@"`
	cmd := exec.CommandContext(t.Context(), "/bin/sh", append([]string{"-c", script, ":arm64:M::" + magic + ":" + k.qemu + ":PF", program}, args...)...)
	cmd.Env = k.env(page)
	all := 1
	if os.Geteuid() == 0 {
		all = 1 << 16
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings:                []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: all}},
		GidMappings:                []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: all}},
		GidMappingsEnableSetgroups: all > 1,
		Pdeathsig:                  syscall.SIGKILL,
	}
	return cmd
}

// needsBinfmt skips where the kernel has no binfmt_misc for user namespaces.
func (k kit) needsBinfmt(t *testing.T) {
	t.Helper()
	out, err := k.inside(t, small, "true").CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) || errors.Is(err, syscall.EPERM) {
		t.Skipf("no binfmt_misc in a user namespace, which takes Linux 6.7: %v %s", err, out)
	}
	if err != nil {
		t.Fatal(err)
	}
}
