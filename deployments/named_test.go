// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"io/fs"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/deviceplugin"
)

// others are flags of other programs that documents name by themselves, with the program.
var others = map[string]string{
	"register-with-taints": "kubelet", "watch": "kubectl get", "output-watch-events": "kubectl get", "list": "tests/stages", "changed": "tests/stages",
	"set": "helm", "set-file": "helm", "post-renderer": "helm", "reuse-values": "helm", "reset-then-reuse-values": "helm",
	"insecure-ignore-tlog": "cosign", "trusted-root": "cosign",
}

// everyDocument returns the texts of README, its neighbours and all documents, by their files. The changelog
// names what was.
func everyDocument(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, pattern := range []string{"../*.md", "../docs/*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) < 4 {
			t.Fatalf("find the documents: %v, %v", files, err)
		}
		for _, f := range files {
			if f != "../CHANGELOG.md" {
				out[f] = string(read(t, f))
			}
		}
	}
	return out
}

// Every command and flag that a document names is one of a program, by the reference, which says what the
// programs say of themselves. The reference has a table of each program.
func TestDocsNameCommandsAndFlags(t *testing.T) {
	text := reference(t)
	flags := names("(?m)^\\| `(?:-\\w, )?--([a-z-]+)", text)
	commands, found, used := map[string][]string{}, 0, map[string]bool{}
	for _, program := range []string{"gpu-agent", "gpu-placer", "kubectl gpu"} {
		if commands[program] = append(names("(?m)^\\| `"+program+" ([a-z-]+)", text), "help"); len(commands[program]) < 4 {
			t.Fatalf("the reference has the commands %q of %s", commands[program], program)
		}
	}
	for file, text := range everyDocument(t) {
		for program, known := range commands {
			for _, command := range names("(?m)(?:`|\\$ |-- |\\| |^ {4,})"+program+" ([a-z][a-z-]*)", text) {
				found++
				if !slices.Contains(known, command) {
					t.Errorf("%s names the command %s %s, and there are %q", file, program, command, known)
				}
			}
		}
		for _, flag := range names("`--([a-z][a-z-]*)", text) {
			found++
			if used[flag] = true; !slices.Contains(flags, flag) && others[flag] == "" && flag != "version" { // every program has that one, or a command
				t.Errorf("%s names --%s, which is no flag of ours, and none of others that this test knows", file, flag)
			}
		}
	}
	for flag := range others {
		if !used[flag] {
			t.Errorf("no document names --%s any more", flag)
		}
	}
	if found < 250 {
		t.Errorf("%d commands and flags are named: this test does not look where they are", found)
	}
}

// Every label and annotation of ours that a document names is in the sources or the manifests, and the
// other way round. Those below nvidia.com are NVIDIA's, and documents name them as what they are.
func TestDocsNameLabelsAndAnnotations(t *testing.T) {
	have := map[string]bool{}
	add := func(pattern, text string) {
		for _, name := range names(pattern, text) {
			have[name] = true
		}
	}
	for _, dir := range []string{"../internal", "../cmd", "../pkg"} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") && path != "../internal/label/nvidia.go" {
				add(`"(gpu\.[a-z.-]*[a-z])"`, string(read(t, path)))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"base", "components", "placer", "overlays", "cleanup"} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(path, ".yaml") {
				add(`example\.com/(gpu\.[a-z.-]*[a-z])`, string(read(t, path)))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, resource := range deviceplugin.ResourceNames("example.com").Fixed() { // their names are put together
		add(`example\.com/(gpu\.[a-z.-]*[a-z])`, resource)
	}
	if len(have) < 25 {
		t.Fatalf("the sources have only %q", slices.Sorted(maps.Keys(have)))
	}
	all := ""
	for file, text := range everyDocument(t) {
		all += text
		for _, name := range names(`example\.com/(gpu\.[a-z.-]*[a-z])`, text) {
			if !have[name] {
				t.Errorf("%s names example.com/%s, which is nowhere in sources and manifests", file, name)
			}
		}
	}
	for name := range have {
		if !regexp.MustCompile(regexp.QuoteMeta(name) + `\b`).MatchString(all) {
			t.Errorf("no document names the label or annotation %s", name)
		}
	}
}
