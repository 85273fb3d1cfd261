// SPDX-License-Identifier: Apache-2.0

// Package health decides which GPUs are healthy, from errors that the driver reports
// (Xids) and from readings of its figures.
//
// It is pure: times are arguments, and the caller does all reading. Somebody
// feeds it [Monitor.Event] and [Monitor.Reading]; [Monitor.Verdicts] says what is
// unhealthy and why, [Monitor.Due] when the next reading is due.
//
//	m := health.New(health.Options{})
//	m.Reading(health.Reading{GPUs: …}, now)
//	m.Event(gpu.Event{Kind: gpu.EventXid, GPU: "GPU-3f…", Xid: 79, GI: -1, CI: -1}, now)
//	m.Verdicts() // GPU-3f…: Xid 79: the GPU has fallen off the bus, since …; drain …
//
// # What a fault affects
//
// A fault belongs to a [Subject]: a GPU, or one MIG instance. Sharing plays no
// part: all shares of a GPU are affected. Only a contained fault that names an instance
// stays on that instance; all others affect the whole GPU. An Xid without a GPU affects
// every known one, since the driver could not say which. Nothing else crosses from one
// GPU to another.
//
// # Classes and what recovers them
//
// Every fault but the driver's ends by a clean reading once Hold has passed since
// the last complaint. A clean reading has an answer for that GPU and repeats no
// complaint of that class. Some classes ask for more:
//
//	lost          79, a loss reported, a GPU not listed          a reset, and the figures back
//	remap-failed  64, or no spare row in a reading               a reset, and the figures back
//	memory        48 95 140                                      a reset, and the figures back
//	recovery      154, or a recovery action in a reading         a reset, and no action asked for
//	firmware      61 62 119 120 143                              a reset, and no action asked for
//	link          74 149                                         a reset, and no action asked for
//	engine        69 92 121 (and ignored ones, once they count)  quiet
//	contained     63 94                                          quiet, or the instance is gone
//	unknown-xid   all others                                     quiet
//	unreadable    any other error for this GPU                   quiet
//	driver        no driver, or another one than loaded          the first good reading
//
// "The figures back" means no uncorrected errors since the last reset, no row or
// page pending, none that failed, no recovery action. A figure that the card does not
// have counts neither way.
//
// The uncorrected count and a pending remap are no fault by themselves: after
// a contained error both are there, and the GPU works on. Counting them would
// make a GPU unhealthy for each contained error.
//
// # What proves a reset
//
// A fault that asks for a reset waits for one. Silence proves nothing: a GPU whose system
// processor hangs reports no more errors, and its programs are on it still. What proves one,
// since the last complaint:
//
//   - the machine was started anew ([Monitor.Restore]);
//   - another loading of the driver answers (Reading.Load);
//   - the driver asked for a reset or a reboot, and asks for nothing now
//     (gpu.Health.Recovery, from R550 on). That it never asked proves nothing;
//   - a fault's own trace is gone, for that fault alone: uncorrected errors (memory), which
//     nvidia-smi -p 0 clears, too; no spare row (remap-failed); the driver had lost the GPU
//     or did not list it, and has it again (lost); the driver asks for nothing, after Xid
//     154, which says that what it asks for has changed (recovery);
//   - of an Xid that named no GPU, the driver asks for nothing: another was meant;
//   - somebody says so ([Monitor.WasReset]): the agent, of its own, or an operator.
//
// What has been seen of these is in the records, since a GPU can mostly be reset only while
// no agent has it open. Where the driver cannot tell a figure, that is neither that it is set
// nor that it is gone.
//
// # Flapping
//
// A complaint after a clean reading doubles the hold of that fault, up to 16
// times, if the complaint before was less than an hour ago. Complaints without a
// clean reading between them are one fault, and only postpone its end.
//
// # Hanging is not a fault
//
// A reading that timed out changes no verdict: a busy driver is slow for many
// reasons, and the holders' containers run on. [Monitor.Waiting] says so. A missing
// driver makes every known GPU unhealthy, and leaves no trace once it is back, since
// nothing was wrong with the cards.
//
// # Memory
//
// [Monitor.Records] and [Monitor.Restore] carry faults over a restart, so that
// a restart of the agent or the kubelet clears no fault. A reboot resets every card:
// after it only a failed remap is remembered, until the driver says otherwise.
//
// Memory is bounded: one fault per class and instance, and GPUs that only events
// know are few and forgotten by the next reading that does not list them.
//
// # Sources
//
// From NVIDIA's documents: a pending remap lets unaffected applications run on and
// new ones start, and what each recovery action asks for ("GPU Memory Error
// Management", error recovery and response flags); 48, 63 and 64 as the three Xids
// of page retirement ("Dynamic Page Retirement"); that a failed remap stays set
// once there ever was one, and that remap figures cannot be asked for while a GPU
// has MIG instances (NVML's nvmlDeviceGetRemappedRows); that the errors of 121 are
// corrected and do no harm, and that a reset at leisure trains the link anew ("XID
// Errors"); that Xid 154 tells each change of the recovery action, to none as well.
//
// The names of the Xids in the table are meant as those of NVIDIA's Xid catalogue
// ("XID Errors"), in this package's words; where they differ, trust the
// catalogue. The ignored list is that of NVIDIA's device plugin. Which
// class an Xid belongs to, what it asks of the operator, what it affects and how
// long to wait are this package's own decisions.
//
// The package does not know how a reading is done, what a device or a pod is,
// and repairs nothing.
package health
