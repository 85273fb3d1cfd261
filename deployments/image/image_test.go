// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"crypto/x509"
	"debug/buildinfo"
	"debug/elf"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

var long = flag.Bool("long", false, "make a release from two clones, one with an empty cache of Go, and start it on arm64")

// cacheOf is where everything is that is built.
func cacheOf(t *testing.T) string {
	t.Helper()
	if cache := os.Getenv("GPU_TESTS_CACHE"); cache != "" {
		return cache
	}
	user, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(user, "gpu-agent")
}

// built is where `make image` has put programs and packages; a test that needs them is
// skipped where it was not run.
func built(t *testing.T) (r *release, cache string) {
	t.Helper()
	cache = cacheOf(t)
	for _, file := range []string{"bin/gpu-agent", "bin/gpu-agent-mps", "bin/gpu-placer", "bin/nvidia-cdi-hook", "images/debian"} {
		if _, err := os.Stat(filepath.Join(cache, file)); err != nil {
			t.Skipf("`make image` makes what this looks at: %v", err)
		}
	}
	lock, err := parseLock(lockText)
	if err != nil {
		t.Fatal(err)
	}
	d := &debian{dir: filepath.Join(cache, "images/debian")}
	lock, _, err = d.served(t.Context(), lock, architectures[0]) // as `make image` has taken them
	if err != nil {
		t.Fatal(err)
	}
	return &release{
		source: source{
			checkout: "../..", debian: d, lock: lock,
			about: about{version: "v1.2.3-rc.4", revision: "abc", created: time.Date(2026, 11, 27, 1, 2, 3, 0, time.UTC)},
		},
		repositories: map[string]string{"gpu-agent": "registry.example.com/gpu-agent", "gpu-placer": "registry.example.com/gpu-placer"},
		bins:         map[string]string{architectures[0]: filepath.Join(cache, "bin")},
	}, cache
}

