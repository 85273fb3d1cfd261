// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"log/slog"
	"path"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	api "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// service answers the kubelet's calls.
type service struct {
	api.UnimplementedDRAPluginServer
	health.UnimplementedDRAResourceHealthServer
	registration.UnimplementedRegistrationServer

	*Server
	// ration limits the log of refusals, since a controller may make pods as fast as they fail.
	ration *brief.Ration
	// stop is Run's context. Its end ends streams and waiting calls.
	stop context.Context
	// healthEvery is how often the list of healths is sent if it has not changed.
	healthEvery time.Duration
}

// maxHealth is the longest message on a device's health that the kubelet keeps, in bytes.
const maxHealth = 1024

// healthEvery is how often healths are sent again. Each message tells the kubelet to believe it
// three times as long.
const healthEvery = 30 * time.Second

// healthV1 is the health service of Kubernetes 1.37. Its messages equal those of v1alpha1 to the
// byte, so this server registers the types of the pinned k8s.io/kubelet under its name; v0.37 has
// types of its own. Kubelets before 1.37 know only v1alpha1, and from 1.40 on only v1.
const healthV1 = "v1.DRAResourceHealth"

func (s *Server) newServer(stop context.Context) *grpc.Server {
	a := &service{
		Server: s, ration: brief.NewRation(s.opts.Logger, time.Now, time.AfterFunc),
		stop: stop, healthEvery: healthEvery,
	}
	server := grpc.NewServer(grpc.UnaryInterceptor(a.observe), grpc.StatsHandler(a), grpc.WaitForHandlers(true))
	api.RegisterDRAPluginServer(server, a)
	health.RegisterDRAResourceHealthServer(server, a)
	v1 := health.DRAResourceHealth_ServiceDesc
	v1.ServiceName = healthV1
	server.RegisterService(&v1, a)
	registration.RegisterRegistrationServer(server, a)
	return server
}

func (a *service) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	// Without an endpoint in the answer, the kubelet makes its calls at the same socket.
	return &registration.PluginInfo{
		Type:              registration.DRAPlugin,
		Name:              a.opts.Name,
		SupportedVersions: []string{api.DRAPluginService, healthV1, health.DRAResourceHealth_ServiceDesc.ServiceName},
	}, nil
}

