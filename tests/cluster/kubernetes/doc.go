// SPDX-License-Identifier: Apache-2.0

// Command kubernetes is the Kubernetes of the test node in one program:
// kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl,
// chosen by the name it is called by, as busybox does it. The five share most
// of their code, so one link of them takes a fifth of the time and of the disk.
//
// It adds nothing to them: each name runs upstream's own command. It stands in
// a module of its own, with a replace for every staging module, so that no
// version of Kubernetes' internals reaches the product's go.mod.
package main
