// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

// exportCall is the one call whose answer comes with a descriptor.
const exportCall = "cuMemExportToShareableHandle"

var exportHead = append([]byte{byte(len(exportCall))}, exportCall...)

// isExport reads a request for a descriptor of shared memory: any handle, the
// name, and the memory's identity.
func isExport(m []byte) (id uint64, ok bool) {
	if len(m) != 4+len(exportHead)+8 || !bytes.HasPrefix(m[4:], exportHead) {
		return 0, false
	}
	return binary.LittleEndian.Uint64(m[4+len(exportHead):]), true
}

// export answers with one end of a pair of sockets. Who has it finds the memory's
// identity waiting there, and may look at it as often as it likes; the other
// end tells the daemon when the last copy is closed, wherever it went.
func (s *Server) export(ctx context.Context, running *sync.WaitGroup, conn *net.UnixConn, session *emulator.Session, id uint64) error {
	reply := make([]byte, 16)
	ours, theirs, err := pair(id)
	r := emulator.InsufficientResources
	if err == nil {
		defer theirs.Close()
		var closed func()
		if closed, r = session.HoldByDescriptor(exportCall, id); r == emulator.Success {
			running.Go(func() { waitClosed(ctx, ours); closed() })
			_, _, err := conn.WriteMsgUnix(reply, unix.UnixRights(int(theirs.Fd())), nil)
			return err
		}
		ours.Close()
	}
	binary.LittleEndian.PutUint32(reply, uint32(r))
	_, err = conn.Write(reply)
	return err
}

func pair(id uint64) (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	ours, theirs = os.NewFile(uintptr(fds[0]), "export"), os.NewFile(uintptr(fds[1]), "exported")
	if _, err := ours.Write(binary.LittleEndian.AppendUint64([]byte("cuShared"), id)); err != nil {
		ours.Close()
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// waitClosed waits until the other end of a pair is closed, and closes this one.
func waitClosed(ctx context.Context, f *os.File) {
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { f.Close() })
	defer stop()
	for {
		if n, err := f.Read(make([]byte, 16)); err != nil || n == 0 {
			return
		}
	}
}
