// SPDX-License-Identifier: Apache-2.0

package capsule

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// Machine is an emulated node, without a Kubernetes.
type Machine struct {
	World *emulator.World
	// Driver is the driver root.
	Driver string

	libraries string // where containers have the driver's
	stop      context.CancelFunc
	ended     chan error
}

// Libraries is where containers have the driver's libraries, those of amd64.
const Libraries = "/usr/lib/x86_64-linux-gnu"

// Start makes the world of a spec, lays its driver's files below dir and serves
// it until Close.
func Start(ctx context.Context, dir string, spec emulator.Spec) (*Machine, error) {
	w, err := emulator.New(spec)
	if err != nil {
		return nil, err
	}
	built, err := emulib.Cached(ctx)
	if err != nil {
		return nil, err
	}
	if err := install.Driver(dir, built, w); err != nil {
		return nil, err
	}
	libraries, err := install.Libraries(built)
	if err != nil {
		return nil, err
	}
	l, err := daemon.Listen(filepath.Join(dir, install.Socket))
	if err != nil {
		return nil, err
	}
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	m := &Machine{World: w, Driver: dir, libraries: "/" + libraries, stop: stop, ended: make(chan error, 1)}
	server := &daemon.Server{World: w}
	go func() { m.ended <- server.Serve(serving, l) }()
	return m, nil
}

// Close ends the daemon.
func (m *Machine) Close() error {
	m.stop()
	return <-m.ended
}

// Plain are the edits and links by which a container gets some GPUs, by index,
// with the driver's libraries as they are.
func (m *Machine) Plain(gpus ...int) (specs.ContainerEdits, Image) {
	var edits specs.ContainerEdits
	node := func(name string, minor int64) {
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: "/dev/" + name, Type: "c", Major: 195, Minor: minor})
	}
	node("nvidiactl", 255)
	st := m.World.State()
	for _, i := range gpus {
		minor := st.GPUs[i].Minor
		node(fmt.Sprintf("nvidia%d", minor), int64(minor))
	}
	image := Image{Links: map[string]string{}}
	for _, name := range []string{emulib.CUDA, emulib.NVML} {
		versioned := name + "." + st.Driver
		edits.Mounts = append(edits.Mounts, bind(filepath.Join(m.Driver, m.libraries, versioned), filepath.Join(m.libraries, versioned)))
		// As NVIDIA's hooks do inside the container.
		image.Links[filepath.Join(m.libraries, name+".1")] = versioned
		image.Links[filepath.Join(m.libraries, name)] = name + ".1"
	}
	edits.Mounts = append(edits.Mounts,
		bind(filepath.Join(m.Driver, "usr/bin/nvidia-smi"), "/usr/bin/nvidia-smi"),
		bind(filepath.Join(m.Driver, install.Socket), "/"+install.Socket),
	)
	return edits, image
}

func bind(from, to string) *specs.Mount {
	return &specs.Mount{HostPath: from, ContainerPath: to, Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}}
}

// Bind adds a file or folder of this machine to a container's edits, read-only.
func Bind(edits *specs.ContainerEdits, from, to string) {
	edits.Mounts = append(slices.Clip(edits.Mounts), bind(from, to))
}

// Open makes a container. Whoever opens it closes it.
func (m *Machine) Open(ctx context.Context, edits specs.ContainerEdits, image Image) (*Container, error) {
	select {
	case err := <-m.ended:
		m.ended <- err
		return nil, errors.Join(errors.New("the emulator has ended"), err)
	default:
	}
	return Open(ctx, edits, image)
}
