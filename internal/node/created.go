// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// maxStatus is the largest status of a container accepted, in bytes. Most are 10 to 60
	// KB; one has the container's environment twice.
	maxStatus = 4 << 20
	// statusesAtOnce are asked for at one time, and statusesALook for one list: the rest
	// waits for the next.
	statusesAtOnce = 4
	statusesALook  = 128
	// statusPatience bounds what all of them take.
	statusPatience = 2 * time.Second
)

// created is which CDI devices the runtime's containers were created with. That never
// changes, so each is asked about once.
type created struct {
	// patience is statusPatience, but in a test.
	patience time.Duration
	// turn holds a token while somebody asks: who comes meanwhile finds the answers.
	turn chan struct{}

	mu sync.Mutex
	// Guarded by mu:
	by map[string]*creation // by the container's ID
	// asked counts questions.
	asked uint64
}

// creation is what is known of one container.
type creation struct {
	known bool
	cdi   []string
	asked uint64 // the number of the last question without an answer; 0 for none
}

// addCDI fills in the CDI devices of containers, asking the runtime for those that it has
// not told yet. It returns the containers that the runtime has no more.
func (r *Runtime) addCDI(ctx context.Context, list []Container) (gone map[string]bool) {
	ctx, cancel := context.WithTimeout(ctx, r.created.patience)
	defer cancel()
	select {
	case r.created.turn <- struct{}{}:
		gone = r.askCDI(ctx, list)
		<-r.created.turn
	case <-ctx.Done():
	}
	r.created.mu.Lock()
	defer r.created.mu.Unlock()
	for i := range list {
		c := r.created.by[list[i].ID]
		if list[i].CDIUnknown = c == nil || !c.known; c != nil {
			list[i].CDI = c.cdi
		}
	}
	return gone
}

// askCDI asks for the statuses of containers whose devices are not known: those that have
// waited longest first, so that one whose status fails does not keep another waiting.
func (r *Runtime) askCDI(ctx context.Context, list []Container) (gone map[string]bool) {
	m := &r.created
	m.mu.Lock()
	var due []string
	for i := range list {
		id := list[i].ID
		if m.by[id] == nil {
			m.by[id] = &creation{}
		}
		if !m.by[id].known {
			due = append(due, id)
		}
	}
	slices.SortStableFunc(due, func(a, b string) int { return cmp.Compare(m.by[a].asked, m.by[b].asked) })
	m.mu.Unlock()
	gone = map[string]bool{}
	var asking errgroup.Group
	asking.SetLimit(statusesAtOnce)
	for _, id := range due[:min(len(due), statusesALook)] {
		if ctx.Err() != nil {
			break
		}
		asking.Go(func() error {
			devices, err := r.devices(ctx, id)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.asked++
			switch c := m.by[id]; {
			case status.Code(err) == codes.NotFound:
				gone[id] = true
			case c == nil: // forgotten meanwhile
			case err == nil:
				c.known, c.cdi = true, devices
			default:
				if c.asked == 0 {
					r.o.Logger.Warn("cannot tell what a container was created with; until the runtime tells, it may have any device", "container", id, "err", err)
				}
				c.asked = m.asked
			}
			return nil
		})
	}
	_ = asking.Wait()
	return gone
}

// keep forgets all containers but these.
func (m *created) keep(list []Container) {
	listed := make(map[string]bool, len(list))
	for i := range list {
		listed[list[i].ID] = true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range m.by {
		if !listed[id] {
			delete(m.by, id)
		}
	}
}

// devices asks for the CDI devices that a container was created with.
func (r *Runtime) devices(ctx context.Context, id string) ([]string, error) {
	answer, err := ask(ctx, r, func(c cri.RuntimeServiceClient) (*cri.ContainerStatusResponse, error) {
		return c.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true}, grpc.MaxCallRecvMsgSize(maxStatus))
	})
	if err != nil {
		return nil, r.wrap("ask for the status of container "+id, err)
	}
	devices, err := r.readInfo(answer.GetInfo())
	if err != nil {
		return nil, fmt.Errorf("understand the status of container %s at %s: %w", id, r.Endpoint(), err)
	}
	return devices, nil
}

// readInfo finds CDI devices in a status's information for debugging, which each runtime
// words as it likes. containerd has the kubelet's request in it, CRI-O the specification
// that was made of it.
func (r *Runtime) readInfo(info map[string]string) (devices []string, _ error) {
	text, ok := info["info"]
	if !ok {
		return nil, errors.New(`no "info" in it`)
	}
	var said struct {
		Config *struct {
			CDI []struct {
				Name string `json:"name"`
			} `json:"CDI_devices"`
		} `json:"config"`
		RuntimeSpec *struct {
			Mounts []struct {
				Source string `json:"source"`
			} `json:"mounts"`
		} `json:"runtimeSpec"`
	}
	if err := json.Unmarshal([]byte(text), &said); err != nil {
		return nil, err
	}
	switch {
	case said.Config != nil:
		for _, d := range said.Config.CDI {
			devices = append(devices, d.Name)
		}
	case said.RuntimeSpec != nil:
		for _, m := range said.RuntimeSpec.Mounts {
			if r.o.DeviceOf == nil {
				break
			}
			if d := r.o.DeviceOf(m.Source); d != "" && !slices.Contains(devices, d) {
				devices = append(devices, d)
			}
		}
	default:
		return nil, errors.New("it has neither the kubelet's request (config) nor the specification (runtimeSpec)")
	}
	return devices, nil
}
