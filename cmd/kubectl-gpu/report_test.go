// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/kubectlgpu"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
)

// reported is a cluster with a node of tenants whose names are told apart from all other words.
func reported(t *testing.T) *kubetest.Server {
	s := cluster(t)
	s.Put("pods", "gpu-agent", "gpu-agent-x", nil)
	agentOf(t, s, "node-1", agentobs.Options{
		Status: func() status.Status {
			return status.Status{Node: "node-1", Version: "v9.9.9", Driver: "580.1", GPUs: []status.GPU{{UUID: "GPU-a", Blocked: "GPU 0 stays shared until these end: zebra-ns/giraffe-1"}},
				Containers: []status.Container{{Namespace: "zebra-ns", Pod: "giraffe-1", Container: "okapi", Allocation: "a"}}}
		},
		Within: agentobs.Within{
			Journal: func(int) ([]byte, error) {
				return []byte(`{"event":"held","namespace":"hippo-ns","pod":"rhino-2","container":"okapi","labels":{"team":"Lion Team"}}` + "\n"), nil
			},
			Settings: func() map[string]string { return map[string]string{"memory-unit": "1GiB"} },
		}})
	s.Put("nodes", "", "node-1", object{"metadata": object{"labels": object{"example.com/gpu.node": "true"}}, "spec": object{"unschedulable": true},
		"status": object{"allocatable": object{"example.com/gpu-mem": "33"}, "images": []object{{"names": []string{"registry/walrus:v1"}}}}})
	s.Config("gpu-agent", "gpu-partitions", "version: v1\n")
	s.Put("events", "default", "e", object{"involvedObject": object{"kind": "Node", "name": "node-1", "uid": "node-1"}, "type": "Warning", "reason": "GPUPartitionBlocked",
		"message": "partition default is blocked (HeldByPods): until these end: panda-ns/koala-3", "lastTimestamp": "2026-01-01T00:00:00Z"})
	s.Set(func() {
		s.Release = "v1.36.3"
		s.Logs = map[string]string{"gpu-agent/gpu-agent-node-1/gpu-agent": "msg=offends what=\"container lemur of pod tapir-ns/sloth-4 uses\" pod=tapir-ns/sloth-4\n"}
	})
	return s
}

var tenants = []string{"zebra-ns", "giraffe-1", "okapi", "hippo-ns", "rhino-2", "Lion Team", "panda-ns", "koala-3", "tapir-ns", "sloth-4", "lemur", "walrus"}

// unpack returns the files of an archive.
func unpack(t *testing.T, data []byte) map[string]string {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		out[strings.TrimPrefix(h.Name, "gpu-node-1/")] = string(text)
	}
}

func TestBundle(t *testing.T) {
	s := reported(t)
	said, notes, err := execute(t, in(t, s, "bundle", "node-1", "--file", "-")...)
	if err != nil || notes != "" {
		t.Fatalf("%s%v", notes, err)
	}
	files := unpack(t, []byte(said))
	for name, want := range map[string]string{
		"status.json": "giraffe-1", "status.txt": "giraffe-1", "log.txt": "sloth-4", "journal.jsonl": "rhino-2", "events.json": "koala-3", "partitions.yaml": "version: v1",
		"settings.json": "memory-unit", "node.json": "unschedulable", "gpunode.json": "gpu-mem", "agent-pod.json": "gpu-agent-node-1", "why.txt": "node-1 is cordoned", "versions.json": "v9.9.9",
		"why.json": "NodeCordoned",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s lacks %s: %q", name, want, files[name])
		}
		delete(files, name)
	}
	if len(files) > 0 {
		t.Errorf("it has %v, too", files)
	}
	files = unpack(t, []byte(said))
	if !strings.Contains(files["versions.json"], "v1.36.3") {
		t.Error("the server's version is missing")
	}
	if strings.Contains(files["node.json"], "walrus") {
		t.Error("the Node has its list of tenants' images")
	}

	said, _, err = execute(t, in(t, s, "bundle", "node-1", "--redact", "--file", "-")...)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range unpack(t, []byte(said)) {
		for _, tenant := range tenants {
			if strings.Contains(text, tenant) {
				t.Errorf("%s has %s:\n%s", name, tenant, text)
			}
		}
	}
	if text := unpack(t, []byte(said))["status.txt"]; !strings.Contains(text, "namespace-") || !strings.Contains(text, "node-1") {
		t.Errorf("the status is %s", text)
	}
}

