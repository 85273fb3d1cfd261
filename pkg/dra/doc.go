// SPDX-License-Identifier: Apache-2.0

// Package dra serves a driver of dynamic resource allocation (DRA) to the kubelet. The kubelet
// calls it to prepare the ResourceClaims of pods that are to start on this node, to give claims
// back, and to learn the health of devices. No other package knows these protocols: the
// kubelet's plugin registration (v1), DRAPlugin (v1) and DRAResourceHealth (v1 and v1alpha1).
//
//	s, err := dra.New(dra.Options{Name: "gpus.example.com", Driver: driver, Logger: log})
//	go s.Run(ctx)
//
// # Registration
//
// The kubelet finds a driver by a socket in its registry directory. It asks the driver there
// for its name, and tells it whether it is registered. The server has one socket for
// everything, and the kubelet makes all its calls there.
//
// A kubelet that restarts looks through the directory and registers the driver again, so the
// server need not do anything. By then the kubelet has deleted all ResourceSlices of its node.
// So the driver should write them when [Options].Registered is called. Written earlier, they
// would be lost, or would bring pods before the driver is registered, and such a pod waits for
// a minute.
//
// The server makes its socket anew if the file is gone. If a newer process has taken the path,
// that process serves it. The kubelet deletes the driver's slices thirty seconds after the last
// socket is gone.
//
// While no server listens, each call of the kubelet fails at once, and the kubelet tries again
// after a minute or more. So run a server from the start of a process until there are no
// claims left to prepare: its Driver may wait, and the kubelet's call waits with it. It would not
// help to leave the socket's file to the next process, since the kubelet registers the driver
// anew anyway when that process makes its own.
//
// # Claims
//
// The kubelet passes the names of claims only. What they were allocated is in the API. It makes
// one call for all claims of a pod that are not prepared yet, and gives the call 45 s. The
// server prepares the claims of a call at the same time.
//
// If a claim is not ready, it is better to wait than to fail, since the kubelet tries again only
// after a minute. So [Driver].Prepare may take as long as [Patience]. Its error should tell what
// it waited for, and reaches the pod's Events. Prepare and Unprepare may be called again for a
// claim. A kubelet that has restarted adds the answer to what it has, so the answer must be the
// same each time.
//
// # Health
//
// The kubelet shows the health of devices in the status of their pods. It believes a message
// for as long as the message says. The server sends the whole list at each change, and again
// before that time is over.
//
// # Limits
//
// The package does not know what a device is, who holds it, or the API server.
package dra
