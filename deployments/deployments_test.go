// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/tests/plane"

	"go.yaml.in/yaml/v4"
)

const name = "gpu-agent" // of everything but the ConfigMap

func agentSet(t *testing.T, objects []object) daemonSet {
	return as[daemonSet](t, one(t, objects, "DaemonSet", name))
}

// agent is the DaemonSet's only container.
func agent(t *testing.T, d *daemonSet) *container {
	t.Helper()
	if n := len(d.Spec.Template.Spec.Containers); n != 1 {
		t.Fatalf("%d containers, want 1", n)
	}
	return &d.Spec.Template.Spec.Containers[0]
}

func TestEveryFileIsUsed(t *testing.T) {
	for _, dir := range slices.Concat(kustomizations(t), components(t), doors(t)) {
		k := readKustomization(t, dir)
		used := []string{"kustomization.yaml"}
		if dir == "placer" {
			used = append(used, filepath.Base(schedulerConfig)) // for kube-scheduler, not for the cluster
			for _, door := range doors(t) {
				used = append(used, filepath.Base(door))
			}
		}
		for _, r := range k.Resources {
			if !strings.HasPrefix(r, "../") {
				used = append(used, r)
			}
		}
		for _, p := range k.Patches {
			if p.Path != "" {
				used = append(used, p.Path)
			}
		}
		for _, g := range k.ConfigMapGenerator {
			used = append(used, g.Files...)
		}
		files, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		var there []string
		for _, f := range files {
			there = append(there, filepath.Base(f))
			if slices.Contains(doors(t), f) || filepath.Ext(f) == ".json" { // which has no comments
				continue
			}
			text := string(read(t, f))
			if !strings.HasPrefix(text, "# SPDX-License-Identifier: Apache-2.0\n") {
				t.Errorf("%s does not begin with its licence", f)
			}
		}
		slices.Sort(used)
		if !slices.Equal(used, there) {
			t.Errorf("%s: the kustomization uses %q, the directory has %q", dir, used, there)
		}
	}
}

