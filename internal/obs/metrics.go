// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"regexp"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Prefix is the beginning of all metric names, also the placer's.
const Prefix = "gpu_agent_"

// AnsweredIn makes the gauge of the API server's last answer. It has no series before its first
// value, so a program without an API server shows none.
func AnsweredIn(auto promauto.Factory) *prometheus.GaugeVec {
	return auto.NewGaugeVec(prometheus.GaugeOpts{Name: Prefix + "api_last_answer_timestamp_seconds",
		Help: "Time of the API server's last answer, or of the first request. None if no API server is used."}, nil)
}

// Registry returns a registry with the program's own collectors and those of every process.
func Registry(own ...prometheus.Collector) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(own...)
	r.MustRegister(
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		// By default this collector has some forty series for every node. These two are the ones
		// that people look at.
		collectors.NewGoCollector(
			collectors.WithGoCollectorMemStatsMetricsDisabled(),
			collectors.WithGoCollectorRuntimeMetrics(
				collectors.GoRuntimeMetricsRule{
					Matcher: regexp.MustCompile(`^/memory/classes/(heap/objects|total):bytes$`)}),
		))
	return r
}

// Truth returns 1 for true and 0 for false.
func Truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
