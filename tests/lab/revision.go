// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"example.com/gpu-agent/pkg/gpu"
)

// FirstRelease is the tag of the version from which on later versions read what was written.
const FirstRelease = "v0.1.0"

// Sources writes the sources of a commit or a tag below dir. The error wraps gpu.ErrNotFound if the clone does not
// have it, as a clone without tags does not have a release.
func (k *Kit) Sources(ctx context.Context, revision, dir string) error {
	_, err := k.output(ctx, nil, "git", "-C", k.Root, "rev-parse", "-q", "--verify", revision+"^{commit}")
	if err != nil {
		return fmt.Errorf("this clone does not have %s (git fetch --tags brings tags): %w", revision, gpu.ErrNotFound)
	}
	archive, err := k.output(ctx, nil, "git", "-C", k.Root, "archive", "--format=tar", revision)
	if err == nil {
		err = untar(dir, archive)
	}
	if err != nil {
		return fmt.Errorf("take the sources of %s: %w", revision, err)
	}
	return nil
}

// untar unpacks the files of an archive of git's.
func untar(dir string, archive []byte) error {
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		path := filepath.Join(dir, filepath.Clean("/"+h.Name))
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(path, 0o755)
		case tar.TypeReg:
			var data []byte
			if data, err = io.ReadAll(r); err == nil {
				err = errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
					os.WriteFile(path, data, h.FileInfo().Mode().Perm()))
			}
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		}
		if err != nil {
			return err
		}
	}
}
