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

// MaxPath is the longest path of a Unix socket's address, without the NUL at its end.
const MaxPath = len(unix.RawSockaddrUnix{}.Path) - 1

// Socket is a listening socket with its file. The file may go while the socket still listens: the
// kubelet removes all sockets of its device-plugin directory when it starts.
type Socket struct {
	*net.UnixListener
	Path string
	file fs.FileInfo
}

// Listen makes a socket at path, and replaces a socket that is there: that of a process that has
// been killed or is about to end. It makes the socket under the name temporary in the same
// directory and renames it, so that only its owner ever has permissions on path.
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
	l.SetUnlinkOnClose(false) // By its name, Close might remove the next process's socket.
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

// Standing is the state of a socket's file.
type Standing int

// Standings.
const (
	Held     Standing = iota // the file is this socket's
	Gone                     // there is no file, or no process listens at it
	Occupied                 // another process listens at the path
)

// Standing returns the state of the socket's file.
func (s *Socket) Standing() (Standing, error) {
	file, err := os.Lstat(s.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Gone, nil
	case err != nil:
		return Gone, err
	case os.SameFile(file, s.file): // Its inode is not reused while the socket is open.
		return Held, nil
	}
	c, err := net.DialTimeout("unix", s.Path, time.Second)
	if err != nil {
		return Gone, nil
	}
	return Occupied, c.Close()
}

// Remove closes the socket, and removes its file if the path still has it.
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

// ErrServed is the error of RemoveLeft for a socket on which a process listens.
var ErrServed = errors.New("a process listens there")

// RemoveLeft removes the socket that a killed process has left at path. If a process listens on it,
// the error wraps ErrServed. It leaves files that are not sockets, and a missing file is no error.
func RemoveLeft(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return nil // not a socket
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

// Keep returns a socket whose file is at path: s, or a new one if s is nil or its file is gone. It
// makes a new one as Listen does. It fails if another process, a newer one, listens at path: if
// each replaced the other's socket, that would never end. This process gets the path back when the
// newer one ends.
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
