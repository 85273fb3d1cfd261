// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
)

const (
	staysHere   = "stays at the site on-prem"
	recordsPods = "/api/v1/namespaces/records/pods"
)

// stayingPod is one of the namespace records that asks for a GPU; change has what is particular in its spec.
func stayingPod(name string, change fields) fields {
	asks := fields{"limits": fields{"example.com/gpu": "1"}}
	spec := fields{"automountServiceAccountToken": false, "containers": []fields{{"name": "main", "image": "none", "resources": asks}}}
	maps.Copy(spec, change)
	return fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name}, "spec": spec}
}

// at is the node selector of a site.
func at(site string) fields { return fields{"example.com/gpu.site": site} }

// TestWhatStays has the policies of the component stays judge at the real API server: each rule refuses
// what it is for, with words that say what to do, and lets the rest through. Of a namespace without the
// label nothing is judged.
func TestWhatStays(t *testing.T) {
	s := startAPIServer(t)
	s.serveKueue(t)
	s.serveOffloading(t)
	for _, namespace := range []string{"records", "train"} {
		s.namespace(t, namespace)
	}
	gates := []fields{{"name": "kueue.x-k8s.io/admission"}}
	// These are there before the namespace has the label.
	for _, pod := range []fields{stayingPod("runs", nil), stayingPod("waits", fields{"schedulingGates": gates})} {
		s.create(t, recordsPods, pod)
	}
	s.create(t, queueing+"/namespaces/records/workloads", stayingWorkload("sent"))
	s.dispatched(t, "sent", fields{"nominatedClusterNames": []string{"old"}}, "")
	s.create(t, offloadings, offloading("LocalAndRemote"))
	for _, o := range render(t, overlay(t, "", nil, []string{"components/stays"})) {
		s.apply(t, o, false)
	}
	if t.Failed() {
		t.FailNow()
	}
	s.label(t, fields{"labels": fields{"example.com/gpu.stays": "on-prem"}})
	s.await(t, "the policies are in force", func() error {
		for path, object := range map[string]fields{
			recordsPods: stayingPod("a", nil), recordsPods + "/runs/binding": bindingOf("runs"),
			offloadings: offloading("Local"),
		} {
			if err := s.do(t, nil, http.MethodPost, path+"?dryRun=All", asJSON, object, nil); err == nil || !strings.Contains(err.Error(), "work of this namespace stays") {
				return fmt.Errorf("%s: %v, want a refusal", path, err)
			}
		}
		err := s.setStatus(t, "sent", fields{"nominatedClusterNames": []string{"cloud"}})
		if err == nil || !strings.Contains(err.Error(), "work of this namespace stays") {
			return fmt.Errorf("a workload's status: %v, want a refusal", err)
		}
		return nil
	})
	t.Run("pods", s.tryStayingPods)
	t.Run("bindings", s.tryStayingBindings)
	t.Run("workloads", s.tryStayingWorkloads)
	t.Run("Liqo", s.tryStayingOffloading)
	t.Run("a label without a site", func(t *testing.T) {
		s.label(t, fields{"labels": fields{"example.com/gpu.stays": ""}})
		s.await(t, "nothing runs", func() error {
			err := s.do(t, nil, http.MethodPost, recordsPods+"?dryRun=All", asJSON, stayingPod("a", fields{"nodeSelector": at("")}), nil)
			if err == nil || !strings.Contains(err.Error(), "work of this namespace stays") {
				return fmt.Errorf("%v, want a refusal", err)
			}
			return nil
		})
	})
}

// label writes the metadata of the namespace records.
func (s *apiServer) label(t *testing.T, metadata fields) {
	t.Helper()
	if err := s.do(t, nil, http.MethodPatch, "/api/v1/namespaces/records", merge, fields{"metadata": metadata}, nil); err != nil {
		t.Fatal(err)
	}
}

