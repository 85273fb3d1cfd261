// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/internal/extender"
)

// JobSet starts the real JobSet controller, with its own definition and webhooks. It runs with root's rights, and with
// certificates that are made here: it would write its own into a directory that tests share.
func (s *Server) JobSet(t testing.TB) {
	t.Helper()
	program, source, dir, port := Program(t, "jobset"), moduleSource(t, "jobset", "sigs.k8s.io/jobset"), t.TempDir(), freePorts(t, 1)[0]
	made, err := extender.Certificates([]string{"localhost"}, time.Now().Add(-time.Minute), time.Now().Add(24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range made {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	paths := map[any]string{
		"CustomResourceDefinition":       "apiextensions.k8s.io/v1/customresourcedefinitions",
		"MutatingWebhookConfiguration":   "admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
		"ValidatingWebhookConfiguration": "admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
	}
	for _, o := range kustomized(t, filepath.Join(source, "config/default")) {
		path := paths[o["kind"]]
		if path == "" {
			continue // about a manager in a pod, and about who may do what
		}
		hooks, _ := o["webhooks"].([]any)
		for _, one := range hooks {
			to := one.(map[string]any)
			at := to["clientConfig"].(map[string]any)["service"].(map[string]any)["path"]
			to["clientConfig"] = map[string]any{"url": fmt.Sprintf("https://localhost:%d%s", port, at), "caBundle": made[extender.CAFile]}
		}
		path = fmt.Sprintf("/apis/%s/%s?fieldManager=test", path, o["metadata"].(map[string]any)["name"])
		if err := s.Do(t, nil, http.MethodPatch, path, Apply, o, nil); err != nil {
			t.Fatal(err)
		}
	}
	config, err := json.Marshal(map[string]any{
		"apiVersion": "config.jobset.x-k8s.io/v1alpha1", "kind": "Configuration",
		"leaderElection": map[string]any{"leaderElect": false}, "internalCertManagement": map[string]any{"enable": false},
		"metrics": map[string]any{"bindAddress": "0"}, "health": map[string]any{"healthProbeBindAddress": "0"},
		"webhook": map[string]any{"host": "127.0.0.1", "port": port, "certDir": dir},
	})
	file := filepath.Join(dir, "config.yaml")
	if err := errors.Join(err, os.WriteFile(file, config, 0o600)); err != nil {
		t.Fatal(err)
	}
	Background(t, program, "--kubeconfig", s.Kubeconfig(t, nil), "--config", file)
	s.Await(t, "JobSets are served", func() error {
		return s.Do(t, nil, http.MethodPost, "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets?dryRun=All", JSON,
			map[string]any{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": map[string]any{"name": "is-it-there"}}, nil)
	})
}

// kustomized are the objects that a directory of manifests comes to.
func kustomized(t testing.TB, dir string) (out []map[string]any) {
	t.Helper()
	text, err := exec.CommandContext(t.Context(), Program(t, "kubectl"), "kustomize", dir).Output()
	if err != nil {
		t.Fatal(err)
	}
	for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var one map[string]any
		if err := d.Decode(&one); errors.Is(err, io.EOF) {
			return out
		} else if err != nil {
			t.Fatal(err)
		}
		out = append(out, one)
	}
}
