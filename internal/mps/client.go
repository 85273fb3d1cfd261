// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// Client asks a supervisor. Its zero value is not usable. Any goroutine may use it.
type Client struct {
	path string

	mu sync.Mutex
	// Guarded by mu. next has an entry for each GPU about which the client asks the supervisor now: the question that
	// it asks after that one, or nil if no call has come since.
	next map[gpu.UUID]*leaving
}

// leaving is one question to the supervisor: the clients of all calls that came while the client asked the question
// before. Many containers may end at one moment, and the supervisor detaches the clients of one question together.
type leaving struct {
	clients []int // guarded by the Client's mu until the question is asked
	// outcome is that of each client, and err why there is none, once done is closed.
	outcome map[int]Outcome
	err     error
	done    chan struct{}
}

// NewClient returns a client for the supervisor of a state directory. It connects for each
// question, so the supervisor may come and go.
func NewClient(stateDir string) *Client {
	return &Client{path: filepath.Join(stateDir, socketName), next: map[gpu.UUID]*leaving{}}
}

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

// Detach detaches clients, as Supervisor.Detach does. Calls for one GPU that come while the supervisor is asked to
// detach others are one question together. What was asked is asked also if ctx ends meanwhile.
func (c *Client) Detach(ctx context.Context, d Detach) ([]Detached, error) {
	if err := d.check(); err != nil {
		return nil, fmt.Errorf("detach clients of MPS: %w", err)
	}
	c.mu.Lock()
	l, asking := c.next[d.GPU]
	if l == nil {
		l = &leaving{outcome: map[int]Outcome{}, done: make(chan struct{})}
		c.next[d.GPU] = l
	}
	l.clients = append(l.clients, d.Clients...)
	if !asking {
		go c.detach(d.GPU)
	}
	c.mu.Unlock()
	select {
	case <-l.done:
	case <-ctx.Done():
		return nil, fmt.Errorf("ask the supervisor of MPS to detach clients of %s: %w: %w", d.GPU, gpu.ErrTimeout, ctx.Err())
	}
	if l.err != nil {
		return nil, l.err
	}
	var all []Detached
	for _, pid := range d.Clients {
		all = append(all, Detached{pid, cmp.Or(l.outcome[pid], Unanswered)})
	}
	return all, nil
}

// detach asks the supervisor one question after the other about a GPU, until no call waits.
func (c *Client) detach(u gpu.UUID) {
	for {
		c.mu.Lock()
		l := c.next[u]
		if l == nil {
			delete(c.next, u)
			c.mu.Unlock()
			return
		}
		c.next[u] = nil
		c.mu.Unlock()
		slices.Sort(l.clients)
		for clients := range slices.Chunk(slices.Compact(l.clients), mostDetached) {
			r, err := c.ask(context.Background(), request{Detach: &Detach{u, clients}})
			if l.err = err; err != nil {
				break
			}
			for _, d := range r.Detached {
				l.outcome[d.Client] = d.Outcome
			}
		}
		close(l.done)
	}
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
