// SPDX-License-Identifier: Apache-2.0

// Package ledger has what is given out on a node: the [Allocation]s, in one [Ledger].
//
// An allocation is what somebody was given together: its [Grant]s, each one piece of one
// GPU with the cap on its memory; how far it is ([Phase]); and who holds it. A front-end
// makes it (Take), gives it to the next holder (Renew) and ends it (Release); the loop
// makes what it needs and opens it (SetOpen); whoever starts its container waits for
// that (Prepare):
//
//	                Looked: nobody         Prepare          SetOpen
//	Take ► reserved ───────────► taken ───────────► making ────────► open
//	          │  ▲                 ▲ │                 │               │
//	   Looked:│  │Renew, from      │ │ Looked:         │        Shut:  │
//	 somebody ▼  │anywhere         │ ▼ somebody        │      to taken ▼
//	        waiting ───────────────┘ waiting ◄─────────┘
//
// [Transitions] has all of them; from each phase Release ends it. One that was given to two
// pods at once is reserved again as soon as Prepare has let the one through (SetTwice).
//
// # Grants
//
// A grant says everything about itself. It is made once, by the front-end that was
// asked for it, and recorded wherever the allocation is: in the journal, in the
// annotations of its CDI file, and in the annotation that Allocate returns, which
// the container runtime and the kubelet keep. Whoever reads a record knows what was
// promised, although the partition, the size of a memory unit or the number of
// replicas has changed since:
//
//	{"gpu":"GPU-5a2f…","kind":"units","units":"0-23","unitMiB":1024,"cap":25769803776}
//	{"gpu":"GPU-5a2f…","kind":"replica","replica":2,"of":4,"cap":20937965568}
//	{"gpu":"GPU-5a2f…","kind":"placement","profile":"3g.40gb","start":4,"size":4}
//	{"gpu":"GPU-5a2f…","kind":"whole","timeSlice":"long"}
//
// A grant that was worked out from device IDs alone, since no record is left, lacks
// what the IDs do not say: the size of a unit and the number of replicas, which are
// then zero, and the cap, which the limit page of the allocation tells.
//
// # Room
//
// What is taken is the union of what grants cover, not their sum: a pod's init container
// and its app container may be given the same pieces, in part or whole. A [Request] that
// permits that may overlap with others, and its allocation opens when they are off its
// pieces. A GPU is one front-end's at a time. On a GPU with MIG the ledger also knows
// what stands and what can stand together ([MIG]), so that it can tell which placements
// there is [Room] for.
//
// # What it does not know
//
// Device IDs, who sees what on offer, the kubelet, the driver and the clock: times are
// arguments. A front-end that checks an offer before it takes from it does both under a
// mutex of its own, which it locks before the ledger's; whoever withdraws something
// publishes that there first and looks at the allocations afterwards. So either the Take
// came first, and is seen, or the withdrawal did, and the front-end refuses.
package ledger
