// SPDX-License-Identifier: Apache-2.0

// Package dra serves a driver of dynamic resource allocation to the kubelet: it prepares
// the ResourceClaims of pods that are to start here, gives them back, and says how the
// driver's devices are. It is the only package that knows these protocols: the kubelet's
// plugin registration (v1), DRAPlugin (v1) and DRAResourceHealth (v1 and v1alpha1).
//
//	s, err := dra.New(dra.Options{Name: "gpus.example.com", Driver: driver, Logger: log})
//	go s.Run(ctx)
//
// # Registration
//
// The kubelet finds a driver by a socket in its registry directory, asks it there who it
// is, and tells it whether it is registered. One socket serves everything: the kubelet
// goes on calling where it has found it. So there is nothing to be done when the kubelet
// restarts: it looks through the directory and registers the driver again. It has
// deleted all ResourceSlices of its node by then, so [Options].Registered is the moment
// at which they are to be written: earlier they would be lost, and a pod that comes before
// the driver is registered waits for a minute. A socket whose file is gone is made anew,
// and a newer process takes the place over. Thirty seconds after the last socket has gone
// the kubelet deletes the driver's slices.
//
// While there is no socket, or nobody listens at it, each call of the kubelet fails at once,
// and it tries again after a minute or more. So a server should run as soon as a process
// begins that will have claims, and until it has none to prepare: its Driver may wait, and
// the kubelet's call waits with it. Nothing is gained by leaving the socket's file to the
// next process: that one's makes the kubelet register the driver anew all the same.
//
// # Claims
//
// The kubelet names claims and nothing else; what they were allocated is in the API. It
// calls once for all claims of a pod that are not prepared yet, and gives the call 45 s.
// The claims of a call are prepared at the same time. A claim that is not ready by then
// had better wait than fail: after a failure the kubelet tries again a minute later. So
// [Driver].Prepare may take [Patience], and what it waited for is in its error, which
// reaches the pod's Events. Prepare and Unprepare may come again for a claim, also after
// a restart of the kubelet, which then adds to what it has: the answer has to be the same.
//
// # Health
//
// The kubelet shows in a pod's status how its devices are, and believes what it heard for
// as long as the message says. The whole list is sent when it changes, and again in time.
//
// The package does not know what a device is, who holds it, or the API server.
package dra
