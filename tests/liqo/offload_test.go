// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	door "example.com/gpu-agent/internal/liqo"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/plane"
)

// real is a provider that is a real node: kubelet, containerd, the agent, and the placer that
// the node's scheduler asks.
type real struct {
	kit     *lab.Kit
	node    *lab.Node
	cluster *cluster
}

// startReal starts it, with one GPU of 79 units.
func startReal(t *testing.T) *real {
	t.Helper()
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	r := &real{}
	var err error
	r.kit, err = lab.NewKit(nil)
	must(err)
	r.node, err = r.kit.Up(ctx, lab.NodeOptions{Name: "liqo", WithParent: true, PromptStatus: true})
	must(err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := r.kit.Down(ctx, "liqo"); err != nil {
			t.Error(err)
		}
	})
	must(r.node.Load(ctx, r.kit.AgentArchive()))
	_, err = r.node.LayDriver(ctx, lab.DriverOptions{Root: "/", Model: model, Count: 1})
	must(err)
	_, err = r.node.Deploy(ctx, lab.DeployOptions{Partitions: "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared}\n"})
	must(err)
	r.cluster = r.liqo(t)
	_, err = r.node.StartPlacer(ctx, "--doors=extender,liqo")
	must(err)
	config, err := r.node.SchedulerConfig()
	must(err)
	_, err = r.node.SetScheduler(ctx, "--config="+config)
	must(err)
	must(r.node.AwaitAllocatable(ctx, map[string]int{units: 79}))
	return r
}

// liqo makes the node's control plane one with Liqo. The webhooks are processes of the node,
// where its API server finds them.
func (r *real) liqo(t *testing.T) *cluster {
	t.Helper()
	text, err := r.node.Kubectl(t.Context(), nil, "config", "view", "--raw", "-o", "json")
	var config struct {
		Clusters []struct {
			Cluster struct {
				Server    string
				Authority []byte `json:"certificate-authority-data"`
			}
		}
		Users []struct{ User struct{ Token string } }
	}
	if err == nil {
		err = json.Unmarshal(text, &config)
	}
	if err != nil || len(config.Clusters) != 1 || len(config.Users) != 1 {
		t.Fatalf("read the node's kubeconfig: %v: %s", err, text)
	}
	c := &cluster{Server: plane.Attach(t, config.Clusters[0].Cluster.Server, config.Users[0].User.Token), id: "here", authority: config.Clusters[0].Cluster.Authority}
	c.webhooks = func(t *testing.T, port int) {
		t.Helper()
		const kubeconfig = "/etc/kubernetes/liqo.conf"
		of := c.config(system, "liqo-webhook")
		of["clusters"].([]fields)[0]["cluster"].(fields)["server"] = "https://127.0.0.1:443"
		text, err := json.Marshal(of)
		if err == nil {
			err = os.WriteFile(r.node.File(kubeconfig), text, 0o600)
		}
		if err == nil {
			err = r.node.Start(t.Context(), "liqo-webhook", append([]string{"/usr/bin/env", "KUBECONFIG=" + kubeconfig, program(t, "webhook")}, webhookArgs(c.id, port)...)...)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	c.install(t)
	return c
}

// A pod of another cluster's runs on a real node, and has the memory that it asked for and no
// more: it takes what it can until CUDA refuses.
func TestOffloadedPodIsCapped(t *testing.T) {
	if missing := lab.Missing(); missing != "" {
		t.Skipf("skipped: this needs %s", missing)
	}
	program(t, "liqoctl") // skips
	if !*long {
		t.Skip("skipped: -long is not set: it needs a real node beside a second cluster, and Liqo, which takes ten minutes to build")
	}
	here := startReal(t)
	rome := start(t, "rome", readies)
	rome.Scheduler(t, 0)
	rome.peer(t, here.cluster)
	r := rome.ask(t, here.cluster, "gpus", door.Class, true, map[string]int{units: 40})
	r.answered(t, units, 40, "Accepted Granted", "40 of "+units)
	rome.startVirtualKubelet(t, "here", "gpus")
	rome.Await(t, "the virtual node has what was granted", func() error { return rome.allocatable(t, "gpus", map[string]int{units: 40}) })

	rome.create(t, "/api/v1/namespaces", fields{"metadata": fields{"name": lab.PodNamespace}})
	liqoctl(t, "offload", "namespace", lab.PodNamespace, "--kubeconfig", rome.as(t, "", ""), "--namespace-mapping-strategy", "EnforceSameName", "--pod-offloading-strategy", "Remote")
	mount, err := lab.ProbeMount(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const asked, mib = 24, 1 << 20
	pods := "/api/v1/namespaces/" + lab.PodNamespace + "/pods"
	rome.Await(t, "pods can be made", func() error {
		return rome.get(t, "/api/v1/namespaces/"+lab.PodNamespace+"/serviceaccounts/default", nil)
	})
	rome.create(t, pods, here.node.PodObject(lab.Pod{Name: "job", Containers: []lab.Container{{Resources: map[string]int{units: asked}, Mounts: []lab.Mount{mount}}}}))
	rome.Await(t, "the consumer's pod runs", func() error {
		var pod, there corev1.Pod
		err := rome.get(t, pods+"/job", &pod)
		if err == nil && pod.Status.Phase != corev1.PodRunning {
			err = errors.Join(fmt.Errorf("it is %s: %+v", pod.Status.Phase, pod.Status.Conditions), here.cluster.get(t, pods+"/job", &there),
				fmt.Errorf("at the provider it is %s: %+v", there.Status.Phase, there.Status))
		}
		return err
	})
	all, err := here.node.Pods(t.Context(), "")
	if err != nil || len(all) != 1 {
		t.Fatalf("the provider has %v of the consumer's pods, want one: %v", all, err)
	}
	probe, err := all[0].Probe(t.Context(), "main", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer probe.Close()
	answer, err := probe.Ask("take cuMemAlloc_v2 %d 100000", 64*mib)
	if err != nil {
		t.Fatal(err)
	}
	got := answer.Bytes("count") * 64 * mib
	if answer.Result() != lab.OutOfMemory || got > asked<<30 || got < (asked-1)<<30 {
		t.Errorf("of %d GiB it has taken %.2f GiB when it was refused: %s", asked, float64(got)/(1<<30), answer)
	}
	t.Logf("granted 40 units, a pod of %d: %.2f GiB taken, then CUDA_ERROR_OUT_OF_MEMORY", asked, float64(got)/(1<<30))
}
