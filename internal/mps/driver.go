// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// Driver says where the driver's files may be. They may come and go, as those of a driver in a
// container do.
type Driver struct {
	// Programs is the directories that may have the driver's programs; the first comes first. The
	// daemon finds its server in them.
	Programs []string
	// Libraries is the directories that may have the driver's libraries; the first that has the
	// CUDA driver counts. Empty if the dynamic linker finds them by itself.
	Libraries []string
}

// driverContainer is where NVIDIA's GPU Operator has the files of a driver in a container, below the
// host's root.
const driverContainer = "run/nvidia/driver"

// DriverBelow returns the places of a driver that is installed below root, or in the GPU Operator's
// container there.
func DriverBelow(root string) (d Driver) {
	for _, at := range []string{root, filepath.Join(root, driverContainer)} {
		programs, libraries := gpu.DriverPlaces(at)
		d.Programs = append(d.Programs, programs...)
		if root != "/" { // otherwise the dynamic linker finds them by itself
			d.Libraries = append(d.Libraries, libraries...)
		}
	}
	return d
}

// cudaLibrary is the library that a server needs.
const cudaLibrary = "libcuda.so.1"

// driverLibraries matches a driver's libraries. Their directory may have others, a C library above
// all, which do not go together with this system's dynamic linker.
var driverLibraries = []string{"libcuda.so*", "libnvidia-*.so*"}

// link makes dir have links to all libraries of the driver and nothing else. It does nothing
// without Libraries.
func (d Driver) link(dir string) error {
	if len(d.Libraries) == 0 {
		return nil
	}
	from := slices.IndexFunc(d.Libraries, func(from string) bool {
		_, err := os.Stat(filepath.Join(from, cudaLibrary))
		return err == nil
	})
	if from < 0 {
		return fmt.Errorf("find %s in %s", cudaLibrary, strings.Join(d.Libraries, ", "))
	}
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return err
	}
	var errs []error
	for _, pattern := range driverLibraries {
		paths, err := filepath.Glob(filepath.Join(d.Libraries[from], pattern))
		errs = append(errs, err)
		for _, path := range paths {
			errs = append(errs, os.Symlink(path, filepath.Join(dir, filepath.Base(path))))
		}
	}
	return errors.Join(errs...)
}

// controlProgram is both the daemon and the program that speaks to it.
const controlProgram = "nvidia-cuda-mps-control"

// program is the driver's control program as it is now.
type program struct {
	path    string
	version string
	file    identity
}

// identity tells one content of a file from the next.
type identity struct {
	dev, ino uint64
	size     int64
	changed  time.Time
}

func identify(info fs.FileInfo) identity {
	id := identity{size: info.Size(), changed: info.ModTime()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		id.dev, id.ino = st.Dev, st.Ino
	}
	return id
}

// versions reads and remembers versions of programs. It is safe for several goroutines.
type versions struct {
	mu    sync.Mutex // guards what follows
	known map[identity]string
}

// find returns the driver's control program.
func (d Driver) find(v *versions) (program, error) {
	for _, dir := range d.Programs {
		path := filepath.Join(dir, controlProgram)
		info, err := os.Stat(path)
		if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
			continue
		}
		version, err := v.of(path)
		if err != nil {
			return program{}, &Problem{NoProgram, fmt.Sprintf("read the version of %s: %v", path, err)}
		}
		return program{path, version, identify(info)}, nil
	}
	return program{}, &Problem{NoProgram, fmt.Sprintf("find %s in %s: install the driver's package with MPS",
		controlProgram, strings.Join(d.Programs, ", "))}
}

// running returns the version of the program that a process runs, also if its file is replaced.
func (v *versions) running(pid int) (string, error) {
	return v.of(filepath.Join("/proc", strconv.Itoa(pid), "exe"))
}

const (
	// mostProgram bounds what is read of a program. NVIDIA's has 54 KB.
	mostProgram = 32 << 20
	// mostVersions bounds what is remembered.
	mostVersions = 64
)

// embedded is how 535, 550 and 555 carry their version: as a string of its own.
var embedded = regexp.MustCompile(`^\x00([0-9]{3}\.[0-9]{2,3}(?:\.[0-9]{2})?)\x00`)

// longestVersion is the most bytes that embedded matches, with the zero bytes around a version.
const longestVersion = len("\x00555.058.02\x00")

// embeddedIn calls yield with each embedded version, and where its bytes end. It looks at what is around
// each point, since the expression alone takes seconds for a large program.
func embeddedIn(data []byte, yield func(version string, end int)) {
	const before = len("\x00555")
	for at := 0; ; at++ {
		next := bytes.IndexByte(data[at:], '.')
		if next < 0 {
			return
		}
		at += next
		if at < before || data[at-before] != 0 {
			continue
		}
		if found := embedded.FindSubmatch(data[at-before : min(at+longestVersion, len(data))]); found != nil {
			yield(string(found[1]), at-before+len(found[0]))
		}
	}
}

// versionOf returns the version of a program: the only embedded string in its first mostProgram bytes, or
// a hash of those. It holds 64 KiB of the program at a time, so that a large one costs no memory.
func versionOf(r io.Reader) (string, error) {
	sum := sha256.New()
	r = io.TeeReader(io.LimitReader(r, mostProgram), sum)
	window := make([]byte, 0, 64<<10)
	found, times := "", 0
	for seen := 0; ; {
		n, err := io.ReadFull(r, window[seen:cap(window)])
		window = window[:seen+n]
		embeddedIn(window, func(version string, end int) {
			if end > seen { // otherwise the window before had it whole
				found, times = version, times+1
			}
		})
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			if times == 1 {
				return found, nil
			}
			return "sha256:" + hex.EncodeToString(sum.Sum(nil)[:6]), nil
		case err != nil:
			return "", err
		}
		seen = copy(window, window[len(window)-longestVersion:])
	}
}

// of returns the version of a program: the driver's, or a hash of the program if it does not have
// exactly one such string. Different drivers have different hashes.
func (v *versions) of(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	id := identify(info)
	if version, ok := v.known[id]; ok {
		return version, nil
	}
	version, err := versionOf(f)
	if err != nil {
		return "", err
	}
	if v.known == nil || len(v.known) >= mostVersions {
		v.known = map[identity]string{}
	}
	v.known[id] = version
	return version, nil
}
