// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/kubectlgpu"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/compute"
)

// agentOf serves an agent's pages as the agent does, in the pod of a node.
func agentOf(t *testing.T, s *kubetest.Server, node string, o agentobs.Options) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ok := func() error { return nil }
	o.Logger, o.Metrics, o.Healthy, o.Ready = slog.New(slog.DiscardHandler), agentobs.NewMetrics("v"), ok, ok
	kubetest.Background(t, func(ctx context.Context) error { return agentobs.New(o).Serve(ctx, l) })
	pod := "gpu-agent-" + node
	s.Put("pods", "gpu-agent", pod, object{"metadata": object{"uid": pod, "labels": object{"app.kubernetes.io/name": "gpu-agent"}},
		"spec":   object{"nodeName": node, "containers": []object{{"name": "gpu-agent", "image": "registry/gpu-agent:v1"}}},
		"status": object{"phase": "Running", "conditions": []object{{"type": "Ready", "status": "True"}}}})
	s.Set(func() {
		if s.Ports == nil {
			s.Ports = map[string]string{}
		}
		s.Ports["gpu-agent/"+pod] = l.Addr().String()
	})
}

// operators is a cluster of two nodes with agents, and nothing else.
func operators(t *testing.T) *kubetest.Server {
	s := kubetest.New(t)
	s.Allow("", "pods", "list")
	s.Allow("", "pods/log", "get")
	s.Allow("", "pods/portforward", "create", "get")
	for i, node := range []string{"node-1", "node-2"} {
		used, most := uint64(1024*(i+1)), uint64(8192)
		agentOf(t, s, node, agentobs.Options{
			Status: func() status.Status {
				return status.Status{Node: node, Version: "v1", GPUs: []status.GPU{}, Containers: []status.Container{
					{Namespace: "train", Pod: "job-" + node, Container: "main", Index: 3, CapMiB: &most, UsedMiB: &used, PeakMiB: used, Guarantee: "api", ComputePercent: 26, Compute: &compute.Held{Guarantee: compute.Ceiling, Ceiling: 26}},
					{Namespace: "dev", Pod: "nb\x1b[2J", Container: "main", UsedMiB: &used}}}
			},
			Within: agentobs.Within{
				Foresee: func(q status.Question) (status.Answer, error) {
					own := map[string]string{"node-1": "default", "node-2": "mig"}[node]
					if strings.Contains(string(q.File), "# odd") {
						return status.Answer{Mistakes: []status.Mistake{{Line: 2, Message: "there is no such thing"}}}, nil
					}
					p := status.Plan{Partition: own, Own: true, State: "applied"}
					if len(q.Partitions) == 1 {
						p.Partition = q.Partitions[0]
					}
					switch {
					case p.Partition == "mig" && strings.Contains(string(q.File), "9g"):
						p.State, p.Mistakes = "invalid", []status.Mistake{{Line: 15, Message: "no GPU of this node has 9g.80gb"}}
					case p.Partition == "mig":
						p.State, p.Message = "blocked", "until these end: train/job-7"
					}
					return status.Answer{Plans: []status.Plan{p}}, nil
				},
				Usage: func(q url.Values) (any, error) {
					if q.Get("at") != "" {
						return map[string]any{"had": []usage.Had{{Index: 3, GPU: "GPU-c", Piece: "24 units", Share: .3, Resource: "r", Allocation: "a",
							Since: time.Date(2026, 3, 1, 11, 0, 0, 0, time.UTC), Holder: usage.Holder{Namespace: "train", Pod: "job-1", UID: "u", Container: "main"}}}}, nil
					}
					half := .5
					sum := usage.Sum{Name: "train", Grants: 2, GrantedGPUHours: 1.5, GrantedGiBHours: 10}
					if node == "node-1" {
						sum.UsedGPUHours = &half
					}
					return map[string]any{"sums": []usage.Sum{sum}, "notes": []string{"note: " + q.Get("by")}}, nil
				},
			}})
	}
	return s
}

