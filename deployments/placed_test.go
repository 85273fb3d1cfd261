// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/tests/plane"
)

// startPlacer starts the program with the placer's rights.
func (s *apiServer) startPlacer(t *testing.T, program, door string, args ...string) *plane.Placer {
	t.Helper()
	return s.StartPlacer(t, program, s.Kubeconfig(t, asPlacer()), door, args...)
}

const unitsName = "example.com/gpu-mem"

// sharedGPU is one of 79 units, which can be had or not.
func sharedGPU(i int, available gpunode.ConditionStatus) gpunode.GPU {
	condition := func(kind string, is gpunode.ConditionStatus) gpunode.Condition {
		return gpunode.Condition{Type: kind, Status: is, Reason: "R", LastTransitionTime: time.Unix(1e9, 0)}
	}
	return gpunode.GPU{UUID: gpuOf(i), Index: i, Model: "M", MemoryMiB: 81920, Mode: "shared", API: "device-plugin", Resource: unitsName, Kind: piece.KindUnits, Total: 79, Free: 79, Largest: 79,
		Conditions: []gpunode.Condition{condition(gpunode.Healthy, gpunode.True), condition(gpunode.Available, available)}}
}

func gpuOf(i int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i) }

// setGPUs makes a GPUNode say what a node has.
func (s *apiServer) setGPUs(t *testing.T, node string, gpus ...gpunode.GPU) {
	t.Helper()
	is := &gpunode.Status{MemoryUnitMiB: 1024, HoldersIn: gpunode.InPods, GPUs: gpus,
		Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True, Reason: "R", LastTransitionTime: time.Unix(1e9, 0)}}}
	is.Sum()
	if err := s.do(t, nil, http.MethodPatch, gpuNodes+"/"+node+"/status", merge, fields{"status": is}, nil); err != nil {
		t.Fatal(err)
	}
}

const trainPods = "/api/v1/namespaces/train/pods/"

// ask makes a pod that asks for units.
func (s *apiServer) ask(t *testing.T, name string, units int) {
	t.Helper()
	s.create(t, strings.TrimSuffix(trainPods, "/"), fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name},
		"spec": fields{"automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0, "tolerations": []fields{{"operator": "Exists"}},
			"containers": []fields{{"name": "main", "image": "none", "resources": fields{"limits": fields{unitsName: fmt.Sprint(units)}}}}}})
}

// placed is where a pod is, or what the scheduler says of why it is nowhere.
func (s *apiServer) placed(t *testing.T, name string) (node, why string) {
	t.Helper()
	var pod struct {
		Spec   struct{ NodeName string }
		Status struct {
			Conditions []struct{ Type, Message string }
		}
	}
	if err := s.do(t, nil, http.MethodGet, trainPods+name, "", nil, &pod); err != nil {
		t.Fatal(err)
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == "PodScheduled" {
			why = c.Message
		}
	}
	return pod.Spec.NodeName, why
}

func (s *apiServer) awaitPlaced(t *testing.T, name, node string) {
	t.Helper()
	s.await(t, name+" is placed", func() error {
		if on, why := s.placed(t, name); on != node {
			return fmt.Errorf("it is on %q: %s", on, why)
		}
		return nil
	})
}

// report says in a pod's status, as its kubelet would, which units of a GPU it has.
func (s *apiServer) report(t *testing.T, name string, of, units int) {
	t.Helper()
	var has []fields
	for i := range units {
		has = append(has, fields{"resourceID": timeslice.ID(gpu.UUID(gpuOf(of)), i), "health": "Healthy"})
	}
	now := time.Now().UTC().Format(time.RFC3339)
	if err := s.do(t, nil, http.MethodPatch, trainPods+name+"/status", strategic, fields{"status": fields{"phase": "Running", "containerStatuses": []fields{{
		"name": "main", "image": "none", "imageID": "", "ready": true, "started": true, "restartCount": 0, "state": fields{"running": fields{"startedAt": now}},
		"allocatedResourcesStatus": []fields{{"name": unitsName, "resources": has}}}}}}, nil); err != nil {
		t.Fatal(err)
	}
}

