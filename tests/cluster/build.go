// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Versions of what is built. Each go.mod beside them names the same one; that
// is what the build uses, and TestVersions holds the two together.
const (
	kubernetesVersion = "v1.36.3"
	etcdVersion       = "v3.6.6"
	containerdVersion = "v2.3.7"
	kueueVersion      = "v0.19.0"
	liqoVersion       = "v1.2.0"
	kuberayVersion    = "v1.4.2"
	jobsetVersion     = "v0.12.0"
	helmVersion       = "v3.19.0"
)

// Versions that a node can be made of in place of those: see choices.
const (
	kubernetes134 = "v1.34.1"
	kubernetes137 = "v1.37.0"
	containerd17  = "v1.7.30"
	crioVersion   = "v1.34.0"
)

const (
	pauseImage   = "localhost/pause:test"
	busyboxImage = "localhost/busybox:test"
	glibcImage   = "localhost/glibc:test"
)

// debianPackages are unpacked into the cache, never installed. libseccomp2 is
// runc's only library beside libc.
var debianPackages = []string{"busybox-static", "containernetworking-plugins", "libseccomp2", "runc"}

// A part is something built once and kept until what it is made from changes.
type part struct {
	name   string
	needs  []string // programs of the host
	inputs []string // files and directories (their files) it is made from
	args   []string // what else it depends on
	// gib is the disk space that a cold build takes, caches of Go included.
	gib     uint64
	slow    string   // said before a cold build that takes long
	outputs []string // below the cache; they are there afterwards
	build   func(context.Context, *part) error
}

func buildCommand(ctx context.Context, l Layout, args []string) error {
	fs := newFlagSet("build", "")
	source := fs.String("source", filepath.Join("tests", "cluster"), "directory with this program's source")
	var with list
	fs.Var(&with, "with", "build a `PART` too that no node is made from: "+strings.Join(slices.Sorted(maps.Keys(l.optional("", ""))), ", ")+"; may be repeated")
	if _, err := fs.parse(args, 0, 0); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(*source, "kubernetes", "go.mod")); err != nil {
		return fmt.Errorf("find the sources: %w; run it in the checkout, or name their directory with --source", err)
	}
	dir, err := filepath.Abs(*source)
	if err != nil {
		return err
	}
	unlock, err := l.lock("build")
	if err != nil {
		return err
	}
	defer unlock()
	return build(ctx, l, dir, with)
}