func (a *service) NotifyRegistrationStatus(
	_ context.Context, r *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	var err error
	if !r.PluginRegistered {
		err = errors.New("the kubelet refuses the driver: " + brief.Cut(r.Error, brief.Text))
	}
	a.opts.Observer.Registered(a.opts.Name, err)
	a.set(func(s *Server) { s.accepted, s.status.Err = err == nil, err })
	if err != nil {
		a.ration.Log(slog.LevelWarn, "not registered with the kubelet", []any{"driver", a.opts.Name}, "err", err)
	} else {
		a.opts.Logger.Info("registered", "driver", a.opts.Name, "socket", a.path)
		a.opts.Registered()
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func (a *service) NodePrepareResources(
	ctx context.Context, req *api.NodePrepareResourcesRequest,
) (*api.NodePrepareResourcesResponse, error) {
	ctx, cancel := a.bound(ctx)
	defer cancel()
	return &api.NodePrepareResourcesResponse{Claims: each(req.Claims, func(c Claim) *api.NodePrepareResourceResponse {
		devices, err := a.opts.Driver.Prepare(ctx, c)
		if err != nil {
			return &api.NodePrepareResourceResponse{Error: a.refuse("prepare", c, err)}
		}
		out := &api.NodePrepareResourceResponse{}
		for _, d := range devices {
			device := &api.Device{RequestNames: d.Requests, PoolName: d.Pool, DeviceName: d.Name, CdiDeviceIds: d.CDI}
			if d.Share != "" {
				device.ShareId = &d.Share
			}
			out.Devices = append(out.Devices, device)
		}
		return out
	})}, nil
}

func (a *service) NodeUnprepareResources(
	ctx context.Context, req *api.NodeUnprepareResourcesRequest,
) (*api.NodeUnprepareResourcesResponse, error) {
	ctx, cancel := a.bound(ctx)
	defer cancel()
	claims := each(req.Claims, func(c Claim) *api.NodeUnprepareResourceResponse {
		if err := a.opts.Driver.Unprepare(ctx, c); err != nil {
			return &api.NodeUnprepareResourceResponse{Error: a.refuse("unprepare", c, err)}
		}
		return &api.NodeUnprepareResourceResponse{}
	})
	return &api.NodeUnprepareResourcesResponse{Claims: claims}, nil
}

// each calls do for all claims of a call at the same time, and returns the results by UID.
func each[R any](claims []*api.Claim, do func(Claim) R) map[string]R {
	answers := make([]R, len(claims))
	var all sync.WaitGroup
	for i, c := range claims {
		all.Go(func() { answers[i] = do(Claim{Namespace: c.Namespace, Name: c.Name, UID: c.Uid}) })
	}
	all.Wait()
	out := make(map[string]R, len(claims))
	for i, c := range claims {
		out[c.Uid] = answers[i]
	}
	return out
}

// bound limits a call to Patience and to the life of the server. If the caller waits for less, it
// leaves a tenth of that time for the answer.
func (a *service) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	patience := Patience
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		patience = min(patience, left-left/10)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	release := context.AfterFunc(a.stop, cancel)
	return ctx, func() { release(); cancel() }
}

// refuse returns an error's text for the kubelet, which shows it in the pod's Events after the
// claim's name. A text beyond 4 KiB is cut.
func (a *service) refuse(what string, c Claim, err error) string {
	a.opts.Observer.Refused(a.opts.Name, err)
	text := brief.Cut(err.Error(), brief.Text)
	a.ration.Log(slog.LevelWarn, "cannot "+what+" a claim", []any{"driver", a.opts.Name},
		"claim", c.Namespace+"/"+c.Name, "uid", c.UID, "err", text)
	return text
}

// NodeWatchResources sends the health of the devices. It always sends the whole list: after a while
// the kubelet regards a device as unknown that it gets no news of.
func (a *service) NodeWatchResources(
	_ *health.NodeWatchResourcesRequest, stream health.DRAResourceHealth_NodeWatchResourcesServer,
) error {
	for {
		devices, changed := a.opts.Driver.Health()
		now := time.Now().Unix()
		message := &health.NodeWatchResourcesResponse{Devices: make([]*health.DeviceHealth, 0, len(devices))}
		for i := range devices {
			d := &devices[i]
			is := health.HealthStatus_HEALTHY
			if !d.Healthy {
				is = health.HealthStatus_UNHEALTHY
			}
			message.Devices = append(message.Devices, &health.DeviceHealth{
				Device: &health.DeviceIdentifier{PoolName: d.Pool, DeviceName: d.Name},
				Health: is, LastUpdatedTime: now,
				HealthCheckTimeoutSeconds: int64(3 * healthEvery / time.Second),
				Message:                   brief.Cut(d.Message, maxHealth),
			})
		}
		if err := stream.Send(message); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-time.After(a.healthEvery):
		case <-stream.Context().Done():
			return nil
		case <-a.stop.Done():
			return status.Error(codes.Unavailable, a.opts.Name+": the driver is stopping")
		}
	}
}

// observe is called around every unary call. It does not recover a panic: the driver may be half
// changed, with its lock held, and the next process reads everything anew.
func (a *service) observe(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	start := time.Now()
	resp, err := handler(ctx, req)
	a.opts.Observer.Called(a.opts.Name, path.Base(info.FullMethod), time.Since(start), err)
	return resp, err
}

// A stats handler counts the connections, which tell whether the kubelet is there.

func (a *service) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (a *service) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (a *service) HandleRPC(context.Context, stats.RPCStats)                         {}

func (a *service) HandleConn(_ context.Context, c stats.ConnStats) {
	switch c.(type) {
	case *stats.ConnBegin:
		a.set(func(s *Server) { s.conns++ })
	case *stats.ConnEnd:
		a.set(func(s *Server) { s.conns-- })
	}
}
