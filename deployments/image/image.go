// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// machine is what Debian calls an architecture, and where its dynamic loader is.
type machine struct {
	triplet string
	loader  string
	// Programs look for it by another name, which is a link.
	loaderName, loaderLink string
}

var machines = map[string]machine{
	"amd64": {
		triplet:    "x86_64-linux-gnu",
		loader:     "ld-linux-x86-64.so.2",
		loaderName: "usr/lib64/ld-linux-x86-64.so.2",
		loaderLink: "../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
	},
	"arm64": {
		triplet:    "aarch64-linux-gnu",
		loader:     "ld-linux-aarch64.so.1",
		loaderName: "usr/lib/ld-linux-aarch64.so.1",
		loaderLink: "aarch64-linux-gnu/ld-linux-aarch64.so.1",
	},
}

// libraries are what the agent's programs need beside the loader, and the driver's library, which
// comes from the node.
var libraries = []string{"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"}

// product is what there is an image of.
type product struct {
	// name is the image's, and that of the program that a container runs.
	name, what string
	programs   []string
	// uses are those of the packages that it is made with: the lock's.
	uses []string
	// lay puts in links and empty folders, and says which files of which package are where: by
	// package, where a file is in it and in the image. A path that ends in / is a file of all
	// files below that folder, one behind the other.
	lay func(m machine, files tree) map[string]map[string]string
}

var products = []product{
	{
		name: "gpu-agent", what: "Shares a Kubernetes node's NVIDIA GPUs among pods",
		programs: []string{"gpu-agent", "gpu-agent-mps", "nvidia-cdi-hook"}, uses: []string{useImage, useLink}, lay: layAgent,
	},
	{
		name: "gpu-placer", what: "Tells schedulers which node of a cluster has room for a piece of a GPU",
		programs: []string{"gpu-placer"}, uses: []string{usePlacer}, lay: layPlacer,
	},
}

// productOf is a product by its name.
func productOf(name string) (product, error) {
	for _, of := range products {
		if of.name == name {
			return of, nil
		}
	}
	return product{}, fmt.Errorf("there is no image of %q", name)
}

// layAgent lays out an image whose programs are linked against the C library.
func layAgent(m machine, files tree) map[string]map[string]string {
	for name, e := range (tree{
		"bin": {link: "usr/bin"}, "lib": {link: "usr/lib"}, "lib64": {link: "usr/lib64"},
		"usr/lib64": {mode: directory | 0o755}, "tmp": {mode: directory | 0o1777},
		m.loaderName: {link: m.loaderLink},
	}) {
		files[name] = e
	}
	library := map[string]string{"lib/" + m.triplet + "/" + m.loader: path.Join("usr/lib", m.triplet, m.loader)}
	for _, l := range libraries {
		library["lib/"+m.triplet+"/"+l] = path.Join("usr/lib", m.triplet, l)
	}
	return map[string]map[string]string{"base-files": {osRelease: osRelease}, "libc6": library}
}

// layPlacer lays out an image of a static program. It knows the API server by public
// authorities where a kubeconfig names none.
func layPlacer(machine, tree) map[string]map[string]string {
	return map[string]map[string]string{
		"base-files":      {osRelease: osRelease},
		"ca-certificates": {"usr/share/ca-certificates/": "etc/ssl/certs/ca-certificates.crt"},
	}
}

const osRelease = "usr/lib/os-release"

// about is what an image says about itself.
type about struct {
	version  string
	revision string
	created  time.Time
}

func (a about) labels(of product) map[string]string {
	const key = "org.opencontainers.image."
	return map[string]string{
		key + "title": of.name, key + "description": of.what, key + "version": a.version, key + "revision": a.revision,
		key + "created": a.created.UTC().Format(time.RFC3339), key + "licenses": "Apache-2.0",
	}
}

// source is what images are made from.
type source struct {
	checkout string
	debian   *debian
	lock     []pkg
	about    about
}

// part is the image of one product and one architecture.
type part struct {
	product product
	arch    string
	files   tree
	image   v1.Image
	modules []module
	debs    []pkg
}

// build makes the image of a product for an architecture, from the programs in bin.
func (s *source) build(ctx context.Context, of product, arch, bin string) (*part, error) {
	p := &part{product: of, arch: arch, files: tree{"etc/os-release": {link: "../" + osRelease}}}
	if err := s.fill(ctx, p, bin); err != nil {
		return nil, fmt.Errorf("build the image of %s for %s: %w", of.name, arch, err)
	}
	return p, nil
}

