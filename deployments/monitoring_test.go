// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/prometheus"
)

// The component adds what the agents are scraped by, the rules and the boards, and changes nothing.
// It is about the agent's pods, wherever an overlay puts them, and about their port by its name.
func TestRenderedMonitoring(t *testing.T) {
	for _, test := range []struct {
		objects, without []object
		set, kind        string
		added            int
	}{
		{render(t, withComponent(t, "base", "components/monitoring")), base(t), name, "DaemonSet", 4},
		{render(t, withComponent(t, "placer", "placer/monitoring")), resources(t, "placer"), placer, "Deployment", 2},
	} {
		if got, want := len(test.objects), len(test.without)+test.added; got != want {
			t.Errorf("%s: %d objects, want %d", test.set, got, want)
		}
		var pods struct {
			Spec struct {
				Template struct {
					Metadata metadata
					Spec     struct {
						Containers []struct {
							Ports []struct {
								Name          string
								ContainerPort int `yaml:"containerPort"`
							}
						}
					}
				}
			}
		}
		set := one(t, test.objects, test.kind, test.set)
		if err := set.node.Decode(&pods); err != nil {
			t.Fatal(err)
		}
		ports := map[string]int{}
		for _, p := range pods.Spec.Template.Spec.Containers[0].Ports {
			ports[p.Name] = p.ContainerPort
		}
		m := as[podMonitor](t, one(t, test.objects, "PodMonitor", test.set))
		if !maps.Equal(m.Spec.Selector.MatchLabels, pods.Spec.Template.Metadata.Labels) || m.Metadata.Namespace != set.Metadata.Namespace {
			t.Errorf("scraped are pods with %v in %s, and the program's are %v in %s", m.Spec.Selector.MatchLabels, m.Metadata.Namespace, pods.Spec.Template.Metadata.Labels, set.Metadata.Namespace)
		}
		if job := pods.Spec.Template.Metadata.Labels[m.Spec.JobLabel]; job != test.set {
			t.Errorf("the job is %q, and rules and boards ask for %s", job, test.set)
		}
		if e := m.Spec.Endpoints; len(e) != 1 || ports[e[0].Port] == 0 {
			t.Errorf("scraped is %+v of the ports %v", e, ports)
		}
	}
}

type podMonitor struct {
	header `yaml:",inline"`
	Spec   struct {
		JobLabel string `yaml:"jobLabel"`
		Selector struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
		}
		Endpoints []struct {
			Port, Interval string
			HonorLabels    bool `yaml:"honorLabels"`
			Relabelings    []struct {
				SourceLabels []string `yaml:"sourceLabels"`
				TargetLabel  string   `yaml:"targetLabel"`
			}
		} `yaml:"podMetricsEndpoints"`
	}
}

// Who scrapes without the operator finds each agent by DNS, those included that are not ready.
func TestMonitoringService(t *testing.T) {
	type service struct {
		header `yaml:",inline"`
		Spec   struct {
			ClusterIP string `yaml:"clusterIP"`
			NotReady  bool   `yaml:"publishNotReadyAddresses"`
			Selector  map[string]string
			Ports     []struct {
				Name, Protocol string
				TargetPort     string `yaml:"targetPort"`
				Port           int
			}
		}
	}
	objects := render(t, withComponent(t, "base", "components/monitoring"))
	s, d := as[service](t, one(t, objects, "Service", name)), agentSet(t, objects)
	if s.Spec.ClusterIP != "None" || !s.Spec.NotReady || !maps.Equal(s.Spec.Selector, d.Spec.Template.Metadata.Labels) {
		t.Errorf("the Service is %+v, the agent's pods have %v", s.Spec, d.Spec.Template.Metadata.Labels)
	}
	port := agent(t, &d).Ports[0]
	if len(s.Spec.Ports) != 1 || s.Spec.Ports[0].Port != port.ContainerPort || s.Spec.Ports[0].TargetPort != port.Name {
		t.Errorf("its ports are %+v, the agent's is %+v", s.Spec.Ports, port)
	}
	boards := one(t, objects, "ConfigMap", "gpu-agent-boards")
	if boards.Metadata.Labels["grafana_dashboard"] != "1" {
		t.Errorf("Grafana's sidecar does not find boards with the labels %v", boards.Metadata.Labels)
	}
}

