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

// service answers the kubelet's calls for one resource. It knows nothing of
// sockets and registration.
type service struct {
	api.UnimplementedDevicePluginServer

	resource string
	source   Source
	log      *slog.Logger
	// ration is the log for refusals: a controller may make pods as fast as they fail.
	ration   *brief.Ration
	observer Observer
	// stop ends with the plugin's Run, and ends streams and waits with it.
	stop context.Context

	// list is what streams send; nil until the source knows its devices. withheld is the
	// Kubelet's.
	list     cell[*list]
	withheld *cell[bool]
	streams  cell[streams]
	// asks says whether the kubelet is to ask before it starts containers, and told what
	// it was told of that, the last time that it asked.
	asks cell[bool]
	told cell[told]
	// fault is why the source's newest list is not what is sent; nil if it is.
	fault cell[fault]
	// changed is called when any of these has changed.
	changed func()
	// sent is KubeletOptions.Sent.
	sent func(resource string, healthy int)
	// stood is streamStood.
	stood time.Duration
}

// told is what the kubelet was told, if it has asked.
type told struct{ asked, required bool }

// fault is what is wrong, and since when; zero where nothing is.
type fault struct {
	err   error
	since time.Time
}

// of is the fault that follows this one: what goes on has begun before.
func (f fault) of(err error, now time.Time) fault {
	if err == nil {
		return fault{}
	}
	if f.err != nil {
		now = f.since
	}
	return fault{err, now}
}

// streams counts ListAndWatch streams: by it the plugin knows whether the
// kubelet still has it registered.
type streams struct {
	open   int // now
	opened int // ever
	// since is when the oldest that is open was opened, lost when the last one ended
	// that had stood; brief says that one that was opened later ended at once.
	since, lost time.Time
	brief       bool
}

// streamStood is how long a stream must be open after one that ended sooner to be
// believed: a kubelet that cannot receive a list opens a stream again and again.
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

// stands reports whether the kubelet receives the lists, as far as streams tell;
// enough is streamStood.
func (n streams) stands(now time.Time, enough time.Duration) bool {
	return n.open > 0 && (!n.brief || now.Sub(n.since) >= enough)
}

func newServer(s *service) *grpc.Server {
	server := grpc.NewServer(
		grpc.ForceServerCodecV2(newCodec()),
		grpc.UnaryInterceptor(s.observe),
		// Lists of free devices come in one piece, without waiting for window
		// updates: thousands of IDs are more than the default of 64 KiB.
		grpc.InitialWindowSize(maxListBytes),
		grpc.InitialConnWindowSize(maxListBytes),
		grpc.WaitForHandlers(true),
	)
	api.RegisterDevicePluginServer(server, s)
	return server
}

// follow keeps list equal to what the source says, until stop.
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
		*l = *old // A new value, so that it is sent again; the same bytes.
	} else {
		var err error
		if l, err = encode(devices); err != nil {
			// What was sent last stays: without a list the endpoint would end,
			// and its pods would fail.
			s.log.Error("keep the last list: the new one cannot be sent", "resource", s.resource, "err", err)
			s.setFault(err)
			return
		}
	}
	s.setFault(nil)
	s.list.set(l)
	if was, _ := s.asks.get(); was != (l.devices > 0) {
		s.asks.set(l.devices > 0)
	}
}

func (s *service) setFault(err error) {
	if old, _ := s.fault.get(); old.err == nil && err == nil {
		return
	}
	s.fault.update(func(old fault) fault { return old.of(err, time.Now()) })
	s.changed()
}

// GetDevicePluginOptions is asked once for each registration.
func (s *service) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	required, _ := s.asks.get()
	s.told.set(told{true, required})
	return options(required), nil
}

// options says whether the kubelet is to ask before it starts a container that wants the
// resource. It must not where the resource has no device: it would refuse every such
// container, also one that has what it wants by a claim.
func options(required bool) *api.DevicePluginOptions {
	return &api.DevicePluginOptions{PreStartRequired: required, GetPreferredAllocationAvailable: true}
}

// outdated reports whether the kubelet was told something else of its calls than holds
// now. changed is closed when that may be another answer.
func (s *service) outdated() (yes bool, changed <-chan struct{}) {
	now, changed := s.asks.get()
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
		// No device is shown to a kubelet that would start containers without a word.
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

// leaveTime ends a wait a little before the caller stops waiting, so that the
// reason still reaches it: a tenth of the time, at most a second.
func leaveTime(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(time.Until(deadline)/10, time.Second)))
}

// refuse makes an error into the status that the kubelet shows in the pod's
// events, where only the resource's name says where it comes from. A text beyond 4 KiB
// is cut.
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

// observe surrounds every unary call.
func (s *service) observe(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (resp any, err error) {
	method, start, returned := path.Base(info.FullMethod), time.Now(), false
	defer func() {
		if !returned {
			// Not recovered: the source may have been left half changed, with
			// its lock held. The runtime prints the stack and ends the process;
			// containers go on, and the next process reads everything anew.
			s.log.Error("panic in a call; the process ends", "resource", s.resource, "method", method)
		}
	}()
	resp, err = handler(ctx, req)
	returned = true
	s.observer.Called(s.resource, method, time.Since(start), err)
	return resp, err
}