func build(ctx context.Context, l Layout, source string, with []string) error {
	for _, dir := range []string{"bin/.stamps", "images", "apt/lists/partial", "apt/cache/archives/partial"} {
		if err := os.MkdirAll(l.path(dir), 0o755); err != nil {
			return fmt.Errorf("make the cache: %w", err)
		}
	}
	goVersion, err := exec.CommandContext(ctx, "go", "env", "GOVERSION", "GOCACHE", "GOMODCACHE").Output()
	if err != nil {
		return fmt.Errorf("ask for Go's version: %w; the build needs go in the PATH", err)
	}
	goEnv := strings.Fields(string(goVersion))
	if len(goEnv) != 3 {
		return fmt.Errorf("ask for Go's version: unexpected answer %q", goVersion)
	}
	parts, err := l.partsWith(source, goEnv[0], with)
	if err != nil {
		return err
	}
	stamps := map[string]string{}
	var cold []part
	for _, p := range parts {
		stamp, err := p.stamp()
		if err != nil {
			return fmt.Errorf("look at the sources of %s: %w", p.name, err)
		}
		stamps[p.name] = stamp
		if !l.upToDate(p, stamp) {
			cold = append(cold, p)
		}
	}
	if err := checkBuild(l, cold, goEnv[1:]); err != nil {
		return err
	}
	// Building takes no rights, but whoever waits for it should know.
	if err := checkRights(); err != nil && len(cold) > 0 {
		fmt.Printf("what is built here cannot be started here: %v\n", err)
	}
	all := newProgress("cluster build")
	for _, p := range parts {
		if l.upToDate(p, stamps[p.name]) {
			continue
		}
		if p.slow != "" {
			fmt.Printf("%-26s %s\n", p.name, p.slow)
		}
		one := newProgress(p.name)
		if err := os.Remove(l.stampFile(p)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := p.build(ctx, &p); err != nil {
			return fmt.Errorf("build %s: %w", p.name, err)
		}
		if err := os.WriteFile(l.stampFile(p), []byte(stamps[p.name]+"\n"), 0o644); err != nil {
			return err
		}
		one.step("built")
	}
	all.step("%d of %d parts built, the others were in the cache", len(cold), len(parts))
	return nil
}

// optional are the parts that no node is made from unless it is asked for, by the name that
// --with takes: what some tests run on one, and other versions.
func (l Layout) optional(source, goVersion string) map[string]part {
	const liqo = "github.com/liqotech/liqo/cmd/"
	// As in a released Helm, which takes a cluster that it does not ask for one of its client's version.
	const kubernetes = " -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=34"
	return map[string]part{
		"kubernetes-1.34": l.kubernetes(source, goVersion, kubernetes134),
		"kubernetes-1.37": l.kubernetes(source, goVersion, kubernetes137),
		containerd17Part:  l.containerd(source, goVersion, containerd17),
		crioPart:          l.crio(source, goVersion),
		"kueue": l.goPart(source, goVersion, "Kueue "+kueueVersion, "kueue", 3, "takes about 5 minutes on 2 cores", []string{"kueue"},
			"-ldflags=-s -w -X sigs.k8s.io/kueue/pkg/version.GitVersion="+kueueVersion, "sigs.k8s.io/kueue/cmd/kueue"),
		"liqo": l.goPart(source, goVersion, "Liqo "+liqoVersion, "liqo", 5, "takes about 10 minutes on 2 cores: its libraries are of another Kubernetes",
			[]string{"liqo/liqo-controller-manager", "liqo/webhook", "liqo/crd-replicator", "liqo/virtual-kubelet", "liqo/liqoctl"},
			"-ldflags=-s -w", liqo+"liqo-controller-manager", liqo+"webhook", liqo+"crd-replicator", liqo+"virtual-kubelet", liqo+"liqoctl"),
		"kuberay": l.goPart(source, goVersion, "KubeRay "+kuberayVersion, "kuberay", 2, "takes a few minutes on 2 cores", []string{"kuberay"},
			"-ldflags=-s -w", "github.com/ray-project/kuberay/ray-operator"),
		"jobset": l.goPart(source, goVersion, "JobSet "+jobsetVersion, "jobset", 2, "takes a few minutes on 2 cores", []string{"jobset"},
			"-ldflags=-s -w", "sigs.k8s.io/jobset"),
		"helm": l.goPart(source, goVersion, "Helm "+helmVersion, "helm", 2, "takes a minute or two on 2 cores", []string{"helm"},
			"-ldflags=-s -w -X helm.sh/helm/v3/internal/version.version="+helmVersion+kubernetes, "helm.sh/helm/v3/cmd/helm"),
	}
}

// partsWith returns everything a node is made from, and optional parts.
func (l Layout) partsWith(source, goVersion string, with []string) ([]part, error) {
	parts, optional := l.parts(source, goVersion), l.optional(source, goVersion)
	for _, name := range with {
		p, ok := optional[name]
		if !ok {
			return nil, fmt.Errorf("there is no part %q to build beside a node's; there are: %s", name, strings.Join(slices.Sorted(maps.Keys(optional)), ", "))
		}
		parts = append(parts, p)
	}
	return parts, nil
}

// goPart is a part that Go builds from a module of its own below source.
func (l Layout) goPart(source, goVersion, name, module string, gib uint64, slow string, outputs []string, flags ...string) part {
	const static = "CGO_ENABLED=0"
	dir := filepath.Join(source, module)
	args := append([]string{goVersion, runtime.GOARCH, static}, flags...)
	var outs []string
	for _, o := range outputs {
		outs = append(outs, "bin/"+o)
	}
	return part{
		name: name, needs: []string{"go"}, inputs: []string{dir}, args: args, gib: gib, slow: slow, outputs: outs,
		build: func(ctx context.Context, p *part) error {
			return l.goBuild(ctx, p.name, dir, static, flags, outputs)
		},
	}
}

// parts returns everything a node is made from, in an order in which each finds
// what it needs.
func (l Layout) parts(source, goVersion string) []part {
	goPart := func(name, module string, gib uint64, slow string, outputs []string, flags ...string) part {
		return l.goPart(source, goVersion, name, module, gib, slow, outputs, flags...)
	}
	pause := goPart("pause", ".", 0, "", []string{"pause"}, "-ldflags=-s -w", "./pause")
	pause.inputs = []string{filepath.Join(source, "pause")} // it imports the standard library only
	base := part{
		name: "base images", inputs: []string{source, filepath.Join(source, "images"), filepath.Join(source, "pause")},
		args: append([]string{goVersion}, debianPackages...), outputs: []string{"images/base.tar"},
		build: func(context.Context, *part) error { return l.buildBaseImages() },
	}
	return []part{
		{
			name: "Debian packages", needs: []string{"apt-get", "dpkg"}, gib: 1,
			args:    append([]string{debianRelease(), runtime.GOARCH}, debianPackages...),
			outputs: []string{"debian/usr/sbin/runc", "debian/usr/lib/cni/bridge", "debian/bin/busybox", "bin/runc", "bin/busybox"},
			build: func(ctx context.Context, _ *part) error {
				if err := l.unpackDebian(ctx, l.path("debian"), debianPackages); err != nil {
					return err
				}
				return errors.Join(l.symlink("../debian/usr/sbin/runc", "runc"), l.symlink("../debian/bin/busybox", "busybox"))
			},
		},
		goPart("etcd "+etcdVersion, "etcd", 1, "", []string{"etcd"},
			"-ldflags=-s -w", "go.etcd.io/etcd/server/v3"),
		l.containerd(source, goVersion, containerdVersion),
		l.kubernetes(source, goVersion, kubernetesVersion),
		pause,
		{
			name: "dlopen-check", needs: []string{"gcc"}, inputs: []string{filepath.Join(source, "images")}, outputs: []string{"bin/dlopen-check"},
			build: func(ctx context.Context, _ *part) error {
				return l.output("dlopen-check", func(file string) error {
					return command(ctx, "", nil, "gcc", "-O1", "-Wall", "-Werror", "-o", file, filepath.Join(source, "images", "dlopen-check.c"), "-ldl")
				})
			},
		},
		base,
	}
}

// stamp is a digest of what the part is made from.
func (p part) stamp() (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q\n", p.name, p.args, p.outputs)
	for _, in := range p.inputs {
		files, err := os.ReadDir(in)
		if err != nil {
			return "", err
		}
		for _, f := range files { // sorted by name
			// Tests are no part of a program.
			if !f.Type().IsRegular() || strings.HasSuffix(f.Name(), "_test.go") {
				continue
			}
			b, err := os.ReadFile(filepath.Join(in, f.Name()))
			if err != nil {
				return "", err
			}
			fmt.Fprintf(h, "%q %x\n", f.Name(), sha256.Sum256(b))
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func (l Layout) stampFile(p part) string {
	return l.path("bin", ".stamps", strings.Fields(p.name)[0])
}

func (l Layout) upToDate(p part, stamp string) bool {
	b, err := os.ReadFile(l.stampFile(p))
	return err == nil && strings.TrimSpace(string(b)) == stamp && l.missing(p) == ""
}

// missing returns the first output that is not there.
func (l Layout) missing(p part) string {
	for _, o := range p.outputs {
		if _, err := os.Stat(l.path(o)); err != nil {
			return l.path(o)
		}
	}
	return ""
}

// goBuild builds packages of the module in dir into bin/, and says now and then how far it
// is, under a name. One package with
// several outputs is one program under several names. Of several, each makes the output of its
// own name, which may be in a directory.
func (l Layout) goBuild(ctx context.Context, name, dir, env string, flags, outputs []string) error {
	temporary, err := os.MkdirTemp(l.path("bin"), ".build-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temporary)
	var names []string
	for _, f := range flags {
		if !strings.HasPrefix(f, "-") {
			names = append(names, f)
		}
	}
	target := temporary + "/"
	if len(names) == 1 {
		target += filepath.Base(outputs[0])
	}
	environment := []string{env, "GOFLAGS=", "GOWORK=off"}
	counted := compiled{progress: newProgress(name), every: showEvery, last: time.Now()}
	// With the modules that this downloads, a cold count alone takes a minute.
	err = commandTo(ctx, dir, environment, &counted, "go", append([]string{"list", "-e", "-mod=readonly", "-deps"}, names...)...)
	if err != nil {
		return err
	}
	counted.total, counted.done = counted.done, 0
	args := append([]string{"build", "-v", "-mod=readonly", "-buildvcs=false", "-trimpath", "-o", target}, flags...)
	if err := commandTo(ctx, dir, environment, &counted, "go", args...); err != nil {
		return err
	}
	for i, o := range outputs {
		if len(names) == 1 && i > 0 {
			if err := l.symlink(filepath.Base(outputs[0]), o); err != nil {
				return err
			}
			continue
		}
		if err := os.MkdirAll(filepath.Dir(l.bin(o)), 0o755); err != nil {
			return err
		}
		// Replaced, not written over: a node may be running the old one.
		if err := os.Rename(filepath.Join(temporary, filepath.Base(o)), l.bin(o)); err != nil {
			return err
		}
	}
	return nil
}

// symlink makes bin/name point to target, replacing what was there.
func (l Layout) symlink(target, name string) error {
	temporary := l.bin(name + ".new")
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, temporary); err != nil {
		return err
	}
	return os.Rename(temporary, l.bin(name))
}

// output has make write bin/name, which is replaced when it succeeded.
func (l Layout) output(name string, make func(file string) error) error {
	temporary := l.bin(name + ".new")
	if err := make(temporary); err != nil {
		return err
	}
	return os.Rename(temporary, l.bin(name))
}

// unpackDebian downloads packages and unpacks them into a directory of the cache. apt is
// given a cache of its own, and lists of its own when the host's do not know a
// package, so that it writes nothing elsewhere.
func (l Layout) unpackDebian(ctx context.Context, dir string, packages []string) error {
	downloads, err := os.MkdirTemp(l.path("apt"), "download-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(downloads)
	own := []string{"-q", "-o", "Dir::Cache=" + l.path("apt", "cache"), "-o", "APT::Sandbox::User=root"}
	download := append(append([]string{}, own...), "download")
	download = append(download, packages...)
	if err := command(ctx, downloads, nil, "apt-get", download...); err != nil {
		fmt.Println("the host's package lists do not serve; fetching lists of our own")
		own = append(own, "-o", "Dir::State::Lists="+l.path("apt", "lists"))
		if err := command(ctx, downloads, nil, "apt-get", append(own[:len(own):len(own)], "update")...); err != nil {
			return fmt.Errorf("fetch package lists: %w", err)
		}
		download = append(own[:len(own):len(own)], "download")
		if err := command(ctx, downloads, nil, "apt-get", append(download, packages...)...); err != nil {
			return fmt.Errorf("download packages: %w", err)
		}
	}
	archives, err := filepath.Glob(filepath.Join(downloads, "*.deb"))
	if err != nil {
		return err
	}
	if len(archives) != len(packages) {
		return fmt.Errorf("download packages: asked for %d, got %d", len(packages), len(archives))
	}
	sort.Strings(archives)
	unpacked := filepath.Join(downloads, "root")
	for _, a := range archives {
		if err := command(ctx, "", nil, "dpkg", "-x", a, unpacked); err != nil {
			return fmt.Errorf("unpack %s: %w", filepath.Base(a), err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return os.Rename(unpacked, dir)
}

// libraryLinks returns the libraries of a program of unpacked Debian packages that the host
// lacks: path in the node to file in the cache.
func libraryLinks(root, program string) (map[string]string, error) {
	dirs := libraryDirs()
	for _, d := range dirs {
		dirs = append(dirs, filepath.Join(root, d))
	}
	libs, err := libraries(filepath.Join(root, program), dirs)
	if err != nil {
		return nil, fmt.Errorf("find the libraries of %s: %w", filepath.Base(program), err)
	}
	links := map[string]string{}
	for _, lib := range libs {
		if inside, ok := strings.CutPrefix(lib, root+"/"); ok {
			links["/"+inside] = lib
		}
	}
	return links, nil
}

// command runs a program and returns its output's end with its error.
func command(ctx context.Context, dir string, env []string, name string, args ...string) error {
	return commandTo(ctx, dir, env, io.Discard, name, args...)
}

// commandTo is command with a second reader of the output.
func commandTo(ctx context.Context, dir string, env []string, reader io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = withEnv(os.Environ(), env...)
	var out strings.Builder
	both := io.MultiWriter(&out, reader)
	cmd.Stdout, cmd.Stderr = both, both
	err := cmd.Run()
	if err == nil {
		return nil
	}
	text := strings.TrimSpace(out.String())
	if len(text) > 4000 {
		text = "…" + text[len(text)-4000:]
	}
	return fmt.Errorf("%s: %w\n%s", name, err, text)
}

// showEvery is how often a long build says that it goes on.
const showEvery = 20 * time.Second

// compiled counts the packages in the output of go list, or of go build -v, and says how
// many there are by now. go build names those alone that its cache lacks.
type compiled struct {
	*progress
	every time.Duration
	last  time.Time // when it was said, or the build began
	total int       // packages that the program is made of, 0 while they are counted
	done  int
	rest  []byte // a line without its end
}

func (c *compiled) Write(text []byte) (int, error) {
	c.rest = append(c.rest, text...)
	for {
		line, rest, ok := bytes.Cut(c.rest, []byte("\n"))
		if !ok {
			break
		}
		c.rest = rest
		// "go: downloading …" has a space, as has what a compiler has to say.
		if len(line) > 0 && !bytes.ContainsAny(line, " \t") {
			c.done++
		}
		if time.Since(c.last) < c.every {
			continue
		}
		c.last = time.Now()
		if c.total == 0 {
			c.step("modules are downloaded")
		} else {
			c.step("%d packages compiled, of at most %d", c.done, c.total)
		}
	}
	return len(text), nil
}

func debianRelease() string {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "unknown"
	}
	for _, line := range strings.Split(string(b), "\n") {
		if name, ok := strings.CutPrefix(line, "VERSION_CODENAME="); ok {
			return name
		}
	}
	return "unknown"
}

// checkBuild says in one sentence what a build would fail for.
func checkBuild(l Layout, cold []part, goCaches []string) error {
	var gib uint64
	for _, p := range cold {
		gib += p.gib
		for _, program := range p.needs {
			if _, err := exec.LookPath(program); err != nil {
				return fmt.Errorf("building %s needs %s, which is not in the PATH; a Debian machine has it from the packages golang, gcc, apt and dpkg", p.name, program)
			}
		}
	}
	for _, dir := range append([]string{l.cache}, goCaches...) {
		free, err := freeBytes(dir)
		if err != nil {
			return fmt.Errorf("look at the free space of %s: %w", dir, err)
		}
		if free < gib<<30 {
			return fmt.Errorf("building what the cache lacks takes %d GiB, and %s has %d MiB free", gib, dir, free>>20)
		}
	}
	return nil
}

// freeBytes is what an ordinary user may still write where dir is or will be.
func freeBytes(dir string) (uint64, error) {
	for {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if err == nil {
			return st.Bavail * uint64(st.Bsize), nil
		}
		if err != unix.ENOENT || dir == filepath.Dir(dir) {
			return 0, err
		}
		dir = filepath.Dir(dir)
	}
}

// capSysAdmin is the number of CAP_SYS_ADMIN in linux/capability.h.
const capSysAdmin = 21

// checkRights says in one sentence what keeps a node from being made here.
func checkRights() error {
	if os.Geteuid() != 0 {
		return errors.New("a node's namespaces, mounts and cgroups need root")
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read this process's capabilities: %w", err)
	}
	if data[0].Effective&(1<<capSysAdmin) == 0 {
		return errors.New("a node's namespaces and mounts need CAP_SYS_ADMIN, which this process lacks; a container needs --privileged")
	}
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range roots {
		if err := unix.Access(root, unix.W_OK); err != nil {
			return fmt.Errorf("a node needs cgroups of its own, and %s cannot be written: %w", root, err)
		}
	}
	return nil
}

// minimumFree is what a node may write while it runs: images, etcd and logs.
const minimumFree = 1 << 30

// checkBuilt says what keeps a node from starting with what the cache has, parts of other
// versions included.
func checkBuilt(l Layout, others ...string) error {
	for _, p := range l.parts("", "") {
		if file := l.missing(p); file != "" {
			return fmt.Errorf("%s is missing; 'cluster build' makes it", file)
		}
	}
	for _, name := range others {
		if file := l.missing(l.optional("", "")[name]); file != "" {
			return fmt.Errorf("%s is missing; 'cluster build --with %s' makes it", file, name)
		}
	}
	free, err := freeBytes(l.cache)
	if err != nil {
		return fmt.Errorf("look at the free space of %s: %w", l.cache, err)
	}
	if free < minimumFree {
		return fmt.Errorf("a node may write %d MiB, and %s has %d MiB free", minimumFree>>20, l.cache, free>>20)
	}
	return nil
}
