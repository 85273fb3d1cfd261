// SPDX-License-Identifier: Apache-2.0

// Package guard is the watchdog. It makes sure that every container stays within the GPU memory
// that its allocation grants, even if its processes go around the library that enforces the cap.
//
// # One look
//
// Several times a second, a look at each GPU with caps on it does this:
//
//  1. It asks the driver which processes have how much memory there.
//  2. It finds the container of each process (package node).
//  3. It finds what each container may have (its allocations, from the agent).
//  4. It passes all that to the judge (package memcap). The judge is pure: it decides who is over a
//     cap, for how long, and what is not known.
//  5. It ends the containers that the judge names.
//
// A guard runs until its context ends:
//
//	g := guard.New(guard.Options{Every: 250 * time.Millisecond, Log: log}, worlds)
//	err := g.Run(ctx)
//
// GPUs without a cap are looked at for intruders alone: every ten seconds, or every thirty if the
// node has no allocations. If the node has no caps at all, the guard sleeps in between until the
// agent reports a change.
//
// # Counters and limit pages
//
// The library in a container cannot predict what contexts and modules take. So the guard measures
// it: each look compares the container's own counters with the driver's figure, and writes the
// difference to the limit page (lib.Meter).
//
// Counters and limit page belong to an allocation. Its containers share them, at the same time or
// one after another. So each allocation and GPU has one reader (tally), which compares the counters
// with the driver's figure for all of its containers together. That figure is unknown while a
// process of their pod is in a container that the runtime does not list yet.
//
// A container writes its counters itself, so it can make them expensive to read. Expensive counters
// share a small budget of CPU time in each look, and are read less often the more they cost. All
// others are read at every look.
//
// # Limits of the driver
//
// Some drivers (R615 and later) can limit a container's memory by its cgroup. There, a hook sets the
// limit before the container's first instruction (lib.Kit.HoldHook), and the guard reads what it came
// to (Outcomes). The guard sets each limit again once a minute (Limiter): a driver that was loaded
// anew has forgotten it. For a container without a hook's limit, the first look that finds it on a
// GPU sets one. The container's level is memcap.Driver, as long as the driver confirms the limit and
// no other container shares the allocation: the driver holds each to the whole cap.
//
// # Shares of the multiprocessors
//
// Containers on a GPU under MPS have shares of its multiprocessors, and MPS fails open. So each look
// compares the driver's list of processes with the clients that the GPU's daemon lists, and with
// what each process says on its page (share.go). A process that is no client is an intruder. Before the
// guard ends or evicts anything, it has the clients detached: their end may end the work of neighbours. It does so, too,
// for pods that others end ([Guard.PodEnds]), if the agent may learn of them.
//
// # Parts
//
//   - [Guard] decides which GPUs are due, and whether anything has changed on one where all was in
//     order (baseline). It keeps what the last look at each found (finding).
//   - The examiner looks. It has the roster of containers and the tallies of their counters.
//   - The limits remember what the driver was asked to enforce.
//   - The endings have the clients of pods that are about to end detached in time.
//   - The reaper ends containers, for offences and for the agent's loop ([Guard.End]).
//   - The offenceHandler acts on offences while looks go on. Its mutex guards the set of containers
//     that it is ending.
//
// All but the last three belong to Run's goroutine and have no lock.
//
// # What it does about an offence
//
// A container over its cap went around the library, or has none. The guard sends an Event and ends
// that container and no other. If several containers share the allocation's cap, also in several
// pods, it ends the one with the largest excess of the driver's figure over its own count.
//
// Before it ends a container, the guard checks everything again:
//
//   - the driver's figures, twice within some milliseconds, since a memory pool may be over its cap
//     for a moment before the library undoes it
//   - for each process that counted: that it is the same process, and still in that container
//
// Others that use a GPU which the agent gives out:
//
//	a container without an       reported; ended only if the operator wants that
//	allocation on the GPU
//	a container that the         reported. A sandboxed runtime has the processes of a whole pod
//	runtime does not list        in such a container. Its cgroup names the pod. It is ended if it
//	                             has more than all containers of that pod may have together, and
//	                             only if that sum is known
//	a process outside all pods   counted, and never touched
//
// A pod that offends again and again can be evicted, so that its controller creates it elsewhere.
// Eviction is off by default.
//
// # Where it does not run
//
// The driver lists processes in the caller's PID namespace, and leaves out those that the caller
// cannot see. Outside the node's own PID namespace the guard would see no processes. So it does not
// start there, and logs the reason. Caps then rest on the library alone, which the status and the
// metrics show.
//
// The guard has a goroutine of its own, and never waits for the agent's loop. A driver that hangs
// leaves it without figures, and without figures it ends no container. It reaches hardware, cgroups
// and the API server only through the small interfaces that it declares.
package guard
