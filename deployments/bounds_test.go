// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/liqo"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/tests/plane"
)

// letters are a text of so many.
func letters(n int) string { return strings.Repeat("x", n) }

// managedBy is an entry of metadata.managedFields whose fields have so many letters. It is about
// metadata, of a status about that: the server leaves others out.
func managedBy(version, subresource string, n int) []fields {
	of := fields{"f:metadata": fields{"f:annotations": fields{"f:" + letters(n): fields{}}}}
	if subresource != "" {
		of = fields{"f:status": fields{"f:" + letters(n): fields{}}}
	}
	return []fields{{"manager": "thief", "operation": "Update", "apiVersion": version, "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": of, "subresource": subresource}}
}

// inForce waits until a write is refused with these words.
func (s *apiServer) inForce(t *testing.T, as http.Header, y try) {
	t.Helper()
	s.await(t, "the policy is in force", func() error {
		if err := s.do(t, as, y.method, y.path+"?dryRun=All", y.kind, y.body, nil); err == nil || !strings.Contains(err.Error(), y.refused) {
			return fmt.Errorf("%s: %.300v, want a refusal that says %q", y.name, err, y.refused)
		}
		return nil
	})
}

// large is nearly as much as etcd takes for an object. 1,500 such objects fill it.
const large = 1_400_000

// A token of one node's agent cannot fill etcd by Events: each is as short as the agent's own.
func TestAgentsEventsAreBounded(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	as := agentOn("node-1")
	with := func(change func(fields)) fields {
		e := anEvent("tried", "node-1")
		change(e)
		return e
	}
	set := func(key string, value any) fields { return with(func(e fields) { e[key] = value }) }
	const bound, newer = "a message of up to 1,024 characters", "/apis/events.k8s.io/v1/namespaces/default/events"
	create := func(name string, body fields, refused string) try {
		return try{name, http.MethodPost, events + "?dryRun=All", asJSON, body, refused}
	}
	s.inForce(t, as, try{"another's name", http.MethodPost, events, asJSON, set("reportingComponent", "kubelet"), "in its own name"})
	about := with(func(e fields) {
		e["metadata"].(fields)["name"] = "longest"
		e["message"], e["reason"], e["action"] = strings.Repeat("\n", 1024), letters(128), letters(128)
		e["involvedObject"] = fields{"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-1", "fieldPath": letters(300)}
	})
	s.try(t, as, []try{
		{"the longest of its own", http.MethodPost, events, asJSON, about, ""},
		create("a message of 1.4 MB", set("message", letters(large)), bound),
		create("a message of one letter too many", set("message", letters(1025)), bound),
		create("a reason of one too many", set("reason", letters(129)), bound),
		create("a long action", set("action", letters(129)), bound),
		create("a long type", set("type", letters(1000)), bound),
		create("a long name of what it is about", with(func(e fields) { e["involvedObject"].(fields)["fieldPath"] = letters(large) }), bound),
		create("a long UID", with(func(e fields) { e["involvedObject"].(fields)["uid"] = letters(large) }), bound),
		create("something related", set("related", fields{"kind": "Pod", "name": letters(large)}), bound),
		create("long managed fields", with(func(e fields) { e["metadata"].(fields)["managedFields"] = managedBy("v1", "", large) }), bound),
		create("a long generateName", with(func(e fields) { e["metadata"].(fields)["generateName"] = letters(large) }), bound),
		{"managed fields of one that is there", http.MethodPatch, events + "/longest", merge, fields{"metadata": fields{"managedFields": managedBy("v1", "", large)}}, bound},
	})

	// RBAC does not grant the newer API. Where somebody adds it, the policy judges its Events, too.
	role := fields{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": fields{"name": "newer"},
		"rules": []fields{{"apiGroups": []string{"events.k8s.io"}, "resources": []string{"events"}, "verbs": []string{"create"}}}}
	s.create(t, places["ClusterRole"], role)
	s.create(t, places["ClusterRoleBinding"], fields{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": fields{"name": "newer"},
		"roleRef": fields{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "newer"}, "subjects": []fields{{"kind": "ServiceAccount", "name": name, "namespace": name}}})
	note := func(n int) fields {
		return fields{"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": fields{"name": "noted", "namespace": "default"}, "eventTime": "2026-01-01T00:00:00.000000Z",
			"regarding": fields{"apiVersion": "v1", "kind": "Node", "name": "node-1"}, "type": "Normal", "reason": "R", "action": "A", "note": letters(n),
			"reportingController": "example.com/gpu-agent", "reportingInstance": "node-1"}
	}
	s.await(t, "the right is in force", func() error {
		if err := s.do(t, as, http.MethodPost, newer+"?dryRun=All", asJSON, note(1), nil); err == nil || strings.Contains(err.Error(), "cannot create resource") {
			return fmt.Errorf("an Event of the newer kind: %v", err)
		}
		return nil
	})
	s.try(t, as, []try{
		// The agent's have the field source, which that API does not take.
		{"a short note", http.MethodPost, newer, asJSON, note(1), "in its own name"},
		{"a note of one letter too many", http.MethodPost, newer, asJSON, note(1025), "can have at most 1024 characters"},
	})
}

