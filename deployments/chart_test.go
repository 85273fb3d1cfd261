// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/tests/plane"
)

// helm runs the program, which keeps nothing outside the test.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), plane.Program(t, "helm"), args...)
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("helm %s: %w\n%s%s", strings.Join(args, " "), err, out, errs.Bytes())
	}
	return string(out), err
}

// chart is what Helm makes of a chart with values, in the namespace gpu-agent.
func chart(t *testing.T, of string, values ...string) []object {
	t.Helper()
	args := []string{"template", name, of, "--namespace", name}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	out, err := helm(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return documents(t, "chart", []byte(out))
}

// switches are what the chart can be told to add to the base, by the names of kustomize's
// directories.
var switches = []string{"dra", "evict", "gke", "monitoring", "mps", "mps-detach", "network-policy", "nfd", "openshift", "selinux", "startup-taint", "stays", "driver-container", "placer", "kueue", "liqo", "cleanup"}

// switched are the values that turn switches on.
func switched(on ...string) (values []string) {
	doors := "extender"
	for _, name := range on {
		switch name {
		case "placer":
		case "kueue", "liqo":
			doors += "," + name
		case "cleanup":
			values = append(values, "cleanup=true")
			continue
		default:
			words := strings.Split(name, "-")
			for i := range words[1:] {
				words[i+1] = strings.ToUpper(words[i+1][:1]) + words[i+1][1:]
			}
			values = append(values, strings.Join(words, "")+".enabled=true")
			continue
		}
		values = append(values, "placer.enabled=true", "placer.doors={"+doors+"}")
	}
	return values
}

// kustomized are the objects of the same switches as kubectl makes them. The namespace is
// Helm's to make.
func kustomized(t *testing.T, on ...string) []object {
	t.Helper()
	resources, parts, patches := []string{"base"}, []string(nil), ""
	for _, name := range on {
		switch name {
		case "driver-container":
			resources[0] = "overlays/driver-container"
		case "placer":
			resources = append(resources, "placer")
		case "kueue", "liqo":
			resources, parts = append(resources, "placer"), append(parts, "placer/"+name)
		case "cleanup":
			resources = append(resources, "cleanup")
			patches += "  - patch: '{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: gpu-agent, namespace: gpu-agent}, $patch: delete}'\n"
			if slices.Contains(on, "mps") {
				patches += "  - patch: '{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: gpu-agent-mps, namespace: gpu-agent}, $patch: delete}'\n"
			}
		default:
			parts = append(parts, "components/"+name)
		}
	}
	if slices.Contains(parts, "placer/kueue") && slices.Contains(parts, "placer/liqo") {
		patches += "  - patch: '{apiVersion: apps/v1, kind: Deployment, metadata: {name: gpu-placer, namespace: gpu-placer}, spec: {template: {spec: {containers: " +
			"[{name: gpu-placer, env: [{name: GPU_PLACER_DOORS, value: \"extender,kueue,liqo\"}]}]}}}}'\n"
	}
	for _, name := range []string{"gke", "monitoring", "network-policy", "openshift"} {
		if slices.Contains(resources, "placer") && slices.Contains(on, name) {
			parts = append(parts, "placer/"+name)
		}
	}
	slices.Sort(resources)
	if patches != "" {
		patches = "patches:\n" + patches
	}
	return slices.DeleteFunc(render(t, overlay(t, patches, slices.Compact(resources), parts)), func(o object) bool {
		return o.Kind == "Namespace" && o.Metadata.Name == name
	})
}

// flat are all values of objects, by their path. Items of a list go by their names, so that
// the order of variables and mounts does not count.
func flat(t *testing.T, objects []object) map[string]string {
	t.Helper()
	out := map[string]string{}
	var walk func(path string, v any)
	walk = func(path string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for key, value := range v {
				walk(path+"."+key, value)
			}
		case []any:
			for i, value := range v {
				key := fmt.Sprint(i)
				if item, ok := value.(map[string]any); ok {
					for _, by := range []string{"name", "mountPath"} {
						if named, ok := item[by].(string); ok {
							key = named
						}
					}
				}
				walk(path+"["+key+"]", value)
			}
			if len(v) == 0 {
				out[path] = "[]"
			}
			return
		default:
			if _, twice := out[path]; twice {
				t.Errorf("%s is there twice", path)
			}
			out[path] = fmt.Sprint(v)
		}
	}
	for _, o := range objects {
		var all map[string]any
		if err := o.node.Decode(&all); err != nil {
			t.Fatal(err)
		}
		walk(o.Kind+" "+o.Metadata.Namespace+"/"+o.Metadata.Name, all)
	}
	return out
}

