// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestRemoveSockets(t *testing.T) {
	dir := t.TempDir()
	all := []string{"example.com/gpu", "example.com/gpu-mem", "example.com/gpu.shared"}
	path := func(resource string) string {
		p, err := socketPath(dir, resource)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path(all[0]), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()
	served, err := net.Listen("unix", path(all[1]))
	if err != nil {
		t.Fatal(err)
	}
	defer served.Close()
	if err := os.WriteFile(path(all[2]), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := RemoveSockets(dir, all); err == nil || !strings.Contains(err.Error(), "serves example.com/gpu-mem") {
		t.Errorf("with one that is served: %v", err)
	}
	got := Left(dir, func(r string) bool { return r != all[2] })
	if !slices.Equal(got, []string{all[1]}) {
		t.Errorf("left are the sockets of %v, want that of %s", got, all[1])
	}
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(names) != 2 {
		t.Errorf("left: %v, want the one that is served and the file that is no socket", names)
	}
	served.Close()
	if err := RemoveSockets(dir, all); err != nil {
		t.Error(err)
	}
}
