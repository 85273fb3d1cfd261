// SPDX-License-Identifier: Apache-2.0

// Package placerobs has the placer's metrics, which internal/obs serves. [Metrics] counts what
// happens between two scrapes (answers, errors); its methods take plain values. Each scrape reads
// the present values as a [State].
//
//	metrics := placerobs.NewMetrics(version, state, verbs, outcomes, slices, checks)
//	server := obs.New(obs.Options{Addr: ":9500", Metrics: metrics.Registry(), …})
//
// docs/placer.md has a table of the metrics. All names start with gpu_agent_, as the agent's
// do, and those that only the placer has start with gpu_agent_placer_. The package does not know
// how the placer decides.
package placerobs
