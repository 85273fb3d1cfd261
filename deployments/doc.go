// SPDX-License-Identifier: Apache-2.0

// Package deployments holds the manifests that put the agent on a cluster's
// GPU nodes, for kustomize, and the tests that keep them honest.
//
//	base/                       namespace, RBAC, partitions, DaemonSet
//	overlays/driver-container/  the driver is in a container of its own
//	overlays/runtime-class/     no privileged pod, by NVIDIA's container runtime, which is closed to others
//	components/dra/             for base and driver-container: dynamic resource allocation, from Kubernetes 1.36.2
//	components/evict/           for any of these: pods that offend again and again are evicted
//	components/mps-detach/      for any of these: clients of MPS of pods that are deleted are detached before their end
//	components/monitoring/      for any of these: what Prometheus and Grafana take, with alerts and boards
//	components/network-policy/   for any of these: only monitoring connects to the agent's port
//	components/nfd/             for any of these, and the cleanup: labels by Node Feature Discovery
//	placer/                     the placer, one for a cluster, with a directory for each of its other doors, and one for monitoring
//	examples/                   what pods of Jobs, notebooks, inference and Ray ask for (docs/frameworks.md)
//	chart/                      the same for Helm, which reads the files above by symbolic links (docs/helm.md)
//	cleanup/                    takes the agent's traces off the nodes
//	image/                      files of the container image that are not built
//
// The rule for a manifest here: whatever takes a right (a privilege, a
// namespace of the host's, a path, a mount, a verb) has its reason as a comment
// that begins with "Reason:", right above it. A reader should be able to judge
// each without reading the program. The tests ask for the comments, hold the
// verbs against the list in internal/kube, the rights and the admission policies
// against a real API server, the environment against the program's flags, the
// probes against its pages, and the sample partitions against inventories of
// well-known nodes. A right that not every cluster wants to give is a component:
// the base does without.
//
// The tests share one API server, which each finds as it was when it began, and gpu-agent and what
// kubectl makes of a kustomization are built once. So they run one after the other.
//
// There is no Go here but the tests. What differs between clusters belongs into an overlay
// of the cluster's own, or into the values of the chart. The chart's templates have no
// objects of their own: they put the files together as kustomize does, and write the values
// in. The tests hold what Helm makes against what kubectl makes, for each switch and all.
package deployments