func TestNamespace(t *testing.T) {
	objects := base(t)
	ns := one(t, objects, "Namespace", name)
	if level := ns.Metadata.Labels["pod-security.kubernetes.io/enforce"]; level != "privileged" {
		t.Errorf("Pod Security level %q: the agent's pods would be refused", level)
	}
	cluster := []string{"Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
	for _, o := range objects {
		want := name
		if slices.Contains(cluster, o.Kind) {
			want = ""
		}
		if got := o.Metadata.Namespace; got != want {
			t.Errorf("%s: %s %s is in namespace %q, want %q", o.file, o.Kind, o.Metadata.Name, got, want)
		}
	}
}

// rule is a permission: a resource, where, and its verbs.
type rule struct {
	resource, verbs string
	cluster         bool
}

// peoplesRoles are the roles of people, which no account of a program has.
var peoplesRoles = []string{"gpu-agent-view", "gpu-agent-operator"}

// The roles of people grant what the plugin for kubectl uses, and are bound to nobody.
func TestPeoplesRBACIsWhatThePluginUses(t *testing.T) {
	objects := base(t)
	for _, test := range []struct {
		kind, name string
		uses       [][]kube.Rule
	}{
		{"ClusterRole", "gpu-agent-view", [][]kube.Rule{pluginkube.ViewRules}},
		{"ClusterRole", "gpu-agent-operator", [][]kube.Rule{pluginkube.ViewRules, pluginkube.OperatorRules}},
		{"Role", "gpu-agent-operator", [][]kube.Rule{pluginkube.AgentRules}},
	} {
		var have, want []rule
		for _, rr := range as[role](t, one(t, objects, test.kind, test.name)).Rules {
			if len(rr.APIGroups) != 1 || len(rr.Resources) != 1 {
				t.Fatalf("%s: one group and one resource a rule, so that each has its reason: %+v", test.name, rr)
			}
			if narrowed := rr.Resources[0] == "configmaps"; narrowed != slices.Equal(rr.ResourceNames, []string{"gpu-partitions"}) {
				t.Errorf("%s: %s is narrowed to %q", test.name, rr.Resources[0], rr.ResourceNames)
			}
			have = append(have, rule{strings.TrimSuffix(rr.Resources[0]+"."+rr.APIGroups[0], "."), strings.Join(rr.Verbs, " "), test.kind == "ClusterRole"})
		}
		for _, list := range test.uses {
			for _, r := range list {
				want = append(want, rule{strings.TrimSuffix(r.Resource+"."+r.APIGroup, "."), strings.Join(r.Verbs, " "), r.Cluster})
			}
		}
		if !slices.Equal(have, want) {
			t.Errorf("%s %s grants\n%+v\npluginkube uses\n%+v", test.kind, test.name, have, want)
		}
	}
	for _, o := range objects {
		if strings.HasSuffix(o.Kind, "RoleBinding") && slices.Contains(peoplesRoles, o.Metadata.Name) {
			t.Errorf("%s: %s %s binds a role of people", o.file, o.Kind, o.Metadata.Name)
		}
	}
}

// grants are the rights that objects give to an account, which has the name of its
// namespace. All bindings are for it and refer to roles of their own name.
func grants(t *testing.T, objects []object, name, account string) []rule {
	t.Helper()
	var have []rule
	for _, o := range objects {
		kind := o.Kind
		if kind != "ClusterRole" && kind != "Role" || slices.Contains(peoplesRoles, o.Metadata.Name) {
			continue
		}
		for _, rr := range as[role](t, o).Rules {
			if len(rr.APIGroups) != 1 || len(rr.Resources) != 1 {
				t.Fatalf("%s: one group and one resource a rule, so that each has its reason: %+v", kind, rr)
			}
			resource := rr.Resources[0]
			if rr.APIGroups[0] != "" {
				resource += "." + rr.APIGroups[0]
			}
			have = append(have, rule{resource, strings.Join(rr.Verbs, " "), kind == "ClusterRole"})
			// What can be named is.
			want := []string(nil)
			switch resource {
			case "configmaps":
				want = []string{one(t, objects, "ConfigMap", "gpu-partitions").Metadata.Name}
			case "resourceclaims/driver.resource.k8s.io":
				want = []string{"gpus." + programFlags(t)["domain"]}
			case "securitycontextconstraints.security.openshift.io":
				want = []string{account}
			case "leases.coordination.k8s.io":
				if !slices.Equal(rr.Verbs, []string{"create"}) {
					want = []string{account}
				}
			}
			if !slices.Equal(rr.ResourceNames, want) {
				t.Errorf("%s: %s is narrowed to %q, want %q", kind, resource, rr.ResourceNames, want)
			}
		}
		b := as[binding](t, one(t, objects, kind+"Binding", o.Metadata.Name))
		if o.Metadata.Name != name || b.RoleRef.Kind != kind || b.RoleRef.Name != name || b.RoleRef.APIGroup != "rbac.authorization.k8s.io" {
			t.Errorf("%sBinding of %s refers to %+v, want %s", kind, o.Metadata.Name, b.RoleRef, name)
		}
		if len(b.Subjects) != 1 || b.Subjects[0].Kind != "ServiceAccount" || b.Subjects[0].Name != account || b.Subjects[0].Namespace != account {
			t.Errorf("%sBinding is for %+v", kind, b.Subjects)
		}
	}
	return have
}

func TestRBACIsWhatTheAgentUses(t *testing.T) {
	objects := base(t)
	have := map[string][]rule{"": grants(t, objects, name, name)} // by component
	for _, dir := range components(t) {
		part := filepath.Base(dir)
		have[part] = grants(t, resources(t, dir), name+"-"+part, name)
	}
	// OpenShift looks at this one when it admits the agent's pods.
	want := map[string][]rule{"openshift": {{resource: "securitycontextconstraints.security.openshift.io", verbs: "use"}}}
	for _, r := range agentkube.Rules {
		resource := r.Resource
		if r.APIGroup != "" {
			resource += "." + r.APIGroup
		}
		want[r.Component] = append(want[r.Component], rule{resource, strings.Join(r.Verbs, " "), r.Cluster})
	}
	for part, rules := range want {
		for _, r := range rules {
			if !slices.Contains(have[part], r) {
				t.Errorf("internal/kube/agentkube uses %+v, which component %q does not grant", r, part)
			}
		}
	}
	for part, rules := range have {
		for _, r := range rules {
			if !slices.Contains(want[part], r) {
				t.Errorf("component %q grants %+v, which internal/kube/agentkube does not use, or not with it", part, r)
			}
		}
	}
	one(t, objects, "ServiceAccount", agentSet(t, objects).Spec.Template.Spec.ServiceAccountName)
}

// account is where a program looks for its service account's token.
const account = "/var/run/secrets/kubernetes.io/serviceaccount"

// A token that somebody carries off is of use for ten minutes, not for an hour, and
// there is no other one in the pod.
func TestTokenLivesForTenMinutes(t *testing.T) {
	for what, d := range map[string]daemonSet{
		"base":          agentSet(t, base(t)),
		"runtime-class": agentSet(t, render(t, "overlays/runtime-class")),
		"cleanup":       as[daemonSet](t, one(t, resources(t, "cleanup"), "DaemonSet", "gpu-agent-cleanup")),
	} {
		spec := &d.Spec.Template.Spec
		if spec.AutomountToken {
			t.Errorf("%s: the kubelet's own token, of an hour, is mounted", what)
		}
		volume := ""
		for _, v := range spec.Volumes {
			if len(v.Projected.Sources) != 2 {
				continue
			}
			volume = v.Name
			token, ca := v.Projected.Sources[0].Token, v.Projected.Sources[1].ConfigMap
			if token.Path != "token" || token.Expiry != 600 || v.Projected.DefaultMode != 0o400 {
				t.Errorf("%s: token %+v with mode %o", what, token, v.Projected.DefaultMode)
			}
			if ca.Name != "kube-root-ca.crt" || len(ca.Items) != 1 || ca.Items[0].Path != "ca.crt" {
				t.Errorf("%s: authority %+v", what, ca)
			}
		}
		for _, c := range append(spec.InitContainers, spec.Containers...) {
			if !slices.ContainsFunc(c.VolumeMounts, func(m mount) bool { return m.Name == volume && m.MountPath == account && m.ReadOnly }) {
				t.Errorf("%s: %s has no token at %s", what, c.Name, account)
			}
		}
	}
}

// rights are the places of a manifest that need a reason.
func needsReason(path []string, value string) bool {
	last := path[len(path)-1]
	if last == "[]" && len(path) > 1 {
		return slices.Contains([]string{"volumes", "volumeMounts", "rules", "add"}, path[len(path)-2])
	}
	switch last {
	case "privileged", "hostPID", "hostIPC", "hostNetwork", "hostUsers", "procMount",
		"seLinuxOptions", "pod-security.kubernetes.io/enforce":
		return true
	case "automountServiceAccountToken", "allowPrivilegeEscalation":
		return value == "true"
	}
	return false
}

func TestEveryRightHasItsReason(t *testing.T) {
	found := 0
	for _, dir := range slices.Concat(kustomizations(t), components(t), doors(t)) {
		files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			for _, o := range documents(t, f, read(t, f)) {
				if o.Kind == "PrometheusRule" { // its rules give no right
					continue
				}
				walk(o.node, nil, func(path []string, key, value *yaml.Node) {
					if !needsReason(path, value.Value) {
						return
					}
					found++
					text, ok := strings.CutPrefix(headComment(key), "Reason: ")
					if !ok || len(strings.Fields(text)) < 4 {
						t.Errorf("%s:%d: %s has no comment right above it that begins with \"Reason:\" and says why",
							f, key.Line, strings.Join(path, "."))
					}
				})
			}
		}
	}
	// The base alone has 7 volumes, 8 mounts, 4 rules and 4 privileges; the
	// cleanup 6 volumes, 6 mounts and 1 privilege; the component evict 1 rule, the
	// component nfd 2 volumes and 2 mounts.
	if found < 40 {
		t.Errorf("only %d rights found: this test does not look where they are", found)
	}
}

