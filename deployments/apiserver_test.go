// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
	"example.com/gpu-agent/tests/plane"
)

// apiServer is the real one, on loopback, over an etcd of its own. Nothing runs in its cluster.
type apiServer struct {
	*plane.Server
	// audit is where it writes down what each user has asked for.
	audit string
	// first are the UIDs of what there was when it began, and forgot is how often policies were
	// taken away since then.
	first  map[string]bool
	forgot int
}

// await polls until the server has made something so.
func (s *apiServer) await(t *testing.T, what string, try func() error) {
	t.Helper()
	s.Await(t, what, try)
}

// do makes one request in somebody's name, root's if as is nil; a refusal is an
// error with the server's words.
func (s *apiServer) do(t *testing.T, as http.Header, method, path, kind string, body, into any) error {
	t.Helper()
	return s.Do(t, as, method, path, kind, body, into)
}

// agentOn is the agent's service account with a token of a pod on that node.
func agentOn(node string) http.Header { return accountOn(name, name, node) }

const (
	asJSON    = plane.JSON
	merge     = plane.Merge
	strategic = plane.Strategic
)

type fields = map[string]any

// places are where the API has each kind; %s stands for the namespace.
var places = map[string]string{
	"Namespace":                        "/api/v1/namespaces",
	"ServiceAccount":                   "/api/v1/namespaces/%s/serviceaccounts",
	"ConfigMap":                        "/api/v1/namespaces/%s/configmaps",
	"DaemonSet":                        "/apis/apps/v1/namespaces/%s/daemonsets",
	"StatefulSet":                      "/apis/apps/v1/namespaces/%s/statefulsets",
	"Deployment":                       "/apis/apps/v1/namespaces/%s/deployments",
	"Service":                          "/api/v1/namespaces/%s/services",
	"Job":                              "/apis/batch/v1/namespaces/%s/jobs",
	"CronJob":                          "/apis/batch/v1/namespaces/%s/cronjobs",
	"Pod":                              "/api/v1/namespaces/%s/pods",
	"DeviceClass":                      "/apis/resource.k8s.io/v1/deviceclasses",
	"RuntimeClass":                     "/apis/node.k8s.io/v1/runtimeclasses",
	"Role":                             "/apis/rbac.authorization.k8s.io/v1/namespaces/%s/roles",
	"RoleBinding":                      "/apis/rbac.authorization.k8s.io/v1/namespaces/%s/rolebindings",
	"ClusterRole":                      "/apis/rbac.authorization.k8s.io/v1/clusterroles",
	"ClusterRoleBinding":               "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	"ValidatingAdmissionPolicy":        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
	"ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
	"CustomResourceDefinition":         "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
	"NetworkPolicy":                    "/apis/networking.k8s.io/v1/namespaces/%s/networkpolicies",
	"Topology":                         "/apis/kueue.x-k8s.io/v1beta2/topologies",
	"ResourceFlavor":                   "/apis/kueue.x-k8s.io/v1beta2/resourceflavors",
	"ClusterQueue":                     "/apis/kueue.x-k8s.io/v1beta2/clusterqueues",
	"WorkloadPriorityClass":            "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses",
	"LocalQueue":                       "/apis/kueue.x-k8s.io/v1beta2/namespaces/%s/localqueues",
	"AdmissionCheck":                   "/apis/kueue.x-k8s.io/v1beta2/admissionchecks",
	"NodeOverlay":                      "/apis/karpenter.sh/v1alpha1/nodeoverlays",
	"SecurityContextConstraints":       "/apis/security.openshift.io/v1/securitycontextconstraints",
	"ResourceQuota":                    "/api/v1/namespaces/%s/resourcequotas",
	"PodDisruptionBudget":              "/apis/policy/v1/namespaces/%s/poddisruptionbudgets",
	"PersistentVolumeClaim":            "/api/v1/namespaces/%s/persistentvolumeclaims",
	"HorizontalPodAutoscaler":          "/apis/autoscaling/v2/namespaces/%s/horizontalpodautoscalers",
	"RayCluster":                       "/apis/ray.io/v1/namespaces/%s/rayclusters",
	"PodMonitor":                       "/apis/monitoring.coreos.com/v1/namespaces/%s/podmonitors",
	"PrometheusRule":                   "/apis/monitoring.coreos.com/v1/namespaces/%s/prometheusrules",
	"RayJob":                           "/apis/ray.io/v1/namespaces/%s/rayjobs",
}

