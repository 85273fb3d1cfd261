// SPDX-License-Identifier: Apache-2.0

// Package memcap proves that the in-process memory cap holds: a container that
// was granted an amount of a GPU's memory gets that amount, all of it and no
// more, whatever it is that asks.
//
// # The promise
//
// The cap's library stands at the driver library's path in a container and
// counts what its processes allocate. Two things are promised of it. Never
// over: what all processes of the container have on the GPU, by the driver's
// account, is at no moment more than the cap. Never refused with room left: a
// request fails only if it would not have fitted. Both have to hold whatever
// call takes the memory, by whatever door the program came to the library, and
// however many threads and processes do so at once, also while some of them are
// being killed.
//
// # How it is tested
//
// Nothing of the product is told that it is tested. A machine with emulated
// GPUs (package capsule) has containers with the mounts that the agent writes
// into an allocation's CDI file; in them runs the probe, a program that knows nothing
// but CUDA's API; beside them a reader does what the agent does at its
// interval. The judge of "never over" is the emulated driver itself, which
// keeps the peak of what was allocated on each GPU.
//
// [TestDoors] is the table: every call × every door × {alone, alone with the
// usual environment, eight threads, a computing parent with children by
// fork+exec, 64 processes by fork and by exec}. In each cell all workers take
// until each has been refused, give half back, take again, and give all back.
// Room left, at the end of each of both, is less than one request; where requests
// are smaller than the driver's blocks, one block more for each worker, and the
// second time several processes may have holes that only they could fill.
// While others' requests are under way a refusal counts as justified if it was
// so with all of them granted. What the library cannot hold, and what is not
// GPU memory, stands in a list with the reason; a row of the list that holds,
// or one outside it that does not, fails the test.
//
// [TestScenarios] is a second table: programs of a few lines that the cap once
// failed, each by the name of the defect. The probe has a routine for each row;
// each is run under every behaviour of the driver that the documentation allows
// (GPU_EMULATOR_CUDA, package emulator/lib), and once more on a card as large as
// the cap and without one: what that card does not refuse, the cap may not refuse
// either. A row that fails as yet says so, and has to go on failing until the
// mark is removed.
//
// [TestWalk] is calls at random by threads of two processes under one cap, which
// export to each other: 6,000 steps, 100,000 in the long form, each judged by the
// emulated driver, which is asked before each request whether a card of the cap's size
// would grant it. How far the refusals hold stands at the test.
//
// [TestPrograms] is programs as users have them (package programs): allocators in
// the shape of PyTorch's, RMM's and JAX's, NCCL's and vLLM's processes. Each is at
// the edge of its cap, with the agent's own watchdog on at its own pace, and beside
// it stands the same program on a bare card as large as the cap. It must not be
// ended, nor hang, nor be told more often that there is no memory, nor be slower
// than nine tenths. Speed is judged in the long form alone.
//
// [TestSharesOfOneGPUAddUp] and [TestSharesWhileTheirUsersDie] have containers with several
// shares of one GPU, and others with one of these: by steps, and in rounds with kills.
//
// [TestMPSRings] is a table of what can go wrong with a share of the multiprocessors under MPS, with the
// product's own supervisor of daemons and emulated programs of MPS: the library in the process, the
// card's compute mode and an observer outside are each tried with the other two off.
//
// The other tests are one property each; their comments say which.
//
//	go test ./tests/memcap                short form; about five minutes on two cores
//	go test ./tests/memcap -v             also prints the table, seeds and figures
//	go test ./tests/memcap -long          1,000 kills, 1,000 ways to spoil a page, ten minutes for each program,
//	                                      walks of 100,000 steps
//	go test ./tests/memcap -each 5m       five minutes for each program
//	go test ./tests/memcap -seed 7        the randomness of a run that failed
//
// # What it does not know
//
// Times, but for the programs' as a whole: what the cap costs is measured by the
// benches. Raw ioctls and a
// tenant's own copy of the driver's library, but that the second one gets past
// the cap: the watchdog's tests are about these.
package memcap
