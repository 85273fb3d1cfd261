// SPDX-License-Identifier: Apache-2.0

package fakes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// plugin lists what it is told to, and notes what it is asked.
type plugin struct {
	api.UnimplementedDevicePluginServer
	lists  chan []*api.Device
	prefer []string
	asked  []string // from one goroutine at a time
	fails  error
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, s grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		select {
		case l, ok := <-p.lists:
			if !ok {
				return nil
			}
			if err := s.Send(&api.ListAndWatchResponse{Devices: l}); err != nil {
				return err
			}
		case <-s.Context().Done():
			return s.Context().Err()
		}
	}
}

func (p *plugin) GetPreferredAllocation(_ context.Context, r *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	p.asked = append(p.asked, fmt.Sprintf("prefer %d of %d", r.ContainerRequests[0].AllocationSize, len(r.ContainerRequests[0].AvailableDeviceIDs)))
	return &api.PreferredAllocationResponse{ContainerResponses: []*api.ContainerPreferredAllocationResponse{{DeviceIDs: p.prefer}}}, nil
}

func (p *plugin) Allocate(_ context.Context, r *api.AllocateRequest) (*api.AllocateResponse, error) {
	p.asked = append(p.asked, "allocate "+strings.Join(slices.Sorted(slices.Values(r.ContainerRequests[0].DevicesIds)), " "))
	return &api.AllocateResponse{ContainerResponses: []*api.ContainerAllocateResponse{{}}}, p.fails
}

func (p *plugin) PreStartContainer(_ context.Context, r *api.PreStartContainerRequest) (*api.PreStartContainerResponse, error) {
	p.asked = append(p.asked, "prepare "+strings.Join(slices.Sorted(slices.Values(r.DevicesIds)), " "))
	return &api.PreStartContainerResponse{}, p.fails
}

const resource = "example.com/gpu"

func startPlugin(t *testing.T, dir string) (*plugin, *grpc.Server) {
	t.Helper()
	p, s := &plugin{lists: make(chan []*api.Device)}, grpc.NewServer()
	l, err := net.Listen("unix", filepath.Join(dir, pluginDir, "p.sock"))
	if err != nil {
		t.Fatal(err)
	}
	api.RegisterDevicePluginServer(s, p)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return p, s
}

func register(t *testing.T, dir string, change func(*api.RegisterRequest)) error {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+filepath.Join(dir, pluginDir, kubeletSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := &api.RegisterRequest{Version: api.Version, Endpoint: "p.sock", ResourceName: resource}
	change(r)
	_, err = api.NewRegistrationClient(conn).Register(t.Context(), r)
	return err
}

func startFake(t *testing.T) (*Kubelet, string) {
	t.Helper()
	dir := t.TempDir()
	k, err := StartKubelet(KubeletOptions{Dir: dir, Agent: Pod{"agent", "gpu-agent", "gpu-agent-x"}, Judge: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	return k, dir
}

// list sends devices, those with a "!" Unhealthy, and waits until they are heard.
func (p *plugin) list(t *testing.T, k *Kubelet, ids ...string) {
	t.Helper()
	var devices []*api.Device
	for _, id := range ids {
		d := &api.Device{ID: strings.TrimPrefix(id, "!"), Health: api.Healthy, Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: 1}}}}
		if id != d.ID {
			d.Health = api.Unhealthy
		}
		devices = append(devices, d)
	}
	all, _ := k.Endpoints()
	before := all[resource].Lists
	p.lists <- devices
	await(t, k, func(e Endpoint) error {
		if e.Lists <= before {
			return errors.New("the list has not come")
		}
		return nil
	})
}

func await(t *testing.T, k *Kubelet, ok func(Endpoint) error) {
	t.Helper()
	if err := k.Await(t.Context(), func(all map[string]Endpoint) error { return ok(all[resource]) }); err != nil {
		t.Fatal(err)
	}
}

