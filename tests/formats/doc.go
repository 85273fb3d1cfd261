// SPDX-License-Identifier: Apache-2.0

// Package formats holds later versions to what earlier ones have written.
//
// Each folder of testdata is a version, with one file or more of each kind that the version writes and a later
// one reads: the agent's state directory, CDI files with the records of allocations, a GPUNode, a partition file.
// Below read/ is what that version itself read from them, as JSON.
//
//	testdata/v0.1.0/state/state.json          faults, layouts, instances, GPUs
//	testdata/v0.1.0/state/allocations.journal grants of each kind of piece, tier and front-end
//	testdata/v0.1.0/state/usage/…             the account, packed and not
//	testdata/v0.1.0/state/park/…              parked containers
//	testdata/v0.1.0/state/mps/want.json       what MPS daemons shall be
//	testdata/v0.1.0/state/cap/set/…           what hooks came to
//	testdata/v0.1.0/cdi/…                     CDI files, with the same records
//	testdata/v0.1.0/gpunode.json              what a node tells the placer, kubectl gpu and others
//	testdata/v0.1.0/partitions.yaml           a ConfigMap's file with each mode and key
//	testdata/v0.1.0/read/<kind>.json          what the version read from them
//
// A later version reads each file without a complaint, and loses nothing: it finds all of read/, by the same names
// and with the same values. It may find more.
//
// The folder of the version that is being worked on (working) follows today's program: where the two differ, a
// test says so, and
//
//	go test ./tests/formats -record
//
// writes the folder anew. Look at the difference before you commit it. Once the version has its tag, its folder
// never changes: name the next version in working, and record that.
//
// Pages of memory caps are bytes at places, and pkg/memcap/lib has those of each version itself. Whether an agent as
// a whole goes on from what an earlier one has left, under load, is for TestUpgradeFromTheFirstRelease of
// tests/crash.
package formats
