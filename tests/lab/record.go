// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Recording is what the agent tells the kubelet of its devices, list by list: it
// is a second client of the agent's sockets, which send the same to each.
type Recording struct {
	dir   string
	ended sync.WaitGroup

	mu sync.Mutex // guards what follows
	// listening has the resources that a stream is open for.
	listening map[string]bool
	last      map[string]map[string]string // of each resource, the health of its devices
	turns     []Turn
	lists     int
	broken    []string
}

// Turn is a device that a list shows in another way than the list before did.
type Turn struct {
	At           time.Time
	Resource, ID string
	// From and To are Healthy, Unhealthy, or empty where it is not in the list.
	From, To string
}

func (t Turn) String() string {
	name := func(health string) string { return cmp.Or(health, "absent") }
	return fmt.Sprintf("%s %s of %s: %s, then %s", t.At.Format("15:04:05.000"), t.ID, t.Resource, name(t.From), name(t.To))
}

// Record begins a recording, which goes on until ctx ends and Wait has returned.
// A resource that is served later is found within twenty milliseconds, and a
// list that is sent and replaced before that is not seen.
func (n *Node) Record(ctx context.Context) *Recording {
	r := &Recording{dir: n.File("/var/lib/kubelet/device-plugins"), listening: map[string]bool{}, last: map[string]map[string]string{}}
	r.ended.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			r.find(ctx)
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return r
}

// Wait waits until nothing listens any more.
func (r *Recording) Wait() { r.ended.Wait() }

// find listens at each of the agent's sockets that nobody listens at.
func (r *Recording) find(ctx context.Context) {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return // the kubelet makes it anew
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range entries {
		base, socket := strings.CutSuffix(e.Name(), ".sock")
		resource := strings.Replace(base, "_", "/", 1)
		if !socket || !strings.HasPrefix(resource, Domain+"/") || r.listening[resource] {
			continue
		}
		r.listening[resource] = true
		path := filepath.Join(r.dir, e.Name())
		r.ended.Go(func() {
			heard, err := r.listen(ctx, resource, path)
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.listening, resource)
			if heard && ctx.Err() == nil {
				r.broken = append(r.broken, fmt.Sprintf("%s %s: %v", time.Now().Format("15:04:05.000"), resource, err))
			}
		})
	}
}

// listen takes lists until the stream ends, and says whether it had any.
func (r *Recording) listen(ctx context.Context, resource, path string) (heard bool, err error) {
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return false, err
	}
	defer conn.Close()
	stream, err := deviceplugin.NewDevicePluginClient(conn).ListAndWatch(ctx, &deviceplugin.Empty{})
	if err != nil {
		return false, err
	}
	for ; ; heard = true {
		list, err := stream.Recv()
		if err != nil {
			return heard, err
		}
		r.take(resource, list.Devices)
	}
}

func (r *Recording) take(resource string, devices []*deviceplugin.Device) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	health := map[string]string{}
	for _, d := range devices {
		health[d.ID] = d.Health
	}
	old := r.last[resource]
	ids := maps.Clone(health)
	maps.Copy(ids, old)
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		if old[id] != health[id] {
			r.turns = append(r.turns, Turn{now, resource, id, old[id], health[id]})
		}
	}
	r.last[resource] = health
	r.lists++
}

// Turns are the devices that have turned since a moment, in the order of time.
func (r *Recording) Turns(since time.Time) []Turn {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Turn
	for _, t := range r.turns {
		if !t.At.Before(since) {
			out = append(out, t)
		}
	}
	return out
}

// Devices are those that the last list of each resource has, and their health.
func (r *Recording) Devices() map[string]map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[string]map[string]string{}
	for resource, health := range r.last {
		out[resource] = maps.Clone(health)
	}
	return out
}

// Lists is how many lists were seen.
func (r *Recording) Lists() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lists
}

// Broken says which streams have ended though the recording went on, and why.
func (r *Recording) Broken() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.broken)
}
