// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/url"
	"slices"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/licensecheck"
)

// writeSBOM writes what an image is made of: the modules that the
// programs themselves name, and Debian's packages.
func (s *source) writeSBOM(w io.Writer, p *part) error {
	digest, err := p.image.Digest()
	if err != nil {
		return err
	}
	name := p.product.name
	root := cdx.Component{
		BOMRef: "pkg:oci/" + name + "@" + digest.String(), Type: cdx.ComponentTypeContainer,
		PackageURL: "pkg:oci/" + name + "@" + url.QueryEscape(digest.String()) + "?arch=" + p.arch,
	}
	return s.writeBOM(w, root, name, digest.Hex, "/usr/bin/", p.modules, p.debs)
}

// writeBOM writes what a thing is made of. root has its kind and its names for programs; name is for
// people, and hex its SHA-256. Programs are said to be below the folder in.
func (s *source) writeBOM(w io.Writer, root cdx.Component, name, hex, in string, modules []module, debs []pkg) error {
	bom := cdx.NewBOM()
	// The same thing has the same number.
	bom.SerialNumber = fmt.Sprintf("urn:uuid:%s-%s-5%s-a%s-%s", hex[:8], hex[8:12], hex[13:16], hex[17:20], hex[20:32])
	root.Name, root.Version = name, s.about.version
	root.Licenses = &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}}
	root.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex}}
	bom.Metadata = &cdx.Metadata{Timestamp: s.about.created.UTC().Format(time.RFC3339), Component: &root}
	var all []cdx.Component
	var refs []string
	add := func(c cdx.Component) {
		c.BOMRef, c.Type = c.PackageURL, cdx.ComponentTypeLibrary
		all, refs = append(all, c), append(refs, c.BOMRef)
	}
	for _, m := range modules {
		properties := []cdx.Property{}
		for _, program := range m.programs {
			properties = append(properties, cdx.Property{Name: "gpu-agent:program", Value: in + program})
		}
		add(cdx.Component{
			Name: m.path, Version: m.version, PackageURL: "pkg:golang/" + m.path + "@" + url.QueryEscape(m.version),
			Licenses: m.licences(), Properties: &properties,
		})
	}
	for _, d := range debs {
		at := "pkg:deb/debian/" + d.name + "@" + url.QueryEscape(d.version)
		add(cdx.Component{
			Name: d.name, Version: d.version, PackageURL: at + "?arch=" + d.arch + "&distro=debian-12",
			Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: d.sha256}},
			Properties: &[]cdx.Property{{Name: "gpu-agent:use", Value: d.use}},
		})
	}
	bom.Components = &all
	bom.Dependencies = &[]cdx.Dependency{{Ref: root.BOMRef, Dependencies: &refs}}
	return cdx.NewBOMEncoder(w, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}

// licences are what a module's texts are known as.
func (m module) licences() *cdx.Licenses {
	var ids []string
	for _, t := range m.texts {
		for _, match := range licensecheck.Scan(t.data).Match {
			ids = append(ids, match.ID)
		}
	}
	slices.Sort(ids)
	all := cdx.Licenses{}
	for _, id := range slices.Compact(ids) {
		all = append(all, cdx.LicenseChoice{License: &cdx.License{Name: id}})
	}
	return &all
}
