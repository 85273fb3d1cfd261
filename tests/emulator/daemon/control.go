// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
)

// command is what an operator asks of the world.
type command struct {
	Op      string            `json:"op"`
	GPU     int               `json:"gpu,omitempty"`
	Xid     uint64            `json:"xid,omitempty"`
	Driver  string            `json:"driver,omitempty"`
	Bare    bool              `json:"bare,omitempty"`
	Reset   bool              `json:"reset,omitempty"`
	On      bool              `json:"on,omitempty"`
	Profile string            `json:"profile,omitempty"`
	After   uint64            `json:"after,omitempty"`
	Start   int               `json:"start,omitempty"`
	Link    int               `json:"link,omitempty"`
	Force   bool              `json:"force,omitempty"`
	Health  *emulator.Health  `json:"health,omitempty"`
	Setup   *emulator.Setup   `json:"setup,omitempty"`
	PID     int               `json:"pid,omitempty"`
	Client  int               `json:"client,omitempty"`
	UUID    string            `json:"uuid,omitempty"`
	Percent float64           `json:"percent,omitempty"`
	Fault   *emulator.Fault   `json:"fault,omitempty"`
	Process *emulator.Process `json:"process,omitempty"`
}

type result struct {
	Error string               `json:"error,omitempty"`
	Yes   bool                 `json:"yes,omitempty"`
	Bytes uint64               `json:"bytes,omitempty"`
	PID   int                  `json:"pid,omitempty"`
	State *emulator.State      `json:"state,omitempty"`
	Calls []emulator.CallCount `json:"calls,omitempty"`
	Ops   []emulator.MIGOp     `json:"ops,omitempty"`
}

// controlHead is the head of a request named control: no GPU, then the name.
var controlHead = append(binary.LittleEndian.AppendUint32(nil, uint32(emulator.NoHandle)), "\x07control"...)

func isControl(m []byte) (args []byte, ok bool) { return bytes.CutPrefix(m, controlHead) }

func (s *Server) control(ctx context.Context, running *sync.WaitGroup, p peer, args []byte) result {
	var c command
	if err := json.Unmarshal(args, &c); err != nil {
		return result{Error: "read command: " + err.Error()}
	}
	r, err := s.obey(ctx, running, p, c)
	if err != nil {
		r.Error = err.Error()
	}
	s.Log.Info("control", "op", c.Op, "gpu", c.GPU, "by", p.pid, "err", r.Error)
	return r
}

