// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"
)

// dial connects to addr from an address of loopback's and sends a text. The
// connection stays until the test ends.
func dial(t *testing.T, from, addr, send string) *net.TCPConn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	conn, err := d.DialContext(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	// The server may have ended it already.
	io.WriteString(conn, send)
	return conn.(*net.TCPConn)
}

// open tells whether the server still holds its end of a connection, of which
// nothing was read.
func open(t *testing.T, conn *net.TCPConn) bool {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	held := false
	if err := raw.Control(func(fd uintptr) {
		n, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		held = n > 0 || errors.Is(err, syscall.EAGAIN)
	}); err != nil {
		t.Fatal(err)
	}
	return held
}

// probed asks as the kubelet does, from an address, by a connection of its own.
func probed(t *testing.T, from, addr, page string) (int, string) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: d.DialContext}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+page, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(request)
	if err != nil {
		t.Fatalf("%s from %s: %v", page, from, err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatalf("%s from %s: %v", page, from, err)
	}
	return response.StatusCode, string(body)
}

// 12,850 idle connections of one pod took 256 MiB, which is the agent's limit.
func TestIdleConnectionsOfOneSourceAreBounded(t *testing.T) {
	addr := serve(t, Options{})
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	// On old code both ends of each were here.
	n := int(min(12850, limit.Cur/2-200))
	if testing.Short() {
		n = min(n, 50*maxPerAddress) // make test-all has all
	}
	var conns []*net.TCPConn
	for range n {
		conns = append(conns, dial(t, "127.0.0.1", addr, ""))
	}
	// Connections are accepted in turn: by this answer all of them were.
	if code, body := probed(t, "127.0.0.2", addr, "/healthz"); code != http.StatusOK {
		t.Errorf("a probe meanwhile: %d: %s", code, body)
	}
	held := 0
	for _, c := range conns {
		if open(t, c) {
			held++
		}
	}
	if held > maxPerAddress {
		t.Errorf("of %d idle connections from one address the server holds %d, want at most %d", n, held, maxPerAddress)
	}
	// The source itself is answered, too: nobody is locked out.
	if code, body := probed(t, "127.0.0.1", addr, "/readyz"); code != http.StatusOK {
		t.Errorf("a probe from the same address: %d: %s", code, body)
	}
}

// Whatever a crowd of pods does with its connections, the kubelet's probe is
// answered: it comes last, from an address that nobody knows before.
func TestProbesAreAnsweredWhileOthersHoldEveryConnection(t *testing.T) {
	for _, test := range []struct {
		what, send string
		answered   bool // so that a connection that was ended has something to read
	}{
		{"idle", "", false},
		{"half a header", "GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ", false},
		{"a large header", "GET / HTTP/1.1\r\nHost: x\r\nX-Large: " + strings.Repeat("x", 64<<10), true},
		{"not HTTP", "\x16\x03\x01\x02\x00\x01", true},
		{"kept alive", "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", true},
		{"a body to come", "GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n", true},
		{"unread pages", strings.Repeat("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 100), true},
	} {
		t.Run(test.what, func(t *testing.T) {
			addr := serve(t, Options{})
			var conns []*net.TCPConn
			pods := 200
			if testing.Short() {
				pods = 40 // three times what it holds; make test-all has all
			}
			for i := range pods { // with 5 connections each
				for range 5 {
					conns = append(conns, dial(t, fmt.Sprintf("127.1.%d.%d", i/100, i%100+1), addr, test.send))
				}
				if code, body := probed(t, "127.0.0.1", addr, "/healthz"); code != http.StatusOK {
					t.Fatalf("with %d connections: %d: %s", len(conns), code, body)
				}
			}
			held := 0
			for _, c := range conns {
				if open(t, c) {
					held++
				}
			}
			if held > maxConnections && !test.answered {
				t.Errorf("the server holds %d connections, want at most %d", held, maxConnections)
			}
		})
	}
}

// askedListener says when it is asked for the next connection: then the server has
// the ones before it.
type askedListener struct {
	net.Listener
	asked chan<- struct{}
}

func (l askedListener) Accept() (net.Conn, error) {
	l.asked <- struct{}{}
	return l.Listener.Accept()
}

// A scraper's connection, which is old but in use, does not go before idle ones.
func TestConnectionInUseGoesLast(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{}, 4*maxConnections)
	addr := serveOn(t, askedListener{listener, asked}, Options{})
	<-asked
	const ask = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
	used := dial(t, "127.0.0.1", addr, ask)
	<-asked
	reader := bufio.NewReader(used)
	for i := range 3 * maxConnections {
		response, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatalf("after %d other connections: %v", i, err)
		}
		io.Copy(io.Discard, response.Body)
		// One that comes and says nothing, from as many places as there are.
		dial(t, fmt.Sprintf("127.2.0.%d", i%200+1), addr, "")
		// Otherwise a server that gets no processor would find all of them at once.
		<-asked
		if _, err := io.WriteString(used, ask); err != nil {
			t.Fatalf("after %d other connections: %v", i+1, err)
		}
	}
}

// What was ended takes memory until its server has let go of it; so a listener
// waits where that is too much, but not for ever.
func TestConnectionsThatEndAreBounded(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := bound(l, 2, 2, 0)
	accepted := make(chan net.Conn)
	go func() {
		defer close(accepted)
		for {
			c, err := b.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	first := dial(t, "127.0.0.1", l.Addr().String(), "")
	one := <-accepted
	dial(t, "127.0.0.1", l.Addr().String(), "")
	two := <-accepted
	dial(t, "127.0.0.1", l.Addr().String(), "")
	// The third ends the first, and waits for its server.
	if _, err := first.Read(make([]byte, 1)); err == nil {
		t.Fatal("the first connection was not ended")
	}
	select {
	case <-accepted:
		t.Fatal("there are three")
	default:
	}
	one.Close()
	one.Close() // a second time gives nothing back
	three := <-accepted
	two.Close()
	three.Close()
	b.mu.Lock()
	if b.ended != 0 || len(b.held) != 0 || b.queue.Len() != 0 {
		t.Errorf("with no connection: %d are ending, %v, %d in the queue", b.ended, b.held, b.queue.Len())
	}
	b.mu.Unlock()
	// A listener that is closed while one waits for room lets go of it.
	for range 3 {
		dial(t, "127.0.0.1", l.Addr().String(), "")
	}
	<-accepted
	<-accepted
	b.Close()
	if c, ok := <-accepted; ok {
		t.Errorf("%v came after the end", c.RemoteAddr())
	}
}

// A door with TLS is bounded too: a connection that asks is kept, and one that does not goes,
// and whether a client has gone can still be seen at its socket.
func TestBoundedDoor(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.RemoteAddr) }))
	server.Listener.Close()
	server.Listener = Bound(plain)
	server.Config.ConnState = Asks
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	sockets := make(chan error, 1)
	server.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		_, err := c.(*tls.Conn).NetConn().(syscall.Conn).SyscallConn()
		sockets <- err
		return ctx
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	client := server.Client()
	ask := func() string {
		t.Helper()
		response, err := client.Get(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(body)
	}
	first := ask()
	accepted := func() {
		t.Helper()
		if err := <-sockets; err != nil {
			t.Fatalf("the socket cannot be reached: %v", err)
		}
	}
	accepted()
	for i := range 2 * maxPerAddress {
		dial(t, "127.0.0.1", plain.Addr().String(), "")
		accepted() // or a whole row of them would be at once, between two requests
		if i%4 == 0 {
			if again := ask(); again != first {
				t.Fatalf("the connection that asks was replaced: %s after %s", again, first)
			}
		}
	}
}
