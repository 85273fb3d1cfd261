// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"context"
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
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

const imageHelp = `
Writes an archive that 'cluster load', 'ctr images import', 'docker load' and 'podman load' take. The same files give the
same bytes: entries are sorted, owned by root, dated 1970-01-01, and have mode 0755 if anyone may execute the source, else
0644, unless a mode is given. Parent directories are made as needed.

A destination whose parent is a --link of the same image lands where the link points.
With --with-libs every ELF file put in brings its dynamic loader and shared libraries, found on this machine as the loader
finds them, at the same paths. What a program loads by dlopen is not found that way: add it with --file.

A test's image, for example; the product's is made by deployments/image, without this machine's libraries:
  cluster image --out own.tar --name localhost/own:test --entrypoint /usr/bin/own --with-libs --file bin/own:/usr/bin/own:0755

`

func imageCommand(_ context.Context, _ Layout, args []string) error {
	flags := newFlagSet("image", "")
	flags.about = imageHelp
	var files, dirs, links, env, labels list
	out := flags.String("out", "", "archive to write")
	reference := flags.String("name", "", "reference of the image: localhost/agent:dev")
	entrypoint := flags.String("entrypoint", "", "program and first arguments, separated by commas")
	cmd := flags.String("cmd", "", "default arguments, separated by commas")
	user := flags.String("user", "", "user, or user:group, that containers run as; root unless given")
	workdir := flags.String("workdir", "", "directory that containers start in")
	withLibs := flags.Bool("with-libs", false, "add the dynamic loader and shared libraries of every ELF file")
	flags.Var(&files, "file", "SRC:DST[:MODE], a file, or a directory with all below it; repeatable")
	flags.Var(&dirs, "dir", "DST[:MODE], an empty directory; repeatable")
	flags.Var(&links, "link", "TARGET:DST, a symbolic link DST to TARGET; repeatable")
	flags.Var(&env, "env", "K=V for the container's environment; repeatable")
	flags.Var(&labels, "label", "K=V on the image; repeatable")
	if _, err := flags.parse(args, 0, 0); err != nil {
		return err
	}
	if *out == "" || *reference == "" {
		return errors.New("image: --out and --name are needed")
	}
	image := Image{Name: *reference, Entrypoint: split(*entrypoint), Cmd: split(*cmd), User: *user, Dir: *workdir, Env: env}
	for _, l := range labels {
		key, value, ok := strings.Cut(l, "=")
		if !ok {
			return fmt.Errorf("image: --label %s: it has the form K=V", l)
		}
		if image.Labels == nil {
			image.Labels = map[string]string{}
		}
		image.Labels[key] = value
	}
	// Links first, as they decide where everything below them lands.
	for _, l := range links {
		target, dst, ok := strings.Cut(l, ":")
		if !ok {
			return fmt.Errorf("image: --link %s: it has the form TARGET:DST", l)
		}
		image.Link(target, dst)
	}
	for _, d := range dirs {
		dst, mode, err := splitMode(d)
		if err != nil {
			return fmt.Errorf("image: --dir %s: %w", d, err)
		}
		image.Mkdir(dst, mode)
	}
	for _, f := range files {
		src, rest, ok := strings.Cut(f, ":")
		dst, mode, err := splitMode(rest)
		if !ok || err != nil || !path.IsAbs(dst) {
			return fmt.Errorf("image: --file %s: it has the form SRC:DST[:MODE] with an absolute DST and an octal MODE", f)
		}
		if err := image.Add(src, dst, mode); err != nil {
			return fmt.Errorf("image: --file %s: %w", f, err)
		}
	}
	if *withLibs {
		if err := image.AddLibraries(libraryDirs()); err != nil {
			return fmt.Errorf("image: %w", err)
		}
	}
	digests, err := writeImages(*out, image)
	if err != nil {
		return fmt.Errorf("image: %w", err)
	}
	fmt.Println(*reference, digests[0])
	return nil
}

func split(commas string) []string {
	if commas == "" {
		return nil
	}
	return strings.Split(commas, ",")
}

// splitMode splits DST[:MODE]; the mode is 0 where none is given.
func splitMode(s string) (string, fs.FileMode, error) {
	dst, octal, ok := strings.Cut(s, ":")
	if !ok {
		return dst, 0, nil
	}
	mode, err := strconv.ParseUint(octal, 8, 12)
	return dst, fs.FileMode(mode), err
}

// Image is a container image of one layer, made from files of this machine.
// Its zero value is empty and ready to use.
type Image struct {
	Name       string // reference with a tag
	Entrypoint []string
	Cmd        []string
	Env        []string
	User       string
	Dir        string // working directory
	Labels     map[string]string

	entries map[string]entry // by cleaned absolute path
}

// entry is a directory, a link or a regular file of an Image.
type entry struct {
	kind   byte // tar.TypeDir, TypeSymlink, TypeReg
	mode   int64
	target string // of a link
	source string // of a file: its content, read when the image is written
}

