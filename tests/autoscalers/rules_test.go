// SPDX-License-Identifier: Apache-2.0

package autoscalers

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/deviceplugin"
)

// source is a file of testdata.
type source struct {
	Repository, Version, Date string
	Rules                     map[string]rule
}

// rule is one line of a program: where it stands, its words, and what it is about.
type rule struct {
	At, Says string
	Values   []string
}

func read(t *testing.T, name string) *source {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name + ".yaml")
	s := &source{}
	if err == nil {
		err = yaml.Unmarshal(text, s)
	}
	if err != nil || s.Repository == "" || s.Version == "" || s.Date == "" {
		t.Fatalf("%s: %v: %+v", name, err, s)
	}
	for key, r := range s.Rules {
		if !regexp.MustCompile(`^[a-z0-9_/]+\.go:[0-9]+$`).MatchString(r.At) || r.Says == "" {
			t.Errorf("%s: %s is said at %q, %q: want file, line and words", name, key, r.At, r.Says)
		}
		// What it is about stands in the words, where it is one thing.
		if len(r.Values) == 1 && strings.Contains(r.Says, " = ") && !strings.Contains(r.Says, r.Values[0]) {
			t.Errorf("%s: %s is about %q, and says %q", name, key, r.Values, r.Says)
		}
	}
	return s
}

// of is a rule that must be there.
func (s *source) of(t *testing.T, key string) rule {
	t.Helper()
	r, ok := s.Rules[key]
	if !ok {
		t.Fatalf("%s %s has no rule %s", s.Repository, s.Version, key)
	}
	return r
}

// one is what a rule is about.
func (s *source) one(t *testing.T, key string) string {
	t.Helper()
	r := s.of(t, key)
	if len(r.Values) != 1 {
		t.Fatalf("%s is about %q, want one thing", key, r.Values)
	}
	return r.Values[0]
}

// node is what autoscalers see of one.
type node struct {
	unready     bool
	label       bool // the provider's, for GPUs
	annotations map[string]string
	taints      []string // "key effect"
	allocatable map[string]int
	// requested is what its pods ask for.
	requested map[string]int
}

// clusterAutoscaler applies its rules.
type clusterAutoscaler struct {
	t *testing.T
	*source
}

// ready is whether it counts a node as one that pods can be sent to.
func (c clusterAutoscaler) ready(n node) bool {
	c.of(c.t, "bothPrefixes")
	c.of(c.t, "startupIsUnready")
	for _, taint := range n.taints {
		if strings.HasPrefix(taint, c.one(c.t, "ignorePrefix")) || strings.HasPrefix(taint, c.one(c.t, "startupPrefix")) {
			return false
		}
	}
	c.of(c.t, "labelWithoutGPUs")
	return !n.unready && (!n.label || c.gpu(n) != "")
}

// gpu is the resource by which it knows a node's GPUs.
func (c clusterAutoscaler) gpu(n node) string {
	c.of(c.t, "firstOfThem")
	for _, name := range c.of(c.t, "gpuResources").Values {
		if n.allocatable[name] > 0 {
			return name
		}
	}
	return ""
}

// used is how full it takes a node for, and by which resource.
func (c clusterAutoscaler) used(n node) (float64, string) {
	part := func(name string) float64 {
		if n.allocatable[name] == 0 {
			return 0
		}
		return float64(n.requested[name]) / float64(n.allocatable[name])
	}
	if name := c.gpu(n); name != "" {
		c.of(c.t, "gpuAlone")
		return part(name), name
	}
	if n.label {
		c.of(c.t, "gpuUnready")
		return 0, c.one(c.t, "otherwise")
	}
	c.of(c.t, "cpuOrMemory")
	if part("cpu") > part("memory") {
		return part("cpu"), "cpu"
	}
	return part("memory"), "memory"
}

// removable is whether it moves a node's pods elsewhere and takes the node away.
func (c clusterAutoscaler) removable(n node) bool {
	c.of(c.t, "held")
	if n.annotations[c.one(c.t, "heldKey")] == c.one(c.t, "held") {
		return false
	}
	is, by := c.used(n)
	key := "threshold"
	if n.label || strings.Contains(by, "/") {
		key = "gpuThreshold"
	}
	most, err := strconv.ParseFloat(c.one(c.t, key), 64)
	if err != nil {
		c.t.Fatal(err)
	}
	c.of(c.t, "isUsed")
	return is <= most
}

