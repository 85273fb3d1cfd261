// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"go.yaml.in/yaml/v4"
)

// MPI has the server know MPIJobs, in the version that Kueue is built with. Their operator does not run.
func (s *Server) MPI(t testing.TB) {
	t.Helper()
	source := moduleSource(t, "kueue", "github.com/kubeflow/mpi-operator")
	text, err := os.ReadFile(filepath.Join(source, "manifests", "base", "kubeflow.org_mpijobs.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var object map[string]any
	if err := yaml.Unmarshal(text, &object); err != nil {
		t.Fatal(err)
	}
	const definition = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/mpijobs.kubeflow.org?fieldManager=test"
	if err := s.Do(t, nil, http.MethodPatch, definition, Apply, object, nil); err != nil {
		t.Fatal(err)
	}
	s.Await(t, "MPIJobs are served", func() error {
		return s.Do(t, nil, http.MethodGet, "/apis/kubeflow.org/v2beta1/mpijobs", "", nil, nil)
	})
}
