// SPDX-License-Identifier: Apache-2.0

// Package prometheus is Prometheus for the tests: its two programs, as they are installed or
// as Debian packages them, and a server that scrapes pages of metrics which a test has at
// hand. What documents say of rules and of scraping is tried on these, not on what we believe
// of them.
//
//	tool, err := prometheus.Program(ctx, "promtool")
//	server, err := prometheus.Start(ctx, dir, []prometheus.Job{{Name: "gpu-agent", Page: page}})
//	defer server.Stop()
//	samples, err := server.Query(ctx, `avg(container_gpu_allocation) by (pod)`, "pod")
//
// The package does not know what the metrics mean.
package prometheus
