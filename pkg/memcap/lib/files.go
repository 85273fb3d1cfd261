// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"path/filepath"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// Files is all that the agent keeps on the host for caps: the pages of allocations, and the
// libraries that suit the node's driver.
type Files struct {
	*Pages
	dir   string
	every time.Duration
	seen  func(host string) string
	// install returns the libraries that work with any driver. fitted is what Fit returned last.
	install func(dir string) (Kit, error)
	fitted  Kit
}

// OpenFiles opens the pages below the agent's state directory. Fit installs the libraries there
// later: they are not needed before the driver has been read, and the agent must start fast. every
// is the time between two readings of the driver, which new limit pages name. seen returns the path
// at which this process sees a file of the host. OpenFiles returns the errors of OpenPages, or
// gpu.ErrNotSupported if the program was built without the libraries.
func OpenFiles(dir string, every time.Duration, seen func(host string) string) (*Files, error) {
	if _, err := built.Open("built/" + cudaName); err != nil {
		return nil, errNotBuilt
	}
	pages, err := OpenPages(dir)
	if err != nil {
		return nil, err
	}
	return &Files{Pages: pages, dir: dir, every: every, seen: seen, install: Install}, nil
}

// Write calls Pages.Write with the time between two readings.
func (f *Files) Write(key string, limits []Limit) (map[gpu.UUID]Page, error) {
	return f.Pages.Write(key, f.every, limits)
}

// Fit returns the libraries that suit the driver with these parts. If it cannot fit them, it
// returns those that work with any driver, and the error of lib.Fit. If it cannot install those
// either, it returns no libraries and that error. Fit must not run at the same time as itself or
// Prune.
func (f *Files) Fit(parts cdi.Parts) (Kit, error) {
	library := func(name string) string {
		for _, m := range parts.Common.Mounts {
			if strings.HasPrefix(filepath.Base(m.ContainerPath), name+".") {
				return m.HostPath
			}
		}
		return name // no such file: lib.Fit fails with its name
	}
	fitted, err := Fit(f.dir, f.seen(library("libcuda.so")), f.seen(library("libnvidia-ml.so")))
	if err != nil {
		var cannot error
		if fitted, cannot = f.install(f.dir); cannot != nil {
			return Kit{}, cannot
		}
	}
	f.fitHold(&fitted, library("libnvidia-ml.so"))
	f.fitted = fitted
	return fitted, err
}

// Prune removes the libraries of other versions and for other drivers. The CDI file of every
// allocation must name the present ones.
func (f *Files) Prune() error {
	return Prune(f.dir, func(version string) bool { return version == f.fitted.Version() })
}
