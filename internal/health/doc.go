// SPDX-License-Identifier: Apache-2.0

// Package health decides which GPUs are healthy, from errors that the driver reports (Xids) and
// from readings of its figures.
//
// It is pure: times are arguments, and the caller does all reading. The caller passes in events
// ([Monitor.Event]) and readings ([Monitor.Reading]). [Monitor.Verdicts] returns what is
// unhealthy and why, and [Monitor.Due] when the next reading is due.
//
//	m := health.New(health.Options{})
//	m.Reading(health.Reading{GPUs: …}, now)
//	m.Event(gpu.Event{Kind: gpu.EventXid, GPU: "GPU-3f…", Xid: 79, GI: -1, CI: -1}, now)
//	m.Verdicts() // GPU-3f…: Xid 79: the GPU has fallen off the bus, since …; drain …
//
// # What a fault affects
//
// A fault belongs to a [Subject]: a GPU, or one MIG instance. If pods share the GPU, it affects
// all of them. Only a contained fault that names an instance is limited to that instance; all
// others affect the whole GPU. An Xid without a GPU affects every known GPU, since the driver
// could not say which it was. Otherwise no fault spreads from one GPU to another.
//
// # Classes and recovery
//
// A fault ends with a clean reading, once Hold has passed since its last complaint. A reading is
// clean if it has an answer for that GPU and no complaint of that class. A driver fault ends
// with the first good reading. Some classes ask for more:
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
// "The figures back" means: no uncorrected errors since the last reset, no row or page pending,
// none that failed, and no recovery action. A figure that the card does not have is not looked
// at.
//
// The uncorrected count and a pending remap are not faults by themselves. Both remain after a
// contained error, and the GPU works on. If they counted, each contained error would make a
// GPU unhealthy.
//
// # What proves a reset
//
// If a fault asks for a reset, it does not end without one. Silence proves nothing: a GPU whose
// system processor hangs reports no errors, and programs still hold it. Since the last
// complaint, any of these proves a reset:
//
//   - The machine was started again ([Monitor.Restore]).
//   - The driver was loaded again (Reading.Load).
//   - The driver asked for a reset or a reboot, and now asks for nothing (gpu.Health.Recovery,
//     from R550 on). If it never asked, that proves nothing.
//   - The fault's own sign has gone. This proves it for that fault alone. Memory: the count of
//     uncorrected errors is zero (nvidia-smi -p 0 clears it too). Remap-failed: there is a spare
//     row. Lost: the driver has the GPU again. Recovery: the driver asks for nothing, since Xid
//     154 only reports that its action has changed.
//   - An Xid named no GPU, and the driver asks for nothing on this one: it meant another GPU.
//   - The agent or an operator reports a reset ([Monitor.WasReset]).
//
// The records contain what was seen of these signs, since mostly a GPU can only be reset while no
// agent has it open. A figure that the driver cannot report is neither set nor gone.
//
// # Flapping
//
// A complaint after a clean reading doubles the hold of that fault, up to 16 times, if the last
// complaint was less than an hour ago. Complaints without a clean reading between them are one
// fault, and only postpone its end.
//
// # Hanging is not a fault
//
// A reading that timed out changes no verdict: a busy driver is slow for many reasons, and the
// containers run on. [Monitor.Waiting] reports it. A missing driver makes every known GPU
// unhealthy. That leaves no trace once the driver is back, since the cards were not at fault.
//
// # Memory
//
// [Monitor.Records] and [Monitor.Restore] carry faults over a restart, so that a restart of the
// agent or the kubelet clears no fault. A reboot resets every card. After it, only a failed
// remap is remembered, until the driver reports otherwise.
//
// Memory is bounded. There is one fault for each class and instance. GPUs that are known only
// from events are few, and the next reading that does not list them drops them.
//
// # Limits
//
// The package does not know how a reading is done, or what a device or a pod is, and it repairs
// nothing.
package health
