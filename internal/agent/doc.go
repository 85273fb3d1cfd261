// SPDX-License-Identifier: Apache-2.0

// Package agent is the agent's control loop. Each round reads the hardware, plans, withdraws what
// the plan takes away, changes the hardware, and publishes what is on offer.
//
// Only the goroutine of [Agent.Run] decides and publishes. Slow work on the hardware runs beside it
// in jobs, one for each GPU. Other goroutines have news for the loop: the partition file, the node's
// labels, a GPU event, an allocation, a container that starts or ends, the result of a job. They
// leave it where the loop reads it, and put an empty token into a channel of size one. The loop
// then reads everything again, so no news is lost or overtaken. A slow tick starts a round, too.
//
// # A round (round.go has a function for each step)
//
//	readHardware   takes in the results of jobs and reads the driver, if the last reading is old or there is news
//	want           works out what the partition means on these GPUs
//	lookAround     finds the GPUs that other device plugins and DRA drivers give out
//	plan           calls plan.Make(inventory, allocations, wanted, layouts, others)
//	askHolders     asks the witnesses (the kubelet and the runtime) who holds what, always before a GPU is laid out
//	               anew; plans again
//	withdraw       publishes as Unhealthy what the plan takes away. From then on Allocate refuses it. Plans again:
//	               an allocation that was made before the withdrawal keeps its devices
//	act            saves what the next process needs; begins jobs on MIG mode and instances
//	setDriver      learns which driver files containers need, if the driver or the GPUs changed; sets time slices
//	               Then it has MPS daemons kept, sets compute modes, and looks for what earlier owners have left on the GPUs (found.go)
//	openGates      removes the CDI files of ended allocations, writes those of allocations whose containers may
//	               start, and then publishes what is on offer
//	finish         reports: labels, annotations, conditions, Events, status
//
// The decisions are pure functions: package plan makes the plan, and Build of internal/deviceplugin
// makes the offer from it.
//
// # Components
//
// These keep state between rounds. [New] makes and connects them, and the loop calls them in turn.
// None holds another, except where one is indented below the other.
//
//	type           file                     state                                               guarded by
//	mailbox        partitions.go            the newest partition file and Node                  a lock
//	waker          beside.go                the tokens that start rounds                        channels
//	partitions     partitions.go            the wanted layout, and the operators' annotations   the loop
//	reader         look.go                  the last reading, and whether the driver was let go the loop
//	faults         faults.go                the instance numbers that events name               a lock
//	links          look.go                  whether there are NVLinks to watch                  an atomic
//	coexistence    others.go, prepared.go   which GPUs others give out                          the loop
//	layouts        layouts.go               the layout of each GPU, and what is still listed    the loop
//	executor       work.go, progress.go     jobs, pauses after failures, the agent's instances  the loop
//	finder         found.go                 the compute modes that could not be set             the loop
//	mpsDaemons     mps.go                   the MPS daemons as last seen; the compute modes        a lock; the loop
//	Lender         lend.go                  which holders lend their room, and who is held for it  its goroutine
//	timeSlices     slices.go                the time slices that the driver was asked for       the loop
//	gatekeeper     gates.go, cap.go         CDI files and limit pages                           the loop
//	  driverFiles  cap.go                   the driver files that containers need               the loop
//	  pageSweeper  cap.go                   limit pages that are being removed                  the loop
//	offering       serve.go                 both front-ends, and the served resources           the loop
//	  claims       claims.go                the front-end for DRA, started when it is needed    atomics
//	journal        journal.go, memory.go    what the next process needs                         the loop
//	reporter       outcome.go               the Snapshot of the last round                      an atomic
//	announcer      report.go, autoscale.go  what the Node was told, and its startup taint       its goroutine
//	display        status.go, foresee.go    none: it shows the others' state                    -
//	gpuNodeWriter  gpunode_writer.go        the GPUNode at the API server                       locks
//	Lowering       allocatable.go           the lists sent to the kubelet, and the Node's word  a lock
//	yielder        yield.go, yield_containers.go  the spot allocations that are to give their room back, and how far each is a lock
//	  ender        ending.go                the tries to end spot containers                    a lock
//	  parker       park.go                  what is known of each parked allocation             a lock
//	Account        account.go               the usage journal, kept by internal/meter           internal/meter
//
// State that is guarded by "the loop" belongs to its goroutine alone. What others have for such a
// component they leave there under a lock or in an atomic. No component's lock is held while another
// component is called, except that of faults: verdicts must reach the front-ends in order.
//
// # Layouts and work
//
// What a GPU offers is its [plan.Layout]. A withdrawn device stays in the kubelet's list as Unhealthy
// for [plan.Linger]. MIG instances are told apart by their placement. The agent's own are those that
// it made, those that an allocation has, and those that a partition's geometry keeps. All others are
// foreign: they are offered where they fit, and stay unless --foreign-instances is reclaim. An instance
// for an allocation is made when the container is to start, before anything else on that GPU.
//
// The steps of a plan for one GPU are a job. If the GPU has changed since the plan, nothing is done and
// the work is planned again. If a step fails, the job undoes the earlier ones in reverse order, and the
// loop tries again after a pause. No job begins while the driver is away, before the kubelet and the
// runtime have answered once (for jobs that take something away), or if the state cannot be saved.
//
// # Example: a partition changes GPU 0 from whole to memory units
//
// The plan lists the GPU in Changing if no pod holds it, else in Blocked with the holders' names. The
// round asks the kubelet and the runtime, publishes the old device as Unhealthy, and plans again. If
// still no pod holds it, the new layout is in force: the round saves it and publishes the units. The
// old device stays in the list for [plan.Linger]. The node's label says "applied".
//
// # Limits
//
// A new process takes over what the last one saved before it answers the kubelet, but calls no
// partition invalid before it has read the driver. [Agent.Foresee] shows what another partition would
// do, but does not know claims that the kubelet has not had prepared yet. If the agent cannot tell
// which GPUs another DRA driver gives out, it offers none.
package agent
