// SPDX-License-Identifier: Apache-2.0

// Package amount refuses quantities that take too long to parse.
//
// resource.ParseQuantity computes every digit. It takes 5 s for the text "1e-9999999", and minutes
// and gigabytes for a longer exponent. The API server parses the amounts in its own kinds itself,
// and sends them on in their canonical form. Amounts in objects of a CustomResourceDefinition
// (Kueue's Workloads, Liqo's ResourceSlices) arrive as their authors wrote them: the pattern in
// those definitions allows any exponent.
//
//	err := amount.Check(text)      // before resource.ParseQuantity
//	err := amount.Check(object)    // before decoded JSON with amounts becomes a typed object
package amount
