// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// serveOpenShift has the API server serve SecurityContextConstraints, by OpenShift's own definition.
func (s *apiServer) serveOpenShift(t *testing.T) {
	t.Helper()
	file := sourceOf(t, "github.com/openshift/api") + "/security/v1/zz_generated.crd-manifests/0000_03_config-operator_01_securitycontextconstraints.crd.yaml"
	for _, o := range documents(t, file, read(t, file)) {
		s.apply(t, o, false)
	}
	s.await(t, "SecurityContextConstraints are served", func() error {
		return s.do(t, nil, http.MethodGet, places["SecurityContextConstraints"], "", nil, nil)
	})
}

// constraints are what the tests read of a SecurityContextConstraints.
type constraints struct {
	Volumes, Users, Groups []string
	AllowHostPID           bool `yaml:"allowHostPID"`
	AllowPrivileged        bool `yaml:"allowPrivilegedContainer"`
	AllowHostDir           bool `yaml:"allowHostDirVolumePlugin"`
	AllowHostNetwork       bool `yaml:"allowHostNetwork"`
	AllowHostIPC           bool `yaml:"allowHostIPC"`
	AllowHostPorts         bool `yaml:"allowHostPorts"`
	ReadOnlyRootFilesystem bool `yaml:"readOnlyRootFilesystem"`
}

// secured is what OpenShift looks at in a pod.
type secured struct {
	HostPID        bool `yaml:"hostPID"`
	HostNetwork    bool `yaml:"hostNetwork"`
	HostIPC        bool `yaml:"hostIPC"`
	InitContainers []container
	Containers     []container
	Volumes        []map[string]any
}

// OpenShift's constraints permit what the agent's pods and the cleanup's ask for, with every component,
// and nothing else. They are for the agent's account in its namespace.
func TestOpenShift(t *testing.T) {
	parts := []string{"components/openshift", "components/selinux", "components/nfd", "components/dra", "components/evict"}
	objects := append(render(t, withComponent(t, "base", parts...)), render(t, withComponent(t, "cleanup", "components/nfd", "components/selinux"))...)
	var scc constraints // the API server judges the rest of it, below
	if err := one(t, objects, "SecurityContextConstraints", name).node.Decode(&scc); err != nil {
		t.Fatal(err)
	}
	kinds, privileged, pids := map[string]bool{}, false, false
	for _, set := range []string{name, "gpu-agent-cleanup"} {
		var pods struct {
			Spec struct{ Template struct{ Spec secured } }
		}
		o := one(t, objects, "DaemonSet", set)
		if err := o.node.Decode(&pods); err != nil {
			t.Fatal(err)
		}
		p := pods.Spec.Template.Spec
		for _, v := range p.Volumes {
			for kind := range v {
				kinds[kind] = kind != "name"
			}
		}
		if pids = pids || p.HostPID; p.HostNetwork || p.HostIPC {
			t.Errorf("%s shares the host's network or IPC", set)
		}
		for _, c := range slices.Concat(p.InitContainers, p.Containers) {
			privileged = privileged || c.SecurityContext.Privileged
			if !c.SecurityContext.ReadOnlyRootFilesystem {
				t.Errorf("%s of %s writes to its root file system", c.Name, set)
			}
			for _, port := range c.Ports {
				if port.HostPort != 0 {
					t.Errorf("%s of %s has a port of the host's", c.Name, set)
				}
			}
		}
	}
	maps.DeleteFunc(kinds, func(_ string, is bool) bool { return !is })
	if used := slices.Sorted(maps.Keys(kinds)); !slices.Equal(scc.Volumes, used) || scc.AllowHostPID != pids || scc.AllowPrivileged != privileged || !scc.AllowHostDir ||
		scc.AllowHostNetwork || scc.AllowHostIPC || scc.AllowHostPorts || !scc.ReadOnlyRootFilesystem || len(scc.Users)+len(scc.Groups) > 0 {
		t.Errorf("pods have volumes %q, the host's PIDs: %v, privileged: %v, and permitted are %+v", used, pids, privileged, scc)
	}

	s := startAPIServer(t)
	s.serveOpenShift(t)
	for _, o := range append(objects, render(t, withComponent(t, "placer", "placer/openshift"))...) {
		s.apply(t, o, o.Kind == "DaemonSet")
	}
	for _, test := range []struct {
		account, namespace, constraints string
		want                            bool
	}{
		{name, name, name, true},
		{name, name, "privileged", false},
		{name, "default", name, false},
		{placer, placer, "nonroot-v2", true},
		{placer, placer, name, false},
	} {
		s.await(t, fmt.Sprintf("%+v", test), func() error {
			var review struct{ Status struct{ Allowed bool } }
			err := s.do(t, nil, http.MethodPost, "/apis/authorization.k8s.io/v1/subjectaccessreviews", asJSON, fields{
				"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": fields{
					"user": "system:serviceaccount:" + test.account + ":" + test.account,
					"resourceAttributes": fields{"group": "security.openshift.io", "resource": "securitycontextconstraints", "verb": "use",
						"name": test.constraints, "namespace": test.namespace}}}, &review)
			if err == nil && review.Status.Allowed != test.want {
				err = fmt.Errorf("the account may use it: %v", review.Status.Allowed)
			}
			return err
		})
	}
}

