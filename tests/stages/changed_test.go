// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// house is a checkout with a product of two packages, its tests, and a program of another
// module, committed.
func house(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":                        "module example.com/gpu-agent\n\ngo 1.26\n",
		"Makefile":                      "image:\n",
		"docs/guide.md":                 "docs/other.md says more\n",
		"docs/other.md":                 "more\n",
		"pkg/cap/cap.go":                "package cap\n\n// See docs/guide.md.\nconst Help = \"docs/guide.md\"\n",
		"pkg/cap/cap_test.go":           "package cap\n",
		"pkg/cap/c/count.c":             "int x;\n",
		"pkg/cap/testdata/case.txt":     "case\n",
		"cmd/agent/main.go":             "package main\n\nimport _ \"example.com/gpu-agent/pkg/cap\"\n\nfunc main() {}\n",
		"pkg/other/other.go":            "package other\n",
		"tests/lab/lab.go":              "package lab\n\nimport \"path/filepath\"\n\nvar Tool, Shown = \"./tests/tool\", filepath.Join(\"docs\", \"guide.md\")\n",
		"tests/tool/main.go":            "package main\n\nfunc main() {}\n",
		"tests/e2e/e2e_test.go":         "package e2e\n\nimport _ \"example.com/gpu-agent/tests/lab\"\n\nconst inventories = \"../testdata/*.json\"\n",
		"tests/testdata/h100.json":      "{}\n",
		"tests/cluster/go.mod":          "module example.com/gpu-agent/tests/cluster\n\ngo 1.26\n",
		"tests/cluster/go.sum":          "\n",
		"tests/cluster/main.go":         "package main\n\nfunc main() {}\n",
		"tests/cluster/kueue/go.mod":    "module kueue\n",
		"tests/units/alone/one_test.go": "package alone\n",
	} {
		write(t, filepath.Join(dir, name), text)
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q", "-m", "all"}} {
		if out, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", dir}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v\n%s", args, err, out)
		}
	}
	return dir
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// rooms are the stages of that checkout.
var rooms = []stage{
	{name: "image", reads: []string{"Makefile", "cmd/agent"}, commands: []command{run("make", "image")}},
	{name: "node", reads: []string{"tests/cluster"}, commands: []command{{in: "tests/cluster", args: []string{"go", "build", "."}}}},
	{name: "e2e", after: []string{"image"}, commands: []command{test(".", "-count=1", "./tests/e2e", "-built")}},
	{name: "caps", commands: []command{test(".", "./pkg/cap")}},
	{name: "units", commands: []command{test(".", "./tests/units/...")}},
}

// One byte of an input, and the stages that have it run; no others do.
func TestOneByte(t *testing.T) {
	dir := house(t)
	for file, want := range map[string][]string{
		"pkg/cap/cap.go":                {"image", "e2e", "caps"},
		"pkg/cap/c/count.c":             {"image", "e2e", "caps"},
		"pkg/cap/cap_test.go":           {"caps"},
		"pkg/cap/testdata/case.txt":     {"caps"},
		"pkg/cap/new_test.go":           {"caps"},
		"pkg/other/other.go":            nil,
		"Makefile":                      {"image", "e2e"},
		"go.mod":                        {"image", "e2e", "caps", "units"},
		"docs/guide.md":                 {"e2e"},
		"docs/other.md":                 nil,
		"tests/tool/main.go":            {"e2e"},
		"tests/tool/main_test.go":       nil,
		"tests/testdata/h100.json":      {"e2e"},
		"tests/cluster/go.sum":          {"node"},
		"tests/cluster/kueue/go.mod":    {"node"},
		"tests/units/alone/one_test.go": {"units"},
	} {
		name := filepath.Join(dir, file)
		text, err := os.ReadFile(name)
		isNew := os.IsNotExist(err)
		if err != nil && !isNew {
			t.Fatal(err)
		}
		if isNew {
			text = []byte("package " + filepath.Base(filepath.Dir(file)))
		}
		write(t, name, string(text)+"\n")
		if got := changedIn(t, dir, commandsOf(rooms)); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
		if isNew {
			err = os.Remove(name)
		} else {
			err = os.WriteFile(name, text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func changedIn(t *testing.T, dir string, then map[string]string) (names []string) {
	t.Helper()
	c, err := readCheckout(dir)
	if err != nil {
		t.Fatal(err)
	}
	changes, err := c.changedSince(t.Context(), "HEAD", rooms, then)
	if err != nil {
		t.Fatal(err)
	}
	for _, ch := range changes {
		names = append(names, ch.stage)
	}
	return names
}

// A file that is gone, another command, and a commit whose commands are not known.
func TestOtherChanges(t *testing.T) {
	dir := house(t)
	then := commandsOf(rooms)
	if got := changedIn(t, dir, then); got != nil {
		t.Errorf("nothing changed, and these run: %q", got)
	}
	then["node"] += "more"
	delete(then, "units")
	if got, want := changedIn(t, dir, then), []string{"node", "units"}; !slices.Equal(got, want) {
		t.Errorf("one command changed, one stage is new: %q, want %q", got, want)
	}
	if err := os.Remove(filepath.Join(dir, "pkg/cap/testdata/case.txt")); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "pkg/cap/testdata/other.txt"), "")
	if got, want := changedIn(t, dir, commandsOf(rooms)), []string{"caps"}; !slices.Equal(got, want) {
		t.Errorf("a file is gone: %q, want %q", got, want)
	}
	c, err := readCheckout(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.changedSince(t.Context(), "no-such-commit", rooms, nil); err == nil {
		t.Error("a commit that is not there passes")
	}
}

// Each file of the product is an input of a stage, and what make test leaves out is reached by
// --changed.
func TestEveryFileIsAnInput(t *testing.T) {
	t.Chdir("../..")
	packages, err := unitPackages()
	if err != nil {
		t.Fatal(err)
	}
	files, err := goFiles()
	if err != nil {
		t.Fatal(err)
	}
	list, err := stages("cache", packages, files, whole)
	if err != nil {
		t.Fatal(err)
	}
	c, err := readCheckout(".")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	for _, s := range list {
		inputs := c.inputs(s, list)
		maps.Copy(all, inputs)
		if len(inputs) == 0 && s.name != "host" && s.name != "lint" {
			t.Errorf("the stage %q has no inputs", s.name)
		}
	}
	for _, f := range c.files {
		product := strings.HasPrefix(f, "cmd/") || strings.HasPrefix(f, "internal/") || strings.HasPrefix(f, "pkg/") || strings.HasPrefix(f, "deployments/")
		if product && !all[f] {
			t.Errorf("%s is no input of any stage", f)
		}
	}
	for name, want := range map[string][]string{
		"e2e":     {"internal/agent/agent.go", "tests/lab/pod.go", "tests/emulator/lib/c/cuda_switch.c", "tests/cluster/kubernetes/main.go", "deployments/base/rbac.yaml", "pkg/memcap/lib/c/count.c"},
		"queues":  {"internal/kueue/checks.go", "tests/cluster/kueue/go.mod", "deployments/placer/scheduler-config.yaml"},
		"page":    {"internal/status/page.go"},
		"peers":   {"tests/peers/nvidia-device-plugin/go.mod", "tests/testdata/inventories/h100-80gb.json"},
		"release": {"docs/release.md", "deployments/image/debian.lock"},
	} {
		i := slices.IndexFunc(list, func(s stage) bool { return s.name == name })
		inputs := c.inputs(list[i], list)
		for _, f := range want {
			if !inputs[f] {
				t.Errorf("%s is no input of the stage %q", f, name)
			}
		}
	}
}
