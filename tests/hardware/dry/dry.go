// SPDX-License-Identifier: Apache-2.0

package dry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/emulator/mps"
)

// RootVariable names the driver's root for the kit, where that is not /.
const RootVariable = "TEST_GPU_DRIVER_ROOT"

// Driver is an emulated one in operation.
type Driver struct {
	*emulator.World
	// Env is what the kit's environment needs to find it.
	Env string

	root  string
	stop  context.CancelFunc
	ended chan error
}

// Start lays a driver down and serves programs until End. It needs gcc.
func Start(ctx context.Context, spec emulator.Spec) (*Driver, error) {
	libraries, err := lib.Cached(ctx)
	if err != nil {
		return nil, fmt.Errorf("build the emulated driver: %w", err)
	}
	w, err := emulator.New(spec)
	if err != nil {
		return nil, err
	}
	root, err := install.Scratch()
	if err != nil {
		return nil, fmt.Errorf("make a place for the emulated driver: %w", err)
	}
	if err := install.Driver(root, libraries, w); err != nil {
		return nil, errors.Join(err, os.RemoveAll(root))
	}
	if err := nodes(root, w); err != nil {
		return nil, errors.Join(err, os.RemoveAll(root))
	}
	l, err := daemon.Listen(filepath.Join(root, install.Socket))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(root))
	}
	d := &Driver{World: w, Env: RootVariable + "=" + root, root: root, ended: make(chan error, 1)}
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	d.stop = stop
	go func() { d.ended <- (&daemon.Server{World: w}).Serve(serving, l) }()
	return d, nil
}

// LayMPS adds the driver's programs of MPS. The program that calls it must call mps.Main first of all.
func (d *Driver) LayMPS() error {
	programs := filepath.Join(d.root, install.Programs)
	return errors.Join(mps.Lay(programs, d.World.DriverVersion()), mps.Until(programs, os.Getpid()))
}

// nodes lays down what containers need of it, as far as this process may.
func nodes(root string, w *emulator.World) error {
	err := install.Nodes(filepath.Join(root, "dev"), w)
	if errors.Is(err, fs.ErrPermission) {
		return nil // questions that need a container say so
	}
	if err != nil {
		return err
	}
	return install.Kernel(root, "Character devices:\n", w)
}

// End ends it, and takes its files away.
func (d *Driver) End() error {
	d.stop()
	return errors.Join(<-d.ended, os.RemoveAll(d.root))
}
