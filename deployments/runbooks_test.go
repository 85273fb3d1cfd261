// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// situations have sections beside those of alerts and codes.
var situations = []string{"The agent is killed for memory", "The agent is in a crash loop",
	"The disk is full, or returns errors", "The agent can open no more files", "Hours without the API server",
	"The API server is slow, or refuses with 429", "The API server was restored from a backup", "The kubelet stands still",
	"A GPU dies under many pods", "The agent is rolled back", "A node comes back, or its clock is off",
	"A certificate has expired", "containerd with CDI off"}

// Each alert and each reason code has a section, and each section is of one. It says what it means, what
// to look at and what to do.
func TestRunbooks(t *testing.T) {
	text := string(read(t, "../docs/runbooks.md"))
	want, _ := alertsAndRecords(t)
	codes := names(`(?m)^\t\w+ +Reason = "(\w+)"`, string(read(t, "../internal/status/reason.go")))
	if len(codes) < 40 {
		t.Fatalf("the codes are %q: this test does not look where they are", codes)
	}
	want = slices.Concat(want, codes, situations)
	slices.Sort(want)
	want = slices.Compact(want) // some alerts have the name of a code
	var have []string
	for _, section := range regexp.MustCompile(`(?m)^### `).Split(text, -1)[1:] {
		title, body, _ := strings.Cut(section, "\n")
		have = append(have, title)
		body, _, _ = strings.Cut(body, "\n## ")
		means, rest, looks := strings.Cut(body, "\n\nLook: ")
		look, do, does := strings.Cut(rest, "\n\nDo: ")
		if !looks || !does || len(strings.TrimSpace(means)) < 15 || len(look) < 5 || len(do) < 5 {
			t.Errorf("%s does not say what it means, what to look at and what to do", title)
		}
	}
	slices.Sort(have)
	if !slices.Equal(have, want) {
		t.Errorf("the runbooks are\n%q, want\n%q", have, want)
	}
}

// What the runbooks have one run and look at is there: commands, flags, variables and files.
func TestRunbooksNameWhatIsThere(t *testing.T) {
	text := string(read(t, "../docs/runbooks.md"))
	commands := names("(?m)^\\| `gpu-agent ([a-z]+)", reference(t))
	found := 0
	for _, command := range names("(?:`|-- )gpu-agent ([a-z]+)", text) {
		found++
		if !slices.Contains(commands, command) {
			t.Errorf("the runbooks have one run gpu-agent %s, which is none of %q", command, commands)
		}
	}
	for _, of := range []struct {
		pattern string
		known   func(string) bool
	}{
		{"`--([a-z-]+)[^`]*`", func(flag string) bool { _, ok := programFlags(t)[flag]; return ok }},
		{"GPU_AGENT_([A-Z_]+)", func(twin string) bool {
			_, ok := programFlags(t)[strings.ToLower(strings.ReplaceAll(twin, "_", "-"))]
			return ok
		}},
		{"`(\\w+\\.yaml)`", func(file string) bool {
			return file == "config.yaml" || slices.Contains(readKustomization(t, "base").Resources, file) // a key of the ConfigMap
		}},
		{"components? `([a-z-]+)`", func(dir string) bool { return slices.Contains(components(t), "components/"+dir) }},
		{"overlay `([a-z-]+)`", func(dir string) bool { return slices.Contains(overlays(t), "overlays/"+dir) }},
	} {
		for _, name := range names(of.pattern, text) {
			found++
			if !of.known(name) {
				t.Errorf("the runbooks name %s, which there is not", name)
			}
		}
	}
	if found < 20 {
		t.Errorf("%d names were checked: this test does not look where they are", found)
	}
}
