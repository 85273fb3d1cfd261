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
	// maxStatus is the largest accepted status of a container, in bytes. Most are 10 to 60 KB; a
	// status has the container's environment twice.
	maxStatus = 4 << 20
	// statusesAtOnce is the number of statuses asked for at the same time, and statusesALook the
	// most for one list; the others wait for the next list.
	statusesAtOnce = 4
	statusesALook  = 128
	// statusPatience is the time limit for all statuses of a list.
	statusPatience = 2 * time.Second
)

// cdiCache records the CDI devices of the runtime's containers. A container keeps those that it was
// created with, so the agent asks once for each container.
type cdiCache struct {
	// patience is statusPatience; tests shorten it.
	patience time.Duration
	// turn holds a token while a caller asks the runtime. Other callers wait, and then find the
	// answers.
	turn chan struct{}

	mu sync.Mutex
	// The fields below are guarded by mu.
	by map[string]*cdiEntry // by the container's ID
	// asked is the number of questions so far.
	asked uint64
}

// cdiEntry is what is known of one container. Callers may keep using it after a later list has
// dropped the container: see keep.
type cdiEntry struct {
	id string
	// Guarded by cdiCache.mu:
	known bool
	cdi   []string
	asked uint64 // the number of the last question without an answer; 0 for none
}

// addCDI fills in the CDI devices of containers. It asks the runtime for those that are not known
// yet. It returns the containers that the runtime does not have any longer.
func (r *Runtime) addCDI(ctx context.Context, list []Container) (gone map[string]bool) {
	m := &r.cdi
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

// of returns the entry of each container of a list.
func (m *cdiCache) of(list []Container) []*cdiEntry {
	m.mu.Lock()
	defer m.mu.Unlock()
	of := make([]*cdiEntry, len(list))
	for i := range list {
		id := list[i].ID
		if m.by[id] == nil {
			m.by[id] = &cdiEntry{id: id}
		}
		of[i] = m.by[id]
	}
	return of
}

// askCDI asks for the statuses of containers whose devices are not known. It asks first for those
// that have waited longest, so that one failing status does not delay another.
func (r *Runtime) askCDI(ctx context.Context, of []*cdiEntry) (gone map[string]bool) {
	m := &r.cdi
	m.mu.Lock()
	due := slices.DeleteFunc(slices.Clone(of), func(c *cdiEntry) bool { return c.known })
	slices.SortStableFunc(due, func(a, b *cdiEntry) int { return cmp.Compare(a.asked, b.asked) })
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
					r.o.Logger.Warn("cannot learn the CDI devices of a container; "+
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

// keep drops all containers that are not in list. A caller with an earlier list still has its own
// pointers to them.
func (m *cdiCache) keep(list []Container) {
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

// devices asks the runtime for the CDI devices of a container.
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

// readInfo finds CDI devices in a status's debugging information, whose format depends on the
// runtime. containerd reports the kubelet's request, and CRI-O the specification that it made from
// it.
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
