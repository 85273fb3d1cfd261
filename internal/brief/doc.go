// SPDX-License-Identifier: Apache-2.0

// Package brief limits what the agent reports: how long a text may be, how many names a
// sentence may list, and how often a line may be written to the log.
//
// Most of what the agent reports comes from outside. A partition file may have thousands of
// mistakes, and a GPU hundreds of holders. A program on a GPU can make the driver report an error
// a thousand times a second. The API server refuses a Node with an annotation of megabytes, and
// with it the label that is sent in the same request. A log that is full of one line loses the
// others. So everything that is sent or logged has a bound:
//
//   - [Cut] shortens a text, between two characters. [Text] is the bound for what goes to the
//     API server, the status page and the kubelet.
//
//   - [List] names the first few and counts the rest.
//
//   - A [Ration] logs [Lines] lines of a kind in a [Window]. At its end, the Ration logs how many
//     it has left out:
//
//     10:00:00 GPU event gpu=GPU-3f… kind=xid xid=94
//     …
//     10:01:00 GPU event: more of these were left out gpu=GPU-3f… kind=xid lines=9990
//
// The package does not know what the texts mean. It has no clock: the caller gives one to a
// Ration.
package brief
