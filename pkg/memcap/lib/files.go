// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"path/filepath"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// Files is all that the agent keeps on the host for caps: the pages of allocations, and
// the libraries as they suit the node's driver.
type Files struct {
	*Pages
	dir   string
	every time.Duration
	seen  func(host string) string
	// install has the libraries that serve any driver; fitted are those that Fit returned
	// last.
	install func(dir string) (Kit, error)
	fitted  Kit
}

// OpenFiles opens the pages below the agent's state directory, where Fit installs the
// libraries: nobody needs them before the driver has been read, and a start has no time to
// lose. every is the time between two readings of the driver, which new limit pages name.
// seen returns where this process sees a file that the host has at a path. The error is
// that of OpenPages, or gpu.ErrNotSupported if the program was built without the libraries.
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

// Write is Pages.Write with the time between two readings.
func (f *Files) Write(key string, limits []Limit) (map[gpu.UUID]Page, error) {
	return f.Pages.Write(key, f.every, limits)
}

// Fit returns the libraries as they suit the driver whose parts these are. Where it
// cannot fit them it returns those that serve any driver, and the error of lib.Fit, or no
// libraries where those cannot be installed either.
// It must not run at the same time as itself or Prune.
func (f *Files) Fit(parts cdi.Parts) (Kit, error) {
	library := func(name string) string {
		for _, m := range parts.Common.Mounts {
			if strings.HasPrefix(filepath.Base(m.ContainerPath), name+".") {
				return f.seen(m.HostPath)
			}
		}
		return name // no such file, which the error says
	}
	fitted, err := Fit(f.dir, library("libcuda.so"), library("libnvidia-ml.so"))
	if err != nil {
		var cannot error
		if fitted, cannot = f.install(f.dir); cannot != nil {
			return Kit{}, cannot
		}
	}
	f.fitted = fitted
	return fitted, err
}

// Prune removes the libraries of other versions and of other drivers. Every allocation's
// CDI file must name the present ones.
func (f *Files) Prune() error {
	return Prune(f.dir, func(version string) bool { return version == f.fitted.Version() })
}
