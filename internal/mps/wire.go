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
	// mostAgents is how many requests are served at a time.
	mostAgents = 4
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
	places := make(chan struct{}, mostAgents)
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

// Client asks a supervisor. Its zero value is not usable.
type Client struct{ path string }

// NewClient returns a client for the supervisor of a state directory. It connects for each
// question, so the supervisor may come and go.
func NewClient(stateDir string) *Client { return &Client{filepath.Join(stateDir, socketName)} }

// Sync sets what shall be and returns what is, as Supervisor.Sync does. An empty list of wants is
// that no GPU shall have a daemon. The error wraps gpu.ErrNotFound if no supervisor listens, and
// gpu.ErrTimeout if it does not answer before ctx ends; without a deadline, in half a minute.
func (c *Client) Sync(ctx context.Context, wants []Want) (State, error) {
	if wants == nil {
		wants = []Want{}
	}
	r, err := c.ask(ctx, request{Want: &wants})
	return r.State, err
}

// State returns what is, and wants nothing.
func (c *Client) State(ctx context.Context) (State, error) {
	r, err := c.ask(ctx, request{})
	return r.State, err
}

// Detach detaches clients, as Supervisor.Detach does.
func (c *Client) Detach(ctx context.Context, d Detach) ([]Detached, error) {
	r, err := c.ask(ctx, request{Detach: &d})
	return r.Detached, err
}

// Probe probes a GPU's server, as Supervisor.Probe does.
func (c *Client) Probe(ctx context.Context, u gpu.UUID) (Probed, error) {
	r, err := c.ask(ctx, request{Probe: u})
	return r.Probed, err
}

// askWait bounds a question without a deadline.
const askWait = 30 * time.Second

func (c *Client) ask(ctx context.Context, q request) (r reply, err error) {
	defer func() {
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("%w: %w", gpu.ErrTimeout, err)
		}
		if err != nil {
			err = fmt.Errorf("ask the supervisor of MPS: %w", err)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.path)
	if err != nil {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
			err = fmt.Errorf("%w: %w; does it run?", gpu.ErrNotFound, err)
		}
		return r, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	q.Version = wireVersion
	if err := json.NewEncoder(conn).Encode(q); err != nil {
		return r, err
	}
	line, err := readLine(conn, mostReply)
	if err != nil {
		return r, err
	}
	if err := strict(line, &r); err != nil {
		return reply{}, fmt.Errorf("read its answer: %w", err)
	}
	if r.Error != "" {
		return r, errors.New(r.Error)
	}
	return r, nil
}
