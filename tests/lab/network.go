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
	// A socket belongs to the network that its thread is in when it is made.
	onThread(func() {
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- result{nil, fmt.Errorf("enter the network of process %d: %w", p.PID, err)}
			return
		}
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		done <- result{conn, err}
	})
	r := <-done
	return r.conn, r.err
}

// onThread has f called on a thread that ends afterwards, and so may enter other
// namespaces. It does not wait for it. The main thread, which Go keeps when its goroutine
// has ended, is none: it would hold a node's network for as long as this process lives.
func onThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return // locked: the thread ends with the goroutine
		}
		called := make(chan struct{})
		go func() { // not on this thread, which is taken
			defer close(called)
			runtime.LockOSThread()
			f()
		}()
		<-called
		runtime.UnlockOSThread()
	}()
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
