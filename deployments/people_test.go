// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/diagnosis"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/pluginkube"
)

// person is the plugin's client in the name of somebody.
func (s *apiServer) person(t *testing.T, name string) *pluginkube.Client {
	t.Helper()
	c, err := pluginkube.Open(pluginkube.Options{Kubeconfig: s.Kubeconfig(t, fields{"as": name, "as-groups": []string{"system:authenticated"}}),
		Namespace: "train", Domain: "example.com", ResourceDomain: "example.com"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// bind gives a person a role, in a namespace or, if that is empty, in the whole cluster.
func (s *apiServer) bind(t *testing.T, person, kind, role, namespace string) {
	t.Helper()
	b := fields{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": fields{"name": person + "-" + role},
		"roleRef":  fields{"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
		"subjects": []fields{{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": person}}}
	place := places["ClusterRoleBinding"]
	if namespace != "" {
		b["kind"], place = "RoleBinding", fmt.Sprintf(places["RoleBinding"], namespace)
	}
	s.create(t, place, b)
}

// may asks the server whether a person may do something.
func (s *apiServer) may(t *testing.T, person string, attributes fields) bool {
	t.Helper()
	var review struct{ Status struct{ Allowed bool } }
	as := http.Header{"Impersonate-User": {person}, "Impersonate-Group": {"system:authenticated"}}
	if err := s.do(t, as, http.MethodPost, "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", asJSON, fields{"apiVersion": "authorization.k8s.io/v1",
		"kind": "SelfSubjectAccessReview", "spec": fields{"resourceAttributes": attributes}}, &review); err != nil {
		t.Fatal(err)
	}
	return review.Status.Allowed
}

// By the API server's word the author of a pod, with gpu-agent-view, is told the cause and sees neither
// Nodes nor the agent's pods; an operator sees all that the commands read; and neither may run a
// command in the agent's pod.
func TestPeopleAtTheAPIServer(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	s.namespace(t, "train")
	s.node(t, "gpu-1", fields{"cpu": "64", "memory": "64Gi", "pods": "1000", unitsName: "79"})
	s.create(t, gpuNodes, aGPUNode("gpu-1"))
	s.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True))
	s.ask(t, "large", 200)
	var made struct{ Metadata struct{ UID string } }
	if err := s.do(t, nil, http.MethodPatch, trainPods+"large/status", strategic, fields{"status": fields{"conditions": []fields{{"type": "PodScheduled", "status": "False",
		"reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient " + unitsName + "."}}}}, &made); err != nil {
		t.Fatal(err)
	}
	s.create(t, "/api/v1/namespaces/train/events", fields{"apiVersion": "v1", "kind": "Event", "metadata": fields{"name": "large.1"}, "reason": "FailedScheduling", "message": "no room", "type": "Warning",
		"involvedObject": fields{"kind": "Pod", "namespace": "train", "name": "large", "uid": made.Metadata.UID}})
	s.create(t, fmt.Sprintf(places["ServiceAccount"], name), fields{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": fields{"name": "default"}})
	agent := s.pod(t, name, "gpu-agent-x", "gpu-1")
	if err := s.do(t, nil, http.MethodPatch, "/api/v1/namespaces/"+name+"/pods/gpu-agent-x", merge, fields{"metadata": fields{"labels": fields{"app.kubernetes.io/name": "gpu-agent"}}}, nil); err != nil || agent == "" {
		t.Fatal(err)
	}
	// What an author has in his own namespace.
	s.create(t, fmt.Sprintf(places["Role"], "train"), fields{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": fields{"name": "own"},
		"rules": []fields{{"apiGroups": []string{""}, "resources": []string{"pods", "events"}, "verbs": []string{"get", "list"}}}})
	s.bind(t, "author", "Role", "own", "train")
	s.bind(t, "author", "ClusterRole", "gpu-agent-view", "")
	s.bind(t, "operator", "ClusterRole", "gpu-agent-operator", "")
	s.bind(t, "operator", "Role", "gpu-agent-operator", name)
	s.bind(t, "operator", "Role", "own", "train")
	author, operator := s.person(t, "author"), s.person(t, "operator")
	look := func(c *pluginkube.Client) (d diagnosis.Diagnosis, err error) {
		f, err := c.Look(t.Context(), pluginkube.Subject{Kind: "pod", Namespace: "train", Name: "large"})
		return f.Explain(), err
	}
	unseen := func(d diagnosis.Diagnosis) string {
		var what []string
		for _, u := range d.Unseen {
			what = append(what, u.What+": "+u.Why)
		}
		return strings.Join(what, "; ")
	}
	s.await(t, "the roles are in force", func() error {
		d, err := look(author)
		if err != nil || strings.Contains(unseen(d), "GPUNodes") {
			return fmt.Errorf("an author has not seen %s: %w", unseen(d), err)
		}
		if d, err = look(operator); err != nil || unseen(d) != "" {
			return fmt.Errorf("an operator has not seen %s: %w", unseen(d), err)
		}
		return nil
	})
	for who, c := range map[string]*pluginkube.Client{"author": author, "operator": operator} {
		d, err := look(c)
		if err != nil || d.Code != diagnosis.TooMuch || !strings.Contains(d.Cause, "no GPU has more than 79") {
			t.Errorf("%s is told %+v: %v", who, d, err)
		}
		if seen := fmt.Sprint(d.Walk); !strings.Contains(seen, "FailedScheduling") {
			t.Errorf("%s has not seen the Event: %s", who, seen)
		}
		if got, want := unseen(d), map[string]string{"author": "Nodes: you may not read them; pods of the agent: you may not read them", "operator": ""}[who]; got != want {
			t.Errorf("%s has not seen %q, want %q", who, got, want)
		}
	}
	// Without the role the answer is the scheduler's, and says what is missing.
	s.bind(t, "stranger", "Role", "own", "train")
	s.await(t, "the stranger's role is in force", func() error {
		d, err := look(s.person(t, "stranger"))
		if err != nil || d.Code != diagnosis.Unplaced || !strings.Contains(d.Cause, "1 Insufficient "+unitsName) || !strings.Contains(unseen(d), "GPUNodes: you may not read them") {
			return fmt.Errorf("%+v: %w", d, err)
		}
		return nil
	})
	// There is no kubelet, so an answer other than a refusal says that it would be asked.
	pod, err := operator.AgentOn(t.Context(), "gpu-1")
	if err != nil {
		t.Fatal(err)
	}
	forbidden := func(err error) bool { return err != nil && strings.Contains(err.Error(), "forbidden") }
	for who, c := range map[string]*pluginkube.Client{"author": author, "operator": operator} {
		_, logs := c.Log(t.Context(), name, pod.Name, pluginkube.LogOptions{})
		_, port := c.Tunnel(t.Context(), pod)
		_, partitions := c.Object(t.Context(), "configmap", name, "gpu-partitions")
		if forbidden(logs) != (who == "author") || forbidden(port) != (who == "author") || forbidden(partitions) != (who == "author") {
			t.Errorf("%s: of the log %v, of the port %v, of the partitions %v", who, logs, port, partitions)
		}
		if _, err := c.Object(t.Context(), "configmap", name, "another"); !forbidden(err) {
			t.Errorf("%s reads another ConfigMap: %v", who, err)
		}
		for what, attributes := range map[string]fields{
			"run commands in the agent's pod": {"verb": "create", "resource": "pods", "subresource": "exec", "namespace": name, "name": pod.Name},
			"read Secrets":                    {"verb": "get", "resource": "secrets", "namespace": name},
			"write GPUNodes":                  {"verb": "patch", "group": "example.com", "resource": "gpunodes", "subresource": "status"},
			"change Nodes":                    {"verb": "patch", "resource": "nodes"},
		} {
			if s.may(t, who, attributes) {
				t.Errorf("%s may %s", who, what)
			}
		}
	}
	if _, err := author.Fleet(t.Context()); err != nil {
		t.Errorf("the table of an author: %v", err)
	}
	if _, err := operator.Look(t.Context(), pluginkube.Subject{Kind: "node", Name: "no-such"}); !errors.Is(err, pluginkube.ErrNotFound) {
		t.Error(err)
	}
}
