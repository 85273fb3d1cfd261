// SPDX-License-Identifier: Apache-2.0

// Package monitoring reads the manifests for Prometheus and Grafana with the types of those who
// do so in a cluster, the Prometheus Operator's and Grafana's own, and refuses what these do not
// know. It is a module of its own, since nothing else needs those types.
//
// The operator's types do not have all that its definitions ask for, such as the form of a
// duration; promtool judges the rules themselves (deployments/monitoring_test.go).
package monitoring
