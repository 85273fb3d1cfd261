// SPDX-License-Identifier: Apache-2.0

// Package obs is a program's HTTP server: metrics for Prometheus, probes for the kubelet, and
// further pages of the program. The metrics themselves are in internal/obs/agentobs and
// internal/obs/placerobs; neither imports the other.
//
//	/metrics   Prometheus text
//	/healthz   200 while the program makes progress; else 503 and the reason
//	/readyz    200 once the program can do its work; else 503 and what is missing
//
//	server := obs.New(obs.Options{
//		Addr: ":9500", Logger: log, Healthy: healthy, Ready: ready, Metrics: obs.Registry(own)})
//	err := server.Run(ctx)
//
// [Registry] adds the metrics of every process (process_*) and a few of the Go runtime's (go_*) to
// a program's own.
//
// # Who may ask
//
// Every pod of the cluster can reach the port. So the number of connections is limited, in all and
// for each address; [Bound] applies the same limits to a program's other servers. When all places
// are taken, a new connection replaces another one: of the address with the most connections, it is
// the one that has been quiet longest. So the server always answers the kubelet's probe. A page is
// made for one client at a time ([InTurn]).
//
// The package does not know where a figure comes from, nor what to do about it.
package obs
