// SPDX-License-Identifier: Apache-2.0

// Package meter keeps the account of a node: it writes the usage journal (package usage) from
// what the ledger says, from what the watchdog sees and from what others tell it, and shows
// what that comes to.
//
//	m := meter.New(meter.Options{Ledger: ledger, Journal: store, Used: …})
//	go m.Run(ctx)
//	m.Poke()                          // after a round: look at the ledger
//	m.Note(usage.Record{Event: usage.Refused, …})
//	shown := m.Scraped()
//
// # Beside everything
//
// The meter has a goroutine of its own, and nobody waits for it. Allocate does not know it:
// the ledger keeps what has ended ([ledger.Ends]), and the meter compares what there is
// with its book. Times are the ledger's, so a look that comes late changes nothing. Others
// leave their records in a bounded list, of which refusals have a quarter; when it is full, the
// namespace with the most records loses the newest.
//
// Every minute it takes a sample: what the watchdog last saw a grant's
// containers use counts for the time since the sample before. So what is used is right within
// one interval. While the watchdog is off, or does not know, nothing is added.
//
// # After a kill
//
// The journal is read, from the last segment's book on. An allocation that the ledger has
// taken over and that is open in the book goes on under its number; times that the ledger
// knows again tell one taking from the next. What is open in the book and not in the ledger
// once kubelet and runtime have both been heard has ended while nobody looked: its end is the
// last moment that the journal vouches for.
//
// Counters may not fall, or Prometheus takes all of one for new. So what is shown is what has
// been written: the totals are as of the last record, which is a minute old at most, and while
// the disk is full they stand still. After kill -9 they go on from there, and what is lost is the use
// since the last sample.
//
// # A full disk
//
// Records wait in memory, a thousand of them, of which a quarter may tell of refusals; what is
// beyond is counted as lost. When
// there is room again they are written, and where some were lost the whole book. The condition
// UsageUnwritten says so meanwhile. Nothing else of the agent depends on the journal.
//
// # Idle grants
//
// A grant of which no process has been on any of its GPUs for --idle-after is idle: a
// condition, an Event on its pod, once, and a metric say so. A process that does nothing is
// use: it keeps its memory. Nothing is taken from anybody for it.
package meter
