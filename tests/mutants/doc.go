// SPDX-License-Identifier: Apache-2.0

// Command mutants measures what the tests find. It puts defects back that were mended in
// this project's history, one at a time, and runs the stages of `make test` that reach them.
//
//	mutants draw SEED COMMIT    the candidates, in the order of a seed
//	mutants list                the defects, a line each
//	mutants run                 all of them: some hours; -continue goes on where it was ended
//	mutants run 1-caps-03       one
//	mutants run -own            by the tests of the packages that the patches change
//	mutants run -all 1-mig-04   by the stages of make test-all
//
// # How the defects were drawn
//
// The candidates are the commits until 4c0d52c that change the product by at most 400 lines,
// without those whose subjects speak of documents, tests or wording. For each class their
// order is that of the SHA-256 sums of a seed and the commit. Each class was walked in this
// order; a commit was taken if it mended a defect of that class in what the product does, and
// if today's code still does that. defects/D-CLASS.tsv tells of every commit that was looked
// at, and why it was passed. The seeds are "first", for 60 defects, and "second", for 20.
// Whether a test finds a defect played no part: no test was run before all were written.
//
// # What a defect is
//
// A patch in defects, with a head that says what the product does wrong with it and what
// users lose by that. Patches keep the blobs that they were made from, so that they apply
// after lines have moved; one that applies no longer has to be written anew, by hand, with
// the same mistake in today's code.
//
// A defect is found if a test fails. Tests that fail now and then by themselves would find
// everything, so the tests are named in the results.
package main
