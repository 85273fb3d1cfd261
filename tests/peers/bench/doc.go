// SPDX-License-Identifier: Apache-2.0

// Command bench measures the agent beside NVIDIA's device plugin on one
// emulated driver, and prints a line for each figure:
//
//	NAME VALUE UNIT
//
//	allocate_p50/devices=640/gpu-agent      0.21 ms      target: at most 1.1 x the peer's 0.20: reached
//
// The first three fields are for programs; what follows on a line, and lines
// that start with #, are for people. A figure that misses its target does not
// fail the run. What fails it is behaviour: a peer that does not see the
// emulated GPUs or their Xids; an agent that does not register, grant or
// refuse, or that lets other devices turn unhealthy than those of a broken GPU,
// or offers these after a kubelet's restart. With -smoke the counts are tiny and
// the times mean nothing, but all of that is still checked.
//
// # What runs
//
// The program starts itself again in namespaces of its own (mounts, PIDs,
// network), with all files on a tmpfs: the peer's directory is compiled in
// (/var/lib/kubelet/device-plugins), and there may be a real kubelet outside.
// The namespaces end with the program, however it ends, and everything in them
// with them.
//
// Inside are the emulated driver's daemon, a kubelet's side of the device
// plugin API and of PodResources (tests/fakes; it registers plugins, dials them
// with the kubelet's own options, opens their lists, asks for preferences with
// the free IDs in random order, and writes a checkpoint), a container runtime's
// side of the CRI (runtime.go; the agent ends no allocation, and lets no container
// start, without a word of the runtime), an API server's side of lists, watches,
// patches and events over TLS and HTTP/2 (apiserver.go), and the programs that
// are measured, each a process of its own:
//
//	gpu-agent             as make build makes it, with partitions from a watched ConfigMap
//	gpu-agent-file        the same with --config FILE and no API server
//	nvidia-device-plugin  v0.19.3, time slicing where replicas are asked for
//	empty                 a device plugin on gRPC's defaults that answers nothing
//	gpu-agent-watch-on    as gpu-agent-file; beside gpu-agent-watch-off, which has no watchdog
//	gpu-agent-meter-on    as gpu-agent-file; beside gpu-agent-meter-off, which keeps no account (--usage-size 0)
//	nvidia-dra-driver     v0.4.1, with MIG on demand
//
// The devices are gpu-mem units of the agent and replicas of the peer, as many
// of each on every GPU: 10, 80 and 320.
//
// # How it measures
//
// Programs are asked in turn, so that drift meets all alike. Times are those of
// the calling side. CPU time is the kernel's clock of the process, all threads,
// those that ended included. Memory is /proc/PID/smaps_rollup in MB of 10^6
// bytes, of programs that lie on disk as an image's layer has them (build.go); "anonymous" is what is left without the pages of files. Driver calls
// are the emulator's count for the process, without the waits for events that
// run in the background all the time.
//
// A pod's end is in the kubelet's word and the runtime's at once, and the next pod starts
// 25 ms later where calls are timed. Kubelets are slower than that, schedulers
// too.
//
// # How things break
//
// Both programs meet the same faults, one program after the other (fault.go):
// some GPUs break, one after the other, and are mended, in several rounds. A
// double bit error (Xid 48) is mended by a reset of the GPU; a GPU that falls off
// the bus, with Xid 79, by its return.
//
//	KIND_to_unhealthy                  from the fault to the list that first tells of it
//	KIND_turned_per_gpu                devices of a broken GPU that are unhealthy then
//	KIND_others_turned                 devices of sound GPUs that are unhealthy then
//	KIND_mended_to_healthy             until all is on offer again; +Inf if a restart of the program is needed
//	KIND_broken_offered_after_restart  devices of GPUs still broken that a restarted kubelet has on offer
//	KIND_sound_offered_after_restart   and of the sound ones
//
// The agent is told to hold a GPU back for one second after the last complaint;
// left alone it is a minute. The peer has three times as long. Of a fault that a
// program tells of while all devices of the GPU are unhealthy already there is
// no time. A kubelet's restart is timed from the bind of its socket to the first
// list, with sound GPUs.
//
// # What caps cost
//
// An allocation's CDI file is laid in two containers (package capsule), in one as the
// agent wrote it and in the other without what the cap put there. In both the same
// program (c/timing.c) times the same calls in turn; the emulated libcuda counts
// its memory in the process then, so that a call takes nanoseconds, and a
// stand-in for the watchdog publishes readings. A figure is the capped container's
// cost less the bare one's, NAME/bare the latter's:
//
//	cap_alloc_free/size=4MiB/live=100000/processes=8   cuMemAlloc and cuMemFree together
//	cap_alloc_free_async, cap_memgetinfo               likewise
//	cap_launch_overrides, cap_launch                   a kernel launch is none of the cap's calls
//	cap_exec, cap_first_allocation                     /bin/true; a process with cuInit, a context, an allocation
//
// Then a hundred containers with a process each on eight GPUs, seen by an agent
// that watches and held by one that does not (--watch-every 0):
//
//	watchdog_cpu/processes=100             of a processor, the first less the second; all memory stays as it is
//	watchdog_cpu/processes=100/busy=10%    a tenth of the processes allocate and free ten times a second
//	watchdog_resident/...                  the memory of both
//
// # What the account costs
//
// An agent that keeps the usage journal, and beside it one that does not, have containers that
// come and go, and then hold what they have (`-only metering` runs this alone):
//
//	meter_allocate_p50, ..._p99    of Allocate, by both in turn
//	meter_holding_cpu_30s          of both, what the first needs more, and by how much two that keep none differ
//	meter_resident                 likewise
//
// Two processes that do the same differ by more than what the account needs, also on a quiet
// machine: BenchmarkMinute of internal/meter has that by itself, 0.4 ms a minute with 64 grants.
//
// # Which GPUs go together
//
// On boards of 8 GPUs (a DGX H100, behind NVSwitches; a DGX-1, whose GPUs are joined by
// two links, one or none) and of 16 (a DGX-2) both programs are asked for each number
// of GPUs while all are free, and the agent alone on 16 GPUs of which no two are
// joined alike:
//
//	choice_p50, choice_p99     of the call, as the kubelet sees it; +Inf where no answer came in time
//	choice_empty_p99           of as many calls after them that ask for nothing: gRPC and the machine
//	choice_cpu                 of the program, for one call
//	choice_driver_calls        likewise
//	choice_lanes               NVLinks among the chosen, where links run from GPU to GPU
//	choice_numa_nodes          NUMA nodes that the chosen are on, where all go through NVSwitches
//	choice_worst_p50           of all numbers
//
// The peer is asked until it has had five seconds, once at least, and given up after a
// minute. Then, on a DGX H100, an agent that labels its node runs beside one that does
// not; the first is asked for its page many times:
//
//	labels_idle_cpu_30s, labels_resident   of both
//	labels_writes_at_rest                  requests that change something, of both together
//	page_p50, page_bytes, page_resident_after
//
// # How cards are cut
//
// mig-parted (v0.13.1) and the agent make the same changes, one after the other:
// each has an A100 of its own on which the same instances stand at the same places,
// of which the same are busy. What stands is drawn uniformly from all sets of
// places to which nothing can be added, and so is what is wanted, of which the
// counts are asked for. These sets, and whether a change is possible beside what is
// busy, come from the table that was recorded from the driver (migset.go), not
// from the agent's planner. mig-parted is run for each change; the agent watches
// its ConfigMap and is started for each, before what is measured, so that it finds
// what was made by hand, which it is told that it may take away.
//
//	mig_possible_failed            changes that were possible and did not come about
//	mig_failed_left_STATE          what stood after any that did not: what stood before (old), what was wanted (new), neither
//	mig_destroys, mig_creates      GPU instances, of all changes; mig_created_in_vain: those that are gone again
//	mig_seconds_per_change         until it has ended; of the agent, until the kubelet has the new devices or the node says why not
//	mig_change_above_hardware      the same less the hardware's time, of changes that came about
//	mig_call_failed_left_STATE     what stands where one driver call of a change failed, when the program has said so
//	mig_on_demand_above_hardware   Allocate and the call before a container starts, less the hardware's time
//	mig_plan, mig_requests         the planner alone, in this process
//
// The hardware takes 0.1 s for each call that makes or takes away a GPU instance or
// a compute instance, so 0.2 s for a MIG device; with -smoke it takes 5 ms. It is
// slept, not computed, and a machine with more to do than processors oversleeps: the
// hardware's time is that by the clock, with the time that the emulated driver needs
// to lay an instance's files. What is above it is the program's: its calls and
// their way to the emulator, its looks before and after, the API server's news and
// the kubelet's list. mig-parted's times have the start of a process in them,
// some 20 ms of which are the bench's own.
//
// mig-parted leaves the places to the driver and tries orders until one works. The
// emulated driver takes the last place that is free; which one a real driver takes
// is not documented, so how much is made in vain is of that rule as well.
//
// # What claims cost
//
// NVIDIA's DRA driver (v0.4.1, gate DynamicMIG) and the agent, which offers the same in
// mode dynamic, prepare claims that the bench allocates at a real API server (1.36.3 over
// etcd), called as the kubelet calls them. The agent has its manifests' rights and
// policies. Each has GPUs of its own on one driver; for eight at once, first the one has
// all of them, then the other. A handler that reads the claim and does nothing is asked in
// the same turn.
//
//	claim_whole, claim_share              of NodePrepareResources, as the kubelet sees it
//	claim_warm_instance                   of a MIG instance that stands already; the peer keeps none
//	claim_new_instance_above_hardware     of one that is made, in the place of another, less the hardware's time
//	claim_eight_instances                 on eight GPUs, asked for at once, until the last is there
//	claim_start_to_slices                 from the program's start until all its slices are at the server
//	claim_resident, claim_idle_cpu_30s    of the agent with both front-ends in use, after work and at rest
//
// The peer's client makes five requests a second, so there is a pause between its claims.
//
// What the figures cannot say: the driver's own time, since the emulated one
// answers in microseconds what hardware takes milliseconds for; and the cost of
// a container's start, which the end-to-end tests see.
package main
