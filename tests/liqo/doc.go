// SPDX-License-Identifier: Apache-2.0

// Package liqo has the placer lend GPUs through the real Liqo (v1.2): its controller-manager,
// webhooks, crd-replicator and virtual kubelet on both sides of a peering, between API servers of
// their own.
//
// A cluster is a control plane of tests/plane with Liqo's programs as processes of this machine.
// They act for the service accounts that Liqo's chart has for them, with the chart's rights, and
// its webhooks are called by the API server. No kubelet runs the Deployment that Liqo makes
// for a virtual node: the test reads it, and starts the program with its arguments. Peering is
// made as users make it, by liqoctl; the network fabric is off.
//
// TestLending has a hollow node at the provider, which needs nothing but processes. The node
// of TestOffloadedPodIsCapped is real (tests/lab), and its own control plane is the provider's: a pod of the
// consumer's takes GPU memory there until it is refused.
//
// It takes two minutes or so beside other tests, most of which the clusters need to come up, and
// so runs in `make soak` alone; -long repeats what is random as often as the soak wants it,
// and runs TestOffloadedPodIsCapped, which is not yet shown to be reliable.
// Without Liqo's programs in the cache both tests are skipped: `cluster build --with liqo`
// makes them.
package liqo
