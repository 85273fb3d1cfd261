// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/plane"
)

// What takes long to make is made once, for all tests: the API server, the program, and what
// kubectl makes of a kustomization.

// lasting is a test, but that what it starts ends with the process.
type lasting struct{ testing.TB }

var (
	ends   []func() // of what lasts, in the order in which it began
	failed bool     // once all tests are over
)

func (lasting) Cleanup(f func()) { ends = append(ends, f) }

func (lasting) Failed() bool { return failed }

func (lasting) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (l lasting) TempDir() string {
	l.Helper()
	dir, err := os.MkdirTemp("", "deployments-")
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestMain(m *testing.M) {
	code := m.Run()
	failed = code != 0
	for _, end := range slices.Backward(ends) {
		end()
	}
	os.Exit(code)
}

// program is gpu-agent, built from the checkout.
func program(t *testing.T) string { return built(t, "example.com/gpu-agent/cmd/gpu-agent") }

// placerProgram is gpu-placer.
func placerProgram(t *testing.T) string { return built(t, "example.com/gpu-agent/cmd/gpu-placer") }

// daemonsProgram is gpu-agent-mps.
func daemonsProgram(t *testing.T) string { return built(t, "example.com/gpu-agent/cmd/gpu-agent-mps") }

func built(t *testing.T, of string) string {
	t.Helper()
	if builds[of] == "" {
		at := filepath.Join(lasting{t}.TempDir(), path.Base(of))
		if out, err := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-ldflags=-s", "-o", at, of).CombinedOutput(); err != nil {
			t.Fatalf("build the program: %v\n%s", err, out)
		}
		builds[of] = at
	}
	return builds[of]
}

var builds = map[string]string{} // where the programs are that were built, by package

// common is the API server of all tests, nil until one asks for it.
var common *apiServer

// startAPIServer returns the API server, in the state that it had when it began but for
// definitions of resources, which take seconds to come and go.
func startAPIServer(t *testing.T) *apiServer {
	t.Helper()
	if common == nil {
		dir := lasting{t}.TempDir()
		s := &apiServer{audit: filepath.Join(dir, "audit.log")}
		args := []string{"--audit-log-path", s.audit}
		for flag, text := range map[string]string{"--audit-policy-file": auditPolicy, "--admission-control-config-file": critical} {
			file := filepath.Join(dir, strings.Trim(flag, "-")+".yaml")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			args = append(args, flag, file)
		}
		s.Server = plane.Start(lasting{t}, args...)
		// The last that it makes by itself.
		s.await(t, "it has a Service of its own", func() error {
			return s.do(t, nil, http.MethodGet, "/api/v1/namespaces/default/services/kubernetes", "", nil, nil)
		})
		s.first = map[string]bool{}
		for _, o := range s.everything(t) {
			s.first[o.Metadata.UID] = true
		}
		common = s
		return s
	}
	common.clear(t)
	return common
}

// auditPolicy has the API server write down who has asked for what.
const auditPolicy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"

// kept are groups and resources whose objects the API server looks after itself, and definitions.
var kept = []string{"apiregistration.k8s.io", "flowcontrol.apiserver.k8s.io", "apiextensions.k8s.io", "servicecidrs", "ipaddresses"}

// stored is an object at the API server.
type stored struct {
	path     string
	Metadata struct {
		Name, Namespace, UID string
		Finalizers           []string
	}
}

