// SPDX-License-Identifier: Apache-2.0

package shown

import (
	"slices"
	"strings"
	"testing"
)

const page = "# A page\n\nSay `make demo` or `kubectl get`, not `kubectl`, `--flag x` or `partition`.\n\n" +
	"    A=b C=d\n    helm install x \\\n      --set a=$A   # a comment\n    kubectl label node NODE a-\n\n" +
	"```yaml\nkubectl: in a file\n```\n\n1. First:\n\n       apiVersion: v1\n       kind: Pod\n\n   then\n\n       $ ctr images list\n       what it prints\n\n" +
	"Again `make demo`.\n"

func TestCommands(t *testing.T) {
	p := parse("page.md", page)
	var got []string
	for _, c := range p.Commands {
		got = append(got, c.String())
	}
	want := []string{"page.md:3: make demo", "page.md:3: kubectl get", "page.md:5: A=b C=d", "page.md:7: helm install x --set a=$A",
		"page.md:8: kubectl label node NODE a-", "page.md:21: ctr images list"}
	if !slices.Equal(got, want) {
		t.Errorf("the page shows\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, begin := range []string{"helm install", "make", "A=", "ctr"} {
		if c, err := p.Take(begin); err != nil || !strings.HasPrefix(c.Text, begin) {
			t.Errorf("%s: %v, %v", begin, c, err)
		}
	}
	if _, err := p.Take("docker"); err == nil {
		t.Error("a command that is not there was taken")
	}
	var left []string
	for _, c := range p.Left() {
		left = append(left, c.Text)
	}
	if !slices.Equal(left, []string{"kubectl get", "kubectl label node NODE a-"}) {
		t.Errorf("left are %q", left)
	}
	if m := p.Manifests("kind: Pod"); !slices.Equal(m, []string{"apiVersion: v1\nkind: Pod\n"}) {
		t.Errorf("the manifests are %q", m)
	}
	if m := p.Manifests("in a file"); len(m) != 1 {
		t.Errorf("the manifests are %q", m)
	}
}
