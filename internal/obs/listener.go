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

// Limits on connections. An idle one takes some 20 KiB. One whose client does not read
// takes its answer; the largest, /metrics of 16 GPUs with 1,264 containers, has 1 MiB.
const (
	maxConnections = 64 // in all
	maxPerAddress  = 16 // of these, from one address
	// In addition, those that were ended and that net/http has not closed yet, which
	// takes it half a second after a request that was too large. With a lower limit,
	// clients that send only such requests could keep all others waiting.
	maxEnding = 1024
)

// boundedListener accepts a bounded number of connections, in all and for each remote
// address. It turns nobody away: a new connection replaces the one that has gone
// longest without a request, among those of the address that has the most.
//
// So the kubelet's probe, which connects, asks and is gone within a millisecond, is
// answered while others hold every place. Places cannot be reserved for it, because the
// network plugin determines the address from which the kubelet calls.
type boundedListener struct {
	net.Listener
	total, perAddress, ending int // the bounds

	mu     sync.Mutex
	freed  *sync.Cond         // signalled when a connection that was ended, or the listener, is closed
	queue  *list.List         // of *boundedConn: the next to go first
	held   map[netip.Addr]int // number in queue, by address
	ended  int                // number taken from queue and not closed yet
	closed bool
}

// boundedConn is one of its connections.
type boundedConn struct {
	net.Conn
	listener *boundedListener
	from     netip.Addr
	place    *list.Element // nil once the connection has been ended or closed
	closed   bool
}

// Bound makes a listener accept as many connections as a Server does, for a server of
// another protocol; its ConnState is to be [Asks].
func Bound(l net.Listener) net.Listener {
	return bound(l, maxConnections, maxPerAddress, maxEnding)
}

func bound(l net.Listener, total, perAddress, ending int) *boundedListener {
	b := &boundedListener{Listener: l, total: total, perAddress: perAddress, ending: ending,
		queue: list.New(), held: map[netip.Addr]int{}}
	b.freed = sync.NewCond(&b.mu)
	return b
}

// Accept waits for the next connection, and as long as too many are ending.
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

// makeRoomLocked ends a connection in favour of a new one from an address.
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
		// The kernel must not keep anything of it either: its peer may never answer.
		tcp.SetLinger(0)
	}
	// The server notices, and closes it like any other.
	victim.Conn.Close()
}

func (b *boundedListener) leaveLocked(c *boundedConn) {
	b.queue.Remove(c.place)
	c.place = nil
	if b.held[c.from]--; b.held[c.from] == 0 {
		delete(b.held, c.from)
	}
}

// Close closes the listener; connections stay.
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

// SyscallConn gives access to the socket, for those who look whether the client has gone.
func (c *boundedConn) SyscallConn() (syscall.RawConn, error) {
	socket, ok := c.Conn.(syscall.Conn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return socket.SyscallConn()
}

// Asks is an http.Server's ConnState: a connection with a request becomes the last to
// be replaced.
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
