// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"example.com/gpu-agent/pkg/gpu"
)

// built has the output of `go run ./pkg/memcap/lib/build`, or just a README if that was not run.
//
//go:embed built/*
var built embed.FS

// Kit has the paths of an installed version's files that an allocation's CDI file mounts or runs.
// They are below the directory that was given to Install.
type Kit struct {
	CUDA, NVML string // the libraries, to be mounted over the driver's
	Hide       string // the program that Hook runs
	Mark       string // an empty file, for OpenMark
	// Hold is the program that HoldHook runs. It is empty if the host cannot run it, and NoHold then
	// says why. Loader is the dynamic loader that starts it, with the directories of libraries in
	// LoaderDirs; both are empty if the host has a loader of its own.
	Hold, NoHold, Loader, LoaderDirs string
	// Driver is the driver's own libnvidia-ml.so, which Hold loads.
	Driver string
}

// file is a file of a kit. A packed one is compressed by gzip: the program hide is larger than all
// other files together, and would stay in this process's memory for as long as it runs.
type file struct {
	name   string
	data   []byte
	packed bool
}

// write creates the file at a path. It fails if there is a file already.
func (f file) write(path string) (err error) {
	var data io.Reader = bytes.NewReader(f.data)
	if f.packed {
		if data, err = gzip.NewReader(data); err != nil {
			return err
		}
	}
	to, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, data)
	return errors.Join(err, to.Close())
}

// is reports whether the file is at a path, unchanged. For a packed one it compares the checksum
// and the length at its end, since unpacking would take most of the time of a start.
func (f file) is(path string) bool {
	data, err := os.ReadFile(path)
	if err != nil || !f.packed {
		return err == nil && bytes.Equal(data, f.data)
	}
	end := f.data[len(f.data)-8:]
	return binary.LittleEndian.Uint32(end) == crc32.ChecksumIEEE(data) && binary.LittleEndian.Uint32(end[4:]) == uint32(len(data))
}

// Version returns the name of the kit's folder, for Prune.
func (k Kit) Version() string { return filepath.Base(filepath.Dir(k.CUDA)) }

// errNotBuilt is the error of a program that was built without the libraries.
var errNotBuilt = fmt.Errorf("built without the cap's library; build with make: %w", gpu.ErrNotSupported)

// content returns the two libraries, CUDA's first, the programs hide and hold, and the hash of all.
func content() (files []file, hash string, err error) {
	for _, f := range []file{{name: cudaName}, {name: nvmlName}, {name: hideName, packed: true}, {name: holdName}} {
		from := "built/" + f.name
		if f.packed {
			from += packedSuffix
		}
		if f.data, err = built.ReadFile(from); err != nil {
			return nil, "", errNotBuilt
		}
		files = append(files, f)
	}
	return files, hashOf(files), nil
}

// ownHash returns content's hash, computed once: each Prune needs it to keep this program's own
// version. It is empty if the program has no libraries.
var ownHash = sync.OnceValue(func() string {
	_, hash, _ := content()
	return hash
})

// hashOf returns the first 16 hex digits of a SHA-256 over files.
func hashOf(files []file) string {
	h := sha256.New()
	for _, f := range files {
		fmt.Fprintf(h, "%s %d\n", f.name, len(f.data))
		h.Write(f.data)
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// Install writes this program's version of the libraries to dir/cap/<hash>, unless it is there. It
// never changes another version's folder, since processes have its files mapped. It returns
// gpu.ErrNotSupported if the program was built without the libraries.
func Install(dir string) (Kit, error) {
	files, hash, err := content()
	if err != nil {
		return Kit{}, err
	}
	kit, err := install(filepath.Join(dir, "cap"), hash, files)
	if err != nil {
		return Kit{}, fmt.Errorf("install the cap's library: %w", err)
	}
	return kit, nil
}

const (
	hideName     = "hide"
	markName     = "open"
	packedSuffix = ".gz"
)

func install(top, hash string, files []file) (Kit, error) {
	home := filepath.Join(top, hash)
	kit := Kit{
		CUDA: filepath.Join(home, cudaName), NVML: filepath.Join(home, nvmlName),
		Hide: filepath.Join(home, hideName), Mark: filepath.Join(home, markName),
		Hold: filepath.Join(home, holdName),
	}
	if err := os.MkdirAll(top, 0o755); err != nil {
		return Kit{}, err
	}
	if whole(home, files) {
		return kit, nil
	}
	tmp, err := os.MkdirTemp(top, ".new-")
	if err != nil {
		return Kit{}, err
	}
	defer os.RemoveAll(tmp)
	for _, f := range files {
		if err := f.write(filepath.Join(tmp, f.name)); err != nil {
			return Kit{}, err
		}
	}
	err = errors.Join(
		os.WriteFile(filepath.Join(tmp, markName), nil, 0o444),
		os.Chmod(tmp, 0o755))
	if err != nil {
		return Kit{}, err
	}
	err = os.Rename(tmp, home)
	if errors.Is(err, fs.ErrExist) {
		// The folder is incomplete, for example after a loss of power. Its files are replaced, not
		// rewritten, so that what a process has mapped does not change.
		err = mend(home, tmp, files)
	}
	if err != nil {
		return Kit{}, err
	}
	return kit, nil
}

func mend(home, tmp string, files []file) error {
	names := []string{markName}
	for _, f := range files {
		names = append(names, f.name)
	}
	for _, name := range names {
		if err := os.Rename(filepath.Join(tmp, name), filepath.Join(home, name)); err != nil {
			return err
		}
	}
	if !whole(home, files) {
		return fmt.Errorf("%s differs from what was written to it", home)
	}
	return nil
}

// whole reports whether a version's folder is complete and unchanged.
func whole(home string, files []file) bool {
	return !slices.ContainsFunc(append(files, file{name: markName}), func(f file) bool {
		return !f.is(filepath.Join(home, f.name))
	})
}

// Prune removes unused versions of the libraries below dir. It calls used with the hash of each
// version; used returns true if an allocation's CDI file names that hash. Prune keeps the version of
// this program that Install installs. Versions that were fitted to a driver (Fit) have hashes of
// their own, so it asks used about them, too.
func Prune(dir string, used func(hash string) bool) error {
	top := filepath.Join(dir, "cap")
	entries, err := os.ReadDir(top)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("list versions of the cap's library: %w", err)
	}
	var errs []error
	for _, e := range entries {
		old := isHash(e.Name()) && e.Name() != ownHash() && !used(e.Name())
		half := len(e.Name()) > 5 && e.Name()[:5] == ".new-"
		if e.IsDir() && (old || half) {
			if err := os.RemoveAll(filepath.Join(top, e.Name())); err != nil {
				errs = append(errs, fmt.Errorf("remove old version of the cap's library: %w", err))
			}
		}
	}
	return errors.Join(errs...)
}

func isHash(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == 8
}
