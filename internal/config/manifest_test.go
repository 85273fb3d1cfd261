// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"
)

func TestUnwrap(t *testing.T) {
	const file = "version: v1\npartitions:\n  default:\n    - {devices: all, mode: quarter}\n"
	indented := "    " + strings.ReplaceAll(strings.TrimSuffix(file, "\n"), "\n", "\n    ") + "\n"
	const head = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: gpu-partitions\n  namespace: gpu-agent\n"
	for _, tt := range []struct {
		name, in string
		from     string // the ConfigMap
		want     string // the mistake, by Unwrap or by Parse of what it returns
	}{
		{"a partition file", file, "", "f:4: mode is"},
		{"a ConfigMap", head + "data:\n  config.yaml: |\n" + indented, "gpu-agent/gpu-partitions", "f:11: mode is"},
		{"a comment and other keys", "# mine\n" + head + "data:\n  a: b\n  config.yaml: |-\n" + indented + "  z: y\n", "gpu-agent/gpu-partitions", "f:13: mode is"},
		{"without a namespace", "kind: ConfigMap\napiVersion: v1\nmetadata: {name: n}\ndata:\n  config.yaml: |\n" + indented, "n", "f:9: mode is"},
		{"as JSON", `{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "n"}, "data": {"config.yaml": "version: v1\npartitions:\n  default:\n    - {devices: all, mode: quarter}\n"}}`, "n", "f:4: mode is"},
		{"a large one", head + "data:\n  config.yaml: |\n    # " + strings.Repeat(strings.Repeat("x", 60)+"\n    # ", 200) + "\n" + indented, "gpu-agent/gpu-partitions", "f:212: mode is"},
		{"among others", "apiVersion: v1\nkind: Namespace\nmetadata: {name: n}\n---\n" + head + "data:\n  config.yaml: |\n" + indented + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: other}\n", "gpu-agent/gpu-partitions", "f:15: mode is"},
		{"two", head + "data:\n  config.yaml: |\n" + indented + "---\n" + head + "data:\n  config.yaml: |\n" + indented, "", "f:19: a second ConfigMap with the key config.yaml"},
		{"another key", head + "data:\n  partitions.yaml: x\n  b: c\n", "", `f:1: these are Kubernetes manifests, and there is no ConfigMap with the key config.yaml ("gpu-agent/gpu-partitions" has "b" and "partitions.yaml"`},
		{"no data", head, "", `has no data): write`},
		{"a list for data", head + "data: [config.yaml]\n", "", "there is no ConfigMap with the key config.yaml"},
		{"a list for the key", head + "data: {config.yaml: [1]}\n", "", "there is no ConfigMap with the key config.yaml"},
		{"another kind", "apiVersion: v1\nkind: Secret\ndata: {config.yaml: eA==}\n", "", "there is no ConfigMap"},
		{"no YAML", "\t{", "", "f:1: "},
		{"nothing", "", "", "f:1: the file is empty"},
		{"empty documents", "---\n---\n", "", "f:1: "},
		{"a manifest in a manifest", head + "data:\n  config.yaml: |\n    apiVersion: v1\n    kind: ConfigMap\n", "gpu-agent/gpu-partitions", "f:8: this is a Kubernetes manifest"},
	} {
		data, from, err := Unwrap("f", []byte(tt.in))
		if err == nil {
			_, err = Parse("f", data)
		}
		if from != tt.from || err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: from %q: %v; want from %q: %s", tt.name, from, err, tt.from, tt.want)
		}
	}
}
