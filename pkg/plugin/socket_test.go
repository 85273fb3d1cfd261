// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/socket"
)

func TestSocketPath(t *testing.T) {
	long := strings.Repeat("l", 63)
	for _, c := range []struct{ dir, resource, want string }{
		{"/var/lib/kubelet/device-plugins", "example.com/gpu-mem", "/var/lib/kubelet/device-plugins/example.com_gpu-mem.sock"},
		{"/var/lib/kubelet/device-plugins/", "nvidia.com/mig-1g.10gb.me", "/var/lib/kubelet/device-plugins/nvidia.com_mig-1g.10gb.me.sock"},
		{"/d", "example.com/a_b", "/d/example.com_a_b.sock"},
		{"/d", long + ".example.com/" + long, ""},
		{"/var/lib/kubelet/device-plugins", long + ".example.com/" + long, ""},
	} {
		got, err := socketPath(c.dir, c.resource)
		switch {
		case err != nil:
			t.Errorf("socketPath(%q, %q): %v", c.dir, c.resource, err)
		case c.want != "" && got != c.want:
			t.Errorf("socketPath(%q, %q) = %q, want %q", c.dir, c.resource, got, c.want)
		case len(got) > socket.MaxPath || filepath.Dir(got) != filepath.Clean(c.dir) || filepath.Ext(got) != ".sock":
			t.Errorf("socketPath(%q, %q) = %q of %d bytes", c.dir, c.resource, got, len(got))
		}
	}
	// Two long names that are cut at the same place.
	a, _ := socketPath("/d", long+".example.com/"+long+"a")
	b, _ := socketPath("/d", long+".example.com/"+long+"b")
	if a == b {
		t.Errorf("two resources at %s", a)
	}
	for _, c := range []struct{ dir, resource string }{
		{"/d", ""}, {"/d", "gpu"}, {"/d", "/gpu"}, {"/d", "example.com/"}, {"/d", "example.com/a/b"}, {"/d", "../gpu"}, {"/d", "example.com/.."},
		{"/d", "exa_mple.com/gpu"}, {"/d", "example.com/g u"}, {"/d", "example.com/g\x00"}, {"/d", "example.com/gpü"},
		{"/" + strings.Repeat("d", 100), "example.com/gpu"},
	} {
		if got, err := socketPath(c.dir, c.resource); err == nil {
			t.Errorf("socketPath(%q, %q) = %q, want it refused", c.dir, c.resource, got)
		}
	}
}

func TestListenLongestPath(t *testing.T) {
	dir := tempDir(t)
	resource := strings.Repeat("l", 63) + ".example.com/" + strings.Repeat("l", 63)
	path, err := socketPath(dir, resource)
	if err != nil {
		t.Fatal(err)
	}
	s, err := socket.Listen(path, "."+hash(resource))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Remove()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}
