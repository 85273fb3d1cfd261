// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/content/memory"
	"oras.land/oras-go/v2/content/oci"
	"sigs.k8s.io/yaml"
)

// What Helm calls the parts of a chart in a registry.
const (
	chartConfigType = "application/vnd.cncf.helm.config.v1+json"
	chartLayerType  = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// chartName is the chart's. Helm takes it from the end of the repository's name.
const chartName = "gpu-agent"

// artefact is what gets a tag in a registry: an image of all its architectures, or the chart.
type artefact struct {
	// at is the repository, with the registry in front.
	at, tag string
	// file is the release's file with the artefact. what is its kind for people; of an image, the platforms.
	file, what string
	// root is the index of an image, or the manifest of the chart.
	root    ocispec.Descriptor
	content content.Fetcher
}

// read returns a release's artefacts: the signatures, the images, and then the chart, which names these
// by their digests.
func (p *publication) read(ctx context.Context) ([]*artefact, error) {
	if err := checkVersion(p.version); err != nil {
		return nil, err
	}
	if err := checkSums(p.dir); err != nil {
		return nil, err
	}
	signatures, err := readSignatures(p.dir)
	if err != nil {
		return nil, err
	}
	var all, beside []*artefact
	addSignatures := func(a *artefact, name string) error {
		more, err := a.signatures(ctx, name, signatures)
		beside = append(beside, more...)
		return err
	}
	images := map[string]string{} // by product, with the digest
	for _, of := range products {
		a, err := p.readImage(ctx, of)
		if err != nil {
			return nil, err
		}
		if err := addSignatures(a, of.name); err != nil {
			return nil, err
		}
		images[of.name] = a.at + "@" + a.root.Digest.String()
		all = append(all, a)
	}
	file := filepath.Join(p.dir, chartFile(p.version))
	c, err := readChart(file)
	if err != nil {
		return nil, err
	}
	for _, of := range products {
		if got := c.images[of.name]; got != images[of.name] {
			return nil, fmt.Errorf("the chart %s names the image %s, and %s is to be pushed: remove %s, "+
				"and make the release for this REGISTRY", file, got, images[of.name], p.dir)
		}
	}
	if path.Base(p.chart) != chartName {
		return nil, fmt.Errorf("the chart's repository %q does not end in /%s, the chart's name", p.chart, chartName)
	}
	root, err := c.pack(ctx)
	if err != nil {
		return nil, err
	}
	chart := &artefact{at: p.chart, tag: c.version, file: file, what: "Helm chart", root: root, content: c.store}
	if err := addSignatures(chart, chartArtefact); err != nil {
		return nil, err
	}
	// A version has its signatures before it has its tag.
	return append(append(beside, all...), chart), nil
}

// readImage finds a product's image in its archive, by the digest that the release tells.
func (p *publication) readImage(ctx context.Context, of product) (*artefact, error) {
	digest, err := os.ReadFile(filepath.Join(p.dir, of.name+"-digest"))
	if err != nil {
		return nil, fmt.Errorf("read the digest of %s: %w", of.name, err)
	}
	a := &artefact{at: p.repositories[of.name], tag: p.version, file: filepath.Join(p.dir, archiveFile(of, p.version))}
	store, err := oci.NewFromTar(ctx, a.file)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", a.file, err)
	}
	a.content = store
	if a.root, err = store.Resolve(ctx, strings.TrimSpace(string(digest))); err != nil {
		return nil, fmt.Errorf("find %s in %s: %w", bytes.TrimSpace(digest), a.file, err)
	}
	text, err := content.FetchAll(ctx, store, a.root)
	if err != nil {
		return nil, fmt.Errorf("read the index in %s: %w", a.file, err)
	}
	var index ocispec.Index
	if err := json.Unmarshal(text, &index); err != nil {
		return nil, fmt.Errorf("read the index in %s: %w", a.file, err)
	}
	a.what = platformsOf(index)
	return a, nil
}

// chart is a packed chart as a registry takes it.
type chart struct {
	// archive is the file's content, metadata its Chart.yaml as JSON.
	archive, metadata             []byte
	name, version, about, licence string
	// created is the date of its files: the commit's.
	created time.Time
	// images are those that it names with their digests, by product.
	images map[string]string
	// store has what pack made.
	store *memory.Store
}

