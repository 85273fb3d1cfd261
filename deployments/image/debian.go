// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// lockText is the lock at the time this program was built, which is just before it is run.
//
//go:embed debian.lock
var lockText string

// architectures are those that images are made for; the first is the one that compilers run on.
var architectures = []string{"amd64", "arm64"}

// What a package is for.
const (
	useImage  = "image"
	usePlacer = "placer"
	useLink   = "link"
	useCross  = "cross"
)

// every is the architecture of a package that is the same for all.
const every = "all"

// pkg is a Debian package of the lock. Without a version it is only asked for.
type pkg struct {
	use, name, version, arch string
	file                     string // as apt names it
	sha256                   string
}

func (p pkg) String() string { return p.name + " " + p.version + " " + p.arch }

// parseLock reads a lock. Comments are kept by [renewLock], not here.
func parseLock(text string) ([]pkg, error) {
	var all []pkg
	for i, line := range strings.Split(text, "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		p, err := parsePackage(f)
		if err != nil {
			return nil, fmt.Errorf("read debian.lock: line %d: %w", i+1, err)
		}
		all = append(all, p)
	}
	return all, nil
}

func parsePackage(f []string) (pkg, error) {
	if len(f) != 6 {
		return pkg{}, fmt.Errorf("it has %d columns in place of 6: "+
			"use, package, version, architecture, file, SHA-256; `make lock` fills in the last ones", len(f))
	}
	p := pkg{use: f[0], name: f[1], version: f[2], arch: f[3], file: f[4], sha256: f[5]}
	if uses := []string{useImage, usePlacer, useLink, useCross}; !slices.Contains(uses, p.use) {
		return pkg{}, fmt.Errorf("use %q is none of %s", p.use, strings.Join(uses, ", "))
	}
	if b, err := hex.DecodeString(p.sha256); err != nil || len(b) != sha256.Size {
		return pkg{}, fmt.Errorf("%q is no SHA-256 in hex", p.sha256)
	}
	if filepath.Base(p.file) != p.file || !strings.HasSuffix(p.file, ".deb") {
		return pkg{}, fmt.Errorf("%q is no name of a package's file", p.file)
	}
	return p, nil
}

// of are the packages for a use, on an architecture.
func of(all []pkg, arch string, uses ...string) (some []pkg) {
	for _, p := range all {
		for _, use := range uses {
			if p.use == use && (p.arch == arch || p.arch == every) {
				some = append(some, p)
			}
		}
	}
	return some
}

// debian fetches packages, with lists and caches of its own: it neither reads what is
// installed on this machine nor changes what its apt knows.
type debian struct {
	dir    string // in the cache
	listed bool   // the lists were fetched by this process
}

func (d *debian) apt(ctx context.Context, dir string, args ...string) ([]byte, error) {
	options := []string{
		"-q",
		"-o", "Dir::State::Lists=" + filepath.Join(d.dir, "lists"),
		"-o", "Dir::State::Status=/dev/null",
		"-o", "Dir::Cache=" + filepath.Join(d.dir, "cache"),
		"-o", "APT::Sandbox::User=root",
		"-o", "Acquire::Languages=none",
		"-o", "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
	}
	for _, arch := range architectures {
		options = append(options, "-o", "APT::Architectures::="+arch)
	}
	return run(ctx, dir, "apt-get", append(options, args...)...)
}

// run runs a program; the error has what it said.
func run(ctx context.Context, dir, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", program, args[len(args)-1], err, bytes.TrimSpace(errs.Bytes()))
	}
	return out, nil
}

// update fetches the mirror's lists, once.
func (d *debian) update(ctx context.Context) error {
	if d.listed {
		return nil
	}
	for _, sub := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(d.dir, sub), 0o755); err != nil {
			return fmt.Errorf("fetch Debian's lists: %w", err)
		}
	}
	if _, err := d.apt(ctx, "", "update", "-o", "APT::Update::Error-Mode=any"); err != nil {
		return fmt.Errorf("fetch Debian's lists: %w", err)
	}
	d.listed = true
	return nil
}

