// SPDX-License-Identifier: Apache-2.0

// Package ledger records which pieces of a node's GPUs are given out, and to which pods: its
// [Ledger] holds the [Allocation]s.
//
// An allocation is what one holder was given in one call. It consists of [Grant]s, and it has
// a [Phase] and a [Holder]. A grant is one piece of one GPU with the cap on its memory.
//
// A front-end (internal/deviceplugin, internal/dra) makes an allocation (Take), gives it to
// the next holder (Renew), and ends it (Release). The agent's loop looks whether another
// holder still has its pieces (Looked), makes what its container needs, and opens it
// (SetOpen). The kubelet's call that starts the container waits for that (Prepare):
//
//	                Looked: free           Prepare          SetOpen
//	Take ► reserved ───────────► taken ───────────► making ────────► open
//	          │  ▲                 ▲ │                 │               │
//	   Looked:│  │Renew, from      │ │ Looked:         │        Shut:  │
//	   in use ▼  │anywhere         │ ▼ in use          │      to taken ▼
//	        waiting ───────────────┘ waiting ◄─────────┘
//
// [Transitions] lists all steps. Release ends an allocation from any phase. If the kubelet has
// given an allocation to two pods (SetTwice), Prepare lets one container through, and the
// allocation is reserved again at once.
//
// # Grants
//
// A front-end makes a grant once, when it is asked for one. A grant is complete in itself, and
// is recorded wherever its allocation is: in the journal, in the annotations of the CDI file,
// and in the annotation that Allocate returns, which the container runtime and the kubelet
// keep. So a record is still exact after the partition, the size of a memory unit or the
// number of replicas has changed:
//
//	{"gpu":"GPU-5a2f…","kind":"units","units":"0-23","unitMiB":1024,"cap":25769803776}
//	{"gpu":"GPU-5a2f…","kind":"replica","replica":2,"of":4,"cap":20937965568}
//	{"gpu":"GPU-5a2f…","kind":"placement","profile":"3g.40gb","start":4,"size":4}
//	{"gpu":"GPU-5a2f…","kind":"whole","timeSlice":"long"}
//
// If no record is left, a grant is worked out from device IDs alone. These do not tell the size
// of a unit, the number of replicas or the cap. The first two are then zero. The cap is read
// from the limit page of the allocation.
//
// # Room
//
// What is taken of a GPU is the union of the grants, not their sum: a pod's init container and
// its app container may be given the same pieces, in part or whole. A [Request] may permit such
// an overlap. Its allocation opens when the other holders have left its pieces.
//
// Only one front-end at a time has allocations on a GPU. On a GPU with MIG the ledger also
// knows which instances exist and which can exist side by side ([MIG]). So it can tell which
// placements there is [Room] for.
//
// # Limits
//
// The ledger does not know device IDs, offers, the kubelet, the driver and the clock: times are
// arguments.
//
// A front-end checks its offer and then takes from it. It does both under a mutex of its own,
// which it locks before the ledger's. The loop publishes a withdrawal before it reads the
// allocations. So either the loop sees the new allocation, or the front-end sees the withdrawal
// and refuses.
package ledger
