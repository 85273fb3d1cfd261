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
	// kit serves any driver, fitted the driver that Fit was called for last.
	kit, fitted Kit
}

// OpenFiles installs the libraries below the agent's state directory and opens the
// pages there. every is the time between two readings of the driver, which new
// limit pages name. seen returns where this process sees a file that the host has at
// a path. The error is that of Install or of OpenPages.
func OpenFiles(dir string, every time.Duration, seen func(host string) string) (*Files, error) {
	kit, err := Install(dir)
	if err != nil {
		return nil, err
	}
	pages, err := OpenPages(dir)
	if err != nil {
		return nil, err
	}
	return &Files{Pages: pages, dir: dir, every: every, seen: seen, kit: kit, fitted: kit}, nil
}

// Write is Pages.Write with the time between two readings.
func (f *Files) Write(key string, limits []Limit) (map[gpu.UUID]Page, error) {
	return f.Pages.Write(key, f.every, limits)
}

// Fit returns the libraries as they suit the driver whose parts these are. Where it
// cannot fit them it returns those that serve any driver, and the error of lib.Fit.
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
		fitted = f.kit
	}
	f.fitted = fitted
	return fitted, err
}

// Prune removes the libraries of other versions and of other drivers. Every allocation's
// CDI file must name the present ones.
func (f *Files) Prune() error {
	return Prune(f.dir, func(version string) bool { return version == f.fitted.Version() })
}