// placeOf is where the API has an object.
func placeOf(t *testing.T, o object) string {
	t.Helper()
	place, ok := places[o.Kind]
	if !ok {
		t.Fatalf("%s: kind %s is new to this test", o.file, o.Kind)
	}
	if strings.Contains(place, "%s") {
		place = fmt.Sprintf(place, o.Metadata.Namespace)
	}
	return place + "/" + o.Metadata.Name
}

// apply is `kubectl apply --server-side`, which refuses unknown fields; with
// dry, nothing is kept.
func (s *apiServer) apply(t *testing.T, o object, dry bool) {
	t.Helper()
	place := placeOf(t, o) + "?fieldManager=test&fieldValidation=Strict"
	if dry {
		place += "&dryRun=All"
	}
	var object fields
	if err := o.node.Decode(&object); err != nil {
		t.Fatal(err)
	}
	if err := s.do(t, nil, http.MethodPatch, place, plane.Apply, object, nil); err != nil {
		t.Errorf("%s: %s %s: %v", o.file, o.Kind, o.Metadata.Name, err)
	}
}

// install makes the base's objects and two Nodes, and waits until the policy is
// in force.
func (s *apiServer) install(t *testing.T) {
	t.Helper()
	for _, o := range base(t) {
		s.apply(t, o, false)
	}
	for _, name := range []string{"node-1", "node-2"} {
		object := fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": name, "labels": fields{"team": "blue"}}}
		if err := s.do(t, nil, http.MethodPost, "/api/v1/nodes", asJSON, object, nil); err != nil {
			t.Fatal(err)
		}
	}
	s.await(t, "the admission policy is in force", func() error {
		err := s.do(t, agentOn("node-1"), http.MethodPatch, "/api/v1/nodes/node-2", merge,
			fields{"metadata": fields{"labels": fields{"example.com/a": "b"}}}, nil)
		if err == nil || !strings.Contains(err.Error(), "the node that it runs on") {
			return fmt.Errorf("an agent may write to another node: %v", err)
		}
		return s.do(t, nil, http.MethodGet, gpuNodes, "", nil, nil)
	})
}