func (s *source) fill(ctx context.Context, p *part, bin string) error {
	for _, name := range p.product.programs {
		if err := p.files.add(filepath.Join(bin, name), "usr/bin/"+name, 0o755); err != nil {
			return err
		}
	}
	if err := p.files.addAll(filepath.Join(s.checkout, "deployments/image/etc"), "etc"); err != nil {
		return err
	}
	texts, err := s.addDebian(ctx, p)
	if err != nil {
		return err
	}
	if err := p.files.add(filepath.Join(s.checkout, "LICENSE"), "licenses/LICENSE", 0o644); err != nil {
		return err
	}
	if p.modules, err = linked(ctx, s.checkout, bin, p.product.programs); err != nil {
		return err
	}
	p.files["licenses/THIRD_PARTY_NOTICES"] = entry{mode: 0o644, data: notices("image", p.modules, texts)}
	p.image, err = s.about.image(p)
	return err
}

// addDebian puts in the files of Debian's packages, and returns all packages' licences.
func (s *source) addDebian(ctx context.Context, p *part) ([]text, error) {
	wanted := p.product.lay(machines[p.arch], p.files)
	var texts []text
	p.debs = of(s.lock, p.arch, p.product.uses...)
	for _, deb := range p.debs {
		files, err := s.debian.read(ctx, deb)
		if err != nil {
			return nil, err
		}
		for from, to := range wanted[deb.name] {
			e, ok := files.take(from)
			if !ok {
				return nil, fmt.Errorf("%s has no file %s; update the list of files in deployments/image", deb, from)
			}
			p.files[to] = e
		}
		delete(wanted, deb.name)
		if deb.use != useLink {
			// Scanners find the package there, as in other images without a package manager.
			control, err := run(ctx, "", "dpkg-deb", "--field", filepath.Join(s.debian.dir, deb.file))
			if err != nil {
				return nil, err
			}
			p.files["var/lib/dpkg/status.d/"+deb.name] = entry{mode: 0o644, data: control}
		}
		// The documentation of some is a link to the folder of another, which is in the lock too.
		if e, ok := files["usr/share/doc/"+deb.name+"/copyright"]; ok {
			texts = append(texts, text{of: "Debian package " + deb.String(), file: "copyright", data: e.data})
		} else if files["usr/share/doc/"+deb.name].link == "" {
			return nil, fmt.Errorf("%s has no copyright file, which the notices must have", deb)
		}
	}
	for name := range wanted {
		return nil, fmt.Errorf("debian.lock has no %s for %s, of which the image has files", name, p.arch)
	}
	return texts, nil
}

// image turns a part's files into an image as registries know it.
func (a about) image(p *part) (v1.Image, error) {
	var data bytes.Buffer
	if err := p.files.write(&data, a.created); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data.Bytes())), nil }
	layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer),
		tarball.WithCompression(compression.GZip), tarball.WithCompressionLevel(6))
	if err != nil {
		return nil, err
	}
	date := v1.Time{Time: a.created.UTC()}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	history := v1.History{Created: date, CreatedBy: "deployments/image"}
	image, err := mutate.Append(base, mutate.Addendum{Layer: layer, History: history})
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Created, config.OS, config.Architecture = date, "linux", p.arch
	config.Config = v1.Config{
		Entrypoint: []string{"/usr/bin/" + p.product.name}, Labels: a.labels(p.product),
		Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return nil, err
	}
	annotated, ok := mutate.Annotations(image, a.labels(p.product)).(v1.Image)
	if !ok {
		return nil, errors.New("annotate the image: the library gave something else back")
	}
	return annotated, nil
}

// runnable is an image that an index lists without an artifact type, which the library
// would write. It says nothing about an image, and older programs, such as Debian 12's skopeo,
// drop it when they copy an index, by which the digest changes.
type runnable struct{ v1.Image }

// ArtifactType is what the library asks for.
func (runnable) ArtifactType() (string, error) { return "", nil }

// index joins a product's images of all architectures, of which there is one at least.
func (a about) index(parts []*part) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, p := range parts {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        runnable{p.image},
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: p.arch}},
		})
	}
	annotated, ok := mutate.Annotations(index, a.labels(parts[0].product)).(v1.ImageIndex)
	if !ok {
		return nil, errors.New("annotate the image: the library gave something else back")
	}
	return annotated, nil
}

// writeArchive writes an OCI archive. The names are what container runtimes call the image
// after an import; they are no part of its digest.
func writeArchive(file string, index v1.ImageIndex, created time.Time, names ...string) error {
	dir, err := os.MkdirTemp("", "gpu-agent-image-")
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	defer os.RemoveAll(dir)
	archive := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, name := range names {
		named := map[string]string{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
		archive = mutate.AppendManifests(archive, mutate.IndexAddendum{
			Add: index, Descriptor: v1.Descriptor{Annotations: named},
		})
	}
	if _, err := layout.Write(dir, archive); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	files := tree{}
	if err := files.addAll(dir, ""); err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	return writeFile(file, func(w io.Writer) error { return files.write(w, created) })
}

// size is what the image of an architecture takes in a registry, in bytes.
func (p *part) size() (int64, error) {
	manifest, err := p.image.Manifest()
	if err != nil {
		return 0, err
	}
	total := manifest.Config.Size
	for _, l := range manifest.Layers {
		total += l.Size
	}
	return total, nil
}
