// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/tests/plane"
)

const (
	queueing  = "/apis/kueue.x-k8s.io/v1beta2"
	workloads = queueing + "/namespaces/train/workloads"
)

// workload makes one with quota of a flavor, of so many pods of so many units each, as Kueue
// does: its check waits for an answer.
func (s *apiServer) workload(t *testing.T, name, flavor, check string, pods, units int) {
	t.Helper()
	s.queue(t, name, pods, units)
	if err := s.giveQuota(t, name, flavor, check, pods); err != nil {
		t.Fatal(err)
	}
}

// spotWorkload is the same of pods that ask in the spot tier.
func (s *apiServer) spotWorkload(t *testing.T, name, flavor, check string, pods, units int) {
	t.Helper()
	s.queueOf(t, name, unitsName+".spot", pods, units)
	if err := s.giveQuota(t, name, flavor, check, pods); err != nil {
		t.Fatal(err)
	}
}

// queue makes a workload that waits for quota.
func (s *apiServer) queue(t *testing.T, name string, pods, units int) {
	t.Helper()
	s.queueOf(t, name, unitsName, pods, units)
}

func (s *apiServer) queueOf(t *testing.T, name, resource string, pods, units int) {
	t.Helper()
	s.create(t, workloads, fields{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
		"metadata": fields{"name": name, "ownerReferences": []fields{{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "job-" + name, "controller": true}}},
		"spec": fields{"podSets": []fields{{"name": "main", "count": pods, "template": fields{"metadata": fields{}, "spec": fields{"restartPolicy": "Never",
			"containers": []fields{{"name": "main", "image": "none", "resources": fields{"requests": fields{resource: fmt.Sprint(units)}}}}}}}}}})
}

// giveQuota gives it quota of a flavor.
func (s *apiServer) giveQuota(t *testing.T, name, flavor, check string, pods int) error {
	const now = "2026-01-01T00:00:00Z"
	status := fields{"status": fields{
		"conditions":      []fields{{"type": "QuotaReserved", "status": "True", "reason": "R", "message": "", "lastTransitionTime": now}},
		"admission":       fields{"clusterQueue": "q", "podSetAssignments": []fields{{"name": "main", "count": pods, "flavors": fields{unitsName: flavor}}}},
		"admissionChecks": []fields{{"name": check, "state": "Pending", "message": "", "lastTransitionTime": now}, {"name": "other", "state": "Pending", "message": "", "lastTransitionTime": now}}}}
	return s.do(t, nil, http.MethodPatch, workloads+"/"+name+"/status", merge, status, nil)
}

// serveKueue has the API server serve what the placer reads and writes of Kueue's.
func (s *apiServer) serveKueue(t *testing.T) {
	t.Helper()
	source := sourceOf(t, "sigs.k8s.io/kueue") + "/config/components/crd/bases/kueue.x-k8s.io_"
	kinds := []string{"workloads", "resourceflavors", "admissionchecks"}
	for _, kind := range kinds {
		for _, o := range documents(t, kind, read(t, source+kind+".yaml")) {
			s.apply(t, o, false)
		}
	}
	s.await(t, "checks are served", func() error {
		for _, kind := range kinds {
			if err := s.do(t, nil, http.MethodGet, queueing+"/"+kind, "", nil, nil); err != nil {
				return err
			}
		}
		return nil
	})
}