// The manifests against the real API server: it takes them as they are; what
// the agent does is allowed, and does what it should; what it does not do is
// refused, and by the rule that is there for it.
func TestAtTheAPIServer(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	t.Run("manifests", func(t *testing.T) {
		for _, dir := range kustomizations(t) {
			for _, o := range render(t, dir) {
				// What has a namespace of its own can be tried once that is there.
				s.apply(t, o, o.Kind != "Namespace" || o.Metadata.Name != placer)
			}
		}
		for _, o := range resources(t, "components/network-policy") {
			s.apply(t, o, true)
		}
		for _, o := range render(t, withComponent(t, "base", "components/monitoring")) {
			if o.APIVersion != "monitoring.coreos.com/v1" { // tests/monitoring reads these
				s.apply(t, o, true)
			}
		}
	})
	t.Run("what README, docs/pods.md and docs/nodes.md show", func(t *testing.T) {
		if err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/default/serviceaccounts", asJSON,
			fields{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": fields{"name": "default"}}, nil); err != nil {
			t.Fatal(err)
		}
		shown := regexp.MustCompile("(?s)```yaml\n(apiVersion: .*?)```").FindAllStringSubmatch(
			readme(t)+string(read(t, "../docs/pods.md"))+string(read(t, "../docs/nodes.md")), -1)
		if len(shown) < 4 {
			t.Fatalf("the pages show %d objects: this test does not look where they are", len(shown))
		}
		for _, text := range shown {
			// This API server has no namespace of the agent's.
			here := strings.ReplaceAll(text[1], "namespace: "+name, "namespace: default")
			for _, o := range documents(t, "what is shown", []byte(here)) {
				o.Metadata.Namespace = "default"
				s.apply(t, o, true)
			}
		}
	})
	t.Run("slices of every recorded node", func(t *testing.T) { slicesAtTheAPIServer(t, s) })
	const node, status = "/api/v1/nodes/node-1", "/api/v1/nodes/node-1/status"

	// What a kubelet wrote.
	kubelet := fields{"status": fields{
		"capacity": fields{"cpu": "2"}, "allocatable": fields{"cpu": "1"},
		"addresses": []fields{{"type": "InternalIP", "address": "10.0.0.1"}},
		"nodeInfo":  fields{"kubeletVersion": "v1.36.0"},
		"conditions": []fields{
			{"type": "MemoryPressure", "status": "False", "reason": "R", "message": "m", "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"},
			{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "m", "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"},
		},
	}}
	if err := s.do(t, nil, http.MethodPatch, status, strategic, kubelet, nil); err != nil {
		t.Fatal(err)
	}

	t.Run("conditions", func(t *testing.T) { s.tryConditions(t, node) })
	t.Run("allocatable", func(t *testing.T) { s.tryAllocatable(t, status) })
	t.Run("evictions", s.tryEvictions)
	t.Run("endings", s.tryEndings)
	t.Run("slices", s.trySlices)
	t.Run("GPUNodes", s.tryGPUNodes)
	t.Run("the autoscaler that the docs show", s.tryShownAutoscaler)
	t.Run("published slices", func(t *testing.T) { publishAtTheAPIServer(t, s) })
	t.Run("claims", func(t *testing.T) { claimsAtTheAPIServer(t, s) })

	condition := func(kind, status string) fields {
		return fields{"status": fields{"conditions": []fields{{"type": kind, "status": status}}}}
	}
	removed := func(kind string) fields {
		return fields{"status": fields{"conditions": []fields{{"type": kind, "$patch": "delete"}}}}
	}
	meta := func(field, key string, value any) fields {
		return fields{"metadata": fields{field: fields{key: value}}}
	}
	for _, test := range []struct {
		name, path, kind string
		body             fields
		// refused is in the server's words; empty means that it is allowed.
		refused string
	}{
		{"own label", node, merge, meta("labels", "example.com/gpu.partition.state", "applied"), ""},
		{"own label away", node, merge, meta("labels", "example.com/gpu.partition.state", nil), ""},
		{"what chooses the partition", node, merge, meta("labels", "example.com/gpu.partition", "default"), "only labels of its own"},
		{"what draws an agent to the node", node, merge, meta("labels", "example.com/gpu.node", "true"), "only labels of its own"},
		{"what has it let go of the driver", node, merge, meta("labels", "example.com/gpu.driver-release", "true"), "only labels of its own"},
		{"a label below the domain", node, merge, meta("labels", "example.com/other", "b"), "only labels of its own"},
		{"an annotation below the domain", node, merge, meta("annotations", "example.com/other", "b"), "only annotations of its own"},
		{"a condition below the domain", status, strategic, condition("example.com/Other", "True"), "only conditions of its own"},
		{"own annotation", node, merge, meta("annotations", "example.com/gpu.partition.message", "m"), ""},
		{"own condition", status, strategic, condition("example.com/GPUHealthy", "False"), ""},
		{"whether pods can be sent here", status, strategic, condition("example.com/GPUReady", "False"), ""},
		{"that the node is not to be taken away", node, merge, meta("annotations", "cluster-autoscaler.kubernetes.io/scale-down-disabled", "true"), ""},
		{"that it may be", node, merge, meta("annotations", "cluster-autoscaler.kubernetes.io/scale-down-disabled", nil), ""},
		{"another word to Cluster Autoscaler", node, merge, meta("annotations", "cluster-autoscaler.kubernetes.io/safe-to-evict", "true"), "only annotations of its own"},
		{"own condition away", status, strategic, removed("example.com/GPUHealthy"), ""},
		{"nothing", status, strategic, fields{}, ""},
		{"a label of GPU Feature Discovery's", node, merge, meta("labels", "nvidia.com/gpu.product", "X"), ""},
		{"one of an instance", node, merge, meta("labels", "nvidia.com/mig-1c.3g.40gb.me.all.engines.copy", "1"), ""},
		{"one of GPU Feature Discovery's away", node, merge, meta("labels", "nvidia.com/gpu.product", nil), ""},

		{"another node", "/api/v1/nodes/node-2", merge, meta("labels", "example.com/a", "b"), "the node that it runs on"},
		{"another node's condition", "/api/v1/nodes/node-2/status", strategic, condition("example.com/GPUHealthy", "False"), "the node that it runs on"},
		{"a label of others", node, merge, meta("labels", "team", "red"), "only labels of its own"},
		{"whether NVIDIA's operator deploys its device plugin", node, merge, meta("labels", "nvidia.com/gpu.deploy.device-plugin", "false"), "only labels of its own"},
		{"what NVIDIA's MIG manager does", node, merge, meta("labels", "nvidia.com/mig.config", "all-1g.10gb"), "only labels of its own"},
		{"that there are GPUs", node, merge, meta("labels", "nvidia.com/gpu.present", "true"), "only labels of its own"},
		{"a label that ends like one of them", node, merge, meta("labels", "not-nvidia.com/gpu.product", "X"), "only labels of its own"},
		{"a label that begins like one of them", node, merge, meta("labels", "nvidia.com/gpu.product.x", "X"), "only labels of its own"},
		{"a label of others, by the status", status, merge, meta("labels", "team", "red"), "only labels of its own"},
		{"a label taken away, by the status", status, merge, meta("labels", "team", nil), "only labels of its own"},
		{"an annotation of others", node, merge, meta("annotations", "a", "b"), "only annotations of its own"},
		{"an annotation of others, by the status", status, merge, meta("annotations", "a", "b"), "only annotations of its own"},
		{"a cordon", node, merge, fields{"spec": fields{"unschedulable": true}}, "only labels and annotations"},
		{"a finalizer", node, merge, fields{"metadata": fields{"finalizers": []string{"example.com/x"}}}, "only labels and annotations"},
		{"the kubelet's word", status, strategic, condition("Ready", "False"), "only conditions of its own"},
		{"the kubelet's word away", status, strategic, removed("Ready"), "only conditions of its own"},
		{"a condition of others", status, strategic, condition("other.example.com/GPUHealthy", "True"), "only conditions of its own"},
		{"a condition that begins alike", status, strategic, condition("example.community/GPUHealthy", "True"), "only conditions of its own"},
		{"all conditions", status, merge, fields{"status": fields{"conditions": nil}}, "only conditions of its own"},
		{"devices that are not there", status, merge, fields{"status": fields{"capacity": fields{"example.com/gpu": "99"}}}, "only conditions of the status"},
		{"allocatable away", status, merge, fields{"status": fields{"allocatable": nil}}, "only lowers the allocatable of its own"},
		{"a field that was not there", status, merge, fields{"status": fields{"volumesInUse": []string{"v"}}}, "only conditions of the status"},
		{"the address", status, merge, fields{"status": fields{"addresses": []fields{{"type": "InternalIP", "address": "10.0.0.2"}}}}, "only conditions of the status"},
		{"nodeInfo", status, merge, fields{"status": fields{"nodeInfo": fields{"kubeletVersion": "v9"}}}, "only conditions of the status"},
	} {
		err := s.do(t, agentOn("node-1"), http.MethodPatch, test.path, test.kind, test.body, nil)
		switch {
		case test.refused == "" && err != nil:
			t.Errorf("%s: %v", test.name, err)
		case test.refused != "" && err == nil:
			t.Errorf("%s is allowed", test.name)
		case test.refused != "" && !strings.Contains(err.Error(), test.refused):
			t.Errorf("%s: %v, want a refusal that says %q", test.name, err, test.refused)
		}
	}
	if err := s.do(t, agentOn("node-1"), http.MethodPut, status, asJSON, fields{}, nil); err == nil || !strings.Contains(err.Error(), `cannot update resource`) {
		t.Errorf("an update in place of a patch: %v, want that RBAC refuses it", err)
	}
	if err := s.do(t, accountOn(name, name, ""), http.MethodPatch, node, merge, meta("labels", "example.com/gpu.partition.state", "applied"), nil); err == nil || !strings.Contains(err.Error(), "the node that it runs on") {
		t.Errorf("by a token that names no node: %v, want a refusal", err)
	}
	// The policy is for the agent's account; the kubelet's own writes pass.
	if err := s.do(t, nil, http.MethodPatch, status, strategic, condition("Ready", "Unknown"), nil); err != nil {
		t.Errorf("somebody else's write: %v", err)
	}
	t.Run("labels", func(t *testing.T) { s.tryLabels(t, node) })
	t.Run("startup taint", s.tryStartupTaint)
}

