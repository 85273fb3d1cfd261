// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/config"
)

// stories are what users of the field have: a page docs/story-NAME.md and files in examples/stories/NAME, by NAME.
// The machine is the recorded one that a story tells of, with so many of its GPUs.
var stories = map[string]struct {
	machine string
	gpus    int
}{
	"notebooks": {"h100-80gb", 2},
	"studio":    {"rtx-pro-6000-96gb", 4},
	"fraud":     {"h100-80gb", 2},
	"lab":       {"h100-80gb", 2},
}

func storyPage(t *testing.T, name string) string {
	t.Helper()
	return string(read(t, "../docs/story-"+name+".md"))
}

// TestStoriesAtTheAPIServer has the real API server, with the product's policies, take what the stories' teams apply.
// It refuses fields that it does not know. In tests/stories all of it runs on a real node.
func TestStoriesAtTheAPIServer(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	const team = "train"
	for _, name := range []string{team, "vision", "language", "physics"} {
		s.namespace(t, name)
	}
	for name := range stories {
		for _, file := range []string{"partitions.yaml", "work.yaml"} {
			path := "examples/stories/" + name + "/" + file
			for _, o := range documents(t, path, read(t, path)) {
				if o.Metadata.Namespace == "" {
					o.Metadata.Namespace = team
				}
				s.apply(t, o, true)
			}
		}
	}
}

// TestStoryPartitions: each partition of a story fits the story's machine. Where a page shows what pods can ask for
// then, it is what the program prints.
func TestStoryPartitions(t *testing.T) {
	program, shown := program(t), 0
	for name, story := range stories {
		inv, err := config.ReadInventory(read(t, "../tests/testdata/inventories/"+story.machine+".json"))
		if err != nil {
			t.Fatal(err)
		}
		inv.GPUs = inv.GPUs[:story.gpus]
		node, err := json.Marshal(inv)
		if err != nil {
			t.Fatal(err)
		}
		at := filepath.Join(t.TempDir(), "node.json")
		if err := os.WriteFile(at, node, 0o600); err != nil {
			t.Fatal(err)
		}
		file := "examples/stories/" + name + "/partitions.yaml"
		check := exec.CommandContext(t.Context(), program, "check", "--config", file, "--inventory", at)
		out, err := check.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "partition default fits") {
			t.Errorf("%s: %v\n%s", file, err, out)
		}
		const heading = "pods can then ask for\n"
		_, page, found := strings.Cut(storyPage(t, name), "    "+heading)
		if !found {
			continue
		}
		shown++
		plan := []string{"plan", "--config", file, "--inventory", at, "--partition", "default"}
		out, err = exec.CommandContext(t.Context(), program, plan...).Output()
		_, printed, _ := strings.Cut(string(out), heading)
		printed, _, _ = strings.Cut(printed, "not known here")
		want := "    " + strings.ReplaceAll(strings.TrimSpace("  "+printed), "\n", "\n    ") + "\n"
		if err != nil || !strings.HasPrefix(page, "      "+strings.TrimLeft(want, " ")) {
			t.Errorf("docs/story-%s.md does not show what plan prints, %v:\n%s", name, err, want)
		}
	}
	if shown == 0 {
		t.Error("no page shows what pods can ask for: this test does not look where it is")
	}
}

// TestStoriesShowTheirFiles: what a page shows is in the story's files, the page leads to each of them, and says what
// it does not do. The list of documents leads to the stories, and there are no files without a page.
func TestStoriesShowTheirFiles(t *testing.T) {
	list := string(read(t, "../docs/README.md"))
	dirs, err := filepath.Glob("examples/stories/*")
	if err != nil || len(dirs) != len(stories) {
		t.Errorf("there are the stories %q: %v", dirs, err)
	}
	for name := range stories {
		page := storyPage(t, name)
		files, err := filepath.Glob("examples/stories/" + name + "/*")
		if err != nil || len(files) < 2 {
			t.Fatalf("the story %s has the files %q: %v", name, files, err)
		}
		all := ""
		for _, file := range files {
			text := string(read(t, file))
			all += withoutComments(text) + text
			if !strings.Contains(page, "(../deployments/"+filepath.ToSlash(file)+")") {
				t.Errorf("docs/story-%s.md does not lead to %s", name, file)
			}
		}
		blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(page, -1)
		if len(blocks) == 0 {
			t.Errorf("docs/story-%s.md shows no manifest", name)
		}
		for _, m := range blocks {
			if !strings.Contains(all, m[1]) {
				t.Errorf("docs/story-%s.md shows what is in none of its files:\n%s", name, m[1])
			}
		}
		if !slices.Contains(headings(page), "what-it-does-not-do") {
			t.Errorf("docs/story-%s.md does not say what it does not do", name)
		}
		if !strings.Contains(list, "(story-"+name+".md)") {
			t.Errorf("docs/README.md does not lead to the story %s", name)
		}
		if lines := strings.Count(page, "\n"); lines > 100 {
			t.Errorf("docs/story-%s.md has %d lines, want a page", name, lines)
		}
	}
}