// everything is all that can be deleted and is not the API server's own.
func (s *apiServer) everything(t *testing.T) (all []stored) {
	t.Helper()
	for _, root := range []string{"/api", "/apis"} {
		var groups struct {
			Items []struct {
				Metadata struct{ Name string }
				Versions []struct {
					Version   string
					Resources []struct {
						Resource, Scope string
						Verbs           []string
					}
				}
			}
		}
		accept := http.Header{"Accept": {"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"}}
		if err := s.do(t, accept, http.MethodGet, root, "", nil, &groups); err != nil {
			t.Fatal(err)
		}
		for _, g := range groups.Items {
			seen := map[string]bool{}
			for _, v := range g.Versions {
				for _, r := range v.Resources {
					if seen[r.Resource] || slices.Contains(kept, g.Metadata.Name) || slices.Contains(kept, r.Resource) || !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "delete") {
						continue
					}
					seen[r.Resource] = true
					at := strings.TrimSuffix(root+"/"+g.Metadata.Name, "/") + "/" + v.Version + "/"
					var list struct{ Items []stored }
					// Of a resource that was defined just now it is not ready to tell.
					s.await(t, r.Resource+" are listed", func() error { return s.do(t, nil, http.MethodGet, at+r.Resource, "", nil, &list) })
					for _, o := range list.Items {
						if strings.HasPrefix(o.Metadata.Namespace, "kube-") {
							continue
						}
						if o.path = at; o.Metadata.Namespace != "" {
							o.path += "namespaces/" + o.Metadata.Namespace + "/"
						}
						o.path += r.Resource + "/" + o.Metadata.Name
						all = append(all, o)
					}
				}
			}
		}
	}
	return all
}

// clear takes away what was made since the API server began.
func (s *apiServer) clear(t *testing.T) {
	t.Helper()
	gone := func(err error) error {
		if err != nil && strings.Contains(err.Error(), "NotFound") {
			return nil
		}
		return err
	}
	policies := false
	var namespaces []string
	for _, o := range s.everything(t) {
		if s.first[o.Metadata.UID] {
			continue
		}
		policies = policies || strings.Contains(o.path, "/validatingadmissionpolic")
		if strings.HasPrefix(o.path, "/api/v1/namespaces/") && o.Metadata.Namespace == "" {
			namespaces = append(namespaces, o.Metadata.Name)
			continue
		}
		var err error
		if len(o.Metadata.Finalizers) > 0 {
			err = gone(s.do(t, nil, http.MethodPatch, o.path, merge, fields{"metadata": fields{"finalizers": nil}}, nil))
		}
		if err = errors.Join(err, gone(s.do(t, nil, http.MethodDelete, o.path, asJSON, fields{"gracePeriodSeconds": 0}, nil))); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range namespaces {
		path := "/api/v1/namespaces/" + name
		// What its controller does, which does not run here.
		err := s.do(t, nil, http.MethodDelete, path, asJSON, nil, nil)
		if err == nil {
			err = s.do(t, nil, http.MethodPut, path+"/finalize", asJSON, fields{"apiVersion": "v1", "kind": "Namespace", "metadata": fields{"name": name}, "spec": fields{}}, nil)
		}
		if gone(err) != nil {
			t.Fatal(err)
		}
	}
	if policies {
		s.forget(t)
	}
}

// forget waits until no policy is in force that is no more. The API server takes up what has
// become of all policies at one stroke, so it is enough that it knows a newer one.
func (s *apiServer) forget(t *testing.T) {
	t.Helper()
	s.forgot++
	newer := fmt.Sprint("newer-", s.forgot)
	for kind, spec := range map[string]fields{
		"ValidatingAdmissionPolicy": {
			"matchConstraints": fields{"resourceRules": []fields{{"apiGroups": []string{""}, "apiVersions": []string{"v1"}, "resources": []string{"configmaps"}, "operations": []string{"CREATE"},
				"resourceNames": []string{newer}}}},
			"validations": []fields{{"expression": "false", "message": newer}},
		},
		"ValidatingAdmissionPolicyBinding": {"policyName": newer, "validationActions": []string{"Deny"}},
	} {
		s.create(t, places[kind], fields{"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": fields{"name": newer}, "spec": spec})
	}
	s.await(t, "older policies are gone", func() error {
		err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/default/configmaps?dryRun=All", asJSON, fields{"apiVersion": "v1", "kind": "ConfigMap", "metadata": fields{"name": newer}}, nil)
		if err == nil || !strings.Contains(err.Error(), "denied request: "+newer) {
			return fmt.Errorf("a newer one is not in force: %v", err)
		}
		return nil
	})
	for _, kind := range []string{"ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"} {
		if err := s.do(t, nil, http.MethodDelete, places[kind]+"/"+newer, asJSON, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
}
