// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/command/commandtest"
	"example.com/gpu-agent/internal/diagnosis"
	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/kubectlgpu"
)

var update = flag.Bool("update", false, "write the reference anew")

type object = map[string]any

// execute runs a command line in this process, without variables of the environment.
func execute(t *testing.T, args ...string) (said, errors string, failure error) {
	t.Helper()
	var out, err bytes.Buffer
	root := newRoot()
	root.SetOut(&out)
	root.SetErr(&err)
	failure = command.New(root, prefix).Execute(t.Context(), args, nil)
	return out.String(), err.String(), failure
}

// cluster is a server with a shared node and a pod that asks for too much.
func cluster(t *testing.T) *kubetest.Server {
	s := kubetest.New(t)
	s.Put("gpunodes", "", "node-1", object{"status": object{
		"summary":    object{"gpus": 1, "unhealthy": 0, "modes": "1 shared", "free": "gpu-mem 33/79", "largest": "gpu-mem 33", "saturationPercent": 58},
		"conditions": []object{{"type": "Ready", "status": "True", "reason": "Offered", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}},
		"resources":  []object{{"name": "example.com/gpu-mem", "total": 79, "free": 33, "largest": 33}},
		"gpus": []object{{"uuid": "GPU-a", "index": 0, "memoryMiB": 81920, "mode": "shared", "api": "device-plugin", "resource": "example.com/gpu-mem",
			"kind": "units", "total": 79, "free": 33, "largest": 33, "conditions": []object{
				{"type": "Available", "status": "True", "reason": "Offered", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
				{"type": "Healthy", "status": "True", "reason": "GPUsHealthy", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}}}}}})
	s.Put("nodes", "", "node-1", object{"metadata": object{"labels": object{"example.com/gpu.node": "true"}}, "spec": object{"unschedulable": true},
		"status": object{"allocatable": object{"example.com/gpu-mem": "33"}}})
	s.Put("pods", "gpu-agent", "gpu-agent-x", object{"metadata": object{"uid": "agent", "labels": object{"app.kubernetes.io/name": "gpu-agent"}},
		"spec":   object{"nodeName": "node-1", "containers": []object{{"name": "gpu-agent", "image": "registry/gpu-agent:v1", "ports": []object{{"name": "http", "containerPort": 9500}}}}},
		"status": object{"phase": "Running", "conditions": []object{{"type": "Ready", "status": "True"}}}})
	s.Put("pods", "train", "job-1", object{"metadata": object{"uid": "p"},
		"spec":   object{"containers": []object{{"name": "main", "resources": object{"limits": object{"example.com/gpu-mem": "200"}}}}},
		"status": object{"phase": "Pending", "conditions": []object{{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient example.com/gpu-mem."}}}})
	for group, resources := range map[string][]string{"": {"pods", "pods/log", "events", "nodes", "configmaps"}, "batch": {"jobs"}, "example.com": {"gpunodes"}} {
		for _, r := range resources {
			s.Allow(group, r, "get", "list")
		}
	}
	s.Allow("", "pods/portforward", "get", "create")
	return s
}

// in returns a command line for a server.
func in(t *testing.T, s *kubetest.Server, args ...string) []string {
	return append(args, "--kubeconfig", kubetest.Kubeconfig(t, "http://"+s.Addr), "-n", "train")
}

func TestFleet(t *testing.T) {
	s := cluster(t)
	said, _, err := execute(t, in(t, s)...)
	if err != nil {
		t.Fatal(err)
	}
	want := "NODE     GPUS   MODES      FREE            LARGEST      USED%   WRONG\n" +
		"node-1   1      1 shared   gpu-mem 33/79   gpu-mem 33   58      node-1 is cordoned: it gets no new pods\n"
	if said != want {
		t.Errorf("it prints\n%s\nwant\n%s", said, want)
	}
	said, _, err = execute(t, in(t, s, "-o", "json")...)
	var fleet kubectlgpu.Fleet
	if err != nil || json.Unmarshal([]byte(said), &fleet) != nil || len(fleet.Nodes) != 1 || fleet.Nodes[0].Summary.GPUs != 1 || fleet.Nodes[0].Wrong[0].Code != diagnosis.NodeCordoned {
		t.Errorf("%s: %v", said, err)
	}
	// An author with the role sees the table without what the Nodes say, and is told so.
	s.Set(func() { s.Forbidden = map[string]bool{"list nodes": true, "list pods": true} })
	said, _, err = execute(t, in(t, s)...)
	if err != nil || !strings.Contains(said, "58      -\nnot seen: Nodes, pods of the agent; ") {
		t.Errorf("%s: %v", said, err)
	}
	s.Set(func() { s.Forbidden["list gpunodes"] = true })
	if _, _, err := execute(t, in(t, s)...); err == nil || !strings.Contains(err.Error(), "the ClusterRole gpu-agent-view allows it") {
		t.Errorf("without the role: %v", err)
	}
}

func TestWhy(t *testing.T) {
	s := cluster(t)
	for _, args := range [][]string{{"why", "job-1"}, {"why", "pod/job-1"}, {"why", "po", "job-1"}} {
		said, _, err := execute(t, in(t, s, args...)...)
		first, _, _ := strings.Cut(said, "\n")
		if err != nil || first != "container main asks for 200 of example.com/gpu-mem, and no GPU has more than 79 for one container (node-1)" ||
			!strings.HasPrefix(said[len(first):], "\nnext: ask for at most 79\n") {
			t.Errorf("%v: %s%v", args, said, err)
		}
	}
	said, _, err := execute(t, in(t, s, "why", "node/node-1", "-o", "json")...)
	var d diagnosis.Diagnosis
	if err != nil || json.Unmarshal([]byte(said), &d) != nil || d.Code != diagnosis.NodeCordoned || d.Subject != "node node-1" {
		t.Errorf("%s: %v", said, err)
	}
	if _, _, err := execute(t, in(t, s, "why", "nothing")...); err == nil || !strings.Contains(err.Error(), "there is no pod or Job nothing in namespace train, and no node") {
		t.Error(err)
	}
}

// Wrong usage is one line, which says what to write instead.
func TestWrongUsage(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"wy job-1", `kubectl gpu: there is no command "wy": write why`},
		{"why", "kubectl gpu why: the pod, Job or node is missing: write pod/NAME, job/NAME or node/NAME"},
		{"why claim/x", `kubectl gpu why: "claim" is none of pod, job and node: `},
		{"why pod/a/b", `kubectl gpu why: "pod/a/b" is not a name`},
		{"why a b c", `kubectl gpu why: unexpected argument "c"`},
		{"why a --output yaml", `kubectl gpu why: --output "yaml": `},
		{"why a --domain Example_com", "kubectl gpu why: --domain: "},
	} {
		said, _, err := execute(t, strings.Fields(test.args)...)
		if command.ExitOf(err) != command.Usage || !strings.HasPrefix(err.Error(), test.want) || strings.Contains(err.Error(), "\n") || said != "" {
			t.Errorf("%q: exit code %d, %v, and it prints %q; want %q", test.args, command.ExitOf(err), err, said, test.want)
		}
	}
}

func TestCommandsHaveNoFlaws(t *testing.T) {
	for _, flaw := range command.New(newRoot(), prefix).Flaws() {
		t.Error(flaw)
	}
}

func TestCompletion(t *testing.T) {
	s := cluster(t)
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"why", "node/"}, []string{"node/node-1"}},
		{[]string{"why", "pod/j"}, []string{"pod/job-1"}},
		{[]string{"why", "p"}, []string{"pod/", "job/", "node/"}},
	} {
		line := append([]string{cobra.ShellCompNoDescRequestCmd}, in(t, s)...)
		said, _, err := execute(t, append(line, c.args...)...)
		var got []string
		for l := range strings.FieldsSeq(said) {
			if !strings.HasPrefix(l, ":") {
				got = append(got, l)
			}
		}
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%v is completed with %q, want %q: %v", c.args, got, c.want, err)
		}
	}
}

// The reference is what the commands say.
func TestReference(t *testing.T) {
	commandtest.Reference(t, *update, map[string]string{"kubectl-gpu": command.New(newRoot(), prefix).Reference()})
}