// startupKey is the taint of the component startup-taint.
func startupKey(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../deployments/components/startup-taint/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`name: GPU_AGENT_STARTUP_TAINT\n +value: (\S+)`).FindSubmatch(text)
	if m == nil {
		t.Fatal("the component names no taint")
	}
	return string(m[1])
}

var ours = deviceplugin.ResourceNames("example.com")

const (
	memory = "example.com/gpu-mem"
	whole  = "example.com/gpu"
)

// with is a node's resources beside cpu and memory.
func with(counts map[string]int) map[string]int {
	out := map[string]int{"cpu": 64, "memory": 512}
	for name, n := range counts {
		out[name] = n
	}
	return out
}

// What Cluster Autoscaler makes of a node at each moment of its life.
func TestClusterAutoscaler(t *testing.T) {
	c := clusterAutoscaler{t, read(t, "cluster-autoscaler")}
	key := startupKey(t)
	held := map[string]string{agent.HoldAnnotation: "true"}
	full := with(map[string]int{memory: 158, "cpu": 4, "memory": 16})
	for _, test := range []struct {
		name string
		node node
		// ready, and by what resource how much of it is used.
		ready     bool
		by        string
		used      float64
		removable bool
	}{
		{"registered with the taint", node{taints: []string{key + " NoSchedule"}, allocatable: with(nil)}, false, "memory", 0, true},
		{"the kubelet has the devices, and has not reported", node{taints: []string{key + " NoSchedule"}, allocatable: with(map[string]int{memory: 0})}, false, "memory", 0, true},
		{"the agent has taken the taint away", node{allocatable: with(map[string]int{memory: 158})}, true, "memory", 0, true},
		{"without a taint, before the kubelet has the devices: ready, and of no use", node{allocatable: with(nil)}, true, "memory", 0, true},
		{"the older prefix", node{taints: []string{"ignore-taint.cluster-autoscaler.kubernetes.io/gpu-agent NoSchedule"}, allocatable: with(nil)}, false, "memory", 0, true},
		{"the older prefix, to end pods", node{taints: []string{"ignore-taint.cluster-autoscaler.kubernetes.io/gpu-agent NoExecute"}, allocatable: with(nil)}, false, "memory", 0, true},
		{"a status taint", node{taints: []string{"status-taint.cluster-autoscaler.kubernetes.io/gpus NoSchedule"}, allocatable: with(nil)}, true, "memory", 0, true},
		{"the taint of the Node Readiness Controller", node{taints: []string{"readiness.k8s.io/example.com.gpus NoSchedule"}, allocatable: with(nil)}, true, "memory", 0, true},

		{"full", node{allocatable: with(map[string]int{memory: 158}), requested: full}, true, "cpu", 4.0 / 64, true},
		{"full, and held", node{annotations: held, allocatable: with(map[string]int{memory: 158}), requested: full}, true, "cpu", 4.0 / 64, false},
		{"full on demand: nothing is left to give out", node{annotations: held, allocatable: with(map[string]int{"example.com/mig-1g.10gb": 7, "example.com/mig-3g.40gb": 0}),
			requested: map[string]int{"example.com/mig-1g.10gb": 7}}, true, "memory", 0, false},
		{"full by cpu", node{allocatable: with(map[string]int{whole: 8}), requested: map[string]int{"cpu": 60, whole: 8}}, true, "cpu", 60.0 / 64, false},
		{"somebody else's word", node{annotations: map[string]string{agent.HoldAnnotation: "false"}, allocatable: with(map[string]int{memory: 158}), requested: full}, true, "cpu", 4.0 / 64, true},
		{"all GPUs unhealthy", node{allocatable: with(map[string]int{memory: 0})}, true, "memory", 0, true},

		{"the provider's label: it waits for ever", node{label: true, allocatable: with(map[string]int{memory: 158})}, false, "nvidia.com/gpu", 0, true},
		{"the provider's label, full: empty to it", node{label: true, allocatable: with(map[string]int{memory: 158}), requested: full}, false, "nvidia.com/gpu", 0, true},
		{"the provider's label, full and held", node{label: true, annotations: held, allocatable: with(map[string]int{memory: 158}), requested: full}, false, "nvidia.com/gpu", 0, false},
		{"NVIDIA's domain, whole GPUs", node{label: true, allocatable: with(map[string]int{"nvidia.com/gpu": 8}), requested: map[string]int{"nvidia.com/gpu": 6}}, true, "nvidia.com/gpu", 0.75, false},
		{"NVIDIA's domain, whole GPUs, few in use", node{label: true, allocatable: with(map[string]int{"nvidia.com/gpu": 8}), requested: map[string]int{"nvidia.com/gpu": 4}}, true, "nvidia.com/gpu", 0.5, true},
		{"NVIDIA's domain, units of memory", node{label: true, allocatable: with(map[string]int{"nvidia.com/gpu-mem": 158}), requested: map[string]int{"nvidia.com/gpu-mem": 158}}, false, "nvidia.com/gpu", 0, true},
		{"NVIDIA's domain, both: units do not count", node{label: true, allocatable: with(map[string]int{"nvidia.com/gpu": 1, "nvidia.com/gpu-mem": 79}), requested: map[string]int{"nvidia.com/gpu-mem": 79}}, true, "nvidia.com/gpu", 0, true},
	} {
		if got := c.ready(test.node); got != test.ready {
			t.Errorf("%s: ready %v, want %v", test.name, got, test.ready)
		}
		if used, by := c.used(test.node); used != test.used || by != test.by {
			t.Errorf("%s: %.2f of %s is used, want %.2f of %s", test.name, used, by, test.used, test.by)
		}
		if got := c.removable(test.node); got != test.removable {
			t.Errorf("%s: it may be taken away: %v, want %v", test.name, got, test.removable)
		}
	}
	if got := c.one(t, "heldKey"); got != agent.HoldAnnotation {
		t.Errorf("it looks at %s, and the agent writes %s", got, agent.HoldAnnotation)
	}
	if prefix := c.one(t, "startupPrefix"); !strings.HasPrefix(key, prefix) || strings.HasPrefix(key, c.one(t, "statusPrefix")) {
		t.Errorf("the taint %s does not begin with %s", key, prefix)
	}
	known := c.of(t, "gpuResources").Values
	if len(known) != 5 {
		t.Errorf("%d resources are known by name, and the documentation says five", len(known))
	}
	for _, name := range append(ours.Fixed(), "example.com/mig-1g.10gb") {
		if slices.Contains(known, name) {
			t.Errorf("%s is known by name: it counts what is used of it", name)
		}
	}
}

