// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// doorPort is where an APIDoor listens on the node.
const doorPort = "6444"

// APIDoor is another way to a node's API server, which a test makes slow, busy or shut. It shows the
// API server's own certificate and passes the client's token on, so that a client keeps its name and rights.
type APIDoor struct {
	node   *Node
	server *http.Server
	proxy  *httputil.ReverseProxy
	served chan error

	mu sync.Mutex // guards what follows
	// weather is the present one; changed is closed when there is another.
	weather Weather
	changed chan struct{}
	conns   map[net.Conn]bool
	// asked counts the requests since the last Set, by method, path and whether it is a watch.
	asked map[string]int
}

// Weather is how an API server fares. The zero value is a well one.
type Weather struct {
	// Slow is how long each answer takes. A watch takes so long to open.
	Slow time.Duration
	// Busy refuses each request, also for a watch, with 429 and the wish to wait for a second. It cuts the
	// connections that stand, as a server does that has started anew and is asked by all clients at once.
	Busy bool
	// Away refuses connections, and cuts those that stand.
	Away bool
}

// OpenAPIDoor opens a way to the API server. Close shuts it.
func (n *Node) OpenAPIDoor() (*APIDoor, error) {
	const etc = "/etc/kubernetes/apiserver"
	certificate, err := tls.LoadX509KeyPair(n.File(etc+".crt"), n.File(etc+".key"))
	if err != nil {
		return nil, fmt.Errorf("open a door to the API server: %w", err)
	}
	to, err := url.Parse(n.api.server)
	if err != nil {
		return nil, fmt.Errorf("open a door to the API server: %w", err)
	}
	l, err := n.listen("0.0.0.0:" + doorPort)
	if err != nil {
		return nil, fmt.Errorf("open a door to the API server: %w", err)
	}
	d := &APIDoor{node: n, served: make(chan error, 1), changed: make(chan struct{}), conns: map[net.Conn]bool{},
		asked: map[string]int{}}
	quiet := log.New(io.Discard, "", 0) // connections are cut on purpose
	d.proxy = &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to) },
		Transport:     n.api.client.Transport,
		FlushInterval: -1, // the events of watches are told at once
		ErrorLog:      quiet,
	}
	d.server = &http.Server{
		Handler: http.HandlerFunc(d.pass), ConnState: d.state, ErrorLog: quiet,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12},
	}
	go func() { d.served <- d.server.ServeTLS(l, "", "") }()
	return d, nil
}

// listen listens in the node's network.
func (n *Node) listen(address string) (net.Listener, error) {
	namespace, err := os.Open(n.File("/proc/1/ns/net"))
	if err != nil {
		return nil, fmt.Errorf("find the node's network: %w", err)
	}
	defer namespace.Close()
	type result struct {
		l   net.Listener
		err error
	}
	done := make(chan result, 1)
	onThread(func() { // as in Dial
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- result{nil, fmt.Errorf("enter the node's network: %w", err)}
			return
		}
		l, err := net.Listen("tcp", address)
		done <- result{l, err}
	})
	r := <-done
	return r.l, r.err
}

// Env has the agent take this door, as DeployOptions.Env.
func (d *APIDoor) Env() map[string]string {
	return map[string]string{"KUBERNETES_SERVICE_PORT": doorPort}
}

// Set makes the weather, for what is asked from now on. Requests that wait for their answer begin anew under it. A
// watch that stands goes on, unless the weather cuts it.
func (d *APIDoor) Set(w Weather) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.weather = w
	close(d.changed)
	d.changed = make(chan struct{})
	d.asked = map[string]int{}
	if w.Away || w.Busy {
		for c := range d.conns {
			c.Close()
		}
	}
}

// Asked counts the requests that came since Set, those that are alike together: "GET /api/v1/nodes", and "watch" in
// the place of GET for a watch.
func (d *APIDoor) Asked() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.asked)
}

// Close shuts the door.
func (d *APIDoor) Close() error {
	err := d.server.Close()
	if served := <-d.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func (d *APIDoor) state(c net.Conn, s http.ConnState) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch s {
	case http.StateClosed, http.StateHijacked:
		delete(d.conns, c)
	default:
		if d.conns[c] = true; d.weather.Away {
			c.Close()
		}
	}
}

func (d *APIDoor) pass(w http.ResponseWriter, r *http.Request) {
	what := r.Method
	if r.URL.Query().Has("watch") {
		what = "watch"
	}
	d.mu.Lock()
	d.asked[what+" "+r.URL.Path]++
	d.mu.Unlock()
	for {
		d.mu.Lock()
		weather, changed := d.weather, d.changed
		d.mu.Unlock()
		switch {
		case weather.Away:
			panic(http.ErrAbortHandler)
		case weather.Busy:
			busy(w)
			return
		case weather.Slow > 0 && !sleepUnless(r.Context(), weather.Slow, changed):
			if r.Context().Err() != nil {
				return
			}
			continue
		}
		d.proxy.ServeHTTP(w, r)
		return
	}
}

// sleepUnless waits, and returns false if something else came first.
func sleepUnless(ctx context.Context, d time.Duration, changed <-chan struct{}) bool {
	select {
	case <-time.After(d):
		return true
	case <-changed:
	case <-ctx.Done():
	}
	return false
}

// busy answers as the API server does when it has too much to do.
func busy(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Retry-After", "1")
	w.WriteHeader(http.StatusTooManyRequests)
	// The client may have gone.
	_ = json.NewEncoder(w).Encode(object{"kind": "Status", "apiVersion": "v1", "status": "Failure",
		"reason": "TooManyRequests", "code": http.StatusTooManyRequests,
		"message": "Too many requests, please try again later.", "details": object{"retryAfterSeconds": 1}})
}