// What an agent says of its Node is as short as the program makes it, and there is nothing else
// that it could write there.
func TestAgentsReportsAreBounded(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	const node, status, own = "/api/v1/nodes/node-1", "/api/v1/nodes/node-1/status", "example.com/GPUReady"
	as := agentOn("node-1")
	meta := func(field string, value any) fields { return fields{"metadata": fields{field: value}} }
	condition := func(change fields) fields {
		c := fields{"type": own, "status": "True", "reason": "R", "message": "m"}
		for key, value := range change {
			c[key] = value
		}
		return fields{"status": fields{"conditions": []fields{c}}}
	}
	annotation := func(key, value string) fields { return meta("annotations", fields{key: value}) }
	labels := fields{}
	for i := range 1100 {
		labels[fmt.Sprintf("nvidia.com/mig-1g.%dgb.count", i)] = "1"
	}
	twice := []fields{}
	for range 3 {
		twice = append(twice, fields{"type": own, "status": "True", "reason": "R", "message": "m"})
	}
	const text, says, only, fieldsOf = "an annotation of the GPU agent's has up to 4,096", "a condition of the GPU agent's is there once", "only labels and annotations, and conditions", "who manages which field"
	s.try(t, as, []try{
		{"the longest message of a partition", http.MethodPatch, node, merge, annotation("example.com/gpu.partition.message", letters(4096)), ""},
		{"one letter more", http.MethodPatch, node, merge, annotation("example.com/gpu.partition.message", letters(4097)), text},
		{"250 kB", http.MethodPatch, node, merge, annotation("example.com/gpu.partition.reason", letters(250_000)), text},
		{"that the node stays, in 250 kB", http.MethodPatch, node, merge, annotation("cluster-autoscaler.kubernetes.io/scale-down-disabled", letters(250_000)), text},
		{"the longest condition", http.MethodPatch, status, strategic, condition(fields{"message": strings.Repeat("\n", 1024), "reason": letters(128)}), ""},
		{"a message of one letter more", http.MethodPatch, status, strategic, condition(fields{"message": letters(1025)}), says},
		{"a message of 1 MB", http.MethodPatch, status, strategic, condition(fields{"message": letters(1_000_000)}), says},
		{"a long reason", http.MethodPatch, status, strategic, condition(fields{"reason": letters(129)}), says},
		{"a long status", http.MethodPatch, status, strategic, condition(fields{"status": letters(1_000_000)}), says},
		{"its condition three times", http.MethodPatch, status, merge, fields{"status": fields{"conditions": twice}}, says},
		{"too many labels", http.MethodPatch, node, merge, meta("labels", labels), "up to 1,024 labels"},
		{"a field that is for new objects", http.MethodPatch, node, merge, meta("generateName", letters(50)), only},
		{"the same, by the status", http.MethodPatch, status, merge, meta("generateName", letters(1_000_000)), only},
		{"long managed fields", http.MethodPatch, node, merge, meta("managedFields", managedBy("v1", "", 1_000_000)), fieldsOf},
	})
	// What somebody else has put there does not hold the agent up.
	if err := s.do(t, nil, http.MethodPatch, node, merge, annotation("example.com/gpu.partition.message", letters(5000)), nil); err != nil {
		t.Fatal(err)
	}
	s.try(t, as, []try{{"a label beside a text of somebody's", http.MethodPatch, node, merge, meta("labels", fields{"example.com/gpu.partition.state": "applied"}), ""}})

	// The GPUNode.
	s.create(t, gpuNodes, aGPUNode("node-1"))
	gpuNode := func(message, reason string) fields {
		ready := gpunode.Condition{Type: gpunode.Ready, Status: gpunode.True, Reason: "R", LastTransitionTime: time.Unix(1e9, 0)}
		of := ready
		of.Type, of.Message = gpunode.Healthy, message
		g := fields{"uuid": "GPU-0", "index": 0, "memoryMiB": 1, "total": 0, "free": 0, "largest": 0, "conditions": []any{of}}
		return fields{"status": fields{"summary": fields{"gpus": 1, "unhealthy": 0, "saturationPercent": 0}, "gpus": []fields{g},
			"conditions": []fields{{"type": "Ready", "status": "True", "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}}}}
	}
	const mine, short = gpuNodes + "/node-1/status", "a condition of a GPUNode has a message of up to 4,096"
	owner := fields{"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": letters(100_000)}
	s.try(t, as, []try{
		{"the longest that it says of a GPU", http.MethodPatch, mine, merge, gpuNode(letters(4096), letters(128)), ""},
		{"one letter more", http.MethodPatch, mine, merge, gpuNode(letters(4097), "R"), short},
		{"a long reason", http.MethodPatch, mine, merge, gpuNode("", letters(129)), short},
		{"an owner with a long UID", http.MethodPatch, gpuNodes + "/node-1", merge, meta("ownerReferences", []fields{owner}), "a GPUNode has up to"},
		{"a label", http.MethodPatch, gpuNodes + "/node-1", merge, meta("labels", fields{"a": "b"}), "no labels, annotations or finalizers"},
		{"a field that is for new objects", http.MethodPatch, gpuNodes + "/node-1", merge, meta("generateName", letters(100_000)), "no labels, annotations or finalizers"},
		{"long managed fields", http.MethodPatch, gpuNodes + "/node-1", merge, meta("managedFields", managedBy("example.com/v1alpha1", "", 1_000_000)), "a GPUNode has up to"},
	})
}

// The program's own texts, however long their reasons are, fit into the policies' bounds.
func TestAgentsLongestTextsAreTaken(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	client := s.agentClient(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	done := make(chan error, 1)
	sender := agentkube.NewEvents(client, nil)
	go func() { done <- sender.Run(ctx) }()
	for _, text := range []string{letters(100_000), strings.Repeat("\x01", 100_000), strings.Repeat("日本語", 100_000)} {
		sender.Event(workload.Pod{}, agentkube.Warning, letters(1000), text)
		if err := client.SetCondition(ctx, agentkube.Condition{Type: "example.com/GPUReady", Status: agentkube.False, Reason: letters(1000), Message: text}); err != nil {
			t.Errorf("%.300v", err)
		}
		if err := client.Mark(ctx, agentkube.Marks{Annotations: map[string]string{"example.com/gpu.partition.message": text}}); err != nil {
			t.Errorf("%.300v", err)
		}
		of := &gpunode.Status{Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.False, Reason: "R", Message: text, LastTransitionTime: time.Unix(1e9, 0)}},
			GPUs: []gpunode.GPU{sharedGPU(0, gpunode.True)}}
		of.GPUs[0].Conditions[0].Message = text
		of.Sum()
		of.Cut()
		if _, err := client.WriteGPUNode(ctx, of); err != nil {
			t.Errorf("%.300v", err)
		}
	}
	s.await(t, "the Events are there", func() error {
		var list struct {
			Items []struct{ ReportingController, ReportingComponent, Reason, Note, Message string }
		}
		err := s.do(t, nil, http.MethodGet, events, "", nil, &list)
		ours := 0
		var others []string // the API server's own controllers say something when they start on a busy machine
		for _, e := range list.Items {
			if by := cmp.Or(e.ReportingController, e.ReportingComponent); strings.HasSuffix(by, "gpu-agent") {
				ours++
			} else {
				others = append(others, fmt.Sprintf("%s %s %.200s", by, e.Reason, e.Note+e.Message))
			}
		}
		if err != nil || ours != 3 {
			return fmt.Errorf("%d Events, and of others %q: %v", ours, others, err)
		}
		return nil
	})
	cancel()
	<-done
}

// A ResourceSlice in another node's pool hides what that node offers. The policy holds the
// pool's name to the node, so that a pod gets the other node's free GPU.
func TestAgentPublishesInItsOwnPoolsAlone(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	for _, o := range resources(t, "components/dra") {
		s.apply(t, o, false)
	}
	s.Scheduler(t, 0)
	for _, n := range []string{"gpu-1", "gpu-2"} {
		s.node(t, n, fields{"cpu": "64", "memory": "64Gi", "pods": "1000"})
	}
	s.namespace(t, "train")
	thief := agentOn("gpu-1")
	slice := func(node, name, pool string, generation int) fields {
		return fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": fields{"name": name},
			"spec": fields{"driver": "gpus.example.com", "nodeName": node, "pool": fields{"name": pool, "generation": generation, "resourceSliceCount": 1},
				"devices": []fields{{"name": "gpu-0", "attributes": fields{"type": fields{"string": "gpu"}}}}}}
	}
	with := func(field string, value any) fields {
		o := slice("gpu-1", "tried", "gpu-1/a100", 1)
		o["metadata"].(fields)[field] = value
		return o
	}
	tainted := slice("gpu-1", "taints", "gpu-2/a100", 1)
	tainted["spec"].(fields)["devices"].([]fields)[0]["taints"] = []fields{{"key": "example.com/x", "effect": "NoExecute"}}
	s.inForce(t, thief, try{"another node's", http.MethodPost, slicesPath, asJSON, slice("gpu-2", "tried", "gpu-2/a100", 1), "ResourceSlices of the node that it runs on"})
	s.create(t, slicesPath, slice("gpu-2", "real", "gpu-2/a100", 1))
	s.create(t, slicesPath, slice("gpu-1", "old", "gpu-2/b200", 1)) // from before the policy
	const pools, bare, owned = "in pools of the node that it runs on", "no labels, annotations or finalizers", "belong to its own Node and to nothing else"
	create := func(name string, body fields, refused string) try {
		return try{name, http.MethodPost, slicesPath + "?dryRun=All", asJSON, body, refused}
	}
	owner := func(kind, name string) []fields {
		return []fields{{"apiVersion": "v1", "kind": kind, "name": name, "uid": "u", "controller": true}}
	}
	s.try(t, thief, []try{
		{"in another node's pool", http.MethodPost, slicesPath, asJSON, slice("gpu-1", "evil", "gpu-2/a100", 1), pools},
		create("in another node's pool, of a higher generation", slice("gpu-1", "evil", "gpu-2/a100", 1<<40), pools),
		create("with a taint that ends another node's pods", tainted, pools),
		create("in a pool that begins alike", slice("gpu-1", "evil", "gpu-10/a100", 1), pools),
		create("in a pool of the bare name", slice("gpu-1", "evil", "gpu-1", 1), pools),
		{"a slice that stands in another's pool, away", http.MethodDelete, slicesPath + "/old", asJSON, nil, ""},
		create("with a label", with("labels", fields{"a": "b"}), bare),
		create("that cannot be deleted", with("finalizers", []string{"example.com/x"}), bare),
		create("with annotations", with("annotations", fields{"a": letters(200_000)}), bare),
		create("that goes with something else", with("ownerReferences", owner("ConfigMap", "gpu-1")), owned),
		create("that goes with another node", with("ownerReferences", owner("Node", "gpu-2")), owned),
		create("with long managed fields", with("managedFields", managedBy("resource.k8s.io/v1", "", 1_000_000)), "up to 524,288 characters"),
		{"its own", http.MethodPost, slicesPath, asJSON, with("ownerReferences", owner("Node", "gpu-1")), ""},
	})
	s.create(t, "/apis/resource.k8s.io/v1/deviceclasses", fields{"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": fields{"name": "any"},
		"spec": fields{"selectors": []fields{{"cel": fields{"expression": `device.driver == "gpus.example.com"`}}}}})
	// on has a pod for a node ask for a GPU, and says where it is once the scheduler has decided.
	const pods = "/api/v1/namespaces/train/pods"
	on := func(name, node string) (at, why string) {
		t.Helper()
		s.create(t, "/apis/resource.k8s.io/v1/namespaces/train/resourceclaims", fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": fields{"name": name},
			"spec": fields{"devices": fields{"requests": []fields{{"name": "r", "exactly": fields{"deviceClassName": "any"}}}}}})
		s.create(t, pods, fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name},
			"spec": fields{"automountServiceAccountToken": false, "tolerations": []fields{{"operator": "Exists"}}, "resourceClaims": []fields{{"name": "c", "resourceClaimName": name}},
				"affinity": fields{"nodeAffinity": fields{"requiredDuringSchedulingIgnoredDuringExecution": fields{"nodeSelectorTerms": []fields{{
					"matchFields": []fields{{"key": "metadata.name", "operator": "In", "values": []string{node}}}}}}}},
				"containers": []fields{{"name": "main", "image": "none", "resources": fields{"claims": []fields{{"name": "c"}}}}}}})
		s.await(t, "the scheduler decides on pod "+name, func() error {
			var p struct {
				Spec   struct{ NodeName string }
				Status struct {
					Conditions []struct{ Type, Reason, Message string }
				}
			}
			if err := s.do(t, nil, http.MethodGet, pods+"/"+name, "", nil, &p); err != nil {
				return err
			}
			at = p.Spec.NodeName
			for _, c := range p.Status.Conditions {
				if c.Type == "PodScheduled" && c.Reason == "Unschedulable" {
					why = c.Message
				}
			}
			if at == "" && why == "" {
				return errors.New("not yet")
			}
			return nil
		})
		return at, why
	}
	if at, why := on("own", "gpu-1"); at != "gpu-1" {
		t.Errorf("a pod for the GPU of gpu-1 is on node %q: %s", at, why)
	}
	// The second one would be given the GPU of gpu-2 by the thief's slice.
	if at, _ := on("second", "gpu-1"); at != "" {
		t.Errorf("a second pod for the one GPU of gpu-1 is on node %q", at)
	}
	if at, why := on("other", "gpu-2"); at != "gpu-2" {
		t.Errorf("a pod for the free GPU of gpu-2 is on node %q: %s", at, why)
	}
}