func (s *apiServer) tryStayingPods(t *testing.T) {
	const dry = recordsPods + "?dryRun=All"
	gates := []fields{{"name": "kueue.x-k8s.io/admission"}}
	with := func(in string, resources fields) fields {
		list := []fields{{"name": "other", "image": "none", "resources": resources}}
		plain := []fields{{"name": "main", "image": "none"}}
		if in == "containers" {
			return stayingPod("a", fields{"containers": list})
		}
		return stayingPod("a", fields{"containers": plain, in: list})
	}
	claims := []fields{{"name": "gpu", "resourceClaimTemplateName": "one"}}
	plain := fields{"containers": []fields{{"name": "main", "image": "none", "resources": fields{"requests": fields{"cpu": "1", "ephemeral-storage": "1Gi"}}}}}
	affinity := fields{"nodeAffinity": fields{"requiredDuringSchedulingIgnoredDuringExecution": fields{"nodeSelectorTerms": []fields{
		{"matchExpressions": []fields{{"key": "example.com/gpu.site", "operator": "In", "values": []string{"on-prem"}}}}}}}}
	kubelet := http.Header{"Impersonate-User": {"system:node:node-1"}, "Impersonate-Group": {"system:nodes", "system:masters"}}
	post := func(name string, pod fields, refused string) try {
		return try{name, http.MethodPost, dry, asJSON, pod, refused}
	}
	s.try(t, nil, []try{
		post("a pod of this site", stayingPod("a", fields{"nodeSelector": at("on-prem")}), ""),
		post("one of the cloud", stayingPod("a", fields{"nodeSelector": at("cloud")}), "this pod goes to cloud; give the pod template the node selector example.com/gpu.site: on-prem"),
		post("one that may go anywhere", stayingPod("a", nil), staysHere+" (its label example.com/gpu.stays), and this pod may go anywhere"),
		post("one of this site by its affinity alone", stayingPod("a", fields{"affinity": affinity}), staysHere),
		post("one that tolerates all", stayingPod("a", fields{"tolerations": []fields{{"operator": "Exists"}}}), staysHere),
		post("one with a node", stayingPod("a", fields{"nodeSelector": at("on-prem"), "nodeName": "node-1"}), "leave nodeName out"),
		post("one behind a gate", stayingPod("a", fields{"schedulingGates": gates}), ""),
		post("one of the cloud, behind a gate", stayingPod("a", fields{"schedulingGates": gates, "nodeSelector": at("cloud")}), "goes to cloud"),
		post("a GPU of another plugin", with("containers", fields{"limits": fields{"nvidia.com/gpu": "1"}}), staysHere),
		post("a GPU for an init container", with("initContainers", fields{"limits": fields{"example.com/gpu-mem": "1"}}), staysHere),
		post("a claim", stayingPod("a", fields{"containers": plain["containers"], "resourceClaims": claims}), staysHere),
		post("a pod without a device", stayingPod("a", plain), ""),
		post("a pod without a device, on a node", stayingPod("a", fields{"containers": plain["containers"], "nodeName": "node-1"}), ""),
		{"a pod of another namespace", http.MethodPost, "/api/v1/namespaces/train/pods?dryRun=All", asJSON, stayingPod("a", nil), ""},

		// It was there before the label; its controllers go on.
		{"a label of one that runs", http.MethodPatch, recordsPods + "/runs", merge, fields{"metadata": fields{"labels": fields{"a": "b"}}}, ""},
		{"a label of one that waits", http.MethodPatch, recordsPods + "/waits", merge, fields{"metadata": fields{"labels": fields{"a": "b"}}}, ""},
		{"its gate away", http.MethodPatch, recordsPods + "/waits?dryRun=All", merge, fields{"spec": fields{"schedulingGates": nil}}, staysHere},
		{"its gate away, for the cloud", http.MethodPatch, recordsPods + "/waits?dryRun=All", merge,
			fields{"spec": fields{"schedulingGates": nil, "nodeSelector": at("cloud")}}, "goes to cloud"},
		{"its gate away, for this site", http.MethodPatch, recordsPods + "/waits?dryRun=All", merge,
			fields{"spec": fields{"schedulingGates": nil, "nodeSelector": at("on-prem")}}, ""},
	})
	s.try(t, kubelet, []try{post("a kubelet's static pod", stayingPod("a", fields{"nodeName": "node-1", "tolerations": []fields{{"operator": "Exists"}}}), "")})

	s.label(t, fields{"annotations": fields{"example.com/gpu.stays-pods": "all"}})
	s.await(t, "pods without a device stay, too", func() error {
		err := s.do(t, nil, http.MethodPost, dry, asJSON, stayingPod("a", plain), nil)
		if err == nil || !strings.Contains(err.Error(), staysHere) {
			return fmt.Errorf("%v, want a refusal that says %q", err, staysHere)
		}
		return nil
	})
	plain["nodeSelector"] = at("on-prem")
	s.try(t, nil, []try{post("a pod without a device, of this site", stayingPod("a", plain), "")})
	s.label(t, fields{"annotations": nil})
}

