// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// release is what is to be released.
type release struct {
	source
	repositories map[string]string // of the images, without a tag, by product; see [release.repository]
	bins         map[string]string // the programs' folder, by architecture
	plugins      string            // the folder of the plugin for kubectl, in it one for each platform; may be empty
	out          string
	again        bool // an old version, with the packages of its time
	// builder is who makes the release, by a URI, for the statements. key is the file of the private key
	// that signs it, or empty; chartAt is where the chart goes, for what is signed.
	builder, key, chartAt string
}

// check says why this cannot be released: the version, or what a later build of the commit
// would not have.
func (r *release) check(ctx context.Context) error {
	if err := checkVersion(r.about.version); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	changes, err := run(ctx, r.checkout, "git", "status", "--porcelain")
	if err != nil {
		return fmt.Errorf("release: %w", err)
	}
	if len(changes) > 0 {
		return fmt.Errorf("release: the checkout has changes that no commit has; commit or remove them:\n%s",
			bytes.TrimRight(changes, "\n"))
	}
	if _, err := r.notes(); err != nil {
		return err
	}
	if r.again {
		return nil
	}
	old, err := behind(ctx, r.debian, r.lock)
	if err != nil {
		return fmt.Errorf("release: %w", err)
	}
	if len(old) > 0 {
		return fmt.Errorf("release: debian.lock is behind; renew it by `make lock`, run the tests, and commit it:\n%s",
			strings.Join(old, "\n"))
	}
	return nil
}

// checkVersion fails if a version cannot be released.
func checkVersion(v string) error {
	if semver.Canonical(v) != v || v == "" {
		return fmt.Errorf("VERSION=%s is no semantic version such as v0.1.0 or v0.1.0-rc.1; "+
			"build metadata (+…) cannot stand in an image's tag", v)
	}
	return nil
}

