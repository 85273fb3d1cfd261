// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// writeTestFile writes content with a mode that the umask does not change.
func writeTestFile(t *testing.T, file, content string, mode os.FileMode) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, mode); err != nil {
		t.Fatal(err)
	}
	return file
}

// layerOf returns the files of the image in an archive: a line for each, and
// their contents.
func layerOf(t *testing.T, archive string) (lines []string, contents map[string]string) {
	t.Helper()
	image, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("got %d layers, %v; want 1", len(layers), err)
	}
	r, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	contents = map[string]string{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return lines, contents
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.Equal(time.Unix(0, 0)) || h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s: dated %v, owned by %d:%d; want 1970-01-01 and 0:0", h.Name, h.ModTime, h.Uid, h.Gid)
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		contents[h.Name] = string(b)
		line := fmt.Sprintf("%c %04o %s", h.Typeflag, h.Mode, h.Name)
		if h.Linkname != "" {
			line += " -> " + h.Linkname
		}
		lines = append(lines, line)
	}
}

func TestImageHoldsWhatWasAsked(t *testing.T) {
	dir := t.TempDir()
	program := writeTestFile(t, filepath.Join(dir, "program"), "p", 0o700)
	text := writeTestFile(t, filepath.Join(dir, "tree", "sub", "text"), "t", 0o600)
	if err := os.Symlink("sub/text", filepath.Join(dir, "tree", "link")); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "image.tar")
	err := imageCommand(t.Context(), Layout{}, []string{
		"--out", out, "--name", "localhost/x:test", "--entrypoint", "/bin/program,-v", "--cmd", "a,b",
		"--user", "65532:65532", "--env", "K=V", "--label", "l=m", "--workdir", "/data",
		"--file", program + ":/bin/program", "--file", text + ":/etc/secret:0400",
		"--file", filepath.Join(dir, "tree") + ":/tree", "--file", filepath.Join(dir, "tree", "link") + ":/followed",
		"--link", "usr/bin:/bin", "--dir", "/tmp:1777", "--dir", "/data",
	})
	if err != nil {
		t.Fatal(err)
	}
	got, contents := layerOf(t, out)
	want := []string{
		"2 0777 bin -> usr/bin", "5 0755 data/", "5 0755 etc/", "0 0400 etc/secret", "0 0644 followed", "5 1777 tmp/",
		"5 0755 tree/", "2 0777 tree/link -> sub/text", "5 0755 tree/sub/", "0 0644 tree/sub/text",
		"5 0755 usr/", "5 0755 usr/bin/", "0 0755 usr/bin/program",
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("the layer has\n%s\nwant\n%s", g, w)
	}
	if contents["usr/bin/program"] != "p" || contents["followed"] != "t" {
		t.Errorf("contents %q", contents)
	}
	image, err := tarball.ImageFromPath(out, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c := config.Config
	gotConfig := fmt.Sprintf("%v %v %s %s %v %v", c.Entrypoint, c.Cmd, c.User, c.WorkingDir, c.Labels, c.Env)
	wantConfig := "[/bin/program -v] [a b] 65532:65532 /data map[l:m] [PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin K=V]"
	if gotConfig != wantConfig {
		t.Errorf("the config is\n%s\nwant\n%s", gotConfig, wantConfig)
	}
}

func TestImageIsReproducible(t *testing.T) {
	dir := t.TempDir()
	make := func(name string, mode os.FileMode, date time.Time, order []int) string {
		tree := filepath.Join(dir, name)
		im := Image{Name: "localhost/x:test", Entrypoint: []string{"/a"}}
		for _, i := range order {
			f := writeTestFile(t, filepath.Join(tree, fmt.Sprint(i)), fmt.Sprint("content ", i), mode)
			if err := os.Chtimes(f, date, date); err != nil {
				t.Fatal(err)
			}
			if err := im.Add(f, fmt.Sprintf("/d/%d", i), 0); err != nil {
				t.Fatal(err)
			}
		}
		digests, err := writeImages(filepath.Join(dir, name+".tar"), im)
		if err != nil {
			t.Fatal(err)
		}
		return digests[0]
	}
	first := make("a", 0o755, time.Unix(1, 0), []int{1, 2, 3})
	if second := make("b", 0o700, time.Unix(1e9, 0), []int{3, 1, 2}); first != second {
		t.Errorf("the same files gave %s and %s", first, second)
	}
	if other := make("c", 0o644, time.Unix(1, 0), []int{1, 2, 3}); first == other {
		t.Error("files that may not be executed gave the same image as files that may")
	}
	a, err := os.ReadFile(filepath.Join(dir, "a.tar"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "b.tar"))
	if err != nil {
		t.Fatal(err)
	}
	if string(a) != string(b) {
		t.Error("the same image gave two different archives")
	}
}

