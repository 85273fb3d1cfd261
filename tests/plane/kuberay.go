// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.yaml.in/yaml/v4"
)

// KubeRay starts the real KubeRay operator, with its own definitions. It runs with root's rights
// and without webhooks, as KubeRay's manifests have it by default.
func (s *Server) KubeRay(t testing.TB) {
	t.Helper()
	program, source := Program(t, "kuberay"), moduleSource(t, "kuberay", "github.com/ray-project/kuberay/ray-operator")
	for _, kind := range []string{"rayclusters", "rayjobs", "rayservices"} {
		text, err := os.ReadFile(filepath.Join(source, "config", "crd", "bases", "ray.io_"+kind+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var object map[string]any
		if err := yaml.Unmarshal(text, &object); err != nil {
			t.Fatal(err)
		}
		// Server-side, since it is too long for an annotation.
		if err := s.Do(t, nil, http.MethodPatch, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"+kind+".ray.io?fieldManager=test", Apply, object, nil); err != nil {
			t.Fatal(err)
		}
		s.Await(t, kind+" are served", func() error { return s.Do(t, nil, http.MethodGet, "/apis/ray.io/v1/"+kind, "", nil, nil) })
	}
	Background(t, program, "--kubeconfig", s.Kubeconfig(t, nil), "--enable-leader-election=false",
		"--metrics-addr", FreeAddress(t), "--health-probe-bind-address", FreeAddress(t))
}

// moduleSource is the directory of a module, in the version that is built: that of a module below tests/cluster.
func moduleSource(t testing.TB, of, module string) string {
	t.Helper()
	top, err := exec.CommandContext(t.Context(), "go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", module)
	cmd.Dir = filepath.Join(filepath.Dir(string(top)), "tests", "cluster", of)
	out, err := cmd.Output()
	var said struct{ Dir string }
	if err == nil {
		err = json.Unmarshal(out, &said)
	}
	if err != nil || said.Dir == "" {
		t.Fatalf("find the module %s: %v: %s", module, err, out)
	}
	return said.Dir
}