func TestMounts(t *testing.T) {
	d := agentSet(t, base(t))
	c := agent(t, &d)
	env := c.env()
	flags := programFlags(t)
	host := map[string]string{} // volume → path
	for _, v := range d.Spec.Template.Spec.Volumes {
		if len(v.Projected.Sources) == 0 && (v.HostPath.Path == "" || v.HostPath.Type == "") {
			t.Errorf("volume %s: path %q of type %q; without a type a missing directory is noticed late", v.Name, v.HostPath.Path, v.HostPath.Type)
		}
		host[v.Name] = v.HostPath.Path
	}
	mounted := map[string]bool{}  // by volume
	inside := map[string]string{} // path inside → path on the host
	for _, m := range c.VolumeMounts {
		p, ok := host[m.Name]
		if _, twice := inside[m.MountPath]; !ok || twice {
			t.Errorf("mount %s: there is no such volume, or something is mounted there twice", m.MountPath)
		}
		mounted[m.Name] = true
		inside[m.MountPath] = p
		if m.Name == "cgroup" && m.ReadOnly {
			t.Error("the cgroups are read-only: cgroup.kill could not be written")
		}
		if m.Name == "dev" && m.ReadOnly {
			t.Error("the device nodes are read-only: those of MIG instances could not be made")
		}
		if m.Name == "host" && (!m.ReadOnly || m.MountPropagation != "HostToContainer") {
			t.Errorf("the host's root is read-only %v with propagation %q: it should be read-only and follow the host's unmounts", m.ReadOnly, m.MountPropagation)
		}
	}
	for name := range host {
		if !mounted[name] {
			t.Errorf("volume %s has no mount", name)
		}
	}
	value := func(flag string) string {
		if v, ok := env["GPU_AGENT_"+strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))]; ok {
			return v
		}
		return flags[flag]
	}
	for path, same := range map[string]bool{
		value("kubelet-dir") + "/device-plugins": true,
		value("kubelet-dir") + "/pod-resources":  true,
		value("cdi-dir"):                         true,
		value("state-dir"):                       true, // CDI files name the hook by it
		value("driver-root"):                     false,
		value("host-root"):                       false,
		"/dev":                                   true,
		value("host-root") + "/sys/fs/cgroup":    false, // written: cgroup.kill
	} {
		p, ok := inside[path]
		if !ok || same && p != path {
			t.Errorf("the agent uses %s, where the host's %q is mounted", path, p)
		}
	}
	if got := inside[value("driver-root")]; got != value("host-driver-root") {
		t.Errorf("CDI files will say %s for the driver's root, which is %s on the host", value("host-driver-root"), got)
	}
	if got := inside[value("driver-root")+"/dev"]; got != "/dev" {
		t.Errorf("nodes of MIG instances are made below the host's %q, want /dev", got)
	}
	if got := inside[value("host-root")+"/sys/fs/cgroup"]; got != "/sys/fs/cgroup" {
		t.Errorf("a container is ended by its cgroup, which is sought in the host's %q", got)
	}
	if got := inside[value("host-root")]; got != "/" {
		t.Errorf("the runtime's socket is looked for below the host's %q, want /", got)
	}
}

