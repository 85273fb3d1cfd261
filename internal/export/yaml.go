// SPDX-License-Identifier: Apache-2.0

package export

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/pkg/gpu"
)

// field is one key of an object.
type field struct {
	key   string
	value any
	// comment is written above the key, without "#".
	comment string
}

// object is a YAML mapping that keeps the order of its fields.
type object []field

// inline is an object, or a list of strings, on one line.
type inline struct{ value any }

// write returns documents as YAML, with a comment at the top.
func write(head string, documents ...any) ([]byte, error) {
	var out bytes.Buffer
	for _, line := range strings.Split(head, "\n") {
		fmt.Fprintln(&out, "# "+line)
	}
	for i, d := range documents {
		if i > 0 {
			fmt.Fprintln(&out, "---")
		}
		text, err := yaml.Dump(node(d), yaml.WithV3Defaults(), yaml.WithIndent(2), yaml.WithCompactSeqIndent(),
			yaml.WithLineWidth(-1))
		if err != nil {
			return nil, fmt.Errorf("write YAML: %w", err)
		}
		fmt.Fprintln(&out, string(bytes.TrimRight(text, "\n")))
	}
	return out.Bytes(), nil
}

// node returns the YAML tree of a value, which may have objects, lists, strings, numbers and
// booleans.
func node(v any) *yaml.Node {
	scalar := func(tag, text string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text} }
	switch v := v.(type) {
	case object:
		out := &yaml.Node{Kind: yaml.MappingNode}
		for _, f := range v {
			key := scalar("!!str", f.key)
			key.HeadComment = f.comment
			out.Content = append(out.Content, key, node(f.value))
		}
		return out
	case []object:
		out := &yaml.Node{Kind: yaml.SequenceNode}
		for _, e := range v {
			out.Content = append(out.Content, node(e))
		}
		return out
	case []any:
		out := &yaml.Node{Kind: yaml.SequenceNode}
		for _, e := range v {
			out.Content = append(out.Content, node(e))
		}
		return out
	case []string:
		out := &yaml.Node{Kind: yaml.SequenceNode}
		for _, e := range v {
			out.Content = append(out.Content, scalar("!!str", e))
		}
		return out
	case inline:
		out := node(v.value)
		out.Style = yaml.FlowStyle
		return out
	case bool:
		return scalar("!!bool", strconv.FormatBool(v))
	case int:
		return scalar("!!int", strconv.Itoa(v))
	case gpu.MiB:
		return scalar("!!str", quantity(v))
	default:
		return scalar("!!str", fmt.Sprint(v))
	}
}

// quantity writes memory as the Kubernetes API does.
func quantity(m gpu.MiB) string {
	switch {
	case m == 0:
		return "0"
	case m%1024 == 0:
		return strconv.FormatUint(uint64(m/1024), 10) + "Gi"
	default:
		return strconv.FormatUint(uint64(m), 10) + "Mi"
	}
}
