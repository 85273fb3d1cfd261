// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// TestLibrariesThatCannotBeFitted: where the driver's libraries are not to be read,
// containers get those that serve any driver, and the reason is said.
func TestLibrariesThatCannotBeFitted(t *testing.T) {
	any := lib.Kit{CUDA: "/cap/0123456789abcdef/libcuda.so.1"}
	c := &caps{dir: t.TempDir(), seen: new(driverFlags).seen, kit: any}
	if kit, err := c.Fit(cdi.Parts{}); err == nil || kit != any || c.fitted != any {
		t.Errorf("%+v, %v; want the libraries for any driver, and why", kit, err)
	}
}

func TestWhereTheDriverIsSeen(t *testing.T) {
	for _, c := range []struct{ root, hostRoot, host, want string }{
		{"/", "", "/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1"},
		{"/host", "/", "/usr/lib/libcuda.so.1", "/host/usr/lib/libcuda.so.1"},
		{"/driver", "/run/nvidia/driver", "/run/nvidia/driver/usr/lib/libcuda.so.1", "/driver/usr/lib/libcuda.so.1"},
		{"/driver", "/run/nvidia/driver", "/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1"},
	} {
		d := driverFlags{root: c.root, hostRoot: c.hostRoot}
		if got := d.seen(c.host); got != c.want {
			t.Errorf("%s, below %s for the agent and %s for the host: %s, want %s", c.host, c.root, c.hostRoot, got, c.want)
		}
	}
}