// karpenter applies its rules.
type karpenter struct {
	t *testing.T
	*source
}

// claim is what Karpenter wanted a node for.
type claim struct {
	startupTaints []string // "key effect"
	requests      map[string]int
}

// initialized is why a node is not; empty where it is.
func (k karpenter) initialized(n node, c claim) string {
	k.of(k.t, "ready")
	if n.unready {
		return "NodeNotReady"
	}
	k.of(k.t, "startupTaint")
	for _, taint := range n.taints {
		if slices.Contains(c.startupTaints, taint) {
			return "StartupTaintsExist"
		}
	}
	k.of(k.t, "ephemeralTaint")
	for _, taint := range n.taints {
		if slices.Contains(k.of(k.t, "ephemeralTaints").Values, taint) {
			return "KnownEphemeralTaintsExist"
		}
	}
	k.of(k.t, "askedFor")
	k.of(k.t, "registered")
	for name, asked := range c.requests {
		if asked > 0 && n.allocatable[name] == 0 {
			return "ResourceNotRegistered"
		}
	}
	return ""
}

// What Karpenter makes of a node until it takes it for initialised, which it does once.
func TestKarpenter(t *testing.T) {
	k := karpenter{t, read(t, "karpenter")}
	key := startupKey(t)
	const small, large = "example.com/mig-1g.10gb", "example.com/mig-3g.40gb"
	units := claim{[]string{key + " NoSchedule"}, map[string]int{"cpu": 4, memory: 24}}
	both := claim{units.startupTaints, map[string]int{small: 1, large: 1, whole: 0}}
	for _, test := range []struct {
		name  string
		node  node
		claim claim
		// waits is why the node is not initialised.
		waits string
	}{
		{"the kubelet has just registered it", node{unready: true, taints: []string{key + " NoSchedule", "karpenter.sh/unregistered NoExecute"}}, units, "NodeNotReady"},
		{"registered, with the taint", node{taints: []string{key + " NoSchedule"}, allocatable: with(map[string]int{memory: 158})}, units, "StartupTaintsExist"},
		{"without the taint, before the kubelet has reported", node{allocatable: with(nil)}, units, "ResourceNotRegistered"},
		{"counts are zero after the kubelet's start", node{allocatable: with(map[string]int{memory: 0})}, units, "ResourceNotRegistered"},
		{"as the agent leaves it", node{allocatable: with(map[string]int{memory: 158})}, units, ""},
		{"the taint with another effect, which the agent takes away too", node{taints: []string{key + " NoExecute"}, allocatable: with(map[string]int{memory: 158})}, units, ""},
		{"somebody else's taint", node{taints: []string{"team.example.org/theirs NoSchedule"}, allocatable: with(map[string]int{memory: 158})}, units, ""},
		{"not reachable", node{taints: []string{"node.kubernetes.io/unreachable NoSchedule"}, allocatable: with(map[string]int{memory: 158})}, units, "KnownEphemeralTaintsExist"},

		{"on demand, as the agent leaves it", node{allocatable: with(map[string]int{small: 7, large: 2})}, both, ""},
		{"on demand, a pod came too early and covers the large places", node{allocatable: with(map[string]int{small: 4, large: 0}), requested: map[string]int{small: 2}}, both, "ResourceNotRegistered"},
		{"all GPUs were unhealthy before", node{allocatable: with(map[string]int{small: 0, large: 0})}, both, "ResourceNotRegistered"},
		{"full of what was asked for", node{allocatable: with(map[string]int{memory: 158}), requested: map[string]int{memory: 158}}, units, ""},
	} {
		if got := k.initialized(test.node, test.claim); got != test.waits {
			t.Errorf("%s: it waits because of %q, want %q", test.name, got, test.waits)
		}
	}
}