// changes are the values that differ.
func changes(before, after map[string]string) (out []string) {
	for path, value := range before {
		if now, ok := after[path]; !ok {
			out = append(out, "- "+path+" = "+value)
		} else if now != value {
			out = append(out, "~ "+path+" = "+now)
		}
	}
	for path, value := range after {
		if _, ok := before[path]; !ok {
			out = append(out, "+ "+path+" = "+value)
		}
	}
	slices.Sort(out)
	return out
}

func TestChartAtTheAPIServer(t *testing.T) {
	plane.Program(t, "helm")
	s := startAPIServer(t)
	s.serveKueue(t)
	s.serveLiqo(t)
	s.serveMonitoring(t)
	s.serveOpenShift(t)
	for _, namespace := range []string{name, placer} {
		s.namespace(t, namespace)
	}
	t.Run("switches", s.tryChartSwitches)
	t.Run("life", s.tryChartLife)
}

// The API server takes what the chart makes with no switch, each, each pair, all, and all
// but the cleanup. But for the pairs, which would take as long again, that is compared with
// what kubectl makes of the same parts.
func (s *apiServer) tryChartSwitches(t *testing.T) {
	sets := [][]string{nil, switches, switches[:len(switches)-1]}
	for i, a := range switches {
		sets = append(sets, []string{a})
		for _, b := range switches[i+1:] {
			sets = append(sets, []string{a, b})
		}
	}
	taken := map[string]bool{}
	for _, on := range sets {
		objects := chart(t, "chart", switched(on...)...)
		if len(on) != 2 {
			if diff := changes(flat(t, kustomized(t, on...)), flat(t, objects)); len(diff) > 0 {
				t.Errorf("%q: Helm makes other objects than kubectl:\n%s", on, strings.Join(diff, "\n"))
			}
		}
		for _, o := range objects {
			text, err := yaml.Marshal(o.node)
			if err != nil {
				t.Fatal(err)
			}
			if !taken[string(text)] {
				taken[string(text)] = true
				s.apply(t, o, true)
				variablesInOrder(t, o)
			}
		}
	}
	if len(taken) < 100 {
		t.Errorf("the API server was shown %d objects: this test looks at nothing", len(taken))
	}
}

// serveMonitoring has the API server serve the Prometheus Operator's objects.
func (s *apiServer) serveMonitoring(t *testing.T) {
	t.Helper()
	source := sourceOf(t, "github.com/prometheus-operator/prometheus-operator") + "/example/prometheus-operator-crd/monitoring.coreos.com_"
	for file, kind := range map[string]string{"podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"} {
		for _, o := range documents(t, file, read(t, source+file+".yaml")) {
			s.apply(t, o, false)
		}
		s.await(t, kind+" is served", func() error { return s.do(t, nil, http.MethodGet, fmt.Sprintf(places[kind], name), "", nil, nil) })
	}
}

// The value monitoring.runbooks replaces the address in every alert.
func TestChartRunbooks(t *testing.T) {
	links := 0
	for path, value := range flat(t, chart(t, "chart", append(switched("monitoring", "placer"), "monitoring.runbooks=https://wiki.test/gpus")...)) {
		if strings.HasSuffix(path, ".runbook_url") {
			if links++; !strings.HasPrefix(value, "https://wiki.test/gpus#") {
				t.Errorf("%s leads to %s", path, value)
			}
		}
	}
	if links < 5 {
		t.Errorf("%d alerts lead anywhere", links)
	}
}

