// SPDX-License-Identifier: Apache-2.0

// Package nfd passes the node's labels to Node Feature Discovery. It is for clusters that let no
// other program write labels.
//
// On each node, a worker of Node Feature Discovery reads every file of one directory, once a minute
// by default. Its master sets the labels that the files name, and removes those that they no longer
// name. A file has a line for each label: "example.com/gpu.count=8". The agent has one file there,
// with its own name:
//
//	err := nfd.Write(nfd.Dir, nfd.Features{Labels: own, Guests: nvidia, Node: labels})
//	…
//	err = nfd.Remove(nfd.Dir) // with the agent's other traces
//
// The worker may read at any moment. So the agent writes a temporary file and renames it. The
// worker ignores the temporary file, since its name begins with a dot.
//
// # Guests
//
// If several files name one label, the worker takes the value of the last file, and the agent's
// file name sorts after most others. So labels that other programs are known to write, above all
// those of GPU Feature Discovery, are guests. Write leaves out a guest that another file names. It
// also leaves out a guest that the Node has and the agent's file does not name: another program has
// set it. Write does not notice a program that comes later and has no file here; with such a
// program, tell the agent not to write these labels.
//
// The package does not know what a label means.
package nfd
