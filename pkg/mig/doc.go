// SPDX-License-Identifier: Apache-2.0

// Package mig knows NVIDIA's Multi-Instance GPU as arithmetic: what a profile
// is called today, and with planning what can stand beside what. It touches no
// hardware; pkg/gpu/nvml does, and hands over plain values of pkg/gpu.
//
// A profile's name says how large an instance is:
//
//	1g.10gb          one compute slice, 10 GB of memory
//	1g.10gb+me       the same with the media engines, of which a card has few
//	1g.24gb-me       without any media engine
//	1g.24gb+me.all   with all of them
//	4g.96gb+gfx      able to do graphics
//	1c.3g.40gb       a compute instance of one slice inside a GPU instance of three
//
// The grammar is [<c>c.]<g>g.<gb>gb[(+|-)<attribute>]. [Parse] is strict: one
// spelling for one profile, so that a name can be a map key, a resource name
// and part of a device ID. What it accepts it prints back letter for letter.
//
// The memory in a name is the vendor's round figure, not a size. Names are
// never computed from sizes: arithmetic made 7g.79gb of the driver's 7g.80gb,
// and boards that share a PCI id carry different names. Which profiles a GPU
// has, and which attributes exist, is the live driver's word in
// gpu.MIG.Profiles; this package only knows how such a name is written.
//
//	n, err := mig.Parse("1g.10gb+me")
//	n.Slices      // 1
//	n.Resource()  // "mig-1g.10gb.me"
//
// The package refuses to know models of GPUs, resource domains and who holds
// an instance.
package mig
