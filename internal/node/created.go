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

// creation is what is known of one container. Whoever has looked one up may go on with it
// when a later list has it no more: see keep.
type creation struct {
	id string
	// Guarded by created.mu:
	known bool
	cdi   []string
	asked uint64 // the number of the last question without an answer; 0 for none
}

// addCDI fills in the CDI devices of containers, asking the runtime for those that it has
// not told yet. It returns the containers that the runtime has no more.
func (r *Runtime) addCDI(ctx context.Context, list []Container) (gone map[string]bool) {
	m := &r.created
	ctx, cancel := context.WithTimeout(ctx, m.patience)
	defer cancel()
	of := m.of(list)
	select {
	case m.turn <- struct{}{}:
		gone = r.askCDI(ctx, of)
		<-m.turn
	case <-ctx.Done():
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, c := range of {
		list[i].CDI, list[i].CDIUnknown = c.cdi, !c.known
	}
	return gone
}

// of looks up what is known of each container of a list.
func (m *created) of(list []Container) []*creation {
	m.mu.Lock()
	defer m.mu.Unlock()
	of := make([]*creation, len(list))
	for i := range list {
		id := list[i].ID
		if m.by[id] == nil {
			m.by[id] = &creation{id: id}
		}
		of[i] = m.by[id]
	}
	return of
}

// askCDI asks for the statuses of containers whose devices are not known: those that have
// waited longest first, so that one whose status fails does not keep another waiting.
func (r *Runtime) askCDI(ctx context.Context, of []*creation) (gone map[string]bool) {
	m := &r.created
	m.mu.Lock()
	due := slices.DeleteFunc(slices.Clone(of), func(c *creation) bool { return c.known })
	slices.SortStableFunc(due, func(a, b *creation) int { return cmp.Compare(a.asked, b.asked) })
	m.mu.Unlock()
	gone = map[string]bool{}
	var asking errgroup.Group
	asking.SetLimit(statusesAtOnce)
	for _, c := range due[:min(len(due), statusesALook)] {
		if ctx.Err() != nil {
			break
		}
		asking.Go(func() error {
			devices, err := r.devices(ctx, c.id)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.asked++
			switch {
			case status.Code(err) == codes.NotFound:
				gone[c.id] = true
			case err == nil:
				c.known, c.cdi = true, devices
			default:
				if c.asked == 0 {
					r.o.Logger.Warn("cannot tell what a container was created with; "+
						"until the runtime tells, it may have any device", "container", c.id, "err", err)
				}
				c.asked = m.asked
			}
			return nil
		})
	}
	_ = asking.Wait()
	return gone
}

// keep forgets all containers but these. One that another list has yet, which was asked for
// earlier, keeps what is known of it there.
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
		return c.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true},
			grpc.MaxCallRecvMsgSize(maxStatus))
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
