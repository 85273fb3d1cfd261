// SPDX-License-Identifier: Apache-2.0

// Package guard is the watchdog: it makes sure that every container stays within the GPU
// memory that it was granted, whatever its processes do.
//
// # One look
//
// Several times a second, for each GPU that is given out in shares, it asks the
// driver which processes have how much memory there, finds the container of each
// (package node), and what that container may have (its allocations, from the agent).
// Where a cap's library runs in the container, the look
// serves that library too: what contexts and modules take cannot be predicted, so the
// guard writes the measured figures to the container's limit page (lib.Meter, around the driver's
// answer).
//
//	g := guard.New(guard.Options{Every: 250 * time.Millisecond, Log: log}, worlds)
//	err := g.Run(ctx)
//
// Counters and limit page are an allocation's: its containers share them, at the same time
// or one after another. So they have one reader for an allocation and GPU (tally), whichever
// of the containers is there, and are held against what the driver says of all of
// them together; that is not known while a process of their pod is in a container
// that the runtime does not list yet.
//
// A container writes its counters itself, so it decides what it costs to read them.
// Expensive ones share a small budget of CPU time in each look, and are read less often
// the more they cost; all others are read at every look.
//
// Where the driver can hold a container to its memory by itself (R615 and later,
// by cgroup), the first look that finds one on a GPU has it do so (Limiter); the
// level of that container is then memcap.Driver, as long as the driver confirms it.
//
// What was seen goes to the judge (package memcap), which is pure: it decides
// what is over its cap, for how long, and what is not known. GPUs that nobody has a cap on
// are looked at for intruders alone: every ten seconds, or every thirty where nobody on the
// node has anything. Where there is no cap at all the guard sleeps in between, until the
// agent says that something has changed.
//
// [Guard] goes round: which GPUs are due, whether anything stirs on one where all was in order,
// and what the last look at each found (finding). The looks are the eye's, which has the roster of
// containers and the tallies of their counters. All that belongs to the goroutine of Run and has no
// lock. What the driver is asked to hold is in limits, and hand does what must be done about an
// offence: it works beside the looks, and its mutex guards which containers it is ending.
//
// # What it does about it
//
// A container over its cap has got around the library, or has none: an Event says so,
// and it is ended, and no other. Of several that share an allocation's cap, also in
// several pods, that is the one with the largest excess of the driver's figure over what it
// counts by itself. Before that everything is looked at again: the
// driver's figures, twice within some milliseconds, since a memory pool may be over
// for a moment before the library undoes it; and for each process that counted, that it is the same one
// and still in that container. A container that uses a GPU of ours without a
// allocation on it is reported, and ended only where the operator wants that. One that
// the runtime does not list (a sandboxed runtime has the processes of a whole pod in
// such) is reported as that. Its cgroup tells its pod; it is ended if it has more than
// all containers of that pod may have together, and only where that is known. A process
// outside all pods is counted and never touched. A pod that offends again and again can
// be evicted, so that its controller creates it elsewhere; that is off by default.
//
// # Where it will not work
//
// The driver lists processes in the caller's PID namespace and leaves out those
// that the caller cannot see. Outside the node's own namespace the guard would see
// no processes at all, so there it refuses to start and says why; caps then rest on the
// library alone, and status and metrics say that.
//
// The guard has a goroutine of its own and never waits for the agent's loop: a
// driver that hangs leaves it without figures, and without figures nobody is
// ended. It knows no hardware, no cgroup and no API server, only the small
// interfaces that it declares.
package guard
