// SPDX-License-Identifier: Apache-2.0

package placerobs

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"example.com/gpu-agent/internal/obs"
)

// A scrape has a zero for whatever can be counted later, and Prometheus' naming.
func TestMetrics(t *testing.T) {
	m := NewMetrics("v", func() State {
		return State{Waiting: 3, Leads: true, Sites: map[string]SiteUse{"cloud": {GPUs: 2, Seconds: 5}}}
	},
		[]string{"filter"}, []string{"placed", "refused"}, []string{"accepted"}, []string{"Ready"})
	m.Answered("filter", "placed", time.Millisecond)
	m.Woke(errors.New("x"))
	m.APIAnswered()
	families, err := m.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	page := httptest.NewRecorder()
	ok := func() error { return nil }
	obs.New(obs.Options{Logger: slog.New(slog.DiscardHandler), Healthy: ok, Ready: ok, Metrics: m.Registry()}).
		Handler().ServeHTTP(page, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	for _, line := range []string{
		`gpu_agent_placer_answers_total{outcome="placed",verb="filter"} 1`,
		`gpu_agent_placer_answers_total{outcome="refused",verb="filter"} 0`,
		`gpu_agent_placer_wakes_total{result="error"} 1`,
		`gpu_agent_placer_waiting_pods 3`,
		`gpu_agent_placer_leader 1`,
		`gpu_agent_placer_site_gpus{site="cloud"} 2`,
		`gpu_agent_placer_liqo_slices{state="accepted"} 0`,
	} {
		if !strings.Contains(page.Body.String(), "\n"+line+"\n") {
			t.Errorf("no line %s", line)
		}
	}
}
