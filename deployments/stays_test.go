// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
)

const (
	staysHere   = "stays at the site on-prem"
	recordsPods = "/api/v1/namespaces/records/pods"

	recordsWorkloads = queueing + "/namespaces/records/workloads"
)

// stayingPod is one of the namespace records that asks for a GPU; change has what is particular in its spec.
func stayingPod(name string, change fields) fields {
	asks := fields{"limits": fields{"example.com/gpu": "1"}}
	container := fields{"name": "main", "image": "none", "resources": asks}
	spec := fields{"automountServiceAccountToken": false, "containers": []fields{container}}
	maps.Copy(spec, change)
	return fields{"apiVersion": "v1", "kind": "Pod", "metadata": fields{"name": name}, "spec": spec}
}

// asKubelet is that of node-1, with all rights: what it may not the policies say.
var asKubelet = http.Header{
	"Impersonate-User": {"system:node:node-1"}, "Impersonate-Group": {"system:nodes", "system:masters"}}

// at is the node selector of a site, and the label of its nodes.
func at(site string) fields { return fields{"example.com/gpu.site": site} }

// TestWhatStays has the policies of the component stays judge at the real API server: each rule refuses
// what it is for, with words that say what to do, and lets the rest through. Of a namespace without the
// label nothing is judged.
func TestWhatStays(t *testing.T) {
	s := startAPIServer(t)
	s.serveKueue(t)
	s.serveOffloading(t)
	s.nodes(t)
	for _, namespace := range []string{"records", "train"} {
		s.namespace(t, namespace)
	}
	gates := []fields{{"name": "kueue.x-k8s.io/admission"}}
	// These are there before the namespace has the label.
	for _, pod := range []fields{stayingPod("runs", nil), stayingPod("waits", fields{"schedulingGates": gates})} {
		s.create(t, recordsPods, pod)
	}
	s.create(t, recordsWorkloads, stayingWorkload("sent"))
	s.dispatched(t, "sent", toClusters("old"), "")
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
			err := s.do(t, nil, http.MethodPost, path+"?dryRun=All", asJSON, object, nil)
			if err := refusedWith(err, "work of this namespace stays"); err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
		}
		label := fields{"metadata": fields{"labels": at("on-prem")}}
		err := s.do(t, asKubelet, http.MethodPatch, "/api/v1/nodes/node-1?dryRun=All", merge, label, nil)
		return errors.Join(refusedWith(err, "the site of its node"),
			refusedWith(s.setStatus(t, "sent", toClusters("cloud")), "work of this namespace stays"))
	})
	t.Run("pods", s.tryStayingPods)
	t.Run("bindings", s.tryStayingBindings)
	t.Run("workloads", s.tryStayingWorkloads)
	t.Run("Liqo", s.tryStayingOffloading)
	t.Run("nodes", s.tryStayingNodes)
	t.Run("a label without a site", func(t *testing.T) {
		s.label(t, fields{"labels": fields{"example.com/gpu.stays": ""}})
		s.await(t, "nothing runs", func() error {
			pod := stayingPod("a", fields{"nodeSelector": at("")})
			err := s.do(t, nil, http.MethodPost, recordsPods+"?dryRun=All", asJSON, pod, nil)
			return refusedWith(err, "work of this namespace stays")
		})
	})
}

// refusedWith is an error unless err is the API server's refusal with these words.
func refusedWith(err error, says string) error {
	if err == nil || !strings.Contains(err.Error(), says) {
		return fmt.Errorf("%v, want a refusal that says %q", err, says)
	}
	return nil
}