// What an agent says of a claim is what its own driver has prepared on its own node, in short.
func TestAgentsWordOnClaimsIsBounded(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	for _, o := range resources(t, "components/dra") {
		s.apply(t, o, false)
	}
	s.namespace(t, "claims")
	const all, driver, pool = "/apis/resource.k8s.io/v1/namespaces/claims/resourceclaims", "gpus.example.com", "node-1/a100"
	s.create(t, all, fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": fields{"name": "one"},
		"spec": fields{"devices": fields{"requests": []fields{{"name": "r", "exactly": fields{"deviceClassName": "any"}}, {"name": "q", "exactly": fields{"deviceClassName": "any"}}}}}})
	body := fields{"status": fields{"allocation": fields{
		"nodeSelector": fields{"nodeSelectorTerms": []fields{{"matchFields": []fields{{"key": "metadata.name", "operator": "In", "values": []string{"node-1"}}}}}},
		"devices":      fields{"results": []fields{{"request": "r", "driver": driver, "pool": pool, "device": "gpu-0"}, {"request": "q", "driver": driver, "pool": "node-2/a100", "device": "gpu-0"}}}}}}
	if err := s.do(t, nil, http.MethodPatch, all+"/one/status", merge, body, nil); err != nil {
		t.Fatal(err)
	}
	as := agentOn("node-1")
	device := func(change fields) fields {
		d := fields{"driver": driver, "pool": pool, "device": "gpu-0"}
		for key, value := range change {
			d[key] = value
		}
		return fields{"status": fields{"devices": []fields{d}}}
	}
	s.inForce(t, as, try{"another node's slice", http.MethodPost, slicesPath, asJSON, aSlice("node-2"), "ResourceSlices of the node that it runs on"})
	const says, bare = "the GPU agent says up to 4,096 characters", "no labels, annotations or finalizers"
	write := func(name string, body fields, refused string) try {
		return try{name, http.MethodPatch, all + "/one/status", merge, body, refused}
	}
	conditions := []fields{{"type": "Ready", "status": "True", "reason": "R", "message": letters(32_000), "lastTransitionTime": "2026-01-01T00:00:00Z"}}
	s.try(t, as, []try{
		write("what it has", device(fields{"data": fields{"gpu": "GPU-0", "guarantee": "hardware"}}), ""),
		write("9 kB", device(fields{"data": fields{"gpu": letters(9000)}}), says),
		write("a condition", device(fields{"conditions": conditions}), says),
		write("a network", device(fields{"networkData": fields{"interfaceName": "eth0"}}), says),
		write("of a device in another node's pool", device(fields{"pool": "node-2/a100"}), says),
		write("a field that is for new objects", fields{"metadata": fields{"generateName": letters(100_000)}}, bare),
	})
	// Each name by which somebody applies something is kept; here all but the last are there.
	if err := s.do(t, nil, http.MethodPatch, all+"/one", merge, fields{"metadata": fields{"managedFields": managedBy("resource.k8s.io/v1", "status", 131_000)}}, nil); err != nil {
		t.Fatal(err)
	}
	applied := device(fields{"data": fields{"gpu": "GPU-0"}})
	applied["apiVersion"], applied["kind"], applied["metadata"] = "resource.k8s.io/v1", "ResourceClaim", fields{"name": "one", "namespace": "claims"}
	s.try(t, as, []try{{"by one name more", http.MethodPatch, all + "/one/status?force=true&fieldManager=" + letters(128), plane.Apply, applied, "who manages which field"}})
}

