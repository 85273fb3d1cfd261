// SPDX-License-Identifier: Apache-2.0

// Package placerobs has the placer's metrics, which internal/obs serves. What happens between
// two scrapes (answers, errors) is counted in [Metrics], whose methods take plain values; what
// is true at a moment is asked for at each scrape, as a [State].
//
//	metrics := placerobs.NewMetrics(version, state, verbs, outcomes, slices, checks)
//	server := obs.New(obs.Options{Addr: ":9500", Metrics: metrics.Registry(), …})
//
// docs/operations.md has the table of them. Names start with gpu_agent_, as the agent's, and
// those of the placer alone with gpu_agent_placer_. The package does not know how the placer
// decides.
package placerobs