// TestStockSchedulerWithThePlacer has kube-scheduler as it is shown, and the program with the
// rights that are shipped. Of three pods of 50 the third waits, and the reason names the
// largest block; it is bound when room appears of which the scheduler hears from nobody else.
// While no placer runs pods are bound as without it, and the next one counts just these.
func TestStockSchedulerWithThePlacer(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	for _, o := range render(t, "placer") {
		s.apply(t, o, false)
	}
	program := placerProgram(t)
	s.namespace(t, "train")
	s.node(t, "gpu-1", fields{"cpu": "64", "memory": "64Gi", "pods": "110", unitsName: "237"})
	s.create(t, gpuNodes, aGPUNode("gpu-1"))
	s.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True), sharedGPU(1, gpunode.True), sharedGPU(2, gpunode.False))
	dir, secured := plane.Secured(t, program)
	p := s.startPlacer(t, program, plane.FreeAddress(t), secured...)
	s.SchedulerAskingSecurely(t, schedulerConfig, p.Door, dir)
	if r, err := http.Post("http://"+p.Door+"/filter", "application/json", strings.NewReader("{}")); err == nil && r.StatusCode != http.StatusBadRequest {
		t.Errorf("somebody without a certificate is answered %s", r.Status)
	}

	s.ask(t, "one", 50)
	s.awaitPlaced(t, "one", "gpu-1")
	s.report(t, "one", 0, 50)
	s.ask(t, "two", 50)
	s.awaitPlaced(t, "two", "gpu-1")
	s.report(t, "two", 1, 50)
	s.ask(t, "three", 50)
	s.await(t, "the reason names the largest block", func() error {
		on, why := s.placed(t, "three")
		if on != "" {
			t.Fatalf("the third pod is on %s, where the largest block is 29", on)
		}
		if !strings.Contains(why, "no room for 50 of "+unitsName+": the largest free block is 29") {
			return fmt.Errorf("it is %q", why)
		}
		t.Log(why)
		return nil
	})
	if n := p.Metric(t, "gpu_agent_placer_waiting_pods"); n != 1 {
		t.Errorf("%v pods wait", n)
	}
	s.setGPUs(t, "gpu-1", sharedGPU(0, gpunode.True), sharedGPU(1, gpunode.True), sharedGPU(2, gpunode.True))
	began := time.Now()
	s.awaitPlaced(t, "three", "gpu-1")
	t.Logf("bound %s after the GPUNode had room", time.Since(began).Round(time.Millisecond))
	s.report(t, "three", 2, 50)
	if n := p.Metric(t, `gpu_agent_placer_wakes_total{result="ok"}`); n != 1 {
		t.Errorf("the scheduler was woken %v times", n)
	}
	if n := p.Metric(t, "gpu_agent_placer_unguarded_pods_total"); n != 0 {
		t.Errorf("%v pods are unguarded", n)
	}

	// The API server writes in whole seconds when a pod was bound. What was bound before the
	// last renewal is guarded, and what was bound in a second after that one is not.
	renewed := func() time.Time {
		var lease struct{ Spec struct{ RenewTime time.Time } }
		if err := s.do(t, nil, http.MethodGet, "/apis/coordination.k8s.io/v1/namespaces/gpu-placer/leases/gpu-placer", "", nil, &lease); err != nil {
			t.Fatal(err)
		}
		return lease.Spec.RenewTime
	}
	bound := time.Now()
	s.await(t, "the lease is renewed", func() error {
		if !renewed().After(bound) {
			return fmt.Errorf("at %s", renewed())
		}
		return nil
	})
	p.Kill()
	time.Sleep(time.Until(renewed().Truncate(time.Second).Add(1100 * time.Millisecond)))
	for i, name := range []string{"four", "five"} {
		s.ask(t, name, 10)
		s.awaitPlaced(t, name, "gpu-1")
		s.report(t, name, i, 10)
	}
	p = s.startPlacer(t, program, p.Door, secured...)
	s.ask(t, "six", 10)
	s.awaitPlaced(t, "six", "gpu-1")
	s.report(t, "six", 2, 60) // with the 50 before
	s.awaitUnguarded(t, p, 2)

	// It hangs, so shortly that it keeps the lease, and then until it has lost it.
	hangs := []time.Duration{0, 12 * time.Second}
	if testing.Short() {
		hangs = hangs[:1]
	}
	for i, hangs := range hangs {
		p.Hang(t)
		name := fmt.Sprintf("hung-%d", i)
		s.ask(t, name, 5)
		s.awaitPlaced(t, name, "gpu-1")
		time.Sleep(hangs)
		p.Resume(t)
		s.awaitUnguarded(t, p, float64(3+i))
	}
	if n := p.Metric(t, `gpu_agent_placer_answers_total{outcome="placed",verb="filter"}`); n != 1 {
		t.Errorf("%v pods were placed since the kill, want 1", n)
	}
}

// awaitUnguarded waits until the placer has counted so many pods.
func (s *apiServer) awaitUnguarded(t *testing.T, p *plane.Placer, want float64) {
	t.Helper()
	s.await(t, fmt.Sprintf("%v pods are unguarded", want), func() error {
		if n := p.Metric(t, "gpu_agent_placer_unguarded_pods_total"); n != want {
			return fmt.Errorf("there are %v", n)
		}
		return nil
	})
}