// make writes everything into a folder, which appears when it is whole.
func (r *release) make(ctx context.Context) error {
	if _, err := os.Stat(r.out); err == nil {
		return fmt.Errorf("release: %s is there already; remove it to make this version again", r.out)
	}
	if err := os.MkdirAll(filepath.Dir(r.out), 0o755); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(r.out), ".release-")
	if err != nil {
		return fmt.Errorf("release: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := r.fill(ctx, tmp); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	return os.Rename(tmp, r.out)
}

func (r *release) fill(ctx context.Context, dir string) error {
	text := func(name, content string) error {
		return writeText(filepath.Join(dir, name), content)
	}
	digests := map[string]string{} // by product
	for _, of := range products {
		digest, err := r.addImage(ctx, of, dir)
		if err != nil {
			return err
		}
		digests[of.name] = digest
		manifests, err := r.manifests(of, digest)
		if err != nil {
			return err
		}
		err = errors.Join(text(of.name+"-digest", digest+"\n"), text(of.name+"-"+r.about.version+".yaml", manifests))
		if err != nil {
			return err
		}
	}
	if err := r.addPlugins(ctx, dir); err != nil {
		return err
	}
	notes, err := r.notes()
	if err != nil {
		return err
	}
	packages := filepath.Join(dir, "debian")
	err = errors.Join(text("NOTES.md", notes), r.addChart(ctx, dir, digests), r.copyPackages(ctx, packages))
	if err != nil {
		return err
	}
	if err := checksums(dir); err != nil || r.key == "" {
		return err
	}
	return r.sign(dir)
}

// chartFile is the name of a version's packed chart.
func chartFile(version string) string {
	return chartName + "-" + strings.TrimPrefix(version, "v") + ".tgz"
}

// archiveFile is the name of the archive with a product's image.
func archiveFile(of product, version string) string { return of.name + "-" + version + ".oci.tar" }

// addChart writes the chart, and the digest that it has in a registry.
func (r *release) addChart(ctx context.Context, dir string, digests map[string]string) error {
	file := filepath.Join(dir, chartFile(r.about.version))
	if err := r.chart(file, digests); err != nil {
		return err
	}
	c, err := readChart(file)
	if err != nil {
		return err
	}
	root, err := c.pack(ctx)
	if err != nil {
		return err
	}
	return writeText(filepath.Join(dir, chartName+"-chart-digest"), root.Digest.String()+"\n")
}

// addImage writes a product's image and what it is made of, and returns its digest.
func (r *release) addImage(ctx context.Context, of product, dir string) (string, error) {
	v := r.about.version
	parts, index, err := r.images(ctx, of)
	if err != nil {
		return "", err
	}
	for _, p := range parts {
		sbom := filepath.Join(dir, fmt.Sprintf("%s-%s-%s.cdx.json", of.name, v, p.arch))
		if err := writeFile(sbom, func(w io.Writer) error { return r.writeSBOM(w, p) }); err != nil {
			return "", err
		}
	}
	digest, err := index.Digest()
	if err != nil {
		return "", err
	}
	// By both names, since the manifests and the chart go by the digest.
	file, at := filepath.Join(dir, archiveFile(of, v)), r.repository(of)
	err = errors.Join(
		r.addStatement(of, dir, digest.String(), parts),
		writeArchive(file, index, r.about.created, at+":"+v, at+"@"+digest.String()))
	return digest.String(), errors.Join(err, report(parts, of.name+" "+digest.String()))
}

// repository is where a product's image is to be.
func (r *release) repository(of product) string {
	return cmp.Or(r.repositories[of.name], "localhost/"+of.name)
}

// notes are the version's section of the changelog. A pre-release has that of the version
// that it leads to.
func (r *release) notes() (string, error) {
	data, err := os.ReadFile(filepath.Join(r.checkout, "CHANGELOG.md"))
	if err != nil {
		return "", fmt.Errorf("release: %w", err)
	}
	v := r.about.version
	final, _, _ := strings.Cut(v, "-")
	for _, want := range []string{v, final} {
		for _, section := range strings.Split("\n"+string(data), "\n## ")[1:] {
			heading, body, _ := strings.Cut(section, "\n")
			// Only a pre-release may be of what is not released yet.
			heading, unreleased := strings.CutPrefix(heading, "Unreleased: ")
			names := strings.FieldsFunc(heading, func(c rune) bool { return c == ' ' || c == ',' })
			if len(names) > 0 && names[0] == want && (!unreleased || v != final) {
				return "# gpu-agent " + v + "\n\n" + strings.TrimSpace(body) + "\n", nil
			}
		}
	}
	return "", fmt.Errorf("release: CHANGELOG.md has no section \"## %s, …\"; "+
		"write what users notice, or take \"Unreleased: \" off the heading", v)
}

// manifestsOf is where the manifests of a product are, below deployments.
var manifestsOf = map[string]string{"gpu-agent": "base", "gpu-placer": "placer"}

// manifests are a product's as kustomize makes them, with the image by its digest.
func (r *release) manifests(of product, digest string) (string, error) {
	files := filesys.MakeFsInMemory()
	base, repository := tree{}, r.repository(of)
	if err := base.addAll(filepath.Join(r.checkout, "deployments", manifestsOf[of.name]), "base"); err != nil {
		return "", fmt.Errorf("read the manifests: %w", err)
	}
	base["release/kustomization.yaml"] = entry{data: fmt.Appendf(nil, "resources: [../base]\n"+
		"images: [{name: localhost/%s, newName: %s, digest: %s}]\n", of.name, repository, digest)}
	for name, e := range base {
		if err := files.WriteFile("/"+name, e.data); err != nil {
			return "", fmt.Errorf("read the manifests: %w", err)
		}
	}
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(files, "/release")
	if err != nil {
		return "", fmt.Errorf("make the manifests: %w", err)
	}
	out, err := made.AsYaml()
	if err != nil {
		return "", fmt.Errorf("make the manifests: %w", err)
	}
	if !bytes.Contains(out, []byte(repository+"@"+digest)) {
		return "", fmt.Errorf("make the manifests: no object names the image; "+
			"is it still localhost/%s in deployments/%s?", of.name, manifestsOf[of.name])
	}
	return "# " + of.name + " " + r.about.version + "\n" + string(out), nil
}

// chart packs the chart, as of this version and with the images by their digests.
func (r *release) chart(file string, digests map[string]string) error {
	files := tree{}
	if err := files.addAll(filepath.Join(r.checkout, "deployments/chart"), "gpu-agent"); err != nil {
		return fmt.Errorf("pack the chart: %w", err)
	}
	v := r.about.version
	type setting struct{ file, line, value string }
	settings := []setting{
		{"Chart.yaml", `(?m)^version: .*$`, "version: " + strings.TrimPrefix(v, "v")},
		{"Chart.yaml", `(?m)^appVersion: .*$`, "appVersion: " + v},
	}
	for i, of := range products {
		indent := strings.Repeat("  ", i+1) // image, and placer.image
		settings = append(settings,
			setting{"values.yaml", `(?m)^` + indent + `repository: .*$`, indent + "repository: " + r.repository(of)},
			setting{"values.yaml", `(?m)^` + indent + `digest: ""$`, indent + `digest: "` + digests[of.name] + `"`})
	}
	for _, set := range settings {
		name, line := "gpu-agent/"+set.file, regexp.MustCompile(set.line)
		if n := len(line.FindAll(files[name].data, -1)); n != 1 {
			return fmt.Errorf("pack the chart: %s has %d lines like %s, want 1", set.file, n, set.line)
		}
		files[name] = entry{mode: 0o644, data: line.ReplaceAllLiteral(files[name].data, []byte(set.value))}
	}
	return writeFile(file, func(w io.Writer) error {
		z := gzip.NewWriter(w)
		return errors.Join(files.write(z, r.about.created), z.Close())
	})
}

// copyPackages puts the lock's packages beside the image: Debian drops old ones.
func (r *release) copyPackages(ctx context.Context, dir string) error {
	for _, p := range r.lock {
		from, err := r.debian.fetch(ctx, p)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(from)
		if err != nil {
			return fmt.Errorf("keep %s: %w", p, err)
		}
		if err := writeText(filepath.Join(dir, p.file), string(data)); err != nil {
			return err
		}
	}
	return nil
}

// sumsFile has the sums of a release's other files.
const sumsFile = "SHA256SUMS"

// checksums writes SHA256SUMS, for `sha256sum --check`.
func checksums(dir string) error {
	var lines []string
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		lines = append(lines, fmt.Sprintf("%x  %s\n", sha256.Sum256(data), name))
		return nil
	})
	if err != nil {
		return fmt.Errorf("sum up the files: %w", err)
	}
	slices.Sort(lines)
	return writeText(filepath.Join(dir, sumsFile), strings.Join(lines, ""))
}