// The overlay that the documents show has every alert lead to another place, at the same section.
func TestShownRunbookBase(t *testing.T) {
	shown := regexp.MustCompile("(?s)```yaml\n(# your kustomization.yaml\n[^`]*runbook_url[^`]*)```").FindStringSubmatch(string(read(t, "../docs/metrics.md")))
	if shown == nil {
		t.Fatal("docs/metrics.md does not show how to have alerts lead elsewhere")
	}
	base := regexp.MustCompile(`sourceValue: (\S+)`).FindStringSubmatch(shown[1])
	if base == nil {
		t.Fatalf("no sourceValue in\n%s", shown[1])
	}
	dir := overlayOf(t, func(up string) string { return strings.ReplaceAll(shown[1], "gpu-agent/deployments", up) })
	objects := render(t, dir)
	for _, kind := range []string{"PodMonitor", "PrometheusRule"} {
		if one(t, objects, kind, name).Metadata.Labels["release"] == "" {
			t.Errorf("the %s has not the label that is shown", kind)
		}
	}
	found := 0
	for _, g := range rulesOf(t, one(t, objects, "PrometheusRule", name)).Groups {
		for _, r := range g.Rules {
			if r.Alert == "" {
				continue
			}
			found++
			if got, want := r.Annotations["runbook_url"], base[1]+"#"+strings.ToLower(r.Alert); got != want {
				t.Errorf("%s leads to %s, want %s", r.Alert, got, want)
			}
		}
	}
	if found == 0 {
		t.Error("there are no alerts")
	}
}

// boards are the boards by their files.
func boards(t *testing.T) map[string]prometheus.Board {
	t.Helper()
	out, err := prometheus.Boards("components/monitoring")
	if err != nil {
		t.Fatal(err)
	}
	for f, b := range out {
		if b.UID+".json" != filepath.Base(f) {
			t.Errorf("%s has the uid %q", f, b.UID)
		}
	}
	return out
}

// Each panel of the boards says what it shows, asks for what there is, and gets data from a Prometheus
// that scrapes an agent and a placer, with the rules in force.
func TestBoards(t *testing.T) {
	type query struct{ what, expr string }
	var queries []query
	for _, f := range slices.Sorted(maps.Keys(boards(t))) {
		b := boards(t)[f]
		known := map[string]bool{"datasource": true, "__rate_interval": true, "__range": true}
		for _, v := range b.Templating.List {
			known[v.Name] = true
			if v.Type == "query" {
				m := regexp.MustCompile(`^label_values\((\w+), \w+\)$`).FindStringSubmatch(v.Definition)
				if m == nil {
					t.Fatalf("%s: the variable %s is %q, want label_values of a metric", f, v.Name, v.Definition)
				}
				checkAsked(t, f+": "+v.Name, m[1])
			}
		}
		for _, p := range b.Panels {
			if p.Type == "row" {
				continue
			}
			what := f + ": " + p.Title
			if p.Description == "" || len(p.Targets) == 0 {
				t.Errorf("%s has no description, or no query", what)
			}
			for _, q := range p.Targets {
				for _, v := range regexp.MustCompile(`\$(\w+)`).FindAllStringSubmatch(q.Expr, -1) {
					if !known[v[1]] {
						t.Errorf("%s: there is no variable %s", what, v[1])
					}
				}
				checkAsked(t, what, prometheus.Filled(q.Expr))
				queries = append(queries, query{what, prometheus.Filled(q.Expr)})
			}
		}
	}
	if len(queries) < 40 {
		t.Errorf("the boards ask %d questions: this test does not look where they are", len(queries))
	}
	if testing.Short() {
		t.Skip("make test-all runs it: a Prometheus answers each panel")
	}
	if _, err := prometheus.Program(t.Context(), "prometheus"); err != nil {
		t.Skipf("no Prometheus, and Debian's archive has none for us: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	dir := t.TempDir()
	const asScraped = "honor_labels: true\nrelabel_configs: [{target_label: node, replacement: node-1}]\n"
	s, err := prometheus.Start(ctx, dir, []prometheus.Job{
		{Name: name, Page: []byte(agentPage(t)), Extra: asScraped}, {Name: placer, Page: []byte(placerPage(t)), Extra: asScraped},
	}, writeRules(t, dir)...)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	for _, q := range queries {
		// What is recorded follows the scrapes.
		for {
			samples, err := s.Samples(ctx, q.expr)
			if err == nil && len(samples) > 0 {
				break
			}
			select {
			case <-ctx.Done():
				t.Fatalf("%s: %s gives nothing: %v", q.what, q.expr, err)
			case <-time.After(500 * time.Millisecond):
			}
			if err != nil {
				t.Fatal(fmt.Errorf("%s: %w", q.what, err))
			}
		}
	}
}