func bindingOf(pod string) fields {
	return fields{"apiVersion": "v1", "kind": "Binding", "metadata": fields{"name": pod}, "target": fields{"kind": "Node", "name": "node-1"}}
}

func (s *apiServer) tryStayingBindings(t *testing.T) {
	s.create(t, recordsPods, stayingPod("bound", fields{"nodeSelector": at("on-prem")}))
	s.create(t, "/api/v1/namespaces/train/pods", stayingPod("bound", nil))
	account := func(name string) http.Header {
		return http.Header{"Impersonate-User": {name}, "Impersonate-Group": {"system:masters"}}
	}
	const path, old, says = recordsPods + "/bound/binding", "/api/v1/namespaces/records/bindings", "schedulers alone bind its pods"
	for _, who := range []string{"alice", "system:serviceaccount:records:default", "system:serviceaccount:records:kube-scheduler", "system:kube-scheduler-2"} {
		s.try(t, account(who), []try{
			{"a binding by " + who, http.MethodPost, path + "?dryRun=All", asJSON, bindingOf("bound"), says},
			{"an older binding by " + who, http.MethodPost, old + "?dryRun=All", asJSON, bindingOf("bound"), says},
		})
	}
	s.try(t, account("system:serviceaccount:kube-system:second-scheduler"), []try{
		{"a binding by a second scheduler", http.MethodPost, path + "?dryRun=All", asJSON, bindingOf("bound"), ""}})
	scheduler := http.Header{"Impersonate-User": {"system:kube-scheduler"}, "Impersonate-Group": {"system:authenticated"}}
	s.try(t, scheduler, []try{{"a binding by the scheduler", http.MethodPost, path, asJSON, bindingOf("bound"), ""}})
	s.try(t, nil, []try{{"a binding of another namespace", http.MethodPost, "/api/v1/namespaces/train/pods/bound/binding", asJSON, bindingOf("bound"), ""}})
}

// stayingWorkload is one of a pod set.
func stayingWorkload(name string) fields {
	return fields{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": fields{"name": name},
		"spec": fields{"podSets": []fields{{"name": "main", "count": 1, "template": fields{"metadata": fields{}, "spec": fields{"restartPolicy": "Never",
			"containers": []fields{{"name": "main", "image": "none"}}}}}}}}
}

// setStatus tries to write the status of a workload of the namespace records.
func (s *apiServer) setStatus(t *testing.T, name string, status fields) error {
	return s.do(t, nil, http.MethodPatch, queueing+"/namespaces/records/workloads/"+name+"/status?dryRun=All", merge, fields{"status": status}, nil)
}

// dispatched writes where a workload goes, as MultiKueue does.
func (s *apiServer) dispatched(t *testing.T, name string, status fields, refused string) {
	t.Helper()
	s.try(t, nil, []try{{fmt.Sprintf("%s goes to %v", name, status), http.MethodPatch, queueing + "/namespaces/records/workloads/" + name + "/status", merge,
		fields{"status": status}, refused}})
}

