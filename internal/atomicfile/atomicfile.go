// SPDX-License-Identifier: Apache-2.0

package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// Flushing says whether a file survives a power failure.
type Flushing bool

const (
	Unflushed Flushing = false
	Flushed   Flushing = true
)

// Write replaces the file name, with exactly that mode whatever the umask is. fill
// writes it, as temp, and may read it there. Both names are below root, on one file
// system; anything at temp is removed first. After an error the file is unchanged,
// except that a flush of the directory comes last.
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

// FlushDir makes the names in root, and the removal of others, survive a power failure.
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
