// SPDX-License-Identifier: Apache-2.0

// Package burst shows Jobs on two sites, on-prem and a cloud: on-prem first, then the cloud,
// and back. The sites are two real nodes of one Kubernetes with the agent on both (tests/lab),
// queues are those that `gpu-agent export kueue` writes from that cluster, and the real Kueue
// decides. Only the driver is emulated.
//
//	c := &burst.Cluster{}
//	for _, s := range c.Steps(kit, "burst", true) { err = s.Run(ctx) }
//	err = c.Set(ctx, burst.Checks)
//	record, err := c.Run(ctx, burst.Full.Draw(), 6*time.Minute, nil)
//	counts := record.Count()
//	picture := record.Plot("…", burst.Has)
//
// # Arms
//
// An [Arm] is a way to have Kueue decide: [Quota] by sums alone, [Topology] by what single nodes
// have allocatable, [Checks] with the placer's admission checks, and [Claims] by quota alone with GPUs that go through dynamic resource allocation. A [Load] is
// drawn from a seed, so each arm has the same Jobs.
//
// # What is measured
//
// A [Record] is made of what the API server says of workloads and pods, and of which GPUs of the
// cloud somebody has a part of, by the word of the agent there, twice a second. [Record.Count] is
// pure: Jobs that were admitted to on-prem and whose pod did not run there within a minute, pods
// that the kubelet refused, GPU memory held on-prem over time, and for how long cloud GPUs were
// paid for, which a GPU is while any part of it is held.
//
// # What keeps room idle
//
// [Record.IdleAt] gives each idle GiB on-prem one cause, out of a closed set: what kept a Job from it that
// was there to use it. A cause is looked for in this order, and a Job that would fit is counted in, so that
// what is left for the next is what it would find:
//
//	begins, ends, awaited, returns           it is somebody's already, or still
//	asked, quota, later, barred, untried     a Job that waits fits
//	going, movable, settled                  a Job fits that has gone to the cloud
//	apart, small, unwanted                   nobody fits
//
// So "small" on a GPU of which 39 GiB are left and wanted by two Jobs of 30 GiB is 9. [IdleTable] adds them up, and
// the CSV of [Record.IdleCSV] has them moment by moment. A sample is taken within some 100 ms and not at one
// instant, so a Job can stand in it as it stood a moment before.
//
// # What it is measured against
//
// A planner that knows all Jobs and run times beforehand, and may let each wait for a minute, as
// arms may. How little it has to pay for is too hard to say exactly. [Bound] is what no plan is
// below, by a greatest flow, and [Planned] what the best of many plans comes to. In small cases,
// where everything can be tried, the optimum is between them, and mostly Planned.
//
// [Record.Fill] has the two figures by which on-prem is seen to fill first, for a plan at each of [Waits]: what
// on-prem held while anything was paid for in the cloud, as a part of what the plan holds there in the same
// seconds; and what was paid, over what the plan pays. A plan's pods take no time to start and to end.
//
// # In virtual time
//
// Pods that take seconds to start and to end are much of a run of 15 s, and little of one of an hour. [Hours]
// is a load of such runs, and takes ten hours. The tests run it, and [Full] beside it, in virtual time
// (testing/synctest), with the product's own door to Kueue, its loop and checks (internal/kueue), and the books as
// they hear of nodes and pods (internal/fleet, internal/placer). Models stand for the rest: Kueue's queue, its
// scheduler and the way of a workload and its Job through quota, checks and eviction; the scheduler, which asks the
// placer; and nodes that choose devices as the agent does (pkg/mig, pkg/timeslice) and tell of them when it would.
//
// The alternative was the real programs with a clock that runs faster, by a Go runtime that is built for that. With
// it ten hours take ten minutes at best, on a machine with nothing else to do; a webhook's ten seconds are a sixth
// of one; and each run is another. In virtual time they take five seconds, and two runs are the same to the last
// sample, so that a change of the product shows in the figures as what it is. The price is that Kueue is what its
// model says. The model is small and names the files that it is made from. It was compared with real nodes and the
// real Kueue, which ran Full with five seeds, on two cores that others used too:
//
//	                                   real nodes                    virtual time, the mean of four runs
//	paid, GPU·s                        747  626  627  384  693       746  618  614  369  689
//	held on-prem, GiB·h                4.6  5.5  6.5  5.7  4.5       4.2  5.6  5.5  5.3  4.4
//	of what a plan holds, patience 0   90 % 81 % 97 % 91 % 83 %      83 % 80 % 84 % 83 % 79 %
//	idle while paid, all seeds, GiB·s  small 21,900, unwanted 12,900, apart 7,000, movable 6,800, ends 3,600,
//	  on real nodes                    settled 2,800, begins 2,500, all others 1,500
//	  in virtual time                  small 22,000, unwanted 13,500, apart 8,400, movable 9,200, ends 3,400,
//	                                   settled 3,300, begins 2,700, all others 1,800
//
// Events of the model fell in one order at first, and real nodes showed a mistake of the placer's that needs another
// one. So each step takes a little longer or shorter, by a seed.
package burst
