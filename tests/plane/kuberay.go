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
	program := Program(t, "kuberay")
	for _, kind := range []string{"rayclusters", "rayjobs", "rayservices"} {
		text, err := os.ReadFile(filepath.Join(kubeRaySource(t), "config", "crd", "bases", "ray.io_"+kind+".yaml"))
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

// kubeRaySource is the directory of KubeRay's module, in the version that is built.
func kubeRaySource(t testing.TB) string {
	t.Helper()
	top, err := exec.CommandContext(t.Context(), "go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", "github.com/ray-project/kuberay/ray-operator")
	cmd.Dir = filepath.Join(filepath.Dir(string(top)), "tests", "cluster", "kuberay")
	out, err := cmd.Output()
	var said struct{ Dir string }
	if err == nil {
		err = json.Unmarshal(out, &said)
	}
	if err != nil || said.Dir == "" {
		t.Fatalf("find KubeRay's module: %v: %s", err, out)
	}
	return said.Dir
}