// The placer's token makes one Lease, and writes one annotation of Nodes.
func TestPlacersWritesAreBounded(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	for _, o := range render(t, "placer") {
		s.apply(t, o, false)
	}
	const leases, node = "/apis/coordination.k8s.io/v1/namespaces/" + placer + "/leases", "/api/v1/nodes/node-1"
	as := placersAccount()
	lease := func(name string, spec, metadata fields) fields {
		m := fields{"name": name}
		for key, value := range metadata {
			m[key] = value
		}
		return fields{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": m, "spec": spec}
	}
	meta := func(field string, value any) fields { return fields{"metadata": fields{field: value}} }
	const alone = "the Lease gpu-placer alone"
	s.inForce(t, as, try{"a label", http.MethodPatch, node, merge, meta("labels", fields{"a": "b"}), "nothing of a Node but"})
	s.inForce(t, as, try{"another Lease", http.MethodPost, leases, asJSON, lease("other", nil, nil), alone})
	s.try(t, as, []try{
		{"another Lease", http.MethodPost, leases, asJSON, lease("other", nil, nil), alone},
		{"a large one", http.MethodPost, leases, asJSON, lease(placer, fields{"holderIdentity": letters(100_000)}, nil), alone},
		{"one with annotations", http.MethodPost, leases, asJSON, lease(placer, nil, fields{"annotations": fields{"a": letters(100_000)}}), alone},
		{"its own", http.MethodPost, leases, asJSON, lease(placer, fields{"holderIdentity": "one", "leaseDurationSeconds": 15}, nil), ""},
		{"a field that is for new objects", http.MethodPatch, node, merge, meta("generateName", letters(50)), "nothing of a Node but an annotation"},
		{"long managed fields", http.MethodPatch, node, merge, meta("managedFields", managedBy("v1", "", 1_000_000)), "who manages which field"},
	})
}

// The placer's token says of its own AdmissionChecks that they are active, and nothing of those
// of other controllers. Of workloads it answers its own checks, in its own words.
func TestPlacerAnswersItsOwnChecksAlone(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	s.serveKueue(t)
	for _, o := range render(t, withComponent(t, "placer", "placer/kueue")) {
		s.apply(t, o, false)
	}
	s.namespace(t, "train")
	as := placersAccount()
	const checks, now = queueing + "/admissionchecks", "2026-01-01T00:00:00Z"
	// Also where the name is one of ours.
	for name, controller := range map[string]string{"multikueue": "kueue.x-k8s.io/multikueue", "gpu-placer-too": "kueue.x-k8s.io/provisioning-request", "ours": "example.com/gpu-placer"} {
		s.create(t, checks, fields{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "AdmissionCheck", "metadata": fields{"name": name}, "spec": fields{"controllerName": controller}})
	}
	read := func(path string) (is fields) {
		t.Helper()
		if err := s.do(t, nil, http.MethodGet, path, "", nil, &is); err != nil {
			t.Fatal(err)
		}
		return is
	}
	says := func(name, kind, status, message string) fields {
		o := read(checks + "/" + name)
		o["status"] = fields{"conditions": []fields{{"type": kind, "status": status, "reason": "R", "message": message, "lastTransitionTime": now}}}
		return o
	}
	const theirs, active = "whose spec.controllerName is its own", "nothing but that it is active"
	s.inForce(t, as, try{"a check of MultiKueue's", http.MethodPut, checks + "/multikueue/status", asJSON, says("multikueue", "Active", "False", "gone"), theirs})
	put := func(what, name string, body fields, refused string) try {
		return try{what, http.MethodPut, checks + "/" + name + "/status?dryRun=All", asJSON, body, refused}
	}
	s.try(t, as, []try{
		put("that MultiKueue's is inactive", "multikueue", says("multikueue", "Active", "False", "gone"), theirs),
		put("that MultiKueue's is active", "multikueue", says("multikueue", "Active", "True", "m"), theirs),
		put("of one that is named like its own", "gpu-placer-too", says("gpu-placer-too", "Active", "True", "m"), theirs),
		put("that its own is active", "gpu-placer", says("gpu-placer", "Active", "True", "m"), ""),
		put("the same of another name", "ours", says("ours", "Active", "True", "m"), ""),
		put("that its own is not", "gpu-placer", says("gpu-placer", "Active", "False", "m"), active),
		put("another condition", "gpu-placer", says("gpu-placer", "SingleInstanceInClusterQueue", "True", "m"), active),
		put("a long message", "gpu-placer", says("gpu-placer", "Active", "True", letters(1025)), active),
	})

	s.flavor(t, "on-prem")
	s.workload(t, "ours", "on-prem", "gpu-placer", 1, 10)
	s.workload(t, "theirs", "on-prem", "multikueue", 1, 10)
	status := func(name string, change func(status fields)) fields {
		o := read(workloads + "/" + name)
		change(o["status"].(fields))
		return o
	}
	check := func(key string, value any) func(fields) { return func(of fields) { state(of, 0)[key] = value } }
	update := func(u fields) func(fields) {
		u["name"] = "main"
		return check("podSetUpdates", []fields{u})
	}
	woken := func(message string) func(fields) {
		return func(of fields) {
			of["conditions"] = append(of["conditions"].([]any), fields{"type": "Requeued", "status": "True", "reason": "GPUPlacer", "message": message, "lastTransitionTime": now})
		}
	}
	answer := func(what, name string, change func(fields), refused string) try {
		return try{what, http.MethodPut, workloads + "/" + name + "/status?dryRun=All", asJSON, status(name, change), refused}
	}
	annotate := func(what, name string, annotations fields, refused string) try {
		return try{what, http.MethodPatch, workloads + "/" + name + "?dryRun=All", merge, fields{"metadata": fields{"annotations": annotations}}, refused}
	}
	const none, nothing, inShort = "that have a check of it", "nothing else", "in up to 1,024 characters"
	const allowed, refused = "kueue.x-k8s.io/workload-allowed-resource-flavors", "example.com/gpu.refused-flavors"
	s.try(t, as, []try{
		answer("where its pods are", "ours", update(fields{"annotations": fields{"example.com/gpu.hold": "o", "example.com/gpu.hold-nodes": strings.Repeat("gpu-1:2,", 10_000)}, "nodeSelector": fields{"kubernetes.io/hostname": "gpu-1"}}), ""),
		answer("that its pods stand any taint", "ours", update(fields{"tolerations": []fields{{"operator": "Exists"}}}), nothing),
		answer("labels of its pods", "ours", update(fields{"labels": fields{"app": "web"}}), nothing),
		answer("another annotation of its pods", "ours", update(fields{"annotations": fields{"cni.example.com/network": "admin"}}), nothing),
		answer("other nodes for its pods", "ours", update(fields{"nodeSelector": fields{"node-role.kubernetes.io/control-plane": ""}}), nothing),
		answer("300 kB of nodes", "ours", update(fields{"annotations": fields{"example.com/gpu.hold-nodes": letters(300_000)}}), inShort),
		answer("a message of 1,024 letters", "ours", check("message", letters(1024)), ""),
		answer("a long message", "ours", check("message", letters(1025)), inShort),
		answer("that it waits for years", "ours", check("requeueAfterSeconds", 1<<30), inShort),
		answer("a long reason to try again", "ours", woken(letters(1025)), inShort),
		answer("a cluster for it", "ours", func(of fields) { of["clusterName"] = "thief" }, "nothing but the states of its checks"),
		answer("that a workload without its check may be tried again", "theirs", woken("m"), none),
		annotate("which flavors a workload may have", "ours", fields{allowed: "on-prem", refused: ""}, ""),
		annotate("the same without its check", "theirs", fields{allowed: "cloud"}, none),
		annotate("an annotation of another domain", "ours", fields{"other.org/gpu.refused-flavors": "a"}, "nothing of a workload but which flavors"),
		annotate("a long list of flavors", "ours", fields{allowed: letters(140_000)}, "which flavors a workload may have takes"),
		{"a field that is for new objects", http.MethodPatch, workloads + "/ours?dryRun=All", merge, fields{"metadata": fields{"generateName": letters(50)}}, "and of a check nothing"},
		{"long managed fields", http.MethodPatch, workloads + "/ours?dryRun=All", merge, fields{"metadata": fields{"managedFields": managedBy("kueue.x-k8s.io/v1beta2", "", 1_000_000)}}, "who manages which field"},
	})
}

// What the placer writes to another cluster's slice are what it is granted and the agents' labels.
func TestPlacersGrantsAreBounded(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	s.serveLiqo(t)
	for _, o := range render(t, withComponent(t, "placer", "placer/liqo")) {
		s.apply(t, o, false)
	}
	s.consumer(t, "milan")
	of := s.slice(t, "milan", liqo.Class, 40)
	as := placersAccount()
	status := func(change fields) fields {
		var is fields
		if err := s.do(t, nil, http.MethodGet, of.path(), "", nil, &is); err != nil {
			t.Fatal(err)
		}
		old, _ := is["status"].(fields)
		if old == nil {
			old = fields{}
		}
		for key, value := range change {
			old[key] = value
		}
		is["status"] = old
		return is
	}
	conditions := func(more ...fields) fields {
		list, _ := status(nil)["status"].(fields)["conditions"].([]any)
		for _, c := range more {
			c["type"] = "Resources"
			list = append(list, c)
		}
		return fields{"conditions": list}
	}
	says := fields{"status": "Accepted", "reason": "Granted", "message": "m"}
	put := func(what string, change fields, refused string) try {
		return try{what, http.MethodPut, of.path() + "/status?dryRun=All", asJSON, status(change), refused}
	}
	const labels, short, nothing = "labels of the GPU agents alone", "in up to 1,024 characters", "nothing but what it is granted"
	s.inForce(t, as, try{"credentials", http.MethodPut, of.path() + "/status", asJSON, status(fields{"authParams": fields{"apiServer": "https://there"}}), "Liqo's to say"})
	s.try(t, as, []try{
		put("a grant", fields{"resources": fields{unitsName: "40"}, "nodeLabels": fields{"example.com/gpu.model": "a100"}, "nodeSelector": fields{"example.com/gpu.node": "true"}}, ""),
		put("that it is granted", conditions(says), ""),
		put("that it is granted, twice", conditions(says, fields{"status": "Denied", "reason": "R", "message": "m"}), short),
		put("a long message", conditions(fields{"status": "Denied", "reason": "R", "message": letters(1025)}), short),
		put("200 kB of resources", fields{"resources": fields{"example.com/" + letters(200_000): "1"}}, short),
		put("what the other's node is", fields{"nodeLabels": fields{"node-role.kubernetes.io/control-plane": "true"}}, labels),
		put("other nodes of this cluster", fields{"nodeSelector": fields{"node-role.kubernetes.io/control-plane": ""}}, labels),
		put("classes", fields{"storageClasses": []fields{{"storageClassName": "x"}}}, nothing),
	})
}

// The bounds of texts are the program's, to the number: what is shorter would keep the agent from
// saying what it has to, and what is longer is for a thief.
func TestPolicyBoundsAreTheProgramsOwn(t *testing.T) {
	objects := slices.Concat(base(t), render(t, withComponent(t, "placer", "placer/kueue", "placer/liqo")))
	for policy, want := range map[string][]string{
		"gpu-agent":          {fmt.Sprintf(`variables.annotations[?k].orValue("").size() <= %d ||`, brief.Text), fmt.Sprintf(`c.?message.orValue("").size() <= %d && c.?reason.orValue("").size() <= %d &&`, brief.Message, brief.Reason)},
		"gpu-agent-events":   {fmt.Sprintf(`object.?message.orValue("").size() <= %d && object.?reason.orValue("").size() <= %d &&`, brief.Message, brief.Reason)},
		"gpu-agent-gpunodes": {fmt.Sprintf("c.message.size() <= %d && c.reason.size() <= %d", brief.Text, brief.Reason)},
		"gpu-placer-kueue":   {fmt.Sprintf("c in variables.oldConditions || c.message.size() <= %d", brief.Message), fmt.Sprintf("c in variables.oldChecks || c.message.size() <= %d", brief.Message)},
		"gpu-placer-liqo":    {fmt.Sprintf(`c.?message.orValue("").size() <= %d && c.?reason.orValue("").size() <= %d`, brief.Message, brief.Reason)},
	} {
		var is struct {
			Spec struct{ Validations []struct{ Expression string } }
		}
		if err := one(t, objects, "ValidatingAdmissionPolicy", policy).node.Decode(&is); err != nil {
			t.Fatal(err)
		}
		var all strings.Builder
		for _, v := range is.Spec.Validations {
			all.WriteString(strings.Join(strings.Fields(v.Expression), " ") + "\n")
		}
		for _, bound := range want {
			if !strings.Contains(all.String(), bound) {
				t.Errorf("%s does not say %s:\n%s", policy, bound, all.String())
			}
		}
	}
}
