// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
)

// Left lists the resources whose sockets are in a kubelet's directory and of which
// ours says that they are. Names so long that they were cut are not found.
func Left(dir string, ours func(resource string) bool) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".sock")
		resource := strings.Replace(name, "_", "/", 1)
		if ok && resource != name && checkResource(resource) == nil && ours(resource) {
			out = append(out, resource)
		}
	}
	return out
}

// RemoveSockets removes the sockets that a killed process has left
// for these resources in a kubelet's directory. It removes none that somebody
// listens on; the error then says so.
func RemoveSockets(dir string, resources []string) error {
	var errs []error
	for _, r := range resources {
		path, err := socketPath(dir, r)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		info, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			errs = append(errs, fmt.Errorf("look at socket: %w", err))
			continue
		case info.Mode().Type() != fs.ModeSocket:
			continue // not ours
		}
		if conn, err := net.Dial("unix", path); err == nil {
			_ = conn.Close()
			errs = append(errs, fmt.Errorf("remove socket %s: a process serves %s there; end it first", path, r))
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove socket: %w", err))
		}
	}
	return errors.Join(errs...)
}
