// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/placer"
)

// machine is a node with GPUs, and with so many cores and GiB.
func machine(name, cores, memory string) *corev1.Node {
	n := node(name, corev1.ConditionTrue)
	n.Status.Allocatable = corev1.ResourceList{
		"cpu": resource.MustParse(cores), "memory": resource.MustParse(memory), "pods": resource.MustParse("110"),
	}
	return n
}

// server is a bound pod without GPUs.
func server(name, on, cores string) *corev1.Pod {
	p := &corev1.Pod{}
	p.Name, p.UID, p.Spec.NodeName = name, types.UID(name), on
	p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{
		Requests: corev1.ResourceList{"cpu": resource.MustParse(cores)},
	}}}
	return p
}

// TestPodsWithoutGPUsTakeCPU: room for pods to come is where cpu is left beside all pods of a node.
func TestPodsWithoutGPUsTakeCPU(t *testing.T) {
	f := New("example.com", func() time.Time { return start })
	h := HoldFor(f, func(*corev1.Pod) string { return "" })
	if err := f.SetGPUNode("a", says(first)); err != nil {
		t.Fatal(err)
	}
	f.SetNode(machine("a", "8", "64Gi"))
	group := placer.Group{N: 1, Among: []string{"a"}, Containers: []placer.Container{{Requests: map[string]int{memory: 10}}},
		Plain: placer.NewAmounts(map[string]int64{"cpu": 3000})}
	held := func(yes bool, when string) {
		t.Helper()
		_, no := h.Hold("x", "a job", []placer.Group{group})
		if h.Drop("x"); no == nil != yes {
			t.Fatalf("%s there is room: %v; %v", when, no == nil, no)
		}
	}
	held(true, "at first")
	waits := server("waits", "", "100")
	f.SetPod(waits)
	f.SetPod(server("web", "a", "5"))
	held(true, "beside a pod that has no node")
	f.SetPod(server("sql", "a", "500m"))
	held(false, "beside two servers")
	f.SetPod(server("web", "a", "4500m")) // it was made smaller
	held(true, "beside a smaller server")
	done := server("batch", "a", "4")
	f.SetPod(done)
	held(false, "beside a job")
	done.Status.Phase = corev1.PodFailed
	f.SetPod(done)
	held(true, "once the job has failed")
	f.DeletePod("web")
	f.DeletePod("sql")
	f.DeletePod("batch")
	f.DeletePod("nobody")
	f.books.Refresh(100)
	f.SetNode(machine("cpu-only", "8", "64Gi"))
	f.SetPod(server("elsewhere", "cpu-only", "1"))
	f.DeletePod("elsewhere")
	if f.books.Refresh(0) {
		t.Error("the books know a node without GPUs")
	}
	if len(f.beside.pods)+len(f.beside.use) != 0 {
		t.Errorf("left are %v and %v", f.beside.pods, f.beside.use)
	}
	// A pod with GPUs counts by its own entry.
	p := bound(asks("p", "10"), "a", first, 10)
	p.Spec.Containers[0].Resources.Requests["cpu"] = resource.MustParse("6")
	f.SetPod(p)
	held(false, "beside a pod with GPUs")
	f.DeletePod("p")
	if f.SetNode(machine("a", "2", "64Gi")); true {
		held(false, "on a node that has less now")
	}
}

// TestPlainOf is what the scheduler counts.
func TestPlainOf(t *testing.T) {
	list := func(text string) corev1.ResourceList {
		out := corev1.ResourceList{}
		for one := range strings.FieldsSeq(text) {
			name, n, _ := strings.Cut(one, "=")
			out[corev1.ResourceName(name)] = resource.MustParse(n)
		}
		return out
	}
	p := &corev1.Pod{}
	always := corev1.ContainerRestartPolicyAlways
	p.Spec.InitContainers = []corev1.Container{
		{Resources: corev1.ResourceRequirements{Requests: list("cpu=100m memory=1Gi")}, RestartPolicy: &always},
		{Resources: corev1.ResourceRequirements{Requests: list("cpu=3")}},
	}
	p.Spec.Containers = []corev1.Container{
		{Resources: corev1.ResourceRequirements{Requests: list("cpu=1 memory=1Gi example.com/gpu-mem=4 example.org/nic=1")}},
		{Resources: corev1.ResourceRequirements{Requests: list("cpu=1 ephemeral-storage=1Gi")}},
	}
	p.Spec.Overhead = list("memory=64Mi")
	want := "[{cpu 3100} {ephemeral-storage 1073741824} {example.org/nic 1} {memory 2214592512} {pods 1}]"
	if got := fmt.Sprint(plainOf(p, "example.com/")); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	huge := &corev1.Pod{}
	huge.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: list("cpu=9E memory=8E")}}}
	for _, a := range plainOf(huge, "example.com/") {
		if a.N < 1 || a.N > placer.MostOfAmount {
			t.Errorf("%v", a)
		}
	}
}