// readChart reads a packed chart. It fails if that has no Chart.yaml or values.yaml, or is another chart.
func readChart(file string) (*chart, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the chart: %w", err)
	}
	c := &chart{archive: data, images: map[string]string{}}
	if err := c.unpack(); err != nil {
		return nil, fmt.Errorf("read the chart %s: %w", file, err)
	}
	return c, nil
}

func (c *chart) unpack() error {
	z, err := gzip.NewReader(bytes.NewReader(c.archive))
	if err != nil {
		return err
	}
	found := 0
	for files := tar.NewReader(z); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		read := map[string]func([]byte) error{
			chartName + "/Chart.yaml": c.readMetadata, chartName + "/values.yaml": c.readValues,
		}[h.Name]
		if read == nil {
			continue
		}
		found++
		c.created = h.ModTime
		text, err := io.ReadAll(files)
		if err == nil {
			err = read(text)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
	if found != 2 {
		return fmt.Errorf("it lacks %s/Chart.yaml or %s/values.yaml", chartName, chartName)
	}
	return nil
}

func (c *chart) readMetadata(text []byte) (err error) {
	var metadata struct {
		Name, Version, Description string
		Annotations                struct{ Licenses string }
	}
	if err := yaml.Unmarshal(text, &metadata); err != nil {
		return err
	}
	c.name, c.version, c.about = metadata.Name, metadata.Version, metadata.Description
	c.licence = metadata.Annotations.Licenses
	if c.name != chartName || c.version == "" {
		return fmt.Errorf("it is of the chart %q of version %q", c.name, c.version)
	}
	c.metadata, err = yaml.YAMLToJSON(text)
	return err
}

func (c *chart) readValues(text []byte) error {
	type image struct{ Repository, Digest string }
	var values struct {
		Image  image
		Placer struct{ Image image }
	}
	if err := yaml.Unmarshal(text, &values); err != nil {
		return err
	}
	for name, i := range map[string]image{"gpu-agent": values.Image, "gpu-placer": values.Placer.Image} {
		c.images[name] = i.Repository + "@" + i.Digest
	}
	return nil
}

// pack makes of a chart what `helm push` would make of it, and returns the manifest. The same archive
// always gives the same manifest.
func (c *chart) pack(ctx context.Context) (ocispec.Descriptor, error) {
	c.store = memory.New()
	config, err := oras.PushBytes(ctx, c.store, chartConfigType, c.metadata)
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("pack the chart for a registry: %w", err)
	}
	layer, err := oras.PushBytes(ctx, c.store, chartLayerType, c.archive)
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("pack the chart for a registry: %w", err)
	}
	manifest, err := json.Marshal(ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: config, Layers: []ocispec.Descriptor{layer},
		Annotations: map[string]string{
			ocispec.AnnotationTitle: c.name, ocispec.AnnotationVersion: c.version,
			ocispec.AnnotationDescription: c.about, ocispec.AnnotationLicenses: c.licence,
			ocispec.AnnotationCreated: c.created.UTC().Format(time.RFC3339),
		},
	})
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("pack the chart for a registry: %w", err)
	}
	root, err := oras.PushBytes(ctx, c.store, ocispec.MediaTypeImageManifest, manifest)
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("pack the chart for a registry: %w", err)
	}
	return root, nil
}

// checkSums holds a release's files against its SHA256SUMS.
func checkSums(dir string) error {
	list, err := os.ReadFile(filepath.Join(dir, sumsFile))
	if err != nil {
		return fmt.Errorf("read the release: %w", err)
	}
	var wrong []error
	for line := range strings.Lines(string(list)) {
		want, name, ok := strings.Cut(strings.TrimRight(line, "\n"), "  ")
		if !ok || !filepath.IsLocal(name) {
			return fmt.Errorf("read the release: %s has the line %q", filepath.Join(dir, sumsFile), line)
		}
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			wrong = append(wrong, err)
		} else if got := fmt.Sprintf("%x", sha256.Sum256(data)); got != want {
			wrong = append(wrong, fmt.Errorf("%s has the sum %s, not %s", filepath.Join(dir, name), got, want))
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("the release is not what %s says, make it again: %w", sumsFile, errors.Join(wrong...))
	}
	return nil
}
