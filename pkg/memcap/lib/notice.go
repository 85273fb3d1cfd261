// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// noticesName is the folder of all notices on the host: dir/cap/notices/<key>.
const noticesName = "notices"

// Notice makes the notice of an allocation, and returns its path on the host. A notice is a file that tells the
// programs of a container by when the room of their allocation is taken back. It is empty until SetNotice is
// called. The container has the file mounted, so it keeps its inode. The error wraps gpu.ErrInvalid if the key is
// not valid.
func (p *Pages) Notice(key string) (path string, err error) {
	f, err := p.openNotice(key, unix.O_CREAT|unix.O_TRUNC)
	if err != nil {
		return "", err
	}
	// Any user of a container may read it.
	if err := errors.Join(f.Chmod(0o644), f.Close()); err != nil {
		return "", fmt.Errorf("make the notice of allocation %s: %w", key, err)
	}
	return f.Name(), nil
}

// SetNotice writes into an allocation's notice by when its room is taken back; the zero time takes the words
// away. A notice that has these words already is not written. The error wraps gpu.ErrNotFound if the allocation
// has no notice.
func (p *Pages) SetNotice(key string, by time.Time) error {
	f, err := p.openNotice(key, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	text := ""
	if !by.IsZero() {
		text = by.UTC().Format(time.RFC3339) + "\n"
	}
	is := make([]byte, 64)
	// An error leaves n at 0, or is io.EOF.
	if n, _ := f.ReadAt(is, 0); string(is[:n]) == text {
		return nil
	}
	// All times are of one length, and one is written at once. So a program reads the old one, the new one, or
	// nothing. To lengthen the file first would show it zeros.
	if _, err = f.WriteAt([]byte(text), 0); err == nil {
		err = f.Truncate(int64(len(text)))
	}
	if err != nil {
		return fmt.Errorf("write the notice of allocation %s: %w", key, err)
	}
	return nil
}

func (p *Pages) openNotice(key string, how int) (*os.File, error) {
	if !plainName(key) {
		return nil, fmt.Errorf("the notice of allocation %q: %w", key, gpu.ErrInvalid)
	}
	f, err := os.OpenFile(filepath.Join(p.notices, key), os.O_RDWR|unix.O_NOFOLLOW|how, 0o644)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("allocation %s has no notice: %w", key, gpu.ErrNotFound)
	} else if err != nil {
		return nil, fmt.Errorf("open the notice of allocation %s: %w", key, err)
	}
	return f, nil
}

// NoticeMount returns the mount of a notice into a container, which can read it.
func NoticeMount(path string) specs.Mount { return bind(path, YieldFile, "ro") }