func (s *apiServer) tryStayingWorkloads(t *testing.T) {
	const says = "is not sent to the cluster cloud; clusters that may have it are named in the annotation example.com/gpu.stays-clusters"
	s.create(t, queueing+"/namespaces/records/workloads", stayingWorkload("job"))
	to := func(names ...string) fields { return fields{"nominatedClusterNames": names} }
	chosen := func(name string) fields { return fields{"nominatedClusterNames": nil, "clusterName": name} }
	s.dispatched(t, "job", fields{"conditions": []fields{}}, "")
	s.dispatched(t, "job", to("cloud"), says)
	s.dispatched(t, "job", chosen("cloud"), says)
	s.dispatched(t, "job", to("rack-b"), "is not sent to the cluster rack-b")
	// What was sent before can end there, and goes nowhere else.
	s.dispatched(t, "sent", to("old", "cloud"), says)
	s.dispatched(t, "sent", fields{"accumulatedPastExecutionTimeSeconds": 1}, "")
	s.dispatched(t, "sent", chosen("old"), "is not sent to the cluster old")

	s.label(t, fields{"annotations": fields{"example.com/gpu.stays-clusters": "rack-b, rack-c"}})
	s.await(t, "two clusters are named", func() error { return s.setStatus(t, "job", to("rack-b", "rack-c")) })
	s.dispatched(t, "job", to("rack-b"), "")
	s.dispatched(t, "job", to("rack-b", "cloud"), says)
	s.dispatched(t, "job", chosen("cloud"), says)
	s.dispatched(t, "job", to("rack"), "is not sent to the cluster rack;")
	s.dispatched(t, "job", chosen("rack-b"), "")
	s.dispatched(t, "job", fields{"accumulatedPastExecutionTimeSeconds": 1}, "")
	s.label(t, fields{"annotations": nil})
	s.await(t, "none is named", func() error {
		if err := s.setStatus(t, "sent", to("rack-b")); err == nil {
			return fmt.Errorf("a workload is sent to rack-b")
		}
		return nil
	})
	s.dispatched(t, "job", fields{"accumulatedPastExecutionTimeSeconds": 2}, "")
	s.create(t, workloads, stayingWorkload("job"))
	s.try(t, nil, []try{{"a workload of another namespace goes to the cloud", http.MethodPatch, workloads + "/job/status", merge, fields{"status": to("cloud")}, ""}})
}

const offloadings = "/apis/offloading.liqo.io/v1beta1/namespaces/records/namespaceoffloadings"

func offloading(strategy string) fields {
	return fields{"apiVersion": "offloading.liqo.io/v1beta1", "kind": "NamespaceOffloading", "metadata": fields{"name": "offloading"},
		"spec": fields{"podOffloadingStrategy": strategy, "namespaceMappingStrategy": "DefaultName"}}
}

// serveOffloading has the API server serve Liqo's object that extends a namespace.
func (s *apiServer) serveOffloading(t *testing.T) {
	t.Helper()
	const file = "/deployments/liqo/charts/liqo-crds/crds/offloading.liqo.io_namespaceoffloadings.yaml"
	for _, o := range documents(t, file, read(t, sourceOf(t, "github.com/liqotech/liqo")+file)) {
		s.apply(t, o, false)
	}
	s.await(t, "offloadings are served", func() error {
		return s.do(t, nil, http.MethodGet, "/apis/offloading.liqo.io/v1beta1/namespaceoffloadings", "", nil, nil)
	})
}

func (s *apiServer) tryStayingOffloading(t *testing.T) {
	const says = "Liqo cannot extend it to other clusters"
	const one = offloadings + "/offloading"
	selector := fields{"spec": fields{"clusterSelector": fields{"nodeSelectorTerms": []fields{}}}}
	s.try(t, nil, []try{
		{"another one", http.MethodPost, offloadings + "?dryRun=All", asJSON, offloading("Local"), says},
		{"the one that was there, wider", http.MethodPatch, one, merge, selector, says},
		{"its finalizers", http.MethodPatch, one, merge, fields{"metadata": fields{"finalizers": []string{"example.com/a"}}}, ""},
		{"its finalizers away", http.MethodPatch, one, merge, fields{"metadata": fields{"finalizers": nil}}, ""},
		{"one of another namespace", http.MethodPost, strings.Replace(offloadings, "records", "train", 1), asJSON, offloading("Remote"), ""},
	})
}
