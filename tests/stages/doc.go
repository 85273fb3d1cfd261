// SPDX-License-Identifier: Apache-2.0

// Command stages is what `make test` runs: every check of the project, from the
// formatting of a file to pods on a real node.
//
//	stages                  all stages
//	stages lint unit        these, and nothing that they build upon
//	stages --soak           all, and minutes of fuzzing for each invariant
//	stages --list           what there is
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
// A stage that fails does not end the run: what builds upon it is skipped, the
// rest goes on. At the end stand a table with the seconds and the processor time of each stage and of
// the whole, what was skipped and why (in the words of the test that skipped
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