// newest returns packages as the mirror has them now.
func (d *debian) newest(ctx context.Context, packages []pkg) ([]pkg, error) {
	if err := d.update(ctx); err != nil {
		return nil, err
	}
	args := []string{"download", "--print-uris"}
	for _, p := range packages {
		args = append(args, p.name+":"+p.arch)
	}
	out, err := d.apt(ctx, "", args...)
	if err != nil {
		return nil, fmt.Errorf("look for Debian's packages: %w", err)
	}
	type key struct{ name, arch string }
	found := map[key]pkg{}
	for line := range strings.Lines(string(out)) {
		// 'where' name_version_architecture.deb size SHA256:…; a colon of the version is written as %3a.
		f := strings.Fields(line)
		if len(f) != 4 || !strings.HasPrefix(f[3], "SHA256:") {
			return nil, fmt.Errorf("look for Debian's packages: apt-get says %q, which is not what was expected", line)
		}
		parts := strings.Split(strings.TrimSuffix(f[1], ".deb"), "_")
		if len(parts) != 3 {
			return nil, fmt.Errorf("look for Debian's packages: the file %s has no version in its name", f[1])
		}
		p := pkg{
			name: parts[0], version: strings.ReplaceAll(parts[1], "%3a", ":"), arch: parts[2],
			file: f[1], sha256: strings.TrimPrefix(f[3], "SHA256:"),
		}
		found[key{p.name, p.arch}] = p
	}
	var all []pkg
	for _, p := range packages {
		now, ok := found[key{p.name, p.arch}]
		if !ok {
			return nil, fmt.Errorf("look for Debian's packages: the mirror has no %s for %s", p.name, p.arch)
		}
		now.use = p.use
		all = append(all, now)
	}
	return all, nil
}

// fetch returns the file of a package, from the cache or the mirror.
func (d *debian) fetch(ctx context.Context, p pkg) (string, error) {
	at := filepath.Join(d.dir, p.file)
	if err := verify(at, p); err == nil {
		return at, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if err := d.update(ctx); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(d.dir, ".download-")
	if err != nil {
		return "", fmt.Errorf("fetch %s: %w", p, err)
	}
	defer os.RemoveAll(tmp)
	if _, err := d.apt(ctx, tmp, "download", p.name+":"+p.arch+"="+p.version); err != nil {
		return "", fmt.Errorf("fetch %s: %w: %w\n"+
			"The mirror may serve a newer version alone: `make lock` renews debian.lock. "+
			"The packages of a release lie beside its image; put %s into %s to build that one again",
			p, errNotServed, err, p.file, d.dir)
	}
	if err := verify(filepath.Join(tmp, p.file), p); err != nil {
		return "", err
	}
	return at, os.Rename(filepath.Join(tmp, p.file), at)
}

// served is a lock with, in place of each package for an architecture that neither the cache
// nor the mirror has, the one that the mirror has now; and what was replaced, for people.
func (d *debian) served(ctx context.Context, lock []pkg, arch string) (now []pkg, replaced []string, err error) {
	needed := of(lock, arch, useImage, usePlacer, useLink)
	if arch != runtime.GOARCH {
		needed = append(needed, of(lock, architectures[0], useCross)...)
	}
	now = slices.Clone(lock)
	for _, p := range needed {
		_, why := d.fetch(ctx, p)
		if !errors.Is(why, errNotServed) {
			if why != nil {
				return nil, nil, why
			}
			continue
		}
		other, err := d.newest(ctx, []pkg{p})
		if err != nil {
			return nil, nil, errors.Join(why, err)
		}
		if other[0].version == p.version {
			return nil, nil, why
		}
		now[slices.Index(now, p)] = other[0]
		replaced = append(replaced,
			fmt.Sprintf("%s is no longer served: the image is made with %s", p, other[0].version))
	}
	return now, replaced, nil
}

// errNotServed is in the error of a package that the mirror does not give out.
var errNotServed = errors.New("the mirror does not give it out")

// verify holds a file against the lock.
func verify(file string, p pkg) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	if sum := hex.EncodeToString(h.Sum(nil)); sum != p.sha256 {
		return fmt.Errorf("%s has the SHA-256 %s, and debian.lock says %s: "+
			"it is not the package that was locked; remove it", file, sum, p.sha256)
	}
	return nil
}

// unpack puts packages' files below a folder that is named by what they are, unless they
// are there.
func (d *debian) unpack(ctx context.Context, packages []pkg) (string, error) {
	h := sha256.New()
	for _, p := range packages {
		fmt.Fprintln(h, p.sha256)
	}
	root := filepath.Join(d.dir, "root-"+hex.EncodeToString(h.Sum(nil))[:16])
	if _, err := os.Stat(root); err == nil {
		return root, nil
	}
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return "", fmt.Errorf("unpack packages: %w", err)
	}
	tmp, err := os.MkdirTemp(d.dir, ".unpack-")
	if err != nil {
		return "", fmt.Errorf("unpack packages: %w", err)
	}
	defer os.RemoveAll(tmp)
	for _, p := range packages {
		file, err := d.fetch(ctx, p)
		if err != nil {
			return "", err
		}
		if _, err := run(ctx, "", "dpkg-deb", "--extract", file, filepath.Join(tmp, "root")); err != nil {
			return "", fmt.Errorf("unpack %s: %w", p, err)
		}
	}
	if err := os.Rename(filepath.Join(tmp, "root"), root); err != nil {
		if _, there := os.Stat(root); there == nil {
			return root, nil // somebody else was faster
		}
		return "", fmt.Errorf("unpack packages: %w", err)
	}
	return root, nil
}

