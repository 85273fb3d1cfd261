// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// inside makes a test of this program a process with a mount namespace of its own.
const inside = "GPU_TESTS_HIDE"

func TestMain(m *testing.M) {
	if bundle, ok := os.LookupEnv(inside); ok {
		if err := run(os.Args[1:], strings.NewReader(fmt.Sprintf(`{"ociVersion":"1.0.2","bundle":%q}`, bundle))); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		for _, name := range strings.Fields(os.Getenv(inside + "_LIST")) {
			entries, err := os.ReadDir(name)
			names := []string{}
			for _, e := range entries {
				names = append(names, e.Name())
			}
			if errors.Is(err, fs.ErrNotExist) {
				names = []string{"-"}
			}
			made := os.WriteFile(filepath.Join(name, "new"), nil, 0o644)
			fmt.Println(strings.Join(names, ","), errors.Is(made, unix.EROFS))
			if made == nil {
				os.Remove(filepath.Join(name, "new"))
			}
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var patterns = []string{"/usr/local/cuda/compat", "/usr/local/cuda-*/compat"}

// TestHide has images as they are and as somebody may make them. A directory that is there is
// empty, and nothing else has changed: not in the image, and not outside of it.
func TestHide(t *testing.T) {
	if _, err := exec.LookPath("unshare"); err != nil {
		t.Skip("unshare is not installed")
	}
	for name, c := range map[string]struct {
		files []string // with a target, links
		want  map[string]string
	}{
		"no CUDA":        {[]string{"usr/local/bin/x"}, map[string]string{"usr/local": "bin false"}},
		"nothing at all": {nil, map[string]string{"": "- false"}},
		"one version": {[]string{"usr/local/cuda/compat/libcuda.so.1", "usr/local/cuda/lib64/libcudart.so"},
			map[string]string{"usr/local/cuda/compat": " true", "usr/local/cuda": "compat,lib64 false", "usr/local/cuda/lib64": "libcudart.so false"}},
		"as NVIDIA's images have it": {[]string{"usr/local/cuda-12.4/compat/libcuda.so.1", "usr/local/cuda-11/compat/lib.real/libcuda.so.1", "etc/alternatives/cuda -> /usr/local/cuda-12.4", "usr/local/cuda -> /etc/alternatives/cuda"},
			map[string]string{"usr/local/cuda-12.4/compat": " true", "usr/local/cuda-11/compat": " true", "usr/local/cuda-12.4": "compat false"}},
		"a file of that name":             {[]string{"usr/local/cuda/compat"}, map[string]string{"usr/local/cuda": "compat false"}},
		"a toolkit without":               {[]string{"usr/local/cuda-13/bin/nvcc"}, map[string]string{"usr/local/cuda-13": "bin false"}},
		"a link out of the root":          {[]string{"usr/local/cuda/compat -> ../../../../../../../../outside", "usr/local/cuda-1/compat -> /outside", "outside/own"}, map[string]string{"outside": " true"}},
		"links in a circle":               {[]string{"usr/local/cuda/compat -> ../compat", "usr/local/compat -> cuda/compat"}, map[string]string{"usr/local": "compat,cuda false"}},
		"other names":                     {[]string{"usr/local/cudax/compat/a", "usr/local/cuda-x/other/a"}, map[string]string{"usr/local/cudax/compat": "a false", "usr/local/cuda-x/other": "a false"}},
		"a link of the image's to a FIFO": {[]string{"usr/local/cuda -> /dev/zero"}, map[string]string{"usr/local": "cuda false"}},
	} {
		t.Run(name, func(t *testing.T) {
			bundle := t.TempDir()
			outside := filepath.Join(bundle, "outside")
			root := filepath.Join(bundle, "rootfs")
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			must(os.MkdirAll(root, 0o755))
			must(os.MkdirAll(outside, 0o755))
			must(os.WriteFile(filepath.Join(outside, "theirs"), nil, 0o644))
			must(os.WriteFile(filepath.Join(bundle, "config.json"), []byte(`{"root":{"path":"rootfs"}}`), 0o644))
			for _, f := range c.files {
				f, link, _ := strings.Cut(f, " -> ")
				f = filepath.Join(root, f)
				must(os.MkdirAll(filepath.Dir(f), 0o755))
				if link != "" {
					must(os.Symlink(link, f))
				} else {
					must(os.WriteFile(f, nil, 0o644))
				}
			}
			var list, want []string
			for dir, is := range c.want {
				if is == "- false" {
					continue
				}
				list, want = append(list, filepath.Join(root, dir)), append(want, is)
			}
			list, want = append(list, outside), append(want, "theirs false")
			before := tree(t, bundle)
			cmd := exec.CommandContext(t.Context(), "unshare", append([]string{"--mount", os.Args[0]}, slices.Concat(patterns, patterns)...)...)
			if os.Geteuid() != 0 {
				cmd.Args = slices.Insert(cmd.Args, 1, "--map-root-user")
			}
			cmd.Env = append(os.Environ(), inside+"="+bundle, inside+"_LIST="+strings.Join(list, " "))
			out, err := cmd.CombinedOutput()
			if got := strings.Split(strings.TrimRight(string(out), "\n"), "\n"); err != nil || !slices.Equal(got, want) {
				t.Errorf("%v: %q, want %q", err, got, want)
			}
			if after := tree(t, bundle); !slices.Equal(after, before) {
				t.Errorf("the image has %q, and had %q", after, before)
			}
		})
	}
}

// tree lists what is below a directory.
func tree(t *testing.T, dir string) (names []string) {
	t.Helper()
	if err := fs.WalkDir(os.DirFS(dir), ".", func(name string, _ fs.DirEntry, err error) error {
		names = append(names, name)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return names
}

// TestHideFails: what cannot be done is an error, so that the container does not start.
func TestHideFails(t *testing.T) {
	bundle := t.TempDir()
	for _, c := range []struct{ state, config, want string }{
		{"", "", "read the container's state"},
		{"{", "", "read the container's state"},
		{fmt.Sprintf(`{"bundle":%q}`, bundle), "", "config.json"},
		{fmt.Sprintf(`{"bundle":%q}`, bundle), "[]", "read the container's configuration"},
		{fmt.Sprintf(`{"bundle":%q}`, bundle), "{}", "names no root"},
		{fmt.Sprintf(`{"bundle":%q}`, bundle), `{"root":{"path":"absent"}}`, "open the container's root"},
	} {
		if c.config != "" {
			if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(c.config), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if err := run(patterns, strings.NewReader(c.state)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, %s: %v, want %q", c.state, c.config, err, c.want)
		}
	}
	root := filepath.Join(bundle, "rootfs")
	if err := os.MkdirAll(filepath.Join(root, "usr/local"), 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range mostNames + 1 {
		if err := os.Mkdir(filepath.Join(root, "usr/local", fmt.Sprint(i)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), fmt.Appendf(nil, `{"root":{"path":%q}}`, root), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := run(patterns, strings.NewReader(fmt.Sprintf(`{"bundle":%q}`, bundle))); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("a directory of %d names: %v", mostNames+1, err)
	}
}
