// SPDX-License-Identifier: Apache-2.0

// Package capped holds programs to memory caps on a GPU of this machine, with the library that
// the agent puts into containers and the edits that it writes for them. The containers are those
// of package capsule.
//
//	c, err := capped.Open(ctx, capped.Config{Driver: opts, Libraries: built, Dir: dir})
//	defer c.Close()
//	r, err := c.Room(ctx, "name", 8<<30)
//	defer r.Close()
//	p, err := r.Start(capsule.Program{Args: …, Env: r.Env})
//
// Beside each container the driver is read as the agent reads it, and every few milliseconds it
// is asked what the container's processes have: [Room.Seen] is what it said.
package capped
