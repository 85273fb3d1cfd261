// SPDX-License-Identifier: Apache-2.0

// Command stages is what `make test` runs: every check of the project, one
// stage after the other, from the formatting of a file to pods on a real node.
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
// A stage that fails does not end the run: what builds upon it is skipped, the
// rest goes on. At the end stand a table with the seconds of each stage, what
// was skipped and why (in the words of the test that skipped itself), what
// failed, and a last line
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
