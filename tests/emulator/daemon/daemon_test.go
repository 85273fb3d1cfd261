// SPDX-License-Identifier: Apache-2.0

package daemon_test

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
)

func serve(t *testing.T, socket string) *emulator.World {
	t.Helper()
	w, err := emulator.New(emulator.Spec{Count: 4})
	if err != nil {
		t.Fatal(err)
	}
	l, err := daemon.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- (&daemon.Server{World: w}).Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return w
}

func dial(t *testing.T, socket string) *daemon.Client {
	t.Helper()
	c, err := daemon.Dial(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestOperatorsHand(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	w := serve(t, socket)
	c := dial(t, socket)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.Lose(1))
	if !w.State().GPUs[1].Lost {
		t.Error("GPU 1 is not lost")
	}
	if err := c.Lose(1); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("lose it again: %v", err)
	}
	must(c.Restore(1))
	must(c.Inject(emulator.Fault{Call: "nvmlInit_v2", Code: emulator.Unknown}))
	st, err := c.State()
	must(err)
	if st.GPUs[1].Lost || len(st.Faults) != 1 || st.Faults[0].Code != emulator.Unknown {
		t.Errorf("state: %+v", st)
	}
	if st.GPUs[0].PCIDevice != 0x233010DE {
		t.Errorf("PCI device %x", st.GPUs[0].PCIDevice)
	}
	must(c.Clear())
	if n := len(w.State().Faults); n != 0 {
		t.Errorf("%d faults after clear", n)
	}
	for what, err := range map[string]error{
		"an Xid on GPU 4":        c.Xid(4, 48),
		"a fault of nothing":     c.Inject(emulator.Fault{Call: "nvmlInit_v2"}),
		"memory that is not had": c.Hold(emulator.Process{GPU: 0, Kind: emulator.Compute, MiB: 1 << 20}),
		"a kind of no process":   c.Hold(emulator.Process{GPU: 0, Kind: "x", MiB: 1}),
	} {
		if err == nil {
			t.Errorf("not refused: %s", what)
		}
	}
	must(c.Hold(emulator.Process{GPU: 2, Kind: emulator.Graphics, MiB: 7}))
	if ok, err := c.Holds(os.Getpid()); !ok || err != nil {
		t.Errorf("own process holds memory: %v, %v", ok, err)
	}
	if ok, err := c.Holds(1); ok || err != nil {
		t.Errorf("PID 1 holds memory: %v, %v", ok, err)
	}
}

// A world's history is longer than a message.
func TestLongHistory(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	w := serve(t, socket)
	c := dial(t, socket)
	for range 3000 {
		if err := errors.Join(w.SetMIG(0, true), w.SetMIG(0, false)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.State(); err != nil {
		t.Fatal(err)
	}
	ops, err := c.MIGOps(0)
	if err != nil || !slices.Equal(ops, w.State().MIGOps) || len(ops) != 6000 {
		t.Errorf("%d changes, %v, want 6000", len(ops), err)
	}
	if last, err := c.MIGOps(ops[5997].Serial); err != nil || !slices.Equal(last, ops[5998:]) {
		t.Errorf("after the last but two: %v, %v", last, err)
	}
}

func TestSocketWithALongPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long/", 40))
	socket := filepath.Join(dir, "socket")
	serve(t, socket)
	if _, err := dial(t, socket).State(); err != nil {
		t.Error(err)
	}
}

func TestListen(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	serve(t, socket)
	if l, err := daemon.Listen(socket); err == nil {
		l.Close()
		t.Error("a second daemon took the socket of one that answers")
	}
	dead := filepath.Join(t.TempDir(), "dead")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: dead, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	serve(t, dead)
	if _, err := dial(t, dead).State(); err != nil {
		t.Errorf("in place of a dead daemon: %v", err)
	}
}

// A program that connects in the moment in which the daemon ends hears of its
// end, and the next daemon finds the socket free.
func TestNobodyIsLeftWaiting(t *testing.T) {
	w, err := emulator.New(emulator.Spec{Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	socket := filepath.Join(t.TempDir(), "s")
	for range 500 {
		l, err := daemon.Listen(socket)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("unixpacket", socket)
		if err != nil {
			t.Fatal(err)
		}
		if err := (&daemon.Server{World: w}).Serve(ended, l); err != nil {
			t.Error(err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("after the daemon's end: %v", err)
		}
		conn.Close()
	}
}

func TestStrangersAreTurnedAway(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	w := serve(t, socket)
	hello := func(version uint32) []byte {
		m := append([]byte{0xff, 0xff, 0xff, 0xff, 5}, "hello"...)
		m = binary.LittleEndian.AppendUint32(m, version)
		m = binary.LittleEndian.AppendUint32(m, 0)
		return binary.LittleEndian.AppendUint64(m, 0)
	}
	for name, first := range map[string][]byte{
		"no hello":         []byte("GET / HTTP/1.1\r\n"),
		"short hello":      hello(2)[:22],
		"another protocol": hello(3),
	} {
		conn, err := net.Dial("unixpacket", socket)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(first); err != nil {
			t.Fatal(err)
		}
		reply := make([]byte, 64)
		n, err := conn.Read(reply)
		for err == nil { // a refusal may come first; then the end
			if binary.LittleEndian.Uint32(reply[:n]) != uint32(emulator.VersionMismatch) {
				t.Errorf("%s: answered %x", name, reply[:n])
				break
			}
			n, err = conn.Read(reply)
		}
		conn.Close()
	}
	if len(w.Calls(0)) != 0 {
		t.Errorf("calls: %v", w.Calls(0))
	}
}
