// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/lookup"

	"example.com/gpu-agent/pkg/gpu"
)

// libraryName is the SONAME of the driver's management library.
const libraryName = "libnvidia-ml.so.1"

// findLibrary returns the path of the driver's library, or its bare name for the dynamic linker
// to find. It looks in the same places as NVIDIA's generator does. The error wraps
// gpu.ErrNoDriver if there is no library.
func findLibrary(opts Options, log *slog.Logger) (string, error) {
	if opts.Library != "" {
		if !filepath.IsAbs(opts.Library) {
			return "", fmt.Errorf("the library %q must be an absolute path: %w", opts.Library, gpu.ErrInvalid)
		}
		if _, err := os.Stat(opts.Library); err != nil {
			return "", fmt.Errorf("find the driver's library: %w: %w", gpu.ErrNoDriver, err)
		}
		return opts.Library, nil
	}
	locator := lookup.NewLibraryLocator(lookup.WithLogger(logger{log}), lookup.WithRoot(opts.DriverRoot))
	found, err := locator.Locate(libraryName)
	if err == nil && len(found) > 0 {
		return found[0], nil
	}
	if opts.DriverRoot == "/" {
		return libraryName, nil
	}
	return "", fmt.Errorf("find %s below %s: %w; is the NVIDIA driver installed there? (--driver-root)",
		libraryName, opts.DriverRoot, gpu.ErrNoDriver)
}

// mapped returns where the dynamic linker found the library that is loaded. The path ends in
// libraryName, which another version would have there too. If the place is unknown, it returns
// libraryName alone.
func mapped() string {
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return libraryName
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		at := strings.IndexByte(lines.Text(), '/')
		if at < 0 {
			continue
		}
		dir, file := filepath.Split(lines.Text()[at:])
		if !strings.HasPrefix(file, strings.TrimSuffix(libraryName, "1")) {
			continue
		}
		return filepath.Join(dir, libraryName)
	}
	return libraryName
}

// content identifies a library by its bytes. The same bytes written again, as by a driver
// container that starts anew, still fit the library in memory. info saves reading the file each
// time.
type content struct {
	info os.FileInfo
	sum  string // SHA-256
}

// identify reads the content of a library. It follows links.
func identify(path string) (content, error) {
	info, err := os.Stat(path)
	if err != nil {
		return content{}, err
	}
	sum, err := contentSum(path)
	return content{info, string(sum)}, err
}

// is reports whether the file at path has the content c. It reads the file only if size, time or
// inode differ.
func (c content) is(path string) (bool, error) {
	info, err := os.Stat(path)
	if err != nil || c.info == nil {
		return false, err
	}
	if os.SameFile(info, c.info) && info.ModTime().Equal(c.info.ModTime()) && info.Size() == c.info.Size() {
		return true, nil
	}
	sum, err := contentSum(path)
	return err == nil && string(sum) == c.sum, err
}

// explained adds gpu.ErrReloaded to a gpu.ErrNoDriver if the driver's library was replaced, since
// then only a new process helps. It looks at the library in no other case: to replace it while
// its driver still runs does no harm, and a new process could not speak to that driver. A library
// that is missing counts as unchanged.
func (s *session) explained(err error) error {
	if s.stopped.Err() != nil || s.loaded.info == nil || !errors.Is(err, gpu.ErrNoDriver) {
		return err
	}
	path, lost := findLibrary(s.opts, s.log)
	if lost != nil {
		return err
	}
	if !filepath.IsAbs(path) {
		path = s.library // the path where the dynamic linker found it
	}
	if !filepath.IsAbs(path) {
		return err
	}
	if same, unread := s.loaded.is(path); same || unread != nil {
		return err
	}
	return fmt.Errorf("%w: %s is not the library of %s that this process has loaded; start a new process: %w",
		gpu.ErrReloaded, path, s.loaded.info.ModTime().Format(time.DateTime), err)
}
