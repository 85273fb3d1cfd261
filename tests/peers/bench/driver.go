// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	emulib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/lab"
)

// gpus is how many GPUs there are, of a model with 81,008 MiB for workloads.
const (
	gpus     = 8
	gpuModel = "H100-80GB"
)

// driver is the emulated driver: its files below root, and its daemon.
type driver struct {
	root string
	gpus int
	proc *process
	ask  *daemon.Client
}

func startDriver(ctx context.Context, k *lab.Kit, work string) (*driver, error) {
	d := &driver{root: filepath.Join(work, "driver"), gpus: gpus}
	world := filepath.Join(work, "world.yaml")
	if err := os.WriteFile(world, fmt.Appendf(nil, "model: %s\ncount: %d\n", gpuModel, gpus), 0o644); err != nil {
		return nil, fmt.Errorf("describe the GPUs: %w", err)
	}
	libraries, err := emulib.Cached(ctx)
	if err != nil {
		return nil, err
	}
	lay := exec.CommandContext(ctx, k.Bin("gpu-emulator"), "install", "--root", "/", "--prefix", d.root,
		"--libraries", libraries, "--world", world, "--proc")
	if out, err := lay.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("install the emulated driver: %w\n%s", err, out)
	}
	socket := filepath.Join(d.root, install.Socket)
	if d.proc, err = start(work, "gpu-emulator", k.Bin("gpu-emulator"), "serve", "--world", world, "--socket", socket); err != nil {
		return nil, err
	}
	err = await(ctx, "the emulated driver", func() (_ bool, err error) {
		d.ask, err = daemon.Dial(socket)
		return err == nil, err
	})
	if err != nil {
		d.proc.stop()
		return nil, d.proc.explain(err)
	}
	return d, nil
}

func (d *driver) stop() {
	_ = d.ask.Close()
	d.proc.stop()
}

// uuid is a GPU's.
func (d *driver) uuid(index int) (string, error) {
	st, err := d.ask.State()
	if err != nil {
		return "", fmt.Errorf("read the emulated world: %w", err)
	}
	if len(st.GPUs) != d.gpus {
		return "", fmt.Errorf("the emulated driver has %d GPUs, want %d", len(st.GPUs), d.gpus)
	}
	return st.GPUs[index].UUID, nil
}

// calls is how many driver calls a process has made so far, but for its waits
// for events.
func (d *driver) calls(p *process) (int, error) {
	list, err := d.ask.Calls(p.pid)
	if err != nil {
		return 0, fmt.Errorf("count driver calls: %w", err)
	}
	return total(list), nil
}

// quiet waits until a process has made no driver call for a while: what it asks
// at its start, which may go on after it has registered, belongs to no request.
func (d *driver) quiet(ctx context.Context, p *process) error {
	const while = 300 * time.Millisecond
	last, since := -1, time.Now()
	return await(ctx, p.name+" to have no more to ask of the driver", func() (bool, error) {
		n, err := d.calls(p)
		if n != last {
			last, since = n, time.Now()
		}
		return time.Since(since) >= while, err
	})
}

// armed waits until a process waits for events: before that an Xid is lost on
// it.
func (d *driver) armed(ctx context.Context, p *process) error {
	err := await(ctx, p.name+" to wait for events", func() (bool, error) {
		list, err := d.ask.Calls(p.pid)
		return slices.ContainsFunc(list, func(c emulator.CallCount) bool { return strings.HasPrefix(c.Call, eventWait) }), err
	})
	if err != nil {
		return p.explain(err)
	}
	return nil
}

// eventWait starts the names of the calls that wait for events. They run in the
// background all the time.
const eventWait = "nvmlEventSetWait"

func total(list []emulator.CallCount) (n int) {
	for _, c := range list {
		if !strings.HasPrefix(c.Call, eventWait) {
			n += int(c.Count)
		}
	}
	return n
}

// world is an emulated driver that is served from here, in the place of all that
// were before it: what is done to it by hand, and looked at, costs the programs
// nothing.
type world struct {
	*emulator.World
	root string
	// laying is how long calls have waited for the emulator's files, which no
	// hardware has to lay.
	laying func() time.Duration
	stop   func() error
}

func (b *bench) startWorld(name string, spec emulator.Spec) (*world, error) {
	w, err := emulator.New(spec)
	if err != nil {
		return nil, fmt.Errorf("make the world of %s: %w", name, err)
	}
	root := filepath.Join(b.work, name)
	m := install.Machine{Driver: root, Dev: filepath.Join(root, "dev"), Kernel: "/"}
	libraries, err := emulib.Cached(context.Background())
	if err == nil {
		err = errors.Join(install.Driver(root, libraries, w), m.Save())
	}
	if err == nil {
		err = errors.Join(install.Mount(w), m.Sync(w))
	}
	if err != nil {
		return nil, fmt.Errorf("install %s: %w", name, err)
	}
	l, err := daemon.Listen(filepath.Join(root, install.Socket))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	server, done := &daemon.Server{World: w, Driver: root}, make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	return &world{w, root, server.LayingTime, func() error { cancel(); return <-done }}, nil
}
