// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"testing"
	"time"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/prometheus"
)

// usageRulesTest is what the rules of docs/usage.md come to: two pods of a namespace hold a
// quarter and a whole GPU and use the latter half of the time, and one of another has nothing
// but a grant.
const usageRulesTest = `
rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'gpu_agent_container_granted_gpu_seconds_total{instance="a",namespace="train",pod="q",container="m",gpu="1"}', values: '0+15x600'}
      - {series: 'gpu_agent_container_granted_gpu_seconds_total{instance="b",namespace="train",pod="w",container="m",gpu="2"}', values: '0+60x600'}
      - {series: 'gpu_agent_container_used_gpu_seconds_total{instance="b",namespace="train",pod="w",container="m",gpu="2"}', values: '0+30x600'}
      - {series: 'gpu_agent_container_granted_memory_byte_seconds_total{instance="a",namespace="train",pod="q",container="m",gpu="1"}', values: '0+1288490188800x600'}
      - {series: 'gpu_agent_container_used_memory_byte_seconds_total{instance="a",namespace="train",pod="q",container="m",gpu="1"}', values: '0+644245094400x600'}
      - {series: 'gpu_agent_container_granted_gpu_seconds_total{instance="b",namespace="dev",pod="n",container="m",gpu="3"}', values: '0+30x600'}
      - {series: 'gpu_agent_container_idle_seconds{instance="b",namespace="dev",pod="n",container="m",gpu="3"}', values: '0+60x600'}
      - {series: 'gpu_agent_container_idle_seconds{instance="b",namespace="dev",pod="n",container="m",gpu="4"}', values: '0x300 0+60x300'}
    promql_expr_test:
      - {expr: 'namespace:gpu_agent_granted_gpus:rate5m', eval_time: 30m, exp_samples: [{labels: 'namespace:gpu_agent_granted_gpus:rate5m{namespace="train"}', value: 1.25}, {labels: 'namespace:gpu_agent_granted_gpus:rate5m{namespace="dev"}', value: 0.5}]}
      - {expr: 'namespace:gpu_agent_used_gpus:rate5m', eval_time: 30m, exp_samples: [{labels: 'namespace:gpu_agent_used_gpus:rate5m{namespace="train"}', value: 0.5}]}
      - {expr: 'namespace:gpu_agent_granted_gpu_hours:increase1h', eval_time: 2h, exp_samples: [{labels: 'namespace:gpu_agent_granted_gpu_hours:increase1h{namespace="train"}', value: 1.25}, {labels: 'namespace:gpu_agent_granted_gpu_hours:increase1h{namespace="dev"}', value: 0.5}]}
      - {expr: 'namespace:gpu_agent_used_gpu_hours:increase1h', eval_time: 2h, exp_samples: [{labels: 'namespace:gpu_agent_used_gpu_hours:increase1h{namespace="train"}', value: 0.5}]}
      - {expr: 'namespace:gpu_agent_granted_gib_hours:increase1h', eval_time: 2h, exp_samples: [{labels: 'namespace:gpu_agent_granted_gib_hours:increase1h{namespace="train"}', value: 20}]}
      - {expr: 'namespace:gpu_agent_used_gib_hours:increase1h', eval_time: 2h, exp_samples: [{labels: 'namespace:gpu_agent_used_gib_hours:increase1h{namespace="train"}', value: 10}]}
    alert_rule_test:
      - {alertname: GPUGrantIdle, eval_time: 5h}
      - alertname: GPUGrantIdle
        eval_time: 9h31m
        exp_alerts:
          - exp_labels: {namespace: dev, pod: n, container: m}
            exp_annotations: {summary: "dev/n holds a GPU and has not used it for 4h 30m 0s"}
`

// The recording rules that docs/usage.md shows name metrics that the agent has, and give the
// cluster's totals.
func TestUsageRules(t *testing.T) {
	m := regexp.MustCompile("(?s)```yaml\n(groups:.*?)```").FindStringSubmatch(string(read(t, "../docs/usage.md")))
	if m == nil {
		t.Fatal("docs/usage.md shows no rules")
	}
	judgeRules(t, m[1], usageRulesTest)
}

// A Prometheus that scrapes as docs/usage.md says gives OpenCost the share of each container:
// a quarter for a quarter, and so on. Without the rule that drops OpenCost's own zeros it gives
// half of that.
func TestCost(t *testing.T) {
	if _, err := prometheus.Program(t.Context(), "prometheus"); err != nil {
		t.Skipf("no Prometheus, and Debian's archive has none for us: %v", err)
	}
	want := map[string]float64{"quarter": .25, "instance": .125, "whole": 1, "two": 2}
	good := func() error { return nil }
	pages := obs.New(obs.Options{
		Logger: slog.New(slog.DiscardHandler), Healthy: good, Ready: good, Metrics: obs.NewMetrics("test"), Status: func() status.Status { return status.Status{} },
		Account: &obs.Account{Node: "node-1", Usage: func() (u usage.Shown) {
			for pod, share := range want {
				for i := 0; share > 0; i, share = i+1, share-1 {
					u.Now = append(u.Now, usage.Part{Key: usage.Key{Namespace: "work", Pod: pod, Container: "main", GPU: gpu.UUID("GPU-" + pod)}, Index: i, Share: min(1, share)})
				}
			}
			return u
		}},
	}).Handler()
	answer := httptest.NewRecorder()
	pages.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	page, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	without, with, err := prometheus.Costs(ctx, t.TempDir(), "../docs/usage.md", page)
	if err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(with, want) {
		t.Errorf("OpenCost reads %v, want %v", with, want)
	}
	for pod, share := range want {
		if without[pod] != share/2 {
			t.Errorf("without the rule OpenCost reads %v of %s: if that is not half of %v, the rule is not needed", without[pod], pod, share)
		}
	}
}
