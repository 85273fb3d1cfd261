// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Client is this process as an emulated client of MPS: it has one context.
type Client struct {
	// Percent is what the context has of the multiprocessors.
	Percent float64
	conn    net.Conn
}

// Connect makes this process a client, by a directory as containers get it. It fails as a program
// without MPS would run.
func Connect(pipe string) (*Client, error) {
	c, err := net.Dial("unixpacket", filepath.Join(pipe, "control"))
	if err != nil {
		return nil, fmt.Errorf("a program would run without MPS: %w", err)
	}
	answer := make([]byte, 64)
	if _, err = c.Write([]byte("client")); err == nil {
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		var n int
		if n, err = c.Read(answer); err == nil {
			var server int
			var p float64
			if _, err = fmt.Sscanf(string(answer[:n]), "server %d percent %f", &server, &p); err == nil {
				return &Client{p, c}, nil
			}
			err = fmt.Errorf("the daemon answers %q", answer[:n])
		}
	}
	return nil, errors.Join(err, c.Close())
}

// Connected reports whether the context still exists.
func (c *Client) Connected() bool {
	_ = c.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, err := c.conn.Read(make([]byte, 1))
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// Close ends the context.
func (c *Client) Close() error { return c.conn.Close() }
