// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"example.com/gpu-agent/internal/socket"
)

// Left returns the resources that have a socket in a kubelet's directory and pass ours. It does not
// find names so long that socketPath has cut them.
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

// RemoveSockets removes the sockets that a killed process has left for these resources in a
// kubelet's directory. It leaves a socket on which a process listens; the error then names the
// resource.
func RemoveSockets(dir string, resources []string) error {
	var errs []error
	for _, r := range resources {
		path, err := socketPath(dir, r)
		if err == nil {
			err = socket.RemoveLeft(path)
		}
		if errors.Is(err, socket.ErrServed) {
			err = fmt.Errorf("%w and serves %s; end it first", err, r)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