// Link adds a symbolic link.
func (im *Image) Link(target, dst string) {
	im.put(dst, entry{kind: tar.TypeSymlink, mode: 0o777, target: target})
}

// Mkdir adds a directory. Mode 0 stands for 0755; the bits above the
// permissions are those of chmod(2), 1777 for example.
func (im *Image) Mkdir(dst string, mode fs.FileMode) {
	if mode == 0 {
		mode = 0o755
	}
	im.put(dst, entry{kind: tar.TypeDir, mode: int64(mode)})
}

// Add puts a file at dst, or a directory with everything below it. A link named
// by src is followed; links below a directory stay links. Mode 0 stands for
// what the source allows.
func (im *Image) Add(src, dst string, mode fs.FileMode) error {
	src, err := filepath.EvalSymlinks(src)
	if err != nil {
		return err
	}
	return filepath.WalkDir(src, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(src, file)
		if err != nil {
			return err
		}
		at := path.Join(dst, filepath.ToSlash(relative))
		switch info, err := d.Info(); {
		case err != nil:
			return err
		case d.IsDir():
			im.Mkdir(at, 0)
		case d.Type() == fs.ModeSymlink:
			target, err := os.Readlink(file)
			if err != nil {
				return err
			}
			im.Link(target, at)
		case d.Type().IsRegular():
			e := entry{kind: tar.TypeReg, mode: int64(mode), source: file}
			if mode == 0 && info.Mode()&0o111 != 0 {
				e.mode = 0o755
			} else if mode == 0 {
				e.mode = 0o644
			}
			im.put(at, e)
		default:
			return fmt.Errorf("%s is neither a file, a directory nor a link", file)
		}
		return nil
	})
}

