// SPDX-License-Identifier: Apache-2.0

package agentobs

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"example.com/gpu-agent/internal/status"
)

// elsewhere is a listener whose connections say that they come from an address
// and went to one.
type elsewhere struct {
	net.Listener
	from, to string
}

type stranger struct {
	net.Conn
	from, to net.Addr
}

func (s stranger) RemoteAddr() net.Addr { return s.from }

func (s stranger) LocalAddr() net.Addr { return s.to }

func (e elsewhere) Accept() (net.Conn, error) {
	c, err := e.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return stranger{c, net.TCPAddrFromAddrPort(netip.MustParseAddrPort(e.from)), net.TCPAddrFromAddrPort(netip.MustParseAddrPort(e.to))}, nil
}

// Every pod of the cluster could read each tenant's namespaces, pods and memory.
func TestStatusIsNotForTheNetwork(t *testing.T) {
	for _, test := range []struct {
		from, to string
		want     int
	}{
		{"127.0.0.1:4000", "127.0.0.1:9500", http.StatusOK},
		{"127.0.0.1:4000", "127.0.0.2:9500", http.StatusOK},
		{"[::1]:4000", "[::1]:9500", http.StatusOK},
		{"[::ffff:127.0.0.1]:4000", "[::ffff:127.0.0.1]:9500", http.StatusOK}, // a socket for both kinds of addresses
		{"10.244.1.7:4000", "10.244.1.7:9500", http.StatusOK},                 // the agent's own pod, with --http 10.244.1.7:9500
		{"10.244.1.1:4000", "10.244.1.7:9500", http.StatusForbidden},          // the node, or the API server's proxy
		{"10.244.1.8:4000", "10.244.1.7:9500", http.StatusForbidden},
		{"[fd00::8]:4000", "[fd00::7]:9500", http.StatusForbidden},
		{"[::ffff:10.244.1.8]:4000", "[::ffff:10.244.1.7]:9500", http.StatusForbidden},
		{"127.0.0.1:4000", "10.244.1.7:9500", http.StatusForbidden}, // a proxy beside the agent
		{"10.244.1.8:4000", "127.0.0.1:9500", http.StatusForbidden}, // a node that routes to loopback (CVE-2020-8558)
	} {
		t.Run(test.from+" to "+test.to, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			addr := serveOn(t, elsewhere{l, test.from, test.to}, Options{})
			for _, page := range []string{"/statusz", "/statusz?format=html"} {
				code, body := get(t, addr, page)
				if code != test.want {
					t.Errorf("%s: %d, want %d: %.200s", page, code, test.want, body)
				}
				if code != http.StatusOK && (strings.Contains(body, "train") || !strings.Contains(body, "port-forward")) {
					t.Errorf("%s: the refusal is %q, want the way and no pod's name", page, body)
				}
			}
			for _, page := range []string{"/healthz", "/readyz", "/metrics"} {
				if code, body := get(t, addr, page); code != http.StatusOK {
					t.Errorf("%s: %d: %.200s", page, code, body)
				}
			}
		})
	}
}

// unread is the answer of a client that does not read: a write of it does not
// return before the test ends.
type unread struct {
	header         http.Header
	writing, ended chan struct{}
}

func (u *unread) Header() http.Header { return u.header }

func (u *unread) WriteHeader(int) {}

func (u *unread) Write(p []byte) (int, error) {
	select {
	case u.writing <- struct{}{}:
		<-u.ended
	case <-u.ended:
	}
	return len(p), nil
}

// Those who ask for a page all at once have it made one after another, and those
// who do not read it keep nobody waiting.
func TestPagesAreMadeInTurn(t *testing.T) {
	for _, page := range []string{"/statusz", "/metrics"} {
		t.Run(page, func(t *testing.T) {
			var now, most atomic.Int32
			ok := func() error { return nil }
			pages := New(Options{Logger: slog.New(slog.DiscardHandler), Metrics: NewMetrics("v"), Healthy: ok, Ready: ok, Status: func() status.Status {
				for n := now.Add(1); n > most.Load(); {
					most.Store(n)
				}
				defer now.Add(-1)
				for range 100 {
					runtime.Gosched()
				}
				return sample()
			}}).Handler()
			ctx := context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv6loopback})
			ask := func(w http.ResponseWriter) {
				r := httptest.NewRequestWithContext(ctx, http.MethodGet, page, nil)
				r.RemoteAddr = "[::1]:4000"
				pages.ServeHTTP(w, r)
			}
			writing, ended := make(chan struct{}), make(chan struct{})
			var slow, fast sync.WaitGroup
			defer slow.Wait()
			defer close(ended)
			const many = 64
			for range many {
				slow.Go(func() { ask(&unread{http.Header{}, writing, ended}) })
			}
			for range many {
				<-writing
			}
			for range many {
				fast.Go(func() {
					got := httptest.NewRecorder()
					if ask(got); got.Code != http.StatusOK || !strings.Contains(got.Body.String(), "job-1") {
						t.Errorf("%d: %.200s", got.Code, got.Body)
					}
				})
			}
			fast.Wait()
			if got := most.Load(); got != 1 {
				t.Errorf("%d were made at a time, want 1", got)
			}
		})
	}
}
