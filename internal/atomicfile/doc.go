// SPDX-License-Identifier: Apache-2.0

// Package atomicfile puts a file in its place whole: a reader sees the
// file of before or the new one, also if this process is killed meanwhile.
//
// The content is written to a temporary file beside the place, which is then
// renamed:
//
//	err := atomicfile.Write(root, "state.json", ".state.json.tmp", 0o600, atomicfile.Unflushed,
//		func(f *os.File) error { _, err := f.Write(data); return err })
//
// Well-kept libraries do the same. This one is ours for what they lack together:
//
//   - All names are below an os.Root. A symbolic link that somebody laid at one of
//     them is replaced and never followed.
//   - The caller names the temporary file, and so knows what a predecessor that was
//     killed has left.
//   - Flushing is a choice. Much of what the agent writes need not outlive the
//     machine, whose containers are gone with it, and a flush takes as long as the
//     disk does.
//
// The package does not know what it writes, nor whether that was there before.
package atomicfile