func (s *Server) obey(ctx context.Context, running *sync.WaitGroup, p peer, c command) (r result, err error) {
	w := s.World
	switch c.Op {
	case "state":
		st := w.State()
		st.MIGOps = nil // they have pages of their own: a message holds only so much
		r.State = &st
	case "mig-ops":
		r.Ops = w.MIGOps(c.After)
		r.Ops = r.Ops[:min(len(r.Ops), opsPage)]
	case "calls":
		r.Calls = w.Calls(c.PID)
	case "reset-calls":
		w.ResetCalls()
	case "xid":
		if p := c.Process; p != nil {
			err = w.XidOn(p.GPU, p.GI, p.CI, c.Xid)
		} else if c.Bare {
			err = w.XidBare(c.GPU, c.Xid)
		} else {
			err = w.Xid(c.GPU, c.Xid)
		}
	case "peak":
		if r.Bytes, err = w.PeakUsed(c.GPU); err == nil && c.Reset {
			err = w.ResetPeak(c.GPU)
		}
	case "health":
		if c.Health == nil {
			return r, errors.New("health: none given")
		}
		err = w.SetHealth(c.GPU, *c.Health)
	case "setup":
		if c.Setup == nil {
			return r, errors.New("setup: none given")
		}
		err = w.SetSetup(c.GPU, *c.Setup)
	case "lose":
		err = w.Lose(c.GPU)
	case "restore":
		err = w.Restore(c.GPU)
	case "link":
		err = w.SetLink(c.GPU, c.Link, c.On)
	case "reset":
		err = s.change(func() error { return w.Reset(c.GPU) })
	case "mig":
		err = s.change(func() error { return w.SetMIG(c.GPU, c.On) })
	case "create":
		err = s.change(func() error { return w.CreateInstance(c.GPU, c.Profile, c.Start, c.Bare) })
	case "destroy":
		err = s.change(func() error { return w.DestroyInstance(c.GPU, c.Start) })
	case "reboot":
		err = s.change(func() error { return w.Reboot(c.Force) })
	case "unplug":
		err = s.change(func() error { return w.Unplug(c.GPU) })
	case "plug":
		err = s.change(func() error { return w.Plug(c.GPU) })
	case "unload":
		err = s.change(w.Unload)
	case "load":
		// Libraries first: whoever initialises a loaded driver finds its own.
		if c.Driver != "" {
			err = s.change(func() error { return w.Upgrade(c.Driver) })
		}
		if err == nil {
			err = s.change(w.Load)
		}
	case "inject":
		if c.Fault == nil {
			return r, errors.New("inject: no fault given")
		}
		err = w.Inject(*c.Fault)
	case "clear":
		w.Clear()
	case "hold":
		if c.Process == nil {
			return r, errors.New("hold: no process given")
		}
		err = s.hold(ctx, running, p, *c.Process)
	case "mps-serve":
		r.PID = p.pid
		err = s.serveMPS(ctx, running, p, c.UUID, c.Percent)
	case "mps-percent":
		err = w.SetMPSPercent(c.PID, c.Percent)
	case "mps-detach":
		err = w.DetachMPS(c.PID, c.Client)
	case "fail":
		err = w.Fail(c.PID, c.Xid)
	case "busy":
		err = w.KeepBusy(c.PID, c.GPU, int(c.Percent))
	case "holds":
		v, err := newView(s.Proc, p.pid)
		if err != nil {
			return r, err
		}
		for _, q := range w.State().Processes {
			if pid, ok := v.see(q.PID); ok && pid == c.PID {
				r.Yes = true
			}
		}
	default:
		err = fmt.Errorf("no such command: %q", c.Op)
	}
	return r, err
}

// change changes the world in a way that the machine's files follow.
func (s *Server) change(do func() error) error {
	s.laying.Lock()
	defer s.laying.Unlock()
	if err := do(); err != nil {
		return err
	}
	return install.Follow(s.Driver, s.World)
}

// Client is a connection to a daemon, for whoever runs the emulator. It may
// not be used from two goroutines at once.
type Client struct {
	conn *net.UnixConn
	buf  []byte
}

// Dial connects to the daemon at a socket.
func Dial(path string) (*Client, error) {
	short, done, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer done()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: short, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("connect to the emulator at %s: %w", path, err)
	}
	c := &Client{conn: conn, buf: make([]byte, 1<<20)}
	hello := binary.LittleEndian.AppendUint32(nil, uint32(emulator.NoHandle))
	hello = append(hello, "\x05hello"...)
	hello = binary.LittleEndian.AppendUint32(hello, protocol)
	hello = binary.LittleEndian.AppendUint32(hello, 0)
	hello = binary.LittleEndian.AppendUint64(hello, 0)
	if _, err := conn.Write(hello); err != nil {
		conn.Close()
		return nil, fmt.Errorf("greet the emulator: %w", err)
	}
	if n, err := conn.Read(c.buf); err != nil || n < 4 || binary.LittleEndian.Uint32(c.buf) != 0 {
		conn.Close()
		return nil, fmt.Errorf("greet the emulator: it refused (%d bytes, %w)", n, err)
	}
	return c, nil
}

// Close ends the connection; memory that Hold took stays until the process
// ends.
func (c *Client) Close() error { return c.conn.Close() }

