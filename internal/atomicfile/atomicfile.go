// SPDX-License-Identifier: Apache-2.0

package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Flushing is true if the file has to survive a power failure.
type Flushing bool

const (
	Unflushed Flushing = false
	Flushed   Flushing = true
)

// Write replaces the file name. Its mode is mode, independent of the umask. fill writes the content
// to the file temp, and may read it there. Both names are below root, on one file system. Write
// first removes anything at temp. After an error the old file is unchanged, unless only the flush
// of the directory failed, which comes last.
func Write(root *os.Root, name, temp string, mode fs.FileMode, flush Flushing, fill func(*os.File) error) (err error) {
	if err := root.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	err = errors.Join(f.Chmod(mode), fill(f))
	if err == nil && flush {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = root.Rename(temp, name)
	}
	if err != nil {
		_ = root.Remove(temp)
		return err
	}
	if flush {
		return FlushDir(root)
	}
	return nil
}

// FlushDir flushes a directory, so that new names in it and removals survive a power failure.
func FlushDir(root *os.Root) error {
	d, err := root.Open(".")
	if err != nil {
		return fmt.Errorf("flush %s: %w", root.Name(), err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("flush %s: %w", root.Name(), err)
	}
	return nil
}
