// SPDX-License-Identifier: Apache-2.0

// Package ledger has the words for what is given out: a [Grant] is one piece of one
// GPU that somebody has, with the cap on its memory. Several grants that were given
// together are one allocation.
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
//	{"gpu":"GPU-5a2f…","kind":"whole"}
//
// A grant that was worked out from device IDs alone, since no record is left, lacks
// what the IDs do not say: the size of a unit and the number of replicas, which are
// then zero, and the cap, which the limit page of the allocation tells.
//
// The package does not know device IDs, resource names, the kubelet or the driver.
package ledger
