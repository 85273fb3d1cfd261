// SPDX-License-Identifier: Apache-2.0

// Package memcap is the arithmetic of memory caps, and the watchdog's judge, which
// decides who exceeds one.
//
// # Caps
//
// A container that asks for n units of a GPU's memory may have n units of it: a
// cap, in bytes, for each container and GPU, with whatever the driver needs for
// its processes inside it ([Units], [Replica]). How strongly a cap is enforced is its
// [Level].
//
// # Verdicts
//
// The watchdog is the level that is always there. It reads now and then which
// processes are on a GPU and what each has; the caller says which container each
// is of, and what each container holds; the judge says which are to be ended:
//
//	judge := memcap.NewJudge(memcap.Policy{})
//	processes := memcap.Merge(driversLists)
//	tick := bootTicks()
//	for i := range processes {
//		processes[i].Container, processes[i].Start = ownerOf(processes[i].PID)
//	}
//	sample := memcap.Sample{At: asked, Tick: tick, GPU: uuid, Processes: processes}
//	for _, v := range judge.Judge(sample, holdings, known) {
//		if v.Stands(isStillTheSame) {
//			end(v.Container)
//		}
//	}
//
// A wrong verdict ends a program that did nothing wrong, and a missed one lets another
// program fail. Where the judge cannot tell, it prefers to miss one:
//
//   - An offence counts once it was seen in two samples in a row that are some
//     time apart: 4.7 GiB under a cap of 4 GiB, and 4.7 GiB again 250 ms later.
//     In between, only a sample that clearly shows no offence ends the suspicion. A
//     missing sample, or one without a figure, changes nothing.
//   - What the driver does not know is neither zero nor a number. The known
//     figures of a container are the least that it has, and can be enough for a verdict.
//   - A tolerance covers what cannot be predicted to the byte.
//   - A change of the cap begins a new suspicion.
//   - Containers that share an allocation have its cap together, and their sum is judged.
//     One of them is named: the one with the largest excess over what it counts by
//     itself, and of equals the one that came last. Where nobody counts, or the counts are
//     false, that is the one with the most memory, as the kernel's OOM killer chooses in a
//     cgroup. What the others have is judged anew when it is gone.
//   - A container with several shares of a GPU may have their sum. Those who have one of
//     these alone are judged by that one first, and all of them together by the sum ([Party]).
//   - Only containers of which everything is known are judged. Processes of no
//     pod never are.
//   - An intruder, a container on a GPU of which it holds nothing, is one only
//     after it was seen as that without a break for a while: its processes may be
//     known before its allocation is.
//
// # PIDs
//
// The driver names processes by PID and says nothing of when they began, so by
// the time a PID is looked up it may be another process's. Every process began at
// some tick of the boot clock ([Process.Start]), and every sample has a tick
// after the driver's answer ([Sample.Tick]). A process that began later is not the
// one that the driver meant. The same holds for all samples of a row in which that PID
// was listed without a break: the driver can go on listing a PID whose process is
// dead, for as long as a child of it keeps the device open, and the kernel may
// give the number to another process meanwhile. So a process counts only if it began
// before its PID was first listed. The figures of others are unknown. What remains
// is a PID that is reused between two samples.
//
// A verdict is some milliseconds old when it is acted upon; [Verdict.Stands] asks
// again for each process that it rests on.
//
// The package does not know how a process, a container or a figure is found, nor
// how a container is ended. It has no clock.
package memcap
