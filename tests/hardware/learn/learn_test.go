// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/hardware/ask"
)

// answers writes a folder, a question's last line each.
func answers(t *testing.T, lines map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, line := range lines {
		if err := os.WriteFile(filepath.Join(dir, name+".jsonl"), []byte(line+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestCompare(t *testing.T) {
	questions := []ask.Question{
		{Name: "as-we", Asks: "Is it as we say?"},
		{Name: "near", Asks: "How much?", Within: 0.1},
		{Name: "other", Asks: "Is it other?", Code: []string{"pkg/mig/plan.go"}},
		{Name: "own", Asks: "How fast?", NotEmulated: "it is not fast"},
		{Name: "hung", Asks: "Does it end?"},
		{Name: "unsaid", Asks: "Was it asked?"},
	}
	card := answers(t, map[string]string{
		"as-we": `{"at":1,"answer":{"says":"yes"}}`,
		"near":  `{"at":1,"answer":{"says":"number","number":300,"unit":"MiB"}}`,
		"other": `{"at":1,"answer":{"says":"no","why":"by the card"}}`,
		"own":   `{"at":1,"answer":{"says":"number","number":7,"unit":"s"}}`,
		"hung":  `{"at":1,"ended":"it had no answer in 3s"}`,
	})
	ours := answers(t, map[string]string{
		"as-we": `{"at":1,"answer":{"says":"yes"}}`,
		"near":  `{"at":1,"answer":{"says":"number","number":310,"unit":"MiB"}}`,
		"other": `{"at":1,"answer":{"says":"yes","why":"by us"}}`,
		"hung":  `{"at":1,"answer":{"says":"yes"}}`,
	})
	var out strings.Builder
	if err := compare(&out, questions, card, ours); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Is it other?  no: by the card  yes: by us    pkg/mig/plan.go", "2 the same, 1 differ", "How fast? 7 s", "hung: it had no answer in 3s", "unsaid: it was not asked"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("there is no %q in\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "Is it as we say?") {
		t.Errorf("what is the same is in the table:\n%s", out.String())
	}
}