// testImage builds an image from copies of the programs, laid out by another user.
func (r *release) testImage(t *testing.T, of product, mode os.FileMode) *part {
	t.Helper()
	dir := t.TempDir()
	for _, name := range of.programs {
		data, err := os.ReadFile(filepath.Join(r.bins[architectures[0]], name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, mode); err != nil {
			t.Fatal(err)
		}
	}
	p, err := r.build(t.Context(), of, architectures[0], dir)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestSameFilesSameDigest(t *testing.T) {
	r, _ := built(t)
	const lib = "usr/lib/x86_64-linux-gnu/"
	for _, test := range []struct {
		of   product
		want []string
	}{
		{products[0], []string{
			"2 0777 bin", "5 0755 etc/", "0 0644 etc/group", "2 0777 etc/os-release", "0 0644 etc/passwd", "2 0777 lib", "2 0777 lib64", "5 0755 licenses/",
			"0 0644 licenses/LICENSE", "0 0644 licenses/THIRD_PARTY_NOTICES", "5 1777 tmp/", "5 0755 usr/", "5 0755 usr/bin/",
			"0 0755 usr/bin/gpu-agent", "0 0755 usr/bin/gpu-agent-mps", "0 0755 usr/bin/nvidia-cdi-hook", "5 0755 usr/lib/", "0 0644 usr/lib/os-release", "5 0755 " + lib,
			"0 0755 " + lib + "ld-linux-x86-64.so.2", "0 0755 " + lib + "libc.so.6", "0 0644 " + lib + "libdl.so.2", "0 0644 " + lib + "libm.so.6",
			"0 0644 " + lib + "libpthread.so.0", "0 0644 " + lib + "librt.so.1", "5 0755 usr/lib64/", "2 0777 usr/lib64/ld-linux-x86-64.so.2",
			"5 0755 var/", "5 0755 var/lib/", "5 0755 var/lib/dpkg/", "5 0755 var/lib/dpkg/status.d/",
			"0 0644 var/lib/dpkg/status.d/base-files", "0 0644 var/lib/dpkg/status.d/libc6",
		}},
		{products[1], []string{
			"5 0755 etc/", "0 0644 etc/group", "2 0777 etc/os-release", "0 0644 etc/passwd", "5 0755 etc/ssl/", "5 0755 etc/ssl/certs/", "0 0644 etc/ssl/certs/ca-certificates.crt",
			"5 0755 licenses/", "0 0644 licenses/LICENSE", "0 0644 licenses/THIRD_PARTY_NOTICES", "5 0755 usr/", "5 0755 usr/bin/", "0 0755 usr/bin/gpu-placer",
			"5 0755 usr/lib/", "0 0644 usr/lib/os-release", "5 0755 var/", "5 0755 var/lib/", "5 0755 var/lib/dpkg/", "5 0755 var/lib/dpkg/status.d/",
			"0 0644 var/lib/dpkg/status.d/base-files", "0 0644 var/lib/dpkg/status.d/ca-certificates",
		}},
	} {
		t.Run(test.of.name, func(t *testing.T) {
			first, err := r.testImage(t, test.of, 0o700).image.Digest()
			if err != nil {
				t.Fatal(err)
			}
			p := r.testImage(t, test.of, 0o444)
			if second, err := p.image.Digest(); err != nil || second != first {
				t.Errorf("the same programs gave %s and %s, %v", first, second, err)
			}
			if got, want := strings.Join(contents(t, r, p), "\n"), strings.Join(test.want, "\n"); got != want {
				t.Errorf("the image has\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// contents are what the only layer of an image has, all of it of the commit's date and root's.
func contents(t *testing.T, r *release, p *part) (names []string) {
	t.Helper()
	layers, err := p.image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("got %d layers, %v; want 1", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	for tr := tar.NewReader(content); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.Equal(r.about.created) || h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Gname != "" {
			t.Errorf("%s: dated %v, owned by %d:%d %q %q; want the commit's date and root", h.Name, h.ModTime, h.Uid, h.Gid, h.Uname, h.Gname)
		}
		names = append(names, fmt.Sprintf("%c %04o %s", h.Typeflag, h.Mode, h.Name))
	}
}

// The placer's image has a static program, authorities that a program can read, and little else.
func TestPlacersImage(t *testing.T) {
	r, _ := built(t)
	p := r.testImage(t, products[1], 0o755)
	f, err := elf.NewFile(bytes.NewReader(p.files["usr/bin/gpu-placer"].data))
	if err != nil {
		t.Fatal(err)
	}
	if needed, err := f.ImportedLibraries(); err != nil || len(needed) > 0 || f.Section(".interp") != nil {
		t.Errorf("the program is not static: it needs %q, %v", needed, err)
	}
	bundle := p.files["etc/ssl/certs/ca-certificates.crt"].data
	if n := bytes.Count(bundle, []byte("-----BEGIN CERTIFICATE-----\n")); !x509.NewCertPool().AppendCertsFromPEM(bundle) || n < 100 {
		t.Errorf("the %d authorities cannot be read, or are few", n)
	}
	size, err := p.size()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%.1f MB compressed", float64(size)/1e6)
	if size > 12e6 {
		t.Errorf("the image has %.1f MB compressed, and it is to have 12 at most: see what was linked (go list -deps ./cmd/gpu-placer)", float64(size)/1e6)
	}
	config, err := p.image.ConfigFile()
	if err != nil || !slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/gpu-placer"}) || config.Config.Labels["org.opencontainers.image.title"] != "gpu-placer" {
		t.Errorf("%+v, %v", config, err)
	}
}

// What a program of the agent's image needs is in the image.
func TestImageIsWhole(t *testing.T) {
	r, _ := built(t)
	p := r.testImage(t, products[0], 0o755)
	looked := 0
	for name, e := range p.files {
		f, err := elf.NewFile(bytes.NewReader(e.data))
		if err != nil {
			continue // not a program
		}
		looked++
		needed, err := f.ImportedLibraries()
		if err != nil {
			t.Fatal(err)
		}
		for _, lib := range needed {
			if _, ok := p.files[path.Join("usr/lib", machines[p.arch].triplet, lib)]; !ok {
				t.Errorf("%s needs %s, which the image lacks", name, lib)
			}
		}
		if section := f.Section(".interp"); section != nil {
			loader, err := section.Data()
			if err != nil {
				t.Fatal(err)
			}
			if at := "usr" + strings.Trim(string(loader), "\x00"); len(p.files[path.Join(path.Dir(at), p.files[at].link)].data) == 0 {
				t.Errorf("%s is started by %s, which the image lacks", name, loader)
			}
		}
	}
	if looked != len(p.product.programs)+1+len(libraries) {
		t.Errorf("%d files are programs or libraries; this test looks at something else", looked)
	}
}

// A program's modules are in the notices and in the list of parts, and so are Debian's
// packages.
func TestNothingLinkedGoesUnnamed(t *testing.T) {
	r, _ := built(t)
	for i, debs := range [][]string{{"libc6", "libc6-dev", "gcc-12-base", "base-files", "linux-libc-dev"}, {"base-files", "ca-certificates"}} {
		t.Run(products[i].name, func(t *testing.T) { isNamed(t, r, r.testImage(t, products[i], 0o755), debs) })
	}
}

func isNamed(t *testing.T, r *release, p *part, debs []string) {
	var file bytes.Buffer
	if err := r.writeSBOM(&file, p); err != nil {
		t.Fatal(err)
	}
	var bom cdx.BOM
	if err := json.Unmarshal(file.Bytes(), &bom); err != nil {
		t.Fatal(err)
	}
	listed := map[string]cdx.Component{}
	for _, c := range *bom.Components {
		listed[c.Name+" "+c.Version] = c
	}
	noticed := "\n" + string(p.files["licenses/THIRD_PARTY_NOTICES"].data)
	looked := 0
	for _, name := range p.product.programs {
		info, err := buildinfo.Read(bytes.NewReader(p.files["usr/bin/"+name].data))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range info.Deps {
			looked++
			if !strings.Contains(noticed, "\n"+m.Path+" "+m.Version+": ") {
				t.Errorf("%s has code of %s %s, of which there is no notice", name, m.Path, m.Version)
			}
			c, ok := listed[m.Path+" "+m.Version]
			if !ok || c.PackageURL != "pkg:golang/"+m.Path+"@"+strings.ReplaceAll(m.Version, "+", "%2B") {
				t.Errorf("%s has code of %s %s, of which the SBOM says %q", name, m.Path, m.Version, c.PackageURL)
			} else if len(*c.Licenses) == 0 {
				t.Errorf("the SBOM knows no licence of %s", m.Path)
			}
		}
		if standard := "stdlib " + strings.TrimPrefix(info.GoVersion, "go"); !strings.Contains(noticed, "\n"+standard+": ") || listed[standard].Name == "" {
			t.Errorf("%s has code of Go's own library, which is not told", name)
		}
	}
	if looked < 20 {
		t.Errorf("the programs have %d modules only: this test looks at nothing", looked)
	}
	for _, d := range of(r.lock, p.arch, p.product.uses...) {
		c := listed[d.name+" "+d.version]
		if c.Hashes == nil || (*c.Hashes)[0].Value != d.sha256 {
			t.Errorf("the SBOM lacks %s", d)
		}
	}
	for _, name := range debs {
		if !strings.Contains(noticed, "\nDebian package "+name+" ") {
			t.Errorf("the notices lack %s", name)
		}
	}
	for _, d := range p.debs {
		if d.use == useLink {
			continue
		}
		control := p.files["var/lib/dpkg/status.d/"+d.name].data
		if !bytes.Contains(control, []byte("\nVersion: "+d.version+"\n")) {
			t.Errorf("scanners are told of %s as\n%s", d, control)
		}
	}
}

// Where a program can call methods by names that are made at run time, the linker keeps every
// method of every type: that was a sixth of the agent.
func TestNoMethodsAreKeptByName(t *testing.T) {
	var programs []string
	for _, of := range products {
		programs = append(programs, of.programs...)
	}
	programs = slices.DeleteFunc(programs, func(name string) bool { return name == "nvidia-cdi-hook" }) // NVIDIA's
	for _, program := range programs {
		var asked bytes.Buffer
		cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-tags", "netgo,osusergo,grpcnotrace", "-ldflags", "-s -w -dumpdep",
			"-o", filepath.Join(t.TempDir(), program), "./cmd/"+program)
		cmd.Dir, cmd.Stderr = "../..", &asked
		if err := cmd.Run(); err != nil {
			t.Fatalf("%v\n%.2000s", err, asked.String())
		}
		edges := 0
		for line := range strings.Lines(asked.String()) {
			edges++
			if from, _, ok := strings.Cut(line, " <ReflectMethod>"); ok && !strings.Contains(from, "->") {
				t.Errorf("%s has %s, which calls methods by name", program, from)
			}
		}
		if edges < 10000 {
			t.Errorf("the linker told of %d references in %s: this test looks at nothing", edges, program)
		}
	}
}

func TestModuleWithoutLicence(t *testing.T) {
	root := t.TempDir()
	inner := filepath.Join(root, "third_party", "other")
	if err := os.MkdirAll(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name string) {
		if err := os.WriteFile(filepath.Join(root, name), []byte("text of "+name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("licence.go") // code is not a licence
	m := module{path: "example.org/x", version: "v1.0.0"}
	err := m.addTexts(folders{root: root, packages: []string{inner}})
	if err == nil || !strings.Contains(err.Error(), "example.org/x v1.0.0 has no licence file") {
		t.Errorf("got %v, want that the module has no licence", err)
	}
	write("LICENSE-MIT.txt")
	write("third_party/other/COPYING")
	write("third_party/NOTICE")
	if err := m.addTexts(folders{root: root, packages: []string{inner}}); err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, text := range m.texts {
		files = append(files, text.file)
	}
	if got := strings.Join(files, " "); got != "LICENSE-MIT.txt third_party/NOTICE third_party/other/COPYING" {
		t.Errorf("found %s", got)
	}
	if err := m.addTexts(folders{}); err == nil {
		t.Error("a module that go list does not know was taken")
	}
}