// label writes the metadata of the namespace records.
func (s *apiServer) label(t *testing.T, metadata fields) {
	t.Helper()
	err := s.do(t, nil, http.MethodPatch, "/api/v1/namespaces/records", merge, fields{"metadata": metadata}, nil)
	if err != nil {
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
	cpu := fields{"requests": fields{"cpu": "1", "ephemeral-storage": "1Gi"}}
	plain := fields{"containers": []fields{{"name": "main", "image": "none", "resources": cpu}}}
	// asking is a pod that asks for a GPU, and plainly one that does not; change is as in stayingPod.
	asking := func(change fields) fields { return stayingPod("a", change) }
	plainly := func(change fields) fields {
		pod := maps.Clone(plain)
		maps.Copy(pod, change)
		return stayingPod("a", pod)
	}
	terms := []fields{{"matchExpressions": []fields{
		{"key": "example.com/gpu.site", "operator": "In", "values": []string{"on-prem"}}}}}
	affinity := fields{"nodeAffinity": fields{
		"requiredDuringSchedulingIgnoredDuringExecution": fields{"nodeSelectorTerms": terms}}}
	all := []fields{{"operator": "Exists"}}
	post := func(name string, pod fields, refused string) try {
		return try{name, http.MethodPost, dry, asJSON, pod, refused}
	}
	patch := func(name, pod string, body fields, refused string) try {
		return try{name, http.MethodPatch, recordsPods + "/" + pod + "?dryRun=All", merge, body, refused}
	}
	ungated := func(selector fields) fields {
		return fields{"spec": fields{"schedulingGates": nil, "nodeSelector": selector}}
	}
	other := strings.Replace(dry, "records", "train", 1)
	labelled := fields{"metadata": fields{"labels": fields{"a": "b"}}}
	const (
		cloud    = "this pod goes to cloud; give the pod template the node selector example.com/gpu.site: on-prem"
		anywhere = staysHere + " (its label example.com/gpu.stays), and this pod may go anywhere"
		noNode   = "leave nodeName out"
	)
	s.try(t, nil, []try{
		post("a pod of this site", asking(fields{"nodeSelector": at("on-prem")}), ""),
		post("one of the cloud", asking(fields{"nodeSelector": at("cloud")}), cloud),
		post("one that may go anywhere", asking(nil), anywhere),
		post("one of this site by its affinity alone", asking(fields{"affinity": affinity}), anywhere),
		post("one that tolerates all", asking(fields{"tolerations": all}), anywhere),
		post("one with a node", asking(fields{"nodeSelector": at("on-prem"), "nodeName": "node-1"}), noNode),
		post("one behind a gate", asking(fields{"schedulingGates": gates}), ""),
		post("one of the cloud, behind a gate",
			asking(fields{"schedulingGates": gates, "nodeSelector": at("cloud")}), cloud),
		post("a GPU of another plugin", with("containers", fields{"limits": fields{"nvidia.com/gpu": "1"}}), anywhere),
		post("a GPU for an init container", with("initContainers", fields{"limits": fields{unitsName: "1"}}), anywhere),
		post("a claim", plainly(fields{"resourceClaims": claims}), anywhere),
		post("a pod without a device", plainly(nil), ""),
		post("a pod without a device, on a node", plainly(fields{"nodeName": "node-1"}), ""),
		{"another namespace's pod", http.MethodPost, other, asJSON, asking(nil), ""},

		// They were there before the label; their controllers go on.
		patch("a label of one that runs", "runs", labelled, ""),
		patch("a label of one that waits", "waits", labelled, ""),
		patch("its gate away", "waits", ungated(nil), anywhere),
		patch("its gate away, for the cloud", "waits", ungated(at("cloud")), cloud),
		patch("its gate away, for this site", "waits", ungated(at("on-prem")), ""),
	})
	static := asking(fields{"nodeName": "node-1", "tolerations": all})
	s.try(t, asKubelet, []try{post("a kubelet's static pod", static, "")})

	s.label(t, fields{"annotations": fields{"example.com/gpu.stays-pods": "all"}})
	s.await(t, "pods without a device stay, too", func() error {
		return refusedWith(s.do(t, nil, http.MethodPost, dry, asJSON, plainly(nil), nil), staysHere)
	})
	here := plainly(fields{"nodeSelector": at("on-prem")})
	s.try(t, nil, []try{post("a pod without a device, of this site", here, "")})
	s.label(t, fields{"annotations": nil})
}

func bindingOf(pod string) fields {
	return fields{"apiVersion": "v1", "kind": "Binding", "metadata": fields{"name": pod},
		"target": fields{"kind": "Node", "name": "node-1"}}
}

func (s *apiServer) tryStayingBindings(t *testing.T) {
	s.create(t, recordsPods, stayingPod("bound", fields{"nodeSelector": at("on-prem")}))
	s.create(t, "/api/v1/namespaces/train/pods", stayingPod("bound", nil))
	account := func(name string) http.Header {
		return http.Header{"Impersonate-User": {name}, "Impersonate-Group": {"system:masters"}}
	}
	const (
		path  = recordsPods + "/bound/binding"
		old   = "/api/v1/namespaces/records/bindings"
		other = "/api/v1/namespaces/train/pods/bound/binding"
		says  = "schedulers alone bind its pods"
	)
	bind := func(what, path, refused string) []try {
		return []try{{"a binding by " + what, http.MethodPost, path, asJSON, bindingOf("bound"), refused}}
	}
	for _, who := range []string{
		"alice", "system:kube-scheduler-2",
		"system:serviceaccount:records:default", "system:serviceaccount:records:kube-scheduler",
	} {
		s.try(t, account(who), bind(who, path+"?dryRun=All", says))
		s.try(t, account(who), bind(who+", the older way", old+"?dryRun=All", says))
	}
	second := account("system:serviceaccount:kube-system:second-scheduler")
	s.try(t, second, bind("a second scheduler", path+"?dryRun=All", ""))
	scheduler := http.Header{
		"Impersonate-User": {"system:kube-scheduler"}, "Impersonate-Group": {"system:authenticated"}}
	s.try(t, scheduler, bind("the scheduler", path, ""))
	s.try(t, nil, bind("root in another namespace", other, ""))
}

// stayingWorkload is one of a pod set.
func stayingWorkload(name string) fields {
	spec := fields{"restartPolicy": "Never", "containers": []fields{{"name": "main", "image": "none"}}}
	pods := fields{"name": "main", "count": 1, "template": fields{"metadata": fields{}, "spec": spec}}
	return fields{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": fields{"name": name},
		"spec": fields{"podSets": []fields{pods}}}
}

// toClusters is the status of a workload that is offered to clusters.
func toClusters(names ...string) fields { return fields{"nominatedClusterNames": names} }

// setStatus tries to write the status of a workload of the namespace records.
func (s *apiServer) setStatus(t *testing.T, name string, status fields) error {
	path := recordsWorkloads + "/" + name + "/status?dryRun=All"
	return s.do(t, nil, http.MethodPatch, path, merge, fields{"status": status}, nil)
}

// dispatched writes where a workload goes, as MultiKueue does.
func (s *apiServer) dispatched(t *testing.T, name string, status fields, refused string) {
	t.Helper()
	what, path := fmt.Sprintf("%s goes to %v", name, status), recordsWorkloads+"/"+name+"/status"
	s.try(t, nil, []try{{what, http.MethodPatch, path, merge, fields{"status": status}, refused}})
}

func (s *apiServer) tryStayingWorkloads(t *testing.T) {
	const says = "is not sent to the cluster cloud; " +
		"clusters that may have it are named in the annotation example.com/gpu.stays-clusters"
	s.create(t, recordsWorkloads, stayingWorkload("job"))
	to := toClusters
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
	other := try{"a workload of another namespace", http.MethodPatch, workloads + "/job/status", merge,
		fields{"status": to("cloud")}, ""}
	s.try(t, nil, []try{other})
}

const offloadings = "/apis/offloading.liqo.io/v1beta1/namespaces/records/namespaceoffloadings"

func offloading(strategy string) fields {
	return fields{"apiVersion": "offloading.liqo.io/v1beta1", "kind": "NamespaceOffloading",
		"metadata": fields{"name": "offloading"},
		"spec":     fields{"podOffloadingStrategy": strategy, "namespaceMappingStrategy": "DefaultName"}}
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
	other := strings.Replace(offloadings, "records", "train", 1)
	finalizers := func(names []string) fields { return fields{"metadata": fields{"finalizers": names}} }
	selector := fields{"spec": fields{"clusterSelector": fields{"nodeSelectorTerms": []fields{}}}}
	s.try(t, nil, []try{
		{"another one", http.MethodPost, offloadings + "?dryRun=All", asJSON, offloading("Local"), says},
		{"the one that was there, wider", http.MethodPatch, one, merge, selector, says},
		{"its finalizers", http.MethodPatch, one, merge, finalizers([]string{"example.com/a"}), ""},
		{"its finalizers away", http.MethodPatch, one, merge, finalizers(nil), ""},
		{"one of another namespace", http.MethodPost, other, asJSON, offloading("Remote"), ""},
	})
}

func (s *apiServer) tryStayingNodes(t *testing.T) {
	const node, says = "/api/v1/nodes/node-1", "a kubelet does not change the site of its node"
	site := func(name any) fields {
		return fields{"metadata": fields{"labels": fields{"example.com/gpu.site": name}}}
	}
	other := fields{"metadata": fields{"labels": fields{"example.com/pool": "a"}}}
	to := func(what, path string, body fields, refused string) []try {
		return []try{{what, http.MethodPatch, path, merge, body, refused}}
	}
	s.try(t, asKubelet, to("a kubelet gives a site", node, site("on-prem"), says))
	s.try(t, nil, to("root gives a site", node, site("cloud"), ""))
	s.try(t, asKubelet, to("a kubelet gives another site", node, site("on-prem"), says))
	s.try(t, asKubelet, to("a kubelet gives another site, by the status", node+"/status", site("on-prem"), says))
	s.try(t, asKubelet, to("a kubelet takes the site away", node, site(nil), says))
	s.try(t, asKubelet, to("a kubelet gives another label", node, other, ""))
	is := fields{"status": fields{"capacity": fields{"cpu": "4"}}}
	s.try(t, asKubelet, to("a kubelet says how its node is", node+"/status", is, ""))
}
