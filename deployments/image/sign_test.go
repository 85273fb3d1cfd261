// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// newKey makes a key as docs/release.md says, and returns the files of both halves.
func newKey(t *testing.T) (private, public string) {
	t.Helper()
	dir := t.TempDir()
	private, public = filepath.Join(dir, "key.pem"), filepath.Join(dir, "key.pub")
	openssl(t, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", private)
	openssl(t, "pkey", "-in", private, "-pubout", "-out", public)
	return private, public
}

func openssl(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("openssl", args...).CombinedOutput(); err != nil {
		t.Fatalf("openssl %s: %v\n%s", args[0], err, out)
	}
}

// believed checks a signature by another program than the one that signs.
func believed(t *testing.T, public string, data, signature []byte) error {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "sig"), signature, 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("openssl", "dgst", "-sha256", "-verify", public, "-signature", filepath.Join(dir, "sig"))
	cmd.Stdin = strings.NewReader(string(data))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// layerOf reads a manifest of one layer, by its tag.
func (s *shop) layerOf(t *testing.T, repository, tag string) (layer ocispec.Descriptor, data []byte) {
	t.Helper()
	text := s.get(t, repository, "manifests", tag)
	if text == nil {
		t.Fatalf("%s has no tag %s", repository, tag)
	}
	var m ocispec.Manifest
	if err := json.Unmarshal(text, &m); err != nil || len(m.Layers) != 1 {
		t.Fatalf("%s:%s: %v\n%s", repository, tag, err, text)
	}
	if s.get(t, repository, "blobs", m.Config.Digest.String()) == nil {
		t.Errorf("%s:%s has no configuration", repository, tag)
	}
	return m.Layers[0], s.get(t, repository, "blobs", m.Layers[0].Digest.String())
}

// TestSignedRelease: of a release that is made with a key, the sums, each statement, each image and the chart can be
// checked by its public half, as files and in the registry, and by no other key.
func TestSignedRelease(t *testing.T) {
	key, public := newKey(t)
	_, other := newKey(t)
	s := openShop(t)
	dir := s.smallBy(t, "", key)

	var sums bundle
	read := func(name string, into any) {
		t.Helper()
		if err := json.Unmarshal([]byte(readText(t, dir, name)), into); err != nil {
			t.Fatal(err)
		}
	}
	read("SHA256SUMS.sigstore.json", &sums)
	text, err := os.ReadFile(filepath.Join(dir, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	if err := believed(t, public, text, sums.MessageSignature.Signature); err != nil || sums.MediaType != bundleType {
		t.Errorf("the sums: %v, %s", err, sums.MediaType)
	}
	if believed(t, other, text, sums.MessageSignature.Signature) == nil {
		t.Error("another key's owner is believed")
	}
	if believed(t, public, append(text, ' '), sums.MessageSignature.Signature) == nil {
		t.Error("other sums are believed")
	}

	if _, err := s.publish(t.Context(), dir, nil); err != nil {
		t.Fatal(err)
	}
	for repository, file := range map[string]string{"gpu-agent": "gpu-agent-digest", "gpu-placer": "gpu-placer-digest", "charts/gpu-agent": "gpu-agent-chart-digest"} {
		digest := readText(t, dir, file)
		tag := "sha256-" + strings.TrimPrefix(digest, "sha256:")
		layer, payload := s.layerOf(t, repository, tag+".sig")
		signature, err := base64.StdEncoding.DecodeString(layer.Annotations[signatureKey])
		if err == nil {
			err = believed(t, public, payload, signature)
		}
		if err != nil || layer.MediaType != payloadType || !strings.Contains(string(payload), `"docker-manifest-digest":"`+digest+`"`) {
			t.Errorf("the signature of %s: %v, %s, %s", repository, err, layer.MediaType, payload)
		}
		if repository == "charts/gpu-agent" {
			continue
		}
		layer, text := s.layerOf(t, repository, tag+".att")
		var e envelope
		if err := json.Unmarshal(text, &e); err != nil || len(e.Signatures) != 1 || layer.MediaType != envelopeType {
			t.Fatalf("the statement of %s: %v\n%s", repository, err, text)
		}
		signed := fmt.Sprintf("DSSEv1 %d %s %d %s", len(e.PayloadType), e.PayloadType, len(e.Payload), e.Payload)
		if err := believed(t, public, []byte(signed), e.Signatures[0].Sig); err != nil {
			t.Errorf("the statement of %s: %v", repository, err)
		}
		if file := readText(t, dir, repository+"-"+publishedVersion+".intoto.json"); strings.TrimSpace(string(e.Payload)) != file || !strings.Contains(file, strings.TrimPrefix(digest, "sha256:")) {
			t.Errorf("the statement of %s in the registry is\n%s\nand in the release\n%s", repository, e.Payload, file)
		}
		var b bundle
		read(repository+"-"+publishedVersion+".intoto.sigstore.json", &b)
		if b.DSSEEnvelope == nil || string(b.DSSEEnvelope.Payload) != string(e.Payload) {
			t.Errorf("the bundle of %s has %+v", repository, b)
		}
	}

	// A version has its signatures first, and a second run finds all of it.
	first, last := len(s.writes), 0
	for i, w := range s.writes {
		switch {
		case strings.HasPrefix(w, "tag ") && strings.Contains(w, " sha256-"):
			last = i
		case strings.HasPrefix(w, "tag "):
			first = min(first, i)
		}
	}
	if last == 0 || last > first {
		t.Errorf("a version has its tag before its signatures:\n%s", strings.Join(s.writes, "\n"))
	}
	before := len(s.writes)
	if said, err := s.publish(t.Context(), dir, nil); err != nil || len(s.writes) > before {
		t.Errorf("again: %v, %q\n%s", err, s.writes[before:], said)
	}

	// The same key signs the same in the same way.
	again := s.smallBy(t, "", key)
	for _, name := range []string{"SHA256SUMS.sigstore.json", signaturesFile} {
		if readText(t, again, name) != readText(t, dir, name) {
			t.Errorf("%s is another when it is made again", name)
		}
	}
	// Signatures of another release are not pushed.
	changed := s.smallBy(t, "other ", key)
	if err := os.WriteFile(filepath.Join(changed, signaturesFile), []byte(readText(t, dir, signaturesFile)), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := s.publish(t.Context(), changed, func(p *publication) { p.force = true }); err == nil || !strings.Contains(err.Error(), "is signed as") {
		t.Errorf("with the signatures of another release: %v", err)
	}
	t.Run("cosign", func(t *testing.T) { s.believedByCosign(t, dir, public) })
}

// believedByCosign has cosign check all three, as docs/release.md says.
func (s *shop) believedByCosign(t *testing.T, dir, public string) {
	cosign, err := exec.LookPath("cosign")
	if err != nil {
		t.Skip("cosign is not installed; TestSignedRelease checks the signatures by openssl")
	}
	run := func(args ...string) {
		t.Helper()
		cmd := exec.Command(cosign, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("cosign %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	// Otherwise cosign fetches the roots of Sigstore's own services, which a key does without.
	roots := filepath.Join(t.TempDir(), "roots.json")
	if err := os.WriteFile(roots, []byte(`{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	run("verify-blob", "--key", public, "--insecure-ignore-tlog", "--new-bundle-format", "--trusted-root", roots, "--bundle", "SHA256SUMS.sigstore.json", "SHA256SUMS")
	at := func(repository, file string) string { return s.at(repository) + "@" + readText(t, dir, file) }
	for _, name := range []string{at("gpu-agent", "gpu-agent-digest"), at("gpu-placer", "gpu-placer-digest"), at("charts/gpu-agent", "gpu-agent-chart-digest")} {
		run("verify", "--key", public, "--insecure-ignore-tlog", "--allow-http-registry", name)
	}
	for _, name := range []string{at("gpu-agent", "gpu-agent-digest"), at("gpu-placer", "gpu-placer-digest")} {
		run("verify-attestation", "--key", public, "--insecure-ignore-tlog", "--allow-http-registry", "--type", "slsaprovenance1", name)
	}
}

// isStated holds the statement about an image against what the release is made of.
func (r *release) isStated(t *testing.T, text, digest string) {
	var s statement
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatal(err)
	}
	if s.Type != "https://in-toto.io/Statement/v1" || s.PredicateType != "https://slsa.dev/provenance/v1" {
		t.Errorf("it is a %s about %s", s.Type, s.PredicateType)
	}
	if len(s.Subject) != 2 || "sha256:"+s.Subject[0].Digest["sha256"] != digest {
		t.Errorf("it is about %+v, want %s and the image of one architecture", s.Subject, digest)
	}
	d := s.Predicate.BuildDefinition
	if d.ExternalParameters["version"] != r.about.version || d.BuildType == "" {
		t.Errorf("its parameters are %v, of %q", d.ExternalParameters, d.BuildType)
	}
	has := func(what string, is func(resource) bool) {
		t.Helper()
		if !slices.ContainsFunc(d.ResolvedDependencies, is) {
			t.Errorf("it does not name %s", what)
		}
	}
	has("the commit", func(n resource) bool { return n.Digest["gitCommit"] == r.about.revision })
	has("a Go module", func(n resource) bool { return strings.HasPrefix(n.URI, "pkg:golang/github.com/NVIDIA/go-nvml@") })
	for _, p := range r.lock {
		has(p.String(), func(n resource) bool {
			return n.Digest["sha256"] == p.sha256 && strings.Contains(n.URI, "/"+p.name+"@")
		})
	}
}

// TestKeysThatAreNone: no release is signed by what is no key, and no error has the key in it.
func TestKeysThatAreNone(t *testing.T) {
	dir := t.TempDir()
	make := func(name string, args ...string) string {
		file := filepath.Join(dir, name)
		openssl(t, append(args, "-out", file)...)
		return file
	}
	text := func(name, content string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	key, public := newKey(t)
	for _, c := range []struct{ file, want string }{
		{filepath.Join(dir, "absent"), "no such file"},
		{text("empty", ""), "no PEM file"},
		{text("cosign", "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nc2VjcmV0\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----\n"), "sign with cosign itself"},
		{text("broken", "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"), "want a private key"},
		{public, "PUBLIC KEY"},
		{make("rsa", "genpkey", "-algorithm", "RSA"), "of another kind"},
		{make("p384", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384"), "of another kind"},
	} {
		if _, err := readSigner(c.file); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "c2VjcmV0") {
			t.Errorf("%s: %v, want %q", c.file, err, c.want)
		}
	}
	// Both forms in which openssl writes one.
	for _, file := range []string{key, make("sec1", "ecparam", "-name", "prime256v1", "-genkey")} {
		if _, err := readSigner(file); err != nil {
			t.Error(err)
		}
	}
}