// variablesInOrder holds that a container's variables come after those that they name: the
// kubelet leaves $(NAME) as it is otherwise.
func variablesInOrder(t *testing.T, o object) {
	t.Helper()
	if o.Kind != "DaemonSet" && o.Kind != "Deployment" {
		return
	}
	var w struct {
		Spec struct {
			Template struct {
				Spec struct {
					InitContainers []container `yaml:"initContainers"`
					Containers     []container
				}
			}
		}
	}
	if err := o.node.Decode(&w); err != nil {
		t.Fatal(err)
	}
	for _, c := range slices.Concat(w.Spec.Template.Spec.InitContainers, w.Spec.Template.Spec.Containers) {
		known := map[string]bool{}
		for _, e := range c.Env {
			for _, m := range regexp.MustCompile(`\$\((\w+)\)`).FindAllStringSubmatch(e.Value, -1) {
				if !known[m[1]] {
					t.Errorf("%s: %s names %s, which does not come before it", c.Name, e.Name, m[1])
				}
			}
			known[e.Name] = true
		}
	}
}

// Each value changes what it says, and nothing else.
func TestChartValues(t *testing.T) {
	const (
		set     = "DaemonSet gpu-agent/gpu-agent.spec.template.spec"
		agent   = set + ".containers[gpu-agent]"
		placers = "Deployment gpu-placer/gpu-placer.spec.template.spec"
		policy  = "ValidatingAdmissionPolicy /gpu-agent.spec.variables"
	)
	env := func(container, name, value string) []string {
		at := container + ".env[" + name + "]"
		return []string{"+ " + at + ".name = " + name, "+ " + at + ".value = " + value}
	}
	without := map[string]map[string]string{} // by the switches
	digest := "sha256:" + strings.Repeat("0a", 32)
	for _, test := range []struct {
		on     []string // switches
		values []string
		want   []string
	}{
		{nil, []string{"memoryUnit=512MiB"}, env(agent, "GPU_AGENT_MEMORY_UNIT", "512MiB")},
		{nil, []string{"resourceDomain=nvidia.com"}, append(env(agent, "GPU_AGENT_RESOURCE_DOMAIN", "nvidia.com"), "~ "+policy+"[resourceDomain].expression = 'nvidia.com/'")},
		{nil, []string{"partitions=version: v1"}, []string{"~ ConfigMap gpu-agent/gpu-partitions.data.config.yaml = version: v1"}},
		{nil, []string{"partitions=apiVersion: v1\nkind: ConfigMap\ndata:\n  config.yaml: |\n    version: v1\n"},
			[]string{"~ ConfigMap gpu-agent/gpu-partitions.data.config.yaml = version: v1\n"}},
		{nil, []string{"partitions=no: [yaml"}, []string{"~ ConfigMap gpu-agent/gpu-partitions.data.config.yaml = no: [yaml"}},
		{nil, []string{"image.repository=registry.test/gpu-agent", "image.tag=v1"}, []string{"~ " + agent + ".image = registry.test/gpu-agent:v1"}},
		{nil, []string{"image.tag=v1", "image.digest=" + digest}, []string{"~ " + agent + ".image = localhost/gpu-agent@" + digest}},
		{nil, []string{"image.pullPolicy=Always"}, []string{"~ " + agent + ".imagePullPolicy = Always"}},
		{nil, []string{"image.pullSecrets={a}"}, []string{"+ " + set + ".imagePullSecrets[a].name = a"}},
		{nil, []string{"nodeSelector.pool=gpus"}, []string{"+ " + set + ".nodeSelector.pool = gpus"}},
		{nil, []string{"tolerations=null"}, []string{"- " + set + ".tolerations[0].operator = Exists"}},
		{nil, []string{"tolerations[0].key=gpu", "tolerations[0].operator=Exists"}, []string{"+ " + set + ".tolerations[0].key = gpu"}},
		{nil, []string{"resources.limits.memory=512Mi"}, []string{"~ " + agent + ".resources.limits.memory = 512Mi"}},
		{nil, []string{"flags.when-busy=wait"}, env(agent, "GPU_AGENT_WHEN_BUSY", "wait")},
		{nil, []string{"flags.dcgm-names=true"}, env(agent, "GPU_AGENT_DCGM_NAMES", "true")},
		{nil, []string{"flags.watch-every=0"}, env(agent, "GPU_AGENT_WATCH_EVERY", "0")},
		{nil, []string{"flags.driver-root=/host/opt/nvidia"}, []string{"~ " + agent + ".env[GPU_AGENT_DRIVER_ROOT].value = /host/opt/nvidia"}},
		{[]string{"evict"}, []string{"evict.after=5"}, []string{"~ " + agent + ".env[GPU_AGENT_EVICT_AFTER].value = 5"}},
		{[]string{"network-policy"}, []string{"networkPolicy.namespace=scrapers"},
			[]string{"~ NetworkPolicy gpu-agent/gpu-agent.spec.ingress[0].from[0].namespaceSelector.matchLabels.kubernetes.io/metadata.name = scrapers"}},
		{[]string{"network-policy", "placer"}, []string{"networkPolicy.schedulers={198.51.100.0/24}"},
			[]string{"~ NetworkPolicy gpu-placer/gpu-placer.spec.ingress[0].from[0].ipBlock.cidr = 198.51.100.0/24"}},
		{[]string{"monitoring"}, []string{"monitoring.labels.release=prometheus"},
			[]string{"+ PodMonitor gpu-agent/gpu-agent.metadata.labels.release = prometheus", "+ PrometheusRule gpu-agent/gpu-agent.metadata.labels.release = prometheus"}},
		{[]string{"startup-taint"}, []string{"startupTaint.key=node.test/wait"},
			[]string{"~ " + agent + ".env[GPU_AGENT_STARTUP_TAINT].value = node.test/wait", "~ " + policy + "[startupTaint].expression = 'node.test/wait'"}},
		{[]string{"placer"}, []string{"placer.image.repository=registry.test/gpu-placer", "placer.image.tag=v1"}, []string{"~ " + placers + ".containers[gpu-placer].image = registry.test/gpu-placer:v1"}},
		{[]string{"placer"}, []string{"placer.mpsApart=true"}, env(placers+".containers[gpu-placer]", "GPU_PLACER_MPS_APART", "true")},
		{[]string{"placer"}, []string{"placer.nodeSelector.pool=control"}, []string{"+ " + placers + ".nodeSelector.pool = control"}},
		{[]string{"placer"}, []string{"placer.tolerations[0].operator=Exists"}, []string{"+ " + placers + ".tolerations[0].operator = Exists"}},
		{[]string{"placer"}, []string{"placer.resources.limits.memory=2Gi"}, []string{"~ " + placers + ".containers[gpu-placer].resources.limits.memory = 2Gi"}},
	} {
		on := strings.Join(test.on, " ")
		if without[on] == nil {
			without[on] = flat(t, chart(t, "chart", switched(test.on...)...))
		}
		got := changes(without[on], flat(t, chart(t, "chart", append(switched(test.on...), test.values...)...)))
		if slices.Sort(test.want); !slices.Equal(got, test.want) {
			t.Errorf("%q changes\n%s\nwant\n%s", test.values, strings.Join(got, "\n"), strings.Join(test.want, "\n"))
		}
	}
}

