// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/tests/fakes"
)

// emptyArg makes this program the handler that does nothing.
const emptyArg = "empty"

// empty is a device plugin on gRPC's defaults that answers nothing: what a call
// costs whatever is behind it.
type empty struct {
	api.UnimplementedDevicePluginServer
}

func (empty) GetPreferredAllocation(context.Context, *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	return &api.PreferredAllocationResponse{}, nil
}

func (empty) Allocate(context.Context, *api.AllocateRequest) (*api.AllocateResponse, error) {
	return &api.AllocateResponse{}, nil
}

// serveEmpty serves until ctx ends.
func serveEmpty(ctx context.Context, socket string) error {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("serve nothing: %w", err)
	}
	s := grpc.NewServer()
	api.RegisterDevicePluginServer(s, empty{})
	defer context.AfterFunc(ctx, s.Stop)()
	return s.Serve(l)
}

// startEmpty starts it as a process of its own and connects to it.
func (m *machine) startEmpty(ctx context.Context) (*running, error) {
	socket := filepath.Join(m.work, "empty.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("start the handler that does nothing: %w", err)
	}
	p, err := start(m.work, emptyName, "/proc/self/exe", emptyArg, socket)
	if err != nil {
		return nil, err
	}
	r := &running{subject: &subject{name: emptyName}, proc: p}
	var conn *grpc.ClientConn
	err = await(ctx, "the handler that does nothing", func() (_ bool, err error) {
		conn, err = fakes.Dial(ctx, socket)
		return err == nil, err
	})
	if err != nil {
		p.kill()
		return nil, p.explain(err)
	}
	r.plugin = fakes.Endpoint{Client: api.NewDevicePluginClient(conn), Conn: conn}
	return r, nil
}
