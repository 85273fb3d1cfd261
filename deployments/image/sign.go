// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content/memory"
)

// The forms are Sigstore's, so that `cosign verify --key` and its kin check a release. They are a few
// JSON objects around a signature by ECDSA on P-256 over SHA-256.
const (
	bundleType   = "application/vnd.dev.sigstore.bundle.v0.3+json"
	payloadType  = "application/vnd.dev.cosign.simplesigning.v1+json"
	envelopeType = "application/vnd.dsse.envelope.v1+json"
	intotoType   = "application/vnd.in-toto+json"
	signatureKey = "dev.cosignproject.cosign/signature"
)

const (
	// bundleSuffix is of the file with the signature of another file.
	bundleSuffix = ".sigstore.json"
	// signaturesFile has what publish puts beside the artefacts in a registry.
	signaturesFile = "signatures.json"
)

// signer signs with a private key.
type signer struct {
	key *ecdsa.PrivateKey
	// hint tells the key from others: the SHA-256 of the public one.
	hint string
}

// readSigner reads a private key: a PEM file, of ECDSA on the curve P-256. No error has anything of the
// key in its text.
func readSigner(file string) (*signer, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the key: %w", err)
	}
	const want = "want a private key of ECDSA on P-256, not encrypted, such as " +
		"`openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256` makes"
	block, _ := pem.Decode(text)
	// Older versions of openssl write the curve's name in front.
	for rest := text; block != nil && block.Type == "EC PARAMETERS"; {
		_, rest = pem.Decode(rest)
		block, _ = pem.Decode(rest)
	}
	if block == nil {
		return nil, fmt.Errorf("read the key %s: it is no PEM file: %s", file, want)
	}
	var key any
	switch block.Type {
	case "PRIVATE KEY":
		key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	case "EC PRIVATE KEY":
		key, err = x509.ParseECPrivateKey(block.Bytes)
	default:
		err = fmt.Errorf("it is of type %q; sign with cosign itself if the key is cosign's", block.Type)
	}
	if err != nil {
		return nil, fmt.Errorf("read the key %s: %w: %s", file, err, want)
	}
	own, ok := key.(*ecdsa.PrivateKey)
	if !ok || own.Curve != elliptic.P256() {
		return nil, fmt.Errorf("read the key %s: it is of another kind: %s", file, want)
	}
	public, err := x509.MarshalPKIXPublicKey(own.Public())
	if err != nil {
		return nil, fmt.Errorf("read the key %s: %w", file, err)
	}
	sum := sha256.Sum256(public)
	return &signer{own, base64.StdEncoding.EncodeToString(sum[:])}, nil
}

// sign returns a signature. The same data has the same one.
func (s *signer) sign(data []byte) ([]byte, error) {
	sum := sha256.Sum256(data)
	return s.key.Sign(nil, sum[:], crypto.SHA256) // without a source of chance: RFC 6979
}

type (
	// bundle is Sigstore's: a signature and what it is by.
	bundle struct {
		MediaType            string            `json:"mediaType"`
		VerificationMaterial material          `json:"verificationMaterial"`
		MessageSignature     *messageSignature `json:"messageSignature,omitempty"`
		DSSEEnvelope         *envelope         `json:"dsseEnvelope,omitempty"`
	}
	material struct {
		PublicKey struct {
			Hint string `json:"hint"`
		} `json:"publicKey"`
	}
	messageSignature struct {
		MessageDigest struct {
			Algorithm string `json:"algorithm"`
			Digest    []byte `json:"digest"`
		} `json:"messageDigest"`
		Signature []byte `json:"signature"`
	}
	// envelope is that of DSSE.
	envelope struct {
		Payload     []byte              `json:"payload"`
		PayloadType string              `json:"payloadType"`
		Signatures  []envelopeSignature `json:"signatures"`
	}
	envelopeSignature struct {
		Sig []byte `json:"sig"`
	}
	// signed is what is signed of one artefact of a registry.
	signed struct {
		// Artefact is gpu-agent, gpu-placer, or chart, and Digest its root's.
		Artefact string `json:"artefact"`
		Digest   string `json:"digest"`
		// Payload names the digest, and Signature is over it.
		Payload   []byte `json:"payload"`
		Signature []byte `json:"signature"`
		// Envelope has the statement, of an image.
		Envelope *envelope `json:"envelope,omitempty"`
	}
)

// chartArtefact is the chart among the products.
const chartArtefact = "chart"

