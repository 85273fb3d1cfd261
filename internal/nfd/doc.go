// SPDX-License-Identifier: Apache-2.0

// Package nfd passes the node's labels to Node Feature Discovery, for clusters in
// which only Node Feature Discovery writes labels.
//
// Node Feature Discovery's worker reads every file of one directory on the node,
// a minute apart by default, and its master sets the labels that they name and
// removes those that they no longer name. A file has a line for each label,
// "example.com/gpu.count=8". The agent has one there, named after itself:
//
//	err := nfd.Write(nfd.Dir, nfd.Features{Labels: own, Guests: nvidia, Node: labels})
//	…
//	err = nfd.Remove(nfd.Dir) // with the agent's other traces
//
// The worker may read at any moment, so a file changes by a rename, and while it
// is written it has a name that begins with a dot, which the worker passes over.
//
// # Guests
//
// Where several files name one label the worker takes the last file's value, and
// the agent's file name sorts after most. So labels that other programs are known to
// write, those of GPU Feature Discovery above all, are guests: one that another
// file names is left out, and so is one that the Node has although the agent's
// file does not name it, because then somebody else has set it. A program that comes
// later and does not write a file here is not noticed; whoever runs one tells the
// agent not to write its labels.
//
// The package does not know what a label means.
package nfd
