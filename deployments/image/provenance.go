// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"runtime"
	"slices"
)

// A statement says how an image was made, in the form of in-toto, with SLSA's predicate for provenance.
// It has no time and no name of a machine: the same commit gives the same statement.
const (
	statementType  = "https://in-toto.io/Statement/v1"
	provenanceType = "https://slsa.dev/provenance/v1"
	// buildType is `make release`; docs/release.md says what its parameters mean.
	buildType = "urn:gpu-agent:make-release:v1"
	// defaultBuilder is a person who runs it. A service that does so has a name of its own.
	defaultBuilder = "urn:gpu-agent:maintainer"
)

type (
	statement struct {
		Type          string     `json:"_type"`
		Subject       []resource `json:"subject"`
		PredicateType string     `json:"predicateType"`
		Predicate     provenance `json:"predicate"`
	}
	// resource is SLSA's ResourceDescriptor: a subject, or what a build needs.
	resource struct {
		URI    string            `json:"uri,omitempty"`
		Name   string            `json:"name,omitempty"`
		Digest map[string]string `json:"digest,omitempty"`
	}
	provenance struct {
		BuildDefinition buildDefinition `json:"buildDefinition"`
		RunDetails      runDetails      `json:"runDetails"`
	}
	buildDefinition struct {
		BuildType            string            `json:"buildType"`
		ExternalParameters   map[string]string `json:"externalParameters"`
		InternalParameters   map[string]string `json:"internalParameters"`
		ResolvedDependencies []resource        `json:"resolvedDependencies"`
	}
	runDetails struct {
		Builder builder `json:"builder"`
	}
	builder struct {
		ID      string            `json:"id"`
		Version map[string]string `json:"version,omitempty"`
	}
)

// statementFile is the name of a product's statement.
func statementFile(of product, version string) string {
	return of.name + "-" + version + ".intoto.json"
}

// addStatement writes how a product's image was made. digest is that of the index.
func (r *release) addStatement(of product, dir, digest string, parts []*part) error {
	s, err := r.statement(of, digest, parts)
	if err != nil {
		return fmt.Errorf("state how the image of %s was made: %w", of.name, err)
	}
	return writeText(filepath.Join(dir, statementFile(of, r.about.version)), string(s))
}

func (r *release) statement(of product, digest string, parts []*part) ([]byte, error) {
	at := r.repository(of)
	hex, err := hexOf(digest)
	if err != nil {
		return nil, err
	}
	s := statement{
		Type: statementType, PredicateType: provenanceType,
		Subject: []resource{{Name: at, Digest: map[string]string{"sha256": hex}}},
		Predicate: provenance{
			BuildDefinition: buildDefinition{
				BuildType: buildType,
				ExternalParameters: map[string]string{
					"version": r.about.version, "product": of.name, "repository": at,
				},
				InternalParameters: map[string]string{"go": runtime.Version()},
			},
			RunDetails: runDetails{Builder: builder{ID: r.builder}},
		},
	}
	definition := &s.Predicate.BuildDefinition
	source := resource{Name: "source"}
	if r.about.revision != "" {
		source.Digest = map[string]string{"gitCommit": r.about.revision}
	}
	needs := []resource{source}
	for _, p := range parts {
		own, err := p.image.Digest()
		if err != nil {
			return nil, err
		}
		// A registry gives nodes one of these.
		s.Subject = append(s.Subject, resource{Name: at + " (linux/" + p.arch + ")", Digest: map[string]string{"sha256": own.Hex}})
		for _, m := range p.modules {
			needs = append(needs, resource{URI: "pkg:golang/" + m.path + "@" + url.QueryEscape(m.version)})
		}
	}
	// Of the lock are the packages in the image, and those that its programs are compiled with.
	for _, d := range r.lock {
		needs = append(needs, resource{
			URI:    "pkg:deb/debian/" + d.name + "@" + url.QueryEscape(d.version) + "?arch=" + d.arch + "&distro=debian-12",
			Name:   d.use,
			Digest: map[string]string{"sha256": d.sha256},
		})
	}
	// Both architectures have most modules in common.
	for _, n := range needs {
		if !slices.ContainsFunc(definition.ResolvedDependencies, func(o resource) bool { return o.URI == n.URI && o.Name == n.Name }) {
			definition.ResolvedDependencies = append(definition.ResolvedDependencies, n)
		}
	}
	var out bytes.Buffer
	to := json.NewEncoder(&out)
	to.SetEscapeHTML(false)
	to.SetIndent("", "  ")
	if err := to.Encode(s); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
