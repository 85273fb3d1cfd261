// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"errors"
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

// register makes the kinds of panels and queries known that the boards have. One of another kind
// would be read without its options.
func register() {
	grafana := cog.NewRuntime()
	grafana.RegisterPanelcfgVariant(stat.VariantConfig())
	grafana.RegisterPanelcfgVariant(table.VariantConfig())
	grafana.RegisterPanelcfgVariant(timeseries.VariantConfig())
	grafana.RegisterDataqueryVariant(query.VariantConfig())
}

func TestBoards(t *testing.T) {
	register()
	files, err := filepath.Glob(deployments + "components/monitoring/*.json")
	if err != nil || len(files) != 2 {
		t.Fatalf("find the boards: %q, %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := valid(text); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// What the test of the boards has to see.
func TestBrokenBoards(t *testing.T) {
	register()
	text, err := os.ReadFile(deployments + "components/monitoring/gpu-agent-operators.json")
	if err != nil {
		t.Fatal(err)
	}
	for what, edit := range map[string][2]string{
		"an unknown field of a query":  {`"editorMode":`, `"editorMod":`},
		"an unknown option of a panel": {`"graphMode":`, `"graphMod":`},
		"an unknown field of a panel":  {`"gridPos":`, `"gridPlace":`},
		"a text for a number":          {`"h": 8`, `"h": "eight"`},
	} {
		broken := strings.Replace(string(text), edit[0], edit[1], 1)
		if err := valid([]byte(broken)); broken == string(text) || err == nil {
			t.Errorf("%s is not noticed", what)
		}
	}
}

// valid asks that a board has nothing that Grafana does not know, and no value that it refuses.
func valid(text []byte) error {
	//lint:ignore SA1019 every Grafana in use takes this form, and its sidecar with it; the new one takes Grafana 12
	var b dashboard.Dashboard
	err := b.UnmarshalJSONStrict(text)
	if none(err) {
		err = b.Validate()
	}
	if none(err) {
		return nil
	}
	return err
}

// none tells an error of the library's that says nothing, as some of its functions return where all
// is well.
func none(err error) bool {
	var all cog.BuildErrors
	return err == nil || errors.As(err, &all) && len(all) == 0
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
