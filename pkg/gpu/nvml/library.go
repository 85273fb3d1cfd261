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

// findLibrary looks where the driver's parts are looked for too.
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

// mapped is the path at which the dynamic linker found the library that it has
// loaded, by the name that a later version would have there too. It is
// libraryName where that cannot be told.
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

// content identifies a library by what is in it. A file that was laid down
// again with the same bytes, as by a driver container that started anew, still
// fits the library in memory. The file's own marks save reading it each time.
type content struct {
	info os.FileInfo
	sum  string // SHA-256
}

// identify reads a library's identity; links are followed.
func identify(path string) (content, error) {
	info, err := os.Stat(path)
	if err != nil {
		return content{}, err
	}
	sum, err := contentSum(path)
	return content{info, string(sum)}, err
}

// is reports whether a file holds what c does. It reads the file only if it is
// another one, or was written since.
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

// explained adds to an error that says that there is no driver, if its library
// was replaced, that it was: then nothing that this process does can help. Only
// then is it asked. A library that is replaced under a driver that still runs
// does no harm: a new process could not speak to that one. And a library that is
// gone is not a replaced one.
func (s *session) explained(err error) error {
	if s.stopped.Err() != nil || s.loaded.info == nil || !errors.Is(err, gpu.ErrNoDriver) {
		return err
	}
	path, lost := findLibrary(s.opts, s.log)
	if lost != nil {
		return err
	}
	if !filepath.IsAbs(path) {
		path = s.library // where the dynamic linker found it
	}
	if !filepath.IsAbs(path) {
		return err
	}
	if same, unread := s.loaded.is(path); same || unread != nil {
		return err
	}
	return fmt.Errorf("%w: %s is not the library of %s that runs here; start another process: %w",
		gpu.ErrReloaded, path, s.loaded.info.ModTime().Format(time.DateTime), err)
}
