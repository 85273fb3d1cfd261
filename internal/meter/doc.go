// SPDX-License-Identifier: Apache-2.0

// Package meter keeps the usage account of a node. It writes the usage journal (package usage) from
// the ledger, from the watchdog's measurements and from records of other packages. It also provides
// the totals for metrics and the status.
//
//	m := meter.New(meter.Options{Ledger: ledger, Journal: store, Used: …})
//	go m.Run(ctx)
//	m.Poke()                          // after a round: look at the ledger
//	m.Note(usage.Record{Event: usage.Refused, …})
//	shown := m.Scraped()
//
// # Where records come from
//
// The meter has its own goroutine, and no other part of the agent waits for it. The ledger keeps
// ended allocations until the meter takes them ([ledger.Ends]). The meter compares the ledger's
// allocations with its book. It uses the ledger's times, so a late look changes nothing. Other
// packages add records to a bounded list ([Meter.Note]). When the list is full, the namespace with
// the most records loses its newest one. Refusals may fill at most a quarter of the list.
//
// Every minute the meter takes a sample: it adds to each grant what the watchdog last saw its
// containers use, for the time since the last sample. So totals are right within one interval. If
// the watchdog is off or has no figure, nothing is added.
//
// # After a restart
//
// The meter reads the journal from the book at the start of the last segment. An adopted allocation
// that is still open in the book keeps its grant's number. If the ledger knows when the allocation
// was given, a later time shows that it is a new grant. A grant that is open in the book and not in
// the ledger, once the kubelet and the runtime have answered, ended while the agent was away. Its
// end is then the time of the journal's last record.
//
// Counters must not fall, since Prometheus would take a fall for a restart from zero. So the meter
// shows only totals that have been written. They are at most a minute old, and stand still while
// the disk is full. After kill -9 they continue from there; the use since the last sample is lost.
//
// # A full disk
//
// Up to a thousand records wait in memory, at most a quarter of them refusals. Further records are
// counted as lost. When there is room again, the waiting records are written. If records of grants
// may be among the lost ones, the meter writes the whole book, too. Meanwhile the node has the
// condition UsageUnwritten. Nothing else in the agent depends on the journal.
//
// # Idle grants
//
// A grant is idle if none of its GPUs has had a process of it for --idle-after. The meter reports
// this by a condition, a metric, and one Event on the pod. A process that does nothing counts as
// use, since it keeps its memory. An idle grant loses nothing.
package meter
