// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"

	"example.com/gpu-agent/internal/socket"
)

// socketPath returns the path of a resource's socket: "<dir>/example.com_gpu-mem.sock". A name too
// long for a socket's address is cut, and gets a hash to stay unique. It fails if the name is not
// valid, or if dir is too long.
func socketPath(dir, resource string) (string, error) {
	if err := checkResource(resource); err != nil {
		return "", err
	}
	// A domain has no underscore, so different resources give different names.
	base := strings.Replace(resource, "/", "_", 1)
	path := filepath.Join(dir, base+".sock")
	if len(path) <= socket.MaxPath {
		return path, nil
	}
	sum := "-" + hash(resource) + ".sock"
	keep := socket.MaxPath - len(filepath.Join(dir, sum))
	if keep < 0 {
		return "", fmt.Errorf("directory %s is too long for a socket's address of at most %d bytes",
			dir, socket.MaxPath)
	}
	return filepath.Join(dir, base[:keep]+sum), nil
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:6])
}

func checkResource(resource string) error {
	domain, name, ok := strings.Cut(resource, "/")
	if !ok || !plain(domain, ".-") || !plain(name, "._-") {
		return fmt.Errorf("resource %q is not of the form <domain>/<name>", resource)
	}
	return nil
}

func plain(s, more string) bool {
	for i := range len(s) {
		c := s[i]
		if c-'0' > 9 && c-'a' > 'z'-'a' && c-'A' > 'Z'-'A' && strings.IndexByte(more, c) < 0 {
			return false
		}
	}
	return s != "" && strings.IndexByte(more, s[0]) < 0
}