// AddLibraries adds the dynamic loader and the shared libraries of every ELF
// file in the image.
func (im *Image) AddLibraries(dirs []string) error {
	for _, at := range im.paths() {
		e := im.entries[at]
		if e.kind != tar.TypeReg {
			continue
		}
		libs, err := libraries(e.source, dirs)
		if err != nil {
			return err
		}
		for _, lib := range libs {
			if err := im.Add(lib, lib, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// put adds an entry and the directories above it. A directory never replaces
// what is there; anything else does.
func (im *Image) put(dst string, e entry) {
	if im.entries == nil {
		im.entries = map[string]entry{}
	}
	dst = path.Clean("/" + dst)
	if dst == "/" {
		return
	}
	parent := im.resolve(path.Dir(dst))
	for dir := parent; dir != "/"; dir = path.Dir(dir) {
		if _, ok := im.entries[dir]; !ok {
			im.entries[dir] = entry{kind: tar.TypeDir, mode: 0o755}
		}
	}
	at := path.Join(parent, path.Base(dst))
	if old, ok := im.entries[at]; ok && e.kind == tar.TypeDir && old.kind != tar.TypeDir {
		return
	}
	im.entries[at] = e
}

// resolve follows the image's own links in a directory's path.
func (im *Image) resolve(dir string) string {
	done, rest := "/", strings.Split(strings.Trim(dir, "/"), "/")
	for follows := 0; len(rest) > 0; {
		next := path.Join(done, rest[0])
		rest = rest[1:]
		e, ok := im.entries[next]
		if !ok || e.kind != tar.TypeSymlink || follows == 40 { // links in a circle
			done = next
			continue
		}
		follows++
		target := e.target
		if !path.IsAbs(target) {
			target = path.Join(path.Dir(next), target)
		}
		done = "/"
		rest = append(strings.Split(strings.Trim(path.Clean(target), "/"), "/"), rest...)
	}
	return done
}

func (im *Image) paths() []string {
	var out []string
	for p := range im.entries {
		out = append(out, p)
	}
	slices.Sort(out) // a directory sorts before what is in it
	return out
}

// writeLayer writes the image's files as a tar archive.
func (im *Image) writeLayer(w io.Writer) error {
	tw := tar.NewWriter(w)
	for _, at := range im.paths() {
		e := im.entries[at]
		h := &tar.Header{
			Typeflag: e.kind, Name: strings.TrimPrefix(at, "/"), Mode: e.mode, Linkname: e.target,
			ModTime: time.Unix(0, 0), Format: tar.FormatPAX,
		}
		if e.kind == tar.TypeDir {
			h.Name += "/"
		}
		if e.kind != tar.TypeReg {
			if err := tw.WriteHeader(h); err != nil {
				return fmt.Errorf("write %s: %w", at, err)
			}
			continue
		}
		if err := writeFile(tw, h, e.source); err != nil {
			return fmt.Errorf("write %s: %w", at, err)
		}
	}
	return tw.Close()
}

func writeFile(tw *tar.Writer, h *tar.Header, source string) error {
	f, err := os.Open(source)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	h.Size = st.Size()
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	_, err = io.Copy(tw, f)
	return err
}

// build turns the files into an image as registries know it.
func (im *Image) build() (v1.Image, error) {
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		r, w := io.Pipe()
		go func() { w.CloseWithError(im.writeLayer(w)) }()
		return r, nil
	})
	if err != nil {
		return nil, fmt.Errorf("make the layer of %s: %w", im.Name, err)
	}
	epoch := v1.Time{Time: time.Unix(0, 0).UTC()}
	image, err := mutate.Append(empty.Image, mutate.Addendum{Layer: layer, History: v1.History{Created: epoch, CreatedBy: "cluster image"}})
	if err != nil {
		return nil, fmt.Errorf("make image %s: %w", im.Name, err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("make image %s: %w", im.Name, err)
	}
	config = config.DeepCopy()
	config.Created, config.OS, config.Architecture = epoch, "linux", runtime.GOARCH
	config.Config = v1.Config{
		Entrypoint: im.Entrypoint, Cmd: im.Cmd, User: im.User, WorkingDir: im.Dir, Labels: im.Labels,
		Env: withEnv([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, im.Env...),
	}
	return mutate.ConfigFile(image, config)
}

// writeImages writes an archive of all images and returns their digests. The
// archive appears when it is whole.
func writeImages(file string, images ...Image) (digests []string, err error) {
	byTag := map[name.Tag]v1.Image{}
	for i := range images {
		tag, err := name.NewTag(images[i].Name)
		if err != nil {
			return nil, err
		}
		image, err := images[i].build()
		if err != nil {
			return nil, err
		}
		digest, err := image.Digest()
		if err != nil {
			return nil, fmt.Errorf("make image %s: %w", images[i].Name, err)
		}
		byTag[tag] = image
		digests = append(digests, digest.String())
	}
	temporary := file + ".new"
	if err := tarball.MultiWriteToFile(temporary, byTag); err != nil {
		return nil, errors.Join(fmt.Errorf("write %s: %w", file, err), os.Remove(temporary))
	}
	return digests, os.Rename(temporary, file)
}

// buildBaseImages writes the images that every node starts with.
func (l Layout) buildBaseImages() error {
	pause := Image{Name: pauseImage, Entrypoint: []string{"/pause"}}
	busybox := Image{Name: busyboxImage, Cmd: []string{"sh"}}
	glibc := Image{Name: glibcImage, Cmd: []string{"sh"}}
	// A merged /usr, as Debian has it.
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		glibc.Mkdir("/usr/"+dir, 0)
		glibc.Link("usr/"+dir, "/"+dir)
	}
	for _, im := range []*Image{&busybox, &glibc} {
		im.Mkdir("/tmp", 0o1777)
		im.Mkdir("/etc", 0)
		applets, err := exec.Command(l.bin("busybox"), "--list").Output()
		if err != nil {
			return fmt.Errorf("list busybox's applets: %w", err)
		}
		for _, applet := range strings.Fields(string(applets)) {
			if applet != "busybox" && applet != "getent" && applet != "ldconfig" {
				im.Link("busybox", "/bin/"+applet)
			}
		}
	}
	loaderConfig, err := os.CreateTemp(l.path("images"), ".ld.so.conf-")
	if err != nil {
		return err
	}
	defer os.Remove(loaderConfig.Name())
	// Debian's directories for this machine, in one file without includes.
	_, err = fmt.Fprintln(loaderConfig, strings.Join(readLoaderConfig("/etc/ld.so.conf", 0), "\n"))
	if err := errors.Join(err, loaderConfig.Close()); err != nil {
		return err
	}
	getent, err := exec.LookPath("getent")
	if err != nil {
		return fmt.Errorf("find getent: %w", err)
	}
	for _, f := range []struct {
		im       *Image
		src, dst string
		mode     fs.FileMode
	}{
		{&pause, l.bin("pause"), "/pause", 0o755},
		{&busybox, l.bin("busybox"), "/bin/busybox", 0o755},
		{&glibc, l.bin("busybox"), "/bin/busybox", 0o755},
		{&glibc, l.bin("dlopen-check"), "/bin/dlopen-check", 0o755},
		{&glibc, "/sbin/ldconfig", "/sbin/ldconfig", 0o755},
		{&glibc, getent, "/bin/getent", 0o755},
		{&glibc, loaderConfig.Name(), "/etc/ld.so.conf", 0o644},
	} {
		if err := f.im.Add(f.src, f.dst, f.mode); err != nil {
			return err
		}
	}
	dirs := libraryDirs()
	if err := glibc.AddLibraries(dirs); err != nil {
		return err
	}
	// What a workload's libraries may need beside libc.
	check, _, err := readELF(l.bin("dlopen-check"))
	if err != nil {
		return err
	}
	for _, soname := range []string{"libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"} {
		lib, err := findLibrary(soname, l.bin("dlopen-check"), check, dirs)
		if err != nil {
			return err
		}
		if err := glibc.Add(lib, lib, 0); err != nil {
			return err
		}
	}
	_, err = writeImages(l.path("images", "base.tar"), pause, busybox, glibc)
	return err
}