// Another domain is another word in every place, and one more variable in every container;
// that of the resources is in the places that are about resources.
func TestChartDomains(t *testing.T) {
	everything := switched(switches...)
	before := flat(t, chart(t, "chart", everything...))
	// The cleanup's two containers, and the placer's.
	variables := func(diff []string, flag string) (others []string) {
		n := 0
		for _, d := range diff {
			name := "GPU_AGENT_" + flag
			if strings.Contains(d, "[gpu-placer]") {
				name = "GPU_PLACER_" + flag
			}
			if strings.HasPrefix(d, "+ ") && strings.Contains(d, ".env["+name+"].value = ") {
				n++
			} else if !strings.Contains(d, ".env["+name+"].name = ") {
				others = append(others, d)
			}
		}
		if n != 3 {
			t.Errorf("%d containers have the variable of %s, want 3", n, flag)
		}
		return others
	}
	want := map[string]string{}
	for path, value := range before {
		want[strings.ReplaceAll(path, "example.com", "gpus.corp.test")] = strings.ReplaceAll(value, "example.com", "gpus.corp.test")
	}
	diff := changes(want, flat(t, chart(t, "chart", append(everything, "domain=gpus.corp.test")...)))
	if others := variables(diff, "DOMAIN"); len(others) > 0 {
		t.Errorf("with another domain differs, but for the word:\n%s", strings.Join(others, "\n"))
	}
	classes := 0
	diff = changes(before, flat(t, chart(t, "chart", append(everything, "resourceDomain=nvidia.com")...)))
	for _, d := range variables(diff, "RESOURCE_DOMAIN") {
		path, now, _ := strings.Cut(strings.TrimPrefix(d, "~ "), " = ")
		if strings.HasSuffix(path, ".spec.extendedResourceName") {
			classes++
		} else if path != "ValidatingAdmissionPolicy /gpu-agent.spec.variables[resourceDomain].expression" {
			t.Errorf("another domain of the resources changes %s", d)
		}
		if was := before[path]; now != strings.Replace(was, "example.com/", "nvidia.com/", 1) {
			t.Errorf("%s was %s and is %s", path, was, now)
		}
	}
	if classes < 20 {
		t.Errorf("%d DeviceClasses have another resource", classes)
	}
}

