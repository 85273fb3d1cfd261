// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	loop "example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
)

// accountOn is a service account with a token of a pod on that node.
func accountOn(namespace, name, node string) http.Header {
	return http.Header{
		"Impersonate-User":  {"system:serviceaccount:" + namespace + ":" + name},
		"Impersonate-Group": {"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
		"Impersonate-Extra-Authentication.kubernetes.io%2fnode-Name": {node},
	}
}

// try is a write, and what the server must say of it.
type try struct {
	name, method, path, kind string
	body                     fields
	// refused is in the server's words; empty means that it is allowed.
	refused string
}

func (s *apiServer) try(t *testing.T, as http.Header, tries []try) {
	t.Helper()
	for _, y := range tries {
		err := s.do(t, as, y.method, y.path, y.kind, y.body, nil)
		switch {
		case y.refused == "" && err != nil:
			t.Errorf("%s: %v", y.name, err)
		case y.refused != "" && err == nil:
			t.Errorf("%s is allowed", y.name)
		case y.refused != "" && !strings.Contains(err.Error(), y.refused):
			t.Errorf("%s: %v, want a refusal that says %q", y.name, err, y.refused)
		}
	}
}

func (s *apiServer) create(t *testing.T, path string, object fields) {
	t.Helper()
	if err := s.do(t, nil, http.MethodPost, path, asJSON, object, nil); err != nil {
		t.Fatal(err)
	}
}

func (s *apiServer) namespace(t *testing.T, name string) {
	t.Helper()
	s.create(t, "/api/v1/namespaces", fields{"apiVersion": "v1", "kind": "Namespace", "metadata": fields{"name": name}})
	s.create(t, "/api/v1/namespaces/"+name+"/serviceaccounts",
		fields{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": fields{"name": "default"}})
}

// pod makes one that a kubelet has reported as running, and ready; without a node,
// one that waits for it. It returns its UID.
func (s *apiServer) pod(t *testing.T, namespace, name, node string) string {
	t.Helper()
	pods := "/api/v1/namespaces/" + namespace + "/pods"
	spec := fields{"automountServiceAccountToken": false, "tolerations": []fields{{"operator": "Exists"}},
		"containers": []fields{{"name": "main", "image": "none"}}}
	if node != "" {
		spec["nodeName"] = node
	}
	var made struct{ Metadata struct{ UID string } }
	if err := s.do(t, nil, http.MethodPost, pods, asJSON, fields{"apiVersion": "v1", "kind": "Pod",
		"metadata": fields{"name": name, "labels": fields{"app": name}}, "spec": spec}, &made); err != nil {
		t.Fatal(err)
	}
	if node != "" {
		if err := s.do(t, nil, http.MethodPatch, pods+"/"+name+"/status", strategic, fields{"status": fields{"phase": "Running",
			"conditions": []fields{{"type": "Ready", "status": "True"}}}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	return made.Metadata.UID
}

// eviction is as internal/kube/agentkube asks for one; without a UID it names none.
func eviction(namespace, name, uid string) fields {
	e := fields{"apiVersion": "policy/v1", "kind": "Eviction",
		"metadata": fields{"name": name, "namespace": namespace, "labels": fields{"app.kubernetes.io/name": "gpu-agent"}}}
	if uid != "" {
		e["deleteOptions"] = fields{"preconditions": fields{"uid": uid}}
	}
	return e
}

func (s *apiServer) evict(t *testing.T, as http.Header, namespace, name, uid string) error {
	t.Helper()
	return s.do(t, as, http.MethodPost, "/api/v1/namespaces/"+namespace+"/pods/"+name+"/eviction", asJSON, eviction(namespace, name, uid), nil)
}

// anEvent is as internal/kube/agentkube sends it from a node, about that node.
func anEvent(name, node string) fields {
	return fields{"apiVersion": "v1", "kind": "Event", "metadata": fields{"name": name, "namespace": "default"},
		"involvedObject": fields{"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
		"type":           "Normal", "reason": "GPUPartitionApplied", "message": "m",
		"source":             fields{"component": "gpu-agent", "host": node},
		"reportingComponent": "example.com/gpu-agent", "reportingInstance": node,
		"firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:00:00Z", "count": 1}
}

const (
	events     = "/api/v1/namespaces/default/events"
	slicesPath = "/apis/resource.k8s.io/v1/resourceslices"
)

// aSlice is what an agent could publish of a node.
func aSlice(node string) fields {
	return fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": fields{"name": "of-" + node},
		"spec": fields{"driver": "gpus.example.com", "nodeName": node, "pool": fields{"name": node + "/a100", "generation": 1, "resourceSliceCount": 1}}}
}

// overlay is one of somebody's own, of kustomization fields and directories of
// this one.
func overlay(t *testing.T, settings string, resources, components []string) string {
	t.Helper()
	return overlayOf(t, func(up string) string {
		var text strings.Builder
		text.WriteString(settings + "\nresources:\n")
		for _, r := range resources {
			fmt.Fprintf(&text, "  - %s\n", filepath.Join(up, r))
		}
		text.WriteString("components:\n")
		for _, c := range components {
			fmt.Fprintf(&text, "  - %s\n", filepath.Join(up, c))
		}
		return text.String()
	})
}

// overlayOf is an overlay whose kustomization.yaml is text, with the way up to this directory:
// kubectl takes no absolute path. It is the same for all who ask for that text.
func overlayOf(t *testing.T, text func(up string) string) string {
	t.Helper()
	if dir, ok := overlaid[text("")]; ok {
		return dir
	}
	dir := lasting{t}.TempDir()
	here, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	up, err := filepath.Rel(dir, here)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text(up)), 0o600); err != nil {
		t.Fatal(err)
	}
	overlaid[text("")] = dir
	return dir
}

var overlaid = map[string]string{} // directories of overlays, by their texts

// nodes makes node-1 and node-2, as kubelets have reported them.
func (s *apiServer) nodes(t *testing.T) {
	t.Helper()
	for _, name := range []string{"node-1", "node-2"} {
		s.create(t, "/api/v1/nodes", fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": name}})
		if err := s.do(t, nil, http.MethodPatch, "/api/v1/nodes/"+name+"/status", strategic,
			fields{"status": fields{"capacity": fields{"cpu": "2"}, "allocatable": fields{"cpu": "2"}}}, nil); err != nil {
			t.Fatal(err)
		}
	}
}

// An overlay's namespace, prefix and suffix change the name of the agent's
// account. The policies hold the agent to its node all the same.
func TestPoliciesHoldTheAgentUnderAnyName(t *testing.T) {
	s := startAPIServer(t)
	s.nodes(t)
	s.namespace(t, "train")
	const other, own = "/api/v1/nodes/node-2", "/api/v1/nodes/node-1"
	state := func(value any) fields {
		return fields{"metadata": fields{"labels": fields{"example.com/gpu.partition.state": value}}}
	}
	condition := fields{"status": fields{"conditions": []fields{{"type": "example.com/GPUHealthy", "status": "False"}}}}
	for i, test := range []struct{ name, settings, namespace, account string }{
		{"as it is", "", "gpu-agent", "gpu-agent"},
		{"namespace", "namespace: gpu-ops", "gpu-ops", "gpu-agent"},
		{"prefix", "namePrefix: east-", "gpu-agent", "east-gpu-agent"},
		{"suffix", "nameSuffix: -v2", "gpu-agent", "gpu-agent-v2"},
		{"all three", "namespace: gpu-ops\nnamePrefix: team.a-\nnameSuffix: .b", "gpu-ops", "team.a-gpu-agent.b"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if one := test.name == "namespace" || test.name == "prefix" || test.name == "suffix"; one && testing.Short() {
				t.Skip("make test-all runs it: here all three are together")
			}
			objects := render(t, overlay(t, test.settings, []string{"base"}, []string{"components/evict", "components/dra"}))
			one(t, objects, "ServiceAccount", test.account)
			as := accountOn(test.namespace, test.account, "node-1")
			mine, theirs := fmt.Sprintf("mine-%d", i), fmt.Sprintf("theirs-%d", i)
			uids := map[string]string{mine: s.pod(t, "train", mine, "node-1"), theirs: s.pod(t, "train", theirs, "node-2")}
			// Namespaces first, as kubectl does.
			slices.SortStableFunc(objects, func(a, b object) int {
				return strings.Compare(fmt.Sprint(a.Kind != "Namespace"), fmt.Sprint(b.Kind != "Namespace"))
			})
			for _, o := range objects {
				if o.Kind != "DeviceClass" { // which gives no right
					s.apply(t, o, false)
				}
			}
			var tries []try
			for _, y := range []try{
				{"another node's label", http.MethodPatch, other, merge, state("applied"), ""},
				{"another node's taint", http.MethodPatch, other, merge, fields{"spec": fields{"taints": []fields{{"key": "a", "effect": "NoExecute"}}}}, ""},
				{"a cordon of another node", http.MethodPatch, other, merge, fields{"spec": fields{"unschedulable": true}}, ""},
				{"another node's capacity", http.MethodPatch, other + "/status", merge, fields{"status": fields{"capacity": fields{"example.com/gpu": "8"}}}, ""},
				{"another node's allocatable", http.MethodPatch, other + "/status", merge, fields{"status": fields{"allocatable": fields{"example.com/gpu": "8"}}}, ""},
				{"another node's condition", http.MethodPatch, other + "/status", strategic, condition, ""},
			} {
				y.refused = "the node that it runs on"
				tries = append(tries, y)
			}
			evicting := func(name string) string { return "/api/v1/namespaces/train/pods/" + name + "/eviction" }
			tries = append(tries,
				try{"a pod of another node", http.MethodPost, evicting(theirs), asJSON, eviction("train", theirs, uids[theirs]), "pods of the node that it runs on"},
				try{"an Event in another node's name", http.MethodPost, events, asJSON, anEvent("e."+theirs, "node-2"), "in its own name"},
				try{"a slice of another node", http.MethodPost, slicesPath, asJSON, aSlice("node-2"), "ResourceSlices of the node that it runs on"},
				try{"another node's GPUNode", http.MethodPost, gpuNodes, asJSON, aGPUNode("node-2"), "GPUNode of the node that it runs on"},
				try{"its node's GPUNode", http.MethodPost, gpuNodes, asJSON, aGPUNode("node-1"), ""},
				try{"its node's GPUNode away", http.MethodDelete, gpuNodes + "/node-1", asJSON, nil, ""},
				try{"a slice of its node", http.MethodPost, slicesPath, asJSON, aSlice("node-1"), ""},
				try{"its node's slice away", http.MethodDelete, slicesPath + "/of-node-1", asJSON, nil, ""},
				try{"its node's label", http.MethodPatch, own, merge, state("applied"), ""},
				try{"its node's label away", http.MethodPatch, own, merge, state(nil), ""},
				try{"its node's condition", http.MethodPatch, own + "/status", strategic, condition, ""},
				try{"its node's capacity", http.MethodPatch, own + "/status", merge, fields{"status": fields{"capacity": fields{"example.com/gpu": "8"}}}, "only conditions of the status"},
				try{"an Event in its own name", http.MethodPost, events, asJSON, anEvent("e."+mine, "node-1"), ""},
				try{"a pod of its node", http.MethodPost, evicting(mine), asJSON, eviction("train", mine, uids[mine]), ""},
			)
			// Dry runs until all are in force, or never.
			s.await(t, "the policies are in force", func() error {
				for _, y := range tries {
					if y.refused == "" {
						continue
					}
					if err := s.do(t, as, y.method, y.path+"?dryRun=All", y.kind, y.body, nil); err == nil || !strings.Contains(err.Error(), y.refused) {
						return fmt.Errorf("%s: %v, want a refusal that says %q", y.name, err, y.refused)
					}
				}
				return nil
			})
			s.try(t, as, tries)
			s.agentSays(t, test.namespace, test.account, status.PolicyHeld)

			// The next one must not be held by this one's. Without them all is allowed,
			// and the agent says so.
			for _, o := range objects {
				if strings.HasPrefix(o.Kind, "ValidatingAdmissionPolicy") {
					if err := s.do(t, nil, http.MethodDelete, places[o.Kind]+"/"+o.Metadata.Name, asJSON, nil, nil); err != nil {
						t.Fatal(err)
					}
				}
			}
			s.await(t, "the policies are gone", func() error {
				return errors.Join(
					s.do(t, as, http.MethodPatch, other+"?dryRun=All", merge, state("applied"), nil),
					s.do(t, as, http.MethodPost, events+"?dryRun=All", asJSON, anEvent("e."+theirs, "node-2"), nil),
					s.do(t, as, http.MethodPost, slicesPath+"?dryRun=All", asJSON, aSlice("node-2"), nil),
					s.do(t, as, http.MethodPost, gpuNodes+"?dryRun=All", asJSON, aGPUNode("node-2"), nil),
					s.do(t, as, http.MethodPost, evicting(theirs)+"?dryRun=All", asJSON, eviction("train", theirs, uids[theirs]), nil))
			})
			if i == 0 {
				s.agentSays(t, test.namespace, test.account, status.PolicyMissing)
			}
		})
	}
}

// The UID of another node's pod is no secret, so knowing it must not be enough.
// What an agent may evict is known by the pod's node.
func TestAgentEvictsOnlyPodsOfItsNode(t *testing.T) {
	s := startAPIServer(t)
	s.nodes(t)
	s.namespace(t, "train")
	s.namespace(t, "empty")
	for _, o := range slices.Concat(base(t), resources(t, "components/evict")) {
		s.apply(t, o, false)
	}
	on1, on2 := agentOn("node-1"), agentOn("node-2")
	mine, theirs, waits := s.pod(t, "train", "mine", "node-1"), s.pod(t, "train", "theirs", "node-2"), s.pod(t, "train", "waits", "")
	// Where both policies refuse, the server says the words of either: it has them in
	// an order that it draws anew whenever one of them changes.
	const ownNode, byUID, otherUID, either = "pods of the node that it runs on", "names by its UID", "has another UID", "the GPU agent evicts only"
	s.await(t, "right and policies are in force", func() error {
		// Each is asked for what it alone refuses. Without them the server would say that
		// the pod is not there, or that it may be evicted.
		for _, try := range []struct{ pod, uid, says string }{{"none", "", byUID}, {"theirs", theirs, ownNode}} {
			err := s.do(t, on1, http.MethodPost, "/api/v1/namespaces/train/pods/"+try.pod+"/eviction?dryRun=All", asJSON, eviction("train", try.pod, try.uid), nil)
			if err == nil || !strings.Contains(err.Error(), try.says) {
				return fmt.Errorf("%v, want a refusal that says %q", err, try.says)
			}
		}
		return nil
	})
	const wrong = "0aa7d4f1-0000-4000-8000-000000000000"
	for _, test := range []struct {
		name           string
		as             http.Header
		pod, uid, says string
	}{
		{"another node's, by its UID", on1, "theirs", theirs, ownNode},
		{"another node's, by a wrong UID", on1, "theirs", wrong, ownNode},
		{"another node's, without a UID", on1, "theirs", "", either},
		{"its own, without a UID", on1, "mine", "", either},
		{"another node's, by the UID of one of its own", on1, "theirs", mine, ownNode},
		{"one that has no node yet", on1, "waits", waits, ownNode},
		{"its own, by a wrong UID", on1, "mine", wrong, otherUID},
		{"its own, by the UID of another node's", on1, "mine", theirs, otherUID},
		{"by a token that names no node", accountOn(name, name, ""), "waits", waits, ownNode},
		{"one that is not there", on1, "none", wrong, "not found"},
	} {
		err := s.evict(t, test.as, "train", test.pod, test.uid)
		if err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want a refusal that says %q", test.name, err, test.says)
		} else if test.says == ownNode && test.uid != theirs && strings.Contains(err.Error(), theirs) {
			t.Errorf("%s: the refusal tells the UID: %v", test.name, err)
		}
	}
	if err := s.evict(t, on1, "empty", "none", wrong); err == nil || !strings.Contains(err.Error(), "no params found") {
		t.Errorf("in a namespace without pods: %v, want a refusal", err)
	}
	unmarked := eviction("train", "mine", mine)
	delete(unmarked["metadata"].(fields), "labels")
	if err := s.do(t, on1, http.MethodPost, "/api/v1/namespaces/train/pods/mine/eviction", asJSON, unmarked, nil); err == nil || !strings.Contains(err.Error(), "marks its evictions") {
		t.Errorf("without the label by which the policy knows it: %v, want a refusal", err)
	}
	for pod, uid := range map[string]string{"mine": mine, "theirs": theirs, "waits": waits} {
		var p struct {
			Metadata struct{ UID, DeletionTimestamp string }
		}
		if err := s.do(t, nil, http.MethodGet, "/api/v1/namespaces/train/pods/"+pod, "", nil, &p); err != nil || p.Metadata.UID != uid || p.Metadata.DeletionTimestamp != "" {
			t.Errorf("pod %s is %+v (%v), want as it was", pod, p, err)
		}
	}
	for _, e := range []struct {
		as       http.Header
		pod, uid string
	}{{on1, "mine", mine}, {on2, "theirs", theirs}} {
		if err := s.evict(t, e.as, "train", e.pod, e.uid); err != nil {
			t.Errorf("the agent of its node: %v", err)
		}
	}
	// A drain is somebody else's.
	if err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/train/pods/waits/eviction", asJSON,
		fields{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": fields{"name": "waits", "namespace": "train"}}, nil); err != nil {
		t.Errorf("somebody else's eviction: %v", err)
	}
}

// An agent's Events are its own: nobody's name but its, no node's but its own, and
// nobody's Events are changed.
func TestAgentSendsEventsInItsOwnName(t *testing.T) {
	s := startAPIServer(t)
	s.nodes(t)
	s.namespace(t, "train")
	for _, o := range base(t) {
		s.apply(t, o, false)
	}
	as := agentOn("node-1")
	// with is an Event of the agent's that differs in one thing.
	with := func(change func(fields)) fields {
		e := anEvent("tried", "node-1")
		change(e)
		return e
	}
	set := func(key string, value any) fields { return with(func(e fields) { e[key] = value }) }
	meta := func(key string, value any) fields {
		return with(func(e fields) { e["metadata"].(fields)[key] = value })
	}
	about := func(kind, namespace, name string) fields {
		return fields{"apiVersion": "v1", "kind": kind, "namespace": namespace, "name": name}
	}
	const ownName, ownNode, bare, count = "in its own name", "about its own node and about pods", "no labels, annotations", "changes the count"
	create := func(name string, body fields, refused string) try {
		return try{name, http.MethodPost, events, asJSON, body, refused}
	}
	s.await(t, "the policy is in force", func() error {
		if err := s.do(t, as, http.MethodPost, events+"?dryRun=All", asJSON, set("reportingComponent", "kubelet"), nil); err == nil || !strings.Contains(err.Error(), ownName) {
			return fmt.Errorf("%v, want a refusal", err)
		}
		return nil
	})
	theirs := anEvent("theirs", "node-1")
	theirs["reportingComponent"], theirs["source"] = "kubelet", fields{"component": "kubelet", "host": "node-1"}
	s.create(t, events, theirs)
	s.create(t, events, anEvent("others", "node-2"))
	pod := with(func(e fields) {
		e["metadata"] = fields{"name": "of-pod", "namespace": "train"}
		e["involvedObject"] = fields{"apiVersion": "v1", "kind": "Pod", "namespace": "train", "name": "job-1", "uid": "u"}
	})
	patch := func(name, event string, body fields, refused string) try {
		return try{name, http.MethodPatch, events + "/" + event, merge, body, refused}
	}
	s.try(t, as, []try{
		create("its own", anEvent("own", "node-1"), ""),
		{"of a pod", http.MethodPost, "/api/v1/namespaces/train/events", asJSON, pod, ""},
		patch("its count", "own", fields{"count": 2, "lastTimestamp": "2026-01-01T00:01:00Z"}, ""),

		create("in the kubelet's name", set("reportingComponent", "kubelet"), ownName),
		create("in nobody's name", with(func(e fields) { delete(e, "reportingComponent") }), ownName),
		create("from the scheduler", set("source", fields{"component": "default-scheduler", "host": "node-1"}), ownName),
		create("from another node", set("source", fields{"component": "gpu-agent", "host": "node-2"}), ownName),
		create("from no node", with(func(e fields) { delete(e, "source") }), ownName),
		create("reported by another node", set("reportingInstance", "node-2"), ownName),
		create("about another node", set("involvedObject", about("Node", "", "node-2")), ownNode),
		create("about a Deployment", set("involvedObject", about("Deployment", "default", "web")), ownNode),
		create("about nothing", set("involvedObject", fields{}), ownNode),
		create("with a label", meta("labels", fields{"a": "b"}), bare),
		create("that cannot be deleted", meta("finalizers", []string{"example.com/x"}), bare),
		create("with an annotation", meta("annotations", fields{"a": "b"}), bare),
		patch("the kubelet's", "theirs", fields{"count": 2}, ownName),
		patch("the kubelet's, made its own", "theirs", fields{"reportingComponent": "example.com/gpu-agent", "source": fields{"component": "gpu-agent"}}, ownName),
		patch("another agent's", "others", fields{"count": 2}, ownName),
		patch("what its own says", "own", fields{"message": "all is well"}, count),
		patch("what its own is about", "own", fields{"involvedObject": fields{"kind": "Pod"}}, count),
	})
	s.try(t, accountOn(name, name, ""), []try{create("without a node", with(func(e fields) {
		e["reportingInstance"], e["source"] = "", fields{"component": "gpu-agent", "host": ""}
	}), ownName)})
	// What internal/kube/agentkube sends is taken, of the node and of a pod.
	sender := agentkube.NewEvents(s.agentClient(t), nil)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sender.Run(ctx) }()
	sender.Event(workload.Pod{}, agentkube.Warning, "GPUUnhealthy", "m")
	sender.Event(workload.Pod{Namespace: "train", Name: "job-1", UID: "u"}, agentkube.Warning, "CapExceeded", "m")
	for path, reason := range map[string]string{events: "GPUUnhealthy", "/api/v1/namespaces/train/events": "CapExceeded"} {
		s.await(t, "the Event is there", func() error {
			var list struct{ Items []struct{ Reason string } }
			if err := s.do(t, nil, http.MethodGet, path, "", nil, &list); err != nil {
				return err
			}
			for _, e := range list.Items {
				if e.Reason == reason {
					return nil
				}
			}
			return fmt.Errorf("Events %v, want %s", list.Items, reason)
		})
	}
	cancel()
	<-done
	// By the newer API, which RBAC does not grant.
	if err := s.do(t, as, http.MethodPost, "/apis/events.k8s.io/v1/namespaces/default/events", asJSON, fields{}, nil); err == nil || !strings.Contains(err.Error(), "cannot create resource") {
		t.Errorf("by events.k8s.io: %v, want that RBAC refuses it", err)
	}
}

// A token of the kind that the DaemonSet has projected names the node of the pod
// that it is bound to. All policies rest on that.
func TestTokenNamesItsNode(t *testing.T) {
	s := startAPIServer(t)
	s.install(t)
	spec := fields{"serviceAccountName": name, "nodeName": "node-1", "automountServiceAccountToken": false, "containers": []fields{{"name": "main", "image": "none"}}}
	var pod struct{ Metadata struct{ UID string } }
	if err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/gpu-agent/pods", asJSON,
		fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": "agent"}, "spec": spec}, &pod); err != nil {
		t.Fatal(err)
	}
	var token struct {
		Status struct {
			Token string
		}
	}
	if err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/gpu-agent/serviceaccounts/gpu-agent/token", asJSON, fields{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": fields{"expirationSeconds": 600,
			"boundObjectRef": fields{"apiVersion": "v1", "kind": "Pod", "name": "agent", "uid": pod.Metadata.UID}}}, &token); err != nil {
		t.Fatal(err)
	}
	as := http.Header{"Authorization": {"Bearer " + token.Status.Token}}
	state := fields{"metadata": fields{"labels": fields{"example.com/gpu.partition.state": "applied"}}}
	s.try(t, as, []try{
		{"its own node", http.MethodPatch, "/api/v1/nodes/node-1", merge, state, ""},
		{"another node", http.MethodPatch, "/api/v1/nodes/node-2", merge, state, "the node that it runs on"},
	})
}

