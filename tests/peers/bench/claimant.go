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
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	api "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"example.com/gpu-agent/tests/fakes"
)

// claimant is a program that prepares claims, and the kubelet's side of it.
type claimant struct {
	name string
	// driver is its own name, and registry the kubelet's directory where it is found.
	driver, registry string
	// gpus are the indices of those that it is asked for.
	gpus  []int
	begin func() (*process, error)

	// While it runs:
	proc    *process
	conns   []*grpc.ClientConn
	client  api.DRAPluginClient
	devices []published
}

// start starts it, registers it as the kubelet does, and waits for its answer.
func (c *claimant) start(ctx context.Context) (err error) {
	// What a killed one has left.
	left, err := filepath.Glob(filepath.Join(c.registry, "*.sock"))
	for _, socket := range left {
		err = errors.Join(err, os.Remove(socket))
	}
	if err = errors.Join(err, os.MkdirAll(c.registry, 0o755)); err != nil {
		return fmt.Errorf("start %s: %w", c.name, err)
	}
	if c.proc, err = c.begin(); err != nil {
		return err
	}
	var registry registration.RegistrationClient
	var info *registration.PluginInfo
	var socket string
	if err := await(ctx, c.name+" to be there for the kubelet", func() (bool, error) {
		found, err := filepath.Glob(filepath.Join(c.registry, "*.sock"))
		if err != nil || len(found) == 0 {
			return false, errors.Join(err, errors.New("no socket"))
		}
		socket = found[0]
		conn, err := c.dial(ctx, socket)
		if err != nil {
			return false, err
		}
		registry = registration.NewRegistrationClient(conn)
		info, err = registry.GetInfo(ctx, &registration.InfoRequest{})
		return err == nil, err
	}); err != nil {
		return c.proc.explain(err)
	}
	if info.Name != c.driver || !slices.Contains(info.SupportedVersions, api.DRAPluginService) {
		return c.proc.explain(fmt.Errorf("%s registers as %v", c.name, info))
	}
	if info.Endpoint != "" {
		socket = info.Endpoint
	}
	conn, err := c.dial(ctx, socket)
	if err != nil {
		return c.proc.explain(err)
	}
	c.client = api.NewDRAPluginClient(conn)
	if slices.Contains(info.SupportedVersions, health.DRAResourceHealth_ServiceDesc.ServiceName) {
		stream, err := health.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &health.NodeWatchResourcesRequest{})
		if err != nil {
			return c.proc.explain(err)
		}
		go func() {
			for err := error(nil); err == nil; {
				_, err = stream.Recv()
			}
		}()
	}
	if _, err := registry.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true}); err != nil {
		return c.proc.explain(fmt.Errorf("register %s: %w", c.name, err))
	}
	return nil
}

func (c *claimant) dial(ctx context.Context, socket string) (*grpc.ClientConn, error) {
	conn, err := fakes.Dial(ctx, socket)
	if err == nil {
		c.conns = append(c.conns, conn)
	}
	return conn, err
}

// listed waits until all of its slices are at the server, and learns its devices.
func (c *claimant) listed(ctx context.Context, s *claimServer) error {
	err := await(ctx, "the slices of "+c.name, func() (whole bool, err error) {
		c.devices, whole, err = s.devices(c.driver)
		return whole && len(c.devices) > 0, err
	})
	return c.proc.explain(err)
}

// stop ends it at once.
func (c *claimant) stop() {
	if c.proc != nil {
		c.proc.kill()
		c.proc = nil
	}
	for _, conn := range c.conns {
		_ = conn.Close() // the other side is gone
	}
	c.conns = nil
}

// device is one on a GPU.
func (c *claimant) device(uuid, kind, profile string) (published, error) {
	for _, d := range c.devices {
		if d.gpu == uuid && d.kind == kind && d.profile == profile {
			return d, nil
		}
	}
	return published{}, fmt.Errorf("%s publishes no %s %s of %s", c.name, kind, profile, uuid)
}