// The agent's objects are where Helm's release is, and the rights are for the account there.
func TestChartNamespace(t *testing.T) {
	want := map[string]string{}
	for path, value := range flat(t, chart(t, "chart", switched(switches...)...)) {
		if value == name && (strings.HasSuffix(path, ".metadata.namespace") || strings.Contains(path, ".subjects[") && strings.HasSuffix(path, ".namespace")) {
			value = "gpu-ops"
		}
		want[strings.Replace(path, " "+name+"/", " gpu-ops/", 1)] = value
	}
	args := []string{"template", name, "chart", "--namespace", "gpu-ops"}
	for _, v := range switched(switches...) {
		args = append(args, "--set", v)
	}
	out, err := helm(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	if diff := changes(want, flat(t, documents(t, "chart", []byte(out)))); len(diff) > 0 {
		t.Errorf("in another namespace differs, but for that:\n%s", strings.Join(diff, "\n"))
	}
}

// A value that cannot be right is refused by its name, before anything is asked of a cluster.
func TestChartRefuses(t *testing.T) {
	for _, test := range []struct{ value, says string }{
		{"domian=a.test", "domian"},
		{"domain=Corp.test", "domain"},
		{"domain=localhost", "domain"},
		{"domain=a'b.test", "domain"},
		{"resourceDomain=x", "resourceDomain"},
		{"memoryUnit=1GB", "memoryUnit"},
		{"memoryUnit=0GiB", "memoryUnit"},
		{"image.tag=a:b", "image/tag"},
		{"image.digest=sha256:0a", "image/digest"},
		{"image.pullPolicy=Sometimes", "image/pullPolicy"},
		{"flags.when-bussy=wait", "when-bussy"},
		{"flags.domain=a.test", "flags"},
		{"flags.state-dir=/x", "flags"},
		{"dra=true", "dra"},
		{"evict.after=0", "evict/after"},
		{"networkPolicy.namespace=a_b", "networkPolicy/namespace"},
		{"startupTaint.key=a=b", "startupTaint/key"},
		{"placer.doors={scheduler}", "placer/doors"},
		{"placer.doors={}", "placer/doors"},
		{"tolerations[0].operatr=Exists", "operatr"},
		{"cleanup=yes", "cleanup"},
	} {
		out, err := helm(t, "template", name, "chart", "--set", test.value)
		if err == nil || !strings.Contains(err.Error(), "don't meet the specifications of the schema") || !strings.Contains(err.Error(), test.says) {
			t.Errorf("--set %s: %v\n%.200s\nwant that the schema refuses %s", test.value, err, out, test.says)
		}
	}
}

// The partitions.yaml that README and docs/install.md show is the same file for Helm and for kustomize.
func TestChartTakesShownPartitions(t *testing.T) {
	for _, document := range []string{"../README.md", "../docs/install.md"} {
		shown := shownConfigMaps(t, document)
		if len(shown) != 1 {
			t.Fatalf("%s shows %d ConfigMaps, want 1", document, len(shown))
		}
		dir := overlay(t, "# with the file of "+document+"\npatches: [{path: partitions.yaml}]\n", []string{"base"}, nil)
		file := filepath.Join(dir, "partitions.yaml")
		if err := os.WriteFile(file, []byte(shown[0]), 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := helm(t, "template", name, "chart", "--namespace", name, "--set-file", "partitions="+file)
		if err != nil {
			t.Fatal(err)
		}
		want := partitionsIn(t, documents(t, document, []byte(shown[0])))
		if got := partitionsIn(t, documents(t, "chart", []byte(out))); got != want {
			t.Errorf("%s: by Helm the agent reads\n%s\nwant\n%s", document, got, want)
		}
		if got := partitionsIn(t, render(t, dir)); got != want {
			t.Errorf("%s: by kustomize the agent reads\n%s\nwant\n%s", document, got, want)
		}
	}
}

// A manifest that has no partition file is refused before the agent sees it.
func TestChartRefusesManifests(t *testing.T) {
	for text, says := range map[string]string{
		"apiVersion: v1\nkind: Secret\ndata:\n  config.yaml: eA==\n":     "partitions: it is of kind Secret",
		"apiVersion: v1\nkind: ConfigMap\n":                              "partitions: the ConfigMap has no text",
		"apiVersion: v1\nkind: ConfigMap\ndata: {}\n":                    "partitions: the ConfigMap has no text",
		"apiVersion: v1\nkind: ConfigMap\ndata: [x]\n":                   "partitions: the ConfigMap has no text",
		"apiVersion: v1\nkind: ConfigMap\ndata: {config.yaml: {a: b}}\n": "partitions: the ConfigMap has no text",
	} {
		file := filepath.Join(t.TempDir(), "partitions.yaml")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := helm(t, "template", name, "chart", "--set-file", "partitions="+file); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v\n%.200s\nwant %q", text, err, out, says)
		}
	}
}

// What the schema takes as a flag is one of the program's; the others have a value of their
// own, or belong to what the manifests mount and open.
func TestChartFlags(t *testing.T) {
	var schema struct {
		Properties struct {
			Flags struct {
				PropertyNames struct{ Enum []string }
			}
		}
	}
	if err := json.Unmarshal(read(t, "chart/values.schema.json"), &schema); err != nil {
		t.Fatal(err)
	}
	flags := slices.Concat(schema.Properties.Flags.PropertyNames.Enum, []string{
		"domain", "resource-domain", "memory-unit", "evict-after", "mps-detach-ending", "startup-taint", "node-labels", "cap-labels", // values
		"config", "configmap", "kubeconfig", "node-name", "pod", "http", "cdi-dir", "host-root", "kubelet-dir", "nfd-dir", "state-dir",
	})
	if slices.Sort(flags); !slices.Equal(flags, slices.Sorted(maps.Keys(programFlags(t)))) {
		t.Errorf("the chart knows the flags\n%q, the program\n%q", flags, slices.Sorted(maps.Keys(programFlags(t))))
	}
}

// docs/helm.md lists all values of the chart, and none that it lacks.
func TestDocsNameEveryValue(t *testing.T) {
	var values map[string]any
	if err := yaml.Unmarshal(read(t, "chart/values.yaml"), &values); err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	var walk func(path string, v any)
	walk = func(path string, v any) {
		m, ok := v.(map[string]any)
		if !ok || len(m) == 0 || strings.HasSuffix(path, "resources") {
			want[path] = true
			return
		}
		for key, value := range m {
			walk(strings.TrimPrefix(path+"."+key, "."), value)
		}
	}
	walk("", values)
	_, section, _ := strings.Cut(string(read(t, "../docs/helm.md")), "\n## Values\n")
	section, _, _ = strings.Cut(section, "\n## ")
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| ((?:`[a-zA-Z.]+`(?:, )?)+) \\|").FindAllStringSubmatch(section, -1) {
		for value := range strings.SplitSeq(m[1], ", ") {
			named[strings.Trim(value, "`")] = true
		}
	}
	if !maps.Equal(named, want) {
		t.Errorf("docs/helm.md has the values\n%q, the chart\n%q", slices.Sorted(maps.Keys(named)), slices.Sorted(maps.Keys(want)))
	}
}

