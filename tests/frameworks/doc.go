// SPDX-License-Identifier: Apache-2.0

// Package frameworks has what the frameworks of users make of pieces of GPUs: for each, the object that a user writes,
// and the pods, Jobs, StatefulSets and Deployments that the framework's controller makes of it. They are in files
// below shapes, one for each framework, and docs/frameworks.md has a table of them.
//
//	for _, s := range frameworks.Shapes(t) {
//		for _, o := range s.Made { … }
//	}
//
// A file begins with the framework's name and, if the object is of a kind of its own, with the module that defines the
// kind and the files in it. The controllers themselves are not run: what they make was written after their sources and
// documents. deployments has a real API server and the placer take the shapes, and tests/e2e runs them on a real node.
package frameworks
