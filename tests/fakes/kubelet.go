// SPDX-License-Identifier: Apache-2.0

package fakes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/validation"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Below a kubelet's directory: where plugins and it have their sockets, where
// PodResources is asked, and what it knows of devices and pods.
const (
	pluginDir      = "device-plugins"
	listerSocket   = "pod-resources/kubelet.sock"
	kubeletSocket  = "kubelet.sock"
	checkpointFile = "kubelet_internal_checkpoint"
)

// KubeletOptions are what a kubelet is started with.
type KubeletOptions struct {
	// Dir is its directory.
	Dir string
	// Agent is a pod without devices that it runs from the beginning: the agent
	// believes a kubelet's account of holders once its own pod is in it. Without a
	// name there is none.
	Agent Pod
	// MaxList bounds a list that it can receive, in bytes. 0 is gRPC's 4 MiB.
	MaxList int
	// Deaf is called, if given, when the socket for registrations is there and
	// refuses connections still.
	Deaf func(*Kubelet)
	// Judge makes it complain of lists that break the rules of the house; see
	// Complaints.
	Judge bool
	// Wipe, if set, is what it does to the node's ResourceSlices when it starts. It is
	// called beside everything else.
	Wipe func()
}

// Kubelet is the kubelet's device manager and PodResources; see the package's
// comment for its habits. Its methods may be called from several goroutines.
type Kubelet struct {
	api.UnimplementedRegistrationServer
	podresources.UnimplementedPodResourcesListerServer
	answers
	o KubeletOptions

	// While it runs; Start and Stop are not called at one time.
	servers []*grpc.Server
	sockets []*net.UnixListener
	serving sync.WaitGroup
	end     context.CancelFunc // of what it does by itself

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at every change
	// Guarded by mu:
	bound     time.Time
	endpoints map[string]*endpoint // by resource
	pods      map[string]*pod      // by UID; those whose devices are not free yet
	given     []Allocation         // in order
	leftovers []Allocation
	// offered is when each ID of a resource was last listed Healthy.
	offered map[string]map[string]time.Time
	forgets bool
	wrong   []string
	drivers map[string]*driver // of DRA, by name
	claims  map[string]*claim  // in its account, by UID
}

// Endpoint is what a kubelet knows of a resource's plugin at one moment.
type Endpoint struct {
	Resource string
	Client   api.DevicePluginClient // of the newest registration, as Conn and Options
	Conn     *grpc.ClientConn
	Options  *api.DevicePluginOptions

	Registrations int       // so far
	Registered    time.Time // when the newest one was asked for
	Lists         int       // so far
	Listed        time.Time // when the newest registration's first list came; zero before
	At            time.Time // when the newest list came
	Devices       []*api.Device
	Bytes         int   // of the newest list
	Gone          error // why it is not connected any more
}

// Healthy are the IDs that the newest list has so, in its order.
func (e *Endpoint) Healthy() []string { return idsOf(e.Devices, true) }

// Unhealthy are the others.
func (e *Endpoint) Unhealthy() []string { return idsOf(e.Devices, false) }

// Serves says whether a list came and more may come.
func (e *Endpoint) Serves() bool { return !e.Listed.IsZero() && e.Gone == nil }

