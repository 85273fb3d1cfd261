// SPDX-License-Identifier: Apache-2.0

package obs

import (
	"container/list"
	"net"
	"net/http"
	"net/netip"
	"sync"
)

// How many connections the server has at most. An idle one takes some 20 KiB; one
// whose client does not read takes its answer, and the largest, /metrics of 16
// GPUs with 1,264 containers, has 1 MiB.
const (
	maxConnections = 64 // in all
	maxPerAddress  = 16 // of these, from one address
	// Beside them, those that were ended and that net/http has not closed yet,
	// which takes it half a second where a request was too large for it. With
	// fewer such, clients that send nothing else could keep all others waiting.
	maxEnding = 1024
)

// boundedListener hands out a bounded number of connections, in all and for each
// address that they come from. It turns nobody away: whoever comes takes the place
// of the connection that has gone longest without a request, among those of the
// address that has the most.
//
// So the kubelet's probe, which connects, asks and is gone within a millisecond,
// is answered while others hold every place. To keep places free for it is no
// way: which address the kubelet calls from is up to the network plugin.
type boundedListener struct {
	net.Listener
	total, perAddress, ending int // the bounds

	mu     sync.Mutex
	freed  *sync.Cond         // signalled when a connection that was ended, or the listener, is closed
	queue  *list.List         // of *boundedConn: the next to go first
	held   map[netip.Addr]int // how many are in queue from each address
	ended  int                // connections that were taken from queue and are not closed yet
	closed bool
}

// boundedConn is one of its connections.
type boundedConn struct {
	net.Conn
	listener *boundedListener
	from     netip.Addr
	place    *list.Element // nil once the connection was ended or closed
	closed   bool
}

func bound(l net.Listener, total, perAddress, ending int) *boundedListener {
	b := &boundedListener{Listener: l, total: total, perAddress: perAddress, ending: ending,
		queue: list.New(), held: map[netip.Addr]int{}}
	b.freed = sync.NewCond(&b.mu)
	return b
}

// Accept waits for the next connection, and while too many are ending.
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

// makeRoomLocked ends a connection for one that comes from an address.
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
		// The kernel keeps nothing of it either: its peer may never answer.
		tcp.SetLinger(0)
	}
	// The server finds out, and closes it as any other.
	victim.Conn.Close()
}

func (b *boundedListener) leaveLocked(c *boundedConn) {
	b.queue.Remove(c.place)
	c.place = nil
	if b.held[c.from]--; b.held[c.from] == 0 {
		delete(b.held, c.from)
	}
}

// Close ends the listener; connections live on.
func (b *boundedListener) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.freed.Signal()
	return b.Listener.Close()
}

// Close gives the place back.
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

// asks is an http.Server's ConnState: who asks for something is the last to go.
func asks(conn net.Conn, state http.ConnState) {
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

// fromHere tells whether a request comes from the server's own network namespace:
// over loopback, or from the very address that it went to, which the kernel drops
// where it comes from outside.
func fromHere(r *http.Request) bool {
	own, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return false
	}
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	to, from := address(own), peer.Addr().Unmap().WithZone("")
	return to.IsLoopback() && from.IsLoopback() || to.IsValid() && to == from
}
