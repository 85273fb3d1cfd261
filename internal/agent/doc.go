// SPDX-License-Identifier: Apache-2.0

// Package agent is the loop: it reads the hardware, plans, withdraws, acts, reads again
// and publishes.
//
// One goroutine, that of [Agent.Run], decides and publishes. What takes long on the
// hardware runs beside it, one job for each GPU. Whoever has news (the partition file,
// the node's labels, a GPU event, an allocation, a container that starts or ends, a job
// that has ended) leaves it where the loop will read it, and puts an empty token into a
// channel of size one. The loop then reads everything again: a token carries nothing
// that could be lost or come out of order. A slow tick does the same.
//
// A round (round.go has a function for each of these):
//
//	readHardware   what jobs came to; inventory := driver, read beside the loop if it is old or news came
//	want           what the partition means on these GPUs
//	lookAround     which GPUs other device plugins and DRA drivers have
//	plan           plan.Make(inventory, ledger, wanted, layouts, others)
//	askHolders     who has what, by the kubelet and the runtime: always before a GPU is laid out anew; plan again
//	withdraw       what the plan takes away is published Unhealthy, and Allocate refuses it from here;
//	               plan again: an allocation that got in first keeps what it has
//	act            write down what a successor must go on listing, and what is to be made; begin the work
//	               on MIG mode and instances, which goes on beside the loop
//	setDriver      learn the driver's parts if it or its GPUs changed; time slices
//	openGates      remove the CDI files of ended allocations, write those of allocations that may start, and then
//	               publish what is on offer
//	finish         report: labels, annotations, condition, Events, status
//
// The decisions are pure functions: package plan makes the plan, and Build of
// internal/deviceplugin makes the offer from it.
//
// # Rooms
//
// What outlives a round is in rooms, which do not know the loop and hold none of each other, but
// for those that stand below another one here. [New] makes and connects them, and the loop
// (loop.go) asks them in turn:
//
//	room           file                     owns                                                          guarded by
//	mailbox        partitions.go            what was heard of the partition file and the Node             a lock
//	bell           beside.go                the tokens that have rounds come                              channels
//	partitions     partitions.go            what is wanted, and what operators annotated                  the loop
//	reader         look.go                  the hardware as last read, whether the driver is to be had    the loop
//	faults         faults.go                what an instance's number stands for, when an event names it  a lock
//	links          look.go                  whether there are NVLinks to look at                          an atomic
//	coexistence    others.go, prepared.go   which GPUs are somebody else's                                the loop
//	layouts        layouts.go               what GPUs are laid out as, and what still lingers             the loop
//	executor       work.go, progress.go     jobs, pauses after failures, instances that are ours          the loop
//	timeSlices     slices.go                what was asked of the driver                                  the loop
//	gatekeeper     gates.go, cap.go         CDI files and limit pages                                     the loop
//	  supplies     cap.go                   what containers need of the driver                            the loop
//	  pageSweeper  cap.go                   pages that are being removed                                  the loop
//	offering       serve.go                 both front-ends, and which resources are served               the loop
//	  claims       claims.go                the front-end for claims, once there is a need                atomics
//	journal        journal.go, memory.go    what is written down for a successor                          the loop
//	reporter       outcome.go               what the last round left                                      an atomic
//	herald         report.go, autoscale.go  what was told on the Node, and its startup taint              its goroutine
//	display        status.go, foresee.go    nothing: it shows the rest to outsiders
//	gpuNodeWriter  gpunode_writer.go        the GPUNode at the API server                                 locks
//	Lowering       allocatable.go           what the kubelet was sent, and what the Node says             a lock
//	Account        account.go               the usage journal, which internal/meter keeps                 internal/meter
//
// "The loop" is its goroutine alone. What others have for these rooms they leave under a lock or in
// an atomic there: a job its result, a front-end what it has granted, the reader's watchers that a
// reading is out of date, whoever watches the kubelet's directory that the checkpoint was written.
//
// Values pass between rooms. The mailbox gives an input. A [plan.Input] has what a plan is made
// from, and a ground what the files of allocations follow from beside the ledger, so that the
// gatekeeper knows neither the reader nor the executor. A [Snapshot] is what a round left; reporter,
// herald, display and Account read the last one. Where somebody has to be told, New passes a
// function on: the executor tells the reader of a reset, and the reader has faults, its judge, tell
// the front-ends. What runs beside the loop, and what is done at the end, is listed in beside.
//
// No room's lock is held while another room is asked, but for that of faults: verdicts must
// not overtake each other on their way to the front-ends.
//
// # Layouts
//
// What a GPU offers is its [plan.Layout]; package plan decides when it changes. A
// withdrawn device stays in its list as Unhealthy for [plan.Linger], over a restart
// too: the kubelet does not survive an ID that leaves while its Allocate is under way.
//
// A MIG instance that an allocation waits for is made when its container is to start,
// before anything that the partition wants. Instances are told apart by their placement.
// The agent's own are those that it made, those that an allocation has, and those that a
// geometry keeps. All others are foreign: they are offered where they fit, and they
// stay, unless --foreign-instances is reclaim. What is to be made is written down as the
// agent's own before it is made, so that a successor does not take it for foreign. An
// instance that is gone is forgotten; if somebody else makes another in its place, that
// one is foreign.
//
// # Work on the hardware (work.go)
//
// A plan's steps for one GPU are a job. It first looks whether the GPU is still as it was
// planned for; if not, the work is planned again. Where a step fails, the steps before it
// are undone in reverse order, so that the GPU has its old geometry or its new one; a
// mode that waits for a reset is not undone. While a job runs, the GPU's offer stays as
// it was published before, less what was withdrawn, and readings of that GPU's instances
// are not used. The result of a job is read from the driver.
//
// What failed for the partition is tried again after a pause that doubles, and at once
// when another partition is wanted. What failed for an allocation has a pause of its own;
// after three failures in a row its placement is withdrawn for a while, with an Event.
// The driver is not let go while a job runs.
//
// No job begins while the driver is away, before the kubelet and the runtime have been
// heard, or where the state cannot be written down. The reason why a container waits is
// in the kubelet's Event of its pod (waits.go).
//
// # Others (others.go, prepared.go)
//
// A GPU that somebody else may give out is not offered. The kubelet knows what other
// device plugins offer and which pods have some of it, and its checkpoint knows that even
// after a restart. It is asked every two minutes, and when its checkpoint says something
// new of them. But when a plugin has gone, the entries of its ended pods stay in that
// file. So an entry counts while the runtime knows the pod; for half a minute after the
// entry was first seen, since the pod's sandbox comes later; and while the runtime does
// not answer. Devices of other DRA drivers are in the kubelet's list by name, and the
// drivers' ResourceSlices say which GPUs they are. Where that cannot be told, no GPU is
// offered.
//
// # What another partition would come to (foresee.go)
//
// Each round leaves in its [Snapshot] what its last plan was made from. [Agent.Foresee] makes
// plans of that with another partition and the allocations of the moment, until nothing is left
// to do, and shows the end as the status would. It runs beside the loop, asks neither the driver
// nor the API server, and changes nothing. Claims that the kubelet has not had prepared yet are
// not known to it: the loop learns of them when it has withdrawn what they may have.
//
// # Hardware (look.go, faults.go)
//
// A reading runs beside the loop, which waits a second for it and then goes on with what
// it knows. NVLinks fail without an event: their states alone are asked for every
// minute, and all is read anew where they have changed. The driver's events do not wait for
// the loop: a fault is in the kubelet's lists before the loop has woken. internal/health
// judges. A fault of one MIG instance withdraws the devices of that instance alone. Where the
// node's labels say that the driver is to be replaced, the agent gives up its handles; when it
// may use the driver again, the process ends and starts anew.
//
// # The GPUNode (gpunode.go, gpunode_writer.go)
//
// What schedulers are told is a pure function of what the status shows: the same scene, with
// exact numbers of what is held. A goroutine of its own writes it. News, which is what is on
// offer, health and the largest request that fits, is gathered for a second; other changes
// wait for up to a minute; the same is never written twice. What the server has is compared,
// not what was sent, so that others' changes are undone, and nothing is repeated where an
// older definition keeps less. On kubelets that do not name devices in the status of pods the
// object has the holders, and every change is news.
//
// # Schedulers (allocatable.go, autoscale.go)
//
// [Lowering] runs beside the loop and knows nothing of it: it compares the lists that the
// kubelet has been sent with what the Node says there is, and lowers that. When the agent
// ends it says that there is nothing, serves the kubelet for a moment more, and then has it
// count no device: pods that come between two agents wait, and are not refused. The
// condition GPUReady says whether pods can be sent to the node. A new process leaves what the
// one before it said while it starts.
//
// # Memory (memory.go)
//
// The record of an allocation is in the annotations of its CDI file. An allocation that
// has no file yet is in the journal of internal/state, beside what else a successor must
// know: which devices are still listed, which MIG instances are the agent's, which GPUs
// there were, and which were faulty. A new process takes all of it over before it answers
// the kubelet, and calls no partition wrong before it has read the driver once.
package agent
