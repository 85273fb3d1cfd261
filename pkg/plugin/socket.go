// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxSocketPath is the longest path that a Unix socket's address holds, without
// the NUL that ends it.
const maxSocketPath = len(unix.RawSockaddrUnix{}.Path) - 1

// socketPath is where a resource is served: "<dir>/example.com_gpu-mem.sock". A
// name that would not fit into a socket's address is cut and told apart by a
// hash.
func socketPath(dir, resource string) (string, error) {
	if err := checkResource(resource); err != nil {
		return "", err
	}
	// A domain has no underscore, so different resources give different names.
	base := strings.Replace(resource, "/", "_", 1)
	path := filepath.Join(dir, base+".sock")
	if len(path) <= maxSocketPath {
		return path, nil
	}
	sum := "-" + hash(resource) + ".sock"
	keep := maxSocketPath - len(filepath.Join(dir, sum))
	if keep < 0 {
		return "", fmt.Errorf("directory %s is too long for a socket's address of at most %d bytes", dir, maxSocketPath)
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

// socket is a listening socket and the file by which it is found. The file may
// go while the socket still listens: the kubelet removes all sockets of the
// directory when it starts.
type socket struct {
	*net.UnixListener
	path string
	file fs.FileInfo
}

// listen makes a socket at path, in place of whatever socket was there: a dead
// predecessor's, or that of one that is about to end. It is made under another
// name, so that it is never there with more permissions than its owner's.
func listen(path, resource string) (*socket, error) {
	temporary := filepath.Join(filepath.Dir(path), "."+hash(resource))
	if len(temporary) > maxSocketPath {
		return nil, fmt.Errorf("listen at %s: too long for a socket's address of at most %d bytes", path, maxSocketPath)
	}
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temporary, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // By its name it might remove a successor's.
	s := &socket{UnixListener: l, path: path}
	if err := s.publish(temporary); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return s, nil
}

func (s *socket) publish(temporary string) (err error) {
	if err := os.Chmod(temporary, 0o600); err != nil {
		return err
	}
	if s.file, err = os.Lstat(temporary); err != nil {
		return err
	}
	return os.Rename(temporary, s.path)
}

// standing is what has become of a socket's file.
type standing int

const (
	held  standing = iota // it is ours
	gone                  // nothing is there, or nobody listens at what is there
	taken                 // somebody else listens there
)

func (s *socket) standing() (standing, error) {
	file, err := os.Lstat(s.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return gone, nil
	case err != nil:
		return gone, err
	case os.SameFile(file, s.file): // A number is not given again while the socket is open.
		return held, nil
	}
	c, err := net.DialTimeout("unix", s.path, time.Second)
	if err != nil {
		return gone, nil
	}
	return taken, c.Close()
}

// remove closes the socket, and removes its file if it is still ours.
func (s *socket) remove() error {
	var err error
	if st, _ := s.standing(); st == held {
		err = os.Remove(s.path)
	}
	if cerr := s.Close(); cerr != nil && !errors.Is(cerr, net.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	return err
}