func idsOf(devices []*api.Device, healthy bool) (ids []string) {
	for _, d := range devices {
		if (d.Health == api.Healthy) == healthy {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// endpoint is a resource's, with all connections that it ever had: those that were
// replaced stay open.
type endpoint struct {
	Endpoint
	conns    []*grpc.ClientConn
	followed sync.WaitGroup
	byID     map[string]*api.Device // of the newest list
	// lost says that it was disconnected since its newest list: all is unhealthy.
	lost bool
}

func (e *endpoint) close() {
	for _, c := range e.conns {
		_ = c.Close()
	}
	e.followed.Wait()
}

func (e *endpoint) healthy() []string {
	if e.lost {
		return nil
	}
	return e.Healthy()
}

// StartKubelet starts one that knows of no pods but the agent's.
func StartKubelet(o KubeletOptions) (*Kubelet, error) {
	k := &Kubelet{o: o, changed: make(chan struct{}), endpoints: map[string]*endpoint{}, pods: map[string]*pod{}, offered: map[string]map[string]time.Time{},
		drivers: map[string]*driver{}, end: func() {}}
	if o.Agent.Name != "" {
		k.pods[o.Agent.UID] = &pod{Pod: o.Agent, app: "gpu-agent"}
	}
	return k, k.Start()
}

// Start starts one that was stopped: pods have stayed, plugins have to come again.
// As the real one it removes all files of the plugins' directory first, the
// checkpoint excepted.
func (k *Kubelet) Start() error {
	dir := filepath.Join(k.o.Dir, pluginDir)
	if err := errors.Join(os.MkdirAll(dir, 0o750), os.MkdirAll(filepath.Join(k.o.Dir, filepath.Dir(listerSocket)), 0o750),
		os.MkdirAll(filepath.Join(k.o.Dir, registryDir), 0o750), k.readClaims()); err != nil {
		return fmt.Errorf("start a kubelet: %w", err)
	}
	files, err := os.ReadDir(dir)
	for _, f := range files {
		if !f.IsDir() && f.Name() != checkpointFile {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, f.Name())))
		}
	}
	if e := os.Remove(filepath.Join(k.o.Dir, listerSocket)); !errors.Is(e, fs.ErrNotExist) {
		err = errors.Join(err, e)
	}
	lister := grpc.NewServer(k.options(limit(rate.NewLimiter(100, 10)))...)
	podresources.RegisterPodResourcesListerServer(lister, k)
	err = errors.Join(err, k.serve(lister, filepath.Join(k.o.Dir, listerSocket), func() {}))

	registration := grpc.NewServer(k.options()...)
	api.RegisterRegistrationServer(registration, k)
	err = errors.Join(err, k.serve(registration, filepath.Join(dir, kubeletSocket), func() {
		k.mu.Lock()
		k.bound = time.Now()
		k.mu.Unlock()
		if k.o.Deaf != nil {
			k.o.Deaf(k)
		}
	}))
	if err != nil {
		k.Stop()
		return fmt.Errorf("start a kubelet: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.end = cancel
	if k.o.Wipe != nil {
		k.serving.Go(k.o.Wipe)
	}
	k.serving.Go(func() { k.followDrivers(ctx) })
	return nil
}

// limit refuses more than PodResources answers.
func limit(l *rate.Limiter) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, own grpc.UnaryHandler) (any, error) {
		if !l.Allow() {
			return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		return own(ctx, request)
	}
}

// serve does in two steps what net.Listen does in two steps too close to each other
// for a test: bound is called in between.
func (k *Kubelet) serve(s *grpc.Server, socket string, bound func()) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), socket)
	defer f.Close()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return fmt.Errorf("bind %s: %w", socket, err)
	}
	bound()
	if err := unix.Listen(fd, 128); err != nil {
		return err
	}
	l, err := net.FileListener(f)
	if err != nil {
		return err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(true)
	k.servers, k.sockets = append(k.servers, s), append(k.sockets, l.(*net.UnixListener))
	k.serving.Go(func() { _ = s.Serve(l) })
	return nil
}

// Stop ends it with all its connections. Its pods run on.
func (k *Kubelet) Stop() {
	k.end()
	for _, s := range k.servers {
		s.Stop()
	}
	k.serving.Wait()
	k.servers, k.sockets = nil, nil
	k.mu.Lock()
	left := k.endpoints
	k.endpoints = map[string]*endpoint{}
	k.changedLocked()
	k.mu.Unlock()
	for _, e := range left {
		e.close()
	}
}

// Kill ends it as kill -9 does: its sockets' files stay.
func (k *Kubelet) Kill() {
	for _, l := range k.sockets {
		l.SetUnlinkOnClose(false)
	}
	k.Stop()
}

// Bound is when plugins could see the socket that they wait for.
func (k *Kubelet) Bound() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.bound
}

func (k *Kubelet) changedLocked() {
	close(k.changed)
	k.changed = make(chan struct{})
}

// Endpoints are the resources' plugins, and a channel that is closed when anything
// has changed since.
func (k *Kubelet) Endpoints() (map[string]Endpoint, <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make(map[string]Endpoint, len(k.endpoints))
	for resource, e := range k.endpoints {
		all[resource] = e.Endpoint
	}
	return all, k.changed
}

