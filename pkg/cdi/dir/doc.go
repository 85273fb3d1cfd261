// SPDX-License-Identifier: Apache-2.0

// Package dir keeps allocations' CDI specs as files in a directory that it shares
// with others.
//
// Container runtimes watch that directory (usually /var/run/cdi) and read any
// file that ends in .json or .yaml; NVIDIA's toolkit and other vendors' agents
// may write there too. So a [Dir] owns names, not the directory: of all that
// lies there it lists, writes and removes only <domain>-gpu-<key>.json, the
// names that cdi.FileName gives, and its own temporary files.
//
// A runtime may read at any moment, and a file's presence is the gate by which
// an allocation's container may start. A file is therefore whole or absent: it is
// written under a temporary name that ends in neither .json nor .yaml, read
// back through the CDI library exactly as a runtime will read it, flushed to
// the disk and renamed. Writing what is already there changes nothing, so
// that a caller may repeat it without waking the runtimes that watch:
//
//	d, err := dir.Open("/var/run/cdi", "example.com")
//	err = d.Write(key, spec)   // exists now, or existed already
//	keys, err := d.List()      // which allocations have a file
//	err = d.Remove(key)        // does not exist any more, or never did
//
// Names are resolved inside the directory only, and a symbolic link that lies
// at one of our names is replaced or removed as a link, never followed: whoever
// may write there cannot make the agent write elsewhere.
//
// The package does not know what a spec says, which allocations live, or when a
// file may go.
package dir
