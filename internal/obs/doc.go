// SPDX-License-Identifier: Apache-2.0

// Package obs shows what the agent does to people and to their monitoring: one
// HTTP server with four pages, and the text of `gpu-agent status`.
//
//	/metrics   Prometheus text
//	/healthz   200 while the process works as a process; else 503 and the reason
//	/readyz    200 once the GPUs are known and on offer; else 503 and the reason
//	/statusz   [Status] as JSON
//
// Everything about GPUs on these pages comes from one snapshot function that
// the agent provides, so a page never disagrees with another one, and a scrape
// reads the current view instead of asking the driver:
//
//	metrics := obs.NewMetrics(version)
//	server := obs.New(obs.Options{Addr: ":9500", Metrics: metrics, Status: agent.Status, …})
//	err := server.Run(ctx)
//
// What happens between two scrapes (calls, rounds, errors) is counted in
// [Metrics], whose methods the wiring passes to the rooms as plain functions.
//
// # Metrics
//
// Names start with gpu_agent_; base units throughout. gpu is the UUID.
//
//	build_info{version,goversion}               1
//	driver_info{driver,cuda}                    1
//	gpu_info{gpu,index,model,mode}              1; join other GPU metrics with it by gpu
//	gpu_memory_bytes{gpu}                       size of the card's memory
//	gpu_healthy{gpu}                            1 or 0
//	gpu_fault{gpu,class}                        1 while the GPU has a fault of that class
//	driver_hangs                                1 while the driver does not answer
//	gpu_blocked{gpu}                            1 while holders stand in the way of the wanted partition
//	devices{gpu,resource,state}                 state is free, held or unhealthy
//	claims                                      sets of devices handed out and not yet ended
//	partition_state{partition,state}            1 for the present state, 0 for the others
//	partition_generation                        grows by one with each accepted partition
//	plugin_request_duration_seconds{resource,method,code}   histogram of kubelet calls
//	driver_request_duration_seconds{call,code}  histogram of driver calls
//	round_duration_seconds{result}              histogram of the loop's rounds, result ok or error
//	api_errors_total{verb,resource}             failed requests to the API server
//	events_total{outcome}                       Events, outcome sent, merged or dropped
//	gpu_events_total{gpu,kind,xid}              what the driver reported of a GPU; xid is 0 for other kinds
//
// Beside them stand the process's own (process_*) and a few of the Go
// runtime's (go_*). The number of series is bounded by the number of GPUs,
// resources, methods and codes; nothing is labelled by pod.
//
// # Text
//
// [WriteText] draws the Status for a terminal of 80 columns or more: a block a
// GPU, with a bar of what is held and a line for each holder.
//
// The package does not know where a figure comes from, nor what to do about it.
package obs
