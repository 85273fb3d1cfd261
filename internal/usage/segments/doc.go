// SPDX-License-Identifier: Apache-2.0

// Package segments keeps the journal of package usage in a directory, bounded in size.
//
//	0000000012.jsonl.gz   a segment that is over, thinned and compressed
//	0000000013.jsonl      the one that is written to
//	.0000000013.tmp       while one is compressed
//
// The last segment grows by whole lines, each batch with one write(2). When it is larger than
// two mebibytes the next one begins, with the book as its first record, and the old one is
// compressed (gzip: zcat and jq read it). Records of use are thinned to one in three hours then.
// A year of a busy node, 1,000 allocations a day, takes less than the 64 MiB that are the
// default.
//
//	store, err := segments.Open("/var/lib/gpu-agent/usage", segments.Options{})
//	err = segments.Read(dir, time.Time{}, book.Apply)       // as any process may, at any time
//	err = store.Append(lines)
//	if store.Full() { err = store.Next(began); err = store.Tidy(); lines = store.Dropped() }
//
// # Shares
//
// When the segments are beyond the bound, Tidy has an eighth of the room free again. Each
// namespace is an owner, what is nobody's is another one's, and what was refused of each is one
// more. Refusals go first, down to a ration of an eighth. Then all others are levelled: there
// is an amount that nobody has more of, and whoever has less keeps everything. Of each owner
// the oldest goes. Nothing of this touches Append.
//
// A packed segment says in the extra field of its gzip header what it has of whom, so that
// most are not read for that. One without that, of an older agent, is weighed once.
// What an owner's lines come to compressed is an estimate, by their length before, so the
// room is shared out a few times if need be. If that does not do, the oldest segments go as a
// whole.
//
// What is left must still add up. All of an owner's lines go from the first segments, with its
// grants in their books; of the segment in which it begins then, only grants that began and
// ended there. The book of that segment has those that are older, so it is kept. Segments that
// have become small are joined, and what is between them is left out, the books: a flood would
// else leave a trail of them. A joined segment has the number of its first part and says which
// its last was. Readers pass over parts that a kill has left, and the next Tidy that needs room
// removes them.
//
// # What a crash leaves
//
// A write that the kernel has taken survives kill -9, and a power failure only once it is
// flushed. The journal is flushed once a minute, beside everything else, and whole when it is
// compressed: a power failure, which ends all containers too, costs a minute of the account.
// A flush for every record would cost each allocation a disk access and save that minute.
// After kill -9 nothing is lost but what had not been handed to the kernel.
//
//   - in a write: a torn line, which no reader takes for a record, and the next write begins a
//     new line;
//   - before a new segment has its first line: an empty or torn one, which is read as
//     continuing the one before;
//   - while one is compressed: both forms, of which the compressed one is whole as soon as it
//     has its name, or a temporary file. Open finishes it;
//   - while some are joined: parts beside the whole.
//
// A full disk makes Append fail, and what is partly written is a torn line. The caller keeps
// its records and tries again. Nothing is removed to make room beyond the bound: the disk is
// others', too.
//
// The package knows lines and times. What records mean is the business of package usage.
package segments
