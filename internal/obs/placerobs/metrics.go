// SPDX-License-Identifier: Apache-2.0

package placerobs

import (
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"example.com/gpu-agent/internal/obs"
)

// Metrics counts what a placer does. Its methods may be called from several goroutines and never
// block.
type Metrics struct {
	own       *prometheus.Registry
	answers   *prometheus.CounterVec
	took      *prometheus.HistogramVec
	api       *prometheus.CounterVec
	answered  *prometheus.GaugeVec
	expires   *prometheus.GaugeVec
	unguarded prometheus.Counter
	wakes     *prometheus.CounterVec
}

// State has the placer's present values.
type State struct {
	// Waiting is the number of pods that were refused and have no node yet. Reservations is the
	// number of pods that have room reserved and are not bound. The placer chose their node, or the
	// API nominates them to one.
	Waiting, Reservations int
	// PassedOver is the number of nodes whose GPUNode is not valid.
	PassedOver int
	// Slices is the number of ResourceSlices from other clusters that ask for GPUs, by the placer's
	// answer.
	Slices map[string]int
	// Checks is the number of admission checks of workloads that have quota, by state.
	Checks map[string]int
	// Sites has the GPUs in use, by site.
	Sites map[string]SiteUse
	// Leads is true if this process is the leader, which answers.
	Leads bool
}

// SiteUse is the use of a site's GPUs. GPUs is how many are in use now, in whole or in part.
// Seconds is the sum of the time that each has been in use.
type SiteUse struct {
	GPUs    int
	Seconds float64
}

// siteMetrics collects the metrics of sites, whose names are not known in advance.
type siteMetrics struct {
	read          func() State
	gpus, seconds *prometheus.Desc
}

func (m *siteMetrics) Describe(to chan<- *prometheus.Desc) { to <- m.gpus; to <- m.seconds }

func (m *siteMetrics) Collect(to chan<- prometheus.Metric) {
	sites := m.read().Sites
	if len(sites) == 0 {
		sites = map[string]SiteUse{"": {}} // rate() needs a 0 to start from
	}
	for site, u := range sites {
		to <- prometheus.MustNewConstMetric(m.gpus, prometheus.GaugeValue, float64(u.GPUs), site)
		to <- prometheus.MustNewConstMetric(m.seconds, prometheus.CounterValue, u.Seconds, site)
	}
}

