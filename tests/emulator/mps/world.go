// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
)

// world is the emulated driver of the programs' driver root. A nil world has no card.
type world struct {
	path string

	mu     sync.Mutex // guards client
	client *daemon.Client
}

// theWorld connects to the world, if there is a socket of one.
func theWorld() (*world, error) {
	path := cmp.Or(os.Getenv("GPU_EMULATOR_SOCKET"), filepath.Join(here(), "../..", install.Socket))
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	c, err := daemon.Dial(path)
	if err != nil {
		return nil, err
	}
	return &world{path: path, client: c}, nil
}

// wait returns when the world has ended.
func (w *world) wait() {
	if c, err := daemon.Dial(w.path); err == nil {
		c.Wait()
	}
}

func (w *world) do(f func(*daemon.Client) error) error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return f(w.client)
}

// serve makes this process the server of the GPU that it is to see, and returns its PID as clients
// tell it to the world.
func (w *world) serve(percent float64) (pid int, err error) {
	pid = os.Getpid()
	err = w.do(func(c *daemon.Client) (err error) {
		pid, err = c.ServeMPS(os.Getenv("CUDA_VISIBLE_DEVICES"), percent)
		return err
	})
	return pid, err
}

func (w *world) setPercent(server int, percent float64) error {
	return w.do(func(c *daemon.Client) error { return c.SetMPSPercent(server, percent) })
}

func (w *world) detach(server, client int) error {
	return w.do(func(c *daemon.Client) error { return c.DetachMPS(server, client) })
}

// inFault reports whether a server takes no client now.
func (w *world) inFault(server int) (fault bool, err error) {
	err = w.do(func(c *daemon.Client) error {
		st, err := c.State()
		for _, s := range st.MPS {
			fault = fault || s.PID == server && s.Fault
		}
		return err
	})
	return fault, err
}
