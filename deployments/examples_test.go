// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const frameworksDoc = "../docs/frameworks.md"

// examples are the manifests for the frameworks that users have.
func examples(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("there are no examples: %v", err)
	}
	return files
}

// TestExamplesAtTheAPIServer has the real API server take the examples, those for KubeRay by its own
// definitions. It refuses fields that it does not know. In tests/queues they run.
func TestExamplesAtTheAPIServer(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the definitions of others take long")
	}
	s := startAPIServer(t)
	source := sourceOf(t, "github.com/ray-project/kuberay/ray-operator") + "/config/crd/bases/ray.io_"
	for _, kind := range []string{"rayclusters", "rayjobs"} {
		for _, o := range documents(t, kind, read(t, source+kind+".yaml")) {
			s.apply(t, o, false)
		}
		s.await(t, kind+" are served", func() error { return s.do(t, nil, http.MethodGet, "/apis/ray.io/v1/"+kind, "", nil, nil) })
	}
	s.namespace(t, "research")
	for _, file := range examples(t) {
		queued := 0
		for _, o := range documents(t, file, read(t, file)) {
			o.Metadata.Namespace = "research"
			s.apply(t, o, true)
			if o.Metadata.Labels["kueue.x-k8s.io/queue-name"] == "gpus" {
				queued++
			}
		}
		if queued == 0 {
			t.Errorf("%s: nothing waits in a queue", file)
		}
	}
}

// What the document shows is what is tested, line by line, and each example is in its table.
func TestFrameworksShowTheExamples(t *testing.T) {
	text, files := string(read(t, frameworksDoc)), examples(t)
	for _, m := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(text, -1) {
		if !slices.ContainsFunc(files, func(file string) bool {
			return strings.Contains(withoutComments(string(read(t, file))), m[1]) || strings.Contains(string(read(t, file)), m[1])
		}) {
			t.Errorf("%s shows what is in none of the examples:\n%s", frameworksDoc, m[1])
		}
	}
	for _, file := range files {
		if !strings.Contains(text, "(../deployments/"+filepath.ToSlash(file)+")") {
			t.Errorf("%s does not lead to %s", frameworksDoc, file)
		}
	}
}

// withoutComments leaves lines out that are comments alone.
func withoutComments(text string) string {
	return regexp.MustCompile(`(?m)^ *#.*\n`).ReplaceAllString(text, "")
}