// TestKubeletRefuses is what the real one refuses.
func TestKubeletRefuses(t *testing.T) {
	k, dir := startFake(t)
	p, _ := startPlugin(t, dir)
	for what, change := range map[string]func(*api.RegisterRequest){
		"another version":           func(r *api.RegisterRequest) { r.Version = "v1alpha1" },
		"a name without a domain":   func(r *api.RegisterRequest) { r.ResourceName = "gpu" },
		"one of Kubernetes itself":  func(r *api.RegisterRequest) { r.ResourceName = "kubernetes.io/gpu" },
		"a name that no object has": func(r *api.RegisterRequest) { r.ResourceName = "example.com/mig-1g.10gb+me" },
	} {
		if err := register(t, dir, change); err == nil {
			t.Errorf("%s is taken", what)
		}
	}
	admit := func(want string) {
		t.Helper()
		if err := k.Admit(t.Context(), Pod{"u", "default", "job"}, []string{"main"}, resource, 2); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	admit("unregistered")
	if err := register(t, dir, func(*api.RegisterRequest) {}); err != nil {
		t.Fatal(err)
	}
	admit("no healthy devices")
	p.list(t, k, "!a", "!b")
	admit("no healthy devices")
	p.list(t, k, "a", "!b")
	admit("requested 2, available 1")
	if len(p.asked) > 0 {
		t.Errorf("the plugin is asked to %q", p.asked)
	}
	p.list(t, k, "a", "b")
	p.fails = errors.New("no")
	if err := k.Admit(t.Context(), Pod{"u", "default", "job"}, []string{"main"}, resource, 2); err == nil || errors.Is(err, ErrRefused) {
		t.Errorf("%v, want the plugin's refusal", err)
	}
	if free := k.Available(resource); len(free) != 2 {
		t.Errorf("%q are free after a pod failed", free)
	}
}

// TestKubeletGives walks a pod with an init container through it.
func TestKubeletGives(t *testing.T) {
	k, dir := startFake(t)
	p, server := startPlugin(t, dir)
	if err := register(t, dir, func(*api.RegisterRequest) {}); err != nil {
		t.Fatal(err)
	}
	p.list(t, k, "a", "b", "c")
	p.prefer = []string{"c", "a"}
	job := Pod{"u", "default", "job"}
	if err := k.Admit(t.Context(), job, []string{"init", "main"}, resource, 2); err != nil {
		t.Fatal(err)
	}
	given := k.Allocations()
	if len(given) != 2 || given[0].Container != "init" || given[1].Container != "main" || !slices.Equal(given[1].IDs, []string{"a", "c"}) {
		t.Fatalf("given: %+v", given)
	}
	if err := k.PreStart(t.Context(), given[1]); err != nil {
		t.Fatal(err)
	}
	if want := []string{"prefer 2 of 3", "allocate a c", "allocate a c", "prepare a c"}; !slices.Equal(p.asked, want) {
		t.Errorf("asked to %q, want %q", p.asked, want)
	}
	data, err := os.ReadFile(filepath.Join(dir, pluginDir, checkpointFile))
	var c struct {
		Data struct {
			PodDeviceEntries  []struct{ DeviceIDs map[string][]string }
			RegisteredDevices map[string][]string
		}
	}
	if err = errors.Join(err, json.Unmarshal(data, &c)); err != nil || len(c.Data.PodDeviceEntries) != 2 ||
		!slices.Equal(c.Data.PodDeviceEntries[0].DeviceIDs["1"], []string{"a", "c"}) || len(c.Data.RegisteredDevices[resource]) != 3 {
		t.Errorf("the checkpoint is %s, %v", data, err)
	}
	listed, err := k.List(t.Context(), &podresources.ListPodResourcesRequest{})
	if err != nil || len(listed.PodResources) != 2 || len(listed.PodResources[1].Containers) != 1 || len(listed.PodResources[1].Containers[0].Devices) != 2 {
		t.Errorf("PodResources: %v, %v", listed, err)
	}
	if wrong := k.Complaints(); len(wrong) > 0 {
		t.Errorf("complaints without a reason: %q", wrong)
	}

	p.list(t, k, "!a", "b")
	if wrong := k.Complaints(); len(wrong) != 3 {
		t.Errorf("complaints %q, want that a is Unhealthy, and that c is missing though held and though on offer", wrong)
	}
	k.Finish(job.UID)
	if left := k.Allocations(); len(left) > 0 {
		t.Errorf("an ended pod has %v", left)
	}
	if again, _ := os.ReadFile(filepath.Join(dir, pluginDir, checkpointFile)); len(again) < len(data)/2 {
		t.Error("a pod's end is in the checkpoint at once")
	}
	server.Stop()
	await(t, k, func(e Endpoint) error {
		if e.Gone == nil {
			return errors.New("the plugin's end is not seen")
		}
		return nil
	})
	if free := k.Available(resource); len(free) > 0 {
		t.Errorf("%q are free without a plugin", free)
	}
	if err := k.PreStart(t.Context(), given[1]); !errors.Is(err, ErrRefused) {
		t.Errorf("%v, want that there is no plugin", err)
	}
}

// TestKubeletStartsAnew: plugins' files go, its own stay.
func TestKubeletStartsAnew(t *testing.T) {
	k, dir := startFake(t)
	startPlugin(t, dir)
	if err := register(t, dir, func(*api.RegisterRequest) {}); err != nil {
		t.Fatal(err)
	}
	if err := k.Outlive(Allocation{Pod: Pod{UID: "old"}, Container: "main", Resource: "nvidia.com/gpu", IDs: []string{"x"}}); err != nil {
		t.Fatal(err)
	}
	k.Kill()
	if err := k.Start(); err != nil {
		t.Fatal(err)
	}
	var names []string
	files, err := os.ReadDir(filepath.Join(dir, pluginDir))
	for _, f := range files {
		names = append(names, f.Name())
	}
	if want := []string{kubeletSocket, checkpointFile}; err != nil || !slices.Equal(names, want) {
		t.Errorf("%q are left, %v, want %q", names, err, want)
	}
	k.Answer("List", func(context.Context, any) (any, error) { return nil, errors.New("not now") })
	conn, err := grpc.NewClient("unix:"+filepath.Join(dir, listerSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	lister := podresources.NewPodResourcesListerClient(conn)
	if _, err := lister.List(t.Context(), &podresources.ListPodResourcesRequest{}); err == nil || !strings.Contains(err.Error(), "not now") {
		t.Errorf("%v, want what the test says", err)
	}
	k.Answer("List", nil)
	if got, err := lister.List(t.Context(), &podresources.ListPodResourcesRequest{}); err != nil || len(got.PodResources) != 1 {
		t.Errorf("%v, %v, want the agent's pod", got, err)
	}
}
