// SPDX-License-Identifier: Apache-2.0

// Package autoscalers holds what Cluster Autoscaler and Karpenter make of a node against
// what the agent writes on it: whether the node is ready, may be filled, and may be taken
// away. The rule that the documentation shows for the Node Readiness Controller is held
// against that controller's.
//
// Their rules are read by hand from their sources. The files in testdata name repository,
// version, file and line of each rule and have its words; the tests take prefixes, names and
// figures from there, apply the rules to Nodes as the agent leaves them over the life of a
// node, and say what follows. To import the programs would bring far more than it says: each
// of the rules is one line.
//
// The agent's side is not written down again. The resources' names, the annotation and the
// taint's key come from the program and the manifests. When one of them changes, so does
// what an autoscaler makes of the node, and a row here fails.
package autoscalers
