// SPDX-License-Identifier: Apache-2.0

// Package agentobs has the agent's HTTP pages beside the probes of internal/obs: metrics for
// Prometheus, and the node's status for people and programs. It also has a server on a Unix socket
// that tells commands what a partition would make of the node.
//
//	/metrics   Prometheus text
//	/healthz   200 while the loop makes progress; else 503 and the reason
//	/readyz    200 once the driver has been read and the partitions are known; else 503 and what is missing
//	/statusz   [status.Status] as JSON, or as a web page; only from within the network namespace
//	/plan      what partitions would come to, by POST; this and the next ones as /statusz
//	/usage     what was granted and used, as JSON
//	/journal   the last records of the usage journal, a line of JSON each
//	/settings  the flags in force, as JSON
//
// All figures about GPUs come from one function of the agent, which returns a snapshot. So the
// pages never disagree, and a scrape makes no call of the driver:
//
//	metrics := agentobs.NewMetrics(version)
//	server := agentobs.New(agentobs.Options{Addr: ":9500", Metrics: metrics, Status: agent.Status, …})
//	err := server.Run(ctx)
//
// [Metrics] counts what happens between two scrapes (calls, rounds, errors). Its methods take plain
// values, so that the packages that call them need not know this one.
//
// # Who may ask
//
// Every pod of the cluster can reach the port; internal/obs limits the connections.
//
// /statusz and the pages below it name every tenant's pods, so they refuse connections from outside
// the network namespace.
// kubectl exec and kubectl port-forward connect from inside. It recognizes a browser by its Accept
// header; ?format=html and ?format=json choose explicitly. [Fetch] is its client, for
// `gpu-agent status`.
//
// [Door] serves a Unix socket in the agent's state directory, which only the agent's user can
// connect to. A question costs more than a page, its body is a partition file, and the answer names
// pods of every namespace. Door reads a question within limits, and answers one at a time.
// [AskDoor] is its client, for `gpu-agent plan` and `check`.
//
// # Metrics
//
// Names start with gpu_agent_; base units throughout. gpu is the UUID.
//
//	build_info{version,goversion}               1
//	driver_info{driver,cuda}                    1
//	gpu_info{gpu,index,model,mode}              1; join other GPU metrics with it by gpu
//	gpu_memory_bytes{gpu}                       size of the GPU's memory, where it has its own
//	gpu_healthy{gpu}                            1 or 0
//	gpu_fault{gpu,class}                        1 while the GPU has a fault of that class
//	driver_hangs                                1 while the driver does not answer
//	resource_free{resource}                     devices that a container can get now
//	resource_largest_request{resource}          the largest request of one container that fits now
//	saturation_ratio                            0 to 1: the part of the GPUs' memory that is held or not available
//	plugin_registered{resource}                 1 or 0: the kubelet receives the list of its devices and knows them
//	allocatable_writes_total{cause}             times that allocatable was lowered, by cause: list, kubelet or end
//	plugin_registration_errors_total{resource}  registrations that the kubelet refused, or did not answer
//	plugin_refusals_total{resource,reason}      refused requests of the kubelet, by reason (docs/conditions.md)
//	gpu_blocked{gpu}                            1 while the wanted partition waits for holders
//	devices{gpu,resource,state}                 state is free, held or unhealthy
//	device_info{device,resource,UUID,GPU_I_ID,GPU_I_PROFILE,mig_uuid,namespace,pod,container}   1; see below
//	mig_enabled{gpu}                            1 or 0; only for GPUs in MIG mode, or whose mode is to change
//	mig_pending{gpu}                            1 while a change of the MIG mode waits for a reset
//	mig_slots{gpu,profile,state}                MIG devices: held, warm, making, free, covered, leaving, foreign, failed
//	mig_step_duration_seconds{op,profile,outcome}   histogram: destroy, create, enable, disable, reset, undo
//	mig_wish_duration_seconds{profile}          histogram: from a container's request for an instance to its start
//	spot_yield_seconds{way}                     histogram: from the request for room of the spot tier until it was free
//	spot_park_seconds{outcome}                  histogram: parked, refused or broken
//	spot_restore_seconds{outcome}               histogram: restored, no room, failed or broken
//	spot_parked_seconds_total                   how long containers were parked, together
//	spot_parked_containers                      how many are parked now
//	spot_parked_bytes                           what they have on the host
//	allocations                                 allocations that have not ended
//	left_behind{gpu,code,matters}               1 for what an earlier owner has left; the empty GPU is the node
//	partition_state{partition,state}            1 for the present state, 0 for the others
//	partition_generation                        grows by one with each accepted partition
//	plugin_request_duration_seconds{resource,method,code}   histogram of kubelet calls
//	driver_request_duration_seconds{call,code}  histogram of driver calls
//	round_duration_seconds{result}              histogram of the loop's rounds, result ok or error
//	api_errors_total{verb,resource}             failed requests to the API server
//	api_last_answer_timestamp_seconds           when the API server answered last; none if the agent uses none
//	events_total{outcome}                       Events, outcome sent, merged or dropped
//	gpu_events_total{gpu,kind,xid}              what the driver reported of a GPU; xid is 0 for other kinds
//	container_memory_cap_bytes{namespace,pod,container,gpu,guarantee}  what a container may use of a GPU
//	container_memory_used_bytes{namespace,pod,container,gpu}           memory that counts against the cap
//	container_memory_peak_bytes{namespace,pod,container,gpu}           the most used so far
//	container_memory_refusals_total{namespace,pod,container,gpu}       refused allocations, by the container's counter
//	container_memory_uncounted_total{namespace,pod,container,gpu}      allocations of an unknown kind, likewise
//	container_memory_undone_bytes{namespace,pod,container,gpu}         the most beyond the cap, likewise
//	container_compute_percent{namespace,pod,container,gpu,guarantee}   its share of the SMs, guarantee ceiling or none
//	cap_kills_total{reason}                     containers that the watchdog ended, reason over or intruder
//	cap_evictions_total                         pods evicted for repeated offences
//	cap_breach_to_end_seconds                   histogram: from the first reading over the cap to the end
//	mps_detaches_total{outcome}                 clients of MPS before their end: detached, or unanswered
//	watchdog_up                                 1 while the watchdog runs
//	policy_in_force{policy}                     1 while that admission policy refuses what it must; 0 while it does not
//	container_granted_gpu_seconds_total{namespace,pod,container,gpu,tier}         granted GPUs times seconds
//	container_used_gpu_seconds_total{namespace,pod,container,gpu,tier}            the same, with a process there
//	container_granted_memory_byte_seconds_total{namespace,pod,container,gpu,tier} granted memory times seconds
//	container_used_memory_byte_seconds_total{namespace,pod,container,gpu,tier}    used memory times seconds
//	container_sm_seconds_total{namespace,pod,container,gpu,tier}                  used multiprocessors times seconds
//	container_lent_gpu_seconds_total{namespace,pod,container,gpu}                 granted GPUs that spot pods had
//	container_lent_memory_byte_seconds_total{namespace,pod,container,gpu}         the same of memory
//	container_idle_seconds{namespace,pod,container,gpu}                       how long it has had no process on the GPU
//	usage_journal_up                            1 while the usage journal can be written
//	usage_records_lost_total                    records that could not be written to it
//	usage_records_dropped_total{of}             records that it had no room for, of use or refused
//	unallocated_processes{gpu,kind}             processes without an allocation: intruder, no-pod or unlisted
//
// The process's own metrics (process_*) and a few of the Go runtime's (go_*) come in addition. The
// number of series is limited by the number of GPUs, resources, methods and codes, and of the
// containers that hold a GPU now. A container's series end with it, except for its totals
// ([Account]), which two more scrapes show. container_gpu_allocation has OpenCost's name, and
// DCGM_FI_DEV_FB_USED, which is off by default, dcgm-exporter's. A container can write anything into
// its own counters: its refusals, and the managed memory that it uses, are its own figures.
//
// # Joining dcgm-exporter
//
// dcgm-exporter (read at 4.5.3-4.8.2) names a GPU instance by the GPU's UUID in the label UUID and
// the driver's ID in GPU_I_ID. A GPU without MIG has no GPU_I_ID; Prometheus treats that as empty.
// dcgm-exporter cannot tell which pods hold them, because it knows only NVIDIA's resources, and
// device IDs that are instance UUIDs. device_info has these labels for each GPU and each container
// that holds devices of it, and for each MIG instance, held or not:
//
//	max by (UUID, GPU_I_ID) (DCGM_FI_DEV_FB_USED)
//	  * on (UUID, GPU_I_ID) group_right gpu_agent_device_info{pod!=""}
//
// A held MIG device is missing until its instance exists. Containers that share a GPU, or compute
// instances of one GPU instance, each join the figure of the whole. max removes the copies that
// dcgm-exporter makes of a series.
//
// The package does not know where a figure comes from, nor what to do about it. internal/status
// formats the status as text and as a page.
package agentobs
