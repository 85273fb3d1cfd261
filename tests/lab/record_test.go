// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// lister sends the lists that it is given.
type lister struct {
	deviceplugin.UnimplementedDevicePluginServer
	lists chan []*deviceplugin.Device
}

func (l *lister) ListAndWatch(_ *deviceplugin.Empty, stream deviceplugin.DevicePlugin_ListAndWatchServer) error {
	for {
		select {
		case <-stream.Context().Done():
			return nil
		case devices := <-l.lists:
			if err := stream.Send(&deviceplugin.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
		}
	}
}

// serve serves a resource in a node's directory of sockets until stop is called.
func serve(t *testing.T, n *Node, resource string) (lists chan []*deviceplugin.Device, stop func()) {
	t.Helper()
	dir := n.File("/var/lib/kubelet/device-plugins")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", filepath.Join(dir, resource+".sock"))
	if err != nil {
		t.Fatal(err)
	}
	l := &lister{lists: make(chan []*deviceplugin.Device)}
	server := grpc.NewServer()
	deviceplugin.RegisterDevicePluginServer(server, l)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return l.lists, server.Stop
}

func TestRecording(t *testing.T) {
	n := &Node{root: t.TempDir()}
	ctx, cancel := context.WithCancel(t.Context())
	r := n.Record(ctx)
	defer func() {
		cancel()
		r.Wait()
	}()
	heard := func(lists int) {
		t.Helper()
		if err := Await(t.Context(), time.Minute, "a list", func(context.Context) error {
			if r.Lists() < lists {
				return errors.New("it is not there")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	device := func(id, health string) *deviceplugin.Device { return &deviceplugin.Device{ID: id, Health: health} }
	const resource = "example.com/mig-1g.10gb"
	lists, stop := serve(t, n, "example.com_mig-1g.10gb")
	// Another's resource is not listened to.
	others, _ := serve(t, n, "example.org_gpu")
	lists <- []*deviceplugin.Device{device("a", "Healthy"), device("b", "Healthy")}
	heard(1)
	since := time.Now()
	lists <- []*deviceplugin.Device{device("a", "Unhealthy"), device("b", "Healthy")}
	lists <- []*deviceplugin.Device{device("a", "Healthy"), device("c", "Healthy")}
	heard(3)
	var got []string
	for _, turn := range r.Turns(since) {
		got = append(got, turn.ID+" "+turn.From+">"+turn.To)
	}
	if want := "[a Healthy>Unhealthy a Unhealthy>Healthy b Healthy> c >Healthy]"; fmt.Sprint(got) != want {
		t.Errorf("it has recorded %v, want %s", got, want)
	}
	if all := r.Turns(time.Time{}); len(all) != len(got)+2 {
		t.Errorf("all that has turned is %v", all)
	}
	if has := fmt.Sprint(r.Devices()[resource]); has != "map[a:Healthy c:Healthy]" || len(r.Devices()) != 1 {
		t.Errorf("the last lists are %v", r.Devices())
	}
	if broken := r.Broken(); len(broken) > 0 {
		t.Errorf("streams have ended: %v", broken)
	}
	select {
	case others <- nil:
		t.Error("somebody listens to another's resource")
	default:
	}
	stop()
	if err := Await(t.Context(), time.Minute, "word of the stream's end", func(context.Context) error {
		if len(r.Broken()) != 1 {
			return fmt.Errorf("it says %v", r.Broken())
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