// critical has the API server admit pods of the system's priority classes only where a quota is for them,
// as Google Kubernetes Engine's does.
const critical = `apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: ResourceQuota
    configuration:
      apiVersion: apiserver.config.k8s.io/v1
      kind: ResourceQuotaConfiguration
      limitedResources:
        - resource: pods
          matchScopes:
            - {scopeName: PriorityClass, operator: In, values: [system-node-critical, system-cluster-critical]}
`

// With the component such a server admits the pods of the agent, the cleanup and the placer.
func TestGKE(t *testing.T) {
	s := startAPIServer(t)
	objects := append(render(t, withComponent(t, "base", "components/gke")), render(t, withComponent(t, "placer", "placer/gke"))...)
	objects = append(objects, one(t, render(t, "cleanup"), "DaemonSet", "gpu-agent-cleanup"))
	quotas, pods := []object(nil), []fields(nil)
	for _, o := range objects {
		if o.Kind == "ResourceQuota" {
			quotas = append(quotas, o)
			continue
		}
		s.apply(t, o, o.Kind == "DaemonSet" || o.Kind == "Deployment")
		if o.Kind == "DaemonSet" || o.Kind == "Deployment" {
			var set struct{ Spec struct{ Template fields } }
			if err := o.node.Decode(&set); err != nil {
				t.Fatal(err)
			}
			set.Spec.Template["metadata"] = fields{"name": o.Metadata.Name, "namespace": o.Metadata.Namespace}
			set.Spec.Template["apiVersion"], set.Spec.Template["kind"] = "v1", "Pod"
			pods = append(pods, set.Spec.Template)
		}
	}
	if len(quotas) != 2 || len(pods) != 3 {
		t.Fatalf("there are %d quotas and %d pods", len(quotas), len(pods))
	}
	create := func(pod fields) error {
		return s.do(t, nil, http.MethodPost, fmt.Sprintf(places["Pod"], pod["metadata"].(fields)["namespace"])+"?dryRun=All", asJSON, pod, nil)
	}
	for _, pod := range pods {
		s.await(t, "a pod is refused without a quota", func() error {
			if err := create(pod); err == nil || !strings.Contains(err.Error(), "insufficient quota to match these scopes") {
				return fmt.Errorf("%v: %w", pod["metadata"], err)
			}
			return nil
		})
	}
	for _, o := range quotas {
		s.apply(t, o, false)
		var quota struct{ Spec struct{ Hard fields } }
		if err := o.node.Decode(&quota); err != nil {
			t.Fatal(err)
		}
		// What the controller does, which does not run here.
		status := fields{"status": fields{"hard": quota.Spec.Hard, "used": fields{"pods": "0"}}}
		if err := s.do(t, nil, http.MethodPatch, placeOf(t, o)+"/status", merge, status, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, pod := range pods {
		s.await(t, "a pod is admitted with it", func() error { return create(pod) })
	}
}

// The component has the agent label the caps' files, and both run with the type that may.
func TestRenderedSELinux(t *testing.T) {
	for on, want := range map[string][]string{
		"base": {"+ DaemonSet gpu-agent/gpu-agent.spec.template.spec.containers[gpu-agent].env[GPU_AGENT_CAP_LABELS].name = GPU_AGENT_CAP_LABELS",
			"+ DaemonSet gpu-agent/gpu-agent.spec.template.spec.containers[gpu-agent].env[GPU_AGENT_CAP_LABELS].value = true",
			"+ DaemonSet gpu-agent/gpu-agent.spec.template.spec.containers[gpu-agent].securityContext.seLinuxOptions.type = spc_t"},
		"cleanup": {"+ DaemonSet gpu-agent/gpu-agent-cleanup.spec.template.spec.initContainers[cleanup].securityContext.seLinuxOptions.type = spc_t",
			"+ DaemonSet gpu-agent/gpu-agent-cleanup.spec.template.spec.containers[done].securityContext.seLinuxOptions.type = spc_t"},
	} {
		slices.Sort(want)
		if got := changes(flat(t, render(t, on)), flat(t, render(t, withComponent(t, on, "components/selinux")))); !slices.Equal(got, want) {
			t.Errorf("beside %s it changes\n%s\nwant\n%s", on, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	mps := flat(t, render(t, withComponent(t, "base", "components/mps", "components/selinux")))
	if got := mps["DaemonSet gpu-agent/gpu-agent-mps.spec.template.spec.containers[mps].securityContext.seLinuxOptions.type"]; got != "spc_t" {
		t.Errorf("the MPS daemons run as %q", got)
	}
	if _, ok := programFlags(t)["cap-labels"]; !ok {
		t.Error("gpu-agent run has no flag --cap-labels")
	}
}