// NewMetrics returns metrics with all counters at 0. Each scrape calls read. verbs are those of the
// extender's requests, and outcomes their possible outcomes. slices are the possible answers to a
// ResourceSlice, and checks the states of an admission check.
func NewMetrics(version string, read func() State, verbs, outcomes, slices, checks []string) *Metrics {
	own := prometheus.NewRegistry()
	auto := promauto.With(own)
	m := &Metrics{
		own: own,
		answers: auto.NewCounterVec(prometheus.CounterOpts{Name: obs.Prefix + "placer_answers_total",
			Help: "Requests of schedulers, by outcome. After any outcome but placed, refused and deferred, " +
				"the scheduler went on without the placer."}, []string{"verb", "outcome"}),
		took: auto.NewHistogramVec(prometheus.HistogramOpts{Name: obs.Prefix + "placer_answer_seconds",
			Help:    "Time from a scheduler's request to the answer.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .2, .5}}, []string{"verb"}),
		api: auto.NewCounterVec(prometheus.CounterOpts{Name: obs.Prefix + "api_errors_total",
			Help: "Requests to the API server that failed."}, []string{"verb", "resource"}),
		answered: obs.AnsweredIn(auto),
		expires: auto.NewGaugeVec(prometheus.GaugeOpts{Name: obs.Prefix + "placer_certificate_expires_timestamp_seconds",
			Help: "Time at which the certificate of the door for schedulers expires. None without TLS."}, nil),
		unguarded: auto.NewCounter(prometheus.CounterOpts{Name: obs.Prefix + "placer_unguarded_pods_total",
			Help: "Pods with an agent's devices that were bound to a node without the placer's approval."}),
		wakes: auto.NewCounterVec(prometheus.CounterOpts{Name: obs.Prefix + "placer_wakes_total",
			Help: "Annotations that make a scheduler look at a node again, by result: ok or error."},
			[]string{"result"}),
	}
	auto.NewGaugeFunc(prometheus.GaugeOpts{Name: obs.Prefix + "placer_waiting_pods",
		Help: "Pods that were refused and have no node yet."}, func() float64 { return float64(read().Waiting) })
	auto.NewGaugeFunc(prometheus.GaugeOpts{Name: obs.Prefix + "placer_reservations",
		Help: "Pods that are not bound and have room reserved."},
		func() float64 { return float64(read().Reservations) })
	auto.NewGaugeFunc(prometheus.GaugeOpts{Name: obs.Prefix + "placer_passed_over_nodes",
		Help: "Nodes that get no pods since their GPUNode is not valid: their agent has another version, or " +
			"they report false values."}, func() float64 { return float64(read().PassedOver) })
	for _, state := range checks {
		auto.NewGaugeFunc(prometheus.GaugeOpts{Name: obs.Prefix + "placer_kueue_checks",
			ConstLabels: prometheus.Labels{"state": state},
			Help:        "Admission checks that the placer answers, of workloads that have quota, by their state."},
			func() float64 { return float64(read().Checks[state]) })
	}
	for _, state := range slices {
		auto.NewGaugeFunc(prometheus.GaugeOpts{Name: obs.Prefix + "placer_liqo_slices",
			ConstLabels: prometheus.Labels{"state": state},
			Help: "ResourceSlices of other clusters that ask for the agents' resources, by the placer's answer: " +
				"accepted, denied, waiting for an answer; or bypassing: of Liqo's own class, which grants anything."},
			func() float64 { return float64(read().Slices[state]) })
	}
	own.MustRegister(&siteMetrics{read,
		prometheus.NewDesc(obs.Prefix+"placer_site_gpus",
			"GPUs that are held in whole or in part, by the site of their node.", []string{"site"}, nil),
		prometheus.NewDesc(obs.Prefix+"placer_site_gpu_seconds_total",
			"Seconds that a GPU was held in whole or in part, summed over all GPUs of a site.",
			[]string{"site"}, nil)})
	auto.NewGaugeFunc(prometheus.GaugeOpts{Name: obs.Prefix + "placer_leader",
		Help: "1 while this process is the leader, which answers; else 0."},
		func() float64 { return obs.Truth(read().Leads) })
	auto.NewGaugeFunc(prometheus.GaugeOpts{Name: obs.Prefix + "build_info", Help: "1; the version is in the labels.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version()}},
		func() float64 { return 1 })
	for _, verb := range verbs { // rate() needs a 0 to start from
		for _, outcome := range outcomes {
			m.answers.WithLabelValues(verb, outcome)
		}
		m.took.WithLabelValues(verb)
	}
	for _, result := range []string{"ok", "error"} {
		m.wakes.WithLabelValues(result)
	}
	return m
}

// Answered counts a scheduler's request.
func (m *Metrics) Answered(verb, outcome string, took time.Duration) {
	m.answers.WithLabelValues(verb, outcome).Inc()
	m.took.WithLabelValues(verb).Observe(took.Seconds())
}

// APIError counts a request to the API server that failed.
func (m *Metrics) APIError(verb, resource string) { m.api.WithLabelValues(verb, resource).Inc() }

// APIAnswered sets the time of the API server's last answer to now. The placer also calls it when
// it begins to ask.
func (m *Metrics) APIAnswered() { m.answered.WithLabelValues().SetToCurrentTime() }

// Expires tells when the certificate of the door for schedulers expires.
func (m *Metrics) Expires(at time.Time) { m.expires.WithLabelValues().Set(float64(at.Unix())) }

// Unguarded counts a pod that was bound without the placer.
func (m *Metrics) Unguarded() { m.unguarded.Inc() }

// Woke counts an annotation that should make the scheduler look at a node again.
func (m *Metrics) Woke(err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.wakes.WithLabelValues(result).Inc()
}

// Registry returns all metrics of /metrics.
func (m *Metrics) Registry() *prometheus.Registry { return obs.Registry(m.own) }
