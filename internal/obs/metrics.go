// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"regexp"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Prefix is what the names of metrics begin with, a placer's too.
const Prefix = "gpu_agent_"

// AnsweredIn makes the gauge of an API server's last answer. Without labels and before the
// first value it is no series: a program that follows no API server has none.
func AnsweredIn(auto promauto.Factory) *prometheus.GaugeVec {
	return auto.NewGaugeVec(prometheus.GaugeOpts{Name: Prefix + "api_last_answer_timestamp_seconds",
		Help: "When the API server answered last, or the process began to ask it; none where it asks none."}, nil)
}

// Registry has what a program counts, and what is known of every process.
func Registry(own ...prometheus.Collector) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(own...)
	r.MustRegister(
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		// By default this collector has some forty series for every node. These are
		// the ones that people look at.
		collectors.NewGoCollector(
			collectors.WithGoCollectorMemStatsMetricsDisabled(),
			collectors.WithGoCollectorRuntimeMetrics(
				collectors.GoRuntimeMetricsRule{
					Matcher: regexp.MustCompile(`^/memory/classes/(heap/objects|total):bytes$`)}),
		))
	return r
}

// Truth is 1 for true and 0 for false.
func Truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