func TestImageRefuses(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "image.tar")
	file := writeTestFile(t, filepath.Join(dir, "f"), "", 0o644)
	base := []string{"--out", out, "--name", "localhost/x:test"}
	for _, test := range []struct {
		name string
		args []string
		want string
	}{
		{"nothing", nil, "--out and --name are needed"},
		{"a bad reference", []string{"--out", out, "--name", "Not A Name"}, "repository can only contain"},
		{"a file that is not there", append(base, "--file", dir+"/absent:/x"), "no such file"},
		{"a file without destination", append(base, "--file", file), "SRC:DST[:MODE]"},
		{"a relative destination", append(base, "--file", file+":x"), "absolute DST"},
		{"a mode that is not octal", append(base, "--file", file+":/x:rwx"), "octal MODE"},
		{"a link without destination", append(base, "--link", "x"), "TARGET:DST"},
		{"a label without value", append(base, "--label", "x"), "K=V"},
		{"a device", append(base, "--file", "/dev/null:/x"), "neither a file, a directory nor a link"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := imageCommand(t.Context(), Layout{}, test.args)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
			if _, err := os.Stat(out); err == nil {
				t.Error("an archive was written")
			}
		})
	}
}

// compile returns the file made from C source, or skips where there is no gcc.
func compile(t *testing.T, file, source string, flags ...string) string {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("gcc is not in the PATH")
	}
	c := writeTestFile(t, file+".c", source, 0o644)
	out, err := exec.Command(gcc, append([]string{"-o", file, c}, flags...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	return file
}

// A program with a library of its own beside it needs that one, found by its
// run path, libc, and the loader. With these alone it runs.
func TestLibraries(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	lib := compile(t, filepath.Join(dir, "lib", "libanswer.so"), "int answer(void) { return 42; }", "-shared", "-fPIC")
	const source = "int answer(void); int main(void) { return answer(); }"
	link := []string{"-L" + filepath.Join(dir, "lib"), "-lanswer"}
	// Without /proc the loader does not know $ORIGIN, so the program that runs
	// below in a root of its own has its run path in full.
	program := compile(t, filepath.Join(dir, "program"), source, append(link, "-Wl,-rpath,"+filepath.Join(dir, "lib"))...)
	origin := compile(t, filepath.Join(dir, "origin"), source, append(link, "-Wl,-rpath,$ORIGIN/lib")...)
	older := compile(t, filepath.Join(dir, "older"), source, append(link, "-Wl,--disable-new-dtags,-rpath,${ORIGIN}/lib")...)
	for _, file := range []string{program, origin, older} {
		libs, err := libraries(file, libraryDirs())
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, l := range libs {
			names = append(names, filepath.Base(l))
		}
		for _, want := range []string{"libanswer.so", "libc.so.6", "ld-linux"} {
			if !strings.Contains(strings.Join(names, " "), want) {
				t.Errorf("%s: the libraries %v lack %s", file, libs, want)
			}
		}
	}

	im := Image{Name: "localhost/x:test"}
	if err := errors.Join(im.Add(program, program, 0), im.AddLibraries(libraryDirs())); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "image.tar")
	if _, err := writeImages(out, im); err != nil {
		t.Fatal(err)
	}
	_, contents := layerOf(t, out)
	t.Run("suffice to run it", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("changing the root directory needs root")
		}
		root := t.TempDir()
		for name, content := range contents {
			if !strings.HasSuffix(name, "/") {
				writeTestFile(t, filepath.Join(root, name), content, 0o755)
			}
		}
		cmd := exec.Command(program)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		var exit *exec.ExitError
		if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 42 {
			t.Errorf("the program ended with %v, want exit status 42", err)
		}
	})

	if err := os.Remove(lib); err != nil {
		t.Fatal(err)
	}
	if _, err := libraries(program, libraryDirs()); err == nil || !strings.Contains(err.Error(), program+" needs libanswer.so") {
		t.Errorf("without the library: got error %v, want one that names it and the program", err)
	}
	static := compile(t, filepath.Join(dir, "static"), "int main(void) { return 0; }", "-static")
	if libs, err := libraries(static, libraryDirs()); err != nil || len(libs) != 0 {
		t.Errorf("a static program: got %v, %v; want none", libs, err)
	}
	script := writeTestFile(t, filepath.Join(dir, "script"), "#!/bin/sh\n", 0o755)
	if libs, err := libraries(script, libraryDirs()); err != nil || len(libs) != 0 {
		t.Errorf("a script: got %v, %v; want none", libs, err)
	}
}
