// SPDX-License-Identifier: Apache-2.0

// Package atomicfile replaces a file atomically: a reader sees the old file or the
// new one, even if this process is killed meanwhile.
//
// The content is written to a temporary file in the same directory, which is then
// renamed:
//
//	err := atomicfile.Write(root, "state.json", ".state.json.tmp", 0o600, atomicfile.Unflushed,
//		func(f *os.File) error { _, err := f.Write(data); return err })
//
// Other libraries do the same, but none of them has all of this:
//
//   - All names are below an os.Root. A symbolic link at one of them is replaced and never
//     followed.
//   - The caller names the temporary file, and so can remove what a killed process has left.
//   - Flushing is a choice. Most files of the agent need not survive a crash of the machine,
//     which ends the containers too. A flush costs a disk access.
//
// The package does not know what it writes, nor whether the file existed before.
package atomicfile
