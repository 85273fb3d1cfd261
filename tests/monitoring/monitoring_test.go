// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	query "github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"sigs.k8s.io/yaml"
)

const deployments = "../../deployments/"

func TestBoards(t *testing.T) {
	// Those that the boards have; a panel of another kind would be read without its options.
	grafana := cog.NewRuntime()
	grafana.RegisterPanelcfgVariant(stat.VariantConfig())
	grafana.RegisterPanelcfgVariant(table.VariantConfig())
	grafana.RegisterPanelcfgVariant(timeseries.VariantConfig())
	grafana.RegisterDataqueryVariant(query.VariantConfig())
	files, err := filepath.Glob(deployments + "components/monitoring/*.json")
	if err != nil || len(files) != 2 {
		t.Fatalf("find the boards: %q, %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := valid(text); err != nil {
			t.Errorf("%s: %v", file, err)
		}
		// The same test sees what is wrong with a board.
		for what, edit := range map[string][2]string{
			"an unknown field of a query":      {`"editorMode":`, `"editorMod":`},
			"an unknown option of a panel":     {`"graphMode":`, `"graphMod":`},
			"a word that is none of an enum's": {`"showPoints": "never"`, `"showPoints": "seldom"`},
			"a text for a number":              {`"h": 8`, `"h": "eight"`},
		} {
			broken := strings.Replace(string(text), edit[0], edit[1], 1)
			if broken == string(text) {
				continue
			}
			if _, err := valid([]byte(broken)); err == nil {
				t.Errorf("%s: %s is not noticed", file, what)
			}
		}
	}
}

// valid is a board without what Grafana does not know.
func valid(text []byte) (b dashboard.Dashboard, err error) {
	if err := b.UnmarshalJSONStrict(text); err != nil {
		return b, fmt.Errorf("read it as Grafana's: %w", err)
	}
	if err := b.Validate(); err != nil {
		return b, fmt.Errorf("values that Grafana refuses: %w", err)
	}
	return b, nil
}

func TestOperatorsObjects(t *testing.T) {
	for file, into := range map[string]any{
		"components/monitoring/podmonitor.yaml": &monitoringv1.PodMonitor{},
		"components/monitoring/rules.yaml":      &monitoringv1.PrometheusRule{},
		"placer/monitoring/podmonitor.yaml":     &monitoringv1.PodMonitor{},
		"placer/monitoring/rules.yaml":          &monitoringv1.PrometheusRule{},
	} {
		text, err := os.ReadFile(deployments + file)
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.UnmarshalStrict(text, into); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}
