// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/prometheus"
)

// A Prometheus that scrapes as docs/usage.md says gives OpenCost the share of each container:
// a quarter for a quarter, and so on. Without the rule that drops OpenCost's own zeros it gives
// half of that.
func TestCost(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: it takes two Prometheus")
	}
	if _, err := prometheus.Program(t.Context(), "prometheus"); err != nil {
		t.Skipf("no Prometheus, and Debian's archive has none for us: %v", err)
	}
	want := map[string]float64{"quarter": .25, "instance": .125, "whole": 1, "two": 2}
	good := func() error { return nil }
	pages := agentobs.New(agentobs.Options{
		Logger: slog.New(slog.DiscardHandler), Healthy: good, Ready: good, Metrics: agentobs.NewMetrics("test"), Status: func() status.Status { return status.Status{} },
		Account: &agentobs.Account{Node: "node-1", Usage: func() (u usage.Shown) {
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
