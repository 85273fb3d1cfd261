// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"slices"

	"go.yaml.in/yaml/v4"
)

// ManifestKey is the key of a ConfigMap's data that has a partition file.
const ManifestKey = "config.yaml"

// maxDocuments is the number of YAML documents that Unwrap searches for a ConfigMap.
const maxDocuments = 256

// Unwrap finds the partition file in data, which is one itself, or Kubernetes manifests with one
// ConfigMap that has it. manifest names the ConfigMap, as "namespace/name" or "name", and is empty for
// a partition file. name begins messages, as in Parse.
//
// The result has the line numbers of data, since blank lines replace what comes before the ConfigMap's
// text. A text in quotes has no lines of its own in data; its lines count from its beginning.
// The error is an Errors.
func Unwrap(name string, data []byte) (file []byte, manifest string, err error) {
	m := &mistakes{file: name}
	if len(data) > maxFile {
		return data, "", nil // Parse refuses it
	}
	docs, err := decode(data, maxDocuments)
	if err != nil || len(docs) == 0 || !isManifest(docs[0].Content[0]) {
		return data, "", nil
	}
	var text *yaml.Node
	var others []string
	for _, d := range docs {
		root := d.Content[0]
		if field(root, "kind") == nil || field(root, "kind").Value != "ConfigMap" {
			continue
		}
		content := field(root, "data")
		found := field(content, ManifestKey)
		switch {
		case found == nil || found.Kind != yaml.ScalarNode:
			others = append(others, quote(manifestName(root))+" has "+list(keysOf(content), "and"))
		case text != nil:
			m.at(found, "a second ConfigMap with the key %s begins here: leave one", ManifestKey)
		default:
			text, manifest = found, manifestName(root)
		}
	}
	if text == nil {
		have := ""
		if len(others) > 0 {
			have = " (" + list(others, "and") + ")"
		}
		m.at(docs[0].Content[0], "these are Kubernetes manifests, and there is no ConfigMap with the key %s%s: "+
			"write a partition file, or a ConfigMap whose data has one", ManifestKey, have)
	}
	if err := m.err(); err != nil {
		return nil, "", err
	}
	before := 0
	if text.Style&yaml.LiteralStyle != 0 {
		before = text.Line
	}
	return append(bytes.Repeat([]byte("\n"), before), text.Value...), manifest, nil
}

// field returns a mapping's value; nil if there is none, or n is no mapping.
func field(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// keysOf returns a mapping's keys, sorted.
func keysOf(n *yaml.Node) (out []string) {
	if n == nil || n.Kind != yaml.MappingNode || len(n.Content) == 0 {
		return []string{"no data"}
	}
	for i := 0; i < len(n.Content); i += 2 {
		out = append(out, quote(n.Content[i].Value))
	}
	slices.Sort(out)
	return out
}

// manifestName returns the name of a manifest's object, with its namespace if it has one.
func manifestName(root *yaml.Node) string {
	meta := field(root, "metadata")
	name := ""
	if n := field(meta, "name"); n != nil {
		name = n.Value
	}
	if n := field(meta, "namespace"); n != nil && n.Value != "" {
		name = n.Value + "/" + name
	}
	return name
}
