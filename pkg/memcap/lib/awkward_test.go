// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// TestAwkwardDriver runs programs of testdata in front of drivers that answer as none
// should, each with a library and pages of its own.
func TestAwkwardDriver(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	sum, err := Stamp(t.Context(), awkwardRoot)
	if err != nil {
		t.Fatal(err)
	}
	built, err := emulib.Once(t.Context(), "memcap", "cap-"+sum, func(ctx context.Context, dir string) error { return BuildBelow(ctx, dir, awkwardRoot) })
	if err != nil {
		t.Fatal(err)
	}
	library, err := os.ReadFile(filepath.Join(built, cudaName))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		program, why string
		lacks        []string // of the driver's names
	}{
		{"awkward", "the right override is found where the driver's answers to cuGetProcAddress are no functions that it exports, " +
			"and nothing is counted twice where it calls its own functions by name", nil},
		{"graphics", "contexts of OpenGL and VDPAU are counted", nil},
		{"limits", "a limit that takes memory is not raised where the driver does not tell what it was", nil},
		{"starts", "what a short program has left behind does not have the next one wait for a reading", nil},
		{"short", "a program that has just begun does not wait for a reading where contexts have never taken more than was expected", nil},
		{"modules", "far from the cap a module costs two looks at the card, and another container's allocation is not charged with it", nil},
		{"neighbour", "what another container takes while a module is loaded is not charged while the agent is away", nil},
		{"multicast", "what is bound to a multicast object stays charged after all else has let go of it", nil},
		{"reopen", "a program that opens and closes the library all the time, with an allocation in between, is one process in the count", nil},
		{"unmap", "to register and release a buffer makes no mapping of the library's own, which would cost more than all the rest", nil},
		{"smshare", "a process that has a share of the SMs is a client of MPS by the page's values, or has no CUDA", nil},
		{"turns", "a process without such a share has its environment, and asks no daemon", nil},
		{"newcomers", "where the page holds newcomers, a program waits in cuInit or before its first context, as long as the agent has the page; " +
			"no other program waits", nil},
		{"lacks", "dlsym finds in a fitted library what the driver has, and nothing that it does not have; cuGetProcAddress is as before",
			[]string{"cuCtxSynchronize_v2", "cuCtxCreate_v4", "cuGraphInstantiateWithParams_ptsz"}},
	} {
		t.Run(c.program, func(t *testing.T) {
			if said, err := awkward(t, library, c.program, c.lacks); err != nil || said != "" {
				t.Errorf("%s: %v\n%s", c.why, err, said)
			}
		})
	}
}

// awkwardRoot is where the programs find all that they need, each in a mount namespace of its own.
const awkwardRoot = "/mnt"

// awkward runs a program in front of the driver of driver.c, without the names
// that this lacks. The program gets the path of the cap's library, of its usage page, and
// those names, and has nothing to say; newcomers gets the limit page, too.
func awkward(t *testing.T, library []byte, program string, lacks []string) (string, error) {
	t.Helper()
	const uuid = gpu.UUID("GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a")
	builds := [][]string{
		{"-std=gnu2x", "-O2", "-shared", "-fPIC", "-Wl,-soname," + cudaName, "-Ic", "testdata/driver.c", "testdata/stubs.c", "-o", cudaName},
		{"-std=gnu17", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Ic", "-DCAP_ROOT=\"" + awkwardRoot + "\"", "testdata/" + program + ".c", "-ldl", "-lpthread", "-o", program},
	}
	hides := "{ local: " + strings.Join(append([]string{"nothing"}, lacks...), ";") + "; };"
	built := once(t, program, []any{builds, hides}, func(ctx context.Context, dir string) error {
		hidden := filepath.Join(dir, "hidden")
		if err := os.WriteFile(hidden, []byte(hides), 0o644); err != nil {
			return err
		}
		for i, args := range builds {
			args = slices.Clone(args)
			args[len(args)-1] = filepath.Join(dir, args[len(args)-1])
			if i == 0 {
				args = append(args, "-Wl,--version-script,"+hidden)
			}
			if _, err := gcc(ctx, "", args...); err != nil {
				return err
			}
		}
		return nil
	})
	root := t.TempDir()
	allocation := filepath.Join("allocations", string(uuid), aKey)
	usage, limit := filepath.Join(allocation, usageName), filepath.Join(allocation, limitName)
	for _, dir := range []string{"driver", allocation} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	nonce, err := makeUsage(filepath.Join(root, usage), false)
	if err != nil {
		t.Fatal(err)
	}
	// The page is outside, and mounted where the program looks for it.
	page := filepath.Join(t.TempDir(), aKey, string(uuid))
	err = errors.Join(os.Mkdir(filepath.Dir(page), 0o755), os.WriteFile(filepath.Join(root, limit), nil, 0o644),
		makePage(page, 0, Limit{GPU: uuid, Bytes: aGiB, Context: 1 << 20}, nonce))
	if err != nil {
		t.Fatal(err)
	}
	// An agent that reads every second, and has not yet.
	for at, word := range map[string]map[int]uint64{"starts": {atEvery: 1000}, "modules": {atEvery: 1000}, "short": {atEvery: 1000, atSure: 1},
		"smshare": {atPercent: 26}}[program] {
		f, err := os.OpenFile(page, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.WriteAt(binary.LittleEndian.AppendUint64(nil, word), int64(at))
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if lacks != nil {
		if library, err = FitOne(library, filepath.Join(built, cudaName)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, cudaName), library, 0o755); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{cudaName: filepath.Join("driver", cudaName), program: program} {
		data, err := os.ReadFile(filepath.Join(built, from))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, to), data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	more := lacks
	if program == "newcomers" {
		more = []string{page} // there it can be written
	}
	// A limit page counts where it is mounted read-only.
	at := func(name string) string { return filepath.Join(awkwardRoot, name) }
	cmd := exec.CommandContext(t.Context(), "unshare", append([]string{"--mount", "/bin/sh", "-c", `mount --bind "$0" "$1" && mount --bind "$2" "$3" && mount -o remount,bind,ro "$3" && shift 3 && exec "$@"`,
		root, awkwardRoot, page, at(limit), at(program), at(cudaName), at(usage)}, more...)...)
	if os.Geteuid() != 0 {
		cmd.Args = slices.Insert(cmd.Args, 1, "--map-root-user")
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}
