// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Each command's help has an example, and the command has the flags that it uses.
func TestExamples(t *testing.T) {
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(commands)), func(name string) bool { return name == "export" })
	names = append(names, "export kueue", "export karpenter", "export cluster-autoscaler")
	for _, name := range names {
		_, help, _ := command(t, append(strings.Fields(name), "-h")...)
		example := examples[name]
		if !strings.HasSuffix(help, "\nExample:\n\n  "+example+"\n") || !strings.Contains(example, "gpu-agent "+name) {
			t.Errorf("%s: its example is %q, and its help ends with %q", name, example, help[max(0, len(help)-200):])
		}
		for _, flag := range regexp.MustCompile(` --?([a-z]+[a-z-]*)`).FindAllStringSubmatch(example[strings.Index(example, "gpu-agent "+name):], -1) {
			if !strings.Contains(help, "\n  -"+flag[1]) {
				t.Errorf("%s has no flag --%s: %s", name, flag[1], example)
			}
		}
	}
	if len(names) != len(examples) {
		t.Errorf("there are %d examples for %d commands", len(examples), len(names))
	}
}

func TestVersion(t *testing.T) {
	release, commit, date = "v1.2.3", "0123456789ab", "2026-01-02"
	defer func() { release, commit, date = "", "", "" }()
	out, _, err := command(t, "version")
	if err != nil || !strings.HasPrefix(out, "v1.2.3 (commit 0123456789ab of 2026-01-02, go1.") {
		t.Errorf("%q, %v", out, err)
	}
}

// The shells that there are take what is printed for them, and bash completes with it.
func TestCompletion(t *testing.T) {
	if _, help, err := command(t, "completion", "tcsh"); err == nil || !strings.Contains(help, "bash|zsh|fish") {
		t.Errorf("%v: %q", err, help)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("bash is not installed")
	}
	dir := t.TempDir()
	self, err := os.Executable() // which is the program where it is told to; see TestMain
	if err == nil {
		err = os.Symlink(self, filepath.Join(dir, "gpu-agent"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "partitions.yaml"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ line, want string }{
		{"gpu-agent inv", "inventory"},
		{"gpu-agent advise --tr", "--trace --tries"},
		{"gpu-agent export ka", "karpenter"},
		{"gpu-agent export kueue --ch", "--checks"},
		{"gpu-agent completion ba", "bash"},
		{"gpu-agent check part", "partitions.yaml"},
	} {
		cmd := exec.CommandContext(t.Context(), bash, "-c", `source <(gpu-agent completion bash); COMP_WORDS=($1) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _gpu_agent; echo "${COMPREPLY[@]}"`, "-", test.line)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "BE_GPU_AGENT=1", "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := cmd.Output()
		if got := strings.TrimSpace(string(out)); err != nil || got != test.want {
			t.Errorf("%q is completed with %q, want %q: %v", test.line, got, test.want, err)
		}
	}
	for _, shell := range []string{"zsh", "fish"} {
		path, err := exec.LookPath(shell)
		if err != nil {
			t.Logf("%s is not installed", shell)
			continue
		}
		cmd := exec.CommandContext(t.Context(), path, "-n")
		cmd.Stdin = strings.NewReader(completions[shell])
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", shell, err, out)
		}
	}
}