// A package has all that the links in the chart lead to, and is well in Helm's eyes.
func TestChartPackage(t *testing.T) {
	dir := t.TempDir()
	if out, err := helm(t, "package", "chart", "--version", "1.2.3", "--app-version", "v1.2.3", "--destination", dir); err != nil {
		t.Fatal(err, out)
	}
	packed := filepath.Join(dir, "gpu-agent-1.2.3.tgz")
	if out, err := helm(t, "lint", "--strict", packed); err != nil {
		t.Error(err, out)
	}
	everything := switched(switches...)
	got, want := flat(t, chart(t, packed, append(everything, "image.tag=dev", "placer.image.tag=dev")...)), flat(t, chart(t, "chart", everything...))
	if diff := changes(want, got); len(diff) > 0 {
		t.Errorf("the package makes other objects than the directory:\n%s", strings.Join(diff, "\n"))
	}
	d := agentSet(t, chart(t, packed))
	if image := agent(t, &d).Image; image != "localhost/gpu-agent:v1.2.3" {
		t.Errorf("the package of v1.2.3 has the image %s", image)
	}
}

// A release takes over what kustomize has made, gets every switch, goes back, cleans, and is
// gone. Each time the cluster has what the chart makes, and nothing that is left over.
func (s *apiServer) tryChartLife(t *testing.T) {
	kubeconfig := s.Kubeconfig(t, nil)
	all := map[string]object{}
	for _, o := range append(chart(t, "chart", switched(switches[:len(switches)-1]...)...), chart(t, "chart", "cleanup=true")...) {
		all[placeOf(t, o)] = o
	}
	there := func(when string, want []object) {
		t.Helper()
		wanted := map[string]bool{}
		for _, o := range want {
			wanted[placeOf(t, o)] = true
		}
		for place, o := range all {
			if o.Kind == "Namespace" {
				continue // nobody here ends what is in one, so it stays
			}
			// A CustomResourceDefinition goes a while after it was deleted, when its objects have.
			s.await(t, when, func() error {
				if err := s.do(t, nil, http.MethodGet, place, "", nil, nil); (err == nil) != wanted[place] {
					return fmt.Errorf("%s: %v, and it is to be there: %v", place, err, wanted[place])
				}
				return nil
			})
		}
	}
	agents := func() any {
		t.Helper()
		var d struct{ Spec any }
		if err := s.do(t, nil, http.MethodGet, fmt.Sprintf(places["DaemonSet"], name)+"/"+name, "", nil, &d); err != nil {
			t.Fatal(err)
		}
		return d.Spec
	}
	// What Helm says at the end tells what is to be done next.
	run := func(says, command string, args ...string) {
		t.Helper()
		out, err := helm(t, append([]string{command, name, "--namespace", name, "--kubeconfig", kubeconfig}, args...)...)
		if err != nil || !strings.Contains(out, says) {
			t.Fatalf("%v: %s\nwant that it says %q", err, out, says)
		}
	}
	set := func(values []string) (args []string) {
		for _, v := range values {
			args = append(args, "--set", v)
		}
		return append([]string{"chart"}, args...)
	}
	everything := switched(switches[:len(switches)-1]...)

	for _, o := range base(t) {
		s.apply(t, o, false)
	}
	// The namespace of the placer is there, too.
	const take = "--take-ownership"
	run("kubectl label node NODE example.com/gpu.node=true\n", "install", append(set(nil), take)...)
	there("installed", chart(t, "chart"))
	first := agents()
	run("Nobody asks the placer yet", "upgrade", append(set(everything), take)...)
	there("with everything", chart(t, "chart", everything...))
	if reflect.DeepEqual(agents(), first) {
		t.Error("the upgrade changed nothing of the agent's DaemonSet")
	}
	run("", "rollback", "1")
	there("back again", chart(t, "chart"))
	if now := agents(); !reflect.DeepEqual(now, first) {
		t.Errorf("after the rollback the agent's DaemonSet is\n%v, and it was\n%v", now, first)
	}
	run("kubectl -n gpu-agent rollout status daemonset gpu-agent-cleanup\n", "upgrade", "chart", "--reset-then-reuse-values", "--set", "cleanup=true")
	there("cleaning", chart(t, "chart", "cleanup=true"))
	run("", "uninstall")
	there("gone", nil)
}
