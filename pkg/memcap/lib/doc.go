// SPDX-License-Identifier: Apache-2.0

// Package lib is the memory cap inside a container: two small C libraries that
// stand where programs expect the driver's, the pages by which the agent tells
// them their limits, and the reader of what they count.
//
// The essay is completed below as the parts come to stand.
package lib
