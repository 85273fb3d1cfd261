// SPDX-License-Identifier: Apache-2.0

// Package recorded makes the inventories under tests/testdata, of nodes of every
// kind of card that knows MIG and of machines of every shape, and holds them in step
// with the schema.
//
// An inventory there is what `gpu-agent inventory -o json` prints on such a
// node, read through the driver edge from the emulated driver, whose tables say
// where each figure comes from. Files named -mig have instances, some of them
// busy; the names of their holders are made up here. After a change of the
// schema, of the driver edge or of the tables,
//
//	go test ./tests/recorded -update
//
// writes them anew, and the difference is for a person to read.
//
// They serve whatever takes an inventory: check, plan, tests of partition files.
// They are no proof of what is legal on a card, since the emulator judges by the
// same tables: tests/testdata/inventories has the published ones, and a test of
// internal/config holds the two against each other.
package recorded