func TestStatus(t *testing.T) {
	s := operators(t)
	said, _, err := execute(t, in(t, s, "status", "node-2")...)
	if err != nil || !strings.Contains(said, "node-2") || !strings.Contains(said, "job-node-2") || strings.Contains(said, "\x1b[2J") {
		t.Errorf("%s: %v", said, err)
	}
	said, _, err = execute(t, in(t, s, "status", "node-1", "-o", "json")...)
	var of status.Status
	if err != nil || json.Unmarshal([]byte(said), &of) != nil || of.Node != "node-1" || len(of.Containers) != 2 || strings.Contains(of.Containers[1].Pod, "\x1b") {
		t.Errorf("%s: %v", said, err)
	}
	if _, _, err := execute(t, in(t, s, "status", "node-9")...); err == nil || !strings.Contains(err.Error(), "kubectl gpu why node/node-9") {
		t.Error(err)
	}
}

func TestTop(t *testing.T) {
	s := operators(t)
	said, _, err := execute(t, append([]string{"top"}, "--kubeconfig", kubetest.Kubeconfig(t, "http://"+s.Addr))...)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(said, "\n")
	for i, want := range []string{"NODE NAMESPACE POD CONTAINER GPU USED CAP PEAK REFUSED SM% CAP BY COMPUTE",
		"node-2 train job-node-2 main 3 2.0 GiB 8.0 GiB 2.0 GiB 0 - api ceiling 26 %", "node-1 train job-node-1 main 3 1.0 GiB 8.0 GiB 1.0 GiB 0 - api ceiling 26 %",
		"node-1 dev nb?[2J main 0 1.0 GiB - 0.0 GiB 0 - - -"} {
		if got := strings.Join(strings.Fields(lines[i]), " "); got != want {
			t.Errorf("line %d: %q, want %q", i, got, want)
		}
	}
	if said, _, err := execute(t, in(t, s, "top", "node-1")...); err != nil || strings.Contains(said, "dev") || strings.Contains(said, "node-2") || !strings.Contains(said, "job-node-1") {
		t.Errorf("of one namespace and node: %s: %v", said, err)
	}
	// One node that does not answer hides no other.
	s.Set(func() { s.Ports["gpu-agent/gpu-agent-node-1"] = "127.0.0.1:1" })
	said, _, err = execute(t, in(t, s, "top")...)
	if err == nil || !strings.Contains(err.Error(), "node node-1: ") || !strings.Contains(said, "job-node-2") {
		t.Errorf("with a node that does not answer: %s: %v", said, err)
	}
}