// flavor is one of the nodes with a site's label.
func (s *apiServer) flavor(t *testing.T, site string) {
	t.Helper()
	s.create(t, queueing+"/resourceflavors", fields{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": fields{"name": site}, "spec": fields{"nodeLabels": fields{"example.com/gpu.site": site}}})
}

// awaitCheck waits for an answer.
func (s *apiServer) awaitCheck(t *testing.T, name, state, message string) (annotations, selector map[string]string) {
	t.Helper()
	s.await(t, name+" is "+state, func() error {
		var is struct {
			Status struct {
				AdmissionChecks []struct {
					Name, State, Message string
					PodSetUpdates        []struct{ Annotations, NodeSelector map[string]string }
				}
			}
		}
		if err := s.do(t, nil, http.MethodGet, workloads+"/"+name, "", nil, &is); err != nil {
			t.Fatal(err)
		}
		c := is.Status.AdmissionChecks
		if len(c) != 2 || c[1].State != "Pending" || c[1].Message != "" {
			t.Errorf("somebody else's check was answered: %+v", c)
		}
		if c[0].State != state || !strings.Contains(c[0].Message, message) {
			return fmt.Errorf("it is %s: %s", c[0].State, c[0].Message)
		}
		if len(c[0].PodSetUpdates) == 1 {
			annotations, selector = c[0].PodSetUpdates[0].Annotations, c[0].PodSetUpdates[0].NodeSelector
		}
		return nil
	})
	return annotations, selector
}

// TestKueueDoor has the program, with the rights that are shipped, answer checks at the real API
// server with Kueue's own definitions. What is held nobody else gets, also after a kill. There is no
// lease, so that the next process begins at once.
func TestKueueDoor(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	s.serveKueue(t)
	for _, o := range render(t, withComponent(t, "placer", "placer/kueue")) {
		s.apply(t, o, false)
	}
	s.namespace(t, "train")
	for i, name := range []string{"gpu-1", "gpu-2"} {
		site := []string{"on-prem", "cloud"}[i]
		s.node(t, name, fields{"cpu": "64", "memory": "64Gi", "pods": "1000", unitsName: "158"})
		if err := s.do(t, nil, http.MethodPatch, "/api/v1/nodes/"+name, merge, fields{"metadata": fields{"labels": fields{"example.com/gpu.site": site, corev1.LabelHostname: name}}}, nil); err != nil {
			t.Fatal(err)
		}
		s.create(t, gpuNodes, aGPUNode(name))
		gpus := []gpunode.GPU{sharedGPU(2*i, gpunode.True), sharedGPU(2*i+1, gpunode.True)}
		for j := range gpus {
			gpus[j].Spot = &gpunode.Spot{Resource: unitsName + ".spot", Total: 40, Free: 40, Largest: 40}
		}
		s.setGPUs(t, name, gpus...)
		s.flavor(t, site)
	}
	// The second tier of the same nodes, as the export makes it.
	s.create(t, queueing+"/resourceflavors", fields{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": fields{"name": "on-prem-spot"}, "spec": fields{"nodeLabels": fields{"example.com/gpu.site": "on-prem"}}})
	program := placerProgram(t)
	p := s.startPlacer(t, program, plane.FreeAddress(t), "--doors=extender,kueue", "--lease=")
	for _, name := range []string{"gpu-placer", "gpu-placer-urgent", "gpu-placer-cloud"} {
		s.await(t, name+" is active", func() error {
			var is struct {
				Status struct{ Conditions []metav1.Condition }
			}
			if err := s.do(t, nil, http.MethodGet, queueing+"/admissionchecks/"+name, "", nil, &is); err != nil {
				return err
			}
			if len(is.Status.Conditions) != 1 || is.Status.Conditions[0].Type != "Active" || is.Status.Conditions[0].Status != metav1.ConditionTrue {
				return fmt.Errorf("it says %+v", is.Status.Conditions)
			}
			return nil
		})
	}

	s.spotWorkload(t, "night", "on-prem-spot", "gpu-placer", 2, 35)
	s.awaitCheck(t, "night", "Ready", "there is room: gpu-1 × 2")
	s.workload(t, "one", "on-prem", "gpu-placer", 2, 50)
	annotations, selector := s.awaitCheck(t, "one", "Ready", "there is room: gpu-1 × 2")
	if annotations["example.com/gpu.hold"] == "" || annotations["example.com/gpu.hold-nodes"] != "gpu-1:2" || selector[corev1.LabelHostname] != "gpu-1" {
		t.Errorf("its pods get %v and %v", annotations, selector)
	}
	s.workload(t, "two", "on-prem", "gpu-placer", 1, 50)
	s.awaitCheck(t, "two", "Retry", "the largest free block of "+unitsName+" is 29")
	// A guaranteed workload has had the room of both spot pods, and a spot one gets what neither has.
	s.spotWorkload(t, "late", "on-prem-spot", "gpu-placer", 1, 41)
	s.awaitCheck(t, "late", "Retry", "the largest free block of "+unitsName+".spot is 29")
	s.workload(t, "burst", "cloud", "gpu-placer-cloud", 1, 50)
	s.awaitCheck(t, "burst", "Ready", "on-prem, none of 1 nodes has room")
	s.workload(t, "small", "cloud", "gpu-placer-cloud", 1, 20)
	s.awaitCheck(t, "small", "Retry", "begins again with the first flavor")

	s.namespace(t, "web")
	hold := func(pod *corev1.Pod) { pod.Annotations = annotations }
	for _, test := range []struct {
		what string
		of   func(*corev1.Pod)
		want bool
	}{
		{"nobody's", func(*corev1.Pod) {}, false},
		{"one of another namespace's", func(pod *corev1.Pod) { hold(pod); pod.Namespace = "web" }, false},
		{"its own", hold, true},
	} {
		if got := s.question(t, p, 50, test.of); got != test.want {
			t.Errorf("a pod, %s, is placed: %t, want %t", test.what, got, test.want)
		}
	}
	p.Kill()
	p = s.startPlacer(t, program, p.Door, "--doors=extender,kueue", "--lease=")
	if s.question(t, p, 50, func(*corev1.Pod) {}) {
		t.Error("after a kill somebody else has the room of a workload")
	}
	if n := p.Metric(t, `gpu_agent_placer_kueue_checks{state="Ready"}`); n != 2 {
		t.Errorf("%v checks are Ready", n)
	}
	// It has ended, and the other one is tried again, as Kueue does.
	over := fields{"status": fields{"conditions": []fields{{"type": "Finished", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}}}}
	if err := s.do(t, nil, http.MethodPatch, workloads+"/one/status", merge, over, nil); err != nil {
		t.Fatal(err)
	}
	s.workload(t, "three", "on-prem", "gpu-placer", 2, 70)
	s.awaitCheck(t, "three", "Ready", "there is room: gpu-1 × 2")
	t.Run("policy", func(t *testing.T) { s.tryKueuePolicy(t) })
}

// tryKueuePolicy writes what the placer may not.
func (s *apiServer) tryKueuePolicy(t *testing.T) {
	as := http.Header{"Impersonate-User": {"system:serviceaccount:" + placer + ":" + placer}, "Impersonate-Group": {"system:authenticated"}}
	for _, test := range []struct {
		what   string
		change func(status map[string]any)
		want   string
	}{
		{"its check", func(status map[string]any) { state(status, 0)["message"] = "m" }, ""},
		{"its check as rejected", func(status map[string]any) { state(status, 0)["state"] = "Rejected" }, "rejects no workload"},
		{"somebody else's check", func(status map[string]any) { state(status, 1)["state"] = "Ready" }, "whose names begin with gpu-placer"},
		{"a check away", func(status map[string]any) { status["admissionChecks"] = status["admissionChecks"].([]any)[:1] }, "whose names begin with gpu-placer"},
		{"that it is admitted", func(status map[string]any) {
			status["conditions"] = append(status["conditions"].([]any), fields{"type": "Admitted", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"})
		}, "nothing but the states of its checks"},
		{"that it may be tried again", func(status map[string]any) {
			status["conditions"] = append(status["conditions"].([]any), fields{"type": "Requeued", "status": "True", "reason": "GPUPlacer", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"})
		}, ""},
		{"that it may not", func(status map[string]any) {
			status["conditions"] = append(status["conditions"].([]any), fields{"type": "Requeued", "status": "False", "reason": "GPUPlacer", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"})
		}, "nothing but the states of its checks"},
		{"a condition away", func(status map[string]any) { status["conditions"] = status["conditions"].([]any)[1:] }, "nothing but the states of its checks"},
		{"its quota", func(status map[string]any) { delete(status, "admission") }, "nothing but the states of its checks"},
	} {
		s.await(t, "the policy judges "+test.what, func() error {
			var is map[string]any
			if err := s.do(t, nil, http.MethodGet, workloads+"/three", "", nil, &is); err != nil {
				t.Fatal(err)
			}
			test.change(is["status"].(map[string]any))
			err := s.do(t, as, http.MethodPut, workloads+"/three/status?dryRun=All", asJSON, is, nil)
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				return fmt.Errorf("%v, want %q", err, test.want)
			}
			return nil
		})
	}
	s.try(t, as, []try{
		{"a workload's spec", http.MethodPatch, workloads + "/three", merge, fields{"spec": fields{"active": false}}, "nothing of a workload but which flavors"},
		{"a workload's labels", http.MethodPatch, workloads + "/three", merge, fields{"metadata": fields{"labels": fields{"a": "b"}}}, "nothing of a workload but which flavors"},
		{"another annotation", http.MethodPatch, workloads + "/three", merge, fields{"metadata": fields{"annotations": fields{"a": "b"}}}, "nothing of a workload but which flavors"},
		{"which flavors a workload may have", http.MethodPatch, workloads + "/three?dryRun=All", merge, fields{"metadata": fields{"annotations": fields{"example.com/gpu.refused-flavors": "a",
			"kueue.x-k8s.io/workload-allowed-resource-flavors": "b"}}}, ""},
		{"a workload away", http.MethodDelete, workloads + "/three", "", nil, "forbidden"},
		{"another check", http.MethodPost, queueing + "/admissionchecks", asJSON, fields{"metadata": fields{"name": "x"}}, "forbidden"},
		{"a flavor", http.MethodPatch, queueing + "/resourceflavors/cloud", merge, fields{"spec": fields{"nodeLabels": fields{}}}, "forbidden"},
	})
}

func state(status map[string]any, i int) map[string]any {
	return status["admissionChecks"].([]any)[i].(map[string]any)
}
