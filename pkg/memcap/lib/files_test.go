// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"testing"

	"example.com/gpu-agent/pkg/cdi"
)

// TestLibrariesThatCannotBeFitted: where the driver's libraries cannot be read,
// containers get those that serve any driver, and the error says why.
func TestLibrariesThatCannotBeFitted(t *testing.T) {
	any := Kit{CUDA: "/cap/0123456789abcdef/libcuda.so.1"}
	f := &Files{dir: t.TempDir(), seen: func(host string) string { return host }, kit: any}
	if kit, err := f.Fit(cdi.Parts{}); err == nil || kit != any || f.fitted != any {
		t.Errorf("%+v, %v; want the libraries for any driver, and why", kit, err)
	}
}
