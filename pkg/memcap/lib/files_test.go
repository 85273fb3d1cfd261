// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"testing"

	"example.com/gpu-agent/pkg/cdi"
)

// TestLibrariesThatCannotBeFitted: where the driver's libraries cannot be read,
// containers get those that serve any driver, and the error says why.
func TestLibrariesThatCannotBeFitted(t *testing.T) {
	any := Kit{CUDA: "/cap/0123456789abcdef/libcuda.so.1"}
	f := &Files{dir: t.TempDir(), seen: func(host string) string { return host }, install: func(string) (Kit, error) { return any, nil }}
	if kit, err := f.Fit(cdi.Parts{}); err == nil || kit != any || f.fitted != any {
		t.Errorf("%+v, %v; want the libraries for any driver, and why", kit, err)
	}
	full := errors.New("no space left on device")
	f.install = func(string) (Kit, error) { return Kit{}, full }
	if kit, err := f.Fit(cdi.Parts{}); !errors.Is(err, full) || kit != (Kit{}) || f.fitted != any {
		t.Errorf("%+v, %v; want no libraries, and why", kit, err)
	}
}