// read returns a package's files, without unpacking it anywhere.
func (d *debian) read(ctx context.Context, p pkg) (tree, error) {
	file, err := d.fetch(ctx, p)
	if err != nil {
		return nil, err
	}
	data, err := run(ctx, "", "dpkg-deb", "--fsys-tarfile", file)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", p, err)
	}
	files := tree{}
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", p, err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", p, err)
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		switch h.Typeflag {
		case tar.TypeReg:
			files[name] = entry{mode: h.Mode & 0o777, data: content}
		case tar.TypeSymlink:
			files[name] = entry{link: h.Linkname}
		}
	}
}

// gccVersion is Debian 12's.
const gccVersion = "12"

// compiler is the command that compiles for an architecture, against the lock's packages.
func (d *debian) compiler(ctx context.Context, lock []pkg, arch string) (string, error) {
	root, err := d.unpack(ctx, of(lock, arch, useImage, useLink))
	if err != nil {
		return "", err
	}
	m, cc := machines[arch], "gcc"
	switch {
	case arch == runtime.GOARCH:
		version, err := run(ctx, "", "gcc", "-dumpversion")
		if err != nil {
			return "", fmt.Errorf("ask for the compiler's version: %w", err)
		}
		if v := strings.TrimSpace(string(version)); v != gccVersion {
			return "", fmt.Errorf("gcc is of version %s, and an image takes version %s, Debian 12's, "+
				"whose own library is in debian.lock", v, gccVersion)
		}
	case runtime.GOARCH != architectures[0]:
		return "", fmt.Errorf("images for %s are made on %s or on %s; this machine is %s",
			arch, architectures[0], arch, runtime.GOARCH)
	default:
		tools, err := d.unpack(ctx, of(lock, architectures[0], useCross))
		if err != nil {
			return "", err
		}
		name := fmt.Sprintf("%s/usr/bin/%s-", tools, m.triplet)
		libraries := tools + "/usr/lib/" + machines[architectures[0]].triplet
		cc = fmt.Sprintf("env LD_LIBRARY_PATH=%s %sgcc-%s -B%s", libraries, name, gccVersion, name)
	}
	// libgcc is found by -B, everything else by the root. Paths do not get into what is built.
	return fmt.Sprintf("%s --sysroot=%s -B%s/usr/lib/gcc/%s/%s -ffile-prefix-map=%s=",
		cc, root, root, m.triplet, gccVersion, root), nil
}

// qemu is the emulator that runs arm64 programs on amd64. It is for tests and gets into
// nothing that is built, so it is not locked: what is in the cache stays, until there is none.
func (d *debian) qemu(ctx context.Context) (string, error) {
	at := filepath.Join(d.dir, "qemu")
	program := filepath.Join(at, "usr/bin/qemu-aarch64-static")
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	now, err := d.newest(ctx, []pkg{{name: "qemu-user-static", arch: architectures[0]}})
	if err != nil {
		return "", err
	}
	root, err := d.unpack(ctx, now)
	if err != nil {
		return "", err
	}
	if err := os.Symlink(filepath.Base(root), at); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("keep qemu: %w", err)
	}
	return program, nil
}

// renewLock is the lock's text with the newest version of each package.
func renewLock(ctx context.Context, d *debian, text string) (string, error) {
	lines := strings.Split(text, "\n")
	var wanted []pkg
	var at []int // their lines
	for i, line := range lines {
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		if len(f) != 3 && len(f) != 6 {
			return "", fmt.Errorf("renew debian.lock: line %d has %d columns; "+
				"it takes use, package and architecture, or all six", i+1, len(f))
		}
		p := pkg{use: f[0], name: f[1], arch: f[2]}
		if len(f) == 6 {
			p.arch = f[3]
		}
		wanted, at = append(wanted, p), append(at, i)
	}
	now, err := d.newest(ctx, wanted)
	if err != nil {
		return "", err
	}
	for i, p := range now {
		lines[at[i]] = strings.Join([]string{p.use, p.name, p.version, p.arch, p.file, p.sha256}, " ")
	}
	return strings.Join(lines, "\n"), nil
}

// behind are the packages of which the mirror has another version.
func behind(ctx context.Context, d *debian, lock []pkg) ([]string, error) {
	now, err := d.newest(ctx, lock)
	if err != nil {
		return nil, err
	}
	var all []string
	for i, p := range lock {
		if now[i].sha256 != p.sha256 {
			all = append(all, fmt.Sprintf("%s: the mirror has %s", p, now[i].version))
		}
	}
	return all, nil
}
