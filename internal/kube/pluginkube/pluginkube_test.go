// SPDX-License-Identifier: Apache-2.0

package pluginkube_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/diagnosis"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/kube/pluginkube"
)

type object = map[string]any

// cluster is a server with a node, its agent, and a Job whose pod was refused.
func cluster(t *testing.T) *kubetest.Server {
	s := kubetest.New(t)
	s.Put("gpunodes", "", "node-1", object{"status": object{"summary": object{"gpus": 1, "unhealthy": 0, "saturationPercent": 0},
		"conditions": []object{{"type": "Ready", "status": "True", "reason": "Offered", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}}}})
	s.Put("nodes", "", "node-1", object{"metadata": object{"labels": object{"example.com/gpu.node": "true", "example.com/gpu.partition.state": "blocked"},
		"annotations": object{"example.com/gpu.partition.reason": "HeldByPods", "example.com/gpu.partition.message": "until these end: a/b"}},
		"spec": object{"unschedulable": true}, "status": object{"allocatable": object{"example.com/gpu-mem": "79"},
			"conditions": []object{{"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "runtime down"}}}})
	s.Put("pods", "gpu-agent", "gpu-agent-x", agentPod("node-1"))
	s.Put("jobs", "train", "job-1", object{"metadata": object{"uid": "j", "labels": object{"kueue.x-k8s.io/queue-name": "gpus"}}, "spec": object{"suspend": true}})
	s.Put("pods", "train", "job-1-a", object{"metadata": object{"uid": "p", "labels": object{"batch.kubernetes.io/controller-uid": "j"}},
		"spec": object{"nodeName": "node-1", "containers": []object{{"name": "main", "resources": object{"limits": object{"example.com/gpu-mem": "24"}}}}},
		"status": object{"phase": "Running", "containerStatuses": []object{{"name": "main", "restartCount": 3, "image": "", "imageID": "", "ready": false,
			"state":                    object{"waiting": object{"reason": "CrashLoopBackOff", "message": "back-off"}},
			"lastState":                object{"terminated": object{"exitCode": 127, "reason": "Error"}},
			"allocatedResourcesStatus": []object{{"name": "example.com/gpu-mem", "resources": []object{{"resourceID": "GPU-a::0"}}}}}}}})
	s.Put("events", "train", "e", object{"involvedObject": object{"kind": "Pod", "namespace": "train", "name": "job-1-a", "uid": "p"}, "type": "Warning",
		"reason": "CapExceeded", "message": "too much", "count": 2, "lastTimestamp": "2026-01-01T00:00:00Z", "source": object{"component": "gpu-agent"}})
	s.Put("workloads.kueue.x-k8s.io", "train", "job-job-1", object{"metadata": object{"ownerReferences": []object{{"uid": "j"}}},
		"spec": object{"queueName": "gpus"}, "status": object{"conditions": []object{{"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "insufficient unused quota"}}}})
	s.Set(func() { s.Logs = map[string]string{"train/job-1-a/main/previous": "no libcudart"} })
	return s
}

func agentPod(node string) object {
	return object{"metadata": object{"uid": "agent", "labels": object{"app.kubernetes.io/name": "gpu-agent"}},
		"spec": object{"nodeName": node, "containers": []object{{"name": "gpu-agent", "image": "gpu-agent:v1", "ports": []object{{"name": "http", "containerPort": 9501}}}}},
		"status": object{"phase": "Running", "conditions": []object{{"type": "Ready", "status": "True"}},
			"containerStatuses": []object{{"name": "gpu-agent", "ready": true, "restartCount": 2, "image": "", "imageID": "", "state": object{"running": object{}}}}}}
}

func open(t *testing.T, s *kubetest.Server) *pluginkube.Client {
	t.Helper()
	c, err := pluginkube.Open(pluginkube.Options{Kubeconfig: kubetest.Kubeconfig(t, "http://"+s.Addr), Domain: "example.com", ResourceDomain: "example.com"})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func allow(s *kubetest.Server, rules ...[]kube.Rule) {
	for _, list := range rules {
		for _, r := range list {
			for _, verb := range r.Verbs {
				if verb != "watch" {
					s.Allow(r.APIGroup, r.Resource, verb)
				}
			}
		}
	}
}

// author allows what the author of a pod may do in his own namespace.
func author(s *kubetest.Server) {
	for group, resources := range map[string][]string{"": {"pods", "pods/log", "events"}, "batch": {"jobs"}, "kueue.x-k8s.io": {"workloads"}} {
		for _, r := range resources {
			s.Allow(group, r, "get", "list")
		}
	}
}

func TestLookReadsWhatADiagnosisNeeds(t *testing.T) {
	s := cluster(t)
	allow(s, pluginkube.ViewRules, pluginkube.OperatorRules, pluginkube.AgentRules)
	author(s)
	f, err := open(t, s).Look(t.Context(), pluginkube.Subject{Namespace: "train", Name: "job-1"})
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Unseen) > 0 {
		t.Errorf("it has not seen %v", f.Unseen)
	}
	if j := f.Job; j == nil || !j.Suspended || j.Queue != "gpus" {
		t.Errorf("the Job is %+v", j)
	}
	if w := f.Workload; w == nil || w.Queue != "gpus" || len(w.Conditions) != 1 || w.Conditions[0].True {
		t.Errorf("the Workload is %+v", w)
	}
	p := f.Pod
	if p == nil || p.Name != "job-1-a" || p.Node != "node-1" || len(p.Containers) != 1 {
		t.Fatalf("the pod is %+v", p)
	}
	if c := p.Containers[0]; c.Requests["example.com/gpu-mem"] != 24 || c.Waiting != "CrashLoopBackOff" || c.Restarts != 3 || c.Ended == nil ||
		c.Ended.Exit != 127 || c.Log != "no libcudart" || len(c.Devices) != 1 {
		t.Errorf("the container is %+v", c)
	}
	if len(f.Events) != 1 || f.Events[0].Reason != "CapExceeded" || f.Events[0].Count != 2 || f.Events[0].From != "gpu-agent" || f.Events[0].Last.IsZero() {
		t.Errorf("the Events are %+v", f.Events)
	}
	if n := f.Nodes; len(n) != 1 || !n[0].Cordoned || !n[0].Chosen || n[0].State != "blocked" || n[0].Reason != "HeldByPods" ||
		n[0].Message != "until these end: a/b" || n[0].NotReady != "runtime down" || n[0].Allocatable["example.com/gpu-mem"] != 79 {
		t.Errorf("the Nodes are %+v", n)
	}
	if len(f.GPUNodes) != 1 || f.GPUNodes[0].Status == nil || len(f.Agents) != 1 || f.Agents[0].NotReady != "" {
		t.Errorf("GPUNodes %+v, agents %+v", f.GPUNodes, f.Agents)
	}
}

// The author of a pod may read neither Nodes nor the agent's pods, and without the role no
// GPUNodes: the look goes on, and says what it has not seen.
func TestLookGoesOnWithoutRights(t *testing.T) {
	s := cluster(t)
	author(s)
	s.Set(func() {
		s.Forbidden = map[string]bool{"list nodes": true, "list gpunodes": true, "get pods/log": true, "list workloads.kueue.x-k8s.io": true}
	})
	f, err := open(t, s).Look(t.Context(), pluginkube.Subject{Kind: "pod", Namespace: "train", Name: "job-1-a"})
	if err != nil {
		t.Fatal(err)
	}
	var what []string
	for _, u := range f.Unseen {
		what = append(what, u.What+": "+u.Why)
	}
	const want = "GPUNodes: you may not read them; Nodes: you may not read them; the log of container main: you may not read it"
	if got := strings.Join(what, "; "); got != want {
		t.Errorf("it has not seen %s, want %s", got, want)
	}
	if d := f.Explain(); d.Code != diagnosis.OverCap {
		t.Errorf("%+v", d)
	}
}

// Agents in another namespace than the one that is asked are not taken for gone.
func TestAgentsElsewhereAreUnseen(t *testing.T) {
	s := cluster(t)
	allow(s, pluginkube.ViewRules, pluginkube.OperatorRules, pluginkube.AgentRules)
	s.Put("pods", "gpu-agent", "gpu-agent-x", nil)
	s.Put("pods", "gpus", "gpu-agent-x", agentPod("node-1"))
	f, err := open(t, s).Fleet(t.Context())
	if err != nil || f.Agents != nil || len(f.Unseen) != 1 || f.Unseen[0].What != "pods of the agent" || !strings.Contains(f.Unseen[0].Why, "--agent-namespace") {
		t.Errorf("%+v, %+v: %v", f.Agents, f.Unseen, err)
	}
	for _, found := range f.Troubles("node-1") {
		if found.Code == diagnosis.NoAgent {
			t.Errorf("%+v", found)
		}
	}
}

// A node that was taken over can write any numbers into its GPUNode, and nothing is computed with these.
func TestGPUNodeOutOfBoundsIsNotUsed(t *testing.T) {
	s := cluster(t)
	allow(s, pluginkube.ViewRules, pluginkube.OperatorRules, pluginkube.AgentRules)
	s.Put("gpunodes", "", "node-2", object{"status": object{"summary": object{}, "resources": []object{{"name": "example.com/gpu-mem", "total": -1}}}})
	s.Put("gpunodes", "", "node-3", object{"status": object{"summary": 7}})
	f, err := open(t, s).Fleet(t.Context())
	if err != nil || len(f.GPUNodes) != 3 {
		t.Fatal(f.GPUNodes, err)
	}
	for _, n := range f.GPUNodes {
		if bad := n.Name != "node-1"; (n.Odd != "") != bad || (n.Status == nil) != bad {
			t.Errorf("%+v", n)
		}
	}
	if d := f.Troubles("node-2"); len(d) == 0 || !strings.Contains(d[len(d)-1].Cause, "cannot be used: ") {
		t.Errorf("%+v", d)
	}
}

func TestLookForWhatIsNotThere(t *testing.T) {
	s := cluster(t)
	allow(s, pluginkube.ViewRules, pluginkube.OperatorRules, pluginkube.AgentRules)
	author(s)
	c := open(t, s)
	for _, sub := range []pluginkube.Subject{{Kind: "pod", Namespace: "train", Name: "x"}, {Kind: "node", Name: "x"}, {Namespace: "train", Name: "x"}} {
		if _, err := c.Look(t.Context(), sub); !errors.Is(err, pluginkube.ErrNotFound) || !strings.Contains(err.Error(), "x") {
			t.Errorf("%+v: %v", sub, err)
		}
	}
	if _, err := c.Look(t.Context(), pluginkube.Subject{Kind: "claim", Name: "x"}); err == nil || !strings.Contains(err.Error(), "write pod/NAME") {
		t.Error(err)
	}
	if f, err := c.Look(t.Context(), pluginkube.Subject{Namespace: "train", Name: "node-1"}); err != nil || f.Node != "node-1" {
		t.Error(f.Node, err)
	}
}

// A page of an agent is read through the API server. What listens there sees loopback, and an error
// of the kubelet is the request's.
func TestTunnel(t *testing.T) {
	s := cluster(t)
	allow(s, pluginkube.AgentRules)
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %d", r.Method, r.URL, len(body))
	}))
	defer page.Close()
	s.Set(func() { s.Ports = map[string]string{"gpu-agent/gpu-agent-x": page.Listener.Addr().String()} })
	c := open(t, s)
	agent, err := c.AgentOn(t.Context(), "node-1")
	if err != nil || agent.Port != 9501 || agent.Image != "gpu-agent:v1" || agent.Restarts != 2 {
		t.Fatalf("%+v: %v", agent, err)
	}
	tunnel, err := c.Tunnel(t.Context(), agent)
	if err != nil {
		t.Fatal(err)
	}
	defer tunnel.Close()
	for range 3 {
		response, err := tunnel.HTTP.Post("http://agent/plan?x=1", "", strings.NewReader(strings.Repeat("y", 300_000)))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || string(body) != "POST /plan?x=1 300000" {
			t.Errorf("%s: %v", body, err)
		}
	}
	page.Close()
	if _, err := tunnel.HTTP.Get("http://agent/"); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("where nothing listens: %v", err)
	}
	if _, err := c.AgentOn(t.Context(), "node-2"); !errors.Is(err, pluginkube.ErrNotFound) || !strings.Contains(err.Error(), "kubectl gpu why node/node-2") {
		t.Error(err)
	}
}

// Each permission of the roles is used, and no other one: the server refuses those.
func TestRulesAreUsed(t *testing.T) {
	s := cluster(t)
	allow(s, pluginkube.ViewRules, pluginkube.OperatorRules, pluginkube.AgentRules)
	s.Config("gpu-agent", "gpu-partitions", "version: v1")
	s.Set(func() { s.Logs["gpu-agent/gpu-agent-x/gpu-agent"] = "line" })
	c := open(t, s)
	if _, err := c.Fleet(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Look(t.Context(), pluginkube.Subject{Kind: "node", Name: "node-1"}); err != nil {
		t.Fatal(err)
	}
	for _, o := range [][3]string{{"node", "", "node-1"}, {"gpunode", "", "node-1"}, {"pod", "gpu-agent", "gpu-agent-x"}, {"configmap", "gpu-agent", "gpu-partitions"}} {
		if _, err := c.Object(t.Context(), o[0], o[1], o[2]); err != nil {
			t.Error(err)
		}
	}
	agent, err := c.AgentOn(t.Context(), "node-1")
	if err != nil {
		t.Fatal(err)
	}
	body, err := c.Log(t.Context(), agent.Namespace, agent.Name, pluginkube.LogOptions{Container: "gpu-agent", Tail: 10})
	if err != nil {
		t.Fatal(err)
	}
	body.Close()
	tunnel, err := c.Tunnel(t.Context(), agent)
	if err != nil {
		t.Fatal(err)
	}
	tunnel.Close()
	s.WantAllUsed()
}
