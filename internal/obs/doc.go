// SPDX-License-Identifier: Apache-2.0

// Package obs shows what the agent does to people and to their monitoring: one
// HTTP server with four pages.
//
//	/metrics   Prometheus text
//	/healthz   200 while the process works as a process; else 503 and the reason
//	/readyz    200 once the driver has been read and partitions heard of; else 503 and what is missing
//	/statusz   [status.Status] as JSON; to a browser, as a page; from within the network namespace only
//
// Everything about GPUs on these pages comes from one snapshot function that
// the agent provides, so a page never disagrees with another one, and a scrape
// reads the current view instead of asking the driver:
//
//	metrics := obs.NewMetrics(version)
//	server := obs.New(obs.Options{Addr: ":9500", Metrics: metrics, Status: agent.Status, …})
//	err := server.Run(ctx)
//
// Every pod of the cluster may reach the port. So connections are bounded, in all
// and for each address, and whoever comes when all are taken gets the place of the
// one that has been quiet for longest, of the address that has the most: a probe
// is answered whatever others hold. Pages are made for one reader at a time, and
// /statusz, which has every tenant's names, is refused to connections from
// outside: kubectl exec and kubectl port-forward end up inside.
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
//	plugin_registered{resource}                 1 or 0: the kubelet receives the list of its devices and knows them
//	plugin_registration_errors_total{resource}  registrations that the kubelet refused, or did not answer
//	gpu_blocked{gpu}                            1 while holders stand in the way of the wanted partition
//	devices{gpu,resource,state}                 state is free, held or unhealthy
//	device_info{device,resource,UUID,GPU_I_ID,GPU_I_PROFILE,mig_uuid,namespace,pod,container}   1; see below
//	mig_enabled{gpu}                            1 or 0; only for GPUs that are cut by MIG, or are to be
//	mig_pending{gpu}                            1 while a change of the MIG mode waits for a reset
//	mig_slots{gpu,profile,state}                MIG devices that are held, warm, making, free, covered, leaving, foreign, failed
//	mig_step_duration_seconds{op,profile,outcome}   histogram: destroy, create, enable, disable, reset, undo
//	mig_wish_duration_seconds{profile}          histogram: from a container's wish for an instance to its start
//	claims                                      sets of devices handed out and not yet ended
//	partition_state{partition,state}            1 for the present state, 0 for the others
//	partition_generation                        grows by one with each accepted partition
//	plugin_request_duration_seconds{resource,method,code}   histogram of kubelet calls
//	driver_request_duration_seconds{call,code}  histogram of driver calls
//	round_duration_seconds{result}              histogram of the loop's rounds, result ok or error
//	api_errors_total{verb,resource}             failed requests to the API server
//	events_total{outcome}                       Events, outcome sent, merged or dropped
//	gpu_events_total{gpu,kind,xid}              what the driver reported of a GPU; xid is 0 for other kinds
//	container_memory_cap_bytes{namespace,pod,container,gpu,guarantee}  what a container may use of a GPU
//	container_memory_used_bytes{namespace,pod,container,gpu}           what counts against that
//	container_memory_peak_bytes{namespace,pod,container,gpu}           the most of that so far
//	container_memory_refusals_total{namespace,pod,container,gpu}       refused allocations, by the container's word
//	container_memory_uncounted_total{namespace,pod,container,gpu}      allocations of an unknown kind that passed, by its word
//	container_memory_undone_bytes{namespace,pod,container,gpu}         the most beyond the cap that was given back at once, likewise
//	cap_kills_total{reason}                     containers ended, reason over or intruder
//	cap_evictions_total                         pods evicted for repeated offences
//	cap_breach_to_end_seconds                   histogram: from the first reading over the cap to the end
//	watchdog_up                                 1 while the watchdog is at work
//	policy_in_force{policy}                     1 while that admission policy refuses the agent what it must; 0 while it does not
//	unclaimed_processes{gpu,kind}               processes on a GPU without a claim, kind intruder, no-pod or unlisted
//
// Beside them stand the process's own (process_*) and a few of the Go
// runtime's (go_*). The number of series is bounded by the number of GPUs,
// resources, methods and codes, and of the containers that hold a GPU now: those
// of a container that is gone are gone with it. A container can write what it
// likes into its own counters: refusals, and managed memory in what is used, are
// its word alone.
//
// # Joining dcgm-exporter
//
// dcgm-exporter (read at 4.5.3-4.8.2) names a GPU instance by the GPU's UUID in
// the label UUID and the driver's number in GPU_I_ID; a GPU that is not cut has
// no GPU_I_ID, which to Prometheus is an empty one. It cannot tell whose they
// are, as it only knows NVIDIA's resources and device IDs that are instance
// UUIDs. device_info has these labels for each GPU and container that holds
// devices of it, and for each MIG instance that stands, held or not:
//
//	max by (UUID, GPU_I_ID) (DCGM_FI_DEV_FB_USED)
//	  * on (UUID, GPU_I_ID) group_right gpu_agent_device_info{pod!=""}
//
// A held MIG device is missing until its instance stands, and containers that
// share a GPU, or compute instances of one GPU instance, each join the whole's
// figure. max takes away the copies that dcgm-exporter makes of a series.
//
// /statusz knows a browser by its Accept header; ?format=html and ?format=json say
// outright what is wanted, and without either it answers JSON. [Fetch] is the other
// end of it, for `gpu-agent status`.
//
// The package does not know where a figure comes from, nor what to do about it.
package obs
