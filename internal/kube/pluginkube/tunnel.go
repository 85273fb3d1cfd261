// SPDX-License-Identifier: Apache-2.0

package pluginkube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"
)

// Tunnel is a forwarded port of a pod.
type Tunnel struct {
	conn httpstream.Connection
	port int
	next atomic.Int64
	// HTTP speaks to what listens in the pod. The host of a URL does not matter.
	HTTP *http.Client
}

// Tunnel forwards the port of an agent's pages. The caller closes it.
func (c *Client) Tunnel(ctx context.Context, to Agent) (*Tunnel, error) {
	base, _, err := rest.DefaultServerUrlFor(c.config)
	if err != nil {
		return nil, err
	}
	at := base.JoinPath("api/v1/namespaces", to.Namespace, "pods", to.Name, "portforward")
	dialer, err := c.dialer(at)
	if err != nil {
		return nil, fmt.Errorf("forward a port to pod %s/%s: %w", to.Namespace, to.Name, err)
	}
	type result struct {
		conn httpstream.Connection
		err  error
	}
	dialed := make(chan result, 1)
	go func() { // a dial knows no context
		conn, _, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
		dialed <- result{conn, err}
	}()
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	select {
	case <-ctx.Done():
		go func() {
			if late := <-dialed; late.conn != nil {
				late.conn.Close()
			}
		}()
		return nil, fmt.Errorf("forward a port to pod %s/%s: %w", to.Namespace, to.Name, ctx.Err())
	case r := <-dialed:
		if r.err != nil {
			return nil, fmt.Errorf("forward a port to pod %s/%s: %w", to.Namespace, to.Name, r.err)
		}
		t := &Tunnel{conn: r.conn, port: to.Port}
		t.HTTP = &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
			DialContext: func(context.Context, string, string) (net.Conn, error) { return t.dial() }}}
		return t, nil
	}
}

// dialer returns how to connect: through a WebSocket, or where a proxy or an old server does not
// know that, by SPDY.
func (c *Client) dialer(at *url.URL) (httpstream.Dialer, error) {
	transport, upgrader, err := spdy.RoundTripperFor(c.config)
	if err != nil {
		return nil, err
	}
	old := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, at)
	socket, err := portforward.NewSPDYOverWebsocketDialerForStreaming(at, c.config)
	if err != nil {
		return nil, err
	}
	return portforward.NewFallbackDialerForStreaming(socket, old, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	}), nil
}

// Close ends the tunnel, with all that goes through it.
func (t *Tunnel) Close() error { return t.conn.Close() }

// dial opens a connection to the port: a pair of streams, of which one carries the kubelet's
// errors.
func (t *Tunnel) dial() (net.Conn, error) {
	headers := http.Header{}
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	headers.Set(corev1.PortHeader, strconv.Itoa(t.port))
	headers.Set(corev1.PortForwardRequestIDHeader, strconv.FormatInt(t.next.Add(1), 10))
	failed, err := t.conn.CreateStream(headers)
	if err != nil {
		return nil, fmt.Errorf("open a stream for errors: %w", err)
	}
	_ = failed.Close() // nothing is written to it
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := t.conn.CreateStream(headers)
	if err != nil {
		t.conn.RemoveStreams(failed)
		return nil, fmt.Errorf("open a stream for data: %w", err)
	}
	s := &stream{Stream: data, tunnel: t, failed: failed, told: make(chan error, 1)}
	go s.listen()
	return s, nil
}

// stream is a connection through a tunnel.
type stream struct {
	httpstream.Stream
	tunnel *Tunnel
	failed httpstream.Stream
	told   chan error // has the kubelet's error, if there is one, and is closed then
}

// listen waits for the kubelet's error, and ends the connection with it.
func (s *stream) listen() {
	text, err := io.ReadAll(io.LimitReader(s.failed, 4<<10))
	switch {
	case len(text) > 0:
		s.told <- errors.New(strings.TrimSpace(string(text)))
	case err != nil:
		s.told <- err
	default:
		close(s.told)
		return
	}
	close(s.told)
	_ = s.Stream.Reset()
}

func (s *stream) Read(p []byte) (int, error) {
	n, err := s.Stream.Read(p)
	if err != nil {
		select {
		case told, ok := <-s.told:
			if ok {
				err = told
			}
		case <-time.After(50 * time.Millisecond): // the error comes by the other stream
		}
	}
	return n, err
}

func (s *stream) Close() error {
	err := s.Stream.Reset()
	s.tunnel.conn.RemoveStreams(s.Stream, s.failed)
	_ = s.failed.Reset()
	return err
}

// A request's context bounds it, so the connection has no deadlines of its own.
func (s *stream) SetDeadline(time.Time) error      { return nil }
func (s *stream) SetReadDeadline(time.Time) error  { return nil }
func (s *stream) SetWriteDeadline(time.Time) error { return nil }

func (s *stream) LocalAddr() net.Addr  { return address("here") }
func (s *stream) RemoteAddr() net.Addr { return address("pod") }

type address string

func (address) Network() string  { return "portforward" }
func (a address) String() string { return string(a) }
