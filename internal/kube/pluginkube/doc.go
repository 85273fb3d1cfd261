// SPDX-License-Identifier: Apache-2.0

// Package pluginkube connects the plugin for kubectl to the API server, with the credentials of the
// person who runs it. internal/kube has what all clients share.
//
//	client, err := pluginkube.Open(pluginkube.Options{Domain: "example.com", ResourceDomain: "example.com"})
//	…
//	facts, err := client.Look(ctx, pluginkube.Subject{Kind: "pod", Namespace: "train", Name: "job-1"})
//	fmt.Println(facts.Explain().Cause)
//
// [Client.Look] reads what a diagnosis follows from. It fails only if the subject itself cannot be
// read. What else the person may not read is in [diagnosis.Facts.Unseen], since the author of a pod
// sees little more than the pod. [ViewRules] lists what `kubectl gpu` and `why` read beyond the
// author's own namespace, and [OperatorRules] what the other commands need. Tests compare the
// manifests with both.
//
// # The agent's pages
//
// An agent serves its status and its answers only to connections from within its pod. So
// [Client.Tunnel] forwards a port to the pod, by the API server and the kubelet, and returns an HTTP
// client that speaks through it. Nothing listens on the person's own machine, where other users
// could connect, too. No command is run in the pod.
//
// Each request has a time limit, and each answer a bound in size: a node that was taken over must
// not be able to fill the memory of the machine where an operator works.
//
// The package does not know what a diagnosis or a page says.
package pluginkube