// sign signs a release's folder: SHA256SUMS, each statement, and what publish pushes.
func (r *release) sign(dir string) error {
	s, err := readSigner(r.key)
	if err != nil {
		return err
	}
	if err := s.signSums(dir); err != nil {
		return err
	}
	var all []signed
	for _, of := range products {
		text, err := os.ReadFile(filepath.Join(dir, of.name+"-digest"))
		if err != nil {
			return fmt.Errorf("sign: %w", err)
		}
		one, err := s.signArtefact(of.name, r.repository(of), strings.TrimSpace(string(text)))
		if err != nil {
			return err
		}
		if one.Envelope, err = s.signStatement(filepath.Join(dir, statementFile(of, r.about.version))); err != nil {
			return err
		}
		all = append(all, one)
	}
	text, err := os.ReadFile(filepath.Join(dir, chartName+"-chart-digest"))
	if err != nil {
		return fmt.Errorf("sign: %w", err)
	}
	one, err := s.signArtefact(chartArtefact, r.chartAt, strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	return writeJSON(filepath.Join(dir, signaturesFile), append(all, one))
}

func (s *signer) signSums(dir string) error {
	sums, err := os.ReadFile(filepath.Join(dir, sumsFile))
	if err != nil {
		return fmt.Errorf("sign: %w", err)
	}
	m := &messageSignature{}
	digest := sha256.Sum256(sums)
	m.MessageDigest.Algorithm, m.MessageDigest.Digest = "SHA2_256", digest[:]
	if m.Signature, err = s.sign(sums); err != nil {
		return fmt.Errorf("sign %s: %w", sumsFile, err)
	}
	return writeJSON(filepath.Join(dir, sumsFile+bundleSuffix), s.bundle(m, nil))
}

func (s *signer) bundle(m *messageSignature, e *envelope) bundle {
	b := bundle{MediaType: bundleType, MessageSignature: m, DSSEEnvelope: e}
	b.VerificationMaterial.PublicKey.Hint = s.hint
	return b
}

// signStatement puts a statement into an envelope, and that into a file beside it.
func (s *signer) signStatement(file string) (*envelope, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	e := &envelope{Payload: text, PayloadType: intotoType}
	// What is signed is DSSE's pre-authentication encoding.
	sig, err := s.sign(fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(intotoType), intotoType, len(text), text))
	if err != nil {
		return nil, fmt.Errorf("sign %s: %w", file, err)
	}
	e.Signatures = []envelopeSignature{{sig}}
	return e, writeJSON(strings.TrimSuffix(file, ".json")+bundleSuffix, s.bundle(nil, e))
}

// signArtefact signs the digest of what is in a registry.
func (s *signer) signArtefact(name, at, digest string) (signed, error) {
	if _, err := hexOf(digest); err != nil {
		return signed{}, fmt.Errorf("sign %s: %w", name, err)
	}
	var payload struct {
		Critical struct {
			Identity struct {
				Reference string `json:"docker-reference"`
			} `json:"identity"`
			Image struct {
				Digest string `json:"docker-manifest-digest"`
			} `json:"image"`
			Type string `json:"type"`
		} `json:"critical"`
		Optional map[string]string `json:"optional"`
	}
	payload.Critical.Identity.Reference, payload.Critical.Image.Digest = at, digest
	payload.Critical.Type = "cosign container image signature"
	text, err := json.Marshal(payload)
	if err != nil {
		return signed{}, fmt.Errorf("sign %s: %w", name, err)
	}
	signature, err := s.sign(text)
	if err != nil {
		return signed{}, fmt.Errorf("sign %s: %w", name, err)
	}
	return signed{Artefact: name, Digest: digest, Payload: text, Signature: signature}, nil
}

// readSignatures reads what a release's signer has left; nil if it was not signed by `make release`.
func readSignatures(dir string) ([]signed, error) {
	text, err := os.ReadFile(filepath.Join(dir, signaturesFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var all []signed
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("read the signatures: %w", err)
	}
	return all, nil
}

// signatures are what goes beside an artefact of the registry: its signature, and that of its statement.
// They have the tags by which cosign finds them.
func (a *artefact) signatures(ctx context.Context, name string, all []signed) ([]*artefact, error) {
	var out []*artefact
	for _, s := range all {
		if s.Artefact != name {
			continue
		}
		if s.Digest != a.root.Digest.String() {
			return nil, fmt.Errorf("%s is signed as %s, and %s is to be pushed: make the release again, with its key",
				name, s.Digest, a.root.Digest)
		}
		hex, err := hexOf(s.Digest)
		if err != nil {
			return nil, err
		}
		signature := base64.StdEncoding.EncodeToString(s.Signature)
		one, err := a.beside(ctx, "sha256-"+hex+".sig", "signature of "+a.what, payloadType, s.Payload, map[string]string{signatureKey: signature})
		if err != nil {
			return nil, err
		}
		out = append(out, one)
		if s.Envelope == nil {
			continue
		}
		text, err := json.Marshal(s.Envelope)
		if err != nil {
			return nil, err
		}
		one, err = a.beside(ctx, "sha256-"+hex+".att", "statement about "+a.what, envelopeType, text,
			map[string]string{signatureKey: "", "predicateType": provenanceType})
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

// beside makes an artefact of one layer, in the same repository.
func (a *artefact) beside(ctx context.Context, tag, what, layerType string, layer []byte, annotations map[string]string) (*artefact, error) {
	image, err := mutate.Append(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON),
		mutate.Addendum{Layer: static.NewLayer(layer, types.MediaType(layerType)), Annotations: annotations})
	if err != nil {
		return nil, fmt.Errorf("pack the %s: %w", what, err)
	}
	store := memory.New()
	config, err := image.RawConfigFile()
	if err != nil {
		return nil, fmt.Errorf("pack the %s: %w", what, err)
	}
	manifest, err := image.RawManifest()
	if err != nil {
		return nil, fmt.Errorf("pack the %s: %w", what, err)
	}
	root := ocispec.Descriptor{}
	for _, blob := range []struct {
		kind string
		data []byte
	}{{string(types.OCIConfigJSON), config}, {layerType, layer}, {ocispec.MediaTypeImageManifest, manifest}} {
		if root, err = oras.PushBytes(ctx, store, blob.kind, blob.data); err != nil {
			return nil, fmt.Errorf("pack the %s: %w", what, err)
		}
	}
	return &artefact{at: a.at, tag: tag, file: signaturesFile, what: what, root: root, content: store}, nil
}

// hexOf returns the digits of a SHA-256 digest.
func hexOf(digest string) (string, error) {
	digits, ok := strings.CutPrefix(digest, "sha256:")
	if raw, err := hex.DecodeString(digits); !ok || err != nil || len(raw) != sha256.Size {
		return "", fmt.Errorf("%q is no digest of SHA-256", digest)
	}
	return digits, nil
}

func writeJSON(file string, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return writeText(file, string(text)+"\n")
}
