// SPDX-License-Identifier: Apache-2.0

// Package obs is the HTTP server of a program: metrics for Prometheus, probes for the kubelet,
// and what pages a program has besides. Which metrics there are is in its two halves,
// internal/obs/agentobs and internal/obs/placerobs, which do not know each other.
//
//	/metrics   Prometheus text
//	/healthz   200 while the program makes progress; else 503 and the reason
//	/readyz    200 once the program can do its work; else 503 and what is missing
//
//	server := obs.New(obs.Options{
//		Addr: ":9500", Logger: log, Healthy: healthy, Ready: ready, Metrics: obs.Registry(own)})
//	err := server.Run(ctx)
//
// [Registry] adds to a program's own metrics those of every process (process_*) and a few of
// the Go runtime's (go_*).
//
// # Who may ask
//
// Every pod of the cluster can reach the port. So the number of connections is
// bounded, in all and for each address ([Bound], also for a program's other doors). When all
// are taken, a new connection replaces the one that has been quiet for the longest time, among
// those of the address that has the most: a probe is answered whatever others hold. A page is
// made for one reader at a time ([InTurn]).
//
// The package does not know where a figure comes from, nor what to do about it.
package obs
