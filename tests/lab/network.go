// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Dial connects to an address from where a process of the node is, as one of its
// pod's does. PID 1 is the node itself. The address must be an IP and a port.
func (n *Node) Dial(ctx context.Context, p Process, address string) (net.Conn, error) {
	namespace, err := os.Open(n.File(fmt.Sprintf("/proc/%d/ns/net", p.PID)))
	if err != nil {
		return nil, fmt.Errorf("find the network of process %d: %w", p.PID, err)
	}
	defer namespace.Close()
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result, 1)
	go func() {
		// A socket belongs to the network that its thread is in when it is made.
		// The thread is in another one from here on, and ends with this goroutine.
		runtime.LockOSThread()
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- result{nil, fmt.Errorf("enter the network of process %d: %w", p.PID, err)}
			return
		}
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		done <- result{conn, err}
	}()
	r := <-done
	return r.conn, r.err
}

// Get reads a page as a process of the node sees it.
func (n *Node) Get(ctx context.Context, p Process, url string) (status int, body []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return n.Dial(ctx, p, address)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return resp.StatusCode, body, err
}
