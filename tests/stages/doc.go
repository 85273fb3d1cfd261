// SPDX-License-Identifier: Apache-2.0

// Command stages runs the checks of the project, from the formatting of a file to pods on a
// real node. There are three sets of them:
//
//	make test       stages          what every change must pass
//	make test-all   stages --all    all that is known, once: before a release
//	make soak       stages --soak   the long counts, and minutes of fuzzing for each invariant
//
// Each has the stages of the ones before it. Some stages look at more in a larger set: in
// make test the commands of these have the flag -short, and in make soak -long.
//
//	stages lint unit                 these, and nothing that they build upon
//	stages --all e2e                 one as make test-all has it
//	stages --changed REV             what make test-all has beyond make test, as far as it has changed
//	stages --changed REV --list      which these are, and why
//	stages --list                    what there is
//
// # What has changed
//
// A stage has changed since a commit if one of its inputs differs, or its commands. The
// inputs are the files of each package that a command names, its tests, and the packages that
// these import, with what lies beside the sources (embedded files, C sources, testdata); go.mod
// and go.sum of their modules; each file, directory or package of the checkout that a string
// in the code of a test names, which is how tests build programs and read documents; what the
// stage declares to read; and the inputs of the stages that it builds upon. Imports are read
// from the sources, whatever their build constraints. The commands of a commit are told by
// its own program; where that is too old to tell, all count as changed.
//
// # How they run
//
// A stage is a list of commands. Most are builds, which do nothing where the
// cache has the result; the others are `go test -json`, read as they run: a
// package shows when it is done, a test that takes longer than a few seconds
// when it is, a failure with all that it printed.
//
// Stages run in three lanes at the same time, in each of them one after the other. In
// two are those that need a test node, each lane a node of its own. They mostly wait. The
// others run beside them with a lower priority, as there may be no more than two
// processors; they keep to namespaces, directories and ports of their own. A stage begins
// when those that it builds upon have ended, in any lane. A lane without stages left takes
// those that another has not begun. The tests of the node itself look
// at all that is on the machine, so the second node begins behind them.
// What a stage prints stands together: that of the stage which began first is
// shown as it comes, that of the others when it is their turn; a failure among
// them is told of at once.
//
// In a stage with a real node, a browser or Kueue, whose timing is not ours, a test that fails
// is run once more when all lanes are done, alone. If it passes then, it is flaky: the run
// passes, the last table says so, and both outputs are kept. Two flaky tests are a failure.
// Elsewhere nothing is run again: where nature is rare, rare is the bug.
//
// A stage that fails does not end the run: what builds upon it is skipped, the
// rest goes on. At the end stand a table with the seconds and the processor time of each stage, of the
// test nodes that it ran (they outlive the program that starts them, so their time is
// counted apart), and of the whole, what was skipped and why (in the words of the test that skipped
// itself), what failed, and a last line
//
//	812 passed, 0 failed, 3 skipped
//
// It counts tests and their subtests; a stage or a package that failed without
// a failing test in it counts as one failure, and a stage that was not run as
// one skip. The exit status is 1 if anything failed.
//
// The whole output of each stage is kept below the cache, in logs/.
//
// The program knows which checks there are and in which order, not what they
// check.
package main
