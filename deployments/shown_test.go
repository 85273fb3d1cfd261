// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	loop "example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/gpunode"
)

// shownOverlays writes what the documents show into a directory as a user has it: the overlay of
// docs/install.md and the partitions of the README beside it, the cleanup's overlay of
// docs/lifecycle.md below it, and a checkout of the project.
func shownOverlays(t *testing.T) (dir, partitions string) {
	t.Helper()
	found := func(doc, pattern string) string {
		m := regexp.MustCompile(pattern).FindStringSubmatch(string(read(t, doc)))
		if m == nil {
			t.Fatalf("%s does not show %s", doc, pattern)
		}
		return m[1]
	}
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	partitions = found("../README.md", "(?s)```yaml\n(apiVersion: v1\nkind: ConfigMap\n.*?)```")
	install := found("../docs/install.md", "(?s)\n( +# kustomization.yaml\n.*?)\n\n")
	for name, text := range map[string]string{
		"partitions.yaml": partitions, "kustomization.yaml": regexp.MustCompile("(?m)^ {7}").ReplaceAllString(install, ""),
		"cleanup/kustomization.yaml": found("../docs/lifecycle.md", "(?s)```yaml\n(# cleanup/kustomization.yaml\n.*?)```"),
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(root, filepath.Join(dir, "gpu-agent")); err != nil {
		t.Fatal(err)
	}
	return dir, partitions
}

// The overlay that docs/install.md shows has the user's image, and the partitions that the README
// shows: there is one form of it.
func TestShownInstall(t *testing.T) {
	dir, partitions := shownOverlays(t)
	objects := render(t, dir)
	if len(objects) != len(base(t)) {
		t.Errorf("%d objects, and the base has %d", len(objects), len(base(t)))
	}
	config := one(t, objects, "ConfigMap", "gpu-partitions")
	type configMap struct {
		header `yaml:",inline"`
		Data   map[string]string
	}
	want := as[configMap](t, documents(t, "README.md", []byte(partitions))[0]).Data
	if got := as[configMap](t, config).Data; !maps.Equal(got, want) || len(got) != 1 || config.Metadata.Namespace != "gpu-agent" {
		t.Errorf("the ConfigMap in %s has %q", config.Metadata.Namespace, got)
	}
	d := agentSet(t, objects)
	if image := agent(t, &d).Image; image != "registry.example.com/team/gpu-agent:v0.1.0" {
		t.Errorf("the image is %s", image)
	}
}

// The cleanup that docs/lifecycle.md shows runs in the user's image, and the commands there name what
// is there. What people have set on Nodes goes, too.
func TestShownUninstall(t *testing.T) {
	dir, _ := shownOverlays(t)
	d := as[daemonSet](t, one(t, render(t, filepath.Join(dir, "cleanup")), "DaemonSet", "gpu-agent-cleanup"))
	spec := d.Spec.Template.Spec
	for _, c := range append(spec.InitContainers, spec.Containers...) {
		if c.Image != "registry.example.com/team/gpu-agent:v0.1.0" {
			t.Errorf("%s has the image %s, which is not the user's", c.Name, c.Image)
		}
	}
	text := string(read(t, "../docs/lifecycle.md"))
	_, text, _ = strings.Cut(text, "\n## Uninstall\n")
	var kustomized []string
	for _, m := range regexp.MustCompile(`kubectl (\w+) -k (\S+)`).FindAllStringSubmatch(text, -1) {
		kustomized = append(kustomized, m[1]+" "+m[2])
		if _, err := os.Stat(filepath.Join(dir, m[2], "kustomization.yaml")); err != nil {
			t.Errorf("%s: %v", m[0], err)
		}
	}
	if got := strings.Join(kustomized, ", "); got != "apply cleanup, delete cleanup, delete ." {
		t.Errorf("the commands are %s", got)
	}
	for _, key := range []string{loop.PartitionLabel, loop.ReleaseLabel, gpunode.Site, "gpu.node", loop.CordonAnnotation, loop.WasResetAnnotation} {
		if !strings.Contains(text, " example.com/"+key+"-") {
			t.Errorf("what people have set as example.com/%s stays", key)
		}
	}
}