// docs are what operators read.
func docs(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/autoscalers.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The rule that the documentation shows is one for the Node Readiness Controller, about the
// condition that the agent writes. Its taint is no startup taint to Cluster Autoscaler by its
// name, which the documentation says.
func TestShownNodeReadinessRule(t *testing.T) {
	s := read(t, "node-readiness")
	var shown struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		Metadata   struct{ Name string }
		Spec       struct {
			NodeSelector struct {
				MatchLabels map[string]string `yaml:"matchLabels"`
			} `yaml:"nodeSelector"`
			Conditions []struct {
				Type           string
				RequiredStatus string `yaml:"requiredStatus"`
			}
			Taint           struct{ Key, Effect, Value string }
			EnforcementMode string `yaml:"enforcementMode"`
		}
	}
	m := regexp.MustCompile("(?s)```yaml\n([^`]*kind: NodeReadinessRule\n.*?)```").FindStringSubmatch(docs(t))
	if m == nil {
		t.Fatal("docs/autoscalers.md shows no NodeReadinessRule")
	}
	d := yaml.NewDecoder(strings.NewReader(m[1]))
	d.KnownFields(true)
	if err := d.Decode(&shown); err != nil {
		t.Fatal(err)
	}
	spec := &shown.Spec
	if shown.APIVersion != strings.Join(s.of(t, "group").Values, "/") || shown.Metadata.Name == "" || len(spec.NodeSelector.MatchLabels) == 0 {
		t.Errorf("it is %s %q, for %v", shown.APIVersion, shown.Metadata.Name, spec.NodeSelector)
	}
	if len(spec.Conditions) != 1 || spec.Conditions[0].Type != "example.com/"+agent.ReadyCondition || spec.Conditions[0].RequiredStatus != "True" ||
		!slices.Contains(s.of(t, "requiredStatus").Values, "True") {
		t.Errorf("it is about %+v", spec.Conditions)
	}
	name, ok := strings.CutPrefix(spec.Taint.Key, s.one(t, "taintKey"))
	if !ok || !regexp.MustCompile(s.one(t, "taintName")).MatchString(name) || !slices.Contains(s.of(t, "effects").Values, spec.Taint.Effect) {
		t.Errorf("its taint is %+v", spec.Taint)
	}
	if !slices.Contains(s.of(t, "modes").Values, spec.EnforcementMode) {
		t.Errorf("its mode is %q", spec.EnforcementMode)
	}
	c := clusterAutoscaler{t, read(t, "cluster-autoscaler")}
	if c.ready(node{taints: []string{spec.Taint.Key + " " + spec.Taint.Effect}, allocatable: with(nil)}) != strings.Contains(docs(t), "`--startup-taint "+spec.Taint.Key+"`") {
		t.Errorf("the documentation does not say how Cluster Autoscaler comes to know the taint %s", spec.Taint.Key)
	}
}

// The documentation names what was read.
func TestDocsNameWhatWasRead(t *testing.T) {
	for _, name := range []string{"cluster-autoscaler", "karpenter", "node-readiness"} {
		s := read(t, name)
		if want := fmt.Sprintf("%.8s", s.Version); !strings.Contains(docs(t), want) {
			t.Errorf("docs/autoscalers.md does not say that %s %s was read", s.Repository, want)
		}
	}
}
