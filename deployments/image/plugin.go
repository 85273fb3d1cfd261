// SPDX-License-Identifier: Apache-2.0

package main

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"debug/elf"
	"debug/macho"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// pluginName is the plugin for kubectl, and pluginCompletes the script by which kubectl completes it.
const (
	pluginName      = "kubectl-gpu"
	pluginCompletes = "kubectl_complete-gpu"
)

// platform is what the plugin is built for.
type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "-" + p.arch }

// platforms are those that people work on. `make plugins` builds them.
var platforms = []platform{{"darwin", "amd64"}, {"darwin", "arm64"}, {"linux", "amd64"}, {"linux", "arm64"}}

// addPlugins writes an archive for each platform, and what its program is made of. A release that is
// made for a test may have none, as it may have one architecture alone.
func (r *release) addPlugins(ctx context.Context, dir string) error {
	if r.plugins == "" {
		return nil
	}
	for _, p := range platforms {
		if err := r.addPlugin(ctx, dir, p); err != nil {
			return fmt.Errorf("pack %s for %s: %w", pluginName, p, err)
		}
	}
	return nil
}

func (r *release) addPlugin(ctx context.Context, dir string, p platform) error {
	bin := filepath.Join(r.plugins, p.String())
	program := filepath.Join(bin, pluginName)
	if err := p.check(program); err != nil {
		return err
	}
	modules, err := linked(ctx, r.checkout, bin, []string{pluginName})
	if err != nil {
		return err
	}
	files := tree{"THIRD_PARTY_NOTICES": {mode: 0o644, data: notices("program", modules, nil)}}
	err = errors.Join(files.add(program, pluginName, 0o755),
		files.add(filepath.Join(r.checkout, "cmd", pluginName, pluginCompletes), pluginCompletes, 0o755),
		files.add(filepath.Join(r.checkout, "LICENSE"), "LICENSE", 0o644))
	if err != nil {
		return err
	}
	name := filepath.Join(dir, fmt.Sprintf("%s-%s-%s", pluginName, r.about.version, p))
	err = writeFile(name+".tar.gz", func(w io.Writer) error {
		z := gzip.NewWriter(w)
		return errors.Join(files.write(z, r.about.created), z.Close())
	})
	if err != nil {
		return err
	}
	sum := fmt.Sprintf("%x", sha256.Sum256(files[pluginName].data))
	purl := "pkg:generic/" + pluginName + "@" + r.about.version + "?os=" + p.os + "&arch=" + p.arch
	root := cdx.Component{BOMRef: purl, Type: cdx.ComponentTypeApplication, PackageURL: purl}
	return writeFile(name+".cdx.json", func(w io.Writer) error {
		return r.writeBOM(w, root, pluginName, sum, "", modules, nil)
	})
}

// check returns an error if a program is not one of the platform's, or needs a C library.
func (p platform) check(file string) error {
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return fmt.Errorf("`make plugins` builds it: %w", err)
	}
	for _, s := range info.Settings {
		want, judged := map[string]string{"GOOS": p.os, "GOARCH": p.arch, "CGO_ENABLED": "0"}[s.Key]
		if judged && s.Value != want {
			return fmt.Errorf("%s is built with %s=%s, want %s", file, s.Key, s.Value, want)
		}
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if p.os == "darwin" {
		m, err := macho.NewFile(f)
		if err != nil {
			return fmt.Errorf("%s is no program of macOS: %w", file, err)
		}
		want := map[string]macho.Cpu{"amd64": macho.CpuAmd64, "arm64": macho.CpuArm64}[p.arch]
		if m.Cpu != want || m.Type != macho.TypeExec {
			return fmt.Errorf("%s is a %s for %s, want a program for %s", file, m.Type, m.Cpu, want)
		}
		return nil
	}
	e, err := elf.NewFile(f)
	if err != nil {
		return fmt.Errorf("%s is no program of Linux: %w", file, err)
	}
	want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[p.arch]
	if e.Machine != want || e.Type != elf.ET_EXEC {
		return fmt.Errorf("%s is %s for %s, want a program for %s", file, e.Type, e.Machine, want)
	}
	for _, s := range e.Progs {
		if s.Type == elf.PT_INTERP || s.Type == elf.PT_DYNAMIC {
			return fmt.Errorf("%s is not static: it has a segment %s", file, s.Type)
		}
	}
	return nil
}
