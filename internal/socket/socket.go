// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// MaxPath is the longest path that a Unix socket's address holds, without the NUL that
// ends it.
const MaxPath = len(unix.RawSockaddrUnix{}.Path) - 1

// Socket is a listening socket and the file by which it is found. The file may go
// while the socket still listens: the kubelet removes all sockets of its device-plugin
// directory when it starts.
type Socket struct {
	*net.UnixListener
	Path string
	file fs.FileInfo
}

// Listen makes a socket at path, in place of whatever socket was there: a dead
// predecessor's, or that of one that is about to end. It is made under another name of
// the same directory, temporary, so that it is never there with more permissions than its
// owner's.
func Listen(path, temporary string) (*Socket, error) {
	temporary = filepath.Join(filepath.Dir(path), temporary)
	if max(len(temporary), len(path)) > MaxPath {
		return nil, fmt.Errorf("%s is too long for a socket's address of at most %d bytes", path, MaxPath)
	}
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temporary, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // By its name it might remove a successor's.
	s := &Socket{UnixListener: l, Path: path}
	if err := s.publish(temporary); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return s, nil
}

func (s *Socket) publish(temporary string) (err error) {
	if err := os.Chmod(temporary, 0o600); err != nil {
		return err
	}
	if s.file, err = os.Lstat(temporary); err != nil {
		return err
	}
	return os.Rename(temporary, s.Path)
}

// Standing is what has become of a socket's file.
type Standing int

// Standings.
const (
	Held     Standing = iota // it is ours
	Gone                     // nothing is there, or nobody listens at what is there
	Occupied                 // somebody else listens there
)

// Standing looks at the socket's file.
func (s *Socket) Standing() (Standing, error) {
	file, err := os.Lstat(s.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Gone, nil
	case err != nil:
		return Gone, err
	case os.SameFile(file, s.file): // A number is not given again while the socket is open.
		return Held, nil
	}
	c, err := net.DialTimeout("unix", s.Path, time.Second)
	if err != nil {
		return Gone, nil
	}
	return Occupied, c.Close()
}

// Remove closes the socket, and removes its file if it is still ours.
func (s *Socket) Remove() error {
	var err error
	if st, _ := s.Standing(); st == Held {
		err = os.Remove(s.Path)
	}
	if cerr := s.Close(); cerr != nil && !errors.Is(cerr, net.ErrClosed) {
		err = errors.Join(err, cerr)
	}
	return err
}

// ErrServed is wrapped by RemoveLeft's error where somebody listens.
var ErrServed = errors.New("a process listens there")

// RemoveLeft removes the socket that a killed process has left at path. It removes none
// that somebody listens on, for which the error wraps ErrServed, and no other file.
func RemoveLeft(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return nil // not ours
	}
	if conn, err := net.Dial("unix", path); err == nil {
		_ = conn.Close()
		return fmt.Errorf("remove socket %s: %w", path, ErrServed)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove socket: %w", err)
	}
	return nil
}

// Keep returns a socket whose file is at path: s, or a new one, made like Listen's, where
// there is none yet or its file is gone. Where another process listens there the error
// says so: if both took the place back there would be no end of it. The newer process has
// it, and we get it when that one ends.
func Keep(s *Socket, path, temporary string) (*Socket, error) {
	if s != nil {
		switch st, err := s.Standing(); {
		case err != nil:
			return nil, fmt.Errorf("look at socket: %w", err)
		case st == Held:
			return s, nil
		case st == Occupied:
			return nil, fmt.Errorf("another process listens at %s", path)
		}
	}
	s, err := Listen(path, temporary)
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	return s, nil
}
