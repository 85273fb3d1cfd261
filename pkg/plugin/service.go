// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"log/slog"
	"path"
	"time"

	"example.com/gpu-agent/internal/brief"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// service answers the kubelet's calls for one resource. It does not know sockets and registration.
type service struct {
	api.UnimplementedDevicePluginServer

	resource string
	source   Source
	log      *slog.Logger
	// ration limits the log lines for refusals: a controller may create pods as fast as they fail.
	ration   *brief.Ration
	observer Observer
	// stop ends with the plugin's Run. It ends streams and waits.
	stop context.Context

	// list is what the streams send. Nil until the source knows its devices. withheld is that of
	// Kubelet.
	list     cell[*list]
	withheld *cell[bool]
	streams  cell[streams]
	// preStart is true if the kubelet must call PreStartContainer. told is the last answer that the
	// kubelet got to that question.
	preStart cell[bool]
	told     cell[told]
	// fault is why the source's newest list is not sent. Zero if it is sent.
	fault cell[fault]
	// changed is called when the result of Status may have changed.
	changed func()
	// sent is KubeletOptions.Sent.
	sent func(resource string, healthy int)
	// stood is that of directory.
	stood time.Duration
}

// told is the answer to the kubelet's question for options. asked is false before the first one.
type told struct{ asked, required bool }

// fault is an error and the time of its beginning. Zero is no error.
type fault struct {
	err   error
	since time.Time
}

// of returns the fault that follows f. A fault that goes on keeps its beginning.
func (f fault) of(err error, now time.Time) fault {
	if err == nil {
		return fault{}
	}
	if f.err != nil {
		now = f.since
	}
	return fault{err, now}
}

// streams counts ListAndWatch streams. They tell the plugin whether the kubelet still has the
// resource registered.
type streams struct {
	open   int // open now
	opened int // opened ever
	// since is when the first of the open streams was opened. lost is when the last stream that had
	// stood ended. brief is true if a stream opened after that ended at once.
	since, lost time.Time
	brief       bool
}

// streamStood is how long a stream must be open, after one that ended at once, before it counts. A
// kubelet that cannot receive a list opens a stream again and again.
const streamStood = 10 * time.Second

func (n streams) begun(now time.Time) streams {
	if n.open == 0 {
		n.since = now
	}
	n.open++
	n.opened++
	return n
}

func (n streams) ended(now time.Time, enough time.Duration) streams {
	stood := n.stands(now, enough)
	if n.open--; n.open > 0 {
		return n
	}
	if stood {
		n.lost = now
	}
	n.brief = now.Sub(n.since) < enough
	return n
}

// stands reports whether the kubelet receives the lists, as far as the streams tell. enough is
// streamStood.
func (n streams) stands(now time.Time, enough time.Duration) bool {
	return n.open > 0 && (!n.brief || now.Sub(n.since) >= enough)
}

func newServer(s *service) *grpc.Server {
	server := grpc.NewServer(
		grpc.ForceServerCodecV2(newCodec()),
		grpc.UnaryInterceptor(s.observe),
		// Accept a list of free devices in one piece, without waiting for window updates: thousands
		// of IDs exceed the default of 64 KiB.
		grpc.InitialWindowSize(maxListBytes),
		grpc.InitialConnWindowSize(maxListBytes),
		grpc.WaitForHandlers(true),
	)
	api.RegisterDevicePluginServer(server, s)
	return server
}

// follow updates list from the source until stop ends.
func (s *service) follow() {
	for {
		devices, changed := s.source.List()
		if devices != nil {
			s.take(devices)
		}
		select {
		case <-changed:
		case <-s.stop.Done():
			return
		}
	}
}

func (s *service) take(devices []Device) {
	old, _ := s.list.get()
	l := &list{}
	if old != nil && len(devices) == len(old.of) && (len(devices) == 0 || &devices[0] == &old.of[0]) {
		*l = *old // A new value with the same bytes, so that it is sent again.
	} else {
		var err error
		if l, err = encode(devices); err != nil {
			// The last list stays in force. Without a list the endpoint would end, and its pods
			// would fail.
			s.log.Error("keep the last list: the new one cannot be sent", "resource", s.resource, "err", err)
			s.setFault(err)
			return
		}
	}
	s.setFault(nil)
	s.list.set(l)
	if was, _ := s.preStart.get(); was != (l.devices > 0) {
		s.preStart.set(l.devices > 0)
	}
}

func (s *service) setFault(err error) {
	if old, _ := s.fault.get(); old.err == nil && err == nil {
		return
	}
	s.fault.update(func(old fault) fault { return old.of(err, time.Now()) })
	s.changed()
}

// GetDevicePluginOptions is called once for each registration.
func (s *service) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	required, _ := s.preStart.get()
	s.told.set(told{true, required})
	return options(required), nil
}

// options returns the options of the plugin. required is whether the kubelet must call
// PreStartContainer. It must be false for a resource without devices: otherwise the kubelet refuses
// every container that wants the resource, even one that gets it through a claim.
func options(required bool) *api.DevicePluginOptions {
	return &api.DevicePluginOptions{PreStartRequired: required, GetPreferredAllocationAvailable: true}
}