func (c *Client) do(cmd command) (result, error) {
	data, err := json.Marshal(cmd)
	if err != nil {
		return result{}, err
	}
	if _, err := c.conn.Write(append(bytes.Clone(controlHead), data...)); err != nil {
		return result{}, fmt.Errorf("%s: %w", cmd.Op, err)
	}
	n, err := c.conn.Read(c.buf)
	if err != nil {
		return result{}, fmt.Errorf("%s: %w", cmd.Op, err)
	}
	var r result
	if err := json.Unmarshal(c.buf[:n], &r); err != nil {
		return result{}, fmt.Errorf("%s: read answer: %w", cmd.Op, err)
	}
	if r.Error != "" {
		return result{}, fmt.Errorf("%s: %s", cmd.Op, r.Error)
	}
	return r, nil
}

// State returns all there is to see of the world, but for its MIGOps; PIDs are the
// daemon's.
func (c *Client) State() (emulator.State, error) {
	r, err := c.do(command{Op: "state"})
	if err != nil {
		return emulator.State{}, err
	}
	return *r.State, nil
}

// opsPage is how many changes of the MIG side go into one message.
const opsPage = 500

// MIGOps are the changes after one of them, see World.MIGOps.
func (c *Client) MIGOps(after uint64) ([]emulator.MIGOp, error) {
	var all []emulator.MIGOp
	for {
		r, err := c.do(command{Op: "mig-ops", After: after})
		if err != nil || len(r.Ops) == 0 {
			return all, err
		}
		all = append(all, r.Ops...)
		after = r.Ops[len(r.Ops)-1].Serial
	}
}

// Calls counts driver calls, see World.Calls; pid is the daemon's.
func (c *Client) Calls(pid int) ([]emulator.CallCount, error) {
	r, err := c.do(command{Op: "calls", PID: pid})
	return r.Calls, err
}

// ResetCalls starts the counting anew.
func (c *Client) ResetCalls() error { return c.just(command{Op: "reset-calls"}) }

// Xid raises an Xid on a GPU, with what the fault behind it does to the GPU.
func (c *Client) Xid(gpu int, xid uint64) error {
	return c.just(command{Op: "xid", GPU: gpu, Xid: xid})
}

// XidOn raises an Xid on the instances of a GPU, see World.XidOn.
func (c *Client) XidOn(gpu, gi, ci int, xid uint64) error {
	return c.just(command{Op: "xid", GPU: gpu, Xid: xid, Process: &emulator.Process{GPU: gpu, GI: gi, CI: ci}})
}

// XidBare raises an Xid and leaves all else as it is.
func (c *Client) XidBare(gpu int, xid uint64) error {
	return c.just(command{Op: "xid", GPU: gpu, Xid: xid, Bare: true})
}

// PeakUsed is the most bytes that a GPU's processes had together since the last
// reset, which reset does after reading.
func (c *Client) PeakUsed(gpu int, reset bool) (uint64, error) {
	r, err := c.do(command{Op: "peak", GPU: gpu, Reset: reset})
	return r.Bytes, err
}

// SetHealth makes a GPU's health whatever a test needs.
func (c *Client) SetHealth(gpu int, h emulator.Health) error {
	return c.just(command{Op: "health", GPU: gpu, Health: &h})
}

// SetSetup makes a GPU's setup whatever a test needs.
func (c *Client) SetSetup(gpu int, s emulator.Setup) error {
	return c.just(command{Op: "setup", GPU: gpu, Setup: &s})
}

// Lose drops a GPU off the bus, with Xid 79.
func (c *Client) Lose(gpu int) error { return c.just(command{Op: "lose", GPU: gpu}) }

// Restore brings a lost GPU back.
func (c *Client) Restore(gpu int) error { return c.just(command{Op: "restore", GPU: gpu}) }

// SetLink makes an NVLink of a GPU fail or work again, see World.SetLink.
func (c *Client) SetLink(gpu, link int, up bool) error {
	return c.just(command{Op: "link", GPU: gpu, Link: link, On: up})
}

