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
var switches = []string{"dra", "evict", "network-policy", "nfd", "startup-taint", "driver-container", "placer", "kueue", "liqo", "cleanup"}

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
		default:
			parts = append(parts, "components/"+name)
		}
	}
	if slices.Contains(parts, "placer/kueue") && slices.Contains(parts, "placer/liqo") {
		patches += "  - patch: '{apiVersion: apps/v1, kind: Deployment, metadata: {name: gpu-placer, namespace: gpu-placer}, spec: {template: {spec: {containers: " +
			"[{name: gpu-placer, env: [{name: GPU_AGENT_DOORS, value: \"extender,kueue,liqo\"}]}]}}}}'\n"
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

// With no switch, each, each pair, all, and all but the cleanup, the chart makes the objects
// that kustomize makes of the same parts, and the API server takes them.
func TestChartIsWhatKustomizeMakes(t *testing.T) {
	plane.Program(t, "helm")
	s := startAPIServer(t)
	s.serveKueue(t)
	s.serveLiqo(t)
	for _, namespace := range []string{name, placer} {
		s.namespace(t, namespace)
	}
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
		if diff := changes(flat(t, kustomized(t, on...)), flat(t, objects)); len(diff) > 0 {
			t.Errorf("%q: Helm makes other objects than kubectl:\n%s", on, strings.Join(diff, "\n"))
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
	digest := "sha256:" + strings.Repeat("0a", 32)
	for _, test := range []struct {
		on     []string // switches
		values []string
		want   []string
	}{
		{nil, []string{"memoryUnit=512MiB"}, env(agent, "GPU_AGENT_MEMORY_UNIT", "512MiB")},
		{nil, []string{"resourceDomain=nvidia.com"}, append(env(agent, "GPU_AGENT_RESOURCE_DOMAIN", "nvidia.com"), "~ "+policy+"[resourceDomain].expression = 'nvidia.com/'")},
		{nil, []string{"partitions=version: v1"}, []string{"~ ConfigMap gpu-agent/gpu-partitions.data.config.yaml = version: v1"}},
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
		{[]string{"startup-taint"}, []string{"startupTaint.key=node.test/wait"},
			[]string{"~ " + agent + ".env[GPU_AGENT_STARTUP_TAINT].value = node.test/wait", "~ " + policy + "[startupTaint].expression = 'node.test/wait'"}},
		{[]string{"placer"}, []string{"placer.nodeSelector.pool=control"}, []string{"+ " + placers + ".nodeSelector.pool = control"}},
		{[]string{"placer"}, []string{"placer.tolerations[0].operator=Exists"}, []string{"+ " + placers + ".tolerations[0].operator = Exists"}},
		{[]string{"placer"}, []string{"placer.resources.limits.memory=2Gi"}, []string{"~ " + placers + ".containers[gpu-placer].resources.limits.memory = 2Gi"}},
		{[]string{"placer"}, []string{"placer.doors={kueue}"}, nil}, // what it adds is compared with kustomize
	} {
		got := changes(flat(t, chart(t, "chart", switched(test.on...)...)), flat(t, chart(t, "chart", append(switched(test.on...), test.values...)...)))
		if slices.Sort(test.want); test.want != nil && !slices.Equal(got, test.want) {
			t.Errorf("%q changes\n%s\nwant\n%s", test.values, strings.Join(got, "\n"), strings.Join(test.want, "\n"))
		}
	}
}
