// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2/content"
	"oras.land/oras-go/v2/errdef"
	"oras.land/oras-go/v2/registry/remote"
)

// publication brings a release's folder to registries.
type publication struct {
	dir, version string
	// repositories are where the images go, by product, without a tag; chart is where the chart goes.
	repositories map[string]string
	chart        string
	// force moves a tag that names something else.
	force bool
	// out is told what was pushed.
	out io.Writer
	// client is what requests go through.
	client *http.Client
}

// destination is an artefact and the repository that takes it.
type destination struct {
	*artefact
	repository *remote.Repository
	// was is what the tag names in the registry before the release is pushed. Its digest is empty
	// if there is no such tag.
	was ocispec.Descriptor
}

// tagged is the artefact's name with its tag.
func (d *destination) tagged() string { return d.at + ":" + d.tag }

// run pushes what the registries lack. Blobs come first, then manifests, then indexes; the tags follow
// when all of this is there, that of the chart last. So a failure leaves no tag whose content is
// not whole, and no chart whose images are missing. A second run goes on where the first has ended.
//
// Before it pushes anything, run fails if a file differs from its sum in SHA256SUMS, if the chart names
// other images, and, without force, if a tag names something else. No error has a credential in its text.
func (p *publication) run(ctx context.Context) error {
	artefacts, err := p.read(ctx)
	if err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	door, err := openDoor(p.client)
	if err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	if err := p.send(ctx, door, artefacts); err != nil {
		return door.discreet(fmt.Errorf("publish: %w", err))
	}
	return nil
}

func (p *publication) send(ctx context.Context, door *door, artefacts []*artefact) error {
	var all []*destination
	var refused []error
	for _, a := range artefacts {
		repository, err := door.repository(a.at)
		if err != nil {
			return err
		}
		d := &destination{artefact: a, repository: repository}
		if d.was, err = d.resolve(ctx); err != nil {
			return door.advise(err, repository)
		}
		if d.was.Digest != "" && d.was.Digest != d.root.Digest && !p.force {
			refused = append(refused, fmt.Errorf("%s is %s in the registry, and %s in the release",
				d.tagged(), d.was.Digest, d.root.Digest))
		}
		all = append(all, d)
	}
	if len(refused) > 0 {
		return fmt.Errorf("%w\nNothing was pushed: what a version is called does not change once it is published. "+
			"Release under another VERSION, or move the tag by FORCE=1 (--force)", errors.Join(refused...))
	}
	for _, d := range all {
		if err := p.push(ctx, d); err != nil {
			return door.advise(err, d.repository)
		}
	}
	for _, d := range all {
		if err := p.tag(ctx, d); err != nil {
			return door.advise(err, d.repository)
		}
	}
	fmt.Fprintln(p.out)
	for _, d := range all {
		fmt.Fprintf(p.out, "%s@%s  %s\n", d.tagged(), d.root.Digest, d.what)
	}
	return nil
}

// resolve returns what the artefact's tag names in the registry, and a descriptor without a digest
// if there is no such tag.
func (d *destination) resolve(ctx context.Context) (ocispec.Descriptor, error) {
	found, err := d.repository.Resolve(ctx, d.tag)
	if errors.Is(err, errdef.ErrNotFound) {
		return ocispec.Descriptor{}, nil
	}
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("look for %s: %w", d.tagged(), err)
	}
	return found, nil
}

// push brings an artefact's parts to its repository, without the tag. A part that is there is left alone.
func (p *publication) push(ctx context.Context, d *destination) error {
	parts, err := d.parts(ctx)
	if err != nil {
		return fmt.Errorf("read %s: %w", d.file, err)
	}
	for _, part := range parts {
		name := d.at + "@" + part.Digest.String()
		there, err := d.repository.Exists(ctx, part)
		if err != nil {
			return fmt.Errorf("look for %s: %w", name, err)
		}
		if there {
			fmt.Fprintf(p.out, "is there  %s  %s\n", name, kindOf(part))
			continue
		}
		// Held against size and digest; from memory it can be sent again.
		data, err := content.FetchAll(ctx, d.content, part)
		if err != nil {
			return fmt.Errorf("read %s out of %s: %w", part.Digest, d.file, err)
		}
		if err := d.repository.Push(ctx, part, bytes.NewReader(data)); err != nil {
			return fmt.Errorf("push %s: %w", name, err)
		}
		fmt.Fprintf(p.out, "pushed    %s  %s\n", name, kindOf(part))
	}
	return nil
}

// tag gives an artefact its tag, and asks the registry what the tag names then.
func (p *publication) tag(ctx context.Context, d *destination) error {
	if d.was.Digest == d.root.Digest {
		fmt.Fprintf(p.out, "is there  %s\n", d.tagged())
		return nil
	}
	if err := d.repository.Tag(ctx, d.root, d.tag); err != nil {
		return fmt.Errorf("tag %s: %w", d.tagged(), err)
	}
	now, err := d.resolve(ctx)
	if err != nil {
		return err
	}
	if now.Digest != d.root.Digest {
		return fmt.Errorf("tag %s: the registry took %s and has %q now; does another program push this version?",
			d.tagged(), d.root.Digest, now.Digest)
	}
	fmt.Fprintf(p.out, "tagged    %s  %s\n", d.tagged(), d.root.Digest)
	if d.was.Digest != "" {
		fmt.Fprintf(p.out, "          it was %s\n", d.was.Digest)
	}
	return nil
}

// parts are an artefact's blobs, then its manifests, then its index: a registry takes a manifest when it
// has what the manifest names.
func (a *artefact) parts(ctx context.Context) ([]ocispec.Descriptor, error) {
	var all []ocispec.Descriptor
	queue := []ocispec.Descriptor{a.root}
	for len(queue) > 0 {
		part := queue[0]
		queue = queue[1:]
		if slices.ContainsFunc(all, func(d ocispec.Descriptor) bool { return d.Digest == part.Digest }) {
			continue
		}
		all = append(all, part)
		named, err := content.Successors(ctx, a.content, part)
		if err != nil {
			return nil, err
		}
		queue = append(queue, named...)
	}
	slices.SortStableFunc(all, func(a, b ocispec.Descriptor) int { return cmp.Compare(rank(a), rank(b)) })
	return all, nil
}

// rank is a part's place among the kinds: blobs, manifests, indexes.
func rank(part ocispec.Descriptor) int {
	switch part.MediaType {
	case ocispec.MediaTypeImageIndex:
		return 2
	case ocispec.MediaTypeImageManifest:
		return 1
	}
	return 0
}

// kindOf says for people what a part is.
func kindOf(part ocispec.Descriptor) string {
	kind := [...]string{"blob", "manifest", "index"}[rank(part)]
	if p := part.Platform; p != nil {
		kind += ", " + p.OS + "/" + p.Architecture
	}
	return fmt.Sprintf("%s, %d bytes", kind, part.Size)
}

// platformsOf are the platforms of an index, for people.
func platformsOf(index ocispec.Index) string {
	var names []string
	for _, m := range index.Manifests {
		if m.Platform != nil {
			names = append(names, m.Platform.OS+"/"+m.Platform.Architecture)
		}
	}
	return strings.Join(names, ", ")
}
