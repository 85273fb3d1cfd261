// SPDX-License-Identifier: Apache-2.0

// Package usage is the account of a node's GPUs: who was granted what and for how long, who
// used it, and what else happened. It has the journal's records as values, the book that
// follows from them, and the reports that people ask for. Files are the business of
// internal/usage/segments, and the agent's loop says what to write.
//
// # The journal
//
// A record is one line of JSON. Fields are added and never renamed; a reader leaves out
// lines that are no record, and events and fields that it does not know. A line that was cut
// off is no JSON, so whatever a crash leaves of the last one is left out too. "grant" numbers
// an allocation from its taking to its release. Its ID, "allocation", names its devices and
// comes back with the next holder of the same ones; a number does not.
//
//	{"time":"…","event":"began","book":{…}}           a segment: the book as it is here
//	{"time":"…","event":"started","message":"v1"}     an agent has started
//	{"time":"…","event":"allocated","grant":7,"allocation":"9c1f…","frontEnd":"device-plugin",
//	  "resource":"example.com/gpu-mem","count":24,
//	  "pieces":[{"gpu":"GPU-…","index":3,"kind":"units","units":"0-23","share":0.3,"memoryMiB":24576}]}
//	{"time":"…","event":"held","grant":7,"namespace":"train","pod":"a","uid":"…","container":"main",
//	  "labels":{"team":"x"}}
//	{"time":"…","event":"used","used":[{"grant":7,"gpu":3,"mibMs":…,"busyMs":…,"smMs":…,"idle":"…"}]}
//	{"time":"…","event":"released","grant":7,"used":[…]}
//	{"time":"…","event":"refused","resource":"…","count":24,"gpu":"GPU-…","reason":"NotOneGPU","message":"…"}
//	{"time":"…","event":"cut","op":"create","gpu":"GPU-…","index":3,"placement":"3g.40gb@4"}
//	{"time":"…","event":"killed","namespace":"…","pod":"…","container":"…","gpu":"GPU-…","reason":"CapExceeded"}
//	{"time":"…","event":"evicted","namespace":"…","pod":"…","reason":"CapEvicted"}
//	{"time":"…","event":"lost","count":12}            records that could not be written
//	{"time":"…","event":"left-out","namespace":"…","count":9,"before":"…"}  older records that had to go
//
// The time of "allocated" and "released" is the ledger's, to the nanosecond, and not that of
// the write. A cut's op is a step on the hardware (destroy, create, enable, disable, reset,
// undo) or "layout", whose placement says what the GPU is from then on. Reasons are the codes
// of internal/status. What was used is cumulative since the grant began, in whole numbers:
// "mibMs" is memory (MiB) times milliseconds, "busyMs" the time with a process on the GPU, and
// "smMs" the time of all its streaming multiprocessors. So a record that is read twice counts
// once, and whoever has missed some reads the same total from the next.
//
// # The book
//
// [Book] is a fold over records: the grants that are open, and per container and GPU what
// they come to ([Series]). Everybody who reads the same records has the same book, the agent
// after a restart too, which is why its counters go on where they were. A segment begins with
// the whole book, so that nobody has to read more than one.
//
// A grant is charged from its taking to its release by its share of the physical GPU
// ([PiecesOf]): 1 for a whole GPU, n of N for memory units and replicas, and for a MIG
// instance its memory slices of the GPU's, as in GPUNode and saturation. (Seven 1g instances
// of an A100 are 7/8 of it: nobody has the eighth.) A piece that is given to somebody else
// before it is released, as an init container's to its app container, is charged to the one
// who was given it last. What only looks after a GPU (admin access) is charged nothing.
//
// Several pods can have one claim. They are charged together, to the container that had it
// first; when that has ended, to the next.
//
// # Labels
//
// A pod's labels are those that the container runtime has of its sandbox: as they were when
// the pod came to the node. Tenants write them. They are there to group by, and prove
// nothing; the namespace does.
//
// # What it does not know
//
// The clock, the file, the driver, and what anything costs in money.
package usage
