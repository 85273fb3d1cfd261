// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/socket"
	"example.com/gpu-agent/pkg/gpu"
)

// socketName is the supervisor's socket in the state directory.
const socketName = "mps.sock"

// request is one line of JSON that an agent writes. At most one of Want, Detach and Probe is set; with
// none, it asks only what is.
type request struct {
	Version int `json:"version"`
	// Want is all that shall be; an empty list is that no daemon shall be.
	Want   *[]Want `json:"want,omitempty"`
	Detach *Detach `json:"detach,omitempty"`
	// Probe is the GPU whose server is to be probed; empty if none is.
	Probe gpu.UUID `json:"probe,omitempty"`
}

// reply is one line of JSON that the supervisor writes.
type reply struct {
	State    State      `json:"state"`
	Detached []Detached `json:"detached,omitempty"`
	Probed   Probed     `json:"probed,omitempty"`
	// Error is why the request was refused; empty if it was not.
	Error string `json:"error,omitempty"`
}

const (
	wireVersion = 1
	// mostRequest and mostReply bound a line, in bytes. A reply has some 10 bytes for each client
	// of a server.
	mostRequest = 64 << 10
	mostReply   = 4 << 20
	// mostAsked is how many requests are served at a time. An agent has one for each GPU whose clients it has
	// detached, one for each that it probes, and one for all else.
	mostAsked = 2*mostGPUs + 2
	// readWait is how long a request or a reply may take to be read or written.
	readWait = 5 * time.Second
	// keepWait is the time between two looks for whether the socket's file is still there.
	keepWait = time.Second
)

// serve serves agents until ctx ends.
func (s *Supervisor) serve(ctx context.Context) error {
	path := filepath.Join(s.opts.StateDir, socketName)
	l, err := socket.Keep(nil, path, "."+socketName)
	if err != nil {
		return fmt.Errorf("serve agents: %w", err)
	}
	defer func() { _ = l.Remove() }()
	var now atomic.Pointer[socket.Socket]
	now.Store(l)
	defer context.AfterFunc(ctx, func() { _ = now.Load().SetDeadline(time.Now()) })()
	var answering sync.WaitGroup
	defer answering.Wait()
	places := make(chan struct{}, mostAsked)
	for ctx.Err() == nil {
		if l, err = socket.Keep(l, path, "."+socketName); err != nil {
			return fmt.Errorf("serve agents: %w", err)
		}
		now.Store(l)
		if err := l.SetDeadline(time.Now().Add(keepWait)); err != nil {
			return fmt.Errorf("serve agents: %w", err)
		}
		if ctx.Err() != nil { // the deadline of its end is not to be put off
			return nil
		}
		c, err := l.AcceptUnix()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case err != nil:
			return fmt.Errorf("serve agents: %w", err)
		}
		select {
		case places <- struct{}{}:
			answering.Go(func() {
				defer func() { <-places }()
				s.answer(ctx, c)
			})
		default:
			_ = c.Close()
		}
	}
	return nil
}

// answer answers one request.
func (s *Supervisor) answer(ctx context.Context, c *net.UnixConn) {
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Now()) })()
	if err := trusted(c); err != nil {
		s.opts.Logger.Warn("refuse a program at the socket of MPS", "err", err)
		return
	}
	_ = c.SetDeadline(time.Now().Add(readWait))
	r, err := s.carryOut(ctx, c)
	if err != nil {
		r.Error = brief.Cut(err.Error(), brief.Text)
	}
	r.State = s.State()
	_ = c.SetDeadline(time.Now().Add(readWait))
	if err := json.NewEncoder(c).Encode(r); err != nil {
		s.opts.Logger.Debug("answer an agent", "err", err)
	}
}

// trusted fails for a process of another user.
func trusted(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		cred, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || failed != nil {
		return errors.Join(err, failed)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("process %d is of user %d: %w", cred.Pid, cred.Uid, gpu.ErrNoPermission)
	}
	return nil
}

func (s *Supervisor) carryOut(ctx context.Context, c io.Reader) (r reply, err error) {
	line, err := readLine(c, mostRequest)
	if err != nil {
		return r, fmt.Errorf("read the request: %w", err)
	}
	var q request
	if err := strict(line, &q); err != nil {
		return r, fmt.Errorf("read the request: %w: %w", err, gpu.ErrInvalid)
	}
	switch {
	case q.Version != wireVersion:
		err = fmt.Errorf("the request has version %d, and this supervisor speaks %d: update one of them: %w",
			q.Version, wireVersion, gpu.ErrNotSupported)
	case q.Want != nil && q.Detach != nil, q.Probe != "" && (q.Want != nil || q.Detach != nil):
		err = fmt.Errorf("the request has more than one of want, detach and probe: %w", gpu.ErrInvalid)
	case q.Want != nil:
		_, err = s.Sync(ctx, *q.Want)
	case q.Detach != nil:
		r.Detached, err = s.Detach(ctx, *q.Detach)
	case q.Probe != "":
		r.Probed, err = s.Probe(ctx, q.Probe)
	}
	return r, err
}

// readLine reads a line of at most so many bytes.
func readLine(from io.Reader, most int) ([]byte, error) {
	b := bufio.NewReader(io.LimitReader(from, int64(most)))
	line, err := b.ReadBytes('\n')
	if errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%d bytes without the end of a line; want at most %d: %w",
			len(line), most, gpu.ErrInvalid)
	}
	return line, err
}