func TestCheckAndPlan(t *testing.T) {
	s := operators(t)
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const good = "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared}\n  mig:\n    - {devices: all, mode: mig}\n  spare:\n    - {devices: all, mode: off}\n"
	manifest := "apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: gpu-partitions}\ndata:\n  config.yaml: |\n    " +
		strings.ReplaceAll(strings.TrimSuffix(strings.Replace(good, "mode: mig}", "mode: mig, geometry: {9g.80gb: 1}}", 1), "\n"), "\n", "\n    ") + "\n"
	fits, wrong, broken := write("good.yaml", good), write("wrong.yaml", manifest), write("broken.yaml", "version: v1\nbroken: 1\n")
	odd := write("odd.yaml", good+"# odd: an agent of another version does not read it\n")
	for _, test := range []struct {
		args []string
		exit command.Exit
		want []string
		fail string
	}{
		{[]string{"check", fits}, command.Done, []string{"node-1: partition default fits\n", "node-2: partition mig fits; now it would be blocked: until these end: train/job-7\n",
			"not judged, since no node uses them: spare\n"}, ""},
		{[]string{"check", wrong}, command.Invalid, []string{"node-1: partition default fits\n", wrong + ":15: no GPU of this node has 9g.80gb (node-2)\n"}, "does not fit 1 of 2 nodes"},
		{[]string{"check", broken}, command.Invalid, nil, broken + ":2: "},
		{[]string{"check", odd}, command.Invalid, []string{odd + ":2: there is no such thing (node-1, node-2)\n"}, "does not fit 2 of 2 nodes"},
		{[]string{"check", fits, "--node", "node-1", "--partition", "spare"}, command.Done, []string{"node-1: partition spare fits\n"}, ""},
		{[]string{"check", fits, "--node", "node-7"}, command.Failed, nil, "node node-7 has no pod of the agent"},
		{[]string{"plan", fits, "--node", "node-1"}, command.Done, []string{"default"}, ""},
		{[]string{"plan", fits, "--all"}, command.Blocked, []string{"=== node-1\n", "=== node-2\n"}, ""},
		{[]string{"plan", wrong, "--all"}, command.Invalid, []string{wrong + ":15: no GPU"}, ""},
		{[]string{"plan", fits}, command.Usage, nil, "write --node NODE, or --all"},
		{[]string{"plan", fits, "--all", "--node", "x"}, command.Usage, nil, "write --node NODE, or --all"},
		{[]string{"check"}, command.Usage, nil, "the partition file is missing"},
	} {
		said, _, err := execute(t, in(t, s, test.args...)...)
		if command.ExitOf(err) != test.exit || err != nil && !strings.Contains(err.Error(), test.fail) {
			t.Errorf("%v: exit code %d, %v; want %d, %s", test.args, command.ExitOf(err), err, test.exit, test.fail)
		}
		for _, part := range test.want {
			if !strings.Contains(said, part) {
				t.Errorf("%v prints\n%swant\n%s", test.args, said, part)
			}
		}
	}
	said, _, err := execute(t, in(t, s, "check", fits, "-o", "json")...)
	var v kubectlgpu.Verdicts
	if err != nil || json.Unmarshal([]byte(said), &v) != nil || len(v.Nodes) != 2 || v.Nodes[1].Plan.State != "blocked" || len(v.Unjudged) != 1 {
		t.Errorf("%s: %v", said, err)
	}
}

func TestUsage(t *testing.T) {
	s := operators(t)
	said, notes, err := execute(t, in(t, s, "usage", "--by", "pod")...)
	if err != nil || notes != "node-1: note: pod\nnode-2: note: pod\n" {
		t.Errorf("%s: %v", notes, err)
	}
	if got := strings.Join(strings.Fields(strings.Split(said, "\n")[1]), " "); got != "train 4 3.00 0.50 20.00 - -" {
		t.Errorf("the sum over the nodes is %q", got)
	}
	said, _, err = execute(t, in(t, s, "usage", "node-2", "--at", "12:00")...)
	if err != nil || !strings.Contains(said, "node-2  3    24 units  0.3    train      job-1  main") {
		t.Errorf("%s: %v", said, err)
	}
	if _, _, err := execute(t, in(t, s, "usage", "--gpu", "3")...); command.ExitOf(err) != command.Usage {
		t.Error(err)
	}
}

func TestLogs(t *testing.T) {
	s := operators(t)
	s.Set(func() {
		s.Logs = map[string]string{"gpu-agent/gpu-agent-node-1/gpu-agent": "one\ntwo \x1b[2J\n", "gpu-agent/gpu-agent-node-1/gpu-agent/previous": "before\n"}
	})
	if said, _, err := execute(t, in(t, s, "logs", "node-1", "--tail", "5", "--since", "1h")...); err != nil || said != "one\ntwo ?[2J\n" {
		t.Errorf("%q: %v", said, err)
	}
	if said, _, err := execute(t, in(t, s, "logs", "node-1", "-p")...); err != nil || said != "before\n" {
		t.Errorf("%q: %v", said, err)
	}
	if _, _, err := execute(t, in(t, s, "logs", "node-1", "--since", "noon")...); command.ExitOf(err) != command.Usage {
		t.Error(err)
	}
	var none *command.Error
	if _, _, err := execute(t, in(t, s, "logs")...); !errors.As(err, &none) || none.Exit != command.Usage {
		t.Error(err)
	}
}