// agentClient is internal/kube/agentkube, in the name of the agent on node-1.
func (s *apiServer) agentClient(t *testing.T) *agentkube.Client {
	t.Helper()
	return s.clientAs(t, name, name)
}

// asOn is a kubeconfig's user who has a service account's token of a pod on a node.
func asOn(namespace, account, node string) map[string]any {
	return fields{"as": "system:serviceaccount:" + namespace + ":" + account, "as-groups": []string{"system:authenticated"},
		"as-user-extra": fields{"authentication.kubernetes.io/node-name": []string{node}}}
}

// clientAs is internal/kube/agentkube with a service account's token of a pod on node-1.
func (s *apiServer) clientAs(t *testing.T, namespace, account string) *agentkube.Client {
	t.Helper()
	client, err := agentkube.New(agentkube.Options{NodeName: "node-1", Options: kube.Options{Kubeconfig: s.Kubeconfig(t, asOn(namespace, account, "node-1")), Domain: "example.com",
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil))}})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// tryConditions lets internal/kube/agentkube speak to the real server in the agent's
// name: each patch does what it is for, and the kubelet's conditions stay.
func (s *apiServer) tryConditions(t *testing.T, node string) {
	read := func() []any {
		t.Helper()
		var object struct {
			Status struct{ Conditions []any }
		}
		if err := s.do(t, nil, http.MethodGet, node, "", nil, &object); err != nil {
			t.Fatal(err)
		}
		return object.Status.Conditions
	}
	theirs := read()
	client := s.agentClient(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const kind = "example.com/GPUHealthy"
	var since string
	for i, want := range []agentkube.Condition{
		{Type: kind, Status: agentkube.True, Reason: "GPUsHealthy", Message: "all 4"},
		{Type: kind, Status: agentkube.True, Reason: "GPUsHealthy", Message: "all 3"},
		{Type: kind, Status: agentkube.False, Reason: "GPUUnhealthy", Message: "GPU-1: Xid 79"},
	} {
		if err := client.SetCondition(ctx, want); err != nil {
			t.Fatal(err)
		}
		list := read()
		if len(list) != len(theirs)+1 || fmt.Sprint(list[1:]) != fmt.Sprint(theirs) {
			t.Fatalf("conditions\n%v, want ours and the kubelet's\n%v", list, theirs)
		}
		ours := list[0].(fields)
		if ours["type"] != kind || ours["status"] != string(want.Status) || ours["message"] != want.Message || ours["lastHeartbeatTime"] == nil {
			t.Errorf("condition %v, want %v", ours, want)
		}
		if i == 1 && ours["lastTransitionTime"] != since {
			t.Errorf("other words moved the time of the transition from %v to %v", since, ours["lastTransitionTime"])
		}
		since, _ = ours["lastTransitionTime"].(string)
	}
	for range 2 {
		if err := client.RemoveCondition(ctx, kind); err != nil {
			t.Fatal(err)
		}
		if list := read(); fmt.Sprint(list) != fmt.Sprint(theirs) {
			t.Fatalf("conditions\n%v, want the kubelet's alone\n%v", list, theirs)
		}
	}
}

// tryLabels lets internal/kube/agentkube label the Node at the real server, in the agent's
// name and under its policy: all in one request, and not again; what somebody else
// has is left alone and taken up when it becomes free; it leaves nothing behind.
func (s *apiServer) tryLabels(t *testing.T, node string) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	type object struct {
		Metadata struct {
			ResourceVersion     string
			Labels, Annotations map[string]string
		}
	}
	get := func() object {
		t.Helper()
		var o object
		if err := s.do(t, nil, http.MethodGet, node, "", nil, &o); err != nil {
			t.Fatal(err)
		}
		return o
	}
	if err := s.do(t, nil, http.MethodPatch, node, merge, fields{"metadata": fields{"annotations": nil}}, nil); err != nil {
		t.Fatal(err)
	}
	before := get()
	expect := func(what string, labels map[string]string, annotations map[string]string) {
		t.Helper()
		want := maps.Clone(before.Metadata.Labels)
		maps.Copy(want, labels)
		got := get()
		if !maps.Equal(got.Metadata.Labels, want) {
			t.Errorf("%s: labels\n%v, want\n%v", what, got.Metadata.Labels, want)
		}
		want = maps.Clone(before.Metadata.Annotations)
		if want == nil {
			want = map[string]string{}
		}
		maps.Copy(want, annotations)
		if len(got.Metadata.Annotations)+len(want) > 0 && !maps.Equal(got.Metadata.Annotations, want) {
			t.Errorf("%s: annotations\n%v, want\n%v", what, got.Metadata.Annotations, want)
		}
	}
	client := s.agentClient(t)
	mark := func(m agentkube.Marks) {
		t.Helper()
		if err := client.Mark(ctx, m); err != nil {
			t.Fatal(err)
		}
	}
	// someone changes labels in another manager's name.
	someone := func(labels fields) {
		t.Helper()
		if err := s.do(t, nil, http.MethodPatch, node+"?fieldManager=nfd-master", merge, fields{"metadata": fields{"labels": labels}}, nil); err != nil {
			t.Fatal(err)
		}
	}

	// What the agent says of a node with all kinds of instances.
	inv, err := config.ReadInventory(read(t, "../tests/testdata/a100-80-mig.json"))
	if err != nil {
		t.Fatal(err)
	}
	wanted := []config.Want{{GPU: inv.GPUs[0].UUID, Mode: config.MIG, Geometry: []mig.Count{
		{Profile: profile(t, "1g.10gb+me"), N: 1}, {Profile: profile(t, "1c.3g.40gb"), N: 3}}}}
	n := label.Node{Inventory: inv, Graph: topology.New(inv), Partition: "research", Wanted: wanted}
	own, guests := label.Own("example.com", n), label.NVIDIA(n)
	if len(own) < 8 || len(guests) < 40 {
		t.Fatalf("%d labels and %d of GPU Feature Discovery's: this test does not look where they are", len(own), len(guests))
	}
	all := maps.Clone(own)
	maps.Copy(all, guests)
	message := map[string]string{"example.com/gpu.partition.message": "m"}
	mark(agentkube.Marks{Labels: own, Annotations: message, Guests: guests})
	expect("all at once", all, message)
	version := get().Metadata.ResourceVersion
	mark(agentkube.Marks{Labels: own, Annotations: message, Guests: guests})
	if now := get().Metadata.ResourceVersion; now != version {
		t.Errorf("the same again wrote the Node from version %s to %s", version, now)
	}

	// The server would refuse a message of megabytes, and the labels beside it.
	const state = "example.com/gpu.partition.state"
	own[state] = "invalid"
	mark(agentkube.Marks{Labels: own, Guests: guests, Annotations: map[string]string{"example.com/gpu.partition.message": strings.Repeat("日本語 ", 800_000)}})
	if m := get().Metadata; m.Labels[state] != "invalid" || len(m.Annotations["example.com/gpu.partition.message"]) > 4<<10 {
		t.Errorf("with a long message: state %q, %d bytes", m.Labels[state], len(m.Annotations["example.com/gpu.partition.message"]))
	}
	delete(own, state)

	// Somebody overwrites a label of each kind, and takes one of each away.
	someone(fields{"example.com/gpu.count": "99", "nvidia.com/gpu.count": "99", "example.com/gpu.mode": nil, "nvidia.com/gpu.family": nil})
	mark(agentkube.Marks{Labels: own, Guests: guests})
	all["nvidia.com/gpu.count"] = "99"
	expect("after somebody's hand", all, nil)
	someone(fields{"nvidia.com/gpu.count": nil})
	mark(agentkube.Marks{Labels: own, Guests: guests})
	all["nvidia.com/gpu.count"] = guests["nvidia.com/gpu.count"]
	expect("a label that has become free", all, nil)

	// Somebody applies one with the very value that it has, and one of ours.
	theirs := fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"labels": fields{
		"nvidia.com/gpu.family": guests["nvidia.com/gpu.family"], "example.com/gpu.count": own["example.com/gpu.count"]}}}
	if err := s.do(t, nil, http.MethodPatch, node+"?fieldManager=gfd", plane.Apply, theirs, nil); err != nil {
		t.Fatal(err)
	}
	mark(agentkube.Marks{Labels: map[string]string{"example.com/gpu.partition.state": "failed"}, KeepLabels: true})
	all["example.com/gpu.partition.state"] = "failed"
	expect("what cannot be told is kept", all, nil)
	mark(agentkube.Marks{Labels: own, Guests: guests})
	delete(all, "example.com/gpu.partition.state")
	expect("together with somebody", all, nil)

	// All goes that is the agent's: also what an older agent has patched, and what
	// somebody has written too, below the agent's domain.
	if err := s.do(t, nil, http.MethodPatch, node+"?fieldManager=gpu-agent", merge,
		fields{"metadata": fields{"labels": fields{"example.com/gpu.nvlink-domain": "1"}, "annotations": message}}, nil); err != nil {
		t.Fatal(err)
	}
	mark(agentkube.Marks{})
	expect("all gone", map[string]string{"nvidia.com/gpu.family": guests["nvidia.com/gpu.family"]}, nil)

	// An agent's Node that is not there is not made.
	if err := s.do(t, nil, http.MethodDelete, node, asJSON, nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := client.Mark(ctx, agentkube.Marks{Labels: own}); err == nil {
		t.Error("the Node was made by the agent's request")
	}
	if err := s.do(t, nil, http.MethodGet, node, "", nil, nil); err == nil {
		t.Error("the Node is there")
	}
	if err := s.do(t, nil, http.MethodPost, "/api/v1/nodes", asJSON, fields{"apiVersion": "v1", "kind": "Node",
		"metadata": fields{"name": "node-1", "labels": before.Metadata.Labels}}, nil); err != nil {
		t.Fatal(err)
	}
	before = get()
	someone(fields{"nvidia.com/gpu.memory": "1"})
	mark(agentkube.Marks{Labels: own, Annotations: message, Guests: guests})
	all["nvidia.com/gpu.memory"] = "1"
	expect("on a new Node", all, message)
	mark(agentkube.Marks{})
	expect("cleaned up", map[string]string{"nvidia.com/gpu.memory": "1"}, nil)
	someone(fields{"nvidia.com/gpu.memory": nil})
}

