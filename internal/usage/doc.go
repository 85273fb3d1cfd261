// SPDX-License-Identifier: Apache-2.0

// Package usage is the account of a node's GPUs: which container was granted what and for how
// long, how much of it was used, and what else happened. It has the journal's records, the book
// that follows from them, and the reports that people ask for. Package internal/usage/segments
// keeps the files, and the agent's loop decides what to write.
//
// # The journal
//
// A record is one line of JSON. New versions add fields and never rename one. A reader skips
// lines that are not records, and events and fields that it does not know. A crash may cut off
// the last line; it is then no JSON, and skipped too. "grant" numbers an allocation from its
// beginning to its release. "allocation" is its ID. That ID names the devices, so the next
// holder of the same devices has the same ID; a number is never used again.
//
//	{"time":"…","event":"began","book":{…}}           a segment: the book as it is here
//	{"time":"…","event":"started","message":"v1"}     an agent has started
//	{"time":"…","event":"allocated","grant":7,"allocation":"9c1f…","frontEnd":"device-plugin",
//	  "resource":"example.com/gpu-mem","count":24,
//	  "pieces":[{"gpu":"GPU-…","index":3,"kind":"units","units":"0-23","share":0.3,"memoryMiB":24576}]}
//	{"time":"…","event":"held","grant":7,"namespace":"train","pod":"a","uid":"…","container":"main",
//	  "labels":{"team":"x"}}
//	{"time":"…","event":"used","used":[{"grant":7,"gpu":3,"mibMs":…,"busyMs":…,"smMs":…,"idle":"…"}]}
//	{"time":"…","event":"yielded","grant":7}          a spot grant gives its room back; "restored" has it again
//	{"time":"…","event":"parked","grant":7,"mib":24576}  its memory is on the host; until "unparked", or the release
//	{"time":"…","event":"released","grant":7,"used":[…]}
//	{"time":"…","event":"refused","resource":"…","count":24,"gpu":"GPU-…","reason":"NotOneGPU","message":"…"}
//	{"time":"…","event":"cut","op":"create","gpu":"GPU-…","index":3,"placement":"3g.40gb@4"}
//	{"time":"…","event":"killed","namespace":"…","pod":"…","container":"…","gpu":"GPU-…","reason":"CapExceeded"}
//	{"time":"…","event":"evicted","namespace":"…","pod":"…","reason":"CapEvicted"}
//	{"time":"…","event":"lost","count":12}            records that could not be written
//	{"time":"…","event":"left-out","namespace":"…","count":9,"before":"…"}  removed records
//
// The time of "allocated" and "released" is the ledger's, in nanoseconds, and not the time of
// the write. A cut's op is a step on the hardware (destroy, create, enable, disable, reset,
// undo), or "layout", whose placement is the GPU's new layout. Reasons are the codes of
// internal/status.
//
// Use is cumulative since the grant began, in whole numbers. "mibMs" is memory (MiB) times
// milliseconds, "busyMs" the time with a process on the GPU, and "smMs" the time of all its
// streaming multiprocessors. So a record that is read twice counts once, and a reader that
// missed some gets the same total from the next.
//
// # The book
//
// A [Book] is made by applying records. It has the open grants, and the totals of each container
// on each GPU ([Series]). The same records always make the same book. So a restarted agent has
// the old book, and its counters continue. A segment begins with the whole book, so one segment
// is enough to read.
//
// A grant is charged from its beginning to its release, by its share of the physical GPU
// ([PiecesOf]). The share is 1 for a whole GPU, and n of N for memory units and replicas. For a
// MIG instance it is the instance's memory slices of the GPU's, as in GPUNode and saturation.
// (Seven 1g instances of an A100 are 7/8 of it: the eighth slice belongs to no instance.)
//
// A piece may be given away before it is released, from an init container to its app
// container. It is then charged to the last container that got it. Admin access, which only
// watches a GPU, is charged nothing.
//
// A grant of the spot tier has "tier":"spot" in its records; others have no tier, which is the guaranteed one. A
// guaranteed grant over the room of spot grants takes their charge over until it ends, and a spot grant that gives its
// room back is charged nothing until it has the room again. A spot grant over the room of
// an older guaranteed one, which is lent, takes nothing of its charge: the room is then counted as lent as well. A
// parked process has no memory on the GPU. So its time is not used, and it is granted only while its room is its own;
// the time and what is on the host are summed apart.
//
// Several pods can share one claim. They are charged together, to the container that had it
// first. When that has ended, they are charged to the next.
//
// # Labels
//
// A pod's labels are those that the container runtime has stored with its sandbox: the labels
// at the time when the pod came to the node. Tenants write them. They serve to group reports,
// and prove nothing; the namespace does.
//
// # Limits
//
// The package does not know the clock, the files, the driver, or what a GPU hour costs in money.
package usage
