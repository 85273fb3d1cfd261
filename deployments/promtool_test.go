// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/prometheus"

	"go.yaml.in/yaml/v4"
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

// ruleFiles are the manifests with rules, by the names under which the tests of rules know them.
var ruleFiles = map[string]string{"agent.yaml": "components/monitoring/rules.yaml", "placer.yaml": "placer/monitoring/rules.yaml"}

// ruleGroups is a rule file, as Prometheus reads it.
type ruleGroups struct {
	Groups []struct {
		Name  string
		Rules []struct {
			Record, Alert, Expr, For string
			Labels, Annotations      map[string]string
		}
	}
}

// rulesIn are a manifest's.
func rulesIn(t *testing.T, file string) ruleGroups {
	t.Helper()
	return rulesOf(t, documents(t, file, read(t, file))[0])
}

// rulesOf are a PrometheusRule's.
func rulesOf(t *testing.T, o object) ruleGroups {
	t.Helper()
	type prometheusRule struct {
		header `yaml:",inline"`
		Spec   ruleGroups
	}
	return as[prometheusRule](t, o).Spec
}

// alertsAndRecords are the names of all rules.
func alertsAndRecords(t *testing.T) (alerts, records []string) {
	t.Helper()
	for _, file := range ruleFiles {
		for _, g := range rulesIn(t, file).Groups {
			for _, r := range g.Rules {
				if r.Alert != "" {
					alerts = append(alerts, r.Alert)
				} else {
					records = append(records, r.Record)
				}
			}
		}
	}
	if len(alerts) < 12 || len(records) < 8 {
		t.Fatalf("the rules are the alerts %q and the records %q: this test does not look where they are", alerts, records)
	}
	slices.Sort(alerts)
	return alerts, records
}

// writeRules puts the rules into files of their own.
func writeRules(t *testing.T, dir string) (paths []string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(ruleFiles)) {
		text, err := yaml.Marshal(rulesAsWritten(t, ruleFiles[name]))
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, filepath.Join(dir, name))
		if err := os.WriteFile(paths[len(paths)-1], text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return paths
}

// rulesAsWritten is a manifest's spec, whatever its fields are.
func rulesAsWritten(t *testing.T, file string) any {
	t.Helper()
	var object struct{ Spec yaml.Node }
	if err := documents(t, file, read(t, file))[0].node.Decode(&object); err != nil {
		t.Fatal(err)
	}
	return &object.Spec
}

func promtool(t *testing.T) string {
	t.Helper()
	tool, err := prometheus.Program(t.Context(), "promtool")
	if err != nil {
		t.Skipf("no promtool, and Debian's archive has none for us: %v", err)
	}
	return tool
}