// prepare has a claim prepared, and says how long that took.
func (c *claimant) prepare(ctx context.Context, name, uid string) (time.Duration, error) {
	began := time.Now()
	resp, err := c.client.NodePrepareResources(ctx, &api.NodePrepareResourcesRequest{Claims: []*api.Claim{{Namespace: podNamespace, Name: name, Uid: uid}}})
	took := time.Since(began)
	answer := resp.GetClaims()[uid]
	switch {
	case err != nil:
	case answer.GetError() != "":
		err = errors.New(answer.Error)
	case c.driver != "" && (len(answer.GetDevices()) != 1 || len(answer.Devices[0].CdiDeviceIds) == 0):
		err = fmt.Errorf("the answer is %v", resp)
	}
	if err != nil {
		return 0, c.proc.explain(fmt.Errorf("%s: prepare a claim: %w", c.name, err))
	}
	return took, nil
}

// unprepare gives a claim back.
func (c *claimant) unprepare(ctx context.Context, name, uid string) error {
	resp, err := c.client.NodeUnprepareResources(ctx, &api.NodeUnprepareResourcesRequest{Claims: []*api.Claim{{Namespace: podNamespace, Name: name, Uid: uid}}})
	if text := resp.GetClaims()[uid].GetError(); text != "" {
		err = errors.New(text)
	}
	if err != nil {
		return c.proc.explain(fmt.Errorf("%s: give a claim back: %w", c.name, err))
	}
	return nil
}

// emptyClaimsArg makes this program a DRA driver that reads each claim and does nothing.
const emptyClaimsArg = "empty-claims"

// emptyClaims is gRPC as it comes and one GET of the API server, which no driver can do
// without.
type emptyClaims struct {
	api.UnimplementedDRAPluginServer
	claims dynamic.NamespaceableResourceInterface
}

func (e *emptyClaims) NodePrepareResources(ctx context.Context, r *api.NodePrepareResourcesRequest) (*api.NodePrepareResourcesResponse, error) {
	out := map[string]*api.NodePrepareResourceResponse{}
	for _, c := range r.Claims {
		if _, err := e.claims.Namespace(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{}); err != nil {
			return nil, err
		}
		out[c.Uid] = &api.NodePrepareResourceResponse{}
	}
	return &api.NodePrepareResourcesResponse{Claims: out}, nil
}

func (*emptyClaims) NodeUnprepareResources(context.Context, *api.NodeUnprepareResourcesRequest) (*api.NodeUnprepareResourcesResponse, error) {
	return &api.NodeUnprepareResourcesResponse{}, nil
}

// serveEmptyClaims serves until ctx ends.
func serveEmptyClaims(ctx context.Context, socket, kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("serve nothing: %w", err)
	}
	s := grpc.NewServer()
	api.RegisterDRAPluginServer(s, &emptyClaims{claims: client.Resource(schema.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceclaims"})})
	defer context.AfterFunc(ctx, s.Stop)()
	return s.Serve(l)
}

// startEmptyClaims starts it as a process of its own.
func (b *bench) startEmptyClaims(ctx context.Context, kubeconfig string) (*claimant, error) {
	c := &claimant{name: emptyName}
	socket := filepath.Join(b.work, "empty-claims.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var err error
	if c.proc, err = start(b.work, strings.TrimSuffix(filepath.Base(socket), ".sock"), "/proc/self/exe", emptyClaimsArg, socket, kubeconfig); err != nil {
		return nil, err
	}
	if err := await(ctx, "the handler that does nothing", func() (bool, error) {
		conn, err := c.dial(ctx, socket)
		c.client = api.NewDRAPluginClient(conn)
		return err == nil, err
	}); err != nil {
		err = c.proc.explain(err)
		c.stop()
		return nil, err
	}
	return c, nil
}