// agentSays lets internal/kube/agentkube try the policies in an account's name: all are
// as they should be, and the tries have changed nothing.
func (s *apiServer) agentSays(t *testing.T, namespace, account string, want string) {
	t.Helper()
	const pods = "/api/v1/namespaces/train/pods"
	// The agent's own pod, in a namespace of its choice.
	if err := s.do(t, nil, http.MethodGet, pods+"/agent", "", nil, nil); err != nil {
		s.pod(t, "train", "agent", "node-1")
	}
	seen := func() string {
		var out []string
		for _, path := range []string{"/api/v1/nodes", "/api/v1/events", pods, slicesPath, gpuNodes} {
			var list any
			if err := s.do(t, nil, http.MethodGet, path, "", nil, &list); err != nil {
				t.Fatal(err)
			}
			out = append(out, fmt.Sprint(list.(fields)["items"]))
		}
		return strings.Join(out, "\n")
	}
	before := seen()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var said []status.Policy
	o := agentkube.PolicyOptions{Evictions: true, DRA: func() bool { return true }, GPUNodes: true, Pod: workload.Pod{Namespace: "train", Name: "agent"}}
	if err := s.clientAs(t, namespace, account).WatchPolicies(ctx, o, func(list []status.Policy) {
		said = list
		cancel()
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v before it said anything", err)
	}
	var names []string
	for _, p := range said {
		names = append(names, p.Name)
		if p.State != want {
			t.Errorf("policy %s is %s: %s; want %s", p.Name, p.State, p.Reason, want)
		}
	}
	slices.Sort(names)
	if all := slices.Sorted(maps.Keys(policies(t))); !slices.Equal(names, all) {
		t.Errorf("tried the policies %q, the manifests have %q", names, all)
	}
	if after := seen(); after != before {
		t.Errorf("the dry runs changed\n%s\nto\n%s", before, after)
	}
}

// NVIDIA's runtime gives a container what its environment asks for. A tenant does
// not get at it by naming the class.
func TestRuntimeClassIsForTheAgentAlone(t *testing.T) {
	s := startAPIServer(t)
	s.namespace(t, "train")
	s.namespace(t, "monitoring")
	for _, class := range []string{"nvidia-cdi", "nvidia-legacy", "kata"} {
		s.create(t, places["RuntimeClass"], fields{"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": fields{"name": class}, "handler": class})
	}
	const agents = "gpu-ops" // an overlay's namespace has the label, too
	objects := render(t, overlay(t, "namespace: "+agents, []string{"overlays/runtime-class"}, nil))
	set := agentSet(t, objects)
	slices.SortStableFunc(objects, func(a, b object) int {
		return strings.Compare(fmt.Sprint(a.Kind != "Namespace"), fmt.Sprint(b.Kind != "Namespace"))
	})
	for _, o := range objects {
		s.apply(t, o, false)
	}
	// A tenant's own account of the agent's name is nobody.
	s.create(t, "/api/v1/namespaces/train/serviceaccounts", fields{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": fields{"name": name}})
	pod := func(class, account, visible string) fields {
		spec := fields{"serviceAccountName": account, "automountServiceAccountToken": false, "containers": []fields{{"name": "main", "image": "none",
			"env": []fields{{"name": "NVIDIA_VISIBLE_DEVICES", "value": visible}}}}}
		if class != "" {
			spec["runtimeClassName"] = class
		}
		return fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"generateName": "p-"}, "spec": spec}
	}
	in := func(what, namespace, refused string, p fields) try {
		return try{what, http.MethodPost, "/api/v1/namespaces/" + namespace + "/pods", asJSON, p, refused}
	}
	const refused = "so its RuntimeClass is not for this namespace"
	s.await(t, "the policy is in force", func() error {
		if err := s.do(t, nil, http.MethodPost, "/api/v1/namespaces/train/pods?dryRun=All", asJSON, pod("nvidia", "default", "all"), nil); err == nil || !strings.Contains(err.Error(), refused) {
			return fmt.Errorf("%v, want a refusal", err)
		}
		return nil
	})
	s.try(t, nil, []try{
		in("all GPUs", "train", refused, pod("nvidia", "default", "all")),
		in("another pod's device", "train", refused, pod("nvidia", "default", "example.com/gpu=0123456789abcdef")),
		in("by another name of the handler", "train", refused, pod("nvidia-cdi", "default", "all")),
		in("in legacy mode", "train", refused, pod("nvidia-legacy", "default", "all")),
		in("as an account of the agent's name", "train", refused, pod("nvidia", name, "all")),
		in("without a class", "train", "", pod("", "default", "all")),
		in("another runtime", "train", "", pod("kata", "default", "all")),
		in("the agent", agents, "", pod(set.Spec.Template.Spec.RuntimeClassName, set.Spec.Template.Spec.ServiceAccountName, "all")),
		in("an exporter, before its namespace is allowed", "monitoring", refused, pod("nvidia", "default", "all")),
	})
	if err := s.do(t, nil, http.MethodPatch, "/api/v1/namespaces/monitoring", merge, fields{"metadata": fields{"labels": fields{"example.com/gpu.runtime-class": "allowed"}}}, nil); err != nil {
		t.Fatal(err)
	}
	s.await(t, "the label allows it", func() error {
		return s.do(t, nil, http.MethodPost, "/api/v1/namespaces/monitoring/pods", asJSON, pod("nvidia", "default", "all"), nil)
	})
}

// policy is what is read of one.
type policy struct {
	Spec struct {
		MatchConditions []struct{ Name, Expression string } `yaml:"matchConditions"`
		Variables       []struct{ Name, Expression string }
	}
}

func policyOf(t *testing.T, o object) policy {
	t.Helper()
	var p policy
	if err := o.node.Decode(&p); err != nil {
		t.Fatal(err)
	}
	return p
}

// everybodys is a policy that holds whoever makes a claim.
const everybodys = "gpu-agent-claims"

// policies are all that the manifests have for the agent's account, by name.
func policies(t *testing.T) map[string]policy {
	t.Helper()
	out := map[string]policy{}
	for _, o := range slices.Concat(base(t), resources(t, "components/evict"), resources(t, "components/dra")) {
		if o.Kind == "ValidatingAdmissionPolicy" && o.Metadata.Name != everybodys {
			out[o.Metadata.Name] = policyOf(t, o)
		}
	}
	return out
}

// All policies are for the same accounts: the agent's under any name that
// kustomize can give it, and nobody's whose name only contains it.
func TestPoliciesAreForTheAgentsAccount(t *testing.T) {
	all := policies(t)
	if len(all) < 6 {
		t.Fatalf("%d policies: this test does not look where they are", len(all))
	}
	quoted := regexp.MustCompile(`^request\.userInfo\.username\.matches\("([^"]+)"\)$`)
	for name, p := range all {
		if len(p.Spec.MatchConditions) != 1 {
			t.Errorf("%s has %d conditions, want the account's", name, len(p.Spec.MatchConditions))
			continue
		}
		m := quoted.FindStringSubmatch(p.Spec.MatchConditions[0].Expression)
		if m == nil {
			t.Errorf("%s is for %s, which is no pattern", name, p.Spec.MatchConditions[0].Expression)
			continue
		}
		pattern := regexp.MustCompile(m[1])
		for user, want := range map[string]bool{
			"system:serviceaccount:gpu-agent:gpu-agent":         true,
			"system:serviceaccount:gpu-ops:gpu-agent":           true,
			"system:serviceaccount:kube-system:east-gpu-agent":  true,
			"system:serviceaccount:gpu-ops:team.a-gpu-agent-v2": true,
			"system:serviceaccount:gpu-ops:gpu-agent.b":         true,
			"system:serviceaccount:gpu-agent:default":           false,
			"system:serviceaccount:x:megagpu-agent":             false,
			"system:serviceaccount:x:gpu-agents":                false,
			"system:node:gpu-agent":                             false,
			"gpu-agent":                                         false,
			"x:system:serviceaccount:gpu-agent:gpu-agent":       false,
		} {
			if got := pattern.MatchString(user); got != want {
				t.Errorf("%s is for %s: %v, want %v", name, user, got, want)
			}
		}
	}
}

// The policy's lists are the program's, to the name: what is not in them the agent
// would be refused, and what is too much could be written by whoever takes it over.
func TestPolicyListsWhatTheAgentWrites(t *testing.T) {
	have := map[string][]string{}
	for _, v := range policies(t)["gpu-agent"].Spec.Variables {
		for _, m := range regexp.MustCompile(`"([A-Za-z.-]+)"`).FindAllStringSubmatch(v.Expression, -1) {
			have[v.Name] = append(have[v.Name], m[1])
		}
		slices.Sort(have[v.Name])
	}
	if got := policies(t)["gpu-agent"].Spec.Variables; !slices.ContainsFunc(got, func(v struct{ Name, Expression string }) bool {
		return v.Name == "guestAnnotations" && v.Expression == "['"+loop.HoldAnnotation+"']"
	}) {
		t.Errorf("the policy does not allow the annotation %s alone of other domains: %v", loop.HoldAnnotation, got)
	}
	for name, want := range map[string][]string{
		"own": loop.Written.Labels, "ownAnnotations": loop.Written.Annotations, "ownConditions": loop.Written.Conditions,
	} {
		if want = slices.Sorted(slices.Values(want)); !slices.Equal(have[name], want) {
			t.Errorf("%s: the policy lists\n%q, the agent writes\n%q", name, have[name], want)
		}
	}
	if len(loop.Written.Labels) != len(label.Names)+1 {
		t.Errorf("the agent writes the labels %q, want label.Names and the partition's state", loop.Written.Labels)
	}
	for _, theirs := range []string{"gpu.node", loop.PartitionLabel, loop.ReleaseLabel} {
		if slices.Contains(have["own"], theirs) {
			t.Errorf("the agent may write %s, which is its operator's", theirs)
		}
	}
}