// Promtool takes the rules, and they come to what testdata/rules says: each alert is silent up to
// the end of its wait and fires after it.
func TestRules(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: promtool lives through hours")
	}
	tool, dir := promtool(t), t.TempDir()
	writeRules(t, dir)
	tests, err := filepath.Glob("testdata/rules/*.yaml")
	if err != nil || len(tests) == 0 {
		t.Fatalf("find the tests of rules: %v", err)
	}
	fires, silent := map[string]bool{}, map[string]bool{}
	check, judge := []string{"check", "rules"}, []string{"test", "rules"}
	for name := range ruleFiles {
		check = append(check, name)
	}
	for _, file := range tests {
		judge = append(judge, filepath.Base(file))
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(file)), read(t, file), 0o600); err != nil {
			t.Fatal(err)
		}
		var said struct {
			Tests []struct {
				Alerts []struct {
					Name     string      `yaml:"alertname"`
					Expected []yaml.Node `yaml:"exp_alerts"`
				} `yaml:"alert_rule_test"`
			}
		}
		if err := yaml.Unmarshal(read(t, file), &said); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, one := range said.Tests {
			for _, a := range one.Alerts {
				fires[a.Name] = fires[a.Name] || len(a.Expected) > 0
				silent[a.Name] = silent[a.Name] || len(a.Expected) == 0
			}
		}
	}
	alerts, _ := alertsAndRecords(t)
	for _, a := range alerts {
		if !fires[a] || !silent[a] {
			t.Errorf("%s is tried firing: %v, silent: %v; want both", a, fires[a], silent[a])
		}
	}
	for _, args := range [][]string{check, judge} {
		cmd := exec.CommandContext(t.Context(), tool, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// What the documents have KEDA ask is recorded by a rule.
func TestShownQueryIsRecorded(t *testing.T) {
	query := regexp.MustCompile(`(?m)^ +query: (.+)$`).FindStringSubmatch(shown(t, "ScaledObject"))
	if _, records := alertsAndRecords(t); query == nil || !slices.Contains(records, query[1]) {
		t.Errorf("KEDA asks %q, which no rule records", query)
	}
}

// servedMetrics are the metrics that can be asked for: the agent's and the placer's as the documents
// have them, with which they are compared elsewhere, and what every scrape and every process has.
func servedMetrics(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{"up": true, "process_resident_memory_bytes": true}
	for _, doc := range []string{"../docs/metrics.md", "../docs/placer.md"} {
		for _, m := range regexp.MustCompile("(?m)^\\| (`.*?) \\|").FindAllStringSubmatch(string(read(t, doc)), -1) {
			for _, name := range regexp.MustCompile("`(gpu_agent_\\w+|container_gpu_allocation)`").FindAllStringSubmatch(m[1], -1) {
				out[name[1]] = true
			}
		}
	}
	return out
}

// asked are the metrics that an expression of PromQL names.
func asked(expr string) (out []string) {
	for _, not := range []string{`"[^"]*"`, `\{[^}]*\}`, `\[[^\]]*\]`, `\b(by|on|without|ignoring|group_left|group_right) *\([^)]*\)`, `\b(or|and|unless|bool|group_left|group_right|offset)\b`} {
		expr = regexp.MustCompile(not).ReplaceAllString(expr, " ")
	}
	for _, m := range regexp.MustCompile(`([a-zA-Z_:][\w:]*)( *\()?`).FindAllStringSubmatch(expr, -1) {
		if m[2] == "" {
			out = append(out, m[1])
		}
	}
	return out
}

func TestAsked(t *testing.T) {
	for expr, want := range map[string][]string{
		`sum(a * on (instance) sum by (instance) (b)) / sum(c)`:                  {"a", "b", "c"},
		`max by (node) (x{k="or y"}) > 0 or sum by (n) (rate(z[15m])) >= bool 1`: {"x", "z"},
		`absent(gpu:a:ratio == 1) * 2^30`:                                        {"gpu:a:ratio"},
	} {
		if got := asked(expr); !slices.Equal(got, want) {
			t.Errorf("%s asks for %q, want %q", expr, got, want)
		}
	}
}

// checkAsked says which metrics of an expression nobody serves and no rule records.
func checkAsked(t *testing.T, what, expr string) {
	t.Helper()
	served := servedMetrics(t)
	_, records := alertsAndRecords(t)
	names := asked(expr)
	if len(names) == 0 {
		t.Errorf("%s asks for nothing: %s", what, expr)
	}
	for _, name := range names {
		if base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(name, ""); !served[name] && !served[base] && !slices.Contains(records, name) {
			t.Errorf("%s asks for %s, which nobody serves or records", what, name)
		}
	}
}

// The rules ask for what there is. An alert says how bad it is and leads to its runbook.
func TestRulesAskForWhatIsServed(t *testing.T) {
	for _, file := range ruleFiles {
		for _, g := range rulesIn(t, file).Groups {
			for _, r := range g.Rules {
				checkAsked(t, file+": "+r.Alert+r.Record, r.Expr)
				if r.Alert == "" {
					continue
				}
				if !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) || r.Annotations["summary"] == "" {
					t.Errorf("%s has the severity %q and the summary %q", r.Alert, r.Labels["severity"], r.Annotations["summary"])
				}
				if want := "docs/runbooks.md#" + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want {
					t.Errorf("%s leads to %q, want %s", r.Alert, r.Annotations["runbook_url"], want)
				}
			}
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