// Await waits until ok, which is called anew at every change, says nil.
func (k *Kubelet) Await(ctx context.Context, ok func(map[string]Endpoint) error) error {
	for {
		all, changed := k.Endpoints()
		err := ok(all)
		if err == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

// Dial connects to a plugin's socket as a kubelet does, and waits until it answers.
func Dial(ctx context.Context, socket string, o ...grpc.CallOption) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///"+socket, grpc.WithAuthority("localhost"), grpc.WithDefaultCallOptions(o...),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", addr)
		}))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", socket, err)
	}
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if state == connectivity.Idle {
			conn.Connect()
		}
		if !conn.WaitForStateChange(ctx, state) {
			_ = conn.Close()
			return nil, fmt.Errorf("dial %s: %w", socket, ctx.Err())
		}
	}
	return conn, nil
}

// Register is a plugin's call. It is answered when the plugin has been dialled and
// has said its options; its list is opened then.
func (k *Kubelet) Register(ctx context.Context, r *api.RegisterRequest) (*api.Empty, error) {
	at := time.Now()
	if !slices.Contains(api.SupportedVersions[:], r.Version) {
		return nil, fmt.Errorf("unsupported plugin API version %q", r.Version)
	}
	if !strings.Contains(r.ResourceName, "/") || strings.Contains(r.ResourceName, "kubernetes.io/") ||
		strings.HasPrefix(r.ResourceName, "requests.") || len(validation.IsQualifiedName("requests."+r.ResourceName)) > 0 {
		return nil, fmt.Errorf("the resource name %q is not one of an extended resource", r.ResourceName)
	}
	var o []grpc.CallOption
	if k.o.MaxList > 0 {
		o = append(o, grpc.MaxCallRecvMsgSize(k.o.MaxList))
	}
	conn, err := Dial(ctx, filepath.Join(k.o.Dir, pluginDir, r.Endpoint), o...)
	if err != nil {
		return nil, fmt.Errorf("failed to dial device plugin: %w", err)
	}
	client := api.NewDevicePluginClient(conn)
	options, err := client.GetDevicePluginOptions(ctx, &api.Empty{})
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("failed to get device plugin options: %w", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	e := k.endpoints[r.ResourceName]
	if e == nil {
		e = &endpoint{Endpoint: Endpoint{Resource: r.ResourceName}}
		k.endpoints[r.ResourceName] = e
	}
	e.Client, e.Conn, e.Options, e.Registered, e.Listed, e.Gone = client, conn, options, at, time.Time{}, nil
	e.Registrations++
	e.conns = append(e.conns, conn)
	e.followed.Go(func() { k.follow(e, client) })
	k.changedLocked()
	return &api.Empty{}, nil
}

// follow takes lists until the stream ends. That disconnects the client which the
// resource has then, though it may be another.
func (k *Kubelet) follow(e *endpoint, client api.DevicePluginClient) {
	stream, err := client.ListAndWatch(context.Background(), &api.Empty{})
	for err == nil {
		var list *api.ListAndWatchResponse
		if list, err = stream.Recv(); err == nil {
			k.hear(e, list, time.Now())
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if e.Gone == nil {
		e.Gone, e.lost = err, true
		_ = e.Conn.Close()
		k.changedLocked()
	}
}

func (k *Kubelet) hear(e *endpoint, list *api.ListAndWatchResponse, at time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e.Devices, e.Bytes, e.At, e.lost = list.Devices, proto.Size(list), at, false
	e.byID = make(map[string]*api.Device, len(list.Devices))
	for _, d := range list.Devices {
		e.byID[d.ID] = d
	}
	if e.Lists++; e.Listed.IsZero() {
		e.Listed = at
	}
	if k.o.Judge {
		k.judgeLocked(e)
	}
	if err := k.checkpointLocked(); err != nil {
		k.wrongLocked("%v", err)
	}
	k.changedLocked()
}

// Forget drops resources and ends the pods that hold them, so that what is awaited
// next is of a program that is started next. Without names it drops all.
func (k *Kubelet) Forget(resources ...string) error {
	k.mu.Lock()
	for _, a := range k.given {
		if len(resources) == 0 || slices.Contains(resources, a.Resource) {
			k.pods[a.Pod.UID].ended = true
		}
	}
	k.freeLocked()
	var left []*endpoint
	for resource, e := range maps.Clone(k.endpoints) {
		if len(resources) == 0 || slices.Contains(resources, resource) {
			delete(k.endpoints, resource)
			left = append(left, e)
		}
	}
	err := k.checkpointLocked()
	k.changedLocked()
	k.mu.Unlock()
	for _, e := range left {
		e.close()
	}
	return err
}
