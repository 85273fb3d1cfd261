// SPDX-License-Identifier: Apache-2.0

// Package ask puts questions to a card that is there for minutes.
//
// A [Question] is a sentence whose answer is yes, no, a number, one of several names, or that
// it could not be told. [Run] asks one after the other, in the order of their worth, until its
// budget of time is used:
//
//	r := ask.Run{Out: "out", Budget: 9 * time.Minute, Questions: list, Self: []string{self, "one"}}
//	outcome, err := r.All(ctx)
//
// Each question is asked by a process of its own ([One]), which may start others. When it has
// answered, or its time is over, whatever it started is ended, also what made itself a daemon.
// So a question that hangs costs its own time and nothing else.
//
// What a question learns is written as it comes, a line of JSON for each call, into a file of
// its own in the folder. A run that is cut off keeps all that it had: the lines of a file are
// whole, but for the last one perhaps, which [Read] leaves out. No line has a GPU's UUID, a
// serial number or the machine's name ([Scrub]), so a folder can be given to others as it is.
package ask
