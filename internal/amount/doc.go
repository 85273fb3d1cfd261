// SPDX-License-Identifier: Apache-2.0

// Package amount refuses quantities that take too long to read.
//
// resource.ParseQuantity works out every digit: it takes 5 s for the text "1e-9999999", and
// minutes and gigabytes for a longer exponent. The API server bears that itself for the amounts
// of its own kinds, and sends them on in their canonical form. Those in objects of a
// CustomResourceDefinition (Kueue's Workloads, Liqo's ResourceSlices) come as somebody wrote
// them: the pattern that their definitions have lets any exponent through.
//
//	err := amount.Check(text)      // before resource.ParseQuantity
//	err := amount.Check(object)    // before decoded JSON that has amounts is made a typed object
package amount
