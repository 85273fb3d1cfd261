// SPDX-License-Identifier: Apache-2.0

// Package segments keeps the journal of package usage in a directory, bounded in size.
//
//	0000000012.jsonl.gz   a closed segment, thinned and compressed
//	0000000013.jsonl      the last segment, which the agent writes to
//	.0000000013.tmp       exists while a segment is compressed
//
// The last segment grows by whole lines, each batch with one write(2). When it is larger than
// two mebibytes the next one begins, with the book as its first record, and the old one is
// compressed (gzip: zcat and jq read it). Of the records of use, compression keeps one for
// each three hours. The default bound of 64 MiB is enough for more than a year of a busy node
// with 1,000 allocations a day.
//
//	store, err := segments.Open("/var/lib/gpu-agent/usage", segments.Options{})
//	err = segments.Read(dir, time.Time{}, book.Apply)       // any process may do so at any time
//	err = store.Append(lines)
//	if store.Full() { err = store.Next(began); err = store.Tidy(); lines = store.Dropped() }
//
// # Shares
//
// When the segments exceed the bound, Tidy frees an eighth of the room. It does so by owner.
// Each namespace is an owner, and the node owns the records without a namespace. The refusals
// of an owner are counted apart.
//
// Tidy removes refusals first, until they take an eighth of the room. Then it cuts the other
// owners down to one level: an owner that has less keeps everything. The oldest records of an
// owner go first. Append never removes anything.
//
// A packed segment has an index in the extra field of its gzip header: how much of it each owner
// has. So Tidy reads only the segments that it changes. The segments of older agents have no
// index; Tidy reads such a segment once, and adds one. How much an owner's lines take when they
// are compressed is estimated from their plain length. So Tidy shares out the room a few times
// if need be. If that is not enough, it removes the oldest segments whole.
//
// The rest must still add up. From the oldest segments Tidy removes all records of an owner, and
// the owner's grants in their books. In the first segment where the owner keeps records, only
// grants go that began and ended there. Older grants are in the book of that segment, so Tidy
// keeps that book.
//
// Tidy joins segments that have become small, and removes the books between them: a flood
// would otherwise leave a trail of books. A joined segment has the number of its first part, and
// its index has the number of its last. A killed agent may leave parts behind. Readers skip them,
// and the next Tidy that needs room removes them.
//
// # What a crash leaves
//
// A write that the kernel has accepted survives kill -9. It survives a power failure only once it
// is flushed. The agent flushes the journal once a minute, together with its other files, and
// a segment when it is compressed. So a power failure, which ends all containers too, costs one
// minute of the account. A flush after each record would save that minute, and cost each
// allocation a disk access.
//
//   - During a write: a torn line. Readers skip it, and the next write begins a new line.
//   - Before a new segment has its first line: an empty or torn segment. Readers take it for a
//     part of the segment before.
//   - During compression: a temporary file, or the segment in both forms. Readers take the
//     compressed form, which is complete as soon as it has its name. Open and Tidy remove the
//     other file.
//   - While segments are joined: parts beside the joined segment.
//
// If the disk is full, Append fails, and what it wrote in part is a torn line. The caller keeps
// its records and tries again. The package removes nothing more to make room, since others need
// the disk too.
//
// The package knows lines and times. What records mean is the business of package usage.
package segments