func TestEnvironmentIsFlags(t *testing.T) {
	type command struct {
		name         string
		flags, twins map[string]bool
	}
	knows := func(name, prefix string, flags map[string]string) command {
		c := command{name, map[string]bool{}, map[string]bool{}}
		for f := range flags {
			c.flags[f] = true
			c.twins[prefix+strings.ToUpper(strings.ReplaceAll(f, "-", "_"))] = true
		}
		return c
	}
	run := knows("gpu-agent run", "GPU_AGENT_", programFlags(t))
	cleanup := knows("gpu-agent cleanup", "GPU_AGENT_", commandFlags(t, "cleanup"))
	ofMPS := knows("gpu-agent-mps run", "GPU_AGENT_", daemonsFlags(t))
	ofPlacer := knows("gpu-placer run", "GPU_PLACER_", placerFlags(t))
	files, err := filepath.Glob("*/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("overlays/*/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	parts, err := filepath.Glob("components/*/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, door := range doors(t) {
		of, err := filepath.Glob(filepath.Join(door, "*.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		parts = append(parts, of...)
	}
	found := 0
	for _, f := range slices.Concat(files, more, parts) {
		text, c := read(t, f), run
		switch program, _, _ := strings.Cut(f, "/"); program {
		case "examples", "chart":
			continue // other programs, with flags of their own; the chart's values have a test of theirs
		case "cleanup":
			c = cleanup
		case "placer":
			c = ofPlacer
		case "components":
			if strings.HasPrefix(f, "components/mps/") {
				c = ofMPS
			}
		}
		for _, v := range regexp.MustCompile(`GPU_(?:AGENT|PLACER)_[A-Z_]+`).FindAllString(string(text), -1) {
			found++
			if !c.twins[v] {
				t.Errorf("%s: %s is the twin of no flag of %s", f, v, c.name)
			}
		}
		text = regexp.MustCompile(`(?m)^# +kubectl .*$`).ReplaceAll(text, nil) // a command that is shown, with kubectl's flags
		for _, v := range regexp.MustCompile(`--[a-z][a-z-]+`).FindAllString(string(text), -1) {
			if !c.flags[v[2:]] {
				t.Errorf("%s: %s has no flag %s", f, c.name, v)
			}
		}
	}
	if found < 5 {
		t.Errorf("only %d variables found", found)
	}

	d := agentSet(t, base(t))
	c := agent(t, &d)
	if !slices.Equal(c.Args, []string{"run"}) {
		t.Errorf("arguments %q, want run: the rest is in the environment, where an overlay can change one", c.Args)
	}
	// A $(NAME) is replaced only where NAME stands before it in the list.
	known := map[string]string{}
	for _, e := range c.Env {
		if p := e.ValueFrom.FieldRef.FieldPath; p != "" {
			known[e.Name] = p
			continue
		}
		for _, ref := range regexp.MustCompile(`\$\((\w+)\)`).FindAllStringSubmatch(e.Value, -1) {
			if known[ref[1]] == "" {
				t.Errorf("%s refers to %s, which does not stand before it", e.Name, ref[1])
			}
		}
	}
	expand := func(s string) string {
		return os.Expand(strings.NewReplacer("$(", "${", ")", "}").Replace(s), func(k string) string { return "<" + known[k] + ">" })
	}
	env := c.env()
	for name, want := range map[string]string{
		"GPU_AGENT_NODE_NAME": "<spec.nodeName>",
		"GPU_AGENT_POD":       "<metadata.namespace>/<metadata.name>",
		"GPU_AGENT_CONFIGMAP": "<metadata.namespace>/gpu-partitions",
	} {
		if got := expand(env[name]); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// help is what `PROGRAM COMMAND --help` prints.
func help(t *testing.T, program, command string) string {
	t.Helper()
	line := program + " " + command
	if _, ok := helps[line]; !ok {
		out, err := exec.CommandContext(t.Context(), program, command, "--help").Output()
		if err != nil {
			t.Fatalf("%s --help: %v", line, err)
		}
		helps[line] = string(out)
	}
	return helps[line]
}

var helps = map[string]string{} // by program and command

// programFlags are the flags of `gpu-agent run` with their defaults, as it
// prints them.
func programFlags(t *testing.T) map[string]string {
	t.Helper()
	return commandFlags(t, "run")
}

// commandFlags are those of a command of gpu-agent, but for --help.
func commandFlags(t *testing.T, command string) map[string]string {
	t.Helper()
	return flagsOf(t, program(t), command)
}

// placerFlags are those of `gpu-placer run`.
func placerFlags(t *testing.T) map[string]string {
	t.Helper()
	return flagsOf(t, placerProgram(t), "run")
}

// daemonsFlags are those of `gpu-agent-mps run`.
func daemonsFlags(t *testing.T) map[string]string {
	t.Helper()
	return flagsOf(t, daemonsProgram(t), "run")
}

// flagsOf reads a command's help. A flag's text has several lines.
func flagsOf(t *testing.T, program, command string) map[string]string {
	t.Helper()
	flags := map[string]string{}
	_, text, _ := strings.Cut(help(t, program, command), "\nFlags:\n")
	for _, flag := range regexp.MustCompile(`(?m)^ {2}(?:-\w, | {4})--`).Split(text, -1)[1:] {
		flag, _, _ = strings.Cut(flag, "\n\n")
		flag = strings.Join(strings.Fields(flag), " ")
		name, _, _ := strings.Cut(flag, " ")
		flags[name] = ""
		if m := regexp.MustCompile(`\(default "?([^")]*)"?\)$`).FindStringSubmatch(flag); m != nil {
			flags[name] = m[1]
		}
	}
	delete(flags, "help")
	if flags["domain"] == "" && flags["state-dir"] == "" {
		t.Fatalf("%s %s --help printed no flags:\n%s", program, command, help(t, program, command))
	}
	return flags
}

func TestProbes(t *testing.T) {
	d := agentSet(t, base(t))
	c := agent(t, &d)
	if len(c.Ports) != 1 || fmt.Sprintf(":%d", c.Ports[0].ContainerPort) != programFlags(t)["http"] {
		t.Fatalf("ports %+v, and the agent serves on %s", c.Ports, programFlags(t)["http"])
	}
	good := func() error { return nil }
	pages := agentobs.New(agentobs.Options{
		Logger: slog.New(slog.DiscardHandler), Healthy: good, Ready: good,
		Status: func() status.Status { return status.Status{} }, Metrics: agentobs.NewMetrics("test"),
	}).Handler()
	for what, p := range map[string]probe{"/healthz": c.LivenessProbe, "/readyz": c.ReadinessProbe} {
		if p.HTTPGet.Path != what || p.HTTPGet.Port != c.Ports[0].Name {
			t.Errorf("a probe asks %+v, want %s on %s", p.HTTPGet, what, c.Ports[0].Name)
		}
		answer := httptest.NewRecorder()
		pages.ServeHTTP(answer, httptest.NewRequestWithContext(context.Background(), http.MethodGet, p.HTTPGet.Path, nil))
		if answer.Code != http.StatusOK {
			t.Errorf("the agent answers %s with %d", p.HTTPGet.Path, answer.Code)
		}
	}
}

func TestDaemonSet(t *testing.T) {
	d := agentSet(t, base(t))
	c, spec := agent(t, &d), &d.Spec.Template.Spec
	if len(d.Spec.Selector.MatchLabels) == 0 || !maps.Equal(d.Spec.Selector.MatchLabels, d.Spec.Template.Metadata.Labels) {
		t.Errorf("the selector %v is not the pods' labels %v", d.Spec.Selector.MatchLabels, d.Spec.Template.Metadata.Labels)
	}
	if u := d.Spec.UpdateStrategy; u.Type != "RollingUpdate" || u.RollingUpdate.MaxSurge != 0 {
		t.Errorf("update strategy %+v: two agents must never be on one node", u)
	}
	if spec.PriorityClassName != "system-node-critical" || !spec.HostPID {
		t.Errorf("priority %q, hostPID %v", spec.PriorityClassName, spec.HostPID)
	}
	if !c.SecurityContext.Privileged || !c.SecurityContext.ReadOnlyRootFilesystem {
		t.Errorf("security context %+v", c.SecurityContext)
	}
	for _, m := range c.VolumeMounts {
		if both := m.MountPropagation == "Bidirectional"; both != (m.MountPath == "/var/lib/gpu-agent") {
			t.Errorf("%s is mounted both ways: %v; what the agent mounts for counters is to be on the host, and nothing else", m.MountPath, both)
		}
	}
	if strings.HasPrefix(c.TerminationMessagePath, "/dev") {
		t.Error("the termination message would be a file in the host's /dev")
	}
	for _, r := range []string{"cpu", "memory"} {
		if c.Resources.Requests[r] == "" {
			t.Errorf("no request of %s", r)
		}
	}
	if _, ok := c.Resources.Limits["cpu"]; ok {
		t.Error("a limit on CPU would keep containers from starting in time")
	}
}

func TestNodes(t *testing.T) {
	d := agentSet(t, base(t))
	terms := d.Spec.Template.Spec.Affinity.NodeAffinity.Required.Terms
	gpuNode := "example.com/gpu.node"
	for _, test := range []struct {
		name   string
		labels map[string]string
		want   bool
	}{
		{"labelled", map[string]string{gpuNode: "true"}, true},
		{"labelled, with a type of its own", map[string]string{gpuNode: "true", "type": "metal"}, true},
		{"not labelled", map[string]string{"kubernetes.io/os": "linux"}, false},
		{"labelled false", map[string]string{gpuNode: "false"}, false},
		{"Virtual Kubelet", map[string]string{gpuNode: "true", "type": "virtual-kubelet"}, false},
		{"Liqo", map[string]string{gpuNode: "true", "liqo.io/type": "virtual-node"}, false},
	} {
		got := false
		for _, term := range terms { // one is enough
			all := true
			for _, e := range term.Expressions {
				value, has := test.labels[e.Key]
				in := has && slices.Contains(e.Values, value)
				switch e.Operator {
				case "In":
					all = all && in
				case "NotIn":
					all = all && !in
				default:
					t.Fatalf("operator %s is new to this test", e.Operator)
				}
			}
			got = got || all
		}
		if got != test.want {
			t.Errorf("%s: the agent runs there: %v, want %v", test.name, got, test.want)
		}
	}
	if tol := d.Spec.Template.Spec.Tolerations; len(tol) != 1 || tol[0].Operator != "Exists" {
		t.Errorf("tolerations %+v: a taint would take the agent from under running pods", tol)
	}
}

type configMap struct {
	header `yaml:",inline"`
	Data   map[string]string
}

func TestSamplePartitions(t *testing.T) {
	cm := as[configMap](t, one(t, base(t), "ConfigMap", "gpu-partitions"))
	text, ok := cm.Data["config.yaml"]
	if !ok || len(cm.Data) != 1 {
		t.Fatalf("keys %v, want config.yaml alone", slices.Sorted(maps.Keys(cm.Data)))
	}
	file, err := config.Parse("config.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(file.Names(), "default") {
		t.Errorf("partitions %q: a node without a label takes default", file.Names())
	}
	inventories, err := filepath.Glob("../tests/testdata/inventories/*.json")
	if err != nil || len(inventories) == 0 {
		t.Fatalf("find inventories: %v, %v", inventories, err)
	}
	for _, f := range inventories {
		inv, err := config.ReadInventory(read(t, f))
		if err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		for _, p := range file.Names() {
			if _, err := file.Desire(p, inv, config.Node{Unit: 1024}); err != nil {
				t.Errorf("on %s: %v", filepath.Base(f), err)
			}
		}
	}
}

// render puts a kustomization together as `kubectl apply -k` does, once.
func render(t *testing.T, dir string) []object {
	t.Helper()
	if rendered[dir] == nil {
		kubectl := plane.Program(t, "kubectl")
		var errs bytes.Buffer
		cmd := exec.CommandContext(t.Context(), kubectl, "kustomize", dir)
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("kubectl kustomize %s: %v\n%s", dir, err, errs.Bytes())
		}
		rendered[dir] = out
	}
	return documents(t, dir, rendered[dir])
}

var rendered = map[string][]byte{} // by directory

func TestRenderedBase(t *testing.T) {
	want := base(t)
	got := render(t, "base")
	if len(got) != len(want) {
		t.Errorf("kubectl makes %d objects of the base's %d", len(got), len(want))
	}
	agentSet(t, got)
}

func TestRenderedDriverContainer(t *testing.T) {
	d := agentSet(t, render(t, "overlays/driver-container"))
	env := agent(t, &d).env()
	if env["GPU_AGENT_DRIVER_ROOT"] != "/host"+env["GPU_AGENT_HOST_DRIVER_ROOT"] || env["GPU_AGENT_HOST_DRIVER_ROOT"] != "/run/nvidia/driver" {
		t.Errorf("driver roots in the environment: %v", env)
	}
	if env["GPU_AGENT_CONFIGMAP"] == "" {
		t.Error("the patch lost the rest of the environment")
	}
}

func TestRenderedRuntimeClass(t *testing.T) {
	objects := render(t, "overlays/runtime-class")
	d := agentSet(t, objects)
	c, spec := agent(t, &d), &d.Spec.Template.Spec
	one(t, objects, "RuntimeClass", spec.RuntimeClassName)
	s := c.SecurityContext
	if s.Privileged || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) || !s.ReadOnlyRootFilesystem {
		t.Errorf("security context %+v", s)
	}
	if !spec.HostPID || len(s.Capabilities.Add) > 0 {
		t.Errorf("hostPID %v, capabilities %q: the watchdog needs the host's processes, and nothing needs a capability", spec.HostPID, s.Capabilities.Add)
	}
	for _, m := range c.VolumeMounts {
		if m.MountPropagation == "Bidirectional" {
			t.Errorf("%s is mounted both ways, which the API server allows to privileged containers alone", m.MountPath)
		}
	}
	var paths []string
	for _, v := range spec.Volumes {
		if v.HostPath.Path != "" {
			paths = append(paths, v.HostPath.Path)
		}
	}
	slices.Sort(paths)
	if want := []string{"/run", "/sys/fs/cgroup", "/var/lib/gpu-agent", "/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources", "/var/run/cdi"}; !slices.Equal(paths, want) {
		t.Errorf("host paths %q, want %q", paths, want)
	}
	if len(c.VolumeMounts) != len(paths)+1 { // the token
		t.Errorf("%d mounts of %d volumes", len(c.VolumeMounts), len(paths))
	}
	env := c.env()
	seesRun(t, c)
	if env["GPU_AGENT_DRIVER_ROOT"] != "/" || env["GPU_AGENT_HOST_DRIVER_ROOT"] != "/" || env["NVIDIA_VISIBLE_DEVICES"] != "all" {
		t.Errorf("environment %v", env)
	}
	if env["GPU_AGENT_INTRUDERS"] != "end" {
		t.Error("whoever gets GPUs by NVIDIA's runtime, without an allocation, is only reported")
	}
	if s.SELinuxOptions.Type != "spc_t" {
		t.Errorf("SELinux type %q: a container that is not privileged is kept from the host's directories and sockets", s.SELinuxOptions.Type)
	}
}

// withComponent is an overlay of one's own: the base, or the cleanup, and a
// component.
func withComponent(t *testing.T, on string, components ...string) string {
	t.Helper()
	return overlay(t, "", []string{on}, components)
}

// The component adds what it says and takes nothing away.
func TestRenderedEvict(t *testing.T) {
	objects := render(t, withComponent(t, "base", "components/evict"))
	d := agentSet(t, objects)
	c := agent(t, &d)
	if n := c.env()["GPU_AGENT_EVICT_AFTER"]; n == "" || n == "0" {
		t.Errorf("evicts after %q offences, which is never", n)
	}
	b := agentSet(t, base(t))
	if without := agent(t, &b); len(c.Env) != len(without.Env)+1 || len(c.VolumeMounts) != len(without.VolumeMounts) {
		t.Errorf("%d variables and %d mounts, the base has %d and %d", len(c.Env), len(c.VolumeMounts), len(without.Env), len(without.VolumeMounts))
	}
	for kind, names := range map[string][]string{
		"ClusterRole": {"gpu-agent", "gpu-agent-evict"}, "ValidatingAdmissionPolicy": {"gpu-agent", "gpu-agent-events", "gpu-agent-evict", "gpu-agent-evict-node"},
	} {
		for _, name := range names {
			one(t, objects, kind, name)
			one(t, objects, kind+"Binding", name)
		}
	}
}

// The component gives the agent the right to read pods, and tells it to; it takes nothing away.
func TestRenderedMPSDetach(t *testing.T) {
	objects := render(t, withComponent(t, "base", "components/mps-detach"))
	got := changes(flat(t, base(t)), flat(t, slices.DeleteFunc(slices.Clone(objects), func(o object) bool { return o.Metadata.Name == name+"-mps-detach" })))
	const env = "DaemonSet gpu-agent/gpu-agent.spec.template.spec.containers[gpu-agent].env[GPU_AGENT_MPS_DETACH_ENDING]"
	if want := []string{"+ " + env + ".name = GPU_AGENT_MPS_DETACH_ENDING", "+ " + env + ".value = true"}; !slices.Equal(got, want) {
		t.Errorf("it changes\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, kind := range []string{"ClusterRole", "ClusterRoleBinding"} {
		one(t, objects, kind, name+"-mps-detach")
	}
}

// The component names one taint, to the agent and in its policy, and leaves the rest of
// both as they are.
func TestRenderedStartupTaint(t *testing.T) {
	objects := render(t, withComponent(t, "base", "components/startup-taint"))
	d, b := agentSet(t, objects), agentSet(t, base(t))
	key := agent(t, &d).env()["GPU_AGENT_STARTUP_TAINT"]
	if got, without := len(agent(t, &d).Env), len(agent(t, &b).Env); key == "" || got != without+1 {
		t.Errorf("the taint %q, %d variables, and %d in the base", key, got, without)
	}
	with, before := policyOf(t, one(t, objects, "ValidatingAdmissionPolicy", name)).Spec.Variables, policies(t)[name].Spec.Variables
	changed := 0
	for i := range before {
		if len(with) != len(before) || with[i].Name != before[i].Name {
			t.Fatalf("the policy has the variables\n%v, the base's has\n%v", with, before)
		}
		if before[i].Name == "startupTaint" && before[i].Expression == "''" && with[i].Expression == "'"+key+"'" {
			changed++
		} else if with[i] != before[i] {
			t.Errorf("%s is %s, and in the base %s", with[i].Name, with[i].Expression, before[i].Expression)
		}
	}
	if changed != 1 {
		t.Errorf("the policy does not know the taint: %v", with)
	}
	if got, want := len(objects), len(base(t)); got != want {
		t.Errorf("%d objects, the base has %d", got, want)
	}
}

// With DRA the agent has one directory more: the one in which the kubelet looks for the
// driver's socket.
func TestRenderedDRA(t *testing.T) {
	objects := render(t, withComponent(t, "base", "components/dra"))
	d, b := agentSet(t, objects), agentSet(t, base(t))
	c, without := agent(t, &d), agent(t, &b)
	if len(c.Env) != len(without.Env) || len(c.VolumeMounts) != len(without.VolumeMounts)+1 || len(d.Spec.Template.Spec.Volumes) != len(b.Spec.Template.Spec.Volumes)+1 {
		t.Errorf("%d variables and %d mounts, the base has %d and %d", len(c.Env), len(c.VolumeMounts), len(without.Env), len(without.VolumeMounts))
	}
	i := slices.IndexFunc(c.VolumeMounts, func(m mount) bool { return m.MountPath == dra.DefaultDir })
	if i < 0 || c.VolumeMounts[i].ReadOnly {
		t.Fatalf("the agent does not see %s, or cannot write: %+v", dra.DefaultDir, c.VolumeMounts)
	}
	for _, v := range d.Spec.Template.Spec.Volumes {
		if v.Name == c.VolumeMounts[i].Name && (v.HostPath.Path != dra.DefaultDir || v.HostPath.Type != "Directory") {
			t.Errorf("it sees the host's %+v there", v.HostPath)
		}
	}
	one(t, objects, "ClusterRoleBinding", "gpu-agent-dra")
	one(t, objects, "ValidatingAdmissionPolicyBinding", "gpu-agent-dra")
}

// The policy is about the agent's pods, wherever an overlay puts them, and the port
// by its name, and it leaves alone what the agent itself connects to.
func TestRenderedNetworkPolicy(t *testing.T) {
	type selector struct {
		MatchLabels map[string]string `yaml:"matchLabels"`
	}
	type policy struct {
		header `yaml:",inline"`
		Spec   struct {
			PodSelector selector `yaml:"podSelector"`
			PolicyTypes []string `yaml:"policyTypes"`
			Ingress     []struct {
				From []struct {
					NamespaceSelector selector `yaml:"namespaceSelector"`
				}
				Ports []struct{ Port, Protocol string }
			}
		}
	}
	objects := render(t, withComponent(t, "base", "components/network-policy"))
	p, d := as[policy](t, one(t, objects, "NetworkPolicy", name)), agentSet(t, objects)
	if b := agentSet(t, base(t)); len(objects) != len(base(t))+1 || !reflect.DeepEqual(d, b) {
		t.Error("the component does more than add a policy")
	}
	if got, want := p.Spec.PodSelector.MatchLabels, d.Spec.Template.Metadata.Labels; len(got) == 0 || !maps.Equal(got, want) {
		t.Errorf("the policy is about pods with %v, the agent's have %v", got, want)
	}
	if !slices.Equal(p.Spec.PolicyTypes, []string{"Ingress"}) {
		t.Errorf("the policy is about %q, want Ingress alone", p.Spec.PolicyTypes)
	}
	if len(p.Spec.Ingress) != 1 || len(p.Spec.Ingress[0].From) != 1 || len(p.Spec.Ingress[0].Ports) != 1 {
		t.Fatalf("the policy lets in %+v, want one namespace to one port", p.Spec.Ingress)
	}
	from, port := p.Spec.Ingress[0].From[0], p.Spec.Ingress[0].Ports[0]
	if from.NamespaceSelector.MatchLabels["kubernetes.io/metadata.name"] != "monitoring" {
		t.Errorf("the policy lets in %+v, want the namespace monitoring", from)
	}
	if got := agent(t, &d).Ports[0].Name; port.Port != got || port.Protocol != "TCP" {
		t.Errorf("the policy lets in to %+v, the agent's port is %q", port, got)
	}
}

// The MPS daemons have a pod of their own, which nothing but an operator ends: no update of the agent or of
// this DaemonSet, no probe and no limit. It has the agent's nodes, directory and driver, and no token.
func TestRenderedMPS(t *testing.T) {
	objects := render(t, withComponent(t, "base", "components/mps"))
	agents, before := agentSet(t, objects), agentSet(t, base(t))
	if len(objects) != len(base(t))+2 || !reflect.DeepEqual(agents, before) {
		t.Error("the component does more than add a DaemonSet and a policy")
	}
	d := as[daemonSet](t, one(t, objects, "DaemonSet", "gpu-agent-mps"))
	if got := d.Spec.UpdateStrategy.Type; got != "OnDelete" {
		t.Errorf("it is updated %q", got)
	}
	if labels, agents := d.Spec.Template.Metadata.Labels, agents.Spec.Template.Metadata.Labels; len(labels) == 0 || maps.Equal(labels, agents) {
		t.Errorf("its pods have the labels %v, and the agent's %v", labels, agents)
	}
	spec, of := &d.Spec.Template.Spec, &agents.Spec.Template.Spec
	if spec.GracePeriod < 30 {
		t.Errorf("the daemons have %d s to end", spec.GracePeriod)
	}
	if !spec.HostPID || spec.AutomountToken || len(spec.Containers) != 1 || len(spec.InitContainers) > 0 {
		t.Fatalf("hostPID %v, token %v, %d containers", spec.HostPID, spec.AutomountToken, len(spec.Containers))
	}
	if !reflect.DeepEqual(spec.Affinity, of.Affinity) || !reflect.DeepEqual(spec.Tolerations, of.Tolerations) || spec.PriorityClassName != of.PriorityClassName {
		t.Errorf("it runs elsewhere than the agent: %+v", spec)
	}
	c, ofAgent := &spec.Containers[0], agent(t, &agents)
	if c.Image != ofAgent.Image || !slices.Equal(c.Command, []string{"/usr/bin/gpu-agent-mps"}) || !slices.Equal(c.Args, []string{"run"}) {
		t.Errorf("it runs %q %q of %s", c.Command, c.Args, c.Image)
	}
	if !reflect.DeepEqual(c.LivenessProbe, probe{}) || !reflect.DeepEqual(c.ReadinessProbe, probe{}) || len(c.Resources.Limits) > 0 || len(c.Ports) > 0 {
		t.Errorf("it has a probe, a limit or a port: %+v", c)
	}
	if s := c.SecurityContext; !s.ReadOnlyRootFilesystem || len(s.Capabilities.Add) > 0 {
		t.Errorf("security context %+v", s)
	}
	flags, env := daemonsFlags(t), c.env()
	if env["GPU_AGENT_DRIVER_ROOT"] != ofAgent.env()["GPU_AGENT_DRIVER_ROOT"] || len(env) != 1 {
		t.Errorf("its variables are %v", env)
	}
	host := map[string]string{}
	for _, v := range spec.Volumes {
		if v.HostPath.Path == "" || len(v.Projected.Sources) > 0 {
			t.Errorf("volume %+v", v)
		}
		host[v.Name] = v.HostPath.Path
	}
	want := map[string]string{flags["state-dir"]: flags["state-dir"], env["GPU_AGENT_DRIVER_ROOT"]: "/", "/dev": "/dev"}
	for _, m := range c.VolumeMounts {
		if want[m.MountPath] != host[m.Name] || m.MountPropagation == "Bidirectional" || m.ReadOnly != (host[m.Name] == "/") {
			t.Errorf("mount %+v of %s", m, host[m.Name])
		}
		delete(want, m.MountPath)
	}
	if len(want) > 0 || flags["state-dir"] != programFlags(t)["state-dir"] {
		t.Errorf("no mounts for %v", want)
	}
	p := as[struct {
		header `yaml:",inline"`
		Spec   struct {
			PodSelector struct {
				MatchLabels map[string]string `yaml:"matchLabels"`
			} `yaml:"podSelector"`
			PolicyTypes     []string `yaml:"policyTypes"`
			Ingress, Egress []any
		}
	}](t, one(t, objects, "NetworkPolicy", "gpu-agent-mps"))
	if !maps.Equal(p.Spec.PodSelector.MatchLabels, d.Spec.Template.Metadata.Labels) || len(p.Spec.PolicyTypes) != 2 || len(p.Spec.Ingress)+len(p.Spec.Egress) > 0 {
		t.Errorf("its network policy: %+v", p.Spec)
	}
}

// The agent's features file is where Node Feature Discovery and the cleanup look.
func TestRenderedNFD(t *testing.T) {
	dir := programFlags(t)["nfd-dir"]
	if dir == "" || commandFlags(t, "cleanup")["nfd-dir"] != dir {
		t.Fatalf("run writes to %q, cleanup looks in %q", dir, commandFlags(t, "cleanup")["nfd-dir"])
	}
	sees := func(spec *podSpec, c *container) {
		t.Helper()
		i := slices.IndexFunc(c.VolumeMounts, func(m mount) bool { return m.MountPath == dir })
		if i < 0 || c.VolumeMounts[i].ReadOnly {
			t.Fatalf("%s does not see %s, or cannot write: %+v", c.Name, dir, c.VolumeMounts)
		}
		for _, v := range spec.Volumes {
			if v.Name == c.VolumeMounts[i].Name && v.HostPath.Path == dir {
				return
			}
		}
		t.Errorf("%s sees something else at %s", c.Name, dir)
	}
	d, b := agentSet(t, render(t, withComponent(t, "base", "components/nfd"))), agentSet(t, base(t))
	c, without := agent(t, &d), agent(t, &b)
	if c.env()["GPU_AGENT_NODE_LABELS"] != "nfd" || len(c.Env) != len(without.Env)+1 || len(c.VolumeMounts) != len(without.VolumeMounts)+1 {
		t.Errorf("%d variables and %d mounts, the base has %d and %d", len(c.Env), len(c.VolumeMounts), len(without.Env), len(without.VolumeMounts))
	}
	sees(&d.Spec.Template.Spec, c)
	clean := as[daemonSet](t, one(t, render(t, withComponent(t, "cleanup", "components/nfd")), "DaemonSet", "gpu-agent-cleanup"))
	spec := &clean.Spec.Template.Spec
	for _, c := range append(spec.InitContainers, spec.Containers...) {
		sees(spec, &c)
		if len(c.VolumeMounts) < 8 {
			t.Errorf("%s lost mounts: %+v", c.Name, c.VolumeMounts)
		}
	}
}

// seesRun asks that the runtime's socket is found where only /run is mounted.
func seesRun(t *testing.T, c *container) {
	t.Helper()
	i := slices.IndexFunc(c.VolumeMounts, func(m mount) bool { return m.Name == "run" })
	if i < 0 {
		t.Fatal("the runtime's socket is not to be seen")
	}
	m := c.VolumeMounts[i]
	if want := c.env()["GPU_AGENT_HOST_ROOT"] + "/run"; m.MountPath != want || !m.ReadOnly || m.MountPropagation != "HostToContainer" {
		t.Errorf("/run is mounted as %+v, want at %s, read-only, following the host's mounts", m, want)
	}
}

func TestCleanup(t *testing.T) {
	for what, load := range map[string]func(*testing.T, string) []object{"as written": resources, "as kubectl makes it": render} {
		t.Run(what, func(t *testing.T) {
			objects := load(t, "cleanup")
			if len(objects) != 1 {
				t.Fatalf("%d objects, want the DaemonSet alone: the rest is the base's", len(objects))
			}
			d, a := as[daemonSet](t, one(t, objects, "DaemonSet", "gpu-agent-cleanup")), agentSet(t, base(t))
			spec, agents := &d.Spec.Template.Spec, &a.Spec.Template.Spec
			if !maps.Equal(d.Spec.Selector.MatchLabels, d.Spec.Template.Metadata.Labels) || maps.Equal(d.Spec.Selector.MatchLabels, a.Spec.Selector.MatchLabels) {
				t.Errorf("the selector %v is not the pods' labels %v, or the agent's", d.Spec.Selector.MatchLabels, d.Spec.Template.Metadata.Labels)
			}

			// Where the agent was, and never beside it.
			if d.Metadata.Namespace != a.Metadata.Namespace || spec.PriorityClassName != agents.PriorityClassName ||
				!reflect.DeepEqual(spec.Affinity.NodeAffinity, agents.Affinity.NodeAffinity) || !reflect.DeepEqual(spec.Tolerations, agents.Tolerations) {
				t.Errorf("runs in %s at %s on %+v with %+v, which is not where the agent was", d.Metadata.Namespace, spec.PriorityClassName, spec.Affinity.NodeAffinity, spec.Tolerations)
			}
			apart := spec.Affinity.PodAntiAffinity.Required
			if len(apart) != 1 || apart[0].TopologyKey != "kubernetes.io/hostname" || !maps.Equal(apart[0].LabelSelector.MatchLabels, a.Spec.Template.Metadata.Labels) {
				t.Errorf("may run beside the agent: %+v", apart)
			}

			// In its name, so under its admission policies.
			if spec.ServiceAccountName != agents.ServiceAccountName {
				t.Errorf("account %q, want %q", spec.ServiceAccountName, agents.ServiceAccountName)
			}
			if len(spec.InitContainers) != 1 || len(spec.Containers) != 1 {
				t.Fatalf("%d init containers and %d containers, want one each", len(spec.InitContainers), len(spec.Containers))
			}
			first, then := spec.InitContainers[0], spec.Containers[0]
			if !slices.Equal(first.Args, []string{"cleanup"}) || !slices.Equal(then.Args, []string{"cleanup", "--wait"}) {
				t.Errorf("arguments %q and %q", first.Args, then.Args)
			}
			same := then
			same.Name, same.Args = first.Name, first.Args
			if !reflect.DeepEqual(first, same) {
				t.Errorf("the containers differ in more than their arguments:\n%+v\n%+v", first, same)
			}
			if first.Image != agent(t, &a).Image {
				t.Errorf("image %s, the agent's is %s", first.Image, agent(t, &a).Image)
			}
			c := first.SecurityContext
			if spec.HostPID || !c.Privileged || !c.ReadOnlyRootFilesystem || len(c.Capabilities.Add) > 0 {
				t.Errorf("hostPID %v, security context %+v: it unmounts what the agent mounted, and needs nothing else", spec.HostPID, c)
			}
			for _, m := range first.VolumeMounts {
				if both := m.MountPropagation == "Bidirectional"; both != (m.MountPath == "/var/lib/gpu-agent") {
					t.Errorf("%s is mounted both ways: %v; what the agent mounted for counters is to go from the host, and nothing else", m.MountPath, both)
				}
			}

			// It sees what the agent wrote, where the agent wrote it, and no more.
			paths := func(spec *podSpec, c *container) map[string]string {
				host, out := map[string]string{}, map[string]string{}
				for _, v := range spec.Volumes {
					host[v.Name] = v.HostPath.Path
				}
				for _, m := range c.VolumeMounts {
					out[m.MountPath] = host[m.Name]
				}
				return out
			}
			want := paths(agents, agent(t, &a))
			delete(want, "/host/dev")
			delete(want, "/host/sys/fs/cgroup")
			want["/var/lib/kubelet/plugins_registry"] = "/var/lib/kubelet/plugins_registry" // of the component dra
			if got := paths(spec, &first); !maps.Equal(got, want) || len(spec.Volumes) != len(got) {
				t.Errorf("mounts\n%v of %d volumes, want\n%v", got, len(spec.Volumes), want)
			}
			for _, m := range first.VolumeMounts {
				if m.MountPath == "/host" && (!m.ReadOnly || m.MountPropagation != "HostToContainer") {
					t.Errorf("the host is mounted as %+v, want read-only, following the host's mounts", m)
				}
			}
			for _, flag := range []string{"GPU_AGENT_HOST_ROOT", "GPU_AGENT_DRIVER_ROOT"} {
				if first.env()[flag] != agent(t, &a).env()[flag] {
					t.Errorf("%s is %q", flag, first.env()[flag])
				}
			}
			if strings.HasPrefix(first.TerminationMessagePath, "/dev") || first.TerminationMessagePath == "" {
				t.Errorf("the kubelet reads why it failed from %q, which is the host's", first.TerminationMessagePath)
			}
		})
	}
}

// The cleanup looks where the agent wrote: the directories' flags have the same
// defaults, and neither manifest sets them.
func TestCleanupLooksWhereTheAgentWrote(t *testing.T) {
	run, cleanup := programFlags(t), commandFlags(t, "cleanup")
	for _, flag := range []string{"domain", "cdi-dir", "state-dir", "kubelet-dir", "host-root", "runtime-endpoint", "nfd-dir"} {
		ours, ok := cleanup[flag]
		if theirs, also := run[flag]; !ok || !also || ours != theirs {
			t.Errorf("--%s is %q (%v) for cleanup and %q (%v) for run", flag, ours, ok, theirs, also)
		}
	}
	for _, file := range []string{"base/daemonset.yaml", "cleanup/daemonset.yaml"} {
		for _, set := range []string{"DOMAIN", "CDI_DIR", "STATE_DIR", "KUBELET_DIR", "RUNTIME_ENDPOINT"} {
			if strings.Contains(string(read(t, file)), "GPU_AGENT_"+set+"\n") {
				t.Errorf("%s sets %s: so must the other", file, set)
			}
		}
	}
}
