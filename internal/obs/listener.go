// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"container/list"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
)

// Limits on connections. An idle connection takes some 20 KiB. One whose client does not read takes
// as much memory as its answer. The largest answer is 1 MiB: /metrics of 16 GPUs with 1,264
// containers.
const (
	maxConnections = 64 // in all
	maxPerAddress  = 16 // of these, from one address
	// In addition, the server may have this many connections that it ended and that net/http has
	// not closed yet. After a request that was too large, net/http takes half a second for that.
	// With a lower limit, clients that send only such requests could make all others wait.
	maxEnding = 1024
)

// boundedListener limits the number of open connections, in all and for each remote address. It
// never refuses a connection: a new one replaces another. If its address is at the limit, it
// replaces one of that address, otherwise one of the address with the most connections. Of these it
// is the one that has gone longest without a request.
//
// So the server always answers the kubelet's probe, which connects, asks and is gone within a
// millisecond. It cannot reserve places for the probe, because the network plugin determines the
// address from which the kubelet connects.
type boundedListener struct {
	net.Listener
	total, perAddress, ending int // the limits

	mu     sync.Mutex
	freed  *sync.Cond         // signalled when an ended connection, or the listener, is closed
	queue  *list.List         // of *boundedConn; the front is replaced first
	held   map[netip.Addr]int // number in queue, by address
	ended  int                // number taken from queue and not closed yet
	closed bool
}

// boundedConn is a connection of a boundedListener.
type boundedConn struct {
	net.Conn
	listener *boundedListener
	from     netip.Addr
	place    *list.Element // nil once the connection has been ended or closed
	closed   bool
}

// Bound limits the connections of a listener to those that a Server accepts. It is for a server of
// another kind, whose ConnState must be [Asks].
func Bound(l net.Listener) net.Listener {
	return bound(l, maxConnections, maxPerAddress, maxEnding)
}

func bound(l net.Listener, total, perAddress, ending int) *boundedListener {
	b := &boundedListener{Listener: l, total: total, perAddress: perAddress, ending: ending,
		queue: list.New(), held: map[netip.Addr]int{}}
	b.freed = sync.NewCond(&b.mu)
	return b
}

// Accept waits for the next connection. It also waits while too many ended connections are not
// closed yet.
func (b *boundedListener) Accept() (net.Conn, error) {
	conn, err := b.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &boundedConn{Conn: conn, listener: b, from: address(conn.RemoteAddr())}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held[c.from] >= b.perAddress || b.queue.Len() >= b.total {
		b.makeRoomLocked(c.from)
	}
	for b.ended > b.ending && !b.closed {
		b.freed.Wait()
	}
	if b.closed {
		conn.Close()
		return nil, net.ErrClosed
	}
	b.held[c.from]++
	c.place = b.queue.PushBack(c)
	return c, nil
}

// makeRoomLocked ends a connection to make room for a new one from an address.
func (b *boundedListener) makeRoomLocked(from netip.Addr) {
	var victim *boundedConn
	for e := b.queue.Front(); e != nil; e = e.Next() {
		c := e.Value.(*boundedConn)
		if b.held[from] >= b.perAddress && c.from != from {
			continue
		}
		if victim == nil || b.held[c.from] > b.held[victim.from] {
			victim = c
		}
	}
	b.leaveLocked(victim)
	b.ended++
	if tcp, ok := victim.Conn.(*net.TCPConn); ok {
		// The kernel must not keep data of it either, since its peer may never answer.
		tcp.SetLinger(0)
	}
	// The server notices, and closes it like any other connection.
	victim.Conn.Close()
}

func (b *boundedListener) leaveLocked(c *boundedConn) {
	b.queue.Remove(c.place)
	c.place = nil
	if b.held[c.from]--; b.held[c.from] == 0 {
		delete(b.held, c.from)
	}
}

// Close closes the listener, but not its connections.
func (b *boundedListener) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.freed.Signal()
	return b.Listener.Close()
}

// Close closes the connection and frees its place.
func (c *boundedConn) Close() error {
	b := c.listener
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case c.closed:
	case c.place != nil:
		b.leaveLocked(c)
	default:
		b.ended--
		b.freed.Signal()
	}
	c.closed = true
	return c.Conn.Close()
}

// SyscallConn returns the socket, for callers that check whether the client has gone.
func (c *boundedConn) SyscallConn() (syscall.RawConn, error) {
	socket, ok := c.Conn.(syscall.Conn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return socket.SyscallConn()
}

// Asks is the ConnState of an http.Server. A connection with a request becomes the last to be
// replaced.
func Asks(conn net.Conn, state http.ConnState) {
	if secured, ok := conn.(*tls.Conn); ok {
		conn = secured.NetConn()
	}
	c, ok := conn.(*boundedConn)
	if !ok || state != http.StateActive {
		return
	}
	c.listener.mu.Lock()
	defer c.listener.mu.Unlock()
	if c.place != nil {
		c.listener.queue.MoveToBack(c.place)
	}
}

func address(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}
