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

// exact is gRPC's own codec, but it reads each answer into a buffer of its exact length. gRPC's
// buffers are of 32 KiB or of 1 MiB, with nothing between. The kubelet's list of some hundreds of
// devices is slightly longer than the former.
type exact struct{ encoding.CodecV2 }

func newExact() exact { return exact{encoding.GetCodecV2(proto.Name)} }

func (c exact) Unmarshal(data mem.BufferSlice, answer any) error {
	return c.CodecV2.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data.Materialize())}, answer)
}

// grpcClient is one gRPC connection to a server on this machine, which may restart at any time. Its
// methods may be called from several goroutines.
type grpcClient struct {
	// socket returns the path to dial. It is called for each new connection.
	socket func() (string, error)
	// answers limits the answers that are accepted.
	answers []grpc.CallOption

	mu   sync.Mutex // guards conn
	conn *grpc.ClientConn
}

// ask calls question with the open connection. If the server has restarted, that connection is
// dead. So if the server is unavailable, ask tries once more on a new connection.
func (c *grpcClient) ask(ctx context.Context, question func(*grpc.ClientConn) error) error {
	conn, fresh, err := c.connection(nil)
	if err != nil {
		return err
	}
	err = question(conn)
	// Canceled although ctx is not: another caller found the connection dead and closed it.
	code := status.Code(err)
	if fresh || code != codes.Unavailable && code != codes.Canceled || ctx.Err() != nil {
		return err
	}
	if conn, _, err = c.connection(conn); err != nil {
		return err
	}
	return question(conn)
}

// connection returns the open connection. It opens a new one if there is none, or if the open one
// is dead.
func (c *grpcClient) connection(dead *grpc.ClientConn) (conn *grpc.ClientConn, fresh bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil && c.conn != dead {
		return c.conn, false, nil
	}
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
	socket, err := c.socket()
	if err != nil {
		return nil, false, err
	}
	// A connection is dialled once. Otherwise gRPC would silently move a stream that has not begun
	// to the next server. That may be of another version, and would not tell which events the
	// client has missed.
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
		grpc.WithDefaultCallOptions(c.answers...))
	if err != nil {
		return nil, false, fmt.Errorf("prepare a connection: %w", err)
	}
	c.conn = conn
	return conn, true, nil
}

// close closes the connection. A later question opens a new one.
func (c *grpcClient) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		return nil
	}
	conn := c.conn
	c.conn = nil
	return conn.Close()
}
