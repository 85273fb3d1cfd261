// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPeerThatHangs: a runtime that takes no connection holds nobody for ever.
func TestPeerThatHangs(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "runtime.sock")
	stream := func() int {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	listener, at := stream(), &unix.SockaddrUnix{Name: socket}
	if err := errors.Join(unix.Bind(listener, at), unix.Listen(listener, 0)); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		err := unix.Connect(stream(), at)
		if errors.Is(err, unix.EAGAIN) {
			break // its queue is full
		}
		if err != nil || i == 100 {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	r := NewRuntime(RuntimeOptions{Endpoint: socket})
	defer r.Close()
	if pid, _, err := r.peer(); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("behind a socket that nobody accepts at is process %d, %v", pid, err)
	}
}