func profile(t *testing.T, name string) mig.Name {
	t.Helper()
	p, err := mig.Parse(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// tryEvictions lets internal/kube/agentkube evict pods at the real server: with the base
// alone it may not, with the component it can, and only a pod that it names by
// its UID; a budget's no is told from a failure.
func (s *apiServer) tryEvictions(t *testing.T) {
	const train = "/api/v1/namespaces/train"
	create := func(path string, object fields) {
		t.Helper()
		if err := s.do(t, nil, http.MethodPost, path, asJSON, object, nil); err != nil {
			t.Fatal(err)
		}
	}
	create("/api/v1/namespaces", fields{"apiVersion": "v1", "kind": "Namespace", "metadata": fields{"name": "train"}})
	create(train+"/serviceaccounts", fields{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": fields{"name": "default"}})
	type pod struct {
		Metadata struct {
			UID, DeletionTimestamp     string
			DeletionGracePeriodSeconds int
		}
	}
	read := func(name string) pod {
		t.Helper()
		var p pod
		if err := s.do(t, nil, http.MethodGet, train+"/pods/"+name, "", nil, &p); err != nil {
			t.Fatal(err)
		}
		return p
	}
	// A pod that a kubelet has reported as running, and ready.
	limits := fields{}
	start := func(name, app string) workload.Pod {
		t.Helper()
		create(train+"/pods", fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name, "labels": fields{"app": app}},
			"spec": fields{"nodeName": "node-1", "automountServiceAccountToken": false, "tolerations": []fields{{"operator": "Exists"}},
				"containers": []fields{{"name": "first", "image": "none"}, {"name": "main", "image": "none", "resources": fields{"limits": limits}}}}})
		if err := s.do(t, nil, http.MethodPatch, train+"/pods/"+name+"/status", strategic, fields{"status": fields{"phase": "Running",
			"conditions": []fields{{"type": "Ready", "status": "True"}}}}, nil); err != nil {
			t.Fatal(err)
		}
		return workload.Pod{Namespace: "train", Name: name, UID: read(name).Metadata.UID}
	}
	budget := func(name, app string) {
		t.Helper()
		const budgets = "/apis/policy/v1/namespaces/train/poddisruptionbudgets"
		create(budgets, fields{"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": fields{"name": name},
			"spec": fields{"minAvailable": 1, "selector": fields{"matchLabels": fields{"app": app}}}})
		// What its controller would write.
		if err := s.do(t, nil, http.MethodPatch, budgets+"/"+name+"/status", merge, fields{"status": fields{"observedGeneration": 1,
			"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	client := s.agentClient(t)
	free, guarded, twice := start("free", "free"), start("guarded", "guarded"), start("twice", "twice")
	budget("guard", "guarded")
	budget("first", "twice")
	budget("second", "twice")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	if err := client.Evict(ctx, free); err == nil || !strings.Contains(err.Error(), "component evict") {
		t.Fatalf("with the base alone: %v, want a refusal that names the component", err)
	}
	for _, o := range resources(t, "components/evict") {
		s.apply(t, o, false)
	}
	for _, test := range []struct {
		name, refused string
		options       fields
	}{
		{"by name alone", "names by its UID", nil},
		{"at once", "its grace period", fields{"preconditions": fields{"uid": "none"}, "gracePeriodSeconds": 0}},
	} {
		// Right and policy come into force a moment after they were written.
		s.await(t, "the agent may not evict "+test.name, func() error {
			err := s.do(t, agentOn("node-1"), http.MethodPost, train+"/pods/none/eviction", asJSON, fields{"apiVersion": "policy/v1",
				"kind": "Eviction", "metadata": fields{"name": "none", "namespace": "train"}, "deleteOptions": test.options}, nil)
			if err == nil || !strings.Contains(err.Error(), test.refused) {
				return fmt.Errorf("%v, want a refusal that says %q", err, test.refused)
			}
			return nil
		})
	}

	other := free
	other.UID = "0aa7d4f1-0000-4000-8000-000000000000"
	if err := client.Evict(ctx, other); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("a pod of that name with another UID: %v, want gpu.ErrNotFound", err)
	}
	if err := client.Evict(ctx, guarded); !errors.Is(err, agentkube.ErrBudget) || !strings.Contains(err.Error(), "guard needs 1 healthy pods") {
		t.Errorf("a pod with a budget: %v, want ErrBudget and what the budget needs", err)
	}
	if err := client.Evict(ctx, twice); err == nil || errors.Is(err, agentkube.ErrBudget) || !strings.Contains(err.Error(), "more than one PodDisruptionBudget") {
		t.Errorf("a pod with two budgets: %v, want the server's words", err)
	}
	for _, p := range []workload.Pod{free, guarded, twice} {
		if at := read(p.Name).Metadata.DeletionTimestamp; at != "" {
			t.Errorf("%s is being deleted since %s", p, at)
		}
	}
	// Only a pod of the spot tier is given another grace than its own.
	if err := client.EvictWithin(ctx, free, 7*time.Second); err == nil || !strings.Contains(err.Error(), "unless it asks for a resource of the spot tier") {
		t.Errorf("a guaranteed pod, with another grace: %v", err)
	}
	limits = fields{"example.com/gpu-mem.spot": "2"}
	spot := start("spot", "spot")
	if err := client.EvictWithin(ctx, spot, 7*time.Second); err != nil {
		t.Errorf("a pod of the spot tier: %v", err)
	}
	if is := read("spot").Metadata; is.DeletionTimestamp == "" || is.DeletionGracePeriodSeconds != 7 {
		t.Errorf("the pod of the spot tier: %+v", is)
	}
	if err := client.Evict(ctx, free); err != nil {
		t.Fatal(err)
	}
	if read("free").Metadata.DeletionTimestamp == "" {
		t.Error("the pod is not being deleted")
	}
	if err := client.Evict(ctx, workload.Pod{Namespace: "train", Name: "none", UID: free.UID}); err != nil {
		t.Errorf("a pod that does not exist: %v", err)
	}
}