// A bundle is made of what there is: a node in trouble is what it is for.
func TestBundleOfANodeWithoutAgent(t *testing.T) {
	s := reported(t)
	s.Put("pods", "gpu-agent", "gpu-agent-node-1", nil)
	s.Put("gpunodes", "", "node-1", object{"status": object{"summary": object{}, "conditions": []object{
		{"type": "Ready", "status": "False", "reason": "AgentEnds", "message": "the agent has ended", "lastTransitionTime": "2026-01-01T00:00:00Z"}}}})
	path := filepath.Join(t.TempDir(), "b.tar.gz")
	said, notes, err := execute(t, in(t, s, "bundle", "node-1", "--file", path)...)
	if err != nil || said != path+"\n" || !strings.Contains(notes, "missing: the agent's pod, log, status and journal: ") {
		t.Fatalf("%q %q %v", said, notes, err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v: %v", info.Mode(), err)
	}
	files := unpack(t, data)
	if !strings.Contains(files["missing.txt"], "the agent's pod") || !strings.Contains(files["why.txt"], "no agent runs on node-1") {
		t.Errorf("%v", files)
	}
	if _, _, err := execute(t, in(t, s, "bundle", "node-1", "--file", path)...); !errors.Is(err, os.ErrExist) {
		t.Errorf("over a file that exists: %v", err)
	}
}

// play is a kubelet for example pods: it ends each as its resource says, with a log.
func play(t *testing.T, s *kubetest.Server, logs map[string]string) {
	kubetest.Background(t, func(ctx context.Context) error {
		done := map[string]bool{}
		for ctx.Err() == nil {
			for _, o := range s.All("pods") {
				metadata := o["metadata"].(map[string]any)
				name := metadata["name"].(string)
				if !strings.HasPrefix(name, "gpu-verify-") || done[name] {
					continue
				}
				done[name] = true
				of := claimOf(t, s, name)
				limits := o["spec"].(map[string]any)["containers"].([]any)[0].(map[string]any)["resources"].(map[string]any)["limits"].(map[string]any)
				for resource := range logs {
					if limits[resource] == "1" {
						of = resource
					}
				}
				phase := "Succeeded"
				state := object{"phase": phase}
				if logs[of] == "refused" {
					state = object{"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Pod was rejected: Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: " +
						"rpc error: code = FailedPrecondition desc = " + of + ": 1 unit asked for, but none is free; wait until some are freed, which is unexpected"}
				}
				s.Set(func() { s.Logs = map[string]string{"train/" + name + "/main": logs[of]} })
				s.Put("pods", "train", name, object{"metadata": metadata, "spec": o["spec"], "status": state})
			}
			time.Sleep(5 * time.Millisecond)
		}
		return ctx.Err()
	})
}

// claimOf returns the DeviceClass of the claim of a pod, with the memory that it asks for; empty if the pod
// has none.
func claimOf(t *testing.T, s *kubetest.Server, pod string) string {
	for _, o := range s.All("resourceclaims") {
		var claim struct {
			Metadata struct{ Name string }
			Spec     struct {
				Devices struct {
					Requests []struct {
						Exactly struct {
							DeviceClassName string
							Capacity        struct{ Requests map[string]string }
						}
					}
				}
			}
		}
		text, err := json.Marshal(o)
		if err == nil {
			err = json.Unmarshal(text, &claim)
		}
		if err != nil {
			t.Error(err)
		}
		if claim.Metadata.Name == pod && len(claim.Spec.Devices.Requests) == 1 {
			of := claim.Spec.Devices.Requests[0].Exactly
			return of.DeviceClassName + of.Capacity.Requests["memory"]
		}
	}
	return ""
}

// What a node offers through DRA is tried by claims: each DeviceClass once.
func TestVerifyByClaims(t *testing.T) {
	s := cluster(t)
	s.Allow("", "pods", "create", "delete")
	s.Allow("resource.k8s.io", "resourceclaims", "create", "delete")
	s.Put("nodes", "", "node-1", object{"metadata": object{"labels": object{"example.com/gpu.node": "true"}}})
	claimed := func(uuid string, index int, more object) object {
		g := object{"uuid": uuid, "index": index, "memoryMiB": 81920, "api": "dra"}
		maps.Copy(g, more)
		return g
	}
	offers := []object{{"profile": "3g.40gb", "placements": []string{"0", "4"}, "free": []string{"4"}, "largest": 1}, {"profile": "1g.10gb", "placements": []string{"0"}, "largest": 0}}
	s.Put("gpunodes", "", "node-1", object{"status": object{"summary": object{"gpus": 4, "unhealthy": 0, "saturationPercent": 0}, "memoryUnitMiB": 1024,
		"conditions": []object{{"type": "Ready", "status": "True", "reason": "Offered", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}},
		"gpus": []object{
			claimed("GPU-a", 0, object{"mode": "whole", "kind": "whole", "total": 1, "free": 0, "largest": 0}),
			claimed("GPU-b", 1, object{"mode": "shared", "kind": "replica", "total": 4, "free": 4, "largest": 1}),
			claimed("GPU-c", 2, object{"mode": "dynamic", "kind": "placement", "total": 79, "free": 40, "largest": 40, "mig": object{"offers": offers}}),
			claimed("GPU-d", 3, object{"mode": "mig", "kind": "placement", "total": 0, "free": 0, "largest": 0, "mig": object{"offers": offers}})}}})
	play(t, s, map[string]string{"gpu.shared.example.com": "GPU 0: NVIDIA A100 (UUID: GPU-b)\n", "gpu-memory.example.com1Gi": "| N/A 0C | 0MiB /  1024MiB |\n",
		"mig-3g.40gb.example.com": "GPU 0: NVIDIA A100 (UUID: GPU-c)\n  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n"})
	said, _, err := execute(t, in(t, s, "verify", "node-1", "-o", "json")...)
	var v kubectlgpu.Verification
	if err := errors.Join(err, json.Unmarshal([]byte(said), &v)); err != nil {
		t.Fatal(err, said)
	}
	got := map[string]string{}
	for _, e := range v.Examples {
		got[e.DeviceClass] = e.Outcome + " " + e.Says
	}
	want := map[string]string{"gpu.example.com": "skipped nothing of it is free", "gpu.shared.example.com": "works it sees NVIDIA A100 (GPU-b)",
		"gpu-memory.example.com": "works it sees one GPU of 1024 MiB", "mig-3g.40gb.example.com": "works it sees one MIG 3g.40gb (MIG-1)",
		"mig-1g.10gb.example.com": "skipped nothing of it is free"}
	if !maps.Equal(got, want) || len(v.Examples) != len(want) {
		t.Errorf("the examples are\n%q, want\n%q", got, want)
	}
	if left := s.All("resourceclaims"); len(left) > 0 {
		t.Errorf("it leaves %v", left)
	}
}

func TestVerify(t *testing.T) {
	const table = "|   0  NVIDIA A100 | x |\n| N/A 0C | 0MiB /  1024MiB |\n"
	for _, test := range []struct {
		name string
		logs map[string]string
		want map[string]string
		exit command.Exit
	}{
		{"all work", map[string]string{"example.com/gpu-mem": table, "example.com/gpu": "GPU 0: NVIDIA A100 (UUID: GPU-b)\n",
			"example.com/mig-3g.40gb": "GPU 0: NVIDIA A100 (UUID: GPU-c)\n  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n"},
			map[string]string{"example.com/gpu-mem": "works it sees one GPU of 1024 MiB", "example.com/gpu": "works it sees NVIDIA A100 (GPU-b)",
				"example.com/mig-3g.40gb": "works it sees one MIG 3g.40gb (MIG-1)", "example.com/mig-1g.10gb": "skipped nothing of it is free"}, command.Done},
		{"a cap that does not hold, the wrong device, and a refusal", map[string]string{"example.com/gpu-mem": strings.Replace(table, "1024MiB", "81920MiB", 1),
			"example.com/gpu": "refused", "example.com/mig-3g.40gb": "GPU 0: NVIDIA A100 (UUID: GPU-c)\n  MIG 1g.10gb     Device  0: (UUID: MIG-1)\n"},
			map[string]string{"example.com/gpu-mem": "fails nvidia-smi shows 81920 MiB, and it was given 1024: the cap does not hold",
				"example.com/gpu": "fails the kubelet of its node refused the pod: example.com/gpu: 1 unit asked for, but none is free", "example.com/mig-3g.40gb": "fails nvidia-smi shows other MIG devices"}, command.Failed},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := cluster(t)
			s.Allow("", "pods", "create", "delete")
			s.Put("nodes", "", "node-1", object{"metadata": object{"labels": object{"example.com/gpu.node": "true"}}})
			s.Put("gpunodes", "", "node-1", object{"status": object{"summary": object{"gpus": 3, "unhealthy": 0, "saturationPercent": 0}, "memoryUnitMiB": 1024,
				"conditions": []object{{"type": "Ready", "status": "True", "reason": "Offered", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}},
				"resources": []object{{"name": "example.com/gpu", "total": 1, "free": 1, "largest": 1}, {"name": "example.com/gpu-mem", "total": 79, "free": 33, "largest": 33},
					{"name": "example.com/mig-1g.10gb", "total": 2, "free": 0, "largest": 0}, {"name": "example.com/mig-3g.40gb", "total": 1, "free": 1, "largest": 1}},
				"gpus": []object{{"uuid": "GPU-a", "index": 0, "memoryMiB": 81920, "resource": "example.com/gpu-mem", "kind": "units", "total": 79, "free": 33, "largest": 33}}}})
			play(t, s, test.logs)
			said, _, err := execute(t, in(t, s, "verify", "node-1", "-o", "json")...)
			if command.ExitOf(err) != test.exit {
				t.Errorf("exit code %d: %v", command.ExitOf(err), err)
			}
			var v kubectlgpu.Verification
			if err := json.Unmarshal([]byte(said), &v); err != nil {
				t.Fatal(err, said)
			}
			for _, e := range v.Examples {
				if got := e.Outcome + " " + e.Says; !strings.HasPrefix(got, test.want[e.Resource]) {
					t.Errorf("%s: %s, want %s", e.Resource, got, test.want[e.Resource])
				}
			}
			if len(v.Examples) != 4 {
				t.Errorf("%d examples", len(v.Examples))
			}
			var left []string
			for _, o := range s.All("pods") {
				if name := o["metadata"].(map[string]any)["name"].(string); strings.HasPrefix(name, "gpu-verify-") {
					left = append(left, name)
				}
			}
			if left != nil {
				t.Errorf("it leaves %v", left)
			}
			// The pods are such as a namespace with the level restricted takes.
			made := s.Asked("create pods train/ ")
			if len(made) != 3 || slices.ContainsFunc(made, func(r string) bool {
				return !strings.Contains(r, `"runAsNonRoot":true`) || !strings.Contains(r, `"image":"registry/gpu-agent:v1"`) || !strings.Contains(r, `"drop":["ALL"]`)
			}) {
				t.Errorf("it made %q", made)
			}
		})
	}
}
