// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestLinkers links programs against a library of ours in the four ways that there are, with each
// linker of this machine, and runs them: a function that is not ours is the driver's, and is found at
// no other address than before. Without Link it is an undefined reference.
func TestLinkers(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	compile := func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "gcc", args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for name, text := range map[string]string{
		"driver.c": `
int cuProfilerStart(void) { return 42; }
int cuNewest(void) { return 1; }
int cuMemAlloc_v2(void **p, unsigned long n) { return 2; }
int cudbgEnabled = 7;`,
		"m.c": `int cuProfilerStart(void); int main() { return cuProfilerStart(); }`,
		"s.c": `int cuProfilerStart(void); int f() { return cuProfilerStart(); }`,
		"e.c": `int f(); int main() { return f(); }`,
		"where.c": `
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int cuNewest(void);
int main() {
	int (*by_address)(void) = cuNewest;
	for (int i = 0; i < 2; i++) {
		void *found = i ? dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuNewest") : dlsym(RTLD_DEFAULT, "cuNewest");
		Dl_info info;
		if (!dladdr(found, &info) || by_address() != 1) return 1;
		puts(info.dli_fname);
	}
}`,
	} {
		if err := os.WriteFile(at(name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := BuildBelow(t.Context(), at("built"), dir); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"driver", "before", "after"} {
		if err := os.Mkdir(at(d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	driver := at("driver/" + cudaName)
	if out, err := compile("-shared", "-fPIC", "-Wl,-soname,"+cudaName, "driver.c", "-o", driver); err != nil {
		t.Fatal(err, out)
	}
	library, err := os.ReadFile(at("built/" + cudaName))
	if err != nil {
		t.Fatal(err)
	}
	fitted, err := Hide(library, driver)
	if err != nil {
		t.Fatal(err)
	}
	linked, err := Link(fitted, driver)
	if err != nil {
		t.Fatal(err)
	}
	for d, data := range map[string][]byte{"before": fitted, "after": linked} {
		if err := os.WriteFile(at(d+"/"+cudaName), data, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(cudaName, at(d+"/libcuda.so")); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := compile("m.c", "-Lbefore", "-lcuda", "-o", "a"); err == nil || !strings.Contains(out, "undefined reference to `cuProfilerStart'") {
		t.Errorf("a library that is not linkable: %v\n%s", err, out)
	}
	linkers := 0
	for _, linker := range []string{"bfd", "gold", "lld", "mold"} {
		if _, err := exec.LookPath("ld." + linker); err != nil {
			continue
		}
		linkers++
		for _, way := range [][]string{
			{"executable", "m.c -Lafter -lcuda -Wl,-rpath," + at("after") + " -o a"},
			{"executable without PIE", "-no-pie m.c -Lafter -lcuda -Wl,-rpath," + at("after") + " -o a"},
			{"shared object", "-shared -fPIC s.c -Lafter -lcuda -Wl,-rpath," + at("after") + " -o libs.so", "e.c -L. -ls -Wl,-rpath," + dir + " -Wl,-rpath-link,after -o a"},
			{"shared object without undefined names", "-shared -fPIC -Wl,-z,defs s.c -Lafter -lcuda -Wl,-rpath," + at("after") + " -o libs.so", "e.c -L. -ls -Wl,-rpath," + dir + " -Wl,-rpath-link,after -o a"},
		} {
			for _, args := range way[1:] {
				if out, err := compile(append([]string{"-fuse-ld=" + linker}, strings.Fields(args)...)...); err != nil {
					t.Errorf("%s, %s: %v\n%s", linker, way[0], err, out)
				}
			}
			if err := exec.CommandContext(t.Context(), at("a")).Run(); err == nil || err.Error() != "exit status 42" {
				t.Errorf("%s, %s: cuProfilerStart gives %v, want 42", linker, way[0], err)
			}
		}
		if out, err := compile("-fuse-ld="+linker, "where.c", "-Lafter", "-lcuda", "-ldl", "-Wl,-rpath,"+at("after"), "-o", "a"); err != nil {
			t.Errorf("%s: %v\n%s", linker, err, out)
		}
		out, err := exec.CommandContext(t.Context(), at("a")).CombinedOutput()
		if want := driver + "\n" + driver + "\n"; err != nil || string(out) != want {
			t.Errorf("%s: %v: cuNewest is in\n%s, want %s", linker, err, out, driver)
		}
	}
	if linkers == 0 {
		t.Error("no linker was tried")
	}
	if has, err := exported(at("after/" + cudaName)); err != nil || len(has) != 3 {
		t.Errorf("the names for linkers are %v, %v; want the driver's functions", has, err)
	}
}
