// SPDX-License-Identifier: Apache-2.0

// Package memcap is the arithmetic of memory caps, and the watchdog's judge, which decides which
// containers exceed one.
//
// # Caps
//
// A container that asks for n units of a GPU's memory may use n units of it. That is its cap: a
// number of bytes for each container and GPU. What the driver needs for the container's processes
// counts towards it ([Units], [Replica]). The [Level] of a cap is how strongly it is enforced.
//
// # Verdicts
//
// The watchdog is the level that always exists. Now and then it reads which processes are on a GPU,
// and how much memory each has. The caller says which container each process is in, and what each
// container holds. The judge names the containers that are to be ended:
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
// A wrong verdict ends a program that did nothing wrong. A missed verdict lets another program
// fail. In doubt, the judge prefers to miss one:
//
//   - An offence counts once two samples in a row have shown it, some time apart: 4.7 GiB under a
//     cap of 4 GiB, and 4.7 GiB again 250 ms later. In between, only a sample that clearly shows no
//     offence ends the suspicion. A missing sample, or one without a figure, changes nothing.
//   - A figure that the driver does not know is neither zero nor a number. A container has at least
//     the sum of its known figures, and that can be enough for a verdict.
//   - A tolerance covers what cannot be predicted to the byte.
//   - If the cap changes, suspicion begins anew.
//   - Only containers whose allocations are all known are judged. Processes outside all pods never
//     are.
//   - An intruder is a container on a GPU of which it holds nothing. It must have been one for a
//     while without a break, since its processes may become known before its allocation.
//
// # Shared caps
//
// Containers that share an allocation have its cap together. The judge compares their sum with it,
// and names one of them: the one with the largest excess over what it counts by itself, and of
// equals the one that came last. If there are no counts, or they are false, it names the one with
// the most memory, as the kernel's OOM killer does in a cgroup. The others are judged anew once
// that one has gone.
//
// A container with several shares of a GPU may use their sum. The judge first compares each share
// with the containers that have that share alone, and then the sum with all of them together
// ([Party]).
//
// # PIDs
//
// The driver names processes by PID, and does not report when they began. By the time a PID is
// looked up, the kernel may have given it to another process. So the judge compares ticks of the
// boot clock: each process began at one ([Process.Start]), and each sample has one that is after
// the driver's answer ([Sample.Tick]).
//
// A process counts only if it began before its PID was first listed. One that began after the
// answer is not the one that the driver meant. Nor is one that began during a row of samples that
// all list its PID: the driver goes on listing a dead process for as long as a child of it keeps
// the device open, and meanwhile the kernel may give the PID to another process. The figures of
// such processes are unknown. The judge does not notice a PID that is reused between two samples.
//
// A verdict is some milliseconds old when the caller acts on it. [Verdict.Stands] asks again about
// each process that it rests on.
//
// # Limits
//
// The package does not find processes, containers or figures, and does not end containers. It has
// no clock.
package memcap
