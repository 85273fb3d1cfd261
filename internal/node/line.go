// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
)

// exact is gRPC's own codec, except that an answer takes as much memory as it is long.
// gRPC's buffers are of 32 KiB or of 1 MiB, with nothing between; the kubelet's list of
// some hundreds of devices is a little more than the former.
type exact struct{ encoding.CodecV2 }

func newExact() exact { return exact{encoding.GetCodecV2(proto.Name)} }

func (c exact) Unmarshal(data mem.BufferSlice, answer any) error {
	return c.CodecV2.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data.Materialize())}, answer)
}

// line is one gRPC connection to a server on this machine that restarts as it
// likes. Its methods may be called from several goroutines.
type line struct {
	// socket names the path to dial; it is asked anew for each connection.
	socket func() (string, error)
	// answers bounds what is accepted as an answer.
	answers []grpc.CallOption

	mu   sync.Mutex // guards conn
	conn *grpc.ClientConn
}

// ask calls question on the open connection. A server that restarted leaves the
// connection dead, so an unavailable server is tried once more on a fresh one.
func (l *line) ask(ctx context.Context, question func(*grpc.ClientConn) error) error {
	conn, fresh, err := l.connection(nil)
	if err != nil {
		return err
	}
	err = question(conn)
	// Canceled, without our context being so: another caller found the
	// connection dead and closed it.
	code := status.Code(err)
	if fresh || code != codes.Unavailable && code != codes.Canceled || ctx.Err() != nil {
		return err
	}
	if conn, _, err = l.connection(conn); err != nil {
		return err
	}
	return question(conn)
}

// connection returns the open connection, or a fresh one where there is none or
// the open one is known as dead.
func (l *line) connection(dead *grpc.ClientConn) (conn *grpc.ClientConn, fresh bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil && l.conn != dead {
		return l.conn, false, nil
	}
	if l.conn != nil {
		l.conn.Close()
		l.conn = nil
	}
	socket, err := l.socket()
	if err != nil {
		return nil, false, err
	}
	// A connection is dialled once. gRPC would take a stream that has not begun to
	// the next server without a word, which may be of another version and has said
	// nothing of what was missed meanwhile.
	var dialled atomic.Bool
	conn, err = grpc.NewClient("unix:"+socket,
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			if dialled.Swap(true) {
				return nil, errors.New("the connection was lost")
			}
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}),
		grpc.WithIdleTimeout(0),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(l.answers...))
	if err != nil {
		return nil, false, fmt.Errorf("prepare a connection: %w", err)
	}
	l.conn = conn
	return conn, true, nil
}

// close gives the connection back. A later question opens another.
func (l *line) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn == nil {
		return nil
	}
	conn := l.conn
	l.conn = nil
	return conn.Close()
}
