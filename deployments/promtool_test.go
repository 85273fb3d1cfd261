// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/prometheus"
)

// shownYAML are the YAML texts of docs/schedulers.md.
func shownYAML(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, m := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(read(t, "../docs/schedulers.md")), -1) {
		out = append(out, m[1])
	}
	return out
}

// shown is the one that has a word in it.
func shown(t *testing.T, word string) string {
	t.Helper()
	all := shownYAML(t)
	i := slices.IndexFunc(all, func(s string) bool { return strings.Contains(s, word) })
	if i < 0 {
		t.Fatalf("docs/schedulers.md shows nothing with %q", word)
	}
	return all[i]
}

// rulesTest is what the rules come to: node a is three quarters full and has three quarters
// of the memory, then it is full, and both are.
const rulesTest = `
rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'gpu_agent_saturation_ratio{instance="a",job="x"}', values: '0.75x9 1x30'}
      - {series: 'gpu_agent_saturation_ratio{instance="b",job="x"}', values: '0x19 1x20'}
      - {series: 'gpu_agent_gpu_memory_bytes{instance="a",job="x",gpu="1"}', values: '100x39'}
      - {series: 'gpu_agent_gpu_memory_bytes{instance="a",job="x",gpu="2"}', values: '200x39'}
      - {series: 'gpu_agent_gpu_memory_bytes{instance="b",job="x",gpu="3"}', values: '100x39'}
      - {series: 'gpu_agent_plugin_refusals_total{instance="b",resource="example.com/gpu-mem",reason="NotOneGPU"}', values: '0x4 3x35'}
      - {series: 'gpu_agent_plugin_refusals_total{instance="b",resource="example.com/gpu-mem",reason="HeldByPods"}', values: '0+1x39'}
    promql_expr_test:
      - {expr: 'gpu_agent:saturation:ratio', eval_time: 5m, exp_samples: [{labels: 'gpu_agent:saturation:ratio', value: 0.5625}]}
      - {expr: 'gpu_agent:burst:workers', eval_time: 5m, exp_samples: [{labels: 'gpu_agent:burst:workers', value: 0}]}
      - {expr: 'gpu_agent:saturation:ratio', eval_time: 15m, exp_samples: [{labels: 'gpu_agent:saturation:ratio', value: 0.75}]}
      - {expr: 'gpu_agent:burst:workers', eval_time: 25m, exp_samples: [{labels: 'gpu_agent:burst:workers', value: 4}]}
    alert_rule_test:
      - {alertname: GPUsSaturated, eval_time: 25m}
      - alertname: GPUsSaturated
        eval_time: 35m
        exp_alerts: [{exp_annotations: {summary: "100% of the GPU memory is held or cannot be had"}}]
      - {alertname: GPURequestsRefused, eval_time: 3m}
      - alertname: GPURequestsRefused
        eval_time: 8m
        exp_alerts:
          - exp_labels: {resource: example.com/gpu-mem, reason: NotOneGPU}
            exp_annotations: {summary: "pods that ask for example.com/gpu-mem are refused: NotOneGPU"}
`

// The rules that the documentation shows are rules, name metrics that the agent has, and
// come to what the text says; what KEDA asks is one of them.
func TestShownRules(t *testing.T) {
	rules := shown(t, "groups:")
	query := regexp.MustCompile(`(?m)^ +query: (.+)$`).FindStringSubmatch(shown(t, "ScaledObject"))
	if query == nil || !strings.Contains(rules, "record: "+query[1]+"\n") {
		t.Errorf("KEDA asks %q, which no rule records", query)
	}
	judgeRules(t, rules, rulesTest)
}

// judgeRules has promtool check rules, and run them against what they should come to. Metrics of
// the agent's that they name have to be documented; the names of recorded series hold others.
func judgeRules(t *testing.T, rules, want string) {
	t.Helper()
	served := string(read(t, "../docs/operations.md"))
	for _, name := range regexp.MustCompile(`(?:^|[^:\w])(gpu_agent_\w+)`).FindAllStringSubmatch(rules, -1) {
		if !strings.Contains(served, "`"+name[1]+"`") {
			t.Errorf("the rules name %s, which the agent does not serve", name[1])
		}
	}
	tool, err := prometheus.Program(t.Context(), "promtool")
	if err != nil {
		t.Skipf("no promtool, and Debian's archive has none for us: %v", err)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"rules.yaml": rules, "test.yaml": want} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"check", "rules", "rules.yaml"}, {"test", "rules", "test.yaml"}} {
		cmd := exec.CommandContext(t.Context(), tool, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// The HorizontalPodAutoscaler that the documentation shows is one.
func (s *apiServer) tryShownAutoscaler(t *testing.T) {
	for _, o := range documents(t, "docs/schedulers.md", []byte(shown(t, "kind: HorizontalPodAutoscaler"))) {
		var object fields
		if err := o.node.Decode(&object); err != nil {
			t.Fatal(err)
		}
		if err := s.do(t, nil, http.MethodPost, "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers?dryRun=All&fieldValidation=Strict", asJSON, object, nil); err != nil {
			t.Error(err)
		}
	}
}
