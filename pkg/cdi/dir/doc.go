// SPDX-License-Identifier: Apache-2.0

// Package dir keeps allocations' CDI specs as files in a directory that it shares with others.
//
// Container runtimes watch that directory (usually /var/run/cdi) and read any file that ends in
// .json or .yaml. NVIDIA's toolkit and other vendors' agents may write there, too. So a [Dir] owns
// names, and not the directory. It lists, writes and removes only <domain>-gpu-<key>.json, the
// names that cdi.FileName returns, and its own temporary files.
//
// A runtime may read at any moment, and an allocation's container may start as soon as its file
// exists. So a file is either complete or absent. Write checks the spec as the CDI library would
// after reading it. It writes the file under a temporary name that ends in neither .json nor .yaml,
// flushes it to the disk and renames it. If the file has the same content already, nothing changes,
// so that a caller may repeat Write without waking the runtimes:
//
//	d, err := dir.Open("/var/run/cdi", "example.com")
//	err = d.Write(key, spec)   // exists now, or existed already
//	keys, err := d.List()      // which allocations have a file
//	err = d.Remove(key)        // does not exist now, or never did
//
// Names are resolved inside the directory only. A symbolic link at one of our names is replaced or
// removed as a link, and never followed. So a program that may write there cannot make the agent
// write elsewhere.
//
// The package does not know what a spec means, which allocations exist, or when a file may be
// removed.
package dir
