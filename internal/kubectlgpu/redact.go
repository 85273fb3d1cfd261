// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// redactor replaces the names of tenants: of namespaces, pods and containers, and the values of pods'
// labels. It first learns the names from everything that is to be redacted, and then replaces them
// everywhere. So a name that one part has in a field is also found in another one's sentences.
//
// It is meant to hide too much: a word that looks like a pod's name is one. What stays are the names
// of nodes, GPUs and resources, which a report is about.
type redactor struct {
	// keep are words that are no tenant's.
	keep map[string]bool
	// kinds has the kind of each name that was learned, and aliases what it becomes.
	kinds, aliases map[string]string
}

func newRedactor(keep ...string) *redactor {
	r := &redactor{keep: map[string]bool{"": true}, kinds: map[string]string{}}
	for _, word := range keep {
		r.keep[word] = true
	}
	return r
}

// nameKeys are the keys of JSON whose values are names, with their kinds.
var nameKeys = map[string]string{"namespace": "namespace", "pod": "pod", "container": "container"}

// inText finds names in sentences and log lines. The groups are of the kinds in order.
var inText = []struct {
	pattern *regexp.Regexp
	kinds   []string
}{
	{regexp.MustCompile(`(?:^|[^\w/.-])([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)/([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)`),
		[]string{"namespace", "pod"}},
	{regexp.MustCompile(`\bcontainers? "?([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)"? of pod`), []string{"container"}},
	{regexp.MustCompile(`\bnamespace[= ]"?([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)`), []string{"namespace"}},
	{regexp.MustCompile(`\bpod[= ]"?([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?:[^/\w.-]|$)`), []string{"pod"}},
	{regexp.MustCompile(`\bname="?([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)`), []string{"container"}},
}

func (r *redactor) learn(kind, name string) {
	// What the API server would not take as a name is one all the same: nothing of it may stay.
	if !r.keep[name] && r.kinds[name] == "" {
		r.kinds[name] = kind
	}
}

// learnText learns the names in a text.
func (r *redactor) learnText(text string) {
	for _, of := range inText {
		for from := 0; from < len(text); {
			at := of.pattern.FindStringSubmatchIndex(text[from:])
			if at == nil {
				break
			}
			for i, kind := range of.kinds {
				r.learn(kind, text[from+at[2*i+2]:from+at[2*i+3]])
			}
			from += max(1, at[2*len(of.kinds)+1]) // the character behind may begin the next one
		}
	}
}

// learnJSON learns the names in a value that was decoded from JSON.
func (r *redactor) learnJSON(v any) {
	switch v := v.(type) {
	case map[string]any:
		for key, of := range v {
			text, isText := of.(string)
			switch {
			case isText && nameKeys[key] != "":
				r.learn(nameKeys[key], text)
			case key == "labels" && nameOf(v):
				for _, value := range asMap(of) {
					if text, ok := value.(string); ok {
						r.learn("label", text)
					}
				}
			default:
				r.learnJSON(of)
			}
		}
	case []any:
		for _, of := range v {
			r.learnJSON(of)
		}
	case string:
		r.learnText(v)
	}
}

// nameOf reports whether an object has the name of a pod, so that its labels are a pod's.
func nameOf(v map[string]any) bool { return v["pod"] != nil || v["container"] != nil }

func asMap(v any) map[string]any {
	m, _ := v.(map[string]any)
	return m
}

// finish gives each name its alias. Equal inputs have equal aliases.
func (r *redactor) finish() {
	r.aliases = map[string]string{}
	count := map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(r.kinds)) {
		kind := r.kinds[name]
		count[kind]++
		r.aliases[name] = fmt.Sprintf("%s-%d", kind, count[kind])
	}
}

// word finds what can be a name, or a path of such.
var word = regexp.MustCompile(`[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_.-]+)*`)

// text replaces the names in a text.
func (r *redactor) text(s string) string {
	s = word.ReplaceAllStringFunc(s, func(w string) string {
		whole := strings.TrimRight(w, ".-")
		tail := w[len(whole):]
		first, _, path := strings.Cut(whole, "/")
		if path && r.domain(first) {
			return w // a resource, a label or an annotation
		}
		parts := strings.Split(whole, "/")
		for i := range parts {
			parts[i] = cmp.Or(r.aliases[parts[i]], parts[i])
		}
		return strings.Join(parts, "/") + tail
	})
	// Names that are no words of this form, such as labels with other characters.
	longest := func(a, b string) int { return cmp.Or(len(b)-len(a), cmp.Compare(a, b)) }
	for _, name := range slices.SortedFunc(maps.Keys(r.aliases), longest) {
		if word.FindString(name) != name {
			s = strings.ReplaceAll(s, name, r.aliases[name])
		}
	}
	return s
}

// domain reports whether a word is the domain of names that are no tenant's.
func (r *redactor) domain(w string) bool {
	return strings.Contains(w, ".") && r.keep[w] || w == "nvidia.com" ||
		strings.HasSuffix(w, "k8s.io") || strings.HasSuffix(w, "kubernetes.io")
}

// json replaces the names in a value that was decoded from JSON. A single word that is not the value
// of a name's key stays: modes and states are such words, too.
func (r *redactor) json(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for key, of := range v {
			text, isText := of.(string)
			switch {
			case isText && nameKeys[key] != "":
				out[key] = cmp.Or(r.aliases[text], text)
			case key == "labels" && nameOf(v):
				labels := map[string]any{}
				for name, value := range asMap(of) {
					text, _ := value.(string)
					labels[name] = cmp.Or(r.aliases[text], text)
				}
				out[key] = labels
			default:
				out[key] = r.json(of)
			}
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i := range v {
			out[i] = r.json(v[i])
		}
		return out
	case string:
		if strings.ContainsAny(v, " /=\n") {
			return r.text(v)
		}
	}
	return v
}

// part is a file of a bundle.
type part struct {
	name string
	data []byte
}

// redact replaces the names of tenants in all parts.
func (r *redactor) redact(parts []part) error {
	for i := range parts {
		if err := parts[i].values(func(v any) error { r.learnJSON(v); return nil }, r.learnText); err != nil {
			return err
		}
	}
	r.finish()
	for i := range parts {
		p := &parts[i]
		var out bytes.Buffer
		encoder := json.NewEncoder(&out)
		if strings.HasSuffix(p.name, ".json") {
			encoder.SetIndent("", "  ")
		}
		err := p.values(func(v any) error { return encoder.Encode(r.json(v)) },
			func(text string) { out.WriteString(r.text(text)) })
		if err != nil {
			return err
		}
		p.data = out.Bytes()
	}
	return nil
}

// values calls do for each value of JSON in the part, or text for a part of another kind.
func (p *part) values(do func(any) error, text func(string)) error {
	if !strings.HasSuffix(p.name, ".json") && !strings.HasSuffix(p.name, ".jsonl") {
		text(string(p.data))
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(p.data))
	d.UseNumber()
	for d.More() {
		var v any
		if err := d.Decode(&v); err != nil {
			return fmt.Errorf("redact %s: %w", p.name, err) // fail closed: nothing of it is written
		}
		if err := do(v); err != nil {
			return fmt.Errorf("redact %s: %w", p.name, err)
		}
	}
	return nil
}