// outdated reports whether the kubelet's last answer about PreStartContainer is no longer right.
// changed is closed when the result may have changed.
func (s *service) outdated() (yes bool, changed <-chan struct{}) {
	now, changed := s.preStart.get()
	was, _ := s.told.get()
	return was.asked && was.required != now, changed
}

func (s *service) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	s.streams.update(func(n streams) streams { return n.begun(time.Now()) })
	s.changed()
	defer s.changed()
	defer s.streams.update(func(n streams) streams { return n.ended(time.Now(), s.stood) })
	var sent *list
	for {
		l, changed := s.list.get()
		was, asked := s.told.get()
		withheld, turned := s.withheld.get()
		if withheld {
			return s.ends()
		}
		// Send no device before the kubelet knows that it must call PreStartContainer.
		if l != nil && l != sent && (l.devices == 0 || was.required || !was.asked) {
			if err := stream.SendMsg(l); err != nil {
				s.log.Warn("send list",
					"resource", s.resource, "devices", l.devices, "bytes", len(l.message), "err", err)
				return err
			}
			sent = l
			s.sent(s.resource, l.healthy)
			s.log.Info("sent list", "resource", s.resource, "devices", l.devices, "bytes", len(l.message))
		}
		select {
		case <-changed:
		case <-asked:
		case <-turned:
		case <-stream.Context().Done():
			return nil
		case <-s.stop.Done():
			return s.ends()
		}
	}
}

func (s *service) ends() error {
	return status.Error(codes.Unavailable, s.resource+": the device plugin ends")
}

func (s *service) GetPreferredAllocation(
	_ context.Context, req *api.PreferredAllocationRequest,
) (*api.PreferredAllocationResponse, error) {
	resp := &api.PreferredAllocationResponse{
		ContainerResponses: make([]*api.ContainerPreferredAllocationResponse, 0, len(req.ContainerRequests)),
	}
	for _, r := range req.ContainerRequests {
		ids, err := s.source.Prefer(r.AvailableDeviceIDs, r.MustIncludeDeviceIDs, int(r.AllocationSize))
		if err != nil {
			return nil, s.refuse("prefer devices", codes.FailedPrecondition, err)
		}
		answer := &api.ContainerPreferredAllocationResponse{DeviceIDs: ids}
		resp.ContainerResponses = append(resp.ContainerResponses, answer)
	}
	return resp, nil
}

func (s *service) Allocate(_ context.Context, req *api.AllocateRequest) (*api.AllocateResponse, error) {
	resp := &api.AllocateResponse{
		ContainerResponses: make([]*api.ContainerAllocateResponse, 0, len(req.ContainerRequests)),
	}
	for _, r := range req.ContainerRequests {
		grant, err := s.source.Allocate(r.DevicesIds)
		if err != nil {
			return nil, s.refuse("allocate", codes.FailedPrecondition, err)
		}
		c := &api.ContainerAllocateResponse{Annotations: grant.Annotations}
		for _, name := range grant.CDI {
			c.CdiDevices = append(c.CdiDevices, &api.CDIDevice{Name: name})
		}
		resp.ContainerResponses = append(resp.ContainerResponses, c)
	}
	return resp, nil
}

func (s *service) PreStartContainer(
	ctx context.Context, req *api.PreStartContainerRequest,
) (*api.PreStartContainerResponse, error) {
	ctx, cancel := leaveTime(ctx)
	defer cancel()
	defer context.AfterFunc(s.stop, cancel)()
	if err := s.source.Prepare(ctx, req.DevicesIds); err != nil {
		return nil, s.refuse("prepare container", codes.Unavailable, err)
	}
	return &api.PreStartContainerResponse{}, nil
}

// leaveTime returns a context that ends a little before the caller stops waiting, so that the
// reason still arrives: a tenth of the time earlier, at most a second.
func leaveTime(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(time.Until(deadline)/10, time.Second)))
}

// refuse turns an error into the gRPC status that the kubelet shows in the pod's Events. Only the
// resource's name tells there where the error comes from. A text longer than 4 KiB is cut.
func (s *service) refuse(what string, code codes.Code, err error) error {
	switch {
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	}
	s.observer.Refused(s.resource, err)
	text := brief.Cut(err.Error(), brief.Text)
	s.ration.Log(slog.LevelWarn, "refuse to "+what, []any{"resource", s.resource}, "err", text)
	return status.Error(code, s.resource+": "+text)
}

func (s *service) observe(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (resp any, err error) {
	method, start, returned := path.Base(info.FullMethod), time.Now(), false
	defer func() {
		if !returned {
			// Not recovered: the source may be left half changed, with its lock held. The runtime
			// prints the stack and ends the process. Containers go on, and the next process reads
			// everything anew.
			s.log.Error("panic in a call; the process ends", "resource", s.resource, "method", method)
		}
	}()
	resp, err = handler(ctx, req)
	returned = true
	s.observer.Called(s.resource, method, time.Since(start), err)
	return resp, err
}
