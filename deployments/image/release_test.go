// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
)

func TestVersionsThatAreNone(t *testing.T) {
	for _, v := range []string{"", "1.2.3", "v1.2", "v1", "v1.2.3+build", "v01.2.3", "latest", "c24e5f8-dirty"} {
		r := release{source: source{about: about{version: v}}}
		if err := r.check(t.Context()); err == nil || !strings.Contains(err.Error(), "is no semantic version") {
			t.Errorf("%q: got %v", v, err)
		}
	}
}

func TestUncommittedIsNotReleased(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("git", "init", "--quiet", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.WriteFile(filepath.Join(dir, "new.go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	r := release{source: source{checkout: dir, about: about{version: "v1.2.3"}}}
	if err := r.check(t.Context()); err == nil || !strings.Contains(err.Error(), "new.go") {
		t.Errorf("got %v, want a refusal that names new.go", err)
	}
}

// A release with a lock that is behind is refused, one with the newest is not.
func TestOldPackagesAreNotReleased(t *testing.T) {
	dir := t.TempDir()
	withApt(t, `for a; do case $a in --print-uris) echo "'http://mirror/b' libc6_2_arm64.deb 7 SHA256:`+zeros+`";; esac; done`)
	script := "git init --quiet && printf '# C\n\n## v1.2.3\n\n- new\n' >CHANGELOG.md && git add . && git -c user.name=n -c user.email=e commit --quiet -m m"
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p := pkg{use: useImage, name: "libc6", version: "2", arch: "arm64", file: "libc6_2_arm64.deb", sha256: zeros}
	r := release{source: source{checkout: dir, lock: []pkg{p}, debian: &debian{dir: t.TempDir()}, about: about{version: "v1.2.3"}}}
	if err := r.check(t.Context()); err != nil {
		t.Errorf("got %v", err)
	}
	r.lock[0].sha256 = strings.ReplaceAll(zeros, "0", "1")
	if err := r.check(t.Context()); err == nil || !strings.Contains(err.Error(), "debian.lock is behind") {
		t.Errorf("got %v, want that the lock is behind", err)
	}
	r.again = true
	if err := r.check(t.Context()); err != nil {
		t.Errorf("an old version, built again: %v", err)
	}
}

func TestNotes(t *testing.T) {
	const log = "# Changelog\n\nIntro.\n\n## Unreleased: v0.2.0\n\n- next\n\n## v0.1.0, the first release\n\n- first\n\n## v0.1.0-rc.1\n\n- try\n"
	for _, test := range []struct{ version, want string }{
		{"v0.1.0", "# gpu-agent v0.1.0\n\n- first\n"},
		{"v0.1.0-rc.1", "# gpu-agent v0.1.0-rc.1\n\n- try\n"},
		{"v0.1.0-rc.2", "# gpu-agent v0.1.0-rc.2\n\n- first\n"},
		{"v0.2.0-rc.1", "# gpu-agent v0.2.0-rc.1\n\n- next\n"},
		{"v0.2.0", ""},
		{"v0.3.0", ""},
	} {
		r := release{source: source{checkout: t.TempDir(), about: about{version: test.version}}}
		if err := os.WriteFile(filepath.Join(r.checkout, "CHANGELOG.md"), []byte(log), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := r.notes()
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%s: got %q, %v; want %q", test.version, got, err, test.want)
		}
	}
}

func TestReleaseIsWhole(t *testing.T) {
	r, cache := built(t)
	r.about.version = "v0.1.0-rc.1"
	r.out, r.plugins = filepath.Join(t.TempDir(), "dist", "v0.1.0-rc.1"), builtPlugins(t)
	if err := r.make(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.make(t.Context()); err == nil || !strings.Contains(err.Error(), "is there already") {
		t.Errorf("over a release that is there: %v", err)
	}
	cmd := exec.Command("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")
	cmd.Dir = r.out
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("check the sums: %v\n%s", err, out)
	}
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(r.out, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	sums, digest := read("SHA256SUMS"), strings.TrimSpace(read("gpu-agent-digest"))
	for _, name := range []string{"gpu-agent-v0.1.0-rc.1.oci.tar", "gpu-agent-0.1.0-rc.1.tgz", "gpu-agent-v0.1.0-rc.1.yaml", "gpu-agent-v0.1.0-rc.1-amd64.cdx.json", "NOTES.md", "gpu-agent-digest", "gpu-agent-chart-digest",
		"kubectl-gpu-v0.1.0-rc.1-darwin-arm64.tar.gz", "kubectl-gpu-v0.1.0-rc.1-linux-amd64.tar.gz", "kubectl-gpu-v0.1.0-rc.1-linux-amd64.cdx.json",
		"gpu-agent-v0.1.0-rc.1.intoto.json", "gpu-placer-v0.1.0-rc.1.intoto.json",
		"gpu-placer-v0.1.0-rc.1.oci.tar", "gpu-placer-v0.1.0-rc.1.yaml", "gpu-placer-v0.1.0-rc.1-amd64.cdx.json", "gpu-placer-digest"} {
		if !strings.Contains(sums, "  "+name+"\n") {
			t.Errorf("SHA256SUMS lacks %s", name)
		}
	}
	for _, p := range r.lock {
		if !strings.Contains(sums, p.sha256+"  debian/"+p.file+"\n") {
			t.Errorf("SHA256SUMS lacks %s as locked", p)
		}
	}
	image := r.repository(products[0]) + "@" + digest
	placer := r.repository(products[1]) + "@" + strings.TrimSpace(read("gpu-placer-digest"))
	t.Run("statement", func(t *testing.T) { r.isStated(t, read("gpu-agent-v0.1.0-rc.1.intoto.json"), digest) })
	t.Run("archive", func(t *testing.T) {
		dir := t.TempDir()
		if out, err := exec.Command("tar", "-xf", filepath.Join(r.out, "gpu-agent-v0.1.0-rc.1.oci.tar"), "-C", dir).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		archive, err := layout.ImageIndexFromPath(dir)
		if err != nil {
			t.Fatal(err)
		}
		manifest, err := archive.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, m := range manifest.Manifests {
			names = append(names, m.Annotations["io.containerd.image.name"])
			if m.Digest.String() != digest {
				t.Errorf("the archive has %s, and gpu-agent-digest says %s", m.Digest, digest)
			}
		}
		// Programs that do not know it would change the digest.
		if raw, err := os.ReadFile(filepath.Join(dir, "blobs", "sha256", strings.TrimPrefix(digest, "sha256:"))); err != nil || strings.Contains(string(raw), "artifactType") {
			t.Errorf("the index has an artifact type, %v:\n%s", err, raw)
		}
		if got := strings.Join(names, " "); got != r.repository(products[0])+":v0.1.0-rc.1 "+image {
			t.Errorf("the image is called %s", got)
		}
	})
	t.Run("manifests", func(t *testing.T) {
		for file, want := range map[string]string{"gpu-agent-v0.1.0-rc.1.yaml": image, "gpu-placer-v0.1.0-rc.1.yaml": placer} {
			images := 0
			for _, line := range strings.Split(read(file), "\n") {
				if name, ok := strings.CutPrefix(strings.TrimLeft(line, " -"), "image: "); ok {
					images++
					if name != want {
						t.Errorf("a container has image %s, want %s", name, want)
					}
				}
			}
			if images == 0 {
				t.Errorf("no container of %s has an image", file)
			}
		}
	})
	t.Run("chart", func(t *testing.T) {
		helm := filepath.Join(cache, "bin", "helm")
		if _, err := os.Stat(helm); err != nil {
			t.Skip("helm is not built: go run ./tests/stages node helm")
		}
		chart := filepath.Join(r.out, "gpu-agent-0.1.0-rc.1.tgz")
		for _, args := range [][]string{{"lint", "--strict", chart}, {"show", "chart", chart}, {"template", "x", chart, "--set", "placer.enabled=true"}} {
			out, err := exec.Command(helm, args...).CombinedOutput()
			if err != nil {
				t.Fatalf("helm %s: %v\n%s", args[0], err, out)
			}
			want := map[string][]string{"lint": {"0 chart(s) failed"}, "show": {"\nappVersion: v0.1.0-rc.1\n"}, "template": {"image: " + image + "\n", "image: " + placer + "\n"}}[args[0]]
			for _, want := range want {
				if text := "\n" + string(out); !strings.Contains(text, want) || strings.Contains(text, "localhost/") {
					t.Errorf("helm %s says, without %q or with localhost/:\n%s", args[0], want, out)
				}
			}
		}
	})
}

// From one commit, in two folders, with caches of their own and compilers that lie elsewhere.
func TestTwoClonesSameRelease(t *testing.T) {
	if !*long {
		t.Skip("takes minutes: one clone is built with an empty cache of Go; -long runs it, and TestSameFilesSameDigest is the short form")
	}
	r, _ := built(t)
	const version = "v0.1.0-rc.1"
	var sums []string
	var releases []string
	for _, where := range []string{"a", "a/second/place"} {
		dir := filepath.Join(t.TempDir(), where)
		cache, clone := filepath.Join(dir, "cache"), filepath.Join(dir, "clone")
		if err := os.MkdirAll(filepath.Join(cache, "images"), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{
			{"git", "clone", "--quiet", r.checkout, clone},
			{"sh", "-c", `mkdir "$1/images/debian" && cp "$2"/*.deb "$1/images/debian"`, "sh", cache, r.debian.dir},
		} {
			if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", args[0], err, out)
			}
		}
		cmd := exec.CommandContext(t.Context(), "make", "--silent", "release", "VERSION="+version, "AGAIN=1", "CACHE="+cache)
		cmd.Dir, cmd.Env = clone, os.Environ()
		if where != "a" {
			cmd.Env = append(cmd.Env, "GOCACHE="+filepath.Join(dir, "go"), "CGO_CFLAGS=-O1", "TZ=Asia/Tokyo")
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("make release: %v\n%s", err, out)
		}
		releases = append(releases, filepath.Join(clone, "dist", version))
		data, err := os.ReadFile(filepath.Join(clone, "dist", version, "SHA256SUMS"))
		if err != nil {
			t.Fatal(err)
		}
		sums = append(sums, string(data))
	}
	for _, p := range platforms {
		if !strings.Contains(sums[0], "  kubectl-gpu-"+version+"-"+p.String()+".tar.gz\n") {
			t.Errorf("`make release` makes no plugin for %s", p)
		}
	}
	if sums[0] != sums[1] {
		t.Errorf("the clones gave\n%s\nand\n%s", sums[0], sums[1])
	}
	for _, of := range products {
		t.Run(of.name+" starts on arm64", func(t *testing.T) { startsOnArm64(t, r, of, releases[0], version) })
	}
}

// startsOnArm64 runs the program out of an archive, under emulation.
func startsOnArm64(t *testing.T, r *release, of product, dir, version string) {
	tmp := t.TempDir()
	qemu, err := r.debian.qemu(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("sh", "-c", `mkdir "$1/oci" && tar -xf "$2" -C "$1/oci"`,
		"sh", tmp, filepath.Join(dir, of.name+"-"+version+".oci.tar")).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	archive, err := layout.ImageIndexFromPath(filepath.Join(tmp, "oci"))
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := archive.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	index, err := archive.ImageIndex(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	images, err := partial.FindImages(index, match.Platforms(v1.Platform{OS: "linux", Architecture: "arm64"}))
	if err != nil || len(images) != 1 {
		t.Fatalf("got %d images for arm64, %v; want 1", len(images), err)
	}
	root := filepath.Join(tmp, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	unpack := exec.Command("tar", "-xf", "-", "-C", root, "--no-same-owner")
	unpack.Stdin = mutate.Extract(images[0])
	if out, err := unpack.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, page := range []string{"4096", "65536"} {
		out, err := exec.Command(qemu, "-p", page, "-L", root, filepath.Join(root, "usr/bin", of.name), "version").CombinedOutput()
		if err != nil || !strings.HasPrefix(string(out), version+" ") || !strings.HasSuffix(string(out), "linux/arm64)\n") {
			t.Errorf("with pages of %s bytes: %v\n%s", page, err, out)
		}
	}
}
