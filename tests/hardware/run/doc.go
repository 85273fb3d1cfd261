// SPDX-License-Identifier: Apache-2.0

// Command run asks a card all that rests on an emulated driver so far, in the time that there
// is. It is the program run of the folder that `make test-gpu-kit` makes:
//
//	dist/test-gpu/run 9m              all of it, in the order of its worth, for nine minutes
//	dist/test-gpu/run -out A 9m       the answers into the folder A
//	dist/test-gpu/run list            the questions
//
// It needs the driver and root, and nothing else. What a question needs beside, as programs of
// NVIDIA's or PyTorch, it looks for, and tells if it is not there. It changes no setting of a
// card, and says so if one has changed.
//
// Its folder has the suite of tests/hardware too, as a program, which holds NVML and caps against
// what the agent relies on.
//
// A question is a function that starts programs, asks NVML, and says yes, no, a number, a name,
// or what kept it from telling (package ask). Most are about one program, programs/talk.c,
// which does with a card what it is told, a line for each: so what goes on in which order is to
// be read in the question. The same questions are put to the emulated driver, in the tests, so that no
// minute on a card is lost to a mistake of ours; one that it cannot answer says why.
package main
