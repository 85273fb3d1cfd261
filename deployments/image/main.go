// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

const usage = `usage: image COMMAND [FLAG]...

cc        print the command that compiles for --arch against the packages of debian.lock
qemu      print what runs arm64 programs on amd64, and the folder of libraries that they are linked against
build     write the image --of a program, from those in --bin, to --out
lock      renew debian.lock
behind    print the packages of debian.lock of which the mirror has newer ones
check     say whether --version can be released
release   write a release to --out
publish   push the release in --from to its repositories

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := do(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

// bins are the folders of programs, by architecture.
type bins map[string]string

func (b bins) String() string { return "" }

func (b bins) Set(s string) error {
	arch, dir, ok := strings.Cut(s, "=")
	if !ok || !slices.Contains(architectures, arch) {
		return fmt.Errorf("it has the form ARCHITECTURE=FOLDER, with one of %s", strings.Join(architectures, ", "))
	}
	b[arch] = dir
	return nil
}

func do(ctx context.Context, args []string) error {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return errors.New("a command is missing")
	}
	flags := flag.NewFlagSet("image "+args[0], flag.ContinueOnError)
	flags.Usage = func() {
		fmt.Fprint(flags.Output(), usage)
		flags.PrintDefaults()
	}
	q := request{release: release{bins: bins{}, repositories: map[string]string{}}}
	q.register(flags)
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return errors.New("nothing but flags is taken")
	}
	if args[0] == "publish" { // it takes files as they are
		return q.publish(ctx)
	}
	if q.cache == "" {
		return errors.New("--cache is needed")
	}
	if err := q.complete(); err != nil {
		return err
	}
	return q.do(ctx, args[0])
}

// request is what the command line asks for.
type request struct {
	release                          release
	cache, arch, name, kind, created string
	from, chart                      string
	newer, force                     bool
}

func (q *request) register(flags *flag.FlagSet) {
	r := &q.release
	flags.StringVar(&r.checkout, "checkout", ".", "top of the checkout")
	flags.StringVar(&q.cache, "cache", "", "folder for Debian's packages")
	flags.StringVar(&q.arch, "arch", architectures[0], "architecture to compile for")
	flags.StringVar(&r.out, "out", "", "file or folder to write")
	flags.StringVar(&q.name, "name", "", "name of the image, with its tag (default: localhost/NAME:dev)")
	flags.StringVar(&q.kind, "of", products[0].name, "what the image is of: gpu-agent or gpu-placer")
	for _, of := range products {
		text := "name of a release's image of " + of.name + ", without a tag (default: localhost/" + of.name + ")"
		flags.Func(of.name+"-repository", text, func(s string) error {
			r.repositories[of.name] = s
			return nil
		})
	}
	flags.StringVar(&q.from, "from", "", "folder of a release")
	flags.StringVar(&q.chart, "chart-repository", "", "name of the chart in a registry, without a tag")
	flags.StringVar(&r.builder, "builder", defaultBuilder, "URI of who makes a release, for its statements")
	flags.StringVar(&r.key, "key", "", "file of the private key that signs a release; empty signs nothing")
	flags.BoolVar(&q.force, "force", false, "publish over a version that names something else")
	flags.StringVar(&r.about.version, "version", "dev", "version of the programs")
	flags.StringVar(&r.about.revision, "revision", "", "the commit")
	flags.StringVar(&q.created, "created", "", "the commit's date, as in RFC 3339")
	flags.BoolVar(&r.again, "again", false, "an old version is built again: debian.lock may be behind")
	flags.BoolVar(&q.newer, "newer", false,
		"take newer packages, with a warning, in place of those that are no longer served: "+
			"such an image is no release's")
	flags.StringVar(&r.plugins, "plugins", "", "folder of the plugin for kubectl, in it one for each platform, "+
		"as OS-ARCHITECTURE; a release for a test may have none")
	flags.Var(bins(r.bins), "bin", "ARCHITECTURE=FOLDER of the programs; repeatable")
}

// complete fills in what follows from the flags.
func (q *request) complete() error {
	// apt and compilers run in other folders.
	cache, err := filepath.Abs(q.cache)
	if err != nil {
		return err
	}
	q.release.debian = &debian{dir: cache}
	q.release.about.created = time.Unix(0, 0)
	q.release.chartAt = cmp.Or(q.chart, "localhost/charts/"+chartName)
	if q.created != "" {
		if q.release.about.created, err = time.Parse(time.RFC3339, q.created); err != nil {
			return fmt.Errorf("read --created: %w", err)
		}
	}
	return nil
}

// do does what a command says.
func (q *request) do(ctx context.Context, command string) (err error) {
	r := &q.release
	if command == "lock" {
		return r.renew(ctx)
	}
	if r.lock, err = parseLock(lockText); err != nil {
		return err
	}
	if q.newer {
		var replaced []string
		if r.lock, replaced, err = r.debian.served(ctx, r.lock, q.arch); err != nil {
			return err
		}
		for _, line := range replaced {
			fmt.Fprintln(os.Stderr, "warning: debian.lock is behind, `make lock` renews it:", line)
		}
	}
	switch command {
	case "cc":
		cc, err := r.debian.compiler(ctx, r.lock, q.arch)
		if err != nil {
			return err
		}
		fmt.Println(cc)
		return nil
	case "qemu":
		return r.showQEMU(ctx)
	case "build":
		of, err := productOf(q.kind)
		if err != nil {
			return err
		}
		return r.archive(ctx, of, cmp.Or(q.name, "localhost/"+of.name+":dev"))
	case "behind":
		return r.warn(ctx)
	case "check":
		return r.check(ctx)
	case "release":
		return r.make(ctx)
	}
	return fmt.Errorf("there is no command %q; `image -h` prints them", command)
}

// publish pushes a release to the repositories that the command line names.
func (q *request) publish(ctx context.Context) error {
	r := &q.release
	if q.from == "" || q.chart == "" || len(r.repositories) < len(products) {
		return errors.New("--from, --chart-repository and the repository of each image are needed")
	}
	p := publication{
		dir: q.from, version: r.about.version, repositories: r.repositories, chart: q.chart,
		force: q.force, out: os.Stdout, client: newClient(),
	}
	return p.run(ctx)
}

// showQEMU prints what runs arm64 programs, and where their libraries are.
func (r *release) showQEMU(ctx context.Context) error {
	qemu, err := r.debian.qemu(ctx)
	if err != nil {
		return err
	}
	root, err := r.debian.unpack(ctx, of(r.lock, "arm64", useImage, useLink))
	if err != nil {
		return err
	}
	fmt.Println(qemu)
	fmt.Println(root)
	return nil
}

// renew writes the lock anew.
func (r *release) renew(ctx context.Context) error {
	file := filepath.Join(r.checkout, "deployments/image/debian.lock")
	old, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("renew the lock: %w", err)
	}
	text, err := renewLock(ctx, r.debian, string(old))
	if err != nil {
		return err
	}
	return writeText(file, text)
}

// archive writes an image alone.
func (r *release) archive(ctx context.Context, of product, name string) error {
	if r.out == "" || len(r.bins) == 0 {
		return errors.New("--out and --bin are needed")
	}
	parts, index, err := r.images(ctx, of)
	if err != nil {
		return err
	}
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	return errors.Join(writeArchive(r.out, index, r.about.created, name), report(parts, name+"@"+digest.String()))
}

// images makes a product's images, of each architecture of which there are programs.
func (r *release) images(ctx context.Context, of product) ([]*part, v1.ImageIndex, error) {
	var parts []*part
	for _, arch := range architectures {
		if r.bins[arch] == "" {
			continue
		}
		p, err := r.build(ctx, of, arch, r.bins[arch])
		if err != nil {
			return nil, nil, err
		}
		parts = append(parts, p)
	}
	if len(parts) == 0 {
		return nil, nil, errors.New("--bin is needed")
	}
	index, err := r.about.index(parts)
	return parts, index, err
}

// report prints what was made.
func report(parts []*part, digest string) error {
	fmt.Print(digest)
	for _, p := range parts {
		size, err := p.size()
		if err != nil {
			return fmt.Errorf("measure the image for %s: %w", p.arch, err)
		}
		fmt.Printf("  %s: %.1f MB compressed", p.arch, float64(size)/1e6)
	}
	fmt.Println()
	return nil
}

// warn prints what the mirror has newer, if it can be asked.
func (r *release) warn(ctx context.Context) error {
	old, err := behind(ctx, r.debian, r.lock)
	if err != nil {
		fmt.Println("warning: whether debian.lock is behind could not be told:", err)
		return nil
	}
	for _, line := range old {
		fmt.Println("warning: debian.lock is behind, `make lock` renews it:", line)
	}
	return nil
}