// Reset makes a GPU begin anew; refused while processes use it.
func (c *Client) Reset(gpu int) error { return c.just(command{Op: "reset", GPU: gpu}) }

// SetMIG puts a GPU in or out of MIG mode at once, without faults and delays.
func (c *Client) SetMIG(gpu int, on bool) error {
	return c.just(command{Op: "mig", GPU: gpu, On: on})
}

// CreateInstance makes a MIG instance likewise, see World.CreateInstance.
func (c *Client) CreateInstance(gpu int, profile string, start int, empty bool) error {
	return c.just(command{Op: "create", GPU: gpu, Profile: profile, Start: start, Bare: empty})
}

// DestroyInstance takes away the GPU instance at a memory slice, with all in it.
func (c *Client) DestroyInstance(gpu, start int) error {
	return c.just(command{Op: "destroy", GPU: gpu, Start: start})
}

// Reboot turns the machine off and on; refused while any process uses the driver,
// but for force.
func (c *Client) Reboot(force bool) error { return c.just(command{Op: "reboot", Force: force}) }

// Unplug takes a GPU out of the machine, with its device node and kernel files.
func (c *Client) Unplug(gpu int) error { return c.just(command{Op: "unplug", GPU: gpu}) }

// Plug puts an unplugged GPU back.
func (c *Client) Plug(gpu int) error { return c.just(command{Op: "plug", GPU: gpu}) }

// Unload takes the driver out of the kernel, with its device nodes and files;
// refused while any process uses it.
func (c *Client) Unload() error { return c.just(command{Op: "unload"}) }

// Load puts the driver back, as another version if one is given.
func (c *Client) Load(version string) error { return c.just(command{Op: "load", Driver: version}) }

// Inject adds a fault.
func (c *Client) Inject(f emulator.Fault) error { return c.just(command{Op: "inject", Fault: &f}) }

// Clear ends all faults.
func (c *Client) Clear() error { return c.just(command{Op: "clear"}) }

// Hold gives the calling process memory on a GPU until it ends. The PID in p
// is not looked at.
func (c *Client) Hold(p emulator.Process) error { return c.just(command{Op: "hold", Process: &p}) }

// Holds says whether a process, by the caller's PID for it, has memory on any
// GPU.
func (c *Client) Holds(pid int) (bool, error) {
	r, err := c.do(command{Op: "holds", PID: pid})
	return r.Yes, err
}

// ServeMPS makes the calling process the MPS server of a GPU until it ends, see World.ServeMPS. It
// returns the process's PID as the daemon knows it.
func (c *Client) ServeMPS(uuid string, percent float64) (pid int, err error) {
	r, err := c.do(command{Op: "mps-serve", UUID: uuid, Percent: percent})
	return r.PID, err
}

// SetMPSPercent and DetachMPS are World's; PIDs are the daemon's.
func (c *Client) SetMPSPercent(server int, percent float64) error {
	return c.just(command{Op: "mps-percent", PID: server, Percent: percent})
}
func (c *Client) DetachMPS(server, client int) error {
	return c.just(command{Op: "mps-detach", PID: server, Client: client})
}

// Fail is a fatal fault of a process, see World.Fail.
func (c *Client) Fail(pid int, xid uint64) error {
	return c.just(command{Op: "fail", PID: pid, Xid: xid})
}

// KeepBusy has a process keep a GPU busy, see World.KeepBusy.
func (c *Client) KeepBusy(pid, gpu, percent int) error {
	return c.just(command{Op: "busy", PID: pid, GPU: gpu, Percent: float64(percent)})
}

// Wait returns when the daemon has ended.
func (c *Client) Wait() {
	for {
		if _, err := c.conn.Read(c.buf); err != nil {
			return
		}
	}
}

func (c *Client) just(cmd command) error {
	_, err := c.do(cmd)
	return err
}
